/* data.h - bench kinds of the data path: crc, records, decode, input

   The files are written first and so lie in the page cache: what is measured is the library, not a
   disk. The pictures are smooth noise as a camera gives it, encoded by stb_image_write. */
#ifndef MPT_BENCH_DATA_H
#define MPT_BENCH_DATA_H

#include "bench/measure.h"

#include <fcntl.h>
#include <sys/stat.h>

#if defined(__has_include)
#if __has_include(<stb/stb_image_write.h>)
#define BENCH_HAS_JPEG 1
#define STB_IMAGE_WRITE_STATIC
#define STB_IMAGE_WRITE_IMPLEMENTATION
#include <stb/stb_image_write.h>
#endif
#endif

/* A number that the compiler can't leave out: results are added to it. */
static uint64_t bench_fill(uint8_t *p, size_t n, uint64_t seed) { /* xorshift64 */
    size_t i;

    for (i = 0; i < n; i++) {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        p[i] = (uint8_t)(seed >> 32);
    }
    return seed;
}

/* ---- crc: the checksum alone, against reading the same bytes
   ------------------------------------- */
typedef struct bench_memory {
    uint8_t *data;
    size_t size, piece; /* bytes in all, in one call */
    uint64_t sum;       /* keeps the compiler from leaving the work out */
} bench_memory;

static int bench_crc_run(void *user) {
    bench_memory *m = (bench_memory *)user;
    size_t at;

    for (at = 0; at + m->piece <= m->size; at += m->piece)
        m->sum += mpt_crc32c(0, m->data + at, m->piece);
    return 0;
}

/* what memory gives: eight sums, so that loads are the limit */
static int bench_read_run(void *user) {
    bench_memory *m = (bench_memory *)user;
    uint64_t sum[8] = {0}, word[8];
    size_t at;
    int k;

    for (at = 0; at + sizeof word <= m->size; at += sizeof word) {
        memcpy(word, m->data + at, sizeof word);
        for (k = 0; k < 8; k++) sum[k] += word[k];
    }
    for (k = 0; k < 8; k++) m->sum += sum[k];
    return 0;
}

static int bench_crc(mpt_ctx *ctx, const bench_options *o) {
    bench_memory m;
    bench_case cases[2];
    int code;

    (void)ctx;
    memset(&m, 0, sizeof m);
    m.piece = (size_t)o->record_bytes;
    m.size = (size_t)o->megabytes << 20;
    if (m.size < m.piece) m.size = m.piece;
    m.data = (uint8_t *)malloc(m.size);
    if (!m.data) return cli_error("bench", CLI_EXIT_FAILURE, "no memory for %zu bytes", m.size);
    bench_fill(m.data, m.size, 1);
    cases[0] = bench_make("mpt_crc32c, one record a call", "bytes",
                          (double)(m.size / m.piece * m.piece), bench_crc_run, &m);
    cases[0].reference = 1;
    cases[0].limit_name = "reading the bytes from memory";
    cases[1] = bench_make("read 64-bit words from memory", "bytes", (double)m.size, bench_read_run,
                          &m);
    code = bench_run(cases, 2, o->rounds);
    if (!code) bench_print("crc", cases, 2, o->json);
    free(m.data);
    return code;
}

/* ---- files to work on
   ---------------------------------------------------------------------------- */
typedef struct bench_files {
    char folder[512]; /* "" when the files are the user's */
    char path[640];   /* of the file that bench wrote */
    const char *const *paths;
    const char *own[1];
    int num_paths;
    double bytes;
} bench_files;

static void bench_files_remove(bench_files *f) {
    if (!f->folder[0]) return;
    remove(f->path);
    remove(f->folder);
}

