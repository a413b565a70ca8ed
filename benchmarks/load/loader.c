/* A load generator for servers that keep sessions: which worker a connection reaches, and whose session it asks for,
 * are under its control; every reply is compared byte by byte with what that session's owner must say.
 *
 * The server answers
 *   GET /whoami  {"worker":"W"}                        names no session
 *   GET /start   {"session":"S","count":0,"worker":"W"} and Set-Cookie: a new session
 *   GET /step    {"session":"S","count":N,"worker":"W"} the session's N-th step
 * each with Content-Length; or, with --gymnasium, as a Gymnasium server does:
 *   GET /healthz {…,"worker":"W"…}
 *   POST /reset  {…,"session_id":"S",…} and Set-Cookie; the owner in x-ng-session-owner, or none
 *   POST /step   {"observation":[N.0],…} for an environment that counts its steps, with the action 1
 * Kinds of exchange:
 *   step       GET /step over kept connections
 *   fresh      the same, each over a connection of its own; latency counts from before it is opened
 *   echo       POST /echo with a body of --body bytes; the reply is a step's, with that body after it
 *   events     GET /events?every=--every, an endless stream of Server-Sent Events in chunks, each
 *              data: {"session":"S","count":N,"worker":"W","at":T}   its N-th event, at T on the monotonic clock
 *              where an event counts as a reply, and latency is what passed since T
 *   websocket  GET /ws, then text messages of --body bytes, answered with a step's JSON and the message after it
 * Loads: closed loop (rate 0), or paced, where latency counts from the moment a request was
 * due, so a slow server cannot hide by delaying the next one. CPU time of the given processes is read here, at the
 * very edges of the measured window.
 *
 * Prints one line of JSON. Exit 2: wrong use; 1: the load could not be set up (one line on stderr).
 * Not here: what replies look like on the wire (wire.h); starting servers, ratios, rounds (benchmarks/forwarding). Linux only (epoll, timerfd).
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>
#include "wire.h"

enum { MAX_CONNECTIONS = 1024, MAX_WORKERS = 16, MAX_PIDS = 64, BUFFER = 16384, NAME = 64, BURST = 16, BUSY = 24 };
enum { REPLY_SECONDS = 10, MAX_DIALS = 20000, MAX_LATENCIES = 1 << 22, MAX_BODY = 1 << 24, MAX_FRAME = 1 << 15 };
enum { MAX_STARTS = 4096 };

typedef enum { STEP, FRESH, ECHO, EVENTS, WEBSOCKET, KINDS } Kind;
static const char *const KIND_NAMES[KINDS] = {"step", "fresh", "echo", "events", "websocket"};

typedef struct {
    char *request;    /* the whole request, with this session's cookies; a WebSocket's opening one */
    int size;
    char id[NAME];
    int owner;        /* index into workers */
    long count;       /* steps answered so far; -1: unknown, after a lost reply */
} Session;

typedef struct {
    int fd, home;     /* home: the worker this connection reaches; -1 behind a proxy */
    int busy, current, turn;
    int *sessions;    /* the sessions this connection asks for, in turn */
    char *in, *text;  /* text: of events, without the chunks around them */
    int length, text_length, waits_to_write;
    const char *out;  /* what is still to be written */
    int left;
    long events;      /* of this stream; 0: its head has not come yet */
    Chunks chunks;
    double asked_at, due_at;
} Connection;

static struct { int port, connections, workers, per_connection, behind_proxy, gymnasium, body, npids; double seconds, warm, rate, every;
                const char *mode; Kind kind; pid_t pids[MAX_PIDS]; } want = {.connections = 32, .workers = 1, .per_connection = 1,
                .seconds = 2, .warm = 0.3, .mode = "local"};
static Connection connections[MAX_CONNECTIONS];
static Session *sessions;
static int nsessions, spare[MAX_WORKERS][MAX_STARTS], nspare[MAX_WORKERS], epoll;
static char *payload;      /* `want.body` bytes that go both ways */
static char frame[MAX_FRAME + 16];
static int frame_size;
static char workers[MAX_WORKERS][NAME];
static int nworkers;
static float *latencies;
static long nlatencies, replies, errors, wrong, crossed, dials;

