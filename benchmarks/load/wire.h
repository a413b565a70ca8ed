/* What replies look like on the wire: HTTP/1.1 with a length or in chunks, and WebSocket frames.
 *
 * Everything here is given bytes that may be incomplete, and says how many of them make a whole; nothing reads or writes.
 * Not here: what a reply must say (loader.c). */
#include <stdlib.h>
#include <string.h>

/* Bytes of the first whole reply in `text`, its body's place and status; 0 while it is incomplete. `text` has room for a
 * byte more. A reply without Content-Length has status -1. */
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

typedef struct { long left; int in_chunk; } Chunks;

/* Moves the data of the chunks in `in` to the end of `out`, and what is incomplete to the beginning of `in`.
 * Returns -1 at the last chunk, and where there is no chunk; the streams of this loader have no end. */
static int dechunk(Chunks *state, char *in, int *length, char *out, int *out_length) {
    int at = 0;
    while (at < *length) {
        if (state->in_chunk && state->left > 0) {
            int part = *length - at < state->left ? *length - at : (int)state->left;
            memcpy(out + *out_length, in + at, part);
            *out_length += part;
            at += part;
            state->left -= part;
        } else if (state->in_chunk) { /* the line's end after the data */
            if (*length - at < 2) break;
            if (memcmp(in + at, "\r\n", 2)) return -1;
            at += 2;
            state->in_chunk = 0;
        } else {
            char *line_end = memchr(in + at, '\n', *length - at);
            if (!line_end) break;
            state->left = strtol(in + at, NULL, 16);
            if (state->left <= 0) return -1;
            state->in_chunk = 1;
            at = (int)(line_end + 1 - in);
        }
    }
    memmove(in, in + at, *length - at);
    *length -= at;
    return 0;
}

/* A client's text frame of `size` bytes, masked with zeros, which leaves the text as it is. Bytes written to `frame`. */
static int text_frame(char *frame, const char *text, int size) {
    int at = 0;
    frame[at++] = (char)0x81;
    if (size < 126) frame[at++] = (char)(0x80 | size);
    else {
        frame[at++] = (char)(0x80 | 126);
        frame[at++] = (char)(size >> 8);
        frame[at++] = (char)size;
    }
    memset(frame + at, 0, 4);
    memcpy(frame + at + 4, text, size);
    return at + 4 + size;
}

/* As `reply_length`, for a server's text frame below 64 KiB; any other frame has status -1. */
static int frame_length(char *frame, int length, char **text, int *status) {
    if (length < 4) return 0;
    int size = frame[1] & 0x7f, head = 2;
    *status = (unsigned char)frame[0] == 0x81 && size < 127 ? 200 : -1;
    if (*status < 0) return length;
    if (size == 126) {
        size = (unsigned char)frame[2] << 8 | (unsigned char)frame[3];
        head = 4;
    }
    *text = frame + head;
    return length >= head + size ? head + size : 0;
}
