/* kernels.cu - mptrain's companion: FP16 tensor-core kernels for convolution, batch normalization,
 * softmax cross entropy, pointwise operators and the optimizer's update.
 *
 * Build:   nvcc -O3 -std=c++17 -c kernels.cu          (any architecture from sm_70 on)
 * Use:     link kernels.o to a program whose mptrain.h was compiled with MPTRAIN_CUDA; the CUDA
 *          backend there calls the mptk_ launchers at the end of this file.
 *
 * Sections, in the order of the file; search for a tag:
 *   >>about      this page, and what each architecture gets
 *   >>tools      vectors of 8, storage types, division by multiplication, reductions
 *   >>mma        tensor cores: wmma, and the faster instructions behind inline wrappers
 *   >>mainloop   a product of two tiles that are fetched from memory while the last is multiplied
 *   >>conv       convolution as a gathering matrix product: fprop, dgrad, wgrad
 *   >>batchnorm  statistics, normalisation, both directions
 *   >>softmax    softmax cross entropy, loss and gradient in one pass
 *   >>pointwise  ReLU, add, pools, dropout, casts, input
 *   >>update     is every gradient finite? the scaler, the optimizer, running statistics
 *   >>launch     what the host calls
 *
 * Letters: activations x[N][H][W][C], filters w[K][R][S][C], outputs y[N][P][Q][K].
 */
#ifndef __CUDACC_RTC__
#include "mptrain.h"
#endif

/* -------------------------------------------------------------------------------------------------
 * >>about   What each architecture gets
 * -------------------------------------------------------------------------------------------------
 * One source for all. A kernel's body picks its engine by the architecture it is compiled for:
 *
 *   sm_70       V100          mma.sync m8n8k4 where both operands have their depth contiguous
 *                             (fprop), else wmma; tiles go through registers, one stage
 *   sm_75       T4, RTX 20    wmma, which becomes ldmatrix and m16n8k8; one stage, as 64 KB of
 *                             shared memory must hold two CTAs
 *   sm_80, 90   A100, H100    cp.async with four stages, ldmatrix, mma.sync m16n8k16; BF16 too
 *   sm_86, 89   RTX 30, 40    the same with three stages: an SM has 100 KB of shared memory
 *   later       through PTX   as sm_90
 *
 * FP32 storage never meets a tensor core (TF32 would round it): it has plain kernels that are right
 * and slow. BF16 needs sm_80; below, its tensor-core kernels are empty, and the CUDA backend
 * refuses before it gets there.
 *
 * The part up to >>launch is free of host code, so that a run-time compiler (NVRTC) takes it, and a
 * plain C++ compiler too: where MPTK_ON_CPU is defined, a header of the tests has already defined
 * what CUDA's compiler would. Rules that make that work: kernels are launched by MPTK_LAUNCH alone,
 * get dynamic shared memory by MPTK_DYN_SMEM alone, return early only where no barrier follows, use
 * full warp masks, and say __syncwarp where lanes meet. Order of sums depends on shapes only, never
 * on the number of SMs, and no float is added by an atomic: two runs give the same bits.
 */
#if defined(__CUDA_ARCH__)
#define MPTK_ARCH __CUDA_ARCH__
#elif defined(MPTK_EMULATED_ARCH)
#define MPTK_ARCH MPTK_EMULATED_ARCH
#elif defined(MPTK_ON_CPU)
#define MPTK_ARCH 800
#else
#define MPTK_ARCH 0 /* the host's pass: bodies of kernels are read and dropped */
#endif

/* -------------------------------------------------------------------------------------------------
 * >>tools   Vectors of 8, storage types, division by multiplication, reductions
 * -------------------------------------------------------------------------------------------------
 * Storage is float, half or __nv_bfloat16; arithmetic is float. Everything here is a function of the
 * namespace mptk, inlined into the kernels.
 */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

#ifndef MPTK_LAUNCH
#define MPTK_LAUNCH(kernel, grid, block, smem, stream, ...) \
    kernel<<<grid, block, smem, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#endif
#ifndef MPTK_DYN_SMEM
#define MPTK_DYN_SMEM(type, name) \
    extern __shared__ __align__(128) unsigned char mptk_dynamic_smem[]; \
    type *name = reinterpret_cast<type *>(mptk_dynamic_smem)
#endif

#define MPTK_FN static __device__ __forceinline__ /* a device function */
#define MPTK_METHOD __device__ __forceinline__    /* a member of a device struct */

