/* test_skip.c - >>scaler, >>train: steps whose gradients are not finite change nothing, are
   counted, and can be explained; what 16-bit weights lose and masters keep
   Cases O-30 to O-36 and O-41, through whole steps of a trainer */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "mpt_test.h"
#include "training.h"

static float from_bits(uint32_t u) {
    return mpti_f32_from_bits(u);
}

static const uint32_t bad_numbers[] = {
    0x7f800000, /* inf */
    0xff800000, /* -inf */
    0x7fc00000, /* NaN */
    0xffc12345, /* another */
    0x7f800001, /* a signalling one */
};

static const mpt_precision precisions[] = {MPT_PRECISION_FP32, MPT_PRECISION_FP16_CAST,
                                           MPT_PRECISION_FP16, MPT_PRECISION_FP16_PURE,
                                           MPT_PRECISION_BF16};

typedef struct bench {
    rig_desc d;
    rig r;
    pictures p;
    mpt_batch b;
} bench;

/* Two lanes of four records, two slices each, after two good steps. */
static bench bench_open(rig_desc d) {
    bench b;
    b.d = d;
    b.d.trainer.accumulate_steps = 2;
    b.d.trainer.slices = 2;
    b.r = rig_open(&b.d);
    b.p = pictures_make(&b.d, 8, 1);
    b.b = pictures_lanes(&b.p, 0, 2, 4, NULL);
    CHECK(!step_of(b.r.trainer, &b.b).skipped);
    CHECK(!step_of(b.r.trainer, &b.b).skipped);
    return b;
}

static void bench_close(bench *b) {
    pictures_free(&b->p);
    rig_close(&b->r);
}

static rig_desc desc_of(net_fn net, mpt_precision precision) {
    rig_desc d = rig_small(net, 4);
    d.trainer.precision = precision;
    d.trainer.loss_scaler.init_scale = 1024;
    return d;
}

/* One more step, which has to be skipped and to leave everything as it was. */
static mpt_step_report skip_once(bench *b) {
    mpt_trainer *t = b->r.trainer;
    const int64_t steps = mpt_trainer_get_info(t).steps, applied = t->optimizer.applied_steps;
    const int64_t skipped = t->scaler.num_skipped;
    snapshot before = snapshot_take(t);
    mpt_step_report r = step_of(t, &b->b);
    CHECK_EQ_INT(r.skipped, 1);
    CHECK_EQ_INT(r.step, steps + 1);
    CHECK_EQ_INT(r.applied_steps, applied);
    CHECK_EQ_INT(r.num_samples, 8);
    CHECK_EQ_INT(t->scaler.num_skipped, skipped + 1);
    CHECK_NEAR(r.learning_rate, 0, 0);
    CHECK_NEAR(r.grad_norm, 0, 0);
    snapshot_check(&before, t);
    return r;
}

/* ---- inf and NaN from the pictures and from the weights -------------------------------------- */

/* In the first, a middle and the last record, so in each lane and slice: one is enough. */
MPT_TEST(bad_pictures_skip_in_every_precision) {
    static const int places[] = {0, 3 * 192 + 77, 6 * 192 + 5, 8 * 192 - 1};
    int i, k, n;
    for (i = 0; i < COUNT(precisions); i++)
        for (k = 0; k < COUNT(places); k++)
            for (n = 0; n < COUNT(bad_numbers); n++) {
                bench b = bench_open(desc_of(small_net, precisions[i]));
                const float good = b.p.x[places[k]];
                const int dynamic = b.r.trainer->scaler.desc.mode == MPT_LOSS_SCALE_DYNAMIC;
                float scale = b.r.trainer->scaler.scale;
                mpt_step_report r;
                b.p.x[places[k]] = from_bits(bad_numbers[n]);
                r = skip_once(&b);
                CHECK_NEAR(r.loss_scale, scale, 0);
                CHECK_NEAR(b.r.trainer->scaler.scale, dynamic ? scale / 2 : 1, 0);
                b.p.x[places[k]] = good;
                CHECK(!step_of(b.r.trainer, &b.b).skipped); /* and goes on */
                bench_close(&b);
            }
}

