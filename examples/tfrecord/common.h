/* tfrecord/common.h - what all commands of the program tfrecord share: messages, signals, standard
   output, lists of files, growing bytes, one table of counters */
#ifndef TFRECORD_COMMON_H
#define TFRECORD_COMMON_H

#include "common/buffer.h"
#include "mptrain.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>

#define TOOL_VERSION "tfrecord " MPT_VERSION_STRING

typedef struct tool { /* one command that runs */
    const char *name; /* "tfrecord cat" */
    mpt_ctx *ctx;
    int64_t max_record_bytes; /* a larger record is an error */
    int status;               /* exit code so far */
    bool output_lost;         /* standard output failed, and that was said */
} tool;

/* ---- messages and signals -------------------------------------------------------------------- */
static const char *tool_error_text(const mpt_ctx *ctx) {
    return mpt_last_error(ctx)->message;
}

/* One line on stderr; the command goes on, but ends with this status. */
__attribute__((format(printf, 3, 0))) static int tool_report(tool *t, int status,
                                                             const char *format, va_list args) {
    char text[1024];

    vsnprintf(text, sizeof text, format, args);
    t->status = status;
    return cli_error(t->name, status, "%s", text);
}

/* What went wrong: exit code 1. */
__attribute__((format(printf, 2, 3))) static int tool_fail(tool *t, const char *format, ...) {
    va_list args;
    int status;

    va_start(args, format);
    status = tool_report(t, CLI_EXIT_FAILURE, format, args);
    va_end(args);
    return status;
}

static int tool_fail_memory(tool *t) {
    return tool_fail(t, "no memory");
}

/* What the user typed wrong: exit code 2. */
__attribute__((format(printf, 2, 3))) static int tool_usage(tool *t, const char *format, ...) {
    va_list args;
    int status;

    va_start(args, format);
    status = tool_report(t, CLI_EXIT_USAGE, format, args);
    va_end(args);
    return status;
}

static bool tool_refuse_dash(tool *t, const char *word) {
    bool dash = cli_refuse_dash(t->name, word);

    if (dash) t->status = CLI_EXIT_FAILURE;
    return dash;
}

static volatile sig_atomic_t tool_signal; /* number of the signal that asked for the end; 0: none */

static void tool_on_signal(int number) {
    tool_signal = number;
}

/* For commands that write: no temporary file is left behind. */
static void tool_catch_signals(void) {
    cli_catch_signals(tool_on_signal);
}

typedef struct tool_settings { /* options that several commands have */
    int64_t threads;           /* 0: as many as there are cores */
    int64_t max_record_bytes;
} tool_settings;

static tool_settings tool_defaults(void) {
    tool_settings s;

    s.threads = 1;
    s.max_record_bytes = (int64_t)1 << 30; /* the library's own default */
    return s;
}

/* threads 1: for one chunk of mpt_parallel_for, since a context is one thread's at a time. */
static mpt_result tool_make_ctx(int64_t threads, mpt_ctx **out) {
    mpt_ctx_desc desc;

    memset(&desc, 0, sizeof desc);
    desc.num_threads = (int)threads;
    return mpt_ctx_create(&desc, out);
}

static int tool_begin(tool *t, const char *name, const tool_settings *settings) {
    memset(t, 0, sizeof *t);
    t->name = name;
    t->max_record_bytes = settings->max_record_bytes;
    if (tool_make_ctx(settings->threads, &t->ctx)) return tool_fail_memory(t);
    return CLI_EXIT_OK;
}

/* Did standard output fail? Asked soon after printing, while errno tells why. A reader that has
   read enough is no error. */
static bool tool_output_lost(tool *t) {
    if (t->output_lost || !ferror(stdout)) return t->output_lost;
    t->output_lost = true;
    if (errno != EPIPE) tool_fail(t, "can't write to standard output: %s", cli_errno_text(errno));
    return true;
}

