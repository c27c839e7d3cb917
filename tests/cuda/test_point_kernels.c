/* test_point_kernels.c - kernels.cu >>batchnorm >>softmax >>pointwise >>update: every launcher against
   the CPU's definition of the same operator. Cases O-38, O-40, O-41. */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "kernel_test.h"

static const mpt_dtype dtypes[] = {MPT_F32, MPT_F16, MPT_BF16};
static const float infinity = 1e30f * 1e30f;

static float not_a_number(void) {
    return mpti_f32_from_bits(0x7fc00000u);
}

/* All of n, one fewer, none: the rest holds NaN. */
static int num_valid_of(int n, int choice) {
    return choice == 0 ? n : choice == 1 ? n - 1 : 0;
}

/* ---- batch normalization ------------------------------------------------------------------------
   One block and several, side by side and below each other; channels that fill lanes of eight or
   not, and channels one by one; parts that are full, ragged and empty; more parts than the 32
   threads that merge them. */
typedef struct images {
    int n, h, wd, c;
} images;

static const images norm_shapes[] = {
    {1, 1, 1, 7},  {4, 5, 3, 1},   {3, 7, 5, 3},   {2, 4, 4, 8},   {5, 6, 6, 16},  {2, 3, 3, 64},
    {2, 5, 5, 72}, {3, 3, 3, 65},  {2, 5, 9, 136}, {2, 40, 41, 8}, {2, 40, 41, 3}, {1, 36, 35, 33},
    {3, 1, 1, 24}, {1, 20, 61, 1},
};
enum { NUM_NORM_SHAPES = sizeof(norm_shapes) / sizeof(norm_shapes[0]) };

typedef struct norm_case {
    mpt_batchnorm_args host, device;
    size_t count, used; /* elements: all, of slots that count */
    size_t pixels;      /* that count */
} norm_case;

static norm_case norm_make(kernel_test *t, const images *z, mpt_dtype dtype, int num_valid,
                           int fused) {
    norm_case c;
    mpt_batchnorm_args *a = &c.host;
    memset(&c, 0, sizeof(c));
    c.count = (size_t)z->n * z->h * z->wd * z->c;
    c.pixels = (size_t)num_valid * z->h * z->wd;
    c.used = c.pixels * z->c;
    a->n = z->n;
    a->num_valid = num_valid;
    a->h = z->h;
    a->wd = z->wd;
    a->c = z->c;
    a->training = 1;
    a->relu = fused;
    a->epsilon = 1e-5f;
    a->dtype = dtype;
    a->x = kernel_random(t, dtype, c.count, c.used);
    if (fused) a->residual = kernel_random(t, dtype, c.count, c.used);
    a->y = kernel_nans(t, dtype, c.count);
    a->gamma = kernel_random_f32(t, z->c);
    a->beta = kernel_random_f32(t, z->c);
    a->running_mean = kernel_random_f32(t, z->c);
    a->running_var = kernel_random_f32(t, z->c);
    a->batch_mean = (float *)kernel_nans(t, MPT_F32, z->c);
    a->batch_inv_std = (float *)kernel_nans(t, MPT_F32, z->c);
    a->batch_var = (float *)kernel_nans(t, MPT_F32, z->c);
    return c;
}

static void norm_workspaces(kernel_test *t, norm_case *c, size_t host_bytes) {
    size_t device_bytes = mptk_batchnorm_workspace_bytes(&c->host);
    c->device.workspace = device_workspace(t, device_bytes);
    c->device.workspace_bytes = device_bytes;
    c->host.workspace = host_workspace(t, host_bytes);
    c->host.workspace_bytes = host_bytes;
}

static void norm_forward(kernel_test *t, norm_case *c) {
    mpt_batchnorm_args *a = &c->host, *d = &c->device;
    *d = *a;
    d->x = on_device(t, a->x);
    d->residual = on_device(t, a->residual);
    d->y = on_device(t, a->y);
    d->gamma = (const float *)on_device(t, a->gamma);
    d->beta = (const float *)on_device(t, a->beta);
    d->running_mean = (const float *)on_device(t, a->running_mean);
    d->running_var = (const float *)on_device(t, a->running_var);
    d->batch_mean = (float *)on_device(t, a->batch_mean);
    d->batch_inv_std = (float *)on_device(t, a->batch_inv_std);
    d->batch_var = (float *)on_device(t, a->batch_var);
    norm_workspaces(t, c, t->ops->batchnorm_forward_workspace_bytes(t->self, a));
    CHECK_KERNEL(mptk_batchnorm_forward(d, NULL));
    CHECK_OK(t->ctx, t->ops->batchnorm_forward(t->self, a));
}

