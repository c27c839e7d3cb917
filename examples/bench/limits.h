/* limits.h - what this machine could do at most: products in registers, bytes through memory

   Both run on all threads of the context, cut as the library cuts its own work. */
#ifndef MPT_BENCH_LIMITS_H
#define MPT_BENCH_LIMITS_H

#include "bench/measure.h"

#if defined(__x86_64__) || defined(__i386__)
#define BENCH_X86 1
#include <immintrin.h>
#endif
#define BENCH_UNROLL _Pragma("GCC unroll 16")

/* Independent sums in registers: two units of four cycles need eight; twelve and two factors fit
   the sixteen registers of AVX2. */
enum { BENCH_FMA_SUMS = 12, BENCH_FMA_LOOPS = 4000000 };

/* Each loop does BENCH_FMA_SUMS multiply-adds of `lanes` numbers; the sum keeps the compiler from
   leaving the work out. Factors keep all sums near 1: no infinity, no subnormal. */
typedef struct bench_fma {
    int lanes;
    float (*run)(int64_t loops);
} bench_fma;

static const float bench_fma_factor = 0.999f, bench_fma_term = 0.001f;

#ifdef BENCH_X86
__attribute__((target("avx512f"))) static float bench_fma_avx512(int64_t loops) {
    const __m512 factor = _mm512_set1_ps(bench_fma_factor), term = _mm512_set1_ps(bench_fma_term);
    __m512 sum[BENCH_FMA_SUMS];
    float lane[16];
    int64_t i;
    int k;

    BENCH_UNROLL for (k = 0; k < BENCH_FMA_SUMS; k++) sum[k] = _mm512_set1_ps((float)k);
    for (i = 0; i < loops; i++) {
        BENCH_UNROLL for (k = 0; k < BENCH_FMA_SUMS; k++)
            sum[k] = _mm512_fmadd_ps(sum[k], factor, term);
    }
    BENCH_UNROLL for (k = 1; k < BENCH_FMA_SUMS; k++) sum[0] = _mm512_add_ps(sum[0], sum[k]);
    _mm512_storeu_ps(lane, sum[0]);
    return lane[0];
}

__attribute__((target("avx2,fma"))) static float bench_fma_avx2(int64_t loops) {
    const __m256 factor = _mm256_set1_ps(bench_fma_factor), term = _mm256_set1_ps(bench_fma_term);
    __m256 sum[BENCH_FMA_SUMS];
    float lane[8];
    int64_t i;
    int k;

    BENCH_UNROLL for (k = 0; k < BENCH_FMA_SUMS; k++) sum[k] = _mm256_set1_ps((float)k);
    for (i = 0; i < loops; i++) {
        BENCH_UNROLL for (k = 0; k < BENCH_FMA_SUMS; k++)
            sum[k] = _mm256_fmadd_ps(sum[k], factor, term);
    }
    BENCH_UNROLL for (k = 1; k < BENCH_FMA_SUMS; k++) sum[0] = _mm256_add_ps(sum[0], sum[k]);
    _mm256_storeu_ps(lane, sum[0]);
    return lane[0];
}
#endif

/* Four numbers a vector: a multiply-add where the compiler has been allowed to make one of it. */
typedef float bench_vector __attribute__((vector_size(16)));

static float bench_fma_plain(int64_t loops) {
    bench_vector sum[BENCH_FMA_SUMS];
    int64_t i;
    int k;

    BENCH_UNROLL for (k = 0; k < BENCH_FMA_SUMS; k++) sum[k] = (bench_vector){(float)k, 0, 0, 0};
    for (i = 0; i < loops; i++) {
        BENCH_UNROLL for (k = 0; k < BENCH_FMA_SUMS; k++)
            sum[k] = sum[k] * bench_fma_factor + bench_fma_term;
    }
    BENCH_UNROLL for (k = 1; k < BENCH_FMA_SUMS; k++) sum[0] += sum[k];
    return sum[0][0];
}

static bench_fma bench_fma_choose(void) {
    bench_fma f = {4, bench_fma_plain};

#ifdef BENCH_X86
    if (__builtin_cpu_supports("avx512f")) {
        f.lanes = 16;
        f.run = bench_fma_avx512;
    } else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        f.lanes = 8;
        f.run = bench_fma_avx2;
    }
#endif
    return f;
}

typedef struct bench_limits {
    mpt_ctx *ctx;
    int64_t threads;
    bench_fma fma;
    float *sums;        /* (threads) */
    uint8_t *from, *to; /* [bytes] */
    size_t bytes;
} bench_limits;

/* Beyond any cache that this is likely to run on. */
enum { BENCH_COPY_BYTES = 64 << 20, BENCH_COPY_CHUNK = 1 << 20 };

static void bench_limits_free(bench_limits *l) {
    free(l->sums);
    free(l->from);
    free(l->to);
}

static int bench_limits_make(mpt_ctx *ctx, const bench_options *o, bench_limits *l) {
    memset(l, 0, sizeof *l);
    l->ctx = ctx;
    l->threads = o->threads;
    l->fma = bench_fma_choose();
    l->bytes = BENCH_COPY_BYTES;
    l->sums = (float *)calloc((size_t)o->threads, sizeof *l->sums);
    l->from = (uint8_t *)malloc(l->bytes);
    l->to = (uint8_t *)malloc(l->bytes);
    if (l->sums && l->from && l->to) {
        memset(l->from, 1, l->bytes); /* pages that were never written are all one page */
        return 0;
    }
    bench_limits_free(l);
    return cli_error("bench", CLI_EXIT_FAILURE, "no memory");
}

static mpt_result bench_fma_chunk(int64_t chunk, void *user) {
    bench_limits *l = (bench_limits *)user;

    l->sums[chunk] += l->fma.run(BENCH_FMA_LOOPS);
    return MPT_OK;
}

static int bench_fma_run(void *user) {
    bench_limits *l = (bench_limits *)user;
    return mpt_parallel_for(l->ctx, l->threads, bench_fma_chunk, l) ? bench_fail(l->ctx) : 0;
}

static mpt_result bench_copy_chunk(int64_t chunk, void *user) {
    bench_limits *l = (bench_limits *)user;

    memcpy(l->to + chunk * BENCH_COPY_CHUNK, l->from + chunk * BENCH_COPY_CHUNK, BENCH_COPY_CHUNK);
    return MPT_OK;
}

static int bench_copy_run(void *user) {
    bench_limits *l = (bench_limits *)user;
    int64_t chunks = (int64_t)(l->bytes / BENCH_COPY_CHUNK);
    return mpt_parallel_for(l->ctx, chunks, bench_copy_chunk, l) ? bench_fail(l->ctx) : 0;
}

/* A multiply-add is two operations, as everywhere. */
static bench_case bench_fma_case(bench_limits *l) {
    double flops = 2.0 * BENCH_FMA_SUMS * l->fma.lanes * BENCH_FMA_LOOPS * (double)l->threads;

    return bench_make("FP32 multiply-adds in registers", "flops", flops, bench_fma_run, l);
}

/* Bytes read and bytes written. */
static bench_case bench_copy_case(bench_limits *l) {
    return bench_make("copy memory, read + written", "bytes", 2.0 * (double)l->bytes,
                      bench_copy_run, l);
}

#endif /* MPT_BENCH_LIMITS_H */
