/* bench_measure.h - how bench_device measures: seconds of a call that a device runs by itself

   A thing runs so often that a round takes a fiftieth of a second, and what counts is the median of
   some rounds. The clock is the host's, from idle device to idle device: the one wait at the end of
   a round is a thousandth of it. */
#ifndef MPT_BENCH_DEVICE_MEASURE_H
#define MPT_BENCH_DEVICE_MEASURE_H

#include "common/cli.h"
#include "mptrain.h"

#include <cuda_runtime_api.h>

enum { ROUNDS = 5, MAX_CALLS_A_ROUND = 1000 };
static const double ROUND_SECONDS = 0.02;

/* Whatever goes wrong here ends the program: a benchmark that goes on has nothing to say. */
__attribute__((noreturn, format(printf, 1, 2))) static void give_up(const char *format, ...) {
    va_list args;

    fflush(stdout);
    fprintf(stderr, "bench_device: ");
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fprintf(stderr, "\n");
    exit(1);
}

#define CUDA_OK(call) \
    do { \
        cudaError_t error_ = (call); \
        if (error_) give_up("%s: %s", #call, cudaGetErrorString(error_)); \
    } while (0)

#define MPT_OK_OR_GIVE_UP(ctx, call) \
    do { \
        if ((call) != MPT_OK) give_up("%s", mpt_last_error(ctx)->message); \
    } while (0)

/* What is measured: run() begins the work on the device; false: it can't. */
typedef bool (*device_work)(void *user);

typedef struct measure {
    bool once; /* one call, not measured well: to see that the program works */
} measure;

static double seconds_of_round(device_work run, void *user, int calls) {
    double start;
    int i;

    CUDA_OK(cudaDeviceSynchronize());
    start = cli_seconds();
    for (i = 0; i < calls; i++) run(user);
    CUDA_OK(cudaDeviceSynchronize());
    return (cli_seconds() - start) / calls;
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Seconds of one call; 0 if it can't run. */
static double seconds_of(const measure *m, device_work run, void *user) {
    double rounds[ROUNDS], one;
    int calls, i;

    if (!run(user)) return 0; /* the first call loads the code */
    one = seconds_of_round(run, user, 1);
    if (m->once) return one;
    calls = one * MAX_CALLS_A_ROUND < ROUND_SECONDS ? MAX_CALLS_A_ROUND
                                                    : 1 + (int)(ROUND_SECONDS / one);
    for (i = 0; i < ROUNDS; i++) rounds[i] = seconds_of_round(run, user, calls);
    qsort(rounds, ROUNDS, sizeof rounds[0], compare_doubles);
    return rounds[ROUNDS / 2];
}

/* ---- memory of the device -------------------------------------------------------------------- */
static void *device_alloc(size_t bytes) {
    void *p = NULL;

    CUDA_OK(cudaMalloc(&p, bytes + (bytes == 0)));
    return p;
}

static void random_numbers(void *out, size_t count, mpt_dtype dtype) { /* in -1 .. 1 */
    uint32_t random = 1;
    size_t i;

    for (i = 0; i < count; i++) {
        float x;
        random = random * 1664525u + 1013904223u;
        x = (float)(int32_t)random / 2147483648.0f;
        if (dtype == MPT_F16) ((uint16_t *)out)[i] = mpt_f32_to_f16(x);
        else ((float *)out)[i] = x;
    }
}

/* Random numbers, MPT_F16 or MPT_F32: zeros would cost less power, and so be faster, than what a
   network computes with. A pattern of 2^18 numbers is repeated. */
static void *device_random(size_t count, mpt_dtype dtype) {
    enum { PATTERN = 1 << 18 };
    size_t size = mpt_dtype_size(dtype), used, more;
    char *host = (char *)malloc(PATTERN * size), *p = (char *)device_alloc(count * size);

    if (!host) give_up("no memory");
    random_numbers(host, PATTERN, dtype);
    used = count < PATTERN ? count : PATTERN;
    CUDA_OK(cudaMemcpy(p, host, used * size, cudaMemcpyHostToDevice));
    for (; used < count; used += more) {
        more = used < count - used ? used : count - used;
        CUDA_OK(cudaMemcpy(p + used * size, p, more * size, cudaMemcpyDeviceToDevice));
    }
    free(host);
    return p;
}

#endif /* MPT_BENCH_DEVICE_MEASURE_H */