/* Statistics are right to a few roundings of FP32: 1e-6 of themselves, the mean of the largest
   number. y may have been rounded from just the other side: one step of its type. */
static void norm_check_forward(kernel_test *t, const norm_case *c) {
    const mpt_batchnorm_args *a = &c->host;
    double step = kernel_epsilon(a->dtype);
    if (a->training) {
        check_close("batch_mean", MPT_F32, from_device(t, a->batch_mean), a->batch_mean, a->c, 1e-6,
                    1e-6);
        check_close("batch_var", MPT_F32, from_device(t, a->batch_var), a->batch_var, a->c, 0,
                    4e-6);
        check_close("batch_inv_std", MPT_F32, from_device(t, a->batch_inv_std), a->batch_inv_std,
                    a->c, 0, 4e-6);
    }
    check_close("y", a->dtype, from_device(t, a->y), a->y, c->count, 2e-5, step + 1e-5);
}

MPT_TEST(batchnorm_forward) {
    kernel_test t = kernel_test_open();
    int s, k, choice;
    for (s = 0; s < NUM_NORM_SHAPES; s++) {
        for (k = 0; k < 9; k++) {
            norm_case c;
            choice = k / 3;
            if (choice && s % 3 != choice && !mpt_test_full()) continue;
            c = norm_make(&t, &norm_shapes[s], dtypes[k % 3],
                          num_valid_of(norm_shapes[s].n, choice), (s + k) % 2);
            norm_forward(&t, &c);
            norm_check_forward(&t, &c);
            kernel_test_release(&t);
        }
    }
    kernel_test_close(&t);
}

MPT_TEST(batchnorm_inference) {
    kernel_test t = kernel_test_open();
    int s, k, i;
    for (s = 0; s < NUM_NORM_SHAPES; s += 3) {
        for (k = 0; k < 6; k++) {
            norm_case c = norm_make(&t, &norm_shapes[s], dtypes[k % 3],
                                    num_valid_of(norm_shapes[s].n, k / 3), k % 2);
            c.host.training = 0;
            for (i = 0; i < c.host.c; i++)
                ((float *)c.host.running_var)[i] = fabsf(c.host.running_var[i]) + 0.5f;
            norm_forward(&t, &c);
            norm_check_forward(&t, &c);
            CHECK(mpti_is_nan(((const float *)from_device(&t, c.host.batch_mean))[0])); /* as before */
            kernel_test_release(&t);
        }
    }
    kernel_test_close(&t);
}

/* O-41: a variance beyond FP16 keeps its value. */
MPT_TEST(batchnorm_variance_beyond_half) {
    static const images one = {1, 1, 1, 8};
    kernel_test t = kernel_test_open();
    norm_case c = norm_make(&t, &one, MPT_F16, 1, 0);
    int i;
    c.host.training = 0;
    for (i = 0; i < 8; i++) {
        mpti_store(MPT_F16, (void *)c.host.x, i, 1000);
        ((float *)c.host.gamma)[i] = 1;
        ((float *)c.host.beta)[i] = 0;
        ((float *)c.host.running_mean)[i] = 0;
        ((float *)c.host.running_var)[i] = 1e6f;
    }
    norm_forward(&t, &c);
    for (i = 0; i < 8; i++)
        CHECK_NEAR(mpti_load(MPT_F16, from_device(&t, c.host.y), i), 1, 1e-3);
    kernel_test_close(&t);
}

/* O-40: normalised with the biased variance, reported unbiased. */
MPT_TEST(batchnorm_biased_inside_unbiased_outside) {
    static const images four = {4, 1, 1, 1};
    static const double expected[4] = {-1.341639, -0.447213, 0.447213, 1.341639};
    kernel_test t = kernel_test_open();
    norm_case c = norm_make(&t, &four, MPT_F32, 4, 0);
    int i;
    for (i = 0; i < 4; i++) ((float *)c.host.x)[i] = 2.0f * (float)i;
    ((float *)c.host.gamma)[0] = 1;
    ((float *)c.host.beta)[0] = 0;
    norm_forward(&t, &c);
    for (i = 0; i < 4; i++)
        CHECK_NEAR(((const float *)from_device(&t, c.host.y))[i], expected[i], 1e-6);
    CHECK_NEAR(((const float *)from_device(&t, c.host.batch_mean))[0], 3, 0);
    CHECK_NEAR(((const float *)from_device(&t, c.host.batch_var))[0], 20.0 / 3, 1e-6);
    kernel_test_close(&t);
}

