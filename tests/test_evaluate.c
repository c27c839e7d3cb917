/* test_evaluate.c - >>train: evaluation and predictions count each record once, agree, and change
   nothing in training
   Case O-23 */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "mpt_test.h"
#include "training.h"

/* Every record once, whatever the batch size and the lanes: O-23. The sum is over other batches, so
   its rounding may differ. */
MPT_TEST(evaluation_counts_every_record_once) {
    static const int shapes[][3] = {{10, 1, 1}, {10, 2, 1}, {10, 4, 5}, {103, 1, 1}, {7, 3, 7}};
    rig_desc d = rig_small(small_net, 10);
    arrays a = arrays_make(&d, 103, 1);
    pictures p = pictures_make(&d, 10, 1);
    mpt_metrics first, m;
    int i, k, epoch;
    memset(&first, 0, sizeof first);
    for (i = 0; i < COUNT(shapes); i++) {
        mpt_loader *loader;
        mpt_batch b = pictures_batch(&p, 0, 10);
        rig r;
        d.batch_size = 10;
        r = rig_open(&d);
        for (k = 0; k < 20; k++) step_of(r.trainer, &b);
        CHECK_OK(r.ctx, mpt_trainer_save(r.trainer, NULL, NULL, mpt_test_tmpfile("eval.state")));
        rig_close(&r);
        d.batch_size = shapes[i][0];
        d.trainer.slices = shapes[i][2];
        r = rig_open(&d);
        CHECK_OK(r.ctx, mpt_trainer_load(r.trainer, NULL, NULL, mpt_test_tmpfile("eval.state")));
        loader = arrays_open(r.ctx, &d, &a, shapes[i][1]);
        for (epoch = 0; epoch < 3; epoch++) {
            CHECK_OK(r.ctx, mpt_evaluate(r.trainer, loader, &m));
            if (i == 0 && epoch == 0) first = m;
            CHECK_EQ_INT(m.num_samples, 103);
            CHECK_EQ_INT(m.num_correct, first.num_correct);
            CHECK_EQ_INT(m.num_correct_top5, 103);
            CHECK_NEAR(m.loss, first.loss, 1e-6);
        }
        mpt_loader_destroy(loader);
        rig_close(&r);
        d.trainer.slices = 0;
    }
    pictures_free(&p);
    arrays_free(&a);
}

/* The loss is the mean of -log of the probability of the label, label smoothing or not. */
MPT_TEST(evaluation_agrees_with_predictions) {
    rig_desc d = rig_small(small_net, 4);
    arrays a = arrays_make(&d, 11, 1);
    float *probabilities = (float *)malloc((11 * 5 + 1) * sizeof *probabilities);
    const int32_t *labels = (const int32_t *)a.labels.data;
    double loss = 0;
    int i, k, correct = 0;
    mpt_batch b;
    mpt_metrics m;
    mpt_loader *loader;
    rig r;
    d.trainer.label_smoothing = 0.1f;
    r = rig_open(&d);
    memset(&b, 0, sizeof b);
    b.images = a.images;
    b.labels = a.labels;
    probabilities[11 * 5] = 77;
    CHECK_OK(r.ctx, mpt_predict(r.trainer, &b, probabilities)); /* more than a batch, U8 */
    CHECK_NEAR(probabilities[11 * 5], 77, 0);
    for (i = 0; i < 11; i++) {
        const float *row = probabilities + 5 * i;
        int larger = 0;
        for (k = 0; k < 5; k++) larger += row[k] > row[labels[i]];
        loss -= log(row[labels[i]]) / 11;
        correct += larger == 0;
    }
    loader = arrays_open(r.ctx, &d, &a, 1);
    CHECK_OK(r.ctx, mpt_evaluate(r.trainer, loader, &m));
    CHECK_EQ_INT(m.num_samples, 11);
    CHECK_EQ_INT(m.num_correct, correct);
    CHECK_NEAR(m.loss, loss, 1e-5);
    mpt_loader_destroy(loader);
    rig_close(&r);
    free(probabilities);
    arrays_free(&a);
}

