/* tfrecord/stats.h - command stats: what is in the files */
#ifndef TFRECORD_STATS_H
#define TFRECORD_STATS_H

#include "tfrecord/common.h"

/* ---- a table of counters --------------------------------------------------------------------- */
/* Hostile files may hold any number of names; beyond so many, new ones are only counted. */
enum { TALLY_MAX_KEYS = 1 << 17 };

typedef struct tally_entry {
    char *key; /* [size], not terminated; NULL: free slot */
    size_t size;
    int64_t records;
    int64_t min_values, max_values; /* features only */
    unsigned kinds;                 /* features only: bit 1 << mpt_feature_kind */
} tally_entry;

typedef struct tally {  /* open addressing, at most half full */
    tally_entry *slots; /* [capacity], a power of two */
    size_t count, capacity;
    int64_t left_out; /* additions that found no place */
} tally;

static void tally_free(tally *t) {
    size_t i;

    for (i = 0; i < t->capacity; i++) free(t->slots[i].key);
    free(t->slots);
    memset(t, 0, sizeof *t);
}

static tally_entry *tally_slot(tally_entry *slots, size_t capacity, const void *key, size_t size) {
    const unsigned char *p = (const unsigned char *)key;
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    size_t i;

    for (i = 0; i < size; i++) hash = (hash ^ p[i]) * 1099511628211u;
    i = (size_t)(hash ^ hash >> 32) & (capacity - 1);
    while (slots[i].key && (slots[i].size != size || memcmp(slots[i].key, key, size) != 0))
        i = (i + 1) & (capacity - 1);
    return &slots[i];
}

static bool tally_grow(tally *t) {
    size_t capacity = t->capacity ? t->capacity * 2 : 64, i;
    tally_entry *slots = (tally_entry *)calloc(capacity, sizeof *slots);

    if (!slots) return false;
    for (i = 0; i < t->capacity; i++) {
        const tally_entry *old = &t->slots[i];
        if (old->key) *tally_slot(slots, capacity, old->key, old->size) = *old;
    }
    free(t->slots);
    t->slots = slots;
    t->capacity = capacity;
    return true;
}

/* Counts one more record for the key; NULL: no place for a new key, or no memory. */
static tally_entry *tally_add(tally *t, const void *key, size_t size) {
    tally_entry *e = t->capacity ? tally_slot(t->slots, t->capacity, key, size) : NULL;

    if (!e || !e->key) {
        if (t->count >= TALLY_MAX_KEYS || (t->count * 2 >= t->capacity && !tally_grow(t))) e = NULL;
        else e = tally_slot(t->slots, t->capacity, key, size);
        if (e) e->key = tool_copy((const char *)key, size);
        if (!e || !e->key) {
            t->left_out++;
            return NULL;
        }
        e->size = size;
        t->count++;
    }
    e->records++;
    return e;
}

static int tally_compare_keys(const void *a, const void *b) { /* free slots last */
    const tally_entry *x = (const tally_entry *)a, *y = (const tally_entry *)b;

    if (!x->key || !y->key) return !x->key - !y->key;
    return strcmp(x->key, y->key);
}

static int tally_compare_numbers(const void *a, const void *b) { /* texts before numbers */
    const tally_entry *x = (const tally_entry *)a, *y = (const tally_entry *)b;
    int64_t i = 0, k = 0;
    bool number_x, number_y;

    if (!x->key || !y->key) return !x->key - !y->key;
    number_x = cli_int_from_text(x->key, &i);
    number_y = cli_int_from_text(y->key, &k);
    if (number_x && number_y) return (i > k) - (i < k);
    return number_x == number_y ? strcmp(x->key, y->key) : number_x - number_y;
}

static int tally_compare_counts(const void *a, const void *b) { /* the most frequent first */
    const tally_entry *x = (const tally_entry *)a, *y = (const tally_entry *)b;

    if (x->records != y->records) return x->records < y->records ? 1 : -1;
    return tally_compare_keys(a, b);
}

/* Entries in order at the front; from then on nothing can be added. */
static void tally_sort(tally *t, int (*compare)(const void *, const void *)) {
    if (t->capacity) qsort(t->slots, t->capacity, sizeof *t->slots, compare);
}

/* ---- gathering ------------------------------------------------------------------------------- */
typedef struct stats {
    /* options */
    const char *image_key, *label_key; /* NULL: the usual ones are tried */
    bool json;
    int64_t top;
    /* results */
    int64_t files[3];                     /* by mpt_compression */
    int64_t streams;                      /* files of unknown size */
    int64_t label_records, image_records; /* that have the feature */
    int64_t file_bytes, records, not_examples, images_unreadable;
    uint64_t bytes, min_bytes, max_bytes; /* of payloads */
    tally features, labels, formats, sizes;
    char first_unreadable[640]; /* file, record, cause */
    tool_features scratch;
} stats;