/* Sums of squares in FP32 would lose all of this. Per case: mean, deviation, and a first value of
   another size, which is the worst pivot. 2^-23 times the rows of a thread (4 here) is far below the
   tolerance; the mean is as good as FP32 numbers of the size of that first value are. */
MPT_TEST(batchnorm_means_far_from_zero) {
    static const images z = {4, 30, 31, 9};
    static const struct {
        mpt_dtype dtype;
        float mean, deviation, first;
    } cases[] = {
        {MPT_F16, 60, 0.6f, 0},       {MPT_F32, 3000, 0.5f, 0},    {MPT_F32, -1e6f, 1, 0},
        {MPT_F32, 0.001f, 1e-6f, 50}, {MPT_F32, 0, 1e-3f, 10000},  {MPT_BF16, 256, 4, -8000},
        {MPT_F32, 17, 0, 17},         {MPT_F16, 60000, 1000.0f, 0}};
    kernel_test t = kernel_test_open();
    int k, i, channel;
    for (k = 0; k < 8; k++) {
        norm_case c = norm_make(&t, &z, cases[k].dtype, 4, 0);
        for (i = 0; i < (int)c.count; i++) {
            float x = cases[k].mean + cases[k].deviation * kernel_random_float(&t);
            if (i < z.c && mpti_f32_bits(cases[k].first)) x = cases[k].first;
            mpti_store(cases[k].dtype, (void *)c.host.x, i, x);
        }
        norm_forward(&t, &c);
        for (channel = 0; channel < z.c; channel++) {
            double sum = 0, squares = 0, m = (double)c.pixels, mean, var;
            for (i = channel; i < (int)c.count; i += z.c)
                sum += mpti_load(cases[k].dtype, c.host.x, i);
            mean = sum / m;
            for (i = channel; i < (int)c.count; i += z.c) {
                double d = mpti_load(cases[k].dtype, c.host.x, i) - mean;
                squares += d * d;
            }
            var = squares / (m - 1);
            CHECK_NEAR(((const float *)from_device(&t, c.host.batch_mean))[channel], mean,
                       2e-7 * (fabs(mean) + fabs((double)cases[k].first)) + 1e-6 * sqrt(var));
            CHECK_NEAR(((const float *)from_device(&t, c.host.batch_var))[channel], var,
                       4e-6 * var);
        }
        kernel_test_release(&t);
    }
    kernel_test_close(&t);
}

/* inf and NaN stay in their channel, and don't get lost in it. */
MPT_TEST(batchnorm_nonfinite) {
    static const images shapes[2] = {{2, 9, 9, 8}, {2, 9, 9, 3}};
    kernel_test t = kernel_test_open();
    int k, i;
    for (k = 0; k < 4; k++) {
        norm_case c = norm_make(&t, &shapes[k % 2], MPT_F32, 2, 0);
        const float *y;
        ((float *)c.host.x)[5 * c.host.c + 1] = k < 2 ? infinity : not_a_number();
        norm_forward(&t, &c);
        y = (const float *)from_device(&t, c.host.y);
        for (i = 0; i < (int)c.count; i++)
            CHECK_EQ_INT(mpti_is_finite(y[i]), i % c.host.c != 1);
        y = (const float *)from_device(&t, c.host.batch_var);
        for (i = 0; i < c.host.c; i++) CHECK_EQ_INT(mpti_is_finite(y[i]), i != 1);
        kernel_test_release(&t);
    }
    kernel_test_close(&t);
}

/* Backward takes the CPU's forward on both sides, so that relu opens for the same elements. */
static void norm_backward(kernel_test *t, norm_case *c, int in_place) {
    mpt_batchnorm_args *a = &c->host, *d = &c->device;
    a->workspace_bytes = t->ops->batchnorm_forward_workspace_bytes(t->self, a);
    a->workspace = host_workspace(t, a->workspace_bytes);
    CHECK_OK(t->ctx, t->ops->batchnorm_forward(t->self, a));
    a->dy = kernel_random(t, a->dtype, c->count, c->used);
    a->dx = in_place ? (void *)(uintptr_t)a->dy : kernel_nans(t, a->dtype, c->count);
    if (a->residual) a->dresidual = kernel_nans(t, a->dtype, c->count);
    a->dgamma = (float *)kernel_nans(t, MPT_F32, a->c);
    a->dbeta = (float *)kernel_nans(t, MPT_F32, a->c);
    *d = *a;
    d->x = on_device(t, a->x);
    d->y = on_device(t, a->y);
    d->dy = on_device(t, a->dy);
    d->dx = on_device(t, a->dx);
    d->dresidual = on_device(t, a->dresidual);
    d->gamma = (const float *)on_device(t, a->gamma);
    d->batch_mean = (float *)on_device(t, a->batch_mean);
    d->batch_inv_std = (float *)on_device(t, a->batch_inv_std);
    d->dgamma = (float *)on_device(t, a->dgamma);
    d->dbeta = (float *)on_device(t, a->dbeta);
    norm_workspaces(t, c, t->ops->batchnorm_backward_workspace_bytes(t->self, a));
    CHECK_KERNEL(mptk_batchnorm_backward(d, NULL));
    CHECK_OK(t->ctx, t->ops->batchnorm_backward(t->self, a));
}

