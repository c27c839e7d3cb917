/* buffer.h - bytes that grow, and whole files in them */
#ifndef MPT_EXAMPLES_BUFFER_H
#define MPT_EXAMPLES_BUFFER_H

#include "common/cli.h"

typedef struct byte_buffer {
    uint8_t *data; /* [capacity], size bytes used */
    size_t size, capacity;
} byte_buffer;

CLI_FN bool byte_buffer_reserve(byte_buffer *b, size_t capacity) { /* false: no memory */
    uint8_t *data;

    if (capacity <= b->capacity) return true;
    if (capacity < b->capacity + b->capacity / 2) capacity = b->capacity + b->capacity / 2;
    if (capacity < 4096) capacity = 4096;
    data = (uint8_t *)realloc(b->data, capacity);
    if (!data) return false;
    b->data = data;
    b->capacity = capacity;
    return true;
}

CLI_FN void byte_buffer_free(byte_buffer *b) {
    free(b->data);
    memset(b, 0, sizeof *b);
}

enum { BYTE_BUFFER_MESSAGE = 600 };

/* A whole file of at most `limit` bytes, and a zero behind it, which doesn't count. What was in the
   buffer is lost, its memory is used again. False: `why` says so, with the path. */
CLI_FN bool byte_buffer_read(byte_buffer *b, const char *path, size_t limit,
                             char why[BYTE_BUFFER_MESSAGE]) {
    enum { BLOCK = 65536 };
    FILE *f = fopen(path, "rb");
    size_t n = 1;

    b->size = 0;
    if (!f) {
        snprintf(why, BYTE_BUFFER_MESSAGE, "%s: can't open it: %s", path, cli_errno_text(errno));
        return false;
    }
    why[0] = 0;
    while (n > 0 && !why[0]) {
        if (!byte_buffer_reserve(b, b->size + BLOCK)) {
            snprintf(why, BYTE_BUFFER_MESSAGE, "%s: no memory to read it", path);
            break;
        }
        n = fread(b->data + b->size, 1, b->capacity - b->size - 1, f);
        b->size += n;
        b->data[b->size] = 0;
        if (ferror(f))
            snprintf(why, BYTE_BUFFER_MESSAGE, "%s: can't read it: %s", path,
                     cli_errno_text(errno));
        else if (b->size > limit)
            snprintf(why, BYTE_BUFFER_MESSAGE, "%s: larger than %zu bytes", path, limit);
    }
    fclose(f);
    return !why[0];
}

#endif /* MPT_EXAMPLES_BUFFER_H */
