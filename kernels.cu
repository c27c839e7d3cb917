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
#include "mptrain.h" /* plain structs; no host headers where a run-time compiler has none */

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

MPTK_FN float load(const uint8_t *p) { /* bytes of pictures */
    return static_cast<float>(*p);
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

MPTK_FN void load8(const uint8_t *p, float f[8]) { /* 8 bytes */
    const uint2 bytes = *reinterpret_cast<const uint2 *>(p);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        f[i] = static_cast<float>(bytes.x >> 8 * i & 255u);
        f[i + 4] = static_cast<float>(bytes.y >> 8 * i & 255u);
    }
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
 * Over the m rows (pixels of the slots that count) of channel c, forward in training:
 *
 *   mean = sum(x) / m,  var = sum((x - mean)^2) / m,  y = relu((x - mean) scale + beta + residual)
 *
 * with scale = gamma / sqrt(var + epsilon), and backward, with g = dy where relu let through:
 *
 *   dbeta = sum(g),  dgamma = sum(g (x - mean)) / sqrt(var + epsilon)
 *   dx = scale (g - dbeta / m - (x - mean) dgamma / sqrt(var + epsilon) / m)
 *
 * Both directions read the tensor twice: once for sums, once for the result. Bytes an element of 16
 * bits: forward 2 + 4 (and 2 for a residual), backward 6 + 8 with relu (and 2).
 *
 *   x as (rows, channels)     a block: 256 threads       lanes: chunks of VEC channels side by side
 *      <--- lanes VEC --->    +--+--+--+--+              VEC = 8 and up to 8 lanes: 128 bytes of a
 *     +-----+-----+-----+     |0 |1 |2 |3 | row 0        row; VEC = 1 and up to 32 lanes where the
 *     |     |part0|     |     |4 |5 |6 |7 | row 1        channels are no multiple of 8.
 *     |     +-----+     |     ...                        A thread keeps its channels and walks down
 *     |     |part1|     |     |..|..|..|  | row 63       the rows of a part.
 *     +-----+-----+-----+     +--+--+--+--+
 *
 * Sums meet in two levels: the threads of a block, then the parts of a column of blocks. Lanes and
 * parts follow from the shape at full capacity, so the order is always the same.
 *
 * Variance without cancellation. sum(x^2) / m - mean^2 in FP32 is worthless for a mean of 3000 and a
 * deviation of 0.5. So each thread subtracts the first value that it meets, a pivot p of its own, and
 * sums d = x - p and d^2; these become a count, a mean and m2 = sum((x - mean)^2), which merge as
 *
 *   mean = mean_a + delta n_b / n,  m2 = m2_a + m2_b + delta^2 n_a n_b / n,  delta = mean_b - mean_a
 *
 * (Chan, Golub, LeVeque 1979). As p is one of the thread's R values, m2 is at least (p - mean)^2, so
 * what cancels in sum(d^2) - sum(d)^2 / R is at most R times m2: a relative error of R 2^-23 in the
 * worst case (one value far from all others), 2^-22 or so in the usual one. R is some 10 to 100.
 */
namespace mptk {

constexpr int BATCHNORM_THREADS = 256;
constexpr int BATCHNORM_WARPS = BATCHNORM_THREADS / WARP;
constexpr int BATCHNORM_MAX_LANES = 32;
constexpr int BATCHNORM_CHANNELS = 64; /* of a block, at most: 8 lanes of 8, or 32 of 1 */
constexpr int BATCHNORM_FINISH_LANES = 8;
static_assert(BATCHNORM_MAX_LANES <= WARP, "threads of one column are in one warp, or all warps");

struct batchnorm_args {
    const void *x, *y, *dy, *residual; /* (rows, c) */
    void *out, *dresidual;             /* (rows, c): y or dx; gradient of the residual, or NULL */
    const float *gamma, *beta, *mean;  /* (c) */
    const float *inv_std, *var;        /* (c); one of them NULL: 1 / sqrt(var + epsilon) */
    float *dgamma, *dbeta;             /* (c) */
    float *batch_mean, *batch_inv_std, *batch_var; /* (c) */
    float *parts;                                  /* (num_parts, 2, c) */
    int rows, valid_rows, c;
    int lanes, columns; /* lanes of a block, a power of two; blocks side by side */
    int part_rows;      /* rows of a block in the sums, a multiple of its rows side by side */
    int num_parts;
    int apply_rows; /* rows of a block in the second pass */
    int relu;
    float epsilon;
};

/* VEC neighbours: 8 in vectors, 1 by itself. */
template <int VEC, class T> MPTK_FN void load_vec(const T *p, float f[VEC]) {
    if constexpr (VEC == 8) load8(p, f);
    else f[0] = load(p);
}

template <int VEC, class T> MPTK_FN void store_vec(T *p, const float f[VEC]) {
    if constexpr (VEC == 8) store8(p, f);
    else store(p, f[0]);
}

template <int VEC> MPTK_FN void fill_vec(float f[VEC], float value) {
#pragma unroll
    for (int i = 0; i < VEC; i++) f[i] = value;
}

MPTK_FN float relu(float x) { /* NaN passes, -0 becomes 0 */
    return x <= 0.0f ? 0.0f : x;
}

MPTK_FN float relu_gate(float y, float dy) { /* y: what relu gave */
    return y <= 0.0f ? 0.0f : dy;
}

/* Where a thread works: its chunk of channels, the rows begin, begin + step ... below end. */
struct batchnorm_place {
    int part, channel, begin, end, step;
};

/* In blocks of `rows` rows, of `total`. */
template <int VEC>
MPTK_FN batchnorm_place batchnorm_place_of(const batchnorm_args &a, int rows, int total) {
    const int block = blockIdx.x, thread = threadIdx.x;
    const int part = block / a.columns, column = block % a.columns, first = part * rows;
    batchnorm_place p;

    p.part = part;
    p.channel = (column * a.lanes + thread % a.lanes) * VEC;
    p.begin = first + thread / a.lanes;
    p.end = p.channel < a.c ? first + min(rows, total - first) : 0;
    p.step = BATCHNORM_THREADS / a.lanes;
    return p;
}

/* The channel that this thread has after the sums of a block met, if any: of `width` in a block. */
MPTK_FN bool batchnorm_owns_channel(const batchnorm_args &a, int width, int column, int *channel) {
    const int thread = threadIdx.x;

    *channel = column * width + thread;
    return thread < width && *channel < a.c;
}

/* ---- statistics ------------------------------------------------------------------------------ */
template <int VEC> struct batchnorm_moments { /* of `count` values of each of VEC channels */
    float count, mean[VEC], m2[VEC];
};

template <int VEC>
MPTK_FN void merge_moments(batchnorm_moments<VEC> *a, const batchnorm_moments<VEC> &b) {
    if (b.count <= 0.0f) return;
    if (a->count <= 0.0f) {
        *a = b;
        return;
    }
    const float count = a->count + b.count, share = b.count / count;
#pragma unroll
    for (int i = 0; i < VEC; i++) {
        const float delta = b.mean[i] - a->mean[i];
        a->mean[i] += delta * share;
        a->m2[i] += b.m2[i] + delta * delta * (a->count * share);
    }
    a->count = count;
}

/* What the threads of each column of a block have, merged: first the lanes of a warp, then warps in
   order. Thread t < lanes * VEC gets channel t of the block. */
template <int VEC>
MPTK_FN batchnorm_moments<1> block_merge_moments(int lanes, batchnorm_moments<VEC> m) {
    __shared__ float means[BATCHNORM_WARPS][BATCHNORM_CHANNELS];
    __shared__ float m2s[BATCHNORM_WARPS][BATCHNORM_CHANNELS];
    __shared__ float counts[BATCHNORM_WARPS];
    const int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP;
    batchnorm_moments<1> all = {0.0f, {0.0f}, {0.0f}};

    for (int distance = WARP / 2; distance >= lanes; distance /= 2) {
        batchnorm_moments<VEC> other;
        other.count = __shfl_xor_sync(ALL_LANES, m.count, distance);
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            other.mean[i] = __shfl_xor_sync(ALL_LANES, m.mean[i], distance);
            other.m2[i] = __shfl_xor_sync(ALL_LANES, m.m2[i], distance);
        }
        merge_moments(&m, other);
    }
    if (lane == 0) counts[warp] = m.count;
    if (lane < lanes) {
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            means[warp][lane * VEC + i] = m.mean[i];
            m2s[warp][lane * VEC + i] = m.m2[i];
        }
    }
    __syncthreads();
    for (int w = 0; w < BATCHNORM_WARPS && thread < lanes * VEC; w++) {
        const batchnorm_moments<1> part = {counts[w], {means[w][thread]}, {m2s[w][thread]}};
        merge_moments(&all, part);
    }
    return all;
}

} // namespace mptk

/* Pass 1 of training: parts[part] = mean and m2 of its rows. */
template <class T, int VEC>
__global__ void __launch_bounds__(mptk::BATCHNORM_THREADS)
    mptk_batchnorm_moments_kernel(mptk::batchnorm_args a) {
    const mptk::batchnorm_place place = mptk::batchnorm_place_of<VEC>(a, a.part_rows, a.valid_rows);
    const int count = max((place.end - place.begin + place.step - 1) / place.step, 0);
    const T *x = static_cast<const T *>(a.x) + place.channel;
    mptk::batchnorm_moments<VEC> m;
    float pivot[VEC], sum[VEC], squares[VEC];

    mptk::fill_vec<VEC>(pivot, 0.0f);
    mptk::fill_vec<VEC>(sum, 0.0f);
    mptk::fill_vec<VEC>(squares, 0.0f);
    if (count > 0) mptk::load_vec<VEC>(x + static_cast<size_t>(place.begin) * a.c, pivot);
    for (int row = place.begin; row < place.end; row += place.step) {
        float value[VEC];
        mptk::load_vec<VEC>(x + static_cast<size_t>(row) * a.c, value);
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            const float d = value[i] - pivot[i];
            sum[i] += d;
            squares[i] += d * d;
        }
    }
    m.count = static_cast<float>(count);
#pragma unroll
    for (int i = 0; i < VEC; i++) {
        const float mean = sum[i] / static_cast<float>(max(count, 1));
        m.mean[i] = pivot[i] + mean;
        m.m2[i] = squares[i] - sum[i] * mean;
    }
    const mptk::batchnorm_moments<1> all = mptk::block_merge_moments<VEC>(a.lanes, m);
    int channel;
    if (mptk::batchnorm_owns_channel(a, a.lanes * VEC, blockIdx.x % a.columns, &channel)) {
        float *part = a.parts + static_cast<size_t>(place.part) * 2 * a.c;
        part[channel] = all.mean[0];
        part[a.c + channel] = all.m2[0];
    }
}

/* Between the passes: parts -> batch_mean, batch_var, batch_inv_std. A block has 8 channels, and 32
   threads for each, which take every 32nd part. */
