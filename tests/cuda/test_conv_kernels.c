/* test_conv_kernels.c - >>conv of kernels.cu: every kernel and tile against the CPU's definition

   Runs on a GPU, linked with what nvcc made of kernels.cu, and on the CPU, linked with the runner
   in tests/cuda_on_cpu/, once for each MPTK_EMULATED_ARCH with an engine of its own. */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "kernel_test.h"

#include "../conv_shape.h"
#include "../reference.h"

/* Tiles are chosen for so many SMs. The runner's kernels.o has it as a variable: with 2, small
   shapes reach large tiles. nvcc's hasn't, there it stays the constant of >>launch. */
extern int mptk_tile_sms __attribute__((weak));

/* ---- the harness --------------------------------------------------------------------------------
   What is right: the CPU backend in FP32 on the same numbers. Its definition for small shapes; for
   large ones its fast kernels, which tests/test_ops.c compares with the definition. */
typedef struct conv_test {
    kernel_test t; /* with the definition */
    void *fast;
} conv_test;

static conv_test conv_test_open(void) {
    conv_test c;
    c.t = kernel_test_open();
    CHECK_OK(c.t.ctx, mpti_cpu_open_family(c.t.ctx, NULL, &c.fast));
    if (&mptk_tile_sms) mptk_tile_sms = 2;
    return c;
}

static void conv_test_close(conv_test *c) {
    c->t.ops->close(c->fast);
    kernel_test_close(&c->t);
}

static float random_float(kernel_test *t) { /* -1 .. 1, with all bits of the significand */
    return (float)((double)kernel_random_word(t) / 2147483648.0 - 1);
}

/* Random numbers as the storage type holds them, in FP32. */
static float *random_floats(kernel_test *t, mpt_dtype dtype, size_t count, float scale) {
    float *p = (float *)malloc(count * sizeof(float));
    size_t i;
    for (i = 0; i < count; i++) {
        uint32_t stored;
        mpti_store(dtype, &stored, 0, scale * random_float(t));
        p[i] = mpti_load(dtype, &stored, 0);
    }
    return p;
}

/* The first `used` of them as dtype, in a buffer of the test; NaN behind. */
static void *stored(kernel_test *t, mpt_dtype dtype, const float *values, size_t count,
                    size_t used) {
    void *p = kernel_nans(t, dtype, count);
    size_t i;
    for (i = 0; i < used; i++) mpti_store(dtype, p, i, values[i]);
    return p;
}

static float *fetched(kernel_test *t, mpt_dtype dtype, const void *host, size_t count) {
    const void *p = from_device(t, host);
    float *values = (float *)malloc(count * sizeof(float));
    size_t i;
    for (i = 0; i < count; i++) values[i] = mpti_load(dtype, p, i);
    return values;
}

/* Has this code tensor-core kernels for dtype here? BF16 needs sm_80, of code and of device. */
static int has_kernels(mpt_dtype dtype) {
    int major = 0, newest = 0;
    const char *p = mptk_arch_list();
    if (dtype != MPT_BF16) return 1;
    CHECK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    for (; *p; p += strcspn(p, " "), p += strspn(p, " "))
        if (atoi(p) > newest) newest = atoi(p);
    return major >= 8 && newest >= 80;
}

static void need_kernels(conv_test *c, mpt_dtype dtype) { /* or closes the test, and skips it */
    if (has_kernels(dtype)) return;
    conv_test_close(c);
    SKIP("BF16 needs a GPU and code of sm_80 or later");
}

/* ---- one convolution ------------------------------------------------------------------------- */
typedef struct sizes {
    size_t x, y, w, k;
} sizes;

static sizes sizes_of(const mpt_conv2d_args *a) {
    sizes s;
    s.x = (size_t)a->n * a->h * a->wd * a->c;
    s.y = (size_t)a->n * a->p * a->q * a->k;
    s.w = (size_t)a->k * a->r * a->s * a->c;
    s.k = (size_t)a->k;
    return s;
}

typedef struct tensors { /* FP32 on the host: operands and results */
    float *x, *w, *dy, *bias, *y, *dx, *dw, *dbias;
} tensors;

static void tensors_free(tensors *t) {
    free(t->x);
    free(t->w);
    free(t->dy);
    free(t->bias);
    free(t->y);
    free(t->dx);
    free(t->dw);
    free(t->dbias);
    memset(t, 0, sizeof(*t));
}

static tensors random_operands(kernel_test *t, const mpt_conv2d_args *a) {
    const sizes s = sizes_of(a);
    tensors o;
    memset(&o, 0, sizeof(o));
    t->random = 7 + s.x + s.w; /* the same for the same shape */
    o.x = random_floats(t, a->dtype, s.x, 1);
    o.w = random_floats(t, a->dtype, s.w, 0.25f);
    o.dy = random_floats(t, a->dtype, s.y, 1);
    o.bias = random_floats(t, MPT_F32, s.k, 1);
    return o;
}

