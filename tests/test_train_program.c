/* The program train, run as its users run it: options, what it finds in the data, reports, the same
   bits with other threads and after a restart, signals, damaged files. Small networks and a few
   steps: what they learn is the matter of tests/test_train.c. */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "train_program.h"

/* ---- shorthands ------------------------------------------------------------------------------ */
static void write_text(const char *name, const char *text) {
    mpt_test_write_file(work_file(name), text, strlen(text));
}

/* The smallest useful command lines: lenet, 8 steps an epoch; resnet20 has batch norms too. */
#define LENET "$D/train --data train@3 --val-data test@1 -a lenet -b 8 --lr 0.02 -j 2 --threads 2 "
#define MLP "$D/train --data train@3 -a mlp -b 8 --lr 0.02 -j 1 --threads 1 "
#define RESNET \
    "$D/train --data train@3 --val-data test@1 -a resnet20 --image-size 8 -b 5 --accumulate 2 " \
    "--shuffle-buffer 16 --lr 0.02 "

/* How often a text stands in the output of the last run. */
static int times_printed(const char *needle) {
    const char *at = run_out;
    int n = 0;

    while ((at = strstr(at, needle)) != NULL) {
        at += strlen(needle);
        n++;
    }
    return n;
}

/* ---- options --------------------------------------------------------------------------------- */
MPT_TEST(help_and_version_go_to_standard_output) {
    fresh_directory();
    CHECK_RUNS("$D/train --help");
    CHECK_CONTAINS(run_out, "usage: train");
    CHECK_CONTAINS(run_out, "--keep-batchnorm-fp32");
    CHECK_CONTAINS(run_out, "MPTRAIN_THREADS");
    CHECK_CONTAINS(run_out, "--device cpu|cuda");
    CHECK_CONTAINS(run_out, "\n  conv 32 kernel 3 stride 1 padding 1 bias ");
    CHECK_EQ_STR(run_err, "");
    CHECK_RUNS("$D/train --data nothing --version");
    CHECK_EQ_STR(run_out, "train " MPT_VERSION_STRING "\n");
}

MPT_TEST(wrong_usage_is_told_with_the_option_and_ends_with_2) {
    static const struct {
        const char *options, *needle;
    } cases[] = {
        {"", "--data is required"},
        {"--data", "--data needs a value"},
        {"x --data y", "'x' is one argument too many"},
        {"--data x --learning-rate 1", "unknown option --learning-rate"},
        {"--data x --epochs 1.5", "--epochs: '1.5'"},
        {"--data x --epochs 0", "--epochs: '0'"},
        {"--data x --lr 0", "--lr: '0'"},
        {"--data x --lr nan", "--lr: 'nan'"},
        {"--data x -b 0", "--batch-size: '0'"},
        {"--data x --schedule linear", "--schedule: 'linear' is none of cosine"},
        {"--data x --optimizer lamb", "--optimizer: 'lamb'"},
        {"--data x --precision fp8", "--precision: 'fp8'"},
        {"--data x --opt-level O4", "--opt-level: 'O4'"},
        {"--data x --log-format xml", "--log-format: 'xml'"},
        {"--data x --arch vgg", "--arch: 'vgg'"},
        {"--data x --device tpu", "--device: 'tpu' is none of cpu|cuda"},
        {"--data x --device cuda", "`make cuda` builds build/train-cuda"},
        {"--data x --channels 2", "--channels"},
        {"--data x --loss-scale big", "--loss-scale: 'big'"},
        {"--data x --loss-scale -1", "--loss-scale: '-1'"},
        {"--data x --label-offset one", "--label-offset: 'one'"},
        {"--data x --mean 0.1,0.2", "--mean: '0.1,0.2'"},
        {"--data x --mean 123.7", "pixel / 255"},
        {"--data x --std 0", "--std: '0'"},
        {"--data x --keep-batchnorm-fp32 yes", "--keep-batchnorm-fp32: 'yes'"},
        /* what contradicts itself */
        {"--data x --precision fp16 --opt-level O2", "--precision and --opt-level"},
        {"--data x --opt-level O1 --keep-batchnorm-fp32 False", "--keep-batchnorm-fp32 False"},
        {"--data x --optimizer adamw --momentum 0.9", "--momentum"},
        {"--data x --optimizer lars --momentum 0", "--momentum"},
        {"--data x --nesterov --momentum 0", "--nesterov"},
        {"--data x --nesterov --optimizer adam", "--nesterov"},
        {"--data x --warmup-epochs 3 --epochs 3", "--warmup-epochs 3"},
        {"--data x -b 10 --slices 3", "--slices 3"},
        {"--data x --resume auto", "--resume auto needs --checkpoint-dir"},
        {"--data x --keep 2", "--keep needs --checkpoint-dir"},
        {"--data x --checkpoint-every 5", "--checkpoint-every needs"},
        {"--data x --checkpoint-every-steps 5", "--checkpoint-every-steps needs"},
        {"--data x --export m.pt", "--export: m.pt"},
        {"--data x --export a.safetensors --report a.safetensors", "same file"},
        {"--data x -e", "--evaluate needs --val-data"},
        {"--val-data x -e", "--evaluate needs weights"},
        {"--val-data x -e --init w --steps 3", "--steps"},
        /* what is not there yet is never passed over in silence */
        {"--data x --gpus 2", "--gpus is not there"},
        {"--data x --ranks=2", "--ranks is not there"},
        {"--data x --sync_bn", "--sync-bn is not there"},
        {"--data x --ema 0.9", "--ema is not there"},
        {"--data x --memory-limit 1G", "--memory-limit is not there"},
        {"--data x --log-dir y", "--log-dir is not there"},
        {"--data x --export m.onnx", "ONNX"},
        {"--data gs://bucket/x", "gs://bucket/x"},
        {"--data x --val-data gs://b/x", "--val-data: gs://b/x"},
        {"--data x --report gs://b/r.json", "--report: gs://b/r.json"},
        {"--data x --checkpoint-dir gs://b/c", "--checkpoint-dir: gs://b/c"},
    };
    size_t i;

    fresh_directory();
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++)
        CHECK_FAILS(2, cases[i].needle, "$D/train %s", cases[i].options);
    CHECK_RUNS("ls -A");
    CHECK_EQ_STR(run_out, ""); /* no folder named "gs:" either: O-59 */
}

