/* test_gradients.c - >>layers, >>train: the gradient that mpt_trainer_accumulate leaves, of every
   kind of layer and of whole graphs, against double precision, which is held against finite
   differences */
#define MPTRAIN_IMPLEMENTATION
#include "mptrain.h"

#include "mpt_test.h"
#include "training.h"
#include "double_net.h"

/* ---- nets, each for one thing ---------------------------------------------------------------- */
static int conv(mpt_model *m, int x, int channels, int kernel, int stride, int padding) {
    return net_conv(m, x, channels, kernel, stride, padding, 0);
}

static int logits_of(mpt_model *m, int x) {
    return mpt_dense(m, mpt_global_avg_pool(m, x), 5);
}

static int dense_net(mpt_model *m) {
    return mpt_dense(m, mpt_dense(m, MPT_INPUT, 7), 5);
}
static int conv_net(mpt_model *m) {
    return mpt_dense(m, conv(m, conv(m, MPT_INPUT, 4, 3, 1, 1), 6, 3, 1, 0), 5);
}
static int stride_net(mpt_model *m) {
    return mpt_dense(m, conv(m, conv(m, MPT_INPUT, 4, 3, 2, 1), 6, 2, 2, 0), 5);
}
static int wide_padding_net(mpt_model *m) {
    return mpt_dense(m, conv(m, conv(m, MPT_INPUT, 4, 5, 3, 3), 6, 1, 2, 1), 5);
}
static int bias_net(mpt_model *m) {
    return mpt_dense(m, net_conv(m, net_conv(m, MPT_INPUT, 4, 3, 1, 1, 1), 6, 1, 2, 0, 1), 5);
}
static int relu_net(mpt_model *m) {
    return mpt_dense(m, mpt_relu(m, conv(m, mpt_relu(m, MPT_INPUT), 4, 3, 1, 1)), 5);
}
static int batchnorm_net(mpt_model *m) {
    return mpt_dense(m, mpt_batchnorm(m, conv(m, MPT_INPUT, 4, 3, 1, 1), NULL), 5);
}
static int batchnorm_first_net(mpt_model *m) { /* its gradient of the picture is for nobody */
    return logits_of(m, mpt_relu(m, conv(m, mpt_batchnorm(m, MPT_INPUT, NULL), 6, 3, 1, 1)));
}
static int batchnorm_relu_net(mpt_model *m) {
    int x = mpt_relu(m, mpt_batchnorm(m, conv(m, MPT_INPUT, 6, 3, 1, 1), NULL));
    return logits_of(m, conv(m, x, 4, 3, 2, 1));
}
static int batchnorm_1x1_net(mpt_model *m) { /* statistics over as many numbers as records */
    int x = mpt_dense(m, MPT_INPUT, 9);
    return mpt_dense(m, mpt_relu(m, mpt_batchnorm(m, x, NULL)), 5);
}
static int residual_net(mpt_model *m) {
    int x = conv(m, MPT_INPUT, 6, 3, 1, 1);
    int y = mpt_batchnorm(m, conv(m, x, 6, 3, 1, 1), NULL);
    return logits_of(m, mpt_relu(m, mpt_add(m, x, y)));
}
static int residual_of_the_picture_net(mpt_model *m) {
    int y = mpt_batchnorm(m, conv(m, MPT_INPUT, 3, 3, 1, 1), NULL);
    return logits_of(m, mpt_relu(m, mpt_add(m, y, MPT_INPUT)));
}
static int residual_of_the_normed_net(mpt_model *m) { /* x has two readers: not fused */
    int x = conv(m, MPT_INPUT, 6, 3, 1, 1);
    return logits_of(m, mpt_relu(m, mpt_add(m, mpt_batchnorm(m, x, NULL), x)));
}
static int residual_with_more_readers_net(mpt_model *m) { /* both sides have gradients before */
    int x = conv(m, MPT_INPUT, 6, 3, 1, 1), y = mpt_relu(m, conv(m, MPT_INPUT, 6, 3, 1, 1));
    int z = mpt_relu(m, mpt_add(m, mpt_batchnorm(m, x, NULL), y));
    return logits_of(m, mpt_add(m, mpt_add(m, z, x), y));
}
static int add_net(mpt_model *m) {
    int x = conv(m, MPT_INPUT, 4, 3, 1, 1);
    return logits_of(m, mpt_add(m, mpt_add(m, x, conv(m, x, 4, 3, 1, 1)), x));
}
static int add_of_the_same_net(mpt_model *m) {
    int x = conv(m, mpt_add(m, MPT_INPUT, MPT_INPUT), 4, 3, 1, 1);
    x = mpt_add(m, x, x);
    return logits_of(m, mpt_relu(m, mpt_add(m, x, x)));
}
static int max_pool_net(mpt_model *m) {
    int x = mpt_max_pool(m, conv(m, MPT_INPUT, 4, 3, 1, 1), 2, 2, 0);
    return mpt_dense(m, mpt_max_pool(m, conv(m, x, 6, 3, 1, 1), 3, 2, 1), 5);
}
static int avg_pool_net(mpt_model *m) {
    int x = mpt_avg_pool(m, conv(m, MPT_INPUT, 4, 3, 1, 1), 2, 2, 0);
    return mpt_dense(m, mpt_avg_pool(m, conv(m, x, 6, 3, 1, 1), 3, 2, 1), 5);
}
static int pool_of_the_picture_net(mpt_model *m) {
    int x = mpt_avg_pool(m, mpt_max_pool(m, MPT_INPUT, 2, 1, 0), 2, 1, 1);
    return logits_of(m, conv(m, mpt_dropout(m, x, 0.25f), 6, 3, 1, 1));
}
static int dropout_net(mpt_model *m) {
    int x = mpt_dropout(m, mpt_relu(m, conv(m, MPT_INPUT, 6, 3, 2, 1)), 0.5f);
    return mpt_dense(m, mpt_dropout(m, mpt_dense(m, x, 12), 0.2f), 5);
}
static int two_readers_net(mpt_model *m) {
    int x = mpt_relu(m, mpt_batchnorm(m, conv(m, MPT_INPUT, 6, 3, 1, 1), NULL));
    return mpt_add(m, logits_of(m, conv(m, x, 4, 3, 1, 1)), logits_of(m, mpt_relu(m, x)));
}
static int three_readers_net(mpt_model *m) {
    int x = conv(m, MPT_INPUT, 6, 3, 2, 1), y = mpt_batchnorm(m, x, NULL);
    int a = mpt_max_pool(m, y, 2, 2, 0), b = mpt_avg_pool(m, y, 2, 2, 0), c;
    c = mpt_relu(m, mpt_batchnorm(m, conv(m, y, 6, 2, 2, 0), NULL));
    return mpt_dense(m, mpt_add(m, mpt_add(m, a, b), c), 5);
}

