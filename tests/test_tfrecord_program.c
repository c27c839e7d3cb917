/* The program tfrecord, run as its users run it: every command on good and bad input, exit codes,
   what is left on the disk. Covers >>tfrecord and >>loader (picture headers) from outside. */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "program.h"

#include <signal.h>

/* Names in the working directory, sorted, with a blank behind each. */
static const char *listing(void) {
    CHECK_RUNS("ls -A | LC_ALL=C sort | tr '\\n' ' '");
    return run_out;
}

/* ---- input files ----------------------------------------------------------------------------- */
/* Without zlib there is no PNG, so no from-idx, and no compression. */
static void need_zlib(void) {
#ifndef MPTRAIN_ZLIB
    SKIP("built without zlib");
#endif
}

static void put_u32(unsigned char *p, unsigned v) {
    p[0] = (unsigned char)(v >> 24);
    p[1] = (unsigned char)(v >> 16);
    p[2] = (unsigned char)(v >> 8);
    p[3] = (unsigned char)v;
}

enum { IDX_COUNT = 30, IDX_HEIGHT = 5, IDX_WIDTH = 4 };

static unsigned char idx_pixel(int picture, int y, int x, int c) {
    return (unsigned char)(picture * 7 + y * 31 + x * 3 + c * 101);
}

/* 30 pictures, 5 high, 4 wide; labels 0 1 2 0 1 2 ... `extra` bytes are added or left out. */
static void write_idx(int channels, int num_labels, int extra) {
    unsigned char b[4 + 16 + IDX_COUNT * IDX_HEIGHT * IDX_WIDTH * 3 + 8];
    int n = 4, i, y, x, c;

    memset(b, 0, sizeof b);
    put_u32(b, channels == 1 ? 0x803 : 0x804);
    put_u32(b + 4, IDX_COUNT);
    put_u32(b + 8, IDX_HEIGHT);
    put_u32(b + 12, IDX_WIDTH);
    put_u32(b + 16, (unsigned)channels);
    n = channels == 1 ? 16 : 20;
    for (i = 0; i < IDX_COUNT; i++)
        for (y = 0; y < IDX_HEIGHT; y++)
            for (x = 0; x < IDX_WIDTH; x++)
                for (c = 0; c < channels; c++) b[n++] = idx_pixel(i, y, x, c);
    mpt_test_write_file(work_file("images"), b, (size_t)(n + extra));
    put_u32(b, 0x801);
    put_u32(b + 4, (unsigned)num_labels);
    for (i = 0; i < num_labels; i++) b[8 + i] = (unsigned char)(i % 3);
    mpt_test_write_file(work_file("labels"), b, (size_t)(8 + num_labels));
}

/* A BMP of one colour, 24 bits. */
static void write_bmp(const char *name, int width, int height, unsigned char gray) {
    unsigned char b[54 + 64 * 64 * 4];
    size_t size = bmp_head(b, width, height);

    CHECK(size <= sizeof b);
    memset(b + 54, gray, size - 54);
    mpt_test_write_file(work_file(name), b, size);
}

static void write_text(const char *name, const char *text) {
    mpt_test_write_file(work_file(name), text, strlen(text));
}

/* Records of the given payloads. */
static void write_records(const char *name, const mpt_bytes *payloads, int n) {
    mpt_tfrecord_writer_desc desc;
    mpt_tfrecord_writer *w = NULL;
    mpt_ctx *ctx = NULL;
    int i;

    CHECK_OK(NULL, mpt_ctx_create(NULL, &ctx));
    memset(&desc, 0, sizeof desc);
    desc.path = work_file(name);
    CHECK_OK(ctx, mpt_tfrecord_writer_open(ctx, &desc, &w));
    for (i = 0; i < n; i++) CHECK_OK(ctx, mpt_tfrecord_writer_write(w, payloads[i]));
    CHECK_OK(ctx, mpt_tfrecord_writer_finish(w));
    mpt_tfrecord_writer_close(w);
    mpt_ctx_destroy(ctx);
}

/* n records, record i holding i bytes of value i. */
static void write_simple_records(const char *name, int n) {
    unsigned char data[64][64];
    mpt_bytes payloads[64];
    int i;

    CHECK(n <= 64);
    for (i = 0; i < n; i++) {
        memset(data[i], i, sizeof data[i]);
        payloads[i].data = data[i];
        payloads[i].size = (size_t)i;
    }
    write_records(name, payloads, n);
}

static void flip_bit(const char *name, size_t offset) {
    const char *path = work_file(name);
    size_t size;
    unsigned char *b;

    b = mpt_test_read_file(path, &size);
    CHECK(offset < size);
    b[offset] ^= 4;
    mpt_test_write_file(path, b, size);
    free(b);
}

/* ---- help, usage ----------------------------------------------------------------------------- */
static const char *const commands[] = {"cat",      "head",  "count",    "verify",
                                       "stats",    "index", "from-idx", "from-folder",
                                       "from-csv", "split", "merge",    "recompress"};

MPT_TEST(help_and_version_go_to_standard_output) {
    size_t i;

    fresh_directory();
    CHECK_RUNS("$T --help");
    for (i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        CHECK_RUNS("$T --help");
        CHECK_CONTAINS(run_out, commands[i]);
        CHECK_RUNS("$T %s --help", commands[i]);
        CHECK_CONTAINS(run_out, "usage: tfrecord ");
        CHECK_CONTAINS(run_out, "--help");
        CHECK_EQ_STR(run_err, "");
        CHECK_RUNS("$T %s --version", commands[i]);
        CHECK_EQ_STR(run_out, "tfrecord " MPT_VERSION_STRING "\n");
    }
    CHECK_RUNS("$T --version");
    CHECK_EQ_STR(run_out, "tfrecord " MPT_VERSION_STRING "\n");
    CHECK_RUNS("$T from-idx --seed 5 --help"); /* the real default, and the variable behind one */
    CHECK_CONTAINS(run_out, "(default: 0)");
    CHECK_CONTAINS(run_out, "(default: cores; environment: MPTRAIN_THREADS)");
}

MPT_TEST(wrong_usage_is_one_line_and_exit_2) {
    static const char *const lines[][2] = {
        {"$T", "needs a command"},
        {"$T vrify x", "did you mean verify?"},
        {"$T frobnicate", "unknown command 'frobnicate' (see --help)\n"},
        {"$T zzz", "unknown command 'zzz' (see --help)\n"}, /* cat: no letter is right */
        {"$T ct", "did you mean cat?"},
        {"$T cat", "needs FILE..."},
        {"$T cat --limt 3 x", "unknown option --limt: did you mean --limit?"},
        {"$T cat -q x", "unknown option -q"},
        {"$T cat x --limit", "--limit needs a value"},
        {"$T cat --limit --index 3 x", "--limit needs a value"},
        {"$T cat --limit 1x x", "'1x' is no whole number"},
        {"$T cat --limit=-1 x", "--limit: '-1' is no whole number of at least 0\n"},
        {"$T count --max-record-bytes 0 x", "'0' is no whole number of at least 1 (K, M, G, T"},
        {"$T cat --index 9223372036854775808 x", "is no whole number"},
        {"$T head --limit '' x", "'' is no whole number"},
        {"$T verify --threads 0 x", "from 1 to 1024"},
        {"MPTRAIN_THREADS=many $T verify x", "MPTRAIN_THREADS: 'many'"},
        {"$T stats --json=1 x", "--json takes no value"},
        {"$T stats --label-key", "--label-key needs a value"},
        {"$T index --chekc x", "did you mean --check?"},
        {"$T from-idx a b", "needs IMAGES LABELS OUT@N"},
        {"$T from-idx a b c@2 d", "'d' is one argument too many"},
        {"$T from-idx a b c", "'c' is no OUT@N"},
        {"$T from-idx a b c@0", "'c@0' is no OUT@N"},
        {"$T from-idx a b c@100000", "is no OUT@N"},
        {"$T from-idx a b c@2x", "is no OUT@N"},
        {"$T from-idx a b @2", "is no OUT@N"},
        {"$T from-folder a b@2 --schema coco", "'coco' is none of imagenet|tfds"},
        {"$T from-csv a b@2 --compression lz4", "none of none|gzip|zlib"},
        {"$T from-csv a b@2 --level 10", "from 1 to 9"},
        {"$T split a b", "'b' is no OUT@N"},
        {"$T merge a", "needs FILE... OUT"},
        {"$T recompress a b", "needs --compression"},
        {"$T recompress a b c --compression gzip", "'c' is one argument too many"},
    };
    size_t i;

    fresh_directory();
    for (i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        CHECK_FAILS(2, lines[i][1], "%s", lines[i][0]);
        CHECK_EQ_STR(run_out, "");
    }
    CHECK_EQ_STR(listing(), "");
}

