/* resnet50.h - the convolutions of ResNet-50 (torchvision's form, the stride on the 3x3), as
   benchmarks and tables need them; C and C++ */
#ifndef MPT_TEST_RESNET50_H
#define MPT_TEST_RESNET50_H

#include "mptrain.h"

typedef struct conv_shape {
    const char *name;
    int count, hw, c, k, r, stride; /* count: of this shape in the network */
} conv_shape;

static const conv_shape resnet50_convs[] = {
    {"7x7/2 3-64 @224", 1, 224, 3, 64, 7, 2},     {"1x1 64-64 @56", 1, 56, 64, 64, 1, 1},
    {"1x1 256-64 @56", 2, 56, 256, 64, 1, 1},     {"3x3 64-64 @56", 3, 56, 64, 64, 3, 1},
    {"1x1 64-256 @56", 4, 56, 64, 256, 1, 1},     {"1x1 256-128 @56", 1, 56, 256, 128, 1, 1},
    {"3x3/2 128-128 @56", 1, 56, 128, 128, 3, 2}, {"1x1/2 256-512 @56", 1, 56, 256, 512, 1, 2},
    {"1x1 128-512 @28", 4, 28, 128, 512, 1, 1},   {"1x1 512-128 @28", 3, 28, 512, 128, 1, 1},
    {"3x3 128-128 @28", 3, 28, 128, 128, 3, 1},   {"1x1 512-256 @28", 1, 28, 512, 256, 1, 1},
    {"3x3/2 256-256 @28", 1, 28, 256, 256, 3, 2}, {"1x1/2 512-1024 @28", 1, 28, 512, 1024, 1, 2},
    {"1x1 256-1024 @14", 6, 14, 256, 1024, 1, 1}, {"1x1 1024-256 @14", 5, 14, 1024, 256, 1, 1},
    {"3x3 256-256 @14", 5, 14, 256, 256, 3, 1},   {"1x1 1024-512 @14", 1, 14, 1024, 512, 1, 1},
    {"3x3/2 512-512 @14", 1, 14, 512, 512, 3, 2}, {"1x1/2 1024-2048 @14", 1, 14, 1024, 2048, 1, 2},
    {"1x1 512-2048 @7", 3, 7, 512, 2048, 1, 1},   {"1x1 2048-512 @7", 2, 7, 2048, 512, 1, 1},
    {"3x3 512-512 @7", 2, 7, 512, 512, 3, 1},
};
enum { NUM_RESNET50_CONVS = sizeof resnet50_convs / sizeof resnet50_convs[0] };

static inline mpt_conv2d_args conv_shape_args(const conv_shape *shape, int batch_size) {
    mpt_conv2d_args a;

    memset(&a, 0, sizeof a);
    a.n = a.num_valid = batch_size;
    a.h = a.wd = shape->hw;
    a.c = shape->c;
    a.k = shape->k;
    a.r = a.s = shape->r;
    a.stride = shape->stride;
    a.padding = shape->r / 2;
    a.p = a.q = (a.h + 2 * a.padding - a.r) / a.stride + 1;
    a.dtype = MPT_F16;
    return a;
}

#endif /* MPT_TEST_RESNET50_H */