__global__ void __launch_bounds__(mptk::BATCHNORM_THREADS)
    mptk_batchnorm_finish_kernel(mptk::batchnorm_args a) {
    const int lanes = mptk::BATCHNORM_FINISH_LANES;
    const int thread = threadIdx.x, block = blockIdx.x;
    int channel = block * lanes + thread % lanes;
    mptk::batchnorm_moments<1> m = {0.0f, {0.0f}, {0.0f}};

    for (int p = thread / lanes; p < a.num_parts && channel < a.c;
         p += mptk::BATCHNORM_THREADS / lanes) {
        const float *part = a.parts + static_cast<size_t>(p) * 2 * a.c;
        const int count = min(a.part_rows, max(a.valid_rows - p * a.part_rows, 0));
        const mptk::batchnorm_moments<1> other = {
            static_cast<float>(count), {part[channel]}, {part[a.c + channel]}};
        mptk::merge_moments(&m, other);
    }
    m = mptk::block_merge_moments<1>(lanes, m);
    if (mptk::batchnorm_owns_channel(a, lanes, block, &channel)) {
        const float count = static_cast<float>(a.valid_rows);
        const float var = a.valid_rows > 0 ? m.m2[0] / count : 0.0f;
        const float inv_std = 1.0f / sqrtf(var + a.epsilon);
        a.batch_mean[channel] = m.mean[0];
        a.batch_inv_std[channel] = a.valid_rows > 0 ? inv_std : 0.0f;
        a.batch_var[channel] = a.valid_rows > 1 ? m.m2[0] / (count - 1.0f) : var;
    }
}

/* Pass 2, or the only one in inference. Rows that don't count become zeros. */
template <class T, int VEC>
__global__ void __launch_bounds__(mptk::BATCHNORM_THREADS)
    mptk_batchnorm_apply_kernel(mptk::batchnorm_args a) {
    const mptk::batchnorm_place place = mptk::batchnorm_place_of<VEC>(a, a.apply_rows, a.rows);
    float mean[VEC], scale[VEC], offset[VEC];

#pragma unroll
    for (int i = 0; i < VEC; i++) {
        const int channel = min(place.channel + i, a.c - 1); /* of lanes that have no rows, any */
        const float inv_std =
            a.inv_std ? a.inv_std[channel] : 1.0f / sqrtf(a.var[channel] + a.epsilon);
        mean[i] = a.mean[channel];
        scale[i] = a.gamma[channel] * inv_std;
        offset[i] = a.beta[channel];
    }
    for (int row = place.begin; row < place.end; row += place.step) {
        const size_t at = static_cast<size_t>(row) * a.c + place.channel;
        float value[VEC], residual[VEC];
        mptk::fill_vec<VEC>(value, 0.0f);
        mptk::fill_vec<VEC>(residual, 0.0f);
        if (row < a.valid_rows) {
            mptk::load_vec<VEC>(static_cast<const T *>(a.x) + at, value);
            if (a.residual) mptk::load_vec<VEC>(static_cast<const T *>(a.residual) + at, residual);
#pragma unroll
            for (int i = 0; i < VEC; i++) {
                value[i] = (value[i] - mean[i]) * scale[i] + offset[i] + residual[i];
                if (a.relu) value[i] = mptk::relu(value[i]);
            }
        }
        mptk::store_vec<VEC>(static_cast<T *>(a.out) + at, value);
    }
}

/* ---- backward -------------------------------------------------------------------------------- */
namespace mptk {

/* dy behind relu. */
template <class T, int VEC>
MPTK_FN void batchnorm_gated(const batchnorm_args &a, size_t at, float g[VEC]) {
    load_vec<VEC>(static_cast<const T *>(a.dy) + at, g);
    if (!a.relu) return;
    float y[VEC];
    load_vec<VEC>(static_cast<const T *>(a.y) + at, y);
#pragma unroll
    for (int i = 0; i < VEC; i++) g[i] = relu_gate(y[i], g[i]);
}

struct two_sums {
    float of_g, of_product;
};

/* As block_merge_moments, for sums. */
template <int VEC>
MPTK_FN two_sums block_two_sums(int lanes, float sum[VEC], float product[VEC]) {
    __shared__ float sums[BATCHNORM_WARPS][BATCHNORM_CHANNELS];
    __shared__ float products[BATCHNORM_WARPS][BATCHNORM_CHANNELS];
    const int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP;
    two_sums all = {0.0f, 0.0f};

    for (int distance = WARP / 2; distance >= lanes; distance /= 2) {
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            sum[i] += __shfl_xor_sync(ALL_LANES, sum[i], distance);
            product[i] += __shfl_xor_sync(ALL_LANES, product[i], distance);
        }
    }
    if (lane < lanes) {
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            sums[warp][lane * VEC + i] = sum[i];
            products[warp][lane * VEC + i] = product[i];
        }
    }
    __syncthreads();
    for (int w = 0; w < BATCHNORM_WARPS && thread < lanes * VEC; w++) {
        all.of_g += sums[w][thread];
        all.of_product += products[w][thread];
    }
    return all;
}

} // namespace mptk

/* Pass 1: parts[part] = sums of g and of g (x - mean). */
template <class T, int VEC>
__global__ void __launch_bounds__(mptk::BATCHNORM_THREADS)
    mptk_batchnorm_backward_sums_kernel(mptk::batchnorm_args a) {
    const mptk::batchnorm_place place = mptk::batchnorm_place_of<VEC>(a, a.part_rows, a.valid_rows);
    float mean[VEC], sum[VEC], product[VEC];

#pragma unroll
    for (int i = 0; i < VEC; i++) mean[i] = a.mean[min(place.channel + i, a.c - 1)];
    mptk::fill_vec<VEC>(sum, 0.0f);
    mptk::fill_vec<VEC>(product, 0.0f);
    for (int row = place.begin; row < place.end; row += place.step) {
        const size_t at = static_cast<size_t>(row) * a.c + place.channel;
        float g[VEC], x[VEC];
        mptk::batchnorm_gated<T, VEC>(a, at, g);
        mptk::load_vec<VEC>(static_cast<const T *>(a.x) + at, x);
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            sum[i] += g[i];
            product[i] += g[i] * (x[i] - mean[i]);
        }
    }
    const mptk::two_sums all = mptk::block_two_sums<VEC>(a.lanes, sum, product);
    int channel;
    if (mptk::batchnorm_owns_channel(a, a.lanes * VEC, blockIdx.x % a.columns, &channel)) {
        float *part = a.parts + static_cast<size_t>(place.part) * 2 * a.c;
        part[channel] = all.of_g;
        part[a.c + channel] = all.of_product;
    }
}

/* Between the passes: parts -> dbeta, dgamma. */
__global__ void __launch_bounds__(mptk::BATCHNORM_THREADS)
    mptk_batchnorm_backward_finish_kernel(mptk::batchnorm_args a) {
    const int lanes = mptk::BATCHNORM_FINISH_LANES;
    const int thread = threadIdx.x, block = blockIdx.x;
    int channel = block * lanes + thread % lanes;
    float sum[1] = {0.0f}, product[1] = {0.0f};

    for (int p = thread / lanes; p < a.num_parts && channel < a.c;
         p += mptk::BATCHNORM_THREADS / lanes) {
        const float *part = a.parts + static_cast<size_t>(p) * 2 * a.c;
        sum[0] += part[channel];
        product[0] += part[a.c + channel];
    }
    const mptk::two_sums all = mptk::block_two_sums<1>(lanes, sum, product);
    if (mptk::batchnorm_owns_channel(a, lanes, block, &channel)) {
        a.dbeta[channel] = all.of_g;
        a.dgamma[channel] = all.of_product * a.inv_std[channel];
    }
}

/* Pass 2: dx, which may lie where dy does, and the residual's gradient, which is g. */
template <class T, int VEC>
__global__ void __launch_bounds__(mptk::BATCHNORM_THREADS)
    mptk_batchnorm_backward_apply_kernel(mptk::batchnorm_args a) {
    const mptk::batchnorm_place place = mptk::batchnorm_place_of<VEC>(a, a.apply_rows, a.rows);
    const float count = static_cast<float>(max(a.valid_rows, 1));
    float mean[VEC], scale[VEC], offset[VEC], slope[VEC];

#pragma unroll
    for (int i = 0; i < VEC; i++) {
        const int channel = min(place.channel + i, a.c - 1);
        const float inv_std = a.inv_std[channel];
        mean[i] = a.mean[channel];
        scale[i] = a.gamma[channel] * inv_std;
        offset[i] = a.dbeta[channel] / count;
        slope[i] = a.dgamma[channel] * inv_std / count;
    }
    for (int row = place.begin; row < place.end; row += place.step) {
        const size_t at = static_cast<size_t>(row) * a.c + place.channel;
        float g[VEC], x[VEC];
        mptk::fill_vec<VEC>(g, 0.0f);
        mptk::fill_vec<VEC>(x, 0.0f);
        if (row < a.valid_rows) {
            mptk::batchnorm_gated<T, VEC>(a, at, g);
            mptk::load_vec<VEC>(static_cast<const T *>(a.x) + at, x);
#pragma unroll
            for (int i = 0; i < VEC; i++)
                x[i] = scale[i] * (g[i] - offset[i] - (x[i] - mean[i]) * slope[i]);
        }
        if (a.dresidual) mptk::store_vec<VEC>(static_cast<T *>(a.dresidual) + at, g);
        mptk::store_vec<VEC>(static_cast<T *>(a.out) + at, x);
    }
}

#define MPTK_BATCHNORM_KERNELS(T, VEC) \
    template __global__ void mptk_batchnorm_moments_kernel<T, VEC>(mptk::batchnorm_args a); \
    template __global__ void mptk_batchnorm_apply_kernel<T, VEC>(mptk::batchnorm_args a); \
    template __global__ void mptk_batchnorm_backward_sums_kernel<T, VEC>(mptk::batchnorm_args a); \
    template __global__ void mptk_batchnorm_backward_apply_kernel<T, VEC>(mptk::batchnorm_args a);
MPTK_BATCHNORM_KERNELS(float, 8)
MPTK_BATCHNORM_KERNELS(float, 1)
MPTK_BATCHNORM_KERNELS(half, 8)
MPTK_BATCHNORM_KERNELS(half, 1)
MPTK_BATCHNORM_KERNELS(__nv_bfloat16, 8)
MPTK_BATCHNORM_KERNELS(__nv_bfloat16, 1)

/* -------------------------------------------------------------------------------------------------
 * >>softmax   Softmax cross entropy
 * -------------------------------------------------------------------------------------------------
 *   loss = log(sum exp(z - max)) + (1 - s) (max - z[label]) + s mean(max - z),  s = label_smoothing
 *   dlogits = (p - target) scale,  p = exp(z - max) / sum
 *
 * A team of threads has a row: a warp up to 1024 classes, eight to a block, else a whole block. It
 * goes over the row three times, of which only the first gets past the caches: the maximum and the
 * label's rank; the sum; the results. Afterwards one block adds up what the rows' losses came to.
 *
 *   logits (n, classes)      a team, VEC = 8         rows -> stats: a second kernel, one block,
 *   +------------------+     0 | 1 | 2 | .. | 31     which adds in the order of the rows
 *   |   row of a team  |     8 logits each, then
 *   +------------------+     the next 256
 *
 * exp in FP32 is within 2e-7 of itself, and the sum within 1e-6, whatever the number of classes, as
 * each thread carries along what its additions lose: probabilities are within 2e-6 of themselves
 * where z - max is exact (16-bit logits of one size), else within (z - max) 2^-24 more. 1 - p at
 * the label comes from the sum of the others, so that it doesn't cancel. The loss of a row is put
 * together in FP64: log(1 + 1e-9) is 0 in FP32.
 */