MPT_TEST(flags_in_all_spellings) {
    static const char *const lines[] = {"--limit 2 f", "--limit=2 f", "-n 2 f",
                                        "-n2 f",       "f --limit 2", "--limit 9 --limit 2 -- f"};
    size_t i;

    need_zlib();
    fresh_directory();
    write_simple_records("f", 5);
    for (i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        CHECK_RUNS("$T cat %s", lines[i]);
        CHECK_EQ_INT(count_of(run_out, '\n'), 2);
    }
    write_idx(1, IDX_COUNT, 0);
    CHECK_RUNS("$T from_idx images labels a@2 --no_shuffle 2>&1 || $T from-idx images labels a@2 "
               "--no_shuffle"); /* `_` is for flags; commands are spelled as they are */
    CHECK_RUNS("mv f -- -f && $T count -- -f");
    CHECK_EQ_STR(run_out, "5 -f\n");
}

/* ---- cat, head ------------------------------------------------------------------------------- */
/* O-07: negative and large integers are neither unsigned nor cut to 32 bits. */
MPT_TEST(cat_shows_values_exactly) {
    static const int64_t ints[] = {-1, INT64_MIN, INT64_MAX, 2147483648LL, 4294967303LL, 0};
    static const uint32_t bits[] = {0x80000000u, 0x7f800000u, 0xff800000u, 0x7fc00000u,
                                    1u,          0x3dcccccdu, 0x7f7fffffu, 0x3f800000u};
    float floats[8];
    mpt_bytes values[4], payload;
    unsigned char longer[65];
    mpt_example *e = NULL;
    mpt_ctx *ctx = NULL;

    fresh_directory();
    memcpy(floats, bits, sizeof floats);
    memset(longer, 'x', sizeof longer);
    memset(values, 0, sizeof values);
    values[1].data = (const uint8_t *)"\xff";
    values[1].size = 1;
    values[2].data = longer;
    values[2].size = 64;
    values[3].data = longer;
    values[3].size = 65;
    CHECK_OK(NULL, mpt_ctx_create(NULL, &ctx));
    CHECK_OK(ctx, mpt_example_create(ctx, &e));
    CHECK_OK(ctx, mpt_example_add_int64s(e, "i", ints, 6));
    CHECK_OK(ctx, mpt_example_add_floats(e, "f", floats, 8));
    CHECK_OK(ctx, mpt_example_add_bytes(e, "quote\"\\\xc3\xa9\x01", values, 4));
    CHECK_OK(ctx, mpt_example_add_int64s(e, "none", ints, 0));
    CHECK_OK(ctx, mpt_example_encode(e, &payload));
    write_records("f", &payload, 1);
    CHECK_RUNS("$T cat f");
    CHECK_CONTAINS(run_out, "\"i\":{\"int64\":[\"-1\",\"-9223372036854775808\","
                            "\"9223372036854775807\",\"2147483648\",\"4294967303\",\"0\"]}");
    CHECK_CONTAINS(run_out, "\"f\":{\"float\":[-0.0,\"inf\",\"-inf\",\"nan\",1.40129846e-45,"
                            "0.100000001,3.40282347e+38,1.0]}");
    CHECK_CONTAINS(run_out, "\"quote\\\"\\\\\xc3\xa9\\u0001\":{\"bytes\":[\"\",\"/w==\",\"eHh4");
    CHECK_CONTAINS(run_out, ",{\"bytes_crc32\":\"7f5fb567\",\"bytes_len\":65}]}");
    CHECK_CONTAINS(run_out, "\"none\":{\"int64\":[]}");
    CHECK_CONTAINS(run_out, "{\"file\":\"f\",\"record\":0,\"offset\":0,\"length\":");
    CHECK_RUNS("$T head f");
    CHECK_CONTAINS(run_out, "-9223372036854775808");
    CHECK_CONTAINS(run_out, "(empty list)");
    mpt_example_destroy(e);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(cat_takes_the_last_of_a_repeated_name_and_names_what_is_no_example) {
    /* Features { "a": int64 [1], "b": int64 [2], "a": int64 [3] }, by hand; then 11-byte varint */
    static const uint8_t twice[] = "\x0a\x25"
                                   "\x0a\x0b\x0a\x01"
                                   "a"
                                   "\x12\x06\x1a\x04\x0a\x02\x01\x01"
                                   "\x0a\x0a\x0a\x01"
                                   "b"
                                   "\x12\x05\x1a\x03\x0a\x01\x02"
                                   "\x0a\x0a\x0a\x01"
                                   "a"
                                   "\x12\x05\x1a\x03\x0a\x01\x03";
    static const uint8_t endless[] = "\x0a\x16\x0a\x14\x0a\x01k\x12\x0f\x1a\x0d\x0a\x0b"
                                     "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01";
    mpt_bytes payloads[2];

    fresh_directory();
    payloads[0].data = twice;
    payloads[0].size = sizeof twice - 1;
    payloads[1].data = endless;
    payloads[1].size = sizeof endless - 1;
    write_records("f", payloads, 2);
    CHECK_RUNS("$T cat f");
    CHECK_CONTAINS(run_out,
                   "\"features\":{\"b\":{\"int64\":[\"2\"]},\"a\":{\"int64\":[\"3\"]}}}\n");
    CHECK_CONTAINS(run_out, "\"features\":null,\"error\":\"");
    CHECK_EQ_INT(count_of(run_out, '\n'), 2);
    CHECK_RUNS("$T head f");
    CHECK_CONTAINS(run_out, "no tf.Example: ");
}

MPT_TEST(cat_limit_and_index) {
    need_zlib();
    fresh_directory();
    write_simple_records("f", 9);
    CHECK_RUNS("$T recompress f g --compression zlib");
    CHECK_RUNS("$T cat --limit 0 f");
    CHECK_EQ_STR(run_out, "");
    CHECK_RUNS("$T cat --limit 2 f g"); /* of each file */
    CHECK_EQ_INT(count_of(run_out, '\n'), 4);
    CHECK_RUNS("$T cat --index 7 g");
    CHECK_EQ_INT(count_of(run_out, '\n'), 1);
    CHECK_CONTAINS(run_out, "\"record\":7,\"offset\":133,\"length\":7,");
    CHECK_RUNS("$T cat --index 3 --limit 4 f");
    CHECK_EQ_INT(count_of(run_out, '\n'), 4);
    CHECK_RUNS("$T index f && $T cat --index 8 f"); /* by the index */
    CHECK_CONTAINS(run_out, "\"record\":8,\"offset\":156,\"length\":8,");
    CHECK_RUNS(
        "printf '0 1\\n' >f.idx; $T cat --index 8 f"); /* a wrong index leads nobody astray */
    CHECK_CONTAINS(run_out, "\"record\":8,\"offset\":156,\"length\":8,");
    CHECK_FAILS(1, "f: has no record 9: it holds 9", "$T cat --index 9 f");
    CHECK_FAILS(1, "has no record 0", ": >e; $T cat --index 0 e");
    CHECK_RUNS("$T cat --index 0 f");
    CHECK_EQ_INT(count_of(run_out, '\n'), 1);
    CHECK_RUNS("$T head --limit 2 f");
    CHECK_CONTAINS(run_out, "f: record 1 at offset 16, 1 byte\n");
}

/* ---- damaged files --------------------------------------------------------------------------- */
/* O-01, O-02, O-03: what comes before the damage, then one line with file, record and offset. */
MPT_TEST(damage_is_named_after_what_came_before) {
    static const struct {
        const char *make, *record, *offset;
        int before;
    } cases[] = {
        {"head -c 110 f >bad", "record 5", "offset 90", 5}, /* one byte short */
        {"head -c 104 f >bad", "record 5", "offset 90", 5}, /* in the payload */
        {"head -c 99 f >bad", "record 5", "offset 90", 5},  /* in the length's checksum */
        {"head -c 95 f >bad", "record 5", "offset 90", 5},  /* in the length */
        {"head -c 91 f >bad", "record 5", "offset 90", 5},
        {"cp f flipped; cp flipped bad", "record 4", "offset 70", 4}, /* its payload, see below */
        {"printf 'version https://git-lfs.github.com/spec/v1\\n' >bad", "record 0", "offset 0", 0},
        {"gzip -c f | head -c 60 >bad", "record", "offset", -1},
    };
    size_t i;

    fresh_directory();
    need_zlib();
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_simple_records("f", 9);
        write_simple_records("good", 2);
        if (strstr(cases[i].make, "flipped")) flip_bit("f", 70 + 12 + 1);
        CHECK_RUNS("%s", cases[i].make);
        CHECK_FAILS(1, "bad", "$T cat bad good");
        CHECK_CONTAINS(run_err, cases[i].record);
        CHECK_CONTAINS(run_err, cases[i].offset);
        if (cases[i].before >= 0) CHECK_EQ_INT(count_of(run_out, '\n'), cases[i].before + 2);
        CHECK_CONTAINS(run_out, "{\"file\":\"good\",\"record\":1,");
        CHECK_FAILS(1, "bad", "$T verify bad good");
        CHECK_CONTAINS(run_err, cases[i].offset);
        CHECK_CONTAINS(run_out, ", DAMAGED\ngood: 2 records, 33 bytes, ok\n");
        CHECK_FAILS(1, "bad", "$T stats bad good");
        CHECK_FAILS(1, "bad", "$T merge good bad out");
        CHECK_FAILS(1, "bad", "$T split bad out@2");
        CHECK_FAILS(1, "bad", "$T recompress bad out --compression gzip");
        CHECK_CONTAINS(listing(), "bad f "); /* no out, nothing temporary */
        CHECK(!strstr(run_out, "out") && !strstr(run_out, "new") && !strstr(run_out, "tmp"));
    }
}