/* The user's files, or a new one in a folder of its own that write() fills. */
static int bench_files_make(mpt_ctx *ctx, const bench_options *o, bench_files *f,
                            mpt_result (*write)(mpt_ctx *ctx, mpt_tfrecord_writer *w,
                                                const bench_options *o)) {
    const char *base = getenv("TMPDIR");
    mpt_tfrecord_writer_desc desc;
    mpt_tfrecord_writer *w = NULL;
    mpt_result rc;
    struct stat info;
    int i;

    memset(f, 0, sizeof *f);
    f->paths = o->files.items;
    f->num_paths = o->files.count;
    for (i = 0; i < f->num_paths; i++) {
        if (cli_refuse_dash("bench", f->paths[i])) return CLI_EXIT_FAILURE;
        if (stat(f->paths[i], &info))
            return cli_error("bench", CLI_EXIT_FAILURE, "%s: can't open it: %s", f->paths[i],
                             cli_errno_text(errno));
        if (!S_ISREG(info.st_mode))
            return cli_error("bench", CLI_EXIT_FAILURE,
                             "%s: is no regular file, which alone can be read again and again",
                             f->paths[i]);
        f->bytes += (double)info.st_size;
    }
    if (f->num_paths > 0) return 0;
    snprintf(f->folder, sizeof f->folder, "%s/mptrain-bench-XXXXXX",
             base && base[0] ? base : "/tmp");
    if (!mkdtemp(f->folder)) {
        f->folder[0] = 0;
        return cli_error("bench", CLI_EXIT_FAILURE, "can't make a folder below %s: set TMPDIR",
                         base ? base : "/tmp");
    }
    snprintf(f->path, sizeof f->path, "%s/bench.tfrecord", f->folder);
    memset(&desc, 0, sizeof desc);
    desc.path = f->path;
    rc = mpt_tfrecord_writer_open(ctx, &desc, &w);
    if (rc == MPT_OK) rc = write(ctx, w, o);
    if (rc == MPT_OK) rc = mpt_tfrecord_writer_finish(w);
    mpt_tfrecord_writer_close(w);
    if (rc) return bench_fail(ctx);
    f->own[0] = f->path;
    f->paths = f->own;
    f->num_paths = 1;
    if (stat(f->path, &info) == 0) f->bytes = (double)info.st_size;
    return 0;
}

/* ---- records: the reader, against a loop of pread and CRC
   ----------------------------------------- */
typedef struct bench_reader {
    mpt_ctx *ctx;
    const bench_files *files;
    int64_t max_record_bytes;
    int skip_crc;
    uint8_t *block;
    size_t block_bytes;
    uint64_t sum;
} bench_reader;

static mpt_result bench_write_random(mpt_ctx *ctx, mpt_tfrecord_writer *w, const bench_options *o) {
    int64_t n = (o->megabytes << 20) / o->record_bytes + 1, i;
    uint8_t *payload = (uint8_t *)malloc((size_t)o->record_bytes);
    mpt_result rc = payload ? MPT_OK : MPT_ERR_OUT_OF_MEMORY;
    uint64_t seed = 1;
    mpt_bytes record;

    (void)ctx;
    record.data = payload;
    record.size = (size_t)o->record_bytes;
    for (i = 0; i < n && rc == MPT_OK; i++) {
        seed = bench_fill(payload, record.size < 4096 ? record.size : 4096, seed);
        rc = mpt_tfrecord_writer_write(w, record);
    }
    free(payload);
    return rc;
}

static int bench_records_run(void *user) {
    bench_reader *r = (bench_reader *)user;
    int i;

    for (i = 0; i < r->files->num_paths; i++) {
        mpt_tfrecord_desc desc;
        mpt_tfrecord *f = NULL;
        mpt_bytes record;
        mpt_result rc;

        memset(&desc, 0, sizeof desc);
        desc.path = r->files->paths[i];
        desc.skip_crc = r->skip_crc;
        desc.max_record_bytes = (uint64_t)r->max_record_bytes;
        rc = mpt_tfrecord_open(r->ctx, &desc, &f);
        while (rc == MPT_OK && (rc = mpt_tfrecord_next(f, &record)) == MPT_OK)
            r->sum += record.size;
        mpt_tfrecord_close(f);
        if (rc != MPT_END) return bench_fail(r->ctx);
    }
    return 0;
}

