// kernel_plans.cpp - which tile and how many splits kernels.cu chooses for each convolution of
// ResNet-50: one line each, "layer|count|hw|c|k|r|stride|direction|bm|bn|bk|small channels|splits".
// docs/kernel_table.py compiles it, with kernels.cu itself inside and tests/cuda_on_cpu's headers
// in place of CUDA's, and runs it with the batch size as argument.
#include "../kernels.cu"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../tests/cuda/resnet50.h"

static void print_plan(const conv_shape &l, const mpt_conv2d_args &a, mptk::direction d) {
    static const char *const names[] = {"fprop", "dgrad", "wgrad"};
    const mptk::conv_plan plan = mptk::plan_conv(&a, d);
    int bm = plan.large ? 128 : 64, bn = bm, bk = 32;

    if (d != mptk::WGRAD) {
        bm = mptk::gather_shapes[plan.tile].bm;
        bn = mptk::gather_shapes[plan.tile].bn;
        bk = plan.tile == mptk::G64X64X64 ? 64 : 32;
    }
    std::printf("%s|%d|%d|%d|%d|%d|%d|%s|%d|%d|%d|%d|%d\n", l.name, l.count, l.hw, l.c, l.k, l.r,
                l.stride, names[d], bm, bn, bk, plan.tile == mptk::GSMALLC, plan.splits);
}

int main(int argc, char **argv) {
    const int batch_size = argc > 1 ? std::atoi(argv[1]) : 256;

    for (const conv_shape &l : resnet50_convs) {
        const mpt_conv2d_args a = conv_shape_args(&l, batch_size);
        print_plan(l, a, mptk::FPROP);
        if (l.c != 3) print_plan(l, a, mptk::DGRAD); // nobody reads the gradient of the pictures
        print_plan(l, a, mptk::WGRAD);
    }
    return 0;
}