MPT_TEST(bad_pictures_skip_with_every_optimizer) {
    int kind, i;
    for (kind = MPT_OPTIMIZER_SGD; kind <= MPT_OPTIMIZER_LARS; kind++)
        for (i = 0; i < 2; i++) {
            rig_desc d = desc_of(small_net, i ? MPT_PRECISION_FP16 : MPT_PRECISION_FP32);
            bench b;
            d.trainer.optimizer.kind = (mpt_optimizer_kind)kind;
            b = bench_open(d);
            b.p.x[500] = from_bits(0x7fc00000);
            skip_once(&b);
            bench_close(&b);
        }
}

/* A weight of any layer, put in from outside: the step can't repair it, and doesn't spread it. */
MPT_TEST(bad_weights_skip) {
    int i, v;
    for (i = 0; i < COUNT(precisions); i++)
        for (v = 1; v < 12; v++) {
            bench b = bench_open(desc_of(small_net, precisions[i]));
            const mpti_node *node = &b.r.model->nodes[v];
            if (node->num_params) {
                float *w = b.r.trainer->masters + node->param_offset;
                *w = from_bits(v % 2 ? 0x7fc00000 : 0x7f800000);
                CHECK_OK(b.r.ctx, mpti_trainer_weights_changed(b.r.trainer));
                skip_once(&b);
            }
            bench_close(&b);
        }
}

/* Numbers so large that only a variance overflows: gradients are finite, the running variance would
   be inf for ever. */
MPT_TEST(statistics_that_overflow_skip) {
    static const mpt_precision wide[] = {MPT_PRECISION_FP32, MPT_PRECISION_BF16};
    int i, k;
    for (i = 0; i < 2; i++) {
        bench b = bench_open(desc_of(small_net, wide[i]));
        for (k = 0; k < 8 * 192; k++) b.p.x[k] *= 1e25f;
        skip_once(&b);
        bench_close(&b);
    }
}

/* Lanes and slices that have no records are not looked at, whatever lies there. */
MPT_TEST(what_does_not_count_does_not_skip) {
    static const int32_t valid[2] = {3, 0};
    bench b = bench_open(desc_of(small_net, MPT_PRECISION_FP16));
    int i;
    for (i = 3 * 192; i < 8 * 192; i++) b.p.x[i] = from_bits(0x7fc00000);
    b.b.lane_valid = valid;
    CHECK(!step_of(b.r.trainer, &b.b).skipped);
    bench_close(&b);
}

/* ---- the scale ------------------------------------------------------------------------------- */

/* O-31. Without scaling, and with a fixed scale, the check is the same; nothing halves. */
MPT_TEST(fixed_scales_skip_and_stay) {
    static const mpt_loss_scale_mode modes[] = {MPT_LOSS_SCALE_NONE, MPT_LOSS_SCALE_STATIC};
    int i, step;
    for (i = 0; i < 2; i++) {
        rig_desc d = desc_of(small_net, MPT_PRECISION_FP16);
        bench b;
        d.trainer.loss_scaler.mode = modes[i];
        d.trainer.loss_scaler.init_scale = 1;
        b = bench_open(d);
        for (step = 3; step < 9; step++) {
            const float good = b.p.x[40];
            if (step == 5) {
                b.p.x[40] = from_bits(0x7fc00000);
                CHECK_NEAR(skip_once(&b).loss_scale, 1, 0);
                b.p.x[40] = good;
            } else {
                CHECK(!step_of(b.r.trainer, &b.b).skipped);
            }
            CHECK_NEAR(b.r.trainer->scaler.scale, 1, 0);
        }
        CHECK_EQ_INT(b.r.trainer->scaler.num_skipped, 1);
        CHECK_EQ_INT(b.r.trainer->optimizer.applied_steps, 7);
        bench_close(&b);
    }
}

