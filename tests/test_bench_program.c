/* The program bench, its kinds on networks: what is measured is told right, whatever the time. Its
   kinds on data are run by test_tfrecord_program.c. */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "program.h"

/* Line `n` of the last run's output, from 0, in one of two buffers used in turn; "" beyond. */
static const char *line_of(int n) {
    static char lines[2][2000];
    static int turn;
    const char *at = run_out, *end;
    char *line = lines[turn++ % 2];

    for (; n > 0 && at; n--) at = strchr(at, '\n') ? strchr(at, '\n') + 1 : NULL;
    end = at ? strchr(at, '\n') : NULL;
    snprintf(line, sizeof lines[0], "%.*s", end ? (int)(end - at) : 0, end ? at : "");
    return line;
}

/* lenet on 8 x 8 x 1, classes 5, one picture forward: conv1 8*8*9*32, conv2 4*4*9*32*64, fc1
   2*2*64*128, fc2 128*5. All but conv1 have three products of that size in a step, conv1 two. */
enum { CONV1 = 8 * 8 * 9 * 32, CONV2 = 4 * 4 * 9 * 32 * 64, FC1 = 2 * 2 * 64 * 128, FC2 = 128 * 5 };

MPT_TEST(step_tells_what_it_did) {
    static const char *const precisions[] = {"fp32", "fp16", "bf16"};
    double rate;
    int i;

    fresh_directory();
    for (i = 0; i < 3; i++) {
        CHECK_RUNS("$B step --arch lenet --image-size 8 --num-classes 5 -b 6 -j 2 --rounds 2 "
                   "--precision %s --json",
                   precisions[i]);
        CHECK_EQ_INT(count_of(run_out, '\n'), 2);
        CHECK_CONTAINS(run_out, precisions[i]);
        CHECK_CONTAINS(run_out, "\"backend\":\"cpu\",\"kernels\":\"");
        CHECK(json_number(run_out, "multiply_adds_per_image") ==
              2.0 * CONV1 + 3.0 * (CONV2 + FC1 + FC2));
        rate = json_number(run_out, "median_images_per_second");
        CHECK(rate > 0 && json_number(run_out, "best_images_per_second") >= rate);
        CHECK_NEAR(json_number(run_out, "seconds_per_step") * rate, 6, 1e-3);
        CHECK_NEAR(json_number(run_out, "flops_per_second") / rate /
                       json_number(run_out, "multiply_adds_per_image"),
                   2, 1e-3);
        CHECK_NEAR(json_number(run_out, "ratio_of_medians") *
                       json_number(run_out, "median_flops_per_second") /
                       json_number(run_out, "flops_per_second"),
                   1, 0.05); /* the ratio has four digits behind the point */
        CHECK(json_number(run_out, "loss") >= 0 && json_number(run_out, "planned_bytes") > 0);
        CHECK(fmod(json_number(run_out, "work"), 6) == 0);
    }
    CHECK_RUNS("$B step -a mlp --image-size 4 --channels 3 -b 2 --rounds 1");
    CHECK_CONTAINS(run_out, "mlp, batch 2, fp16");
    CHECK_CONTAINS(run_out, "of the FMA peak");
    CHECK_CONTAINS(run_out, " ms a step, ");
}

