/* tfrecord/sources.h - commands that make TFRecords: from-idx, from-folder, from-csv */
#ifndef TFRECORD_SOURCES_H
#define TFRECORD_SOURCES_H

#include "tfrecord/build.h"

/* ---- from-idx ----------------------------------------------------------------------------------
   IDX, the format of MNIST (yann.lecun.com/exdb/mnist): two zero bytes, type of the elements (8:
   unsigned bytes), number of dimensions, each as 32 bits big-endian, then the elements. */
enum { IDX_MAX_DIMS = 4, IDX_MAX_SIDE = 16384 };

typedef struct idx_file {
    int num_dims;
    int64_t dims[IDX_MAX_DIMS];
    byte_buffer elements;
} idx_file;

#ifdef MPTRAIN_ZLIB
typedef gzFile idx_stream; /* reads plain files too */
static idx_stream idx_open(const char *path) {
    return gzopen(path, "rb");
}
static void idx_close(idx_stream f) {
    gzclose(f);
}
static int64_t idx_get(idx_stream f, void *dst, size_t size) { /* -1: error */
    return gzread(f, dst, (unsigned)size);
}
#else
typedef FILE *idx_stream;
static idx_stream idx_open(const char *path) {
    return fopen(path, "rb");
}
static void idx_close(idx_stream f) {
    fclose(f);
}
static int64_t idx_get(idx_stream f, void *dst, size_t size) {
    size_t n = fread(dst, 1, size, f);
    return ferror(f) ? -1 : (int64_t)n;
}
#endif

/* The elements, and that nothing stands behind them. The buffer grows with what is really there,
   whatever the header promises. */
static bool idx_read_elements(idx_stream f, const char *path, int64_t expected, byte_buffer *out,
                              char why[600]) {
    const int64_t block = 4 << 20;
    uint8_t extra;
    int64_t n = 1, want;

    while ((int64_t)out->size < expected && n > 0) {
        want = expected - (int64_t)out->size < block ? expected - (int64_t)out->size : block;
        if (!byte_buffer_reserve(out, out->size + (size_t)want)) {
            snprintf(why, 600, "%s: no memory to read it", path);
            return false;
        }
        n = idx_get(f, out->data + out->size, (size_t)want);
        if (n > 0) out->size += (size_t)n;
    }
    if (n >= 0 && (int64_t)out->size == expected) n = idx_get(f, &extra, 1);
    if (n < 0) snprintf(why, 600, "%s: can't read it: damaged compression or storage", path);
    else if ((int64_t)out->size < expected)
        snprintf(why, 600, "%s: ends early: its header promises %lld bytes of data, %lld are there",
                 path, (long long)expected, (long long)out->size);
    else if (n > 0)
        snprintf(why, 600, "%s: bytes follow behind the %lld that its header promises", path,
                 (long long)expected);
    return n == 0 && (int64_t)out->size == expected;
}

static bool idx_read_header(idx_stream f, const char *path, int min_dims, int max_dims,
                            idx_file *out, char why[600]) {
    uint8_t head[4 + 4 * IDX_MAX_DIMS];
    int i;

    memset(head, 0, sizeof head);
    if (idx_get(f, head, 4) != 4 || head[0] || head[1]) {
        snprintf(why, 600, "%s: is no IDX file: it must begin with two zero bytes%s", path,
                 head[0] == 0x1f && head[1] == 0x8b ? "; gzip needs a build with zlib" : "");
        return false;
    }
    out->num_dims = head[3];
    if (head[2] != 8) {
        snprintf(why, 600, "%s: elements of type 0x%02x; only unsigned bytes (0x08) are read", path,
                 head[2]);
        return false;
    }
    if (out->num_dims < min_dims || out->num_dims > max_dims) {
        snprintf(why, 600, "%s: has %d dimension%s; %s: are IMAGES and LABELS swapped?", path,
                 head[3], cli_plural(head[3], "s"),
                 max_dims == 1 ? "labels have 1" : "pictures have 3, or 4 with channels");
        return false;
    }
    if (idx_get(f, head + 4, 4 * (size_t)out->num_dims) != 4 * out->num_dims) {
        snprintf(why, 600, "%s: ends early, in its header", path);
        return false;
    }
    for (i = 0; i < out->num_dims; i++) {
        const uint8_t *p = head + 4 + 4 * i;
        out->dims[i] = (int64_t)p[0] << 24 | p[1] << 16 | p[2] << 8 | p[3];
    }
    return true;
}

