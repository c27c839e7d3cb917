/* test_cuda_program.c - the program train on a device: the same lines as on the CPU though reports
   come one step late, the same bits after a restart, one line for what a device can refuse

   TRAIN_CUDA names a train built with CUDA: for a GPU, or with the runner of tests/cuda_on_cpu/ in
   its place, whose settings make it refuse. PREDICT_CUDA may name a predict built alike. */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "../train_program.h"

/* ---- the program ----------------------------------------------------------------------------- */
/* lenet, 8 steps an epoch; $C is the program. */
#define LENET "$C --data train@3 --val-data test@1 -a lenet -b 8 --lr 0.02 -j 2 --threads 2 "
#define LINES "--log-format json -p 1 "

/* Puts the absolute path of a program that the environment names into a variable of the shell. */
static bool find_program(const char *environment, const char *variable) {
    const char *name = getenv(environment);
    char path[4096];

    return name && *name && realpath(name, path) && setenv(variable, path, 1) == 0;
}

static void need_program(void) {
    if (!find_program("TRAIN_CUDA", "C")) SKIP("TRAIN_CUDA names no train built with CUDA");
    fresh_data();
}

static void need_device(void) {
    need_program();
    if (run(LENET "--steps 1") != 0 && strstr(run_err, "no CUDA device")) SKIP("there is no GPU");
}

/* Its variables are words in the program. */
static void need_runner(void) {
    need_program();
    if (run("grep -q CUDA_ON_CPU_DEVICES \"$C\"") != 0) SKIP("a GPU refuses nothing on demand");
}

/* ---- lines ----------------------------------------------------------------------------------- */
/* Leaves of the lines of JSON in `name` what two devices have in common: which events there were,
   of which steps, at which rate and scale; not losses, times and paths. */
static void write_events(const char *name) {
    CHECK_RUNS(
        "grep -v '\"event\": \"note\"' %s | sed -E 's/, \"(loss|mean_loss|grad_norm|accuracy|"
        "top5|seconds|images_per_second|path)\": [^,}]*//g' > %s.events",
        name, name);
}

static void check_same_events(const char *a, const char *b) {
    write_events(a);
    write_events(b);
    CHECK_RUNS("diff %s.events %s.events >&2", a, b);
}

/* The losses of all steps, in the order of their lines; the number of them. */
static int read_losses(const char *name, double *losses, int most) {
    size_t size;
    char *text = (char *)mpt_test_read_file(work_file(name), &size), *line = text;
    int n = 0;

    while ((line = strstr(line, "{\"event\": \"step\"")) != NULL && n < most)
        losses[n++] = json_number(line++, "loss");
    free(text);
    return n;
}

enum { MOST_STEPS = 64 };

static void check_same_losses(const char *a, const char *b, int steps, double tolerance) {
    double x[MOST_STEPS], y[MOST_STEPS];
    int i;

    CHECK_EQ_INT(read_losses(a, x, MOST_STEPS), steps);
    CHECK_EQ_INT(read_losses(b, y, MOST_STEPS), steps);
    for (i = 0; i < steps; i++) CHECK_NEAR(x[i], y[i], tolerance);
    CHECK(x[steps - 1] < x[0]);
}

/* The same run on both. */
static void run_both(const char *options) {
    CHECK_RUNS(LENET LINES "%s --device cpu --report cpu.json --checkpoint-dir c1 > cpu", options);
    CHECK_RUNS(LENET LINES "%s --device cuda --report cuda.json --checkpoint-dir c2 > cuda",
               options);
}

/* ---- training -------------------------------------------------------------------------------- */
/* FP16 storage rounds by up to 2^-11 = 0.0005 of a value. Sums in another order round some of them
   the other way, which moves a loss of about 1 by that much, and from step to step a little more:
   eight times that for 16 steps. In FP32 the same reasoning gives 2^-24, and 1e-5 is far above. */
MPT_TEST(a_run_tells_the_same_as_on_the_cpu) {
    need_device();
    run_both("--epochs 2 --precision fp16 --checkpoint-every-steps 3");
    check_same_events("cpu", "cuda");
    check_same_losses("cpu", "cuda", 16, 8 * 0.0005);
    CHECK_NEAR(report_number("cpu.json", "val_loss"), report_number("cuda.json", "val_loss"),
               8 * 0.0005);
    CHECK_SAME("cpu.json", "cuda.json", "val_count");
    CHECK_SAME("cpu.json", "cuda.json", "steps");
    CHECK_SAME("cpu.json", "cuda.json", "final_loss_scale");
    CHECK_RUNS("rm -r c1 c2");
    run_both("--epochs 1 --precision fp32 --accumulate 2 --slices 2");
    check_same_events("cpu", "cuda");
    check_same_losses("cpu", "cuda", 4, 1e-5);
}

/* The run ends within an epoch, so nothing but its end waits for the last step. */
MPT_TEST(lines_of_text_count_each_step_once) {
    need_device();
    CHECK_RUNS(LENET "--epochs 1 --steps 7 -p 1 --device cuda > text");
    CHECK_RUNS("grep -o 'step [0-9]*/8' text | tr '\\n' ' '");
    CHECK_EQ_STR(run_out, "step 1/8 step 2/8 step 3/8 step 4/8 step 5/8 step 6/8 step 7/8 ");
    CHECK_RUNS("grep '^7 steps in all, ' text");
}

