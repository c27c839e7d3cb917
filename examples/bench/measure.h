/* measure.h - how bench measures and reports: rounds, median, best, ratios

   The machine may be shared and noisy. So a thing and what it is compared with run in turn, round
   by round, in one process, and what counts is the ratio of their medians, never a time by itself.
   */
#ifndef MPT_BENCH_MEASURE_H
#define MPT_BENCH_MEASURE_H

#include "common/cli.h"
#include "mptrain.h"

enum { BENCH_MAX_ROUNDS = 64 };

typedef struct bench_options {
    bool json;
    int64_t rounds;       /* of each case */
    int64_t megabytes;    /* of data to work on */
    int64_t record_bytes; /* payload of a record that bench writes */
    int64_t threads;
    int64_t max_record_bytes;    /* of FILE */
    cli_list files;              /* measured instead of files that bench writes */
    int arch, precision, device; /* places in NETWORK_NAMES, _PRECISIONS, _DEVICES */
    int64_t batch_size, image_size, channels, num_classes; /* 0: by architecture */
} bench_options;

/* One thing that is measured: run() does `work` units and returns 0, or an exit code. */
typedef struct bench_case {
    const char *name;
    const char *unit; /* what is counted: "bytes", "images", "flops" */
    double work;      /* units in one round */
    int (*run)(void *user);
    void *user;
    const char *limit_name; /* NULL: none */
    int reference;          /* number of the case it is a share of; -1: none */
    double reference_units; /* of that case's units in one of ours */
    /* Optional: more text at the end of the line, or more JSON members, each begun with a comma. */
    void (*more)(const struct bench_case *c, bool json);
    double rate[BENCH_MAX_ROUNDS];
    double median, best; /* units per second */
} bench_case;

CLI_FN int bench_compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* All cases in turn, `rounds` times, after one round that isn't counted. */
CLI_FN int bench_run(bench_case *cases, int n, int64_t rounds) {
    int64_t round;
    int i, code;

    for (round = -1; round < rounds; round++)
        for (i = 0; i < n; i++) {
            double start = cli_seconds(), seconds;
            code = cases[i].run(cases[i].user);
            if (code) return code;
            seconds = cli_seconds() - start;
            if (round >= 0)
                cases[i].rate[round] = cases[i].work / (seconds > 1e-9 ? seconds : 1e-9);
        }
    for (i = 0; i < n; i++) {
        qsort(cases[i].rate, (size_t)rounds, sizeof(double), bench_compare_doubles);
        cases[i].best = cases[i].rate[rounds - 1];
        cases[i].median = (cases[i].rate[(rounds - 1) / 2] + cases[i].rate[rounds / 2]) / 2;
    }
    return 0;
}

/* Share of the limit: of two medians, or of two bests. */
CLI_FN double bench_share(const bench_case *c, double rate, double reference_rate) {
    return rate * c->reference_units / reference_rate;
}

CLI_FN void bench_print_text(const char *kind, const bench_case *c, const bench_case *reference) {
    bool bytes = strcmp(c->unit, "bytes") == 0, flops = strcmp(c->unit, "flops") == 0;
    double scale = bytes || flops ? 1e9 : 1;

    printf("%-8s %-34s median %9.3f  best %9.3f %s/s", kind, c->name, c->median / scale,
           c->best / scale,
           bytes   ? "GB"
           : flops ? "GFLOP"
                   : c->unit);
    if (reference)
        printf("  %5.1f %% of %s", 100 * bench_share(c, c->median, reference->median),
               c->limit_name);
    printf("  (%.3g %.*s a round)", c->work, (int)strlen(c->unit) - (c->work == 1), c->unit);
    if (c->more) c->more(c, false);
    printf("\n");
}

CLI_FN void bench_print_json(const char *kind, const bench_case *c, const bench_case *reference) {
    printf("{\"bench\":");
    cli_json_text(stdout, kind);
    printf(",\"case\":");
    cli_json_text(stdout, c->name);
    printf(
        ",\"unit\":\"%s\",\"work\":%.17g,\"median_%s_per_second\":%.6g,\"best_%s_per_second\":%.6g",
        c->unit, c->work, c->unit, c->median, c->unit, c->best);
    if (reference) {
        printf(",\"reference\":");
        cli_json_text(stdout, c->limit_name);
        printf(",\"ratio_of_medians\":%.4f,\"ratio_of_bests\":%.4f",
               bench_share(c, c->median, reference->median),
               bench_share(c, c->best, reference->best));
    }
    if (c->more) c->more(c, true);
    printf("}\n");
}

CLI_FN void bench_print(const char *kind, const bench_case *cases, int n, bool json) {
    int i;

    for (i = 0; i < n; i++) {
        const bench_case *reference = cases[i].reference >= 0 ? &cases[cases[i].reference] : NULL;
        if (json) bench_print_json(kind, &cases[i], reference);
        else bench_print_text(kind, &cases[i], reference);
    }
}

CLI_FN bench_case bench_make(const char *name, const char *unit, double work, int (*run)(void *),
                             void *user) {
    bench_case c;

    memset(&c, 0, sizeof c);
    c.name = name;
    c.unit = unit;
    c.work = work;
    c.run = run;
    c.user = user;
    c.reference = -1;
    c.reference_units = 1;
    return c;
}

CLI_FN int bench_fail(mpt_ctx *ctx) {
    return cli_error("bench", CLI_EXIT_FAILURE, "%s", mpt_last_error(ctx)->message);
}

#endif /* MPT_BENCH_MEASURE_H */