/* no framing, no copy, no error handling: the least there is */
static int bench_pread_run(void *user) {
    bench_reader *r = (bench_reader *)user;
    int i;

    for (i = 0; i < r->files->num_paths; i++) {
        int fd = open(r->files->paths[i], O_RDONLY | O_CLOEXEC);
        int64_t at = 0, n;

        if (fd < 0)
            return cli_error("bench", CLI_EXIT_FAILURE, "%s: can't open it: %s", r->files->paths[i],
                             cli_errno_text(errno));
        while ((n = (int64_t)pread(fd, r->block, r->block_bytes, (off_t)at)) > 0) {
            r->sum += mpt_crc32c(0, r->block, (size_t)n);
            at += n;
        }
        close(fd);
    }
    return 0;
}

static int bench_records(mpt_ctx *ctx, const bench_options *o) {
    bench_files files;
    bench_case cases[3];
    bench_reader r, unchecked;
    int code = bench_files_make(ctx, o, &files, bench_write_random);

    memset(&r, 0, sizeof r);
    r.ctx = ctx;
    r.files = &files;
    r.max_record_bytes = o->max_record_bytes;
    /* the fastest of 64 KiB .. 1 MiB where this was written: it fits L2 */
    r.block_bytes = 256 * 1024;
    /* on a page: copies from the page cache to addresses like malloc's ran four times slower */
    if (posix_memalign((void **)&r.block, 4096, r.block_bytes)) r.block = NULL;
    if (!code && !r.block) code = cli_error("bench", CLI_EXIT_FAILURE, "no memory");
    unchecked = r;
    unchecked.skip_crc = 1;
    cases[0] = bench_make("read and check records", "bytes", files.bytes, bench_records_run, &r);
    cases[0].reference = 1;
    cases[0].limit_name = "pread + CRC";
    cases[1] = bench_make("pread + CRC loop", "bytes", files.bytes, bench_pread_run, &r);
    cases[2] = bench_make("read records, CRC off", "bytes", files.bytes, bench_records_run,
                          &unchecked);
    if (!code) code = bench_run(cases, 3, o->rounds);
    if (!code) bench_print("records", cases, 3, o->json);
    free(r.block);
    bench_files_remove(&files);
    return code;
}

/* ---- decode and input: pictures
   ------------------------------------------------------------------- */
#ifdef BENCH_HAS_JPEG
/* ImageNet's usual size */
enum { BENCH_IMAGE_WIDTH = 500, BENCH_IMAGE_HEIGHT = 375, BENCH_NUM_IMAGES = 16 };

typedef struct bench_jpeg {
    uint8_t *data;
    size_t size, capacity;
} bench_jpeg;

static void bench_jpeg_append(void *user, void *data, int size) {
    bench_jpeg *j = (bench_jpeg *)user;

    if (j->size + (size_t)size > j->capacity) return; /* seen by the caller: size stays below */
    memcpy(j->data + j->size, data, (size_t)size);
    j->size += (size_t)size;
}

/* Waves of several lengths with a little noise: at quality 90 about 110 KB, as ImageNet's are. */
static void bench_draw(uint8_t *rgb, int number) {
    uint32_t seed = (uint32_t)number * 2654435761u + 1;
    int x, y, c;

    for (y = 0; y < BENCH_IMAGE_HEIGHT; y++)
        for (x = 0; x < BENCH_IMAGE_WIDTH; x++)
            for (c = 0; c < 3; c++) {
                int wave = (x * (3 + number % 5) + y * (2 + c)) % 256, v;
                seed = seed * 1664525u + 1013904223u;
                v = (wave < 128 ? wave : 255 - wave) + 40 + (int)(seed >> 27);
                *rgb++ = (uint8_t)(v > 255 ? 255 : v);
            }
}

