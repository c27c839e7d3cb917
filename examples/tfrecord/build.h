/* tfrecord/build.h - pictures with labels to sets of shards, whatever they come from */
#ifndef TFRECORD_BUILD_H
#define TFRECORD_BUILD_H

#include "tfrecord/output.h"
#include "tfrecord/png.h"

enum { SCHEMA_IMAGENET = 0, SCHEMA_TFDS };
enum { BUILD_PREFIX = 256 << 10, BUILD_CHECK_CHUNK = 64, BUILD_MAX_CLASSES = 1000000 };
/* Bytes of a picture: the limit of a record, which holds a little more besides. */
enum { BUILD_MAX_FILE = (1 << 30) - (1 << 20) };

typedef struct sample {
    char *path; /* of the picture; NULL: picture `index` of dataset.pixels */
    int64_t index;
    int64_t label; /* from 0 */
} sample;

typedef struct dataset {
    sample *samples; /* [count] */
    int64_t count, capacity;
    tool_strings classes;  /* name of each label */
    const uint8_t *pixels; /* [index][height][width][channels] */
    int64_t height, width, channels;
    output out;
    /* options */
    int schema;
    bool no_shuffle;
    int64_t seed, max_bad;
    tool_settings settings;
    bool no_header;                  /* from-csv only */
    const char *classes_file, *root; /* not every command has them */
} dataset;

static void dataset_free(dataset *d) {
    int64_t i;

    for (i = 0; i < d->count; i++) free(d->samples[i].path);
    free(d->samples);
    tool_strings_free(&d->classes);
    memset(d, 0, sizeof *d);
}

static bool dataset_add(dataset *d, char *path, int64_t index, int64_t label) { /* takes path */
    sample *samples;
    int64_t capacity;

    if (d->count == d->capacity) {
        capacity = d->capacity ? d->capacity * 2 : 1024;
        samples = (sample *)realloc(d->samples, (size_t)capacity * sizeof *samples);
        if (!samples) {
            free(path);
            return false;
        }
        d->samples = samples;
        d->capacity = capacity;
    }
    d->samples[d->count].path = path;
    d->samples[d->count].index = index;
    d->samples[d->count].label = label;
    d->count++;
    return true;
}

enum { DATASET_NUM_OPTIONS = OUTPUT_NUM_OPTIONS + 4 };

/* An empty one, and the first options of the command that fills it. */
static void dataset_init(dataset *d, cli_option options[DATASET_NUM_OPTIONS]) {
    memset(d, 0, sizeof *d);
    d->settings = tool_defaults();
    d->settings.threads = 0;
    options[0] = cli_choice("schema", 0, &d->schema, "imagenet|tfds",
                            "imagenet: image/encoded, image/class/label from 1, and more; "
                            "tfds: image, label from 0, file_name");
    options[1] = cli_int("seed", 0, &d->seed, 0, INT64_MAX, "N", "of the order of records");
    options[2] = cli_flag("no-shuffle", 0, &d->no_shuffle, "keep the order of the source");
    options[3] = tool_threads_option(&d->settings.threads);
    output_options(&d->out, options + 4);
}

/* Runs that command, and frees the data set. */
static int dataset_run(dataset *d, const cli_command *c, int argc, char **argv, tool_body body) {
    int code = tool_run(c, argc, argv, &d->settings, body, d);

    dataset_free(d);
    return code;
}

/* ---- class names ----------------------------------------------------------------------------- */
/* A name a line; the empty last one does not count. */
static bool classes_read(tool *t, const char *path, tool_strings *classes) {
    byte_buffer text;
    const char *p, *end, *line_end;
    size_t n;
    bool ok = true;

    if (!tool_load_file(t, path, 64 << 20, &text)) return false;
    p = (const char *)text.data;
    end = p + text.size;
    while (ok && p < end) {
        line_end = (const char *)memchr(p, '\n', (size_t)(end - p));
        if (!line_end) line_end = end;
        n = (size_t)(line_end - p);
        if (n > 0 && p[n - 1] == '\r') n--;
        ok = tool_strings_take(classes, tool_copy(p, n));
        if (!ok) tool_fail_memory(t);
        p = line_end + 1;
    }
    byte_buffer_free(&text);
    if (ok && classes->count == 0) tool_fail(t, "%s: holds no class names", path);
    return ok && classes->count > 0;
}