MPT_TEST(names_of_options_are_those_of_the_scripts_that_people_know) {
    fresh_data();
    CHECK_RUNS("MPTRAIN_THREADS=3 $D/train --data=train@3 --val_data test@1 --arch=mlp "
               "--batch_size 8 --epochs 1 --lr 0.01 --momentum 0.8 --wd 0.001 --workers 1 "
               "--print_freq=2 --opt_level O2 --keep-batchnorm-fp32 True --loss-scale 128.0 "
               "--report r.json");
    CHECK_EQ_STR(report_value("r.json", "weight-decay"), "0.001");
    CHECK_EQ_STR(report_value("r.json", "loss-scale"), "\"128\"");
    CHECK_EQ_STR(report_value("r.json", "final_loss_scale"), "128.0");
    CHECK_EQ_STR(report_value("r.json", "threads"), "3");
    CHECK_EQ_STR(report_value("r.json", "opt-level"), "\"O2\"");
    CHECK_EQ_INT(times_printed("  step 2/8  "), 1);
    CHECK_EQ_INT(times_printed("  images/s"), 0);
    CHECK_EQ_INT(times_printed(" images/s\n"), 5); /* four lines of steps and the last one */
}

MPT_TEST(all_optimizers_schedules_and_precisions_run) {
    static const char *const optimizers[] = {"sgd",  "sgd --nesterov", "sgd --momentum 0",
                                             "adam", "adamw",          "lars"};
    static const char *const momenta[] = {"0.9", "0.9", "0.0", "null", "null", "0.9"};
    static const char *const schedules[] = {"cosine", "step", "poly", "onecycle", "constant"};
    static const char *const precisions[] = {"--precision fp32",
                                             "--precision fp16",
                                             "--precision bf16",
                                             "--opt-level O0",
                                             "--opt-level O1",
                                             "--opt-level O2",
                                             "--opt-level O3",
                                             "--opt-level O3 --keep-batchnorm-fp32 True",
                                             "--precision fp32 --loss-scale 8"};
    size_t i;

    fresh_data();
    for (i = 0; i < sizeof optimizers / sizeof optimizers[0]; i++) {
        CHECK_RUNS(MLP "--epochs 1 --steps 2 --optimizer %s --report r.json", optimizers[i]);
        CHECK_EQ_STR(report_value("r.json", "steps"), "2");
        CHECK_EQ_STR(report_value("r.json", "momentum"), momenta[i]);
    }
    for (i = 0; i < sizeof schedules / sizeof schedules[0]; i++) {
        CHECK_RUNS(MLP "--epochs 2 --warmup-epochs 0.5 --schedule %s --report r%d.json",
                   schedules[i], (int)i);
        CHECK_EQ_STR(report_value("r.json", "skipped_steps"), "0");
    }
    CHECK(strcmp(report_value("r0.json", "weights_sha256"),
                 report_value("r1.json", "weights_sha256")) != 0);
    for (i = 0; i < sizeof precisions / sizeof precisions[0]; i++)
        CHECK_RUNS(RESNET "--epochs 1 --steps 1 -j 1 %s", precisions[i]);
    CHECK_RUNS(RESNET "--epochs 1 --steps 1 --slices 5 --label-smoothing 0.1 --clip-grad-norm 1");
}

MPT_TEST(the_linear_scaling_rule_is_applied_and_told) {
    fresh_data();
    CHECK_RUNS(MLP "--epochs 1 --accumulate 2 --lr 0.1 --reference-batch 64");
    CHECK_CONTAINS(run_out, "learning rate 0.025 = 0.1 * 16 / 64");
}

