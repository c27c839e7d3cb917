/* kernel_test.h - launchers of kernels.cu against the CPU backend's definitions: for tests only

   An operator's arguments hold pointers to host memory. The kernel gets a copy of them in which
   each is a pointer to device memory with the same content; then both run, and outputs compare:

       kernel_test t = kernel_test_open();                    skips the case where no device is
       mpt_pointwise_args a, d;
       a.a = kernel_random(&t, MPT_F16, count, valid);        NaN behind the first `valid`
       a.y = kernel_nans(&t, MPT_F16, count);                 so outputs are before
       d = a;
       d.a = on_device(&t, a.a);
       d.y = on_device(&t, a.y);
       CHECK_KERNEL(mptk_relu_forward(&d, NULL));
       CHECK_OK(t.ctx, t.ops->relu_forward(t.self, &a));
       check_same("relu", MPT_F16, from_device(&t, a.y), a.y, count);
       kernel_test_close(&t);

   Buffers are exactly as long as they must be, each with an allocation of its own, so that a runner
   under AddressSanitizer, or compute-sanitizer on a device, sees the first byte beyond. */
#ifndef KERNEL_TEST_H
#define KERNEL_TEST_H

#include "../mpt_test.h"

#include <cuda_runtime_api.h>

enum { KERNEL_TEST_BUFFERS = 64 };

typedef struct kernel_buffer {
    void *host, *device; /* device: NULL until on_device */
    void *fetched;       /* what from_device read last */
    size_t bytes;
} kernel_buffer;

typedef struct kernel_test {
    mpt_ctx *ctx;
    const mpt_backend *ops; /* the CPU's, which defines what is right */
    void *self;
    kernel_buffer buffers[KERNEL_TEST_BUFFERS];
    int num_buffers;
    uint64_t random;
} kernel_test;

#define CHECK_CUDA(call) kernel_check_cuda(__FILE__, __LINE__, #call, (int)(call))
/* A launcher returned 0, and what it began ended well. */
#define CHECK_KERNEL(call) \
    do { \
        CHECK_CUDA(call); \
        CHECK_CUDA(cudaDeviceSynchronize()); \
    } while (0)

static inline void kernel_check_cuda(const char *file, int line, const char *what, int error) {
    if (error)
        mpt_test_fail(file, line, "%s: %s, %s", what, cudaGetErrorName((cudaError_t)error),
                      cudaGetErrorString((cudaError_t)error));
}

static inline kernel_test kernel_test_open(void) {
    kernel_test t;
    mpt_ctx_desc d;
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) SKIP("no CUDA device");
    memset(&t, 0, sizeof(t));
    memset(&d, 0, sizeof(d));
    d.num_threads = 1;
    t.random = 7;
    t.ops = mpt_backend_cpu();
    CHECK_OK(NULL, mpt_ctx_create(&d, &t.ctx));
    CHECK_OK(t.ctx, mpti_cpu_open_family(t.ctx, "definition", &t.self));
    return t;
}

/* Frees all buffers, on both sides: the test goes on with new ones. */
static inline void kernel_test_release(kernel_test *t) {
    int i;
    for (i = 0; i < t->num_buffers; i++) {
        free(t->buffers[i].host);
        free(t->buffers[i].fetched);
        CHECK_CUDA(cudaFree(t->buffers[i].device));
    }
    t->num_buffers = 0;
}

static inline void kernel_test_close(kernel_test *t) {
    kernel_test_release(t);
    t->ops->close(t->self);
    mpt_ctx_destroy(t->ctx);
}

/* ---- buffers --------------------------------------------------------------------------------- */
/* Aligned to 64 bytes, as workspaces must be, full of 0xff: NaN in every type. */
static inline void *kernel_bytes(kernel_test *t, size_t bytes) {
    kernel_buffer *b = &t->buffers[t->num_buffers];
    CHECK(t->num_buffers < KERNEL_TEST_BUFFERS);
    memset(b, 0, sizeof(*b));
    b->bytes = bytes;
    CHECK(posix_memalign(&b->host, 64, bytes + (bytes == 0)) == 0);
    memset(b->host, 0xff, bytes);
    t->num_buffers++;
    return b->host;
}

static inline void *kernel_nans(kernel_test *t, mpt_dtype dtype, size_t count) {
    return kernel_bytes(t, count * mpt_dtype_size(dtype));
}

static inline uint32_t kernel_random_word(kernel_test *t) {
    t->random = t->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(t->random >> 32);
}

/* -1 .. 1, a multiple of 1/64: exact in FP16 and BF16's products of small sums. */
static inline float kernel_random_float(kernel_test *t) {
    return (float)((int)(kernel_random_word(t) >> 25) - 64) / 64.0f;
}

