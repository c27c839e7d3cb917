/* test_safetensors.c - >>state: SHA-256, reading and writing safetensors
   Cases O-47 (a file whole or not at all, flipped bytes), O-48 (a full disk), O-50 (no rename):
   the parts that concern one file. */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "mpt_test.h"

static mpt_ctx *open_ctx(void) {
    mpt_ctx *ctx = NULL;
    CHECK_OK(NULL, mpt_ctx_create(NULL, &ctx));
    return ctx;
}

/* ---- SHA-256 --------------------------------------------------------------------------------- */
/* The examples of FIPS 180-4 (NIST's SHA256.pdf), and a million a. */
MPT_TEST(sha256_known_answers) {
    static const char *const cases[3][2] = {
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"}};
    mpti_sha256 s;
    char hex[65], a[1000];
    int i;
    for (i = 0; i < 3; i++) {
        mpti_sha256_init(&s);
        mpti_sha256_add(&s, cases[i][0], strlen(cases[i][0]));
        mpti_sha256_finish(&s, hex);
        CHECK_EQ_STR(hex, cases[i][1]);
    }
    memset(a, 'a', sizeof a);
    mpti_sha256_init(&s);
    for (i = 0; i < 1000; i++) mpti_sha256_add(&s, a, sizeof a);
    mpti_sha256_finish(&s, hex);
    CHECK_EQ_STR(hex, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

/* However the bytes are cut: all lengths up to three blocks, in pieces of any size. */
MPT_TEST(sha256_in_pieces) {
    uint8_t data[192];
    char whole[65], pieces[65];
    size_t n, step, at;
    mpti_sha256 s;
    for (n = 0; n < sizeof data; n++) data[n] = (uint8_t)(n * 37);
    for (n = 0; n <= sizeof data; n++) {
        mpti_sha256_init(&s);
        mpti_sha256_add(&s, data, n);
        mpti_sha256_finish(&s, whole);
        for (step = 1; step < 70; step += 3) {
            mpti_sha256_init(&s);
            for (at = 0; at < n; at += step)
                mpti_sha256_add(&s, data + at, n - at < step ? n - at : step);
            mpti_sha256_finish(&s, pieces);
            CHECK_EQ_STR(whole, pieces);
        }
    }
}

/* ---- files made by hand ---------------------------------------------------------------------- */
static const char *path_of(const char *name) {
    return mpt_test_join(mpt_test_tmpdir(), name);
}

static void write_bytes(const char *path, const void *data, size_t size) {
    FILE *f = fopen(path, "wb");
    CHECK(f != NULL);
    CHECK(fwrite(data, 1, size, f) == size);
    CHECK(fclose(f) == 0);
}

static size_t read_bytes(const char *path, uint8_t *dst, size_t capacity) {
    FILE *f = fopen(path, "rb");
    size_t n;
    CHECK(f != NULL);
    n = fread(dst, 1, capacity, f);
    CHECK(n < capacity);
    fclose(f);
    return n;
}

static mpt_result open_path(mpt_ctx *ctx, const char *path, const mpt_io *io,
                            mpt_safetensors **out) {
    mpt_safetensors_desc d;
    memset(&d, 0, sizeof d);
    d.path = path;
    d.io = io;
    return mpt_safetensors_open(ctx, &d, out);
}

/* The header's text and that many zero bytes of data. */
static mpt_result open_text(mpt_ctx *ctx, const char *text, size_t data_bytes,
                            mpt_safetensors **out) {
    static uint8_t file[8192];
    const char *path = path_of("by-hand.safetensors");
    size_t n = strlen(text);
    CHECK(8 + n + data_bytes <= sizeof file);
    memset(file, 0, sizeof file);
    mpti_store_u64(file, n);
    memcpy(file + 8, text, n);
    write_bytes(path, file, 8 + n + data_bytes);
    return open_path(ctx, path, NULL, out);
}

#define ONE(name, dtype, shape, offsets) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static void accept(const char *text, size_t data_bytes, int64_t tensors) {
    mpt_ctx *ctx = open_ctx();
    mpt_safetensors *s = NULL;
    CHECK_OK(ctx, open_text(ctx, text, data_bytes, &s));
    CHECK_EQ_INT(mpt_safetensors_count(s), tensors);
    mpt_safetensors_close(s);
    mpt_ctx_destroy(ctx);
}

static void refuse(const char *text, size_t data_bytes, const char *why) {
    mpt_ctx *ctx = open_ctx();
    mpt_safetensors *s = NULL;
    CHECK_RESULT(ctx, open_text(ctx, text, data_bytes, &s), MPT_ERR_CORRUPT_DATA);
    CHECK(s == NULL);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "by-hand.safetensors");
    CHECK_CONTAINS(mpt_last_error(ctx)->message, why);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(what_the_format_allows) {
    accept("{}", 0, 0);
    accept("{}      ", 0, 0);
    accept("{\"__metadata__\":{}}", 0, 0);
    accept("{" ONE("a", "F32", "[2,3]", "[0,24]") "}", 24, 1);
    accept("{ \"a\" : { \"shape\" : [ ] , \"data_offsets\" : [ 0 , 8 ] , \"dtype\" : \"I64\" } }",
           8, 1);
    accept("{" ONE("b", "U8", "[3]", "[4,7]") "," ONE("a", "F32", "[1]", "[0,4]") "}", 7, 2);
    accept("{" ONE("a", "F32", "[0,5]", "[0,0]") "," ONE("b", "U8", "[1]",
                                                         "[0,1]") "," ONE("c", "I8", "[0]",
                                                                          "[1,1]") "}",
           1, 3);
    accept("{\"a\":{\"dtype\":\"BOOL\",\"shape\":[1],\"data_offsets\":[0,1],\"later\":{\"x\":[1,"
           "null]}}}",
           1, 1);
    accept("{" ONE("", "F64", "[1]", "[0,8]") "}", 8, 1);
    accept("{" ONE("\\\"\\u00e9\\n", "F8_E4M3", "[1,1,1,1,1,1,1,1]", "[0,1]") "}", 1, 1);
}

MPT_TEST(what_the_format_forbids) {
    /* JSON */
    refuse("", 0, "does not start with {");
    refuse(" {}", 0, "does not start with {");
    refuse("[]", 0, "does not start with {");
    refuse("{", 0, "JSON");
    refuse("{} x", 0, "JSON");
    refuse("{}\n", 0, "JSON"); /* only spaces may follow */
    refuse("{}{}", 0, "JSON");
    refuse("{\"a\":1}", 0, "JSON");
    refuse("{\"a\":[]}", 0, "JSON");
    refuse("{" ONE("a", "U8", "[1]", "[0,1]") ",}", 1, "JSON");
    refuse("{" ONE("a\xff", "U8", "[1]", "[0,1]") "}", 1, "UTF-8");
    refuse("{" ONE("a\\u0000b", "U8", "[1]", "[0,1]") "}", 1, "JSON");
    /* the fields of a tensor */
    refuse("{\"a\":{}}", 0, "missing");
    refuse("{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "missing");
    refuse("{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
           "two fields dtype");
    refuse("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
           "two fields shape");
    refuse("{\"a\":{\"dtype\":8,\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "JSON");
    refuse("{" ONE("a", "f32", "[1]", "[0,4]") "}", 4, "unknown dtype 'f32'");
    refuse("{" ONE("a", "", "[1]", "[0,4]") "}", 4, "unknown dtype");
    refuse("{" ONE("a", "U8", "1", "[0,1]") "}", 1, "JSON");
    refuse("{" ONE("a", "U8", "[-1]", "[0,1]") "}", 1, "JSON");
    refuse("{" ONE("a", "U8", "[1.0]", "[0,1]") "}", 1, "JSON");
    refuse("{" ONE("a", "U8", "[1e0]", "[0,1]") "}", 1, "JSON");
    refuse("{" ONE("a", "U8", "[\\\"1\\\"]", "[0,1]") "}", 1, "JSON");
    refuse("{" ONE("a", "U8", "[\"1\"]", "[0,1]") "}", 1, "JSON");
    refuse("{" ONE("a", "U8", "[01]", "[0,1]") "}", 1, "JSON");
    refuse("{" ONE("a", "U8", "[null]", "[0,1]") "}", 1, "JSON");
    refuse("{" ONE("a", "U8", "[18446744073709551617]", "[0,1]") "}", 1, "JSON");
    refuse("{" ONE("a", "U8", "[1]", "[0]") "}", 1, "JSON");
    refuse("{" ONE("a", "U8", "[1]", "[0,1,2]") "}", 1, "JSON");
    /* sizes */
    refuse("{" ONE("a", "F32", "[2]", "[0,4]") "}", 4,
           "tensor 'a': 2 elements of F32 do not fill 4 bytes");
    refuse("{" ONE("a", "F32", "[1]", "[0,5]") "}", 5, "do not fill");
    refuse("{" ONE("a", "F32", "[4294967296,4294967296]", "[0,0]") "}", 0, "too many elements");
    refuse("{" ONE("a", "F32", "[4294967296,2147483647]", "[0,0]") "}", 0, "do not fill");
    refuse("{" ONE("a", "F32", "[4611686018427387905]", "[0,4]") "}", 4,
           "do not fill"); /* * 4 wraps to 4 */
    refuse("{" ONE("a", "U8", "[1]", "[1,0]") "}", 1, "not in the file");
    refuse("{" ONE("a", "U8", "[2]", "[0,2]") "}", 1, "not in the file");
    refuse("{" ONE("a", "U8", "[1]", "[9223372036854775000,9223372036854775001]") "}", 1,
           "not in the file");
    /* layout */
    refuse("{" ONE("a", "U8", "[1]", "[1,2]") "}", 2, "hole");
    refuse("{" ONE("a", "U8", "[1]", "[0,1]") "," ONE("b", "U8", "[1]", "[2,3]") "}", 3, "hole");
    refuse("{" ONE("a", "U8", "[2]", "[0,2]") "," ONE("b", "U8", "[2]", "[1,3]") "}", 3,
           "tensor 'b': it overlaps");
    refuse("{" ONE("a", "U8", "[1]", "[0,1]") "," ONE("b", "U8", "[1]", "[0,1]") "}", 1,
           "overlaps");
    refuse("{" ONE("a", "U8", "[1]", "[0,1]") "}", 2, "accounts for");
    refuse("{}", 1, "accounts for");
    /* names */
    refuse("{" ONE("a", "U8", "[1]", "[0,1]") "," ONE("a", "U8", "[1]", "[1,2]") "}", 2, "twice");
    refuse("{" ONE("a", "U8", "[1]", "[0,1]") "," ONE("\\u0061", "U8", "[1]", "[1,2]") "}", 2,
           "twice");
    refuse("{\"__metadata__\":{},\"__metadata__\":{}}", 0, "two __metadata__");
    refuse("{\"__metadata__\":{\"a\":1}}", 0, "JSON");
    refuse("{\"__metadata__\":{\"a\":{\"b\":\"c\"}}}", 0, "JSON");
    refuse("{\"__metadata__\":[]}", 0, "JSON");
    refuse("{\"__metadata__\":null}", 0, "JSON");
    refuse("{\"__metadata__\":{\"a\":\"1\",\"b\":\"2\",\"a\":\"3\"}}", 0, "'a' twice");
}

MPT_TEST(the_length_of_the_header_is_checked_first) {
    static const uint64_t lengths[5] = {3, 100000001, (uint64_t)1 << 40, UINT64_MAX, 100000000};
    mpt_ctx *ctx = open_ctx();
    mpt_safetensors *s = NULL;
    const char *path = path_of("length.safetensors");
    uint8_t file[10] = {0};
    size_t n;
    int i;
    memcpy(file + 8, "{}", 2);
    for (i = 0; i < 5; i++) {
        mpti_store_u64(file, lengths[i]);
        write_bytes(path, file, sizeof file);
        CHECK_RESULT(ctx, open_path(ctx, path, NULL, &s), MPT_ERR_CORRUPT_DATA);
        CHECK_CONTAINS(mpt_last_error(ctx)->message, "length");
    }
    for (n = 0; n < 8; n++) {
        write_bytes(path, file, n);
        CHECK_RESULT(ctx, open_path(ctx, path, NULL, &s), MPT_ERR_CORRUPT_DATA);
    }
    CHECK_RESULT(ctx, open_path(ctx, path_of("no-such-file"), NULL, &s), MPT_ERR_IO);
    CHECK_RESULT(ctx, open_path(ctx, NULL, NULL, &s), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_safetensors_open(NULL, NULL, &s), MPT_ERR_INVALID_ARGUMENT);
    CHECK_RESULT(ctx, open_text(ctx, "{" ONE("a", "U8", "[1,1,1,1,1,1,1,1,1]", "[0,1]") "}", 1, &s),
                 MPT_ERR_UNSUPPORTED);
    mpt_safetensors_close(NULL);
    mpt_safetensors_writer_close(NULL);
    mpt_ctx_destroy(ctx);
}

/* ---- writing and reading back ---------------------------------------------------------------- */
static float floats[6] = {1, -2, 3.5f, 0, 1e-30f, 65504};
static uint16_t halves[3] = {0x3c00, 0x0001, 0xfbff};
static int64_t counter = 123456789012345;
static uint8_t bytes[3] = {1, 2, 255};

static void add(mpt_ctx *ctx, mpt_safetensors_writer *w, const char *name, mpt_dtype dtype,
                void *data, int num_dims, int64_t d0, int64_t d1) {
    mpt_tensor t;
    memset(&t, 0, sizeof t);
    t.data = data;
    t.dtype = dtype;
    t.num_dims = num_dims;
    t.dims[0] = d0;
    t.dims[1] = d1;
    CHECK_OK(ctx, mpt_safetensors_writer_add(w, name, &t));
}

static mpt_result write_sample(mpt_ctx *ctx, const char *path, const mpt_io *io, int checksum,
                               int reversed) {
    mpt_safetensors_writer_desc d;
    mpt_safetensors_writer *w = NULL;
    mpt_result rc;
    int i;
    memset(&d, 0, sizeof d);
    d.path = path;
    d.io = io;
    d.checksum = checksum;
    rc = mpt_safetensors_writer_open(ctx, &d, &w);
    if (rc) return rc;
    CHECK_OK(ctx, mpt_safetensors_writer_add_metadata(w, "format", "pt"));
    CHECK_OK(ctx, mpt_safetensors_writer_add_metadata(w, "odd",
                                                      "a \"b\" \\ \n\t\x01 \xc3\xa9,\"format\":"));
    for (i = 0; i < 5; i++) {
        switch (reversed ? 4 - i : i) {
        case 0: add(ctx, w, "fc.weight", MPT_F32, floats, 2, 2, 3); break;
        case 1: add(ctx, w, "fc.bias", MPT_F16, halves, 1, 3, 0); break;
        case 2: add(ctx, w, "bn1.num_batches_tracked", MPT_I64, &counter, 0, 0, 0); break;
        case 3: add(ctx, w, "pixels", MPT_U8, bytes, 1, 3, 0); break;
        case 4: add(ctx, w, "empty", MPT_F32, NULL, 2, 0, 7); break;
        }
    }
    rc = mpt_safetensors_writer_finish(w);
    if (rc == MPT_OK) CHECK_RESULT(ctx, mpt_safetensors_writer_finish(w), MPT_ERR_INVALID_STATE);
    mpt_safetensors_writer_close(w);
    return rc;
}

static void check_sample(mpt_ctx *ctx, mpt_safetensors *s) {
    static const char *const order[5] = {"bn1.num_batches_tracked", "empty", "fc.weight", "fc.bias",
                                         "pixels"};
    mpt_safetensors_info info;
    float f[6];
    uint16_t h[3];
    uint8_t b[3];
    int64_t c, i;
    CHECK_EQ_INT(mpt_safetensors_count(s), 5);
    for (i = 0; i < 5; i++) {
        CHECK_OK(ctx, mpt_safetensors_get(s, i, &info));
        CHECK_EQ_STR(info.name, order[i]);
        CHECK_EQ_INT(mpt_safetensors_find(s, order[i]), i);
        CHECK(info.has_dtype);
        CHECK_EQ_INT(info.bytes, info.count * mpt_dtype_size(info.dtype));
    }
    CHECK_EQ_INT(mpt_safetensors_find(s, "fc"), -1);
    CHECK_EQ_INT(mpt_safetensors_find(s, "zzz"), -1);
    CHECK_RESULT(ctx, mpt_safetensors_get(s, 5, &info), MPT_ERR_INVALID_ARGUMENT);
    CHECK_RESULT(ctx, mpt_safetensors_get(s, -1, &info), MPT_ERR_INVALID_ARGUMENT);
    CHECK_OK(ctx, mpt_safetensors_get(s, 2, &info));
    CHECK(info.num_dims == 2 && info.dims[0] == 2 && info.dims[1] == 3 && info.dtype == MPT_F32);
    CHECK_EQ_INT(info.offset % 8, 0);
    CHECK_OK(ctx, mpt_safetensors_get(s, 0, &info));
    CHECK(info.num_dims == 0 && info.count == 1);
    CHECK_RESULT(ctx, mpt_safetensors_read(s, 0, &c, 4), MPT_ERR_INVALID_ARGUMENT);
    CHECK_OK(ctx, mpt_safetensors_read(s, 0, &c, 8));
    CHECK_OK(ctx, mpt_safetensors_read(s, 1, NULL, 0));
    CHECK_OK(ctx, mpt_safetensors_read(s, 2, f, sizeof f));
    CHECK_OK(ctx, mpt_safetensors_read(s, 4, b, sizeof b)); /* skips one */
    CHECK_EQ_INT(c, counter);
    CHECK_EQ_MEM(f, floats, sizeof f);
    CHECK_EQ_MEM(b, bytes, sizeof b);
    if (!s->file.io->seek) {
        CHECK_RESULT(ctx, mpt_safetensors_read(s, 3, h, sizeof h), MPT_ERR_UNSUPPORTED);
    } else {
        CHECK_OK(ctx, mpt_safetensors_read(s, 3, h, sizeof h));
        CHECK_EQ_MEM(h, halves, sizeof h);
    }
    CHECK_EQ_STR(mpt_safetensors_metadata(s, "format"), "pt");
    CHECK_EQ_STR(mpt_safetensors_metadata(s, "odd"), "a \"b\" \\ \n\t\x01 \xc3\xa9,\"format\":");
    CHECK(mpt_safetensors_metadata(s, "none") == NULL);
}

MPT_TEST(a_written_file_reads_back) {
    mpt_ctx *ctx = open_ctx();
    static uint8_t first[4096], second[4096];
    const char *path = path_of("sample.safetensors");
    int checksum;
    for (checksum = 0; checksum < 2; checksum++) {
        mpt_safetensors *s = NULL;
        size_t n;
        CHECK_OK(ctx, write_sample(ctx, path, NULL, checksum, 0));
        n = read_bytes(path, first, sizeof first);
        CHECK_EQ_INT((8 + mpti_load_u64(first)) % 8, 0);
        CHECK_OK(ctx, open_path(ctx, path, NULL, &s));
        check_sample(ctx, s);
        CHECK_RESULT(ctx, mpt_safetensors_verify(s), checksum ? MPT_OK : MPT_ERR_INVALID_STATE);
        CHECK((mpt_safetensors_metadata(s, "mptrain.crc32c") != NULL) == checksum);
        mpt_safetensors_close(s);
        CHECK_OK(ctx, write_sample(ctx, path, NULL, checksum, 1)); /* over the old one */
        CHECK_EQ_INT(read_bytes(path, second, sizeof second), n);
        CHECK_EQ_MEM(first, second, n);
    }
    mpt_ctx_destroy(ctx);
}

/* The very bytes that Python's safetensors.numpy.save gives for the same tensors. */
MPT_TEST(bytes_as_the_formats_own_library) {
    static const char header[] =
        "{\"__metadata__\":{\"format\":\"pt\"},\"n\":{\"dtype\":\"I64\",\"shape\":[],\"data_"
        "offsets\":[0,8]},"
        "\"a\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[8,16]},"
        "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[16,20]},"
        "\"h\":{\"dtype\":\"F16\",\"shape\":[3],\"data_offsets\":[20,26]},"
        "\"u\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[26,29]}}";
    static uint8_t file[4096];
    const char *path = path_of("order.safetensors");
    mpt_ctx *ctx = open_ctx();
    mpt_safetensors_writer_desc d;
    mpt_safetensors_writer *w = NULL;
    size_t n;
    memset(&d, 0, sizeof d);
    d.path = path;
    CHECK_OK(ctx, mpt_safetensors_writer_open(ctx, &d, &w));
    CHECK_OK(ctx, mpt_safetensors_writer_add_metadata(w, "format", "pt"));
    add(ctx, w, "u", MPT_U8, bytes, 1, 3, 0);
    add(ctx, w, "b", MPT_F32, floats + 2, 1, 1, 0);
    add(ctx, w, "n", MPT_I64, &counter, 0, 0, 0);
    add(ctx, w, "h", MPT_F16, halves, 1, 3, 0);
    add(ctx, w, "a", MPT_F32, floats, 2, 1, 2);
    CHECK_OK(ctx, mpt_safetensors_writer_finish(w));
    mpt_safetensors_writer_close(w);
    n = read_bytes(path, file, sizeof file);
    CHECK_EQ_INT(mpti_load_u64(file), (sizeof header - 1 + 7) / 8 * 8);
    CHECK_EQ_MEM(file + 8, header, sizeof header - 1);
    CHECK_EQ_INT(n, 8 + mpti_load_u64(file) + 29);
    CHECK_EQ_MEM(file + n - 29, &counter, 8);
    CHECK_EQ_MEM(file + n - 21, floats, 12);
    CHECK_EQ_MEM(file + n - 9, halves, 6);
    CHECK_EQ_MEM(file + n - 3, bytes, 3);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(the_writer_refuses_what_no_reader_takes) {
    mpt_ctx *ctx = open_ctx();
    mpt_safetensors_writer_desc d;
    mpt_safetensors_writer *w = NULL;
    mpt_tensor t;
    memset(&d, 0, sizeof d);
    CHECK_RESULT(ctx, mpt_safetensors_writer_open(ctx, &d, &w), MPT_ERR_INVALID_ARGUMENT);
    d.path = path_of("refused.safetensors");
    CHECK_OK(ctx, mpt_safetensors_writer_open(ctx, &d, &w));
    memset(&t, 0, sizeof t);
    t.data = floats;
    t.num_dims = 1;
    t.dims[0] = 2;
    CHECK_RESULT(ctx, mpt_safetensors_writer_add(w, "__metadata__", &t), MPT_ERR_INVALID_ARGUMENT);
    CHECK_RESULT(ctx, mpt_safetensors_writer_add(w, "\xff", &t), MPT_ERR_INVALID_ARGUMENT);
    CHECK_OK(ctx, mpt_safetensors_writer_add_metadata(w, "key", "1"));
    CHECK_OK(ctx, mpt_safetensors_writer_add_metadata(w, "ke", "1"));
    CHECK_RESULT(ctx, mpt_safetensors_writer_add_metadata(w, "key", "2"), MPT_ERR_INVALID_ARGUMENT);
    CHECK_RESULT(ctx, mpt_safetensors_writer_add_metadata(w, "mptrain.crc32c", "2"),
                 MPT_ERR_INVALID_ARGUMENT);
    CHECK_RESULT(ctx, mpt_safetensors_writer_add_metadata(w, "x", "\xc3"),
                 MPT_ERR_INVALID_ARGUMENT);
    t.dims[0] = -1;
    CHECK_RESULT(ctx, mpt_safetensors_writer_add(w, "a", &t), MPT_ERR_INVALID_ARGUMENT);
    t.dims[0] = INT64_MAX;
    CHECK_RESULT(ctx, mpt_safetensors_writer_add(w, "a", &t), MPT_ERR_INVALID_ARGUMENT);
    t.dims[0] = 2;
    t.dtype = (mpt_dtype)99;
    CHECK_RESULT(ctx, mpt_safetensors_writer_add(w, "a", &t), MPT_ERR_INVALID_ARGUMENT);
    t.dtype = MPT_F32;
    CHECK_OK(ctx, mpt_safetensors_writer_add(w, "a", &t));
    t.dtype = MPT_F16;
    CHECK_OK(ctx, mpt_safetensors_writer_add(w, "a", &t)); /* finish tells */
    CHECK_RESULT(ctx, mpt_safetensors_writer_finish(w), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "'a' names two tensors");
    CHECK_RESULT(ctx, mpt_safetensors_writer_add(w, "b", &t), MPT_ERR_INVALID_STATE);
    mpt_safetensors_writer_close(w);
    CHECK(access(d.path, F_OK) != 0);
    mpt_ctx_destroy(ctx);
}

/* ---- storage that plays tricks: files in memory are not needed, the built-in table is wrapped  */
static struct {
    int64_t write_limit; /* bytes until ENOSPC; -1: none */
    int rename_errno;    /* 0: works */
    size_t read_step;    /* bytes a read gives at most */
} trick;

static int64_t trick_write(void *file, const void *src, size_t size) {
    if (trick.write_limit >= 0 && (int64_t)size > trick.write_limit) {
        errno = ENOSPC;
        return -1;
    }
    if (trick.write_limit >= 0) trick.write_limit -= (int64_t)size;
    return mpt_io_files()->write(file, src, size);
}

static mpt_result trick_rename(const char *from, const char *to, void *user) {
    if (!trick.rename_errno) return mpt_io_files()->rename(from, to, user);
    errno = trick.rename_errno;
    return MPT_ERR_IO;
}

static int64_t trick_read(void *file, void *dst, size_t size) {
    return mpt_io_files()->read(file, dst, size < trick.read_step ? size : trick.read_step);
}

static mpt_io trick_io(void) {
    mpt_io io = *mpt_io_files();
    memset(&trick, 0, sizeof trick);
    trick.write_limit = -1;
    trick.read_step = SIZE_MAX;
    io.write = trick_write;
    io.rename = trick_rename;
    io.read = trick_read;
    io.error = NULL;
    return io;
}

static int files_in_tmpdir(const char *prefix) {
    DIR *directory = opendir(mpt_test_tmpdir());
    struct dirent *entry;
    int n = 0;
    CHECK(directory != NULL);
    while ((entry = readdir(directory)) != NULL)
        n += !strncmp(entry->d_name, prefix, strlen(prefix));
    closedir(directory);
    return n;
}

/* O-48 and O-50. A full disk at any byte, a rename that is refused: a clear error, nothing left
   behind, and the file from before still loads. */
MPT_TEST(a_failed_write_leaves_the_old_file) {
    mpt_ctx *ctx = open_ctx();
    mpt_io io = trick_io();
    const char *path = path_of("kept.safetensors");
    mpt_safetensors *s = NULL;
    int64_t limit;
    int attempt;
    CHECK_OK(ctx, write_sample(ctx, path, NULL, 1, 0));
    for (limit = 0; limit < 900; limit += 37) {
        trick.write_limit = limit;
        if (write_sample(ctx, path, &io, 0, 0) == MPT_OK) break;
        CHECK_EQ_INT(mpt_last_error(ctx)->code, MPT_ERR_IO);
        CHECK_CONTAINS(mpt_last_error(ctx)->message, "no space left");
        CHECK_EQ_INT(files_in_tmpdir("kept.safetensors"), 1);
    }
    CHECK(limit > 300 && limit < 900);
    io = trick_io();
    CHECK_OK(ctx, write_sample(ctx, path, NULL, 1, 0));
    for (attempt = 0; attempt < 2; attempt++) {
        trick.rename_errno = attempt ? EOPNOTSUPP : EIO;
        CHECK_RESULT(ctx, write_sample(ctx, path, &io, 0, 0), MPT_ERR_IO);
        CHECK_CONTAINS(mpt_last_error(ctx)->message, "give the finished file its name");
        CHECK_EQ_INT(files_in_tmpdir("kept.safetensors"), 1);
    }
    CHECK_OK(ctx, open_path(ctx, path, NULL, &s));
    CHECK_OK(ctx, mpt_safetensors_verify(s));
    check_sample(ctx, s);
    mpt_safetensors_close(s);
    mpt_ctx_destroy(ctx);
}

static int64_t unknown_size(void *file) {
    (void)file;
    return -1;
}

/* Short reads, no seek, no size: the same tensors; a cut is found when it is reached. */
MPT_TEST(storage_without_seek_or_size) {
    static uint8_t file[4096];
    static const size_t steps[3] = {1, 7, SIZE_MAX};
    mpt_ctx *ctx = open_ctx();
    mpt_io io = trick_io();
    const char *path = path_of("stream.safetensors");
    mpt_safetensors *s = NULL;
    size_t n;
    int i;
    CHECK_OK(ctx, write_sample(ctx, path, NULL, 1, 0));
    for (i = 0; i < 9; i++) {
        io = trick_io();
        trick.read_step = steps[i % 3];
        if (i >= 3) io.seek = NULL;
        if (i >= 6) io.size = unknown_size;
        CHECK_OK(ctx, open_path(ctx, path, &io, &s));
        CHECK_OK(ctx, mpt_safetensors_verify(s));
        check_sample(ctx, s);
        mpt_safetensors_close(s);
    }
    n = read_bytes(path, file, sizeof file);
    write_bytes(path, file, n - 1);
    io.size = unknown_size;
    CHECK_OK(ctx, open_path(ctx, path, &io, &s));
    CHECK_RESULT(ctx, mpt_safetensors_read(s, 4, file, 3), MPT_ERR_CORRUPT_DATA);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "ends at byte");
    CHECK_RESULT(ctx, mpt_safetensors_verify(s), MPT_ERR_CORRUPT_DATA);
    mpt_safetensors_close(s);
    mpt_ctx_destroy(ctx);
}

/* ---- damage ---------------------------------------------------------------------------------- */
/* Reads everything that a file offers. Any result is fine, crashing is not. */
static mpt_result read_all(mpt_ctx *ctx, const char *path, int verify) {
    static uint8_t room[65536];
    mpt_safetensors *s = NULL;
    mpt_safetensors_info info;
    mpt_result rc = open_path(ctx, path, NULL, &s);
    int64_t i;
    if (rc) return rc;
    for (i = 0; i < mpt_safetensors_count(s) && rc == MPT_OK; i++) {
        CHECK_OK(ctx, mpt_safetensors_get(s, i, &info));
        CHECK(info.bytes <= sizeof room);
        rc = mpt_safetensors_read(s, i, room, (size_t)info.bytes);
    }
    if (rc == MPT_OK && verify) rc = mpt_safetensors_verify(s);
    mpt_safetensors_close(s);
    return rc;
}

/* O-47. Every bit of every byte, and every cut: open or verify finds it. */
MPT_TEST(checksum_finds_every_flipped_bit) {
    static uint8_t file[4096];
    mpt_ctx *ctx = open_ctx();
    const char *path = path_of("flipped.safetensors"), *kept = path_of("whole.safetensors");
    size_t n, i;
    int bit;
    CHECK_OK(ctx, write_sample(ctx, kept, NULL, 1, 0));
    CHECK_OK(ctx, read_all(ctx, kept, 1));
    n = read_bytes(kept, file, sizeof file);
    for (i = 0; i < n; i++) {
        for (bit = 0; bit < 8; bit++) {
            file[i] ^= (uint8_t)(1 << bit);
            write_bytes(path, file, n);
            file[i] ^= (uint8_t)(1 << bit);
            if (read_all(ctx, path, 1) >= 0)
                mpt_test_fail(__FILE__, __LINE__, "byte %zu bit %d", i, bit);
        }
        write_bytes(path, file, i);
        CHECK_RESULT(ctx, read_all(ctx, path, 0), MPT_ERR_CORRUPT_DATA);
    }
    memcpy(file + n, "x", 1);
    write_bytes(path, file, n + 1);
    CHECK_RESULT(ctx, read_all(ctx, path, 0), MPT_ERR_CORRUPT_DATA);
    mpt_ctx_destroy(ctx);
}

/* Mutated headers: each either refused with a message or read; the sanitizers watch. */
MPT_TEST(mutants_do_no_harm) {
    static const char pieces[16][24] = {"{",
                                        "}",
                                        "[",
                                        "]",
                                        ",",
                                        ":",
                                        "\"",
                                        "\\",
                                        "0",
                                        "-1",
                                        "99999999999999999999",
                                        "\"__metadata__\":{}",
                                        "null",
                                        "\\u0000",
                                        "1e9",
                                        " "};
    static uint8_t file[4096], mutant[4200];
    mpt_ctx *ctx = open_ctx();
    const char *path = path_of("mutant.safetensors"), *kept = path_of("whole.safetensors");
    int round, rounds = mpt_test_full() ? 100000 : 3000, survivors = 0;
    size_t n;
    CHECK_OK(ctx, write_sample(ctx, kept, NULL, 0, 0));
    n = read_bytes(kept, file, sizeof file);
    for (round = 0; round < rounds; round++) {
        uint32_t r[4];
        size_t header = (size_t)mpti_load_u64(file), at, gone, put;
        const char *piece;
        mpti_random4(7, 0, (uint64_t)round, 0, MPTI_RANDOM_SHUFFLE, r);
        at = 8 + mpti_below(r[0], (uint32_t)header);
        gone = mpti_below(r[1], 4);
        if (gone > 8 + header - at) gone = 8 + header - at;
        piece = pieces[r[2] % 16];
        put = r[3] % 4 ? strlen(piece) : 0;
        memcpy(mutant, file, at);
        memcpy(mutant + at, piece, put);
        memcpy(mutant + at + put, file + at + gone, n - at - gone);
        mpti_store_u64(mutant, header + put - gone);
        write_bytes(path, mutant, n + put - gone);
        if (read_all(ctx, path, 0) == MPT_OK) survivors++;
        else CHECK(mpt_last_error(ctx)->code < 0 && mpt_last_error(ctx)->message[0]);
    }
    CHECK(survivors < rounds / 2); /* a letter of a name, a digit of a key, spaces at the end */
    mpt_ctx_destroy(ctx);
}

MPT_TEST(the_nth_allocation_fails) {
    mpt_ctx *plain = open_ctx();
    const char *path = path_of("memory.safetensors"), *kept = path_of("whole.safetensors");
    int64_t n;
    int done[2] = {0, 0}, writing;
    CHECK_OK(plain, write_sample(plain, kept, NULL, 1, 0));
    for (writing = 0; writing < 2; writing++) {
        for (n = 1; n < 100 && !done[writing]; n++) {
            mpt_test_allocator memory;
            mpt_safetensors_writer_desc d;
            mpt_safetensors_writer *w = NULL;
            mpt_ctx_desc cd;
            mpt_ctx *ctx = NULL;
            mpt_tensor t;
            mpt_result rc;
            memset(&cd, 0, sizeof cd);
            memset(&d, 0, sizeof d);
            memset(&t, 0, sizeof t);
            d.path = path;
            d.checksum = 1;
            t.data = floats;
            mpt_test_allocator_init(&memory, n, 0);
            cd.allocator = memory.hooks;
            rc = mpt_ctx_create(&cd, &ctx);
            if (rc == MPT_OK && !writing) rc = read_all(ctx, kept, 1);
            if (rc == MPT_OK && writing) rc = mpt_safetensors_writer_open(ctx, &d, &w);
            if (rc == MPT_OK && writing) rc = mpt_safetensors_writer_add(w, "a", &t);
            if (rc == MPT_OK && writing)
                rc = mpt_safetensors_writer_add_metadata(w, "key", "value");
            if (rc == MPT_OK && writing) rc = mpt_safetensors_writer_finish(w);
            mpt_safetensors_writer_close(w);
            CHECK_EQ_INT(rc, memory.has_failed ? MPT_ERR_OUT_OF_MEMORY : MPT_OK);
            done[writing] = !memory.has_failed;
            mpt_ctx_destroy(ctx);
            CHECK_NO_LEAK(&memory);
        }
        CHECK(done[writing] && n > 6);
    }
    mpt_ctx_destroy(plain);
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(sha256_known_answers),
    MPT_TEST_CASE(sha256_in_pieces),
    MPT_TEST_CASE(what_the_format_allows),
    MPT_TEST_CASE(what_the_format_forbids),
    MPT_TEST_CASE(the_length_of_the_header_is_checked_first),
    MPT_TEST_CASE(a_written_file_reads_back),
    MPT_TEST_CASE(bytes_as_the_formats_own_library),
    MPT_TEST_CASE(the_writer_refuses_what_no_reader_takes),
    MPT_TEST_CASE(a_failed_write_leaves_the_old_file),
    MPT_TEST_CASE(storage_without_seek_or_size),
    MPT_TEST_CASE(checksum_finds_every_flipped_bit),
    MPT_TEST_CASE(mutants_do_no_harm),
    MPT_TEST_CASE(the_nth_allocation_fails),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