/* ---- what the data say ----------------------------------------------------------------------- */
MPT_TEST(size_channels_and_classes_are_found_in_the_data) {
    char tfds[4096];

    fresh_data();
    CHECK_RUNS(MLP "--epochs 1 --steps 1 --mean 0.4 --precision fp16 --report r.json");
    CHECK_EQ_STR(report_value("r.json", "mean"), "\"0.4,0.4,0.4\"");
    CHECK_EQ_STR(report_value("r.json", "opt-level"), "\"O2\"");
    CHECK_EQ_STR(report_value("r.json", "keep-batchnorm-fp32"), "\"True\"");
    CHECK_EQ_STR(report_value("r.json", "image-size"), "12");
    CHECK_EQ_STR(report_value("r.json", "channels"), "3");
    CHECK_EQ_STR(report_value("r.json", "num-classes"), "4");
    CHECK_EQ_STR(report_value("r.json", "label-offset"), "\"1\"");
    CHECK_EQ_STR(report_value("r.json", "image-key"), "\"image/encoded\"");
    CHECK_EQ_STR(report_value("r.json", "train-records"), "60");
    CHECK_CONTAINS(run_out, "the largest label is 4");
    write_text("train-classes.txt", "left\nright\nlow\nhigh\nnone");
    CHECK_RUNS(MLP "--epochs 1 --steps 1 --channels 1 --report r.json");
    CHECK_EQ_STR(report_value("r.json", "num-classes"), "5");
    CHECK_EQ_STR(report_value("r.json", "mean"), "\"0.5\"");
    CHECK_CONTAINS(run_out, "5 classes: lines of train-classes.txt");
    /* a folder, a pattern, a single file; TFDS keys, whose labels run from 0 */
    CHECK_RUNS("mkdir d && cp train-0* d && $D/train --data d -a mlp --epochs 1 --report r.json");
    CHECK_EQ_STR(report_value("r.json", "train-records"), "60");
    CHECK_RUNS("$D/train --data 'train-0000[01]*' -a mlp --epochs 1 --report r.json");
    CHECK_EQ_STR(report_value("r.json", "train-records"), "40");
    CHECK(realpath(mpt_test_data("tfds-00000-of-00001.tfrecord"), tfds) != NULL);
    CHECK_RUNS("cp '%s' tfds && $D/train --data tfds -a mlp --epochs 1 --report r.json", tfds);
    CHECK_EQ_STR(report_value("r.json", "label-key"), "\"label\"");
    CHECK_EQ_STR(report_value("r.json", "label-offset"), "\"0\"");
}

MPT_TEST(a_label_that_only_the_validation_set_has_counts_as_a_class) {
    fresh_directory();
    write_shard("few", 0, 3); /* labels 1, 2, 3 */
    write_shard("more", 0, 8);
    CHECK_RUNS("$D/train --data few --val-data more -a mlp --epochs 1 --report r.json");
    CHECK_EQ_STR(report_value("r.json", "num-classes"), "4");
    CHECK_EQ_STR(report_value("r.json", "val_count"), "8");
    CHECK_FAILS(1, "label 3", "$D/train --data few --num-classes 2 -a mlp --epochs 1");
}

MPT_TEST(what_can_fail_before_the_first_step_does) {
    static const struct {
        const char *options, *needle;
    } cases[] = {
        {"--report no/r.json", "--report: no/r.json"},
        {"--report .", "--report: .: it is a directory"},
        {"--report t.pipe", "--report: t.pipe: it is a device or a pipe"},
        {"--export no/w.safetensors", "--export: no/w.safetensors"},
        {"--checkpoint-dir train-00000-of-00003/c", "--checkpoint-dir"},
        {"--checkpoint-dir train-00000-of-00003", "is no directory"},
        {"--init no.safetensors", "no.safetensors"},
        {"--resume no.safetensors", "no.safetensors"},
        {"--resume .", "no checkpoint in this directory"},
        {"--init train-00000-of-00003", "train-00000-of-00003"},
        {"-a no.txt", "--arch: no.txt"},
        {"--val-data missing", "missing: no such file"},
        {"--image-key picture", "picture"},
    };
    size_t i;

    fresh_data();
    CHECK_RUNS("mkfifo t.pipe");
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        CHECK_FAILS(1, cases[i].needle, MLP "%s", cases[i].options);
        CHECK_EQ_INT(times_printed("  step "), 0);
    }
    CHECK_FAILS(1, "nothere", "$D/train --data nothere -a mlp");
    CHECK_FAILS(1, "a pipe or device can't be read again",
                "mkfifo ten; head -c 5000 train-00000-of-00003 >ten & $D/train --data ten -a mlp");
    CHECK_RUNS("ls | grep -v -e '^t' || true");
    CHECK_EQ_STR(run_out, ""); /* nor is anything left of the attempts */
}

MPT_TEST(a_device_or_pipe_is_not_replaced_by_a_report) {
    fresh_data();
    CHECK_RUNS("mkfifo pipe pipe.safetensors");
    CHECK_FAILS(1, "--report: pipe: it is a device or a pipe", MLP "--report pipe");
    CHECK_FAILS(1, "--export: pipe.safetensors: it is a device or a pipe",
                MLP "--export pipe.safetensors");
    CHECK_RUNS("test -p pipe && test -p pipe.safetensors");
}

