/* train - trains an image classifier on TFRecords, in mixed precision

   A program on mptrain's public interface only. Its parts, in reading order:
       common/cli.h         flags, progress line, JSON
       common/buffer.h      whole files
       common/network.h     words for networks and devices, networks described in text
       train/options.h      the options, what contradicts what, how they become descs
       train/log.h          lines of text or JSON, the live line
       train/data.h         what the records say, the two loaders
       train/network.h      a network by name, or described in FILE.txt
       train/files.h        files that appear whole or not at all
       train/checkpoint.h   a directory of checkpoints: write, keep, go on
       train/run.h          steps, epochs, evaluation
       train/export.h       weights for other programs
       train/report.h       the report
   Build: cc -O2 -I. -Iexamples -DMPTRAIN_ZLIB examples/train.c -o train -lz -lm -lpthread */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "train/export.h"
#include "train/report.h"

static int train_make_ctx(train_run *r) {
    mpt_ctx_desc d;

    memset(&d, 0, sizeof d);
    d.num_threads = (int)r->o.threads;
    d.logger.log = log_library;
    d.logger.user = &r->log;
    return network_make_ctx(TRAIN_NAME, r->o.device, &d, &r->ctx);
}

/* What the command line left open and the library chose: the report tells what really ran. */
static void train_keep_choices(train_run *r) {
    /* places of mpt_precision in --precision and --opt-level; -1: there is none */
    static const int words[] = {-1, 0, -1, 1, -1, 2}, places[] = {-1, 0, 1, 2, 3, -1};
    static const char *const names[] = {
        "",    "fp32 (O0)", "fp32 with casts to fp16 (O1)", "fp16 (O2)", "fp16 throughout (O3)",
        "bf16"};
    const mpt_loader *loader = r->data ? r->data : r->val;
    mpt_loader_info info = mpt_loader_get_info(loader);
    mpt_loss_scale_mode mode = r->desc.loss_scaler.mode;
    train_options *o = &r->o;

    snprintf(o->texts[0], sizeof o->texts[0], "%d", info.label_offset);
    snprintf(o->texts[1], sizeof o->texts[1], "%g", (double)r->desc.loss_scaler.init_scale);
    o->label_offset = o->texts[0];
    o->image_key = info.image_key;
    o->label_key = info.label_key;
    if (r->data) o->train_records = info.num_records;
    o->loss_scale = mode == MPT_LOSS_SCALE_DYNAMIC  ? "dynamic"
                    : mode == MPT_LOSS_SCALE_STATIC ? o->texts[1]
                                                    : "1";
    if (o->precision < 0) o->precision = words[r->desc.precision];
    if (o->opt_level < 0) o->opt_level = places[r->desc.precision];
    o->keep_batchnorm = r->desc.keep_batchnorm_fp32 == MPT_NO;
    log_note(&r->log, "precision %s, loss scale %s", names[r->desc.precision], o->loss_scale);
}

static void train_tell_schedule(train_run *r, int64_t steps_per_epoch) {
    const train_options *o = &r->o;

    if (o->reference_batch > 0)
        log_note(&r->log, "learning rate %g = %g * %lld / %lld (records of a step / reference)",
                 (double)r->desc.optimizer.learning_rate, o->learning_rate,
                 (long long)options_step_records(o), (long long)o->reference_batch);
    log_note(&r->log,
             "%lld steps an epoch, %lld in %lld epoch%s, %lld of them warm-up; learning "
             "rate %g",
             (long long)steps_per_epoch, (long long)r->desc.total_steps, (long long)o->epochs,
             cli_plural(o->epochs, "s"), (long long)r->desc.schedule.warmup_steps,
             (double)r->desc.optimizer.learning_rate);
}

/* Loaders and data, as far as this run needs them. */
static int train_open_data(train_run *r) {
    mpt_trainer_desc d = options_trainer_desc(&r->o, 1);
    mpt_precision precision = mpt_trainer_desc_defaults(&d).precision;

    if (!r->o.evaluate) {
        if (data_open_training(r->ctx, &r->o, precision, &r->data))
            return log_fail_call(&r->log, r->ctx);
        data_tell(&r->log, "training", r->data);
    }
    if (r->o.val_data.count == 0) {
        log_note(&r->log, "no --val-data: nothing is evaluated");
        return CLI_RUN;
    }
    if (data_open_validation(r->ctx, &r->o, precision, &r->val))
        return log_fail_call(&r->log, r->ctx);
    data_tell(&r->log, "validation", r->val);
    return CLI_RUN;
}

/* Evaluation takes no step, so no schedule has to make sense. */
static mpt_trainer_desc train_desc(const train_run *r, int64_t steps_per_epoch) {
    mpt_trainer_desc d = options_trainer_desc(&r->o, steps_per_epoch);

    if (r->o.evaluate) memset(&d.schedule, 0, sizeof d.schedule);
    return mpt_trainer_desc_defaults(&d);
}

