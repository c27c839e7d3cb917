/* test_model.c - >>layers, >>model: wiring and its mistakes, fusing, the layout of memory, the zoo
   with the names, shapes and counts of torchvision */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "mpt_test.h"
#include "training.h"

typedef struct bench {
    mpt_ctx *ctx;
    mpt_model *m;
} bench;

static bench bench_open(int height, int width, int channels) {
    bench b = {NULL, NULL};
    CHECK_OK(NULL, mpt_ctx_create(NULL, &b.ctx));
    CHECK_OK(b.ctx, mpt_model_create(b.ctx, height, width, channels, &b.m));
    return b;
}

static void bench_close(bench *b) {
    mpt_model_destroy(b->m);
    mpt_ctx_destroy(b->ctx);
}

/* ---- mistakes in the wiring ------------------------------------------------------------------ */
static int conv(mpt_model *m, int x, int channels, int kernel, int stride, int padding) {
    return net_conv(m, x, channels, kernel, stride, padding, 0);
}

static int conv_without_desc(mpt_model *m) {
    return mpt_conv2d(m, MPT_INPUT, NULL);
}
static int conv_without_channels(mpt_model *m) {
    return conv(m, MPT_INPUT, 0, 3, 1, 1);
}
static int conv_with_too_many_channels(mpt_model *m) {
    return conv(m, MPT_INPUT, 65537, 3, 1, 1);
}
static int conv_with_huge_kernel(mpt_model *m) {
    return conv(m, MPT_INPUT, 4, 65, 1, 64);
}
static int conv_with_negative_kernel(mpt_model *m) {
    return conv(m, MPT_INPUT, 4, -3, 1, 1);
}
static int conv_with_negative_stride(mpt_model *m) {
    return conv(m, MPT_INPUT, 4, 3, -1, 1);
}
static int conv_with_negative_padding(mpt_model *m) {
    return conv(m, MPT_INPUT, 4, 3, 1, -1);
}
static int conv_larger_than_its_input(mpt_model *m) {
    return conv(m, mpt_relu(m, MPT_INPUT), 4, 9, 1, 0);
}
static int batchnorm_with_negative_epsilon(mpt_model *m) {
    mpt_batchnorm_desc d = {-1e-5f, 0, 0};
    return mpt_batchnorm(m, MPT_INPUT, &d);
}
static int batchnorm_with_nan_epsilon(mpt_model *m) {
    mpt_batchnorm_desc d = {mpti_f32_from_bits(0x7fc00000), 0, 0};
    return mpt_batchnorm(m, MPT_INPUT, &d);
}
static int batchnorm_with_momentum_above_1(mpt_model *m) {
    mpt_batchnorm_desc d = {0, 1.5f, 0};
    return mpt_batchnorm(m, MPT_INPUT, &d);
}
static int add_of_other_shapes(mpt_model *m) {
    return mpt_add(m, conv(m, MPT_INPUT, 4, 3, 2, 1), conv(m, MPT_INPUT, 4, 3, 1, 1));
}
static int add_of_other_channels(mpt_model *m) {
    return mpt_add(m, conv(m, MPT_INPUT, 4, 3, 1, 1), MPT_INPUT);
}
static int add_of_nothing(mpt_model *m) {
    return mpt_add(m, MPT_INPUT, -1);
}
static int relu_of_nothing(mpt_model *m) {
    return mpt_relu(m, -1);
}
static int relu_of_a_later_value(mpt_model *m) {
    return mpt_relu(m, 1);
}
static int add_of_a_later_value(mpt_model *m) {
    return mpt_add(m, MPT_INPUT, 7);
}
static int pool_without_kernel(mpt_model *m) {
    return mpt_max_pool(m, MPT_INPUT, 0, 2, 0);
}
static int pool_with_huge_kernel(mpt_model *m) {
    return mpt_avg_pool(m, MPT_INPUT, 17, 2, 8);
}
static int pool_without_stride(mpt_model *m) {
    return mpt_max_pool(m, MPT_INPUT, 2, 0, 0);
}
static int pool_with_too_much_padding(mpt_model *m) {
    return mpt_avg_pool(m, MPT_INPUT, 3, 2, 2);
}
static int pool_larger_than_its_input(mpt_model *m) {
    return mpt_max_pool(m, mpt_global_avg_pool(m, MPT_INPUT), 2, 2, 0);
}
static int dense_without_outputs(mpt_model *m) {
    return mpt_dense(m, MPT_INPUT, 0);
}
static int dense_with_too_many_outputs(mpt_model *m) {
    return mpt_dense(m, MPT_INPUT, (1 << 24) + 1);
}
static int dropout_of_everything(mpt_model *m) {
    return mpt_dropout(m, MPT_INPUT, 1);
}
static int dropout_of_less_than_nothing(mpt_model *m) {
    return mpt_dropout(m, MPT_INPUT, -0.1f);
}
static int dropout_of_nan(mpt_model *m) {
    return mpt_dropout(m, MPT_INPUT, mpti_f32_from_bits(0x7fc00000));
}
static int too_many_dropouts(mpt_model *m) {
    int i, x = MPT_INPUT;
    for (i = 0; i < 193; i++) x = mpt_dropout(m, x, 0.1f);
    return x;
}
static int too_many_layers(mpt_model *m) {
    int i, x = MPT_INPUT;
    for (i = 0; i < 10001; i++) x = mpt_relu(m, x);
    return x;
}
static int name_of_nothing(mpt_model *m) {
    return mpt_name(m, mpt_relu(m, MPT_INPUT), "");
}
static int name_of_64_bytes(mpt_model *m) {
    return mpt_name(m, mpt_relu(m, MPT_INPUT),
                    "0123456789012345678901234567890123456789012345678901234567890123");
}
static int network_that_is_not_there(mpt_model *m) {
    return mpt_zoo(m, "resnet19", 10);
}
static int zoo_without_classes(mpt_model *m) {
    return mpt_zoo(m, "lenet", 0);
}

