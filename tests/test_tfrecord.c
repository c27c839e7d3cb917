/* test_tfrecord.c - >>storage >>tfrecord: CRC-32C, storage, framing, compression, index, writer

   Damage is done to small files in every place where it can be done, and storage is a table in
   memory (shim) whose reads and writes come short, late, or not at all. */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "mpt_test.h"

#include <signal.h>
#include <sys/wait.h>

static bool is_full(void) {
    return getenv("MPT_TEST_FULL") != NULL;
}

static uint32_t random_state = 1;

static uint32_t next_random(void) { /* xorshift32 (Marsaglia 2003) */
    random_state ^= random_state << 13;
    random_state ^= random_state >> 17;
    random_state ^= random_state << 5;
    return random_state;
}

static void random_bytes(uint8_t *dst, size_t n) {
    size_t i;
    for (i = 0; i < n; i++) dst[i] = (uint8_t)(next_random() >> 11);
}

static mpt_bytes bytes_of(const void *data, size_t size) {
    mpt_bytes b;
    b.data = (const uint8_t *)data;
    b.size = size;
    return b;
}

static mpt_ctx *new_ctx(mpt_test_allocator *memory) { /* memory may be NULL */
    mpt_ctx_desc desc;
    mpt_ctx *ctx = NULL;
    memset(&desc, 0, sizeof desc);
    desc.num_threads = 1;
    if (memory) desc.allocator = memory->hooks;
    return mpt_ctx_create(&desc, &ctx) == MPT_OK ? ctx : NULL;
}

/* ---- the shim: files in memory, with faults ------------------------------------------------- */
enum { SHIM_FILES = 4 };

typedef struct shim_file {
    char name[256]; /* "": free */
    uint8_t *data;
    size_t size;
} shim_file;

static struct shim {
    shim_file files[SHIM_FILES];
    /* faults; all zero: none */
    int short_reads;    /* 1 .. 7 bytes a read */
    int eintr_every;    /* each such read is interrupted first */
    int64_t fail_read;  /* the n-th read fails, from 1 ... */
    int64_t fail_reads; /* ... and so many behind it */
    int read_errno;
    int open_failures; /* so many opens fail first with EIO */
    int size_is_unknown;
    int64_t space; /* bytes that can be written; -1: any number */
    int short_writes, fail_sync, fail_close, fail_rename;
    /* what happened */
    int64_t num_reads, num_bytes_read, num_seeks;
    int num_open;
} shim;

typedef struct shim_handle {
    int file;
    size_t offset;
    bool writing;
    char reason[64];
} shim_handle;

static int shim_find(const char *name) {
    int i;
    for (i = 0; i < SHIM_FILES; i++)
        if (!strcmp(shim.files[i].name, name)) return i;
    return -1;
}

static void shim_drop(int i) {
    free(shim.files[i].data);
    memset(&shim.files[i], 0, sizeof shim.files[i]);
}

static void shim_reset(void) {
    int i;
    for (i = 0; i < SHIM_FILES; i++) shim_drop(i);
    memset(&shim, 0, sizeof shim);
    shim.space = -1;
}

static void shim_put(const char *name, const void *data, size_t size) {
    int i = shim_find(name);
    if (i < 0) i = shim_find("");
    CHECK(i >= 0);
    shim_drop(i);
    snprintf(shim.files[i].name, sizeof shim.files[i].name, "%s", name);
    shim.files[i].data = (uint8_t *)malloc(size + 1); /* ASan sees a read behind it */
    if (size) memcpy(shim.files[i].data, data, size);
    shim.files[i].size = size;
}

static mpt_result shim_handle_new(int file, bool writing, void **out) {
    shim_handle *h = (shim_handle *)calloc(1, sizeof *h);
    h->file = file;
    h->writing = writing;
    shim.num_open++;
    *out = h;
    return MPT_OK;
}

static mpt_result shim_open(const char *path, void **file, void *user) {
    int i = shim_find(path);
    (void)user;
    if (shim.open_failures > 0) {
        shim.open_failures--;
        errno = EIO;
        return MPT_ERR_IO;
    }
    if (i < 0) {
        errno = ENOENT;
        return MPT_ERR_IO;
    }
    return shim_handle_new(i, false, file);
}

static int64_t shim_read(void *file, void *dst, size_t size) {
    shim_handle *h = (shim_handle *)file;
    shim_file *f = &shim.files[h->file];
    int64_t turn = ++shim.num_reads;
    if (shim.fail_read && turn >= shim.fail_read && turn - shim.fail_read <= shim.fail_reads) {
        memset(dst, 0x5a, size < 3 ? size : 3); /* a failed read may leave anything */
        errno = shim.read_errno;
        return -1;
    }
    if (shim.eintr_every && turn % shim.eintr_every == 0) {
        errno = EINTR;
        return -1;
    }
    if (shim.short_reads) size = size < (size_t)(turn % 7 + 1) ? size : (size_t)(turn % 7 + 1);
    if (h->offset >= f->size) return 0;
    if (size > f->size - h->offset) size = f->size - h->offset;
    memcpy(dst, f->data + h->offset, size);
    h->offset += size;
    shim.num_bytes_read += (int64_t)size;
    return (int64_t)size;
}

static int64_t shim_size(void *file) {
    return shim.size_is_unknown ? -1 : (int64_t)shim.files[((shim_handle *)file)->file].size;
}

static mpt_result shim_seek(void *file, uint64_t offset) {
    shim.num_seeks++;
    ((shim_handle *)file)->offset = (size_t)offset;
    return MPT_OK;
}

static mpt_result shim_close(void *file) {
    bool fails = ((shim_handle *)file)->writing && shim.fail_close;
    free(file);
    shim.num_open--;
    if (!fails) return MPT_OK;
    errno = EIO;
    return MPT_ERR_IO;
}

static const char *shim_error(void *file) {
    shim_handle *h = (shim_handle *)file;
    snprintf(h->reason, sizeof h->reason, "the shim says %d", errno);
    return h->reason;
}

static mpt_result shim_create(const char *path, void **file, void *user) {
    (void)user;
    if (shim_find(path) >= 0) {
        errno = EEXIST;
        return MPT_ERR_IO;
    }
    shim_put(path, NULL, 0);
    return shim_handle_new(shim_find(path), true, file);
}

static int64_t shim_write(void *file, const void *src, size_t size) {
    shim_file *f = &shim.files[((shim_handle *)file)->file];
    if (shim.short_writes && size > 5) size = 5;
    if (shim.space >= 0 && (int64_t)size > shim.space) size = (size_t)shim.space;
    if (size == 0) {
        errno = ENOSPC;
        return -1;
    }
    if (shim.space >= 0) shim.space -= (int64_t)size;
    f->data = (uint8_t *)realloc(f->data, f->size + size);
    memcpy(f->data + f->size, src, size);
    f->size += size;
    return (int64_t)size;
}

static mpt_result shim_sync(void *file) {
    (void)file;
    errno = EIO;
    return shim.fail_sync ? MPT_ERR_IO : MPT_OK;
}

static mpt_result shim_rename(const char *from, const char *to, void *user) {
    int i;
    (void)user;
    errno = EACCES;
    if (shim.fail_rename) return MPT_ERR_IO;
    i = shim_find(to);
    if (i >= 0) shim_drop(i);
    snprintf(shim.files[shim_find(from)].name, 256, "%s", to);
    return MPT_OK;
}

static mpt_result shim_remove(const char *path, void *user) {
    (void)user;
    shim_drop(shim_find(path));
    return MPT_OK;
}

static int shim_num_files(void) {
    int i, n = 0;
    for (i = 0; i < SHIM_FILES; i++) n += shim.files[i].name[0] != 0;
    return n;
}

static mpt_io shim_io(void) {
    mpt_io io;
    memset(&io, 0, sizeof io);
    io.open = shim_open;
    io.read = shim_read;
    io.size = shim_size;
    io.seek = shim_seek;
    io.close = shim_close;
    io.error = shim_error;
    io.create = shim_create;
    io.write = shim_write;
    io.sync = shim_sync;
    io.rename = shim_rename;
    io.remove = shim_remove;
    return io;
}

/* ---- records to write and to compare with --------------------------------------------------- */
enum { MAX_RECORDS = 8 };

static const size_t some_sizes[] = {3, 0, 40, 1, 17};
enum { NUM_SOME = 5 };

static uint8_t *some_payload(int i) { /* of some_sizes[i] bytes, always the same */
    static uint8_t payloads[NUM_SOME][64];
    size_t k;
    for (k = 0; k < some_sizes[i]; k++) payloads[i][k] = (uint8_t)(37 * i + 11 * (int)k + 5);
    return payloads[i];
}

static mpt_result write_some(mpt_ctx *ctx, const mpt_io *io, const char *path,
                             mpt_compression kind) {
    mpt_tfrecord_writer_desc desc;
    mpt_tfrecord_writer *w = NULL;
    mpt_result rc;
    int i;
    memset(&desc, 0, sizeof desc);
    desc.path = path;
    desc.io = io;
    desc.compression = kind;
    rc = mpt_tfrecord_writer_open(ctx, &desc, &w);
    for (i = 0; i < NUM_SOME && rc == MPT_OK; i++)
        rc = mpt_tfrecord_writer_write(w, bytes_of(some_payload(i), some_sizes[i]));
    if (rc == MPT_OK) rc = mpt_tfrecord_writer_finish(w);
    mpt_tfrecord_writer_close(w);
    return rc;
}

static mpt_tfrecord_desc shim_desc(const mpt_io *io, const char *path) {
    mpt_tfrecord_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.path = path;
    desc.io = io;
    return desc;
}

/* Reads to the end or the first error. Each record that comes must be the one that was written. */
static mpt_result read_some(mpt_ctx *ctx, const mpt_tfrecord_desc *desc, int *count) {
    mpt_tfrecord *f = NULL;
    mpt_bytes record;
    mpt_result rc = mpt_tfrecord_open(ctx, desc, &f);
    *count = 0;
    while (rc == MPT_OK && (rc = mpt_tfrecord_next(f, &record)) == MPT_OK) {
        CHECK(*count < NUM_SOME);
        CHECK_EQ_INT(record.size, some_sizes[*count]);
        CHECK_EQ_MEM(record.data, some_payload(*count), record.size);
        CHECK_EQ_INT(mpt_tfrecord_tell(f).record, *count);
        ++*count;
    }
    if (rc < 0 && f) { /* the same again */
        char message[512];
        snprintf(message, sizeof message, "%s", mpt_last_error(ctx)->message);
        if (rc == MPT_ERR_IO || !f->resync) {
            CHECK_EQ_INT(mpt_tfrecord_next(f, &record), rc);
            CHECK_EQ_STR(mpt_last_error(ctx)->message, message);
        }
    }
    mpt_tfrecord_close(f);
    CHECK_EQ_INT(shim.num_open, 0);
    return rc;
}

static const mpt_compression all_kinds[] = {MPT_COMPRESSION_NONE, MPT_COMPRESSION_GZIP,
                                            MPT_COMPRESSION_ZLIB};
#ifdef MPTRAIN_ZLIB
enum { NUM_KINDS = 3 };
#else
enum { NUM_KINDS = 1 };
#endif

/* Where the records of write_some end in a plain file, the start of the file first. */
static const size_t some_ends[NUM_SOME + 1] = {0, 19, 35, 91, 108, 141};