/* Frees what tool_begin made and gives the exit code. */
static int tool_end(tool *t) {
    fflush(stdout);
    tool_output_lost(t);
    mpt_ctx_destroy(t->ctx);
    t->ctx = NULL;
    if (!tool_signal) return t->status;
    return cli_error(t->name, 128 + (int)tool_signal, "interrupted");
}

/* ---- strings and bytes ----------------------------------------------------------------------- */
static mpt_bytes tool_bytes(const void *data, size_t size) {
    mpt_bytes b;

    b.data = (const uint8_t *)data;
    b.size = size;
    return b;
}

static char *tool_copy(const char *text, size_t n) { /* NULL: no memory */
    char *copy = (char *)malloc(n + 1);

    if (!copy) return NULL;
    memcpy(copy, text, n);
    copy[n] = 0;
    return copy;
}

__attribute__((format(printf, 1, 2))) static char *tool_format(const char *format, ...) {
    va_list args;
    char *text;
    int n;

    va_start(args, format);
    n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    text = n < 0 ? NULL : (char *)malloc((size_t)n + 1);
    if (!text) return NULL;
    va_start(args, format);
    vsnprintf(text, (size_t)n + 1, format, args);
    va_end(args);
    return text;
}

typedef struct tool_strings { /* a list that owns its texts */
    char **items;             /* [count] */
    int64_t count, capacity;
} tool_strings;

static void tool_strings_free(tool_strings *s) {
    int64_t i;

    for (i = 0; i < s->count; i++) free(s->items[i]);
    free(s->items);
    memset(s, 0, sizeof *s);
}

static bool tool_strings_take(tool_strings *s, char *text) { /* text NULL or no memory: false */
    if (!text) return false;
    if (s->count == s->capacity) {
        int64_t capacity = s->capacity ? s->capacity * 2 : 64;
        char **items = (char **)realloc(s->items, (size_t)capacity * sizeof *items);
        if (!items) {
            free(text);
            return false;
        }
        s->items = items;
        s->capacity = capacity;
    }
    s->items[s->count++] = text;
    return true;
}

