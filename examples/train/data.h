/* train/data.h - the data of the program train: what the records say about the network's input and
   output, and the two loaders */
#ifndef TRAIN_DATA_H
#define TRAIN_DATA_H

#include "train/log.h"

#include <sys/stat.h>

/* ---- which files the library reads --------------------------------------------------------------
   How names, globs, directories and name@N turn into files is the loader's business. A table of
   storage that writes down what is opened lets us look into the same files. */
enum { DATA_MAX_FILES = 64 }; /* so many the loader opens at the start; of more only a sample */

typedef struct data_files {
    char *names[4 * DATA_MAX_FILES]; /* in the order of opening; indexes and the like among them */
    int count;
    const mpt_io *io; /* the table that does the work */
} data_files;

static mpt_result data_files_open(const char *path, void **file, void *user) {
    data_files *files = (data_files *)user;
    int i = 0;

    while (i < files->count && strcmp(files->names[i], path) != 0) i++;
    if (i == files->count && i < (int)(sizeof files->names / sizeof files->names[0])) {
        files->names[i] = strdup(path);
        if (files->names[i]) files->count++;
    }
    return files->io->open(path, file, files->io->user);
}

static mpt_result data_files_list(const char *pattern, void (*found)(const char *path, void *arg),
                                  void *arg, void *user) {
    const mpt_io *io = ((data_files *)user)->io;

    return io->list(pattern, found, arg, io->user);
}

static void data_files_free(data_files *files) {
    int i;

    for (i = 0; i < files->count; i++) free(files->names[i]);
    files->count = 0;
}

/* Something else than records, which the loader opens beside them. */
static bool data_is_companion(const char *path) {
    return options_ends_with(path, ".idx") || options_ends_with(path, ".json");
}

/* ---- looking into the data before anything is built ------------------------------------------ */
typedef struct data_facts { /* what the records say; zero: not known */
    char image_key[128], label_key[128];
    int label_offset, num_files;
    mpt_image_info picture; /* the first that can be read */
    int64_t largest_label;  /* as stored; -1: not known */
    int64_t num_names;      /* lines of the file of class names */
    char names_path[1024];
} data_facts;

static void data_set_keys(const train_options *o, mpt_loader_desc *d) {
    d->image_key = o->image_key;
    d->label_key = o->label_key;
    (void)network_label_offset(TRAIN_NAME, o->label_offset, d); /* refused by options_parse_texts */
}

/* A loader that is made to learn keys, files and counts from; it delivers nothing. */
static mpt_result data_probe_loader(mpt_ctx *ctx, const train_options *o, const cli_list *paths,
                                    const mpt_io *io, data_facts *facts) {
    mpt_loader_desc d;
    mpt_loader_info info;
    mpt_loader *loader = NULL;
    mpt_result rc;

    memset(&d, 0, sizeof d);
    d.paths = paths->items;
    d.num_paths = paths->count;
    d.io = io;
    d.batch_size = d.height = d.width = d.channels = d.num_workers = d.shuffle_buffer = 1;
    d.num_classes = INT32_MAX;
    data_set_keys(o, &d);
    if (o->skip_bad_records > 0) d.on_bad_record = MPT_BAD_RECORD_SKIP;
    rc = mpt_loader_create(ctx, &d, &loader);
    if (rc == MPT_OK) {
        info = mpt_loader_get_info(loader);
        snprintf(facts->image_key, sizeof facts->image_key, "%s", info.image_key);
        snprintf(facts->label_key, sizeof facts->label_key, "%s", info.label_key);
        facts->label_offset = info.label_offset;
        facts->num_files = info.num_files;
    }
    mpt_loader_destroy(loader);
    return rc;
}

/* Takes notes of one record. The first picture counts, and the largest label of all. */
static void data_probe_record(mpt_bytes record, data_facts *facts) {
    mpt_bytes picture;
    mpt_feature label;
    mpt_image_info info;
    int64_t value;

    if (facts->picture.channels == 0 &&
        mpt_example_find(record, facts->image_key, &picture) == MPT_OK &&
        mpt_image_probe(NULL, picture, &info) == MPT_OK)
        facts->picture = info;
    if (mpt_example_feature(record, facts->label_key, &label) == MPT_OK &&
        label.kind == MPT_FEATURE_INT64 && mpt_feature_int64s(&label, 0, 1, &value) == MPT_OK &&
        value > facts->largest_label)
        facts->largest_label = value;
}

