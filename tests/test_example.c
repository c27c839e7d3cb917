/* test_example.c - >>example: tf.Example, read as protobuf reads it and written as it writes it

   The judges are files: fixtures.txt holds what TensorFlow reads from its own records, examples.txt
   what upb (protobuf's parser in C) makes of random and damaged messages. */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "mpt_test.h"

static mpt_bytes bytes_of(const void *data, size_t size) {
    mpt_bytes b;
    b.data = (const uint8_t *)data;
    b.size = size;
    return b;
}

static mpt_ctx *new_ctx(mpt_test_allocator *memory) {
    mpt_ctx_desc desc;
    mpt_ctx *ctx = NULL;
    memset(&desc, 0, sizeof desc);
    desc.num_threads = 1;
    if (memory) desc.allocator = memory->hooks;
    return mpt_ctx_create(&desc, &ctx) == MPT_OK ? ctx : NULL;
}

/* Hex digits (blanks allowed, "-" for nothing) into a block of exactly that size, so that ASan sees
   the first byte read beyond it. The caller frees data. */
static mpt_bytes from_hex(const char *text) {
    uint8_t *out = (uint8_t *)malloc(strlen(text) / 2 + 1), *exact;
    size_t n = 0;
    unsigned byte;
    for (; *text && *text != '-' && *text != '\n'; text += 2) {
        while (*text == ' ') text++;
        CHECK_EQ_INT(sscanf(text, "%2x", &byte), 1);
        out[n++] = (uint8_t)byte;
    }
    exact = (uint8_t *)malloc(n ? n : 1);
    if (n) memcpy(exact, out, n);
    free(out);
    return bytes_of(exact, n);
}

static void drop(mpt_bytes b) {
    free((void *)(uintptr_t)b.data);
}

/* ---- comparing with what others read -------------------------------------------------------- */

/* The feature of that name through mpt_example_next: the last entry counts. */
static mpt_feature find_by_walk(mpt_bytes example, mpt_bytes name) {
    mpt_feature found, f;
    size_t cursor = 0;
    mpt_result rc;
    memset(&found, 0, sizeof found);
    while ((rc = mpt_example_next(example, &cursor, &f)) == MPT_OK)
        if (f.name.size == name.size && !memcmp(f.name.data, name.data, name.size)) found = f;
    CHECK_EQ_INT(rc, MPT_END);
    return found;
}

/* Distinct names that mpt_example_next gives. */
static int count_names(mpt_bytes example) {
    mpt_feature f;
    size_t cursor = 0;
    int n = 0;
    while (mpt_example_next(example, &cursor, &f) == MPT_OK)
        n += find_by_walk(example, f.name).entry.data == f.entry.data;
    return n;
}

static void check_bytes_word(const char *word, mpt_bytes value) {
    unsigned crc, size;
    if (strchr(word, ':')) {
        CHECK_EQ_INT(sscanf(word, "%8x:%u", &crc, &size), 2);
        CHECK_EQ_INT(value.size, size);
        CHECK_EQ_INT(mpt_crc32(0, value.data, value.size), crc);
    } else {
        mpt_bytes expected = from_hex(word);
        CHECK_EQ_INT(value.size, expected.size);
        CHECK_EQ_MEM(value.data, expected.data, expected.size);
        drop(expected);
    }
}

