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
 * Loads: closed loop (rate 0), or paced, where latency counts from the moment a request was
 * due, so a slow server cannot hide by delaying the next one. CPU time of the given processes is read here, at the
 * very edges of the measured window.
 *
 * Prints one line of JSON. Exit 2: wrong use; 1: the load could not be set up (one line on stderr).
 * Not here: starting servers, ratios, rounds (benchmarks/forwarding). Linux only (epoll, timerfd).
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { MAX_CONNECTIONS = 1024, MAX_WORKERS = 16, MAX_PIDS = 64, BUFFER = 16384, NAME = 64, BURST = 16, BUSY = 24 };
enum { REPLY_SECONDS = 10, MAX_DIALS = 20000, MAX_LATENCIES = 1 << 22 };

typedef struct {
    char *request;    /* the whole GET /step, with this session's cookies */
    char id[NAME];
    int owner;        /* index into workers */
    long count;       /* steps answered so far; -1: unknown, after a lost reply */
} Session;

typedef struct {
    int fd, home;     /* home: the worker this connection reaches; -1 behind a proxy */
    int busy, current, turn;
    int *sessions;    /* the sessions this connection asks for, in turn */
    char in[BUFFER];
    int length;
    double asked_at, due_at;
} Connection;

static struct { int port, connections, workers, per_connection, behind_proxy, gymnasium, npids; double seconds, warm, rate;
                const char *mode; pid_t pids[MAX_PIDS]; } want = {.connections = 32, .workers = 1, .per_connection = 1,
                .seconds = 2, .warm = 0.3, .mode = "local"};
static Connection connections[MAX_CONNECTIONS];
static Session *sessions;
static int nsessions;
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
    if (++dials > MAX_DIALS) fail("%ld connections did not reach every worker", dials);
    return fd;
}

