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

/* ---- softmax cross entropy ------------------------------------------------------------------- */
typedef struct loss_case {
    mpt_softmax_xent_args host, device;
    size_t count;
} loss_case;

/* Logits -8 .. 8 in steps of 1/8, so that there are ties. */
static loss_case loss_make(kernel_test *t, mpt_dtype dtype, int n, int num_valid, int classes) {
    loss_case c;
    mpt_softmax_xent_args *a = &c.host;
    size_t i;
    memset(&c, 0, sizeof(c));
    c.count = (size_t)n * classes;
    a->n = n;
    a->num_valid = num_valid;
    a->classes = classes;
    a->dtype = dtype;
    a->grad_scale = 0.25f;
    a->logits = kernel_nans(t, dtype, c.count);
    for (i = 0; i < (size_t)num_valid * classes; i++)
        mpti_store(dtype, (void *)a->logits, i, 8 * kernel_random_float(t));
    a->labels = (const int32_t *)kernel_bytes(t, n * sizeof(int32_t));
    for (i = 0; i < (size_t)num_valid; i++)
        ((int32_t *)a->labels)[i] = (int32_t)(kernel_random_word(t) % (unsigned)classes);
    a->dlogits = kernel_nans(t, dtype, c.count);
    a->probabilities = (float *)kernel_nans(t, MPT_F32, c.count);
    a->stats = (mpt_softmax_stats *)kernel_bytes(t, sizeof(mpt_softmax_stats));
    memset(a->stats, 0, sizeof(mpt_softmax_stats));
    return c;
}

static void loss_run(kernel_test *t, loss_case *c) {
    mpt_softmax_xent_args *a = &c->host, *d = &c->device;
    *d = *a;
    d->logits = on_device(t, a->logits);
    d->labels = (const int32_t *)on_device(t, a->labels);
    d->dlogits = on_device(t, a->dlogits);
    d->probabilities = (float *)on_device(t, a->probabilities);
    d->stats = (mpt_softmax_stats *)on_device(t, a->stats);
    d->loss_scale = (const float *)on_device(t, a->loss_scale);
    d->workspace_bytes = mptk_softmax_xent_workspace_bytes(a);
    d->workspace = device_workspace(t, d->workspace_bytes);
    a->workspace_bytes = t->ops->softmax_xent_workspace_bytes(t->self, a);
    a->workspace = host_workspace(t, a->workspace_bytes);
    CHECK_KERNEL(mptk_softmax_xent(d, NULL));
    CHECK_OK(t->ctx, t->ops->softmax_xent(t->self, a));
}

/* Probabilities are within 2e-6 of themselves, and 1e-37 of zero, where FP32 ends; gradients within
   that of the probability, a rounding of the target, and one of their type. Losses of rows add
   in FP64; each is within 2e-6. */
static void loss_check(kernel_test *t, const loss_case *c) {
    const mpt_softmax_xent_args *a = &c->host;
    const mpt_softmax_stats *s;
    double scale = (double)a->grad_scale * (a->loss_scale ? (double)*a->loss_scale : 1.0);
    /* FP16's numbers are 2^-24 apart near 0, and the CPU's FP64 ones 1.1e-16 near 1, where it
       subtracts the target */
    double last = a->dtype == MPT_F16 ? 6e-8 : 1.2e-16 * scale;
    if (a->probabilities)
        check_close("probabilities", MPT_F32, from_device(t, a->probabilities), a->probabilities,
                    c->count, 1e-37, 2e-6);
    if (a->dlogits)
        check_close("dlogits", a->dtype, from_device(t, a->dlogits), a->dlogits, c->count,
                    2e-7 * scale * (double)a->label_smoothing + last,
                    kernel_epsilon(a->dtype) + 2e-6);
    s = (const mpt_softmax_stats *)from_device(t, a->stats);
    CHECK_NEAR(s->loss, a->stats->loss, 2e-6 * a->stats->loss);
    CHECK_EQ_INT(s->num_labeled, a->stats->num_labeled);
    CHECK_EQ_INT(s->num_correct, a->stats->num_correct);
    CHECK_EQ_INT(s->num_correct_top5, a->stats->num_correct_top5);
}

/* A warp's rows and a block's, in vectors and one by one; one row, rows that fill no block, rows
   without a label, slots that don't count. */
