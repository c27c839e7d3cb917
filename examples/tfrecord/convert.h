/* tfrecord/convert.h - commands that copy records unchanged: split, merge, recompress */
#ifndef TFRECORD_CONVERT_H
#define TFRECORD_CONVERT_H

#include "tfrecord/output.h"

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
        rc = tool_open(t->ctx, files->items[i], false, &f);
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
    printf("%s: %lld records\n", path, (long long)progress.records);
}

static void merge_body(tool *t, const cli_list *operands, void *user) {
    const output *o = (const output *)user;
    const char *path = operands->items[operands->count - 1];
    cli_list inputs = *operands;
    tool_strings files;

    memset(&files, 0, sizeof files);
    inputs.count--;
    tool_catch_signals();
    if (output_may_write(t, o, path)) tool_expand(t, &inputs, &files);
    if (t->status == CLI_EXIT_OK) merge_files(t, &files, o, path);
    tool_strings_free(&files);
}

static const char merge_about[] =
    "Writes the records of all the files, in this order, into OUT. OUT appears when all\n"
    "is written and checked; if any file is damaged, nothing is written.";

static int command_merge(int argc, char **argv) {
    cli_option options[OUTPUT_NUM_OPTIONS];
    cli_command c = {"tfrecord merge", "FILE... OUT",      merge_about, TOOL_VERSION,
                     options,          OUTPUT_NUM_OPTIONS, 2,           -1};
    output o;

    memset(&o, 0, sizeof o);
    output_options(&o, options);
    return tool_run(&c, argc, argv, NULL, merge_body, &o);
}

static void recompress_body(tool *t, const cli_list *operands, void *user) {
    const output *o = (const output *)user;

    if (o->compression < 0) tool_usage(t, "needs --compression none, gzip or zlib");
    else merge_body(t, operands, user);
}

static const char recompress_about[] =
    "Writes the records of FILE, plain or compressed, unchanged into OUT with the\n"
    "compression that is asked for.";

static int command_recompress(int argc, char **argv) {
    cli_option options[OUTPUT_NUM_OPTIONS];
    cli_command c = {"tfrecord recompress",
                     "FILE OUT",
                     recompress_about,
                     TOOL_VERSION,
                     options,
                     OUTPUT_NUM_OPTIONS,
                     2,
                     2};
    output o;

    memset(&o, 0, sizeof o);
    o.compression = -1;
    output_options(&o, options);
    return tool_run(&c, argc, argv, NULL, recompress_body, &o);
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
    mpt_result rc = tool_open(t->ctx, path, false, &f);
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
        printf("%.*s@%lld: %lld records\n", (int)o->prefix_size, o->prefix, (long long)o->count,
               (long long)records);
    }
}

static void split_body(tool *t, const cli_list *operands, void *user) {
    const char *path = operands->items[0];
    output *o = (output *)user;
    int64_t records = 0;

    if (!output_parse(t, o, operands->items[1]) || !output_check(t, o, false)) return;
    tool_catch_signals();
    if (tool_count(t->ctx, path, &records)) {
        tool_fail(t, "%s", tool_error_text(t->ctx));
    } else if (records < o->count) {
        tool_fail(t, "%s: %lld records can't fill %lld shards", path, (long long)records,
                  (long long)o->count);
    } else {
        split_file(t, path, o, records);
    }
}

static const char split_about[] =
    "Deals the records of FILE to OUT-00000-of-0000N ..., in blocks whose sizes differ\n"
    "by at most one; the shards in order hold the records in order. All shards appear\n"
    "together when all is written and checked.";

static int command_split(int argc, char **argv) {
    cli_option options[OUTPUT_NUM_OPTIONS];
    cli_command c = {"tfrecord split", "FILE OUT@N",       split_about, TOOL_VERSION,
                     options,          OUTPUT_NUM_OPTIONS, 2,           2};
    output o;

    memset(&o, 0, sizeof o);
    output_options(&o, options);
    return tool_run(&c, argc, argv, NULL, split_body, &o);
}

#endif /* TFRECORD_CONVERT_H */