namespace mptk {

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

constexpr int ceil_div(int a, int b) {
    return (a + b - 1) / b;
}

constexpr int max_of(int a, int b) {
    return a > b ? a : b;
}

/* std::conditional, which NVRTC has no header for. */
template <bool CONDITION, class A, class B> struct choose {
    typedef A type;
};
template <class A, class B> struct choose<false, A, B> {
    typedef B type;
};

/* ---- one element ----------------------------------------------------------------------------- */
MPTK_FN float load(const float *p) {
    return *p;
}

MPTK_FN float load(const half *p) {
    return __half2float(*p);
}

MPTK_FN float load(const __nv_bfloat16 *p) {
    return __bfloat162float(*p);
}

MPTK_FN void store(float *p, float value) {
    *p = value;
}

MPTK_FN void store(half *p, float value) {
    *p = __float2half_rn(value);
}

MPTK_FN void store(__nv_bfloat16 *p, float value) {
    *p = __float2bfloat16_rn(value);
}

/* ---- eight neighbours ---------------------------------------------------------------------------
   16 bytes of a 16-bit type, 32 of float; p aligned to 16 bytes. */
MPTK_FN uint4 zero16() {
    return make_uint4(0, 0, 0, 0);
}

template <class T> MPTK_FN uint4 load16(const T *p) { /* 16 bytes as they are */
    return *reinterpret_cast<const uint4 *>(p);
}

template <class T> MPTK_FN void store16(T *p, uint4 bytes) {
    *reinterpret_cast<uint4 *>(p) = bytes;
}

MPTK_FN float2 unpack2(unsigned pair, half) { /* the last argument only names the type */
    return __half22float2(*reinterpret_cast<const half2 *>(&pair));
}

MPTK_FN float2 unpack2(unsigned pair, __nv_bfloat16) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162 *>(&pair));
}

MPTK_FN unsigned pack2(float a, float b, half) {
    half2 pair = __floats2half2_rn(a, b);
    return *reinterpret_cast<const unsigned *>(&pair);
}

MPTK_FN unsigned pack2(float a, float b, __nv_bfloat16) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const unsigned *>(&pair);
}

template <class T> MPTK_FN void unpack8(uint4 bytes, float f[8]) {
    const unsigned pairs[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 two = unpack2(pairs[i], T());
        f[2 * i] = two.x;
        f[2 * i + 1] = two.y;
    }
}

template <class T> MPTK_FN uint4 pack8(const float f[8]) {
    return make_uint4(pack2(f[0], f[1], T()), pack2(f[2], f[3], T()), pack2(f[4], f[5], T()),
                      pack2(f[6], f[7], T()));
}

template <class T> MPTK_FN void load8(const T *p, float f[8]) {
    unpack8<T>(load16(p), f);
}

MPTK_FN void load8(const float *p, float f[8]) {
    const float4 low = reinterpret_cast<const float4 *>(p)[0];
    const float4 high = reinterpret_cast<const float4 *>(p)[1];
    f[0] = low.x, f[1] = low.y, f[2] = low.z, f[3] = low.w;
    f[4] = high.x, f[5] = high.y, f[6] = high.z, f[7] = high.w;
}

template <class T> MPTK_FN void store8(T *p, const float f[8]) {
    store16(p, pack8<T>(f));
}

MPTK_FN void store8(float *p, const float f[8]) {
    reinterpret_cast<float4 *>(p)[0] = make_float4(f[0], f[1], f[2], f[3]);
    reinterpret_cast<float4 *>(p)[1] = make_float4(f[4], f[5], f[6], f[7]);
}

/* The first `count` of eight, one by one: for rows whose length is no multiple of 8, where p has no
   alignment but its type's. The others load as zeros and aren't stored. count may be < 0 or > 8. */
template <class T> MPTK_FN void load8_ragged(const T *p, int count, float f[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) f[i] = i < count ? load(p + i) : 0.0f;
}

template <class T> MPTK_FN void store8_ragged(T *p, int count, const float f[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < count) store(p + i, f[i]);
}

/* ---- is it finite? ------------------------------------------------------------------------------
   By exponent bits: comparisons with infinity may be optimised away. */
MPTK_FN bool is_finite(float x) {
    return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u;
}

MPTK_FN bool is_nan(float x) {
    return (__float_as_uint(x) & 0x7fffffffu) > 0x7f800000u;
}

/* ---- division by multiplication -----------------------------------------------------------------
   n / d = (high half of n * mul, plus n) >> shift, for 0 <= n < 2^31; the host fills it in. */
struct fastdiv {
    unsigned mul, shift, d;
};

MPTK_FN int quotient(int n, fastdiv f) {
    return static_cast<int>((__umulhi(static_cast<unsigned>(n), f.mul) + static_cast<unsigned>(n)) >>
                            f.shift);
}

MPTK_FN int quotient(int n, fastdiv f, int *remainder) {
    int q = quotient(n, f);
    *remainder = n - q * static_cast<int>(f.d);
    return q;
}

