/* test_optim.c - >>optim: update rules against PyTorch, the check of gradients, clipping, schedules
   Cases O-31 (part), O-32, O-35, O-36, O-42, O-43, O-44 (part). The values of
   optimizers.safetensors come from PyTorch in float64. */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "mpt_test.h"

static float from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* ---- an optimizer over buffers of its own ---------------------------------------------------- */
enum { MAX_WEIGHTS = 200000, MAX_SEGMENTS = 8 };
typedef struct bench {
    mpt_ctx *ctx;
    mpti_optimizer o;
    mpti_params p;
    mpti_parameter segments[MAX_SEGMENTS];
    int num_segments;
    size_t n;
    float gradients[MAX_WEIGHTS], weights[MAX_WEIGHTS], first[MAX_WEIGHTS], second[MAX_WEIGHTS];
    uint16_t half[MAX_WEIGHTS];
} bench;
static bench now;

static bench *bench_open(const mpt_optimizer_desc *desc, const size_t *counts, int num_weights,
                         int num_others, int threads) {
    bench *b = &now;
    mpt_ctx_desc cd;
    mpt_optimizer_desc d = *desc;
    int i;
    memset(b, 0, sizeof *b);
    memset(&cd, 0, sizeof cd);
    cd.num_threads = threads;
    CHECK_OK(NULL, mpt_ctx_create(&cd, &b->ctx));
    mpti_optimizer_desc_defaults(&d);
    CHECK_OK(b->ctx, mpti_optimizer_desc_check(&d, &b->ctx->error));
    b->num_segments = num_weights + num_others;
    for (i = 0; i < b->num_segments; i++) {
        b->segments[i] = mpti_parameter_make(&d, b->n, counts[i], i >= num_weights);
        b->n += counts[i];
    }
    CHECK(b->n <= MAX_WEIGHTS);
    b->p.weights = b->weights;
    b->p.gradients = b->gradients;
    b->p.first = b->first;
    b->p.second = b->second;
    b->p.half = b->half;
    b->p.half_dtype = MPT_F16;
    CHECK_OK(b->ctx, mpti_optimizer_open(&b->o, b->ctx, &d, b->segments, b->num_segments));
    return b;
}

static void bench_close(bench *b) {
    mpti_optimizer_close(&b->o);
    mpt_ctx_destroy(b->ctx);
}

/* check, clip, update; returns whether it was skipped. */
static bool bench_step(bench *b, float unscale, float rate, float *norm) {
    bool bad;
    float length, clip;
    CHECK_OK(b->ctx, mpti_gradients_check(&b->o, &b->p, unscale, &bad, &length));
    if (norm) *norm = length;
    if (bad) return true;
    clip = mpti_clip_factor(length, b->o.desc.max_grad_norm);
    CHECK_OK(b->ctx, mpti_optimizer_update(&b->o, &b->p, unscale, clip, rate));
    return false;
}

static mpt_optimizer_desc desc_of(mpt_optimizer_kind kind, float rate) {
    mpt_optimizer_desc d;
    memset(&d, 0, sizeof d);
    d.kind = kind;
    d.learning_rate = rate;
    return d;
}

static void fill(float *x, size_t n, uint64_t seed, float size) {
    size_t i;
    for (i = 0; i < n; i++) {
        uint32_t r[4];
        mpti_random4(seed, 0, i, 0, MPTI_RANDOM_SHUFFLE, r);
        x[i] = ((float)(r[0] >> 8) / 8388608.0f - 1) * size;
    }
}

/* ---- values from PyTorch --------------------------------------------------------------------- */
static void load(bench *b, mpt_safetensors *s, const char *format, const char *name, int step,
                 float *dst) {
    char text[64];
    snprintf(text, sizeof text, format, name, step, 0);
    CHECK_OK(b->ctx, mpt_safetensors_read(s, mpt_safetensors_find(s, text), dst, 15 * 4));
    snprintf(text, sizeof text, format, name, step, 1);
    CHECK_OK(b->ctx, mpt_safetensors_read(s, mpt_safetensors_find(s, text), dst + 15, 4 * 4));
}

