/* tfrecord/read.h - commands that look into files: cat, head, count, verify, index */
#ifndef TFRECORD_READ_H
#define TFRECORD_READ_H

#include "tfrecord/common.h"

/* ---- one file, record by record -------------------------------------------------------------- */
/* false: enough */
typedef bool (*scan_fn)(tool *t, const char *path, mpt_tfrecord_position at, mpt_bytes payload,
                        tool_features *features);

/* Moves f to record `first`: by the index beside the file if there is a good one, else by reading,
   which also works on compressed files and pipes. */
static mpt_result scan_skip(tool *t, const char *path, mpt_tfrecord *f, int64_t first) {
    mpt_tfrecord_desc desc = tool_desc(t, path);
    mpt_tfrecord_index *index = NULL;
    mpt_bytes payload;
    mpt_result rc = MPT_ERR_UNSUPPORTED;
    int64_t i;

    if (!tool_is_stream(path) && mpt_tfrecord_index_load(t->ctx, &desc, &index) == MPT_OK) {
        if (first < index->num_records) rc = mpt_tfrecord_seek(f, first, index->offsets[first]);
    }
    mpt_tfrecord_index_destroy(t->ctx, index);
    if (rc == MPT_OK) return MPT_OK;
    for (i = 0, rc = MPT_OK; i < first && rc == MPT_OK; i++) rc = mpt_tfrecord_next(f, &payload);
    return rc;
}

typedef struct scan {
    int64_t index; /* first record of each file; -1: not said */
    int64_t limit; /* at most so many of each file; -1: not said */
    scan_fn fn;
    tool_features features;
} scan;

/* What comes before damage is shown. */
static void scan_file(tool *t, const char *path, scan *s) {
    mpt_tfrecord *f = NULL;
    mpt_bytes payload;
    mpt_result rc = tool_open(t, path, &f);
    int64_t shown = 0;
    bool more = true;

    if (rc == MPT_OK && s->index > 0) rc = scan_skip(t, path, f, s->index);
    while (rc == MPT_OK && more && shown < s->limit) {
        rc = mpt_tfrecord_next(f, &payload);
        if (rc == MPT_OK) more = s->fn(t, path, mpt_tfrecord_tell(f), payload, &s->features);
        if (rc == MPT_OK) shown++;
    }
    if (rc < 0) {
        fflush(stdout); /* on a terminal the message comes after what was read before it */
        tool_fail(t, "%s", tool_error_text(t->ctx));
    } else if (rc == MPT_END && s->index >= 0 && shown == 0) {
        tool_fail(t, "%s: has no record %lld: it holds %lld", path, (long long)s->index,
                  (long long)mpt_tfrecord_tell(f).record + 1);
    }
    mpt_tfrecord_close(f);
}

static void scan_files(tool *t, const tool_strings *files, void *user) {
    scan *s = (scan *)user;
    int64_t i;

    if (s->limit < 0) s->limit = s->index < 0 ? INT64_MAX : 1;
    for (i = 0; i < files->count && !tool_output_lost(t); i++) scan_file(t, files->items[i], s);
    tool_features_free(&s->features);
}

/* ---- cat ------------------------------------------------------------------------------------- */
enum { CAT_LONG_BYTES = 64 }; /* longer values are shown by length and checksum */

static void cat_base64(mpt_bytes value) { /* RFC 4648, section 4 */
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    size_t i, n;

    putchar('"');
    for (i = 0; i < value.size; i += 3) {
        uint32_t word = (uint32_t)value.data[i] << 16;

        n = value.size - i;
        if (n > 1) word |= (uint32_t)value.data[i + 1] << 8;
        if (n > 2) word |= value.data[i + 2];
        putchar(digits[word >> 18]);
        putchar(digits[word >> 12 & 63]);
        putchar(n > 1 ? digits[word >> 6 & 63] : '=');
        putchar(n > 2 ? digits[word & 63] : '=');
    }
    putchar('"');
}

static void cat_bytes(mpt_bytes value) {
    if (value.size <= CAT_LONG_BYTES) {
        cat_base64(value);
        return;
    }
    printf("{\"bytes_crc32\":\"%08x\",\"bytes_len\":%zu}",
           (unsigned)mpt_crc32(0, value.data, value.size), value.size);
}

