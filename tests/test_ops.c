/* test_ops.c - >>cpu: every operator against its definition, PyTorch's numbers and finite
   differences */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "conv_shape.h"
#include "mpt_test.h"
#include "reference.h"

/* ---- the harness --------------------------------------------------------------------------------
   Operators run in every family of kernels that this processor has. Buffers are exactly as long as
   they must be, the slots that don't count hold NaN, and outputs and workspaces hold NaN before. */
static const char *const families[] = {"definition", "plain", "avx2"};
enum { NUM_FAMILIES = 3 };
static const mpt_dtype dtypes[] = {MPT_F32, MPT_F16, MPT_BF16};

/* Steps of a storage type around 1, for tolerances: half of it is the error of one rounding. */
static double epsilon_of(mpt_dtype dtype) {
    return dtype == MPT_F32 ? 1.2e-7 : dtype == MPT_F16 ? 9.8e-4 : 7.9e-3;
}

typedef struct machine {
    mpt_ctx *ctx;
    void *self;
    const mpt_backend *ops;
} machine;

static int machine_try(machine *m, const char *family, int threads) { /* 0: not on this processor */
    mpt_ctx_desc d;
    memset(&d, 0, sizeof(d));
    d.num_threads = threads;
    m->ops = mpt_backend_cpu();
    CHECK_OK(NULL, mpt_ctx_create(&d, &m->ctx));
    if (mpti_cpu_open_family(m->ctx, family, &m->self) == MPT_OK) return 1;
    CHECK_EQ_STR(family, "avx2"); /* the others are everywhere */
    mpt_ctx_destroy(m->ctx);
    return 0;
}

static machine machine_open(const char *family, int threads) {
    machine m;
    if (!machine_try(&m, family, threads)) SKIP("this processor has no AVX2");
    return m;
}

static void machine_close(machine *m) {
    m->ops->close(m->self);
    mpt_ctx_destroy(m->ctx);
}

static uint64_t random_state;

static float random_float(void) { /* -1 .. 1, a multiple of 1/64: exact in FP16, not in BF16 */
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (float)((int)(random_state >> 57) - 64) / 64.0f;
}

/* `used` random numbers of a buffer of `count`; NaN behind them. */
static void *random_buffer(mpt_dtype dtype, size_t count, size_t used) {
    void *p = malloc(count * mpt_dtype_size(dtype) + (count == 0));
    size_t i;
    for (i = 0; i < count; i++)
        mpti_store(dtype, p, i, i < used ? random_float() : mpti_f32_from_bits(0x7fc00000));
    return p;
}

static void *nan_buffer(mpt_dtype dtype, size_t count) {
    return random_buffer(dtype, count, 0);
}

/* A workspace of just that size, aligned, full of NaN. */
static void *workspace_of(size_t bytes) {
    void *p = NULL;
    if (bytes == 0) return NULL;
    CHECK(posix_memalign(&p, 64, bytes) == 0);
    memset(p, 0xff, bytes);
    return p;
}

static void *copy_as(mpt_dtype dtype, const float *data, size_t count) {
    void *p = malloc(count * mpt_dtype_size(dtype));
    size_t i;
    for (i = 0; i < count; i++) mpti_store(dtype, p, i, data[i]);
    return p;
}

static double largest(mpt_dtype dtype, const void *p, size_t count) {
    double most = 0;
    size_t i;
    for (i = 0; i < count; i++) most = fmax(most, fabs((double)mpti_load(dtype, p, i)));
    return most;
}

/* |a - b| at most absolute + relative * |b|, element by element; a NaN fails. */
static void check_close(const char *what, mpt_dtype dtype, const void *a, const void *b,
                        size_t count, double absolute, double relative) {
    size_t i;
    for (i = 0; i < count; i++) {
        double u = mpti_load(dtype, a, i), v = mpti_load(dtype, b, i);
        if (!(fabs(u - v) <= absolute + relative * fabs(v)))
            mpt_test_fail(__FILE__, __LINE__, "%s: element %zu of %zu is %.9g, expected %.9g", what,
                          i, count, u, v);
    }
}

/* Against PyTorch: within `share` of the tensor's largest magnitude. */
static void check_reference(const reference_file *f, const char *layer, const char *name,
                            mpt_dtype dtype, const void *got, double share) {
    char key[128];
    reference_tensor t;
    double most, worst = 0;
    size_t i, at = 0;
    snprintf(key, sizeof(key), "%s.%s", layer, name);
    t = reference_get(f, key);
    most = largest(MPT_F32, t.data, t.count);
    for (i = 0; i < t.count; i++) {
        double d = fabs((double)mpti_load(dtype, got, i) - (double)t.data[i]);
        if (d <= worst) continue; /* a NaN goes on */
        worst = d;
        at = i;
    }
    if (!(worst <= share * most))
        mpt_test_fail(__FILE__, __LINE__, "%s: element %zu is off by %.3g of the largest (%.3g)",
                      key, at, worst / most, most);
    reference_free(&t);
}

/* Tolerances against PyTorch. FP32: sums of at most 576 terms, each rounded to 2^-24. FP16 and
   BF16: results are rounded to 2^-11 and 2^-9 of themselves, which may be less than the largest; in
   BF16 the inputs, of up to 3 standard deviations and exact in FP16, are rounded as well. */
static double reference_share(mpt_dtype dtype) {
    return dtype == MPT_F32 ? 3e-5 : dtype == MPT_F16 ? 1e-2 : 4e-2;
}

/* ---- convolution ----------------------------------------------------------------------------- */
/* Every branch: tiles of 1 to 6 rows, panels of 8 and 16 and ragged ones, taps in one block and in
   several, runs longer than a block, bands within an image, flat groups, in place and staged,
   borders wider than the image, phases without taps, weights cut by filters. */
static const conv_shape conv_shapes[] = {
    {1, 1, 1, 1, 1, 1, 1, 1, 0},     {2, 5, 7, 3, 8, 3, 3, 1, 1},    {3, 6, 5, 8, 16, 3, 3, 1, 1},
    {5, 7, 7, 16, 31, 3, 3, 2, 1},   {2, 9, 8, 31, 7, 5, 5, 1, 0},   {1, 13, 12, 1, 3, 7, 7, 2, 3},
    {4, 6, 6, 16, 24, 1, 1, 1, 0},   {3, 7, 6, 8, 8, 1, 1, 2, 0},    {2, 8, 8, 7, 16, 1, 1, 3, 1},
    {1, 5, 5, 3, 9, 3, 3, 1, 3},     {2, 4, 11, 16, 16, 1, 3, 1, 1}, {1, 10, 3, 5, 17, 5, 1, 2, 0},
    {2, 6, 6, 160, 40, 3, 3, 1, 1},  {1, 4, 4, 500, 33, 1, 1, 1, 0}, {1, 40, 41, 24, 8, 3, 3, 1, 1},
    {2, 5, 5, 8, 8, 2, 2, 3, 0},     {1, 3, 3, 4, 4, 3, 3, 4, 2},    {5, 20, 21, 8, 16, 3, 3, 1, 0},
    {1, 9, 9, 130, 130, 5, 5, 1, 2},
};
enum { NUM_CONV_SHAPES = sizeof(conv_shapes) / sizeof(conv_shapes[0]) };

typedef struct conv_case { /* arguments with memory behind them */
    mpt_conv2d_args a;
    size_t num_x, num_y, num_w;
    double depth[3]; /* terms of a sum in fprop, dgrad, wgrad */
} conv_case;

static conv_case conv_make(const conv_shape *z, mpt_dtype dtype, int num_valid, int with_bias) {
    conv_case c;
    mpt_conv2d_args *a = &c.a;
    conv_shape_args(z, dtype, num_valid, a);
    c.num_x = (size_t)a->n * a->h * a->wd * a->c;
    c.num_y = (size_t)a->n * a->p * a->q * a->k;
    c.num_w = (size_t)a->k * a->r * a->s * a->c;
    c.depth[0] = (double)a->r * a->s * a->c;
    c.depth[1] = (double)a->r * a->s * a->k;
    c.depth[2] = (double)a->n * a->p * a->q;
    random_state = 7;
    a->x = random_buffer(dtype, c.num_x, c.num_x / a->n * num_valid);
    a->w = random_buffer(dtype, c.num_w, c.num_w);
    a->dy = random_buffer(dtype, c.num_y, c.num_y / a->n * num_valid);
    if (with_bias) a->bias = (const float *)random_buffer(MPT_F32, a->k, a->k);
    a->y = nan_buffer(dtype, c.num_y);
    a->dx = nan_buffer(dtype, c.num_x);
    a->dw = (float *)nan_buffer(MPT_F32, c.num_w);
    if (with_bias) a->dbias = (float *)nan_buffer(MPT_F32, a->k);
    return c;
}

static void conv_free(conv_case *c) {
    free((void *)c->a.x);
    free((void *)c->a.w);
    free((void *)c->a.dy);
    free((void *)c->a.bias);
    free(c->a.y);
    free(c->a.dx);
    free(c->a.dw);
    free(c->a.dbias);
}

static void conv_run(machine *m, mpt_conv2d_args *a) {
    a->workspace_bytes = m->ops->conv2d_fprop_workspace_bytes(m->self, a);
    a->workspace = workspace_of(a->workspace_bytes);
    CHECK_OK(m->ctx, m->ops->conv2d_fprop(m->self, a));
    free(a->workspace);
    a->workspace_bytes = m->ops->conv2d_dgrad_workspace_bytes(m->self, a);
    a->workspace = workspace_of(a->workspace_bytes);
    CHECK_OK(m->ctx, m->ops->conv2d_dgrad(m->self, a));
    free(a->workspace);
    a->workspace_bytes = m->ops->conv2d_wgrad_workspace_bytes(m->self, a);
    a->workspace = workspace_of(a->workspace_bytes);
    CHECK_OK(m->ctx, m->ops->conv2d_wgrad(m->self, a));
    free(a->workspace);
}

/* Both sides sum the same terms, of at most 1 each, in another order: every addition rounds by
   2^-24 of a sum that stays far below its number of terms. Storage may then round to either
   neighbour. */
static void conv_compare(const conv_case *got, const conv_case *want) {
    const double unit = 1.2e-7, eps = epsilon_of(got->a.dtype);
    const mpt_dtype t = got->a.dtype;
    const double store = t == MPT_F32 ? 0 : eps;
    const size_t valid_y = got->num_y / got->a.n * got->a.num_valid;
    size_t i;
    check_close("y", t, got->a.y, want->a.y, got->num_y, unit * got->depth[0], store);
    check_close("dx", t, got->a.dx, want->a.dx, got->num_x, unit * got->depth[1], store);
    check_close("dw", MPT_F32, got->a.dw, want->a.dw, got->num_w, unit * got->depth[2], 0);
    if (got->a.dbias)
        check_close("dbias", MPT_F32, got->a.dbias, want->a.dbias, got->a.k, unit * got->depth[2],
                    0);
    for (i = valid_y; i < got->num_y; i++) CHECK(mpti_load(t, got->a.y, i) == 0);
}

