/* tfrecord/output.h - what the writing commands share: sets of shards that appear whole or not at
   all, and their options */
#ifndef TFRECORD_OUTPUT_H
#define TFRECORD_OUTPUT_H

#include "tfrecord/common.h"

typedef struct output {
    const char *prefix; /* of OUT@N: OUT, without an end: prefix_size characters */
    size_t prefix_size;
    int64_t count;            /* N */
    int64_t max_record_bytes; /* of a record that is written; 0: the library's default */
    /* options */
    bool force;
    int compression; /* mpt_compression */
    int64_t level;
} output;

enum { OUTPUT_NUM_OPTIONS = 3 };

static void output_options(output *o, cli_option options[OUTPUT_NUM_OPTIONS]) {
    o->level = 6;
    options[0] = cli_choice("compression", 'c', &o->compression, "none|gzip|zlib",
                            "of the files that are written");
    options[1] = cli_int("level", 0, &o->level, 1, 9, "N", "of compression: 1 fast, 9 small");
    options[2] = cli_flag("force", 'f', &o->force, "replace files that exist");
}

static mpt_result output_open(mpt_ctx *ctx, const output *o, const char *path,
                              mpt_tfrecord_writer **out) {
    mpt_tfrecord_writer_desc desc;

    memset(&desc, 0, sizeof desc);
    desc.path = path;
    desc.compression = (mpt_compression)o->compression;
    desc.compression_level = (int)o->level;
    desc.max_record_bytes = (uint64_t)o->max_record_bytes;
    return mpt_tfrecord_writer_open(ctx, &desc, out);
}

/* An index describes the file that was there before. */
static void output_remove_index(const char *path) {
    char *name = tool_format("%s.idx", path);

    if (name) unlink(name);
    free(name);
}

/* ---- one file -------------------------------------------------------------------------------- */
static bool output_may_write(tool *t, const output *o, const char *path) {
    struct stat s;

    if (!strcmp(path, "-")) {
        tool_fail(t, "-: standard output is not written by that name; OUT is the name of a file");
        return false;
    }
    if (stat(path, &s) != 0) return true;
    if (S_ISDIR(s.st_mode)) tool_fail(t, "%s: is a directory; name the file to write", path);
    else if (!S_ISREG(s.st_mode)) tool_fail(t, "%s: is a device or a pipe; name a file", path);
    else if (!o->force) tool_fail(t, "%s: exists already; --force replaces it", path);
    else return true;
    return false;
}

/* ---- a set of shards ------------------------------------------------------------------------- */
/* Until the whole set is there its files carry this suffix, so that no reader takes them. */
#define OUTPUT_PARTIAL ".new"

static bool output_parse(tool *t, output *o, const char *text) {
    o->prefix = text;
    if (tool_split_at(text, &o->prefix_size, &o->count)) return true;
    tool_usage(t, "'%s' is no OUT@N with N shards from 1 to 99999, for example train@8", text);
    return false;
}

static char *output_name(const output *o, int64_t shard, const char *suffix) {
    return tool_format("%.*s-%05d-of-%05d%s", (int)o->prefix_size, o->prefix, (int)shard,
                       (int)o->count, suffix);
}

static char *output_classes_name(const output *o, const char *suffix) {
    return tool_format("%.*s-classes.txt%s", (int)o->prefix_size, o->prefix, suffix);
}

/* Shard i holds the records from here on: sizes differ by at most one. */
static int64_t output_shard_start(const output *o, int64_t records, int64_t shard) {
    int64_t extra = records % o->count;

    return records / o->count * shard + (shard < extra ? shard : extra);
}

/* Number of shards that a name such as "train-00003-of-00008" speaks of; 0: another name. */
static int64_t output_match(const char *name, const char *base, size_t base_size) {
    const char *p = name + base_size;
    int64_t count = 0;
    int i;

    if (strlen(name) != base_size + 15 || memcmp(name, base, base_size) != 0) return 0;
    if (p[0] != '-' || memcmp(p + 6, "-of-", 4) != 0) return 0;
    for (i = 1; i < 6; i++)
        if (p[i] < '0' || p[i] > '9') return 0;
    return cli_int_from_text(p + 10, &count) ? count : 0;
}