MPT_TEST(verify_keeps_the_order_of_arguments) {
    char expected[4000];
    size_t used = 0;
    int i;

    fresh_directory();
    for (i = 0; i < 40; i++) {
        char name[8];
        snprintf(name, sizeof name, "f%02d", i);
        write_simple_records(name, i + 1);
        used += (size_t)snprintf(expected + used, sizeof expected - used, "%s: %d record%s, ", name,
                                 i + 1, i ? "s" : "");
        used += (size_t)snprintf(expected + used, sizeof expected - used, "%s, ok\n", "SIZE");
    }
    for (i = 1; i <= 5; i += 2) {
        CHECK_RUNS("$T verify --threads %d f* | sed 's/, [0-9.]* [KM]*[Bb][a-z]*,/, SIZE,/'", i);
        CHECK_EQ_STR(run_out, expected);
    }
    /* O-27: no descriptor is kept */
    CHECK_RUNS("ulimit -n 16; $T verify --threads 2 f* f* f* >/dev/null && $T cat f* >/dev/null");
}

MPT_TEST(directories_patterns_and_missing_files) {
    fresh_directory();
    write_simple_records("a-00000-of-00002", 3);
    write_simple_records("a-00001-of-00002", 4);
    CHECK_RUNS("$T count a@2 'a-0000?-of-*'");
    CHECK_EQ_STR(run_out, "3 a-00000-of-00002\n4 a-00001-of-00002\n3 a-00000-of-00002\n"
                          "4 a-00001-of-00002\n14 total\n");
    CHECK_FAILS(1, ".: is a directory; name its files", "$T verify . a@2");
    CHECK_EQ_INT(count_of(run_out, '\n'), 2);
    CHECK_FAILS(1, "zz*: no file matches", "$T count 'zz*' a@2");
    CHECK_EQ_INT(count_of(run_out, '\n'), 3);
    CHECK_FAILS(1, "missing", "$T cat missing a@2");
    CHECK_EQ_INT(count_of(run_out, '\n'), 7);
    CHECK_FAILS(1, "missing: can't open it: no such file", "$T count missing");
    CHECK_FAILS(1, "missing: can't open it: no such file", "$T from-csv missing d@1");
    CHECK_EQ_INT(run("$T count a@3"), 1);
    CHECK_CONTAINS(run_err, "a-00002-of-00003");
    CHECK_EQ_INT(count_of(run_err, '\n'), 3);
}

/* What can't be opened or read may be sound: only the data make a file damaged. */
MPT_TEST(unreadable_is_not_damaged) {
    fresh_directory();
    write_simple_records("good", 2);
    write_simple_records("large", 9);
    CHECK_FAILS(1, "missing: can't open it: no such file", "$T verify missing good");
    CHECK_EQ_STR(run_out, "missing: 0 records, UNREADABLE\ngood: 2 records, 33 bytes, ok\n");
    CHECK_FAILS(1, "good/x: can't open it", "$T verify good/x good");
    CHECK_CONTAINS(run_out, "good/x: 0 records, UNREADABLE\n");
    CHECK_FAILS(1, "max_record_bytes (5)", "$T verify large --max-record-bytes 5");
    CHECK_EQ_STR(run_out, "large: 6 records, 180 bytes, UNREADABLE\n");
    CHECK_RUNS("head -c 150 large >cut"); /* too large, and not there either */
    CHECK_FAILS(1, "the file is cut", "$T verify cut --max-record-bytes 6");
    CHECK_EQ_STR(run_out, "cut: 7 records, 150 bytes, DAMAGED\n");
#ifndef MPTRAIN_ZLIB
    CHECK_FAILS(1, "gzip", "gzip good; $T verify good.gz");
    CHECK_CONTAINS(run_out, ", UNREADABLE\n");
#endif
}

/* Every command that reads records, and the writers behind them. */
MPT_TEST(the_record_limit_is_an_option) {
    static const char *const lines[] = {"cat f",       "head -n 99 f", "count f",
                                        "verify f",    "stats f",      "index f",
                                        "split f s@2", "merge f m",    "recompress f r -c none"};
    size_t i;

    fresh_directory();
    for (i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        write_simple_records("f", 9);
        CHECK_FAILS(1, "8 bytes are more than max_record_bytes (7)", "$T %s --max-record-bytes 7",
                    lines[i]);
        CHECK_EQ_STR(listing(), "f ");
        CHECK_RUNS("$T %s --max-record-bytes=8", lines[i]);
        CHECK_EQ_STR(run_err, "");
        fresh_directory();
    }
}

/* A pipe can be read once, and its size is not known before. */
MPT_TEST(pipes_are_read_once) {
    fresh_directory();
    write_simple_records("f", 9);
    CHECK_RUNS("cat f | $T count /dev/stdin");
    CHECK_EQ_STR(run_out, "9 /dev/stdin\n");
    CHECK_RUNS("mkfifo p; timeout 60 sh -c 'cat f >p' & timeout 60 $T cat --index 8 p; wait");
    CHECK_CONTAINS(run_out, "\"record\":8,");
    CHECK_RUNS("cat f | $T verify /dev/stdin");
    CHECK_EQ_STR(run_out, "/dev/stdin: 9 records, 180 bytes, ok\n");
    CHECK_RUNS(": | $T verify /dev/stdin");
    CHECK_EQ_STR(run_out, "/dev/stdin: 0 records, 0 bytes, ok\n");
    CHECK_EQ_INT(run("head -c 150 f | $T verify /dev/stdin"), 1);
    CHECK_EQ_STR(run_out, "/dev/stdin: 7 records, DAMAGED\n");
    CHECK_RUNS("cat f | $T stats /dev/stdin");
    CHECK_CONTAINS(run_out, "1 plain, 0 gzip, 0 zlib; 1 of unknown size\nrecords    9,");
    CHECK_EQ_INT(run("cat f | $T split /dev/stdin s@2"), 1);
    CHECK_CONTAINS(run_err, "/dev/stdin: is no regular file; split reads it twice");
    CHECK_EQ_INT(run("cat f | $T index /dev/stdin"), 1);
    CHECK_CONTAINS(run_err, "/dev/stdin: is no regular file");
    CHECK_RUNS("cat f | $T merge /dev/stdin m && cmp f m");
    need_zlib();
    CHECK_RUNS("gzip -c f | $T count /dev/stdin");
    CHECK_EQ_STR(run_out, "9 /dev/stdin\n");
    CHECK_RUNS("gzip -c f | $T verify /dev/stdin");
    CHECK_EQ_STR(run_out, "/dev/stdin: 9 records, gzip, ok\n");
}