/* All three directions on the device. */
static void run_device(kernel_test *t, mpt_conv2d_args a, tensors *o) {
    const sizes s = sizes_of(&a);
    void *y = kernel_nans(t, a.dtype, s.y), *dx = kernel_nans(t, a.dtype, s.x);
    void *dw = kernel_nans(t, MPT_F32, s.w), *dbias = kernel_nans(t, MPT_F32, s.k);

    a.x = on_device(t, stored(t, a.dtype, o->x, s.x, s.x / a.n * a.num_valid));
    a.w = on_device(t, stored(t, a.dtype, o->w, s.w, s.w));
    a.dy = on_device(t, stored(t, a.dtype, o->dy, s.y, s.y / a.n * a.num_valid));
    a.bias = (const float *)on_device(t, stored(t, MPT_F32, o->bias, s.k, s.k));
    a.y = on_device(t, y), a.dx = on_device(t, dx);
    a.dw = (float *)on_device(t, dw), a.dbias = (float *)on_device(t, dbias);
    a.workspace = device_workspace(t, mptk_conv2d_fprop_workspace_bytes(&a));
    CHECK_KERNEL(mptk_conv2d_fprop(&a, NULL));
    a.workspace = device_workspace(t, mptk_conv2d_dgrad_workspace_bytes(&a));
    CHECK_KERNEL(mptk_conv2d_dgrad(&a, NULL));
    a.workspace = device_workspace(t, mptk_conv2d_wgrad_workspace_bytes(&a));
    CHECK_KERNEL(mptk_conv2d_wgrad(&a, NULL));
    o->y = fetched(t, a.dtype, y, s.y);
    o->dx = fetched(t, a.dtype, dx, s.x);
    o->dw = fetched(t, MPT_F32, dw, s.w);
    o->dbias = fetched(t, MPT_F32, dbias, s.k);
    kernel_test_release(t);
}

typedef size_t (*bytes_fn)(void *self, const mpt_conv2d_args *a);
typedef mpt_result (*conv_fn)(void *self, const mpt_conv2d_args *a);

static void run_cpu_one(conv_test *c, mpt_conv2d_args *a, bytes_fn bytes, conv_fn conv) {
    const double products = (double)sizes_of(a).y * a->r * a->s * a->c;
    void *self = products > 2e6 ? c->fast : c->t.self, *workspace = NULL;
    a->workspace_bytes = bytes(self, a);
    CHECK(posix_memalign(&workspace, 64, a->workspace_bytes + 64) == 0);
    a->workspace = workspace;
    CHECK_OK(c->t.ctx, conv(self, a));
    free(workspace);
}

static void run_cpu(conv_test *c, mpt_conv2d_args a, tensors *t) {
    const sizes s = sizes_of(&a);
    a.dtype = MPT_F32;
    a.x = t->x, a.w = t->w, a.dy = t->dy, a.bias = t->bias;
    a.y = t->y = (float *)malloc(s.y * sizeof(float));
    a.dx = t->dx = (float *)malloc(s.x * sizeof(float));
    a.dw = t->dw = (float *)malloc(s.w * sizeof(float));
    a.dbias = t->dbias = (float *)malloc(s.k * sizeof(float));
    run_cpu_one(c, &a, c->t.ops->conv2d_fprop_workspace_bytes, c->t.ops->conv2d_fprop);
    run_cpu_one(c, &a, c->t.ops->conv2d_dgrad_workspace_bytes, c->t.ops->conv2d_dgrad);
    run_cpu_one(c, &a, c->t.ops->conv2d_wgrad_workspace_bytes, c->t.ops->conv2d_wgrad);
}

static float *absolute(const float *values, size_t count) {
    float *p = (float *)malloc(count * sizeof(float));
    size_t i;
    for (i = 0; i < count; i++) p[i] = fabsf(values[i]);
    return p;
}

/* The same with the magnitudes of all operands: sums of |products|, which errors scale with. The
   results themselves may be small by cancellation. */
static void run_magnitudes(conv_test *c, const mpt_conv2d_args *a, const tensors *t,
                           tensors *magnitude) {
    const sizes s = sizes_of(a);
    memset(magnitude, 0, sizeof(*magnitude));
    magnitude->x = absolute(t->x, s.x);
    magnitude->w = absolute(t->w, s.w);
    magnitude->dy = absolute(t->dy, s.y);
    magnitude->bias = absolute(t->bias, s.k);
    run_cpu(c, *a, magnitude);
}

/* Products of 16-bit numbers are exact in FP32. A tensor core adds four of them or more at once and
   may cut off where it should round: 2^-23 of the sum of |products| for each of depth / 4 additions
   at most, plain FP32 code rounds by 2^-24 in each of `depth`, and the CPU that this is compared
   with does too. Then storage rounds once: by 2^-11 of the result in FP16 and 2^-8 in BF16, by
   2^-25 where FP16 is subnormal. */