/* Labels that came as numbers: names from --classes, else the numbers themselves. */
static bool classes_of_numbers(tool *t, dataset *d) {
    int64_t i, largest = 0;

    for (i = 0; i < d->count; i++)
        if (d->samples[i].label > largest) largest = d->samples[i].label;
    if (d->classes_file) {
        if (!classes_read(t, d->classes_file, &d->classes)) return false;
        if (largest < d->classes.count) return true;
        tool_fail(t, "%s: holds %lld name%s, but there is a label %lld (labels count from 0)",
                  d->classes_file, (long long)d->classes.count, cli_plural(d->classes.count, "s"),
                  (long long)largest);
        return false;
    }
    for (i = 0; i <= largest; i++) {
        if (!tool_strings_take(&d->classes, tool_format("%lld", (long long)i))) {
            tool_fail_memory(t);
            return false;
        }
    }
    return true;
}

static void classes_warn_empty(tool *t, const dataset *d) {
    int64_t *counts = (int64_t *)calloc((size_t)d->classes.count + 1, sizeof *counts);
    int64_t i, empty = 0, first = 0;

    if (!counts) return;
    for (i = 0; i < d->count; i++) counts[d->samples[i].label]++;
    for (i = d->classes.count - 1; i >= 0; i--) {
        if (counts[i]) continue;
        empty++;
        first = i;
    }
    free(counts);
    if (empty) {
        cli_error(t->name, 0, "warning: %lld of %lld classes %s no picture; the first is '%s'",
                  (long long)empty, (long long)d->classes.count, empty == 1 ? "has" : "have",
                  d->classes.items[first]);
    }
}

/* ---- checking the pictures ------------------------------------------------------------------- */
typedef struct check_job {
    const dataset *d;
    char **errors; /* [d->count]; NULL: good */
    int64_t done, bad;
    cli_progress progress;
    pthread_mutex_t lock;
} check_job;

/* Enough of the file for its header; the whole file if that was not enough. */
static char *check_picture(mpt_ctx *ctx, const char *path, byte_buffer *buffer) {
    mpt_image_info info;
    char why[600];
    FILE *f;

    if (tool_is_stream(path)) return tool_format("%s: is no regular file", path);
    f = fopen(path, "rb");
    if (!f) return tool_format("%s: can't open it: %s", path, cli_errno_text(errno));
    if (!byte_buffer_reserve(buffer, BUILD_PREFIX)) {
        fclose(f);
        return tool_format("%s: no memory to read it", path);
    }
    buffer->size = fread(buffer->data, 1, BUILD_PREFIX, f);
    fclose(f);
    if (mpt_image_probe(ctx, tool_bytes(buffer->data, buffer->size), &info) == MPT_OK) return NULL;
    if (!byte_buffer_read(buffer, path, BUILD_MAX_FILE, why)) return tool_format("%s", why);
    if (mpt_image_probe(ctx, tool_bytes(buffer->data, buffer->size), &info) == MPT_OK) return NULL;
    return tool_format("%s: %s", path, tool_error_text(ctx));
}

static mpt_result check_chunk(int64_t chunk, void *user) {
    check_job *job = (check_job *)user;
    int64_t i, end = (chunk + 1) * BUILD_CHECK_CHUNK, bad = 0, start = chunk * BUILD_CHECK_CHUNK;
    byte_buffer buffer;
    mpt_ctx *ctx = NULL;

    memset(&buffer, 0, sizeof buffer);
    if (end > job->d->count) end = job->d->count;
    if (tool_make_ctx(1, &ctx)) return MPT_ERR_OUT_OF_MEMORY;
    for (i = start; i < end && !tool_signal; i++) {
        job->errors[i] = check_picture(ctx, job->d->samples[i].path, &buffer);
        bad += job->errors[i] != NULL;
    }
    mpt_ctx_destroy(ctx);
    byte_buffer_free(&buffer);
    pthread_mutex_lock(&job->lock);
    job->done += end - start;
    job->bad += bad;
    cli_progress_update(&job->progress, job->done);
    bad = job->bad;
    pthread_mutex_unlock(&job->lock);
    return bad > job->d->max_bad ? MPT_ERR_CORRUPT_DATA : MPT_OK;
}