namespace mptk {

constexpr int SOFTMAX_THREADS = 256;
constexpr int SOFTMAX_WARP_CLASSES = 1024; /* up to here a warp has a row */

struct softmax_row { /* what one row adds to the statistics */
    double loss;
    int labeled, rank; /* how many classes come before the label */
};

struct softmax_args {
    const void *logits;      /* (n, classes) */
    const int *labels;       /* (n) or NULL */
    void *dlogits;           /* (n, classes) or NULL; may be logits */
    float *probabilities;    /* (n, classes) or NULL */
    softmax_row *rows;       /* (n) */
    const float *loss_scale; /* or NULL */
    int n, num_valid, classes;
    float label_smoothing, grad_scale;
};

/* e^x for x <= 0, within 2e-7 of itself; 0 below -87. x = k ln 2 + r with |r| <= ln 2 / 2, then
   Taylor's series to r^7, whose rest is below 6e-9. ln 2 in two parts, the first of 9 bits, so that
   k times it is exact. NaN gives NaN. */
MPTK_FN float exp_of(float x) {
    const float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f, lowest = -87.0f;
    const float bounded = fmaxf(x, lowest); /* NaN: lowest */
    const float k = rintf(bounded * 1.44269504f);
    const float r = fmaf(k, -ln2_low, fmaf(k, -ln2_high, bounded));
    float sum = 1.0f / 5040;

    sum = fmaf(sum, r, 1.0f / 720);
    sum = fmaf(sum, r, 1.0f / 120);
    sum = fmaf(sum, r, 1.0f / 24);
    sum = fmaf(sum, r, 1.0f / 6);
    sum = fmaf(sum, r, 0.5f);
    sum = fmaf(sum, r, 1.0f);
    sum = fmaf(sum, r, 1.0f);
    sum *= __uint_as_float(static_cast<unsigned>(static_cast<int>(k) + 127) << 23);
    return is_nan(x) ? x : x < lowest ? 0.0f : sum;
}

/* Natural logarithm of a number from 1 to 2^100, within 1e-12 of itself; infinity and NaN give
   themselves. x = 2^e m with m around 1; log m = 2 (t + t^3/3 + ..) with t = (m-1)/(m+1), |t| <
   0.172, to t^15. Once for a row. */
MPTK_FN double ln_of(double x) {
    const float rounded = static_cast<float>(x);
    int e = static_cast<int>(__float_as_uint(rounded) >> 23) - 127;

    if (!is_finite(rounded)) return x;
    double m = x * static_cast<double>(__uint_as_float(static_cast<unsigned>(127 - e) << 23));
    if (m > 1.4142135623730951) {
        m *= 0.5;
        e++;
    }
    const double t = (m - 1.0) / (m + 1.0), t2 = t * t;
    double sum = 1.0 / 15;
    for (int i = 13; i >= 1; i -= 2) sum = sum * t2 + 1.0 / i;
    return e * 0.69314718055994530942 + 2.0 * t * sum;
}

/* Order of floats as integers, with -0 = +0 and every NaN above all; and back. */
MPTK_FN int order_key(float x) {
    const int bits = static_cast<int>(__float_as_uint(x));

    if (is_nan(x)) return 0x7fffffff;
    if (bits >= 0) return bits;
    return x < 0.0f ? bits ^ 0x7fffffff : 0;
}

MPTK_FN float from_order_key(int key) {
    return __uint_as_float(static_cast<unsigned>(key < 0 ? key ^ 0x7fffffff : key));
}

template <int TEAM, class T, class OP> MPTK_FN T team_reduce(T value, T *shared, OP op) {
    if constexpr (TEAM == WARP) return lanes_reduce<WARP>(value, op);
    else return block_reduce<TEAM>(value, shared, op);
}

/* A row of logits and the team that works on it. */
template <class T, int VEC, int TEAM> struct softmax_team {
    const T *z; /* (classes) */
    int classes, label, member;
    float label_logit, largest;

    MPTK_METHOD void scan_maximum(int *max_key, int *rank) const {
        const int label_key = order_key(label_logit);

        *max_key = static_cast<int>(0x80000000u);
        *rank = 0;
        for (int c0 = member * VEC; c0 < classes; c0 += TEAM * VEC) {
            float value[VEC];
            load_vec<VEC>(z + c0, value);
#pragma unroll
            for (int i = 0; i < VEC; i++) {
                const int key = order_key(value[i]);
                *max_key = max(*max_key, key);
                *rank += key > label_key || (key == label_key && c0 + i < label);
            }
        }
    }

    /* Of exp(z - max) over all classes but the label, and of max - z over all. */
    MPTK_METHOD void scan_sums(float *others, float *gaps) const {
        float lost = 0.0f; /* by the additions so far (Kahan 1965) */

        *others = *gaps = 0.0f;
        for (int c0 = member * VEC; c0 < classes; c0 += TEAM * VEC) {
            float value[VEC], eight = 0.0f, gap = 0.0f;
            load_vec<VEC>(z + c0, value);
#pragma unroll
            for (int i = 0; i < VEC; i++) {
                if (c0 + i != label) eight += exp_of(value[i] - largest);
                gap += largest - value[i];
            }
            const float next = eight - lost, sum = *others + next;
            lost = (sum - *others) - next;
            *others = sum;
            *gaps += gap;
        }
    }
};

struct softmax_gradient { /* dlogits from p: at the label, elsewhere */
    float at_label, even, scale;
};

/* Reads the row for the last time, and writes: dlogits may lie where the logits do. */
template <class T, int VEC, int TEAM>
MPTK_FN void softmax_write(const softmax_team<T, VEC, TEAM> &team, const softmax_gradient &g,
                           float inv_sum, T *dlogits, float *probabilities) {
    for (int c0 = team.member * VEC; c0 < team.classes; c0 += TEAM * VEC) {
        float p[VEC], gradient[VEC];
        load_vec<VEC>(team.z + c0, p);
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            p[i] = exp_of(p[i] - team.largest) * inv_sum;
            gradient[i] = c0 + i == team.label ? g.at_label : (p[i] - g.even) * g.scale;
            if (team.label < 0) gradient[i] = 0.0f;
        }
        if (probabilities) store_vec<VEC>(probabilities + c0, p);
        if (dlogits) store_vec<VEC>(dlogits + c0, gradient);
    }
}

template <class T, int VEC, int TEAM>
MPTK_FN void softmax_zero(int member, int classes, T *dlogits, float *probabilities) {
    float zeros[VEC];

    fill_vec<VEC>(zeros, 0.0f);
    for (int c0 = member * VEC; c0 < classes; c0 += TEAM * VEC) {
        if (probabilities) store_vec<VEC>(probabilities + c0, zeros);
        if (dlogits) store_vec<VEC>(dlogits + c0, zeros);
    }
}

/* A row that counts: results, and what it adds to the statistics. Uniform over a team, and so over a
   block where teams meet at barriers. */
template <class T, int VEC, int TEAM>
MPTK_FN void softmax_row_run(const softmax_args &a, int row, T *dlogits, float *probabilities) {
    __shared__ int shared_ints[SOFTMAX_THREADS / WARP];
    __shared__ float shared_floats[SOFTMAX_THREADS / WARP];
    const float smoothing = a.label_smoothing;
    softmax_team<T, VEC, TEAM> team;
    softmax_gradient gradient;
    softmax_row result = {0.0, 0, 0};
    int max_key, rank;
    float others, gaps;

    team.z = static_cast<const T *>(a.logits) + static_cast<size_t>(row) * a.classes;
    team.classes = a.classes;
    team.member = threadIdx.x % TEAM;
    team.label = a.labels ? a.labels[row] : -1;
    team.label_logit = load(team.z + max(team.label, 0));
    team.scan_maximum(&max_key, &rank);
    max_key = team_reduce<TEAM>(max_key, shared_ints, op_max());
    rank = team_reduce<TEAM>(rank, shared_ints, op_sum());
    team.largest = from_order_key(max_key);
    team.scan_sums(&others, &gaps);
    others = team_reduce<TEAM>(others, shared_floats, op_sum());
    gaps = team_reduce<TEAM>(gaps, shared_floats, op_sum());

    const float label_exp = team.label < 0 ? 0.0f : exp_of(team.label_logit - team.largest);
    const float inv_sum = 1.0f / (label_exp + others);
    gradient.even = smoothing / static_cast<float>(a.classes);
    gradient.scale = a.grad_scale * (a.loss_scale ? *a.loss_scale : 1.0f);
    gradient.at_label = (smoothing - gradient.even - others * inv_sum) * gradient.scale;
    __syncwarp(); /* all have read the label's logit before anything is overwritten */
    softmax_write(team, gradient, inv_sum, dlogits, probabilities);
    if (team.member != 0) return;
    if (team.label >= 0) {
        result.labeled = 1;
        result.rank = is_nan(team.label_logit) ? 5 : rank; /* not even among five */
        result.loss = ln_of(static_cast<double>(label_exp) + others) +
                      (1.0 - smoothing) * (static_cast<double>(team.largest) - team.label_logit);
        if (smoothing > 0.0f) result.loss += static_cast<double>(smoothing) * gaps / a.classes;
    }
    a.rows[row] = result;
}

} // namespace mptk

/* TEAM threads for a row. */
template <class T, int VEC, int TEAM>
__global__ void __launch_bounds__(mptk::SOFTMAX_THREADS)
    mptk_softmax_xent_kernel(mptk::softmax_args a) {
    const int row = (blockIdx.x * mptk::SOFTMAX_THREADS + threadIdx.x) / TEAM;
    const int member = threadIdx.x % TEAM;
    const size_t at = static_cast<size_t>(row) * a.classes;
    T *dlogits = a.dlogits ? static_cast<T *>(a.dlogits) + at : nullptr;
    float *probabilities = a.probabilities ? a.probabilities + at : nullptr;
    const mptk::softmax_row nothing = {0.0, 0, 0};

    if (row < a.num_valid) {
        mptk::softmax_row_run<T, VEC, TEAM>(a, row, dlogits, probabilities);
    } else if (row < a.n) {
        mptk::softmax_zero<T, VEC, TEAM>(member, a.classes, dlogits, probabilities);
        if (member == 0) a.rows[row] = nothing;
    }
}

/* One block: adds the rows to *stats, in their order. */
__global__ void __launch_bounds__(mptk::SOFTMAX_THREADS)
    mptk_softmax_stats_kernel(const mptk::softmax_row *rows, int n, mpt_softmax_stats *stats) {
    __shared__ double shared_doubles[mptk::SOFTMAX_THREADS / mptk::WARP];
    __shared__ int shared_ints[mptk::SOFTMAX_THREADS / mptk::WARP];
    double loss = 0.0;
    int labeled = 0, correct = 0, top5 = 0;

    for (int i = threadIdx.x; i < n; i += mptk::SOFTMAX_THREADS) {
        loss += rows[i].loss;
        labeled += rows[i].labeled;
        correct += rows[i].labeled && rows[i].rank < 1;
        top5 += rows[i].labeled && rows[i].rank < 5;
    }
    loss = mptk::block_sum<mptk::SOFTMAX_THREADS>(loss, shared_doubles);
    labeled = mptk::block_sum<mptk::SOFTMAX_THREADS>(labeled, shared_ints);
    correct = mptk::block_sum<mptk::SOFTMAX_THREADS>(correct, shared_ints);
    top5 = mptk::block_sum<mptk::SOFTMAX_THREADS>(top5, shared_ints);
    if (threadIdx.x == 0) {
        stats->loss += loss;
        stats->num_labeled += labeled;
        stats->num_correct += correct;
        stats->num_correct_top5 += top5;
    }
}

#define MPTK_SOFTMAX_KERNELS(T) \
    template __global__ void mptk_softmax_xent_kernel<T, 8, 32>(mptk::softmax_args a); \
    template __global__ void mptk_softmax_xent_kernel<T, 1, 32>(mptk::softmax_args a); \
    template __global__ void mptk_softmax_xent_kernel<T, 8, 256>(mptk::softmax_args a); \
    template __global__ void mptk_softmax_xent_kernel<T, 1, 256>(mptk::softmax_args a);