static void check_tensor(const char *what, mpt_dtype dtype, const float *got, const float *want,
                         const float *magnitude, size_t count, double depth) {
    const double half_ulp = dtype == MPT_F16 ? 1 / 2048.0 : dtype == MPT_BF16 ? 1 / 256.0 : 0;
    const double sum = (8 + depth) / 8388608.0, least = dtype == MPT_F32 ? 1e-30 : 3e-8;
    size_t i;
    for (i = 0; i < count; i++) {
        const double error = fabs((double)got[i] - want[i]);
        const double bound = (1 + half_ulp) * sum * magnitude[i] + half_ulp * fabs(want[i]) + least;
        if (!(error <= bound))
            mpt_test_fail(__FILE__, __LINE__, "%s: element %zu of %zu is %.9g, not %.9g (+- %.2g)",
                          what, i, count, got[i], want[i], bound);
    }
}

static const char *shape_text(const conv_shape *z, mpt_dtype dtype, int num_valid) {
    static char text[160];
    snprintf(text, sizeof(text),
             "%s, %d of %d slots, %dx%dx%d, %d filters of %dx%d, stride %d, "
             "padding %d",
             dtype == MPT_F16    ? "FP16"
             : dtype == MPT_BF16 ? "BF16"
                                 : "FP32",
             num_valid, z->n, z->h, z->wd, z->c, z->k, z->r, z->s, z->stride, z->padding);
    return text;
}

static void check_shape(conv_test *c, const conv_shape *z, mpt_dtype dtype, int num_valid) {
    mpt_conv2d_args a;
    tensors got, want, magnitude;
    sizes s;
    if (!has_kernels(dtype)) return;
    conv_shape_args(z, dtype, num_valid, &a);
    printf("# %s: %s\n", shape_text(z, dtype, num_valid), mptk_conv2d_fprop_kernel(&a));
    s = sizes_of(&a);
    got = random_operands(&c->t, &a);
    want = random_operands(&c->t, &a);
    run_device(&c->t, a, &got);
    run_cpu(c, a, &want);
    run_magnitudes(c, &a, &want, &magnitude);
    check_tensor("y", dtype, got.y, want.y, magnitude.y, s.y, (double)z->r * z->s * z->c);
    check_tensor("dx", dtype, got.dx, want.dx, magnitude.dx, s.x, (double)z->r * z->s * z->k);
    check_tensor("dw", MPT_F32, got.dw, want.dw, magnitude.dw, s.w, (double)z->n * a.p * a.q);
    check_tensor("dbias", MPT_F32, got.dbias, want.dbias, magnitude.dbias, s.k,
                 (double)z->n * a.p * a.q);
    tensors_free(&got);
    tensors_free(&want);
    tensors_free(&magnitude);
}

/* ---- shapes ----------------------------------------------------------------------------------
   Tiles that are full, ragged, alone; strides 1 to 4, phases without taps and phases without
   pixels; padding 0 to 3 and inputs smaller than the filter; channels that are multiples of 8, of
   32, and none; few channels with an even stride, which go in pairs of pixels; one batch, one
   pixel, one number. */
static const conv_shape shapes[] = {
    {1, 1, 1, 1, 1, 1, 1, 1, 0},    {1, 8, 8, 32, 64, 3, 3, 1, 1},
    {2, 7, 9, 40, 24, 3, 3, 1, 1},  {1, 9, 7, 64, 72, 3, 3, 2, 1},
    {3, 5, 6, 16, 136, 1, 1, 1, 0}, {2, 7, 8, 24, 32, 1, 1, 2, 0},
    {1, 13, 12, 8, 16, 7, 5, 2, 3}, {1, 6, 6, 8, 8, 5, 5, 1, 2},
    {1, 11, 5, 16, 8, 3, 1, 2, 1},  {1, 3, 3, 8, 8, 3, 3, 2, 2},
    {1, 2, 2, 8, 8, 7, 7, 1, 3},    {1, 12, 12, 72, 200, 3, 1, 1, 0},
    {2, 9, 8, 3, 7, 3, 3, 1, 1},    {1, 13, 11, 3, 10, 7, 7, 2, 3},
    {2, 6, 7, 7, 65, 3, 3, 3, 1},   {1, 9, 10, 65, 1, 5, 5, 1, 0},
    {2, 5, 5, 1, 3, 5, 3, 3, 2},    {1, 4, 4, 64, 64, 1, 1, 3, 1},
    {2, 8, 8, 10, 16, 3, 3, 2, 1},  {1, 2, 9, 16, 65, 1, 3, 4, 0},
    {1, 17, 3, 65, 65, 3, 3, 1, 1}, {1, 18, 17, 64, 8, 1, 1, 1, 0},
};
enum { NUM_SHAPES = sizeof(shapes) / sizeof(shapes[0]) };

