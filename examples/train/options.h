/* train/options.h - the command line of the program train: the table of options, what contradicts
   what, and how options turn into the library's descs */
#ifndef TRAIN_OPTIONS_H
#define TRAIN_OPTIONS_H

#include "common/network.h"
#include "mptrain.h"

#define TRAIN_NAME "train"
#define TRAIN_VERSION "train " MPT_VERSION_STRING

enum { TRAIN_MAX_OPTIONS = 72, OPTIONS_TEXT = 120 };

/* Where zero (or -1, or NULL) means "not given", the program chooses, writes its choice here, and
   says so: after options_resolve and data_resolve all fields hold what really runs. */
typedef struct train_options {
    /* data */
    cli_list data, val_data;
    const char *image_key, *label_key, *label_offset;
    int64_t image_size, channels, num_classes, train_records;
    const char *mean, *std;
    int augment; /* mpt_augment */
    int64_t workers, shuffle_buffer, skip_bad_records;
    /* network and optimisation */
    const char *arch;
    int64_t epochs, steps, batch_size, reference_batch;
    double learning_rate, warmup_epochs, momentum, weight_decay, label_smoothing, clip_grad_norm;
    int schedule, optimizer;
    bool nesterov;
    /* precision and memory */
    int precision, opt_level, keep_batchnorm;
    const char *loss_scale;
    int64_t accumulate, slices;
    bool verbose_plan;
    /* state and output */
    const char *checkpoint_dir, *resume, *init;
    double checkpoint_every;
    int64_t checkpoint_every_steps, keep;
    int log_format;
    int64_t print_freq;
    const char *report, *export_path;
    /* the rest */
    int device;
    int64_t seed, threads;
    bool evaluate;
    /* taken apart from the texts above */
    float mean_values[3], std_values[3];
    float fixed_scale; /* of the loss; 0: dynamic */
    bool has_loss_scale;
    char texts[4][OPTIONS_TEXT]; /* what resolved texts point to */
    char names_path[1024];       /* file of class names beside the data; "": none */

    cli_option table[TRAIN_MAX_OPTIONS];
    int count;
} train_options;

/* Places in the lists of words below. */
enum { OPTIMIZER_SGD = 0, OPTIMIZER_ADAM, OPTIMIZER_ADAMW, OPTIMIZER_LARS };
enum { LOG_AUTO = 0, LOG_TEXT, LOG_JSON };

static void options_set_defaults(train_options *o) {
    int64_t cores = (int64_t)sysconf(_SC_NPROCESSORS_ONLN);

    memset(o, 0, sizeof *o);
    o->augment = o->precision = o->opt_level = o->keep_batchnorm = -1;
    o->workers = o->threads = cores < 1 ? 1 : cores > 1024 ? 1024 : cores;
    o->shuffle_buffer = 1024;
    o->label_offset = "auto";
    o->arch = "resnet18";
    o->epochs = 90;
    o->batch_size = 256;
    o->learning_rate = o->momentum = o->weight_decay = -1;
    o->accumulate = o->slices = 1;
    o->checkpoint_every = -1;
    o->print_freq = 10;
    o->device = network_default_device();
}

static void options_add(train_options *o, cli_option option) {
    o->table[o->count++] = option;
}