static bool idx_check_picture_size(const idx_file *f, const char *path, char why[600]) {
    bool ok = f->dims[1] >= 1 && f->dims[1] <= IDX_MAX_SIDE && f->dims[2] >= 1 &&
              f->dims[2] <= IDX_MAX_SIDE;

    if (!ok) {
        snprintf(why, 600, "%s: pictures of %lldx%lld; sides from 1 to %d are read", path,
                 (long long)f->dims[2], (long long)f->dims[1], IDX_MAX_SIDE);
    } else if (f->num_dims == 4 && f->dims[3] != 1 && f->dims[3] != 3) {
        snprintf(why, 600, "%s: pictures of %lld channel%s; 1 or 3 are read", path,
                 (long long)f->dims[3], cli_plural(f->dims[3], "s"));
        ok = false;
    }
    return ok;
}

/* pictures: 3 or 4 dimensions; else labels: 1. The caller frees out->elements. */
static bool idx_read(tool *t, const char *path, bool pictures, idx_file *out) {
    char why[600];
    int64_t expected = 1;
    idx_stream f;
    bool ok;
    int i;

    if (tool_refuse_dash(t, path)) return false;
    f = idx_open(path);
    if (!f) {
        tool_fail(t, "%s: can't open it: %s", path, cli_errno_text(errno));
        return false;
    }
    ok = idx_read_header(f, path, pictures ? 3 : 1, pictures ? 4 : 1, out, why);
    if (ok && pictures) ok = idx_check_picture_size(out, path, why);
    for (i = 0; ok && i < out->num_dims; i++) expected *= out->dims[i]; /* below 2^62 */
    if (ok) ok = idx_read_elements(f, path, expected, &out->elements, why);
    if (!ok) tool_fail(t, "%s", why);
    idx_close(f);
    return ok;
}

static bool idx_list(tool *t, dataset *d, const cli_list *operands, const idx_file *images,
                     const idx_file *labels) {
    int64_t i;

    if (images->dims[0] != labels->dims[0] || images->dims[0] == 0) {
        tool_fail(t, "%s holds %lld picture%s, %s holds %lld label%s", operands->items[0],
                  (long long)images->dims[0], cli_plural(images->dims[0], "s"), operands->items[1],
                  (long long)labels->dims[0], cli_plural(labels->dims[0], "s"));
        return false;
    }
    d->pixels = images->elements.data;
    d->height = images->dims[1];
    d->width = images->dims[2];
    d->channels = images->num_dims == 4 ? images->dims[3] : 1;
    for (i = 0; i < images->dims[0]; i++) {
        if (dataset_add(d, NULL, i, labels->elements.data[i])) continue;
        tool_fail_memory(t);
        return false;
    }
    return classes_of_numbers(t, d);
}

static void from_idx_body(tool *t, const cli_list *operands, void *user) {
    dataset *d = (dataset *)user;
    idx_file images, labels;

    memset(&images, 0, sizeof images);
    memset(&labels, 0, sizeof labels);
    if (build_begin(t, d, operands->items[2]) && idx_read(t, operands->items[0], true, &images) &&
        idx_read(t, operands->items[1], false, &labels) &&
        idx_list(t, d, operands, &images, &labels))
        build_dataset(t, d);
    byte_buffer_free(&images.elements);
    byte_buffer_free(&labels.elements);
}

static cli_option classes_option(dataset *d) {
    return cli_text("classes", 0, &d->classes_file, "FILE",
                    "names of the classes, one a line, the first for label 0");
}

static cli_option skip_option(dataset *d) {
    return cli_int("skip-bad-records", 0, &d->max_bad, 0, INT64_MAX, "MAX",
                   "leave out up to MAX files that are no JPEG, PNG or BMP picture, naming each");
}