/* Bytes of the first whole reply in `text`, its body's place and status; 0 while it is incomplete. */
static int reply_length(char *text, int length, char **body, int *status) {
    text[length] = 0;
    char *end = strstr(text, "\r\n\r\n");
    if (!end) return 0;
    char *field = strcasestr(text, "\r\ncontent-length:");
    if (!field || field > end) { *status = -1; return length; }
    int total = (int)(end + 4 - text) + atoi(field + 17);
    *body = end + 4;
    *status = atoi(text + 9);
    return length >= total ? total : 0;
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
static const char *STEP = "GET /step HTTP/1.1\r\nHost: localhost\r\nUser-Agent: loader\r\nAccept: */*\r\n"
                          "Cookie: %s\r\n\r\n";

static void speak_gymnasium(void) {
    WHOAMI = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n";
    START = "POST /reset HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}";
    STEP = "POST /step HTTP/1.1\r\nHost: localhost\r\nUser-Agent: loader\r\nAccept: */*\r\nCookie: %s\r\n"
           "x-ng-close-follows: 1\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n{\"action\":1}";
}

/* Makes a session over `fd` and writes its GET /step; returns its number. */
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
    if (asprintf(&session->request, STEP, cookies) < 0) fail("out of memory");
#pragma GCC diagnostic pop
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
        if (now() > deadline) fail("after %ld connections %d are still missing at some worker", dials, missing);
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

static void add_session(Connection *c, int session) {
    c->sessions[c->turn++] = session;
}

/* Opens the connections, makes the sessions, and says which connection asks for which. */
static void set_up(void) {
    int inter = !strcmp(want.mode, "inter"), remote = !strcmp(want.mode, "remote");
    int per = want.per_connection;
    sessions = calloc((size_t)want.connections * per, sizeof *sessions);
    for (int i = 0; i < want.connections; i++) connections[i].sessions = calloc(per, sizeof(int));
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
            /* An unrouted new session belongs to the worker that its first request reaches. */
            int w = (connections[i].home + (inter ? s : remote)) % want.workers;
            int session = start_session(kept[w][0]);
            if (sessions[session].owner != w) fail("worker %s owns a session started at %s",
                                                   workers[sessions[session].owner], workers[w]);
            add_session(&connections[i], session);
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

static void ask(Connection *c, double due) {
    c->current = c->sessions[c->turn++ % want.per_connection];
    c->asked_at = due ? due : now();
    c->busy = 1;
    c->length = 0;
    const char *request = sessions[c->current].request;
    size_t length = strlen(request);
    if (write(c->fd, request, length) != (ssize_t)length) errors++; /* its read says the rest */
}

/* Counts one reply. A session's count is exact: it fails if a step ran twice, was lost, or ran elsewhere. */
static void judge(Connection *c, int status, const char *body, int length) {
    Session *session = &sessions[c->current];
    char expected[512];
    replies++;
    if (nlatencies < MAX_LATENCIES) latencies[nlatencies++] = (float)(now() - c->asked_at);
    if (status != 200) { errors++; session->count = -1; return; }
    if (session->count < 0) { /* resumes after a reply that was lost */
        const char *key = want.gymnasium ? "\"observation\":[" : "\"count\":", *count = strstr(body, key);
        session->count = count ? atol(count + strlen(key)) - 1 : 0;
    }
    int size = want.gymnasium ? snprintf(expected, sizeof expected, "{\"observation\":[%ld.0],", ++session->count) : snprintf(expected, sizeof expected, "{\"session\":\"%s\",\"count\":%ld,\"worker\":\"%s\"}", session->id,
                        ++session->count, workers[session->owner]);
    if ((want.gymnasium ? size > length : size != length) || memcmp(expected, body, size)) { wrong++; session->count = -1; }
    crossed += c->home >= 0 && c->home != session->owner;
}

static void watch(int epoll, int i) {
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = i};
    fcntl(connections[i].fd, F_SETFL, O_NONBLOCK);
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, connections[i].fd, &event) < 0) fail("epoll: %s", strerror(errno));
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
    int epoll = epoll_create1(EPOLL_CLOEXEC), timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    struct epoll_event clock = {.events = EPOLLIN, .data.u32 = MAX_CONNECTIONS}, events[256];
    epoll_ctl(epoll, EPOLL_CTL_ADD, timer, &clock);
    double begin = now(), measured_from = begin + want.warm, end = measured_from + want.seconds, started = 0;
    double between = want.rate > 0 ? want.connections / want.rate : 0, cpu = 0, own = 0;
    for (int i = 0; i < want.connections; i++) {
        watch(epoll, i);
        connections[i].due_at = begin + between * i / want.connections;
        if (!between) ask(&connections[i], 0);
    }
    for (double t; (t = now()) < end;) {
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
            if (c->busy) continue;
            if (c->due_at <= t) { ask(c, c->due_at); c->due_at += between; }
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
            Connection *c = &connections[events[e].data.u32];
            ssize_t got = read(c->fd, c->in + c->length, BUFFER - 1 - c->length);
            if (got < 0 && errno == EAGAIN) continue;
            if (got <= 0) { /* the step's outcome is unknown; a new connection may reach another worker */
                errors++;
                sessions[c->current].count = -1;
                close(c->fd);
                c->fd = dial();
                c->home = -1;
                c->busy = 0;
                watch(epoll, events[e].data.u32);
                if (!between) ask(c, 0);
                continue;
            }
            c->length += got;
            char *body = c->in;
            int status, whole = reply_length(c->in, c->length, &body, &status);
            if (!whole) continue;
            if (!c->busy || c->length != whole) { errors++; c->length = 0; continue; } /* a reply nobody asked for */
            judge(c, status, body, (int)(c->in + whole - body));
            c->busy = 0;
            c->length = 0;
            if (!between) ask(c, 0);
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
          "              [--behind-proxy: do not choose workers] [--gymnasium] [--pid PID]...\n", stderr);
    exit(2);
}

int main(int argc, char **argv) {
    static const struct option options[] = {
        {"port", 1, 0, 'p'}, {"connections", 1, 0, 'c'}, {"seconds", 1, 0, 's'}, {"warm", 1, 0, 'w'},
        {"rate", 1, 0, 'r'}, {"workers", 1, 0, 'n'}, {"mode", 1, 0, 'm'}, {"sessions-per-connection", 1, 0, 'k'},
        {"behind-proxy", 0, 0, 'b'}, {"pid", 1, 0, 'i'},
        {"gymnasium", 0, 0, 'g'}, {0, 0, 0, 0}};
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
        case 'i': if (want.npids < MAX_PIDS) want.pids[want.npids++] = atoi(optarg); break;
        default: usage();
    }
    if (optind < argc || want.port < 1 || want.connections < 1 || want.connections > MAX_CONNECTIONS ||
        want.workers < 1 || want.workers > MAX_WORKERS || want.per_connection < 1 || want.per_connection > 4096 ||
        want.seconds <= 0 || (strcmp(want.mode, "local") && strcmp(want.mode, "remote") && strcmp(want.mode, "inter")))
        usage();
    if (want.gymnasium) speak_gymnasium();
    latencies = malloc(MAX_LATENCIES * sizeof *latencies);
    set_up();
    shuffle();
    run();
    return 0;
}