static void options_add_data(train_options *o) {
    options_add(o, cli_words("data", 0, &o->data, "PATTERN",
                             "TFRecords to train on: files, globs, directories, name@1024"));
    options_add(o, cli_words("val-data", 0, &o->val_data, "PATTERN",
                             "TFRecords to evaluate on after each epoch"));
    options_add(o, cli_default(cli_text("image-key", 0, &o->image_key, "KEY", "of the picture"),
                               "image/encoded or image, by the first record"));
    options_add(o, cli_default(cli_text("label-key", 0, &o->label_key, "KEY", "of the label"),
                               "image/class/label or label, by the first record"));
    options_add(o, cli_text("label-offset", 0, &o->label_offset, "auto|N",
                            "subtracted from labels; auto: 1 for image/class/label, else 0"));
    options_add(o, cli_default(cli_int("image-size", 0, &o->image_size, 1, 16384, "N",
                                       "height and width that the network sees"),
                               "by network and data"));
    options_add(o, cli_default(cli_int("channels", 0, &o->channels, 1, 3, "N", "1 gray, 3 colour"),
                               "by network and data"));
    options_add(o, cli_default(cli_int("num-classes", 0, &o->num_classes, 2, 1000000, "N",
                                       "number of classes"),
                               "by the file of class names, or the largest label"));
    options_add(o, cli_default(cli_int("train-records", 0, &o->train_records, 1, INT64_MAX / 2, "N",
                                       "records in --data, where counting takes long"),
                               "counted"));
    options_add(o, cli_default(cli_text("mean", 0, &o->mean, "X[,X,X]",
                                        "subtracted from pixel / 255, for each channel"),
                               "0.485,0.456,0.406; gray: 0.5"));
    options_add(o, cli_default(cli_text("std", 0, &o->std, "X[,X,X]", "what that is divided by"),
                               "0.229,0.224,0.225; gray: 0.5"));
    options_add(o, cli_default(cli_choice("augment", 0, &o->augment, "none|flip|crop-flip|imagenet",
                                          "random changes of training pictures"),
                               "by network and channels"));
    options_add(o, cli_default(cli_int("workers", 'j', &o->workers, 1, 1024, "N",
                                       "threads that read and decode, for each data set"),
                               "cores"));
    options_add(o, cli_int("shuffle-buffer", 0, &o->shuffle_buffer, 1, INT32_MAX, "N",
                           "records among which the next one is drawn"));
    options_add(o, cli_int("skip-bad-records", 0, &o->skip_bad_records, 0, INT64_MAX / 2, "MAX",
                           "leave out up to so many damaged records an epoch; 0: stop at one"));
}

static void options_add_training(train_options *o) {
    options_add(o, cli_text("arch", 'a', &o->arch, "NAME",
                            "lenet, mlp, resnet20, resnet32, resnet56, resnet18, resnet34, "
                            "resnet50, or a description FILE.txt, as told above"));
    options_add(o, cli_int("epochs", 0, &o->epochs, 1, 1000000, "N",
                           "passes over --data; the schedule's length"));
    options_add(o, cli_default(cli_int("steps", 0, &o->steps, 1, INT64_MAX / 2, "N",
                                       "stop after so many steps, resumed ones included"),
                               "all of --epochs"));
    options_add(o, cli_int("batch-size", 'b', &o->batch_size, 1, 1 << 20, "N",
                           "records; a step takes --accumulate times as many"));
    options_add(o, cli_default(cli_double("lr", 0, &o->learning_rate, 1e-30, 1e9, "X",
                                          "learning rate, at its peak"),
                               "0.1; adam, adamw: 0.001"));
    options_add(o, cli_default(cli_int("reference-batch", 0, &o->reference_batch, 1, 1 << 30, "N",
                                       "records of the step that --lr is meant for: the rate is "
                                       "scaled by what a step takes here, over N"),
                               "as is"));
    options_add(o, cli_double("warmup-epochs", 0, &o->warmup_epochs, 0, 1e6, "X",
                              "epochs in which the rate rises"));
    options_add(o, cli_choice("schedule", 0, &o->schedule, "cosine|step|poly|onecycle|constant",
                              "of the rate; step: a tenth after each third of the epochs"));
    options_add(o, cli_choice("optimizer", 0, &o->optimizer, "sgd|adam|adamw|lars",
                              "rule of the update"));
    options_add(o, cli_default(cli_double("momentum", 0, &o->momentum, 0, 0.9999, "X",
                                          "of sgd and lars; 0: plain sgd"),
                               "0.9"));
    options_add(o, cli_default(cli_double("weight-decay", 0, &o->weight_decay, 0, 1e9, "X",
                                          "pulls weights to 0"),
                               "0.0001; adam: 0; adamw: 0.01"));
    options_add(o, cli_default(cli_double("wd", 0, &o->weight_decay, 0, 1e9, "X",
                                          "the same as --weight-decay"),
                               ""));
    options_add(o, cli_flag("nesterov", 0, &o->nesterov, "Nesterov's momentum"));
    options_add(o, cli_double("label-smoothing", 0, &o->label_smoothing, 0, 0.999, "X",
                              "part of a label that all classes share"));
    options_add(o, cli_default(cli_double("clip-grad-norm", 0, &o->clip_grad_norm, 0, 1e9, "X",
                                          "largest L2 norm of all gradients together"),
                               "none"));
    options_add(o, cli_default(cli_choice("precision", 0, &o->precision, NETWORK_PRECISIONS,
                                          "of weights and activations"),
                               "fp16 on a GPU, or where the processor converts it; else fp32"));
    options_add(o, cli_default(cli_choice("opt-level", 0, &o->opt_level, "O0|O1|O2|O3",
                                          "Apex' words: fp32, casts, fp16, fp16 throughout"),
                               "by --precision"));
    options_add(o, cli_default(cli_choice("keep-batchnorm-fp32", 0, &o->keep_batchnorm,
                                          "True|False", "gamma and beta of batch norms"),
                               "by --opt-level"));
    options_add(o, cli_default(cli_text("loss-scale", 0, &o->loss_scale, "dynamic|N",
                                        "what the loss is multiplied with"),
                               "dynamic with fp16, else 1"));
    options_add(o, cli_int("accumulate", 0, &o->accumulate, 1, 65536, "N",
                           "batches whose gradients make one step"));
    options_add(o, cli_int("slices", 0, &o->slices, 1, 1 << 20, "N",
                           "pieces of a batch computed one after the other, to save memory"));
    options_add(o, cli_flag("verbose-plan", 0, &o->verbose_plan, "the memory plan line by line"));
}

