/* test_tensor.c - >>tensor: arenas. Memory is taken once, handed out aligned and zeroed, given back
   from the end. Case O-46 (what was handed out in pieces is whole again after the release). */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "mpt_test.h"

static mpt_ctx *new_ctx(const mpt_test_allocator *memory) {
    mpt_ctx *ctx = NULL;
    mpt_ctx_desc d;
    memset(&d, 0, sizeof d);
    if (memory) d.allocator = memory->hooks;
    CHECK_OK(NULL, mpt_ctx_create(&d, &ctx));
    return ctx;
}

static mpt_arena *new_arena(mpt_ctx *ctx, size_t capacity, size_t alignment) {
    mpt_arena *a = NULL;
    mpt_arena_desc d;
    memset(&d, 0, sizeof d);
    d.capacity_bytes = capacity;
    d.alignment = alignment;
    d.purpose = "a test";
    CHECK_OK(ctx, mpt_arena_create(ctx, &d, &a));
    return a;
}

static int is_zero(const void *p, size_t bytes) {
    const unsigned char *b = (const unsigned char *)p;
    size_t i;
    for (i = 0; i < bytes; i++)
        if (b[i]) return 0;
    return 1;
}

MPT_TEST(tensors_are_aligned_zero_and_apart) {
    static const size_t alignments[] = {0, 1, 16, 64, 256, 4096};
    static const mpt_dtype dtypes[] = {MPT_F32, MPT_F16, MPT_BF16, MPT_U8, MPT_I32, MPT_I64};
    mpt_ctx *ctx = new_ctx(NULL);
    size_t k, d;
    for (k = 0; k < sizeof alignments / sizeof alignments[0]; k++) {
        mpt_arena *a = new_arena(ctx, 100000, alignments[k]);
        size_t align = alignments[k] ? alignments[k] : 64;
        char *end = NULL;
        for (d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
            const int64_t dims[4] = {2, 3, 1, 5};
            const size_t bytes = 30 * mpt_dtype_size(dtypes[d]);
            mpt_tensor t;
            CHECK_OK(ctx, mpt_arena_tensor(a, dtypes[d], dims, 4, &t));
            CHECK_EQ_INT((uintptr_t)t.data % align, 0);
            CHECK(!end || (char *)t.data >= end);
            CHECK(t.dtype == dtypes[d] && t.num_dims == 4);
            CHECK_EQ_MEM(t.dims, dims, sizeof dims);
            CHECK(is_zero(t.data, bytes));
            memset(t.data, 0xff, bytes);
            end = (char *)t.data + bytes;
        }
        mpt_arena_destroy(a);
    }
    mpt_ctx_destroy(ctx);
}

MPT_TEST(scalars_and_empty_tensors) {
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_arena *a = new_arena(ctx, 256, 0);
    const int64_t none[2] = {3, 0};
    mpt_tensor t;
    CHECK_OK(ctx, mpt_arena_tensor(a, MPT_I64, NULL, 0, &t));
    CHECK_EQ_INT(t.num_dims, 0);
    CHECK_EQ_INT(mpt_arena_mark(a), 8);
    CHECK_OK(ctx, mpt_arena_tensor(a, MPT_F32, none, 2, &t));
    CHECK(t.data != NULL);
    mpt_arena_destroy(a);
    mpt_ctx_destroy(ctx);
}

