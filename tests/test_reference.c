/* test_reference.c - >>train: ResNet-20 against PyTorch, whole: logits, gradients, five steps

   Weights, logits, gradients and losses of resnet20.*.safetensors come from PyTorch in float64.
   What FP32 can and can't do there: in the first step a ReLU in the last block has -8.7e-7 before
   it, in the second another one 3.6e-8, while rounding puts about 2e-6 on such numbers. Whether
   these gates open is chance, and a gate decides about gradients in the second digit: PyTorch's own
   FP32, with pictures changed in their last bit, keeps the fifth loss to 1e-4 in one run of eight.
   So gradients and later losses are compared with a pass in double precision (double_net.h) that
   takes the trainer's gates, and may differ in its own only that near to zero. With its own gates
   it has to give PyTorch's numbers. */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "mpt_test.h"
#include "reference.h"
#include "training.h"
#include "double_net.h"

static const double losses[] = {2.3451362804574125, 1.6117906070352526, 1.0860671349325384,
                                0.6536592559929327, 0.2960599665728882};
enum { BATCH = 8, STEPS = 5 };

typedef struct bench {
    rig r;
    reference_file f;
    reference_tensor x;
    int32_t labels[BATCH];
    mpt_batch b;
} bench;

/* Returns 0 if this processor lacks the family. */
static int bench_open(bench *b, const char *family, mpt_precision precision) {
    rig_desc d = rig_zoo("resnet20", 32, 3, BATCH);
    reference_tensor labels;
    int i;
    memset(b, 0, sizeof *b);
    d.family = family;
    d.trainer.precision = precision;
    d.trainer.optimizer.weight_decay = 5e-4f;
    d.trainer.loss_scaler.mode = MPT_LOSS_SCALE_STATIC;
    d.trainer.loss_scaler.init_scale = precision == MPT_PRECISION_FP32 ? 1.0f : 1024.0f;
    b->r = rig_open(&d);
    if (!b->r.trainer) return 0;
    CHECK_OK(b->r.ctx,
             mpt_trainer_import(b->r.trainer, NULL, mpt_test_data("resnet20.weights.safetensors")));
    b->f = reference_open("resnet20.reference.safetensors");
    b->x = reference_get(&b->f, "input");
    labels = reference_get(&b->f, "labels");
    for (i = 0; i < BATCH; i++) b->labels[i] = (int32_t)labels.data[i];
    reference_free(&labels);
    b->b.images.data = b->x.data;
    b->b.images.num_dims = 4;
    memcpy(b->b.images.dims, b->x.dims, sizeof b->x.dims);
    b->b.labels.data = b->labels;
    b->b.labels.num_dims = 1;
    b->b.labels.dims[0] = BATCH;
    b->b.labels.dtype = MPT_I32;
    return 1;
}

static void bench_close(bench *b) {
    reference_free(&b->x);
    reference_close(&b->f);
    rig_close(&b->r);
}

/* ---- logits ---------------------------------------------------------------------------------- */

/* Of the trainer's last forward pass, within `share` of the largest. */
static void check_logits(const bench *b, const char *key, double share) {
    reference_tensor z = reference_get(&b->f, key);
    const mpti_net *net = &b->r.trainer->net;
    const void *got = mpti_net_value(net, b->r.model->logits);
    double most = 0;
    size_t i;
    for (i = 0; i < z.count; i++) most = fmax(most, fabs(z.data[i]));
    for (i = 0; i < z.count; i++)
        CHECK_NEAR(mpti_load(net->dtype, got, i), z.data[i], share * most);
    reference_free(&z);
}

static void check_both_modes(const char *family, mpt_precision precision, double share) {
    float probabilities[BATCH * 10];
    bench b;
    if (!bench_open(&b, family, precision)) return;
    CHECK_OK(b.r.ctx, mpt_predict(b.r.trainer, &b.b, probabilities));
    check_logits(&b, "logits_eval", share);
    CHECK_OK(b.r.ctx, mpt_trainer_accumulate(b.r.trainer, &b.b));
    check_logits(&b, "logits_train", share);
    bench_close(&b);
}

/* Twenty layers of sums of up to 576 terms, each rounded to 2^-24. Seen here: 4.5e-7; six times
   that for other processors and compilers, here and below. */
MPT_TEST(fp32_logits_in_training_and_evaluation) {
    if (mpt_test_full()) check_both_modes("definition", MPT_PRECISION_FP32, 3e-6); /* slow */
    check_both_modes("plain", MPT_PRECISION_FP32, 3e-6);
    check_both_modes("avx2", MPT_PRECISION_FP32, 3e-6);
}

/* Each of 40 values on the way is rounded to 2^-11 (2^-8) of itself; errors add up like chance.
   Seen here: 1.0e-3 and 7.0e-3. */
MPT_TEST(half_precision_logits) {
    check_both_modes(NULL, MPT_PRECISION_FP16, 6e-3);
    check_both_modes(NULL, MPT_PRECISION_BF16, 4e-2);
}

