/* train/network.h - the network of the program train: one of the library's, or a description */
#ifndef TRAIN_NETWORK_H
#define TRAIN_NETWORK_H

#include "common/network.h"
#include "train/log.h"

enum { NETWORK_MAX_TEXT = 1 << 20 };

/* CLI_RUN, or the exit code after the message. */
static int network_make_described(mpt_ctx *ctx, train_log *log, const train_options *o,
                                  mpt_model *m) {
    char message[NETWORK_MESSAGE], *text = (char *)malloc(NETWORK_MAX_TEXT);
    FILE *file;
    size_t size = 0;
    bool failed;

    if (!text) return log_fail(log, "no memory");
    errno = 0;
    file = fopen(o->arch, "rb");
    if (file) size = fread(text, 1, NETWORK_MAX_TEXT, file);
    failed = !file || ferror(file);
    if (failed)
        log_fail(log, "--arch: %s: can't %s it: %s", o->arch, file ? "read" : "open",
                 cli_errno_text(errno));
    else if (size == NETWORK_MAX_TEXT || memchr(text, 0, size)) {
        failed = true;
        log_fail(log, "--arch: %s: no description of a network", o->arch);
    } else {
        text[size] = 0;
        failed = !network_describe(ctx, m, o->arch, text, (int)o->num_classes, message);
        if (failed) log_fail(log, "%s", message);
    }
    if (file) fclose(file);
    free(text);
    return failed ? CLI_EXIT_FAILURE : CLI_RUN;
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
                                        "statistics", "bookkeeping"};
    enum { PARTS = sizeof names / sizeof names[0] };
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
    list[0] = 0;
    for (i = 0; i < PARTS; i++) {
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