static bool cat_feature(tool_features *fs, const mpt_feature *f) { /* false: no memory */
    const void *values = tool_feature_values(fs, f, f->count);
    int64_t i;

    if (!values) return false;
    cli_json_string(stdout, f->name.data, f->name.size);
    if (f->kind == MPT_FEATURE_NONE) {
        fputs(":{}", stdout);
        return true;
    }
    printf(":{\"%s\":[", mpt_feature_kind_string(f->kind));
    for (i = 0; i < f->count; i++) {
        if (i > 0) putchar(',');
        if (f->kind == MPT_FEATURE_BYTES) cat_bytes(((const mpt_bytes *)values)[i]);
        else if (f->kind == MPT_FEATURE_FLOAT) cli_json_float(stdout, ((const float *)values)[i]);
        else printf("\"%lld\"", (long long)((const int64_t *)values)[i]);
    }
    fputs("]}", stdout);
    return true;
}

static bool cat_record(tool *t, const char *path, mpt_tfrecord_position at, mpt_bytes payload,
                       tool_features *fs) {
    const char *error = tool_features_read(t->ctx, payload, fs);
    int64_t i;

    errno = 0;
    fputs("{\"file\":", stdout);
    cli_json_text(stdout, path);
    printf(",\"record\":%lld,\"offset\":%llu,\"length\":%zu,\"crc32\":\"%08x\",\"features\":",
           (long long)at.record, (unsigned long long)at.offset, payload.size,
           (unsigned)mpt_crc32(0, payload.data, payload.size));
    if (error) {
        fputs("null,\"error\":", stdout);
        cli_json_text(stdout, error);
    } else {
        putchar('{');
        for (i = 0; i < fs->count; i++) {
            if (i > 0) putchar(',');
            if (!cat_feature(fs, &fs->items[i])) {
                tool_fail(t, "%s: no memory for record %lld", path, (long long)at.record);
                return false;
            }
        }
        putchar('}');
    }
    fputs("}\n", stdout);
    return !tool_output_lost(t);
}

static const char cat_about[] =
    "Records as JSON, one object a line: file, record, offset (of the length field),\n"
    "length and crc32 (of the payload), features in file order; of a name that\n"
    "comes twice the last counts. Bytes are base64, or over 64 of them CRC-32 and\n"
    "length; int64 are strings. A payload that is no Example has features null and\n"
    "an error. FILE may be name@N or a quoted pattern; compression is recognised.";

static int command_cat(int argc, char **argv) {
    cli_option options[3];
    cli_command c = {"tfrecord cat", "FILE...", cat_about, TOOL_VERSION, options, 3, 1, -1};
    tool_settings settings = tool_defaults();
    scan s;

    memset(&s, 0, sizeof s);
    s.index = s.limit = -1;
    s.fn = cat_record;
    options[0] = cli_default(cli_int("limit", 'n', &s.limit, 0, INT64_MAX, "N",
                                     "at most N records of each file"),
                             "all");
    options[1] = cli_default(cli_int("index", 'i', &s.index, 0, INT64_MAX, "I",
                                     "begin at record I of each file, counted from 0, and show one "
                                     "record unless --limit says more "
                                     "(record number; not a file made by index)"),
                             "");
    options[2] = tool_max_record_option(&settings.max_record_bytes);
    return tool_run_files(&c, argc, argv, &settings, scan_files, &s);
}

/* ---- head ------------------------------------------------------------------------------------ */
enum { HEAD_MAX_VALUES = 8, HEAD_MAX_TEXT = 60 };

static bool head_is_text(mpt_bytes value) { /* printable UTF-8 */
    size_t i = 0;
    int n;

    while (i < value.size) {
        n = cli_utf8_length(value.data + i, value.size - i);
        if (n == 0 || (n == 1 && (value.data[i] < 0x20 || value.data[i] == 0x7f))) return false;
        i += (size_t)n;
    }
    return true;
}

static void head_bytes(mpt_bytes value) {
    mpt_image_info info;
    char size[24];
    size_t i, n = value.size;

    cli_human_bytes((double)value.size, size);
    if (mpt_image_probe(NULL, value, &info) == MPT_OK) {
        printf("%s %lldx%lldx%d, %s", mpt_image_format_string(info.format), (long long)info.width,
               (long long)info.height, info.channels, size);
    } else if (n <= HEAD_MAX_TEXT && head_is_text(value)) {
        cli_json_string(stdout, value.data, n);
    } else {
        for (i = 0; i < n && i < 8; i++) printf("%02x ", value.data[i]);
        printf("%s%s", n > 8 ? "... " : "", size);
    }
}

