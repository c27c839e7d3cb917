/* test_base.c - >>base: half precision, random numbers, checksums, JSON, threads, errors */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "mpt_test.h"

/* Every binary16 value survives the way to FP32 and back; NaNs stay NaNs. */
MPT_TEST(f16_round_trip_of_every_value) {
    uint32_t h;
    for (h = 0; h < 65536; h++) {
        float x = mpt_f16_to_f32((uint16_t)h);
        int is_nan = (h & 0x7c00) == 0x7c00 && (h & 0x3ff);
        uint16_t back = mpt_f32_to_f16(x);
        if (is_nan) CHECK((back & 0x7c00) == 0x7c00 && (back & 0x3ff));
        else CHECK_EQ_INT(back, h);
    }
}

/* Between two neighbours the nearer one, the even one in the middle: all 31,743 finite intervals.
   */
MPT_TEST(f16_rounds_to_nearest_even) {
    uint32_t h;
    for (h = 0; h < 0x7bff; h++) {
        double low = (double)mpt_f16_to_f32((uint16_t)h),
               high = (double)mpt_f16_to_f32((uint16_t)(h + 1));
        float middle = (float)((low + high) / 2); /* exact: one bit more than binary16 */
        uint32_t bits = mpti_f32_bits(middle);
        CHECK_EQ_INT(mpt_f32_to_f16(middle), h & 1 ? h + 1 : h);
        CHECK_EQ_INT(mpt_f32_to_f16(mpti_f32_from_bits(bits + 1)), h + 1);
        CHECK_EQ_INT(mpt_f32_to_f16(mpti_f32_from_bits(bits - 1)), h);
        CHECK_EQ_INT(mpt_f32_to_f16(-middle), 0x8000u | (h & 1 ? h + 1 : h));
    }
}

MPT_TEST(f16_edges) {
    CHECK_EQ_INT(mpt_f32_to_f16(65504.0f), 0x7bff);
    CHECK_EQ_INT(mpt_f32_to_f16(65519.99f), 0x7bff);
    CHECK_EQ_INT(mpt_f32_to_f16(65520.0f), 0x7c00); /* halfway to 65536: to even, infinity */
    CHECK_EQ_INT(mpt_f32_to_f16(-1e30f), 0xfc00);
    CHECK_EQ_INT(mpt_f32_to_f16(5.9604645e-8f), 0x0001); /* 2^-24 */
    CHECK_EQ_INT(mpt_f32_to_f16(2.9802322e-8f), 0x0000); /* 2^-25: to even, zero */
    CHECK_EQ_INT(mpt_f32_to_f16(2.9802326e-8f), 0x0001); /* one step above */
    CHECK_EQ_INT(mpt_f32_to_f16(6.1035156e-5f), 0x0400); /* 2^-14, the smallest normal */
    CHECK_EQ_INT(mpt_f32_to_f16(-0.0f), 0x8000);
    CHECK_EQ_INT(mpti_f32_bits(mpt_f16_to_f32(0x0001)), 0x33800000);
}

MPT_TEST(bf16_round_trip_and_rounding) {
    uint32_t h;
    for (h = 0; h < 65536; h++) {
        int is_nan = (h & 0x7f80) == 0x7f80 && (h & 0x7f);
        uint16_t back = mpt_f32_to_bf16(mpt_bf16_to_f32((uint16_t)h));
        if (is_nan) CHECK((back & 0x7f80) == 0x7f80 && (back & 0x7f));
        else CHECK_EQ_INT(back, h);
    }
    CHECK_EQ_INT(mpt_f32_to_bf16(mpti_f32_from_bits(0x3f808000)), 0x3f80); /* a tie: to even */
    CHECK_EQ_INT(mpt_f32_to_bf16(mpti_f32_from_bits(0x3f818000)), 0x3f82);
    CHECK_EQ_INT(mpt_f32_to_bf16(mpti_f32_from_bits(0x3f808001)), 0x3f81);
    /* rounds up to infinity */
    CHECK_EQ_INT(mpt_f32_to_bf16(mpti_f32_from_bits(0x7f7fffff)), 0x7f80);
}

