// Kernels with one planted fault each, and good ones beside them: what check.py has to find, and
// what it must not complain of. tests/check_arch.sh names the expected complaints.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

using namespace nvcuda;

// 96 values live at a time, but a CTA of 1024 threads leaves 64 registers a thread.
extern "C" __global__ void __launch_bounds__(1024) planted_spill(volatile float *data) {
    float kept[96];
#pragma unroll
    for (int i = 0; i < 96; i++) kept[i] = data[i];
#pragma unroll
    for (int i = 0; i < 96; i++) data[i] = kept[95 - i];
}

// An index that only the run knows keeps an array out of the registers.
extern "C" __global__ void __launch_bounds__(64) planted_local_array(int *data) {
    int counts[16] = {0};
    for (int i = 0; i < 100; i++) counts[data[i] & 15]++;
    for (int i = 0; i < 16; i++) data[i] = counts[i];
}

// c (8,8) += a (8,k) b (k,8), by FMAs: thread t has row t / 8, column t % 8
template <class T> __device__ void multiply_simt(const T *a, const T *b, float *c, int k) {
    int row = threadIdx.x / 8, column = threadIdx.x % 8;
    float sum = 0;
    for (int i = 0; i < k; i++) sum += (float)a[row * k + i] * (float)b[i * 8 + column];
    c[threadIdx.x] += sum;
}

extern "C" __global__ void __launch_bounds__(64)
    planted_gemm(const half *a, const half *b, float *c, int k) {
    multiply_simt(a, b, c, k);
}

extern "C" __global__ void __launch_bounds__(64)
    planted_gemm_simt(const float *a, const float *b, float *c, int k) {
    multiply_simt(a, b, c, k);
}

// c (16,16) += a (16,k) b (k,16), by tensor cores
template <int K>
__global__ void __launch_bounds__(32) planted_gemm_wmma(const half *a, const half *b, float *c) {
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> fb;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
    wmma::load_matrix_sync(fc, c, 16, wmma::mem_row_major);
    for (int i = 0; i < K; i += 16) {
        wmma::load_matrix_sync(fa, a + i, K);
        wmma::load_matrix_sync(fb, b + i * 16, 16);
        wmma::mma_sync(fc, fa, fb, fc);
    }
    wmma::store_matrix_sync(c, fc, 16, wmma::mem_row_major);
}
template __global__ void planted_gemm_wmma<64>(const half *, const half *, float *);

// Before sm_80 nothing is expected of it, and before sm_90 this one has nothing.
template <class T> __global__ void __launch_bounds__(32) planted_gemm_late(T *c) {
#if __CUDA_ARCH__ >= 900
    wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major> fa;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::row_major> fb;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
    wmma::load_matrix_sync(fa, c, 16);
    wmma::load_matrix_sync(fb, c + 256, 16);
    wmma::fill_fragment(fc, 0.0f);
    wmma::mma_sync(fc, fa, fb, fc);
    wmma::store_matrix_sync(reinterpret_cast<float *>(c), fc, 16, wmma::mem_row_major);
#endif
}
template __global__ void planted_gemm_late<__nv_bfloat16>(__nv_bfloat16 *);

extern "C" __global__ void planted_no_bounds(float *data) {
    data[threadIdx.x] = 0;
}

extern __shared__ float dynamic_shared[];

extern "C" __global__ void __launch_bounds__(128) planted_untold(float *data) {
    dynamic_shared[threadIdx.x] = data[threadIdx.x];
    __syncthreads();
    data[threadIdx.x] = dynamic_shared[127 - threadIdx.x];
}

extern "C" __global__ void __launch_bounds__(128) planted_told(float *data) {
    MPTK_DYN_SMEM_BYTES(128 * sizeof(float));
    dynamic_shared[threadIdx.x] = data[threadIdx.x];
    __syncthreads();
    data[threadIdx.x] = dynamic_shared[127 - threadIdx.x];
}