static const char from_idx_about[] =
    "Pictures and labels in MNIST's IDX format, plain or gzipped, to records with PNG\n"
    "pictures.\n" BUILD_ABOUT;

static int command_from_idx(int argc, char **argv) {
    cli_option options[DATASET_NUM_OPTIONS + 1];
    cli_command c = {"tfrecord from-idx",
                     "IMAGES LABELS OUT@N",
                     from_idx_about,
                     TOOL_VERSION,
                     options,
                     DATASET_NUM_OPTIONS + 1,
                     3,
                     3};
    dataset d;

    dataset_init(&d, options);
    options[DATASET_NUM_OPTIONS] = classes_option(&d);
    return dataset_run(&d, &c, argc, argv, from_idx_body);
}

/* ---- from-folder ----------------------------------------------------------------------------- */
enum { FOLDER_MAX_DEPTH = 16 }; /* a loop of symbolic links ends here */

/* Names in a directory without hidden ones, sorted by their bytes, so that the order does not
   depend on the file system. */
static bool folder_names(tool *t, const char *path, tool_strings *names) {
    DIR *dir = opendir(path);
    const struct dirent *entry;
    bool ok = true;

    if (!dir) {
        tool_fail(t, "%s: can't open the directory: %s", path, cli_errno_text(errno));
        return false;
    }
    while (ok && (entry = readdir(dir)) != NULL) {
        if (entry->d_name[0] == '.') continue;
        ok = tool_strings_take(names, tool_copy(entry->d_name, strlen(entry->d_name)));
    }
    closedir(dir);
    if (!ok) tool_fail_memory(t);
    if (names->count)
        qsort(names->items, (size_t)names->count, sizeof *names->items, tool_compare_strings);
    return ok;
}

/* All files below a class's directory. */
static bool folder_walk(tool *t, dataset *d, const char *path, int64_t label, int depth) {
    tool_strings names;
    struct stat s;
    int64_t i;
    bool ok;

    memset(&names, 0, sizeof names);
    if (depth > FOLDER_MAX_DEPTH) {
        tool_fail(t, "%s: directories are nested more than %d deep", path, FOLDER_MAX_DEPTH);
        return false;
    }
    ok = folder_names(t, path, &names);
    for (i = 0; ok && i < names.count; i++) {
        char *file = tool_format("%s/%s", path, names.items[i]);

        if (file && stat(file, &s) == 0 && S_ISDIR(s.st_mode)) {
            ok = folder_walk(t, d, file, label, depth + 1);
            free(file);
        } else if (!file || !dataset_add(d, file, 0, label)) {
            tool_fail_memory(t);
            ok = false;
        }
    }
    tool_strings_free(&names);
    return ok;
}

/* outside: files beside the directories of the classes. */
static bool folder_class(tool *t, dataset *d, const char *root, const char *name,
                         tool_strings *outside) {
    char *path = tool_format("%s/%s", root, name);
    struct stat s;
    bool ok = path != NULL;

    if (ok && (stat(path, &s) != 0 || !S_ISDIR(s.st_mode))) {
        ok = tool_strings_take(outside, path);
        if (!ok) tool_fail_memory(t);
        return ok;
    }
    ok = ok && tool_strings_take(&d->classes, tool_copy(name, strlen(name)));
    if (!ok) tool_fail_memory(t);
    else ok = folder_walk(t, d, path, d->classes.count - 1, 1);
    free(path);
    return ok;
}

static void from_folder_body(tool *t, const cli_list *operands, void *user) {
    dataset *d = (dataset *)user;
    const char *root = operands->items[0];
    tool_strings names, outside;
    int64_t i;
    bool ok;

    memset(&names, 0, sizeof names);
    memset(&outside, 0, sizeof outside);
    ok = build_begin(t, d, operands->items[1]) && folder_names(t, root, &names);
    for (i = 0; ok && i < names.count; i++) ok = folder_class(t, d, root, names.items[i], &outside);
    if (ok && d->count == 0) {
        tool_fail(t, "%s: holds no pictures; a directory for each class is expected in it", root);
        ok = false;
    } else if (ok && outside.count) {
        cli_error(t->name, 0,
                  "warning: %lld file%s in no class's directory left out; the first is %s",
                  (long long)outside.count, cli_plural(outside.count, "s"), outside.items[0]);
    }
    tool_strings_free(&names);
    tool_strings_free(&outside);
    if (ok) build_dataset(t, d);
}