typedef struct named_net {
    const char *name;
    net_fn net;
    float label_smoothing;
} named_net;

static const named_net nets[] = {
    {"dense", dense_net, 0},
    {"dense, label smoothing", dense_net, 0.1f},
    {"convolution", conv_net, 0},
    {"convolution, stride", stride_net, 0},
    {"convolution, padding beyond the kernel's half", wide_padding_net, 0},
    {"convolution, bias", bias_net, 0},
    {"relu", relu_net, 0.3f},
    {"batch norm", batchnorm_net, 0},
    {"batch norm of the picture", batchnorm_first_net, 0},
    {"batch norm, relu", batchnorm_relu_net, 0.1f},
    {"batch norm of a dense layer", batchnorm_1x1_net, 0},
    {"batch norm, add, relu", residual_net, 0},
    {"batch norm, add of the picture, relu", residual_of_the_picture_net, 0},
    {"batch norm, add of what was normed, relu", residual_of_the_normed_net, 0},
    {"batch norm, add, relu, all read again", residual_with_more_readers_net, 0},
    {"add", add_net, 0},
    {"add of a value to itself", add_of_the_same_net, 0},
    {"max pool", max_pool_net, 0},
    {"average pool", avg_pool_net, 0},
    {"pools and dropout of the picture", pool_of_the_picture_net, 0},
    {"dropout", dropout_net, 0},
    {"a value with two readers", two_readers_net, 0},
    {"a value with three readers", three_readers_net, 0},
    {"the small residual net", small_net, 0.1f},
    {"the small net without batch norm", plain_net, 0},
};
enum { BATCH = 6 };

