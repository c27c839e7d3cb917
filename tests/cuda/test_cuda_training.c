/* test_cuda_training.c - >>cuda, >>device: whole networks trained on a GPU, or on the CPU through
   tests/cuda_on_cpu, beside the CPU backend */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "training.h"

#if defined(__has_include)
#if __has_include(<cuda_on_cpu.h>)
#include <cuda_on_cpu.h>
#define ON_CPU 1
#endif
#endif

/* ---- two machines, one run ------------------------------------------------------------------- */
enum { STEPS = 5, MAX_STEPS = 40 };

static int has_bf16(mpt_ctx *ctx) {
    return ((const mpti_cuda *)ctx->backend_self)->arch >= 80;
}

static rig_desc on(const rig_desc *d, const mpt_backend *backend) {
    rig_desc there = *d;
    there.backend = backend;
    return there;
}

static rig_desc on_cuda(const rig_desc *d) {
    return on(d, mpt_backend_cuda());
}

/* Trains `steps` steps on the same batch or, over epochs, on all that fit. Reports come one step
   late and are put in their places. */
static void train(rig *r, const pictures *p, int batch, int steps, mpt_step_report *reports) {
    mpt_step_report s;
    int i;
    for (i = 0; i < steps; i++) {
        mpt_batch b = pictures_batch(p, (i * batch) % (p->n - batch + 1), batch);
        CHECK_OK(r->ctx, mpt_trainer_step(r->trainer, &b, &s));
        if (s.step > 0) reports[s.step - 1] = s;
        CHECK(s.step >= i); /* never more than one step late */
    }
    CHECK_OK(r->ctx, mpt_trainer_sync(r->trainer, &s));
    CHECK_EQ_INT(s.step, steps);
    reports[s.step - 1] = s;
}

/* What rounding alone does to losses: 16-bit storage on the CPU against FP32 there. Another order
   of roundings may be as far off on the other side, and no loss is known better than two roundings
   of a number near 2.3. FP32 sums differ in their order only. */
static double rounding_of(const rig_desc *d, const pictures *p, const mpt_step_report *cpu,
                          int steps) {
    mpt_step_report exact[MAX_STEPS];
    rig_desc fp32 = *d;
    double largest = d->trainer.precision == MPT_PRECISION_BF16 ? 2 * 7.8e-3 : 2 * 9.8e-4;
    rig r;
    int i;
    fp32.trainer.precision = MPT_PRECISION_FP32;
    r = rig_open(&fp32);
    train(&r, p, d->batch_size, steps, exact);
    rig_close(&r);
    for (i = 0; i < steps; i++)
        if (fabs(exact[i].loss - cpu[i].loss) > largest)
            largest = fabs(exact[i].loss - cpu[i].loss);
    return 2 * largest;
}

/* The losses of both machines over a few steps. */
static void same_losses(const rig_desc *d, int num_pictures, int steps) {
    mpt_step_report here[MAX_STEPS], there[MAX_STEPS];
    rig_desc cuda = on_cuda(d);
    pictures p = pictures_make(d, num_pictures, 3);
    rig a = rig_open(d), b = rig_open(&cuda);
    double tolerance = 1e-4;
    int i;
    CHECK_EQ_STR(mpt_trainer_get_info(b.trainer).backend, "cuda");
    if (d->trainer.precision == MPT_PRECISION_BF16 && !has_bf16(b.ctx))
        SKIP("this device has no BF16");
    train(&a, &p, d->batch_size, steps, here);
    train(&b, &p, d->batch_size, steps, there);
    if (d->trainer.precision != MPT_PRECISION_FP32) tolerance = rounding_of(d, &p, here, steps);
    for (i = 0; i < steps; i++) {
        CHECK_NEAR(there[i].loss, here[i].loss, tolerance);
        CHECK_EQ_INT(there[i].skipped, here[i].skipped);
        CHECK_EQ_INT(there[i].num_samples, here[i].num_samples);
        CHECK_EQ_INT(there[i].applied_steps, here[i].applied_steps);
        CHECK_NEAR(there[i].learning_rate, here[i].learning_rate, 0);
        CHECK_NEAR(there[i].loss_scale, here[i].loss_scale, 0);
        CHECK_NEAR(there[i].grad_norm, here[i].grad_norm,
                   (0.02 + 2 * tolerance) * (1 + here[i].grad_norm));
    }
    CHECK_OK(b.ctx, mpti_trainer_fetch(b.trainer));
    for (i = 0; i < a.model->num_stats; i++)
        CHECK_NEAR(b.trainer->host.running[i], a.trainer->running[i],
                   5 * tolerance * (1 + fabs(a.trainer->running[i])));
    pictures_free(&p);
    rig_close(&a);
    rig_close(&b);
}

static rig_desc lenet(mpt_precision precision) {
    rig_desc d = rig_zoo("lenet", 28, 1, 16);
    d.trainer.precision = precision;
    d.trainer.optimizer.learning_rate = 0.02f;
    return d;
}

MPT_TEST(lenet_in_fp16_has_the_losses_of_the_cpu) {
    rig_desc d = lenet(MPT_PRECISION_FP16);
    same_losses(&d, 40, STEPS);
}

MPT_TEST(resnet20_in_fp16_has_the_losses_of_the_cpu) {
    rig_desc d = rig_zoo("resnet20", mpt_test_full() ? 32 : 16, 3, 4);
    d.trainer.precision = MPT_PRECISION_FP16;
    d.trainer.optimizer.learning_rate = 0.02f;
    same_losses(&d, 12, STEPS);
}

