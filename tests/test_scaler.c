/* test_scaler.c - >>scaler: the state machine, the step around it, the overflow autopsy
   Cases O-30, O-31, O-33, O-49 (the part of optimizer and scaler). The trace in reference.json is
   that of torch.amp.GradScaler. */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "mpt_test.h"

static float from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static mpt_loss_scaler_desc no_desc(void) {
    mpt_loss_scaler_desc d;
    memset(&d, 0, sizeof d);
    return d;
}

/* ---- the state machine ----------------------------------------------------------------------- */
MPT_TEST(defaults_are_resolved) {
    mpt_loss_scaler s;
    mpt_loss_scaler_init(&s, NULL);
    CHECK_EQ_INT(s.desc.mode, MPT_LOSS_SCALE_DYNAMIC);
    CHECK_NEAR(s.scale, 65536, 0);
    CHECK_NEAR(s.desc.growth_factor, 2, 0);
    CHECK_NEAR(s.desc.backoff_factor, 0.5, 0);
    CHECK_NEAR(s.desc.min_scale, 1, 0);
    CHECK_NEAR(s.desc.max_scale, 16777216, 0);
    CHECK_EQ_INT(s.desc.growth_interval, 2000);
    CHECK_EQ_INT(s.desc.max_skips_at_min, 20);
    CHECK(s.good_steps == 0 && s.num_skipped == 0 && !mpt_loss_scaler_is_stuck(&s));
}