static hash train_and_evaluate(mpt_precision precision, int evaluate) {
    rig_desc d = rig_small(small_net, 4);
    arrays a = arrays_make(&d, 30, 1), held_out = arrays_make(&d, 9, 2);
    mpt_loader *train, *validation;
    float probabilities[4 * 5];
    mpt_metrics m;
    rig r;
    hash h;
    int step;
    d.trainer.precision = precision;
    d.trainer.accumulate_steps = 2;
    r = rig_open(&d);
    train = arrays_open(r.ctx, &d, &a, 2);
    validation = arrays_open(r.ctx, &d, &held_out, 1);
    for (step = 0; step < 10; step++) {
        mpt_batch b = arrays_next(r.ctx, train);
        if (evaluate && step % 3 == 0) CHECK_OK(r.ctx, mpt_evaluate(r.trainer, validation, &m));
        CHECK_OK(r.ctx, mpt_trainer_accumulate(r.trainer, &b));
        if (evaluate) CHECK_OK(r.ctx, mpt_predict(r.trainer, &b, probabilities));
        CHECK_OK(r.ctx, mpt_trainer_apply(r.trainer, &r.trainer->last));
    }
    h = hash_of(r.trainer);
    mpt_loader_destroy(validation);
    mpt_loader_destroy(train);
    rig_close(&r);
    arrays_free(&held_out);
    arrays_free(&a);
    return h;
}

/* Between steps, and even between accumulate and apply. */
MPT_TEST(evaluation_changes_nothing_in_training) {
    static const mpt_precision precisions[] = {MPT_PRECISION_FP32, MPT_PRECISION_FP16,
                                               MPT_PRECISION_FP16_CAST};
    int i;
    for (i = 0; i < COUNT(precisions); i++) {
        hash without = train_and_evaluate(precisions[i], 0),
             with = train_and_evaluate(precisions[i], 1);
        CHECK_EQ_STR(with.hex, without.hex);
    }
}

/* From imported or initial weights, without labels, any number of records, several lanes: only the
   first lane's records that count. */
MPT_TEST(predictions_need_no_labels_and_no_training) {
    rig_desc d = rig_small(small_net, 4);
    pictures p = pictures_make(&d, 12, 1);
    static const int32_t valid[2] = {5, 6};
    float all[12 * 5], some[5 * 5 + 1];
    mpt_batch b = pictures_batch(&p, 0, 12);
    rig r = rig_open(&d);
    memset(&b.labels, 0, sizeof b.labels);
    CHECK_OK(r.ctx, mpt_predict(r.trainer, &b, all));
    b = pictures_lanes(&p, 0, 2, 6, valid);
    some[25] = 77;
    CHECK_OK(r.ctx, mpt_predict(r.trainer, &b, some));
    CHECK_EQ_MEM(some, all, 25 * sizeof(float));
    CHECK_NEAR(some[25], 77, 0);
    b.images.dims[3] = 1;
    CHECK_RESULT(r.ctx, mpt_predict(r.trainer, &b, some), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(r.ctx)->message, "(8,8,1)");
    CHECK_EQ_INT(mpt_predict(r.trainer, &b, NULL), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_evaluate(r.trainer, NULL, NULL), MPT_ERR_INVALID_ARGUMENT);
    rig_close(&r);
    pictures_free(&p);
}

/* Labels that the model has no class for are refused, by evaluation as by training. */
MPT_TEST(evaluation_refuses_labels_outside_of_the_classes) {
    rig_desc d = rig_small(small_net, 4), six;
    arrays a;
    mpt_loader *loader;
    mpt_metrics m;
    rig r;
    six = d;
    six.classes = 6;
    a = arrays_make(&six, 8, 1);
    r = rig_open(&d);
    loader = arrays_open(r.ctx, &six, &a, 1);
    CHECK_RESULT(r.ctx, mpt_evaluate(r.trainer, loader, &m), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(r.ctx)->message, "label 5");
    mpt_loader_destroy(loader);
    rig_close(&r);
    arrays_free(&a);
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(evaluation_counts_every_record_once),
    MPT_TEST_CASE(evaluation_agrees_with_predictions),
    MPT_TEST_CASE(evaluation_changes_nothing_in_training),
    MPT_TEST_CASE(predictions_need_no_labels_and_no_training),
    MPT_TEST_CASE(evaluation_refuses_labels_outside_of_the_classes),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