static void conv_against_definition(const char *family) {
    machine m = machine_open(family, 2), definition = machine_open("definition", 1);
    int i, t, num_valid;
    for (i = 0; i < NUM_CONV_SHAPES; i++) {
        for (t = 0; t < 3; t++) {
            for (num_valid = 0; num_valid <= conv_shapes[i].n; num_valid++) {
                conv_case got, want;
                /* the large ones once with all slots and once without the last */
                if (num_valid + 1 < conv_shapes[i].n && (i > 9 || t > 0)) continue;
                got = conv_make(&conv_shapes[i], dtypes[t], num_valid, i % 2);
                want = conv_make(&conv_shapes[i], dtypes[t], num_valid, i % 2);
                conv_run(&m, &got.a);
                conv_run(&definition, &want.a);
                conv_compare(&got, &want);
                conv_free(&got);
                conv_free(&want);
            }
        }
    }
    machine_close(&m);
    machine_close(&definition);
}

MPT_TEST(plain_convolution_matches_the_definition) {
    conv_against_definition("plain");
}

MPT_TEST(avx2_convolution_matches_the_definition) {
    conv_against_definition("avx2");
}

/* Same bits with 1, 2 and 5 threads; and each slot's y and dx as if it were alone. */
static void conv_threads(const char *family) {
    static const int threads[] = {1, 2, 5};
    int i, t;
    for (i = 0; i < NUM_CONV_SHAPES; i++) {
        conv_case c[3];
        for (t = 0; t < 3; t++) {
            machine m = machine_open(family, threads[t]);
            c[t] = conv_make(&conv_shapes[i], i % 2 ? MPT_F16 : MPT_F32, conv_shapes[i].n, 1);
            conv_run(&m, &c[t].a);
            machine_close(&m);
            CHECK_EQ_MEM(c[t].a.y, c[0].a.y, c[0].num_y * mpt_dtype_size(c[0].a.dtype));
            CHECK_EQ_MEM(c[t].a.dx, c[0].a.dx, c[0].num_x * mpt_dtype_size(c[0].a.dtype));
            CHECK_EQ_MEM(c[t].a.dw, c[0].a.dw, c[0].num_w * sizeof(float));
            CHECK_EQ_MEM(c[t].a.dbias, c[0].a.dbias, c[0].a.k * sizeof(float));
        }
        for (t = 0; t < 3; t++) conv_free(&c[t]);
    }
}

MPT_TEST(convolution_gives_the_same_bits_on_any_number_of_threads) {
    machine m;
    conv_threads("plain");
    if (machine_try(&m, "avx2", 1)) {
        machine_close(&m);
        conv_threads("avx2");
    }
}

/* What is in other slots, or that they don't count, changes no bit of a slot's y and dx. */
MPT_TEST(slots_do_not_touch_each_other) {
    int f, i;
    for (f = 1; f < NUM_FAMILIES; f++) {
        machine m;
        if (!machine_try(&m, families[f], 2)) continue;
        for (i = 0; i < NUM_CONV_SHAPES; i++) {
            conv_case all = conv_make(&conv_shapes[i], MPT_F32, conv_shapes[i].n, 1);
            conv_case one = conv_make(&conv_shapes[i], MPT_F32, 1, 1);
            conv_run(&m, &all.a);
            conv_run(&m, &one.a);
            /* conv_make draws x first: the first slot is the same in both, w and dy are not */
            memcpy((void *)one.a.w, all.a.w, all.num_w * sizeof(float));
            memcpy((void *)one.a.dy, all.a.dy, all.num_y / all.a.n * sizeof(float));
            memcpy((void *)one.a.bias, all.a.bias, all.a.k * sizeof(float));
            conv_run(&m, &one.a);
            CHECK_EQ_MEM(one.a.y, all.a.y, all.num_y / all.a.n * sizeof(float));
            CHECK_EQ_MEM(one.a.dx, all.a.dx, all.num_x / all.a.n * sizeof(float));
            conv_free(&all);
            conv_free(&one);
        }
        machine_close(&m);
    }
}

static void conv_reference_one(machine *m, const reference_file *f, int number, mpt_dtype dtype) {
    static const int attributes[8][2] = {{1, 1}, {2, 1}, {1, 0}, {2, 0},
                                         {2, 3}, {1, 2}, {1, 0}, {1, 1}};
    char layer[16], key[32];
    reference_tensor x, w, b, dy;
    conv_shape z;
    conv_case c;
    double share = reference_share(dtype);
    snprintf(layer, sizeof(layer), "conv%d", number);
    snprintf(key, sizeof(key), "%s.x", layer);
    x = reference_get(f, key);
    snprintf(key, sizeof(key), "%s.weight", layer);
    w = reference_get(f, key);
    snprintf(key, sizeof(key), "%s.bias", layer);
    b = reference_get(f, key);
    snprintf(key, sizeof(key), "%s.dy", layer);
    dy = reference_get(f, key);
    z.n = (int)x.dims[0];
    z.h = (int)x.dims[1];
    z.wd = (int)x.dims[2];
    z.c = (int)x.dims[3];
    z.k = (int)w.dims[0];
    z.r = (int)w.dims[1];
    z.s = (int)w.dims[2];
    z.stride = attributes[number][0];
    z.padding = attributes[number][1];
    c = conv_make(&z, dtype, z.n, 1);
    CHECK_EQ_INT(c.num_y, dy.count);
    free((void *)c.a.x);
    free((void *)c.a.w);
    free((void *)c.a.dy);
    c.a.x = copy_as(dtype, x.data, x.count);
    c.a.w = copy_as(dtype, w.data, w.count);
    c.a.dy = copy_as(dtype, dy.data, dy.count);
    memcpy((void *)c.a.bias, b.data, b.count * sizeof(float));
    conv_run(m, &c.a);
    check_reference(f, layer, "y", dtype, c.a.y, share);
    check_reference(f, layer, "dx", dtype, c.a.dx, share);
    check_reference(f, layer, "dweight", MPT_F32, c.a.dw, share);
    check_reference(f, layer, "dbias", MPT_F32, c.a.dbias, share);
    conv_free(&c);
    reference_free(&x);
    reference_free(&w);
    reference_free(&b);
    reference_free(&dy);
}

MPT_TEST(convolution_matches_pytorch) {
    reference_file f = reference_open("layers.safetensors");
    int family, t, i;
    for (family = 0; family < NUM_FAMILIES; family++) {
        machine m;
        if (!machine_try(&m, families[family], 2)) continue;
        for (t = 0; t < 3; t++)
            for (i = 0; i < 8; i++) conv_reference_one(&m, &f, i, dtypes[t]);
        machine_close(&m);
    }
    reference_close(&f);
}

/* inf and NaN come through, and only where they went in. */
MPT_TEST(non_finite_numbers_pass_through_convolution) {
    static const conv_shape z = {2, 6, 6, 8, 8, 3, 3, 1, 1};
    int f;
    for (f = 0; f < NUM_FAMILIES; f++) {
        machine m;
        conv_case c;
        size_t i, half;
        int bad = 0;
        if (!machine_try(&m, families[f], 1)) continue;
        c = conv_make(&z, MPT_F16, 2, 0);
        half = c.num_y / 2;
        ((uint16_t *)c.a.x)[c.num_x / 2 + 112] = 0x7c00;  /* second slot, inside, channel 0: +inf */
        ((uint16_t *)c.a.dy)[c.num_y / 2 + 112] = 0x7e00; /* and NaN */
        conv_run(&m, &c.a);
        for (i = 0; i < half; i++) CHECK((((uint16_t *)c.a.y)[i] & 0x7c00) != 0x7c00);
        for (i = half; i < c.num_y; i++) bad += (((uint16_t *)c.a.y)[i] & 0x7c00) == 0x7c00;
        CHECK_EQ_INT(bad, 9 * 8); /* the 3x3 windows that hold it, all channels */
        for (i = 0, bad = 0; i < c.num_w; i++)
            bad += (mpti_f32_bits(c.a.dw[i]) & 0x7f800000) == 0x7f800000;
        CHECK_EQ_INT(bad, 9 * 8 + 9 * 8 -
                              9); /* channel 0 of x with all of dy, and the other way round */
        conv_free(&c);
        machine_close(&m);
    }
}

/* ---- dense ----------------------------------------------------------------------------------- */
static mpt_dense_args dense_of(const mpt_conv2d_args *c) {
    mpt_dense_args d;
    memset(&d, 0, sizeof(d));
    d.x = c->x;
    d.w = c->w;
    d.bias = c->bias;
    d.dy = c->dy;
    d.y = c->y;
    d.dx = c->dx;
    d.dw = c->dw;
    d.dbias = c->dbias;
    d.n = c->n;
    d.num_valid = c->num_valid;
    d.in = c->c;
    d.out = c->k;
    d.dtype = c->dtype;
    return d;
}

static void dense_run(machine *m, const mpt_conv2d_args *c) {
    mpt_dense_args d = dense_of(c);
    d.workspace_bytes = m->ops->dense_fprop_workspace_bytes(m->self, &d);
    d.workspace = workspace_of(d.workspace_bytes);
    CHECK_OK(m->ctx, m->ops->dense_fprop(m->self, &d));
    free(d.workspace);
    d.workspace_bytes = m->ops->dense_dgrad_workspace_bytes(m->self, &d);
    d.workspace = workspace_of(d.workspace_bytes);
    CHECK_OK(m->ctx, m->ops->dense_dgrad(m->self, &d));
    free(d.workspace);
    d.workspace_bytes = m->ops->dense_wgrad_workspace_bytes(m->self, &d);
    d.workspace = workspace_of(d.workspace_bytes);
    CHECK_OK(m->ctx, m->ops->dense_wgrad(m->self, &d));
    free(d.workspace);
}

/* n, in, out; the definition is written out here: y = x w^T + b and its two transposes */
MPT_TEST(dense_is_what_it_says) {
    static const int shapes[][3] = {
        {1, 1, 1}, {5, 37, 11}, {4, 128, 10}, {130, 100, 24}, {3, 1000, 8}};
    int family, s, t, i, j, n;
    for (family = 0; family < NUM_FAMILIES; family++) {
        machine m;
        if (!machine_try(&m, families[family], 2)) continue;
        for (s = 0; s < 5; s++) {
            for (t = 0; t < 3; t++) {
                conv_shape z = {0, 1, 1, 0, 0, 1, 1, 1, 0};
                const double store = t ? epsilon_of(dtypes[t]) : 0;
                conv_case c;
                z.n = shapes[s][0];
                z.c = shapes[s][1];
                z.k = shapes[s][2];
                c = conv_make(&z, dtypes[t], z.n - (z.n > 1), 1);
                dense_run(&m, &c.a);
                for (n = 0; n < z.n; n++) {
                    for (j = 0; j < z.k; j++) {
                        double sum = c.a.bias[j],
                               got = mpti_load(dtypes[t], c.a.y, (size_t)n * z.k + j);
                        for (i = 0; i < z.c; i++)
                            sum += (double)mpti_load(dtypes[t], c.a.x, (size_t)n * z.c + i) *
                                   mpti_load(dtypes[t], c.a.w, (size_t)j * z.c + i);
                        if (n >= c.a.num_valid) sum = 0;
                        CHECK_NEAR(got, sum, 1.2e-7 * z.c + store * fabs(sum));
                    }
                    for (i = 0; i < z.c; i++) {
                        double sum = 0, got = mpti_load(dtypes[t], c.a.dx, (size_t)n * z.c + i);
                        for (j = 0; j < z.k && n < c.a.num_valid; j++)
                            sum += (double)mpti_load(dtypes[t], c.a.dy, (size_t)n * z.k + j) *
                                   mpti_load(dtypes[t], c.a.w, (size_t)j * z.c + i);
                        CHECK_NEAR(got, sum, 1.2e-7 * z.k + store * fabs(sum));
                    }
                }
                for (j = 0; j < z.k; j++) {
                    double bias = 0;
                    for (n = 0; n < c.a.num_valid; n++)
                        bias += mpti_load(dtypes[t], c.a.dy, (size_t)n * z.k + j);
                    CHECK_NEAR(c.a.dbias[j], bias, 1.2e-7 * z.n);
                    for (i = 0; i < z.c; i++) {
                        double sum = 0;
                        for (n = 0; n < c.a.num_valid; n++)
                            sum += (double)mpti_load(dtypes[t], c.a.dy, (size_t)n * z.k + j) *
                                   mpti_load(dtypes[t], c.a.x, (size_t)n * z.c + i);
                        CHECK_NEAR(c.a.dw[(size_t)j * z.c + i], sum, 1.2e-7 * z.n);
                    }
                }
                conv_free(&c);
            }
        }
        machine_close(&m);
    }
}

