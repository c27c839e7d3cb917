/* examples/common/cli.h: option tables, numbers, the progress line, JSON */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "common/cli.h"
#include "mpt_test.h"

#include <fcntl.h>

/* ---- a command with one option of each kind -------------------------------------------------- */
typedef struct demo {
    int64_t epochs, memory;
    double rate;
    const char *name;
    int compression;
    bool verbose;
    cli_list data, val_data, operands;
    char out[4000], err[2000]; /* what the last parse printed */
} demo;

enum { DEMO_OPTIONS = 8 };

static void demo_options(demo *d, cli_option o[DEMO_OPTIONS]) {
    o[0] = cli_env(cli_int("num-epochs", 'e', &d->epochs, 1, 1000, "N", "passes"), "DEMO_EPOCHS");
    o[1] = cli_bytes("memory", 0, &d->memory, 0, INT64_MAX, "limit");
    o[2] = cli_double("lr", 0, &d->rate, 0, 10, "X", "rate");
    o[3] = cli_text("name", 0, &d->name, "NAME", "of the run");
    o[4] = cli_choice("compression", 'c', &d->compression, "none|gzip|zlib", "of the output");
    o[5] = cli_env(cli_flag("verbose", 'v', &d->verbose, "say more"), "DEMO_VERBOSE");
    o[6] = cli_words("data", 0, &d->data, "PATTERN", "shards");
    o[7] = cli_words("val-data", 0, &d->val_data, "PATTERN", "shards");
}

static int redirect(FILE *stream, const char *name) { /* gives what restores it */
    int kept = dup(fileno(stream)),
        fd = open(mpt_test_tmpfile(name), O_RDWR | O_CREAT | O_TRUNC, 0600);

    CHECK(kept >= 0 && fd >= 0);
    fflush(stream);
    dup2(fd, fileno(stream));
    close(fd);
    return kept;
}

static void restore(FILE *stream, int kept, const char *name, char *text, size_t capacity) {
    unsigned char *bytes;
    size_t size;

    fflush(stream);
    dup2(kept, fileno(stream));
    close(kept);
    bytes = mpt_test_read_file(mpt_test_tmpfile(name), &size);
    snprintf(text, capacity, "%s", (const char *)bytes);
    free(bytes);
}

/* Words are split at blanks; "_" stands for an empty one. */
static int demo_parse(demo *d, const char *line) {
    static char words[512];
    char *argv[40];
    cli_option options[DEMO_OPTIONS];
    cli_command c = {"demo", "FILE...", "About.", "demo 1", options, DEMO_OPTIONS, 0, 3};
    int argc = 1, code, out, err;
    char *p;

    memset(d, 0, sizeof *d);
    d->epochs = 90;
    d->rate = 0.1;
    demo_options(d, options);
    snprintf(words, sizeof words, "%s", line);
    argv[0] = words;
    for (p = strtok(words, " "); p; p = strtok(NULL, " ")) {
        if (!strcmp(p, "_")) *p = 0;
        argv[argc++] = p;
    }
    out = redirect(stdout, "out");
    err = redirect(stderr, "err");
    code = cli_parse(&c, argc, argv, &d->operands);
    restore(stdout, out, "out", d->out, sizeof d->out);
    restore(stderr, err, "err", d->err, sizeof d->err);
    return code;
}

static void demo_free(demo *d) {
    cli_list_free(&d->data);
    cli_list_free(&d->val_data);
    cli_list_free(&d->operands);
}

MPT_TEST(options_in_all_spellings) {
    static const char *const lines[] = {"--num-epochs 7", "--num_epochs=7", "-e 7", "-e7",
                                        "--num-epochs 3 --num-epochs +7"};
    size_t i;
    demo d;

    for (i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        CHECK_EQ_INT(demo_parse(&d, lines[i]), CLI_RUN);
        CHECK_EQ_INT(d.epochs, 7);
        demo_free(&d);
    }
    CHECK_EQ_INT(demo_parse(&d, "a -v --memory 4K --lr 1e-2 --name=--x -c gzip - -- -b"), CLI_RUN);
    CHECK(d.verbose);
    CHECK_EQ_INT(d.memory, 4096);
    CHECK_EQ_INT(d.compression, 1);
    CHECK(d.rate == 1e-2);
    CHECK_EQ_STR(d.name, "--x");
    CHECK_EQ_INT(d.operands.count, 3);
    CHECK_EQ_STR(d.operands.items[1], "-");
    CHECK_EQ_STR(d.operands.items[2], "-b");
    demo_free(&d);
}