static const char from_folder_about[] =
    "DIR holds a directory for each class, which has its name; labels follow the order\n"
    "of the names' bytes. All files in such a directory, and in directories below it,\n"
    "have to be pictures, whatever their names end in: JPEG, PNG or BMP. Another file is\n"
    "an error, or with --skip-bad-records is left out. Files beside the directories are\n"
    "left out with a warning; a directory without pictures is a class all the same, with\n"
    "a warning. Names that begin with a dot are passed over.\n" BUILD_ABOUT;

static int command_from_folder(int argc, char **argv) {
    cli_option options[DATASET_NUM_OPTIONS + 1];
    cli_command c = {"tfrecord from-folder",
                     "DIR OUT@N",
                     from_folder_about,
                     TOOL_VERSION,
                     options,
                     DATASET_NUM_OPTIONS + 1,
                     2,
                     2};
    dataset d;

    dataset_init(&d, options);
    options[DATASET_NUM_OPTIONS] = skip_option(&d);
    return dataset_run(&d, &c, argc, argv, from_folder_body);
}

/* ---- from-csv ----------------------------------------------------------------------------------
   RFC 4180: commas, fields in double quotes where needed, a doubled quote for a quote; lines end in
   LF or CRLF. */
typedef struct csv {
    const char *path;
    char *p, *end; /* what is left of the text */
    int64_t line;  /* where the row being read began */
    int64_t next_line;
    bool header; /* the first row named the columns */
    tool_strings row;
    char why[600]; /* empty: all is well */
} csv;

static void csv_fail(csv *c, const char *what) {
    snprintf(c->why, sizeof c->why, "%s: line %lld: %s", c->path, (long long)c->line, what);
}

static bool csv_ends_field(const csv *c) {
    return c->p == c->end || *c->p == ',' || *c->p == '\n' || *c->p == '\r';
}

/* The field at c->p, without quotes, as a copy; NULL after an error. Unquoting never makes a text
   longer, so it is done in place. */
static char *csv_field(csv *c) {
    bool quoted = c->p < c->end && *c->p == '"';
    char *start = c->p, *out = c->p, *copy;

    if (quoted) c->p++;
    for (; quoted ? c->p < c->end : !csv_ends_field(c); c->p++) {
        if (quoted && *c->p == '"') {
            if (c->p + 1 == c->end || c->p[1] != '"') break;
            c->p++;
        }
        if (*c->p == '\n') c->next_line++;
        if (*c->p == 0) csv_fail(c, "a zero byte");
        if (*c->p == '"' && !quoted) csv_fail(c, "a quote inside a field that begins without one");
        *out++ = *c->p;
    }
    if (quoted && c->p == c->end) csv_fail(c, "the quote that begins here has no end");
    else if (quoted) c->p++;
    if (!c->why[0] && !csv_ends_field(c)) csv_fail(c, "text behind a closing quote");
    if (c->why[0]) return NULL;
    copy = tool_copy(start, (size_t)(out - start));
    if (!copy) csv_fail(c, "no memory");
    return copy;
}

static void csv_end_of_line(csv *c) {
    if (c->p < c->end && *c->p == '\r') c->p++;
    if (c->p < c->end && *c->p == '\n') c->p++;
    c->next_line++;
}

/* The next row that isn't empty; false at the end or after an error. */
static bool csv_next(csv *c) {
    tool_strings_free(&c->row);
    while (c->p < c->end && (*c->p == '\n' || *c->p == '\r')) csv_end_of_line(c);
    if (c->p == c->end) return false;
    c->line = c->next_line;
    for (;;) {
        if (!tool_strings_take(&c->row, csv_field(c))) {
            if (!c->why[0]) csv_fail(c, "no memory");
            return false;
        }
        if (c->p == c->end || *c->p != ',') break;
        c->p++;
    }
    csv_end_of_line(c);
    return true;
}