/* Reads at most `limit` records (0: all) of a file. What is damaged comes up in the loader. */
static void data_probe_file(mpt_ctx *ctx, const char *path, int64_t limit, data_facts *facts) {
    mpt_tfrecord_desc d;
    mpt_tfrecord *f = NULL;
    mpt_bytes record;
    int64_t n = 0;

    memset(&d, 0, sizeof d);
    d.path = path;
    d.skip_crc = 1;
    if (mpt_tfrecord_open(ctx, &d, &f) == MPT_OK)
        while ((limit == 0 || n++ < limit) && mpt_tfrecord_next(f, &record) == MPT_OK)
            data_probe_record(record, facts);
    mpt_tfrecord_close(f);
}

/* ---- class names ----------------------------------------------------------------------------- */
static int64_t data_count_lines(const char *path) { /* those that are not empty; 0: no file */
    FILE *f = fopen(path, "rb");
    int64_t lines = 0;
    int c, last = '\n';

    if (!f) return 0;
    while ((c = getc(f)) != EOF) {
        lines += c != '\n' && last == '\n';
        last = c;
    }
    fclose(f);
    return lines;
}

/* Class names beside a file of records: PREFIX-classes.txt, as `tfrecord from-...` writes it, or
   label.labels.txt, as TFDS does. */
static void data_find_names(const char *path, data_facts *facts) {
    const char *slash = strrchr(path, '/'), *of = strstr(slash ? slash : path, "-of-");
    int folder = slash ? (int)(slash - path + 1) : 0;

    if (of && of - path > 6) {
        snprintf(facts->names_path, sizeof facts->names_path, "%.*s-classes.txt",
                 (int)(of - path - 6), path);
        facts->num_names = data_count_lines(facts->names_path);
    }
    if (facts->num_names > 0) return;
    snprintf(facts->names_path, sizeof facts->names_path, "%.*slabel.labels.txt", folder, path);
    facts->num_names = data_count_lines(facts->names_path);
}

/* Scanning for the largest label is for data that are read in seconds. */
static bool data_can_scan(const data_files *files, const data_facts *facts) {
    const int64_t limit = (int64_t)1 << 30;
    int64_t bytes = 0;
    struct stat s;
    int i;

    for (i = 0; i < files->count; i++)
        if (!data_is_companion(files->names[i]) && stat(files->names[i], &s) == 0)
            bytes += (int64_t)s.st_size;
    return facts->num_files <= DATA_MAX_FILES && bytes <= limit;
}

static mpt_result data_look(mpt_ctx *ctx, const train_options *o, const cli_list *paths,
                            bool labels, data_facts *facts) {
    mpt_io io = *mpt_io_files();
    data_files files;
    struct stat s;
    mpt_result rc;
    bool scan;
    int i;

    memset(facts, 0, sizeof *facts);
    memset(&files, 0, sizeof files);
    facts->largest_label = -1;
    files.io = mpt_io_files();
    io.open = data_files_open;
    io.list = data_files_list;
    io.user = &files;
    /* the library refuses what can be read only once, in storage of its own alone */
    for (i = 0; i < paths->count; i++)
        if (stat(paths->items[i], &s) == 0 && !S_ISREG(s.st_mode) && !S_ISDIR(s.st_mode))
            return data_probe_loader(ctx, o, paths, NULL, facts);
    rc = data_probe_loader(ctx, o, paths, &io, facts);
    for (i = 0; i < files.count && rc == MPT_OK && facts->num_names == 0; i++)
        if (!data_is_companion(files.names[i])) data_find_names(files.names[i], facts);
    scan = labels && facts->num_names == 0 && data_can_scan(&files, facts);
    for (i = 0; i < files.count && rc == MPT_OK; i++) {
        if (data_is_companion(files.names[i])) continue;
        if (!scan && facts->picture.channels > 0) break;
        data_probe_file(ctx, files.names[i], scan ? 0 : 16, facts);
    }
    if (!scan) facts->largest_label = -1;
    data_files_free(&files);
    return rc;
}

/* The loaders that are made later say again what is to be said about the files. */
static mpt_result data_probe(mpt_ctx *ctx, train_log *log, const train_options *o,
                             const cli_list *paths, bool labels, data_facts *facts) {
    mpt_result rc;

    log->quiet = true;
    rc = data_look(ctx, o, paths, labels, facts);
    log->quiet = false;
    return rc;
}

/* ---- what follows from it -------------------------------------------------------------------- */
static bool data_is_large_network(const train_options *o) { /* made for 224 x 224 in colour */
    return !strcmp(o->arch, "resnet18") || !strcmp(o->arch, "resnet34") ||
           !strcmp(o->arch, "resnet50");
}

