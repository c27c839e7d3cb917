/* train/run.h - one run of the program train: what it is made of, its numbers, its steps */
#ifndef TRAIN_RUN_H
#define TRAIN_RUN_H

#include "train/checkpoint.h"
#include "train/data.h"
#include "train/network.h"

typedef struct train_run {
    train_options o;
    train_log log;
    mpt_ctx *ctx;
    mpt_loader *data, *val; /* either may be NULL */
    mpt_model *model;
    mpt_trainer *trainer;
    mpt_trainer_desc desc; /* with defaults */
    mpt_memory_plan plan;
    checkpoints saved;
    bool unsaved; /* the last checkpoint could not be written */
    /* numbers for the report */
    mpt_step_report last;     /* the last one that was told; step 0: there was none */
    mpt_metrics metrics;      /* of the last evaluation */
    int64_t evaluated_at;     /* after so many steps; -1: never */
    double begun;             /* when the process began, in seconds of its clock */
    double training, waiting; /* seconds in steps, data included; in waiting for data */
    int64_t images;           /* records trained in this process */
    int64_t under_way;        /* number of the step that was begun last, in this process; 0: none */
    /* of the epoch under way, or of the last one */
    int64_t index; /* of the step that was begun last, from 1 */
    int64_t epoch, epoch_samples, epoch_correct, epoch_records;
    double epoch_loss; /* sum over epoch_samples; of steps whose loss is a number */
    double epoch_begun;
    /* since the last line */
    int64_t line_images;
    double line_seconds;
} train_run;

static volatile sig_atomic_t run_signal; /* number of the signal that asked for the end; 0: none */

/* The first signal ends the run after the step under way; any second one ends it at once. */
static void run_on_signal(int number) {
    run_signal = number;
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
}

static double run_epoch_loss(const train_run *r) { /* NaN: no step yet */
    return r->epoch_samples > 0 ? r->epoch_loss / (double)r->epoch_samples : (double)NAN;
}

static double run_epoch_accuracy(const train_run *r) { /* per cent */
    return 100 * log_share(r->epoch_correct, r->epoch_records);
}

/* ---- evaluation ------------------------------------------------------------------------------ */
static int run_evaluate(train_run *r) {
    int64_t epochs_done = r->data ? mpt_loader_get_info(r->data).epoch : 0;
    int64_t step = mpt_trainer_get_info(r->trainer).steps;

    if (!r->val) return CLI_RUN;
    if (mpt_evaluate(r->trainer, r->val, &r->metrics)) return log_fail_call(&r->log, r->ctx);
    r->evaluated_at = step;
    log_validation(&r->log, epochs_done, step, &r->metrics);
    return CLI_RUN;
}

/* ---- a step ---------------------------------------------------------------------------------- */
static void run_begin_epoch(train_run *r, const mpt_batch *batch) {
    r->epoch = batch->epoch;
    r->epoch_samples = r->epoch_correct = r->epoch_records = 0;
    r->epoch_loss = 0;
    r->epoch_begun = cli_seconds();
    log_epoch_begin(&r->log, batch->epoch, r->o.epochs, batch->index,
                    mpt_loader_get_info(r->data).steps_per_epoch);
}

static void run_count_seconds(train_run *r, double seconds) {
    r->training += seconds;
    r->line_seconds += seconds;
}

static void run_count_step(train_run *r, const mpt_step_report *s) {
    r->last = *s;
    r->images += s->num_samples;
    r->line_images += s->num_samples;
    r->epoch_records += s->num_samples;
    r->epoch_correct += s->num_correct;
    if (!(s->loss >= -DBL_MAX && s->loss <= DBL_MAX)) return;
    r->epoch_loss += s->loss * (double)s->num_samples;
    r->epoch_samples += s->num_samples;
}