static void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("loader: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static double own_cpu(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* CPU seconds, user and system, of the given processes, all their threads, and the children they have waited for. */
static double cpu_of_servers(void) {
    double total = 0;
    for (int i = 0; i < want.npids; i++) {
        char path[64], line[1024];
        snprintf(path, sizeof path, "/proc/%d/stat", want.pids[i]);
        FILE *file = fopen(path, "r");
        if (!file || !fgets(line, sizeof line, file)) fail("process %d of the server has gone", want.pids[i]);
        fclose(file);
        unsigned long user, system;
        long waited_user, waited_system;
        char *fields = strrchr(line, ')'); /* a command name may hold spaces and brackets */
        if (!fields || sscanf(fields + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu %ld %ld",
                              &user, &system, &waited_user, &waited_system) != 4) fail("cannot read %s", path);
        double ticks = sysconf(_SC_CLK_TCK), own = (user + system) / ticks;
        clockid_t clock;
        struct timespec t; /* the same sum in nanoseconds where the kernel gives it: a tick is 10 ms, too coarse */
        if (clock_getcpuclockid(want.pids[i], &clock) == 0 && clock_gettime(clock, &t) == 0)
            own = t.tv_sec + t.tv_nsec * 1e-9;
        total += own + (waited_user + waited_system) / ticks;
    }
    return total;
}

static int dial(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(want.port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    if (fd < 0 || connect(fd, (void *)&address, sizeof address) < 0)
        fail("cannot connect to 127.0.0.1:%d: %s", want.port, strerror(errno));
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

static void put(int fd, const char *text) {
    size_t length = strlen(text);
    if (write(fd, text, length) != (ssize_t)length) fail("the server does not take a request: %s", strerror(errno));
}

/* Waits for one reply; what follows it stays in `in`. */
static void take(int fd, char *in, int *length, char *reply) {
    double deadline = now() + REPLY_SECONDS;
    for (;;) {
        char *body;
        int status, whole = *length ? reply_length(in, *length, &body, &status) : 0;
        if (whole) {
            if (status != 200) fail("status %d while the load was set up", status);
            memcpy(reply, in, whole);
            reply[whole] = 0;
            memmove(in, in + whole, *length - whole);
            *length -= whole;
            return;
        }
        struct pollfd wait = {.fd = fd, .events = POLLIN};
        double left = deadline - now();
        if (left <= 0 || poll(&wait, 1, (int)(left * 1000) + 1) <= 0) fail("no reply within %d s", REPLY_SECONDS);
        ssize_t got = read(fd, in + *length, BUFFER - 1 - *length);
        if (got <= 0) fail("the server closed a connection while the load was set up");
        *length += got;
    }
}

/* Text of a JSON string field of a reply of the app: compact JSON, no escapes. */
static void field(const char *reply, const char *name, char *value) {
    char key[32];
    snprintf(key, sizeof key, "\"%s\":\"", name);
    const char *from = strstr(reply, key), *to = from ? strchr(from += strlen(key), '"') : NULL;
    if (!to || to - from >= NAME) fail("a reply without a usable field %s", name);
    memcpy(value, from, to - from);
    value[to - from] = 0;
}

static int worker_of(const char *reply) {
    char name[NAME];
    const char *owner = want.gymnasium ? strcasestr(reply, "\r\nx-ng-session-owner: ") : NULL;
    if (owner) {
        int size = (int)strcspn(owner += 22, "\r");
        if (size >= NAME) fail("a worker's name is too long");
        memcpy(name, owner, size);
        name[size] = 0;
    } else if (want.gymnasium && !strstr(reply, "\"worker\":\"")) strcpy(name, "the only one");
    else field(reply, "worker", name);
    int i = 0;
    while (i < nworkers && strcmp(workers[i], name)) i++;
    if (i == MAX_WORKERS) fail("more than %d workers", MAX_WORKERS);
    if (i == nworkers) strcpy(workers[nworkers++], name);
    return i;
}

static const char *WHOAMI = "GET /whoami HTTP/1.1\r\nHost: localhost\r\n\r\n";
static const char *START = "GET /start HTTP/1.1\r\nHost: localhost\r\n\r\n";
static const char *REQUEST = "GET /step HTTP/1.1\r\nHost: localhost\r\nUser-Agent: loader\r\nAccept: */*\r\n"
                             "Cookie: %s\r\n\r\n";

static void speak_gymnasium(void) {
    WHOAMI = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n";
    START = "POST /reset HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}";
    REQUEST = "POST /step HTTP/1.1\r\nHost: localhost\r\nUser-Agent: loader\r\nAccept: */*\r\nCookie: %s\r\n"
           "x-ng-close-follows: 1\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n{\"action\":1}";
}

/* The request of the wanted kind, with a place for the session's cookies. */
static void prepare(void) {
    static char request[1024];
    char line[128] = "GET /step", more[256] = "";
    if (want.gymnasium) { speak_gymnasium(); return; }
    switch (want.kind) {
    case STEP: case KINDS: return;
    case FRESH: strcpy(more, "Connection: close\r\n"); break;
    case EVENTS: snprintf(line, sizeof line, "GET /events?every=%g", want.every); break;
    case ECHO:
        strcpy(line, "POST /echo");
        snprintf(more, sizeof more, "Content-Type: application/octet-stream\r\nContent-Length: %d\r\n", want.body);
        break;
    case WEBSOCKET:
        strcpy(line, "GET /ws");
        strcpy(more, "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
                     "Sec-WebSocket-Key: bG9hZGVyIGxvYWRlciEhIQ==\r\n");
        frame_size = text_frame(frame, payload, want.body);
    }
    snprintf(request, sizeof request, "%s HTTP/1.1\r\nHost: localhost\r\nUser-Agent: loader\r\nAccept: */*\r\n%s"
                                      "Cookie: %%s\r\n\r\n", line, more);
    REQUEST = request;
}

/* Makes a session over `fd` and writes its request; returns its number. */
static int start_session(int fd) {
    char in[BUFFER], reply[BUFFER], cookies[4096] = "";
    int length = 0;
    put(fd, START);
    take(fd, in, &length, reply);
    char *head_end = strstr(reply, "\r\n\r\n");
    for (char *at = reply; (at = strcasestr(at, "\r\nset-cookie:")) && at < head_end;) {
        at += 13;
        while (*at == ' ') at++;
        int size = (int)strcspn(at, ";\r");
        snprintf(cookies + strlen(cookies), sizeof cookies - strlen(cookies), "%s%.*s", *cookies ? "; " : "", size, at);
    }
    if (!*cookies) fail("/start set no cookie");
    Session *session = &sessions[nsessions];
    field(reply, want.gymnasium ? "session_id" : "session", session->id);
    session->owner = worker_of(reply);
    session->count = 0;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    session->size = asprintf(&session->request, REQUEST, cookies);
#pragma GCC diagnostic pop
    if (session->size < 0) fail("out of memory");
    if (want.kind == ECHO) {
        session->request = realloc(session->request, session->size + want.body);
        memcpy(session->request + session->size, payload, want.body);
        session->size += want.body;
    }
    return nsessions++;
}

/* Opens connections until `needed[w]` of them reach worker w, and puts those, by worker, into `kept[w]`.
 *
 * Workers that share one listening socket race for a connection, and the one that slept longest nearly always wins; so
 * connections are opened in bursts, while the workers that have enough are kept busy over a connection they have. */
static void dial_workers(const int *needed, int kept[][MAX_CONNECTIONS]) {
    int have[MAX_WORKERS] = {0}, missing = 0;
    double deadline = now() + 4 * REPLY_SECONDS;
    for (int w = 0; w < want.workers; w++) missing += needed[w];
    while (missing) {
        int busy[MAX_WORKERS], fds[BURST], length;
        char in[BUFFER], reply[BUFFER];
        if ((dials += BURST) > MAX_DIALS || now() > deadline) fail("after %ld connections %d are still missing at some worker", dials, missing);
        for (int w = 0; w < want.workers; w++)
            if ((busy[w] = have[w] && have[w] == needed[w]))
                for (int i = 0; i < BUSY; i++) put(kept[w][0], WHOAMI);
        for (int i = 0; i < BURST; i++) put(fds[i] = dial(), WHOAMI);
        for (int i = 0; i < BURST; i++) {
            length = 0;
            take(fds[i], in, &length, reply);
            int w = worker_of(reply);
            if (w >= want.workers) fail("more workers answered than the %d expected", want.workers);
            if (have[w] < needed[w]) { kept[w][have[w]++] = fds[i]; missing--; }
            else close(fds[i]);
        }
        for (int w = 0; w < want.workers; w++) {
            length = 0;
            for (int i = 0; busy[w] && i < BUSY; i++) take(kept[w][0], in, &length, reply);
        }
    }
}

/* A new session that worker `w` owns, made over a connection to it. A server may place a new session at another of its
 * workers, which is then kept for who asks for one of that worker; an unrouted one belongs to the worker reached. */
static int start_session_at(int w, int fd) {
    for (int tries = 0; !nspare[w]; tries++) {
        if (tries == MAX_STARTS) fail("none of %d sessions belongs to worker %s", tries, workers[w]);
        int session = start_session(fd), owner = sessions[session].owner;
        if (owner == w) return session;
        if (nspare[owner] == MAX_STARTS) fail("worker %s owns all new sessions", workers[owner]);
        spare[owner][nspare[owner]++] = session;
    }
    return spare[w][--nspare[w]];
}

static void add_session(Connection *c, int session) {
    c->sessions[c->turn++] = session;
}

/* Opens the connections, makes the sessions, and says which connection asks for which. */
static void set_up(void) {
    int inter = !strcmp(want.mode, "inter"), remote = !strcmp(want.mode, "remote");
    int per = want.per_connection;
    sessions = calloc((size_t)want.connections * per + MAX_STARTS, sizeof *sessions);
    for (int i = 0; i < want.connections; i++) {
        connections[i].sessions = calloc(per, sizeof(int));
        connections[i].in = malloc(BUFFER + want.body);
        connections[i].text = malloc(2 * BUFFER);
    }
    if (want.behind_proxy) { /* the proxy chooses a worker for each new session */
        for (int i = 0; i < want.connections; i++) {
            connections[i].home = -1;
            connections[i].fd = dial();
            for (int s = 0; s < per; s++) add_session(&connections[i], start_session(connections[i].fd));
        }
        return;
    }
    static int kept[MAX_WORKERS][MAX_CONNECTIONS];
    int needed[MAX_WORKERS] = {0}, next[MAX_WORKERS] = {0};
    for (int w = 0; w < want.workers; w++) needed[w] = (want.connections + want.workers - 1) / want.workers;
    dial_workers(needed, kept);
    for (int i = 0; i < want.connections; i++) {
        int w = i % want.workers;
        connections[i].home = w;
        connections[i].fd = kept[w][next[w]++];
    }
    for (int i = 0; i < want.connections; i++)
        for (int s = 0; s < per; s++) {
            int w = (connections[i].home + (inter ? s : remote)) % want.workers;
            add_session(&connections[i], start_session_at(w, kept[w][0]));
        }
    for (int w = 0; w < want.workers; w++)
        for (int i = next[w]; i < needed[w]; i++) close(kept[w][i]);
}

/* Each connection meets its sessions in an order of its own, the same in every run. */
static void shuffle(void) {
    unsigned state = 1;
    for (int i = 0; i < want.connections; i++) {
        for (int s = want.per_connection - 1; s > 0; s--) {
            int *order = connections[i].sessions, other = (int)((state = state * 1664525u + 1013904223u) >> 8) % (s + 1);
            int held = order[s];
            order[s] = order[other];
            order[other] = held;
        }
        connections[i].turn = 0;
    }
}

/* Writes what it can of what is left; the loop comes back here when the socket takes more. */
static void push(Connection *c, int number) {
    while (c->left > 0) {
        ssize_t done = write(c->fd, c->out, c->left);
        if (done < 0 && errno == EAGAIN) break;
        if (done < 0) { c->left = 0; break; } /* its read says what became of it */
        c->out += done;
        c->left -= done;
    }
    if (c->waits_to_write == (c->left > 0)) return;
    c->waits_to_write = c->left > 0;
    struct epoll_event event = {.events = EPOLLIN | (c->waits_to_write ? EPOLLOUT : 0), .data.u32 = number};
    epoll_ctl(epoll, EPOLL_CTL_MOD, c->fd, &event);
}

static void watch(int number) {
    Connection *c = &connections[number];
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = number};
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, c->fd, &event) < 0) fail("epoll: %s", strerror(errno));
    c->waits_to_write = c->left = 0;
}

