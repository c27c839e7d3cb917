/* 02_features.c - writes two tf.Examples, reads them back, and looks inside

   build:  cc -O2 -I. examples/02_features.c -o features -lm -lpthread
   run:    ./features /tmp/two.tfrecord

   Shows: the writer, whose file appears only at finish(); reading features without a copy: names
   and values point into the record. Last line of the output: "label 1, 3 weights, first 0.5". */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"
#include <stdio.h>

static mpt_result write_two(mpt_ctx *ctx, const char *path) {
    static const float weights[3] = {0.5f, 0.25f, 0.125f};
    mpt_tfrecord_writer_desc desc = {0};
    mpt_tfrecord_writer *writer = NULL;
    mpt_example *example = NULL;
    mpt_bytes encoded;
    mpt_result rc;
    int64_t label;

    desc.path = path;
    rc = mpt_tfrecord_writer_open(ctx, &desc, &writer);
    if (rc == MPT_OK) rc = mpt_example_create(ctx, &example);
    for (label = 0; label < 2 && rc == MPT_OK; label++) {
        mpt_example_clear(example);
        rc = mpt_example_add_int64s(example, "label", &label, 1);
        if (rc == MPT_OK) rc = mpt_example_add_floats(example, "weights", weights, 3);
        if (rc == MPT_OK) rc = mpt_example_encode(example, &encoded);
        if (rc == MPT_OK) rc = mpt_tfrecord_writer_write(writer, encoded);
    }
    if (rc == MPT_OK) rc = mpt_tfrecord_writer_finish(writer);
    mpt_example_destroy(example);
    mpt_tfrecord_writer_close(writer); /* had finish() not come, nothing would be left */
    return rc;
}

static mpt_result print_record(mpt_bytes record) {
    mpt_feature label, weights;
    int64_t number;
    float first;
    mpt_result rc = mpt_example_feature(record, "label", &label);

    if (rc == MPT_OK) rc = mpt_example_feature(record, "weights", &weights);
    if (rc == MPT_OK) rc = mpt_feature_int64s(&label, 0, 1, &number);
    if (rc == MPT_OK) rc = mpt_feature_floats(&weights, 0, 1, &first);
    if (rc == MPT_OK)
        printf("label %d, %d weights, first %g\n", (int)number, (int)weights.count, (double)first);
    return rc;
}

int main(int argc, char **argv) {
    mpt_ctx *ctx = NULL;
    mpt_tfrecord *file = NULL;
    mpt_tfrecord_desc desc = {0};
    mpt_bytes record;
    mpt_result rc;

    if (argc != 2) {
        fprintf(stderr, "usage: %s FILE\n", argv[0]);
        return 2;
    }
    if (mpt_ctx_create(NULL, &ctx)) return 1;
    desc.path = argv[1];
    rc = write_two(ctx, desc.path);
    if (rc == MPT_OK) rc = mpt_tfrecord_open(ctx, &desc, &file);
    while (rc == MPT_OK && (rc = mpt_tfrecord_next(file, &record)) == MPT_OK)
        rc = print_record(record);
    if (rc != MPT_END) fprintf(stderr, "%s\n", mpt_last_error(ctx)->message);
    mpt_tfrecord_close(file);
    mpt_ctx_destroy(ctx);
    return rc != MPT_END;
}