/* All values at once and each alone must be those of the words that strtok gives next. */
static void check_values(const mpt_feature *f) {
    mpt_bytes *bytes = (mpt_bytes *)calloc((size_t)f->count + 1, sizeof *bytes), one_bytes;
    float *floats = (float *)calloc((size_t)f->count + 1, sizeof *floats), one_float;
    int64_t *ints = (int64_t *)calloc((size_t)f->count + 1, sizeof *ints), one_int, i;
    mpt_result as_bytes = mpt_feature_bytes(f, 0, f->count, bytes);
    mpt_result as_floats = mpt_feature_floats(f, 0, f->count, floats);
    mpt_result as_ints = mpt_feature_int64s(f, 0, f->count, ints);
    CHECK_EQ_INT(as_bytes, f->kind == MPT_FEATURE_BYTES ? MPT_OK : MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(as_floats, f->kind == MPT_FEATURE_FLOAT ? MPT_OK : MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(as_ints, f->kind == MPT_FEATURE_INT64 ? MPT_OK : MPT_ERR_INVALID_ARGUMENT);
    for (i = 0; i < f->count; i++) {
        const char *word = strtok(NULL, " \n");
        CHECK(word != NULL);
        if (f->kind == MPT_FEATURE_BYTES) {
            check_bytes_word(word, bytes[i]);
            CHECK_EQ_INT(mpt_feature_bytes(f, i, 1, &one_bytes), MPT_OK);
            CHECK(one_bytes.data == bytes[i].data && one_bytes.size == bytes[i].size);
        } else if (f->kind == MPT_FEATURE_FLOAT) {
            if (strcmp(word, "NAN"))
                CHECK_EQ_INT(mpti_f32_bits(floats[i]), strtoul(word, NULL, 16));
            else CHECK((mpti_f32_bits(floats[i]) & 0x7fffffffu) > 0x7f800000u);
            CHECK_EQ_INT(mpt_feature_floats(f, i, 1, &one_float), MPT_OK);
            CHECK_EQ_MEM(&one_float, &floats[i], sizeof one_float);
        } else {
            CHECK_EQ_INT(ints[i], strtoll(word, NULL, 10));
            CHECK_EQ_INT(mpt_feature_int64s(f, i, 1, &one_int), MPT_OK);
            CHECK_EQ_INT(one_int, ints[i]);
        }
    }
    CHECK(strtok(NULL, " \n") == NULL);
    free(bytes);
    free(floats);
    free(ints);
}

/* A line "feature NAME KIND COUNT VALUE..." against the example. */
static void check_feature_line(mpt_bytes example, char *line) {
    mpt_bytes name;
    mpt_feature f, direct;
    char terminated[512];
    strtok(line, " \n");
    name = from_hex(strtok(NULL, " \n"));
    f = find_by_walk(example, name);
    CHECK(f.name.data != NULL);
    CHECK_EQ_STR(mpt_feature_kind_string(f.kind), strtok(NULL, " \n"));
    CHECK_EQ_INT(f.count, strtoll(strtok(NULL, " \n"), NULL, 10));
    if (name.size < sizeof terminated && !memchr(name.data, 0, name.size)) {
        memcpy(terminated, name.data, name.size);
        terminated[name.size] = 0;
        CHECK_EQ_INT(mpt_example_feature(example, terminated, &direct), MPT_OK);
        CHECK(direct.entry.data == f.entry.data && direct.count == f.count &&
              direct.kind == f.kind);
    }
    check_values(&f);
    drop(name);
}

/* Each record that TensorFlow wrote: all features that it reads, and no other. */
MPT_TEST(fixtures_hold_the_features_that_tensorflow_reads) {
    FILE *list = fopen(mpt_test_data("fixtures.txt"), "r");
    static char line[65536];
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_tfrecord_desc desc;
    mpt_tfrecord *f = NULL;
    mpt_bytes record = {NULL, 0};
    int features = 0, seen = 0, total = 0;
    CHECK(list != NULL);
    while (fgets(line, sizeof line, list)) {
        char name[128], kind[16], path[1024];
        unsigned crc, size, valid;
        if (!strncmp(line, "feature ", 8)) {
            features++;
            total++;
            if (f) check_feature_line(record, line);
            continue;
        }
        if (f && record.data && seen) CHECK_EQ_INT(count_names(record), features);
        features = seen = 0;
        if (sscanf(line, "file %127s %15s", name, kind) == 2) {
            mpt_tfrecord_close(f);
            f = NULL;
            record.data = NULL;
            snprintf(path, sizeof path, "%s", mpt_test_data(name));
            memset(&desc, 0, sizeof desc);
            desc.path = path;
            if (mpt_tfrecord_open(ctx, &desc, &f) == MPT_ERR_UNSUPPORTED) f = NULL; /* no zlib */
        } else if (f) {
            CHECK_EQ_INT(sscanf(line, "record %8x %u %u", &crc, &size, &valid), 3);
            CHECK_OK(ctx, mpt_tfrecord_next(f, &record));
            CHECK_EQ_INT(mpt_example_check(ctx, record), valid ? MPT_OK : MPT_ERR_CORRUPT_DATA);
            seen = (int)valid;
        }
    }
    CHECK(total > 500);
    mpt_tfrecord_close(f);
    fclose(list);
    mpt_ctx_destroy(ctx);
}

/* Random and damaged messages: taken and refused as upb does, with the same values. */
MPT_TEST(messages_are_taken_and_refused_as_protobuf_does) {
    FILE *list = fopen(mpt_test_data("examples.txt"), "r");
    static char line[65536];
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_bytes message = {NULL, 0};
    int features = 0, count = 0, valid = 0;
    bool more = true;
    CHECK(list != NULL);
    while (more) {
        more = fgets(line, sizeof line, list) != NULL;
        if (more && !strncmp(line, "feature ", 8)) {
            features++;
            check_feature_line(message, line);
            continue;
        }
        if (message.data && valid) CHECK_EQ_INT(count_names(message), features);
        drop(message);
        message.data = NULL;
        if (!more) break;
        valid = line[strlen(line) - 2] == '1';
        *strrchr(line, ' ') = 0;
        message = from_hex(line + strlen("message "));
        CHECK_EQ_INT(mpt_example_check(ctx, message), valid ? MPT_OK : MPT_ERR_CORRUPT_DATA);
        if (!valid) CHECK_CONTAINS(mpt_last_error(ctx)->message, "not a tf.Example: byte ");
        features = 0;
        count++;
    }
    CHECK(count >= 1000);
    fclose(list);
    mpt_ctx_destroy(ctx);
}

/* ---- single rules --------------------------------------------------------------------------- */

/* O-07: the sign survives; -1 has ten bytes; eleven are an error. */
MPT_TEST(o07_integers_keep_sign_and_width) {
    static const int64_t values[] = {
        -1, INT64_MIN, INT64_MAX, (int64_t)1 << 31, ((int64_t)1 << 32) + 7, 0};
    static const uint8_t minus_one[] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01};
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_example *e;
    mpt_bytes encoded, bad;
    mpt_feature f;
    int64_t back[6];
    CHECK_OK(ctx, mpt_example_create(ctx, &e));
    CHECK_OK(ctx, mpt_example_add_int64s(e, "v", values, 6));
    CHECK_OK(ctx, mpt_example_encode(e, &encoded));
    CHECK_EQ_MEM(encoded.data + encoded.size - 10 - 10 - 9 - 5 - 5 - 1, minus_one, 10);
    CHECK_EQ_INT(mpt_example_feature(encoded, "v", &f), MPT_OK);
    CHECK_EQ_INT(f.count, 6);
    CHECK_EQ_INT(mpt_feature_int64s(&f, 0, 6, back), MPT_OK);
    CHECK_EQ_MEM(back, values, sizeof values);
    bad = from_hex("0a17 0a15 0a016b 1210 1a0e 0a0c 8080808080808080808000 05");
    CHECK_RESULT(ctx, mpt_example_check(ctx, bad), MPT_ERR_CORRUPT_DATA);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "byte 13 of 25: a number is too long");
    drop(bad);
    mpt_example_destroy(e);
    mpt_ctx_destroy(ctx);
}