/* Shards of another set under the same name would be read together with the new ones, so they are
   refused even with --force. */
static bool output_check_directory(tool *t, const output *o, const char *directory,
                                   const char *base, size_t base_size) {
    DIR *d = opendir(directory);
    const struct dirent *entry;
    int64_t count;
    bool ok = true;

    if (!d) {
        tool_fail(t, "%s: can't open the directory: %s", directory, cli_errno_text(errno));
        return false;
    }
    while (ok && (entry = readdir(d)) != NULL) {
        count = output_match(entry->d_name, base, base_size);
        if (count == 0 || (count == o->count && o->force)) continue;
        ok = false;
        if (count == o->count) {
            tool_fail(t, "%s/%s: exists already; --force replaces the set", directory,
                      entry->d_name);
        } else {
            tool_fail(t,
                      "%s/%s: belongs to a set of %lld shard%s of the same name; remove it first",
                      directory, entry->d_name, (long long)count, cli_plural(count, "s"));
        }
    }
    closedir(d);
    return ok;
}

/* May the set be written? */
static bool output_check(tool *t, const output *o, bool with_classes) {
    size_t slash = o->prefix_size;
    char *directory, *classes;
    bool ok;

    while (slash > 0 && o->prefix[slash - 1] != '/') slash--;
    directory = slash ? tool_copy(o->prefix, slash > 1 ? slash - 1 : 1) : tool_copy(".", 1);
    classes = output_classes_name(o, "");
    ok = directory && classes;
    if (!ok) tool_fail_memory(t);
    ok = ok && output_check_directory(t, o, directory, o->prefix + slash, o->prefix_size - slash);
    ok = ok && (!with_classes || output_may_write(t, o, classes));
    free(directory);
    free(classes);
    return ok;
}

/* Removes what this run wrote: files under their temporary names, and the first `final` shards. */
static void output_discard(const output *o, int64_t final) {
    int64_t i;
    char *name;

    for (i = 0; i < o->count; i++) {
        name = output_name(o, i, i < final ? "" : OUTPUT_PARTIAL);
        if (name) unlink(name);
        free(name);
    }
    name = output_classes_name(o, OUTPUT_PARTIAL);
    if (name) unlink(name);
    free(name);
}

static bool output_rename(tool *t, char *from, char *to) { /* frees both */
    bool ok = from && to && rename(from, to) == 0;

    if (!from || !to) tool_fail_memory(t);
    else if (!ok) tool_fail(t, "%s: can't be renamed: %s", from, cli_errno_text(errno));
    else output_remove_index(to);
    free(from);
    free(to);
    return ok;
}

/* One name a line, in the order of labels. */
static bool output_write_classes(tool *t, const output *o, const tool_strings *classes) {
    char *name = output_classes_name(o, OUTPUT_PARTIAL);
    FILE *f = name ? fopen(name, "wb") : NULL;
    int64_t i;
    bool ok = f != NULL;

    for (i = 0; ok && i < classes->count; i++) ok = fprintf(f, "%s\n", classes->items[i]) > 0;
    if (f) {
        ok = fflush(f) == 0 && fsync(fileno(f)) == 0 && ok;
        ok = fclose(f) == 0 && ok;
    }
    if (!ok) tool_fail(t, "%s: can't write it: %s", name ? name : "classes", cli_errno_text(errno));
    free(name);
    return ok;
}

/* All shards are written: gives them their names. classes NULL: there is no such file. */
static bool output_commit(tool *t, const output *o, const tool_strings *classes) {
    int64_t done = 0;
    bool ok = !classes || output_write_classes(t, o, classes);

    while (ok && done < o->count) {
        ok = output_rename(t, output_name(o, done, OUTPUT_PARTIAL), output_name(o, done, ""));
        if (ok) done++;
    }
    if (ok && classes)
        ok = output_rename(t, output_classes_name(o, OUTPUT_PARTIAL), output_classes_name(o, ""));
    if (!ok) output_discard(o, done);
    return ok;
}

#endif /* TFRECORD_OUTPUT_H */
