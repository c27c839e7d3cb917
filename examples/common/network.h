/* network.h - a network described in text, one layer a line; `#` begins a comment

       conv 32 kernel 3 stride 1 padding 1 bias    kernel 3, stride 1, padding 0 unless told
       batchnorm                                   epsilon X, momentum X, zero (gamma begins at 0)
       relu
       maxpool 2 2                                 kernel, stride (default: kernel), padding
       avgpool 2 2
       globalavgpool
       dense 128                                   `dense classes` stands for --num-classes
       dropout 0.5
       add NAME                                    the line before plus the output called NAME

   Each layer takes the output of the line before, or with `from NAME` that of a named one; `as
   NAME` at the end of a line names its output. The picture is called `input`. */
#ifndef MPT_EXAMPLES_NETWORK_H
#define MPT_EXAMPLES_NETWORK_H

#include "common/cli.h"
#include "mptrain.h"

/* Networks and storage types that the programs know by a word. */
#define NETWORK_NAMES "lenet|mlp|resnet20|resnet32|resnet56|resnet18|resnet34|resnet50"
#define NETWORK_PRECISIONS "fp32|fp16|bf16"

enum {
    NETWORK_MAX_WORDS = 24,
    NETWORK_MAX_NAMES = 512,
    NETWORK_MAX_LINE = 400,
    NETWORK_MESSAGE = 1000
};

typedef struct network_name {
    char text[64];
    int value;
} network_name;

typedef struct network_file {
    mpt_ctx *ctx;
    mpt_model *model;
    const char *where; /* begins each message */
    char *message;     /* [NETWORK_MESSAGE] */
    int num_classes;
    int line;
    int last; /* output of the line before */
    network_name names[NETWORK_MAX_NAMES];
    int num_names;
    char *words[NETWORK_MAX_WORDS]; /* of the line */
    int num_words, next_word;
} network_file;

/* What is wrong with a line; false, for the caller to return. */
__attribute__((format(printf, 2, 3))) CLI_FN bool network_wrong(network_file *f, const char *format,
                                                                ...) {
    va_list args;
    int n = snprintf(f->message, NETWORK_MESSAGE, "%.300s:%d: ", f->where, f->line);

    va_start(args, format);
    vsnprintf(f->message + n, NETWORK_MESSAGE - (size_t)n, format, args);
    va_end(args);
    return false;
}

CLI_FN bool network_split(network_file *f, char *line) {
    size_t n = strcspn(line, "#");

    if (n > 0 && line[n] == 0 && line[n - 1] == '\r') n--; /* lines end as on Windows */
    line[n] = 0;
    for (n = 0; line[n]; n++)
        if (line[n] != '\t' && (unsigned char)line[n] < ' ')
            return network_wrong(f, "there is a control character in it");
    f->num_words = f->next_word = 0;
    for (line = strtok(line, " \t"); line; line = strtok(NULL, " \t")) {
        if (f->num_words == NETWORK_MAX_WORDS) return network_wrong(f, "too many words");
        f->words[f->num_words++] = line;
    }
    return true;
}

CLI_FN const char *network_word(network_file *f) { /* NULL: the line is at its end */
    return f->next_word < f->num_words ? f->words[f->next_word++] : NULL;
}

CLI_FN bool network_is_next(network_file *f, const char *word) { /* takes it if so */
    if (f->next_word == f->num_words || strcmp(f->words[f->next_word], word) != 0) return false;
    f->next_word++;
    return true;
}

CLI_FN bool network_int(network_file *f, const char *what, int64_t low, int64_t high, int *out) {
    const char *word = network_word(f);
    int64_t value;

    if (!word) return network_wrong(f, "%s is missing", what);
    if (!cli_int_from_text(word, &value) || value < low || value > high)
        return network_wrong(f, "%s: '%s' is no whole number from %lld to %lld", what, word,
                             (long long)low, (long long)high);
    *out = (int)value;
    return true;
}

CLI_FN bool network_number(network_file *f, const char *what, double low, double high, float *out) {
    const char *word = network_word(f);
    double value;

    if (!word) return network_wrong(f, "%s is missing", what);
    if (!cli_double_from_text(word, &value) || value < low || value > high)
        return network_wrong(f, "%s: '%s' is no number from %g to %g", what, word, low, high);
    *out = (float)value;
    return true;
}