/* Opening a pipe waits for somebody who writes into it, and nobody may ever come. */
MPT_TEST(a_pipe_is_no_checkpoint) {
    fresh_data();
    CHECK_RUNS("mkfifo pipe; mkdir c; mkfifo c/checkpoint-000000009.safetensors");
    CHECK_FAILS(1, "pipe: no checkpoint: it is a device or a pipe", MLP "--resume pipe");
    CHECK_FAILS(1, "checkpoint-000000009.safetensors: no checkpoint: it is a device or a pipe",
                MLP "--checkpoint-dir c");
}

/* In a container a process often has the number of the one before it, which was killed. */
MPT_TEST(what_a_killed_process_of_the_same_number_left_is_in_nobodys_way) {
    fresh_data();
    CHECK_RUNS("D=$D sh -c 'echo x >r.json.tmp-$$; exec " MLP "--steps 1 --report r.json'");
    CHECK_EQ_STR(report_value("r.json", "steps"), "1");
    CHECK_RUNS("ls | grep tmp || true");
    CHECK_EQ_STR(run_out, "");
}

MPT_TEST(damaged_records_stop_the_run_or_are_left_out_up_to_a_limit) {
    fresh_data();
    flip_bit("train-00001-of-00003", 300);
    flip_bit("train-00002-of-00003", 300);
    CHECK_FAILS(1, "train-0000", MLP "--epochs 1");
    CHECK_CONTAINS(run_err, "record 0 at offset 0");
    CHECK_RUNS(MLP "--epochs 2 --skip-bad-records 2 --report r.json");
    CHECK_CONTAINS(run_err, "2 damaged records left out in epoch 2");
    CHECK_EQ_STR(report_value("r.json", "steps"), "16"); /* 58 records are 8 batches too */
    CHECK_EQ_INT(run(MLP "--epochs 1 --skip-bad-records 1"), 1);
    CHECK_CONTAINS(run_err, "max_bad_records");
}

/* ---- networks described in a file ------------------------------------------------------------ */
static const char residual[] = "# a small residual network\n"
                               "conv 8 kernel 3 padding 1 as stem\n"
                               "batchnorm\n"
                               "relu as a\n"
                               "\n"
                               "conv 8 kernel 3 stride 1 padding 1 bias\n"
                               "batchnorm epsilon 0.001 momentum 0.2\n"
                               "add a\n"
                               "relu\n"
                               "maxpool 2 as small # stride 2\n"
                               "conv 6 kernel 1 from small\n"
                               "avgpool 3 2 1\n"
                               "dropout 0.1\n"
                               "globalavgpool\n"
                               "dense classes\n";

MPT_TEST(a_network_can_be_described_in_a_file) {
    fresh_data();
    write_text("net.txt", residual);
    CHECK_RUNS(
        "$D/train --data train@3 --val-data test@1 -a net.txt -b 8 --epochs 1 --report a.json"
        " --export a.safetensors");
    /* 8*3*9 + 2*8 + 8*8*9 + 8 + 2*8 + 6*8 + 6*4 + 4 */
    CHECK_EQ_STR(report_value("a.json", "parameters"), "908");
    CHECK_CONTAINS(run_out, "stem ");
    CHECK_CONTAINS(run_out, "small ");
    CHECK_RUNS(
        "$D/train --val-data test@1 -a net.txt -b 25 -e --init a.safetensors --report b.json");
    CHECK_SAME("a.json", "b.json", "weights_sha256");
}

MPT_TEST(a_mistake_in_a_description_is_told_with_file_and_line) {
    static const struct {
        const char *line, *needle;
    } cases[] = {
        {"conv", "net.txt:2: the number of channels is missing"},
        {"conv 0", "net.txt:2: the number of channels: '0'"},
        {"conv 3 kernel", "net.txt:2: kernel is missing"},
        {"conv 3 dilation 2", "net.txt:2: 'dilation'"},
        {"conv 3 kernel 13", "net.txt:2: layer"},
        {"convolution 3", "net.txt:2: 'convolution' is no layer"},
        {"add nobody", "net.txt:2: no line above is called 'nobody'"},
        {"relu from nobody", "net.txt:2: no line above"},
        {"relu as input", "net.txt:2: 'input' is the name"},
        {"maxpool 2 0", "net.txt:2: stride: '0'"},
        {"maxpool", "net.txt:2: the window is missing"},
        {"batchnorm epsilon 2", "net.txt:2: epsilon: '2'"},
        {"dropout 1", "net.txt:2: the probability: '1'"},
        {"dense 8 9", "net.txt:2: '9' is not understood"},
        {"as x", "net.txt:2: a layer is missing"},
        {"relu as", "net.txt:2: 'as' is not understood"},
        {"conv 8\nadd input", "net.txt:3: layer"},
        {"conv 8\rrelu", "net.txt:2: there is a control character"},
    };
    char text[400];
    size_t i;

    fresh_data();
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        snprintf(text, sizeof text, "relu\n%s\ndense classes\n", cases[i].line);
        write_text("net.txt", text);
        CHECK_FAILS(1, cases[i].needle, MLP "-a net.txt");
    }
    write_text("net.txt", "dense 5\n");
    CHECK_FAILS(1, "net.txt:1: the last layer has 5 outputs for 4 classes", MLP "-a net.txt");
    write_text("net.txt", "conv 3\nglobalavgpool\n");
    CHECK_FAILS(1, "net.txt:2: the last layer", MLP "-a net.txt");
    write_text("net.txt", "conv 4\n");
    CHECK_FAILS(1, "net.txt:1: mpt_model_finish: logits", MLP "-a net.txt");
    write_text("net.txt", "# nothing\n");
    CHECK_FAILS(1, "net.txt: there is no layer", MLP "-a net.txt");
}