/* Words behind a list option are its own until another list option comes. */
MPT_TEST(lists_take_what_follows) {
    demo d;

    CHECK_EQ_INT(demo_parse(&d, "x --data a b --num-epochs 3 c --val-data=v w --data d"), CLI_RUN);
    CHECK_EQ_INT(d.operands.count, 1);
    CHECK_EQ_INT(d.data.count, 4);
    CHECK_EQ_STR(d.data.items[2], "c");
    CHECK_EQ_STR(d.data.items[3], "d");
    CHECK_EQ_INT(d.val_data.count, 2);
    CHECK_EQ_STR(d.val_data.items[1], "w");
    demo_free(&d);
}

MPT_TEST(wrong_values_are_named) {
    static const char *const lines[][2] = {
        {"--num-epochs 0", "--num-epochs: '0' is no whole number from 1 to 1000"},
        {"--num-epochs 1001", "'1001'"},
        {"--num-epochs 5x", "'5x'"},
        {"--num-epochs 0x10", "'0x10'"},
        {"--num-epochs 1.0", "'1.0'"},
        {"--num-epochs 4K", "'4K'"},
        {"--num-epochs _", "''"},
        {"--num-epochs 99999999999999999999", "is no whole number"},
        {"--num-epochs", "--num-epochs needs a value: N"},
        {"--num-epoch 3", "did you mean --num-epochs?"},
        {"--nam 3", "did you mean --name?"},
        {"--xx 3", "unknown option --xx (see --help)"}, /* lr is two letters away: all of it */
        {"--memory K", "--memory: 'K' is no whole number of at least 0 (K, M, G, T may follow)\n"},
        {"--memory 9000000T", "'9000000T'"},
        {"--memory -1", "'-1'"},
        {"--lr nan", "'nan' is no number from 0 to 10"},
        {"--lr inf", "'inf'"},
        {"--lr 1e999", "'1e999'"},
        {"--lr 11", "'11'"},
        {"--lr 0x1", "'0x1'"},
        {"--lr 1e", "'1e'"},
        {"--compression gz", "'gz' is none of none|gzip|zlib"},
        {"--verbose=1", "--verbose takes no value"},
        {"--name --lr 3", "--name needs a value"},
        {"-x", "unknown option -x"},
        {"a b c d", "'d' is one argument too many"},
    };
    size_t i;
    demo d;

    for (i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        CHECK_EQ_INT(demo_parse(&d, lines[i][0]), CLI_EXIT_USAGE);
        CHECK_CONTAINS(d.err, lines[i][1]);
        CHECK(strchr(d.err, '\n') == d.err + strlen(d.err) - 1);
        CHECK_EQ_STR(d.out, "");
        demo_free(&d);
    }
}

MPT_TEST(the_environment_stands_behind_the_line) {
    demo d;

    setenv("DEMO_EPOCHS", "12", 1);
    setenv("DEMO_VERBOSE", "yes", 1);
    CHECK_EQ_INT(demo_parse(&d, ""), CLI_RUN);
    CHECK_EQ_INT(d.epochs, 12);
    CHECK(d.verbose);
    CHECK_EQ_INT(demo_parse(&d, "-e 13"), CLI_RUN);
    CHECK_EQ_INT(d.epochs, 13);
    CHECK_EQ_INT(demo_parse(&d, "--help"), CLI_EXIT_OK); /* the real default, not today's */
    CHECK_CONTAINS(d.out, "passes (default: 90; environment: DEMO_EPOCHS)");
    setenv("DEMO_EPOCHS", "many", 1);
    CHECK_EQ_INT(demo_parse(&d, ""), CLI_EXIT_USAGE);
    CHECK_CONTAINS(d.err, "DEMO_EPOCHS: 'many'");
    setenv("DEMO_EPOCHS", "", 1); /* as if unset */
    CHECK_EQ_INT(demo_parse(&d, ""), CLI_RUN);
    CHECK_EQ_INT(d.epochs, 90);
    unsetenv("DEMO_EPOCHS");
    unsetenv("DEMO_VERBOSE");
}