MPT_TEST(a_dash_is_no_stream) {
    static const char *const lines[] = {"cat -",
                                        "head -",
                                        "count -",
                                        "verify -",
                                        "stats -",
                                        "index -",
                                        "merge f - m",
                                        ("recompress - r "
                                         "-c none"),
                                        "split - s@2",
                                        "from-idx - x d@1",
                                        "from-csv - d@1"};
    size_t i;

    fresh_directory();
    write_simple_records("f", 2);
    for (i = 0; i < sizeof lines / sizeof lines[0]; i++)
        CHECK_FAILS(1, "-: standard input is not read by that name; use /dev/stdin\n", "$T %s",
                    lines[i]);
    CHECK_FAILS(1, "-: standard output is not written by that name", "$T merge f -");
    CHECK_EQ_STR(listing(), "f ");
    CHECK_RUNS("cp f ./- && $T count ./-");
}

/* Our own commands put indexes and lists of classes beside the records. */
MPT_TEST(companions_of_record_files_are_left_out) {
    fresh_directory();
    CHECK_RUNS("mkdir d");
    write_simple_records("d/f", 9);
    write_records("d/empty", NULL, 0);
    write_text("d/f-classes.txt", "cat\ndog\n");
    CHECK_RUNS("$T index d/f d/empty >/dev/null && $T verify d/*");
    CHECK_EQ_STR(run_out, "d/empty: 0 records, 0 bytes, ok\nd/f: 9 records, 180 bytes, ok\n");
    CHECK_CONTAINS(run_err, "d/f.idx: a record index, not a TFRecord file: left out\n");
    CHECK_CONTAINS(run_err, "d/empty.idx: a record index, not a TFRecord file: left out\n");
    CHECK_CONTAINS(run_err, "d/f-classes.txt: class names, not a TFRecord file: left out\n");
    CHECK_RUNS("$T count 'd/*' && $T stats d/* && $T merge d/* m && $T count m");
    CHECK_CONTAINS(run_out, "9 m\n");
    CHECK_RUNS("$T index d/* && ls d");
    CHECK(!strstr(run_out, "idx.idx"));
    CHECK_EQ_INT(run("$T merge d/f.idx n"), 1);
    CHECK_CONTAINS(run_err, "no TFRecord file to read");
    CHECK_RUNS("mv d/f d/g.idx && $T count d/g.idx"); /* the name alone is no reason */
    CHECK_EQ_STR(run_out, "9 d/g.idx\n");
    CHECK_FAILS(1, "d/f.idx",
                "$T verify d/f.idx d/x.idx >/dev/null 2>&1; printf zz >d/f.idx; "
                "$T verify d/f.idx"); /* what is no index is checked */
}

MPT_TEST(stats_names_a_feature_that_is_not_there) {
    mpt_example *e = NULL;
    mpt_ctx *ctx = NULL;
    int64_t value = 3;
    mpt_bytes payload;

    fresh_directory();
    CHECK_OK(NULL, mpt_ctx_create(NULL, &ctx));
    CHECK_OK(ctx, mpt_example_create(ctx, &e));
    CHECK_OK(ctx, mpt_example_add_int64s(e, "number", &value, 1));
    CHECK_OK(ctx, mpt_example_add_int64s(e, "none", &value, 0));
    CHECK_OK(ctx, mpt_example_encode(e, &payload));
    write_records("f", &payload, 1);
    mpt_example_destroy(e);
    mpt_ctx_destroy(ctx);
    CHECK_RUNS("$T stats f --label-key nope --image-key neither");
    CHECK_CONTAINS(run_out, "labels     no record has the feature nope\n");
    CHECK_CONTAINS(run_out, "pictures   no record has the feature neither\n");
    CHECK_RUNS("$T stats f --label-key none --image-key number");
    CHECK_CONTAINS(run_out, "labels     the feature none holds no value\n");
    CHECK_CONTAINS(run_out, "pictures   the feature number holds no bytes\n");
    CHECK_RUNS("$T stats f --label-key number --json");
    CHECK_CONTAINS(run_out, "\"label_records\":1,\"labels\":{\"3\":1}");
    CHECK_RUNS("$T stats f"); /* nothing was asked for */
    CHECK(!strstr(run_out, "labels") && !strstr(run_out, "pictures"));
}

/* ---- index ----------------------------------------------------------------------------------- */
MPT_TEST(index_in_dali_form) {
    need_zlib();
    fresh_directory();
    write_simple_records("f", 3);
    CHECK_FAILS(1, "f.idx", "$T index --check f");
    CHECK_RUNS("$T index f");
    CHECK_EQ_STR(run_out, "f.idx: 3 records\n");
    CHECK_RUNS("cat f.idx");
    CHECK_EQ_STR(run_out, "0 16\n16 17\n33 18\n");
    CHECK_RUNS("$T index --check f");
    CHECK_EQ_STR(run_out, "f.idx: 3 records, ok\n");
    CHECK_FAILS(1, "f.idx", "cat f f >g; mv g f; $T index --check f");
    CHECK_RUNS("$T index f && $T index --check f && wc -l <f.idx");
    CHECK_CONTAINS(run_out, "6");
    /* records 1 and 2 joined: the ends are right, the middle is not */
    CHECK_FAILS(1, "f.idx: line 3: record 2 begins elsewhere",
                "cp f.idx keep && (sed -n 1p keep; echo 16 35; sed -n '4,$p' keep) >f.idx; "
                "$T index --check f");
    CHECK_RUNS("mv keep f.idx");
    CHECK_FAILS(1, "gzip", "$T recompress f g --compression gzip >/dev/null; $T index g");
    CHECK_RUNS("$T merge f f h && $T index h && $T merge f h --force && $T index h --check || ls");
    CHECK(!strstr(run_out, "h.idx: 6 records, ok")); /* an old index does not outlive its file */
}

/* ---- from-idx and back ----------------------------------------------------------------------- */
#define LIST_PAYLOADS "sed 's/.*\"crc32\":\"\\([0-9a-f]*\\)\".*/\\1/'"

MPT_TEST(round_trip_through_every_command) {
    need_zlib();
    fresh_directory();
    write_idx(1, IDX_COUNT, 0);
    CHECK_RUNS("$T from-idx images labels d@4");
    CHECK_EQ_STR(run_out, "d@4: 30 records, 3 classes\n");
    CHECK_RUNS("$T count d@4");
    CHECK_EQ_STR(run_out, "8 d-00000-of-00004\n8 d-00001-of-00004\n7 d-00002-of-00004\n"
                          "7 d-00003-of-00004\n30 total\n");
    CHECK_RUNS("$T verify d@4 && $T cat d@4 | " LIST_PAYLOADS " >1");
    CHECK_RUNS("$T merge d@4 all && $T cat all | " LIST_PAYLOADS " | cmp - 1");
    CHECK_RUNS("$T split all s@7 && $T cat s@7 | " LIST_PAYLOADS " | cmp - 1");
    CHECK_RUNS("$T recompress all z -c zlib && $T cat z | " LIST_PAYLOADS " | cmp - 1");
    CHECK_RUNS("$T recompress z g -c gzip --level 9 && gzip -t <g && $T verify g z");
    CHECK_CONTAINS(run_out, ", gzip, ok");
    CHECK_RUNS("$T split g t@3 -c gzip && $T merge t@3 back && cmp all back && $T count t@3");
    CHECK_CONTAINS(run_out, "10 t-00000-of-00003\n10 t-00001-of-00003\n10 t-00002-of-00003\n");
    CHECK_RUNS("$T stats d@4 --json");
    CHECK_CONTAINS(run_out, "\"records\":30,");
    CHECK_CONTAINS(run_out, "\"labels\":{\"1\":10,\"2\":10,\"3\":10}");
    CHECK_CONTAINS(run_out, "\"image_formats\":{\"PNG\":30},\"image_sizes\":{\"4x5x1\":30}");
    CHECK_RUNS("$T stats g");
    CHECK_CONTAINS(run_out, "0 plain, 1 gzip, 0 zlib");
    CHECK_CONTAINS(run_out, "labels     image/class/label: 3 different, 1..3\n");
    write_simple_records("one", 1);
    CHECK_FAILS(1, "one: 1 record can't fill 2 shards", "$T split one v@2");
    CHECK_RUNS("$T index one && $T merge one m && $T split one v@1");
    CHECK_EQ_STR(run_out, "one.idx: 1 record\nm: 1 record\nv@1: 1 record\n");
}