/* ---- what comes out -------------------------------------------------------------------------- */
MPT_TEST(the_report_tells_what_ran_and_what_came_of_it) {
    static const char *const planned[] = {"weights",         "master_weights", "gradients",
                                          "optimizer_state", "activations",    "workspace",
                                          "statistics",      "staging",        "bookkeeping"};
    const char *hash;
    double parts = 0;
    size_t i;

    fresh_data();
    CHECK_RUNS(LENET "--epochs 4 --seed 7 --report r.json");
    CHECK_EQ_STR(report_value("r.json", "version"), "\"" MPT_VERSION_STRING "\"");
    CHECK_EQ_STR(report_value("r.json", "device"), "\"cpu\"");
    CHECK_EQ_STR(report_value("r.json", "backend"), "\"cpu\"");
    CHECK(strcmp(report_value("r.json", "kernels"), "\"\"") != 0);
    CHECK_EQ_STR(report_value("r.json", "seed"), "7");
    CHECK_EQ_STR(report_value("r.json", "ranks"), "1");
    CHECK_EQ_STR(report_value("r.json", "steps"), "32");
    CHECK_EQ_STR(report_value("r.json", "total_steps"), "32");
    CHECK_EQ_STR(report_value("r.json", "skipped_steps"), "0");
    CHECK_EQ_STR(report_value("r.json", "val_count"), "25");
    CHECK_EQ_STR(report_value("r.json", "arch"), "\"lenet\"");
    CHECK_EQ_STR(report_value("r.json", "lr"), "0.02");
    CHECK_EQ_STR(report_value("r.json", "schedule"), "\"cosine\"");
    CHECK_EQ_STR(report_value("r.json", "init"), "null");
    CHECK_EQ_STR(report_value("r.json", "data"), "[\"train@3\"]");
    CHECK(report_number("r.json", "final_loss_scale") >= 1);
    CHECK(report_number("r.json", "train_loss") < 1.3); /* chance is log 4 = 1.386 */
    CHECK(report_number("r.json", "val_loss") < 1.3);
    CHECK(report_number("r.json", "val_accuracy") > 0.5);
    CHECK_EQ_STR(report_value("r.json", "val_top5"), "1.0");
    CHECK(report_number("r.json", "seconds") > 0);
    CHECK(report_number("r.json", "images_per_second") > 0);
    CHECK(report_number("r.json", "input_wait_fraction") >= 0);
    CHECK(report_number("r.json", "input_wait_fraction") <= 1);
    CHECK(report_number("r.json", "peak_rss_bytes") > report_number("r.json", "total"));
    for (i = 0; i < sizeof planned / sizeof planned[0]; i++)
        parts += report_number("r.json", planned[i]);
    CHECK(parts > 0 && parts == report_number("r.json", "total"));
    hash = report_value("r.json", "weights_sha256");
    CHECK_EQ_INT(strspn(hash + 1, "0123456789abcdef"), 64);
    CHECK_EQ_INT(strlen(hash), 66);
    CHECK_CONTAINS(run_out, "memory: ");
    CHECK_EQ_INT(times_printed("validation  "), 4);
}

MPT_TEST(json_lines_are_objects_and_numbers_that_json_has_not_are_null) {
    char *line, *end;
    int lines = 0;

    fresh_data();
    /* the first step makes the weights so large that nothing is finite any more */
    CHECK_RUNS(LENET "--epochs 1 --lr 1e9 --log-format json --print-freq 1 --report r.json");
    for (line = run_out; *line; line = end + 1) {
        end = strchr(line, '\n');
        CHECK(end != NULL);
        *end = 0;
        if (strncmp(line, "{\"event\": \"", 11) != 0 || end[-1] != '}' || strstr(line, ": nan") ||
            strstr(line, ": -nan") || strstr(line, ": inf"))
            mpt_test_fail(__FILE__, __LINE__, "not a JSON object: %s", line);
        lines++;
    }
    CHECK(lines > 20);
    CHECK_EQ_STR(report_value("r.json", "val_loss"), "null");
    CHECK_EQ_STR(report_value("r.json", "skipped_steps"), "7");
    CHECK_EQ_STR(report_value("r.json", "final_loss_scale"), "512.0");
}