typedef struct mistake {
    int (*wire)(mpt_model *m);
    const char *says[4]; /* the layer, the shapes or the range, the remedy */
} mistake;

static const mistake mistakes[] = {
    {conv_without_desc, {"layer 1 (conv2d)", "out_channels", "1 .. 65536"}},
    {conv_without_channels, {"layer 1 (conv2d)", "out_channels", "1 .. 65536"}},
    {conv_with_too_many_channels, {"layer 1 (conv2d)", "out_channels", "1 .. 65536"}},
    {conv_with_huge_kernel, {"layer 1 (conv2d)", "kernel", "1 .. 64"}},
    {conv_with_negative_kernel, {"layer 1 (conv2d)", "kernel", "1 .. 64"}},
    {conv_with_negative_stride, {"layer 1 (conv2d)", "stride", "1 .. 64"}},
    {conv_with_negative_padding, {"layer 1 (conv2d)", "padding", "0 .. 64"}},
    {conv_larger_than_its_input, {"layer 2 (conv2d)", "9 x 9", "(8,6,3)", "too small"}},
    {batchnorm_with_negative_epsilon, {"layer 1 (batchnorm)", "epsilon"}},
    {batchnorm_with_nan_epsilon, {"layer 1 (batchnorm)", "epsilon"}},
    {batchnorm_with_momentum_above_1, {"layer 1 (batchnorm)", "momentum", "0 .. 1"}},
    {add_of_other_shapes, {"layer 3 (add)", "(4,3,4)", "(8,6,4)", "1 x 1 convolution"}},
    {add_of_other_channels, {"layer 2 (add)", "(8,6,4)", "(8,6,3)", "1 x 1 convolution"}},
    {add_of_nothing, {"layer 1 (add)", "no value of this model", "MPT_INPUT"}},
    {relu_of_nothing, {"layer 1 (relu)", "no value of this model", "MPT_INPUT"}},
    {relu_of_a_later_value, {"layer 1 (relu)", "no value of this model", "MPT_INPUT"}},
    {add_of_a_later_value, {"layer 1 (add)", "no value of this model", "MPT_INPUT"}},
    {pool_without_kernel, {"layer 1 (max_pool)", "kernel", "1 .. 16"}},
    {pool_with_huge_kernel, {"layer 1 (avg_pool)", "kernel", "1 .. 16"}},
    {pool_without_stride, {"layer 1 (max_pool)", "stride", "1 .. 16"}},
    {pool_with_too_much_padding, {"layer 1 (avg_pool)", "padding", "kernel / 2"}},
    {pool_larger_than_its_input, {"layer 2 (max_pool)", "2 x 2", "(1,1,3)", "too small"}},
    {dense_without_outputs, {"layer 1 (dense)", "out_features", "2^24"}},
    {dense_with_too_many_outputs, {"layer 1 (dense)", "out_features", "2^24"}},
    {dropout_of_everything, {"layer 1 (dropout)", "p must be", "0 .. 1"}},
    {dropout_of_less_than_nothing, {"layer 1 (dropout)", "p must be", "0 .. 1"}},
    {dropout_of_nan, {"layer 1 (dropout)", "p must be", "0 .. 1"}},
    {too_many_dropouts, {"layer 193 (dropout)", "192"}},
    {too_many_layers, {"layer 10001 (relu)", "10000"}},
    {name_of_nothing, {"(relu)", "name", "1 .. 63"}},
    {name_of_64_bytes, {"(relu)", "name", "1 .. 63"}},
    {network_that_is_not_there, {"resnet19", "lenet", "resnet18", "resnet50"}},
    {zoo_without_classes, {"(dense)", "out_features"}},
};