/* Sixty steps of the real GradScaler, to the last bit. */
MPT_TEST(trace_of_gradscaler) {
    mpt_ctx *ctx = NULL;
    mpti_buffer text;
    mpti_json j;
    char key[64];
    mpt_loss_scaler s;
    mpt_loss_scaler_desc d = mpt_loss_scaler_desc_preset(MPT_LOSS_SCALER_GRADSCALER);
    int steps = 0, found = 0;
    d.growth_interval = 5;
    mpt_loss_scaler_init(&s, &d);
    CHECK_OK(NULL, mpt_ctx_create(NULL, &ctx));
    memset(&text, 0, sizeof text);
    text.allocator = &ctx->desc.allocator;
    CHECK_OK(ctx, mpti_file_load(mpt_io_files(), mpt_test_data("reference.json"), 1 << 20,
                                 &ctx->error, &text));
    memset(&j, 0, sizeof j);
    j.p = (const char *)text.data;
    j.end = j.p + text.size;
    mpti_json_object(&j);
    while (mpti_json_key(&j, key, sizeof key)) {
        if (strcmp(key, "loss_scaler") != 0) {
            mpti_json_skip(&j);
            continue;
        }
        found = 1;
        mpti_json_object(&j);
        while (mpti_json_key(&j, key, sizeof key)) {
            if (strcmp(key, "steps_overflow_scale_tracker") != 0) {
                mpti_json_skip(&j);
                continue;
            }
            mpti_json_array(&j);
            while (mpti_json_item(&j)) {
                int64_t overflow, scale, tracker;
                mpti_json_array(&j);
                CHECK(mpti_json_item(&j) && mpti_json_int64(&j, &overflow));
                CHECK(mpti_json_item(&j) && mpti_json_int64(&j, &scale));
                mpti_json_skip_number(&j); /* the .0 behind it */
                CHECK(mpti_json_item(&j) && mpti_json_int64(&j, &tracker));
                CHECK(!mpti_json_item(&j));
                CHECK_EQ_INT(mpt_loss_scaler_update(&s, (int)overflow), overflow);
                CHECK_NEAR(s.scale, scale, 0);
                CHECK_EQ_INT(s.good_steps, tracker);
                steps++;
            }
        }
    }
    CHECK(found && !j.bad);
    CHECK_EQ_INT(steps, 60);
    mpti_buffer_free(&text);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(presets) {
    mpt_loss_scaler_desc d;
    mpt_loss_scaler s;
    int i;
    d = mpt_loss_scaler_desc_preset(MPT_LOSS_SCALER_APEX);
    CHECK_NEAR(d.init_scale, 65536, 0);
    CHECK_NEAR(d.max_scale, 16777216, 0);
    d = mpt_loss_scaler_desc_preset(MPT_LOSS_SCALER_KERAS);
    CHECK_NEAR(d.init_scale, 32768, 0);
    d = mpt_loss_scaler_desc_preset(MPT_LOSS_SCALER_GRADSCALER);
    CHECK_NEAR(d.init_scale, 65536, 0);
    for (i = 0; i <= MPT_LOSS_SCALER_KERAS; i++) {
        d = mpt_loss_scaler_desc_preset((mpt_loss_scaler_preset)i);
        CHECK_OK(NULL, mpt_loss_scaler_check(NULL, &d));
        CHECK_EQ_INT(d.growth_interval, 2000);
        CHECK_NEAR(d.growth_factor, 2, 0);
    }
    d.growth_interval = 1; /* no cap: up to the last power of two, where growth would be inf */
    mpt_loss_scaler_init(&s, &d);
    for (i = 0; i < 300; i++) CHECK_EQ_INT(mpt_loss_scaler_update(&s, 0), 0);
    CHECK_EQ_INT(mpti_f32_bits(s.scale), 0x7f000000); /* 2^127 */
}

MPT_TEST(growth_beyond_the_maximum_is_not_applied) {
    mpt_loss_scaler_desc d = no_desc();
    mpt_loss_scaler s;
    int i;
    d.init_scale = 1000;
    d.max_scale = 3000;
    d.growth_interval = 3;
    mpt_loss_scaler_init(&s, &d);
    for (i = 1; i <= 12; i++) {
        CHECK_EQ_INT(mpt_loss_scaler_update(&s, 0), 0);
        CHECK_NEAR(s.scale, i < 3 ? 1000 : 2000, 0);
        CHECK_EQ_INT(s.good_steps, i % 3);
    }
    CHECK_EQ_INT(mpt_loss_scaler_update(&s, 1), 1);
    CHECK_NEAR(s.scale, 1000, 0);
    d = no_desc();
    d.max_scale = 1024; /* the default start is brought below it */
    mpt_loss_scaler_init(&s, &d);
    CHECK_NEAR(s.scale, 1024, 0);
    CHECK_OK(NULL, mpt_loss_scaler_check(NULL, &d));
}

/* O-30. Below 1 if allowed, never to 0; after max_skips_at_min skips at the minimum: stuck. */
MPT_TEST(minimum_and_stop_rule) {
    static const float minimum[3] = {0, 0.015625f, 1.17549435e-38f}; /* default 1; 2^-6; 2^-126 */
    static const int halvings[3] = {16, 22, 142};
    int m, i, limit;
    for (m = 0; m < 3; m++) {
        for (limit = 0; limit < 6; limit += 5) {
            mpt_loss_scaler_desc d = no_desc();
            mpt_loss_scaler s;
            int stop = limit ? limit : 20;
            d.min_scale = minimum[m];
            d.max_skips_at_min = limit;
            mpt_loss_scaler_init(&s, &d);
            for (i = 1; i <= halvings[m] + stop; i++) {
                CHECK(!mpt_loss_scaler_is_stuck(&s));
                CHECK_EQ_INT(mpt_loss_scaler_update(&s, 1), 1);
                CHECK(s.scale >= s.desc.min_scale && s.scale > 0);
            }
            CHECK(mpt_loss_scaler_is_stuck(&s));
            CHECK_NEAR(s.scale, s.desc.min_scale, 0);
            CHECK_EQ_INT(s.num_skipped, halvings[m] + stop);
            CHECK_EQ_INT(mpt_loss_scaler_update(&s, 0), 0); /* one good step, and it starts anew */
            CHECK(!mpt_loss_scaler_is_stuck(&s));
            CHECK_EQ_INT(s.skips_at_min, 0);
        }
    }
}

/* O-31. A fixed scale, and none at all, skip and count all the same, and can be stuck. */
MPT_TEST(fixed_scales_skip_too) {
    int mode, i;
    for (mode = MPT_LOSS_SCALE_STATIC; mode <= MPT_LOSS_SCALE_NONE; mode++) {
        mpt_loss_scaler_desc d = no_desc();
        mpt_loss_scaler s;
        float expected = mode == MPT_LOSS_SCALE_NONE ? 1 : 0.25f;
        d.mode = (mpt_loss_scale_mode)mode;
        d.init_scale = 0.25f;
        d.growth_interval = 2;
        CHECK_OK(NULL, mpt_loss_scaler_check(NULL, &d));
        mpt_loss_scaler_init(&s, &d);
        for (i = 0; i < 40; i++) {
            CHECK_EQ_INT(mpt_loss_scaler_update(&s, i % 4 == 0), i % 4 == 0);
            CHECK_NEAR(s.scale, expected, 0);
        }
        CHECK_EQ_INT(s.num_skipped, 10);
        for (i = 0; i < 20; i++) CHECK_EQ_INT(mpt_loss_scaler_update(&s, 1), 1);
        CHECK(mpt_loss_scaler_is_stuck(&s));
    }
}

static void refuse(const char *field, mpt_loss_scaler_desc d) {
    mpt_ctx *ctx = NULL;
    CHECK_OK(NULL, mpt_ctx_create(NULL, &ctx));
    CHECK_RESULT(ctx, mpt_loss_scaler_check(ctx, &d), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, field);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(desc_names_the_field) {
    mpt_loss_scaler_desc good = no_desc(), d;
    CHECK_OK(NULL, mpt_loss_scaler_check(NULL, &good));
    CHECK_EQ_INT(mpt_loss_scaler_check(NULL, NULL), MPT_ERR_INVALID_ARGUMENT);
    d = good, d.mode = (mpt_loss_scale_mode)4, refuse("mode", d);
    d = good, d.init_scale = -1, refuse("init_scale", d);
    d = good, d.init_scale = 0.5f, refuse("init_scale", d);
    d = good, d.init_scale = from_bits(0x7f800000u), refuse("init_scale", d);
    d = good, d.growth_factor = 1, refuse("growth_factor", d);
    d = good, d.growth_factor = from_bits(0x7fc00000u), refuse("growth_factor", d);
    d = good, d.backoff_factor = 1, refuse("backoff_factor", d);
    d = good, d.backoff_factor = -0.5f, refuse("backoff_factor", d);
    d = good, d.min_scale = -1, refuse("min_scale", d);
    d = good, d.min_scale = from_bits(1), refuse("min_scale", d); /* subnormal: 1 / it is inf */
    d = good, d.max_scale = 0.5f, refuse("max_scale", d);
    d = good, d.growth_interval = -1, refuse("growth_interval", d);
    d = good, d.max_skips_at_min = -1, refuse("max_skips_at_min", d);
}

MPT_TEST(restore_goes_on_and_refuses_nonsense) {
    mpt_loss_scaler_desc d = no_desc();
    mpt_loss_scaler a, b, bad;
    int cut, i;
    d.growth_interval = 3;
    d.min_scale = 32768;
    d.max_skips_at_min = 4;
    for (cut = 0; cut < 40; cut++) { /* cut anywhere, both go on alike */
        mpt_loss_scaler_init(&a, &d);
        mpt_loss_scaler_init(&b, &d);
        for (i = 0; i < cut; i++) mpt_loss_scaler_update(&a, i % 7 > 3);
        CHECK_OK(NULL, mpt_loss_scaler_restore(&b, &a));
        for (i = cut; i < 60; i++) {
            CHECK_EQ_INT(mpt_loss_scaler_update(&a, i % 7 > 3),
                         mpt_loss_scaler_update(&b, i % 7 > 3));
            CHECK_EQ_MEM(&a, &b, sizeof a);
        }
    }
    for (i = 0; i < 5; i++) {
        bad = a;
        if (i == 0) bad.scale = 0;
        if (i == 1) bad.scale = from_bits(0x7fc00000u);
        if (i == 2) bad.good_steps = -1;
        if (i == 3) bad.num_skipped = -1;
        if (i == 4) bad.skips_at_min = -1;
        b = a;
        CHECK_EQ_INT(mpt_loss_scaler_restore(&b, &bad), MPT_ERR_CORRUPT_DATA);
        CHECK_EQ_MEM(&a, &b, sizeof a);
    }
    bad = a;
    bad.scale = 1; /* below this desc's minimum */
    CHECK_OK(NULL, mpt_loss_scaler_restore(&b, &bad));
    CHECK_NEAR(b.scale, 32768, 0);
    d = no_desc();
    d.mode = MPT_LOSS_SCALE_STATIC;
    d.init_scale = 128;
    mpt_loss_scaler_init(&b, &d);
    CHECK_OK(NULL, mpt_loss_scaler_restore(&b, &bad));
    CHECK_NEAR(b.scale, 128, 0);
    CHECK_EQ_INT(b.num_skipped, bad.num_skipped);
}

/* ---- the step around it: a small run over the real pieces ------------------------------------ */
enum { NUM_WEIGHTS = 40 };
typedef struct run {
    mpt_ctx *ctx;
    mpti_optimizer o;
    mpt_loss_scaler scaler;
    mpt_schedule_desc schedule;
    mpti_params p;
    mpti_parameter segments[2];
    float weights[NUM_WEIGHTS], gradients[NUM_WEIGHTS], first[NUM_WEIGHTS], second[NUM_WEIGHTS];
    uint16_t half[NUM_WEIGHTS];
    int64_t steps;
    float last_rate;
} run;

static void run_open(run *r, mpt_optimizer_kind kind, const mpt_loss_scaler_desc *scaler) {
    mpt_optimizer_desc d;
    int i;
    memset(r, 0, sizeof *r);
    memset(&d, 0, sizeof d);
    d.kind = kind;
    d.learning_rate = 0.1f;
    d.weight_decay = 0.01f;
    d.max_grad_norm = 2;
    mpti_optimizer_desc_defaults(&d);
    CHECK_OK(NULL, mpt_ctx_create(NULL, &r->ctx));
    r->segments[0] = mpti_parameter_make(&d, 0, 30, false);
    r->segments[1] = mpti_parameter_make(&d, 30, NUM_WEIGHTS - 30, true);
    CHECK_OK(r->ctx, mpti_optimizer_open(&r->o, r->ctx, &d, r->segments, 2));
    mpt_loss_scaler_init(&r->scaler, scaler);
    r->schedule.kind = MPT_SCHEDULE_COSINE;
    r->schedule.warmup_steps = 10;
    r->p.weights = r->weights;
    r->p.gradients = r->gradients;
    r->p.first = r->first;
    r->p.second = r->second;
    r->p.half = r->half;
    r->p.half_dtype = MPT_F16;
    for (i = 0; i < NUM_WEIGHTS; i++) r->weights[i] = (float)(i - 20) / 16;
}

static void run_close(run *r) {
    mpti_optimizer_close(&r->o);
    mpt_ctx_destroy(r->ctx);
}

/* One attempted step; the true gradient is a function of `batch`; poison: bits of one element. */
static int run_step(run *r, int batch, uint32_t poison) {
    float unscale = (float)(1.0 / (double)r->scaler.scale), norm, rate;
    bool bad;
    int i;
    for (i = 0; i < NUM_WEIGHTS; i++)
        r->gradients[i] = (float)((i * 7 + batch * 5) % 11 - 5) / 32 * r->scaler.scale;
    if (poison) r->gradients[batch % NUM_WEIGHTS] = from_bits(poison);
    r->steps++;
    CHECK_OK(r->ctx, mpti_gradients_check(&r->o, &r->p, unscale, &bad, &norm));
    if (mpt_loss_scaler_update(&r->scaler, bad)) return 1;
    rate = mpt_schedule_rate(&r->schedule, r->o.desc.learning_rate, r->o.applied_steps, 100);
    r->last_rate = rate;
    CHECK_OK(r->ctx, mpti_optimizer_update(&r->o, &r->p, unscale,
                                           mpti_clip_factor(norm, r->o.desc.max_grad_norm), rate));
    return 0;
}

static const uint32_t poisons[4] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f800001u};

/* Weights, copy, moments: all that a skipped step may not touch. */
static void check_untouched(const run *a, const run *b) {
    CHECK_EQ_MEM(a->weights, b->weights, sizeof a->weights);
    CHECK_EQ_MEM(a->first, b->first, sizeof a->first);
    CHECK_EQ_MEM(a->second, b->second, sizeof a->second);
    CHECK_EQ_MEM(a->half, b->half, sizeof a->half);
    CHECK_EQ_INT(a->o.applied_steps, b->o.applied_steps);
    CHECK_EQ_MEM(&a->o.beta1_power, &b->o.beta1_power, sizeof(double));
    CHECK_EQ_MEM(&a->o.beta2_power, &b->o.beta2_power, sizeof(double));
}

/* O-30 and O-31, with every optimizer and scale: nothing moves, all is counted. */
MPT_TEST(skipped_steps_leave_everything_untouched) {
    static run r, before;
    int kind, mode, i;
    for (kind = MPT_OPTIMIZER_SGD; kind <= MPT_OPTIMIZER_LARS; kind++) {
        for (mode = MPT_LOSS_SCALE_DYNAMIC; mode <= MPT_LOSS_SCALE_NONE; mode++) {
            mpt_loss_scaler_desc d = no_desc();
            d.mode = (mpt_loss_scale_mode)mode;
            d.init_scale = 4;
            run_open(&r, (mpt_optimizer_kind)kind, &d);
            for (i = 0; i < 4; i++) CHECK_EQ_INT(run_step(&r, i, 0), 0);
            before = r;
            for (i = 0; i < 4; i++) CHECK_EQ_INT(run_step(&r, i, poisons[i]), 1);
            check_untouched(&r, &before);
            CHECK_EQ_INT(r.scaler.num_skipped, 4);
            CHECK_EQ_INT(r.steps, 8);
            CHECK_EQ_INT(run_step(&r, 9, 0), 0);
            CHECK(memcmp(r.weights, before.weights, sizeof r.weights) != 0);
            run_close(&r);
        }
    }
}

/* O-33. Overflow at steps 2 and 3 of a warm-up of 10: applied steps see the rates and the t of a
   run without overflow, and as every scale is a power of two, the same bits come out. */
MPT_TEST(schedule_and_adam_count_applied_steps) {
    static run a, b;
    mpt_loss_scaler_desc d = no_desc();
    int i, batch = 0;
    run_open(&a, MPT_OPTIMIZER_ADAM, &d);
    run_open(&b, MPT_OPTIMIZER_ADAM, &d);
    for (i = 1; batch < 14; i++) {
        if (run_step(&b, batch, i == 2 || i == 3 ? 0x7f800000u : 0)) continue;
        CHECK_EQ_INT(run_step(&a, batch++, 0), 0);
        CHECK_EQ_INT(mpti_f32_bits(a.last_rate), mpti_f32_bits(b.last_rate));
        check_untouched(&a, &b);
    }
    CHECK_EQ_INT(b.scaler.num_skipped, 2);
    CHECK_EQ_INT(b.o.applied_steps, 14);
    CHECK_EQ_INT(b.steps, 16);
    CHECK_NEAR(b.scaler.scale, 16384, 0);
    run_close(&a);
    run_close(&b);
}

static void save_array(mpt_safetensors_writer *w, const char *name, mpt_dtype dtype, void *data,
                       int64_t n) {
    mpt_tensor t;
    memset(&t, 0, sizeof t);
    t.data = data;
    t.dtype = dtype;
    t.num_dims = 1;
    t.dims[0] = n;
    CHECK_EQ_INT(mpt_safetensors_writer_add(w, name, &t), MPT_OK);
}

/* O-49, the optimizer's and the scaler's part: 10 steps at once against 5, a file, and 5 more, with
   an overflow at step 3 and a scale that grows at step 8. */
MPT_TEST(a_run_cut_in_two_has_the_same_bits) {
    static run whole, part;
    int kind, i;
    for (kind = MPT_OPTIMIZER_SGD; kind <= MPT_OPTIMIZER_LARS; kind++) {
        mpt_loss_scaler_desc d = no_desc();
        mpt_safetensors_writer_desc wd;
        mpt_safetensors_writer *w = NULL;
        mpt_safetensors_desc rd;
        mpt_safetensors *s = NULL;
        mpt_loss_scaler saved;
        int64_t applied;
        d.growth_interval = 4;
        memset(&wd, 0, sizeof wd);
        memset(&rd, 0, sizeof rd);
        rd.path = wd.path = mpt_test_join(mpt_test_tmpdir(), "run.safetensors");
        wd.checksum = 1;
        run_open(&whole, (mpt_optimizer_kind)kind, &d);
        run_open(&part, (mpt_optimizer_kind)kind, &d);
        for (i = 1; i <= 10; i++) run_step(&whole, i, i == 3 ? 0x7fc00000u : 0);
        for (i = 1; i <= 5; i++) run_step(&part, i, i == 3 ? 0x7fc00000u : 0);
        CHECK_OK(part.ctx, mpt_safetensors_writer_open(part.ctx, &wd, &w));
        save_array(w, "weights", MPT_F32, part.weights, NUM_WEIGHTS);
        save_array(w, "optimizer.first", MPT_F32, part.first, NUM_WEIGHTS);
        save_array(w, "optimizer.second", MPT_F32, part.second, NUM_WEIGHTS);
        save_array(w, "optimizer.applied", MPT_I64, &part.o.applied_steps, 1);
        save_array(w, "scaler", MPT_U8, &part.scaler, sizeof part.scaler);
        CHECK_OK(part.ctx, mpt_safetensors_writer_finish(w));
        mpt_safetensors_writer_close(w);
        run_close(&part);
        run_open(&part, (mpt_optimizer_kind)kind, &d);
        CHECK_OK(part.ctx, mpt_safetensors_open(part.ctx, &rd, &s));
        CHECK_OK(part.ctx, mpt_safetensors_verify(s));
        CHECK_OK(part.ctx, mpt_safetensors_read(s, mpt_safetensors_find(s, "weights"), part.weights,
                                                sizeof part.weights));
        CHECK_OK(part.ctx, mpt_safetensors_read(s, mpt_safetensors_find(s, "optimizer.first"),
                                                part.first, sizeof part.first));
        CHECK_OK(part.ctx, mpt_safetensors_read(s, mpt_safetensors_find(s, "optimizer.second"),
                                                part.second, sizeof part.second));
        CHECK_OK(part.ctx, mpt_safetensors_read(s, mpt_safetensors_find(s, "optimizer.applied"),
                                                &applied, 8));
        CHECK_OK(part.ctx,
                 mpt_safetensors_read(s, mpt_safetensors_find(s, "scaler"), &saved, sizeof saved));
        mpt_safetensors_close(s);
        CHECK_OK(NULL, mpt_loss_scaler_restore(&part.scaler, &saved));
        mpti_optimizer_resume(&part.o, applied);
        for (i = 6; i <= 10; i++) run_step(&part, i, 0);
        check_untouched(&whole, &part);
        CHECK_EQ_MEM(&whole.scaler, &part.scaler, sizeof part.scaler);
        CHECK_NEAR(part.scaler.scale, 65536, 0); /* halved at 3, doubled after 4, 5, 6, 7 */
        run_close(&whole);
        run_close(&part);
    }
}

/* ---- autopsy --------------------------------------------------------------------------------- */
static mpt_tensor tensor_of(mpt_dtype dtype, void *data, int64_t rows, int64_t columns) {
    mpt_tensor t;
    memset(&t, 0, sizeof t);
    t.data = data;
    t.dtype = dtype;
    t.num_dims = 2;
    t.dims[0] = rows;
    t.dims[1] = columns;
    return t;
}

MPT_TEST(autopsy_of_half) {
    /* 0, 1, -2, inf, NaN, -inf, 65504, 2^-24 */
    uint16_t data[8] = {0, 0x3c00, 0xc000, 0x7c00, 0x7e00, 0xfc00, 0x7bff, 0x0001};
    mpt_tensor t = tensor_of(MPT_F16, data, 2, 4);
    mpt_autopsy a;
    int i;
    int64_t sum = 0;
    CHECK_OK(NULL, mpt_tensor_autopsy(&t, 1024, MPT_F16, &a));
    CHECK_EQ_INT(a.count, 8);
    CHECK_EQ_INT(a.num_inf, 2);
    CHECK_EQ_INT(a.num_nan, 1);
    CHECK_EQ_INT(a.num_zero, 1);
    CHECK_EQ_INT(a.first_bad, 3);
    CHECK_NEAR(a.max_abs, 65504, 0);
    for (i = 0; i < MPT_AUTOPSY_BUCKETS; i++) sum += a.histogram[i];
    CHECK_EQ_INT(sum, 4);
    CHECK_EQ_INT(a.histogram[40], 1); /* 1 */
    CHECK_EQ_INT(a.histogram[41], 1); /* 2 */
    CHECK_EQ_INT(a.histogram[55], 1); /* 65504 */
    CHECK_EQ_INT(a.histogram[16], 1); /* 2^-24 */
    CHECK_NEAR(a.largest_scale, 512, 0);
    CHECK_EQ_INT(a.largest_is_bound, 1);
    t = tensor_of(MPT_F16, data, 1, 3);
    CHECK_OK(NULL,
             mpt_tensor_autopsy(&t, 1000, MPT_F16, &a)); /* 0.002 at most: 2^24 fits, 2^25 not */
    CHECK_EQ_INT(a.first_bad, -1);
    CHECK_NEAR(a.largest_scale, 16777216, 0);
    CHECK_EQ_INT(a.largest_is_bound, 0);
    t = tensor_of(MPT_F16, data + 3, 1, 1);
    CHECK_OK(NULL, mpt_tensor_autopsy(&t, 1000, MPT_F16, &a)); /* 512 is the power of two below */
    CHECK_NEAR(a.largest_scale, 512, 0);
    t = tensor_of(MPT_F16, data + 4, 1, 1);
    CHECK_OK(NULL, mpt_tensor_autopsy(&t, 1000, MPT_F16, &a)); /* a NaN, which no scale cures */
    CHECK_NEAR(a.largest_scale, 0, 0);
}

/* For each exponent, the scale that is found fits, and twice that does not. */
MPT_TEST(autopsy_finds_the_largest_scale) {
    static const mpt_dtype storages[2] = {MPT_F16, MPT_BF16};
    int e, k;
    for (k = 0; k < 2; k++) {
        for (e = -60; e < 60; e++) {
            float data[3] = {0, from_bits((uint32_t)(e + 127) << 23 | 0x123456u), 0};
            mpt_tensor t = tensor_of(MPT_F32, data, 3, 1);
            double largest = k ? 3.3895313892515355e38 : 65504, truth = (double)data[1] / 4096;
            mpt_autopsy a;
            CHECK_OK(NULL, mpt_tensor_autopsy(&t, 4096, storages[k], &a));
            CHECK_EQ_INT(mpti_f32_bits(a.largest_scale) & 0x7fffff, 0);
            CHECK(truth * (double)a.largest_scale <= largest);
            CHECK(mpti_f32_bits(a.largest_scale) == 0x7f000000 ||
                  truth * 2 * (double)a.largest_scale > largest);
            CHECK_EQ_INT(a.histogram[e < -40 ? 0 : e > 23 ? 63 : e + 40], 1);
        }
    }
}

MPT_TEST(autopsy_of_other_types_and_nonsense) {
    uint16_t brain[3] = {0x3f80, 0xff80, 0x7fc1};
    float single[2] = {1e-45f, -3e38f};
    int32_t whole = 1;
    mpt_tensor t = tensor_of(MPT_BF16, brain, 3, 1);
    mpt_autopsy a;
    CHECK_OK(NULL, mpt_tensor_autopsy(&t, 1, MPT_BF16, &a));
    CHECK(a.num_inf == 1 && a.num_nan == 1 && a.first_bad == 1 && a.histogram[40] == 1);
    t = tensor_of(MPT_F32, single, 2, 1);
    single[0] = from_bits(1); /* subnormal: in the first bucket */
    CHECK_OK(NULL, mpt_tensor_autopsy(&t, 1, MPT_F32, &a));
    CHECK(a.histogram[0] == 1 && a.histogram[63] == 1 && a.num_zero == 0);
    t = tensor_of(MPT_F32, single, 0, 7); /* no elements: nothing wrong with them */
    CHECK_OK(NULL, mpt_tensor_autopsy(&t, 1, MPT_F16, &a));
    CHECK(a.count == 0 && a.first_bad == -1 && a.largest_scale > 1e38f);
    t = tensor_of(MPT_I32, &whole, 1, 1);
    CHECK_EQ_INT(mpt_tensor_autopsy(&t, 1, MPT_F16, &a), MPT_ERR_INVALID_ARGUMENT);
    t = tensor_of(MPT_F32, single, -1, 1);
    CHECK_EQ_INT(mpt_tensor_autopsy(&t, 1, MPT_F16, &a), MPT_ERR_INVALID_ARGUMENT);
    t = tensor_of(MPT_F32, single, INT64_MAX, 8);
    CHECK_EQ_INT(mpt_tensor_autopsy(&t, 1, MPT_F16, &a), MPT_ERR_INVALID_ARGUMENT);
    t = tensor_of(MPT_F32, single, 1, 1);
    CHECK_EQ_INT(mpt_tensor_autopsy(&t, 0, MPT_F16, &a), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_tensor_autopsy(&t, from_bits(0x7fc00000u), MPT_F16, &a),
                 MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_tensor_autopsy(&t, 1, MPT_U8, &a), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_tensor_autopsy(NULL, 1, MPT_F16, &a), MPT_ERR_INVALID_ARGUMENT);
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(defaults_are_resolved),
    MPT_TEST_CASE(trace_of_gradscaler),
    MPT_TEST_CASE(presets),
    MPT_TEST_CASE(growth_beyond_the_maximum_is_not_applied),
    MPT_TEST_CASE(minimum_and_stop_rule),
    MPT_TEST_CASE(fixed_scales_skip_too),
    MPT_TEST_CASE(desc_names_the_field),
    MPT_TEST_CASE(restore_goes_on_and_refuses_nonsense),
    MPT_TEST_CASE(skipped_steps_leave_everything_untouched),
    MPT_TEST_CASE(schedule_and_adam_count_applied_steps),
    MPT_TEST_CASE(a_run_cut_in_two_has_the_same_bits),
    MPT_TEST_CASE(autopsy_of_half),
    MPT_TEST_CASE(autopsy_finds_the_largest_scale),
    MPT_TEST_CASE(autopsy_of_other_types_and_nonsense),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