/* ---- reductions in a fixed order ----------------------------------------------------------------
   Every lane, and every thread, gets the same result. Butterflies add the same pairs in each lane,
   so the bits agree. */
struct op_sum {
    template <class T> MPTK_METHOD T operator()(T a, T b) const {
        return a + b;
    }
};

struct op_max { /* not for NaN */
    template <class T> MPTK_METHOD T operator()(T a, T b) const {
        return a > b ? a : b;
    }
};

struct op_min {
    template <class T> MPTK_METHOD T operator()(T a, T b) const {
        return a < b ? a : b;
    }
};

/* Over groups of LANES neighbouring lanes, a power of two. */
template <int LANES, class T, class OP> MPTK_FN T lanes_reduce(T value, OP op) {
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        value = op(value, __shfl_xor_sync(ALL_LANES, value, distance));
    return value;
}

template <class T> MPTK_FN T warp_sum(T value) {
    return lanes_reduce<WARP>(value, op_sum());
}

template <class T> MPTK_FN T warp_max(T value) {
    return lanes_reduce<WARP>(value, op_max());
}

template <class T> MPTK_FN T warp_min(T value) {
    return lanes_reduce<WARP>(value, op_min());
}

/* Over a block of THREADS, a multiple of 32. shared: THREADS / 32 values, free again on return. */
template <int THREADS, class T, class OP> MPTK_FN T block_reduce(T value, T *shared, OP op) {
    const int warp = threadIdx.x / WARP;

    value = lanes_reduce<WARP>(value, op);
    if (threadIdx.x % WARP == 0) shared[warp] = value;
    __syncthreads();
    value = shared[0];
    for (int i = 1; i < THREADS / WARP; i++) value = op(value, shared[i]);
    __syncthreads();
    return value;
}

template <int THREADS, class T> MPTK_FN T block_sum(T value, T *shared) {
    return block_reduce<THREADS>(value, shared, op_sum());
}

} // namespace mptk

/* For launchers: the statements with T the storage type of dtype; of an unknown one, an error. */
#define MPTK_BY_DTYPE(dtype, T, ...) \
    switch (dtype) { \
    case MPT_F32: { \
        typedef float T; \
        __VA_ARGS__; \
    } break; \
    case MPT_F16: { \
        typedef half T; \
        __VA_ARGS__; \
    } break; \
    case MPT_BF16: { \
        typedef __nv_bfloat16 T; \
        __VA_ARGS__; \
    } break; \
    default: return cudaErrorInvalidValue; \
    }

/* -------------------------------------------------------------------------------------------------
 * >>mma   Tensor cores
 * -------------------------------------------------------------------------------------------------
 */

/* -------------------------------------------------------------------------------------------------
 * >>mainloop   A product of two tiles that are fetched while the last is multiplied
 * -------------------------------------------------------------------------------------------------
 */

/* -------------------------------------------------------------------------------------------------
 * >>conv   Convolution as a gathering matrix product
 * -------------------------------------------------------------------------------------------------
 */

/* -------------------------------------------------------------------------------------------------
 * >>batchnorm   Statistics, normalisation, both directions
 * -------------------------------------------------------------------------------------------------
 */

/* -------------------------------------------------------------------------------------------------
 * >>softmax   Softmax cross entropy
 * -------------------------------------------------------------------------------------------------
 */

/* -------------------------------------------------------------------------------------------------
 * >>pointwise   ReLU, add, pools, dropout, casts, input
 * -------------------------------------------------------------------------------------------------
 */

/* -------------------------------------------------------------------------------------------------
 * >>update   Is every gradient finite? The scaler, the optimizer, running statistics
 * -------------------------------------------------------------------------------------------------
 */

/* -------------------------------------------------------------------------------------------------
 * >>launch   What the host calls
 * -------------------------------------------------------------------------------------------------
 */
#ifndef __CUDACC_RTC__
#include <cuda_runtime_api.h>

namespace mptk {

/* shift: the least with 2^shift >= d; mul = floor(2^32 (2^shift - d) / d) + 1, exact for n < 2^31
   (the classical "round up" constants, less the bit that doesn't fit in 32). d: 1 .. 2^30. */
static inline fastdiv fastdiv_make(int d) {
    fastdiv f = {0, 0, static_cast<unsigned>(d)};

    while ((1u << f.shift) < f.d) f.shift++;
    f.mul = static_cast<unsigned>((((1ull << f.shift) - f.d) << 32) / f.d + 1);
    return f;
}

/* The launch just made, as launchers report it. */
static inline int launch_status() {
    return static_cast<int>(cudaGetLastError());
}

} // namespace mptk

/* ---- convolution ----------------------------------------------------------------------------- */

/* ---- batch normalization, softmax, pointwise, update ----------------------------------------- */
#endif /* __CUDACC_RTC__ */