/* Which tile a shape gets depends on mptk_tile_sms: for each tile of >>launch one shape that
   reaches it with 2, and one that does with any number up to 108. */
static const conv_shape tile_shapes[] = {
    {2, 16, 16, 32, 128, 3, 3, 1, 1},  {1, 15, 17, 32, 130, 1, 1, 1, 0},
    {8, 16, 16, 40, 64, 1, 1, 1, 0},   {2, 16, 13, 64, 40, 3, 3, 1, 1},
    {1, 9, 7, 128, 128, 3, 3, 1, 1},   {4, 16, 16, 64, 64, 3, 3, 2, 1},
    {4, 16, 16, 128, 256, 1, 1, 1, 0},
};
static const conv_shape large_shapes[] = {
    {1, 216, 256, 32, 128, 1, 1, 1, 0}, {1, 108, 128, 128, 128, 1, 1, 1, 0},
    {1, 432, 256, 64, 64, 1, 1, 1, 0},  {1, 108, 128, 64, 64, 1, 1, 1, 0},
    {1, 216, 256, 128, 32, 1, 1, 1, 0},
};
enum {
    NUM_TILE_SHAPES = sizeof(tile_shapes) / sizeof(tile_shapes[0]),
    NUM_LARGE_SHAPES = sizeof(large_shapes) / sizeof(large_shapes[0])
};

static void check_shapes(mpt_dtype dtype) {
    conv_test c;
    int i;
    c = conv_test_open();
    need_kernels(&c, dtype);
    for (i = 0; i < NUM_SHAPES; i++) {
        check_shape(&c, &shapes[i], dtype, shapes[i].n);
        if (shapes[i].n > 1) check_shape(&c, &shapes[i], dtype, shapes[i].n - 1);
    }
    conv_test_close(&c);
}

MPT_TEST(fp16_convolution_matches_the_definition) {
    check_shapes(MPT_F16);
}

MPT_TEST(bf16_convolution_matches_the_definition) {
    check_shapes(MPT_BF16);
}

MPT_TEST(fp32_convolution_matches_the_definition) {
    check_shapes(MPT_F32);
}

/* ---- every tile ------------------------------------------------------------------------------ */
static const char *const gather_names[] = {
    "tensor cores, 256x128 tile",
    "tensor cores, 128x128 tile",
    "tensor cores, 256x64 tile",
    "tensor cores, 128x64 tile",
    "tensor cores, 64x64x64 tile",
    "tensor cores, 64x64 tile",
    "tensor cores, 128x64 tile for few channels",
};
static const char *const wgrad_names[] = {
    "tensor cores, 128x128 tile for 1x1",
    "tensor cores, 64x64 tile for 1x1",
    "tensor cores, 128x128 tile",
    "tensor cores, 64x64 tile",
};
enum { NUM_GATHER = 7, NUM_WGRAD = 4, NUM_TILES = 2 * NUM_GATHER + NUM_WGRAD };

static int index_of(const char *name, const char *const *names, int count) {
    int i;
    for (i = 0; i < count && strcmp(name, names[i]); i++) {}
    if (i == count) mpt_test_fail(__FILE__, __LINE__, "no kernel has the name '%s'", name);
    return i;
}

/* Marks what the shape reaches, and tells whether any of it is new. */
static int reach(const conv_shape *z, int reached[NUM_TILES]) {
    mpt_conv2d_args a;
    int at[3], i, is_new = 0;
    conv_shape_args(z, MPT_F16, z->n, &a);
    at[0] = index_of(mptk_conv2d_fprop_kernel(&a), gather_names, NUM_GATHER);
    at[1] = NUM_GATHER + index_of(mptk_conv2d_dgrad_kernel(&a), gather_names, NUM_GATHER);
    at[2] = 2 * NUM_GATHER + index_of(mptk_conv2d_wgrad_kernel(&a), wgrad_names, NUM_WGRAD);
    for (i = 0; i < 3; i++) {
        is_new |= !reached[at[i]];
        reached[at[i]] = 1;
    }
    return is_new;
}

static void check_tiles(mpt_dtype dtype) {
    int reached[NUM_TILES] = {0}, i;
    conv_test c;
    c = conv_test_open();
    need_kernels(&c, dtype);
    for (i = 0; i < NUM_SHAPES; i++) reach(&shapes[i], reached); /* tested above */
    for (i = 0; i < NUM_TILE_SHAPES; i++) {
        reach(&tile_shapes[i], reached);
        check_shape(&c, &tile_shapes[i], dtype, tile_shapes[i].n);
    }
    for (i = 0; i < NUM_LARGE_SHAPES; i++)
        if (reach(&large_shapes[i], reached))
            check_shape(&c, &large_shapes[i], dtype, large_shapes[i].n);
    conv_test_close(&c);
    for (i = 0; i < NUM_TILES; i++)
        if (!reached[i] && i != 2 * NUM_GATHER - 1) /* dgrad has no kernel for few channels */
            mpt_test_fail(__FILE__, __LINE__, "no shape reaches the %s kernel '%s'",
                          i < NUM_GATHER       ? "fprop"
                          : i < 2 * NUM_GATHER ? "dgrad"
                                               : "wgrad",
                          i < 2 * NUM_GATHER ? gather_names[i % NUM_GATHER]
                                             : wgrad_names[i - 2 * NUM_GATHER]);
}