MPT_TEST(every_precision_has_the_losses_of_the_cpu) {
    static const mpt_precision all[] = {MPT_PRECISION_FP32, MPT_PRECISION_FP16_CAST,
                                        MPT_PRECISION_FP16_PURE, MPT_PRECISION_FP16};
    int i;
    for (i = 0; i < COUNT(all); i++) {
        rig_desc d = rig_small(small_net, 4);
        d.trainer.precision = all[i];
        same_losses(&d, 12, STEPS);
    }
}

MPT_TEST(bf16_has_the_losses_of_the_cpu) {
    rig_desc d = rig_small(small_net, 4);
    d.trainer.precision = MPT_PRECISION_BF16;
    same_losses(&d, 12, STEPS);
}

MPT_TEST(every_optimizer_and_schedule_is_followed) {
    int kind;
    for (kind = MPT_OPTIMIZER_SGD; kind <= MPT_OPTIMIZER_LARS; kind++) {
        rig_desc d = rig_small(small_net, 4);
        mpt_trainer_desc *t = &d.trainer;
        t->optimizer.kind = (mpt_optimizer_kind)kind;
        t->optimizer.learning_rate = kind == MPT_OPTIMIZER_LARS ? 1.0f : 0.01f;
        t->optimizer.weight_decay = 1e-3f;
        t->optimizer.max_grad_norm = 1;
        t->schedule.kind = MPT_SCHEDULE_COSINE;
        t->schedule.warmup_steps = 2;
        t->total_steps = 8;
        t->label_smoothing = 0.1f;
        same_losses(&d, 12, 6);
    }
}

static int dropout_net(mpt_model *m) {
    int x = mpt_relu(m, net_conv(m, MPT_INPUT, 8, 3, 1, 1, 1));
    x = mpt_dropout(m, mpt_avg_pool(m, x, 2, 2, 0), 0.4f);
    return mpt_dense(m, mpt_relu(m, mpt_dense(m, x, 16)), 5);
}

MPT_TEST(dropout_drops_what_the_cpu_drops) {
    rig_desc d = rig_small(dropout_net, 4);
    same_losses(&d, 12, STEPS); /* in FP32, where another mask would show at once */
}

/* Channels that are no multiples of 8 anywhere, and a filter that begins between vectors. */
static int odd_net(mpt_model *m) {
    int x = mpt_relu(m, mpt_batchnorm(m, net_conv(m, MPT_INPUT, 5, 3, 1, 1, 0), NULL));
    x = mpt_relu(m, net_conv(m, x, 7, 5, 2, 2, 1));
    x = mpt_relu(m, mpt_batchnorm(m, net_conv(m, x, 8, 3, 3, 1, 1), NULL));
    x = mpt_relu(m, net_conv(m, x, 16, 1, 1, 0, 0));
    return mpt_dense(m, mpt_max_pool(m, x, 2, 1, 1), 5);
}

MPT_TEST(odd_shapes_have_the_losses_of_the_cpu) {
    rig_desc d = rig_small(odd_net, 3);
    same_losses(&d, 9, STEPS);
    d.trainer.precision = MPT_PRECISION_FP16;
    d.trainer.optimizer.learning_rate = 0.005f; /* batches of 3 blow roundings up, step by step */
    same_losses(&d, 9, STEPS);
}

/* ---- gradients, layer by layer --------------------------------------------------------------- */

/* Of the loss scale's multiple, summed over the row. FP32 holds 1 times the gradient. */
static float *gradients_of(rig *r, const mpt_batch *b) {
    const mpt_model *m = r->model;
    size_t bytes = (size_t)(m->num_params + m->num_stats) * sizeof(float);
    float *row = (float *)malloc(bytes);
    int64_t i;
    CHECK_OK(r->ctx, mpt_trainer_accumulate(r->trainer, b));
    if (r->ctx->backend->download)
        CHECK_OK(r->ctx,
                 r->ctx->backend->download(r->ctx->backend_self, row, r->trainer->rows[0], bytes));
    else memcpy(row, r->trainer->rows[0], bytes);
    for (i = 0; i < m->num_params; i++) row[i] /= r->trainer->scaler.scale;
    return row;
}

static double distance(const float *a, const float *b, int64_t n) {
    double sum = 0;
    int64_t i;
    for (i = 0; i < n; i++) sum += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
    return sqrt(sum);
}

/* Rounding to FP16 moves each layer's gradient; on the device it may move it as far as on the CPU,
   another way. Twice that is allowed, as lengths of random vectors of few numbers vary. */
static void same_gradients(const rig_desc *d) {
    rig_desc fp16 = *d, cuda;
    pictures p = pictures_make(d, d->batch_size, 3);
    mpt_batch b = pictures_batch(&p, 0, d->batch_size);
    rig r[3];
    float *g[3];
    int i, v;
    fp16.trainer.precision = MPT_PRECISION_FP16;
    cuda = on_cuda(&fp16);
    r[0] = rig_open(d);
    r[1] = rig_open(&fp16);
    r[2] = rig_open(&cuda);
    for (i = 0; i < 3; i++) g[i] = gradients_of(&r[i], &b);
    for (v = 1; v < r[0].model->num_nodes; v++) {
        const mpti_node *n = &r[0].model->nodes[v];
        const int64_t at = n->param_offset, stats = r[0].model->num_params + n->stat_offset;
        if (n->num_params == 0) continue;
        CHECK(distance(g[2] + at, g[0] + at, n->num_params) <=
              2 * distance(g[1] + at, g[0] + at, n->num_params) + 1e-6);
        if (n->kind == MPTI_KIND_BATCHNORM)
            CHECK(distance(g[2] + stats, g[0] + stats, 2 * n->c) <=
                  2 * distance(g[1] + stats, g[0] + stats, 2 * n->c) + 1e-6);
    }
    for (i = 0; i < 3; i++) {
        free(g[i]);
        rig_close(&r[i]);
    }
    pictures_free(&p);
}