/* Known answers of Random123's kat_vectors for philox4x32-10. */
MPT_TEST(philox_known_answers) {
    static const uint32_t zero[4] = {0, 0, 0, 0}, ones[4] = {~0u, ~0u, ~0u, ~0u};
    static const uint32_t pi[4] = {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344};
    static const uint32_t zero_out[4] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
    static const uint32_t ones_out[4] = {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd};
    static const uint32_t pi_out[4] = {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1};
    uint32_t out[4];
    mpti_philox(zero, 0, out);
    CHECK_EQ_MEM(out, zero_out, sizeof out);
    mpti_philox(ones, ~(uint64_t)0, out);
    CHECK_EQ_MEM(out, ones_out, sizeof out);
    mpti_philox(pi, (uint64_t)0x299f31d0 << 32 | 0xa4093822, out);
    CHECK_EQ_MEM(out, pi_out, sizeof out);
}

/* Which part of the key an argument reaches: each changes all four numbers. */
MPT_TEST(random_numbers_depend_on_every_argument) {
    uint32_t a[4], b[4];
    int which, i;
    mpti_random4(1, 2, 3, 4, MPTI_RANDOM_AUGMENT, a);
    for (which = 0; which < 6; which++) {
        mpti_random4(which == 0 ? 9 : 1, which == 1 ? 9 : 2,
                     which == 2   ? 9
                     : which == 3 ? 3 + ((uint64_t)1 << 40)
                                  : 3,
                     which == 4 ? 9 : 4, which == 5 ? MPTI_RANDOM_SHUFFLE : MPTI_RANDOM_AUGMENT, b);
        for (i = 0; i < 4; i++) CHECK(a[i] != b[i]);
    }
}

MPT_TEST(bounded_numbers_are_even) {
    int hits[7] = {0}, i, k;
    for (i = 0; i < 7000; i++) {
        uint32_t r[4];
        mpti_random4(5, 0, (uint64_t)i, 0, MPTI_RANDOM_SHUFFLE, r);
        for (k = 0; k < 4; k++) hits[mpti_below(r[k], 7)]++;
    }
    /* 4000 expected each, standard deviation 59: 5 of them; fixed by the seed */
    for (i = 0; i < 7; i++) CHECK(hits[i] > 3705 && hits[i] < 4295);
}

MPT_TEST(crc32_known_answers) {
    CHECK_EQ_INT(mpt_crc32(0, "123456789", 9), 0xcbf43926);
    CHECK_EQ_INT(mpt_crc32(0, "", 0), 0);
    CHECK_EQ_INT(mpt_crc32(mpt_crc32(0, "1234", 4), "56789", 5), 0xcbf43926);
    CHECK_EQ_INT(mpt_crc32(0, "IEND", 4), 0xae426082); /* the chunk that ends every PNG */
}

/* ---- JSON ---------------------------------------------------------------------------------------
   */
static mpti_json json_of(const char *text) {
    mpti_json j;
    memset(&j, 0, sizeof j);
    j.p = text;
    j.end = text + strlen(text);
    return j;
}

/* A whole document, nothing behind it? */
static int json_is_valid(const char *text) {
    mpti_json j = json_of(text);
    mpti_json_skip(&j);
    return !j.bad && mpti_json_peek(&j) == -1 && j.p == j.end;
}