static void run_tell_step(train_run *r, const mpt_step_report *s) {
    log_step line;
    bool due = s->step % r->o.print_freq == 0;

    if (s->skipped) log_skip(&r->log, s, (double)mpt_trainer_get_info(r->trainer).loss_scale);
    if (!due && !r->log.live) return;
    line.epoch = r->epoch;
    line.epochs = r->o.epochs;
    line.index = r->index - (r->under_way - s->step);
    line.steps_per_epoch = mpt_loader_get_info(r->data).steps_per_epoch;
    line.loss = run_epoch_loss(r);
    line.accuracy = run_epoch_accuracy(r);
    line.images_per_second = r->line_seconds > 0 ? (double)r->line_images / r->line_seconds : 0;
    log_one_step(&r->log, &line, s, due);
    if (!due) return;
    r->line_images = 0;
    r->line_seconds = 0;
}

/* On a device a report comes while the next step computes, or when somebody waits for it; the last
   one comes again until there is a new one. Each is counted and told once. */
static void run_take_report(train_run *r, const mpt_step_report *s) {
    if (s->step <= r->last.step) return;
    run_count_step(r, s);
    run_tell_step(r, s);
}

/* A disk that is full now may have room later, and the checkpoint before is still there: so the run
   goes on, and only a missing last one makes it a failure. */
static void run_save(train_run *r, bool last) {
    if (checkpoint_save(&r->saved, r->trainer, r->data) == CLI_RUN) return;
    r->saved.saved_at = cli_seconds();
    r->unsaved |= last;
    if (!last) log_warn(&r->log, "no checkpoint was written; training goes on");
}

/* The loss scale can't go lower: says which tensor overflows first in the order of computation.
   batch: of the last step that was begun; NULL: it is no longer there. late: the error is about the
   step before that one, whose batch is gone. It changed no weight, so if the last step was skipped
   as well, what overflows there tells of both. */
static int run_stuck(train_run *r, const mpt_batch *batch, bool late) {
    char message[sizeof mpt_last_error(r->ctx)->message];
    mpt_overflow o;

    snprintf(message, sizeof message, "%s", mpt_last_error(r->ctx)->message);
    if (!batch || mpt_trainer_autopsy(r->trainer, batch, &o) != MPT_OK || !o.found)
        return log_fail(&r->log, "%s", message);
    return log_fail(&r->log, "%s (%s: %s, %s, element %lld)", message,
                    late ? "in the step after it" : "here", o.layer, o.tensor, (long long)o.index);
}

/* Waits for the report of the step under way, if there is one: before what belongs behind that
   step. batch: as for run_stuck. CLI_RUN or the exit code. */
static int run_settle(train_run *r, const mpt_batch *batch) {
    double begun = cli_seconds();
    mpt_step_report s;
    mpt_result rc;

    if (r->under_way <= r->last.step) return CLI_RUN;
    rc = mpt_trainer_sync(r->trainer, &s);
    if (rc == MPT_ERR_INVALID_STATE) return run_stuck(r, batch, false);
    if (rc) return log_fail_call(&r->log, r->ctx);
    run_count_seconds(r, cli_seconds() - begun);
    run_take_report(r, &s);
    return CLI_RUN;
}

/* A call has failed. The step under way has nothing to do with it, and is told before. */
static int run_fail(train_run *r) {
    char message[sizeof mpt_last_error(r->ctx)->message];
    int code;

    snprintf(message, sizeof message, "%s", mpt_last_error(r->ctx)->message);
    code = run_settle(r, NULL);
    return code == CLI_RUN ? log_fail(&r->log, "%s", message) : code;
}