MPT_TEST(gradients_are_as_near_to_fp32_as_those_of_the_cpu) {
    rig_desc d = rig_small(odd_net, 3);
    same_gradients(&d);
    d = rig_small(small_net, 4);
    same_gradients(&d);
    d = lenet(MPT_PRECISION_FP32);
    same_gradients(&d);
    d = rig_zoo("resnet20", 32, 3, 4);
    same_gradients(&d);
}

/* ---- bits ------------------------------------------------------------------------------------ */
static hash hash_of_run(const rig_desc *d, int steps, int records) {
    mpt_step_report reports[MAX_STEPS];
    rig_desc cuda = on_cuda(d);
    pictures p = pictures_make(d, 12, 3);
    rig r = rig_open(&cuda);
    hash h;
    if (!records) r.trainer->device.can_record = false;
    train(&r, &p, d->batch_size, steps, reports);
    h = hash_of(r.trainer);
    pictures_free(&p);
    rig_close(&r);
    return h;
}

MPT_TEST(two_runs_give_the_same_bits) {
    rig_desc d = rig_small(small_net, 4);
    d.trainer.precision = MPT_PRECISION_FP16;
    CHECK_EQ_STR(hash_of_run(&d, 6, 1).hex, hash_of_run(&d, 6, 1).hex);
}

MPT_TEST(recorded_steps_give_the_bits_of_begun_ones) {
    rig_desc d = rig_small(small_net, 4);
    d.trainer.precision = MPT_PRECISION_FP16;
    CHECK_EQ_STR(hash_of_run(&d, 6, 1).hex, hash_of_run(&d, 6, 0).hex);
}

/* ---- lanes, slices, lanes that end early ----------------------------------------------------- */
static void train_lanes(rig *r, const pictures *p, int capacity, double losses[3]) {
    static const int32_t valid[3][2] = {{4, 4}, {4, 1}, {0, 3}};
    mpt_step_report s;
    int i;
    for (i = 0; i < 3; i++) {
        mpt_batch b = pictures_lanes(p, 0, 2, capacity, valid[i]);
        CHECK_OK(r->ctx, mpt_trainer_step(r->trainer, &b, &s));
        CHECK_OK(r->ctx, mpt_trainer_sync(r->trainer, &s));
        CHECK_EQ_INT(s.num_samples, valid[i][0] + valid[i][1]);
        losses[i] = s.loss;
    }
}

MPT_TEST(lanes_and_slices_add_up_as_on_the_cpu) {
    int slices, i;
    for (slices = 1; slices <= 2; slices++) {
        rig_desc d = rig_small(small_net, 4), cuda;
        double here[3], there[3];
        pictures p = pictures_make(&d, 8, 5);
        rig a, b;
        d.trainer.accumulate_steps = 2;
        d.trainer.slices = slices;
        cuda = on_cuda(&d);
        a = rig_open(&d);
        b = rig_open(&cuda);
        train_lanes(&a, &p, 4, here);
        train_lanes(&b, &p, 4, there);
        for (i = 0; i < 3; i++) CHECK_NEAR(there[i], here[i], 1e-4);
        pictures_free(&p);
        rig_close(&a);
        rig_close(&b);
    }
}

/* ---- skipped steps --------------------------------------------------------------------------- */
MPT_TEST(an_overflow_skips_the_step_on_the_device) {
    rig_desc d = rig_small(small_net, 4), cuda;
    mpt_step_report here[MAX_STEPS], there[MAX_STEPS], s;
    hash before;
    pictures p = pictures_make(&d, 4, 3);
    mpt_batch batch = pictures_batch(&p, 0, 4);
    rig a, b;
    int i, skipped = 0;
    d.trainer.precision = MPT_PRECISION_FP16;
    d.trainer.loss_scaler.init_scale = 16777216; /* 2^24: gradients of logits pass 65504 */
    d.trainer.loss_scaler.growth_interval = 3;
    cuda = on_cuda(&d);
    a = rig_open(&d);
    b = rig_open(&cuda);
    before = hash_of(b.trainer);
    CHECK_OK(b.ctx, mpt_trainer_step(b.trainer, &batch, &s));
    CHECK_OK(b.ctx, mpt_trainer_sync(b.trainer, &s));
    CHECK_EQ_INT(s.skipped, 1);
    CHECK_EQ_STR(hash_of(b.trainer).hex, before.hex); /* a skipped step changes no bit */
    rig_close(&b);
    b = rig_open(&cuda);
    train(&a, &p, 4, 24, here);
    train(&b, &p, 4, 24, there);
    for (i = 0; i < 24; i++) {
        CHECK_EQ_INT(there[i].skipped, here[i].skipped);
        CHECK_NEAR(there[i].loss_scale, here[i].loss_scale, 0);
        CHECK_EQ_INT(there[i].applied_steps, here[i].applied_steps);
        if (there[i].skipped) CHECK_NEAR(there[i].learning_rate, 0, 0);
        skipped += there[i].skipped;
    }
    CHECK(skipped > 3);
    CHECK(mpt_trainer_get_info(b.trainer).applied_steps == 24 - skipped);
    pictures_free(&p);
    rig_close(&a);
    rig_close(&b);
}