MPT_TEST(good_steps_in_a_row_double_the_scale) {
    rig_desc d = desc_of(small_net, MPT_PRECISION_FP16);
    bench b;
    d.trainer.loss_scaler.growth_interval = 3;
    d.trainer.loss_scaler.init_scale = 64;
    b = bench_open(d);
    CHECK_NEAR(step_of(b.r.trainer, &b.b).loss_scale, 64, 0);
    CHECK_NEAR(step_of(b.r.trainer, &b.b).loss_scale, 128, 0);
    bench_close(&b);
}

/* O-30. Forced to NaN for ever: to the minimum, `stop_after` skips there, then an error that names
   the first bad tensor; weights as they were. The minimum may be below 1. */
static void check_stuck(float min_scale, int stop_after) {
    rig_desc d = desc_of(small_net, MPT_PRECISION_FP16);
    const int expected = stop_after ? stop_after : 20;
    mpt_step_report r;
    mpt_result rc = MPT_OK;
    snapshot before;
    int steps = 0, halvings = 0;
    float scale;
    bench b;
    d.trainer.loss_scaler.init_scale = 8;
    d.trainer.loss_scaler.min_scale = min_scale;
    d.trainer.loss_scaler.max_skips_at_min = stop_after;
    b = bench_open(d);
    for (scale = 8; scale > min_scale; scale /= 2) halvings++;
    before = snapshot_take(b.r.trainer);
    b.p.x[7 * 192] = from_bits(0x7fc00000);
    while (rc == MPT_OK && steps < 200) {
        rc = mpt_trainer_step(b.r.trainer, &b.b, &r);
        CHECK_EQ_INT(r.skipped, 1);
        steps++;
    }
    CHECK_RESULT(b.r.ctx, rc, MPT_ERR_INVALID_STATE);
    CHECK_EQ_INT(steps, halvings + expected);
    CHECK_NEAR(b.r.trainer->scaler.scale, min_scale, 0);
    CHECK_NEAR(r.loss_scale, min_scale, 0);
    CHECK_CONTAINS(mpt_last_error(b.r.ctx)->message, "gradient of conv2d0, element 0");
    snapshot_check(&before, b.r.trainer);
    b.p.x[7 * 192] = 0;
    CHECK(!step_of(b.r.trainer, &b.b).skipped); /* once the cause is gone it goes on */
    bench_close(&b);
}

MPT_TEST(a_stuck_run_ends_in_an_error) {
    check_stuck(1, 0);
    check_stuck(1, 3);
    check_stuck(1.0f / 64, 5);
}

/* Statistics alone can be the cause: then no gradient can be named. */
MPT_TEST(a_run_stuck_by_statistics_names_the_batch_norm) {
    rig_desc d = desc_of(small_net, MPT_PRECISION_FP32);
    mpt_step_report r;
    bench b;
    int i;
    d.trainer.loss_scaler.max_skips_at_min = 1;
    b = bench_open(d);
    for (i = 0; i < 8 * 192; i++) b.p.x[i] *= 1e25f;
    CHECK_RESULT(b.r.ctx, mpt_trainer_step(b.r.trainer, &b.b, &r), MPT_ERR_INVALID_STATE);
    CHECK_CONTAINS(mpt_last_error(b.r.ctx)->message, "statistics of batchnorm0, element ");
    bench_close(&b);
}

/* O-33. Overflow at steps 2 and 3 of a warm-up of 10: the applied steps see the rates, and Adam the
   t, of a run without overflow, so the weights are the same to the bit. */
