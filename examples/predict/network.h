/* predict/network.h - the network behind a file of weights: what it is, its pictures, its classes

   What a file does not tell in its metadata comes from options, and an option wins over the file:

       mptrain.arch          resnet20, ...        mptrain.mean, mptrain.std   0.5 or 0.48,0.46,0.41
       mptrain.image_size    32                   mptrain.classes             one name a line
       mptrain.channels      1 or 3
       mptrain.num_classes   10
       mptrain.description   the layers of a network that has no name: common/network.h */
#ifndef PREDICT_NETWORK_H
#define PREDICT_NETWORK_H

#include "common/buffer.h"
#include "common/network.h"

enum { PREDICT_MAX_SIDE = 4096, PREDICT_MAX_CLASSES = 1000000 };

typedef struct predict_options {
    const char *weights;
    cli_list data; /* TFRecords; else operands are pictures */
    int arch;      /* place in NETWORK_NAMES; -1: as the file says */
    int precision, device;
    int64_t image_size, channels, num_classes; /* 0: as the file says */
    const char *mean, *std, *classes;          /* NULL: as the file says */
    const char *image_key, *label_key, *label_offset;
    int64_t batch_size, top, limit, threads, workers;
    bool json, draw;
} predict_options;

typedef struct predict_network {
    mpt_ctx *ctx;
    mpt_model *model;
    mpt_trainer *trainer;
    char arch[16];     /* "": described */
    char *description; /* NULL: by name */
    int size, channels, num_classes, batch_size;
    float mean[3], std[3];
    char *names_text;   /* what names point into */
    const char **names; /* (num_classes); NULL: classes have numbers only */
} predict_network;

static int predict_fail(const mpt_ctx *ctx) {
    return cli_error("predict", CLI_EXIT_FAILURE, "%s", mpt_last_error(ctx)->message);
}

static int predict_no_memory(void) {
    return cli_error("predict", CLI_EXIT_FAILURE, "no memory");
}

static void predict_network_free(predict_network *n) {
    mpt_trainer_destroy(n->trainer);
    mpt_model_destroy(n->model);
    free((void *)n->names);
    free(n->names_text);
    free(n->description);
}

/* ---- what the file or the line says ---------------------------------------------------------- */
/* A whole number: the option's, else the file's. 0 stays 0 when neither tells. */
static int predict_number(const predict_options *o, mpt_safetensors *file, const char *key,
                          int64_t option, int64_t most, int *out) {
    const char *text = mpt_safetensors_metadata(file, key);
    int64_t value = option;

    if (option == 0 && text && (!cli_int_from_text(text, &value) || value < 1 || value > most))
        return cli_error("predict", CLI_EXIT_FAILURE,
                         "%s: its metadata say %s '%.40s': no whole number from 1 to %lld",
                         o->weights, key, text, (long long)most);
    *out = (int)value;
    return 0;
}

/* One number for all channels, or one for each. */
static bool predict_numbers(const char *text, int channels, bool above_zero, float out[3]) {
    int n = network_channel_numbers(text, above_zero ? 1e-30 : -1e6, 1e6, out);

    return n == 1 || (n == 3 && channels == 3);
}

static int predict_constants(const predict_options *o, mpt_safetensors *file, const char *name,
                             const char *option, bool above_zero, const predict_network *n,
                             float out[3]) {
    char key[32];
    const char *text;

    snprintf(key, sizeof key, "mptrain.%s", name);
    text = mpt_safetensors_metadata(file, key);
    if (option && !predict_numbers(option, n->channels, above_zero, out))
        return cli_error("predict", CLI_EXIT_USAGE,
                         "--%s: '%.80s' is not one number%s, or %d with commas between", name,
                         option, above_zero ? " above 0" : "", n->channels);
    if (!option && text && !predict_numbers(text, n->channels, above_zero, out))
        return cli_error("predict", CLI_EXIT_FAILURE,
                         "%s: its metadata say %s '%.40s': not one number%s, or %d with commas",
                         o->weights, key, text, above_zero ? " above 0" : "", n->channels);
    return 0;
}

/* ---- names of classes ------------------------------------------------------------------------ */
/* A whole file of any size; false after a message. */
static bool predict_read_file(const char *path, byte_buffer *out) {
    char why[BYTE_BUFFER_MESSAGE];

    if (byte_buffer_read(out, path, SIZE_MAX, why)) return true;
    cli_error("predict", 0, "%s", why);
    return false;
}

static char *predict_copy(const char *text) { /* NULL: no memory */
    char *copy = (char *)malloc(strlen(text) + 1);

    if (copy) memcpy(copy, text, strlen(text) + 1);
    return copy;
}

/* Ends each line of the text; the number of lines. names NULL: only counts. */
static int predict_split_lines(char *text, const char **names) {
    int count = 0;

    while (*text) {
        size_t n = strcspn(text, "\n");
        if (names) names[count] = text;
        count++;
        if (names && n > 0 && text[n - 1] == '\r') text[n - 1] = 0;
        text += n;
        if (!*text) break;
        if (names) *text = 0;
        text++;
    }
    return count;
}

