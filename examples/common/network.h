/* network.h - the networks that the programs know: by a word, or described in text, a layer a line;
   and the words around them: precision, device, what is done to pictures and labels */
#ifndef MPT_EXAMPLES_NETWORK_H
#define MPT_EXAMPLES_NETWORK_H

#include "common/cli.h"
#include "mptrain.h"

/* ---- words of command lines ------------------------------------------------------------------ */
#define NETWORK_NAMES "lenet|mlp|resnet20|resnet32|resnet56|resnet18|resnet34|resnet50"
#define NETWORK_PRECISIONS "fp32|fp16|bf16"
#define NETWORK_DEVICES "cpu|cuda"
enum { NETWORK_CPU = 0, NETWORK_CUDA }; /* places in NETWORK_DEVICES */

/* place: in NETWORK_PRECISIONS */
CLI_FN mpt_precision network_precision(int place) {
    static const mpt_precision precisions[] = {MPT_PRECISION_FP32, MPT_PRECISION_FP16,
                                               MPT_PRECISION_BF16};
    return precisions[place];
}

/* What activations are kept in. */
CLI_FN mpt_dtype network_storage(mpt_precision precision) {
    switch (precision) {
    case MPT_PRECISION_FP16:
    case MPT_PRECISION_FP16_PURE: return MPT_F16;
    case MPT_PRECISION_BF16: return MPT_BF16;
    default: return MPT_F32;
    }
}

/* Whoever builds a program with CUDA has a GPU in mind. */
CLI_FN int network_default_device(void) {
    return mpt_backend_cuda() ? NETWORK_CUDA : NETWORK_CPU;
}

/* Is it in this program? CLI_RUN, or the exit code after the message. */
CLI_FN int network_check_device(const char *program, int device) {
    if (device == NETWORK_CPU || mpt_backend_cuda()) return CLI_RUN;
    return cli_error(program, CLI_EXIT_USAGE,
                     "--device cuda: this program was built without CUDA: `make cuda` builds "
                     "build/train-cuda; compile others with -DMPTRAIN_CUDA and link kernels.o");
}

/* Makes a context that computes there: CLI_RUN, or the exit code after the message, since without a
   context the library has nowhere to keep the reason. */
CLI_FN int network_make_ctx(const char *program, int device, mpt_ctx_desc *desc, mpt_ctx **out) {
    mpt_error error;

    memset(&error, 0, sizeof error);
    desc->backend = device == NETWORK_CUDA ? mpt_backend_cuda() : mpt_backend_cpu();
    desc->error = &error;
    if (mpt_ctx_create(desc, out) == MPT_OK) return CLI_RUN;
    return cli_error(program, CLI_EXIT_FAILURE, "%s", error.message);
}

/* Takes --label-offset, `auto` or a number. CLI_RUN, or the exit code after the message. */
CLI_FN int network_label_offset(const char *program, const char *text, mpt_loader_desc *d) {
    int64_t offset;

    if (!strcmp(text, "auto")) return CLI_RUN;
    if (!cli_int_from_text(text, &offset) || offset < INT32_MIN || offset > INT32_MAX)
        return cli_error(program, CLI_EXIT_USAGE,
                         "--label-offset: '%s' is neither auto nor a whole number", text);
    d->label_offset = (int)offset;
    d->label_offset_is_set = 1;
    return CLI_RUN;
}

/* "0.5" for all channels or "0.485,0.456,0.406" for each of three: how many numbers stand there, 1
   or 3; 0: it is something else, or they are not from low to high. One number is in all values. */
CLI_FN int network_channel_numbers(const char *text, double low, double high, float values[3]) {
    char word[32];
    double value;
    int n = 0;

    for (;;) {
        size_t size = strcspn(text, ",");
        if (n == 3 || size >= sizeof word) return 0;
        memcpy(word, text, size);
        word[size] = 0;
        if (!cli_double_from_text(word, &value) || value < low || value > high) return 0;
        values[n++] = (float)value;
        if (!text[size]) break;
        text += size + 1;
    }
    if (n == 1) values[1] = values[2] = values[0];
    return n == 2 ? 0 : n;
}

/* ---- networks in text ------------------------------------------------------------------------ */
/* For help texts. */
#define NETWORK_GRAMMAR \
    "  conv 32 kernel 3 stride 1 padding 1 bias   kernel 3, stride 1, padding 0 unless told\n" \
    "  batchnorm                                  epsilon X, momentum X, zero (gamma at 0)\n" \
    "  relu\n" \
    "  maxpool 2 2                                kernel, stride (else the kernel), padding\n" \
    "  avgpool 2 2\n" \
    "  globalavgpool\n" \
    "  dense 128                                  `dense classes`: an output for each class\n" \
    "  dropout 0.5\n" \
    "  add NAME                                   adds the output called NAME\n" \
    "Each layer takes the output of the line before, or with `from NAME` at the end of its\n" \
    "line that of a named one; `as NAME` there names its own. The picture is called `input`;\n" \
    "`#` begins a comment."

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