static void compare_with_pytorch(const char *name, const mpt_optimizer_desc *desc) {
    static const size_t counts[2] = {15, 4};
    bench *b = bench_open(desc, counts, 1, 1, 2);
    mpt_safetensors_desc sd;
    mpt_safetensors *s = NULL;
    float expected[19];
    double largest = 1;
    int step, i;
    memset(&sd, 0, sizeof sd);
    sd.path = mpt_test_data("optimizers.safetensors");
    CHECK_OK(b->ctx, mpt_safetensors_open(b->ctx, &sd, &s));
    CHECK_EQ_INT(mpt_safetensors_count(s), 252);
    load(b, s, "%s.%d.p%d", name, 0, b->weights);
    for (step = 1; step <= 10; step++) {
        load(b, s, "%s.%d.g%d", name, step, b->gradients);
        CHECK(!bench_step(b, 1, desc->learning_rate, NULL));
        load(b, s, "%s.%d.p%d", name, step, expected);
        /* ten updates round ten times, each within 6e-8 of the largest weight */
        for (i = 0; i < 19; i++) largest = fmax(largest, fabs((double)expected[i]));
        for (i = 0; i < 19; i++) CHECK_NEAR(b->weights[i], expected[i], 1e-6 * largest);
        for (i = 0; i < 19; i++) CHECK_EQ_INT(b->half[i], mpt_f32_to_f16(b->weights[i]));
    }
    mpt_safetensors_close(s);
    bench_close(b);
}

MPT_TEST(sgd_as_pytorch) {
    mpt_optimizer_desc d = desc_of(MPT_OPTIMIZER_SGD, 0.1f);
    compare_with_pytorch("sgd", &d);
}

MPT_TEST(momentum_as_pytorch) {
    mpt_optimizer_desc d = desc_of(MPT_OPTIMIZER_DEFAULT, 0.1f);
    d.weight_decay = 0.01f;
    compare_with_pytorch("sgd_momentum_wd", &d);
}

MPT_TEST(nesterov_as_pytorch) {
    mpt_optimizer_desc d = desc_of(MPT_OPTIMIZER_SGD_NESTEROV, 0.1f);
    d.weight_decay = 0.01f;
    compare_with_pytorch("sgd_nesterov", &d);
}

MPT_TEST(adam_as_pytorch) {
    mpt_optimizer_desc d = desc_of(MPT_OPTIMIZER_ADAM, 0.01f);
    compare_with_pytorch("adam", &d);
}

MPT_TEST(adamw_as_pytorch) {
    mpt_optimizer_desc d = desc_of(MPT_OPTIMIZER_ADAMW, 0.01f);
    d.weight_decay = 0.05f;
    compare_with_pytorch("adamw", &d);
}

MPT_TEST(lars_as_reference) {
    mpt_optimizer_desc d = desc_of(MPT_OPTIMIZER_LARS, 1);
    d.lars_trust = 0.02f;
    d.weight_decay = 1e-4f;
    compare_with_pytorch("lars", &d);
}

/* Adam's L2 decay is not in the reference values: one step by hand, w = 1, g = 0, d = 0.1. */
MPT_TEST(adam_decay_goes_through_the_moments) {
    static const size_t counts[1] = {1};
    mpt_optimizer_desc d = desc_of(MPT_OPTIMIZER_ADAM, 0.01f);
    bench *b;
    d.weight_decay = 0.1f;
    b = bench_open(&d, counts, 1, 0, 1);
    b->weights[0] = 1;
    CHECK(!bench_step(b, 1, 0.01f, NULL));
    CHECK_NEAR(b->weights[0], 0.99, 1e-6); /* m/sqrt(v) of a first step is 1, whatever d */
    CHECK_NEAR(b->first[0], 0.01, 1e-8);   /* (1 - beta1) 0.1 */
    CHECK_NEAR(b->second[0], 1e-5, 1e-9);  /* (1 - beta2) 0.01; 1 - beta2 in FP32 */
    bench_close(b);
}

/* ---- flags of tensors ------------------------------------------------------------------------ */
MPT_TEST(decay_of_bn_and_bias_is_a_choice) {
    static const size_t counts[2] = {1, 1};
    static const mpt_optimizer_kind kinds[5] = {MPT_OPTIMIZER_SGD, MPT_OPTIMIZER_SGD_MOMENTUM,
                                                MPT_OPTIMIZER_SGD_NESTEROV, MPT_OPTIMIZER_ADAM,
                                                MPT_OPTIMIZER_ADAMW};
    int k, choice;
    for (k = 0; k < 5; k++) {
        for (choice = 0; choice < 2; choice++) {
            mpt_optimizer_desc d = desc_of(kinds[k], 0.1f);
            bench *b;
            d.weight_decay = 0.5f;
            d.no_decay_on_bn_and_bias = choice;
            b = bench_open(&d, counts, 1, 1, 1);
            b->weights[0] = b->weights[1] = 1;
            CHECK(!bench_step(b, 1, 0.1f, NULL)); /* gradient 0: only decay moves anything */
            CHECK(b->weights[0] < 0.99f);
            CHECK_EQ_INT(b->weights[1] < 0.99f, !choice);
            bench_close(b);
        }
    }
}