/* A rig whose parameters are all different from their initial 0 and 1, and exact in 16 bits, so
   that every precision starts from the same numbers. */
static rig open_scattered(const rig_desc *d) {
    rig r = rig_open(d);
    uint64_t state = 3;
    int64_t i;
    if (!r.trainer) return r;
    for (i = 0; i < r.model->num_params; i++) {
        float *w = &r.trainer->masters[i];
        *w += 0.25f * pictures_random(&state);
        *w = mpt_bf16_to_f32(mpt_f32_to_bf16(*w));
    }
    CHECK_OK(r.ctx, mpti_trainer_weights_changed(r.trainer));
    return r;
}

static rig_desc desc_of(const named_net *net) {
    rig_desc d = rig_small(net->net, BATCH);
    d.trainer.label_smoothing = net->label_smoothing;
    d.trainer.seed = 11;
    return d;
}

/* ---- double precision against finite differences --------------------------------------------- */
static void check_finite_differences(const named_net *which) {
    const double h = 1e-6; /* the best: its cube is lost to curvature, 1e-16 / h to rounding */
    rig_desc d = desc_of(which);
    rig r = open_scattered(&d);
    pictures p = pictures_make(&d, BATCH, 1);
    mpt_batch b = pictures_batch(&p, 0, BATCH);
    double_net net = double_net_open(r.trainer);
    double *grads = (double *)malloc((size_t)r.model->num_params * sizeof *grads);
    int64_t i;
    double_net_forward(&net, &b, NULL);
    double_net_backward(&net);
    memcpy(grads, net.grads, (size_t)r.model->num_params * sizeof *grads);
    for (i = 0; i < r.model->num_params; i += 1 + i / 40) {
        const double w = net.params[i];
        double up, down;
        net.params[i] = w + h;
        double_net_forward(&net, &b, NULL);
        up = net.loss;
        net.params[i] = w - h;
        double_net_forward(&net, &b, NULL);
        down = net.loss;
        net.params[i] = w;
        if (!(fabs((up - down) / (2 * h) - grads[i]) <= 1e-8 + 1e-6 * fabs(grads[i])))
            mpt_test_fail(__FILE__, __LINE__, "%s: parameter %lld: %.9g, by differences %.9g",
                          which->name, (long long)i, grads[i], (up - down) / (2 * h));
    }
    free(grads);
    double_net_close(&net);
    pictures_free(&p);
    rig_close(&r);
}

MPT_TEST(double_precision_agrees_with_finite_differences) {
    int i;
    for (i = 0; i < COUNT(nets); i++) check_finite_differences(&nets[i]);
}

/* ---- the trainer against double precision ---------------------------------------------------- */

/* Each layer's gradient within `share` of its largest magnitude, or of a hundredth of the largest
   of all: the bias before a batch norm has none but rounding. */
static void check_gradients(const char *what, const double_net *net, const float *row,
                            double factor, double share) {
    const mpt_model *m = net->m;
    double most = 0;
    int64_t i;
    int v;
    for (i = 0; i < m->num_params; i++) most = fmax(most, fabs(net->grads[i]));
    for (v = 1; v < m->num_nodes; v++) {
        const mpti_node *o = &m->nodes[v];
        double largest = most / 100;
        for (i = 0; i < o->num_params; i++)
            largest = fmax(largest, fabs(net->grads[o->param_offset + i]));
        for (i = 0; i < o->num_params; i++) {
            const double got = row[o->param_offset + i] * factor;
            const double expected = net->grads[o->param_offset + i];
            if (!(fabs(got - expected) <= share * largest))
                mpt_test_fail(__FILE__, __LINE__,
                              "%s: %s, parameter %lld: %.9g, not %.9g: off by %.2g of the largest",
                              what, o->name, (long long)i, got, expected,
                              fabs(got - expected) / largest);
        }
    }
}

