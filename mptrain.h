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
 * -DMPTRAIN_ZLIB and -lz. Nothing else is needed. A program that trains a classifier:
 *
 *     #define MPTRAIN_IMPLEMENTATION
 *     #include "mptrain.h"
 *     #include <stdio.h>
 *
 *     int main(int argc, char **argv) {
 *         mpt_ctx *ctx = NULL;
 *         mpt_model *model = NULL;
 *         mpt_loader *data = NULL;
 *         mpt_trainer *trainer = NULL;
 *         mpt_loader_desc input = {0};
 *         mpt_trainer_desc training = {0};
 *         mpt_batch batch;
 *         mpt_step_report step;
 *         mpt_result rc;
 *
 *         input.paths = (const char *const *)argv + 1;
 *         input.num_paths = argc - 1;
 *         input.height = input.width = 32;
 *         input.channels = 3;
 *         input.num_classes = 10;
 *         training.optimizer.learning_rate = 0.1f;
 *         rc = mpt_ctx_create(NULL, &ctx);
 *         if (!rc) rc = mpt_model_create(ctx, 32, 32, 3, &model);
 *         if (!rc) rc = mpt_model_finish(model, mpt_zoo(model, "resnet20", 10));
 *         if (!rc) rc = mpt_trainer_create(model, &training, 32, &trainer);
 *         if (!rc) rc = mpt_loader_create(ctx, &input, &data);
 *         while (!rc && !(rc = mpt_loader_next(data, &batch)))
 *             if (!(rc = mpt_trainer_step(trainer, &batch, &step)))
 *                 printf("step %d: loss %.4f\n", (int)step.step, step.loss);
 *         if (rc != MPT_END) fprintf(stderr, "%s\n", mpt_last_error(ctx)->message);
 *         mpt_trainer_destroy(trainer);
 *         mpt_loader_destroy(data);
 *         mpt_model_destroy(model);
 *         mpt_ctx_destroy(ctx);
 *         return rc != MPT_END;
 *     }
 *
 * It goes over the data once, in FP16 with FP32 masters and dynamic loss scaling where the
 * processor converts FP16 in hardware. More programs lie in examples/. The license is at the end
 * of the file.
 */

/* =================================================================================================
 * >>toc   Contents: search for a tag to get to its chapter
 * =================================================================================================
 *
 *   I    Manual
 *   >>read        How to read this file
 *   >>steps       Step by step: what happens to one batch
 *   >>mixed       Mixed precision in ten minutes
 *   >>options     What can be defined before the include
 *   >>limits      What it does not do, limits, trust
 *
 *   II   API
 *   >>api-core    Version, results, errors, hooks, context
 *   >>api-tensor  Tensors: a view of numbers
 *   >>api-data    Storage, records, tf.Example, pictures, batches
 *   >>api-model   Models: a list of layers
 *   >>api-train   Training: optimizer, loss scaling, the trainer, its state
 *   >>api-backend Operators: the table behind every layer
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
 *   >>tensor      4 Tensors: arenas
 *   >>cpu         5 CPU ops: convolution, dense, batch norm, pools, dropout, softmax cross entropy
 *   >>cuda        6 CUDA backend: streams, staging, cuBLAS, launches of kernels.cu
 *   >>layers      7 Layers: shapes and parameters, one step forward, one step backward
 *   >>model       8 Model: a list of layers, finished and laid out; the zoo
 *   >>optim       9 Loss and optimizer
 *   >>scaler      10 Loss scaling
 *   >>train       12.1 Trainer: the plan, microbatches, the step
 *   >>evaluate    12.2 Beside training: evaluation, prediction, the autopsy of a skipped step
 *   >>device      12.3 A trainer on a device: its memory, staging, recordings, reports
 *   >>safetensors 12.4 Files of tensors: SHA-256, JSON, safetensors
 *   >>state       12.5 State: hash, export and import, checkpoints
 */

/* =================================================================================================
 * >>read   How to read this file
 * =================================================================================================
 *
 * The header follows one batch from bytes to updated weights. Each chapter of the implementation
 * opens with the same five lines - problem, idea, shapes, where it is tested, what to read next -
 * and goes from the small to the large. Public names begin with mpt_, private ones with mpti_.
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
 * >>steps   Step by step: what happens to one batch
 * =================================================================================================
 *
 *   bytes      are read in blocks, by several threads                     >>storage
 *   records    are found in them, and their checksums compared            >>tfrecord >>example
 *   pictures   are decoded, cut, mirrored                                 >>image
 *   a batch    is put together from lanes, in an order of its own         >>loader
 *   values     go forward through the model, layer by layer               >>layers >>cpu >>cuda
 *   the loss   is computed in FP32, and multiplied by the loss scale      >>cpu (softmax)
 *   gradients  go backward through the same layers, scaled                >>layers
 *   sums       of all lanes meet in a tree                                >>train
 *   a look     at each sum: is it finite? If not, the step is skipped     >>optim >>scaler
 *   weights    are updated in FP32, from unscaled and clipped gradients,
 *              and rounded to 16 bits for the next batch                  >>optim
 *   a report   tells what happened; a checkpoint keeps all of it          >>train >>state
 *
 * The last four, but for the checkpoint, are the nine lines of mpt_trainer_apply. On a GPU they are
 * the section >>update of kernels.cu: the host begins them and goes on with the next batch.
 */

/* =================================================================================================
 * >>mixed   Mixed precision in ten minutes
 * =================================================================================================
 *
 * WHY. A number of 16 bits takes half the memory and half the time to move, and tensor cores
 * multiply FP16 eight times as fast as FP32 (V100: 125 against 15.7 TFLOP/s). Training is bound by
 * moving numbers about, so half the bytes is much of the gain even where arithmetic isn't faster.
 *
 * WHAT FP16 CAN HOLD. One sign, five bits of exponent, ten of fraction (eleven significant bits, as
 * the leading 1 is implied):
 *
 *        2^-24          2^-14                1                    2^15 65504
 *     0 ---|--------------|------------------|---------------------|----|--- inf
 *            subnormal:              normal: steps of 1/1024
 *            ever coarser            of the number's power of two
 *
 * WHAT BREAKS, AND THE THREE REMEDIES (Micikevicius et al. 2018, arXiv 1710.03740).
 *
 * 1. Updates vanish. A weight of 1 with an update of 0.0001: the next FP16 number after 1 is
 *    1.00098, so 1 + 0.0001 is rounded back to 1, each time, for ever. Remedy: MASTER WEIGHTS. The
 *    truth is kept in FP32; updates are added there, and a rounded copy is what layers multiply
 *    with. 100 updates of 0.0001 then make 0.01.
 *
 * 2. Gradients vanish. Many gradients of activations are smaller than 2^-24, the smallest FP16
 *    number, while the upper half of FP16's range stays empty. Remedy: LOSS SCALING. Multiply the
 *    loss by S = 65536, and by the chain rule every gradient is S times as large. Divide by S in
 *    FP32, before anything else looks at the gradient: clipping, weight decay and momentum must see
 *    the true one.
 *
 * 3. Sums swallow. 2048 + 1 is 2048 in FP16. Remedy: ADD IN FP32. Products of FP16 numbers are
 *    summed in FP32 (tensor cores do so), and so are batch norm's statistics and the softmax.
 *
 * WHICH SCALE? The largest that doesn't overflow, and that changes while training. DYNAMIC SCALING
 * finds it: begin high (2^16). If a gradient comes out as inf or NaN, throw the step away and halve
 * the scale; after 2000 good steps in a row, double it. So a skipped step now and then, and a few
 * at the start, are how it works and no failure. A skipped step changes no weight, no momentum, no
 * statistic, no schedule; it is counted, and the report says so.
 *
 * WHEN IT GOES WRONG. A run that skips every step isn't training. At the smallest scale and still
 * overflowing, 20 steps in a row: mpt_trainer_apply ends in an error that names the first bad
 * tensor. mpt_trainer_autopsy runs a skipped step again and tells the layer, the tensor, the
 * element, a histogram of exponents, and the largest scale that would have fitted. If that is 0,
 * no scale cures it, mostly since the forward pass isn't finite itself: lower the learning rate,
 * look at the data, begin with warm-up.
 *
 * BF16 has FP32's range with eight significant bits: no scaling, but it needs masters all the more.
 *
 * THE SAME IN OTHER WORDS. Apex: amp.initialize(opt_level="O2") is precision = MPT_PRECISION_FP16,
 * O1 is FP16_CAST, O3 FP16_PURE, O0 FP32. PyTorch: GradScaler is desc.loss_scaler; scale, unscale_,
 * clip_grad_norm_, step and update are one call here, mpt_trainer_apply, so their order can't be
 * wrong. Keras: LossScaleOptimizer; see mpt_loss_scaler_desc_preset for the constants of all three.
 */

/* =================================================================================================
 * >>options   What can be defined before the include
 * =================================================================================================
 *
 *   name                    where              effect
 *   MPTRAIN_IMPLEMENTATION  one file           compiles the implementation there
 *   MPTRAIN_STATIC          that same file     every function is static: a private copy
 *   MPTRAIN_CUDA            implementation     mpt_backend_cuda(): link kernels.o, made by nvcc of
 *                                              kernels.cu, and -lcublas -lcudart
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
 * one label of a record; train anything but classifiers, or on more than one machine or GPU yet.
 *
 *   a record          max_record_bytes, by default 1 GiB, for reading and writing
 *   a picture         max_pixels 100,000,000 and max_bytes 256 MiB, checked before decoding
 *   a picture's side  16384 in a batch
 *   a model           10000 layers; 2^31 numbers a record in a value; 2^20 records a lane
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

#ifdef __CUDACC_RTC__ /* NVIDIA's run-time compiler, of kernels.cu: no headers, but size_t */
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#endif

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
#define MPT_ABI_VERSION 2 /* goes up when a public struct changes; kernels.cu must have the same */

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
    int logged;        /* the logger has heard of it */
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

typedef struct mpt_backend mpt_backend; /* >>api-backend */

typedef struct mpt_ctx_desc {
    const mpt_backend *backend; /* where models are trained; default: mpt_backend_cpu() */
    int device;                 /* which of its devices, counted from 0 */
    int num_threads; /* for mpt_parallel_for, this one included; default: number of cores */
    mpt_allocator allocator;
    mpt_logger logger;
    mpt_error *error; /* optional: filled where mpt_ctx_create fails and leaves no context to ask */
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

/* An arena: memory taken once, handed out front to back, given back from the end. Usable alone. */
typedef struct mpt_arena mpt_arena;
typedef struct mpt_arena_desc {
    size_t capacity_bytes; /* required */
    size_t alignment;      /* of each tensor, a power of two; default: 64 */
    const char *purpose;   /* for messages, static text: "activations"; default: "an arena" */
} mpt_arena_desc;
MPT_API MPT_CHECKED mpt_result mpt_arena_create(mpt_ctx *ctx, const mpt_arena_desc *desc,
                                                mpt_arena **out);
/* A tensor of zeros; dims [num_dims], num_dims 0 .. MPT_MAX_DIMS. MPT_ERR_OUT_OF_MEMORY, naming the
   purpose and both sizes, if the rest of the arena is too small. */
MPT_API MPT_CHECKED mpt_result mpt_arena_tensor(mpt_arena *a, mpt_dtype dtype, const int64_t *dims,
                                                int num_dims, mpt_tensor *out);
MPT_API size_t mpt_arena_mark(const mpt_arena *a); /* bytes handed out so far */
/* Takes back all that was handed out after the mark. */
MPT_API void mpt_arena_release(mpt_arena *a, size_t mark);
MPT_API void mpt_arena_destroy(mpt_arena *a);

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
    mpt_tensor images; /* (N,H,W,C), lane-major; U8 (a model sees x / 255), F32, F16; on the host */
    mpt_tensor labels; /* (N), I32; -1 in slots that don't count */
    /* (N), key of the counter-based random numbers; NULL: the index in the batch */
    const uint64_t *sample_ids;
    int32_t num_lanes; /* N = num_lanes * capacity, for training the trainer's batch size; 0: 1 */
    /* (num_lanes): the first lane_valid[i] of lane i's slots count, 0 allowed; NULL: all N */
    const int32_t *lane_valid;
    int64_t num_valid;         /* their sum; N, or 0 for not given, where lane_valid is NULL */
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

/* =================================================================================================
 * >>api-model   Models: a list of layers
 * =================================================================================================
 *
 * A value is a small int: MPT_INPUT is the picture, each layer returns the number of its output.
 * Layers are wired in the order in which they run. The first mistake sticks: later calls return -1,
 * and mpt_model_finish returns it with a message that names layer, shapes and remedy. A model holds
 * shapes only; weights live in a trainer.
 *
 *     x = mpt_conv2d(m, MPT_INPUT, &conv);     (h,w,c) -> (p,q,k)
 *     x = mpt_relu(m, mpt_batchnorm(m, x, NULL));
 *     rc = mpt_model_finish(m, mpt_dense(m, mpt_global_avg_pool(m, x), 10));
 */
typedef struct mpt_model mpt_model;
#define MPT_INPUT 0

typedef struct mpt_conv2d_desc {
    int out_channels; /* required */
    int kernel;       /* square; default: 3 */
    int stride;       /* default: 1 */
    int padding;      /* on each side; 0 is the default and a wish */
    int use_bias;
} mpt_conv2d_desc;

typedef struct mpt_batchnorm_desc {
    float epsilon;       /* default: 1e-5 */
    float momentum;      /* weight of the new batch in the running statistics; default: 0.1 */
    int zero_init_gamma; /* gamma starts at 0: a residual branch that starts as nothing */
} mpt_batchnorm_desc;

MPT_API MPT_CHECKED mpt_result mpt_model_create(mpt_ctx *ctx, int height, int width, int channels,
                                                mpt_model **out);
MPT_API int mpt_conv2d(mpt_model *m, int x, const mpt_conv2d_desc *desc);
MPT_API int mpt_batchnorm(mpt_model *m, int x, const mpt_batchnorm_desc *desc); /* NULL: defaults */
MPT_API int mpt_relu(mpt_model *m, int x);
MPT_API int mpt_add(mpt_model *m, int x, int y);
MPT_API int mpt_max_pool(mpt_model *m, int x, int kernel, int stride, int padding);
MPT_API int mpt_avg_pool(mpt_model *m, int x, int kernel, int stride, int padding);
MPT_API int mpt_global_avg_pool(mpt_model *m, int x);
MPT_API int mpt_dense(mpt_model *m, int x, int out_features); /* flattens; with bias */
MPT_API int mpt_dropout(mpt_model *m, int x, float p);        /* p in 0 .. 1, 1 excluded */

/* A layer of your own, in FP32 whatever the precision: tensors are cast on the way in and out. Its
   functions are called on the thread that calls the trainer, and may use mpt_parallel_for. */
enum { MPT_CUSTOM_MAX_INPUTS = 4 };
typedef struct mpt_custom_args {
    const mpt_tensor *in; /* [num_in], each (n,h,w,c), F32; n records, those that count */
    int num_in;
    const float *params; /* (param_count) */
    mpt_tensor *out;     /* (n,h,w,c), F32; forward writes it, backward reads it */
    /* backward; all three are multiplied by the loss scale: */
    const mpt_tensor *dout; /* (n,h,w,c), F32 */
    mpt_tensor *din;        /* [num_in], F32: overwrite each */
    float *dparams;         /* (param_count): overwrite */
    void *workspace;        /* of the bytes asked for; forward's content doesn't live to backward */
    void *stream; /* of the device; NULL on the CPU */
    const uint64_t *sample_ids; /* (n) keys for random numbers, or NULL */
    int training;               /* 0: evaluation */
} mpt_custom_args;
typedef struct mpt_custom_desc {
    /* "prelu": its tensor is exported as "prelu0.weight"; at most 48 bytes, copied; default:
       "custom". Parameters decay like weights. */
    const char *name;
    /* From in[num_in] (shapes only, data NULL; dims[0] is the number of records, 1 while the model
       is built and a microbatch when a trainer is planned) to out's num_dims = 4 and dims, with
       dims[0] as in's, the number of parameters and the bytes of workspace, all of them zero before
       the call. A result other than MPT_OK is a wiring error. */
    mpt_result (*infer)(const mpt_tensor *in, int num_in, mpt_tensor *out, size_t *param_count,
                        size_t *workspace, void *user);
    /* Optional: initial parameters; default: zeros. */
    mpt_result (*init)(float *params, size_t count, uint64_t seed, void *user);
    mpt_result (*forward)(const mpt_custom_args *a, void *user);
    mpt_result (*backward)(const mpt_custom_args *a, void *user);
    void *user; /* lives as long as the model */
    /* 1: forward and backward take device pointers and work on args.stream. Only such layers can be
       trained on a device, and only there. init works on host memory everywhere. */
    int on_device;
} mpt_custom_desc;
MPT_API int mpt_custom(mpt_model *m, const int *inputs, int num_inputs,
                       const mpt_custom_desc *desc);
/* Names the layer whose output is x, for messages and files: "layer1.0.conv1", at most 63 bytes, no
   name twice. Without a name it is called by kind and number. Returns x, or -1. */
MPT_API int mpt_name(mpt_model *m, int x, const char *name);
/* Logits of a network by name: lenet, mlp, resnet20, resnet32, resnet56 (He et al. 2016, CIFAR form
   with 1 x 1 shortcuts), resnet18, resnet34, resnet50 (torchvision's form and names). */
MPT_API int mpt_zoo(mpt_model *m, const char *name, int num_classes);
/* Checks and fuses; then the model can't be changed. logits: a value of shape (1,1,classes). */
MPT_API MPT_CHECKED mpt_result mpt_model_finish(mpt_model *m, int logits);

typedef struct mpt_layer_info {
    const char *name, *kind; /* of the model: "fc", "dense" */
    /* values that it reads: MPT_INPUT, or 1 + the number of the layer that makes it */
    int inputs[MPT_CUSTOM_MAX_INPUTS], num_inputs;
    int64_t height, width, channels;       /* of its output */
    int kernel, stride, padding, use_bias; /* 0 where its kind has none */
    int64_t num_params;
    int fused; /* 1: computed together with the layer behind it; its output is kept nowhere */
} mpt_layer_info;
MPT_API int mpt_model_num_layers(const mpt_model *m);
MPT_API MPT_CHECKED mpt_result mpt_model_layer(const mpt_model *m, int layer, mpt_layer_info *out);
MPT_API int64_t mpt_model_num_params(const mpt_model *m);
/* A table: layer, kind, shape of the output, parameters, bytes of the output with this many records
   in this storage; and the sums. line is called for each line, without a newline. */
MPT_API MPT_CHECKED mpt_result mpt_model_summary(const mpt_model *m, int batch_size,
                                                 mpt_dtype storage,
                                                 void (*line)(const char *text, void *user),
                                                 void *user);
MPT_API void mpt_model_destroy(mpt_model *m);

/* =================================================================================================
 * >>api-train   Training: optimizer, loss scaling, the trainer, its state
 * =================================================================================================
 */

/* ---- optimizers --------------------------------------------------------------------------------
   Per weight w with gradient g (unscaled, clipped), learning rate r, weight decay d, t = number of
   this update, counted from 1. All in FP32, as PyTorch 2 computes them; dampening is 0.

     SGD        g += d w;                                              w -= r g
     momentum   g += d w;  m = momentum m + g;                         w -= r m
     Nesterov   g += d w;  m = momentum m + g;                         w -= r (g + momentum m)
     Adam       g += d w;  m = beta1 m + (1 - beta1) g
                           v = beta2 v + (1 - beta2) g^2
                           w -= r / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + epsilon)
     AdamW      w *= 1 - r d, then as Adam without d (Loshchilov and Hutter, arXiv 1711.05101)
     LARS       q = lars_trust |w| / (|g| + d |w| + epsilon), norms of one tensor; 1 if one is 0
                g += d w;  m = momentum m + r q g;                     w -= m

   LARS is You, Gitman, Ginsburg 2017 (arXiv 1708.03888): trust coefficient 0.001, momentum 0.9 and
   decay 0.0005 are theirs, epsilon keeps the division sane. Its biases and batch norms take plain
   momentum: no decay, no ratio. */
typedef enum mpt_optimizer_kind {
    MPT_OPTIMIZER_DEFAULT = 0, /* SGD with momentum */
    MPT_OPTIMIZER_SGD,
    MPT_OPTIMIZER_SGD_MOMENTUM,
    MPT_OPTIMIZER_SGD_NESTEROV,
    MPT_OPTIMIZER_ADAM,
    MPT_OPTIMIZER_ADAMW,
    MPT_OPTIMIZER_LARS
} mpt_optimizer_kind;

typedef struct mpt_optimizer_desc {
    mpt_optimizer_kind kind;
    float learning_rate; /* required, above 0; the peak, which the schedule multiplies */
    float momentum;      /* above 0, below 1; default: 0.9; for none choose MPT_OPTIMIZER_SGD */
    float beta1, beta2; /* above 0, below 1; default: 0.9, 0.999 (Kingma and Ba, arXiv 1412.6980) */
    float epsilon;      /* above 0; default: 1e-8; Adam, AdamW and LARS */
    float weight_decay; /* at least 0; 0 is the default and a wish */
    float max_grad_norm;         /* L2 norm of all gradients together, unscaled; 0: no clipping */
    float lars_trust;            /* above 0; default: 0.001 */
    int no_decay_on_bn_and_bias; /* default: they decay like the rest, as in PyTorch */
    int lars_ratio_on_bn_and_bias; /* default: they are left out of LARS's ratio and decay */
} mpt_optimizer_desc;

/* ---- schedules: pure functions of the number of applied steps ----------------------------------
   A skipped step does not move them. Step s counts from 0 (the first update). With W = warmup_steps
   and T = total_steps, f(s) multiplies the peak rate:

     s <  W         f(W) (c + (1 - c) (s + 1) / (W + 1)), c = warmup_start: never 0, never falls
     s >= W         by kind, with u = (s - W) / (T - W), from 0 to 1:
       constant     1
       step         decay_factor^k, k = milestones <= s (or s / decay_every), counted from step 0
       cosine       e + (1 - e) (1 + cos(pi u)) / 2, e = end_factor (arXiv 1608.03983)
       poly         e + (1 - e) (1 - u)^poly_power
       one-cycle    PyTorch's OneCycleLR over steps W .. T-1: from 1 / div_factor by half a cosine
                    to 1 after pct_start of them, then to 1 / (div_factor final_div_factor) */
typedef enum mpt_schedule_kind {
    MPT_SCHEDULE_CONSTANT = 0,
    MPT_SCHEDULE_STEP,
    MPT_SCHEDULE_COSINE,
    MPT_SCHEDULE_POLY,
    MPT_SCHEDULE_ONE_CYCLE
} mpt_schedule_kind;

typedef struct mpt_schedule_desc {
    mpt_schedule_kind kind;
    int64_t warmup_steps; /* at least 0; for epochs: (int64_t)(epochs * steps_per_epoch + 0.5) */
    float warmup_start;   /* 0 .. 1, fraction of the rate to start from; default: 0 */
    float end_factor;     /* 0 .. 1, what cosine and poly end at; 0 is the default and a wish */
    float decay_factor;   /* above 0, at most 1; default: 0.1 */
    const int64_t
        *milestones;        /* steps, ascending; the caller's, alive as long as the desc is used */
    int num_milestones;     /* kind STEP: either these ... */
    int64_t decay_every;    /* ... or a step every so many steps */
    int poly_power;         /* 1 .. 16, whole: there is no pow() here; default: 2, as with LARS */
    float pct_start;        /* above 0, below 1; default: 0.3 (these three: OneCycleLR's) */
    float div_factor;       /* at least 1; default: 25 */
    float final_div_factor; /* at least 1; default: 10000 */
} mpt_schedule_desc;

/* The rate of the update after applied_steps updates. The desc passes mpt_schedule_check. Past the
   end the rate is that of u = 1. The same bits on every machine: no libm, nothing that fuses. */
MPT_API float mpt_schedule_rate(const mpt_schedule_desc *desc, float learning_rate,
                                int64_t applied_steps, int64_t total_steps);
/* MPT_ERR_INVALID_ARGUMENT, naming field and range. Cosine, poly and one-cycle need total_steps
   above warmup_steps; the others ignore it. ctx may be NULL: then there is no message. */
MPT_API MPT_CHECKED mpt_result mpt_schedule_check(mpt_ctx *ctx, const mpt_schedule_desc *desc,
                                                  int64_t total_steps);
/* Linear scaling rule (Goyal et al. 2017, arXiv 1706.02677): rate * batch / reference_batch. batch
   is all records of one update: ranks x records per rank x accumulation. 0 if either is not above
   0. */
MPT_API float mpt_learning_rate_scale(float learning_rate, int64_t batch, int64_t reference_batch);

/* ---- loss scaling: a pure state machine, usable alone ---------------------------------------- */
typedef enum mpt_loss_scale_mode {
    MPT_LOSS_SCALE_DEFAULT =
        0, /* in a trainer: dynamic if the precision is mixed, else none; alone: dynamic */
    MPT_LOSS_SCALE_DYNAMIC,
    MPT_LOSS_SCALE_STATIC, /* init_scale throughout */
    MPT_LOSS_SCALE_NONE    /* scale 1 */
} mpt_loss_scale_mode;

typedef struct mpt_loss_scaler_desc {
    mpt_loss_scale_mode mode;
    float init_scale;     /* min_scale .. max_scale; default: 65536, brought into that range */
    float growth_factor;  /* above 1; default: 2 */
    float backoff_factor; /* above 0, below 1; default: 0.5 */
    float min_scale;      /* 2^-126 .. 2^127, so never 0, but below 1 if you like; default: 1 */
    float max_scale;      /* min_scale .. 2^127; default: 2^24. Growth beyond it is not applied */
    int growth_interval;  /* good steps in a row before growth, at least 1; default: 2000 */
    int max_skips_at_min; /* skips in a row at the smallest scale before giving up; default: 20 */
} mpt_loss_scaler_desc;

typedef enum mpt_loss_scaler_preset {
    MPT_LOSS_SCALER_APEX =
        0, /* 2^16, x2 after 2000, cap 2^24, as Apex; the floor of 1 is ours. The default */
    MPT_LOSS_SCALER_GRADSCALER, /* torch.amp.GradScaler: 2^16, x2 after 2000, no cap, below 1 too */
    MPT_LOSS_SCALER_KERAS       /* LossScaleOptimizer: 2^15, x2 after 2000, no cap, down to 1 */
} mpt_loss_scaler_preset;
MPT_API mpt_loss_scaler_desc mpt_loss_scaler_desc_preset(mpt_loss_scaler_preset preset);
/* MPT_ERR_INVALID_ARGUMENT, naming field and range. ctx may be NULL: then there is no message. */
MPT_API MPT_CHECKED mpt_result mpt_loss_scaler_check(mpt_ctx *ctx,
                                                     const mpt_loss_scaler_desc *desc);

typedef struct mpt_loss_scaler { /* plain data: copy it to save it */
    mpt_loss_scaler_desc desc;   /* with defaults filled in */
    float scale;                 /* what the loss of the next step is multiplied with */
    int good_steps;              /* in a row since the scale last changed or a step was skipped */
    int skips_at_min;            /* in a row while the scale could not go lower */
    int64_t num_skipped;         /* since init */
} mpt_loss_scaler;

/* desc passes mpt_loss_scaler_check; NULL: all defaults. */
MPT_API void mpt_loss_scaler_init(mpt_loss_scaler *s, const mpt_loss_scaler_desc *desc);
/* Once a step, after the all-reduce and the check. 1: skip this step, i.e. change no weight, no
   momentum, no statistic and no schedule; the scale for the next step may be lower. 0: apply it. */
MPT_API int mpt_loss_scaler_update(mpt_loss_scaler *s, int found_nonfinite);
/* 1: max_skips_at_min skips in a row, and the scale can't go lower: training is stuck, stop it and
   look for the cause (mpt_tensor_autopsy). */
MPT_API int mpt_loss_scaler_is_stuck(const mpt_loss_scaler *s);
/* Takes scale and counters from a saved copy and keeps s->desc; a scale outside its range is
   brought into it, and one of another mode is ignored. MPT_ERR_CORRUPT_DATA for numbers that no
   scaler has (scale not finite or not above 0, negative counters); s is then as it was. */
MPT_API MPT_CHECKED mpt_result mpt_loss_scaler_restore(mpt_loss_scaler *s,
                                                       const mpt_loss_scaler *saved);

/* ---- overflow autopsy: what is in a tensor, and which scale would have fitted ---------------- */
enum { MPT_AUTOPSY_BUCKETS = 64, MPT_AUTOPSY_LOWEST_EXPONENT = -40 };
typedef struct mpt_autopsy {
    int64_t count, num_inf, num_nan, num_zero; /* elements */
    int64_t first_bad;                         /* index of the first inf or NaN; -1: none */
    float max_abs;                             /* largest finite |x| */
    /* bucket b: elements with 2^(b-40) <= |x| < 2^(b-39); the first also holds smaller ones, but
       not zeros, the last also larger ones, but not inf */
    int64_t histogram[MPT_AUTOPSY_BUCKETS];
    float largest_scale;  /* the largest power of two with which max_abs would have fitted; 0: NaN
                              without inf, which no scale cures */
    int largest_is_bound; /* 1: there are infs, whose true size is not known: that scale or lower */
} mpt_autopsy;
/* tensor is F16, BF16 or F32 in host memory and holds values multiplied by scale (finite, above 0);
   storage is the type that they have to fit into (F16: up to 65504). MPT_ERR_INVALID_ARGUMENT for
   other types, a negative dimension, or such a scale. */
MPT_API MPT_CHECKED mpt_result mpt_tensor_autopsy(const mpt_tensor *tensor, float scale,
                                                  mpt_dtype storage, mpt_autopsy *out);

/* ---- safetensors: named tensors in a file that other tools read --------------------------------
   The reader is strict: whatever the format does not allow is MPT_ERR_CORRUPT_DATA, with the file,
   the tensor and the cause. No tensor is read before it is asked for. Files may be hostile. */
enum {
    MPT_SAFETENSORS_MAX_DIMS = 8,
    MPT_SAFETENSORS_MAX_HEADER = 100000000
}; /* the format's limit */
typedef struct mpt_safetensors mpt_safetensors;

typedef struct mpt_safetensors_desc {
    const char *path;
    const mpt_io *io; /* default: files */
} mpt_safetensors_desc;

typedef struct mpt_safetensors_info {
    const char *name;       /* UTF-8; belongs to the reader, as dtype_name does */
    const char *dtype_name; /* as in the file: "F32", "BF16", "F64" ... */
    int has_dtype;          /* 0: none of mpt_dtype; it can still be read, as bytes */
    mpt_dtype dtype;
    int num_dims; /* 0: a scalar; more than MPT_SAFETENSORS_MAX_DIMS are MPT_ERR_UNSUPPORTED */
    int64_t dims[MPT_SAFETENSORS_MAX_DIMS];
    uint64_t count, bytes; /* elements; count * size of one */
    uint64_t offset;       /* bytes from the start of the file */
} mpt_safetensors_info;

MPT_API MPT_CHECKED mpt_result mpt_safetensors_open(mpt_ctx *ctx, const mpt_safetensors_desc *desc,
                                                    mpt_safetensors **out);
MPT_API int64_t mpt_safetensors_count(const mpt_safetensors *s);
/* Tensor 0 .. count-1, in the order in which they lie in the file. INVALID_ARGUMENT beyond. */
MPT_API MPT_CHECKED mpt_result mpt_safetensors_get(mpt_safetensors *s, int64_t index,
                                                   mpt_safetensors_info *out);
/* Its index; -1: there is none of that name. */
MPT_API int64_t mpt_safetensors_find(const mpt_safetensors *s, const char *name);
MPT_API const char *mpt_safetensors_metadata(const mpt_safetensors *s,
                                             const char *key); /* NULL: none */
/* All its bytes, little-endian as in the file; `bytes` must be info.bytes. Storage without seek is
   read in file order, and going back is MPT_ERR_UNSUPPORTED. */
MPT_API MPT_CHECKED mpt_result mpt_safetensors_read(mpt_safetensors *s, int64_t index, void *dst,
                                                    size_t bytes);
/* Reads the whole file once more and compares with the checksum that the writer left, which covers
   every byte of it. MPT_ERR_CORRUPT_DATA: they differ; MPT_ERR_INVALID_STATE: it has none. */
MPT_API MPT_CHECKED mpt_result mpt_safetensors_verify(mpt_safetensors *s);
MPT_API void mpt_safetensors_close(mpt_safetensors *s);

typedef struct mpt_safetensors_writer mpt_safetensors_writer;
typedef struct mpt_safetensors_writer_desc {
    const char *path; /* appears whole, when finish succeeds, or not at all */
    const mpt_io *io; /* default: files */
    int checksum;     /* add a CRC-32C of the file as metadata "mptrain.crc32c", for verify */
} mpt_safetensors_writer_desc;
MPT_API MPT_CHECKED mpt_result mpt_safetensors_writer_open(mpt_ctx *ctx,
                                                           const mpt_safetensors_writer_desc *desc,
                                                           mpt_safetensors_writer **out);
/* name is copied; the tensor's data stay where they are and unchanged until finish. A name is valid
   UTF-8 and not "__metadata__"; finish refuses two of the same. num_dims 0: a scalar. */
MPT_API MPT_CHECKED mpt_result mpt_safetensors_writer_add(mpt_safetensors_writer *w,
                                                          const char *name,
                                                          const mpt_tensor *tensor);
/* Both texts are copied; keys are new. Written in the order of the calls. */
MPT_API MPT_CHECKED mpt_result mpt_safetensors_writer_add_metadata(mpt_safetensors_writer *w,
                                                                   const char *key,
                                                                   const char *value);
/* Writes all: larger types first, then by name, as the format's own library does. The same tensors
   give the same bytes, in whatever order they were added. Then nothing more can be added. */
MPT_API MPT_CHECKED mpt_result mpt_safetensors_writer_finish(mpt_safetensors_writer *w);
MPT_API void
mpt_safetensors_writer_close(mpt_safetensors_writer *w); /* without finish: leaves nothing */

/* ---- the trainer ----------------------------------------------------------------------------- */
/* What is stored and computed in 16 bits. Products of 16-bit numbers are always summed in FP32, and
   batch statistics, the loss and weight gradients are FP32 in all of them.

                weights  masters  batch norm's gamma, beta  activations  loss scale   Apex
     FP32       FP32     -        FP32                      FP32         none         O0
     FP16_CAST  FP32     -        FP32                      FP32, cast   dynamic      O1
     FP16       FP16     FP32     FP32                      FP16         dynamic      O2
     FP16_PURE  FP16     none     FP16                      FP16         none         O3
     BF16       BF16     FP32     FP32                      BF16         none         -

   FP16_CAST turns inputs, weights and output gradients of convolutions and dense layers into FP16
   on their way in. FP16_PURE rounds weights to FP16 after each update, so small updates are lost:
   it shows what masters are for. */
typedef enum mpt_precision {
    MPT_PRECISION_DEFAULT = 0, /* FP16 where the processor converts it in hardware, else FP32 */
    MPT_PRECISION_FP32,
    MPT_PRECISION_FP16_CAST,
    MPT_PRECISION_FP16,
    MPT_PRECISION_FP16_PURE,
    MPT_PRECISION_BF16
} mpt_precision;
typedef enum mpt_switch { MPT_BY_DEFAULT = 0, MPT_YES, MPT_NO } mpt_switch;

typedef struct mpt_trainer_desc {
    mpt_precision precision;
    /* Apex's overrides. Those that make no sense together are MPT_ERR_INVALID_ARGUMENT, as there:
       FP32 and FP16_CAST have neither choice. Without FP32 masters weights are rounded after each
       update; gamma and beta can only be rounded where there are no masters. */
    mpt_switch master_weights, keep_batchnorm_fp32; /* default: as the table says */
    mpt_optimizer_desc optimizer;
    mpt_schedule_desc schedule;
    int64_t total_steps; /* what the schedule runs to; needed by cosine, poly and one-cycle */
    mpt_loss_scaler_desc loss_scaler;
    float label_smoothing; /* 0 .. 1, 1 excluded */
    int accumulate_steps;  /* lanes of this rank in one step; default: 1 */
    int slices;            /* each lane's batch cut into so many equal microbatches; default: 1 */
    uint64_t seed;         /* of initial weights and dropout; 0 is a seed like any other */
} mpt_trainer_desc;

typedef struct mpt_memory_plan { /* bytes, known before anything is allocated */
    size_t weights;         /* what layers compute with */
    size_t master_weights;  /* FP32, where weights are 16 bits */
    size_t gradients;       /* FP32, one row for each level of the summation tree, and statistics */
    size_t optimizer_state; /* FP32 moments */
    size_t activations;     /* outputs of layers, and gradients of these, which share places */
    size_t workspace;       /* scratch of the operators, and casts */
    size_t statistics;      /* FP32 running and batch statistics of batch norm */
    size_t staging;         /* on a device: two slots for batches, there and on the host, and what
                               decides a step */
    size_t bookkeeping;     /* lists and structs, always on the host */
    size_t total;           /* the sum: what mpt_trainer_create takes, to the byte */
} mpt_memory_plan;

typedef struct mpt_step_report {
    double loss;           /* mean over the step's records */
    double seconds;        /* since the report before, or since the trainer was made */
    int64_t step;          /* attempted steps, this one included */
    int64_t applied_steps; /* without the skipped ones */
    int64_t num_samples, num_correct, num_correct_top5;
    float loss_scale;    /* that this step was computed with */
    float learning_rate; /* of this step; 0 if it was skipped */
    float grad_norm;     /* of the unscaled gradient before clipping; 0 if it was skipped */
    int skipped; /* 1: gradients were not finite; nothing changed but a dynamic scale above its
                    minimum, which is lower now; loss may be NaN. Not an error */
} mpt_step_report;

typedef struct mpt_metrics {
    int64_t num_samples, num_correct, num_correct_top5;
    double loss; /* mean */
} mpt_metrics;
typedef struct mpt_trainer mpt_trainer;

/* What will really run: each zero replaced by its default. desc is not checked. */
MPT_API mpt_trainer_desc mpt_trainer_desc_defaults(const mpt_trainer_desc *desc);
/* The memory that a trainer with this desc and batch size (records per lane) takes. */
MPT_API MPT_CHECKED mpt_result mpt_model_plan(mpt_model *m, const mpt_trainer_desc *desc,
                                              int batch_size, mpt_memory_plan *plan);
/* Allocates exactly the plan and draws the initial weights: convolutions by Kaiming's normal with
   fan-out (He et al. 2015), dense layers uniform in +-1/sqrt(fan-in) as PyTorch does, gamma 1, beta
   and biases of convolutions 0. The model must outlive the trainer. */
MPT_API MPT_CHECKED mpt_result mpt_trainer_create(mpt_model *m, const mpt_trainer_desc *desc,
                                                  int batch_size, mpt_trainer **out);
/* One optimizer step on all records of a batch: accumulate for each lane and slice, then apply. On
   a device the step is only begun: out is the report of the step before (out->step tells; 0: there
   was none), and mpt_trainer_sync waits for the last one. */
MPT_API MPT_CHECKED mpt_result mpt_trainer_step(mpt_trainer *t, const mpt_batch *batch,
                                                mpt_step_report *out);
/* Forward and backward on a batch of one or more lanes; accumulate_steps of them at most. */
MPT_API MPT_CHECKED mpt_result mpt_trainer_accumulate(mpt_trainer *t, const mpt_batch *batch);
/* Check, unscale, clip, update: the mean is over the records that came, so fewer lanes than
   accumulate_steps are fine. MPT_ERR_INVALID_STATE if nothing was accumulated, and when the loss
   scale is at its minimum and steps are still skipped: the message names the first bad tensor. */
MPT_API MPT_CHECKED mpt_result mpt_trainer_apply(mpt_trainer *t, mpt_step_report *out);
/* Waits for the device; out is the report of the last step. On the CPU there is nothing to wait
   for. MPT_ERR_INVALID_STATE before the first step. */
MPT_API MPT_CHECKED mpt_result mpt_trainer_sync(mpt_trainer *t, mpt_step_report *out);

/* Why was the last step skipped? Give it that step's batch once more, before the next one (of
   several mpt_trainer_accumulate each of theirs; if nothing is found, their sum overflowed).
   Forward and backward run again, once for each halving down to largest_scale; nothing changes. */
typedef struct mpt_overflow {
    int found;          /* 0: all is finite at this scale; of the rest only scale is set */
    char layer[64];     /* of the first tensor, in the order of computation, with an inf or NaN */
    const char *tensor; /* "output", "gradient of the output", "gradient of the parameters" */
    int64_t index;      /* of its first inf or NaN */
    float scale;        /* that the step ran with */
    mpt_autopsy values; /* of that tensor; its largest_scale is 0 for an "output", which no scale
                           multiplies, and holds for 16-bit storage */
    float largest_scale; /* the largest power of two, at most `scale`, at which nothing overflows;
                            0: none cures it, as the forward pass isn't finite itself (tensor is
                            "output"), or the backward pass makes inf or NaN at every scale */
} mpt_overflow;
MPT_API MPT_CHECKED mpt_result mpt_trainer_autopsy(mpt_trainer *t, const mpt_batch *batch,
                                                   mpt_overflow *out);
/* From where data stands to the end of its epoch, in inference mode. From the beginning, with
   MPT_LAST_BATCH_KEEP and without augmentation, each record counts once, as it is. */
MPT_API MPT_CHECKED mpt_result mpt_evaluate(mpt_trainer *t, mpt_loader *data, mpt_metrics *out);
/* Probabilities (r, classes) of the first lane's r records, row by row: r = lane_valid[0], without
   lane_valid N / num_lanes. Any number of them; the batch needs no labels. */
MPT_API MPT_CHECKED mpt_result mpt_predict(mpt_trainer *t, const mpt_batch *batch,
                                           float *probabilities);
typedef struct mpt_trainer_info {
    int64_t steps;         /* attempted so far, also before a restart */
    int64_t applied_steps; /* without the skipped ones; on a device as of the last report */
    float loss_scale;      /* of the next step; on a device as of the last report */
    const char *backend;   /* "cpu", "cuda" */
    const char *kernels;   /* their family, on which a run's bits depend: "avx2", "sm_80" */
} mpt_trainer_info;
MPT_API mpt_trainer_info mpt_trainer_get_info(const mpt_trainer *t);

/* SHA-256 of all that was learned, as little-endian FP32: parameters in model order, then running
   mean and running variance of each batch norm. 64 hex digits. */
MPT_API MPT_CHECKED mpt_result mpt_trainer_sha256(mpt_trainer *t, char hex[65]);
/* All that goes into the next step; data (may be NULL) with its position. Goes on bit for bit. */
MPT_API MPT_CHECKED mpt_result mpt_trainer_save(mpt_trainer *t, mpt_loader *data, const mpt_io *io,
                                                const char *path);
MPT_API MPT_CHECKED mpt_result mpt_trainer_load(mpt_trainer *t, mpt_loader *data, const mpt_io *io,
                                                const char *path);
/* Weights under PyTorch's names and in its layout (convolutions OIHW), for other programs. */
typedef struct mpt_metadata { /* a pair of texts in a safetensors file */
    const char *key, *value;
} mpt_metadata;
typedef struct mpt_export_desc {
    const char *path;             /* required */
    const mpt_io *io;             /* default: files */
    const mpt_metadata *metadata; /* [num_metadata], beside "format": "pt" */
    int num_metadata;
} mpt_export_desc;
MPT_API MPT_CHECKED mpt_result mpt_trainer_export(mpt_trainer *t, const mpt_export_desc *desc);
/* MPT_ERR_CORRUPT_DATA, naming the tensor, if one is missing or has another shape; tensors that the
   model doesn't know are ignored. Nothing has changed after a failure. */
MPT_API MPT_CHECKED mpt_result mpt_trainer_import(mpt_trainer *t, const mpt_io *io,
                                                  const char *path);
MPT_API void mpt_trainer_destroy(mpt_trainer *t);

/* =================================================================================================
 * >>api-backend   Operators: the table behind every layer
 * =================================================================================================
 *
 * A backend is a table of functions, one for each operator and direction. Layers call it; you need
 * it only to use an operator alone or to bring a backend of your own. Rules for all entries:
 *
 * - Activations are NHWC, filters KRSC, outputs NPQK, dense weights (out, in); the last dimension
 *   runs fastest and nothing is padded. `dtype` is the storage of activations, their gradients and
 *   weights: MPT_F32, MPT_F16 or MPT_BF16. Arithmetic is FP32. float pointers are FP32 always.
 * - n is the capacity of the slice, num_valid (0 .. n) how many of its first slots count. The other
 *   slots are not read; their outputs are written as zeros. A sum over no slot is zero.
 * - Outputs are overwritten. They don't overlap inputs unless the entry says so.
 * - Results depend on shapes and values, never on the number of threads or on what is in other
 *   slots.
 * - Scratch memory comes from the caller: `workspace`, aligned to 64 bytes, of at least the bytes
 *   that the _workspace_bytes entry tells for the same shapes. Nothing is allocated.
 * - inf and NaN pass through as IEEE 754 has it. Shapes are checked, pointers are trusted.
 */

typedef struct mpt_conv2d_args {
    const void *x;     /* (n,h,wd,c); fprop, wgrad */
    const void *w;     /* (k,r,s,c); fprop, dgrad */
    const float *bias; /* (k) or NULL; fprop */
    const void *dy;    /* (n,p,q,k); dgrad, wgrad */
    void *y;           /* (n,p,q,k); fprop */
    void *dx;          /* (n,h,wd,c); dgrad */
    float *dw;         /* (k,r,s,c), FP32; wgrad */
    float *dbias;      /* (k) or NULL; wgrad */
    int n, num_valid;
    int h, wd, c, k, r, s;
    int p, q; /* (h + 2 padding - r) / stride + 1, rounded down; q from wd and s */
    int stride, padding;
    mpt_dtype dtype;
    void *workspace;
    size_t workspace_bytes;
} mpt_conv2d_args;

typedef struct mpt_dense_args {
    const void *x;     /* (n,in); fprop, wgrad */
    const void *w;     /* (out,in); fprop, dgrad */
    const float *bias; /* (out) or NULL; fprop */
    const void *dy;    /* (n,out); dgrad, wgrad */
    void *y;           /* (n,out); fprop */
    void *dx;          /* (n,in); dgrad */
    float *dw;         /* (out,in), FP32; wgrad */
    float *dbias;      /* (out) or NULL; wgrad */
    int n, num_valid;
    int in, out;
    mpt_dtype dtype;
    void *workspace;
    size_t workspace_bytes;
} mpt_dense_args;

/* y = relu(gamma (x - mean) / sqrt(var + epsilon) + beta + residual), relu and residual optional.
   Training normalises with the mean and the biased variance of the valid slots. What it leaves in
   batch_var is the unbiased one, which frameworks keep as running variance (biased where a channel
   has a single value); backward takes batch_mean and batch_inv_std as forward left them. */
typedef struct mpt_batchnorm_args {
    const void *x;             /* (n,h,wd,c) */
    const void *residual;      /* (n,h,wd,c) or NULL; forward */
    void *y;                   /* (n,h,wd,c); forward writes it; backward reads it if relu */
    const float *gamma, *beta; /* (c) */
    const float *running_mean, *running_var; /* (c); inference */
    float *batch_mean, *batch_inv_std;       /* (c); training: out of forward, into backward */
    float *batch_var;                        /* (c); out of forward in training */
    const void *dy;                          /* (n,h,wd,c); backward */
    void *dx;                                /* (n,h,wd,c); backward; may be dy */
    void *dresidual;                         /* (n,h,wd,c) or NULL; backward */
    float *dgamma, *dbeta;                   /* (c); backward */
    int n, num_valid;
    int h, wd, c;
    int training; /* 0: inference, with the running statistics; forward only */
    int relu;
    float epsilon;
    mpt_dtype dtype;
    void *workspace;
    size_t workspace_bytes;
} mpt_batchnorm_args;

/* Pooling windows are square. Maxima: the first of equals in row-major order; a NaN is the maximum.
   Averages divide by kernel * kernel, padding included (PyTorch's count_include_pad=True). Global
   average pooling ignores kernel, stride and padding; p = q = 1. */
typedef struct mpt_pool2d_args {
    const void *x;  /* (n,h,wd,c); forward */
    void *y;        /* (n,p,q,c); forward */
    const void *dy; /* (n,p,q,c); backward */
    void *dx;       /* (n,h,wd,c); backward */
    uint8_t
        *argmax; /* (n,p,q,c), i * kernel + j in the window; out of max_pool_forward unless NULL,
                        into max_pool_backward */
    int n, num_valid;
    int h, wd, c, p, q;
    int kernel, stride, padding; /* kernel at most 16, padding at most kernel / 2 */
    mpt_dtype dtype;
} mpt_pool2d_args;

typedef struct mpt_pointwise_args {
    const void *a, *b; /* (n,per_sample) */
    void *y;           /* (n,per_sample); may be a or b */
    int n, num_valid;
    int64_t per_sample;
    mpt_dtype dtype;
} mpt_pointwise_args;

/* Each element is dropped with `probability`, the others grow by 1 / (1 - probability). The mask is
   a function of (seed, epoch, sample id, layer, element): backward computes it anew. */
typedef struct mpt_dropout_args {
    const void *x;              /* (n,per_sample): x in forward, dy in backward */
    void *y;                    /* (n,per_sample): y in forward, dx in backward; may be x */
    const uint64_t *sample_ids; /* (n); NULL: first_id + the slot's number */
    uint64_t first_id;
    uint64_t seed;
    int64_t epoch; /* or the step, where samples have no ids; 24 bits count */
    int layer;     /* 0 .. 191: number of the dropout layer in its model */
    float probability;
    int n, num_valid;
    int64_t per_sample;
    mpt_dtype dtype;
} mpt_dropout_args;

typedef struct mpt_softmax_stats { /* over the slots that count and have a label */
    double loss;                   /* sum of their losses, unscaled; never negative */
    int64_t num_labeled;
    /* The label's logit is the largest, or among the five largest; of equal logits those of lower
       classes come first. A logit that is NaN is never right. */
    int64_t num_correct, num_correct_top5;
} mpt_softmax_stats;

/* loss = -sum over classes of target * log(softmax(logits)), with target = label_smoothing /
   classes, and 1 - label_smoothing more at the label. Gradient and loss in one pass. */
typedef struct mpt_softmax_xent_args {
    const void *logits; /* (n,classes) */
    const int32_t
        *labels; /* (n), 0 .. classes-1; -1 or NULL: no label, so no loss, a gradient of zero */
    void *dlogits; /* (n,classes) = grad_scale * dloss/dlogits; NULL in evaluation; may be logits */
    float *probabilities;     /* (n,classes) or NULL */
    mpt_softmax_stats *stats; /* added to */
    int n, num_valid, classes;
    float label_smoothing;   /* 0 .. 1 */
    float grad_scale;        /* 1 / number of records in the step, or any other factor */
    const float *loss_scale; /* one more factor, read when the operator runs; NULL: 1 */
    mpt_dtype dtype;
    void *workspace;
    size_t workspace_bytes;
} mpt_softmax_xent_args;

typedef struct mpt_cast_args {
    const void *src;
    void *dst;
    int64_t count;
    mpt_dtype src_dtype, dst_dtype; /* MPT_F32, MPT_F16, MPT_BF16; to 16 bits: nearest even */
} mpt_cast_args;

/* y = (x - mean) / std; a byte counts as x / 255. */
typedef struct mpt_normalize_args {
    const void *x;           /* (n,h,wd,c), src_dtype */
    void *y;                 /* (n,h,wd,c), dtype */
    const float *mean, *std; /* (c); NULL: 0 and 1 */
    int n, num_valid;
    int h, wd, c;
    mpt_dtype src_dtype; /* MPT_U8, MPT_F32, MPT_F16, MPT_BF16 */
    mpt_dtype dtype;
} mpt_normalize_args;

typedef struct mpt_fill_args {
    void *dst;
    int64_t count;
    float value;
    mpt_dtype dtype;
} mpt_fill_args;

typedef struct mpt_copy_args {
    const void *src;
    void *dst;
    size_t bytes;
} mpt_copy_args;

typedef struct mpt_scale_args {
    float *x; /* (count), overwritten with factor * x; with zeros, whatever x was, if factor is 0 */
    int64_t count;
    float factor;
} mpt_scale_args;

/* ---- the end of a step on a device --------------------------------------------------------------
   There the host doesn't wait to learn whether gradients are finite: what decides lies beside them.
   The update looks at the summed row, lets the scaler decide, and unless the step is skipped
   unscales, clips, decays and updates, all as >>optim and >>scaler do it on the CPU. */
typedef struct mpt_step_state { /* lives where the backend computes, from step to step */
    mpt_loss_scaler scaler;     /* its scale is what softmax_xent's loss_scale points to */
    int64_t applied_steps;
    double beta1_power, beta2_power; /* beta^applied_steps, by as many multiplications */
    mpt_softmax_stats stats;         /* of the step under way; the update sets it to zeros */
    mpt_step_report report;          /* of the last update; the host adds `seconds` */
    int64_t first_nonfinite;         /* index in its row; -1: none */
    float multiplier, rate;          /* unscale * clip, and the learning rate, of the last update */
    float step_rate, keep, root;     /* what >>optim makes of the rate: Adam's r / (1 - beta1^t),
                                        AdamW's 1 - r d, Adam's sqrt(1 - beta2^t) */
    int skip;                        /* 1: the last update changed nothing */
} mpt_step_state;

enum { MPT_UPDATE_CHUNK = 16384 }; /* weights: 64 KiB of each buffer; four fit into an L2 */
typedef struct mpt_update_segment { /* a parameter tensor */
    int64_t first_chunk, num_chunks;
    int decays; /* weight decay applies */
    int adapts; /* LARS's ratio applies */
} mpt_update_segment;

typedef struct mpt_update_chunk { /* at most MPT_UPDATE_CHUNK weights of one segment */
    int64_t offset;
    int count, segment;
} mpt_update_chunk;

typedef struct mpt_update_args {
    mpt_step_state *state;
    float *weights;        /* (num_params) FP32 masters */
    const float *row;      /* (num_params) scaled gradients, then (num_stats) of batch norms: for
                              each c sums of n * mean, then c of n * variance */
    float *first, *second; /* (num_params) moments, or NULL where the optimizer has none */
    void *half;            /* (num_params) 16-bit copy of the weights, or NULL */
    float *running;        /* (num_stats) */
    const float *momentum; /* (num_stats) of the batch norm that each belongs to */
    const mpt_update_chunk *chunks;     /* [num_chunks], by offset */
    const mpt_update_segment *segments; /* [num_segments] */
    double *sums;  /* (num_chunks, 2) scratch: sums of squares of gradients, and of weights */
    float *ratios; /* (num_segments) scratch: LARS's trust ratios */
    int64_t num_params, num_stats, num_chunks, num_segments;
    mpt_dtype half_dtype;
    mpt_optimizer_desc optimizer; /* with defaults */
    /* of this step */
    int64_t step, num_samples; /* attempted, this one included; records */
    double fitting;            /* what losses were divided by: records that would have fitted */
    int64_t first_applied;     /* rates[i] is the rate for applied_steps = first_applied + i: the */
    float rates[4];            /* host may not know yet whether the steps before were skipped */
} mpt_update_args;

struct mpt_backend {
    const char *name;
    mpt_result (*open)(mpt_ctx *ctx, int device, void **self);
    void (*close)(void *self);
    const char *(*kernels)(void *self); /* name of the family of kernels it chose, static text */

    size_t (*conv2d_fprop_workspace_bytes)(void *self, const mpt_conv2d_args *a);
    size_t (*conv2d_dgrad_workspace_bytes)(void *self, const mpt_conv2d_args *a);
    size_t (*conv2d_wgrad_workspace_bytes)(void *self, const mpt_conv2d_args *a);
    mpt_result (*conv2d_fprop)(void *self, const mpt_conv2d_args *a);
    mpt_result (*conv2d_dgrad)(void *self, const mpt_conv2d_args *a);
    mpt_result (*conv2d_wgrad)(void *self, const mpt_conv2d_args *a);

    size_t (*dense_fprop_workspace_bytes)(void *self, const mpt_dense_args *a);
    size_t (*dense_dgrad_workspace_bytes)(void *self, const mpt_dense_args *a);
    size_t (*dense_wgrad_workspace_bytes)(void *self, const mpt_dense_args *a);
    mpt_result (*dense_fprop)(void *self, const mpt_dense_args *a);
    mpt_result (*dense_dgrad)(void *self, const mpt_dense_args *a);
    mpt_result (*dense_wgrad)(void *self, const mpt_dense_args *a);

    size_t (*batchnorm_forward_workspace_bytes)(void *self, const mpt_batchnorm_args *a);
    size_t (*batchnorm_backward_workspace_bytes)(void *self, const mpt_batchnorm_args *a);
    mpt_result (*batchnorm_forward)(void *self, const mpt_batchnorm_args *a);
    mpt_result (*batchnorm_backward)(void *self, const mpt_batchnorm_args *a);

    mpt_result (*relu_forward)(void *self,
                               const mpt_pointwise_args *a); /* y = max(a, 0); b unused */
    mpt_result (*relu_backward)(void *self,
                                const mpt_pointwise_args *a);   /* a: relu's output, b: dy */
    mpt_result (*add)(void *self, const mpt_pointwise_args *a); /* y = a + b; y = a accumulates b */

    mpt_result (*max_pool_forward)(void *self, const mpt_pool2d_args *a);
    mpt_result (*max_pool_backward)(void *self, const mpt_pool2d_args *a);
    mpt_result (*avg_pool_forward)(void *self, const mpt_pool2d_args *a);
    mpt_result (*avg_pool_backward)(void *self, const mpt_pool2d_args *a);
    mpt_result (*global_avg_pool_forward)(void *self, const mpt_pool2d_args *a);
    mpt_result (*global_avg_pool_backward)(void *self, const mpt_pool2d_args *a);

    mpt_result (*dropout_forward)(void *self, const mpt_dropout_args *a);
    mpt_result (*dropout_backward)(void *self, const mpt_dropout_args *a);

    size_t (*softmax_xent_workspace_bytes)(void *self, const mpt_softmax_xent_args *a);
    mpt_result (*softmax_xent)(void *self, const mpt_softmax_xent_args *a);

    mpt_result (*cast)(void *self, const mpt_cast_args *a);
    mpt_result (*input_normalize)(void *self, const mpt_normalize_args *a);
    mpt_result (*fill)(void *self, const mpt_fill_args *a);
    mpt_result (*copy)(void *self, const mpt_copy_args *a);
    mpt_result (*scale)(void *self, const mpt_scale_args *a);

    /* The rest is for backends whose memory is not the host's, and NULL elsewhere. Pointers in the
       arguments of operators are to such memory; an operator has only begun when its entry
       returns, and they run in the order in which they were begun. */
    mpt_result (*alloc)(void *self, size_t bytes, void **out); /* aligned to 256 bytes */
    void (*free)(void *self, void *p);
    /* src may be used again at once */
    mpt_result (*upload)(void *self, void *dst, const void *src, size_t bytes);
    /* waits for all that was begun before */
    mpt_result (*download)(void *self, void *dst, const void *src, size_t bytes);
    /* Two slots in turn, so that a batch travels while the one before is worked on. begin: host
       memory to fill, `bytes` at most as reserved; end: where operators that begin from now on can
       read the same bytes, until the next begin. */
    mpt_result (*stage_reserve)(void *self, size_t bytes);
    mpt_result (*stage_begin)(void *self, void **host);
    mpt_result (*stage_end)(void *self, size_t bytes, void **data);
    /* Operators between begin and end are not run but recorded, with their arguments; replay runs
       them all. Each end, also one after a failure, has its forget. */
    mpt_result (*record_begin)(void *self);
    mpt_result (*record_end)(void *self, void **recording);
    mpt_result (*replay)(void *self, void *recording);
    void (*forget)(void *self, void *recording);
    void *(*stream)(void *self); /* that operators run on, for custom layers */
    mpt_result (*update)(void *self, const mpt_update_args *a);
    /* Waits for the update of that step, one of the last two; out: the state it left. */
    mpt_result (*update_wait)(void *self, int64_t step, mpt_step_state *out);
};

MPT_API const mpt_backend *mpt_backend_cpu(void);
MPT_API const mpt_backend *mpt_backend_cuda(void); /* NULL: built without MPTRAIN_CUDA */

/* ---- what kernels.cu exports --------------------------------------------------------------------
   Each begins an operator on a CUDA stream and returns a cudaError_t. Shapes and pointers must have
   been checked: the CUDA backend does that. Pointers are to device memory, aligned to 16 bytes,
   tensors have less than 2^31 elements. */
int mptk_abi_version(void);        /* MPT_ABI_VERSION that it was compiled with */
const char *mptk_arch_list(void);  /* "70 75 80": what it was compiled for */
/* Which kernel a shape gets, static text: "tensor cores, 128x128 tile", "simt". */
const char *mptk_conv2d_fprop_kernel(const mpt_conv2d_args *a);
const char *mptk_conv2d_dgrad_kernel(const mpt_conv2d_args *a);
const char *mptk_conv2d_wgrad_kernel(const mpt_conv2d_args *a);
size_t mptk_conv2d_fprop_workspace_bytes(const mpt_conv2d_args *a);
size_t mptk_conv2d_dgrad_workspace_bytes(const mpt_conv2d_args *a);
size_t mptk_conv2d_wgrad_workspace_bytes(const mpt_conv2d_args *a);
int mptk_conv2d_fprop(const mpt_conv2d_args *a, void *stream);
int mptk_conv2d_dgrad(const mpt_conv2d_args *a, void *stream);
int mptk_conv2d_wgrad(const mpt_conv2d_args *a, void *stream);
/* fprop that also sums up what it wrote, for batch normalization: partial (stats_rows,2,k) gets
   sums of y - pivot and of their squares, pivot (k) any numbers near the means; to be added in
   order. stats_rows 0: this shape has no such kernel. */
int mptk_conv2d_fprop_stats_rows(const mpt_conv2d_args *a);
int mptk_conv2d_fprop_stats(const mpt_conv2d_args *a, float *partial, const float *pivot,
                            void *stream);
/* y (rows,columns) += bias; sums[column] = sum over rows of x, whose workspace is FP32. */
int mptk_add_bias(void *y, const float *bias, int64_t rows, int columns, mpt_dtype dtype,
                  void *stream);
size_t mptk_sum_columns_workspace_bytes(int64_t rows, int columns);
int mptk_sum_columns(const void *x, float *sums, int64_t rows, int columns, mpt_dtype dtype,
                     void *workspace, void *stream);
size_t mptk_batchnorm_workspace_bytes(const mpt_batchnorm_args *a);
int mptk_batchnorm_forward(const mpt_batchnorm_args *a, void *stream);
int mptk_batchnorm_backward(const mpt_batchnorm_args *a, void *stream);
size_t mptk_softmax_xent_workspace_bytes(const mpt_softmax_xent_args *a);
int mptk_softmax_xent(const mpt_softmax_xent_args *a, void *stream);
int mptk_relu_forward(const mpt_pointwise_args *a, void *stream);
int mptk_relu_backward(const mpt_pointwise_args *a, void *stream);
int mptk_add(const mpt_pointwise_args *a, void *stream);
int mptk_max_pool_forward(const mpt_pool2d_args *a, void *stream);
int mptk_max_pool_backward(const mpt_pool2d_args *a, void *stream);
int mptk_avg_pool_forward(const mpt_pool2d_args *a, void *stream);
int mptk_avg_pool_backward(const mpt_pool2d_args *a, void *stream);
int mptk_global_avg_pool_forward(const mpt_pool2d_args *a, void *stream);
int mptk_global_avg_pool_backward(const mpt_pool2d_args *a, void *stream);
int mptk_dropout(const mpt_dropout_args *a, void *stream); /* either direction */
int mptk_cast(const mpt_cast_args *a, void *stream);
int mptk_input_normalize(const mpt_normalize_args *a, void *stream);
int mptk_fill(const mpt_fill_args *a, void *stream);
int mptk_scale(const mpt_scale_args *a, void *stream);
int mptk_update(const mpt_update_args *a, void *stream);

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
#ifdef MPTRAIN_CUDA
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#endif
#if defined(__GLIBC__) && !defined(__USE_XOPEN2K8)
#error "POSIX 2008 is hidden: include mptrain.h first, or build with -D_POSIX_C_SOURCE=200809L"
#endif
#if defined(__x86_64__) || defined(__i386__)
#define MPTI_X86 1
#include <cpuid.h>
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
 * Shapes:  none yet: this chapter knows bytes and numbers.
 * Tested:  tests/test_base.c; rows, exp and log in tests/test_ops.c
 * Next:    >>tfrecord, which turns bytes into records.
 */

MPT_API const char *mpt_version(void) {
    return MPT_VERSION_STRING;
}

MPT_API const char *mpt_build_info(void) {
    return "mptrain " MPT_VERSION_STRING ", abi 2, options:"
#ifdef MPTRAIN_CUDA
           " cuda"
#endif
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
    err->logged = 0;
    va_start(args, format);
    vsnprintf(err->message, sizeof err->message, format, args);
    va_end(args);
    mpti_clean_message(err->message);
    return code;
}
#define MPTI_FAIL(err, code, ...) mpti_fail_at(err, __FILE__, __LINE__, code, 0, __VA_ARGS__)
#define MPTI_DAMAGED(err, ...) MPTI_FAIL(err, MPT_ERR_CORRUPT_DATA, __VA_ARGS__)
#define MPTI_REFUSED(err, ...) MPTI_FAIL(err, MPT_ERR_UNSUPPORTED, __VA_ARGS__)
#define MPTI_NO_MEMORY(err, ...) MPTI_FAIL(err, MPT_ERR_OUT_OF_MEMORY, __VA_ARGS__)
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
    const mpt_backend *backend;
    void *backend_self;
};

static void mpti_log(const mpt_ctx *ctx, int level, const char *message) {
    if (ctx && ctx->desc.logger.log) ctx->desc.logger.log(level, message, ctx->desc.logger.user);
}

/* Where every public function that failed leaves the library. */
static mpt_result mpti_report(mpt_ctx *ctx, mpt_result rc) {
    if (rc >= 0 || !ctx || ctx->error.logged) return rc; /* one public call may be inside another */
    mpti_log(ctx, MPT_LOG_ERROR, ctx->error.message);
    ctx->error.logged = 1;
    return rc;
}

#define MPTI_REPORT(ctx, code, ...) mpti_report(ctx, MPTI_FAIL(&(ctx)->error, code, __VA_ARGS__))

MPT_API const mpt_error *mpt_last_error(const mpt_ctx *ctx) {
    static const mpt_error no_context = {MPT_OK, 0, NULL, NULL, 0, "no context", 0};
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

static int64_t mpti_min64(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t mpti_max64(int64_t a, int64_t b) { return a > b ? a : b; }
static int mpti_min_int(int a, int b) { return a < b ? a : b; }
static int mpti_max_int(int a, int b) { return a > b ? a : b; }

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

/* false: no memory; b is as it was */
static bool mpti_buffer_reserve(mpti_buffer *b, size_t more) {
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
    MPTI_RANDOM_AUGMENT,
    MPTI_RANDOM_INIT
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
    uint32_t mantissa, shift, q, rest, halfway;

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
    halfway = 1u << (shift - 1u);
    if (rest > halfway || (rest == halfway && (q & 1u))) q++;
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

static float mpti_load(mpt_dtype dtype, const void *p, size_t i) {
    if (dtype == MPT_F32) return ((const float *)p)[i];
    if (dtype == MPT_F16) return mpt_f16_to_f32(((const uint16_t *)p)[i]);
    return mpt_bf16_to_f32(((const uint16_t *)p)[i]);
}

static void mpti_store(mpt_dtype dtype, void *p, size_t i, float v) {
    if (dtype == MPT_F32) ((float *)p)[i] = v;
    else if (dtype == MPT_F16) ((uint16_t *)p)[i] = mpt_f32_to_f16(v);
    else ((uint16_t *)p)[i] = mpt_f32_to_bf16(v);
}

static bool mpti_is_nan(float x) {
    return (mpti_f32_bits(x) & 0x7fffffffu) > 0x7f800000u;
}

/* ---- what a field of a desc may be ----------------------------------------------------------- */
/* In bits, since -ffast-math lets a compiler take every isfinite() for true. */
static bool mpti_is_finite(float x) {
    return (mpti_f32_bits(x) & 0x7f800000u) != 0x7f800000u;
}

static bool mpti_is_within(float x, float low, float high) {
    return mpti_is_finite(x) && x >= low && x <= high;
}

#define MPTI_FLT_MAX 3.402823466e38f
#define MPTI_TINY 1e-30f         /* "above 0" */
#define MPTI_ALMOST_1 0.9999999f /* "below 1" */

typedef struct mpti_bound { /* of a field of a desc; a condition is a 1 that must be there */
    float value, low, high;
    const char *rule; /* "momentum must be ..." */
} mpti_bound;

static mpt_result mpti_check_bounds(mpt_error *err, const char *desc, const mpti_bound *bounds,
                                    size_t count) {
    size_t i = 0;

    while (i < count && mpti_is_within(bounds[i].value, bounds[i].low, bounds[i].high)) i++;
    if (i == count) return MPT_OK;
    return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT, "%s.%s", desc, bounds[i].rule);
}

#define MPTI_INLINE static inline __attribute__((always_inline))

/* ---- rows of FP16 and BF16 ----------------------------------------------------------------------
   From a row to FP32 and back; AVX2 and F16C do it eight at a time, with the same bits. */
static void mpti_widen_plain(mpt_dtype dtype, const void *src, float *dst, size_t count) {
    const uint16_t *h = (const uint16_t *)src;
    size_t i;

    if (dtype == MPT_F32) memcpy(dst, src, count * sizeof(float));
    else if (dtype == MPT_F16)
        for (i = 0; i < count; i++) dst[i] = mpt_f16_to_f32(h[i]);
    else
        for (i = 0; i < count; i++) dst[i] = mpt_bf16_to_f32(h[i]);
}

static void mpti_narrow_plain(mpt_dtype dtype, const float *src, void *dst, size_t count) {
    uint16_t *h = (uint16_t *)dst;
    size_t i;

    if (dtype == MPT_F32) memcpy(dst, src, count * sizeof(float));
    else if (dtype == MPT_F16)
        for (i = 0; i < count; i++) h[i] = mpt_f32_to_f16(src[i]);
    else
        for (i = 0; i < count; i++) h[i] = mpt_f32_to_bf16(src[i]);
}

#ifdef MPTI_X86
#define MPTI_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
MPTI_INLINE MPTI_TARGET_AVX2 __m128i mpti_load8_avx2(const uint16_t *p) {
    return _mm_loadu_si128((const __m128i *)(const void *)p);
}

MPTI_INLINE MPTI_TARGET_AVX2 void mpti_store8_avx2(uint16_t *p, __m128i eight) {
    _mm_storeu_si128((__m128i *)(void *)p, eight);
}

static MPTI_TARGET_AVX2 void mpti_widen_avx2(mpt_dtype dtype, const void *src, float *dst,
                                             size_t count) {
    const uint16_t *h = (const uint16_t *)src;
    size_t i = 0;

    if (dtype == MPT_F16) {
        for (; i + 8 <= count; i += 8)
            _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(mpti_load8_avx2(h + i)));
    } else if (dtype == MPT_BF16) {
        for (; i + 8 <= count; i += 8) {
            const __m256i v = _mm256_cvtepu16_epi32(mpti_load8_avx2(h + i));
            _mm256_storeu_ps(dst + i, _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)));
        }
    }
    mpti_widen_plain(dtype, h + i, dst + i, count - i); /* the rest; of FP32, all */
}

/* Eight FP32 to BF16 as mpt_f32_to_bf16 does it, each in the lower half of its lane. */
MPTI_INLINE MPTI_TARGET_AVX2 __m256i mpti_to_bf16_avx2(__m256i u) {
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i magnitude = _mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff));
    const __m256i is_nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
    const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));

    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
}

static MPTI_TARGET_AVX2 void mpti_narrow_avx2(mpt_dtype dtype, const float *src, void *dst,
                                              size_t count) {
    uint16_t *h = (uint16_t *)dst;
    size_t i = 0;

    if (dtype == MPT_F16) {
        for (; i + 8 <= count; i += 8)
            mpti_store8_avx2(h + i, _mm256_cvtps_ph(_mm256_loadu_ps(src + i), 0));
    } else if (dtype == MPT_BF16) {
        for (; i + 8 <= count; i += 8) { /* packing is by halves: lanes 0 and 2 count */
            const __m256i v = mpti_to_bf16_avx2(_mm256_castps_si256(_mm256_loadu_ps(src + i)));
            const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(v, v), 0x08);
            mpti_store8_avx2(h + i, _mm256_castsi256_si128(packed));
        }
    }
    mpti_narrow_plain(dtype, src + i, h + i, count - i); /* the rest; of FP32, all */
}

static bool mpti_has_avx2(void) {
    unsigned eax, ebx, ecx, edx;

    /* Not every compiler knows the name f16c: CPUID leaf 1, bit 29 of ECX. */
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & 1u << 29)) return false;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#endif

/* ---- exp and log --------------------------------------------------------------------------------
   Not libm's, whose last bits differ from one machine to the next. */
static uint64_t mpti_f64_bits(double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static double mpti_f64_from_bits(uint64_t u) {
    double x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* e^x within 1e-11 of itself; 0 below -708, infinity above 709. x = n ln 2 + r with |r| <= ln 2 /
   2, then Taylor's series to r^10 (the rest is below 3e-13). */
static double mpti_exp(double x) {
    static const double inverse[11] = {1.0,         1.0,          1.0 / 2,      1.0 / 6,
                                       1.0 / 24,    1.0 / 120,    1.0 / 720,    1.0 / 5040,
                                       1.0 / 40320, 1.0 / 362880, 1.0 / 3628800};
    const double ln2 = 0.69314718055994530942, infinity = mpti_f64_from_bits(0x7ff0000000000000u);
    double r, sum = inverse[10];
    int n, i;

    if ((mpti_f64_bits(x) & 0x7fffffffffffffffu) > 0x7ff0000000000000u) return x; /* NaN */
    if (x < -708) return 0;
    if (x > 709) return infinity;
    n = (int)(x / ln2 + (x < 0 ? -0.5 : 0.5));
    r = x - n * ln2;
    for (i = 9; i >= 0; i--) sum = sum * r + inverse[i];
    return sum * mpti_f64_from_bits((uint64_t)(n + 1023) << 52);
}

/* Natural logarithm of a normal positive number, within 1e-12 of itself. x = 2^e m with m around 1;
   log m = 2 (t + t^3/3 + t^5/5 + ..) with t = (m-1)/(m+1), |t| < 0.172, to t^15 (the rest is below
   1e-14). 0 gives -infinity; infinity and NaN give themselves. */
static double mpti_ln(double x) {
    uint64_t u = mpti_f64_bits(x);
    int e = (int)(u >> 52) - 1023, i;
    double m, t, sum = 0;

    if (u == 0) return mpti_f64_from_bits(0xfff0000000000000u);
    if (u >= 0x7ff0000000000000u) return x;
    m = mpti_f64_from_bits((u & 0xfffffffffffffu) | 0x3ff0000000000000u);
    if (m > 1.4142135623730951) {
        m /= 2;
        e++;
    }
    t = (m - 1) / (m + 1);
    for (i = 15; i >= 1; i -= 2) sum = sum * t * t + 1.0 / i;
    return e * 0.69314718055994530942 + 2 * t * sum;
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
static double mpti_seconds(void) { /* of a clock that never goes back */
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

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
#define MPTI_PTHREAD(object, call) ((void)(object))
#else
enum { MPTI_HAVE_THREADS = 1 };
typedef pthread_mutex_t mpti_mutex;
typedef pthread_cond_t mpti_cond;
typedef pthread_t mpti_thread;
#define MPTI_PTHREAD(object, call) ((void)(call))
#endif

static void mpti_mutex_init(mpti_mutex *m) { MPTI_PTHREAD(m, pthread_mutex_init(m, NULL)); }
static void mpti_mutex_destroy(mpti_mutex *m) { MPTI_PTHREAD(m, pthread_mutex_destroy(m)); }
static void mpti_mutex_lock(mpti_mutex *m) { MPTI_PTHREAD(m, pthread_mutex_lock(m)); }
static void mpti_mutex_unlock(mpti_mutex *m) { MPTI_PTHREAD(m, pthread_mutex_unlock(m)); }
static void mpti_cond_init(mpti_cond *c) { MPTI_PTHREAD(c, pthread_cond_init(c, NULL)); }
static void mpti_cond_destroy(mpti_cond *c) { MPTI_PTHREAD(c, pthread_cond_destroy(c)); }
static void mpti_cond_wake_all(mpti_cond *c) { MPTI_PTHREAD(c, pthread_cond_broadcast(c)); }
static void mpti_cond_wake_one(mpti_cond *c) { MPTI_PTHREAD(c, pthread_cond_signal(c)); }
static void mpti_thread_join(mpti_thread t) { MPTI_PTHREAD(t, pthread_join(t, NULL)); }

static void mpti_cond_wait(mpti_cond *c, mpti_mutex *m) {
    (void)m;
    MPTI_PTHREAD(c, pthread_cond_wait(c, m));
}

static int mpti_thread_start(mpti_thread *t, void *(*fn)(void *), void *arg) { /* 0 or an errno */
#ifdef MPTRAIN_NO_THREADS
    (void)t, (void)fn, (void)arg;
    return ENOSYS;
#else
    return pthread_create(t, NULL, fn, arg);
#endif
}

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

    if (!p) return MPTI_NO_MEMORY(err, "no memory for the thread pool");
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
            return MPTI_NO_MEMORY(err, "no memory for %d threads", num_threads);
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
        return MPTI_REPORT(ctx, MPT_ERR_INVALID_ARGUMENT,
                           "mpt_parallel_for: num_chunks is negative or fn is NULL");
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
    mpt_result rc;

    if (!out) return MPT_ERR_INVALID_ARGUMENT;
    *out = NULL;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (d.num_threads < 0 || d.num_threads > 1024 || !d.allocator.alloc != !d.allocator.free)
        return MPTI_FAIL(d.error, MPT_ERR_INVALID_ARGUMENT,
                         "mpt_ctx_desc: num_threads must be in 0 .. 1024, and the allocator have "
                         "both functions or neither");
    if (d.num_threads == 0) d.num_threads = mpti_num_cores();
    if (!MPTI_HAVE_THREADS) d.num_threads = 1;
    ctx = (mpt_ctx *)mpti_calloc(&d.allocator, 1, sizeof *ctx);
    if (!ctx) return MPTI_NO_MEMORY(d.error, "no memory for a context");
    ctx->desc = d;
    ctx->backend = d.backend ? d.backend : mpt_backend_cpu();
    rc = ctx->backend->open(ctx, d.device, &ctx->backend_self);
    if (rc) {
        if (d.error) *d.error = ctx->error;
        mpt_ctx_destroy(ctx);
        return rc;
    }
    *out = ctx;
    return MPT_OK;
}

MPT_API void mpt_ctx_destroy(mpt_ctx *ctx) {
    mpt_allocator allocator;

    if (!ctx) return;
    allocator = ctx->desc.allocator;
    if (ctx->backend_self) ctx->backend->close(ctx->backend_self);
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
    static const mpt_io files = {
        mpti_disk_open, mpti_disk_read, mpti_disk_size, mpti_disk_seek, mpti_disk_close,
        mpti_disk_list, mpti_disk_error, mpti_disk_create, mpti_disk_write, mpti_disk_sync,
        mpti_disk_rename, mpti_disk_remove, NULL,
    };
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
            rc = MPTI_DAMAGED(err, "%s: larger than the %llu bytes it may have",
                              mpti_path_tail(path), (unsigned long long)limit);
        else if (!mpti_buffer_reserve(out, 16 * 1024))
            rc = MPTI_NO_MEMORY(err, "%s: no memory to read it", mpti_path_tail(path));
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
    bool exists;
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
    exists = io == mpt_io_files() && stat(path, &status) == 0;
    if (exists && S_ISDIR(status.st_mode))
        rc = mpti_io_fail(err, MPT_ERR_IO, EISDIR, path, "write it", io, NULL); /* not at the end */
    else if (exists && !S_ISREG(status.st_mode)) /* as root, /dev/null would turn into a file */
        rc = MPTI_FAIL(err, MPT_ERR_IO,
                       "%s: can't write it: it is a device or a pipe, which the file would replace",
                       mpti_path_tail(path));
    else if (o->path && o->temporary && o->buffer) rc = mpti_output_create(o, err);
    else rc = MPTI_NO_MEMORY(err, "%s: no memory to write it", mpti_path_tail(path));
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
enum { MPTI_CRC32C_TABLE, MPTI_CRC32C_SINGLE, MPTI_CRC32C_TRIPLE }; /* 1, 8, 3 x 8 bytes a step */

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

static mpti_block *mpti_block_create(const mpt_allocator *a, size_t capacity) { /* or NULL */
    mpti_block *b;
    size_t bytes;

    if (!mpti_add(capacity, sizeof *b, &bytes)) return NULL;
    b = (mpti_block *)mpti_alloc(a, bytes);
    if (!b) return NULL;
    b->references = 1;
    b->bytes = bytes;
    b->capacity = capacity;
    b->data = (uint8_t *)(b + 1);
    b->allocator = a;
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
        return MPTI_NO_MEMORY(err, "%s: no memory for %s", mpti_path_tail(path),
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
                return MPTI_DAMAGED(err, "%s: the %s stream ends in the middle; the file is cut",
                                    where, name);
            s->z.next_in = s->block->data;
            s->z.avail_in = (uInt)n;
        }
        if (s->between && s->kind == MPT_COMPRESSION_ZLIB)
            return MPTI_DAMAGED(err, "%s: the file goes on behind the zlib stream", where);
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
        if (code == Z_MEM_ERROR) return MPTI_NO_MEMORY(err, "%s: no memory for %s", where, name);
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
    return MPTI_REFUSED(err, "%s: %s compression needs a program built with -DMPTRAIN_ZLIB and -lz",
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
    return MPTI_NO_MEMORY(&f->error, "%s: no memory for a block of %llu bytes",
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

    return MPTI_DAMAGED(
        &f->error, "%s: the file is cut: it ends inside the %s, %llu of %llu bytes are missing",
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
        return MPTI_DAMAGED(
            &f->error,
            "%s: length checksum is wrong (stored %08x, computed %08x); where the next "
            "record begins is not known",
            where, stored, computed);
    return MPTI_DAMAGED(
        &f->error,
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
        return MPTI_DAMAGED(&f->error, "%s: its length of %llu bytes is more than a file holds",
                            mpti_tfrecord_where(f, where), (unsigned long long)length);
    bytes = length + MPTI_FRAME_BYTES;
    if (mpti_tfrecord_left(f) < bytes) mpti_file_measure(&f->file); /* it may have grown */
    if (mpti_tfrecord_left(f) < bytes)
        return mpti_tfrecord_cut(f, mpti_tfrecord_left(f), bytes, "record");
    if (length > f->desc.max_record_bytes || length > SIZE_MAX - MPTI_FRAME_BYTES) {
        f->skip_pending = f->resync = true;
        return MPTI_DAMAGED(
            &f->error,
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
    return MPTI_DAMAGED(
        &f->error,
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
    if (!f) return MPTI_NO_MEMORY(err, "no memory for a reader");
    f->allocator = allocator;
    f->desc = resolved;
    f->block_bytes = f->ask = block_bytes;
    f->position.record = -1;
    f->path = mpti_strdup(allocator, resolved.path);
    f->desc.path = f->path;
    rc = f->path ? mpti_file_open(resolved.io, f->path, &f->error, &f->file)
                 : MPTI_NO_MEMORY(&f->error, "no memory for a path");
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
        return MPTI_REFUSED(err, "%s: a file compressed with %s can't be sought in",
                            mpti_path_tail(f->path), mpti_compression_name(f->compression));
    if (record < 0)
        return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT, "mpt_tfrecord_seek: record is negative");
    if (f->file.size >= 0 && offset > (uint64_t)f->file.size)
        return MPTI_DAMAGED(err,
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
        return MPTI_DAMAGED(&f->error,
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
        if (!block) return MPTI_NO_MEMORY(&ctx->error, "no memory for a block");
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
        return MPTI_REPORT(ctx, MPT_ERR_INVALID_ARGUMENT, "mpt_tfrecord_writer_desc.%s", wrong);
    w = (mpt_tfrecord_writer *)mpti_calloc(&ctx->desc.allocator, 1, sizeof *w);
    if (!w) return MPTI_REPORT(ctx, MPT_ERR_OUT_OF_MEMORY, "no memory for a writer");
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
        return MPTI_REPORT(w->ctx, MPT_ERR_INVALID_ARGUMENT,
                           "%s: record %lld: its %llu bytes are more than max_record_bytes (%llu)",
                           mpti_path_tail(w->output.path), (long long)w->record,
                           (unsigned long long)record.size,
                           (unsigned long long)w->max_record_bytes);
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
        return MPTI_NO_MEMORY(err, "%s: no memory for its index", mpti_path_tail(f->path));
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
            return MPTI_DAMAGED(
                err,
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
    return MPTI_DAMAGED(err,
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

    if (!path) return MPTI_NO_MEMORY(err, "no memory for a path");
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

    if (!index) return MPTI_NO_MEMORY(err, "no memory for an index");
    index->allocator = index->offsets.allocator = allocator;
    rc = mpti_tfrecord_open_sized(allocator, desc, MPTI_WALK_BLOCK_BYTES, err, &f);
    if (rc == MPT_OK && f->zlib)
        rc = MPTI_REFUSED(err, "%s: a file compressed with %s can't have an index",
                          mpti_path_tail(f->path), mpti_compression_name(f->compression));
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
        return MPTI_REPORT(ctx, MPT_ERR_INVALID_ARGUMENT, "no index or no path");
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
    const uint8_t *at; /* where it stands */
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
    uint64_t value;

    tag->at = w->p;
    if (!mpti_wire_varint(w, 5, &value)) return false;
    if (value > UINT32_MAX) return mpti_wire_fail(w, tag->at, "a field number is too large");
    tag->field = (uint32_t)value >> 3;
    tag->type = (int)(value & 7);
    return true;
}

/* The tag of a field of a message, where number 0 is forbidden; in unknown groups upb allows it. */
static bool mpti_wire_field(mpti_wire *w, mpti_tag *tag) {
    if (!mpti_wire_tag(w, tag)) return false;
    return tag->field > 0 || mpti_wire_fail(w, tag->at, "a field has number 0");
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

/* Goes on to the next field of type BYTES with a number up to `last`, whose value *sub is; passes
   over all others. MPT_END: the message has no more. */
static mpt_result mpti_wire_next(mpti_wire *w, uint32_t last, mpti_tag *tag, mpti_wire *sub) {
    while (w->p < w->end) {
        if (!mpti_wire_field(w, tag)) return MPT_ERR_CORRUPT_DATA;
        if (tag->type == MPTI_WIRE_BYTES && tag->field <= last)
            return mpti_wire_sub(w, sub) ? MPT_OK : MPT_ERR_CORRUPT_DATA;
        if (!mpti_wire_skip(w, *tag)) return MPT_ERR_CORRUPT_DATA;
    }
    return MPT_END;
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
    mpt_result rc;

    while ((rc = mpti_wire_next(w, MPT_FEATURE_INT64, &tag, &list)) == MPT_OK) {
        if (v->kind != (mpt_feature_kind)tag.field) v->count = 0;
        v->kind = (mpt_feature_kind)tag.field; /* fields and kinds have the same numbers */
        if (!mpti_values_list(&list, v)) return false;
    }
    return rc == MPT_END;
}

/* Fields that a map entry should not have are passed over, as protobuf's C++, which TensorFlow
   runs, does (upb, behind its Python, leaves the whole entry out: a feature would be lost in
   silence). */
static bool mpti_values_entry(mpti_wire *w, mpti_values *v, mpt_bytes *key) {
    mpti_wire sub;
    mpti_tag tag;
    mpt_result rc;

    key->data = w->p; /* no key is an empty key */
    key->size = 0;
    while ((rc = mpti_wire_next(w, 2, &tag, &sub)) == MPT_OK) {
        if (tag.field == 2 && !mpti_values_feature(&sub, v)) return false;
        if (tag.field == 2) continue;
        key->data = sub.p;
        key->size = (size_t)(sub.end - sub.p);
        if (!mpti_utf8_is_valid(*key))
            return mpti_wire_fail(w, tag.at, "a feature's name is no UTF-8");
    }
    return rc == MPT_END;
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
    mpti_values v = {MPT_FEATURE_NONE, MPT_FEATURE_NONE, 0, 0, 0, NULL};
    mpti_wire entry;
    mpti_tag tag;
    mpt_result rc = mpti_wire_next(features, 1, &tag, &entry);

    if (rc != MPT_OK) return rc;
    out->entry.data = entry.p;
    out->entry.size = (size_t)(entry.end - entry.p);
    if (!mpti_values_entry(&entry, &v, &out->name)) return MPT_ERR_CORRUPT_DATA;
    out->kind = v.kind;
    out->count = v.count;
    return MPT_OK;
}

/* The next Features message of an Example; there may be several, whose entries add up. */
static mpt_result mpti_example_features(mpti_wire *w, mpti_wire *features) {
    mpti_tag tag;
    return mpti_wire_next(w, 1, &tag, features);
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
    return MPTI_REPORT(ctx, rc, "not a tf.Example: byte %llu of %llu: %s",
                       (unsigned long long)error.offset, (unsigned long long)example.size,
                       error.cause);
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
    if (!e) return MPTI_REPORT(ctx, MPT_ERR_OUT_OF_MEMORY, "no memory for an Example");
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
        return MPTI_NO_MEMORY(&e->ctx->error, "feature \"%.100s\": no memory", name);
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
    if (!out->pixels && out_of_memory) return MPTI_NO_MEMORY(err, "no memory to decode a picture");
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

    if (!turned) return MPTI_NO_MEMORY(err, "no memory to turn a picture");
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
    if (!to) return MPTI_NO_MEMORY(err, "no memory to decode a picture");
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
    int64_t middle = (int64_t)MPTI_SUBPIXELS * a->out, sum = 0, j;
    int64_t centre = 2 * a->out * a->start + (2 * i + 1) * a->length;
    int64_t low = centre - a->reach + middle;
    int64_t high = (centre + a->reach + middle - 1) / (2 * middle);

    low = low < 0 ? 0 : low / (2 * middle);
    if (high > a->size) high = a->size;
    for (j = low; j < high; j++) sum += a->reach - llabs((2 * j + 1) * middle - centre);
    for (j = low; j < high; j++) {
        int64_t weight = a->reach - llabs((2 * j + 1) * middle - centre); /* below 2^38 */
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
    if (!wy) return MPTI_NO_MEMORY(err, "no memory to resize a picture");
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

typedef enum { MPTI_SAMPLE_DEALT, MPTI_SAMPLE_DECODING, MPTI_SAMPLE_READY } mpti_sample_state;

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

/* A segment being read: one worker at a time reads ahead into the queue, the merge takes from it */
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
#define MPTI_LOADER_ARRAY(ld, type, count, ok) \
    ((type *)mpti_loader_array(ld, count, sizeof(type), ok))
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
    if (l.out_of_memory) return MPTI_NO_MEMORY(err, "no memory for the list of files");
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
        return MPTI_REFUSED(err, "%d files: at most %d, merge some", ld->num_files,
                            MPTI_MAX_FILES - 1);
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
    if (!lengths) rc = MPTI_NO_MEMORY(err, "no memory for the shard lengths");
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

static bool mpti_loader_sum_counts(const mpt_loader *ld, int64_t *sum) { /* false: unknown */
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
    const int64_t scan_limit = 256 << 20; /* bytes: the headers take well under a second */
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
    if (!ld->image_key || !ld->label_key) return MPTI_NO_MEMORY(err, "no memory for the keys");
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
        rc = MPTI_REFUSED(err,
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
        return MPTI_DAMAGED(err, "no record in any of %d files (the first is %s): wrong path?",
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
    int64_t longest = mpti_loader_longest_lane(ld, order), batch = ld->desc.batch_size, sum;

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

    if (!order) return MPTI_NO_MEMORY(err, "no memory for the order of the files");
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
            rc = MPTI_DAMAGED(&error,
                              "%s: record %lld is not where its index has it: make the index anew",
                              path, (long long)s->read_next);
            break;
        }
        rc = mpti_stream_advance(ld, segment, s, item, &record, &error, &resume);
        if (rc == MPT_END && segment->count < 0) return MPT_END;
        if (rc == MPT_END)
            rc = MPTI_DAMAGED(&error,
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
    mpti_sample *bigger = MPTI_LOADER_ARRAY(ld, mpti_sample, lane->ring * 2, &ok);
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
        return MPTI_DAMAGED(err, "feature %s is of kind %s, expected %s", key,
                            mpt_feature_kind_string(f->kind), mpt_feature_kind_string(kind));
    if (f->kind == kind && f->count == 1) return MPT_OK;
    if (f->count > 1)
        return MPTI_DAMAGED(err, "feature %s has %lld values, expected one", key,
                            (long long)f->count);
    if (f->name.data) return MPTI_DAMAGED(err, "feature %s has no value", key);
    mpti_list_features(example, names, sizeof names);
    return MPTI_DAMAGED(err, "no feature %s; there are: %s. Set image_key and label_key", key,
                        names);
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
    if (!whole) return MPTI_NO_MEMORY(err, "no memory for a picture");
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
            return MPTI_DAMAGED(err, "feature %s has %zu bytes, raw pixels %d x %d x %d need %zu",
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
        return MPTI_DAMAGED(err, "no tf.Example: %s at byte %zu", parse.cause, parse.offset);
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
typedef enum { MPTI_JOB_NONE, MPTI_JOB_FILL, MPTI_JOB_COLLATE, MPTI_JOB_DECODE } mpti_job_kind;

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
    if (ld->out_of_memory) return MPTI_NO_MEMORY(err, "no memory for a record or a picture");
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
                return MPTI_DAMAGED(
                    err, "more than %lld bad records (max_bad_records); the last one: %s",
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
    return MPTI_DAMAGED(err,
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
    if (!ok) return MPTI_NO_MEMORY(err, "no memory for the normalisation table");
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
    lane->ring = lane->num_pixels + 2 * batch; /* the two finished batches keep their places */
    lane->segments = MPTI_LOADER_ARRAY(ld, mpti_segment, ld->num_files, &ok);
    lane->streams = MPTI_LOADER_ARRAY(ld, mpti_stream, places, &ok);
    lane->order = MPTI_LOADER_ARRAY(ld, int, places, &ok);
    lane->shuffle = MPTI_LOADER_ARRAY(ld, mpti_item, ld->desc.shuffle_buffer, &ok);
    lane->samples = MPTI_LOADER_ARRAY(ld, mpti_sample, lane->ring, &ok);
    lane->gathered = MPTI_LOADER_ARRAY(ld, mpti_gathered, batch, &ok);
    lane->free_pixels = MPTI_LOADER_ARRAY(ld, uint8_t *, lane->num_pixels, &ok);
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
    batch->labels = MPTI_LOADER_ARRAY(ld, int32_t, slots, &ok);
    batch->ids = MPTI_LOADER_ARRAY(ld, uint64_t, slots, &ok);
    batch->valid = MPTI_LOADER_ARRAY(ld, int32_t, ld->num_lanes, &ok);
    batch->upto = MPTI_LOADER_ARRAY(ld, int64_t, ld->num_lanes, &ok);
    batch->bad = MPTI_LOADER_ARRAY(ld, mpti_bad *, ld->num_lanes, &ok);
    return ok;
}

static mpt_result mpti_loader_make_buffers(mpt_loader *ld, mpt_error *err) {
    int first = ld->desc.rank * (ld->desc.num_lanes / ld->desc.world_size), i;
    bool ok = true;

    ld->num_lanes = ld->desc.num_lanes / ld->desc.world_size;
    ld->lanes = MPTI_LOADER_ARRAY(ld, mpti_lane, ld->num_lanes, &ok);
    for (i = 0; i < ld->num_lanes && ok; i++)
        ok = mpti_loader_make_lane(ld, &ld->lanes[i], first + i);
    for (i = 0; i < 2 && ok; i++) ok = mpti_loader_make_batch(ld, &ld->batches[i]);
    if (ok) return MPT_OK;
    return MPTI_NO_MEMORY(
        err, "no memory for %d lanes of batches of %d pictures: lower batch_size or shuffle_buffer",
        ld->num_lanes, ld->desc.batch_size);
}

static mpt_result mpti_loader_start(mpt_loader *ld, mpt_error *err) {
    int n = ld->desc.num_workers, i;
    bool ok = true;

    ld->workers = MPTI_LOADER_ARRAY(ld, mpti_worker, n > 0 ? n : 1, &ok);
    if (n > 0) ld->threads = MPTI_LOADER_ARRAY(ld, mpti_thread, n, &ok);
    if (!ok) return MPTI_NO_MEMORY(err, "no memory for %d workers", n);
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
    ld->counts = MPTI_LOADER_ARRAY(ld, int64_t, ld->num_files, &ok);
    ld->indexes = MPTI_LOADER_ARRAY(ld, mpt_tfrecord_index *, ld->num_files, &ok);
    if (!ok) return MPTI_NO_MEMORY(err, "no memory for %d files", ld->num_files);
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
    if (!ld) return MPTI_REPORT(ctx, MPT_ERR_OUT_OF_MEMORY, "no memory for a loader");
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
 * Next:    >>tensor, the memory that training works in.
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
    return a->bad ? MPTI_DAMAGED(err, "the loader's state is damaged") : MPT_OK;
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
        return MPTI_REPORT(ld->ctx, MPT_ERR_OUT_OF_MEMORY, "no memory for the loader's state");
    out->data = b->data;
    out->size = b->size;
    return MPT_OK;
}

/* Opens the block at the front of state; its checksum vouches for every number in it. */
static mpt_result mpti_state_open(const mpt_loader *ld, mpt_bytes state, mpti_archive *a,
                                  mpti_position *p, mpt_error *err) {
    uint64_t size = 0;

    memset(a, 0, sizeof *a);
    memset(p, 0, sizeof *p);
    if (state.size < MPTI_STATE_HEADER || memcmp(state.data, mpti_state_magic, 8) != 0)
        return MPTI_DAMAGED(err, "this is not a loader's state");
    size = mpti_load_u64(state.data + 8);
    if (size < MPTI_STATE_HEADER + 8 || size > state.size ||
        mpt_crc32c(0, state.data, (size_t)size - 8) != mpti_load_u64(state.data + size - 8))
        return MPTI_DAMAGED(err, "the loader's state is damaged (size or checksum)");
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
            if (lane.bad) return MPTI_DAMAGED(err, "the loader's state is damaged");
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
    if (rc == MPT_OK && got.block) { /* a copy of its own: the block holds the neighbours too */
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
        return MPTI_DAMAGED(
            err, "%s: record %lld of the saved position is not there: has the file changed?",
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
    if (!list) return MPTI_NO_MEMORY(err, "no memory for the loader's state");
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
        rc = MPTI_NO_MEMORY(err, "no memory for the loader's state");
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

/* =================================================================================================
 * >>tensor   4 Tensors: arenas
 * =================================================================================================
 *
 * Problem: a training step may not ask for memory, and a run must know before it begins how much it
 *          takes, and for what.
 * Idea:    one arena per purpose, of the planned size, taken at the start; inside it a mark that
 *          goes up and back.
 * Shapes:  base | tensor, zeros up to the alignment | tensor ... | free | capacity
 * Tested:  tests/test_tensor.c
 * Next:    >>cpu, the operators that work on tensors.
 */
enum { MPTI_ALIGNMENT = 64 }; /* a cache line, and a vector of 512 bits */

static size_t mpti_align(size_t bytes) {
    return (bytes + MPTI_ALIGNMENT - 1) / MPTI_ALIGNMENT * MPTI_ALIGNMENT;
}

struct mpt_arena {
    mpt_ctx *ctx;
    mpt_arena_desc desc; /* with defaults */
    bool on_device;      /* memory of the context's backend, zeros from the start */
    uint8_t *base;       /* [capacity_bytes] */
    size_t used;
};

/* Memory of the backend, all zeros. */
static mpt_result mpti_arena_open_device(mpt_arena *a) {
    const mpt_backend *b = a->ctx->backend;
    mpt_fill_args zeros;
    void *base;
    mpt_result rc = b->alloc(a->ctx->backend_self, a->desc.capacity_bytes, &base);

    if (rc) return rc;
    a->base = (uint8_t *)base;
    zeros.dst = base;
    zeros.count = (int64_t)(a->desc.capacity_bytes / sizeof(float));
    zeros.value = 0;
    zeros.dtype = MPT_F32;
    return b->fill(a->ctx->backend_self, &zeros);
}

static mpt_result mpti_arena_open(mpt_ctx *ctx, const mpt_arena_desc *desc, bool on_device,
                                  mpt_arena **out) {
    mpt_arena *a;
    mpt_arena_desc d;
    mpt_result rc = MPT_OK;

    *out = NULL;
    d = *desc;
    if (d.alignment == 0) d.alignment = MPTI_ALIGNMENT;
    if (!d.purpose) d.purpose = "an arena";
    if (d.capacity_bytes == 0 || (d.alignment & (d.alignment - 1)) != 0)
        return MPTI_REPORT(ctx, MPT_ERR_INVALID_ARGUMENT,
                           "mpt_arena_desc: capacity_bytes must be above 0, "
                           "alignment a power of two");
    a = (mpt_arena *)mpti_calloc(&ctx->desc.allocator, 1, sizeof *a);
    if (a) {
        a->ctx = ctx;
        a->desc = d;
        a->on_device = on_device;
        if (on_device) rc = mpti_arena_open_device(a);
        else
            a->base =
                (uint8_t *)mpti_alloc_aligned(&ctx->desc.allocator, d.capacity_bytes, d.alignment);
    }
    if (rc) {
        mpt_arena_destroy(a);
        return mpti_report(ctx, rc);
    }
    if (!a || !a->base) {
        mpt_arena_destroy(a);
        return MPTI_REPORT(ctx, MPT_ERR_OUT_OF_MEMORY, "no memory for %s: %.1f MB", d.purpose,
                           (double)d.capacity_bytes / 1e6);
    }
    *out = a;
    return MPT_OK;
}

MPT_API mpt_result mpt_arena_create(mpt_ctx *ctx, const mpt_arena_desc *desc, mpt_arena **out) {
    if (!ctx || !desc || !out) return MPT_ERR_INVALID_ARGUMENT;
    return mpti_arena_open(ctx, desc, false, out);
}

/* `bytes` of zeros; NULL: they don't fit. */
static void *mpti_arena_take(mpt_arena *a, size_t bytes) {
    size_t align = a->desc.alignment, begin = (a->used + align - 1) & ~(align - 1);

    if (begin < a->used || begin > a->desc.capacity_bytes || bytes > a->desc.capacity_bytes - begin)
        return NULL;
    a->used = begin + bytes;
    return a->on_device ? a->base + begin : memset(a->base + begin, 0, bytes);
}

MPT_API mpt_result mpt_arena_tensor(mpt_arena *a, mpt_dtype dtype, const int64_t *dims,
                                    int num_dims, mpt_tensor *out) {
    size_t bytes = mpt_dtype_size(dtype);
    mpt_tensor t;
    int i;

    if (!a || !out || num_dims < 0 || num_dims > MPT_MAX_DIMS || (num_dims && !dims) || !bytes)
        return MPT_ERR_INVALID_ARGUMENT;
    memset(&t, 0, sizeof t);
    t.dtype = dtype;
    t.num_dims = num_dims;
    for (i = 0; i < num_dims; i++) {
        t.dims[i] = dims[i];
        if (dims[i] < 0)
            return MPTI_REPORT(a->ctx, MPT_ERR_INVALID_ARGUMENT,
                               "mpt_arena_tensor: dims[%d] is negative", i);
        if (!mpti_mul(bytes, (size_t)dims[i], &bytes)) bytes = SIZE_MAX;
    }
    t.data = mpti_arena_take(a, bytes);
    if (!t.data)
        return MPTI_REPORT(a->ctx, MPT_ERR_OUT_OF_MEMORY,
                           "%s: a tensor of %zu bytes doesn't fit: %zu of %zu are taken",
                           a->desc.purpose, bytes, a->used, a->desc.capacity_bytes);
    *out = t;
    return MPT_OK;
}

MPT_API size_t mpt_arena_mark(const mpt_arena *a) { return a ? a->used : 0; }

MPT_API void mpt_arena_release(mpt_arena *a, size_t mark) {
    if (a && mark < a->used) a->used = mark;
}

MPT_API void mpt_arena_destroy(mpt_arena *a) {
    const mpt_allocator *allocator;

    if (!a) return;
    allocator = &a->ctx->desc.allocator;
    if (a->on_device && a->base) a->ctx->backend->free(a->ctx->backend_self, a->base);
    if (!a->on_device) mpti_free(allocator, a->base, a->desc.capacity_bytes);
    mpti_free(allocator, a, sizeof *a);
}

/* =================================================================================================
 * >>cpu   5 CPU ops: convolution, dense, batch norm, pools, dropout, softmax cross entropy
 * =================================================================================================
 * Problem: every operator must be right first, then fast, and give the same bits on 1 or 64
 *          threads.
 * Idea:    a plain loop defines each operator. Where the time goes (convolution and dense) a
 *          blocked one stands beside it: y[i][j] = sum_t sum_c a[i][t][c] * b[t][c][j] on tiles of
 *          registers. Work is cut by shape; what chunks add up meets in a fixed tree.
 * Shapes:  activations (n,h,w,c), filters (k,r,s,c), outputs (n,p,q,k), dense weights (out,in).
 * Tested:  tests/test_ops.c
 * Next:    >>layers, which decides what is called with which memory.
 */

/* ---- kernels, plain -----------------------------------------------------------------------------
   All multiplication happens in one small kernel on FP32, which keeps its sums in registers:
       y[i][j] (+)= sum over u, v of a[u * a_outer + v * a_inner + i * a_row]
                                   * b[u * b_outer + v * b_inner + j]
   with 16 or 8 columns j. In fprop and dgrad rows are pixels, u counts taps and v goes along a run
   of x; in wgrad rows are output channels and (u,v) are pixels. */
typedef struct mpti_product {
    const float *a, *b;
    ptrdiff_t a_outer, a_inner, a_row, b_outer, b_inner; /* in floats */
    int num_outer, num_inner;
    float *y;
    ptrdiff_t y_row;
    int accumulate; /* 1: the whole sum onto what y holds, which rounds less than one long chain */
} mpti_product;

#ifdef __clang__ /* without it the sums stay in memory: 4 to 7 times slower */
#define MPTI_UNROLL _Pragma("clang loop unroll(full)")
#else
#define MPTI_UNROLL _Pragma("GCC unroll 16")
#endif

/* Four lanes: SSE2 and NEON have them, the compiler makes them up elsewhere. */
typedef float mpti_f32x4 __attribute__((vector_size(16), aligned(4), may_alias));
enum { MPTI_PLAIN_ROWS = 3 }; /* 3 rows x 4 vectors: 12 of the 16 registers of SSE2 */

MPTI_INLINE void mpti_product_body_plain(const mpti_product *t, const int rows, const int vectors) {
    const mpti_f32x4 zero = {0, 0, 0, 0};
    mpti_f32x4 sum[MPTI_PLAIN_ROWS * 4];
    int i, j, u, v;

    MPTI_UNROLL for (i = 0; i < rows * 4; i++) sum[i] = zero;
    for (u = 0; u < t->num_outer; u++) {
        const float *a = t->a + u * t->a_outer, *b = t->b + u * t->b_outer;
        for (v = 0; v < t->num_inner; v++, a += t->a_inner, b += t->b_inner) {
            const mpti_f32x4 *w = (const mpti_f32x4 *)(const void *)b;
            MPTI_UNROLL for (i = 0; i < rows; i++) {
                const float s = a[i * t->a_row];
                const mpti_f32x4 four = {s, s, s, s};
                MPTI_UNROLL for (j = 0; j < vectors; j++) sum[i * 4 + j] += four * w[j];
            }
        }
    }
    MPTI_UNROLL for (i = 0; i < rows; i++) {
        mpti_f32x4 *y = (mpti_f32x4 *)(void *)(t->y + i * t->y_row);
        MPTI_UNROLL for (j = 0; j < vectors; j++) {
            if (t->accumulate) sum[i * 4 + j] += y[j];
            y[j] = sum[i * 4 + j];
        }
    }
}

static void mpti_product_plain(const mpti_product *t, int rows, int columns) {
    switch (rows * 100 + columns) { /* constants, so that the sums are registers */
    case 116: mpti_product_body_plain(t, 1, 4); break;
    case 216: mpti_product_body_plain(t, 2, 4); break;
    case 316: mpti_product_body_plain(t, 3, 4); break;
    case 108: mpti_product_body_plain(t, 1, 2); break;
    case 208: mpti_product_body_plain(t, 2, 2); break;
    default: mpti_product_body_plain(t, 3, 2); break;
    }
}

/* ---- kernels, AVX2 ------------------------------------------------------------------------------
   The same with eight lanes and fused multiply-add: 6 rows x 2 vectors, of 16 registers. Compiled
   whatever the compiler's flags, used where the processor has it. */
#ifdef MPTI_X86
enum { MPTI_AVX2_ROWS = 6 };

MPTI_INLINE MPTI_TARGET_AVX2 void mpti_product_body_avx2(const mpti_product *t, const int rows,
                                                         const int vectors) {
    const ptrdiff_t row = t->a_row, a_inner = t->a_inner, b_inner = t->b_inner;
    __m256 sum[MPTI_AVX2_ROWS * 2];
    int i, j, u, v;

    MPTI_UNROLL for (i = 0; i < rows * 2; i++) sum[i] = _mm256_setzero_ps();
    for (u = 0; u < t->num_outer; u++) {
        /* Two bases for six rows: base, base + row, base + 2 row are addresses x86 can form. */
        const float *low = t->a + u * t->a_outer, *high = low + 3 * row, *b = t->b + u * t->b_outer;
        for (v = 0; v < t->num_inner; v++, low += a_inner, high += a_inner, b += b_inner) {
            __m256 w[2];
            MPTI_UNROLL for (j = 0; j < vectors; j++) w[j] = _mm256_loadu_ps(b + 8 * j);
            MPTI_UNROLL for (i = 0; i < rows; i++) {
                const __m256 s = _mm256_broadcast_ss(i < 3 ? low + i * row : high + (i - 3) * row);
                MPTI_UNROLL for (j = 0; j < vectors; j++)
                    sum[i * 2 + j] = _mm256_fmadd_ps(s, w[j], sum[i * 2 + j]);
            }
        }
    }
    MPTI_UNROLL for (i = 0; i < rows; i++) {
        float *y = t->y + i * t->y_row;
        MPTI_UNROLL for (j = 0; j < vectors; j++) {
            if (t->accumulate)
                sum[i * 2 + j] = _mm256_add_ps(sum[i * 2 + j], _mm256_loadu_ps(y + 8 * j));
            _mm256_storeu_ps(y + 8 * j, sum[i * 2 + j]);
        }
    }
}

static MPTI_TARGET_AVX2 void mpti_product_avx2(const mpti_product *t, int rows, int columns) {
    switch (rows * 100 + columns) {
    case 116: mpti_product_body_avx2(t, 1, 2); break;
    case 216: mpti_product_body_avx2(t, 2, 2); break;
    case 316: mpti_product_body_avx2(t, 3, 2); break;
    case 416: mpti_product_body_avx2(t, 4, 2); break;
    case 516: mpti_product_body_avx2(t, 5, 2); break;
    case 616: mpti_product_body_avx2(t, 6, 2); break;
    case 108: mpti_product_body_avx2(t, 1, 1); break;
    case 208: mpti_product_body_avx2(t, 2, 1); break;
    case 308: mpti_product_body_avx2(t, 3, 1); break;
    case 408: mpti_product_body_avx2(t, 4, 1); break;
    case 508: mpti_product_body_avx2(t, 5, 1); break;
    default: mpti_product_body_avx2(t, 6, 1); break;
    }
}

#endif

/* ---- the backend object -------------------------------------------------------------------------
   A family is a choice of functions, made once when the backend is opened. Families may round
   differently; each gives its own bits on any number of threads. */
typedef struct mpti_cpu mpti_cpu;
typedef enum { MPTI_FPROP, MPTI_DGRAD, MPTI_WGRAD } mpti_direction;

typedef struct mpti_cpu_family {
    const char *name;
    bool (*is_supported)(void); /* NULL: everywhere */
    int max_rows;               /* that product takes */
    void (*product)(const mpti_product *t, int rows, int columns);
    void (*widen)(mpt_dtype dtype, const void *src, float *dst, size_t count);
    void (*narrow)(mpt_dtype dtype, const float *src, void *dst, size_t count);
    size_t (*conv2d_bytes)(const mpt_conv2d_args *a, mpti_direction direction);
    mpt_result (*conv2d)(const mpti_cpu *cpu, const mpt_conv2d_args *a, mpti_direction direction);
} mpti_cpu_family;

struct mpti_cpu {
    mpt_ctx *ctx;
    const mpti_cpu_family *family;
};

typedef struct mpti_range { /* items begin .. end-1 of a loop */
    int64_t chunk, begin, end;
} mpti_range;
typedef void (*mpti_range_fn)(const mpti_cpu *cpu, const void *job, mpti_range r);
typedef struct mpti_ranges {
    const mpti_cpu *cpu;
    int64_t items, chunks;
    mpti_range_fn fn;
    const void *job;
} mpti_ranges;

static mpt_result mpti_run_range(int64_t chunk, void *user) {
    const mpti_ranges *all = (const mpti_ranges *)user;
    const mpti_range r = {chunk, all->items * chunk / all->chunks,
                          all->items * (chunk + 1) / all->chunks};

    all->fn(all->cpu, all->job, r);
    return MPT_OK;
}

/* fn on `chunks` ranges that together are 0 .. items-1; at most as many as there are items. */
static mpt_result mpti_for_ranges(const mpti_cpu *cpu, int64_t items, int64_t chunks,
                                  mpti_range_fn fn, const void *job) {
    mpti_ranges all = {cpu, items, mpti_min64(items, chunks), fn, job};
    return mpt_parallel_for(cpu->ctx, all.chunks, mpti_run_range, &all);
}

/* Parts added in pairs, then pairs of pairs: the order is the same whoever computed them. The sum
   is left in part 0. parts: (num_parts,stride), of each the numbers begin .. end-1. */
static void mpti_tree_sum_f32(float *parts, size_t stride, int64_t num_parts, size_t begin,
                              size_t end) {
    int64_t step, i;
    size_t e;

    for (step = 1; step < num_parts; step *= 2) {
        for (i = 0; i + step < num_parts; i += 2 * step) {
            float *to = parts + (size_t)i * stride;
            for (e = begin; e < end; e++) to[e] += to[(size_t)step * stride + e];
        }
    }
}

static void mpti_tree_sum_f64(double *parts, size_t stride, int64_t num_parts) {
    int64_t step, i;
    size_t e;

    for (step = 1; step < num_parts; step *= 2) {
        for (i = 0; i + step < num_parts; i += 2 * step) {
            double *to = parts + (size_t)i * stride;
            for (e = 0; e < stride; e++) to[e] += to[(size_t)step * stride + e];
        }
    }
}

/* ---- rows of any storage type ---------------------------------------------------------------- */
static void mpti_zero(mpt_dtype dtype, void *p, int64_t begin, int64_t end) {
    const size_t size = mpt_dtype_size(dtype);
    if (begin < end) memset((char *)p + (size_t)begin * size, 0, (size_t)(end - begin) * size);
}

/* p[at .. at+count-1] to FP32 and back. */
static void mpti_row_load(const mpti_cpu *cpu, mpt_dtype dtype, const void *p, int64_t at,
                          int64_t count, float *dst) {
    cpu->family->widen(dtype, (const char *)p + (size_t)at * mpt_dtype_size(dtype), dst,
                       (size_t)count);
}

static void mpti_row_store(const mpti_cpu *cpu, mpt_dtype dtype, const float *src, void *p,
                           int64_t at, int64_t count) {
    cpu->family->narrow(dtype, src, (char *)p + (size_t)at * mpt_dtype_size(dtype), (size_t)count);
}

/* The same where it is if it is FP32, else in buffer. */
static const float *mpti_row_read(const mpti_cpu *cpu, mpt_dtype dtype, const void *p, int64_t at,
                                  int64_t count, float *buffer) {
    if (dtype == MPT_F32) return (const float *)p + at;
    mpti_row_load(cpu, dtype, p, at, count, buffer);
    return buffer;
}

/* Elementwise loops work on spans of at most this many numbers, in FP32. */
enum { MPTI_SPAN = 512 };

/* A row of at most a span, with zeros behind. */
static void mpti_span_load(const mpti_cpu *cpu, mpt_dtype dtype, const void *p, int64_t at,
                           int64_t size, float span[MPTI_SPAN]) {
    mpti_row_load(cpu, dtype, p, at, size, span);
    if (size < MPTI_SPAN) memset(span + size, 0, (size_t)(MPTI_SPAN - size) * sizeof(float));
}

/* ---- what every entry checks first ----------------------------------------------------------- */
static bool mpti_is_storage(mpt_dtype dtype) {
    return dtype == MPT_F32 || dtype == MPT_F16 || dtype == MPT_BF16;
}

static mpt_result mpti_op_error(mpt_ctx *ctx, const char *op, const char *what) {
    return MPTI_REPORT(ctx, MPT_ERR_INVALID_ARGUMENT, "%s: %s", op, what);
}

static mpt_result mpti_check_slice(mpt_ctx *ctx, const char *op, int n, int num_valid,
                                   mpt_dtype dtype, double per_sample) {
    if (n < 1 || num_valid < 0 || num_valid > n)
        return mpti_op_error(ctx, op, "n must be at least 1 and num_valid 0 .. n");
    if (!mpti_is_storage(dtype))
        return mpti_op_error(ctx, op, "dtype must be MPT_F32, MPT_F16 or MPT_BF16");
    /* 2^50 elements: no product of sizes overflows 64 bits (a double is exact enough to tell) */
    if (per_sample < 1 || per_sample * n > 1125899906842624.0)
        return mpti_op_error(ctx, op, "a dimension is less than 1, or all together are too large");
    return MPT_OK;
}

/* Sizes up to 2^30: then positions with padding, and steps beyond the end, are ints too. */
static bool mpti_is_size(int size) { return size >= 1 && size <= 1 << 30; }

static mpt_result mpti_check_images(mpt_ctx *ctx, const char *op, int n, int num_valid,
                                    int h, int wd, int c, mpt_dtype dtype) {
    if (!mpti_is_size(h) || !mpti_is_size(wd) || !mpti_is_size(c))
        return mpti_op_error(ctx, op, "h, wd and c must be at least 1 and at most 2^30");
    return mpti_check_slice(ctx, op, n, num_valid, dtype, (double)h * wd * c);
}

static mpt_result mpti_check_workspace(mpt_ctx *ctx, const char *op, const void *workspace,
                                       size_t have, size_t need) {
    if (need == 0 || (workspace && have >= need)) return MPT_OK;
    return MPTI_REPORT(ctx, MPT_ERR_INVALID_ARGUMENT,
                       "%s: the workspace has %zu bytes and needs %zu (see %s_workspace_bytes)", op,
                       workspace ? have : (size_t)0, need, op);
}

/* ---- convolution and dense: the definition ------------------------------------------------------
   What the blocked loops below compute faster, one number at a time. */

/* Where in x, channel 0, is what tap (r,s) of output (n,p,q) meets? -1: in the padding. */
static int64_t mpti_tap_at(const mpt_conv2d_args *a, int n, int p, int q, int r, int s) {
    const int h = p * a->stride - a->padding + r, v = q * a->stride - a->padding + s;

    if (h < 0 || h >= a->h || v < 0 || v >= a->wd) return -1;
    return (((int64_t)n * a->h + h) * a->wd + v) * a->c;
}

static size_t mpti_weight_at(const mpt_conv2d_args *a, int k, int r, int s) { /* channel 0 in w */
    return (((size_t)k * a->r + r) * a->s + s) * a->c;
}

static size_t mpti_output_at(const mpt_conv2d_args *a, int n, int p, int q) { /* channel 0 in y */
    return (((size_t)n * a->p + p) * a->q + q) * a->k;
}

/* y[n,p,q,k] = bias[k] + sum over r,s,c of x[n, p*stride-padding+r, q*stride-padding+s, c] *
   w[k,r,s,c] */
static float mpti_fprop_at(const mpt_conv2d_args *a, int n, int p, int q, int k) {
    float sum = 0;
    int r, s, c;

    if (n >= a->num_valid) return 0;
    for (r = 0; r < a->r; r++) {
        for (s = 0; s < a->s; s++) {
            const int64_t x = mpti_tap_at(a, n, p, q, r, s);
            const size_t w = mpti_weight_at(a, k, r, s);
            for (c = 0; x >= 0 && c < a->c; c++)
                sum += mpti_load(a->dtype, a->x, (size_t)x + c) * mpti_load(a->dtype, a->w, w + c);
        }
    }
    return a->bias ? sum + a->bias[k] : sum;
}

/* dx[n,h,v,c] = sum over r,s,k of dy[n,p,q,k] * w[k,r,s,c], where p * stride - padding + r = h: the
   outputs that x[n,h,v,c] went into. */
static float mpti_dgrad_at(const mpt_conv2d_args *a, int n, int h, int v, int c) {
    float sum = 0;
    int r, s, k;

    if (n >= a->num_valid) return 0;
    for (r = 0; r < a->r; r++) {
        for (s = 0; s < a->s; s++) {
            const int up = h + a->padding - r, left = v + a->padding - s;
            const int p = up / a->stride, q = left / a->stride;
            if (up < 0 || left < 0 || up % a->stride || left % a->stride || p >= a->p || q >= a->q)
                continue;
            for (k = 0; k < a->k; k++)
                sum += mpti_load(a->dtype, a->dy, mpti_output_at(a, n, p, q) + k) *
                       mpti_load(a->dtype, a->w, mpti_weight_at(a, k, r, s) + c);
        }
    }
    return sum;
}

/* dw[k,r,s,c] = sum over n,p,q of x[n, p*stride-padding+r, q*stride-padding+s, c] * dy[n,p,q,k] */
static float mpti_wgrad_at(const mpt_conv2d_args *a, int k, int r, int s, int c) {
    float sum = 0;
    int n, p, q;

    for (n = 0; n < a->num_valid; n++) {
        for (p = 0; p < a->p; p++) {
            for (q = 0; q < a->q; q++) {
                const int64_t x = mpti_tap_at(a, n, p, q, r, s);
                if (x < 0) continue;
                sum += mpti_load(a->dtype, a->x, (size_t)x + c) *
                       mpti_load(a->dtype, a->dy, mpti_output_at(a, n, p, q) + k);
            }
        }
    }
    return sum;
}

static mpt_result mpti_conv2d_define(const mpti_cpu *cpu, const mpt_conv2d_args *a,
                                     mpti_direction direction) {
    const int of_y[4] = {a->n, a->p, a->q, a->k}, of_x[4] = {a->n, a->h, a->wd, a->c};
    const int of_w[4] = {a->k, a->r, a->s, a->c};
    const int *dims = direction == MPTI_FPROP ? of_y : direction == MPTI_DGRAD ? of_x : of_w;
    const size_t outputs = mpti_output_at(a, a->num_valid, 0, 0);
    size_t at = 0;
    int i[4];

    (void)cpu;
    for (i[0] = 0; i[0] < dims[0]; i[0]++)
        for (i[1] = 0; i[1] < dims[1]; i[1]++)
            for (i[2] = 0; i[2] < dims[2]; i[2]++)
                for (i[3] = 0; i[3] < dims[3]; i[3]++, at++) {
                    if (direction == MPTI_WGRAD)
                        a->dw[at] = mpti_wgrad_at(a, i[0], i[1], i[2], i[3]);
                    else if (direction == MPTI_FPROP)
                        mpti_store(a->dtype, a->y, at, mpti_fprop_at(a, i[0], i[1], i[2], i[3]));
                    else mpti_store(a->dtype, a->dx, at, mpti_dgrad_at(a, i[0], i[1], i[2], i[3]));
                }
    if (direction != MPTI_WGRAD || !a->dbias) return MPT_OK;
    memset(a->dbias, 0, (size_t)a->k * sizeof(float)); /* dbias[k]: sum over n,p,q of dy[n,p,q,k] */
    for (at = 0; at < outputs; at++) a->dbias[at % a->k] += mpti_load(a->dtype, a->dy, at);
    return MPT_OK;
}

static size_t mpti_conv2d_define_bytes(const mpt_conv2d_args *a, mpti_direction direction) {
    (void)a, (void)direction;
    return 0;
}

/* ---- convolution, blocked: fprop and dgrad ------------------------------------------------------
   In NHWC the s*c numbers under one row of a filter lie side by side. So a convolution is r taps
   with runs of s*c numbers, whatever the stride, and needs no copy of the input per tap:

       staged band of x, FP32, borders filled in         packed w: panels of 16 (last: 8) outputs
       +--------------------------------------+          [panel][r][s*c][16]
       | row p*stride     [ s*c run ]         |
       |     p*stride+1   [ s*c run ]         |   --->   tile: 6 pixels x 16 outputs in registers
       |     p*stride+2   [ s*c run ]         |
       +--------------------------------------+

   dgrad is the same with dy for x and a turned filter. With a stride, the pixels of dx fall into
   stride * stride phases by what is left of (h + padding, w + padding) / stride; each meets only
   every stride-th tap, and is a convolution of step 1 of its own. Each output number is a sum in
   the order r, s, c, in pieces that follow from the filter: no choice of band changes a bit. */
enum {
    MPTI_CONV_CHUNKS = 32,        /* each has scratch of its own */
    MPTI_BAND_FLOATS = 32 * 1024, /* of a staged band and its results: half of a 256 KiB L2 cache */
    MPTI_RUN_FLOATS = 36 /* numbers of one sum. Longer ones round more: before the last ReLU of
                            resnet20, 3.5e-6 with 384, 2.4e-6 with 96. 36 takes 2 % longer */
};

/* out[j][l] = sum over the taps of the source that begin at row0 + j * step, col0 + l * step */
typedef struct mpti_correlation {
    int phase;                               /* of dgrad */
    int h, w, c;                             /* of the source image */
    int row0, col0, step;                    /* row0, col0 < 0: padding */
    int taps_r, taps_s;                      /* 0: nothing falls here */
    int rows, cols;                          /* of out */
    int dst_row0, dst_col0, dst_step, dst_w; /* out[j][l] is pixel (dst_row0 + j * dst_step, ...) */
    int k;                                   /* numbers per pixel of out */
    int band_rows;
    size_t packed_at, packed_floats; /* within the packed weights */
} mpti_correlation;

static int mpti_panel_width(int k, int k0) { return k - k0 > 8 ? 16 : 8; }

/* The columns of all panels: 16s, and an 8 if that holds the rest. */
static int mpti_panel_end(int k) {
    int rest = k % 16;
    return k - rest + (rest > 8 ? 16 : rest > 0 ? 8 : 0);
}

static size_t mpti_round16(size_t floats) { /* 64 bytes: no two threads write to one cache line */
    return (floats + 15) / 16 * 16;
}

static size_t mpti_staged_floats(const mpti_correlation *g, int rows) {
    return (size_t)((rows - 1) * g->step + g->taps_r) *
           (size_t)((g->cols - 1) * g->step + g->taps_s) * g->c;
}

/* A 1x1 filter of stride 1 sees no rows: the slice is one row of pixels, cut into groups. */
static bool mpti_is_flat(const mpt_conv2d_args *a) {
    return a->r == 1 && a->s == 1 && a->stride == 1 && a->padding == 0;
}

/* What is cut into items: all pixels if flat, else images. */
typedef struct mpti_units {
    int64_t total, valid, x, y; /* how many; numbers of x and of y in one */
} mpti_units;

static mpti_units mpti_conv_units(const mpt_conv2d_args *a) {
    const int64_t pixels = (int64_t)a->h * a->wd, of_image = mpti_is_flat(a) ? pixels : 1;
    const mpti_units u = {a->n * of_image, a->num_valid * of_image, pixels / of_image * a->c,
                          (int64_t)a->p * a->q / of_image * a->k};
    return u;
}

static int mpti_flat_group(const mpt_conv2d_args *a) {
    const int64_t fit = MPTI_BAND_FLOATS / ((int64_t)a->c + a->k);
    return (int)mpti_min64(mpti_conv_units(a).total, mpti_min64(mpti_max64(fit, 48), 192));
}

/* One axis of a phase: u = h + padding = phase + stride * j. Tap i, counted backwards, is the
   filter's r = phase + stride * (taps-1-i) and meets dy's row j - (taps-1) + i. */
static int mpti_phase_axis(int size, int kernel, int stride, int padding, int phase, int *row0,
                           int *dst0, int *count) {
    int taps = phase < kernel ? (kernel - phase + stride - 1) / stride : 0;
    int first = padding > phase ? (padding - phase + stride - 1) / stride : 0;
    int last = size - 1 + padding - phase;

    *count = last < 0 ? 0 : mpti_max_int(last / stride - first + 1, 0);
    *row0 = first - (taps - 1);
    *dst0 = phase + stride * first - padding;
    return taps;
}

static void mpti_geometry(const mpt_conv2d_args *a, bool forward, int phase, mpti_correlation *g) {
    size_t row;

    memset(g, 0, sizeof *g);
    g->phase = phase;
    g->h = forward ? a->h : a->p;
    g->w = forward ? a->wd : a->q;
    g->c = forward ? a->c : a->k;
    g->k = forward ? a->k : a->c;
    g->dst_w = forward ? a->q : a->wd;
    g->step = forward ? a->stride : 1;
    g->dst_step = forward ? 1 : a->stride;
    if (forward) {
        g->row0 = g->col0 = -a->padding;
        g->taps_r = a->r;
        g->taps_s = a->s;
        g->rows = a->p;
        g->cols = a->q;
    } else {
        g->taps_r = mpti_phase_axis(a->h, a->r, a->stride, a->padding, phase / a->stride, &g->row0,
                                    &g->dst_row0, &g->rows);
        g->taps_s = mpti_phase_axis(a->wd, a->s, a->stride, a->padding, phase % a->stride, &g->col0,
                                    &g->dst_col0, &g->cols);
    }
    if (mpti_is_flat(a)) {
        g->h = g->rows = 1;
        g->w = g->cols = g->dst_w = mpti_flat_group(a);
    }
    if (g->rows == 0 || g->cols == 0 || g->taps_s == 0) g->taps_r = 0;
    if (g->taps_r == 0) return;
    row = (size_t)g->step * (size_t)((g->cols - 1) * g->step + g->taps_s) * g->c +
          (size_t)g->cols * mpti_panel_end(g->k);
    g->band_rows = (int)mpti_max64(mpti_min64((int64_t)(MPTI_BAND_FLOATS / row), g->rows), 1);
    g->packed_floats = (size_t)g->taps_r * g->taps_s * g->c * mpti_panel_end(g->k);
}

/* The phases that have taps, one after the other: starts with g->phase -1, false after the last. */
static bool mpti_next_phase(const mpt_conv2d_args *a, bool forward, mpti_correlation *g) {
    const int num_phases = forward ? 1 : a->stride * a->stride;
    const size_t packed_at = g->phase < 0 ? 0 : g->packed_at + mpti_round16(g->packed_floats);
    int phase = g->phase;

    do {
        if (++phase == num_phases) return false;
        mpti_geometry(a, forward, phase, g);
    } while (g->taps_r == 0);
    g->packed_at = packed_at;
    return true;
}

typedef struct mpti_conv_job {
    const mpt_conv2d_args *a;
    bool forward;
    /* what the workspace is for, a function of the shape alone */
    int64_t group, items; /* units of an item */
    size_t packed_floats, slot_floats, bytes;
    float *packed, *slots;
} mpti_conv_job;

static void mpti_conv_plan(const mpt_conv2d_args *a, bool forward, mpti_conv_job *job) {
    mpti_correlation g;

    memset(job, 0, sizeof *job);
    job->a = a;
    job->forward = forward;
    job->group = mpti_is_flat(a) ? mpti_flat_group(a) : 1;
    job->items = (mpti_conv_units(a).total + job->group - 1) / job->group;
    for (g.phase = -1; mpti_next_phase(a, forward, &g);) {
        const size_t slot = mpti_round16(mpti_staged_floats(&g, g.band_rows)) +
                            mpti_round16((size_t)g.band_rows * g.cols * mpti_panel_end(g.k));
        if (slot > job->slot_floats) job->slot_floats = slot;
        job->packed_floats = g.packed_at + mpti_round16(g.packed_floats);
    }
    job->bytes = sizeof(float) * (job->packed_floats + job->slot_floats *
                                  (size_t)mpti_min64(job->items, MPTI_CONV_CHUNKS));
    if (!a->workspace) return; /* only the size is asked for */
    job->packed = (float *)a->workspace;
    job->slots = job->packed + job->packed_floats;
}

/* One panel: (taps_r, taps_s * c, width), zeros where there is no output. */
static void mpti_pack_panel(const mpti_conv_job *job, const mpti_correlation *g, int k0) {
    const mpt_conv2d_args *a = job->a;
    const int width = mpti_panel_width(g->k, k0), st = a->stride;
    float *out = job->packed + g->packed_at + (size_t)k0 * g->taps_r * g->taps_s * g->c;
    int i, j, c, e;

    for (i = 0; i < g->taps_r; i++) {
        for (j = 0; j < g->taps_s; j++) {
            int r = job->forward ? i : g->phase / st + st * (g->taps_r - 1 - i);
            int s = job->forward ? j : g->phase % st + st * (g->taps_s - 1 - j);
            for (c = 0; c < g->c; c++, out += width) {
                for (e = 0; e < width; e++) {
                    int filter = job->forward ? k0 + e : c, channel = job->forward ? c : k0 + e;
                    size_t at = mpti_weight_at(a, filter, r, s) + channel;
                    out[e] = k0 + e < g->k ? mpti_load(a->dtype, a->w, at) : 0;
                }
            }
        }
    }
}

static void mpti_pack_range(const mpti_cpu *cpu, const void *user, mpti_range r) {
    const mpti_conv_job *job = (const mpti_conv_job *)user;
    mpti_correlation g;
    int64_t panel;

    (void)cpu;
    for (g.phase = -1; mpti_next_phase(job->a, job->forward, &g);)
        for (panel = r.begin; panel < r.end; panel++) mpti_pack_panel(job, &g, (int)panel * 16);
}

/* Rows row0 .. and columns col0 .. of the image at src[at] as FP32 (rows,cols,c), zeros outside of
   it: where they are if in_place, else in `staged`. *row_floats: from one row to the next. */
static const float *mpti_stage(const mpti_cpu *cpu, mpt_dtype dtype, const void *src, int64_t at,
                               const mpti_correlation *g, int row0, int rows, bool in_place,
                               float *staged, ptrdiff_t *row_floats) {
    const int cols = (g->cols - 1) * g->step + g->taps_s;
    const int first = mpti_max_int(g->col0, 0), last = mpti_min_int(g->col0 + cols, g->w);
    const size_t row = (size_t)cols * g->c, left = (size_t)(first - g->col0) * g->c;
    const size_t count = first < last ? (size_t)(last - first) * g->c : 0;
    float *out = staged;
    int i;

    *row_floats = in_place ? (ptrdiff_t)g->w * g->c : (ptrdiff_t)row;
    if (in_place) return (const float *)src + at + ((ptrdiff_t)row0 * g->w + g->col0) * g->c;
    for (i = row0; i < row0 + rows; i++, out += row) {
        if (i < 0 || i >= g->h || count == 0) {
            memset(out, 0, row * sizeof(float));
            continue;
        }
        memset(out, 0, left * sizeof(float));
        mpti_row_load(cpu, dtype, src, at + ((int64_t)i * g->w + first) * g->c, (int64_t)count,
                      out + left);
        memset(out + left + count, 0, (row - left - count) * sizeof(float));
    }
    return staged;
}

typedef struct mpti_band {
    const float *a; /* (rows * step + taps_r - 1, a_row) */
    ptrdiff_t a_row;
    int rows;
    float *y; /* out[j][l] at y + j * y_row + l * y_pixel */
    ptrdiff_t y_row, y_pixel;
} mpti_band;

/* Of all panels and rows of a band: `taps` taps, `run` numbers of each, from row b_at of a panel
   on; they meet what begins at a_at in the staged rows. */
static void mpti_band_block(const mpti_cpu *cpu, const mpti_correlation *g, const float *packed,
                            const mpti_band *band, int taps, int run, size_t a_at, size_t b_at) {
    const int most = cpu->family->max_rows, tiles = (g->cols + most - 1) / most; /* nearly equal */
    const size_t depth = (size_t)g->taps_r * g->taps_s * g->c;
    mpti_product t;
    int k0, j, i;

    t.a_outer = band->a_row;
    t.a_inner = 1;
    t.a_row = (ptrdiff_t)g->step * g->c;
    t.num_outer = taps;
    t.num_inner = run;
    t.y_row = band->y_pixel;
    t.accumulate = b_at > 0;
    for (k0 = 0; k0 < g->k; k0 += 16) {
        int width = mpti_panel_width(g->k, k0);
        t.b = packed + k0 * depth + b_at * width;
        t.b_inner = width;
        t.b_outer = (ptrdiff_t)run * width;
        for (j = 0; j < band->rows; j++) {
            for (i = 0; i < tiles; i++) {
                const int l = (int)((int64_t)g->cols * i / tiles);
                const int end = (int)((int64_t)g->cols * (i + 1) / tiles);
                t.a = band->a + j * g->step * band->a_row + l * t.a_row + a_at;
                t.y = band->y + j * band->y_row + l * band->y_pixel + k0;
                cpu->family->product(&t, end - l, width);
            }
        }
    }
}

static void mpti_band_multiply(const mpti_cpu *cpu, const mpti_correlation *g, const float *packed,
                               const mpti_band *band) {
    const int run = g->taps_s * g->c;
    int tap, at, count;

    if ((int64_t)g->taps_r * run <= MPTI_RUN_FLOATS) {
        mpti_band_block(cpu, g, packed, band, g->taps_r, run, 0, 0);
        return;
    }
    for (tap = 0; tap < g->taps_r; tap++) {
        for (at = 0; at < run; at += count) {
            count = mpti_min_int(run - at, MPTI_RUN_FLOATS);
            mpti_band_block(cpu, g, packed, band, 1, count, (size_t)tap * band->a_row + at,
                            (size_t)tap * run + at);
        }
    }
}

/* A band's results in scratch (rows,cols,y_pixel) to the image at dst[at], with bias. */
static void mpti_band_store(const mpti_cpu *cpu, const mpti_conv_job *job,
                            const mpti_correlation *g, const mpti_band *band, int j0, int64_t at) {
    const mpt_conv2d_args *a = job->a;
    const float *bias = job->forward ? a->bias : NULL;
    int j, l, e;

    for (j = 0; j < band->rows; j++) {
        int64_t row = (int64_t)(g->dst_row0 + (j0 + j) * g->dst_step) * g->dst_w + g->dst_col0;
        for (l = 0; l < g->cols; l++) {
            float *y = band->y + j * band->y_row + l * band->y_pixel;
            for (e = 0; bias && e < g->k; e++) y[e] += bias[e];
            mpti_row_store(cpu, a->dtype, y, job->forward ? a->y : a->dx,
                           at + (row + (int64_t)l * g->dst_step) * g->k, g->k);
        }
    }
}

/* One phase of one image, band by band, from src[src_at] to dst[dst_at]. FP32 without borders is
   read in place, FP32 in whole panels is written in place; all else goes through the slot. */
static void mpti_correlate(const mpti_cpu *cpu, const mpti_conv_job *job, const mpti_correlation *g,
                           int64_t src_at, int64_t dst_at, float *slot) {
    const mpt_dtype dtype = job->a->dtype;
    const void *src = job->forward ? job->a->x : job->a->dy;
    float *dst = (float *)(job->forward ? job->a->y : job->a->dx); /* if in_place */
    const bool inside = g->row0 >= 0 && g->row0 + (g->rows - 1) * g->step + g->taps_r <= g->h &&
                        g->col0 >= 0 && g->col0 + (g->cols - 1) * g->step + g->taps_s <= g->w;
    const bool in_place = dtype == MPT_F32 && g->k == mpti_panel_end(g->k) &&
                          !(job->forward && job->a->bias);
    mpti_band band;
    int j0;

    for (j0 = 0; j0 < g->rows; j0 += band.rows) {
        band.rows = mpti_min_int(g->rows - j0, g->band_rows);
        band.a = mpti_stage(cpu, dtype, src, src_at, g, g->row0 + j0 * g->step,
                            (band.rows - 1) * g->step + g->taps_r, dtype == MPT_F32 && inside, slot,
                            &band.a_row);
        band.y = slot + mpti_round16(mpti_staged_floats(g, g->band_rows));
        band.y_pixel = mpti_panel_end(g->k);
        band.y_row = g->cols * band.y_pixel;
        if (in_place) {
            int64_t pixel = (int64_t)(g->dst_row0 + j0 * g->dst_step) * g->dst_w + g->dst_col0;
            band.y = dst + dst_at + pixel * g->k;
            band.y_pixel = (ptrdiff_t)g->dst_step * g->k;
            band.y_row = (ptrdiff_t)g->dst_step * g->dst_w * g->k;
        }
        mpti_band_multiply(cpu, g, job->packed + g->packed_at, &band);
        if (!in_place) mpti_band_store(cpu, job, g, &band, j0, dst_at);
    }
}

static void mpti_conv_range(const mpti_cpu *cpu, const void *user, mpti_range r) {
    const mpti_conv_job *job = (const mpti_conv_job *)user;
    const mpt_conv2d_args *a = job->a;
    const mpti_units u = mpti_conv_units(a);
    const int64_t in = job->forward ? u.x : u.y, out = job->forward ? u.y : u.x;
    const bool has_gaps = !job->forward && (a->r < a->stride || a->s < a->stride);
    int64_t item;

    for (item = r.begin; item < r.end; item++) {
        const int64_t first = item * job->group, last = mpti_min64(first + job->group, u.total);
        const int64_t count = mpti_max64(mpti_min64(last, u.valid) - first, 0);
        mpti_correlation g;
        mpti_zero(a->dtype, job->forward ? a->y : a->dx, (first + (has_gaps ? 0 : count)) * out,
                  last * out);
        for (g.phase = -1; count > 0 && mpti_next_phase(a, job->forward, &g);) {
            if (mpti_is_flat(a)) g.w = g.cols = g.dst_w = (int)count;
            mpti_correlate(cpu, job, &g, first * in, first * out,
                           job->slots + (size_t)r.chunk * job->slot_floats);
        }
    }
}

/* ---- convolution, blocked: wgrad ----------------------------------------------------------------
   dw[k][r][s*c run] is a sum of outer products over pixels: dy's k numbers times the run of x under
   row r of the filter. The slice is cut into up to 8 chunks of images, each with a dw of its own,
   and large filters also by k; the parts meet in a tree. */
enum {
    MPTI_WGRAD_CHUNKS = 8,
    MPTI_WGRAD_PART_FLOATS = 1024 * 1024, /* of all parts together, unless one alone is larger */
    MPTI_WGRAD_BAND_FLOATS = 16 * 1024 /* of x and dy per band: passed over once per tile of dw */
};

typedef struct mpti_wgrad_job {
    const mpt_conv2d_args *a;
    int64_t group, items, image_chunks, filter_chunks; /* group: units of an item */
    int band_rows;                                     /* of dy */
    int run, run_end;
    size_t part_floats; /* dw (k,r,run_end), then dbias (k) */
    size_t x_floats, slot_floats, bytes;
    float *parts, *slots;
} mpti_wgrad_job;

static void mpti_wgrad_plan(const mpt_conv2d_args *a, mpti_wgrad_job *job) {
    const bool flat = mpti_is_flat(a);
    const int64_t pixels = (int64_t)a->n * a->p * a->q, step = a->stride;
    int64_t cols, chunks, band = MPTI_WGRAD_BAND_FLOATS / ((int64_t)a->c + a->k);

    memset(job, 0, sizeof *job);
    job->a = a;
    job->run = a->s * a->c;
    job->run_end = mpti_panel_end(job->run);
    job->part_floats = mpti_round16((size_t)a->k * a->r * job->run_end + a->k);
    job->group = flat ? mpti_min64(pixels, mpti_max64(band, 64)) : 1;
    job->items = (mpti_conv_units(a).total + job->group - 1) / job->group;
    /* A part is cleared, added and copied: worth it only for many pixels. */
    chunks = mpti_min64(mpti_min64(job->items, MPTI_WGRAD_CHUNKS), pixels / 64);
    chunks = mpti_min64(chunks, (int64_t)(MPTI_WGRAD_PART_FLOATS / job->part_floats));
    job->image_chunks = mpti_max64(chunks, 1);
    job->filter_chunks = mpti_min64((a->k + 15) / 16, MPTI_WGRAD_CHUNKS / job->image_chunks);
    cols = flat ? job->group : a->q;
    band = MPTI_WGRAD_BAND_FLOATS / (cols * (step * step * a->c + a->k));
    job->band_rows = (int)mpti_min64(flat ? 1 : a->p, mpti_max64(band, (64 + cols - 1) / cols));
    job->x_floats = (size_t)((job->band_rows - 1) * step + a->r) *
                    (size_t)((cols - 1) * step + a->s) * a->c;
    job->x_floats = mpti_round16(job->x_floats + 16); /* and slack: see mpti_wgrad_band */
    job->slot_floats = job->x_floats + mpti_round16((size_t)job->band_rows * cols * a->k);
    job->bytes = (size_t)job->image_chunks * sizeof(float) *
                 (job->part_floats + (size_t)job->filter_chunks * job->slot_floats);
    if (!a->workspace) return; /* only the size is asked for */
    job->parts = (float *)a->workspace;
    job->slots = job->parts + (size_t)job->image_chunks * job->part_floats;
}

/* Columns behind a run's end get products with the next pixel: the slack behind x keeps those reads
   inside, and nobody looks at these columns. */
static void mpti_wgrad_band(const mpti_cpu_family *f, const mpti_wgrad_job *job, mpti_product *t,
                            const float *x, int k_begin, int k_end, float *part) {
    const mpt_conv2d_args *a = job->a;
    const int count = k_end - k_begin, tiles = (count + f->max_rows - 1) / f->max_rows;
    const float *dy = t->a;
    int r, at, i;

    t->y_row = (ptrdiff_t)a->r * job->run_end;
    for (r = 0; r < a->r; r++) {
        for (at = 0; at < job->run; at += 16) {
            t->b = x + r * (t->b_outer / a->stride) + at;
            for (i = 0; i < tiles; i++) {
                int k = k_begin + (int)((int64_t)count * i / tiles);
                int end = k_begin + (int)((int64_t)count * (i + 1) / tiles);
                t->a = dy + k;
                t->y = part + ((size_t)k * a->r + r) * job->run_end + at;
                f->product(t, end - k, mpti_panel_width(job->run, at));
            }
        }
    }
}

static void mpti_wgrad_bias(const mpti_product *t, int k_begin, int k_end, float *dbias) {
    int u, v, k;

    for (u = 0; u < t->num_outer; u++)
        for (v = 0; v < t->num_inner; v++)
            for (k = k_begin; k < k_end; k++) dbias[k] += t->a[u * t->a_outer + v * t->a_inner + k];
}

/* The item of x[x_at] and dy[dy_at] into a part. */
static void mpti_wgrad_item(const mpti_cpu *cpu, const mpti_wgrad_job *job,
                            const mpti_correlation *g, int64_t x_at, int64_t dy_at, int k_begin,
                            int k_end, float *part, float *slot) {
    const mpt_conv2d_args *a = job->a;
    const bool in_place = a->dtype == MPT_F32 && job->run == job->run_end && a->padding == 0;
    const float *x;
    mpti_product t;
    int p;

    t.a_row = t.accumulate = 1;
    t.a_inner = a->k;
    t.a_outer = (ptrdiff_t)g->cols * a->k;
    t.b_inner = (ptrdiff_t)g->step * a->c;
    for (p = 0; p < g->rows; p += t.num_outer) {
        t.num_outer = mpti_min_int(g->rows - p, job->band_rows);
        t.num_inner = g->cols;
        x = mpti_stage(cpu, a->dtype, a->x, x_at, g, g->row0 + p * g->step,
                       (t.num_outer - 1) * g->step + a->r, in_place, slot, &t.b_outer);
        t.b_outer *= g->step;
        t.a = mpti_row_read(cpu, a->dtype, a->dy, dy_at + p * t.a_outer, t.num_outer * t.a_outer,
                            slot + job->x_floats);
        if (a->dbias)
            mpti_wgrad_bias(&t, k_begin, k_end, part + (size_t)a->k * a->r * job->run_end);
        mpti_wgrad_band(cpu->family, job, &t, x, k_begin, k_end, part);
    }
}

/* A chunk is some items times some filters. */
static void mpti_wgrad_range(const mpti_cpu *cpu, const void *user, mpti_range range) {
    const mpti_wgrad_job *job = (const mpti_wgrad_job *)user;
    const mpt_conv2d_args *a = job->a;
    const mpti_units u = mpti_conv_units(a);
    const int64_t images = range.chunk / job->filter_chunks;
    const int64_t filters = range.chunk % job->filter_chunks;
    const int k_begin = (int)(a->k * filters / job->filter_chunks);
    const int k_end = (int)(a->k * (filters + 1) / job->filter_chunks);
    const size_t filter_floats = (size_t)a->r * job->run_end, count = (size_t)(k_end - k_begin);
    float *part = job->parts + (size_t)images * job->part_floats;
    float *slot = job->slots + (size_t)range.chunk * job->slot_floats;
    int64_t item;

    memset(part + k_begin * filter_floats, 0, count * filter_floats * sizeof(float));
    memset(part + a->k * filter_floats + k_begin, 0, count * sizeof(float));
    memset(slot, 0, job->x_floats * sizeof(float)); /* so that the slack holds numbers */
    for (item = job->items * images / job->image_chunks;
         item < job->items * (images + 1) / job->image_chunks; item++) {
        const int64_t first = item * job->group, last = mpti_min64(first + job->group, u.valid);
        mpti_correlation g;
        if (first >= last) return;
        mpti_geometry(a, true, 0, &g);
        if (mpti_is_flat(a)) g.w = g.cols = (int)(last - first);
        mpti_wgrad_item(cpu, job, &g, first * u.x, first * u.y, k_begin, k_end, part, slot);
    }
}

/* Filters begin .. end-1: adds the parts, drops the padding of the runs. */
static void mpti_wgrad_finish(const mpti_cpu *cpu, const void *user, mpti_range range) {
    const mpti_wgrad_job *job = (const mpti_wgrad_job *)user;
    const mpt_conv2d_args *a = job->a;
    const size_t begin = (size_t)range.begin, end = (size_t)range.end;
    const size_t filter_floats = (size_t)a->r * job->run_end, bias_at = a->k * filter_floats;
    size_t row;

    (void)cpu;
    mpti_tree_sum_f32(job->parts, job->part_floats, job->image_chunks, begin * filter_floats,
                      end * filter_floats);
    for (row = begin * a->r; row < end * a->r; row++)
        memcpy(a->dw + row * job->run, job->parts + row * job->run_end,
               (size_t)job->run * sizeof(float));
    if (!a->dbias) return;
    mpti_tree_sum_f32(job->parts, job->part_floats, job->image_chunks, bias_at + begin,
                      bias_at + end);
    memcpy(a->dbias + begin, job->parts + bias_at + begin, (end - begin) * sizeof(float));
}

static mpt_result mpti_conv2d_blocked(const mpti_cpu *cpu, const mpt_conv2d_args *a,
                                      mpti_direction direction) {
    const bool forward = direction == MPTI_FPROP;
    mpti_wgrad_job wgrad;
    mpti_conv_job job;
    mpt_result rc;

    if (direction == MPTI_WGRAD) {
        mpti_wgrad_plan(a, &wgrad);
        rc = mpti_for_ranges(cpu, wgrad.image_chunks * wgrad.filter_chunks, MPTI_WGRAD_CHUNKS,
                             mpti_wgrad_range, &wgrad);
        return rc ? rc : mpti_for_ranges(cpu, a->k, 16, mpti_wgrad_finish, &wgrad);
    }
    mpti_conv_plan(a, forward, &job);
    rc = mpti_for_ranges(cpu, ((forward ? a->k : a->c) + 15) / 16, MPTI_CONV_CHUNKS,
                         mpti_pack_range, &job);
    return rc ? rc : mpti_for_ranges(cpu, job.items, MPTI_CONV_CHUNKS, mpti_conv_range, &job);
}

static size_t mpti_conv2d_blocked_bytes(const mpt_conv2d_args *a, mpti_direction direction) {
    mpti_wgrad_job wgrad;
    mpti_conv_job conv;

    if (direction == MPTI_WGRAD) {
        mpti_wgrad_plan(a, &wgrad);
        return wgrad.bytes;
    }
    mpti_conv_plan(a, direction == MPTI_FPROP, &conv);
    return conv.bytes;
}

/* ---- convolution and dense: families and entries --------------------------------------------- */
static const mpti_cpu_family mpti_cpu_families[] = {
/* of those supported the first is taken */
#ifdef MPTI_X86
    {"avx2", mpti_has_avx2, MPTI_AVX2_ROWS, mpti_product_avx2, mpti_widen_avx2, mpti_narrow_avx2,
     mpti_conv2d_blocked_bytes, mpti_conv2d_blocked},
#endif
    {"plain", NULL, MPTI_PLAIN_ROWS, mpti_product_plain, mpti_widen_plain, mpti_narrow_plain,
     mpti_conv2d_blocked_bytes, mpti_conv2d_blocked},
    /* For comparison: slow, one thread. */
    {"definition", NULL, MPTI_PLAIN_ROWS, mpti_product_plain, mpti_widen_plain, mpti_narrow_plain,
     mpti_conv2d_define_bytes, mpti_conv2d_define},
};

static mpt_result mpti_check_conv2d(mpt_ctx *ctx, const char *op, const mpt_conv2d_args *a) {
    const int64_t h = a->h + 2 * (int64_t)a->padding, wd = a->wd + 2 * (int64_t)a->padding;
    const double input = (double)h * (double)wd * a->c, output = (double)a->p * a->q * a->k;
    mpt_result rc;

    if (!mpti_is_size(a->h) || !mpti_is_size(a->wd) || a->c < 1 || a->k < 1 || a->r < 1 || a->s < 1)
        return mpti_op_error(
            ctx, op, "h, wd, c, k, r and s must be at least 1, h and wd at most 2^30");
    if (a->stride < 1 || a->stride > 64 || a->padding < 0 || a->padding > 32767 || a->r > 32767 ||
        a->s > 32767)
        return mpti_op_error(
            ctx, op, "stride must be 1 .. 64, padding 0 .. 32767, r and s at most 32767");
    if ((double)a->s * a->c > 1073741824.0 || (double)a->s * a->k > 1073741824.0)
        return mpti_op_error(ctx, op, "s * c and s * k must be at most 2^30");
    if (h < a->r || wd < a->s)
        return mpti_op_error(ctx, op, "the filter is larger than the padded input");
    if (a->p != (h - a->r) / a->stride + 1 || a->q != (wd - a->s) / a->stride + 1)
        return mpti_op_error(ctx, op, "p and q must be (size + 2 * padding - filter) / stride + 1");
    rc = mpti_check_slice(ctx, op, a->n, a->num_valid, a->dtype, input > output ? input : output);
    if (rc) return rc;
    return mpti_check_slice(ctx, op, a->k, 0, a->dtype, (double)a->r * a->s * (a->c + 16.0));
}

static mpt_result mpti_conv2d(void *self, const mpt_conv2d_args *a, mpti_direction direction,
                              const char *op) {
    const mpti_cpu *cpu = (const mpti_cpu *)self;
    mpt_result rc = mpti_check_conv2d(cpu->ctx, op, a);

    if (rc) return rc;
    rc = mpti_check_workspace(cpu->ctx, op, a->workspace, a->workspace_bytes,
                              cpu->family->conv2d_bytes(a, direction));
    return rc ? rc : cpu->family->conv2d(cpu, a, direction);
}

/* 0 for shapes that the entry itself will refuse. */
static size_t mpti_conv2d_bytes(void *self, const mpt_conv2d_args *a, mpti_direction direction) {
    const mpti_cpu *cpu = (const mpti_cpu *)self;

    if (mpti_check_conv2d(cpu->ctx, "workspace_bytes", a)) return 0;
    return cpu->family->conv2d_bytes(a, direction);
}

/* y = x w^T + bias is a 1x1 convolution of images of one pixel; so are its gradients. */
static mpt_conv2d_args mpti_dense_as_conv2d(const mpt_dense_args *a) {
    mpt_conv2d_args c;

    memset(&c, 0, sizeof c);
    c.x = a->x;
    c.w = a->w;
    c.bias = a->bias;
    c.dy = a->dy;
    c.y = a->y;
    c.dx = a->dx;
    c.dw = a->dw;
    c.dbias = a->dbias;
    c.n = a->n;
    c.num_valid = a->num_valid;
    c.h = c.wd = c.r = c.s = c.p = c.q = c.stride = 1;
    c.c = a->in;
    c.k = a->out;
    c.dtype = a->dtype;
    c.workspace = a->workspace;
    c.workspace_bytes = a->workspace_bytes;
    return c;
}

static mpt_result mpti_check_dense(mpt_ctx *ctx, const char *op, const mpt_dense_args *a) {
    if (a->in < 1 || a->out < 1) return mpti_op_error(ctx, op, "in and out must be at least 1");
    return mpti_check_slice(ctx, op, a->n, a->num_valid, a->dtype, (double)a->in + a->out);
}

static mpt_result mpti_dense(void *self, const mpt_dense_args *a, mpti_direction direction,
                             const char *op) {
    mpt_conv2d_args c = mpti_dense_as_conv2d(a);
    mpt_result rc = mpti_check_dense(((const mpti_cpu *)self)->ctx, op, a);

    return rc ? rc : mpti_conv2d(self, &c, direction, op);
}

/* Four entries of the table: mpti_conv2d_fprop, _conv2d_fprop_bytes, _dense_fprop, ... */
#define MPTI_CONV_ENTRIES(name, direction) \
    static mpt_result mpti_conv2d_##name(void *self, const mpt_conv2d_args *a) { \
        return mpti_conv2d(self, a, direction, "conv2d_" #name); \
    } \
    static size_t mpti_conv2d_##name##_bytes(void *self, const mpt_conv2d_args *a) { \
        return mpti_conv2d_bytes(self, a, direction); \
    } \
    static mpt_result mpti_dense_##name(void *self, const mpt_dense_args *a) { \
        return mpti_dense(self, a, direction, "dense_" #name); \
    } \
    static size_t mpti_dense_##name##_bytes(void *self, const mpt_dense_args *a) { \
        mpt_conv2d_args c = mpti_dense_as_conv2d(a); \
        return mpti_conv2d_bytes(self, &c, direction); \
    }
MPTI_CONV_ENTRIES(fprop, MPTI_FPROP)
MPTI_CONV_ENTRIES(dgrad, MPTI_DGRAD)
MPTI_CONV_ENTRIES(wgrad, MPTI_WGRAD)

/* ---- batch norm ---------------------------------------------------------------------------------
   Over the m = num_valid * h * wd values x of a channel, in double (sums of squares of 2^24 numbers
   in FP32 would not do):
       mean = sum(x) / m,  var = sum(x^2) / m - mean^2,  xhat = (x - mean) / sqrt(var + epsilon)
   backward, with g = dy where relu let through:
       dbeta = sum(g),  dgamma = sum(g xhat)
       dx = gamma / sqrt(var + epsilon) (g - dbeta / m - xhat dgamma / m) */
enum { MPTI_BATCHNORM_CHUNKS = 32 };

typedef struct mpti_batchnorm_job {
    const mpt_batchnorm_args *a;
    bool forward;
    int64_t pixels, valid, chunks;        /* n * h * wd, num_valid * h * wd */
    double *parts;                        /* (chunks,2,c) */
    float *mean, *scale, *offset, *slope; /* (c); see the two passes that use them */
} mpti_batchnorm_job;

/* Negative numbers, -0 and -inf included, become 0, NaNs live on. As integers all these are up to
   that of -inf, the NaNs with a sign above. No comparison of floats: -ffast-math would let the
   compiler forget the NaNs. */
static float mpti_relu(float x) {
    const int32_t i = (int32_t)mpti_f32_bits(x);
    return mpti_f32_from_bits((uint32_t)(i & -(i > -0x800000)));
}

static float mpti_relu_gate(float y, float dy) { /* y: what relu gave */
    const int32_t i = (int32_t)mpti_f32_bits(y);
    const int shut = (i <= -0x800000) | (i == 0);
    return mpti_f32_from_bits(shut ? 0u : mpti_f32_bits(dy));
}

static int64_t mpti_batchnorm_chunks(const mpt_batchnorm_args *a) {
    return mpti_min64(((int64_t)a->n * a->h * a->wd + 63) / 64, MPTI_BATCHNORM_CHUNKS);
}

static mpt_result mpti_check_batchnorm(mpt_ctx *ctx, const char *op,
                                       const mpt_batchnorm_args *a) {
    if (!(a->epsilon >= 0)) return mpti_op_error(ctx, op, "epsilon must not be negative");
    return mpti_check_images(ctx, op, a->n, a->num_valid, a->h, a->wd, a->c, a->dtype);
}

static size_t mpti_batchnorm_bytes(void *self, const mpt_batchnorm_args *a) {
    if (mpti_check_batchnorm(((const mpti_cpu *)self)->ctx, "workspace_bytes", a)) return 0;
    return ((size_t)mpti_batchnorm_chunks(a) * 2 * sizeof(double) + 4 * sizeof(float)) *
           (size_t)a->c;
}

static mpt_result mpti_batchnorm_begin(void *self, const char *op, const mpt_batchnorm_args *a,
                                       bool forward, mpti_batchnorm_job *job) {
    const mpti_cpu *cpu = (const mpti_cpu *)self;
    mpt_result rc = mpti_check_batchnorm(cpu->ctx, op, a);
    int c;

    if (rc == MPT_OK)
        rc = mpti_check_workspace(cpu->ctx, op, a->workspace, a->workspace_bytes,
                                  mpti_batchnorm_bytes(self, a));
    if (rc) return rc;
    job->forward = forward;
    job->a = a;
    job->pixels = (int64_t)a->n * a->h * a->wd;
    job->valid = (int64_t)a->num_valid * a->h * a->wd;
    job->chunks = mpti_batchnorm_chunks(a);
    job->parts = (double *)a->workspace;
    job->mean = (float *)(void *)(job->parts + (size_t)job->chunks * 2 * a->c);
    job->scale = job->mean + a->c;
    job->offset = job->scale + a->c;
    job->slope = job->offset + a->c;
    for (c = 0; c < a->c; c++) job->mean[c] = forward ? 0.0f : a->batch_mean[c];
    return MPT_OK;
}

/* Loops over channels are loops over whole spans, in local arrays: compilers make vectors of them.
   A span is `pixels` pixels of all channels, or where these are over MPTI_SPAN one pixel of some;
   per-channel numbers are repeated for each pixel. */
typedef struct mpti_channels {
    int c0, width, pixels;
} mpti_channels;

static mpti_channels mpti_channels_at(int c0, int channels) {
    const mpti_channels s = {c0, mpti_min_int(channels - c0, MPTI_SPAN),
                             mpti_max_int(MPTI_SPAN / channels, 1)};
    return s;
}

static void mpti_span_repeat(const mpti_channels *s, const float *per_channel,
                             float span[MPTI_SPAN]) {
    int pixel;

    memset(span, 0, MPTI_SPAN * sizeof(float));
    for (pixel = 0; pixel < s->pixels; pixel++)
        memcpy(span + pixel * s->width, per_channel + s->c0, (size_t)s->width * sizeof(float));
}

/* dy behind relu, of a span */
static void mpti_batchnorm_gated(const mpti_cpu *cpu, const mpt_batchnorm_args *a, int64_t at,
                                 int64_t size, float g[MPTI_SPAN]) {
    float y[MPTI_SPAN];
    int e;

    mpti_span_load(cpu, a->dtype, a->dy, at, size, g);
    if (!a->relu) return;
    mpti_span_load(cpu, a->dtype, a->y, at, size, y);
    for (e = 0; e < MPTI_SPAN; e++) g[e] = mpti_relu_gate(y[e], g[e]);
}

/* Sums of g and of g * (x - mean). Forward takes x for g and 0 for mean. */
static void mpti_batchnorm_sum_range(const mpti_cpu *cpu, const void *user, mpti_range r) {
    const mpti_batchnorm_job *job = (const mpti_batchnorm_job *)user;
    const mpt_batchnorm_args *a = job->a;
    double *out = job->parts + (size_t)r.chunk * 2 * a->c, sum[MPTI_SPAN], product[MPTI_SPAN];
    float mean[MPTI_SPAN], x[MPTI_SPAN], g[MPTI_SPAN];
    int64_t pixel, last = mpti_min64(r.end, job->valid);
    int c0, e;

    memset(out, 0, (size_t)a->c * 2 * sizeof(double));
    for (c0 = 0; c0 < a->c; c0 += MPTI_SPAN) {
        const mpti_channels s = mpti_channels_at(c0, a->c);
        mpti_span_repeat(&s, job->mean, mean);
        for (e = 0; e < MPTI_SPAN; e++) sum[e] = product[e] = 0;
        for (pixel = r.begin; pixel < last; pixel += s.pixels) {
            const int64_t at = pixel * a->c + c0;
            const int64_t size = mpti_min64(s.pixels, last - pixel) * s.width;
            mpti_span_load(cpu, a->dtype, a->x, at, size, x);
            if (job->forward) memcpy(g, x, sizeof g);
            else mpti_batchnorm_gated(cpu, a, at, size, g);
            for (e = 0; e < MPTI_SPAN; e++) {
                sum[e] += g[e];
                product[e] += (double)g[e] * (double)(x[e] - mean[e]);
            }
        }
        for (e = 0; e < s.pixels * s.width; e++) {
            out[c0 + e % s.width] += sum[e];
            out[a->c + c0 + e % s.width] += product[e];
        }
    }
}

static void mpti_batchnorm_statistics(const mpti_batchnorm_job *job) {
    const mpt_batchnorm_args *a = job->a;
    const double m = (double)job->valid;
    int c;

    mpti_tree_sum_f64(job->parts, (size_t)a->c * 2, job->chunks);
    for (c = 0; c < a->c; c++) {
        const double mean = job->valid ? job->parts[c] / m : 0;
        double var = job->valid ? job->parts[a->c + c] / m - mean * mean : 0;
        if (var < 0) var = 0; /* rounding */
        a->batch_mean[c] = (float)mean;
        a->batch_inv_std[c] = job->valid ? 1.0f / sqrtf((float)var + a->epsilon) : 0.0f;
        a->batch_var[c] = (float)(job->valid > 1 ? var * (m / (m - 1)) : var);
    }
}

/* Forward y = relu((x - mean) * scale + offset + residual), backward dx = scale * (g - offset -
   (x - mean) * slope) and dresidual = g. */
static void mpti_batchnorm_apply_range(const mpti_cpu *cpu, const void *user, mpti_range r) {
    const mpti_batchnorm_job *job = (const mpti_batchnorm_job *)user;
    const mpt_batchnorm_args *a = job->a;
    void *out = job->forward ? a->y : a->dx, *dresidual = job->forward ? NULL : a->dresidual;
    float mean[MPTI_SPAN], scale[MPTI_SPAN], offset[MPTI_SPAN], slope[MPTI_SPAN];
    float x[MPTI_SPAN], g[MPTI_SPAN];
    const int64_t last = mpti_min64(r.end, job->valid), dead = mpti_max64(r.begin, job->valid);
    int64_t pixel;
    int c0, e;

    mpti_zero(a->dtype, out, dead * a->c, r.end * a->c);
    if (dresidual) mpti_zero(a->dtype, dresidual, dead * a->c, r.end * a->c);
    for (c0 = 0; c0 < a->c; c0 += MPTI_SPAN) {
        const mpti_channels s = mpti_channels_at(c0, a->c);
        mpti_span_repeat(&s, job->mean, mean);
        mpti_span_repeat(&s, job->scale, scale);
        mpti_span_repeat(&s, job->offset, offset);
        mpti_span_repeat(&s, job->slope, slope);
        for (pixel = r.begin; pixel < last; pixel += s.pixels) {
            const int64_t at = pixel * a->c + c0;
            const int64_t size = mpti_min64(s.pixels, last - pixel) * s.width;
            mpti_span_load(cpu, a->dtype, a->x, at, size, x);
            if (job->forward) {
                for (e = 0; e < MPTI_SPAN; e++) x[e] = (x[e] - mean[e]) * scale[e] + offset[e];
                if (a->residual) mpti_span_load(cpu, a->dtype, a->residual, at, size, g);
                for (e = 0; a->residual && e < MPTI_SPAN; e++) x[e] += g[e];
                for (e = 0; a->relu && e < MPTI_SPAN; e++) x[e] = mpti_relu(x[e]);
            } else {
                mpti_batchnorm_gated(cpu, a, at, size, g);
                for (e = 0; e < MPTI_SPAN; e++)
                    x[e] = scale[e] * (g[e] - offset[e] - (x[e] - mean[e]) * slope[e]);
            }
            if (dresidual) mpti_row_store(cpu, a->dtype, g, dresidual, at, size);
            mpti_row_store(cpu, a->dtype, x, out, at, size);
        }
    }
}

static mpt_result mpti_batchnorm_forward(void *self, const mpt_batchnorm_args *a) {
    const mpti_cpu *cpu = (const mpti_cpu *)self;
    mpti_batchnorm_job job;
    mpt_result rc = mpti_batchnorm_begin(self, "batchnorm_forward", a, true, &job);
    int c;

    if (rc) return rc;
    if (a->training) {
        rc = mpti_for_ranges(cpu, job.pixels, job.chunks, mpti_batchnorm_sum_range, &job);
        if (rc) return rc;
        mpti_batchnorm_statistics(&job);
    }
    for (c = 0; c < a->c; c++) {
        job.mean[c] = a->training ? a->batch_mean[c] : a->running_mean[c];
        job.scale[c] = a->gamma[c] * (a->training ? a->batch_inv_std[c]
                                                  : 1.0f / sqrtf(a->running_var[c] + a->epsilon));
        job.offset[c] = a->beta[c];
        job.slope[c] = 0;
    }
    return mpti_for_ranges(cpu, job.pixels, job.chunks, mpti_batchnorm_apply_range, &job);
}

static mpt_result mpti_batchnorm_backward(void *self, const mpt_batchnorm_args *a) {
    const mpti_cpu *cpu = (const mpti_cpu *)self;
    mpti_batchnorm_job job;
    mpt_result rc = mpti_batchnorm_begin(self, "batchnorm_backward", a, false, &job);
    double m;
    int c;

    if (rc) return rc;
    rc = mpti_for_ranges(cpu, job.pixels, job.chunks, mpti_batchnorm_sum_range, &job);
    if (rc) return rc;
    mpti_tree_sum_f64(job.parts, (size_t)a->c * 2, job.chunks);
    m = job.valid ? (double)job.valid : 1;
    for (c = 0; c < a->c; c++) {
        const double inv_std = a->batch_inv_std[c], dbeta = job.parts[c];
        const double dgamma = job.parts[a->c + c] * inv_std;
        a->dbeta[c] = (float)dbeta;
        a->dgamma[c] = (float)dgamma;
        job.scale[c] = a->gamma[c] * a->batch_inv_std[c];
        job.offset[c] = (float)(dbeta / m);
        job.slope[c] = (float)(dgamma * inv_std / m);
    }
    return mpti_for_ranges(cpu, job.pixels, job.chunks, mpti_batchnorm_apply_range, &job);
}

/* ---- pools --------------------------------------------------------------------------------------
   Forward gathers a window of x for each output, backward gathers for each element of x the outputs
   whose windows held it: sums in FP32, no two threads at one number. */
typedef struct mpti_pool_job {
    const mpt_pool2d_args *a;
    int kernel_h, kernel_w, stride, padding; /* the whole image for a global pool */
    bool is_max, forward;
} mpti_pool_job;

/* Order of floats as integers, with -0 = +0 and every NaN above all. Masks in place of branches, so
   that loops over it become vectors. */
static int32_t mpti_order_key(float x) {
    const int32_t i = (int32_t)mpti_f32_bits(x), key = i ^ (-(i < 0) & 0x7fffffff);
    const int32_t is_nan = -((i & 0x7fffffff) > 0x7f800000), is_zero = -(key == -1);
    return (key & ~is_nan & ~is_zero) | (INT32_MAX & is_nan);
}

/* What the maxima of a span are so far; outside a window x repeats them, and so changes nothing. */
typedef struct mpti_maxima {
    float x[MPTI_SPAN], best[MPTI_SPAN];
    int32_t index[MPTI_SPAN];
} mpti_maxima;

static void mpti_maxima_update(mpti_maxima *m, int size, int index) { /* first of equals stays */
    int block, e;

    for (block = 0; block < size; block += 16) { /* by 16: see mpti_order_key */
        for (e = block; e < block + 16; e++) {
            const float x = m->x[e], best = m->best[e];
            const int32_t takes = -(mpti_order_key(x) > mpti_order_key(best));
            const uint32_t bits = (mpti_f32_bits(x) & (uint32_t)takes) |
                                  (mpti_f32_bits(best) & ~(uint32_t)takes);
            m->best[e] = mpti_f32_from_bits(bits);
            m->index[e] = (index & takes) | (m->index[e] & ~takes);
        }
    }
}

/* y[n,p, q0 .. q0+count-1, c0 .. c0+width-1], count being 1 unless width is all channels */
static void mpti_pool_output(const mpti_cpu *cpu, const mpti_pool_job *job, int64_t n, int p,
                             int q0, int count, int c0, int width) {
    const mpt_pool2d_args *a = job->a;
    const int top = p * job->stride - job->padding, first_i = mpti_max_int(-top, 0);
    const int size = count * width;
    const int64_t at = ((n * a->p + p) * a->q + q0) * a->c + c0;
    mpti_maxima m;
    int i, j, l, e;

    for (e = 0; e < MPTI_SPAN; e++) {
        const int left = (q0 + mpti_min_int(e / width, count - 1)) * job->stride - job->padding;
        m.x[e] = 0;
        m.best[e] = job->is_max ? mpti_f32_from_bits(0xff800000u) : 0.0f; /* -infinity */
        m.index[e] = first_i * job->kernel_w + mpti_max_int(-left, 0);
    }
    for (i = first_i; i < mpti_min_int(job->kernel_h, a->h - top); i++) {
        for (j = 0; j < job->kernel_w; j++) {
            for (l = 0; l < count; l++) {
                const int v = (q0 + l) * job->stride - job->padding + j;
                const int64_t from = ((n * a->h + top + i) * a->wd + v) * a->c + c0;
                float *x = m.x + l * width;
                if (v >= 0 && v < a->wd) mpti_row_load(cpu, a->dtype, a->x, from, width, x);
                else if (job->is_max) memcpy(x, m.best + l * width, (size_t)width * sizeof(float));
                else memset(x, 0, (size_t)width * sizeof(float));
            }
            if (job->is_max) mpti_maxima_update(&m, size, i * job->kernel_w + j);
            else
                for (e = 0; e < size; e++) m.best[e] += m.x[e];
        }
    }
    for (e = 0; !job->is_max && e < size; e++)
        m.best[e] /= (float)job->kernel_h * (float)job->kernel_w;
    mpti_row_store(cpu, a->dtype, m.best, a->y, at, size);
    for (e = 0; job->is_max && a->argmax && e < size; e++) a->argmax[at + e] = (uint8_t)m.index[e];
}

/* Windows that hold position `at`: first .. *last of size outputs. */
static int mpti_pool_windows(int at, int kernel, int stride, int padding, int size, int *last) {
    int first = at + padding - kernel + 1;

    *last = mpti_min_int((at + padding) / stride, size - 1);
    return first <= 0 ? 0 : (first - 1) / stride + 1;
}

/* What a row p of windows gives to dx[n,h,v, c0 .. c0+width-1]. */
static void mpti_pool_gather(const mpti_cpu *cpu, const mpti_pool_job *job, int64_t n, int p, int i,
                             int v, int c0, int width, float *sum) {
    const mpt_pool2d_args *a = job->a;
    float dy[MPTI_SPAN];
    int e, last, q = mpti_pool_windows(v, job->kernel_w, job->stride, job->padding, a->q, &last);

    for (; q <= last; q++) {
        const int64_t at = ((n * a->p + p) * a->q + q) * a->c + c0;
        const uint8_t *argmax = job->is_max ? a->argmax + at : NULL;
        const int index = i * job->kernel_w + v + job->padding - q * job->stride;
        mpti_row_load(cpu, a->dtype, a->dy, at, width, dy);
        for (e = 0; e < width; e++) sum[e] += !argmax || argmax[e] == index ? dy[e] : 0.0f;
    }
}

/* dx[n,h, v0 .. v0+count-1, c0 .. c0+width-1] */
static void mpti_pool_input(const mpti_cpu *cpu, const mpti_pool_job *job, int64_t n, int h, int v0,
                            int count, int c0, int width) {
    const mpt_pool2d_args *a = job->a;
    const int size = count * width;
    const int64_t at = ((n * a->h + h) * a->wd + v0) * a->c + c0;
    float sum[MPTI_SPAN];
    int l, e, last, p = mpti_pool_windows(h, job->kernel_h, job->stride, job->padding, a->p, &last);

    for (e = 0; e < size; e++) sum[e] = 0;
    for (; p <= last; p++)
        for (l = 0; l < count; l++)
            mpti_pool_gather(cpu, job, n, p, h + job->padding - p * job->stride, v0 + l, c0, width,
                             sum + l * width);
    for (e = 0; !job->is_max && e < size; e++)
        sum[e] /= (float)job->kernel_h * (float)job->kernel_w;
    mpti_row_store(cpu, a->dtype, sum, a->dx, at, size);
}

/* Items are rows: (n,p) of y, or backward (n,h) of dx. */
static void mpti_pool_range(const mpti_cpu *cpu, const void *user, mpti_range r) {
    const mpti_pool_job *job = (const mpti_pool_job *)user;
    const mpt_pool2d_args *a = job->a;
    const int rows = job->forward ? a->p : a->h, cols = job->forward ? a->q : a->wd;
    const int64_t row = (int64_t)cols * a->c;
    int64_t item;
    int v, c0;

    for (item = r.begin; item < r.end; item++) {
        const int64_t n = item / rows;
        const int y = (int)(item % rows);
        if (n >= a->num_valid) {
            mpti_zero(a->dtype, job->forward ? a->y : a->dx, item * row, (item + 1) * row);
            if (job->forward && job->is_max && a->argmax)
                memset(a->argmax + item * row, 0, (size_t)row);
            continue;
        }
        for (c0 = 0; c0 < a->c; c0 += MPTI_SPAN) {
            const mpti_channels s = mpti_channels_at(c0, a->c);
            for (v = 0; v < cols; v += s.pixels) {
                const int count = mpti_min_int(cols - v, s.pixels);
                if (job->forward) mpti_pool_output(cpu, job, n, y, v, count, c0, s.width);
                else mpti_pool_input(cpu, job, n, y, v, count, c0, s.width);
            }
        }
    }
}

enum { MPTI_ROW_CHUNKS = 64, MPTI_SOFTMAX_CHUNKS = 32 };
typedef enum { MPTI_POOL_MAX, MPTI_POOL_AVG, MPTI_POOL_GLOBAL } mpti_pool_kind;

/* The window that a kind of pool really has: the whole image for a global one. */
static mpti_pool_job mpti_pool_job_of(const mpt_pool2d_args *a, mpti_pool_kind kind, bool forward) {
    const bool global = kind == MPTI_POOL_GLOBAL;
    const mpti_pool_job job = {a, global ? a->h : a->kernel, global ? a->wd : a->kernel,
                               global ? 1 : a->stride, global ? 0 : a->padding,
                               kind == MPTI_POOL_MAX, forward};
    return job;
}

static mpt_result mpti_check_pool2d(mpt_ctx *ctx, const char *op, const mpt_pool2d_args *a,
                                    mpti_pool_kind kind) {
    const mpti_pool_job job = mpti_pool_job_of(a, kind, true);
    mpt_result rc = mpti_check_images(ctx, op, a->n, a->num_valid, a->h, a->wd, a->c, a->dtype);

    if (rc) return rc;
    if (kind != MPTI_POOL_GLOBAL && (a->kernel < 1 || a->kernel > 16))
        return mpti_op_error(ctx, op, "kernel must be 1 .. 16");
    if (job.stride < 1 || job.padding < 0 || job.padding > job.kernel_h / 2)
        return mpti_op_error(ctx, op, "stride must be at least 1 and padding 0 .. kernel / 2");
    if (a->h + 2 * job.padding < job.kernel_h || a->wd + 2 * job.padding < job.kernel_w ||
        a->p != (a->h + 2 * job.padding - job.kernel_h) / job.stride + 1 ||
        a->q != (a->wd + 2 * job.padding - job.kernel_w) / job.stride + 1)
        return mpti_op_error(
            ctx, op, "p and q must be (size + 2 * padding - kernel) / stride + 1, at least 1");
    return MPT_OK;
}

static mpt_result mpti_pool_run(void *self, const mpt_pool2d_args *a, const char *op,
                                mpti_pool_kind kind, bool forward) {
    const mpti_cpu *cpu = (const mpti_cpu *)self;
    const mpti_pool_job job = mpti_pool_job_of(a, kind, forward);
    mpt_result rc = mpti_check_pool2d(cpu->ctx, op, a, kind);

    if (rc) return rc;
    return mpti_for_ranges(cpu, (int64_t)a->n * (forward ? a->p : a->h), MPTI_ROW_CHUNKS,
                           mpti_pool_range, &job);
}

#define MPTI_POOL_ENTRIES(name, kind) \
    static mpt_result mpti_##name##_forward(void *self, const mpt_pool2d_args *a) { \
        return mpti_pool_run(self, a, #name "_forward", kind, true); \
    } \
    static mpt_result mpti_##name##_backward(void *self, const mpt_pool2d_args *a) { \
        return mpti_pool_run(self, a, #name "_backward", kind, false); \
    }
MPTI_POOL_ENTRIES(max_pool, MPTI_POOL_MAX)
MPTI_POOL_ENTRIES(avg_pool, MPTI_POOL_AVG)
MPTI_POOL_ENTRIES(global_avg_pool, MPTI_POOL_GLOBAL)

/* ---- pointwise: relu, add, dropout --------------------------------------------------------------
   Items are spans of one sample, so that dropout can count its elements. */
typedef enum { MPTI_RELU, MPTI_RELU_GATE, MPTI_ADD, MPTI_DROPOUT } mpti_pointwise_kind;

typedef struct mpti_pointwise_job {
    mpti_pointwise_kind kind;
    const mpt_pointwise_args *args;
    const mpt_dropout_args *dropout; /* of that kind */
} mpti_pointwise_job;

/* Purposes of random numbers from here on belong to dropout layers, one each. */
enum { MPTI_RANDOM_DROPOUT = 64, MPTI_MAX_DROPOUT_LAYERS = 192 };

/* Element e of a sample takes word e % 4 of the four numbers of lane e / 4. Dropped: words below
   probability * 2^32. at is a multiple of 4, being one of MPTI_SPAN. */
static void mpti_dropout_span(const mpt_dropout_args *d, int64_t sample, int64_t at,
                              float x[MPTI_SPAN]) {
    const uint64_t id = d->sample_ids ? d->sample_ids[sample] : d->first_id + (uint64_t)sample;
    const int64_t size = mpti_min64(d->per_sample - at, MPTI_SPAN);
    const double limit = (double)d->probability * 4294967296.0;
    const float scale = d->probability < 1 ? 1.0f / (1.0f - d->probability) : 0.0f;
    uint32_t words[4] = {0, 0, 0, 0};
    int e;

    for (e = 0; e < size; e++) {
        if (e % 4 == 0)
            mpti_random4(d->seed, d->epoch, id, (uint32_t)((at + e) / 4),
                         (mpti_purpose)(MPTI_RANDOM_DROPOUT + d->layer), words);
        x[e] = (double)words[e % 4] < limit ? 0.0f : x[e] * scale;
    }
}

static void mpti_pointwise_range(const mpti_cpu *cpu, const void *user, mpti_range r) {
    const mpti_pointwise_job *job = (const mpti_pointwise_job *)user;
    const mpt_pointwise_args *p = job->args;
    const int64_t spans = (p->per_sample + MPTI_SPAN - 1) / MPTI_SPAN;
    float a[MPTI_SPAN], b[MPTI_SPAN];
    int64_t item;
    int e;

    for (item = r.begin; item < r.end; item++) {
        const int64_t sample = item / spans, in_sample = item % spans * MPTI_SPAN;
        const int64_t at = sample * p->per_sample + in_sample;
        const int64_t size = mpti_min64(p->per_sample - in_sample, MPTI_SPAN);
        if (sample >= p->num_valid) {
            mpti_zero(p->dtype, p->y, at, at + size);
            continue;
        }
        mpti_span_load(cpu, p->dtype, p->a, at, size, a);
        if (job->kind == MPTI_RELU) {
            for (e = 0; e < MPTI_SPAN; e++) a[e] = mpti_relu(a[e]);
        } else if (job->kind == MPTI_DROPOUT) {
            mpti_dropout_span(job->dropout, sample, in_sample, a);
        } else {
            mpti_span_load(cpu, p->dtype, p->b, at, size, b);
            if (job->kind == MPTI_ADD)
                for (e = 0; e < MPTI_SPAN; e++) a[e] += b[e];
            else
                for (e = 0; e < MPTI_SPAN; e++) a[e] = mpti_relu_gate(a[e], b[e]);
        }
        mpti_row_store(cpu, p->dtype, a, p->y, at, size);
    }
}

static mpt_result mpti_check_pointwise(mpt_ctx *ctx, const char *op, const mpt_pointwise_args *a) {
    return mpti_check_slice(ctx, op, a->n, a->num_valid, a->dtype, (double)a->per_sample);
}

static mpt_result mpti_pointwise(void *self, const mpt_pointwise_args *a, mpti_pointwise_kind kind,
                                 const mpt_dropout_args *dropout, const char *op) {
    const mpti_cpu *cpu = (const mpti_cpu *)self;
    const mpti_pointwise_job job = {kind, a, dropout};
    mpt_result rc = mpti_check_pointwise(cpu->ctx, op, a);

    if (rc) return rc;
    return mpti_for_ranges(cpu, a->n * ((a->per_sample + MPTI_SPAN - 1) / MPTI_SPAN),
                           MPTI_ROW_CHUNKS, mpti_pointwise_range, &job);
}

static mpt_result mpti_relu_forward(void *self, const mpt_pointwise_args *a) {
    return mpti_pointwise(self, a, MPTI_RELU, NULL, "relu_forward");
}

static mpt_result mpti_relu_backward(void *self, const mpt_pointwise_args *a) {
    return mpti_pointwise(self, a, MPTI_RELU_GATE, NULL, "relu_backward");
}

static mpt_result mpti_add_op(void *self, const mpt_pointwise_args *a) {
    return mpti_pointwise(self, a, MPTI_ADD, NULL, "add");
}

static mpt_result mpti_check_dropout(mpt_ctx *ctx, const char *op, const mpt_dropout_args *d) {
    if (!(d->probability >= 0 && d->probability <= 1))
        return mpti_op_error(ctx, op, "probability must be 0 .. 1");
    if (d->layer < 0 || d->layer >= MPTI_MAX_DROPOUT_LAYERS)
        return mpti_op_error(ctx, op, "layer must be 0 .. 191");
    return mpti_check_slice(ctx, op, d->n, d->num_valid, d->dtype, (double)d->per_sample);
}

static mpt_result mpti_dropout(void *self, const mpt_dropout_args *d, const char *op) {
    mpt_pointwise_args p;
    mpt_result rc = mpti_check_dropout(((const mpti_cpu *)self)->ctx, op, d);

    if (rc) return rc;
    memset(&p, 0, sizeof p);
    p.a = d->x;
    p.y = d->y;
    p.n = d->n;
    p.num_valid = d->num_valid;
    p.per_sample = d->per_sample;
    p.dtype = d->dtype;
    return mpti_pointwise(self, &p, MPTI_DROPOUT, d, op);
}

static mpt_result mpti_dropout_forward(void *self, const mpt_dropout_args *d) {
    return mpti_dropout(self, d, "dropout_forward");
}

static mpt_result mpti_dropout_backward(void *self, const mpt_dropout_args *d) {
    return mpti_dropout(self, d, "dropout_backward");
}

/* ---- softmax cross entropy ----------------------------------------------------------------------
   loss = log(sum exp(z - max)) + (1 - smoothing) (max - z[label]) + smoothing * mean(max - z)
   Every term is at least 0, and nothing overflows: exp never sees more than 0. */
typedef struct mpti_softmax_row { /* what one sample's logits come to */
    double sum;                   /* of exp(z - max) */
    double gaps;                  /* of max - z */
    float max, at_label;
    int rank; /* of the label: how many classes come before it */
} mpti_softmax_row;

static void mpti_softmax_scan(const mpti_cpu *cpu, const mpt_softmax_xent_args *a, int64_t row,
                              int label, mpti_softmax_row *out) {
    const int64_t at = row * a->classes;
    float buffer[MPTI_SPAN];
    int32_t best = INT32_MIN, label_key;
    int c0, e;

    memset(out, 0, sizeof *out);
    out->at_label = mpti_load(a->dtype, a->logits, (size_t)(at + mpti_max_int(label, 0)));
    label_key = mpti_order_key(out->at_label);
    if (mpti_is_nan(out->at_label)) out->rank = 5; /* not even among five */
    for (c0 = 0; c0 < a->classes; c0 += MPTI_SPAN) {
        const int width = mpti_min_int(a->classes - c0, MPTI_SPAN);
        const float *z = mpti_row_read(cpu, a->dtype, a->logits, at + c0, width, buffer);
        for (e = 0; e < width; e++) {
            const int32_t key = mpti_order_key(z[e]);
            if (key > best) {
                best = key;
                out->max = z[e];
            }
            if (key > label_key || (key == label_key && c0 + e < label)) out->rank++;
        }
    }
    for (c0 = 0; c0 < a->classes; c0 += MPTI_SPAN) {
        const int width = mpti_min_int(a->classes - c0, MPTI_SPAN);
        const float *z = mpti_row_read(cpu, a->dtype, a->logits, at + c0, width, buffer);
        for (e = 0; e < width; e++) {
            out->sum += mpti_exp((double)z[e] - out->max);
            out->gaps += (double)out->max - z[e];
        }
    }
}

static void mpti_softmax_outputs(const mpti_cpu *cpu, const mpt_softmax_xent_args *a, int64_t row,
                                 int label, const mpti_softmax_row *r) {
    const double even = (double)a->label_smoothing / a->classes;
    const double peak = 1.0 - (double)a->label_smoothing;
    const double scale = (double)a->grad_scale * (a->loss_scale ? (double)*a->loss_scale : 1.0);
    float buffer[MPTI_SPAN], p[MPTI_SPAN], gradient[MPTI_SPAN];
    int c0, e;

    for (c0 = 0; c0 < a->classes; c0 += MPTI_SPAN) {
        const int width = mpti_min_int(a->classes - c0, MPTI_SPAN);
        const int64_t at = row * a->classes + c0;
        const float *z = mpti_row_read(cpu, a->dtype, a->logits, at, width, buffer);
        for (e = 0; e < width; e++) {
            double probability = mpti_exp((double)z[e] - r->max) / r->sum;
            double target = even + (c0 + e == label ? peak : 0.0);
            p[e] = (float)probability;
            gradient[e] = label < 0 ? 0.0f : (float)((probability - target) * scale);
        }
        if (a->probabilities) mpti_row_store(cpu, MPT_F32, p, a->probabilities, at, width);
        if (a->dlogits) mpti_row_store(cpu, a->dtype, gradient, a->dlogits, at, width);
    }
}

static void mpti_softmax_range(const mpti_cpu *cpu, const void *user, mpti_range range) {
    const mpt_softmax_xent_args *a = (const mpt_softmax_xent_args *)user;
    const int64_t valid = mpti_max64(range.begin, mpti_min64(range.end, a->num_valid));
    double *part = (double *)a->workspace + range.chunk * 4; /* of mpt_softmax_stats, in order */
    mpti_softmax_row r;
    int64_t row;

    memset(part, 0, 4 * sizeof(double));
    for (row = range.begin; row < valid; row++) {
        const int label = a->labels ? a->labels[row] : -1;
        mpti_softmax_scan(cpu, a, row, label, &r);
        mpti_softmax_outputs(cpu, a, row, label, &r);
        if (label < 0) continue;
        part[0] += mpti_ln(r.sum) +
                   (1.0 - (double)a->label_smoothing) * ((double)r.max - r.at_label);
        if (a->label_smoothing > 0) part[0] += (double)a->label_smoothing * r.gaps / a->classes;
        part[1]++;
        part[2] += r.rank < 1;
        part[3] += r.rank < 5;
    }
    if (a->dlogits) mpti_zero(a->dtype, a->dlogits, valid * a->classes, range.end * a->classes);
    if (a->probabilities)
        mpti_zero(MPT_F32, a->probabilities, valid * a->classes, range.end * a->classes);
}

static size_t mpti_softmax_xent_bytes(void *self, const mpt_softmax_xent_args *a) {
    (void)self;
    return a->n < 1 ? 0 : (size_t)mpti_min64(a->n, MPTI_SOFTMAX_CHUNKS) * 4 * sizeof(double);
}

static mpt_result mpti_check_softmax(mpt_ctx *ctx, const char *op,
                                     const mpt_softmax_xent_args *a) {
    if (!mpti_is_size(a->classes)) return mpti_op_error(ctx, op, "classes must be 1 .. 2^30");
    if (!(a->label_smoothing >= 0 && a->label_smoothing <= 1))
        return mpti_op_error(ctx, op, "label_smoothing must be 0 .. 1");
    return mpti_check_slice(ctx, op, a->n, a->num_valid, a->dtype, (double)a->classes);
}

static mpt_result mpti_softmax_check_labels(mpt_ctx *ctx, const char *op,
                                            const mpt_softmax_xent_args *a) {
    int i;

    for (i = 0; i < a->num_valid && a->labels; i++) {
        if (a->labels[i] >= -1 && a->labels[i] < a->classes) continue;
        return MPTI_REPORT(ctx, MPT_ERR_INVALID_ARGUMENT,
                           "%s: the label of slot %d is %d; labels are 0 .. %d, or -1 for none", op,
                           i, (int)a->labels[i], a->classes - 1);
    }
    return MPT_OK;
}

static mpt_result mpti_softmax_xent(void *self, const mpt_softmax_xent_args *a) {
    const mpti_cpu *cpu = (const mpti_cpu *)self;
    double *sums = (double *)a->workspace;
    const char *op = "softmax_xent";
    mpt_result rc = mpti_check_softmax(cpu->ctx, op, a);

    if (rc == MPT_OK) rc = mpti_softmax_check_labels(cpu->ctx, op, a);
    if (rc == MPT_OK)
        rc = mpti_check_workspace(cpu->ctx, op, a->workspace, a->workspace_bytes,
                                  mpti_softmax_xent_bytes(NULL, a));
    if (rc) return rc;
    rc = mpti_for_ranges(cpu, a->n, MPTI_SOFTMAX_CHUNKS, mpti_softmax_range, a);
    if (rc) return rc;
    mpti_tree_sum_f64(sums, 4, mpti_min64(a->n, MPTI_SOFTMAX_CHUNKS));
    a->stats->loss += sums[0];
    a->stats->num_labeled += (int64_t)sums[1]; /* exact: counts are below 2^53 */
    a->stats->num_correct += (int64_t)sums[2];
    a->stats->num_correct_top5 += (int64_t)sums[3];
    return MPT_OK;
}

/* ---- casts, input, fill, copy ---------------------------------------------------------------- */
static void mpti_cast_range(const mpti_cpu *cpu, const void *user, mpti_range r) {
    const mpt_cast_args *a = (const mpt_cast_args *)user;
    float buffer[MPTI_SPAN];
    int64_t at;

    for (at = r.begin; at < r.end; at += MPTI_SPAN) {
        int64_t count = mpti_min64(r.end - at, MPTI_SPAN);
        const float *x = mpti_row_read(cpu, a->src_dtype, a->src, at, count, buffer);
        mpti_row_store(cpu, a->dst_dtype, x, a->dst, at, count);
    }
}

/* Both types, or one given twice. */
static mpt_result mpti_check_row(mpt_ctx *ctx, const char *op, int64_t count, mpt_dtype from,
                                 mpt_dtype to) {
    if (!mpti_is_storage(from) || !mpti_is_storage(to))
        return mpti_op_error(ctx, op, "dtype must be MPT_F32, MPT_F16 or MPT_BF16");
    return count < 0 ? mpti_op_error(ctx, op, "count is negative") : MPT_OK;
}

static mpt_result mpti_cast(void *self, const mpt_cast_args *a) {
    const mpti_cpu *cpu = (const mpti_cpu *)self;
    mpt_result rc = mpti_check_row(cpu->ctx, "cast", a->count, a->src_dtype, a->dst_dtype);

    if (rc) return rc;
    return mpti_for_ranges(cpu, a->count, MPTI_ROW_CHUNKS, mpti_cast_range, a);
}

static void mpti_fill_range(const mpti_cpu *cpu, const void *user, mpti_range r) {
    const mpt_fill_args *a = (const mpt_fill_args *)user;
    int64_t i;

    (void)cpu;
    for (i = r.begin; i < r.end; i++) mpti_store(a->dtype, a->dst, (size_t)i, a->value);
}

static mpt_result mpti_fill(void *self, const mpt_fill_args *a) {
    const mpti_cpu *cpu = (const mpti_cpu *)self;
    mpt_result rc = mpti_check_row(cpu->ctx, "fill", a->count, a->dtype, a->dtype);

    if (rc) return rc;
    return mpti_for_ranges(cpu, a->count, MPTI_ROW_CHUNKS, mpti_fill_range, a);
}

static mpt_result mpti_copy(void *self, const mpt_copy_args *a) {
    (void)self;
    if (a->bytes) memcpy(a->dst, a->src, a->bytes);
    return MPT_OK;
}

static void mpti_scale_range(const mpti_cpu *cpu, const void *user, mpti_range r) {
    const mpt_scale_args *a = (const mpt_scale_args *)user;
    bool keeps = mpti_f32_bits(a->factor) != 0;
    int64_t i;

    (void)cpu;
    for (i = r.begin; i < r.end; i++) a->x[i] = keeps ? a->factor * a->x[i] : 0;
}

static mpt_result mpti_scale(void *self, const mpt_scale_args *a) {
    const mpti_cpu *cpu = (const mpti_cpu *)self;
    mpt_result rc = mpti_check_row(cpu->ctx, "scale", a->count, MPT_F32, MPT_F32);

    if (rc) return rc;
    return mpti_for_ranges(cpu, a->count, MPTI_ROW_CHUNKS, mpti_scale_range, a);
}

/* In double, as the loader does it: the same numbers whether it or this entry normalises. */
static void mpti_normalize_range(const mpti_cpu *cpu, const void *user, mpti_range r) {
    const mpt_normalize_args *a = (const mpt_normalize_args *)user;
    const int64_t valid = (int64_t)a->num_valid * a->h * a->wd;
    int64_t pixel;
    int c;

    (void)cpu;
    for (pixel = r.begin; pixel < mpti_min64(r.end, valid); pixel++) {
        for (c = 0; c < a->c; c++) {
            const size_t at = (size_t)pixel * a->c + c;
            double x = a->src_dtype == MPT_U8 ? (double)((const uint8_t *)a->x)[at] / 255.0
                                              : (double)mpti_load(a->src_dtype, a->x, at);
            if (a->mean) x -= (double)a->mean[c];
            if (a->std) x /= (double)a->std[c];
            mpti_store(a->dtype, a->y, at, (float)x);
        }
    }
    mpti_zero(a->dtype, a->y, mpti_max64(r.begin, valid) * a->c, r.end * a->c);
}

static mpt_result mpti_check_normalize(mpt_ctx *ctx, const mpt_normalize_args *a) {
    const char *op = "input_normalize";

    if (a->src_dtype != MPT_U8 && !mpti_is_storage(a->src_dtype))
        return mpti_op_error(ctx, op, "src_dtype must be MPT_U8, MPT_F32, MPT_F16 or MPT_BF16");
    return mpti_check_images(ctx, op, a->n, a->num_valid, a->h, a->wd, a->c, a->dtype);
}

static mpt_result mpti_input_normalize(void *self, const mpt_normalize_args *a) {
    const mpti_cpu *cpu = (const mpti_cpu *)self;
    const char *op = "input_normalize";
    mpt_result rc = mpti_check_normalize(cpu->ctx, a);
    int c;

    if (rc) return rc;
    for (c = 0; a->std && c < a->c; c++)
        if (!(a->std[c] > 0)) return mpti_op_error(cpu->ctx, op, "std must be greater than 0");
    return mpti_for_ranges(cpu, (int64_t)a->n * a->h * a->wd, MPTI_ROW_CHUNKS, mpti_normalize_range,
                           a);
}

/* ---- the table ------------------------------------------------------------------------------- */
static const char *mpti_cpu_kernels(void *self) {
    return ((const mpti_cpu *)self)->family->name;
}

/* family NULL: the first that this processor has. */
static mpt_result mpti_cpu_open_family(mpt_ctx *ctx, const char *family, void **self) {
    const size_t count = sizeof mpti_cpu_families / sizeof mpti_cpu_families[0];
    mpti_cpu *cpu;
    size_t i;

    *self = NULL;
    for (i = 0; i < count; i++) {
        const mpti_cpu_family *f = &mpti_cpu_families[i];
        if ((!family || !strcmp(family, f->name)) && (!f->is_supported || f->is_supported())) break;
    }
    if (i == count)
        return MPTI_REPORT(ctx, MPT_ERR_UNSUPPORTED,
                           "cpu backend: this processor or build has no kernels named %s",
                           family ? family : "plain");
    cpu = (mpti_cpu *)mpti_calloc(&ctx->desc.allocator, 1, sizeof *cpu);
    if (!cpu) return MPTI_REPORT(ctx, MPT_ERR_OUT_OF_MEMORY, "no memory for the cpu backend");
    cpu->ctx = ctx;
    cpu->family = &mpti_cpu_families[i];
    *self = cpu;
    return MPT_OK;
}

static mpt_result mpti_cpu_open(mpt_ctx *ctx, int device, void **self) {
    (void)device;
    return mpti_cpu_open_family(ctx, NULL, self);
}

static void mpti_cpu_close(void *self) {
    mpti_cpu *cpu = (mpti_cpu *)self;

    if (cpu) mpti_free(&cpu->ctx->desc.allocator, cpu, sizeof *cpu);
}

MPT_API const mpt_backend *mpt_backend_cpu(void) {
    static const mpt_backend table = {
        "cpu", mpti_cpu_open, mpti_cpu_close, mpti_cpu_kernels,
        mpti_conv2d_fprop_bytes, mpti_conv2d_dgrad_bytes, mpti_conv2d_wgrad_bytes,
        mpti_conv2d_fprop, mpti_conv2d_dgrad, mpti_conv2d_wgrad,
        mpti_dense_fprop_bytes, mpti_dense_dgrad_bytes, mpti_dense_wgrad_bytes,
        mpti_dense_fprop, mpti_dense_dgrad, mpti_dense_wgrad,
        mpti_batchnorm_bytes, mpti_batchnorm_bytes,
        mpti_batchnorm_forward, mpti_batchnorm_backward,
        mpti_relu_forward, mpti_relu_backward, mpti_add_op,
        mpti_max_pool_forward, mpti_max_pool_backward,
        mpti_avg_pool_forward, mpti_avg_pool_backward,
        mpti_global_avg_pool_forward, mpti_global_avg_pool_backward,
        mpti_dropout_forward, mpti_dropout_backward,
        mpti_softmax_xent_bytes, mpti_softmax_xent,
        mpti_cast, mpti_input_normalize, mpti_fill, mpti_copy, mpti_scale,
        NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    };
    return &table;
}

/* =================================================================================================
 * >>cuda   6 CUDA backend: streams, staging, cuBLAS, launches of kernels.cu
 * =================================================================================================
 *
 * Problem: a device computes while the host prepares; each wait for it costs more than a kernel.
 * Idea:    one stream computes, one copies the next batch in. Entries check their arguments, begin
 *          a kernel and return. Dense layers and plain 1x1 convolutions are matrix products, which
 *          cuBLAS has; the rest is in kernels.cu. Two reports are under way, never three.
 * Shapes:  slot 0: host (pinned) -copy-> device | slot 1 the same;  compute reads one, copy fills
 *          the other; report[step % 2] comes back behind the update.
 * Tested:  tests/cuda/: on a GPU, or on the CPU by tests/cuda_on_cpu/
 * Next:    >>layers, which calls these entries or those of >>cpu.
 */
#ifndef MPTRAIN_CUDA
MPT_API const mpt_backend *mpt_backend_cuda(void) { return NULL; }
#else

enum { MPTI_CUDA_SLOTS = 2, MPTI_CUDA_REPORTS = 2 };

typedef struct mpti_cuda_slot {
    void *host, *device;              /* [slot_bytes] */
    cudaEvent_t copied, consumed;     /* has come; is no longer read */
    bool was_copied, was_consumed;    /* these events have been recorded */
} mpti_cuda_slot;

typedef struct mpti_cuda {
    mpt_ctx *ctx;
    int device, arch; /* arch: 80 for compute capability 8.0 */
    char name[32];    /* "sm_80" */
    cudaStream_t compute, copy;
    cublasHandle_t blas;
    void *blas_workspace;
    mpti_cuda_slot slots[MPTI_CUDA_SLOTS];
    size_t slot_bytes;
    int slot; /* the one that was begun last */
    mpt_step_state *reports; /* [MPTI_CUDA_REPORTS] pinned */
    cudaEvent_t reported[MPTI_CUDA_REPORTS];
} mpti_cuda;

/* ---- errors ---------------------------------------------------------------------------------- */
static mpt_result mpti_cuda_fail(mpti_cuda *c, int error, const char *domain, const char *text) {
    bool no_memory = !strcmp(domain, "cuda") && error == (int)cudaErrorMemoryAllocation;

    (void)MPTI_FAIL(&c->ctx->error, no_memory ? MPT_ERR_OUT_OF_DEVICE_MEMORY : MPT_ERR_DEVICE,
                    "%s", text);
    c->ctx->error.native_code = error;
    c->ctx->error.native_domain = domain;
    return mpti_report(c->ctx, c->ctx->error.code);
}

/* what: the operation and its shapes. */
static mpt_result mpti_cuda_result(mpti_cuda *c, int error, const char *what) {
    char text[384];

    if (error == (int)cudaSuccess) return MPT_OK;
    (void)cudaGetLastError(); /* told here, so that no later launch tells it again */
    snprintf(text, sizeof text, "%s on %s (device %d): %s: %s", what, c->name, c->device,
             cudaGetErrorName((cudaError_t)error), cudaGetErrorString((cudaError_t)error));
    return mpti_cuda_fail(c, error, "cuda", text);
}

static mpt_result mpti_cublas_result(mpti_cuda *c, cublasStatus_t status, const char *what) {
    char text[384];

    if (status == CUBLAS_STATUS_SUCCESS) return MPT_OK;
    snprintf(text, sizeof text, "%s on %s (device %d): %s", what, c->name, c->device,
             cublasGetStatusString(status));
    return mpti_cuda_fail(c, (int)status, "cublas", text);
}

/* Is it for this device? Several contexts of one thread may have one each. */
static mpt_result mpti_cuda_enter(mpti_cuda *c) {
    return mpti_cuda_result(c, (int)cudaSetDevice(c->device), "cudaSetDevice");
}

/* ---- memory, staging, recording -------------------------------------------------------------- */
static mpt_result mpti_cuda_alloc(void *self, size_t bytes, void **out) {
    mpti_cuda *c = (mpti_cuda *)self;
    size_t available = 0, total = 0;
    char what[128];
    cudaError_t error;
    mpt_result rc = mpti_cuda_enter(c);

    if (rc) return rc;
    error = cudaMalloc(out, bytes);
    if (error == cudaSuccess) return MPT_OK;
    (void)cudaMemGetInfo(&available, &total);
    snprintf(what, sizeof what, "cudaMalloc of %.1f MB, of %.1f MB %.1f MB are free,",
             (double)bytes / 1e6, (double)total / 1e6, (double)available / 1e6);
    return mpti_cuda_result(c, (int)error, what);
}

static void mpti_cuda_free(void *self, void *p) {
    mpti_cuda *c = (mpti_cuda *)self;

    /* Also where the device has failed, and without a word: the error that matters is told. */
    (void)cudaSetDevice(c->device);
    if (p) (void)cudaFree(p); /* waits for what still uses it */
}

static mpt_result mpti_cuda_copy_now(mpti_cuda *c, void *dst, const void *src, size_t bytes,
                                     enum cudaMemcpyKind kind, const char *what) {
    cudaError_t error;
    mpt_result rc = mpti_cuda_enter(c);

    if (rc || bytes == 0) return rc;
    error = cudaMemcpyAsync(dst, src, bytes, kind, c->compute);
    if (error == cudaSuccess) error = cudaStreamSynchronize(c->compute);
    return mpti_cuda_result(c, (int)error, what);
}

static mpt_result mpti_cuda_upload(void *self, void *dst, const void *src, size_t bytes) {
    return mpti_cuda_copy_now((mpti_cuda *)self, dst, src, bytes, cudaMemcpyHostToDevice,
                              "upload");
}

static mpt_result mpti_cuda_download(void *self, void *dst, const void *src, size_t bytes) {
    return mpti_cuda_copy_now((mpti_cuda *)self, dst, src, bytes, cudaMemcpyDeviceToHost,
                              "download");
}

static void mpti_cuda_stage_release(mpti_cuda *c) {
    int i;

    for (i = 0; i < MPTI_CUDA_SLOTS; i++) {
        if (c->slots[i].device) (void)cudaFree(c->slots[i].device);
        if (c->slots[i].host) (void)cudaFreeHost(c->slots[i].host);
        c->slots[i].device = c->slots[i].host = NULL;
        c->slots[i].was_copied = c->slots[i].was_consumed = false;
    }
    c->slot_bytes = 0;
}

/* Trainers of one context share the slots, which are as large as the largest needs. */
static mpt_result mpti_cuda_stage_reserve(void *self, size_t bytes) {
    mpti_cuda *c = (mpti_cuda *)self;
    cudaError_t error = cudaSuccess;
    mpt_result rc = mpti_cuda_enter(c);
    int i;

    if (rc || bytes <= c->slot_bytes) return rc;
    rc = mpti_cuda_result(c, (int)cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    if (rc) return rc;
    mpti_cuda_stage_release(c);
    for (i = 0; i < MPTI_CUDA_SLOTS && rc == MPT_OK; i++) {
        rc = mpti_cuda_alloc(self, bytes, &c->slots[i].device);
        if (rc) break;
        error = cudaMallocHost(&c->slots[i].host, bytes);
        if (error != cudaSuccess) {
            (void)cudaGetLastError();
            rc = MPTI_REPORT(c->ctx, MPT_ERR_OUT_OF_MEMORY,
                             "no %.1f MB of pinned host memory to stage batches: %s",
                             (double)bytes / 1e6, cudaGetErrorString(error));
        }
    }
    if (rc) mpti_cuda_stage_release(c);
    else c->slot_bytes = bytes;
    return rc;
}

static mpt_result mpti_cuda_stage_begin(void *self, void **host) {
    mpti_cuda *c = (mpti_cuda *)self;
    mpti_cuda_slot *last = &c->slots[c->slot], *next = &c->slots[(c->slot + 1) % MPTI_CUDA_SLOTS];
    cudaError_t error = cudaSuccess;
    mpt_result rc = mpti_cuda_enter(c);

    if (rc) return rc;
    if (last->was_copied) { /* what began until now is all that reads it */
        error = cudaEventRecord(last->consumed, c->compute);
        last->was_consumed = true;
    }
    if (error == cudaSuccess && next->was_copied) error = cudaEventSynchronize(next->copied);
    c->slot = (c->slot + 1) % MPTI_CUDA_SLOTS;
    *host = next->host;
    return mpti_cuda_result(c, (int)error, "staging a batch");
}

static mpt_result mpti_cuda_stage_end(void *self, size_t bytes, void **data) {
    mpti_cuda *c = (mpti_cuda *)self;
    mpti_cuda_slot *s = &c->slots[c->slot];
    cudaError_t error = cudaSuccess;

    if (bytes > c->slot_bytes)
        return MPTI_REPORT(c->ctx, MPT_ERR_INTERNAL, "a batch of %zu bytes for a slot of %zu",
                           bytes, c->slot_bytes);
    if (s->was_consumed) error = cudaStreamWaitEvent(c->copy, s->consumed, 0);
    if (error == cudaSuccess)
        error = cudaMemcpyAsync(s->device, s->host, bytes, cudaMemcpyHostToDevice, c->copy);
    if (error == cudaSuccess) error = cudaEventRecord(s->copied, c->copy);
    if (error == cudaSuccess) error = cudaStreamWaitEvent(c->compute, s->copied, 0);
    s->was_copied = true;
    *data = s->device;
    return mpti_cuda_result(c, (int)error, "copying a batch");
}

static mpt_result mpti_cuda_record_begin(void *self) {
    mpti_cuda *c = (mpti_cuda *)self;
    mpt_result rc = mpti_cuda_enter(c);

    if (rc) return rc;
    return mpti_cuda_result(
        c, (int)cudaStreamBeginCapture(c->compute, cudaStreamCaptureModeThreadLocal),
        "cudaStreamBeginCapture");
}

static mpt_result mpti_cuda_record_end(void *self, void **recording) {
    mpti_cuda *c = (mpti_cuda *)self;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    cudaError_t error = cudaStreamEndCapture(c->compute, &graph);

#if CUDART_VERSION >= 12000
    if (error == cudaSuccess) error = cudaGraphInstantiate(&exec, graph, 0);
#else /* where that name has five arguments */
    if (error == cudaSuccess) error = cudaGraphInstantiateWithFlags(&exec, graph, 0);
#endif
    if (graph) (void)cudaGraphDestroy(graph);
    *recording = (void *)exec;
    return mpti_cuda_result(c, (int)error, "recording a step as a CUDA graph");
}

static mpt_result mpti_cuda_replay(void *self, void *recording) {
    mpti_cuda *c = (mpti_cuda *)self;
    mpt_result rc = mpti_cuda_enter(c);

    if (rc) return rc;
    return mpti_cuda_result(c, (int)cudaGraphLaunch((cudaGraphExec_t)recording, c->compute),
                            "cudaGraphLaunch");
}

static void mpti_cuda_forget(void *self, void *recording) {
    (void)self;
    (void)cudaGraphExecDestroy((cudaGraphExec_t)recording);
}

static void *mpti_cuda_stream(void *self) { return (void *)((mpti_cuda *)self)->compute; }

/* ---- what every operator checks first -------------------------------------------------------- */

/* Kernels read 16 bytes at once and count elements in 31 bits. */
static mpt_result mpti_cuda_check(mpti_cuda *c, const char *op, mpt_dtype dtype, double elements,
                                  const void *const *pointers, int num_pointers) {
    int i;

    if (elements >= 2147483648.0)
        return mpti_op_error(c->ctx, op, "a tensor has 2^31 elements or more: cut the batch");
    if (dtype == MPT_BF16 && c->arch < 80)
        return MPTI_REPORT(c->ctx, MPT_ERR_UNSUPPORTED,
                           "%s: BF16 needs compute capability 8.0, this device has %d.%d: use FP16",
                           op, c->arch / 10, c->arch % 10);
    for (i = 0; i < num_pointers; i++)
        if ((uintptr_t)pointers[i] % 16 != 0)
            return MPTI_REPORT(c->ctx, MPT_ERR_INVALID_ARGUMENT,
                               "%s: tensors must be aligned to 16 bytes, one is at %p", op,
                               (void *)(uintptr_t)pointers[i]);
    return mpti_cuda_enter(c);
}

/* ---- convolution and dense ------------------------------------------------------------------- */

/* rows x in by out: a dense layer, or a 1x1 convolution whose pixels are the rows. cuBLAS counts in
   columns first: what is (rows, in) here is (in, rows) to it. */
typedef struct mpti_cuda_gemm {
    const char *op;
    int64_t rows, rows_valid;
    int in, out;
    mpt_dtype dtype;
} mpti_cuda_gemm;

static cudaDataType mpti_cuda_type(mpt_dtype dtype) {
    return dtype == MPT_F32 ? CUDA_R_32F : dtype == MPT_F16 ? CUDA_R_16F : CUDA_R_16BF;
}

/* c (m,n) = op(a) op(b), all column-major; sums in FP32. */
static mpt_result mpti_cuda_multiply(mpti_cuda *c, const mpti_cuda_gemm *g, bool transpose_a,
                                     bool transpose_b, int64_t m, int64_t n, int64_t k,
                                     const void *a, const void *b, void *out, mpt_dtype out_type) {
    const float one = 1, zero = 0;
    char what[160];
    cublasStatus_t status = cublasGemmEx(
        c->blas, transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
        (int)m, (int)n, (int)k, &one, a, mpti_cuda_type(g->dtype), (int)(transpose_a ? k : m), b,
        mpti_cuda_type(g->dtype), (int)(transpose_b ? n : k), &zero, out, mpti_cuda_type(out_type),
        (int)m, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);

    if (status == CUBLAS_STATUS_SUCCESS) return MPT_OK;
    snprintf(what, sizeof what, "%s: cublasGemmEx of %lld rows, %d in, %d out", g->op,
             (long long)g->rows_valid, g->in, g->out);
    return mpti_cublas_result(c, status, what);
}

static mpt_result mpti_cuda_zero(mpti_cuda *c, const char *op, void *p, mpt_dtype dtype,
                                 int64_t begin, int64_t end) {
    size_t size = mpt_dtype_size(dtype);

    if (begin >= end) return MPT_OK;
    return mpti_cuda_result(c, (int)cudaMemsetAsync((uint8_t *)p + (size_t)begin * size, 0,
                                                    (size_t)(end - begin) * size, c->compute), op);
}

static mpt_result mpti_cuda_gemm_fprop(mpti_cuda *c, const mpti_cuda_gemm *g, const void *x,
                                       const void *w, const float *bias, void *y) {
    mpt_result rc = MPT_OK;

    if (g->rows_valid > 0) {
        rc = mpti_cuda_multiply(c, g, true, false, g->out, g->rows_valid, g->in, w, x, y, g->dtype);
        if (rc == MPT_OK && bias)
            rc = mpti_cuda_result(
                c, mptk_add_bias(y, bias, g->rows_valid, g->out, g->dtype, c->compute), g->op);
    }
    if (rc) return rc;
    return mpti_cuda_zero(c, g->op, y, g->dtype, g->rows_valid * g->out, g->rows * g->out);
}

static mpt_result mpti_cuda_gemm_dgrad(mpti_cuda *c, const mpti_cuda_gemm *g, const void *dy,
                                       const void *w, void *dx) {
    mpt_result rc = MPT_OK;

    if (g->rows_valid > 0)
        rc = mpti_cuda_multiply(c, g, false, false, g->in, g->rows_valid, g->out, w, dy, dx,
                                g->dtype);
    if (rc) return rc;
    return mpti_cuda_zero(c, g->op, dx, g->dtype, g->rows_valid * g->in, g->rows * g->in);
}

static mpt_result mpti_cuda_gemm_wgrad(mpti_cuda *c, const mpti_cuda_gemm *g, const void *x,
                                       const void *dy, float *dw, float *dbias, void *workspace) {
    mpt_result rc;

    if (g->rows_valid == 0) {
        rc = mpti_cuda_zero(c, g->op, dw, MPT_F32, 0, (int64_t)g->out * g->in);
        if (rc || !dbias) return rc;
        return mpti_cuda_zero(c, g->op, dbias, MPT_F32, 0, g->out);
    }
    rc = mpti_cuda_multiply(c, g, false, true, g->in, g->out, g->rows_valid, x, dy, dw, MPT_F32);
    if (rc || !dbias) return rc;
    return mpti_cuda_result(
        c, mptk_sum_columns(dy, dbias, g->rows_valid, g->out, g->dtype, workspace, c->compute),
        g->op);
}

/* Is it a plain matrix product? FP32 is not: kernels.cu has the exact one. */
static bool mpti_cuda_gemm_of(const mpt_conv2d_args *a, const char *op, mpti_cuda_gemm *g) {
    g->op = op;
    g->rows = (int64_t)a->n * a->h * a->wd;
    g->rows_valid = (int64_t)a->num_valid * a->h * a->wd;
    g->in = a->c;
    g->out = a->k;
    g->dtype = a->dtype;
    return a->r == 1 && a->s == 1 && a->stride == 1 && a->padding == 0 && a->dtype != MPT_F32;
}

static const char *mpti_cuda_kernel_name(const mpt_conv2d_args *a, mpti_direction direction) {
    if (direction == MPTI_FPROP) return mptk_conv2d_fprop_kernel(a);
    return direction == MPTI_DGRAD ? mptk_conv2d_dgrad_kernel(a) : mptk_conv2d_wgrad_kernel(a);
}

static mpt_result mpti_cuda_conv2d_result(mpti_cuda *c, int error, mpti_direction direction,
                                          const char *op, const mpt_conv2d_args *a) {
    char what[256];

    if (error == (int)cudaSuccess) return MPT_OK;
    snprintf(what, sizeof what,
             "%s (%s) of x (%d,%d,%d,%d), w (%d,%d,%d,%d), stride %d, padding %d", op,
             mpti_cuda_kernel_name(a, direction), a->n, a->h, a->wd, a->c, a->k, a->r, a->s, a->c,
             a->stride, a->padding);
    return mpti_cuda_result(c, error, what);
}

static size_t mpti_cuda_kernel_bytes(const mpt_conv2d_args *a, mpti_direction direction) {
    if (direction == MPTI_FPROP) return mptk_conv2d_fprop_workspace_bytes(a);
    return direction == MPTI_DGRAD ? mptk_conv2d_dgrad_workspace_bytes(a)
                                   : mptk_conv2d_wgrad_workspace_bytes(a);
}

static size_t mpti_cuda_filter_bytes(const mpt_conv2d_args *a, mpti_direction direction) {
    return (size_t)a->k * (size_t)a->r * (size_t)a->s * (size_t)a->c *
           (direction == MPTI_WGRAD ? sizeof(float) : mpt_dtype_size(a->dtype));
}

static size_t mpti_cuda_conv2d_bytes(const mpt_conv2d_args *a, mpti_direction direction) {
    mpti_cuda_gemm g;

    if (mpti_cuda_gemm_of(a, NULL, &g))
        return direction == MPTI_WGRAD ? mptk_sum_columns_workspace_bytes(g.rows, g.out) : 0;
    return mpti_align(mpti_cuda_kernel_bytes(a, direction)) + mpti_cuda_filter_bytes(a, direction);
}

/* Filters and their gradients lie in flat rows, wherever the layer before ends, but kernels want
   them at multiples of 16 bytes: then behind the workspace there is room for a copy. */
static mpt_result mpti_cuda_conv2d_launch(mpti_cuda *c, const mpt_conv2d_args *a,
                                          mpti_direction direction, const char *op) {
    mpt_conv2d_args b = *a;
    uint8_t *aligned = (uint8_t *)a->workspace + mpti_align(mpti_cuda_kernel_bytes(a, direction));
    size_t bytes = mpti_cuda_filter_bytes(a, direction);
    cudaError_t error = cudaSuccess;

    if (direction == MPTI_WGRAD) {
        if ((uintptr_t)a->dw % 16) b.dw = (float *)(void *)aligned;
        error = (cudaError_t)mptk_conv2d_wgrad(&b, c->compute);
        if (error == cudaSuccess && b.dw != a->dw)
            error = cudaMemcpyAsync(a->dw, b.dw, bytes, cudaMemcpyDeviceToDevice, c->compute);
        return mpti_cuda_conv2d_result(c, (int)error, direction, op, a);
    }
    if ((uintptr_t)a->w % 16) {
        b.w = aligned;
        error = cudaMemcpyAsync(aligned, a->w, bytes, cudaMemcpyDeviceToDevice, c->compute);
    }
    if (error == cudaSuccess)
        error = (cudaError_t)(direction == MPTI_FPROP ? mptk_conv2d_fprop(&b, c->compute)
                                                      : mptk_conv2d_dgrad(&b, c->compute));
    return mpti_cuda_conv2d_result(c, (int)error, direction, op, a);
}

static mpt_result mpti_cuda_conv2d(void *self, const mpt_conv2d_args *a, mpti_direction direction,
                                   const char *op) {
    mpti_cuda *c = (mpti_cuda *)self;
    const void *const pointers[] = {a->x, a->dy, a->y, a->dx, a->workspace};
    const double input = (double)a->n * a->h * a->wd * (a->c + 7.0);
    const double output = (double)a->n * a->p * a->q * (a->k + 7.0);
    mpti_cuda_gemm g;
    mpt_result rc = mpti_check_conv2d(c->ctx, op, a);

    if (rc == MPT_OK)
        rc = mpti_cuda_check(c, op, a->dtype, input > output ? input : output, pointers,
                             (int)(sizeof pointers / sizeof pointers[0]));
    if (rc == MPT_OK)
        rc = mpti_check_workspace(c->ctx, op, a->workspace, a->workspace_bytes,
                                  mpti_cuda_conv2d_bytes(a, direction));
    if (rc) return rc;
    if (mpti_cuda_gemm_of(a, op, &g)) {
        if (direction == MPTI_FPROP)
            return mpti_cuda_gemm_fprop(c, &g, a->x, a->w, a->bias, a->y);
        if (direction == MPTI_DGRAD) return mpti_cuda_gemm_dgrad(c, &g, a->dy, a->w, a->dx);
        return mpti_cuda_gemm_wgrad(c, &g, a->x, a->dy, a->dw, a->dbias, a->workspace);
    }
    return mpti_cuda_conv2d_launch(c, a, direction, op);
}

static mpt_result mpti_cuda_dense(void *self, const mpt_dense_args *a, mpti_direction direction,
                                  const char *op) {
    mpt_conv2d_args conv = mpti_dense_as_conv2d(a);
    mpt_result rc = mpti_check_dense(((mpti_cuda *)self)->ctx, op, a);

    return rc ? rc : mpti_cuda_conv2d(self, &conv, direction, op);
}

/* 0 for shapes that the entry itself will refuse. */
static size_t mpti_cuda_conv2d_checked_bytes(void *self, const mpt_conv2d_args *a,
                                             mpti_direction direction) {
    if (mpti_check_conv2d(((mpti_cuda *)self)->ctx, "workspace_bytes", a)) return 0;
    return mpti_cuda_conv2d_bytes(a, direction);
}

/* As in >>cpu: four entries of the table. */
#define MPTI_CUDA_CONV_ENTRIES(name, direction) \
    static mpt_result mpti_cuda_conv2d_##name(void *self, const mpt_conv2d_args *a) { \
        return mpti_cuda_conv2d(self, a, direction, "conv2d_" #name); \
    } \
    static size_t mpti_cuda_conv2d_##name##_bytes(void *self, const mpt_conv2d_args *a) { \
        return mpti_cuda_conv2d_checked_bytes(self, a, direction); \
    } \
    static mpt_result mpti_cuda_dense_##name(void *self, const mpt_dense_args *a) { \
        return mpti_cuda_dense(self, a, direction, "dense_" #name); \
    } \
    static size_t mpti_cuda_dense_##name##_bytes(void *self, const mpt_dense_args *a) { \
        mpt_conv2d_args conv = mpti_dense_as_conv2d(a); \
        return mpti_cuda_conv2d_checked_bytes(self, &conv, direction); \
    }
MPTI_CUDA_CONV_ENTRIES(fprop, MPTI_FPROP)
MPTI_CUDA_CONV_ENTRIES(dgrad, MPTI_DGRAD)
MPTI_CUDA_CONV_ENTRIES(wgrad, MPTI_WGRAD)

/* ---- the other operators --------------------------------------------------------------------- */
static size_t mpti_cuda_batchnorm_bytes(void *self, const mpt_batchnorm_args *a) {
    if (mpti_check_batchnorm(((mpti_cuda *)self)->ctx, "workspace_bytes", a)) return 0;
    return mptk_batchnorm_workspace_bytes(a);
}

static mpt_result mpti_cuda_batchnorm(void *self, const mpt_batchnorm_args *a, const char *op,
                                      int (*launch)(const mpt_batchnorm_args *, void *)) {
    mpti_cuda *c = (mpti_cuda *)self;
    const void *const pointers[] = {a->x, a->residual, a->y, a->dy, a->dx, a->dresidual};
    char what[128];
    mpt_result rc = mpti_check_batchnorm(c->ctx, op, a);
    int error;

    if (rc == MPT_OK)
        rc = mpti_cuda_check(c, op, a->dtype, (double)a->n * a->h * a->wd * a->c, pointers,
                             (int)(sizeof pointers / sizeof pointers[0]));
    if (rc == MPT_OK)
        rc = mpti_check_workspace(c->ctx, op, a->workspace, a->workspace_bytes,
                                  mptk_batchnorm_workspace_bytes(a));
    if (rc) return rc;
    error = launch(a, c->compute);
    if (error == (int)cudaSuccess) return MPT_OK;
    snprintf(what, sizeof what, "%s of x (%d,%d,%d,%d)", op, a->n, a->h, a->wd, a->c);
    return mpti_cuda_result(c, error, what);
}

static mpt_result mpti_cuda_batchnorm_forward(void *self, const mpt_batchnorm_args *a) {
    return mpti_cuda_batchnorm(self, a, "batchnorm_forward", mptk_batchnorm_forward);
}

static mpt_result mpti_cuda_batchnorm_backward(void *self, const mpt_batchnorm_args *a) {
    return mpti_cuda_batchnorm(self, a, "batchnorm_backward", mptk_batchnorm_backward);
}

static mpt_result mpti_cuda_pointwise(void *self, const mpt_pointwise_args *a, const char *op,
                                      int (*launch)(const mpt_pointwise_args *, void *)) {
    mpti_cuda *c = (mpti_cuda *)self;
    const void *const pointers[] = {a->a, a->b, a->y};
    char what[128];
    mpt_result rc = mpti_check_pointwise(c->ctx, op, a);
    int error;

    if (rc == MPT_OK)
        rc = mpti_cuda_check(c, op, a->dtype, (double)a->n * (double)a->per_sample, pointers,
                             (int)(sizeof pointers / sizeof pointers[0]));
    if (rc) return rc;
    error = launch(a, c->compute);
    if (error == (int)cudaSuccess) return MPT_OK;
    snprintf(what, sizeof what, "%s of (%d,%lld)", op, a->n, (long long)a->per_sample);
    return mpti_cuda_result(c, error, what);
}

static mpt_result mpti_cuda_relu_forward(void *self, const mpt_pointwise_args *a) {
    return mpti_cuda_pointwise(self, a, "relu_forward", mptk_relu_forward);
}

static mpt_result mpti_cuda_relu_backward(void *self, const mpt_pointwise_args *a) {
    return mpti_cuda_pointwise(self, a, "relu_backward", mptk_relu_backward);
}

static mpt_result mpti_cuda_add(void *self, const mpt_pointwise_args *a) {
    return mpti_cuda_pointwise(self, a, "add", mptk_add);
}

static mpt_result mpti_cuda_pool(void *self, const mpt_pool2d_args *a, const char *op,
                                 mpti_pool_kind kind,
                                 int (*launch)(const mpt_pool2d_args *, void *)) {
    mpti_cuda *c = (mpti_cuda *)self;
    const void *const pointers[] = {a->x, a->y, a->dy, a->dx};
    char what[160];
    mpt_result rc = mpti_check_pool2d(c->ctx, op, a, kind);
    int error;

    if (rc == MPT_OK)
        rc = mpti_cuda_check(c, op, a->dtype, (double)a->n * a->h * a->wd * a->c, pointers,
                             (int)(sizeof pointers / sizeof pointers[0]));
    if (rc) return rc;
    error = launch(a, c->compute);
    if (error == (int)cudaSuccess) return MPT_OK;
    snprintf(what, sizeof what, "%s of x (%d,%d,%d,%d), kernel %d, stride %d, padding %d", op, a->n,
             a->h, a->wd, a->c, a->kernel, a->stride, a->padding);
    return mpti_cuda_result(c, error, what);
}

#define MPTI_CUDA_POOL_ENTRIES(name, kind) \
    static mpt_result mpti_cuda_##name##_forward(void *self, const mpt_pool2d_args *a) { \
        return mpti_cuda_pool(self, a, #name "_forward", kind, mptk_##name##_forward); \
    } \
    static mpt_result mpti_cuda_##name##_backward(void *self, const mpt_pool2d_args *a) { \
        return mpti_cuda_pool(self, a, #name "_backward", kind, mptk_##name##_backward); \
    }
MPTI_CUDA_POOL_ENTRIES(max_pool, MPTI_POOL_MAX)
MPTI_CUDA_POOL_ENTRIES(avg_pool, MPTI_POOL_AVG)
MPTI_CUDA_POOL_ENTRIES(global_avg_pool, MPTI_POOL_GLOBAL)

static mpt_result mpti_cuda_dropout(void *self, const mpt_dropout_args *a) {
    mpti_cuda *c = (mpti_cuda *)self;
    const void *const pointers[] = {a->x, a->y};
    mpt_result rc = mpti_check_dropout(c->ctx, "dropout", a);

    if (rc == MPT_OK)
        rc = mpti_cuda_check(c, "dropout", a->dtype, (double)a->n * (double)a->per_sample, pointers,
                             2);
    return rc ? rc : mpti_cuda_result(c, mptk_dropout(a, c->compute), "dropout");
}

static size_t mpti_cuda_softmax_xent_bytes(void *self, const mpt_softmax_xent_args *a) {
    (void)self;
    return mptk_softmax_xent_workspace_bytes(a);
}

/* Labels are on the device: whoever sends them looks at them first. */
static mpt_result mpti_cuda_softmax_xent(void *self, const mpt_softmax_xent_args *a) {
    mpti_cuda *c = (mpti_cuda *)self;
    const void *const pointers[] = {a->logits, a->dlogits, a->probabilities};
    const char *op = "softmax_xent";
    char what[128];
    mpt_result rc = mpti_check_softmax(c->ctx, op, a);
    int error;

    if (rc == MPT_OK)
        rc = mpti_cuda_check(c, op, a->dtype, (double)a->n * a->classes, pointers, 3);
    if (rc == MPT_OK)
        rc = mpti_check_workspace(c->ctx, op, a->workspace, a->workspace_bytes,
                                  mptk_softmax_xent_workspace_bytes(a));
    if (rc) return rc;
    error = mptk_softmax_xent(a, c->compute);
    if (error == (int)cudaSuccess) return MPT_OK;
    snprintf(what, sizeof what, "%s of logits (%d,%d)", op, a->n, a->classes);
    return mpti_cuda_result(c, error, what);
}

static mpt_result mpti_cuda_cast(void *self, const mpt_cast_args *a) {
    mpti_cuda *c = (mpti_cuda *)self;
    const void *const pointers[] = {a->src, a->dst};
    mpt_result rc = mpti_check_row(c->ctx, "cast", a->count, a->src_dtype, a->dst_dtype);

    if (rc == MPT_OK) rc = mpti_cuda_check(c, "cast", MPT_F32, (double)a->count, pointers, 0);
    return rc ? rc : mpti_cuda_result(c, mptk_cast(a, c->compute), "cast");
}

static mpt_result mpti_cuda_input_normalize(void *self, const mpt_normalize_args *a) {
    mpti_cuda *c = (mpti_cuda *)self;
    const void *const pointers[] = {a->x, a->y};
    mpt_result rc = mpti_check_normalize(c->ctx, a);

    if (rc == MPT_OK)
        rc = mpti_cuda_check(c, "input_normalize", a->dtype, (double)a->n * a->h * a->wd * a->c,
                             pointers, 2);
    return rc ? rc : mpti_cuda_result(c, mptk_input_normalize(a, c->compute), "input_normalize");
}

static mpt_result mpti_cuda_fill(void *self, const mpt_fill_args *a) {
    mpti_cuda *c = (mpti_cuda *)self;
    mpt_result rc = mpti_check_row(c->ctx, "fill", a->count, a->dtype, a->dtype);

    if (rc == MPT_OK) rc = mpti_cuda_enter(c);
    if (rc) return rc;
    if (mpti_f32_bits(a->value) == 0)
        return mpti_cuda_zero(c, "fill", a->dst, a->dtype, 0, a->count);
    return mpti_cuda_result(c, mptk_fill(a, c->compute), "fill");
}

static mpt_result mpti_cuda_copy(void *self, const mpt_copy_args *a) {
    mpti_cuda *c = (mpti_cuda *)self;
    mpt_result rc = mpti_cuda_enter(c);

    if (rc || a->bytes == 0) return rc;
    return mpti_cuda_result(c, (int)cudaMemcpyAsync(a->dst, a->src, a->bytes,
                                                    cudaMemcpyDeviceToDevice, c->compute), "copy");
}

static mpt_result mpti_cuda_scale(void *self, const mpt_scale_args *a) {
    mpti_cuda *c = (mpti_cuda *)self;
    mpt_result rc = mpti_check_row(c->ctx, "scale", a->count, MPT_F32, MPT_F32);

    if (rc == MPT_OK) rc = mpti_cuda_enter(c);
    return rc ? rc : mpti_cuda_result(c, mptk_scale(a, c->compute), "scale");
}

/* ---- the update ------------------------------------------------------------------------------ */
static mpt_result mpti_cuda_update(void *self, const mpt_update_args *a) {
    mpti_cuda *c = (mpti_cuda *)self;
    const int report = (int)(a->step % MPTI_CUDA_REPORTS);
    mpt_result rc = mpti_cuda_enter(c);

    if (rc == MPT_OK) rc = mpti_cuda_result(c, mptk_update(a, c->compute), "update");
    if (rc == MPT_OK)
        rc = mpti_cuda_result(
            c, (int)cudaMemcpyAsync(&c->reports[report], a->state, sizeof *a->state,
                                    cudaMemcpyDeviceToHost, c->compute), "copying a report");
    if (rc) return rc;
    return mpti_cuda_result(c, (int)cudaEventRecord(c->reported[report], c->compute),
                            "cudaEventRecord");
}

static mpt_result mpti_cuda_update_wait(void *self, int64_t step, mpt_step_state *out) {
    mpti_cuda *c = (mpti_cuda *)self;
    const int report = (int)(step % MPTI_CUDA_REPORTS);
    mpt_result rc =
        mpti_cuda_result(c, (int)cudaEventSynchronize(c->reported[report]), "a training step");

    if (rc == MPT_OK) *out = c->reports[report];
    return rc;
}

/* ---- opening a device ------------------------------------------------------------------------ */
static const char *mpti_cuda_kernels(void *self) { return ((const mpti_cuda *)self)->name; }

static void mpti_cuda_close(void *self) {
    mpti_cuda *c = (mpti_cuda *)self;
    int i;

    if (!c) return;
    if (c->compute) (void)cudaStreamSynchronize(c->compute);
    if (c->copy) (void)cudaStreamSynchronize(c->copy);
    mpti_cuda_stage_release(c);
    for (i = 0; i < MPTI_CUDA_SLOTS; i++) {
        if (c->slots[i].copied) (void)cudaEventDestroy(c->slots[i].copied);
        if (c->slots[i].consumed) (void)cudaEventDestroy(c->slots[i].consumed);
    }
    for (i = 0; i < MPTI_CUDA_REPORTS; i++)
        if (c->reported[i]) (void)cudaEventDestroy(c->reported[i]);
    if (c->reports) (void)cudaFreeHost(c->reports);
    if (c->blas) (void)cublasDestroy(c->blas);
    if (c->blas_workspace) (void)cudaFree(c->blas_workspace);
    if (c->copy) (void)cudaStreamDestroy(c->copy);
    if (c->compute) (void)cudaStreamDestroy(c->compute);
    mpti_free(&c->ctx->desc.allocator, c, sizeof *c);
}

/* A driver that is too old, no device, and a device number too high are different advice. Where no
   driver is at all, its version is 0, and the runtime calls that too old as well. */
static mpt_result mpti_cuda_find(mpti_cuda *c) {
    int count = 0, driver = 0, runtime = 0;
    cudaError_t error = cudaGetDeviceCount(&count);

    (void)cudaDriverGetVersion(&driver);
    (void)cudaRuntimeGetVersion(&runtime);
    (void)cudaGetLastError(); /* told below */
    if (error == cudaErrorInsufficientDriver && driver > 0)
        return MPTI_REPORT(c->ctx, MPT_ERR_DEVICE,
                           "the NVIDIA driver knows CUDA %d.%d, this program needs %d.%d: update "
                           "the driver, or build with an older CUDA toolkit",
                           driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    if (error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver ||
        (error == cudaSuccess && count == 0))
        return MPTI_REPORT(c->ctx, MPT_ERR_DEVICE,
                           "no CUDA device: is there an NVIDIA GPU, and does CUDA_VISIBLE_DEVICES "
                           "leave it visible? The CPU backend needs none");
    if (error != cudaSuccess) return mpti_cuda_result(c, (int)error, "cudaGetDeviceCount");
    if (c->device < 0 || c->device >= count)
        return MPTI_REPORT(c->ctx, MPT_ERR_INVALID_ARGUMENT,
                           "mpt_ctx_desc.device is %d, there are %d CUDA devices", c->device,
                           count);
    return mpti_cuda_enter(c);
}

/* kernels.cu must be of this version, and compiled for this device. */
static mpt_result mpti_cuda_check_kernels(mpti_cuda *c) {
    int major = 0, minor = 0;
    cudaError_t error;

    if (mptk_abi_version() != MPT_ABI_VERSION)
        return MPTI_REPORT(c->ctx, MPT_ERR_UNSUPPORTED,
                           "kernels.cu was compiled with ABI %d, mptrain.h has ABI %d: compile "
                           "both from the same version",
                           mptk_abi_version(), MPT_ABI_VERSION);
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, c->device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, c->device);
    if (error != cudaSuccess) return mpti_cuda_result(c, (int)error, "cudaDeviceGetAttribute");
    c->arch = major * 10 + minor;
    snprintf(c->name, sizeof c->name, "sm_%d", c->arch);
    if (c->arch < 70)
        return MPTI_REPORT(c->ctx, MPT_ERR_UNSUPPORTED,
                           "device %d has compute capability %d.%d: tensor cores begin with 7.0",
                           c->device, major, minor);
    return MPT_OK;
}

/* One kernel, to see whether this device has code at all. */
static mpt_result mpti_cuda_try_kernel(mpti_cuda *c) {
    mpt_fill_args a;
    int error;
    mpt_result rc;

    memset(&a, 0, sizeof a);
    a.count = 8;
    a.value = 1;
    a.dtype = MPT_F32;
    rc = mpti_cuda_alloc(c, 8 * sizeof(float), &a.dst);
    if (rc) return rc;
    error = mptk_fill(&a, c->compute);
    if (error == (int)cudaSuccess) error = (int)cudaStreamSynchronize(c->compute);
    (void)cudaFree(a.dst);
    (void)cudaGetLastError();
    if (error == (int)cudaErrorNoKernelImageForDevice ||
        error == (int)cudaErrorInvalidDeviceFunction ||
        error == (int)cudaErrorUnsupportedPtxVersion)
        return MPTI_REPORT(c->ctx, MPT_ERR_UNSUPPORTED,
                           "kernels.cu was compiled for sm %s, the device is %s (%s): compile it "
                           "with -gencode arch=compute_%d,code=sm_%d",
                           mptk_arch_list(), c->name, cudaGetErrorName((cudaError_t)error), c->arch,
                           c->arch);
    return mpti_cuda_result(c, error, "a first kernel");
}

static mpt_result mpti_cuda_make_streams(mpti_cuda *c) {
    cudaError_t error = cudaStreamCreateWithFlags(&c->compute, cudaStreamNonBlocking);
    int i;

    if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&c->copy, cudaStreamNonBlocking);
    for (i = 0; i < MPTI_CUDA_SLOTS && error == cudaSuccess; i++) {
        error = cudaEventCreateWithFlags(&c->slots[i].copied, cudaEventDisableTiming);
        if (error == cudaSuccess)
            error = cudaEventCreateWithFlags(&c->slots[i].consumed, cudaEventDisableTiming);
    }
    for (i = 0; i < MPTI_CUDA_REPORTS && error == cudaSuccess; i++)
        error = cudaEventCreateWithFlags(&c->reported[i], cudaEventDisableTiming);
    if (error == cudaSuccess)
        error = cudaMallocHost((void **)&c->reports, MPTI_CUDA_REPORTS * sizeof *c->reports);
    return mpti_cuda_result(c, (int)error, "making streams");
}

/* A workspace of its own makes cuBLAS reproducible and lets it be recorded; the sizes are NVIDIA's
   defaults (cuBLAS documentation, cublasSetWorkspace). It belongs to the context. */
static mpt_result mpti_cuda_make_blas(mpti_cuda *c) {
    const size_t bytes = (size_t)(c->arch >= 90 ? 32 : 4) << 20;
    cublasStatus_t status;
    mpt_result rc = mpti_cuda_alloc(c, bytes, &c->blas_workspace);

    if (rc) return rc;
    status = cublasCreate(&c->blas);
    if (status == CUBLAS_STATUS_SUCCESS) status = cublasSetStream(c->blas, c->compute);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = cublasSetWorkspace(c->blas, c->blas_workspace, bytes);
    return mpti_cublas_result(c, status, "opening cuBLAS");
}

static mpt_result mpti_cuda_open(mpt_ctx *ctx, int device, void **self) {
    mpti_cuda *c = (mpti_cuda *)mpti_calloc(&ctx->desc.allocator, 1, sizeof *c);
    mpt_result rc;

    *self = NULL;
    if (!c) return MPTI_REPORT(ctx, MPT_ERR_OUT_OF_MEMORY, "no memory for the cuda backend");
    c->ctx = ctx;
    c->device = device;
    snprintf(c->name, sizeof c->name, "cuda");
    rc = mpti_cuda_find(c);
    if (rc == MPT_OK) rc = mpti_cuda_check_kernels(c);
    if (rc == MPT_OK) rc = mpti_cuda_make_streams(c);
    if (rc == MPT_OK) rc = mpti_cuda_try_kernel(c);
    if (rc == MPT_OK) rc = mpti_cuda_make_blas(c);
    if (rc) {
        mpti_cuda_close(c);
        return rc;
    }
    *self = c;
    return MPT_OK;
}

MPT_API const mpt_backend *mpt_backend_cuda(void) {
    static const mpt_backend table = {
        "cuda", mpti_cuda_open, mpti_cuda_close, mpti_cuda_kernels,
        mpti_cuda_conv2d_fprop_bytes, mpti_cuda_conv2d_dgrad_bytes, mpti_cuda_conv2d_wgrad_bytes,
        mpti_cuda_conv2d_fprop, mpti_cuda_conv2d_dgrad, mpti_cuda_conv2d_wgrad,
        mpti_cuda_dense_fprop_bytes, mpti_cuda_dense_dgrad_bytes, mpti_cuda_dense_wgrad_bytes,
        mpti_cuda_dense_fprop, mpti_cuda_dense_dgrad, mpti_cuda_dense_wgrad,
        mpti_cuda_batchnorm_bytes, mpti_cuda_batchnorm_bytes,
        mpti_cuda_batchnorm_forward, mpti_cuda_batchnorm_backward,
        mpti_cuda_relu_forward, mpti_cuda_relu_backward, mpti_cuda_add,
        mpti_cuda_max_pool_forward, mpti_cuda_max_pool_backward,
        mpti_cuda_avg_pool_forward, mpti_cuda_avg_pool_backward,
        mpti_cuda_global_avg_pool_forward, mpti_cuda_global_avg_pool_backward,
        mpti_cuda_dropout, mpti_cuda_dropout,
        mpti_cuda_softmax_xent_bytes, mpti_cuda_softmax_xent,
        mpti_cuda_cast, mpti_cuda_input_normalize, mpti_cuda_fill, mpti_cuda_copy, mpti_cuda_scale,
        mpti_cuda_alloc, mpti_cuda_free, mpti_cuda_upload, mpti_cuda_download,
        mpti_cuda_stage_reserve, mpti_cuda_stage_begin, mpti_cuda_stage_end,
        mpti_cuda_record_begin, mpti_cuda_record_end, mpti_cuda_replay, mpti_cuda_forget,
        mpti_cuda_stream, mpti_cuda_update, mpti_cuda_update_wait,
    };
    return &table;
}
#endif /* MPTRAIN_CUDA */

/* =================================================================================================
 * >>layers   7 Layers: shapes and parameters, one step forward, one step backward
 * =================================================================================================
 *
 * Problem: a model is a list of layers; each has to say what shape it makes of its input, and later
 *          to find its inputs, weights and places for results.
 * Idea:    a node for each layer; one struct knows where everything lies; a step fills in the
 *          arguments of an operator of the backend and calls it. Backward visits the steps in
 *          reverse: the first one that knows a gradient of a value writes it, later ones add.
 * Shapes:  value v: (capacity, height, width, channels); its gradient likewise. Parameters are one
 *          flat row of FP32 in layer order: conv (K,R,S,C), then its bias; gamma, beta;
 *          dense (out, in), then its bias.
 * Tested:  tests/test_gradients.c, against double precision; tests/test_custom.c
 * Next:    >>model, which makes a list of nodes a model.
 */
typedef enum mpti_kind {
    MPTI_KIND_INPUT = 0,
    MPTI_KIND_CONV2D,
    MPTI_KIND_BATCHNORM,
    MPTI_KIND_RELU,
    MPTI_KIND_ADD,
    MPTI_KIND_MAX_POOL,
    MPTI_KIND_AVG_POOL,
    MPTI_KIND_GLOBAL_AVG_POOL,
    MPTI_KIND_DENSE,
    MPTI_KIND_DROPOUT,
    MPTI_KIND_CUSTOM
} mpti_kind;

static const char *mpti_kind_name(mpti_kind kind) {
    static const char *const names[] = {
        "input",    "conv2d",          "batchnorm", "relu",    "add",   "max_pool",
        "avg_pool", "global_avg_pool", "dense",     "dropout", "custom"};
    return names[kind];
}

enum { MPTI_NAME_BYTES = 64, MPTI_MAX_LAYERS = 10000 };

typedef struct mpti_node {
    mpti_kind kind;
    int in[MPT_CUSTOM_MAX_INPUTS], num_in; /* values */
    int h, w, c;       /* of the output */
    int kernel, stride, padding, use_bias;
    float epsilon, momentum, probability;
    int zero_init_gamma;
    mpt_custom_desc custom;
    int number;           /* of its kind, from 0: the dropout layer's key */
    int64_t param_offset; /* in the flat row; -1: none */
    int64_t num_params;
    int64_t stat_offset; /* batch norm: of running mean (c), then running var (c); -1: none */
    int num_uses;        /* layers that read the output */
    /* after fusing: the step that computes this node's batch norm, and what goes with it */
    bool fused;        /* the output is kept nowhere: a later node computes it on the way */
    int norm;          /* ReLU or add that ends such a row: its batch norm; else -1 */
    int residual;      /* value added on the way; -1: none */
    bool ends_in_relu; /* of a row that ends here */
    char name[MPTI_NAME_BYTES];
} mpti_node;

/* Where a node's data lie in the trainer's activation memory. */
typedef struct mpti_place {
    size_t value, gradient; /* bytes from the start */
    size_t argmax;          /* max pooling: which element was the largest */
    size_t bytes;           /* of the value */
    bool begun;             /* its gradient has been written once, and its step has not run */
} mpti_place;

struct mpt_model {
    mpt_ctx *ctx;
    mpti_node *nodes; /* [num_nodes]; node v computes value v; node 0 is the input */
    int num_nodes, capacity;
    int logits; /* value; -1: not finished */
    int64_t num_params, num_stats;
    mpti_place *places; /* [num_nodes] of a finished model: so a plan allocates nothing */
    mpt_error wiring;   /* the first mistake; code MPT_OK: none */
};

static int mpti_model_fail(mpt_model *m, mpti_kind kind, const char *what) { /* returns -1 */
    if (m->wiring.code == MPT_OK)
        MPTI_FAIL(&m->wiring, MPT_ERR_INVALID_ARGUMENT, "layer %d (%s): %s", m->num_nodes,
                  mpti_kind_name(kind), what);
    return -1;
}

/* "(h,w,c) and (h,w,c)": in messages about shapes. */
static const char *mpti_shape_text(const mpti_node *a, const mpti_node *b, char text[96]) {
    int n = snprintf(text, 96, "(%d,%d,%d)", a->h, a->w, a->c);
    if (b) snprintf(text + n, 96 - (size_t)n, " and (%d,%d,%d)", b->h, b->w, b->c);
    return text;
}

static bool mpti_model_grow(mpt_model *m) {
    const mpt_allocator *a = &m->ctx->desc.allocator;
    int capacity = m->capacity ? 2 * m->capacity : 32;
    mpti_node *nodes = (mpti_node *)mpti_calloc(a, (size_t)capacity, sizeof *nodes);

    if (!nodes) return false;
    if (m->num_nodes) memcpy(nodes, m->nodes, sizeof *nodes * (size_t)m->num_nodes);
    mpti_free(a, m->nodes, sizeof *nodes * (size_t)m->capacity);
    m->nodes = nodes;
    m->capacity = capacity;
    return true;
}

/* A new node that reads in[num_in] and has the shape of the first. NULL: the model is broken. */
static mpti_node *mpti_model_add(mpt_model *m, mpti_kind kind, const int *in, int num_in) {
    mpti_node *node;
    int i;

    if (!m || m->wiring.code != MPT_OK) return NULL;
    if (m->logits >= 0) {
        mpti_model_fail(m, kind, "the model is finished: nothing can be added");
        return NULL;
    }
    if (m->num_nodes > MPTI_MAX_LAYERS) {
        mpti_model_fail(m, kind, "a model has at most 10000 layers");
        return NULL;
    }
    for (i = 0; i < num_in; i++) {
        if (in[i] >= 0 && in[i] < m->num_nodes) continue;
        mpti_model_fail(m, kind, "its input is no value of this model: pass MPT_INPUT or what a "
                                 "layer returned");
        return NULL;
    }
    if (m->num_nodes == m->capacity && !mpti_model_grow(m)) {
        MPTI_FAIL(&m->wiring, MPT_ERR_OUT_OF_MEMORY, "no memory for layer %d", m->num_nodes);
        return NULL;
    }
    node = &m->nodes[m->num_nodes];
    memset(node, 0, sizeof *node);
    node->kind = kind;
    memcpy(node->in, in, sizeof *in * (size_t)num_in);
    node->num_in = num_in;
    node->h = m->nodes[in[0]].h;
    node->w = m->nodes[in[0]].w;
    node->c = m->nodes[in[0]].c;
    node->param_offset = node->stat_offset = -1;
    node->norm = node->residual = -1;
    for (i = 0; i < m->num_nodes; i++) node->number += m->nodes[i].kind == kind;
    snprintf(node->name, sizeof node->name, "%s%d", mpti_kind_name(kind), node->number);
    return node;
}

/* The node counts from here on. Returns its value. */
static int mpti_model_keep(mpt_model *m, mpti_node *node, int64_t num_params, int64_t num_stats) {
    int i;

    if ((int64_t)node->h * node->w * node->c > INT32_MAX)
        return mpti_model_fail(m, node->kind, "its output has more than 2^31 numbers a record");
    node->num_params = num_params;
    if (num_params) node->param_offset = m->num_params;
    if (num_stats) node->stat_offset = m->num_stats;
    m->num_params += num_params;
    m->num_stats += num_stats;
    for (i = 0; i < node->num_in; i++) m->nodes[node->in[i]].num_uses++;
    return m->num_nodes++;
}

static mpt_tensor mpti_custom_tensor(const mpti_node *node, int64_t n, void *data) {
    mpt_tensor t;

    t.data = data;
    t.dims[0] = n;
    t.dims[1] = node->h;
    t.dims[2] = node->w;
    t.dims[3] = node->c;
    t.num_dims = 4;
    t.dtype = MPT_F32;
    return t;
}

static bool mpti_is_side(int64_t x) { /* of a picture */
    return x >= 1 && x <= 16384;
}

/* ---- layers: shapes and parameters ----------------------------------------------------------- */

/* How often a window fits into `size` elements, padded on both sides; 0: it doesn't. */
static int mpti_window_outputs(int size, int kernel, int stride, int padding) {
    int padded = size + 2 * padding;
    return padded < kernel ? 0 : (padded - kernel) / stride + 1;
}

static bool mpti_model_window(mpt_model *m, mpti_node *node, int kernel, int stride, int padding) {
    char what[256], shape[96];

    node->kernel = kernel;
    node->stride = stride;
    node->padding = padding;
    mpti_shape_text(node, NULL, shape);
    node->h = mpti_window_outputs(node->h, kernel, stride, padding);
    node->w = mpti_window_outputs(node->w, kernel, stride, padding);
    if (node->h > 0 && node->w > 0) return true;
    snprintf(
        what, sizeof what,
        "a window of %d x %d with padding %d doesn't fit into %s: the picture is too small, or "
        "there are too many strides before",
        kernel, kernel, padding, shape);
    mpti_model_fail(m, node->kind, what);
    return false;
}

MPT_API int mpt_conv2d(mpt_model *m, int x, const mpt_conv2d_desc *desc) {
    mpti_node *node = mpti_model_add(m, MPTI_KIND_CONV2D, &x, 1);
    int kernel, stride, in_channels;

    if (!node) return -1;
    kernel = desc && desc->kernel ? desc->kernel : 3;
    stride = desc && desc->stride ? desc->stride : 1;
    if (!desc || desc->out_channels < 1 || desc->out_channels > 65536)
        return mpti_model_fail(m, node->kind, "mpt_conv2d_desc.out_channels must be in 1 .. 65536");
    if (kernel < 1 || kernel > 64 || stride < 1 || stride > 64 || desc->padding < 0 ||
        desc->padding > 64)
        return mpti_model_fail(m, node->kind,
                               "kernel and stride must be in 1 .. 64, padding in 0 .. 64");
    in_channels = node->c;
    if (!mpti_model_window(m, node, kernel, stride, desc->padding)) return -1;
    node->c = desc->out_channels;
    node->use_bias = desc->use_bias != 0;
    return mpti_model_keep(m, node,
                           (int64_t)node->c * kernel * kernel * in_channels +
                               (node->use_bias ? node->c : 0),
                           0);
}

MPT_API int mpt_batchnorm(mpt_model *m, int x, const mpt_batchnorm_desc *desc) {
    mpti_node *node = mpti_model_add(m, MPTI_KIND_BATCHNORM, &x, 1);

    if (!node) return -1;
    node->epsilon = desc && desc->epsilon != 0 ? desc->epsilon : 1e-5f;
    node->momentum = desc && desc->momentum != 0 ? desc->momentum : 0.1f;
    node->zero_init_gamma = desc && desc->zero_init_gamma;
    if (!(node->epsilon > 0 && node->momentum > 0 && node->momentum <= 1))
        return mpti_model_fail(m, node->kind, "epsilon must be above 0, momentum in 0 .. 1");
    return mpti_model_keep(m, node, 2 * (int64_t)node->c, 2 * (int64_t)node->c);
}

MPT_API int mpt_relu(mpt_model *m, int x) {
    mpti_node *node = mpti_model_add(m, MPTI_KIND_RELU, &x, 1);
    return node ? mpti_model_keep(m, node, 0, 0) : -1;
}

MPT_API int mpt_add(mpt_model *m, int x, int y) {
    const int in[2] = {x, y};
    mpti_node *node = mpti_model_add(m, MPTI_KIND_ADD, in, 2);
    const mpti_node *other;
    char what[200], shapes[96];

    if (!node) return -1;
    other = &m->nodes[y];
    if (node->h != other->h || node->w != other->w || node->c != other->c) {
        snprintf(what, sizeof what,
                 "shapes %s differ: put a 1 x 1 convolution with the right stride on the shortcut",
                 mpti_shape_text(node, other, shapes));
        return mpti_model_fail(m, node->kind, what);
    }
    return mpti_model_keep(m, node, 0, 0);
}

static int mpti_model_pool(mpt_model *m, mpti_kind kind, int x, int kernel, int stride,
                           int padding) {
    mpti_node *node = mpti_model_add(m, kind, &x, 1);

    if (!node) return -1;
    if (kernel < 1 || kernel > 16 || stride < 1 || stride > 16 || padding < 0 ||
        padding > kernel / 2)
        return mpti_model_fail(m, kind,
                               "kernel and stride must be in 1 .. 16, padding in 0 .. kernel / 2");
    return mpti_model_window(m, node, kernel, stride, padding) ? mpti_model_keep(m, node, 0, 0)
                                                               : -1;
}

MPT_API int mpt_max_pool(mpt_model *m, int x, int kernel, int stride, int padding) {
    return mpti_model_pool(m, MPTI_KIND_MAX_POOL, x, kernel, stride, padding);
}

MPT_API int mpt_avg_pool(mpt_model *m, int x, int kernel, int stride, int padding) {
    return mpti_model_pool(m, MPTI_KIND_AVG_POOL, x, kernel, stride, padding);
}

MPT_API int mpt_global_avg_pool(mpt_model *m, int x) {
    mpti_node *node = mpti_model_add(m, MPTI_KIND_GLOBAL_AVG_POOL, &x, 1);

    if (!node) return -1;
    node->h = node->w = 1;
    return mpti_model_keep(m, node, 0, 0);
}

MPT_API int mpt_dense(mpt_model *m, int x, int out_features) {
    mpti_node *node = mpti_model_add(m, MPTI_KIND_DENSE, &x, 1);
    int64_t in;

    if (!node) return -1;
    in = (int64_t)node->h * node->w * node->c;
    if (out_features < 1 || out_features > 1 << 24 || in > 1 << 28)
        return mpti_model_fail(m, node->kind,
                               "out_features must be in 1 .. 2^24, inputs at most 2^28");
    node->h = node->w = 1;
    node->c = out_features;
    node->use_bias = 1;
    return mpti_model_keep(m, node, in * out_features + out_features, 0);
}

MPT_API int mpt_dropout(mpt_model *m, int x, float p) {
    mpti_node *node = mpti_model_add(m, MPTI_KIND_DROPOUT, &x, 1);

    if (!node) return -1;
    if (!(p >= 0 && p < 1))
        return mpti_model_fail(m, node->kind, "p must be in 0 .. 1, 1 excluded");
    if (node->number >= MPTI_MAX_DROPOUT_LAYERS)
        return mpti_model_fail(m, node->kind, "a model has at most 192 dropout layers");
    node->probability = p;
    return mpti_model_keep(m, node, 0, 0);
}

/* Asks a custom layer for shape, parameters and workspace with n records. */
static mpt_result mpti_custom_infer(const mpt_model *m, const mpti_node *node, int64_t n,
                                    mpt_tensor *out, size_t *num_params, size_t *workspace) {
    mpt_tensor in[MPT_CUSTOM_MAX_INPUTS];
    int i;

    for (i = 0; i < node->num_in; i++)
        in[i] = mpti_custom_tensor(&m->nodes[node->in[i]], n, NULL);
    memset(out, 0, sizeof *out);
    *num_params = *workspace = 0;
    return node->custom.infer(in, node->num_in, out, num_params, workspace, node->custom.user);
}

MPT_API int mpt_custom(mpt_model *m, const int *inputs, int num_inputs,
                       const mpt_custom_desc *desc) {
    mpti_node *node;
    mpt_tensor out;
    size_t num_params, workspace;
    char what[200];
    mpt_result rc;

    if (!m) return -1;
    if (!inputs || num_inputs < 1 || num_inputs > MPT_CUSTOM_MAX_INPUTS || !desc || !desc->infer ||
        !desc->forward || !desc->backward)
        return mpti_model_fail(m, MPTI_KIND_CUSTOM,
                               "a custom layer needs 1 .. 4 inputs, infer, forward and backward");
    node = mpti_model_add(m, MPTI_KIND_CUSTOM, inputs, num_inputs);
    if (!node) return -1;
    node->custom = *desc;
    if (desc->name && strlen(desc->name) > 48)
        return mpti_model_fail(m, MPTI_KIND_CUSTOM, "its name must have at most 48 bytes");
    if (desc->name) snprintf(node->name, sizeof node->name, "%s%d", desc->name, node->number);
    rc = mpti_custom_infer(m, node, 1, &out, &num_params, &workspace);
    if (rc) {
        snprintf(what, sizeof what, "infer of %s refused its inputs: %s", node->name,
                 mpt_result_string(rc));
        return mpti_model_fail(m, MPTI_KIND_CUSTOM, what);
    }
    if (out.num_dims != 4 || out.dims[0] != 1 || !mpti_is_side(out.dims[1]) ||
        !mpti_is_side(out.dims[2]) || out.dims[3] < 1 || out.dims[3] > 1 << 24 ||
        num_params > (size_t)1 << 40)
        return mpti_model_fail(m, MPTI_KIND_CUSTOM,
                               "infer must set out's four dims (n, height, width, channels), with "
                               "n as in its inputs, and at most 2^40 parameters");
    node->h = (int)out.dims[1];
    node->w = (int)out.dims[2];
    node->c = (int)out.dims[3];
    return mpti_model_keep(m, node, (int64_t)num_params, 0);
}

MPT_API int mpt_name(mpt_model *m, int x, const char *name) {
    size_t size;

    if (!m || x < 1 || x >= m->num_nodes || !name) return x;
    size = strlen(name);
    if (size == 0 || size >= MPTI_NAME_BYTES)
        return mpti_model_fail(m, m->nodes[x].kind, "a layer's name must have 1 .. 63 bytes");
    memcpy(m->nodes[x].name, name, size + 1);
    return x;
}

/* ---- what the steps of one trainer work with ------------------------------------------------- */

typedef struct mpti_layout {
    mpti_place *places; /* [num_nodes] */
    size_t scratch;     /* place of a second gradient, to be added to the first */
    size_t activation_bytes;
    size_t operator_bytes;  /* of workspace; behind it: */
    size_t cast_bytes;      /* inputs and outputs of a step in another storage type */
} mpti_layout;

typedef struct mpti_net {
    const mpt_model *model;
    const mpt_backend *backend;
    void *self;
    mpt_dtype dtype;   /* of values and their gradients */
    mpt_dtype operand; /* of what convolutions and dense layers multiply */
    int capacity;      /* records of a microbatch */
    mpti_layout layout;
    uint8_t *activations, *workspace;
    const float *masters; /* (num_params) FP32: biases, gamma, beta, custom layers' parameters */
    const void *weights;  /* (num_params) of operand */
    const float *running; /* (num_stats) */
    float *inv_std;       /* (num_stats / 2): inverse deviations of this microbatch */
    float *gradients;     /* (num_params) of this microbatch, then (num_stats) mean and variance */
    /* of this microbatch */
    int num_valid;
    bool training;
    uint64_t seed;
    int64_t step;
    const uint64_t *sample_ids; /* (capacity) or NULL: first_id + the slot's number */
    uint64_t first_id;
    const int32_t *labels; /* (capacity) or NULL: none */
    float label_smoothing, grad_scale;
    const float *loss_scale;  /* beside the backend's data; NULL: 1 */
    float *probabilities; /* NULL, or (capacity, classes) */
    mpt_softmax_stats *stats; /* beside the backend's data; added to */
    int failed; /* the node whose step failed */
} mpti_net;

static void *mpti_net_value(const mpti_net *net, int v) {
    return net->activations + net->layout.places[v].value;
}

static void *mpti_net_gradient(const mpti_net *net, int v) {
    return net->activations + net->layout.places[v].gradient;
}

static const void *mpti_net_weights(const mpti_net *net, const mpti_node *node) {
    return (const uint8_t *)net->weights +
           mpt_dtype_size(net->operand) * (size_t)node->param_offset;
}

static int64_t mpti_node_weights(const mpti_node *node) { /* without the bias */
    return node->num_params - (node->use_bias ? node->c : 0);
}

static int64_t mpti_node_elements(const mpti_node *node) { /* of one record */
    return (int64_t)node->h * node->w * node->c;
}

static const float *mpti_net_bias(const mpti_net *net, const mpti_node *node) { /* NULL: none */
    return node->use_bias ? net->masters + node->param_offset + mpti_node_weights(node) : NULL;
}

/* ---- arguments of the operators -------------------------------------------------------------- */
static mpt_conv2d_args mpti_conv2d_args(const mpti_net *net, const mpti_node *node) {
    const mpti_node *in = &net->model->nodes[node->in[0]];
    mpt_conv2d_args a;

    memset(&a, 0, sizeof a);
    a.n = net->capacity;
    a.num_valid = net->num_valid;
    a.h = in->h;
    a.wd = in->w;
    a.c = in->c;
    a.k = node->c;
    a.r = a.s = node->kernel;
    a.p = node->h;
    a.q = node->w;
    a.stride = node->stride;
    a.padding = node->padding;
    a.dtype = net->operand;
    a.workspace = net->workspace;
    a.workspace_bytes = net->layout.operator_bytes;
    return a;
}

static mpt_dense_args mpti_dense_args(const mpti_net *net, const mpti_node *node) {
    mpt_dense_args a;

    memset(&a, 0, sizeof a);
    a.n = net->capacity;
    a.num_valid = net->num_valid;
    a.in = (int)mpti_node_elements(&net->model->nodes[node->in[0]]);
    a.out = node->c;
    a.dtype = net->operand;
    a.workspace = net->workspace;
    a.workspace_bytes = net->layout.operator_bytes;
    return a;
}

/* node ends a row: its batch norm, the value added, and whether ReLU follows are known. */
static mpt_batchnorm_args mpti_batchnorm_args(const mpti_net *net, const mpti_node *node) {
    const mpti_node *norm = &net->model->nodes[node->norm];
    mpt_batchnorm_args a;

    memset(&a, 0, sizeof a);
    a.n = net->capacity;
    a.num_valid = net->num_valid;
    a.h = norm->h;
    a.wd = norm->w;
    a.c = norm->c;
    a.training = net->training;
    a.relu = node->ends_in_relu;
    a.epsilon = norm->epsilon;
    a.dtype = net->dtype;
    a.workspace = net->workspace;
    a.workspace_bytes = net->layout.operator_bytes;
    if (!net->masters) return a; /* only sizes are asked for */
    a.gamma = net->masters + norm->param_offset;
    a.beta = a.gamma + norm->c;
    a.running_mean = net->running + norm->stat_offset;
    a.running_var = a.running_mean + norm->c;
    a.batch_mean = net->gradients + net->model->num_params + norm->stat_offset;
    a.batch_var = a.batch_mean + norm->c;
    a.batch_inv_std = net->inv_std + norm->stat_offset / 2;
    return a;
}

static mpt_pool2d_args mpti_pool2d_args(const mpti_net *net, const mpti_node *node) {
    const mpti_node *in = &net->model->nodes[node->in[0]];
    mpt_pool2d_args a;

    memset(&a, 0, sizeof a);
    a.n = net->capacity;
    a.num_valid = net->num_valid;
    a.h = in->h;
    a.wd = in->w;
    a.c = in->c;
    a.p = node->h;
    a.q = node->w;
    a.kernel = node->kernel;
    a.stride = node->stride;
    a.padding = node->padding;
    a.dtype = net->dtype;
    if (node->kind == MPTI_KIND_MAX_POOL)
        a.argmax = net->activations + net->layout.places[node - net->model->nodes].argmax;
    return a;
}

static mpt_pointwise_args mpti_pointwise_args(const mpti_net *net, const mpti_node *node) {
    mpt_pointwise_args a;

    memset(&a, 0, sizeof a);
    a.n = net->capacity;
    a.num_valid = net->num_valid;
    a.per_sample = mpti_node_elements(node);
    a.dtype = net->dtype;
    return a;
}

static mpt_dropout_args mpti_dropout_args(const mpti_net *net, const mpti_node *node) {
    mpt_dropout_args a;

    memset(&a, 0, sizeof a);
    a.n = net->capacity;
    a.num_valid = net->num_valid;
    a.per_sample = mpti_node_elements(node);
    a.dtype = net->dtype;
    a.sample_ids = net->sample_ids;
    a.first_id = net->first_id;
    a.seed = net->seed;
    a.epoch = net->step;
    a.layer = node->number;
    a.probability = net->training ? node->probability : 0;
    return a;
}

/* ---- casts on the way into a step and out of it ------------------------------------------------
   A step may work in another type than values are stored in: FP16 operands among FP32 values, FP32
   custom layers among FP16 values. Its copies lie behind the operators' workspace, for one step. */
typedef struct mpti_casts {
    const mpti_net *net;
    mpt_dtype type; /* what the step works in */
    size_t used;
    mpt_result rc; /* of the first cast that failed */
} mpti_casts;

static mpti_casts mpti_casts_begin(const mpti_net *net, mpt_dtype type) {
    mpti_casts c;

    c.net = net;
    c.type = type;
    c.used = net->layout.operator_bytes;
    c.rc = MPT_OK;
    return c;
}

static void mpti_casts_copy(mpti_casts *c, const void *src, mpt_dtype from, void *dst,
                            mpt_dtype to, int64_t count) {
    mpt_cast_args a;

    a.src = src;
    a.dst = dst;
    a.count = count;
    a.src_dtype = from;
    a.dst_dtype = to;
    if (c->rc == MPT_OK) c->rc = c->net->backend->cast(c->net->self, &a);
}

static void *mpti_casts_take(mpti_casts *c, const mpti_node *node) { /* room for one value */
    size_t count = (size_t)c->net->capacity * (size_t)mpti_node_elements(node);
    void *room = c->net->workspace + c->used;

    c->used += mpti_align(count * mpt_dtype_size(c->type));
    return room;
}

/* What the step reads in place of x, which holds a value (or gradient) of node's shape. */
static const void *mpti_casts_in(mpti_casts *c, const void *x, const mpti_node *node) {
    void *copy;

    if (c->type == c->net->dtype) return x;
    copy = mpti_casts_take(c, node);
    mpti_casts_copy(c, x, c->net->dtype, copy, c->type,
                    c->net->capacity * mpti_node_elements(node));
    return copy;
}

/* What the step writes in place of y. */
static void *mpti_casts_out(mpti_casts *c, void *y, const mpti_node *node) {
    return c->type == c->net->dtype ? y : mpti_casts_take(c, node);
}

/* The step wrote `written`, which belongs into y. */
static mpt_result mpti_casts_end(mpti_casts *c, mpt_result rc, const void *written, void *y,
                                 const mpti_node *node) {
    if (rc == MPT_OK && written != y)
        mpti_casts_copy(c, written, c->type, y, c->net->dtype,
                        c->net->capacity * mpti_node_elements(node));
    return rc ? rc : c->rc;
}

/* ---- custom layers: FP32, and only the records that count ------------------------------------ */
static mpt_custom_args mpti_custom_args(const mpti_net *net, const mpti_node *node) {
    mpt_custom_args a;

    memset(&a, 0, sizeof a);
    a.num_in = node->num_in;
    a.params = node->num_params ? net->masters + node->param_offset : NULL;
    a.workspace = net->workspace;
    a.sample_ids = net->sample_ids;
    a.training = net->training;
    if (net->backend->stream) a.stream = net->backend->stream(net->self);
    return a;
}

static void mpti_custom_clear(mpti_casts *c, float *x, int64_t count) {
    mpt_fill_args a;

    a.dst = x;
    a.count = count;
    a.value = 0;
    a.dtype = MPT_F32;
    if (c->rc == MPT_OK) c->rc = c->net->backend->fill(c->net->self, &a);
}

/* Slots that don't count hold zeros, in values as in gradients. */
static void mpti_custom_clear_rest(mpti_casts *c, const mpti_node *node, void *x) {
    const mpti_net *net = c->net;
    int64_t numbers = mpti_node_elements(node);

    if (net->num_valid < net->capacity)
        mpti_custom_clear(c, (float *)x + net->num_valid * numbers,
                          (net->capacity - net->num_valid) * numbers);
}

static mpt_result mpti_step_forward_custom(mpti_net *net, const mpti_node *node, void *y) {
    mpti_casts casts = mpti_casts_begin(net, MPT_F32);
    mpt_tensor in[MPT_CUSTOM_MAX_INPUTS], out;
    mpt_custom_args a = mpti_custom_args(net, node);
    mpt_result rc = MPT_OK;
    int i;

    for (i = 0; i < node->num_in; i++) {
        const mpti_node *from = &net->model->nodes[node->in[i]];
        const void *x = mpti_casts_in(&casts, mpti_net_value(net, node->in[i]), from);
        in[i] = mpti_custom_tensor(from, net->num_valid, (void *)(uintptr_t)x);
    }
    out = mpti_custom_tensor(node, net->num_valid, mpti_casts_out(&casts, y, node));
    a.in = in;
    a.out = &out;
    if (casts.rc == MPT_OK && net->num_valid) rc = node->custom.forward(&a, node->custom.user);
    mpti_custom_clear_rest(&casts, node, out.data);
    return mpti_casts_end(&casts, rc, out.data, y, node);
}

/* ---- forward --------------------------------------------------------------------------------- */
static mpt_result mpti_step_forward_norm(mpti_net *net, int v) {
    const mpti_node *node = &net->model->nodes[v], *norm = &net->model->nodes[node->norm];
    mpt_batchnorm_args a = mpti_batchnorm_args(net, node);

    a.x = mpti_net_value(net, norm->in[0]);
    a.y = mpti_net_value(net, v);
    if (node->residual >= 0) a.residual = mpti_net_value(net, node->residual);
    return net->backend->batchnorm_forward(net->self, &a);
}

static mpt_result mpti_step_forward(mpti_net *net, int v) {
    const mpti_node *node = &net->model->nodes[v];
    const mpt_backend *b = net->backend;
    const void *x = mpti_net_value(net, node->in[0]);
    void *y = mpti_net_value(net, v);
    mpti_casts casts = mpti_casts_begin(net, net->operand);
    mpt_pointwise_args pointwise = mpti_pointwise_args(net, node);

    net->failed = v;
    pointwise.a = x;
    pointwise.y = y;
    if (node->norm >= 0) return mpti_step_forward_norm(net, v);
    switch (node->kind) {
    case MPTI_KIND_CONV2D: {
        mpt_conv2d_args a = mpti_conv2d_args(net, node);
        a.x = mpti_casts_in(&casts, x, &net->model->nodes[node->in[0]]);
        a.w = mpti_net_weights(net, node);
        a.bias = mpti_net_bias(net, node);
        a.y = mpti_casts_out(&casts, y, node);
        return mpti_casts_end(&casts, b->conv2d_fprop(net->self, &a), a.y, y, node);
    }
    case MPTI_KIND_DENSE: {
        mpt_dense_args a = mpti_dense_args(net, node);
        a.x = mpti_casts_in(&casts, x, &net->model->nodes[node->in[0]]);
        a.w = mpti_net_weights(net, node);
        a.bias = mpti_net_bias(net, node);
        a.y = mpti_casts_out(&casts, y, node);
        return mpti_casts_end(&casts, b->dense_fprop(net->self, &a), a.y, y, node);
    }
    case MPTI_KIND_MAX_POOL:
    case MPTI_KIND_AVG_POOL:
    case MPTI_KIND_GLOBAL_AVG_POOL: {
        mpt_pool2d_args a = mpti_pool2d_args(net, node);
        a.x = x;
        a.y = y;
        if (node->kind == MPTI_KIND_MAX_POOL) return b->max_pool_forward(net->self, &a);
        return node->kind == MPTI_KIND_AVG_POOL ? b->avg_pool_forward(net->self, &a)
                                                : b->global_avg_pool_forward(net->self, &a);
    }
    case MPTI_KIND_RELU: return b->relu_forward(net->self, &pointwise);
    case MPTI_KIND_ADD:
        pointwise.b = mpti_net_value(net, node->in[1]);
        return b->add(net->self, &pointwise);
    case MPTI_KIND_DROPOUT: {
        mpt_dropout_args a = mpti_dropout_args(net, node);
        a.x = x;
        a.y = y;
        return b->dropout_forward(net->self, &a);
    }
    case MPTI_KIND_CUSTOM: return mpti_step_forward_custom(net, node, y);
    case MPTI_KIND_INPUT:
    case MPTI_KIND_BATCHNORM: break;
    }
    return MPT_ERR_INTERNAL;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Where a step writes the gradient of value v: its place, or scratch if others wrote there before.
   NULL: nobody needs it (the picture has no gradient). */
static void *mpti_net_begin_gradient(const mpti_net *net, int v) {
    if (v <= 0) return NULL;
    if (net->layout.places[v].begun) return net->activations + net->layout.scratch;
    return mpti_net_gradient(net, v);
}

static mpt_result mpti_net_end_gradient(mpti_net *net, int v, mpt_result rc) {
    mpt_pointwise_args a;

    if (rc || v <= 0) return rc;
    if (!net->layout.places[v].begun) {
        net->layout.places[v].begun = true;
        return MPT_OK;
    }
    a = mpti_pointwise_args(net, &net->model->nodes[v]);
    a.a = a.y = mpti_net_gradient(net, v);
    a.b = net->activations + net->layout.scratch;
    return net->backend->add(net->self, &a);
}

static mpt_result mpti_step_backward_norm(mpti_net *net, int v) {
    const mpti_node *node = &net->model->nodes[v], *norm = &net->model->nodes[node->norm];
    mpt_batchnorm_args a = mpti_batchnorm_args(net, node);
    mpt_result rc;

    a.x = mpti_net_value(net, norm->in[0]);
    a.y = mpti_net_value(net, v);
    a.dy = mpti_net_gradient(net, v);
    a.dx = mpti_net_begin_gradient(net, norm->in[0]); /* with a residual not scratch: see fusing */
    if (!a.dx) a.dx = net->activations + net->layout.scratch; /* the picture's: nobody needs it */
    if (node->residual >= 0) a.dresidual = mpti_net_begin_gradient(net, node->residual);
    a.dgamma = net->gradients + norm->param_offset;
    a.dbeta = a.dgamma + norm->c;
    rc = net->backend->batchnorm_backward(net->self, &a);
    rc = mpti_net_end_gradient(net, norm->in[0], rc);
    return mpti_net_end_gradient(net, node->residual, rc);
}

/* Both products of a layer with weights: dw of inputs and output gradients, dx of the latter and
   weights. The picture needs no gradient. */
static mpt_result mpti_step_backward_conv2d(mpti_net *net, const mpti_node *node, const void *dy) {
    const mpti_node *in = &net->model->nodes[node->in[0]];
    mpti_casts casts = mpti_casts_begin(net, net->operand);
    mpt_conv2d_args a = mpti_conv2d_args(net, node);
    void *dx = mpti_net_begin_gradient(net, node->in[0]);
    mpt_result rc;

    a.x = mpti_casts_in(&casts, mpti_net_value(net, node->in[0]), in);
    a.w = mpti_net_weights(net, node);
    a.dy = mpti_casts_in(&casts, dy, node);
    a.dw = net->gradients + node->param_offset;
    if (node->use_bias) a.dbias = a.dw + mpti_node_weights(node);
    rc = net->backend->conv2d_wgrad(net->self, &a);
    if (rc || !dx) return rc ? rc : casts.rc;
    a.dx = mpti_casts_out(&casts, dx, in);
    rc = net->backend->conv2d_dgrad(net->self, &a);
    rc = mpti_casts_end(&casts, rc, a.dx, dx, in);
    return mpti_net_end_gradient(net, node->in[0], rc);
}

static mpt_result mpti_step_backward_dense(mpti_net *net, const mpti_node *node, const void *dy) {
    const mpti_node *in = &net->model->nodes[node->in[0]];
    mpti_casts casts = mpti_casts_begin(net, net->operand);
    mpt_dense_args a = mpti_dense_args(net, node);
    void *dx = mpti_net_begin_gradient(net, node->in[0]);
    mpt_result rc;

    a.x = mpti_casts_in(&casts, mpti_net_value(net, node->in[0]), in);
    a.w = mpti_net_weights(net, node);
    a.dy = mpti_casts_in(&casts, dy, node);
    a.dw = net->gradients + node->param_offset;
    a.dbias = a.dw + mpti_node_weights(node);
    rc = net->backend->dense_wgrad(net->self, &a);
    if (rc || !dx) return rc ? rc : casts.rc;
    a.dx = mpti_casts_out(&casts, dx, in);
    rc = net->backend->dense_dgrad(net->self, &a);
    rc = mpti_casts_end(&casts, rc, a.dx, dx, in);
    return mpti_net_end_gradient(net, node->in[0], rc);
}

static mpt_result mpti_step_backward_custom(mpti_net *net, int v) {
    const mpti_node *node = &net->model->nodes[v];
    mpti_casts casts = mpti_casts_begin(net, MPT_F32);
    mpt_tensor in[MPT_CUSTOM_MAX_INPUTS], din[MPT_CUSTOM_MAX_INPUTS], out, dout;
    mpt_custom_args a = mpti_custom_args(net, node);
    mpt_result rc = MPT_OK;
    int i;

    for (i = 0; i < node->num_in; i++) {
        const mpti_node *from = &net->model->nodes[node->in[i]];
        const void *x = mpti_casts_in(&casts, mpti_net_value(net, node->in[i]), from);
        in[i] = mpti_custom_tensor(from, net->num_valid, (void *)(uintptr_t)x);
        din[i] = mpti_custom_tensor(from, net->num_valid, mpti_casts_take(&casts, from));
    }
    out = mpti_custom_tensor(node, net->num_valid, (void *)(uintptr_t)mpti_casts_in(
                             &casts, mpti_net_value(net, v), node));
    dout = mpti_custom_tensor(node, net->num_valid, (void *)(uintptr_t)mpti_casts_in(
                              &casts, mpti_net_gradient(net, v), node));
    a.in = in;
    a.out = &out;
    a.dout = &dout;
    a.din = din;
    if (node->num_params) {
        a.dparams = net->gradients + node->param_offset;
        mpti_custom_clear(&casts, a.dparams, node->num_params);
    }
    if (casts.rc == MPT_OK && net->num_valid) rc = node->custom.backward(&a, node->custom.user);
    for (i = 0; i < node->num_in; i++) {
        const mpti_node *from = &net->model->nodes[node->in[i]];
        void *dx = mpti_net_begin_gradient(net, node->in[i]);
        if (!dx) continue;
        mpti_custom_clear_rest(&casts, from, din[i].data);
        rc = mpti_casts_end(&casts, rc, din[i].data, dx, from);
        rc = mpti_net_end_gradient(net, node->in[i], rc);
    }
    return rc;
}

static mpt_result mpti_step_backward_add(mpti_net *net, const mpti_node *node, const void *dy) {
    mpt_copy_args a;
    mpt_result rc = MPT_OK;
    int side;

    for (side = 0; side < 2 && rc == MPT_OK; side++) {
        a.src = dy;
        a.dst = mpti_net_begin_gradient(net, node->in[side]);
        a.bytes = (size_t)net->capacity * (size_t)mpti_node_elements(node) *
                  mpt_dtype_size(net->dtype);
        if (a.dst)
            rc = mpti_net_end_gradient(net, node->in[side], net->backend->copy(net->self, &a));
    }
    return rc;
}

static mpt_result mpti_step_backward(mpti_net *net, int v) {
    const mpti_node *node = &net->model->nodes[v];
    const mpt_backend *b = net->backend;
    const void *dy = mpti_net_gradient(net, v);
    mpt_pointwise_args pointwise;
    mpt_dropout_args dropout;
    mpt_pool2d_args pool;
    void *dx;

    net->failed = v;
    if (node->norm >= 0) return mpti_step_backward_norm(net, v);
    if (node->kind == MPTI_KIND_CONV2D) return mpti_step_backward_conv2d(net, node, dy);
    if (node->kind == MPTI_KIND_DENSE) return mpti_step_backward_dense(net, node, dy);
    if (node->kind == MPTI_KIND_ADD) return mpti_step_backward_add(net, node, dy);
    if (node->kind == MPTI_KIND_CUSTOM) return mpti_step_backward_custom(net, v);
    dx = mpti_net_begin_gradient(net, node->in[0]);
    if (!dx) return MPT_OK;
    if (node->kind == MPTI_KIND_RELU) {
        pointwise = mpti_pointwise_args(net, node);
        pointwise.a = mpti_net_value(net, v);
        pointwise.b = dy;
        pointwise.y = dx;
        return mpti_net_end_gradient(net, node->in[0], b->relu_backward(net->self, &pointwise));
    }
    if (node->kind == MPTI_KIND_DROPOUT) {
        dropout = mpti_dropout_args(net, node);
        dropout.x = dy;
        dropout.y = dx;
        return mpti_net_end_gradient(net, node->in[0], b->dropout_backward(net->self, &dropout));
    }
    pool = mpti_pool2d_args(net, node);
    pool.x = mpti_net_value(net, node->in[0]);
    pool.dy = dy;
    pool.dx = dx;
    if (node->kind == MPTI_KIND_MAX_POOL)
        return mpti_net_end_gradient(net, node->in[0], b->max_pool_backward(net->self, &pool));
    if (node->kind == MPTI_KIND_AVG_POOL)
        return mpti_net_end_gradient(net, node->in[0], b->avg_pool_backward(net->self, &pool));
    return mpti_net_end_gradient(net, node->in[0], b->global_avg_pool_backward(net->self, &pool));
}

/* ---- a whole pass ---------------------------------------------------------------------------- */
static mpt_result mpti_net_input(mpti_net *net, const void *images, mpt_dtype dtype) {
    const mpti_node *input = &net->model->nodes[MPT_INPUT];
    mpt_normalize_args a;

    memset(&a, 0, sizeof a);
    a.x = images;
    a.y = mpti_net_value(net, MPT_INPUT);
    a.n = net->capacity;
    a.num_valid = net->num_valid;
    a.h = input->h;
    a.wd = input->w;
    a.c = input->c;
    a.src_dtype = dtype;
    a.dtype = net->dtype;
    net->failed = MPT_INPUT;
    return net->backend->input_normalize(net->self, &a);
}

/* From the pictures in their place to logits. */
static mpt_result mpti_net_forward(mpti_net *net) {
    mpt_result rc = MPT_OK;
    int v;

    for (v = 1; v < net->model->num_nodes && rc == MPT_OK; v++)
        if (!net->model->nodes[v].fused) rc = mpti_step_forward(net, v);
    return rc;
}

/* Loss of the logits, and their gradient where training. */
static mpt_result mpti_net_loss(mpti_net *net) {
    int logits = net->model->logits;
    mpt_softmax_xent_args a;

    net->failed = logits;
    memset(&a, 0, sizeof a);
    a.logits = mpti_net_value(net, logits);
    a.labels = net->labels;
    a.dlogits = net->training ? mpti_net_gradient(net, logits) : NULL;
    a.probabilities = net->probabilities;
    a.stats = net->stats;
    a.n = net->probabilities ? net->num_valid : net->capacity; /* the caller's rows end there */
    a.num_valid = net->num_valid;
    a.classes = net->model->nodes[logits].c;
    a.label_smoothing = net->training ? net->label_smoothing : 0;
    a.grad_scale = net->grad_scale;
    a.loss_scale = net->loss_scale;
    a.dtype = net->dtype;
    a.workspace = net->workspace;
    a.workspace_bytes = net->layout.operator_bytes;
    return net->backend->softmax_xent(net->self, &a);
}

static void mpti_net_begin_backward(mpti_net *net) {
    int v;
    for (v = 0; v < net->model->num_nodes; v++) net->layout.places[v].begun = false;
}

static mpt_result mpti_net_backward(mpti_net *net) {
    mpt_result rc = MPT_OK;
    int v;

    mpti_net_begin_backward(net);
    for (v = net->model->num_nodes - 1; v > 0 && rc == MPT_OK; v--)
        if (!net->model->nodes[v].fused) rc = mpti_step_backward(net, v);
    return rc;
}

/* =================================================================================================
 * >>model   8 Model: a list of layers, finished and laid out; the zoo
 * =================================================================================================
 *
 * Problem: a network is a graph; a user writes it down in a few lines and wants mistakes explained;
 *          a machine wants a list in which the place of each buffer is known.
 * Idea:    layers run in the order in which they were added, so the list is its own schedule; batch
 *          norm, addition and ReLU in a row become one step; a gradient lives from its first writer
 *          to the step that made its value, so most gradients can share places.
 * Shapes:  value v: (height, width, channels) of each sample
 * Tested:  tests/test_model.c
 * Next:    >>optim, which turns gradients into updates.
 */
MPT_API mpt_result mpt_model_create(mpt_ctx *ctx, int height, int width, int channels,
                                    mpt_model **out) {
    mpt_model *m;

    if (!ctx || !out) return MPT_ERR_INVALID_ARGUMENT;
    *out = NULL;
    if (height < 1 || width < 1 || channels < 1 || height > 16384 || width > 16384 ||
        channels > 4096)
        return MPTI_REPORT(ctx, MPT_ERR_INVALID_ARGUMENT,
                           "mpt_model_create: height and width must be in 1 .. 16384, channels in "
                           "1 .. 4096");
    m = (mpt_model *)mpti_calloc(&ctx->desc.allocator, 1, sizeof *m);
    if (m) m->ctx = ctx;
    if (!m || !mpti_model_grow(m)) {
        mpt_model_destroy(m);
        return MPTI_REPORT(ctx, MPT_ERR_OUT_OF_MEMORY, "no memory for a model");
    }
    m->logits = -1;
    m->nodes[0].h = height;
    m->nodes[0].w = width;
    m->nodes[0].c = channels;
    m->nodes[0].in[0] = m->nodes[0].in[1] = m->nodes[0].norm = m->nodes[0].residual = -1;
    m->nodes[0].param_offset = m->nodes[0].stat_offset = -1;
    snprintf(m->nodes[0].name, MPTI_NAME_BYTES, "input");
    m->num_nodes = 1;
    *out = m;
    return MPT_OK;
}

MPT_API void mpt_model_destroy(mpt_model *m) {
    const mpt_allocator *a;

    if (!m) return;
    a = &m->ctx->desc.allocator;
    mpti_free(a, m->places, sizeof *m->places * (size_t)m->num_nodes);
    mpti_free(a, m->nodes, sizeof *m->nodes * (size_t)m->capacity);
    mpti_free(a, m, sizeof *m);
}

/* ---- finishing: fusing rows of batch norm, add, ReLU --------------------------------------------

     conv -> batchnorm -> relu                 one step, at the ReLU
     conv -> batchnorm -> add(shortcut) -> relu  one step, at the ReLU

   What lies between is read by nobody else, so it need not be kept. */
static int mpti_model_fusable_norm(const mpt_model *m, int value) { /* its batch norm; -1: none */
    const mpti_node *node = &m->nodes[value];
    return node->kind == MPTI_KIND_BATCHNORM && node->num_uses == 1 ? value : -1;
}

/* With an addition behind it, only where nobody else reads what it normalises: then one of the two
   gradients that the step writes is the first of its value. */
static int mpti_model_fusable_branch(const mpt_model *m, int value) {
    int norm = mpti_model_fusable_norm(m, value);
    return norm >= 0 && m->nodes[m->nodes[norm].in[0]].num_uses == 1 ? norm : -1;
}

static void mpti_model_fuse(mpt_model *m) {
    int v;

    for (v = 1; v < m->num_nodes; v++) {
        mpti_node *relu = &m->nodes[v], *before = &m->nodes[relu->in[0]];
        int side;
        if (relu->kind != MPTI_KIND_RELU) continue;
        relu->norm = mpti_model_fusable_norm(m, relu->in[0]);
        relu->ends_in_relu = relu->norm >= 0;
        if (before->kind == MPTI_KIND_ADD && before->num_uses == 1) {
            for (side = 0; side < 2 && relu->norm < 0; side++) {
                relu->norm = mpti_model_fusable_branch(m, before->in[side]);
                relu->residual = relu->norm >= 0 ? before->in[1 - side] : -1;
            }
            relu->ends_in_relu = before->fused = relu->norm >= 0;
        }
        if (relu->norm >= 0) m->nodes[relu->norm].fused = true;
    }
    for (v = 1; v < m->num_nodes; v++) /* a batch norm on its own is a row of one */
        if (m->nodes[v].kind == MPTI_KIND_BATCHNORM && !m->nodes[v].fused) m->nodes[v].norm = v;
}

/* Why the model can't end here; err is filled in then. */
static mpt_result mpti_model_check_end(const mpt_model *m, int logits, mpt_error *err) {
    int v, other;

    if (m->logits >= 0)
        return MPTI_FAIL(err, MPT_ERR_INVALID_STATE, "the model is finished already");
    if (logits < 1 || logits >= m->num_nodes || m->nodes[logits].h != 1 || m->nodes[logits].w != 1)
        return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT,
                         "mpt_model_finish: logits must be a layer's output of shape "
                         "(1,1,classes): end with mpt_dense");
    if (logits != m->num_nodes - 1 || m->nodes[logits].num_uses > 0)
        return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT,
                         "mpt_model_finish: logits must be the last layer, and read by no other");
    for (v = 0; v < m->num_nodes - 1; v++)
        if (m->nodes[v].num_uses == 0)
            return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT,
                             "mpt_model_finish: no layer reads the output of layer %d (%s)", v,
                             m->nodes[v].name);
    for (v = 0; v < m->num_nodes; v++)
        for (other = 0; other < v; other++)
            if (!strcmp(m->nodes[v].name, m->nodes[other].name))
                return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT,
                                 "mpt_model_finish: layers %d and %d are both named %s", other, v,
                                 m->nodes[v].name);
    if (m->num_params == 0)
        return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT,
                         "mpt_model_finish: nothing to learn in this model");
    return MPT_OK;
}

MPT_API mpt_result mpt_model_finish(mpt_model *m, int logits) {
    mpt_error *err;
    mpt_result rc;

    if (!m) return MPT_ERR_INVALID_ARGUMENT;
    err = &m->ctx->error;
    if (m->wiring.code != MPT_OK) {
        *err = m->wiring;
        return mpti_report(m->ctx, err->code);
    }
    rc = mpti_model_check_end(m, logits, err);
    if (rc) return mpti_report(m->ctx, rc);
    m->places = (mpti_place *)mpti_calloc(&m->ctx->desc.allocator, (size_t)m->num_nodes,
                                          sizeof *m->places);
    if (!m->places)
        return MPTI_REPORT(m->ctx, MPT_ERR_OUT_OF_MEMORY, "no memory for a model");
    m->nodes[logits].num_uses++; /* the loss reads it: so it is never fused away */
    mpti_model_fuse(m);
    m->logits = logits;
    return MPT_OK;
}

MPT_API int mpt_model_num_layers(const mpt_model *m) {
    return m ? m->num_nodes - 1 : 0;
}

MPT_API int64_t mpt_model_num_params(const mpt_model *m) {
    return m ? m->num_params : 0;
}

MPT_API mpt_result mpt_model_layer(const mpt_model *m, int layer, mpt_layer_info *out) {
    const mpti_node *node;

    if (!m || !out || layer < 0 || layer >= m->num_nodes - 1) return MPT_ERR_INVALID_ARGUMENT;
    node = &m->nodes[layer + 1];
    memset(out, 0, sizeof *out);
    memcpy(out->inputs, node->in, sizeof node->in);
    out->num_inputs = node->num_in;
    out->kernel = node->kernel;
    out->stride = node->stride;
    out->padding = node->padding;
    out->use_bias = node->use_bias;
    out->name = node->name;
    out->kind = mpti_kind_name(node->kind);
    out->height = node->h;
    out->width = node->w;
    out->channels = node->c;
    out->num_params = node->num_params;
    out->fused = node->fused;
    return MPT_OK;
}

MPT_API mpt_result mpt_model_summary(const mpt_model *m, int batch_size, mpt_dtype storage,
                                     void (*line)(const char *text, void *user), void *user) {
    char text[160], shape[40];
    int64_t bytes, sum = 0;
    int v;

    if (!m || batch_size < 1 || mpt_dtype_size(storage) == 0 || !line)
        return MPT_ERR_INVALID_ARGUMENT;
    snprintf(text, sizeof text, "%-24s %-16s %-16s %12s %14s", "layer", "kind", "output",
             "parameters", "bytes");
    line(text, user);
    for (v = 0; v < m->num_nodes; v++) {
        const mpti_node *node = &m->nodes[v];
        bytes = node->fused ? 0
                            : batch_size * mpti_node_elements(node) *
                                  (int64_t)mpt_dtype_size(storage);
        sum += bytes;
        snprintf(shape, sizeof shape, "(%d,%d,%d)", node->h, node->w, node->c);
        snprintf(text, sizeof text, "%-24s %-16s %-16s %12lld %14lld%s", node->name,
                 mpti_kind_name(node->kind), shape, (long long)node->num_params, (long long)bytes,
                 node->fused ? " (fused)" : "");
        line(text, user);
    }
    snprintf(text, sizeof text, "%-24s %-16s %-16s %12lld %14lld", "sum", "", "",
             (long long)m->num_params, (long long)sum);
    line(text, user);
    return MPT_OK;
}

/* ---- where everything lies ----------------------------------------------------------------------
   Outputs are all kept from forward to backward. A gradient lives from the step that writes it
   first (the last reader of the value) to the step that made the value: most can share places. */

/* The values whose gradients a step writes. Returns how many. */
static int mpti_step_inputs(const mpt_model *m, int v, int inputs[MPT_CUSTOM_MAX_INPUTS]) {
    const mpti_node *node = &m->nodes[v];

    memcpy(inputs, node->in, sizeof node->in);
    if (node->norm < 0) return node->num_in;
    inputs[0] = m->nodes[node->norm].in[0];
    inputs[1] = node->residual;
    return node->residual >= 0 ? 2 : 1;
}

/* The lowest place for `bytes` from `base` on that no living gradient takes. */
static size_t mpti_layout_find(const mpti_layout *l, int num_nodes, size_t bytes, size_t base) {
    size_t at = base;
    int v = 0;

    while (v < num_nodes) {
        const mpti_place *p = &l->places[v];
        bool overlaps = at < p->gradient + mpti_align(p->bytes) && p->gradient < at + bytes;
        if (p->begun && overlaps) at = p->gradient + mpti_align(p->bytes);
        v = p->begun && overlaps ? 0 : v + 1;
    }
    return at;
}

/* Walks backward as the steps will: `begun` tells which gradients live. */
static void mpti_layout_gradients(const mpt_model *m, mpti_layout *l) {
    size_t base = l->activation_bytes, end, scratch = 0;
    int v, k, count, inputs[MPT_CUSTOM_MAX_INPUTS];

    l->places[m->logits].gradient = base;
    l->places[m->logits].begun = true;
    end = base + mpti_align(l->places[m->logits].bytes);
    for (v = m->num_nodes - 1; v > 0; v--) {
        if (m->nodes[v].fused) continue;
        count = mpti_step_inputs(m, v, inputs);
        for (k = 0; k < count; k++) {
            mpti_place *p = &l->places[inputs[k]];
            size_t bytes = mpti_align(p->bytes);
            /* a batch norm right behind the picture writes a gradient that nobody reads */
            bool spare = p->begun || (inputs[k] == MPT_INPUT && m->nodes[v].norm >= 0);
            if (spare && bytes > scratch) scratch = bytes;
            if (spare || inputs[k] == MPT_INPUT) continue;
            p->gradient = mpti_layout_find(l, m->num_nodes, bytes, base);
            p->begun = true;
            if (p->gradient + bytes > end) end = p->gradient + bytes;
        }
        l->places[v].begun = false;
    }
    l->scratch = end;
    l->activation_bytes = end + scratch;
}

static size_t mpti_max_size(size_t a, size_t b) {
    return a > b ? a : b;
}

/* Scratch that the operators of one step ask for. */
static mpt_result mpti_step_workspace(const mpti_net *net, const mpti_node *node, size_t *bytes) {
    const mpt_backend *b = net->backend;
    mpt_conv2d_args conv;
    mpt_dense_args dense;
    mpt_batchnorm_args norm;
    mpt_tensor ignored;
    size_t params;

    *bytes = 0;
    if (node->kind == MPTI_KIND_CONV2D) {
        conv = mpti_conv2d_args(net, node);
        *bytes = mpti_max_size(b->conv2d_fprop_workspace_bytes(net->self, &conv),
                               b->conv2d_dgrad_workspace_bytes(net->self, &conv));
        *bytes = mpti_max_size(*bytes, b->conv2d_wgrad_workspace_bytes(net->self, &conv));
    } else if (node->kind == MPTI_KIND_DENSE) {
        dense = mpti_dense_args(net, node);
        *bytes = mpti_max_size(b->dense_fprop_workspace_bytes(net->self, &dense),
                               b->dense_dgrad_workspace_bytes(net->self, &dense));
        *bytes = mpti_max_size(*bytes, b->dense_wgrad_workspace_bytes(net->self, &dense));
    } else if (node->norm >= 0) {
        norm = mpti_batchnorm_args(net, node);
        norm.training = 1;
        *bytes = mpti_max_size(b->batchnorm_forward_workspace_bytes(net->self, &norm),
                               b->batchnorm_backward_workspace_bytes(net->self, &norm));
    } else if (node->kind == MPTI_KIND_CUSTOM) {
        return mpti_custom_infer(net->model, node, net->capacity, &ignored, &params, bytes);
    }
    return MPT_OK;
}

/* What the casts of one step take: see mpti_casts. */
static size_t mpti_step_cast_bytes(const mpti_net *net, const mpti_node *node) {
    bool custom = node->kind == MPTI_KIND_CUSTOM;
    mpt_dtype type = custom ? MPT_F32 : net->operand;
    size_t size = mpt_dtype_size(type), records = (size_t)net->capacity, sum = 0, bytes;
    int i;

    if (!custom && (net->dtype == net->operand ||
                    (node->kind != MPTI_KIND_CONV2D && node->kind != MPTI_KIND_DENSE)))
        return 0;
    for (i = 0; i < node->num_in; i++) { /* a copy, and a gradient */
        bytes = records * size * (size_t)mpti_node_elements(&net->model->nodes[node->in[i]]);
        sum += (net->dtype == type ? 1 : 2) * mpti_align(bytes);
    }
    bytes = records * size * (size_t)mpti_node_elements(node);
    return net->dtype == type ? sum : sum + 2 * mpti_align(bytes);
}

static mpt_result mpti_net_workspace(mpti_net *net) {
    const mpt_model *m = net->model;
    mpt_softmax_xent_args softmax;
    size_t bytes;
    mpt_result rc = MPT_OK;
    int v;

    memset(&softmax, 0, sizeof softmax);
    softmax.n = softmax.num_valid = net->capacity;
    softmax.classes = m->nodes[m->logits].c;
    softmax.dtype = net->dtype;
    net->layout.operator_bytes = net->backend->softmax_xent_workspace_bytes(net->self, &softmax);
    net->layout.cast_bytes = 0;
    for (v = 1; v < m->num_nodes && rc == MPT_OK; v++) {
        rc = mpti_step_workspace(net, &m->nodes[v], &bytes);
        net->layout.operator_bytes = mpti_max_size(net->layout.operator_bytes, bytes);
        bytes = mpti_step_cast_bytes(net, &m->nodes[v]);
        net->layout.cast_bytes = mpti_max_size(net->layout.cast_bytes, bytes);
    }
    net->layout.operator_bytes = mpti_align(net->layout.operator_bytes);
    net->failed = v - 1;
    return rc;
}

/* Fills net->layout, whose places are there. Fails only where a custom layer does. */
static mpt_result mpti_net_lay_out(mpti_net *net) {
    const mpt_model *m = net->model;
    mpti_layout *l = &net->layout;
    int v;

    memset(l->places, 0, sizeof *l->places * (size_t)m->num_nodes);
    l->activation_bytes = 0;
    for (v = 0; v < m->num_nodes; v++) {
        const mpti_node *node = &m->nodes[v];
        size_t elements = (size_t)net->capacity * (size_t)mpti_node_elements(node);
        l->places[v].bytes = elements * mpt_dtype_size(net->dtype);
        if (node->fused) continue;
        l->places[v].value = l->activation_bytes;
        l->activation_bytes += mpti_align(l->places[v].bytes);
        if (node->kind != MPTI_KIND_MAX_POOL) continue;
        l->places[v].argmax = l->activation_bytes;
        l->activation_bytes += mpti_align(elements);
    }
    mpti_layout_gradients(m, l);
    net->num_valid = net->capacity;
    return mpti_net_workspace(net);
}

/* ---- initial weights ------------------------------------------------------------------------- */
/* (1 + cos(pi u)) / 2 for u in 0 .. 1, within 2^-50, and near u = 1 within 2^-50 of itself.
   It is cos^2 = 1 - sin^2 of pi u / 2; seen from the nearer end the angle y is at most pi/4, where
   sin y = y (1 - y^2/(2 3) (1 - y^2/(4 5) (1 - ...))) up to y^15 leaves out y^17/17! < 2^-54. */
static double mpti_half_cosine(double u) {
    bool late = u > 0.5;
    double y = (late ? 1 - u : u) * 1.5707963267948966, sine = 1;
    int k;

    for (k = 14; k >= 2; k -= 2) sine = 1 - y * y * sine / (k * (k + 1));
    sine *= y;
    return late ? sine * sine : (1 - sine) * (1 + sine);
}

static double mpti_cos_turn(double turn) { /* cos(2 pi turn), turn in 0 .. 1 */
    return 2 * mpti_half_cosine(turn <= 0.5 ? 2 * turn : 2 - 2 * turn) - 1;
}

/* Two normal numbers from two words (Box and Muller 1958), with our own log, cosine and sine: the
   same bits on every machine. */
static void mpti_normal_pair(const uint32_t random[2], float out[2]) {
    double u = ((double)random[0] + 1) / 4294967296.0, turn = (double)random[1] / 4294967296.0;
    double radius = sqrt(-2 * mpti_ln(u));

    out[0] = (float)(radius * mpti_cos_turn(turn));
    out[1] = (float)(radius * mpti_cos_turn(turn < 0.25 ? turn + 0.75 : turn - 0.25)); /* sine */
}

static void mpti_init_normal(float *w, int64_t n, float deviation, uint64_t seed, uint32_t layer) {
    uint32_t random[4];
    float pair[4];
    int64_t i;

    for (i = 0; i < n; i++) {
        if (i % 4 == 0) {
            mpti_random4(seed, 0, (uint64_t)(i / 4), layer, MPTI_RANDOM_INIT, random);
            mpti_normal_pair(random, pair);
            mpti_normal_pair(random + 2, pair + 2);
        }
        w[i] = deviation * pair[i % 4];
    }
}

static void mpti_init_uniform(float *w, int64_t n, float bound, uint64_t seed, uint32_t layer) {
    uint32_t random[4];
    int64_t i;

    for (i = 0; i < n; i++) {
        if (i % 4 == 0) mpti_random4(seed, 0, (uint64_t)(i / 4), layer, MPTI_RANDOM_INIT, random);
        w[i] = bound * (float)(2 * mpti_uniform(random[i % 4]) - 1);
    }
}

/* A seed of its own for each custom layer. */
static mpt_result mpti_init_custom(const mpt_model *m, int v, uint64_t seed, float *w) {
    const mpti_node *node = &m->nodes[v];
    uint32_t random[4];
    mpt_result rc;

    if (!node->custom.init || node->num_params == 0) return MPT_OK;
    mpti_random4(seed, 0, 0, (uint32_t)v, MPTI_RANDOM_INIT, random);
    rc = node->custom.init(w, (size_t)node->num_params, (uint64_t)random[0] << 32 | random[1],
                           node->custom.user);
    if (rc == MPT_OK) return MPT_OK;
    return MPTI_FAIL(&m->ctx->error, rc, "init of layer %s failed: %s", node->name,
                     mpt_result_string(rc));
}

/* params (num_params) and running (num_stats) are zeros. */
static mpt_result mpti_model_init(const mpt_model *m, uint64_t seed, float *params,
                                  float *running) {
    mpt_result rc = MPT_OK;
    int v, c;

    for (v = 1; v < m->num_nodes && rc == MPT_OK; v++) {
        const mpti_node *node = &m->nodes[v];
        float *w = params + (node->param_offset < 0 ? 0 : node->param_offset);
        if (node->kind == MPTI_KIND_CONV2D) { /* biases stay 0 */
            double fan_out = (double)node->c * node->kernel * node->kernel;
            mpti_init_normal(w, mpti_node_weights(node), (float)sqrt(2.0 / fan_out), seed,
                             (uint32_t)v);
        } else if (node->kind == MPTI_KIND_DENSE) {
            double fan_in = (double)mpti_node_elements(&m->nodes[node->in[0]]);
            mpti_init_uniform(w, node->num_params, (float)(1 / sqrt(fan_in)), seed, (uint32_t)v);
        } else if (node->kind == MPTI_KIND_BATCHNORM) {
            for (c = 0; c < node->c; c++) {
                w[c] = node->zero_init_gamma ? 0 : 1;
                running[node->stat_offset + node->c + c] = 1;
            }
        } else if (node->kind == MPTI_KIND_CUSTOM) {
            rc = mpti_init_custom(m, v, seed, w);
        }
    }
    return rc;
}

/* ---- the zoo --------------------------------------------------------------------------------- */
static int mpti_zoo_conv(mpt_model *m, int x, const char *name, int channels, int kernel,
                         int stride, int bias) {
    mpt_conv2d_desc d;

    memset(&d, 0, sizeof d);
    d.out_channels = channels;
    d.kernel = kernel;
    d.stride = stride;
    d.padding = kernel / 2;
    d.use_bias = bias;
    return mpt_name(m, mpt_conv2d(m, x, &d), name);
}

/* Convolution and batch norm, named as torchvision does: prefix + "conv1", prefix + "bn1". */
static int mpti_zoo_conv_norm(mpt_model *m, int x, const char *prefix, int number, int channels,
                              int kernel, int stride) {
    char name[MPTI_NAME_BYTES];

    snprintf(name, sizeof name, "%sconv%d", prefix, number);
    x = mpti_zoo_conv(m, x, name, channels, kernel, stride, 0);
    snprintf(name, sizeof name, "%sbn%d", prefix, number);
    return mpt_name(m, mpt_batchnorm(m, x, NULL), name);
}

/* The shortcut of a block: the input itself, or a 1 x 1 convolution where the shape changes. */
static int mpti_zoo_shortcut(mpt_model *m, int x, const char *prefix, int channels, int stride) {
    char name[MPTI_NAME_BYTES];

    if (!m || x < 0 || x >= m->num_nodes || (stride == 1 && m->nodes[x].c == channels)) return x;
    snprintf(name, sizeof name, "%sdownsample.0", prefix);
    x = mpti_zoo_conv(m, x, name, channels, 1, stride, 0);
    snprintf(name, sizeof name, "%sdownsample.1", prefix);
    return mpt_name(m, mpt_batchnorm(m, x, NULL), name);
}

/* He et al. 2016, figure 5: two 3 x 3 convolutions, or 1 x 1, 3 x 3, 1 x 1 with four times the
   channels; the stride is on the 3 x 3. */
static int mpti_zoo_block(mpt_model *m, int x, const char *prefix, int channels, int stride,
                          bool bottleneck) {
    int y = x;

    if (bottleneck) y = mpt_relu(m, mpti_zoo_conv_norm(m, y, prefix, 1, channels, 1, 1));
    y = mpt_relu(m, mpti_zoo_conv_norm(m, y, prefix, bottleneck ? 2 : 1, channels, 3, stride));
    y = mpti_zoo_conv_norm(m, y, prefix, bottleneck ? 3 : 2, bottleneck ? 4 * channels : channels,
                           bottleneck ? 1 : 3, 1);
    x = mpti_zoo_shortcut(m, x, prefix, bottleneck ? 4 * channels : channels, stride);
    return mpt_relu(m, mpt_add(m, y, x));
}

static int mpti_zoo_stages(mpt_model *m, int x, const int *blocks, int num_stages, int channels,
                           bool bottleneck) {
    char prefix[32];
    int stage, block;

    for (stage = 0; stage < num_stages; stage++, channels *= 2)
        for (block = 0; block < blocks[stage]; block++) {
            snprintf(prefix, sizeof prefix, "layer%d.%d.", stage + 1, block);
            x = mpti_zoo_block(m, x, prefix, channels, stage > 0 && block == 0 ? 2 : 1, bottleneck);
        }
    return x;
}

/* CIFAR's form: 6n + 2 layers, three stages of 16, 32, 64 channels. */
static int mpti_zoo_resnet_cifar(mpt_model *m, int n, int num_classes) {
    int blocks[3], x;

    blocks[0] = blocks[1] = blocks[2] = n;
    x = mpt_relu(m, mpti_zoo_conv_norm(m, MPT_INPUT, "", 1, 16, 3, 1));
    x = mpti_zoo_stages(m, x, blocks, 3, 16, false);
    return mpt_name(m, mpt_dense(m, mpt_global_avg_pool(m, x), num_classes), "fc");
}

static int mpti_zoo_resnet(mpt_model *m, const int blocks[4], bool bottleneck, int num_classes) {
    int x = mpt_relu(m, mpti_zoo_conv_norm(m, MPT_INPUT, "", 1, 64, 7, 2));

    x = mpti_zoo_stages(m, mpt_max_pool(m, x, 3, 2, 1), blocks, 4, 64, bottleneck);
    return mpt_name(m, mpt_dense(m, mpt_global_avg_pool(m, x), num_classes), "fc");
}

static int mpti_zoo_lenet(mpt_model *m, int num_classes) {
    int x = mpt_relu(m, mpti_zoo_conv(m, MPT_INPUT, "conv1", 32, 3, 1, 1));

    x = mpt_max_pool(m, x, 2, 2, 0);
    x = mpt_relu(m, mpti_zoo_conv(m, x, "conv2", 64, 3, 1, 1));
    x = mpt_relu(m, mpt_name(m, mpt_dense(m, mpt_max_pool(m, x, 2, 2, 0), 128), "fc1"));
    return mpt_name(m, mpt_dense(m, x, num_classes), "fc2");
}

static int mpti_zoo_mlp(mpt_model *m, int num_classes) {
    int x = mpt_relu(m, mpt_name(m, mpt_dense(m, MPT_INPUT, 256), "fc1"));

    x = mpt_relu(m, mpt_name(m, mpt_dense(m, x, 128), "fc2"));
    return mpt_name(m, mpt_dense(m, x, num_classes), "fc3");
}

MPT_API int mpt_zoo(mpt_model *m, const char *name, int num_classes) {
    static const int blocks18[4] = {2, 2, 2, 2}, blocks34[4] = {3, 4, 6, 3};
    char what[160];

    if (!m || !name) return -1;
    if (!strcmp(name, "lenet")) return mpti_zoo_lenet(m, num_classes);
    if (!strcmp(name, "mlp")) return mpti_zoo_mlp(m, num_classes);
    if (!strcmp(name, "resnet20")) return mpti_zoo_resnet_cifar(m, 3, num_classes);
    if (!strcmp(name, "resnet32")) return mpti_zoo_resnet_cifar(m, 5, num_classes);
    if (!strcmp(name, "resnet56")) return mpti_zoo_resnet_cifar(m, 9, num_classes);
    if (!strcmp(name, "resnet18")) return mpti_zoo_resnet(m, blocks18, false, num_classes);
    if (!strcmp(name, "resnet34")) return mpti_zoo_resnet(m, blocks34, false, num_classes);
    if (!strcmp(name, "resnet50")) return mpti_zoo_resnet(m, blocks34, true, num_classes);
    snprintf(what, sizeof what,
             "there is no network '%.40s': lenet, mlp, resnet20, resnet32, resnet56, resnet18, "
             "resnet34, "
             "resnet50",
             name);
    mpti_model_fail(m, MPTI_KIND_INPUT, what);
    return -1;
}

/* =================================================================================================
 * >>optim   9 Loss and optimizer
 * =================================================================================================
 * Problem: turn summed, scaled gradients into new weights in two passes over memory, with the same
 *          bits whatever the number of threads.
 * Idea:    all weights lie in one flat buffer, cut into chunks that never cross a tensor's border.
 *          Pass 1 reads gradients and finds infs, NaNs and the norm; pass 2 unscales, clips,
 *          decays, updates and writes the 16-bit copy while the chunk is still in the cache.
 * Shapes:  weights, gradients, first and second moments FP32 [num_params], 16-bit copy the same:
 *
 *            | conv1.weight        | bn1.weight | bn1.bias | conv2.weight ...   segments (tensors)
 *            | chunk 0 | chunk 1 | 2 | chunk 3  | chunk 4  | chunk 5 | ...      at most 16384 each
 *
 * Tested:  tests/test_optim.c, against PyTorch's steps
 * Next:    >>scaler, which decides whether there is an update at all.
 */

/* ---- the optimizer's desc -------------------------------------------------------------------- */
/* The one place where defaults of mpt_optimizer_desc are filled in. */
static void mpti_optimizer_desc_defaults(mpt_optimizer_desc *d) {
    if (d->kind == MPT_OPTIMIZER_DEFAULT) d->kind = MPT_OPTIMIZER_SGD_MOMENTUM;
    if (mpti_f32_bits(d->momentum) == 0) d->momentum = 0.9f;
    if (mpti_f32_bits(d->beta1) == 0) d->beta1 = 0.9f;
    if (mpti_f32_bits(d->beta2) == 0) d->beta2 = 0.999f;
    if (mpti_f32_bits(d->epsilon) == 0) d->epsilon = 1e-8f;
    if (mpti_f32_bits(d->lars_trust) == 0) d->lars_trust = 0.001f;
}

/* Works on a desc whose defaults are filled in. */
static mpt_result mpti_optimizer_desc_check(const mpt_optimizer_desc *d, mpt_error *err) {
    const mpti_bound bounds[] = {
        {(float)d->kind, MPT_OPTIMIZER_SGD, MPT_OPTIMIZER_LARS, "kind is unknown"},
        {d->learning_rate, MPTI_TINY, 1e30f, "learning_rate is required: a number above 0"},
        {d->momentum, MPTI_TINY, MPTI_ALMOST_1,
         "momentum must be above 0 and below 1; for none choose MPT_OPTIMIZER_SGD"},
        {d->beta1, MPTI_TINY, MPTI_ALMOST_1, "beta1 must be above 0 and below 1"},
        {d->beta2, MPTI_TINY, MPTI_ALMOST_1, "beta2 must be above 0 and below 1"},
        {d->epsilon, MPTI_TINY, 1e30f, "epsilon must be above 0"},
        {d->weight_decay, 0, MPTI_FLT_MAX, "weight_decay must be at least 0"},
        {d->max_grad_norm, 0, MPTI_FLT_MAX, "max_grad_norm must be at least 0"},
        {d->lars_trust, MPTI_TINY, 1e30f, "lars_trust must be above 0"},
    };
    return mpti_check_bounds(err, "mpt_optimizer_desc", bounds, sizeof bounds / sizeof bounds[0]);
}

/* FP32 numbers of state per weight: momentum, or Adam's two moments. */
static int mpti_optimizer_state_count(mpt_optimizer_kind kind) {
    if (kind == MPT_OPTIMIZER_SGD) return 0;
    return kind == MPT_OPTIMIZER_ADAM || kind == MPT_OPTIMIZER_ADAMW ? 2 : 1;
}

/* ---- segments and chunks --------------------------------------------------------------------- */
typedef struct mpti_parameter { /* one parameter tensor within the flat buffers */
    size_t offset, count;
    bool decays; /* weight decay applies */
    bool adapts; /* LARS's ratio applies */
} mpti_parameter;

typedef struct mpti_update_chunk {
    size_t offset, count;
    int64_t segment;
    double gradient_sum, weight_sum; /* of squares, by the last check; of weights only for LARS */
    uint32_t nonfinite;              /* by the last check too */
} mpti_update_chunk;

typedef struct mpti_optimizer {
    mpt_ctx *ctx;
    mpt_optimizer_desc desc;        /* with defaults filled in */
    const mpti_parameter *segments; /* [num_segments], ascending, the model's */
    int64_t num_segments;
    mpti_update_chunk *chunks; /* [num_chunks] */
    int64_t num_chunks;
    float *ratios; /* [num_segments] of LARS */
    /* state: applied_steps is what a checkpoint needs; the powers follow from it */
    int64_t applied_steps;
    double beta1_power, beta2_power; /* beta^applied_steps */
} mpti_optimizer;

/* The flat buffers, all [num_params]. */
typedef struct mpti_params {
    float *weights; /* FP32 masters */
    const float *gradients;
    float *first, *second; /* moments; NULL where the kind has none */
    uint16_t *half;        /* 16-bit copy of the weights; NULL: none */
    mpt_dtype half_dtype;  /* MPT_F16 or MPT_BF16 */
} mpti_params;

/* What a loop over one chunk needs. */
typedef struct mpti_span {
    float *w, *m, *v; /* [n] */
    const float *g;   /* [n] */
    size_t n;
    float multiplier; /* unscale * clip */
    float decay;      /* d of the formulas in the API, 0 where it does not apply */
    float rate;       /* r; for Adam divided by 1 - beta1^t, for LARS times q */
    float keep;       /* AdamW: 1 - r d; else 1 */
    float root;       /* Adam: sqrt(1 - beta2^t) */
} mpti_span;

/* One pass over all chunks. */
typedef struct mpti_update_job {
    mpti_optimizer *o;
    const mpti_params *params;
    mpti_span common; /* what holds for every chunk */
} mpti_update_job;

/* What the desc says of a tensor. desc with defaults filled in. */
static mpti_parameter mpti_parameter_make(const mpt_optimizer_desc *desc, size_t offset,
                                          size_t count, bool is_bn_or_bias) {
    bool lars = desc->kind == MPT_OPTIMIZER_LARS;
    mpti_parameter s;

    s.offset = offset;
    s.count = count;
    s.adapts = lars && (!is_bn_or_bias || desc->lars_ratio_on_bn_and_bias);
    s.decays = !is_bn_or_bias || (!desc->no_decay_on_bn_and_bias && (!lars || s.adapts));
    return s;
}

static int64_t mpti_parameter_chunks(size_t count) {
    return (int64_t)(count / MPT_UPDATE_CHUNK + (count % MPT_UPDATE_CHUNK != 0));
}

/* What mpti_optimizer_open takes. */
static size_t mpti_optimizer_bytes(int64_t num_chunks, int64_t num_segments) {
    return sizeof(mpti_update_chunk) * (size_t)num_chunks + sizeof(float) * (size_t)num_segments;
}

static void mpti_optimizer_close(mpti_optimizer *o) {
    const mpt_allocator *a = o->ctx ? &o->ctx->desc.allocator : NULL;

    if (!a) return;
    mpti_free(a, o->chunks, sizeof *o->chunks * (size_t)o->num_chunks);
    mpti_free(a, o->ratios, sizeof *o->ratios * (size_t)o->num_segments);
    memset(o, 0, sizeof *o);
}

/* desc passes the check. segments stay alive until close; at least one is not empty. */
static mpt_result mpti_optimizer_open(mpti_optimizer *o, mpt_ctx *ctx,
                                      const mpt_optimizer_desc *desc,
                                      const mpti_parameter *segments, int64_t num_segments) {
    mpti_update_chunk *chunk;
    int64_t i;
    size_t done;

    memset(o, 0, sizeof *o);
    o->ctx = ctx;
    o->desc = *desc;
    o->segments = segments;
    o->num_segments = num_segments;
    o->beta1_power = o->beta2_power = 1;
    for (i = 0; i < num_segments; i++) o->num_chunks += mpti_parameter_chunks(segments[i].count);
    o->chunks = (mpti_update_chunk *)mpti_calloc(&ctx->desc.allocator, (size_t)o->num_chunks,
                                                 sizeof *o->chunks);
    o->ratios = (float *)mpti_calloc(&ctx->desc.allocator, (size_t)num_segments, sizeof *o->ratios);
    if (!o->chunks || !o->ratios) {
        mpti_optimizer_close(o);
        return MPTI_FAIL(&ctx->error, MPT_ERR_OUT_OF_MEMORY, "no memory for the optimizer");
    }
    for (i = 0, chunk = o->chunks; i < num_segments; i++) {
        for (done = 0; done < segments[i].count; done += chunk->count, chunk++) {
            size_t left = segments[i].count - done;

            chunk->offset = segments[i].offset + done;
            chunk->count = left < MPT_UPDATE_CHUNK ? left : (size_t)MPT_UPDATE_CHUNK;
            chunk->segment = i;
        }
    }
    return MPT_OK;
}

static void mpti_optimizer_advance(mpti_optimizer *o) {
    o->applied_steps++;
    o->beta1_power *= (double)o->desc.beta1;
    o->beta2_power *= (double)o->desc.beta2;
}

/* After loading a checkpoint. The same multiplications in the same order as in training, so that a
   resumed run has the same powers to the last bit. */
static void mpti_optimizer_resume(mpti_optimizer *o, int64_t applied_steps) {
    o->applied_steps = 0;
    o->beta1_power = o->beta2_power = 1;
    while (o->applied_steps < applied_steps && o->beta2_power + o->beta1_power > 0)
        mpti_optimizer_advance(o);
    o->applied_steps = applied_steps;
}

/* ---- pass 1: is every gradient finite, and how long is the vector? --------------------------- */

/* Eight sums side by side, which a compiler may keep in vectors: it may not reorder a single sum.
   In double, as squares of FP32 numbers can overflow and vanish in FP32. */
typedef struct mpti_square_sum {
    double lanes[8];
    uint32_t nonfinite[8];
} mpti_square_sum;

static void mpti_square_sum_add(mpti_square_sum *s, const float *x, float multiplier) { /* x [8] */
    const uint32_t exponent = 0x7f800000u;
    int k;

    for (k = 0; k < 8; k++) {
        float unscaled = x[k] * multiplier;
        /* the second test is for scales below 1, where unscaling itself can overflow */
        s->nonfinite[k] |= (uint32_t)((mpti_f32_bits(x[k]) & exponent) == exponent);
        s->nonfinite[k] |= (uint32_t)((mpti_f32_bits(unscaled) & exponent) == exponent);
        s->lanes[k] += (double)unscaled * (double)unscaled;
    }
}

static double mpti_sum_of_squares(const float *x, size_t n, float multiplier, uint32_t *nonfinite) {
    mpti_square_sum s;
    float rest[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    int k;

    memset(&s, 0, sizeof s);
    for (; n >= 8; n -= 8, x += 8) mpti_square_sum_add(&s, x, multiplier);
    memcpy(rest, x, n * sizeof *x);
    mpti_square_sum_add(&s, rest, multiplier);
    for (k = 0, *nonfinite = 0; k < 8; k++) *nonfinite |= s.nonfinite[k];
    return ((s.lanes[0] + s.lanes[1]) + (s.lanes[2] + s.lanes[3])) +
           ((s.lanes[4] + s.lanes[5]) + (s.lanes[6] + s.lanes[7]));
}

/* A binary tree whose shape depends on n alone: chunks may finish in any order. */
static double mpti_tree_sum(const mpti_update_chunk *chunks, int64_t n, bool of_weights) {
    int64_t left = n / 2;

    if (n == 0) return 0;
    if (n == 1) return of_weights ? chunks->weight_sum : chunks->gradient_sum;
    return mpti_tree_sum(chunks, left, of_weights) +
           mpti_tree_sum(chunks + left, n - left, of_weights);
}

/* sqrt of a sum of squares of FP32 numbers, 2^-300 .. 2^300, by way of sqrtf; within 1e-7 of it. */
static float mpti_norm_of(double sum) {
    const double far = 1.2676506002282294e30; /* 2^100 */
    double norm;

    if (sum > far) norm = (double)sqrtf((float)(sum / far / far)) * far;
    else if (sum < 1 / far) norm = (double)sqrtf((float)(sum * far * far)) / far;
    else norm = (double)sqrtf((float)sum);
    return norm > (double)MPTI_FLT_MAX ? MPTI_FLT_MAX : (float)norm;
}

static mpt_result mpti_check_chunk(int64_t index, void *user) {
    const mpti_update_job *job = (const mpti_update_job *)user;
    mpti_update_chunk *c = &job->o->chunks[index];
    uint32_t ignored;

    c->gradient_sum = mpti_sum_of_squares(job->params->gradients + c->offset, c->count,
                                          job->common.multiplier, &c->nonfinite);
    if (job->o->segments[c->segment].adapts)
        c->weight_sum = mpti_sum_of_squares(job->params->weights + c->offset, c->count, 1,
                                            &ignored);
    return MPT_OK;
}

/* unscale: what turns a stored gradient into the true one, 1 / (loss scale * records). Reads only.
   *norm is that of the unscaled gradient, 0 if it is not finite. Every step, whatever the scale. */
static mpt_result mpti_gradients_check(mpti_optimizer *o, const mpti_params *params, float unscale,
                                       bool *found_nonfinite, float *norm) {
    mpti_update_job job;
    mpt_result rc;
    int64_t i;

    memset(&job, 0, sizeof job);
    job.o = o;
    job.params = params;
    job.common.multiplier = unscale;
    rc = mpt_parallel_for(o->ctx, o->num_chunks, mpti_check_chunk, &job);
    if (rc) return rc;
    *found_nonfinite = false;
    for (i = 0; i < o->num_chunks; i++) *found_nonfinite |= o->chunks[i].nonfinite != 0;
    *norm = *found_nonfinite ? 0 : mpti_norm_of(mpti_tree_sum(o->chunks, o->num_chunks, false));
    return MPT_OK;
}

/* As torch.nn.utils.clip_grad_norm_, its 1e-6 included. max_norm 0: no clipping. */
static float mpti_clip_factor(float norm, float max_norm) {
    float factor = max_norm / (norm + 1e-6f);
    return max_norm > 0 && factor < 1 ? factor : 1;
}

/* ---- pass 2: the update ------------------------------------------------------------------------
   Each rule is one loop over a chunk. Scalars are copied out of the struct first: a store to w
   might change them, for all that the compiler knows, and it would not vectorise. */
static void mpti_update_sgd(const mpti_span *s) {
    float *w = s->w, multiplier = s->multiplier, decay = s->decay, rate = s->rate;
    const float *g = s->g;
    size_t i, n = s->n;

    for (i = 0; i < n; i++) w[i] -= rate * (g[i] * multiplier + decay * w[i]);
}

/* Three rules in one: factors of 1 and 0 change no bit. LARS has the rate inside the momentum, so
   that old steps keep theirs (inner); Nesterov looks one step ahead (ahead, the factor of g). */
static void mpti_update_momentum(const mpti_span *s, mpt_optimizer_kind kind, float momentum) {
    float *w = s->w, *m = s->m, multiplier = s->multiplier, decay = s->decay;
    float inner = kind == MPT_OPTIMIZER_LARS ? s->rate : 1;
    float outer = kind == MPT_OPTIMIZER_LARS ? 1 : s->rate;
    float ahead = kind == MPT_OPTIMIZER_SGD_NESTEROV ? 1 : 0;
    float behind = kind == MPT_OPTIMIZER_SGD_NESTEROV ? momentum : 1;
    const float *g = s->g;
    size_t i, n = s->n;

    for (i = 0; i < n; i++) {
        float d = g[i] * multiplier + decay * w[i];

        m[i] = momentum * m[i] + inner * d;
        w[i] -= outer * (ahead * d + behind * m[i]);
    }
}

/* epsilon is added in FP32: in FP16 1e-8 is 0, and a gradient of 0 gave 0/0. */
static void mpti_update_adam(const mpti_span *s, float beta1, float beta2, float epsilon) {
    float *w = s->w, *m = s->m, *v = s->v, multiplier = s->multiplier, decay = s->decay;
    float rate = s->rate, keep = s->keep, root = s->root;
    float rest1 = (float)(1 - (double)beta1), rest2 = (float)(1 - (double)beta2);
    const float *g = s->g;
    size_t i, n = s->n;

    for (i = 0; i < n; i++) {
        float d = g[i] * multiplier + decay * w[i];

        m[i] = beta1 * m[i] + rest1 * d;
        v[i] = beta2 * v[i] + rest2 * d * d;
        w[i] = keep * w[i] - rate * (m[i] / (sqrtf(v[i]) / root + epsilon));
    }
}

static mpt_result mpti_update_chunk_run(int64_t index, void *user) {
    const mpti_update_job *job = (const mpti_update_job *)user;
    const mpti_update_chunk *c = &job->o->chunks[index];
    const mpt_optimizer_desc *d = &job->o->desc;
    const mpti_params *p = job->params;
    mpti_span s = job->common;

    s.w = p->weights + c->offset;
    s.g = p->gradients + c->offset;
    s.m = p->first ? p->first + c->offset : NULL;
    s.v = p->second ? p->second + c->offset : NULL;
    s.n = c->count;
    s.rate *= job->o->ratios[c->segment];
    if (!job->o->segments[c->segment].decays) {
        s.decay = 0;
        s.keep = 1;
    }
    switch (mpti_optimizer_state_count(d->kind)) {
    case 0: mpti_update_sgd(&s); break;
    case 1: mpti_update_momentum(&s, d->kind, d->momentum); break;
    default: mpti_update_adam(&s, d->beta1, d->beta2, d->epsilon); break;
    }
    if (p->half) mpti_narrow_plain(p->half_dtype, s.w, p->half + c->offset, s.n);
    return MPT_OK;
}

/* Trust ratios from the norms that the check left. 1 where a norm is 0, as weights of zero would
   never move otherwise, and where LARS is not at work. */
static void mpti_lars_ratios(mpti_optimizer *o, float clip) {
    const mpti_update_chunk *chunk = o->chunks;
    int64_t i;

    for (i = 0; i < o->num_segments; i++) {
        const mpti_parameter *s = &o->segments[i];
        int64_t n = mpti_parameter_chunks(s->count);
        float w_norm = s->adapts ? mpti_norm_of(mpti_tree_sum(chunk, n, true)) : 0;
        float g_norm = s->adapts ? mpti_norm_of(mpti_tree_sum(chunk, n, false)) * clip : 0;
        float decay = s->decays ? o->desc.weight_decay : 0;

        o->ratios[i] = 1;
        if (w_norm > 0 && g_norm > 0)
            o->ratios[i] = o->desc.lars_trust * w_norm /
                           (g_norm + decay * w_norm + o->desc.epsilon);
        chunk += n;
    }
}

/* One update, after a check of the same gradients that found them finite. */
static mpt_result mpti_optimizer_update(mpti_optimizer *o, const mpti_params *params, float unscale,
                                        float clip, float learning_rate) {
    const mpt_optimizer_desc *d = &o->desc;
    mpti_update_job job;

    mpti_optimizer_advance(o); /* t counts from 1 */
    memset(&job, 0, sizeof job);
    job.o = o;
    job.params = params;
    job.common.multiplier = unscale * clip;
    job.common.decay = d->kind == MPT_OPTIMIZER_ADAMW ? 0 : d->weight_decay;
    job.common.rate = learning_rate;
    job.common.keep = 1;
    if (d->kind == MPT_OPTIMIZER_ADAMW) job.common.keep = 1 - learning_rate * d->weight_decay;
    if (mpti_optimizer_state_count(d->kind) == 2) {
        job.common.rate = (float)((double)learning_rate / (1 - o->beta1_power));
        job.common.root = sqrtf((float)(1 - o->beta2_power));
    }
    mpti_lars_ratios(o, clip);
    return mpt_parallel_for(o->ctx, o->num_chunks, mpti_update_chunk_run, &job);
}

/* ---- schedules ---------------------------------------------------------------------------------
   The same bits everywhere: only + - * / in double, and no product is added to anything before a
   cast or a division has rounded it, since some compilers fuse the two into one rounding. */

static void mpti_schedule_desc_defaults(mpt_schedule_desc *d) {
    if (mpti_f32_bits(d->decay_factor) == 0) d->decay_factor = 0.1f;
    if (d->poly_power == 0) d->poly_power = 2;
    if (mpti_f32_bits(d->pct_start) == 0) d->pct_start = 0.3f;
    if (mpti_f32_bits(d->div_factor) == 0) d->div_factor = 25;
    if (mpti_f32_bits(d->final_div_factor) == 0) d->final_div_factor = 10000;
}

static const char *mpti_schedule_steps_wrong(const mpt_schedule_desc *d) { /* NULL: nothing */
    int i;

    if (d->num_milestones < 0 || (d->num_milestones > 0 && !d->milestones))
        return "milestones must be num_milestones steps";
    if (d->decay_every < 0) return "decay_every must be at least 0";
    if (!d->num_milestones == !d->decay_every)
        return "milestones or decay_every must be set, not both, for MPT_SCHEDULE_STEP";
    for (i = 0; i < d->num_milestones; i++)
        if (d->milestones[i] < (i ? d->milestones[i - 1] + 1 : 0))
            return "milestones must be at least 0 and ascend";
    return NULL;
}

/* Works on a desc whose defaults are filled in. */
static mpt_result mpti_schedule_desc_check(const mpt_schedule_desc *d, int64_t total_steps,
                                           mpt_error *err) {
    const bool needs_total = d->kind == MPT_SCHEDULE_COSINE || d->kind == MPT_SCHEDULE_POLY ||
                             d->kind == MPT_SCHEDULE_ONE_CYCLE;
    const char *wrong_steps = d->kind == MPT_SCHEDULE_STEP ? mpti_schedule_steps_wrong(d) : NULL;
    const mpti_bound bounds[] = {
        {(float)d->kind, 0, MPT_SCHEDULE_ONE_CYCLE, "kind is unknown"},
        {(float)(d->warmup_steps >= 0), 1, 1, "warmup_steps must be at least 0"},
        {(float)(!needs_total || total_steps > 0), 1, 1,
         "kind: cosine, poly and one-cycle need the number of total_steps"},
        {(float)(!needs_total || d->warmup_steps < total_steps), 1, 1,
         "warmup_steps must be below the number of total_steps"},
        {d->warmup_start, 0, 1, "warmup_start must be in 0 .. 1"},
        {d->end_factor, 0, 1, "end_factor must be in 0 .. 1"},
        {d->decay_factor, MPTI_TINY, 1, "decay_factor must be above 0, at most 1"},
        {(float)d->poly_power, 1, 16, "poly_power must be in 1 .. 16"},
        {d->pct_start, MPTI_TINY, MPTI_ALMOST_1, "pct_start must be above 0 and below 1"},
        {d->div_factor, 1, MPTI_FLT_MAX, "div_factor must be at least 1"},
        {d->final_div_factor, 1, MPTI_FLT_MAX, "final_div_factor must be at least 1"},
        {(float)!wrong_steps, 1, 1, wrong_steps},
    };
    return mpti_check_bounds(err, "mpt_schedule_desc", bounds, sizeof bounds / sizeof bounds[0]);
}

MPT_API mpt_result mpt_schedule_check(mpt_ctx *ctx, const mpt_schedule_desc *desc,
                                      int64_t total_steps) {
    mpt_schedule_desc d;

    if (!desc) return MPT_ERR_INVALID_ARGUMENT;
    d = *desc;
    mpti_schedule_desc_defaults(&d);
    return mpti_report(ctx, mpti_schedule_desc_check(&d, total_steps, ctx ? &ctx->error : NULL));
}

static double mpti_power(double x, int64_t k) { /* x^k by squaring */
    double result = 1;

    for (; k > 0; k /= 2, x *= x)
        if (k % 2) result *= x;
    return result;
}

/* From `to` (f = 0) to `from` (f = 1). */
static float mpti_mix(float from, float to, double f) {
    return to + (float)(((double)from - (double)to) * f);
}

/* PyTorch's two phases, counted from 0: steps 0 .. rise and rise .. n - 1. */
static float mpti_one_cycle(const mpt_schedule_desc *d, double step, double n) {
    float start = 1 / d->div_factor, end = start / d->final_div_factor;
    double rise = (double)(float)(n * (double)d->pct_start) - 1;

    if (step > n - 1) step = n - 1;
    if (step < rise) return mpti_mix(start, 1, mpti_half_cosine(step / rise));
    if (rise < 0) rise = 0;
    if (step <= rise) return 1;
    return mpti_mix(1, end, mpti_half_cosine((step - rise) / (n - 1 - rise)));
}

/* Behind the warm-up. */
static double mpti_schedule_factor(const mpt_schedule_desc *d, int64_t step, int64_t total) {
    double n = (double)(total - d->warmup_steps), at = (double)(step - d->warmup_steps);
    double u = at < n ? at / n : 1;
    int64_t decays = 0;

    switch (d->kind) {
    case MPT_SCHEDULE_CONSTANT: return 1;
    case MPT_SCHEDULE_STEP:
        if (d->decay_every) decays = step / d->decay_every;
        while (decays < d->num_milestones && d->milestones[decays] <= step) decays++;
        return mpti_power((double)d->decay_factor, decays);
    case MPT_SCHEDULE_COSINE: return (double)mpti_mix(1, d->end_factor, mpti_half_cosine(u));
    case MPT_SCHEDULE_POLY:
        return (double)mpti_mix(1, d->end_factor, mpti_power(1 - u, d->poly_power));
    case MPT_SCHEDULE_ONE_CYCLE: return (double)mpti_one_cycle(d, at, n);
    }
    return 1;
}

MPT_API float mpt_schedule_rate(const mpt_schedule_desc *desc, float learning_rate,
                                int64_t applied_steps, int64_t total_steps) {
    mpt_schedule_desc d = *desc;
    bool warming = applied_steps < d.warmup_steps;
    double rate;

    mpti_schedule_desc_defaults(&d);
    rate = (double)learning_rate *
           mpti_schedule_factor(&d, warming ? d.warmup_steps : applied_steps, total_steps);
    if (warming)
        rate *= (double)mpti_mix(1, d.warmup_start,
                                 (double)(applied_steps + 1) / (double)(d.warmup_steps + 1));
    return (float)rate;
}

MPT_API float mpt_learning_rate_scale(float learning_rate, int64_t batch, int64_t reference_batch) {
    if (batch <= 0 || reference_batch <= 0) return 0;
    return (float)((double)learning_rate * (double)batch / (double)reference_batch);
}

/* =================================================================================================
 * >>scaler   10 Loss scaling
 * =================================================================================================
 * Problem: most gradients are tiny, and FP16 has nothing between 0 and 2^-24: they vanish in the
 *          backward pass, and the weights behind them stop learning without a word.
 * Idea:    backward is linear: multiply the loss by S, and every gradient is S times as large. The
 *          FP32 optimizer divides by S again. S grows while all is well and falls on overflow.
 * Shapes:  one float S for the whole model; the gradients it is divided out of, FP32 [num_params].
 * Tested:  tests/test_scaler.c, against GradScaler's trace
 * Next:    >>state, which writes S and the rest of a run into a file.
 *
 * ---- the room that FP16 has --------------------------------------------------------------------
 *
 *    0   2^-24              2^-14                 1                     2^15   65504
 *    |     | | | | | | | | | |--|--|-----|-----|-----|-----|-----|-----|-----|---]   inf
 *    gone  subnormal:         normal: 10 bits behind the first one               from 65520 on
 *          one grid of 2^-24; 2^-20 has 4 bits behind the first one, 2^-24 has none
 *
 * A sketch of one layer's gradients, how many there are of each size. The mean over 256 records
 * alone has made them 2^8 times smaller than those of one record. Upper row: S = 1, lower: 2^16.
 *
 *                 2^-40 2^-32   2^-24   2^-16   2^-8      1      2^8    2^16
 *                 |       |       |       |       |       |       |       |
 *      S = 1           .:-+*######*+-:.
 *      S = 65536                       .:-+*######*+-:.
 *                 --- become 0 ---|subnormal|--------- normal ----------|inf
 *
 * With S = 1 most are below 2^-25 and become 0, and the survivors have a few bits each. With 2^16
 * all are there, nearly all in full precision. The multiplication itself costs nothing: S is a
 * power of two, so it moves exponents and touches no mantissa, and 1/S moves them back; and
 * FP32, in which weight gradients are summed, goes down to 2^-149. Micikevicius et al. 2018 (arXiv
 * 1710.03740) trained with constants from 8 to 32768. Any S will do that brings most gradients up
 * and keeps max|g| S below 65504; as nobody knows the gradients beforehand, the training looks for
 * it by itself.
 *
 * ---- the search --------------------------------------------------------------------------------
 *
 *              growth_interval (2000) good steps in a row: S = 2 S, unless beyond max_scale
 *             +----------------------------------------------+
 *             v                                              |
 *      +-------------+  all gradients finite: apply   +--------------+
 *      |  backward   |------------------------------->| good_steps++ |
 *      |  at scale S |<-------------------------------|              |
 *      +-------------+                                +--------------+
 *             |  an inf or NaN: skip the step, S = S / 2 but at least min_scale, good_steps = 0
 *             +---> again, with the next batch; max_skips_at_min (20) in a row at min_scale: stuck
 *
 * Too large shows at once, as inf; too small never does. So the search goes up until it bumps
 * against the ceiling, and pays one lost step in 2000 for that. BF16 has the exponents of FP32 and
 * needs none of this; the check for infs and NaNs is made all the same, at any S, 1 included.
 *
 * ---- the order of a step -----------------------------------------------------------------------
 *
 *   1 reduce    g = sum over lanes and ranks of S dL/dw
 *   2 check     is there an inf or NaN in g? how long is g / (S n)? n = records of the step
 *   3 unscale   g = g / (S n), with the S of this very backward pass, not of the next one
 *   4 clip      g = g min(1, max_grad_norm / |g|)
 *   5 decay     g = g + d w
 *   6 momentum  m = momentum m + g
 *   7 update    w = w - r m, then the 16-bit copy of w
 *
 * Unscale before 4, 5 and 6, as each of them sets g beside something that was never scaled: a bound
 * chosen by the user, the weights, the momentum of steps that had another S. A gradient that is
 * clipped while it is still 65536 times too long is clipped to nothing.
 *
 * Check after 1, since all ranks must come to the same verdict, or their weights part forever. An
 * inf or NaN in one rank's gradient is in everybody's sum, as no finite number added to it brings
 * it back: the sum itself carries the vote, without a message of its own. And some sums overflow
 * only when they are made: a check before would miss those.
 *
 * A skipped step leaves as they were, bit for bit: weights and their 16-bit copy, momentum, Adam's
 * moments, the running statistics of batch norm (the same forward pass made them, and it may have
 * overflowed), the number of applied steps, and with that schedule, warm-up and Adam's t. What
 * moves: the position in the data, the number of attempted steps, num_skipped, and S.
 */

#define MPTI_SCALE_LOWEST 1.17549435e-38f /* 2^-126: 1 / S is finite, and S no subnormal */
#define MPTI_SCALE_HIGHEST 1.70141183e38f /* 2^127: the last power of two in FP32 */

/* The one place where defaults of mpt_loss_scaler_desc are filled in. */
static void mpti_loss_scaler_desc_defaults(mpt_loss_scaler_desc *d) {
    if (d->mode == MPT_LOSS_SCALE_DEFAULT) d->mode = MPT_LOSS_SCALE_DYNAMIC;
    if (mpti_f32_bits(d->growth_factor) == 0) d->growth_factor = 2;
    if (mpti_f32_bits(d->backoff_factor) == 0) d->backoff_factor = 0.5f;
    if (mpti_f32_bits(d->min_scale) == 0) d->min_scale = 1;
    if (mpti_f32_bits(d->max_scale) == 0) d->max_scale = 16777216;
    if (mpti_f32_bits(d->init_scale) == 0) {
        d->init_scale = 65536;
        if (d->init_scale > d->max_scale) d->init_scale = d->max_scale;
        if (d->init_scale < d->min_scale) d->init_scale = d->min_scale;
    }
    if (d->growth_interval == 0) d->growth_interval = 2000;
    if (d->max_skips_at_min == 0) d->max_skips_at_min = 20;
}

/* Works on a desc whose defaults are filled in. A fixed scale need not lie in min .. max. */
static mpt_result mpti_loss_scaler_desc_check(const mpt_loss_scaler_desc *d, mpt_error *err) {
    const float lowest = MPTI_SCALE_LOWEST, highest = MPTI_SCALE_HIGHEST;
    const bool fixed = d->mode != MPT_LOSS_SCALE_DYNAMIC;
    const mpti_bound bounds[] = {
        {(float)d->mode, MPT_LOSS_SCALE_DYNAMIC, MPT_LOSS_SCALE_NONE, "mode is unknown"},
        {d->init_scale, lowest, highest, "init_scale must be in 2^-126 .. 2^127"},
        {d->growth_factor, 1.0000001f, MPTI_FLT_MAX, "growth_factor must be above 1"},
        {d->backoff_factor, MPTI_TINY, MPTI_ALMOST_1,
         "backoff_factor must be above 0 and below 1"},
        {d->min_scale, lowest, highest, "min_scale must be in 2^-126 .. 2^127"},
        {d->max_scale, d->min_scale, highest, "max_scale must be in min_scale .. 2^127"},
        {d->init_scale, fixed ? lowest : d->min_scale, fixed ? highest : d->max_scale,
         "init_scale must be in min_scale .. max_scale"},
        {(float)(d->growth_interval > 0), 1, 1, "growth_interval must be at least 1"},
        {(float)(d->max_skips_at_min > 0), 1, 1, "max_skips_at_min must be at least 1"},
    };
    return mpti_check_bounds(err, "mpt_loss_scaler_desc", bounds, sizeof bounds / sizeof bounds[0]);
}

MPT_API mpt_result mpt_loss_scaler_check(mpt_ctx *ctx, const mpt_loss_scaler_desc *desc) {
    mpt_loss_scaler_desc d;

    if (!desc) return MPT_ERR_INVALID_ARGUMENT;
    d = *desc;
    mpti_loss_scaler_desc_defaults(&d);
    return mpti_report(ctx, mpti_loss_scaler_desc_check(&d, ctx ? &ctx->error : NULL));
}

/* Apex: apex/amp/scaler.py, whose min_loss_scale is unset; 1 is ours. GradScaler (torch/amp) knows
   no bounds but inf and 0. Keras: LossScaleOptimizer of TensorFlow 2, which stops at 1 too. */
MPT_API mpt_loss_scaler_desc mpt_loss_scaler_desc_preset(mpt_loss_scaler_preset preset) {
    mpt_loss_scaler_desc d;

    memset(&d, 0, sizeof d);
    if (preset != MPT_LOSS_SCALER_APEX) d.max_scale = MPTI_SCALE_HIGHEST;
    if (preset == MPT_LOSS_SCALER_GRADSCALER) d.min_scale = MPTI_SCALE_LOWEST;
    if (preset == MPT_LOSS_SCALER_KERAS) d.init_scale = 32768;
    mpti_loss_scaler_desc_defaults(&d);
    return d;
}

MPT_API void mpt_loss_scaler_init(mpt_loss_scaler *s, const mpt_loss_scaler_desc *desc) {
    memset(s, 0, sizeof *s);
    if (desc) s->desc = *desc;
    mpti_loss_scaler_desc_defaults(&s->desc);
    s->scale = s->desc.mode == MPT_LOSS_SCALE_NONE ? 1 : s->desc.init_scale;
}

MPT_API int mpt_loss_scaler_update(mpt_loss_scaler *s, int found_nonfinite) {
    const mpt_loss_scaler_desc *d = &s->desc;
    bool dynamic = d->mode == MPT_LOSS_SCALE_DYNAMIC;
    double grown = (double)s->scale * (double)d->growth_factor; /* double: it may pass FP32's end */
    float lowered = s->scale * d->backoff_factor;

    if (found_nonfinite) {
        bool lowest = !dynamic || s->scale <= d->min_scale;

        s->num_skipped++;
        s->good_steps = 0;
        s->skips_at_min = !lowest ? 0 : s->skips_at_min + (s->skips_at_min < INT_MAX);
        if (dynamic) s->scale = lowered < d->min_scale ? d->min_scale : lowered;
        return 1;
    }
    s->skips_at_min = 0;
    if (dynamic && ++s->good_steps >= d->growth_interval) {
        if (grown <= (double)d->max_scale) s->scale = (float)grown;
        s->good_steps = 0;
    }
    return 0;
}

MPT_API int mpt_loss_scaler_is_stuck(const mpt_loss_scaler *s) {
    return s->skips_at_min >= s->desc.max_skips_at_min;
}

MPT_API mpt_result mpt_loss_scaler_restore(mpt_loss_scaler *s, const mpt_loss_scaler *saved) {
    const mpt_loss_scaler_desc *d = &s->desc;

    if (!mpti_is_within(saved->scale, MPTI_SCALE_LOWEST, MPTI_SCALE_HIGHEST) ||
        saved->good_steps < 0 || saved->skips_at_min < 0 || saved->num_skipped < 0)
        return MPT_ERR_CORRUPT_DATA;
    s->good_steps = saved->good_steps;
    s->skips_at_min = saved->skips_at_min;
    s->num_skipped = saved->num_skipped;
    if (d->mode != MPT_LOSS_SCALE_DYNAMIC || saved->desc.mode != MPT_LOSS_SCALE_DYNAMIC)
        return MPT_OK;
    s->scale = saved->scale;
    if (s->scale < d->min_scale) s->scale = d->min_scale;
    if (s->scale > d->max_scale) s->scale = d->max_scale;
    return MPT_OK;
}

/* ---- overflow autopsy --------------------------------------------------------------------------
   All by integers: |x| of FP32 numbers grows with its bits, 0x7f800000 is inf, above is NaN. */
/* The largest finite number of a floating type; 0 for other types. */
static float mpti_dtype_max(mpt_dtype dtype) {
    switch (dtype) {
    case MPT_F16: return 65504;
    case MPT_BF16: return mpti_f32_from_bits(0x7f7f0000u);
    case MPT_F32: return MPTI_FLT_MAX;
    default: return 0;
    }
}

static float mpti_power_of_2(int exponent) { /* brought into -126 .. 127 */
    exponent = exponent < -126 ? -126 : exponent > 127 ? 127 : exponent;
    return mpti_f32_from_bits((uint32_t)(exponent + 127) << 23);
}

static int mpti_exponent_of(double x) { /* floor(log2 x) of a normal number; 1024 for inf */
    return (int)(mpti_f64_bits(x) >> 52 & 0x7ff) - 1023;
}

static bool mpti_tensor_elements(const mpt_tensor *t, size_t *count) {
    int i;

    *count = 1;
    if (t->num_dims < 0 || t->num_dims > MPT_MAX_DIMS) return false;
    for (i = 0; i < t->num_dims; i++)
        if (t->dims[i] < 0 || (uint64_t)t->dims[i] > SIZE_MAX ||
            !mpti_mul(*count, (size_t)t->dims[i], count))
            return false;
    return t->data || *count == 0;
}

static void mpti_autopsy_count(mpt_autopsy *a, int64_t index, uint32_t magnitude) {
    int bucket = (int)(magnitude >> 23) - 127 - MPT_AUTOPSY_LOWEST_EXPONENT;

    if (magnitude >= 0x7f800000u) {
        if (magnitude == 0x7f800000u) a->num_inf++;
        else a->num_nan++;
        if (a->first_bad < 0) a->first_bad = index;
    } else if (magnitude == 0) {
        a->num_zero++;
    } else {
        if (magnitude > mpti_f32_bits(a->max_abs)) a->max_abs = mpti_f32_from_bits(magnitude);
        if (bucket < 0) bucket = 0;
        if (bucket >= MPT_AUTOPSY_BUCKETS) bucket = MPT_AUTOPSY_BUCKETS - 1;
        a->histogram[bucket]++;
    }
}

/* True values are max_abs / scale at most, and S times that has to stay within limit. */
static void mpti_autopsy_scale(mpt_autopsy *a, float scale, float limit) {
    double room = (double)limit * (double)scale;
    int fits = 127, below;

    if (a->num_nan > 0 && a->num_inf == 0) return;
    if (mpti_f32_bits(a->max_abs) != 0) fits = mpti_exponent_of(room / (double)a->max_abs);
    if (a->num_inf > 0) { /* they are too large at `scale`: a power of two below that, at best */
        below = mpti_exponent_of((double)scale);
        if (mpti_f32_bits(scale) << 9 == 0) below--;
        if (fits > below) fits = below;
        a->largest_is_bound = 1;
    }
    a->largest_scale = mpti_power_of_2(fits);
}

MPT_API mpt_result mpt_tensor_autopsy(const mpt_tensor *tensor, float scale, mpt_dtype storage,
                                      mpt_autopsy *out) {
    size_t count, i;

    if (!tensor || !out || !mpti_tensor_elements(tensor, &count) || mpti_dtype_max(storage) <= 0 ||
        mpti_dtype_max(tensor->dtype) <= 0 ||
        !mpti_is_within(scale, MPTI_SCALE_LOWEST, MPTI_FLT_MAX))
        return MPT_ERR_INVALID_ARGUMENT;
    memset(out, 0, sizeof *out);
    out->count = (int64_t)count;
    out->first_bad = -1;
    for (i = 0; i < count; i++)
        mpti_autopsy_count(out, (int64_t)i,
                           mpti_f32_bits(mpti_load(tensor->dtype, tensor->data, i)) & 0x7fffffffu);
    mpti_autopsy_scale(out, scale, mpti_dtype_max(storage));
    return MPT_OK;
}

/* =================================================================================================
 * >>train   12.1 Trainer: the plan, microbatches, the step
 * =================================================================================================
 *
 * Problem: a step sums over lanes and slices, may have to be thrown away, and has to give the same
 *          bits however it was cut into microbatches of ranks and threads.
 * Idea:    each microbatch leaves gradients, statistics and counts in one flat row; rows meet in
 *          a fixed binary tree; then nine lines decide and update.
 * Shapes:  a row: (num_params) gradients | (num_stats) n * mean, n * variance of each batch norm
 * Tested:  tests/test_train.c, test_skip.c; test_reference.c against PyTorch
 * Next:    >>evaluate, what else a trainer can be asked.
 */
enum { MPTI_MAX_LEVELS = 32 }; /* of the tree: 2^32 microbatches a step */

enum { /* the arenas of a trainer, one for each purpose of the plan */
    MPTI_WEIGHTS,
    MPTI_MASTERS,
    MPTI_GRADIENTS,
    MPTI_MOMENTS,
    MPTI_ACTIVATIONS,
    MPTI_WORKSPACE,
    MPTI_STATISTICS,
    MPTI_DECISIONS, /* on a device: mpti_device */
    MPTI_MIRROR,    /* on the host, beside a device: mpti_learned */
    MPTI_NUM_ARENAS
};

typedef struct mpti_learned { /* what outlives a run */
    float *masters;        /* (num_params) FP32: the truth */
    float *first, *second; /* (num_params) moments or NULL */
    float *running;        /* (num_stats) */
} mpti_learned;

enum { MPTI_RECORDINGS = 2 }; /* one for each row that a device has */

/* What a trainer keeps beside a device's data; all zero on the CPU. */
typedef struct mpti_device {
    mpt_step_state *state;
    mpt_softmax_stats *evaluation; /* of passes that belong to no step */
    float *probabilities;          /* (capacity, classes) */
    int32_t *labels;               /* (capacity) of the microbatch under way */
    float *momentum, *ratios;      /* (num_stats); (num_parameters) */
    double *sums;                  /* (num_chunks, 2) */
    mpt_update_chunk *chunks;      /* [num_chunks] */
    mpt_update_segment *segments;  /* [num_parameters] */
    /* on the host: */
    size_t slot_bytes; /* of a staged microbatch */
    bool can_record;   /* nothing but data changes from step to step */
    void *recordings[MPTI_RECORDINGS]; /* of forward and backward into rows[i], or NULL */
    int64_t reported;                  /* steps whose reports have been read */
} mpti_device;

struct mpt_trainer {
    mpt_ctx *ctx;
    mpt_model *model;
    mpt_trainer_desc desc; /* with defaults */
    int batch_size;        /* records of a lane */
    mpt_memory_plan plan;
    mpt_arena *arenas[MPTI_NUM_ARENAS];
    mpti_net net;
    mpti_parameter *parameters; /* [num_parameters]: weights and biases of each layer */
    int64_t num_parameters;
    mpti_optimizer optimizer;
    mpt_loss_scaler scaler;
    float *masters;         /* (num_params) FP32: the truth */
    uint16_t *half;         /* (num_params) or NULL: the 16-bit copy that layers multiply with */
    float *first, *second;  /* (num_params) or NULL: moments */
    float *running; /* (num_stats) */
    float *inv_std; /* (num_stats / 2) */
    mpti_learned host; /* on the CPU masters, moments and running themselves, else a mirror */
    mpti_device device;
    float *rows[MPTI_MAX_LEVELS + 1]; /* [num_rows], each (num_params + num_stats) */
    int num_rows;
    /* of the step under way: rows[0 .. depth-1] hold sums of weight[] microbatches each, and
       rows[depth] is written next */
    int depth;
    int64_t weight[MPTI_MAX_LEVELS + 1];
    int64_t microbatches;
    int64_t num_samples;     /* records of its microbatches */
    mpt_softmax_stats stats; /* of them */
    int64_t step; /* attempted */
    double seconds;
    mpt_step_report last; /* of the last step */
};

/* What >>device does for a trainer whose backend has memory of its own. */
static bool mpti_on_device(const mpt_trainer *t) { return t->ctx->backend->alloc != NULL; }
static void mpti_device_plan(const mpt_trainer *t, int64_t num_chunks,
                             size_t bytes[MPTI_NUM_ARENAS]);
static size_t mpti_device_slot_bytes(const mpt_trainer *t);
static void mpti_device_place(mpt_trainer *t);
static mpt_result mpti_device_open(mpt_trainer *t);
static void mpti_device_close(mpt_trainer *t);
static mpt_result mpti_device_put(mpt_trainer *t);
static mpt_result mpti_device_stage(mpt_trainer *t, size_t picture, const void **images);
static mpt_result mpti_device_forward_backward(mpt_trainer *t);
static void mpti_device_begin_step(mpt_trainer *t);
static mpt_result mpti_device_apply(mpt_trainer *t, mpt_step_report *out);
static mpt_result mpti_device_sync(mpt_trainer *t);
static mpt_result mpti_device_clear_evaluation(mpt_trainer *t);
static mpt_result mpti_device_add_evaluation(mpt_trainer *t, mpt_softmax_stats *stats);

/* ---- descs ----------------------------------------------------------------------------------- */
MPT_API mpt_trainer_desc mpt_trainer_desc_defaults(const mpt_trainer_desc *desc) {
    mpt_trainer_desc d;
    bool mixed;

    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (d.precision == MPT_PRECISION_DEFAULT) /* F16C comes with the AVX2 family */
        d.precision = mpti_has_avx2() ? MPT_PRECISION_FP16 : MPT_PRECISION_FP32;
    mixed = d.precision == MPT_PRECISION_FP16 || d.precision == MPT_PRECISION_FP16_CAST;
    if (d.master_weights == MPT_BY_DEFAULT)
        d.master_weights =
            d.precision == MPT_PRECISION_FP16 || d.precision == MPT_PRECISION_BF16 ? MPT_YES
                                                                                  : MPT_NO;
    if (d.keep_batchnorm_fp32 == MPT_BY_DEFAULT)
        d.keep_batchnorm_fp32 = d.precision == MPT_PRECISION_FP16_PURE ? MPT_NO : MPT_YES;
    mpti_optimizer_desc_defaults(&d.optimizer);
    mpti_schedule_desc_defaults(&d.schedule);
    if (d.loss_scaler.mode == MPT_LOSS_SCALE_DEFAULT)
        d.loss_scaler.mode = mixed ? MPT_LOSS_SCALE_DYNAMIC : MPT_LOSS_SCALE_NONE;
    mpti_loss_scaler_desc_defaults(&d.loss_scaler);
    if (d.accumulate_steps == 0) d.accumulate_steps = 1;
    if (d.slices == 0) d.slices = 1;
    return d;
}

/* What makes no sense together, as in Apex; NULL: nothing. d has its defaults. */
static const char *mpti_precision_conflict(const mpt_trainer_desc *d) {
    bool fp32_weights =
        d->precision == MPT_PRECISION_FP32 || d->precision == MPT_PRECISION_FP16_CAST;

    if ((int)d->precision < 0 || d->precision > MPT_PRECISION_BF16) return "precision is unknown";
    if ((int)d->master_weights < 0 || d->master_weights > MPT_NO ||
        (int)d->keep_batchnorm_fp32 < 0 || d->keep_batchnorm_fp32 > MPT_NO)
        return "master_weights and keep_batchnorm_fp32 are MPT_BY_DEFAULT, MPT_YES or MPT_NO";
    if (fp32_weights && d->master_weights == MPT_YES)
        return "master_weights: weights are FP32 already; masters belong to FP16 and BF16";
    if (fp32_weights && d->keep_batchnorm_fp32 == MPT_NO)
        return "keep_batchnorm_fp32: batch norm is FP32 in FP32 and FP16_CAST";
    if (d->master_weights == MPT_YES && d->keep_batchnorm_fp32 == MPT_NO)
        return "keep_batchnorm_fp32: gamma and beta can be 16 bits only without master_weights";
    return NULL;
}

static mpt_result mpti_trainer_desc_check(const mpt_trainer_desc *d, int batch_size, mpt_ctx *ctx) {
    mpt_error *err = &ctx->error;
    mpt_result rc = mpti_optimizer_desc_check(&d->optimizer, err);
    const char *wrong = mpti_precision_conflict(d);

    if (rc == MPT_OK) rc = mpti_schedule_desc_check(&d->schedule, d->total_steps, err);
    if (rc == MPT_OK) rc = mpti_loss_scaler_desc_check(&d->loss_scaler, err);
    if (rc) return rc;
    if (!wrong && !(d->label_smoothing >= 0 && d->label_smoothing < 1))
        wrong = "label_smoothing must be at least 0 and below 1";
    if (!wrong && (d->accumulate_steps < 1 || d->accumulate_steps > 65536))
        wrong = "accumulate_steps must be in 1 .. 65536";
    if (wrong) return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT, "mpt_trainer_desc.%s", wrong);
    if (batch_size < 1 || batch_size > 1 << 20)
        return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT, "batch_size must be in 1 .. 2^20");
    if (d->slices < 1 || batch_size % d->slices != 0)
        return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT,
                         "mpt_trainer_desc.slices must divide the batch size %d", batch_size);
    return MPT_OK;
}

/* ---- the plan -------------------------------------------------------------------------------- */
/* floor(log2 A) + 1; on a device, whose memory is dearer, one running sum and one to write. */
static int mpti_trainer_num_rows(const mpt_trainer_desc *d, bool on_device) {
    int64_t microbatches = (int64_t)d->accumulate_steps * d->slices;
    int rows = 1;

    for (; microbatches > 1; microbatches /= 2) rows++;
    return on_device && rows > 2 ? 2 : rows;
}

/* Each layer's weights, then its bias; gamma, then beta. out NULL: only counts. */
static int64_t mpti_list_parameters(const mpt_model *m, const mpt_optimizer_desc *desc,
                                    mpti_parameter *out, int64_t *num_chunks) {
    int64_t n = 0;
    int v, part;

    *num_chunks = 0;
    for (v = 1; v < m->num_nodes; v++) {
        const mpti_node *node = &m->nodes[v];
        bool norm = node->kind == MPTI_KIND_BATCHNORM;
        int64_t counts[2], offset = node->param_offset;
        counts[0] = norm ? node->c : mpti_node_weights(node);
        counts[1] = node->num_params - counts[0];
        for (part = 0; part < 2; offset += counts[part++]) {
            if (counts[part] == 0) continue;
            *num_chunks += mpti_parameter_chunks((size_t)counts[part]);
            if (out)
                out[n] = mpti_parameter_make(desc, (size_t)offset, (size_t)counts[part],
                                             norm || part == 1);
            n++;
        }
    }
    return n;
}

/* The sizes of the arenas, as the plan has them. */
static void mpti_plan_arenas(const mpt_memory_plan *p, size_t bytes[MPTI_NUM_ARENAS]) {
    bytes[MPTI_WEIGHTS] = p->weights;
    bytes[MPTI_MASTERS] = p->master_weights;
    bytes[MPTI_GRADIENTS] = p->gradients;
    bytes[MPTI_MOMENTS] = p->optimizer_state;
    bytes[MPTI_ACTIVATIONS] = p->activations;
    bytes[MPTI_WORKSPACE] = p->workspace;
    bytes[MPTI_STATISTICS] = p->statistics;
    bytes[MPTI_DECISIONS] = bytes[MPTI_MIRROR] = 0;
}

static void mpti_plan_sum(mpt_memory_plan *p, const mpt_trainer *t, int64_t num_chunks) {
    size_t bytes[MPTI_NUM_ARENAS];
    int i;

    p->bookkeeping = sizeof *t + sizeof(mpti_place) * (size_t)t->model->num_nodes +
                     sizeof(mpti_parameter) * (size_t)t->num_parameters +
                     mpti_optimizer_bytes(num_chunks, t->num_parameters);
    mpti_plan_arenas(p, bytes);
    mpti_device_plan(t, num_chunks, bytes);
    p->staging = 4 * t->device.slot_bytes + bytes[MPTI_DECISIONS] + bytes[MPTI_MIRROR];
    p->total = 4 * t->device.slot_bytes;
    for (i = 0; i < MPTI_NUM_ARENAS; i++) {
        p->total += bytes[i];
        if (bytes[i]) p->bookkeeping += sizeof(mpt_arena);
    }
    p->total += p->bookkeeping;
}

/* Custom layers work where their functions were written for. Other layers that change with the
   step's number keep it from being recorded. */
static mpt_result mpti_trainer_check_layers(mpt_trainer *t) {
    const mpt_model *m = t->model;
    bool on_device = mpti_on_device(t);
    int v;

    t->device.can_record = on_device;
    for (v = 1; v < m->num_nodes; v++) {
        const mpti_node *node = &m->nodes[v];
        if (node->kind == MPTI_KIND_DROPOUT || node->kind == MPTI_KIND_CUSTOM)
            t->device.can_record = false;
        if (node->kind != MPTI_KIND_CUSTOM || (node->custom.on_device != 0) == on_device) continue;
        return MPTI_FAIL(&t->ctx->error, MPT_ERR_UNSUPPORTED,
                         "layer %s: its functions take %s memory (mpt_custom_desc.on_device is "
                         "%d), and the backend is %s",
                         node->name, on_device ? "host" : "device", node->custom.on_device,
                         t->ctx->backend->name);
    }
    return MPT_OK;
}

/* Sets t's net, layout and plan, from its model, desc and batch size. Allocates nothing: the layout
   is made in the model's places. */
static mpt_result mpti_trainer_make_plan(mpt_trainer *t) {
    const mpt_model *m = t->model;
    mpt_precision precision = t->desc.precision;
    size_t floats = mpti_align((size_t)m->num_params * sizeof(float));
    size_t halves = mpti_align((size_t)m->num_params * sizeof(uint16_t));
    bool cast = precision == MPT_PRECISION_FP16_CAST, full = precision == MPT_PRECISION_FP32;
    mpt_memory_plan *p = &t->plan;
    int64_t num_chunks;
    mpt_result rc;

    t->net.model = m;
    t->net.backend = t->ctx->backend;
    t->net.self = t->ctx->backend_self;
    t->net.operand = full ? MPT_F32 : precision == MPT_PRECISION_BF16 ? MPT_BF16 : MPT_F16;
    t->net.dtype = full || cast ? MPT_F32 : t->net.operand;
    t->net.capacity = t->batch_size / t->desc.slices;
    t->net.layout.places = m->places;
    rc = mpti_net_lay_out(&t->net);
    if (rc)
        return MPTI_FAIL(&t->ctx->error, rc, "infer of layer %s refused %d records: %s",
                         m->nodes[t->net.failed].name, t->net.capacity, mpt_result_string(rc));
    t->num_rows = mpti_trainer_num_rows(&t->desc, mpti_on_device(t));
    t->device.slot_bytes = mpti_device_slot_bytes(t);
    t->num_parameters = mpti_list_parameters(m, &t->desc.optimizer, NULL, &num_chunks);
    memset(p, 0, sizeof *p);
    p->weights = full || cast ? floats : halves;
    if (t->desc.master_weights == MPT_YES) p->master_weights = floats;
    else if (!full && !cast) p->weights += floats; /* widened, for what reads FP32 */
    p->gradients = (size_t)t->num_rows *
                   mpti_align((size_t)(m->num_params + m->num_stats) * sizeof(float));
    p->optimizer_state =
        (size_t)mpti_optimizer_state_count(t->desc.optimizer.kind) * floats;
    p->activations = t->net.layout.activation_bytes;
    p->workspace = t->net.layout.operator_bytes + t->net.layout.cast_bytes + (cast ? halves : 0);
    p->statistics = mpti_align((size_t)m->num_stats * sizeof(float)) +
                    mpti_align((size_t)m->num_stats / 2 * sizeof(float));
    mpti_plan_sum(p, t, num_chunks);
    return MPT_OK;
}

/* t: on the stack or fresh, all zero. */
static mpt_result mpti_trainer_prepare(mpt_trainer *t, mpt_model *m, const mpt_trainer_desc *desc,
                                       int batch_size) {
    mpt_trainer_desc d;
    mpt_result rc;

    t->ctx = m->ctx;
    t->model = m;
    memset(&d, 0, sizeof d);
    if (desc) d = *desc;
    if (mpti_on_device(t) && d.precision == MPT_PRECISION_DEFAULT)
        d.precision = MPT_PRECISION_FP16; /* whatever the host's processor can */
    t->desc = mpt_trainer_desc_defaults(&d);
    t->batch_size = batch_size;
    if (m->logits < 0)
        return MPTI_FAIL(&m->ctx->error, MPT_ERR_INVALID_STATE,
                         "the model isn't finished: call mpt_model_finish first");
    rc = mpti_trainer_desc_check(&t->desc, batch_size, m->ctx);
    if (rc == MPT_OK) rc = mpti_trainer_check_layers(t);
    return rc ? rc : mpti_trainer_make_plan(t);
}

MPT_API mpt_result mpt_model_plan(mpt_model *m, const mpt_trainer_desc *desc, int batch_size,
                                  mpt_memory_plan *plan) {
    mpt_trainer t;
    mpt_result rc;

    if (!m || !plan) return MPT_ERR_INVALID_ARGUMENT;
    memset(&t, 0, sizeof t);
    rc = mpti_trainer_prepare(&t, m, desc, batch_size);
    if (rc == MPT_OK) *plan = t.plan;
    return mpti_report(m->ctx, rc);
}

/* ---- making a trainer ------------------------------------------------------------------------ */
static mpt_result mpti_trainer_open_arenas(mpt_trainer *t, int64_t num_chunks) {
    static const char *const purposes[MPTI_NUM_ARENAS] = {
        "weights",     "master weights", "gradients",          "optimizer state",
        "activations", "workspace",      "batch norm's statistics",
        "staging",     "a mirror of weights on the host"};
    size_t bytes[MPTI_NUM_ARENAS];
    bool on_device = mpti_on_device(t);
    mpt_arena_desc d;
    mpt_result rc = MPT_OK;
    int i;

    mpti_plan_arenas(&t->plan, bytes);
    mpti_device_plan(t, num_chunks, bytes);
    memset(&d, 0, sizeof d);
    for (i = 0; i < MPTI_NUM_ARENAS && rc == MPT_OK; i++) {
        if (bytes[i] == 0) continue;
        d.capacity_bytes = bytes[i];
        d.purpose = purposes[i];
        rc = mpti_arena_open(t->ctx, &d, on_device && i != MPTI_MIRROR, &t->arenas[i]);
    }
    if (rc != MPT_ERR_OUT_OF_MEMORY && rc != MPT_ERR_OUT_OF_DEVICE_MEMORY) return rc;
    return MPTI_FAIL(&t->ctx->error, rc,
                     "no %smemory for %s (%.1f MB of %.1f MB that training takes): lower the "
                     "batch size, or raise slices",
                     rc == MPT_ERR_OUT_OF_MEMORY ? "" : "device ", purposes[i - 1],
                     (double)bytes[i - 1] / 1e6, (double)t->plan.total / 1e6);
}

static float *mpti_trainer_floats(mpt_trainer *t, int arena, int64_t count) { /* NULL for none */
    return count ? (float *)mpti_arena_take(t->arenas[arena], (size_t)count * sizeof(float)) : NULL;
}

/* The 16-bit copy follows the masters. */
static mpt_result mpti_trainer_narrow(mpt_trainer *t) {
    mpt_cast_args a;

    if (!t->half) return MPT_OK;
    a.src = t->masters;
    a.dst = t->half;
    a.count = t->model->num_params;
    a.src_dtype = MPT_F32;
    a.dst_dtype = t->net.operand;
    return t->net.backend->cast(t->net.self, &a);
}

/* Without masters the 16-bit weights are the truth, and `masters` only widens them. Gamma and beta
   are among them unless they are kept in FP32. */
static mpt_result mpti_trainer_widen(mpt_trainer *t) {
    const mpt_model *m = t->model;
    mpt_cast_args a;
    mpt_result rc = MPT_OK;
    int v;

    if (t->net.dtype == MPT_F32 || t->desc.master_weights == MPT_YES) return MPT_OK;
    a.src_dtype = t->net.operand;
    a.dst_dtype = MPT_F32;
    for (v = 1; v < m->num_nodes && rc == MPT_OK; v++) {
        const mpti_node *node = &m->nodes[v];
        bool kept = node->kind == MPTI_KIND_BATCHNORM && t->desc.keep_batchnorm_fp32 == MPT_YES;
        if (node->num_params == 0 || kept) continue;
        a.src = t->half + node->param_offset;
        a.dst = t->masters + node->param_offset;
        a.count = node->num_params;
        rc = t->net.backend->cast(t->net.self, &a);
    }
    return rc;
}

/* After t->host, the scaler or the optimizer's counters were set from outside. */
static mpt_result mpti_trainer_weights_changed(mpt_trainer *t) {
    mpt_result rc = mpti_on_device(t) ? mpti_device_put(t) : MPT_OK;

    if (rc == MPT_OK) rc = mpti_trainer_narrow(t);
    return rc ? rc : mpti_trainer_widen(t);
}

/* ---- making a trainer: placing, and putting it together -------------------------------------- */
/* Hands out the arenas, which are exactly as large as that. */
static void mpti_trainer_place(mpt_trainer *t) {
    int64_t params = t->model->num_params, stats = t->model->num_stats;
    bool masters = t->desc.master_weights == MPT_YES;
    int states = mpti_optimizer_state_count(t->desc.optimizer.kind), i;

    t->masters = mpti_trainer_floats(t, masters ? MPTI_MASTERS : MPTI_WEIGHTS, params);
    t->net.activations =
        (uint8_t *)mpti_arena_take(t->arenas[MPTI_ACTIVATIONS], t->plan.activations);
    t->net.workspace = (uint8_t *)mpti_arena_take(
        t->arenas[MPTI_WORKSPACE], t->net.layout.operator_bytes + t->net.layout.cast_bytes);
    if (t->net.operand != MPT_F32) /* of FP16_CAST it is a cast that is kept between steps */
        t->half = (uint16_t *)mpti_arena_take(
            t->arenas[t->net.dtype == MPT_F32 ? MPTI_WORKSPACE : MPTI_WEIGHTS],
            (size_t)params * sizeof *t->half);
    if (states > 0) t->first = mpti_trainer_floats(t, MPTI_MOMENTS, params);
    if (states > 1) t->second = mpti_trainer_floats(t, MPTI_MOMENTS, params);
    t->running = mpti_trainer_floats(t, MPTI_STATISTICS, stats);
    t->inv_std = mpti_trainer_floats(t, MPTI_STATISTICS, stats / 2);
    for (i = 0; i < t->num_rows; i++)
        t->rows[i] = mpti_trainer_floats(t, MPTI_GRADIENTS, params + stats);
    t->host.masters = t->masters;
    t->host.first = t->first;
    t->host.second = t->second;
    t->host.running = t->running;
    if (mpti_on_device(t)) mpti_device_place(t);
    t->net.masters = t->masters;
    t->net.weights = t->half ? (const void *)t->half : (const void *)t->masters;
    t->net.running = t->running;
    t->net.inv_std = t->inv_std;
    t->net.gradients = t->rows[0];
    t->net.seed = t->desc.seed;
    t->net.label_smoothing = t->desc.label_smoothing;
}

/* The lists that steps go by. */
static mpt_result mpti_trainer_make_lists(mpt_trainer *t) {
    const mpt_allocator *a = &t->ctx->desc.allocator;
    const mpti_place *laid_out = t->model->places;
    int64_t num_chunks;

    t->net.layout.places =
        (mpti_place *)mpti_calloc(a, (size_t)t->model->num_nodes, sizeof(mpti_place));
    t->parameters =
        (mpti_parameter *)mpti_calloc(a, (size_t)t->num_parameters, sizeof *t->parameters);
    if (!t->net.layout.places || !t->parameters)
        return MPTI_FAIL(&t->ctx->error, MPT_ERR_OUT_OF_MEMORY, "no memory for a trainer");
    memcpy(t->net.layout.places, laid_out, sizeof(mpti_place) * (size_t)t->model->num_nodes);
    mpti_list_parameters(t->model, &t->desc.optimizer, t->parameters, &num_chunks);
    return mpti_optimizer_open(&t->optimizer, t->ctx, &t->desc.optimizer, t->parameters,
                               t->num_parameters);
}

MPT_API void mpt_trainer_destroy(mpt_trainer *t) {
    const mpt_allocator *a;
    int i;

    if (!t) return;
    a = &t->ctx->desc.allocator;
    mpti_device_close(t);
    mpti_optimizer_close(&t->optimizer);
    mpti_free(a, t->parameters, sizeof *t->parameters * (size_t)t->num_parameters);
    if (t->net.layout.places != t->model->places)
        mpti_free(a, t->net.layout.places, sizeof(mpti_place) * (size_t)t->model->num_nodes);
    for (i = 0; i < MPTI_NUM_ARENAS; i++) mpt_arena_destroy(t->arenas[i]);
    mpti_free(a, t, sizeof *t);
}

MPT_API mpt_result mpt_trainer_create(mpt_model *m, const mpt_trainer_desc *desc, int batch_size,
                                      mpt_trainer **out) {
    mpt_trainer *t;
    mpt_result rc;

    if (!m || !out) return MPT_ERR_INVALID_ARGUMENT;
    *out = NULL;
    t = (mpt_trainer *)mpti_calloc(&m->ctx->desc.allocator, 1, sizeof *t);
    if (!t)
        return MPTI_REPORT(m->ctx, MPT_ERR_OUT_OF_MEMORY, "no memory for a trainer");
    rc = mpti_trainer_prepare(t, m, desc, batch_size);
    if (rc == MPT_OK) rc = mpti_trainer_make_lists(t);
    if (rc == MPT_OK) rc = mpti_trainer_open_arenas(t, t->optimizer.num_chunks);
    if (rc == MPT_OK) {
        mpti_trainer_place(t);
        mpt_loss_scaler_init(&t->scaler, &t->desc.loss_scaler);
        rc = mpti_model_init(m, t->desc.seed, t->host.masters, t->host.running);
    }
    if (rc == MPT_OK && mpti_on_device(t)) rc = mpti_device_open(t);
    if (rc == MPT_OK) rc = mpti_trainer_weights_changed(t);
    if (rc) {
        mpt_trainer_destroy(t);
        return mpti_report(m->ctx, rc);
    }
    t->seconds = mpti_seconds();
    *out = t;
    return MPT_OK;
}

/* ---- microbatches and their tree ----------------------------------------------------------------

     microbatch   0     1     2     3     4
                   \   /       \   /      |      rows[]: a sum of 4, a sum of 1, one to write
                    0+1         2+3       4
                       \       /
                         0..3

   The shape depends on the count alone, so 4 ranks with 1 microbatch and 1 rank with 4 add in the
   same order. */
/* rows[depth-2] += rows[depth-1] */
static mpt_result mpti_trainer_merge(mpt_trainer *t) {
    mpt_pointwise_args a;

    memset(&a, 0, sizeof a);
    a.a = a.y = t->rows[t->depth - 2];
    a.b = t->rows[t->depth - 1];
    a.n = a.num_valid = 1;
    a.per_sample = t->model->num_params + t->model->num_stats;
    a.dtype = MPT_F32;
    t->weight[t->depth - 2] += t->weight[t->depth - 1];
    t->depth--;
    return t->net.backend->add(t->net.self, &a);
}

static void mpti_trainer_begin_step(mpt_trainer *t) {
    t->depth = 0;
    t->microbatches = 0;
    t->num_samples = 0;
    memset(&t->stats, 0, sizeof t->stats);
}

/* The operator has said what; here is where. A custom layer says nothing. */
static mpt_result mpti_trainer_step_failed(const mpt_trainer *t, mpt_result rc) {
    const mpti_node *node = &t->model->nodes[t->net.failed];
    mpt_error *err = &t->ctx->error;
    const char *said = node->kind == MPTI_KIND_CUSTOM ? mpt_result_string(rc) : err->message;
    const char *domain = err->native_domain;
    char text[sizeof err->message];
    int native = err->native_code;

    snprintf(text, sizeof text, "%s", said);
    rc = MPTI_FAIL(err, rc, "layer %s failed on the %s backend: %s", node->name,
                   t->net.backend->name, text);
    if (node->kind == MPTI_KIND_CUSTOM) return rc;
    err->native_code = native;
    err->native_domain = domain;
    return rc;
}

/* Sets what a training pass of microbatch number `index` of a step needs. The scale divides by a
   count that every microbatch knows, the records that would fit; mpt_trainer_apply corrects it. */
static void mpti_trainer_begin_pass(mpt_trainer *t, int64_t step, int64_t index) {
    t->net.gradients = t->rows[t->depth];
    t->net.training = true;
    t->net.step = step;
    t->net.first_id = (uint64_t)index * (uint64_t)t->net.capacity;
    t->net.grad_scale = 1 / (float)((int64_t)t->batch_size * t->desc.accumulate_steps);
    t->net.loss_scale = &t->scaler.scale;
    t->net.stats = &t->stats;
    if (!mpti_on_device(t)) return;
    t->net.loss_scale = &t->device.state->scaler.scale;
    t->net.stats = &t->device.state->stats;
}

static mpt_result mpti_trainer_forward_backward(mpt_trainer *t) {
    mpt_result rc = mpti_net_forward(&t->net);

    if (rc == MPT_OK) rc = mpti_net_loss(&t->net);
    return rc ? rc : mpti_net_backward(&t->net);
}

static mpt_result mpti_trainer_microbatch(mpt_trainer *t, const void *images, mpt_dtype dtype) {
    mpt_scale_args weigh;
    mpt_result rc;

    mpti_trainer_begin_pass(t, t->step, t->microbatches);
    rc = mpti_net_input(&t->net, images, dtype);
    if (rc == MPT_OK && t->device.can_record) rc = mpti_device_forward_backward(t);
    else if (rc == MPT_OK) rc = mpti_trainer_forward_backward(t);
    /* weighted by records, so that sums of rows are means over all of them; of none they are NaN */
    weigh.x = t->rows[t->depth] + t->model->num_params;
    weigh.count = t->model->num_stats;
    weigh.factor = (float)t->net.num_valid;
    if (rc == MPT_OK) rc = t->net.backend->scale(t->net.self, &weigh);
    if (rc) return mpti_trainer_step_failed(t, rc);
    t->num_samples += t->net.num_valid;
    t->weight[t->depth++] = 1;
    t->microbatches++;
    while (rc == MPT_OK && t->depth > 1 &&
           (t->weight[t->depth - 1] == t->weight[t->depth - 2] || mpti_on_device(t)))
        rc = mpti_trainer_merge(t);
    return rc;
}

/* ---- batches --------------------------------------------------------------------------------- */
static int64_t mpti_lane_count(const mpt_batch *b) {
    return b->num_lanes > 0 ? b->num_lanes : 1;
}

static int64_t mpti_lane_valid(const mpt_batch *b, int64_t lane, int64_t capacity) {
    return b->lane_valid ? b->lane_valid[lane] : capacity;
}

/* Does the batch fit the model? *capacity: slots of a lane. */
static mpt_result mpti_trainer_check_batch(const mpt_trainer *t, const mpt_batch *b,
                                           int64_t *capacity) {
    const mpti_node *input = &t->model->nodes[MPT_INPUT];
    const mpt_tensor *x = &b->images;
    mpt_error *err = &t->ctx->error;
    int64_t lanes = mpti_lane_count(b), lane;

    if (!x->data || x->num_dims != 4 || x->dims[0] < 1 || x->dims[0] % lanes != 0 ||
        (x->dtype != MPT_U8 && x->dtype != MPT_F32 && x->dtype != MPT_F16))
        return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT,
                         "mpt_batch: images must be (N,H,W,C) of U8, F32 or F16, N a multiple of "
                         "num_lanes");
    if (x->dims[1] != input->h || x->dims[2] != input->w || x->dims[3] != input->c)
        return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT,
                         "the batch has pictures of (%lld,%lld,%lld), the model takes (%d,%d,%d)",
                         (long long)x->dims[1], (long long)x->dims[2], (long long)x->dims[3],
                         input->h, input->w, input->c);
    *capacity = x->dims[0] / lanes;
    if (!b->lane_valid && b->num_valid != 0 && b->num_valid != x->dims[0])
        return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT,
                         "mpt_batch.num_valid is %lld, but without lane_valid all %lld records "
                         "count: set lane_valid",
                         (long long)b->num_valid, (long long)x->dims[0]);
    for (lane = 0; b->lane_valid && lane < lanes; lane++)
        if (b->lane_valid[lane] < 0 || b->lane_valid[lane] > *capacity)
            return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT,
                             "mpt_batch.lane_valid[%lld] must be in 0 .. %lld", (long long)lane,
                             (long long)*capacity);
    return MPT_OK;
}

/* A label that the loss can't take. Found before anything is computed, on every backend. */
static mpt_result mpti_trainer_check_labels(const mpt_trainer *t, const mpt_batch *b,
                                            int64_t capacity) {
    const int32_t *labels = (const int32_t *)b->labels.data;
    int classes = t->model->nodes[t->model->logits].c;
    int64_t lane, i;

    if (!labels || b->labels.num_dims != 1 || b->labels.dims[0] != b->images.dims[0] ||
        b->labels.dtype != MPT_I32)
        return MPTI_FAIL(&t->ctx->error, MPT_ERR_INVALID_ARGUMENT,
                         "mpt_batch: labels must be (N) of I32, with images' N");
    for (lane = 0; lane < mpti_lane_count(b); lane++)
        for (i = 0; i < mpti_lane_valid(b, lane, capacity); i++)
            if (labels[lane * capacity + i] < 0 || labels[lane * capacity + i] >= classes)
                return MPTI_FAIL(&t->ctx->error, MPT_ERR_INVALID_ARGUMENT,
                                 "label %d of record %lld in lane %lld is outside 0 .. %d",
                                 (int)labels[lane * capacity + i], (long long)i, (long long)lane,
                                 classes - 1);
    return MPT_OK;
}

/* Is this a batch to train on now? */
static mpt_result mpti_trainer_check_training(const mpt_trainer *t, const mpt_batch *b,
                                              int64_t *capacity) {
    mpt_result rc = mpti_trainer_check_batch(t, b, capacity);
    int64_t room = (int64_t)t->desc.accumulate_steps * t->desc.slices - t->microbatches;

    if (rc) return rc;
    if (*capacity != t->batch_size)
        return MPTI_FAIL(&t->ctx->error, MPT_ERR_INVALID_ARGUMENT,
                         "the batch has %lld records a lane, the trainer was made for %d: fill "
                         "it up and set lane_valid",
                         (long long)*capacity, t->batch_size);
    if (mpti_lane_count(b) * t->desc.slices > room)
        return MPTI_FAIL(&t->ctx->error, MPT_ERR_INVALID_STATE,
                         "more than accumulate_steps = %d lanes before mpt_trainer_apply",
                         t->desc.accumulate_steps);
    return mpti_trainer_check_labels(t, b, *capacity);
}

/* Points the net at n records from slot on, and *images at their pictures. */
static mpt_result mpti_trainer_point(mpt_trainer *t, const mpt_batch *b, int64_t slot, int64_t n,
                                     const void **images) {
    size_t picture = (size_t)mpti_node_elements(&t->model->nodes[MPT_INPUT]) *
                     mpt_dtype_size(b->images.dtype);

    t->net.num_valid = (int)n;
    t->net.labels = b->labels.data ? (const int32_t *)b->labels.data + slot : NULL;
    t->net.sample_ids = b->sample_ids ? b->sample_ids + slot : NULL;
    *images = (const uint8_t *)b->images.data + picture * (size_t)slot;
    return mpti_on_device(t) ? mpti_device_stage(t, picture, images) : MPT_OK;
}

/* The same for microbatch number i of a batch: a slice of a lane. */
static mpt_result mpti_trainer_slice(mpt_trainer *t, const mpt_batch *b, int64_t i,
                                     const void **images) {
    int64_t lane = i / t->desc.slices, first = i % t->desc.slices * t->net.capacity;
    int64_t n = mpti_lane_valid(b, lane, t->batch_size) - first;

    n = n < 0 ? 0 : n < t->net.capacity ? n : t->net.capacity;
    return mpti_trainer_point(t, b, lane * t->batch_size + first, n, images);
}

MPT_API mpt_result mpt_trainer_accumulate(mpt_trainer *t, const mpt_batch *batch) {
    const void *images;
    int64_t capacity, i;
    mpt_result rc;

    if (!t || !batch) return MPT_ERR_INVALID_ARGUMENT;
    rc = mpti_trainer_check_training(t, batch, &capacity);
    for (i = 0; i < mpti_lane_count(batch) * t->desc.slices && rc == MPT_OK; i++) {
        rc = mpti_trainer_slice(t, batch, i, &images);
        if (rc == MPT_OK) rc = mpti_trainer_microbatch(t, images, batch->images.dtype);
    }
    if (rc && i > 0) { /* half a batch is worth nothing */
        mpti_trainer_begin_step(t);
        if (mpti_on_device(t)) mpti_device_begin_step(t);
    }
    return mpti_report(t->ctx, rc);
}

/* ---- the step -------------------------------------------------------------------------------- */
typedef struct mpti_update { /* what the lines of mpt_trainer_apply tell each other */
    float scale;   /* of the backward pass whose gradients these are */
    float unscale; /* turns a stored gradient into the mean over the records that were there */
    float norm;    /* of the unscaled gradient; 0 if it is not finite */
    float clip, rate;
    bool nonfinite;
    int skip;
    mpti_params params;
} mpti_update;

static mpt_result mpti_trainer_no_record(const mpt_trainer *t) {
    return MPTI_FAIL(&t->ctx->error, MPT_ERR_INVALID_STATE,
                     "mpt_trainer_apply: no record was accumulated");
}

static mpt_result mpti_trainer_begin_update(mpt_trainer *t, mpti_update *u) {
    double fitting = (double)t->batch_size * t->desc.accumulate_steps;

    if (t->num_samples == 0) return mpti_trainer_no_record(t);
    memset(u, 0, sizeof *u);
    u->scale = t->scaler.scale;
    u->unscale = (float)(fitting / ((double)u->scale * (double)t->num_samples));
    u->params.weights = t->masters;
    u->params.gradients = t->rows[0];
    u->params.first = t->first;
    u->params.second = t->second;
    u->params.half = t->half;
    u->params.half_dtype = t->net.operand;
    t->step++;
    return MPT_OK;
}

static mpt_result mpti_trainer_reduce(mpt_trainer *t) {
    mpt_result rc = MPT_OK;

    while (rc == MPT_OK && t->depth > 1) rc = mpti_trainer_merge(t);
    return rc;
}

/* The momentum update of running statistics, from the row with sums of n * mean and n * var. */
static void mpti_trainer_update_statistics(mpt_trainer *t, const mpti_update *u) {
    const mpt_model *m = t->model;
    float total = (float)t->num_samples;
    int v, i;

    for (v = 1; v < m->num_nodes && !u->skip; v++) {
        const mpti_node *node = &m->nodes[v];
        float *running;
        const float *sum;
        if (node->kind != MPTI_KIND_BATCHNORM) continue;
        running = t->running + node->stat_offset;
        sum = t->rows[0] + m->num_params + node->stat_offset;
        for (i = 0; i < 2 * node->c; i++)
            running[i] += node->momentum * (sum[i] / total - running[i]);
    }
}

static int64_t mpti_trainer_first_nonfinite(const mpt_trainer *t) { /* in the summed row */
    int64_t i = 0, end = t->model->num_params + t->model->num_stats;

    while (i < end && mpti_is_finite(t->rows[0][i])) i++;
    return i;
}

/* Names element i of the summed row, the first inf or NaN, in the message that ends a run. */
static mpt_result mpti_trainer_stuck(const mpt_trainer *t, int64_t i) {
    const mpt_model *m = t->model;
    const char *name = "?";
    int64_t element = 0;
    bool gradient = i < m->num_params;
    int v;

    for (v = 1; v < m->num_nodes; v++) {
        const mpti_node *node = &m->nodes[v];
        int64_t first = gradient ? node->param_offset : m->num_params + node->stat_offset;
        int64_t count = gradient ? node->num_params : node->stat_offset < 0 ? 0 : 2 * node->c;
        if (i < first || i >= first + count) continue;
        name = node->name;
        element = i - first;
    }
    return MPTI_FAIL(&t->ctx->error, MPT_ERR_INVALID_STATE,
                     "%d steps in a row were skipped at the smallest loss scale %g; first bad "
                     "tensor: %s of %s, element %lld: lower the learning rate or the loss scale's "
                     "limit, or look at the data",
                     t->scaler.skips_at_min, (double)t->scaler.scale,
                     gradient ? "gradient" : "statistics", name, (long long)element);
}

/* Statistics count too: a batch whose variance is inf has finite gradients, and would leave an inf
   in the running variance for ever. */
static mpt_result mpti_trainer_check_gradients(mpt_trainer *t, mpti_update *u) {
    const float *statistics = t->rows[0] + t->model->num_params;
    int64_t i;
    mpt_result rc =
        mpti_gradients_check(&t->optimizer, &u->params, u->unscale, &u->nonfinite, &u->norm);

    for (i = 0; i < t->model->num_stats && rc == MPT_OK; i++)
        if (!mpti_is_finite(statistics[i])) u->nonfinite = true;
    if (u->nonfinite) u->norm = 0;
    return rc;
}

static void mpti_trainer_rate(const mpt_trainer *t, mpti_update *u) {
    u->clip = mpti_clip_factor(u->norm, t->desc.optimizer.max_grad_norm);
    u->rate = mpt_schedule_rate(&t->desc.schedule, t->desc.optimizer.learning_rate,
                                t->optimizer.applied_steps, t->desc.total_steps);
}

static mpt_result mpti_trainer_update_weights(mpt_trainer *t, const mpti_update *u) {
    mpt_result rc;

    if (u->skip) return MPT_OK;
    rc = mpti_optimizer_update(&t->optimizer, &u->params, u->unscale, u->clip, u->rate);
    return rc ? rc : mpti_trainer_widen(t);
}

static void mpti_trainer_report(mpt_trainer *t, const mpti_update *u, mpt_step_report *r) {
    double now = mpti_seconds();

    r->loss = t->stats.loss / (double)t->num_samples;
    r->seconds = now - t->seconds;
    r->step = t->step;
    r->applied_steps = t->optimizer.applied_steps;
    r->num_samples = t->num_samples;
    r->num_correct = t->stats.num_correct;
    r->num_correct_top5 = t->stats.num_correct_top5;
    r->loss_scale = u->scale;
    r->learning_rate = u->skip ? 0 : u->rate;
    r->grad_norm = u->norm;
    r->skipped = u->skip;
    t->last = *r;
    t->seconds = now;
}


/* One optimizer step in nine lines. The order is the point of them: gradients of all lanes first
   meet, then one look at the sum decides for all ranks alike; they are unscaled before clipping,
   weight decay and momentum see them, with the scale of their own backward pass; and a skipped step
   leaves weights, moments and statistics as they were, to the bit. On a device >>update of
   kernels.cu has the same lines. */
MPT_API mpt_result mpt_trainer_apply(mpt_trainer *t, mpt_step_report *out) {
    mpti_update u;
    mpt_result rc;

    if (!t || !out) return MPT_ERR_INVALID_ARGUMENT;
    if (mpti_on_device(t)) return mpti_report(t->ctx, mpti_device_apply(t, out));
    rc = mpti_trainer_begin_update(t, &u);                 /* >>train:  whose scale, how many */
    if (!rc) rc = mpti_trainer_reduce(t);                  /* >>train:  rows meet in one sum */
    if (!rc) rc = mpti_trainer_check_gradients(t, &u);     /* >>optim:  inf or NaN? the norm */
    if (!rc) u.skip = mpt_loss_scaler_update(&t->scaler, u.nonfinite); /* >>scaler: decide */
    if (!rc) mpti_trainer_rate(t, &u);                     /* >>optim:  clipping, schedule */
    if (!rc) rc = mpti_trainer_update_weights(t, &u);      /* >>optim:  unscale ... update */
    if (!rc) mpti_trainer_update_statistics(t, &u);        /* >>layers: batch norm's memory */
    if (!rc) mpti_trainer_report(t, &u, out);              /* >>train:  what happened */
    if (!rc && mpt_loss_scaler_is_stuck(&t->scaler))       /* >>scaler: no hope? */
        rc = mpti_trainer_stuck(t, mpti_trainer_first_nonfinite(t));
    mpti_trainer_begin_step(t);
    return mpti_report(t->ctx, rc);
}

MPT_API mpt_result mpt_trainer_step(mpt_trainer *t, const mpt_batch *batch, mpt_step_report *out) {
    mpt_result rc;

    if (!t || !batch || !out) return MPT_ERR_INVALID_ARGUMENT;
    if (t->microbatches > 0)
        return MPTI_REPORT(t->ctx, MPT_ERR_INVALID_STATE,
                           "mpt_trainer_step: lanes have been accumulated; mpt_trainer_apply ends "
                           "their step");
    rc = mpt_trainer_accumulate(t, batch);
    return rc ? rc : mpt_trainer_apply(t, out);
}

MPT_API mpt_result mpt_trainer_sync(mpt_trainer *t, mpt_step_report *out) {
    if (!t || !out) return MPT_ERR_INVALID_ARGUMENT;
    if (mpti_on_device(t)) {
        mpt_result rc = mpti_device_sync(t);
        if (rc) return mpti_report(t->ctx, rc);
    }
    if (t->last.step == 0)
        return MPTI_REPORT(t->ctx, MPT_ERR_INVALID_STATE,
                           "mpt_trainer_sync: no step has been taken yet");
    *out = t->last;
    return MPT_OK;
}

MPT_API mpt_trainer_info mpt_trainer_get_info(const mpt_trainer *t) {
    mpt_trainer_info info;

    memset(&info, 0, sizeof info);
    if (!t) return info;
    info.steps = t->step;
    info.applied_steps = t->optimizer.applied_steps;
    info.loss_scale = t->scaler.scale;
    info.backend = t->net.backend->name;
    info.kernels = t->net.backend->kernels(t->net.self);
    return info;
}

/* =================================================================================================
 * >>evaluate   12.2 Beside training: evaluation, prediction, the autopsy of a skipped step
 * =================================================================================================
 *
 * Problem: a trainer has a whole network at work; one also wants to ask it what it knows, and why
 *          a step went wrong.
 * Idea:    the same forward pass in inference mode; and the same step once more, with a look at
 *          each tensor as it comes.
 * Shapes:  probabilities (records, classes) FP32
 * Tested:  tests/test_evaluate.c, test_skip.c
 * Next:    >>device, the same where the host must not wait.
 */

/* ---- evaluation ------------------------------------------------------------------------------ */

/* Forward in inference mode over n records of one lane, piece by piece. */
static mpt_result mpti_trainer_infer(mpt_trainer *t, const mpt_batch *b, int64_t first, int64_t n,
                                     float *probabilities, mpt_softmax_stats *stats) {
    int classes = t->model->nodes[t->model->logits].c;
    bool on_device = mpti_on_device(t);
    int64_t at, piece;
    mpt_result rc = on_device ? mpti_device_clear_evaluation(t) : MPT_OK;

    t->net.training = false;
    t->net.stats = on_device ? t->device.evaluation : stats;
    for (at = 0; at < n && rc == MPT_OK; at += piece) {
        float *out = probabilities ? probabilities + at * classes : NULL;
        const void *images;
        piece = n - at < t->net.capacity ? n - at : t->net.capacity;
        t->net.probabilities = out && on_device ? t->device.probabilities : out;
        rc = mpti_trainer_point(t, b, first + at, piece, &images);
        if (rc == MPT_OK) rc = mpti_net_input(&t->net, images, b->images.dtype);
        if (rc == MPT_OK) rc = mpti_net_forward(&t->net);
        if (rc == MPT_OK) rc = mpti_net_loss(&t->net);
        if (rc == MPT_OK && out && on_device)
            rc = t->net.backend->download(t->net.self, out, t->device.probabilities,
                                          sizeof *out * (size_t)(piece * classes));
    }
    if (rc == MPT_OK && on_device) rc = mpti_device_add_evaluation(t, stats);
    t->net.probabilities = NULL;
    return rc ? mpti_trainer_step_failed(t, rc) : MPT_OK;
}

static mpt_result mpti_trainer_evaluate_batch(mpt_trainer *t, const mpt_batch *b, mpt_metrics *m,
                                              mpt_softmax_stats *stats) {
    int64_t lane, capacity, valid;
    mpt_result rc = mpti_trainer_check_batch(t, b, &capacity);

    if (rc == MPT_OK) rc = mpti_trainer_check_labels(t, b, capacity);
    for (lane = 0; lane < mpti_lane_count(b) && rc == MPT_OK; lane++) {
        valid = mpti_lane_valid(b, lane, capacity);
        rc = mpti_trainer_infer(t, b, lane * capacity, valid, NULL, stats);
        m->num_samples += valid;
    }
    return rc;
}

MPT_API mpt_result mpt_evaluate(mpt_trainer *t, mpt_loader *data, mpt_metrics *out) {
    mpt_softmax_stats stats;
    mpt_metrics m;
    mpt_batch b;
    mpt_result rc = MPT_OK;

    if (!t || !data || !out) return MPT_ERR_INVALID_ARGUMENT;
    memset(&stats, 0, sizeof stats);
    memset(&m, 0, sizeof m);
    while (rc == MPT_OK && (rc = mpt_loader_next(data, &b)) == MPT_OK)
        rc = mpti_trainer_evaluate_batch(t, &b, &m, &stats);
    if (rc != MPT_END) return mpti_report(t->ctx, rc);
    m.num_correct = stats.num_correct;
    m.num_correct_top5 = stats.num_correct_top5;
    m.loss = m.num_samples ? stats.loss / (double)m.num_samples : 0;
    *out = m;
    return MPT_OK;
}

MPT_API mpt_result mpt_predict(mpt_trainer *t, const mpt_batch *batch, float *probabilities) {
    mpt_softmax_stats ignored;
    mpt_batch pictures;
    int64_t capacity;
    mpt_result rc;

    if (!t || !batch || !probabilities) return MPT_ERR_INVALID_ARGUMENT;
    memset(&ignored, 0, sizeof ignored);
    pictures = *batch;
    pictures.labels.data = NULL;
    rc = mpti_trainer_check_batch(t, &pictures, &capacity);
    if (rc == MPT_OK)
        rc = mpti_trainer_infer(t, &pictures, 0, mpti_lane_valid(batch, 0, capacity),
                                probabilities, &ignored);
    return mpti_report(t->ctx, rc);
}

/* ---- the autopsy of a skipped step --------------------------------------------------------------
   The step runs once more, and after each layer its tensors are looked at. Weights have not changed
   since, so all numbers are the same; gradients go to a row that the next step overwrites. */
static mpt_result mpti_overflow_look(mpti_net *net, int v, const char *tensor, const void *data,
                                     int64_t count, mpt_dtype dtype, mpt_overflow *out) {
    const mpt_allocator *a = &net->model->ctx->desc.allocator;
    size_t bytes = (size_t)count * mpt_dtype_size(dtype);
    void *copy = NULL;
    mpt_tensor t;
    mpt_result rc = MPT_OK;

    memset(&t, 0, sizeof t);
    t.data = (void *)(uintptr_t)data;
    t.dims[0] = count;
    t.num_dims = 1;
    t.dtype = dtype;
    if (net->backend->download) {
        t.data = copy = mpti_alloc(a, bytes);
        if (!copy) return MPTI_NO_MEMORY(&net->model->ctx->error, "no memory to look at a tensor");
        rc = net->backend->download(net->self, copy, data, bytes);
    }
    if (rc == MPT_OK) rc = mpt_tensor_autopsy(&t, out->scale, net->operand, &out->values);
    mpti_free(a, copy, bytes);
    if (rc || out->values.first_bad < 0) return rc;
    if (!strcmp(tensor, "output")) out->values.largest_scale = 0; /* no scale is in it */
    out->found = 1;
    out->tensor = tensor;
    out->index = out->values.first_bad;
    snprintf(out->layer, sizeof out->layer, "%s", net->model->nodes[v].name);
    return MPT_OK;
}

static mpt_result mpti_overflow_value(mpti_net *net, int v, bool gradient, mpt_overflow *out) {
    return mpti_overflow_look(net, v, gradient ? "gradient of the output" : "output",
                              gradient ? mpti_net_gradient(net, v) : mpti_net_value(net, v),
                              net->capacity * mpti_node_elements(&net->model->nodes[v]),
                              net->dtype, out);
}

static mpt_result mpti_overflow_forward(mpti_net *net, const void *images, mpt_dtype dtype,
                                        mpt_overflow *out) {
    mpt_result rc = mpti_net_input(net, images, dtype);
    int v;

    if (rc == MPT_OK) rc = mpti_overflow_value(net, MPT_INPUT, false, out);
    for (v = 1; v < net->model->num_nodes && rc == MPT_OK && !out->found; v++) {
        if (net->model->nodes[v].fused) continue;
        rc = mpti_step_forward(net, v);
        if (rc == MPT_OK) rc = mpti_overflow_value(net, v, false, out);
    }
    return rc;
}

/* Parameters of a fused batch norm belong to the step that computes it. */
static mpt_result mpti_overflow_params(mpti_net *net, int v, mpt_overflow *out) {
    const mpti_node *node = &net->model->nodes[v];
    int owner = node->norm >= 0 ? node->norm : v;

    node = &net->model->nodes[owner];
    if (node->num_params == 0) return MPT_OK;
    return mpti_overflow_look(net, owner, "gradient of the parameters",
                              net->gradients + node->param_offset, node->num_params, MPT_F32, out);
}

static mpt_result mpti_overflow_backward(mpti_net *net, mpt_overflow *out) {
    mpt_result rc = mpti_net_loss(net);
    int v, k, count, inputs[MPT_CUSTOM_MAX_INPUTS];

    if (rc == MPT_OK) rc = mpti_overflow_value(net, net->model->logits, true, out);
    mpti_net_begin_backward(net);
    for (v = net->model->num_nodes - 1; v > 0 && rc == MPT_OK && !out->found; v--) {
        if (net->model->nodes[v].fused) continue;
        rc = mpti_step_backward(net, v);
        if (rc == MPT_OK) rc = mpti_overflow_params(net, v, out);
        count = mpti_step_inputs(net->model, v, inputs);
        for (k = 0; k < count && rc == MPT_OK && !out->found; k++)
            if (inputs[k] != MPT_INPUT) rc = mpti_overflow_value(net, inputs[k], true, out);
    }
    return rc;
}

/* Runs all microbatches of a batch at this scale, up to the first inf or NaN. */
static mpt_result mpti_trainer_find_overflow(mpt_trainer *t, const mpt_batch *b, float scale,
                                             mpt_overflow *out) {
    mpt_softmax_stats ignored;
    mpt_result rc = MPT_OK;
    int64_t i;

    memset(&ignored, 0, sizeof ignored);
    memset(out, 0, sizeof *out);
    out->scale = scale;
    for (i = 0; i < mpti_lane_count(b) * t->desc.slices && rc == MPT_OK && !out->found; i++) {
        const void *images;
        mpti_trainer_begin_pass(t, t->step - 1, i);
        t->net.grad_scale *= scale;
        t->net.loss_scale = NULL;
        t->net.stats = mpti_on_device(t) ? t->device.evaluation : &ignored;
        rc = mpti_trainer_slice(t, b, i, &images);
        if (rc == MPT_OK) rc = mpti_overflow_forward(&t->net, images, b->images.dtype, out);
        if (rc == MPT_OK && !out->found) rc = mpti_overflow_backward(&t->net, out);
        if (rc) rc = mpti_trainer_step_failed(t, rc);
    }
    return rc;
}

/* The largest power of two up to the scale of `first` at which the backward pass is finite. */
static mpt_result mpti_trainer_fitting_scale(mpt_trainer *t, const mpt_batch *b,
                                             const mpt_overflow *first, float *fitting) {
    mpt_overflow attempt = *first;
    float scale = 1;
    mpt_result rc = MPT_OK;

    *fitting = 0;
    if (!strcmp(first->tensor, "output")) return MPT_OK;
    while (scale <= first->scale / 2) scale *= 2;
    while (scale > first->scale) scale /= 2;
    for (; rc == MPT_OK && attempt.found && scale >= MPTI_TINY; scale /= 2) {
        rc = mpti_trainer_find_overflow(t, b, scale, &attempt);
        if (rc == MPT_OK && !attempt.found) *fitting = scale;
    }
    return rc;
}

MPT_API mpt_result mpt_trainer_autopsy(mpt_trainer *t, const mpt_batch *batch, mpt_overflow *out) {
    int64_t capacity;
    mpt_result rc;

    if (!t || !batch || !out) return MPT_ERR_INVALID_ARGUMENT;
    rc = mpti_on_device(t) ? mpti_device_sync(t) : MPT_OK;
    if (rc == MPT_ERR_INVALID_STATE) rc = MPT_OK; /* stuck: that is what is asked about */
    if (rc) return mpti_report(t->ctx, rc);
    if (!t->last.skipped || t->microbatches > 0)
        return MPTI_REPORT(t->ctx, MPT_ERR_INVALID_STATE,
                           "mpt_trainer_autopsy: the last step was not skipped, "
                           "or the next has begun");
    rc = mpti_trainer_check_training(t, batch, &capacity);
    if (rc == MPT_OK) rc = mpti_trainer_find_overflow(t, batch, t->last.loss_scale, out);
    if (rc == MPT_OK && out->found)
        rc = mpti_trainer_fitting_scale(t, batch, out, &out->largest_scale);
    else memset(&out->values, 0, sizeof out->values);
    return mpti_report(t->ctx, rc);
}

/* =================================================================================================
 * >>device   12.3 A trainer on a device: its memory, staging, recordings, reports
 * =================================================================================================
 *
 * Problem: a host that waits to learn whether a step's gradients were finite leaves the device
 *          idle, once in every step.
 * Idea:    what decides a step lies on the device (mpt_step_state); the host begins steps and reads
 *          the report of the one before. What is learned has a mirror on the host, filled when
 *          somebody asks and uploaded when it was set. The launches of a pass are recorded once.
 * Shapes:  host    | begin 1 | begin 2, read report 1 | begin 3, read report 2 | ...
 *          device            | step 1          | step 2          | step 3
 *          staged microbatch: pictures | labels (n) I32 | sample ids (n) U64
 * Tested:  tests/cuda/test_cuda_training.c
 * Next:    >>safetensors, in which what was learned is kept.
 */

/* ---- memory ---------------------------------------------------------------------------------- */
/* Those of a device, which together with four staged microbatches (two slots, there and on the
   host) are the plan's staging. */
static void mpti_device_plan(const mpt_trainer *t, int64_t num_chunks,
                             size_t bytes[MPTI_NUM_ARENAS]) {
    const mpt_model *m = t->model;
    size_t params = mpti_align((size_t)m->num_params * sizeof(float));
    size_t stats = mpti_align((size_t)m->num_stats * sizeof(float));
    size_t segments = (size_t)t->num_parameters, records = (size_t)t->net.capacity;
    size_t classes = (size_t)m->nodes[m->logits].c;

    if (!mpti_on_device(t)) return;
    bytes[MPTI_DECISIONS] =
        mpti_align(sizeof(mpt_step_state)) + mpti_align(sizeof(mpt_softmax_stats)) +
        mpti_align(records * classes * sizeof(float)) + mpti_align(records * sizeof(int32_t)) +
        stats + mpti_align(segments * sizeof(float)) +
        mpti_align((size_t)num_chunks * 2 * sizeof(double)) +
        mpti_align((size_t)num_chunks * sizeof(mpt_update_chunk)) +
        mpti_align(segments * sizeof(mpt_update_segment));
    bytes[MPTI_MIRROR] =
        params * (1 + (size_t)mpti_optimizer_state_count(t->desc.optimizer.kind)) + stats;
}

/* Pictures of four bytes a number are the largest, then labels and ids. */
static size_t mpti_device_slot_bytes(const mpt_trainer *t) {
    size_t records = (size_t)t->net.capacity;
    size_t picture = (size_t)mpti_node_elements(&t->model->nodes[MPT_INPUT]) * sizeof(float);

    if (!mpti_on_device(t)) return 0;
    return mpti_align(records * picture) + mpti_align(records * sizeof(int32_t)) +
           mpti_align(records * sizeof(uint64_t));
}

static void *mpti_device_take(mpt_trainer *t, size_t bytes) {
    return mpti_arena_take(t->arenas[MPTI_DECISIONS], bytes);
}

/* Hands out both arenas, exactly as mpti_device_plan counted. */
static void mpti_device_place(mpt_trainer *t) {
    const mpt_model *m = t->model;
    mpti_device *d = &t->device;
    size_t records = (size_t)t->net.capacity, segments = (size_t)t->num_parameters;
    size_t chunks = (size_t)t->optimizer.num_chunks;
    int64_t params = m->num_params;

    d->state = (mpt_step_state *)mpti_device_take(t, sizeof *d->state);
    d->evaluation = (mpt_softmax_stats *)mpti_device_take(t, sizeof *d->evaluation);
    d->probabilities = (float *)mpti_device_take(
        t, records * (size_t)m->nodes[m->logits].c * sizeof(float));
    d->labels = (int32_t *)mpti_device_take(t, records * sizeof(int32_t));
    d->momentum = (float *)mpti_device_take(t, (size_t)m->num_stats * sizeof(float));
    d->ratios = (float *)mpti_device_take(t, segments * sizeof(float));
    d->sums = (double *)mpti_device_take(t, chunks * 2 * sizeof(double));
    d->chunks = (mpt_update_chunk *)mpti_device_take(t, chunks * sizeof *d->chunks);
    d->segments = (mpt_update_segment *)mpti_device_take(t, segments * sizeof *d->segments);
    t->host.masters = mpti_trainer_floats(t, MPTI_MIRROR, params);
    if (t->first) t->host.first = mpti_trainer_floats(t, MPTI_MIRROR, params);
    if (t->second) t->host.second = mpti_trainer_floats(t, MPTI_MIRROR, params);
    t->host.running = mpti_trainer_floats(t, MPTI_MIRROR, m->num_stats);
}

/* The lists of the update, in one piece of host memory each before they go there. */
static mpt_result mpti_device_put_chunks(mpt_trainer *t) {
    const mpt_allocator *a = &t->ctx->desc.allocator;
    const mpti_optimizer *o = &t->optimizer;
    size_t bytes = sizeof(mpt_update_chunk) * (size_t)o->num_chunks;
    mpt_update_chunk *list = (mpt_update_chunk *)mpti_calloc(a, 1, bytes);
    mpt_result rc;
    int64_t i;

    if (!list) return MPTI_NO_MEMORY(&t->ctx->error, "no memory for a trainer");
    for (i = 0; i < o->num_chunks; i++) {
        list[i].offset = (int64_t)o->chunks[i].offset;
        list[i].count = (int)o->chunks[i].count;
        list[i].segment = (int)o->chunks[i].segment;
    }
    rc = t->net.backend->upload(t->net.self, t->device.chunks, list, bytes);
    mpti_free(a, list, bytes);
    return rc;
}

static mpt_result mpti_device_put_segments(mpt_trainer *t) {
    const mpt_allocator *a = &t->ctx->desc.allocator;
    size_t bytes = sizeof(mpt_update_segment) * (size_t)t->num_parameters;
    mpt_update_segment *list = (mpt_update_segment *)mpti_calloc(a, 1, bytes);
    int64_t i, chunk = 0;
    mpt_result rc;

    if (!list) return MPTI_NO_MEMORY(&t->ctx->error, "no memory for a trainer");
    for (i = 0; i < t->num_parameters; i++) {
        list[i].first_chunk = chunk;
        list[i].num_chunks = mpti_parameter_chunks(t->parameters[i].count);
        list[i].decays = t->parameters[i].decays;
        list[i].adapts = t->parameters[i].adapts;
        chunk += list[i].num_chunks;
    }
    rc = t->net.backend->upload(t->net.self, t->device.segments, list, bytes);
    mpti_free(a, list, bytes);
    return rc;
}

static mpt_result mpti_device_put_momentum(mpt_trainer *t) {
    const mpt_model *m = t->model;
    mpt_result rc = MPT_OK;
    mpt_fill_args a;
    int v;

    a.dtype = MPT_F32;
    for (v = 1; v < m->num_nodes && rc == MPT_OK; v++) {
        if (m->nodes[v].kind != MPTI_KIND_BATCHNORM) continue;
        a.dst = t->device.momentum + m->nodes[v].stat_offset;
        a.count = 2 * m->nodes[v].c;
        a.value = m->nodes[v].momentum;
        rc = t->net.backend->fill(t->net.self, &a);
    }
    return rc;
}

static mpt_result mpti_device_open(mpt_trainer *t) {
    mpt_result rc = t->net.backend->stage_reserve(t->net.self, t->device.slot_bytes);

    if (rc == MPT_OK) rc = mpti_device_put_chunks(t);
    if (rc == MPT_OK) rc = mpti_device_put_segments(t);
    return rc ? rc : mpti_device_put_momentum(t);
}

static void mpti_device_close(mpt_trainer *t) {
    int i;

    for (i = 0; i < MPTI_RECORDINGS; i++)
        if (t->device.recordings[i])
            t->net.backend->forget(t->net.self, t->device.recordings[i]);
}

/* ---- what is learned, there and here --------------------------------------------------------- */
/* Each row of what is learned to its mirror, or back. */
static mpt_result mpti_device_move(mpt_trainer *t, float *there, float *here, int64_t count,
                                   bool fetch) {
    size_t bytes = (size_t)count * sizeof(float);

    if (!here || count == 0) return MPT_OK;
    return fetch ? t->net.backend->download(t->net.self, here, there, bytes)
                 : t->net.backend->upload(t->net.self, there, here, bytes);
}

static mpt_result mpti_device_move_learned(mpt_trainer *t, bool fetch) {
    int64_t params = t->model->num_params;
    mpt_result rc = mpti_device_move(t, t->masters, t->host.masters, params, fetch);

    if (rc == MPT_OK) rc = mpti_device_move(t, t->first, t->host.first, params, fetch);
    if (rc == MPT_OK) rc = mpti_device_move(t, t->second, t->host.second, params, fetch);
    if (rc) return rc;
    return mpti_device_move(t, t->running, t->host.running, t->model->num_stats, fetch);
}

/* Sets all that a step goes on from: t->host, the scaler, the optimizer's counters. */
static mpt_result mpti_device_put(mpt_trainer *t) {
    mpt_step_state s;
    mpt_result rc = mpti_device_move_learned(t, false);

    memset(&s, 0, sizeof s);
    s.scaler = t->scaler;
    s.applied_steps = t->optimizer.applied_steps;
    s.beta1_power = t->optimizer.beta1_power;
    s.beta2_power = t->optimizer.beta2_power;
    s.first_nonfinite = -1;
    return rc ? rc : t->net.backend->upload(t->net.self, t->device.state, &s, sizeof s);
}

/* ---- a pass ---------------------------------------------------------------------------------- */
/* The records that the net was pointed at go there. Labels get a place that never changes, for
   recorded operators. */
static mpt_result mpti_device_stage(mpt_trainer *t, size_t picture, const void **images) {
    const mpt_backend *b = t->net.backend;
    size_t n = (size_t)t->net.num_valid, labels_at = mpti_align(n * picture);
    size_t ids_at = labels_at + mpti_align(n * sizeof(int32_t));
    size_t bytes = ids_at + n * sizeof(uint64_t);
    mpt_copy_args copy;
    void *host, *there;
    mpt_result rc = b->stage_begin(t->net.self, &host);

    if (rc) return rc;
    memcpy(host, *images, n * picture);
    if (t->net.labels)
        memcpy((uint8_t *)host + labels_at, t->net.labels, n * sizeof(int32_t));
    if (t->net.sample_ids)
        memcpy((uint8_t *)host + ids_at, t->net.sample_ids, n * sizeof(uint64_t));
    rc = b->stage_end(t->net.self, bytes, &there);
    if (rc) return rc;
    *images = there;
    if (t->net.sample_ids) t->net.sample_ids = (const uint64_t *)((uint8_t *)there + ids_at);
    if (!t->net.labels) return MPT_OK;
    copy.src = (const uint8_t *)there + labels_at;
    copy.dst = t->device.labels;
    copy.bytes = n * sizeof(int32_t);
    t->net.labels = t->device.labels;
    return b->copy(t->net.self, &copy);
}

/* Forward and backward; full microbatches behind the first step are recorded once and replayed. */
static mpt_result mpti_device_forward_backward(mpt_trainer *t) {
    const mpt_backend *b = t->net.backend;
    void **recording = &t->device.recordings[t->depth];
    mpt_result rc, ended;

    if (t->step == 0 || t->net.num_valid != t->net.capacity)
        return mpti_trainer_forward_backward(t);
    if (!*recording) {
        rc = b->record_begin(t->net.self);
        if (rc) return rc;
        rc = mpti_trainer_forward_backward(t);
        ended = b->record_end(t->net.self, recording);
        if (rc || ended) return rc ? rc : ended;
    }
    return b->replay(t->net.self, *recording);
}

/* Losses of microbatches that failed don't count. The update clears those of a step by itself. */
static void mpti_device_begin_step(mpt_trainer *t) {
    mpt_fill_args zeros;

    zeros.dst = &t->device.state->stats;
    zeros.count = (int64_t)(sizeof t->device.state->stats / sizeof(float));
    zeros.value = 0;
    zeros.dtype = MPT_F32;
    (void)t->net.backend->fill(t->net.self, &zeros); /* where it fails, the next call does too */
}

static mpt_result mpti_device_clear_evaluation(mpt_trainer *t) {
    mpt_softmax_stats zeros;

    memset(&zeros, 0, sizeof zeros);
    return t->net.backend->upload(t->net.self, t->device.evaluation, &zeros, sizeof zeros);
}

static mpt_result mpti_device_add_evaluation(mpt_trainer *t, mpt_softmax_stats *stats) {
    mpt_softmax_stats s;
    mpt_result rc = t->net.backend->download(t->net.self, &s, t->device.evaluation, sizeof s);

    if (rc) return rc;
    stats->loss += s.loss;
    stats->num_labeled += s.num_labeled;
    stats->num_correct += s.num_correct;
    stats->num_correct_top5 += s.num_correct_top5;
    return MPT_OK;
}

/* ---- a step ---------------------------------------------------------------------------------- */
/* Reads the report of one step, and what the host has to know of its outcome. */
static mpt_result mpti_device_report(mpt_trainer *t, int64_t step) {
    double now;
    mpt_step_state s;
    mpt_result rc = t->net.backend->update_wait(t->net.self, step, &s);

    if (rc) return rc;
    now = mpti_seconds();
    t->last = s.report;
    t->last.seconds = now - t->seconds;
    t->seconds = now;
    t->scaler = s.scaler;
    t->optimizer.applied_steps = s.applied_steps;
    t->optimizer.beta1_power = s.beta1_power;
    t->optimizer.beta2_power = s.beta2_power;
    t->device.reported = step;
    if (!mpt_loss_scaler_is_stuck(&t->scaler)) return MPT_OK;
    return mpti_trainer_stuck(t, s.first_nonfinite);
}

/* A step that is stuck (MPT_ERR_INVALID_STATE) doesn't keep the one behind it from being read. */
static mpt_result mpti_device_sync(mpt_trainer *t) {
    mpt_result rc = MPT_OK;

    while (t->device.reported < t->step && (rc == MPT_OK || rc == MPT_ERR_INVALID_STATE))
        rc = mpti_device_report(t, t->device.reported + 1);
    return rc;
}

/* Makes t->host, the scaler and the counters what they are after the last step. */
static mpt_result mpti_trainer_fetch(mpt_trainer *t) {
    mpt_result rc;

    if (!mpti_on_device(t)) return MPT_OK;
    rc = mpti_device_sync(t);
    if (rc == MPT_ERR_INVALID_STATE) rc = MPT_OK; /* stuck, but what was learned is there */
    return rc ? rc : mpti_device_move_learned(t, true);
}

static void mpti_device_update_args(const mpt_trainer *t, mpt_update_args *a) {
    const mpti_device *d = &t->device;
    int i;

    memset(a, 0, sizeof *a);
    a->state = d->state;
    a->weights = t->masters;
    a->row = t->rows[0];
    a->first = t->first;
    a->second = t->second;
    a->half = t->half;
    a->half_dtype = t->net.operand;
    a->running = t->running;
    a->momentum = d->momentum;
    a->chunks = d->chunks;
    a->segments = d->segments;
    a->sums = d->sums;
    a->ratios = d->ratios;
    a->num_params = t->model->num_params;
    a->num_stats = t->model->num_stats;
    a->num_chunks = t->optimizer.num_chunks;
    a->num_segments = t->num_parameters;
    a->optimizer = t->desc.optimizer;
    a->step = t->step;
    a->num_samples = t->num_samples;
    a->fitting = (double)t->batch_size * t->desc.accumulate_steps;
    a->first_applied = t->optimizer.applied_steps;
    for (i = 0; i < (int)(sizeof a->rates / sizeof a->rates[0]); i++)
        a->rates[i] = mpt_schedule_rate(&t->desc.schedule, t->desc.optimizer.learning_rate,
                                        a->first_applied + i, t->desc.total_steps);
}

/* The lines of mpt_trainer_apply, begun on the device. At most two steps are under way, so the
   learning rate is one of the next two; the report is that of the step before. */
static mpt_result mpti_device_apply(mpt_trainer *t, mpt_step_report *out) {
    mpt_update_args a;
    mpt_result rc;

    if (t->num_samples == 0) return mpti_trainer_no_record(t);
    t->step++;
    mpti_device_update_args(t, &a);
    rc = t->net.backend->update(t->net.self, &a);
    if (rc == MPT_OK) rc = mpti_trainer_widen(t);
    mpti_trainer_begin_step(t);
    while (rc == MPT_OK && t->device.reported < t->step - 1)
        rc = mpti_device_report(t, t->device.reported + 1);
    *out = t->last;
    return rc;
}

/* =================================================================================================
 * >>safetensors   12.4 Files of tensors: SHA-256, JSON, safetensors
 * =================================================================================================
 * Problem: a run has to survive its process, weights have to be read by tools not written yet, and
 *          a file that comes from elsewhere may be anything.
 * Idea:    safetensors: a table of contents in JSON, then plain numbers. Nothing in it can be
 *          executed, everything in it can be checked before a byte of data is believed.
 * Shapes:  | N: u64 | N bytes of JSON, from { to spaces | tensor | tensor | ... end of file |
 *          0        8                                   8 + N: offsets in the JSON count from here
 *            {"__metadata__":{"format":"pt"},
 *             "fc.bias":{"dtype":"F32","shape":[10],"data_offsets":[0,40]}, ...}
 * Tested:  tests/test_safetensors.c
 * Next:    >>train, whose checkpoints are such files.
 */

/* ---- SHA-256 (FIPS 180-4) -------------------------------------------------------------------- */
typedef struct mpti_sha256 {
    uint32_t h[8];
    uint64_t size; /* bytes so far */
    uint8_t block[64];
} mpti_sha256;

static void mpti_sha256_init(mpti_sha256 *s) { /* section 5.3.3 */
    static const uint32_t start[8] = {0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au,
                                      0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u};
    memset(s, 0, sizeof *s);
    memcpy(s->h, start, sizeof start);
}

static uint32_t mpti_rotate_right(uint32_t x, int n) {
    return x >> n | x << (32 - n);
}

static const uint32_t mpti_sha256_k[64] =
    {/* section 4.2.2 */
     0x428a2f98u, 0x71374491u, 0xb5c0fbcfu, 0xe9b5dba5u, 0x3956c25bu, 0x59f111f1u, 0x923f82a4u,
     0xab1c5ed5u, 0xd807aa98u, 0x12835b01u, 0x243185beu, 0x550c7dc3u, 0x72be5d74u, 0x80deb1feu,
     0x9bdc06a7u, 0xc19bf174u, 0xe49b69c1u, 0xefbe4786u, 0x0fc19dc6u, 0x240ca1ccu, 0x2de92c6fu,
     0x4a7484aau, 0x5cb0a9dcu, 0x76f988dau, 0x983e5152u, 0xa831c66du, 0xb00327c8u, 0xbf597fc7u,
     0xc6e00bf3u, 0xd5a79147u, 0x06ca6351u, 0x14292967u, 0x27b70a85u, 0x2e1b2138u, 0x4d2c6dfcu,
     0x53380d13u, 0x650a7354u, 0x766a0abbu, 0x81c2c92eu, 0x92722c85u, 0xa2bfe8a1u, 0xa81a664bu,
     0xc24b8b70u, 0xc76c51a3u, 0xd192e819u, 0xd6990624u, 0xf40e3585u, 0x106aa070u, 0x19a4c116u,
     0x1e376c08u, 0x2748774cu, 0x34b0bcb5u, 0x391c0cb3u, 0x4ed8aa4au, 0x5b9cca4fu, 0x682e6ff3u,
     0x748f82eeu, 0x78a5636fu, 0x84c87814u, 0x8cc70208u, 0x90befffau, 0xa4506cebu, 0xbef9a3f7u,
     0xc67178f2u};

static void mpti_sha256_block(uint32_t h[8], const uint8_t p[64]) { /* section 6.2.2 */
    uint32_t w[64], x[8], t1, t2;
    int t;

    for (t = 0; t < 16; t++) w[t] = mpti_load_uint(p + 4 * t, 4, true);
    for (; t < 64; t++) {
        t1 = mpti_rotate_right(w[t - 2], 17) ^ mpti_rotate_right(w[t - 2], 19) ^ w[t - 2] >> 10;
        t2 = mpti_rotate_right(w[t - 15], 7) ^ mpti_rotate_right(w[t - 15], 18) ^ w[t - 15] >> 3;
        w[t] = t1 + w[t - 7] + t2 + w[t - 16];
    }
    memcpy(x, h, sizeof x);
    for (t = 0; t < 64; t++) { /* a .. h are x[k] .. x[k + 7]: k moves, they stay where they are */
        int k = 64 - t;
        uint32_t a = x[k & 7], b = x[(k + 1) & 7], c = x[(k + 2) & 7];
        uint32_t e = x[(k + 4) & 7], f = x[(k + 5) & 7], g = x[(k + 6) & 7];

        t1 = (mpti_rotate_right(e, 6) ^ mpti_rotate_right(e, 11) ^ mpti_rotate_right(e, 25)) +
             ((e & f) ^ (~e & g)) + x[(k + 7) & 7] + mpti_sha256_k[t] + w[t];
        t2 = (mpti_rotate_right(a, 2) ^ mpti_rotate_right(a, 13) ^ mpti_rotate_right(a, 22)) +
             ((a & b) ^ (a & c) ^ (b & c));
        x[(k + 3) & 7] += t1;
        x[(k + 7) & 7] = t1 + t2;
    }
    for (t = 0; t < 8; t++) h[t] += x[t];
}

static void mpti_sha256_add(mpti_sha256 *s, const void *data, size_t size) {
    const uint8_t *p = (const uint8_t *)data;

    while (size > 0) {
        size_t used = (size_t)(s->size % 64), n = 64 - used < size ? 64 - used : size;

        if (n == 64) {
            mpti_sha256_block(s->h, p);
        } else {
            memcpy(s->block + used, p, n);
            if (used + n == 64) mpti_sha256_block(s->h, s->block);
        }
        s->size += n;
        p += n;
        size -= n;
    }
}

static void mpti_sha256_finish(mpti_sha256 *s, char hex[65]) {
    static const uint8_t padding[64] = {0x80};
    uint64_t bits = s->size * 8;
    uint8_t length[8];
    int i;

    /* to byte 56 of the last block */
    mpti_sha256_add(s, padding, (size_t)((119 - s->size % 64) % 64 + 1));
    for (i = 0; i < 8; i++) length[i] = (uint8_t)(bits >> (56 - 8 * i));
    mpti_sha256_add(s, length, sizeof length);
    for (i = 0; i < 8; i++) snprintf(hex + 8 * i, 9, "%08x", (unsigned)s->h[i]);
}

/* ---- safetensors: types ------------------------------------------------------------------------
   In the order of the format's own library, by which it sorts tensors in a file. */
static const struct mpti_safetensors_type {
    char name[10];
    uint8_t size;
    int8_t dtype; /* mpt_dtype; -1: none of ours */
} mpti_safetensors_types[] = {{"BOOL", 1, -1},       {"U8", 1, MPT_U8},   {"I8", 1, -1},
                              {"F8_E5M2", 1, -1},    {"F8_E4M3", 1, -1},  {"F8_E8M0", 1, -1},
                              {"I16", 2, -1},        {"U16", 2, -1},      {"F16", 2, MPT_F16},
                              {"BF16", 2, MPT_BF16}, {"I32", 4, MPT_I32}, {"U32", 4, -1},
                              {"F32", 4, MPT_F32},   {"C64", 8, -1},      {"F64", 8, -1},
                              {"I64", 8, MPT_I64},   {"U64", 8, -1}};
enum {
    MPTI_NUM_SAFETENSORS_TYPES = sizeof mpti_safetensors_types / sizeof mpti_safetensors_types[0]
};

/* Numbers go between file and memory as they are. */
static mpt_result mpti_safetensors_host(mpt_error *err, const char *path) {
    const uint16_t one = 1;
    uint8_t first;

    if (!path) return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT, "a safetensors path is required");
    memcpy(&first, &one, 1);
    return first == 1 ? MPT_OK
                      : MPTI_REFUSED(err, "%s: safetensors needs a little-endian machine", path);
}

/* What stands in front of the checksum in a file of our writer, and what it is. The CRC covers the
   file from its first to its last byte, with these eight digits as zeros. */
#define MPTI_CHECKSUM_PREFIX "{\"__metadata__\":{\"mptrain.crc32c\":\""
enum { MPTI_CHECKSUM_OFFSET = 8 + sizeof MPTI_CHECKSUM_PREFIX - 1, MPTI_CHECKSUM_DIGITS = 8 };

/* ---- safetensors, reading -------------------------------------------------------------------- */
typedef struct mpti_pair {
    const char *key, *value;
} mpti_pair;

struct mpt_safetensors {
    mpt_ctx *ctx;
    char *path;
    mpti_file file;
    mpti_buffer header;   /* the JSON, in which strings have been decoded in place */
    mpti_buffer metadata; /* of mpti_pair, sorted by key */
    mpti_buffer tensors;  /* of mpt_safetensors_info, sorted by offset */
    mpt_safetensors_info **by_name;
    size_t num_tensors, num_pairs;
    int64_t size;                            /* bytes that the header accounts for */
    char checksum[MPTI_CHECKSUM_DIGITS + 1]; /* "": none */
};

__attribute__((format(printf, 3, 4))) static mpt_result
mpti_safetensors_fail(mpt_safetensors *s, const char *tensor, const char *format, ...) {
    char cause[256];
    va_list args;

    va_start(args, format);
    vsnprintf(cause, sizeof cause, format, args);
    va_end(args);
    if (!tensor)
        return MPTI_DAMAGED(&s->ctx->error, "%s: safetensors header: %s", mpti_path_tail(s->path),
                            cause);
    return MPTI_DAMAGED(&s->ctx->error, "%s: tensor '%.80s': %s", mpti_path_tail(s->path), tensor,
                        cause);
}

static mpt_result mpti_safetensors_no_memory(mpt_safetensors *s) {
    return MPTI_NO_MEMORY(&s->ctx->error, "%s: no memory for its header", mpti_path_tail(s->path));
}

static mpt_result mpti_safetensors_bad_json(mpt_safetensors *s, const mpti_json *j) {
    return mpti_safetensors_fail(s, NULL, "not the JSON it should be at byte %llu",
                                 (unsigned long long)(8 + (j->p - (const char *)s->header.data)));
}

/* Decoded over its own text, which it never outgrows, and so as long-lived as the header. U+0000
   would end a C string before its end: refused. */
static bool mpti_safetensors_string(mpti_json *j, const char **text) {
    char *start = NULL;
    const char *p;

    if (mpti_json_peek(j) == '"') start = (char *)(uintptr_t)j->p;
    for (p = start ? start + 1 : j->end; p < j->end && *p != '"'; p++) {
        if (*p != '\\') continue;
        if (j->end - p >= 6 && memcmp(p, "\\u0000", 6) == 0) j->bad = true;
        p++;
    }
    *text = start;
    return mpti_json_string(j, start, SIZE_MAX);
}

/* Digits only, no sign, no 007. */
static bool mpti_safetensors_number(mpti_json *j, uint64_t *out) {
    int64_t value = 0;
    int c = mpti_json_peek(j);

    if (c < '0' || c > '9') j->bad = true;
    if (c == '0' && j->p + 1 < j->end && j->p[1] >= '0' && j->p[1] <= '9') j->bad = true;
    if (!j->bad) mpti_json_int64(j, &value);
    *out = (uint64_t)value;
    return !j->bad;
}

static mpt_result mpti_safetensors_shape(mpt_safetensors *s, mpti_json *j,
                                         mpt_safetensors_info *info) {
    uint64_t dim;

    mpti_json_array(j);
    for (info->count = 1, info->num_dims = 0; mpti_json_item(j); info->num_dims++) {
        if (!mpti_safetensors_number(j, &dim)) break;
        if (info->num_dims == MPT_SAFETENSORS_MAX_DIMS)
            return MPTI_REFUSED(&s->ctx->error, "%s: tensor '%.80s' has more than %d dimensions",
                                mpti_path_tail(s->path), info->name, MPT_SAFETENSORS_MAX_DIMS);
        if (dim > 0 && info->count > (uint64_t)INT64_MAX / dim)
            return mpti_safetensors_fail(s, info->name, "its shape has too many elements");
        info->dims[info->num_dims] = (int64_t)dim;
        info->count *= dim;
    }
    return j->bad ? mpti_safetensors_bad_json(s, j) : MPT_OK;
}

static const struct mpti_safetensors_type *mpti_safetensors_type_of(const char *name) {
    int i;

    for (i = 0; i < MPTI_NUM_SAFETENSORS_TYPES; i++)
        if (!strcmp(mpti_safetensors_types[i].name, name)) return &mpti_safetensors_types[i];
    return NULL;
}

/* info->name is set; begin and end count from the end of the header. */
static mpt_result mpti_safetensors_place(mpt_safetensors *s, mpt_safetensors_info *info,
                                         uint64_t begin, uint64_t end) {
    const struct mpti_safetensors_type *type = mpti_safetensors_type_of(info->dtype_name);
    uint64_t start = 8 + (uint64_t)s->header.size;

    if (!type)
        return mpti_safetensors_fail(s, info->name, "unknown dtype '%.20s'", info->dtype_name);
    if (end < begin || (s->file.size >= 0 && end > (uint64_t)s->file.size - start))
        return mpti_safetensors_fail(s, info->name,
                                     "its data_offsets %llu..%llu are not in the file",
                                     (unsigned long long)begin, (unsigned long long)end);
    if (info->count > (uint64_t)INT64_MAX / type->size || info->count * type->size != end - begin)
        return mpti_safetensors_fail(s, info->name, "%llu elements of %s do not fill %llu bytes",
                                     (unsigned long long)info->count, type->name,
                                     (unsigned long long)(end - begin));
    info->bytes = end - begin;
    info->offset = start + begin;
    info->has_dtype = type->dtype >= 0;
    if (info->has_dtype) info->dtype = (mpt_dtype)type->dtype;
    return MPT_OK;
}

static mpt_result mpti_safetensors_tensor(mpt_safetensors *s, mpti_json *j, const char *name) {
    mpt_safetensors_info info;
    uint64_t offsets[2] = {0, 0};
    char key[16];
    int seen = 0, bit;
    mpt_result rc = MPT_OK;

    memset(&info, 0, sizeof info);
    info.name = name;
    mpti_json_object(j);
    while (rc == MPT_OK && mpti_json_key(j, key, sizeof key)) {
        bit = !strcmp(key, "dtype")          ? 1
              : !strcmp(key, "shape")        ? 2
              : !strcmp(key, "data_offsets") ? 4
                                             : 0;
        if (seen & bit) return mpti_safetensors_fail(s, name, "it has two fields %s", key);
        seen |= bit;
        if (bit == 1) {
            mpti_safetensors_string(j, &info.dtype_name);
        } else if (bit == 2) {
            rc = mpti_safetensors_shape(s, j, &info);
        } else if (bit == 4) {
            mpti_json_array(j);
            if (!mpti_json_item(j) || !mpti_safetensors_number(j, &offsets[0]) ||
                !mpti_json_item(j) || !mpti_safetensors_number(j, &offsets[1]) || mpti_json_item(j))
                j->bad = true;
        } else {
            mpti_json_skip(j);
        }
    }
    if (rc) return rc;
    if (j->bad) return mpti_safetensors_bad_json(s, j);
    if (seen != 7) return mpti_safetensors_fail(s, name, "dtype, shape or data_offsets is missing");
    rc = mpti_safetensors_place(s, &info, offsets[0], offsets[1]);
    if (rc) return rc;
    return mpti_buffer_append(&s->tensors, &info, sizeof info) ? MPT_OK
                                                               : mpti_safetensors_no_memory(s);
}

static mpt_result mpti_safetensors_pairs(mpt_safetensors *s, mpti_json *j) {
    mpti_pair pair;

    mpti_json_object(j);
    while (mpti_json_more(j, '}')) {
        if (!mpti_safetensors_string(j, &pair.key) || !mpti_json_expect(j, ':') ||
            !mpti_safetensors_string(j, &pair.value))
            break;
        if (!mpti_buffer_append(&s->metadata, &pair, sizeof pair))
            return mpti_safetensors_no_memory(s);
    }
    return j->bad ? mpti_safetensors_bad_json(s, j) : MPT_OK;
}

static int mpti_compare_pairs(const void *a, const void *b) {
    return strcmp(((const mpti_pair *)a)->key, ((const mpti_pair *)b)->key);
}

static int mpti_compare_offsets(const void *a, const void *b) {
    const mpt_safetensors_info *x = (const mpt_safetensors_info *)a;
    const mpt_safetensors_info *y = (const mpt_safetensors_info *)b;

    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
    return strcmp(x->name, y->name);
}

static int mpti_compare_info_names(const void *a, const void *b) {
    return strcmp((*(mpt_safetensors_info *const *)a)->name,
                  (*(mpt_safetensors_info *const *)b)->name);
}

/* No name twice; no hole, no overlap, nothing behind the last one. */
static mpt_result mpti_safetensors_check_layout(mpt_safetensors *s) {
    mpt_safetensors_info *tensors = (mpt_safetensors_info *)(void *)s->tensors.data;
    mpti_pair *pairs = (mpti_pair *)(void *)s->metadata.data;
    uint64_t at = 8 + (uint64_t)s->header.size;
    size_t i;

    if (s->num_pairs) qsort(pairs, s->num_pairs, sizeof *pairs, mpti_compare_pairs);
    for (i = 1; i < s->num_pairs; i++)
        if (!strcmp(pairs[i].key, pairs[i - 1].key))
            return mpti_safetensors_fail(s, NULL, "__metadata__ has '%.80s' twice", pairs[i].key);
    if (s->num_tensors) qsort(tensors, s->num_tensors, sizeof *tensors, mpti_compare_offsets);
    for (i = 0; i < s->num_tensors; at += tensors[i++].bytes)
        if (tensors[i].offset != at)
            return mpti_safetensors_fail(s, tensors[i].name, "%s the tensor before it",
                                         tensors[i].offset < at ? "it overlaps" : "a hole follows");
    s->size = (int64_t)at;
    if (s->file.size >= 0 && s->file.size != s->size)
        return mpti_safetensors_fail(s, NULL, "it accounts for %lld bytes of %lld",
                                     (long long)s->size, (long long)s->file.size);
    for (i = 0; i < s->num_tensors; i++) s->by_name[i] = &tensors[i];
    if (s->num_tensors)
        qsort(s->by_name, s->num_tensors, sizeof *s->by_name, mpti_compare_info_names);
    for (i = 1; i < s->num_tensors; i++)
        if (!strcmp(s->by_name[i]->name, s->by_name[i - 1]->name))
            return mpti_safetensors_fail(s, s->by_name[i]->name, "its name comes twice");
    return MPT_OK;
}

static mpt_result mpti_safetensors_parse(mpt_safetensors *s) {
    mpti_json j;
    const char *name;
    bool had_metadata = false;
    mpt_result rc = MPT_OK;

    memset(&j, 0, sizeof j);
    j.p = (const char *)s->header.data;
    j.end = j.p + s->header.size;
    mpti_json_object(&j);
    while (rc == MPT_OK && mpti_json_more(&j, '}')) {
        if (!mpti_safetensors_string(&j, &name) || !mpti_json_expect(&j, ':')) break;
        if (strcmp(name, "__metadata__") != 0) {
            rc = mpti_safetensors_tensor(s, &j, name);
        } else if (had_metadata) {
            rc = mpti_safetensors_fail(s, NULL, "it has two __metadata__");
        } else {
            had_metadata = true;
            rc = mpti_safetensors_pairs(s, &j);
        }
    }
    if (rc) return rc;
    while (j.p < j.end && *j.p == ' ') j.p++;
    if (j.bad || j.p < j.end) return mpti_safetensors_bad_json(s, &j);
    s->num_pairs = s->metadata.size / sizeof(mpti_pair);
    s->num_tensors = s->tensors.size / sizeof(mpt_safetensors_info);
    s->by_name = (mpt_safetensors_info **)mpti_alloc(&s->ctx->desc.allocator,
                                                     (s->num_tensors + 1) * sizeof *s->by_name);
    return s->by_name ? mpti_safetensors_check_layout(s) : mpti_safetensors_no_memory(s);
}

static mpt_result mpti_safetensors_fetch(mpt_safetensors *s, void *dst, size_t size) {
    uint8_t *p = (uint8_t *)dst;
    mpt_result rc = MPT_OK;
    size_t got;

    for (; rc == MPT_OK && size > 0; p += got, size -= got) {
        rc = mpti_file_read_some(&s->file, &s->ctx->error, p, size, &got);
        if (rc == MPT_OK && got == 0)
            return MPTI_DAMAGED(&s->ctx->error, "%s: it ends at byte %llu, %llu more were expected",
                                mpti_path_tail(s->path), (unsigned long long)s->file.offset,
                                (unsigned long long)size);
    }
    return rc;
}

static mpt_result mpti_safetensors_load_header(mpt_safetensors *s) {
    const size_t step = 1 << 20; /* memory for bytes that are there, not for promised ones */
    uint8_t head[8];
    uint64_t left;
    mpt_bytes text;
    mpt_result rc = mpti_safetensors_fetch(s, head, sizeof head);

    if (rc) return rc;
    left = mpti_load_u64(head);
    if (left > MPT_SAFETENSORS_MAX_HEADER ||
        (s->file.size >= 0 && left > (uint64_t)s->file.size - 8))
        return mpti_safetensors_fail(s, NULL, "its length of %llu bytes is more than %s",
                                     (unsigned long long)left,
                                     left > MPT_SAFETENSORS_MAX_HEADER ? "the format allows"
                                                                       : "the file has");
    while (left > 0) {
        size_t n = left < step ? (size_t)left : step;

        if (!mpti_buffer_reserve(&s->header, n)) return mpti_safetensors_no_memory(s);
        rc = mpti_safetensors_fetch(s, s->header.data + s->header.size, n);
        if (rc) return rc;
        s->header.size += n;
        left -= n;
    }
    text.data = s->header.data;
    text.size = s->header.size;
    if (text.size == 0 || text.data[0] != '{')
        return mpti_safetensors_fail(s, NULL, "it does not start with {");
    if (!mpti_utf8_is_valid(text)) return mpti_safetensors_fail(s, NULL, "it is no UTF-8");
    if (text.size > MPTI_CHECKSUM_OFFSET &&
        !memcmp(text.data, MPTI_CHECKSUM_PREFIX, MPTI_CHECKSUM_OFFSET - 8))
        snprintf(s->checksum, sizeof s->checksum, "%.8s",
                 (const char *)text.data + MPTI_CHECKSUM_OFFSET - 8);
    return mpti_safetensors_parse(s);
}

MPT_API mpt_result mpt_safetensors_open(mpt_ctx *ctx, const mpt_safetensors_desc *desc,
                                        mpt_safetensors **out) {
    const mpt_allocator *a;
    mpt_safetensors *s;
    mpt_result rc;

    if (!ctx || !out) return MPT_ERR_INVALID_ARGUMENT;
    *out = NULL;
    a = &ctx->desc.allocator;
    rc = mpti_safetensors_host(&ctx->error, desc ? desc->path : NULL);
    if (rc) return mpti_report(ctx, rc);
    s = (mpt_safetensors *)mpti_calloc(a, 1, sizeof *s);
    if (s) s->path = mpti_strdup(a, desc->path);
    if (s) {
        s->ctx = ctx;
        s->header.allocator = s->metadata.allocator = s->tensors.allocator = a;
    }
    if (!s || !s->path) rc = MPTI_NO_MEMORY(&ctx->error, "no memory for a safetensors reader");
    if (rc == MPT_OK)
        rc = mpti_file_open(desc->io ? desc->io : mpt_io_files(), s->path, &ctx->error, &s->file);
    if (rc == MPT_OK) rc = mpti_safetensors_load_header(s);
    if (rc) mpt_safetensors_close(s);
    else *out = s;
    return mpti_report(ctx, rc);
}

MPT_API void mpt_safetensors_close(mpt_safetensors *s) {
    const mpt_allocator *a = s ? &s->ctx->desc.allocator : NULL;

    if (!s) return;
    mpti_file_close(&s->file);
    mpti_free(a, s->by_name, (s->num_tensors + 1) * sizeof *s->by_name);
    mpti_buffer_free(&s->tensors);
    mpti_buffer_free(&s->metadata);
    mpti_buffer_free(&s->header);
    mpti_strfree(a, s->path);
    mpti_free(a, s, sizeof *s);
}

MPT_API int64_t mpt_safetensors_count(const mpt_safetensors *s) {
    return s ? (int64_t)s->num_tensors : 0;
}

/* NULL, with the error reported, if there is none. */
static const mpt_safetensors_info *mpti_safetensors_at(mpt_safetensors *s, int64_t index) {
    if (index >= 0 && index < (int64_t)s->num_tensors)
        return (const mpt_safetensors_info *)(const void *)s->tensors.data + index;
    MPTI_REPORT(s->ctx, MPT_ERR_INVALID_ARGUMENT, "%s: there is no tensor %lld of %lld",
                mpti_path_tail(s->path), (long long)index, (long long)s->num_tensors);
    return NULL;
}

MPT_API mpt_result mpt_safetensors_get(mpt_safetensors *s, int64_t index,
                                       mpt_safetensors_info *out) {
    const mpt_safetensors_info *info = s && out ? mpti_safetensors_at(s, index) : NULL;

    if (info) *out = *info;
    return info ? MPT_OK : MPT_ERR_INVALID_ARGUMENT;
}

MPT_API int64_t mpt_safetensors_find(const mpt_safetensors *s, const char *name) {
    mpt_safetensors_info key, *at = &key, **found;

    if (!s || !name || !s->num_tensors) return -1;
    key.name = name;
    found = (mpt_safetensors_info **)bsearch(&at, s->by_name, s->num_tensors, sizeof *s->by_name,
                                             mpti_compare_info_names);
    return found ? *found - (const mpt_safetensors_info *)(const void *)s->tensors.data : -1;
}

MPT_API const char *mpt_safetensors_metadata(const mpt_safetensors *s, const char *key) {
    mpti_pair wanted, *found;

    if (!s || !key || !s->num_pairs) return NULL;
    wanted.key = key;
    found = (mpti_pair *)bsearch(&wanted, s->metadata.data, s->num_pairs, sizeof wanted,
                                 mpti_compare_pairs);
    return found ? found->value : NULL;
}

/* To a tensor's first byte, by reading on where the storage can't seek. */
static mpt_result mpti_safetensors_go(mpt_safetensors *s, uint64_t offset) {
    uint8_t skipped[4096];
    mpt_result rc = MPT_OK;

    if (s->file.io->seek && s->file.offset != offset)
        return mpti_file_seek(&s->file, &s->ctx->error, offset);
    if (offset < s->file.offset)
        return MPTI_REFUSED(&s->ctx->error,
                            "%s: this storage can't seek: read tensors in file order",
                            mpti_path_tail(s->path));
    while (rc == MPT_OK && s->file.offset < offset) {
        uint64_t left = offset - s->file.offset;
        rc = mpti_safetensors_fetch(s, skipped,
                                    left < sizeof skipped ? (size_t)left : sizeof skipped);
    }
    return rc;
}

MPT_API mpt_result mpt_safetensors_read(mpt_safetensors *s, int64_t index, void *dst,
                                        size_t bytes) {
    const mpt_safetensors_info *info = s ? mpti_safetensors_at(s, index) : NULL;
    mpt_result rc;

    if (!info) return MPT_ERR_INVALID_ARGUMENT;
    if (bytes != info->bytes || (!dst && bytes > 0))
        return MPTI_REPORT(s->ctx, MPT_ERR_INVALID_ARGUMENT,
                           "%s: tensor '%.80s' has %llu bytes, not %llu", mpti_path_tail(s->path),
                           info->name, (unsigned long long)info->bytes, (unsigned long long)bytes);
    rc = mpti_safetensors_go(s, info->offset);
    if (rc == MPT_OK) rc = mpti_safetensors_fetch(s, dst, bytes);
    return mpti_report(s->ctx, rc);
}

/* Through a second handle, so that reading tensors goes on where it was. */
static mpt_result mpti_safetensors_crc(mpt_safetensors *s, uint8_t *block, size_t capacity,
                                       uint32_t *crc) {
    mpti_file file;
    mpt_result rc = mpti_file_open(s->file.io, s->path, &s->ctx->error, &file);
    size_t got = 1;
    uint64_t at, i;

    while (rc == MPT_OK && got > 0) {
        at = file.offset;
        rc = mpti_file_read_some(&file, &s->ctx->error, block, capacity, &got);
        for (i = MPTI_CHECKSUM_OFFSET; i < MPTI_CHECKSUM_OFFSET + MPTI_CHECKSUM_DIGITS; i++)
            if (i >= at && i - at < got) block[i - at] = '0';
        if (rc == MPT_OK) *crc = mpt_crc32c(*crc, block, got);
    }
    mpti_file_close(&file);
    return rc;
}

MPT_API mpt_result mpt_safetensors_verify(mpt_safetensors *s) {
    enum { capacity = 1 << 18 };
    uint8_t *block;
    char digits[MPTI_CHECKSUM_DIGITS + 1];
    uint32_t crc = 0;
    mpt_result rc;

    if (!s) return MPT_ERR_INVALID_ARGUMENT;
    if (!s->checksum[0])
        return MPTI_REPORT(s->ctx, MPT_ERR_INVALID_STATE, "%s: it has no checksum",
                           mpti_path_tail(s->path));
    block = (uint8_t *)mpti_alloc(&s->ctx->desc.allocator, capacity);
    rc = block ? mpti_safetensors_crc(s, block, capacity, &crc) : mpti_safetensors_no_memory(s);
    mpti_free(&s->ctx->desc.allocator, block, capacity);
    snprintf(digits, sizeof digits, "%08x", (unsigned)crc);
    if (rc == MPT_OK && strcmp(digits, s->checksum) != 0)
        rc = MPTI_DAMAGED(&s->ctx->error,
                          "%s: its checksum is %s, its content has %s: the file is damaged",
                          mpti_path_tail(s->path), s->checksum, digits);
    return mpti_report(s->ctx, rc);
}

/* ---- safetensors, writing -------------------------------------------------------------------- */
typedef struct mpti_pending {
    char *name;
    const void *data;
    size_t bytes;
    const struct mpti_safetensors_type *type;
    int64_t dims[MPT_MAX_DIMS];
    int num_dims;
} mpti_pending;

struct mpt_safetensors_writer {
    mpt_ctx *ctx;
    mpti_output output;
    mpti_buffer metadata; /* ,"key":"value" ... */
    mpti_buffer tensors;  /* of mpti_pending */
    mpti_buffer header;
    int checksum;
    bool no_memory;     /* an addition to one of these texts failed */
    const char *closed; /* why nothing more can be added; NULL: it can */
};

static mpt_result mpti_safetensors_writer_fail(mpt_safetensors_writer *w, mpt_result code,
                                               const char *what, const char *name) {
    return MPTI_REPORT(w->ctx, code, "%s: '%.80s' %s", mpti_path_tail(w->output.path), name, what);
}

static void mpti_text_add(mpt_safetensors_writer *w, mpti_buffer *b, const char *text) {
    if (!mpti_buffer_append(b, text, strlen(text))) w->no_memory = true;
}

static void mpti_text_add_quoted(mpt_safetensors_writer *w, mpti_buffer *b, const char *text) {
    char piece[8];

    mpti_text_add(w, b, "\"");
    for (; *text; text++) {
        bool escape = *text == '"' || *text == '\\';
        unsigned char c = (unsigned char)*text;

        snprintf(piece, sizeof piece, c < 0x20 ? "\\u%04x" : escape ? "\\%c" : "%c", c);
        mpti_text_add(w, b, piece);
    }
    mpti_text_add(w, b, "\"");
}

static bool mpti_text_is_utf8(const char *text) {
    mpt_bytes bytes;

    bytes.data = (const uint8_t *)text;
    bytes.size = text ? strlen(text) : 0;
    return text && mpti_utf8_is_valid(bytes);
}

MPT_API mpt_result mpt_safetensors_writer_open(mpt_ctx *ctx,
                                               const mpt_safetensors_writer_desc *desc,
                                               mpt_safetensors_writer **out) {
    const mpt_allocator *a;
    mpt_safetensors_writer *w;
    mpt_result rc;

    if (!ctx || !out) return MPT_ERR_INVALID_ARGUMENT;
    *out = NULL;
    a = &ctx->desc.allocator;
    rc = mpti_safetensors_host(&ctx->error, desc ? desc->path : NULL);
    if (rc) return mpti_report(ctx, rc);
    w = (mpt_safetensors_writer *)mpti_calloc(a, 1, sizeof *w);
    if (!w) return MPTI_REPORT(ctx, MPT_ERR_OUT_OF_MEMORY, "no memory for a writer");
    w->ctx = ctx;
    w->checksum = desc->checksum;
    w->metadata.allocator = w->tensors.allocator = w->header.allocator = a;
    rc = mpti_output_open(a, desc->io ? desc->io : mpt_io_files(), desc->path, &ctx->error,
                          &w->output);
    if (rc) mpt_safetensors_writer_close(w);
    else *out = w;
    return mpti_report(ctx, rc);
}

MPT_API void mpt_safetensors_writer_close(mpt_safetensors_writer *w) {
    mpti_pending *pending;
    size_t i;

    if (!w) return;
    pending = (mpti_pending *)(void *)w->tensors.data;
    for (i = 0; i < w->tensors.size / sizeof *pending; i++)
        mpti_strfree(&w->ctx->desc.allocator, pending[i].name);
    mpti_buffer_free(&w->tensors);
    mpti_buffer_free(&w->metadata);
    mpti_buffer_free(&w->header);
    if (w->output.allocator) mpti_output_close(&w->output);
    mpti_free(&w->ctx->desc.allocator, w, sizeof *w);
}

MPT_API mpt_result mpt_safetensors_writer_add(mpt_safetensors_writer *w, const char *name,
                                              const mpt_tensor *tensor) {
    mpti_pending p;
    size_t count, i;

    if (!w || !name || !tensor) return MPT_ERR_INVALID_ARGUMENT;
    if (w->closed) return mpti_safetensors_writer_fail(w, MPT_ERR_INVALID_STATE, w->closed, name);
    memset(&p, 0, sizeof p);
    for (i = 0; i < MPTI_NUM_SAFETENSORS_TYPES; i++)
        if (mpti_safetensors_types[i].dtype == (int)tensor->dtype)
            p.type = &mpti_safetensors_types[i];
    if (!p.type || !mpti_tensor_elements(tensor, &count) ||
        !mpti_mul(count, p.type->size, &p.bytes))
        return mpti_safetensors_writer_fail(w, MPT_ERR_INVALID_ARGUMENT,
                                            "has no valid dtype, dims or data", name);
    if (!mpti_text_is_utf8(name) || !strcmp(name, "__metadata__"))
        return mpti_safetensors_writer_fail(w, MPT_ERR_INVALID_ARGUMENT, "can't be a tensor's name",
                                            name);
    p.data = tensor->data;
    p.num_dims = tensor->num_dims;
    memcpy(p.dims, tensor->dims, sizeof p.dims);
    p.name = mpti_strdup(&w->ctx->desc.allocator, name);
    if (p.name && mpti_buffer_append(&w->tensors, &p, sizeof p)) return MPT_OK;
    mpti_strfree(&w->ctx->desc.allocator, p.name);
    return mpti_safetensors_writer_fail(w, MPT_ERR_OUT_OF_MEMORY, "finds no memory", name);
}

MPT_API mpt_result mpt_safetensors_writer_add_metadata(mpt_safetensors_writer *w, const char *key,
                                                       const char *value) {
    size_t before;
    mpt_result rc = MPT_OK;

    if (!w || !key || !value) return MPT_ERR_INVALID_ARGUMENT;
    if (w->closed) return mpti_safetensors_writer_fail(w, MPT_ERR_INVALID_STATE, w->closed, key);
    if (!mpti_text_is_utf8(key) || !mpti_text_is_utf8(value) || !strcmp(key, "mptrain.crc32c"))
        return mpti_safetensors_writer_fail(w, MPT_ERR_INVALID_ARGUMENT,
                                            "or its value is no valid metadata", key);
    before = w->metadata.size;
    mpti_text_add(w, &w->metadata, ",");
    mpti_text_add_quoted(w, &w->metadata, key);
    mpti_text_add(w, &w->metadata, ":");
    if (!mpti_buffer_append(&w->metadata, "", 1)) w->no_memory = true;
    /* quotes within texts are escaped, so ,"key": is found only where a key is */
    if (w->no_memory)
        rc = mpti_safetensors_writer_fail(w, MPT_ERR_OUT_OF_MEMORY, "finds no memory", key);
    else if (strstr((const char *)w->metadata.data, (const char *)w->metadata.data + before) !=
             (const char *)w->metadata.data + before)
        rc = mpti_safetensors_writer_fail(w, MPT_ERR_INVALID_ARGUMENT,
                                          "comes twice in the metadata", key);
    w->metadata.size = rc ? before : w->metadata.size - 1;
    if (rc == MPT_OK) mpti_text_add_quoted(w, &w->metadata, value);
    if (rc == MPT_OK && w->no_memory)
        rc = mpti_safetensors_writer_fail(w, MPT_ERR_OUT_OF_MEMORY, "finds no memory", key);
    return rc;
}

static int mpti_compare_pending_names(const void *a, const void *b) {
    return strcmp(((const mpti_pending *)a)->name, ((const mpti_pending *)b)->name);
}

static int mpti_compare_pending(const void *a, const void *b) {
    const mpti_pending *x = (const mpti_pending *)a, *y = (const mpti_pending *)b;

    if (x->type != y->type) return x->type > y->type ? -1 : 1;
    return strcmp(x->name, y->name);
}

static void mpti_safetensors_writer_header(mpt_safetensors_writer *w, const mpti_pending *p,
                                           size_t n) {
    mpti_buffer *b = &w->header;
    unsigned long long at = 0;
    char text[96];
    size_t i;
    int k;

    mpti_text_add(w, b,
                  w->checksum        ? MPTI_CHECKSUM_PREFIX "00000000\""
                  : w->metadata.size ? "{\"__metadata__\":{"
                                     : "{");
    i = w->checksum ? 0 : 1; /* the first pair has a comma only behind the checksum */
    if (w->metadata.size && !mpti_buffer_append(b, w->metadata.data + i, w->metadata.size - i))
        w->no_memory = true;
    if (w->checksum || w->metadata.size) mpti_text_add(w, b, n ? "}," : "}");
    for (i = 0; i < n; i++, p++) {
        mpti_text_add_quoted(w, b, p->name);
        snprintf(text, sizeof text, ":{\"dtype\":\"%s\",\"shape\":[", p->type->name);
        mpti_text_add(w, b, text);
        for (k = 0; k < p->num_dims; k++) {
            snprintf(text, sizeof text, k ? ",%lld" : "%lld", (long long)p->dims[k]);
            mpti_text_add(w, b, text);
        }
        snprintf(text, sizeof text, "],\"data_offsets\":[%llu,%llu]}%s", at, at + p->bytes,
                 i + 1 < n ? "," : "");
        mpti_text_add(w, b, text);
        at += p->bytes;
    }
    mpti_text_add(w, b, "}");
    while (b->size % 8 && !w->no_memory) mpti_text_add(w, b, " ");
}

static mpt_result mpti_safetensors_writer_put(mpt_safetensors_writer *w, const mpti_pending *p,
                                              size_t n) {
    mpt_result rc;
    uint32_t crc;
    uint8_t head[8];
    char digits[MPTI_CHECKSUM_DIGITS + 1];
    size_t i;

    mpti_store_u64(head, w->header.size);
    if (w->checksum) {
        crc = mpt_crc32c(mpt_crc32c(0, head, sizeof head), w->header.data, w->header.size);
        for (i = 0; i < n; i++) crc = mpt_crc32c(crc, p[i].data, p[i].bytes);
        snprintf(digits, sizeof digits, "%08x", (unsigned)crc);
        memcpy(w->header.data + MPTI_CHECKSUM_OFFSET - 8, digits, MPTI_CHECKSUM_DIGITS);
    }
    rc = mpti_output_write(&w->output, &w->ctx->error, head, sizeof head);
    if (rc == MPT_OK)
        rc = mpti_output_write(&w->output, &w->ctx->error, w->header.data, w->header.size);
    for (i = 0; i < n && rc == MPT_OK; i++)
        rc = mpti_output_write(&w->output, &w->ctx->error, p[i].data, p[i].bytes);
    return rc == MPT_OK ? mpti_output_finish(&w->output, &w->ctx->error) : rc;
}

MPT_API mpt_result mpt_safetensors_writer_finish(mpt_safetensors_writer *w) {
    mpti_pending *p;
    size_t n, i;
    mpt_result rc;

    if (!w) return MPT_ERR_INVALID_ARGUMENT;
    if (w->closed)
        return mpti_safetensors_writer_fail(w, MPT_ERR_INVALID_STATE, w->closed, "finish");
    w->closed = "comes after the writer has failed: close it";
    p = (mpti_pending *)(void *)w->tensors.data;
    n = w->tensors.size / sizeof *p;
    if (n) qsort(p, n, sizeof *p, mpti_compare_pending_names);
    for (i = 1; i < n; i++)
        if (!strcmp(p[i].name, p[i - 1].name))
            return mpti_safetensors_writer_fail(w, MPT_ERR_INVALID_ARGUMENT, "names two tensors",
                                                p[i].name);
    if (n) qsort(p, n, sizeof *p, mpti_compare_pending);
    mpti_safetensors_writer_header(w, p, n);
    if (w->no_memory)
        return mpti_safetensors_writer_fail(w, MPT_ERR_OUT_OF_MEMORY, "finds no memory", "header");
    if (w->header.size > MPT_SAFETENSORS_MAX_HEADER)
        return mpti_safetensors_writer_fail(w, MPT_ERR_UNSUPPORTED,
                                            "is longer than the format allows", "header");
    rc = mpti_safetensors_writer_put(w, p, n);
    if (rc == MPT_OK) w->closed = "comes after finish";
    return mpti_report(w->ctx, rc);
}

/* =================================================================================================
 * >>state   12.5 State: hash, export and import, checkpoints
 * =================================================================================================
 *
 * Problem: a run has to go on where it stopped, to the bit, and what it learned has to be readable
 *          by other programs.
 * Idea:    two safetensors files: a checkpoint holds flat rows as they are in memory and the
 *          counters of the step; an export holds PyTorch's names and layout.
 * Shapes:  ours (K,R,S,C) and (out, h w c); theirs (K,C,R,S) and (out, c h w)
 * Tested:  tests/test_state.c
 * Next:    the end. >>read leads back to the beginning.
 */
/* ---- what was learned, as one number --------------------------------------------------------- */
static void mpti_sha256_floats(mpti_sha256 *s, const float *x, int64_t n) {
    uint8_t bytes[4];
    int64_t i;

    for (i = 0; i < n; i++) {
        mpti_store_u32(bytes, mpti_f32_bits(x[i]));
        mpti_sha256_add(s, bytes, sizeof bytes);
    }
}

MPT_API mpt_result mpt_trainer_sha256(mpt_trainer *t, char hex[65]) {
    mpti_sha256 s;
    mpt_result rc;

    if (!t || !hex) return MPT_ERR_INVALID_ARGUMENT;
    rc = mpti_trainer_fetch(t);
    if (rc) return mpti_report(t->ctx, rc);
    mpti_sha256_init(&s);
    mpti_sha256_floats(&s, t->host.masters, t->model->num_params);
    mpti_sha256_floats(&s, t->host.running,
                       t->model->num_stats); /* mean and var of each, in model order */
    mpti_sha256_finish(&s, hex);
    return MPT_OK;
}

/* ---- tensors under PyTorch's names and in its layout --------------------------------------------
   convolution (K,R,S,C) -> (K,C,R,S); dense behind a picture (out, h w c) -> (out, c h w) */
typedef enum mpti_torch_part {
    MPTI_TORCH_WEIGHT = 0,
    MPTI_TORCH_BIAS,
    MPTI_TORCH_MEAN,
    MPTI_TORCH_VAR
} mpti_torch_part;

typedef struct mpti_torch {
    char name[MPTI_NAME_BYTES + 16];
    float *data; /* in the trainer, our layout */
    int64_t count;
    int64_t dims[4];
    int num_dims;
    /* count = outer * height * width * channels, of which the last three turn to c, h, w */
    int64_t height, width, channels;
} mpti_torch;

/* Tensor `part` of a layer; false: it has none of that kind. */
static bool mpti_torch_tensor(const mpt_trainer *t, int v, mpti_torch_part part, mpti_torch *out) {
    static const char *const suffixes[] = {"weight", "bias", "running_mean", "running_var"};
    const mpti_node *node = &t->model->nodes[v], *in;
    bool norm = node->kind == MPTI_KIND_BATCHNORM;

    if (node->num_params == 0 || (part >= MPTI_TORCH_MEAN && !norm) ||
        (part == MPTI_TORCH_BIAS && !norm && !node->use_bias))
        return false;
    memset(out, 0, sizeof *out);
    in = &t->model->nodes[node->in[0]];
    snprintf(out->name, sizeof out->name, "%s.%s", node->name, suffixes[part]);
    out->height = out->width = 1;
    out->num_dims = 1;
    out->dims[0] = out->count = out->channels = node->c;
    if (part >= MPTI_TORCH_MEAN) {
        out->data = t->host.running + node->stat_offset + (part == MPTI_TORCH_VAR ? node->c : 0);
        return true;
    }
    out->data = t->host.masters + node->param_offset;
    if (part == MPTI_TORCH_BIAS) out->data += norm ? node->c : mpti_node_weights(node);
    if (part == MPTI_TORCH_BIAS || norm) return true;
    out->count = mpti_node_weights(node);
    if (node->kind == MPTI_KIND_CUSTOM) { /* a flat row, whatever it means */
        out->dims[0] = out->channels = out->count;
        return true;
    }
    out->channels = in->c;
    out->height = node->kind == MPTI_KIND_CONV2D ? node->kernel : in->h;
    out->width = node->kind == MPTI_KIND_CONV2D ? node->kernel : in->w;
    out->num_dims = node->kind == MPTI_KIND_CONV2D ? 4 : 2;
    out->dims[1] = node->kind == MPTI_KIND_CONV2D ? in->c : mpti_node_elements(in);
    out->dims[2] = out->dims[3] = node->kernel;
    return true;
}

/* to_torch: ours -> theirs; else theirs -> ours. */
static void mpti_torch_permute(const mpti_torch *x, float *theirs, bool to_torch) {
    int64_t area = x->height * x->width, inner = area * x->channels, i;

    for (i = 0; i < x->count; i++) {
        int64_t rest = i % inner, channel = rest % x->channels, pixel = rest / x->channels;
        int64_t there = i - rest + channel * area + pixel;
        if (to_torch) theirs[there] = x->data[i];
        else x->data[i] = theirs[there];
    }
}

static mpt_result mpti_export_add(mpt_safetensors_writer *w, const mpti_torch *x, float *theirs) {
    mpt_tensor tensor;
    int i;

    mpti_torch_permute(x, theirs, true);
    memset(&tensor, 0, sizeof tensor);
    tensor.data = theirs;
    tensor.dtype = MPT_F32;
    tensor.num_dims = x->num_dims;
    for (i = 0; i < x->num_dims; i++) tensor.dims[i] = x->dims[i];
    return mpt_safetensors_writer_add(w, x->name, &tensor);
}

static mpt_result mpti_export_all(mpt_trainer *t, mpt_safetensors_writer *w, float *buffer,
                                  int64_t *tracked) {
    mpti_torch x;
    mpt_tensor scalar;
    char name[MPTI_NAME_BYTES + 24];
    mpt_result rc = mpt_safetensors_writer_add_metadata(w, "format", "pt");
    int v, part;

    *tracked = t->optimizer.applied_steps;
    memset(&scalar, 0, sizeof scalar);
    scalar.data = tracked;
    scalar.dtype = MPT_I64;
    for (v = 1; v < t->model->num_nodes && rc == MPT_OK; v++) {
        for (part = MPTI_TORCH_WEIGHT; part <= MPTI_TORCH_VAR && rc == MPT_OK; part++) {
            if (!mpti_torch_tensor(t, v, (mpti_torch_part)part, &x)) continue;
            rc = mpti_export_add(w, &x, buffer);
            buffer += x.count;
        }
        if (t->model->nodes[v].kind != MPTI_KIND_BATCHNORM || rc) continue;
        snprintf(name, sizeof name, "%s.num_batches_tracked",
                 t->model->nodes[v].name); /* strict loading wants it */
        rc = mpt_safetensors_writer_add(w, name, &scalar);
    }
    return rc;
}

MPT_API mpt_result mpt_trainer_export(mpt_trainer *t, const mpt_export_desc *desc) {
    const mpt_allocator *a;
    mpt_safetensors_writer_desc d;
    mpt_safetensors_writer *w = NULL;
    size_t bytes;
    int64_t tracked;
    float *buffer;
    mpt_result rc;
    int i;

    if (!t || !desc || !desc->path || (desc->num_metadata && !desc->metadata))
        return MPT_ERR_INVALID_ARGUMENT;
    a = &t->ctx->desc.allocator;
    bytes = (size_t)(t->model->num_params + t->model->num_stats) * sizeof *buffer;
    buffer = (float *)mpti_alloc(a, bytes);
    if (!buffer)
        return MPTI_REPORT(t->ctx, MPT_ERR_OUT_OF_MEMORY, "no memory to export weights");
    memset(&d, 0, sizeof d);
    d.path = desc->path;
    d.io = desc->io;
    rc = mpti_trainer_fetch(t);
    if (rc == MPT_OK) rc = mpt_safetensors_writer_open(t->ctx, &d, &w);
    for (i = 0; i < desc->num_metadata && rc == MPT_OK; i++)
        rc = mpt_safetensors_writer_add_metadata(w, desc->metadata[i].key, desc->metadata[i].value);
    if (rc == MPT_OK) rc = mpti_export_all(t, w, buffer, &tracked);
    if (rc == MPT_OK) rc = mpt_safetensors_writer_finish(w);
    mpt_safetensors_writer_close(w);
    mpti_free(a, buffer, bytes);
    return rc;
}

/* Finds a tensor of the given shape in FP32. */
static mpt_result mpti_import_find(mpt_trainer *t, mpt_safetensors *s, const char *path,
                                   const mpti_torch *x, int64_t *index) {
    mpt_safetensors_info info;
    mpt_result rc;
    int i;

    *index = mpt_safetensors_find(s, x->name);
    if (*index < 0)
        return MPTI_FAIL(&t->ctx->error, MPT_ERR_CORRUPT_DATA, "%s: no tensor %s: %s",
                         mpti_path_tail(path), x->name,
                         mpt_safetensors_metadata(s, "mptrain.checkpoint")
                             ? "it is a checkpoint, which is loaded (resumed), not imported"
                             : "is it of another network?");
    rc = mpt_safetensors_get(s, *index, &info);
    if (rc) return rc;
    for (i = 0; i < x->num_dims && info.num_dims == x->num_dims && info.dims[i] == x->dims[i]; i++)
        continue;
    if (i == x->num_dims && info.num_dims == x->num_dims && info.has_dtype && info.dtype == MPT_F32)
        return MPT_OK;
    return MPTI_FAIL(&t->ctx->error, MPT_ERR_CORRUPT_DATA,
                     "%s: tensor %s has another shape or type than this model (F32, %lld elements)",
                     mpti_path_tail(path), x->name, (long long)x->count);
}

/* apply false: is everything there? true: takes it. So a file that doesn't fit changes nothing. */
static mpt_result mpti_import_walk(mpt_trainer *t, mpt_safetensors *s, const char *path,
                                   float *buffer, bool apply) {
    mpti_torch x;
    int64_t index;
    mpt_result rc = MPT_OK;
    int v, part;

    for (v = 1; v < t->model->num_nodes && rc == MPT_OK; v++)
        for (part = MPTI_TORCH_WEIGHT; part <= MPTI_TORCH_VAR && rc == MPT_OK; part++) {
            if (!mpti_torch_tensor(t, v, (mpti_torch_part)part, &x)) continue;
            rc = mpti_import_find(t, s, path, &x, &index);
            if (rc == MPT_OK && !apply)
                rc = mpt_safetensors_read(s, index, buffer, (size_t)x.count * sizeof *buffer);
            if (rc == MPT_OK && apply) mpti_torch_permute(&x, buffer, false);
            buffer += x.count;
        }
    return rc;
}

MPT_API mpt_result mpt_trainer_import(mpt_trainer *t, const mpt_io *io, const char *path) {
    mpt_safetensors_desc d;
    mpt_safetensors *s = NULL;
    size_t bytes;
    float *buffer;
    mpt_result rc;

    if (!t || !path) return MPT_ERR_INVALID_ARGUMENT;
    bytes = (size_t)(t->model->num_params + t->model->num_stats) * sizeof *buffer;
    buffer = (float *)mpti_alloc(&t->ctx->desc.allocator, bytes);
    if (!buffer)
        return MPTI_REPORT(t->ctx, MPT_ERR_OUT_OF_MEMORY, "no memory to import weights");
    memset(&d, 0, sizeof d);
    d.path = path;
    d.io = io;
    rc = mpt_safetensors_open(t->ctx, &d, &s);
    if (rc == MPT_OK) rc = mpti_import_walk(t, s, path, buffer, false);
    if (rc == MPT_OK) rc = mpti_trainer_fetch(t); /* moments stay what they are */
    if (rc == MPT_OK) rc = mpti_import_walk(t, s, path, buffer, true);
    if (rc == MPT_OK) rc = mpti_trainer_weights_changed(t);
    mpt_safetensors_close(s);
    mpti_free(&t->ctx->desc.allocator, buffer, bytes);
    return mpti_report(t->ctx, rc);
}

/* ---- checkpoints: everything that goes into the next step ---------------------------------------
   One safetensors file with a checksum over all of it. Flat rows as they are in memory: nothing is
   rounded or turned, so a run goes on bit for bit. */
enum { MPTI_COUNTERS = 11 };

typedef struct mpti_checkpoint_row {
    const char *name;
    float *data; /* NULL: this trainer has none */
    int64_t count;
} mpti_checkpoint_row;
enum { MPTI_CHECKPOINT_ROWS = 4 };

static void mpti_checkpoint_rows(mpt_trainer *t, mpti_checkpoint_row rows[MPTI_CHECKPOINT_ROWS]) {
    static const char *const names[MPTI_CHECKPOINT_ROWS] = {"mptrain.weights",
                                                            "mptrain.first_moment",
                                                            "mptrain.second_moment",
                                                            "mptrain.running"};
    int i;

    for (i = 0; i < MPTI_CHECKPOINT_ROWS; i++) {
        rows[i].name = names[i];
        rows[i].count = t->model->num_params;
    }
    rows[0].data = t->host.masters;
    rows[1].data = t->host.first;
    rows[2].data = t->host.second;
    rows[3].data = t->model->num_stats ? t->host.running : NULL;
    rows[3].count = t->model->num_stats;
}

/* A number that differs for models whose parameters mean different things. */
static uint32_t mpti_model_fingerprint(const mpt_model *m) {
    uint32_t crc = 0;
    int v, k;

    for (v = 0; v < m->num_nodes; v++) {
        const mpti_node *n = &m->nodes[v];
        char text[160];
        int size = snprintf(text, sizeof text, "%d %d %d %d %d %d %d", (int)n->kind, n->h, n->w,
                            n->c, n->kernel, n->stride, n->padding);
        for (k = 0; k < n->num_in; k++)
            size += snprintf(text + size, sizeof text - (size_t)size, " %d", n->in[k]);
        text[size++] = ';';
        crc = mpt_crc32c(crc, text, (size_t)size);
    }
    return crc;
}

static void mpti_checkpoint_counters(const mpt_trainer *t, int64_t c[MPTI_COUNTERS]) {
    c[0] = t->step;
    c[1] = t->optimizer.applied_steps;
    c[2] = t->scaler.good_steps;
    c[3] = t->scaler.skips_at_min;
    c[4] = t->scaler.num_skipped;
    c[5] = (int64_t)mpti_f32_bits(t->scaler.scale);
    c[6] = (int64_t)mpti_model_fingerprint(t->model);
    c[7] = (int64_t)t->desc.seed;
    c[8] = (int64_t)t->desc.optimizer.kind;
    c[9] = (int64_t)t->batch_size * t->desc.accumulate_steps;
    c[10] = t->desc.total_steps;
}

static mpt_result mpti_checkpoint_add(mpt_safetensors_writer *w, const char *name, mpt_dtype dtype,
                                      void *data, int64_t count) {
    mpt_tensor tensor;

    memset(&tensor, 0, sizeof tensor);
    tensor.data = data;
    tensor.dtype = dtype;
    tensor.num_dims = 1;
    tensor.dims[0] = count;
    return mpt_safetensors_writer_add(w, name, &tensor);
}

MPT_API mpt_result mpt_trainer_save(mpt_trainer *t, mpt_loader *data, const mpt_io *io,
                                    const char *path) {
    mpti_checkpoint_row rows[MPTI_CHECKPOINT_ROWS];
    int64_t counters[MPTI_COUNTERS];
    mpt_safetensors_writer_desc d;
    mpt_safetensors_writer *w = NULL;
    mpt_bytes position = {NULL, 0};
    mpt_result rc;
    int i;

    if (!t || !path) return MPT_ERR_INVALID_ARGUMENT;
    if (t->microbatches > 0)
        return MPTI_REPORT(t->ctx, MPT_ERR_INVALID_STATE,
                           "mpt_trainer_save: in the middle of a step");
    memset(&d, 0, sizeof d);
    d.path = path;
    d.io = io;
    d.checksum = 1;
    rc = mpti_trainer_fetch(t);
    if (rc) return mpti_report(t->ctx, rc);
    mpti_checkpoint_rows(t, rows);
    mpti_checkpoint_counters(t, counters);
    rc = data ? mpt_loader_get_state(data, &position) : MPT_OK;
    if (rc == MPT_OK) rc = mpt_safetensors_writer_open(t->ctx, &d, &w);
    if (rc == MPT_OK) rc = mpt_safetensors_writer_add_metadata(w, "mptrain.checkpoint", "1");
    if (rc == MPT_OK)
        rc = mpti_checkpoint_add(w, "mptrain.counters", MPT_I64, counters, MPTI_COUNTERS);
    for (i = 0; i < MPTI_CHECKPOINT_ROWS && rc == MPT_OK; i++)
        if (rows[i].data)
            rc = mpti_checkpoint_add(w, rows[i].name, MPT_F32, rows[i].data, rows[i].count);
    if (rc == MPT_OK && position.size)
        rc = mpti_checkpoint_add(w, "mptrain.loader", MPT_U8, (void *)(uintptr_t)position.data,
                                 (int64_t)position.size);
    if (rc == MPT_OK) rc = mpt_safetensors_writer_finish(w);
    mpt_safetensors_writer_close(w);
    return rc;
}

/* Is the tensor there, as it must be? */
static mpt_result mpti_checkpoint_find(mpt_trainer *t, mpt_safetensors *s, const char *path,
                                       const char *name, mpt_dtype dtype, int64_t count,
                                       int64_t *index) {
    mpt_safetensors_info info;
    mpt_result rc;

    *index = mpt_safetensors_find(s, name);
    rc = *index < 0 ? MPT_END : mpt_safetensors_get(s, *index, &info);
    if (rc < 0) return rc;
    if (rc == MPT_OK && info.has_dtype && info.dtype == dtype && info.count == (uint64_t)count)
        return MPT_OK;
    return MPTI_FAIL(&t->ctx->error, MPT_ERR_CORRUPT_DATA,
                     "%s: %s is missing or of another size: it is no checkpoint of this model",
                     mpti_path_tail(path), name);
}

static mpt_result mpti_checkpoint_loader(mpt_trainer *t, mpt_safetensors *s, mpt_loader *data,
                                         const char *path) {
    int64_t index = mpt_safetensors_find(s, "mptrain.loader");
    mpt_safetensors_info info;
    mpt_bytes state;
    uint8_t *bytes;
    mpt_result rc;

    if (index < 0)
        return MPTI_FAIL(&t->ctx->error, MPT_ERR_CORRUPT_DATA,
                         "%s: it was saved without a position in the data", mpti_path_tail(path));
    rc = mpt_safetensors_get(s, index, &info);
    if (rc) return rc;
    bytes = (uint8_t *)mpti_alloc(&t->ctx->desc.allocator, (size_t)info.bytes + 1);
    if (!bytes)
        return MPTI_FAIL(&t->ctx->error, MPT_ERR_OUT_OF_MEMORY,
                         "no memory for the position in the data");
    state.data = bytes;
    state.size = (size_t)info.bytes;
    rc = mpt_safetensors_read(s, index, bytes, state.size);
    if (rc == MPT_OK) rc = mpt_loader_set_state(data, state);
    mpti_free(&t->ctx->desc.allocator, bytes, (size_t)info.bytes + 1);
    return rc;
}

/* Reads the counters and looks whether they can be those of this trainer. */
static mpt_result mpti_checkpoint_check_counters(mpt_trainer *t, mpt_safetensors *s,
                                                 const char *path, int64_t c[MPTI_COUNTERS]) {
    mpt_error *err = &t->ctx->error;
    int64_t index;
    mpt_result rc = mpti_checkpoint_find(t, s, path, "mptrain.counters", MPT_I64, MPTI_COUNTERS,
                                         &index);

    if (rc == MPT_OK)
        rc = mpt_safetensors_read(s, index, c, sizeof *c * (size_t)MPTI_COUNTERS);
    if (rc) return rc;
    if (c[6] != (int64_t)mpti_model_fingerprint(t->model))
        return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT, "%s: a checkpoint of another model",
                         mpti_path_tail(path));
    if (c[8] != (int64_t)t->desc.optimizer.kind)
        return MPTI_FAIL(err, MPT_ERR_INVALID_ARGUMENT, "%s: a checkpoint of another optimizer",
                         mpti_path_tail(path));
    if (c[1] < 0 || c[1] > c[0] || c[2] < 0 || c[2] > INT32_MAX || c[3] < 0 || c[3] > INT32_MAX)
        return MPTI_FAIL(err, MPT_ERR_CORRUPT_DATA, "%s: its counters are damaged",
                         mpti_path_tail(path));
    return MPT_OK;
}

/* Both are the caller's right, and often a slip. */
static void mpti_checkpoint_warn(const mpt_trainer *t, const char *path, const int64_t *c) {
    int64_t records = (int64_t)t->batch_size * t->desc.accumulate_steps;
    char text[320];

    if (c[9] != records) {
        snprintf(text, sizeof text,
                 "%s: it was trained with %lld records a step, this run takes %lld",
                 mpti_path_tail(path), (long long)c[9], (long long)records);
        mpti_log(t->ctx, MPT_LOG_WARNING, text);
    }
    if (c[10] != t->desc.total_steps) {
        snprintf(text, sizeof text, "%s: its schedule ran to step %lld, this one runs to %lld",
                 mpti_path_tail(path), (long long)c[10], (long long)t->desc.total_steps);
        mpti_log(t->ctx, MPT_LOG_WARNING, text);
    }
}

static mpt_result mpti_checkpoint_scaler(mpt_trainer *t, const char *path, const int64_t *c,
                                         mpt_loss_scaler *out) {
    mpt_loss_scaler saved = t->scaler;
    mpt_result rc;

    *out = t->scaler;
    saved.scale = mpti_f32_from_bits((uint32_t)c[5]);
    saved.good_steps = (int)c[2];
    saved.skips_at_min = (int)c[3];
    saved.num_skipped = c[4];
    rc = mpt_loss_scaler_restore(out, &saved);
    if (rc == MPT_OK) return rc;
    return MPTI_FAIL(&t->ctx->error, rc, "%s: its loss scaler is damaged", mpti_path_tail(path));
}

/* The rows, one behind the other, into buffer; or the number of floats that they take. */
static mpt_result mpti_checkpoint_read(mpt_trainer *t, mpt_safetensors *s, const char *path,
                                       float *buffer, int64_t *count) {
    mpti_checkpoint_row rows[MPTI_CHECKPOINT_ROWS];
    int64_t index;
    mpt_result rc = MPT_OK;
    int i;

    mpti_checkpoint_rows(t, rows);
    for (i = 0, *count = 0; i < MPTI_CHECKPOINT_ROWS && rc == MPT_OK; i++) {
        if (!rows[i].data) continue;
        rc = mpti_checkpoint_find(t, s, path, rows[i].name, MPT_F32, rows[i].count, &index);
        if (rc == MPT_OK && buffer)
            rc = mpt_safetensors_read(s, index, buffer + *count,
                                      sizeof *buffer * (size_t)rows[i].count);
        *count += rows[i].count;
    }
    return rc;
}

/* From here on nothing fails. */
static void mpti_checkpoint_take(mpt_trainer *t, const float *buffer, const int64_t *c,
                                 const mpt_loss_scaler *scaler) {
    mpti_checkpoint_row rows[MPTI_CHECKPOINT_ROWS];
    int i;

    mpti_checkpoint_rows(t, rows);
    for (i = 0; i < MPTI_CHECKPOINT_ROWS; i++) {
        if (!rows[i].data) continue;
        memcpy(rows[i].data, buffer, sizeof *buffer * (size_t)rows[i].count);
        buffer += rows[i].count;
    }
    t->scaler = *scaler;
    t->step = c[0];
    mpti_optimizer_resume(&t->optimizer, c[1]);
    t->desc.seed = t->net.seed = (uint64_t)c[7];
    memset(&t->last, 0, sizeof t->last);
    t->device.reported = t->step; /* what is under way belongs to the past */
    mpti_trainer_begin_step(t);
}

/* All is read and looked at before anything changes. */
static mpt_result mpti_checkpoint_apply(mpt_trainer *t, mpt_safetensors *s, mpt_loader *data,
                                        const char *path) {
    const mpt_allocator *a = &t->ctx->desc.allocator;
    int64_t c[MPTI_COUNTERS], count;
    mpt_loss_scaler scaler;
    float *buffer;
    mpt_result rc = mpti_checkpoint_check_counters(t, s, path, c);

    if (rc == MPT_OK) rc = mpti_checkpoint_scaler(t, path, c, &scaler);
    if (rc == MPT_OK) rc = mpti_checkpoint_read(t, s, path, NULL, &count);
    if (rc) return rc;
    buffer = (float *)mpti_alloc(a, sizeof *buffer * (size_t)count);
    if (!buffer)
        return MPTI_NO_MEMORY(&t->ctx->error, "%s: no memory to read it", mpti_path_tail(path));
    rc = mpti_checkpoint_read(t, s, path, buffer, &count);
    if (rc == MPT_OK && data) rc = mpti_checkpoint_loader(t, s, data, path);
    if (rc == MPT_OK) {
        mpti_checkpoint_warn(t, path, c);
        mpti_checkpoint_take(t, buffer, c, &scaler);
        rc = mpti_trainer_weights_changed(t);
    }
    mpti_free(a, buffer, sizeof *buffer * (size_t)count);
    return rc;
}

MPT_API mpt_result mpt_trainer_load(mpt_trainer *t, mpt_loader *data, const mpt_io *io,
                                    const char *path) {
    mpt_safetensors_desc d;
    mpt_safetensors *s = NULL;
    mpt_result rc;

    if (!t || !path) return MPT_ERR_INVALID_ARGUMENT;
    memset(&d, 0, sizeof d);
    d.path = path;
    d.io = io;
    rc = mpt_safetensors_open(t->ctx, &d, &s);
    if (rc == MPT_OK && !mpt_safetensors_metadata(s, "mptrain.checkpoint"))
        rc = MPTI_FAIL(&t->ctx->error, MPT_ERR_CORRUPT_DATA,
                       "%s: it is no checkpoint; weights alone are imported, not loaded",
                       mpti_path_tail(path));
    if (rc == MPT_OK) rc = mpt_safetensors_verify(s);
    if (rc == MPT_OK) rc = mpti_checkpoint_apply(t, s, data, path);
    mpt_safetensors_close(s);
    return mpti_report(t->ctx, rc);
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