/* An optional number without a word before it: the next word, if it is a number. */
CLI_FN bool network_optional_int(network_file *f, const char *what, int64_t low, int64_t high,
                                 int *out) {
    int64_t value;

    if (f->next_word == f->num_words || !cli_int_from_text(f->words[f->next_word], &value))
        return true;
    return network_int(f, what, low, high, out);
}

CLI_FN bool network_find(network_file *f, int *value) {
    const char *word = network_word(f);
    int i;

    if (!word) return network_wrong(f, "the name of a layer is missing");
    for (i = 0; i < f->num_names; i++)
        if (!strcmp(f->names[i].text, word)) *value = f->names[i].value;
    for (i = 0; i < f->num_names; i++)
        if (!strcmp(f->names[i].text, word)) return true;
    return network_wrong(f, "no line above is called '%s' (`as %s` names one)", word, word);
}

CLI_FN bool network_add_name(network_file *f, const char *word, int value) {
    int i;

    for (i = 0; i < f->num_names; i++)
        if (!strcmp(f->names[i].text, word))
            return network_wrong(f, "'%s' is the name of a line above already", word);
    if (f->num_names == NETWORK_MAX_NAMES) return network_wrong(f, "too many names");
    if (strlen(word) >= sizeof f->names[0].text)
        return network_wrong(f, "the name '%s' is too long", word);
    snprintf(f->names[f->num_names].text, sizeof f->names[0].text, "%s", word);
    f->names[f->num_names++].value = value;
    return true;
}

/* ---- layers: x is the input, *x becomes the output ------------------------------------------- */
CLI_FN bool network_conv(network_file *f, int *x) {
    mpt_conv2d_desc d;

    memset(&d, 0, sizeof d);
    if (!network_int(f, "the number of channels", 1, 1 << 20, &d.out_channels)) return false;
    for (;;) {
        if (network_is_next(f, "bias")) d.use_bias = 1;
        else if (network_is_next(f, "kernel")) {
            if (!network_int(f, "kernel", 1, 1024, &d.kernel)) return false;
        } else if (network_is_next(f, "stride")) {
            if (!network_int(f, "stride", 1, 1024, &d.stride)) return false;
        } else if (network_is_next(f, "padding")) {
            if (!network_int(f, "padding", 0, 1024, &d.padding)) return false;
        } else break;
    }
    *x = mpt_conv2d(f->model, *x, &d);
    return true;
}

CLI_FN bool network_batchnorm(network_file *f, int *x) {
    mpt_batchnorm_desc d;

    memset(&d, 0, sizeof d);
    for (;;) {
        if (network_is_next(f, "zero")) d.zero_init_gamma = 1;
        else if (network_is_next(f, "epsilon")) {
            if (!network_number(f, "epsilon", 1e-12, 1, &d.epsilon)) return false;
        } else if (network_is_next(f, "momentum")) {
            if (!network_number(f, "momentum", 1e-6, 1, &d.momentum)) return false;
        } else break;
    }
    *x = mpt_batchnorm(f->model, *x, &d);
    return true;
}

CLI_FN bool network_pool(network_file *f, int *x, bool max) {
    int kernel = 0, stride, padding = 0;

    if (!network_int(f, "the window", 1, 16, &kernel)) return false;
    stride = kernel;
    if (!network_optional_int(f, "stride", 1, 1024, &stride)) return false;
    if (!network_optional_int(f, "padding", 0, 1024, &padding)) return false;
    *x = max ? mpt_max_pool(f->model, *x, kernel, stride, padding)
             : mpt_avg_pool(f->model, *x, kernel, stride, padding);
    return true;
}

CLI_FN bool network_dense(network_file *f, int *x) {
    int features = f->num_classes;

    if (!network_is_next(f, "classes") &&
        !network_int(f, "the number of outputs (or the word classes)", 1, 1 << 24, &features))
        return false;
    *x = mpt_dense(f->model, *x, features);
    return true;
}

CLI_FN bool network_dropout(network_file *f, int *x) {
    float probability = 0;

    if (!network_number(f, "the probability", 0, 0.9999, &probability)) return false;
    *x = mpt_dropout(f->model, *x, probability);
    return true;
}

CLI_FN bool network_add(network_file *f, int *x) {
    int other = MPT_INPUT;

    if (!network_find(f, &other)) return false;
    *x = mpt_add(f->model, *x, other);
    return true;
}

