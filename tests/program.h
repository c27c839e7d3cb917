/* program.h - running our programs as their users run them: lines of shell in an empty directory,
   exit codes, what was printed and what was left on the disk */
#ifndef MPT_TEST_PROGRAM_H
#define MPT_TEST_PROGRAM_H

#include "mpt_test.h"

#include <sys/wait.h>

static char *run_out, *run_err; /* of the last run, terminated */

/* Paths in four buffers used in turn. */
static inline const char *work_file(const char *name) {
    static char paths[4][1400];
    static int turn;
    char *path = paths[turn++ % 4];

    snprintf(path, sizeof paths[0], "%s/work%s%s", mpt_test_tmpdir(), *name ? "/" : "", name);
    return path;
}

/* Each case begins with an empty working directory. */
static inline void fresh_directory(void) {
    mpt_test_remove_tree(work_file(""));
    CHECK(mkdir(work_file(""), 0700) == 0);
}

/* Runs a line of shell in the working directory, where $T is the program tfrecord, $B is bench, $P
   predict and $D the folder of all programs; gives its exit code. */
__attribute__((format(printf, 1, 2))) static inline int run(const char *format, ...) {
    char line[3000], command[4200], build[1024];
    size_t size;
    va_list args;
    int status;

    va_start(args, format);
    CHECK((size_t)vsnprintf(line, sizeof line, format, args) < sizeof line);
    va_end(args);
    CHECK(realpath(mpt_test_variable("MPT_TEST_BUILD", "build"), build) != NULL);
    snprintf(command, sizeof command,
             "D='%s'; T=$D/tfrecord; B=$D/bench; P=$D/predict; cd '%s' || exit 99; { %s\n} "
             ">../out 2>../err </dev/null",
             build, work_file(""), line);
    status = system(command);
    free(run_out);
    free(run_err);
    run_out = (char *)mpt_test_read_file(mpt_test_tmpfile("out"), &size);
    run_err = (char *)mpt_test_read_file(mpt_test_tmpfile("err"), &size);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* The head of a BMP of 24 bits, whose rows of `row` bytes follow; the size of the whole. */
static inline size_t bmp_head(unsigned char head[54], int width, int height) {
    int row = (width * 3 + 3) / 4 * 4, size = 54 + row * height;

    memset(head, 0, 54);
    head[0] = 'B';
    head[1] = 'M';
    head[2] = (unsigned char)size;
    head[3] = (unsigned char)(size >> 8);
    head[10] = 54;
    head[14] = 40;
    head[18] = (unsigned char)width;
    head[22] = (unsigned char)height;
    head[26] = 1;
    head[28] = 24;
    return (size_t)size;
}

static inline int count_of(const char *text, char c) {
    int n = 0;
    for (; *text; text++) n += *text == c;
    return n;
}

/* Exit code and error together: the error is one line that holds `needle`. */
#define CHECK_FAILS(code, needle, ...) \
    do { \
        CHECK_EQ_INT(run(__VA_ARGS__), code); \
        CHECK_CONTAINS(run_err, needle); \
        CHECK_EQ_INT(count_of(run_err, '\n'), 1); \
    } while (0)
#define CHECK_RUNS(...) \
    do { \
        int code_ = run(__VA_ARGS__); \
        if (code_) mpt_test_fail(__FILE__, __LINE__, "exit code %d: %s", code_, run_err); \
    } while (0)

/* The number behind "name": in one line of JSON, or NAN. */
static inline double json_number(const char *json, const char *name) {
    char key[100];
    const char *at;
    double value;

    snprintf(key, sizeof key, "\"%s\":", name);
    at = strstr(json, key);
    return at && sscanf(at + strlen(key), "%lf", &value) == 1 ? value : NAN;
}

#endif /* MPT_TEST_PROGRAM_H */