static bool csv_is_one_of(const char *text, const char *names) { /* in any case */
    char lower[24];
    size_t i;

    for (i = 0; text[i] && i + 1 < sizeof lower; i++)
        lower[i] = (char)(text[i] >= 'A' && text[i] <= 'Z' ? text[i] + 32 : text[i]);
    lower[i] = 0;
    return text[i] == 0 && cli_choice_from_text(lower, names) >= 0;
}

/* What a header may call the two columns. */
#define CSV_PATH_NAMES "path|file|filename|file_name|file_path|filepath|image|image_path|img_path"
#define CSV_LABEL_NAMES "label|class|category|target|class_name|label_name|class_id|label_id"

/* Columns of path and label from a first row that names them; -1 where it doesn't. Of several names
   the first counts. */
static void csv_find_columns(const csv *c, int64_t *path_column, int64_t *label_column) {
    int64_t i;

    *path_column = *label_column = -1;
    for (i = c->row.count - 1; i >= 0; i--) {
        if (csv_is_one_of(c->row.items[i], CSV_PATH_NAMES)) *path_column = i;
        if (csv_is_one_of(c->row.items[i], CSV_LABEL_NAMES)) *label_column = i;
    }
}

/* Paths are taken from --root, else from where the CSV file stands. */
static char *csv_resolve(const dataset *d, const csv *c, const char *path) {
    const char *slash = strrchr(c->path, '/');

    if (path[0] == '/') return tool_copy(path, strlen(path));
    if (d->root) return tool_format("%s/%s", d->root, path);
    if (!slash) return tool_copy(path, strlen(path));
    return tool_format("%.*s/%s", (int)(slash - c->path), c->path, path);
}

/* Is a first row that names no columns one of path,label? A number in it, or a file of that name,
   says so; a guess would turn an unknown header into a picture of a class of its own. */
static bool csv_is_row(const dataset *d, const csv *c) {
    const char *first = c->row.items[0];
    int64_t i, number;
    struct stat s;
    char *path;
    bool exists;

    for (i = 0; i < c->row.count; i++)
        if (cli_int_from_text(c->row.items[i], &number)) return true;
    if (c->row.count == 2 && (!*first || !c->row.items[1][0])) return true; /* and a wrong one */
    if (!*first) return false;
    path = csv_resolve(d, c, first);
    exists = !path || stat(path, &s) == 0;
    free(path);
    return exists;
}

/* What the first row is; false after the message. Of a row the columns stay as they are. */
static bool csv_first_row(const dataset *d, csv *c, int64_t *path_column, int64_t *label_column) {
    int64_t path, label;

    if (d->no_header) return true;
    csv_find_columns(c, &path, &label);
    c->header = path >= 0 && label >= 0;
    if (c->header) {
        *path_column = path;
        *label_column = label;
    } else if (!csv_is_row(d, c)) {
        snprintf(
            c->why, sizeof c->why,
            "%.200s: line %lld: there is no file '%.60s', and as a header it names no column of "
            "%s%s%s; if it is a row, say --no-header",
            c->path, (long long)c->line, c->row.items[0],
            path < 0 ? "paths (" CSV_PATH_NAMES ")" : "", path < 0 && label < 0 ? " nor of " : "",
            label < 0 ? "labels (" CSV_LABEL_NAMES ")" : "");
    }
    return !c->why[0];
}

static void csv_take_row(csv *c, dataset *d, tool_strings *labels, int64_t path_column,
                         int64_t label_column, int64_t columns) {
    const char *path, *label;

    if (c->row.count != columns) {
        snprintf(c->why, sizeof c->why, "%s: line %lld: %lld column%s where %lld are expected%s",
                 c->path, (long long)c->line, (long long)c->row.count,
                 cli_plural(c->row.count, "s"), (long long)columns,
                 c->header ? "" : " (path,label)");
        return;
    }
    path = c->row.items[path_column];
    label = c->row.items[label_column];
    if (!*path || !*label) csv_fail(c, *path ? "the label is empty" : "the path is empty");
    else if (!dataset_add(d, csv_resolve(d, c, path), c->line, 0) ||
             !tool_strings_take(labels, tool_copy(label, strlen(label))))
        csv_fail(c, "no memory");
}