MPT_TEST(dense_matches_pytorch) {
    reference_file f = reference_open("layers.safetensors");
    reference_tensor x = reference_get(&f, "linear.x"), w = reference_get(&f, "linear.weight");
    reference_tensor b = reference_get(&f, "linear.bias"), dy = reference_get(&f, "linear.dy");
    const conv_shape z = {5, 1, 1, 37, 11, 1, 1, 1, 0};
    int family, t;
    for (family = 0; family < NUM_FAMILIES; family++) {
        machine m;
        if (!machine_try(&m, families[family], 2)) continue;
        for (t = 0; t < 3; t++) {
            conv_case c = conv_make(&z, dtypes[t], 5, 1);
            double share = reference_share(dtypes[t]);
            free((void *)c.a.x);
            free((void *)c.a.w);
            free((void *)c.a.dy);
            c.a.x = copy_as(dtypes[t], x.data, x.count);
            c.a.w = copy_as(dtypes[t], w.data, w.count);
            c.a.dy = copy_as(dtypes[t], dy.data, dy.count);
            memcpy((void *)c.a.bias, b.data, b.count * sizeof(float));
            dense_run(&m, &c.a);
            check_reference(&f, "linear", "y", dtypes[t], c.a.y, share);
            check_reference(&f, "linear", "dx", dtypes[t], c.a.dx, share);
            check_reference(&f, "linear", "dweight", MPT_F32, c.a.dw, share);
            check_reference(&f, "linear", "dbias", MPT_F32, c.a.dbias, share);
            conv_free(&c);
        }
        machine_close(&m);
    }
    reference_free(&x);
    reference_free(&w);
    reference_free(&b);
    reference_free(&dy);
    reference_close(&f);
}

/* ---- finite differences -------------------------------------------------------------------------
   The gradient of loss = sum(y * dy) by every input, from (loss(p + h) - loss(p - h)) / 2h. */
typedef double (*loss_fn)(void *user);

static void check_gradient(const char *what, float *p, size_t count, const float *gradient,
                           double h, double tolerance, loss_fn loss, void *user) {
    size_t i, step = count / 50 + 1;
    for (i = 0; i < count; i += step) {
        const float old = p[i], up = (float)(old + h), down = (float)(old - h);
        double numeric, high;
        p[i] = up;
        high = loss(user);
        p[i] = down;
        numeric = (high - loss(user)) / ((double)up - down);
        p[i] = old;
        if (!(fabs(numeric - gradient[i]) <= tolerance))
            mpt_test_fail(__FILE__, __LINE__, "%s: gradient %zu is %.7g, by differences %.7g", what,
                          i, (double)gradient[i], numeric);
    }
}

static double weighted_sum(const float *y, const float *dy, size_t count) {
    double sum = 0;
    size_t i;
    for (i = 0; i < count; i++) sum += (double)y[i] * dy[i];
    return sum;
}

typedef struct conv_loss {
    machine *m;
    mpt_conv2d_args a;
    size_t num_y;
} conv_loss;

static double conv_loss_of(void *user) {
    conv_loss *l = (conv_loss *)user;
    CHECK_OK(l->m->ctx, l->m->ops->conv2d_fprop(l->m->self, &l->a));
    return weighted_sum((const float *)l->a.y, (const float *)l->a.dy, l->num_y);
}

/* Linear in each argument, so that a large h has no error but rounding: 1e-6 of sums of about 10.
   */
MPT_TEST(convolution_gradients_agree_with_differences) {
    int family, i;
    for (family = 0; family < NUM_FAMILIES; family++) {
        machine m;
        if (!machine_try(&m, families[family], 1)) continue;
        for (i = 0; i < 12; i++) {
            conv_case c = conv_make(&conv_shapes[i], MPT_F32, conv_shapes[i].n, 1);
            conv_loss l;
            conv_run(&m, &c.a);
            l.m = &m;
            l.a = c.a;
            l.a.workspace_bytes = m.ops->conv2d_fprop_workspace_bytes(m.self, &c.a);
            l.a.workspace = workspace_of(l.a.workspace_bytes);
            l.num_y = c.num_y;
            check_gradient("x", (float *)c.a.x, c.num_x, (float *)c.a.dx, 1, 1e-3, conv_loss_of,
                           &l);
            check_gradient("w", (float *)c.a.w, c.num_w, c.a.dw, 1, 1e-3, conv_loss_of, &l);
            check_gradient("bias", (float *)c.a.bias, c.a.k, c.a.dbias, 1, 1e-3, conv_loss_of, &l);
            free(l.a.workspace);
            conv_free(&c);
        }
        machine_close(&m);
    }
}

/* ---- batch norm ------------------------------------------------------------------------------ */
typedef struct norm_case {
    mpt_batchnorm_args a;
    machine *m;
    size_t count; /* n h wd c */
    float *gamma, *beta, *running_mean, *running_var;
    void *x, *residual, *dy;
} norm_case;

static norm_case norm_make(machine *m, int n, int h, int wd, int c, mpt_dtype dtype, int num_valid,
                           int relu, int residual) {
    norm_case b;
    size_t used;
    memset(&b, 0, sizeof(b));
    b.m = m;
    b.count = (size_t)n * h * wd * c;
    used = b.count / n * num_valid;
    random_state = 11;
    b.a.x = b.x = random_buffer(dtype, b.count, used);
    b.a.dy = b.dy = random_buffer(dtype, b.count, used);
    if (residual) b.a.residual = b.residual = random_buffer(dtype, b.count, used);
    if (residual) b.a.dresidual = nan_buffer(dtype, b.count);
    b.a.gamma = b.gamma = (float *)random_buffer(MPT_F32, c, c);
    b.a.beta = b.beta = (float *)random_buffer(MPT_F32, c, c);
    b.a.running_mean = b.running_mean = (float *)random_buffer(MPT_F32, c, c);
    b.a.running_var = b.running_var = (float *)random_buffer(MPT_F32, c, c);
    b.a.batch_mean = (float *)nan_buffer(MPT_F32, c);
    b.a.batch_inv_std = (float *)nan_buffer(MPT_F32, c);
    b.a.batch_var = (float *)nan_buffer(MPT_F32, c);
    b.a.dgamma = (float *)nan_buffer(MPT_F32, c);
    b.a.dbeta = (float *)nan_buffer(MPT_F32, c);
    b.a.y = nan_buffer(dtype, b.count);
    b.a.dx = nan_buffer(dtype, b.count);
    b.a.n = n;
    b.a.num_valid = num_valid;
    b.a.h = h;
    b.a.wd = wd;
    b.a.c = c;
    b.a.training = 1;
    b.a.relu = relu;
    b.a.epsilon = 1e-5f;
    b.a.dtype = dtype;
    b.a.workspace_bytes = m->ops->batchnorm_forward_workspace_bytes(m->self, &b.a);
    b.a.workspace = workspace_of(b.a.workspace_bytes);
    return b;
}

static void norm_free(norm_case *b) {
    free(b->x);
    free(b->dy);
    free(b->residual);
    free(b->gamma);
    free(b->beta);
    free(b->running_mean);
    free(b->running_var);
    free(b->a.batch_mean);
    free(b->a.batch_inv_std);
    free(b->a.batch_var);
    free(b->a.dgamma);
    free(b->a.dbeta);
    free(b->a.y);
    free(b->a.dx);
    free(b->a.dresidual);
    free(b->a.workspace);
}

static void norm_forward(norm_case *b) {
    CHECK_OK(b->m->ctx, b->m->ops->batchnorm_forward(b->m->self, &b->a));
}

static void norm_run(norm_case *b) {
    norm_forward(b);
    CHECK_OK(b->m->ctx, b->m->ops->batchnorm_backward(b->m->self, &b->a));
}

/* O-40: what becomes of the running variance with momentum 0.1 */
static float after_update(float running, float batch) {
    return 0.9f * running + 0.1f * batch;
}

static void norm_reference_one(machine *m, const reference_file *f, const char *layer, int relu,
                               mpt_dtype dtype) {
    char key[48];
    reference_tensor t[5];
    const char *const names[5] = {"x", "dy", "gamma", "beta", "residual"};
    const double share = reference_share(dtype);
    norm_case b;
    int i;
    for (i = 0; i < (relu ? 5 : 4); i++) {
        snprintf(key, sizeof(key), "%s.%s", layer, names[i]);
        t[i] = reference_get(f, key);
    }
    b = norm_make(m, (int)t[0].dims[0], (int)t[0].dims[1], (int)t[0].dims[2], (int)t[0].dims[3],
                  dtype, (int)t[0].dims[0], relu, relu);
    free(b.x);
    free(b.dy);
    b.a.x = b.x = copy_as(dtype, t[0].data, t[0].count);
    b.a.dy = b.dy = copy_as(dtype, t[1].data, t[1].count);
    memcpy(b.gamma, t[2].data, t[2].count * sizeof(float));
    memcpy(b.beta, t[3].data, t[3].count * sizeof(float));
    if (relu) {
        free(b.residual);
        b.a.residual = b.residual = copy_as(dtype, t[4].data, t[4].count);
    }
    norm_run(&b);
    check_reference(f, layer, "y", dtype, b.a.y, share);
    check_reference(f, layer, "dx", dtype, b.a.dx, share);
    check_reference(f, layer, "dgamma", MPT_F32, b.a.dgamma, share);
    check_reference(f, layer, "dbeta", MPT_F32, b.a.dbeta, share);
    if (relu) check_reference(f, layer, "dresidual", dtype, b.a.dresidual, share);
    for (i = 0; i < b.a.c; i++) {
        b.running_mean[i] = after_update(0, b.a.batch_mean[i]);
        b.running_var[i] = after_update(1, b.a.batch_var[i]);
    }
    check_reference(f, layer, "running_mean", MPT_F32, b.running_mean, share);
    check_reference(f, layer, "running_var", MPT_F32, b.running_var, share);
    b.a.training = 0;
    norm_forward(&b);
    check_reference(f, layer, "y_eval", dtype, b.a.y, share);
    norm_free(&b);
    for (i = 0; i < (relu ? 5 : 4); i++) reference_free(&t[i]);
}

