/* test_train.c - >>train: descs, initial weights, steps, lanes and slices, the same bits, the plan
   Cases O-10, O-39, O-40, O-43 (the rate of each step), O-44; skipped steps are in test_skip.c,
   gradients in test_gradients.c and test_reference.c, evaluation in test_evaluate.c */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "mpt_test.h"
#include "training.h"

/* ---- descs ----------------------------------------------------------------------------------- */
MPT_TEST(defaults_are_resolved) {
    mpt_trainer_desc d, zero;
    memset(&zero, 0, sizeof zero);
    d = mpt_trainer_desc_defaults(NULL);
    CHECK(d.precision == MPT_PRECISION_FP16 || d.precision == MPT_PRECISION_FP32);
    CHECK_EQ_INT(d.optimizer.kind, MPT_OPTIMIZER_SGD_MOMENTUM);
    CHECK_NEAR(d.optimizer.momentum, 0.9, 1e-7);
    CHECK_EQ_INT(d.accumulate_steps, 1);
    CHECK_EQ_INT(d.slices, 1);
    CHECK_NEAR(d.label_smoothing, 0, 0);
    CHECK_EQ_INT(d.keep_batchnorm_fp32, MPT_YES);
    zero.precision = MPT_PRECISION_FP32;
    d = mpt_trainer_desc_defaults(&zero);
    CHECK_EQ_INT(d.loss_scaler.mode, MPT_LOSS_SCALE_NONE);
    CHECK_EQ_INT(d.master_weights, MPT_NO);
    zero.precision = MPT_PRECISION_FP16;
    d = mpt_trainer_desc_defaults(&zero);
    CHECK_EQ_INT(d.loss_scaler.mode, MPT_LOSS_SCALE_DYNAMIC);
    CHECK_NEAR(d.loss_scaler.init_scale, 65536, 0);
    CHECK_EQ_INT(d.master_weights, MPT_YES);
    zero.precision = MPT_PRECISION_BF16;
    CHECK_EQ_INT(mpt_trainer_desc_defaults(&zero).loss_scaler.mode, MPT_LOSS_SCALE_NONE);
    zero.precision = MPT_PRECISION_FP16_PURE;
    d = mpt_trainer_desc_defaults(&zero);
    CHECK_EQ_INT(d.loss_scaler.mode, MPT_LOSS_SCALE_NONE);
    CHECK_EQ_INT(d.master_weights, MPT_NO);
    CHECK_EQ_INT(d.keep_batchnorm_fp32, MPT_NO);
    zero.precision = MPT_PRECISION_FP16_CAST;
    CHECK_EQ_INT(mpt_trainer_desc_defaults(&zero).loss_scaler.mode, MPT_LOSS_SCALE_DYNAMIC);
}