static int predict_classes(const predict_options *o, mpt_safetensors *file, predict_network *n) {
    const char *text = mpt_safetensors_metadata(file, "mptrain.classes");
    const char *where = o->classes ? o->classes : o->weights;
    byte_buffer named = {NULL, 0, 0};
    int count;

    if (!o->classes && !text) return 0;
    if (o->classes) {
        bool read = predict_read_file(o->classes, &named);
        n->names_text = (char *)named.data;
        if (!read) return CLI_EXIT_FAILURE;
    } else {
        n->names_text = predict_copy(text);
        if (!n->names_text) return predict_no_memory();
    }
    count = predict_split_lines(n->names_text, NULL);
    if (n->num_classes == 0) n->num_classes = count;
    if (count != n->num_classes || count == 0)
        return cli_error("predict", CLI_EXIT_FAILURE, "%s: %d name%s of classes for %d classes",
                         where, count, cli_plural(count, "s"), n->num_classes);
    n->names = (const char **)calloc((size_t)count, sizeof *n->names);
    if (!n->names) return predict_no_memory();
    predict_split_lines(n->names_text, n->names);
    return 0;
}

/* ---- opening --------------------------------------------------------------------------------- */
/* All that is missing, in one message. */
static int predict_missing(const predict_options *o, const predict_network *n) {
    static const char *const names[] = {"network", "picture size", "number of channels",
                                        "number of classes"};
    static const char *const options[] = {"arch", "image-size", "channels", "num-classes"};
    bool missing[] = {!n->arch[0] && !n->description, !n->size, !n->channels, !n->num_classes};
    char what[120] = "", give[80] = "";
    size_t i;

    for (i = 0; i < sizeof names / sizeof names[0]; i++) {
        size_t used = strlen(what), given = strlen(give);
        if (!missing[i]) continue;
        snprintf(what + used, sizeof what - used, "%s%s", used ? ", " : "", names[i]);
        snprintf(give + given, sizeof give - given, "%s--%s", given ? " " : "", options[i]);
    }
    if (!what[0]) return 0;
    return cli_error("predict", CLI_EXIT_USAGE, "%s does not tell its %s: give %s", o->weights,
                     what, give);
}

static int predict_describe_arch(const predict_options *o, mpt_safetensors *file,
                                 predict_network *n) {
    const char *arch = mpt_safetensors_metadata(file, "mptrain.arch");
    const char *described = mpt_safetensors_metadata(file, "mptrain.description");

    if (o->arch >= 0) cli_choice_name(NETWORK_NAMES, o->arch, n->arch, sizeof n->arch);
    else if (arch && cli_choice_from_text(arch, NETWORK_NAMES) >= 0)
        snprintf(n->arch, sizeof n->arch, "%s", arch);
    else if (arch)
        return cli_error("predict", CLI_EXIT_FAILURE,
                         "%s: it is of the network '%.40s', which is none of %s", o->weights, arch,
                         NETWORK_NAMES);
    else if (described && !(n->description = predict_copy(described))) return predict_no_memory();
    return 0;
}

static int predict_describe(const predict_options *o, mpt_safetensors *file, predict_network *n) {
    int code = predict_describe_arch(o, file, n);

    if (!code)
        code = predict_number(o, file, "mptrain.image_size", o->image_size, PREDICT_MAX_SIDE,
                              &n->size);
    if (!code) code = predict_number(o, file, "mptrain.channels", o->channels, 3, &n->channels);
    if (!code)
        code = predict_number(o, file, "mptrain.num_classes", o->num_classes, PREDICT_MAX_CLASSES,
                              &n->num_classes);
    if (!code) code = predict_classes(o, file, n);
    if (!code) code = predict_missing(o, n);
    if (code) return code;
    if (n->channels == 2)
        return cli_error("predict", CLI_EXIT_USAGE,
                         "pictures have 1 channel (gray) or 3 (colour), not 2");
    n->std[0] = n->std[1] = n->std[2] = 1;
    code = predict_constants(o, file, "mean", o->mean, false, n, n->mean);
    return code ? code : predict_constants(o, file, "std", o->std, true, n, n->std);
}

/* A trainer that never trains: it holds the weights and knows the way forward. */
static int predict_build(const predict_options *o, predict_network *n) {
    char message[NETWORK_MESSAGE];
    mpt_trainer_desc desc;
    mpt_result rc;

    memset(&desc, 0, sizeof desc);
    desc.precision = network_precision(o->precision);
    desc.optimizer.kind = MPT_OPTIMIZER_SGD;
    desc.optimizer.learning_rate = 1; /* a desc has to have one */
    rc = mpt_model_create(n->ctx, n->size, n->size, n->channels, &n->model);
    if (rc == MPT_OK && n->description &&
        !network_describe(n->ctx, n->model, o->weights, n->description, n->num_classes, message))
        return cli_error("predict", CLI_EXIT_FAILURE, "%s", message);
    if (rc == MPT_OK && !n->description)
        rc = mpt_model_finish(n->model, mpt_zoo(n->model, n->arch, n->num_classes));
    if (rc == MPT_OK) rc = mpt_trainer_create(n->model, &desc, n->batch_size, &n->trainer);
    if (rc == MPT_OK) rc = mpt_trainer_import(n->trainer, NULL, o->weights);
    return rc ? predict_fail(n->ctx) : 0;
}

static int predict_network_open(mpt_ctx *ctx, const predict_options *o, predict_network *n) {
    mpt_safetensors_desc desc;
    mpt_safetensors *file = NULL;
    int code;

    memset(n, 0, sizeof *n);
    n->ctx = ctx;
    n->batch_size = o->data.count > 0 ? (int)o->batch_size : 1;
    memset(&desc, 0, sizeof desc);
    desc.path = o->weights;
    if (mpt_safetensors_open(ctx, &desc, &file)) return predict_fail(ctx);
    code = predict_describe(o, file, n);
    mpt_safetensors_close(file);
    return code ? code : predict_build(o, n);
}

#endif /* PREDICT_NETWORK_H */