MPT_TEST(the_report_tells_where_it_ran) {
    need_device();
    CHECK_RUNS(LENET "--epochs 1 --report r.json");
    CHECK_EQ_STR(report_value("r.json", "device"), "\"cuda\"");
    CHECK_EQ_STR(report_value("r.json", "backend"), "\"cuda\"");
    CHECK(!strncmp(report_value("r.json", "kernels"), "\"sm_", 4));
    CHECK_EQ_STR(report_value("r.json", "opt-level"), "\"O2\"");
    CHECK_EQ_STR(report_value("r.json", "steps"), "8");
    CHECK_EQ_STR(report_value("r.json", "val_count"), "25");
    CHECK(report_number("r.json", "staging") > 0);
    CHECK(report_number("r.json", "images_per_second") > 0);
    CHECK_RUNS(LENET "--epochs 1 --steps 1 --device cpu --report r.json");
    CHECK_EQ_STR(report_value("r.json", "backend"), "\"cpu\"");
    CHECK_EQ_STR(report_value("r.json", "staging"), "0");
}

/* The first step makes weights so large that nothing is finite any more: each step is skipped,
   until the scale can't go lower. The device says so when the next step has begun. */
MPT_TEST(skipped_steps_and_a_stuck_scale) {
    static const char *const devices[] = {"cpu", "cuda"};
    int i;

    need_device();
    for (i = 0; i < 2; i++) {
        CHECK_FAILS(1, "20 steps in a row were skipped at the smallest loss scale 1",
                    LENET LINES "--epochs 9 --precision fp16 --lr 1e9 --device %s > %s", devices[i],
                    devices[i]);
        CHECK_CONTAINS(run_err, ": conv1, output, element ");
        CHECK_CONTAINS(run_err, i ? "(in the step after it: " : "(here: ");
    }
    check_same_events("cpu", "cuda");
    CHECK_RUNS("grep -c '\"event\": \"skip\"' cuda");
    CHECK_EQ_STR(run_out, "35\n"); /* 65536 to 1, and 19 of the 20 */
}

/* The same where nothing comes after it: step 37 is the last. */
MPT_TEST(a_scale_that_is_stuck_with_the_last_step) {
    need_device();
    CHECK_FAILS(1, "(here: conv1, output, element ",
                LENET "--epochs 9 --precision fp16 --lr 1e9 --steps 37 --device cuda");
}

/* The last record of a file is damaged, so some steps come before it. */
MPT_TEST(a_failure_does_not_swallow_the_step_before) {
    static const char *const devices[] = {"cpu", "cuda"};
    double losses[MOST_STEPS];
    struct stat s;
    int i;

    need_device();
    CHECK(stat(work_file("train-00001-of-00003"), &s) == 0);
    flip_bit("train-00001-of-00003", (size_t)s.st_size - 100);
    for (i = 0; i < 2; i++)
        CHECK_FAILS(
            1, "record 19 at offset ",
            "$C --data train@3 -a lenet -b 4 --lr 0.02 -j 1 --epochs 1 --shuffle-buffer 1 " LINES
            "--device %s > %s",
            devices[i], devices[i]);
    check_same_events("cpu", "cuda");
    CHECK(read_losses("cuda", losses, MOST_STEPS) > 5);
}

/* ---- state ----------------------------------------------------------------------------------- */
MPT_TEST(a_run_that_was_stopped_goes_on_bit_for_bit) {
    static const int stops[] = {1, 5, 8, 11, 16};
    size_t i;

    need_device();
    CHECK_RUNS(LENET "--epochs 2 --report whole.json");
    for (i = 0; i < sizeof stops / sizeof stops[0]; i++) {
        CHECK_RUNS(LENET "--epochs 2 --steps %d --checkpoint-dir c --report r.json", stops[i]);
        CHECK_EQ_INT(report_number("r.json", "steps"), stops[i]);
        CHECK_EQ_STR(report_value("r.json", "val_count"), "25");
    }
    CHECK_SAME("whole.json", "r.json", "weights_sha256");
    CHECK_SAME("whole.json", "r.json", "val_loss");
    /* and what one device has begun, the other can take up */
    CHECK_RUNS(LENET "--epochs 3 --steps 20 --checkpoint-dir c --device cpu --report r.json");
    CHECK_EQ_STR(report_value("r.json", "steps"), "20");
}

