/* limits.h - what this machine could do at most

   On the CPU: products in registers and bytes through memory, on all threads of the context, cut as
   the library cuts its own work. On a device: a large dense layer, which is one matrix product of
   the vendor's library, and a copy in its memory. */
#ifndef MPT_BENCH_LIMITS_H
#define MPT_BENCH_LIMITS_H

#include "bench/space.h"

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

/* ---- of the CPU ------------------------------------------------------------------------------ */
typedef struct bench_cpu {
    mpt_ctx *ctx;
    int64_t threads;
    bench_fma fma;
    float *sums;        /* (threads) */
    uint8_t *from, *to; /* [BENCH_COPY_BYTES] */
} bench_cpu;

/* Beyond any cache that this is likely to run on. */
enum { BENCH_COPY_BYTES = 64 << 20, BENCH_COPY_CHUNK = 1 << 20 };

static void bench_cpu_free(bench_cpu *l) {
    free(l->sums);
    free(l->from);
    free(l->to);
}

static int bench_cpu_make(mpt_ctx *ctx, const bench_options *o, bench_cpu *l) {
    l->ctx = ctx;
    l->threads = o->threads;
    l->fma = bench_fma_choose();
    l->sums = (float *)calloc((size_t)o->threads, sizeof *l->sums);
    l->from = (uint8_t *)malloc(BENCH_COPY_BYTES);
    l->to = (uint8_t *)malloc(BENCH_COPY_BYTES);
    if (!l->sums || !l->from || !l->to) return cli_error("bench", CLI_EXIT_FAILURE, "no memory");
    memset(l->from, 1, BENCH_COPY_BYTES); /* pages that were never written are all one page */
    return 0;
}

static mpt_result bench_fma_chunk(int64_t chunk, void *user) {
    bench_cpu *l = (bench_cpu *)user;

    l->sums[chunk] += l->fma.run(BENCH_FMA_LOOPS);
    return MPT_OK;
}

static int bench_fma_run(void *user) {
    bench_cpu *l = (bench_cpu *)user;
    return mpt_parallel_for(l->ctx, l->threads, bench_fma_chunk, l) ? bench_fail(l->ctx) : 0;
}

static mpt_result bench_copy_chunk(int64_t chunk, void *user) {
    bench_cpu *l = (bench_cpu *)user;

    memcpy(l->to + chunk * BENCH_COPY_CHUNK, l->from + chunk * BENCH_COPY_CHUNK, BENCH_COPY_CHUNK);
    return MPT_OK;
}

static int bench_copy_run(void *user) {
    bench_cpu *l = (bench_cpu *)user;
    const int64_t chunks = BENCH_COPY_BYTES / BENCH_COPY_CHUNK;
    return mpt_parallel_for(l->ctx, chunks, bench_copy_chunk, l) ? bench_fail(l->ctx) : 0;
}

/* ---- of a device ----------------------------------------------------------------------------- */
/* A square product large enough that launching it costs nothing beside it; copies beyond the caches
   of GPUs (50 MB on an H200). */
enum { BENCH_PRODUCT_SIDE = 4096, BENCH_DEVICE_COPY_BYTES = 256 << 20 };

typedef struct bench_device {
    bench_space memory;
    mpt_dense_args product;
    mpt_copy_args copy;
    char name[48]; /* of the product */
} bench_device;

static int bench_device_make(mpt_ctx *ctx, const bench_options *o, bench_device *d) {
    const size_t side = BENCH_PRODUCT_SIDE;
    mpt_dense_args *p = &d->product;
    size_t matrix, workspace;
    int code = bench_space_open(ctx, o->device, &d->memory);

    if (code) return code;
    p->n = p->num_valid = p->in = p->out = BENCH_PRODUCT_SIDE;
    p->dtype = network_storage(network_precision(o->precision));
    snprintf(d->name, sizeof d->name, "dense layer, %zu x %zu x %zu", side, side, side);
    matrix = side * side * mpt_dtype_size(p->dtype);
    workspace = d->memory.backend->dense_fprop_workspace_bytes(d->memory.self, p);
    code = bench_space_allocate(&d->memory, 3 * matrix + bench_space_round(workspace) +
                                                2 * (size_t)BENCH_DEVICE_COPY_BYTES);
    if (code) return code;
    p->x = bench_space_take(&d->memory, matrix);
    p->w = bench_space_take(&d->memory, matrix);
    p->y = bench_space_take(&d->memory, matrix);
    p->workspace = bench_space_take(&d->memory, workspace);
    p->workspace_bytes = workspace;
    d->copy.bytes = BENCH_DEVICE_COPY_BYTES;
    d->copy.src = bench_space_take(&d->memory, d->copy.bytes);
    d->copy.dst = bench_space_take(&d->memory, d->copy.bytes);
    code = bench_space_fill(&d->memory, (void *)(uintptr_t)p->x, 2 * matrix, p->dtype, 1);
    return code ? code
                : bench_space_fill(&d->memory, (void *)(uintptr_t)d->copy.src, d->copy.bytes,
                                   MPT_F32, 2);
}

static int bench_product_run(void *user) {
    bench_device *d = (bench_device *)user;

    if (d->memory.backend->dense_fprop(d->memory.self, &d->product))
        return bench_fail(d->memory.ctx);
    return bench_space_wait(&d->memory);
}

static int bench_device_copy_run(void *user) {
    bench_device *d = (bench_device *)user;

    if (d->memory.backend->copy(d->memory.self, &d->copy)) return bench_fail(d->memory.ctx);
    return bench_space_wait(&d->memory);
}

/* ---- either ---------------------------------------------------------------------------------- */
typedef struct bench_limits {
    bool on_device;
    bench_cpu cpu;
    bench_device device;
    const char *flops_name, *bytes_name; /* "the FMA peak" */
} bench_limits;

static void bench_limits_free(bench_limits *l) {
    bench_cpu_free(&l->cpu);
    bench_space_close(&l->device.memory);
}

static int bench_limits_make(mpt_ctx *ctx, const bench_options *o, bench_limits *l) {
    int code;

    memset(l, 0, sizeof *l);
    l->on_device = o->device != NETWORK_CPU;
    l->flops_name = l->on_device ? "a large product" : "the FMA peak";
    l->bytes_name = "the memory bandwidth";
    code = l->on_device ? bench_device_make(ctx, o, &l->device) : bench_cpu_make(ctx, o, &l->cpu);
    if (code) bench_limits_free(l);
    return code;
}

/* A multiply-add is two operations, as everywhere. */
static bench_case bench_flops_limit(bench_limits *l) {
    const double side = BENCH_PRODUCT_SIDE;
    double flops = 2.0 * BENCH_FMA_SUMS * l->cpu.fma.lanes * BENCH_FMA_LOOPS *
                   (double)l->cpu.threads;

    if (l->on_device)
        return bench_make(l->device.name, "flops", 2 * side * side * side, bench_product_run,
                          &l->device);
    return bench_make("FP32 multiply-adds in registers", "flops", flops, bench_fma_run, &l->cpu);
}

/* Bytes read and bytes written. */
static bench_case bench_bytes_limit(bench_limits *l) {
    const char *name = "copy memory, read + written";

    if (l->on_device)
        return bench_make(name, "bytes", 2.0 * BENCH_DEVICE_COPY_BYTES, bench_device_copy_run,
                          &l->device);
    return bench_make(name, "bytes", 2.0 * BENCH_COPY_BYTES, bench_copy_run, &l->cpu);
}

#endif /* MPT_BENCH_LIMITS_H */