MPT_TEST(a_step_that_is_stuck_names_the_tensor) {
    rig_desc d = rig_small(small_net, 4), cuda;
    pictures p = pictures_make(&d, 4, 3);
    mpt_batch batch = pictures_batch(&p, 0, 4);
    mpt_step_report s;
    mpt_overflow o;
    mpt_result rc = MPT_OK;
    rig r;
    int i;
    d.trainer.precision = MPT_PRECISION_FP16;
    d.trainer.loss_scaler.min_scale = d.trainer.loss_scaler.init_scale = 16777216;
    d.trainer.loss_scaler.max_skips_at_min = 3;
    cuda = on_cuda(&d);
    r = rig_open(&cuda);
    for (i = 0; i < 4 && rc == MPT_OK; i++) rc = mpt_trainer_step(r.trainer, &batch, &s);
    CHECK_EQ_INT(rc, MPT_ERR_INVALID_STATE);
    CHECK_CONTAINS(mpt_last_error(r.ctx)->message, "3 steps in a row were skipped");
    CHECK_CONTAINS(mpt_last_error(r.ctx)->message, "element");
    CHECK_OK(r.ctx, mpt_trainer_autopsy(r.trainer, &batch, &o));
    CHECK_EQ_INT(o.found, 1);
    CHECK(o.largest_scale > 0 && o.largest_scale < 16777216);
    CHECK(o.values.num_inf + o.values.num_nan > 0);
    pictures_free(&p);
    rig_close(&r);
}

/* ---- what outlives a run --------------------------------------------------------------------- */
MPT_TEST(a_stopped_run_goes_on_to_the_same_hash) {
    const char *path = mpt_test_tmpfile("cuda.safetensors");
    rig_desc d = rig_small(small_net, 4), cuda;
    pictures p = pictures_make(&d, 12, 3);
    mpt_step_report s;
    hash whole;
    rig r;
    int i;
    d.trainer.precision = MPT_PRECISION_FP16;
    d.trainer.optimizer.kind = MPT_OPTIMIZER_ADAM;
    d.trainer.loss_scaler.growth_interval = 2;
    cuda = on_cuda(&d);
    r = rig_open(&cuda);
    for (i = 0; i < 8; i++) {
        mpt_batch b = pictures_batch(&p, i % 3 * 4, 4);
        CHECK_OK(r.ctx, mpt_trainer_step(r.trainer, &b, &s));
        if (i == 3) CHECK_OK(r.ctx, mpt_trainer_save(r.trainer, NULL, NULL, path));
    }
    whole = hash_of(r.trainer);
    CHECK_OK(r.ctx, mpt_trainer_load(r.trainer, NULL, NULL, path)); /* back in the same trainer */
    for (i = 4; i < 8; i++) {
        mpt_batch b = pictures_batch(&p, i % 3 * 4, 4);
        CHECK_OK(r.ctx, mpt_trainer_step(r.trainer, &b, &s));
        CHECK(s.step == 0 || s.step == i); /* no report of the steps that were thrown away */
    }
    CHECK_EQ_STR(hash_of(r.trainer).hex, whole.hex);
    rig_close(&r);
    r = rig_open(&cuda);
    CHECK_OK(r.ctx, mpt_trainer_load(r.trainer, NULL, NULL, path)); /* in a new one */
    for (i = 4; i < 8; i++) {
        mpt_batch b = pictures_batch(&p, i % 3 * 4, 4);
        CHECK_OK(r.ctx, mpt_trainer_step(r.trainer, &b, &s));
    }
    CHECK_EQ_STR(hash_of(r.trainer).hex, whole.hex);
    pictures_free(&p);
    rig_close(&r);
}

MPT_TEST(checkpoints_and_weights_go_between_machines) {
    const char *path = mpt_test_tmpfile("between.safetensors");
    rig_desc d = rig_small(small_net, 4), cuda;
    mpt_export_desc e;
    hash h;
    rig a, b;
    memset(&e, 0, sizeof e);
    e.path = path;
    d.trainer.precision = MPT_PRECISION_FP16;
    d.trainer.seed = 1;
    cuda = on_cuda(&d);
    a = rig_open(&d);
    h = hash_of(a.trainer);
    CHECK_OK(a.ctx, mpt_trainer_save(a.trainer, NULL, NULL, path));
    rig_close(&a);
    cuda.trainer.seed = 2;
    b = rig_open(&cuda);
    CHECK(strcmp(hash_of(b.trainer).hex, h.hex) != 0);
    CHECK_OK(b.ctx, mpt_trainer_load(b.trainer, NULL, NULL, path));
    CHECK_EQ_STR(hash_of(b.trainer).hex, h.hex);
    CHECK_OK(b.ctx, mpt_trainer_export(b.trainer, &e));
    rig_close(&b);
    d.trainer.seed = 3;
    a = rig_open(&d);
    CHECK_OK(a.ctx, mpt_trainer_import(a.trainer, NULL, path));
    CHECK_EQ_STR(hash_of(a.trainer).hex, h.hex);
    rig_close(&a);
}

MPT_TEST(the_first_weights_are_those_of_the_cpu) {
    rig_desc d = rig_small(small_net, 4), cuda = on_cuda(&d);
    rig a = rig_open(&d), b = rig_open(&cuda);
    CHECK_EQ_STR(hash_of(a.trainer).hex, hash_of(b.trainer).hex);
    rig_close(&a);
    rig_close(&b);
}