static void head_feature(tool_features *fs, const mpt_feature *f) {
    const int64_t most = HEAD_MAX_VALUES;
    int64_t i, n = f->count < most ? f->count : most;
    const void *values = tool_feature_values(fs, f, n);

    fputs("  ", stdout);
    cli_json_string(stdout, f->name.data, f->name.size);
    printf("%*s %-5s ", f->name.size < 24 ? 24 - (int)f->name.size : 0, "",
           mpt_feature_kind_string(f->kind));
    for (i = 0; values && i < n; i++) {
        if (i > 0) fputs(", ", stdout);
        if (f->kind == MPT_FEATURE_BYTES) head_bytes(((const mpt_bytes *)values)[i]);
        else if (f->kind == MPT_FEATURE_FLOAT) printf("%g", (double)((const float *)values)[i]);
        else printf("%lld", (long long)((const int64_t *)values)[i]);
    }
    if (f->kind != MPT_FEATURE_NONE && f->count == 0) fputs("(empty list)", stdout);
    if (f->count > n) printf(", ... (%lld values)", (long long)f->count);
    putchar('\n');
}

static bool head_record(tool *t, const char *path, mpt_tfrecord_position at, mpt_bytes payload,
                        tool_features *fs) {
    const char *error = tool_features_read(t->ctx, payload, fs);
    int64_t i;

    errno = 0;
    printf("%s: record %lld at offset %llu, %zu byte%s\n", path, (long long)at.record,
           (unsigned long long)at.offset, payload.size, cli_plural((int64_t)payload.size, "s"));
    if (error) printf("  no tf.Example: %s\n", error);
    for (i = 0; !error && i < fs->count; i++) head_feature(fs, &fs->items[i]);
    return !tool_output_lost(t);
}

static int command_head(int argc, char **argv) {
    cli_option options[2];
    cli_command c = {"tfrecord head",
                     "FILE...",
                     "The first records of each file for people: names, kinds and short values.",
                     TOOL_VERSION,
                     options,
                     2,
                     1,
                     -1};
    tool_settings settings = tool_defaults();
    scan s;

    memset(&s, 0, sizeof s);
    s.index = -1;
    s.limit = 3;
    s.fn = head_record;
    options[0] = cli_int("limit", 'n', &s.limit, 0, INT64_MAX, "N", "records of each file");
    options[1] = tool_max_record_option(&settings.max_record_bytes);
    return tool_run_files(&c, argc, argv, &settings, scan_files, &s);
}

/* ---- count ----------------------------------------------------------------------------------- */
static void count_files(tool *t, const tool_strings *files, void *user) {
    int64_t i, records, total = 0;

    (void)user;
    for (i = 0; i < files->count && !tool_output_lost(t); i++) {
        if (tool_count(t, files->items[i], &records)) {
            tool_fail(t, "%s", tool_error_text(t->ctx));
            continue;
        }
        errno = 0;
        printf("%lld %s\n", (long long)records, files->items[i]);
        total += records;
    }
    if (files->count > 1) printf("%lld total\n", (long long)total);
    tool_output_lost(t);
}

static const char count_about[] =
    "Number of records of each file and, of several, in all. Plain files are walked\n"
    "over header by header, payloads are not read; compressed ones are read.";

static int command_count(int argc, char **argv) {
    cli_option options[1];
    cli_command c = {"tfrecord count", "FILE...", count_about, TOOL_VERSION, options, 1, 1, -1};
    tool_settings settings = tool_defaults();

    options[0] = tool_max_record_option(&settings.max_record_bytes);
    return tool_run_files(&c, argc, argv, &settings, count_files, NULL);
}

/* ---- verify ---------------------------------------------------------------------------------- */
enum { VERIFY_FRAME_BYTES = 16 }; /* around a payload: length, its checksum, the payload's */

typedef struct verify_result {
    bool done;
    mpt_compression compression;
    int64_t records;
    int64_t bytes; /* of the file, or of what a pipe brought; -1: not known */
    bool damaged;  /* where there is an error: it lies in the data, not in getting at them */
    char *error;   /* NULL: the file is good */
} verify_result;

typedef struct verify_job { /* shared by the threads, under lock */
    tool *t;
    const tool_strings *files;
    verify_result *results; /* [files->count] */
    int64_t printed;        /* so many of them, in order */
    int64_t bytes;          /* of files, done */
    cli_progress progress;
    pthread_mutex_t lock;
} verify_job;

