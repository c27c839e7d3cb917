/* train/log.h - what the program train says: lines of text or JSON on standard output, one live
   line on a terminal, warnings on standard error */
#ifndef TRAIN_LOG_H
#define TRAIN_LOG_H

#include "train/options.h"

typedef struct train_log {
    bool json, live; /* live: standard error is a terminal, and text is wanted */
    bool drawing;    /* the live line is under way */
    cli_progress bar;
    char label[48], note[160]; /* at the start and the end of the live line */
    int64_t num_left_out;      /* damaged records that were told one by one */
} train_log;

enum { LOG_MAX_LEFT_OUT = 20 };

static void log_begin(train_log *log, const train_options *o) {
    memset(log, 0, sizeof *log);
    log->json = o->log_format == LOG_JSON;
    log->live = !log->json && isatty(STDERR_FILENO);
    setvbuf(stdout, NULL, _IOLBF, 0); /* who follows the log of a long run sees it at once */
}

static void log_clear(train_log *log) {
    if (log->drawing) cli_progress_clear(&log->bar);
}

/* JSON has no infinities and no NaN. */
static void log_json_number(FILE *out, double value) {
    if (value >= -DBL_MAX && value <= DBL_MAX) cli_json_double(out, value);
    else fputs("null", out);
}

static void log_json_member(FILE *out, const char *name, double value) {
    fprintf(out, ", \"%s\": ", name);
    log_json_number(out, value);
}

/* One line that a person reads. */
__attribute__((format(printf, 2, 3))) static void log_note(train_log *log, const char *format,
                                                           ...) {
    char text[1024];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    log_clear(log);
    if (!log->json) {
        puts(text);
        return;
    }
    fputs("{\"event\": \"note\", \"text\": ", stdout);
    cli_json_text(stdout, text);
    fputs("}\n", stdout);
}

__attribute__((format(printf, 2, 3))) static void log_warn(train_log *log, const char *format,
                                                           ...) {
    char text[1024];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    log_clear(log);
    cli_error(TRAIN_NAME, 0, "warning: %s", text);
}

/* What went wrong; gives the exit code 1. */
__attribute__((format(printf, 2, 3))) static int log_fail(train_log *log, const char *format, ...) {
    char text[1024];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    log_clear(log);
    return cli_error(TRAIN_NAME, CLI_EXIT_FAILURE, "%s", text);
}

/* The same for a call of the library, whose message is complete. */
static int log_fail_call(train_log *log, const mpt_ctx *ctx) {
    return log_fail(log, "%s", mpt_last_error(ctx)->message);
}

/* The library logs errors as well; these are told once, where they end the run. */
static void log_library(int level, const char *message, void *user) {
    if (level == MPT_LOG_WARNING) log_warn((train_log *)user, "%s", message);
}

static void log_left_out(const mpt_bad_record *bad, void *user) {
    train_log *log = (train_log *)user;

    if (++log->num_left_out > LOG_MAX_LEFT_OUT) return;
    log_warn(log, "left out%s: %s", bad->rest_of_file ? ", with the rest of its file" : "",
             bad->cause);
    if (log->num_left_out == LOG_MAX_LEFT_OUT)
        log_warn(log, "further damaged records are counted only");
}

/* ---- steps ----------------------------------------------------------------------------------- */
typedef struct log_step {
    int64_t epoch, epochs;          /* from 0 */
    int64_t index, steps_per_epoch; /* of the step in its epoch, from 1; 0: not known */
    double loss, accuracy;          /* mean over the epoch so far; per cent */
    double images_per_second;
} log_step;

static void log_epoch_begin(train_log *log, int64_t epoch, int64_t epochs, int64_t done,
                            int64_t steps) {
    if (!log->live) return;
    snprintf(log->label, sizeof log->label, "epoch %lld/%lld", (long long)epoch + 1,
             (long long)epochs);
    cli_progress_begin(&log->bar, log->label, "steps", steps);
    log->bar.done = done;
    log->drawing = true;
}

static void log_epoch_end(train_log *log) {
    if (log->drawing) cli_progress_end(&log->bar);
    log->drawing = false;
}

static void log_step_live(train_log *log, const log_step *s, const mpt_step_report *r) {
    snprintf(log->note, sizeof log->note, "%.0f images/s, loss %.4f, accuracy %.2f %%, scale %g",
             s->images_per_second, s->loss, s->accuracy, (double)r->loss_scale);
    log->bar.note = log->note;
    cli_progress_update(&log->bar, s->index);
}