/* The first mistake is what mpt_model_finish tells, whatever was called after it. */
MPT_TEST(each_mistake_sticks_and_is_explained) {
    size_t i, k;
    for (i = 0; i < sizeof mistakes / sizeof mistakes[0]; i++) {
        bench b = bench_open(8, 6, 3);
        int layers;
        CHECK_EQ_INT(mistakes[i].wire(b.m), -1);
        layers = mpt_model_num_layers(b.m);
        CHECK_EQ_INT(mpt_relu(b.m, -1), -1);
        CHECK_EQ_INT(mpt_dropout(b.m, MPT_INPUT, 2), -1);
        CHECK_EQ_INT(mpt_dense(b.m, MPT_INPUT, 5), -1);
        CHECK_EQ_INT(mpt_name(b.m, -1, "nothing"), -1);
        CHECK_EQ_INT(mpt_model_num_layers(b.m), layers);
        CHECK_RESULT(b.ctx, mpt_model_finish(b.m, -1), MPT_ERR_INVALID_ARGUMENT);
        for (k = 0; k < 4 && mistakes[i].says[k]; k++)
            CHECK_CONTAINS(mpt_last_error(b.ctx)->message, mistakes[i].says[k]);
        CHECK_RESULT(b.ctx, mpt_model_finish(b.m, 1), MPT_ERR_INVALID_ARGUMENT);
        CHECK_CONTAINS(mpt_last_error(b.ctx)->message, mistakes[i].says[0]);
        bench_close(&b);
    }
}

MPT_TEST(sizes_of_pictures_are_checked) {
    static const int sizes[][3] = {{0, 8, 3},     {8, -1, 3},    {8, 8, 0},
                                   {16385, 8, 3}, {8, 16385, 3}, {8, 8, 4097}};
    mpt_ctx *ctx = NULL;
    mpt_model *m = NULL;
    size_t i;
    CHECK_OK(NULL, mpt_ctx_create(NULL, &ctx));
    for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        CHECK_RESULT(ctx, mpt_model_create(ctx, sizes[i][0], sizes[i][1], sizes[i][2], &m),
                     MPT_ERR_INVALID_ARGUMENT);
        CHECK(m == NULL);
        CHECK_CONTAINS(mpt_last_error(ctx)->message, "1 .. 16384");
    }
    CHECK_EQ_INT(mpt_model_create(NULL, 8, 8, 3, &m), MPT_ERR_INVALID_ARGUMENT);
    mpt_model_destroy(NULL);
    mpt_ctx_destroy(ctx);
}

/* 2^28 numbers into a dense layer are allowed, a channel more is not. */
MPT_TEST(limits_of_dense_inputs) {
    bench b = bench_open(16384, 16384, 1);
    CHECK_EQ_INT(mpt_dense(b.m, MPT_INPUT, 1), 1);
    bench_close(&b);
    b = bench_open(16384, 16384, 2);
    CHECK_EQ_INT(mpt_dense(b.m, MPT_INPUT, 1), -1);
    CHECK_RESULT(b.ctx, mpt_model_finish(b.m, 1), MPT_ERR_INVALID_ARGUMENT);
    CHECK_CONTAINS(mpt_last_error(b.ctx)->message, "2^28");
    bench_close(&b);
}

/* ---- what finish refuses --------------------------------------------------------------------- */
static void check_finish(bench *b, int logits, mpt_result expected, const char *says) {
    CHECK_RESULT(b->ctx, mpt_model_finish(b->m, logits), expected);
    CHECK_CONTAINS(mpt_last_error(b->ctx)->message, says);
}

MPT_TEST(finish_refuses_what_is_no_classifier) {
    bench b = bench_open(8, 8, 3);
    int x = conv(b.m, MPT_INPUT, 4, 3, 1, 1), y, z;
    check_finish(&b, MPT_INPUT, MPT_ERR_INVALID_ARGUMENT, "(1,1,classes)");
    check_finish(&b, -1, MPT_ERR_INVALID_ARGUMENT, "(1,1,classes)");
    check_finish(&b, 2, MPT_ERR_INVALID_ARGUMENT, "(1,1,classes)");
    check_finish(&b, x, MPT_ERR_INVALID_ARGUMENT, "mpt_dense");
    y = mpt_dense(b.m, x, 5);
    z = mpt_relu(b.m, y);
    check_finish(&b, y, MPT_ERR_INVALID_ARGUMENT, "last layer");
    z = mpt_add(b.m, z, y);
    CHECK_OK(b.ctx, mpt_model_finish(b.m, z));
    check_finish(&b, z, MPT_ERR_INVALID_STATE, "finished already");
    bench_close(&b);
}

