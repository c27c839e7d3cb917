/* train/checkpoint.h - a directory of checkpoints: DIR/checkpoint-STEPS.safetensors, each written
   whole or not at all; the newest N are kept, the newest sound one is gone on from */
#ifndef TRAIN_CHECKPOINT_H
#define TRAIN_CHECKPOINT_H

#include "train/files.h"

#include <dirent.h>

typedef struct checkpoints {
    mpt_ctx *ctx;
    train_log *log;
    const char *dir; /* NULL: none are written */
    int64_t keep;
    double every; /* seconds; 0: not by time */
    int64_t every_steps;
    double saved_at; /* when the last one was written, or the run began */
} checkpoints;

static const char checkpoint_prefix[] = "checkpoint-", checkpoint_suffix[] = ".safetensors";

static void checkpoint_path(const checkpoints *c, int64_t step, char out[FILES_MAX_PATH]) {
    snprintf(out, FILES_MAX_PATH, "%s/%s%09lld%s", c->dir, checkpoint_prefix, (long long)step,
             checkpoint_suffix);
}

/* The number of steps in a name; -1: it is no checkpoint's. */
static int64_t checkpoint_step(const char *name) {
    size_t prefix = strlen(checkpoint_prefix), digits;
    char number[24];
    int64_t step;

    if (strncmp(name, checkpoint_prefix, prefix) != 0) return -1;
    digits = strspn(name + prefix, "0123456789");
    if (digits == 0 || digits >= sizeof number || strcmp(name + prefix + digits, checkpoint_suffix))
        return -1;
    memcpy(number, name + prefix, digits);
    number[digits] = 0;
    return cli_int_from_text(number, &step) ? step : -1;
}

static int checkpoint_compare(const void *a, const void *b) { /* newest first */
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

    return (x < y) - (x > y);
}

/* Steps of all checkpoints in the directory, newest first; the caller frees them. -1 after a
   message. */
static int checkpoint_list(const checkpoints *c, int64_t **steps) {
    DIR *d = opendir(c->dir);
    const struct dirent *entry;
    int count = 0, capacity = 0;

    *steps = NULL;
    if (!d) {
        log_fail(c->log, "%s: can't open the directory: %s", c->dir, cli_errno_text(errno));
        return -1;
    }
    while ((entry = readdir(d)) != NULL) {
        int64_t step = checkpoint_step(entry->d_name), *more;
        if (step < 0) continue;
        if (count == capacity) {
            capacity = capacity ? 2 * capacity : 16;
            more = (int64_t *)realloc(*steps, (size_t)capacity * sizeof *more);
            if (!more) break;
            *steps = more;
        }
        (*steps)[count++] = step;
    }
    closedir(d);
    if (count > 0) qsort(*steps, (size_t)count, sizeof **steps, checkpoint_compare);
    return count;
}

/* What a run that was killed while writing left behind. The number behind the name is the process
   that wrote it: one that still runs, perhaps, keeps its file. */
static void checkpoint_remove_leftovers(const checkpoints *c) {
    char path[FILES_MAX_PATH];
    const struct dirent *entry;
    DIR *d = opendir(c->dir);

    while (d && (entry = readdir(d)) != NULL) {
        const char *mark = strstr(entry->d_name, ".safetensors.tmp-");
        long pid = mark ? strtol(mark + strlen(".safetensors.tmp-"), NULL, 10) : 0;

        if (!mark || strncmp(entry->d_name, checkpoint_prefix, strlen(checkpoint_prefix)) != 0)
            continue;
        if (pid > 0 && pid != (long)getpid() && kill((pid_t)pid, 0) == 0) continue;
        if (snprintf(path, sizeof path, "%s/%s", c->dir, entry->d_name) < FILES_MAX_PATH)
            unlink(path);
    }
    if (d) closedir(d);
}

