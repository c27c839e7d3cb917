/* cli.h - command lines, a progress line and JSON for small programs

   A companion of mptrain.h that needs nothing but POSIX 2008; copy it where you like. Everything is
   a static function of this header, nothing is global, nothing exits. A program with two options:

       int main(int argc, char **argv) {
           int64_t epochs = 90;
           const char *name = NULL;
           cli_option options[2];
           cli_command command = {"demo", "FILE...", "Shows how.", "demo 1.0", options, 2, 1, -1};
           cli_list files = {NULL, 0, 0};
           int code;

           options[0] = cli_env(cli_int("epochs", 'e', &epochs, 1, 1000, "N", "passes"), "EPOCHS");
           options[1] = cli_text("name", 0, &name, "NAME", "what to call the run");
           code = cli_parse(&command, argc, argv, &files);
           ...
           cli_list_free(&files);
           return code == CLI_RUN ? 0 : code;
       }

   Taken are --flag=x, --flag x, -f x and -fx; `-` and `_` in names are alike; `--` ends the
   options. What an option's variable holds when the option is made is its default. */
#if defined(__STRICT_ANSI__) && !defined(_POSIX_C_SOURCE) && !defined(_GNU_SOURCE)
#define _POSIX_C_SOURCE 200809L
#endif

#ifndef MPT_EXAMPLES_CLI_H
#define MPT_EXAMPLES_CLI_H

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CLI_FN static __attribute__((unused))

/* ---- options --------------------------------------------------------------------------------- */

/* CLI_RUN: go on. Anything else is what main returns: help was printed, or the message was. */
enum { CLI_RUN = -1, CLI_EXIT_OK = 0, CLI_EXIT_FAILURE = 1, CLI_EXIT_USAGE = 2 };

typedef struct cli_list { /* words of the command line; the words themselves belong to argv */
    const char **items;   /* [count] */
    int count, capacity;
} cli_list;

typedef enum cli_kind {
    CLI_FLAG = 0,
    CLI_INT,
    CLI_BYTES,
    CLI_DOUBLE,
    CLI_TEXT,
    CLI_CHOICE,
    CLI_LIST
} cli_kind;

typedef struct cli_option { /* made by the functions below */
    cli_kind kind;
    char letter;      /* 'e' for -e; 0: none */
    const char *name; /* "epochs" for --epochs */
    void *value;      /* bool, int64_t, int64_t, double, const char *, int, cli_list; by kind */
    int64_t min, max; /* CLI_INT and CLI_BYTES */
    double low, high; /* CLI_DOUBLE */
    const char *metavar, *help;
    const char *env;          /* variable that is read where the option isn't given; NULL: none */
    const char *default_text; /* NULL: shown from the value; "": not shown */
} cli_option;

typedef struct cli_command {
    const char *name;     /* begins every message: "tfrecord cat" */
    const char *operands; /* for the usage line: "FILE..."; NULL: there are none */
    const char *about;    /* lines of the help text */
    const char *version;  /* line for --version */
    cli_option *options;
    int num_options;
    int min_operands, max_operands; /* max -1: any number */
} cli_command;

CLI_FN cli_option cli_make(cli_kind kind, const char *name, char letter, void *value,
                           const char *metavar, const char *help) {
    cli_option o;

    memset(&o, 0, sizeof o);
    o.kind = kind;
    o.name = name;
    o.letter = letter;
    o.value = value;
    o.metavar = metavar;
    o.help = help;
    return o;
}

/* --name sets *value to true */
CLI_FN cli_option cli_flag(const char *name, char letter, bool *value, const char *help) {
    return cli_make(CLI_FLAG, name, letter, value, "", help);
}

/* a whole number from min to max */
CLI_FN cli_option cli_int(const char *name, char letter, int64_t *value, int64_t min, int64_t max,
                          const char *metavar, const char *help) {
    cli_option o = cli_make(CLI_INT, name, letter, value, metavar, help);

    o.min = min;
    o.max = max;
    return o;
}