/* Names the bad ones and takes them out; too many: fails. */
static bool check_remove(tool *t, dataset *d, char *const *errors) {
    const char *one_too_many = NULL;
    int64_t i, kept = 0, bad = 0;

    for (i = 0; i < d->count; i++) {
        if (!errors[i]) {
            d->samples[kept++] = d->samples[i];
            continue;
        }
        free(d->samples[i].path);
        bad++;
        if (bad <= d->max_bad) cli_error(t->name, 0, "left out: %s", errors[i]);
        else if (!one_too_many) one_too_many = errors[i];
    }
    d->count = kept;
    if (!one_too_many) return true;
    tool_fail(t, "%s (--skip-bad-records %s)", one_too_many,
              d->max_bad ? "allows no more" : "N leaves up to N such files out");
    return false;
}

/* Reads the header of every picture, before anything is written. */
static bool check_pictures(tool *t, dataset *d) {
    int64_t i, chunks = (d->count + BUILD_CHECK_CHUNK - 1) / BUILD_CHECK_CHUNK, count = d->count;
    mpt_result rc;
    check_job job;
    bool ok;

    memset(&job, 0, sizeof job);
    job.d = d;
    job.errors = (char **)calloc((size_t)count + 1, sizeof *job.errors);
    if (!job.errors) {
        tool_fail_memory(t);
        return false;
    }
    pthread_mutex_init(&job.lock, NULL);
    cli_progress_begin(&job.progress, "check", "pictures", count);
    rc = mpt_parallel_for(t->ctx, chunks, check_chunk, &job);
    cli_progress_end(&job.progress);
    pthread_mutex_destroy(&job.lock);
    ok = !tool_signal && check_remove(t, d, job.errors);
    if (ok && rc) {
        tool_fail(t, "can't check the pictures: %s", mpt_result_string(rc));
        ok = false;
    }
    for (i = 0; i < count; i++) free(job.errors[i]);
    free(job.errors);
    return ok;
}