/* O-42. Weight 0 and gradient 1: it moves by the rate. Gradient 0: no NaN. Bias: plain momentum. */
MPT_TEST(lars_with_zero_norms) {
    static const size_t counts[3] = {4, 4, 4};
    mpt_optimizer_desc d = desc_of(MPT_OPTIMIZER_LARS, 0.5f);
    bench *b;
    int i;
    d.weight_decay = 0.25f;
    b = bench_open(&d, counts, 2, 1, 1);
    for (i = 0; i < 4; i++) {
        b->gradients[i] = 1;
        b->weights[4 + i] = 1; /* its gradient is 0 */
        b->weights[8 + i] = 1; /* the bias */
        b->gradients[8 + i] = 1;
    }
    CHECK(!bench_step(b, 1, 0.5f, NULL));
    for (i = 0; i < 4; i++) {
        CHECK_NEAR(b->weights[i], -0.5, 0);      /* exact in binary */
        CHECK_NEAR(b->weights[4 + i], 0.875, 0); /* ratio 1: 1 - 0.5 * 0.25 */
        CHECK_NEAR(b->weights[8 + i], 0.5, 0);   /* no decay, no ratio */
    }
    bench_close(b);
    d.lars_ratio_on_bn_and_bias = 1;
    b = bench_open(&d, counts, 2, 1, 1);
    CHECK(b->segments[2].adapts && b->segments[2].decays);
    bench_close(b);
    d.no_decay_on_bn_and_bias = 1;
    b = bench_open(&d, counts, 2, 1, 1);
    CHECK(b->segments[2].adapts && !b->segments[2].decays && b->segments[0].decays);
    bench_close(b);
}

/* The ratio sees the clipped gradient: clipping by 10 makes LARS's step the same, SGD's a tenth. */
MPT_TEST(lars_ratio_is_of_the_clipped_gradient) {
    static const size_t counts[1] = {2};
    mpt_optimizer_desc d = desc_of(MPT_OPTIMIZER_LARS, 1);
    float moved[2];
    int i;
    for (i = 0; i < 2; i++) {
        bench *b;
        d.max_grad_norm = i ? 0.5f : 0;
        b = bench_open(&d, counts, 1, 0, 1);
        b->weights[0] = 3;
        b->weights[1] = 4;
        b->gradients[0] = 3;
        b->gradients[1] = 4;
        CHECK(!bench_step(b, 1, 1, NULL));
        moved[i] = 3 - b->weights[0];
        bench_close(b);
    }
    CHECK_NEAR(moved[0], 0.003, 1e-6); /* 0.001 * 5 / 5 * 3 */
    CHECK_NEAR(moved[1], moved[0], 1e-6);
}

/* ---- the check ------------------------------------------------------------------------------- */
/* O-31 and more: one inf or NaN of any sign and payload, anywhere, is found, at any scale. */
MPT_TEST(check_finds_every_nonfinite) {
    static const size_t counts[3] = {20000, 3, 40000};
    static const uint32_t bad[6] = {0x7f800000u, 0xff800000u, 0x7fc00000u,
                                    0xffc00000u, 0x7f800001u, 0xffbfffffu};
    static const size_t places[8] = {0, 7, 16383, 16384, 19999, 20001, 20003, 60002};
    static const float scales[3] = {1, 1.0f / 65536, 64};
    mpt_optimizer_desc d = desc_of(MPT_OPTIMIZER_SGD, 0.1f);
    bench *b = bench_open(&d, counts, 3, 0, 2);
    float norm;
    bool found;
    int i, k, s;
    fill(b->gradients, b->n, 5, 1);
    for (s = 0; s < 3; s++) {
        CHECK_OK(b->ctx, mpti_gradients_check(&b->o, &b->p, scales[s], &found, &norm));
        CHECK(!found && norm > 0);
        for (i = 0; i < 8; i++) {
            for (k = 0; k < 6; k++) {
                float kept = b->gradients[places[i]];
                memcpy(&b->gradients[places[i]], &bad[k], 4);
                CHECK_OK(b->ctx, mpti_gradients_check(&b->o, &b->p, scales[s], &found, &norm));
                b->gradients[places[i]] = kept;
                CHECK(found);
                CHECK_EQ_INT(mpti_f32_bits(norm), 0);
            }
        }
    }
    bench_close(b);
}

/* A finite sum that overflows when it is unscaled by a scale below 1. */
MPT_TEST(check_finds_overflow_of_unscaling) {
    static const size_t counts[1] = {9};
    mpt_optimizer_desc d = desc_of(MPT_OPTIMIZER_SGD, 0.1f);
    bench *b = bench_open(&d, counts, 1, 0, 1);
    float norm;
    bool found;
    b->gradients[8] = 3e38f;
    CHECK_OK(b->ctx, mpti_gradients_check(&b->o, &b->p, 1, &found, &norm));
    CHECK(!found);
    CHECK_NEAR(norm / 3e38, 1, 1e-6); /* its square is beyond FP32 */
    CHECK_OK(b->ctx, mpti_gradients_check(&b->o, &b->p, 64, &found, &norm));
    CHECK(found);
    b->gradients[8] = 1e-30f;
    CHECK_OK(b->ctx, mpti_gradients_check(&b->o, &b->p, 1, &found, &norm));
    CHECK_NEAR(norm * 1e30, 1, 1e-6); /* its square is below FP32 */
    bench_close(b);
}