MPT_TEST(fp16_every_tile_is_reached_and_right) {
    check_tiles(MPT_F16);
}

MPT_TEST(bf16_every_tile_is_reached_and_right) {
    check_tiles(MPT_BF16);
}

/* Filters that the tensor-core kernels don't take, and the limit between. */
MPT_TEST(filters_of_many_taps_are_right) {
    static const conv_shape many[] = {{1, 18, 17, 3, 8, 17, 16, 1, 0},
                                      {1, 18, 3, 8, 9, 16, 1, 1, 0},
                                      {1, 20, 19, 2, 8, 18, 17, 2, 0}};
    mpt_conv2d_args a;
    conv_test c;
    int i;
    c = conv_test_open();
    conv_shape_args(&many[0], MPT_F16, 1, &a);
    CHECK_EQ_STR(mptk_conv2d_fprop_kernel(&a), "simt");
    CHECK_EQ_STR(mptk_conv2d_dgrad_kernel(&a), "simt");
    CHECK_CONTAINS(mptk_conv2d_wgrad_kernel(&a), "tensor cores");
    conv_shape_args(&many[1], MPT_F16, 1, &a);
    CHECK_CONTAINS(mptk_conv2d_fprop_kernel(&a), "tensor cores");
    conv_shape_args(&many[2], MPT_F16, 1, &a); /* 9x9 taps in each of 4 phases */
    CHECK_EQ_STR(mptk_conv2d_fprop_kernel(&a), "simt");
    CHECK_CONTAINS(mptk_conv2d_dgrad_kernel(&a), "tensor cores");
    a.dtype = MPT_F32;
    CHECK_EQ_STR(mptk_conv2d_wgrad_kernel(&a), "simt");
    for (i = 0; i < 3; i++) check_shape(&c, &many[i], MPT_F16, 1);
    conv_test_close(&c);
}

static int random_below(kernel_test *t, int end) {
    return (int)(kernel_random_word(t) % (uint32_t)end);
}

/* Shapes that nobody thought of; more of them in make test-full. */
MPT_TEST(random_shapes_are_right) {
    static const int channels[] = {1, 2, 3, 4, 5, 8, 12, 16, 24, 31, 32, 33, 40, 64, 72, 100, 130};
    static const mpt_dtype dtypes[] = {MPT_F16, MPT_F16, MPT_BF16, MPT_F32};
    const int count = mpt_test_full() ? 600 : 30;
    conv_test c = conv_test_open();
    uint64_t state = 1;
    int i;
    for (i = 0; i < count; i++) {
        conv_shape z;
        int num_valid, dtype;
        c.t.random = state;
        z.n = 1 + random_below(&c.t, 3);
        z.h = 1 + random_below(&c.t, 20);
        z.wd = 1 + random_below(&c.t, 20);
        z.c = channels[random_below(&c.t, 17)];
        z.k = channels[random_below(&c.t, 17)];
        z.r = 1 + random_below(&c.t, 7);
        z.s = 1 + random_below(&c.t, 7);
        z.stride = 1 + random_below(&c.t, 4);
        z.padding = random_below(&c.t, 5);
        num_valid = random_below(&c.t, z.n + 1);
        dtype = random_below(&c.t, 4);
        state = c.t.random; /* operands have a seed of their own */
        if (z.h + 2 * z.padding < z.r || z.wd + 2 * z.padding < z.s) continue;
        check_shape(&c, &z, dtypes[dtype], num_valid);
    }
    conv_test_close(&c);
}

/* A slice without a slot that counts: nothing is read, everything is zero. */
MPT_TEST(an_empty_slice_gives_zeros) {
    conv_test c;
    static const conv_shape z = {2, 5, 6, 10, 9, 3, 3, 1, 1};
    static const mpt_dtype dtypes[] = {MPT_F32, MPT_F16, MPT_BF16};
    int t;
    size_t i;
    c = conv_test_open();
    for (t = 0; t < 3; t++) {
        mpt_conv2d_args a;
        tensors got;
        sizes s;
        if (!has_kernels(dtypes[t])) continue;
        conv_shape_args(&z, dtypes[t], 0, &a);
        s = sizes_of(&a);
        got = random_operands(&c.t, &a);
        run_device(&c.t, a, &got);
        for (i = 0; i < s.y; i++) CHECK(got.y[i] == 0);
        for (i = 0; i < s.x; i++) CHECK(got.dx[i] == 0);
        for (i = 0; i < s.w; i++) CHECK(got.dw[i] == 0);
        for (i = 0; i < s.k; i++) CHECK(got.dbias[i] == 0);
        tensors_free(&got);
    }
    conv_test_close(&c);
}

