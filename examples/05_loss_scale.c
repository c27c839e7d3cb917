/* 05_loss_scale.c - a loss scale that is too large, how training gets out of it, and how it grows

   build:  cc -O2 -I. examples/05_loss_scale.c -o loss_scale -lm -lpthread
   run:    ./loss_scale

   FP16 ends at 65504. Gradients are small, so the loss is multiplied by a scale that lifts them out
   of the range where FP16 rounds to zero. Too large a scale makes infinities: such a step changes
   nothing, the scale is halved, and the next step tries again; after some good steps in a row the
   scale is doubled. Here it begins far too high and grows after 8 good steps instead of 2000, so
   that both can be seen. The autopsy tells where the first infinity was. */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"
#include <stdio.h>

enum { BATCH = 16, SIZE = 8, CLASSES = 4, STEPS = 30 };

/* Four kinds of noisy pictures: each is bright in another quarter. */
static void draw_batch(float images[BATCH][SIZE][SIZE], int32_t labels[BATCH]) {
    uint32_t noise = 1;
    int i, y, x;

    for (i = 0; i < BATCH; i++) {
        labels[i] = i % CLASSES;
        for (y = 0; y < SIZE; y++)
            for (x = 0; x < SIZE; x++) {
                noise = noise * 1664525u + 1013904223u;
                images[i][y][x] = (float)(noise >> 8) / 16777216.0f;
                if (y / 4 * 2 + x / 4 == labels[i]) images[i][y][x] += 0.5f;
            }
    }
}

static mpt_result train(mpt_trainer *trainer, const mpt_batch *batch) {
    mpt_step_report step;
    mpt_overflow why;
    mpt_result rc = MPT_OK;
    int i;

    for (i = 0; i < STEPS && rc == MPT_OK; i++) {
        rc = mpt_trainer_step(trainer, batch, &step);
        if (rc == MPT_OK) rc = mpt_trainer_sync(trainer, &step); /* a GPU tells a step late */
        if (rc != MPT_OK) break;
        printf("step %2d  scale %8.0f  loss %.4f  %s", (int)step.step, (double)step.loss_scale,
               step.loss, step.skipped ? "skipped" : "applied\n");
        if (!step.skipped) continue;
        rc = mpt_trainer_autopsy(trainer, batch, &why);
        if (rc == MPT_OK)
            printf(": %s of %s, element %d, overflows; %.0f would do\n", why.tensor, why.layer,
                   (int)why.index, (double)why.largest_scale);
    }
    return rc;
}

int main(void) {
    static float images[BATCH][SIZE][SIZE];
    static int32_t labels[BATCH];
    mpt_ctx *ctx = NULL;
    mpt_model *model = NULL;
    mpt_trainer *trainer = NULL;
    mpt_trainer_desc desc = {0};
    mpt_batch batch = {0};
    mpt_tensor x = {images, {BATCH, SIZE, SIZE, 1}, 4, MPT_F32}, y = {labels, {BATCH}, 1, MPT_I32};
    mpt_result rc;

    draw_batch(images, labels);
    batch.images = x;
    batch.labels = y;
    batch.num_valid = BATCH;
    desc.precision = MPT_PRECISION_FP16;
    desc.optimizer.learning_rate = 0.01f;
    desc.loss_scaler.init_scale = 16777216;
    desc.loss_scaler.growth_interval = 8;
    if (mpt_ctx_create(NULL, &ctx)) return 1;
    rc = mpt_model_create(ctx, SIZE, SIZE, 1, &model);
    if (rc == MPT_OK) rc = mpt_model_finish(model, mpt_zoo(model, "lenet", CLASSES));
    if (rc == MPT_OK) rc = mpt_trainer_create(model, &desc, BATCH, &trainer);
    if (rc == MPT_OK) rc = train(trainer, &batch);
    if (rc != MPT_OK) fprintf(stderr, "%s\n", mpt_last_error(ctx)->message);
    mpt_trainer_destroy(trainer);
    mpt_model_destroy(model);
    mpt_ctx_destroy(ctx);
    return rc != MPT_OK;
}