/* O-32. The norm is of the unscaled gradient, and clipping acts on that. */
MPT_TEST(clipping_comes_after_unscaling) {
    static const size_t counts[1] = {2};
    static const float limits[3] = {10, 1, 0};
    static const float expected[3][2] = {{3, 4}, {0.6f, 0.8f}, {3, 4}};
    int i;
    for (i = 0; i < 3; i++) {
        mpt_optimizer_desc d = desc_of(MPT_OPTIMIZER_SGD, 1);
        bench *b;
        float norm;
        d.max_grad_norm = limits[i];
        b = bench_open(&d, counts, 1, 0, 1);
        b->gradients[0] = 3 * 1024;
        b->gradients[1] = 4 * 1024;
        CHECK(!bench_step(b, 1.0f / 1024, 1, &norm));
        CHECK_NEAR(norm, 5, 0);
        CHECK_NEAR(-b->weights[0], expected[i][0], 1e-6); /* PyTorch's 1e-6 beside the norm */
        CHECK_NEAR(-b->weights[1], expected[i][1], 1e-6);
        bench_close(b);
    }
}

/* O-44, the optimizer's part: sums of k microbatches, divided by all records, clipped as one. */
MPT_TEST(accumulated_gradients_equal_one_batch) {
    static const size_t counts[1] = {3};
    static const int parts[3] = {1, 4, 8};
    float x[32][3], y[32], result[3][3];
    int i, j, k, m;
    fill(&x[0][0], 96, 1, 1);
    fill(y, 32, 2, 1);
    for (k = 0; k < 3; k++) {
        mpt_optimizer_desc d = desc_of(MPT_OPTIMIZER_SGD, 0.5f);
        bench *b;
        d.max_grad_norm = 0.05f;
        b = bench_open(&d, counts, 1, 0, 1);
        for (m = 0; m < parts[k]; m++) {
            float sum[3] = {0, 0, 0};
            for (i = m * 32 / parts[k]; i < (m + 1) * 32 / parts[k];
                 i++) /* mean of (w x - y)^2 / 2 */
                for (j = 0; j < 3; j++) sum[j] += 1024 * (0 - y[i]) * x[i][j];
            for (j = 0; j < 3; j++) b->gradients[j] += sum[j];
        }
        CHECK(!bench_step(b, 1.0f / (1024 * 32), 0.5f, NULL));
        memcpy(result[k], b->weights, sizeof result[k]);
        bench_close(b);
    }
    for (j = 0; j < 3; j++) CHECK_NEAR(result[0][j], result[1][j], 1e-6);
    for (j = 0; j < 3; j++) CHECK_NEAR(result[0][j], result[2][j], 1e-6);
    CHECK_NEAR(sqrtf(result[0][0] * result[0][0] + result[0][1] * result[0][1] +
                     result[0][2] * result[0][2]),
               0.5 * 0.05, 1e-5); /* it was clipped, as a whole */
}

/* ---- bits ------------------------------------------------------------------------------------ */
MPT_TEST(threads_change_no_bit) {
    static const size_t counts[6] = {70000, 1, 16384, 50001, 64, 7};
    static const int threads[3] = {1, 2, 5};
    static float kept[MAX_WEIGHTS];
    int kind, t, step;
    for (kind = MPT_OPTIMIZER_SGD; kind <= MPT_OPTIMIZER_LARS; kind++) {
        float norms[3];
        for (t = 0; t < 3; t++) {
            mpt_optimizer_desc d = desc_of((mpt_optimizer_kind)kind, 0.1f);
            bench *b;
            d.weight_decay = 0.01f;
            d.max_grad_norm = 1;
            b = bench_open(&d, counts, 4, 2, threads[t]);
            fill(b->weights, b->n, 3, 1);
            for (step = 0; step < 3; step++) {
                fill(b->gradients, b->n, 10 + (uint64_t)step, 100);
                CHECK(!bench_step(b, 1.0f / 32, 0.1f, &norms[t]));
            }
            CHECK_EQ_INT(mpti_f32_bits(norms[t]), mpti_f32_bits(norms[0]));
            if (t == 0) memcpy(kept, b->weights, sizeof kept);
            else CHECK_EQ_MEM(kept, b->weights, sizeof kept);
            bench_close(b);
        }
    }
}

/* Where the chunks' borders lie changes nothing for one weight: a tensor of three chunks against
   the same numbers one by one. */