MPT_TEST(batchnorm_matches_pytorch) {
    static const char *const layers[] = {"bn0.plain",    "bn1.plain",    "bn2.plain",
                                         "bn0.add_relu", "bn1.add_relu", "bn2.add_relu"};
    reference_file f = reference_open("layers.safetensors");
    int family, t, i;
    for (family = 1; family < NUM_FAMILIES; family++) {
        machine m;
        if (!machine_try(&m, families[family], 2)) continue;
        /* BF16 rounds x by 2^-9, which flips relus near 0: only without them */
        for (t = 0; t < 3; t++)
            for (i = 0; i < (t == 2 ? 3 : 6); i++)
                norm_reference_one(&m, &f, layers[i], i >= 3, dtypes[t]);
        machine_close(&m);
    }
    reference_close(&f);
}

static double norm_loss(void *user) {
    norm_case *b = (norm_case *)user;
    norm_forward(b);
    return weighted_sum((const float *)b->a.y, (const float *)b->dy, b->count);
}

/* h = 1/128: the third derivative leaves 1e-4, rounding of the loss 1e-5 / h. Values are moved off
   the corner of relu first. */
MPT_TEST(batchnorm_gradients_agree_with_differences) {
    machine m = machine_open("plain", 2);
    int variant;
    for (variant = 0; variant < 4; variant++) {
        const int relu = variant & 1, residual = variant >> 1;
        norm_case b = norm_make(&m, 3, 2, 3, 5, MPT_F32, 3, relu, residual);
        size_t i;
        norm_forward(&b);
        for (i = 0; residual && relu && i < b.count; i++)
            if (fabs(((float *)b.a.y)[i]) < 0.1) ((float *)b.residual)[i] += 3;
        if (relu && !residual)
            for (i = 0; i < 5; i++) b.beta[i] = i % 2 ? 8 : -8; /* wholly open or shut */
        norm_run(&b);
        check_gradient("x", (float *)b.x, b.count, (float *)b.a.dx, 1.0 / 128, 4e-3, norm_loss, &b);
        check_gradient("gamma", b.gamma, 5, b.a.dgamma, 1.0 / 128, 2e-3, norm_loss, &b);
        check_gradient("beta", b.beta, 5, b.a.dbeta, 1.0 / 128, 2e-3, norm_loss, &b);
        if (residual)
            check_gradient("residual", (float *)b.residual, b.count, (float *)b.a.dresidual,
                           1.0 / 128, 2e-3, norm_loss, &b);
        norm_free(&b);
    }
    machine_close(&m);
}

/* Only the valid slots count: the same numbers as for a slice of just these. Also with more
   channels than a span holds, and with dx in place of dy. */
MPT_TEST(batchnorm_counts_valid_slots_only) {
    static const int shapes[][4] = {{5, 3, 3, 7}, {4, 1, 1, 600}, {3, 4, 4, 512}, {70, 2, 1, 1}};
    machine m = machine_open("plain", 2);
    int s, t, num_valid, c;
    for (s = 0; s < 4; s++) {
        for (t = 0; t < 3; t++) {
            const int n = shapes[s][0], per = shapes[s][1] * shapes[s][2] * shapes[s][3];
            const size_t size = mpt_dtype_size(dtypes[t]);
            for (num_valid = 1; num_valid <= n; num_valid += n > 5 ? 23 : 1) {
                norm_case part = norm_make(&m, n, shapes[s][1], shapes[s][2], shapes[s][3],
                                           dtypes[t], num_valid, 1, 1);
                norm_case whole = norm_make(&m, num_valid, shapes[s][1], shapes[s][2], shapes[s][3],
                                            dtypes[t], num_valid, 1, 1);
                const size_t used = (size_t)num_valid * per;
                int e;
                memcpy(whole.dy, part.dy, used * size);
                memcpy(whole.residual, part.residual, used * size);
                free(whole.a.dx);
                whole.a.dx = whole.dy;
                norm_run(&part);
                norm_run(&whole);
                /* statistics add in another order; in FP16 and BF16 one step of rounding */
                for (c = 0; c < part.a.c; c++) {
                    CHECK_NEAR(part.a.batch_mean[c], whole.a.batch_mean[c], 1e-6);
                    CHECK_NEAR(part.a.batch_var[c], whole.a.batch_var[c], 1e-6);
                    CHECK_NEAR(part.a.dgamma[c], whole.a.dgamma[c], 1e-4);
                }
                check_close("y", dtypes[t], part.a.y, whole.a.y, used, 1e-5,
                            2 * epsilon_of(dtypes[t]));
                check_close("dx", dtypes[t], part.a.dx, whole.a.dx, used,
                            1e-4 + largest(dtypes[t], whole.a.dx, used) * epsilon_of(dtypes[t]),
                            2 * epsilon_of(dtypes[t]));
                for (e = (int)used; e < n * per; e++) {
                    CHECK(mpti_load(dtypes[t], part.a.y, e) == 0 &&
                          mpti_load(dtypes[t], part.a.dx, e) == 0);
                    CHECK(mpti_load(dtypes[t], part.a.dresidual, e) == 0);
                }
                whole.a.dx = NULL;
                norm_free(&part);
                norm_free(&whole);
            }
        }
    }
    machine_close(&m);
}

/* O-39: a slice of one value per channel, and one of none: finite, and biased where n - 1 is 0. */
MPT_TEST(batchnorm_of_one_value_or_none_O39) {
    machine m = machine_open("plain", 2);
    int num_valid, c;
    size_t i;
    for (num_valid = 0; num_valid < 2; num_valid++) {
        norm_case b = norm_make(&m, 4, 1, 1, 6, MPT_F16, num_valid, 0, 1);
        norm_run(&b);
        for (c = 0; c < 6; c++) {
            CHECK_EQ_INT(mpti_f32_bits(b.a.batch_var[c]), 0);
            CHECK_NEAR(b.a.batch_mean[c], num_valid ? mpti_load(MPT_F16, b.x, c) : 0, 0);
            CHECK_NEAR(b.a.batch_inv_std[c], num_valid ? 1 / sqrt(1e-5) : 0, 1e-3);
            CHECK_NEAR(b.a.dgamma[c], 0, 0);
            CHECK_NEAR(b.a.dbeta[c], num_valid ? mpti_load(MPT_F16, b.dy, c) : 0, 0);
        }
        for (i = 0; i < b.count; i++) {
            CHECK_NEAR(mpti_load(MPT_F16, b.a.dx, i), 0, 0);
            CHECK(!mpti_is_nan(mpti_load(MPT_F16, b.a.y, i)));
        }
        norm_free(&b);
    }
    machine_close(&m);
}

MPT_TEST(batchnorm_biased_output_unbiased_statistics_O40) {
    static const double expected[4] = {-1.341639, -0.447213, 0.447213, 1.341639};
    machine m = machine_open("plain", 1);
    norm_case b = norm_make(&m, 4, 1, 1, 1, MPT_F32, 4, 0, 0);
    int i;
    for (i = 0; i < 4; i++) ((float *)b.x)[i] = 2.0f * (float)i;
    b.gamma[0] = 1;
    b.beta[0] = 0;
    norm_forward(&b);
    for (i = 0; i < 4; i++) CHECK_NEAR(((float *)b.a.y)[i], expected[i], 1e-6);
    CHECK_NEAR(after_update(1, b.a.batch_var[0]), 1.566667, 1e-6);
    norm_free(&b);
    machine_close(&m);
}

/* A variance beyond FP16's range stays what it is. */
MPT_TEST(batchnorm_statistics_are_fp32_O41) {
    machine m = machine_open("plain", 1);
    norm_case b = norm_make(&m, 1, 1, 1, 1, MPT_F16, 1, 0, 0);
    mpti_store(MPT_F16, b.x, 0, 1000);
    b.gamma[0] = 1;
    b.beta[0] = 0;
    b.running_mean[0] = 0;
    b.running_var[0] = 1e6f;
    b.a.training = 0;
    norm_forward(&b);
    CHECK_NEAR(mpti_load(MPT_F16, b.a.y, 0), 1, 1e-3);
    norm_free(&b);
    machine_close(&m);
}

/* Mean 1000 standard deviations away: in FP32 the sum of squares would lose the variance. */
MPT_TEST(batchnorm_survives_a_far_mean) {
    machine m = machine_open("plain", 2);
    norm_case b = norm_make(&m, 50, 8, 8, 2, MPT_F32, 50, 0, 0);
    double sum[2] = {0, 0}, squares[2] = {0, 0};
    size_t i;
    for (i = 0; i < b.count; i++) ((float *)b.x)[i] += 500;
    norm_forward(&b);
    for (i = 0; i < b.count; i++) sum[i % 2] += (double)((float *)b.x)[i] - 500;
    for (i = 0; i < b.count; i++)
        squares[i % 2] += pow(((float *)b.x)[i] - 500 - sum[i % 2] / 3200, 2);
    for (i = 0; i < 2; i++) CHECK_NEAR(b.a.batch_var[i], squares[i] / 3199, 1e-6);
    norm_free(&b);
    machine_close(&m);
}

MPT_TEST(batchnorm_gives_the_same_bits_on_any_number_of_threads) {
    static const int threads[] = {1, 2, 5};
    norm_case b[3];
    machine m[3];
    int t;
    for (t = 0; t < 3; t++) {
        m[t] = machine_open("plain", threads[t]);
        b[t] = norm_make(&m[t], 7, 9, 9, 24, MPT_F16, 6, 1, 1);
        norm_run(&b[t]);
        CHECK_EQ_MEM(b[t].a.y, b[0].a.y, b[0].count * 2);
        CHECK_EQ_MEM(b[t].a.dx, b[0].a.dx, b[0].count * 2);
        CHECK_EQ_MEM(b[t].a.dgamma, b[0].a.dgamma, 24 * sizeof(float));
        CHECK_EQ_MEM(b[t].a.batch_var, b[0].a.batch_var, 24 * sizeof(float));
    }
    for (t = 0; t < 3; t++) {
        norm_free(&b[t]);
        machine_close(&m[t]);
    }
}

/* ---- pools ----------------------------------------------------------------------------------- */
typedef struct pool_case {
    mpt_pool2d_args a;
    size_t num_x, num_y;
} pool_case;

static pool_case pool_make(int n, int h, int wd, int c, int kernel, int stride, int padding,
                           mpt_dtype dtype, int num_valid) {
    pool_case p;
    memset(&p, 0, sizeof(p));
    p.a.n = n;
    p.a.num_valid = num_valid;
    p.a.h = h;
    p.a.wd = wd;
    p.a.c = c;
    p.a.kernel = kernel;
    p.a.stride = stride;
    p.a.padding = padding;
    p.a.p = kernel ? (h + 2 * padding - kernel) / stride + 1 : 1;
    p.a.q = kernel ? (wd + 2 * padding - kernel) / stride + 1 : 1;
    p.a.dtype = dtype;
    p.num_x = (size_t)n * h * wd * c;
    p.num_y = (size_t)n * p.a.p * p.a.q * c;
    random_state = 5;
    p.a.x = random_buffer(dtype, p.num_x, p.num_x / n * num_valid);
    p.a.dy = random_buffer(dtype, p.num_y, p.num_y / n * num_valid);
    p.a.y = nan_buffer(dtype, p.num_y);
    p.a.dx = nan_buffer(dtype, p.num_x);
    p.a.argmax = (uint8_t *)malloc(p.num_y);
    memset(p.a.argmax, 0xee, p.num_y);
    return p;
}

