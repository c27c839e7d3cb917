/* train/log.h - what the program train says: lines of text or JSON on standard output, one live
   line on a terminal, warnings on standard error */
#ifndef TRAIN_LOG_H
#define TRAIN_LOG_H

#include "train/options.h"

typedef struct train_log {
    bool json, live; /* live: standard error is a terminal, and text is wanted */
    bool quiet;      /* warnings of the library would come twice */
    bool drawing;    /* the live line is under way */
    cli_progress bar;
    char label[48], note[160]; /* at the start and the end of the live line */
    int64_t num_warnings;      /* of the library, so far */
} train_log;

enum { LOG_MAX_WARNINGS = 100 };

static void log_begin(train_log *log, const train_options *o) {
    memset(log, 0, sizeof *log);
    log->json = o->log_format == LOG_JSON;
    log->live = !log->json && isatty(STDERR_FILENO);
    log->bar.drawn = cli_seconds();
}

/* Ends a line on standard output: who follows the log of a long run sees it at once. A reader that
   has gone has read enough; training goes on without it. */
static void log_flush(void) {
    errno = 0;
    if (fflush(stdout) != 0 && errno == EPIPE && !freopen("/dev/null", "w", stdout)) return;
}

static void log_clear(train_log *log) {
    if (log->drawing) cli_progress_clear(&log->bar);
}

/* JSON has no infinities and no NaN. */
static void log_json_number(FILE *out, double value) {
    if (value >= -DBL_MAX && value <= DBL_MAX) cli_json_double(out, value);
    else fputs("null", out);
}

static void log_json_member(const char *name, double value) {
    printf(", \"%s\": ", name);
    log_json_number(stdout, value);
}

static double log_plain_nan(double value) { /* some would be printed as "-nan" */
    return value < 0 || value >= 0 ? value : (double)NAN;
}

/* One line that a person reads. */
__attribute__((format(printf, 2, 3))) static void log_note(train_log *log, const char *format,
                                                           ...) {
    char text[1024], *p;
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    log_clear(log);
    for (p = text; *p; p++) /* file names may hold what a terminal obeys */
        if ((unsigned char)*p < 0x20 || *p == 0x7f) *p = '?';
    if (!log->json) puts(text);
    else {
        fputs("{\"event\": \"note\", \"text\": ", stdout);
        cli_json_text(stdout, text);
        fputs("}\n", stdout);
    }
    log_flush();
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

/* Damaged records that are left out, incomplete sets of files and the like. Errors come here as
   well; these are told once, where they end the run. */
static void log_library(int level, const char *message, void *user) {
    train_log *log = (train_log *)user;

    if (level != MPT_LOG_WARNING || log->quiet || log->num_warnings++ >= LOG_MAX_WARNINGS) return;
    log_warn(log, "%s", message);
    if (log->num_warnings == LOG_MAX_WARNINGS)
        log_warn(log, "further warnings of this kind are not shown");
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
    double drawn = log->bar.drawn;

    if (!log->live) return;
    snprintf(log->label, sizeof log->label, "epoch %lld/%lld", (long long)epoch + 1,
             (long long)epochs);
    cli_progress_begin(&log->bar, log->label, "steps", steps);
    log->bar.done = done;
    log->bar.drawn = drawn; /* where epochs are short, the line lives on from one to the next */
    log->drawing = true;
}

static void log_epoch_end(train_log *log) {
    if (log->drawing) cli_progress_end(&log->bar);
    log->drawing = false;
}

static void log_step_live(train_log *log, const log_step *s, const mpt_step_report *r) {
    snprintf(log->note, sizeof log->note, "%.0f images/s, loss %.4f, accuracy %.2f %%, scale %g",
             s->images_per_second, log_plain_nan(s->loss), s->accuracy, (double)r->loss_scale);
    log->bar.note = log->note;
    cli_progress_update(&log->bar, s->index);
}

static void log_step_json(const log_step *s, const mpt_step_report *r) {
    printf("{\"event\": \"step\", \"epoch\": %lld, \"index\": %lld, \"step\": %lld",
           (long long)s->epoch, (long long)s->index, (long long)r->step);
    log_json_member("loss", r->loss);
    log_json_member("mean_loss", s->loss);
    log_json_member("accuracy", s->accuracy / 100);
    log_json_member("learning_rate", (double)r->learning_rate);
    log_json_member("grad_norm", (double)r->grad_norm);
    log_json_member("loss_scale", (double)r->loss_scale);
    log_json_member("images_per_second", s->images_per_second);
    printf(", \"skipped\": %s}\n", r->skipped ? "true" : "false");
}

static void log_step_text(const log_step *s, const mpt_step_report *r) {
    printf("epoch %lld/%lld  step %lld/%lld  loss %.4f (%.4f)  accuracy %.2f %%  rate %g  scale %g"
           "  %.0f images/s\n",
           (long long)s->epoch + 1, (long long)s->epochs, (long long)s->index,
           (long long)s->steps_per_epoch, log_plain_nan(r->loss), log_plain_nan(s->loss),
           s->accuracy, (double)r->learning_rate, (double)r->loss_scale, s->images_per_second);
}

/* due: a line is to be printed, where nothing is drawn. */
static void log_one_step(train_log *log, const log_step *s, const mpt_step_report *r, bool due) {
    if (log->live) log_step_live(log, s, r);
    if (log->live || !due) return;
    if (log->json) log_step_json(s, r);
    else log_step_text(s, r);
    log_flush();
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
    log_python_float(next, text);
    if (log->json) {
        printf("{\"event\": \"skip\", \"step\": %lld", (long long)r->step);
        log_json_member("loss_scale", (double)r->loss_scale);
        log_json_member("next_loss_scale", next);
        puts("}");
    } else {
        printf("Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to %s\n",
               text);
    }
    log_flush();
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
        log_json_member("loss", m->loss);
        log_json_member("accuracy", top1);
        log_json_member("top5", top5);
        puts("}");
    } else {
        printf("validation  step %lld  loss %.4f  accuracy %.2f %%  top-5 %.2f %%  of %lld record%s"
               "\n",
               (long long)step, log_plain_nan(m->loss), 100 * top1, 100 * top5,
               (long long)m->num_samples, cli_plural(m->num_samples, "s"));
    }
    log_flush();
}

static void log_checkpoint(train_log *log, int64_t step, const char *path) {
    log_clear(log);
    if (log->json) {
        printf("{\"event\": \"checkpoint\", \"step\": %lld, \"path\": ", (long long)step);
        cli_json_text(stdout, path);
        puts("}");
    } else {
        printf("checkpoint %s\n", path);
    }
    log_flush();
}

static void log_epoch(train_log *log, int64_t epoch, int64_t epochs, double loss, double accuracy,
                      double seconds) {
    char time[24];

    log_clear(log);
    if (log->json) {
        printf("{\"event\": \"epoch\", \"epoch\": %lld", (long long)epoch);
        log_json_member("loss", loss);
        log_json_member("accuracy", accuracy / 100);
        log_json_member("seconds", seconds);
        puts("}");
    } else {
        printf("epoch %lld/%lld done in %s  loss %.4f  accuracy %.2f %%\n", (long long)epoch + 1,
               (long long)epochs, cli_human_time(seconds, time), log_plain_nan(loss), accuracy);
    }
    log_flush();
}

#endif /* TRAIN_LOG_H */