static void options_add_rest(train_options *o) {
    options_add(o, cli_choice("device", 0, &o->device, NETWORK_DEVICES,
                              "where it trains; of several GPUs the first one in "
                              "CUDA_VISIBLE_DEVICES"));
    options_add(o, cli_env(cli_default(cli_int("threads", 0, &o->threads, 1, 1024, "N",
                                               "threads that compute"),
                                       "cores"),
                           "MPTRAIN_THREADS"));
    options_add(o, cli_int("seed", 0, &o->seed, 0, INT64_MAX, "N",
                           "of weights, order, augmentation and dropout"));
    options_add(o, cli_text("checkpoint-dir", 0, &o->checkpoint_dir, "DIR",
                            "checkpoints go here, one at the end of each epoch and of the run"));
    options_add(o, cli_default(cli_double("checkpoint-every", 0, &o->checkpoint_every, 0, 1e6,
                                          "MIN", "and one every so many minutes; 0: none"),
                               "15"));
    options_add(o, cli_default(cli_int("checkpoint-every-steps", 0, &o->checkpoint_every_steps, 1,
                                       INT64_MAX / 2, "N", "and one every so many steps"),
                               "none"));
    options_add(o, cli_default(cli_int("keep", 0, &o->keep, 1, 1000000, "N",
                                       "newest checkpoints to keep"),
                               "3"));
    options_add(o, cli_default(cli_text("resume", 0, &o->resume, "auto|PATH|none",
                                        "auto: go on from the newest checkpoint that is sound"),
                               "auto with --checkpoint-dir"));
    options_add(o, cli_text("init", 0, &o->init, "FILE.safetensors",
                            "weights to begin with, where nothing is resumed"));
    options_add(o, cli_flag("evaluate", 'e', &o->evaluate, "evaluate on --val-data, then stop"));
    options_add(o, cli_choice("log-format", 0, &o->log_format, "auto|text|json",
                              "of standard output; json: one object a line"));
    options_add(o, cli_int("print-freq", 'p', &o->print_freq, 1, INT64_MAX / 2, "N",
                           "steps between two lines"));
    options_add(o, cli_text("report", 0, &o->report, "FILE.json", "what ran and what came of it"));
    options_add(o, cli_text("export", 0, &o->export_path, "FILE.safetensors",
                            "weights at the end, under PyTorch's names"));
}

static void options_make_table(train_options *o) {
    options_add_data(o);
    options_add_training(o);
    options_add_rest(o);
}

/* ---- what this version has not --------------------------------------------------------------- */
__attribute__((format(printf, 1, 2))) static int options_usage(const char *format, ...) {
    char text[900];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return cli_error(TRAIN_NAME, CLI_EXIT_USAGE, "%s", text);
}