/* O-09: an empty list, or no list at all: there, without a value. */
MPT_TEST(o09_features_without_values) {
    mpt_bytes empty_list = from_hex("0a0d0a0b0a056c6162656c12021a00"),
              no_kind = from_hex("0a0b0a090a056c6162656c1200");
    mpt_bytes empty_bytes = from_hex("0a0d0a0b0a056c6162656c12020a00"), value;
    mpt_feature f;
    int64_t number;
    CHECK_EQ_INT(mpt_example_feature(empty_list, "label", &f), MPT_OK);
    CHECK_EQ_INT(f.kind, MPT_FEATURE_INT64);
    CHECK_EQ_INT(f.count, 0);
    CHECK(f.name.data != NULL);
    CHECK_EQ_INT(mpt_feature_int64s(&f, 0, 1, &number), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_feature_int64s(&f, 0, 0, NULL), MPT_OK);
    CHECK_EQ_INT(mpt_example_find(empty_list, "label", &value), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_example_feature(no_kind, "label", &f), MPT_OK);
    CHECK_EQ_INT(f.kind, MPT_FEATURE_NONE);
    CHECK(f.name.data != NULL);
    CHECK_EQ_INT(mpt_example_find(no_kind, "label", &value), MPT_END);
    CHECK_EQ_INT(mpt_example_find(empty_bytes, "label", &value), MPT_END);
    CHECK(value.data == NULL);
    CHECK_EQ_INT(mpt_example_feature(no_kind, "lab", &f), MPT_OK); /* no prefix counts */
    CHECK(f.name.data == NULL && f.kind == MPT_FEATURE_NONE);
    drop(empty_list);
    drop(no_kind);
    drop(empty_bytes);
}