MPT_TEST(a_signal_ends_the_run_with_a_checkpoint_of_all_steps) {
    int steps;

    need_device();
    CHECK_EQ_INT(run(LENET "--epochs 100000 --checkpoint-dir c --checkpoint-every-steps 2 "
                           "--report s.json & p=$!; while kill -0 $p && "
                           "[ ! -e c/checkpoint-000000002.safetensors ]; do sleep 0.02; done; "
                           "kill -TERM $p; wait $p"),
                 143);
    CHECK_CONTAINS(run_err, "stopped by signal 15");
    steps = (int)report_number("s.json", "steps");
    CHECK(steps >= 2);
    CHECK_RUNS("ls c/checkpoint-%09d.safetensors", steps);
    CHECK_RUNS(LENET "--epochs 100000 --checkpoint-dir c --steps %d --report a.json", steps + 3);
    CHECK_CONTAINS(run_out, "resumed: ");
    CHECK_RUNS(LENET "--epochs 100000 --steps %d --report b.json", steps + 3);
    CHECK_SAME("a.json", "b.json", "weights_sha256");
}

/* Weights that a device has trained are weights like any other. */
MPT_TEST(exported_weights_predict) {
    need_device();
    CHECK_RUNS(LENET "--epochs 2 --precision fp32 --report r.json --export w.safetensors");
    CHECK_RUNS("$C --val-data test@1 -a lenet -b 9 -e --num-classes 4 --init w.safetensors "
               "--precision fp32 --device cpu --report e.json");
    CHECK_SAME("r.json", "e.json", "weights_sha256");
    CHECK_NEAR(report_number("r.json", "val_loss"), report_number("e.json", "val_loss"), 1e-5);
    CHECK_RUNS("$P -w w.safetensors --data test@1 --json | tail -n 1");
    CHECK_NEAR(json_number(run_out, "accuracy"), report_number("r.json", "val_accuracy"), 1e-9);
}

MPT_TEST(predictions_of_a_device_are_those_of_the_cpu) {
    double cpu, cuda;

    need_device();
    if (!find_program("PREDICT_CUDA", "Q")) SKIP("PREDICT_CUDA names no predict built with CUDA");
    CHECK_RUNS(LENET "--epochs 1 --steps 3 --export w.safetensors");
    CHECK_RUNS("$Q -w w.safetensors --data test@1 --json --device cpu > a");
    CHECK_RUNS("$Q -w w.safetensors --data test@1 --json > b");
    CHECK_RUNS("head -n 1 a");
    cpu = json_number(run_out, "probability");
    CHECK_RUNS("head -n 1 b");
    cuda = json_number(run_out, "probability");
    CHECK_NEAR(cpu, cuda, 1e-5); /* FP32, as above */
    CHECK_RUNS("tail -n 1 a > x; tail -n 1 b | cmp - x; wc -l < b");
    CHECK_EQ_INT(atoi(run_out), 26);
}

/* ---- what a device can refuse ---------------------------------------------------------------- */
MPT_TEST(each_refusal_is_one_line_and_exit_code_1) {
    static const struct {
        const char *settings, *needle;
    } cases[] = {
        {"CUDA_ON_CPU_DEVICES=0", "train: no CUDA device: "},
        {"CUDA_ON_CPU_DRIVER=old", "train: the NVIDIA driver knows CUDA "},
        {"CUDA_ON_CPU_KERNELS=wrong_architecture", "train: kernels.cu was compiled for sm "},
        {"CUDA_ON_CPU_MEMORY=1000000", "cudaErrorMemoryAllocation"}, /* not even for cuBLAS */
    };
    size_t i;

    need_runner();
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        CHECK_FAILS(1, cases[i].needle, "%s " LENET "--epochs 1 --report r.json",
                    cases[i].settings);
        CHECK_EQ_STR(run_out, "");
        CHECK_RUNS(LENET "--epochs 1 --steps 1 --device cpu"); /* which needs none of that */
    }
}

/* Memory for the context and not for training: the line of the plan that did not fit is named, at
   whatever line that happens. */
MPT_TEST(memory_that_does_not_suffice_is_told_with_the_plan) {
    int megabytes, refused = 0;

    need_runner();
    for (megabytes = 5;
         run("CUDA_ON_CPU_MEMORY=%d00000 " LENET "--epochs 1 --steps 1", 10 * megabytes) != 0;
         megabytes++) {
        CHECK_EQ_INT(count_of(run_err, '\n'), 1);
        CHECK(megabytes < 64);
        refused += strstr(run_err, "train: no device memory for ") != NULL;
    }
    CHECK(refused > 0);
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(a_run_tells_the_same_as_on_the_cpu),
    MPT_TEST_CASE(lines_of_text_count_each_step_once),
    MPT_TEST_CASE(the_report_tells_where_it_ran),
    MPT_TEST_CASE(skipped_steps_and_a_stuck_scale),
    MPT_TEST_CASE(a_scale_that_is_stuck_with_the_last_step),
    MPT_TEST_CASE(a_failure_does_not_swallow_the_step_before),
    MPT_TEST_CASE(a_run_that_was_stopped_goes_on_bit_for_bit),
    MPT_TEST_CASE(a_signal_ends_the_run_with_a_checkpoint_of_all_steps),
    MPT_TEST_CASE(exported_weights_predict),
    MPT_TEST_CASE(predictions_of_a_device_are_those_of_the_cpu),
    MPT_TEST_CASE(each_refusal_is_one_line_and_exit_code_1),
    MPT_TEST_CASE(memory_that_does_not_suffice_is_told_with_the_plan),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
