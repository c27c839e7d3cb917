/* network.h - the network that bench step and bench layers measure, and what it has to compute */
#ifndef MPT_BENCH_NETWORK_H
#define MPT_BENCH_NETWORK_H

#include "bench/measure.h"
#include "common/network.h"

/* Pictures and batches as these networks usually get them. */
typedef struct bench_arch {
    int image_size, channels, num_classes, batch_size;
} bench_arch;

static bench_arch bench_arch_defaults(int arch) {
    static const bench_arch mnist = {28, 1, 10, 128}, cifar = {32, 3, 10, 128},
                            imagenet = {224, 3, 1000, 32};
    return arch < 2 ? mnist : arch < 5 ? cifar : imagenet;
}

typedef struct bench_network {
    mpt_model *model;
    char arch[16], precision[8];
    int image_size, channels, num_classes, batch_size;
    mpt_dtype dtype; /* of activations */
} bench_network;

static int bench_network_make(mpt_ctx *ctx, const bench_options *o, bench_network *n) {
    bench_arch d = bench_arch_defaults(o->arch);
    mpt_result rc;

    memset(n, 0, sizeof *n);
    cli_choice_name(NETWORK_NAMES, o->arch, n->arch, sizeof n->arch);
    cli_choice_name(NETWORK_PRECISIONS, o->precision, n->precision, sizeof n->precision);
    n->image_size = o->image_size ? (int)o->image_size : d.image_size;
    n->channels = o->channels ? (int)o->channels : d.channels;
    n->num_classes = o->num_classes ? (int)o->num_classes : d.num_classes;
    n->batch_size = o->batch_size ? (int)o->batch_size : d.batch_size;
    n->dtype = network_storage(network_precision(o->precision));
    rc = mpt_model_create(ctx, n->image_size, n->image_size, n->channels, &n->model);
    if (rc == MPT_OK) rc = mpt_model_finish(n->model, mpt_zoo(n->model, n->arch, n->num_classes));
    return rc ? bench_fail(ctx) : 0;
}

/* Shape of a value of the model: the picture, or a layer's output. */
static void bench_network_shape(const bench_network *n, int value, int64_t shape[3]) {
    mpt_layer_info info;

    shape[0] = shape[1] = n->image_size;
    shape[2] = n->channels;
    if (value == MPT_INPUT || mpt_model_layer(n->model, value - 1, &info)) return;
    shape[0] = info.height;
    shape[1] = info.width;
    shape[2] = info.channels;
}

/* Multiply-adds of one picture on its way forward through a layer; 0 but for convolutions and dense
   layers, whose work dwarfs all else. */
static double bench_layer_multiply_adds(const bench_network *n, const mpt_layer_info *info) {
    int64_t in[3];

    bench_network_shape(n, info->inputs[0], in);
    if (!strcmp(info->kind, "dense")) return (double)(in[0] * in[1] * in[2] * info->channels);
    if (strcmp(info->kind, "conv2d") != 0) return 0;
    return (double)info->kernel * info->kernel * (double)(in[2] * info->channels) *
           (double)(info->height * info->width);
}

/* Of one picture in a whole step: forward, gradient of the weights, and gradient of the input,
   which the layers that read the picture don't compute. */
static double bench_step_multiply_adds(const bench_network *n) {
    double sum = 0;
    int i, count = mpt_model_num_layers(n->model);
    mpt_layer_info info;

    for (i = 0; i < count; i++)
        if (mpt_model_layer(n->model, i, &info) == MPT_OK)
            sum += bench_layer_multiply_adds(n, &info) * (info.inputs[0] == MPT_INPUT ? 2 : 3);
    return sum;
}

#endif /* MPT_BENCH_NETWORK_H */