MPT_TEST(skips_move_neither_schedule_nor_time) {
    rig_desc d = rig_small(small_net, 4);
    pictures p = pictures_make(&d, 4, 1);
    mpt_batch b = pictures_batch(&p, 0, 4);
    const float good = p.x[9];
    double rates[2][10];
    hash h[2];
    int run, step, applied;
    d.trainer.optimizer.kind = MPT_OPTIMIZER_ADAM;
    d.trainer.optimizer.learning_rate = 0.01f;
    d.trainer.schedule.warmup_steps = 10;
    for (run = 0; run < 2; run++) {
        rig r = rig_open(&d);
        for (step = 1, applied = 0; applied < 10; step++) {
            mpt_step_report report;
            p.x[9] = run && (step == 2 || step == 3) ? from_bits(0x7f800000) : good;
            report = step_of(r.trainer, &b);
            CHECK_EQ_INT(report.skipped, p.x[9] != good);
            if (!report.skipped) rates[run][applied++] = report.learning_rate;
            CHECK_EQ_INT(report.applied_steps, applied);
            CHECK_EQ_INT(report.step, step);
        }
        CHECK_EQ_INT(r.trainer->scaler.num_skipped, run ? 2 : 0);
        h[run] = hash_of(r.trainer);
        rig_close(&r);
    }
    CHECK_EQ_MEM(rates[1], rates[0], sizeof rates[0]);
    CHECK_EQ_STR(h[1].hex, h[0].hex);
    pictures_free(&p);
}

/* O-32. Clipping and the reported norm are of the unscaled gradient: no power of two changes a bit
   in FP32. */
MPT_TEST(clipping_is_after_unscaling) {
    static const float scales[] = {1, 1024, 1.0f / 32};
    rig_desc d = rig_small(small_net, 4);
    pictures p = pictures_make(&d, 4, 1);
    mpt_batch b = pictures_batch(&p, 0, 4);
    mpt_step_report first, report;
    hash h, h0;
    int i;
    memset(&first, 0, sizeof first);
    memset(&h0, 0, sizeof h0);
    d.trainer.loss_scaler.mode = MPT_LOSS_SCALE_STATIC;
    d.trainer.optimizer.max_grad_norm = 0.1f;
    d.trainer.optimizer.weight_decay = 0.01f;
    for (i = 0; i < COUNT(scales); i++) {
        rig r;
        d.trainer.loss_scaler.min_scale = 1.0f / 32;
        d.trainer.loss_scaler.init_scale = scales[i];
        r = rig_open(&d);
        report = step_of(r.trainer, &b);
        h = hash_of(r.trainer);
        if (i == 0) first = report;
        if (i == 0) h0 = h;
        CHECK(report.grad_norm > 0.1f && report.grad_norm == first.grad_norm);
        CHECK(report.loss == first.loss);
        CHECK_EQ_STR(h.hex, h0.hex);
        rig_close(&r);
    }
    pictures_free(&p);
}

/* ---- 16 bits and what they lose -------------------------------------------------------------- */
static int dense_net(mpt_model *m) {
    return mpt_dense(m, MPT_INPUT, 5);
}

/* O-35. Updates below half a step of FP16: masters add them up, and the copy follows; without
   masters nothing ever moves. Rates are such that one update is about 2^-16. */
MPT_TEST(masters_keep_small_updates) {
    static const mpt_precision with[] = {MPT_PRECISION_FP16, MPT_PRECISION_FP16,
                                         MPT_PRECISION_FP16_PURE};
    static const mpt_switch masters[] = {MPT_YES, MPT_NO, MPT_NO};
    int i, step;
    int64_t k;
    for (i = 0; i < 3; i++) {
        rig_desc d = rig_small(dense_net, 4);
        pictures p = pictures_make(&d, 4, 1);
        mpt_batch b = pictures_batch(&p, 0, 4);
        int moved = 0;
        rig r;
        d.trainer.precision = with[i];
        d.trainer.master_weights = masters[i];
        d.trainer.loss_scaler.mode = MPT_LOSS_SCALE_NONE;
        d.trainer.optimizer.kind = MPT_OPTIMIZER_SGD;
        d.trainer.optimizer.learning_rate = 1e-4f;
        r = rig_open(&d);
        for (k = 0; k < r.model->num_params; k++) r.trainer->masters[k] = 0.5f;
        CHECK_OK(r.ctx, mpti_trainer_weights_changed(r.trainer));
        for (step = 0; step < 100; step++) step_of(r.trainer, &b);
        for (k = 0; k < r.model->num_params; k++) {
            CHECK_EQ_INT(r.trainer->half[k], mpt_f32_to_f16(r.trainer->masters[k]));
            moved += fabsf(r.trainer->masters[k] - 0.5f) > 1e-4f;
        }
        CHECK_EQ_INT(moved > 0, masters[i] == MPT_YES);
        rig_close(&r);
        pictures_free(&p);
    }
}