/* O-13: of a SequenceExample the context is read, which is field 1 as in an Example; the lists are
   unknown fields. */
MPT_TEST(o13_sequence_example_gives_its_context) {
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_tfrecord_desc desc;
    mpt_tfrecord *f;
    mpt_bytes record;
    mpt_feature feature;
    int64_t id = 0;
    memset(&desc, 0, sizeof desc);
    desc.path = mpt_test_data("sequence-example.tfrecord");
    CHECK_OK(ctx, mpt_tfrecord_open(ctx, &desc, &f));
    CHECK_OK(ctx, mpt_tfrecord_next(f, &record));
    CHECK_EQ_INT(mpt_example_feature(record, "id", &feature), MPT_OK);
    CHECK_EQ_INT(mpt_feature_int64s(&feature, 0, 1, &id), MPT_OK);
    CHECK_EQ_INT(id, 7);
    CHECK_EQ_INT(count_names(record), 1);
    mpt_tfrecord_close(f);
    mpt_ctx_destroy(ctx);
}

/* Every cut of a message, from a block that ends with it, is refused; nothing is a message too. */
MPT_TEST(cut_messages_are_never_read_beyond) {
    mpt_bytes whole = from_hex("0a30 0a14 0a016b 120f 1a0d 0a05 0102030405 0806 0807 0803 "
                               "0a18 0a016c 1213 1211 0a04 0000803f 0d 0000803f 0a04 00008040");
    size_t n;
    CHECK_EQ_INT(mpt_example_check(NULL, whole), MPT_OK);
    CHECK_EQ_INT(count_names(whole), 2);
    for (n = 0; n <= whole.size; n++) {
        uint8_t *exact = (uint8_t *)malloc(n ? n : 1);
        mpt_feature f;
        size_t cursor = 0;
        memcpy(exact, whole.data, n);
        CHECK_EQ_INT(mpt_example_check(NULL, bytes_of(exact, n)),
                     n == 0 || n == whole.size ? MPT_OK : MPT_ERR_CORRUPT_DATA);
        if (n < whole.size)
            CHECK_EQ_INT(mpt_example_next(bytes_of(exact, n), &cursor, &f),
                         n == 0 ? MPT_END : MPT_ERR_CORRUPT_DATA);
        free(exact);
    }
    drop(whole);
}

/* Lists of one kind add up over values, another kind starts anew; a later entry replaces. */
MPT_TEST(merging_follows_protobuf) {
    static const struct {
        const char *hex, *kind;
        int count;
        int64_t last;
    } cases[] = {
        {"0a0f0a0d0a016b12081a0208011a020802", "int64", 2, 2},               /* a list twice */
        {"0a110a0f0a016b12041a02080112041a020802", "int64", 2, 2},           /* a value twice */
        {"0a160a090a016b12041a0208010a090a016b12041a020802", "int64", 1, 2}, /* an entry twice */
        {"0a130a110a016b120c1a0208010a020a001a020803", "int64", 1, 3}, /* another kind and back */
        {"0a0b0a0912041a0208050a016b", "int64", 1, 5},                 /* value before key */
        {"0a0a0a080a016a0a016b1200", "none", 0, 0},                    /* the last key counts */
        {"0a0b0a090a016b12041a0208010a0b0a090a016b12041a020807", "int64", 1,
         7},                                                    /* Features twice */
        {"0a100a090a016b12041a0208010a030a016b", "none", 0, 0}, /* a later entry without a value */
        {"0a0e0a0c0a016b12071a050a01010802", "int64", 2, 2},    /* packed and single */
        {"0a0d0a0b0a016b12041a0208054801", "int64", 1, 5},      /* a strange field in an entry */
    };
    size_t i;
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        mpt_bytes example = from_hex(cases[i].hex);
        mpt_feature f;
        int64_t values[4] = {0, 0, 0, 0};
        CHECK_EQ_INT(mpt_example_feature(example, "k", &f), MPT_OK);
        CHECK(f.name.data != NULL);
        CHECK_EQ_STR(mpt_feature_kind_string(f.kind), cases[i].kind);
        CHECK_EQ_INT(f.count, cases[i].count);
        if (f.count) CHECK_EQ_INT(mpt_feature_int64s(&f, 0, f.count, values), MPT_OK);
        if (f.count) CHECK_EQ_INT(values[f.count - 1], cases[i].last);
        CHECK_EQ_INT(values[3], 0); /* nothing written beyond n */
        drop(example);
    }
}