static int train_make_trainer(train_run *r) {
    int64_t steps = r->data ? mpt_loader_get_info(r->data).steps_per_epoch : 1;
    mpt_result rc;

    if (steps < 1) steps = 1;
    r->desc = train_desc(r, steps);
    train_keep_choices(r);
    if (!r->o.evaluate) train_tell_schedule(r, steps);
    rc = mpt_model_plan(r->model, &r->desc, (int)r->o.batch_size, &r->plan);
    if (rc == MPT_ERR_INVALID_ARGUMENT) /* all of the desc comes from the command line */
        return options_usage("%s", mpt_last_error(r->ctx)->message);
    if (rc) return log_fail_call(&r->log, r->ctx);
    if (network_tell(&r->log, r->ctx, r->model, (int)r->o.batch_size,
                     network_storage(r->desc.precision)) != CLI_RUN)
        return CLI_EXIT_FAILURE;
    network_tell_plan(&r->log, &r->o, &r->plan);
    if (mpt_trainer_create(r->model, &r->desc, (int)r->o.batch_size, &r->trainer))
        return log_fail_call(&r->log, r->ctx);
    return CLI_RUN;
}

/* Weights to begin with: a checkpoint, else --init, else the seed's. */
static int train_load(train_run *r) {
    bool resumed;
    int code = checkpoint_resume(&r->saved, &r->o, r->trainer, r->data, &resumed);

    if (code != CLI_RUN || resumed) return code;
    if (r->o.evaluate && !r->o.init)
        return log_fail(&r->log, "no checkpoint in %s to evaluate", r->saved.dir);
    if (!r->o.init) return CLI_RUN;
    if (mpt_trainer_import(r->trainer, NULL, r->o.init)) return log_fail_call(&r->log, r->ctx);
    log_note(&r->log, "weights from %s", r->o.init);
    return CLI_RUN;
}

/* Everything that can fail before the first step does so here. */
static int train_prepare(train_run *r) {
    int code = files_check(&r->log, "report", r->o.report);

    if (code == CLI_RUN) code = files_check(&r->log, "export", r->o.export_path);
    if (code == CLI_RUN) code = train_make_ctx(r);
    if (code == CLI_RUN) code = checkpoint_prepare(&r->saved, r->ctx, &r->log, &r->o);
    if (code == CLI_RUN) code = data_resolve(r->ctx, &r->log, &r->o);
    if (code == CLI_RUN) code = network_make(r->ctx, &r->log, &r->o, &r->model);
    if (code == CLI_RUN) code = train_open_data(r);
    if (code == CLI_RUN) code = train_make_trainer(r);
    return code == CLI_RUN ? train_load(r) : code;
}

/* What a run leaves, also one that a signal ended: `code` is what came of it so far. */
static int train_finish(train_run *r, int code) {
    char hash[65], time[24];
    int64_t steps = mpt_trainer_get_info(r->trainer).steps;
    bool ok = !r->unsaved;

    if (mpt_trainer_sha256(r->trainer, hash)) return log_fail_call(&r->log, r->ctx);
    if (code == CLI_RUN && r->o.export_path) ok = export_write(r) == CLI_RUN && ok;
    ok = report_write(r, hash) == CLI_RUN && ok;
    cli_human_time(cli_seconds() - r->begun, time);
    if (r->training > 0)
        log_note(&r->log, "%lld step%s in all, %s; %.0f images/s", (long long)steps,
                 cli_plural(steps, "s"), time, (double)r->images / r->training);
    log_note(&r->log, "weights_sha256 %s", hash);
    if (!ok) return CLI_EXIT_FAILURE;
    return code == CLI_RUN ? CLI_EXIT_OK : code;
}

static int train_main(train_run *r, int argc, char **argv) {
    int code = options_read(&r->o, argc, argv);

    if (code != CLI_RUN) return code;
    log_begin(&r->log, &r->o);
    if (!r->o.evaluate) cli_catch_signals(run_on_signal); /* nothing to save there */
    code = train_prepare(r);
    if (code == CLI_RUN) code = r->o.evaluate ? run_evaluate(r) : run_train(r);
    return code == CLI_RUN || code > 128 ? train_finish(r, code) : code;
}

int main(int argc, char **argv) {
    train_run *r = (train_run *)calloc(1, sizeof *r);
    int code;

    cli_occupy_standard_files();
    cli_ignore_write_signals();
    if (!r) return cli_error(TRAIN_NAME, CLI_EXIT_FAILURE, "no memory");
    r->begun = cli_seconds();
    r->evaluated_at = -1;
    code = train_main(r, argc, argv);
    mpt_trainer_destroy(r->trainer);
    mpt_model_destroy(r->model);
    mpt_loader_destroy(r->val);
    mpt_loader_destroy(r->data);
    mpt_ctx_destroy(r->ctx);
    cli_list_free(&r->o.data);
    cli_list_free(&r->o.val_data);
    free(r);
    return cli_finish(TRAIN_NAME, code);
}