MPT_TEST(softmax_of_many_shapes) {
    static const int classes[] = {1,  2,   5,    7,    8,    10,   33,  64,
                                  65, 255, 1000, 1001, 1024, 1025, 2056};
    static const int rows[] = {1, 3, 9, 2};
    kernel_test t = kernel_test_open();
    int s, k;
    for (s = 0; s < (int)(sizeof(classes) / sizeof(classes[0])); s++) {
        for (k = 0; k < 6; k++) {
            int n = rows[(s + k) % 4], valid = num_valid_of(n, k / 3 + (s % 5 == 4));
            loss_case c = loss_make(&t, dtypes[k % 3], n, valid, classes[s]);
            c.host.label_smoothing = k % 2 ? 0.1f : 0;
            if (valid > 1) ((int32_t *)c.host.labels)[1] = -1;
            if (k == 4) c.host.labels = NULL;
            if (k == 3) c.host.probabilities = NULL;
            if (k == 5) c.host.dlogits = NULL;
            loss_run(&t, &c);
            loss_check(&t, &c);
            kernel_test_release(&t);
        }
    }
    kernel_test_close(&t);
}

MPT_TEST(softmax_of_100000_classes) {
    kernel_test t = kernel_test_open();
    int k;
    for (k = 0; k < (mpt_test_full() ? 6 : 2); k++) {
        loss_case c = loss_make(&t, dtypes[(k + 1) % 3], 2, 2, 100000 + k % 2);
        c.host.label_smoothing = 0.1f;
        loss_run(&t, &c);
        loss_check(&t, &c);
        kernel_test_release(&t);
    }
    kernel_test_close(&t);
}

/* dlogits where the logits are, the loss scale from memory, statistics on top of others. */
MPT_TEST(softmax_in_place_with_loss_scale) {
    static const int classes[] = {10, 16, 1000, 1500, 1504};
    kernel_test t = kernel_test_open();
    int s, k;
    for (s = 0; s < 5; s++) {
        for (k = 0; k < 3; k++) {
            loss_case c = loss_make(&t, dtypes[k], 6, 5, classes[s]);
            float *scale = kernel_random_f32(&t, 1);
            scale[0] = 1024;
            c.host.loss_scale = scale;
            c.host.dlogits = (void *)c.host.logits;
            c.host.stats->loss = 3;
            c.host.stats->num_labeled = 5;
            c.host.stats->num_correct = 2;
            c.host.stats->num_correct_top5 = 4;
            loss_run(&t, &c);
            loss_check(&t, &c);
            kernel_test_release(&t);
        }
    }
    kernel_test_close(&t);
}

static double loss_of(kernel_test *t, mpt_dtype dtype, const float *logits, int classes, int label,
                      float gradient[8]) {
    loss_case c = loss_make(t, dtype, 1, 1, classes);
    double loss;
    int i;
    for (i = 0; i < classes; i++) mpti_store(dtype, (void *)c.host.logits, i, logits[i]);
    ((int32_t *)c.host.labels)[0] = label;
    loss_run(t, &c);
    loss_check(t, &c);
    loss = ((const mpt_softmax_stats *)from_device(t, c.host.stats))->loss;
    for (i = 0; i < classes; i++)
        gradient[i] = mpti_load(dtype, from_device(t, c.host.dlogits), i);
    kernel_test_release(t);
    return loss;
}

/* O-38 */
MPT_TEST(softmax_large_logits) {
    static const float half[3] = {60000, 0, -60000}, equal[2] = {1e8f, 1e8f};
    static const float sure[3] = {0, -20, -25}, tiny[2] = {0, -80};
    kernel_test t = kernel_test_open();
    float g[8];
    int label, i;
    for (label = 0; label < 3; label++) {
        double loss = loss_of(&t, MPT_F16, half, 3, label, g);
        CHECK_NEAR(loss, 60000.0 * label, 32.0 * label); /* 60000 is a step of 32 in FP16 */
        for (i = 0; i < 3; i++) CHECK(mpti_is_finite(g[i]));
        CHECK_NEAR(g[label], label == 0 ? 0 : -0.25, 0);
    }
    CHECK_NEAR(loss_of(&t, MPT_F32, equal, 2, 0, g), 0.693147180, 1e-8);
    /* far below what FP32 resolves beside 1 */
    CHECK_NEAR(loss_of(&t, MPT_F32, sure, 3, 0, g), 2.0750481e-9, 1e-14);
    CHECK_NEAR(g[0], -0.25 * 2.0750481e-9, 1e-14);
    CHECK_NEAR(loss_of(&t, MPT_F32, tiny, 2, 0, g), 0, 1e-16); /* nor does FP64 resolve all */
    kernel_test_close(&t);
}