/* Options that users of larger versions know: an answer that helps more than "unknown option". */
static int options_refuse_missing(int argc, char **argv) {
    static const char *const missing[] = {"gpus",           "ranks",       "pipeline",
                                          "launcher",       "sync-bn",     "bucket-bytes",
                                          "recompute",      "on-oom",      "advise",
                                          "log-dir",        "ema",         "mixup",
                                          "price-per-hour", "repeat",      "io-threads",
                                          "compare",        "memory-limit"};
    size_t k;
    int i;

    for (i = 1; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strncmp(argv[i], "--", 2) != 0) continue;
        for (k = 0; k < sizeof missing / sizeof missing[0]; k++)
            if (cli_same_name(missing[k], argv[i] + 2, strcspn(argv[i] + 2, "=")))
                return options_usage("--%s is not there in this version (see --help)", missing[k]);
    }
    return CLI_RUN;
}

static int options_refuse_bucket(const char *option, const char *name) {
    if (!name || strncmp(name, "gs://", 5) != 0) return CLI_RUN;
    return options_usage("--%s: %s: this version does not reach Cloud Storage by itself; mount the "
                         "bucket (gcsfuse) and name files below the mount",
                         option, name);
}

static int options_refuse_buckets(const train_options *o) {
    int i, code = options_refuse_bucket("report", o->report);

    if (code == CLI_RUN) code = options_refuse_bucket("export", o->export_path);
    if (code == CLI_RUN) code = options_refuse_bucket("checkpoint-dir", o->checkpoint_dir);
    if (code == CLI_RUN) code = options_refuse_bucket("resume", o->resume);
    if (code == CLI_RUN) code = options_refuse_bucket("init", o->init);
    for (i = 0; i < o->data.count && code == CLI_RUN; i++)
        code = options_refuse_bucket("data", o->data.items[i]);
    for (i = 0; i < o->val_data.count && code == CLI_RUN; i++)
        code = options_refuse_bucket("val-data", o->val_data.items[i]);
    return code;
}

/* ---- what contradicts what ------------------------------------------------------------------- */
static bool options_ends_with(const char *text, const char *end) {
    size_t n = strlen(text), m = strlen(end);

    return n >= m && !strcmp(text + n - m, end);
}

static int options_check_files(const train_options *o) {
    if (o->export_path && options_ends_with(o->export_path, ".onnx"))
        return options_usage("--export: %s: ONNX is not written by this version; name a "
                             ".safetensors file",
                             o->export_path);
    if (o->export_path && !options_ends_with(o->export_path, ".safetensors"))
        return options_usage("--export: %s does not end with .safetensors", o->export_path);
    if (o->report && o->export_path && !strcmp(o->report, o->export_path))
        return options_usage("--report and --export name the same file");
    if (o->checkpoint_dir) return CLI_RUN;
    if (o->checkpoint_every >= 0) return options_usage("--checkpoint-every needs --checkpoint-dir");
    if (o->checkpoint_every_steps > 0)
        return options_usage("--checkpoint-every-steps needs --checkpoint-dir");
    if (o->keep > 0) return options_usage("--keep needs --checkpoint-dir");
    if (o->resume && !strcmp(o->resume, "auto"))
        return options_usage("--resume auto needs --checkpoint-dir");
    return CLI_RUN;
}

static int options_check_optimizer(const train_options *o) {
    bool adaptive = o->optimizer == OPTIMIZER_ADAM || o->optimizer == OPTIMIZER_ADAMW;

    if (o->momentum >= 0 && adaptive)
        return options_usage("--momentum: adam and adamw have none of that kind");
    if (o->optimizer == OPTIMIZER_LARS && o->momentum >= 0 && o->momentum < 1e-6)
        return options_usage("--momentum: lars needs it above 0");
    if (o->nesterov && (o->optimizer != OPTIMIZER_SGD || (o->momentum >= 0 && o->momentum < 1e-6)))
        return options_usage("--nesterov needs --optimizer sgd with momentum");
    if (o->warmup_epochs > 0 && o->warmup_epochs >= (double)o->epochs)
        return options_usage("--warmup-epochs %g leaves nothing of --epochs %lld", o->warmup_epochs,
                             (long long)o->epochs);
    if (o->batch_size % o->slices != 0)
        return options_usage("--slices %lld does not divide --batch-size %lld",
                             (long long)o->slices, (long long)o->batch_size);
    return CLI_RUN;
}