MPT_TEST(chunks_cover_every_weight_once) {
    static const size_t counts[3] = {40000, 16384, 5};
    mpt_optimizer_desc d = desc_of(MPT_OPTIMIZER_SGD, 1);
    bench *b = bench_open(&d, counts, 3, 0, 1);
    size_t i;
    CHECK_EQ_INT(b->o.num_chunks, 3 + 1 + 1);
    for (i = 0; i < b->n; i++) b->gradients[i] = (float)i;
    CHECK(!bench_step(b, 1, 1, NULL));
    for (i = 0; i < b->n; i++) CHECK_NEAR(b->weights[i], -(double)i, 0);
    for (; i < b->n + 64; i++) CHECK(b->weights[i] == 0 && b->half[i] == 0);
    bench_close(b);
}

/* A resumed run has the powers of beta of one that never stopped, also when they have become 0. */
MPT_TEST(powers_of_beta_resume_exactly) {
    static const size_t counts[1] = {1};
    mpt_optimizer_desc d = desc_of(MPT_OPTIMIZER_ADAM, 0.1f);
    bench *b;
    mpti_optimizer other;
    int step;
    d.beta2 = 0.99f;
    b = bench_open(&d, counts, 1, 0, 1);
    other = b->o;
    for (step = 1; step <= 100000; step++) {
        mpti_optimizer_advance(&b->o);
        if (step % 9973 != 1) continue;
        mpti_optimizer_resume(&other, step);
        CHECK_EQ_INT(other.applied_steps, b->o.applied_steps);
        CHECK_EQ_MEM(&other.beta1_power, &b->o.beta1_power, sizeof(double));
        CHECK_EQ_MEM(&other.beta2_power, &b->o.beta2_power, sizeof(double));
    }
    CHECK(b->o.beta2_power < 1e-300);
    bench_close(b);
}

/* O-35. Updates below half a step of FP16 add up in the master; the copy follows. */
MPT_TEST(small_updates_reach_the_half_copy) {
    static const size_t counts[1] = {1};
    mpt_optimizer_desc d = desc_of(MPT_OPTIMIZER_SGD, 1e-4f);
    bench *b = bench_open(&d, counts, 1, 0, 1);
    float only_half = 1;
    int step, kind;
    b->weights[0] = 1;
    b->gradients[0] = 1;
    for (step = 0; step < 100; step++) {
        CHECK(!bench_step(b, 1, 1e-4f, NULL));
        only_half = mpt_f16_to_f32(mpt_f32_to_f16(only_half - 1e-4f));
    }
    CHECK_NEAR(b->weights[0], 0.99, 1e-5);
    CHECK_NEAR(mpt_f16_to_f32(b->half[0]), 0.99, 1.0 / 2048); /* one step of FP16 below 1 */
    CHECK_NEAR(only_half, 1, 0);                              /* what would have happened */
    for (kind = 0; kind < 2; kind++) {
        b->p.half_dtype = kind ? MPT_BF16 : MPT_F16;
        CHECK(!bench_step(b, 1, 1e-4f, NULL));
        CHECK_EQ_INT(b->half[0],
                     kind ? mpt_f32_to_bf16(b->weights[0]) : mpt_f32_to_f16(b->weights[0]));
    }
    bench_close(b);
}

/* O-36. Gradient 0 for three steps: nothing moves. 1e-8, 0 in FP16, at scale 65536: it moves. */
MPT_TEST(adam_epsilon_is_not_half) {
    static const size_t counts[1] = {2};
    mpt_optimizer_desc d = desc_of(MPT_OPTIMIZER_ADAM, 0.01f);
    bench *b = bench_open(&d, counts, 1, 0, 1);
    int step;
    b->weights[0] = b->weights[1] = 1;
    for (step = 0; step < 3; step++) CHECK(!bench_step(b, 1.0f / 65536, 0.01f, NULL));
    CHECK_NEAR(b->weights[0], 1, 0);
    CHECK_NEAR(b->weights[1], 1, 0);
    CHECK_EQ_INT(mpt_f32_to_f16(1e-8f), 0);
    b->gradients[0] = mpt_f16_to_f32(mpt_f32_to_f16(1e-8f * 65536));
    CHECK(!bench_step(b, 1.0f / 65536, 0.01f, NULL));
    CHECK(b->weights[0] < 0.9999f && b->weights[0] > 0.9f);
    CHECK_NEAR(b->weights[1], 1, 0);
    bench_close(b);
}