/* ---- lines ----------------------------------------------------------------------------------- */
CLI_FN bool network_layer(network_file *f, const char *kind, int *x) {
    if (!strcmp(kind, "conv")) return network_conv(f, x);
    if (!strcmp(kind, "batchnorm")) return network_batchnorm(f, x);
    if (!strcmp(kind, "maxpool")) return network_pool(f, x, true);
    if (!strcmp(kind, "avgpool")) return network_pool(f, x, false);
    if (!strcmp(kind, "dense")) return network_dense(f, x);
    if (!strcmp(kind, "dropout")) return network_dropout(f, x);
    if (!strcmp(kind, "add")) return network_add(f, x);
    if (!strcmp(kind, "relu")) *x = mpt_relu(f->model, *x);
    else if (!strcmp(kind, "globalavgpool")) *x = mpt_global_avg_pool(f->model, *x);
    else
        return network_wrong(f,
                             "'%s' is no layer: conv, batchnorm, relu, maxpool, avgpool, "
                             "globalavgpool, dense, dropout, add",
                             kind);
    return true;
}

/* `from NAME` and `as NAME` may end a line in either order. from is needed before the layer is
   made, so they are taken off first. */
CLI_FN bool network_ends(network_file *f, int *x, const char **name) {
    while (f->num_words >= 2) {
        const char *word = f->words[f->num_words - 2];
        bool from = !strcmp(word, "from");

        if (!from && strcmp(word, "as") != 0) return true;
        f->next_word = f->num_words - 1;
        if (from && !network_find(f, x)) return false;
        if (!from) *name = f->words[f->num_words - 1];
        f->num_words -= 2;
    }
    return true;
}

/* The library keeps the first mistake; asking it to finish brings it up. */
CLI_FN bool network_wiring(network_file *f) {
    if (mpt_model_finish(f->model, -1) == MPT_OK) return true;
    return network_wrong(f, "%s", mpt_last_error(f->ctx)->message);
}

CLI_FN bool network_line(network_file *f, char *line) {
    const char *name = NULL, *kind;
    int x = f->last;

    if (!network_split(f, line)) return false;
    if (f->num_words == 0) return true;
    if (!network_ends(f, &x, &name)) return false;
    f->next_word = 0;
    kind = network_word(f);
    if (!kind) return network_wrong(f, "a layer is missing before 'as' or 'from'");
    if (!network_layer(f, kind, &x)) return false;
    if (f->next_word < f->num_words)
        return network_wrong(f, "'%s' is not understood here", f->words[f->next_word]);
    if (x < 0) return network_wiring(f);
    f->last = x;
    if (!name) return true;
    mpt_name(f->model, x, name);
    return network_add_name(f, name, x);
}

CLI_FN bool network_lines(network_file *f, const char *text) {
    char line[NETWORK_MAX_LINE];

    while (*text) {
        size_t n = strcspn(text, "\n");
        f->line++;
        if (n >= sizeof line) return network_wrong(f, "the line is too long");
        memcpy(line, text, n);
        line[n] = 0;
        if (!network_line(f, line)) return false;
        text += n + (text[n] == '\n');
    }
    if (f->last != MPT_INPUT) return true;
    snprintf(f->message, NETWORK_MESSAGE, "%.300s: there is no layer in it", f->where);
    return false;
}

/* Is there one output for each class? A network of the library always has that. */
CLI_FN bool network_check_classes(network_file *f) {
    mpt_layer_info last;

    if (mpt_model_layer(f->model, mpt_model_num_layers(f->model) - 1, &last) != MPT_OK) return true;
    if (last.channels == f->num_classes) return true;
    return network_wrong(f,
                         "the last layer has %lld outputs for %d classes: end with `dense "
                         "classes`",
                         (long long)last.channels, f->num_classes);
}

/* Adds the layers of a text to the model and finishes it. False: the message tells line and cause,
   begun with where. */
CLI_FN bool network_describe(mpt_ctx *ctx, mpt_model *m, const char *where, const char *text,
                             int num_classes, char message[NETWORK_MESSAGE]) {
    network_file *f = (network_file *)calloc(1, sizeof *f);
    bool ok;

    if (!f) {
        snprintf(message, NETWORK_MESSAGE, "no memory");
        return false;
    }
    f->ctx = ctx;
    f->model = m;
    f->where = where;
    f->message = message;
    f->num_classes = num_classes;
    ok = network_add_name(f, "input", MPT_INPUT) && network_lines(f, text);
    if (ok && mpt_model_finish(m, f->last) != MPT_OK)
        ok = network_wrong(f, "%s", mpt_last_error(ctx)->message);
    ok = ok && network_check_classes(f);
    free(f);
    return ok;
}

#endif /* MPT_EXAMPLES_NETWORK_H */