static const mpt_feature *stats_find(const tool_features *fs, const char *name) {
    int64_t i;

    for (i = 0; i < fs->count; i++)
        if (fs->items[i].name.size == strlen(name) &&
            !memcmp(fs->items[i].name.data, name, fs->items[i].name.size))
            return &fs->items[i];
    return NULL;
}

/* Once a usual key was met, it is the key. */
static const mpt_feature *stats_find_usual(const tool_features *fs, const char **key,
                                           const char *first, const char *second) {
    const mpt_feature *f;

    if (*key) return stats_find(fs, *key);
    f = stats_find(fs, first);
    if (f) *key = first;
    if (!f && (f = stats_find(fs, second)) != NULL) *key = second;
    return f;
}

static void stats_label(stats *s) {
    const mpt_feature *f = stats_find_usual(&s->scratch, &s->label_key, "image/class/label",
                                            "label");
    char text[24];
    int64_t label;
    int n;

    s->label_records += f != NULL;
    if (!f || f->count < 1) return;
    if (f->kind == MPT_FEATURE_INT64 && mpt_feature_int64s(f, 0, 1, &label) == MPT_OK) {
        n = snprintf(text, sizeof text, "%lld", (long long)label);
        tally_add(&s->labels, text, (size_t)n);
    } else {
        tally_add(&s->labels, "(no int64)", 10);
    }
}

static void stats_image(tool *t, stats *s, const char *path, int64_t record) {
    const mpt_feature *f = stats_find_usual(&s->scratch, &s->image_key, "image/encoded", "image");
    mpt_image_info info;
    mpt_bytes picture;
    mpt_result rc;
    char text[64];
    int n;

    s->image_records += f != NULL;
    if (!f || f->kind != MPT_FEATURE_BYTES || mpt_feature_bytes(f, 0, 1, &picture)) return;
    memset(&info, 0, sizeof info);
    rc = mpt_image_probe(t->ctx, picture, &info);
    if (rc && s->images_unreadable++ == 0) {
        snprintf(s->first_unreadable, sizeof s->first_unreadable, "%s: record %lld: %s", path,
                 (long long)record, tool_error_text(t->ctx));
    }
    if (rc) return;
    tally_add(&s->formats, mpt_image_format_string(info.format),
              strlen(mpt_image_format_string(info.format)));
    n = snprintf(text, sizeof text, "%lldx%lldx%d", (long long)info.width, (long long)info.height,
                 info.channels);
    tally_add(&s->sizes, text, (size_t)n);
}

static void stats_features(stats *s) {
    int64_t i;

    for (i = 0; i < s->scratch.count; i++) {
        const mpt_feature *f = &s->scratch.items[i];
        tally_entry *e = tally_add(&s->features, f->name.data, f->name.size);

        if (!e) continue;
        if (e->records == 1 || f->count < e->min_values) e->min_values = f->count;
        if (e->records == 1 || f->count > e->max_values) e->max_values = f->count;
        e->kinds |= 1u << f->kind;
    }
}

static void stats_record(tool *t, stats *s, const char *path, mpt_tfrecord_position at,
                         mpt_bytes payload) {
    if (s->records++ == 0) s->min_bytes = payload.size;
    if (payload.size < s->min_bytes) s->min_bytes = payload.size;
    if (payload.size > s->max_bytes) s->max_bytes = payload.size;
    s->bytes += payload.size;
    if (tool_features_read(t->ctx, payload, &s->scratch)) {
        s->not_examples++;
        return;
    }
    stats_features(s);
    stats_label(s);
    stats_image(t, s, path, at.record);
}

static void stats_file(tool *t, stats *s, const char *path, cli_progress *progress) {
    int64_t before = s->file_bytes, size = tool_file_size(path);
    mpt_tfrecord *f = NULL;
    mpt_bytes payload;
    mpt_result rc = tool_open(t, path, &f);

    if (rc == MPT_OK) s->files[mpt_tfrecord_compression(f)]++;
    while (rc == MPT_OK) {
        rc = mpt_tfrecord_next(f, &payload);
        if (rc) break;
        stats_record(t, s, path, mpt_tfrecord_tell(f), payload);
        if (mpt_tfrecord_compression(f) == MPT_COMPRESSION_NONE)
            cli_progress_update(progress, before + (int64_t)mpt_tfrecord_tell(f).offset);
    }
    cli_progress_clear(progress);
    if (rc < 0) tool_fail(t, "%s", tool_error_text(t->ctx));
    mpt_tfrecord_close(f);
    if (size >= 0) s->file_bytes += size;
    else if (rc == MPT_END) s->streams++;
    cli_progress_update(progress, s->file_bytes);
}

