/* Built with -ffast-math, which lets compilers believe that no number is inf or NaN: steps whose
   gradients are not finite must be skipped all the same. Silent when all is well. */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include <stdio.h>
#include <string.h>

enum { RECORDS = 4, PICTURE = 6 * 6 * 2 };

static const mpt_precision precisions[] = {MPT_PRECISION_FP32, MPT_PRECISION_FP16_CAST,
                                           MPT_PRECISION_FP16, MPT_PRECISION_FP16_PURE,
                                           MPT_PRECISION_BF16};
static const uint32_t bad_numbers[] = {0x7f800000, 0xff800000, 0x7fc00000, 0xffc00001};

static int wire(mpt_model *m) {
    mpt_conv2d_desc conv;
    int x;
    memset(&conv, 0, sizeof conv);
    conv.out_channels = 4;
    conv.padding = 1;
    x = mpt_relu(m, mpt_batchnorm(m, mpt_conv2d(m, MPT_INPUT, &conv), NULL));
    return mpt_dense(m, mpt_max_pool(m, x, 2, 2, 0), 3);
}

static void make_batch(float *x, int32_t *labels, mpt_batch *b) {
    int i;
    memset(b, 0, sizeof *b);
    for (i = 0; i < RECORDS * PICTURE; i++) x[i] = (float)(i * 37 % 101) / 50 - 1;
    for (i = 0; i < RECORDS; i++) labels[i] = i % 3;
    b->images.data = x;
    b->images.num_dims = 4;
    b->images.dims[0] = b->labels.dims[0] = RECORDS;
    b->images.dims[1] = b->images.dims[2] = 6;
    b->images.dims[3] = 2;
    b->labels.data = labels;
    b->labels.dtype = MPT_I32;
    b->labels.num_dims = 1;
}

/* A good step, a bad one, a good one. */
static const char *try_number(mpt_trainer *t, uint32_t bad) {
    float x[RECORDS * PICTURE];
    int32_t labels[RECORDS];
    char before[65], after[65];
    mpt_step_report r;
    mpt_batch b;
    make_batch(x, labels, &b);
    if (mpt_trainer_step(t, &b, &r) || r.skipped) return "a good step did not go well";
    memcpy(&x[100], &bad, sizeof bad);
    if (mpt_trainer_sha256(t, before)) return "no hash";
    if (mpt_trainer_step(t, &b, &r)) return "a bad step is an error";
    if (!r.skipped) return "a bad step was not skipped";
    if (mpt_trainer_sha256(t, after) || strcmp(before, after)) return "a bad step changed weights";
    make_batch(x, labels, &b);
    if (mpt_trainer_step(t, &b, &r) || r.skipped) return "no good step after a bad one";
    return NULL;
}

static const char *try_all(mpt_ctx *ctx, mpt_precision precision) {
    const char *wrong = NULL;
    mpt_trainer_desc d;
    mpt_model *m = NULL;
    mpt_trainer *t = NULL;
    size_t i;
    memset(&d, 0, sizeof d);
    d.precision = precision;
    d.optimizer.learning_rate = 0.01f;
    d.loss_scaler.init_scale = 64;
    if (mpt_model_create(ctx, 6, 6, 2, &m) || mpt_model_finish(m, wire(m)) ||
        mpt_trainer_create(m, &d, RECORDS, &t))
        wrong = mpt_last_error(ctx)->message;
    for (i = 0; !wrong && i < sizeof bad_numbers / sizeof bad_numbers[0]; i++)
        wrong = try_number(t, bad_numbers[i]);
    mpt_trainer_destroy(t);
    mpt_model_destroy(m);
    return wrong;
}

int main(void) {
    mpt_ctx *ctx = NULL;
    int failed = mpt_ctx_create(NULL, &ctx) != MPT_OK;
    size_t i;
    for (i = 0; !failed && i < sizeof precisions / sizeof precisions[0]; i++) {
        const char *wrong = try_all(ctx, precisions[i]);
        if (wrong) printf("precision %d: %s\n", (int)precisions[i], wrong);
        failed = wrong != NULL;
    }
    mpt_ctx_destroy(ctx);
    return failed;
}