MPT_TEST(from_idx_keeps_every_pixel) {
    int channels;

    need_zlib();
    for (channels = 1; channels <= 3; channels += 2) {
        mpt_tfrecord_desc desc;
        mpt_tfrecord *f = NULL;
        mpt_ctx *ctx = NULL;
        mpt_bytes record, picture;
        int i, y, x, c;

        fresh_directory();
        write_idx(channels, IDX_COUNT, 0);
        CHECK_RUNS("gzip images && $T from-idx images.gz labels d@1 --no-shuffle --schema tfds");
        CHECK_OK(NULL, mpt_ctx_create(NULL, &ctx));
        memset(&desc, 0, sizeof desc);
        desc.path = work_file("d-00000-of-00001");
        CHECK_OK(ctx, mpt_tfrecord_open(ctx, &desc, &f));
        for (i = 0; i < IDX_COUNT; i++) {
            mpt_image_desc image_desc;
            mpt_image image;

            memset(&image_desc, 0, sizeof image_desc);
            image_desc.channels = channels;
            CHECK_OK(ctx, mpt_tfrecord_next(f, &record));
            CHECK_OK(ctx, mpt_example_find(record, "image", &picture));
            CHECK_OK(ctx, mpt_image_decode(ctx, picture, &image_desc, &image));
            CHECK_EQ_INT(image.width, IDX_WIDTH);
            CHECK_EQ_INT(image.height, IDX_HEIGHT);
            for (y = 0; y < IDX_HEIGHT; y++)
                for (x = 0; x < IDX_WIDTH; x++)
                    for (c = 0; c < channels; c++)
                        CHECK_EQ_INT(image.pixels[(y * IDX_WIDTH + x) * channels + c],
                                     idx_pixel(i, y, x, c));
            mpt_image_free(ctx, &image);
        }
        CHECK_RESULT(ctx, mpt_tfrecord_next(f, &record), MPT_END);
        mpt_tfrecord_close(f);
        mpt_ctx_destroy(ctx);
    }
}

/* O-26: nothing but the seed decides the order. */
MPT_TEST(the_seed_alone_decides_the_order) {
    need_zlib();
    fresh_directory();
    write_idx(1, IDX_COUNT, 0);
    CHECK_RUNS("for i in 1 2 3 4 5; do mkdir $i; done; $T from-idx images labels 1/d@3 -j 1 && "
               "$T from-idx images labels 2/d@3 -j 3 --seed 0 && "
               "$T from-idx images labels 3/d@3 --seed 1 && "
               "$T from-idx images labels 4/d@3 --no-shuffle");
    CHECK_RUNS("cat 1/d-* | cksum >a; cat 2/d-* | cksum | cmp - a");
    CHECK_EQ_INT(run("cat 3/d-* | cksum | cmp -s - a"), 1);
    CHECK_EQ_INT(run("cat 4/d-* | cksum | cmp -s - a"), 1);
    CHECK_RUNS("for i in 1 3 4; do $T cat $i/d@3 | " LIST_PAYLOADS " | sort >s$i; done; "
               "cmp s1 s3 && cmp s1 s4"); /* the same records in another order */
}

/* O-11: ImageNet's labels count from 1, TFDS's from 0. */
MPT_TEST(schemas_and_their_label_offsets) {
    need_zlib();
    fresh_directory();
    write_idx(1, IDX_COUNT, 0);
    write_text("names", "cat\ndog\r\nemu\n");
    CHECK_RUNS("$T from-idx images labels a@1 --no-shuffle --classes names && $T cat -n2 a@1");
    CHECK_CONTAINS(run_out, "\"image/class/label\":{\"int64\":[\"1\"]},"
                            "\"image/class/text\":{\"bytes\":[\"Y2F0\"]}"); /* cat */
    CHECK_CONTAINS(run_out, "\"image/class/label\":{\"int64\":[\"2\"]},"
                            "\"image/class/text\":{\"bytes\":[\"ZG9n\"]}"); /* dog */
    CHECK_CONTAINS(run_out, "\"image/format\":{\"bytes\":[\"UE5H\"]}");     /* PNG */
    CHECK_CONTAINS(run_out,
                   "\"image/height\":{\"int64\":[\"5\"]},\"image/width\":{\"int64\":[\"4\"]},"
                   "\"image/channels\":{\"int64\":[\"1\"]},"
                   "\"image/colorspace\":{\"bytes\":[\"Z3JheXNjYWxl\"]},"
                   "\"image/filename\":{\"bytes\":[\"MDAwMDAucG5n\"]}");
    CHECK_RUNS("cat a-classes.txt");
    CHECK_EQ_STR(run_out, "cat\ndog\nemu\n");
    CHECK_RUNS("$T from-idx images labels b@1 --no-shuffle --schema tfds && $T cat -n2 b@1");
    CHECK_CONTAINS(run_out, "\"label\":{\"int64\":[\"0\"]},\"file_name\":");
    CHECK_CONTAINS(run_out, "\"label\":{\"int64\":[\"1\"]},\"file_name\":");
    CHECK_RUNS("cat b-classes.txt");
    CHECK_EQ_STR(run_out, "0\n1\n2\n");
    CHECK_FAILS(1, "names: holds 2 names, but there is a label 2",
                "printf 'x\\ny\\n' >names; $T from-idx images labels c@1 --classes names");
    CHECK_RUNS("printf 'w\\nx\\ny\\nz\\n' >names; $T from-idx images labels c@1 --classes names");
    CHECK_CONTAINS(run_err, "warning: 1 of 4 classes has no picture; the first is 'z'");
}

MPT_TEST(damaged_idx_files_leave_nothing_behind) {
    static const struct {
        const char *make, *error;
    } cases[] = {
        {"head -c 100 images >x; mv x images", "images: ends early"},
        {"head -c 3 images >x; mv x images", "images: is no IDX file"},
        {"head -c 10 images >x; mv x images", "images: ends early, in its header"},
        {"printf x >>images", "images: bytes follow"},
        {"printf x >>labels", "labels: bytes follow"},
        {"mv images x; mv labels images; mv x labels", "swapped"},
        {"cp labels images", "swapped"},
        {"printf '\\0\\0\\015\\003' >images", "type 0x0d"},
        {"printf 'PNG!' >images", "is no IDX file"},
        {": >labels", "labels: is no IDX file"},
        {"rm labels", "labels: can't open it"},
        {"printf '\\0\\0\\010\\003\\377\\377\\377\\377\\0\\0\\100\\0\\0\\0\\100\\0' >images",
         "images: ends early"}, /* promises 2^60 bytes */
        {"printf '\\0\\0\\010\\003\\377\\377\\377\\377\\377\\377\\377\\377\\377\\377\\377\\377' "
         ">images",
         "sides from 1 to"},
        {"printf '\\0\\0\\010\\003\\0\\0\\0\\001\\0\\0\\0\\0\\0\\0\\0\\001' >images", "sides from"},
        {"printf '\\0\\0\\010\\004\\0\\0\\0\\001\\0\\0\\0\\001\\0\\0\\0\\001\\0\\0\\0\\002' "
         ">images",
         "2 channels"},
        {"gzip -c images | head -c 60 >x; mv x images", "images: "},
    };
    size_t i;

    need_zlib();
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        fresh_directory();
        write_idx(1, IDX_COUNT, 0);
        CHECK_RUNS("%s", cases[i].make);
        CHECK_FAILS(1, cases[i].error, "$T from-idx images labels d@2");
        CHECK(!strstr(listing(), "d-"));
    }
    fresh_directory();
    write_idx(1, IDX_COUNT - 1, 0);
    CHECK_FAILS(1, "images holds 30 pictures, labels holds 29 labels",
                "$T from-idx images labels d@2");
    write_idx(1, IDX_COUNT, 0);
    CHECK_FAILS(1, "30 pictures can't fill 31 shards", "$T from-idx images labels d@31");
    CHECK_EQ_STR(listing(), "images labels ");
}