/* ---- evaluation and prediction --------------------------------------------------------------- */
MPT_TEST(evaluation_and_prediction_agree_with_the_cpu) {
    rig_desc d = rig_small(small_net, 4), cuda;
    float here[10 * 5], there[10 * 5];
    mpt_metrics m[2];
    pictures p = pictures_make(&d, 10, 9);
    mpt_batch batch = pictures_batch(&p, 0, 10); /* more than the trainer's batch */
    arrays data = arrays_make(&d, 10, 2);
    rig a, b;
    int i;
    d.trainer.precision = MPT_PRECISION_FP16;
    cuda = on_cuda(&d);
    a = rig_open(&d);
    b = rig_open(&cuda);
    CHECK_OK(a.ctx, mpt_predict(a.trainer, &batch, here));
    CHECK_OK(b.ctx, mpt_predict(b.trainer, &batch, there));
    for (i = 0; i < 50; i++) CHECK_NEAR(there[i], here[i], 2e-3);
    for (i = 0; i < 2; i++) {
        rig *r = i ? &b : &a;
        mpt_loader_desc ld = arrays_desc(&d, &data, 1);
        mpt_loader *loader = NULL;
        ld.last_batch = MPT_LAST_BATCH_KEEP;
        CHECK_OK(r->ctx, mpt_loader_create(r->ctx, &ld, &loader));
        CHECK_OK(r->ctx, mpt_evaluate(r->trainer, loader, &m[i]));
        mpt_loader_destroy(loader);
    }
    CHECK_EQ_INT(m[1].num_samples, 10);
    CHECK_NEAR(m[1].loss, m[0].loss, 4e-3);
    CHECK(abs((int)(m[1].num_correct - m[0].num_correct)) <= 1);
    CHECK_EQ_INT(m[1].num_correct_top5, 10);
    pictures_free(&p);
    arrays_free(&data);
    rig_close(&a);
    rig_close(&b);
}

/* ---- states ---------------------------------------------------------------------------------- */
MPT_TEST(reports_come_one_step_late_and_sync_waits) {
    rig_desc d = rig_small(plain_net, 4), cuda = on_cuda(&d);
    pictures p = pictures_make(&d, 4, 3);
    mpt_batch b = pictures_batch(&p, 0, 4);
    mpt_step_report s;
    rig r = rig_open(&cuda);
    CHECK_RESULT(r.ctx, mpt_trainer_sync(r.trainer, &s), MPT_ERR_INVALID_STATE);
    CHECK_OK(r.ctx, mpt_trainer_step(r.trainer, &b, &s));
    CHECK_EQ_INT(s.step, 0);
    CHECK_OK(r.ctx, mpt_trainer_step(r.trainer, &b, &s));
    CHECK_EQ_INT(s.step, 1);
    CHECK_EQ_INT(s.num_samples, 4);
    CHECK_OK(r.ctx, mpt_trainer_sync(r.trainer, &s));
    CHECK_EQ_INT(s.step, 2);
    CHECK_OK(r.ctx, mpt_trainer_sync(r.trainer, &s));
    CHECK_EQ_INT(s.step, 2);
    CHECK_EQ_INT(mpt_trainer_get_info(r.trainer).steps, 2);
    CHECK_RESULT(r.ctx, mpt_trainer_apply(r.trainer, &s), MPT_ERR_INVALID_STATE);
    pictures_free(&p);
    rig_close(&r);
}

/* A layer whose functions work on the device: ReLU, by kernels.cu. */
static mpt_result same_shape(const mpt_tensor *in, int n, mpt_tensor *out, size_t *params,
                             size_t *workspace, void *user) {
    (void)n;
    (void)params;
    (void)workspace;
    (void)user;
    *out = in[0];
    return MPT_OK;
}

static mpt_pointwise_args pointwise_of(const mpt_tensor *a, const mpt_tensor *b, mpt_tensor *y) {
    mpt_pointwise_args p;
    memset(&p, 0, sizeof p);
    p.a = a->data;
    p.b = b ? b->data : NULL;
    p.y = y->data;
    p.n = p.num_valid = (int)a->dims[0];
    p.per_sample = a->dims[1] * a->dims[2] * a->dims[3];
    p.dtype = MPT_F32;
    return p;
}

static mpt_result relu_there(const mpt_custom_args *a, void *user) {
    mpt_pointwise_args p = pointwise_of(&a->in[0], NULL, a->out);
    (void)user;
    return mptk_relu_forward(&p, a->stream) ? MPT_ERR_DEVICE : MPT_OK;
}

static mpt_result relu_back_there(const mpt_custom_args *a, void *user) {
    mpt_pointwise_args p = pointwise_of(a->out, a->dout, &a->din[0]);
    (void)user;
    return mptk_relu_backward(&p, a->stream) ? MPT_ERR_DEVICE : MPT_OK;
}

static int custom_on_device;

static int custom_net(mpt_model *m) {
    mpt_custom_desc c;
    int x = net_conv(m, MPT_INPUT, 6, 3, 1, 1, 1);
    memset(&c, 0, sizeof c);
    c.infer = same_shape;
    c.forward = relu_there;
    c.backward = relu_back_there;
    c.on_device = custom_on_device;
    x = mpt_custom(m, &x, 1, &c);
    return mpt_dense(m, mpt_global_avg_pool(m, x), 5);
}

static int relu_net(mpt_model *m) {
    int x = mpt_relu(m, net_conv(m, MPT_INPUT, 6, 3, 1, 1, 1));
    return mpt_dense(m, mpt_global_avg_pool(m, x), 5);
}

MPT_TEST(a_custom_layer_works_on_the_device) {
    rig_desc d = rig_small(relu_net, 4);
    hash h;
    d.trainer.precision = MPT_PRECISION_FP16;
    h = hash_of_run(&d, 4, 1);
    d.net = custom_net;
    custom_on_device = 1;
    CHECK_EQ_STR(hash_of_run(&d, 4, 1).hex, h.hex);
}

MPT_TEST(a_custom_layer_of_the_host_is_refused) {
    rig_desc d = rig_small(custom_net, 4), cuda = on_cuda(&d);
    mpt_trainer *t = NULL;
    rig r;
    custom_on_device = 0;
    memset(&r, 0, sizeof r);
    r.ctx = rig_ctx(&cuda);
    r.model = rig_model(r.ctx, &cuda);
    CHECK_RESULT(r.ctx, mpt_trainer_create(r.model, &d.trainer, 4, &t), MPT_ERR_UNSUPPORTED);
    CHECK_CONTAINS(mpt_last_error(r.ctx)->message, "custom0");
    CHECK_CONTAINS(mpt_last_error(r.ctx)->message, "on_device");
    CHECK(t == NULL);
    rig_close(&r);
}

