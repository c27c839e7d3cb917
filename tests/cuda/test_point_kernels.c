/* test_point_kernels.c - kernels.cu >>batchnorm >>softmax >>pointwise >>update: every launcher
   against the CPU's definition of the same operator. Cases O-38, O-40, O-41, O-42. */
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
    {1, 1, 1, 7},   {4, 5, 3, 1},    {3, 7, 5, 3},  {2, 4, 4, 8},   {5, 6, 6, 16},
    {2, 3, 3, 64},  {2, 5, 5, 72},   {3, 3, 3, 65}, {2, 5, 9, 136}, {2, 40, 41, 8},
    {2, 40, 41, 3}, {1, 36, 35, 33}, {3, 1, 1, 24}, {1, 20, 61, 1},
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
            CHECK(mpti_is_nan(*(const float *)from_device(&t, c.host.batch_mean))); /* as before */
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
    for (i = 0; i < 8; i++) CHECK_NEAR(mpti_load(MPT_F16, from_device(&t, c.host.y), i), 1, 1e-3);
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
   another size, which is the worst pivot. 2^-23 times the rows of a thread (4 here) is far below
   the tolerance; the mean is as good as FP32 numbers of the size of that first value are. */
MPT_TEST(batchnorm_means_far_from_zero) {
    static const images z = {4, 30, 31, 9};
    static const struct {
        mpt_dtype dtype;
        float mean, deviation, first;
    } cases[] = {{MPT_F16, 60, 0.6f, 0},     {MPT_F32, 3000, 0.5f, 0},
                 {MPT_F32, -1e6f, 1, 0},     {MPT_F32, 0.001f, 1e-6f, 50},
                 {MPT_F32, 0, 1e-3f, 10000}, {MPT_BF16, 256, 4, -8000},
                 {MPT_F32, 17, 0, 17},       {MPT_F16, 60000, 1000.0f, 0}};
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
        for (i = 0; i < (int)c.count; i++) CHECK_EQ_INT(mpti_is_finite(y[i]), i % c.host.c != 1);
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
    static const int classes[] = {1, 2, 5, 7, 8, 10, 33, 64, 65, 255, 1000, 1001, 1024, 1025, 2056};
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

/* A thread that has a 1 loses every 4e-8 that it adds, 390 times, unless it keeps what was lost:
   all of them together are 1.6e-5 of the sum. */
MPT_TEST(softmax_small_terms_add_up) {
    kernel_test t = kernel_test_open();
    loss_case c = loss_make(&t, MPT_F32, 1, 1, 100001);
    int i;
    for (i = 0; i < 100001; i++) ((float *)c.host.logits)[i] = i < 256 ? 0 : -17;
    loss_run(&t, &c);
    loss_check(&t, &c);
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
    for (i = 0; i < classes; i++) gradient[i] = mpti_load(dtype, from_device(t, c.host.dlogits), i);
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
    const float rows[8][8] = {
        {0, 0, 0, 0, 0, 0, 0, 0},         {-0.0f, 0, -0.0f, 0, -1, -2, -3, -4},
        {1, 2, 3, 4, 5, 6, 7, 8},         {-1, -2, -3, -4, -5, -6, -7, -8},
        {nan, 2, 3, 4, 5, 6, 7, 8},       {1, 2, 3, nan, 5, 6, 7, 8},
        {-infinity, 2, 3, 4, 5, 6, 7, 8}, {1, infinity, 3, 4, 5, 6, 7, 8}};
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
    {{2, 8, 8, 3}, 2, 2, 0},  {{2, 7, 9, 8}, 3, 2, 1},    {{1, 5, 6, 16}, 2, 1, 0},
    {{3, 5, 5, 1}, 3, 1, 1},  {{2, 9, 8, 40}, 3, 3, 0},   {{1, 11, 10, 7}, 5, 2, 2},
    {{2, 7, 7, 65}, 2, 5, 1}, {{1, 17, 18, 8}, 16, 3, 8}, {{2, 4, 4, 24}, 1, 2, 0},
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

/* ---- casts, input, fill, scale --------------------------------------------------------------- */
/* Ties, the ends of FP16 and BF16, subnormals of both, and what lies around them. */
static const float cast_values[] = {0.0f,          -0.0f,          1.0f,          1.00048828125f,
                                    1.0009765625f, 1.00146484375f, 65504.0f,      65519.996f,
                                    65520.0f,      -65520.0f,      1e6f,          5.9604645e-8f,
                                    2.9802322e-8f, 2.9802326e-8f,  8.9406967e-8f, 6.1035156e-5f,
                                    6.0975552e-5f, 1.00390625f,    1.01171875f,   3.3895314e38f,
                                    3.4e38f,       1e-40f,         -9.2e-41f,     0.333333343f};
enum { NUM_CAST_VALUES = sizeof(cast_values) / sizeof(cast_values[0]) };

static void fill_cast_source(kernel_test *t, mpt_dtype dtype, void *p, size_t count) {
    size_t i;
    for (i = 0; i < count; i++) {
        float x = i < NUM_CAST_VALUES ? cast_values[i] : 100 * kernel_random_float(t) / 3;
        if (i == NUM_CAST_VALUES) x = infinity;
        if (i == NUM_CAST_VALUES + 1) x = -infinity;
        if (i == NUM_CAST_VALUES + 2) x = not_a_number();
        mpti_store(dtype, p, i, x);
    }
}

/* All nine, between places that are aligned and that are not: bit for bit. */
MPT_TEST(casts) {
    static const int sizes[] = {1, 7, 8, 9, 40, 2047, 2049, 5000};
    kernel_test t = kernel_test_open();
    int s, k, shift;
    for (s = 0; s < 8; s++) {
        for (k = 0; k < 9; k++) {
            for (shift = 0; shift < 2; shift++) {
                mpt_cast_args a, d;
                mpt_dtype src = dtypes[k % 3], dst = dtypes[k / 3];
                size_t count = (size_t)sizes[s], all = count + (size_t)shift;
                uint8_t *from = (uint8_t *)kernel_nans(&t, src, all);
                uint8_t *to = (uint8_t *)kernel_nans(&t, dst, all);
                size_t skip_src = (size_t)shift * mpt_dtype_size(src);
                size_t skip_dst = (size_t)shift * mpt_dtype_size(dst);
                fill_cast_source(&t, src, from + skip_src, count);
                a.src = from + skip_src;
                a.dst = to + skip_dst;
                a.count = (int64_t)count;
                a.src_dtype = src;
                a.dst_dtype = dst;
                d = a;
                d.src = (uint8_t *)on_device(&t, from) + skip_src;
                d.dst = (uint8_t *)on_device(&t, to) + skip_dst;
                CHECK_KERNEL(mptk_cast(&d, NULL));
                CHECK_OK(t.ctx, t.ops->cast(t.self, &a));
                check_same("cast", dst, from_device(&t, to), to, all);
                kernel_test_release(&t);
            }
        }
    }
    kernel_test_close(&t);
}

/* Bytes and numbers, with a mean and without, from a picture that begins anywhere. Three roundings
   of FP32 where the CPU has FP64: 2^-24 each, of x and of y, whose size is up to 1 / std. */
MPT_TEST(input_normalize) {
    static const images shapes[] = {{2, 3, 5, 3}, {3, 28, 28, 1}, {2, 4, 4, 8}, {1, 1, 1, 7}};
    static const mpt_dtype sources[] = {MPT_U8, MPT_F32, MPT_F16, MPT_BF16};
    kernel_test t = kernel_test_open();
    int s, k, i;
    for (s = 0; s < 4; s++) {
        for (k = 0; k < 24; k++) {
            mpt_normalize_args a, d;
            size_t size, count, shift, used;
            uint8_t *x;
            memset(&a, 0, sizeof(a));
            a.n = shapes[s].n;
            a.num_valid = num_valid_of(a.n, k / 12);
            a.h = shapes[s].h;
            a.wd = shapes[s].wd;
            a.c = shapes[s].c;
            a.src_dtype = sources[k % 4];
            a.dtype = dtypes[k / 4 % 3];
            size = mpt_dtype_size(a.src_dtype);
            count = (size_t)a.n * a.h * a.wd * a.c;
            used = count / a.n * a.num_valid;
            shift = (size_t)(k % 2) * size;
            x = (uint8_t *)kernel_bytes(&t, count * size + shift);
            for (i = 0; i < (int)used; i++) {
                if (a.src_dtype == MPT_U8) x[shift + i] = (uint8_t)kernel_random_word(&t);
                else mpti_store(a.src_dtype, x + shift, i, kernel_random_float(&t));
            }
            if (k % 3) {
                float *mean = kernel_random_f32(&t, a.c), *std = kernel_random_f32(&t, a.c);
                for (i = 0; i < a.c; i++) std[i] = 0.2f + fabsf(std[i]);
                a.mean = mean;
                a.std = k % 3 == 2 ? std : NULL;
            }
            a.y = kernel_nans(&t, a.dtype, count);
            a.x = x + shift;
            d = a;
            d.x = (uint8_t *)on_device(&t, x) + shift;
            d.y = on_device(&t, a.y);
            d.mean = (const float *)on_device(&t, a.mean);
            d.std = (const float *)on_device(&t, a.std);
            CHECK_KERNEL(mptk_input_normalize(&d, NULL));
            CHECK_OK(t.ctx, t.ops->input_normalize(t.self, &a));
            check_close("y", a.dtype, from_device(&t, a.y), a.y, count, 3 * 1.2e-7 * 5,
                        kernel_epsilon(a.dtype));
            kernel_test_release(&t);
        }
    }
    kernel_test_close(&t);
}

MPT_TEST(fill_and_scale) {
    static const int sizes[] = {1, 255, 257, 2048, 4100};
    static const float factors[] = {0, 0.5f, -3, 1};
    kernel_test t = kernel_test_open();
    int s, k;
    for (s = 0; s < 5; s++) {
        for (k = 0; k < 4; k++) {
            size_t count = (size_t)sizes[s];
            mpt_fill_args a, d;
            mpt_scale_args b, e;
            a.dtype = dtypes[k % 3];
            a.dst = kernel_nans(&t, a.dtype, count);
            a.count = (int64_t)count;
            a.value = k == 3 ? 70000.0f : 0.1f;
            d = a;
            d.dst = on_device(&t, a.dst);
            CHECK_KERNEL(mptk_fill(&d, NULL));
            CHECK_OK(t.ctx, t.ops->fill(t.self, &a));
            check_same("fill", a.dtype, from_device(&t, a.dst), a.dst, count);
            b.x = kernel_random_f32(&t, count);
            put_specials(MPT_F32, b.x, count);
            b.count = (int64_t)count - 1; /* from the second on: anywhere in a row */
            b.factor = factors[k];
            e = b;
            e.x = (float *)on_device(&t, b.x) + 1;
            CHECK_KERNEL(mptk_scale(&e, NULL));
            b.x++;
            CHECK_OK(t.ctx, t.ops->scale(t.self, &b));
            check_same("scale", MPT_F32, from_device(&t, b.x - 1), b.x - 1, count);
            kernel_test_release(&t);
        }
    }
    kernel_test_close(&t);
}

MPT_TEST(nothing_is_not_an_error) {
    mpt_cast_args c;
    mpt_fill_args f;
    mpt_scale_args s;
    kernel_test t = kernel_test_open();
    memset(&c, 0, sizeof(c));
    memset(&f, 0, sizeof(f));
    memset(&s, 0, sizeof(s));
    c.src_dtype = MPT_F32;
    c.dst_dtype = f.dtype = MPT_F16;
    CHECK_KERNEL(mptk_cast(&c, NULL));
    CHECK_KERNEL(mptk_fill(&f, NULL));
    CHECK_KERNEL(mptk_scale(&s, NULL));
    kernel_test_close(&t);
}

/* ---- update -------------------------------------------------------------------------------------
   The same steps through >>optim and >>scaler on the host and through mptk_update on the device. */
enum { UPDATE_SEGMENTS = 6, UPDATE_STATS = 26, UPDATE_CHUNKS = 16 };
static const size_t update_counts[UPDATE_SEGMENTS] = {20001, 1, 16384, 5003, 64, 7};

typedef struct update_bench {
    kernel_test *t;
    mpti_optimizer o; /* the host's */
    mpti_parameter segments[UPDATE_SEGMENTS];
    mpti_params p;
    mpt_loss_scaler scaler;
    size_t num_params;
    float *row, *running, *momentum; /* with the statistics behind num_params */
    mpt_update_args a;               /* pointers are the device's */
    mpt_step_state *state;           /* host's copy of the device's */
    float norm, clip;                /* of the host's last step */
    bool skipped;
    int64_t known_applied[3]; /* applied steps: now, one step ago, two */
} update_bench;

static float update_rate(int64_t applied) {
    return 0.125f / (float)(1 + applied % 7);
}

static void update_tables(update_bench *b, int num_segments) {
    kernel_test *t = b->t;
    mpt_update_chunk *chunks = (mpt_update_chunk *)kernel_bytes(t, (size_t)b->o.num_chunks *
                                                                       sizeof(mpt_update_chunk));
    mpt_update_segment *segments =
        (mpt_update_segment *)kernel_bytes(t, (size_t)num_segments * sizeof(mpt_update_segment));
    int64_t i, first = 0;
    for (i = 0; i < b->o.num_chunks; i++) {
        chunks[i].offset = (int64_t)b->o.chunks[i].offset;
        chunks[i].count = (int)b->o.chunks[i].count;
        chunks[i].segment = (int)b->o.chunks[i].segment;
    }
    for (i = 0; i < num_segments; i++) {
        segments[i].first_chunk = first;
        segments[i].num_chunks = mpti_parameter_chunks(b->segments[i].count);
        segments[i].decays = b->segments[i].decays;
        segments[i].adapts = b->segments[i].adapts;
        first += segments[i].num_chunks;
    }
    b->a.chunks = (const mpt_update_chunk *)on_device(t, chunks);
    b->a.segments = (const mpt_update_segment *)on_device(t, segments);
    b->a.num_chunks = b->o.num_chunks;
    b->a.num_segments = num_segments;
    b->a.sums = (double *)device_workspace(t, (size_t)b->o.num_chunks * 2 * sizeof(double));
    b->a.ratios = (float *)device_workspace(t, (size_t)num_segments * sizeof(float));
}

/* Moments are zeros at the start, weights random, running statistics too. */
static void update_buffers(update_bench *b, mpt_dtype half) {
    kernel_test *t = b->t;
    const size_t n = b->num_params;
    int moments = mpti_optimizer_state_count(b->o.desc.kind), i;
    b->p.weights = kernel_random_f32(t, n);
    b->row = (float *)kernel_nans(t, MPT_F32, n + UPDATE_STATS);
    b->p.gradients = b->row;
    if (moments > 0) b->p.first = (float *)memset(kernel_nans(t, MPT_F32, n), 0, n * 4);
    if (moments > 1) b->p.second = (float *)memset(kernel_nans(t, MPT_F32, n), 0, n * 4);
    if (half != MPT_F32) b->p.half = (uint16_t *)kernel_nans(t, half, n);
    b->p.half_dtype = half;
    b->running = kernel_random_f32(t, UPDATE_STATS);
    b->momentum = kernel_random_f32(t, UPDATE_STATS);
    for (i = 0; i < UPDATE_STATS; i++) b->momentum[i] = 0.1f + 0.1f * (float)(i % 2);
    b->a.weights = (float *)on_device(t, b->p.weights);
    b->a.row = (const float *)on_device(t, b->row);
    b->a.first = (float *)on_device(t, b->p.first);
    b->a.second = (float *)on_device(t, b->p.second);
    b->a.half = on_device(t, b->p.half);
    b->a.running = (float *)on_device(t, b->running);
    b->a.momentum = (const float *)on_device(t, b->momentum);
    b->a.half_dtype = half;
    b->a.num_params = (int64_t)n;
    b->a.num_stats = UPDATE_STATS;
}

static void update_open(update_bench *b, kernel_test *t, const mpt_optimizer_desc *desc,
                        const mpt_loss_scaler_desc *scaler, const size_t *counts, int num_segments,
                        mpt_dtype half) {
    mpt_optimizer_desc d = *desc;
    int i;
    memset(b, 0, sizeof(*b));
    b->t = t;
    mpti_optimizer_desc_defaults(&d);
    CHECK_OK(t->ctx, mpti_optimizer_desc_check(&d, &t->ctx->error));
    for (i = 0; i < num_segments; i++) { /* the last two as biases */
        b->segments[i] = mpti_parameter_make(&d, b->num_params, counts[i],
                                             i > 0 && i >= num_segments - 2);
        b->num_params += counts[i];
    }
    CHECK_OK(t->ctx, mpti_optimizer_open(&b->o, t->ctx, &d, b->segments, num_segments));
    mpt_loss_scaler_init(&b->scaler, scaler);
    update_buffers(b, half);
    update_tables(b, num_segments);
    b->a.optimizer = d;
    b->a.num_samples = 6;
    b->a.fitting = 8;
    b->state = (mpt_step_state *)kernel_bytes(t, sizeof(mpt_step_state));
    memset(b->state, 0, sizeof(mpt_step_state));
    b->state->scaler = b->scaler;
    b->state->beta1_power = b->state->beta2_power = 1;
    b->state->report.seconds = 42;
    b->a.state = (mpt_step_state *)on_device(t, b->state);
}

static void update_close(update_bench *b) {
    mpti_optimizer_close(&b->o);
    kernel_test_release(b->t);
}

/* Gradients of up to 1 as they are stored: times scale, times records, over what fits. */
static void update_fill_row(update_bench *b) {
    float factor = b->scaler.scale * (float)b->a.num_samples / (float)b->a.fitting;
    size_t i;
    for (i = 0; i < b->num_params; i++) b->row[i] = kernel_random_float(b->t) * factor;
    for (; i < b->num_params + UPDATE_STATS; i++) b->row[i] = 8 * kernel_random_float(b->t);
}

/* As mpt_trainer_apply does it, line by line. */
static void update_on_host(update_bench *b) {
    const float unscale = (float)(b->a.fitting /
                                  ((double)b->scaler.scale * (double)b->a.num_samples));
    bool bad;
    int i;
    CHECK_OK(b->t->ctx, mpti_gradients_check(&b->o, &b->p, unscale, &bad, &b->norm));
    for (i = 0; i < UPDATE_STATS; i++) bad |= !mpti_is_finite(b->row[b->num_params + i]);
    if (bad) b->norm = 0;
    b->skipped = mpt_loss_scaler_update(&b->scaler, bad) != 0;
    b->clip = mpti_clip_factor(b->norm, b->o.desc.max_grad_norm);
    if (b->skipped) return;
    CHECK_OK(b->t->ctx, mpti_optimizer_update(&b->o, &b->p, unscale, b->clip,
                                              update_rate(b->o.applied_steps)));
    for (i = 0; i < UPDATE_STATS; i++)
        b->running[i] += b->momentum[i] *
                         (b->row[b->num_params + i] / (float)b->a.num_samples - b->running[i]);
}

/* The host knows of skips two steps late, and gives the rates that may be. */
static void update_on_device(update_bench *b, int64_t step) {
    mpt_softmax_stats stats = {12, 6, 4, 5};
    int i;
    b->known_applied[2] = b->known_applied[1];
    b->known_applied[1] = b->known_applied[0];
    b->known_applied[0] = b->o.applied_steps;
    b->a.first_applied = b->known_applied[2];
    for (i = 0; i < 4; i++) b->a.rates[i] = update_rate(b->a.first_applied + i);
    b->a.step = step;
    stats.loss += (double)step;
    CHECK_CUDA(cudaMemcpy(&b->a.state->stats, &stats, sizeof(stats), cudaMemcpyHostToDevice));
    on_device(b->t, b->row);
    CHECK_KERNEL(mptk_update(&b->a, NULL));
    memcpy(b->state, from_device(b->t, b->state), sizeof(mpt_step_state));
}

static void update_step(update_bench *b, int64_t step) {
    update_on_device(b, step);
    update_on_host(b);
}

/* What the step reports, and the scaler. Squares add up in another order: the norm may differ in
   its last bit. */
static void update_check_state(update_bench *b, int64_t step, float scale_before) {
    const mpt_step_state *s = b->state;
    const mpt_step_report *r = &s->report;
    CHECK_EQ_MEM(&s->scaler, &b->scaler, sizeof(mpt_loss_scaler));
    CHECK_EQ_INT(s->applied_steps, b->o.applied_steps);
    CHECK_NEAR(s->beta1_power, b->o.beta1_power, 0);
    CHECK_NEAR(s->beta2_power, b->o.beta2_power, 0);
    CHECK_EQ_INT(s->skip, b->skipped);
    CHECK_EQ_INT(s->first_nonfinite < 0, !b->skipped);
    CHECK_NEAR(s->stats.loss, 0, 0);
    CHECK_EQ_INT(s->stats.num_labeled + s->stats.num_correct + s->stats.num_correct_top5, 0);
    CHECK_NEAR(r->loss, (12.0 + (double)step) / (double)b->a.num_samples, 0);
    CHECK_NEAR(r->seconds, 42, 0); /* the host's business */
    CHECK_EQ_INT(r->step, step);
    CHECK_EQ_INT(r->applied_steps, b->o.applied_steps);
    CHECK_EQ_INT(r->num_samples, b->a.num_samples);
    CHECK_EQ_INT(r->num_correct, 4);
    CHECK_EQ_INT(r->num_correct_top5, 5);
    CHECK_NEAR(r->loss_scale, scale_before, 0);
    CHECK_NEAR(r->learning_rate, b->skipped ? 0 : update_rate(b->o.applied_steps - 1), 0);
    CHECK_NEAR(r->grad_norm, b->norm, 1.2e-7 * b->norm);
    CHECK_EQ_INT(r->skipped, b->skipped);
}

/* The same roundings in the same order: the same bits. Only clipping and LARS bring in the norm,
   whose last bit may differ: 2^-24 of an update each step, and updates are at most 4 here. */
static void update_check_weights(update_bench *b, double tolerance) {
    const size_t n = b->num_params;
    kernel_test *t = b->t;
    const uint16_t *half;
    const float *weights = (const float *)from_device(t, b->p.weights);
    size_t i;
    check_close("weights", MPT_F32, weights, b->p.weights, n, tolerance, 0);
    if (b->p.first)
        check_close("first", MPT_F32, from_device(t, b->p.first), b->p.first, n, tolerance, 0);
    if (b->p.second)
        check_close("second", MPT_F32, from_device(t, b->p.second), b->p.second, n, tolerance, 0);
    check_close("running", MPT_F32, from_device(t, b->running), b->running, UPDATE_STATS, 0, 0);
    if (!b->p.half) return;
    half = (const uint16_t *)from_device(t, b->p.half);
    for (i = 0; i < n; i++) {
        uint16_t expected = b->p.half_dtype == MPT_F16 ? mpt_f32_to_f16(weights[i])
                                                       : mpt_f32_to_bf16(weights[i]);
        if (b->o.applied_steps) CHECK_EQ_INT(half[i], expected);
    }
}

static mpt_optimizer_desc update_desc(mpt_optimizer_kind kind) {
    mpt_optimizer_desc d;
    memset(&d, 0, sizeof(d));
    d.kind = kind;
    d.learning_rate = 0.125f;
    d.weight_decay = 0.01f;
    return d;
}

static mpt_loss_scaler_desc update_scaler_desc(void) { /* moves soon, and meets both ends */
    mpt_loss_scaler_desc d;
    memset(&d, 0, sizeof(d));
    d.init_scale = 1024;
    d.min_scale = 256;
    d.max_scale = 4096;
    d.growth_interval = 3;
    return d;
}

/* 50 steps with overflows at random places: scale, counters, rates, weights. */
MPT_TEST(update_trace_with_overflows) {
    static const uint32_t bad[4] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xff800001u};
    const mpt_optimizer_desc desc = update_desc(MPT_OPTIMIZER_SGD_MOMENTUM);
    const mpt_loss_scaler_desc scaler = update_scaler_desc();
    kernel_test t = kernel_test_open();
    update_bench b;
    int64_t step;
    int skips = 0;
    update_open(&b, &t, &desc, &scaler, update_counts, UPDATE_SEGMENTS, MPT_F16);
    for (step = 1; step <= 50; step++) {
        float scale = b.scaler.scale;
        size_t place = kernel_random_word(&t) % (b.num_params + UPDATE_STATS);
        int overflows = step < 25 ? kernel_random_word(&t) % 5 == 0 : step < 33;
        if (overflows && step % 3 == 0) place = b.num_params + place % UPDATE_STATS;
        update_fill_row(&b);
        if (overflows) b.row[place] = mpti_f32_from_bits(bad[step % 4]);
        skips += overflows;
        update_step(&b, step);
        CHECK_EQ_INT(b.skipped, overflows);
        update_check_state(&b, step, scale);
        if (overflows) CHECK_EQ_INT(b.state->first_nonfinite, place);
        if (step % 5 == 0 || overflows) update_check_weights(&b, 0);
    }
    CHECK(skips >= 10 && b.scaler.num_skipped == skips);
    update_close(&b);
    kernel_test_close(&t);
}

MPT_TEST(update_rules) {
    const mpt_loss_scaler_desc scaler = update_scaler_desc();
    static const mpt_dtype halves[3] = {MPT_F16, MPT_BF16, MPT_F32};
    kernel_test t = kernel_test_open();
    int kind, variant;
    for (kind = MPT_OPTIMIZER_SGD; kind <= MPT_OPTIMIZER_LARS; kind++) {
        for (variant = 0; variant < 3; variant++) { /* plain, clipped, the other flags */
            mpt_optimizer_desc desc = update_desc((mpt_optimizer_kind)kind);
            update_bench b;
            int64_t step;
            double tolerance = variant == 1 || kind == MPT_OPTIMIZER_LARS ? 4e-6 : 0;
            if (variant == 1) desc.max_grad_norm = 0.5f;
            if (variant == 2) desc.no_decay_on_bn_and_bias = desc.lars_ratio_on_bn_and_bias = 1;
            update_open(&b, &t, &desc, &scaler, update_counts, UPDATE_SEGMENTS,
                        halves[(kind + variant) % 3]);
            for (step = 1; step <= 6; step++) {
                float scale = b.scaler.scale;
                update_fill_row(&b);
                if (step == 4) b.row[step * 7001] = infinity;
                update_step(&b, step);
                update_check_state(&b, step, scale);
                update_check_weights(&b, tolerance);
                CHECK_EQ_INT(b.skipped, step == 4);
                if (variant == 1 && !b.skipped) CHECK(b.clip < 0.1f);
            }
            update_close(&b);
        }
    }
    kernel_test_close(&t);
}

/* The first of several, in gradients or statistics; a scale below 1 whose division overflows; and
   squares that FP32 can't hold. */
MPT_TEST(update_check) {
    static const size_t counts[1] = {40000};
    const mpt_optimizer_desc desc = update_desc(MPT_OPTIMIZER_SGD);
    mpt_loss_scaler_desc scaler = update_scaler_desc();
    kernel_test t = kernel_test_open();
    update_bench b;
    size_t i;
    scaler.mode = MPT_LOSS_SCALE_STATIC;
    scaler.init_scale = 1.0f / 64;
    update_open(&b, &t, &desc, &scaler, counts, 1, MPT_F32);
    update_fill_row(&b);
    b.row[39999] = b.row[17] = b.row[18] = b.row[17 + 1024] = b.row[16384] = infinity;
    b.row[40003] = not_a_number();
    update_step(&b, 1);
    CHECK_EQ_INT(b.state->first_nonfinite, 17);
    b.row[17] = b.row[18] = b.row[17 + 1024] = 0;
    update_step(&b, 2);
    CHECK_EQ_INT(b.state->first_nonfinite, 16384);
    b.row[39999] = b.row[16384] = 0;
    update_step(&b, 3);
    CHECK_EQ_INT(b.state->first_nonfinite, 40003);
    b.row[40003] = 3e38f; /* of a statistic that is fine */
    update_step(&b, 4);
    CHECK_EQ_INT(b.state->first_nonfinite, -1);
    b.row[123] = 3e38f; /* times 64 beyond FP32 */
    update_step(&b, 5);
    CHECK_EQ_INT(b.state->first_nonfinite, 123);
    CHECK(b.skipped && b.state->skip);
    for (i = 0; i < b.num_params; i++) b.row[i] = i == 777 ? 1e30f : 0;
    update_step(&b, 6);
    CHECK(b.norm > 6e31f);
    CHECK_NEAR(b.state->report.grad_norm / b.norm, 1, 1.2e-7);
    for (i = 0; i < b.num_params; i++) b.row[i] = i == 778 ? 1e-30f : 0;
    update_step(&b, 7);
    CHECK(b.norm > 0 && b.norm < 1e-28f);
    CHECK_NEAR(b.state->report.grad_norm / b.norm, 1, 1.2e-7);
    update_check_weights(&b, 0);
    update_close(&b);
    kernel_test_close(&t);
}

/* Weights of zero move, a gradient of zero makes no NaN (O-42). */
MPT_TEST(update_lars_with_zero_norms) {
    static const size_t counts[3] = {4, 4, 4};
    const mpt_optimizer_desc desc = update_desc(MPT_OPTIMIZER_LARS);
    const mpt_loss_scaler_desc scaler = update_scaler_desc();
    kernel_test t = kernel_test_open();
    update_bench b;
    int i;
    update_open(&b, &t, &desc, &scaler, counts, 3, MPT_F32);
    update_fill_row(&b);
    for (i = 0; i < 4; i++) b.p.weights[i] = b.row[4 + i] = 0;
    on_device(&t, b.p.weights);
    update_step(&b, 1);
    CHECK(b.p.weights[0] != 0 && mpti_is_finite(b.p.weights[4]));
    update_check_weights(&b, 1e-7);
    update_close(&b);
    kernel_test_close(&t);
}

static void load_reference(kernel_test *t, mpt_safetensors *s, const char *format, const char *name,
                           int64_t step, float *dst) {
    static const size_t places[3] = {0, 15, 19};
    char text[64];
    int i;
    for (i = 0; i < 2; i++) {
        snprintf(text, sizeof(text), format, name, (int)step, i);
        CHECK_OK(t->ctx, mpt_safetensors_read(s, mpt_safetensors_find(s, text), dst + places[i],
                                              (places[i + 1] - places[i]) * sizeof(float)));
    }
}

/* PyTorch's ten steps in FP64: each of ours rounds within 6e-8 of the largest weight. */
MPT_TEST(update_as_pytorch) {
    static const size_t counts[2] = {15, 4};
    static const struct {
        mpt_optimizer_kind kind;
        const char *name;
        float rate, decay;
    } runs[] = {{MPT_OPTIMIZER_SGD, "sgd", 0.1f, 0},
                {MPT_OPTIMIZER_SGD_MOMENTUM, "sgd_momentum_wd", 0.1f, 0.01f},
                {MPT_OPTIMIZER_SGD_NESTEROV, "sgd_nesterov", 0.1f, 0.01f},
                {MPT_OPTIMIZER_ADAM, "adam", 0.01f, 0},
                {MPT_OPTIMIZER_ADAMW, "adamw", 0.01f, 0.05f},
                {MPT_OPTIMIZER_LARS, "lars", 1, 1e-4f}};
    kernel_test t = kernel_test_open();
    mpt_safetensors_desc sd;
    mpt_safetensors *s = NULL;
    int k, i;
    memset(&sd, 0, sizeof(sd));
    sd.path = mpt_test_data("optimizers.safetensors");
    CHECK_OK(t.ctx, mpt_safetensors_open(t.ctx, &sd, &s));
    for (k = 0; k < 6; k++) {
        mpt_optimizer_desc desc = update_desc(runs[k].kind);
        mpt_loss_scaler_desc none;
        update_bench b;
        float expected[19];
        double largest = 1;
        int64_t step;
        memset(&none, 0, sizeof(none));
        none.mode = MPT_LOSS_SCALE_NONE;
        desc.weight_decay = runs[k].decay;
        desc.lars_trust = 0.02f;
        update_open(&b, &t, &desc, &none, counts, 2, MPT_F32);
        b.a.fitting = (double)b.a.num_samples;
        memset(b.row, 0, (b.num_params + UPDATE_STATS) * sizeof(float));
        load_reference(&t, s, "%s.%d.p%d", runs[k].name, 0, b.p.weights);
        on_device(&t, b.p.weights);
        for (step = 1; step <= 10; step++) {
            load_reference(&t, s, "%s.%d.g%d", runs[k].name, step, b.row);
            load_reference(&t, s, "%s.%d.p%d", runs[k].name, step, expected);
            on_device(&t, b.row);
            b.a.step = step;
            b.a.first_applied = step - 1;
            b.a.rates[0] = runs[k].rate;
            CHECK_KERNEL(mptk_update(&b.a, NULL));
            for (i = 0; i < 19; i++) largest = fmax(largest, fabs((double)expected[i]));
            check_close(runs[k].name, MPT_F32, from_device(&t, b.p.weights), expected, 19,
                        1e-6 * largest, 0);
        }
        update_close(&b);
    }
    mpt_safetensors_close(s);
    kernel_test_close(&t);
}

MPT_TEST(update_twice_gives_the_same_bits) {
    mpt_optimizer_desc desc = update_desc(MPT_OPTIMIZER_LARS);
    const mpt_loss_scaler_desc scaler = update_scaler_desc();
    kernel_test t = kernel_test_open();
    mpt_step_state before, first;
    update_bench b;
    float *weights;
    int i;
    desc.max_grad_norm = 1;
    update_open(&b, &t, &desc, &scaler, update_counts, UPDATE_SEGMENTS, MPT_F16);
    update_fill_row(&b);
    before = *b.state;
    weights = (float *)kernel_bytes(&t, b.num_params * sizeof(float));
    memset(&first, 0, sizeof(first));
    for (i = 0; i < 3; i++) {
        on_device(&t, b.p.weights);
        on_device(&t, b.p.first);
        *b.state = before;
        on_device(&t, b.state);
        update_on_device(&b, 1);
        if (i == 0) {
            first = *b.state;
            memcpy(weights, from_device(&t, b.p.weights), b.num_params * sizeof(float));
        }
        CHECK_EQ_MEM(b.state, &first, sizeof(first));
        CHECK_EQ_MEM(from_device(&t, b.p.weights), weights, b.num_params * sizeof(float));
    }
    update_close(&b);
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
    MPT_TEST_CASE(softmax_small_terms_add_up),
    MPT_TEST_CASE(softmax_in_place_with_loss_scale),
    MPT_TEST_CASE(softmax_large_logits),
    MPT_TEST_CASE(softmax_ranks_and_nonfinite),
    MPT_TEST_CASE(softmax_twice_gives_the_same_bits),
    MPT_TEST_CASE(pointwise_of_many_sizes),
    MPT_TEST_CASE(dropout_masks),
    MPT_TEST_CASE(max_pool),
    MPT_TEST_CASE(max_pool_of_equals_and_nonfinite),
    MPT_TEST_CASE(average_pools),
    MPT_TEST_CASE(casts),
    MPT_TEST_CASE(input_normalize),
    MPT_TEST_CASE(fill_and_scale),
    MPT_TEST_CASE(nothing_is_not_an_error),
    MPT_TEST_CASE(update_trace_with_overflows),
    MPT_TEST_CASE(update_rules),
    MPT_TEST_CASE(update_check),
    MPT_TEST_CASE(update_lars_with_zero_norms),
    MPT_TEST_CASE(update_as_pytorch),
    MPT_TEST_CASE(update_twice_gives_the_same_bits),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
