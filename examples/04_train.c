/* 04_train.c - trains a network on TFRecords in mixed precision, measures it, saves its weights

   build:  cc -O2 -I. examples/04_train.c -o trainer -lm -lpthread
   run:    ./trainer 'output/data/train-*-of-*' 'output/data/test-*-of-*' model.safetensors

   Shows: records to batches, a network by name, FP16 with FP32 masters and dynamic loss scaling, a
   schedule, epochs, evaluation, export. Made for gray pictures of ten classes; `make demo` leaves
   such files. The same files and seed give the same weights, whatever the number of threads. */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"
#include <stdio.h>

int main(int argc, char **argv) {
    mpt_ctx *ctx = NULL;
    mpt_loader *train = NULL, *test = NULL;
    mpt_model *model = NULL;
    mpt_trainer *trainer = NULL;
    mpt_loader_desc data = {0};
    mpt_trainer_desc how = {0};
    mpt_export_desc out = {0};
    mpt_batch batch;
    mpt_step_report step;
    mpt_metrics score;
    mpt_result rc;
    int epoch;

    if (argc != 4 || mpt_ctx_create(NULL, &ctx)) return 2;
    data.paths = (const char *const *)argv + 1;
    data.num_paths = 1;
    data.batch_size = 64;
    data.height = data.width = 28;
    data.channels = 1;
    data.num_classes = 10;
    rc = mpt_loader_create(ctx, &data, &train);
    data.paths++;
    if (!rc) rc = mpt_loader_create(ctx, &data, &test);
    if (!rc) rc = mpt_model_create(ctx, 28, 28, 1, &model);
    if (!rc) rc = mpt_model_finish(model, mpt_zoo(model, "lenet", 10));
    how.precision = MPT_PRECISION_FP16;
    how.optimizer.kind = MPT_OPTIMIZER_ADAMW;
    how.optimizer.learning_rate = 0.003f;
    how.schedule.kind = MPT_SCHEDULE_ONE_CYCLE;
    how.total_steps = 4 * mpt_loader_get_info(train).steps_per_epoch;
    if (!rc) rc = mpt_trainer_create(model, &how, data.batch_size, &trainer);
    for (epoch = 1; epoch <= 4 && !rc; epoch++) {
        while (!rc && !(rc = mpt_loader_next(train, &batch)))
            rc = mpt_trainer_step(trainer, &batch, &step);
        if (rc == MPT_END) rc = mpt_trainer_sync(trainer, &step); /* a GPU tells a step late */
        if (!rc) rc = mpt_evaluate(trainer, test, &score);
        if (!rc)
            printf("epoch %d: %d of %d right, loss scale %.0f\n", epoch, (int)score.num_correct,
                   (int)score.num_samples, (double)step.loss_scale);
    }
    out.path = argv[3];
    if (!rc) rc = mpt_trainer_export(trainer, &out);
    if (rc) fprintf(stderr, "%s\n", mpt_last_error(ctx)->message);
    mpt_trainer_destroy(trainer);
    mpt_model_destroy(model);
    mpt_loader_destroy(test);
    mpt_loader_destroy(train);
    mpt_ctx_destroy(ctx);
    return rc != 0;
}