/* ---- CRC-32C -------------------------------------------------------------------------------- */
static uint32_t slow_crc32c(uint32_t crc, const uint8_t *p,
                            size_t n) { /* by definition, bit by bit */
    int bit;
    for (crc = ~crc; n > 0; n--, p++)
        for (crc ^= *p, bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ 0x82f63b78u : crc >> 1;
    return ~crc;
}

/* O-05: RFC 3720 B.4, at each alignment, on each path. */
MPT_TEST(o05_crc32c_known_values_at_each_alignment_and_path) {
    uint8_t buffer[48];
    int kind, shift, i;
    for (kind = 0; kind <= mpti_crc32c_best(); kind++) {
        for (shift = 0; shift < 8; shift++) {
            uint8_t *p = buffer + shift;
            CHECK_EQ_INT(mpti_crc32c_with(kind, 0, "123456789", 9), 0xe3069283u);
            memset(p, 0, 32);
            CHECK_EQ_INT(mpti_crc32c_with(kind, 0, p, 32), 0x8a9136aau);
            memset(p, 0xff, 32);
            CHECK_EQ_INT(mpti_crc32c_with(kind, 0, p, 32), 0x62a8ab43u);
            for (i = 0; i < 32; i++) p[i] = (uint8_t)i;
            CHECK_EQ_INT(mpti_crc32c_with(kind, 0, p, 32), 0x46dd794eu);
        }
    }
    CHECK_EQ_INT(mpt_crc32c(0, "", 0), 0);
}

MPT_TEST(crc32c_paths_agree_at_any_length_and_alignment) {
    enum { SIZE = 40000 };
    uint8_t *data = (uint8_t *)malloc(SIZE);
    int tries = is_full() ? 20000 : 1500, t, kind;
    random_bytes(data, SIZE);
    for (t = 0; t < tries; t++) {
        size_t limit = t % 3 ? 1000 : SIZE, n = next_random() % limit,
               from = next_random() % (SIZE - n);
        size_t cut = n ? next_random() % n : 0;
        uint32_t start = next_random(), expected = slow_crc32c(start, data + from, n);
        uint8_t *exact = (uint8_t *)malloc(n + 1); /* so that ASan sees a read beyond */
        memcpy(exact + 1, data + from, n);
        for (kind = 0; kind <= mpti_crc32c_best(); kind++) {
            uint32_t part = mpti_crc32c_with(kind, start, exact + 1, cut);
            CHECK_EQ_INT(mpti_crc32c_with(kind, start, exact + 1, n), expected);
            CHECK_EQ_INT(mpti_crc32c_with(kind, part, exact + 1 + cut, n - cut), expected);
        }
        free(exact);
    }
    free(data);
}

#if defined(__x86_64__)
static uint32_t power_of_x(int n) { /* x^n mod P, reflected: the top bit stands for x^0 */
    uint32_t r = 0x80000000u;
    for (; n > 0; n--) r = r & 1 ? r >> 1 ^ 0x82f63b78u : r >> 1;
    return r;
}

MPT_TEST(crc32c_constants_are_powers_of_x) {
    CHECK_EQ_INT(power_of_x(16 * MPTI_CRC32C_LONG - 33), MPTI_CRC32C_LONG_FAR);
    CHECK_EQ_INT(power_of_x(8 * MPTI_CRC32C_LONG - 33), MPTI_CRC32C_LONG_NEAR);
    CHECK_EQ_INT(power_of_x(16 * MPTI_CRC32C_SHORT - 33), MPTI_CRC32C_SHORT_FAR);
    CHECK_EQ_INT(power_of_x(8 * MPTI_CRC32C_SHORT - 33), MPTI_CRC32C_SHORT_NEAR);
}
#else
MPT_TEST(crc32c_constants_are_powers_of_x) {
    SKIP("they are used on x86-64 only");
}
#endif

/* ---- fixtures ------------------------------------------------------------------------------- */

/* Each file that TensorFlow wrote, or that was damaged by hand: the records that it reads, then the
   end or an error that names file, record and offset. */
MPT_TEST(fixtures_read_as_tensorflow_reads_them) {
    FILE *list = fopen(mpt_test_data("fixtures.txt"), "r");
    static char line[65536];
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_tfrecord *f = NULL;
    char name[128], kind[16];
    int records, damaged = 0, num_files = 0;
    mpt_bytes record;
    CHECK(list != NULL);
    for (;;) {
        bool more = fgets(line, sizeof line, list) != NULL;
        unsigned crc, size;
        if (more && sscanf(line, "record %8x %u", &crc, &size) == 2) {
            if (!f) continue;
            CHECK_OK(ctx, mpt_tfrecord_next(f, &record));
            CHECK_EQ_INT(record.size, size);
            CHECK_EQ_INT(mpt_crc32(0, record.data, record.size), crc);
            continue;
        }
        if (more && strncmp(line, "file ", 5) != 0) continue;
        if (f) {
            mpt_result expected = damaged ? MPT_ERR_CORRUPT_DATA : MPT_END;
            CHECK_RESULT(ctx, mpt_tfrecord_next(f, &record), expected);
            if (damaged) CHECK_CONTAINS(mpt_last_error(ctx)->message, name);
            if (damaged) CHECK_CONTAINS(mpt_last_error(ctx)->message, ": record ");
            if (damaged) CHECK_CONTAINS(mpt_last_error(ctx)->message, " at offset ");
        }
        mpt_tfrecord_close(f);
        f = NULL;
        if (!more) break;
        CHECK_EQ_INT(sscanf(line, "file %127s %15s %d %d", name, kind, &records, &damaged), 4);
        num_files++;
        if (NUM_KINDS > 1 || !strcmp(kind, "NONE")) {
            mpt_tfrecord_desc desc = shim_desc(NULL, mpt_test_data(name));
            CHECK_OK(ctx, mpt_tfrecord_open(ctx, &desc, &f));
            CHECK_EQ_INT(mpt_tfrecord_compression(f), !strcmp(kind, "GZIP") ? MPT_COMPRESSION_GZIP
                                                      : !strcmp(kind, "ZLIB")
                                                          ? MPT_COMPRESSION_ZLIB
                                                          : MPT_COMPRESSION_NONE);
        }
    }
    CHECK_EQ_INT(num_files, 24);
    fclose(list);
    mpt_ctx_destroy(ctx);
}

/* ---- cut and damaged files ------------------------------------------------------------------ */

/* O-01: cut at every position, of every kind, with the size known or not: the whole records before
   the cut, then data loss by name; a clean end only where a record ends (or the file is empty). */
MPT_TEST(o01_every_cut_is_found) {
    mpt_io io = shim_io();
    mpt_ctx *ctx = new_ctx(NULL);
    int k, unknown, shorts, count;
    for (k = 0; k < NUM_KINDS; k++) {
        mpt_tfrecord_desc desc = shim_desc(&io, "cut");
        size_t size, cut;
        uint8_t *whole;
        shim_reset();
        CHECK_OK(ctx, write_some(ctx, &io, "whole", all_kinds[k]));
        size = shim.files[shim_find("whole")].size;
        whole = (uint8_t *)malloc(size);
        memcpy(whole, shim.files[shim_find("whole")].data, size);
        CHECK(k > 0 || size == some_ends[NUM_SOME]);
        for (cut = 0; cut <= size; cut++) {
            for (unknown = 0; unknown < 2; unknown++) {
                for (shorts = 0; shorts < 2; shorts++) {
                    mpt_result rc;
                    int whole_records = 0;
                    bool clean = cut == 0 || cut == size;
                    shim_reset();
                    shim.size_is_unknown = unknown;
                    shim.short_reads = shorts;
                    shim_put("cut", whole, cut);
                    rc = read_some(ctx, &desc, &count);
                    while (k == 0 && some_ends[whole_records + 1] <= cut &&
                           ++whole_records < NUM_SOME) {}
                    if (k == 0) clean = some_ends[whole_records] == cut;
                    CHECK_RESULT(ctx, rc, clean ? MPT_END : MPT_ERR_CORRUPT_DATA);
                    if (k == 0) CHECK_EQ_INT(count, whole_records);
                    if (cut == size) CHECK_EQ_INT(count, NUM_SOME);
                    if (clean) continue;
                    CHECK_CONTAINS(mpt_last_error(ctx)->message, "cut: record ");
                    CHECK_CONTAINS(mpt_last_error(ctx)->message, "at offset ");
                    CHECK_CONTAINS(mpt_last_error(ctx)->message, "cut");
                }
            }
        }
        free(whole);
    }
    shim_reset();
    mpt_ctx_destroy(ctx);
}

/* A cut says how much is missing. */
MPT_TEST(o01_message_of_a_cut) {
    mpt_io io = shim_io();
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_tfrecord_desc desc = shim_desc(&io, "cut");
    uint8_t whole[141];
    int count;
    shim_reset();
    CHECK_OK(ctx, write_some(ctx, &io, "whole", MPT_COMPRESSION_NONE));
    memcpy(whole, shim.files[shim_find("whole")].data, sizeof whole);
    shim_put("cut", whole, 35 + 50); /* the third record has 56 bytes */
    CHECK_RESULT(ctx, read_some(ctx, &desc, &count), MPT_ERR_CORRUPT_DATA);
    CHECK_EQ_STR(mpt_last_error(ctx)->message,
                 "cut: record 2 at offset 35: the file is cut: it ends inside the record, "
                 "6 of 56 bytes are missing");
    shim_put("cut", whole, 35 + 5);
    CHECK_RESULT(ctx, read_some(ctx, &desc, &count), MPT_ERR_CORRUPT_DATA);
    CHECK_EQ_STR(mpt_last_error(ctx)->message,
                 "cut: record 2 at offset 35: the file is cut: it ends inside the record's header, "
                 "7 of 12 bytes are missing");
    shim_reset();
    mpt_ctx_destroy(ctx);
}

/* Any one byte changed, anywhere: no wrong record ever comes, and no success with fewer. */
MPT_TEST(every_flipped_byte_is_found) {
    mpt_io io = shim_io();
    mpt_ctx *ctx = new_ctx(NULL);
    int k, count;
    for (k = 0; k < NUM_KINDS; k++) {
        mpt_tfrecord_desc desc = shim_desc(&io, "f");
        uint8_t *data;
        size_t size, i;
        int mask;
        shim_reset();
        CHECK_OK(ctx, write_some(ctx, &io, "f", all_kinds[k]));
        data = shim.files[shim_find("f")].data;
        size = shim.files[shim_find("f")].size;
        for (i = 0; i < size; i++) {
            for (mask = 1; mask < 256; mask = is_full() ? mask + 1 : mask * 2 + 1) {
                mpt_result rc;
                data[i] ^= (uint8_t)mask;
                rc = read_some(ctx, &desc, &count);
                /* what says nothing of the data: time, flags and system in gzip's header, the
                   level in zlib's, and the bits that fill up deflate's last byte */
                if (rc == MPT_END)
                    CHECK(k > 0 && (i < (k == 1 ? 10u : 2u) || i == size - (k == 1 ? 9u : 5u)));
                if (rc == MPT_END) CHECK_EQ_INT(count, NUM_SOME);
                else CHECK_RESULT(ctx, rc, MPT_ERR_CORRUPT_DATA);
                data[i] ^= (uint8_t)mask;
            }
        }
    }
    shim_reset();
    mpt_ctx_destroy(ctx);
}

/* Random damage in several places, cuts and insertions; nothing crashes, what comes is right. */
MPT_TEST(mutants_never_give_a_wrong_record) {
    mpt_io io = shim_io();
    mpt_ctx *ctx = new_ctx(NULL);
    int mutants = is_full() ? 10000 : 500, m, k, count;
    for (k = 0; k < NUM_KINDS; k++) {
        mpt_tfrecord_desc desc = shim_desc(&io, "m");
        uint8_t whole[512], mutant[600];
        size_t size;
        shim_reset();
        CHECK_OK(ctx, write_some(ctx, &io, "whole", all_kinds[k]));
        size = shim.files[shim_find("whole")].size;
        CHECK(size <= sizeof whole);
        memcpy(whole, shim.files[shim_find("whole")].data, size);
        for (m = 0; m < mutants; m++) {
            size_t n = size, at = next_random() % n, more = next_random() % 20;
            memcpy(mutant, whole, n);
            if (m % 4 == 0) n = at;
            if (m % 4 == 1) memmove(mutant + at, mutant + at / 2, n - at);
            if (m % 4 == 2) random_bytes(mutant + at, more < n - at ? more : n - at);
            if (m % 4 == 3) random_bytes(mutant + n, more);
            if (m % 4 == 3) n += more;
            shim_put("m", mutant, n);
            shim.size_is_unknown = m % 8 < 4;
            read_some(ctx, &desc, &count);
        }
    }
    shim_reset();
    mpt_ctx_destroy(ctx);
}

/* ---- compression ---------------------------------------------------------------------------- */

/* O-02: 100 records in each wrapping: all 100, or a refusal by name. */
MPT_TEST(o02_compression_is_told_from_the_content) {
    static const char *const names[] = {"raw.tfrecord", "raw.tfrecord.gz", "raw.tfrecord.zlib"};
    mpt_ctx *ctx = new_ctx(NULL);
    int k, i;
    for (k = 0; k < 3; k++) {
        const char *path = mpt_test_tmpfile("hundred.dat"); /* the name tells nothing */
        mpt_tfrecord_writer_desc wdesc;
        mpt_tfrecord_writer *w;
        mpt_tfrecord_desc desc = shim_desc(NULL, path),
                          fixture = shim_desc(NULL, mpt_test_data(names[k]));
        mpt_tfrecord *f;
        mpt_bytes record;
        mpt_result rc;
        memset(&wdesc, 0, sizeof wdesc);
        wdesc.path = path;
        wdesc.compression = all_kinds[k];
        wdesc.compression_level = k * 4 + 1;
        rc = mpt_tfrecord_writer_open(ctx, &wdesc, &w);
        if (k >= NUM_KINDS) {
            CHECK_RESULT(ctx, rc, MPT_ERR_UNSUPPORTED);
            CHECK_CONTAINS(mpt_last_error(ctx)->message, k == 1 ? "gzip" : "zlib");
            CHECK_RESULT(ctx, mpt_tfrecord_open(ctx, &fixture, &f), MPT_ERR_UNSUPPORTED);
            CHECK_CONTAINS(mpt_last_error(ctx)->message, k == 1 ? "gzip" : "zlib");
            CHECK_CONTAINS(mpt_last_error(ctx)->message, names[k]);
            continue;
        }
        CHECK_OK(ctx, rc);
        for (i = 0; i < 100; i++)
            CHECK_OK(ctx, mpt_tfrecord_writer_write(w, bytes_of(&i, sizeof i)));
        CHECK_OK(ctx, mpt_tfrecord_writer_finish(w));
        mpt_tfrecord_writer_close(w);
        CHECK_OK(ctx, mpt_tfrecord_open(ctx, &desc, &f));
        CHECK_EQ_INT(mpt_tfrecord_compression(f), all_kinds[k]);
        for (i = 0; i < 100; i++) {
            CHECK_OK(ctx, mpt_tfrecord_next(f, &record));
            CHECK_EQ_MEM(record.data, &i, sizeof i);
        }
        CHECK_RESULT(ctx, mpt_tfrecord_next(f, &record), MPT_END);
        CHECK_RESULT(ctx, mpt_tfrecord_next(f, &record), MPT_END);
        mpt_tfrecord_close(f);
    }
    mpt_ctx_destroy(ctx);
}

#ifdef MPTRAIN_ZLIB
static size_t compressed_some(mpt_ctx *ctx, mpt_compression kind, uint8_t *out) {
    mpt_io io = shim_io();
    size_t size;
    CHECK_OK(ctx, write_some(ctx, &io, "part", kind));
    size = shim.files[shim_find("part")].size;
    memcpy(out, shim.files[shim_find("part")].data, size);
    shim_drop(shim_find("part"));
    return size;
}

MPT_TEST(gzip_members_follow_each_other_and_nothing_else_does) {
    mpt_io io = shim_io();
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_tfrecord_desc desc = shim_desc(&io, "g");
    uint8_t data[1024];
    mpt_tfrecord *f;
    mpt_bytes record;
    size_t one, at;
    int k, i, shorts;
    for (k = 1; k < 3; k++) {
        for (shorts = 0; shorts < 2; shorts++) {
            shim_reset();
            shim.short_reads = shorts;
            one = compressed_some(ctx, all_kinds[k], data);
            memcpy(data + one, data, one);
            shim_put("g", data, 2 * one);
            CHECK_OK(ctx, mpt_tfrecord_open(ctx, &desc, &f));
            for (i = 0; i < (k == 1 ? 2 : 1) * NUM_SOME; i++) {
                CHECK_OK(ctx, mpt_tfrecord_next(f, &record));
                CHECK_EQ_MEM(record.data, some_payload(i % NUM_SOME), some_sizes[i % NUM_SOME]);
            }
            CHECK_RESULT(ctx, mpt_tfrecord_next(f, &record),
                         k == 1 ? MPT_END : MPT_ERR_CORRUPT_DATA);
            if (k == 2) CHECK_CONTAINS(mpt_last_error(ctx)->message, "behind the zlib stream");
            mpt_tfrecord_close(f);
            for (at = 1; at < one; at++) { /* garbage, and the second member cut */
                mpt_result rc = MPT_OK;
                shim_put("g", data, one + at);
                CHECK_OK(ctx, mpt_tfrecord_open(ctx, &desc, &f));
                for (i = 0; rc == MPT_OK; i++) rc = mpt_tfrecord_next(f, &record);
                CHECK(i > NUM_SOME);
                CHECK_RESULT(ctx, rc, MPT_ERR_CORRUPT_DATA);
                mpt_tfrecord_close(f);
            }
            memset(data + one, 'x', 20);
            shim_put("g", data, one + 20);
            CHECK_OK(ctx, mpt_tfrecord_open(ctx, &desc, &f));
            for (i = 0; i < NUM_SOME; i++) CHECK_OK(ctx, mpt_tfrecord_next(f, &record));
            CHECK_RESULT(ctx, mpt_tfrecord_next(f, &record), MPT_ERR_CORRUPT_DATA);
            CHECK_CONTAINS(mpt_last_error(ctx)->message, "of the decompressed data");
            mpt_tfrecord_close(f);
        }
    }
    shim_reset();
    mpt_ctx_destroy(ctx);
}

/* A length that nothing bears out, in a stream whose size tells nothing: memory follows what is
   really there, at most twice as much and 1 MiB, with the old block beside it while it grows. */
MPT_TEST(o03_compressed_length_is_not_believed) {
    mpt_test_allocator memory;
    mpt_io io = shim_io();
    mpt_ctx *ctx;
    mpt_tfrecord_desc desc = shim_desc(&io, "z");
    const size_t there = 3 << 20;
    uint8_t *plain = (uint8_t *)calloc(1, there), *packed = (uint8_t *)malloc(there);
    uLongf packed_size = there;
    mpt_tfrecord *f;
    mpt_bytes record;
    mpti_store_u64(plain, (uint64_t)1 << 29);
    mpti_store_u32(plain + 8, mpti_masked_crc32c(plain, 8));
    CHECK_EQ_INT(compress(packed, &packed_size, plain, there), Z_OK);
    shim_reset();
    shim_put("z", packed, packed_size);
    mpt_test_allocator_init(&memory, 0, 0);
    ctx = new_ctx(&memory);
    CHECK_OK(ctx, mpt_tfrecord_open(ctx, &desc, &f));
    CHECK_RESULT(ctx, mpt_tfrecord_next(f, &record), MPT_ERR_CORRUPT_DATA);
    CHECK(memory.peak_bytes <= (int64_t)(3 * there + (1 << 20)));
    mpt_tfrecord_close(f);
    mpt_ctx_destroy(ctx);
    CHECK_NO_LEAK(&memory);
    free(plain);
    free(packed);
    shim_reset();
}
#else
MPT_TEST(gzip_members_follow_each_other_and_nothing_else_does) {
    SKIP("built without zlib");
}
MPT_TEST(o03_compressed_length_is_not_believed) {
    SKIP("built without zlib");
}
#endif

/* ---- files that are none -------------------------------------------------------------------- */

/* O-03: text of any kind, and lengths without a file behind them: an error, and never an allocation
   of more than 1 MiB. */
MPT_TEST(o03_lengths_are_checked_before_memory_is_asked_for) {
    static const struct {
        const char *text, *hint;
    } cases[] = {{"version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 130\n",
                  "git lfs pull"},
                 {"<!DOCTYPE html><html><body>Sign in</body></html>", "HTML"},
                 {"<?xml version=\"1.0\"?><Error>AccessDenied</Error>", "XML"},
                 {"this is plain text, not a TFRecord file\n", "text"},
                 {"\x83\xaf\x70\xd1\x0d\x88\x4a\x3f\x01\x02\x03\x04\x05", "ArrayRecord"},
                 {"PK\3\4aaaaaaaaaaaaa", "ZIP"},
                 {"\1\2\3\4\5\6\7\1\2\3\4\5\6\7", "01 02 03 04 05 06 07 01"}};
    static const uint64_t lengths[] = {(uint64_t)1 << 62, ((uint64_t)1 << 40) + 5, UINT64_MAX,
                                       UINT64_MAX - 11,   (uint64_t)INT64_MAX,     100,
                                       (uint64_t)1 << 32, (uint64_t)1 << 29};
    mpt_io io = shim_io();
    size_t i;
    int unknown;
    for (unknown = 0; unknown < 2; unknown++) {
        for (i = 0; i < sizeof cases / sizeof cases[0] + sizeof lengths / sizeof lengths[0]; i++) {
            mpt_test_allocator memory;
            mpt_tfrecord_desc desc = shim_desc(&io, "odd");
            mpt_tfrecord *f;
            mpt_bytes record;
            mpt_ctx *ctx;
            const char *hint = "";
            shim_reset();
            shim.size_is_unknown = unknown;
            if (i < sizeof cases / sizeof cases[0]) {
                shim_put("odd", cases[i].text, strlen(cases[i].text));
                hint = cases[i].hint;
            } else {
                uint8_t bytes[15] = {0};
                mpti_store_u64(bytes, lengths[i - sizeof cases / sizeof cases[0]]);
                mpti_store_u32(bytes + 8, mpti_masked_crc32c(bytes, 8));
                shim_put("odd", bytes, sizeof bytes);
            }
            mpt_test_allocator_init(&memory, 0, 0);
            ctx = new_ctx(&memory);
            CHECK_OK(ctx, mpt_tfrecord_open(ctx, &desc, &f));
            CHECK_RESULT(ctx, mpt_tfrecord_next(f, &record), MPT_ERR_CORRUPT_DATA);
            CHECK_CONTAINS(mpt_last_error(ctx)->message, "odd: record 0 at offset 0");
            CHECK_CONTAINS(mpt_last_error(ctx)->message, hint);
            CHECK(memory.peak_bytes <= 1 << 20);
            mpt_tfrecord_close(f);
            mpt_ctx_destroy(ctx);
            CHECK_NO_LEAK(&memory);
        }
    }
    shim_reset();
}

/* O-04: no bytes are no records; an empty record is a record. */
MPT_TEST(o04_empty_files_and_empty_records) {
    static const uint8_t empty[16] = {0,    0,    0,    0,    0,    0,    0,    0,
                                      0x29, 0x03, 0x98, 0x07, 0xd8, 0xea, 0x82, 0xa2};
    mpt_io io = shim_io();
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_tfrecord_desc desc = shim_desc(&io, "e");
    mpt_tfrecord *f;
    mpt_bytes record;
    shim_reset();
    shim_put("e", "", 0);
    CHECK_OK(ctx, mpt_tfrecord_open(ctx, &desc, &f));
    CHECK_RESULT(ctx, mpt_tfrecord_next(f, &record), MPT_END);
    CHECK_EQ_INT(mpt_tfrecord_tell(f).record, -1);
    mpt_tfrecord_close(f);
    shim_put("e", empty, sizeof empty);
    CHECK_OK(ctx, mpt_tfrecord_open(ctx, &desc, &f));
    CHECK_OK(ctx, mpt_tfrecord_next(f, &record));
    CHECK_EQ_INT(record.size, 0);
    CHECK(record.data != NULL);
    CHECK_RESULT(ctx, mpt_tfrecord_next(f, &record), MPT_END);
    CHECK_EQ_INT(mpt_tfrecord_tell(f).record, 0);
    mpt_tfrecord_close(f);
    shim_reset();
    mpt_ctx_destroy(ctx);
}

/* Memory is in proportion to the file. */
MPT_TEST(small_files_cost_little_memory) {
    mpt_test_allocator memory;
    mpt_io io = shim_io();
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_tfrecord_desc desc = shim_desc(&io, "s");
    int count;
    shim_reset();
    CHECK_OK(ctx, write_some(ctx, &io, "s", MPT_COMPRESSION_NONE));
    mpt_ctx_destroy(ctx);
    mpt_test_allocator_init(&memory, 0, 0);
    ctx = new_ctx(&memory);
    CHECK_RESULT(ctx, read_some(ctx, &desc, &count), MPT_END);
    CHECK_EQ_INT(count, NUM_SOME);
    CHECK(memory.peak_bytes < 8192);
    mpt_ctx_destroy(ctx);
    CHECK_NO_LEAK(&memory);
    shim_reset();
}

/* ---- large records -------------------------------------------------------------------------- */

/* O-06: 80 MiB go through; a limit is named with the field that sets it, and the next record is
   reached where the framing allows. */
MPT_TEST(o06_large_records_and_the_limit) {
    const size_t size = (size_t)80 << 20;
    uint8_t *payload = (uint8_t *)malloc(size);
    mpt_ctx *ctx = new_ctx(NULL);
    int k;
    random_bytes(payload, 1 << 16);
    for (k = 1; k < (int)(size >> 16); k++) memcpy(payload + ((size_t)k << 16), payload, 1 << 16);
    for (k = 0; k < NUM_KINDS && k < 2; k++) {
        const char *path = mpt_test_tmpfile("large");
        mpt_tfrecord_writer_desc wdesc;
        mpt_tfrecord_writer *w;
        mpt_tfrecord_desc desc = shim_desc(NULL, path);
        mpt_tfrecord *f;
        mpt_bytes record;
        memset(&wdesc, 0, sizeof wdesc);
        wdesc.path = path;
        wdesc.compression = all_kinds[k];
        wdesc.compression_level = 1;
        CHECK_OK(ctx, mpt_tfrecord_writer_open(ctx, &wdesc, &w));
        CHECK_OK(ctx, mpt_tfrecord_writer_write(w, bytes_of("a", 1)));
        CHECK_OK(ctx, mpt_tfrecord_writer_write(w, bytes_of(payload, size)));
        CHECK_OK(ctx, mpt_tfrecord_writer_write(w, bytes_of("b", 1)));
        CHECK_OK(ctx, mpt_tfrecord_writer_finish(w));
        mpt_tfrecord_writer_close(w);
        CHECK_OK(ctx, mpt_tfrecord_open(ctx, &desc, &f));
        CHECK_OK(ctx, mpt_tfrecord_next(f, &record));
        CHECK_OK(ctx, mpt_tfrecord_next(f, &record));
        CHECK_EQ_INT(record.size, size);
        CHECK(memcmp(record.data, payload, size) == 0);
        CHECK_OK(ctx, mpt_tfrecord_next(f, &record));
        CHECK_EQ_INT(record.data[0], 'b');
        CHECK_RESULT(ctx, mpt_tfrecord_next(f, &record), MPT_END);
        mpt_tfrecord_close(f);
        desc.max_record_bytes = 1 << 20;
        CHECK_OK(ctx, mpt_tfrecord_open(ctx, &desc, &f));
        CHECK_OK(ctx, mpt_tfrecord_next(f, &record));
        CHECK_RESULT(ctx, mpt_tfrecord_next(f, &record), MPT_ERR_CORRUPT_DATA);
        CHECK_CONTAINS(mpt_last_error(ctx)->message, "max_record_bytes (1048576)");
        CHECK_CONTAINS(mpt_last_error(ctx)->message, "83886080 bytes");
        CHECK_EQ_INT(mpt_tfrecord_tell(f).record, 1);
        CHECK_OK(ctx, mpt_tfrecord_next(f, &record));
        CHECK_EQ_INT(record.data[0], 'b');
        CHECK_EQ_INT(mpt_tfrecord_tell(f).record, 2);
        CHECK_RESULT(ctx, mpt_tfrecord_next(f, &record), MPT_END);
        mpt_tfrecord_close(f);
        wdesc.max_record_bytes = 1 << 20;
        CHECK_OK(ctx, mpt_tfrecord_writer_open(ctx, &wdesc, &w));
        CHECK_RESULT(ctx, mpt_tfrecord_writer_write(w, bytes_of(payload, size)),
                     MPT_ERR_INVALID_ARGUMENT);
        CHECK_CONTAINS(mpt_last_error(ctx)->message, "max_record_bytes (1048576)");
        CHECK_OK(ctx, mpt_tfrecord_writer_write(w, bytes_of("a", 1))); /* nothing was written yet */
        mpt_tfrecord_writer_close(w);
    }
    free(payload);
    mpt_ctx_destroy(ctx);
}

/* Records of any size around the size of a block, in a file and in a stream without size. */
MPT_TEST(records_around_the_block_size) {
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_io io = shim_io();
    uint8_t *payload = (uint8_t *)malloc(600000);
    int unknown, i, n = is_full() ? 400 : 60;
    random_bytes(payload, 600000);
    for (unknown = 0; unknown < 2; unknown++) {
        mpt_tfrecord_writer_desc wdesc;
        mpt_tfrecord_writer *w;
        mpt_tfrecord_desc desc = shim_desc(&io, "b");
        mpt_tfrecord *f;
        mpt_bytes record;
        shim_reset();
        memset(&wdesc, 0, sizeof wdesc);
        wdesc.path = "b";
        wdesc.io = &io;
        CHECK_OK(ctx, mpt_tfrecord_writer_open(ctx, &wdesc, &w));
        random_state = 77;
        for (i = 0; i < n; i++) {
            size_t size = i % 3 ? next_random() % 600000
                                : (size_t)MPTI_BLOCK_BYTES - 20 + (size_t)(i % 40);
            CHECK_OK(ctx, mpt_tfrecord_writer_write(w, bytes_of(payload, size)));
        }
        CHECK_OK(ctx, mpt_tfrecord_writer_finish(w));
        mpt_tfrecord_writer_close(w);
        shim.size_is_unknown = unknown;
        CHECK_OK(ctx, mpt_tfrecord_open(ctx, &desc, &f));
        random_state = 77;
        for (i = 0; i < n; i++) {
            size_t size = i % 3 ? next_random() % 600000
                                : (size_t)MPTI_BLOCK_BYTES - 20 + (size_t)(i % 40);
            CHECK_OK(ctx, mpt_tfrecord_next(f, &record));
            CHECK_EQ_INT(record.size, size);
            CHECK(memcmp(record.data, payload, size) == 0);
        }
        CHECK_RESULT(ctx, mpt_tfrecord_next(f, &record), MPT_END);
        mpt_tfrecord_close(f);
    }
    free(payload);
    shim_reset();
    mpt_ctx_destroy(ctx);
}

/* Whoever retains a block keeps its records while the reader goes on. */
MPT_TEST(retained_records_stay_as_they_were) {
    enum { NUM = 500 };
    mpt_test_allocator memory;
    mpt_ctx *ctx;
    mpt_io io = shim_io();
    static mpti_record held[NUM];
    mpt_tfrecord_writer_desc wdesc;
    mpt_tfrecord_writer *w;
    mpt_tfrecord_desc desc = shim_desc(&io, "r");
    mpt_tfrecord *f;
    mpt_error err;
    static uint8_t payload[3000];
    int i;
    shim_reset();
    mpt_test_allocator_init(&memory, 0, 0);
    ctx = new_ctx(&memory);
    memset(&wdesc, 0, sizeof wdesc);
    wdesc.path = "r";
    wdesc.io = &io;
    CHECK_OK(ctx, mpt_tfrecord_writer_open(ctx, &wdesc, &w));
    for (i = 0; i < NUM; i++) {
        memset(payload, i, sizeof payload);
        CHECK_OK(ctx, mpt_tfrecord_writer_write(w, bytes_of(payload, (size_t)(i * 7 % 3000))));
    }
    CHECK_OK(ctx, mpt_tfrecord_writer_finish(w));
    mpt_tfrecord_writer_close(w);
    CHECK_EQ_INT(mpti_tfrecord_open(&memory.hooks, &desc, &err, &f), MPT_OK);
    for (i = 0; i < NUM; i++) {
        CHECK_EQ_INT(mpti_tfrecord_read(f, &err, &held[i]), MPT_OK);
        CHECK_EQ_INT(held[i].index, i);
        if (i % 3) mpti_block_retain(held[i].block);
    }
    mpt_tfrecord_close(f);
    for (i = 0; i < NUM; i++) {
        if (i % 3 == 0) continue;
        memset(payload, i, sizeof payload);
        CHECK_EQ_INT(held[i].payload.size, i * 7 % 3000);
        CHECK_EQ_MEM(held[i].payload.data, payload, held[i].payload.size);
        mpti_block_release(held[i].block);
    }
    mpt_ctx_destroy(ctx);
    CHECK_NO_LEAK(&memory);
    shim_reset();
}

/* ---- storage that fails --------------------------------------------------------------------- */

/* O-29: short reads, interruptions and passing errors are no damage; lasting ones are I/O errors
   that name path, offset and errno. */
MPT_TEST(o29_storage_that_fails_for_a_moment) {
    static const int passing[] = {EIO,        EAGAIN,   ESTALE,      ETIMEDOUT,
                                  ECONNRESET, ENETDOWN, ENETUNREACH, 0};
    mpt_io io = shim_io();
    mpt_ctx *ctx = new_ctx(NULL);
    int k, count;
    size_t e;
    for (k = 0; k < NUM_KINDS; k++) {
        mpt_tfrecord_desc desc = shim_desc(&io, "net");
        shim_reset();
        CHECK_OK(ctx, write_some(ctx, &io, "net", all_kinds[k]));
        shim.short_reads = 1;
        shim.eintr_every = 3;
        shim.open_failures = 2;
        CHECK_RESULT(ctx, read_some(ctx, &desc, &count), MPT_END);
        CHECK_EQ_INT(count, NUM_SOME);
        for (e = 0; e < sizeof passing / sizeof passing[0]; e++) {
            shim.num_reads = 0;
            shim.fail_read = 7;
            shim.fail_reads = 1;
            shim.read_errno = passing[e];
            CHECK_RESULT(ctx, read_some(ctx, &desc, &count), MPT_END);
            CHECK_EQ_INT(count, NUM_SOME);
        }
        shim.num_reads = 0;
        shim.fail_read = 12;
        shim.fail_reads = 1 << 20;
        shim.read_errno = EIO;
        CHECK_RESULT(ctx, read_some(ctx, &desc, &count), MPT_ERR_IO);
        CHECK_EQ_INT(mpt_last_error(ctx)->native_code, EIO);
        CHECK_EQ_STR(mpt_last_error(ctx)->native_domain, "errno");
        CHECK_CONTAINS(mpt_last_error(ctx)->message, "net: can't read at offset ");
        CHECK_CONTAINS(mpt_last_error(ctx)->message, "the shim says");
        CHECK(!strstr(mpt_last_error(ctx)->message, "damaged"));
        shim.num_reads = 0;
        shim.read_errno = EACCES; /* not one that passes: no second try */
        CHECK_RESULT(ctx, read_some(ctx, &desc, &count), MPT_ERR_IO);
        CHECK_EQ_INT(shim.num_reads, 12);
    }
    shim_reset();
    mpt_ctx_destroy(ctx);
}

/* The n-th read fails for good, for every n: what came before, then MPT_ERR_IO, which no policy
   skips. */
MPT_TEST(o29_every_read_fails_once_for_good) {
    mpt_io io = shim_io();
    mpt_ctx *ctx = new_ctx(NULL);
    int k, n, count;
    for (k = 0; k < NUM_KINDS; k++) {
        mpt_tfrecord_desc desc = shim_desc(&io, "n");
        desc.on_bad_record = MPT_BAD_RECORD_SKIP;
        shim_reset();
        CHECK_OK(ctx, write_some(ctx, &io, "n", all_kinds[k]));
        shim.short_reads = 1;
        shim.read_errno = ENXIO;
        shim.fail_reads = 1 << 20;
        for (n = 1;; n++) {
            mpt_result rc;
            shim.num_reads = 0;
            shim.fail_read = n;
            rc = read_some(ctx, &desc, &count);
            if (shim.num_reads < n) break;
            CHECK_RESULT(ctx, rc, MPT_ERR_IO);
        }
        CHECK_EQ_INT(count, NUM_SOME);
        CHECK(n > 20);
    }
    shim_reset();
    mpt_ctx_destroy(ctx);
}

MPT_TEST(missing_files_and_directories_are_io_errors_with_errno) {
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_tfrecord_desc desc = shim_desc(NULL, mpt_test_tmpfile("not-there"));
    mpt_tfrecord *f;
    CHECK_RESULT(ctx, mpt_tfrecord_open(ctx, &desc, &f), MPT_ERR_IO);
    CHECK_EQ_INT(mpt_last_error(ctx)->native_code, ENOENT);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "not-there: can't open it: no such file");
    desc.path = mpt_test_tmpdir();
    CHECK_RESULT(ctx, mpt_tfrecord_open(ctx, &desc, &f), MPT_ERR_IO);
    CHECK_EQ_INT(mpt_last_error(ctx)->native_code, EISDIR);
    desc.path = NULL;
    CHECK_RESULT(ctx, mpt_tfrecord_open(ctx, &desc, &f), MPT_ERR_INVALID_ARGUMENT);
    desc.path = "x";
    desc.max_bad_records = -1;
    CHECK_RESULT(ctx, mpt_tfrecord_open(ctx, &desc, &f), MPT_ERR_INVALID_ARGUMENT);
    mpt_ctx_destroy(ctx);
}