/* One field is wrong; the message names it. */
static void check_refused(const rig_desc *d, const char *names) {
    mpt_ctx *ctx = rig_ctx(d);
    mpt_model *m = rig_model(ctx, d);
    mpt_trainer *t = NULL;
    mpt_memory_plan plan;
    CHECK_RESULT(ctx, mpt_trainer_create(m, &d->trainer, d->batch_size, &t),
                 MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, names);
    CHECK(t == NULL);
    CHECK_RESULT(ctx, mpt_model_plan(m, &d->trainer, d->batch_size, &plan),
                 MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, names);
    mpt_model_destroy(m);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(wrong_descs_are_refused_by_field) {
    const rig_desc good = rig_small(small_net, 6);
    rig_desc d;
#define REFUSED(field, value, names) \
    do { \
        d = good; \
        d.field = value; \
        check_refused(&d, names); \
    } while (0)
    REFUSED(batch_size, 0, "batch_size");
    REFUSED(batch_size, (1 << 20) + 1, "batch_size");
    REFUSED(trainer.slices, 4, "slices");
    REFUSED(trainer.slices, -1, "slices");
    REFUSED(trainer.accumulate_steps, -1, "accumulate_steps");
    REFUSED(trainer.accumulate_steps, 65537, "accumulate_steps");
    REFUSED(trainer.label_smoothing, 1, "label_smoothing");
    REFUSED(trainer.label_smoothing, -0.1f, "label_smoothing");
    REFUSED(trainer.label_smoothing, mpti_f32_from_bits(0x7fc00000), "label_smoothing");
    REFUSED(trainer.precision, (mpt_precision)9, "precision");
    REFUSED(trainer.optimizer.learning_rate, 0, "learning_rate");
    REFUSED(trainer.optimizer.momentum, 1, "momentum");
    REFUSED(trainer.optimizer.weight_decay, -1, "weight_decay");
    REFUSED(trainer.schedule.kind, MPT_SCHEDULE_COSINE, "total_steps");
    REFUSED(trainer.loss_scaler.growth_factor, 0.5f, "growth_factor");
    REFUSED(trainer.master_weights, MPT_YES, "master_weights");
    REFUSED(trainer.keep_batchnorm_fp32, MPT_NO, "keep_batchnorm_fp32");
    REFUSED(trainer.master_weights, (mpt_switch)5, "master_weights");
#undef REFUSED
    d = good;
    d.trainer.precision = MPT_PRECISION_FP16;
    d.trainer.keep_batchnorm_fp32 = MPT_NO;
    check_refused(&d, "keep_batchnorm_fp32");
}

MPT_TEST(info_tells_what_runs) {
    static const char *const families[] = {"definition", "plain", "avx2"};
    int i;
    for (i = 0; i < COUNT(families); i++) {
        rig_desc d = rig_small(small_net, 4);
        pictures p = pictures_make(&d, 4, 1);
        mpt_batch b = pictures_batch(&p, 0, 4);
        mpt_trainer_info info;
        rig r;
        d.family = families[i];
        d.trainer.precision = MPT_PRECISION_FP16;
        d.trainer.loss_scaler.init_scale = 32;
        r = rig_open(&d);
        if (r.trainer) {
            step_of(r.trainer, &b);
            p.x[0] = mpti_f32_from_bits(0x7fc00000);
            step_of(r.trainer, &b);
            info = mpt_trainer_get_info(r.trainer);
            CHECK(info.steps == 2 && info.applied_steps == 1 && info.loss_scale == 16);
            CHECK_EQ_STR(info.backend, "cpu");
            CHECK_EQ_STR(info.kernels, families[i]);
            rig_close(&r);
        }
        pictures_free(&p);
    }
}

/* One number a picture, one class, one record. */
static int smallest_net(mpt_model *m) {
    return mpt_dense(m, mpt_batchnorm(m, MPT_INPUT, NULL), 1);
}

MPT_TEST(the_smallest_of_everything) {
    int precision;
    for (precision = MPT_PRECISION_FP32; precision <= MPT_PRECISION_BF16; precision++) {
        rig_desc d = rig_small(smallest_net, 1);
        pictures p;
        mpt_batch b;
        mpt_step_report report;
        rig r;
        d.height = d.width = d.channels = d.classes = 1;
        d.trainer.precision = (mpt_precision)precision;
        p = pictures_make(&d, 1, 1);
        b = pictures_batch(&p, 0, 1);
        r = rig_open(&d);
        report = step_of(r.trainer, &b);
        CHECK(!report.skipped && report.loss == 0 && report.grad_norm == 0);
        CHECK(report.num_correct == 1 && report.num_correct_top5 == 1);
        rig_close(&r);
        pictures_free(&p);
    }
}

/* ---- initial weights ------------------------------------------------------------------------- */
static int wide_net(mpt_model *m) {
    mpt_batchnorm_desc zero_gamma = {0, 0, 1};
    int x = net_conv(m, MPT_INPUT, 64, 3, 1, 1, 1);
    x = mpt_batchnorm(m, mpt_batchnorm(m, x, NULL), &zero_gamma);
    return mpt_dense(m, x, 5);
}

static void moments(const float *x, int64_t n, double *mean, double *deviation, double *largest) {
    double sum = 0, squares = 0;
    int64_t i;
    *largest = 0;
    for (i = 0; i < n; i++) {
        sum += x[i];
        squares += (double)x[i] * x[i];
        *largest = fmax(*largest, fabs(x[i]));
    }
    *mean = sum / (double)n;
    *deviation = sqrt(squares / (double)n - *mean * *mean);
}

/* Within five standard errors. */
MPT_TEST(initial_weights_have_the_promised_distributions) {
    rig_desc d = rig_small(wide_net, 2);
    rig r = rig_open(&d);
    const mpti_node *nodes = r.model->nodes;
    const float *w = r.trainer->masters;
    double mean, deviation, largest, expected = sqrt(2.0 / (64 * 9));
    int64_t n = 64 * 27, i;
    moments(w, n, &mean, &deviation, &largest);
    CHECK_NEAR(mean, 0, 5 * expected / sqrt((double)n));
    CHECK_NEAR(deviation, expected, 5 * expected / sqrt(2.0 * (double)n));
    CHECK(largest > 2.5 * expected && largest < 6 * expected); /* a normal has tails */
    for (i = n; i < n + 64; i++) CHECK_NEAR(w[i], 0, 0);
    for (i = 0; i < 128; i++) {
        CHECK_NEAR(w[nodes[2].param_offset + i], i < 64 ? 1 : 0, 0);
        CHECK_NEAR(w[nodes[3].param_offset + i], 0, 0);
        CHECK_NEAR(r.trainer->running[nodes[2].stat_offset + i], i < 64 ? 0 : 1, 0);
    }
    w += nodes[4].param_offset;
    n = nodes[4].num_params;
    expected = 1 / sqrt(64.0 * 64);
    moments(w, n, &mean, &deviation, &largest);
    CHECK(largest <= expected && largest > 0.99 * expected);
    CHECK_NEAR(mean, 0, 5 * expected / sqrt(3.0 * (double)n));
    CHECK_NEAR(deviation, expected / sqrt(3.0), 5 * expected / sqrt((double)n));
    rig_close(&r);
}

MPT_TEST(seeds_decide_initial_weights) {
    rig_desc d = rig_small(small_net, 2);
    hash first, again, other;
    rig r = rig_open(&d);
    first = hash_of(r.trainer);
    rig_close(&r);
    d.batch_size = 16;
    d.threads = 1;
    d.trainer.precision = MPT_PRECISION_FP16;
    r = rig_open(&d);
    again = hash_of(r.trainer);
    rig_close(&r);
    CHECK_EQ_STR(again.hex, first.hex);
    d.trainer.seed = 1;
    r = rig_open(&d);
    other = hash_of(r.trainer);
    rig_close(&r);
    CHECK(strcmp(other.hex, first.hex));
}

/* The bytes that are hashed, put together by hand. */
MPT_TEST(hash_is_of_parameters_then_statistics) {
    rig_desc d = rig_small(small_net, 2);
    rig r = rig_open(&d);
    const mpt_model *m = r.model;
    size_t n = (size_t)(m->num_params + m->num_stats), i, at = 0;
    unsigned char *bytes = (unsigned char *)malloc(4 * n);
    mpti_sha256 s;
    hash got = hash_of(r.trainer), expected;
    for (i = 0; i < (size_t)m->num_params; i++, at += 4)
        mpti_store_u32(bytes + at, mpti_f32_bits(r.trainer->masters[i]));
    for (i = 0; i < (size_t)m->num_stats; i++, at += 4)
        mpti_store_u32(bytes + at, mpti_f32_bits(r.trainer->running[i]));
    mpti_sha256_init(&s);
    mpti_sha256_add(&s, bytes, 4 * n);
    mpti_sha256_finish(&s, expected.hex);
    CHECK_EQ_STR(got.hex, expected.hex);
    free(bytes);
    rig_close(&r);
}

/* ---- batches that don't fit ------------------------------------------------------------------ */
static void check_batch_refused(rig *r, const mpt_batch *b, mpt_result expected, const char *says) {
    snapshot before = snapshot_take(r->trainer);
    mpt_step_report report;
    CHECK_RESULT(r->ctx, mpt_trainer_step(r->trainer, b, &report), expected);
    CHECK_CONTAINS(mpt_last_error(r->ctx)->message, says);
    CHECK_EQ_INT(mpt_trainer_get_info(r->trainer).steps, 0);
    snapshot_check(&before, r->trainer);
}

MPT_TEST(batches_that_do_not_fit_are_refused) {
    rig_desc d = rig_small(small_net, 4);
    rig r = rig_open(&d);
    pictures p = pictures_make(&d, 8, 1);
    int32_t valid[2] = {4, 5};
    mpt_batch b = pictures_batch(&p, 0, 4);
    b.images.dims[1] = 9;
    check_batch_refused(&r, &b, MPT_ERR_INVALID_ARGUMENT, "(9,8,3)");
    b = pictures_batch(&p, 0, 5);
    check_batch_refused(&r, &b, MPT_ERR_INVALID_ARGUMENT, "5 records a lane");
    b = pictures_lanes(&p, 0, 2, 4, NULL);
    check_batch_refused(&r, &b, MPT_ERR_INVALID_STATE, "accumulate_steps = 1");
    b.num_lanes = 3;
    check_batch_refused(&r, &b, MPT_ERR_INVALID_ARGUMENT, "num_lanes");
    b = pictures_lanes(&p, 0, 2, 4, NULL);
    b.lane_valid = valid;
    check_batch_refused(&r, &b, MPT_ERR_INVALID_ARGUMENT, "lane_valid[1]");
    b = pictures_batch(&p, 0, 4);
    b.images.dtype = MPT_I32;
    check_batch_refused(&r, &b, MPT_ERR_INVALID_ARGUMENT, "U8, F32 or F16");
    b = pictures_batch(&p, 0, 4);
    b.labels.dtype = MPT_I64;
    check_batch_refused(&r, &b, MPT_ERR_INVALID_ARGUMENT, "I32");
    b = pictures_batch(&p, 0, 4);
    b.labels.dims[0] = 3;
    check_batch_refused(&r, &b, MPT_ERR_INVALID_ARGUMENT, "labels");
    b = pictures_batch(&p, 0, 4);
    b.num_valid = 3;
    check_batch_refused(&r, &b, MPT_ERR_INVALID_ARGUMENT, "set lane_valid");
    b = pictures_batch(&p, 0, 4);
    b.images.data = NULL;
    check_batch_refused(&r, &b, MPT_ERR_INVALID_ARGUMENT, "images");
    pictures_free(&p);
    rig_close(&r);
}

/* O-10. A label that no class has is refused before the loss, by label, record and classes; where a
   slot doesn't count it is not looked at. */
MPT_TEST(labels_outside_of_the_classes_are_refused) {
    static const int32_t wrong[] = {5, -1, INT32_MAX, INT32_MIN};
    rig_desc d = rig_small(small_net, 4);
    rig r = rig_open(&d);
    pictures p = pictures_make(&d, 4, 1);
    mpt_batch b = pictures_batch(&p, 0, 4);
    const int32_t right = p.labels[2], valid = 2;
    char label[32];
    int i;
    for (i = 0; i < COUNT(wrong); i++) {
        p.labels[2] = wrong[i];
        snprintf(label, sizeof label, "label %d of record 2", (int)wrong[i]);
        check_batch_refused(&r, &b, MPT_ERR_INVALID_ARGUMENT, label);
        CHECK_CONTAINS(mpt_last_error(r.ctx)->message, "0 .. 4");
    }
    b.lane_valid = &valid;
    step_of(r.trainer, &b);
    p.labels[2] = right;
    b.lane_valid = NULL;
    step_of(r.trainer, &b);
    pictures_free(&p);
    rig_close(&r);
}

MPT_TEST(a_step_of_nothing_is_refused) {
    rig_desc d = rig_small(small_net, 4);
    rig r = rig_open(&d);
    pictures p = pictures_make(&d, 4, 1);
    const int32_t none = 0;
    mpt_batch b = pictures_lanes(&p, 0, 1, 4, &none);
    mpt_step_report report;
    CHECK_RESULT(r.ctx, mpt_trainer_apply(r.trainer, &report), MPT_ERR_INVALID_STATE);
    CHECK_CONTAINS(mpt_last_error(r.ctx)->message, "no record");
    check_batch_refused(&r, &b, MPT_ERR_INVALID_STATE, "no record");
    b = pictures_batch(&p, 0, 4);
    CHECK_OK(r.ctx, mpt_trainer_step(r.trainer, &b, &report)); /* and goes on */
    CHECK_EQ_INT(report.step, 1);
    CHECK_EQ_INT(mpt_trainer_step(NULL, &b, &report), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_trainer_step(r.trainer, NULL, &report), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_trainer_step(r.trainer, &b, NULL), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_trainer_get_info(NULL).steps, 0);
    mpt_trainer_destroy(NULL);
    pictures_free(&p);
    rig_close(&r);
}

/* ---- what a step reports --------------------------------------------------------------------- */
MPT_TEST(reports_tell_what_happened) {
    rig_desc d = rig_small(small_net, 4);
    rig r;
    pictures p = pictures_make(&d, 8, 1);
    int32_t valid[2] = {4, 1};
    mpt_batch b = pictures_lanes(&p, 0, 2, 4, valid);
    mpt_step_report report, again;
    float probabilities[5 * 4];
    int i, k, correct = 0;
    d.trainer.accumulate_steps = 2;
    d.trainer.schedule.warmup_steps = 3;
    d.trainer.optimizer.learning_rate = 0.4f;
    r = rig_open(&d);
    CHECK_RESULT(r.ctx, mpt_trainer_sync(r.trainer, &again), MPT_ERR_INVALID_STATE);
    for (i = 1; i <= 4; i++) {
        report = step_of(r.trainer, &b);
        CHECK_EQ_INT(report.step, i);
        CHECK_EQ_INT(report.applied_steps, i);
        CHECK_EQ_INT(report.num_samples, 5);
        CHECK_EQ_INT(report.num_correct_top5, 5); /* of five classes */
        CHECK(report.num_correct >= 0 && report.num_correct <= 5);
        CHECK_NEAR(report.learning_rate, 0.1 * i, 1e-6); /* O-43: warm-up ends at the full rate */
        CHECK_NEAR(report.loss_scale, 1, 0);
        CHECK(report.grad_norm > 0 && report.seconds >= 0 && !report.skipped);
        CHECK_EQ_INT(mpt_trainer_get_info(r.trainer).steps, i);
        CHECK_OK(r.ctx, mpt_trainer_sync(r.trainer, &again));
        CHECK_EQ_MEM(&again, &report, sizeof report);
    }
    for (i = 0; i < 200; i++) report = step_of(r.trainer, &b);
    CHECK_EQ_INT(report.num_correct, 5); /* learned by heart */
    CHECK_OK(r.ctx, mpt_predict(r.trainer, &b, probabilities));
    for (i = 0; i < 4; i++) {
        double sum = 0;
        for (k = 0; k < 5; k++) sum += probabilities[5 * i + k];
        CHECK_NEAR(sum, 1, 1e-6);
        correct += probabilities[5 * i + p.labels[i]] > 0.5f;
    }
    CHECK(correct >= 3); /* with running statistics, which differ a little */
    pictures_free(&p);
    rig_close(&r);
}

/* ---- learning by heart ----------------------------------------------------------------------- */
static int learning_net(mpt_model *m) {
    int x = mpt_relu(m, mpt_batchnorm(m, net_conv(m, MPT_INPUT, 16, 3, 1, 1, 0), NULL));
    x = mpt_relu(m,
                 mpt_batchnorm(m, net_conv(m, mpt_max_pool(m, x, 2, 2, 0), 16, 3, 1, 1, 0), NULL));
    return mpt_dense(m, mpt_relu(m, mpt_dense(m, x, 32)), 5);
}

static void check_learns(mpt_precision precision, mpt_switch masters) {
    rig_desc d = rig_small(learning_net, 32);
    pictures p = pictures_make(&d, 32, 1);
    mpt_batch b = pictures_batch(&p, 0, 32);
    mpt_step_report report;
    rig r;
    int i;
    d.trainer.precision = precision;
    d.trainer.master_weights = masters;
    d.trainer.optimizer.learning_rate = 0.1f;
    r = rig_open(&d);
    for (i = 0; i < 100; i++) report = step_of(r.trainer, &b);
    if (!(report.loss < 0.01))
        mpt_test_fail(__FILE__, __LINE__, "precision %d: loss %g after %d steps", (int)precision,
                      report.loss, i);
    CHECK_EQ_INT(report.num_correct, 32);
    pictures_free(&p);
    rig_close(&r);
}

MPT_TEST(random_pictures_are_learned_by_heart_in_every_precision) {
    check_learns(MPT_PRECISION_FP32, MPT_BY_DEFAULT);
    check_learns(MPT_PRECISION_FP16, MPT_BY_DEFAULT);
    check_learns(MPT_PRECISION_BF16, MPT_BY_DEFAULT);
    check_learns(MPT_PRECISION_FP16_CAST, MPT_BY_DEFAULT);
    check_learns(MPT_PRECISION_FP16_PURE, MPT_BY_DEFAULT);
    check_learns(MPT_PRECISION_FP16, MPT_NO);
    check_learns(MPT_PRECISION_BF16, MPT_NO);
}

/* ---- lanes and slices: O-44 ------------------------------------------------------------------ */

/* Weights after `steps` steps on the first 32 pictures, in lanes of batch_size. */
static rig train_cut(rig_desc d, const pictures *p, int batch_size, int slices, int steps,
                     mpt_step_report *report) {
    int lanes = 32 / batch_size, i;
    mpt_batch b = pictures_lanes(p, 0, lanes, batch_size, NULL);
    rig r;
    d.batch_size = batch_size;
    d.trainer.slices = slices;
    d.trainer.accumulate_steps = lanes;
    r = rig_open(&d);
    for (i = 0; i < steps; i++) *report = step_of(r.trainer, &b);
    return r;
}

static void check_weights_near(const rig *a, const rig *b, double tolerance) {
    int64_t i;
    for (i = 0; i < a->model->num_params; i++)
        CHECK_NEAR(a->trainer->masters[i], b->trainer->masters[i], tolerance);
}

/* Clipping acts on the total: its limit is below the norm of each lane and of their mean. */
MPT_TEST(a_step_drops_no_lanes_that_were_accumulated) {
    rig_desc d = rig_small(small_net, 4);
    pictures p = pictures_make(&d, 4, 1);
    mpt_batch b = pictures_batch(&p, 0, 4);
    rig r = rig_open(&d);
    mpt_step_report report;
    CHECK_OK(r.ctx, mpt_trainer_accumulate(r.trainer, &b));
    CHECK_RESULT(r.ctx, mpt_trainer_step(r.trainer, &b, &report), MPT_ERR_INVALID_STATE);
    CHECK_CONTAINS(mpt_last_error(r.ctx)->message, "mpt_trainer_apply");
    CHECK_OK(r.ctx, mpt_trainer_apply(r.trainer, &report));
    CHECK_EQ_INT(report.num_samples, 4);
    CHECK_OK(r.ctx, mpt_trainer_step(r.trainer, &b, &report));
    rig_close(&r);
    pictures_free(&p);
}

MPT_TEST(accumulation_is_one_large_batch) {
    static const int cuts[][2] = {{8, 1}, {4, 1}, {32, 4}, {32, 32}, {16, 2}, {1, 1}};
    rig_desc d = rig_small(plain_net, 32);
    pictures p = pictures_make(&d, 32, 1);
    mpt_step_report whole_report, report;
    rig whole, cut;
    int i;
    d.trainer.optimizer.max_grad_norm = 0.05f;
    whole = train_cut(d, &p, 32, 1, 3, &whole_report);
    CHECK(whole_report.grad_norm > 0.05f);
    for (i = 0; i < COUNT(cuts); i++) {
        cut = train_cut(d, &p, cuts[i][0], cuts[i][1], 3, &report);
        CHECK_NEAR(report.loss, whole_report.loss, 1e-6);
        CHECK_NEAR(report.grad_norm, whole_report.grad_norm, 1e-5 * whole_report.grad_norm);
        CHECK_EQ_INT(report.num_samples, 32);
        CHECK_EQ_INT(report.num_correct, whole_report.num_correct);
        check_weights_near(&cut, &whole, 1e-6);
        rig_close(&cut);
    }
    rig_close(&whole);
    pictures_free(&p);
}

/* Lanes that aren't full, and four lanes of 32: the mean is over the records that are there. */
MPT_TEST(a_partial_window_divides_by_its_true_count) {
    static const int32_t valid[4] = {8, 3, 0, 1};
    rig_desc d = rig_small(plain_net, 12), w;
    pictures p = pictures_make(&d, 32, 1), together = pictures_make(&d, 12, 1);
    const size_t picture = 8 * 8 * 3;
    mpt_batch b = pictures_lanes(&p, 0, 4, 8, valid), whole = pictures_batch(&together, 0, 12);
    mpt_step_report report;
    rig r, of_whole;
    int lane, n = 0;
    for (lane = 0; lane < 4; n += valid[lane++]) {
        memcpy(together.x + n * picture, p.x + 8 * lane * picture,
               (size_t)valid[lane] * picture * sizeof(float));
        memcpy(together.labels + n, p.labels + 8 * lane, (size_t)valid[lane] * sizeof(int32_t));
    }
    of_whole = rig_open(&d);
    step_of(of_whole.trainer, &whole);
    w = d;
    w.batch_size = 8;
    w.trainer.accumulate_steps = 4;
    r = rig_open(&w);
    report = step_of(r.trainer, &b);
    CHECK_EQ_INT(report.num_samples, 12);
    check_weights_near(&r, &of_whole, 1e-6);
    rig_close(&r);
    w.trainer.accumulate_steps = 32; /* of which four come */
    w.trainer.slices = 4;
    r = rig_open(&w);
    report = step_of(r.trainer, &b);
    CHECK_EQ_INT(report.num_samples, 12);
    check_weights_near(&r, &of_whole, 1e-6);
    rig_close(&r);
    rig_close(&of_whole);
    pictures_free(&together);
    pictures_free(&p);
}

/* A lane without records adds nothing, not even to the rounding: the divisor is a power of two. */
MPT_TEST(a_lane_without_records_changes_no_bit) {
    static const int32_t valid[2][2] = {{4, 0}, {0, 4}};
    static const mpt_precision precisions[] = {MPT_PRECISION_FP32, MPT_PRECISION_FP16,
                                               MPT_PRECISION_BF16};
    int i, k, step;
    for (i = 0; i < 2 * COUNT(precisions); i++) {
        rig_desc d = rig_small(small_net, 4);
        pictures p = pictures_make(&d, 8, 1);
        rig one, two;
        hash a, b;
        k = i % 2;
        d.trainer.precision = precisions[i / 2];
        d.trainer.loss_scaler.init_scale = 64;
        one = rig_open(&d);
        d.trainer.accumulate_steps = 2;
        d.trainer.loss_scaler.init_scale =
            128; /* the trainer divides it by twice as many records */
        two = rig_open(&d);
        memset(p.x + (k ? 0 : 4 * 192), 0xff, 4 * 192 * sizeof(float)); /* nobody looks there */
        for (step = 0; step < 3; step++) {
            mpt_batch full = pictures_batch(&p, k ? 4 : 0, 4);
            mpt_batch half = pictures_lanes(&p, 0, 2, 4, valid[k]);
            mpt_step_report ra = step_of(one.trainer, &full), rb = step_of(two.trainer, &half);
            CHECK_EQ_INT(rb.num_samples, 4);
            CHECK(ra.loss == rb.loss && !ra.skipped && !rb.skipped);
        }
        a = hash_of(one.trainer);
        b = hash_of(two.trainer);
        CHECK_EQ_STR(a.hex, b.hex);
        rig_close(&one);
        rig_close(&two);
        pictures_free(&p);
    }
}

/* Statistics of lanes of 4 and 2 records: running = 0.9 before + 0.1 (4 a + 2 b) / 6, with a and b
   from steps on these records alone. */
MPT_TEST(batch_norm_statistics_are_weighted_by_records) {
    static const int32_t valid[2] = {4, 2};
    rig_desc d = rig_small(small_net, 4);
    pictures p = pictures_make(&d, 8, 1);
    mpt_batch b = pictures_lanes(&p, 0, 2, 4, valid);
    rig both, alone[2];
    int64_t i;
    int k;
    for (k = 0; k < 2; k++) {
        mpt_batch lane = pictures_batch(&p, 4 * k, valid[k]);
        d.batch_size = valid[k];
        alone[k] = rig_open(&d);
        step_of(alone[k].trainer, &lane);
    }
    d.batch_size = 4;
    d.trainer.accumulate_steps = 2;
    both = rig_open(&d);
    step_of(both.trainer, &b);
    for (i = 0; i < both.model->num_stats; i++)
        CHECK_NEAR(both.trainer->running[i],
                   (4 * (double)alone[0].trainer->running[i] +
                    2 * (double)alone[1].trainer->running[i]) /
                       6,
                   1e-6);
    for (k = 0; k < 2; k++) rig_close(&alone[k]);
    rig_close(&both);
    pictures_free(&p);
}

/* O-40, through a step: [0,2,4,6], momentum 0.1: mean 0.3, variance 0.9 + 0.1 * 20/3. */
static int batchnorm_alone(mpt_model *m) {
    return mpt_dense(m, mpt_batchnorm(m, MPT_INPUT, NULL), 2);
}

MPT_TEST(running_variance_is_unbiased) {
    static const double expected[4] = {-1.341639, -0.447213, 0.447213, 1.341639};
    rig_desc d = rig_small(batchnorm_alone, 4);
    mpt_step_report report;
    pictures p;
    mpt_batch b;
    rig r;
    int i;
    d.height = d.width = d.channels = 1;
    d.classes = 2;
    p = pictures_make(&d, 4, 1);
    for (i = 0; i < 4; i++) p.x[i] = 2.0f * (float)i;
    b = pictures_batch(&p, 0, 4);
    r = rig_open(&d);
    CHECK_OK(r.ctx, mpt_trainer_accumulate(r.trainer, &b));
    for (i = 0; i < 4; i++)
        CHECK_NEAR(((float *)mpti_net_value(&r.trainer->net, 1))[i], expected[i], 1e-6);
    CHECK_OK(r.ctx, mpt_trainer_apply(r.trainer, &report));
    CHECK_NEAR(r.trainer->running[0], 0.3, 1e-6);
    CHECK_NEAR(r.trainer->running[1], 1.566667, 1e-6);
    rig_close(&r);
    pictures_free(&p);
}

/* O-39. Nine records in batches of four: the last holds one, on maps of 1 x 1. */
static int norm_of_dense(mpt_model *m) {
    return mpt_dense(m, mpt_relu(m, mpt_batchnorm(m, mpt_dense(m, MPT_INPUT, 8), NULL)), 5);
}

MPT_TEST(a_last_batch_of_one_record_stays_finite) {
    static const mpt_precision precisions[] = {MPT_PRECISION_FP32, MPT_PRECISION_FP16};
    int i, step;
    int64_t k;
    for (i = 0; i < 2; i++) {
        rig_desc d = rig_small(norm_of_dense, 4);
        arrays a = arrays_make(&d, 9, 1);
        int ones = 0;
        mpt_loader *loader;
        rig r;
        d.trainer.precision = precisions[i];
        d.trainer.loss_scaler.init_scale = 64;
        r = rig_open(&d);
        loader = arrays_open(r.ctx, &d, &a, 1);
        for (step = 0; step < 30; step++) {
            mpt_batch b = arrays_next(r.ctx, loader);
            mpt_step_report report = step_of(r.trainer, &b);
            CHECK(!report.skipped);
            ones += report.num_samples == 1;
        }
        CHECK_EQ_INT(ones, 10);
        for (k = 0; k < r.model->num_params; k++) CHECK(mpti_is_finite(r.trainer->masters[k]));
        for (k = 0; k < r.model->num_stats; k++) CHECK(mpti_is_finite(r.trainer->running[k]));
        mpt_loader_destroy(loader);
        rig_close(&r);
        arrays_free(&a);
    }
}

/* ---- the same bits --------------------------------------------------------------------------- */
static hash train_threads(rig_desc d, const pictures *p, int threads) {
    mpt_batch b = pictures_lanes(p, 0, d.trainer.accumulate_steps, d.batch_size, NULL);
    rig r;
    hash h;
    int i;
    d.threads = threads;
    r = rig_open(&d);
    for (i = 0; i < 3; i++) step_of(r.trainer, &b);
    h = hash_of(r.trainer);
    rig_close(&r);
    return h;
}

MPT_TEST(threads_change_no_bit) {
    static const int threads[] = {2, 5, 16};
    static const mpt_precision precisions[] = {MPT_PRECISION_FP32, MPT_PRECISION_FP16,
                                               MPT_PRECISION_BF16, MPT_PRECISION_FP16_CAST};
    int i, k, zoo;
    for (zoo = 0; zoo < 2; zoo++)
        for (i = 0; i < COUNT(precisions); i++) {
            rig_desc d = zoo ? rig_zoo("resnet20", 16, 3, 3) : rig_small(small_net, 5);
            pictures p;
            hash one, many;
            d.trainer.accumulate_steps = 3;
            d.trainer.precision = precisions[i];
            d.trainer.loss_scaler.init_scale = 1024;
            p = pictures_make(&d, 15, 1);
            one = train_threads(d, &p, 1);
            for (k = 0; k < COUNT(threads); k++) {
                many = train_threads(d, &p, threads[k]);
                CHECK_EQ_STR(many.hex, one.hex);
            }
            pictures_free(&p);
        }
}

/* Seven lanes in one batch, each by itself, and two batches of four and three. */
MPT_TEST(lanes_together_or_one_at_a_time_give_the_same_bits) {
    static const int cuts[][7] = {{7}, {1, 1, 1, 1, 1, 1, 1}, {4, 3}, {2, 5}};
    static const int32_t valid[7] = {4, 4, 2, 0, 4, 1, 4};
    rig_desc d = rig_small(small_net, 4);
    pictures p = pictures_make(&d, 28, 1);
    hash first = {""}, h;
    int i, k, step, at;
    d.trainer.accumulate_steps = 7;
    for (i = 0; i < COUNT(cuts); i++) {
        rig r = rig_open(&d);
        mpt_step_report report;
        for (step = 0; step < 3; step++) {
            for (at = k = 0; at < 7; at += cuts[i][k++]) {
                mpt_batch b = pictures_lanes(&p, 4 * at, cuts[i][k], 4, valid + at);
                if (i == 0) break;
                CHECK_OK(r.ctx, mpt_trainer_accumulate(r.trainer, &b));
            }
            if (i == 0) {
                mpt_batch b = pictures_lanes(&p, 0, 7, 4, valid);
                report = step_of(r.trainer, &b);
            } else {
                CHECK_OK(r.ctx, mpt_trainer_apply(r.trainer, &report));
            }
            CHECK_EQ_INT(report.num_samples, 19);
        }
        h = hash_of(r.trainer);
        if (i == 0) first = h;
        CHECK_EQ_STR(h.hex, first.hex);
        rig_close(&r);
    }
    pictures_free(&p);
}

/* The sum is a binary tree of the count alone: two trainers with two lanes each, added by hand, are
   one trainer with four. This is what lets ranks share the work. */
MPT_TEST(rows_meet_in_a_fixed_tree) {
    rig_desc d = rig_small(small_net, 4);
    pictures p = pictures_make(&d, 16, 1);
    rig whole, half[2];
    const float *sum, *parts[2];
    int64_t i;
    int k;
    mpt_batch b = pictures_lanes(&p, 0, 4, 4, NULL);
    d.trainer.accumulate_steps = 4;
    whole = rig_open(&d);
    CHECK_OK(whole.ctx, mpt_trainer_accumulate(whole.trainer, &b));
    sum = gradient_row(whole.trainer);
    for (k = 0; k < 2; k++) {
        b = pictures_lanes(&p, 8 * k, 2, 4, NULL);
        half[k] = rig_open(&d);
        CHECK_OK(half[k].ctx, mpt_trainer_accumulate(half[k].trainer, &b));
        parts[k] = gradient_row(half[k].trainer);
    }
    for (i = 0; i < whole.model->num_params + whole.model->num_stats; i++)
        CHECK_EQ_INT(mpti_f32_bits(sum[i]), mpti_f32_bits(parts[0][i] + parts[1][i]));
    for (k = 0; k < 2; k++) rig_close(&half[k]);
    rig_close(&whole);
    pictures_free(&p);
}

/* U8 pictures count as x / 255, FP16 and FP32 ones as they are. */
MPT_TEST(pictures_of_every_type) {
    rig_desc d = rig_small(small_net, 4);
    arrays a = arrays_make(&d, 4, 1);
    pictures p = pictures_make(&d, 4, 1);
    const size_t n = 4 * 192;
    uint16_t *half = (uint16_t *)malloc(n * sizeof *half);
    mpt_batch b;
    mpt_step_report from_u8, from_f32, from_f16;
    size_t i;
    rig r[3];
    int k;
    for (k = 0; k < 3; k++) r[k] = rig_open(&d);
    memcpy(p.labels, a.labels.data, 4 * sizeof(int32_t));
    for (i = 0; i < n; i++) {
        p.x[i] = (float)((uint8_t *)a.images.data)[i] / 255;
        half[i] = mpt_f32_to_f16(p.x[i]);
    }
    b = pictures_batch(&p, 0, 4);
    from_f32 = step_of(r[0].trainer, &b);
    b.images.data = a.images.data;
    b.images.dtype = MPT_U8;
    from_u8 = step_of(r[1].trainer, &b);
    CHECK_NEAR(from_u8.loss, from_f32.loss, 1e-6);
    b.images.data = half;
    b.images.dtype = MPT_F16;
    from_f16 = step_of(r[2].trainer, &b);
    CHECK_NEAR(from_f16.loss, from_f32.loss, 1e-3);
    for (k = 0; k < 3; k++) rig_close(&r[k]);
    free(half);
    pictures_free(&p);
    arrays_free(&a);
}

/* ---- dropout --------------------------------------------------------------------------------- */
static int dropout_net(mpt_model *m) {
    return mpt_dense(m, mpt_dropout(m, MPT_INPUT, 0.5f), 5);
}

static int count_dropped(const mpt_trainer *t, int record) {
    const float *y = (const float *)mpti_net_value(&t->net, 1) + record * 192;
    int i, n = 0;
    for (i = 0; i < 192; i++) n += y[i] == 0;
    return n;
}

/* Masks follow seed, step and sample, not the slot: a record keeps its own wherever it stands. */
MPT_TEST(dropout_follows_the_sample) {
    rig_desc d = rig_small(dropout_net, 4);
    pictures p = pictures_make(&d, 4, 1);
    mpt_batch b = pictures_batch(&p, 0, 4);
    rig r = rig_open(&d);
    float first[4 * 192], *y = (float *)mpti_net_value(&r.trainer->net, 1), probabilities[20];
    uint64_t swapped[4];
    int i;
    for (i = 0; i < 4 * 192; i++) p.x[i] = 1;
    CHECK_OK(r.ctx, mpt_trainer_accumulate(r.trainer, &b));
    memcpy(first, y, sizeof first);
    for (i = 0; i < 4; i++) {
        CHECK(count_dropped(r.trainer, i) > 60 && count_dropped(r.trainer, i) < 132);
        swapped[i] = p.ids[3 - i];
        CHECK(i == 0 || memcmp(first, first + 192 * i, 192 * sizeof(float)));
    }
    mpti_trainer_begin_step(r.trainer);
    b.sample_ids = swapped;
    CHECK_OK(r.ctx, mpt_trainer_accumulate(r.trainer, &b));
    for (i = 0; i < 4; i++) CHECK_EQ_MEM(y + 192 * i, first + 192 * (3 - i), 192 * sizeof(float));
    b.sample_ids = p.ids;
    mpti_trainer_begin_step(r.trainer);
    step_of(r.trainer, &b); /* step 0 again: its masks are those of the first pass */
    CHECK_EQ_MEM(y, first, sizeof first);
    step_of(r.trainer, &b);
    CHECK(memcmp(y, first, sizeof first));
    CHECK_OK(r.ctx, mpt_predict(r.trainer, &b, probabilities));
    for (i = 0; i < 4 * 192; i++) CHECK_NEAR(y[i], 1, 0); /* evaluation drops nothing */
    rig_close(&r);
    pictures_free(&p);
}

/* Without ids the place in the step is the key: two lanes of two slices, four masks; the same one
   lane at a time. */
MPT_TEST(dropout_without_ids_follows_the_place_in_the_step) {
    rig_desc d = rig_small(dropout_net, 4);
    pictures p = pictures_make(&d, 8, 1);
    const size_t slice = 2 * 192;
    float masks[2][4 * 2 * 192], *y;
    int way, i, k;
    rig r;
    for (i = 0; i < 8 * 192; i++) p.x[i] = 1;
    d.trainer.accumulate_steps = 2;
    d.trainer.slices = 2;
    r = rig_open(&d);
    y = (float *)mpti_net_value(&r.trainer->net, 1);
    for (way = 0; way < 2; way++) {
        mpti_trainer_begin_step(r.trainer);
        for (i = 0; i < 4; i++) {
            mpt_batch b = pictures_lanes(&p, way ? 4 * (i / 2) : 0, way ? 1 : 2, 4, NULL);
            const void *images;
            CHECK_OK(r.ctx, mpti_trainer_slice(r.trainer, &b, way ? i % 2 : i, &images));
            r.trainer->net.sample_ids = NULL;
            CHECK_OK(r.ctx, mpti_trainer_microbatch(r.trainer, images, MPT_F32));
            memcpy(masks[way] + i * slice, y, slice * sizeof(float));
        }
    }
    CHECK_EQ_MEM(masks[1], masks[0], sizeof masks[0]);
    for (i = 0; i < 8; i++)
        for (k = 0; k < i; k++)
            CHECK(memcmp(masks[0] + i * 192, masks[0] + k * 192, 192 * sizeof(float)));
    rig_close(&r);
    pictures_free(&p);
}

/* ---- memory ---------------------------------------------------------------------------------- */
static mpt_result no_work(int64_t chunk, void *user) {
    (void)chunk, (void)user;
    return MPT_OK;
}

static void check_plan(rig_desc d) {
    mpt_test_allocator memory;
    mpt_memory_plan plan;
    mpt_step_report report;
    pictures p = pictures_make(&d, d.trainer.accumulate_steps * d.batch_size, 1);
    mpt_batch b = pictures_lanes(&p, 0, d.trainer.accumulate_steps, d.batch_size, NULL);
    float *probabilities = (float *)malloc((size_t)d.batch_size * d.classes * sizeof(float));
    int64_t before, allocs, peak;
    rig r;
    int i;
    mpt_test_allocator_init(&memory, 0, 0);
    d.allocator = &memory.hooks;
    r.ctx = rig_ctx(&d);
    CHECK_OK(r.ctx, mpt_parallel_for(r.ctx, 2, no_work, NULL)); /* the threads are the context's */
    r.model = rig_model(r.ctx, &d);
    allocs = memory.num_allocs;
    CHECK_OK(r.ctx, mpt_model_plan(r.model, &d.trainer, d.batch_size, &plan));
    CHECK_EQ_INT(memory.num_allocs, allocs);
    before = memory.live_bytes;
    memory.peak_bytes = 0;
    CHECK_OK(r.ctx, mpt_trainer_create(r.model, &d.trainer, d.batch_size, &r.trainer));
    CHECK_EQ_INT(memory.live_bytes - before, plan.total);
    CHECK_EQ_INT(memory.peak_bytes - before, plan.total);
    CHECK_EQ_INT(plan.total, plan.weights + plan.master_weights + plan.gradients +
                                 plan.optimizer_state + plan.activations + plan.workspace +
                                 plan.statistics + plan.bookkeeping);
    CHECK_OK(r.ctx, mpt_trainer_step(r.trainer, &b, &report));
    allocs = memory.num_allocs;
    peak = memory.live_bytes;
    for (i = 0; i < 2; i++) CHECK_OK(r.ctx, mpt_trainer_step(r.trainer, &b, &report));
    CHECK_OK(r.ctx, mpt_predict(r.trainer, &b, probabilities));
    CHECK_EQ_INT(memory.num_allocs, allocs);
    CHECK_EQ_INT(memory.live_bytes, peak);
    rig_close(&r);
    CHECK_NO_LEAK(&memory);
    free(probabilities);
    pictures_free(&p);
}

MPT_TEST(the_plan_is_what_is_allocated_and_steps_allocate_nothing) {
    static const char *const names[] = {"lenet", "resnet20"};
    static const mpt_precision precisions[] = {MPT_PRECISION_FP32,      MPT_PRECISION_FP16,
                                               MPT_PRECISION_BF16,      MPT_PRECISION_FP16_CAST,
                                               MPT_PRECISION_FP16_PURE, MPT_PRECISION_FP16};
    int net, p, accumulate, kind;
    for (net = 0; net < 2; net++)
        for (p = 0; p < COUNT(precisions); p++)
            for (accumulate = 1; accumulate <= 4; accumulate += 3) {
                rig_desc d = rig_zoo(names[net], 16, net ? 3 : 1, 4);
                d.trainer.precision = precisions[p];
                if (p == COUNT(precisions) - 1) d.trainer.master_weights = MPT_NO;
                d.trainer.accumulate_steps = accumulate;
                check_plan(d);
            }
    for (kind = MPT_OPTIMIZER_SGD; kind <= MPT_OPTIMIZER_LARS; kind++) {
        rig_desc d = rig_small(kind % 2 ? small_net : plain_net, 4);
        d.trainer.optimizer.kind = (mpt_optimizer_kind)kind;
        d.trainer.accumulate_steps = 5;
        d.trainer.slices = 2;
        check_plan(d);
    }
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(defaults_are_resolved),
    MPT_TEST_CASE(wrong_descs_are_refused_by_field),
    MPT_TEST_CASE(info_tells_what_runs),
    MPT_TEST_CASE(the_smallest_of_everything),
    MPT_TEST_CASE(initial_weights_have_the_promised_distributions),
    MPT_TEST_CASE(seeds_decide_initial_weights),
    MPT_TEST_CASE(hash_is_of_parameters_then_statistics),
    MPT_TEST_CASE(batches_that_do_not_fit_are_refused),
    MPT_TEST_CASE(labels_outside_of_the_classes_are_refused),
    MPT_TEST_CASE(a_step_of_nothing_is_refused),
    MPT_TEST_CASE(reports_tell_what_happened),
    MPT_TEST_CASE(random_pictures_are_learned_by_heart_in_every_precision),
    MPT_TEST_CASE(a_step_drops_no_lanes_that_were_accumulated),
    MPT_TEST_CASE(accumulation_is_one_large_batch),
    MPT_TEST_CASE(a_partial_window_divides_by_its_true_count),
    MPT_TEST_CASE(a_lane_without_records_changes_no_bit),
    MPT_TEST_CASE(batch_norm_statistics_are_weighted_by_records),
    MPT_TEST_CASE(running_variance_is_unbiased),
    MPT_TEST_CASE(a_last_batch_of_one_record_stays_finite),
    MPT_TEST_CASE(threads_change_no_bit),
    MPT_TEST_CASE(lanes_together_or_one_at_a_time_give_the_same_bits),
    MPT_TEST_CASE(rows_meet_in_a_fixed_tree),
    MPT_TEST_CASE(pictures_of_every_type),
    MPT_TEST_CASE(dropout_follows_the_sample),
    MPT_TEST_CASE(dropout_without_ids_follows_the_place_in_the_step),
    MPT_TEST_CASE(the_plan_is_what_is_allocated_and_steps_allocate_nothing),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