/* Same bits twice; and for a slot whether or not the slots behind it count. */
MPT_TEST(two_runs_give_the_same_bits) {
    conv_test c;
    int i;
    c = conv_test_open();
    for (i = 1; i < NUM_SHAPES; i++) {
        mpt_conv2d_args a;
        tensors one, two;
        sizes s;
        if (shapes[i].n == 1 && i % 3) continue;
        conv_shape_args(&shapes[i], MPT_F16, shapes[i].n, &a);
        s = sizes_of(&a);
        one = random_operands(&c.t, &a);
        two = random_operands(&c.t, &a);
        run_device(&c.t, a, &one);
        run_device(&c.t, a, &two);
        CHECK_EQ_MEM(one.y, two.y, s.y * sizeof(float));
        CHECK_EQ_MEM(one.dx, two.dx, s.x * sizeof(float));
        CHECK_EQ_MEM(one.dw, two.dw, s.w * sizeof(float));
        CHECK_EQ_MEM(one.dbias, two.dbias, s.k * sizeof(float));
        free(two.y), free(two.dx), free(two.dw), free(two.dbias);
        a.num_valid = 1;
        run_device(&c.t, a, &two);
        CHECK_EQ_MEM(one.y, two.y, s.y / a.n * sizeof(float));
        CHECK_EQ_MEM(one.dx, two.dx, s.x / a.n * sizeof(float));
        tensors_free(&one);
        tensors_free(&two);
    }
    conv_test_close(&c);
}

/* O-37: tensor-core libraries failed, or didn't converge, with channels that are no multiples of 8.
   Within 2e-3 of the largest magnitude of FP32's result. */
static void check_relative(const char *what, const float *got, const float *want, size_t count) {
    double most = 0;
    size_t i;
    for (i = 0; i < count; i++) most = fmax(most, fabs((double)want[i]));
    for (i = 0; i < count; i++)
        if (!(fabs((double)got[i] - want[i]) <= 2e-3 * most))
            mpt_test_fail(__FILE__, __LINE__, "%s: element %zu is %.9g, not %.9g", what, i, got[i],
                          want[i]);
}

MPT_TEST(any_number_of_channels_gives_the_result_of_fp32) {
    static const int channels[] = {1, 3, 7, 8, 10, 16};
    conv_shape z = {2, 6, 5, 0, 0, 3, 3, 1, 1};
    conv_test c;
    int i;
    c = conv_test_open();
    for (i = 0; i < 36; i++) {
        mpt_conv2d_args a;
        tensors got, want;
        sizes s;
        z.c = channels[i / 6];
        z.k = channels[i % 6];
        conv_shape_args(&z, MPT_F16, z.n, &a);
        s = sizes_of(&a);
        got = random_operands(&c.t, &a);
        want = random_operands(&c.t, &a);
        run_device(&c.t, a, &got);
        run_cpu(&c, a, &want);
        check_relative("y", got.y, want.y, s.y);
        check_relative("dx", got.dx, want.dx, s.x);
        check_relative("dw", got.dw, want.dw, s.w);
        tensors_free(&got);
        tensors_free(&want);
    }
    conv_test_close(&c);
}

/* ---- PyTorch's numbers --------------------------------------------------------------------------
   Within a share of a tensor's largest magnitude: FP32 rounds sums of at most 576 terms, 16-bit
   types round results by 2^-11 and 2^-8, and BF16 the inputs, exact in FP16, as well. */
static void check_share(const reference_file *f, const char *layer, const char *name,
                        const float *got, double share) {
    char key[64];
    reference_tensor t;
    double most = 0;
    size_t i;
    snprintf(key, sizeof(key), "%s.%s", layer, name);
    t = reference_get(f, key);
    for (i = 0; i < t.count; i++) most = fmax(most, fabs((double)t.data[i]));
    for (i = 0; i < t.count; i++)
        if (!(fabs((double)got[i] - t.data[i]) <= share * most))
            mpt_test_fail(__FILE__, __LINE__, "%s: element %zu is %.9g, not %.9g", key, i, got[i],
                          t.data[i]);
    reference_free(&t);
}

static float *reference_floats(const reference_file *f, const char *layer, const char *name,
                               int64_t dims[4]) {
    char key[64];
    reference_tensor t;
    snprintf(key, sizeof(key), "%s.%s", layer, name);
    t = reference_get(f, key);
    memcpy(dims, t.dims, sizeof(t.dims));
    return t.data;
}