MPT_TEST(skipped_steps_print_apex_line_and_a_stuck_scale_ends_the_run_with_a_name) {
    fresh_data();
    CHECK_FAILS(1, "conv1", LENET "--epochs 9 --precision fp16 --lr 1e9 --report r.json");
    CHECK_CONTAINS(run_err, "20 steps in a row were skipped at the smallest loss scale 1");
    CHECK_CONTAINS(run_out, "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale "
                            "to 32768.0\n");
    CHECK_CONTAINS(run_out, "reducing loss scale to 1.0\n");
    CHECK_RUNS("ls");
    CHECK(!strstr(run_out, "r.json"));
}

MPT_TEST(exported_weights_evaluate_to_the_same_numbers_and_say_what_they_are_of) {
    static const char *const keys[] = {"mptrain.arch",    "mptrain.image_size",
                                       "mptrain.classes", "mptrain.num_classes",
                                       "mptrain.mean",    "mptrain.channels"};
    static const char *const values[] = {"resnet20",          "8", "left\nright\nlow\nhigh", "4",
                                         "0.485,0.456,0.406", "3"};
    mpt_safetensors_desc d;
    mpt_safetensors *s = NULL;
    mpt_ctx *ctx = NULL;
    size_t i;

    fresh_data();
    write_text("train-classes.txt", "left\nright\nlow\nhigh\n");
    CHECK_RUNS(RESNET "--epochs 2 --export w.safetensors --report a.json --checkpoint-dir c");
    CHECK_RUNS("$D/train --val-data test@1 -a resnet20 --image-size 8 -b 9 -e --num-classes 4 "
               "--init w.safetensors --report b.json");
    CHECK_SAME("a.json", "b.json", "weights_sha256");
    CHECK_SAME("a.json", "b.json", "val_accuracy");
    CHECK_NEAR(report_number("a.json", "val_loss"), report_number("b.json", "val_loss"), 1e-6);
    CHECK_EQ_STR(report_value("b.json", "steps"), "0");
    CHECK_EQ_STR(report_value("b.json", "train_loss"), "null");
    CHECK_RUNS("$D/train --val-data test@1 -a resnet20 --image-size 8 -b 9 -e --resume c "
               "--report c.json");
    CHECK_SAME("a.json", "c.json", "weights_sha256");
    CHECK_SAME("b.json", "c.json", "val_loss");
    CHECK_FAILS(1, "w.safetensors", MLP "--init w.safetensors");

    CHECK_OK(NULL, mpt_ctx_create(NULL, &ctx));
    memset(&d, 0, sizeof d);
    d.path = work_file("w.safetensors");
    CHECK_OK(ctx, mpt_safetensors_open(ctx, &d, &s));
    for (i = 0; i < sizeof keys / sizeof keys[0]; i++)
        CHECK_EQ_STR(mpt_safetensors_metadata(s, keys[i]), values[i]);
    mpt_safetensors_close(s);
    mpt_ctx_destroy(ctx);
}

MPT_TEST(a_reader_that_goes_away_does_not_end_the_run) {
    fresh_data();
    CHECK_RUNS(LENET "--epochs 2 -p 1 --report r.json | head -n 1");
    CHECK_EQ_STR(report_value("r.json", "steps"), "16");
}

/* ---- the same bits --------------------------------------------------------------------------- */
MPT_TEST(threads_and_workers_change_no_bit_and_seeds_do) {
    fresh_data();
    CHECK_RUNS(RESNET "--augment crop-flip --epochs 1 --threads 1 -j 1 --report a.json");
    CHECK_RUNS(RESNET "--augment crop-flip --epochs 1 --threads 3 -j 4 --report b.json");
    CHECK_RUNS(RESNET "--augment crop-flip --epochs 1 --threads 1 -j 1 --seed 1 --report c.json");
    CHECK_SAME("a.json", "b.json", "weights_sha256");
    CHECK_SAME("a.json", "b.json", "val_loss");
    CHECK(strcmp(report_value("a.json", "weights_sha256"),
                 report_value("c.json", "weights_sha256")) != 0);
}

/* Stopped in an epoch, at its end, and again in the next one; with other threads each time. */
static void check_resume(const char *options) {
    static const int stops[] = {1, 4, 6, 12, 15, 0};
    char steps[40];
    int i, evaluations = 0;

    CHECK_RUNS(RESNET "--epochs 3 %s --threads 1 -j 1 --report whole.json", options);
    CHECK_EQ_STR(report_value("whole.json", "steps"), "18");
    CHECK_EQ_INT(times_printed("validation  "), 3);
    CHECK_RUNS("rm -rf c");
    for (i = 0; i < 6; i++) {
        snprintf(steps, sizeof steps, stops[i] ? "--steps %d" : "--epochs 3", stops[i]);
        CHECK_RUNS(RESNET "--epochs 3 %s --checkpoint-dir c %s --threads %d -j %d --report r.json",
                   options, steps, i % 3 + 1, i + 1);
        CHECK_EQ_INT(report_number("r.json", "steps"), stops[i] ? stops[i] : 18);
        /* at the ends of epochs, and where a run ends */
        evaluations += times_printed("validation  ");
        CHECK_EQ_INT(times_printed("validation  "), 1);
    }
    CHECK_EQ_INT(evaluations, 6);
    CHECK_SAME("whole.json", "r.json", "weights_sha256");
    CHECK_SAME("whole.json", "r.json", "val_loss");
    CHECK_SAME("whole.json", "r.json", "val_accuracy");
    CHECK_SAME("whole.json", "r.json", "skipped_steps");
}