/* A new connection, which may reach another worker than the one before. */
static void dial_anew(int number) {
    Connection *c = &connections[number];
    close(c->fd);
    c->fd = dial();
    c->home = -1;
    c->busy = c->length = 0;
}

/* Opens the WebSocket of this connection's session, and waits until it is open. */
static void open_websocket(Connection *c) {
    char head[BUFFER];
    int length = 0;
    Session *session = &sessions[c->sessions[0]];
    if (write(c->fd, session->request, session->size) != session->size) fail("the server does not take a WebSocket");
    while (!length || !strstr(head, "\r\n\r\n")) {
        struct pollfd wait = {.fd = c->fd, .events = POLLIN};
        if (poll(&wait, 1, REPLY_SECONDS * 1000) <= 0) fail("no WebSocket within %d s", REPLY_SECONDS);
        ssize_t got = read(c->fd, head + length, BUFFER - 1 - length);
        if (got <= 0) fail("the server closed a WebSocket before it was open");
        head[length += (int)got] = 0;
    }
    if (strncmp(head + 9, "101", 3)) fail("status %.3s for a WebSocket", head + 9);
}

static void ask(int number, double due) {
    Connection *c = &connections[number];
    c->current = c->sessions[c->turn++ % want.per_connection];
    c->asked_at = due ? due : now();
    if (want.kind == FRESH && c->busy < 0) {
        dial_anew(number);
        watch(number);
    }
    c->busy = 1;
    c->length = c->text_length = 0;
    c->events = 0;
    c->chunks = (Chunks){0};
    c->out = want.kind == WEBSOCKET ? frame : sessions[c->current].request;
    c->left = want.kind == WEBSOCKET ? frame_size : sessions[c->current].size;
    push(c, number);
}