static void pool_free(pool_case *p) {
    free((void *)p->a.x);
    free((void *)p->a.dy);
    free(p->a.y);
    free(p->a.dx);
    free(p->a.argmax);
}

enum { POOL_MAX, POOL_AVG, POOL_GLOBAL };

static void pool_run(machine *m, pool_case *p, int kind) {
    if (kind == POOL_MAX) {
        CHECK_OK(m->ctx, m->ops->max_pool_forward(m->self, &p->a));
        CHECK_OK(m->ctx, m->ops->max_pool_backward(m->self, &p->a));
    } else if (kind == POOL_AVG) {
        CHECK_OK(m->ctx, m->ops->avg_pool_forward(m->self, &p->a));
        CHECK_OK(m->ctx, m->ops->avg_pool_backward(m->self, &p->a));
    } else {
        CHECK_OK(m->ctx, m->ops->global_avg_pool_forward(m->self, &p->a));
        CHECK_OK(m->ctx, m->ops->global_avg_pool_backward(m->self, &p->a));
    }
}

/* The other way round than in the library: backward scatters, in double. */
static void pool_by_hand(const pool_case *p, int kind, double *y, double *dx) {
    const mpt_pool2d_args *a = &p->a;
    const int kh = kind == POOL_GLOBAL ? a->h : a->kernel,
              kw = kind == POOL_GLOBAL ? a->wd : a->kernel;
    const int stride = kind == POOL_GLOBAL ? 1 : a->stride,
              padding = kind == POOL_GLOBAL ? 0 : a->padding;
    size_t at, e;
    for (e = 0; e < p->num_x; e++) dx[e] = 0;
    for (at = 0; at < p->num_y; at++) {
        const int c = (int)(at % a->c), q = (int)(at / a->c % a->q),
                  o = (int)(at / a->c / a->q % a->p);
        const size_t n = at / a->c / a->q / a->p;
        const double dy = mpti_load(a->dtype, a->dy, at);
        double best = -1e30;
        size_t best_at = 0;
        int i, j;
        y[at] = 0;
        if (n >= (size_t)a->num_valid) continue;
        for (i = 0; i < kh; i++) {
            for (j = 0; j < kw; j++) {
                const int h = o * stride - padding + i, v = q * stride - padding + j;
                size_t from = ((n * a->h + h) * a->wd + v) * a->c + c;
                if (h < 0 || h >= a->h || v < 0 || v >= a->wd) continue;
                y[at] += mpti_load(a->dtype, a->x, from) / ((double)kh * kw);
                if (kind != POOL_MAX) dx[from] += dy / ((double)kh * kw);
                if (mpti_load(a->dtype, a->x, from) <= best) continue;
                best = mpti_load(a->dtype, a->x, from);
                best_at = from;
            }
        }
        if (kind != POOL_MAX) continue;
        y[at] = best;
        dx[best_at] += dy;
    }
}

/* n, h, wd, c, kernel, stride, padding. Inputs are multiples of 1/64, so that maxima often tie. */
MPT_TEST(pools_are_what_they_say) {
    static const int shapes[][7] = {{2, 8, 8, 3, 2, 2, 0}, {3, 11, 9, 4, 3, 2, 1},
                                    {2, 7, 7, 5, 3, 1, 0}, {1, 5, 6, 600, 3, 1, 1},
                                    {2, 4, 4, 8, 1, 1, 0}, {1, 17, 16, 2, 16, 1, 8},
                                    {4, 9, 9, 1, 2, 3, 1}, {1, 4, 4, 3, 2, INT_MAX, 0}};
    machine m = machine_open("plain", 2);
    int s, t, kind, num_valid;
    size_t e;
    for (s = 0; s < 8; s++) {
        for (t = 0; t < 3; t++) {
            for (kind = 0; kind < 3; kind++) {
                for (num_valid = 0; num_valid <= shapes[s][0]; num_valid++) {
                    const int *z = shapes[s];
                    const double eps = dtypes[t] == MPT_F32 ? 1e-6 : epsilon_of(dtypes[t]);
                    pool_case p = pool_make(z[0], z[1], z[2], z[3], kind == POOL_GLOBAL ? 0 : z[4],
                                            z[5], z[6], dtypes[t], num_valid);
                    double *y = (double *)malloc(p.num_y * sizeof(double));
                    double *dx = (double *)malloc(p.num_x * sizeof(double));
                    pool_run(&m, &p, kind);
                    pool_by_hand(&p, kind, y, dx);
                    for (e = 0; e < p.num_y; e++)
                        CHECK_NEAR(mpti_load(dtypes[t], p.a.y, e), y[e],
                                   kind ? 1e-6 + eps * fabs(y[e]) : 0);
                    /* up to 256 windows meet in one dx */
                    for (e = 0; e < p.num_x; e++)
                        CHECK_NEAR(mpti_load(dtypes[t], p.a.dx, e), dx[e],
                                   2e-6 + eps * fabs(dx[e]));
                    free(y);
                    free(dx);
                    pool_free(&p);
                }
            }
        }
    }
    machine_close(&m);
}

static void pool_reference_one(machine *m, const reference_file *f, const char *layer,
                               const int z[3], int kind, mpt_dtype dtype) {
    char key[32];
    reference_tensor x, dy;
    pool_case p;
    snprintf(key, sizeof(key), "%s.x", layer);
    x = reference_get(f, key);
    snprintf(key, sizeof(key), "%s.dy", layer);
    dy = reference_get(f, key);
    p = pool_make((int)x.dims[0], (int)x.dims[1], (int)x.dims[2], (int)x.dims[3], z[0], z[1], z[2],
                  dtype, (int)x.dims[0]);
    CHECK_EQ_INT(p.num_y, dy.count);
    free((void *)p.a.x);
    free((void *)p.a.dy);
    p.a.x = copy_as(dtype, x.data, x.count);
    p.a.dy = copy_as(dtype, dy.data, dy.count);
    pool_run(m, &p, kind);
    check_reference(f, layer, "y", dtype, p.a.y, reference_share(dtype));
    check_reference(f, layer, "dx", dtype, p.a.dx, reference_share(dtype));
    pool_free(&p);
    reference_free(&x);
    reference_free(&dy);
}

/* In FP32 and FP16: BF16 would make ties of what are none. */
MPT_TEST(pools_match_pytorch) {
    static const int attributes[3][3] = {{2, 2, 0}, {3, 2, 1}, {3, 1, 0}}, global[3] = {0, 1, 0};
    static const char *const layers[3] = {"maxpool0", "maxpool1", "maxpool2"};
    reference_file f = reference_open("layers.safetensors");
    int family, i, t;
    for (family = 1; family < NUM_FAMILIES; family++) {
        machine m;
        if (!machine_try(&m, families[family], 2)) continue;
        for (t = 0; t < 2; t++) {
            for (i = 0; i < 3; i++)
                pool_reference_one(&m, &f, layers[i], attributes[i], POOL_MAX, dtypes[t]);
            pool_reference_one(&m, &f, "avgpool", global, POOL_GLOBAL, dtypes[t]);
        }
        machine_close(&m);
    }
    reference_close(&f);
}

MPT_TEST(max_pool_keeps_nan_and_the_first_of_equals) {
    machine m = machine_open("plain", 1);
    pool_case p = pool_make(1, 2, 8, 1, 2, 2, 0, MPT_F32, 1);
    float *x = (float *)p.a.x, *y = (float *)p.a.y;
    const float nan = mpti_f32_from_bits(0xffc00000), inf = mpti_f32_from_bits(0x7f800000);
    const float rows[2][8] = {{1, 2, 5, 5, -0.0f, 0, -inf, -inf}, {nan, 9, 5, 5, 0, 0, -inf, -inf}};
    memcpy(x, rows, sizeof(rows));
    pool_run(&m, &p, POOL_MAX);
    CHECK(mpti_is_nan(y[0]));
    CHECK_EQ_INT(p.a.argmax[0], 2);
    CHECK_EQ_INT(p.a.argmax[1], 0);
    CHECK_EQ_INT(p.a.argmax[2], 0); /* -0 equals 0 */
    CHECK(y[3] == -inf);
    free(p.a.argmax);
    p.a.argmax = NULL; /* inference */
    y[1] = 0;
    CHECK_OK(m.ctx, m.ops->max_pool_forward(m.self, &p.a));
    CHECK_NEAR(y[1], 5, 0);
    pool_free(&p);
    machine_close(&m);
}

/* ---- relu, add, dropout ---------------------------------------------------------------------- */
MPT_TEST(relu_and_add_element_by_element) {
    int family, t, i;
    for (family = 1; family < NUM_FAMILIES; family++) {
        machine m;
        if (!machine_try(&m, families[family], 2)) continue;
        for (t = 0; t < 3; t++) {
            enum { N = 3, PER = 1100 };
            const mpt_dtype d = dtypes[t];
            mpt_pointwise_args a;
            void *x, *dy, *y;
            memset(&a, 0, sizeof(a));
            random_state = 3;
            x = random_buffer(d, N * PER, 2 * PER);
            dy = random_buffer(d, N * PER, 2 * PER);
            y = nan_buffer(d, N * PER);
            a.n = N;
            a.num_valid = 2;
            a.per_sample = PER;
            a.dtype = d;
            a.a = x;
            a.y = y;
            CHECK_OK(m.ctx, m.ops->relu_forward(m.self, &a));
            for (i = 0; i < N * PER; i++)
                CHECK_NEAR(mpti_load(d, y, i), i < 2 * PER ? fmax(mpti_load(d, x, i), 0) : 0, 0);
            a.a = y;
            a.b = dy;
            a.y = x; /* x no longer needed */
            CHECK_OK(m.ctx, m.ops->relu_backward(m.self, &a));
            for (i = 0; i < 2 * PER; i++)
                CHECK_NEAR(mpti_load(d, x, i), mpti_load(d, y, i) > 0 ? mpti_load(d, dy, i) : 0, 0);
            a.a = a.y = y; /* accumulates dy into y */
            CHECK_OK(m.ctx, m.ops->relu_forward(m.self, &a));
            memcpy(x, y, N * PER * mpt_dtype_size(d));
            CHECK_OK(m.ctx, m.ops->add(m.self, &a));
            for (i = 0; i < 2 * PER; i++) {
                double sum = (double)mpti_load(d, x, i) + mpti_load(d, dy, i);
                CHECK_NEAR(mpti_load(d, y, i), sum, t ? epsilon_of(d) / 2 * fabs(sum) : 0);
            }
            CHECK_NEAR(mpti_load(d, y, 2 * PER), 0, 0);
            free(x);
            free(dy);
            free(y);
        }
        machine_close(&m);
    }
}