/* ---- showing --------------------------------------------------------------------------------- */
static void stats_kinds(const tally_entry *e, char out[40]) { /* "int64", "bytes|float" */
    int kind;

    out[0] = 0;
    for (kind = MPT_FEATURE_NONE; kind <= MPT_FEATURE_INT64; kind++) {
        if (!(e->kinds & 1u << kind)) continue;
        if (out[0]) strcat(out, "|");
        strcat(out, mpt_feature_kind_string((mpt_feature_kind)kind));
    }
}

static void stats_text_tally(const tally *t, int64_t top) {
    size_t i;

    for (i = 0; i < t->count && (int64_t)i < top; i++)
        printf("  %-16s %lld\n", t->slots[i].key, (long long)t->slots[i].records);
    if (i < t->count) printf("  ... %zu more (--top N shows more)\n", t->count - i);
    if (t->left_out) printf("  others           %lld\n", (long long)t->left_out);
}

static void stats_text_features(const stats *s) {
    char kinds[40];
    size_t i;

    printf("features\n");
    for (i = 0; i < s->features.count && (int64_t)i < s->top; i++) {
        const tally_entry *e = &s->features.slots[i];

        fputs("  ", stdout);
        cli_json_string(stdout, e->key, e->size);
        stats_kinds(e, kinds);
        printf("%*s %-6s values %lld", e->size < 26 ? 26 - (int)e->size : 0, "", kinds,
               (long long)e->min_values);
        if (e->max_values != e->min_values) printf("..%lld", (long long)e->max_values);
        printf(", in %lld record%s\n", (long long)e->records, cli_plural(e->records, "s"));
    }
    if (i < s->features.count)
        printf("  ... %zu more (--top N shows more)\n", s->features.count - i);
    if (s->features.left_out) printf("  and names beyond %d\n", TALLY_MAX_KEYS);
}

/* A list that the user asked for by name does not stay away in silence. */
static void stats_text_missing(const char *title, const char *key, int64_t records,
                               const char *what) {
    if (!key) return;
    if (records == 0) printf("%-10s no record has the feature %s\n", title, key);
    else printf("%-10s the feature %s holds no %s\n", title, key, what);
}

static void stats_text_lists(const stats *s) {
    if (s->labels.count) {
        printf("labels     %s: %zu different, %s..%s\n", s->label_key, s->labels.count,
               s->labels.slots[0].key, s->labels.slots[s->labels.count - 1].key);
        stats_text_tally(&s->labels, s->top);
    } else {
        stats_text_missing("labels", s->label_key, s->label_records, "value");
    }
    if (s->formats.count) {
        printf("pictures   %s\n", s->image_key);
        stats_text_tally(&s->formats, s->top);
        printf("sizes      width x height x channels: %zu different\n", s->sizes.count);
        stats_text_tally(&s->sizes, s->top);
    } else if (!s->images_unreadable) {
        stats_text_missing("pictures", s->image_key, s->image_records, "bytes");
    }
    if (s->images_unreadable) {
        printf("unreadable %lld picture%s; the first: %s\n", (long long)s->images_unreadable,
               cli_plural(s->images_unreadable, "s"), s->first_unreadable);
    }
}

static void stats_text(const stats *s) {
    char size[24], mean[24], low[24], high[24];

    printf("files      %lld plain, %lld gzip, %lld zlib", (long long)s->files[MPT_COMPRESSION_NONE],
           (long long)s->files[MPT_COMPRESSION_GZIP], (long long)s->files[MPT_COMPRESSION_ZLIB]);
    if (s->file_bytes || !s->streams) printf("; %s", cli_human_bytes((double)s->file_bytes, size));
    if (s->streams) printf("; %lld of unknown size", (long long)s->streams);
    printf("\nrecords    %lld", (long long)s->records);
    if (s->not_examples) {
        printf(", of which %lld %s no tf.Example", (long long)s->not_examples,
               s->not_examples == 1 ? "is" : "are");
    }
    putchar('\n');
    if (s->records > 0) {
        printf("payload    %s mean, %s min, %s max\n",
               cli_human_bytes((double)s->bytes / (double)s->records, mean),
               cli_human_bytes((double)s->min_bytes, low),
               cli_human_bytes((double)s->max_bytes, high));
    }
    if (s->features.count) stats_text_features(s);
    stats_text_lists(s);
}

