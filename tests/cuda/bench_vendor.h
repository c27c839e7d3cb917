/* bench_vendor.h - what our convolutions are measured against: cuBLAS's products of the same size,
   and cuDNN's convolutions where the program was built with it (-DBENCH_CUDNN)

   Only benchmarks use cuDNN; the library itself doesn't know it. */
#ifndef MPT_BENCH_DEVICE_VENDOR_H
#define MPT_BENCH_DEVICE_VENDOR_H

#include "bench_measure.h"

#include <cublas_v2.h>
#ifdef BENCH_CUDNN
#include <cudnn.h>
#endif

/* ---- cuBLAS ---------------------------------------------------------------------------------- */
/* c (rows,columns) = a b with depth products each; FP16 operands, FP32 sums. Dimensions are rounded
   up to 8, which the fast kernels of cuBLAS want and we don't need. */
typedef struct gemm {
    cublasHandle_t handle;
    int rows, columns, depth;
    const void *a, *b;
    void *c;
    bool deep;     /* a is (depth,rows) and c is FP32, as for gradients of weights */
    bool b_by_row; /* b is (depth,columns), else (columns,depth) */
} gemm;

static int round_up_8(int n) {
    return (n + 7) / 8 * 8;
}

static size_t gemm_elements(int rows, int columns) {
    return (size_t)round_up_8(rows) * (size_t)round_up_8(columns);
}

/* cuBLAS is column-major: it computes c^T = b^T a^T. */
static bool gemm_run(void *user) {
    const gemm *g = (const gemm *)user;
    int rows = round_up_8(g->rows), columns = round_up_8(g->columns), depth = round_up_8(g->depth);
    float one = 1, zero = 0;
    cublasStatus_t status = cublasGemmEx(g->handle, g->b_by_row ? CUBLAS_OP_N : CUBLAS_OP_T,
                                         g->deep ? CUBLAS_OP_T : CUBLAS_OP_N, columns, rows, depth,
                                         &one, g->b, CUDA_R_16F, g->b_by_row ? columns : depth,
                                         g->a, CUDA_R_16F, g->deep ? rows : depth, &zero, g->c,
                                         g->deep ? CUDA_R_32F : CUDA_R_16F, columns,
                                         CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);

    if (status) give_up("cublasGemmEx: status %d", (int)status);
    return true;
}