/* ---- what exists already --------------------------------------------------------------------- */
MPT_TEST(nothing_is_replaced_unasked) {
    need_zlib();
    fresh_directory();
    write_idx(1, IDX_COUNT, 0);
    CHECK_RUNS("$T from-idx images labels d@2 && cat d-0* >first && $T index d@2");
    CHECK_FAILS(1, "exists already; --force", "$T from-idx images labels d@2 --seed 1");
    CHECK_RUNS("cat d-0000?-of-00002 | cmp - first");
    CHECK_FAILS(1, "belongs to a set of 2 shards", "$T from-idx images labels d@3 --force");
    CHECK_FAILS(1, "belongs to a set of 2 shards", "$T split first d@3 --force");
    CHECK_FAILS(1, "exists already", "$T merge d@2 first");
    CHECK_FAILS(1, "exists already", "$T recompress first d-00000-of-00002 -c none");
    CHECK_FAILS(1, "is a directory", "$T merge d@2 .");
    CHECK_FAILS(1, "pipe: is a device or a pipe",
                "mkfifo pipe; $T merge --force d@2 pipe; s=$?; rm pipe; exit $s");
    CHECK_FAILS(1, "nowhere", "$T from-idx images labels nowhere/d@3");
    CHECK_FAILS(1, "nowhere", "$T merge d@2 nowhere/d");
    /* a failure of --force leaves the old set whole */
    CHECK_FAILS(1, "labels: bytes follow", "printf x >>labels; $T from-idx images labels d@2 -f");
    CHECK_RUNS("cat d-0000?-of-00002 | cmp - first");
    write_idx(1, IDX_COUNT, 0);
    CHECK_RUNS("$T from-idx images labels d@2 --seed 1 --force && $T verify d@2");
    CHECK_EQ_INT(run("cat d-0000?-of-00002 | cmp -s - first"), 1);
    CHECK_EQ_STR(listing(), "d-00000-of-00002 d-00001-of-00002 d-classes.txt first images labels ");
    CHECK_FAILS(1, "d-classes.txt: exists already", "rm d-0*; $T from-idx images labels d@2");
}

/* ---- from-folder ----------------------------------------------------------------------------- */
static void write_folder(void) {
    fresh_directory();
    CHECK_RUNS("mkdir -p in/dog in/cat/deep in/emu in/.git");
    write_bmp("in/dog/b.bmp", 3, 2, 10);
    write_bmp("in/dog/a.bmp", 4, 2, 20);
    write_bmp("in/cat/x.JPEG", 5, 2, 30); /* O-14: told by content */
    write_bmp("in/cat/deep/y.bmp", 6, 2, 40);
    write_bmp("in/emu/z.bmp", 7, 2, 50);
    write_text("in/README", "not a class");
    write_text("in/dog/.hidden", "not a picture");
    write_text("in/.git/config", "not a class");
}

MPT_TEST(from_folder_takes_classes_in_order) {
    write_folder();
    CHECK_RUNS("$T from-folder in d@2 --no-shuffle");
    CHECK_EQ_STR(run_out, "d@2: 5 records, 3 classes\n");
    CHECK_RUNS("cat d-classes.txt");
    CHECK_EQ_STR(run_out, "cat\ndog\nemu\n");
    CHECK_RUNS("$T head -n9 d@2 | grep -E 'label|filename|encoded' | tr -s ' ' | tr -d '\\n'");
    CHECK_EQ_STR(run_out, " \"image/encoded\" bytes BMP 6x2x3, 94 bytes"
                          " \"image/class/label\" int64 1 \"image/filename\" bytes \"y.bmp\""
                          " \"image/encoded\" bytes BMP 5x2x3, 86 bytes"
                          " \"image/class/label\" int64 1 \"image/filename\" bytes \"x.JPEG\""
                          " \"image/encoded\" bytes BMP 4x2x3, 78 bytes"
                          " \"image/class/label\" int64 2 \"image/filename\" bytes \"a.bmp\""
                          " \"image/encoded\" bytes BMP 3x2x3, 78 bytes"
                          " \"image/class/label\" int64 2 \"image/filename\" bytes \"b.bmp\""
                          " \"image/encoded\" bytes BMP 7x2x3, 102 bytes"
                          " \"image/class/label\" int64 3 \"image/filename\" bytes \"z.bmp\"");
    CHECK_RUNS("mkdir in/fox; $T from-folder in e@1");
    CHECK_CONTAINS(run_err, "1 of 4 classes has no picture; the first is 'fox'");
    CHECK_CONTAINS(run_err, "warning: 1 file in no class's directory left out; the first is "
                            "in/README");
    CHECK_FAILS(1, "holds no pictures", "mkdir none; $T from-folder none f@1");
    CHECK_FAILS(1, "absent: can't open the directory: no such file", "$T from-folder absent f@1");
    CHECK_RUNS("mkdir single && mv in/dog single; $T from-folder single g@1");
    CHECK_EQ_STR(run_out, "g@1: 2 records, 1 class\n");
    CHECK_RUNS("mv single/dog in");
    CHECK_FAILS(1, "5 pictures can't fill 6 shards", "rm in/README; $T from-folder in f@6");
    CHECK_FAILS(1, "can't hold a line break", "mv in/cat 'in/c\na'; $T from-folder in h@1");
    CHECK_RUNS("! ls h* h-classes.txt");
}

MPT_TEST(from_folder_bad_pictures_fail_or_are_named) {
    write_folder();
    write_text("in/dog/notes.txt", "not a picture, whatever its name");
    CHECK_EQ_INT(run("$T from-folder in d@2"), 1);
    CHECK_CONTAINS(run_err, "in/dog/notes.txt: ");
    CHECK_CONTAINS(run_err, "(--skip-bad-records N ");
    CHECK_RUNS("rm in/dog/notes.txt && mkfifo in/dog/pipe"); /* opening it would wait for ever */
    CHECK_EQ_INT(run("timeout 60 $T from-folder in d@2"), 1);
    CHECK_CONTAINS(run_err, "in/dog/pipe: is no regular file");
    CHECK_RUNS("rm in/dog/pipe in/README");
    write_text("in/dog/bad1.jpg", "no picture");
    write_text("in/emu/bad2.png", "");
    CHECK_FAILS(1, "in/dog/bad1.jpg: ", "$T from-folder in d@2 -j 1");
    CHECK_CONTAINS(run_err, "(--skip-bad-records N ");
    CHECK(!strstr(listing(), "d-"));
    CHECK_EQ_INT(run("$T from-folder in d@2 --skip-bad-records 1"), 1);
    CHECK_CONTAINS(run_err, "allows no more");
    CHECK(!strstr(listing(), "d-"));
    CHECK_RUNS("$T from-folder in d@2 --skip-bad-records 2");
    CHECK_EQ_STR(run_out, "d@2: 5 records, 3 classes\n");
    CHECK_CONTAINS(run_err, "left out: in/dog/bad1.jpg");
    CHECK_CONTAINS(run_err, "left out: in/emu/bad2.png");
    CHECK_RUNS("$T count d@2");
    CHECK_EQ_STR(run_out, "3 d-00000-of-00002\n2 d-00001-of-00002\n5 total\n");
    CHECK_FAILS(1, "more than 16 deep", "ln -s . in/cat/loop; $T from-folder in e@1");
}

/* ---- from-csv -------------------------------------------------------------------------------- */
static void write_csv(const char *text) {
    fresh_directory();
    CHECK_RUNS("mkdir in");
    write_bmp("in/a.bmp", 3, 2, 1);
    write_bmp("in/b.bmp", 3, 2, 2);
    write_bmp("in/with, comma.bmp", 3, 2, 3);
    write_bmp("in/with \"quote\".bmp", 3, 2, 4);
    write_text("in/list.csv", text);
}