MPTK_SOFTMAX_KERNELS(float)
MPTK_SOFTMAX_KERNELS(half)
MPTK_SOFTMAX_KERNELS(__nv_bfloat16)

/* -------------------------------------------------------------------------------------------------
 * >>pointwise   ReLU, add, pools, dropout, casts, input
 * -------------------------------------------------------------------------------------------------
 * Streams: a thread has eight neighbours, 16 bytes of a 16-bit type, and consecutive threads have
 * consecutive eights. Slots that don't count lie behind those that do, so "does it count" is one
 * comparison; what doesn't is not read, and loads as zeros. Tensors have less than 2^31 elements;
 * places are unsigned, as the last block may reach beyond.
 */
namespace mptk {

constexpr int POINTWISE_THREADS = 256;
constexpr int POINTWISE_BLOCK = POINTWISE_THREADS * 8; /* elements */

MPTK_FN unsigned pointwise_at() { /* the first of a thread's eight */
    return (blockIdx.x * POINTWISE_THREADS + threadIdx.x) * 8;
}

/* Elements at .. at + 7 as far as they are below `end`; vectors only from aligned pointers. */
template <class T> MPTK_FN void load8_below(const T *p, unsigned at, unsigned end, float f[8]) {
    if (at + 8 <= end) load8(p + at, f);
    else load8_ragged(p + at, at < end ? static_cast<int>(end - at) : 0, f);
}

template <class T> MPTK_FN void store8_below(T *p, unsigned at, unsigned end, const float f[8]) {
    if (at + 8 <= end) store8(p + at, f);
    else store8_ragged(p + at, at < end ? static_cast<int>(end - at) : 0, f);
}

/* ---- relu, add ------------------------------------------------------------------------------- */
struct pointwise_args {
    const void *a, *b;
    void *y;             /* may be a or b */
    unsigned valid, end; /* elements: those that count, all */
};

struct op_relu {
    static constexpr bool HAS_B = false;
    MPTK_METHOD float operator()(float a, float) const {
        return relu(a);
    }
};

struct op_relu_gate {
    static constexpr bool HAS_B = true;
    MPTK_METHOD float operator()(float a, float b) const {
        return relu_gate(a, b);
    }
};

struct op_add {
    static constexpr bool HAS_B = true;
    MPTK_METHOD float operator()(float a, float b) const {
        return a + b;
    }
};

} // namespace mptk

/* All three make zero of zeros, and so of what doesn't count. */
template <class T, class OP>
__global__ void __launch_bounds__(mptk::POINTWISE_THREADS)
    mptk_pointwise_kernel(mptk::pointwise_args p) {
    const unsigned at = mptk::pointwise_at();
    float a[8], b[8] = {0, 0, 0, 0, 0, 0, 0, 0};

    if (at >= p.end) return;
    mptk::load8_below(static_cast<const T *>(p.a), at, p.valid, a);
    if (OP::HAS_B) mptk::load8_below(static_cast<const T *>(p.b), at, p.valid, b);
#pragma unroll
    for (int i = 0; i < 8; i++) a[i] = OP()(a[i], b[i]);
    mptk::store8_below(static_cast<T *>(p.y), at, p.end, a);
}

#define MPTK_POINTWISE_KERNELS(T) \
    template __global__ void mptk_pointwise_kernel<T, mptk::op_relu>(mptk::pointwise_args p); \
    template __global__ void mptk_pointwise_kernel<T, mptk::op_relu_gate>(mptk::pointwise_args p); \
    template __global__ void mptk_pointwise_kernel<T, mptk::op_add>(mptk::pointwise_args p);
MPTK_POINTWISE_KERNELS(float)
MPTK_POINTWISE_KERNELS(half)
MPTK_POINTWISE_KERNELS(__nv_bfloat16)

/* ---- dropout ------------------------------------------------------------------------------------
   The CPU's masks: Philox 4x32 with ten rounds (Salmon et al. 2011), whose counter is sample, group
   of four elements, epoch and layer, and whose key is the seed. */
namespace mptk {

constexpr unsigned DROPOUT_PURPOSE = 64; /* of random numbers; layers count from here */

struct dropout_args {
    const void *x;
    void *y;
    const unsigned long long *sample_ids; /* (n) or NULL */
    unsigned long long first_id, seed;
    unsigned long long limit; /* words below it are dropped: probability * 2^32, rounded up */
    unsigned epoch_and_layer; /* epoch << 8 | DROPOUT_PURPOSE + layer */
    float scale;              /* of those that stay */
    int num_valid, per_sample;
    int items; /* n * groups */
    fastdiv groups; /* of four elements in a sample, the last may have fewer */
};

MPTK_FN uint4 philox(uint4 c, unsigned long long seed) {
    unsigned k0 = static_cast<unsigned>(seed), k1 = static_cast<unsigned>(seed >> 32);

    for (int round = 0; round < 10; round++) {
        const unsigned high0 = __umulhi(0xD2511F53u, c.x), low0 = 0xD2511F53u * c.x;
        const unsigned high1 = __umulhi(0xCD9E8D57u, c.z), low1 = 0xCD9E8D57u * c.z;
        c = make_uint4(high1 ^ c.y ^ k0, low1, high0 ^ c.w ^ k1, low0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

} // namespace mptk

template <class T>
__global__ void __launch_bounds__(mptk::POINTWISE_THREADS)
    mptk_pointwise_dropout_kernel(mptk::dropout_args a) {
    const int item = blockIdx.x * mptk::POINTWISE_THREADS + threadIdx.x;
    int group;

    if (item >= a.items) return;
    const int sample = mptk::quotient(item, a.groups, &group);
    const size_t at = static_cast<size_t>(sample) * a.per_sample + group * 4;
    const int count = min(a.per_sample - group * 4, 4);
    const unsigned long long id = sample >= a.num_valid ? 0
                                  : a.sample_ids        ? a.sample_ids[sample]
                                                        : a.first_id + sample;
    const uint4 counter = make_uint4(static_cast<unsigned>(id), static_cast<unsigned>(id >> 32),
                                     static_cast<unsigned>(group), a.epoch_and_layer);
    const uint4 random = mptk::philox(counter, a.seed);
    const unsigned words[4] = {random.x, random.y, random.z, random.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const bool stays = sample < a.num_valid && i < count && words[i] >= a.limit;
        const float x = stays ? mptk::load(static_cast<const T *>(a.x) + at + i) * a.scale : 0.0f;
        if (i < count) mptk::store(static_cast<T *>(a.y) + at + i, x);
    }
}

template __global__ void mptk_pointwise_dropout_kernel<float>(mptk::dropout_args a);
template __global__ void mptk_pointwise_dropout_kernel<half>(mptk::dropout_args a);
template __global__ void mptk_pointwise_dropout_kernel<__nv_bfloat16>(mptk::dropout_args a);

/* ---- pools --------------------------------------------------------------------------------------
   Forward a thread has VEC channels of an output and looks at its window; backward VEC channels of
   an input, and looks at the windows that held it: no two threads at one number. Sums run over rows,
   then columns, as on the CPU. */
namespace mptk {

struct pool_args {
    const void *x;            /* (n,h,wd,c); backward: dy (n,p,q,c) */
    void *y;                  /* (n,p,q,c); backward: dx (n,h,wd,c) */
    const uint8_t *argmax_in; /* backward of the maximum */
    uint8_t *argmax_out;      /* forward of the maximum, or NULL */
    int valid, items;         /* chunks of VEC channels to write: those that count, all */
    int h, wd, c, p, q;
    int kernel_h, kernel_w, stride, padding;
    float share; /* of an average: 1 / (kernel_h * kernel_w) */
    fastdiv chunks, columns, rows; /* c / VEC, then width and height of what is written */
};

struct pool_place {
    int image, row, column, channel;
};

template <int VEC> MPTK_FN pool_place pool_place_of(const pool_args &a, int item) {
    pool_place p;
    int chunk;

    item = quotient(item, a.chunks, &chunk);
    item = quotient(item, a.columns, &p.column);
    p.image = quotient(item, a.rows, &p.row);
    p.channel = chunk * VEC;
    return p;
}

template <int VEC> struct pool_maxima { /* the first of equals; NaN is above all */
    float best[VEC];
    int index[VEC];

    MPTK_METHOD void start(int first_index) {
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            best[i] = __uint_as_float(0xff800000u); /* -infinity */
            index[i] = first_index;
        }
    }

    MPTK_METHOD void look_at(const float x[VEC], int at) {
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            const bool takes = !(x[i] <= best[i]) && !is_nan(best[i]);
            best[i] = takes ? x[i] : best[i];
            index[i] = takes ? at : index[i];
        }
    }
};

template <int VEC> MPTK_FN void store_indices(uint8_t *p, const int index[VEC]) {
#pragma unroll
    for (int i = 0; i < VEC; i++) p[i] = static_cast<uint8_t>(index[i]);
}

/* Windows that hold position `at`: first .. last. */
struct pool_windows {
    int first, last;
};

MPTK_FN pool_windows pool_windows_of(int at, int kernel, int stride, int padding, int size) {
    const int below = at + padding - kernel; /* the last that lies before the first's start */
    const pool_windows w = {below < 0 ? 0 : below / stride + 1,
                            min((at + padding) / stride, size - 1)};
    return w;
}

} // namespace mptk

template <class T, int VEC>
__global__ void __launch_bounds__(mptk::POINTWISE_THREADS)
    mptk_pointwise_max_pool_kernel(mptk::pool_args a) {
    const int item = blockIdx.x * mptk::POINTWISE_THREADS + threadIdx.x;
    mptk::pool_maxima<VEC> maxima;

    if (item >= a.items) return;
    if (item >= a.valid) {
        maxima.start(0);
        mptk::fill_vec<VEC>(maxima.best, 0.0f);
    } else {
        const mptk::pool_place place = mptk::pool_place_of<VEC>(a, item);
        const int top = place.row * a.stride - a.padding;
        const int left = place.column * a.stride - a.padding;
        const int first_i = max(-top, 0), last_i = min(a.kernel_h, a.h - top);
        const int first_j = max(-left, 0), last_j = min(a.kernel_w, a.wd - left);
        const T *x = static_cast<const T *>(a.x) + place.channel;
        maxima.start(first_i * a.kernel_w + first_j);
        for (int i = first_i; i < last_i; i++) {
            const int row = (place.image * a.h + top + i) * a.wd + left;
            for (int j = first_j; j < last_j; j++) {
                float value[VEC];
                mptk::load_vec<VEC>(x + static_cast<size_t>(row + j) * a.c, value);
                maxima.look_at(value, i * a.kernel_w + j);
            }
        }
    }
    const size_t at = static_cast<size_t>(item) * VEC;
    mptk::store_vec<VEC>(static_cast<T *>(a.y) + at, maxima.best);
    if (a.argmax_out) mptk::store_indices<VEC>(a.argmax_out + at, maxima.index);
}

template <class T, int VEC>
__global__ void __launch_bounds__(mptk::POINTWISE_THREADS)
    mptk_pointwise_avg_pool_kernel(mptk::pool_args a) {
    const int item = blockIdx.x * mptk::POINTWISE_THREADS + threadIdx.x;
    float sum[VEC];

    if (item >= a.items) return;
    mptk::fill_vec<VEC>(sum, 0.0f);
    if (item < a.valid) {
        const mptk::pool_place place = mptk::pool_place_of<VEC>(a, item);
        const int top = place.row * a.stride - a.padding;
        const int left = place.column * a.stride - a.padding;
        const int last_i = min(a.kernel_h, a.h - top), last_j = min(a.kernel_w, a.wd - left);
        const T *x = static_cast<const T *>(a.x) + place.channel;
        for (int i = max(-top, 0); i < last_i; i++) {
            const int row = (place.image * a.h + top + i) * a.wd + left;
            for (int j = max(-left, 0); j < last_j; j++) {
                float value[VEC];
                mptk::load_vec<VEC>(x + static_cast<size_t>(row + j) * a.c, value);
#pragma unroll
                for (int e = 0; e < VEC; e++) sum[e] += value[e];
            }
        }
    }
#pragma unroll
    for (int e = 0; e < VEC; e++) sum[e] *= a.share;
    mptk::store_vec<VEC>(static_cast<T *>(a.y) + static_cast<size_t>(item) * VEC, sum);
}

/* MAX: what each window gives goes to its maximum alone; else all get the same share. */
template <class T, int VEC, bool MAX>
__global__ void __launch_bounds__(mptk::POINTWISE_THREADS)
    mptk_pointwise_pool_backward_kernel(mptk::pool_args a) {
    const int item = blockIdx.x * mptk::POINTWISE_THREADS + threadIdx.x;
    float sum[VEC];

    if (item >= a.items) return;
    mptk::fill_vec<VEC>(sum, 0.0f);
    if (item < a.valid) {
        const mptk::pool_place place = mptk::pool_place_of<VEC>(a, item);
        const mptk::pool_windows rows =
            mptk::pool_windows_of(place.row, a.kernel_h, a.stride, a.padding, a.p);
        const mptk::pool_windows columns =
            mptk::pool_windows_of(place.column, a.kernel_w, a.stride, a.padding, a.q);
        for (int p = rows.first; p <= rows.last; p++) {
            const int i = place.row + a.padding - p * a.stride;
            for (int q = columns.first; q <= columns.last; q++) {
                const int index = i * a.kernel_w + place.column + a.padding - q * a.stride;
                const int pixel = (place.image * a.p + p) * a.q + q;
                const size_t at = static_cast<size_t>(pixel) * a.c + place.channel;
                float dy[VEC];
                mptk::load_vec<VEC>(static_cast<const T *>(a.x) + at, dy);
#pragma unroll
                for (int e = 0; e < VEC; e++)
                    sum[e] += !MAX || a.argmax_in[at + e] == index ? dy[e] : 0.0f;
            }
        }
    }
#pragma unroll
    for (int e = 0; e < VEC && !MAX; e++) sum[e] *= a.share;
    mptk::store_vec<VEC>(static_cast<T *>(a.y) + static_cast<size_t>(item) * VEC, sum);
}

#define MPTK_POOL_KERNELS(T, VEC) \
    template __global__ void mptk_pointwise_max_pool_kernel<T, VEC>(mptk::pool_args a); \
    template __global__ void mptk_pointwise_avg_pool_kernel<T, VEC>(mptk::pool_args a); \
    template __global__ void mptk_pointwise_pool_backward_kernel<T, VEC, true>( \
        mptk::pool_args a); \
    template __global__ void mptk_pointwise_pool_backward_kernel<T, VEC, false>(mptk::pool_args a);
MPTK_POOL_KERNELS(float, 8)
MPTK_POOL_KERNELS(float, 1)
MPTK_POOL_KERNELS(half, 8)
MPTK_POOL_KERNELS(half, 1)
MPTK_POOL_KERNELS(__nv_bfloat16, 8)
MPTK_POOL_KERNELS(__nv_bfloat16, 1)

/* ---- casts, input, fill, scale ------------------------------------------------------------------
   Their pointers may be anywhere in a flat buffer: vectors only if `aligned` says so. */
namespace mptk {

struct cast_args {
    const void *src;
    void *dst;
    unsigned end;
    int aligned;
};

struct normalize_args {
    const void *x;
    void *y;
    const float *mean, *std; /* (c) or NULL */
    unsigned valid, end;
    int c, aligned;
};

struct fill_args {
    void *dst;
    long long count;
    float value;
};

struct scale_args {
    float *x;
    long long count;
    float factor;
};

} // namespace mptk

template <class S, class D>
__global__ void __launch_bounds__(mptk::POINTWISE_THREADS)
    mptk_pointwise_cast_kernel(mptk::cast_args a) {
    const unsigned at = mptk::pointwise_at();
    const S *src = static_cast<const S *>(a.src);
    D *dst = static_cast<D *>(a.dst);
    float f[8];

    if (at >= a.end) return;
    if (a.aligned) {
        mptk::load8_below(src, at, a.end, f);
        mptk::store8_below(dst, at, a.end, f);
    } else {
        const int count = static_cast<int>(min(a.end - at, 8u));
        mptk::load8_ragged(src + at, count, f);
        mptk::store8_ragged(dst + at, count, f);
    }
}

#define MPTK_CAST_KERNELS(S) \
    template __global__ void mptk_pointwise_cast_kernel<S, float>(mptk::cast_args a); \
    template __global__ void mptk_pointwise_cast_kernel<S, half>(mptk::cast_args a); \
    template __global__ void mptk_pointwise_cast_kernel<S, __nv_bfloat16>(mptk::cast_args a);
MPTK_CAST_KERNELS(float)
MPTK_CAST_KERNELS(half)
MPTK_CAST_KERNELS(__nv_bfloat16)

/* y = (x - mean) / std, bytes as x / 255: three roundings in FP32, where the CPU computes in FP64. */
template <class S, class D>
__global__ void __launch_bounds__(mptk::POINTWISE_THREADS)
    mptk_pointwise_normalize_kernel(mptk::normalize_args a) {
    const unsigned at = mptk::pointwise_at();
    const S *x = static_cast<const S *>(a.x);
    const float unit = sizeof(S) == 1 ? 255.0f : 1.0f;
    unsigned channel = at % static_cast<unsigned>(a.c);
    float f[8];

    if (at >= a.end) return;
    if (a.aligned) mptk::load8_below(x, at, a.valid, f);
    else mptk::load8_ragged(x + at, at < a.valid ? static_cast<int>(min(a.valid - at, 8u)) : 0, f);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        f[i] = f[i] / unit;
        if (a.mean) f[i] -= a.mean[channel];
        if (a.std) f[i] /= a.std[channel];
        if (at + i >= a.valid) f[i] = 0.0f;
        channel = channel + 1 == static_cast<unsigned>(a.c) ? 0 : channel + 1;
    }
    mptk::store8_below(static_cast<D *>(a.y), at, a.end, f);
}