/* a number of bytes; K, M, G, T behind it stand for powers of 1024 */
CLI_FN cli_option cli_bytes(const char *name, char letter, int64_t *value, int64_t min, int64_t max,
                            const char *help) {
    cli_option o = cli_int(name, letter, value, min, max, "BYTES", help);

    o.kind = CLI_BYTES;
    return o;
}

CLI_FN cli_option cli_double(const char *name, char letter, double *value, double low, double high,
                             const char *metavar, const char *help) {
    cli_option o = cli_make(CLI_DOUBLE, name, letter, value, metavar, help);

    o.low = low;
    o.high = high;
    return o;
}

CLI_FN cli_option cli_text(const char *name, char letter, const char **value, const char *metavar,
                           const char *help) {
    return cli_make(CLI_TEXT, name, letter, (void *)value, metavar, help);
}

/* one of "none|gzip|zlib"; *value is its place in that list, from 0 (-1: no default) */
CLI_FN cli_option cli_choice(const char *name, char letter, int *value, const char *names,
                             const char *help) {
    return cli_make(CLI_CHOICE, name, letter, value, names, help);
}

/* Several words: once --name is there, non-option arguments belong to it, until another list option
   takes over. Before the first list option they are operands. */
CLI_FN cli_option cli_words(const char *name, char letter, cli_list *value, const char *metavar,
                            const char *help) {
    return cli_make(CLI_LIST, name, letter, value, metavar, help);
}

/* the same option with an environment variable behind it */
CLI_FN cli_option cli_env(cli_option o, const char *variable) {
    o.env = variable;
    return o;
}

/* the same option whose help names the default in words: cli_default(o, "all cores") */
CLI_FN cli_option cli_default(cli_option o, const char *text) {
    o.default_text = text;
    return o;
}

CLI_FN void cli_list_free(cli_list *list) {
    free((void *)list->items);
    list->items = NULL;
    list->count = list->capacity = 0;
}

CLI_FN bool cli_list_add(cli_list *list, const char *word) { /* false: no memory */
    if (list->count == list->capacity) {
        int capacity = list->capacity ? list->capacity * 2 : 16;
        const char **items = (const char **)realloc((void *)list->items,
                                                    (size_t)capacity * sizeof *items);
        if (!items) return false;
        list->items = items;
        list->capacity = capacity;
    }
    list->items[list->count++] = word;
    return true;
}

/* One line on stderr, begun with the command's name; control characters, which could come from a
   hostile file name, turn into '?'. Returns the exit code. */
__attribute__((format(printf, 3, 4))) CLI_FN int cli_error(const char *name, int code,
                                                           const char *format, ...) {
    char text[1024];
    va_list args;
    char *p;

    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    for (p = text; *p; p++)
        if ((unsigned char)*p < 0x20 || *p == 0x7f) *p = '?';
    fprintf(stderr, "%s: %s\n", name, text);
    return code;
}

/* Why a call failed, from errno: in the words of mptrain.h, so that a missing file reads alike
   whichever part meets it. */
CLI_FN const char *cli_errno_text(int number) {
    switch (number) {
    case 0: return "no reason given";
    case ENOENT: return "no such file";
    case EACCES: return "permission denied";
    case EISDIR: return "it is a directory";
    case ENOTDIR: return "part of the path is not a directory";
    case ENOSPC: return "no space left on the device";
    default: return strerror(number);
    }
}

/* The last act of a program: what it printed may still be in a buffer, and may not arrive. A reader
   that has read enough is no error. Returns the exit code. */
CLI_FN int cli_finish(const char *name, int code) {
    bool lost = ferror(stdout) != 0;

    errno = 0;
    if (fflush(stdout) == 0 && !lost) return code;
    if (errno == EPIPE) return code;
    return cli_error(name, CLI_EXIT_FAILURE, "can't write to standard output%s%s",
                     errno ? ": " : "", errno ? cli_errno_text(errno) : "");
}

/* ---- the process ----------------------------------------------------------------------------- */
/* If the parent closed descriptors 0 to 2, a file opened later would get such a number, and
   messages would be written into it. Read-only, so that output to it still fails. */