MPT_TEST(scan_finds_several_features_in_one_pass) {
    static const char *const names[] = {"b", "none", "a", "b"};
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_example *e;
    mpt_bytes encoded, bad;
    mpt_feature found[4];
    mpti_parse_error error;
    int64_t one = 1;
    float two = 2;
    CHECK_OK(ctx, mpt_example_create(ctx, &e));
    CHECK_OK(ctx, mpt_example_add_int64s(e, "a", &one, 1));
    CHECK_OK(ctx, mpt_example_add_floats(e, "b", &two, 1));
    CHECK_OK(ctx, mpt_example_encode(e, &encoded));
    CHECK_EQ_INT(mpti_example_scan(encoded, names, 4, found, &error), MPT_OK);
    CHECK_EQ_INT(found[0].kind, MPT_FEATURE_FLOAT);
    CHECK(found[1].name.data == NULL);
    CHECK_EQ_INT(found[2].kind, MPT_FEATURE_INT64);
    CHECK(found[3].entry.data == found[0].entry.data);
    bad = from_hex("0a02 0a09");
    CHECK_EQ_INT(mpti_example_scan(bad, names, 4, found, &error), MPT_ERR_CORRUPT_DATA);
    CHECK_EQ_INT(error.offset, 3);
    CHECK_EQ_STR(error.cause, "a length goes beyond the end of the message");
    drop(bad);
    mpt_example_destroy(e);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(wrong_arguments_are_refused) {
    mpt_bytes example = from_hex("0a0f 0a0d 0a016b 1208 1a06 0a04 01020304"), value;
    mpt_feature f, g;
    int64_t ints[4];
    float x;
    size_t cursor;
    CHECK_EQ_INT(mpt_example_feature(example, NULL, &f), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_example_feature(example, "k", NULL), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_example_feature(example, "k", &f), MPT_OK);
    CHECK_EQ_INT(f.count, 4);
    CHECK_EQ_INT(mpt_feature_int64s(&f, 1, 3, ints), MPT_OK);
    CHECK_EQ_INT(ints[2], 4);
    CHECK_EQ_INT(mpt_feature_int64s(&f, 1, 4, ints), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_feature_int64s(&f, -1, 1, ints), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_feature_int64s(&f, INT64_MAX, 1, ints), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_feature_int64s(&f, 0, INT64_MAX, ints), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_feature_int64s(&f, 0, -1, ints), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_feature_int64s(NULL, 0, 1, ints), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_feature_floats(&f, 0, 1, &x), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_example_find(example, "k", &value), MPT_ERR_INVALID_ARGUMENT);
    for (cursor = 1; cursor < 200; cursor++) { /* a cursor that nobody gave: no crash */
        size_t c = cursor;
        (void)!mpt_example_next(example, &c, &g);
        c = cursor << 16 << 16;
        (void)!mpt_example_next(example, &c, &g);
    }
    CHECK_EQ_STR(mpt_feature_kind_string((mpt_feature_kind)9), "unknown");
    drop(example);
}

/* ---- writing -------------------------------------------------------------------------------- */

/* Byte for byte what protobuf writes (packed, keys in the order of adding). */
MPT_TEST(encoding_is_that_of_protobuf) {
    static const int64_t ints[] = {0, 1, 150, 16383, 8192};
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_example *e;
    mpt_bytes encoded, want, values[2];
    CHECK_OK(ctx, mpt_example_create(ctx, &e));
    CHECK_OK(ctx, mpt_example_encode(e, &encoded));
    CHECK_EQ_INT(encoded.size, 0);
    CHECK_EQ_INT(mpt_example_check(ctx, encoded), MPT_OK);
    values[0] = bytes_of("", 0);
    values[1] = bytes_of("xyz", 3);
    CHECK_OK(ctx, mpt_example_add_int64s(e, "a", ints, 5));
    CHECK_OK(ctx, mpt_example_add_bytes(e, "bb", values, 2));
    CHECK_OK(ctx, mpt_example_add_floats(e, "", NULL, 0));
    CHECK_OK(ctx, mpt_example_encode(e, &encoded));
    want = from_hex("0a2c 0a11 0a0161 120c 1a0a 0a08 0001 9601 ff7f 8040 "
                    "0a0f 0a026262 1209 0a07 0a00 0a0378797a 0a06 0a00 1202 1200");
    CHECK_EQ_INT(encoded.size, want.size);
    CHECK_EQ_MEM(encoded.data, want.data, want.size);
    CHECK_OK(ctx, mpt_example_encode(e, &encoded)); /* again */
    CHECK_EQ_MEM(encoded.data, want.data, want.size);
    drop(want);
    mpt_example_clear(e);
    CHECK_OK(ctx, mpt_example_encode(e, &encoded));
    CHECK_EQ_INT(encoded.size, 0);
    CHECK_OK(ctx, mpt_example_add_int64s(e, "a", ints, 1)); /* the name is new again */
    mpt_example_destroy(e);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(what_is_written_is_read_back) {
    enum { NUM = 40000 };
    mpt_ctx *ctx = new_ctx(NULL);
    float *floats = (float *)malloc(NUM * sizeof *floats),
          *floats_back = (float *)malloc(NUM * sizeof *floats);
    int64_t *ints = (int64_t *)malloc(NUM * sizeof *ints),
            *ints_back = (int64_t *)malloc(NUM * sizeof *ints);
    mpt_bytes *bytes = (mpt_bytes *)malloc(NUM * sizeof *bytes),
              *bytes_back = (mpt_bytes *)malloc(NUM * sizeof *bytes);
    mpt_example *e;
    mpt_bytes encoded;
    mpt_feature f;
    int i, n;
    CHECK_OK(ctx, mpt_example_create(ctx, &e));
    for (i = 0; i < NUM; i++) {
        floats[i] = mpti_f32_from_bits((uint32_t)i * 2654435761u);
        ints[i] = (int64_t)((uint64_t)i * 0x9E3779B97F4A7C15u >> (i % 64));
        if (i % 2) ints[i] = -ints[i];
        bytes[i] = bytes_of((const uint8_t *)floats + i, (size_t)(i % 50));
    }
    for (n = 1; n <= NUM; n *= 200) {
        mpt_example_clear(e);
        CHECK_OK(ctx, mpt_example_add_floats(e, "f", floats, n));
        CHECK_OK(ctx, mpt_example_add_int64s(e, "\xc3\xa9", ints, n));
        CHECK_OK(ctx, mpt_example_add_bytes(e, "b", bytes, n));
        CHECK_OK(ctx, mpt_example_encode(e, &encoded));
        CHECK_OK(ctx, mpt_example_check(ctx, encoded));
        CHECK_EQ_INT(mpt_example_feature(encoded, "f", &f), MPT_OK);
        CHECK_EQ_INT(f.count, n);
        CHECK_EQ_INT(mpt_feature_floats(&f, 0, n, floats_back), MPT_OK);
        CHECK_EQ_MEM(floats_back, floats, (size_t)n * sizeof *floats);
        CHECK_EQ_INT(mpt_example_feature(encoded, "\xc3\xa9", &f), MPT_OK);
        CHECK_EQ_INT(f.count, n);
        CHECK_EQ_INT(mpt_feature_int64s(&f, 0, n, ints_back), MPT_OK);
        CHECK_EQ_MEM(ints_back, ints, (size_t)n * sizeof *ints);
        CHECK_EQ_INT(mpt_example_feature(encoded, "b", &f), MPT_OK);
        CHECK_EQ_INT(mpt_feature_bytes(&f, 0, n, bytes_back), MPT_OK);
        for (i = 0; i < n; i++) {
            CHECK_EQ_INT(bytes_back[i].size, bytes[i].size);
            CHECK_EQ_MEM(bytes_back[i].data, bytes[i].data, bytes[i].size);
        }
    }
    free(floats);
    free(floats_back);
    free(ints);
    free(ints_back);
    free(bytes);
    free(bytes_back);
    mpt_example_destroy(e);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(names_must_be_new_and_utf8) {
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_example *e;
    mpt_bytes before, after, huge = bytes_of("x", (size_t)INT32_MAX);
    int64_t one = 1;
    CHECK_OK(ctx, mpt_example_create(ctx, &e));
    CHECK_OK(ctx, mpt_example_add_int64s(e, "a", &one, 1));
    CHECK_OK(ctx, mpt_example_encode(e, &before));
    CHECK_RESULT(ctx, mpt_example_add_int64s(e, "a", &one, 1), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "\"a\"");
    CHECK_RESULT(ctx, mpt_example_add_floats(e, "\xff", NULL, 0), MPT_ERR_INVALID_ARGUMENT);
    CHECK_RESULT(ctx, mpt_example_add_bytes(e, "b", &huge, 1), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "2 GiB");
    CHECK_EQ_INT(mpt_example_add_int64s(e, NULL, &one, 1), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_example_add_int64s(e, "c", NULL, 1), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_example_add_int64s(e, "c", &one, -1), MPT_ERR_INVALID_ARGUMENT);
    CHECK_OK(ctx, mpt_example_encode(e, &after)); /* as it was */
    CHECK_EQ_INT(after.size, before.size);
    CHECK_EQ_INT(count_names(after), 1);
    mpt_example_destroy(e);
    mpt_ctx_destroy(ctx);
}

/* The n-th allocation fails: an error, the Example as before, and the same call may come again. */
MPT_TEST(every_allocation_fails) {
    static const float values[1000];
    int n;
    for (n = 1;; n++) {
        mpt_test_allocator memory;
        mpt_ctx *ctx;
        mpt_example *e = NULL;
        mpt_bytes encoded;
        char name[16];
        bool failed;
        int i;
        mpt_test_allocator_init(&memory, n, 0);
        ctx = new_ctx(&memory);
        if (ctx && mpt_example_create(ctx, &e) == MPT_OK) {
            for (i = 0; i < 10; i++) {
                mpt_result rc;
                snprintf(name, sizeof name, "f%d", i);
                rc = mpt_example_add_floats(e, name, values, i * 100);
                if (rc) CHECK_RESULT(ctx, rc, MPT_ERR_OUT_OF_MEMORY);
                if (rc) CHECK_OK(ctx, mpt_example_add_floats(e, name, values, i * 100));
            }
            CHECK_OK(ctx, mpt_example_encode(e, &encoded));
            CHECK_EQ_INT(count_names(encoded), 10);
        }
        mpt_example_destroy(e);
        mpt_ctx_destroy(ctx);
        failed = memory.has_failed;
        CHECK_NO_LEAK(&memory);
        if (!failed) break;
    }
    CHECK(n > 4);
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(fixtures_hold_the_features_that_tensorflow_reads),
    MPT_TEST_CASE(messages_are_taken_and_refused_as_protobuf_does),
    MPT_TEST_CASE(o07_integers_keep_sign_and_width),
    MPT_TEST_CASE(o09_features_without_values),
    MPT_TEST_CASE(o13_sequence_example_gives_its_context),
    MPT_TEST_CASE(cut_messages_are_never_read_beyond),
    MPT_TEST_CASE(merging_follows_protobuf),
    MPT_TEST_CASE(scan_finds_several_features_in_one_pass),
    MPT_TEST_CASE(wrong_arguments_are_refused),
    MPT_TEST_CASE(encoding_is_that_of_protobuf),
    MPT_TEST_CASE(what_is_written_is_read_back),
    MPT_TEST_CASE(names_must_be_new_and_utf8),
    MPT_TEST_CASE(every_allocation_fails),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
