/* mpt_test.h - the test framework: a table of cases, CHECK macros, files, an allocator that fails

       #define MPTRAIN_IMPLEMENTATION
       #include "mptrain.h"
       #include "mpt_test.h"

       MPT_TEST(crc_of_nothing_is_zero) {
           CHECK_EQ_INT(mpt_crc32c(0, "", 0), 0);
       }

       static const mpt_test_case tests[] = {
           MPT_TEST_CASE(crc_of_nothing_is_zero),
       };
       int main(int argc, char **argv) {
           return mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
       }

   Run from the top of the repository; arguments are names of the cases to run. Each case prints one
   line: "ok NAME", "FAIL NAME file:line: what" or "SKIP NAME: reason". The last line is for
   tests/run.sh; the exit status is 0 if nothing failed, 1 if something did, 2 for a wrong name.

   A failing CHECK ends its case, by longjmp to the loop over the cases: so it works in helper
   functions too, and what the case held is leaked, as the process is about to fail anyway. On a
   thread that the case started, CHECK ends that thread, and the case fails when it returns. */
#ifndef MPT_TEST_H
#define MPT_TEST_H

#include "mptrain.h"

#include <dirent.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct mpt_test_case {
    const char *name;
    void (*run)(void);
} mpt_test_case;

#define MPT_TEST(name) static void name(void)
#define MPT_TEST_CASE(name) \
    { #name, name }

#define CHECK(cond) \
    do { \
        if (!(cond)) mpt_test_fail(__FILE__, __LINE__, "CHECK(%s)", #cond); \
    } while (0)
#define CHECK_EQ_INT(a, b) \
    mpt_test_eq_int(__FILE__, __LINE__, #a " == " #b, (long long)(a), (long long)(b))
#define CHECK_EQ_STR(a, b) mpt_test_eq_str(__FILE__, __LINE__, #a " == " #b, (a), (b))
#define CHECK_EQ_MEM(a, b, size) mpt_test_eq_mem(__FILE__, __LINE__, #a " == " #b, (a), (b), (size))
#define CHECK_CONTAINS(haystack, needle) mpt_test_contains(__FILE__, __LINE__, (haystack), (needle))
#define CHECK_NEAR(a, b, tolerance) \
    mpt_test_near(__FILE__, __LINE__, #a " near " #b, (double)(a), (double)(b), (double)(tolerance))
/* The call succeeds; if not, the context's message is shown. ctx may be NULL. */
#define CHECK_OK(ctx, call) CHECK_RESULT(ctx, call, MPT_OK)
/* The call returns just this result; if that is an error, the context has a message for it. */
#define CHECK_RESULT(ctx, call, expected) \
    mpt_test_result(__FILE__, __LINE__, #call, (call), (expected), (ctx))
#define SKIP(reason) mpt_test_skip(reason)

/* ---- failing, skipping, the loop over the cases ---------------------------------------------- */
typedef struct mpt_test_state {
    pthread_mutex_t lock; /* guards failure: any thread of a case may be the first to fail */
    pthread_t thread;     /* the one that may jump */
    jmp_buf end_of_case;
    char failure[2048]; /* "file:line: what" of the first failure in this case, or "" */
    const char *skipped;
    pid_t tmpdir_owner;
    char tmpdir[512];
} mpt_test_state;
static mpt_test_state mpt_test_now;

__attribute__((noreturn)) static inline void mpt_test_end_case(void) {
    if (pthread_equal(pthread_self(), mpt_test_now.thread)) longjmp(mpt_test_now.end_of_case, 1);
    pthread_exit(NULL);
}

__attribute__((noreturn, format(printf, 3, 4))) static inline void
mpt_test_fail(const char *file, int line, const char *format, ...) {
    char *text = mpt_test_now.failure;
    size_t size = sizeof(mpt_test_now.failure), used;
    va_list args;
    pthread_mutex_lock(&mpt_test_now.lock);
    if (!text[0]) {
        used = (size_t)snprintf(text, size, "%s:%d: ", file, line);
        va_start(args, format);
        vsnprintf(text + used, size - used, format, args);
        va_end(args);
    }
    pthread_mutex_unlock(&mpt_test_now.lock);
    mpt_test_end_case();
}

static inline void mpt_test_skip(const char *reason) {
    mpt_test_now.skipped = reason;
    mpt_test_end_case();
}

static inline void mpt_test_run_case(const mpt_test_case *test) {
    mpt_test_now.failure[0] = 0;
    mpt_test_now.skipped = NULL;
    printf("# run %s\n", test->name);
    if (!setjmp(mpt_test_now.end_of_case)) test->run();
    if (mpt_test_now.failure[0]) printf("FAIL %s %s\n", test->name, mpt_test_now.failure);
    else if (mpt_test_now.skipped) printf("SKIP %s: %s\n", test->name, mpt_test_now.skipped);
    else printf("ok %s\n", test->name);
}

/* Every argument names a case? */
static inline int mpt_test_names_known(int argc, char **argv, const mpt_test_case *tests,
                                       size_t n) {
    int a, known = 1;
    for (a = 1; a < argc; a++) {
        size_t i = 0;
        while (i < n && strcmp(argv[a], tests[i].name)) i++;
        if (i < n) continue;
        fprintf(stderr, "%s: there is no case %s; there are:", argv[0], argv[a]);
        for (i = 0; i < n; i++) fprintf(stderr, " %s", tests[i].name);
        fprintf(stderr, "\n");
        known = 0;
    }
    return known;
}

static inline int mpt_test_main(int argc, char **argv, const mpt_test_case *tests, size_t n) {
    int passed = 0, failed = 0, skipped = 0;
    size_t i;
    if (!mpt_test_names_known(argc, argv, tests, n)) return 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    pthread_mutex_init(&mpt_test_now.lock, NULL);
    mpt_test_now.thread = pthread_self();
    for (i = 0; i < n; i++) {
        int a = 1;
        while (a < argc && strcmp(argv[a], tests[i].name)) a++;
        if (argc > 1 && a == argc) continue;
        mpt_test_run_case(&tests[i]);
        if (mpt_test_now.failure[0]) failed++;
        else if (mpt_test_now.skipped) skipped++;
        else passed++;
    }
    printf("# totals %d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed != 0;
}

/* Long loops (ten thousand mutants and the like) belong behind this: `make test-full` sets it. */
static inline int mpt_test_full(void) {
    const char *full = getenv("MPT_TEST_FULL");
    return full && full[0] && strcmp(full, "0");
}

/* ---- what the CHECK macros call -------------------------------------------------------------- */
static inline void mpt_test_eq_int(const char *file, int line, const char *what, long long a,
                                   long long b) {
    if (a != b) mpt_test_fail(file, line, "%s: %lld is not %lld", what, a, b);
}

static inline void mpt_test_eq_str(const char *file, int line, const char *what, const char *a,
                                   const char *b) {
    int same = a && b ? !strcmp(a, b) : a == b;
    if (!same)
        mpt_test_fail(file, line, "%s: \"%s\" is not \"%s\"", what, a ? a : "(null)",
                      b ? b : "(null)");
}

static inline void mpt_test_eq_mem(const char *file, int line, const char *what, const void *a,
                                   const void *b, size_t size) {
    const unsigned char *x = (const unsigned char *)a, *y = (const unsigned char *)b;
    size_t i;
    for (i = 0; i < size; i++)
        if (x[i] != y[i])
            mpt_test_fail(file, line, "%s: byte %zu of %zu is 0x%02x, not 0x%02x", what, i, size,
                          x[i], y[i]);
}

static inline void mpt_test_contains(const char *file, int line, const char *haystack,
                                     const char *needle) {
    if (!haystack || !strstr(haystack, needle))
        mpt_test_fail(file, line, "\"%s\" does not contain \"%s\"", haystack ? haystack : "(null)",
                      needle);
}

/* Written so that a NaN on either side fails. */
static inline void mpt_test_near(const char *file, int line, const char *what, double a, double b,
                                 double tolerance) {
    if (!(fabs(a - b) <= tolerance))
        mpt_test_fail(file, line, "%s: %.9g and %.9g differ by %.3g, more than %.3g", what, a, b,
                      fabs(a - b), tolerance);
}

static inline void mpt_test_result(const char *file, int line, const char *what, mpt_result got,
                                   mpt_result expected, const mpt_ctx *ctx) {
    const char *message = ctx ? mpt_last_error(ctx)->message : "no context";
    if (got != expected)
        mpt_test_fail(file, line, "%s: %s (%d), expected %s (%d): %s", what, mpt_result_string(got),
                      (int)got, mpt_result_string(expected), (int)expected, got < 0 ? message : "");
    if (got < 0 && ctx && mpt_last_error(ctx)->code != got)
        mpt_test_fail(file, line, "%s: the last error has another code: %s", what, message);
    if (got < 0 && ctx && !message[0]) mpt_test_fail(file, line, "%s: no message", what);
}

/* ---- paths and files ----------------------------------------------------------------------------
   Paths live in eight static buffers used in turn: copy what must last. */
static inline const char *mpt_test_join(const char *directory, const char *name) {
    static char paths[8][1024];
    static int turn;
    char *path = paths[turn++ % 8];
    if ((size_t)snprintf(path, sizeof(paths[0]), "%s/%s", directory, name) >= sizeof(paths[0]))
        mpt_test_fail(__FILE__, __LINE__, "path too long: %s/%s", directory, name);
    return path;
}

static inline const char *mpt_test_variable(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && value[0] ? value : otherwise;
}

/* A fixture: tests/data/NAME, or below $MPT_TEST_DATA. */
static inline const char *mpt_test_data(const char *name) {
    return mpt_test_join(mpt_test_variable("MPT_TEST_DATA", "tests/data"), name);
}

/* A program of this build: build/NAME, or build/asan/NAME when the tests are built so. */
static inline const char *mpt_test_program(const char *name) {
    return mpt_test_join(mpt_test_variable("MPT_TEST_BUILD", "build"), name);
}

static inline void mpt_test_remove_tree(const char *path) {
    char below[1024];
    struct dirent *entry;
    DIR *directory;
    struct stat info;
    if (lstat(path, &info) || !S_ISDIR(info.st_mode) || !(directory = opendir(path))) {
        unlink(path);
        return;
    }
    while ((entry = readdir(directory)) != NULL) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if ((size_t)snprintf(below, sizeof(below), "%s/%s", path, entry->d_name) < sizeof(below))
            mpt_test_remove_tree(below);
    }
    closedir(directory);
    rmdir(path);
}

/* At exit; a forked child shares the directory and must leave it alone. */
static inline void mpt_test_remove_tmpdir(void) {
    if (mpt_test_now.tmpdir_owner == getpid()) mpt_test_remove_tree(mpt_test_now.tmpdir);
}

/* One directory per process below $TMPDIR, removed at exit with all that is in it. */
static inline const char *mpt_test_tmpdir(void) {
    char *path = mpt_test_now.tmpdir;
    if (path[0]) return path;
    snprintf(path, sizeof(mpt_test_now.tmpdir), "%s/mptrain-test-XXXXXX",
             mpt_test_variable("TMPDIR", "/tmp"));
    if (!mkdtemp(path)) mpt_test_fail(__FILE__, __LINE__, "can't make directory %s", path);
    mpt_test_now.tmpdir_owner = getpid();
    atexit(mpt_test_remove_tmpdir);
    return path;
}

static inline const char *mpt_test_tmpfile(const char *name) {
    return mpt_test_join(mpt_test_tmpdir(), name);
}

/* The whole file with a zero byte behind it; the caller frees it. */
static inline unsigned char *mpt_test_read_file(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    unsigned char *bytes = NULL;
    long end = -1;
    if (file && !fseek(file, 0, SEEK_END)) end = ftell(file);
    if (end >= 0) bytes = (unsigned char *)malloc((size_t)end + 1);
    if (bytes) {
        rewind(file);
        *size = fread(bytes, 1, (size_t)end, file);
        bytes[*size] = 0;
    }
    if (file) fclose(file);
    if (!bytes || *size != (size_t)end) mpt_test_fail(__FILE__, __LINE__, "can't read %s", path);
    return bytes;
}

static inline void mpt_test_write_file(const char *path, const void *data, size_t size) {
    FILE *file = fopen(path, "wb");
    size_t written = file ? fwrite(data, 1, size, file) : 0;
    if (!file || fclose(file) || written != size)
        mpt_test_fail(__FILE__, __LINE__, "can't write %s", path);
}

/* ---- an allocator that counts, checks, and fails when told to -----------------------------------

       mpt_test_allocator memory;
       mpt_ctx_desc desc;
       mpt_test_allocator_init(&memory, n, 0);     the n-th allocation fails; n = 0: none
       memset(&desc, 0, sizeof(desc));
       desc.allocator = memory.hooks;
       ... create, use, destroy ...
       CHECK_NO_LEAK(&memory);                     nor a wrong size, nor a stray free
       if (!memory.has_failed) break;              n is past the last one: every one was tried

   A block is filled with 0xA5 when given out and 0xDD when taken back. It ends where malloc's block
   ends, so that AddressSanitizer sees the first byte beyond it. */
typedef struct mpt_test_allocator {
    mpt_allocator hooks;
    pthread_mutex_t lock;
    int64_t num_allocs;  /* asked for so far */
    int64_t fail_at;     /* this one fails, from 1; 0: none */
    int fail_from_there; /* 1: and every later one */
    int has_failed;
    int64_t live_blocks, live_bytes, peak_bytes;
    char misuse[256]; /* the first wrong free, or "" */
} mpt_test_allocator;

typedef struct mpt_test_block { /* just before each block */
    void *base;                 /* what malloc gave */
    size_t size;
    mpt_test_allocator *owner; /* NULL once freed */
} mpt_test_block;

/* Room for the block's record in front of it that keeps the block aligned. */
static inline size_t mpt_test_block_offset(size_t align) {
    return (sizeof(mpt_test_block) + align - 1) / align * align;
}

static inline void *mpt_test_alloc(size_t size, size_t align, void *user) {
    mpt_test_allocator *a = (mpt_test_allocator *)user;
    size_t at_least = align < 16 ? 16 : align, offset = mpt_test_block_offset(at_least);
    mpt_test_block block;
    void *base = NULL;
    int fails;
    pthread_mutex_lock(&a->lock);
    a->num_allocs++;
    fails = a->fail_at &&
            (a->fail_from_there ? a->num_allocs >= a->fail_at : a->num_allocs == a->fail_at);
    a->has_failed |= fails;
    if (!fails && size <= SIZE_MAX - offset && !posix_memalign(&base, at_least, offset + size)) {
        a->live_blocks++;
        a->live_bytes += (int64_t)size;
        if (a->live_bytes > a->peak_bytes) a->peak_bytes = a->live_bytes;
    }
    pthread_mutex_unlock(&a->lock);
    if (fails || !base) return NULL;
    block.base = base;
    block.size = size;
    block.owner = a;
    memset(base, 0xA5, offset + size);
    memcpy((char *)base + offset - sizeof(block), &block, sizeof(block));
    return (char *)base + offset;
}

static inline void mpt_test_free(void *p, size_t size, void *user) {
    mpt_test_allocator *a = (mpt_test_allocator *)user;
    mpt_test_block block;
    const char *fault = NULL;
    if (!p) return;
    memcpy(&block, (char *)p - sizeof(block), sizeof(block));
    if (block.owner != a) fault = "a pointer that is not a live block of this allocator";
    else if (block.size != size) fault = "a size other than it was allocated with";
    pthread_mutex_lock(&a->lock);
    if (fault && !a->misuse[0])
        snprintf(a->misuse, sizeof(a->misuse), "free(%p, %zu) got %s (%zu)", p, size, fault,
                 block.owner == a ? block.size : (size_t)0);
    if (block.owner == a) {
        a->live_blocks--;
        a->live_bytes -= (int64_t)block.size;
    }
    pthread_mutex_unlock(&a->lock);
    if (block.owner != a) return;
    memset(block.base, 0xDD, (size_t)((char *)p - (char *)block.base) + block.size);
    free(block.base);
}

static inline void mpt_test_allocator_init(mpt_test_allocator *a, int64_t fail_at,
                                           int fail_from_there) {
    memset(a, 0, sizeof(*a));
    pthread_mutex_init(&a->lock, NULL);
    a->fail_at = fail_at;
    a->fail_from_there = fail_from_there;
    a->hooks.alloc = mpt_test_alloc;
    a->hooks.free = mpt_test_free;
    a->hooks.user = a;
}

static inline void mpt_test_no_leak(const char *file, int line, mpt_test_allocator *a) {
    if (a->misuse[0]) mpt_test_fail(file, line, "%s", a->misuse);
    if (a->live_blocks)
        mpt_test_fail(file, line, "leak: %lld blocks, %lld bytes (allocation %lld failed)",
                      (long long)a->live_blocks, (long long)a->live_bytes,
                      (long long)(a->has_failed ? a->fail_at : 0));
}
#define CHECK_NO_LEAK(allocator) mpt_test_no_leak(__FILE__, __LINE__, (allocator))

#endif /* MPT_TEST_H */