/* Makes the directory, and makes sure that files can be written there. CLI_RUN or the exit code. */
static int checkpoint_prepare(checkpoints *c, mpt_ctx *ctx, train_log *log,
                              const train_options *o) {
    char probe[FILES_MAX_PATH];
    int code;

    memset(c, 0, sizeof *c);
    c->ctx = ctx;
    c->log = log;
    c->dir = o->checkpoint_dir;
    c->keep = o->keep;
    c->every = o->checkpoint_every * 60;
    c->every_steps = o->checkpoint_every_steps;
    c->saved_at = cli_seconds();
    if (!c->dir || o->evaluate) return CLI_RUN;
    code = files_make_directory(log, "checkpoint-dir", c->dir);
    if (code != CLI_RUN) return code;
    if (strlen(c->dir) + 64 > FILES_MAX_PATH)
        return options_usage("--checkpoint-dir: the name is too long");
    checkpoint_path(c, 0, probe);
    code = files_check(log, "checkpoint-dir", probe);
    if (code == CLI_RUN) checkpoint_remove_leftovers(c);
    return code;
}

/* ---- going on -------------------------------------------------------------------------------- */
/* Are all bytes as they were written? MPT_ERR_CORRUPT_DATA, with a message, if not. */
static mpt_result checkpoint_verify(mpt_ctx *ctx, const char *path) {
    mpt_safetensors_desc d;
    mpt_safetensors *s = NULL;
    mpt_result rc;

    memset(&d, 0, sizeof d);
    d.path = path;
    rc = mpt_safetensors_open(ctx, &d, &s);
    if (rc == MPT_OK) rc = mpt_safetensors_verify(s);
    mpt_safetensors_close(s);
    return rc == MPT_ERR_INVALID_STATE ? MPT_ERR_CORRUPT_DATA : rc;
}

/* A damaged file is kept for whoever wants to know why, under a name that is not tried again. */
static void checkpoint_set_aside(const checkpoints *c, const char *path) {
    char aside[FILES_MAX_PATH];

    if (snprintf(aside, sizeof aside, "%s.damaged", path) >= (int)sizeof aside) return;
    log_warn(c->log, "%s; the checkpoint before it is tried (this one is now %s)",
             mpt_last_error(c->ctx)->message, aside);
    rename(path, aside);
}

static int checkpoint_load(const checkpoints *c, mpt_trainer *t, mpt_loader *data,
                           const char *path) {
    if (mpt_trainer_load(t, data, NULL, path)) return log_fail_call(c->log, c->ctx);
    log_note(c->log, "resumed: %s, after %lld step%s", path,
             (long long)mpt_trainer_get_info(t).steps,
             cli_plural(mpt_trainer_get_info(t).steps, "s"));
    return CLI_RUN;
}

/* Opening a pipe would wait for ever. CLI_RUN or the exit code. */
static int checkpoint_check_kind(const checkpoints *c, const char *path) {
    struct stat s;

    if (stat(path, &s) != 0 || S_ISREG(s.st_mode) || S_ISDIR(s.st_mode)) return CLI_RUN;
    return log_fail(c->log, "%s: no checkpoint: it is a device or a pipe", path);
}

/* The newest sound one of c->dir. *found false: there is none at all. */
static int checkpoint_load_newest(const checkpoints *c, mpt_trainer *t, mpt_loader *data,
                                  bool *found) {
    char path[FILES_MAX_PATH];
    int64_t *steps;
    int count = checkpoint_list(c, &steps), i, code = CLI_RUN;
    mpt_result rc = MPT_OK;

    *found = false;
    for (i = 0; i < count; i++) {
        checkpoint_path(c, steps[i], path);
        code = checkpoint_check_kind(c, path);
        if (code != CLI_RUN) break;
        rc = checkpoint_verify(c->ctx, path);
        if (rc != MPT_ERR_CORRUPT_DATA) break;
        checkpoint_set_aside(c, path);
    }
    if (count < 0) code = CLI_EXIT_FAILURE;
    else if (code == CLI_RUN && rc == MPT_ERR_CORRUPT_DATA)
        code = log_fail(c->log, "%s: all %d checkpoints are damaged; to start anew, run again",
                        c->dir, count);
    else if (code == CLI_RUN && rc) code = log_fail_call(c->log, c->ctx);
    else if (code == CLI_RUN && count > 0) code = checkpoint_load(c, t, data, path);
    *found = count > 0 && code == CLI_RUN;
    free(steps);
    return code;
}