MPT_TEST(a_run_that_was_stopped_goes_on_bit_for_bit) {
    fresh_data();
    check_resume("--augment crop-flip --precision fp16");
    check_resume("--optimizer adamw --lr 0.001 --precision fp32 --schedule onecycle");
}

MPT_TEST(a_finished_run_that_is_started_again_reports_the_same) {
    fresh_data();
    CHECK_RUNS(LENET "--epochs 1 --checkpoint-dir c --report a.json");
    CHECK_RUNS(LENET "--epochs 1 --checkpoint-dir c --report b.json");
    CHECK_CONTAINS(run_out, "nothing left to train");
    CHECK_SAME("a.json", "b.json", "weights_sha256");
    CHECK_SAME("a.json", "b.json", "val_loss");
    CHECK_SAME("a.json", "b.json", "steps");
}

/* ---- checkpoints ----------------------------------------------------------------------------- */
MPT_TEST(the_newest_checkpoints_are_kept_and_leftovers_removed) {
    fresh_data();
    CHECK_RUNS("mkdir -p c/d && touch c/d/checkpoint-000000001.safetensors.tmp-1-0 && "
               "mv c/d/* c/checkpoint-000000001.safetensors.tmp-999999999-0 && rmdir c/d && "
               "touch c/notes");
    CHECK_RUNS(MLP "--epochs 1 --checkpoint-dir c --checkpoint-every-steps 3 --keep 2");
    CHECK_RUNS("ls c | tr '\\n' ' '");
    CHECK_EQ_STR(run_out,
                 "checkpoint-000000006.safetensors checkpoint-000000008.safetensors notes ");
    CHECK_RUNS(MLP "--epochs 2 --checkpoint-dir c --checkpoint-every 0 --resume "
                   "c/checkpoint-000000008.safetensors");
    CHECK_CONTAINS(run_out, "resumed: c/checkpoint-000000008.safetensors, after 8 steps");
    /* a run that begins before what is there would mix two histories */
    CHECK_FAILS(1, "c holds a checkpoint of step 16", MLP "--checkpoint-dir c --resume none");
    CHECK_FAILS(1, "seed was 0, is 1 now", MLP "--checkpoint-dir c --seed 1");
    CHECK_FAILS(1, "another model", MLP "--checkpoint-dir c -a lenet");
    CHECK_FAILS(1, "another optimizer", MLP "--checkpoint-dir c --optimizer adamw");
}

MPT_TEST(a_damaged_checkpoint_is_told_and_the_one_before_is_taken) { /* O-47 */
    fresh_data();
    CHECK_RUNS(MLP "--epochs 2 --report whole.json");
    CHECK_RUNS(MLP "--epochs 2 --steps 6 --checkpoint-dir c --checkpoint-every-steps 2");
    flip_bit("c/checkpoint-000000006.safetensors", 5000);
    CHECK_RUNS(MLP "--epochs 2 --checkpoint-dir c --report r.json");
    CHECK_CONTAINS(run_err, "checkpoint-000000006.safetensors");
    CHECK_CONTAINS(run_err, "damaged");
    CHECK_EQ_INT(count_of(run_err, '\n'), 1);
    CHECK_CONTAINS(run_out, "resumed: c/checkpoint-000000004.safetensors");
    CHECK_SAME("whole.json", "r.json", "weights_sha256");
    CHECK_RUNS("rm -r c");
    CHECK_RUNS(MLP "--epochs 2 --steps 1 --checkpoint-dir c");
    CHECK_RUNS("head -c 1000 c/checkpoint-000000001.safetensors > x && "
               "mv x c/checkpoint-000000001.safetensors");
    CHECK_EQ_INT(run(MLP "--epochs 2 --checkpoint-dir c"), 1);
    CHECK_CONTAINS(run_err, "all 1 checkpoints are damaged");
}

MPT_TEST(a_full_disk_costs_a_checkpoint_and_not_the_run) { /* O-48 */
    fresh_data();
    CHECK_RUNS(LENET "--epochs 2 --steps 1 --checkpoint-dir c");
    CHECK_EQ_INT(run("ulimit -f 100; " LENET "--epochs 1 --checkpoint-dir c --report r.json "
                     "--checkpoint-every-steps 2"),
                 1);
    CHECK_CONTAINS(run_err, "training goes on");
    CHECK_EQ_STR(report_value("r.json", "steps"), "8");
    CHECK_RUNS("ls c");
    CHECK_EQ_STR(run_out, "checkpoint-000000001.safetensors\n");
    CHECK_RUNS(LENET "--epochs 1 --checkpoint-dir c");
    CHECK_CONTAINS(run_out, "after 1 step\n");
}

