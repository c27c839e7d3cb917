/* tfrecord/convert.h - commands that copy records unchanged: split, merge, recompress */
#ifndef TFRECORD_CONVERT_H
#define TFRECORD_CONVERT_H

#include "tfrecord/output.h"

enum { CONVERT_NUM_OPTIONS = OUTPUT_NUM_OPTIONS + 1 };

static void convert_options(output *o, tool_settings *settings,
                            cli_option options[CONVERT_NUM_OPTIONS]) {
    output_options(o, options);
    options[OUTPUT_NUM_OPTIONS] = tool_max_record_option(&settings->max_record_bytes);
}

typedef struct copy_progress {
    cli_progress line;
    int64_t records;
} copy_progress;

/* Up to n records from f to w; MPT_END where f ends before. */
static mpt_result copy_records(mpt_tfrecord *f, mpt_tfrecord_writer *w, int64_t n,
                               copy_progress *progress) {
    mpt_bytes payload;
    mpt_result rc = MPT_OK;
    int64_t i;

    for (i = 0; i < n && rc == MPT_OK && !tool_signal; i++) {
        rc = mpt_tfrecord_next(f, &payload);
        if (rc == MPT_OK) rc = mpt_tfrecord_writer_write(w, payload);
        if (rc == MPT_OK) cli_progress_update(&progress->line, ++progress->records);
    }
    return rc;
}

/* ---- merge and recompress -------------------------------------------------------------------- */
/* All records of all files into one. Nothing is written under its name unless all is well. */
static void merge_files(tool *t, const tool_strings *files, const output *o, const char *path) {
    mpt_tfrecord_writer *w = NULL;
    mpt_tfrecord *f = NULL;
    copy_progress progress;
    mpt_result rc = output_open(t->ctx, o, path, &w);
    int64_t i;

    progress.records = 0;
    cli_progress_begin(&progress.line, t->name, "records", 0);
    for (i = 0; i < files->count && rc == MPT_OK && !tool_signal; i++) {
        rc = tool_open(t, files->items[i], &f);
        if (rc == MPT_OK) rc = copy_records(f, w, INT64_MAX, &progress);
        if (rc == MPT_END) rc = MPT_OK;
        if (rc) tool_fail(t, "%s", tool_error_text(t->ctx));
        mpt_tfrecord_close(f);
        f = NULL;
    }
    if (rc && t->status == CLI_EXIT_OK) tool_fail(t, "%s", tool_error_text(t->ctx));
    if (rc == MPT_OK && !tool_signal && (rc = mpt_tfrecord_writer_finish(w)) != MPT_OK)
        tool_fail(t, "%s", tool_error_text(t->ctx));
    mpt_tfrecord_writer_close(w);
    cli_progress_end(&progress.line);
    if (rc || tool_signal) return;
    output_remove_index(path);
    errno = 0;
    printf("%s: %lld record%s\n", path, (long long)progress.records,
           cli_plural(progress.records, "s"));
}

static void merge_body(tool *t, const cli_list *operands, void *user) {
    output *o = (output *)user;
    const char *path = operands->items[operands->count - 1];
    cli_list inputs = *operands;
    tool_strings files;

    memset(&files, 0, sizeof files);
    inputs.count--;
    o->max_record_bytes = t->max_record_bytes;
    tool_catch_signals();
    if (output_may_write(t, o, path)) tool_expand(t, &inputs, &files);
    if (t->status == CLI_EXIT_OK && files.count == 0) tool_fail(t, "no TFRecord file to read");
    if (t->status == CLI_EXIT_OK) merge_files(t, &files, o, path);
    tool_strings_free(&files);
}

static const char merge_about[] =
    "Writes the records of all the files, in this order, into OUT. OUT appears when all\n"
    "is written and checked; if any file is damaged, nothing is written.";

static int command_merge(int argc, char **argv) {
    cli_option options[CONVERT_NUM_OPTIONS];
    cli_command c = {"tfrecord merge", "FILE... OUT",       merge_about, TOOL_VERSION,
                     options,          CONVERT_NUM_OPTIONS, 2,           -1};
    tool_settings settings = tool_defaults();
    output o;

    memset(&o, 0, sizeof o);
    convert_options(&o, &settings, options);
    return tool_run(&c, argc, argv, &settings, merge_body, &o);
}

static void recompress_body(tool *t, const cli_list *operands, void *user) {
    output *o = (output *)user;

    if (o->compression < 0) tool_usage(t, "needs --compression none, gzip or zlib");
    else merge_body(t, operands, user);
}