MPT_TEST(from_csv_forms) {
    static const struct {
        const char *text;
        int records;
        const char *classes;
    } cases[] = {
        {"a.bmp,0\nb.bmp,2\n", 2, "0\n1\n2\n"},
        {"a.bmp,0\r\nb.bmp,1", 2, "0\n1\n"},
        {"path,label\na.bmp,dog\nb.bmp,cat\n", 2, "cat\ndog\n"},
        {"\xef\xbb\xbfLabel,x,Image\ndog,1,a.bmp\n\ncat,2,b.bmp\n", 2, "cat\ndog\n"},
        {"filename,category\na.bmp,dog\nb.bmp,cat\n", 2, "cat\ndog\n"},
        {",image,CLASS,label\n0,a.bmp,dog,1\n1,b.bmp,cat,0\n", 2, "cat\ndog\n"}, /* the first */
        {"\"with, comma.bmp\",\"big, dog\"\n\"with \"\"quote\"\".bmp\",\"a \"\"cat\"\"\"\n", 2,
         "a \"cat\"\nbig, dog\n"},
    };
    size_t i;

    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char expected[100];

        write_csv(cases[i].text);
        CHECK_RUNS("$T from-csv in/list.csv d@1 --no-shuffle");
        snprintf(expected, sizeof expected, "d@1: %d records, ", cases[i].records);
        CHECK_CONTAINS(run_out, expected);
        CHECK_RUNS("cat d-classes.txt");
        CHECK_EQ_STR(run_out, cases[i].classes);
        CHECK_RUNS("$T verify d@1");
    }
    write_csv("a.bmp,dog\nb.bmp,cat\n");
    CHECK_RUNS("printf 'fox\\ndog\\ncat\\n' >names; mv in/list.csv .; "
               "$T from-csv list.csv d@1 --root in --classes names --no-shuffle --schema tfds; "
               "$T cat d@1");
    CHECK_CONTAINS(run_out, "\"label\":{\"int64\":[\"1\"]}");
    CHECK_CONTAINS(run_out, "\"label\":{\"int64\":[\"2\"]}");
}

MPT_TEST(from_csv_errors_name_the_line) {
    static const struct {
        const char *text, *error;
    } cases[] = {
        {"a.bmp,0\nb.bmp\n", "line 2: 1 column where 2 are expected (path,label)"},
        {"a.bmp,0\n\n\nb.bmp,1,2\n", "line 4: 3 columns"},
        {"label,path,x\n0,a.bmp\n", "line 2: 2 columns where 3 are expected"},
        {"a.bmp,0\n\"b.bmp,1\n", "line 2: the quote that begins here has no end"},
        {"a.bmp,0\n\"b\"x.bmp,1\n", "line 2: text behind a closing quote"},
        {"a.bmp,0\nb\"x.bmp,1\n", "line 2: a quote inside a field"},
        {"\"two\nlines\",0\nb.bmp\n", "line 3: 1 column where"},
        {"a.bmp,\n", "line 1: the label is empty"},
        {",1\n", "line 1: the path is empty"},
        {"a.bmp,0\nb.bmp,dog\n",
         "line 2: the label 'dog' is a name, but '0' in line 1 is a number\n"},
        {"a.bmp,dog\nb.bmp,0\n", "'dog' in line 1 is a name; is line 1 a header?"},
        {"path,label\na.bmp,dog\nb.bmp,0\n", "'dog' in line 2 is a name\n"},
        {"photo,kind\na.bmp,dog\n", "line 1: there is no file 'photo'"},
        {"photo,kind\na.bmp,dog\n", "(path|file|filename|"},
        {"photo,kind\na.bmp,dog\n", "(label|class|category|"},
        {"photo,kind\na.bmp,dog\n", "say --no-header"},
        {"filename,kind\na.bmp,0\n", "as a header it names no column of labels ("},
        {"photo,class\na.bmp,0\n", "as a header it names no column of paths ("},
        {",photo,kind\n0,a.bmp,dog\n", "line 1: there is no file ''"},
        {"path;label\na.bmp;dog\n", "line 1: there is no file 'path;label'"},
        {"absent.bmp,0\na.bmp,1\n", "in/absent.bmp: can't open it: no such file"},
        {"a.bmp,-1\n", "line 1: the label -1 is not from 0"},
        {"a.bmp,1000000\n", "line 1: the label 1000000"},
        {"a.bmp,0\nabsent.bmp,1\n", "in/absent.bmp: can't open it"},
        {"path,label\n", "holds no rows"},
        {"", "holds no rows"},
    };
    size_t i;

    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_csv(cases[i].text);
        CHECK_FAILS(1, cases[i].error, "$T from-csv in/list.csv d@1");
        CHECK_EQ_STR(listing(), "in ");
    }
    /* a header that is unknown is no bad record, nor a class */
    write_csv("photo,kind\na.bmp,dog\nb.bmp,cat\n");
    CHECK_FAILS(1, "line 1: there is no file 'photo'",
                "$T from-csv in/list.csv d@1 --skip-bad-records 9");
    CHECK_FAILS(1, "in/photo: can't open it: no such file",
                "$T from-csv in/list.csv d@1 --no-header");
    write_csv("path,label\na.bmp,0\n");
    CHECK_FAILS(1, "'label' in line 1 is a name; is line 1 a header?",
                "$T from-csv in/list.csv d@1 --no-header");
    CHECK_RUNS("$T from-csv --help");
    CHECK_CONTAINS(run_out, "--no-header");
    CHECK_CONTAINS(run_out, "path|file|filename|");
    CHECK_CONTAINS(run_out, "label|class|category|");
    write_csv("a.bmp,dog\nb.bmp,cow\n");
    CHECK_FAILS(1, "line 2: the class 'cow' is not in names",
                "printf 'cat\\ndog\\n' >names; $T from-csv in/list.csv d@1 --classes names");
    CHECK_FAILS(1, "nolist", "$T from-csv nolist d@1");
    CHECK_FAILS(1, "nonames", "$T from-csv in/list.csv d@1 --classes nonames");
    CHECK_FAILS(1, "names: holds no class names",
                ": >names; $T from-csv in/list.csv d@1 --classes names");
}

/* ---- the surroundings ------------------------------------------------------------------------ */
MPT_TEST(output_that_goes_nowhere) {
    fresh_directory();
    write_simple_records("f", 60);
    CHECK_FAILS(1, "can't write to standard output", "$T cat f >&-");
    CHECK_EQ_INT(run("$T verify f >/dev/full"), 1);
    CHECK_EQ_INT(run("$T cat --help >/dev/full"), 1);
    CHECK_FAILS(1, "can't write to standard output", "$T cat f f f f f f f f f f f f >/dev/full");
    CHECK_FAILS(1, "can't write to standard output", "$T verify $(yes f | head -n 400) >/dev/full");
    CHECK_FAILS(1, "can't write to standard output", "$T count $(yes f | head -n 2000) >/dev/full");
    CHECK_FAILS(1, "can't write to standard output: no space left", "$T --help >/dev/full");
    CHECK_FAILS(1, "can't write to standard output: no space left", "$T --version >/dev/full");
    CHECK_FAILS(1, "can't write to standard output: no space left", "$T cat --help >/dev/full");
    CHECK_FAILS(1, "can't write to standard output: no space left", "$T head f >/dev/full");
    CHECK_FAILS(1, "can't write to standard output: no space left", "$T count f >/dev/full");
    CHECK_FAILS(1, "can't write to standard output: no space left", "$T verify f >/dev/full");
    CHECK_FAILS(1, "can't write to standard output: no space left", "$T stats f >/dev/full");
    CHECK_FAILS(1, "can't write to standard output: no space left", "$T index f >/dev/full");
    CHECK_FAILS(1, "can't write to standard output: no space left", "$T merge f m >/dev/full");
    CHECK_FAILS(1, "can't write to standard output: no space left", "$T split f s@2 >/dev/full");
    CHECK_RUNS("rm f.idx m s-*");
    /* a reader that has enough: quiet, and no signal (141 would be SIGPIPE's) */
    CHECK_EQ_INT(run("{ $T cat f f f f f f f f f f f f f f f f f f f f f f f f; echo $? >code; } |"
                     " head -n 1 >/dev/null; exit $(cat code)"),
                 0);
    CHECK_EQ_STR(run_err, "");
    CHECK_RUNS("$T merge f f g 2>&- && $T count g 2>&- 0<&-");
    CHECK_EQ_STR(run_out, "g: 120 records\n120 g\n");
    CHECK_RUNS("$T merge f f h >&- 2>&-; $T count h"); /* the file is none of 0, 1, 2 */
    CHECK_EQ_STR(run_out, "120 h\n");
}