/* Checkpoints of later steps than where this run begins come from another run: mixed with ours,
   nobody could tell which are newest. */
static int checkpoint_refuse_later(const checkpoints *c, int64_t step) {
    int64_t *steps;
    int count = checkpoint_list(c, &steps), code = CLI_RUN;

    if (count < 0) return CLI_EXIT_FAILURE;
    if (count > 0 && steps[0] > step)
        code = log_fail(c->log,
                        "%s holds a checkpoint of step %lld, and this run begins at step %lld: "
                        "--resume auto goes on from there; else name another --checkpoint-dir",
                        c->dir, (long long)steps[0], (long long)step);
    free(steps);
    return code;
}

/* By --resume. data NULL: only the weights matter. */
static int checkpoint_resume(checkpoints *c, const train_options *o, mpt_trainer *t,
                             mpt_loader *data, bool *resumed) {
    checkpoints named = *c;
    struct stat s;
    int code = CLI_RUN;

    *resumed = false;
    if (!strcmp(o->resume, "auto")) {
        if (o->evaluate && stat(c->dir, &s) != 0)
            return log_fail(c->log, "%s: %s", c->dir, cli_errno_text(errno));
        code = checkpoint_load_newest(c, t, data, resumed);
    } else if (strcmp(o->resume, "none") != 0) {
        named.dir = o->resume;
        if (stat(o->resume, &s) == 0 && S_ISDIR(s.st_mode)) {
            code = checkpoint_load_newest(&named, t, data, resumed);
            if (code == CLI_RUN && !*resumed)
                code = log_fail(c->log, "--resume: %s: no checkpoint in this directory", o->resume);
        } else {
            code = checkpoint_check_kind(c, o->resume);
            if (code == CLI_RUN) code = checkpoint_load(c, t, data, o->resume);
            *resumed = code == CLI_RUN;
        }
    }
    if (code == CLI_RUN && c->dir && !o->evaluate)
        code = checkpoint_refuse_later(c, mpt_trainer_get_info(t).steps);
    return code;
}

/* ---- saving ---------------------------------------------------------------------------------- */
/* Removes all but the newest, once the new one has been read back: until then an older one is the
   only one that is known to be good. */
static void checkpoint_prune(const checkpoints *c, const char *newest) {
    char path[FILES_MAX_PATH];
    int64_t *steps;
    int count = checkpoint_list(c, &steps), i;

    if (count > c->keep && checkpoint_verify(c->ctx, newest) == MPT_OK) {
        for (i = (int)c->keep; i < count; i++) {
            checkpoint_path(c, steps[i], path);
            unlink(path);
        }
    }
    free(steps);
}

/* CLI_RUN or the exit code. */
static int checkpoint_save(checkpoints *c, mpt_trainer *t, mpt_loader *data) {
    char path[FILES_MAX_PATH];

    if (!c->dir) return CLI_RUN;
    checkpoint_path(c, mpt_trainer_get_info(t).steps, path);
    if (mpt_trainer_save(t, data, NULL, path)) return log_fail_call(c->log, c->ctx);
    c->saved_at = cli_seconds();
    log_checkpoint(c->log, mpt_trainer_get_info(t).steps, path);
    checkpoint_prune(c, path);
    return CLI_RUN;
}

static bool checkpoint_is_due(const checkpoints *c, int64_t step) {
    if (!c->dir) return false;
    if (c->every_steps > 0 && step % c->every_steps == 0) return true;
    return c->every > 0 && cli_seconds() - c->saved_at >= c->every;
}

#endif /* TRAIN_CHECKPOINT_H */