static int options_check_precision(const train_options *o) {
    if (o->precision >= 0 && o->opt_level >= 0)
        return options_usage("--precision and --opt-level say the same thing: give one of them");
    if (o->keep_batchnorm == 1 && o->opt_level != 3)
        return options_usage("--keep-batchnorm-fp32 False goes with --opt-level O3 alone: "
                             "elsewhere batch norms are FP32");
    return CLI_RUN;
}

static int options_check_mode(const train_options *o) {
    bool resumes = o->resume ? strcmp(o->resume, "none") != 0 : o->checkpoint_dir != NULL;

    if (!o->evaluate && o->data.count == 0)
        return options_usage("--data is required: TFRecord files to train on (see --help)");
    if (o->evaluate && o->val_data.count == 0) return options_usage("--evaluate needs --val-data");
    if (o->evaluate && !o->init && !resumes)
        return options_usage("--evaluate needs weights: --init FILE, or --resume PATH");
    if (!options_ends_with(o->arch, ".txt") && cli_choice_from_text(o->arch, NETWORK_NAMES) < 0)
        return options_usage("--arch: '%s' is none of %s, nor a FILE.txt", o->arch, NETWORK_NAMES);
    if (o->evaluate && o->steps > 0) return options_usage("--steps: --evaluate trains none");
    if (network_check_device(TRAIN_NAME, o->device) != CLI_RUN) return CLI_EXIT_USAGE;
    return options_refuse_buckets(o);
}

/* ---- texts that hold numbers ----------------------------------------------------------------- */
static int options_parse_texts(train_options *o) {
    mpt_loader_desc offset;
    float values[3];
    double scale;

    if (o->mean && !network_channel_numbers(o->mean, -8, 8, values))
        return options_usage("--mean: '%s' is not one or three numbers from -8 to 8 (in units of "
                             "pixel / 255)",
                             o->mean);
    if (o->std && !network_channel_numbers(o->std, 1e-6, 8, values))
        return options_usage("--std: '%s' is not one or three numbers above 0 up to 8 (in units of "
                             "pixel / 255)",
                             o->std);
    if (o->channels == 2) return options_usage("--channels: 1 (gray) or 3 (colour), not 2");
    if (network_label_offset(TRAIN_NAME, o->label_offset, &offset) != CLI_RUN)
        return CLI_EXIT_USAGE;
    o->has_loss_scale = o->loss_scale != NULL;
    if (!o->loss_scale || !strcmp(o->loss_scale, "dynamic")) return CLI_RUN;
    if (!cli_double_from_text(o->loss_scale, &scale) || scale < 1e-30 || scale > 1e30)
        return options_usage("--loss-scale: '%s' is neither dynamic nor a number above 0",
                             o->loss_scale);
    o->fixed_scale = (float)scale;
    return CLI_RUN;
}

/* ---- choices that need no data --------------------------------------------------------------- */
static void options_resolve(train_options *o) {
    static const double decay[] = {1e-4, 0, 0.01, 1e-4};
    bool adaptive = o->optimizer == OPTIMIZER_ADAM || o->optimizer == OPTIMIZER_ADAMW;

    if (o->learning_rate < 0) o->learning_rate = adaptive ? 0.001 : 0.1;
    if (o->weight_decay < 0) o->weight_decay = decay[o->optimizer];
    if (o->momentum < 0 && !adaptive) o->momentum = 0.9;
    if (o->checkpoint_every < 0) o->checkpoint_every = 15;
    if (o->keep == 0) o->keep = 3;
    if (!o->resume) o->resume = o->checkpoint_dir ? "auto" : "none";
}

/* Reads the line; CLI_RUN, or the exit code. */
static int options_read(train_options *o, int argc, char **argv) {
    cli_command command;
    cli_list operands = {NULL, 0, 0};
    int code;

    options_set_defaults(o);
    options_make_table(o);
    memset(&command, 0, sizeof command);
    command.name = TRAIN_NAME;
    command.about =
        "Trains an image classifier on TFRecords, in mixed precision.\n"
        "Exit codes: 0 done, 1 bad data or a failure, 2 wrong usage, 128 + n after\n"
        "signal n with a checkpoint saved.\n\n"
        "A network of your own: --arch FILE.txt, with a layer a line:\n" NETWORK_GRAMMAR;
    command.version = TRAIN_VERSION;
    command.options = o->table;
    command.num_options = o->count;
    code = cli_scan_help(&command, argc, argv);
    if (code == CLI_RUN) code = options_refuse_missing(argc, argv);
    if (code == CLI_RUN) code = cli_parse(&command, argc, argv, &operands);
    if (code == CLI_RUN) code = options_parse_texts(o);
    if (code == CLI_RUN) code = options_check_mode(o);
    if (code == CLI_RUN) code = options_check_files(o);
    if (code == CLI_RUN) code = options_check_optimizer(o);
    if (code == CLI_RUN) code = options_check_precision(o);
    if (code == CLI_RUN) options_resolve(o);
    cli_list_free(&operands);
    return code;
}

