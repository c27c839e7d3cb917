/* train/report.h - the report of the program train: what ran, with every option as it was resolved,
   and what came of it; one JSON object */
#ifndef TRAIN_REPORT_H
#define TRAIN_REPORT_H

#include "train/run.h"

#include <sys/resource.h>

/* ---- members --------------------------------------------------------------------------------- */
static void report_name(FILE *f, const char *name) {
    fprintf(f, ",\n  \"%s\": ", name);
}

static void report_text(FILE *f, const char *name, const char *text) {
    report_name(f, name);
    if (text) cli_json_text(f, text);
    else fputs("null", f);
}

static void report_int(FILE *f, const char *name, int64_t value) {
    report_name(f, name);
    fprintf(f, "%lld", (long long)value);
}

static void report_real(FILE *f, const char *name, double value) { /* NaN and the like: null */
    report_name(f, name);
    log_json_number(f, value);
}

/* ---- options --------------------------------------------------------------------------------- */
static void report_list(FILE *f, const cli_list *list) {
    int i;

    putc('[', f);
    for (i = 0; i < list->count; i++) {
        if (i > 0) fputs(", ", f);
        cli_json_text(f, list->items[i]);
    }
    putc(']', f);
}

/* null: not given, and nothing stands in for it. */
static void report_option(FILE *f, const cli_option *o) {
    char word[64];

    switch (o->kind) {
    case CLI_FLAG: fputs(*(const bool *)o->value ? "true" : "false", f); return;
    case CLI_INT:
    case CLI_BYTES:
        if (*(const int64_t *)o->value < o->min) break;
        fprintf(f, "%lld", (long long)*(const int64_t *)o->value);
        return;
    case CLI_DOUBLE:
        if (*(const double *)o->value < o->low) break;
        cli_json_real(f, *(const double *)o->value, 15); /* as it was typed */
        return;
    case CLI_LIST: report_list(f, (const cli_list *)o->value); return;
    case CLI_CHOICE:
        if (*(const int *)o->value < 0) break;
        cli_json_text(f, cli_choice_name(o->metavar, *(const int *)o->value, word, sizeof word));
        return;
    case CLI_TEXT:
        if (!*(const char *const *)o->value) break;
        cli_json_text(f, *(const char *const *)o->value);
        return;
    }
    fputs("null", f);
}

static void report_options(FILE *f, const train_options *o) {
    int i;

    report_name(f, "options");
    for (i = 0; i < o->count; i++) {
        if (!strcmp(o->table[i].name, "wd")) continue; /* another name for one that is there */
        fprintf(f, "%s\"%s\": ", i > 0 ? ",\n    " : "{\n    ", o->table[i].name);
        report_option(f, &o->table[i]);
    }
    fputs("\n  }", f);
}

/* ---- results --------------------------------------------------------------------------------- */
static void report_plan(FILE *f, const mpt_memory_plan *p) {
    report_name(f, "planned_bytes");
    fprintf(f,
            "{\"weights\": %zu, \"master_weights\": %zu, \"gradients\": %zu, "
            "\"optimizer_state\": %zu, \"activations\": %zu, \"workspace\": %zu, "
            "\"statistics\": %zu, \"staging\": %zu, \"bookkeeping\": %zu, \"total\": %zu}",
            p->weights, p->master_weights, p->gradients, p->optimizer_state, p->activations,
            p->workspace, p->statistics, p->staging, p->bookkeeping, p->total);
}

static int64_t report_peak_bytes(void) {
    struct rusage usage;

    if (getrusage(RUSAGE_SELF, &usage) != 0) return 0;
    return (int64_t)usage.ru_maxrss * 1024; /* Linux counts in KiB */
}

/* Where it ran. The bits of a run depend on the kernels: "avx2", or "sm_80" of a GPU. */
static void report_backend(FILE *f, const train_run *r) {
    mpt_trainer_info info = mpt_trainer_get_info(r->trainer);
    char word[8];

    report_text(f, "device", cli_choice_name(NETWORK_DEVICES, r->o.device, word, sizeof word));
    report_text(f, "backend", info.backend);
    report_text(f, "kernels", info.kernels);
}

static void report_steps(FILE *f, const train_run *r) {
    mpt_trainer_info info = mpt_trainer_get_info(r->trainer);

    report_int(f, "steps", info.steps);
    report_int(f, "skipped_steps", info.steps - info.applied_steps);
    report_real(f, "final_loss_scale", (double)info.loss_scale);
    report_real(f, "train_loss", r->last.step > 0 ? run_epoch_loss(r) : (double)NAN);
}

static void report_validation(FILE *f, const train_run *r) {
    const mpt_metrics *m = &r->metrics;
    bool known = r->evaluated_at >= 0 && m->num_samples > 0;

    report_real(f, "val_loss", known ? m->loss : (double)NAN);
    report_real(f, "val_accuracy", known ? log_share(m->num_correct, m->num_samples) : (double)NAN);
    report_real(f, "val_top5",
                known ? log_share(m->num_correct_top5, m->num_samples) : (double)NAN);
    report_int(f, "val_count", known ? m->num_samples : 0);
}

static int report_write(train_run *r, const char *hash) {
    FILE *f;

    if (!r->o.report) return CLI_RUN;
    f = files_begin(&r->log, r->o.report);
    if (!f) return CLI_EXIT_FAILURE;
    fputs("{\n  \"version\": ", f);
    cli_json_text(f, mpt_version());
    report_text(f, "build", mpt_build_info());
    report_int(f, "seed", r->o.seed);
    report_backend(f, r);
    report_int(f, "ranks", 1);
    report_int(f, "parameters", mpt_model_num_params(r->model));
    report_int(f, "total_steps", r->desc.total_steps);
    report_steps(f, r);
    report_validation(f, r);
    report_real(f, "seconds", cli_seconds() - r->begun);
    report_real(f, "images_per_second",
                r->training > 0 ? (double)r->images / r->training : (double)NAN);
    report_real(f, "input_wait_fraction", r->training > 0 ? r->waiting / r->training : (double)NAN);
    report_plan(f, &r->plan);
    report_int(f, "peak_rss_bytes", report_peak_bytes());
    report_text(f, "weights_sha256", hash);
    report_options(f, &r->o);
    fputs("\n}\n", f);
    return files_end(&r->log, r->o.report, f);
}

#endif /* TRAIN_REPORT_H */