/* ---- what happens with damaged records ------------------------------------------------------ */
typedef struct incidents {
    int count, rest_of_file;
    int64_t record;
    uint64_t offset;
    char cause[512];
} incidents;

static void note_incident(const mpt_bad_record *bad, void *user) {
    incidents *i = (incidents *)user;
    i->count++;
    i->rest_of_file = bad->rest_of_file;
    i->record = bad->record;
    i->offset = bad->offset;
    CHECK_EQ_INT(bad->code, MPT_ERR_CORRUPT_DATA);
    snprintf(i->cause, sizeof i->cause, "%s", bad->cause);
}

static int read_with_policy(mpt_ctx *ctx, mpt_tfrecord_desc *desc, incidents *seen,
                            mpt_result *rc) {
    mpt_tfrecord *f;
    mpt_bytes record;
    int count = 0;
    memset(seen, 0, sizeof *seen);
    desc->bad_record = note_incident;
    desc->bad_record_user = seen;
    CHECK_OK(ctx, mpt_tfrecord_open(ctx, desc, &f));
    while ((*rc = mpt_tfrecord_next(f, &record)) == MPT_OK) count++;
    CHECK_EQ_INT(mpt_tfrecord_num_bad(f), seen->count);
    CHECK_EQ_INT(mpt_tfrecord_next(f, &record), *rc);
    CHECK(record.data == NULL);
    mpt_tfrecord_close(f);
    return count;
}