static void note_latency(double seconds) {
    replies++;
    if (nlatencies < MAX_LATENCIES) latencies[nlatencies++] = (float)seconds;
}

/* Counts one reply. A session's count is exact: it fails if a step ran twice, was lost, or ran elsewhere. */
static void judge(Connection *c, int status, const char *body, int length) {
    Session *session = &sessions[c->current];
    char expected[512];
    note_latency(now() - c->asked_at);
    if (status != 200) { errors++; session->count = -1; return; }
    if (session->count < 0) { /* resumes after a reply that was lost */
        const char *key = want.gymnasium ? "\"observation\":[" : "\"count\":", *count = strstr(body, key);
        session->count = count ? atol(count + strlen(key)) - 1 : 0;
    }
    int size = want.gymnasium ? snprintf(expected, sizeof expected, "{\"observation\":[%ld.0],", ++session->count) : snprintf(expected, sizeof expected, "{\"session\":\"%s\",\"count\":%ld,\"worker\":\"%s\"}", session->id,
                        ++session->count, workers[session->owner]);
    if ((want.gymnasium ? size > length : size + want.body != length) || memcmp(expected, body, size) ||
        memcmp(payload, body + size, want.body)) { wrong++; session->count = -1; }
    crossed += c->home >= 0 && c->home != session->owner;
}