/* Gamma and beta are FP32 unless it is asked otherwise, with masters or without. */
MPT_TEST(batch_norm_is_kept_in_fp32_unless_asked_otherwise) {
    int keep, step;
    int64_t k;
    for (keep = 0; keep < 2; keep++) {
        rig_desc d = desc_of(small_net, MPT_PRECISION_FP16_PURE);
        pictures p = pictures_make(&d, 4, 1);
        mpt_batch b = pictures_batch(&p, 0, 4);
        const mpti_node *norm;
        int rounded = 1, weights_rounded = 1;
        rig r;
        d.trainer.keep_batchnorm_fp32 = keep ? MPT_YES : MPT_NO;
        r = rig_open(&d);
        norm = &r.model->nodes[2];
        CHECK_EQ_INT(norm->kind, MPTI_KIND_BATCHNORM);
        for (step = 0; step < 5; step++) step_of(r.trainer, &b);
        for (k = 0; k < r.model->num_params; k++) {
            const float w = r.trainer->masters[k];
            int exact = mpt_f16_to_f32(mpt_f32_to_f16(w)) == w;
            if (k >= norm->param_offset && k < norm->param_offset + norm->num_params)
                rounded &= exact;
            if (k < norm->param_offset) weights_rounded &= exact;
        }
        CHECK_EQ_INT(rounded, !keep);
        CHECK(weights_rounded);
        rig_close(&r);
        pictures_free(&p);
    }
}

/* O-36. Adam in FP16: weights whose gradient is exactly 0 don't move, and nothing is NaN. */
MPT_TEST(adam_in_fp16_leaves_what_has_no_gradient) {
    rig_desc d = desc_of(dense_net, MPT_PRECISION_FP16);
    pictures p = pictures_make(&d, 4, 1);
    mpt_batch b = pictures_batch(&p, 0, 4);
    const int64_t weights = 5 * 192;
    float *before;
    rig r;
    int i;
    d.trainer.optimizer.kind = MPT_OPTIMIZER_ADAM;
    r = rig_open(&d);
    before = (float *)malloc((size_t)weights * sizeof *before);
    memcpy(before, r.trainer->masters, (size_t)weights * sizeof *before);
    memset(p.x, 0, 4 * 192 * sizeof *p.x);
    for (i = 0; i < 3; i++) CHECK(!step_of(r.trainer, &b).skipped);
    CHECK_EQ_MEM(r.trainer->masters, before, (size_t)weights * sizeof *before);
    for (i = 0; i < 5; i++) CHECK(mpti_is_finite(r.trainer->masters[weights + i]));
    free(before);
    rig_close(&r);
    pictures_free(&p);
}

/* Gradients of about 1e-8, 0 in FP16, arrive with a scale of 65536, and only with it. */
MPT_TEST(scaling_saves_small_gradients) {
    static const float scales[] = {65536, 1};
    int i;
    int64_t k;
    for (i = 0; i < 2; i++) {
        rig_desc d = desc_of(dense_net, MPT_PRECISION_FP16);
        pictures p = pictures_make(&d, 4, 1);
        mpt_batch b = pictures_batch(&p, 0, 4);
        snapshot before;
        int moved = 0;
        rig r;
        d.trainer.loss_scaler.mode = MPT_LOSS_SCALE_STATIC;
        d.trainer.loss_scaler.init_scale = scales[i];
        d.trainer.optimizer.kind = MPT_OPTIMIZER_ADAM;
        r = rig_open(&d);
        for (k = 0; k < 4; k++) p.labels[k] = 0; /* which the bias makes all but certain */
        r.trainer->masters[5 * 192] = 18;
        before = snapshot_take(r.trainer);
        step_of(r.trainer, &b);
        for (k = 0; k < 5 * 192; k++)
            moved += ((float *)(void *)before.bytes)[k] != r.trainer->masters[k];
        CHECK_EQ_INT(moved > 100, i == 0);
        snapshot_free(&before);
        rig_close(&r);
        pictures_free(&p);
    }
}