/* NaN where the CPU has NaN; other gradients within 1e-6. */
static void check_close_or_nan(kernel_test *t, const loss_case *c) {
    const float *got = (const float *)from_device(t, c->host.dlogits);
    const float *expected = (const float *)c->host.dlogits;
    size_t i;
    for (i = 0; i < c->count; i++)
        if (!mpti_is_nan(got[i]) || !mpti_is_nan(expected[i]))
            CHECK_NEAR(got[i], expected[i], 1e-6);
}

/* The label's rank among equals, -0 beside 0, infinities, and NaN anywhere. */
MPT_TEST(softmax_ranks_and_nonfinite) {
    const float nan = not_a_number();
    const float rows[8][8] = {{0, 0, 0, 0, 0, 0, 0, 0},
                              {-0.0f, 0, -0.0f, 0, -1, -2, -3, -4},
                              {1, 2, 3, 4, 5, 6, 7, 8},
                              {-1, -2, -3, -4, -5, -6, -7, -8},
                              {nan, 2, 3, 4, 5, 6, 7, 8},
                              {1, 2, 3, nan, 5, 6, 7, 8},
                              {-infinity, 2, 3, 4, 5, 6, 7, 8},
                              {1, infinity, 3, 4, 5, 6, 7, 8}};
    kernel_test t = kernel_test_open();
    int r, label, k;
    for (r = 0; r < 8; r++) {
        for (label = 0; label < 8; label += 1 + r % 2) {
            for (k = 0; k < 2; k++) { /* in a vector, and one by one */
                const mpt_softmax_stats *s;
                loss_case c = loss_make(&t, MPT_F32, 1, 1, 8 - k);
                memcpy((void *)c.host.logits, rows[r], c.count * sizeof(float));
                ((int32_t *)c.host.labels)[0] = label < 8 - k ? label : 0;
                loss_run(&t, &c);
                s = (const mpt_softmax_stats *)from_device(&t, c.host.stats);
                CHECK_EQ_INT(s->num_correct, c.host.stats->num_correct);
                CHECK_EQ_INT(s->num_correct_top5, c.host.stats->num_correct_top5);
                CHECK_EQ_INT(mpti_is_nan((float)s->loss), mpti_is_nan((float)c.host.stats->loss));
                CHECK_EQ_INT(mpti_is_finite((float)s->loss),
                             mpti_is_finite((float)c.host.stats->loss));
                if (mpti_is_finite((float)s->loss)) loss_check(&t, &c);
                else check_close_or_nan(&t, &c);
                kernel_test_release(&t);
            }
        }
    }
    kernel_test_close(&t);
}

MPT_TEST(softmax_twice_gives_the_same_bits) {
    kernel_test t = kernel_test_open();
    loss_case c = loss_make(&t, MPT_F32, 300, 299, 40);
    void *dlogits, *stats;
    loss_run(&t, &c);
    loss_check(&t, &c);
    dlogits = kernel_copy_of(&t, from_device(&t, c.host.dlogits), c.count * sizeof(float));
    stats = kernel_copy_of(&t, from_device(&t, c.host.stats), sizeof(mpt_softmax_stats));
    memset(c.host.stats, 0, sizeof(mpt_softmax_stats));
    on_device(&t, c.host.stats);
    CHECK_KERNEL(mptk_softmax_xent(&c.device, NULL));
    CHECK_EQ_MEM(from_device(&t, c.host.dlogits), dlogits, c.count * sizeof(float));
    CHECK_EQ_MEM(from_device(&t, c.host.stats), stats, sizeof(mpt_softmax_stats));
    kernel_test_close(&t);
}

/* ---- relu, add, dropout ---------------------------------------------------------------------- */
/* Numbers that are easy to get wrong, among random ones. */
static void put_specials(mpt_dtype dtype, void *p, size_t used) {
    const float specials[6] = {0.0f, -0.0f, not_a_number(), infinity, -infinity, -1e-7f};
    size_t i;
    for (i = 0; i < 6 && 3 * i + 1 < used; i++) mpti_store(dtype, p, 3 * i + 1, specials[i]);
}

typedef int (*pointwise_launcher)(const mpt_pointwise_args *a, void *stream);