/* Returns 0 if this processor lacks the family. */
static int check_net(const named_net *which, const char *family, mpt_precision precision,
                     double share) {
    rig_desc d = desc_of(which);
    char what[160];
    pictures p;
    mpt_batch b;
    double_net net;
    rig r;
    d.family = family;
    d.trainer.precision = precision;
    d.trainer.loss_scaler.mode = MPT_LOSS_SCALE_STATIC;
    d.trainer.loss_scaler.init_scale = 1024;
    r = open_scattered(&d);
    if (!r.trainer) return 0;
    p = pictures_make(&d, BATCH, 1);
    b = pictures_batch(&p, 0, BATCH);
    net = double_net_open(r.trainer);
    CHECK_OK(r.ctx, mpt_trainer_accumulate(r.trainer, &b));
    double_net_forward(&net, &b, r.trainer);
    double_net_backward(&net);
    snprintf(what, sizeof what, "%s (%s, precision %d)", which->name, family ? family : "default",
             (int)precision);
    CHECK_NEAR(r.trainer->stats.loss / BATCH, net.loss, share * 0.3);
    check_gradients(what, &net, gradient_row(r.trainer), gradient_factor(r.trainer), share);
    CHECK(net.largest_flip <= 10 * share); /* only near a tie does rounding choose */
    double_net_close(&net);
    pictures_free(&p);
    rig_close(&r);
    return 1;
}

/* Sums of up to some hundred terms, each rounded to 2^-24, through up to ten layers. */
MPT_TEST(fp32_gradients_in_every_family) {
    static const char *const families[] = {"definition", "plain", "avx2"};
    int i, f;
    for (i = 0; i < COUNT(nets); i++)
        for (f = 0; f < COUNT(families); f++)
            if (!check_net(&nets[i], families[f], MPT_PRECISION_FP32, 2e-5))
                CHECK_EQ_STR(families[f], "avx2");
}

/* Values between layers are rounded to 2^-11 of themselves; some of the errors add up. FP16_CAST
   rounds what convolutions and dense layers multiply, and what they give. */
MPT_TEST(fp16_gradients) {
    static const mpt_precision precisions[] = {MPT_PRECISION_FP16, MPT_PRECISION_FP16_CAST,
                                               MPT_PRECISION_FP16_PURE};
    int i, k;
    for (k = 0; k < COUNT(precisions); k++)
        for (i = 0; i < COUNT(nets); i++) check_net(&nets[i], NULL, precisions[k], 1e-2);
}

MPT_TEST(bf16_gradients) { /* eight times as coarse */
    int i;
    for (i = 0; i < COUNT(nets); i++) check_net(&nets[i], NULL, MPT_PRECISION_BF16, 8e-2);
}

/* ---- graphs of any form ---------------------------------------------------------------------- */
static uint64_t graph_seed; /* of random_net */

static int graph_random(int n) {
    graph_seed = graph_seed * 6364136223846793005u + 1442695040888963407u;
    return (int)((graph_seed >> 33) % (uint64_t)n);
}

/* A layer that keeps the shape (8,8,4), and reads x and perhaps y. */
static int random_layer(mpt_model *m, int x, int y) {
    switch (graph_random(7)) {
    case 0: return conv(m, x, 4, 3, 1, 1);
    case 1: return net_conv(m, x, 4, 1, 1, 0, 1);
    case 2: return mpt_batchnorm(m, x, NULL);
    case 3: return mpt_relu(m, x);
    case 4: return mpt_add(m, x, y);
    case 5: return mpt_max_pool(m, x, 3, 1, 1);
    default: return mpt_dropout(m, x, 0.25f);
    }
}