MPT_TEST(relu_lets_nan_and_inf_through) {
    static const uint32_t in[8] = {0x7fc00000, 0xffc00000, 0x7f800000, 0xff800000,
                                   0x80000000, 0x80000001, 1,          0};
    static const uint32_t out[8] = {0x7fc00000, 0xffc00000, 0x7f800000, 0, 0, 0, 1, 0};
    machine m = machine_open("plain", 1);
    const float ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    float x[8], y[8], dx[8];
    mpt_pointwise_args a;
    memset(&a, 0, sizeof(a));
    memcpy(x, in, sizeof(x));
    a.n = a.num_valid = 1;
    a.per_sample = 8;
    a.a = x;
    a.y = y;
    CHECK_OK(m.ctx, m.ops->relu_forward(m.self, &a));
    CHECK_EQ_MEM(y, out, sizeof(y));
    a.a = y;
    a.b = ones;
    a.y = dx;
    CHECK_OK(m.ctx, m.ops->relu_backward(m.self, &a));
    CHECK(dx[0] == 1 && dx[1] == 1 && dx[2] == 1 && dx[3] == 0 && dx[4] == 0 && dx[6] == 1 &&
          dx[7] == 0);
    machine_close(&m);
}

static void dropout_args(mpt_dropout_args *d, const void *x, void *y, float probability) {
    memset(d, 0, sizeof(*d));
    d->x = x;
    d->y = y;
    d->seed = 42;
    d->epoch = 3;
    d->layer = 1;
    d->probability = probability;
    d->n = d->num_valid = 4;
    d->per_sample = 5003;
}

MPT_TEST(dropout_mask_is_a_function_of_its_key) {
    enum { N = 4, PER = 5003 };
    static const uint64_t ids[N] = {7, 1000000007, 3, 7}, turned[N] = {3, 7, 7, 1000000007};
    machine m = machine_open("plain", 2), other = machine_open("plain", 5);
    float *ones = (float *)malloc(N * PER * sizeof(float)),
          *y = (float *)nan_buffer(MPT_F32, N * PER);
    float *again = (float *)nan_buffer(MPT_F32, N * PER);
    mpt_dropout_args d;
    int i, kept = 0, which, differ;
    for (i = 0; i < N * PER; i++) ones[i] = 1;
    dropout_args(&d, ones, y, 0.3f);
    d.sample_ids = ids;
    CHECK_OK(m.ctx, m.ops->dropout_forward(m.self, &d));
    for (i = 0; i < N * PER; i++) {
        CHECK(y[i] == 0 || y[i] == 1.0f / 0.7f);
        kept += y[i] != 0;
    }
    /* 20012 of which 0.7 are kept, one sample twice: standard deviation below 80; fixed by the seed
       */
    CHECK(abs(kept - 14008) < 400);
    CHECK_EQ_MEM(y, y + 3 * PER, PER * sizeof(float)); /* the same sample id */
    for (i = 0, differ = 0; i < 4000; i++)
        differ += y[i] != y[i + 512]; /* no period within a sample */
    CHECK(differ > 1500);             /* 1680 expected */
    d.y = again;
    CHECK_OK(other.ctx,
             other.ops->dropout_backward(other.self, &d)); /* other threads, backward: same mask */
    CHECK_EQ_MEM(again, y, N * PER * sizeof(float));
    d.sample_ids = turned; /* the mask goes with the sample, not with the slot */
    CHECK_OK(m.ctx, m.ops->dropout_forward(m.self, &d));
    CHECK_EQ_MEM(again, y + 2 * PER, PER * sizeof(float));
    CHECK_EQ_MEM(again + PER, y, PER * sizeof(float));
    for (which = 0; which < 3; which++) {
        dropout_args(&d, ones, again, 0.3f);
        d.sample_ids = ids;
        d.seed += which == 0;
        d.epoch += which == 1;
        d.layer += which == 2;
        CHECK_OK(m.ctx, m.ops->dropout_forward(m.self, &d));
        for (i = 0, differ = 0; i < N * PER; i++) differ += y[i] != again[i];
        CHECK(differ > 7000); /* 2 * 0.3 * 0.7 of them: 8405 expected */
    }
    free(ones);
    free(y);
    free(again);
    machine_close(&m);
    machine_close(&other);
}

MPT_TEST(dropout_edges) {
    machine m = machine_open("plain", 1);
    float x[8] = {1, -2, 3, 4, 5, 6, 7, 8}, y[8];
    mpt_dropout_args d;
    int i;
    dropout_args(&d, x, y, 0);
    d.n = 2;
    d.num_valid = 1;
    d.per_sample = 4;
    CHECK_OK(m.ctx, m.ops->dropout_forward(m.self, &d));
    for (i = 0; i < 8; i++) CHECK_NEAR(y[i], i < 4 ? x[i] : 0, 0);
    d.probability = 1;
    CHECK_OK(m.ctx, m.ops->dropout_forward(m.self, &d));
    for (i = 0; i < 8; i++) CHECK_NEAR(y[i], 0, 0);
    d.probability = 1.5f;
    CHECK_RESULT(m.ctx, m.ops->dropout_forward(m.self, &d), MPT_ERR_INVALID_ARGUMENT);
    d.probability = 0.5f;
    d.layer = 192;
    CHECK_RESULT(m.ctx, m.ops->dropout_forward(m.self, &d), MPT_ERR_INVALID_ARGUMENT);
    machine_close(&m);
}

/* ---- softmax cross entropy ------------------------------------------------------------------- */
MPT_TEST(exp_and_log_keep_their_bounds) {
    double x, worst = 0;
    for (x = -708; x < 709; x += 0.0173) worst = fmax(worst, fabs(mpti_exp(x) / exp(x) - 1));
    CHECK(worst < 1e-11);
    for (x = 1e-300, worst = 0; x < 1e300; x *= 1.0173) {
        worst = fmax(worst, fabs(mpti_ln(x) - log(x)) / fabs(log(x)));
    }
    for (x = 0.5; x < 2; x += 0.000977) /* around 1, where the logarithm is small */
        if (x != 1) worst = fmax(worst, fabs(mpti_ln(x) / log(x) - 1));
    CHECK(worst < 1e-12);
    CHECK(mpti_ln(1) == 0 && mpti_exp(0) == 1 && mpti_exp(-1000) == 0);
    CHECK(mpti_exp(-INFINITY) == 0 && mpti_exp(1000) == INFINITY && mpti_ln(0) == -INFINITY);
    CHECK(mpti_exp(NAN) != mpti_exp(NAN) && mpti_ln(NAN) != mpti_ln(NAN) &&
          mpti_ln(INFINITY) == INFINITY);
}

typedef struct xent_case {
    mpt_softmax_xent_args a;
    mpt_softmax_stats stats;
    machine *m;
    int32_t labels[64];
} xent_case;

static void xent_make(xent_case *x, machine *m, int n, int classes, mpt_dtype dtype) {
    memset(x, 0, sizeof(*x));
    x->m = m;
    x->a.labels = x->labels;
    x->a.stats = &x->stats;
    x->a.n = x->a.num_valid = n;
    x->a.classes = classes;
    x->a.grad_scale = 1;
    x->a.dtype = dtype;
    x->a.dlogits = nan_buffer(dtype, (size_t)n * classes);
    x->a.probabilities = (float *)nan_buffer(MPT_F32, (size_t)n * classes);
    x->a.workspace_bytes = m->ops->softmax_xent_workspace_bytes(m->self, &x->a);
    x->a.workspace = workspace_of(x->a.workspace_bytes);
}

static void xent_free(xent_case *x) {
    free((void *)x->a.logits);
    free(x->a.dlogits);
    free(x->a.probabilities);
    free(x->a.workspace);
}

static void xent_run(xent_case *x) {
    memset(&x->stats, 0, sizeof(x->stats));
    CHECK_OK(x->m->ctx, x->m->ops->softmax_xent(x->m->self, &x->a));
}

static void xent_reference_one(machine *m, const reference_file *f, const char *layer,
                               float smoothing, mpt_dtype dtype) {
    char key[32];
    reference_tensor logits, labels, loss;
    const double share = dtype == MPT_F32 ? 3e-5 : 1e-2; /* FP16: the gradient's storage */
    xent_case x;
    int i;
    snprintf(key, sizeof(key), "%s.logits", layer);
    logits = reference_get(f, key);
    snprintf(key, sizeof(key), "%s.labels", layer);
    labels = reference_get(f, key);
    snprintf(key, sizeof(key), "%s.loss", layer);
    loss = reference_get(f, key);
    xent_make(&x, m, (int)logits.dims[0], (int)logits.dims[1], dtype);
    x.a.logits = copy_as(dtype, logits.data, logits.count);
    for (i = 0; i < x.a.n; i++) x.labels[i] = (int32_t)labels.data[i];
    x.a.label_smoothing = smoothing;
    x.a.grad_scale = 1.0f / (float)x.a.n;
    xent_run(&x);
    CHECK_NEAR(x.stats.loss / x.a.n, loss.data[0], 1e-6 * fmax(1, loss.data[0]));
    CHECK_EQ_INT(x.stats.num_labeled, x.a.n);
    check_reference(f, layer, "dlogits", dtype, x.a.dlogits, share);
    check_reference(f, layer, "prob", MPT_F32, x.a.probabilities, 3e-5);
    xent_free(&x);
    reference_free(&logits);
    reference_free(&labels);
    reference_free(&loss);
}

/* The logits are exact in FP16. */
MPT_TEST(softmax_matches_pytorch) {
    static const float smoothing[4] = {0, 0.1f, 0, 0.1f};
    reference_file f = reference_open("layers.safetensors");
    int family, i, t;
    for (family = 1; family < NUM_FAMILIES; family++) {
        machine m;
        if (!machine_try(&m, families[family], 2)) continue;
        for (i = 0; i < 4; i++) {
            char layer[8];
            snprintf(layer, sizeof(layer), "xent%d", i);
            for (t = 0; t < 2; t++) xent_reference_one(&m, &f, layer, smoothing[i], dtypes[t]);
        }
        machine_close(&m);
    }
    reference_close(&f);
}

MPT_TEST(softmax_of_large_logits_O38) {
    machine m = machine_open("plain", 1);
    const float large[3] = {60000, 0, -60000}, equal[2] = {1e8f, 1e8f};
    xent_case x;
    int label, i;
    for (label = 0; label < 3; label++) {
        xent_make(&x, &m, 1, 3, MPT_F16);
        x.a.logits = copy_as(MPT_F16, large, 3);
        x.labels[0] = label;
        xent_run(&x);
        CHECK_NEAR(x.stats.loss, 60000 - mpti_load(MPT_F16, x.a.logits, (size_t)label), 0.01);
        for (i = 0; i < 3; i++)
            CHECK_NEAR(mpti_load(MPT_F16, x.a.dlogits, i), (i == 0) - (i == label), 0);
        xent_free(&x);
    }
    xent_make(&x, &m, 1, 2, MPT_F32);
    x.a.logits = copy_as(MPT_F32, equal, 2);
    xent_run(&x);
    CHECK_NEAR(x.stats.loss, 0.69314718, 1e-8);
    xent_free(&x);
    machine_close(&m);
}

/* Never below 0, smoothing or not, however sure the network is. */
MPT_TEST(softmax_loss_is_never_negative_O38) {
    machine m = machine_open("plain", 1);
    int round, i;
    for (round = 0; round < 200; round++) {
        xent_case x;
        xent_make(&x, &m, 1, 5, MPT_F32);
        random_state = (uint64_t)round;
        x.a.logits = random_buffer(MPT_F32, 5, 5);
        for (i = 0; i < 5; i++) ((float *)x.a.logits)[i] *= (float)round * 0.7f;
        x.labels[0] = round % 5;
        x.a.label_smoothing = round % 3 ? 0 : 0.1f;
        xent_run(&x);
        CHECK(x.stats.loss >= 0);
        xent_free(&x);
    }
    machine_close(&m);
}

