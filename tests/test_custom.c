/* test_custom.c - >>layers: layers of the user's own. They see FP32 and only the records that
   count, in every precision; they are planned, initialised, saved and exported like the rest */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "mpt_test.h"
#include "training.h"

/* ---- three layers ----------------------------------------------------------------------------
   scale: y = p[c] x, a parameter per channel;   sum: y = x0 + x1 (+ x2 + x3);   halve: every second
   column, which changes the shape. */
typedef struct probe { /* what the callbacks saw, and what they are to do */
    int forwards, backwards, inits, infers;
    int64_t last_n;
    int training;
    uint64_t seed;
    const uint64_t *ids;
    size_t workspace; /* to ask for, per record */
    mpt_result infer_result, init_result, forward_result, backward_result;
} probe;

static mpt_result infer_same(const mpt_tensor *in, int num_in, mpt_tensor *out, size_t *num_params,
                             size_t *workspace, void *user) {
    probe *p = (probe *)user;
    (void)num_in, (void)num_params;
    p->infers++;
    *out = in[0];
    *workspace = p->workspace * (size_t)in[0].dims[0];
    return p->infer_result;
}

static mpt_result infer_scale(const mpt_tensor *in, int num_in, mpt_tensor *out, size_t *num_params,
                              size_t *workspace, void *user) {
    *num_params = (size_t)in[0].dims[3];
    return infer_same(in, num_in, out, num_params, workspace, user);
}

static mpt_result infer_halve(const mpt_tensor *in, int num_in, mpt_tensor *out, size_t *num_params,
                              size_t *workspace, void *user) {
    mpt_result rc = infer_same(in, num_in, out, num_params, workspace, user);
    out->dims[2] /= 2;
    return rc;
}

static mpt_result init_scale(float *params, size_t count, uint64_t seed, void *user) {
    probe *p = (probe *)user;
    size_t i;
    p->inits++;
    p->seed = seed;
    for (i = 0; i < count; i++) params[i] = 1 + 0.25f * (float)i;
    return p->init_result;
}

static size_t count_of(const mpt_tensor *t) {
    return (size_t)(t->dims[0] * t->dims[1] * t->dims[2] * t->dims[3]);
}

static void look(const mpt_custom_args *a, probe *p) {
    int i;
    CHECK(a->stream == NULL);
    CHECK(a->out->dtype == MPT_F32 && a->out->num_dims == 4);
    for (i = 0; i < a->num_in; i++) {
        CHECK(a->in[i].dtype == MPT_F32 && a->in[i].num_dims == 4);
        CHECK_EQ_INT(a->in[i].dims[0], a->out->dims[0]);
        CHECK_EQ_INT((uintptr_t)a->in[i].data % 64, 0);
    }
    p->last_n = a->out->dims[0];
    p->training = a->training;
    p->ids = a->sample_ids;
    if (p->workspace) memset(a->workspace, 0xff, p->workspace * (size_t)a->out->dims[0]);
}

static mpt_result forward_scale(const mpt_custom_args *a, void *user) {
    const float *x = (const float *)a->in[0].data;
    float *y = (float *)a->out->data;
    size_t i, n = count_of(a->out), c = (size_t)a->out->dims[3];
    probe *p = (probe *)user;
    look(a, p);
    p->forwards++;
    for (i = 0; i < n; i++) y[i] = a->params[i % c] * x[i];
    return p->forward_result;
}

static mpt_result backward_scale(const mpt_custom_args *a, void *user) {
    const float *x = (const float *)a->in[0].data, *dy = (const float *)a->dout->data;
    float *dx = (float *)a->din[0].data;
    size_t i, n = count_of(a->out), c = (size_t)a->out->dims[3];
    probe *p = (probe *)user;
    look(a, p);
    p->backwards++;
    for (i = 0; i < c; i++) a->dparams[i] = 0;
    for (i = 0; i < n; i++) {
        dx[i] = a->params[i % c] * dy[i];
        a->dparams[i % c] += x[i] * dy[i];
    }
    return p->backward_result;
}