MPT_TEST(json_walk) {
    mpti_json j = json_of("{ \"a\" : [1, \"22\", -3], \"b\\u00e9\\ud83d\\ude00\": {\"x\": [[], "
                          "{}]}, \"c\": \"t\\n\\\"\" }");
    char key[16], text[8];
    int64_t v, sum = 0;
    int items = 0;
    CHECK(mpti_json_object(&j));
    CHECK(mpti_json_key(&j, key, sizeof key));
    CHECK_EQ_STR(key, "a");
    CHECK(mpti_json_array(&j));
    while (mpti_json_item(&j)) {
        CHECK(mpti_json_int64(&j, &v));
        sum += v;
        items++;
    }
    CHECK_EQ_INT(items, 3);
    CHECK_EQ_INT(sum, 20);
    CHECK(mpti_json_key(&j, key, sizeof key));
    CHECK_EQ_STR(key, "b\xc3\xa9\xf0\x9f\x98\x80");
    mpti_json_skip(&j);
    CHECK(mpti_json_key(&j, key, sizeof key));
    CHECK(mpti_json_string(&j, text, sizeof text));
    CHECK_EQ_STR(text, "t\n\"");
    CHECK(!mpti_json_key(&j, key, sizeof key));
    CHECK(!j.bad);
}

MPT_TEST(json_refuses_what_is_no_json) {
    static const char *const good[] = {"{}",           "[]",    "[1,2]", "{\"a\":null,\"b\":true}",
                                       " [ -1.5e3 ] ", "\"x\"", "0"};
    static const char *const bad[] = {"",           "{",          "}",           "[1,]",
                                      "[,1]",       "{\"a\"}",    "{\"a\":}",    "{a:1}",
                                      "[1 2]",      "\"\\x\"",    "\"\\ud800\"", "\"unfinished",
                                      "tru",        "{\"a\":1,}", "[1]]",        "\"\x01\"",
                                      "\"\\u12g4\""};
    char deep[400];
    mpti_json j;
    int64_t v;
    size_t i, k;
    for (i = 0; i < sizeof good / sizeof good[0]; i++) CHECK(json_is_valid(good[i]));
    for (i = 0; i < sizeof bad / sizeof bad[0]; i++) CHECK(!json_is_valid(bad[i]));
    memset(deep, '[', 200);
    memset(deep + 200, ']', 200);
    deep[399] = 0;
    CHECK(!json_is_valid(deep));            /* depth is limited */
    for (k = 0; k < strlen(good[3]); k++) { /* each cut of a document */
        char part[64];
        memcpy(part, good[3], k);
        part[k] = 0;
        CHECK(!json_is_valid(part));
    }
    j = json_of("9223372036854775808");
    CHECK(!mpti_json_int64(&j, &v));
}

/* ---- threads ------------------------------------------------------------------------------------
   */
typedef struct work {
    int64_t hits[1000];
    int64_t fail_from;
} work;

static mpt_result mark_chunk(int64_t chunk, void *user) {
    work *w = (work *)user;
    w->hits[chunk]++;
    return w->fail_from >= 0 && chunk >= w->fail_from ? MPT_ERR_INTERNAL : MPT_OK;
}

MPT_TEST(parallel_for_runs_each_chunk_once) {
    static const int threads[4] = {1, 2, 5, 16};
    static work w;
    int t, round, i;
    for (t = 0; t < 4; t++) {
        mpt_ctx_desc d;
        mpt_ctx *ctx = NULL;
        memset(&d, 0, sizeof d);
        d.num_threads = threads[t];
        CHECK_OK(NULL, mpt_ctx_create(&d, &ctx));
        for (round = 0; round < 200; round++) {
            int n = round * 5;
            memset(&w, 0, sizeof w);
            w.fail_from = -1;
            CHECK_OK(ctx, mpt_parallel_for(ctx, n, mark_chunk, &w));
            for (i = 0; i < 1000; i++) CHECK_EQ_INT(w.hits[i], i < n);
        }
        w.fail_from = 10;
        CHECK_EQ_INT(mpt_parallel_for(ctx, 1000, mark_chunk, &w), MPT_ERR_INTERNAL);
        CHECK_EQ_INT(w.hits[999], 0); /* what had not begun was left out */
        CHECK_RESULT(ctx, mpt_parallel_for(ctx, -1, mark_chunk, &w), MPT_ERR_INVALID_ARGUMENT);
        mpt_ctx_destroy(ctx);
    }
}

