/* space.h - memory where a backend computes, the host's or a device's: pieces of it, numbers in it,
   and waiting until operators that were begun are done */
#ifndef MPT_BENCH_SPACE_H
#define MPT_BENCH_SPACE_H

#include "bench/measure.h"
#include "common/network.h"

enum { BENCH_ALIGNMENT = 256 };

typedef struct bench_space {
    mpt_ctx *ctx;
    const mpt_backend *backend;
    void *self;    /* of the backend */
    uint8_t *base; /* [size], handed out front to back */
    size_t size, used;
} bench_space;

static bool bench_space_on_device(const bench_space *m) {
    return m->backend->alloc != NULL;
}

static void bench_space_close(bench_space *m) {
    if (m->base && bench_space_on_device(m)) m->backend->free(m->self, m->base);
    else free(m->base);
    if (m->self) m->backend->close(m->self);
    memset(m, 0, sizeof *m);
}

/* Opens a backend of its own on the place where the context computes. */
static int bench_space_open(mpt_ctx *ctx, int device, bench_space *m) {
    memset(m, 0, sizeof *m);
    m->ctx = ctx;
    m->backend = device == NETWORK_CUDA ? mpt_backend_cuda() : mpt_backend_cpu();
    return m->backend->open(ctx, 0, &m->self) ? bench_fail(ctx) : 0;
}

static size_t bench_space_round(size_t bytes) {
    return (bytes + BENCH_ALIGNMENT - 1) / BENCH_ALIGNMENT * BENCH_ALIGNMENT;
}

/* bytes: the sum of all pieces, each rounded up. */
static int bench_space_allocate(bench_space *m, size_t bytes) {
    void *base = NULL;

    m->size = bytes > 0 ? bytes : BENCH_ALIGNMENT;
    if (bench_space_on_device(m)) {
        if (m->backend->alloc(m->self, m->size, &base)) return bench_fail(m->ctx);
    } else {
        if (posix_memalign(&base, BENCH_ALIGNMENT, m->size))
            return cli_error("bench", CLI_EXIT_FAILURE, "no memory for %zu bytes", m->size);
        memset(base, 0, m->size); /* pages that were never written are all one page */
    }
    m->base = (uint8_t *)base;
    return 0;
}

static void *bench_space_take(bench_space *m, size_t bytes) {
    uint8_t *piece = m->base + m->used;

    m->used += bench_space_round(bytes);
    return piece;
}

static void bench_convert(const float *from, size_t n, mpt_dtype dtype, uint8_t *to) {
    uint16_t half;
    size_t i;

    if (dtype == MPT_F32) memcpy(to, from, n * sizeof *from);
    for (i = 0; i < n && dtype != MPT_F32; i++) {
        half = dtype == MPT_F16 ? mpt_f32_to_f16(from[i]) : mpt_f32_to_bf16(from[i]);
        memcpy(to + i * sizeof half, &half, sizeof half);
    }
}

/* Numbers from -1 to 1, the same in each run. */
static void bench_floats(float *x, size_t n, uint32_t seed) {
    size_t i;

    for (i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(int32_t)seed / 2147483648.0f;
    }
}

/* Fills a piece with numbers of that type, one block of them over and over: what is there already
   is copied behind itself. */
static int bench_space_fill(bench_space *m, void *piece, size_t bytes, mpt_dtype dtype,
                            uint32_t seed) {
    enum { BLOCK = 4096 };
    float numbers[BLOCK];
    uint8_t block[BLOCK * sizeof(float)];
    size_t size = BLOCK * mpt_dtype_size(dtype), done = bytes < size ? bytes : size;
    mpt_copy_args copy;

    bench_floats(numbers, BLOCK, seed);
    bench_convert(numbers, BLOCK, dtype, block);
    if (!bench_space_on_device(m)) memcpy(piece, block, done);
    else if (m->backend->upload(m->self, piece, block, done)) return bench_fail(m->ctx);
    for (; done < bytes; done += copy.bytes) {
        copy.src = piece;
        copy.dst = (uint8_t *)piece + done;
        copy.bytes = bytes - done < done ? bytes - done : done;
        if (m->backend->copy(m->self, &copy)) return bench_fail(m->ctx);
    }
    return 0;
}

/* On a device an operator has only begun when its entry returns. */
static int bench_space_wait(bench_space *m) {
    uint32_t word;

    if (!bench_space_on_device(m)) return 0;
    return m->backend->download(m->self, &word, m->base, sizeof word) ? bench_fail(m->ctx) : 0;
}

#endif /* MPT_BENCH_SPACE_H */