static mpt_result forward_sum(const mpt_custom_args *a, void *user) {
    float *y = (float *)a->out->data;
    size_t i, n = count_of(a->out);
    int k;
    look(a, (probe *)user);
    for (i = 0; i < n; i++)
        for (y[i] = 0, k = 0; k < a->num_in; k++) y[i] += ((const float *)a->in[k].data)[i];
    return MPT_OK;
}

static mpt_result backward_sum(const mpt_custom_args *a, void *user) {
    int k;
    look(a, (probe *)user);
    for (k = 0; k < a->num_in; k++)
        memcpy(a->din[k].data, a->dout->data, count_of(a->dout) * sizeof(float));
    return MPT_OK;
}

static mpt_result forward_halve(const mpt_custom_args *a, void *user) {
    const float *x = (const float *)a->in[0].data;
    float *y = (float *)a->out->data;
    size_t i, n = count_of(a->out), c = (size_t)a->out->dims[3], w = (size_t)a->out->dims[2];
    look(a, (probe *)user);
    for (i = 0; i < n; i++) y[i] = x[(i / (w * c) * 2 * w + i / c % w * 2) * c + i % c];
    return MPT_OK;
}

static mpt_result backward_halve(const mpt_custom_args *a, void *user) {
    const float *dy = (const float *)a->dout->data;
    float *dx = (float *)a->din[0].data;
    size_t i, n = count_of(a->out), c = (size_t)a->out->dims[3], w = (size_t)a->out->dims[2];
    look(a, (probe *)user);
    memset(dx, 0, count_of(&a->in[0]) * sizeof *dx);
    for (i = 0; i < n; i++) dx[(i / (w * c) * 2 * w + i / c % w * 2) * c + i % c] = dy[i];
    return MPT_OK;
}

static probe seen;

static mpt_custom_desc custom_desc(const char *name) {
    mpt_custom_desc d;
    memset(&d, 0, sizeof d);
    d.name = name;
    d.infer = infer_scale;
    d.init = init_scale;
    d.forward = forward_scale;
    d.backward = backward_scale;
    d.user = &seen;
    return d;
}

static int scale(mpt_model *m, int x) {
    mpt_custom_desc d = custom_desc("scale");
    return mpt_custom(m, &x, 1, &d);
}

static int sum(mpt_model *m, const int *in, int n) {
    mpt_custom_desc d = custom_desc("sum");
    d.infer = infer_same;
    d.init = NULL;
    d.forward = forward_sum;
    d.backward = backward_sum;
    return mpt_custom(m, in, n, &d);
}

static int halve(mpt_model *m, int x) {
    mpt_custom_desc d = custom_desc(NULL);
    d.infer = infer_halve;
    d.init = NULL;
    d.forward = forward_halve;
    d.backward = backward_halve;
    return mpt_custom(m, &x, 1, &d);
}

/* ---- nets ------------------------------------------------------------------------------------ */
static int scale_net(mpt_model *m) {
    int x = scale(m, mpt_relu(m, net_conv(m, scale(m, MPT_INPUT), 4, 3, 1, 1, 1)));
    return mpt_dense(m, mpt_global_avg_pool(m, x), 5);
}

static int with_custom_sum(mpt_model *m) {
    int x = mpt_relu(m, mpt_batchnorm(m, net_conv(m, MPT_INPUT, 4, 3, 1, 1, 0), NULL)), in[2];
    in[0] = net_conv(m, x, 4, 3, 1, 1, 0);
    in[1] = x;
    return mpt_dense(m, mpt_global_avg_pool(m, mpt_relu(m, sum(m, in, 2))), 5);
}