static void log_step_json(const log_step *s, const mpt_step_report *r) {
    printf("{\"event\": \"step\", \"epoch\": %lld, \"index\": %lld, \"step\": %lld",
           (long long)s->epoch, (long long)s->index, (long long)r->step);
    log_json_member(stdout, "loss", r->loss);
    log_json_member(stdout, "mean_loss", s->loss);
    log_json_member(stdout, "accuracy", s->accuracy / 100);
    log_json_member(stdout, "learning_rate", (double)r->learning_rate);
    log_json_member(stdout, "grad_norm", (double)r->grad_norm);
    log_json_member(stdout, "loss_scale", (double)r->loss_scale);
    log_json_member(stdout, "images_per_second", s->images_per_second);
    printf(", \"skipped\": %s}\n", r->skipped ? "true" : "false");
}

static void log_step_text(const log_step *s, const mpt_step_report *r) {
    printf("epoch %lld/%lld  step %lld/%lld  loss %.4f (%.4f)  accuracy %.2f %%  rate %g  scale %g"
           "  %.0f images/s\n",
           (long long)s->epoch + 1, (long long)s->epochs, (long long)s->index,
           (long long)s->steps_per_epoch, r->loss, s->loss, s->accuracy, (double)r->learning_rate,
           (double)r->loss_scale, s->images_per_second);
}

/* Numbers as Python prints them: 32768.0 */
static void log_python_float(double value, char out[40]) {
    snprintf(out, 40, "%.17g", value);
    if (!out[strcspn(out, ".en")]) strcat(out, ".0");
}

/* Apex' line, which people search their logs for. next: scale of the step that follows. */
static void log_skip(train_log *log, const mpt_step_report *r, double next) {
    char text[40];

    log_clear(log);
    if (log->json) {
        printf("{\"event\": \"skip\", \"step\": %lld", (long long)r->step);
        log_json_member(stdout, "loss_scale", (double)r->loss_scale);
        log_json_member(stdout, "next_loss_scale", next);
        fputs("}\n", stdout);
        return;
    }
    log_python_float(next, text);
    printf("Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to %s\n", text);
}

/* ---- results --------------------------------------------------------------------------------- */
static double log_share(int64_t part, int64_t whole) {
    return whole > 0 ? (double)part / (double)whole : 0;
}

static void log_validation(train_log *log, int64_t epochs_done, int64_t step,
                           const mpt_metrics *m) {
    double top1 = log_share(m->num_correct, m->num_samples),
           top5 = log_share(m->num_correct_top5, m->num_samples);

    log_clear(log);
    if (log->json) {
        printf("{\"event\": \"validation\", \"epochs_done\": %lld, \"step\": %lld, \"count\": %lld",
               (long long)epochs_done, (long long)step, (long long)m->num_samples);
        log_json_member(stdout, "loss", m->loss);
        log_json_member(stdout, "accuracy", top1);
        log_json_member(stdout, "top5", top5);
        fputs("}\n", stdout);
        return;
    }
    printf("validation  step %lld  loss %.4f  accuracy %.2f %%  top-5 %.2f %%  of %lld records\n",
           (long long)step, m->loss, 100 * top1, 100 * top5, (long long)m->num_samples);
}

static void log_checkpoint(train_log *log, int64_t step, const char *path) {
    log_clear(log);
    if (!log->json) {
        printf("checkpoint %s\n", path);
        return;
    }
    printf("{\"event\": \"checkpoint\", \"step\": %lld, \"path\": ", (long long)step);
    cli_json_text(stdout, path);
    fputs("}\n", stdout);
}

static void log_epoch(train_log *log, int64_t epoch, int64_t epochs, double loss, double accuracy,
                      double seconds) {
    char time[24];

    log_clear(log);
    if (log->json) {
        printf("{\"event\": \"epoch\", \"epoch\": %lld", (long long)epoch);
        log_json_member(stdout, "loss", loss);
        log_json_member(stdout, "accuracy", accuracy / 100);
        log_json_member(stdout, "seconds", seconds);
        fputs("}\n", stdout);
        return;
    }
    printf("epoch %lld/%lld done in %s  loss %.4f  accuracy %.2f %%\n", (long long)epoch + 1,
           (long long)epochs, cli_human_time(seconds, time), loss, accuracy);
}

#endif /* TRAIN_LOG_H */