static void check_reference_layer(conv_test *c, const reference_file *f, int number,
                                  mpt_dtype dtype) {
    static const int attributes[8][2] = {{1, 1}, {2, 1}, {1, 0}, {2, 0},
                                         {2, 3}, {1, 2}, {1, 0}, {1, 1}};
    const double share = dtype == MPT_F32 ? 3e-5 : dtype == MPT_F16 ? 1e-2 : 4e-2;
    int64_t x[4], w[4], unused[4];
    char layer[16];
    conv_shape z;
    tensors t;
    mpt_conv2d_args a;
    snprintf(layer, sizeof(layer), "conv%d", number);
    memset(&t, 0, sizeof(t));
    t.x = reference_floats(f, layer, "x", x);
    t.w = reference_floats(f, layer, "weight", w);
    t.bias = reference_floats(f, layer, "bias", unused);
    t.dy = reference_floats(f, layer, "dy", unused);
    z.n = (int)x[0], z.h = (int)x[1], z.wd = (int)x[2], z.c = (int)x[3];
    z.k = (int)w[0], z.r = (int)w[1], z.s = (int)w[2];
    z.stride = attributes[number][0];
    z.padding = attributes[number][1];
    conv_shape_args(&z, dtype, z.n, &a);
    run_device(&c->t, a, &t);
    check_share(f, layer, "y", t.y, share);
    check_share(f, layer, "dx", t.dx, share);
    check_share(f, layer, "dweight", t.dw, share);
    check_share(f, layer, "dbias", t.dbias, share);
    tensors_free(&t);
}

MPT_TEST(convolution_matches_pytorch) {
    static const mpt_dtype dtypes[] = {MPT_F32, MPT_F16, MPT_BF16};
    reference_file f;
    conv_test c;
    int t, i;
    c = conv_test_open();
    f = reference_open("layers.safetensors");
    for (t = 0; t < 3; t++)
        for (i = 0; i < 8 && has_kernels(dtypes[t]); i++)
            check_reference_layer(&c, &f, i, dtypes[t]);
    reference_close(&f);
    conv_test_close(&c);
}

/* ---- statistics for batch normalization --------------------------------------------------------
   Against sums in double of the y that the kernel wrote. FP32 adds at most 2^11 numbers in a row:
   far below 1e-5 of the sum of squares. */
static void check_stats(conv_test *c, const conv_shape *z, mpt_dtype dtype, int num_valid) {
    kernel_test *t = &c->t;
    mpt_conv2d_args a;
    tensors o;
    sizes s;
    size_t m, pixels;
    float *pivot, *got, *y;
    void *y_host, *parts;
    int rows, k, row;
    if (!has_kernels(dtype)) return;
    conv_shape_args(z, dtype, num_valid, &a);
    s = sizes_of(&a);
    o = random_operands(t, &a);
    rows = mptk_conv2d_fprop_stats_rows(&a);
    CHECK(rows > 0);
    pivot = random_floats(t, MPT_F32, s.k, 1);
    y_host = kernel_nans(t, dtype, s.y);
    parts = kernel_nans(t, MPT_F32, (size_t)rows * 2 * s.k);
    a.x = on_device(t, stored(t, dtype, o.x, s.x, s.x / a.n * num_valid));
    a.w = on_device(t, stored(t, dtype, o.w, s.w, s.w));
    a.bias = (const float *)on_device(t, stored(t, MPT_F32, o.bias, s.k, s.k));
    a.y = on_device(t, y_host);
    a.workspace = device_workspace(t, mptk_conv2d_fprop_workspace_bytes(&a));
    CHECK_KERNEL(
        mptk_conv2d_fprop_stats(&a, (float *)on_device(t, parts),
                                (const float *)on_device(t, stored(t, MPT_F32, pivot, s.k, s.k)),
                                NULL));
    y = fetched(t, dtype, y_host, s.y);
    got = fetched(t, MPT_F32, parts, (size_t)rows * 2 * s.k);
    pixels = s.y / a.n * num_valid / s.k;
    for (k = 0; k < z->k; k++) {
        double sum = 0, square = 0, got_sum = 0, got_square = 0;
        for (m = 0; m < pixels; m++) {
            const double d = (double)y[m * s.k + k] - pivot[k];
            sum += d;
            square += d * d;
        }
        for (row = 0; row < rows; row++) {
            got_sum += got[((size_t)row * 2) * s.k + k];
            got_square += got[((size_t)row * 2 + 1) * s.k + k];
        }
        CHECK_NEAR(got_sum, sum, 1e-5 * (square + 1));
        CHECK_NEAR(got_square, square, 1e-5 * (square + 1));
    }
    free(y), free(got), free(pivot);
    tensors_free(&o);
    kernel_test_release(t);
}