/* O-41. In evaluation, running mean 0, variance 1e6, input 1000 in FP16: 1, not 0; also after a
   checkpoint. */
static int norm_net(mpt_model *m) {
    return mpt_dense(m, mpt_batchnorm(m, MPT_INPUT, NULL), 2);
}

static void check_norm_of_1000(rig *r, const mpt_batch *b) {
    float probabilities[2];
    CHECK_OK(r->ctx, mpt_predict(r->trainer, b, probabilities));
    CHECK_NEAR(mpti_load(MPT_F16, mpti_net_value(&r->trainer->net, 1), 0), 1, 1e-3);
}

MPT_TEST(large_running_variances_stay_fp32) {
    rig_desc d = desc_of(norm_net, MPT_PRECISION_FP16);
    pictures p;
    mpt_batch b;
    rig r;
    d.height = d.width = d.channels = 1;
    d.batch_size = 1;
    d.classes = 2;
    p = pictures_make(&d, 1, 1);
    p.x[0] = 1000;
    b = pictures_batch(&p, 0, 1);
    r = rig_open(&d);
    r.trainer->running[1] = 1e6f;
    check_norm_of_1000(&r, &b);
    CHECK_OK(r.ctx, mpt_trainer_save(r.trainer, NULL, NULL, mpt_test_tmpfile("variance")));
    rig_close(&r);
    r = rig_open(&d);
    CHECK_OK(r.ctx, mpt_trainer_load(r.trainer, NULL, NULL, mpt_test_tmpfile("variance")));
    check_norm_of_1000(&r, &b);
    rig_close(&r);
    pictures_free(&p);
}

/* ---- the autopsy ----------------------------------------------------------------------------- */
static mpt_overflow autopsy_of(bench *b) {
    mpt_overflow o;
    snapshot before = snapshot_take(b->r.trainer);
    mpt_loss_scaler scaler = b->r.trainer->scaler;
    CHECK_OK(b->r.ctx, mpt_trainer_autopsy(b->r.trainer, &b->b, &o));
    CHECK_EQ_MEM(&scaler, &b->r.trainer->scaler, sizeof scaler);
    snapshot_check(&before, b->r.trainer);
    return o;
}

/* A bad picture: the input itself, and no scale would help. */
MPT_TEST(autopsy_finds_bad_pictures) {
    bench b = bench_open(desc_of(small_net, MPT_PRECISION_FP16));
    mpt_overflow o;
    b.p.x[6 * 192 + 30] = from_bits(0x7f800000);
    skip_once(&b);
    o = autopsy_of(&b);
    CHECK_EQ_INT(o.found, 1);
    CHECK_EQ_STR(o.layer, "input");
    CHECK_EQ_STR(o.tensor, "output");
    CHECK_EQ_INT(o.index, 30); /* in its slice of two records */
    CHECK_EQ_INT(o.values.num_inf, 1);
    CHECK_NEAR(o.scale, 1024, 0);
    CHECK_NEAR(o.largest_scale, 0, 0);
    bench_close(&b);
}

MPT_TEST(autopsy_names_the_layer_of_a_bad_weight) {
    bench b = bench_open(desc_of(small_net, MPT_PRECISION_FP16));
    mpt_overflow o;
    b.r.trainer->masters[b.r.model->nodes[b.r.model->logits].param_offset] = from_bits(0x7fc00000);
    CHECK_OK(b.r.ctx, mpti_trainer_weights_changed(b.r.trainer));
    skip_once(&b);
    o = autopsy_of(&b);
    CHECK_EQ_STR(o.layer, "dense0");
    CHECK_EQ_STR(o.tensor, "output");
    CHECK_EQ_INT(o.values.num_nan, 2);
    CHECK_NEAR(o.largest_scale, 0, 0);
    bench_close(&b);
}