MPT_TEST(policies_for_damaged_records) {
    mpt_io io = shim_io();
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_tfrecord_desc desc = shim_desc(&io, "d");
    mpt_tfrecord *f;
    mpt_bytes record;
    incidents seen;
    mpt_result rc;
    uint8_t *data;
    shim_reset();
    CHECK_OK(ctx, write_some(ctx, &io, "d", MPT_COMPRESSION_NONE));
    data = shim.files[shim_find("d")].data;

    data[some_ends[2] + 12] ^= 1; /* a payload: the framing holds */
    CHECK_OK(ctx, mpt_tfrecord_open(ctx, &desc, &f));
    CHECK_OK(ctx, mpt_tfrecord_next(f, &record));
    CHECK_OK(ctx, mpt_tfrecord_next(f, &record));
    CHECK_RESULT(ctx, mpt_tfrecord_next(f, &record), MPT_ERR_CORRUPT_DATA);
    CHECK_CONTAINS(mpt_last_error(ctx)->message,
                   "d: record 2 at offset 35: payload checksum is wrong (stored ");
    CHECK_EQ_INT(mpt_tfrecord_tell(f).offset, 35);
    CHECK_OK(ctx, mpt_tfrecord_next(f, &record)); /* goes on behind it */
    CHECK_EQ_INT(mpt_tfrecord_tell(f).record, 3);
    mpt_tfrecord_close(f);
    desc.on_bad_record = MPT_BAD_RECORD_SKIP;
    CHECK_EQ_INT(read_with_policy(ctx, &desc, &seen, &rc), NUM_SOME - 1);
    CHECK_EQ_INT(rc, MPT_END);
    CHECK_EQ_INT(seen.count, 1);
    CHECK_EQ_INT(seen.record, 2);
    CHECK_EQ_INT(seen.offset, 35);
    CHECK_EQ_INT(seen.rest_of_file, 0);
    CHECK_CONTAINS(seen.cause, "payload checksum");
    desc.on_bad_record = MPT_BAD_RECORD_SKIP_FILE;
    CHECK_EQ_INT(read_with_policy(ctx, &desc, &seen, &rc), 2);
    CHECK_EQ_INT(rc, MPT_END);
    CHECK_EQ_INT(seen.rest_of_file, 1);

    data[12] ^= 1; /* a second one */
    desc.on_bad_record = MPT_BAD_RECORD_SKIP;
    desc.max_bad_records = 1;
    CHECK_EQ_INT(read_with_policy(ctx, &desc, &seen, &rc), 1);
    CHECK_EQ_INT(rc, MPT_ERR_CORRUPT_DATA);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "max_bad_records (1)");
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "record 2 at offset 35");
    desc.max_bad_records = 2;
    CHECK_EQ_INT(read_with_policy(ctx, &desc, &seen, &rc), NUM_SOME - 2);
    CHECK_EQ_INT(rc, MPT_END);
    desc.skip_crc = 1;
    CHECK_EQ_INT(read_with_policy(ctx, &desc, &seen, &rc), NUM_SOME);
    desc.skip_crc = 0;

    data[some_ends[3]] ^= 1; /* a length: the framing is lost */
    CHECK_EQ_INT(read_with_policy(ctx, &desc, &seen, &rc), 1);
    CHECK_EQ_INT(rc, MPT_ERR_CORRUPT_DATA); /* the third incident */
    desc.max_bad_records = 3;
    CHECK_EQ_INT(read_with_policy(ctx, &desc, &seen, &rc), 1);
    CHECK_EQ_INT(rc, MPT_END);
    CHECK_EQ_INT(seen.count, 3);
    CHECK_EQ_INT(seen.record, 3);
    CHECK_EQ_INT(seen.rest_of_file, 1);
    shim_reset();
    mpt_ctx_destroy(ctx);
}