static void pointwise_compare(kernel_test *t, int which, mpt_pointwise_args *a) {
    static const char *const names[3] = {"relu_forward", "relu_backward", "add"};
    const pointwise_launcher launchers[3] = {mptk_relu_forward, mptk_relu_backward, mptk_add};
    const size_t count = (size_t)(a->n * a->per_sample);
    mpt_pointwise_args d = *a;
    d.a = on_device(t, a->a);
    d.b = on_device(t, a->b);
    d.y = on_device(t, a->y);
    CHECK_KERNEL(launchers[which](&d, NULL));
    if (which == 0) CHECK_OK(t->ctx, t->ops->relu_forward(t->self, a));
    else if (which == 1) CHECK_OK(t->ctx, t->ops->relu_backward(t->self, a));
    else CHECK_OK(t->ctx, t->ops->add(t->self, a));
    check_same(names[which], a->dtype, from_device(t, a->y), a->y, count);
}

/* Sizes around a vector and around a block; slots that end within a vector; y where a or b is. */
MPT_TEST(pointwise_of_many_sizes) {
    static const int sizes[] = {1, 3, 7, 8, 9, 63, 255, 683, 2048, 2051};
    kernel_test t = kernel_test_open();
    int s, k, which;
    for (s = 0; s < 10; s++) {
        for (k = 0; k < 9; k++) {
            for (which = 0; which < 3; which++) {
                mpt_pointwise_args a;
                size_t count = 3 * (size_t)sizes[s], used;
                memset(&a, 0, sizeof(a));
                a.n = 3;
                a.num_valid = num_valid_of(3, k / 3);
                a.per_sample = sizes[s];
                a.dtype = dtypes[k % 3];
                used = (size_t)a.num_valid * sizes[s];
                a.a = kernel_random(&t, a.dtype, count, used);
                a.b = which ? kernel_random(&t, a.dtype, count, used) : NULL;
                put_specials(a.dtype, (void *)a.a, used);
                a.y = (s + k) % 3 == 0 ? (void *)a.a : kernel_nans(&t, a.dtype, count);
                if ((s + k) % 3 == 1 && which) a.y = (void *)a.b;
                pointwise_compare(&t, which, &a);
                kernel_test_release(&t);
            }
        }
    }
    kernel_test_close(&t);
}

/* Masks are the CPU's, element by element. */
MPT_TEST(dropout_masks) {
    static const int sizes[] = {1, 2, 3, 4, 5, 8, 131, 1024};
    static const float probabilities[] = {0, 0.1f, 0.5f, 0.999f, 1};
    kernel_test t = kernel_test_open();
    int s, k, i;
    for (s = 0; s < 8; s++) {
        for (k = 0; k < 15; k++) {
            mpt_dropout_args a, d;
            size_t count = 4 * (size_t)sizes[s], used;
            uint64_t *ids = (uint64_t *)kernel_bytes(&t, 4 * sizeof(uint64_t));
            memset(&a, 0, sizeof(a));
            a.n = 4;
            a.num_valid = 4 - k % 2;
            a.per_sample = sizes[s];
            a.dtype = dtypes[k % 3];
            a.probability = probabilities[k % 5];
            a.seed = 0x123456789abcdefu + (uint64_t)k;
            a.epoch = 16777210 + k; /* past what 24 bits hold */
            a.layer = k % 4 ? k : 191;
            a.first_id = 0xfffffffeu; /* past 32 bits from the third on */
            for (i = 0; i < a.num_valid; i++) ids[i] = (uint64_t)kernel_random_word(&t) << 17;
            if (k % 3 == 0) a.sample_ids = ids;
            used = (size_t)a.num_valid * sizes[s];
            a.x = kernel_random(&t, a.dtype, count, used);
            put_specials(a.dtype, (void *)a.x, used);
            a.y = k % 2 ? (void *)a.x : kernel_nans(&t, a.dtype, count);
            d = a;
            d.x = on_device(&t, a.x);
            d.y = on_device(&t, a.y);
            d.sample_ids = (const uint64_t *)on_device(&t, a.sample_ids);
            CHECK_KERNEL(mptk_dropout(&d, NULL));
            CHECK_OK(t.ctx, t.ops->dropout_forward(t.self, &a));
            check_same("dropout", a.dtype, from_device(&t, a.y), a.y, count);
            kernel_test_release(&t);
        }
    }
    kernel_test_close(&t);
}