/* A scale that is too large: the autopsy's largest_scale fits, the next power of two doesn't. */
MPT_TEST(autopsy_tells_the_largest_scale_that_fits) {
    rig_desc d = desc_of(small_net, MPT_PRECISION_FP16);
    mpt_overflow o;
    bench b;
    int i;
    d.trainer.loss_scaler.mode = MPT_LOSS_SCALE_STATIC;
    d.trainer.loss_scaler.max_scale = 0x1p60f;
    b = bench_open(d);
    b.r.trainer->scaler.scale = 0x1.8p40f;
    skip_once(&b);
    o = autopsy_of(&b);
    CHECK_EQ_INT(o.found, 1);
    CHECK_EQ_STR(o.layer, "dense0");
    CHECK_EQ_STR(o.tensor, "gradient of the output");
    CHECK(o.values.num_inf > 0);
    CHECK_NEAR(o.scale, 0x1.8p40f, 0);
    CHECK(o.largest_scale >= 1024 && o.largest_scale < 0x1p24f);
    for (i = 0; i < 2; i++) {
        b.r.trainer->scaler.scale = i ? o.largest_scale : 2 * o.largest_scale;
        CHECK_EQ_INT(step_of(b.r.trainer, &b.b).skipped, !i);
    }
    bench_close(&b);
}

MPT_TEST(autopsy_is_for_the_step_that_was_skipped) {
    bench b = bench_open(desc_of(small_net, MPT_PRECISION_FP16));
    const float good = b.p.x[0];
    mpt_overflow o;
    CHECK_RESULT(b.r.ctx, mpt_trainer_autopsy(b.r.trainer, &b.b, &o), MPT_ERR_INVALID_STATE);
    CHECK_CONTAINS(mpt_last_error(b.r.ctx)->message, "not skipped");
    b.p.x[0] = from_bits(0x7fc00000);
    skip_once(&b);
    b.p.x[0] = good; /* another batch than that of the step: nothing is wrong with it */
    o = autopsy_of(&b);
    CHECK(o.found == 0 && o.layer[0] == 0 && o.largest_scale == 0);
    CHECK_OK(b.r.ctx, mpt_trainer_accumulate(b.r.trainer, &b.b));
    CHECK_RESULT(b.r.ctx, mpt_trainer_autopsy(b.r.trainer, &b.b, &o), MPT_ERR_INVALID_STATE);
    bench_close(&b);
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(bad_pictures_skip_in_every_precision),
    MPT_TEST_CASE(bad_pictures_skip_with_every_optimizer),
    MPT_TEST_CASE(bad_weights_skip),
    MPT_TEST_CASE(statistics_that_overflow_skip),
    MPT_TEST_CASE(what_does_not_count_does_not_skip),
    MPT_TEST_CASE(fixed_scales_skip_and_stay),
    MPT_TEST_CASE(good_steps_in_a_row_double_the_scale),
    MPT_TEST_CASE(a_stuck_run_ends_in_an_error),
    MPT_TEST_CASE(a_run_stuck_by_statistics_names_the_batch_norm),
    MPT_TEST_CASE(skips_move_neither_schedule_nor_time),
    MPT_TEST_CASE(clipping_is_after_unscaling),
    MPT_TEST_CASE(masters_keep_small_updates),
    MPT_TEST_CASE(batch_norm_is_kept_in_fp32_unless_asked_otherwise),
    MPT_TEST_CASE(adam_in_fp16_leaves_what_has_no_gradient),
    MPT_TEST_CASE(scaling_saves_small_gradients),
    MPT_TEST_CASE(large_running_variances_stay_fp32),
    MPT_TEST_CASE(autopsy_finds_bad_pictures),
    MPT_TEST_CASE(autopsy_names_the_layer_of_a_bad_weight),
    MPT_TEST_CASE(autopsy_tells_the_largest_scale_that_fits),
    MPT_TEST_CASE(autopsy_is_for_the_step_that_was_skipped),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
