/* step.h - bench step: whole training steps on pictures in memory

   Nothing is read or decoded: forward, loss, backward, check and update alone; on a device also the
   batch's way there. The share of the limit counts the multiply-adds of convolutions and dense
   layers as their definitions have them, so an algorithm that needs fewer (Winograd's) can pass
   100 %. */
#ifndef MPT_BENCH_STEP_H
#define MPT_BENCH_STEP_H

#include "bench/limits.h"
#include "bench/network.h"

typedef struct bench_step {
    mpt_ctx *ctx;
    bench_network network;
    mpt_trainer *trainer;
    mpt_batch batch;
    mpt_step_report report; /* of the last step */
    mpt_memory_plan plan;
    int64_t steps_a_round, num_skipped;
    double multiply_adds; /* of one picture in a step */
    char name[80];
} bench_step;

static void bench_step_free(bench_step *s) {
    free(s->batch.images.data);
    free(s->batch.labels.data);
    mpt_trainer_destroy(s->trainer);
    mpt_model_destroy(s->network.model);
}

static int bench_step_make_batch(bench_step *s) {
    const bench_network *n = &s->network;
    size_t picture = (size_t)n->image_size * (size_t)n->image_size * (size_t)n->channels;
    mpt_tensor *images = &s->batch.images, *labels = &s->batch.labels;
    int i;

    images->dtype = MPT_F32;
    images->num_dims = 4;
    images->dims[0] = labels->dims[0] = n->batch_size;
    images->dims[1] = images->dims[2] = n->image_size;
    images->dims[3] = n->channels;
    images->data = malloc((size_t)n->batch_size * picture * sizeof(float));
    labels->dtype = MPT_I32;
    labels->num_dims = 1;
    labels->data = malloc((size_t)n->batch_size * sizeof(int32_t));
    if (!images->data || !labels->data)
        return cli_error("bench", CLI_EXIT_FAILURE, "no memory for a batch of %d pictures",
                         n->batch_size);
    bench_floats((float *)images->data, (size_t)n->batch_size * picture, 1);
    for (i = 0; i < n->batch_size; i++) ((int32_t *)labels->data)[i] = i % n->num_classes;
    s->batch.num_valid = n->batch_size;
    return 0;
}

/* Each step's report counts once, whether it comes at once or while the next step computes. */
static int bench_step_take(bench_step *s, const mpt_step_report *report) {
    if (report->step <= s->report.step) return 0;
    s->report = *report;
    s->num_skipped += report->skipped;
    if (report->skipped || (report->loss >= 0 && report->loss <= DBL_MAX)) return 0;
    return cli_error("bench", CLI_EXIT_FAILURE, "step %lld: the loss is not finite",
                     (long long)report->step);
}

static int bench_step_begin(bench_step *s) {
    mpt_step_report report;

    if (mpt_trainer_step(s->trainer, &s->batch, &report)) return bench_fail(s->ctx);
    return bench_step_take(s, &report);
}

/* Waits until all steps that were begun are done. */
static int bench_step_sync(bench_step *s) {
    mpt_step_report report;

    if (mpt_trainer_sync(s->trainer, &report)) return bench_fail(s->ctx);
    return bench_step_take(s, &report);
}

/* Rounds of about a quarter of a second, so that one slow moment doesn't make a round. The first
   step touches the memory, the second is recorded on a device, the last one is timed; skipped ones
   update nothing and don't count. */
static int bench_step_warm_up(bench_step *s, bool on_device) {
    const int64_t enough = on_device ? 3 : 2;
    double start = 0, seconds;
    int64_t applied = 0;
    int code = 0;

    while (!code && applied < enough) {
        start = cli_seconds();
        code = bench_step_begin(s);
        if (!code) code = bench_step_sync(s);
        applied += !code && !s->report.skipped;
    }
    seconds = cli_seconds() - start;
    s->steps_a_round = seconds > 0.25 ? 1 : (int64_t)(0.25 / (seconds + 1e-9)) + 1;
    s->num_skipped = 0;
    return code;
}