MPT_TEST(finish_refuses_what_nobody_reads) {
    bench b = bench_open(8, 8, 3);
    int x = mpt_name(b.m, conv(b.m, MPT_INPUT, 4, 3, 1, 1), "left over");
    check_finish(&b, mpt_dense(b.m, MPT_INPUT, 5), MPT_ERR_INVALID_ARGUMENT, "layer 1 (left over)");
    CHECK_EQ_INT(x, 1);
    bench_close(&b);
}

MPT_TEST(finish_refuses_what_learns_nothing) {
    bench b = bench_open(8, 8, 3);
    check_finish(&b, mpt_global_avg_pool(b.m, MPT_INPUT), MPT_ERR_INVALID_ARGUMENT,
                 "nothing to learn");
    bench_close(&b);
}

MPT_TEST(a_finished_model_cannot_be_changed) {
    rig_desc d = rig_small(small_net, 2);
    rig r = rig_open(&d);
    mpt_trainer *second = NULL;
    int layers = mpt_model_num_layers(r.model);
    CHECK_EQ_INT(mpt_relu(r.model, layers), -1);
    CHECK_EQ_INT(mpt_zoo(r.model, "lenet", 5), -1);
    CHECK_EQ_INT(mpt_model_num_layers(r.model), layers);
    CHECK_OK(r.ctx, mpt_trainer_create(r.model, &d.trainer, 2, &second)); /* it still works */
    mpt_trainer_destroy(second);
    rig_close(&r);
}

MPT_TEST(an_unfinished_model_trains_nothing) {
    bench b = bench_open(8, 8, 3);
    mpt_trainer_desc d;
    mpt_trainer *t = NULL;
    mpt_memory_plan plan;
    memset(&d, 0, sizeof d);
    d.optimizer.learning_rate = 0.1f;
    CHECK_RESULT(b.ctx, mpt_trainer_create(b.m, &d, 4, &t), MPT_ERR_INVALID_STATE);
    CHECK_CONTAINS(mpt_last_error(b.ctx)->message, "mpt_model_finish");
    CHECK_RESULT(b.ctx, mpt_model_plan(b.m, &d, 4, &plan), MPT_ERR_INVALID_STATE);
    CHECK_CONTAINS(mpt_last_error(b.ctx)->message, "mpt_model_finish");
    CHECK(t == NULL);
    bench_close(&b);
}

MPT_TEST(null_is_no_crash) {
    mpt_layer_info info;
    mpt_memory_plan plan;
    CHECK_EQ_INT(mpt_conv2d(NULL, 0, NULL), -1);
    CHECK_EQ_INT(mpt_batchnorm(NULL, 0, NULL), -1);
    CHECK_EQ_INT(mpt_relu(NULL, 0), -1);
    CHECK_EQ_INT(mpt_add(NULL, 0, 0), -1);
    CHECK_EQ_INT(mpt_max_pool(NULL, 0, 2, 2, 0), -1);
    CHECK_EQ_INT(mpt_avg_pool(NULL, 0, 2, 2, 0), -1);
    CHECK_EQ_INT(mpt_global_avg_pool(NULL, 0), -1);
    CHECK_EQ_INT(mpt_dense(NULL, 0, 5), -1);
    CHECK_EQ_INT(mpt_dropout(NULL, 0, 0.5f), -1);
    CHECK_EQ_INT(mpt_zoo(NULL, "lenet", 10), -1);
    CHECK_EQ_INT(mpt_name(NULL, 3, "x"), 3);
    CHECK_EQ_INT(mpt_model_finish(NULL, 1), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_model_layer(NULL, 0, &info), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_model_plan(NULL, NULL, 1, &plan), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_model_num_layers(NULL), 0);
    CHECK_EQ_INT(mpt_model_num_params(NULL), 0);
}

/* ---- shapes, parameters, names --------------------------------------------------------------- */
static void check_layer(bench *b, int x, int h, int w, int c, int64_t params, const char *kind) {
    mpt_layer_info info;
    CHECK_OK(b->ctx, mpt_model_layer(b->m, x - 1, &info));
    CHECK_EQ_INT(info.height, h);
    CHECK_EQ_INT(info.width, w);
    CHECK_EQ_INT(info.channels, c);
    CHECK_EQ_INT(info.num_params, params);
    CHECK_EQ_STR(info.kind, kind);
}