/* A record beyond the limit is passed over, whatever the storage can do; a cut behind it shows. */
MPT_TEST(records_beyond_the_limit_are_passed_over) {
    mpt_io io = shim_io();
    mpt_ctx *ctx = new_ctx(NULL);
    int k, unknown, seeks;
    for (k = 0; k < NUM_KINDS; k++) {
        for (unknown = 0; unknown < 2; unknown++) {
            for (seeks = 0; seeks < 2; seeks++) {
                mpt_tfrecord_desc desc = shim_desc(&io, "l");
                incidents seen;
                mpt_result rc;
                io.seek = seeks ? shim_seek : NULL;
                desc.max_record_bytes = 16;
                desc.on_bad_record = MPT_BAD_RECORD_SKIP;
                shim_reset();
                CHECK_OK(ctx, write_some(ctx, &io, "l", all_kinds[k]));
                shim.size_is_unknown = unknown;
                CHECK_EQ_INT(read_with_policy(ctx, &desc, &seen, &rc),
                             3); /* 40 and 17 are too much */
                CHECK_EQ_INT(rc, MPT_END);
                CHECK_EQ_INT(seen.count, 2);
                if (k > 0) continue;
                shim.files[shim_find("l")].size -= 2;
                CHECK_EQ_INT(read_with_policy(ctx, &desc, &seen, &rc), 3);
                CHECK_EQ_INT(seen.rest_of_file, 1);
            }
        }
    }
    shim_reset();
    mpt_ctx_destroy(ctx);
}