static int with_add(mpt_model *m) {
    int x = mpt_relu(m, mpt_batchnorm(m, net_conv(m, MPT_INPUT, 4, 3, 1, 1, 0), NULL));
    x = mpt_relu(m, mpt_add(m, net_conv(m, x, 4, 3, 1, 1, 0), x));
    return mpt_dense(m, mpt_global_avg_pool(m, x), 5);
}

static int sum_of_four(mpt_model *m, bool relu_last) {
    int x = net_conv(m, MPT_INPUT, 3, 3, 1, 1, 0), in[4];
    in[0] = in[1] = x;
    in[relu_last ? 2 : 3] = MPT_INPUT;
    in[relu_last ? 3 : 2] = mpt_relu(m, x);
    return mpt_dense(m, halve(m, sum(m, in, 4)), 5);
}

static int four_inputs_net(mpt_model *m) {
    return sum_of_four(m, true);
}

static int swapped_inputs_net(mpt_model *m) {
    return sum_of_four(m, false);
}

static rig_desc desc_of(net_fn net, mpt_precision precision) {
    rig_desc d = rig_small(net, 6);
    d.trainer.precision = precision;
    d.trainer.loss_scaler.init_scale = 256;
    memset(&seen, 0, sizeof seen);
    return d;
}

/* ---- gradients ------------------------------------------------------------------------------- */
static double loss_of(rig *r, const mpt_batch *b) {
    double loss;
    CHECK_OK(r->ctx, mpt_trainer_accumulate(r->trainer, b));
    loss = r->trainer->stats.loss / (double)r->trainer->num_samples;
    mpti_trainer_begin_step(r->trainer);
    return loss;
}

/* Central differences of a loss in FP32: 2^-24 / h of noise, and kinks of ReLUs. */
static void check_differences(net_fn net) {
    rig_desc d = desc_of(net, MPT_PRECISION_FP32);
    rig r = rig_open(&d);
    pictures p = pictures_make(&d, 6, 1);
    mpt_batch b = pictures_batch(&p, 0, 6);
    const size_t bytes = (size_t)r.model->num_params * sizeof(float);
    float *row = (float *)malloc(bytes), largest = 0;
    const double h = 1.0 / 256;
    int64_t i;
    CHECK_OK(r.ctx, mpt_trainer_accumulate(r.trainer, &b));
    memcpy(row, gradient_row(r.trainer), bytes);
    mpti_trainer_begin_step(r.trainer);
    for (i = 0; i < r.model->num_params; i++) largest = fmaxf(largest, fabsf(row[i]));
    for (i = 0; i < r.model->num_params; i++) {
        const float w = r.trainer->masters[i];
        double up, down;
        r.trainer->masters[i] = (float)(w + h);
        up = loss_of(&r, &b);
        r.trainer->masters[i] = (float)(w - h);
        down = loss_of(&r, &b);
        r.trainer->masters[i] = w;
        CHECK_NEAR(row[i], (up - down) / (2 * h), 0.01 * (double)largest);
    }
    free(row);
    pictures_free(&p);
    rig_close(&r);
}

MPT_TEST(gradients_reach_parameters_and_inputs) {
    check_differences(scale_net);
    check_differences(with_custom_sum);
    check_differences(four_inputs_net);
}

/* A custom addition is an addition, to the last bit; in 16 bits the sum is rounded as the operator
   rounds it. */
static hash train(net_fn net, mpt_precision precision, const int32_t *valid) {
    rig_desc d = desc_of(net, precision);
    pictures p = pictures_make(&d, 12, 1);
    mpt_batch b = pictures_lanes(&p, 0, 2, 6, valid);
    rig r;
    hash h;
    int i;
    d.trainer.accumulate_steps = 2;
    r = rig_open(&d);
    for (i = 0; i < 3; i++) CHECK(!step_of(r.trainer, &b).skipped);
    h = hash_of(r.trainer);
    pictures_free(&p);
    rig_close(&r);
    return h;
}