/* Ten tensors of 10 KB in 104 KB, and after the release 90 KB in one piece, zeros again. */
MPT_TEST(released_memory_is_whole_again) {
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_arena *a = new_arena(ctx, 104u << 10, 0);
    const int64_t tenth = 10 << 10, most = 90 << 10;
    size_t marks[10];
    mpt_tensor t;
    int i;
    for (i = 0; i < 10; i++) {
        marks[i] = mpt_arena_mark(a);
        CHECK_OK(ctx, mpt_arena_tensor(a, MPT_U8, &tenth, 1, &t));
        memset(t.data, 0xff, (size_t)tenth);
    }
    CHECK_RESULT(ctx, mpt_arena_tensor(a, MPT_U8, &tenth, 1, &t), MPT_ERR_OUT_OF_MEMORY);
    mpt_arena_release(a, marks[9]);
    mpt_arena_release(a, 1u << 30); /* a mark ahead of what was handed out takes nothing back */
    CHECK_EQ_INT(mpt_arena_mark(a), marks[9]);
    CHECK_OK(ctx, mpt_arena_tensor(a, MPT_U8, &tenth, 1, &t));
    mpt_arena_release(a, marks[0]);
    CHECK_OK(ctx, mpt_arena_tensor(a, MPT_U8, &most, 1, &t));
    CHECK(is_zero(t.data, (size_t)most));
    mpt_arena_destroy(a);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(what_does_not_fit_is_refused_by_name_and_size) {
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_arena *a = new_arena(ctx, 1000, 0);
    const int64_t some[1] = {100}, many[1] = {1000};
    const int64_t overflow[4] = {1ll << 40, 1ll << 40, 1ll << 40, 2}, negative[2] = {2, -1};
    mpt_tensor t;
    CHECK_OK(ctx, mpt_arena_tensor(a, MPT_F32, some, 1, &t));
    CHECK_RESULT(ctx, mpt_arena_tensor(a, MPT_F32, many, 1, &t), MPT_ERR_OUT_OF_MEMORY);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "a test");
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "4000");
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "1000");
    CHECK_RESULT(ctx, mpt_arena_tensor(a, MPT_F32, overflow, 4, &t), MPT_ERR_OUT_OF_MEMORY);
    CHECK_RESULT(ctx, mpt_arena_tensor(a, MPT_F32, negative, 2, &t), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "dims[1]");
    CHECK_EQ_INT(mpt_arena_mark(a), 400);
    CHECK_EQ_INT(mpt_arena_tensor(a, MPT_F32, NULL, 1, &t), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_arena_tensor(a, MPT_F32, some, 5, &t), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_arena_tensor(a, (mpt_dtype)77, some, 1, &t), MPT_ERR_INVALID_ARGUMENT);
    mpt_arena_destroy(a);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(descs_are_checked) {
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_arena *a = NULL;
    mpt_arena_desc d;
    memset(&d, 0, sizeof d);
    CHECK_RESULT(ctx, mpt_arena_create(ctx, &d, &a), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "capacity_bytes");
    d.capacity_bytes = 10;
    d.alignment = 48;
    CHECK_RESULT(ctx, mpt_arena_create(ctx, &d, &a), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "alignment");
    CHECK(a == NULL);
    mpt_arena_destroy(NULL);
    mpt_arena_release(NULL, 0);
    CHECK_EQ_INT(mpt_arena_mark(NULL), 0);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(no_memory_is_an_error) {
    mpt_arena_desc d;
    int n;
    memset(&d, 0, sizeof d);
    d.capacity_bytes = 5000;
    d.purpose = "activations";
    for (n = 1;; n++) {
        mpt_test_allocator memory;
        mpt_arena *a = NULL;
        mpt_ctx *ctx;
        mpt_result rc;
        mpt_test_allocator_init(&memory, 0, 0);
        ctx = new_ctx(&memory);
        memory.fail_at = memory.num_allocs + n;
        rc = mpt_arena_create(ctx, &d, &a);
        CHECK_EQ_INT(rc, memory.has_failed ? MPT_ERR_OUT_OF_MEMORY : MPT_OK);
        if (rc) CHECK_CONTAINS(mpt_last_error(ctx)->message, "activations");
        mpt_arena_destroy(a);
        mpt_ctx_destroy(ctx);
        CHECK_NO_LEAK(&memory);
        if (!memory.has_failed) break;
    }
    CHECK(n > 1);
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(tensors_are_aligned_zero_and_apart),
    MPT_TEST_CASE(scalars_and_empty_tensors),
    MPT_TEST_CASE(released_memory_is_whole_again),
    MPT_TEST_CASE(what_does_not_fit_is_refused_by_name_and_size),
    MPT_TEST_CASE(descs_are_checked),
    MPT_TEST_CASE(no_memory_is_an_error),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