/* asked: when the batch was asked for, in seconds. CLI_RUN or the exit code. */
static int run_step(train_run *r, const mpt_batch *batch, double asked) {
    mpt_step_report s;
    double got = cli_seconds();
    mpt_result rc;
    int code;

    if (batch->epoch != r->epoch) run_begin_epoch(r, batch);
    memset(&s, 0, sizeof s);
    rc = mpt_trainer_step(r->trainer, batch, &s);
    if (rc == MPT_ERR_INVALID_STATE)
        return run_stuck(r, batch, s.step < mpt_trainer_get_info(r->trainer).steps);
    if (rc) return run_fail(r);
    r->under_way = mpt_trainer_get_info(r->trainer).steps;
    r->index = batch->index + 1;
    r->waiting += got - asked;
    run_count_seconds(r, cli_seconds() - asked);
    run_take_report(r, &s);
    if (!checkpoint_is_due(&r->saved, r->under_way)) return CLI_RUN;
    code = run_settle(r, batch);
    if (code == CLI_RUN) run_save(r, false);
    return code;
}

/* ---- epochs ---------------------------------------------------------------------------------- */
/* The loader has told the end of an epoch, and stands at the beginning of the next one. The
   checkpoint comes first: an evaluation may take long, and a run that is killed in it has lost
   nothing but that evaluation. */
static int run_end_epoch(train_run *r) {
    mpt_loader_info info = mpt_loader_get_info(r->data);
    int code = run_settle(r, NULL);

    if (code != CLI_RUN) return code;
    log_epoch_end(&r->log);
    if (r->epoch == info.epoch - 1)
        log_epoch(&r->log, r->epoch, r->o.epochs, run_epoch_loss(r), run_epoch_accuracy(r),
                  cli_seconds() - r->epoch_begun);
    if (info.num_bad_records > 0)
        log_warn(&r->log, "%lld damaged record%s left out in epoch %lld",
                 (long long)info.num_bad_records, cli_plural(info.num_bad_records, "s"),
                 (long long)info.epoch);
    run_save(r, info.epoch == r->o.epochs);
    return run_evaluate(r);
}

/* The steps have run out. If that is also the end of an epoch, it is dealt with now; the loader
   tells only when asked for one batch more, which is why the position is saved first. */
static int run_out_of_steps(train_run *r) {
    mpt_batch batch;
    mpt_result rc;

    run_save(r, true);
    rc = mpt_loader_next(r->data, &batch);
    if (rc < 0) return log_fail_call(&r->log, r->ctx);
    return rc == MPT_END ? run_end_epoch(r) : CLI_RUN;
}

static int run_stop(train_run *r) {
    run_save(r, true);
    log_warn(&r->log, "stopped by signal %d after step %lld%s", (int)run_signal,
             (long long)mpt_trainer_get_info(r->trainer).steps,
             r->saved.dir && !r->unsaved ? "; --resume auto goes on from here"
                                         : "; nothing was saved");
    return 128 + (int)run_signal;
}

static bool run_has_steps(const train_run *r) {
    return r->o.steps == 0 || mpt_trainer_get_info(r->trainer).steps < r->o.steps;
}

/* To the end of the epochs or steps. CLI_RUN, or the exit code. A step that is still under way
   behind the loop belongs to the last batch: at the end of an epoch none is. */
static int run_train(train_run *r) {
    mpt_batch batch;
    mpt_result rc;
    double asked;
    int code = CLI_RUN;

    r->epoch = -1;
    while (code == CLI_RUN && !run_signal && run_has_steps(r) &&
           mpt_loader_get_info(r->data).epoch < r->o.epochs) {
        asked = cli_seconds();
        rc = mpt_loader_next(r->data, &batch);
        if (rc == MPT_OK) code = run_step(r, &batch, asked);
        else if (rc == MPT_END) code = run_end_epoch(r);
        else code = run_fail(r);
    }
    if (code == CLI_RUN) code = run_settle(r, &batch);
    log_epoch_end(&r->log);
    if (code != CLI_RUN) return code;
    if (run_signal) return run_stop(r);
    if (r->last.step == 0)
        log_note(&r->log, "nothing left to train: --epochs and --steps are done");
    else if (!run_has_steps(r)) code = run_out_of_steps(r);
    if (code == CLI_RUN && r->evaluated_at != mpt_trainer_get_info(r->trainer).steps)
        code = run_evaluate(r);
    return code;
}

#endif /* TRAIN_RUN_H */