/* ---- signals --------------------------------------------------------------------------------- */
/* Starts a run that would take hours, waits for its checkpoint of step 2, signals, waits. */
static int signalled(const char *name) {
    return run(
        LENET
        "--epochs 100000 --checkpoint-dir c --checkpoint-every-steps 2 --keep 1000000 "
        "--report s.json & p=$!; "
        "while kill -0 $p && [ ! -e c/checkpoint-000000002.safetensors ]; do sleep 0.02; done; "
        "kill -%s $p; wait $p",
        name);
}

static void check_goes_on_after(int steps) {
    CHECK_RUNS("ls c/checkpoint-%09d.safetensors", steps);
    CHECK_RUNS(LENET "--epochs 100000 --checkpoint-dir c --steps %d --report a.json", steps + 10);
    CHECK_CONTAINS(run_out, "resumed: ");
    CHECK_RUNS(LENET "--epochs 100000 --steps %d --report b.json", steps + 10);
    CHECK_SAME("a.json", "b.json", "weights_sha256");
    CHECK_SAME("a.json", "b.json", "val_loss");
}

MPT_TEST(a_signal_ends_the_run_after_the_step_with_a_checkpoint) {
    int steps;

    fresh_data();
    CHECK_EQ_INT(signalled("INT"), 130);
    CHECK_CONTAINS(run_err, "stopped by signal 2");
    fresh_data();
    CHECK_EQ_INT(signalled("TERM"), 143);
    CHECK_CONTAINS(run_err, "stopped by signal 15");
    steps = (int)report_number("s.json", "steps");
    CHECK(steps >= 2);
    if (steps != 8) /* there the signal came before or after the epoch's evaluation */
        CHECK_EQ_STR(report_value("s.json", "val_count"), steps < 8 ? "0" : "25");
    check_goes_on_after(steps);
}

MPT_TEST(a_killed_run_goes_on_from_its_last_whole_checkpoint) { /* O-47 */
    const char *newest;
    int i;

    for (i = 0; i < (mpt_test_full() ? 20 : 2); i++) {
        fresh_data();
        CHECK_EQ_INT(signalled("KILL"), 137);
        CHECK_RUNS("ls c | grep -v tmp | tail -n 1");
        newest = strchr(run_out, '-');
        CHECK(newest != NULL);
        check_goes_on_after(atoi(newest + 1));
        CHECK_RUNS("ls c | grep tmp || true");
        CHECK_EQ_STR(run_out, "");
    }
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(help_and_version_go_to_standard_output),
    MPT_TEST_CASE(wrong_usage_is_told_with_the_option_and_ends_with_2),
    MPT_TEST_CASE(names_of_options_are_those_of_the_scripts_that_people_know),
    MPT_TEST_CASE(all_optimizers_schedules_and_precisions_run),
    MPT_TEST_CASE(the_linear_scaling_rule_is_applied_and_told),
    MPT_TEST_CASE(size_channels_and_classes_are_found_in_the_data),
    MPT_TEST_CASE(a_label_that_only_the_validation_set_has_counts_as_a_class),
    MPT_TEST_CASE(what_can_fail_before_the_first_step_does),
    MPT_TEST_CASE(a_device_or_pipe_is_not_replaced_by_a_report),
    MPT_TEST_CASE(a_pipe_is_no_checkpoint),
    MPT_TEST_CASE(what_a_killed_process_of_the_same_number_left_is_in_nobodys_way),
    MPT_TEST_CASE(damaged_records_stop_the_run_or_are_left_out_up_to_a_limit),
    MPT_TEST_CASE(a_network_can_be_described_in_a_file),
    MPT_TEST_CASE(a_mistake_in_a_description_is_told_with_file_and_line),
    MPT_TEST_CASE(the_report_tells_what_ran_and_what_came_of_it),
    MPT_TEST_CASE(json_lines_are_objects_and_numbers_that_json_has_not_are_null),
    MPT_TEST_CASE(skipped_steps_print_apex_line_and_a_stuck_scale_ends_the_run_with_a_name),
    MPT_TEST_CASE(exported_weights_evaluate_to_the_same_numbers_and_say_what_they_are_of),
    MPT_TEST_CASE(a_reader_that_goes_away_does_not_end_the_run),
    MPT_TEST_CASE(threads_and_workers_change_no_bit_and_seeds_do),
    MPT_TEST_CASE(a_run_that_was_stopped_goes_on_bit_for_bit),
    MPT_TEST_CASE(a_finished_run_that_is_started_again_reports_the_same),
    MPT_TEST_CASE(the_newest_checkpoints_are_kept_and_leftovers_removed),
    MPT_TEST_CASE(a_damaged_checkpoint_is_told_and_the_one_before_is_taken),
    MPT_TEST_CASE(a_full_disk_costs_a_checkpoint_and_not_the_run),
    MPT_TEST_CASE(a_signal_ends_the_run_after_the_step_with_a_checkpoint),
    MPT_TEST_CASE(a_killed_run_goes_on_from_its_last_whole_checkpoint),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