static void verify_print(verify_job *job) {
    const char *path = job->files->items[job->printed];
    const verify_result *r = &job->results[job->printed];
    char size[24];

    cli_progress_clear(&job->progress);
    errno = 0;
    printf("%s: %lld record%s", path, (long long)r->records, cli_plural(r->records, "s"));
    if (r->bytes >= 0) printf(", %s", cli_human_bytes((double)r->bytes, size));
    if (r->compression) printf(", %s", tool_compression_name(r->compression));
    puts(!r->error ? ", ok" : r->damaged ? ", DAMAGED" : ", UNREADABLE");
    tool_output_lost(job->t);
    if (!r->error) return;
    fflush(stdout);
    tool_fail(job->t, "%s", r->error);
}

/* Lines come in the order of the arguments, as soon as all files before are done. */
static void verify_finish(verify_job *job, int64_t i, const verify_result *result) {
    pthread_mutex_lock(&job->lock);
    job->results[i] = *result;
    job->results[i].done = true;
    while (job->printed < job->files->count && job->results[job->printed].done) {
        verify_print(job);
        job->printed++;
    }
    pthread_mutex_unlock(&job->lock);
}

static void verify_advance(verify_job *job, int64_t bytes) {
    pthread_mutex_lock(&job->lock);
    job->bytes += bytes;
    cli_progress_update(&job->progress, job->bytes);
    pthread_mutex_unlock(&job->lock);
}

/* To the library a record over the limit is an error of the data, but it may well be sound: here it
   counts as damaged only if the file can't hold it. */
static bool verify_over_limit(const verify_result *r, mpt_tfrecord_position at, uint64_t limit) {
    if (at.size <= limit || at.size > (uint64_t)INT64_MAX - VERIFY_FRAME_BYTES - at.offset)
        return false;
    return r->bytes < 0 || r->compression ||
           at.offset + at.size + VERIFY_FRAME_BYTES <= (uint64_t)r->bytes;
}

static void verify_note_error(verify_result *result, const mpt_ctx *ctx, mpt_result rc,
                              bool over_limit) {
    result->damaged = rc == MPT_ERR_CORRUPT_DATA && !over_limit;
    result->error = tool_copy(tool_error_text(ctx), strlen(tool_error_text(ctx)));
    if (!result->error) result->error = tool_copy("no memory", 9);
}

static void verify_read(verify_job *job, mpt_ctx *ctx, const char *path, verify_result *result) {
    const int64_t block = 4 << 20; /* the lock is taken once for so many bytes */
    mpt_tfrecord_desc desc = tool_desc(job->t, path);
    int64_t told = 0, now;
    mpt_tfrecord_position at;
    mpt_tfrecord *f = NULL;
    mpt_bytes payload;
    mpt_result rc = mpt_tfrecord_open(ctx, &desc, &f);

    result->bytes = tool_file_size(path);
    if (rc == MPT_OK) result->compression = mpt_tfrecord_compression(f);
    while (rc == MPT_OK) {
        rc = mpt_tfrecord_next(f, &payload);
        if (rc == MPT_OK) result->records++;
        now = (int64_t)mpt_tfrecord_tell(f).offset;
        if (rc || result->compression || now < told + block || now > result->bytes) continue;
        verify_advance(job, now - told);
        told = now;
    }
    at = mpt_tfrecord_tell(f);
    if (rc < 0)
        verify_note_error(result, ctx, rc, verify_over_limit(result, at, desc.max_record_bytes));
    if (rc == MPT_END && result->bytes < 0 && !result->compression)
        result->bytes = result->records ? (int64_t)(at.offset + at.size) + VERIFY_FRAME_BYTES : 0;
    mpt_tfrecord_close(f);
    if (result->bytes > told) verify_advance(job, result->bytes - told);
}

static mpt_result verify_chunk(int64_t i, void *user) {
    verify_job *job = (verify_job *)user;
    verify_result result;
    mpt_ctx *ctx = NULL;

    memset(&result, 0, sizeof result);
    if (tool_make_ctx(1, &ctx)) return MPT_ERR_OUT_OF_MEMORY;
    verify_read(job, ctx, job->files->items[i], &result);
    mpt_ctx_destroy(ctx);
    verify_finish(job, i, &result);
    return MPT_OK;
}