/* ---- what only the runner can show ----------------------------------------------------------- */
#ifdef ON_CPU
static cuda_on_cpu_counters counters(void) {
    cuda_on_cpu_counters c;
    cuda_on_cpu_get_counters(&c);
    return c;
}

/* Events of reports and of staged batches are all that a step waits for, and both lie in the past
   as soon as the device keeps up. */
MPT_TEST(a_step_allocates_nothing_and_waits_for_the_step_before_alone) {
    rig_desc d = rig_small(small_net, 4), cuda;
    pictures p = pictures_make(&d, 12, 3);
    mpt_test_allocator memory;
    cuda_on_cpu_counters before, after;
    mpt_step_report s;
    rig r;
    int64_t allocs;
    int i;
    d.trainer.precision = MPT_PRECISION_FP16;
    cuda = on_cuda(&d);
    mpt_test_allocator_init(&memory, 0, 0);
    cuda.allocator = &memory.hooks;
    r = rig_open(&cuda);
    for (i = 0; i < 3; i++) {
        mpt_batch b = pictures_batch(&p, 4 * i, 4);
        CHECK_OK(r.ctx, mpt_trainer_step(r.trainer, &b, &s));
    }
    before = counters();
    allocs = memory.num_allocs;
    for (i = 0; i < 3; i++) {
        mpt_batch b = pictures_batch(&p, 4 * i, 4);
        CHECK_OK(r.ctx, mpt_trainer_step(r.trainer, &b, &s));
    }
    after = counters();
    CHECK_EQ_INT(memory.num_allocs, allocs);
    CHECK_EQ_INT(after.allocations, before.allocations);
    CHECK_EQ_INT(after.graph_launches - before.graph_launches, 3);
    CHECK_EQ_INT(after.synchronisations - before.synchronisations, 6); /* report, staged slot */
    pictures_free(&p);
    rig_close(&r);
    CHECK_NO_LEAK(&memory);
    after = counters();
    CHECK_EQ_INT(after.device_bytes + after.pinned_bytes, 0);
    CHECK_EQ_INT(after.streams + after.events + after.graphs + after.cublas_handles, 0);
}

/* What a context holds before there is a trainer. */
static size_t context_bytes(const rig_desc *d) {
    mpt_ctx *ctx = rig_ctx(d);
    size_t bytes = counters().device_bytes;
    mpt_ctx_destroy(ctx);
    return bytes;
}

MPT_TEST(the_plan_is_what_the_device_holds) {
    rig_desc d = rig_small(small_net, 4), cuda;
    size_t context, there, mirror;
    mpt_memory_plan plan;
    rig r;
    d.trainer.precision = MPT_PRECISION_FP16;
    d.trainer.optimizer.kind = MPT_OPTIMIZER_ADAM;
    d.trainer.accumulate_steps = 8;
    cuda = on_cuda(&d);
    context = context_bytes(&cuda);
    r = rig_open(&cuda);
    plan = r.trainer->plan;
    there = counters().device_bytes - context;
    mirror = r.trainer->arenas[MPTI_MIRROR]->desc.capacity_bytes;
    CHECK_EQ_INT(r.trainer->num_rows, 2); /* one running sum */
    CHECK_EQ_INT(counters().allocations > 0, 1);
    CHECK_EQ_INT(there + mirror + 2 * r.trainer->device.slot_bytes, plan.total - plan.bookkeeping);
    rig_close(&r);
}

/* A device that is too small by one byte of each arena in turn. */
MPT_TEST(a_device_that_is_too_small_names_what_did_not_fit) {
    rig_desc d = rig_small(small_net, 4), cuda = on_cuda(&d);
    size_t context = context_bytes(&cuda), whole = (size_t)1 << 30, room;
    mpt_trainer *t = NULL;
    mpt_result rc = MPT_ERR_OUT_OF_DEVICE_MEMORY;
    int failures = 0, names = 0;
    char last[512] = "";
    rig r;
    memset(&r, 0, sizeof r);
    r.ctx = rig_ctx(&cuda);
    r.model = rig_model(r.ctx, &cuda);
    for (room = 1; rc == MPT_ERR_OUT_OF_DEVICE_MEMORY && room < whole; room += room / 8 + 64) {
        cuda_on_cpu_set_memory(context + room);
        rc = mpt_trainer_create(r.model, &d.trainer, 4, &t);
        if (rc == MPT_OK) break;
        CHECK_EQ_INT(rc, MPT_ERR_OUT_OF_DEVICE_MEMORY);
        CHECK_CONTAINS(mpt_last_error(r.ctx)->message, "MB");
        CHECK(t == NULL);
        failures++;
        names += strncmp(mpt_last_error(r.ctx)->message, last, 24) != 0;
        snprintf(last, sizeof last, "%s", mpt_last_error(r.ctx)->message);
        CHECK_EQ_INT(counters().device_bytes, context); /* nothing is left behind */
    }
    CHECK_OK(r.ctx, rc);
    CHECK(failures > 5);
    CHECK(names > 3);
    cuda_on_cpu_set_memory(whole);
    r.trainer = t;
    rig_close(&r);
}

/* 1: the n-th call of a function failed while a trainer was made or trained, and all was given
   back; 0: it is called less often. Calls that give something back are left out: where they fail,
   it stays. */