#define MPTK_NORMALIZE_KERNELS(S) \
    template __global__ void mptk_pointwise_normalize_kernel<S, float>(mptk::normalize_args a); \
    template __global__ void mptk_pointwise_normalize_kernel<S, half>(mptk::normalize_args a); \
    template __global__ void mptk_pointwise_normalize_kernel<S, __nv_bfloat16>( \
        mptk::normalize_args a);
MPTK_NORMALIZE_KERNELS(uint8_t)
MPTK_NORMALIZE_KERNELS(float)
MPTK_NORMALIZE_KERNELS(half)
MPTK_NORMALIZE_KERNELS(__nv_bfloat16)

/* Eight elements a thread, POINTWISE_THREADS apart. */
template <class T>
__global__ void __launch_bounds__(mptk::POINTWISE_THREADS)
    mptk_pointwise_fill_kernel(mptk::fill_args a) {
    long long at = static_cast<long long>(blockIdx.x) * mptk::POINTWISE_BLOCK + threadIdx.x;

    for (int i = 0; i < 8 && at < a.count; i++, at += mptk::POINTWISE_THREADS)
        mptk::store(static_cast<T *>(a.dst) + at, a.value);
}

template __global__ void mptk_pointwise_fill_kernel<float>(mptk::fill_args a);
template __global__ void mptk_pointwise_fill_kernel<half>(mptk::fill_args a);
template __global__ void mptk_pointwise_fill_kernel<__nv_bfloat16>(mptk::fill_args a);

/* A factor of 0 makes zeros, of NaN too. */
__global__ void __launch_bounds__(mptk::POINTWISE_THREADS)
    mptk_pointwise_scale_kernel(mptk::scale_args a) {
    long long at = static_cast<long long>(blockIdx.x) * mptk::POINTWISE_BLOCK + threadIdx.x;
    const bool keeps = __float_as_uint(a.factor) != 0;

    for (int i = 0; i < 8 && at < a.count; i++, at += mptk::POINTWISE_THREADS)
        a.x[at] = keeps ? a.factor * a.x[at] : 0.0f;
}

/* -------------------------------------------------------------------------------------------------
 * >>update   Is every gradient finite? The scaler, the optimizer, running statistics
 * -------------------------------------------------------------------------------------------------
 * The end of a step, without the host. Three kernels in a row over the flat buffers, cut into chunks
 * of at most 16384 weights that never cross a tensor's border:
 *
 *   check    a block a chunk: sum of squares of the unscaled gradient, first inf or NaN of the row;
 *            blocks behind look at the statistics of batch norms
 *   decide   one block: the norm, the scaler's verdict, the rate, clipping, LARS's ratios, the report
 *   apply    a block a chunk: nothing if the step is skipped; else unscales, decays, updates, and
 *            writes the 16-bit copy in the same pass; blocks behind move the running statistics
 *
 *   bytes a weight   check 4, apply 4 + 8 (weight) + 8 a moment + 2 (copy)
 *
 * All formulas, and the order of roundings, are those of mptrain.h's >>optim and >>scaler: products
 * are rounded before they are added, so the weights have the CPU's bits, but for the last bit of
 * the norm, whose squares are added in another order.
 */