/* ---- to the library's descs ------------------------------------------------------------------ */
static mpt_precision options_precision(const train_options *o) {
    static const mpt_precision levels[] = {MPT_PRECISION_FP32, MPT_PRECISION_FP16_CAST,
                                           MPT_PRECISION_FP16, MPT_PRECISION_FP16_PURE};

    if (o->opt_level >= 0) return levels[o->opt_level];
    if (o->precision >= 0) return network_precision(o->precision);
    return o->device == NETWORK_CUDA ? MPT_PRECISION_FP16 : MPT_PRECISION_DEFAULT;
}

static mpt_optimizer_kind options_optimizer(const train_options *o) {
    static const mpt_optimizer_kind kinds[] = {MPT_OPTIMIZER_SGD_MOMENTUM, MPT_OPTIMIZER_ADAM,
                                               MPT_OPTIMIZER_ADAMW, MPT_OPTIMIZER_LARS};

    if (o->optimizer != OPTIMIZER_SGD) return kinds[o->optimizer];
    if (o->nesterov) return MPT_OPTIMIZER_SGD_NESTEROV;
    return o->momentum < 1e-6 ? MPT_OPTIMIZER_SGD : MPT_OPTIMIZER_SGD_MOMENTUM;
}

static void options_schedule(const train_options *o, int64_t steps_per_epoch,
                             mpt_schedule_desc *d) {
    static const mpt_schedule_kind kinds[] = {MPT_SCHEDULE_COSINE, MPT_SCHEDULE_STEP,
                                              MPT_SCHEDULE_POLY, MPT_SCHEDULE_ONE_CYCLE,
                                              MPT_SCHEDULE_CONSTANT};

    d->kind = kinds[o->schedule];
    d->warmup_steps = (int64_t)(o->warmup_epochs * (double)steps_per_epoch + 0.5);
    if (d->kind == MPT_SCHEDULE_STEP) d->decay_every = (steps_per_epoch * o->epochs + 2) / 3;
}

/* Records of one step. */
static int64_t options_step_records(const train_options *o) {
    return o->batch_size * o->accumulate;
}

static float options_rate(const train_options *o) {
    float rate = (float)o->learning_rate;

    if (o->reference_batch == 0) return rate;
    return mpt_learning_rate_scale(rate, options_step_records(o), o->reference_batch);
}

static mpt_trainer_desc options_trainer_desc(const train_options *o, int64_t steps_per_epoch) {
    mpt_trainer_desc d;

    memset(&d, 0, sizeof d);
    d.precision = options_precision(o);
    if (o->keep_batchnorm >= 0) d.keep_batchnorm_fp32 = o->keep_batchnorm == 0 ? MPT_YES : MPT_NO;
    d.optimizer.kind = options_optimizer(o);
    d.optimizer.learning_rate = options_rate(o);
    d.optimizer.momentum = o->momentum > 0 ? (float)o->momentum : 0;
    d.optimizer.weight_decay = (float)o->weight_decay;
    d.optimizer.max_grad_norm = (float)o->clip_grad_norm;
    options_schedule(o, steps_per_epoch, &d.schedule);
    d.total_steps = steps_per_epoch * o->epochs;
    if (o->has_loss_scale) d.loss_scaler.mode = MPT_LOSS_SCALE_DYNAMIC;
    if (o->fixed_scale > 0) d.loss_scaler.mode = MPT_LOSS_SCALE_STATIC;
    if (o->fixed_scale > 0) d.loss_scaler.init_scale = o->fixed_scale;
    d.label_smoothing = (float)o->label_smoothing;
    d.accumulate_steps = (int)o->accumulate;
    d.slices = (int)o->slices;
    d.seed = (uint64_t)o->seed;
    return d;
}

#endif /* TRAIN_OPTIONS_H */