MPT_TEST(a_custom_addition_is_the_addition) {
    static const mpt_precision precisions[] = {MPT_PRECISION_FP32, MPT_PRECISION_FP16,
                                               MPT_PRECISION_BF16, MPT_PRECISION_FP16_CAST,
                                               MPT_PRECISION_FP16_PURE};
    static const int32_t valid[2] = {5, 0};
    int i;
    for (i = 0; i < 2 * COUNT(precisions); i++) {
        const int32_t *v = i % 2 ? valid : NULL;
        hash custom = train(with_custom_sum, precisions[i / 2], v);
        hash builtin = train(with_add, precisions[i / 2], v);
        CHECK_EQ_STR(custom.hex, builtin.hex);
    }
}

/* ---- what the callbacks see ------------------------------------------------------------------ */
MPT_TEST(callbacks_see_the_records_that_count) {
    static const int32_t valid[1] = {4};
    rig_desc d = desc_of(scale_net, MPT_PRECISION_FP16);
    pictures p = pictures_make(&d, 6, 1);
    mpt_batch b = pictures_lanes(&p, 0, 1, 6, valid);
    const int32_t none = 0;
    float probabilities[6 * 5];
    uint64_t first_seed;
    rig r;
    seen.workspace = 100;
    r = rig_open(&d);
    CHECK_EQ_INT(seen.inits, 2);
    first_seed = seen.seed;
    step_of(r.trainer, &b);
    CHECK_EQ_INT(seen.forwards, 2);
    CHECK_EQ_INT(seen.backwards, 2);
    CHECK_EQ_INT(seen.last_n, 4);
    CHECK_EQ_INT(seen.training, 1);
    CHECK(seen.ids == p.ids);
    CHECK_OK(r.ctx, mpt_predict(r.trainer, &b, probabilities));
    CHECK_EQ_INT(seen.forwards, 4);
    CHECK_EQ_INT(seen.training, 0);
    b.lane_valid = &none; /* nothing to do: not called */
    CHECK_OK(r.ctx, mpt_trainer_accumulate(r.trainer, &b));
    CHECK_EQ_INT(seen.forwards, 4);
    CHECK_EQ_INT(seen.backwards, 2);
    rig_close(&r);
    d.trainer.seed = 5;
    r = rig_open(&d);
    CHECK(seen.seed != first_seed);
    rig_close(&r);
    pictures_free(&p);
}

/* Memory for casts and workspace is planned, and nothing is allocated in a step. */
MPT_TEST(custom_layers_are_in_the_plan) {
    static const mpt_precision precisions[] = {MPT_PRECISION_FP32, MPT_PRECISION_FP16};
    int i;
    for (i = 0; i < 2; i++) {
        rig_desc d = desc_of(four_inputs_net, precisions[i]);
        mpt_memory_plan plan, larger;
        mpt_ctx *ctx;
        mpt_model *m;
        ctx = rig_ctx(&d);
        m = rig_model(ctx, &d);
        CHECK_OK(ctx, mpt_model_plan(m, &d.trainer, 6, &plan));
        seen.workspace = 1 << 20;
        CHECK_OK(ctx, mpt_model_plan(m, &d.trainer, 6, &larger));
        CHECK(larger.workspace >= 6 << 20 && larger.workspace > plan.workspace);
        CHECK_EQ_INT(larger.total - larger.workspace, plan.total - plan.workspace);
        mpt_model_destroy(m);
        mpt_ctx_destroy(ctx);
    }
}

