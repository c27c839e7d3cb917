/* train_program.h - what tests of the program train share: a small data set, what reports say */
#ifndef MPT_TEST_TRAIN_PROGRAM_H
#define MPT_TEST_TRAIN_PROGRAM_H

#include "program.h"

/* ---- data ------------------------------------------------------------------------------------ */
enum { SIDE = 12, CLASSES = 4, RECORDS_PER_SHARD = 20 };

/* A picture of one colour a half, 24 bits: which half is bright tells the class. */
static inline mpt_bytes make_bmp(int label, int number) {
    static unsigned char b[54 + SIDE * SIDE * 3]; /* rows of 36 bytes need no padding */
    mpt_bytes bytes;
    int x, y, c;

    bmp_head(b, SIDE, SIDE);
    for (y = 0; y < SIDE; y++)
        for (x = 0; x < SIDE; x++)
            for (c = 0; c < 3; c++) {
                int at = label < 2 ? x : y, bright = (at < SIDE / 2) == (label % 2 == 0);
                b[54 + (y * SIDE + x) * 3 + c] =
                    (unsigned char)((bright ? 150 : 60) + (number * 37 + x * 5 + y * 11) % 50);
            }
    bytes.data = b;
    bytes.size = sizeof b;
    return bytes;
}

/* n records under ImageNet's keys; labels run from 1. */
static inline void write_shard(const char *name, int first, int n) {
    mpt_tfrecord_writer_desc desc;
    mpt_tfrecord_writer *w = NULL;
    mpt_example *e = NULL;
    mpt_ctx *ctx = NULL;
    mpt_bytes picture, record;
    int64_t label;
    int i;

    CHECK_OK(NULL, mpt_ctx_create(NULL, &ctx));
    memset(&desc, 0, sizeof desc);
    desc.path = work_file(name);
    CHECK_OK(ctx, mpt_tfrecord_writer_open(ctx, &desc, &w));
    CHECK_OK(ctx, mpt_example_create(ctx, &e));
    for (i = first; i < first + n; i++) {
        label = i % CLASSES + 1;
        picture = make_bmp((int)label - 1, i);
        mpt_example_clear(e);
        CHECK_OK(ctx, mpt_example_add_bytes(e, "image/encoded", &picture, 1));
        CHECK_OK(ctx, mpt_example_add_int64s(e, "image/class/label", &label, 1));
        CHECK_OK(ctx, mpt_example_encode(e, &record));
        CHECK_OK(ctx, mpt_tfrecord_writer_write(w, record));
    }
    CHECK_OK(ctx, mpt_tfrecord_writer_finish(w));
    mpt_example_destroy(e);
    mpt_tfrecord_writer_close(w);
    mpt_ctx_destroy(ctx);
}

/* 60 records to train on, in 3 files, and 25 to evaluate on. */
static inline void fresh_data(void) {
    fresh_directory();
    write_shard("train-00000-of-00003", 0, RECORDS_PER_SHARD);
    write_shard("train-00001-of-00003", 20, RECORDS_PER_SHARD);
    write_shard("train-00002-of-00003", 40, RECORDS_PER_SHARD);
    write_shard("test-00000-of-00001", 100, 25);
}

static inline void flip_bit(const char *name, size_t offset) {
    size_t size;
    unsigned char *b = mpt_test_read_file(work_file(name), &size);

    CHECK(offset < size);
    b[offset] ^= 4;
    mpt_test_write_file(work_file(name), b, size);
    free(b);
}

/* ---- reports --------------------------------------------------------------------------------- */
/* The value behind a name in a report, as it stands there, in four buffers used in turn. */
static inline const char *report_value(const char *report, const char *name) {
    static char values[4][200];
    static int turn;
    char key[100], *value = values[turn++ % 4], *text;
    const char *at;
    size_t size;

    text = (char *)mpt_test_read_file(work_file(report), &size);
    snprintf(key, sizeof key, "\"%s\": ", name);
    at = strstr(text, key);
    if (!at) mpt_test_fail(__FILE__, __LINE__, "%s has no %s", report, name);
    at += strlen(key);
    size = *at == '"' ? strcspn(at + 1, "\"") + 2 : strcspn(at, ",}\n");
    snprintf(value, sizeof values[0], "%.*s", (int)size, at);
    free(text);
    return value;
}

static inline double report_number(const char *report, const char *name) {
    const char *value = report_value(report, name);
    char *end;
    double number = strtod(value, &end);

    if (*end) mpt_test_fail(__FILE__, __LINE__, "%s: %s is no number: %s", report, name, value);
    return number;
}

#define CHECK_SAME(a, b, name) CHECK_EQ_STR(report_value(a, name), report_value(b, name))

#endif /* MPT_TEST_TRAIN_PROGRAM_H */