static void stats_json_tally(const char *name, const tally *t) {
    size_t i;

    printf(",\"%s\":{", name);
    for (i = 0; i < t->count; i++) {
        if (i > 0) putchar(',');
        cli_json_string(stdout, t->slots[i].key, t->slots[i].size);
        printf(":%lld", (long long)t->slots[i].records);
    }
    putchar('}');
}

static void stats_json_key(const char *name, const char *key) {
    printf(",\"%s\":", name);
    if (key) cli_json_text(stdout, key);
    else fputs("null", stdout);
}

static void stats_json_features(const stats *s) {
    char kinds[40];
    size_t i;

    fputs(",\"features\":{", stdout);
    for (i = 0; i < s->features.count; i++) {
        const tally_entry *e = &s->features.slots[i];

        if (i > 0) putchar(',');
        cli_json_string(stdout, e->key, e->size);
        stats_kinds(e, kinds);
        printf(":{\"kind\":\"%s\",\"records\":%lld,\"min_values\":%lld,\"max_values\":%lld}", kinds,
               (long long)e->records, (long long)e->min_values, (long long)e->max_values);
    }
    putchar('}');
}

static void stats_json(const stats *s) {
    printf("{\"files\":{\"plain\":%lld,\"gzip\":%lld,\"zlib\":%lld},\"file_bytes\":%lld",
           (long long)s->files[MPT_COMPRESSION_NONE], (long long)s->files[MPT_COMPRESSION_GZIP],
           (long long)s->files[MPT_COMPRESSION_ZLIB], (long long)s->file_bytes);
    printf(",\"files_of_unknown_size\":%lld", (long long)s->streams);
    printf(",\"records\":%lld,\"not_examples\":%lld", (long long)s->records,
           (long long)s->not_examples);
    printf(",\"payload_bytes\":{\"total\":%llu,\"min\":%llu,\"max\":%llu}",
           (unsigned long long)s->bytes, (unsigned long long)s->min_bytes,
           (unsigned long long)s->max_bytes);
    stats_json_features(s);
    stats_json_key("label_key", s->label_key);
    printf(",\"label_records\":%lld", (long long)s->label_records);
    stats_json_tally("labels", &s->labels);
    stats_json_key("image_key", s->image_key);
    printf(",\"image_records\":%lld", (long long)s->image_records);
    stats_json_tally("image_formats", &s->formats);
    stats_json_tally("image_sizes", &s->sizes);
    printf(",\"images_unreadable\":%lld,\"left_out\":%lld}\n", (long long)s->images_unreadable,
           (long long)(s->features.left_out + s->labels.left_out + s->sizes.left_out));
}

static void stats_files(tool *t, const tool_strings *files, void *user) {
    stats *s = (stats *)user;
    cli_progress progress;
    int64_t i;

    cli_progress_begin(&progress, "stats", "B", tool_total_size(files));
    for (i = 0; i < files->count; i++) stats_file(t, s, files->items[i], &progress);
    cli_progress_end(&progress);
    tally_sort(&s->features, tally_compare_keys);
    tally_sort(&s->labels, tally_compare_numbers);
    tally_sort(&s->formats, tally_compare_counts);
    tally_sort(&s->sizes, tally_compare_counts);
    errno = 0;
    if (s->json) stats_json(s);
    else stats_text(s);
    tool_output_lost(t);
    tally_free(&s->features);
    tally_free(&s->labels);
    tally_free(&s->formats);
    tally_free(&s->sizes);
    tool_features_free(&s->scratch);
}

static const char stats_about[] =
    "What all the files together hold: features with kind and number of values, a\n"
    "histogram of labels, formats and sizes of pictures, sizes of records. Labels are\n"
    "shown as stored (ImageNet's begin at 1).";

static int command_stats(int argc, char **argv) {
    cli_option options[5];
    cli_command c = {"tfrecord stats", "FILE...", stats_about, TOOL_VERSION, options, 5, 1, -1};
    tool_settings settings = tool_defaults();
    stats s;

    memset(&s, 0, sizeof s);
    s.top = 20;
    options[0] = cli_default(cli_text("label-key", 0, &s.label_key, "NAME",
                                      "feature with the label"),
                             "image/class/label, label");
    options[1] = cli_default(cli_text("image-key", 0, &s.image_key, "NAME",
                                      "feature with the encoded picture"),
                             "image/encoded, image");
    options[2] = cli_int("top", 0, &s.top, 1, INT64_MAX, "N", "lines of each list");
    options[3] = cli_flag("json", 0, &s.json, "one JSON object, with whole lists");
    options[4] = tool_max_record_option(&settings.max_record_bytes);
    return tool_run_files(&c, argc, argv, &settings, stats_files, &s);
}

#endif /* TFRECORD_STATS_H */