MPT_TEST(a_pool_without_memory_is_an_error) {
    int64_t n;
    for (n = 1; n < 6; n++) {
        static work w;
        mpt_test_allocator memory;
        mpt_ctx_desc d;
        mpt_ctx *ctx = NULL;
        mpt_result rc;
        memset(&d, 0, sizeof d);
        memset(&w, 0, sizeof w);
        w.fail_from = -1;
        mpt_test_allocator_init(&memory, n, 0);
        d.allocator = memory.hooks;
        d.num_threads = 3;
        rc = mpt_ctx_create(&d, &ctx);
        if (rc == MPT_OK) rc = mpt_parallel_for(ctx, 10, mark_chunk, &w);
        CHECK_EQ_INT(rc, memory.has_failed ? MPT_ERR_OUT_OF_MEMORY : MPT_OK);
        mpt_ctx_destroy(ctx);
        CHECK_NO_LEAK(&memory);
    }
}

/* ---- errors and contexts ------------------------------------------------------------------------
   */
MPT_TEST(messages_are_clean_and_cut_between_characters) {
    mpt_error err;
    char name[1024];
    size_t n;
    CHECK_EQ_INT(MPTI_FAIL(&err, MPT_ERR_IO, "bad\n\x1b[31mname\x7f"), MPT_ERR_IO);
    CHECK_EQ_STR(err.message, "bad??[31mname?");
    for (n = 0; n + 2 < sizeof name; n += 2) memcpy(name + n, "\xc3\xa9", 2);
    name[n] = 0;
    CHECK_EQ_INT(MPTI_FAIL(&err, MPT_ERR_IO, "x%s", name), MPT_ERR_IO);
    n = strlen(err.message);
    CHECK(n % 2 == 1 && n > 500); /* x and whole two-byte characters */
    CHECK_EQ_INT(MPTI_FAIL(NULL, MPT_ERR_IO, "nobody asks"), MPT_ERR_IO);
}

MPT_TEST(result_strings_are_all_there) {
    int r;
    for (r = -11; r <= 1; r++)
        CHECK(strcmp(mpt_result_string((mpt_result)r), "unknown result") != 0);
    CHECK_EQ_STR(mpt_result_string((mpt_result)-99), "unknown result");
    CHECK_EQ_STR(mpt_version(), "0.1.0");
    CHECK_CONTAINS(mpt_build_info(), "mptrain 0.1.0");
}

MPT_TEST(contexts_refuse_nonsense) {
    mpt_ctx_desc d;
    mpt_ctx *ctx = NULL;
    memset(&d, 0, sizeof d);
    d.num_threads = -1;
    CHECK_EQ_INT(mpt_ctx_create(&d, &ctx), MPT_ERR_INVALID_ARGUMENT);
    CHECK(ctx == NULL);
    d.num_threads = 0;
    d.allocator.alloc = mpt_test_alloc; /* one hook without the other */
    CHECK_EQ_INT(mpt_ctx_create(&d, &ctx), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_ctx_create(NULL, NULL), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_STR(mpt_last_error(NULL)->message, "no context");
    mpt_ctx_destroy(NULL);
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(f16_round_trip_of_every_value),
    MPT_TEST_CASE(f16_rounds_to_nearest_even),
    MPT_TEST_CASE(f16_edges),
    MPT_TEST_CASE(bf16_round_trip_and_rounding),
    MPT_TEST_CASE(philox_known_answers),
    MPT_TEST_CASE(random_numbers_depend_on_every_argument),
    MPT_TEST_CASE(bounded_numbers_are_even),
    MPT_TEST_CASE(crc32_known_answers),
    MPT_TEST_CASE(json_walk),
    MPT_TEST_CASE(json_refuses_what_is_no_json),
    MPT_TEST_CASE(parallel_for_runs_each_chunk_once),
    MPT_TEST_CASE(a_pool_without_memory_is_an_error),
    MPT_TEST_CASE(messages_are_clean_and_cut_between_characters),
    MPT_TEST_CASE(result_strings_are_all_there),
    MPT_TEST_CASE(contexts_refuse_nonsense),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