MPT_TEST(statistics_of_what_a_convolution_wrote) {
    mpt_conv2d_args a;
    conv_test c = conv_test_open();
    int i;
    for (i = 0; i < NUM_TILE_SHAPES; i++) {
        check_stats(&c, &tile_shapes[i], MPT_F16, tile_shapes[i].n);
        check_stats(&c, &tile_shapes[i], MPT_F16, tile_shapes[i].n / 2);
    }
    for (i = 0; i < NUM_SHAPES; i += 3) check_stats(&c, &shapes[i], MPT_BF16, shapes[i].n);
    conv_shape_args(&shapes[2], MPT_F32, 1, &a);
    CHECK_EQ_INT(mptk_conv2d_fprop_stats_rows(&a), 0);
    CHECK(mptk_conv2d_fprop_stats(&a, NULL, NULL, NULL) != 0);
    conv_test_close(&c);
}

/* ---- beside the convolution ------------------------------------------------------------------ */
static void check_sum_columns(kernel_test *t, mpt_dtype dtype, int rows, int columns) {
    const size_t count = (size_t)rows * columns;
    float *x = random_floats(t, dtype, count + 1, 1), *got;
    void *sums = kernel_nans(t, MPT_F32, columns);
    int i, k;
    CHECK_KERNEL(mptk_sum_columns(
        on_device(t, stored(t, dtype, x, count, count)), (float *)on_device(t, sums), rows, columns,
        dtype, device_workspace(t, mptk_sum_columns_workspace_bytes(rows, columns)), NULL));
    got = fetched(t, MPT_F32, sums, columns);
    for (k = 0; k < columns; k++) {
        double sum = 0;
        for (i = 0; i < rows; i++) sum += x[(size_t)i * columns + k];
        /* a chain has 16, 32 and rows / 4096 additions, each 2^-24 of at most `rows` */
        CHECK_NEAR(got[k], sum, rows * 3e-6);
    }
    free(x), free(got);
    kernel_test_release(t);
}

MPT_TEST(columns_are_summed) {
    static const mpt_dtype dtypes[] = {MPT_F32, MPT_F16, MPT_BF16};
    kernel_test t = kernel_test_open();
    int i;
    for (i = 0; i < 3; i++) {
        check_sum_columns(&t, dtypes[i], 0, 5);
        check_sum_columns(&t, dtypes[i], 1, 1);
        check_sum_columns(&t, dtypes[i], 511, 64);
        check_sum_columns(&t, dtypes[i], 513, 67);
        check_sum_columns(&t, dtypes[i], 6000, 8);
    }
    kernel_test_close(&t);
}

MPT_TEST(a_bias_is_added) {
    static const mpt_dtype dtypes[] = {MPT_F32, MPT_F16, MPT_BF16};
    enum { ROWS = 37, COLUMNS = 13, COUNT = ROWS * COLUMNS };
    kernel_test t = kernel_test_open();
    int d, i;
    for (d = 0; d < 3; d++) {
        const mpt_dtype dtype = dtypes[d];
        float *y = random_floats(&t, dtype, COUNT, 1), *bias = kernel_random_f32(&t, COLUMNS);
        void *got = stored(&t, dtype, y, COUNT, COUNT), *want = kernel_nans(&t, dtype, COUNT);
        void *device = on_device(&t, got);
        const float *device_bias = (const float *)on_device(&t, bias);
        CHECK_KERNEL(mptk_add_bias(device, device_bias, 0, COLUMNS, dtype, NULL));
        CHECK_KERNEL(mptk_add_bias(device, device_bias, ROWS, COLUMNS, dtype, NULL));
        for (i = 0; i < COUNT; i++) mpti_store(dtype, want, i, y[i] + bias[i % COLUMNS]);
        check_same("y", dtype, from_device(&t, got), want, COUNT);
        free(y);
        kernel_test_release(&t);
    }
    kernel_test_close(&t);
}

MPT_TEST(kernels_tell_what_they_are) {
    CHECK_EQ_INT(mptk_abi_version(), MPT_ABI_VERSION);
    CHECK(atoi(mptk_arch_list()) >= 70);
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(fp16_convolution_matches_the_definition),
    MPT_TEST_CASE(bf16_convolution_matches_the_definition),
    MPT_TEST_CASE(fp32_convolution_matches_the_definition),
    MPT_TEST_CASE(fp16_every_tile_is_reached_and_right),
    MPT_TEST_CASE(bf16_every_tile_is_reached_and_right),
    MPT_TEST_CASE(filters_of_many_taps_are_right),
    MPT_TEST_CASE(random_shapes_are_right),
    MPT_TEST_CASE(an_empty_slice_gives_zeros),
    MPT_TEST_CASE(two_runs_give_the_same_bits),
    MPT_TEST_CASE(any_number_of_channels_gives_the_result_of_fp32),
    MPT_TEST_CASE(convolution_matches_pytorch),
    MPT_TEST_CASE(statistics_of_what_a_convolution_wrote),
    MPT_TEST_CASE(columns_are_summed),
    MPT_TEST_CASE(a_bias_is_added),
    MPT_TEST_CASE(kernels_tell_what_they_are),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