MPT_TEST(seek_delivers_the_record_and_clears_the_failure) {
    mpt_io io = shim_io();
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_tfrecord_desc desc = shim_desc(&io, "s");
    mpt_tfrecord *f;
    mpt_bytes record;
    int i, t;
    shim_reset();
    CHECK_OK(ctx, write_some(ctx, &io, "s", MPT_COMPRESSION_NONE));
    CHECK_OK(ctx, mpt_tfrecord_open(ctx, &desc, &f));
    for (t = 0; t < 200; t++) {
        i = (int)(next_random() % NUM_SOME);
        CHECK_OK(ctx, mpt_tfrecord_seek(f, i, some_ends[i]));
        for (; i < NUM_SOME && t % 3; i++) {
            CHECK_OK(ctx, mpt_tfrecord_next(f, &record));
            CHECK_EQ_INT(record.size, some_sizes[i]);
            CHECK_EQ_MEM(record.data, some_payload(i), record.size);
            CHECK_EQ_INT(mpt_tfrecord_tell(f).record, i);
        }
    }
    CHECK_OK(ctx, mpt_tfrecord_seek(f, 1, 20)); /* no record begins there */
    CHECK_RESULT(ctx, mpt_tfrecord_next(f, &record), MPT_ERR_CORRUPT_DATA);
    CHECK_RESULT(ctx, mpt_tfrecord_next(f, &record), MPT_ERR_CORRUPT_DATA);
    CHECK_OK(ctx, mpt_tfrecord_seek(f, 1, some_ends[1]));
    CHECK_OK(ctx, mpt_tfrecord_next(f, &record));
    CHECK_OK(ctx, mpt_tfrecord_seek(f, NUM_SOME, some_ends[NUM_SOME]));
    CHECK_RESULT(ctx, mpt_tfrecord_next(f, &record), MPT_END);
    CHECK_RESULT(ctx, mpt_tfrecord_seek(f, 9, some_ends[NUM_SOME] + 1), MPT_ERR_CORRUPT_DATA);
    CHECK_RESULT(ctx, mpt_tfrecord_seek(f, -1, 0), MPT_ERR_INVALID_ARGUMENT);
    mpt_tfrecord_close(f);
    io.seek = NULL;
    shim.short_reads = 1; /* or all of it would lie in the block */
    CHECK_OK(ctx, mpt_tfrecord_open(ctx, &desc, &f));
    CHECK_RESULT(ctx, mpt_tfrecord_seek(f, 4, some_ends[4]), MPT_ERR_UNSUPPORTED);
    CHECK_OK(ctx, mpt_tfrecord_next(f, &record));
    mpt_tfrecord_close(f);
#ifdef MPTRAIN_ZLIB
    desc.path = mpt_test_data("raw.tfrecord.gz");
    desc.io = NULL;
    CHECK_OK(ctx, mpt_tfrecord_open(ctx, &desc, &f));
    CHECK_RESULT(ctx, mpt_tfrecord_seek(f, 0, 0), MPT_ERR_UNSUPPORTED);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "gzip");
    mpt_tfrecord_close(f);
#endif
    shim_reset();
    mpt_ctx_destroy(ctx);
}

/* A file that grows behind the reader is no cut file; a pipe has no size and can't be sought in. */
MPT_TEST(growing_files_and_pipes) {
    const char *path = mpt_test_tmpfile("grows"), *fifo = mpt_test_tmpfile("pipe");
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_tfrecord_desc desc = shim_desc(NULL, path);
    mpt_tfrecord *f;
    mpt_bytes record;
    unsigned char *whole;
    size_t size;
    int status, count;
    pid_t child;
    CHECK_OK(ctx, write_some(ctx, NULL, path, MPT_COMPRESSION_NONE));
    whole = mpt_test_read_file(path, &size);
    mpt_test_write_file(path, whole, some_ends[2]);
    CHECK_OK(ctx, mpt_tfrecord_open(ctx, &desc, &f));
    CHECK_OK(ctx, mpt_tfrecord_next(f, &record));
    mpt_test_write_file(path, whole, size);
    for (count = 1; mpt_tfrecord_next(f, &record) == MPT_OK; count++) {}
    CHECK_EQ_INT(count, NUM_SOME);
    mpt_tfrecord_close(f);

    CHECK(mkfifo(fifo, 0600) == 0);
    child = fork();
    if (child == 0) { /* in pieces, so that reads come short */
        FILE *out = fopen(fifo, "wb");
        size_t at;
        for (at = 0; at < size; at += 10) {
            fwrite(whole + at, 1, size - at < 10 ? size - at : 10, out);
            fflush(out);
        }
        fclose(out);
        _exit(0);
    }
    desc.path = fifo;
    CHECK_OK(ctx, mpt_tfrecord_open(ctx, &desc, &f));
    CHECK_RESULT(ctx, mpt_tfrecord_seek(f, 100, 100000), MPT_ERR_UNSUPPORTED);
    for (count = 0; mpt_tfrecord_next(f, &record) == MPT_OK; count++) {}
    CHECK_EQ_INT(count, NUM_SOME);
    mpt_tfrecord_close(f);
    CHECK(waitpid(child, &status, 0) == child);
    free(whole);
    mpt_ctx_destroy(ctx);
}

/* ---- memory that fails ---------------------------------------------------------------------- */
static mpt_result all_of_it(mpt_ctx *ctx, const mpt_io *io, mpt_compression kind) {
    mpt_tfrecord_desc desc = shim_desc(io, "o");
    mpt_tfrecord_index *index = NULL;
    int count;
    mpt_result rc = write_some(ctx, io, "o", kind);
    if (rc == MPT_OK) rc = read_some(ctx, &desc, &count);
    if (rc == MPT_END) CHECK_EQ_INT(count, NUM_SOME);
    if (rc < 0 || kind != MPT_COMPRESSION_NONE) return rc;
    rc = mpt_tfrecord_index_build(ctx, &desc, &index);
    if (rc == MPT_OK) rc = mpt_tfrecord_index_save(ctx, index, io, "o.idx");
    mpt_tfrecord_index_destroy(ctx, index);
    index = NULL;
    if (rc == MPT_OK) rc = mpt_tfrecord_index_load(ctx, &desc, &index);
    mpt_tfrecord_index_destroy(ctx, index);
    return rc;
}

/* The n-th allocation fails, for every n, and from there on or only once: each time an error with
   the right code, all given back, no file left behind half-written. */
MPT_TEST(every_allocation_fails) {
    mpt_io io = shim_io();
    int k, unknown, for_good, n;
    for (k = 0; k < NUM_KINDS; k++) {
        for (unknown = 0; unknown < 2; unknown++) {
            for (for_good = 0; for_good < 2; for_good++) {
                for (n = 1;; n++) {
                    mpt_test_allocator memory;
                    mpt_ctx *ctx;
                    bool failed;
                    shim_reset();
                    shim.size_is_unknown = unknown;
                    mpt_test_allocator_init(&memory, n, for_good);
                    ctx = new_ctx(&memory);
                    if (ctx) {
                        mpt_result rc = all_of_it(ctx, &io, all_kinds[k]);
                        if (memory.has_failed) CHECK_RESULT(ctx, rc, MPT_ERR_OUT_OF_MEMORY);
                        else CHECK(rc == MPT_OK || rc == MPT_END);
                    }
                    mpt_ctx_destroy(ctx);
                    failed = memory.has_failed;
                    CHECK_NO_LEAK(&memory);
                    CHECK_EQ_INT(shim.num_open, 0);
                    if (!failed) break;
                    CHECK(shim_find("") >= 0);
                }
                CHECK(n > 8);
            }
        }
    }
    shim_reset();
}

/* Memory that was lacking once: the next call delivers the record. */
MPT_TEST(next_can_be_called_again_after_lack_of_memory) {
    mpt_test_allocator memory;
    mpt_ctx *ctx;
    const char *path = mpt_test_tmpfile("again");
    static uint8_t payload[400000];
    mpt_tfrecord_writer_desc wdesc;
    mpt_tfrecord_writer *w;
    mpt_tfrecord_desc desc = shim_desc(NULL, path);
    mpt_tfrecord *f;
    mpt_bytes record;
    mpt_test_allocator_init(&memory, 0, 0);
    ctx = new_ctx(&memory);
    random_bytes(payload, sizeof payload);
    memset(&wdesc, 0, sizeof wdesc);
    wdesc.path = path;
    CHECK_OK(ctx, mpt_tfrecord_writer_open(ctx, &wdesc, &w));
    CHECK_OK(ctx, mpt_tfrecord_writer_write(w, bytes_of("x", 1)));
    CHECK_OK(ctx, mpt_tfrecord_writer_write(w, bytes_of(payload, sizeof payload)));
    CHECK_OK(ctx, mpt_tfrecord_writer_finish(w));
    mpt_tfrecord_writer_close(w);
    CHECK_OK(ctx, mpt_tfrecord_open(ctx, &desc, &f));
    CHECK_OK(ctx, mpt_tfrecord_next(f, &record));
    memory.fail_at = memory.num_allocs + 1;
    CHECK_RESULT(ctx, mpt_tfrecord_next(f, &record), MPT_ERR_OUT_OF_MEMORY);
    CHECK_OK(ctx, mpt_tfrecord_next(f, &record));
    CHECK_EQ_INT(record.size, sizeof payload);
    CHECK_EQ_MEM(record.data, payload, sizeof payload);
    CHECK_RESULT(ctx, mpt_tfrecord_next(f, &record), MPT_END);
    mpt_tfrecord_close(f);
    mpt_ctx_destroy(ctx);
    CHECK_NO_LEAK(&memory);
}

/* ---- writing -------------------------------------------------------------------------------- */

/* O-05: the record "abc", byte by byte. */
MPT_TEST(o05_bytes_of_a_record) {
    static const uint8_t expected[19] = {3,    0,    0,   0,   0,   0,    0,    0,    0xb0, 0x99,
                                         0x49, 0x0e, 'a', 'b', 'c', 0x6e, 0x57, 0xf1, 0x21};
    mpt_io io = shim_io();
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_tfrecord_writer_desc desc;
    mpt_tfrecord_writer *w;
    shim_reset();
    shim.short_writes = 1;
    memset(&desc, 0, sizeof desc);
    desc.path = "abc";
    desc.io = &io;
    CHECK_OK(ctx, mpt_tfrecord_writer_open(ctx, &desc, &w));
    CHECK_OK(ctx, mpt_tfrecord_writer_write(w, bytes_of("abc", 3)));
    CHECK(shim_find("abc") < 0);
    CHECK_OK(ctx, mpt_tfrecord_writer_finish(w));
    CHECK_EQ_INT(shim.files[shim_find("abc")].size, 19);
    CHECK_EQ_MEM(shim.files[shim_find("abc")].data, expected, 19);
    CHECK_RESULT(ctx, mpt_tfrecord_writer_write(w, bytes_of("abc", 3)), MPT_ERR_INVALID_STATE);
    CHECK_RESULT(ctx, mpt_tfrecord_writer_finish(w), MPT_ERR_INVALID_STATE);
    mpt_tfrecord_writer_close(w);
    CHECK_EQ_INT(shim_num_files(), 1);
    shim_reset();
    mpt_ctx_destroy(ctx);
}

/* Whatever step of writing fails: an I/O error that names the file, the old file as it was, nothing
   else left. */
MPT_TEST(writing_is_all_or_nothing) {
    mpt_io io = shim_io();
    mpt_ctx *ctx = new_ctx(NULL);
    int k, step;
    for (k = 0; k < NUM_KINDS; k++) {
        int64_t space;
        for (step = 0; step < 4; step++) {
            for (space = 0; space < (step ? 1 : 400); space++) {
                mpt_result rc;
                shim_reset();
                shim_put("w", "old", 3);
                if (step == 0) shim.space = space;
                shim.fail_sync = step == 1;
                shim.fail_close = step == 2;
                shim.fail_rename = step == 3;
                rc = write_some(ctx, &io, "w", all_kinds[k]);
                if (rc == MPT_OK) break; /* so much space was enough */
                CHECK_RESULT(ctx, rc, MPT_ERR_IO);
                CHECK_CONTAINS(mpt_last_error(ctx)->message, "w: can't ");
                CHECK_EQ_INT(mpt_last_error(ctx)->native_code, step == 0   ? ENOSPC
                                                               : step == 3 ? EACCES
                                                                           : EIO);
                CHECK_EQ_INT(shim_num_files(), 1);
                CHECK_EQ_MEM(shim.files[shim_find("w")].data, "old", 3);
                CHECK_EQ_INT(shim.num_open, 0);
            }
            CHECK(step > 0 || (space > 20 && space < 400));
        }
    }
    shim_reset();
    mpt_ctx_destroy(ctx);
}