static const char recompress_about[] =
    "Writes the records of FILE, plain or compressed, unchanged into OUT with the\n"
    "compression that is asked for.";

static int command_recompress(int argc, char **argv) {
    cli_option options[CONVERT_NUM_OPTIONS];
    cli_command c = {"tfrecord recompress",
                     "FILE OUT",
                     recompress_about,
                     TOOL_VERSION,
                     options,
                     CONVERT_NUM_OPTIONS,
                     2,
                     2};
    tool_settings settings = tool_defaults();
    output o;

    memset(&o, 0, sizeof o);
    o.compression = -1;
    convert_options(&o, &settings, options);
    return tool_run(&c, argc, argv, &settings, recompress_body, &o);
}

/* ---- split ----------------------------------------------------------------------------------- */
static mpt_result split_shard(tool *t, mpt_tfrecord *f, const output *o, int64_t shard, int64_t n,
                              copy_progress *progress) {
    char *path = output_name(o, shard, OUTPUT_PARTIAL);
    mpt_tfrecord_writer *w = NULL;
    mpt_result rc;

    if (!path) {
        tool_fail_memory(t);
        return MPT_ERR_OUT_OF_MEMORY;
    }
    rc = output_open(t->ctx, o, path, &w);
    if (rc == MPT_OK) rc = copy_records(f, w, n, progress);
    if (rc == MPT_OK && !tool_signal) rc = mpt_tfrecord_writer_finish(w);
    if (rc == MPT_END) tool_fail(t, "the file became shorter while it was read");
    else if (rc) tool_fail(t, "%s", tool_error_text(t->ctx));
    mpt_tfrecord_writer_close(w);
    free(path);
    return rc;
}

static void split_file(tool *t, const char *path, const output *o, int64_t records) {
    mpt_tfrecord *f = NULL;
    copy_progress progress;
    mpt_result rc = tool_open(t, path, &f);
    int64_t i, start, end;

    if (rc) tool_fail(t, "%s", tool_error_text(t->ctx));
    progress.records = 0;
    cli_progress_begin(&progress.line, t->name, "records", records);
    for (i = 0; i < o->count && rc == MPT_OK && !tool_signal; i++) {
        start = output_shard_start(o, records, i);
        end = output_shard_start(o, records, i + 1);
        rc = split_shard(t, f, o, i, end - start, &progress);
    }
    mpt_tfrecord_close(f);
    cli_progress_end(&progress.line);
    if (rc || tool_signal) {
        output_discard(o, 0);
    } else if (output_commit(t, o, NULL)) {
        errno = 0;
        printf("%.*s@%lld: %lld record%s\n", (int)o->prefix_size, o->prefix, (long long)o->count,
               (long long)records, cli_plural(records, "s"));
    }
}

static void split_body(tool *t, const cli_list *operands, void *user) {
    const char *path = operands->items[0];
    output *o = (output *)user;
    int64_t records = 0;

    if (!output_parse(t, o, operands->items[1]) || !output_check(t, o, false)) return;
    if (tool_refuse_dash(t, path)) return;
    o->max_record_bytes = t->max_record_bytes;
    tool_catch_signals();
    if (tool_is_stream(path)) {
        tool_fail(t, "%s: is no regular file; split reads it twice, so save it first", path);
    } else if (tool_count(t, path, &records)) {
        tool_fail(t, "%s", tool_error_text(t->ctx));
    } else if (records < o->count) {
        tool_fail(t, "%s: %lld record%s can't fill %lld shard%s", path, (long long)records,
                  cli_plural(records, "s"), (long long)o->count, cli_plural(o->count, "s"));
    } else {
        split_file(t, path, o, records);
    }
}

static const char split_about[] =
    "Deals the records of FILE to OUT-00000-of-0000N ..., in blocks whose sizes differ\n"
    "by at most one; the shards in order hold the records in order. All shards appear\n"
    "together when all is written and checked.";

static int command_split(int argc, char **argv) {
    cli_option options[CONVERT_NUM_OPTIONS];
    cli_command c = {"tfrecord split", "FILE OUT@N",        split_about, TOOL_VERSION,
                     options,          CONVERT_NUM_OPTIONS, 2,           2};
    tool_settings settings = tool_defaults();
    output o;

    memset(&o, 0, sizeof o);
    convert_options(&o, &settings, options);
    return tool_run(&c, argc, argv, &settings, split_body, &o);
}

#endif /* TFRECORD_CONVERT_H */
