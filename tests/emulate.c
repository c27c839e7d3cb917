/* emulate.c - what `make emulate` runs: lenet and resnet20 train a few steps through the whole CUDA
   path, kernels.cu executed by the CPU, beside the CPU backend

   A table of losses, and what the path did. Exit status 1 if the two in FP16 part by more than FP16
   and FP32 do on the CPU: two ways to round. tests/cuda_on_cpu/README.md shows how to step through
   a kernel of it in gdb. */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include <cuda_on_cpu.h>

enum { BATCH = 8, STEPS = 5, CLASSES = 10 };

typedef struct machine {
    mpt_ctx *ctx;
    mpt_model *model;
    mpt_trainer *trainer;
    double losses[STEPS];
} machine;

static int fail(const machine *m, const char *what) {
    fprintf(stderr, "emulate: %s: %s\n", what,
            m->ctx ? mpt_last_error(m->ctx)->message : "no context");
    return 1;
}

/* Pictures of class k are brighter in stripe k, with noise on top: a network learns it at once. */
static void draw(float *x, int32_t *labels, int size, int channels) {
    uint64_t noise = 12345;
    int n, i;

    for (n = 0; n < BATCH; n++) {
        labels[n] = n % CLASSES;
        for (i = 0; i < size * size * channels; i++, x++) {
            noise = noise * 6364136223846793005u + 1442695040888963407u;
            *x = (float)(noise >> 40) / 16777216.0f - 0.5f;
            if (i / channels % size * CLASSES / size == labels[n]) *x += 1;
        }
    }
}

static int run(machine *m, const mpt_backend *backend, mpt_precision precision, const char *net,
               int size, int channels, const mpt_batch *batch) {
    mpt_ctx_desc context;
    mpt_trainer_desc trainer;
    mpt_step_report report;
    int i;

    memset(&context, 0, sizeof context);
    memset(&trainer, 0, sizeof trainer);
    context.backend = backend;
    trainer.precision = precision;
    trainer.optimizer.learning_rate = 0.02f;
    if (mpt_ctx_create(&context, &m->ctx)) return fail(m, "mpt_ctx_create");
    if (mpt_model_create(m->ctx, size, size, channels, &m->model) ||
        mpt_model_finish(m->model, mpt_zoo(m->model, net, CLASSES)) ||
        mpt_trainer_create(m->model, &trainer, BATCH, &m->trainer))
        return fail(m, net);
    for (i = 0; i < STEPS; i++) {
        if (mpt_trainer_step(m->trainer, batch, &report) ||
            mpt_trainer_sync(m->trainer, &report)) /* so that the table has every step */
            return fail(m, "a step");
        m->losses[i] = report.loss;
    }
    return 0;
}

static void done(machine *m) {
    mpt_trainer_destroy(m->trainer);
    mpt_model_destroy(m->model);
    mpt_ctx_destroy(m->ctx);
}

static double distance(double a, double b) {
    return a < b ? b - a : a - b;
}

/* Three columns. 0.002: what one rounding of FP16 is to a loss of 2.3. */
static int show(const char *net, const machine m[3]) {
    double rounding = 0.002;
    int i;

    printf("%s, %d pictures\n  step  cpu fp32  cpu fp16  cuda on cpu, fp16\n", net, BATCH);
    for (i = 0; i < STEPS; i++) {
        printf("  %4d  %.6f  %.6f  %.6f\n", i + 1, m[0].losses[i], m[1].losses[i], m[2].losses[i]);
        if (distance(m[0].losses[i], m[1].losses[i]) > rounding)
            rounding = distance(m[0].losses[i], m[1].losses[i]);
    }
    for (i = 0; i < STEPS; i++)
        if (!(distance(m[1].losses[i], m[2].losses[i]) <= 2 * rounding))
            return fail(&m[2], "the losses part by more than rounding explains");
    return 0;
}

static int compare(const char *net, int size, int channels) {
    size_t numbers = (size_t)BATCH * (size_t)size * (size_t)size * (size_t)channels;
    float *x = (float *)malloc(numbers * sizeof *x);
    int32_t labels[BATCH];
    cuda_on_cpu_counters before, after;
    machine m[3];
    mpt_batch batch;
    int i, code = 0;

    memset(m, 0, sizeof m);
    memset(&batch, 0, sizeof batch);
    if (!x) return fail(&m[0], "no memory");
    draw(x, labels, size, channels);
    batch.images.data = x;
    batch.images.dtype = MPT_F32;
    batch.images.num_dims = 4;
    batch.images.dims[0] = batch.labels.dims[0] = batch.num_valid = BATCH;
    batch.images.dims[1] = batch.images.dims[2] = size;
    batch.images.dims[3] = channels;
    batch.labels.data = labels;
    batch.labels.dtype = MPT_I32;
    batch.labels.num_dims = 1;
    cuda_on_cpu_get_counters(&before);
    for (i = 0; i < 3 && !code; i++)
        code = run(&m[i], i == 2 ? mpt_backend_cuda() : mpt_backend_cpu(),
                   i == 0 ? MPT_PRECISION_FP32 : MPT_PRECISION_FP16, net, size, channels, &batch);
    cuda_on_cpu_get_counters(&after);
    if (!code) code = show(net, m);
    if (!code)
        printf("  %ld kernels, %ld replays of a recorded pass, %.1f MB of device memory\n",
               after.kernel_launches - before.kernel_launches,
               after.graph_launches - before.graph_launches, (double)after.device_bytes / 1e6);
    for (i = 0; i < 3; i++) done(&m[i]);
    free(x);
    return code;
}

int main(void) {
    if (compare("lenet", 28, 1)) return 1;
    return compare("resnet20", 32, 3);
}