static int bench_step_run(void *user) {
    bench_step *s = (bench_step *)user;
    int64_t i;
    int code = 0;

    for (i = 0; i < s->steps_a_round && !code; i++) code = bench_step_begin(s);
    return code ? code : bench_step_sync(s);
}

static void bench_step_more(const bench_case *c, bool json) {
    const bench_step *s = (const bench_step *)c->user;
    mpt_trainer_info info = mpt_trainer_get_info(s->trainer);
    double seconds = s->network.batch_size / c->median;
    double flops = 2 * s->multiply_adds * s->network.batch_size;
    char memory[24];

    if (json) {
        printf(",\"arch\":\"%s\",\"precision\":\"%s\",\"backend\":\"%s\",\"kernels\":\"%s\","
               "\"batch_size\":%d,\"image_size\":%d,\"seconds_per_step\":%.6g,\"multiply_adds_per_"
               "image\":%.17g,"
               "\"flops_per_second\":%.6g,\"planned_bytes\":%zu,\"skipped_steps\":%lld,\"loss\":",
               s->network.arch, s->network.precision, info.backend, info.kernels,
               s->network.batch_size, s->network.image_size, seconds, s->multiply_adds,
               flops / seconds, s->plan.total, (long long)s->num_skipped);
        cli_json_double(stdout, s->report.loss);
        return;
    }
    cli_human_bytes((double)s->plan.total, memory);
    printf("\n%-8s %.2f ms a step, %.3g GFLOP a step, %.1f GFLOP/s; %s; loss %.4f, %lld skipped",
           "", 1000 * seconds, flops / 1e9, flops / seconds / 1e9, memory, s->report.loss,
           (long long)s->num_skipped);
}

static int bench_step_make(mpt_ctx *ctx, const bench_options *o, bench_step *s) {
    bool on_device = o->device != NETWORK_CPU;
    mpt_trainer_desc desc;
    char where[32];
    mpt_result rc;
    int code;

    memset(s, 0, sizeof *s);
    s->ctx = ctx;
    code = bench_network_make(ctx, o, &s->network);
    if (!code) code = bench_step_make_batch(s);
    if (code) return code;
    memset(&desc, 0, sizeof desc);
    desc.precision = network_precision(o->precision);
    desc.optimizer.learning_rate = 0.001f; /* made-up data must not make weights run away */
    rc = mpt_model_plan(s->network.model, &desc, s->network.batch_size, &s->plan);
    if (rc == MPT_OK)
        rc = mpt_trainer_create(s->network.model, &desc, s->network.batch_size, &s->trainer);
    if (rc) return bench_fail(ctx);
    s->multiply_adds = bench_step_multiply_adds(&s->network);
    if (on_device) snprintf(where, sizeof where, "%s", mpt_trainer_get_info(s->trainer).kernels);
    else snprintf(where, sizeof where, "%d thread%s", (int)o->threads, cli_plural(o->threads, "s"));
    snprintf(s->name, sizeof s->name, "%s, batch %d, %s, %s", s->network.arch,
             s->network.batch_size, s->network.precision, where);
    return bench_step_warm_up(s, on_device);
}

static int bench_step_kind(mpt_ctx *ctx, const bench_options *o) {
    bench_step s;
    bench_limits limits;
    bench_case cases[2];
    int code = bench_limits_make(ctx, o, &limits);

    if (code) return code;
    code = bench_step_make(ctx, o, &s);
    if (!code) {
        cases[0] = bench_make(s.name, "images", (double)(s.network.batch_size * s.steps_a_round),
                              bench_step_run, &s);
        cases[0].reference = 1;
        cases[0].reference_units = 2 * s.multiply_adds;
        cases[0].limit_name = limits.flops_name;
        cases[0].more = bench_step_more;
        cases[1] = bench_flops_limit(&limits);
        code = bench_run(cases, 2, o->rounds);
    }
    if (!code) bench_print("step", cases, 2, o->json);
    bench_step_free(&s);
    bench_limits_free(&limits);
    return code;
}

#endif /* MPT_BENCH_STEP_H */