/* After a failed write only close is taken. */
MPT_TEST(a_writer_that_has_failed_takes_no_more) {
    mpt_io io = shim_io();
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_tfrecord_writer_desc desc;
    mpt_tfrecord_writer *w;
    static uint8_t large[100000];
    shim_reset();
    shim.space = 50000;
    memset(&desc, 0, sizeof desc);
    desc.path = "w";
    desc.io = &io;
    CHECK_OK(ctx, mpt_tfrecord_writer_open(ctx, &desc, &w));
    CHECK_RESULT(ctx, mpt_tfrecord_writer_write(w, bytes_of(large, sizeof large)), MPT_ERR_IO);
    shim.space = -1;
    CHECK_RESULT(ctx, mpt_tfrecord_writer_write(w, bytes_of("a", 1)), MPT_ERR_INVALID_STATE);
    CHECK_RESULT(ctx, mpt_tfrecord_writer_finish(w), MPT_ERR_INVALID_STATE);
    mpt_tfrecord_writer_close(w);
    CHECK_EQ_INT(shim_num_files(), 0);
    desc.compression_level = 10;
    CHECK_RESULT(ctx, mpt_tfrecord_writer_open(ctx, &desc, &w), MPT_ERR_INVALID_ARGUMENT);
    io.rename = NULL;
    desc.compression_level = 0;
    CHECK_RESULT(ctx, mpt_tfrecord_writer_open(ctx, &desc, &w), MPT_ERR_INVALID_ARGUMENT);
    shim_reset();
    mpt_ctx_destroy(ctx);
}

static void count_name(const char *path, void *arg) {
    (void)path;
    ++*(int *)arg;
}

MPT_TEST(a_directory_is_refused_before_the_work) {
    mpt_ctx *ctx = NULL;
    mpt_tfrecord_writer_desc d;
    mpt_tfrecord_writer *w = NULL;
    CHECK_OK(NULL, mpt_ctx_create(NULL, &ctx));
    memset(&d, 0, sizeof d);
    d.path = mpt_test_tmpdir();
    CHECK_RESULT(ctx, mpt_tfrecord_writer_open(ctx, &d, &w), MPT_ERR_IO);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "it is a directory");
    CHECK(w == NULL);
    mpt_ctx_destroy(ctx);
}

/* A file that appears whole takes the place of what has its name: as root, even of /dev/null. */
MPT_TEST(a_device_or_pipe_is_not_replaced) {
    const char *path = mpt_test_tmpfile("some-pipe");
    mpt_ctx *ctx = NULL;
    mpt_tfrecord_writer_desc d;
    mpt_tfrecord_writer *w = NULL;
    struct stat s;

    CHECK_OK(NULL, mpt_ctx_create(NULL, &ctx));
    CHECK(mkfifo(path, 0600) == 0);
    memset(&d, 0, sizeof d);
    d.path = path;
    CHECK_RESULT(ctx, mpt_tfrecord_writer_open(ctx, &d, &w), MPT_ERR_IO);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "it is a device or a pipe");
    CHECK(w == NULL && stat(path, &s) == 0 && S_ISFIFO(s.st_mode));
    mpt_ctx_destroy(ctx);
}

/* On a disk: a writer that is closed early leaves nothing; one that is killed never leaves a file
   under the name itself, and a second writer of that name is not in its way. */
MPT_TEST(killed_writers_leave_no_file_under_the_name) {
    char directory[512], path[600];
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_tfrecord_writer_desc desc;
    mpt_tfrecord_writer *w, *second;
    static uint8_t large[300000];
    int count = 0, status;
    pid_t child;
    snprintf(directory, sizeof directory, "%s", mpt_test_tmpfile("killed"));
    snprintf(path, sizeof path, "%s/data", directory);
    CHECK(mkdir(directory, 0700) == 0);
    memset(&desc, 0, sizeof desc);
    desc.path = path;
    CHECK_OK(ctx, mpt_tfrecord_writer_open(ctx, &desc, &w));
    CHECK_OK(ctx, mpt_tfrecord_writer_open(ctx, &desc, &second));
    CHECK_OK(ctx, mpt_tfrecord_writer_write(w, bytes_of(large, sizeof large)));
    mpt_tfrecord_writer_close(w);
    CHECK_OK(ctx, mpt_tfrecord_writer_write(second, bytes_of(large, 10)));
    CHECK_EQ_INT(mpti_io_list(mpt_io_files(), directory, NULL, count_name, &count), MPT_OK);
    CHECK_EQ_INT(count, 1); /* the second one's temporary file */
    CHECK_OK(ctx, mpt_tfrecord_writer_finish(second));
    mpt_tfrecord_writer_close(second);
    CHECK(access(path, F_OK) == 0 && unlink(path) == 0);
    child = fork();
    if (child == 0) {
        if (mpt_tfrecord_writer_open(ctx, &desc, &w) == MPT_OK &&
            mpt_tfrecord_writer_write(w, bytes_of(large, sizeof large)) == MPT_OK)
            raise(SIGKILL);
        _exit(1);
    }
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    CHECK(access(path, F_OK) != 0);
    desc.path = mpt_test_tmpfile("no-such-directory/x");
    CHECK_RESULT(ctx, mpt_tfrecord_writer_open(ctx, &desc, &w), MPT_ERR_IO);
    CHECK_EQ_INT(mpt_last_error(ctx)->native_code, ENOENT);
    mpt_ctx_destroy(ctx);
}

/* ---- index ---------------------------------------------------------------------------------- */
MPT_TEST(index_is_built_saved_and_loaded) {
    mpt_io io = shim_io();
    mpt_ctx *ctx = new_ctx(NULL);
    int unknown, seeks, shorts, i;
    for (unknown = 0; unknown < 2; unknown++) {
        for (seeks = 0; seeks < 2; seeks++) {
            for (shorts = 0; shorts < 2; shorts++) {
                mpt_tfrecord_desc desc = shim_desc(&io, "i");
                mpt_tfrecord_index *index, *loaded;
                size_t cut;
                shim_reset();
                io.seek = seeks ? shim_seek : NULL;
                CHECK_OK(ctx, write_some(ctx, &io, "i", MPT_COMPRESSION_NONE));
                shim.size_is_unknown = unknown;
                shim.short_reads = shorts;
                CHECK_OK(ctx, mpt_tfrecord_index_build(ctx, &desc, &index));
                CHECK_EQ_INT(index->num_records, NUM_SOME);
                for (i = 0; i <= NUM_SOME; i++) CHECK_EQ_INT(index->offsets[i], some_ends[i]);
                CHECK_OK(ctx, mpt_tfrecord_index_save(ctx, index, &io, "i.idx"));
                CHECK_EQ_MEM(shim.files[shim_find("i.idx")].data,
                             "0 19\n19 16\n35 56\n91 17\n108 33\n", 30);
                CHECK_EQ_INT(shim.files[shim_find("i.idx")].size, 30);
                if (seeks) {
                    CHECK_OK(ctx, mpt_tfrecord_index_load(ctx, &desc, &loaded));
                    CHECK_EQ_INT(loaded->num_records, NUM_SOME);
                    CHECK_EQ_MEM(loaded->offsets, index->offsets,
                                 sizeof(uint64_t) * (NUM_SOME + 1));
                    mpt_tfrecord_index_destroy(ctx, loaded);
                }
                mpt_tfrecord_index_destroy(ctx, index);
                for (cut = 1; cut < some_ends[NUM_SOME]; cut++) { /* O-01 for the index */
                    mpt_result rc, expected = MPT_ERR_CORRUPT_DATA;
                    shim.files[shim_find("i")].size = some_ends[NUM_SOME] - cut;
                    for (i = 0; i < NUM_SOME; i++)
                        if (some_ends[i] == some_ends[NUM_SOME] - cut) expected = MPT_OK;
                    rc = mpt_tfrecord_index_build(ctx, &desc, &index);
                    CHECK_RESULT(ctx, rc, expected);
                    if (rc == MPT_OK) mpt_tfrecord_index_destroy(ctx, index);
                    if (seeks)
                        CHECK_RESULT(ctx, mpt_tfrecord_index_load(ctx, &desc, &loaded),
                                     MPT_ERR_CORRUPT_DATA);
                }
                shim.files[shim_find("i")].size = some_ends[NUM_SOME];
            }
        }
    }
    shim_reset();
    mpt_ctx_destroy(ctx);
}

/* An index that was not made from this file, or is no index: an error that names line or cause. */
MPT_TEST(index_that_does_not_fit_is_refused) {
    static const char *const wrong[] = {
        "",                                            /* of an empty file */
        "0 19\n",                                      /* of its beginning */
        "0 19\n19 16\n35 56\n91 17\n",                 /* one short */
        "0 19\n19 16\n35 56\n91 17\n108 33\n141 16\n", /* one more */
        "0 20\n20 15\n35 56\n91 17\n108 33\n",         /* too small a record */
        "0 20\n20 16\n36 55\n91 17\n108 33\n",         /* the first is wrong */
        "0 19\n19 16\n35 56\n91 18\n109 32\n",         /* the last is wrong */
        "0 19\n20 16\n36 55\n91 17\n108 33\n",         /* a gap */
        "0 19\n18 17\n35 56\n91 17\n108 33\n",         /* an overlap */
        "0 19\n19 16\n35 56\n91 17\n108 x\n",          /* no number */
        "0 19 19 16\n35 56\n91 17\n108 33\n",          /* no line */
        "0 19\n19 18446744073709551615\n",             /* wraps round */
        "0 99999999999999999999999\n",                 /* beyond 64 bits */
        "-1 19\n",
        "hello\n",
        "\n"};
    mpt_io io = shim_io();
    mpt_ctx *ctx = new_ctx(NULL);
    mpt_tfrecord_desc desc = shim_desc(&io, "i");
    mpt_tfrecord_index *index;
    size_t i;
    shim_reset();
    CHECK_OK(ctx, write_some(ctx, &io, "i", MPT_COMPRESSION_NONE));
    CHECK_RESULT(ctx, mpt_tfrecord_index_load(ctx, &desc, &index), MPT_ERR_IO); /* none */
    CHECK_EQ_INT(mpt_last_error(ctx)->native_code, ENOENT);
    for (i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        shim_put("i.idx", wrong[i], strlen(wrong[i]));
        CHECK_RESULT(ctx, mpt_tfrecord_index_load(ctx, &desc, &index), MPT_ERR_CORRUPT_DATA);
        CHECK_CONTAINS(mpt_last_error(ctx)->message, "i.idx: ");
        CHECK_CONTAINS(mpt_last_error(ctx)->message, "make the index anew");
    }
    shim_put("i.idx", "0 19\r\n19 16\r\n35 56\r\n91 17\r\n108 33", 33); /* by an editor */
    CHECK_OK(ctx, mpt_tfrecord_index_load(ctx, &desc, &index));
    mpt_tfrecord_index_destroy(ctx, index);
    shim.fail_read = 1;
    shim.num_reads = 0;
    shim.fail_reads = 1000;
    shim.read_errno = ENXIO;
    CHECK_RESULT(ctx, mpt_tfrecord_index_load(ctx, &desc, &index), MPT_ERR_IO);
    shim.fail_read = 0;
    shim_put("i", "", 0); /* no records: an empty index fits */
    shim_put("i.idx", "", 0);
    CHECK_OK(ctx, mpt_tfrecord_index_load(ctx, &desc, &index));
    CHECK_EQ_INT(index->num_records, 0);
    CHECK_EQ_INT(index->offsets[0], 0);
    mpt_tfrecord_index_destroy(ctx, index);
#ifdef MPTRAIN_ZLIB
    desc.io = NULL;
    desc.path = mpt_test_data("raw.tfrecord.gz");
    CHECK_RESULT(ctx, mpt_tfrecord_index_build(ctx, &desc, &index), MPT_ERR_UNSUPPORTED);
    CHECK_CONTAINS(mpt_last_error(ctx)->message, "gzip");
#endif
    shim_reset();
    mpt_ctx_destroy(ctx);
}