static bool data_is_cifar_network(const train_options *o) {
    return !strcmp(o->arch, "resnet20") || !strcmp(o->arch, "resnet32") ||
           !strcmp(o->arch, "resnet56");
}

static void data_resolve_size(train_log *log, train_options *o, const data_facts *facts) {
    enum { LARGEST_WHOLE = 256 }; /* small pictures are taken as they are */
    const mpt_image_info *p = &facts->picture;

    if (o->image_size > 0) return;
    if (data_is_large_network(o)) {
        o->image_size = 224;
        log_note(log, "image size 224: what %s is made for", o->arch);
    } else if (p->width == p->height && p->width <= LARGEST_WHOLE && p->width > 0) {
        o->image_size = p->width;
        log_note(log, "image size %lld: that of the first picture", (long long)o->image_size);
    } else {
        o->image_size = 32;
        log_note(log, "image size 32: the first picture has %lld x %lld", (long long)p->width,
                 (long long)p->height);
    }
}

static void data_resolve_channels(train_log *log, train_options *o, const data_facts *facts) {
    if (o->channels > 0) return;
    if (data_is_large_network(o)) {
        o->channels = 3;
        log_note(log, "3 channels: what %s is made for", o->arch);
    } else {
        o->channels = facts->picture.channels > 2 ? 3 : 1;
        log_note(log, "%lld channel%s: as the first picture", (long long)o->channels,
                 cli_plural(o->channels, "s"));
    }
}

static int data_resolve_classes(train_log *log, train_options *o, const data_facts *facts) {
    if (o->num_classes > 0) return CLI_RUN;
    if (facts->num_names > 0) {
        o->num_classes = facts->num_names;
        log_note(log, "%lld classes: lines of %s", (long long)o->num_classes, facts->names_path);
    } else if (facts->largest_label >= 0) {
        o->num_classes = facts->largest_label - facts->label_offset + 1;
        log_note(log, "%lld classes: the largest label is %lld, less the offset of %d",
                 (long long)o->num_classes, (long long)facts->largest_label, facts->label_offset);
    }
    if (o->num_classes >= 2 && o->num_classes <= 1000000) return CLI_RUN;
    return options_usage("--num-classes: the data don't tell how many there are (%s): give it",
                         facts->largest_label >= 0 ? "labels that fit no count of classes"
                                                   : "no file of class names, and too many "
                                                     "records to look through, or no labels");
}

static void data_resolve_augment(train_log *log, train_options *o) {
    static const char *const names[] = {"none", "flip", "crop-flip", "imagenet"};

    if (o->augment >= 0 || o->evaluate) return;
    o->augment = MPT_AUGMENT_NONE; /* digits and letters mean something else mirrored */
    if (o->channels == 3 && data_is_cifar_network(o)) o->augment = MPT_AUGMENT_CROP_FLIP;
    if (o->channels == 3 && data_is_large_network(o)) o->augment = MPT_AUGMENT_IMAGENET;
    log_note(log, "augmentation %s: the usual one for %s and %lld channel%s", names[o->augment],
             o->arch, (long long)o->channels, cli_plural(o->channels, "s"));
}

/* A text to a value for each channel; a single number counts for all, and is written out. */
static int data_spread(const train_options *o, const char *option, const char **text,
                       float values[3], char written[OPTIONS_TEXT]) {
    int n = network_channel_numbers(*text, -8, 8, values);

    if (n == 3 && o->channels == 1)
        return options_usage("--%s: '%s' has three numbers, but pictures are gray", option, *text);
    if (n == 3 || o->channels == 1) return CLI_RUN;
    snprintf(written, OPTIONS_TEXT, "%s,%s,%s", *text, *text, *text);
    *text = written;
    return CLI_RUN;
}

static int data_resolve_pixels(train_log *log, train_options *o) {
    bool chosen = !o->mean || !o->std;
    int code;

    if (!o->mean) o->mean = o->channels == 3 ? "0.485,0.456,0.406" : "0.5";
    if (!o->std) o->std = o->channels == 3 ? "0.229,0.224,0.225" : "0.5";
    if (chosen)
        log_note(log, "pixels: mean %s, std %s%s", o->mean, o->std,
                 o->channels == 3 ? " (ImageNet's)" : "");
    code = data_spread(o, "mean", &o->mean, o->mean_values, o->texts[2]);
    if (code == CLI_RUN) code = data_spread(o, "std", &o->std, o->std_values, o->texts[3]);
    return code;
}