/* ---- cuDNN ----------------------------------------------------------------------------------- */
#ifdef BENCH_CUDNN
#define CUDNN_OK(call) \
    do { \
        cudnnStatus_t status_ = (call); \
        if (status_) give_up("%s: %s", #call, cudnnGetErrorString(status_)); \
    } while (0)

typedef struct cudnn_lib {
    cudnnHandle_t handle;
    cudnnTensorDescriptor_t x, y;
    cudnnFilterDescriptor_t w;
    cudnnConvolutionDescriptor_t conv;
    void *workspace;
    size_t workspace_bytes;
} cudnn_lib;

typedef struct cudnn_conv { /* one direction of one convolution, with the algorithm to run */
    const cudnn_lib *lib;
    char direction; /* 'f'prop, 'd'grad, 'w'grad */
    void *x, *w, *y;
    int algorithm;
    size_t bytes;
} cudnn_conv;

static cudnn_lib cudnn_open(void *workspace, size_t workspace_bytes) {
    cudnn_lib c;

    CUDNN_OK(cudnnCreate(&c.handle));
    CUDNN_OK(cudnnCreateTensorDescriptor(&c.x));
    CUDNN_OK(cudnnCreateTensorDescriptor(&c.y));
    CUDNN_OK(cudnnCreateFilterDescriptor(&c.w));
    CUDNN_OK(cudnnCreateConvolutionDescriptor(&c.conv));
    c.workspace = workspace;
    c.workspace_bytes = workspace_bytes;
    return c;
}

static void cudnn_close(cudnn_lib *c) {
    cudnnDestroyConvolutionDescriptor(c->conv);
    cudnnDestroyFilterDescriptor(c->w);
    cudnnDestroyTensorDescriptor(c->y);
    cudnnDestroyTensorDescriptor(c->x);
    cudnnDestroy(c->handle);
}

/* FP16 NHWC, sums in FP32 on tensor cores, as PyTorch's autocast and channels_last ask for. */
static void cudnn_describe(const cudnn_lib *c, const mpt_conv2d_args *a) {
    CUDNN_OK(cudnnSetTensor4dDescriptor(c->x, CUDNN_TENSOR_NHWC, CUDNN_DATA_HALF, a->n, a->c, a->h,
                                        a->wd));
    CUDNN_OK(cudnnSetTensor4dDescriptor(c->y, CUDNN_TENSOR_NHWC, CUDNN_DATA_HALF, a->n, a->k, a->p,
                                        a->q));
    CUDNN_OK(cudnnSetFilter4dDescriptor(c->w, CUDNN_DATA_HALF, CUDNN_TENSOR_NHWC, a->k, a->c, a->r,
                                        a->s));
    CUDNN_OK(cudnnSetConvolution2dDescriptor(c->conv, a->padding, a->padding, a->stride, a->stride,
                                             1, 1, CUDNN_CROSS_CORRELATION, CUDNN_DATA_FLOAT));
    CUDNN_OK(cudnnSetConvolutionMathType(c->conv, CUDNN_TENSOR_OP_MATH));
}

static bool cudnn_run(void *user) {
    const cudnn_conv *v = (const cudnn_conv *)user;
    const cudnn_lib *c = v->lib;
    float one = 1, zero = 0;

    if (v->direction == 'f')
        return !cudnnConvolutionForward(c->handle, &one, c->x, v->x, c->w, v->w, c->conv,
                                        (cudnnConvolutionFwdAlgo_t)v->algorithm, c->workspace,
                                        v->bytes, &zero, c->y, v->y);
    if (v->direction == 'd')
        return !cudnnConvolutionBackwardData(c->handle, &one, c->w, v->w, c->y, v->y, c->conv,
                                             (cudnnConvolutionBwdDataAlgo_t)v->algorithm,
                                             c->workspace, v->bytes, &zero, c->x, v->x);
    return !cudnnConvolutionBackwardFilter(c->handle, &one, c->x, v->x, c->y, v->y, c->conv,
                                           (cudnnConvolutionBwdFilterAlgo_t)v->algorithm,
                                           c->workspace, v->bytes, &zero, c->w, v->w);
}

/* The fastest algorithm that cuDNN's own search finds, as torch.backends.cudnn.benchmark does. The
   searches differ in their types. false: none works. */
static bool cudnn_search_fprop(cudnn_conv *v) {
    cudnnConvolutionFwdAlgoPerf_t best;
    const cudnn_lib *c = v->lib;
    int found = 0;

    if (cudnnFindConvolutionForwardAlgorithmEx(c->handle, c->x, v->x, c->w, v->w, c->conv, c->y,
                                               v->y, 1, &found, &best, c->workspace,
                                               c->workspace_bytes))
        return false;
    v->algorithm = (int)best.algo;
    v->bytes = best.memory;
    return found == 1 && best.status == CUDNN_STATUS_SUCCESS;
}

static bool cudnn_search_dgrad(cudnn_conv *v) {
    cudnnConvolutionBwdDataAlgoPerf_t best;
    const cudnn_lib *c = v->lib;
    int found = 0;

    if (cudnnFindConvolutionBackwardDataAlgorithmEx(c->handle, c->w, v->w, c->y, v->y, c->conv,
                                                    c->x, v->x, 1, &found, &best, c->workspace,
                                                    c->workspace_bytes))
        return false;
    v->algorithm = (int)best.algo;
    v->bytes = best.memory;
    return found == 1 && best.status == CUDNN_STATUS_SUCCESS;
}

static bool cudnn_search_wgrad(cudnn_conv *v) {
    cudnnConvolutionBwdFilterAlgoPerf_t best;
    const cudnn_lib *c = v->lib;
    int found = 0;

    if (cudnnFindConvolutionBackwardFilterAlgorithmEx(c->handle, c->x, v->x, c->y, v->y, c->conv,
                                                      c->w, v->w, 1, &found, &best, c->workspace,
                                                      c->workspace_bytes))
        return false;
    v->algorithm = (int)best.algo;
    v->bytes = best.memory;
    return found == 1 && best.status == CUDNN_STATUS_SUCCESS;
}

static bool cudnn_search(cudnn_conv *v) {
    return v->direction == 'f'   ? cudnn_search_fprop(v)
           : v->direction == 'd' ? cudnn_search_dgrad(v)
                                 : cudnn_search_wgrad(v);
}
#endif /* BENCH_CUDNN */

#endif /* MPT_BENCH_DEVICE_VENDOR_H */
