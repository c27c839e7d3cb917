/* train/network.h - the network of the program train: one of the library's, or a description */
#ifndef TRAIN_NETWORK_H
#define TRAIN_NETWORK_H

#include "common/buffer.h"
#include "common/network.h"
#include "train/log.h"

enum { NETWORK_MAX_TEXT = 1 << 20 };

/* CLI_RUN, or the exit code after the message. */
static int network_make_described(mpt_ctx *ctx, train_log *log, const train_options *o,
                                  mpt_model *m) {
    char message[NETWORK_MESSAGE], why[BYTE_BUFFER_MESSAGE];
    byte_buffer text = {NULL, 0, 0};
    int code = CLI_RUN;

    if (!byte_buffer_read(&text, o->arch, NETWORK_MAX_TEXT, why))
        code = log_fail(log, "--arch: %s", why);
    else if (memchr(text.data, 0, text.size))
        code = log_fail(log, "--arch: %s: no description of a network", o->arch);
    else if (!network_describe(ctx, m, o->arch, (const char *)text.data, (int)o->num_classes,
                               message))
        code = log_fail(log, "%s", message);
    byte_buffer_free(&text);
    return code;
}

static int network_make(mpt_ctx *ctx, train_log *log, const train_options *o, mpt_model **out) {
    int size = (int)o->image_size;

    if (mpt_model_create(ctx, size, size, (int)o->channels, out)) return log_fail_call(log, ctx);
    if (options_ends_with(o->arch, ".txt")) return network_make_described(ctx, log, o, *out);
    if (mpt_model_finish(*out, mpt_zoo(*out, o->arch, (int)o->num_classes)))
        return log_fail_call(log, ctx);
    return CLI_RUN;
}

/* ---- what is told about it ------------------------------------------------------------------- */
static void network_tell_line(const char *text, void *user) {
    log_note((train_log *)user, "%s", text);
}

static int network_tell(train_log *log, const mpt_ctx *ctx, const mpt_model *m, int batch_size,
                        mpt_dtype storage) {
    if (mpt_model_summary(m, batch_size, storage, network_tell_line, log))
        return log_fail_call(log, ctx);
    return CLI_RUN;
}

static void network_tell_plan(train_log *log, const train_options *o, const mpt_memory_plan *p) {
    static const char *const names[] = {"weights",    "master weights", "gradients",
                                        "optimizer",  "activations",    "workspace",
                                        "statistics", "bookkeeping",    "staging"};
    enum { PARTS = sizeof names / sizeof names[0] };
    const int parts = p->staging > 0 ? PARTS : PARTS - 1; /* on the CPU nothing is staged */
    size_t bytes[PARTS];
    char text[24], list[400];
    int i, n = 0;

    bytes[0] = p->weights;
    bytes[1] = p->master_weights;
    bytes[2] = p->gradients;
    bytes[3] = p->optimizer_state;
    bytes[4] = p->activations;
    bytes[5] = p->workspace;
    bytes[6] = p->statistics;
    bytes[7] = p->bookkeeping;
    bytes[8] = p->staging;
    list[0] = 0;
    for (i = 0; i < parts; i++) {
        cli_human_bytes((double)bytes[i], text);
        if (o->verbose_plan) log_note(log, "memory: %15s %10s", names[i], text);
        else if (bytes[i] > 0)
            n += snprintf(list + n, sizeof list - (size_t)n, "%s%s %s", n ? ", " : "", names[i],
                          text);
    }
    cli_human_bytes((double)p->total, text);
    if (o->verbose_plan) log_note(log, "memory: %15s %10s", "planned in all", text);
    else log_note(log, "memory: %s planned: %s", text, list);
}

#endif /* TRAIN_NETWORK_H */