/* ---- pools ----------------------------------------------------------------------------------- */
typedef struct pool_shape {
    images z;
    int kernel, stride, padding;
} pool_shape;

/* Windows that meet, overlap, leave gaps, stick out; 16 x 16, whose indices fill a byte. */
static const pool_shape pool_shapes[] = {
    {{2, 8, 8, 3}, 2, 2, 0},    {{2, 7, 9, 8}, 3, 2, 1},   {{1, 5, 6, 16}, 2, 1, 0},
    {{3, 5, 5, 1}, 3, 1, 1},    {{2, 9, 8, 40}, 3, 3, 0},  {{1, 11, 10, 7}, 5, 2, 2},
    {{2, 7, 7, 65}, 2, 5, 1},   {{1, 17, 18, 8}, 16, 3, 8}, {{2, 4, 4, 24}, 1, 2, 0},
    {{1, 1, 1, 9}, 1, 1, 0},
};
enum { NUM_POOL_SHAPES = sizeof(pool_shapes) / sizeof(pool_shapes[0]) };
typedef enum { POOL_MAX, POOL_AVG, POOL_GLOBAL } pool_kind;

typedef struct pool_case {
    mpt_pool2d_args host, device;
    size_t num_x, num_y;
} pool_case;

static pool_case pool_make(kernel_test *t, const pool_shape *s, pool_kind kind, mpt_dtype dtype,
                           int num_valid) {
    pool_case c;
    mpt_pool2d_args *a = &c.host;
    memset(&c, 0, sizeof(c));
    a->n = s->z.n;
    a->num_valid = num_valid;
    a->h = s->z.h;
    a->wd = s->z.wd;
    a->c = s->z.c;
    a->kernel = s->kernel;
    a->stride = s->stride;
    a->padding = s->padding;
    a->p = kind == POOL_GLOBAL ? 1 : (a->h + 2 * s->padding - s->kernel) / s->stride + 1;
    a->q = kind == POOL_GLOBAL ? 1 : (a->wd + 2 * s->padding - s->kernel) / s->stride + 1;
    a->dtype = dtype;
    c.num_x = (size_t)a->n * a->h * a->wd * a->c;
    c.num_y = (size_t)a->n * a->p * a->q * a->c;
    a->x = kernel_random(t, dtype, c.num_x, c.num_x / a->n * num_valid);
    a->y = kernel_nans(t, dtype, c.num_y);
    a->dy = kernel_random(t, dtype, c.num_y, c.num_y / a->n * num_valid);
    a->dx = kernel_nans(t, dtype, c.num_x);
    a->argmax = kind == POOL_MAX ? (uint8_t *)kernel_bytes(t, c.num_y) : NULL;
    return c;
}

static void pool_run(kernel_test *t, pool_case *c, pool_kind kind) {
    mpt_pool2d_args *a = &c->host, *d = &c->device;
    *d = *a;
    d->x = on_device(t, a->x);
    d->y = on_device(t, a->y);
    d->dy = on_device(t, a->dy);
    d->dx = on_device(t, a->dx);
    d->argmax = (uint8_t *)on_device(t, a->argmax);
    if (kind == POOL_MAX) {
        CHECK_KERNEL(mptk_max_pool_forward(d, NULL));
        CHECK_OK(t->ctx, t->ops->max_pool_forward(t->self, a));
        if (!a->argmax) return;
        CHECK_KERNEL(mptk_max_pool_backward(d, NULL));
        CHECK_OK(t->ctx, t->ops->max_pool_backward(t->self, a));
    } else if (kind == POOL_AVG) {
        CHECK_KERNEL(mptk_avg_pool_forward(d, NULL));
        CHECK_OK(t->ctx, t->ops->avg_pool_forward(t->self, a));
        CHECK_KERNEL(mptk_avg_pool_backward(d, NULL));
        CHECK_OK(t->ctx, t->ops->avg_pool_backward(t->self, a));
    } else {
        CHECK_KERNEL(mptk_global_avg_pool_forward(d, NULL));
        CHECK_OK(t->ctx, t->ops->global_avg_pool_forward(t->self, a));
        CHECK_KERNEL(mptk_global_avg_pool_backward(d, NULL));
        CHECK_OK(t->ctx, t->ops->global_avg_pool_backward(t->self, a));
    }
}