MPT_TEST(probabilities_are_softmax_of_the_logits) {
    float probabilities[BATCH * 10];
    bench b;
    reference_tensor z;
    int n, c;
    if (!bench_open(&b, NULL, MPT_PRECISION_FP32)) return;
    z = reference_get(&b.f, "logits_eval");
    CHECK_OK(b.r.ctx, mpt_predict(b.r.trainer, &b.b, probabilities));
    for (n = 0; n < BATCH; n++) {
        double sum = 0;
        for (c = 0; c < 10; c++) sum += exp(z.data[n * 10 + c]);
        for (c = 0; c < 10; c++)
            CHECK_NEAR(probabilities[n * 10 + c], exp(z.data[n * 10 + c]) / sum, 1e-5);
    }
    reference_free(&z);
    bench_close(&b);
}

/* ---- gradients ------------------------------------------------------------------------------- */

/* Parameter tensors under PyTorch's names; false behind the last. Start with *v = 1, *part = 0. */
static bool next_parameter(const mpt_trainer *t, int *v, int *part, mpti_torch *x) {
    for (; *v < t->model->num_nodes; *part = 0, ++*v)
        while (*part <= MPTI_TORCH_BIAS)
            if (mpti_torch_tensor(t, *v, (mpti_torch_part)(*part)++, x)) return true;
    return false;
}

/* Each tensor of got * factor within `share` of the largest magnitude in expected. */
static void check_rows(const mpt_trainer *t, const float *got, double factor,
                       const double *expected, double share) {
    mpti_torch x;
    int v = 1, part = 0;
    int64_t i;
    while (next_parameter(t, &v, &part, &x)) {
        const int64_t at = x.data - t->masters;
        double most = 0;
        for (i = at; i < at + x.count; i++) most = fmax(most, fabs(expected[i]));
        for (i = at; i < at + x.count; i++)
            if (!(fabs(got[i] * factor - expected[i]) <= share * most))
                mpt_test_fail(__FILE__, __LINE__, "%s: element %lld is off by %.3g of the largest",
                              x.name, (long long)(i - at),
                              fabs(got[i] * factor - expected[i]) / most);
    }
}

/* With its own gates the pass in double precision is PyTorch's: to the rounding of the file. */
MPT_TEST(double_precision_gives_the_gradients_of_pytorch) {
    bench b;
    double_net net;
    mpti_torch x;
    int v = 1, part = 0;
    int64_t i;
    bench_open(&b, NULL, MPT_PRECISION_FP32);
    net = double_net_open(b.r.trainer);
    double_net_forward(&net, &b.b, NULL);
    double_net_backward(&net);
    CHECK_NEAR(net.loss, losses[0], 1e-9);
    while (next_parameter(b.r.trainer, &v, &part, &x)) {
        const int64_t at = x.data - b.r.trainer->masters;
        char key[160];
        reference_tensor g;
        double most = 0;
        snprintf(key, sizeof key, "grad.%s", x.name);
        g = reference_get(&b.f, key);
        CHECK_EQ_INT(g.count, x.count);
        for (i = 0; i < x.count; i++) most = fmax(most, fabs(g.data[i]));
        for (i = 0; i < x.count; i++) CHECK_NEAR(net.grads[at + i], g.data[i], 1e-7 * most);
        reference_free(&g);
    }
    double_net_close(&net);
    bench_close(&b);
}

/* A difference at a gate is rounding only where double precision has nearly 0 there: FP32 puts up
   to 2.5e-5 on the numbers before the last ReLUs. */
static const double near_zero = 5e-5;

static void check_gradients(const char *family, mpt_precision precision, double share) {
    mpt_trainer *t;
    double_net net;
    bench b;
    if (!bench_open(&b, family, precision)) return;
    t = b.r.trainer;
    net = double_net_open(t);
    CHECK_OK(b.r.ctx, mpt_trainer_accumulate(t, &b.b));
    double_net_forward(&net, &b.b, t);
    double_net_backward(&net);
    CHECK_NEAR(t->stats.loss / BATCH, losses[0], share);
    check_rows(t, gradient_row(t), gradient_factor(t), net.grads, share);
    if (precision == MPT_PRECISION_FP32) CHECK(net.largest_flip < near_zero);
    double_net_close(&net);
    bench_close(&b);
}

MPT_TEST(fp32_gradients) {
    check_gradients("plain", MPT_PRECISION_FP32, 2e-5);
    check_gradients("avx2", MPT_PRECISION_FP32, 2e-5);
}

/* Seen here: 7.3e-3, 15 times 2^-11: gradients are sums over many numbers of both signs. */
MPT_TEST(fp16_gradients) {
    check_gradients(NULL, MPT_PRECISION_FP16, 4e-2);
}

/* ---- five steps ------------------------------------------------------------------------------ */
typedef struct double_run { /* SGD with momentum and batch norm's memory, in double precision */
    double_net net;
    double *momentum, *running;
} double_run;