MPT_TEST(help_wins_and_fits_the_screen) {
    const char *line, *end;
    demo d;

    CHECK_EQ_INT(demo_parse(&d, "--nonsense -e 5 --help"), CLI_EXIT_OK);
    CHECK_CONTAINS(d.out, "usage: demo [OPTION...] FILE...\nAbout.\n");
    CHECK_CONTAINS(d.out, "  -e, --num-epochs N     passes");
    CHECK_CONTAINS(d.out, "  -c, --compression none|gzip|zlib\n                         of the");
    CHECK_CONTAINS(d.out, "--data PATTERN...");
    CHECK_EQ_STR(d.err, "");
    for (line = d.out; *line; line = end + 1) {
        end = strchr(line, '\n');
        CHECK(end != NULL && end - line <= CLI_HELP_WIDTH);
    }
    CHECK_EQ_INT(demo_parse(&d, "--version"), CLI_EXIT_OK);
    CHECK_EQ_STR(d.out, "demo 1\n");
    CHECK_EQ_INT(demo_parse(&d, "-- --help"), CLI_RUN);
    demo_free(&d);
}

/* A file name can hold anything but zero and slash: no message may move the cursor. */
MPT_TEST(messages_stay_one_line) {
    char text[300];
    int kept = redirect(stderr, "err");

    CHECK_EQ_INT(cli_error("demo", 5, "%s", "a\nb\x1b[2Jc\xc3\xa9"), 5);
    restore(stderr, kept, "err", text, sizeof text);
    CHECK_EQ_STR(text, "demo: a?b?[2Jc\xc3\xa9\n");
}

MPT_TEST(one_is_singular) {
    char text[24];

    CHECK_EQ_STR(cli_human_bytes(0, text), "0 bytes");
    CHECK_EQ_STR(cli_human_bytes(1, text), "1 byte");
    CHECK_EQ_STR(cli_human_bytes(11, text), "11 bytes");
    CHECK_EQ_STR(cli_human_bytes(1000, text), "1.0 KB");
    CHECK_EQ_STR(cli_plural(1, "s"), "");
    CHECK_EQ_STR(cli_plural(0, "es"), "es");
}

MPT_TEST(progress_line) {
    cli_progress p;
    char text[300];
    int kept;

    cli_progress_begin(&p, "verify", "B", 1000000000);
    p.done = 120000000;
    cli_progress_format(&p, 31, text, sizeof text);
    CHECK_EQ_STR(text,
                 "verify:  12%|##                  | 120.0 MB/1.0 GB [00:31<03:47, 3.9 MB/s]");
    p.unit = "steps";
    p.total = 1000;
    p.done = 1000;
    p.note = "loss 0.5";
    cli_progress_format(&p, 7322, text, sizeof text);
    CHECK_EQ_STR(text, "verify: 100%|####################| 1000/1000 [2:02:02<00:00, 0.14 steps/s, "
                       "loss 0.5]");
    p.done = 5000; /* the total was an estimate */
    cli_progress_format(&p, 10, text, sizeof text);
    CHECK_CONTAINS(text, "100%|####################| 5000/1000 [00:10<00:00, 500 steps/s");
    p.total = 0;
    p.note = NULL;
    cli_progress_format(&p, 0, text, sizeof text);
    CHECK_EQ_STR(text, "verify: 5000 [00:00, 0.00 steps/s]");

    /* not on a terminal: nothing for short work, then a plain line every ten seconds */
    kept = redirect(stderr, "err");
    cli_progress_begin(&p, "verify", "steps", 100);
    cli_progress_update(&p, 1);
    p.start -= 11;
    cli_progress_update(&p, 50);
    cli_progress_update(&p, 51);
    cli_progress_end(&p);
    restore(stderr, kept, "err", text, sizeof text);
    CHECK_CONTAINS(text, "verify:  50%|##########          | 50/100 [00:1");
    CHECK(strchr(text, '\n') == text + strlen(text) - 1 && !strchr(text, '\r'));
}

MPT_TEST(colour_only_where_it_is_wanted) {
    setenv("NO_COLOR", "1", 1);
    CHECK(!cli_use_color(STDERR_FILENO));
    unsetenv("NO_COLOR");
    CHECK(!cli_use_color(open("/dev/null", O_RDONLY)));
}