MPT_TEST(shapes_and_parameters_of_each_kind) {
    bench b = bench_open(11, 9, 3);
    int x = net_conv(b.m, MPT_INPUT, 7, 3, 2, 1, 1);
    check_layer(&b, x, 6, 5, 7, 7 * 9 * 3 + 7, "conv2d");
    check_layer(&b, x = net_conv(b.m, x, 4, 0, 0, 0, 0), 4, 3, 4, 4 * 9 * 7, "conv2d");
    check_layer(&b, x = mpt_batchnorm(b.m, x, NULL), 4, 3, 4, 8, "batchnorm");
    check_layer(&b, x = mpt_relu(b.m, x), 4, 3, 4, 0, "relu");
    check_layer(&b, x = mpt_add(b.m, x, x), 4, 3, 4, 0, "add");
    check_layer(&b, x = mpt_dropout(b.m, x, 0.5f), 4, 3, 4, 0, "dropout");
    check_layer(&b, x = mpt_max_pool(b.m, x, 3, 2, 1), 2, 2, 4, 0, "max_pool");
    check_layer(&b, x = mpt_avg_pool(b.m, x, 2, 1, 1), 3, 3, 4, 0, "avg_pool");
    check_layer(&b, x = mpt_dense(b.m, x, 6), 1, 1, 6, 36 * 6 + 6, "dense");
    check_layer(&b, x = mpt_global_avg_pool(b.m, x), 1, 1, 6, 0, "global_avg_pool");
    CHECK_EQ_INT(mpt_model_num_layers(b.m), 10);
    CHECK_EQ_INT(mpt_model_num_params(b.m), 7 * 27 + 7 + 4 * 63 + 8 + 36 * 6 + 6);
    CHECK_OK(b.ctx, mpt_model_finish(b.m, x));
    bench_close(&b);
}