/* bench shares its command line and its manners with tfrecord. */
MPT_TEST(bench_reads_files_and_tells_of_lost_output) {
    fresh_directory();
    write_simple_records("f", 60);
    CHECK_RUNS("$B records --rounds 1 f");
    CHECK_CONTAINS(run_out, "read and check records");
    CHECK_FAILS(1, "no space left", "$B records --rounds 1 f >/dev/full");
    CHECK_FAILS(1, "no space left", "$B records --rounds 1 --json f >/dev/full");
    CHECK_FAILS(1, "no space left", "$B --help >/dev/full");
    CHECK_FAILS(1, "no space left", "$B --version >/dev/full");
    CHECK_FAILS(1, "no space left", "$B crc --help >/dev/full");
    CHECK_FAILS(1, "missing: can't open it: no such file", "$B records missing");
    CHECK_FAILS(1, "-: standard input is not read by that name", "$B records -");
    CHECK_FAILS(1, "/dev/null: is no regular file", "$B records /dev/null");
    CHECK_FAILS(1, "max_record_bytes (50)", "$B records --rounds 1 --max-record-bytes 50 f");
}

MPT_TEST(a_full_disk_is_an_error_and_leaves_nothing) {
    size_t size = 4 << 20;
    uint8_t *data;
    mpt_bytes payload;

    need_zlib();
    fresh_directory();
    data = (uint8_t *)malloc(size);
    CHECK(data != NULL);
    memset(data, 7, size);
    payload.data = data;
    payload.size = size;
    write_records("f", &payload, 1);
    free(data);
    write_idx(3, IDX_COUNT, 0);
    /* a limit on the size of files acts as a full disk does: a short write, then an error */
    CHECK_FAILS(1, "g", "ulimit -f 1024; $T merge f g");
    CHECK_FAILS(1, "d-0000", "ulimit -f 1024; $T split f d@1");
    CHECK_FAILS(1, "d-0000", "ulimit -f 1; $T from-idx images labels d@2");
    CHECK_EQ_STR(listing(), "f images labels ");
}

/* Waits until a file other than the inputs is there: the program is in the middle of its work. */
static bool wait_for_output(pid_t pid, int *status) {
    for (;;) {
        DIR *d = opendir(work_file("out"));
        struct dirent *entry;
        bool found = false;

        CHECK(d != NULL);
        while ((entry = readdir(d)) != NULL)
            found |= entry->d_name[0] != '.' || entry->d_name[1] > '.';
        closedir(d);
        if (found) return true;
        if (waitpid(pid, status, WNOHANG) == pid) return false;
        usleep(1000);
    }
}

MPT_TEST(a_signal_ends_in_good_order) {
    size_t size = 24 << 20, i;
    uint32_t state = 1;
    mpt_bytes payload;
    uint8_t *data;
    int status;
    pid_t pid;

    need_zlib();
    fresh_directory();
    CHECK_RUNS("mkdir out");
    data = (uint8_t *)malloc(size);
    CHECK(data != NULL);
    for (i = 0; i < size; i++) data[i] = (uint8_t)((state = state * 1664525u + 1013904223u) >> 28);
    payload.data = data;
    payload.size = size / 64;
    {
        mpt_bytes payloads[64];
        for (i = 0; i < 64; i++) {
            payloads[i] = payload;
            payloads[i].data = data + i * payload.size;
        }
        write_records("f", payloads, 64);
    }
    free(data);
    pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        char *arguments[8];
        char from[1400], to[1400];

        snprintf(from, sizeof from, "%s", work_file("f"));
        snprintf(to, sizeof to, "%s", work_file("out/g"));
        arguments[0] = (char *)(uintptr_t) "tfrecord";
        arguments[1] = (char *)(uintptr_t) "recompress";
        arguments[2] = from;
        arguments[3] = to;
        arguments[4] = (char *)(uintptr_t) "--compression=gzip";
        arguments[5] = (char *)(uintptr_t) "--level=9";
        arguments[6] = NULL;
        if (!freopen("/dev/null", "w", stderr)) _exit(98);
        execv(mpt_test_program("tfrecord"), arguments);
        _exit(99);
    }
    if (!wait_for_output(pid, &status)) mpt_test_fail(__FILE__, __LINE__, "it ended: %d", status);
    kill(pid, SIGTERM);
    CHECK_EQ_INT(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status));
    CHECK_EQ_INT(WEXITSTATUS(status), 128 + SIGTERM);
    CHECK_RUNS("ls -A out");
    CHECK_EQ_STR(run_out, "");
}

#ifndef MPTRAIN_ZLIB
MPT_TEST(without_zlib_the_refusal_is_clear) {
    fresh_directory();
    write_idx(1, IDX_COUNT, 0);
    write_simple_records("f", 3);
    CHECK_FAILS(1, "-DMPTRAIN_ZLIB", "$T from-idx images labels d@2");
    CHECK_FAILS(1, "gzip needs a build with zlib", "gzip images; $T from-idx images.gz labels d@2");
    CHECK_FAILS(1, "MPTRAIN_ZLIB", "$T recompress f g --compression gzip");
    CHECK_FAILS(1, "gzip", "gzip f; $T cat f.gz");
    CHECK_EQ_STR(listing(), "f.gz images.gz labels ");
}
#endif

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(help_and_version_go_to_standard_output),
    MPT_TEST_CASE(wrong_usage_is_one_line_and_exit_2),
    MPT_TEST_CASE(flags_in_all_spellings),
    MPT_TEST_CASE(cat_shows_values_exactly),
    MPT_TEST_CASE(cat_takes_the_last_of_a_repeated_name_and_names_what_is_no_example),
    MPT_TEST_CASE(cat_limit_and_index),
    MPT_TEST_CASE(damage_is_named_after_what_came_before),
    MPT_TEST_CASE(verify_keeps_the_order_of_arguments),
    MPT_TEST_CASE(directories_patterns_and_missing_files),
    MPT_TEST_CASE(unreadable_is_not_damaged),
    MPT_TEST_CASE(the_record_limit_is_an_option),
    MPT_TEST_CASE(pipes_are_read_once),
    MPT_TEST_CASE(a_dash_is_no_stream),
    MPT_TEST_CASE(companions_of_record_files_are_left_out),
    MPT_TEST_CASE(stats_names_a_feature_that_is_not_there),
    MPT_TEST_CASE(index_in_dali_form),
    MPT_TEST_CASE(round_trip_through_every_command),
    MPT_TEST_CASE(from_idx_keeps_every_pixel),
    MPT_TEST_CASE(the_seed_alone_decides_the_order),
    MPT_TEST_CASE(schemas_and_their_label_offsets),
    MPT_TEST_CASE(damaged_idx_files_leave_nothing_behind),
    MPT_TEST_CASE(nothing_is_replaced_unasked),
    MPT_TEST_CASE(from_folder_takes_classes_in_order),
    MPT_TEST_CASE(from_folder_bad_pictures_fail_or_are_named),
    MPT_TEST_CASE(from_csv_forms),
    MPT_TEST_CASE(from_csv_errors_name_the_line),
    MPT_TEST_CASE(output_that_goes_nowhere),
    MPT_TEST_CASE(bench_reads_files_and_tells_of_lost_output),
    MPT_TEST_CASE(a_full_disk_is_an_error_and_leaves_nothing),
    MPT_TEST_CASE(a_signal_ends_in_good_order),
#ifndef MPTRAIN_ZLIB
    MPT_TEST_CASE(without_zlib_the_refusal_is_clear),
#endif
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