static bool bench_encode(bench_jpeg *j, int number) {
    uint8_t *rgb = (uint8_t *)malloc((size_t)BENCH_IMAGE_WIDTH * BENCH_IMAGE_HEIGHT * 3);
    bool ok = false;

    j->capacity = (size_t)BENCH_IMAGE_WIDTH * BENCH_IMAGE_HEIGHT * 3;
    j->size = 0;
    j->data = (uint8_t *)malloc(j->capacity);
    if (rgb && j->data) {
        bench_draw(rgb, number);
        ok = stbi_write_jpg_to_func(bench_jpeg_append, j, BENCH_IMAGE_WIDTH, BENCH_IMAGE_HEIGHT, 3,
                                    rgb, 90) != 0;
    }
    free(rgb);
    return ok;
}

typedef struct bench_pictures {
    mpt_ctx *ctx;
    bench_jpeg jpeg[BENCH_NUM_IMAGES];
    const bench_files *files;
    const bench_options *options;
    int64_t threads;
} bench_pictures;

static int bench_pictures_make(mpt_ctx *ctx, bench_pictures *p) {
    int i;

    memset(p, 0, sizeof *p);
    p->ctx = ctx;
    for (i = 0; i < BENCH_NUM_IMAGES; i++)
        if (!bench_encode(&p->jpeg[i], i))
            return cli_error("bench", CLI_EXIT_FAILURE, "can't encode a picture: no memory?");
    return 0;
}

static void bench_pictures_free(bench_pictures *p) {
    int i;

    for (i = 0; i < BENCH_NUM_IMAGES; i++) free(p->jpeg[i].data);
}

static int bench_decode_run(void *user) {
    bench_pictures *p = (bench_pictures *)user;
    int i;

    for (i = 0; i < BENCH_NUM_IMAGES; i++) {
        mpt_bytes encoded;
        mpt_image image;

        encoded.data = p->jpeg[i].data;
        encoded.size = p->jpeg[i].size;
        if (mpt_image_decode(p->ctx, encoded, NULL, &image)) return bench_fail(p->ctx);
        mpt_image_free(p->ctx, &image);
    }
    return 0;
}

/* a context a thread: errors are kept in it */
static mpt_result bench_decode_chunk(int64_t chunk, void *user) {
    bench_pictures *p = (bench_pictures *)user;
    mpt_ctx *ctx = NULL;
    mpt_result rc = mpt_ctx_create(NULL, &ctx);
    mpt_bytes encoded;
    mpt_image image;

    encoded.data = p->jpeg[chunk % BENCH_NUM_IMAGES].data;
    encoded.size = p->jpeg[chunk % BENCH_NUM_IMAGES].size;
    if (rc == MPT_OK) rc = mpt_image_decode(ctx, encoded, NULL, &image);
    if (rc == MPT_OK) mpt_image_free(ctx, &image);
    mpt_ctx_destroy(ctx);
    return rc;
}

static int bench_decode(mpt_ctx *ctx, const bench_options *o) {
    bench_pictures p;
    bench_case cases[1];
    int code = bench_pictures_make(ctx, &p);

    cases[0] = bench_make("500 x 375 JPEG, one thread", "images", BENCH_NUM_IMAGES,
                          bench_decode_run, &p);
    if (!code) code = bench_run(cases, 1, o->rounds);
    if (!code) bench_print("decode", cases, 1, o->json);
    bench_pictures_free(&p);
    return code;
}