/* Maxima are numbers of x, and gradients sums in the CPU's order: all the same. */
MPT_TEST(max_pool) {
    kernel_test t = kernel_test_open();
    int s, k;
    for (s = 0; s < NUM_POOL_SHAPES; s++) {
        for (k = 0; k < 9; k++) {
            pool_case c = pool_make(&t, &pool_shapes[s], POOL_MAX, dtypes[k % 3],
                                    num_valid_of(pool_shapes[s].z.n, k / 3));
            pool_run(&t, &c, POOL_MAX);
            check_same("y", c.host.dtype, from_device(&t, c.host.y), c.host.y, c.num_y);
            CHECK_EQ_MEM(from_device(&t, c.host.argmax), c.host.argmax, c.num_y);
            check_same("dx", c.host.dtype, from_device(&t, c.host.dx), c.host.dx, c.num_x);
            c.host.argmax = NULL; /* evaluation */
            pool_run(&t, &c, POOL_MAX);
            check_same("y", c.host.dtype, from_device(&t, c.host.y), c.host.y, c.num_y);
            kernel_test_release(&t);
        }
    }
    kernel_test_close(&t);
}

/* Equal numbers, -0 and 0, NaN, windows of nothing but -inf. */
MPT_TEST(max_pool_of_equals_and_nonfinite) {
    kernel_test t = kernel_test_open();
    const float choices[8] = {0, -0.0f, 1, 1, -infinity, -infinity, infinity, not_a_number()};
    int s, k, highest;
    size_t i;
    for (s = 0; s < NUM_POOL_SHAPES; s++) {
        for (highest = 2; highest <= 8; highest += 2) {
            for (k = 0; k < 2; k++) {
                int n = pool_shapes[s].z.n;
                pool_case c = pool_make(&t, &pool_shapes[s], POOL_MAX, k ? MPT_F16 : MPT_F32, n);
                for (i = 0; i < c.num_x; i++) {
                    int choice = (int)(kernel_random_word(&t) % (unsigned)highest);
                    if (highest == 6) choice = choice ? 4 : 0; /* mostly -inf */
                    mpti_store(c.host.dtype, (void *)c.host.x, i, choices[choice]);
                }
                pool_run(&t, &c, POOL_MAX);
                check_same("y", c.host.dtype, from_device(&t, c.host.y), c.host.y, c.num_y);
                CHECK_EQ_MEM(from_device(&t, c.host.argmax), c.host.argmax, c.num_y);
                check_same("dx", c.host.dtype, from_device(&t, c.host.dx), c.host.dx, c.num_x);
                kernel_test_release(&t);
            }
        }
    }
    kernel_test_close(&t);
}

/* Sums are the CPU's, the division is a multiplication: one more rounding of FP32, after which the
   type's may go to the other side. */
MPT_TEST(average_pools) {
    kernel_test t = kernel_test_open();
    int s, k;
    for (s = 0; s < NUM_POOL_SHAPES; s++) {
        for (k = 0; k < 18; k++) {
            pool_kind kind = k < 9 ? POOL_AVG : POOL_GLOBAL;
            pool_case c = pool_make(&t, &pool_shapes[s], kind, dtypes[k % 3],
                                    num_valid_of(pool_shapes[s].z.n, k / 3 % 3));
            double step = kernel_epsilon(c.host.dtype);
            pool_run(&t, &c, kind);
            check_close("y", c.host.dtype, from_device(&t, c.host.y), c.host.y, c.num_y, 1e-9,
                        step + 1.2e-7);
            check_close("dx", c.host.dtype, from_device(&t, c.host.dx), c.host.dx, c.num_x, 1e-9,
                        step + 1.2e-7);
            kernel_test_release(&t);
        }
    }
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
    MPT_TEST_CASE(softmax_of_many_shapes),
    MPT_TEST_CASE(softmax_of_100000_classes),
    MPT_TEST_CASE(softmax_in_place_with_loss_scale),
    MPT_TEST_CASE(softmax_large_logits),
    MPT_TEST_CASE(softmax_ranks_and_nonfinite),
    MPT_TEST_CASE(softmax_twice_gives_the_same_bits),
    MPT_TEST_CASE(pointwise_of_many_sizes),
    MPT_TEST_CASE(dropout_masks),
    MPT_TEST_CASE(max_pool),
    MPT_TEST_CASE(max_pool_of_equals_and_nonfinite),
    MPT_TEST_CASE(average_pools),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