/* ---- saving and exporting -------------------------------------------------------------------- */
MPT_TEST(parameters_go_into_files) {
    rig_desc d = desc_of(scale_net, MPT_PRECISION_FP32);
    pictures p = pictures_make(&d, 6, 1);
    mpt_batch b = pictures_batch(&p, 0, 6);
    mpt_safetensors *s = NULL;
    mpt_safetensors_desc sd;
    mpt_safetensors_info info;
    mpt_export_desc export;
    hash trained, loaded, imported;
    rig r = rig_open(&d);
    step_of(r.trainer, &b);
    trained = hash_of(r.trainer);
    memset(&export, 0, sizeof export);
    export.path = mpt_test_tmpfile("custom.safetensors");
    CHECK_OK(r.ctx, mpt_trainer_export(r.trainer, &export));
    CHECK_OK(r.ctx, mpt_trainer_save(r.trainer, NULL, NULL, mpt_test_tmpfile("custom.state")));
    memset(&sd, 0, sizeof sd);
    sd.path = export.path;
    CHECK_OK(r.ctx, mpt_safetensors_open(r.ctx, &sd, &s));
    CHECK_OK(r.ctx, mpt_safetensors_get(s, mpt_safetensors_find(s, "scale1.weight"), &info));
    CHECK(info.num_dims == 1 && info.dims[0] == 4);
    mpt_safetensors_close(s);
    rig_close(&r);
    r = rig_open(&d);
    CHECK_OK(r.ctx, mpt_trainer_load(r.trainer, NULL, NULL, mpt_test_tmpfile("custom.state")));
    loaded = hash_of(r.trainer);
    rig_close(&r);
    r = rig_open(&d);
    CHECK_OK(r.ctx, mpt_trainer_import(r.trainer, NULL, export.path));
    imported = hash_of(r.trainer);
    rig_close(&r);
    CHECK_EQ_STR(loaded.hex, trained.hex);
    CHECK_EQ_STR(imported.hex, trained.hex);
    pictures_free(&p);
}

/* ---- mistakes and failures ------------------------------------------------------------------- */
static mpt_result infer_nothing(const mpt_tensor *in, int num_in, mpt_tensor *out,
                                size_t *num_params, size_t *workspace, void *user) {
    (void)in, (void)num_in, (void)out, (void)num_params, (void)workspace, (void)user;
    return MPT_OK;
}

static void check_wiring(const mpt_custom_desc *d, const int *in, int n, const char *says) {
    mpt_ctx *ctx = NULL;
    mpt_model *m = NULL;
    CHECK_OK(NULL, mpt_ctx_create(NULL, &ctx));
    CHECK_OK(ctx, mpt_model_create(ctx, 8, 8, 3, &m));
    CHECK_EQ_INT(mpt_custom(m, in, n, d), -1);
    CHECK_RESULT(ctx, mpt_model_finish(m, 1), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "custom");
    CHECK_CONTAINS(mpt_last_error(ctx)->message, says);
    mpt_model_destroy(m);
    mpt_ctx_destroy(ctx);
}

/* Networks that differ in the last inputs of a layer alone have the same parameters, which mean
   something else in each. */
MPT_TEST(a_checkpoint_belongs_to_all_inputs) {
    rig_desc d = desc_of(four_inputs_net, MPT_PRECISION_FP32);
    rig r = rig_open(&d);
    char path[600];
    snprintf(path, sizeof path, "%s", mpt_test_tmpfile("four.safetensors"));
    CHECK_OK(r.ctx, mpt_trainer_save(r.trainer, NULL, NULL, path));
    CHECK_OK(r.ctx, mpt_trainer_load(r.trainer, NULL, NULL, path));
    rig_close(&r);
    d = desc_of(swapped_inputs_net, MPT_PRECISION_FP32);
    r = rig_open(&d);
    CHECK_RESULT(r.ctx, mpt_trainer_load(r.trainer, NULL, NULL, path), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(r.ctx)->message, "a checkpoint of another model");
    rig_close(&r);
}