MPT_TEST(layers_have_names) {
    bench b = bench_open(8, 8, 3);
    mpt_layer_info info;
    char longest[64];
    int x = conv(b.m, MPT_INPUT, 4, 3, 1, 1), y = conv(b.m, x, 4, 3, 1, 1), z = mpt_relu(b.m, y);
    CHECK_EQ_INT(mpt_name(b.m, y, "layer1.0.conv1"), y);
    CHECK_EQ_INT(mpt_name(b.m, 77, "nobody"), 77);
    CHECK_EQ_INT(mpt_name(b.m, MPT_INPUT, "nobody"), MPT_INPUT);
    CHECK_OK(b.ctx, mpt_model_layer(b.m, x - 1, &info));
    CHECK_EQ_STR(info.name, "conv2d0");
    CHECK_EQ_INT(info.inputs[0], MPT_INPUT);
    CHECK(info.num_inputs == 1 && info.kernel == 3 && info.stride == 1 && info.padding == 1);
    CHECK_OK(b.ctx, mpt_model_layer(b.m, y - 1, &info));
    CHECK_EQ_STR(info.name, "layer1.0.conv1");
    CHECK_EQ_INT(info.inputs[0], x);
    memset(longest, 'n', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    CHECK_EQ_INT(mpt_name(b.m, z, longest), z);
    CHECK_OK(b.ctx, mpt_model_layer(b.m, z - 1, &info));
    CHECK_EQ_STR(info.name, longest);
    CHECK_EQ_INT(mpt_model_layer(b.m, 3, &info), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_model_layer(b.m, -1, &info), MPT_ERR_INVALID_ARGUMENT);
    bench_close(&b);
}

/* Files know tensors by the names of their layers. */
MPT_TEST(names_are_unique) {
    bench b = bench_open(8, 8, 3);
    int x = mpt_name(b.m, conv(b.m, MPT_INPUT, 4, 3, 1, 1), "conv2d1");
    check_finish(&b, mpt_dense(b.m, conv(b.m, x, 4, 3, 1, 1), 5), MPT_ERR_INVALID_ARGUMENT,
                 "conv2d1");
    CHECK_CONTAINS(mpt_last_error(b.ctx)->message, "layers 1 and 2");
    mpt_name(b.m, x, "first");
    CHECK_OK(b.ctx, mpt_model_finish(b.m, 3));
    bench_close(&b);
}

/* ---- the summary ----------------------------------------------------------------------------- */
typedef struct lines {
    char text[16][200];
    int n;
} lines;

static void keep_line(const char *text, void *user) {
    lines *l = (lines *)user;
    CHECK(l->n < 16 && strlen(text) < 200 && !strchr(text, '\n'));
    snprintf(l->text[l->n++], sizeof l->text[0], "%s", text);
}

MPT_TEST(summary_has_a_line_for_each_layer_and_the_sums) {
    bench b = bench_open(8, 8, 3);
    lines l;
    int x = mpt_name(b.m, conv(b.m, MPT_INPUT, 4, 3, 2, 1), "stem");
    x = mpt_relu(b.m, mpt_batchnorm(b.m, x, NULL));
    CHECK_OK(b.ctx, mpt_model_finish(b.m, mpt_name(b.m, mpt_dense(b.m, x, 5), "fc")));
    l.n = 0;
    CHECK_OK(b.ctx, mpt_model_summary(b.m, 10, MPT_F16, keep_line, &l));
    CHECK_EQ_INT(l.n, 7); /* a heading, the picture, four layers, the sums */
    CHECK_CONTAINS(l.text[0], "parameters");
    CHECK_CONTAINS(l.text[1], "(8,8,3)");
    CHECK_CONTAINS(l.text[1], " 3840"); /* 10 pictures of 192 numbers of 2 bytes */
    CHECK_CONTAINS(l.text[2], "stem");
    CHECK_CONTAINS(l.text[2], "(4,4,4)");
    CHECK_CONTAINS(l.text[2], " 108 ");
    CHECK_CONTAINS(l.text[3], "fused");
    CHECK_CONTAINS(l.text[5], "fc");
    CHECK_CONTAINS(l.text[5], " 325 ");
    CHECK_CONTAINS(l.text[6], " 441 ");
    CHECK_CONTAINS(l.text[6], " 6500"); /* 10 * 2 * (192 + 64 + 64 + 5) */
    CHECK_EQ_INT(mpt_model_summary(b.m, 0, MPT_F16, keep_line, &l), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_model_summary(b.m, 1, (mpt_dtype)9, keep_line, &l), MPT_ERR_INVALID_ARGUMENT);
    CHECK_EQ_INT(mpt_model_summary(b.m, 1, MPT_F16, NULL, &l), MPT_ERR_INVALID_ARGUMENT);
    bench_close(&b);
}

/* ---- fusing ---------------------------------------------------------------------------------- */
static void check_fused(bench *b, const char *expected) { /* one letter a layer: f fused, . not */
    mpt_layer_info info;
    char got[64];
    int i, n = mpt_model_num_layers(b->m);
    for (i = 0; i < n; i++) {
        CHECK_OK(b->ctx, mpt_model_layer(b->m, i, &info));
        got[i] = info.fused ? 'f' : '.';
    }
    got[n] = 0;
    CHECK_EQ_STR(got, expected);
}

MPT_TEST(rows_of_batch_norm_add_and_relu_are_fused) {
    bench b = bench_open(8, 8, 3);
    int x, y, short_way;
    x = conv(b.m, MPT_INPUT, 4, 3, 1, 1);
    short_way = mpt_relu(b.m, mpt_batchnorm(b.m, x, NULL));         /* f. */
    y = mpt_batchnorm(b.m, conv(b.m, short_way, 4, 3, 1, 1), NULL); /* .f */
    y = mpt_relu(b.m, mpt_add(b.m, y, short_way));                  /* f. */
    x = mpt_batchnorm(b.m, conv(b.m, y, 4, 3, 1, 1), NULL);         /* .f */
    y = mpt_relu(b.m, mpt_add(b.m, y, x));                          /* f., from the right */
    CHECK_OK(b.ctx, mpt_model_finish(b.m, mpt_dense(b.m, y, 5)));
    check_fused(&b, ".f."
                    ".ff."
                    ".ff."
                    ".");
    bench_close(&b);
}

MPT_TEST(what_others_read_is_not_fused) {
    bench b = bench_open(8, 8, 3);
    int x = conv(b.m, MPT_INPUT, 4, 3, 1, 1), norm = mpt_batchnorm(b.m, x, NULL), y;
    y = mpt_add(b.m, mpt_relu(b.m, norm), norm); /* the batch norm has two readers */
    y = mpt_relu(b.m, y);                        /* an addition without a batch norm */
    norm = mpt_batchnorm(b.m, y, NULL);          /* y has two readers: no addition behind it */
    y = mpt_relu(b.m, mpt_add(b.m, norm, y));
    y = mpt_batchnorm(b.m, y, NULL); /* no ReLU behind */
    CHECK_OK(b.ctx, mpt_model_finish(b.m, mpt_dense(b.m, y, 5)));
    check_fused(&b, "..........");
    bench_close(&b);
}

/* ---- the layout of memory -------------------------------------------------------------------- */
typedef struct span {
    size_t begin, end;
} span;

static int apart(span a, span b) {
    return a.end <= b.begin || b.end <= a.begin;
}

/* The spans of a step's backward pass that hold something: gradients from their first writer to
   the step that reads them. Outputs and which elements were the largest are kept throughout. */
static void check_layout(const mpt_trainer *t) {
    const mpt_model *m = t->model;
    const mpti_layout *l = &t->net.layout;
    span kept[256], living[64];
    int num_kept = 0, num_living = 0, value[64], v, i, k, steps;
    int inputs[MPT_CUSTOM_MAX_INPUTS];
    for (v = 0; v < m->num_nodes; v++) {
        const mpti_place *p = &l->places[v];
        CHECK_EQ_INT(p->bytes, (size_t)t->net.capacity * (size_t)mpti_node_elements(&m->nodes[v]) *
                                   mpt_dtype_size(t->net.dtype));
        if (m->nodes[v].fused) continue;
        kept[num_kept].begin = p->value;
        kept[num_kept++].end = p->value + p->bytes;
        if (m->nodes[v].kind != MPTI_KIND_MAX_POOL) continue;
        kept[num_kept].begin = p->argmax;
        kept[num_kept++].end = p->argmax + p->bytes / mpt_dtype_size(t->net.dtype);
    }
    for (v = m->num_nodes - 1; v > 0; v--) {
        if (m->nodes[v].fused) continue;
        if (v == m->logits) value[num_living++] = v;
        steps = mpti_step_inputs(m, v, inputs);
        for (k = 0; k < steps; k++) {
            for (i = 0; i < num_living && value[i] != inputs[k]; i++) continue;
            if (inputs[k] > 0 && i == num_living) value[num_living++] = inputs[k];
        }
        for (i = 0; i < num_living; i++) {
            living[i].begin = l->places[value[i]].gradient;
            living[i].end = living[i].begin + l->places[value[i]].bytes;
            CHECK(living[i].end <= l->scratch);
            CHECK_EQ_INT(living[i].begin % MPTI_ALIGNMENT, 0);
            for (k = 0; k < i; k++) CHECK(apart(living[i], living[k]));
            for (k = 0; k < num_kept; k++) CHECK(apart(living[i], kept[k]));
        }
        for (i = 0; i < num_living && value[i] != v; i++) continue;
        CHECK(i < num_living); /* its gradient was there to be read */
        value[i] = value[--num_living];
    }
    for (i = 0; i < num_kept; i++)
        for (k = 0; k < i; k++) CHECK(apart(kept[i], kept[k]));
    for (i = 0; i < num_kept; i++) CHECK(kept[i].end <= l->scratch);
    CHECK(l->scratch <= l->activation_bytes);
    CHECK_EQ_INT(num_living, 0);
}

MPT_TEST(nothing_overlaps_what_is_still_needed) {
    static const char *const names[] = {"lenet", "mlp", "resnet20", "resnet56", "resnet50"};
    static const mpt_precision precisions[] = {MPT_PRECISION_FP32, MPT_PRECISION_FP16};
    size_t i, p;
    for (i = 0; i < sizeof names / sizeof names[0]; i++)
        for (p = 0; p < 2; p++) {
            rig_desc d = rig_zoo(names[i], 32, 3, 2);
            mpt_ctx *ctx = rig_ctx(&d);
            mpt_model *m = rig_model(ctx, &d);
            mpt_trainer t;
            memset(&t, 0, sizeof t);
            d.trainer.precision = precisions[p];
            CHECK_OK(ctx, mpti_trainer_prepare(&t, m, &d.trainer, 2));
            check_layout(&t);
            mpt_model_destroy(m);
            mpt_ctx_destroy(ctx);
        }
}

MPT_TEST(planning_keeps_no_memory) {
    rig_desc d = rig_zoo("resnet20", 32, 3, 8);
    mpt_test_allocator memory;
    mpt_memory_plan plan, half;
    mpt_ctx *ctx;
    mpt_model *m;
    int64_t live;
    mpt_test_allocator_init(&memory, 0, 0);
    d.allocator = &memory.hooks;
    ctx = rig_ctx(&d);
    m = rig_model(ctx, &d);
    live = memory.live_bytes;
    CHECK_OK(ctx, mpt_model_plan(m, &d.trainer, 8, &plan));
    CHECK_EQ_INT(memory.live_bytes, live);
    CHECK(plan.activations > plan.weights && plan.total > plan.activations);
    d.trainer.precision = MPT_PRECISION_FP16;
    CHECK_OK(ctx, mpt_model_plan(m, &d.trainer, 8, &half));
    CHECK(half.activations <= plan.activations / 2 + 64 * 64 * 4); /* places are multiples of 64 */
    CHECK_EQ_INT(half.master_weights, plan.weights);
    CHECK_RESULT(ctx, mpt_model_plan(m, &d.trainer, 0, &plan), MPT_ERR_INVALID_ARGUMENT);
    mpt_model_destroy(m);
    mpt_ctx_destroy(ctx);
    CHECK_NO_LEAK(&memory);
}

/* ---- the zoo --------------------------------------------------------------------------------- */
/* Counts: resnet20's is that of the state dict in tests/data, resnet18's to resnet50's are
   torchvision's; the others follow from their definition. */
MPT_TEST(parameter_counts_of_the_zoo) {
    static const struct {
        const char *name;
        int size, channels, classes;
        int64_t params;
    } nets[] = {
        {"lenet", 28, 1, 10, 421642},         {"mlp", 28, 1, 10, 235146},
        {"resnet20", 32, 3, 10, 272474},      {"resnet32", 32, 3, 10, 466906},
        {"resnet56", 32, 3, 10, 855770},      {"resnet18", 224, 3, 1000, 11689512},
        {"resnet34", 224, 3, 1000, 21797672}, {"resnet50", 224, 3, 1000, 25557032},
    };
    size_t i;
    for (i = 0; i < sizeof nets / sizeof nets[0]; i++) {
        bench b = bench_open(nets[i].size, nets[i].size, nets[i].channels);
        CHECK_OK(b.ctx, mpt_model_finish(b.m, mpt_zoo(b.m, nets[i].name, nets[i].classes)));
        CHECK_EQ_INT(mpt_model_num_params(b.m), nets[i].params);
        bench_close(&b);
    }
}

static void check_shape(mpti_json *j, const mpt_safetensors_info *info) {
    char dtype[16];
    int64_t dim;
    int n = 0;
    mpti_json_array(j);
    CHECK(mpti_json_item(j) && mpti_json_string(j, dtype, sizeof dtype));
    CHECK_EQ_STR(info->dtype_name, !strcmp(dtype, "int64") ? "I64" : "F32");
    CHECK(mpti_json_item(j));
    mpti_json_array(j);
    while (mpti_json_item(j)) {
        CHECK(mpti_json_int64(j, &dim) && n < info->num_dims);
        CHECK_EQ_INT(info->dims[n++], dim);
    }
    CHECK_EQ_INT(n, info->num_dims);
    CHECK(!mpti_json_item(j));
}

/* Every name, type and shape of torchvision's state dict is in the file, and nothing more. */
static void check_state_dict(mpt_ctx *ctx, mpti_json *j, const char *path) {
    mpt_safetensors *s = NULL;
    mpt_safetensors_desc d;
    mpt_safetensors_info info;
    char name[128];
    int64_t n = 0, index;
    memset(&d, 0, sizeof d);
    d.path = path;
    CHECK_OK(ctx, mpt_safetensors_open(ctx, &d, &s));
    mpti_json_object(j);
    while (mpti_json_key(j, name, sizeof name)) {
        index = mpt_safetensors_find(s, name);
        if (index < 0) mpt_test_fail(__FILE__, __LINE__, "%s is not in the file", name);
        CHECK_OK(ctx, mpt_safetensors_get(s, index, &info));
        check_shape(j, &info);
        n++;
    }
    CHECK_EQ_INT(mpt_safetensors_count(s), n);
    CHECK_EQ_STR(mpt_safetensors_metadata(s, "format"), "pt"); /* PyTorch's tools look for it */
    mpt_safetensors_close(s);
}

MPT_TEST(exports_have_the_names_and_shapes_of_torchvision) {
    size_t size;
    unsigned char *text = mpt_test_read_file(mpt_test_data("torchvision_state_dicts.json"), &size);
    char name[32], path[1024];
    mpt_export_desc export;
    mpti_json j;
    int found = 0;
    memset(&j, 0, sizeof j);
    j.p = (const char *)text;
    j.end = j.p + size;
    mpti_json_object(&j);
    while (mpti_json_key(&j, name, sizeof name)) {
        rig_desc d = rig_zoo(name, 32, 3, 1); /* shapes don't depend on the picture's size */
        rig r;
        d.classes = 1000;
        d.trainer.optimizer.kind = MPT_OPTIMIZER_SGD;
        r = rig_open(&d);
        snprintf(path, sizeof path, "%s", mpt_test_tmpfile("export.safetensors"));
        memset(&export, 0, sizeof export);
        export.path = path;
        CHECK_OK(r.ctx, mpt_trainer_export(r.trainer, &export));
        check_state_dict(r.ctx, &j, path);
        rig_close(&r);
        unlink(path);
        found++;
    }
    CHECK(found == 3 && !j.bad);
    free(text);
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(each_mistake_sticks_and_is_explained),
    MPT_TEST_CASE(sizes_of_pictures_are_checked),
    MPT_TEST_CASE(limits_of_dense_inputs),
    MPT_TEST_CASE(finish_refuses_what_is_no_classifier),
    MPT_TEST_CASE(finish_refuses_what_nobody_reads),
    MPT_TEST_CASE(finish_refuses_what_learns_nothing),
    MPT_TEST_CASE(a_finished_model_cannot_be_changed),
    MPT_TEST_CASE(an_unfinished_model_trains_nothing),
    MPT_TEST_CASE(null_is_no_crash),
    MPT_TEST_CASE(shapes_and_parameters_of_each_kind),
    MPT_TEST_CASE(layers_have_names),
    MPT_TEST_CASE(names_are_unique),
    MPT_TEST_CASE(summary_has_a_line_for_each_layer_and_the_sums),
    MPT_TEST_CASE(rows_of_batch_norm_add_and_relu_are_fused),
    MPT_TEST_CASE(what_others_read_is_not_fused),
    MPT_TEST_CASE(nothing_overlaps_what_is_still_needed),
    MPT_TEST_CASE(planning_keeps_no_memory),
    MPT_TEST_CASE(parameter_counts_of_the_zoo),
    MPT_TEST_CASE(exports_have_the_names_and_shapes_of_torchvision),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