static double xent_loss(void *user) {
    xent_case *x = (xent_case *)user;
    xent_run(x);
    return x->stats.loss * x->a.grad_scale;
}

/* h = 1/64: the third derivative leaves h^2 / 6 = 4e-5 of it; the loss is a double. Slots without
   label and slots that don't count have no gradient. */
MPT_TEST(softmax_gradients_agree_with_differences) {
    machine m = machine_open("plain", 2);
    xent_case x;
    float *gradient;
    int i;
    xent_make(&x, &m, 5, 6, MPT_F32);
    random_state = 1;
    x.a.logits = random_buffer(MPT_F32, 30, 24);
    x.a.num_valid = 4;
    x.a.label_smoothing = 0.2f;
    x.a.grad_scale = 4;
    x.labels[0] = 5;
    x.labels[1] = -1;
    x.labels[2] = 0;
    x.labels[3] = 3;
    x.labels[4] = 99; /* doesn't count, so isn't looked at */
    xent_run(&x);
    CHECK_EQ_INT(x.stats.num_labeled, 3);
    gradient = (float *)copy_as(MPT_F32, (float *)x.a.dlogits, 30);
    for (i = 0; i < 6; i++) CHECK(gradient[6 + i] == 0 && gradient[24 + i] == 0);
    check_gradient("logits", (float *)x.a.logits, 24, gradient, 1.0 / 64, 2e-4, xent_loss, &x);
    free(gradient);
    xent_free(&x);
    machine_close(&m);
}

MPT_TEST(softmax_counts_and_ties) {
    enum { N = 7, K = 6 };
    const float nan = NAN;
    const float z[N][K] = {{1, 1, 1, 1, 1, 1},  {1, 1, 1, 1, 1, 1}, {1, 1, 1, 1, 1, 1},
                           {0, 1, 2, 3, 4, 5},  {5, 4, 3, 2, 1, 0}, {0, nan, 0, 0, 0, 0},
                           {nan, 9, 0, 0, 0, 0}};
    static const int labels[N] = {0, 4, 5, 0,
                                  0, 1, 1}; /* right, in five, not, not, right, NaN, not first */
    machine m = machine_open("plain", 2);
    xent_case x;
    int i, num_valid;
    static const int correct[N + 1] = {0, 1, 1, 1, 1, 2, 2, 2},
                                 top5[N + 1] = {0, 1, 2, 2, 2, 3, 3, 4};
    for (num_valid = 0; num_valid <= N; num_valid++) {
        xent_make(&x, &m, N, K, MPT_F32);
        x.a.logits = copy_as(MPT_F32, &z[0][0], N * K);
        for (i = 0; i < N; i++) x.labels[i] = labels[i];
        x.a.num_valid = num_valid;
        xent_run(&x);
        CHECK_EQ_INT(x.stats.num_labeled, num_valid);
        CHECK_EQ_INT(x.stats.num_correct, correct[num_valid]);
        CHECK_EQ_INT(x.stats.num_correct_top5, top5[num_valid]);
        if (num_valid == 0) CHECK(x.stats.loss == 0);
        if (num_valid == N) CHECK(x.stats.loss != x.stats.loss); /* NaN shows in the loss ... */
        if (num_valid == N)
            CHECK(mpti_is_nan(((float *)x.a.dlogits)[5 * K])); /* ... and in the gradient */
        xent_free(&x);
    }
    machine_close(&m);
}

MPT_TEST(softmax_same_bits_in_place_on_any_threads) {
    static const int threads[] = {1, 2, 5};
    machine m[3];
    xent_case x[3];
    int t, i;
    for (t = 0; t < 3; t++) {
        m[t] = machine_open("plain", threads[t]);
        xent_make(&x[t], &m[t], 50, 700, MPT_F16);
        random_state = 2;
        x[t].a.logits = random_buffer(MPT_F16, 35000, 35000);
        for (i = 0; i < 50; i++) x[t].labels[i] = i * 13;
        if (t == 2) { /* in place */
            free(x[t].a.dlogits);
            x[t].a.dlogits = (void *)x[t].a.logits;
        }
        xent_run(&x[t]);
        CHECK_EQ_MEM(x[t].a.dlogits, x[0].a.dlogits, 70000);
        CHECK_EQ_MEM(&x[t].stats, &x[0].stats, sizeof(x[0].stats));
        x[2].a.logits = NULL;
    }
    x[2].a.logits = NULL;
    for (t = 0; t < 3; t++) {
        xent_free(&x[t]);
        machine_close(&m[t]);
    }
}

MPT_TEST(softmax_refuses_bad_labels) {
    machine m = machine_open("plain", 1);
    const float z[4] = {1, 2, 3, 4};
    xent_case x;
    xent_make(&x, &m, 2, 2, MPT_F32);
    x.a.logits = copy_as(MPT_F32, z, 4);
    x.labels[1] = 2;
    CHECK_RESULT(m.ctx, m.ops->softmax_xent(m.self, &x.a), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(m.ctx)->message, "the label of slot 1 is 2; labels are 0 .. 1");
    x.labels[1] = -2;
    CHECK_RESULT(m.ctx, m.ops->softmax_xent(m.self, &x.a), MPT_ERR_INVALID_ARGUMENT);
    x.labels[1] = 1;
    x.a.label_smoothing = -0.1f;
    CHECK_RESULT(m.ctx, m.ops->softmax_xent(m.self, &x.a), MPT_ERR_INVALID_ARGUMENT);
    xent_free(&x);
    machine_close(&m);
}

/* ---- casts, input, fill, copy ---------------------------------------------------------------- */
/* The vector conversions give the bits of mpt_f32_to_f16 and its kin: for every 16-bit number, and
   for FP32 numbers around every rounding boundary, NaNs and infinities included. */
MPT_TEST(casts_are_the_conversions_of_base) {
    enum { COUNT = 65536 * 3 + 5 };
    uint16_t *h = (uint16_t *)malloc(65536 * 2), *narrow = (uint16_t *)malloc(COUNT * 2);
    float *x = (float *)malloc(COUNT * sizeof(float));
    int family, t, i;
    for (i = 0; i < 65536; i++) h[i] = (uint16_t)i;
    for (family = 1; family < NUM_FAMILIES; family++) {
        machine m;
        if (!machine_try(&m, families[family], 2)) continue;
        for (t = 1; t < 3; t++) {
            mpt_cast_args a;
            a.src = h;
            a.dst = x;
            a.count = 65536;
            a.src_dtype = dtypes[t];
            a.dst_dtype = MPT_F32;
            CHECK_OK(m.ctx, m.ops->cast(m.self, &a));
            for (i = 0; i < 65536; i++) {
                float want = mpti_load(dtypes[t], h, i);
                if (mpti_is_nan(want)) CHECK(mpti_is_nan(x[i])); /* hardware makes it quiet */
                else CHECK_EQ_INT(mpti_f32_bits(x[i]), mpti_f32_bits(want));
            }
            for (i = 0; i < COUNT; i++) {
                uint32_t u = ((uint32_t)i / 3) << 16;
                if (t == 1) u = (uint32_t)(i / 3) * 65537u; /* mantissas of all kinds */
                x[i] = mpti_f32_from_bits(u + (uint32_t)(i % 3) * 0x7fffu +
                                          (uint32_t)(i % 3 == 2) * 3u);
            }
            a.src = x;
            a.dst = narrow;
            a.count = COUNT;
            a.src_dtype = MPT_F32;
            a.dst_dtype = dtypes[t];
            CHECK_OK(m.ctx, m.ops->cast(m.self, &a));
            for (i = 0; i < COUNT; i++)
                CHECK_EQ_INT(narrow[i], t == 1 ? mpt_f32_to_f16(x[i]) : mpt_f32_to_bf16(x[i]));
        }
        machine_close(&m);
    }
    free(h);
    free(narrow);
    free(x);
}

MPT_TEST(input_is_normalised) {
    static const float mean[3] = {0.485f, 0.456f, 0.406f}, std[3] = {0.229f, 0.224f, 0.225f};
    enum { N = 3, PIXELS = 35, VALID = 2 };
    machine m = machine_open("plain", 2);
    uint8_t bytes[N * PIXELS * 3];
    float pixels[N * PIXELS * 3], y[N * PIXELS * 3];
    mpt_normalize_args a;
    int i;
    memset(&a, 0, sizeof(a));
    for (i = 0; i < N * PIXELS * 3; i++) bytes[i] = (uint8_t)(i * 37);
    for (i = 0; i < N * PIXELS * 3; i++) pixels[i] = (float)bytes[i] / 255.0f;
    a.x = bytes;
    a.y = y;
    a.n = N;
    a.num_valid = VALID;
    a.h = 5;
    a.wd = 7;
    a.c = 3;
    a.src_dtype = MPT_U8;
    CHECK_OK(m.ctx, m.ops->input_normalize(m.self, &a)); /* no mean, no std */
    for (i = 0; i < N * PIXELS * 3; i++)
        CHECK_NEAR(y[i], i < VALID * PIXELS * 3 ? bytes[i] / 255.0 : 0, 1e-7);
    a.mean = mean;
    a.std = std;
    CHECK_OK(m.ctx, m.ops->input_normalize(m.self, &a));
    for (i = 0; i < VALID * PIXELS * 3; i++)
        CHECK_NEAR(y[i], (bytes[i] / 255.0 - mean[i % 3]) / std[i % 3], 3e-7);
    a.x = pixels;
    a.src_dtype = MPT_F32;
    a.dtype = MPT_F16;
    CHECK_OK(m.ctx, m.ops->input_normalize(m.self, &a));
    for (i = 0; i < VALID * PIXELS * 3; i++) /* below 4: half a step is 2^-10 */
        CHECK_NEAR(mpti_load(MPT_F16, y, i), (bytes[i] / 255.0 - mean[i % 3]) / std[i % 3],
                   0.00098);
    a.src_dtype = MPT_I32;
    CHECK_RESULT(m.ctx, m.ops->input_normalize(m.self, &a), MPT_ERR_INVALID_ARGUMENT);
    machine_close(&m);
}

MPT_TEST(fill_and_copy) {
    machine m = machine_open("plain", 2);
    uint16_t a[1000], b[1000];
    mpt_fill_args f;
    mpt_copy_args c;
    int i;
    f.dst = a;
    f.count = 999;
    f.value = 1.5f;
    f.dtype = MPT_BF16;
    a[999] = 7;
    CHECK_OK(m.ctx, m.ops->fill(m.self, &f));
    for (i = 0; i < 999; i++) CHECK_EQ_INT(a[i], 0x3fc0);
    CHECK_EQ_INT(a[999], 7);
    c.src = a;
    c.dst = b;
    c.bytes = sizeof(a);
    CHECK_OK(m.ctx, m.ops->copy(m.self, &c));
    CHECK_EQ_MEM(a, b, sizeof(a));
    f.count = 0;
    CHECK_OK(m.ctx, m.ops->fill(m.self, &f));
    f.dtype = MPT_I64;
    CHECK_RESULT(m.ctx, m.ops->fill(m.self, &f), MPT_ERR_INVALID_ARGUMENT);
    machine_close(&m);
}