/* ---- JSON ------------------------------------------------------------------------------------ */
static const char *json_of(void (*write)(FILE *, const void *), const void *value) {
    static char text[200];
    FILE *f = tmpfile();
    size_t n;

    CHECK(f != NULL);
    write(f, value);
    rewind(f);
    n = fread(text, 1, sizeof text - 1, f);
    text[n] = 0;
    fclose(f);
    return text;
}

static void write_string(FILE *f, const void *value) {
    cli_json_text(f, (const char *)value);
}
static void write_float(FILE *f, const void *value) {
    cli_json_float(f, *(const float *)value);
}
static void write_double(FILE *f, const void *value) {
    cli_json_double(f, *(const double *)value);
}

/* RFC 3629: overlong forms, surrogates and numbers beyond U+10FFFF are no UTF-8. */
MPT_TEST(json_strings) {
    CHECK_EQ_STR(json_of(write_string, "a\"\\/\n\t\x01\x7f"), "\"a\\\"\\\\/\\n\\t\\u0001\\u007f\"");
    CHECK_EQ_STR(json_of(write_string, "\xc3\xa9\xe6\x97\xa5\xf0\x9f\x98\x80\xed\x9f\xbf"),
                 "\"\xc3\xa9\xe6\x97\xa5\xf0\x9f\x98\x80\xed\x9f\xbf\"");
#define BAD "\xef\xbf\xbd"
    CHECK_EQ_STR(json_of(write_string, "\x80z"), "\"" BAD "z\"");
    CHECK_EQ_STR(json_of(write_string, "\xc0\x80"), "\"" BAD BAD "\"");
    CHECK_EQ_STR(json_of(write_string, "\xe0\x9f\xbf"), "\"" BAD BAD BAD "\"");
    CHECK_EQ_STR(json_of(write_string, "\xed\xa0\x80"), "\"" BAD BAD BAD "\"");
    CHECK_EQ_STR(json_of(write_string, "\xf4\x90\x80\x80"), "\"" BAD BAD BAD BAD "\"");
    CHECK_EQ_STR(json_of(write_string, "\xe6\x97"), "\"" BAD BAD "\"");
#undef BAD
}

MPT_TEST(json_numbers_read_back_the_same_bits) {
    uint32_t state = 1, bits, back;
    float value, again;
    double d = 0.1;
    int i;

    for (i = 0; i < 20000; i++) {
        state = state * 1664525u + 1013904223u;
        bits = state;
        if ((bits >> 23 & 255) == 255) continue;
        memcpy(&value, &bits, sizeof value);
        again = strtof(json_of(write_float, &value), NULL);
        memcpy(&back, &again, sizeof back);
        CHECK_EQ_INT(back, bits);
    }
    value = -0.0f;
    CHECK_EQ_STR(json_of(write_float, &value), "-0.0"); /* "-0" would be an integer to some */
    value = 16777216.0f;
    CHECK_EQ_STR(json_of(write_float, &value), "16777216.0");
    value = 1e30f;
    CHECK_EQ_STR(json_of(write_float, &value), "1.00000002e+30");
    bits = 0x7f800000u;
    memcpy(&value, &bits, sizeof value);
    CHECK_EQ_STR(json_of(write_float, &value), "\"inf\"");
    bits = 0xff800000u;
    memcpy(&value, &bits, sizeof value);
    CHECK_EQ_STR(json_of(write_float, &value), "\"-inf\"");
    bits = 0xffc00001u;
    memcpy(&value, &bits, sizeof value);
    CHECK_EQ_STR(json_of(write_float, &value), "\"nan\"");
    CHECK_EQ_STR(json_of(write_double, &d), "0.10000000000000001");
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(options_in_all_spellings),
    MPT_TEST_CASE(lists_take_what_follows),
    MPT_TEST_CASE(wrong_values_are_named),
    MPT_TEST_CASE(the_environment_stands_behind_the_line),
    MPT_TEST_CASE(help_wins_and_fits_the_screen),
    MPT_TEST_CASE(messages_stay_one_line),
    MPT_TEST_CASE(one_is_singular),
    MPT_TEST_CASE(progress_line),
    MPT_TEST_CASE(colour_only_where_it_is_wanted),
    MPT_TEST_CASE(json_strings),
    MPT_TEST_CASE(json_numbers_read_back_the_same_bits),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