/* ---- descs ----------------------------------------------------------------------------------- */
static void refuse(const char *field, mpt_optimizer_desc d) {
    mpt_error err;
    mpti_optimizer_desc_defaults(&d);
    CHECK_EQ_INT(mpti_optimizer_desc_check(&d, &err), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(err.message, field);
}

MPT_TEST(optimizer_desc_names_the_field) {
    mpt_optimizer_desc good = desc_of(MPT_OPTIMIZER_DEFAULT, 0.1f), d = good;
    mpti_optimizer_desc_defaults(&d);
    CHECK_EQ_INT(d.kind, MPT_OPTIMIZER_SGD_MOMENTUM);
    CHECK_NEAR(d.momentum, 0.9f, 0);
    CHECK_NEAR(d.beta2, 0.999f, 0);
    CHECK_NEAR(d.epsilon, 1e-8f, 0);
    CHECK_NEAR(d.lars_trust, 0.001f, 0);
    CHECK_EQ_INT(mpti_optimizer_desc_check(&d, NULL), MPT_OK);
    d = good, d.learning_rate = 0, refuse("learning_rate", d);
    d = good, d.learning_rate = -1, refuse("learning_rate", d);
    d = good, d.learning_rate = from_bits(0x7fc00000u), refuse("learning_rate", d);
    d = good, d.momentum = 1, refuse("momentum", d);
    d = good, d.momentum = -0.1f, refuse("momentum", d);
    d = good, d.beta1 = 1, refuse("beta1", d);
    d = good, d.beta2 = 1.5f, refuse("beta2", d);
    d = good, d.epsilon = -1, refuse("epsilon", d);
    d = good, d.weight_decay = -1e-4f, refuse("weight_decay", d);
    d = good, d.max_grad_norm = from_bits(0x7f800000u), refuse("max_grad_norm", d);
    d = good, d.lars_trust = -1, refuse("lars_trust", d);
    d = good, d.kind = (mpt_optimizer_kind)7, refuse("kind", d);
}

MPT_TEST(optimizer_without_memory) {
    int64_t n;
    for (n = 3; n < 6; n++) { /* 1 is the context, 2 its backend */
        mpt_test_allocator memory;
        mpt_ctx_desc cd;
        mpt_ctx *ctx = NULL;
        mpti_optimizer o;
        mpti_parameter segment;
        mpt_optimizer_desc d = desc_of(MPT_OPTIMIZER_SGD, 0.1f);
        memset(&cd, 0, sizeof cd);
        mpt_test_allocator_init(&memory, n, 0);
        cd.allocator = memory.hooks;
        CHECK_OK(NULL, mpt_ctx_create(&cd, &ctx));
        segment = mpti_parameter_make(&d, 0, 100, false);
        CHECK_EQ_INT(mpti_optimizer_open(&o, ctx, &d, &segment, 1),
                     n < 5 ? MPT_ERR_OUT_OF_MEMORY : MPT_OK);
        mpti_optimizer_close(&o);
        mpt_ctx_destroy(ctx);
        CHECK_NO_LEAK(&memory);
    }
}

/* ---- schedules ------------------------------------------------------------------------------- */
static const double pi = 3.14159265358979323846;

static mpt_schedule_desc schedule_of(mpt_schedule_kind kind) {
    mpt_schedule_desc d;
    memset(&d, 0, sizeof d);
    d.kind = kind;
    return d;
}

/* Against libm, which is right to 2^-52 here; the bound is the one stated at the function. */
MPT_TEST(half_cosine_keeps_its_bound) {
    const double bound = 1.0 / ((int64_t)1 << 50);
    int i;
#ifdef __FAST_MATH__
    SKIP("-ffast-math makes no promise on bits");
#endif
    for (i = 0; i <= 100000; i++) {
        double u = i / 100000.0, s = sin(pi * (1 - u) / 2);
        CHECK_NEAR(mpti_half_cosine(u), (1 + cos(pi * u)) / 2, bound);
        if (u > 0.5) CHECK_NEAR(mpti_half_cosine(u), s * s, bound * s * s);
    }
    CHECK_NEAR(mpti_half_cosine(0), 1, 0);
    CHECK_NEAR(mpti_half_cosine(1), 0, 0);
}

/* Rates are FP32 numbers: each expectation within 3 roundings of 6e-8 of the peak. */
MPT_TEST(schedules_follow_their_formulas) {
    static const int64_t milestones[3] = {30, 60, 80};
    mpt_schedule_desc d;
    int s;
    d = schedule_of(MPT_SCHEDULE_CONSTANT);
    for (s = 0; s < 200; s++) CHECK_NEAR(mpt_schedule_rate(&d, 0.1f, s, 100), 0.1f, 0);
    d = schedule_of(MPT_SCHEDULE_STEP);
    d.milestones = milestones;
    d.num_milestones = 3;
    for (s = 0; s < 120; s++)
        CHECK_NEAR(mpt_schedule_rate(&d, 2, s, 100),
                   2 * (s < 30   ? 1
                        : s < 60 ? 0.1
                        : s < 80 ? 0.01
                                 : 0.001),
                   4e-7);
    d.num_milestones = 0;
    d.decay_every = 7;
    d.decay_factor = 0.5f;
    for (s = 0; s < 120; s++) CHECK_NEAR(mpt_schedule_rate(&d, 2, s, 100), 2 * pow(0.5, s / 7), 0);
    d = schedule_of(MPT_SCHEDULE_COSINE);
    d.warmup_steps = 10;
    d.end_factor = 0.25f;
    for (s = 10; s < 130; s++)
        CHECK_NEAR(mpt_schedule_rate(&d, 2, s, 110),
                   2 * (0.25 + 0.75 * (1 + cos(pi * (s < 110 ? s - 10 : 100) / 100.0)) / 2), 4e-7);
    d = schedule_of(MPT_SCHEDULE_POLY);
    d.warmup_steps = 10;
    for (s = 10; s < 130; s++)
        CHECK_NEAR(mpt_schedule_rate(&d, 2, s, 110), 2 * pow(s < 110 ? (110 - s) / 100.0 : 0, 2),
                   4e-7);
    d.poly_power = 1;
    CHECK_NEAR(mpt_schedule_rate(&d, 2, 85, 110), 0.5, 4e-7);
}

/* torch.optim.lr_scheduler.OneCycleLR(max_lr=1, total_steps=N), cosine, two phases. */
static double one_cycle_of_pytorch(int step, int n) {
    double up = 0.3 * n - 1, down = n - 1, start = 1.0 / 25, end = start / 1e4;
    if (step <= up) return 1 + (start - 1) / 2 * (cos(pi * step / up) + 1);
    return end + (1 - end) / 2 * (cos(pi * (step - up) / (down - up)) + 1);
}

MPT_TEST(one_cycle_as_pytorch) {
    mpt_schedule_desc d = schedule_of(MPT_SCHEDULE_ONE_CYCLE);
    int n, s;
    /* 0.3 as FP32 is off by 4e-8 of itself, which moves the peak by that many steps */
    for (n = 7; n < 300; n += 13)
        for (s = 0; s < n; s++)
            CHECK_NEAR(mpt_schedule_rate(&d, 1, s, n), one_cycle_of_pytorch(s, n), 2e-6);
    d.warmup_steps = 4; /* leads to the cycle's start */
    CHECK_NEAR(mpt_schedule_rate(&d, 1, 3, 104), 0.04 * 4 / 5, 1e-7);
    CHECK_NEAR(mpt_schedule_rate(&d, 1, 4, 104), 0.04, 1e-7);
    for (n = 1; n < 7; n++) /* too short to have a rise: still finite, and at the peak or below */
        for (s = 0; s <= n + 1; s++) {
            d.warmup_steps = 0;
            CHECK(mpti_is_within(mpt_schedule_rate(&d, 1, s, n), 0, 1));
        }
}

/* O-43. Base 0.1 at 256; 8 ranks x 256 x accumulation 2. Warm-up never falls and ends exactly. */
MPT_TEST(warm_up_ends_at_the_scaled_rate) {
    float peak = mpt_learning_rate_scale(0.1f, 8 * 256 * 2, 256), before = 0;
    int kind, s;
    CHECK_NEAR(peak, 1.6f, 0);
    CHECK_NEAR(mpt_learning_rate_scale(0.1f, 256, 256), 0.1f, 0);
    CHECK_NEAR(mpt_learning_rate_scale(0.1f, 0, 256), 0, 0);
    CHECK_NEAR(mpt_learning_rate_scale(0.1f, 256, 0), 0, 0);
    for (kind = MPT_SCHEDULE_CONSTANT; kind <= MPT_SCHEDULE_POLY; kind++) {
        mpt_schedule_desc d = schedule_of((mpt_schedule_kind)kind);
        d.warmup_steps = 50;
        d.decay_every = kind == MPT_SCHEDULE_STEP ? 100 : 0;
        CHECK_NEAR(mpt_schedule_rate(&d, peak, 0, 200), peak / 51, 1e-6); /* never 0 */
        for (s = 0, before = 0; s <= 50; s++) {
            float rate = mpt_schedule_rate(&d, peak, s, 200);
            CHECK(rate > before);
            before = rate;
        }
        CHECK_NEAR(before, 1.6f, 0);
        d.warmup_start = 0.5f;
        CHECK_NEAR(mpt_schedule_rate(&d, 1, 24, 200), 0.5 + 0.5 * 25 / 51, 1e-6);
    }
}

/* The same bits on every machine and with every compiler: a checksum of 4000 rates. */
MPT_TEST(schedules_have_the_same_bits_everywhere) {
    uint32_t crc = 0;
    int kind, s, i;
#ifdef __FAST_MATH__
    SKIP("-ffast-math makes no promise on bits");
#endif
    for (kind = MPT_SCHEDULE_COSINE; kind <= MPT_SCHEDULE_ONE_CYCLE; kind++) {
        mpt_schedule_desc d = schedule_of((mpt_schedule_kind)kind);
        d.warmup_steps = 17;
        d.end_factor = 0.013f;
        for (s = 0; s < 1333; s++) {
            uint32_t bits = mpti_f32_bits(mpt_schedule_rate(&d, 0.137f, s, 1333));
            uint8_t bytes[4];
            for (i = 0; i < 4; i++) bytes[i] = (uint8_t)(bits >> 8 * i);
            crc = mpt_crc32c(crc, bytes, 4);
        }
    }
    CHECK_EQ_INT(crc, 3366831573u);
}

static void refuse_schedule(const char *field, mpt_schedule_desc d, int64_t total) {
    mpt_ctx *ctx = NULL;
    CHECK_OK(NULL, mpt_ctx_create(NULL, &ctx));
    CHECK_RESULT(ctx, mpt_schedule_check(ctx, &d, total), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, field);
    CHECK_EQ_INT(mpt_schedule_check(NULL, &d, total), MPT_ERR_INVALID_ARGUMENT);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(schedule_desc_names_the_field) {
    static const int64_t falling[2] = {5, 5};
    mpt_schedule_desc good = schedule_of(MPT_SCHEDULE_COSINE), d;
    CHECK_OK(NULL, mpt_schedule_check(NULL, &good, 10));
    refuse_schedule("total_steps", good, 0);
    d = schedule_of(MPT_SCHEDULE_CONSTANT);
    CHECK_OK(NULL, mpt_schedule_check(NULL, &d, 0));
    d = good, d.warmup_steps = 10, refuse_schedule("warmup_steps", d, 10);
    d = good, d.warmup_steps = -1, refuse_schedule("warmup_steps", d, 10);
    d = good, d.kind = (mpt_schedule_kind)5, refuse_schedule("kind", d, 10);
    d = good, d.end_factor = 1.5f, refuse_schedule("end_factor", d, 10);
    d = good, d.warmup_start = from_bits(0x7fc00000u), refuse_schedule("warmup_start", d, 10);
    d = good, d.poly_power = 17, refuse_schedule("poly_power", d, 10);
    d = good, d.pct_start = 1, refuse_schedule("pct_start", d, 10);
    d = good, d.div_factor = 0.5f, refuse_schedule("div_factor", d, 10);
    d = good, d.decay_factor = 2, refuse_schedule("decay_factor", d, 10);
    d = schedule_of(MPT_SCHEDULE_STEP);
    refuse_schedule("milestones", d, 10);
    d.milestones = falling, d.num_milestones = 2, refuse_schedule("ascend", d, 10);
    d.num_milestones = 1, d.decay_every = 3, refuse_schedule("not both", d, 10);
    CHECK_EQ_INT(mpt_schedule_check(NULL, NULL, 10), MPT_ERR_INVALID_ARGUMENT);
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(sgd_as_pytorch),
    MPT_TEST_CASE(momentum_as_pytorch),
    MPT_TEST_CASE(nesterov_as_pytorch),
    MPT_TEST_CASE(adam_as_pytorch),
    MPT_TEST_CASE(adamw_as_pytorch),
    MPT_TEST_CASE(lars_as_reference),
    MPT_TEST_CASE(adam_decay_goes_through_the_moments),
    MPT_TEST_CASE(decay_of_bn_and_bias_is_a_choice),
    MPT_TEST_CASE(lars_with_zero_norms),
    MPT_TEST_CASE(lars_ratio_is_of_the_clipped_gradient),
    MPT_TEST_CASE(check_finds_every_nonfinite),
    MPT_TEST_CASE(check_finds_overflow_of_unscaling),
    MPT_TEST_CASE(clipping_comes_after_unscaling),
    MPT_TEST_CASE(accumulated_gradients_equal_one_batch),
    MPT_TEST_CASE(threads_change_no_bit),
    MPT_TEST_CASE(chunks_cover_every_weight_once),
    MPT_TEST_CASE(powers_of_beta_resume_exactly),
    MPT_TEST_CASE(small_updates_reach_the_half_copy),
    MPT_TEST_CASE(adam_epsilon_is_not_half),
    MPT_TEST_CASE(optimizer_desc_names_the_field),
    MPT_TEST_CASE(optimizer_without_memory),
    MPT_TEST_CASE(half_cosine_keeps_its_bound),
    MPT_TEST_CASE(schedules_follow_their_formulas),
    MPT_TEST_CASE(one_cycle_as_pytorch),
    MPT_TEST_CASE(warm_up_ends_at_the_scaled_rate),
    MPT_TEST_CASE(schedules_have_the_same_bits_everywhere),
    MPT_TEST_CASE(schedule_desc_names_the_field),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