/* Sums of m terms, |g| <= 1 and |g xhat| <= 4, by threads that add up to 16 of them and then trees:
   30 roundings of 2^-24 relative to the sum of what is added. */
static void norm_check_backward(kernel_test *t, const norm_case *c) {
    const mpt_batchnorm_args *a = &c->host;
    const double sums = 2e-6 * (double)c->pixels + 1e-6, step = kernel_epsilon(a->dtype);
    double scale = 0;
    int i;
    for (i = 0; i < a->c; i++)
        scale = fmax(scale, fabs((double)a->gamma[i] * (double)a->batch_inv_std[i]));
    check_close("dbeta", MPT_F32, from_device(t, a->dbeta), a->dbeta, a->c, sums, 1e-6);
    check_close("dgamma", MPT_F32, from_device(t, a->dgamma), a->dgamma, a->c, 4 * sums, 1e-6);
    check_close("dx", a->dtype, from_device(t, a->dx), a->dx, c->count, 2e-5 * (scale + 1), step);
    if (a->dresidual)
        check_same("dresidual", a->dtype, from_device(t, a->dresidual), a->dresidual, c->count);
}

MPT_TEST(batchnorm_backward) {
    kernel_test t = kernel_test_open();
    int s, k, choice;
    for (s = 0; s < NUM_NORM_SHAPES; s++) {
        for (k = 0; k < 9; k++) {
            norm_case c;
            choice = k / 3;
            if (choice && s % 3 != choice && !mpt_test_full()) continue;
            c = norm_make(&t, &norm_shapes[s], dtypes[k % 3],
                          num_valid_of(norm_shapes[s].n, choice), (s + k) % 2);
            norm_backward(&t, &c, s % 2);
            norm_check_backward(&t, &c);
            kernel_test_release(&t);
        }
    }
    kernel_test_close(&t);
}

MPT_TEST(batchnorm_twice_gives_the_same_bits) {
    static const images z = {2, 40, 41, 72};
    kernel_test t = kernel_test_open();
    norm_case c = norm_make(&t, &z, MPT_F32, 2, 1);
    float *y, *mean;
    norm_backward(&t, &c, 0);
    y = (float *)kernel_copy_of(&t, from_device(&t, c.host.dx), c.count * sizeof(float));
    mean = (float *)kernel_copy_of(&t, from_device(&t, c.host.dgamma), z.c * sizeof(float));
    CHECK_KERNEL(mptk_batchnorm_backward(&c.device, NULL));
    CHECK_EQ_MEM(from_device(&t, c.host.dx), y, c.count * sizeof(float));
    CHECK_EQ_MEM(from_device(&t, c.host.dgamma), mean, z.c * sizeof(float));
    norm_forward(&t, &c);
    memcpy(y, from_device(&t, c.host.y), c.count * sizeof(float));
    memcpy(mean, from_device(&t, c.host.batch_var), z.c * sizeof(float));
    CHECK_KERNEL(mptk_batchnorm_forward(&c.device, NULL));
    CHECK_EQ_MEM(from_device(&t, c.host.y), y, c.count * sizeof(float));
    CHECK_EQ_MEM(from_device(&t, c.host.batch_var), mean, z.c * sizeof(float));
    kernel_test_close(&t);
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(batchnorm_forward),
    MPT_TEST_CASE(batchnorm_inference),
    MPT_TEST_CASE(batchnorm_variance_beyond_half),
    MPT_TEST_CASE(batchnorm_biased_inside_unbiased_outside),
    MPT_TEST_CASE(batchnorm_means_far_from_zero),
    MPT_TEST_CASE(batchnorm_nonfinite),
    MPT_TEST_CASE(batchnorm_backward),
    MPT_TEST_CASE(batchnorm_twice_gives_the_same_bits),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