namespace mptk {

constexpr int UPDATE_THREADS = 256;

/* a * b, never fused with an addition. */
MPTK_FN float product(float a, float b) {
    return __fmul_rn(a, b);
}

/* What a block works on: a chunk of weights, or as many statistics. */
struct update_part {
    long long offset; /* into the row, a multiple of 4 */
    int lead;         /* numbers from there on that belong to the part before, 0 .. 3 */
    int end;          /* lead + count */
    int segment;      /* -1: statistics */
};

MPTK_FN update_part update_part_of(const mpt_update_args &a, long long block) {
    update_part part;
    long long first;
    int count;

    if (block < a.num_chunks) {
        const mpt_update_chunk chunk = a.chunks[block];
        first = chunk.offset;
        count = chunk.count;
        part.segment = chunk.segment;
    } else {
        const long long done = (block - a.num_chunks) * MPT_UPDATE_CHUNK;
        first = a.num_params + done;
        count = static_cast<int>(min(a.num_stats - done, static_cast<long long>(MPT_UPDATE_CHUNK)));
        part.segment = -1;
    }
    part.lead = static_cast<int>(first % 4);
    part.offset = first - part.lead;
    part.end = part.lead + count;
    return part;
}

/* Four neighbours from i on, a multiple of 4, as far as they belong to the part; else zeros. p is
   aligned to 16 bytes. */
MPTK_FN void load4(const float *p, const update_part &part, int i, float f[4]) {
    if (i >= part.lead && i + 4 <= part.end) {
        const float4 four = *reinterpret_cast<const float4 *>(p + i);
        f[0] = four.x, f[1] = four.y, f[2] = four.z, f[3] = four.w;
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; k++) f[k] = i + k >= part.lead && i + k < part.end ? p[i + k] : 0.0f;
}

MPTK_FN void store4(float *p, const update_part &part, int i, const float f[4]) {
    if (i >= part.lead && i + 4 <= part.end) {
        *reinterpret_cast<float4 *>(p + i) = make_float4(f[0], f[1], f[2], f[3]);
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (i + k >= part.lead && i + k < part.end) p[i + k] = f[k];
}

template <class T>
MPTK_FN void store4_half(T *p, const update_part &part, int i, const float f[4]) {
    if (i >= part.lead && i + 4 <= part.end) {
        *reinterpret_cast<uint2 *>(p + i) =
            make_uint2(pack2(f[0], f[1], T()), pack2(f[2], f[3], T()));
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (i + k >= part.lead && i + k < part.end) store(p + i + k, f[k]);
}

/* ---- check ----------------------------------------------------------------------------------- */

/* What turns a stored gradient into the mean over the records that were there. */
MPTK_FN float update_unscale(const mpt_update_args &a) {
    const double scale = a.state->scaler.scale;
    return static_cast<float>(a.fitting / (scale * static_cast<double>(a.num_samples)));
}

struct update_squares {
    double sum;
    int first_bad; /* of the part; INT_MAX: none */
};

/* Of multiplier * x, by a thread. In FP64: squares of FP32 numbers overflow and vanish in FP32. Bad
   is also what overflows when it is unscaled, by a scale below 1. */
MPTK_FN update_squares update_squares_of(const float *x, const update_part &part,
                                         float multiplier) {
    update_squares s = {0.0, 0x7fffffff};

    for (int i = threadIdx.x * 4; i < part.end; i += UPDATE_THREADS * 4) {
        float f[4];
        load4(x, part, i, f);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const float unscaled = f[k] * multiplier;
            const bool fine = is_finite(f[k]) && is_finite(unscaled);
            if (!fine) s.first_bad = min(s.first_bad, i + k);
            s.sum += static_cast<double>(unscaled) * unscaled;
        }
    }
    return s;
}

} // namespace mptk

__global__ void __launch_bounds__(mptk::UPDATE_THREADS)
    mptk_update_check_kernel(mpt_update_args a) {
    __shared__ double shared_sums[mptk::UPDATE_THREADS / mptk::WARP];
    __shared__ int shared_bad[mptk::UPDATE_THREADS / mptk::WARP];
    __shared__ float shared_unscale;
    const mptk::update_part part = mptk::update_part_of(a, blockIdx.x);
    const bool weighs = part.segment >= 0 && a.segments[part.segment].adapts;
    double weight_sum = 0.0;

    if (threadIdx.x == 0) shared_unscale = mptk::update_unscale(a); /* a division in FP64 is slow */
    __syncthreads();
    mptk::update_squares s =
        mptk::update_squares_of(a.row + part.offset, part, part.segment < 0 ? 1 : shared_unscale);
    s.sum = mptk::block_sum<mptk::UPDATE_THREADS>(s.sum, shared_sums);
    s.first_bad =
        mptk::block_reduce<mptk::UPDATE_THREADS>(s.first_bad, shared_bad, mptk::op_min());
    if (weighs) {
        weight_sum = mptk::update_squares_of(a.weights + part.offset, part, 1).sum;
        weight_sum = mptk::block_sum<mptk::UPDATE_THREADS>(weight_sum, shared_sums);
    }
    if (threadIdx.x != 0) return;
    if (part.segment >= 0) {
        a.sums[2 * static_cast<size_t>(blockIdx.x)] = s.sum;
        a.sums[2 * static_cast<size_t>(blockIdx.x) + 1] = weight_sum;
    }
    /* -1 for none is the largest number to an unsigned minimum. */
    if (s.first_bad != 0x7fffffff)
        atomicMin(reinterpret_cast<unsigned long long *>(&a.state->first_nonfinite),
                  static_cast<unsigned long long>(part.offset + s.first_bad));
}

/* ---- decide ---------------------------------------------------------------------------------- */
namespace mptk {

/* sqrt of a sum of squares of FP32 numbers, 2^-300 .. 2^300, by way of sqrtf; within 1e-7 of it. */
MPTK_FN float norm_of(double sum) {
    const double far = 1.2676506002282294e30; /* 2^100 */
    const float most = 3.402823466e38f;
    double norm;

    if (sum > far) norm = static_cast<double>(sqrtf(static_cast<float>(sum / far / far))) * far;
    else if (sum < 1 / far) norm = static_cast<double>(sqrtf(static_cast<float>(sum * far * far))) / far;
    else norm = static_cast<double>(sqrtf(static_cast<float>(sum)));
    return norm > static_cast<double>(most) ? most : static_cast<float>(norm);
}

MPTK_FN float clip_factor(float norm, float max_norm) {
    const float factor = max_norm / (norm + 1e-6f);
    return max_norm > 0 && factor < 1 ? factor : 1;
}

/* mpt_loss_scaler_update. 1: skip this step. */
MPTK_FN int scaler_update(mpt_loss_scaler *s, bool found_nonfinite) {
    const mpt_loss_scaler_desc *d = &s->desc;
    const bool dynamic = d->mode == MPT_LOSS_SCALE_DYNAMIC;
    const double grown = static_cast<double>(s->scale) * static_cast<double>(d->growth_factor);
    const float lowered = s->scale * d->backoff_factor;

    if (found_nonfinite) {
        const bool lowest = !dynamic || s->scale <= d->min_scale;
        s->num_skipped++;
        s->good_steps = 0;
        s->skips_at_min = !lowest ? 0 : s->skips_at_min + (s->skips_at_min < 0x7fffffff);
        if (dynamic) s->scale = lowered < d->min_scale ? d->min_scale : lowered;
        return 1;
    }
    s->skips_at_min = 0;
    if (dynamic && ++s->good_steps >= d->growth_interval) {
        if (grown <= static_cast<double>(d->max_scale)) s->scale = static_cast<float>(grown);
        s->good_steps = 0;
    }
    return 0;
}

/* What the apply kernel needs of this step; applied_steps counts it already. */
MPTK_FN void update_scalars(mpt_step_state *s, const mpt_optimizer_desc &d) {
    s->step_rate = s->rate;
    s->keep = 1;
    s->root = 1;
    if (d.kind == MPT_OPTIMIZER_ADAMW) s->keep = 1 - product(s->rate, d.weight_decay);
    if (d.kind == MPT_OPTIMIZER_ADAM || d.kind == MPT_OPTIMIZER_ADAMW) {
        s->step_rate = static_cast<float>(static_cast<double>(s->rate) / (1 - s->beta1_power));
        s->root = sqrtf(static_cast<float>(1 - s->beta2_power));
    }
}

MPTK_FN void update_report(const mpt_update_args &a, float scale, float norm) {
    const mpt_step_state *s = a.state;
    mpt_step_report *r = &a.state->report; /* its seconds are the host's */

    r->loss = s->stats.loss / static_cast<double>(a.num_samples);
    r->step = a.step;
    r->applied_steps = s->applied_steps;
    r->num_samples = a.num_samples;
    r->num_correct = s->stats.num_correct;
    r->num_correct_top5 = s->stats.num_correct_top5;
    r->loss_scale = scale;
    r->learning_rate = s->skip ? 0 : s->rate;
    r->grad_norm = norm;
    r->skipped = s->skip;
}

/* One thread; returns the factor of clipping. squares: of the unscaled gradient. */
MPTK_FN float update_decide(const mpt_update_args &a, double squares) {
    mpt_step_state *s = a.state;
    const mpt_softmax_stats nothing = {0.0, 0, 0, 0};
    const bool nonfinite = s->first_nonfinite != -1;
    const float scale = s->scaler.scale, unscale = update_unscale(a);
    const float norm = nonfinite ? 0.0f : norm_of(squares);
    const float clip = clip_factor(norm, a.optimizer.max_grad_norm);
    const long long place = s->applied_steps - a.first_applied;

    s->skip = scaler_update(&s->scaler, nonfinite);
    s->rate = a.rates[place < 0 ? 0 : place > 3 ? 3 : place];
    s->multiplier = unscale * clip;
    if (!s->skip) {
        s->applied_steps++;
        s->beta1_power *= static_cast<double>(a.optimizer.beta1);
        s->beta2_power *= static_cast<double>(a.optimizer.beta2);
        update_scalars(s, a.optimizer);
    }
    update_report(a, scale, norm);
    s->stats = nothing;
    return clip;
}

/* LARS's trust ratio of a segment, by a warp. 1 where a norm is 0, or where it is not at work. */
MPTK_FN float update_lars_ratio(const mpt_update_args &a, const mpt_update_segment &s, float clip) {
    const int lane = threadIdx.x % WARP;
    const float decay = s.decays ? a.optimizer.weight_decay : 0.0f;
    double gradients = 0.0, weights = 0.0;

    for (long long i = s.first_chunk + lane; i < s.first_chunk + s.num_chunks; i += WARP) {
        gradients += a.sums[2 * i];
        weights += a.sums[2 * i + 1];
    }
    const float g_norm = product(norm_of(warp_sum(gradients)), clip);
    const float w_norm = norm_of(warp_sum(weights));
    if (!s.adapts || !(w_norm > 0) || !(g_norm > 0)) return 1.0f;
    return product(a.optimizer.lars_trust, w_norm) /
           (g_norm + product(decay, w_norm) + a.optimizer.epsilon);
}

} // namespace mptk

/* One block. */
__global__ void __launch_bounds__(mptk::UPDATE_THREADS)
    mptk_update_decide_kernel(mpt_update_args a) {
    __shared__ double shared_sums[mptk::UPDATE_THREADS / mptk::WARP];
    __shared__ float shared_clip;
    double squares = 0.0;

    for (long long i = threadIdx.x; i < a.num_chunks; i += mptk::UPDATE_THREADS)
        squares += a.sums[2 * i];
    squares = mptk::block_sum<mptk::UPDATE_THREADS>(squares, shared_sums);
    if (threadIdx.x == 0) shared_clip = mptk::update_decide(a, squares);
    __syncthreads();
    if (a.optimizer.kind != MPT_OPTIMIZER_LARS) return; /* no barrier follows */
    for (long long i = threadIdx.x / mptk::WARP; i < a.num_segments;
         i += mptk::UPDATE_THREADS / mptk::WARP) {
        const float ratio = mptk::update_lars_ratio(a, a.segments[i], shared_clip);
        if (threadIdx.x % mptk::WARP == 0) a.ratios[i] = ratio;
    }
}

/* ---- apply ----------------------------------------------------------------------------------- */
namespace mptk {

struct update_scale { /* what holds for a chunk */
    float multiplier, decay, rate, keep, root;
};

MPTK_FN update_scale update_scale_of(const mpt_update_args &a, int segment) {
    const mpt_step_state *s = a.state;
    const bool decays = a.segments[segment].decays;
    update_scale u;

    u.multiplier = s->multiplier;
    u.decay = decays && a.optimizer.kind != MPT_OPTIMIZER_ADAMW ? a.optimizer.weight_decay : 0.0f;
    u.rate = s->step_rate;
    u.keep = decays ? s->keep : 1.0f;
    u.root = s->root;
    if (a.optimizer.kind == MPT_OPTIMIZER_LARS) u.rate *= a.ratios[segment];
    return u;
}

/* Rules, for one weight. m and v: first and second moment. */
struct rule_sgd {
    static constexpr int MOMENTS = 0;

    MPTK_METHOD explicit rule_sgd(const mpt_update_args &) {
    }

    MPTK_METHOD void operator()(const update_scale &s, float g, float *w, float *, float *) const {
        *w -= product(s.rate, product(g, s.multiplier) + product(s.decay, *w));
    }
};

/* Three in one: factors of 1 and 0 change no bit. LARS has the rate inside the momentum, so that old
   steps keep theirs (inner); Nesterov looks one step ahead (ahead, the factor of g). */
struct rule_momentum {
    static constexpr int MOMENTS = 1;
    float momentum, ahead, behind;
    bool lars;

