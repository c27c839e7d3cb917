/* tfrecord - looks into TFRecord files, checks them, makes them

   A program on mptrain's public interface only. Its parts, in reading order:
       common/cli.h         flags, progress line, JSON
       common/buffer.h      bytes that grow, whole files
       tfrecord/common.h    messages, signals, lists of files
       tfrecord/read.h      cat, head, count, verify, index
       tfrecord/stats.h     stats
       tfrecord/output.h    sets of shards, written whole or not at all
       tfrecord/convert.h   split, merge, recompress
       tfrecord/build.h     pictures with labels to shards
       tfrecord/sources.h   from-idx, from-folder, from-csv
   Build: cc -O2 -I. -Iexamples -DMPTRAIN_ZLIB examples/tfrecord.c -o tfrecord -lz -lm -lpthread */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "tfrecord/convert.h"
#include "tfrecord/read.h"
#include "tfrecord/sources.h"
#include "tfrecord/stats.h"

typedef struct subcommand {
    const char *name, *summary;
    int (*run)(int argc, char **argv); /* argv[0] is the command */
} subcommand;

static const subcommand subcommands[] = {
    {"cat", "records as JSON, one object a line", command_cat},
    {"head", "the first records, for people", command_head},
    {"count", "number of records", command_count},
    {"verify", "check every length and checksum", command_verify},
    {"stats", "features, labels, pictures, sizes", command_stats},
    {"index", "write FILE.idx (DALI's form), or check it", command_index},
    {"from-idx", "MNIST's IDX files to records", command_from_idx},
    {"from-folder", "a directory for each class to records", command_from_folder},
    {"from-csv", "rows of path,label to records", command_from_csv},
    {"split", "one file to N shards", command_split},
    {"merge", "several files to one", command_merge},
    {"recompress", "change the compression of a file", command_recompress},
};
enum { NUM_SUBCOMMANDS = sizeof subcommands / sizeof subcommands[0] };

static int print_help(void) {
    int i;

    printf("usage: tfrecord COMMAND [OPTION...] ARGUMENT...\n"
           "Looks into TFRecord files, checks them and makes them.\n\ncommands:\n");
    for (i = 0; i < NUM_SUBCOMMANDS; i++)
        printf("  %-12s %s\n", subcommands[i].name, subcommands[i].summary);
    printf("\n'tfrecord COMMAND --help' tells the options of a command.\n"
           "Exit codes: 0 done, 1 bad data or a failure, 2 wrong usage.\n");
    return cli_finish("tfrecord", CLI_EXIT_OK);
}

static int print_version(void) {
    puts(TOOL_VERSION);
    return cli_finish("tfrecord", CLI_EXIT_OK);
}

static int unknown_command(const char *word) {
    const char *best = NULL;
    int i, distance, least = 99;

    for (i = 0; i < NUM_SUBCOMMANDS; i++) {
        distance = cli_distance(word, subcommands[i].name);
        if (distance >= least || !cli_is_close(word, subcommands[i].name, distance)) continue;
        least = distance;
        best = subcommands[i].name;
    }
    return cli_error("tfrecord", CLI_EXIT_USAGE, "unknown command '%s'%s%s%s", word,
                     best ? ": did you mean " : "", best ? best : "", best ? "?" : " (see --help)");
}

int main(int argc, char **argv) {
    int i;

    cli_occupy_standard_files();
    cli_ignore_write_signals();
    if (argc < 2) return cli_error("tfrecord", CLI_EXIT_USAGE, "needs a command (see --help)");
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h")) return print_help();
    if (!strcmp(argv[1], "--version")) return print_version();
    for (i = 0; i < NUM_SUBCOMMANDS; i++)
        if (!strcmp(argv[1], subcommands[i].name)) return subcommands[i].run(argc - 1, argv + 1);
    return unknown_command(argv[1]);
}