/* Fills in what the command line left open. CLI_RUN, or the exit code. */
static int data_resolve(mpt_ctx *ctx, train_log *log, train_options *o) {
    bool needs_labels = o->num_classes == 0;
    bool needs_picture = !data_is_large_network(o) && (!o->image_size || !o->channels);
    data_facts facts, more;
    int code;

    memset(&facts, 0, sizeof facts);
    if (needs_labels || needs_picture || o->export_path) {
        const cli_list *paths = o->data.count > 0 ? &o->data : &o->val_data;
        if (data_probe(ctx, log, o, paths, needs_labels, &facts)) return log_fail_call(log, ctx);
        /* a label that only the validation set has would end the run after the first epoch */
        if (facts.largest_label >= 0 && o->data.count > 0 && o->val_data.count > 0) {
            if (data_probe(ctx, log, o, &o->val_data, true, &more)) return log_fail_call(log, ctx);
            if (more.largest_label > facts.largest_label) facts.largest_label = more.largest_label;
        }
        if (needs_picture && facts.picture.channels == 0)
            return log_fail(log,
                            "%s: no picture in '%s' of the first records can be read: give "
                            "--image-size and --channels, or another --image-key",
                            paths->items[0], facts.image_key);
    }
    data_resolve_size(log, o, &facts);
    data_resolve_channels(log, o, &facts);
    code = data_resolve_classes(log, o, &facts);
    if (facts.num_names == o->num_classes)
        snprintf(o->names_path, sizeof o->names_path, "%s", facts.names_path);
    data_resolve_augment(log, o);
    return code == CLI_RUN ? data_resolve_pixels(log, o) : code;
}

/* ---- the loaders ----------------------------------------------------------------------------- */
static mpt_loader_desc data_desc(const train_options *o, const cli_list *paths,
                                 mpt_precision precision) {
    mpt_loader_desc d;
    int c;

    memset(&d, 0, sizeof d);
    d.paths = paths->items;
    d.num_paths = paths->count;
    d.batch_size = (int)o->batch_size;
    d.height = d.width = (int)o->image_size;
    d.channels = (int)o->channels;
    d.num_classes = (int)o->num_classes;
    data_set_keys(o, &d);
    d.num_workers = (int)o->workers;
    /* the network's own storage: half the bytes to move, and the same numbers */
    if (network_storage(precision) == MPT_F16) d.dtype = MPT_F16;
    for (c = 0; c < 3; c++) {
        d.mean[c] = o->mean_values[c];
        d.std[c] = o->std_values[c];
    }
    if (o->skip_bad_records > 0) {
        d.on_bad_record = MPT_BAD_RECORD_SKIP;
        d.max_bad_records = o->skip_bad_records;
    }
    d.seed = (uint64_t)o->seed;
    return d;
}

static mpt_result data_open_training(mpt_ctx *ctx, const train_options *o, mpt_precision precision,
                                     mpt_loader **out) {
    mpt_loader_desc d = data_desc(o, &o->data, precision);

    d.augment = (mpt_augment)o->augment;
    d.num_lanes = (int)o->accumulate;
    d.shuffle_buffer = (int)o->shuffle_buffer;
    d.num_records = o->train_records;
    return mpt_loader_create(ctx, &d, out);
}

/* Each record once, in the order of the files. Where training crops at random, evaluation sees the
   usual central part: 224 of 256 pixels. */
static mpt_result data_open_validation(mpt_ctx *ctx, const train_options *o,
                                       mpt_precision precision, mpt_loader **out) {
    mpt_loader_desc d = data_desc(o, &o->val_data, precision);

    d.no_shuffle = 1;
    if (data_is_large_network(o)) d.center_fraction = 0.875f;
    return mpt_loader_create(ctx, &d, out);
}

static const char *data_count_source(mpt_count_source source) {
    switch (source) {
    case MPT_COUNT_ESTIMATE: return "an estimate by the bytes; --train-records makes it exact";
    case MPT_COUNT_GIVEN: return "as given";
    case MPT_COUNT_INDEX: return "by the index files";
    case MPT_COUNT_DATASET_INFO: return "by dataset_info.json";
    case MPT_COUNT_HEADERS: return "counted";
    case MPT_COUNT_EPOCH: return "counted";
    }
    return "";
}

static void data_tell(train_log *log, const char *name, const mpt_loader *loader) {
    mpt_loader_info info = mpt_loader_get_info(loader);

    log_note(log, "%s: %lld record%s (%s) in %d file%s; %s, %s with labels from %d", name,
             (long long)info.num_records, cli_plural(info.num_records, "s"),
             data_count_source(info.num_records_source), info.num_files,
             cli_plural(info.num_files, "s"), info.image_key, info.label_key, info.label_offset);
}

#endif /* TRAIN_DATA_H */