/* All rows: samples with their line as index, and their labels as text. */
static bool csv_read_rows(tool *t, csv *c, dataset *d, tool_strings *labels) {
    int64_t path_column = 0, label_column = 1, columns = 2;
    bool first = true;

    while (csv_next(c)) {
        if (first && !csv_first_row(d, c, &path_column, &label_column)) break;
        if (first && c->header) columns = c->row.count;
        else csv_take_row(c, d, labels, path_column, label_column, columns);
        first = false;
        if (c->why[0]) break;
    }
    tool_strings_free(&c->row);
    if (!c->why[0] && d->count == 0)
        snprintf(c->why, sizeof c->why, "%s: holds no rows of path,label", c->path);
    if (c->why[0]) tool_fail(t, "%s", c->why);
    return !c->why[0];
}

/* Sorted distinct names; the texts are copied. */
static bool csv_collect_classes(const tool_strings *labels, tool_strings *classes) {
    char **sorted = (char **)malloc((size_t)labels->count * sizeof *sorted);
    int64_t i;
    bool ok = sorted != NULL;

    if (ok) memcpy(sorted, labels->items, (size_t)labels->count * sizeof *sorted);
    if (ok) qsort(sorted, (size_t)labels->count, sizeof *sorted, tool_compare_strings);
    for (i = 0; ok && i < labels->count; i++)
        if (i == 0 || strcmp(sorted[i], sorted[i - 1]) != 0)
            ok = tool_strings_take(classes, tool_copy(sorted[i], strlen(sorted[i])));
    free(sorted);
    return ok;
}

typedef struct csv_name {
    const char *name;
    int64_t label;
} csv_name;

static int csv_compare_names(const void *a, const void *b) {
    return strcmp(((const csv_name *)a)->name, ((const csv_name *)b)->name);
}

/* Labels that are names: those of --classes, else all that occur, sorted by their bytes. */
static bool csv_label_names(tool *t, const csv *c, dataset *d, const tool_strings *labels) {
    csv_name *table = NULL, key, *found;
    int64_t i;
    bool ok;

    if (d->classes_file) {
        if (!classes_read(t, d->classes_file, &d->classes)) return false;
    } else if (!csv_collect_classes(labels, &d->classes)) {
        tool_fail_memory(t);
        return false;
    }
    table = (csv_name *)malloc((size_t)d->classes.count * sizeof *table);
    ok = table != NULL;
    if (!ok) tool_fail_memory(t);
    for (i = 0; ok && i < d->classes.count; i++) {
        table[i].name = d->classes.items[i];
        table[i].label = i;
    }
    if (ok) qsort(table, (size_t)d->classes.count, sizeof *table, csv_compare_names);
    for (i = 0; ok && i < d->count; i++) {
        key.name = labels->items[i];
        found = (csv_name *)bsearch(&key, table, (size_t)d->classes.count, sizeof key,
                                    csv_compare_names);
        if (found) d->samples[i].label = found->label;
        else
            tool_fail(t, "%s: line %lld: the class '%s' is not in %s", c->path,
                      (long long)d->samples[i].index, key.name, d->classes_file);
        ok = found != NULL;
    }
    free(table);
    return ok;
}

/* Is only the first label a name, and no header was seen? */
static bool csv_may_be_header(const csv *c, const tool_strings *labels) {
    int64_t i, number;

    if (c->header || cli_int_from_text(labels->items[0], &number)) return false;
    for (i = 1; i < labels->count; i++)
        if (!cli_int_from_text(labels->items[i], &number)) return false;
    return true;
}