/* Counts the events that have come whole; 0 if the stream broke. */
static int judge_events(Connection *c) {
    Session *session = &sessions[c->current];
    if (!c->events) {
        c->in[c->length] = 0;
        char *end = strstr(c->in, "\r\n\r\n");
        if (!end) return 1;
        if (atoi(c->in + 9) != 200 || !strcasestr(c->in, "\r\ntransfer-encoding: chunked")) return 0;
        c->events = 1;
        c->length -= (int)(end + 4 - c->in);
        memmove(c->in, end + 4, c->length);
    }
    if (dechunk(&c->chunks, c->in, &c->length, c->text, &c->text_length) < 0) return 0;
    if (c->text_length > BUFFER) return 0; /* no end of an event in all that */
    char expected[512], *at = c->text, *end;
    c->text[c->text_length] = 0;
    for (; (end = strstr(at, "\n\n")); at = end + 2) {
        int size = snprintf(expected, sizeof expected, "data: {\"session\":\"%s\",\"count\":%ld,\"worker\":\"%s\",\"at\":",
                            session->id, c->events++, workers[session->owner]);
        if (strncmp(at, expected, size)) { wrong++; replies++; continue; }
        note_latency(now() - atof(at + size));
        crossed += c->home >= 0 && c->home != session->owner;
    }
    c->text_length -= (int)(at - c->text);
    memmove(c->text, at, c->text_length);
    return 1;
}

