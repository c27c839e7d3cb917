/* train/files.h - files that the program train writes: can they be written, and do they appear
   whole or not at all */
#ifndef TRAIN_FILES_H
#define TRAIN_FILES_H

#include "train/log.h"

#include <sys/stat.h>

enum { FILES_MAX_PATH = 4096 };

static bool files_temporary(const char *path, char out[FILES_MAX_PATH]) {
    return snprintf(out, FILES_MAX_PATH, "%s.tmp-%ld", path, (long)getpid()) < FILES_MAX_PATH;
}

/* Found out before the first step, not after the last one: can a file of that name be written? */
static int files_check(train_log *log, const char *option, const char *path) {
    char temporary[FILES_MAX_PATH];
    struct stat s;
    int fd;

    if (!path) return CLI_RUN;
    if (!*path || !files_temporary(path, temporary))
        return options_usage("--%s: '%.80s' is no name of a file", option, path);
    if (stat(path, &s) == 0 && S_ISDIR(s.st_mode))
        return log_fail(log, "--%s: %s: it is a directory; name a file", option, path);
    if (stat(path, &s) == 0 && !S_ISREG(s.st_mode)) /* as root, even /dev/null */
        return log_fail(log, "--%s: %s: it is a device or a pipe, which the file would replace",
                        option, path);
    fd = open(temporary, O_WRONLY | O_CREAT, 0666);
    if (fd < 0)
        return log_fail(log, "--%s: %s: can't be written: %s", option, path, cli_errno_text(errno));
    close(fd);
    unlink(temporary);
    return CLI_RUN;
}

/* With all directories above it. */
static int files_make_directory(train_log *log, const char *option, const char *path) {
    char part[FILES_MAX_PATH];
    struct stat s;
    size_t i, n = strlen(path);

    if (n == 0 || n >= sizeof part)
        return options_usage("--%s: '%.80s' is no name of a directory", option, path);
    for (i = 1; i <= n; i++) {
        if (path[i] != '/' && path[i] != 0) continue;
        memcpy(part, path, i);
        part[i] = 0;
        if (mkdir(part, 0777) != 0 && errno != EEXIST)
            return log_fail(log, "--%s: %s: can't make the directory: %s", option, part,
                            cli_errno_text(errno));
    }
    if (stat(path, &s) != 0 || !S_ISDIR(s.st_mode))
        return log_fail(log, "--%s: %s: exists and is no directory", option, path);
    return CLI_RUN;
}

/* Opens a temporary file beside path; files_end gives it its name. NULL after a message. */
static FILE *files_begin(train_log *log, const char *path) {
    char temporary[FILES_MAX_PATH];
    FILE *f = files_temporary(path, temporary) ? fopen(temporary, "wb") : NULL;

    if (!f) log_fail(log, "%s: can't write it: %s", path, cli_errno_text(errno));
    return f;
}

static int files_end(train_log *log, const char *path, FILE *f) {
    char temporary[FILES_MAX_PATH];
    bool ok = !ferror(f) && fflush(f) == 0 && fsync(fileno(f)) == 0;

    ok = fclose(f) == 0 && ok;
    files_temporary(path, temporary);
    ok = ok && rename(temporary, path) == 0;
    if (ok) return CLI_RUN;
    log_fail(log, "%s: can't write it: %s", path, cli_errno_text(errno));
    unlink(temporary);
    return CLI_EXIT_FAILURE;
}

#endif /* TRAIN_FILES_H */