static int fails_well(const rig_desc *d, const pictures *p, const char *function, int n) {
    mpt_batch b = pictures_batch(p, 0, 4);
    mpt_ctx_desc cd;
    mpt_error error;
    mpt_step_report s;
    mpt_result rc;
    int i;
    rig r;
    memset(&r, 0, sizeof r);
    memset(&cd, 0, sizeof cd);
    memset(&error, 0, sizeof error);
    cd.backend = mpt_backend_cuda();
    cd.error = &error;
    cuda_on_cpu_fail_call(function, n,
                          strncmp(function, "cublas", 6) ? (int)cudaErrorUnknown
                                                         : (int)CUBLAS_STATUS_INTERNAL_ERROR);
    rc = mpt_ctx_create(&cd, &r.ctx);
    if (rc == MPT_OK) {
        r.model = rig_model(r.ctx, d);
        rc = mpt_trainer_create(r.model, &d->trainer, 4, &r.trainer);
    }
    for (i = 0; i < 3 && rc == MPT_OK; i++) rc = mpt_trainer_step(r.trainer, &b, &s);
    if (rc == MPT_OK) rc = mpt_trainer_sync(r.trainer, &s);
    if (rc) CHECK(strlen(r.ctx ? mpt_last_error(r.ctx)->message : error.message) > 10);
    cuda_on_cpu_fail_call(NULL, 0, 0);
    rig_close(&r);
    CHECK_EQ_INT(counters().device_bytes + counters().pinned_bytes, 0);
    CHECK_EQ_INT(counters().streams + counters().events, 0);
    CHECK_EQ_INT(counters().graphs + counters().cublas_handles, 0);
    return rc != MPT_OK;
}

MPT_TEST(every_call_may_fail) {
    static const char *const functions[] = {"cudaGetDeviceCount",
                                            "cudaDeviceGetAttribute",
                                            "cudaSetDevice",
                                            "cudaMalloc",
                                            "cudaMallocHost",
                                            "cudaStreamCreateWithFlags",
                                            "cudaEventCreateWithFlags",
                                            "cudaEventRecord",
                                            "cudaEventSynchronize",
                                            "cudaStreamWaitEvent",
                                            "cudaMemcpyAsync",
                                            "cudaMemsetAsync",
                                            "cudaStreamSynchronize",
                                            "cudaStreamBeginCapture",
                                            "cudaGraphInstantiate",
                                            "cudaGraphLaunch",
                                            "cudaLaunchKernel",
                                            "cublasCreate",
                                            "cublasSetStream",
                                            "cublasSetWorkspace",
                                            "cublasGemmEx"};
    rig_desc d = rig_small(plain_net, 4), cuda;
    pictures p = pictures_make(&d, 4, 3);
    int f, n, grow = mpt_test_full() ? 1 : 4;
    d.trainer.precision = MPT_PRECISION_FP16; /* dense layers by cuBLAS */
    cuda = on_cuda(&d);
    for (f = 0; f < COUNT(functions); f++)
        for (n = 1; fails_well(&cuda, &p, functions[f], n); n += 1 + n / 8 * grow) CHECK(n < 2000);
    pictures_free(&p);
}

MPT_TEST(a_kernel_that_faults_is_an_error_with_name_and_text) {
    rig_desc d = rig_small(plain_net, 4), cuda = on_cuda(&d);
    pictures p = pictures_make(&d, 4, 3);
    mpt_batch b = pictures_batch(&p, 0, 4);
    mpt_step_report s;
    mpt_result rc;
    rig r = rig_open(&cuda);
    cuda_on_cpu_fault_kernel(5);
    rc = mpt_trainer_step(r.trainer, &b, &s);
    if (rc == MPT_OK) rc = mpt_trainer_sync(r.trainer, &s);
    CHECK_EQ_INT(rc, MPT_ERR_DEVICE);
    CHECK_CONTAINS(mpt_last_error(r.ctx)->message, "cudaErrorIllegalAddress");
    CHECK_EQ_STR(mpt_last_error(r.ctx)->native_domain, "cuda");
    CHECK_EQ_INT(mpt_last_error(r.ctx)->native_code, (int)cudaErrorIllegalAddress);
    pictures_free(&p);
    rig_close(&r);
    CHECK_EQ_INT(counters().device_bytes + counters().pinned_bytes, 0);
    CHECK_EQ_INT(counters().streams + counters().events, 0);
    CHECK_EQ_INT(counters().graphs + counters().cublas_handles, 0);
    (void)cudaDeviceReset();
}

static void open_fails(const char *part) {
    mpt_ctx_desc d;
    mpt_error e;
    mpt_ctx *ctx = NULL;
    memset(&d, 0, sizeof d);
    memset(&e, 0, sizeof e);
    d.backend = mpt_backend_cuda();
    d.error = &e;
    CHECK(mpt_ctx_create(&d, &ctx) != MPT_OK);
    CHECK(ctx == NULL);
    CHECK_CONTAINS(e.message, part);
    CHECK_EQ_INT(counters().device_bytes, 0);
}