    MPTK_METHOD explicit rule_momentum(const mpt_update_args &a) {
        const bool nesterov = a.optimizer.kind == MPT_OPTIMIZER_SGD_NESTEROV;
        momentum = a.optimizer.momentum;
        ahead = nesterov ? 1.0f : 0.0f;
        behind = nesterov ? momentum : 1.0f;
        lars = a.optimizer.kind == MPT_OPTIMIZER_LARS;
    }

    MPTK_METHOD void operator()(const update_scale &s, float g, float *w, float *m, float *) const {
        const float inner = lars ? s.rate : 1.0f, outer = lars ? 1.0f : s.rate;
        const float d = product(g, s.multiplier) + product(s.decay, *w);
        *m = product(momentum, *m) + product(inner, d);
        *w -= product(outer, product(ahead, d) + product(behind, *m));
    }
};

/* epsilon is added in FP32: in FP16 1e-8 is 0, and a gradient of 0 gave 0/0. */
struct rule_adam {
    static constexpr int MOMENTS = 2;
    float beta1, beta2, rest1, rest2, epsilon;

    MPTK_METHOD explicit rule_adam(const mpt_update_args &a) {
        beta1 = a.optimizer.beta1;
        beta2 = a.optimizer.beta2;
        rest1 = static_cast<float>(1 - static_cast<double>(beta1));
        rest2 = static_cast<float>(1 - static_cast<double>(beta2));
        epsilon = a.optimizer.epsilon;
    }