static int tool_compare_strings(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* A whole file that the command line names: a failure is told, and `out` is empty then. */
static bool tool_load_file(tool *t, const char *path, size_t limit, byte_buffer *out) {
    char why[600];

    memset(out, 0, sizeof *out);
    if (tool_refuse_dash(t, path)) return false;
    if (byte_buffer_read(out, path, limit, why)) return true;
    tool_fail(t, "%s", why);
    byte_buffer_free(out);
    return false;
}

/* ---- lists of files -------------------------------------------------------------------------- */
/* Takes apart name@N; false if the text is none. */
static bool tool_split_at(const char *text, size_t *prefix, int64_t *count) {
    const char *at = strrchr(text, '@');

    if (!at || at == text || !cli_int_from_text(at + 1, count)) return false;
    *prefix = (size_t)(at - text);
    return at[1] != '+' && *count >= 1 && *count <= 99999;
}

static char *tool_shard_name(const char *prefix, size_t n, int64_t shard, int64_t count) {
    return tool_format("%.*s-%05d-of-%05d", (int)n, prefix, (int)shard, (int)count);
}

typedef struct tool_found { /* what the callback below fills */
    tool_strings *files;
    bool no_memory;
} tool_found;

static void tool_add_found(const char *path, void *arg) {
    tool_found *found = (tool_found *)arg;

    if (!tool_strings_take(found->files, tool_copy(path, strlen(path)))) found->no_memory = true;
}

static void tool_expand_pattern(tool *t, const char *pattern, tool_strings *files) {
    const mpt_io *io = mpt_io_files();
    int64_t before = files->count;
    tool_found found;

    found.files = files;
    found.no_memory = false;
    if (!io->list || io->list(pattern, tool_add_found, &found, io->user)) {
        tool_fail(t, "%s: can't list it: %s", pattern, cli_errno_text(errno));
    } else if (found.no_memory) {
        tool_fail_memory(t);
    } else if (files->count == before) {
        tool_fail(t, "%s: no file matches", pattern);
    } else {
        qsort(files->items + before, (size_t)(files->count - before), sizeof *files->items,
              tool_compare_strings);
    }
}

static bool tool_ends_with(const char *text, const char *end) {
    size_t n = strlen(text), m = strlen(end);

    return n >= m && !strcmp(text + n - m, end);
}

/* What a file is that our own commands put beside TFRecord files, so that everybody who names a
   whole directory meets it; NULL: none of these. An index is told by its first line, "0 SIZE"; that
   of an empty file is empty. */
static const char *tool_companion(const char *path) {
    bool index = tool_ends_with(path, ".idx");
    char head[4];
    struct stat s;
    size_t n;
    FILE *f;

    if (!index && !tool_ends_with(path, "-classes.txt")) return NULL;
    if (stat(path, &s) != 0 || !S_ISREG(s.st_mode)) return NULL;
    if (!index) return "class names";
    f = fopen(path, "rb");
    if (!f) return NULL;
    n = fread(head, 1, sizeof head, f);
    fclose(f);
    if (n == 0 && s.st_size == 0) return "a record index";
    return n >= 3 && !memcmp(head, "0 ", 2) && head[2] >= '1' && head[2] <= '9' ? "a record index"
                                                                                : NULL;
}

/* Takes what is no TFRecord file out of the list, with a word about each; that is no failure. */
static void tool_leave_out_companions(tool *t, tool_strings *files) {
    int64_t i, kept = 0;

    for (i = 0; i < files->count; i++) {
        const char *what = tool_companion(files->items[i]);

        if (!what) {
            files->items[kept++] = files->items[i];
            continue;
        }
        cli_error(t->name, 0, "%s: %s, not a TFRecord file: left out", files->items[i], what);
        free(files->items[i]);
    }
    files->count = kept;
}

/* Names, quoted patterns and name@N to files. Something wrong is reported, the rest stays. */
static void tool_expand(tool *t, const cli_list *operands, tool_strings *files) {
    struct stat s;
    size_t prefix;
    int64_t count, k;
    int i;

    for (i = 0; i < operands->count; i++) {
        const char *word = operands->items[i];
        bool exists = stat(word, &s) == 0, ok = true;

        if (tool_refuse_dash(t, word)) continue;
        if (exists && S_ISDIR(s.st_mode)) {
            tool_fail(t, "%s: is a directory; name its files, for example %s/*", word, word);
        } else if (!exists && tool_split_at(word, &prefix, &count)) {
            for (k = 0; k < count && ok; k++)
                ok = tool_strings_take(files, tool_shard_name(word, prefix, k, count));
        } else if (!exists && word[strcspn(word, "*?[")]) {
            tool_expand_pattern(t, word, files);
        } else {
            ok = tool_strings_take(files, tool_copy(word, strlen(word)));
        }
        if (!ok) tool_fail_memory(t);
    }
    tool_leave_out_companions(t, files);
}

/* A pipe or the like, which can be read only once. */
static bool tool_is_stream(const char *path) {
    struct stat s;

    return stat(path, &s) == 0 && !S_ISREG(s.st_mode) && !S_ISDIR(s.st_mode);
}

static int64_t tool_file_size(const char *path) { /* -1: unknown */
    struct stat s;

    return stat(path, &s) == 0 && S_ISREG(s.st_mode) ? (int64_t)s.st_size : -1;
}

static int64_t tool_total_size(const tool_strings *files) {
    int64_t i, size, total = 0;

    for (i = 0; i < files->count; i++) {
        size = tool_file_size(files->items[i]);
        if (size > 0) total += size;
    }
    return total;
}

/* ---- running a command --------------------------------------------------------------------------
   Parses the line, makes the context, calls the body and frees everything. */
typedef void (*tool_body)(tool *t, const cli_list *operands, void *user);

static int tool_run(const cli_command *c, int argc, char **argv, const tool_settings *settings,
                    tool_body body, void *user) {
    cli_list operands = {NULL, 0, 0};
    int code = cli_parse(c, argc, argv, &operands);
    tool t;

    if (code == CLI_RUN && (code = tool_begin(&t, c->name, settings)) == 0) {
        body(&t, &operands, user);
        code = tool_end(&t);
    }
    cli_list_free(&operands);
    return code;
}

/* The same for commands whose operands are all files to read. */
typedef void (*tool_files_body)(tool *t, const tool_strings *files, void *user);

typedef struct tool_files_call {
    tool_files_body body;
    void *user;
} tool_files_call;

static void tool_call_files(tool *t, const cli_list *operands, void *user) {
    const tool_files_call *call = (const tool_files_call *)user;
    tool_strings files;

    memset(&files, 0, sizeof files);
    tool_expand(t, operands, &files);
    call->body(t, &files, call->user);
    tool_strings_free(&files);
}

static int tool_run_files(const cli_command *c, int argc, char **argv,
                          const tool_settings *settings, tool_files_body body, void *user) {
    tool_files_call call;

    call.body = body;
    call.user = user;
    return tool_run(c, argc, argv, settings, tool_call_files, &call);
}

static cli_option tool_threads_option(int64_t *threads) {
    return cli_env(cli_default(cli_int("threads", 'j', threads, 1, 1024, "N", "threads"), "cores"),
                   "MPTRAIN_THREADS");
}

static cli_option tool_max_record_option(int64_t *bytes) {
    return cli_default(cli_bytes("max-record-bytes", 0, bytes, 1, INT64_MAX,
                                 "a larger record is an error"),
                       "1G");
}

/* ---- records --------------------------------------------------------------------------------- */
static mpt_tfrecord_desc tool_desc(const tool *t, const char *path) {
    mpt_tfrecord_desc desc;

    memset(&desc, 0, sizeof desc);
    desc.path = path;
    desc.max_record_bytes = (uint64_t)t->max_record_bytes;
    return desc;
}

static mpt_result tool_open(const tool *t, const char *path, mpt_tfrecord **out) {
    mpt_tfrecord_desc desc = tool_desc(t, path);

    return mpt_tfrecord_open(t->ctx, &desc, out);
}

/* How many records: from the headers where the file is plain, else by reading. A pipe is read right
   away, since the first attempt would take its beginning. */
static mpt_result tool_count(const tool *t, const char *path, int64_t *records) {
    mpt_tfrecord_desc desc = tool_desc(t, path);
    mpt_tfrecord_index *index = NULL;
    mpt_tfrecord *f = NULL;
    mpt_bytes payload;
    mpt_result rc = MPT_ERR_UNSUPPORTED;

    *records = 0;
    if (!tool_is_stream(path)) rc = mpt_tfrecord_index_build(t->ctx, &desc, &index);
    if (rc == MPT_OK) *records = index->num_records;
    mpt_tfrecord_index_destroy(t->ctx, index);
    if (rc != MPT_ERR_UNSUPPORTED) return rc;
    desc.skip_crc = true;
    rc = mpt_tfrecord_open(t->ctx, &desc, &f);
    while (rc == MPT_OK) {
        rc = mpt_tfrecord_next(f, &payload);
        if (rc == MPT_OK) (*records)++;
    }
    mpt_tfrecord_close(f);
    return rc == MPT_END ? MPT_OK : rc;
}

static const char *tool_compression_name(mpt_compression c) {
    return c == MPT_COMPRESSION_GZIP ? "gzip" : c == MPT_COMPRESSION_ZLIB ? "zlib" : "plain";
}

/* ---- features -------------------------------------------------------------------------------- */
/* All features of one Example, in file order, of a repeated name the last (which is the one that
   counts), with room for the values of one of them. */
typedef struct tool_features {
    mpt_feature *items; /* [count] */
    int64_t count, capacity;
    byte_buffer values;
} tool_features;

static void tool_features_free(tool_features *fs) {
    free(fs->items);
    byte_buffer_free(&fs->values);
    memset(fs, 0, sizeof *fs);
}

static bool tool_features_grow(tool_features *fs) {
    int64_t capacity = fs->capacity ? fs->capacity * 2 : 32;
    mpt_feature *items = (mpt_feature *)realloc(fs->items, (size_t)capacity * sizeof *items);

    if (!items) return false;
    fs->items = items;
    fs->capacity = capacity;
    return true;
}

static int tool_compare_names(const mpt_bytes *a, const mpt_bytes *b) {
    size_t n = a->size < b->size ? a->size : b->size;
    int c = n ? memcmp(a->data, b->data, n) : 0;

    return c ? c : (a->size > b->size) - (a->size < b->size);
}

static int tool_compare_features(const void *a, const void *b) { /* by name, then by position */
    const mpt_feature *x = *(const mpt_feature *const *)a, *y = *(const mpt_feature *const *)b;
    int c = tool_compare_names(&x->name, &y->name);

    return c ? c : (x > y) - (x < y);
}

/* Sorting finds repeats in n log n, whatever a hostile record holds; count -1 marks them. */
static bool tool_features_unique(tool_features *fs) { /* false: no memory */
    mpt_feature **sorted;
    int64_t i, kept = 0;

    if (fs->count < 2) return true;
    sorted = (mpt_feature **)malloc((size_t)fs->count * sizeof *sorted);
    if (!sorted) return false;
    for (i = 0; i < fs->count; i++) sorted[i] = &fs->items[i];
    qsort((void *)sorted, (size_t)fs->count, sizeof *sorted, tool_compare_features);
    for (i = 0; i + 1 < fs->count; i++)
        if (!tool_compare_names(&sorted[i]->name, &sorted[i + 1]->name)) sorted[i]->count = -1;
    free((void *)sorted);
    for (i = 0; i < fs->count; i++)
        if (fs->items[i].count >= 0) fs->items[kept++] = fs->items[i];
    fs->count = kept;
    return true;
}

/* NULL, or why the payload can't be shown. */
static const char *tool_features_read(mpt_ctx *ctx, mpt_bytes payload, tool_features *fs) {
    size_t cursor = 0;
    mpt_result rc;

    fs->count = 0;
    if (mpt_example_check(ctx, payload)) return tool_error_text(ctx);
    for (;;) {
        if (fs->count == fs->capacity && !tool_features_grow(fs)) return "no memory";
        rc = mpt_example_next(payload, &cursor, &fs->items[fs->count]);
        if (rc == MPT_END) break;
        if (rc) return mpt_result_string(rc);
        fs->count++;
    }
    return tool_features_unique(fs) ? NULL : "no memory";
}

/* The first n values, of the feature's own type; NULL: no memory, or not as many. */
static const void *tool_feature_values(tool_features *fs, const mpt_feature *f, int64_t n) {
    size_t size = f->kind == MPT_FEATURE_BYTES   ? sizeof(mpt_bytes)
                  : f->kind == MPT_FEATURE_FLOAT ? sizeof(float)
                                                 : sizeof(int64_t);
    mpt_result rc = MPT_OK;

    if ((uint64_t)n > SIZE_MAX / size || !byte_buffer_reserve(&fs->values, (size_t)n * size + 1))
        return NULL;
    if (n > 0 && f->kind == MPT_FEATURE_BYTES)
        rc = mpt_feature_bytes(f, 0, n, (mpt_bytes *)(void *)fs->values.data);
    if (n > 0 && f->kind == MPT_FEATURE_FLOAT)
        rc = mpt_feature_floats(f, 0, n, (float *)(void *)fs->values.data);
    if (n > 0 && f->kind == MPT_FEATURE_INT64)
        rc = mpt_feature_int64s(f, 0, n, (int64_t *)(void *)fs->values.data);
    return rc ? NULL : fs->values.data;
}

#endif /* TFRECORD_COMMON_H */