MPT_TEST(a_wrong_device_is_told_from_a_wrong_build) {
    mpt_ctx_desc d;
    mpt_error e;
    mpt_ctx *ctx = NULL;
    cuda_on_cpu_set_kernel_error(cudaErrorNoKernelImageForDevice);
    open_fails("-gencode arch=compute_");
    cuda_on_cpu_set_kernel_error(cudaErrorInvalidDeviceFunction);
    open_fails("kernels.cu was compiled for sm");
    cuda_on_cpu_set_kernel_error(cudaSuccess);
    cuda_on_cpu_fail_call("cudaGetDeviceCount", 1, (int)cudaErrorInsufficientDriver);
    open_fails("update the driver");
    cuda_on_cpu_fail_call("cudaGetDeviceCount", 1, (int)cudaErrorNoDevice);
    open_fails("no CUDA device");
    memset(&d, 0, sizeof d);
    d.backend = mpt_backend_cuda();
    d.device = 99;
    d.error = &e;
    CHECK_RESULT(NULL, mpt_ctx_create(&d, &ctx), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(e.message, "device is 99");
}
#endif

/* ---- arguments ------------------------------------------------------------------------------- */
MPT_TEST(bad_arguments_are_refused_before_anything_is_launched) {
    rig_desc d = rig_small(plain_net, 4), cuda = on_cuda(&d);
    mpt_conv2d_args a;
    void *memory = NULL;
    rig r = rig_open(&cuda);
    const mpt_backend *ops = r.ctx->backend;
    void *self = r.ctx->backend_self;
    CHECK_OK(r.ctx, ops->alloc(self, 65536, &memory));
    memset(&a, 0, sizeof a);
    a.n = a.num_valid = 1;
    a.h = a.wd = a.p = a.q = 4;
    a.c = a.k = 8;
    a.r = a.s = a.stride = 1;
    a.dtype = MPT_F16;
    a.x = (const uint8_t *)memory + 2;
    a.w = memory;
    a.y = (uint8_t *)memory + 4096;
    CHECK_RESULT(r.ctx, ops->conv2d_fprop(self, &a), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(r.ctx)->message, "aligned to 16 bytes");
    a.x = memory;
    a.r = a.s = 3;
    a.padding = 1;
    CHECK_RESULT(r.ctx, ops->conv2d_wgrad(self, &a), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(r.ctx)->message, "workspace");
    a.n = 1 << 20;
    a.h = a.wd = a.p = a.q = 64;
    CHECK_RESULT(r.ctx, ops->conv2d_fprop(self, &a), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(r.ctx)->message, "2^31 elements");
    a.p = 5;
    CHECK_RESULT(r.ctx, ops->conv2d_fprop(self, &a), MPT_ERR_INVALID_ARGUMENT);
    ops->free(self, memory);
    rig_close(&r);
}

MPT_TEST(a_launch_that_fails_names_the_kernel_of_its_direction) {
    rig_desc d = rig_small(plain_net, 4), cuda = on_cuda(&d);
    mpt_conv2d_args a;
    rig r = rig_open(&cuda);
    mpti_cuda *c = (mpti_cuda *)r.ctx->backend_self;
    memset(&a, 0, sizeof a);
    a.n = a.num_valid = 64;
    a.h = a.wd = a.p = a.q = 56;
    a.c = 64;
    a.k = 256;
    a.r = a.s = 3;
    a.stride = a.padding = 1;
    a.dtype = MPT_F16;
    CHECK(strcmp(mptk_conv2d_fprop_kernel(&a), mptk_conv2d_dgrad_kernel(&a)) != 0);
    CHECK_RESULT(r.ctx,
                 mpti_cuda_conv2d_result(c, (int)cudaErrorUnknown, MPTI_DGRAD, "conv2d_dgrad", &a),
                 MPT_ERR_DEVICE);
    CHECK_CONTAINS(mpt_last_error(r.ctx)->message, mptk_conv2d_dgrad_kernel(&a));
    CHECK_CONTAINS(mpt_last_error(r.ctx)->message, "x (64,56,56,64), w (256,3,3,64)");
    rig_close(&r);
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(lenet_in_fp16_has_the_losses_of_the_cpu),
    MPT_TEST_CASE(resnet20_in_fp16_has_the_losses_of_the_cpu),
    MPT_TEST_CASE(every_precision_has_the_losses_of_the_cpu),
    MPT_TEST_CASE(bf16_has_the_losses_of_the_cpu),
    MPT_TEST_CASE(every_optimizer_and_schedule_is_followed),
    MPT_TEST_CASE(dropout_drops_what_the_cpu_drops),
    MPT_TEST_CASE(odd_shapes_have_the_losses_of_the_cpu),
    MPT_TEST_CASE(gradients_are_as_near_to_fp32_as_those_of_the_cpu),
    MPT_TEST_CASE(two_runs_give_the_same_bits),
    MPT_TEST_CASE(recorded_steps_give_the_bits_of_begun_ones),
    MPT_TEST_CASE(lanes_and_slices_add_up_as_on_the_cpu),
    MPT_TEST_CASE(an_overflow_skips_the_step_on_the_device),
    MPT_TEST_CASE(a_step_that_is_stuck_names_the_tensor),
    MPT_TEST_CASE(a_stopped_run_goes_on_to_the_same_hash),
    MPT_TEST_CASE(checkpoints_and_weights_go_between_machines),
    MPT_TEST_CASE(the_first_weights_are_those_of_the_cpu),
    MPT_TEST_CASE(evaluation_and_prediction_agree_with_the_cpu),
    MPT_TEST_CASE(reports_come_one_step_late_and_sync_waits),
    MPT_TEST_CASE(a_custom_layer_works_on_the_device),
    MPT_TEST_CASE(a_custom_layer_of_the_host_is_refused),
#ifdef ON_CPU
    MPT_TEST_CASE(a_step_allocates_nothing_and_waits_for_the_step_before_alone),
    MPT_TEST_CASE(the_plan_is_what_the_device_holds),
    MPT_TEST_CASE(a_device_that_is_too_small_names_what_did_not_fit),
    MPT_TEST_CASE(every_call_may_fail),
    MPT_TEST_CASE(a_kernel_that_faults_is_an_error_with_name_and_text),
    MPT_TEST_CASE(a_wrong_device_is_told_from_a_wrong_build),
#endif
    MPT_TEST_CASE(bad_arguments_are_refused_before_anything_is_launched),
    MPT_TEST_CASE(a_launch_that_fails_names_the_kernel_of_its_direction),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