/* labels->items[i] is a name where the first is a number, or the other way round. */
static void csv_fail_mixture(tool *t, const csv *c, const dataset *d, const tool_strings *labels,
                             int64_t i, bool numbers) {
    long long first = (long long)d->samples[0].index;
    char hint[64] = "";

    if (csv_may_be_header(c, labels))
        snprintf(hint, sizeof hint, "; is line %lld a header?", first);
    tool_fail(t, "%s: line %lld: the label '%.80s' is %s, but '%.80s' in line %lld is %s%s",
              c->path, (long long)d->samples[i].index, labels->items[i],
              numbers ? "a name" : "a number", labels->items[0], first,
              numbers ? "a number" : "a name", hint);
}

/* Labels are numbers from 0 if the first is one, else names; a mixture is an error, since either
   reading of it would be wrong for somebody. */
static bool csv_set_labels(tool *t, const csv *c, dataset *d, const tool_strings *labels) {
    int64_t i, number, first = 0;
    bool numbers = cli_int_from_text(labels->items[0], &first);

    for (i = 0; i < d->count; i++) {
        long long line = (long long)d->samples[i].index;

        if (cli_int_from_text(labels->items[i], &number) != numbers) {
            csv_fail_mixture(t, c, d, labels, i, numbers);
            return false;
        }
        if (!numbers) continue;
        if (number < 0 || number >= BUILD_MAX_CLASSES) {
            tool_fail(t, "%s: line %lld: the label %s is not from 0 to %d", c->path, line,
                      labels->items[i], BUILD_MAX_CLASSES - 1);
            return false;
        }
        d->samples[i].label = number;
    }
    return numbers ? classes_of_numbers(t, d) : csv_label_names(t, c, d, labels);
}

static bool csv_list(tool *t, dataset *d, const char *path) {
    static const char byte_order_mark[] = "\xef\xbb\xbf"; /* Excel writes one */
    tool_strings labels;
    byte_buffer text;
    csv c;
    bool ok;

    memset(&labels, 0, sizeof labels);
    memset(&c, 0, sizeof c);
    if (!tool_load_file(t, path, (size_t)1 << 30, &text)) return false;
    c.path = path;
    c.p = (char *)text.data;
    c.end = c.p + text.size;
    c.next_line = 1;
    if (text.size >= 3 && !memcmp(c.p, byte_order_mark, 3)) c.p += 3;
    ok = csv_read_rows(t, &c, d, &labels) && csv_set_labels(t, &c, d, &labels);
    byte_buffer_free(&text);
    tool_strings_free(&labels);
    return ok;
}

static void from_csv_body(tool *t, const cli_list *operands, void *user) {
    dataset *d = (dataset *)user;

    if (build_begin(t, d, operands->items[1]) && csv_list(t, d, operands->items[0]))
        build_dataset(t, d);
}

static const char from_csv_about[] =
    "Rows of path,label, or under a header that names the columns: in any order, others\n"
    "among them; the first of each kind counts, in capitals or not:\n"
    "  " CSV_PATH_NAMES "\n"
    "  " CSV_LABEL_NAMES "\n"
    "A label is a number from 0, or a name; paths begin where the CSV file stands.\n" BUILD_ABOUT;

static int command_from_csv(int argc, char **argv) {
    cli_option options[DATASET_NUM_OPTIONS + 4];
    cli_command c = {"tfrecord from-csv",
                     "FILE OUT@N",
                     from_csv_about,
                     TOOL_VERSION,
                     options,
                     DATASET_NUM_OPTIONS + 4,
                     2,
                     2};
    dataset d;

    dataset_init(&d, options);
    options[DATASET_NUM_OPTIONS] = skip_option(&d);
    options[DATASET_NUM_OPTIONS + 1] = classes_option(&d);
    options[DATASET_NUM_OPTIONS + 2] = cli_text("root", 0, &d.root, "DIR", "where paths begin");
    options[DATASET_NUM_OPTIONS + 3] =
        cli_flag("no-header", 0, &d.no_header,
                 "line 1 is a row of path,label, whatever it looks like");
    return dataset_run(&d, &c, argc, argv, from_csv_body);
}

#endif /* TFRECORD_SOURCES_H */