/* The walk reads few bytes of large records, and small records in few reads. */
MPT_TEST(index_walk_reads_headers_only) {
    static const struct {
        size_t size;
        int count;
    } cases[] = {{100000, 200}, {300, 5000}};
    mpt_io io = shim_io();
    mpt_ctx *ctx = new_ctx(NULL);
    static uint8_t payload[100000];
    int c, i;
    for (c = 0; c < 2; c++) {
        mpt_tfrecord_writer_desc wdesc;
        mpt_tfrecord_writer *w;
        mpt_tfrecord_desc desc = shim_desc(&io, "h");
        mpt_tfrecord_index *index;
        shim_reset();
        memset(&wdesc, 0, sizeof wdesc);
        wdesc.path = "h";
        wdesc.io = &io;
        CHECK_OK(ctx, mpt_tfrecord_writer_open(ctx, &wdesc, &w));
        for (i = 0; i < cases[c].count; i++)
            CHECK_OK(ctx, mpt_tfrecord_writer_write(w, bytes_of(payload, cases[c].size)));
        CHECK_OK(ctx, mpt_tfrecord_writer_finish(w));
        mpt_tfrecord_writer_close(w);
        CHECK_OK(ctx, mpt_tfrecord_index_build(ctx, &desc, &index));
        CHECK_EQ_INT(index->num_records, cases[c].count);
        CHECK_EQ_INT(index->offsets[cases[c].count], (cases[c].size + 16) * (size_t)cases[c].count);
        mpt_tfrecord_index_destroy(ctx, index);
        if (c == 0) CHECK(shim.num_bytes_read < 200 * 5000);
        if (c == 1) CHECK(shim.num_reads + shim.num_seeks < 100);
    }
    shim_reset();
    mpt_ctx_destroy(ctx);
}

/* ---- names ---------------------------------------------------------------------------------- */
static void join_name(const char *path, void *arg) {
    const char *slash = strrchr(path, '/');
    char *all = (char *)arg;
    snprintf(all + strlen(all), 200 - strlen(all), "%s ", slash ? slash + 1 : path);
}

static const char *listing(const char *directory, const char *pattern) {
    static char names[200];
    char path[700];
    names[0] = 0;
    snprintf(path, sizeof path, "%s/%s", directory, pattern);
    CHECK_EQ_INT(mpti_io_list(mpt_io_files(), path, NULL, join_name, names), MPT_OK);
    return names;
}

MPT_TEST(patterns_directories_and_names) {
    char directory[512], path[600];
    static const char *const files[] = {"a1", "a2", "b[1]", ".hidden", "x*y"};
    size_t i;
    snprintf(directory, sizeof directory, "%s", mpt_test_tmpfile("odd [dir]"));
    CHECK(mkdir(directory, 0700) == 0);
    for (i = 0; i < 5; i++) {
        snprintf(path, sizeof path, "%s/%s", directory, files[i]);
        mpt_test_write_file(path, "x", 1);
    }
    snprintf(path, sizeof path, "%s/sub", directory);
    CHECK(mkdir(path, 0700) == 0);
    CHECK_EQ_STR(listing(directory, "."), "a1 a2 b[1] x*y ");
    CHECK_EQ_STR(listing(directory, ""), "a1 a2 b[1] x*y ");
    CHECK_EQ_STR(listing(directory, "sub"), "");
    CHECK_EQ_STR(listing(directory, "a1"), "a1 ");
    CHECK_EQ_STR(listing(directory, "b[1]"), "b[1] "); /* a name that is there is no pattern */
    CHECK_EQ_STR(listing(directory, "x*y"), "x*y ");
    CHECK_EQ_STR(listing(directory, "none"), "");
    CHECK_EQ_STR(listing(directory, "a1/none"), "");
    snprintf(path, sizeof path, "%s", mpt_test_tmpdir());
    CHECK_EQ_STR(listing(path, "odd*/a*"), "a1 a2 ");
    CHECK_EQ_STR(listing(path, "odd*/[ab]?"), "a1 a2 ");
    CHECK_EQ_STR(listing(path, "odd*/s*"), ""); /* a directory */
    CHECK_EQ_STR(listing(path, "none*/a*"), "");
}

/* A directory that may not be read is an error, not an empty one. Root may read all: a child gives
   its rights up first. */
MPT_TEST(unreadable_directories_are_errors) {
    char directory[512], pattern[600];
    int status;
    pid_t child;
    snprintf(directory, sizeof directory, "%s", mpt_test_tmpfile("locked"));
    snprintf(pattern, sizeof pattern, "%s/*", directory);
    CHECK(mkdir(directory, 0700) == 0 && chmod(directory, 0000) == 0);
    CHECK(chmod(mpt_test_tmpdir(), 0755) == 0);
    child = fork();
    if (child == 0) {
        mpt_error err;
        int count = 0, bad = 0;
        if (getuid() == 0 && setuid(65534) != 0) _exit(9);
        memset(&err, 0, sizeof err);
        bad |= mpti_io_list(mpt_io_files(), directory, &err, count_name, &count) != MPT_ERR_IO;
        bad |= (err.native_code != EACCES) << 1;
        memset(&err, 0, sizeof err);
        bad |= (mpti_io_list(mpt_io_files(), pattern, &err, count_name, &count) != MPT_ERR_IO) << 2;
        bad |= (err.native_code != EACCES) << 3;
        _exit(bad);
    }
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(chmod(directory, 0700) == 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 9) SKIP("can't give up root's rights");
    CHECK_EQ_INT(status, 0);
}

/* Back and forth: what a block held before a jump is not what lies before the place jumped to. */
MPT_TEST(seeks_in_any_order_deliver_the_right_record) {
    mpt_ctx *ctx = NULL;
    const char *path = mpt_test_tmpfile("jumps.tfrecord");
    mpt_tfrecord_writer_desc wd;
    mpt_tfrecord_writer *w = NULL;
    mpt_tfrecord_desc d;
    mpt_tfrecord *f = NULL;
    mpt_bytes record;
    uint8_t payload[81];
    uint32_t seed = 1;
    int i, k;
    CHECK_OK(NULL, mpt_ctx_create(NULL, &ctx));
    memset(&wd, 0, sizeof wd);
    memset(&d, 0, sizeof d);
    wd.path = d.path = path;
    CHECK_OK(ctx, mpt_tfrecord_writer_open(ctx, &wd, &w));
    memset(payload, 0, sizeof payload);
    record.data = payload;
    record.size = sizeof payload;
    for (i = 0; i < 20000; i++) {
        memcpy(payload, &i, sizeof i);
        CHECK_OK(ctx, mpt_tfrecord_writer_write(w, record));
    }
    CHECK_OK(ctx, mpt_tfrecord_writer_finish(w));
    mpt_tfrecord_writer_close(w);
    CHECK_OK(ctx, mpt_tfrecord_open(ctx, &d, &f));
    for (i = 0; i < 5000; i++) {
        int at;
        seed = seed * 1664525u + 1013904223u;
        at = (int)(seed >> 8) % 20000;
        for (k = 0; k < 3 && at >= 0; k++, at -= 1 + (int)(seed >> 28)) { /* and a few back */
            int got;
            CHECK_OK(ctx, mpt_tfrecord_seek(f, at, (uint64_t)at * (sizeof payload + 16)));
            CHECK_OK(ctx, mpt_tfrecord_next(f, &record));
            memcpy(&got, record.data, sizeof got);
            CHECK_EQ_INT(got, at);
        }
    }
    mpt_tfrecord_close(f);
    mpt_ctx_destroy(ctx);
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(o05_crc32c_known_values_at_each_alignment_and_path),
    MPT_TEST_CASE(crc32c_paths_agree_at_any_length_and_alignment),
    MPT_TEST_CASE(crc32c_constants_are_powers_of_x),
    MPT_TEST_CASE(fixtures_read_as_tensorflow_reads_them),
    MPT_TEST_CASE(o01_every_cut_is_found),
    MPT_TEST_CASE(o01_message_of_a_cut),
    MPT_TEST_CASE(every_flipped_byte_is_found),
    MPT_TEST_CASE(mutants_never_give_a_wrong_record),
    MPT_TEST_CASE(o02_compression_is_told_from_the_content),
    MPT_TEST_CASE(gzip_members_follow_each_other_and_nothing_else_does),
    MPT_TEST_CASE(o03_compressed_length_is_not_believed),
    MPT_TEST_CASE(o03_lengths_are_checked_before_memory_is_asked_for),
    MPT_TEST_CASE(o04_empty_files_and_empty_records),
    MPT_TEST_CASE(small_files_cost_little_memory),
    MPT_TEST_CASE(o06_large_records_and_the_limit),
    MPT_TEST_CASE(records_around_the_block_size),
    MPT_TEST_CASE(retained_records_stay_as_they_were),
    MPT_TEST_CASE(o29_storage_that_fails_for_a_moment),
    MPT_TEST_CASE(o29_every_read_fails_once_for_good),
    MPT_TEST_CASE(missing_files_and_directories_are_io_errors_with_errno),
    MPT_TEST_CASE(policies_for_damaged_records),
    MPT_TEST_CASE(records_beyond_the_limit_are_passed_over),
    MPT_TEST_CASE(seek_delivers_the_record_and_clears_the_failure),
    MPT_TEST_CASE(seeks_in_any_order_deliver_the_right_record),
    MPT_TEST_CASE(growing_files_and_pipes),
    MPT_TEST_CASE(every_allocation_fails),
    MPT_TEST_CASE(next_can_be_called_again_after_lack_of_memory),
    MPT_TEST_CASE(o05_bytes_of_a_record),
    MPT_TEST_CASE(writing_is_all_or_nothing),
    MPT_TEST_CASE(a_writer_that_has_failed_takes_no_more),
    MPT_TEST_CASE(a_directory_is_refused_before_the_work),
    MPT_TEST_CASE(a_device_or_pipe_is_not_replaced),
    MPT_TEST_CASE(killed_writers_leave_no_file_under_the_name),
    MPT_TEST_CASE(index_is_built_saved_and_loaded),
    MPT_TEST_CASE(index_that_does_not_fit_is_refused),
    MPT_TEST_CASE(index_walk_reads_headers_only),
    MPT_TEST_CASE(patterns_directories_and_names),
    MPT_TEST_CASE(unreadable_directories_are_errors),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