    MPTK_METHOD void operator()(const update_scale &s, float g, float *w, float *m,
                                float *v) const {
        const float d = product(g, s.multiplier) + product(s.decay, *w);
        *m = product(beta1, *m) + product(rest1, d);
        *v = product(beta2, *v) + product(product(rest2, d), d);
        *w = product(s.keep, *w) - product(s.rate, *m / (sqrtf(*v) / s.root + epsilon));
    }
};

/* running += momentum (sum / records - running) */
MPTK_FN void update_statistics(const mpt_update_args &a, const update_part &part) {
    const float records = static_cast<float>(a.num_samples);

    for (int i = part.lead + threadIdx.x; i < part.end; i += UPDATE_THREADS) {
        const long long at = part.offset + i;
        float *running = a.running + (at - a.num_params);
        *running += product(a.momentum[at - a.num_params], a.row[at] / records - *running);
    }
}

} // namespace mptk

template <class RULE>
__global__ void __launch_bounds__(mptk::UPDATE_THREADS)
    mptk_update_apply_kernel(mpt_update_args a) {
    const mptk::update_part part = mptk::update_part_of(a, blockIdx.x);
    const RULE rule(a);

    if (a.state->skip) return;
    if (part.segment < 0) {
        mptk::update_statistics(a, part);
        return;
    }
    const mptk::update_scale scale = mptk::update_scale_of(a, part.segment);
    for (int i = threadIdx.x * 4; i < part.end; i += mptk::UPDATE_THREADS * 4) {
        float w[4], g[4], m[4] = {0, 0, 0, 0}, v[4] = {0, 0, 0, 0};
        mptk::load4(a.weights + part.offset, part, i, w);
        mptk::load4(a.row + part.offset, part, i, g);
        if (RULE::MOMENTS > 0) mptk::load4(a.first + part.offset, part, i, m);
        if (RULE::MOMENTS > 1) mptk::load4(a.second + part.offset, part, i, v);
#pragma unroll
        for (int k = 0; k < 4; k++) rule(scale, g[k], &w[k], &m[k], &v[k]);
        mptk::store4(a.weights + part.offset, part, i, w);
        if (RULE::MOMENTS > 0) mptk::store4(a.first + part.offset, part, i, m);
        if (RULE::MOMENTS > 1) mptk::store4(a.second + part.offset, part, i, v);
        if (a.half && a.half_dtype == MPT_F16)
            mptk::store4_half(static_cast<half *>(a.half) + part.offset, part, i, w);
        if (a.half && a.half_dtype == MPT_BF16)
            mptk::store4_half(static_cast<__nv_bfloat16 *>(a.half) + part.offset, part, i, w);
    }
}

template __global__ void mptk_update_apply_kernel<mptk::rule_sgd>(mpt_update_args a);
template __global__ void mptk_update_apply_kernel<mptk::rule_momentum>(mpt_update_args a);
template __global__ void mptk_update_apply_kernel<mptk::rule_adam>(mpt_update_args a);

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
namespace mptk {

static inline unsigned blocks_for(long long items, int per_block) {
    return static_cast<unsigned>((items + per_block - 1) / per_block);
}

static inline bool is_aligned(const void *p) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

/* ---- how a shape is cut for batch normalization ----
   By the shape at full capacity alone. About 1024 blocks: two waves of six on each of a V100's 80
   SMs, one of eight on each of an H200's 132; a thread takes at least four rows of sums, and 16 of
   the second pass, so that what it keeps for its channels is worth loading. */
static inline batchnorm_args batchnorm_plan(const mpt_batchnorm_args *a) {
    const int target_blocks = 1024, least_rows = 4, apply_rows = 16;
    const int vec = a->c % 8 == 0 ? 8 : 1, most_lanes = BATCHNORM_CHANNELS / 2 / (vec == 8 ? 4 : 1);
    const int chunks = a->c / vec, pixels = a->h * a->wd;
    batchnorm_args p = {};

    p.rows = a->n * pixels;
    p.valid_rows = a->num_valid * pixels;
    p.c = a->c;
    p.lanes = 1;
    while (p.lanes < most_lanes && p.lanes < chunks) p.lanes *= 2;
    p.columns = (chunks + p.lanes - 1) / p.lanes;
    const int side = BATCHNORM_THREADS / p.lanes; /* rows side by side in a block */
    const int most_parts = max_of(target_blocks / p.columns, 1);
    const int rounds = max_of(ceil_div(ceil_div(p.rows, side), most_parts), least_rows);
    p.part_rows = side * rounds;
    p.num_parts = ceil_div(p.rows, p.part_rows);
    p.apply_rows = side * apply_rows;
    return p;
}

static inline unsigned batchnorm_apply_blocks(const batchnorm_args &p) {
    return static_cast<unsigned>(p.columns) * blocks_for(p.rows, p.apply_rows);
}

static inline unsigned batchnorm_sum_blocks(const batchnorm_args &p) {
    return static_cast<unsigned>(p.columns) * static_cast<unsigned>(p.num_parts);
}

template <class T, int VEC>
static int batchnorm_forward(const batchnorm_args &p, bool training, void *stream) {
    if (training) {
        MPTK_LAUNCH((mptk_batchnorm_moments_kernel<T, VEC>), batchnorm_sum_blocks(p),
                    BATCHNORM_THREADS, 0, stream, p);
        MPTK_LAUNCH(mptk_batchnorm_finish_kernel, blocks_for(p.c, BATCHNORM_FINISH_LANES),
                    BATCHNORM_THREADS, 0, stream, p);
    }
    MPTK_LAUNCH((mptk_batchnorm_apply_kernel<T, VEC>), batchnorm_apply_blocks(p),
                BATCHNORM_THREADS, 0, stream, p);
    return launch_status();
}

template <class T, int VEC> static int batchnorm_backward(const batchnorm_args &p, void *stream) {
    MPTK_LAUNCH((mptk_batchnorm_backward_sums_kernel<T, VEC>), batchnorm_sum_blocks(p),
                BATCHNORM_THREADS, 0, stream, p);
    MPTK_LAUNCH(mptk_batchnorm_backward_finish_kernel, blocks_for(p.c, BATCHNORM_FINISH_LANES),
                BATCHNORM_THREADS, 0, stream, p);
    MPTK_LAUNCH((mptk_batchnorm_backward_apply_kernel<T, VEC>), batchnorm_apply_blocks(p),
                BATCHNORM_THREADS, 0, stream, p);
    return launch_status();
}

} // namespace mptk

extern "C" size_t mptk_batchnorm_workspace_bytes(const mpt_batchnorm_args *a) {
    const mptk::batchnorm_args p = mptk::batchnorm_plan(a);
    return static_cast<size_t>(p.num_parts) * 2 * p.c * sizeof(float);
}

extern "C" int mptk_batchnorm_forward(const mpt_batchnorm_args *a, void *stream) {
    mptk::batchnorm_args p = mptk::batchnorm_plan(a);
    const bool training = a->training != 0;

    p.x = a->x;
    p.residual = a->residual;
    p.out = a->y;
    p.gamma = a->gamma;
    p.beta = a->beta;
    p.mean = training ? a->batch_mean : a->running_mean;
    p.inv_std = training ? a->batch_inv_std : nullptr;
    p.var = training ? nullptr : a->running_var;
    p.batch_mean = a->batch_mean;
    p.batch_inv_std = a->batch_inv_std;
    p.batch_var = a->batch_var;
    p.parts = static_cast<float *>(a->workspace);
    p.relu = a->relu;
    p.epsilon = a->epsilon;
    MPTK_BY_DTYPE(a->dtype, T,
                  return p.c % 8 ? mptk::batchnorm_forward<T, 1>(p, training, stream)
                                 : mptk::batchnorm_forward<T, 8>(p, training, stream));
}

extern "C" int mptk_batchnorm_backward(const mpt_batchnorm_args *a, void *stream) {
    mptk::batchnorm_args p = mptk::batchnorm_plan(a);

    p.x = a->x;
    p.y = a->y;
    p.dy = a->dy;
    p.out = a->dx;
    p.dresidual = a->dresidual;
    p.gamma = a->gamma;
    p.mean = a->batch_mean;
    p.inv_std = a->batch_inv_std;
    p.dgamma = a->dgamma;
    p.dbeta = a->dbeta;
    p.parts = static_cast<float *>(a->workspace);
    p.relu = a->relu;
    MPTK_BY_DTYPE(a->dtype, T,
                  return p.c % 8 ? mptk::batchnorm_backward<T, 1>(p, stream)
                                 : mptk::batchnorm_backward<T, 8>(p, stream));
}

extern "C" size_t mptk_softmax_xent_workspace_bytes(const mpt_softmax_xent_args *a) {
    return sizeof(mptk::softmax_row) * static_cast<size_t>(a->n);
}

namespace mptk {

template <class T, int VEC> static void softmax_launch(const softmax_args &p, void *stream) {
    if (p.classes <= SOFTMAX_WARP_CLASSES)
        MPTK_LAUNCH((mptk_softmax_xent_kernel<T, VEC, WARP>),
                    blocks_for(p.n, SOFTMAX_THREADS / WARP), SOFTMAX_THREADS, 0, stream, p);
    else
        MPTK_LAUNCH((mptk_softmax_xent_kernel<T, VEC, SOFTMAX_THREADS>), p.n, SOFTMAX_THREADS, 0,
                    stream, p);
}

} // namespace mptk

extern "C" int mptk_softmax_xent(const mpt_softmax_xent_args *a, void *stream) {
    mptk::softmax_args p = {};

    p.logits = a->logits;
    p.labels = a->labels;
    p.dlogits = a->dlogits;
    p.probabilities = a->probabilities;
    p.rows = static_cast<mptk::softmax_row *>(a->workspace);
    p.loss_scale = a->loss_scale;
    p.n = a->n;
    p.num_valid = a->num_valid;
    p.classes = a->classes;
    p.label_smoothing = a->label_smoothing;
    p.grad_scale = a->grad_scale;
    MPTK_BY_DTYPE(a->dtype, T,
                  if (p.classes % 8) mptk::softmax_launch<T, 1>(p, stream);
                  else mptk::softmax_launch<T, 8>(p, stream));
    MPTK_LAUNCH(mptk_softmax_stats_kernel, 1, mptk::SOFTMAX_THREADS, 0, stream, p.rows, p.n,
                a->stats);
    return mptk::launch_status();
}

/* ---- pointwise ---- */
namespace mptk {

template <class OP> static int pointwise_launch(const mpt_pointwise_args *a, void *stream) {
    pointwise_args p = {};

    p.a = a->a;
    p.b = a->b;
    p.y = a->y;
    p.valid = static_cast<unsigned>(a->num_valid * a->per_sample);
    p.end = static_cast<unsigned>(a->n * a->per_sample);
    MPTK_BY_DTYPE(a->dtype, T,
                  MPTK_LAUNCH((mptk_pointwise_kernel<T, OP>), blocks_for(p.end, POINTWISE_BLOCK),
                              POINTWISE_THREADS, 0, stream, p));
    return launch_status();
}

} // namespace mptk

extern "C" int mptk_relu_forward(const mpt_pointwise_args *a, void *stream) {
    return mptk::pointwise_launch<mptk::op_relu>(a, stream);
}

extern "C" int mptk_relu_backward(const mpt_pointwise_args *a, void *stream) {
    return mptk::pointwise_launch<mptk::op_relu_gate>(a, stream);
}

extern "C" int mptk_add(const mpt_pointwise_args *a, void *stream) {
    return mptk::pointwise_launch<mptk::op_add>(a, stream);
}

extern "C" int mptk_dropout(const mpt_dropout_args *a, void *stream) {
    const double limit = static_cast<double>(a->probability) * 4294967296.0;
    const int groups = static_cast<int>((a->per_sample + 3) / 4);
    mptk::dropout_args p = {};

    p.x = a->x;
    p.y = a->y;
    p.sample_ids = reinterpret_cast<const unsigned long long *>(a->sample_ids);
    p.first_id = a->first_id;
    p.seed = a->seed;
    p.limit = static_cast<unsigned long long>(limit);
    if (static_cast<double>(p.limit) < limit) p.limit++;
    p.epoch_and_layer = static_cast<unsigned>(a->epoch) << 8 |
                        (mptk::DROPOUT_PURPOSE + static_cast<unsigned>(a->layer));
    p.scale = a->probability < 1 ? 1.0f / (1.0f - a->probability) : 0.0f;
    p.num_valid = a->num_valid;
    p.per_sample = static_cast<int>(a->per_sample);
    p.items = a->n * groups;
    p.groups = mptk::fastdiv_make(groups);
    MPTK_BY_DTYPE(a->dtype, T,
                  MPTK_LAUNCH((mptk_pointwise_dropout_kernel<T>),
                              mptk::blocks_for(p.items, mptk::POINTWISE_THREADS),
                              mptk::POINTWISE_THREADS, 0, stream, p));
    return mptk::launch_status();
}

namespace mptk {

/* Forward writes (n,p,q,c), backward (n,h,wd,c). */
static inline pool_args pool_plan(const mpt_pool2d_args *a, bool global, bool forward) {
    const int vec = a->c % 8 == 0 ? 8 : 1, chunks = a->c / vec;
    const int rows = forward ? a->p : a->h, columns = forward ? a->q : a->wd;
    pool_args p = {};

    p.x = forward ? a->x : a->dy;
    p.y = forward ? a->y : a->dx;
    p.valid = a->num_valid * rows * columns * chunks;
    p.items = a->n * rows * columns * chunks;
    p.h = a->h;
    p.wd = a->wd;
    p.c = a->c;
    p.p = a->p;
    p.q = a->q;
    p.kernel_h = global ? a->h : a->kernel;
    p.kernel_w = global ? a->wd : a->kernel;
    p.stride = global ? 1 : a->stride;
    p.padding = global ? 0 : a->padding;
    p.share = 1.0f / (static_cast<float>(p.kernel_h) * static_cast<float>(p.kernel_w));
    p.chunks = fastdiv_make(chunks);
    p.columns = fastdiv_make(columns);
    p.rows = fastdiv_make(rows);
    return p;
}

template <class T, int VEC> static void max_pool_launch(const pool_args &p, void *stream) {
    MPTK_LAUNCH((mptk_pointwise_max_pool_kernel<T, VEC>), blocks_for(p.items, POINTWISE_THREADS),
                POINTWISE_THREADS, 0, stream, p);
}

template <class T, int VEC> static void avg_pool_launch(const pool_args &p, void *stream) {
    MPTK_LAUNCH((mptk_pointwise_avg_pool_kernel<T, VEC>), blocks_for(p.items, POINTWISE_THREADS),
                POINTWISE_THREADS, 0, stream, p);
}

template <class T, int VEC, bool MAX>
static void pool_backward_launch(const pool_args &p, void *stream) {
    MPTK_LAUNCH((mptk_pointwise_pool_backward_kernel<T, VEC, MAX>),
                blocks_for(p.items, POINTWISE_THREADS), POINTWISE_THREADS, 0, stream, p);
}

static int avg_pool_forward(const mpt_pool2d_args *a, bool global, void *stream) {
    const pool_args p = pool_plan(a, global, true);

    MPTK_BY_DTYPE(a->dtype, T,
                  if (p.c % 8) avg_pool_launch<T, 1>(p, stream);
                  else avg_pool_launch<T, 8>(p, stream));
    return launch_status();
}

static int avg_pool_backward(const mpt_pool2d_args *a, bool global, void *stream) {
    const pool_args p = pool_plan(a, global, false);

    MPTK_BY_DTYPE(a->dtype, T,
                  if (p.c % 8) pool_backward_launch<T, 1, false>(p, stream);
                  else pool_backward_launch<T, 8, false>(p, stream));
    return launch_status();
}

} // namespace mptk

extern "C" int mptk_max_pool_forward(const mpt_pool2d_args *a, void *stream) {
    mptk::pool_args p = mptk::pool_plan(a, false, true);

    p.argmax_out = a->argmax;
    MPTK_BY_DTYPE(a->dtype, T,
                  if (p.c % 8) mptk::max_pool_launch<T, 1>(p, stream);
                  else mptk::max_pool_launch<T, 8>(p, stream));
    return mptk::launch_status();
}

extern "C" int mptk_max_pool_backward(const mpt_pool2d_args *a, void *stream) {
    mptk::pool_args p = mptk::pool_plan(a, false, false);

    p.argmax_in = a->argmax;
    MPTK_BY_DTYPE(a->dtype, T,
                  if (p.c % 8) mptk::pool_backward_launch<T, 1, true>(p, stream);
                  else mptk::pool_backward_launch<T, 8, true>(p, stream));
    return mptk::launch_status();
}

extern "C" int mptk_avg_pool_forward(const mpt_pool2d_args *a, void *stream) {
    return mptk::avg_pool_forward(a, false, stream);
}

extern "C" int mptk_avg_pool_backward(const mpt_pool2d_args *a, void *stream) {
    return mptk::avg_pool_backward(a, false, stream);
}

extern "C" int mptk_global_avg_pool_forward(const mpt_pool2d_args *a, void *stream) {
    return mptk::avg_pool_forward(a, true, stream);
}

extern "C" int mptk_global_avg_pool_backward(const mpt_pool2d_args *a, void *stream) {
    return mptk::avg_pool_backward(a, true, stream);
}

namespace mptk {

template <class S> static int cast_from(const mpt_cast_args *a, const cast_args &p, void *stream) {
    MPTK_BY_DTYPE(a->dst_dtype, D,
                  MPTK_LAUNCH((mptk_pointwise_cast_kernel<S, D>),
                              blocks_for(p.end, POINTWISE_BLOCK), POINTWISE_THREADS, 0, stream, p));
    return launch_status();
}

template <class S>
static int normalize_from(const mpt_normalize_args *a, const normalize_args &p, void *stream) {
    MPTK_BY_DTYPE(a->dtype, D,
                  MPTK_LAUNCH((mptk_pointwise_normalize_kernel<S, D>),
                              blocks_for(p.end, POINTWISE_BLOCK), POINTWISE_THREADS, 0, stream, p));
    return launch_status();
}

} // namespace mptk

extern "C" int mptk_cast(const mpt_cast_args *a, void *stream) {
    const mptk::cast_args p = {a->src, a->dst, static_cast<unsigned>(a->count),
                               mptk::is_aligned(a->src) && mptk::is_aligned(a->dst)};

    if (a->count == 0) return cudaSuccess;
    MPTK_BY_DTYPE(a->src_dtype, S, return mptk::cast_from<S>(a, p, stream));
}

extern "C" int mptk_input_normalize(const mpt_normalize_args *a, void *stream) {
    const int picture = a->h * a->wd * a->c;
    mptk::normalize_args p = {};

    p.x = a->x;
    p.y = a->y;
    p.mean = a->mean;
    p.std = a->std;
    p.valid = static_cast<unsigned>(a->num_valid * picture);
    p.end = static_cast<unsigned>(a->n * picture);
    p.c = a->c;
    p.aligned = mptk::is_aligned(a->x);
    if (a->src_dtype == MPT_U8) return mptk::normalize_from<uint8_t>(a, p, stream);
    MPTK_BY_DTYPE(a->src_dtype, S, return mptk::normalize_from<S>(a, p, stream));
}

extern "C" int mptk_fill(const mpt_fill_args *a, void *stream) {
    const mptk::fill_args p = {a->dst, a->count, a->value};

    if (a->count == 0) return cudaSuccess;
    MPTK_BY_DTYPE(a->dtype, T,
                  MPTK_LAUNCH((mptk_pointwise_fill_kernel<T>),
                              mptk::blocks_for(p.count, mptk::POINTWISE_BLOCK),
                              mptk::POINTWISE_THREADS, 0, stream, p));
    return mptk::launch_status();
}

extern "C" int mptk_scale(const mpt_scale_args *a, void *stream) {
    const mptk::scale_args p = {a->x, a->count, a->factor};

    if (a->count == 0) return cudaSuccess;
    MPTK_LAUNCH(mptk_pointwise_scale_kernel, mptk::blocks_for(p.count, mptk::POINTWISE_BLOCK),
                mptk::POINTWISE_THREADS, 0, stream, p);
    return mptk::launch_status();
}

/* ---- update ---- */
namespace mptk {

template <class RULE> static void update_apply(const mpt_update_args *a, unsigned parts, void *stream) {
    MPTK_LAUNCH((mptk_update_apply_kernel<RULE>), parts, UPDATE_THREADS, 0, stream, *a);
}

} // namespace mptk

extern "C" int mptk_update(const mpt_update_args *a, void *stream) {
    const unsigned parts = static_cast<unsigned>(a->num_chunks) +
                           mptk::blocks_for(a->num_stats, MPT_UPDATE_CHUNK);
    const cudaError_t rc = cudaMemsetAsync(&a->state->first_nonfinite, 0xff, sizeof(int64_t),
                                           static_cast<cudaStream_t>(stream));

    if (rc != cudaSuccess) return rc;
    MPTK_LAUNCH(mptk_update_check_kernel, parts, mptk::UPDATE_THREADS, 0, stream, *a);
    MPTK_LAUNCH(mptk_update_decide_kernel, 1, mptk::UPDATE_THREADS, 0, stream, *a);
    switch (a->optimizer.kind) {
    case MPT_OPTIMIZER_SGD: mptk::update_apply<mptk::rule_sgd>(a, parts, stream); break;
    case MPT_OPTIMIZER_ADAM:
    case MPT_OPTIMIZER_ADAMW: mptk::update_apply<mptk::rule_adam>(a, parts, stream); break;
    default: mptk::update_apply<mptk::rule_momentum>(a, parts, stream); break;
    }
    return mptk::launch_status();
}
#endif /* __CUDACC_RTC__ */