/* Twelve layers, each reading one or two of the four latest values; rows that fuse and rows that
   almost do come up by themselves. What nobody has read is added in at the end. */
static int random_net(mpt_model *m) {
    int values[16], read[16] = {0}, n = 1, i, x, y;
    values[0] = conv(m, MPT_INPUT, 4, 3, 1, 1);
    for (; n < 13; n++) {
        x = n - 1 - graph_random(n < 4 ? n : 4);
        y = n - 1 - graph_random(n < 4 ? n : 4);
        values[n] = random_layer(m, values[x], values[y]);
        read[x] = 1;
        if (m->nodes[values[n]].kind == MPTI_KIND_ADD) read[y] = 1;
    }
    for (x = values[n - 1], i = 0; i < n - 1; i++)
        if (!read[i]) x = mpt_relu(m, mpt_add(m, mpt_batchnorm(m, x, NULL), values[i]));
    return logits_of(m, x);
}

/* A wrong place or a lost summand shows in the first digit; batch norms behind one another take
   differences of near equals, and leave three. */
MPT_TEST(random_graphs_against_double_precision) {
    named_net net = {"random", random_net, 0};
    char name[32];
    int i, n = mpt_test_full() ? 2000 : 60;
    net.name = name;
    for (i = 0; i < n; i++) {
        graph_seed = (uint64_t)i * 97 + 1;
        snprintf(name, sizeof name, "random %d", i);
        check_net(&net, NULL, MPT_PRECISION_FP32, 2e-3);
    }
}

/* Gradients share places. With a place of its own for each, NaN in all before, the same bits. */
static void give_each_gradient_a_place(mpt_trainer *t) {
    mpti_layout *l = &t->net.layout;
    mpt_arena_desc d;
    int v;
    for (v = 1; v < t->model->num_nodes; v++) {
        l->places[v].gradient = l->activation_bytes;
        l->activation_bytes += mpti_align(l->places[v].bytes);
    }
    memset(&d, 0, sizeof d);
    d.capacity_bytes = t->plan.activations = l->activation_bytes;
    mpt_arena_destroy(t->arenas[MPTI_ACTIVATIONS]);
    CHECK_OK(t->ctx, mpt_arena_create(t->ctx, &d, &t->arenas[MPTI_ACTIVATIONS]));
    t->net.activations = t->arenas[MPTI_ACTIVATIONS]->base;
}

MPT_TEST(sharing_places_changes_no_bit) {
    int i, n = mpt_test_full() ? 2000 : 60;
    for (i = 0; i < n; i++) {
        rig_desc d = rig_small(random_net, BATCH);
        pictures p = pictures_make(&d, BATCH, 1);
        mpt_batch b = pictures_batch(&p, 0, BATCH);
        size_t bytes;
        float *row;
        rig r;
        graph_seed = (uint64_t)i * 97 + 1;
        r = rig_open(&d);
        bytes = (size_t)(r.model->num_params + r.model->num_stats) * sizeof *row;
        row = (float *)malloc(bytes);
        memset(r.trainer->net.activations, 0xff, r.trainer->plan.activations);
        CHECK_OK(r.ctx, mpt_trainer_accumulate(r.trainer, &b));
        memcpy(row, gradient_row(r.trainer), bytes);
        mpti_trainer_begin_step(r.trainer);
        give_each_gradient_a_place(r.trainer);
        memset(r.trainer->net.activations, 0xff, r.trainer->plan.activations);
        CHECK_OK(r.ctx, mpt_trainer_accumulate(r.trainer, &b));
        CHECK_EQ_MEM(gradient_row(r.trainer), row, bytes);
        free(row);
        pictures_free(&p);
        rig_close(&r);
    }
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(double_precision_agrees_with_finite_differences),
    MPT_TEST_CASE(fp32_gradients_in_every_family),
    MPT_TEST_CASE(fp16_gradients),
    MPT_TEST_CASE(bf16_gradients),
    MPT_TEST_CASE(random_graphs_against_double_precision),
    MPT_TEST_CASE(sharing_places_changes_no_bit),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