MPT_TEST(wiring_mistakes_are_explained) {
    static const int inputs[5] = {0, 0, 0, 0, 0}, nobody[1] = {3};
    char long_name[50];
    mpt_custom_desc d = custom_desc("mine");
    memset(&seen, 0, sizeof seen);
    check_wiring(&d, inputs, 0, "1 .. 4 inputs");
    check_wiring(&d, inputs, 5, "1 .. 4 inputs");
    check_wiring(&d, NULL, 1, "1 .. 4 inputs");
    check_wiring(NULL, inputs, 1, "infer, forward and backward");
    check_wiring(&d, nobody, 1, "no value of this model");
    memset(long_name, 'x', sizeof long_name - 1);
    long_name[sizeof long_name - 1] = 0;
    d.name = long_name;
    check_wiring(&d, inputs, 1, "48 bytes");
    d = custom_desc("mine");
    d.backward = NULL;
    check_wiring(&d, inputs, 1, "infer, forward and backward");
    d = custom_desc("mine");
    d.infer = infer_nothing;
    check_wiring(&d, inputs, 1, "four dims");
    d = custom_desc("mine");
    seen.infer_result = MPT_ERR_UNSUPPORTED;
    check_wiring(&d, inputs, 1, "mine0 refused");
    CHECK_EQ_INT(mpt_custom(NULL, inputs, 1, &d), -1);
}

/* A callback that fails ends the call with its result and the layer's name; nothing has changed. */
MPT_TEST(failures_of_callbacks_are_passed_on) {
    rig_desc d = desc_of(scale_net, MPT_PRECISION_FP16);
    pictures p = pictures_make(&d, 6, 1);
    mpt_batch b = pictures_batch(&p, 0, 6);
    float probabilities[6 * 5];
    mpt_step_report report;
    mpt_trainer *t = NULL;
    mpt_memory_plan plan;
    snapshot before;
    rig r = rig_open(&d);
    before = snapshot_take(r.trainer);
    seen.forward_result = MPT_ERR_DEVICE;
    CHECK_RESULT(r.ctx, mpt_trainer_step(r.trainer, &b, &report), MPT_ERR_DEVICE);
    CHECK_CONTAINS(mpt_last_error(r.ctx)->message, "scale0");
    CHECK_RESULT(r.ctx, mpt_predict(r.trainer, &b, probabilities), MPT_ERR_DEVICE);
    seen.forward_result = MPT_OK;
    seen.backward_result = MPT_ERR_INTERNAL;
    CHECK_RESULT(r.ctx, mpt_trainer_step(r.trainer, &b, &report), MPT_ERR_INTERNAL);
    CHECK_CONTAINS(mpt_last_error(r.ctx)->message, "scale1");
    snapshot_check(&before, r.trainer);
    seen.backward_result = MPT_OK;
    CHECK(!step_of(r.trainer, &b).skipped);
    seen.infer_result = MPT_ERR_UNSUPPORTED;
    CHECK_RESULT(r.ctx, mpt_model_plan(r.model, &d.trainer, 6, &plan), MPT_ERR_UNSUPPORTED);
    CHECK_CONTAINS(mpt_last_error(r.ctx)->message, "scale0");
    CHECK_RESULT(r.ctx, mpt_trainer_create(r.model, &d.trainer, 6, &t), MPT_ERR_UNSUPPORTED);
    seen.infer_result = MPT_OK;
    seen.init_result = MPT_ERR_IO;
    CHECK_RESULT(r.ctx, mpt_trainer_create(r.model, &d.trainer, 6, &t), MPT_ERR_IO);
    CHECK_CONTAINS(mpt_last_error(r.ctx)->message, "init of layer scale0");
    rig_close(&r);
    pictures_free(&p);
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(gradients_reach_parameters_and_inputs),
    MPT_TEST_CASE(a_custom_addition_is_the_addition),
    MPT_TEST_CASE(callbacks_see_the_records_that_count),
    MPT_TEST_CASE(custom_layers_are_in_the_plan),
    MPT_TEST_CASE(parameters_go_into_files),
    MPT_TEST_CASE(a_checkpoint_belongs_to_all_inputs),
    MPT_TEST_CASE(wiring_mistakes_are_explained),
    MPT_TEST_CASE(failures_of_callbacks_are_passed_on),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
