/* bench.c - measures this build on this machine: bench KIND [OPTIONS] [FILE...]

   Each line tells the work done, the median and the best rate of all rounds, and the share of a
   limit or reference measured in the same run. `bench --help` lists the kinds. */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "bench/data.h"
#include "bench/layers.h"
#include "bench/step.h"

typedef struct bench_kind {
    const char *name, *about;
    int (*run)(mpt_ctx *ctx, const bench_options *options);
    int64_t megabytes, rounds; /* defaults */
    bool takes_files;          /* measures the user's instead of its own */
    bool takes_network;        /* measures a network instead of data */
} bench_kind;

static const bench_kind bench_kinds[] = {
    {"crc", "CRC-32C of records in memory, against reading memory", bench_crc, 64, 15, false,
     false},
    {"records", "reading TFRecords from the page cache, against a pread + CRC loop", bench_records,
     256, 9, true, false},
    {"decode", "decoding JPEG pictures of 500 x 375", bench_decode, 0, 9, false, false},
    {"input", "records to augmented 224 x 224 batches, against decoding alone", bench_input, 32, 5,
     true, false},
    {"layers", "each layer of a network, forward and backward, against this machine's limits",
     bench_layers_kind, 0, 9, false, true},
    {"step", "whole training steps on pictures in memory, against this machine's limit",
     bench_step_kind, 0, 15, false, true},
};
enum { BENCH_NUM_KINDS = sizeof bench_kinds / sizeof bench_kinds[0] };

static int bench_usage(FILE *out) {
    int i;

    fprintf(out, "Usage: bench KIND [OPTIONS] [FILE...]\n\nKinds:\n");
    for (i = 0; i < BENCH_NUM_KINDS; i++)
        fprintf(out, "  %-8s %s\n", bench_kinds[i].name, bench_kinds[i].about);
    fprintf(out, "\n`bench KIND --help` shows the options.\n");
    return out == stdout ? cli_finish("bench", CLI_EXIT_OK) : CLI_EXIT_USAGE;
}

/* Options that only some kinds have; the number of them. */
static int bench_data_options(bench_options *o, cli_option *options) {
    options[0] = cli_int("megabytes", 0, &o->megabytes, 0, 65536, "N", "MiB of data to work on");
    options[1] = cli_bytes("record-bytes", 0, &o->record_bytes, 1, 1 << 30,
                           "size of a record that is written");
    options[2] = cli_default(cli_bytes("max-record-bytes", 0, &o->max_record_bytes, 1, INT64_MAX,
                                       "a larger record in FILE is an error"),
                             "1G");
    return 3;
}

static int bench_network_options(bench_options *o, cli_option *options) {
    static const char by_arch[] = "by architecture";

    options[0] = cli_choice("arch", 'a', &o->arch, NETWORK_NAMES, "network");
    options[1] = cli_choice("precision", 0, &o->precision, NETWORK_PRECISIONS, "what is stored");
    options[2] = cli_choice("device", 0, &o->device, NETWORK_DEVICES, "where it runs");
    options[3] = cli_default(cli_int("batch-size", 'b', &o->batch_size, 1, 65536, "N",
                                     "pictures in a step"),
                             by_arch);
    options[4] = cli_default(cli_int("image-size", 0, &o->image_size, 1, 4096, "N",
                                     "height and width of a picture"),
                             by_arch);
    options[5] = cli_default(cli_int("channels", 0, &o->channels, 1, 3, "N", "of a picture"),
                             by_arch);
    options[6] = cli_default(cli_int("num-classes", 0, &o->num_classes, 1, 1000000, "N", "classes"),
                             by_arch);
    return 7;
}

static bench_options bench_defaults(const bench_kind *kind) {
    bench_options o;

    memset(&o, 0, sizeof o);
    o.rounds = kind->rounds;
    o.megabytes = kind->megabytes;
    o.record_bytes = 110 * 1024; /* a record of ImageNet */
    o.max_record_bytes = (int64_t)1 << 30;
    o.threads = (int64_t)sysconf(_SC_NPROCESSORS_ONLN);
    o.arch = cli_choice_from_text("resnet20", NETWORK_NAMES);
    o.precision = cli_choice_from_text("fp16", NETWORK_PRECISIONS);
    o.device = kind->takes_network ? network_default_device() : NETWORK_CPU;
    return o;
}

static int bench_one(const bench_kind *kind, int argc, char **argv) {
    bench_options o = bench_defaults(kind);
    cli_option options[16];
    cli_command command;
    mpt_ctx_desc desc;
    mpt_ctx *ctx = NULL;
    char name[32], version[64];
    int code, n = 0;

    options[n++] = cli_flag("json", 0, &o.json, "one JSON object a line");
    options[n++] = cli_int("rounds", 0, &o.rounds, 1, BENCH_MAX_ROUNDS, "N",
                           "times that each case runs");
    options[n++] = cli_default(cli_int("threads", 'j', &o.threads, 1, 1024, "N", "workers"),
                               "all cores");
    n += kind->takes_network ? bench_network_options(&o, options + n)
                             : bench_data_options(&o, options + n);
    snprintf(name, sizeof name, "bench %s", kind->name);
    snprintf(version, sizeof version, "bench (mptrain %s)", mpt_version());
    memset(&command, 0, sizeof command);
    command.name = name;
    command.operands = kind->takes_files ? "[FILE...]" : NULL;
    command.about = kind->about;
    command.version = version;
    command.options = options;
    command.num_options = n;
    command.max_operands = kind->takes_files ? -1 : 0;
    memset(&desc, 0, sizeof desc);
    code = cli_parse(&command, argc, argv, &o.files);
    desc.num_threads = (int)o.threads;
    if (code == CLI_RUN) code = network_check_device(name, o.device);
    if (code == CLI_RUN) code = network_make_ctx(name, o.device, &desc, &ctx);
    if (code == CLI_RUN) code = cli_finish("bench", kind->run(ctx, &o));
    mpt_ctx_destroy(ctx);
    cli_list_free(&o.files);
    return code;
}

int main(int argc, char **argv) {
    int i;

    if (argc >= 2 && (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")))
        return bench_usage(stdout);
    if (argc >= 2 && !strcmp(argv[1], "--version")) {
        printf("bench (mptrain %s)\n", mpt_version());
        return cli_finish("bench", CLI_EXIT_OK);
    }
    for (i = 0; argc >= 2 && i < BENCH_NUM_KINDS; i++)
        if (!strcmp(argv[1], bench_kinds[i].name))
            return bench_one(&bench_kinds[i], argc - 1, argv + 1);
    if (argc >= 2) fprintf(stderr, "bench: there is no kind '%s'\n", argv[1]);
    return bench_usage(stderr);
}
