/* =================================================================================================
 * >>start   mptrain.h 0.1.0: train image classifiers in mixed precision from TFRecords, in plain C
 * =================================================================================================
 *
 * Put the header anywhere, and in ONE file of your program write
 *
 *     #define MPTRAIN_IMPLEMENTATION
 *     #include "mptrain.h"
 *
 * before other headers; elsewhere include it plainly. Then build with
 *
 *     cc -O2 app.c -lm -lpthread
 *
 * Pictures need stb_image.h on the include path (Debian: libstb-dev); compressed records need
 * -DMPTRAIN_ZLIB and -lz. Nothing else is needed. A program that goes over a data set in batches:
 *
 *     #define MPTRAIN_IMPLEMENTATION
 *     #include "mptrain.h"
 *     #include <stdio.h>
 *
 *     int main(int argc, char **argv) {
 *         mpt_ctx *ctx = NULL;
 *         mpt_loader *data = NULL;
 *         mpt_loader_desc desc = {0};
 *         mpt_batch batch;
 *         mpt_result rc;
 *
 *         if (mpt_ctx_create(NULL, &ctx)) return 1;
 *         desc.paths = (const char *const *)argv + 1;
 *         desc.num_paths = argc - 1;
 *         desc.height = desc.width = 224;
 *         desc.channels = 3;
 *         desc.num_classes = 1000;
 *         desc.augment = MPT_AUGMENT_IMAGENET;
 *         rc = mpt_loader_create(ctx, &desc, &data);
 *         while (rc == MPT_OK && (rc = mpt_loader_next(data, &batch)) == MPT_OK)
 *             printf("batch %d: %d pictures\n", (int)batch.index, (int)batch.num_valid);
 *         if (rc != MPT_END) fprintf(stderr, "%s\n", mpt_last_error(ctx)->message);
 *         mpt_loader_destroy(data);
 *         mpt_ctx_destroy(ctx);
 *         return rc != MPT_END;
 *     }
 *
 * This version holds the way of the data, from bytes in files to batches in memory. The way from
 * there to trained weights is being written; the license is at the end of the file.
 */

/* =================================================================================================
 * >>toc   Contents: search for a tag to get to its chapter
 * =================================================================================================
 *
 *   I    Manual
 *   >>read        How to read this file
 *   >>options     What can be defined before the include
 *   >>limits      What it does not do, limits, trust
 *
 *   II   API
 *   >>api-core    Version, results, errors, hooks, context
 *   >>api-tensor  Tensors: a view of numbers
 *   >>api-data    Storage, records, tf.Example, pictures, batches
 *
 *   III  Implementation
 *   >>base        1 Foundations: errors, memory, random numbers, threads
 *   >>storage     2.1 Storage: files, retries, checksums, compressed streams
 *   >>tfrecord    2.2 Records: framing, reading, writing, index
 *   >>example     2.3 tf.Example: protobuf, reading and writing
 *   >>image       3.1 Images: from encoded bytes to pixels
 *   >>dataset     3.2 Data sets: which files, how many records, who reads which
 *   >>loader      3.3 Loading: from segments to batches
 *   >>position    3.4 Position: where a loader stands, saved and restored
 */

/* =================================================================================================
 * >>read   How to read this file
 * =================================================================================================
 *
 * The header follows one batch from bytes to numbers: bytes (>>base), records (>>tfrecord),
 * pictures (>>image), batches (>>loader). Each chapter of the implementation opens with the same
 * five lines - problem, idea, shapes, where it is tested, what to read next - and goes from the
 * small to the large. Public names begin with mpt_, private ones with mpti_.
 *
 * Five habits hold everywhere:
 *
 * ERRORS. A function that can fail returns an mpt_result: 0 is success, MPT_END is no failure,
 * errors are negative. Results come out through the last parameter. The context keeps the last
 * error with a message that names the file, record, offset or field, and says what to do. Nothing
 * here exits, aborts or prints. After a failure an object is as it was, or can only be destroyed.
 *
 * DESCS. What can be chosen stands in a struct named _desc. All zero is a complete choice, and each
 * field's comment tells what zero stands for. In C++ write `mpt_loader_desc d = {};` and assign.
 *
 * OWNERSHIP. create and destroy, open and close are pairs; the latter take NULL. What a call lends
 * you (a record, a batch) is valid until the next call on the object that lent it, unless it says
 * more.
 *
 * THREADS. A context belongs to one thread, and so does all that is made from it. Threads of the
 * library's own are joined before destroy returns.
 *
 * DETERMINISM. What comes out is a function of the data, the desc and the seed. The number of
 * threads and the order in which they run change the speed, not a single bit.
 */

/* =================================================================================================
 * >>options   What can be defined before the include
 * =================================================================================================
 *
 *   name                    where              effect
 *   MPTRAIN_IMPLEMENTATION  one file           compiles the implementation there
 *   MPTRAIN_STATIC          that same file     every function is static: a private copy
 *   MPTRAIN_ZLIB            implementation     GZIP and ZLIB records, through zlib (-lz)
 *   MPTRAIN_NO_IMAGE        implementation     no decoder; pictures are MPT_ERR_UNSUPPORTED
 *   MPTRAIN_NO_THREADS      implementation     no threads; the caller does all the work
 *   MPT_ASSERT(condition)   implementation     checks for mistakes of ours; nothing by default
 *   MPT_API                 every file         how public functions are declared (extern)
 *
 * No option changes a public struct. mpt_build_info() tells what was compiled in. stb_image.h is
 * used where it is found, as "stb_image.h" or <stb/stb_image.h>, and compiled static, so it can't
 * meet another copy. If your own file includes it too, include it before this header or in another
 * file. POSIX 2008, C99 or later or C++17, gcc or clang.
 */

/* =================================================================================================
 * >>limits   What it does not do, limits, trust
 * =================================================================================================
 *
 * mptrain does not read SequenceExamples beyond their context, ArrayRecord or Riegeli files; decode
 * GIF, WebP, TIFF, PSD, HDR, PNM or TGA pictures; run on Windows; hold more than one picture and
 * one label of a record.
 *
 *   a record          max_record_bytes, by default 1 GiB, for reading and writing
 *   a picture         max_pixels 100,000,000 and max_bytes 256 MiB, checked before decoding
 *   a picture's side  16384 in a batch
 *   records a file    2^39; files of a loader 2^23 (both are parts of a 64-bit sample id)
 *
 * Files may be hostile: lengths, headers, tables and checksums are checked before they are
 * believed, memory is taken for bytes that are there and not for bytes that are promised, and
 * whatever is wrong ends in an error. Descs, callbacks and pointers are trusted: they are the
 * program itself. States of mpt_loader_get_state are checked like files.
 *
 * Memory of a loader, per lane: shuffle_buffer records as they are in the file (the blocks that
 * they share make it up to twice that for large records), (interleave + 1) blocks of at least 256
 * KiB, two batches of decoded pixels, and two batches of dtype.
 */

/* The C library shows POSIX 2008 (pread, fsync, clock_gettime, threads) only when asked, if the
   compiler runs in strict mode; so the implementation asks before the first system header. */
#if defined(MPTRAIN_IMPLEMENTATION) && defined(__STRICT_ANSI__) && !defined(_POSIX_C_SOURCE) && \
    !defined(_GNU_SOURCE)
#define _POSIX_C_SOURCE 200809L
#endif

#ifndef MPTRAIN_H
#define MPTRAIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef MPT_API
#ifdef MPTRAIN_STATIC /* needs MPTRAIN_IMPLEMENTATION in the same file */
#define MPT_API static __attribute__((unused))
#else
#define MPT_API extern
#endif
#endif
#if defined(__GNUC__) || defined(__clang__)
#define MPT_CHECKED __attribute__((warn_unused_result))
#else
#define MPT_CHECKED
#endif

/* =================================================================================================
 * >>api-core   Version, results, errors, hooks, context
 * =================================================================================================
 */

#define MPT_VERSION_MAJOR 0
#define MPT_VERSION_MINOR 1
#define MPT_VERSION_PATCH 0
#define MPT_VERSION_STRING "0.1.0"
#define MPT_ABI_VERSION 1 /* goes up when a public struct changes */

MPT_API const char *mpt_version(void);    /* "0.1.0" */
MPT_API const char *mpt_build_info(void); /* version, ABI and the options that were compiled in */

/* Frozen: numbers are never given anew, only appended. Zero is success; MPT_END is no failure. */
typedef enum mpt_result {
    MPT_OK = 0,
    MPT_END = 1, /* no more records, or the end of an epoch */
    MPT_ERR_INVALID_ARGUMENT = -1,
    MPT_ERR_INVALID_STATE = -2,
    MPT_ERR_OUT_OF_MEMORY = -3,
    MPT_ERR_OUT_OF_DEVICE_MEMORY = -4,
    MPT_ERR_IO = -5,           /* storage failed; the data may be fine */
    MPT_ERR_CORRUPT_DATA = -6, /* the data are damaged, or not what they should be */
    MPT_ERR_UNSUPPORTED = -7,
    MPT_ERR_DEVICE = -8,
    MPT_ERR_COMM = -9,
    MPT_ERR_INTERNAL = -10,
    MPT_ERR_TIMEOUT = -11
} mpt_result;
MPT_API const char *mpt_result_string(mpt_result r); /* "corrupt data"; never NULL */

typedef struct mpt_error {
    mpt_result code;
    int native_code;           /* errno and the like, 0 if none */
    const char *native_domain; /* "errno", "zlib" or NULL */
    const char *file;          /* where in the library; static text */
    int line;
    char message[512]; /* what, where, and what to do; one line of UTF-8 */
} mpt_error;

/* Memory hooks. All zero: malloc and free. Both functions or neither. They are called from several
   threads at once. align is a power of two; size is never 0; free gets the size that alloc got. */
typedef struct mpt_allocator {
    void *(*alloc)(size_t size, size_t align, void *user); /* NULL: no memory */
    void (*free)(void *p, size_t size, void *user);
    void *user;
} mpt_allocator;

enum { MPT_LOG_DEBUG = 0, MPT_LOG_INFO = 1, MPT_LOG_WARNING = 2, MPT_LOG_ERROR = 3 };

/* All zero: silent. Called on the thread that called the library, never from a worker. Each error
   that a function returns is logged once before it returns. */
typedef struct mpt_logger {
    void (*log)(int level, const char *message, void *user); /* message without a newline */
    void *user;
} mpt_logger;

/* A context belongs to one thread: it, and all that is made from it, is used by that thread alone.
   Other threads create contexts of their own. */
typedef struct mpt_ctx mpt_ctx;

typedef struct mpt_ctx_desc {
    int num_threads; /* for mpt_parallel_for, this one included; default: number of cores */
    mpt_allocator allocator;
    mpt_logger logger;
} mpt_ctx_desc;

/* desc NULL: all defaults. */
MPT_API MPT_CHECKED mpt_result mpt_ctx_create(const mpt_ctx_desc *desc, mpt_ctx **out);
/* Last of all that was made from it. NULL is fine, as for every destroy and close. */
MPT_API void mpt_ctx_destroy(mpt_ctx *ctx);
/* Of the last call that failed; never NULL. */
MPT_API const mpt_error *mpt_last_error(const mpt_ctx *ctx);

/* Calls fn(chunk, user) for chunk = 0 .. num_chunks-1 on the context's threads and waits. Work is
   cut into chunks by the caller, never by the number of threads, so that sums come out the same on
   any machine. The first failure (lowest chunk) is returned; chunks not begun by then are left
   out. fn may not call mpt_parallel_for on the same context. */
typedef mpt_result (*mpt_chunk_fn)(int64_t chunk, void *user);
MPT_API MPT_CHECKED mpt_result mpt_parallel_for(mpt_ctx *ctx, int64_t num_chunks, mpt_chunk_fn fn,
                                                void *user);

/* CRC-32C (Castagnoli, RFC 3720 appendix B.4), as TFRecords use it, before masking. Start with
   crc = 0; the result of one call continues the next. */
MPT_API uint32_t mpt_crc32c(uint32_t crc, const void *data, size_t size);
/* CRC-32 of zlib, PNG and gzip (ISO 3309), for comparison with other tools. */
MPT_API uint32_t mpt_crc32(uint32_t crc, const void *data, size_t size);

/* =================================================================================================
 * >>api-tensor   Tensors: a view of numbers
 * =================================================================================================
 */

typedef enum mpt_dtype { MPT_F32 = 0, MPT_F16, MPT_BF16, MPT_U8, MPT_I32, MPT_I64 } mpt_dtype;
MPT_API size_t mpt_dtype_size(mpt_dtype dtype); /* bytes of one element; 0 for an unknown type */

#define MPT_MAX_DIMS 4
typedef struct mpt_tensor { /* a view; owns nothing */
    void *data;
    int64_t dims[MPT_MAX_DIMS]; /* images: N,H,W,C   filters: K,R,S,C; last one runs fastest */
    int32_t num_dims;
    mpt_dtype dtype;
} mpt_tensor;

MPT_API uint16_t mpt_f32_to_f16(float x);  /* round to nearest even; too large: infinity */
MPT_API float mpt_f16_to_f32(uint16_t h);  /* exact */
MPT_API uint16_t mpt_f32_to_bf16(float x); /* round to nearest even */
MPT_API float mpt_bf16_to_f32(uint16_t h); /* exact */

/* =================================================================================================
 * >>api-data   Storage, records, tf.Example, pictures, batches
 * =================================================================================================
 */

typedef struct mpt_bytes {
    const uint8_t *data; /* owned by whoever made it */
    size_t size;
} mpt_bytes;

/* ---- storage: plain files are built in; buckets, memory or encryption are yours to plug in ------
   One table serves any number of files. A file is used by one thread at a time, different files by
   different threads at once. A callback that fails may set errno: it lands in mpt_error. */
typedef struct mpt_io {
    mpt_result (*open)(const char *path, void **file, void *user); /* for reading */
    /* Bytes read, at least 1 and fewer than asked is fine; 0 at the end; -1 on error. A failed read
       leaves the position as it was; it is tried again a few times before it counts. */
    int64_t (*read)(void *file, void *dst, size_t size);
    int64_t (*size)(void *file);                     /* bytes; -1: unknown */
    mpt_result (*seek)(void *file, uint64_t offset); /* NULL: files are read front to back only */
    mpt_result (*close)(void *file);                 /* a failure after writing means data loss */
    /* Calls found for each match of a pattern or each file in a directory. Optional: without it
       names are taken literally. */
    mpt_result (*list)(const char *pattern, void (*found)(const char *path, void *arg), void *arg,
                       void *user);
    /* Why, in words. A failed open or create may set *file: then error and close follow. */
    const char *(*error)(void *file);
    /* For writing; these may all be NULL where nothing is written. */
    mpt_result (*create)(const char *path, void **file, void *user);
    int64_t (*write)(void *file, const void *src, size_t size);
    mpt_result (*sync)(void *file); /* down to the medium; optional */
    mpt_result (*rename)(const char *from, const char *to, void *user); /* replaces `to` at once */
    mpt_result (*remove)(const char *path, void *user);
    void *user;
} mpt_io;
MPT_API const mpt_io *mpt_io_files(void); /* the built-in table: names are paths of files */

/* ---- damaged data: what happens, and who hears of it ----------------------------------------- */
typedef enum mpt_on_bad_record {
    MPT_BAD_RECORD_FAIL = 0, /* the call that meets it fails */
    MPT_BAD_RECORD_SKIP, /* go on with the next record; with the next file if the framing is lost */
    MPT_BAD_RECORD_SKIP_FILE /* damaged framing or checksum: leave out the rest of that file (of
                                what the same lane reads of it) */
} mpt_on_bad_record;

typedef struct mpt_bad_record {
    const char *path;
    int64_t record;  /* number in its file, from 0 */
    uint64_t offset; /* of its length field, in the (decompressed) file */
    mpt_result code;
    const char *cause; /* the whole message */
    int rest_of_file;  /* 1: all that follows in this file is left out too */
} mpt_bad_record;
typedef void (*mpt_bad_record_fn)(const mpt_bad_record *bad, void *user);

/* ---- TFRecord files, reading ----------------------------------------------------------------- */
typedef enum mpt_compression {
    MPT_COMPRESSION_NONE = 0,
    MPT_COMPRESSION_GZIP,
    MPT_COMPRESSION_ZLIB
} mpt_compression;

typedef struct mpt_tfrecord_desc {
    const char *path;          /* required */
    const mpt_io *io;          /* default: files */
    uint64_t max_record_bytes; /* default: 1 GiB; a larger record is MPT_ERR_CORRUPT_DATA */
    int skip_crc; /* default: payload checksums are checked (length checksums always are) */
    mpt_on_bad_record on_bad_record;
    int64_t max_bad_records;      /* default: 1000; one more ends in MPT_ERR_CORRUPT_DATA */
    mpt_bad_record_fn bad_record; /* optional: told of each skipped record */
    void *bad_record_user;
} mpt_tfrecord_desc;
typedef struct mpt_tfrecord mpt_tfrecord;

/* Plain, GZIP and ZLIB files are told apart by their first bytes. Reads as a stream: memory holds
   one block (256 KiB) or the largest record so far, whichever is more. */
MPT_API MPT_CHECKED mpt_result mpt_tfrecord_open(mpt_ctx *ctx, const mpt_tfrecord_desc *desc,
                                                 mpt_tfrecord **out);
/* The next payload, valid until the next call on f. MPT_END after the last one. After
   MPT_ERR_CORRUPT_DATA for a payload checksum the next call goes on behind that record; when the
   framing is lost or storage fails, the same error comes again. */
MPT_API MPT_CHECKED mpt_result mpt_tfrecord_next(mpt_tfrecord *f, mpt_bytes *record);
/* Where the last record delivered (or found damaged) stands. */
typedef struct mpt_tfrecord_position {
    int64_t record;  /* from 0; -1 before the first */
    uint64_t offset; /* of its length field, in the (decompressed) file */
    uint64_t size;   /* payload bytes */
} mpt_tfrecord_position;
MPT_API mpt_tfrecord_position mpt_tfrecord_tell(const mpt_tfrecord *f);
/* The next call delivers record number `record` whose length field is at `offset` (from an index).
   Plain files only: MPT_ERR_UNSUPPORTED on compressed ones or storage that can't seek;
   MPT_ERR_CORRUPT_DATA for an offset behind the end, as from an index of another file. */
MPT_API MPT_CHECKED mpt_result mpt_tfrecord_seek(mpt_tfrecord *f, int64_t record, uint64_t offset);
MPT_API mpt_compression mpt_tfrecord_compression(const mpt_tfrecord *f);
MPT_API int64_t mpt_tfrecord_num_bad(const mpt_tfrecord *f); /* skipped so far */
MPT_API void mpt_tfrecord_close(mpt_tfrecord *f);

/* ---- TFRecord files, writing: a file appears whole under its name or not at all -------------- */
typedef struct mpt_tfrecord_writer_desc {
    const char *path; /* required */
    const mpt_io *io; /* default: files */
    mpt_compression compression;
    int compression_level;     /* 1 fast .. 9 small; default: 6 */
    uint64_t max_record_bytes; /* default: 1 GiB, as the reader's */
} mpt_tfrecord_writer_desc;
typedef struct mpt_tfrecord_writer mpt_tfrecord_writer;

/* Opens a temporary file beside `path`. */
MPT_API MPT_CHECKED mpt_result mpt_tfrecord_writer_open(mpt_ctx *ctx,
                                                        const mpt_tfrecord_writer_desc *desc,
                                                        mpt_tfrecord_writer **out);
MPT_API MPT_CHECKED mpt_result mpt_tfrecord_writer_write(mpt_tfrecord_writer *w, mpt_bytes record);
/* Flush, sync, checked close, rename: only then is the file there. Then nothing more can be
   written. */
MPT_API MPT_CHECKED mpt_result mpt_tfrecord_writer_finish(mpt_tfrecord_writer *w);
/* Without finish: leaves nothing behind. */
MPT_API void mpt_tfrecord_writer_close(mpt_tfrecord_writer *w);

/* ---- record index: where each record of a plain file begins ---------------------------------- */
typedef struct mpt_tfrecord_index {
    int64_t num_records;
    const uint64_t *offsets; /* [num_records + 1] of the length fields; the last: end of file */
} mpt_tfrecord_index;

/* Walks over the record headers: payloads are not read. Of desc, path, io and max_record_bytes
   count. */
MPT_API MPT_CHECKED mpt_result mpt_tfrecord_index_build(mpt_ctx *ctx, const mpt_tfrecord_desc *desc,
                                                        mpt_tfrecord_index **out);
/* Reads `desc->path`.idx in DALI's form (a line "offset size" for each record, size with the 16
   bytes of framing) and checks it: no gap, no overlap, ends where the file ends, and the first and
   last header are right. MPT_ERR_CORRUPT_DATA if it doesn't fit its file (stale), MPT_ERR_IO if
   there is none. */
MPT_API MPT_CHECKED mpt_result mpt_tfrecord_index_load(mpt_ctx *ctx, const mpt_tfrecord_desc *desc,
                                                       mpt_tfrecord_index **out);
/* Writes it to `path`, atomically. io NULL: files. */
MPT_API MPT_CHECKED mpt_result mpt_tfrecord_index_save(mpt_ctx *ctx,
                                                       const mpt_tfrecord_index *index,
                                                       const mpt_io *io, const char *path);
MPT_API void mpt_tfrecord_index_destroy(mpt_ctx *ctx, mpt_tfrecord_index *index);

/* ---- tf.Example, reading: no copy, no allocation ------------------------------------------------
   Everything that protobuf takes is taken and read as protobuf reads it; what it refuses is
   MPT_ERR_CORRUPT_DATA. Names and values point into the record. */
typedef enum mpt_feature_kind {
    MPT_FEATURE_NONE = 0, /* the feature is there without a list, or not there at all */
    MPT_FEATURE_BYTES,
    MPT_FEATURE_FLOAT,
    MPT_FEATURE_INT64
} mpt_feature_kind;
/* "bytes", "float", "int64" or "none" */
MPT_API const char *mpt_feature_kind_string(mpt_feature_kind kind);

typedef struct mpt_feature {
    mpt_bytes name; /* UTF-8, not terminated */
    mpt_feature_kind kind;
    int64_t count;   /* values in the list */
    mpt_bytes entry; /* the encoded map entry */
} mpt_feature;

/* Is it a valid Example? ctx may be NULL; else its last error tells the byte and the cause. */
MPT_API MPT_CHECKED mpt_result mpt_example_check(mpt_ctx *ctx, mpt_bytes example);
/* The feature of that name. MPT_OK with kind NONE and name.data NULL when it isn't there. */
MPT_API MPT_CHECKED mpt_result mpt_example_feature(mpt_bytes example, const char *name,
                                                   mpt_feature *out);
/* Shorthand: the first value of a bytes feature. MPT_END: no such feature, or no value in it;
   MPT_ERR_INVALID_ARGUMENT: another kind. */
MPT_API MPT_CHECKED mpt_result mpt_example_find(mpt_bytes example, const char *name,
                                                mpt_bytes *value);
/* All features, in the order in which they are encoded: start with *cursor = 0. MPT_END after the
   last. When a name comes twice, the later one counts. */
MPT_API MPT_CHECKED mpt_result mpt_example_next(mpt_bytes example, size_t *cursor,
                                                mpt_feature *out);
/* Values first .. first+n-1 into dst[n]; INVALID_ARGUMENT if the kind differs or the list is
   shorter. */
MPT_API MPT_CHECKED mpt_result mpt_feature_bytes(const mpt_feature *f, int64_t first, int64_t n,
                                                 mpt_bytes *dst);
MPT_API MPT_CHECKED mpt_result mpt_feature_floats(const mpt_feature *f, int64_t first, int64_t n,
                                                  float *dst);
MPT_API MPT_CHECKED mpt_result mpt_feature_int64s(const mpt_feature *f, int64_t first, int64_t n,
                                                  int64_t *dst);

/* ---- tf.Example, writing ------------------------------------------------------------------------
   An mpt_example grows as features are added; names must be new and valid UTF-8. */
typedef struct mpt_example mpt_example;
MPT_API MPT_CHECKED mpt_result mpt_example_create(mpt_ctx *ctx, mpt_example **out);
MPT_API void mpt_example_clear(mpt_example *e); /* empty again; keeps its memory */
MPT_API MPT_CHECKED mpt_result mpt_example_add_bytes(mpt_example *e, const char *name,
                                                     const mpt_bytes *values, int64_t n);
MPT_API MPT_CHECKED mpt_result mpt_example_add_floats(mpt_example *e, const char *name,
                                                      const float *values, int64_t n);
MPT_API MPT_CHECKED mpt_result mpt_example_add_int64s(mpt_example *e, const char *name,
                                                      const int64_t *values, int64_t n);
/* The encoded Example, valid until the next call on e. */
MPT_API MPT_CHECKED mpt_result mpt_example_encode(mpt_example *e, mpt_bytes *out);
MPT_API void mpt_example_destroy(mpt_example *e);

/* ---- pictures -------------------------------------------------------------------------------- */
typedef enum mpt_image_format {
    MPT_IMAGE_UNKNOWN = 0,
    MPT_IMAGE_JPEG, /* these three can be decoded ... */
    MPT_IMAGE_PNG,
    MPT_IMAGE_BMP,
    MPT_IMAGE_GIF, /* ... these are only told by name */
    MPT_IMAGE_WEBP,
    MPT_IMAGE_TIFF,
    MPT_IMAGE_PSD,
    MPT_IMAGE_HDR,
    MPT_IMAGE_PNM
} mpt_image_format;
MPT_API const char *mpt_image_format_string(mpt_image_format format); /* "JPEG"; "unknown" */

typedef struct mpt_image_info { /* from the first bytes and the header; pixels are not decoded */
    mpt_image_format format;
    int64_t width, height; /* pixels as stored; 0 if the format can't be decoded here */
    int channels;          /* as stored: 1 gray, 2 gray+alpha, 3, 4 */
    int bits;              /* per channel */
    int orientation;       /* EXIF 1..8; 1: upright */
} mpt_image_info;
/* ctx may be NULL. MPT_ERR_CORRUPT_DATA if the header is damaged, UNSUPPORTED for other formats. */
MPT_API MPT_CHECKED mpt_result mpt_image_probe(mpt_ctx *ctx, mpt_bytes encoded,
                                               mpt_image_info *out);

typedef struct mpt_image_desc {
    int channels; /* 1 (gray) or 3 (RGB); default: 3. Alpha is dropped, 16 bits keep the upper 8 */
    int apply_exif;     /* default: pixels as stored, as TensorFlow gives them */
    int64_t max_pixels; /* default: 100,000,000; checked before decoding */
    int64_t max_bytes;  /* of the encoded picture; default: 256 MiB */
} mpt_image_desc;
typedef struct mpt_image {
    uint8_t *pixels; /* height x width x channels, rows from the top */
    int32_t width, height, channels;
} mpt_image;
/* By content, whatever the name says. A truncated picture is an error. desc NULL: all defaults. */
MPT_API MPT_CHECKED mpt_result mpt_image_decode(mpt_ctx *ctx, mpt_bytes encoded,
                                                const mpt_image_desc *desc, mpt_image *out);
MPT_API void mpt_image_free(mpt_ctx *ctx, mpt_image *image);

/* ---- batches ------------------------------------------------------------------------------------
   The loader turns files into batches. Records flow in lanes (ranks x accumulation): each epoch a
   permutation that depends on nothing but the seed deals the files, or their records, to lanes;
   each lane interleaves some files, shuffles, and fills its part of each batch. Threads change the
   speed, never the order. */
typedef enum mpt_augment {
    MPT_AUGMENT_NONE = 0, /* resize to cover the picture size, cut out the centre */
    MPT_AUGMENT_FLIP,     /* the same, mirrored left to right in half of all cases */
    MPT_AUGMENT_CROP_FLIP, /* pad by crop_padding black pixels, cut out at random, flip (CIFAR) */
    MPT_AUGMENT_IMAGENET /* random-resized-crop (8..100 % of the area, aspect 3/4..4/3), flip */
} mpt_augment;

typedef enum mpt_last_batch {
    MPT_LAST_BATCH_KEEP = 0, /* fewer records are valid; each record once an epoch */
    MPT_LAST_BATCH_DROP,     /* a lane's last partial batch is left out */
    MPT_LAST_BATCH_PAD       /* filled by repeating the batch's own records, which count as valid */
} mpt_last_batch;

typedef struct mpt_loader_desc {
    /* what to read: names, globs, directories, `name@N` (name-00000-of-0000N ...) ... */
    const char *const *paths;
    int num_paths;
    const mpt_io *io; /* default: files */
    /* ... or arrays of the caller's, which must outlive the loader */
    const mpt_tensor *array_images; /* (n, height, width, channels) U8 */
    const mpt_tensor *array_labels; /* (n) I32 */

    int batch_size;              /* records per LANE and step; default: 32 */
    int height, width, channels; /* required; channels 1 or 3 */
    int num_classes;             /* required */

    const char *image_key; /* default: by schema, "image/encoded" (ImageNet) or "image" (TFDS) */
    const char *label_key; /* default: by schema, "image/class/label" or "label" */
    int label_offset;      /* subtracted from labels; default: 1 for "image/class/label", else 0 */
    int label_offset_is_set; /* only needed for a label_offset of 0 */
    int raw_pixels;          /* the image feature holds height*width*channels bytes of pixels */
    int apply_exif;          /* default: pixels as stored */
    int64_t max_pixels;      /* default: 100,000,000 */
    int64_t max_image_bytes; /* default: 256 MiB */

    mpt_augment augment;
    int crop_padding;      /* pixels; default: 4, for MPT_AUGMENT_CROP_FLIP */
    float center_fraction; /* side of the central part that is kept when resizing; default: 1 */
    mpt_dtype dtype;       /* of the batch: F32 (default), F16 or U8 */
    float mean[3], std[3]; /* F32, F16: (pixel / 255 - mean) / std, so 0.485; default: 0 and 1 */

    int num_lanes;   /* default: world_size; a multiple of it, fixed for the run */
    int num_workers; /* threads that read and decode; default: cores */
    int interleave;  /* files that a lane reads in turn; default: 8 */
    int no_shuffle;
    int shuffle_buffer; /* records per lane; default: 1024 (arrays: all) */
    mpt_last_batch last_batch;
    int64_t num_records; /* in all files; default: from .idx, dataset_info.json or headers */

    mpt_on_bad_record on_bad_record;
    int64_t max_bad_records; /* per epoch and rank; default: 1000 */
    mpt_bad_record_fn bad_record; /* optional: told of skipped records, in mpt_loader_next */
    void *bad_record_user;
    int skip_crc;
    uint64_t max_record_bytes; /* default: 1 GiB */

    int rank, world_size; /* default: 0 of 1. MPT_END when this rank's own lanes end */
    uint64_t seed;
} mpt_loader_desc;
typedef struct mpt_loader mpt_loader;

typedef struct mpt_batch {
    mpt_tensor images; /* (N,H,W,C), lane-major; U8, F32 or F16, host memory */
    mpt_tensor labels; /* (N), I32; -1 in slots that don't count */
    /* (N), key of the counter-based random numbers; NULL: the index in the batch */
    const uint64_t *sample_ids;
    int32_t num_lanes; /* N = num_lanes * capacity; 0: one lane */
    /* (num_lanes): the first lane_valid[i] of lane i's slots count, 0 allowed; NULL: all N */
    const int32_t *lane_valid;
    int64_t num_valid;         /* their sum, at least 1 */
    struct mpt_loader *source; /* NULL for batches that the caller made */
    int64_t epoch, index;
} mpt_batch; /* from a loader: valid until its next mpt_loader_next or _set_state */

typedef enum mpt_count_source {
    MPT_COUNT_ESTIMATE = 0, /* bytes of all files / bytes of a record in the first */
    MPT_COUNT_GIVEN,        /* desc.num_records or the arrays */
    MPT_COUNT_INDEX,        /* .idx files */
    MPT_COUNT_DATASET_INFO, /* dataset_info.json */
    MPT_COUNT_HEADERS,      /* record headers were walked */
    MPT_COUNT_EPOCH         /* an epoch was read to its end */
} mpt_count_source;

typedef struct mpt_loader_info {
    int num_files;
    int64_t num_records; /* in one epoch, all ranks */
    mpt_count_source num_records_source;
    int64_t steps_per_epoch; /* exact unless the source is an estimate or records are skipped */
    const char *image_key, *label_key;
    int label_offset;
    int64_t num_bad_records; /* skipped by this rank in the epoch of the last batch */
    int64_t epoch, index;    /* of the batch that comes next */
} mpt_loader_info;

/* Lists and sorts the files, finds the schema from the first record, starts the workers. */
MPT_API MPT_CHECKED mpt_result mpt_loader_create(mpt_ctx *ctx, const mpt_loader_desc *desc,
                                                 mpt_loader **out);
/* The next batch. MPT_END at the end of an epoch; the call after that begins the next one. */
MPT_API MPT_CHECKED mpt_result mpt_loader_next(mpt_loader *ld, mpt_batch *out);
MPT_API mpt_loader_info mpt_loader_get_info(const mpt_loader *ld);
/* The position behind the last batch that was delivered, as bytes (little-endian, portable) that
   belong to the loader and stay valid until the next call on it: one block with the lanes of this
   rank. To go on with another number of ranks, give each the blocks of all of them, one after the
   other. */
MPT_API MPT_CHECKED mpt_result mpt_loader_get_state(mpt_loader *ld, mpt_bytes *out);
/* Goes on from there, bit for bit, with any number of workers. What decides which record comes next
   must be equal: seed, num_lanes, no_shuffle, interleave, shuffle_buffer and the names of the files
   (or the size of the arrays); everything else may change. A damaged state, or one of other data,
   is refused by name and changes nothing. When its records can't be read again the loader has
   failed for good. */
MPT_API MPT_CHECKED mpt_result mpt_loader_set_state(mpt_loader *ld, mpt_bytes state);
MPT_API void mpt_loader_destroy(mpt_loader *ld); /* joins its threads, closes its files */

#ifdef __cplusplus
}
#endif
#endif /* MPTRAIN_H : end of the header proper */

/* =================================================================================================
 *
 *   III  THE IMPLEMENTATION: from here on only for the one file with MPTRAIN_IMPLEMENTATION
 *
 * =================================================================================================
 */
#if defined(MPTRAIN_IMPLEMENTATION) && !defined(MPTRAIN_IMPLEMENTED)
#define MPTRAIN_IMPLEMENTED

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#ifndef MPTRAIN_NO_THREADS
#include <pthread.h>
#endif
#ifdef MPTRAIN_ZLIB
#include <zlib.h>
#endif
#if defined(__GLIBC__) && !defined(__USE_XOPEN2K8)
#error "POSIX 2008 is hidden: include mptrain.h first, or build with -D_POSIX_C_SOURCE=200809L"
#endif
#if defined(__x86_64__) || defined(__i386__)
#define MPTI_X86 1
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#define MPTI_ARM64 1
#include <sys/auxv.h>
#endif

/* For our own mistakes only; a user's mistake is an error code. Off unless the user sets it. */
#ifndef MPT_ASSERT
#define MPT_ASSERT(condition) ((void)0)
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* =================================================================================================
 * >>base   1 Foundations: errors, memory, random numbers, threads
 * =================================================================================================
 * Problem: a library inside somebody else's program may not exit, print, leak or keep globals, and
 *          must give the same numbers on any machine.
 * Idea:    every failure fills an mpt_error; memory goes through two hooks; random numbers are a
 *          function of a key and a counter; work is cut into chunks whatever the number of threads.
 * Shapes:  none yet: this chapter knows bytes and integers.
 * Tested:  tests/test_base.c
 * Next:    >>tfrecord, which turns bytes into records.
 */

MPT_API const char *mpt_version(void) {
    return MPT_VERSION_STRING;
}

MPT_API const char *mpt_build_info(void) {
    return "mptrain " MPT_VERSION_STRING ", abi 1, options:"
#ifdef MPTRAIN_ZLIB
           " zlib"
#endif
#ifdef MPTRAIN_NO_IMAGE
           " no_image"
#endif
#ifdef MPTRAIN_NO_THREADS
           " no_threads"
#endif
#ifdef MPTRAIN_STATIC
           " static"
#endif
           ", compiler " __VERSION__;
}

MPT_API const char *mpt_result_string(mpt_result r) {
    switch (r) {
    case MPT_OK: return "ok";
    case MPT_END: return "end";
    case MPT_ERR_INVALID_ARGUMENT: return "invalid argument";
    case MPT_ERR_INVALID_STATE: return "invalid state";
    case MPT_ERR_OUT_OF_MEMORY: return "out of memory";
    case MPT_ERR_OUT_OF_DEVICE_MEMORY: return "out of device memory";
    case MPT_ERR_IO: return "input/output error";
    case MPT_ERR_CORRUPT_DATA: return "corrupt data";
    case MPT_ERR_UNSUPPORTED: return "unsupported";
    case MPT_ERR_DEVICE: return "device error";
    case MPT_ERR_COMM: return "communication error";
    case MPT_ERR_INTERNAL: return "internal error";
    case MPT_ERR_TIMEOUT: return "timeout";
    }
    return "unknown result";
}

/* ---- errors -------------------------------------------------------------------------------------
   Inside the library an error travels as a pointer to an mpt_error (NULL: nobody asks), since
   worker threads have no context. Public functions pass the context's own and end with
   mpti_report. */

/* Messages quote names and bytes of hostile files: whatever could break a terminal or a log line
   becomes '?', and a cut in the middle of a UTF-8 character goes back to its start. */
static void mpti_clean_message(char *text) {
    size_t n = strlen(text), i;

    for (i = 0; i < n; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c < 0x20 || c == 0x7f) text[i] = '?';
    }
    if (n + 1 < sizeof(((mpt_error *)0)->message)) return;
    while (n > 0 && ((unsigned char)text[n - 1] & 0xc0) == 0x80) n--;
    if (n > 0 && (unsigned char)text[n - 1] >= 0xc0) n--;
    text[n] = 0;
}

__attribute__((format(printf, 6, 7))) static mpt_result mpti_fail_at(mpt_error *err,
                                                                     const char *file, int line,
                                                                     mpt_result code, int number,
                                                                     const char *format, ...) {
    va_list args;

    if (!err) return code;
    err->code = code;
    err->native_code = number;
    err->native_domain = number ? "errno" : NULL;
    err->file = file;
    err->line = line;
    va_start(args, format);
    vsnprintf(err->message, sizeof err->message, format, args);
    va_end(args);
    mpti_clean_message(err->message);
    return code;
}
#define MPTI_FAIL(err, code, ...) mpti_fail_at(err, __FILE__, __LINE__, code, 0, __VA_ARGS__)
#define MPTI_FAIL_ERRNO(err, code, number, ...) \
    mpti_fail_at(err, __FILE__, __LINE__, code, number, __VA_ARGS__)

/* The end of a long path says more than its start, and leaves room for the rest of a message. */
static const char *mpti_path_tail(const char *path) {
    const size_t limit = 160;
    size_t n = path ? strlen(path) : 0;

    if (!path) return "(no name)";
    return n > limit ? path + (n - limit) : path;
}

static const char *mpti_base_name(const char *path) { /* without its folders */
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* strerror is not safe between threads, strerror_r has two shapes: these few texts are ours. */
static const char *mpti_errno_text(int number) {
    switch (number) {
    case 0: return "no reason given";
    case ENOENT: return "no such file";
    case EACCES: return "permission denied";
    case EPERM: return "operation not permitted";
    case EISDIR: return "it is a directory";
    case ENOTDIR: return "part of the path is not a directory";
    case EMFILE:
        return "this process has too many files open (raise ulimit -n, or lower the loader's "
               "interleave)";
    case ENFILE: return "the system has too many files open";
    case ENOSPC: return "no space left on the device";
    case EDQUOT: return "disk quota exceeded";
    case EFBIG: return "file too large";
    case EROFS: return "read-only file system";
    case EIO: return "the device or network storage reported an error";
    case ESTALE: return "stale file handle: the file was changed or removed elsewhere";
    case EINTR: return "interrupted";
    case EAGAIN: return "temporarily unavailable";
    case ENOMEM: return "no memory";
    case EINVAL: return "invalid operation on this file";
    case ESPIPE: return "not seekable";
    case ENAMETOOLONG: return "name too long";
    case ELOOP: return "too many symbolic links";
    case ETIMEDOUT: return "timed out";
    case EOPNOTSUPP: return "not supported by this storage";
    default: return "see errno";
    }
}

/* ---- context --------------------------------------------------------------------------------- */
typedef struct mpti_pool mpti_pool;

struct mpt_ctx {
    mpt_ctx_desc desc; /* with defaults filled in */
    mpt_error error;
    mpti_pool *pool; /* started by the first mpt_parallel_for */
};

static void mpti_log(const mpt_ctx *ctx, int level, const char *message) {
    if (ctx && ctx->desc.logger.log) ctx->desc.logger.log(level, message, ctx->desc.logger.user);
}

/* Where every public function that failed leaves the library. */
static mpt_result mpti_report(const mpt_ctx *ctx, mpt_result rc) {
    if (rc < 0 && ctx) mpti_log(ctx, MPT_LOG_ERROR, ctx->error.message);
    return rc;
}

MPT_API const mpt_error *mpt_last_error(const mpt_ctx *ctx) {
    static const mpt_error no_context = {MPT_OK, 0, NULL, NULL, 0, "no context"};
    return ctx ? &ctx->error : &no_context;
}

/* ---- memory ---------------------------------------------------------------------------------- */
static bool mpti_add(size_t a, size_t b, size_t *sum) { /* false: does not fit */
    *sum = a + b;
    return *sum >= a;
}

static bool mpti_mul(size_t a, size_t b, size_t *product) {
    *product = a * b;
    return a == 0 || *product / a == b;
}

static void *mpti_alloc_aligned(const mpt_allocator *a, size_t size, size_t align) {
    void *p = NULL;

    if (a->alloc) return a->alloc(size, align, a->user);
    if (align <= sizeof(void *) * 2) return malloc(size);
    return posix_memalign(&p, align, size) == 0 ? p : NULL;
}

static void *mpti_alloc(const mpt_allocator *a, size_t size) {
    return mpti_alloc_aligned(a, size, sizeof(void *) * 2);
}

static void *mpti_calloc(const mpt_allocator *a, size_t count, size_t size) {
    size_t bytes;
    void *p;

    if (!mpti_mul(count, size, &bytes) || bytes == 0) return NULL;
    p = mpti_alloc(a, bytes);
    if (p) memset(p, 0, bytes);
    return p;
}

static void mpti_free(const mpt_allocator *a, void *p, size_t size) {
    if (!p) return;
    if (a->free) a->free(p, size, a->user);
    else free(p);
}

/* For libraries whose free has no size (zlib, stb_image): the size stands in front of the block. */
enum { MPTI_SIZE_PREFIX = 16 };

static void *mpti_sized_alloc(const mpt_allocator *a, size_t size) {
    uint8_t *p;
    size_t bytes;

    if (!mpti_add(size, MPTI_SIZE_PREFIX, &bytes)) return NULL;
    p = (uint8_t *)mpti_alloc(a, bytes);
    if (!p) return NULL;
    memcpy(p, &bytes, sizeof bytes);
    return p + MPTI_SIZE_PREFIX;
}

static void mpti_sized_free(const mpt_allocator *a, void *p) {
    size_t bytes;

    if (!p) return;
    memcpy(&bytes, (uint8_t *)p - MPTI_SIZE_PREFIX, sizeof bytes);
    mpti_free(a, (uint8_t *)p - MPTI_SIZE_PREFIX, bytes);
}

static char *mpti_strdup(const mpt_allocator *a, const char *text) {
    size_t bytes = strlen(text) + 1;
    char *copy = (char *)mpti_alloc(a, bytes);

    if (copy) memcpy(copy, text, bytes);
    return copy;
}

static void mpti_strfree(const mpt_allocator *a, char *text) {
    if (text) mpti_free(a, text, strlen(text) + 1);
}

/* A row of bytes that grows by half. */
typedef struct mpti_buffer {
    const mpt_allocator *allocator;
    uint8_t *data;
    size_t size, capacity;
} mpti_buffer;

static bool mpti_buffer_reserve(mpti_buffer *b,
                                size_t more) { /* false: no memory; b is as it was */
    size_t need, capacity;
    uint8_t *data;

    if (!mpti_add(b->size, more, &need)) return false;
    if (need <= b->capacity) return true;
    capacity = b->capacity + b->capacity / 2;
    if (capacity < need) capacity = need;
    if (capacity < 256) capacity = 256;
    data = (uint8_t *)mpti_alloc(b->allocator, capacity);
    if (!data) return false;
    if (b->size) memcpy(data, b->data, b->size);
    mpti_free(b->allocator, b->data, b->capacity);
    b->data = data;
    b->capacity = capacity;
    return true;
}

static bool mpti_buffer_append(mpti_buffer *b, const void *data, size_t size) {
    if (!mpti_buffer_reserve(b, size)) return false;
    if (size) memcpy(b->data + b->size, data, size);
    b->size += size;
    return true;
}

static void mpti_buffer_free(mpti_buffer *b) {
    mpti_free(b->allocator, b->data, b->capacity);
    b->data = NULL;
    b->size = b->capacity = 0;
}

/* Files are little-endian on every machine. */
static uint32_t mpti_load_u32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static uint64_t mpti_load_u64(const uint8_t *p) {
    return (uint64_t)mpti_load_u32(p) | (uint64_t)mpti_load_u32(p + 4) << 32;
}

static void mpti_store_u32(uint8_t *p, uint32_t v) {
    int i;
    for (i = 0; i < 4; i++) p[i] = (uint8_t)(v >> 8 * i);
}

static void mpti_store_u64(uint8_t *p, uint64_t v) {
    mpti_store_u32(p, (uint32_t)v);
    mpti_store_u32(p + 4, (uint32_t)(v >> 32));
}

/* ---- random numbers -----------------------------------------------------------------------------
   Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC
   2011): four 32-bit numbers that are a function of a 64-bit key (the seed) and a 128-bit counter.
   No state: sample k gets the same numbers whichever thread, rank or restart asks. */
typedef enum mpti_purpose {
    MPTI_RANDOM_FILES = 1,
    MPTI_RANDOM_SHUFFLE,
    MPTI_RANDOM_AUGMENT
} mpti_purpose;

static void mpti_philox(const uint32_t counter[4], uint64_t key, uint32_t out[4]) {
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    int round;

    for (round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* Four numbers for (seed, epoch, id, purpose). Epochs are counted in 24 bits, purposes in 8. */
static void mpti_random4(uint64_t seed, int64_t epoch, uint64_t id, uint32_t lane,
                         mpti_purpose purpose, uint32_t out[4]) {
    uint32_t counter[4];

    counter[0] = (uint32_t)id;
    counter[1] = (uint32_t)(id >> 32);
    counter[2] = lane;
    counter[3] = (uint32_t)epoch << 8 | (uint32_t)purpose;
    mpti_philox(counter, seed, out);
}

/* 0 .. n-1 from a random word; uneven by at most n / 2^32. */
static uint32_t mpti_below(uint32_t random, uint32_t n) {
    return (uint32_t)((uint64_t)random * n >> 32);
}

/* A number in 0 .. 1 (24 bits, so that it is exact in any precision). */
static double mpti_uniform(uint32_t random) {
    return (double)(random >> 8) / 16777216.0;
}

/* ---- half precision -----------------------------------------------------------------------------
   IEEE 754 binary16: 1 sign, 5 exponent (bias 15), 10 mantissa bits. BF16: the upper half of an
   FP32. Both by integer arithmetic, so that no flag of the compiler and no mode of the processor
   (flush to zero) changes a bit. */
static uint32_t mpti_f32_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static float mpti_f32_from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

MPT_API uint16_t mpt_f32_to_f16(float x) {
    uint32_t u = mpti_f32_bits(x), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
    uint32_t mantissa, shift, q, rest, half;

    if (a > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | (a >> 13 & 0x3ffu)); /* NaN, made quiet */
    if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);    /* from 65520 on */
    if (a >= 0x38800000u) {                                     /* normal: from 2^-14 */
        a += 0xfffu + (a >> 13 & 1u); /* a carry into the exponent is right as it is */
        return (uint16_t)(sign | (a - 0x38000000u) >> 13);
    }
    if (a <= 0x33000000u) return (uint16_t)sign; /* up to 2^-25, half the smallest: to even, 0 */
    mantissa = (a & 0x7fffffu) | 0x800000u;
    shift = 126u - (a >> 23); /* 14 .. 24: in units of 2^-24 */
    q = mantissa >> shift;
    rest = mantissa & ((1u << shift) - 1u);
    half = 1u << (shift - 1u);
    if (rest > half || (rest == half && (q & 1u))) q++;
    return (uint16_t)(sign | q);
}

MPT_API float mpt_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = h >> 10 & 31u, mantissa = h & 0x3ffu;

    if (exponent == 31) return mpti_f32_from_bits(sign | 0x7f800000u | mantissa << 13);
    if (exponent > 0) return mpti_f32_from_bits(sign | (exponent + 112u) << 23 | mantissa << 13);
    if (mantissa == 0) return mpti_f32_from_bits(sign);
    exponent = 113; /* a subnormal of binary16 is a normal number here: shift its first one out */
    while (!(mantissa & 0x400u)) {
        mantissa <<= 1;
        exponent--;
    }
    return mpti_f32_from_bits(sign | exponent << 23 | (mantissa & 0x3ffu) << 13);
}

MPT_API uint16_t mpt_f32_to_bf16(float x) {
    uint32_t u = mpti_f32_bits(x);

    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40u); /* NaN, made quiet */
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

MPT_API float mpt_bf16_to_f32(uint16_t h) {
    return mpti_f32_from_bits((uint32_t)h << 16);
}

MPT_API size_t mpt_dtype_size(mpt_dtype dtype) {
    switch (dtype) {
    case MPT_F32:
    case MPT_I32: return 4;
    case MPT_F16:
    case MPT_BF16: return 2;
    case MPT_U8: return 1;
    case MPT_I64: return 8;
    }
    return 0;
}

/* ---- checksums ----------------------------------------------------------------------------------
   Both CRCs are linear: the table entry of a byte is the XOR of the entries of its bits, so eight
   numbers write down 256. Bit order is reflected in both, as in zlib. */
#define MPTI_CRC_ENTRY(n, b0, b1, b2, b3, b4, b5, b6, b7) \
    (((n)&1 ? (b0) : 0u) ^ ((n)&2 ? (b1) : 0u) ^ ((n)&4 ? (b2) : 0u) ^ ((n)&8 ? (b3) : 0u) ^ \
     ((n)&16 ? (b4) : 0u) ^ ((n)&32 ? (b5) : 0u) ^ ((n)&64 ? (b6) : 0u) ^ ((n)&128 ? (b7) : 0u))
#define MPTI_TABLE4(entry, n) entry(n), entry((n) + 1), entry((n) + 2), entry((n) + 3)
#define MPTI_TABLE16(entry, n) \
    MPTI_TABLE4(entry, n), MPTI_TABLE4(entry, (n) + 4), MPTI_TABLE4(entry, (n) + 8), \
        MPTI_TABLE4(entry, (n) + 12)
#define MPTI_TABLE64(entry, n) \
    MPTI_TABLE16(entry, n), MPTI_TABLE16(entry, (n) + 16), MPTI_TABLE16(entry, (n) + 32), \
        MPTI_TABLE16(entry, (n) + 48)
#define MPTI_TABLE256(entry) \
    MPTI_TABLE64(entry, 0), MPTI_TABLE64(entry, 64), MPTI_TABLE64(entry, 128), \
        MPTI_TABLE64(entry, 192)

/* polynomial 0xEDB88320 (reflected): ISO 3309, zlib, PNG */
#define MPTI_CRC32_ENTRY(n) \
    MPTI_CRC_ENTRY(n, 0x77073096u, 0xEE0E612Cu, 0x076DC419u, 0x0EDB8832u, 0x1DB71064u, \
                   0x3B6E20C8u, 0x76DC4190u, 0xEDB88320u)
static const uint32_t mpti_crc32_table[256] = {MPTI_TABLE256(MPTI_CRC32_ENTRY)};

/* polynomial 0x82F63B78 (reflected): Castagnoli, RFC 3720 */
#define MPTI_CRC32C_ENTRY(n) \
    MPTI_CRC_ENTRY(n, 0xF26B8303u, 0xE13B70F7u, 0xC79A971Fu, 0x8AD958CFu, 0x105EC76Fu, \
                   0x20BD8EDEu, 0x417B1DBCu, 0x82F63B78u)
static const uint32_t mpti_crc32c_table[256] = {MPTI_TABLE256(MPTI_CRC32C_ENTRY)};

static uint32_t mpti_crc_bytes(const uint32_t table[256], uint32_t crc, const uint8_t *p,
                               size_t size) {
    size_t i;

    crc = ~crc;
    for (i = 0; i < size; i++) crc = table[(crc ^ p[i]) & 0xff] ^ crc >> 8;
    return ~crc;
}

MPT_API uint32_t mpt_crc32(uint32_t crc, const void *data, size_t size) {
    return mpti_crc_bytes(mpti_crc32_table, crc, (const uint8_t *)data, size);
}

/* ---- JSON, reading ------------------------------------------------------------------------------
   A strict pull reader (RFC 8259) for small files that others write: the caller walks, nothing is
   allocated. After the first violation every call answers "no more", and j->bad stays set.

       mpti_json_object(&j);
       while (mpti_json_key(&j, key, sizeof key))
           if (!strcmp(key, "shardLengths")) ... else mpti_json_skip(&j);
*/
typedef struct mpti_json {
    const char *p, *end;
    bool first; /* no comma is due before the next member */
    bool bad;
} mpti_json;

static int mpti_json_peek(mpti_json *j) { /* next character that isn't white space; -1: none */
    while (j->p < j->end && (*j->p == ' ' || *j->p == '\t' || *j->p == '\n' || *j->p == '\r'))
        j->p++;
    return j->bad || j->p == j->end ? -1 : (unsigned char)*j->p;
}

static bool mpti_json_expect(mpti_json *j, char c) {
    if (mpti_json_peek(j) != c) {
        j->bad = true;
        return false;
    }
    j->p++;
    return true;
}

static int mpti_json_hex4(mpti_json *j) { /* -1: not four hex digits */
    int value = 0, i;

    if (j->end - j->p < 4) return -1;
    for (i = 0; i < 4; i++) {
        char c = *j->p++;
        if (c >= '0' && c <= '9') value = value * 16 + (c - '0');
        else if (c >= 'a' && c <= 'f') value = value * 16 + (c - 'a' + 10);
        else if (c >= 'A' && c <= 'F') value = value * 16 + (c - 'A' + 10);
        else return -1;
    }
    return value;
}

static int mpti_utf8_put(uint32_t c, char out[4]) { /* bytes written */
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (char)(0xc0 | c >> 6);
        out[1] = (char)(0x80 | (c & 63));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (char)(0xe0 | c >> 12);
        out[1] = (char)(0x80 | (c >> 6 & 63));
        out[2] = (char)(0x80 | (c & 63));
        return 3;
    }
    out[0] = (char)(0xf0 | c >> 18);
    out[1] = (char)(0x80 | (c >> 12 & 63));
    out[2] = (char)(0x80 | (c >> 6 & 63));
    out[3] = (char)(0x80 | (c & 63));
    return 4;
}

/* The character after a backslash, as UTF-8; 0 bytes if it is no JSON escape. */
static int mpti_json_escape(mpti_json *j, char out[4]) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char *at;
    int high, low;

    if (j->p == j->end) return 0;
    if (*j->p != 'u') {
        at = *j->p ? strchr(from, *j->p) : NULL;
        j->p++;
        if (!at) return 0;
        out[0] = to[at - from];
        return 1;
    }
    j->p++;
    high = mpti_json_hex4(j);
    if (high < 0 || (high >= 0xdc00 && high < 0xe000)) return 0;
    if (high < 0xd800 || high >= 0xe000) return mpti_utf8_put((uint32_t)high, out);
    if (j->end - j->p < 6 || j->p[0] != '\\' || j->p[1] != 'u') return 0;
    j->p += 2;
    low = mpti_json_hex4(j);
    if (low < 0xdc00 || low >= 0xe000) return 0;
    return mpti_utf8_put(0x10000u + ((uint32_t)(high - 0xd800) << 10) + (uint32_t)(low - 0xdc00),
                         out);
}

/* A string into out (capacity with the terminator); longer ones are cut, which a caller that
   compares names need not care about. out NULL: only skipped. */
static bool mpti_json_string(mpti_json *j, char *out, size_t capacity) {
    size_t used = 0;
    char piece[4];
    int n, i;

    if (!mpti_json_expect(j, '"')) return false;
    while (j->p < j->end && *j->p != '"') {
        unsigned char c = (unsigned char)*j->p++;
        n = 1;
        piece[0] = (char)c;
        if (c == '\\') n = mpti_json_escape(j, piece);
        else if (c < 0x20) n = 0;
        if (n == 0) {
            j->bad = true;
            return false;
        }
        for (i = 0; i < n; i++)
            if (out && used + 1 < capacity) out[used++] = piece[i];
    }
    if (out) out[used] = 0;
    return mpti_json_expect(j, '"');
}

static bool mpti_json_object(mpti_json *j) {
    j->first = true;
    return mpti_json_expect(j, '{');
}

static bool mpti_json_array(mpti_json *j) {
    j->first = true;
    return mpti_json_expect(j, '[');
}

/* Is there another member before `close`? Takes the comma, or the closing bracket. */
static bool mpti_json_more(mpti_json *j, char close) {
    bool first = j->first;

    j->first = false;
    if (mpti_json_peek(j) == close) {
        j->p++;
        return false;
    }
    return first ? !j->bad : mpti_json_expect(j, ',');
}

static bool mpti_json_item(mpti_json *j) { /* of an array */
    return mpti_json_more(j, ']');
}

static bool mpti_json_key(mpti_json *j, char *key, size_t capacity) { /* of an object */
    return mpti_json_more(j, '}') && mpti_json_string(j, key, capacity) && mpti_json_expect(j, ':');
}

/* An integer, written as a number or (as protobuf writes 64 bits) as a string of digits. */
static bool mpti_json_int64(mpti_json *j, int64_t *out) {
    bool quoted = mpti_json_peek(j) == '"', negative;
    const char *start;
    int64_t value = 0;

    if (quoted) j->p++;
    negative = j->p < j->end && *j->p == '-';
    if (negative) j->p++;
    for (start = j->p; j->p < j->end && *j->p >= '0' && *j->p <= '9'; j->p++) {
        if (value > (INT64_MAX - 9) / 10) j->bad = true;
        else value = value * 10 + (*j->p - '0');
    }
    if (j->p == start) j->bad = true;
    if (quoted && !j->bad) mpti_json_expect(j, '"');
    *out = negative ? -value : value;
    return !j->bad;
}

static bool mpti_json_word(mpti_json *j, const char *word) {
    size_t n = strlen(word);

    if ((size_t)(j->end - j->p) < n || memcmp(j->p, word, n) != 0) return false;
    j->p += n;
    return true;
}

static void mpti_json_skip_number(mpti_json *j) {
    const char *start = j->p;

    while (j->p < j->end && *j->p && strchr("+-.0123456789eE", *j->p)) j->p++;
    if (j->p == start) j->bad = true;
}

/* Any value. Depth is limited: the text may be hostile and the stack is not ours. */
static void mpti_json_skip_nested(mpti_json *j, int depth) {
    int c = mpti_json_peek(j);

    if (depth > 64) j->bad = true;
    if (j->bad) return;
    if (c == '{') {
        mpti_json_object(j);
        while (mpti_json_key(j, NULL, 0)) mpti_json_skip_nested(j, depth + 1);
    } else if (c == '[') {
        mpti_json_array(j);
        while (mpti_json_item(j)) mpti_json_skip_nested(j, depth + 1);
    } else if (c == '"') {
        mpti_json_string(j, NULL, 0);
    } else if (!mpti_json_word(j, "true") && !mpti_json_word(j, "false") &&
               !mpti_json_word(j, "null")) {
        mpti_json_skip_number(j);
    }
    j->first = false;
}

static void mpti_json_skip(mpti_json *j) {
    mpti_json_skip_nested(j, 0);
}

/* ---- time ------------------------------------------------------------------------------------ */
static void mpti_sleep_ms(int ms) {
    struct timespec pause;

    pause.tv_sec = ms / 1000;
    pause.tv_nsec = (long)(ms % 1000) * 1000000L;
    while (nanosleep(&pause, &pause) != 0 && errno == EINTR) continue;
}

/* ---- threads ------------------------------------------------------------------------------------
   A thin layer over pthreads, so that MPTRAIN_NO_THREADS leaves no trace of them elsewhere. */
static int mpti_num_cores(void) {
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > 1024 ? 1024 : (int)n;
}

#ifdef MPTRAIN_NO_THREADS
enum { MPTI_HAVE_THREADS = 0 };
typedef int mpti_mutex, mpti_cond, mpti_thread;
static bool mpti_mutex_init(mpti_mutex *m) {
    *m = 0;
    return true;
}
static void mpti_mutex_destroy(mpti_mutex *m) {
    (void)m;
}
static void mpti_mutex_lock(mpti_mutex *m) {
    (void)m;
}
static void mpti_mutex_unlock(mpti_mutex *m) {
    (void)m;
}
static bool mpti_cond_init(mpti_cond *c) {
    *c = 0;
    return true;
}
static void mpti_cond_destroy(mpti_cond *c) {
    (void)c;
}
static void mpti_cond_wait(mpti_cond *c, mpti_mutex *m) {
    (void)c;
    (void)m;
}
static void mpti_cond_wake_all(mpti_cond *c) {
    (void)c;
}
static void mpti_cond_wake_one(mpti_cond *c) {
    (void)c;
}
static int mpti_thread_start(mpti_thread *t, void *(*fn)(void *), void *arg) {
    *t = 0;
    (void)fn;
    (void)arg;
    return ENOSYS;
}
static void mpti_thread_join(mpti_thread t) {
    (void)t;
}
#else
enum { MPTI_HAVE_THREADS = 1 };
typedef pthread_mutex_t mpti_mutex;
typedef pthread_cond_t mpti_cond;
typedef pthread_t mpti_thread;
static bool mpti_mutex_init(mpti_mutex *m) {
    return pthread_mutex_init(m, NULL) == 0;
}
static void mpti_mutex_destroy(mpti_mutex *m) {
    pthread_mutex_destroy(m);
}
static void mpti_mutex_lock(mpti_mutex *m) {
    pthread_mutex_lock(m);
}
static void mpti_mutex_unlock(mpti_mutex *m) {
    pthread_mutex_unlock(m);
}
static bool mpti_cond_init(mpti_cond *c) {
    return pthread_cond_init(c, NULL) == 0;
}
static void mpti_cond_destroy(mpti_cond *c) {
    pthread_cond_destroy(c);
}
static void mpti_cond_wait(mpti_cond *c, mpti_mutex *m) {
    pthread_cond_wait(c, m);
}
static void mpti_cond_wake_all(mpti_cond *c) {
    pthread_cond_broadcast(c);
}
static void mpti_cond_wake_one(mpti_cond *c) {
    pthread_cond_signal(c);
}
static int mpti_thread_start(mpti_thread *t, void *(*fn)(void *), void *arg) { /* 0 or an errno */
    return pthread_create(t, NULL, fn, arg);
}
static void mpti_thread_join(mpti_thread t) {
    pthread_join(t, NULL);
}
#endif

/* The threads behind mpt_parallel_for. A job is a range of chunks; threads take the next chunk
   until none is left. The calling thread works too, so a pool of one has no threads at all. */
struct mpti_pool {
    mpt_allocator allocator;
    mpti_mutex lock;
    mpti_cond work, idle; /* a job came or the end; the last worker is done */
    mpti_thread *threads; /* [num_threads] */
    int num_threads, num_started;
    bool closing;
    uint64_t job; /* number of the job: tells a sleeping worker that there is a new one */
    mpt_chunk_fn fn;
    void *user;
    int64_t next, end, failed_chunk;
    mpt_result failure;
    int busy; /* workers inside the job */
};

static void mpti_pool_work(mpti_pool *p) { /* with p->lock held */
    while (p->next < p->end) {
        int64_t chunk = p->next++;
        mpt_result rc;

        mpti_mutex_unlock(&p->lock);
        rc = p->fn(chunk, p->user);
        mpti_mutex_lock(&p->lock);
        if (rc == MPT_OK) continue;
        if (p->failure == MPT_OK || chunk < p->failed_chunk) {
            p->failure = rc;
            p->failed_chunk = chunk;
        }
        p->next = p->end;
    }
}

static void *mpti_pool_main(void *arg) {
    mpti_pool *p = (mpti_pool *)arg;
    uint64_t seen = 0;

    mpti_mutex_lock(&p->lock);
    while (!p->closing) {
        if (p->job == seen) {
            mpti_cond_wait(&p->work, &p->lock);
            continue;
        }
        seen = p->job;
        p->busy++;
        mpti_pool_work(p);
        if (--p->busy == 0) mpti_cond_wake_all(&p->idle);
    }
    mpti_mutex_unlock(&p->lock);
    return NULL;
}

static void mpti_pool_destroy(mpti_pool *p) {
    int i;

    if (!p) return;
    mpti_mutex_lock(&p->lock);
    p->closing = true;
    mpti_cond_wake_all(&p->work);
    mpti_mutex_unlock(&p->lock);
    for (i = 0; i < p->num_started; i++) mpti_thread_join(p->threads[i]);
    mpti_cond_destroy(&p->idle);
    mpti_cond_destroy(&p->work);
    mpti_mutex_destroy(&p->lock);
    mpti_free(&p->allocator, p->threads, sizeof *p->threads * (size_t)p->num_threads);
    mpti_free(&p->allocator, p, sizeof *p);
}

static mpt_result mpti_pool_create(const mpt_allocator *allocator, int num_threads, mpt_error *err,
                                   mpti_pool **out) {
    mpti_pool *p = (mpti_pool *)mpti_calloc(allocator, 1, sizeof *p);
    int number;

    if (!p) return MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "no memory for the thread pool");
    p->allocator = *allocator;
    p->num_threads = num_threads - 1;
    mpti_mutex_init(&p->lock);
    mpti_cond_init(&p->work);
    mpti_cond_init(&p->idle);
    if (p->num_threads > 0) {
        p->threads = (mpti_thread *)mpti_calloc(allocator, (size_t)p->num_threads,
                                                sizeof *p->threads);
        if (!p->threads) {
            p->num_threads = 0;
            mpti_pool_destroy(p);
            return MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "no memory for %d threads", num_threads);
        }
    }
    while (p->num_started < p->num_threads) {
        number = mpti_thread_start(&p->threads[p->num_started], mpti_pool_main, p);
        if (number) {
            mpti_pool_destroy(p);
            return MPTI_FAIL_ERRNO(err, MPT_ERR_OUT_OF_MEMORY, number,
                                   "can't start thread %d of %d: lower num_threads",
                                   p->num_started + 2, num_threads);
        }
        p->num_started++;
    }
    *out = p;
    return MPT_OK;
}

MPT_API mpt_result mpt_parallel_for(mpt_ctx *ctx, int64_t num_chunks, mpt_chunk_fn fn, void *user) {
    mpti_pool *p;
    mpt_result rc;

    if (!ctx) return MPT_ERR_INVALID_ARGUMENT;
    if (num_chunks < 0 || !fn) {
        return mpti_report(ctx,
                           MPTI_FAIL(&ctx->error, MPT_ERR_INVALID_ARGUMENT,
                                     "mpt_parallel_for: num_chunks is negative or fn is NULL"));
    }
    if (!ctx->pool) {
        rc = mpti_pool_create(&ctx->desc.allocator, ctx->desc.num_threads, &ctx->error, &ctx->pool);
        if (rc) return mpti_report(ctx, rc);
    }
    p = ctx->pool;
    mpti_mutex_lock(&p->lock);
    p->fn = fn;
    p->user = user;
    p->next = 0;
    p->end = num_chunks;
    p->failure = MPT_OK;
    p->job++;
    if (num_chunks > 1) mpti_cond_wake_all(&p->work);
    mpti_pool_work(p);
    while (p->busy > 0) mpti_cond_wait(&p->idle, &p->lock);
    rc = p->failure;
    mpti_mutex_unlock(&p->lock);
    return rc;
}

/* ---- making a context ------------------------------------------------------------------------ */
MPT_API mpt_result mpt_ctx_create(const mpt_ctx_desc *desc, mpt_ctx **out) {
    mpt_ctx_desc d;
    mpt_ctx *ctx;

    if (!out) return MPT_ERR_INVALID_ARGUMENT;
    *out = NULL;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (d.num_threads < 0 || d.num_threads > 1024) return MPT_ERR_INVALID_ARGUMENT;
    if (!d.allocator.alloc != !d.allocator.free) return MPT_ERR_INVALID_ARGUMENT;
    if (d.num_threads == 0) d.num_threads = mpti_num_cores();
    if (!MPTI_HAVE_THREADS) d.num_threads = 1;
    ctx = (mpt_ctx *)mpti_calloc(&d.allocator, 1, sizeof *ctx);
    if (!ctx) return MPT_ERR_OUT_OF_MEMORY;
    ctx->desc = d;
    *out = ctx;
    return MPT_OK;
}

MPT_API void mpt_ctx_destroy(mpt_ctx *ctx) {
    mpt_allocator allocator;

    if (!ctx) return;
    allocator = ctx->desc.allocator;
    mpti_pool_destroy(ctx->pool);
    mpti_free(&allocator, ctx, sizeof *ctx);
}

/* =================================================================================================
 * >>storage   2.1 Storage: files, retries, checksums, compressed streams
 * =================================================================================================
 * Problem: bytes come from disks, networks and plug-ins that come short, late, or not at all; and
 *          what is written must be there whole or not at all.
 * Idea:    one table of callbacks (mpt_io); every read loops and tries again, since only a failure
 *          that stays is one; every file is written beside its name and renamed when it is whole.
 * Shapes:  bytes and offsets of 64 bits; blocks that several holders share.
 * Tested:  tests/test_tfrecord.c
 * Next:    >>tfrecord, which finds records in the bytes.
 */

/* ---- storage: plain files -----------------------------------------------------------------------
   pread with an offset of our own: after a failed read() the position of a descriptor is not
   specified, and a retry might read something else. Pipes have no offset and take read(). A table
   has no allocator, so this small struct comes from malloc, as the memory of glob does. */
enum { MPTI_MAX_TRANSFER = 1 << 30 }; /* bytes at once: some systems and zlib count in 32 bits */

typedef struct mpti_disk_file {
    int fd;
    bool regular;
    uint64_t offset; /* of the next read */
    int number;      /* errno of the last failure */
    char reason[192];
} mpti_disk_file;

static mpt_result mpti_disk_wrap(const char *path, int flags, void **file) {
    mpti_disk_file *f = (mpti_disk_file *)calloc(1, sizeof *f);
    struct stat status;
    int number;

    if (!f) return MPT_ERR_OUT_OF_MEMORY;
    f->fd = open(path, flags | O_CLOEXEC, 0666);
    number = f->fd < 0 || fstat(f->fd, &status) != 0 ? errno : S_ISDIR(status.st_mode) ? EISDIR : 0;
    if (number) {
        if (f->fd >= 0) close(f->fd);
        free(f);
        errno = number;
        return MPT_ERR_IO;
    }
    f->regular = S_ISREG(status.st_mode);
    *file = f;
    return MPT_OK;
}

static mpt_result mpti_disk_open(const char *path, void **file, void *user) {
    (void)user;
    return mpti_disk_wrap(path, O_RDONLY, file);
}

/* Exclusively: a name that is taken, be it a link somebody laid out, is never written through. */
static mpt_result mpti_disk_create(const char *path, void **file, void *user) {
    (void)user;
    return mpti_disk_wrap(path, O_WRONLY | O_CREAT | O_EXCL, file);
}

static int64_t mpti_disk_read(void *file, void *dst, size_t size) {
    mpti_disk_file *f = (mpti_disk_file *)file;
    ssize_t n;

    if (size > MPTI_MAX_TRANSFER) size = MPTI_MAX_TRANSFER;
    n = f->regular ? pread(f->fd, dst, size, (off_t)f->offset) : read(f->fd, dst, size);
    if (n < 0) f->number = errno;
    else f->offset += (uint64_t)n;
    return n;
}

static int64_t mpti_disk_size(void *file) {
    mpti_disk_file *f = (mpti_disk_file *)file;
    struct stat status;

    return f->regular && fstat(f->fd, &status) == 0 ? (int64_t)status.st_size : -1;
}

static mpt_result mpti_disk_seek(void *file, uint64_t offset) {
    mpti_disk_file *f = (mpti_disk_file *)file;
    off_t position = (off_t)offset;

    errno = !f->regular ? ESPIPE : position < 0 || (uint64_t)position != offset ? EOVERFLOW : 0;
    if (errno) {
        f->number = errno;
        return MPT_ERR_IO;
    }
    f->offset = offset;
    return MPT_OK;
}

static mpt_result mpti_disk_close(void *file) {
    int rc = close(((mpti_disk_file *)file)->fd), number = errno;

    free(file);
    errno = number;
    return rc == 0 || number == EINTR ? MPT_OK : MPT_ERR_IO; /* EINTR: closed all the same */
}

static const char *mpti_disk_error(void *file) {
    mpti_disk_file *f = (mpti_disk_file *)file;

    snprintf(f->reason, sizeof f->reason, "%s (errno %d)", mpti_errno_text(f->number), f->number);
    return f->reason;
}

static int64_t mpti_disk_write(void *file, const void *src, size_t size) {
    mpti_disk_file *f = (mpti_disk_file *)file;
    ssize_t n;

    if (size > MPTI_MAX_TRANSFER) size = MPTI_MAX_TRANSFER;
    n = write(f->fd, src, size);
    if (n < 0) f->number = errno;
    return n;
}

static mpt_result mpti_disk_sync(void *file) {
    mpti_disk_file *f = (mpti_disk_file *)file;

    if (fsync(f->fd) == 0 || errno == EINVAL) return MPT_OK; /* EINVAL: a device without sync */
    f->number = errno;
    return MPT_ERR_IO;
}

/* The new name itself lives in the directory, which is synchronised too. As well as it goes: some
   file systems have no sync of directories, and the data are safe by now. */
static mpt_result mpti_disk_rename(const char *from, const char *to, void *user) {
    const char *slash = strrchr(to, '/');
    char directory[PATH_MAX];
    int fd;

    (void)user;
    if (rename(from, to) != 0) return MPT_ERR_IO;
    snprintf(directory, sizeof directory, "%.*s", slash ? (int)(slash - to) + 1 : 1,
             slash ? to : ".");
    fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return MPT_OK;
    (void)!fsync(fd);
    close(fd);
    return MPT_OK;
}

static mpt_result mpti_disk_remove(const char *path, void *user) {
    (void)user;
    return unlink(path) == 0 ? MPT_OK : MPT_ERR_IO;
}

static int mpti_disk_glob_failed(const char *path, int number) { /* true: give up */
    (void)path;
    errno = number;
    return number != ENOENT && number != ENOTDIR;
}

/* All but directories, and names that begin with a dot. */
static mpt_result mpti_disk_glob(const char *pattern, void (*found)(const char *path, void *arg),
                                 void *arg) {
    glob_t matches;
    size_t i;
    int rc, number;

    memset(&matches, 0, sizeof matches);
    errno = 0;
    rc = glob(pattern, GLOB_MARK, mpti_disk_glob_failed, &matches);
    number = errno;
    for (i = 0; rc == 0 && i < matches.gl_pathc; i++) {
        const char *path = matches.gl_pathv[i];
        if (path[strlen(path) - 1] != '/') found(path, arg); /* GLOB_MARK marks directories so */
    }
    globfree(&matches);
    errno = number;
    if (rc == GLOB_NOSPACE) return MPT_ERR_OUT_OF_MEMORY;
    return rc == 0 || rc == GLOB_NOMATCH ? MPT_OK : MPT_ERR_IO;
}

static mpt_result mpti_disk_list(const char *pattern, void (*found)(const char *path, void *arg),
                                 void *arg, void *user) {
    char inside[2 * PATH_MAX + 3];
    struct stat status;
    size_t n = 0;

    (void)user;
    if (stat(pattern, &status) != 0) {
        if (errno != ENOENT && errno != ENOTDIR) return MPT_ERR_IO;
        return strpbrk(pattern, "*?[") ? mpti_disk_glob(pattern, found, arg) : MPT_OK;
    }
    if (!S_ISDIR(status.st_mode)) { /* before patterns: a name may have a '[' of its own */
        found(pattern, arg);
        return MPT_OK;
    }
    for (; *pattern && n < 2 * PATH_MAX - 1; pattern++) {
        if (strchr("*?[\\", *pattern)) inside[n++] = '\\';
        inside[n++] = *pattern;
    }
    snprintf(inside + n, 3, "%s", n > 0 && inside[n - 1] == '/' ? "*" : "/*");
    return mpti_disk_glob(inside, found, arg);
}

MPT_API const mpt_io *mpt_io_files(void) {
    static const mpt_io files = {mpti_disk_open,
                                 mpti_disk_read,
                                 mpti_disk_size,
                                 mpti_disk_seek,
                                 mpti_disk_close,
                                 mpti_disk_list,
                                 mpti_disk_error,
                                 mpti_disk_create,
                                 mpti_disk_write,
                                 mpti_disk_sync,
                                 mpti_disk_rename,
                                 mpti_disk_remove,
                                 NULL};
    return &files;
}

/* ---- storage: any table -------------------------------------------------------------------------
   Network storage fails for moments, so a failure is believed only when it stays. */
typedef struct mpti_retry {
    int pauses, interrupts;
} mpti_retry;

static bool mpti_retry_after(mpti_retry *r, int number) { /* false: the failure is final */
    switch (number) {
    case EINTR: return r->interrupts++ < 1000;
    case 0: /* the storage gave no reason */
    case EAGAIN:
    case EIO:
    case ESTALE:
    case ETIMEDOUT:
    case ECONNRESET:
    case ENETDOWN:
    case ENETUNREACH:
        if (r->pauses == 4) return false;
        mpti_sleep_ms(10 << r->pauses++);
        return true;
    default: return false;
    }
}

/* "PATH: can't WHAT: REASON", in the storage's own words if it has some. number: errno, fetched
   before anything could change it. handle may be NULL. */
static mpt_result mpti_io_fail(mpt_error *err, mpt_result code, int number, const char *path,
                               const char *what, const mpt_io *io, void *handle) {
    const char *reason = handle && io->error ? io->error(handle) : NULL;

    if (!reason || !*reason) reason = mpti_errno_text(number);
    if (code != MPT_ERR_OUT_OF_MEMORY && code != MPT_ERR_UNSUPPORTED) code = MPT_ERR_IO;
    return MPTI_FAIL_ERRNO(err, code, number, "%s: can't %s: %s", mpti_path_tail(path), what,
                           reason);
}

/* open or create of the table, whichever `callback` is. */
static mpt_result mpti_io_open(const mpt_io *io,
                               mpt_result (*callback)(const char *, void **, void *),
                               const char *path, const char *what, mpt_error *err, void **handle) {
    mpti_retry retry = {0, 0};
    mpt_result rc;
    bool again;

    do {
        int number;

        *handle = NULL;
        errno = 0;
        rc = callback(path, handle, io->user);
        number = errno;
        if (rc == MPT_OK) return MPT_OK;
        again = rc != MPT_ERR_OUT_OF_MEMORY && number != 0 && mpti_retry_after(&retry, number);
        if (!again) rc = mpti_io_fail(err, rc, number, path, what, io, *handle);
        if (*handle) io->close(*handle);
        *handle = NULL;
    } while (again);
    return rc;
}

/* Names that match a pattern, files of a directory, or the name itself. None is no error here. */
static mpt_result mpti_io_list(const mpt_io *io, const char *pattern, mpt_error *err,
                               void (*found)(const char *path, void *arg), void *arg) {
    mpt_result rc;

    if (!io->list) {
        found(pattern, arg);
        return MPT_OK;
    }
    errno = 0;
    rc = io->list(pattern, found, arg, io->user);
    return rc ? mpti_io_fail(err, rc, errno, pattern, "list it", io, NULL) : MPT_OK;
}

typedef struct mpti_file { /* open for reading */
    const mpt_io *io;
    const char *path; /* belongs to the opener */
    void *handle;
    uint64_t offset; /* of the next read */
    int64_t size;    /* bytes; -1: unknown */
} mpti_file;

static void mpti_file_measure(mpti_file *f) {
    f->size = f->io->size ? f->io->size(f->handle) : -1;
    if (f->size < 0) f->size = -1;
}

static mpt_result mpti_file_open(const mpt_io *io, const char *path, mpt_error *err,
                                 mpti_file *out) {
    mpt_result rc;

    memset(out, 0, sizeof *out);
    if (!io->open || !io->read || !io->close)
        return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT, "mpt_io: open, read or close is NULL");
    out->io = io;
    out->path = path;
    rc = mpti_io_open(io, io->open, path, "open it", err, &out->handle);
    if (rc == MPT_OK) mpti_file_measure(out);
    return rc;
}

static void mpti_file_close(mpti_file *f) { /* nothing was written: a failure loses nothing */
    if (f->handle) f->io->close(f->handle);
    f->handle = NULL;
}

/* At least one byte; *got = 0: the end. */
static mpt_result mpti_file_read_some(mpti_file *f, mpt_error *err, void *dst, size_t size,
                                      size_t *got) {
    mpti_retry retry = {0, 0};
    char what[64];
    int64_t n;
    int number;

    *got = 0;
    do {
        errno = 0;
        n = f->io->read(f->handle, dst, size);
        number = errno;
    } while (n < 0 && mpti_retry_after(&retry, number));
    if (n >= 0 && (uint64_t)n <= size) {
        *got = (size_t)n;
        f->offset += (uint64_t)n;
        return MPT_OK;
    }
    if (n > 0)
        return MPTI_FAIL(err, MPT_ERR_IO, "%s: mpt_io.read gave more bytes than were asked for",
                         mpti_path_tail(f->path));
    snprintf(what, sizeof what, "read at offset %llu", (unsigned long long)f->offset);
    return mpti_io_fail(err, MPT_ERR_IO, number, f->path, what, f->io, f->handle);
}

static mpt_result mpti_file_seek(mpti_file *f, mpt_error *err, uint64_t offset) {
    char what[64];
    int number;

    snprintf(what, sizeof what, "go to offset %llu", (unsigned long long)offset);
    errno = 0;
    if (f->io->seek && f->io->seek(f->handle, offset) == MPT_OK) {
        f->offset = offset;
        return MPT_OK;
    }
    number = f->io->seek ? errno : ESPIPE;
    return mpti_io_fail(err, number == ESPIPE ? MPT_ERR_UNSUPPORTED : MPT_ERR_IO, number, f->path,
                        what, f->io, f->io->seek ? f->handle : NULL);
}

static mpt_result mpti_file_size(const mpt_io *io, const char *path, mpt_error *err,
                                 int64_t *size) {
    mpti_file file;
    mpt_result rc = mpti_file_open(io, path, err, &file);

    if (rc) return rc;
    *size = file.size;
    mpti_file_close(&file);
    return MPT_OK;
}

/* A small file as a whole, appended to `out`, which is the caller's to free whatever comes. */
static mpt_result mpti_file_load(const mpt_io *io, const char *path, size_t limit, mpt_error *err,
                                 mpti_buffer *out) {
    mpti_file file;
    mpt_result rc = mpti_file_open(io, path, err, &file);
    size_t got = 1;

    while (rc == MPT_OK && got > 0) {
        if (out->size > limit)
            rc = MPTI_FAIL(err, MPT_ERR_CORRUPT_DATA, "%s: larger than the %llu bytes it may have",
                           mpti_path_tail(path), (unsigned long long)limit);
        else if (!mpti_buffer_reserve(out, 16 * 1024))
            rc = MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "%s: no memory to read it",
                           mpti_path_tail(path));
        else
            rc = mpti_file_read_some(&file, err, out->data + out->size, out->capacity - out->size,
                                     &got);
        if (rc == MPT_OK) out->size += got;
    }
    mpti_file_close(&file);
    return rc;
}

/* ---- storage: a file that appears whole or not at all ---------------------------------------- */
enum { MPTI_OUTPUT_BUFFER = 64 * 1024 };

typedef struct mpti_output {
    const mpt_allocator *allocator;
    const mpt_io *io;
    char *path, *temporary;
    size_t temporary_bytes; /* as allocated */
    void *handle;           /* NULL: closed */
    uint8_t *buffer;        /* [MPTI_OUTPUT_BUFFER] */
    size_t used;
} mpti_output;

static void mpti_output_remove(mpti_output *o) {
    if (o->io->remove) (void)!o->io->remove(o->temporary, o->io->user);
}

static void mpti_output_close(mpti_output *o) { /* before it is finished: leaves nothing behind */
    if (o->handle) {
        o->io->close(o->handle);
        mpti_output_remove(o);
    }
    mpti_free(o->allocator, o->buffer, MPTI_OUTPUT_BUFFER);
    mpti_free(o->allocator, o->temporary, o->temporary_bytes);
    mpti_strfree(o->allocator, o->path);
    memset(o, 0, sizeof *o);
}

/* Beside the target, so that the rename stays within one file system. Process, clock and address
   keep writers apart; should they not, the exclusive create tells, and the next name is tried. */
static mpt_result mpti_output_create(mpti_output *o, mpt_error *err) {
    mpt_error error;
    mpt_result rc = MPT_ERR_IO;
    int attempt;

    for (attempt = 0; attempt < 100; attempt++) {
        struct timespec now;
        uint64_t unique;

        clock_gettime(CLOCK_REALTIME, &now);
        unique = ((uint64_t)now.tv_sec << 30 | (uint64_t)now.tv_nsec) ^ (uint64_t)(uintptr_t)o;
        snprintf(o->temporary, o->temporary_bytes, "%s.tmp-%ld-%llx", o->path, (long)getpid(),
                 (unsigned long long)unique);
        rc = mpti_io_open(o->io, o->io->create, o->temporary, "create it", &error, &o->handle);
        if (rc == MPT_OK) return MPT_OK;
        if (error.native_code != EEXIST) break;
    }
    if (err) *err = error;
    return rc;
}

static mpt_result mpti_output_open(const mpt_allocator *allocator, const mpt_io *io,
                                   const char *path, mpt_error *err, mpti_output *o) {
    struct stat status;
    mpt_result rc;

    memset(o, 0, sizeof *o);
    if (!io->create || !io->write || !io->close || !io->rename)
        return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT,
                         "mpt_io: create, write, close or rename is NULL, which writing needs");
    o->allocator = allocator;
    o->io = io;
    o->path = mpti_strdup(allocator, path);
    o->temporary_bytes = strlen(path) + 48; /* two numbers of at most 20 digits, 6 more, the end */
    o->temporary = (char *)mpti_alloc(allocator, o->temporary_bytes);
    o->buffer = (uint8_t *)mpti_alloc(allocator, MPTI_OUTPUT_BUFFER);
    if (io == mpt_io_files() && stat(path, &status) == 0 && S_ISDIR(status.st_mode))
        rc = mpti_io_fail(err, MPT_ERR_IO, EISDIR, path, "write it", io, NULL); /* not at the end */
    else if (o->path && o->temporary && o->buffer) rc = mpti_output_create(o, err);
    else
        rc = MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "%s: no memory to write it",
                       mpti_path_tail(path));
    if (rc) mpti_output_close(o);
    return rc;
}

static mpt_result mpti_output_put(mpti_output *o, mpt_error *err, const uint8_t *data,
                                  size_t size) {
    mpti_retry retry = {0, 0};

    while (size > 0) {
        int64_t n;
        int number;

        errno = 0;
        n = o->io->write(o->handle, data, size);
        number = errno;
        if (n > 0 && (uint64_t)n <= size) {
            data += n;
            size -= (size_t)n;
        } else if (n >= 0 || (number != EINTR && number != EAGAIN) ||
                   !mpti_retry_after(&retry, number)) {
            return mpti_io_fail(err, MPT_ERR_IO, number, o->path, "write it", o->io, o->handle);
        }
    }
    return MPT_OK;
}

static mpt_result mpti_output_flush(mpti_output *o, mpt_error *err) {
    size_t used = o->used;

    o->used = 0;
    return mpti_output_put(o, err, o->buffer, used);
}

static mpt_result mpti_output_write(mpti_output *o, mpt_error *err, const void *data, size_t size) {
    mpt_result rc;

    if (size > MPTI_OUTPUT_BUFFER - o->used && (rc = mpti_output_flush(o, err)) != MPT_OK)
        return rc;
    if (size >= MPTI_OUTPUT_BUFFER) return mpti_output_put(o, err, (const uint8_t *)data, size);
    if (size) memcpy(o->buffer + o->used, data, size);
    o->used += size;
    return MPT_OK;
}

static mpt_result mpti_output_finish(mpti_output *o, mpt_error *err) { /* close it all the same */
    const mpt_io *io = o->io;
    mpt_result rc = mpti_output_flush(o, err);

    if (rc) return rc;
    errno = 0;
    rc = io->sync ? io->sync(o->handle) : MPT_OK;
    if (rc) return mpti_io_fail(err, rc, errno, o->path, "bring it to the medium", io, o->handle);
    errno = 0;
    rc = io->close(o->handle);
    o->handle = NULL;
    if (rc) {
        rc = mpti_io_fail(err, rc, errno, o->path, "close it after writing", io, NULL);
    } else {
        errno = 0;
        rc = io->rename(o->temporary, o->path, io->user);
        if (rc)
            rc = mpti_io_fail(err, rc, errno, o->path, "give the finished file its name", io, NULL);
    }
    if (rc) mpti_output_remove(o);
    return rc;
}

/* ---- CRC-32C --------------------------------------------------------------------------------- */
enum {
    MPTI_CRC32C_TABLE = 0,
    MPTI_CRC32C_SINGLE,
    MPTI_CRC32C_TRIPLE
}; /* 1, 8, 3 x 8 bytes a step */

#if defined(__x86_64__)
static uint64_t mpti_crc32c_word(const uint8_t *p) { /* in memory order, which is the CRC's */
    uint64_t word;
    memcpy(&word, p, sizeof word);
    return word;
}

/* state: the register, which is the complement of the CRC. */
__attribute__((target("sse4.2"))) static uint32_t
mpti_crc32c_single(uint32_t state, const uint8_t *p, size_t size) {
    uint64_t wide = state;

    for (; size >= 8; size -= 8, p += 8) wide = _mm_crc32_u64(wide, mpti_crc32c_word(p));
    state = (uint32_t)wide;
    for (; size > 0; size--, p++) state = _mm_crc32_u8(state, *p);
    return state;
}

/* The instruction takes a word each cycle but needs three for its result, so three streams of
   `stream` bytes run at once. Joining them: a register A moved over n zero bits is A * x^n mod P.
   In reflected order the 64-bit carry-less product of A and B stands for A * B * x, and the CRC
   step of that word multiplies by x^32 and reduces; with B = x^(n-33) mod P that makes A * x^n. far
   and near are x^(16*stream-33) and x^(8*stream-33) mod P, reflected. */
__attribute__((target("sse4.2,pclmul"))) static uint32_t
mpti_crc32c_join(uint32_t state, const uint8_t **data, size_t *size, size_t stream, uint32_t far,
                 uint32_t near) {
    const __m128i factor_far = _mm_cvtsi64_si128((long long)far);
    const __m128i factor_near = _mm_cvtsi64_si128((long long)near);
    const uint8_t *p = *data;

    for (; *size >= 3 * stream; *size -= 3 * stream, p += 2 * stream) {
        const uint8_t *end = p + stream;
        uint64_t a = state, b = 0, c = 0;
        __m128i product;

        for (; p < end; p += 8) {
            a = _mm_crc32_u64(a, mpti_crc32c_word(p));
            b = _mm_crc32_u64(b, mpti_crc32c_word(p + stream));
            c = _mm_crc32_u64(c, mpti_crc32c_word(p + 2 * stream));
        }
        product =
            _mm_xor_si128(_mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)a), factor_far, 0),
                          _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)b), factor_near, 0));
        state = (uint32_t)(_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product)) ^ c);
    }
    *data = p;
    return state;
}

enum { MPTI_CRC32C_LONG = 4096, MPTI_CRC32C_SHORT = 256 }; /* bytes of a stream */
#define MPTI_CRC32C_LONG_FAR 0x54a86326u                   /* x^65503 mod P */
#define MPTI_CRC32C_LONG_NEAR 0x82f89c77u                  /* x^32735 mod P */
#define MPTI_CRC32C_SHORT_FAR 0xdd7e3b0cu                  /* x^4063 mod P */
#define MPTI_CRC32C_SHORT_NEAR 0xb9e02b86u                 /* x^2015 mod P */

static uint32_t mpti_crc32c_triple(uint32_t state, const uint8_t *p, size_t size) {
    state = mpti_crc32c_join(state, &p, &size, MPTI_CRC32C_LONG, MPTI_CRC32C_LONG_FAR,
                             MPTI_CRC32C_LONG_NEAR);
    state = mpti_crc32c_join(state, &p, &size, MPTI_CRC32C_SHORT, MPTI_CRC32C_SHORT_FAR,
                             MPTI_CRC32C_SHORT_NEAR);
    return mpti_crc32c_single(state, p, size);
}
#elif defined(MPTI_ARM64)
/* The extension is named in the text, since compilers disagree about the target attribute. */
static uint32_t mpti_crc32c_single(uint32_t state, const uint8_t *p, size_t size) {
    for (; size >= 8; size -= 8, p += 8) {
        uint64_t word = mpti_load_u64(p);
        __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(state) : "r"(word));
    }
    for (; size > 0; size--, p++) {
        uint32_t byte = *p;
        __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(state) : "r"(byte));
    }
    return state;
}
#endif

static int mpti_crc32c_best(void) { /* on this machine */
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("sse4.2")) return MPTI_CRC32C_TABLE;
    return __builtin_cpu_supports("pclmul") ? MPTI_CRC32C_TRIPLE : MPTI_CRC32C_SINGLE;
#elif defined(MPTI_ARM64)
    const unsigned long has_crc32 = 1ul << 7; /* HWCAP_CRC32 of Linux */
    return getauxval(AT_HWCAP) & has_crc32 ? MPTI_CRC32C_SINGLE : MPTI_CRC32C_TABLE;
#else
    return MPTI_CRC32C_TABLE;
#endif
}

static uint32_t mpti_crc32c_with(int kind, uint32_t crc, const void *data, size_t size) {
    const uint8_t *p = (const uint8_t *)data;

#if defined(__x86_64__)
    if (kind == MPTI_CRC32C_TRIPLE) return ~mpti_crc32c_triple(~crc, p, size);
#endif
#if defined(__x86_64__) || defined(MPTI_ARM64)
    if (kind == MPTI_CRC32C_SINGLE) return ~mpti_crc32c_single(~crc, p, size);
#endif
    (void)kind;
    return mpti_crc_bytes(mpti_crc32c_table, crc, p, size);
}

MPT_API uint32_t mpt_crc32c(uint32_t crc, const void *data, size_t size) {
    return mpti_crc32c_with(mpti_crc32c_best(), crc, data, size);
}

/* A CRC over data that hold their own CRC is always the same number: so TFRecord turns it. */
static uint32_t mpti_masked_crc32c(const void *data, size_t size) {
    uint32_t crc = mpt_crc32c(0, data, size);
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

/* ---- blocks: bytes that several holders share ---------------------------------------------------
   A record is handed out where it was read. Whoever keeps it retains its block; the reader sees
   that and goes on in another one. */
typedef struct mpti_block {
    int references;
    size_t bytes;    /* of the allocation: this struct and the data behind it */
    size_t capacity; /* of the data */
    uint8_t *data;   /* [capacity] */
    const mpt_allocator *allocator;
} mpti_block;

static mpti_block *mpti_block_create(const mpt_allocator *allocator,
                                     size_t capacity) { /* or NULL */
    mpti_block *b;
    size_t bytes;

    if (!mpti_add(capacity, sizeof *b, &bytes)) return NULL;
    b = (mpti_block *)mpti_alloc(allocator, bytes);
    if (!b) return NULL;
    b->references = 1;
    b->bytes = bytes;
    b->capacity = capacity;
    b->data = (uint8_t *)(b + 1);
    b->allocator = allocator;
    return b;
}

static void mpti_block_retain(mpti_block *b) {
    __atomic_add_fetch(&b->references, 1, __ATOMIC_RELAXED);
}

static void mpti_block_release(mpti_block *b) {
    if (b && __atomic_sub_fetch(&b->references, 1, __ATOMIC_ACQ_REL) == 0)
        mpti_free(b->allocator, b, b->bytes);
}

/* ---- compressed streams ---------------------------------------------------------------------- */
static const char *mpti_compression_name(mpt_compression kind) {
    return kind == MPT_COMPRESSION_GZIP ? "gzip" : kind == MPT_COMPRESSION_ZLIB ? "zlib" : "plain";
}

#ifdef MPTRAIN_ZLIB
typedef struct mpti_zlib { /* in one direction */
    z_stream z;
    mpt_compression kind;
    const mpt_allocator *allocator;
    mpti_block *block;     /* compressed bytes; z points into it */
    bool deflates, opened; /* opened: zlib holds memory */
    bool between;          /* inflate: a member has ended; another one or the end follows */
    bool later_member;     /* inflate: not the first one */
} mpti_zlib;

static voidpf mpti_zlib_alloc(voidpf allocator, uInt items, uInt size) {
    size_t bytes;
    return mpti_mul(items, size, &bytes) ? mpti_sized_alloc((const mpt_allocator *)allocator, bytes)
                                         : NULL;
}

static void mpti_zlib_free(voidpf allocator, voidpf p) {
    mpti_sized_free((const mpt_allocator *)allocator, p);
}

static uInt mpti_zlib_size(size_t size) {
    return size > MPTI_MAX_TRANSFER ? (uInt)MPTI_MAX_TRANSFER : (uInt)size;
}

static void mpti_zlib_close(mpti_zlib *s) {
    if (!s) return;
    if (s->opened && s->deflates) deflateEnd(&s->z);
    if (s->opened && !s->deflates) inflateEnd(&s->z);
    mpti_block_release(s->block);
    mpti_free(s->allocator, s, sizeof *s);
}

/* level: of compression; 0: inflate. Takes over `block` unless it fails. */
static mpt_result mpti_zlib_open(const mpt_allocator *allocator, mpt_compression kind, int level,
                                 const char *path, mpti_block *block, mpt_error *err,
                                 mpti_zlib **out) {
    const int window = kind == MPT_COMPRESSION_GZIP ? 15 + 16 : 15; /* 16: with gzip's header */
    const int memory_level = 8;                                     /* zlib's default */
    mpti_zlib *s = (mpti_zlib *)mpti_calloc(allocator, 1, sizeof *s);
    int code = Z_MEM_ERROR;

    if (s) {
        s->kind = kind;
        s->allocator = allocator;
        s->deflates = level > 0;
        s->z.zalloc = mpti_zlib_alloc;
        s->z.zfree = mpti_zlib_free;
        s->z.opaque = (voidpf)(uintptr_t)allocator;
        code = level == 0 ? inflateInit2(&s->z, window)
                          : deflateInit2(&s->z, level, Z_DEFLATED, window, memory_level,
                                         Z_DEFAULT_STRATEGY);
    }
    if (code != Z_OK) {
        mpti_zlib_close(s);
        return MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "%s: no memory for %s", mpti_path_tail(path),
                         mpti_compression_name(kind));
    }
    s->opened = true;
    s->block = block;
    *out = s;
    return MPT_OK;
}

/* At least one byte; *got = 0: the end. `where` opens the message. */
static mpt_result mpti_zlib_read(mpti_zlib *s, mpti_file *file, const char *where, mpt_error *err,
                                 uint8_t *dst, size_t size, size_t *got) {
    const char *name = mpti_compression_name(s->kind);
    mpt_result rc;
    size_t n;
    int code;

    *got = 0;
    for (;;) {
        if (s->z.avail_in == 0) {
            rc = mpti_file_read_some(file, err, s->block->data, mpti_zlib_size(s->block->capacity),
                                     &n);
            if (rc) return rc;
            if (n == 0 && s->between) return MPT_OK;
            if (n == 0)
                return MPTI_FAIL(err, MPT_ERR_CORRUPT_DATA,
                                 "%s: the %s stream ends in the middle; the file is cut", where,
                                 name);
            s->z.next_in = s->block->data;
            s->z.avail_in = (uInt)n;
        }
        if (s->between && s->kind == MPT_COMPRESSION_ZLIB)
            return MPTI_FAIL(err, MPT_ERR_CORRUPT_DATA,
                             "%s: the file goes on behind the zlib stream", where);
        if (s->between)
            inflateReset(&s->z); /* gzip: the next member, whose header inflate checks */
        s->later_member |= s->between;
        s->between = false;
        s->z.next_out = dst;
        s->z.avail_out = mpti_zlib_size(size);
        code = inflate(&s->z, Z_NO_FLUSH);
        *got = (size_t)(s->z.next_out - dst);
        s->between = code == Z_STREAM_END;
        if (*got > 0) return MPT_OK; /* what came before a fault is good; the fault comes again */
        if (code == Z_OK || code == Z_STREAM_END || code == Z_BUF_ERROR) continue;
        if (code == Z_MEM_ERROR)
            return MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "%s: no memory for %s", where, name);
        rc = MPTI_FAIL_ERRNO(err, MPT_ERR_CORRUPT_DATA, code,
                             "%s: the %s stream is damaged (zlib: %s)%s", where, name,
                             s->z.msg ? s->z.msg : "it needs a dictionary",
                             s->later_member && s->z.total_out == 0
                                 ? " in what follows its first part"
                                 : "");
        if (err) err->native_domain = "zlib";
        return rc;
    }
}

static mpt_result mpti_zlib_write(mpti_zlib *s, mpti_output *o, mpt_error *err, const uint8_t *data,
                                  size_t size, bool last) {
    mpt_result rc = MPT_OK;

    do {
        uInt piece = mpti_zlib_size(size);

        s->z.next_in = (Bytef *)(uintptr_t)data; /* only read, but const only with ZLIB_CONST */
        s->z.avail_in = piece;
        do {
            s->z.next_out = s->block->data;
            s->z.avail_out = (uInt)s->block->capacity;
            deflate(&s->z, last && piece == size ? Z_FINISH : Z_NO_FLUSH);
            rc = mpti_output_write(o, err, s->block->data, s->block->capacity - s->z.avail_out);
        } while (rc == MPT_OK && s->z.avail_out == 0);
        data = data ? data + piece : NULL;
        size -= piece;
    } while (rc == MPT_OK && size > 0);
    return rc;
}
#else
typedef struct mpti_zlib mpti_zlib;

static mpt_result mpti_zlib_open(const mpt_allocator *allocator, mpt_compression kind, int level,
                                 const char *path, mpti_block *block, mpt_error *err,
                                 mpti_zlib **out) {
    (void)allocator, (void)level, (void)block, (void)out;
    return MPTI_FAIL(
        err, MPT_ERR_UNSUPPORTED,
        "%s: %s compression needs a program built with -DMPTRAIN_ZLIB and -lz",
        mpti_path_tail(path), mpti_compression_name(kind));
}
#endif

/* =================================================================================================
 * >>tfrecord   2.2 Records: framing, reading, writing, index
 * =================================================================================================
 * Problem: files are cut, damaged, or of another format; what is read must be what was written, and
 *          an error must say where it is.
 * Idea:    nothing is believed before it is checked: a length has a checksum of its own and is held
 *          against the bytes left before memory is asked for. Trouble of the storage is no damage.
 * Shapes:  a record: u64 length | u32 mask(crc(length)) | payload | u32 mask(crc(payload)), all
 *          little-endian; mask(c) = (c >> 15 | c << 17) + 0xa282ead8. GZIP and ZLIB wrap the whole.
 * Tested:  tests/test_tfrecord.c
 * Next:    >>example, which looks into the payload.
 */

/* ---- framing, reading ------------------------------------------------------------------------ */
enum {
    MPTI_HEADER_BYTES = 12,            /* length and its checksum */
    MPTI_FOOTER_BYTES = 4,             /* checksum of the payload */
    MPTI_FRAME_BYTES = 16,             /* both */
    MPTI_BLOCK_BYTES = 256 * 1024,     /* of a reader */
    MPTI_WALK_BLOCK_BYTES = 64 * 1024, /* of one that only looks at headers */
    MPTI_MIN_BLOCK = 64,
    MPTI_FIRST_ASK = 4 * 1024, /* bytes asked for after a jump; doubled while reading goes on */
    MPTI_SHORT_HOP = 16 * 1024 /* to read so much on costs less than a jump */
};

struct mpt_tfrecord {
    mpt_ctx *ctx; /* NULL: opened inside the library */
    const mpt_allocator *allocator;
    mpt_tfrecord_desc desc; /* with defaults */
    char *path;
    mpti_file file;
    mpt_compression compression;
    mpti_zlib *zlib;   /* NULL: plain */
    mpti_block *block; /* data[pos .. end) has been read and not yet delivered */
    size_t start;      /* data[start .. end) is a run of the file without a gap */
    size_t pos, end;
    size_t block_bytes; /* of a new block, unless a record needs more */
    size_t ask;
    uint64_t offset;   /* of data[pos], in the (decompressed) file */
    int64_t record;    /* number of the record that begins there */
    bool skip_pending; /* first pass over the record that begins there; its length is known */
    mpt_tfrecord_position position;
    mpt_error error; /* of the last failure */
    bool failed;     /* for good: error comes again */
    bool resync;     /* the last failure left the framing whole */
    bool left_out;   /* by policy: the rest of the file */
    int64_t num_bad;
};

typedef struct mpti_record {
    mpt_bytes payload;
    mpti_block *block; /* where it lies; not retained */
    int64_t index;
    uint64_t offset; /* of its length field */
} mpti_record;

/* "PATH: record 17 at offset 1234", the opening of each message about data. */
static const char *mpti_tfrecord_where(const mpt_tfrecord *f, char text[256]) {
    snprintf(text, 256, "%s: record %lld at offset %llu%s", mpti_path_tail(f->path),
             (long long)f->position.record, (unsigned long long)f->position.offset,
             f->zlib ? " of the decompressed data" : "");
    return text;
}

static mpt_result mpti_tfrecord_no_memory(mpt_tfrecord *f, size_t bytes) {
    return MPTI_FAIL(&f->error, MPT_ERR_OUT_OF_MEMORY, "%s: no memory for a block of %llu bytes",
                     mpti_path_tail(f->path), (unsigned long long)bytes);
}

/* At least one byte of the (decompressed) file; *got = 0: the end. */
static mpt_result mpti_tfrecord_stream(mpt_tfrecord *f, uint8_t *dst, size_t size, size_t *got) {
#ifdef MPTRAIN_ZLIB
    char where[256];
    if (f->zlib)
        return mpti_zlib_read(f->zlib, &f->file, mpti_tfrecord_where(f, where), &f->error, dst,
                              size, got);
#endif
    return mpti_file_read_some(&f->file, &f->error, dst, size, got);
}

/* Bytes from here to the end of the file; where that is not known, more than any record has. */
static uint64_t mpti_tfrecord_left(const mpt_tfrecord *f) {
    if (f->zlib || f->file.size < 0) return UINT64_MAX;
    return (uint64_t)f->file.size > f->offset ? (uint64_t)f->file.size - f->offset : 0;
}

/* Makes room behind data[end), so that data[pos .. pos + need) can come to be. Where the size of
   the file bears `need` out, at once; else in steps, by doubling what has really arrived. */
static mpt_result mpti_tfrecord_room(mpt_tfrecord *f, size_t need) {
    uint64_t left = mpti_tfrecord_left(f);
    bool certain = left < UINT64_MAX;
    size_t unread = f->end - f->pos, capacity = f->block_bytes;
    mpti_block *block = f->block;

    if (need <= block->capacity - f->pos) return MPT_OK;
    if (!certain && f->pos == 0 && f->end < block->capacity) return MPT_OK;
    if (certain && left < capacity) capacity = (size_t)left;
    if (capacity < MPTI_MIN_BLOCK) capacity = MPTI_MIN_BLOCK;
    if (certain && need > capacity) capacity = need;
    if (!certain && unread > capacity / 2) capacity = 2 * unread < need ? 2 * unread : need;
    if (__atomic_load_n(&block->references, __ATOMIC_ACQUIRE) > 1 || block->capacity < capacity) {
        block = mpti_block_create(f->allocator, capacity);
        if (!block) return mpti_tfrecord_no_memory(f, capacity);
    }
    memmove(block->data, f->block->data + f->pos, unread);
    if (block != f->block) mpti_block_release(f->block);
    f->block = block;
    f->start = f->pos = 0;
    f->end = unread;
    return MPT_OK;
}

/* Reads until data[pos .. pos + need) is there. If the file ends before, that is no error here. */
static mpt_result mpti_tfrecord_fill(mpt_tfrecord *f, size_t need) {
    mpt_result rc = MPT_OK;
    size_t got = 1;

    while (f->end - f->pos < need && got > 0) {
        size_t missing = need - (f->end - f->pos), ask = f->ask > missing ? f->ask : missing;

        rc = mpti_tfrecord_room(f, need);
        if (rc) return rc;
        if (ask > f->block->capacity - f->end) ask = f->block->capacity - f->end;
        rc = mpti_tfrecord_stream(f, f->block->data + f->end, ask, &got);
        if (rc) return rc;
        f->end += got;
        if (f->ask < f->block_bytes) f->ask *= 2;
    }
    return MPT_OK;
}

static void mpti_tfrecord_advance(mpt_tfrecord *f, size_t bytes) {
    f->pos += bytes;
    f->offset += bytes;
}

/* To an offset of a plain file: inside the block, or by a seek. */
static mpt_result mpti_tfrecord_jump(mpt_tfrecord *f, uint64_t offset) {
    uint64_t begin = f->offset - (f->pos - f->start), end = f->offset + (f->end - f->pos);
    mpt_result rc;

    if (offset >= begin && offset <= end) {
        f->pos = f->start + (size_t)(offset - begin);
    } else {
        rc = mpti_file_seek(&f->file, &f->error, offset);
        if (rc) return rc;
        f->start = f->pos = f->end; /* what lies before is of elsewhere; room() makes room */
        f->ask = MPTI_FIRST_ASK;
    }
    f->offset = offset;
    return MPT_OK;
}

static mpt_result mpti_tfrecord_cut(mpt_tfrecord *f, uint64_t have, uint64_t need,
                                    const char *part) {
    char where[256];

    return MPTI_FAIL(&f->error, MPT_ERR_CORRUPT_DATA,
                     "%s: the file is cut: it ends inside the %s, %llu of %llu bytes are missing",
                     mpti_tfrecord_where(f, where), part, (unsigned long long)(need - have),
                     (unsigned long long)need);
}

/* Passes over the record that begins here, whose header has been checked. Its last four bytes are
   really read, since a seek goes behind the end of a cut file without complaint. */
static mpt_result mpti_tfrecord_pass(mpt_tfrecord *f) {
    uint64_t begin = f->position.offset, end = begin + MPTI_HEADER_BYTES + f->position.size;
    bool seeks = !f->zlib && f->file.size >= 0 && f->file.io->seek;
    mpt_result rc = MPT_OK;

    if (seeks && end > f->offset + MPTI_SHORT_HOP) rc = mpti_tfrecord_jump(f, end);
    while (rc == MPT_OK && f->offset < end) {
        uint64_t step = end - f->offset;

        rc = mpti_tfrecord_fill(f, 1);
        if (rc || f->end == f->pos) break;
        if (step > f->end - f->pos) step = f->end - f->pos;
        mpti_tfrecord_advance(f, (size_t)step);
    }
    if (rc == MPT_OK) rc = mpti_tfrecord_fill(f, MPTI_FOOTER_BYTES);
    if (rc) return rc;
    if (f->end - f->pos < MPTI_FOOTER_BYTES)
        return mpti_tfrecord_cut(f, f->offset + (f->end - f->pos) - begin,
                                 f->position.size + MPTI_FRAME_BYTES, "record");
    mpti_tfrecord_advance(f, MPTI_FOOTER_BYTES);
    f->record++;
    f->skip_pending = false;
    return MPT_OK;
}

/* What a file may be that is no TFRecord file, from its first bytes. */
static const char *mpti_tfrecord_guess(const uint8_t head[MPTI_HEADER_BYTES]) {
    static const uint8_t riegeli[8] = {0x83, 0xaf, 0x70, 0xd1, 0x0d, 0x88, 0x4a, 0x3f};
    int i;

    if (!memcmp(head, "version http", 12))
        return "; this is a Git LFS pointer, not the file itself: run git lfs pull";
    if (!memcmp(head, riegeli, 8))
        return "; this is a Riegeli or ArrayRecord file: convert it to TFRecord";
    if (!memcmp(head, "PK\3\4", 4)) return "; this is a ZIP archive: unpack it";
    if (head[0] == '<') return "; this looks like an HTML or XML page, maybe of a failed download";
    if (!memcmp(head, "\x89PNG", 4) || !memcmp(head, "\xff\xd8\xff", 3))
        return "; this is a picture, not a file of records";
    if (!memcmp(head, "0 ", 2) && head[2] >= '1' && head[2] <= '9')
        return "; this looks like a record index (.idx): leave it out";
    for (i = 0; i < MPTI_HEADER_BYTES; i++)
        if ((head[i] < 0x20 || head[i] > 0x7e) && head[i] != '\n' && head[i] != '\r' &&
            head[i] != '\t')
            return "";
    return "; this looks like a text file";
}

static mpt_result mpti_tfrecord_bad_length(mpt_tfrecord *f, const uint8_t *head) {
    uint32_t stored = mpti_load_u32(head + 8), computed = mpti_masked_crc32c(head, 8);
    char where[256];

    mpti_tfrecord_where(f, where);
    if (f->record > 0)
        return MPTI_FAIL(
            &f->error, MPT_ERR_CORRUPT_DATA,
            "%s: length checksum is wrong (stored %08x, computed %08x); where the next "
            "record begins is not known",
            where, stored, computed);
    return MPTI_FAIL(
        &f->error, MPT_ERR_CORRUPT_DATA,
        "%s: length checksum is wrong (stored %08x, computed %08x; the first bytes are "
        "%02x %02x %02x %02x %02x %02x %02x %02x): damaged, or no TFRecord file%s",
        where, stored, computed, head[0], head[1], head[2], head[3], head[4], head[5], head[6],
        head[7], mpti_tfrecord_guess(head));
}

/* Checks the header of the record that begins here, and that its payload can be there. */
static mpt_result mpti_tfrecord_header(mpt_tfrecord *f) {
    mpt_result rc = f->skip_pending ? mpti_tfrecord_pass(f) : MPT_OK;
    mpt_tfrecord_position last = f->position;
    const uint8_t *head;
    uint64_t length, bytes;
    char where[256];

    if (rc) return rc;
    f->position.record = f->record;
    f->position.offset = f->offset;
    f->position.size = 0;
    rc = mpti_tfrecord_fill(f, MPTI_HEADER_BYTES);
    if (rc) return rc;
    if (f->end == f->pos) {
        f->position = last;
        return MPT_END;
    }
    if (f->end - f->pos < MPTI_HEADER_BYTES)
        return mpti_tfrecord_cut(f, f->end - f->pos, MPTI_HEADER_BYTES, "record's header");
    head = f->block->data + f->pos;
    if (mpti_masked_crc32c(head, 8) != mpti_load_u32(head + 8))
        return mpti_tfrecord_bad_length(f, head);
    length = mpti_load_u64(head);
    f->position.size = length;
    if (length > (uint64_t)INT64_MAX - MPTI_FRAME_BYTES - f->offset)
        return MPTI_FAIL(&f->error, MPT_ERR_CORRUPT_DATA,
                         "%s: its length of %llu bytes is more than a file holds",
                         mpti_tfrecord_where(f, where), (unsigned long long)length);
    bytes = length + MPTI_FRAME_BYTES;
    if (mpti_tfrecord_left(f) < bytes) mpti_file_measure(&f->file); /* it may have grown */
    if (mpti_tfrecord_left(f) < bytes)
        return mpti_tfrecord_cut(f, mpti_tfrecord_left(f), bytes, "record");
    if (length > f->desc.max_record_bytes || length > SIZE_MAX - MPTI_FRAME_BYTES) {
        f->skip_pending = f->resync = true;
        return MPTI_FAIL(
            &f->error, MPT_ERR_CORRUPT_DATA,
            "%s: its %llu bytes are more than max_record_bytes (%llu): raise it if they are "
            "meant to be",
            mpti_tfrecord_where(f, where), (unsigned long long)length,
            (unsigned long long)f->desc.max_record_bytes);
    }
    return MPT_OK;
}

static mpt_result mpti_tfrecord_payload(mpt_tfrecord *f, mpti_record *out) {
    size_t length = (size_t)f->position.size, have;
    uint32_t stored, computed;
    char where[256];
    mpt_result rc = mpti_tfrecord_fill(f, length + MPTI_FRAME_BYTES);

    if (rc) return rc;
    have = f->end - f->pos;
    if (have < length + MPTI_FRAME_BYTES)
        return mpti_tfrecord_cut(f, have, length + MPTI_FRAME_BYTES, "record");
    out->payload.data = f->block->data + f->pos + MPTI_HEADER_BYTES;
    out->payload.size = length;
    out->block = f->block;
    out->index = f->record;
    out->offset = f->offset;
    mpti_tfrecord_advance(f, length + MPTI_FRAME_BYTES);
    f->record++;
    if (f->desc.skip_crc) return MPT_OK;
    stored = mpti_load_u32(out->payload.data + length);
    computed = mpti_masked_crc32c(out->payload.data, length);
    if (stored == computed) return MPT_OK;
    f->resync = true;
    return MPTI_FAIL(
        &f->error, MPT_ERR_CORRUPT_DATA,
        "%s: payload checksum is wrong (stored %08x, computed %08x); the file is damaged here",
        mpti_tfrecord_where(f, where), stored, computed);
}

/* One record, whatever the policy. After an error mpti_tfrecord_can_resume tells whether the next
   call goes on behind it; else the error comes again, until a seek. Only memory that was lacking is
   asked for again. */
static mpt_result mpti_tfrecord_read(mpt_tfrecord *f, mpt_error *err, mpti_record *out) {
    mpt_result rc = MPT_OK;

    memset(out, 0, sizeof *out);
    if (f->failed) {
        rc = f->error.code;
    } else {
        f->resync = false;
        rc = mpti_tfrecord_header(f);
        if (rc == MPT_OK) rc = mpti_tfrecord_payload(f, out);
        f->failed = rc < 0 && !f->resync && rc != MPT_ERR_OUT_OF_MEMORY;
    }
    if (rc < 0 && err) *err = f->error;
    return rc;
}

static bool mpti_tfrecord_can_resume(const mpt_tfrecord *f) {
    return !f->failed && f->resync;
}

/* The one place where defaults of mpt_tfrecord_desc are filled in. */
static mpt_result mpti_tfrecord_desc_resolve(const mpt_tfrecord_desc *desc, mpt_error *err,
                                             mpt_tfrecord_desc *out) {
    if (!desc || !desc->path)
        return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT, "mpt_tfrecord_desc.path is required");
    *out = *desc;
    if (!out->io) out->io = mpt_io_files();
    if (out->max_record_bytes == 0) out->max_record_bytes = (uint64_t)1 << 30;
    if (out->max_bad_records == 0) out->max_bad_records = 1000;
    if (out->max_bad_records < 0)
        return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT,
                         "mpt_tfrecord_desc.max_bad_records is negative");
    if (out->on_bad_record < MPT_BAD_RECORD_FAIL || out->on_bad_record > MPT_BAD_RECORD_SKIP_FILE)
        return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT,
                         "mpt_tfrecord_desc.on_bad_record is unknown");
    return MPT_OK;
}

/* A right length checksum is proof of a plain file, whatever its first bytes look like. */
static mpt_compression mpti_compression_detect(const uint8_t *head, size_t size) {
    if (size >= MPTI_HEADER_BYTES && mpti_masked_crc32c(head, 8) == mpti_load_u32(head + 8))
        return MPT_COMPRESSION_NONE;
    if (size < 2) return MPT_COMPRESSION_NONE;
    if (head[0] == 0x1f && head[1] == 0x8b) return MPT_COMPRESSION_GZIP;              /* RFC 1952 */
    if (head[0] == 0x78 && (0x7800 + head[1]) % 31 == 0) return MPT_COMPRESSION_ZLIB; /* RFC 1950 */
    return MPT_COMPRESSION_NONE;
}

/* The first block, and what kind of file it shows. Of a compressed file it becomes zlib's. */
static mpt_result mpti_tfrecord_start(mpt_tfrecord *f) {
    const size_t expansion = 8; /* so small a compressed file needs no whole block either */
    size_t bytes = f->block_bytes;
    mpti_block *block;
    mpt_result rc;

    if (f->file.size >= 0 && (uint64_t)f->file.size < bytes) bytes = (size_t)f->file.size;
    if (bytes < MPTI_MIN_BLOCK) bytes = MPTI_MIN_BLOCK;
    f->block = mpti_block_create(f->allocator, bytes);
    if (!f->block) return mpti_tfrecord_no_memory(f, bytes);
    rc = mpti_tfrecord_fill(f, MPTI_HEADER_BYTES);
    if (rc) return rc;
    f->compression = mpti_compression_detect(f->block->data, f->end);
    if (f->compression == MPT_COMPRESSION_NONE) return MPT_OK;
    if (bytes < f->block_bytes / expansion) f->block_bytes = bytes * expansion;
    block = mpti_block_create(f->allocator, f->block_bytes);
    rc = block ? mpti_zlib_open(f->allocator, f->compression, 0, f->path, f->block, &f->error,
                                &f->zlib)
               : mpti_tfrecord_no_memory(f, f->block_bytes);
    if (rc) {
        mpti_block_release(block);
        return rc;
    }
#ifdef MPTRAIN_ZLIB
    f->zlib->z.next_in = f->block->data;
    f->zlib->z.avail_in = (uInt)f->end;
#endif
    f->block = block;
    f->end = 0;
    return MPT_OK;
}

MPT_API void mpt_tfrecord_close(mpt_tfrecord *f) {
    if (!f) return;
    mpti_file_close(&f->file);
#ifdef MPTRAIN_ZLIB
    mpti_zlib_close(f->zlib);
#endif
    mpti_block_release(f->block);
    mpti_strfree(f->allocator, f->path);
    mpti_free(f->allocator, f, sizeof *f);
}

static mpt_result mpti_tfrecord_open_sized(const mpt_allocator *allocator,
                                           const mpt_tfrecord_desc *desc, size_t block_bytes,
                                           mpt_error *err, mpt_tfrecord **out) {
    mpt_tfrecord_desc resolved;
    mpt_result rc = mpti_tfrecord_desc_resolve(desc, err, &resolved);
    mpt_tfrecord *f;

    if (rc) return rc;
    f = (mpt_tfrecord *)mpti_calloc(allocator, 1, sizeof *f);
    if (!f) return MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "no memory for a reader");
    f->allocator = allocator;
    f->desc = resolved;
    f->block_bytes = f->ask = block_bytes;
    f->position.record = -1;
    f->path = mpti_strdup(allocator, resolved.path);
    f->desc.path = f->path;
    rc = f->path ? mpti_file_open(resolved.io, f->path, &f->error, &f->file)
                 : MPTI_FAIL(&f->error, MPT_ERR_OUT_OF_MEMORY, "no memory for a path");
    if (rc == MPT_OK) rc = mpti_tfrecord_start(f);
    if (rc == MPT_OK) {
        *out = f;
        return MPT_OK;
    }
    if (err) *err = f->error;
    mpt_tfrecord_close(f);
    return rc;
}

/* allocator outlives the reader. */
static mpt_result mpti_tfrecord_open(const mpt_allocator *allocator, const mpt_tfrecord_desc *desc,
                                     mpt_error *err, mpt_tfrecord **out) {
    return mpti_tfrecord_open_sized(allocator, desc, MPTI_BLOCK_BYTES, err, out);
}

static mpt_result mpti_tfrecord_seek(mpt_tfrecord *f, mpt_error *err, int64_t record,
                                     uint64_t offset) {
    mpt_result rc = MPT_OK;

    if (f->zlib)
        return MPTI_FAIL(err, MPT_ERR_UNSUPPORTED,
                         "%s: a file compressed with %s can't be sought in",
                         mpti_path_tail(f->path), mpti_compression_name(f->compression));
    if (record < 0)
        return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT, "mpt_tfrecord_seek: record is negative");
    if (f->file.size >= 0 && offset > (uint64_t)f->file.size)
        return MPTI_FAIL(err, MPT_ERR_CORRUPT_DATA,
                         "%s: no record %lld at offset %llu: the file has %lld bytes: has it "
                         "changed since its index was made?",
                         mpti_path_tail(f->path), (long long)record, (unsigned long long)offset,
                         (long long)f->file.size);
    rc = mpti_tfrecord_jump(f, offset);
    if (rc) {
        if (err) *err = f->error;
        return rc; /* position and state are as they were */
    }
    f->record = record;
    f->failed = f->resync = f->left_out = f->skip_pending = false;
    return MPT_OK;
}

MPT_API mpt_result mpt_tfrecord_open(mpt_ctx *ctx, const mpt_tfrecord_desc *desc,
                                     mpt_tfrecord **out) {
    mpt_result rc;

    if (!ctx || !out) return MPT_ERR_INVALID_ARGUMENT;
    *out = NULL;
    rc = mpti_tfrecord_open(&ctx->desc.allocator, desc, &ctx->error, out);
    if (rc == MPT_OK) (*out)->ctx = ctx;
    return mpti_report(ctx, rc);
}

/* Counts and tells. MPT_OK: go on. */
static mpt_result mpti_tfrecord_skip(mpt_tfrecord *f) {
    mpt_bad_record bad;
    mpt_error cause = f->error;

    if (f->num_bad == f->desc.max_bad_records) {
        f->failed = true;
        return MPTI_FAIL(&f->error, MPT_ERR_CORRUPT_DATA,
                         "more bad records than max_bad_records (%lld); the last: %.300s",
                         (long long)f->desc.max_bad_records, cause.message);
    }
    f->num_bad++;
    f->left_out = !f->resync || f->desc.on_bad_record == MPT_BAD_RECORD_SKIP_FILE;
    bad.path = f->path;
    bad.record = f->position.record;
    bad.offset = f->position.offset;
    bad.code = cause.code;
    bad.cause = cause.message;
    bad.rest_of_file = f->left_out;
    if (f->desc.bad_record) f->desc.bad_record(&bad, f->desc.bad_record_user);
    return MPT_OK;
}

MPT_API mpt_result mpt_tfrecord_next(mpt_tfrecord *f, mpt_bytes *record) {
    mpt_result rc = MPT_OK;
    mpti_record r;

    if (!f || !record) return MPT_ERR_INVALID_ARGUMENT;
    memset(record, 0, sizeof *record);
    while (!f->left_out) {
        bool again = f->failed; /* told of already, or storage */

        rc = mpti_tfrecord_read(f, NULL, &r);
        *record = r.payload;
        if (rc >= 0) return rc;
        if (rc == MPT_ERR_CORRUPT_DATA && !again && f->desc.on_bad_record != MPT_BAD_RECORD_FAIL)
            rc = mpti_tfrecord_skip(f);
        if (rc) {
            memset(record, 0, sizeof *record);
            f->ctx->error = f->error;
            return mpti_report(f->ctx, rc);
        }
    }
    memset(record, 0, sizeof *record);
    return MPT_END;
}

MPT_API mpt_tfrecord_position mpt_tfrecord_tell(const mpt_tfrecord *f) {
    mpt_tfrecord_position none = {-1, 0, 0};
    return f ? f->position : none;
}

MPT_API mpt_result mpt_tfrecord_seek(mpt_tfrecord *f, int64_t record, uint64_t offset) {
    if (!f) return MPT_ERR_INVALID_ARGUMENT;
    return mpti_report(f->ctx, mpti_tfrecord_seek(f, &f->ctx->error, record, offset));
}

MPT_API mpt_compression mpt_tfrecord_compression(const mpt_tfrecord *f) {
    return f ? f->compression : MPT_COMPRESSION_NONE;
}

MPT_API int64_t mpt_tfrecord_num_bad(const mpt_tfrecord *f) {
    return f ? f->num_bad : 0;
}

/* ---- framing, writing ------------------------------------------------------------------------ */
struct mpt_tfrecord_writer {
    mpt_ctx *ctx;
    mpti_output output;
    mpti_zlib *zlib; /* NULL: plain */
    uint64_t max_record_bytes;
    int64_t record;     /* number of the next one */
    const char *closed; /* why nothing more can be written; NULL: it can */
};

static mpt_result mpti_writer_emit(mpt_tfrecord_writer *w, const void *data, size_t size,
                                   bool last) {
#ifdef MPTRAIN_ZLIB
    if (w->zlib)
        return mpti_zlib_write(w->zlib, &w->output, &w->ctx->error, (const uint8_t *)data, size,
                               last);
#endif
    (void)last;
    return mpti_output_write(&w->output, &w->ctx->error, data, size);
}

MPT_API void mpt_tfrecord_writer_close(mpt_tfrecord_writer *w) {
    mpt_allocator *allocator = w ? &w->ctx->desc.allocator : NULL;

    if (!w) return;
#ifdef MPTRAIN_ZLIB
    mpti_zlib_close(w->zlib);
#endif
    if (w->output.allocator) mpti_output_close(&w->output);
    mpti_free(allocator, w, sizeof *w);
}

static mpt_result mpti_writer_open(mpt_ctx *ctx, const mpt_tfrecord_writer_desc *desc,
                                   mpt_tfrecord_writer *w) {
    const mpt_allocator *allocator = &ctx->desc.allocator;
    int level = desc->compression_level ? desc->compression_level : 6;
    mpti_block *block;
    mpt_result rc = MPT_OK;

    w->ctx = ctx;
    w->max_record_bytes = desc->max_record_bytes ? desc->max_record_bytes : (uint64_t)1 << 30;
    if (desc->compression != MPT_COMPRESSION_NONE) {
        block = mpti_block_create(allocator, MPTI_OUTPUT_BUFFER);
        if (!block) return MPTI_FAIL(&ctx->error, MPT_ERR_OUT_OF_MEMORY, "no memory for a block");
        rc = mpti_zlib_open(allocator, desc->compression, level, desc->path, block, &ctx->error,
                            &w->zlib);
        if (rc) mpti_block_release(block);
        if (rc) return rc;
    }
    return mpti_output_open(allocator, desc->io ? desc->io : mpt_io_files(), desc->path,
                            &ctx->error, &w->output);
}

MPT_API mpt_result mpt_tfrecord_writer_open(mpt_ctx *ctx, const mpt_tfrecord_writer_desc *desc,
                                            mpt_tfrecord_writer **out) {
    mpt_tfrecord_writer *w;
    const char *wrong;
    mpt_result rc;

    if (!ctx || !out) return MPT_ERR_INVALID_ARGUMENT;
    *out = NULL;
    wrong = !desc || !desc->path ? "path is required"
            : desc->compression < 0 || desc->compression > MPT_COMPRESSION_ZLIB
                ? "compression is unknown"
            : desc->compression_level < 0 || desc->compression_level > 9
                ? "compression_level is not 0 to 9"
                : NULL;
    if (wrong)
        return mpti_report(ctx, MPTI_FAIL(&ctx->error, MPT_ERR_INVALID_ARGUMENT,
                                          "mpt_tfrecord_writer_desc.%s", wrong));
    w = (mpt_tfrecord_writer *)mpti_calloc(&ctx->desc.allocator, 1, sizeof *w);
    if (!w)
        return mpti_report(ctx,
                           MPTI_FAIL(&ctx->error, MPT_ERR_OUT_OF_MEMORY, "no memory for a writer"));
    rc = mpti_writer_open(ctx, desc, w);
    if (rc) mpt_tfrecord_writer_close(w);
    else *out = w;
    return mpti_report(ctx, rc);
}

static mpt_result mpti_writer_check_open(mpt_tfrecord_writer *w) {
    if (!w->closed) return MPT_OK;
    return MPTI_FAIL(&w->ctx->error, MPT_ERR_INVALID_STATE, "%s: the writer %s",
                     mpti_path_tail(w->output.path), w->closed);
}

MPT_API mpt_result mpt_tfrecord_writer_write(mpt_tfrecord_writer *w, mpt_bytes record) {
    uint8_t head[MPTI_HEADER_BYTES], foot[MPTI_FOOTER_BYTES];
    mpt_result rc;

    if (!w || (!record.data && record.size > 0)) return MPT_ERR_INVALID_ARGUMENT;
    rc = mpti_writer_check_open(w);
    if (rc) return mpti_report(w->ctx, rc);
    if (record.size > w->max_record_bytes)
        return mpti_report(
            w->ctx,
            MPTI_FAIL(&w->ctx->error, MPT_ERR_INVALID_ARGUMENT,
                      "%s: record %lld: its %llu bytes are more than max_record_bytes (%llu)",
                      mpti_path_tail(w->output.path), (long long)w->record,
                      (unsigned long long)record.size, (unsigned long long)w->max_record_bytes));
    mpti_store_u64(head, record.size);
    mpti_store_u32(head + 8, mpti_masked_crc32c(head, 8));
    mpti_store_u32(foot, mpti_masked_crc32c(record.data, record.size));
    rc = mpti_writer_emit(w, head, sizeof head, false);
    if (rc == MPT_OK) rc = mpti_writer_emit(w, record.data, record.size, false);
    if (rc == MPT_OK) rc = mpti_writer_emit(w, foot, sizeof foot, false);
    if (rc) w->closed = "has failed: close it";
    else w->record++;
    return mpti_report(w->ctx, rc);
}

MPT_API mpt_result mpt_tfrecord_writer_finish(mpt_tfrecord_writer *w) {
    mpt_result rc;

    if (!w) return MPT_ERR_INVALID_ARGUMENT;
    rc = mpti_writer_check_open(w);
    if (rc) return mpti_report(w->ctx, rc);
    rc = mpti_writer_emit(w, NULL, 0, true);
    if (rc == MPT_OK) rc = mpti_output_finish(&w->output, &w->ctx->error);
    w->closed = rc ? "has failed: close it" : "is finished";
    return mpti_report(w->ctx, rc);
}

/* ---- record index ---------------------------------------------------------------------------- */
typedef struct mpti_index {
    mpt_tfrecord_index view; /* first: what the caller sees */
    const mpt_allocator *allocator;
    mpti_buffer offsets; /* of uint64_t */
} mpti_index;

static void mpti_index_destroy(const mpt_allocator *allocator, mpt_tfrecord_index *index) {
    mpti_index *own = (mpti_index *)index;

    if (!own) return;
    mpti_buffer_free(&own->offsets);
    mpti_free(allocator, own, sizeof *own);
}

static mpt_result mpti_index_add(mpti_index *index, const mpt_tfrecord *f, uint64_t offset,
                                 mpt_error *err) {
    if (!mpti_buffer_append(&index->offsets, &offset, sizeof offset))
        return MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "%s: no memory for its index",
                         mpti_path_tail(f->path));
    index->view.offsets = (const uint64_t *)(const void *)index->offsets.data;
    index->view.num_records = (int64_t)(index->offsets.size / sizeof offset) - 1;
    return MPT_OK;
}

/* Header by header; the reader passes over payloads. */
static mpt_result mpti_index_walk(mpti_index *index, mpt_tfrecord *f, mpt_error *err) {
    mpt_result rc, added;

    for (;;) {
        rc = mpti_tfrecord_header(f);
        if (rc < 0 && err) *err = f->error;
        if (rc < 0) return rc;
        added = mpti_index_add(index, f, f->offset, err);
        if (added || rc == MPT_END) return added;
        f->skip_pending = true;
    }
}

static bool mpti_parse_number(const uint8_t **p, const uint8_t *end, uint64_t *out) {
    const uint8_t *start = *p;
    uint64_t value = 0;

    for (; *p < end && **p >= '0' && **p <= '9'; ++*p) {
        if (value > (UINT64_MAX - 9) / 10) return false;
        value = value * 10 + (uint64_t)(**p - '0');
    }
    *out = value;
    return *p > start;
}

/* A line is "offset size", and each record begins where the one before it ends. */
static mpt_result mpti_index_parse(mpti_index *index, const mpt_tfrecord *f, const char *path,
                                   const mpti_buffer *text, mpt_error *err) {
    const uint8_t *p = text->data, *end = p ? p + text->size : p;
    uint64_t expected = 0, offset, size;
    int64_t line = 0;
    mpt_result rc = mpti_index_add(index, f, 0, err);

    while (rc == MPT_OK && p < end) {
        bool good = mpti_parse_number(&p, end, &offset) && p < end && *p++ == ' ' &&
                    mpti_parse_number(&p, end, &size);

        line++;
        if (good && p < end && *p == '\r') p++;
        if (good && p < end) good = *p++ == '\n';
        if (!good || offset != expected || size < MPTI_FRAME_BYTES || size > UINT64_MAX - offset)
            return MPTI_FAIL(
                err, MPT_ERR_CORRUPT_DATA,
                "%s: line %lld: a line \"offset size\" that begins at %llu is expected: make the "
                "index anew",
                mpti_path_tail(path), (long long)line, (unsigned long long)expected);
        expected = offset + size;
        rc = mpti_index_add(index, f, expected, err);
    }
    return rc;
}

/* Is there just one record from begin to end? Its payload is passed over by the next look. */
static mpt_result mpti_index_probe(mpt_tfrecord *f, int64_t record, uint64_t begin, uint64_t end) {
    mpt_result rc;

    if (f->file.size >= 0 && end > (uint64_t)f->file.size) return MPT_ERR_CORRUPT_DATA;
    rc = mpti_tfrecord_seek(f, &f->error, record, begin);
    if (rc == MPT_OK) rc = mpti_tfrecord_header(f);
    if (rc < 0) return rc;
    if (rc == MPT_END || f->position.size + MPTI_FRAME_BYTES != end - begin)
        return MPT_ERR_CORRUPT_DATA;
    f->skip_pending = true;
    return MPT_OK;
}

/* The first and the last record must be where the index says, and the file must end behind it. */
static mpt_result mpti_index_check(const mpt_tfrecord_index *index, mpt_tfrecord *f,
                                   const char *path, mpt_error *err) {
    const uint64_t *offsets = index->offsets;
    int64_t num_records = index->num_records, last = num_records - 1;
    mpt_result rc = MPT_OK;

    if (num_records > 0) rc = mpti_index_probe(f, 0, offsets[0], offsets[1]);
    if (num_records > 0 && rc == MPT_OK)
        rc = mpti_index_probe(f, last, offsets[last], offsets[num_records]);
    if (rc == MPT_OK) rc = mpti_tfrecord_header(f);
    if (rc == MPT_END) return MPT_OK;
    if ((rc < 0 && rc != MPT_ERR_CORRUPT_DATA) || f->resync) { /* resync: a record over the limit */
        if (err) *err = f->error;
        return rc;
    }
    return MPTI_FAIL(err, MPT_ERR_CORRUPT_DATA,
                     "%s: it does not fit its file (%lld records, %llu bytes): the file was "
                     "changed; make the index anew",
                     mpti_path_tail(path), (long long)num_records,
                     (unsigned long long)offsets[num_records]);
}

static mpt_result mpti_index_read(mpti_index *index, mpt_tfrecord *f, mpt_error *err) {
    const mpt_allocator *allocator = index->allocator;
    size_t path_bytes = strlen(f->path) + 5, limit = SIZE_MAX / 2;
    char *path = (char *)mpti_alloc(allocator, path_bytes);
    mpti_buffer text = {allocator, NULL, 0, 0};
    mpt_result rc;

    if (!path) return MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "no memory for a path");
    snprintf(path, path_bytes, "%s.idx", f->path);
    /* a line has at most 42 characters, a record at least 16 bytes */
    if (f->file.size >= 0 && (uint64_t)f->file.size < limit / 3)
        limit = (size_t)f->file.size * 3 + 64;
    rc = mpti_file_load(f->desc.io, path, limit, err, &text);
    if (rc == MPT_OK) rc = mpti_index_parse(index, f, path, &text, err);
    if (rc == MPT_OK) rc = mpti_index_check(&index->view, f, path, err);
    mpti_buffer_free(&text);
    mpti_free(allocator, path, path_bytes);
    return rc;
}

static mpt_result mpti_index_make(const mpt_allocator *allocator, const mpt_tfrecord_desc *desc,
                                  bool load, mpt_error *err, mpt_tfrecord_index **out) {
    mpti_index *index = (mpti_index *)mpti_calloc(allocator, 1, sizeof *index);
    mpt_tfrecord *f = NULL;
    mpt_result rc;

    if (!index) return MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "no memory for an index");
    index->allocator = index->offsets.allocator = allocator;
    rc = mpti_tfrecord_open_sized(allocator, desc, MPTI_WALK_BLOCK_BYTES, err, &f);
    if (rc == MPT_OK && f->zlib)
        rc = MPTI_FAIL(err, MPT_ERR_UNSUPPORTED,
                       "%s: a file compressed with %s can't have an index", mpti_path_tail(f->path),
                       mpti_compression_name(f->compression));
    if (rc == MPT_OK) rc = load ? mpti_index_read(index, f, err) : mpti_index_walk(index, f, err);
    mpt_tfrecord_close(f);
    if (rc) {
        mpti_index_destroy(allocator, &index->view);
        return rc;
    }
    *out = &index->view;
    return MPT_OK;
}

static mpt_result mpti_index_build(const mpt_allocator *allocator, const mpt_tfrecord_desc *desc,
                                   mpt_error *err, mpt_tfrecord_index **out) {
    return mpti_index_make(allocator, desc, false, err, out);
}

static mpt_result mpti_index_load(const mpt_allocator *allocator, const mpt_tfrecord_desc *desc,
                                  mpt_error *err, mpt_tfrecord_index **out) {
    return mpti_index_make(allocator, desc, true, err, out);
}

MPT_API mpt_result mpt_tfrecord_index_build(mpt_ctx *ctx, const mpt_tfrecord_desc *desc,
                                            mpt_tfrecord_index **out) {
    if (!ctx || !out) return MPT_ERR_INVALID_ARGUMENT;
    *out = NULL;
    return mpti_report(ctx, mpti_index_build(&ctx->desc.allocator, desc, &ctx->error, out));
}

MPT_API mpt_result mpt_tfrecord_index_load(mpt_ctx *ctx, const mpt_tfrecord_desc *desc,
                                           mpt_tfrecord_index **out) {
    if (!ctx || !out) return MPT_ERR_INVALID_ARGUMENT;
    *out = NULL;
    return mpti_report(ctx, mpti_index_load(&ctx->desc.allocator, desc, &ctx->error, out));
}

MPT_API mpt_result mpt_tfrecord_index_save(mpt_ctx *ctx, const mpt_tfrecord_index *index,
                                           const mpt_io *io, const char *path) {
    mpti_output output;
    mpt_result rc;
    char line[64];
    int64_t i;

    if (!ctx) return MPT_ERR_INVALID_ARGUMENT;
    if (!index || !path || index->num_records < 0)
        return mpti_report(ctx,
                           MPTI_FAIL(&ctx->error, MPT_ERR_INVALID_ARGUMENT, "no index or no path"));
    rc = mpti_output_open(&ctx->desc.allocator, io ? io : mpt_io_files(), path, &ctx->error,
                          &output);
    if (rc) return mpti_report(ctx, rc);
    for (i = 0; i < index->num_records && rc == MPT_OK; i++) {
        uint64_t offset = index->offsets[i], size = index->offsets[i + 1] - offset;
        int n = snprintf(line, sizeof line, "%llu %llu\n", (unsigned long long)offset,
                         (unsigned long long)size);
        rc = mpti_output_write(&output, &ctx->error, line, (size_t)n);
    }
    if (rc == MPT_OK) rc = mpti_output_finish(&output, &ctx->error);
    mpti_output_close(&output);
    return mpti_report(ctx, rc);
}

MPT_API void mpt_tfrecord_index_destroy(mpt_ctx *ctx, mpt_tfrecord_index *index) {
    if (ctx) mpti_index_destroy(&ctx->desc.allocator, index);
}

/* =================================================================================================
 * >>example   2.3 tf.Example: protobuf, reading and writing
 * =================================================================================================
 * Problem: a payload is a protobuf message that strangers encoded, in any way that the format
 *          allows; it must be read as protobuf reads it, at the speed of the loader.
 * Idea:    one pass over the bytes that checks all and notes where a feature lies: no copy, no
 *          memory, no tree. Values are decoded when they are asked for.
 * Shapes:  Example.features (1) > Features.feature (1), a map entry > key (1), value (2), a Feature
 *          > one of bytes_list (1), float_list (2), int64_list (3) > value (1), repeated.
 * Tested:  tests/test_example.c
 * Next:    >>image, which turns bytes into pixels.
 */

/* ---- protobuf, reading --------------------------------------------------------------------------
   The wire format is a row of fields: a tag (number << 3 | type) and a value. What is refused here
   is what upb refuses, protobuf's parser in C behind its Python package; where parsers differ upb
   is followed: tags and lengths have at most 5 bytes, bits beyond 64 of a number are dropped. */
typedef struct mpti_parse_error {
    size_t offset;     /* in the message */
    const char *cause; /* static text */
} mpti_parse_error;

enum { /* types of values */
       MPTI_WIRE_VARINT = 0,
       MPTI_WIRE_FIXED64,
       MPTI_WIRE_BYTES,
       MPTI_WIRE_GROUP,
       MPTI_WIRE_END_GROUP,
       MPTI_WIRE_FIXED32
};
enum { MPTI_WIRE_MAX_DEPTH = 100 }; /* messages and groups inside each other: protobuf's default */

typedef struct mpti_wire {
    const uint8_t *p, *end; /* of this (sub)message: what is not yet read */
    const uint8_t *start;   /* of the whole message */
    int depth;              /* that is still allowed */
    mpti_parse_error *error;
} mpti_wire;

typedef struct mpti_tag {
    uint32_t field;
    int type;
} mpti_tag;

static bool mpti_wire_fail(mpti_wire *w, const uint8_t *at, const char *cause) {
    w->error->offset = (size_t)(at - w->start);
    w->error->cause = cause;
    return false;
}

static bool mpti_wire_varint(mpti_wire *w, int max_bytes, uint64_t *out) {
    const uint8_t *at = w->p;
    uint64_t value = 0;
    int i;

    for (i = 0; i < max_bytes; i++) {
        if (w->p == w->end) return mpti_wire_fail(w, at, "the message ends inside a number");
        value |= (uint64_t)(*w->p & 127) << 7 * i;
        *out = value;
        if (*w->p++ < 128) return true;
    }
    return mpti_wire_fail(w, at, "a number is too long");
}

static bool mpti_wire_tag(mpti_wire *w, mpti_tag *tag) {
    const uint8_t *at = w->p;
    uint64_t value;

    if (!mpti_wire_varint(w, 5, &value)) return false;
    if (value > UINT32_MAX) return mpti_wire_fail(w, at, "a field number is too large");
    tag->field = (uint32_t)value >> 3;
    tag->type = (int)(value & 7);
    return true;
}

/* The tag of a field of a message, where number 0 is forbidden; in unknown groups upb allows it. */
static bool mpti_wire_field(mpti_wire *w, mpti_tag *tag) {
    const uint8_t *at = w->p;

    if (!mpti_wire_tag(w, tag)) return false;
    return tag->field > 0 || mpti_wire_fail(w, at, "a field has number 0");
}

/* A value of type BYTES, as a (sub)message of its own. */
static bool mpti_wire_sub(mpti_wire *w, mpti_wire *sub) {
    const uint8_t *at = w->p;
    uint64_t size;

    if (!mpti_wire_varint(w, 5, &size)) return false;
    if (size > (uint64_t)(w->end - w->p))
        return mpti_wire_fail(w, at, "a length goes beyond the end of the message");
    *sub = *w;
    sub->end = w->p + size;
    sub->depth--;
    w->p = sub->end;
    return true;
}

static bool mpti_wire_skip_fixed(mpti_wire *w, int bytes) {
    if (w->end - w->p < bytes) return mpti_wire_fail(w, w->p, "the message ends inside a value");
    w->p += bytes;
    return true;
}

/* The value of an unknown field; of a group all fields up to its end. */
static bool mpti_wire_skip(mpti_wire *w, mpti_tag tag) {
    uint32_t open[MPTI_WIRE_MAX_DEPTH]; /* numbers of the groups around */
    int level = 0;
    bool good = true;

    for (;;) {
        const uint8_t *at = w->p;
        mpti_wire sub;
        uint64_t number;

        switch (tag.type) {
        case MPTI_WIRE_VARINT: good = mpti_wire_varint(w, 10, &number); break;
        case MPTI_WIRE_FIXED64: good = mpti_wire_skip_fixed(w, 8); break;
        case MPTI_WIRE_BYTES: good = mpti_wire_sub(w, &sub); break;
        case MPTI_WIRE_FIXED32: good = mpti_wire_skip_fixed(w, 4); break;
        case MPTI_WIRE_GROUP:
            if (level >= w->depth) return mpti_wire_fail(w, at, "groups are nested too deep");
            open[level++] = tag.field;
            break;
        case MPTI_WIRE_END_GROUP:
            if (level == 0 || open[--level] != tag.field)
                return mpti_wire_fail(w, at, "a group ends that was not begun");
            break;
        default: return mpti_wire_fail(w, at, "an unknown wire type");
        }
        if (!good) return false;
        if (level == 0) return true;
        if (!mpti_wire_tag(w, &tag)) return false;
    }
}

/* Well-formed UTF-8, as table 3-7 of the Unicode standard has it. */
static bool mpti_utf8_is_valid(mpt_bytes text) {
    const uint8_t *p = text.data, *end = p + text.size;

    while (p < end) {
        uint8_t c = *p++, low = 0x80, high = 0xbf;
        int more = c < 0x80 ? 0 : c < 0xc2 ? -1 : c < 0xe0 ? 1 : c < 0xf0 ? 2 : c < 0xf5 ? 3 : -1;

        if (more < 0 || end - p < more) return false;
        if (c == 0xe0) low = 0xa0; /* no overlong forms, */
        if (c == 0xf0) low = 0x90;
        if (c == 0xed) high = 0x9f; /* no surrogates, */
        if (c == 0xf4) high = 0x8f; /* nothing beyond U+10FFFF */
        for (; more > 0; more--, low = 0x80, high = 0xbf, p++)
            if (*p < low || *p > high) return false;
    }
    return true;
}

/* ---- tf.Example, reading ------------------------------------------------------------------------
   Lists of the same kind add up, another kind starts anew: so kind and count are known only at the
   end of an entry. */
typedef struct mpti_values {
    mpt_feature_kind kind, wanted; /* of the list so far; of those that go to dst */
    int64_t count;                 /* of the values so far */
    int64_t first, n;              /* these of them go to dst */
    void *dst;                     /* [n] of the wanted kind: mpt_bytes, float or int64_t */
} mpti_values;

/* Where the next value goes, if it is asked for: an index into dst, or -1. */
static int64_t mpti_values_slot(mpti_values *v) {
    int64_t slot = v->kind == v->wanted ? v->count - v->first : -1;

    v->count++;
    return slot < v->n ? slot : -1;
}

static bool mpti_values_int64(mpti_wire *w, mpti_values *v) {
    uint64_t number;
    int64_t slot;

    if (!mpti_wire_varint(w, 10, &number)) return false;
    slot = mpti_values_slot(v);
    if (slot >= 0) memcpy((int64_t *)v->dst + slot, &number, sizeof number);
    return true;
}

static bool mpti_values_float(mpti_wire *w, mpti_values *v) {
    const uint8_t *at = w->p;
    int64_t slot;

    if (!mpti_wire_skip_fixed(w, 4)) return false;
    slot = mpti_values_slot(v);
    if (slot >= 0) ((float *)v->dst)[slot] = mpti_f32_from_bits(mpti_load_u32(at));
    return true;
}

static bool mpti_values_bytes(mpti_wire *w, mpti_values *v) {
    mpti_wire sub;
    int64_t slot;

    if (!mpti_wire_sub(w, &sub)) return false;
    slot = mpti_values_slot(v);
    if (slot < 0) return true;
    ((mpt_bytes *)v->dst)[slot].data = sub.p;
    ((mpt_bytes *)v->dst)[slot].size = (size_t)(sub.end - sub.p);
    return true;
}

/* A BytesList, FloatList or Int64List, as v->kind says. Numbers come packed, single, or mixed. */
static bool mpti_values_list(mpti_wire *w, mpti_values *v) {
    int single = v->kind == MPT_FEATURE_FLOAT ? MPTI_WIRE_FIXED32 : MPTI_WIRE_VARINT;
    bool (*read_one)(mpti_wire *, mpti_values *) = v->kind == MPT_FEATURE_FLOAT ? mpti_values_float
                                                                                : mpti_values_int64;

    while (w->p < w->end) {
        mpti_wire packed;
        mpti_tag tag;
        bool good;

        if (!mpti_wire_field(w, &tag)) return false;
        if (tag.field == 1 && tag.type == MPTI_WIRE_BYTES && v->kind == MPT_FEATURE_BYTES) {
            good = mpti_values_bytes(w, v);
        } else if (tag.field == 1 && tag.type == MPTI_WIRE_BYTES) {
            good = mpti_wire_sub(w, &packed);
            while (good && packed.p < packed.end) good = read_one(&packed, v);
        } else if (tag.field == 1 && tag.type == single && v->kind != MPT_FEATURE_BYTES) {
            good = read_one(w, v);
        } else {
            good = mpti_wire_skip(w, tag);
        }
        if (!good) return false;
    }
    return true;
}

static bool mpti_values_feature(mpti_wire *w, mpti_values *v) {
    mpti_wire list;
    mpti_tag tag;

    while (w->p < w->end) {
        if (!mpti_wire_field(w, &tag)) return false;
        if (tag.type != MPTI_WIRE_BYTES || tag.field > MPT_FEATURE_INT64) {
            if (!mpti_wire_skip(w, tag)) return false;
            continue;
        }
        if (v->kind != (mpt_feature_kind)tag.field) v->count = 0;
        v->kind = (mpt_feature_kind)tag.field; /* fields and kinds have the same numbers */
        if (!mpti_wire_sub(w, &list) || !mpti_values_list(&list, v)) return false;
    }
    return true;
}

/* Fields that a map entry should not have are passed over, as protobuf's C++, which TensorFlow
   runs, does (upb, behind its Python, leaves the whole entry out: a feature would be lost in
   silence). */
static bool mpti_values_entry(mpti_wire *w, mpti_values *v, mpt_bytes *key) {
    mpti_wire sub;
    mpti_tag tag;

    key->data = w->p; /* no key is an empty key */
    key->size = 0;
    while (w->p < w->end) {
        const uint8_t *at = w->p;

        if (!mpti_wire_field(w, &tag)) return false;
        if (tag.type != MPTI_WIRE_BYTES || tag.field > 2) {
            if (!mpti_wire_skip(w, tag)) return false;
            continue;
        }
        if (!mpti_wire_sub(w, &sub)) return false;
        if (tag.field == 2 && !mpti_values_feature(&sub, v)) return false;
        if (tag.field == 2) continue;
        key->data = sub.p;
        key->size = (size_t)(sub.end - sub.p);
        if (!mpti_utf8_is_valid(*key)) return mpti_wire_fail(w, at, "a feature's name is no UTF-8");
    }
    return true;
}

static mpti_wire mpti_wire_of(mpt_bytes message, mpti_parse_error *error) {
    mpti_wire w;

    w.p = w.start = message.data;
    w.end = message.size ? message.data + message.size : message.data;
    w.depth = MPTI_WIRE_MAX_DEPTH;
    w.error = error;
    error->offset = 0;
    error->cause = "";
    return w;
}

/* The next map entry of a Features message. MPT_END: no more. */
static mpt_result mpti_features_next(mpti_wire *features, mpt_feature *out) {
    mpti_wire entry;
    mpti_tag tag;

    while (features->p < features->end) {
        mpti_values v = {MPT_FEATURE_NONE, MPT_FEATURE_NONE, 0, 0, 0, NULL};

        if (!mpti_wire_field(features, &tag)) return MPT_ERR_CORRUPT_DATA;
        if (tag.field != 1 || tag.type != MPTI_WIRE_BYTES) {
            if (!mpti_wire_skip(features, tag)) return MPT_ERR_CORRUPT_DATA;
            continue;
        }
        if (!mpti_wire_sub(features, &entry)) return MPT_ERR_CORRUPT_DATA;
        out->entry.data = entry.p;
        out->entry.size = (size_t)(entry.end - entry.p);
        if (!mpti_values_entry(&entry, &v, &out->name)) return MPT_ERR_CORRUPT_DATA;
        out->kind = v.kind;
        out->count = v.count;
        return MPT_OK;
    }
    return MPT_END;
}

/* The next Features message of an Example; there may be several, whose entries add up. */
static mpt_result mpti_example_features(mpti_wire *w, mpti_wire *features) {
    mpti_tag tag;

    while (w->p < w->end) {
        if (!mpti_wire_field(w, &tag)) return MPT_ERR_CORRUPT_DATA;
        if (tag.field == 1 && tag.type == MPTI_WIRE_BYTES)
            return mpti_wire_sub(w, features) ? MPT_OK : MPT_ERR_CORRUPT_DATA;
        if (!mpti_wire_skip(w, tag)) return MPT_ERR_CORRUPT_DATA;
    }
    return MPT_END;
}

/* Finds n features by name in one pass that checks the whole Example. Of entries with the same name
   the last one counts, alone. err may be NULL. */
static mpt_result mpti_example_scan(mpt_bytes example, const char *const *names, int n,
                                    mpt_feature *out, mpti_parse_error *err) {
    mpti_parse_error own;
    mpti_wire w = mpti_wire_of(example, err ? err : &own), features;
    mpt_feature found;
    mpt_result rc;
    int i;

    if (n > 0) memset(out, 0, sizeof *out * (size_t)n);
    if (example.size > INT32_MAX) { /* protobuf's own limit */
        mpti_wire_fail(&w, w.p, "it is larger than 2 GiB");
        return MPT_ERR_CORRUPT_DATA;
    }
    while ((rc = mpti_example_features(&w, &features)) == MPT_OK) {
        while ((rc = mpti_features_next(&features, &found)) == MPT_OK)
            for (i = 0; i < n; i++)
                if (strlen(names[i]) == found.name.size &&
                    !memcmp(names[i], found.name.data, found.name.size))
                    out[i] = found;
        if (rc < 0) return rc;
    }
    return rc < 0 ? rc : MPT_OK;
}

MPT_API const char *mpt_feature_kind_string(mpt_feature_kind kind) {
    switch (kind) {
    case MPT_FEATURE_NONE: return "none";
    case MPT_FEATURE_BYTES: return "bytes";
    case MPT_FEATURE_FLOAT: return "float";
    case MPT_FEATURE_INT64: return "int64";
    }
    return "unknown";
}

MPT_API mpt_result mpt_example_check(mpt_ctx *ctx, mpt_bytes example) {
    mpti_parse_error error;
    mpt_result rc = mpti_example_scan(example, NULL, 0, NULL, &error);

    if (rc == MPT_OK || !ctx) return rc;
    return mpti_report(ctx, MPTI_FAIL(&ctx->error, rc, "not a tf.Example: byte %llu of %llu: %s",
                                      (unsigned long long)error.offset,
                                      (unsigned long long)example.size, error.cause));
}

MPT_API mpt_result mpt_example_feature(mpt_bytes example, const char *name, mpt_feature *out) {
    if (!name || !out) return MPT_ERR_INVALID_ARGUMENT;
    return mpti_example_scan(example, &name, 1, out, NULL);
}

MPT_API mpt_result mpt_example_find(mpt_bytes example, const char *name, mpt_bytes *value) {
    mpt_feature feature;
    mpt_result rc;

    if (!name || !value) return MPT_ERR_INVALID_ARGUMENT;
    memset(value, 0, sizeof *value);
    rc = mpt_example_feature(example, name, &feature);
    if (rc) return rc;
    if (feature.kind == MPT_FEATURE_NONE) return MPT_END;
    if (feature.kind != MPT_FEATURE_BYTES) return MPT_ERR_INVALID_ARGUMENT;
    return feature.count == 0 ? MPT_END : mpt_feature_bytes(&feature, 0, 1, value);
}

/* The cursor: where the Features message begins (upper half) and the next entry in it (lower half).
   With a size_t of 32 bits the upper half is lost, and the message is found from the start. */
MPT_API mpt_result mpt_example_next(mpt_bytes example, size_t *cursor, mpt_feature *out) {
    mpti_parse_error error;
    mpti_wire w = mpti_wire_of(example, &error), features;
    mpt_result rc;
    size_t outer, inner;

    if (!cursor || !out) return MPT_ERR_INVALID_ARGUMENT;
    memset(out, 0, sizeof *out);
    if (*cursor == 0) {
        rc = mpti_example_scan(example, NULL, 0, NULL, NULL);
        if (rc) return rc;
    }
    outer = (size_t)((uint64_t)*cursor >> 32);
    inner = (size_t)((uint64_t)*cursor & UINT32_MAX);
    if (outer > example.size || inner > example.size) return MPT_ERR_INVALID_ARGUMENT;
    w.p += outer;
    for (;;) {
        outer = (size_t)(w.p - w.start);
        rc = mpti_example_features(&w, &features);
        if (rc) return rc;
        if (inner > (size_t)(features.end - w.start)) continue;
        if (inner > (size_t)(features.p - w.start)) features.p = w.start + inner;
        rc = mpti_features_next(&features, out);
        if (rc < 0) return rc;
        *cursor = (size_t)((uint64_t)outer << 32 | (uint64_t)(features.p - w.start));
        if (rc == MPT_OK) return rc;
    }
}

static mpt_result mpti_feature_read(const mpt_feature *f, mpt_feature_kind kind, int64_t first,
                                    int64_t n, void *dst) {
    mpti_parse_error error;
    mpti_values v = {MPT_FEATURE_NONE, kind, 0, first, n, dst};
    mpti_wire entry;
    mpt_bytes key;

    if (!f || f->kind != kind || first < 0 || n < 0 || first > f->count || n > f->count - first ||
        (!dst && n > 0))
        return MPT_ERR_INVALID_ARGUMENT;
    if (n == 0) return MPT_OK;
    entry = mpti_wire_of(f->entry, &error);
    if (!mpti_values_entry(&entry, &v, &key)) return MPT_ERR_CORRUPT_DATA;
    return v.kind == kind && v.count == f->count ? MPT_OK : MPT_ERR_INVALID_ARGUMENT;
}

MPT_API mpt_result mpt_feature_bytes(const mpt_feature *f, int64_t first, int64_t n,
                                     mpt_bytes *dst) {
    return mpti_feature_read(f, MPT_FEATURE_BYTES, first, n, dst);
}

MPT_API mpt_result mpt_feature_floats(const mpt_feature *f, int64_t first, int64_t n, float *dst) {
    return mpti_feature_read(f, MPT_FEATURE_FLOAT, first, n, dst);
}

MPT_API mpt_result mpt_feature_int64s(const mpt_feature *f, int64_t first, int64_t n,
                                      int64_t *dst) {
    return mpti_feature_read(f, MPT_FEATURE_INT64, first, n, dst);
}

/* ---- tf.Example, writing ------------------------------------------------------------------------
   Entries are appended to one buffer. In front of them there is room for tag and length of the
   Features message, which are known only when it is asked for. */
enum { MPTI_EXAMPLE_ROOM = 6 }; /* a tag and five bytes of length */

struct mpt_example {
    mpt_ctx *ctx;
    mpti_buffer buffer; /* MPTI_EXAMPLE_ROOM bytes, then the entries; or nothing */
};

static size_t mpti_varint_size(uint64_t v) {
    size_t n = 1;
    for (; v >= 128; v >>= 7) n++;
    return n;
}

static uint8_t *mpti_varint_put(uint8_t *p, uint64_t v) { /* returns the end */
    for (; v >= 128; v >>= 7) *p++ = (uint8_t)(v | 128);
    *p++ = (uint8_t)v;
    return p;
}

/* Tag and length of a field of type BYTES; its number is below 16. */
static uint8_t *mpti_wire_put(uint8_t *p, int field, uint64_t size) {
    *p++ = (uint8_t)(field << 3 | MPTI_WIRE_BYTES);
    return mpti_varint_put(p, size);
}

static uint64_t mpti_wire_put_size(uint64_t size) { /* of tag, length and value */
    return 1 + mpti_varint_size(size) + size;
}

MPT_API mpt_result mpt_example_create(mpt_ctx *ctx, mpt_example **out) {
    mpt_example *e;

    if (!ctx || !out) return MPT_ERR_INVALID_ARGUMENT;
    *out = NULL;
    e = (mpt_example *)mpti_calloc(&ctx->desc.allocator, 1, sizeof *e);
    if (!e)
        return mpti_report(ctx, MPTI_FAIL(&ctx->error, MPT_ERR_OUT_OF_MEMORY,
                                          "no memory for an Example"));
    e->ctx = ctx;
    e->buffer.allocator = &ctx->desc.allocator;
    *out = e;
    return MPT_OK;
}

MPT_API void mpt_example_clear(mpt_example *e) {
    if (e) e->buffer.size = 0;
}

MPT_API void mpt_example_destroy(mpt_example *e) {
    if (!e) return;
    mpti_buffer_free(&e->buffer);
    mpti_free(&e->ctx->desc.allocator, e, sizeof *e);
}

static bool mpti_example_has(const mpt_example *e, mpt_bytes name) {
    mpti_parse_error error;
    mpt_bytes entries;
    mpti_wire features;
    mpt_feature found;

    if (e->buffer.size == 0) return false;
    entries.data = e->buffer.data + MPTI_EXAMPLE_ROOM;
    entries.size = e->buffer.size - MPTI_EXAMPLE_ROOM;
    features = mpti_wire_of(entries, &error);
    while (mpti_features_next(&features, &found) == MPT_OK)
        if (found.name.size == name.size && !memcmp(found.name.data, name.data, name.size))
            return true;
    return false;
}

/* Writes all of a new entry but the content of the list, whose `size` bytes are the caller's to
   fill from *out on. On failure e is as it was. */
static mpt_result mpti_example_begin(mpt_example *e, const char *name, mpt_feature_kind kind,
                                     uint64_t size, uint8_t **out) {
    const char *wrong = NULL;
    uint64_t feature, entry, total;
    mpt_bytes key;
    uint8_t *p;

    key.data = (const uint8_t *)name;
    key.size = strlen(name);
    if (!mpti_utf8_is_valid(key)) wrong = "the name is no UTF-8";
    else if (mpti_example_has(e, key)) wrong = "it was added already";
    else if (size > INT32_MAX || key.size > INT32_MAX) wrong = "it is larger than 2 GiB";
    feature = mpti_wire_put_size(size);
    entry = mpti_wire_put_size(key.size) + mpti_wire_put_size(feature);
    total = mpti_wire_put_size(entry);
    if (!wrong && total > INT32_MAX - MPTI_EXAMPLE_ROOM - (uint64_t)e->buffer.size)
        wrong = "the Example would be larger than 2 GiB";
    if (wrong)
        return MPTI_FAIL(&e->ctx->error, MPT_ERR_INVALID_ARGUMENT, "feature \"%.100s\": %s", name,
                         wrong);
    if (!mpti_buffer_reserve(&e->buffer, (size_t)total + MPTI_EXAMPLE_ROOM))
        return MPTI_FAIL(&e->ctx->error, MPT_ERR_OUT_OF_MEMORY, "feature \"%.100s\": no memory",
                         name);
    if (e->buffer.size == 0) e->buffer.size = MPTI_EXAMPLE_ROOM;
    p = mpti_wire_put(e->buffer.data + e->buffer.size, 1, entry);
    p = mpti_wire_put(p, 1, key.size);
    if (key.size) memcpy(p, name, key.size);
    p = mpti_wire_put(p + key.size, 2, feature);
    *out = mpti_wire_put(p, (int)kind, size);
    e->buffer.size += (size_t)total;
    return MPT_OK;
}

static bool mpti_example_arguments(const mpt_example *e, const char *name, const void *values,
                                   int64_t n) {
    return e && name && n >= 0 && (values || n == 0);
}

MPT_API mpt_result mpt_example_add_bytes(mpt_example *e, const char *name, const mpt_bytes *values,
                                         int64_t n) {
    uint64_t size = 0;
    mpt_result rc;
    uint8_t *p;
    int64_t i;

    if (!mpti_example_arguments(e, name, values, n)) return MPT_ERR_INVALID_ARGUMENT;
    for (i = 0; i < n && size <= INT32_MAX; i++) {
        if (!values[i].data && values[i].size > 0) return MPT_ERR_INVALID_ARGUMENT;
        size += values[i].size <= INT32_MAX ? mpti_wire_put_size(values[i].size)
                                            : (uint64_t)INT32_MAX + 1;
    }
    rc = mpti_example_begin(e, name, MPT_FEATURE_BYTES, size, &p);
    for (i = 0; i < n && rc == MPT_OK; i++) {
        p = mpti_wire_put(p, 1, values[i].size);
        if (values[i].size) memcpy(p, values[i].data, values[i].size);
        p += values[i].size;
    }
    return mpti_report(e->ctx, rc);
}

MPT_API mpt_result mpt_example_add_floats(mpt_example *e, const char *name, const float *values,
                                          int64_t n) {
    uint64_t packed = n < INT32_MAX ? (uint64_t)n * 4 : (uint64_t)INT32_MAX + 1;
    mpt_result rc;
    uint8_t *p;
    int64_t i;

    if (!mpti_example_arguments(e, name, values, n)) return MPT_ERR_INVALID_ARGUMENT;
    rc = mpti_example_begin(e, name, MPT_FEATURE_FLOAT, n ? mpti_wire_put_size(packed) : 0, &p);
    if (rc == MPT_OK && n) p = mpti_wire_put(p, 1, packed);
    for (i = 0; i < n && rc == MPT_OK; i++, p += 4) mpti_store_u32(p, mpti_f32_bits(values[i]));
    return mpti_report(e->ctx, rc);
}

MPT_API mpt_result mpt_example_add_int64s(mpt_example *e, const char *name, const int64_t *values,
                                          int64_t n) {
    uint64_t packed = 0;
    mpt_result rc;
    uint8_t *p;
    int64_t i;

    if (!mpti_example_arguments(e, name, values, n)) return MPT_ERR_INVALID_ARGUMENT;
    for (i = 0; i < n && packed <= INT32_MAX; i++) packed += mpti_varint_size((uint64_t)values[i]);
    rc = mpti_example_begin(e, name, MPT_FEATURE_INT64, n ? mpti_wire_put_size(packed) : 0, &p);
    if (rc == MPT_OK && n) p = mpti_wire_put(p, 1, packed);
    for (i = 0; i < n && rc == MPT_OK; i++) p = mpti_varint_put(p, (uint64_t)values[i]);
    return mpti_report(e->ctx, rc);
}

MPT_API mpt_result mpt_example_encode(mpt_example *e, mpt_bytes *out) {
    size_t size, head;

    if (!e || !out) return MPT_ERR_INVALID_ARGUMENT;
    memset(out, 0, sizeof *out);
    if (e->buffer.size == 0) { /* no features: an empty message, which needs no bytes */
        out->data = (const uint8_t *)"";
        return MPT_OK;
    }
    size = e->buffer.size - MPTI_EXAMPLE_ROOM;
    head = 1 + mpti_varint_size(size);
    mpti_wire_put(e->buffer.data + MPTI_EXAMPLE_ROOM - head, 1, size);
    out->data = e->buffer.data + MPTI_EXAMPLE_ROOM - head;
    out->size = head + size;
    return MPT_OK;
}

/* =================================================================================================
 * >>image   3.1 Images: from encoded bytes to pixels
 * =================================================================================================
 * Problem: pictures of a large set are of any kind: other formats than their names say, CMYK, 16
 *          bits, turned, truncated, or made to take all memory there is.
 * Idea:    our own walk over the headers checks everything before a decoder sees it; the decoder is
 *          stb_image, compiled static; resizing is a triangle filter in integers, the same on any
 *          machine.
 * Shapes:  encoded bytes -> (height, width, channels) U8, rows from the top
 * Tested:  tests/test_image.c
 * Next:    >>dataset, which finds the files that hold the pictures.
 */

/* ---- pictures: the decoder ----------------------------------------------------------------------
   stb_image turns JPEG and PNG into pixels. It is compiled into this file alone, every name static,
   and sees only what the checks below let through: they know why a picture is bad and where, they
   notice pictures that would come out half-filled, and they keep crafted tables away from it. */
#ifndef MPTRAIN_NO_IMAGE
#if defined(STBI_INCLUDE_STB_IMAGE_H)
/* The file has its own copy already. It serves, at a price: memory comes from its own malloc, no
   limit holds for what a small file unpacks to, a lack of memory looks like damaged data, and its
   global switches (flipping) change our pictures. */
#define MPTI_STB 1
#define MPTI_STB_IS_THE_USERS 1
#elif __has_include("stb_image.h")
#define MPTI_STB 1
#define MPTI_STB_HEADER "stb_image.h"
#elif __has_include(<stb/stb_image.h>) /* where Debian's libstb-dev puts it */
#define MPTI_STB 1
#define MPTI_STB_HEADER <stb/stb_image.h>
#endif
#endif

#ifdef MPTI_STB_HEADER
/* What stb_image holds while it works on one picture. The table lets us free what it forgets when
   memory runs out, and blocks come zeroed: no picture shows bytes that belonged to someone else. */
enum { MPTI_STB_BLOCKS = 32 }; /* it holds 14 at most */

typedef struct mpti_stb_memory {
    const mpt_allocator *allocator;
    size_t limit; /* no single block needs more: stops small files that unpack to gigabytes */
    bool out_of_memory;
    void *blocks[MPTI_STB_BLOCKS];
} mpti_stb_memory;

/* stb_image's hooks have no argument for a context. NULL (its functions were called by somebody
   else in this file): every allocation fails. */
static __thread mpti_stb_memory *mpti_stb;

static void *mpti_stb_malloc(size_t size) {
    mpti_stb_memory *m = mpti_stb;
    int i = 0;

    if (!m || size > m->limit) return NULL;
    while (i < MPTI_STB_BLOCKS && m->blocks[i]) i++;
    if (i < MPTI_STB_BLOCKS) m->blocks[i] = mpti_sized_alloc(m->allocator, size);
    if (i < MPTI_STB_BLOCKS && m->blocks[i]) return memset(m->blocks[i], 0, size);
    m->out_of_memory = true;
    return NULL;
}

static void mpti_stb_free(void *p) {
    mpti_stb_memory *m = mpti_stb;
    int i = 0;

    if (!m || !p) return;
    while (m->blocks[i] != p) i++;
    m->blocks[i] = NULL;
    mpti_sized_free(m->allocator, p);
}

static void *mpti_stb_realloc(void *p, size_t old_size, size_t size) {
    void *grown = mpti_stb_malloc(size);

    if (!grown || !p) return grown;
    memcpy(grown, p, old_size < size ? old_size : size);
    mpti_stb_free(p);
    return grown;
}

#define STB_IMAGE_IMPLEMENTATION
#define STB_IMAGE_STATIC
#define STBI_ONLY_JPEG
#define STBI_ONLY_PNG
#define STBI_NO_GIF
#define STBI_NO_STDIO
#define STBI_NO_LINEAR
#define STBI_NO_HDR
#define STBI_NO_FAILURE_STRINGS /* they are shared between threads in some builds */
#define STBI_ASSERT(condition) ((void)0)
#define STBI_MALLOC(size) mpti_stb_malloc(size)
#define STBI_REALLOC_SIZED(p, old_size, size) mpti_stb_realloc(p, old_size, size)
#define STBI_FREE(p) mpti_stb_free(p)
/* Version 2.27 defines it under the other name, and gcc warns of that at the end of the file. */
#define stbi_set_unpremultiply_on_load_thread stbi__unpremultiply_on_load_thread
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wunused-but-set-variable"
#pragma GCC diagnostic ignored "-Wsign-compare"
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#include MPTI_STB_HEADER
#pragma GCC diagnostic pop
#undef stbi_set_unpremultiply_on_load_thread
#undef STB_IMAGE_IMPLEMENTATION
#endif

/* ---- pictures: what the bytes are ------------------------------------------------------------ */
#define MPTI_DAMAGED(err, ...) MPTI_FAIL(err, MPT_ERR_CORRUPT_DATA, __VA_ARGS__)
#define MPTI_REFUSED(err, ...) MPTI_FAIL(err, MPT_ERR_UNSUPPORTED, __VA_ARGS__)

static uint32_t mpti_load_uint(const uint8_t *p, int bytes, bool big_endian) {
    uint32_t v = 0;
    int i;

    for (i = 0; i < bytes; i++) v = v << 8 | p[big_endian ? i : bytes - 1 - i];
    return v;
}

static bool mpti_starts_with(mpt_bytes b, const char *text, size_t size) {
    return b.size >= size && memcmp(b.data, text, size) == 0;
}

static mpt_image_format mpti_image_format(mpt_bytes b) { /* TGA has no signature: unknown */
    if (mpti_starts_with(b, "\xff\xd8\xff", 3)) return MPT_IMAGE_JPEG;
    if (mpti_starts_with(b, "\x89PNG", 4)) return MPT_IMAGE_PNG;
    if (mpti_starts_with(b, "BM", 2)) return MPT_IMAGE_BMP;
    if (mpti_starts_with(b, "GIF8", 4)) return MPT_IMAGE_GIF;
    if (mpti_starts_with(b, "RIFF", 4) && b.size >= 12 && !memcmp(b.data + 8, "WEBP", 4))
        return MPT_IMAGE_WEBP;
    if (mpti_starts_with(b, "II*\0", 4) || mpti_starts_with(b, "MM\0*", 4)) return MPT_IMAGE_TIFF;
    if (mpti_starts_with(b, "8BPS", 4)) return MPT_IMAGE_PSD;
    if (mpti_starts_with(b, "#?RADIANCE", 10) || mpti_starts_with(b, "#?RGBE", 6))
        return MPT_IMAGE_HDR;
    if (b.size >= 3 && b.data[0] == 'P' && b.data[1] >= '1' && b.data[1] <= '7' && b.data[2] <= ' ')
        return MPT_IMAGE_PNM;
    return MPT_IMAGE_UNKNOWN;
}

MPT_API const char *mpt_image_format_string(mpt_image_format format) {
    switch (format) {
    case MPT_IMAGE_UNKNOWN: break;
    case MPT_IMAGE_JPEG: return "JPEG";
    case MPT_IMAGE_PNG: return "PNG";
    case MPT_IMAGE_BMP: return "BMP";
    case MPT_IMAGE_GIF: return "GIF";
    case MPT_IMAGE_WEBP: return "WebP";
    case MPT_IMAGE_TIFF: return "TIFF";
    case MPT_IMAGE_PSD: return "PSD";
    case MPT_IMAGE_HDR: return "HDR";
    case MPT_IMAGE_PNM: return "PNM";
    }
    return "unknown";
}

/* Bytes that can't be decoded: says what they are, for the usual mistakes in writing records. */
static mpt_result mpti_image_refuse(mpt_bytes b, mpt_image_format format, mpt_error *err) {
    size_t i, printable = 0, n = b.size < 32 ? b.size : 32;

    if (format != MPT_IMAGE_UNKNOWN)
        return MPTI_REFUSED(err, "a %s picture: convert it to JPEG or PNG",
                            mpt_image_format_string(format));
    if (n == 0) return MPTI_DAMAGED(err, "the value is empty");
    if (mpti_starts_with(b, "/9j/", 4) || mpti_starts_with(b, "iVBORw0KGgo", 11) ||
        mpti_starts_with(b, "Qk0", 3))
        return MPTI_DAMAGED(err, "this looks like base64 text of a picture: store the bytes it "
                                 "stands for");
    for (i = 0; i < n; i++)
        printable += (b.data[i] >= ' ' && b.data[i] <= '~') || (b.data[i] >= 9 && b.data[i] <= 13);
    if (printable < n) return MPTI_DAMAGED(err, "not a JPEG, PNG or BMP picture");
    return MPTI_DAMAGED(err, "this is %s, not a picture",
                        memchr(b.data, '<', n) ? "HTML or XML text" : "text");
}

/* Ends a message with the size and the first bytes, so that the reader sees what was there. */
static void mpti_image_describe(mpt_bytes b, mpt_error *err) {
    char text[64];
    size_t i, used = (size_t)snprintf(text, sizeof text, " (%zu bytes", b.size), room;

    for (i = 0; i < 8 && i < b.size; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, i ? " %02x" : ": %02x",
                                 b.data[i]);
    room = sizeof err->message - strlen(err->message);
    snprintf(err->message + strlen(err->message), room, "%s%s)", text, b.size > 8 ? " ..." : "");
}

/* For a caller that knows which size its pictures have: the hint at raw pixels, if that fits. */
static void mpti_image_hint_raw(mpt_bytes b, int height, int width, int channels, mpt_error *err) {
    size_t used = err ? strlen(err->message) : 0;

    if (!err || !b.size || b.size != (uint64_t)height * (uint64_t)width * (uint64_t)channels)
        return;
    snprintf(err->message + used, sizeof err->message - used,
             ": %zu bytes = %d x %d x %d: raw pixels? set raw_pixels", b.size, height, width,
             channels);
}

static mpt_result mpti_image_check_size(const mpt_image_info *info, int64_t max_pixels,
                                        mpt_error *err) {
    if (info->width <= 0 || info->height <= 0) return MPTI_DAMAGED(err, "a picture without pixels");
    if (info->width <= max_pixels / info->height) return MPT_OK;
    return MPTI_DAMAGED(err, "%lld x %lld pixels: more than max_pixels = %lld",
                        (long long)info->width, (long long)info->height, (long long)max_pixels);
}

/* ---- pictures: JPEG -----------------------------------------------------------------------------
   ITU-T T.81, annex B. A walk over the markers gives the file piece by piece: segments that matter
   for the pixels, and the entropy-coded data between them. It runs once to check everything, before
   any memory is taken, and once more to feed the decoder with clean pieces only: bytes behind the
   end, fill bytes, comments and restart markers whose turn it isn't are left out. */
typedef struct mpti_jpeg {
    const uint8_t *start, *p, *end; /* the file; p: what comes next */
    const uint8_t *piece;
    size_t piece_size;
    bool entropy, ended; /* the piece is entropy-coded data; is the end marker */
    bool to_restart;     /* it goes up to a restart marker, which is its end */
    bool in_scan;        /* more entropy-coded data follow */
    bool progressive;
    mpt_image_info info;
    int64_t max_pixels, restarts; /* restarts: markers that the scan still needs */
    int h_max, v_max, restart_interval, next_restart, num_scans;
    uint8_t id[4], h[4], v[4], table[4]; /* of each component; h, v: sampling factors */
    unsigned tables;                     /* defined: bits 0..3 quantisation, 4..7 DC, 8..11 AC */
    unsigned with_data;                  /* components of which a scan came */
    int adobe_transform;                 /* -1: no Adobe marker */
} mpti_jpeg;

static mpti_jpeg mpti_jpeg_walk(mpt_bytes encoded, int64_t max_pixels) {
    mpti_jpeg j;

    memset(&j, 0, sizeof j);
    j.start = j.p = encoded.data;
    j.end = encoded.data + encoded.size;
    j.max_pixels = max_pixels;
    j.adobe_transform = -1;
    j.info.format = MPT_IMAGE_JPEG;
    j.info.orientation = 1;
    return j;
}

/* Tag 0x0112 of the first directory in a TIFF block (EXIF 2.32, 4.6.4). Damaged: upright. */
static int mpti_exif_orientation(const uint8_t *p, size_t size) {
    bool big = size >= 8 && memcmp(p, "MM\0*", 4) == 0;
    size_t at, n;

    if (!big && (size < 8 || memcmp(p, "II*\0", 4) != 0)) return 1;
    at = mpti_load_uint(p + 4, 4, big);
    if (at > size - 2) return 1;
    n = mpti_load_uint(p + at, 2, big);
    for (at += 2; n > 0 && at <= size && size - at >= 12; n--, at += 12) {
        uint32_t type = mpti_load_uint(p + at + 2, 2, big),
                 value = mpti_load_uint(p + at + 8, 2, big);
        if (mpti_load_uint(p + at, 2, big) == 0x0112)
            return type == 3 && value >= 1 && value <= 8 ? (int)value : 1;
    }
    return 1;
}

static mpt_result mpti_jpeg_frame(mpti_jpeg *j, const uint8_t *s, size_t n, mpt_error *err) {
    int i, count = n < 6 ? 0 : s[5];

    if (j->info.channels || n != 6 + 3 * (size_t)count)
        return MPTI_DAMAGED(err, "JPEG: bad frame header");
    if (s[0] != 8) return MPTI_REFUSED(err, "JPEG with %d bits per channel: convert it to 8", s[0]);
    if (count != 1 && count != 3 && count != 4)
        return MPTI_REFUSED(err, "JPEG with %d components: convert it to RGB", count);
    j->info.height = mpti_load_uint(s + 1, 2, true);
    j->info.width = mpti_load_uint(s + 3, 2, true);
    j->info.channels = count;
    j->info.bits = 8;
    if (j->info.height == 0)
        return MPTI_REFUSED(err, "JPEG without its height in the header: save it anew");
    for (i = 0; i < count; i++) {
        j->id[i] = s[6 + 3 * i];
        j->h[i] = s[7 + 3 * i] >> 4;
        j->v[i] = s[7 + 3 * i] & 15;
        j->table[i] = s[8 + 3 * i];
        if (j->h[i] < 1 || j->h[i] > 4 || j->v[i] < 1 || j->v[i] > 4 || j->table[i] > 3)
            return MPTI_DAMAGED(err, "JPEG: bad frame header");
        if (j->h[i] > j->h_max) j->h_max = j->h[i];
        if (j->v[i] > j->v_max) j->v_max = j->v[i];
    }
    for (i = 0; i < count; i++)
        if (j->h_max % j->h[i] || j->v_max % j->v[i])
            return MPTI_REFUSED(err, "JPEG with fractional subsampling: save it anew");
    return mpti_image_check_size(&j->info, j->max_pixels, err);
}

/* Lengths must make a prefix code of at most 256 symbols (T.81, C.2): they are trusted later. */
static mpt_result mpti_jpeg_huffman(mpti_jpeg *j, const uint8_t *s, size_t n, mpt_error *err) {
    while (n >= 17) {
        unsigned ac = s[0] >> 4, slot = s[0] & 15u, code = 0, count = 0, i;

        for (i = 1; i <= 16 && (code = code * 2 + s[i]) <= 1u << i; i++) count += s[i];
        if (i <= 16 || ac > 1 || slot > 3 || count > 256 || n - 17 < count) break;
        for (i = 0; !ac && i < count && s[17 + i] <= 11; i++) continue; /* 11: bits of a DC value */
        if (!ac && i < count) break;
        j->tables |= 16u << (4 * ac + slot);
        s += 17 + count;
        n -= 17 + count;
    }
    return n == 0 ? MPT_OK : MPTI_DAMAGED(err, "JPEG: bad Huffman table");
}

static mpt_result mpti_jpeg_quantisation(mpti_jpeg *j, const uint8_t *s, size_t n, mpt_error *err) {
    while (n > 0) {
        size_t size = s[0] >> 4 ? 129 : 65;
        if (s[0] > 0x13 || (s[0] & 15) > 3 || n < size)
            return MPTI_DAMAGED(err, "JPEG: bad quantisation table");
        j->tables |= 1u << (s[0] & 15);
        s += size;
        n -= size;
    }
    return MPT_OK;
}

/* Restart markers that a scan needs: one between each two intervals (T.81, A.2, B.2.4.4). The scan
   of a single component counts its own blocks, others count those of all components together. */
static int64_t mpti_jpeg_num_restarts(const mpti_jpeg *j, bool single, int c) {
    int64_t w = j->info.width, h = j->info.height, block_w = 8 * j->h_max, block_h = 8 * j->v_max;

    if (j->restart_interval == 0) return 0;
    if (single) {
        w = (w * j->h[c] + j->h_max - 1) / j->h_max;
        h = (h * j->v[c] + j->v_max - 1) / j->v_max;
        block_w = block_h = 8;
    }
    return ((w + block_w - 1) / block_w * ((h + block_h - 1) / block_h) - 1) / j->restart_interval;
}

static mpt_result mpti_jpeg_scan(mpti_jpeg *j, const uint8_t *s, size_t n, mpt_error *err) {
    unsigned needed = 0, chosen = 0;
    bool dc, first; /* holds DC values; the first of its kind, not a refinement */
    int i, c = 0;

    if (n < 4 || s[0] < 1 || s[0] > j->info.channels || n != 4 + 2 * (size_t)s[0])
        return MPTI_DAMAGED(err, "JPEG: bad scan header");
    dc = s[n - 3] == 0;
    first = s[n - 1] >> 4 == 0;
    for (i = 1; i < 2 * s[0]; i += 2) {
        for (c = 0; c < j->info.channels && j->id[c] != s[i]; c++) continue;
        if (c == j->info.channels || s[i + 1] >> 4 > 3 || (s[i + 1] & 15) > 3)
            return MPTI_DAMAGED(err, "JPEG: bad scan header");
        chosen |= 1u << c;
        needed |= 1u << j->table[c];
        if (dc && first) needed |= 16u << (s[i + 1] >> 4);
        if (!dc || !j->progressive) needed |= 256u << (s[i + 1] & 15);
    }
    if (needed & ~j->tables)
        return MPTI_DAMAGED(err, "JPEG: a scan needs a table that isn't there");
    if (++j->num_scans > 500) /* each costs as much as a picture */
        return MPTI_DAMAGED(err, "JPEG with more than 500 scans");
    if (dc && first) j->with_data |= chosen;
    j->restarts = mpti_jpeg_num_restarts(j, s[0] == 1, c);
    j->next_restart = 0;
    j->in_scan = true;
    return MPT_OK;
}

/* Is there enough for every component? Four of them need Adobe's word on what the colours mean. */
static mpt_result mpti_jpeg_finish(const mpti_jpeg *j, mpt_error *err) {
    if (!j->info.channels || j->with_data != (1u << j->info.channels) - 1)
        return MPTI_DAMAGED(err, "JPEG that ends before all of its colours came");
    if (j->info.channels == 4 && j->adobe_transform != 0 && j->adobe_transform != 2)
        return MPTI_REFUSED(err, "4-component JPEG without an Adobe marker: its colours are not "
                                 "defined; convert it to RGB");
    return MPT_OK;
}

/* One segment: its code and what it holds. *kept: the decoder must see it. */
static mpt_result mpti_jpeg_segment(mpti_jpeg *j, int code, const uint8_t *s, size_t n, bool *kept,
                                    mpt_error *err) {
    *kept = code < 0xe0 || code == 0xee;
    if (code == 0xc0 || code == 0xc1 || code == 0xc2) {
        j->progressive = code == 0xc2;
        return mpti_jpeg_frame(j, s, n, err);
    }
    switch (code) {
    case 0xc4: return mpti_jpeg_huffman(j, s, n, err);
    case 0xdb: return mpti_jpeg_quantisation(j, s, n, err);
    case 0xda: return mpti_jpeg_scan(j, s, n, err);
    case 0xdd: /* restart interval */
        if (n != 2) return MPTI_DAMAGED(err, "JPEG: bad restart interval");
        j->restart_interval = (int)mpti_load_uint(s, 2, true);
        return MPT_OK;
    case 0xe0: *kept = n >= 5 && !memcmp(s, "JFIF", 5); return MPT_OK;
    case 0xe1:
        if (n >= 6 && !memcmp(s, "Exif\0", 6))
            j->info.orientation = mpti_exif_orientation(s + 6, n - 6);
        return MPT_OK;
    case 0xee:
        if (n >= 12 && !memcmp(s, "Adobe", 6)) j->adobe_transform = s[11];
        return MPT_OK;
    case 0xcc:
    case 0xdc: /* for arithmetic coding; number of lines, which the frame has */
        *kept = false;
        return MPT_OK;
    case 0xc3:
    case 0xf7: return MPTI_REFUSED(err, "lossless JPEG: convert it to PNG");
    case 0xc5:
    case 0xc6:
    case 0xc7:
    case 0xde:
    case 0xdf: return MPTI_REFUSED(err, "hierarchical JPEG: convert it to baseline");
    case 0xc9:
    case 0xca:
    case 0xcb:
    case 0xcd:
    case 0xce:
    case 0xcf: return MPTI_REFUSED(err, "arithmetic-coded JPEG: convert it to baseline");
    default:
        if (code >= 0xe0 && (code <= 0xef || code == 0xfe))
            return MPT_OK; /* applications' data, comments */
        return MPTI_DAMAGED(err, "JPEG: unknown marker ff %02x", (unsigned)code);
    }
}

/* Entropy-coded data up to the next marker; a restart marker counts if it has the number whose turn
   it is. */
static mpt_result mpti_jpeg_entropy(mpti_jpeg *j, const uint8_t *marker, mpt_error *err) {
    bool restart = marker[1] >= 0xd0 && marker[1] <= 0xd7;

    j->to_restart = j->restarts > 0 && marker[1] == 0xd0 + j->next_restart;
    j->piece = j->p;
    j->p = restart ? marker + 2 : marker;
    j->in_scan = restart;
    if (!restart && j->restarts > 0)
        return MPTI_DAMAGED(err, "JPEG: %lld restart markers are missing", (long long)j->restarts);
    if (j->to_restart) {
        j->restarts--;
        j->next_restart = (j->next_restart + 1) & 7;
        marker += 2;
    }
    while (marker > j->piece && marker[-1] == 0xff) marker--; /* fill bytes */
    j->piece_size = (size_t)(marker - j->piece);
    return MPT_OK;
}

/* The next piece. The end marker is one too; behind it nothing is looked at. */
static mpt_result mpti_jpeg_next(mpti_jpeg *j, mpt_error *err) {
    bool kept = j->p == j->start; /* the start marker has no payload */
    mpt_result rc = MPT_OK;

    j->entropy = j->in_scan;
    if (kept) {
        j->piece = j->p;
        j->piece_size = 2;
        j->p += 2;
    }
    while (!rc && !kept) {
        const uint8_t *at = j->p;
        size_t size = 0;

        do { /* to a marker: ff that 0 doesn't follow (T.81, B.1.1.5), the last one of several */
            at = at < j->end ? (const uint8_t *)memchr(at, 0xff, (size_t)(j->end - at)) : NULL;
            if (!at || j->end - at < 2) return MPTI_DAMAGED(err, "JPEG: the picture is truncated");
            at++;
        } while (*at == 0 || *at == 0xff);
        if (j->in_scan) return mpti_jpeg_entropy(j, at - 1, err);
        j->p = at + 1;
        j->piece = at - 1;
        j->piece_size = 2;
        j->ended = *at == 0xd9;
        if (j->ended) return mpti_jpeg_finish(j, err);
        if (*at == 0x01 || (*at >= 0xd0 && *at <= 0xd7)) continue; /* stray, without a payload */
        if (j->end - j->p >= 2) size = mpti_load_uint(j->p, 2, true);
        if (size < 2 || size > (size_t)(j->end - j->p))
            return MPTI_DAMAGED(err, "JPEG: segment ff %02x is truncated", *at);
        j->p += size;
        j->piece_size = size + 2;
        rc = mpti_jpeg_segment(j, *at, at + 3, size - 2, &kept, err);
    }
    return rc;
}

/* ---- pictures: PNG ------------------------------------------------------------------------------
   ISO/IEC 15948: a signature, then chunks: length (4), name (4), data, CRC-32 of name and data. */
enum { MPTI_PNG_HEADER = 8 + 12 + 13 }; /* signature and IHDR */

static mpt_result mpti_png_chunk(const uint8_t *p, const uint8_t *end, mpt_error *err) {
    size_t left = (size_t)(end - p), size;
    const char *name = (const char *)p + 4;

    size = left < 12 ? 0 : mpti_load_uint(p, 4, true);
    if (left < 12 || size > left - 12) return MPTI_DAMAGED(err, "PNG: the picture is truncated");
    if (mpt_crc32(0, name, size + 4) != mpti_load_uint(p + 8 + size, 4, true))
        return MPTI_DAMAGED(err, "PNG: wrong checksum of chunk %.4s", name);
    return MPT_OK;
}

/* *colour: 0 gray, 2 RGB, 3 palette, 4 gray + alpha, 6 RGB + alpha */
static mpt_result mpti_png_header(mpt_bytes b, int64_t max_pixels, mpt_error *err,
                                  mpt_image_info *info, int *colour) {
    /* by colour: bit n is set if n bits are allowed */
    static const unsigned bits[] = {0x10116, 0, 0x10100, 0x116, 0x10100, 0, 0x10100};
    static const int channels[] = {1, 0, 3, 3, 2, 0, 4};
    const uint8_t *h = b.data + 16;
    mpt_result rc;

    if (!mpti_starts_with(b, "\x89PNG\r\n\x1a\n", 8))
        return MPTI_DAMAGED(err, "PNG: damaged or truncated signature");
    rc = mpti_png_chunk(b.data + 8, b.data + b.size, err);
    if (rc) return rc;
    if (!memcmp(b.data + 12, "CgBI", 4))
        return MPTI_REFUSED(err, "PNG in Apple's own form (CgBI): convert it to PNG");
    if (memcmp(b.data + 8, "\0\0\0\x0dIHDR", 8) != 0)
        return MPTI_DAMAGED(err, "PNG that doesn't begin with its header");
    *colour = h[9];
    if (h[9] > 6 || h[8] > 16 || !(bits[h[9]] >> h[8] & 1) || h[10] || h[11] || h[12] > 1)
        return MPTI_DAMAGED(err, "PNG: impossible header");
    info->width = mpti_load_uint(h, 4, true);
    info->height = mpti_load_uint(h + 4, 4, true);
    info->channels = channels[h[9]];
    info->bits = h[9] == 3 ? 8 : h[8];
    return mpti_image_check_size(info, max_pixels, err);
}

/* All chunks up to IEND. Unknown ones whose name begins with a small letter may be passed over. */
static mpt_result mpti_png_check(mpt_bytes b, bool needs_palette, mpt_error *err) {
    const uint8_t *p = b.data + MPTI_PNG_HEADER;
    bool palette = !needs_palette, data = false;

    for (;;) {
        mpt_result rc = mpti_png_chunk(p, b.data + b.size, err);
        size_t size = rc ? 0 : mpti_load_uint(p, 4, true);
        const char *name = (const char *)p + 4;

        if (rc) return rc;
        if (!memcmp(name, "IEND", 4)) break;
        if (!memcmp(name, "IDAT", 4)) data = true;
        else if (!memcmp(name, "PLTE", 4) && size % 3 == 0 && size <= 768) palette = true;
        else if (!(name[0] & 32))
            return MPTI_REFUSED(err, "PNG with a strange chunk %.4s: save it anew", name);
        p += size + 12;
    }
    if (data && palette) return MPT_OK;
    return MPTI_DAMAGED(err, "PNG without its %s", data ? "palette" : "pixels");
}

/* ---- pictures: feeding the decoder --------------------------------------------------------------
   The decoder reads through callbacks, which lets us watch it. It takes data to be endless: when
   they run out inside a scan it goes on with zeros, when some are left it drops them, and calls the
   half-filled picture good. So the last bytes of a scan, and padding behind it, are given out one
   by one. A sound scan ends within the 32 bits of padding that the decoder reads ahead, then
   it asks if the file has ended, which tells how much of the scan is left. Padding is ones (each ff
   needs a 0 behind it): no code is made of ones alone (T.81, C.2), so they make no blocks. */
#ifdef MPTI_STB
enum { /* bytes */
       MPTI_READ_AHEAD = 2 * 4,
       MPTI_STB_BUFFER = 128,
       MPTI_ONE_BY_ONE = 64,
       MPTI_SURPLUS = 16
};

typedef struct mpti_feed {
    const uint8_t *at; /* rest of the piece */
    size_t left;
    bool ended, watched; /* nothing follows; the piece belongs to a scan */
    int padding;         /* bytes of it given out */
    const char *fault;   /* what the decoder did not notice */
    mpti_jpeg jpeg;
    const uint8_t *chunk; /* PNG: what comes next */
    uint8_t palette[8 + 768 + 4];
} mpti_feed;

static bool mpti_feed_jpeg(mpti_feed *f) {
    static const uint8_t ones[2] = {0xff, 0};

    if (f->watched && !f->jpeg.in_scan) { /* behind the scan's last piece */
        f->at = &ones[f->padding & 1];
        if (++f->padding > MPTI_READ_AHEAD) f->fault = "JPEG: the compressed data end too early";
        f->left = f->fault ? 0 : 1;
        return !f->fault;
    }
    if (f->jpeg.ended || mpti_jpeg_next(&f->jpeg, NULL)) return false;
    f->at = f->jpeg.piece;
    f->left = f->jpeg.piece_size;
    f->watched = f->jpeg.entropy;
    f->padding = 0;
    return true;
}

/* Chunks that carry pixels. The palette gets all of its 256 places, the rest black: the decoder
   looks up whatever number comes. Transparency is left out, since it is dropped anyway. */
static bool mpti_feed_png(mpti_feed *f) {
    while (f->chunk) {
        const uint8_t *c = f->chunk;

        f->at = c;
        f->left = 12 + (size_t)mpti_load_uint(c, 4, true);
        f->chunk = memcmp(c + 4, "IEND", 4) ? c + f->left : NULL;
        if (!f->chunk || !memcmp(c + 4, "IDAT", 4)) return true;
        if (memcmp(c + 4, "PLTE", 4) != 0) continue;
        memcpy(f->palette, "\0\0\3\0PLTE", 8);
        memcpy(f->palette + 8, c + 8, f->left - 12);
        f->at = f->palette;
        f->left = sizeof f->palette;
        return true;
    }
    f->left = 0;
    return false;
}

static int mpti_feed_read(void *user, char *out, int size) {
    mpti_feed *f = (mpti_feed *)user;
    int done = 0;

    while (done < size) {
        size_t n = f->left, room = (size_t)(size - done);
        bool careful = f->watched && !f->jpeg.to_restart, single = careful && n <= MPTI_ONE_BY_ONE;

        if (n == 0 && f->ended) break;
        if (n == 0) {
            f->ended = !(f->jpeg.start ? mpti_feed_jpeg(f) : mpti_feed_png(f));
            continue;
        }
        if (single && done > 0) break;
        n = single ? 1 : careful ? n - MPTI_ONE_BY_ONE : n;
        if (n > room) n = room;
        memcpy(out + done, f->at, n);
        f->at += n;
        f->left -= n;
        done += (int)n;
        if (single) break;
    }
    return done;
}

static void mpti_feed_skip(void *user, int n) {
    mpti_feed *f = (mpti_feed *)user;
    size_t count = n < 0 ? 0 : (size_t)n < f->left ? (size_t)n : f->left;

    f->at += count;
    f->left -= count;
}

static bool mpti_is_run(const uint8_t *p, size_t n) { /* of one value */
    return n < 2 || memcmp(p, p + 1, n - 1) == 0;
}

/* The decoder has all it wants of a scan. A few bytes too many, or a long run of one value behind
   the data, are what some cameras write. More, a run that was taken for data too, or an interval
   too many is a sign that the decoder lost the thread. */
static void mpti_feed_end_scan(mpti_feed *f) {
    bool broken = f->jpeg.restarts > 0 || (f->jpeg.to_restart && f->left > 0), run = true;
    size_t ahead = MPTI_READ_AHEAD + (f->left > MPTI_ONE_BY_ONE ? MPTI_STB_BUFFER : 0), surplus = 0;

    if (!f->padding && (size_t)(f->at - f->jpeg.start) > ahead + MPTI_SURPLUS)
        run = !mpti_is_run(f->at - ahead - MPTI_SURPLUS, ahead + MPTI_SURPLUS + 1);
    while (!f->padding) {
        run = run && mpti_is_run(f->at, f->left);
        surplus += f->left;
        if (!f->jpeg.in_scan || mpti_jpeg_next(&f->jpeg, NULL)) break;
        f->at = f->jpeg.piece;
        f->left = f->jpeg.piece_size;
    }
    f->left = 0;
    f->watched = false;
    if (broken || (surplus > MPTI_SURPLUS && !run))
        f->fault = "JPEG: the compressed data do not fit the picture";
}

static int mpti_feed_ended(void *user) {
    mpti_feed *f = (mpti_feed *)user;

    if (f->watched) mpti_feed_end_scan(f);
    return f->ended && f->left == 0;
}

/* Decodes what f gives out; NULL: refused. */
static uint8_t *mpti_stb_load(mpti_feed *f, const mpt_allocator *allocator, size_t limit,
                              int channels, int *w, int *h, bool *out_of_memory) {
    stbi_io_callbacks callbacks = {mpti_feed_read, mpti_feed_skip, mpti_feed_ended};
    int stored;
#ifdef MPTI_STB_IS_THE_USERS
    uint8_t *theirs = stbi_load_from_callbacks(&callbacks, f, w, h, &stored, channels);
    uint8_t *pixels = NULL;
    size_t bytes = (size_t)*w * (size_t)*h * (size_t)channels;

    (void)limit;
    if (theirs) pixels = (uint8_t *)mpti_sized_alloc(allocator, bytes);
    *out_of_memory = theirs && !pixels;
    if (pixels) memcpy(pixels, theirs, bytes);
    stbi_image_free(theirs);
#else
    mpti_stb_memory memory;
    uint8_t *pixels;
    int i;

    memset(&memory, 0, sizeof memory);
    memory.allocator = allocator;
    memory.limit = limit;
    mpti_stb = &memory;
    pixels = stbi_load_from_callbacks(&callbacks, f, w, h, &stored, channels);
    for (i = 0; i < MPTI_STB_BLOCKS; i++)
        if (memory.blocks[i] != pixels) mpti_stb_free(memory.blocks[i]);
    mpti_stb = NULL;
    *out_of_memory = memory.out_of_memory;
#endif
    return pixels;
}

static mpt_result mpti_image_unpack(const mpt_allocator *allocator, mpt_bytes encoded,
                                    const mpt_image_info *info, const mpt_image_desc *desc,
                                    mpt_error *err, mpt_image *out) {
    uint64_t limit = 16 * (uint64_t)(info->width + 32) * (uint64_t)(info->height + 32) +
                     4 * (uint64_t)encoded.size;
    bool out_of_memory = false;
    mpti_feed feed;
    int w = 0, h = 0;

    memset(&feed, 0, sizeof feed);
    if (info->format == MPT_IMAGE_JPEG) {
        feed.jpeg = mpti_jpeg_walk(encoded, desc->max_pixels);
    } else {
        feed.at = encoded.data;
        feed.left = MPTI_PNG_HEADER;
        feed.chunk = encoded.data + MPTI_PNG_HEADER;
    }
    out->pixels = mpti_stb_load(&feed, allocator, limit < SIZE_MAX ? (size_t)limit : SIZE_MAX,
                                desc->channels, &w, &h, &out_of_memory);
    out->width = w;
    out->height = h;
    out->channels = desc->channels;
    if (out->pixels && !feed.fault && w == info->width && h == info->height) return MPT_OK;
    if (!out->pixels && out_of_memory)
        return MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "no memory to decode a picture");
    if (feed.fault) return MPTI_DAMAGED(err, "%s", feed.fault);
    return MPTI_DAMAGED(err, "%s: the compressed data are damaged",
                        mpt_image_format_string(info->format));
}
#else
static mpt_result mpti_image_unpack(const mpt_allocator *allocator, mpt_bytes encoded,
                                    const mpt_image_info *info, const mpt_image_desc *desc,
                                    mpt_error *err, mpt_image *out) {
    (void)allocator, (void)encoded, (void)desc, (void)out;
    return MPTI_REFUSED(err,
                        "built without stb_image.h, which %s pictures need: install it "
                        "(Debian: libstb-dev) and build again, without MPTRAIN_NO_IMAGE",
                        mpt_image_format_string(info->format));
}
#endif

/* Turns or mirrors as EXIF says (1..8: where row 0 and column 0 of the stored picture belong). */
static mpt_result mpti_image_orient(const mpt_allocator *allocator, int orientation, mpt_error *err,
                                    mpt_image *image) {
    bool swap = orientation >= 5;
    bool flip_x = orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8;
    bool flip_y = orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
    int w = image->width, h = image->height, x, y;
    size_t c = (size_t)image->channels;
    uint8_t *turned = (uint8_t *)mpti_sized_alloc(allocator, (size_t)w * (size_t)h * c);
    uint8_t *to = turned;

    if (!turned) return MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "no memory to turn a picture");
    image->width = swap ? h : w;
    image->height = swap ? w : h;
    for (y = 0; y < image->height; y++) {
        for (x = 0; x < image->width; x++, to += c) {
            int column = swap ? y : x, row = swap ? x : y;
            if (flip_x) column = w - 1 - column;
            if (flip_y) row = h - 1 - row;
            memcpy(to, image->pixels + ((size_t)row * (size_t)w + (size_t)column) * c, c);
        }
    }
    mpti_sized_free(allocator, image->pixels);
    image->pixels = turned;
    return MPT_OK;
}

static mpt_result mpti_jpeg_decode(const mpt_allocator *allocator, mpt_bytes encoded,
                                   const mpt_image_desc *desc, mpt_error *err, mpt_image *out) {
    mpti_jpeg j = mpti_jpeg_walk(encoded, desc->max_pixels);
    mpt_result rc = MPT_OK;

    while (!rc && !j.ended) rc = mpti_jpeg_next(&j, err);
    if (!rc) rc = mpti_image_unpack(allocator, encoded, &j.info, desc, err, out);
    if (!rc && desc->apply_exif && j.info.orientation > 1)
        rc = mpti_image_orient(allocator, j.info.orientation, err, out);
    return rc;
}

static mpt_result mpti_png_decode(const mpt_allocator *allocator, mpt_bytes encoded,
                                  const mpt_image_desc *desc, mpt_error *err, mpt_image *out) {
    mpt_image_info info;
    int colour = 0;
    mpt_result rc;

    info.format = MPT_IMAGE_PNG;
    rc = mpti_png_header(encoded, desc->max_pixels, err, &info, &colour);
    if (!rc) rc = mpti_png_check(encoded, colour == 3, err);
    return rc ? rc : mpti_image_unpack(allocator, encoded, &info, desc, err, out);
}

/* ---- pictures: BMP ------------------------------------------------------------------------------
   File header (14 bytes), information header (12 or from 40 bytes on), masks or palette, rows of
   4-byte multiples, from the bottom unless the height is negative. Read here: it takes less code
   than making sure that the decoder never looks beyond a palette. */
typedef struct mpti_bmp {
    int bits; /* per pixel: 1, 4, 8 with palette, 16, 24, 32 */
    bool top_down;
    uint32_t shift[3], most[3]; /* of red, green, blue in a pixel of 16 to 32 bits */
    const uint8_t *palette, *rows;
    size_t num_colours, colour_size, stride;
} mpti_bmp;

static mpt_result mpti_bmp_format(mpt_bytes b, mpti_bmp *bmp, uint32_t compression,
                                  mpt_error *err) {
    static const uint32_t rgb555[3] = {0x7c00, 0x3e0, 0x1f}, rgb888[3] = {0xff0000, 0xff00, 0xff};
    bool masked = compression == 3 || compression == 6; /* BITFIELDS, ALPHABITFIELDS */
    bool wide = bmp->bits == 16 || bmp->bits == 32;
    int i;

    if (compression == 1 || compression == 2)
        return MPTI_REFUSED(err, "run-length coded BMP (RLE): convert it to PNG");
    if ((compression && !(masked && wide)) ||
        (!wide && bmp->bits != 1 && bmp->bits != 4 && bmp->bits != 8 && bmp->bits != 24))
        return MPTI_REFUSED(err, "BMP with %d bits per pixel, compression %u: convert it to PNG",
                            bmp->bits, compression);
    if (masked && b.size < 54 + 12) return MPTI_DAMAGED(err, "BMP: the header is truncated");
    for (i = 0; i < 3; i++) {
        uint32_t mask = bmp->bits == 16 ? rgb555[i] : rgb888[i];
        if (masked) mask = mpti_load_uint(b.data + 54 + 4 * i, 4, false);
        if (mask == 0) return MPTI_DAMAGED(err, "BMP: bad colour masks");
        for (bmp->shift[i] = 0; !(mask >> bmp->shift[i] & 1);) bmp->shift[i]++;
        bmp->most[i] = mask >> bmp->shift[i];
    }
    return MPT_OK;
}

static mpt_result mpti_bmp_header(mpt_bytes b, int64_t max_pixels, mpt_error *err,
                                  mpt_image_info *info, mpti_bmp *bmp) {
    const uint8_t *p = b.data;
    size_t header = b.size < 26 ? 0 : mpti_load_uint(p + 14, 4, false), offset;
    uint32_t compression = 0, colours = 0;
    mpt_result rc;

    if (b.size < 26 || header > b.size - 14)
        return MPTI_DAMAGED(err, "BMP: the header is truncated");
    if (header == 12) {
        info->width = mpti_load_uint(p + 18, 2, false);
        info->height = mpti_load_uint(p + 20, 2, false);
        bmp->bits = (int)mpti_load_uint(p + 24, 2, false);
    } else if (header >= 40) {
        info->width = (int32_t)mpti_load_uint(p + 18, 4, false);
        info->height = (int32_t)mpti_load_uint(p + 22, 4, false);
        bmp->bits = (int)mpti_load_uint(p + 28, 2, false);
        compression = mpti_load_uint(p + 30, 4, false);
        colours = mpti_load_uint(p + 46, 4, false);
    } else {
        return MPTI_REFUSED(err, "BMP with an unknown header: convert it to PNG");
    }
    bmp->top_down = info->height < 0;
    if (bmp->top_down) info->height = -info->height;
    info->channels = bmp->bits == 32 ? 4 : 3;
    info->bits = bmp->bits == 16 ? 5 : 8;
    rc = mpti_image_check_size(info, max_pixels, err);
    if (!rc) rc = mpti_bmp_format(b, bmp, compression, err);
    if (rc) return rc;
    offset = mpti_load_uint(p + 10, 4, false);
    bmp->stride = (size_t)(((uint64_t)info->width * (uint64_t)bmp->bits + 31) / 32 * 4);
    if (offset < 14 + header || offset > b.size ||
        (uint64_t)info->height > (b.size - offset) / bmp->stride)
        return MPTI_DAMAGED(err, "BMP: the picture is truncated");
    bmp->rows = p + offset;
    bmp->palette = p + 14 + header;
    bmp->colour_size = header == 12 ? 3 : 4;
    bmp->num_colours = (offset - 14 - header) / bmp->colour_size;
    if (colours > 0 && colours < bmp->num_colours) bmp->num_colours = colours;
    return MPT_OK;
}

static void mpti_bmp_pixel(const mpti_bmp *bmp, const uint8_t *row, int64_t x, uint8_t rgb[3]) {
    int64_t bit = x * bmp->bits;
    uint32_t v = mpti_load_uint(row + bit / 8, bmp->bits < 8 ? 1 : bmp->bits / 8, false);
    int i;

    if (bmp->bits < 8) v = v >> (8 - bmp->bits - bit % 8) & ((1u << bmp->bits) - 1);
    for (i = 0; i < 3; i++) {
        if (bmp->bits > 8) {
            uint64_t part = v >> bmp->shift[i] & bmp->most[i];
            rgb[i] = (uint8_t)(bmp->most[i] == 255 ? part : part * 255 / bmp->most[i]);
        } else { /* numbers beyond the palette: black */
            rgb[i] = v < bmp->num_colours ? bmp->palette[v * bmp->colour_size + 2 - (size_t)i] : 0;
        }
    }
}

static uint8_t mpti_luma(const uint8_t rgb[3]) { /* weights of stb_image */
    return (uint8_t)((rgb[0] * 77 + rgb[1] * 150 + rgb[2] * 29) >> 8);
}

static mpt_result mpti_bmp_decode(const mpt_allocator *allocator, mpt_bytes encoded,
                                  const mpt_image_desc *desc, mpt_error *err, mpt_image *out) {
    mpt_image_info info;
    mpti_bmp bmp;
    uint8_t *to;
    int64_t x, y;
    size_t bytes;
    mpt_result rc = mpti_bmp_header(encoded, desc->max_pixels, err, &info, &bmp);

    if (rc) return rc;
    out->width = (int32_t)info.width;
    out->height = (int32_t)info.height;
    out->channels = desc->channels;
    bytes = (size_t)(info.width * info.height * desc->channels); /* the rows in the file limit it */
    out->pixels = to = (uint8_t *)mpti_sized_alloc(allocator, bytes);
    if (!to) return MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "no memory to decode a picture");
    for (y = 0; y < info.height; y++) {
        int64_t line = bmp.top_down ? y : info.height - 1 - y;
        for (x = 0; x < info.width; x++, to += desc->channels) {
            uint8_t rgb[3];
            mpti_bmp_pixel(&bmp, bmp.rows + (size_t)line * bmp.stride, x, rgb);
            if (desc->channels == 3) memcpy(to, rgb, 3);
            else *to = mpti_luma(rgb);
        }
    }
    return MPT_OK;
}

/* ---- pictures: entry points ------------------------------------------------------------------ */
static mpt_image_desc mpti_image_desc_defaults(const mpt_image_desc *desc) {
    mpt_image_desc d;

    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (d.channels == 0) d.channels = 3;
    if (d.max_pixels == 0) d.max_pixels = 100000000;
    if (d.max_bytes == 0) d.max_bytes = (int64_t)256 << 20;
    return d;
}

static void mpti_image_free(const mpt_allocator *allocator, mpt_image *image) {
    mpti_sized_free(allocator, image->pixels);
    memset(image, 0, sizeof *image);
}

/* desc: with its defaults. Needs no context, so that worker threads can call it. */
static mpt_result mpti_image_decode(const mpt_allocator *allocator, mpt_bytes encoded,
                                    const mpt_image_desc *desc, mpt_error *err, mpt_image *out) {
    mpt_image_format format = mpti_image_format(encoded);
    mpt_result rc;

    memset(out, 0, sizeof *out);
    if (encoded.size > (uint64_t)desc->max_bytes || encoded.size > INT_MAX) { /* stb's limit */
        rc = MPTI_DAMAGED(err, "an encoded picture larger than max_bytes = %lld",
                          (long long)desc->max_bytes);
    } else if (format == MPT_IMAGE_JPEG) {
        rc = mpti_jpeg_decode(allocator, encoded, desc, err, out);
    } else if (format == MPT_IMAGE_PNG) {
        rc = mpti_png_decode(allocator, encoded, desc, err, out);
    } else if (format == MPT_IMAGE_BMP) {
        rc = mpti_bmp_decode(allocator, encoded, desc, err, out);
    } else {
        rc = mpti_image_refuse(encoded, format, err);
    }
    if (rc) mpti_image_free(allocator, out);
    if (rc && rc != MPT_ERR_OUT_OF_MEMORY && err) mpti_image_describe(encoded, err);
    return rc;
}

static mpt_result mpti_image_probe(mpt_bytes encoded, mpt_error *err, mpt_image_info *out) {
    mpti_jpeg j = mpti_jpeg_walk(encoded, INT64_MAX);
    mpt_result rc = MPT_OK;
    mpti_bmp bmp;
    int colour;

    memset(out, 0, sizeof *out);
    out->format = mpti_image_format(encoded);
    out->orientation = 1;
    switch (out->format) {
    case MPT_IMAGE_JPEG:
        while (!rc && !j.in_scan && !j.ended) rc = mpti_jpeg_next(&j, err);
        *out = j.info;
        return rc;
    case MPT_IMAGE_PNG: return mpti_png_header(encoded, INT64_MAX, err, out, &colour);
    case MPT_IMAGE_BMP: return mpti_bmp_header(encoded, INT64_MAX, err, out, &bmp);
    default: return mpti_image_refuse(encoded, out->format, err);
    }
}

MPT_API mpt_result mpt_image_probe(mpt_ctx *ctx, mpt_bytes encoded, mpt_image_info *out) {
    mpt_error *err = ctx ? &ctx->error : NULL;
    mpt_result rc;

    if (!out || (!encoded.data && encoded.size))
        return mpti_report(ctx, MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT,
                                          "mpt_image_probe: a pointer is NULL"));
    rc = mpti_image_probe(encoded, err, out);
    if (rc && err) mpti_image_describe(encoded, err);
    return mpti_report(ctx, rc);
}

MPT_API mpt_result mpt_image_decode(mpt_ctx *ctx, mpt_bytes encoded, const mpt_image_desc *desc,
                                    mpt_image *out) {
    mpt_image_desc d = mpti_image_desc_defaults(desc);
    mpt_result rc;

    if (!ctx) return MPT_ERR_INVALID_ARGUMENT;
    if (!out || (!encoded.data && encoded.size)) {
        rc = MPTI_FAIL(&ctx->error, MPT_ERR_INVALID_ARGUMENT,
                       "mpt_image_decode: a pointer is NULL");
        return mpti_report(ctx, rc);
    }
    memset(out, 0, sizeof *out);
    if ((d.channels != 1 && d.channels != 3) || d.max_pixels < 0 || d.max_bytes < 0)
        rc = MPTI_FAIL(&ctx->error, MPT_ERR_INVALID_ARGUMENT,
                       "mpt_image_desc: channels is not 1 or 3, or a limit is negative");
    else rc = mpti_image_decode(&ctx->desc.allocator, encoded, &d, &ctx->error, out);
    return mpti_report(ctx, rc);
}

MPT_API void mpt_image_free(mpt_ctx *ctx, mpt_image *image) {
    if (ctx && image) mpti_image_free(&ctx->desc.allocator, image);
}

/* ---- pictures: resizing -------------------------------------------------------------------------
   The triangle filter, as wide as a pixel of the coarser side, so that shrinking averages and does
   not alias; Pillow calls it BILINEAR. Columns first, then rows, with 8 bits in between. All in
   integers, positions in 1/4096 pixel, weights in 1/2^22: every machine gives the same bits.
   For one axis, in units of 1 / (8192 out) source pixel:

       source pixel j is at (2j + 1) * 4096 * out
       output i       is at 2 * out * start + (2i + 1) * length
       reach of the filter: 2 * max(length, 4096 * out) */
typedef struct mpti_box {
    double x, y, width, height; /* in pixels of the source */
} mpti_box;

typedef struct mpti_axis {
    int64_t start, length, reach; /* of the box, in 1/4096 pixel; of the filter */
    int size, out;                /* pixels of the source, of the result */
    size_t max_weights;
} mpti_axis;

enum { MPTI_SUBPIXELS = 4096, MPTI_WEIGHT_BITS = 22 };

static bool mpti_axis_init(mpti_axis *a, double start, double length, int size, int out) {
    int64_t step = (int64_t)MPTI_SUBPIXELS * out;

    /* 2^24 pixels keep what follows within 64 bits; false for NaN, too */
    if (!(start > -1 && length > 0 && start + length < (1 << 24) && out > 0 && out <= 32768))
        return false;
    a->start = (int64_t)(start * MPTI_SUBPIXELS + 0.5);
    a->length = (int64_t)(length * MPTI_SUBPIXELS + 0.5);
    a->reach = 2 * (a->length > step ? a->length : step);
    a->size = size;
    a->out = out;
    a->max_weights = (size_t)(a->reach / step) + 2;
    /* 1: both may have been rounded up */
    return a->length > 0 && a->start + a->length <= (int64_t)size * MPTI_SUBPIXELS + 1;
}

static bool mpti_axis_is_copy(const mpti_axis *a) {
    return a->start % MPTI_SUBPIXELS == 0 && a->length == (int64_t)MPTI_SUBPIXELS * a->out;
}

/* How many source pixels output i is made of, from *first on. Their weights sum to 1. */
static int mpti_axis_weights(const mpti_axis *a, int i, int *first, uint32_t *weights) {
    int64_t half = (int64_t)MPTI_SUBPIXELS * a->out, sum = 0, j;
    int64_t centre = 2 * a->out * a->start + (2 * i + 1) * a->length;
    int64_t low = centre - a->reach + half, high = (centre + a->reach + half - 1) / (2 * half);

    low = low < 0 ? 0 : low / (2 * half);
    if (high > a->size) high = a->size;
    for (j = low; j < high; j++) sum += a->reach - llabs((2 * j + 1) * half - centre);
    for (j = low; j < high; j++) {
        int64_t weight = a->reach - llabs((2 * j + 1) * half - centre); /* below 2^38 */
        weights[j - low] = (uint32_t)(((weight << MPTI_WEIGHT_BITS) + sum / 2) / sum);
    }
    *first = (int)low;
    return (int)(high - low);
}

static uint8_t mpti_weighted(uint32_t sum) { /* rounds */
    sum = (sum + (1u << (MPTI_WEIGHT_BITS - 1))) >> MPTI_WEIGHT_BITS;
    return (uint8_t)(sum > 255 ? 255 : sum);
}

/* n bytes, each the weighted sum of those in `count` rows below each other. In blocks of a size
   that the compiler knows: it turns them into vector instructions. */
static void mpti_blend_rows(const uint8_t *rows, size_t stride, int count, const uint32_t *weights,
                            size_t n, uint8_t *out) {
    enum { BLOCK = 16 };
    uint32_t sums[BLOCK];
    int k, i;

    for (; n >= BLOCK; n -= BLOCK, rows += BLOCK, out += BLOCK) {
        memset(sums, 0, sizeof sums);
        for (k = 0; k < count; k++)
            for (i = 0; i < BLOCK; i++)
                sums[i] += weights[k] * rows[(size_t)k * stride + (size_t)i];
        for (i = 0; i < BLOCK; i++) out[i] = mpti_weighted(sums[i]);
    }
    for (; n > 0; n--, rows++, out++) {
        sums[0] = 0;
        for (k = 0; k < count; k++) sums[0] += weights[k] * rows[(size_t)k * stride];
        *out = mpti_weighted(sums[0]);
    }
}

/* One pixel of c channels, the weighted sum of `count` beside each other. */
static void mpti_blend_pixels(const uint8_t *from, int count, const uint32_t *weights, int c,
                              uint8_t *to) {
    uint32_t sums[3] = {0, 0, 0};
    int k;

    for (k = 0; k < count; k++, from += c) {
        sums[0] += weights[k] * from[0];
        if (c == 1) continue;
        sums[1] += weights[k] * from[1];
        sums[2] += weights[k] * from[2];
    }
    for (k = 0; k < c; k++) to[k] = mpti_weighted(sums[k]);
}

static void mpti_image_cut(const mpt_image *src, int64_t x, int64_t y, int out_w, int out_h,
                           bool flip, uint8_t *out) {
    size_t c = (size_t)src->channels;
    int i, j;

    for (j = 0; j < out_h; j++, out += (size_t)out_w * c) {
        const uint8_t *row = src->pixels + ((size_t)(y + j) * (size_t)src->width + (size_t)x) * c;
        if (!flip) memcpy(out, row, (size_t)out_w * c);
        for (i = 0; flip && i < out_w; i++)
            memcpy(out + (size_t)(out_w - 1 - i) * c, row + (size_t)i * c, c);
    }
}

/* The part of src inside box, scaled to out (out_h x out_w x channels, 1 or 3), mirrored left to
   right if flip. Pixels just outside the box take part, as they do in Pillow. */
static mpt_result mpti_image_resample(const mpt_allocator *allocator, const mpt_image *src,
                                      const mpti_box *box, int out_w, int out_h, bool flip,
                                      uint8_t *out, mpt_error *err) {
    size_t c = (size_t)src->channels, stride = (size_t)src->width * c, words, bytes;
    uint32_t *wx, *wy;
    int *spans, x, y; /* spans: first and count of each column */
    mpti_axis ax, ay;
    uint8_t *row;

    if (!mpti_axis_init(&ax, box->x, box->width, src->width, out_w) ||
        !mpti_axis_init(&ay, box->y, box->height, src->height, out_h))
        return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT,
                         "resize: the box is not inside the picture, or a bad size");
    if (mpti_axis_is_copy(&ax) && mpti_axis_is_copy(&ay)) {
        mpti_image_cut(src, ax.start / MPTI_SUBPIXELS, ay.start / MPTI_SUBPIXELS, out_w, out_h,
                       flip, out);
        return MPT_OK;
    }
    words = ay.max_weights + (ax.max_weights + 2) * (size_t)out_w;
    bytes = words * 4 + stride;
    wy = (uint32_t *)mpti_alloc(allocator, bytes);
    if (!wy) return MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "no memory to resize a picture");
    wx = wy + ay.max_weights;
    spans = (int *)(wx + ax.max_weights * (size_t)out_w);
    row = (uint8_t *)(wy + words);
    for (x = 0; x < out_w; x++)
        spans[2 * x + 1] = mpti_axis_weights(&ax, x, &spans[2 * x],
                                             wx + ax.max_weights * (size_t)x);
    for (y = 0; y < out_h; y++, out += (size_t)out_w * c) {
        int first, count = mpti_axis_weights(&ay, y, &first, wy);
        mpti_blend_rows(src->pixels + (size_t)first * stride, stride, count, wy, stride, row);
        for (x = 0; x < out_w; x++) {
            mpti_blend_pixels(row + (size_t)spans[2 * x] * c, spans[2 * x + 1],
                              wx + ax.max_weights * (size_t)x, src->channels,
                              out + (size_t)(flip ? out_w - 1 - x : x) * c);
        }
    }
    mpti_free(allocator, wy, bytes);
    return MPT_OK;
}

/* The largest box of the output's aspect in the middle of a picture. */
static mpti_box mpti_center_box(int width, int height, int out_w, int out_h, double fraction) {
    double scale_x = (double)width / out_w, scale_y = (double)height / out_h;
    double scale = (scale_x < scale_y ? scale_x : scale_y) * fraction;
    mpti_box box;

    box.width = scale * out_w;
    box.height = scale * out_h;
    box.x = (width - box.width) / 2;
    box.y = (height - box.height) / 2;
    return box;
}

/* Moves a picture by (dx, dy) inside a black frame; flips on the way. in, out: (h, w, c) */
static void mpti_shift_picture(const uint8_t *in, int h, int w, int c, int dx, int dy, bool flip,
                               uint8_t *out) {
    int y, x;

    for (y = 0; y < h; y++)
        for (x = 0; x < w; x++, out += c) {
            int from_y = y + dy, from_x = (flip ? w - 1 - x : x) + dx;
            if (from_y < 0 || from_y >= h || from_x < 0 || from_x >= w) memset(out, 0, (size_t)c);
            else
                memcpy(out, in + ((size_t)from_y * (size_t)w + (size_t)from_x) * (size_t)c,
                       (size_t)c);
        }
}

/* =================================================================================================
 * >>dataset   3.2 Data sets: which files, how many records, who reads which
 * =================================================================================================
 * Problem: the same records have to come in the same order whatever the listing, the number of
 *          ranks and the number of threads; and a schedule wants to know how many there are.
 * Idea:    names are sorted; a permutation by (seed, epoch) deals files to lanes, or with few files
 *          runs of records; counts come from the best source there is, and it is said which.
 * Shapes:  files -> per lane a list of segments (file, first record, count)
 * Tested:  tests/test_loader.c
 * Next:    >>loader, which reads the segments.
 */

enum {
    MPTI_WHOLE_FILES_PER_LANE = 16,  /* with fewer files a lane, records are dealt instead */
    MPTI_STREAM_RECORDS = 64,        /* read-ahead of a stream: so many records ... */
    MPTI_STREAM_BYTES = 512 * 1024,  /* ... or so many bytes, whichever is reached first */
    MPTI_DECODE_GROUP = 16,          /* records that a worker decodes in one go ... */
    MPTI_DECODE_GROUP_BYTES = 32768, /* ... unless they are large */
    MPTI_CROP_TRIES = 10,            /* of random-resized-crop, as in TensorFlow and torchvision */
    MPTI_MAX_FILES = 1 << 23,        /* they share a 64-bit sample id with 2^40 records each */
    MPTI_MAX_INDEX_FILES = 2048      /* of more files no .idx is sought: it would take minutes */
};

#define MPTI_MAX_RECORDS ((int64_t)1 << 39) /* of a file; of 2^23 files still below 2^63 */

static mpt_result mpti_loader_desc_error(mpt_error *err, const char *field, const char *range) {
    return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT, "mpt_loader_desc.%s must be %s", field, range);
}

/* The one place where defaults of mpt_loader_desc are filled in. */
static void mpti_loader_desc_defaults(mpt_loader_desc *d) {
    int c;

    if (!d->io) d->io = mpt_io_files();
    if (d->batch_size == 0) d->batch_size = 32;
    if (d->world_size == 0) d->world_size = 1;
    if (d->num_lanes == 0) d->num_lanes = d->world_size;
    if (d->num_workers == 0) d->num_workers = mpti_num_cores();
    if (!MPTI_HAVE_THREADS) d->num_workers = 0;
    if (d->interleave == 0) d->interleave = d->no_shuffle ? 1 : 8;
    if (d->shuffle_buffer == 0) {
        bool all = d->array_images && d->array_images->dims[0] > 0 &&
                   d->array_images->dims[0] < INT_MAX;
        d->shuffle_buffer = all ? (int)d->array_images->dims[0] : 1024;
    }
    if (d->no_shuffle) d->shuffle_buffer = 1;
    if (d->crop_padding == 0) d->crop_padding = 4;
    if (d->center_fraction == 0) d->center_fraction = 1;
    if (d->label_offset != 0) d->label_offset_is_set = 1;
    if (d->max_bad_records == 0) d->max_bad_records = 1000;
    for (c = 0; c < 3; c++)
        if (d->std[c] == 0) d->std[c] = 1;
}

static mpt_result mpti_loader_check_arrays(const mpt_loader_desc *d, mpt_error *err) {
    const mpt_tensor *x = d->array_images, *y = d->array_labels;

    if (!x->data || x->dtype != MPT_U8 || x->num_dims != 4 || x->dims[0] < 1 || x->dims[1] < 1 ||
        x->dims[2] < 1 || x->dims[3] != d->channels)
        return mpti_loader_desc_error(err, "array_images",
                                      "a U8 tensor (n, h, w, channels) with n of at least 1");
    if (!y || !y->data || y->dtype != MPT_I32 || y->num_dims != 1 || y->dims[0] != x->dims[0])
        return mpti_loader_desc_error(err, "array_labels",
                                      "an I32 tensor (n), n as in array_images");
    return MPT_OK;
}

/* Works on a desc whose defaults are filled in. */
static mpt_result mpti_loader_desc_check(const mpt_loader_desc *d, mpt_error *err) {
    int c;

    if (!d->array_images && (d->num_paths < 1 || !d->paths))
        return mpti_loader_desc_error(err, "paths", "at least one name, or array_images set");
    if (d->array_images && d->num_paths > 0)
        return mpti_loader_desc_error(err, "paths", "empty when array_images is set");
    if (d->batch_size < 1 || d->batch_size > 1 << 24)
        return mpti_loader_desc_error(err, "batch_size", "in 1 .. 2^24");
    if (d->height < 1 || d->height > 16384 || d->width < 1 || d->width > 16384)
        return mpti_loader_desc_error(err, "height and width", "in 1 .. 16384");
    if (d->channels != 1 && d->channels != 3)
        return mpti_loader_desc_error(err, "channels", "1 or 3");
    if (d->num_classes < 1) return mpti_loader_desc_error(err, "num_classes", "at least 1");
    if (d->world_size < 1 || d->rank < 0 || d->rank >= d->world_size)
        return mpti_loader_desc_error(err, "rank", "in 0 .. world_size-1");
    if (d->num_lanes < 1 || d->num_lanes % d->world_size != 0)
        return mpti_loader_desc_error(err, "num_lanes", "a multiple of world_size");
    if (d->num_workers < 0 || d->num_workers > 1024)
        return mpti_loader_desc_error(err, "num_workers", "in 1 .. 1024");
    if (d->interleave < 1 || d->interleave > 1024)
        return mpti_loader_desc_error(err, "interleave", "in 1 .. 1024");
    if (d->shuffle_buffer < 1) return mpti_loader_desc_error(err, "shuffle_buffer", "at least 1");
    if (d->crop_padding < 0 || d->crop_padding > 1024)
        return mpti_loader_desc_error(err, "crop_padding", "in 1 .. 1024");
    if (!(d->center_fraction > 0 && d->center_fraction <= 1))
        return mpti_loader_desc_error(err, "center_fraction", "in 0 .. 1");
    if ((int)d->augment < 0 || d->augment > MPT_AUGMENT_IMAGENET)
        return mpti_loader_desc_error(err, "augment", "one of mpt_augment");
    if ((int)d->last_batch < 0 || d->last_batch > MPT_LAST_BATCH_PAD)
        return mpti_loader_desc_error(err, "last_batch", "one of mpt_last_batch");
    if ((int)d->on_bad_record < 0 || d->on_bad_record > MPT_BAD_RECORD_SKIP_FILE)
        return mpti_loader_desc_error(err, "on_bad_record", "one of mpt_on_bad_record");
    if (d->max_bad_records < 0) return mpti_loader_desc_error(err, "max_bad_records", "at least 0");
    if (d->num_records < 0) return mpti_loader_desc_error(err, "num_records", "at least 0");
    if (d->dtype != MPT_F32 && d->dtype != MPT_F16 && d->dtype != MPT_U8)
        return mpti_loader_desc_error(err, "dtype", "MPT_F32, MPT_F16 or MPT_U8");
    for (c = 0; c < 3; c++) { /* far from 0 .. 1: somebody's numbers for pixels of 0 .. 255 */
        if (!(d->mean[c] >= -8 && d->mean[c] <= 8 && d->std[c] > 0 && d->std[c] <= 8))
            return mpti_loader_desc_error(err, "mean and std",
                                          "in units of pixel / 255, std above 0");
        if (d->dtype == MPT_U8 && (d->mean[c] != 0 || d->std[c] != 1))
            return mpti_loader_desc_error(err, "mean and std", "unset when dtype is MPT_U8");
    }
    return d->array_images ? mpti_loader_check_arrays(d, err) : MPT_OK;
}

/* ---- what flows: records, samples, batches --------------------------------------------------- */

/* A record that can't be used, on its way to the thread that calls mpt_loader_next. */
typedef struct mpti_bad {
    struct mpti_bad *next;
    mpt_error error;
    int file;
    int64_t record;
    uint64_t offset;
    bool rest_of_file, fatal; /* fatal: no policy skips it */
} mpti_bad;

/* One record: which it is, and its bytes while they are needed. Exactly one of payload and bad. */
typedef struct mpti_item {
    int file;        /* in the sorted list; 0 for arrays */
    int64_t record;  /* in its file */
    uint64_t offset; /* of its length field */
    uint64_t end;    /* where the next record begins */
    mpt_bytes payload;
    mpti_block *block; /* holds payload; NULL for arrays */
    mpti_bad *bad;
} mpti_item;

typedef enum mpti_sample_state {
    MPTI_SAMPLE_DEALT = 0,
    MPTI_SAMPLE_DECODING,
    MPTI_SAMPLE_READY
} mpti_sample_state;

typedef struct mpti_sample {
    mpti_item item;
    mpti_sample_state state;
    uint8_t *pixels; /* height x width x channels, from the lane's slab; NULL if the item is bad */
    int32_t label;
} mpti_sample;

/* A run of records that a lane reads: part of a plain file, a share of a compressed one, or all. */
typedef struct mpti_segment {
    int file;
    int64_t first, count; /* count -1: to the end of the file */
    uint64_t offset, end; /* of record `first`; of what follows the last one, if counted */
    int stride, phase;    /* keep records with record % stride == phase */
} mpti_segment;

/* A segment being read. One worker at a time reads ahead into the queue; the merge takes
   from it. */
typedef struct mpti_stream {
    int segment; /* number in the lane's list; -1: none */
    mpt_tfrecord *reader;
    int64_t read_next;    /* record that the reader delivers next ... */
    uint64_t read_offset; /* ... and its offset */
    int64_t take_next;    /* record behind the last one taken by the merge ... */
    uint64_t take_offset; /* ... and its offset */
    bool busy, ended;     /* a worker reads; nothing comes behind what is in the queue */
    mpti_item queue[MPTI_STREAM_RECORDS];
    int head, count;
    size_t bytes; /* payload bytes in the queue */
} mpti_stream;

typedef struct mpti_lane {
    int number;             /* of all lanes, whoever owns them */
    mpti_segment *segments; /* [num_files] */
    int num_segments, next_segment;
    mpti_stream *streams; /* [interleave + 1] */
    int *order; /* [interleave + 1]: streams in turn; the last one waits, read ahead, for a place */
    int turn;   /* place in order that the merge takes from next */
    bool drained;       /* all streams are at their end */
    mpti_item *pending; /* [num_pending] of a restored position: dealt before anything else */
    int64_t num_pending, next_pending;
    mpti_item *shuffle; /* [desc.shuffle_buffer] */
    int shuffle_count;
    uint64_t draws; /* numbers drawn in this epoch: the counter of the shuffle */
    /* in lane order, counted from the start of the epoch (or the restored position):
       delivered <= collated <= resolved <= dealt */
    mpti_sample *samples; /* ring [ring]: sample s lies in s % ring */
    int64_t ring, delivered, collated, resolved, decode_next, dealt;
    int64_t num_ready;           /* usable ones in collated .. resolved-1 */
    int64_t num_usable, num_bad; /* in this epoch */
    bool finished;               /* nothing more will be dealt */
    bool broken;                 /* the last one resolved ends the run */
    bool collating;              /* a worker fills this lane's part of a batch */
    int in_state;                /* blocks of a state that is being read with this lane */
    int64_t next_batch;          /* which it fills next */
    uint8_t *slab;               /* [num_pixels][height x width x channels] */
    uint8_t **free_pixels;
    int64_t num_pixels, num_free;
    struct mpti_gathered *gathered; /* [batch_size]: what a worker puts into the batch */
} mpti_lane;

typedef struct mpti_loader_batch {
    void *images; /* (lanes * batch_size, height, width, channels) */
    int32_t *labels;
    uint64_t *ids;
    int32_t *valid; /* [lanes] */
    int64_t *upto;  /* [lanes]: sample behind the last one that went into this batch */
    mpti_bad **bad; /* [lanes]: met on the way, in order */
    int lanes_done;
} mpti_loader_batch;

typedef struct mpti_owned {
    void *p;
    size_t bytes;
} mpti_owned;

struct mpt_loader {
    mpt_ctx *ctx;
    mpt_allocator allocator;
    mpti_buffer owned;    /* mpti_owned[]: freed when the loader is */
    mpt_loader_desc desc; /* with defaults; its strings and paths are copies */
    mpt_tensor arrays[2]; /* copies of the caller's tensors: images, labels */
    mpt_image_desc image; /* how pictures are decoded */
    char **files;         /* [num_files], sorted */
    int num_files;
    mpti_buffer names;            /* char *[]: backing store of files */
    mpt_tfrecord_index **indexes; /* [num_files]; NULL entries: compressed, or not needed */
    int64_t *counts;              /* [num_files] records; -1: not known */
    char *image_key, *label_key;
    int label_offset;
    int64_t num_records, steps_per_epoch;
    mpt_count_source num_records_source;
    size_t sample_bytes; /* of decoded pixels */
    void *lut;           /* [channels][256] FP32 or FP16 of a pixel's value; NULL for U8 */

    mpti_lane *lanes; /* this rank's */
    int num_lanes;
    mpti_loader_batch batches[2]; /* one is with the caller, one is being filled */
    int64_t epoch, index;         /* of the batch delivered next */
    int64_t taken, released; /* batches the caller got since the start or restore, and gave back */
    int64_t ended_num_bad;   /* records left out in the epoch before */
    bool restored;           /* in the middle of this epoch: its records can't be counted */
    int64_t num_bad;         /* records left out in this epoch */
    bool failed;             /* for good; error tells why */
    mpt_error error;
    mpti_buffer state;

    mpti_mutex lock; /* guards all below and the lanes */
    mpti_cond work, done;
    mpti_thread *threads;        /* [desc.num_workers] */
    struct mpti_worker *workers; /* [at least 1]: without threads the caller works itself */
    int num_threads, num_idle, num_running; /* workers that wait, that are inside a job */
    bool closing, paused, out_of_memory;
    int job_turn;
};

/* An array that lives as long as the loader, zeroed. Sets *ok to false when there is no memory. */
static void *mpti_loader_array(mpt_loader *ld, int64_t count, size_t size, bool *ok) {
    mpti_owned owned;

    owned.p = *ok ? mpti_calloc(&ld->allocator, (size_t)count, size) : NULL;
    owned.bytes = (size_t)count * size;
    if (owned.p && mpti_buffer_append(&ld->owned, &owned, sizeof owned)) return owned.p;
    mpti_free(&ld->allocator, owned.p, owned.bytes);
    *ok = false;
    return NULL;
}

static void mpti_item_drop(const mpt_allocator *a, mpti_item *item) {
    mpti_block_release(item->block);
    mpti_free(a, item->bad, sizeof *item->bad);
    memset(item, 0, sizeof *item);
}

/* Turns an item into a bad one. False: no memory even for that. */
static bool mpti_item_fail(const mpt_allocator *a, mpti_item *item, const mpt_error *error) {
    mpti_bad *bad = (mpti_bad *)mpti_calloc(a, 1, sizeof *bad);

    if (!bad) return false;
    bad->error = *error;
    bad->file = item->file;
    bad->record = item->record;
    bad->offset = item->offset;
    bad->fatal = error->code != MPT_ERR_CORRUPT_DATA;
    mpti_block_release(item->block);
    item->block = NULL;
    item->payload.data = NULL;
    item->payload.size = 0;
    item->bad = bad;
    return true;
}

/* ---- which files ----------------------------------------------------------------------------- */
typedef struct mpti_listing {
    mpt_loader *ld;
    const char *pattern;
    int found, skipped;
    bool out_of_memory;
} mpti_listing;

static bool mpti_ends_with(const char *text, const char *end) {
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

/* Of a directory only names that look like TFRecord shards are taken: its other files (indexes,
   dataset_info.json, class lists) are no records. */
static bool mpti_is_shard_name(const char *path) {
    const char *name = mpti_base_name(path);

    if (name[0] == '.' || mpti_ends_with(name, ".idx") || mpti_ends_with(name, ".json") ||
        mpti_ends_with(name, ".txt"))
        return false;
    return strstr(name, "tfrecord") || strstr(name, "-of-");
}

static bool mpti_loader_add_file(mpt_loader *ld, const char *path) {
    char *copy = mpti_strdup(&ld->allocator, path);

    if (!copy) return false;
    if (!mpti_buffer_append(&ld->names, &copy, sizeof copy)) {
        mpti_strfree(&ld->allocator, copy);
        return false;
    }
    ld->files = (char **)(void *)ld->names.data;
    ld->num_files = (int)(ld->names.size / sizeof copy);
    return true;
}

static void mpti_listing_found(const char *path, void *arg) {
    mpti_listing *l = (mpti_listing *)arg;
    size_t n = strlen(l->pattern);
    bool inside = !strncmp(path, l->pattern, n) && path[n] && /* of a folder that was named */
                  (path[n] == '/' || (n > 0 && l->pattern[n - 1] == '/'));
    bool taken = inside ? mpti_is_shard_name(path)
                        : strcmp(path, l->pattern) == 0 || !mpti_ends_with(path, ".idx");

    if (taken) {
        l->found++;
        if (!mpti_loader_add_file(l->ld, path)) l->out_of_memory = true;
    } else {
        l->skipped++;
    }
}

/* name@N stands for name-00000-of-0000N and its sisters. False: it is another kind of name. */
static bool mpti_parse_shard_set(const char *pattern, int *base_length, int *num_shards) {
    const char *at = strrchr(pattern, '@');
    char *end;
    long n;

    if (!at || at == pattern || at[1] < '1' || at[1] > '9') return false;
    n = strtol(at + 1, &end, 10);
    if (*end || n >= MPTI_MAX_FILES) return false;
    *base_length = (int)(at - pattern);
    *num_shards = (int)n;
    return true;
}

static mpt_result mpti_loader_list_one(mpt_loader *ld, const char *pattern, mpt_error *err) {
    mpti_listing l;
    mpt_result rc = MPT_OK;
    int base, n, i;
    char name[PATH_MAX];

    memset(&l, 0, sizeof l);
    l.ld = ld;
    l.pattern = pattern;
    if (ld->desc.io->list || !mpti_parse_shard_set(pattern, &base, &n))
        rc = mpti_io_list(ld->desc.io, pattern, err, mpti_listing_found, &l);
    /* a file or folder of that very name comes first */
    if (rc == MPT_OK && l.found + l.skipped == 0 && mpti_parse_shard_set(pattern, &base, &n)) {
        for (i = 0; i < n && !l.out_of_memory; i++) {
            int length = snprintf(name, sizeof name, "%.*s-%05d-of-%05d", base, pattern, i, n);
            if (length < 0 || (size_t)length >= sizeof name)
                return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT, "%s: name too long",
                                 mpti_path_tail(pattern));
            l.found++;
            l.out_of_memory = !mpti_loader_add_file(ld, name);
        }
    }
    if (rc) return rc;
    if (l.out_of_memory)
        return MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "no memory for the list of files");
    if (l.found == 0 && l.skipped > 0)
        return MPTI_FAIL(err, MPT_ERR_IO,
                         "%s: none of its %d files is named like a TFRecord shard (*tfrecord*, "
                         "*-of-*): give a pattern",
                         mpti_path_tail(pattern), l.skipped);
    if (l.found > 0) return MPT_OK;
    if (strstr(pattern, "://"))
        return MPTI_FAIL(err, MPT_ERR_IO,
                         "%s: no file: mount that storage, or reach it through mpt_loader_desc.io",
                         mpti_path_tail(pattern));
    return MPTI_FAIL_ERRNO(err, MPT_ERR_IO, ENOENT, "%s: %s", mpti_path_tail(pattern),
                           strpbrk(pattern, "*?[")
                               ? "no file matches"
                               : "no such file, nor a folder with files in it");
}

static int mpti_compare_names(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* "train-00003-of-00008" is number 3 of a set of 8 that begins with the first 5 letters. */
static bool mpti_parse_shard_name(const char *path, int *prefix, int *number, int *total) {
    const char *of = NULL, *at, *p;

    for (p = path; (p = strstr(p, "-of-")) != NULL; p++) of = p;
    if (!of) return false;
    for (at = of; at > path && at[-1] >= '0' && at[-1] <= '9'; at--) continue;
    if (at == of || at == path || at[-1] != '-' || of - at > 9 || of[4] < '0' || of[4] > '9')
        return false;
    *prefix = (int)(at - 1 - path);
    *number = (int)strtol(at, NULL, 10);
    *total = (int)strtol(of + 4, NULL, 10);
    return true;
}

/* Not an error: a user may well train on a part. But said, since a failed copy looks the same. */
static void mpti_warn_incomplete_sets(const mpt_loader *ld) {
    char message[512];
    int i, j, prefix, number, total, other_prefix, other_total;

    for (i = 0; i < ld->num_files; i = j) {
        j = i + 1;
        if (!mpti_parse_shard_name(ld->files[i], &prefix, &number, &total)) continue;
        while (j < ld->num_files &&
               mpti_parse_shard_name(ld->files[j], &other_prefix, &number, &other_total) &&
               other_prefix == prefix && other_total == total &&
               !strncmp(ld->files[i], ld->files[j], (size_t)prefix))
            j++;
        if (j - i == total) continue;
        snprintf(message, sizeof message,
                 "%s: %d of the %d files of this set are here; training on these alone",
                 mpti_path_tail(ld->files[i]), j - i, total);
        mpti_log(ld->ctx, MPT_LOG_WARNING, message);
    }
}

static mpt_result mpti_loader_list(mpt_loader *ld, mpt_error *err) {
    mpt_result rc;
    int i;

    for (i = 0; i < ld->desc.num_paths; i++) {
        const char *path = ld->desc.paths[i];
        if (!path || !*path) return mpti_loader_desc_error(err, "paths", "free of empty names");
        rc = mpti_loader_list_one(ld, path, err);
        if (rc) return rc;
    }
    if (ld->num_files >= MPTI_MAX_FILES)
        return MPTI_FAIL(err, MPT_ERR_UNSUPPORTED, "%d files: at most %d, merge some",
                         ld->num_files, MPTI_MAX_FILES - 1);
    qsort(ld->files, (size_t)ld->num_files, sizeof *ld->files, mpti_compare_names);
    for (i = 1; i < ld->num_files; i++)
        if (!strcmp(ld->files[i - 1], ld->files[i]))
            return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT,
                             "%s: named twice (patterns overlap?): its records would count double",
                             mpti_path_tail(ld->files[i]));
    mpti_warn_incomplete_sets(ld);
    return MPT_OK;
}

/* ---- how many records ------------------------------------------------------------------------ */

/* With few files a lane takes a run of records out of their concatenation, which needs the index of
   each plain file; with many it takes whole files. One lane takes all either way. */
static bool mpti_loader_deals_records(const mpt_loader *ld) {
    return ld->desc.num_lanes > 1 &&
           ld->num_files < (int64_t)MPTI_WHOLE_FILES_PER_LANE * ld->desc.num_lanes;
}

static mpt_tfrecord_desc mpti_loader_file_desc(const mpt_loader *ld, int file) {
    mpt_tfrecord_desc d;

    memset(&d, 0, sizeof d);
    d.path = ld->files[file];
    d.io = ld->desc.io;
    d.max_record_bytes = ld->desc.max_record_bytes;
    d.skip_crc = ld->desc.skip_crc;
    return d;
}

/* The .idx beside a file. MPT_END: none, or one that doesn't fit, which is said and passed over. */
static mpt_result mpti_loader_load_idx(mpt_loader *ld, int file, mpt_tfrecord_index **out,
                                       mpt_error *err) {
    mpt_tfrecord_desc d = mpti_loader_file_desc(ld, file);
    mpt_result rc = mpti_index_load(&ld->allocator, &d, err, out);

    if (rc == MPT_ERR_CORRUPT_DATA) mpti_log(ld->ctx, MPT_LOG_WARNING, err->message);
    return rc == MPT_OK || rc == MPT_ERR_OUT_OF_MEMORY ? rc : MPT_END;
}

/* Sets counts[file], and keeps the index itself if records are dealt by it. */
static mpt_result mpti_loader_index_file(mpt_loader *ld, int file, bool scan, mpt_error *err) {
    mpt_tfrecord_desc d = mpti_loader_file_desc(ld, file);
    mpt_tfrecord_index *index = NULL;
    mpt_count_source source = MPT_COUNT_INDEX;
    mpt_result rc = mpti_loader_load_idx(ld, file, &index, err);

    if (rc == MPT_END && scan) {
        source = MPT_COUNT_HEADERS;
        rc = mpti_index_build(&ld->allocator, &d, err, &index);
        /* Compressed or damaged: each lane reads it through and keeps its share; what is wrong with
           it comes up when the reader gets there, after the records before it. */
        if (rc == MPT_ERR_UNSUPPORTED || rc == MPT_ERR_CORRUPT_DATA) rc = MPT_END;
    }
    if (rc < 0) return rc;
    ld->counts[file] = index ? index->num_records : -1;
    if (index && source > ld->num_records_source) ld->num_records_source = source;
    if (index && mpti_loader_deals_records(ld) && ld->desc.io->seek) ld->indexes[file] = index;
    else mpti_index_destroy(&ld->allocator, index);
    return MPT_OK;
}

/* shardLengths of one split of dataset_info.json (TFDS) into lengths. Returns how many. */
static int mpti_read_shard_lengths(mpti_json *j, int64_t *lengths, int capacity, char *split,
                                   size_t split_size) {
    char key[64];
    int n = 0;

    split[0] = 0;
    mpti_json_object(j);
    while (mpti_json_key(j, key, sizeof key)) {
        if (!strcmp(key, "name")) {
            mpti_json_string(j, split, split_size);
        } else if (!strcmp(key, "shardLengths")) {
            int64_t length;
            mpti_json_array(j);
            while (mpti_json_item(j) && mpti_json_int64(j, &length)) {
                if (n < capacity) lengths[n] = length;
                n++;
            }
        } else {
            mpti_json_skip(j);
        }
    }
    return n;
}

/* Counts for the files of one split: ".../name-SPLIT.tfrecord-00003-of-00008" with 8 lengths. */
static void mpti_apply_shard_lengths(mpt_loader *ld, const char *split, const int64_t *lengths,
                                     int n) {
    int i, prefix, number, total;
    char marker[80];

    snprintf(marker, sizeof marker, "-%s.", split);
    for (i = 0; i < ld->num_files; i++) {
        const char *name = mpti_base_name(ld->files[i]);
        if (mpti_parse_shard_name(ld->files[i], &prefix, &number, &total) && total == n &&
            number < n && strstr(name, marker) && lengths[number] >= 0 &&
            lengths[number] < MPTI_MAX_RECORDS)
            ld->counts[i] = lengths[number];
    }
}

/* TFDS keeps dataset_info.json beside the shards. Whatever is odd in it: it is passed over. */
static mpt_result mpti_loader_read_dataset_info(mpt_loader *ld, mpt_error *err) {
    const char *first = ld->files[0], *slash = strrchr(first, '/');
    char path[PATH_MAX], key[64], split[64];
    mpti_buffer text;
    mpti_json j;
    int64_t *lengths = NULL;
    mpt_result rc;
    int n;

    memset(&text, 0, sizeof text);
    text.allocator = &ld->allocator;
    n = snprintf(path, sizeof path, "%.*sdataset_info.json", slash ? (int)(slash - first + 1) : 0,
                 first);
    if (n < 0 || (size_t)n >= sizeof path) return MPT_OK;
    rc = mpti_file_load(ld->desc.io, path, 16u << 20, err, &text);
    if (rc) goto done;
    lengths = (int64_t *)mpti_calloc(&ld->allocator, (size_t)ld->num_files, sizeof *lengths);
    if (!lengths) rc = MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "no memory for the shard lengths");
    if (!lengths) goto done;
    memset(&j, 0, sizeof j);
    j.p = (const char *)text.data;
    j.end = j.p + text.size;
    mpti_json_object(&j);
    while (mpti_json_key(&j, key, sizeof key)) {
        if (strcmp(key, "splits") != 0) {
            mpti_json_skip(&j);
            continue;
        }
        mpti_json_array(&j);
        while (mpti_json_item(&j)) {
            n = mpti_read_shard_lengths(&j, lengths, ld->num_files, split, sizeof split);
            if (!j.bad && n <= ld->num_files) mpti_apply_shard_lengths(ld, split, lengths, n);
        }
    }
done:
    mpti_free(&ld->allocator, lengths, sizeof *lengths * (size_t)ld->num_files);
    mpti_buffer_free(&text);
    return rc == MPT_ERR_OUT_OF_MEMORY ? rc : MPT_OK;
}

static bool mpti_loader_sum_counts(const mpt_loader *ld,
                                   int64_t *sum) { /* false: not all are known */
    int i;

    *sum = 0;
    for (i = 0; i < ld->num_files; i++) {
        if (ld->counts[i] < 0) return false;
        *sum += ld->counts[i];
    }
    return true;
}

/* Bytes of all files, from at most 64 of them, spread evenly, since opening 16,000 objects of a
   bucket takes minutes; -1 if unknown. Also the record size in the first file that has one. */
static mpt_result mpti_loader_measure(mpt_loader *ld, int64_t *bytes, mpt_error *err) {
    int sampled = ld->num_files < 64 ? ld->num_files : 64, i;
    double sum = 0;

    for (i = 0; i < sampled; i++) {
        int file = (int)((int64_t)i * ld->num_files / sampled);
        int64_t size;
        mpt_result rc = mpti_file_size(ld->desc.io, ld->files[file], err, &size);
        if (rc) return rc;
        if (size < 0) sum = -1;
        if (sum >= 0) sum += (double)size;
    }
    *bytes = sum < 0 ? -1 : (int64_t)(sum / sampled * ld->num_files);
    return MPT_OK;
}

static mpt_result mpti_loader_count(mpt_loader *ld, int64_t record_bytes, mpt_error *err) {
    const int64_t scan_limit = 256
                               << 20; /* bytes whose headers are walked in well under a second */
    int64_t bytes = 0, sum;
    bool scan = mpti_loader_deals_records(ld);
    mpt_result rc;
    int i;

    rc = mpti_loader_measure(ld, &bytes, err);
    if (rc) return rc;
    if (!scan) {
        rc = mpti_loader_read_dataset_info(ld, err);
        if (rc) return rc;
        if (mpti_loader_sum_counts(ld, &sum)) ld->num_records_source = MPT_COUNT_DATASET_INFO;
        scan = !mpti_loader_sum_counts(ld, &sum) && ld->num_files <= 64 && bytes >= 0 &&
               bytes <= scan_limit;
    }
    for (i = 0; i < ld->num_files && (scan || ld->num_files <= MPTI_MAX_INDEX_FILES); i++) {
        if (ld->counts[i] >= 0) continue;
        rc = mpti_loader_index_file(ld, i, scan, err);
        if (rc) return rc;
        if (!scan && ld->counts[i] < 0) break; /* one without .idx: the rest needn't be asked */
    }
    if (ld->desc.num_records > 0) {
        ld->num_records = ld->desc.num_records;
        ld->num_records_source = MPT_COUNT_GIVEN;
    } else if (mpti_loader_sum_counts(ld, &sum)) {
        ld->num_records = sum;
    } else {
        ld->num_records_source = MPT_COUNT_ESTIMATE;
        ld->num_records = bytes > 0 && record_bytes > 0 ? (bytes + record_bytes / 2) / record_bytes
                                                        : 0;
    }
    return MPT_OK;
}

/* ---- which keys ---------------------------------------------------------------------------------
   ImageNet's TFRecords (TF-slim, the TPU scripts) call them image/encoded and image/class/label
   with labels from 1, TFDS calls them image and label with labels from 0. */
static mpt_result mpti_loader_set_keys(mpt_loader *ld, const char *image_key, const char *label_key,
                                       mpt_error *err) {
    ld->image_key = mpti_strdup(&ld->allocator, image_key);
    ld->label_key = mpti_strdup(&ld->allocator, label_key);
    if (!ld->image_key || !ld->label_key)
        return MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "no memory for the keys");
    ld->label_offset = ld->desc.label_offset;
    if (!ld->desc.label_offset_is_set)
        ld->label_offset = strcmp(label_key, "image/class/label") == 0;
    return MPT_OK;
}

static void mpti_loader_guess_keys(mpt_bytes example, const char **image_key,
                                   const char **label_key) {
    static const char *const names[2] = {"image/encoded", "image/class/label"};
    mpt_feature found[2];

    if (mpti_example_scan(example, names, 2, found, NULL) != MPT_OK) return;
    if (!*image_key) *image_key = found[0].name.data ? names[0] : "image";
    if (!*label_key) *label_key = found[1].name.data ? names[1] : "label";
}

static mpt_result mpti_loader_first_record(mpt_loader *ld, int file, int64_t *record_bytes,
                                           const char *keys[2], mpt_error *err) {
    mpt_tfrecord_desc d = mpti_loader_file_desc(ld, file);
    mpt_tfrecord *f = NULL;
    mpti_record record;
    mpt_result rc = mpti_tfrecord_open(&ld->allocator, &d, err, &f);

    if (rc == MPT_OK && ld->desc.io == mpt_io_files() && f->file.size < 0)
        rc = MPTI_FAIL(err, MPT_ERR_UNSUPPORTED,
                       "%s: a pipe or device can't be read again for the next epoch: give files",
                       mpti_path_tail(ld->files[file]));
    if (rc == MPT_OK) rc = mpti_tfrecord_read(f, err, &record);
    if (rc == MPT_OK) {
        *record_bytes = (int64_t)record.payload.size + MPTI_FRAME_BYTES;
        mpti_loader_guess_keys(record.payload, &keys[0], &keys[1]);
    }
    mpt_tfrecord_close(f);
    return rc;
}

/* Looks at the first record of the first file that has a readable one. What is damaged comes up
   again when its turn comes; only storage that fails ends the search. */
static mpt_result mpti_loader_find_schema(mpt_loader *ld, int64_t *record_bytes, mpt_error *err) {
    const char *keys[2];
    bool damaged = false;
    mpt_result rc = MPT_END;
    mpt_error error;
    int i;

    keys[0] = ld->desc.image_key;
    keys[1] = ld->desc.label_key;
    *record_bytes = 0;
    for (i = 0; i < ld->num_files && rc != MPT_OK; i++) {
        rc = mpti_loader_first_record(ld, i, record_bytes, keys, &error);
        if (rc < 0 && (rc != MPT_ERR_CORRUPT_DATA || !damaged)) *err = error;
        if (rc < 0 && rc != MPT_ERR_CORRUPT_DATA) return rc;
        damaged |= rc == MPT_ERR_CORRUPT_DATA;
    }
    if (rc != MPT_OK && damaged && ld->desc.on_bad_record == MPT_BAD_RECORD_FAIL)
        return MPT_ERR_CORRUPT_DATA;
    if (rc != MPT_OK && !damaged)
        return MPTI_FAIL(err, MPT_ERR_CORRUPT_DATA,
                         "no record in any of %d files (the first is %s): wrong path?",
                         ld->num_files, mpti_path_tail(ld->files[0]));
    return mpti_loader_set_keys(ld, keys[0] ? keys[0] : "image/encoded",
                                keys[1] ? keys[1] : "image/class/label", err);
}

/* ---- dealing files or records to lanes ------------------------------------------------------- */

/* Where share number i begins when n things are cut into `shares` runs of equal length (+-1). */
static int64_t mpti_share_begin(int64_t n, int64_t shares, int64_t i) {
    int64_t rest = n % shares;
    return n / shares * i + (i < rest ? i : rest);
}

/* A whole file; the caller may narrow it. */
static mpti_segment *mpti_lane_add_segment(mpti_lane *lane, int file) {
    mpti_segment *segment = &lane->segments[lane->num_segments++];

    memset(segment, 0, sizeof *segment);
    segment->file = file;
    segment->count = -1;
    segment->stride = 1;
    return segment;
}

static void mpti_loader_deal_files(const mpt_loader *ld, mpti_lane *lane, const int *order) {
    int i;

    for (i = lane->number; i < ld->num_files; i += ld->desc.num_lanes)
        mpti_lane_add_segment(lane, order[i]);
}

/* A lane's run out of the concatenation of all indexed files; of a file without an index
   (compressed, damaged, or unseekable) every num_lanes-th record, begun elsewhere in each. */
static void mpti_loader_deal_records(const mpt_loader *ld, mpti_lane *lane, const int *order) {
    int64_t total = 0, begin, end, at = 0;
    int lanes = ld->desc.num_lanes, i;

    for (i = 0; i < ld->num_files; i++)
        if (ld->desc.array_images || ld->indexes[i]) total += ld->counts[i];
    begin = mpti_share_begin(total, lanes, lane->number);
    end = mpti_share_begin(total, lanes, lane->number + 1);
    for (i = 0; i < ld->num_files; i++) {
        const mpt_tfrecord_index *index = ld->indexes[order[i]];
        int64_t count = ld->counts[order[i]], first = begin > at ? begin - at : 0, last;
        mpti_segment *segment;
        if (!ld->desc.array_images && !index) {
            segment = mpti_lane_add_segment(lane, order[i]);
            segment->stride = lanes;
            segment->phase = (lane->number + lanes - i % lanes) % lanes;
            continue;
        }
        last = end - at < count ? end - at : count;
        at += count;
        if (first >= last) continue;
        segment = mpti_lane_add_segment(lane, order[i]);
        segment->first = first;
        segment->count = last - first;
        segment->offset = index ? index->offsets[first] : (uint64_t)first;
        segment->end = index ? index->offsets[last] : (uint64_t)last;
    }
}

/* Records of the longest lane of all ranks in the epoch that `order` makes. */
static int64_t mpti_loader_longest_lane(const mpt_loader *ld, const int *order) {
    int64_t lanes = ld->desc.num_lanes, longest = 0, sum, lane, i;
    bool known = mpti_loader_sum_counts(ld, &sum);

    if (!known) sum = ld->num_records;
    if (!known || lanes == 1 || mpti_loader_deals_records(ld)) return (sum + lanes - 1) / lanes;
    for (lane = 0; lane < lanes; lane++) {
        int64_t n = 0;
        for (i = lane; i < ld->num_files; i += lanes) n += ld->counts[order[i]];
        if (n > longest) longest = n;
    }
    return longest;
}

static int64_t mpti_loader_count_steps(const mpt_loader *ld, const int *order) {
    int64_t longest = mpti_loader_longest_lane(ld, order), batch = ld->desc.batch_size;

    int64_t sum;

    /* measured, unless the longest lane is another one in each epoch */
    if (ld->num_records_source == MPT_COUNT_EPOCH &&
        (ld->desc.num_lanes == 1 || mpti_loader_deals_records(ld) ||
         !mpti_loader_sum_counts(ld, &sum)))
        return ld->steps_per_epoch;
    return ld->desc.last_batch == MPT_LAST_BATCH_DROP ? longest / batch
                                                      : (longest + batch - 1) / batch;
}

/* The plan of an epoch: a function of (seed, epoch) and the files, the same on every rank. */
static mpt_result mpti_loader_deal(mpt_loader *ld, mpt_error *err) {
    int *order = (int *)mpti_alloc(&ld->allocator, sizeof *order * (size_t)ld->num_files);
    int i;

    if (!order)
        return MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "no memory for the order of the files");
    for (i = 0; i < ld->num_files; i++) order[i] = i;
    for (i = ld->num_files - 1; i > 0 && !ld->desc.no_shuffle; i--) { /* Fisher-Yates */
        uint32_t random[4];
        int j, swap;
        mpti_random4(ld->desc.seed, ld->epoch, (uint64_t)i, 0, MPTI_RANDOM_FILES, random);
        j = (int)mpti_below(random[0], (uint32_t)i + 1);
        swap = order[i];
        order[i] = order[j];
        order[j] = swap;
    }
    for (i = 0; i < ld->num_lanes; i++) {
        ld->lanes[i].num_segments = 0;
        if (ld->desc.array_images || mpti_loader_deals_records(ld))
            mpti_loader_deal_records(ld, &ld->lanes[i], order);
        else mpti_loader_deal_files(ld, &ld->lanes[i], order);
    }
    ld->steps_per_epoch = mpti_loader_count_steps(ld, order);
    mpti_free(&ld->allocator, order, sizeof *order * (size_t)ld->num_files);
    return MPT_OK;
}

/* =================================================================================================
 * >>loader   3.3 Loading: from segments to batches
 * =================================================================================================
 * Problem: decoding is slow and storage is late, so many threads must work ahead, and none of this
 *          may show in what comes out; one bad picture may not stop a run in silence, nor shift a
 *          batch.
 * Idea:    workers take whatever job is ready, but each arrow below keeps an order that depends on
 *          seed and epoch alone. So their number changes the speed and nothing else.
 * Shapes:  segments -> records -> samples (height, width, channels) U8 -> batches (N, H, W, C) of
 *          dtype
 * Tested:  tests/test_loader.c
 * Next:    >>position, which saves where a loader stands.
 */

/* The way of a record:

     files --deal--> segments of a lane --interleave--> streams --merge--> shuffle buffer
                                                           |                    |
                       worker: read, check (in parallel)---+                    v
     batch <--collate (normalise)-- samples in lane order <--worker: decode, crop-- dealt records

   Each arrow keeps an order that depends on seed and epoch alone: a stream keeps the order of its
   file, the merge takes from the streams in turn and waits for the one whose turn it is, the
   shuffle draws by a counter, and samples stay in the order in which they were dealt. Workers take
   whatever job is ready; so their number changes the speed and nothing else.  */

/* ---- streams: a worker reads ahead ----------------------------------------------------------- */
static void mpti_stream_reset(const mpt_allocator *a, mpti_stream *s) {
    mpt_tfrecord_close(s->reader);
    for (; s->count > 0; s->count--) {
        mpti_item_drop(a, &s->queue[s->head]);
        s->head = (s->head + 1) % MPTI_STREAM_RECORDS;
    }
    memset(s, 0, sizeof *s);
    s->segment = -1;
}

static void mpti_stream_begin(mpti_lane *lane, mpti_stream *s, int segment) {
    s->segment = segment;
    s->read_next = s->take_next = lane->segments[segment].first;
    s->read_offset = s->take_offset = lane->segments[segment].offset;
    s->ended = false;
}

/* Compressed files, and storage that can't seek, are read from the front. */
static bool mpti_loader_seeks(const mpt_loader *ld, const mpt_tfrecord *reader) {
    return ld->desc.io->seek && mpt_tfrecord_compression(reader) == MPT_COMPRESSION_NONE;
}

static mpt_result mpti_stream_open(mpt_loader *ld, const mpti_segment *segment, mpti_stream *s,
                                   mpt_error *err) {
    mpt_tfrecord_desc d = mpti_loader_file_desc(ld, segment->file);
    mpt_result rc = mpti_tfrecord_open(&ld->allocator, &d, err, &s->reader);
    mpti_record record;
    int64_t skipped = 0;

    if (rc || s->read_next == 0) return rc;
    if (mpti_loader_seeks(ld, s->reader))
        return mpti_tfrecord_seek(s->reader, err, s->read_next, s->read_offset);
    while (rc == MPT_OK && skipped < s->read_next) { /* otherwise it is read from its start */
        rc = mpti_tfrecord_read(s->reader, err, &record);
        if (rc == MPT_OK || mpti_tfrecord_can_resume(s->reader)) {
            skipped++;
            rc = MPT_OK;
        }
    }
    return rc;
}

/* The next record of the file, whichever lane it belongs to. *resume: after a failure, the one
   behind it can be read. */
static mpt_result mpti_stream_advance(mpt_loader *ld, const mpti_segment *segment, mpti_stream *s,
                                      mpti_item *item, mpti_record *record, mpt_error *err,
                                      bool *resume) {
    mpt_result rc = MPT_OK;

    *resume = false;
    item->record = s->read_next;
    item->offset = s->read_offset;
    if (!s->reader) rc = mpti_stream_open(ld, segment, s, err);
    if (rc == MPT_OK) {
        rc = mpti_tfrecord_read(s->reader, err, record);
        if (rc == MPT_END) return MPT_END;
        *resume = mpti_tfrecord_can_resume(s->reader);
        item->offset = mpt_tfrecord_tell(s->reader).offset;
        item->end = item->offset + mpt_tfrecord_tell(s->reader).size + MPTI_FRAME_BYTES;
        s->read_offset = item->end;
    }
    s->read_next++;
    return rc;
}

/* Reads one item of a segment. MPT_OK: there is one, perhaps bad; MPT_END: the segment is read. */
static mpt_result mpti_stream_read(mpt_loader *ld, const mpti_segment *segment, mpti_stream *s,
                                   mpti_item *item) {
    bool skip_file = ld->desc.on_bad_record == MPT_BAD_RECORD_SKIP_FILE;
    bool resume = false, ours = true;
    const char *path = mpti_path_tail(ld->files[segment->file]);
    mpti_record record;
    mpt_error error;
    mpt_result rc;

    memset(item, 0, sizeof *item);
    item->file = segment->file;
    do {
        if (segment->count >= 0 && s->read_next >= segment->first + segment->count) {
            if (s->read_offset == segment->end) return MPT_END;
            item->record = s->read_next;
            item->offset = s->read_offset;
            rc = MPTI_FAIL(&error, MPT_ERR_CORRUPT_DATA,
                           "%s: record %lld is not where its index has it: make the index anew",
                           path, (long long)s->read_next);
            break;
        }
        rc = mpti_stream_advance(ld, segment, s, item, &record, &error, &resume);
        if (rc == MPT_END && segment->count < 0) return MPT_END;
        if (rc == MPT_END)
            rc = MPTI_FAIL(&error, MPT_ERR_CORRUPT_DATA,
                           "%s: ends before record %lld, which its index has: has it changed?",
                           path, (long long)s->read_next);
        ours = item->record % segment->stride == segment->phase;
        /* what is wrong with a record is told by the lane that owns it, but ends all */
        if (rc == MPT_ERR_CORRUPT_DATA && !ours && (!resume || skip_file)) return MPT_END;
    } while ((rc == MPT_OK || resume) && !ours);
    if (rc == MPT_OK) {
        item->payload = record.payload;
        item->block = record.block;
        mpti_block_retain(item->block);
        return MPT_OK;
    }
    if (!mpti_item_fail(&ld->allocator, item, &error)) return MPT_ERR_OUT_OF_MEMORY;
    item->bad->rest_of_file = !resume || skip_file;
    return MPT_OK;
}

static mpt_result mpti_array_read(const mpt_loader *ld, const mpti_segment *segment, mpti_stream *s,
                                  mpti_item *item) {
    const mpt_tensor *x = ld->desc.array_images;
    size_t size = (size_t)(x->dims[1] * x->dims[2] * x->dims[3]);

    if (s->read_next >= segment->first + segment->count) return MPT_END;
    memset(item, 0, sizeof *item);
    item->record = s->read_next;
    item->offset = (uint64_t)s->read_next;
    item->end = item->offset + 1;
    item->payload.data = (const uint8_t *)x->data + size * (size_t)s->read_next;
    item->payload.size = size;
    s->read_next++;
    return MPT_OK;
}

/* One read-ahead, without the lock: the stream is marked busy. Returns how many items came. */
static int mpti_stream_fill(mpt_loader *ld, const mpti_segment *segment, mpti_stream *s,
                            int capacity, mpti_item *items, bool *ended, bool *out_of_memory) {
    size_t bytes = 0;
    mpt_result rc = MPT_OK;
    int n = 0;

    while (n < capacity && bytes < MPTI_STREAM_BYTES && !*ended) {
        rc = ld->desc.array_images ? mpti_array_read(ld, segment, s, &items[n])
                                   : mpti_stream_read(ld, segment, s, &items[n]);
        if (rc != MPT_OK) break;
        bytes += items[n].payload.size;
        *ended = items[n].bad && items[n].bad->rest_of_file;
        n++;
    }
    if (rc == MPT_END) *ended = true;
    if (rc < 0) *out_of_memory = true;
    if (*ended) {
        mpt_tfrecord_close(s->reader);
        s->reader = NULL;
    }
    return n;
}

/* ---- merge, shuffle, deal: pointers move, under the lock ------------------------------------- */

/* The stream at s is at its end: the waiting one takes its place, and the next segment waits. */
static bool mpti_lane_replace_stream(mpt_loader *ld, mpti_lane *lane, int place) {
    int waiting = ld->desc.interleave;
    mpti_stream *old = &lane->streams[lane->order[place]];
    int swap = lane->order[place];

    if (lane->streams[lane->order[waiting]].segment < 0) return false;
    lane->order[place] = lane->order[waiting];
    lane->order[waiting] = swap;
    mpti_stream_reset(&ld->allocator, old);
    if (lane->next_segment < lane->num_segments) mpti_stream_begin(lane, old, lane->next_segment++);
    return true;
}

/* The next record of the lane before shuffling. 1: it is in *out; 0: a worker has to read first;
   -1: there is none. */
static int mpti_lane_take(mpt_loader *ld, mpti_lane *lane, mpti_item *out) {
    int empty = 0;

    while (empty < ld->desc.interleave) {
        mpti_stream *s = &lane->streams[lane->order[lane->turn]];
        if (s->count > 0) {
            *out = s->queue[s->head];
            s->head = (s->head + 1) % MPTI_STREAM_RECORDS;
            s->count--;
            s->bytes -= out->payload.size;
            s->take_next = out->record + 1;
            s->take_offset = out->end;
            lane->turn = (lane->turn + 1) % ld->desc.interleave;
            return 1;
        }
        if (s->segment >= 0 && !s->ended) return 0;
        if (mpti_lane_replace_stream(ld, lane, lane->turn)) continue;
        lane->turn = (lane->turn + 1) % ld->desc.interleave;
        empty++;
    }
    return -1;
}

static mpti_sample *mpti_lane_sample(mpti_lane *lane, int64_t number) {
    return &lane->samples[number % lane->ring];
}

/* Bad records hold a place in the ring but no pixels, so many of them in a row can fill it. */
static bool mpti_lane_grow_ring(mpt_loader *ld, mpti_lane *lane) {
    bool ok = true;
    mpti_sample *bigger = (mpti_sample *)mpti_loader_array(ld, lane->ring * 2, sizeof *bigger, &ok);
    int64_t i;

    for (i = lane->delivered; i < lane->dealt && ok; i++)
        bigger[i % (lane->ring * 2)] = *mpti_lane_sample(lane, i);
    if (!ok) return false;
    lane->samples = bigger;
    lane->ring *= 2;
    return true;
}

/* Samples become resolved in lane order, whenever their decoding ends. */
static void mpti_lane_resolve(mpt_loader *ld, mpti_lane *lane) {
    while (lane->resolved < lane->dealt && !lane->broken) {
        mpti_sample *sample = mpti_lane_sample(lane, lane->resolved);
        if (sample->state != MPTI_SAMPLE_READY) return;
        lane->resolved++;
        if (!sample->item.bad) {
            lane->num_ready++;
            lane->num_usable++;
            continue;
        }
        if (ld->desc.on_bad_record == MPT_BAD_RECORD_FAIL ||
            ++lane->num_bad > ld->desc.max_bad_records)
            sample->item.bad->fatal = true;
        lane->broken = sample->item.bad->fatal;
    }
}

static bool mpti_lane_deal_item(mpt_loader *ld, mpti_lane *lane, const mpti_item *item) {
    mpti_sample *sample;

    if (lane->dealt - lane->delivered == lane->ring && !mpti_lane_grow_ring(ld, lane)) return false;
    MPT_ASSERT(item->bad || lane->num_free > 0);
    sample = mpti_lane_sample(lane, lane->dealt);
    sample->item = *item;
    sample->label = -1;
    sample->pixels = item->bad ? NULL : lane->free_pixels[--lane->num_free];
    sample->state = item->bad ? MPTI_SAMPLE_READY : MPTI_SAMPLE_DEALT;
    lane->dealt++;
    return true;
}

/* Deals as much as there is room for: keep the shuffle buffer full, draw one, fill its place. */
static void mpti_lane_deal(mpt_loader *ld, mpti_lane *lane) {
    while (!lane->finished && !lane->broken && lane->num_free > 0 && !ld->out_of_memory) {
        uint32_t random[4] = {0, 0, 0, 0};
        int k;

        if (lane->next_pending < lane->num_pending) {
            mpti_item *item = &lane->pending[lane->next_pending];
            if (!mpti_lane_deal_item(ld, lane, item)) {
                ld->out_of_memory = true;
                return;
            }
            memset(item, 0, sizeof *item);
            lane->next_pending++;
            continue;
        }
        while (!lane->drained && lane->shuffle_count < ld->desc.shuffle_buffer) {
            int got = mpti_lane_take(ld, lane, &lane->shuffle[lane->shuffle_count]);
            if (got == 0) return;
            if (got > 0) lane->shuffle_count++;
            else lane->drained = true;
        }
        if (lane->shuffle_count == 0) {
            lane->finished = true;
            break;
        }
        if (!ld->desc.no_shuffle)
            mpti_random4(ld->desc.seed, ld->epoch, lane->draws, (uint32_t)lane->number,
                         MPTI_RANDOM_SHUFFLE, random);
        k = (int)mpti_below(random[0], (uint32_t)lane->shuffle_count);
        if (!mpti_lane_deal_item(ld, lane, &lane->shuffle[k])) {
            ld->out_of_memory = true;
            return;
        }
        lane->draws++;
        lane->shuffle[k] = lane->shuffle[--lane->shuffle_count];
    }
    mpti_lane_resolve(ld, lane);
}

/* ---- decoding: from a record to pixels and a label ------------------------------------------- */

/* "PATH: record 17 at offset 123: " in front of what went wrong. */
static mpt_result mpti_item_error(const mpt_loader *ld, const mpti_item *item, mpt_result rc,
                                  mpt_error *err) {
    char cause[sizeof err->message];

    memcpy(cause, err->message, sizeof cause);
    if (ld->desc.array_images)
        return MPTI_FAIL(err, rc, "array element %lld: %s", (long long)item->record, cause);
    return MPTI_FAIL(err, rc, "%s: record %lld at offset %llu: %s",
                     mpti_path_tail(ld->files[item->file]), (long long)item->record,
                     (unsigned long long)item->offset, cause);
}

/* The names that are there, for whoever misspelled one. */
static void mpti_list_features(mpt_bytes example, char *out, size_t capacity) {
    size_t cursor = 0, used = 0;
    mpt_feature f;

    out[0] = 0;
    while (mpt_example_next(example, &cursor, &f) == MPT_OK && used + 8 < capacity) {
        int length = f.name.size < 64 ? (int)f.name.size : 64;
        int n = snprintf(out + used, capacity - used, "%s%.*s", used ? ", " : "", length,
                         (const char *)f.name.data);
        if (n < 0) return;
        used += (size_t)n;
    }
    if (!out[0]) snprintf(out, capacity, "none");
}

static mpt_result mpti_feature_require(mpt_bytes example, const char *key, const mpt_feature *f,
                                       mpt_feature_kind kind, mpt_error *err) {
    char names[200];

    if (f->kind != MPT_FEATURE_NONE && f->kind != kind)
        return MPTI_FAIL(err, MPT_ERR_CORRUPT_DATA, "feature %s is of kind %s, expected %s", key,
                         mpt_feature_kind_string(f->kind), mpt_feature_kind_string(kind));
    if (f->kind == kind && f->count == 1) return MPT_OK;
    if (f->count > 1)
        return MPTI_FAIL(err, MPT_ERR_CORRUPT_DATA, "feature %s has %lld values, expected one", key,
                         (long long)f->count);
    if (f->name.data) return MPTI_FAIL(err, MPT_ERR_CORRUPT_DATA, "feature %s has no value", key);
    mpti_list_features(example, names, sizeof names);
    return MPTI_FAIL(err, MPT_ERR_CORRUPT_DATA,
                     "no feature %s; there are: %s. Set image_key and label_key", key, names);
}

/* Not one of the errors that a policy skips: labels that don't fit mean a wrong offset or a wrong
   number of classes, and skipping them would drop whole classes in silence. */
static mpt_result mpti_label_check(const mpt_loader *ld, int64_t stored, int32_t *label,
                                   mpt_error *err) {
    int64_t classes = ld->desc.num_classes, offset = ld->label_offset;

    if (stored >= offset && (uint64_t)stored - (uint64_t)offset < (uint64_t)classes) {
        *label = (int32_t)(stored - offset);
        return MPT_OK;
    }
    if (stored == 0 && offset == 1)
        return MPTI_FAIL(
            err, MPT_ERR_INVALID_ARGUMENT,
            "label 0, but labels of %s were taken to run from 1: set label_offset to 0 "
                         "and label_offset_is_set",
            ld->label_key);
    if (stored == classes && offset == 0)
        return MPTI_FAIL(
            err, MPT_ERR_INVALID_ARGUMENT,
            "label %lld with %lld classes (0 .. %lld): if labels run from 1 set label_offset to 1",
            (long long)stored, (long long)classes, (long long)classes - 1);
    return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT,
                     "label %lld with label_offset %lld is outside 0 .. %lld (num_classes %lld)",
                     (long long)stored, (long long)offset, (long long)classes - 1,
                     (long long)classes);
}

static uint64_t mpti_sample_id(const mpti_item *item) {
    return (uint64_t)item->file << 40 | (uint64_t)item->record;
}

/* Inception's crop (Szegedy et al. 2015): 8..100 % of the area, aspect uniform in 3/4..4/3 as in
   TensorFlow's sample_distorted_bounding_box; what doesn't fit is drawn again, in the end the
   centre. */
static mpti_box mpti_random_box(const mpt_loader *ld, int width, int height, int64_t epoch,
                                uint64_t id) {
    uint32_t r[4];
    mpti_box box;
    int i;

    for (i = 0; i < MPTI_CROP_TRIES; i++) {
        double area, aspect;
        mpti_random4(ld->desc.seed, epoch, id, (uint32_t)i + 1, MPTI_RANDOM_AUGMENT, r);
        area = (double)width * height * (0.08 + 0.92 * mpti_uniform(r[0]));
        aspect = 0.75 + (4.0 / 3.0 - 0.75) * mpti_uniform(r[1]);
        box.width = (double)(int)(sqrt(area * aspect) + 0.5);
        box.height = (double)(int)(sqrt(area / aspect) + 0.5);
        if (box.width < 1 || box.height < 1 || box.width > width || box.height > height) continue;
        box.x = (double)mpti_below(r[2], (uint32_t)(width - (int)box.width) + 1);
        box.y = (double)mpti_below(r[3], (uint32_t)(height - (int)box.height) + 1);
        return box;
    }
    return mpti_center_box(width, height, ld->desc.width, ld->desc.height, 1);
}

/* Picture of any size -> pixels (height, width, channels), augmented by numbers that depend on
   (seed, epoch, record) and nothing else. */
static mpt_result mpti_loader_fit(const mpt_loader *ld, const mpt_image *image, int64_t epoch,
                                  uint64_t id, uint8_t *pixels, mpt_error *err) {
    const mpt_loader_desc *d = &ld->desc;
    mpti_box box = mpti_center_box(image->width, image->height, d->width, d->height,
                                   (double)d->center_fraction);
    uint32_t random[4];
    uint8_t *whole;
    bool flip;
    mpt_result rc;

    mpti_random4(d->seed, epoch, id, 0, MPTI_RANDOM_AUGMENT, random);
    flip = d->augment != MPT_AUGMENT_NONE && (random[0] & 1);
    if (d->augment == MPT_AUGMENT_IMAGENET)
        box = mpti_random_box(ld, image->width, image->height, epoch, id);
    if (d->augment != MPT_AUGMENT_CROP_FLIP)
        return mpti_image_resample(&ld->allocator, image, &box, d->width, d->height, flip, pixels,
                                   err);
    whole = (uint8_t *)mpti_alloc(&ld->allocator, ld->sample_bytes);
    if (!whole) return MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "no memory for a picture");
    rc = mpti_image_resample(&ld->allocator, image, &box, d->width, d->height, false, whole, err);
    if (rc == MPT_OK) {
        int range = 2 * d->crop_padding + 1;
        int dx = (int)mpti_below(random[1], (uint32_t)range) - d->crop_padding;
        int dy = (int)mpti_below(random[2], (uint32_t)range) - d->crop_padding;
        mpti_shift_picture(whole, d->height, d->width, d->channels, dx, dy, flip, pixels);
    }
    mpti_free(&ld->allocator, whole, ld->sample_bytes);
    return rc;
}

/* "image/encoded: a GIF picture: convert it ...", with the hint at raw pixels where that fits. */
static void mpti_image_blame(const mpt_loader *ld, mpt_bytes bytes, mpt_result rc, mpt_error *err) {
    char cause[sizeof err->message];

    mpti_image_hint_raw(bytes, ld->desc.height, ld->desc.width, ld->desc.channels, err);
    memcpy(cause, err->message, sizeof cause);
    MPTI_FAIL(err, rc, "%s: %s", ld->image_key, cause);
}

static mpt_result mpti_loader_decode_picture(const mpt_loader *ld, mpt_bytes bytes, int64_t epoch,
                                             uint64_t id, uint8_t *pixels, mpt_error *err) {
    mpt_image image;
    mpt_result rc;

    memset(&image, 0, sizeof image);
    if (ld->desc.raw_pixels || ld->desc.array_images) {
        const mpt_tensor *x = ld->desc.array_images;
        image.height = x ? (int32_t)x->dims[1] : ld->desc.height;
        image.width = x ? (int32_t)x->dims[2] : ld->desc.width;
        image.channels = ld->desc.channels;
        image.pixels = (uint8_t *)(uintptr_t)bytes.data; /* only read */
        if (!x && bytes.size != ld->sample_bytes)
            return MPTI_FAIL(err, MPT_ERR_CORRUPT_DATA,
                             "feature %s has %zu bytes, raw pixels %d x %d x %d need %zu",
                             ld->image_key, bytes.size, ld->desc.height, ld->desc.width,
                             ld->desc.channels, ld->sample_bytes);
        return mpti_loader_fit(ld, &image, epoch, id, pixels, err);
    }
    rc = mpti_image_decode(&ld->allocator, bytes, &ld->image, err, &image);
    if (rc == MPT_OK) rc = mpti_loader_fit(ld, &image, epoch, id, pixels, err);
    else mpti_image_blame(ld, bytes, rc, err);
    mpti_image_free(&ld->allocator, &image);
    return rc;
}

static mpt_result mpti_loader_decode_example(const mpt_loader *ld, const mpti_item *item,
                                             int64_t epoch, uint8_t *pixels, int32_t *label,
                                             mpt_error *err) {
    const char *names[2];
    mpt_feature found[2];
    mpti_parse_error parse;
    mpt_bytes bytes;
    int64_t stored;
    mpt_result rc;

    names[0] = ld->image_key;
    names[1] = ld->label_key;
    if (mpti_example_scan(item->payload, names, 2, found, &parse) != MPT_OK)
        return MPTI_FAIL(err, MPT_ERR_CORRUPT_DATA, "no tf.Example: %s at byte %zu", parse.cause,
                         parse.offset);
    rc = mpti_feature_require(item->payload, names[1], &found[1], MPT_FEATURE_INT64, err);
    if (rc == MPT_OK)
        rc = mpti_feature_require(item->payload, names[0], &found[0], MPT_FEATURE_BYTES, err);
    if (rc == MPT_OK) rc = mpt_feature_int64s(&found[1], 0, 1, &stored);
    if (rc == MPT_OK) rc = mpti_label_check(ld, stored, label, err);
    if (rc == MPT_OK) rc = mpt_feature_bytes(&found[0], 0, 1, &bytes);
    if (rc) return rc;
    return mpti_loader_decode_picture(ld, bytes, epoch, mpti_sample_id(item), pixels, err);
}

/* Returns false when there was no memory even to say what went wrong. */
static bool mpti_loader_decode(mpt_loader *ld, int64_t epoch, mpti_sample *sample) {
    mpti_item *item = &sample->item;
    mpt_error error;
    mpt_result rc;

    if (ld->desc.array_images) {
        const int32_t *labels = (const int32_t *)ld->desc.array_labels->data;
        rc = mpti_label_check(ld, labels[item->record], &sample->label, &error);
        if (rc == MPT_OK)
            rc = mpti_loader_decode_picture(ld, item->payload, epoch, mpti_sample_id(item),
                                            sample->pixels, &error);
    } else {
        rc = mpti_loader_decode_example(ld, item, epoch, sample->pixels, &sample->label, &error);
    }
    if (rc == MPT_OK) {
        mpti_block_release(item->block);
        item->block = NULL;
        return true;
    }
    if (rc == MPT_ERR_UNSUPPORTED)
        rc = MPT_ERR_CORRUPT_DATA; /* a GIF among JPEGs is one bad record */
    mpti_item_error(ld, item, rc, &error);
    return mpti_item_fail(&ld->allocator, item, &error);
}

/* ---- collating: samples become a lane's part of a batch -----------------------------------------

   slots of lane i:   i*B .. i*B + valid[i]-1 filled in order, the rest zero pixels and label -1 */
typedef struct mpti_gathered { /* what a slot is made of */
    uint8_t *pixels;
    int32_t label;
    uint64_t id;
} mpti_gathered;

static void mpti_loader_store_pixels(const mpt_loader *ld, const uint8_t *pixels, void *images,
                                     size_t slot) {
    size_t n = ld->sample_bytes, channels = (size_t)ld->desc.channels, i, c = 0;

    if (ld->desc.dtype == MPT_U8) {
        memcpy((uint8_t *)images + slot * n, pixels, n);
    } else if (ld->desc.dtype == MPT_F16) {
        uint16_t *out = (uint16_t *)images + slot * n;
        const uint16_t *lut = (const uint16_t *)ld->lut;
        for (i = 0; i < n; i++) {
            out[i] = lut[c * 256 + pixels[i]];
            c = c + 1 == channels ? 0 : c + 1;
        }
    } else {
        float *out = (float *)images + slot * n;
        const float *lut = (const float *)ld->lut;
        for (i = 0; i < n; i++) {
            out[i] = lut[c * 256 + pixels[i]];
            c = c + 1 == channels ? 0 : c + 1;
        }
    }
}

static void mpti_loader_clear_slot(const mpt_loader *ld, mpti_loader_batch *batch, size_t slot) {
    size_t bytes = ld->sample_bytes * mpt_dtype_size(ld->desc.dtype);

    memset((uint8_t *)batch->images + slot * bytes, 0, bytes);
    batch->labels[slot] = -1;
    batch->ids[slot] = 0;
}

/* Fills lane i's slots from n samples, without the lock. */
static void mpti_loader_fill_slots(const mpt_loader *ld, mpti_loader_batch *batch, int i,
                                   const mpti_gathered *from, int n) {
    int capacity = ld->desc.batch_size, valid = n, k;

    if (n < capacity && ld->desc.last_batch == MPT_LAST_BATCH_DROP) valid = 0;
    if (n > 0 && n < capacity && ld->desc.last_batch == MPT_LAST_BATCH_PAD) valid = capacity;
    for (k = 0; k < capacity; k++) {
        size_t slot = (size_t)i * (size_t)capacity + (size_t)k;
        if (k < valid) {
            mpti_loader_store_pixels(ld, from[k % n].pixels, batch->images, slot);
            batch->labels[slot] = from[k % n].label;
            batch->ids[slot] = from[k % n].id;
        } else {
            mpti_loader_clear_slot(ld, batch, slot);
        }
    }
    batch->valid[i] = valid;
}

/* ---- jobs: what a worker does next ----------------------------------------------------------- */
typedef enum mpti_job_kind {
    MPTI_JOB_NONE = 0,
    MPTI_JOB_FILL,
    MPTI_JOB_COLLATE,
    MPTI_JOB_DECODE
} mpti_job_kind;

typedef struct mpti_job {
    mpti_job_kind kind;
    mpti_lane *lane;
    int lane_index; /* among this rank's */
    mpti_stream *stream;
    mpti_segment segment;
    int capacity;  /* FILL: items there is room for */
    int64_t first; /* DECODE: number of the first sample */
    int count;     /* items or samples in this job */
    mpti_loader_batch *batch;
} mpti_job;

/* A worker and its scratch. */
typedef struct mpti_worker {
    mpt_loader *ld;
    mpti_item items[MPTI_STREAM_RECORDS];
    mpti_sample samples[MPTI_DECODE_GROUP];
} mpti_worker;

static bool mpti_job_fill(mpt_loader *ld, mpti_lane *lane, mpti_job *job) {
    int i;

    for (i = 0; i <= ld->desc.interleave; i++) {
        mpti_stream *s = &lane->streams[lane->order[(lane->turn + i) % (ld->desc.interleave + 1)]];
        if (s->segment < 0 || s->busy || s->ended) continue;
        if (s->count > MPTI_STREAM_RECORDS / 2 || s->bytes > MPTI_STREAM_BYTES / 2) continue;
        job->kind = MPTI_JOB_FILL;
        job->stream = s;
        job->segment = lane->segments[s->segment];
        job->capacity = MPTI_STREAM_RECORDS - s->count;
        s->busy = true;
        return true;
    }
    return false;
}

static bool mpti_job_collate(mpt_loader *ld, mpti_lane *lane, mpti_job *job) {
    bool all_resolved = lane->broken || (lane->finished && lane->resolved == lane->dealt);

    if (lane->collating || lane->next_batch >= ld->released + 2) return false;
    if (lane->num_ready < ld->desc.batch_size && !all_resolved) return false;
    job->kind = MPTI_JOB_COLLATE;
    job->batch = &ld->batches[lane->next_batch % 2];
    lane->collating = true;
    return true;
}

static bool mpti_job_decode(mpti_lane *lane, mpti_worker *worker, mpti_job *job) {
    size_t bytes = 0;

    if (lane->broken) return false;
    while (lane->decode_next < lane->dealt &&
           mpti_lane_sample(lane, lane->decode_next)->state != MPTI_SAMPLE_DEALT)
        lane->decode_next++;
    job->first = lane->decode_next;
    job->count = 0;
    while (lane->decode_next < lane->dealt && job->count < MPTI_DECODE_GROUP &&
           bytes < MPTI_DECODE_GROUP_BYTES) {
        mpti_sample *sample = mpti_lane_sample(lane, lane->decode_next);
        if (sample->state != MPTI_SAMPLE_DEALT) break;
        sample->state = MPTI_SAMPLE_DECODING;
        worker->samples[job->count++] = *sample;
        bytes += sample->item.payload.size;
        lane->decode_next++;
    }
    if (job->count == 0) return false;
    job->kind = MPTI_JOB_DECODE;
    return true;
}

/* Reading comes first: it waits for storage while other workers compute. */
static bool mpti_loader_pick_job(mpt_loader *ld, mpti_worker *worker, mpti_job *job) {
    int pass, i;

    memset(job, 0, sizeof *job);
    if (ld->paused || ld->out_of_memory) return false;
    for (pass = 0; pass < 3; pass++)
        for (i = 0; i < ld->num_lanes; i++) {
            job->lane_index = (ld->job_turn + i) % ld->num_lanes;
            job->lane = &ld->lanes[job->lane_index];
            if ((pass == 0 && mpti_job_fill(ld, job->lane, job)) ||
                (pass == 1 && mpti_job_collate(ld, job->lane, job)) ||
                (pass == 2 && mpti_job_decode(job->lane, worker, job))) {
                ld->job_turn = (job->lane_index + 1) % ld->num_lanes;
                return true;
            }
        }
    return false;
}

static void mpti_finish_fill(mpt_loader *ld, mpti_worker *worker, mpti_job *job, bool ended) {
    mpti_stream *s = job->stream;
    int i;

    for (i = 0; i < job->count; i++) {
        s->queue[(s->head + s->count) % MPTI_STREAM_RECORDS] = worker->items[i];
        s->count++;
        s->bytes += worker->items[i].payload.size;
    }
    s->busy = false;
    s->ended = ended;
    mpti_lane_deal(ld, job->lane);
}

static void mpti_finish_decode(mpt_loader *ld, mpti_worker *worker, mpti_job *job) {
    mpti_lane *lane = job->lane;
    int i;

    for (i = 0; i < job->count; i++) {
        mpti_sample *sample = mpti_lane_sample(lane, job->first + i);
        *sample = worker->samples[i];
        sample->state = MPTI_SAMPLE_READY;
        if (!sample->item.bad) continue;
        lane->free_pixels[lane->num_free++] = sample->pixels;
        sample->pixels = NULL;
    }
    mpti_lane_resolve(ld, lane);
    mpti_lane_deal(ld, lane);
}

/* Takes the next usable samples, up to a batch, and the bad ones between them. Under the lock. */
static int mpti_lane_gather(mpt_loader *ld, mpti_lane *lane, mpti_job *job) {
    mpti_bad **tail = &job->batch->bad[job->lane_index];
    int n = 0;

    while (n < ld->desc.batch_size && lane->collated < lane->resolved) {
        mpti_sample *sample = mpti_lane_sample(lane, lane->collated++);
        if (sample->item.bad) {
            *tail = sample->item.bad;
            tail = &sample->item.bad->next;
            sample->item.bad = NULL;
            continue;
        }
        lane->gathered[n].pixels = sample->pixels;
        lane->gathered[n].label = sample->label;
        lane->gathered[n].id = mpti_sample_id(&sample->item);
        n++;
    }
    lane->num_ready -= n;
    MPT_ASSERT(lane->num_ready >= 0 && lane->collated <= lane->resolved);
    return n;
}

static void mpti_finish_collate(mpt_loader *ld, mpti_job *job) {
    mpti_lane *lane = job->lane;
    mpti_loader_batch *batch = job->batch;
    int i;

    for (i = 0; i < job->count; i++) lane->free_pixels[lane->num_free++] = lane->gathered[i].pixels;
    MPT_ASSERT(lane->num_free <= lane->num_pixels);
    batch->upto[job->lane_index] = lane->collated;
    batch->lanes_done++;
    lane->collating = false;
    lane->next_batch++;
    mpti_lane_deal(ld, lane);
    if (batch->lanes_done == ld->num_lanes) mpti_cond_wake_all(&ld->done);
}

/* One job from start to end; called and left with the lock held. False: nothing to do now. */
static bool mpti_loader_run_job(mpt_loader *ld, mpti_worker *worker) {
    bool ended = false, out_of_memory = false;
    int64_t epoch = ld->epoch;
    mpti_job job;
    int i;

    if (!mpti_loader_pick_job(ld, worker, &job)) return false;
    if (job.kind == MPTI_JOB_COLLATE) job.count = mpti_lane_gather(ld, job.lane, &job);
    ld->num_running++;
    if (ld->num_idle > 0) mpti_cond_wake_one(&ld->work);
    mpti_mutex_unlock(&ld->lock);
    if (job.kind == MPTI_JOB_FILL) {
        job.count = mpti_stream_fill(ld, &job.segment, job.stream, job.capacity, worker->items,
                                     &ended, &out_of_memory);
    } else if (job.kind == MPTI_JOB_COLLATE) {
        mpti_loader_fill_slots(ld, job.batch, job.lane_index, job.lane->gathered, job.count);
    } else {
        for (i = 0; i < job.count; i++)
            out_of_memory |= !mpti_loader_decode(ld, epoch, &worker->samples[i]);
    }
    mpti_mutex_lock(&ld->lock);
    ld->out_of_memory |= out_of_memory;
    if (job.kind == MPTI_JOB_FILL) mpti_finish_fill(ld, worker, &job, ended);
    else if (job.kind == MPTI_JOB_COLLATE) mpti_finish_collate(ld, &job);
    else mpti_finish_decode(ld, worker, &job);
    if (--ld->num_running == 0 || ld->out_of_memory) mpti_cond_wake_all(&ld->done);
    return true;
}

static void *mpti_loader_main(void *arg) {
    mpti_worker *worker = (mpti_worker *)arg;
    mpt_loader *ld = worker->ld;

    mpti_mutex_lock(&ld->lock);
    while (!ld->closing) {
        if (mpti_loader_run_job(ld, worker)) continue;
        ld->num_idle++;
        mpti_cond_wait(&ld->work, &ld->lock);
        ld->num_idle--;
    }
    mpti_mutex_unlock(&ld->lock);
    return NULL;
}

/* ---- epochs ---------------------------------------------------------------------------------- */

/* Lets no new job begin and waits for those that run. Under the lock. */
static void mpti_loader_pause(mpt_loader *ld) {
    ld->paused = true;
    while (ld->num_running > 0) mpti_cond_wait(&ld->done, &ld->lock);
}

static void mpti_loader_resume(mpt_loader *ld) {
    ld->paused = false;
    mpti_cond_wake_all(&ld->work);
}

static void mpti_free_bad_list(const mpt_allocator *a, mpti_bad *bad) {
    while (bad) {
        mpti_bad *next = bad->next;
        mpti_free(a, bad, sizeof *bad);
        bad = next;
    }
}

static void mpti_lane_drop_pending(const mpt_allocator *a, mpti_lane *lane) {
    int64_t i;

    for (i = lane->next_pending; i < lane->num_pending; i++) mpti_item_drop(a, &lane->pending[i]);
    mpti_free(a, lane->pending, sizeof *lane->pending * (size_t)lane->num_pending);
    lane->pending = NULL;
    lane->num_pending = lane->next_pending = 0;
}

/* Forgets whatever is under way in a lane; files are closed. */
static void mpti_lane_reset(mpt_loader *ld, mpti_lane *lane) {
    const mpt_allocator *a = &ld->allocator;
    int64_t i;

    for (i = 0; i <= ld->desc.interleave && lane->streams && lane->order; i++) {
        mpti_stream_reset(a, &lane->streams[i]);
        lane->order[i] = (int)i;
    }
    for (i = lane->delivered; i < lane->dealt; i++)
        mpti_item_drop(a, &mpti_lane_sample(lane, i)->item);
    for (i = 0; i < lane->shuffle_count; i++) mpti_item_drop(a, &lane->shuffle[i]);
    mpti_lane_drop_pending(a, lane);
    lane->next_segment = lane->turn = lane->shuffle_count = 0;
    lane->drained = lane->finished = lane->broken = lane->collating = false;
    lane->draws = 0;
    lane->delivered = lane->collated = lane->resolved = lane->decode_next = lane->dealt = 0;
    lane->num_ready = lane->num_usable = lane->num_bad = lane->next_batch = 0;
    for (i = 0; i < lane->num_pixels; i++)
        lane->free_pixels[i] = lane->slab + ld->sample_bytes * (size_t)i;
    lane->num_free = lane->num_pixels;
}

static void mpti_loader_reset_batch(mpt_loader *ld, mpti_loader_batch *batch) {
    int i;

    for (i = 0; i < ld->num_lanes && batch->bad; i++) {
        mpti_free_bad_list(&ld->allocator, batch->bad[i]);
        batch->bad[i] = NULL;
    }
    batch->lanes_done = 0;
}

static void mpti_loader_reset(mpt_loader *ld) {
    int i;

    for (i = 0; i < ld->num_lanes && ld->lanes; i++) mpti_lane_reset(ld, &ld->lanes[i]);
    for (i = 0; i < 2; i++) mpti_loader_reset_batch(ld, &ld->batches[i]);
    ld->released = ld->taken = 0;
    ld->index = ld->num_bad = 0;
    ld->restored = false;
}

/* Begins at the first record of an epoch; paused or before the workers exist. */
static mpt_result mpti_loader_begin_epoch(mpt_loader *ld, int64_t epoch, mpt_error *err) {
    mpt_result rc;
    int i, k;

    mpti_loader_reset(ld);
    ld->epoch = epoch;
    rc = mpti_loader_deal(ld, err);
    if (rc) return rc;
    for (i = 0; i < ld->num_lanes; i++) {
        mpti_lane *lane = &ld->lanes[i];
        for (k = 0; k <= ld->desc.interleave && lane->next_segment < lane->num_segments; k++)
            mpti_stream_begin(lane, &lane->streams[lane->order[k]], lane->next_segment++);
        mpti_lane_deal(ld, lane);
    }
    return MPT_OK;
}

/* A failure is for good: each later call gives it again. */
static mpt_result mpti_loader_stop(mpt_loader *ld, mpt_result rc) {
    ld->failed = true;
    ld->error = ld->ctx->error;
    mpti_mutex_lock(&ld->lock);
    mpti_loader_pause(ld);
    mpti_mutex_unlock(&ld->lock);
    return mpti_report(ld->ctx, rc);
}

static mpt_result mpti_loader_failed_before(mpt_loader *ld) {
    ld->ctx->error = ld->error;
    return mpti_report(ld->ctx, ld->error.code);
}

/* ---- the next batch -------------------------------------------------------------------------- */

/* Waits until every lane has filled its part of the batch, or memory is out. Under the lock. */
static mpt_result mpti_loader_wait(mpt_loader *ld, mpti_loader_batch *batch, mpt_error *err) {
    while (batch->lanes_done < ld->num_lanes && !ld->out_of_memory) {
        if (ld->num_threads > 0) mpti_cond_wait(&ld->done, &ld->lock);
        else if (!mpti_loader_run_job(ld, &ld->workers[0]) && batch->lanes_done < ld->num_lanes)
            return MPTI_FAIL(err, MPT_ERR_INTERNAL,
                             "the loader has nothing to do and no batch: please report this");
    }
    if (ld->out_of_memory)
        return MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "no memory for a record or a picture");
    return MPT_OK;
}

/* Tells of the bad records in front of or inside a batch, lane by lane; an error if one of them, or
   their number, is too much. */
static mpt_result mpti_loader_settle_bad(mpt_loader *ld, mpti_loader_batch *batch, mpt_error *err) {
    int i;

    for (i = 0; i < ld->num_lanes; i++) {
        const mpti_bad *bad;
        for (bad = batch->bad[i]; bad; bad = bad->next) {
            mpt_bad_record report;
            if (ld->desc.on_bad_record == MPT_BAD_RECORD_FAIL ||
                bad->error.code != MPT_ERR_CORRUPT_DATA) {
                *err = bad->error;
                return bad->error.code;
            }
            if (++ld->num_bad > ld->desc.max_bad_records)
                return MPTI_FAIL(err, MPT_ERR_CORRUPT_DATA,
                                 "more than %lld bad records (max_bad_records); the last one: %s",
                                 (long long)ld->desc.max_bad_records, bad->error.message);
            memset(&report, 0, sizeof report);
            report.path = ld->num_files && ld->files ? ld->files[bad->file] : "array";
            report.record = bad->record;
            report.offset = bad->offset;
            report.code = bad->error.code;
            report.cause = bad->error.message;
            report.rest_of_file = bad->rest_of_file;
            if (ld->desc.bad_record) ld->desc.bad_record(&report, ld->desc.bad_record_user);
            mpti_log(ld->ctx, MPT_LOG_WARNING, bad->error.message);
        }
        mpti_free_bad_list(&ld->allocator, batch->bad[i]);
        batch->bad[i] = NULL;
    }
    return MPT_OK;
}

/* Nothing came of a whole epoch: going on would be an endless loop without data. */
static mpt_result mpti_loader_empty_epoch(const mpt_loader *ld, int64_t usable, mpt_error *err) {
    if (usable > 0)
        return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT,
                         "no batch in an epoch: %lld records don't fill one of %d lanes with a "
                         "batch_size of %d, and MPT_LAST_BATCH_DROP leaves partial ones out",
                         (long long)usable, ld->num_lanes, ld->desc.batch_size);
    return MPTI_FAIL(err, MPT_ERR_CORRUPT_DATA,
                     "an epoch without one usable record (%lld bad ones were left out) in %d "
                     "files, the first is %s",
                     (long long)ld->num_bad, ld->num_files,
                     ld->files ? mpti_path_tail(ld->files[0]) : "an array");
}

/* After an epoch that was read from its start by one rank the number of records is known. */
static void mpti_loader_keep_count(mpt_loader *ld, int64_t usable) {
    char message[160];

    if (ld->num_records_source == MPT_COUNT_GIVEN && ld->num_records != usable) {
        snprintf(message, sizeof message, "num_records was given as %lld, but the epoch had %lld",
                 (long long)ld->num_records, (long long)usable);
        mpti_log(ld->ctx, MPT_LOG_WARNING, message);
    }
    ld->num_records = usable;
    ld->num_records_source = MPT_COUNT_EPOCH;
    ld->steps_per_epoch = ld->index;
}

/* The end of an epoch: what was counted is kept, and the next epoch's reading begins at once. */
static mpt_result mpti_loader_end_epoch(mpt_loader *ld, mpt_error *err) {
    int64_t usable = 0, bad = ld->num_bad;
    bool whole = !ld->restored;
    mpt_result rc;
    int i;

    mpti_loader_pause(ld);
    for (i = 0; i < ld->num_lanes; i++) usable += ld->lanes[i].num_usable;
    /* a rank may own no record of a small set; one that lost all it had is an error */
    if (whole && ld->index == 0 && (ld->desc.world_size == 1 || (usable == 0 && bad > 0)))
        return mpti_loader_empty_epoch(ld, usable, err);
    if (whole && ld->desc.world_size == 1) mpti_loader_keep_count(ld, usable);
    rc = mpti_loader_begin_epoch(ld, ld->epoch + 1, err);
    ld->ended_num_bad = bad;
    if (rc == MPT_OK) mpti_loader_resume(ld);
    return rc;
}

static void mpti_loader_describe(mpt_loader *ld, mpti_loader_batch *batch, mpt_batch *out) {
    int64_t n = (int64_t)ld->num_lanes * ld->desc.batch_size;
    int i;

    memset(out, 0, sizeof *out);
    out->images.data = batch->images;
    out->images.dtype = ld->desc.dtype;
    out->images.num_dims = 4;
    out->images.dims[0] = n;
    out->images.dims[1] = ld->desc.height;
    out->images.dims[2] = ld->desc.width;
    out->images.dims[3] = ld->desc.channels;
    out->labels.data = batch->labels;
    out->labels.dtype = MPT_I32;
    out->labels.num_dims = 1;
    out->labels.dims[0] = n;
    out->sample_ids = batch->ids;
    out->num_lanes = ld->num_lanes;
    out->lane_valid = batch->valid;
    for (i = 0; i < ld->num_lanes; i++) out->num_valid += batch->valid[i];
    out->source = ld;
    out->epoch = ld->epoch;
    out->index = ld->index;
}

/* Samples up to the end of this batch are delivered: their places in the ring are free again. */
static void mpti_loader_hand_over(mpt_loader *ld, const mpti_loader_batch *batch) {
    int i;

    for (i = 0; i < ld->num_lanes; i++) {
        MPT_ASSERT(ld->lanes[i].delivered <= batch->upto[i]);
        ld->lanes[i].delivered = batch->upto[i];
        mpti_lane_deal(ld, &ld->lanes[i]);
    }
    ld->taken++;
    ld->index++;
}

MPT_API mpt_result mpt_loader_next(mpt_loader *ld, mpt_batch *out) {
    mpti_loader_batch *batch;
    mpt_result rc;

    if (!ld || !out) return MPT_ERR_INVALID_ARGUMENT;
    if (ld->failed) return mpti_loader_failed_before(ld);
    mpti_mutex_lock(&ld->lock);
    if (ld->released < ld->taken) { /* the batch before goes back to the workers */
        mpti_loader_reset_batch(ld, &ld->batches[(ld->taken - 1) % 2]);
        ld->released = ld->taken;
        mpti_cond_wake_all(&ld->work);
    }
    batch = &ld->batches[ld->taken % 2];
    rc = mpti_loader_wait(ld, batch, &ld->ctx->error);
    mpti_mutex_unlock(&ld->lock);
    if (rc == MPT_OK) rc = mpti_loader_settle_bad(ld, batch, &ld->ctx->error);
    if (rc) return mpti_loader_stop(ld, rc);
    mpti_mutex_lock(&ld->lock);
    mpti_loader_describe(ld, batch, out);
    if (out->num_valid > 0) mpti_loader_hand_over(ld, batch);
    else rc = mpti_loader_end_epoch(ld, &ld->ctx->error);
    mpti_mutex_unlock(&ld->lock);
    if (rc) return mpti_loader_stop(ld, rc);
    if (out->num_valid > 0) return MPT_OK;
    memset(out, 0, sizeof *out);
    return MPT_END;
}

MPT_API mpt_loader_info mpt_loader_get_info(const mpt_loader *ld) {
    mpt_loader_info info;

    memset(&info, 0, sizeof info);
    if (!ld) return info;
    info.num_files = ld->files ? ld->num_files : 0;
    info.num_records = ld->num_records;
    info.num_records_source = ld->num_records_source;
    info.steps_per_epoch = ld->steps_per_epoch;
    info.image_key = ld->image_key;
    info.label_key = ld->label_key;
    info.label_offset = ld->label_offset;
    info.num_bad_records = ld->index == 0 ? ld->ended_num_bad : ld->num_bad;
    info.epoch = ld->epoch;
    info.index = ld->index;
    return info;
}

/* ---- making and ending a loader -------------------------------------------------------------- */
static mpt_result mpti_loader_make_lut(mpt_loader *ld, mpt_error *err) {
    size_t channels = (size_t)ld->desc.channels, c, v;
    bool ok = true;

    if (ld->desc.dtype == MPT_U8) return MPT_OK;
    ld->lut = mpti_loader_array(ld, (int64_t)channels * 256, mpt_dtype_size(ld->desc.dtype), &ok);
    if (!ok) return MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "no memory for the normalisation table");
    for (c = 0; c < channels; c++)
        for (v = 0; v < 256; v++) {
            float x = (float)(((double)v / 255.0 - (double)ld->desc.mean[c]) /
                              (double)ld->desc.std[c]);
            if (ld->desc.dtype == MPT_F32) ((float *)ld->lut)[c * 256 + v] = x;
            else ((uint16_t *)ld->lut)[c * 256 + v] = mpt_f32_to_f16(x);
        }
    return MPT_OK;
}

static bool mpti_loader_make_lane(mpt_loader *ld, mpti_lane *lane, int number) {
    int64_t batch = ld->desc.batch_size, places = (int64_t)ld->desc.interleave + 1, i;
    bool ok = true;

    lane->number = number;
    /* twice a batch of pictures: one is collated while the next is decoded; at least enough to keep
       workers busy when batches are tiny */
    lane->num_pixels = 2 * batch < 64 ? 64 : 2 * batch;
    lane->ring = lane->num_pixels +
                 2 * batch; /* those in the two finished batches keep their place */
    lane->segments = (mpti_segment *)mpti_loader_array(ld, ld->num_files, sizeof(mpti_segment),
                                                       &ok);
    lane->streams = (mpti_stream *)mpti_loader_array(ld, places, sizeof(mpti_stream), &ok);
    lane->order = (int *)mpti_loader_array(ld, places, sizeof(int), &ok);
    lane->shuffle = (mpti_item *)mpti_loader_array(ld, ld->desc.shuffle_buffer, sizeof(mpti_item),
                                                   &ok);
    lane->samples = (mpti_sample *)mpti_loader_array(ld, lane->ring, sizeof(mpti_sample), &ok);
    lane->gathered = (mpti_gathered *)mpti_loader_array(ld, batch, sizeof(mpti_gathered), &ok);
    lane->free_pixels = (uint8_t **)mpti_loader_array(ld, lane->num_pixels, sizeof(uint8_t *), &ok);
    lane->slab = (uint8_t *)mpti_loader_array(ld, lane->num_pixels, ld->sample_bytes, &ok);
    for (i = 0; i < places && lane->streams; i++) lane->streams[i].segment = -1;
    if (!lane->slab) lane->num_pixels = 0;
    return ok;
}

static bool mpti_loader_make_batch(mpt_loader *ld, mpti_loader_batch *batch) {
    int64_t slots = (int64_t)ld->num_lanes * ld->desc.batch_size;
    bool ok = true;

    batch->images = mpti_loader_array(ld, slots, ld->sample_bytes * mpt_dtype_size(ld->desc.dtype),
                                      &ok);
    batch->labels = (int32_t *)mpti_loader_array(ld, slots, sizeof(int32_t), &ok);
    batch->ids = (uint64_t *)mpti_loader_array(ld, slots, sizeof(uint64_t), &ok);
    batch->valid = (int32_t *)mpti_loader_array(ld, ld->num_lanes, sizeof(int32_t), &ok);
    batch->upto = (int64_t *)mpti_loader_array(ld, ld->num_lanes, sizeof(int64_t), &ok);
    batch->bad = (mpti_bad **)mpti_loader_array(ld, ld->num_lanes, sizeof(mpti_bad *), &ok);
    return ok;
}

static mpt_result mpti_loader_make_buffers(mpt_loader *ld, mpt_error *err) {
    int first = ld->desc.rank * (ld->desc.num_lanes / ld->desc.world_size), i;
    bool ok = true;

    ld->num_lanes = ld->desc.num_lanes / ld->desc.world_size;
    ld->lanes = (mpti_lane *)mpti_loader_array(ld, ld->num_lanes, sizeof(mpti_lane), &ok);
    for (i = 0; i < ld->num_lanes && ok; i++)
        ok = mpti_loader_make_lane(ld, &ld->lanes[i], first + i);
    for (i = 0; i < 2 && ok; i++) ok = mpti_loader_make_batch(ld, &ld->batches[i]);
    if (ok) return MPT_OK;
    return MPTI_FAIL(
        err, MPT_ERR_OUT_OF_MEMORY,
        "no memory for %d lanes of batches of %d pictures: lower batch_size or shuffle_buffer",
        ld->num_lanes, ld->desc.batch_size);
}

static mpt_result mpti_loader_start(mpt_loader *ld, mpt_error *err) {
    int n = ld->desc.num_workers, i;
    bool ok = true;

    ld->workers = (mpti_worker *)mpti_loader_array(ld, n > 0 ? n : 1, sizeof(mpti_worker), &ok);
    if (n > 0) ld->threads = (mpti_thread *)mpti_loader_array(ld, n, sizeof(mpti_thread), &ok);
    if (!ok) return MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "no memory for %d workers", n);
    ld->workers[0].ld = ld;
    for (i = 0; i < n; i++) {
        int number;
        ld->workers[i].ld = ld;
        number = mpti_thread_start(&ld->threads[i], mpti_loader_main, &ld->workers[i]);
        if (number)
            return MPTI_FAIL_ERRNO(err, MPT_ERR_OUT_OF_MEMORY, number,
                                   "can't start worker %d of %d: lower num_workers", i + 1, n);
        ld->num_threads++;
    }
    return MPT_OK;
}

/* Files, schema and counts; for arrays there is nothing to find. */
static mpt_result mpti_loader_find_data(mpt_loader *ld, mpt_error *err) {
    int64_t record_bytes;
    mpt_result rc;
    bool ok = true;
    int i;

    if (ld->desc.array_images) ld->num_files = 1;
    rc = ld->desc.array_images ? MPT_OK : mpti_loader_list(ld, err);
    if (rc) return rc;
    ld->counts = (int64_t *)mpti_loader_array(ld, ld->num_files, sizeof(int64_t), &ok);
    ld->indexes = (mpt_tfrecord_index **)mpti_loader_array(ld, ld->num_files,
                                                           sizeof(mpt_tfrecord_index *), &ok);
    if (!ok) return MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "no memory for %d files", ld->num_files);
    for (i = 0; i < ld->num_files; i++) ld->counts[i] = -1;
    if (ld->desc.array_images) {
        ld->counts[0] = ld->num_records = ld->desc.array_images->dims[0];
        ld->num_records_source = MPT_COUNT_GIVEN;
        return mpti_loader_set_keys(ld, "image", "label", err);
    }
    rc = mpti_loader_find_schema(ld, &record_bytes, err);
    return rc ? rc : mpti_loader_count(ld, record_bytes, err);
}

static mpt_result mpti_loader_setup(mpt_loader *ld, mpt_error *err) {
    mpt_image_desc image;
    mpt_result rc;

    memset(&image, 0, sizeof image);
    image.channels = ld->desc.channels;
    image.apply_exif = ld->desc.apply_exif;
    image.max_pixels = ld->desc.max_pixels;
    image.max_bytes = ld->desc.max_image_bytes;
    ld->image = mpti_image_desc_defaults(&image);
    ld->sample_bytes = (size_t)ld->desc.height * (size_t)ld->desc.width * (size_t)ld->desc.channels;
    rc = mpti_loader_find_data(ld, err);
    ld->desc.paths = NULL; /* the caller's: not touched again */
    ld->desc.image_key = ld->image_key;
    ld->desc.label_key = ld->label_key;
    if (rc == MPT_OK) rc = mpti_loader_make_lut(ld, err);
    if (rc == MPT_OK) rc = mpti_loader_make_buffers(ld, err);
    if (rc == MPT_OK) rc = mpti_loader_begin_epoch(ld, 0, err);
    return rc == MPT_OK ? mpti_loader_start(ld, err) : rc;
}

MPT_API mpt_result mpt_loader_create(mpt_ctx *ctx, const mpt_loader_desc *desc, mpt_loader **out) {
    mpt_loader_desc d;
    mpt_loader *ld;
    mpt_result rc;

    if (!ctx || !desc || !out) return MPT_ERR_INVALID_ARGUMENT;
    *out = NULL;
    d = *desc;
    mpti_loader_desc_defaults(&d);
    rc = mpti_loader_desc_check(&d, &ctx->error);
    if (rc) return mpti_report(ctx, rc);
    ld = (mpt_loader *)mpti_calloc(&ctx->desc.allocator, 1, sizeof *ld);
    if (!ld)
        return mpti_report(ctx,
                           MPTI_FAIL(&ctx->error, MPT_ERR_OUT_OF_MEMORY, "no memory for a loader"));
    ld->ctx = ctx;
    ld->allocator = ctx->desc.allocator;
    ld->desc = d;
    if (d.array_images) {
        ld->arrays[0] = *d.array_images;
        ld->arrays[1] = *d.array_labels;
        ld->desc.array_images = &ld->arrays[0];
        ld->desc.array_labels = &ld->arrays[1];
    }
    ld->names.allocator = ld->state.allocator = ld->owned.allocator = &ld->allocator;
    mpti_mutex_init(&ld->lock);
    mpti_cond_init(&ld->work);
    mpti_cond_init(&ld->done);
    rc = mpti_loader_setup(ld, &ctx->error);
    if (rc) {
        mpt_loader_destroy(ld);
        return mpti_report(ctx, rc);
    }
    *out = ld;
    return MPT_OK;
}

MPT_API void mpt_loader_destroy(mpt_loader *ld) {
    const mpti_owned *owned;
    mpt_allocator a;
    size_t k;
    int i;

    if (!ld) return;
    a = ld->allocator;
    mpti_mutex_lock(&ld->lock);
    mpti_loader_pause(ld);
    ld->closing = true;
    mpti_cond_wake_all(&ld->work);
    mpti_mutex_unlock(&ld->lock);
    for (i = 0; i < ld->num_threads; i++) mpti_thread_join(ld->threads[i]);
    mpti_loader_reset(ld);
    for (i = 0; i < ld->num_files && ld->indexes; i++) mpti_index_destroy(&a, ld->indexes[i]);
    for (i = 0; i < ld->num_files && ld->files; i++) mpti_strfree(&a, ld->files[i]);
    mpti_strfree(&a, ld->image_key);
    mpti_strfree(&a, ld->label_key);
    owned = (const mpti_owned *)(const void *)ld->owned.data;
    for (k = 0; k < ld->owned.size / sizeof *owned; k++) mpti_free(&a, owned[k].p, owned[k].bytes);
    mpti_buffer_free(&ld->owned);
    mpti_buffer_free(&ld->names);
    mpti_buffer_free(&ld->state);
    mpti_cond_destroy(&ld->done);
    mpti_cond_destroy(&ld->work);
    mpti_mutex_destroy(&ld->lock);
    mpti_free(&a, ld, sizeof *ld);
}

/* =================================================================================================
 * >>position   3.4 Position: where a loader stands, saved and restored
 * =================================================================================================
 * Problem: a run that stops in the middle of an epoch has to go on with the very next record,
 *          although records wait in shuffle buffers and in batches made ahead.
 * Idea:    a state lists them as places (file, number, offset), not as bytes, and they are read
 *          again.
 * Shapes:  32 bytes for each record that waits; see below
 * Tested:  tests/test_loader.c
 * Next:    the chapters that train are being written.
 */

/* ---- the position, saved and restored -----------------------------------------------------------

   A state is a row of blocks, one for each rank that saved; a loader picks its lanes out of them:

     "MPTLOAD1" | size of block | what must be equal | epoch, index, bad records | lanes | CRC-32C
     lane:   size | turn, drained, draws, next segment | streams | shuffle buffer | dealt records
     record: file, number, offset, offset of the next one

   All numbers are 64-bit, little-endian. Records are kept as places and read again. */
static const char mpti_state_magic[9] = "MPTLOAD1";
enum { MPTI_STATE_HEADER = 16, MPTI_STATE_ITEM = 32 };

/* One walk over the fields serves writing and reading, so the two can't differ. */
typedef struct mpti_archive {
    mpti_buffer *out;       /* writing: goes here; NULL: reading */
    const uint8_t *p, *end; /* reading: from here */
    bool bad;               /* writing: no memory; reading: too short, or a number out of range */
} mpti_archive;

static void mpti_archive_u64(mpti_archive *a, uint64_t *v) {
    uint8_t bytes[8];

    if (a->out) {
        mpti_store_u64(bytes, *v);
        if (!mpti_buffer_append(a->out, bytes, sizeof bytes)) a->bad = true;
        return;
    }
    if (a->end - a->p < 8) a->bad = true;
    *v = a->bad ? 0 : mpti_load_u64(a->p);
    if (!a->bad) a->p += 8;
}

static void mpti_archive_i64(mpti_archive *a, int64_t *v, int64_t low, int64_t high) {
    uint64_t bits = (uint64_t)*v;

    mpti_archive_u64(a, &bits);
    *v = (int64_t)bits;
    if (*v < low || *v > high) a->bad = true;
    if (a->bad && !a->out) *v = low; /* writing never changes what it writes */
}

static void mpti_archive_int(mpti_archive *a, int *v, int low, int high) {
    int64_t wide = *v;

    mpti_archive_i64(a, &wide, low, high);
    *v = (int)wide;
}

static void mpti_archive_bool(mpti_archive *a, bool *v) {
    int number = *v;

    mpti_archive_int(a, &number, 0, 1);
    *v = number != 0;
}

static void mpti_archive_item(const mpt_loader *ld, mpti_archive *a, mpti_item *item) {
    if (!a->out) memset(item, 0, sizeof *item); /* its place may hold what was there before */
    mpti_archive_int(a, &item->file, 0, ld->num_files - 1);
    mpti_archive_i64(a, &item->record, 0,
                     (ld->desc.array_images ? ld->counts[0] : MPTI_MAX_RECORDS) - 1);
    mpti_archive_u64(a, &item->offset);
    mpti_archive_u64(a, &item->end);
}

static void mpti_archive_stream(mpti_archive *a, mpti_lane *lane, mpti_stream *s) {
    bool ended = s->ended && s->count == 0;
    int segment = s->segment;
    int64_t next = s->take_next;
    uint64_t offset = s->take_offset;

    mpti_archive_int(a, &segment, -1, lane->num_segments - 1);
    mpti_archive_bool(a, &ended);
    mpti_archive_i64(a, &next, 0, MPTI_MAX_RECORDS);
    mpti_archive_u64(a, &offset);
    if (a->out || a->bad || segment < 0) return;
    mpti_stream_begin(lane, s, segment);
    s->read_next = s->take_next = next;
    s->read_offset = s->take_offset = offset;
    s->ended = ended;
}

/* What was dealt and not delivered, in order: number k of it. */
static mpti_item *mpti_lane_undelivered(mpti_lane *lane, int64_t k) {
    int64_t dealt = lane->dealt - lane->delivered;
    return k < dealt ? &mpti_lane_sample(lane, lane->delivered + k)->item
                     : &lane->pending[lane->next_pending + k - dealt];
}

/* Reading expects a lane that was reset. */
static void mpti_archive_lane(mpt_loader *ld, mpti_archive *a, mpti_lane *lane) {
    int64_t n = lane->dealt - lane->delivered + lane->num_pending - lane->next_pending, k;
    int i;

    mpti_archive_int(a, &lane->turn, 0, ld->desc.interleave - 1);
    mpti_archive_bool(a, &lane->drained);
    mpti_archive_u64(a, &lane->draws);
    mpti_archive_int(a, &lane->next_segment, 0, lane->num_segments);
    for (i = 0; i <= ld->desc.interleave; i++)
        mpti_archive_stream(a, lane, &lane->streams[lane->order[i]]);
    mpti_archive_int(a, &lane->shuffle_count, 0, ld->desc.shuffle_buffer);
    for (k = 0; k < lane->shuffle_count; k++) mpti_archive_item(ld, a, &lane->shuffle[k]);
    mpti_archive_i64(a, &n, 0, a->out ? n : (a->end - a->p) / MPTI_STATE_ITEM);
    if (!a->out && n > 0) {
        lane->pending = (mpti_item *)mpti_calloc(&ld->allocator, (size_t)n, sizeof *lane->pending);
        if (!lane->pending) ld->out_of_memory = true;
        lane->num_pending = lane->pending ? n : 0;
    }
    for (k = 0; k < n && !ld->out_of_memory; k++)
        mpti_archive_item(ld, a, mpti_lane_undelivered(lane, k));
}

/* What must be equal for a position to mean the same records in the same order. */
typedef struct mpti_state_field {
    const char *name;
    uint64_t value;
} mpti_state_field;
enum { MPTI_STATE_FIELDS = 8 };

static void mpti_state_fields(const mpt_loader *ld, mpti_state_field out[MPTI_STATE_FIELDS]) {
    static const char *const names[MPTI_STATE_FIELDS] = {
        "seed",           "num_lanes",       "no_shuffle",         "interleave",
        "shuffle_buffer", "number of files", "names of the files", "number of array elements"};
    uint32_t crc = 0;
    int i;

    for (i = 0; i < ld->num_files && ld->files; i++) { /* names without folders: data may move */
        const char *name = mpti_base_name(ld->files[i]);
        crc = mpt_crc32c(crc, name, strlen(name) + 1);
    }
    for (i = 0; i < MPTI_STATE_FIELDS; i++) out[i].name = names[i];
    out[0].value = ld->desc.seed;
    out[1].value = (uint64_t)ld->desc.num_lanes;
    out[2].value = ld->desc.no_shuffle != 0;
    out[3].value = (uint64_t)ld->desc.interleave;
    out[4].value = (uint64_t)ld->desc.shuffle_buffer;
    out[5].value = (uint64_t)ld->num_files;
    out[6].value = crc;
    out[7].value = ld->desc.array_images ? (uint64_t)ld->desc.array_images->dims[0] : 0;
}

typedef struct mpti_position { /* what a block begins with */
    int64_t epoch, index, num_bad;
    int num_lanes, first_lane;
} mpti_position;

static mpt_result mpti_archive_position(const mpt_loader *ld, mpti_archive *a, mpti_position *p,
                                        mpt_error *err) {
    mpti_state_field fields[MPTI_STATE_FIELDS];
    int i;

    mpti_state_fields(ld, fields);
    for (i = 0; i < MPTI_STATE_FIELDS; i++) {
        uint64_t value = fields[i].value;
        mpti_archive_u64(a, &value);
        if (value != fields[i].value && !a->bad)
            return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT,
                             "the saved position belongs to other data or another desc: %s was "
                             "%llu, is %llu now",
                             fields[i].name, (unsigned long long)value,
                             (unsigned long long)fields[i].value);
    }
    mpti_archive_i64(a, &p->epoch, 0, MPTI_MAX_RECORDS);
    mpti_archive_i64(a, &p->index, 0, MPTI_MAX_RECORDS);
    mpti_archive_i64(a, &p->num_bad, 0, MPTI_MAX_RECORDS);
    mpti_archive_int(a, &p->first_lane, 0, ld->desc.num_lanes - 1);
    mpti_archive_int(a, &p->num_lanes, 1, ld->desc.num_lanes - p->first_lane);
    return a->bad ? MPTI_FAIL(err, MPT_ERR_CORRUPT_DATA, "the loader's state is damaged") : MPT_OK;
}

MPT_API mpt_result mpt_loader_get_state(mpt_loader *ld, mpt_bytes *out) {
    mpti_archive a = {NULL, NULL, NULL, false};
    mpti_position p;
    mpti_buffer *b;
    uint64_t size = 0, crc;
    size_t at;
    int i;

    if (!ld || !out) return MPT_ERR_INVALID_ARGUMENT;
    if (ld->failed) return mpti_loader_failed_before(ld);
    a.out = b = &ld->state;
    b->size = 0;
    p.epoch = ld->epoch;
    p.index = ld->index;
    p.num_bad = ld->num_bad;
    p.first_lane = ld->lanes[0].number;
    p.num_lanes = ld->num_lanes;
    mpti_mutex_lock(&ld->lock);
    mpti_loader_pause(ld);
    a.bad = !mpti_buffer_append(b, "MPTLOAD1 no size", MPTI_STATE_HEADER) ||
            mpti_archive_position(ld, &a, &p, &ld->ctx->error) != MPT_OK;
    for (i = 0; i < ld->num_lanes && !a.bad; i++) {
        at = b->size;
        mpti_archive_u64(&a, &size); /* its place */
        mpti_archive_lane(ld, &a, &ld->lanes[i]);
        if (!a.bad) mpti_store_u64(b->data + at, b->size - at - 8);
    }
    mpti_loader_resume(ld);
    mpti_mutex_unlock(&ld->lock);
    size = b->size + 8;
    if (!a.bad) mpti_store_u64(b->data + 8, size);
    crc = a.bad ? 0 : mpt_crc32c(0, b->data, b->size);
    mpti_archive_u64(&a, &crc);
    if (a.bad)
        return mpti_report(ld->ctx, MPTI_FAIL(&ld->ctx->error, MPT_ERR_OUT_OF_MEMORY,
                                              "no memory for the loader's state"));
    out->data = b->data;
    out->size = b->size;
    return MPT_OK;
}

/* Opens the block at the front of state for reading; its checksum vouches for every number in
   it. */
static mpt_result mpti_state_open(const mpt_loader *ld, mpt_bytes state, mpti_archive *a,
                                  mpti_position *p, mpt_error *err) {
    uint64_t size = 0;

    memset(a, 0, sizeof *a);
    memset(p, 0, sizeof *p);
    if (state.size < MPTI_STATE_HEADER || memcmp(state.data, mpti_state_magic, 8) != 0)
        return MPTI_FAIL(err, MPT_ERR_CORRUPT_DATA, "this is not a loader's state");
    size = mpti_load_u64(state.data + 8);
    if (size < MPTI_STATE_HEADER + 8 || size > state.size ||
        mpt_crc32c(0, state.data, (size_t)size - 8) != mpti_load_u64(state.data + size - 8))
        return MPTI_FAIL(err, MPT_ERR_CORRUPT_DATA,
                         "the loader's state is damaged (size or checksum)");
    a->p = state.data + MPTI_STATE_HEADER;
    a->end = state.data + size - 8;
    return mpti_archive_position(ld, a, p, err);
}

/* Goes over all blocks. apply false: are they sound, of one step, and do they hold this rank's
   lanes? true: sets the lanes, which have been reset. */
static mpt_result mpti_state_walk(mpt_loader *ld, mpt_bytes state, bool apply,
                                  mpti_position *position, mpt_error *err) {
    int found = 0, i;
    mpt_bytes rest = state;
    mpti_position p;
    mpti_archive a;

    for (i = 0; i < ld->num_lanes; i++) ld->lanes[i].in_state = 0;
    do {
        mpt_result rc = mpti_state_open(ld, rest, &a, &p, err);
        if (rc) return rc;
        if (rest.data == state.data) *position = p;
        if (p.epoch != position->epoch || p.index != position->index)
            return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT,
                             "the saved positions of the ranks differ: not of one step");
        for (i = p.first_lane - ld->lanes[0].number;
             i < p.first_lane - ld->lanes[0].number + p.num_lanes; i++) {
            mpti_archive lane = a;
            int64_t size = 0;
            mpti_archive_i64(&lane, &size, 0, a.end - a.p - 8);
            a.p = lane.end = lane.p + size;
            if (i >= 0 && i < ld->num_lanes) {
                if (ld->lanes[i].in_state++)
                    return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT,
                                     "the saved position has lane %d twice", ld->lanes[i].number);
                found++;
            }
            if (apply && i >= 0 && i < ld->num_lanes) mpti_archive_lane(ld, &lane, &ld->lanes[i]);
            if (lane.bad)
                return MPTI_FAIL(err, MPT_ERR_CORRUPT_DATA, "the loader's state is damaged");
        }
        rest.size -= (size_t)(a.end + 8 - rest.data);
        rest.data = a.end + 8;
    } while (rest.size > 0);
    if (found == ld->num_lanes) return MPT_OK;
    return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT,
                     "the saved position has %d of this rank's %d lanes", found, ld->num_lanes);
}

static int mpti_compare_items(const void *a, const void *b) {
    const mpti_item *x = *(mpti_item *const *)a, *y = *(mpti_item *const *)b;

    if (x->file != y->file) return x->file < y->file ? -1 : 1;
    return x->record < y->record ? -1 : x->record > y->record;
}

/* Reads the record that an item names; s is open on its file or fresh. */
static mpt_result mpti_fetch_item(mpt_loader *ld, mpti_stream *s, mpti_item *item, mpt_error *err) {
    mpti_segment segment = {item->file, 0, -1, 0, 0, 1, 0};
    mpti_item got;
    mpti_block *own;
    mpt_result rc = MPT_OK;

    if (s->reader && mpti_loader_seeks(ld, s->reader)) {
        rc = mpti_tfrecord_seek(s->reader, err, item->record, item->offset);
        s->read_next = item->record;
    } else if (!s->reader) {
        s->read_next = item->record;
        s->read_offset = item->offset;
    }
    if (rc) return rc;
    rc = mpti_stream_read(ld, &segment, s, &got);
    while (rc == MPT_OK && got.record < item->record) {
        mpti_item_drop(&ld->allocator, &got);
        rc = mpti_stream_read(ld, &segment, s, &got);
    }
    if (rc == MPT_OK &&
        got.block) { /* a copy of its own: the block behind it holds the neighbours too */
        own = mpti_block_create(&ld->allocator, got.payload.size);
        if (own) memcpy(own->data, got.payload.data, got.payload.size);
        if (own) got.payload.data = own->data;
        mpti_block_release(got.block);
        got.block = own;
        if (!own) rc = MPT_ERR_OUT_OF_MEMORY;
    }
    if (rc == MPT_ERR_OUT_OF_MEMORY)
        return MPTI_FAIL(err, rc, "no memory for the records of the loader's state");
    if (rc)
        return MPTI_FAIL(
            err, MPT_ERR_CORRUPT_DATA,
            "%s: record %lld of the saved position is not there: has the file changed?",
            mpti_path_tail(ld->files[item->file]), (long long)item->record);
    *item = got;
    return MPT_OK;
}

/* Reads again the records that were in the shuffle buffer or dealt, file by file in order. */
static mpt_result mpti_lane_fetch(mpt_loader *ld, mpti_lane *lane, mpt_error *err) {
    size_t n = (size_t)lane->shuffle_count + (size_t)lane->num_pending, i;
    mpti_item **list;
    mpti_stream s;
    mpt_result rc = MPT_OK;

    if (n == 0) return MPT_OK;
    list = (mpti_item **)mpti_calloc(&ld->allocator, n, sizeof *list);
    if (!list) return MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "no memory for the loader's state");
    for (i = 0; i < n; i++)
        list[i] = i < (size_t)lane->shuffle_count ? &lane->shuffle[i]
                                                  : &lane->pending[i - (size_t)lane->shuffle_count];
    qsort(list, n, sizeof *list, mpti_compare_items);
    memset(&s, 0, sizeof s);
    for (i = 0; i < n && rc == MPT_OK; i++) {
        if (i > 0 && list[i]->file != list[i - 1]->file) mpti_stream_reset(&ld->allocator, &s);
        if (ld->desc.array_images) {
            mpti_segment all = {0, 0, ld->counts[0], 0, 0, 1, 0};
            s.read_next = list[i]->record;
            rc = mpti_array_read(ld, &all, &s, list[i]);
        } else {
            rc = mpti_fetch_item(ld, &s, list[i], err);
        }
    }
    mpti_stream_reset(&ld->allocator, &s);
    mpti_free(&ld->allocator, list, sizeof *list * n);
    return rc;
}

static mpt_result mpti_loader_apply_state(mpt_loader *ld, mpt_bytes state, mpti_position *position,
                                          mpt_error *err) {
    mpt_result rc;
    int i;

    mpti_loader_reset(ld);
    ld->epoch = position->epoch;
    rc = mpti_loader_deal(ld, err);
    if (rc == MPT_OK) rc = mpti_state_walk(ld, state, true, position, err);
    if (rc == MPT_OK && ld->out_of_memory)
        rc = MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, "no memory for the loader's state");
    for (i = 0; i < ld->num_lanes && rc == MPT_OK; i++)
        rc = mpti_lane_fetch(ld, &ld->lanes[i], err);
    if (rc) return rc;
    ld->index = position->index;
    ld->num_bad = position->num_bad;
    ld->restored = true;
    for (i = 0; i < ld->num_lanes; i++) mpti_lane_deal(ld, &ld->lanes[i]);
    return MPT_OK;
}

MPT_API mpt_result mpt_loader_set_state(mpt_loader *ld, mpt_bytes state) {
    mpti_position position;
    mpt_error *err;
    mpt_result rc;

    if (!ld || !state.data) return MPT_ERR_INVALID_ARGUMENT;
    if (ld->failed) return mpti_loader_failed_before(ld);
    err = &ld->ctx->error;
    rc = mpti_state_walk(ld, state, false, &position, err);
    if (rc) return mpti_report(ld->ctx, rc);
    mpti_mutex_lock(&ld->lock);
    mpti_loader_pause(ld);
    rc = mpti_loader_apply_state(ld, state, &position, err);
    if (rc == MPT_OK) mpti_loader_resume(ld);
    mpti_mutex_unlock(&ld->lock);
    return rc ? mpti_loader_stop(ld, rc) : MPT_OK;
}

#ifdef __cplusplus
}
#endif
#endif /* MPTRAIN_IMPLEMENTATION */

/*
MIT License

Copyright (c) 2026 mptrain contributors

Permission is hereby granted, free of charge, to any person obtaining a copy
of this software and associated documentation files (the "Software"), to deal
in the Software without restriction, including without limitation the rights
to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
copies of the Software, and to permit persons to whom the Software is
furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all
copies or substantial portions of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
SOFTWARE.
*/