CLI_FN void cli_occupy_standard_files(void) {
    int fd;

    for (fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDONLY) < 0) return;
}

/* A reader of our output that has gone, and a file beyond the limit of `ulimit -f`, are errors of
   write, not signals. */
CLI_FN void cli_ignore_write_signals(void) {
    struct sigaction action;

    memset(&action, 0, sizeof action);
    action.sa_handler = SIG_IGN;
    sigemptyset(&action.sa_mask);
    sigaction(SIGPIPE, &action, NULL);
    sigaction(SIGXFSZ, &action, NULL);
}

/* The first SIGINT or SIGTERM is told to the program, which ends its work in good order; a second
   one of the same kind kills. */
CLI_FN void cli_catch_signals(void (*told)(int number)) {
    struct sigaction action;

    memset(&action, 0, sizeof action);
    action.sa_handler = told;
    action.sa_flags = (int)SA_RESETHAND | SA_RESTART;
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

/* "-" as the name of a file, after a message; here it means no stream, and `./-` is the file. */
CLI_FN bool cli_refuse_dash(const char *name, const char *word) {
    if (strcmp(word, "-") != 0) return false;
    cli_error(name, 0, "-: standard input is not read by that name; use /dev/stdin");
    return true;
}

/* ---- values ---------------------------------------------------------------------------------- */
CLI_FN bool cli_int_from_text(const char *text, int64_t *out) { /* the whole text, decimal */
    const char *digits = text + (*text == '-' || *text == '+');
    char *end;
    long long v;

    if (*digits < '0' || *digits > '9') return false;
    errno = 0;
    v = strtoll(text, &end, 10);
    *out = (int64_t)v;
    return *end == 0 && errno == 0;
}

CLI_FN bool cli_bytes_from_text(const char *text, int64_t *out) {
    static const char suffixes[] = "KMGT";
    size_t n = strlen(text);
    char digits[24];
    const char *at = NULL;
    int shift = 0;

    if (n > 0) at = strchr(suffixes, text[n - 1] & ~0x20);
    if (at && (text[n - 1] & ~0x20) != 0) {
        shift = 10 * (int)(at - suffixes + 1);
        n--;
    }
    if (n == 0 || n >= sizeof digits) return false;
    memcpy(digits, text, n);
    digits[n] = 0;
    if (!cli_int_from_text(digits, out) || *out < 0 || *out > INT64_MAX >> shift) return false;
    *out <<= shift;
    return true;
}

/* The whole text; words such as nan and inf, and hexadecimal numbers, are refused. */
CLI_FN bool cli_double_from_text(const char *text, double *out) {
    char *end;

    if (*text == 0 || text[strspn(text, "0123456789+-.eE")] != 0) return false;
    *out = strtod(text, &end);
    return *end == 0 && *out >= -DBL_MAX && *out <= DBL_MAX;
}

/* Place of a word in "none|gzip|zlib"; -1: it isn't there. */
CLI_FN int cli_choice_from_text(const char *text, const char *names) {
    size_t n = strlen(text), part;
    int i;

    for (i = 0; *names; i++) {
        part = strcspn(names, "|");
        if (part == n && memcmp(names, text, n) == 0) return i;
        names += part + (names[part] == '|');
    }
    return -1;
}

/* Name of place i in "none|gzip|zlib", copied to out. */
CLI_FN const char *cli_choice_name(const char *names, int i, char *out, size_t capacity) {
    size_t part;

    for (; i > 0 && *names; i--) {
        part = strcspn(names, "|");
        names += part + (names[part] == '|');
    }
    part = strcspn(names, "|");
    if (part >= capacity) part = capacity - 1;
    memcpy(out, names, part);
    out[part] = 0;
    return out;
}

CLI_FN bool cli_bool_from_text(const char *text, bool *out) { /* for environment variables */
    int i = cli_choice_from_text(text, "0|1|false|true|no|yes|off|on");

    *out = i >= 0 && i % 2 == 1;
    return i >= 0;
}

/* A largest number that the user can't mean is not worth its nineteen digits. */
CLI_FN int cli_refuse_int(const cli_command *c, const cli_option *o, const char *where,
                          const char *text) {
    const char *more = o->kind == CLI_BYTES ? " (K, M, G, T may follow)" : "";

    if (o->max == INT64_MAX)
        return cli_error(c->name, CLI_EXIT_USAGE, "%s: '%s' is no whole number of at least %lld%s",
                         where, text, (long long)o->min, more);
    return cli_error(c->name, CLI_EXIT_USAGE, "%s: '%s' is no whole number from %lld to %lld%s",
                     where, text, (long long)o->min, (long long)o->max, more);
}

/* Takes a value; CLI_RUN, or CLI_EXIT_USAGE after the message. `where` names the option or the
   environment variable. */
CLI_FN int cli_set(const cli_command *c, const cli_option *o, const char *where, const char *text) {
    int64_t i = 0;
    double d = 0;
    bool ok;

    switch (o->kind) {
    case CLI_FLAG:
        if (cli_bool_from_text(text, (bool *)o->value)) return CLI_RUN;
        return cli_error(c->name, CLI_EXIT_USAGE, "%s: '%s' is neither 0 nor 1", where, text);
    case CLI_INT:
    case CLI_BYTES:
        ok = o->kind == CLI_INT ? cli_int_from_text(text, &i) : cli_bytes_from_text(text, &i);
        if (!ok || i < o->min || i > o->max) return cli_refuse_int(c, o, where, text);
        *(int64_t *)o->value = i;
        return CLI_RUN;
    case CLI_DOUBLE:
        if (!cli_double_from_text(text, &d) || d < o->low || d > o->high) {
            return cli_error(c->name, CLI_EXIT_USAGE, "%s: '%s' is no number from %g to %g", where,
                             text, o->low, o->high);
        }
        *(double *)o->value = d;
        return CLI_RUN;
    case CLI_CHOICE:
        i = cli_choice_from_text(text, o->metavar);
        if (i < 0) {
            return cli_error(c->name, CLI_EXIT_USAGE, "%s: '%s' is none of %s", where, text,
                             o->metavar);
        }
        *(int *)o->value = (int)i;
        return CLI_RUN;
    case CLI_TEXT: *(const char **)o->value = text; return CLI_RUN;
    case CLI_LIST:
        if (cli_list_add((cli_list *)o->value, text)) return CLI_RUN;
        return cli_error(c->name, CLI_EXIT_FAILURE, "no memory");
    }
    return CLI_RUN;
}

/* ---- help ------------------------------------------------------------------------------------ */
enum { CLI_HELP_INDENT = 25, CLI_HELP_WIDTH = 79 };

/* Words of text from column `column` on, broken at CLI_HELP_WIDTH. Returns the new column. */
CLI_FN int cli_wrap(FILE *out, int column, const char *text) {
    while (*text) {
        int n = (int)strcspn(text, " ");

        if (column > CLI_HELP_INDENT && column + 1 + n > CLI_HELP_WIDTH) {
            fprintf(out, "\n%*s", CLI_HELP_INDENT, "");
            column = CLI_HELP_INDENT;
        }
        if (column > CLI_HELP_INDENT) column += fprintf(out, " ");
        column += fprintf(out, "%.*s", n, text);
        text += n;
        text += strspn(text, " ");
    }
    return column;
}

CLI_FN void cli_default_text(const cli_option *o, char *out, size_t capacity) { /* "": none */
    out[0] = 0;
    if (o->default_text) {
        snprintf(out, capacity, "%s", o->default_text);
    } else if (o->kind == CLI_INT || o->kind == CLI_BYTES) {
        snprintf(out, capacity, "%lld", (long long)*(const int64_t *)o->value);
    } else if (o->kind == CLI_DOUBLE) {
        snprintf(out, capacity, "%g", *(const double *)o->value);
    } else if (o->kind == CLI_CHOICE && *(const int *)o->value >= 0) {
        cli_choice_name(o->metavar, *(const int *)o->value, out, capacity);
    } else if (o->kind == CLI_TEXT && *(const char *const *)o->value) {
        snprintf(out, capacity, "%s", *(const char *const *)o->value);
    }
}

CLI_FN void cli_help_option(FILE *out, const cli_option *o) {
    char text[160], note[256];
    int column;

    column = o->letter ? fprintf(out, "  -%c, ", o->letter) : fprintf(out, "      ");
    column += fprintf(out, "--%s%s%s%s", o->name, *o->metavar ? " " : "", o->metavar,
                      o->kind == CLI_LIST ? "..." : "");
    if (column > CLI_HELP_INDENT - 2) {
        fprintf(out, "\n");
        column = 0;
    }
    fprintf(out, "%*s", CLI_HELP_INDENT - column, "");
    column = cli_wrap(out, CLI_HELP_INDENT, o->help);
    cli_default_text(o, text, sizeof text);
    if (*text || o->env) {
        snprintf(note, sizeof note, "(%s%s%s%s%s)", *text ? "default: " : "", text,
                 *text && o->env ? "; " : "", o->env ? "environment: " : "", o->env ? o->env : "");
        cli_wrap(out, column, note);
    }
    fprintf(out, "\n");
}

CLI_FN void cli_help(FILE *out, const cli_command *c) {
    int i;

    fprintf(out, "usage: %s%s%s%s\n%s\n\noptions:\n", c->name, c->num_options ? " [OPTION...]" : "",
            c->operands ? " " : "", c->operands ? c->operands : "", c->about);
    for (i = 0; i < c->num_options; i++) cli_help_option(out, &c->options[i]);
    fprintf(out, "  -h, --help             this text\n      --version          the version\n");
}

/* ---- parsing --------------------------------------------------------------------------------- */
/* Of the first n characters of text; `_` and `-` are alike. */
CLI_FN bool cli_same_name(const char *name, const char *text, size_t n) {
    size_t i;

    for (i = 0; i < n && name[i]; i++)
        if ((text[i] == '_' ? '-' : text[i]) != name[i]) return false;
    return i == n && name[i] == 0;
}

/* Edit distance (Levenshtein), for the likely wish behind a mistyped word; 99 for long words. */
CLI_FN int cli_distance(const char *a, const char *b) {
    int row[40], n = (int)strlen(b), i, j, corner, above;

    if (n >= 40) return 99;
    for (j = 0; j <= n; j++) row[j] = j;
    for (i = 1; a[i - 1]; i++) {
        corner = row[0];
        row[0] = i;
        for (j = 1; j <= n; j++) {
            above = row[j];
            row[j] = corner + (a[i - 1] != b[j - 1]);
            if (above + 1 < row[j]) row[j] = above + 1;
            if (row[j - 1] + 1 < row[j]) row[j] = row[j - 1] + 1;
            corner = above;
        }
    }
    return row[n];
}

/* A likely wish: at most three letters are wrong, and fewer than half of the longer word. */
CLI_FN bool cli_is_close(const char *word, const char *name, int distance) {
    size_t n = strlen(word), m = strlen(name);

    return distance <= 3 && (size_t)distance * 2 < (n > m ? n : m);
}

CLI_FN int cli_unknown(const cli_command *c, const char *word) {
    const char *best = NULL;
    int i, distance, least = 99;

    for (i = 0; word[1] == '-' && i < c->num_options; i++) {
        distance = cli_distance(word + 2, c->options[i].name);
        if (distance >= least || !cli_is_close(word + 2, c->options[i].name, distance)) continue;
        least = distance;
        best = c->options[i].name;
    }
    if (!best) return cli_error(c->name, CLI_EXIT_USAGE, "unknown option %s (see --help)", word);
    return cli_error(c->name, CLI_EXIT_USAGE, "unknown option %s: did you mean --%s?", word, best);
}

/* The option that a word names, and the value that hangs on it (NULL: none). NULL: unknown. */
CLI_FN const cli_option *cli_find(const cli_command *c, const char *word, const char **value) {
    size_t n;
    int i;

    *value = NULL;
    if (word[1] != '-') {
        for (i = 0; i < c->num_options; i++) {
            if (c->options[i].letter != word[1]) continue;
            if (word[2]) *value = word + 2;
            return &c->options[i];
        }
        return NULL;
    }
    n = strcspn(word + 2, "=");
    if (word[2 + n] == '=') *value = word + 2 + n + 1;
    for (i = 0; i < c->num_options; i++)
        if (cli_same_name(c->options[i].name, word + 2, n)) return &c->options[i];
    return NULL;
}

/* --help wins over whatever else is wrong with the line. */
CLI_FN int cli_scan_help(const cli_command *c, int argc, char **argv) {
    int i;

    for (i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h")) cli_help(stdout, c);
        else if (!strcmp(argv[i], "--version")) printf("%s\n", c->version);
        else continue;
        return cli_finish(c->name, CLI_EXIT_OK);
    }
    return CLI_RUN;
}

CLI_FN int cli_read_environment(const cli_command *c) {
    int i, code;

    for (i = 0; i < c->num_options; i++) {
        const char *text = c->options[i].env ? getenv(c->options[i].env) : NULL;

        if (!text || !*text) continue;
        code = cli_set(c, &c->options[i], c->options[i].env, text);
        if (code != CLI_RUN) return code;
    }
    return CLI_RUN;
}

/* One option at argv[*at]; *at moves on if the value is the next word. A value that begins with two
   dashes must be joined by '=', since a forgotten value is far more likely. */
CLI_FN int cli_take(const cli_command *c, int argc, char **argv, int *at, cli_list **words) {
    const char *word = argv[*at], *value;
    const cli_option *o = cli_find(c, word, &value);
    char where[64];

    if (!o) return cli_unknown(c, word);
    snprintf(where, sizeof where, "--%s", o->name);
    if (o->kind == CLI_FLAG) {
        if (value) return cli_error(c->name, CLI_EXIT_USAGE, "%s takes no value", where);
        *(bool *)o->value = true;
        return CLI_RUN;
    }
    if (!value) {
        if (*at + 1 >= argc || !strncmp(argv[*at + 1], "--", 2))
            return cli_error(c->name, CLI_EXIT_USAGE, "%s needs a value: %s", where, o->metavar);
        value = argv[++*at];
    }
    if (o->kind == CLI_LIST) *words = (cli_list *)o->value;
    return cli_set(c, o, where, value);
}

/* Reads the environment, then the line (argv[0] is skipped). */
CLI_FN int cli_parse(const cli_command *c, int argc, char **argv, cli_list *operands) {
    cli_list *words = operands;
    bool only_words = false;
    int i, code = cli_scan_help(c, argc, argv);

    if (code == CLI_RUN) code = cli_read_environment(c);
    for (i = 1; i < argc && code == CLI_RUN; i++) {
        bool option = !only_words && argv[i][0] == '-' && argv[i][1];

        if (option && !strcmp(argv[i], "--")) only_words = true;
        else if (option) code = cli_take(c, argc, argv, &i, &words);
        else if (!cli_list_add(words, argv[i]))
            code = cli_error(c->name, CLI_EXIT_FAILURE, "no memory");
    }
    if (code != CLI_RUN) return code;
    if (operands->count < c->min_operands)
        return cli_error(c->name, CLI_EXIT_USAGE, "needs %s (see --help)",
                         c->operands ? c->operands : "arguments");
    if (c->max_operands >= 0 && operands->count > c->max_operands)
        return cli_error(c->name, CLI_EXIT_USAGE, "'%s' is one argument too many (see --help)",
                         operands->items[c->max_operands]);
    return CLI_RUN;
}

/* ---- numbers for people ---------------------------------------------------------------------- */
/* The end of a counted word: "1 record", "2 records"; with "es": "1 class", "2 classes". */
CLI_FN const char *cli_plural(int64_t n, const char *ending) {
    return n == 1 ? "" : ending;
}

/* 140.2 MB: powers of 1000. Returns out. */
CLI_FN const char *cli_human_bytes(double bytes, char out[24]) {
    static const char *const units[] = {"bytes", "KB", "MB", "GB", "TB", "PB"};
    int i = 0;

    while (i < 5 && bytes >= 999.95) {
        bytes /= 1000;
        i++;
    }
    snprintf(out, 24, i ? "%.1f %s" : "%.0f %s", bytes, units[i]);
    if (!strcmp(out, "1 bytes")) out[6] = 0;
    return out;
}

CLI_FN const char *cli_human_time(double seconds, char out[24]) { /* 03:47, 1:03:47 */
    long s = seconds < 0 ? 0 : seconds > 3.6e7 ? 36000000L : (long)seconds;

    if (s < 3600) snprintf(out, 24, "%02ld:%02ld", s / 60, s % 60);
    else snprintf(out, 24, "%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
    return out;
}

/* ---- progress line ------------------------------------------------------------------------------
   On a terminal one line on stderr, redrawn at most ten times a second and gone at the end;
   elsewhere a plain line every ten seconds. Work under half a second shows nothing. Used by one
   thread at a time. */
typedef struct cli_progress {
    const char *label;
    const char *unit;    /* "records"; "B": done and total are bytes */
    const char *note;    /* more text at the end of the line; NULL: none */
    int64_t done, total; /* total 0: unknown */
    double start, drawn; /* seconds; drawn 0: never */
    bool live, color;
    int columns; /* of the line that stands on the terminal */
} cli_progress;

CLI_FN double cli_seconds(void) {
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* https://no-color.org: set and not empty means no colour, whatever the terminal can do. */
CLI_FN bool cli_use_color(int fd) {
    const char *no_color = getenv("NO_COLOR"), *term = getenv("TERM");

    return isatty(fd) && !(no_color && *no_color) && term && strcmp(term, "dumb") != 0;
}

CLI_FN void cli_progress_begin(cli_progress *p, const char *label, const char *unit,
                               int64_t total) {
    memset(p, 0, sizeof *p);
    p->label = label;
    p->unit = unit;
    p->total = total;
    p->start = cli_seconds();
    p->live = isatty(STDERR_FILENO);
    p->color = cli_use_color(STDERR_FILENO);
}

CLI_FN void cli_progress_amount(const cli_progress *p, int64_t amount, char out[24]) {
    if (!strcmp(p->unit, "B")) cli_human_bytes((double)amount, out);
    else snprintf(out, 24, "%lld", (long long)amount);
}

/* The text after so many seconds, without colour:
   verify:  12%|##                  | 120.0 MB/1.0 GB [00:31<03:47, 3.9 MB/s] */
CLI_FN void cli_progress_format(const cli_progress *p, double seconds, char *out, size_t capacity) {
    char done[24], total[24], elapsed[24], left[24], rate[24], bar[] = "                    ";
    double speed = seconds > 0 ? (double)p->done / seconds : 0;
    double part = p->total > 0 ? (double)p->done / (double)p->total : 0;
    const char *per = strcmp(p->unit, "B") ? p->unit : "";

    if (part > 1) part = 1;
    memset(bar, '#', (size_t)(part * 20));
    cli_progress_amount(p, p->done, done);
    cli_progress_amount(p, p->total, total);
    cli_human_time(seconds, elapsed);
    cli_human_time(speed > 0 ? (double)(p->total - p->done) / speed : 0, left);
    if (*per) snprintf(rate, sizeof rate, speed < 10 ? "%.2f " : "%.0f ", speed);
    else cli_human_bytes(speed, rate);
    if (p->total <= 0) {
        snprintf(out, capacity, "%s: %s [%s, %s%s/s%s%s]", p->label, done, elapsed, rate, per,
                 p->note ? ", " : "", p->note ? p->note : "");
        return;
    }
    snprintf(out, capacity, "%s: %3d%%|%s| %s/%s [%s<%s, %s%s/s%s%s]", p->label, (int)(part * 100),
             bar, done, total, elapsed, left, rate, per, p->note ? ", " : "",
             p->note ? p->note : "");
}

CLI_FN void cli_progress_clear(cli_progress *p) { /* before other text goes to the terminal */
    if (p->columns > 0) fprintf(stderr, "\r%*s\r", p->columns, "");
    p->columns = 0;
}

CLI_FN void cli_progress_draw(cli_progress *p, double now) {
    char text[256];
    int n;

    cli_progress_format(p, now - p->start, text, sizeof text);
    n = (int)strlen(text);
    if (!p->live) fprintf(stderr, "%s\n", text);
    else
        fprintf(stderr, "\r%s%s%s%*s", p->color ? "\033[36m" : "", text, p->color ? "\033[0m" : "",
                p->columns > n ? p->columns - n : 0, "");
    p->columns = p->live ? n : 0;
    p->drawn = now;
}

CLI_FN void cli_progress_update(cli_progress *p, int64_t done) {
    double now = cli_seconds(), last = p->drawn > 0 ? p->drawn : p->start;
    double pause = !p->live ? 10 : p->drawn > 0 ? 0.1 : 0.5;

    p->done = done;
    if (now - last >= pause) cli_progress_draw(p, now);
}

CLI_FN void cli_progress_end(cli_progress *p) {
    cli_progress_clear(p);
}

/* ---- JSON ------------------------------------------------------------------------------------ */
/* Bytes of the UTF-8 character at p (Unicode 15, table 3-7: no overlong form, no surrogate);
   0: it is none. */
CLI_FN int cli_utf8_length(const unsigned char *p, size_t size) {
    unsigned char low = 0x80, high = 0xbf;
    int n, i;

    if (size == 0) return 0;
    if (p[0] < 0x80) return 1;
    if (p[0] < 0xc2 || p[0] > 0xf4) return 0;
    n = p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;
    if (p[0] == 0xe0) low = 0xa0;
    if (p[0] == 0xed) high = 0x9f;
    if (p[0] == 0xf0) low = 0x90;
    if (p[0] == 0xf4) high = 0x8f;
    if ((size_t)n > size || p[1] < low || p[1] > high) return 0;
    for (i = 2; i < n; i++)
        if ((p[i] & 0xc0) != 0x80) return 0;
    return n;
}

/* A quoted JSON string; bytes that are no UTF-8 turn into U+FFFD, one each. */
CLI_FN void cli_json_string(FILE *out, const void *data, size_t size) {
    const unsigned char *p = (const unsigned char *)data;
    size_t i = 0;
    int n;

    putc('"', out);
    while (i < size) {
        n = cli_utf8_length(p + i, size - i);
        if (n == 0) fputs("\xef\xbf\xbd", out);
        else if (p[i] == '"' || p[i] == '\\') fprintf(out, "\\%c", p[i]);
        else if (p[i] == '\n') fputs("\\n", out);
        else if (p[i] == '\t') fputs("\\t", out);
        else if (p[i] < 0x20 || p[i] == 0x7f) fprintf(out, "\\u%04x", p[i]);
        else fwrite(p + i, 1, (size_t)n, out);
        i += n > 0 ? (size_t)n : 1;
    }
    putc('"', out);
}

CLI_FN void cli_json_text(FILE *out, const char *text) {
    cli_json_string(out, text, strlen(text));
}

/* A number that looks like one of floating point (1.0, not 1, so that -0.0 keeps its sign in
   readers that know integers); infinities and NaN, which JSON has not, as strings. */
CLI_FN void cli_json_real(FILE *out, double value, int digits) {
    char text[40];
    uint64_t bits;

    memcpy(&bits, &value, sizeof bits);
    if ((bits >> 52 & 0x7ff) == 0x7ff) {
        fputs(bits << 12 ? "\"nan\"" : bits >> 63 ? "\"-inf\"" : "\"inf\"", out);
        return;
    }
    snprintf(text, sizeof text, "%.*g", digits, value);
    fputs(text, out);
    if (!text[strcspn(text, ".e")]) fputs(".0", out);
}

/* 17 and 9 digits give back the same bits (IEEE 754, 5.12.2). */
CLI_FN void cli_json_double(FILE *out, double value) {
    cli_json_real(out, value, 17);
}

CLI_FN void cli_json_float(FILE *out, float value) {
    cli_json_real(out, (double)value, 9);
}

#endif /* MPT_EXAMPLES_CLI_H */