static void arm(int timer, double at) {
    struct itimerspec when = {.it_value = {.tv_sec = (long)at, .tv_nsec = (long)((at - (long)at) * 1e9)}};
    timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, NULL);
}

static int by_value(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double percentile(double p) {
    return nlatencies ? latencies[(long)((nlatencies - 1) * p)] * 1e6 : 0;
}

static void run(void) {
    epoll = epoll_create1(EPOLL_CLOEXEC);
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    struct epoll_event clock = {.events = EPOLLIN, .data.u32 = MAX_CONNECTIONS}, events[256];
    epoll_ctl(epoll, EPOLL_CTL_ADD, timer, &clock);
    double begin = now(), measured_from = begin + want.warm, end = measured_from + want.seconds, started = 0;
    double between = want.rate > 0 ? want.connections / want.rate : 0, cpu = 0, own = 0;
    for (int i = 0; i < want.connections; i++) {
        if (want.kind == WEBSOCKET) open_websocket(&connections[i]);
        watch(i);
        connections[i].due_at = begin + between * i / want.connections;
        if (!between) ask(i, 0);
    }
    /* A server that is slow beyond measure is measured until its first reply: nothing can be told of none. */
    for (double t; (t = now()) < end || (!replies && t < end + REPLY_SECONDS);) {
        if (!started && t >= measured_from) {
            nlatencies = replies = errors = wrong = crossed = 0;
            cpu = cpu_of_servers();
            own = own_cpu();
            started = t = now();
            end = started + want.seconds;
        }
        double next = started ? end : measured_from;
        for (int i = 0; between && i < want.connections; i++) {
            Connection *c = &connections[i];
            if (c->busy > 0) continue;
            if (c->due_at <= t) { ask(i, c->due_at); c->due_at += between; }
            else if (c->due_at < next) next = c->due_at;
        }
        arm(timer, next);
        int ready = epoll_wait(epoll, events, 256, 1000);
        for (int e = 0; e < ready; e++) {
            if (events[e].data.u32 == MAX_CONNECTIONS) { /* only wakes this loop */
                uint64_t expirations;
                if (read(timer, &expirations, sizeof expirations) < 0 && errno != EAGAIN) fail("timerfd");
                continue;
            }
            int number = (int)events[e].data.u32;
            Connection *c = &connections[number];
            if (events[e].events & EPOLLOUT) push(c, number);
            ssize_t got = read(c->fd, c->in + c->length, BUFFER - 1 + (want.kind == ECHO ? want.body : 0) - c->length);
            if (got < 0 && errno == EAGAIN) continue;
            if (got > 0) c->length += (int)got;
            if (want.kind == EVENTS && got > 0 && judge_events(c)) continue;
            if (got <= 0 || want.kind == EVENTS) { /* the outcome is unknown */
                errors++;
                sessions[c->current].count = -1;
                dial_anew(number);
                if (want.kind == WEBSOCKET) open_websocket(c);
                watch(number);
                if (!between) ask(number, 0);
                continue;
            }
            char *body = c->in;
            int status, whole = (want.kind == WEBSOCKET ? frame_length : reply_length)(c->in, c->length, &body, &status);
            if (!whole) continue;
            if (c->busy <= 0 || c->length != whole) { errors++; c->length = 0; continue; } /* a reply nobody asked for */
            judge(c, status, body, (int)(c->in + whole - body));
            c->busy = want.kind == FRESH ? -1 : 0;
            c->length = 0;
            if (!between) ask(number, 0);
        }
    }
    double seconds = now() - started;
    cpu = cpu_of_servers() - cpu;
    own = own_cpu() - own;
    qsort(latencies, nlatencies, sizeof *latencies, by_value);
    printf("{\"replies\":%ld,\"errors\":%ld,\"wrong\":%ld,\"seconds\":%.4f,\"requests_per_second\":%.1f,"
           "\"p50_us\":%.1f,\"p99_us\":%.1f,\"cpu_us\":%.2f,\"server_cpu_seconds\":%.4f,"
           "\"loader_cpu_seconds\":%.4f,\"crossed\":%ld,\"dials\":%ld,\"workers\":[",
           replies, errors, wrong, seconds, replies / seconds, percentile(.5), percentile(.99),
           replies ? cpu / replies * 1e6 : 0, cpu, own, crossed, dials);
    for (int w = 0; w < nworkers; w++) printf("%s\"%s\"", w ? "," : "", workers[w]);
    puts("]}");
}

static void usage(void) {
    fputs("usage: loader --port N [--connections 32] [--seconds 2] [--warm 0.3] [--rate 0: closed loop]\n"
          "              [--workers 1] [--mode local|remote|inter] [--sessions-per-connection 1]\n"
          "              [--kind step|fresh|echo|events|websocket] [--body BYTES] [--every SECONDS between events]\n"
          "              [--behind-proxy: do not choose workers] [--gymnasium] [--pid PID]...\n", stderr);
    exit(2);
}

int main(int argc, char **argv) {
    static const struct option options[] = {
        {"port", 1, 0, 'p'}, {"connections", 1, 0, 'c'}, {"seconds", 1, 0, 's'}, {"warm", 1, 0, 'w'},
        {"rate", 1, 0, 'r'}, {"workers", 1, 0, 'n'}, {"mode", 1, 0, 'm'}, {"sessions-per-connection", 1, 0, 'k'},
        {"behind-proxy", 0, 0, 'b'}, {"pid", 1, 0, 'i'},
        {"gymnasium", 0, 0, 'g'}, {"kind", 1, 0, 'x'}, {"body", 1, 0, 'o'}, {"every", 1, 0, 'e'}, {0, 0, 0, 0}};
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) switch (option) {
        case 'p': want.port = atoi(optarg); break;
        case 'c': want.connections = atoi(optarg); break;
        case 's': want.seconds = atof(optarg); break;
        case 'w': want.warm = atof(optarg); break;
        case 'r': want.rate = atof(optarg); break;
        case 'n': want.workers = atoi(optarg); break;
        case 'm': want.mode = optarg; break;
        case 'k': want.per_connection = atoi(optarg); break;
        case 'b': want.behind_proxy = 1; break;
        case 'g': want.gymnasium = 1; break;
        case 'o': want.body = atoi(optarg); break;
        case 'e': want.every = atof(optarg); break;
        case 'x':
            for (want.kind = STEP; want.kind < KINDS && strcmp(optarg, KIND_NAMES[want.kind]);) want.kind++;
            break;
        case 'i': if (want.npids < MAX_PIDS) want.pids[want.npids++] = atoi(optarg); break;
        default: usage();
    }
    if (optind < argc || want.port < 1 || want.connections < 1 || want.connections > MAX_CONNECTIONS ||
        want.workers < 1 || want.workers > MAX_WORKERS || want.per_connection < 1 || want.per_connection > 4096 ||
        want.seconds <= 0 || want.kind == KINDS || (want.gymnasium && want.kind) || want.body < 0 ||
        want.body > (want.kind == ECHO ? MAX_BODY : want.kind == WEBSOCKET ? MAX_FRAME : 0) || want.every < 0 ||
        (want.kind == WEBSOCKET && want.per_connection > 1) || (want.rate && (want.kind == FRESH || want.kind == EVENTS)) || (strcmp(want.mode, "local") && strcmp(want.mode, "remote") && strcmp(want.mode, "inter")))
        usage();
    signal(SIGPIPE, SIG_IGN);
    payload = malloc(want.body + 1);
    for (int i = 0; i < want.body; i++) payload[i] = (char)('a' + i % 26);
    prepare();
    latencies = malloc(MAX_LATENCIES * sizeof *latencies);
    set_up();
    shuffle();
    run();
    return 0;
}