static void verify_files(tool *t, const tool_strings *files, void *user) {
    verify_job job;
    int64_t i;

    (void)user;
    memset(&job, 0, sizeof job);
    job.t = t;
    job.files = files;
    job.results = (verify_result *)calloc((size_t)files->count + 1, sizeof *job.results);
    if (!job.results) {
        tool_fail_memory(t);
        return;
    }
    pthread_mutex_init(&job.lock, NULL);
    cli_progress_begin(&job.progress, "verify", "B", tool_total_size(files));
    if (mpt_parallel_for(t->ctx, files->count, verify_chunk, &job))
        tool_fail(t, "not all files were checked: %s", tool_error_text(t->ctx));
    cli_progress_end(&job.progress);
    pthread_mutex_destroy(&job.lock);
    for (i = 0; i < files->count; i++) free(job.results[i].error);
    free(job.results);
}

static const char verify_about[] =
    "Checks every length and every CRC. A line a file on standard output: ok, DAMAGED,\n"
    "or UNREADABLE where it could not be opened or read, or holds a record over the\n"
    "limit. Of these two the cause on standard error, with record and offset, and exit\n"
    "code 1 after all files are checked.";

static int command_verify(int argc, char **argv) {
    cli_option options[2];
    cli_command c = {"tfrecord verify", "FILE...", verify_about, TOOL_VERSION, options, 2, 1, -1};
    tool_settings settings = tool_defaults();

    settings.threads = 0;
    options[0] = tool_threads_option(&settings.threads);
    options[1] = tool_max_record_option(&settings.max_record_bytes);
    return tool_run_files(&c, argc, argv, &settings, verify_files, NULL);
}

/* ---- index ----------------------------------------------------------------------------------- */

/* Loading an index looks at its ends alone; this compares each line with the file's headers. */
static bool index_agrees(tool *t, const mpt_tfrecord_desc *desc, const mpt_tfrecord_index *index,
                         const char *name) {
    mpt_tfrecord_index *real = NULL;
    int64_t i = 0, n;

    if (mpt_tfrecord_index_build(t->ctx, desc, &real)) {
        tool_fail(t, "%s", tool_error_text(t->ctx));
        return false;
    }
    n = index->num_records < real->num_records ? index->num_records : real->num_records;
    while (i < n && index->offsets[i] == real->offsets[i]) i++;
    if (i < n || index->num_records != real->num_records) {
        tool_fail(t, "%s: line %lld: record %lld begins elsewhere: make the index anew", name,
                  (long long)i + 1, (long long)i);
        i = -1;
    }
    mpt_tfrecord_index_destroy(t->ctx, real);
    return i >= 0;
}

static void index_file(tool *t, const char *path, bool check) {
    mpt_tfrecord_desc desc = tool_desc(t, path);
    mpt_tfrecord_index *index = NULL;
    char *name = tool_format("%s.idx", path);
    mpt_result rc;

    if (tool_is_stream(path)) {
        tool_fail(t, "%s: is no regular file, which alone can have an index", path);
        free(name);
        return;
    }
    if (!name) {
        tool_fail_memory(t);
        return;
    }
    if (check) rc = mpt_tfrecord_index_load(t->ctx, &desc, &index);
    else rc = mpt_tfrecord_index_build(t->ctx, &desc, &index);
    if (rc == MPT_OK && !check) rc = mpt_tfrecord_index_save(t->ctx, index, NULL, name);
    errno = 0;
    if (rc) tool_fail(t, "%s", tool_error_text(t->ctx));
    else if (!check || index_agrees(t, &desc, index, name))
        printf("%s: %lld record%s%s\n", name, (long long)index->num_records,
               cli_plural(index->num_records, "s"), check ? ", ok" : "");
    mpt_tfrecord_index_destroy(t->ctx, index);
    free(name);
}

static void index_files(tool *t, const tool_strings *files, void *user) {
    const bool *check = (const bool *)user;
    int64_t i;

    for (i = 0; i < files->count && !tool_output_lost(t); i++)
        index_file(t, files->items[i], *check);
}

static const char index_about[] =
    "Writes FILE.idx: for each record a line with the offset and size of its frame,\n"
    "as NVIDIA DALI's tfrecord2idx does. Compressed files can't have one.";

static int command_index(int argc, char **argv) {
    bool check = false;
    cli_option options[2];
    cli_command c = {"tfrecord index", "FILE...", index_about, TOOL_VERSION, options, 2, 1, -1};
    tool_settings settings = tool_defaults();

    options[0] = cli_flag("check", 0, &check, "write nothing; does each FILE.idx fit its file?");
    options[1] = tool_max_record_option(&settings.max_record_bytes);
    return tool_run_files(&c, argc, argv, &settings, index_files, &check);
}

#endif /* TFRECORD_READ_H */