/* ---- order ----------------------------------------------------------------------------------- */
/* SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014). */
static uint64_t order_random(uint64_t *state) {
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* 0 .. n-1, all alike: the rest that would make some more frequent is thrown away. */
static uint64_t order_below(uint64_t *state, uint64_t n) {
    uint64_t limit = UINT64_MAX - UINT64_MAX % n, r;

    do r = order_random(state);
    while (r >= limit);
    return r % n;
}

static void order_shuffle(dataset *d) { /* Fisher and Yates */
    uint64_t state = (uint64_t)d->seed;
    int64_t i, k;
    sample swap;

    for (i = d->count - 1; i > 0; i--) {
        k = (int64_t)order_below(&state, (uint64_t)i + 1);
        swap = d->samples[i];
        d->samples[i] = d->samples[k];
        d->samples[k] = swap;
    }
}

/* ---- one record ------------------------------------------------------------------------------ */
static mpt_result build_add_text(mpt_example *e, const char *name, const char *text) {
    mpt_bytes value = tool_bytes(text, strlen(text));

    return mpt_example_add_bytes(e, name, &value, 1);
}

static mpt_result build_add_int(mpt_example *e, const char *name, int64_t value) {
    return mpt_example_add_int64s(e, name, &value, 1);
}

static const char *build_colorspace(const mpt_image_info *info) {
    if (info->channels < 3) return "grayscale";
    return info->channels == 4 && info->format == MPT_IMAGE_JPEG ? "CMYK" : "RGB";
}

static mpt_result build_imagenet(mpt_example *e, const dataset *d, int64_t label, mpt_bytes picture,
                                 const mpt_image_info *info, const char *name) {
    mpt_result rc = mpt_example_add_bytes(e, "image/encoded", &picture, 1);

    if (!rc) rc = build_add_text(e, "image/format", mpt_image_format_string(info->format));
    if (!rc) rc = build_add_int(e, "image/class/label", label + 1);
    if (!rc) rc = build_add_text(e, "image/class/text", d->classes.items[label]);
    if (!rc) rc = build_add_int(e, "image/height", info->height);
    if (!rc) rc = build_add_int(e, "image/width", info->width);
    if (!rc) rc = build_add_int(e, "image/channels", info->channels);
    if (!rc) rc = build_add_text(e, "image/colorspace", build_colorspace(info));
    if (!rc) rc = build_add_text(e, "image/filename", name);
    return rc;
}

static mpt_result build_tfds(mpt_example *e, int64_t label, mpt_bytes picture, const char *name) {
    mpt_result rc = mpt_example_add_bytes(e, "image", &picture, 1);

    if (!rc) rc = build_add_int(e, "label", label);
    if (!rc) rc = build_add_text(e, "file_name", name);
    return rc;
}

/* File names need not be UTF-8, but features must hold what every reader takes as text. */
static void build_name(const sample *s, char out[256]) {
    const char *slash = s->path ? strrchr(s->path, '/') : NULL;
    char *p;

    if (s->path) snprintf(out, 256, "%s", slash ? slash + 1 : s->path);
    else snprintf(out, 256, "%05lld.png", (long long)s->index);
    for (p = out; *p;) {
        int n = cli_utf8_length((const unsigned char *)p, strlen(p));
        if (n == 0) *p = '?';
        p += n > 0 ? n : 1;
    }
}

typedef struct build_worker { /* what one thread needs for one shard */
    mpt_ctx *ctx;
    mpt_example *example;
    mpt_tfrecord_writer *writer;
    byte_buffer picture;
    png_encoder png;
    char why[700]; /* the failure */
} build_worker;

static mpt_result build_record(const dataset *d, const sample *s, build_worker *w) {
    mpt_image_info info;
    mpt_bytes picture, record;
    char name[256];
    mpt_result rc;
    bool ok;

    if (s->path) ok = byte_buffer_read(&w->picture, s->path, BUILD_MAX_FILE, w->why);
    else
        ok = png_encode(&w->png, d->pixels + s->index * d->height * d->width * d->channels,
                        d->height, d->width, (int)d->channels, &w->picture, w->why);
    if (!ok) return MPT_ERR_IO;
    picture = tool_bytes(w->picture.data, w->picture.size);
    build_name(s, name);
    rc = mpt_image_probe(w->ctx, picture, &info);
    if (rc) {
        snprintf(w->why, sizeof w->why, "%s: %s", s->path ? s->path : name,
                 tool_error_text(w->ctx));
        return rc;
    }
    mpt_example_clear(w->example);
    if (d->schema == SCHEMA_TFDS) rc = build_tfds(w->example, s->label, picture, name);
    else rc = build_imagenet(w->example, d, s->label, picture, &info, name);
    if (!rc) rc = mpt_example_encode(w->example, &record);
    if (!rc) rc = mpt_tfrecord_writer_write(w->writer, record);
    if (rc) snprintf(w->why, sizeof w->why, "%s", tool_error_text(w->ctx));
    return rc;
}

/* ---- all shards ------------------------------------------------------------------------------ */
typedef struct build_job {
    const dataset *d;
    int64_t done;
    cli_progress progress;
    int64_t failed_shard; /* the lowest, so that the message doesn't depend on threads */
    char why[700];
    pthread_mutex_t lock;
} build_job;

static void build_advance(build_job *job, int64_t records) {
    pthread_mutex_lock(&job->lock);
    job->done += records;
    cli_progress_update(&job->progress, job->done);
    pthread_mutex_unlock(&job->lock);
}

static mpt_result build_shard(build_job *job, int64_t shard, build_worker *w) {
    const dataset *d = job->d;
    int64_t i = output_shard_start(&d->out, d->count, shard), told = i;
    int64_t end = output_shard_start(&d->out, d->count, shard + 1);
    char *path = output_name(&d->out, shard, OUTPUT_PARTIAL);
    mpt_result rc = MPT_ERR_OUT_OF_MEMORY;

    if (path) rc = output_open(w->ctx, &d->out, path, &w->writer);
    if (path && !rc) rc = mpt_example_create(w->ctx, &w->example);
    if (rc) snprintf(w->why, sizeof w->why, "%s", path ? tool_error_text(w->ctx) : "no memory");
    free(path);
    for (; i < end && !rc && !tool_signal; i++) {
        rc = build_record(d, &d->samples[i], w);
        if (i - told < 32) continue;
        build_advance(job, i - told);
        told = i;
    }
    if (rc || tool_signal) return rc;
    build_advance(job, end - told);
    rc = mpt_tfrecord_writer_finish(w->writer);
    if (rc) snprintf(w->why, sizeof w->why, "%s", tool_error_text(w->ctx));
    return rc;
}

static mpt_result build_chunk(int64_t shard, void *user) {
    build_job *job = (build_job *)user;
    build_worker w;
    mpt_result rc;

    memset(&w, 0, sizeof w);
    rc = tool_make_ctx(1, &w.ctx);
    if (rc) snprintf(w.why, sizeof w.why, "no memory");
    else rc = build_shard(job, shard, &w);
    mpt_tfrecord_writer_close(w.writer);
    mpt_example_destroy(w.example);
    mpt_ctx_destroy(w.ctx);
    byte_buffer_free(&w.picture);
    png_encoder_free(&w.png);
    if (!rc) return MPT_OK;
    pthread_mutex_lock(&job->lock);
    if (job->failed_shard < 0 || shard < job->failed_shard) {
        job->failed_shard = shard;
        memcpy(job->why, w.why, sizeof job->why);
    }
    pthread_mutex_unlock(&job->lock);
    return rc;
}

static bool build_write(tool *t, const dataset *d) {
    build_job job;
    mpt_result rc;

    memset(&job, 0, sizeof job);
    job.d = d;
    job.failed_shard = -1;
    pthread_mutex_init(&job.lock, NULL);
    cli_progress_begin(&job.progress, "write", "records", d->count);
    rc = mpt_parallel_for(t->ctx, d->out.count, build_chunk, &job);
    cli_progress_end(&job.progress);
    pthread_mutex_destroy(&job.lock);
    if (rc) tool_fail(t, "%s", job.failed_shard < 0 ? tool_error_text(t->ctx) : job.why);
    return !rc && !tool_signal;
}

/* The file of class names has one a line: a name with a line break would shift all behind it. */
static bool classes_are_lines(tool *t, const tool_strings *classes) {
    int64_t i;

    for (i = 0; i < classes->count; i++) {
        if (classes->items[i][strcspn(classes->items[i], "\r\n")] == 0) continue;
        tool_fail(t, "class %lld, '%s': a class's name can't hold a line break: rename it",
                  (long long)i, classes->items[i]);
        return false;
    }
    return true;
}

/* The second half of every from- command: samples are listed, nothing is written yet. */
static void build_dataset(tool *t, dataset *d) {
    if (!classes_are_lines(t, &d->classes)) return;
    if (d->samples && d->samples[0].path && !check_pictures(t, d)) return;
    if (d->count < d->out.count) {
        tool_fail(t, "%lld picture%s can't fill %lld shard%s", (long long)d->count,
                  cli_plural(d->count, "s"), (long long)d->out.count,
                  cli_plural(d->out.count, "s"));
        return;
    }
    classes_warn_empty(t, d);
    if (!d->no_shuffle) order_shuffle(d);
    if (!build_write(t, d)) {
        output_discard(&d->out, 0);
    } else if (output_commit(t, &d->out, &d->classes)) {
        errno = 0;
        printf("%.*s@%lld: %lld record%s, %lld class%s\n", (int)d->out.prefix_size, d->out.prefix,
               (long long)d->out.count, (long long)d->count, cli_plural(d->count, "s"),
               (long long)d->classes.count, cli_plural(d->classes.count, "es"));
    }
}

/* The first half: is the place free? */
static bool build_begin(tool *t, dataset *d, const char *out) {
    tool_catch_signals();
    return output_parse(t, &d->out, out) && output_check(t, &d->out, true);
}

#define BUILD_ABOUT \
    "Writes OUT-00000-of-0000N ... and OUT-classes.txt, the class names in label order.\n" \
    "Shards are equally large, give or take one record, in an order that depends on\n" \
    "nothing but --seed; they appear together when all is written, or not at all."

#endif /* TFRECORD_BUILD_H */