MPT_TEST(scale_multiplies_and_a_factor_of_zero_clears_nan) {
    machine m = machine_open("plain", 2);
    float x[5] = {1, -2, 3, mpti_f32_from_bits(0x7fc00000u), 7};
    mpt_scale_args a = {x, 3, 0.5f};
    CHECK_OK(m.ctx, m.ops->scale(m.self, &a));
    CHECK_NEAR(x[0], 0.5, 0);
    CHECK_NEAR(x[1], -1, 0);
    CHECK_NEAR(x[2], 1.5, 0);
    a.count = 4;
    a.factor = 0;
    CHECK_OK(m.ctx, m.ops->scale(m.self, &a));
    CHECK_NEAR(x[3], 0, 0);
    CHECK_NEAR(x[4], 7, 0);
    a.count = -1;
    CHECK_RESULT(m.ctx, m.ops->scale(m.self, &a), MPT_ERR_INVALID_ARGUMENT);
    machine_close(&m);
}

/* ---- the table, arguments -------------------------------------------------------------------- */
MPT_TEST(every_operator_of_the_table_is_there) {
    const mpt_backend *ops = mpt_backend_cpu();
    const char *p = (const char *)ops;
    size_t at;
    CHECK_EQ_STR(ops->name, "cpu");
    for (at = 0; at < sizeof(*ops); at += sizeof(void *)) { /* behind: entries of devices */
        void *entry;
        memcpy(&entry, p + at, sizeof(entry));
        CHECK_EQ_INT(entry != NULL, at < offsetof(mpt_backend, alloc));
    }
}

static void conv_refused(machine *m, const mpt_conv2d_args *a, const char *message) {
    CHECK_RESULT(m->ctx, m->ops->conv2d_fprop(m->self, a), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(m->ctx)->message, message);
    CHECK_RESULT(m->ctx, m->ops->conv2d_dgrad(m->self, a), MPT_ERR_INVALID_ARGUMENT);
    CHECK_RESULT(m->ctx, m->ops->conv2d_wgrad(m->self, a), MPT_ERR_INVALID_ARGUMENT);
}

MPT_TEST(bad_arguments_are_refused) {
    static const conv_shape z = {2, 6, 6, 8, 8, 3, 3, 1, 1};
    machine m = machine_open("plain", 1);
    mpt_conv2d_args a, good;
    mpt_pool2d_args p;
    mpt_dense_args d;
    conv_shape_args(&z, MPT_F32, z.n, &good);
    a = good;
    a.c = 0;
    conv_refused(&m, &a, "conv2d_fprop: h, wd, c, k, r and s must be at least 1");
    a = good;
    a.stride = 0;
    conv_refused(&m, &a, "stride must be 1 .. 64");
    a = good;
    a.padding = -1;
    conv_refused(&m, &a, "padding 0 ..");
    a = good;
    a.p = 7;
    conv_refused(&m, &a, "p and q must be");
    a = good;
    a.r = 9;
    conv_refused(&m, &a, "larger than the padded input");
    a = good;
    a.num_valid = 3;
    conv_refused(&m, &a, "num_valid 0 .. n");
    a = good;
    a.dtype = MPT_U8;
    conv_refused(&m, &a, "dtype must be");
    a = good;
    a.n = a.num_valid = 2000000000;
    a.c = 100000000;
    conv_refused(&m, &a, "too large");
    a = good;
    a.c = 2000000000;
    conv_refused(&m, &a, "at most 2^30");
    CHECK_EQ_INT(m.ops->conv2d_wgrad_workspace_bytes(m.self, &a), 0);
    a = good;
    a.h = INT_MAX; /* h + padding would not be an int */
    a.wd = a.c = a.s = 1;
    a.p = INT_MAX;
    a.q = 3;
    conv_refused(&m, &a, "h and wd at most 2^30");
    memset(&d, 0, sizeof(d));
    d.n = d.out = 1;
    CHECK_RESULT(m.ctx, m.ops->dense_fprop(m.self, &d), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(m.ctx)->message, "dense_fprop: in and out must be at least 1");
    a = good;
    conv_refused(&m, &a, "the workspace has 0 bytes and needs");
    memset(&p, 0, sizeof(p));
    p.n = p.num_valid = p.c = p.stride = 1;
    p.h = p.wd = 4;
    p.kernel = 17;
    CHECK_RESULT(m.ctx, m.ops->max_pool_forward(m.self, &p), MPT_ERR_INVALID_ARGUMENT);
    p.kernel = 2;
    p.padding = 2;
    CHECK_RESULT(m.ctx, m.ops->avg_pool_backward(m.self, &p), MPT_ERR_INVALID_ARGUMENT);
    p.padding = 0;
    p.p = p.q = 4;
    CHECK_RESULT(m.ctx, m.ops->max_pool_backward(m.self, &p), MPT_ERR_INVALID_ARGUMENT);
    p.c = INT_MAX; /* a loop over spans of channels would not end */
    CHECK_RESULT(m.ctx, m.ops->avg_pool_forward(m.self, &p), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(m.ctx)->message, "h, wd and c must be");
    machine_close(&m);
}

/* Its input is small, but a single staged row of the padded input is 2^61 numbers long: the size of
   the workspace in bytes would not fit 64 bits, and what is left of it would be accepted. */
MPT_TEST(workspaces_that_no_memory_holds_are_refused) {
    machine m = machine_open("plain", 1);
    mpt_conv2d_args a;
    mpt_batchnorm_args b;
    mpt_softmax_xent_args s;
    char byte = 0;
    memset(&a, 0, sizeof(a));
    a.n = a.num_valid = 4;
    a.h = a.wd = a.s = a.stride = 1;
    a.c = 1 << 30;
    a.k = 31;
    a.padding = a.r = 32767;
    a.p = 2 * a.padding + 1 - a.r + 1;
    a.q = 2 * a.padding + 1;
    a.workspace = &byte;
    a.workspace_bytes = SIZE_MAX;
    conv_refused(&m, &a, "too large");
    CHECK_EQ_INT(m.ops->conv2d_fprop_workspace_bytes(m.self, &a), 0);
    CHECK_EQ_INT(m.ops->conv2d_wgrad_workspace_bytes(m.self, &a), 0);
    memset(&b, 0, sizeof(b));
    b.n = b.h = b.wd = INT_MAX;
    b.c = 1;
    CHECK_EQ_INT(m.ops->batchnorm_forward_workspace_bytes(m.self, &b), 0);
    b.n = b.h = b.wd = 1;
    b.c = -1;
    CHECK_EQ_INT(m.ops->batchnorm_backward_workspace_bytes(m.self, &b), 0);
    memset(&s, 0, sizeof(s));
    s.n = 1;
    s.classes = INT_MAX;
    CHECK_RESULT(m.ctx, m.ops->softmax_xent(m.self, &s), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(m.ctx)->message, "classes must be 1 .. 2^30");
    machine_close(&m);
}

MPT_TEST(opening_chooses_a_family) {
    mpt_test_allocator memory;
    mpt_ctx_desc d;
    mpt_ctx *ctx = NULL;
    void *self = NULL;
    memset(&d, 0, sizeof(d));
    mpt_test_allocator_init(&memory, 2, 0); /* 1 is the context, 2 the backend that it opens */
    d.allocator = memory.hooks;
    CHECK_RESULT(NULL, mpt_ctx_create(&d, &ctx), MPT_ERR_OUT_OF_MEMORY);
    CHECK(ctx == NULL);
    CHECK_NO_LEAK(&memory);
    mpt_test_allocator_init(&memory, 3, 0); /* 3 is the backend that is opened here */
    d.allocator = memory.hooks;
    CHECK_OK(NULL, mpt_ctx_create(&d, &ctx));
    CHECK_RESULT(ctx, mpt_backend_cpu()->open(ctx, 0, &self), MPT_ERR_OUT_OF_MEMORY);
    CHECK(self == NULL);
    CHECK_OK(ctx, mpt_backend_cpu()->open(ctx, 0, &self));
    CHECK_EQ_STR(((mpti_cpu *)self)->family->name,
                 mpti_cpu_families[0].is_supported && mpti_cpu_families[0].is_supported()
                     ? "avx2"
                     : "plain");
    mpt_backend_cpu()->close(self);
    mpt_backend_cpu()->close(NULL);
    CHECK_RESULT(ctx, mpti_cpu_open_family(ctx, "mmx", &self), MPT_ERR_UNSUPPORTED);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "mmx");
    mpt_ctx_destroy(ctx);
    CHECK_NO_LEAK(&memory);
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(plain_convolution_matches_the_definition),
    MPT_TEST_CASE(avx2_convolution_matches_the_definition),
    MPT_TEST_CASE(convolution_gives_the_same_bits_on_any_number_of_threads),
    MPT_TEST_CASE(slots_do_not_touch_each_other),
    MPT_TEST_CASE(convolution_matches_pytorch),
    MPT_TEST_CASE(non_finite_numbers_pass_through_convolution),
    MPT_TEST_CASE(dense_is_what_it_says),
    MPT_TEST_CASE(dense_matches_pytorch),
    MPT_TEST_CASE(convolution_gradients_agree_with_differences),
    MPT_TEST_CASE(batchnorm_matches_pytorch),
    MPT_TEST_CASE(batchnorm_gradients_agree_with_differences),
    MPT_TEST_CASE(batchnorm_counts_valid_slots_only),
    MPT_TEST_CASE(batchnorm_of_one_value_or_none_O39),
    MPT_TEST_CASE(batchnorm_biased_output_unbiased_statistics_O40),
    MPT_TEST_CASE(batchnorm_statistics_are_fp32_O41),
    MPT_TEST_CASE(batchnorm_survives_a_far_mean),
    MPT_TEST_CASE(batchnorm_gives_the_same_bits_on_any_number_of_threads),
    MPT_TEST_CASE(pools_are_what_they_say),
    MPT_TEST_CASE(pools_match_pytorch),
    MPT_TEST_CASE(max_pool_keeps_nan_and_the_first_of_equals),
    MPT_TEST_CASE(relu_and_add_element_by_element),
    MPT_TEST_CASE(relu_lets_nan_and_inf_through),
    MPT_TEST_CASE(dropout_mask_is_a_function_of_its_key),
    MPT_TEST_CASE(dropout_edges),
    MPT_TEST_CASE(exp_and_log_keep_their_bounds),
    MPT_TEST_CASE(softmax_matches_pytorch),
    MPT_TEST_CASE(softmax_of_large_logits_O38),
    MPT_TEST_CASE(softmax_loss_is_never_negative_O38),
    MPT_TEST_CASE(softmax_gradients_agree_with_differences),
    MPT_TEST_CASE(softmax_counts_and_ties),
    MPT_TEST_CASE(softmax_same_bits_in_place_on_any_threads),
    MPT_TEST_CASE(softmax_refuses_bad_labels),
    MPT_TEST_CASE(casts_are_the_conversions_of_base),
    MPT_TEST_CASE(input_is_normalised),
    MPT_TEST_CASE(fill_and_copy),
    MPT_TEST_CASE(scale_multiplies_and_a_factor_of_zero_clears_nan),
    MPT_TEST_CASE(every_operator_of_the_table_is_there),
    MPT_TEST_CASE(bad_arguments_are_refused),
    MPT_TEST_CASE(workspaces_that_no_memory_holds_are_refused),
    MPT_TEST_CASE(opening_chooses_a_family),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