static double_run double_run_open(const mpt_trainer *t) {
    double_run run;
    int64_t i;
    run.net = double_net_open(t);
    run.momentum = double_net_row((size_t)t->model->num_params);
    run.running = double_net_row((size_t)t->model->num_stats);
    for (i = 0; i < t->model->num_stats; i++) run.running[i] = t->running[i];
    return run;
}

static void double_run_close(double_run *run) {
    free(run->momentum);
    free(run->running);
    double_net_close(&run->net);
}

static void double_run_step(double_run *run, const mpt_batch *batch, const mpt_trainer *gates) {
    double_net *net = &run->net;
    int64_t i;
    int v, c;
    double_net_forward(net, batch, gates);
    double_net_backward(net);
    for (i = 0; i < net->m->num_params; i++) {
        run->momentum[i] = 0.9 * run->momentum[i] + net->grads[i] + 5e-4 * net->params[i];
        net->params[i] -= 0.05 * run->momentum[i];
    }
    for (v = 1; v < net->m->num_nodes; v++) {
        const mpti_node *o = &net->m->nodes[v];
        const double m = (double)net->n * o->h * o->w;
        double *mean = run->running + o->stat_offset, *var = mean + o->c;
        if (o->kind != MPTI_KIND_BATCHNORM) continue;
        for (c = 0; c < o->c; c++) {
            mean[c] += 0.1 * (net->mean[o->stat_offset + c] - mean[c]);
            var[c] += 0.1 * (net->var[o->stat_offset + c] * m / (m - 1) - var[c]);
        }
    }
}

MPT_TEST(five_steps_in_double_precision_are_those_of_pytorch) {
    double_run run;
    bench b;
    int step, steps = mpt_test_full() ? STEPS : 2;
    bench_open(&b, NULL, MPT_PRECISION_FP32);
    run = double_run_open(b.r.trainer);
    for (step = 0; step < steps; step++) {
        double_run_step(&run, &b.b, NULL);
        CHECK_NEAR(run.net.loss, losses[step], 1e-6); /* 0.05f and 5e-4f here, doubles there */
    }
    double_run_close(&run);
    bench_close(&b);
}

/* Seen here: weights within 2.7e-6 of their tensor's largest. */
static void check_five_steps(const char *family) {
    mpt_step_report report;
    double_run run;
    mpt_trainer *t;
    int64_t i;
    int step;
    bench b;
    if (!bench_open(&b, family, MPT_PRECISION_FP32)) return;
    t = b.r.trainer;
    run = double_run_open(t);
    for (step = 0; step < STEPS; step++) {
        CHECK_OK(b.r.ctx, mpt_trainer_accumulate(t, &b.b));
        double_run_step(&run, &b.b, t);
        CHECK_OK(b.r.ctx, mpt_trainer_apply(t, &report));
        CHECK_EQ_INT(report.skipped, 0);
        CHECK_NEAR(report.loss, run.net.loss, 1e-5);
        CHECK(run.net.largest_flip < near_zero);
    }
    check_rows(t, t->masters, 1, run.net.params, 2e-5);
    for (i = 0; i < b.r.model->num_stats; i++)
        CHECK_NEAR(t->running[i], run.running[i], 1e-5 * (1 + fabs(run.running[i])));
    double_run_close(&run);
    bench_close(&b);
}

MPT_TEST(five_steps_in_fp32) {
    check_five_steps(NULL);
    if (mpt_test_full()) check_five_steps("plain");
}

/* And without our gates: how near FP32 stays to PyTorch's float64 losses. No program can promise it
   for all pictures (a ReLU's input may lie nearer to zero than FP32 can tell), but these are
   fixed, and so are our bits. */
MPT_TEST(five_losses_in_fp32_are_those_of_pytorch) {
    static const char *const families[] = {"plain", "avx2"};
    mpt_step_report report;
    bench b;
    int i, step;
    for (i = 0; i < 2; i++) {
        if (!bench_open(&b, families[i], MPT_PRECISION_FP32)) continue;
        for (step = 0; step < STEPS; step++) {
            CHECK_OK(b.r.ctx, mpt_trainer_step(b.r.trainer, &b.b, &report));
            CHECK_NEAR(report.loss, losses[step], 1e-4);
        }
        bench_close(&b);
    }
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(fp32_logits_in_training_and_evaluation),
    MPT_TEST_CASE(half_precision_logits),
    MPT_TEST_CASE(probabilities_are_softmax_of_the_logits),
    MPT_TEST_CASE(double_precision_gives_the_gradients_of_pytorch),
    MPT_TEST_CASE(fp32_gradients),
    MPT_TEST_CASE(fp16_gradients),
    MPT_TEST_CASE(five_steps_in_double_precision_are_those_of_pytorch),
    MPT_TEST_CASE(five_steps_in_fp32),
    MPT_TEST_CASE(five_losses_in_fp32_are_those_of_pytorch),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