MPT_TEST(layers_tell_each_operator) {
    static const char *const cases[] = {
        "conv1 fprop", "conv1 wgrad", "max_pool0 forward", "max_pool0 backward", "conv2 fprop",
        "conv2 dgrad", "conv2 wgrad", "max_pool1 forward", "max_pool1 backward", "fc1 fprop",
        "fc1 dgrad",   "fc1 wgrad",   "fc2 fprop",         "fc2 dgrad",          "fc2 wgrad"};
    enum { NUM_CASES = sizeof cases / sizeof cases[0] };
    double forward = 0, backward = 0;
    char name[100];
    int i;

    fresh_directory();
    CHECK_RUNS("$B layers --arch lenet --image-size 8 --num-classes 5 -b 6 --rounds 1 --json");
    for (i = 0; i < NUM_CASES; i++) {
        double seconds = json_number(line_of(i), "seconds");
        snprintf(name, sizeof name, "\"case\":\"%s\"", cases[i]);
        CHECK_CONTAINS(line_of(i), name);
        CHECK_EQ_INT((int)json_number(line_of(i), "count"), 1);
        CHECK(seconds > 0 && json_number(line_of(i), "ratio_of_medians") >= 0);
        if (strstr(cases[i], "fprop") || strstr(cases[i], "forward")) forward += seconds;
        else backward += seconds;
    }
    CHECK_CONTAINS(line_of(NUM_CASES), "FP32 multiply-adds in registers");
    CHECK_CONTAINS(line_of(NUM_CASES + 1), "copy memory");
    CHECK_NEAR(json_number(line_of(NUM_CASES + 2), "forward_seconds") / forward, 1, 1e-4);
    CHECK_NEAR(json_number(line_of(NUM_CASES + 2), "backward_seconds") / backward, 1, 1e-4);
    CHECK_EQ_INT(count_of(run_out, '\n'), NUM_CASES + 3);
    CHECK_CONTAINS(line_of(4), "\"kind\":\"conv2d\",\"direction\":\"fprop\"");
    CHECK_CONTAINS(line_of(4), "\"output\":[6,4,4,64]");
    CHECK(fmod(json_number(line_of(4), "work"), 2.0 * 6 * CONV2) == 0);
}

/* Layers of one shape are measured once; batch norms with and without a shortcut are two shapes. */
MPT_TEST(layers_count_those_of_one_shape) {
    fresh_directory();
    CHECK_RUNS("$B layers --arch resnet20 --image-size 8 -b 2 --rounds 1 --precision fp32");
    CHECK_CONTAINS(run_out, "layer1.0.conv1 fprop (x 6)");
    CHECK_CONTAINS(run_out, "bn1 forward (x 4)");
    CHECK_CONTAINS(run_out, "layer1.0.bn2 backward (x 3)");
    CHECK_CONTAINS(run_out, "layer3.0.downsample.1 forward ");
    CHECK_CONTAINS(run_out, "global_avg_pool0 backward");
    CHECK_CONTAINS(run_out, "all of resnet20, batch 2, fp32: forward ");
    CHECK(!strstr(run_out, "layers   conv1 dgrad")); /* nobody reads the gradient of a picture */
}

MPT_TEST(wrong_networks_are_told) {
    fresh_directory();
    CHECK_FAILS(2, "--arch: 'alexnet' is none of lenet|", "$B step --arch alexnet");
    CHECK_FAILS(2, "--precision: 'fp8'", "$B layers --precision fp8");
    CHECK_FAILS(2, "--batch-size: '0'", "$B step -b 0");
    CHECK_FAILS(2, "--device: 'tpu' is none of cpu|cuda", "$B step --device tpu");
    CHECK_FAILS(2, "bench step: --device cuda: this program was built without CUDA",
                "$B step --device cuda");
    CHECK_FAILS(2, "bench layers: --device cuda: this", "$B layers --device cuda");
    CHECK_FAILS(2, "unknown option --device", "$B crc --device cpu");
    CHECK_FAILS(2, "unknown option --megabytes", "$B step --megabytes 3");
    CHECK_FAILS(1, "the picture is too small", "$B step --arch lenet --image-size 2");
    CHECK_FAILS(1, "the picture is too small", "$B layers --arch lenet --image-size 2");
    CHECK_FAILS(1, "no space left",
                "$B step -a mlp --image-size 4 -b 2 --rounds 1 --json >/dev/full");
    CHECK_RUNS("$B step --help");
    CHECK_CONTAINS(run_out, "--batch-size");
    CHECK_RUNS("$B --help");
    CHECK_CONTAINS(run_out, "layers ");
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(step_tells_what_it_did),
    MPT_TEST_CASE(layers_tell_each_operator),
    MPT_TEST_CASE(layers_count_those_of_one_shape),
    MPT_TEST_CASE(wrong_networks_are_told),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