/* `count` numbers, of which the first `used` are random and the others NaN. */
static inline void *kernel_random(kernel_test *t, mpt_dtype dtype, size_t count, size_t used) {
    void *p = kernel_nans(t, dtype, count);
    size_t i;
    for (i = 0; i < used; i++) mpti_store(dtype, p, i, kernel_random_float(t));
    return p;
}

static inline float *kernel_random_f32(kernel_test *t, size_t count) {
    return (float *)kernel_random(t, MPT_F32, count, count);
}

static inline void *kernel_copy_of(kernel_test *t, const void *from, size_t bytes) {
    return memcpy(kernel_bytes(t, bytes), from, bytes);
}

static inline kernel_buffer *kernel_buffer_of(kernel_test *t, const void *host) {
    int i;
    for (i = 0; i < t->num_buffers; i++)
        if (t->buffers[i].host == host) return &t->buffers[i];
    mpt_test_fail(__FILE__, __LINE__, "no buffer of this test");
}

/* Where the buffer is on the device, with the host's content of now. NULL stays NULL. */
static inline void *on_device(kernel_test *t, const void *host) {
    kernel_buffer *b;
    if (!host) return NULL;
    b = kernel_buffer_of(t, host);
    if (!b->device) CHECK_CUDA(cudaMalloc(&b->device, b->bytes + (b->bytes == 0)));
    CHECK_CUDA(cudaMemcpy(b->device, b->host, b->bytes, cudaMemcpyHostToDevice));
    return b->device;
}

/* The device's content of now, valid until the next call for the same buffer. */
static inline const void *from_device(kernel_test *t, const void *host) {
    kernel_buffer *b = kernel_buffer_of(t, host);
    free(b->fetched);
    b->fetched = malloc(b->bytes + (b->bytes == 0));
    CHECK(b->fetched && b->device);
    CHECK_CUDA(cudaMemcpy(b->fetched, b->device, b->bytes, cudaMemcpyDeviceToHost));
    return b->fetched;
}

/* Device memory without a host's, full of NaN; NULL for none. */
static inline void *device_workspace(kernel_test *t, size_t bytes) {
    return bytes ? on_device(t, kernel_bytes(t, bytes)) : NULL;
}

static inline void *host_workspace(kernel_test *t, size_t bytes) {
    return bytes ? kernel_bytes(t, bytes) : NULL;
}

/* ---- comparing ------------------------------------------------------------------------------- */
/* Steps of a storage type around 1: half of it is the error of one rounding. */
static inline double kernel_epsilon(mpt_dtype dtype) {
    return dtype == MPT_F32 ? 1.2e-7 : dtype == MPT_F16 ? 9.8e-4 : 7.9e-3;
}

/* The same values: of NaN any, and 0 of any sign. */
static inline void check_same(const char *what, mpt_dtype dtype, const void *got,
                              const void *expected, size_t count) {
    size_t i;
    for (i = 0; i < count; i++) {
        float u = mpti_load(dtype, got, i), v = mpti_load(dtype, expected, i);
        if (u == v || (mpti_is_nan(u) && mpti_is_nan(v))) continue;
        mpt_test_fail(__FILE__, __LINE__, "%s: element %zu of %zu is %.9g, expected %.9g", what, i,
                      count, (double)u, (double)v);
    }
}

/* |got - expected| at most absolute + relative * |expected|; NaN fails. */
static inline void check_close(const char *what, mpt_dtype dtype, const void *got,
                               const void *expected, size_t count, double absolute,
                               double relative) {
    size_t i;
    for (i = 0; i < count; i++) {
        double u = mpti_load(dtype, got, i), v = mpti_load(dtype, expected, i);
        if (!(fabs(u - v) <= absolute + relative * fabs(v)))
            mpt_test_fail(__FILE__, __LINE__, "%s: element %zu of %zu is %.9g, expected %.9g", what,
                          i, count, u, v);
    }
}

/* |got - expected| at most share * (magnitude + floor) element by element, where magnitude is a sum
   of |products|: cancellation makes the result itself a useless yardstick. */
static inline void check_within(const char *what, mpt_dtype dtype, const void *got,
                                const void *expected, const float *magnitude, size_t count,
                                double share, double floor) {
    size_t i;
    for (i = 0; i < count; i++) {
        double u = mpti_load(dtype, got, i), v = mpti_load(dtype, expected, i);
        double most = share * ((double)magnitude[i] + floor);
        if (!(fabs(u - v) <= most))
            mpt_test_fail(__FILE__, __LINE__,
                          "%s: element %zu of %zu is %.9g, expected %.9g within %.3g", what, i,
                          count, u, v, most);
    }
}

#endif /* KERNEL_TEST_H */