static mpt_result bench_write_pictures(mpt_ctx *ctx, mpt_tfrecord_writer *w,
                                       const bench_options *o) {
    int64_t n = 0, bytes = 0, label;
    bench_pictures p;
    mpt_example *e = NULL;
    mpt_bytes value;
    mpt_result rc;

    if (bench_pictures_make(ctx, &p)) return MPT_ERR_OUT_OF_MEMORY;
    rc = mpt_example_create(ctx, &e);
    while (rc == MPT_OK && bytes < o->megabytes << 20) {
        value.data = p.jpeg[n % BENCH_NUM_IMAGES].data;
        value.size = p.jpeg[n % BENCH_NUM_IMAGES].size;
        label = n++ % 1000 + 1;
        mpt_example_clear(e);
        rc = mpt_example_add_bytes(e, "image/encoded", &value, 1);
        if (rc == MPT_OK) rc = mpt_example_add_int64s(e, "image/class/label", &label, 1);
        if (rc == MPT_OK) rc = mpt_example_encode(e, &value);
        if (rc == MPT_OK) rc = mpt_tfrecord_writer_write(w, value);
        bytes += (int64_t)value.size;
    }
    mpt_example_destroy(e);
    bench_pictures_free(&p);
    return rc;
}

static mpt_result bench_open_loader(bench_pictures *p, mpt_loader **out) {
    mpt_loader_desc d;

    memset(&d, 0, sizeof d);
    d.paths = p->files->paths;
    d.num_paths = p->files->num_paths;
    d.height = d.width = 224;
    d.channels = 3;
    d.num_classes = 1000;
    d.augment = MPT_AUGMENT_IMAGENET;
    d.num_workers = (int)p->options->threads;
    d.max_record_bytes = (uint64_t)p->options->max_record_bytes;
    return mpt_loader_create(p->ctx, &d, out);
}

static int bench_input_run(void *user) { /* one epoch */
    bench_pictures *p = (bench_pictures *)user;
    mpt_loader *ld = NULL;
    mpt_batch batch;
    mpt_result rc = bench_open_loader(p, &ld);

    while (rc == MPT_OK) rc = mpt_loader_next(ld, &batch);
    mpt_loader_destroy(ld);
    return rc == MPT_END ? 0 : bench_fail(p->ctx);
}

/* as many pictures as bench decode would, on all threads */
static int bench_decode_all_run(void *user) {
    bench_pictures *p = (bench_pictures *)user;
    return mpt_parallel_for(p->ctx, BENCH_NUM_IMAGES * 4, bench_decode_chunk, p) ? CLI_EXIT_FAILURE
                                                                                 : 0;
}

static int bench_input(mpt_ctx *ctx, const bench_options *o) {
    bench_files files;
    bench_pictures p;
    bench_case cases[2];
    mpt_loader *ld = NULL;
    double images = 0;
    int code = bench_files_make(ctx, o, &files, bench_write_pictures);

    if (!code) code = bench_pictures_make(ctx, &p);
    else memset(&p, 0, sizeof p);
    p.files = &files;
    p.options = o;
    if (!code && bench_open_loader(&p, &ld)) code = bench_fail(ctx);
    images = (double)mpt_loader_get_info(ld).num_records;
    mpt_loader_destroy(ld);
    cases[0] = bench_make("records to 224 x 224 FP32 batches", "images", images, bench_input_run,
                          &p);
    cases[0].reference = 1;
    cases[0].limit_name = "decoding alone";
    cases[1] = bench_make("decode alone, the same threads", "images", BENCH_NUM_IMAGES * 4,
                          bench_decode_all_run, &p);
    if (!code) code = bench_run(cases, 2, o->rounds);
    if (!code) bench_print("input", cases, 2, o->json);
    bench_pictures_free(&p);
    bench_files_remove(&files);
    return code;
}
#else
static int bench_decode(mpt_ctx *ctx, const bench_options *o) {
    (void)ctx;
    (void)o;
    return cli_error(
        "bench", CLI_EXIT_FAILURE,
        "built without stb_image_write.h, which makes the pictures (Debian: libstb-dev)");
}

static int bench_input(mpt_ctx *ctx, const bench_options *o) {
    return bench_decode(ctx, o);
}
#endif

#endif /* MPT_BENCH_DATA_H */
