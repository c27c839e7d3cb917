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

#define MPTK_FN __device__ __forceinline__     /* a device function */
#define MPTK_METHOD __device__ __forceinline__ /* a member of a device struct */
#define MPTK_CONSTEXPR __host__ __device__ constexpr /* for launchers and static asserts too */

namespace mptk {

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

MPTK_CONSTEXPR int ceil_div(int a, int b) {
    return (a + b - 1) / b;
}

MPTK_CONSTEXPR int max_of(int a, int b) {
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
 * An engine multiplies two tiles in shared memory and keeps the FP32 sums in registers. Its makers
 * see four things: where a chunk of 8 goes in a tile (at_a, at_b), zero, multiply, and strip, which
 * hands out 16 rows of the sums by way of shared memory, so that nobody else must know which lane
 * holds what. The tiles:
 *
 *     problem               y (M x N) = a (M x depth) * b (depth x N), rounded to FP16 or BF16 at the end
 *
 *     CTA tile  BM x BN x BK          warps  WARPS_M x WARPS_N          one warp, 16 of the depth
 *              N                      +---------+---------+             WM / 16 fragments of a
 *         +--------+                  | w0      | w1      |             WN / 16 fragments of b
 *       M |        |  sums, in        | WM x WN |         |             (WM / 16) * (WN / 16) products
 *         |        |  registers       +---------+---------+             of 16 x 16 x 16
 *         +--------+                  | w2      | w3      |
 *                                     +---------+---------+
 *     shared memory         a: BM rows of BK, depth contiguous;  TRANS: BK rows of BM, M contiguous
 *                           b: BN rows of BK, depth contiguous;  TRANS: BK rows of BN, N contiguous
 *                           times the stages; afterwards the strips, 16 x (WN + 4) floats a warp
 *
 * A warp that isn't square has its long side on b: sm_70 reads a row-major fragment of a in 16
 * cycles, a column-major one of b in 8 (32 x 64: 64 cycles each 16 of the depth; 64 x 32: 80).
 */
#ifdef MPTK_ON_CPU
#include "ptx_twins.h" /* the same wrappers for a CPU; part of the tests */
#else
MPTK_FN unsigned mptk_smem_address(const void *p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

/* 16 bytes from global to shared memory, zeros unless valid; they are there when waited for. */
MPTK_FN void mptk_cp_async16(void *smem, const void *gmem, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(mptk_smem_address(smem)),
                 "l"(gmem), "r"(valid ? 16 : 0)
                 : "memory");
}

MPTK_FN void mptk_cp_async_commit() { /* ends a group of copies */
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int N> MPTK_FN void mptk_cp_async_wait() { /* until at most N groups are under way */
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* Four 8x8 matrices of 16 bits; lanes 8i .. 8i+7 bring the addresses of the rows of matrix i. Lane l
   gets elements 2 (l % 4) and the next of row l / 4 of each; trans: of column l / 4. */
MPTK_FN void mptk_ldmatrix_x4(unsigned r[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(mptk_smem_address(row))
                 : "memory");
}

MPTK_FN void mptk_ldmatrix_x4_trans(unsigned r[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(mptk_smem_address(row))
                 : "memory");
}

/* d (16x8) += a (16x16) * b (16x8), one warp; the last argument names the type of a and b. */
MPTK_FN void mptk_mma_m16n8k16(float d[4], const unsigned a[4], const unsigned b[2], half) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

MPTK_FN void mptk_mma_m16n8k16(float d[4], const unsigned a[4], const unsigned b[2],
                               __nv_bfloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Four products d (8x8) += a (8x4) * b (4x8) at once, one for each quad pair of lanes. Fast on sm_70
   alone: later ones emulate it. */
MPTK_FN void mptk_mma_m8n8k4(float d[8], const unsigned a[2], const unsigned b[2]) {
    asm("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9}, {%10,%11}, {%0,%1,%2,%3,%4,%5,%6,%7};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]));
}
#endif

namespace mptk {

/* Which engine, and how many tiles under way: by what the code is compiled for. */
enum generation { VOLTA, TURING, AMPERE, AMPERE_100KB };

MPTK_CONSTEXPR generation generation_of(int arch) { /* arch as __CUDA_ARCH__: 700, 860, ... */
    return arch == 700 || arch == 720 ? VOLTA
           : arch < 800               ? TURING
           : arch == 860 || arch == 890 || arch >= 1200 ? AMPERE_100KB
                                                                       : AMPERE;
}

MPTK_CONSTEXPR int stages_of(generation gen) {
    return gen == AMPERE ? 4 : gen == AMPERE_100KB ? 3 : 1;
}

template <int BM_, int BN_, int BK_, int WM_, int WN_, int CTAS_> struct tile {
    static constexpr int BM = BM_, BN = BN_, BK = BK_, WM = WM_, WN = WN_;
    static constexpr int CTAS = CTAS_; /* on an SM: what registers and shared memory are cut for */
    static constexpr int WARPS_M = BM / WM, WARPS_N = BN / WN, WARPS = WARPS_M * WARPS_N;
    static constexpr int THREADS = WARPS * WARP;
    static constexpr int FRAGMENTS_M = WM / 16, FRAGMENTS_N = WN / 16;
    static constexpr int STRIP_LD = WN + 4; /* floats; + 4: stores without bank conflicts */
    static constexpr int STRIP_FLOATS = 16 * STRIP_LD;

    static_assert(BM % WM == 0 && BN % WN == 0, "warps cover the tile");
    static_assert(WM % 16 == 0 && WN % 16 == 0 && BK % 16 == 0, "fragments cover a warp's part");
    static_assert(WN == 32 || WN == 64, "a warp reads whole rows of a strip");
    static_assert(THREADS * CTAS <= 2048 && THREADS <= 1024, "threads of an SM, of a CTA");
    /* Beside the sums: fragments, addresses, what is on its way from global memory */
    static_assert(WM * WN / WARP + 64 <= 65536 / (THREADS * CTAS), "registers of an SM");

    static MPTK_METHOD int warp_row() {
        return threadIdx.x / WARP / WARPS_N * WM;
    }
    static MPTK_METHOD int warp_column() {
        return threadIdx.x / WARP % WARPS_N * WN;
    }
};

/* ---- wmma: every architecture -------------------------------------------------------------------
   Rows are padded against bank conflicts: by 8 elements where the depth is contiguous; where M or N
   is, sm_70 reads by 8-byte loads, which are free of conflicts at 16, and sm_75 by ldmatrix, at 8. */
template <class T, class TILE, bool A_TRANS, bool B_TRANS, generation GEN> struct wmma_engine {
    static constexpr int PAD = 8, PAD_TRANS = GEN == VOLTA ? 16 : 8;
    static constexpr int LDA = A_TRANS ? TILE::BM + PAD_TRANS : TILE::BK + PAD;
    static constexpr int LDB = B_TRANS ? TILE::BN + PAD_TRANS : TILE::BK + PAD;
    static constexpr int A_ELEMENTS = (A_TRANS ? TILE::BK : TILE::BM) * LDA;
    static constexpr int B_ELEMENTS = (B_TRANS ? TILE::BK : TILE::BN) * LDB;
    typedef nvcuda::wmma::row_major row_major;
    typedef nvcuda::wmma::col_major col_major;
    typedef typename choose<A_TRANS, col_major, row_major>::type layout_a;
    typedef typename choose<B_TRANS, row_major, col_major>::type layout_b;

    nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float>
        sums[TILE::FRAGMENTS_M][TILE::FRAGMENTS_N];

    static_assert(LDA * sizeof(T) % 16 == 0 && LDB * sizeof(T) % 16 == 0, "wmma's leading dimension");
    static_assert(16 * LDA * sizeof(T) % 32 == 0 && A_ELEMENTS * sizeof(T) % 32 == 0,
                  "wmma's pointers");

    static MPTK_METHOD int at_a(int row, int column) {
        return row * LDA + column;
    }
    static MPTK_METHOD int at_b(int row, int column) {
        return row * LDB + column;
    }

    MPTK_METHOD void zero() {
#pragma unroll
        for (int i = 0; i < TILE::FRAGMENTS_M; i++)
#pragma unroll
            for (int j = 0; j < TILE::FRAGMENTS_N; j++)
                nvcuda::wmma::fill_fragment(sums[i][j], 0.0f);
    }

    MPTK_METHOD void multiply(const T *a, const T *b) {
        using namespace nvcuda::wmma;
        const int m = TILE::warp_row(), n = TILE::warp_column();
#pragma unroll
        for (int k = 0; k < TILE::BK; k += 16) {
            fragment<matrix_a, 16, 16, 16, T, layout_a> fa[TILE::FRAGMENTS_M];
            fragment<matrix_b, 16, 16, 16, T, layout_b> fb[TILE::FRAGMENTS_N];
#pragma unroll
            for (int i = 0; i < TILE::FRAGMENTS_M; i++) {
                const int row = m + i * 16;
                load_matrix_sync(fa[i], a + (A_TRANS ? at_a(k, row) : at_a(row, k)), LDA);
            }
#pragma unroll
            for (int j = 0; j < TILE::FRAGMENTS_N; j++) {
                const int column = n + j * 16;
                load_matrix_sync(fb[j], b + (B_TRANS ? at_b(k, column) : at_b(column, k)), LDB);
            }
#pragma unroll
            for (int i = 0; i < TILE::FRAGMENTS_M; i++)
#pragma unroll
                for (int j = 0; j < TILE::FRAGMENTS_N; j++)
                    mma_sync(sums[i][j], fa[i], fb[j], sums[i][j]);
        }
    }

    /* Rows 16 i .. 16 i + 15 of this warp's part; out: (16, WN), leading dimension STRIP_LD. */
    MPTK_METHOD void strip(int i, float *out) const {
#pragma unroll
        for (int j = 0; j < TILE::FRAGMENTS_N; j++)
            nvcuda::wmma::store_matrix_sync(out + j * 16, sums[i][j], TILE::STRIP_LD,
                                            nvcuda::wmma::mem_row_major);
    }
};

/* ---- m8n8k4: sm_70 ------------------------------------------------------------------------------
   Both tiles with their depth contiguous, without padding: a row is 32 halves, 4 chunks of 8, and
   chunk c of row r lies at c ^ f(r), f(r) = bit 1 of r + 2 * bit 3 of r. So the 8 lanes that a
   16-byte load serves at once touch all 32 banks, and a 16 x 16 fragment costs 8 cycles, where
   wmma's row-major a costs 16.

     row 0: c0 c1 c2 c3 | row 1: c0 c1 c2 c3         quad pair q = lanes 4q..4q+3 and 4q+16..4q+19
     row 2: c1 c0 c3 c2 | row 3: c1 c0 c3 c2         q & 1: rows 0-7 or 8-15 of a 16 x 16 block,
     row 8: c2 c3 c0 c1 | row 9: c2 c3 c0 c1         q >> 1: columns

   a: a lane holds 4 of the depth of row (l & 3) + 4 (l >> 4), b of that column. Sum e of 8 is at row
   (l & 1) + (e & 2) + 4 (l >> 4), column (e & 4) + (l & 2) + (e & 1). */
MPTK_CONSTEXPR int volta_swizzle(int row) { /* what to XOR a column with */
    return ((row >> 1 & 1) | (row >> 3 & 1) << 1) * 8;
}

/* A bit for each group of four banks that 16 bytes at `element` of a 16-bit type touch. */
MPTK_CONSTEXPR unsigned bank_group(int element) {
    return 1u << element / 8 % 8;
}

MPTK_CONSTEXPR bool volta_is_conflict_free() { /* lanes 0-7: rows 0-3 and 8-11 */
    unsigned groups = 0;
    for (int lane = 0; lane < 8; lane++) {
        const int row = (lane & 3) + (lane >> 2) * 8;
        groups |= bank_group(row * 32 + volta_swizzle(row));
    }
    return groups == 0xff;
}
static_assert(volta_is_conflict_free(), "the swizzle of the drawing");

template <class TILE> struct volta_engine {
    static constexpr int LD = 32;
    static constexpr int A_ELEMENTS = TILE::BM * LD, B_ELEMENTS = TILE::BN * LD;
    float sums[TILE::FRAGMENTS_M][TILE::FRAGMENTS_N][8];

    static_assert(TILE::BK == LD, "the swizzle is for rows of four chunks");

    static MPTK_METHOD int at_a(int row, int column) {
        return row * LD + (column ^ volta_swizzle(row));
    }
    static MPTK_METHOD int at_b(int row, int column) {
        return at_a(row, column);
    }

    MPTK_METHOD void zero() {
#pragma unroll
        for (int i = 0; i < TILE::FRAGMENTS_M; i++)
#pragma unroll
            for (int j = 0; j < TILE::FRAGMENTS_N; j++)
#pragma unroll
                for (int e = 0; e < 8; e++) sums[i][j][e] = 0.0f;
    }

    /* Four of the depth: the low or the high half of the chunks. */
    MPTK_METHOD void multiply4(const uint4 *a, const uint4 *b, bool high) {
#pragma unroll
        for (int i = 0; i < TILE::FRAGMENTS_M; i++) {
            const unsigned fa[2] = {high ? a[i].z : a[i].x, high ? a[i].w : a[i].y};
#pragma unroll
            for (int j = 0; j < TILE::FRAGMENTS_N; j++) {
                const unsigned fb[2] = {high ? b[j].z : b[j].x, high ? b[j].w : b[j].y};
                mptk_mma_m8n8k4(sums[i][j], fa, fb);
            }
        }
    }

    MPTK_METHOD void multiply(const half *a, const half *b) {
        const int lane = threadIdx.x % WARP, quad = lane >> 2 & 3;
        const int in_eight = (lane & 3) + (lane >> 4) * 4;
        const int row = in_eight + (quad & 1) * 8, column = in_eight + (quad >> 1) * 8;
        a += (TILE::warp_row() + row) * LD;
        b += (TILE::warp_column() + column) * LD;
#pragma unroll
        for (int k = 0; k < TILE::BK; k += 8) {
            uint4 fa[TILE::FRAGMENTS_M], fb[TILE::FRAGMENTS_N];
            /* 16 rows further the swizzle is the same */
#pragma unroll
            for (int i = 0; i < TILE::FRAGMENTS_M; i++)
                fa[i] = load16(a + i * 16 * LD + (k ^ volta_swizzle(row)));
#pragma unroll
            for (int j = 0; j < TILE::FRAGMENTS_N; j++)
                fb[j] = load16(b + j * 16 * LD + (k ^ volta_swizzle(column)));
            multiply4(fa, fb, false);
            multiply4(fa, fb, true);
        }
    }

    MPTK_METHOD void strip(int i, float *out) const {
        const int lane = threadIdx.x % WARP, quad = lane >> 2 & 3;
        const int row = (quad & 1) * 8 + (lane & 1) + (lane >> 4) * 4;
        const int column = (quad >> 1) * 8 + (lane & 2);
#pragma unroll
        for (int j = 0; j < TILE::FRAGMENTS_N; j++)
#pragma unroll
            for (int e = 0; e < 8; e += 2) {
                float *to = out + (row + (e & 2)) * TILE::STRIP_LD + j * 16 + column + (e & 4);
                *reinterpret_cast<float2 *>(to) = make_float2(sums[i][j][e], sums[i][j][e + 1]);
            }
    }
};

/* ---- m16n8k16 with ldmatrix: sm_80 and later ----------------------------------------------------
   No padding: chunk c of row r lies at c ^ (r % 8) where rows have 8 chunks or more, at
   c ^ (r / 2 % 4) where they have 4. Either way the 8 rows of an 8x8 matrix are in 8 different
   groups of 4 banks, and so are chunks that neighbouring lanes bring. */
template <int LD> MPTK_CONSTEXPR int ampere_at(int row, int column) {
    static_assert(LD == 32 || LD % 64 == 0, "rows of 4 chunks, or 8, 16, ...");
    return row * LD + (column ^ (LD == 32 ? row >> 1 & 3 : row & 7) * 8);
}

template <int LD> MPTK_CONSTEXPR bool ampere_is_conflict_free() { /* the rows of a matrix */
    unsigned groups = 0;
    for (int row = 0; row < 8; row++) groups |= bank_group(ampere_at<LD>(row, 0));
    return groups == 0xff;
}
static_assert(ampere_is_conflict_free<32>() && ampere_is_conflict_free<64>() &&
                  ampere_is_conflict_free<128>() && ampere_is_conflict_free<256>(),
              "the swizzle of every tile");

template <class T, class TILE, bool A_TRANS, bool B_TRANS> struct ampere_engine {
    static constexpr int LDA = A_TRANS ? TILE::BM : TILE::BK, LDB = B_TRANS ? TILE::BN : TILE::BK;
    static constexpr int A_ELEMENTS = TILE::BM * TILE::BK, B_ELEMENTS = TILE::BN * TILE::BK;
    float sums[TILE::FRAGMENTS_M][TILE::FRAGMENTS_N][2][4]; /* [][] 16 x 16 as two of 16 x 8 */

    static MPTK_METHOD int at_a(int row, int column) {
        return ampere_at<LDA>(row, column);
    }
    static MPTK_METHOD int at_b(int row, int column) {
        return ampere_at<LDB>(row, column);
    }

    MPTK_METHOD void zero() {
#pragma unroll
        for (int i = 0; i < TILE::FRAGMENTS_M; i++)
#pragma unroll
            for (int j = 0; j < TILE::FRAGMENTS_N; j++)
#pragma unroll
                for (int e = 0; e < 8; e++) sums[i][j][e / 4][e % 4] = 0.0f;
    }

    /* Rows m .. m+15, depth k .. k+15. Matrices in the order that mma wants: both halves of the rows,
       then the second half of the depth. */
    static MPTK_METHOD void load_a(unsigned r[4], const T *a, int m, int k) {
        const int lane = threadIdx.x % WARP, low = lane & 7, mid = lane >> 3 & 1, high = lane >> 4;
        if (A_TRANS) mptk_ldmatrix_x4_trans(r, a + at_a(k + low + high * 8, m + mid * 8));
        else mptk_ldmatrix_x4(r, a + at_a(m + low + mid * 8, k + high * 8));
    }

    /* Columns n .. n+15: r[0], r[1] are b of the first 8, r[2], r[3] of the others. */
    static MPTK_METHOD void load_b(unsigned r[4], const T *b, int n, int k) {
        const int lane = threadIdx.x % WARP, low = lane & 7, mid = lane >> 3 & 1, high = lane >> 4;
        if (B_TRANS) mptk_ldmatrix_x4_trans(r, b + at_b(k + low + mid * 8, n + high * 8));
        else mptk_ldmatrix_x4(r, b + at_b(n + low + high * 8, k + mid * 8));
    }

    MPTK_METHOD void multiply(const T *a, const T *b) {
        const int m = TILE::warp_row(), n = TILE::warp_column();
#pragma unroll
        for (int k = 0; k < TILE::BK; k += 16) {
            unsigned fa[TILE::FRAGMENTS_M][4], fb[TILE::FRAGMENTS_N][4];
#pragma unroll
            for (int i = 0; i < TILE::FRAGMENTS_M; i++) load_a(fa[i], a, m + i * 16, k);
#pragma unroll
            for (int j = 0; j < TILE::FRAGMENTS_N; j++) load_b(fb[j], b, n + j * 16, k);
#pragma unroll
            for (int i = 0; i < TILE::FRAGMENTS_M; i++)
#pragma unroll
                for (int j = 0; j < TILE::FRAGMENTS_N; j++) {
                    mptk_mma_m16n8k16(sums[i][j][0], fa[i], fb[j], T());
                    mptk_mma_m16n8k16(sums[i][j][1], fa[i], fb[j] + 2, T());
                }
        }
    }

    /* Lane l holds columns 2 (l % 4) and the next, of rows l / 4 and l / 4 + 8. */
    MPTK_METHOD void strip(int i, float *out) const {
        const int lane = threadIdx.x % WARP;
        float *to = out + lane / 4 * TILE::STRIP_LD + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < TILE::FRAGMENTS_N; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) { /* e & 1: columns + 8; e & 2: rows + 8 */
                const float *two = &sums[i][j][e & 1][e & 2];
                float *at = to + (e & 2) * 4 * TILE::STRIP_LD + j * 16 + (e & 1) * 8;
                *reinterpret_cast<float2 *>(at) = make_float2(two[0], two[1]);
            }
    }
};

/* ---- the choice ------------------------------------------------------------------------------ */
template <class T> struct is_bf16 {
    static constexpr bool value = false;
};
template <> struct is_bf16<__nv_bfloat16> {
    static constexpr bool value = true;
};

template <class T, generation GEN> MPTK_CONSTEXPR bool has_tensor_cores() {
    return GEN >= AMPERE || !is_bf16<T>::value;
}

template <class T, class TILE, bool A_TRANS, bool B_TRANS, generation GEN> struct engine_of {
    static constexpr bool USES_M8N8K4 =
        GEN == VOLTA && !A_TRANS && !B_TRANS && TILE::BK == 32 && !is_bf16<T>::value;
    typedef typename choose<
        (GEN >= AMPERE), ampere_engine<T, TILE, A_TRANS, B_TRANS>,
        typename choose<USES_M8N8K4, volta_engine<TILE>,
                        wmma_engine<T, TILE, A_TRANS, B_TRANS, GEN>>::type>::type type;
};

} // namespace mptk

/* -------------------------------------------------------------------------------------------------
 * >>mainloop   A product of two tiles that are fetched while the last is multiplied
 * -------------------------------------------------------------------------------------------------
 * A loader knows where the tiles of its problem come from: a(i) and b(i) tell the address of this
 * thread's i-th chunk of the next tile and whether there is anything, advance() goes on by one tile.
 * Two loops use it:
 *
 *   through registers (sm_70, 75)             with cp.async (sm_80 and later)
 *     fetch tile t+1 into registers             wait until tile t is in shared memory, barrier
 *     multiply tile t                           start to copy tile t+3 over tile t-1
 *     barrier                                   multiply tile t
 *     registers to shared memory, barrier
 *
 * The left one has a single stage of shared memory. A second stage would save a barrier, but on
 * sm_70 shared memory takes from L1, where the taps of a 3x3 filter meet each other.
 */
namespace mptk {

/* Which chunks of a ROWS x COLUMNS tile a thread brings: i < COUNT, of column column(), row row(i).
   Neighbouring threads bring neighbouring chunks of a row. */
template <int THREADS, int ROWS, int COLUMNS> struct chunks {
    static constexpr int PER_ROW = COLUMNS / 8, ROW_STEP = THREADS / PER_ROW;
    static constexpr int COUNT = ROWS / ROW_STEP;

    static_assert(THREADS % PER_ROW == 0 && COUNT > 0 && COUNT * ROW_STEP == ROWS,
                  "threads cover the tile evenly");

    static MPTK_METHOD int column() {
        return threadIdx.x % PER_ROW * 8;
    }
    static MPTK_METHOD int row(int i) {
        return threadIdx.x / PER_ROW + i * ROW_STEP;
    }
};

template <class T> struct chunk { /* 8 elements in global memory, or 8 zeros */
    const T *p;
    bool valid;
};

template <class T> MPTK_FN uint4 fetch(chunk<T> c) {
    return c.valid ? load16(c.p) : zero16();
}

template <class T, class LOADER, class ENGINE> struct register_pipeline {
    typedef typename LOADER::chunks_a chunks_a;
    typedef typename LOADER::chunks_b chunks_b;
    uint4 a[chunks_a::COUNT], b[chunks_b::COUNT];

    MPTK_METHOD void fetch_tile(LOADER &loader) {
#pragma unroll
        for (int i = 0; i < chunks_a::COUNT; i++) a[i] = fetch(loader.a(i));
#pragma unroll
        for (int i = 0; i < chunks_b::COUNT; i++) b[i] = fetch(loader.b(i));
        loader.advance();
    }

    MPTK_METHOD void put_tile(T *smem) {
#pragma unroll
        for (int i = 0; i < chunks_a::COUNT; i++)
            store16(smem + ENGINE::at_a(chunks_a::row(i), chunks_a::column()), a[i]);
        smem += ENGINE::A_ELEMENTS;
#pragma unroll
        for (int i = 0; i < chunks_b::COUNT; i++)
            store16(smem + ENGINE::at_b(chunks_b::row(i), chunks_b::column()), b[i]);
    }

    MPTK_METHOD void run(LOADER &loader, ENGINE &engine, T *smem, int steps) {
        if (steps > 0) {
            fetch_tile(loader);
            put_tile(smem);
        }
        __syncthreads();
        for (int step = 0; step < steps; step++) {
            const bool more = step + 1 < steps;
            if (more) fetch_tile(loader);
            engine.multiply(smem, smem + ENGINE::A_ELEMENTS);
            __syncthreads();
            if (more) put_tile(smem);
            __syncthreads();
        }
    }
};

template <class T, class LOADER, class ENGINE, int STAGES> struct async_pipeline {
    typedef typename LOADER::chunks_a chunks_a;
    typedef typename LOADER::chunks_b chunks_b;
    static constexpr int STAGE = ENGINE::A_ELEMENTS + ENGINE::B_ELEMENTS;

    MPTK_METHOD void copy_tile(LOADER &loader, T *smem) {
#pragma unroll
        for (int i = 0; i < chunks_a::COUNT; i++) {
            const chunk<T> from = loader.a(i);
            mptk_cp_async16(smem + ENGINE::at_a(chunks_a::row(i), chunks_a::column()), from.p,
                            from.valid);
        }
        smem += ENGINE::A_ELEMENTS;
#pragma unroll
        for (int i = 0; i < chunks_b::COUNT; i++) {
            const chunk<T> from = loader.b(i);
            mptk_cp_async16(smem + ENGINE::at_b(chunks_b::row(i), chunks_b::column()), from.p,
                            from.valid);
        }
        loader.advance();
    }

    /* A group of copies is ended for every step, an empty one behind the last tile: so that "all but
       STAGES - 2 groups" always means this step's tile. */
    MPTK_METHOD void run(LOADER &loader, ENGINE &engine, T *smem, int steps) {
        int from = 0, to = STAGES - 1;
#pragma unroll
        for (int stage = 0; stage < STAGES - 1; stage++) {
            if (stage < steps) copy_tile(loader, smem + stage * STAGE);
            mptk_cp_async_commit();
        }
        for (int step = 0; step < steps; step++) {
            mptk_cp_async_wait<STAGES - 2>();
            __syncthreads(); /* the tile is there for all, and all have multiplied the one before */
            if (step + STAGES - 1 < steps) copy_tile(loader, smem + to * STAGE);
            mptk_cp_async_commit();
            engine.multiply(smem + from * STAGE, smem + from * STAGE + ENGINE::A_ELEMENTS);
            from = from + 1 < STAGES ? from + 1 : 0;
            to = to + 1 < STAGES ? to + 1 : 0;
        }
        mptk_cp_async_wait<0>();
        __syncthreads(); /* shared memory is free for the epilogue */
    }
};

template <class T, class LOADER, class ENGINE, generation GEN> struct pipeline_of {
    typedef typename choose<(GEN >= AMPERE), async_pipeline<T, LOADER, ENGINE, stages_of(GEN)>,
                            register_pipeline<T, LOADER, ENGINE>>::type type;
};

/* Dynamic shared memory of a product: its stages, then in the same place `epilogue` more bytes
   behind the strips. */
template <class T, class TILE, class ENGINE, generation GEN>
MPTK_CONSTEXPR int product_smem_bytes(int epilogue_bytes) {
    return max_of(stages_of(GEN) * (ENGINE::A_ELEMENTS + ENGINE::B_ELEMENTS) *
                      static_cast<int>(sizeof(T)),
                  TILE::WARPS * TILE::STRIP_FLOATS * static_cast<int>(sizeof(float)) +
                      epilogue_bytes);
}

/* The epilogue: one strip of 16 rows after the other goes through shared memory, and whatever lane
   held them, 8 neighbouring columns come back as one lane's: writer.put(row, column, values), both
   within the CTA tile. A lane's column is the same each time: strip_column. */
template <class TILE> MPTK_FN int strip_column() {
    return TILE::warp_column() + threadIdx.x % WARP % (TILE::WN / 8) * 8;
}

template <class TILE, class ENGINE, class WRITER>
MPTK_FN void write_strips(float *smem, const ENGINE &engine, WRITER &writer) {
    constexpr int LANES = TILE::WN / 8, ROWS = WARP / LANES; /* of a row, at once */
    const int lane = threadIdx.x % WARP;
    float *strip = smem + threadIdx.x / WARP * TILE::STRIP_FLOATS;
    const float *mine = strip + lane / LANES * TILE::STRIP_LD + lane % LANES * 8;
#pragma unroll
    for (int i = 0; i < TILE::FRAGMENTS_M; i++) {
        engine.strip(i, strip);
        __syncwarp();
#pragma unroll
        for (int row = 0; row < 16; row += ROWS) {
            float values[8];
            load8(mine + row * TILE::STRIP_LD, values);
            writer.put(TILE::warp_row() + i * 16 + row + lane / LANES, strip_column<TILE>(),
                       values);
        }
        __syncwarp();
    }
}

} // namespace mptk

/* -------------------------------------------------------------------------------------------------
 * >>conv   Convolution as a gathering matrix product
 * -------------------------------------------------------------------------------------------------
 * No im2col buffer, no turned filters. Two products on tensor cores, each with a loader that finds
 * the chunks where they lie in memory:
 *
 *   gather   fprop and dgrad   rows: written pixels, columns: written channels, depth: taps x channels
 *   wgrad                      rows: k, columns: (r,s,c), depth: pixels
 *
 * Both read 8 channels at once: channels that are no multiple of 8 are padded with zeros in the
 * workspace first. Padding around the image is zeros that are multiplied: where a weight is inf, a
 * border pixel becomes NaN, which is as unusable. For FP32, and for filters of more than 16 x 16
 * taps, there is a plain kernel.
 */
namespace mptk {

constexpr generation GENERATION = generation_of(MPTK_ARCH);

/* ---- gather: fprop and dgrad --------------------------------------------------------------------

     problem as a matrix product      fprop                        dgrad, one of stride^2 phases
       rows                           n*p*q pixels of y            n*(h/stride)*(wd/stride) of dx
       columns                        k                            c
       depth                          r*s taps x c                 taps of the phase x k
       a, row m, tap (i,j)            x[pixel(m) * stride          dy[pixel(m) + base - (i,j)]
                                        - padding + (i,j)]
       b                              w[k][tap][c], c contiguous   w[k][tap][c], c contiguous: TRANS,
                                                                   as filters lie; nothing is turned

     CTA tile 128 x 128 x 32    warps 2 x 2, 64 x 64 each    one warp, 16 of the depth
             n 128              +--------+--------+          a: 4 fragments of 16 x 16
         +-----------+          |   w0   |   w1   |          b: 4 fragments
       m |           |          +--------+--------+          16 products, 16 x 16 sums = 128 registers
      128|           |          |   w2   |   w3   |
         +-----------+          +--------+--------+
                                a thread brings chunk t % 4 of rows t / 4 + 32 i: 4 of a, 4 of b

     shared memory, one stage    wmma 2 x 128 rows x 40 elements = 20,480 bytes; without padding 16,384
     the epilogue                4 warps x 16 x 68 floats = 17,408 bytes, and 2,048 for statistics

   dgrad with a stride: pixel h = stride * h' + residue of dx meets only the filter rows with
   (h + padding - r) % stride == 0: of a 3x3 filter with stride 2 and padding 1, in its four phases,
   2x2, 2x1, 1x2 and 1x1 taps, 9 in all, where a product over all taps would do 9 in each. Phases are
   numbered by their first filter row and column, so those with most taps come first. A phase
   without taps (1x1, stride 2) writes its zeros.

   A thread's rows never change, only tap and channel do. So each row keeps two registers: the offset
   of its tap (0,0), and which taps are inside the image. */
struct gather_args {
    const void *x;      /* (n,gh,gw,gc): x in fprop, dy in dgrad; gc a multiple of 8 */
    const void *w;      /* (k,r,s,wc), wc a multiple of 8 */
    void *y;            /* (n,yh,yw,oc): y in fprop, dx in dgrad */
    const float *bias;  /* (oc) or NULL; fprop */
    const float *pivot; /* (oc), with stats */
    float *stats;       /* (row tiles,2,oc) or NULL: sums of y - pivot, and of its squares; fprop */
    int rows;           /* of the product: n * oh * ow */
    int valid_rows;     /* of slots that count: the others become zeros */
    int gh, gw, gc, oh, ow, yh, yw, oc;
    int k, r, s, wc, stride_h, stride_w, pad_h, pad_w;
    fastdiv by_ow, by_ohw;
};

struct tap_range { /* the taps that a phase meets in one dimension */
    int count;
    int first;   /* filter row of tap 0; the next is `stride` further in dgrad, 1 in fprop */
    int base;    /* tap 0 of written pixel 0 meets this gathered pixel */
    int residue; /* dgrad: written pixel i of the phase is stride * i + residue */
};

template <bool DGRAD> MPTK_FN tap_range taps_of(int phase, int size, int stride, int padding) {
    tap_range t = {size, 0, -padding, 0};

    if (!DGRAD) return t;
    t.first = phase;
    t.count = phase < size ? (size - phase + stride - 1) / stride : 0;
    t.residue = ((phase - padding) % stride + stride) % stride;
    t.base = (t.residue + padding - phase) / stride;
    return t;
}

/* Bit i: 0 <= at + i * step < size, for i < count <= 16; step 1 or -1. Such taps are neighbours. */
MPTK_FN unsigned taps_inside(int at, int step, int size, int count) {
    int low = step > 0 ? -at : at - size + 1;
    int high = step > 0 ? size - 1 - at : at;

    low = low > 0 ? low : 0;
    high = high < count - 1 ? high : count - 1;
    return high >= low ? (2u << high) - (1u << low) : 0u;
}

/* SMALLC: fewer channels than BK. Then a tile of the depth spans several taps, and each thread walks
   through taps and channels by itself; otherwise a tile lies within one tap, and the last of a tap
   has zeros behind the channels. */
template <class T, class TILE, bool DGRAD, bool SMALLC> struct gather_loader {
    typedef chunks<TILE::THREADS, TILE::BM, TILE::BK> chunks_a;
    typedef chunks<TILE::THREADS, DGRAD ? TILE::BK : TILE::BN, DGRAD ? TILE::BN : TILE::BK>
        chunks_b;
    static constexpr int STEP = DGRAD ? -1 : 1;
    static_assert(!(DGRAD && SMALLC), "fprop only");

    const gather_args &g;
    const tap_range in_rows, in_columns;
    const int n0;
    int i, j, channel;               /* tap and channel: of this thread if SMALLC, else of the CTA */
    int depth;                       /* SMALLC: of the tile */
    int offset[chunks_a::COUNT];     /* of tap (0,0), channel 0; may be outside */
    unsigned inside[chunks_a::COUNT]; /* bits 0-15: row taps, 16-31: column taps */

    MPTK_METHOD gather_loader(const gather_args &args, tap_range of_rows, tap_range of_columns,
                              int m0, int n0_)
        : g(args), in_rows(of_rows), in_columns(of_columns), n0(n0_), i(0), j(0), channel(0),
          depth(0) {
#pragma unroll
        for (int e = 0; e < chunks_a::COUNT; e++) place(e, m0 + chunks_a::row(e));
        if (!SMALLC) return;
        channel = chunks_a::column();
        carry();
    }

    MPTK_METHOD void place(int e, int m) {
        const bool counts = m < g.valid_rows;
        int rest, ox;
        const int image = quotient(counts ? m : 0, g.by_ohw, &rest);
        const int oy = quotient(rest, g.by_ow, &ox);
        const int y = (DGRAD ? oy : oy * g.stride_h) + in_rows.base;
        const int x = (DGRAD ? ox : ox * g.stride_w) + in_columns.base;

        offset[e] = ((image * g.gh + y) * g.gw + x) * g.gc;
        inside[e] = taps_inside(y, STEP, g.gh, in_rows.count) |
                    taps_inside(x, STEP, g.gw, in_columns.count) << 16;
        if (!counts) inside[e] = 0;
    }

    MPTK_METHOD void next_tap() {
        j++;
        if (j < in_columns.count) return;
        j = 0;
        i++;
    }

    MPTK_METHOD void carry() { /* a channel beyond the last is one of a later tap */
        while (channel >= g.gc) {
            channel -= g.gc;
            next_tap();
        }
    }

    MPTK_METHOD int steps() const {
        const int taps = in_rows.count * in_columns.count;
        return SMALLC ? ceil_div(taps * g.gc, TILE::BK) : taps * ceil_div(g.gc, TILE::BK);
    }

    MPTK_METHOD void advance() {
        channel += TILE::BK;
        depth += TILE::BK;
        if (SMALLC) carry();
        else if (channel >= g.gc) {
            channel = 0;
            next_tap();
        }
    }

    /* & rather than &&: a predicate for each load, no branches between them */
    MPTK_METHOD chunk<T> a(int e) const {
        const int c = SMALLC ? channel : channel + chunks_a::column();
        const int delta = (i * STEP * g.gw + j * STEP) * g.gc + c;
        const bool exists = SMALLC ? i < in_rows.count : c < g.gc;
        const unsigned hit = inside[e] >> i & inside[e] >> (16 + j) & (exists ? 1u : 0u);
        chunk<T> from = {static_cast<const T *>(g.x) + (offset[e] + delta), hit != 0};
        return from;
    }

    MPTK_METHOD chunk<T> b(int e) const {
        const int row = chunks_b::row(e), column = chunks_b::column();
        int at;
        bool valid;
        if (DGRAD) {
            const int tap = (in_rows.first + i * g.stride_h) * g.s + in_columns.first +
                            j * g.stride_w;
            at = ((channel + row) * g.r * g.s + tap) * g.wc + n0 + column;
            valid = (channel + row < g.k) & (n0 + column < g.wc);
        } else if (SMALLC) {
            at = (n0 + row) * g.r * g.s * g.wc + depth + column;
            valid = (n0 + row < g.k) & (depth + column < g.r * g.s * g.wc);
        } else {
            at = ((n0 + row) * g.r * g.s + i * g.s + j) * g.wc + channel + column;
            valid = (n0 + row < g.k) & (channel + column < g.wc);
        }
        chunk<T> from = {static_cast<const T *>(g.w) + at, valid};
        return from;
    }
};

/* Rounds, adds the bias, writes; STATS: and sums up what it wrote, rounded as batch normalization
   will read it, less a pivot near the mean, without which the difference of large sums would cancel.
   A lane's channels are the same for all its rows. */
template <class T, class TILE, bool DGRAD, bool STATS> struct gather_writer {
    const gather_args &g;
    const tap_range in_rows, in_columns;
    const int m0, n0;
    float pivot[8], sum[8], square[8];

    MPTK_METHOD gather_writer(const gather_args &args, tap_range of_rows, tap_range of_columns,
                              int m0_, int n0_)
        : g(args), in_rows(of_rows), in_columns(of_columns), m0(m0_), n0(n0_) {
        if (!STATS) return;
        const int channel = n0 + strip_column<TILE>();
        load8_ragged(g.pivot + channel, g.oc - channel, pivot);
#pragma unroll
        for (int e = 0; e < 8; e++) sum[e] = square[e] = 0.0f;
    }

    MPTK_METHOD int written_pixel(int m) const { /* -1: this phase has no such pixel */
        int rest, ox;
        if (!DGRAD || (g.stride_h == 1 && g.stride_w == 1)) return m;
        const int image = quotient(m, g.by_ohw, &rest), oy = quotient(rest, g.by_ow, &ox);
        const int y = oy * g.stride_h + in_rows.residue;
        const int x = ox * g.stride_w + in_columns.residue;
        return y < g.yh && x < g.yw ? (image * g.yh + y) * g.yw + x : -1;
    }

    MPTK_METHOD void put(int row, int column, float values[8]) {
        const int m = m0 + row, channel = n0 + column, count = g.oc - channel;
        if (m >= g.rows || count <= 0) return;
        const int pixel = written_pixel(m);
        if (pixel < 0) return;
        const bool counts = m < g.valid_rows;
        float bias[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (!DGRAD && g.bias) load8_ragged(g.bias + channel, count, bias);
#pragma unroll
        for (int e = 0; e < 8; e++) values[e] = counts ? values[e] + bias[e] : 0.0f;
        T *to = static_cast<T *>(g.y) + (static_cast<size_t>(pixel) * g.oc + channel);
        const uint4 rounded = pack8<T>(values);
        if (g.oc % 8 == 0) store16(to, rounded);
        else store8_ragged(to, count, values);
        if (STATS && counts) add(rounded);
    }

    MPTK_METHOD void add(uint4 rounded) {
        float values[8];
        unpack8<T>(rounded, values);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const float d = values[e] - pivot[e];
            sum[e] += d;
            square[e] += d * d;
        }
    }

    /* Lanes, then warps, each in a fixed order; shared: (WARPS_M,2,BN) */
    MPTK_METHOD void finish_stats(float *shared, int tile_row) {
        const int lane = threadIdx.x % WARP, lanes = TILE::WN / 8;
        float *mine = shared + TILE::warp_row() / TILE::WM * 2 * TILE::BN + strip_column<TILE>();
#pragma unroll
        for (int e = 0; e < 8; e++) {
#pragma unroll
            for (int distance = lanes; distance < WARP; distance *= 2) {
                sum[e] += __shfl_xor_sync(ALL_LANES, sum[e], distance);
                square[e] += __shfl_xor_sync(ALL_LANES, square[e], distance);
            }
            if (lane >= lanes) continue;
            mine[e] = sum[e];
            mine[TILE::BN + e] = square[e];
        }
        __syncthreads();
        for (int at = threadIdx.x; at < 2 * TILE::BN; at += TILE::THREADS) {
            const int channel = n0 + at % TILE::BN;
            float total = 0.0f;
            for (int w = 0; w < TILE::WARPS_M; w++) total += shared[w * 2 * TILE::BN + at];
            if (channel < g.oc)
                g.stats[(static_cast<size_t>(tile_row) * 2 + at / TILE::BN) * g.oc + channel] =
                    total;
        }
    }
};

template <class T, class TILE, bool DGRAD, generation GEN> struct gather_product {
    typedef typename engine_of<T, TILE, false, DGRAD, GEN>::type engine;
    static constexpr int STATS_BYTES =
        DGRAD ? 0 : TILE::WARPS_M * 2 * TILE::BN * static_cast<int>(sizeof(float));
    static constexpr int SMEM_BYTES = product_smem_bytes<T, TILE, engine, GEN>(STATS_BYTES);
};

template <class T, class TILE, bool DGRAD, bool STATS, class ENGINE>
MPTK_FN void gather_epilogue(const gather_args &g, const ENGINE &engine, float *smem,
                             tap_range in_rows, tap_range in_columns, int tile_row, int n0) {
    gather_writer<T, TILE, DGRAD, STATS> writer(g, in_rows, in_columns, tile_row * TILE::BM, n0);

    write_strips<TILE>(smem, engine, writer);
    if (STATS) writer.finish_stats(smem + TILE::WARPS * TILE::STRIP_FLOATS, tile_row);
}

/* CTAs that share rows are neighbours, so that x is read from memory once. */
template <class T, class TILE, bool DGRAD, bool SMALLC>
MPTK_FN void gather(const gather_args &g) {
    typedef typename gather_product<T, TILE, DGRAD, GENERATION>::engine engine_type;
    typedef gather_loader<T, TILE, DGRAD, SMALLC> loader_type;
    const int column_tiles = ceil_div(g.oc, TILE::BN);
    const int tile_row = blockIdx.x / column_tiles;
    const int n0 = (blockIdx.x - tile_row * column_tiles) * TILE::BN;
    const int phase_row = blockIdx.y / g.stride_w, phase_column = blockIdx.y % g.stride_w;
    const tap_range in_rows = taps_of<DGRAD>(phase_row, g.r, g.stride_h, g.pad_h);
    const tap_range in_columns = taps_of<DGRAD>(phase_column, g.s, g.stride_w, g.pad_w);
    MPTK_DYN_SMEM(T, smem);
    engine_type engine;
    loader_type loader(g, in_rows, in_columns, tile_row * TILE::BM, n0);
    typename pipeline_of<T, loader_type, engine_type, GENERATION>::type pipeline;

    engine.zero();
    pipeline.run(loader, engine, smem, tile_row * TILE::BM < g.valid_rows ? loader.steps() : 0);
    if (!DGRAD && g.stats)
        gather_epilogue<T, TILE, DGRAD, !DGRAD>(g, engine, reinterpret_cast<float *>(smem),
                                                in_rows, in_columns, tile_row, n0);
    else
        gather_epilogue<T, TILE, DGRAD, false>(g, engine, reinterpret_cast<float *>(smem), in_rows,
                                               in_columns, tile_row, n0);
}

/* BM, BN, BK, WM, WN, CTAs of an SM. The last two are for products with few tiles. */
typedef tile<256, 128, 32, 64, 64, 1> tile_256x128;
typedef tile<128, 128, 32, 64, 64, 2> tile_128x128;
typedef tile<256, 64, 32, 32, 64, 1> tile_256x64;
typedef tile<128, 64, 32, 32, 64, 3> tile_128x64;
typedef tile<64, 64, 64, 32, 32, 3> tile_64x64x64;
typedef tile<64, 64, 32, 32, 32, 4> tile_64x64;

/* The numbers of the drawing. */
static_assert(tile_128x128::WARPS_M == 2 && tile_128x128::WARPS_N == 2 &&
                  tile_128x128::THREADS == 128,
              "4 warps");
static_assert(gather_loader<half, tile_128x128, false, false>::chunks_a::COUNT == 4 &&
                  gather_loader<half, tile_128x128, false, false>::chunks_a::ROW_STEP == 32,
              "4 chunks of a, 32 rows apart");
static_assert(gather_product<half, tile_128x128, false, TURING>::SMEM_BYTES == 20480 &&
                  gather_product<half, tile_128x128, false, AMPERE>::SMEM_BYTES == 4 * 16384,
              "stages in shared memory");
static_assert(tile_128x128::WARPS * tile_128x128::STRIP_FLOATS * 4 == 17408 &&
                  gather_product<half, tile_128x128, false, TURING>::STATS_BYTES == 2048,
              "the epilogue");
static_assert(2 * gather_product<half, tile_128x128, false, AMPERE>::SMEM_BYTES <= 163 * 1024 &&
                  2 * gather_product<half, tile_128x128, false, AMPERE_100KB>::SMEM_BYTES <=
                      98 * 1024 &&
                  2 * gather_product<half, tile_128x128, false, TURING>::SMEM_BYTES <= 64 * 1024,
              "two CTAs fit into an SM");

/* ---- wgrad --------------------------------------------------------------------------------------

     problem as a matrix product    dw (k x r*s*c) = sum over pixels m of dy[m][k] * x[pixel(m,tap)][c]
       a                            dy, k contiguous: TRANS
       b                            x, c contiguous: TRANS
       depth                        n*p*q pixels, cut into splits of `chunk`: CTAs along blockIdx.y

     CTA tile 128 x 128 x 32    warps 2 x 2, 64 x 64 each    one warp, 16 of the depth
                                as above                     4 + 4 fragments, 16 products
                                a thread brings chunk t % 16 of pixels t / 16 + 8 i: 4 of dy, 4 of x

     shared memory, one stage   wmma on sm_75 2 x 32 rows x 136 elements = 17,408 bytes; on sm_80 16,384

   Each split writes sums of its own, partial[split][k][r*s*c] in FP32; mptk_conv_add_splits_kernel
   adds them in order. So dw is the same in every run, and no chain of additions is too long. A
   thread's column (tap and channel) is fixed, only pixels move. PLAIN: 1x1, stride 1, no padding:
   the pixel of x is the pixel of dy, which saves two divisions a chunk. */
struct wgrad_args {
    const void *x;  /* (n,h,wd,xc), xc a multiple of 8 */
    const void *dy; /* (n,p,q,yc), yc a multiple of 8 */
    float *partial; /* (splits,k,r*s*xc) */
    int h, wd, xc, yc, k, r, s, stride_h, stride_w, pad_h, pad_w;
    int q, pixels; /* n*p*q of slots that count */
    int chunk;     /* pixels of a split, a multiple of BK */
    fastdiv by_q, by_pq, by_xc, by_s;
};

template <class T, class TILE, bool PLAIN> struct wgrad_loader {
    typedef chunks<TILE::THREADS, TILE::BK, TILE::BM> chunks_a;
    typedef chunks<TILE::THREADS, TILE::BK, TILE::BN> chunks_b;

    const wgrad_args &g;
    int pixel, end;                     /* of this tile; of the split */
    int k, column, tap_r, tap_s, channel; /* of this thread's chunks */

    MPTK_METHOD wgrad_loader(const wgrad_args &args, int k0, int n0, int begin, int end_)
        : g(args), pixel(begin), end(end_), k(k0 + chunks_a::column()),
          column(n0 + chunks_b::column()) {
        tap_r = quotient(quotient(column, g.by_xc, &channel), g.by_s, &tap_s);
    }

    MPTK_METHOD int steps() const {
        return end > pixel ? ceil_div(end - pixel, TILE::BK) : 0;
    }

    MPTK_METHOD void advance() {
        pixel += TILE::BK;
    }

    MPTK_METHOD chunk<T> a(int e) const {
        const int m = pixel + chunks_a::row(e);
        const bool exists = (k < g.yc) & (m < end);
        chunk<T> from = {static_cast<const T *>(g.dy) + (m * g.yc + k), exists};
        return from;
    }

    MPTK_METHOD chunk<T> b(int e) const {
        const int m = pixel + chunks_b::row(e);
        const bool exists = (column < g.r * g.s * g.xc) & (m < end);
        chunk<T> from = {static_cast<const T *>(g.x) + (m * g.xc + column), exists};
        if (PLAIN) return from;
        int rest, oq;
        const int image = quotient(m, g.by_pq, &rest), op = quotient(rest, g.by_q, &oq);
        const int y = op * g.stride_h - g.pad_h + tap_r, x = oq * g.stride_w - g.pad_w + tap_s;
        from.p = static_cast<const T *>(g.x) + (((image * g.h + y) * g.wd + x) * g.xc + channel);
        from.valid = exists & (static_cast<unsigned>(y) < static_cast<unsigned>(g.h)) &
                     (static_cast<unsigned>(x) < static_cast<unsigned>(g.wd));
        return from;
    }
};

struct wgrad_writer {
    float *partial; /* of this split */
    int k0, n0, k, columns;

    MPTK_METHOD void put(int row, int column, float values[8]) {
        if (k0 + row >= k || n0 + column >= columns) return;
        store8(partial + (static_cast<size_t>(k0 + row) * columns + n0 + column), values);
    }
};

template <class T, class TILE, generation GEN> struct wgrad_product {
    typedef typename engine_of<T, TILE, true, true, GEN>::type engine;
    static constexpr int SMEM_BYTES = product_smem_bytes<T, TILE, engine, GEN>(0);
};

template <class T, class TILE, bool PLAIN> MPTK_FN void wgrad(const wgrad_args &g) {
    typedef typename wgrad_product<T, TILE, GENERATION>::engine engine_type;
    typedef wgrad_loader<T, TILE, PLAIN> loader_type;
    const int columns = g.r * g.s * g.xc, column_tiles = ceil_div(columns, TILE::BN);
    const int tile_row = blockIdx.x / column_tiles, k0 = tile_row * TILE::BM;
    const int n0 = (blockIdx.x - tile_row * column_tiles) * TILE::BN;
    const int begin = blockIdx.y * g.chunk;
    const int end = begin + g.chunk < g.pixels ? begin + g.chunk : g.pixels;
    MPTK_DYN_SMEM(T, smem);
    engine_type engine;
    loader_type loader(g, k0, n0, begin, end);
    typename pipeline_of<T, loader_type, engine_type, GENERATION>::type pipeline;
    wgrad_writer writer = {g.partial + static_cast<size_t>(blockIdx.y) * g.k * columns, k0, n0, g.k,
                           columns};

    engine.zero();
    pipeline.run(loader, engine, smem, loader.steps());
    write_strips<TILE>(reinterpret_cast<float *>(smem), engine, writer);
}

static_assert(wgrad_loader<half, tile_128x128, false>::chunks_a::COUNT == 4 &&
                  wgrad_loader<half, tile_128x128, false>::chunks_a::ROW_STEP == 8,
              "4 chunks of dy, 8 pixels apart");
static_assert(wgrad_product<half, tile_128x128, TURING>::SMEM_BYTES == 17408 &&
                  wgrad_product<half, tile_128x128, AMPERE>::SMEM_BYTES == 4 * 16384,
              "stages in shared memory");

/* ---- any storage, any shape: plain --------------------------------------------------------------

     problem as a matrix product    as above, but dgrad in one phase over all taps
     CTA tile 64 x 64 x 16          256 threads, each 4 x 4 sums: rows 4 (t / 16), columns 4 (t % 16)
     shared memory                  a and b, 2 x 16 rows x 68 floats = 8,704 bytes, depth outermost

   A problem tells the elements of a and b, and where a sum goes. Threads beside each other bring
   what lies beside each other in memory: along the depth, or along rows (columns). */
struct conv_args {
    const void *x, *w, *dy; /* (n,h,wd,c), (k,r,s,c), (n,p,q,k) */
    const float *bias;      /* (k) or NULL */
    void *y, *dx;
    float *partial; /* (splits,k,r,s,padded c) */
    int n, num_valid, h, wd, c, k, r, s, p, q, stride, padding;
    int padded_c, chunk; /* wgrad: channels of partial; pixels of a split */
    fastdiv by_c, by_k, by_s, by_q, by_pq, by_wd, by_hwd, by_stride;
};

struct place { /* of a pixel */
    int image, y, x;
};

MPTK_FN place place_of(int pixel, fastdiv by_area, fastdiv by_width) {
    place at;
    int rest;
    at.image = quotient(pixel, by_area, &rest);
    at.y = quotient(rest, by_width, &at.x);
    return at;
}

struct tap { /* of a position in (r,s,channels) */
    int r, s, channel;
};

MPTK_FN tap tap_of(int position, fastdiv by_channels, fastdiv by_s) {
    tap t;
    t.r = quotient(quotient(position, by_channels, &t.channel), by_s, &t.s);
    return t;
}

/* x where tap t of output `at` meets it; zero in the padding. */
template <class T> MPTK_FN float gathered(const conv_args &g, place at, tap t) {
    const int y = at.y * g.stride - g.padding + t.r, x = at.x * g.stride - g.padding + t.s;
    if (y < 0 || y >= g.h || x < 0 || x >= g.wd) return 0.0f;
    return load(static_cast<const T *>(g.x) +
                (((at.image * g.h + y) * g.wd + x) * g.c + t.channel));
}

template <class T> struct plain_fprop {
    static constexpr bool DEPTH_FIRST_A = true, DEPTH_FIRST_B = true;
    const conv_args &g;

    MPTK_METHOD int rows() const {
        return g.n * g.p * g.q;
    }
    MPTK_METHOD int valid_rows() const {
        return g.num_valid * g.p * g.q;
    }
    MPTK_METHOD int columns() const {
        return g.k;
    }
    MPTK_METHOD int begin() const {
        return 0;
    }
    MPTK_METHOD int end() const {
        return g.r * g.s * g.c;
    }
    MPTK_METHOD float a(int m, int depth) const {
        return gathered<T>(g, place_of(m, g.by_pq, g.by_q), tap_of(depth, g.by_c, g.by_s));
    }
    MPTK_METHOD float b(int depth, int n) const {
        return load(static_cast<const T *>(g.w) + (n * end() + depth));
    }
    MPTK_METHOD void put(int m, int n, float sum) const {
        if (g.bias) sum += g.bias[n];
        store(static_cast<T *>(g.y) + (m * g.k + n), m < valid_rows() ? sum : 0.0f);
    }
};

template <class T> struct plain_dgrad {
    static constexpr bool DEPTH_FIRST_A = true, DEPTH_FIRST_B = false;
    const conv_args &g;

    MPTK_METHOD int rows() const {
        return g.n * g.h * g.wd;
    }
    MPTK_METHOD int valid_rows() const {
        return g.num_valid * g.h * g.wd;
    }
    MPTK_METHOD int columns() const {
        return g.c;
    }
    MPTK_METHOD int begin() const {
        return 0;
    }
    MPTK_METHOD int end() const {
        return g.r * g.s * g.k;
    }
    MPTK_METHOD float a(int m, int depth) const {
        const place at = place_of(m, g.by_hwd, g.by_wd);
        const tap t = tap_of(depth, g.by_k, g.by_s);
        const int up = at.y + g.padding - t.r, left = at.x + g.padding - t.s;
        int rest_y, rest_x;
        if (up < 0 || left < 0) return 0.0f;
        const int op = quotient(up, g.by_stride, &rest_y);
        const int oq = quotient(left, g.by_stride, &rest_x);
        if (rest_y || rest_x || op >= g.p || oq >= g.q) return 0.0f;
        return load(static_cast<const T *>(g.dy) +
                    (((at.image * g.p + op) * g.q + oq) * g.k + t.channel));
    }
    MPTK_METHOD float b(int depth, int n) const {
        const tap t = tap_of(depth, g.by_k, g.by_s);
        return load(static_cast<const T *>(g.w) +
                    (((t.channel * g.r + t.r) * g.s + t.s) * g.c + n));
    }
    MPTK_METHOD void put(int m, int n, float sum) const {
        store(static_cast<T *>(g.dx) + (m * g.c + n), m < valid_rows() ? sum : 0.0f);
    }
};

template <class T> struct plain_wgrad {
    static constexpr bool DEPTH_FIRST_A = false, DEPTH_FIRST_B = false;
    const conv_args &g;

    MPTK_METHOD int rows() const {
        return g.k;
    }
    MPTK_METHOD int valid_rows() const {
        return g.k;
    }
    MPTK_METHOD int columns() const {
        return g.r * g.s * g.c;
    }
    MPTK_METHOD int begin() const {
        return blockIdx.y * g.chunk;
    }
    MPTK_METHOD int end() const {
        const int pixels = g.num_valid * g.p * g.q;
        return begin() + g.chunk < pixels ? begin() + g.chunk : pixels;
    }
    MPTK_METHOD float a(int m, int depth) const {
        return load(static_cast<const T *>(g.dy) + (depth * g.k + m));
    }
    MPTK_METHOD float b(int depth, int n) const {
        return gathered<T>(g, place_of(depth, g.by_pq, g.by_q), tap_of(n, g.by_c, g.by_s));
    }
    MPTK_METHOD void put(int m, int n, float sum) const {
        const tap t = tap_of(n, g.by_c, g.by_s);
        const size_t row = static_cast<size_t>(blockIdx.y) * g.k + m;
        g.partial[((row * g.r + t.r) * g.s + t.s) * g.padded_c + t.channel] = sum;
    }
};

constexpr int PLAIN_TILE = 64, PLAIN_DEPTH = 16, PLAIN_LD = PLAIN_TILE + 4, PLAIN_THREADS = 256;
static_assert(PLAIN_THREADS * 16 == PLAIN_TILE * PLAIN_TILE, "4 x 4 sums a thread");
static_assert(2 * PLAIN_DEPTH * PLAIN_LD * 4 == 8704, "shared memory of the drawing");

/* Which elements of a PLAIN_DEPTH x PLAIN_TILE tile a thread brings, i < 4. */
template <bool DEPTH_FIRST> MPTK_FN int plain_depth(int i) {
    return DEPTH_FIRST ? threadIdx.x % PLAIN_DEPTH
                       : threadIdx.x / PLAIN_TILE + i * (PLAIN_THREADS / PLAIN_TILE);
}

template <bool DEPTH_FIRST> MPTK_FN int plain_other(int i) {
    return DEPTH_FIRST ? threadIdx.x / PLAIN_DEPTH + i * (PLAIN_THREADS / PLAIN_DEPTH)
                       : threadIdx.x % PLAIN_TILE;
}

template <class P>
MPTK_FN void plain_bring(const P &problem, int m0, int n0, int depth, float a[][PLAIN_LD],
                         float b[][PLAIN_LD]) {
    const int rows = problem.valid_rows(), columns = problem.columns(), end = problem.end();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int k = plain_depth<P::DEPTH_FIRST_A>(i), row = plain_other<P::DEPTH_FIRST_A>(i);
        const bool inside = m0 + row < rows && depth + k < end;
        a[k][row] = inside ? problem.a(m0 + row, depth + k) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int k = plain_depth<P::DEPTH_FIRST_B>(i), column = plain_other<P::DEPTH_FIRST_B>(i);
        const bool inside = n0 + column < columns && depth + k < end;
        b[k][column] = inside ? problem.b(depth + k, n0 + column) : 0.0f;
    }
}

template <class P> MPTK_FN void plain_product(const P &problem) {
    __shared__ float a[PLAIN_DEPTH][PLAIN_LD], b[PLAIN_DEPTH][PLAIN_LD];
    const int column_tiles = ceil_div(problem.columns(), PLAIN_TILE);
    const int tile_row = blockIdx.x / column_tiles, m0 = tile_row * PLAIN_TILE;
    const int n0 = (blockIdx.x - tile_row * column_tiles) * PLAIN_TILE;
    const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
    float sums[4][4] = {};

    for (int depth = problem.begin(); depth < problem.end(); depth += PLAIN_DEPTH) {
        plain_bring(problem, m0, n0, depth, a, b);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < PLAIN_DEPTH; k++)
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) sums[i][j] += a[k][row + i] * b[k][column + j];
        __syncthreads();
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++)
            if (m0 + row + i < problem.rows() && n0 + column + j < problem.columns())
                problem.put(m0 + row + i, n0 + column + j, sums[i][j]);
}

} // namespace mptk

/* ---- kernels --------------------------------------------------------------------------------- */
template <class T, class TILE, bool DGRAD, bool SMALLC>
__global__ void __launch_bounds__(TILE::THREADS, TILE::CTAS)
    mptk_conv_gather_kernel(mptk::gather_args g) {
    if constexpr (mptk::has_tensor_cores<T, mptk::GENERATION>())
        mptk::gather<T, TILE, DGRAD, SMALLC>(g);
}

template <class T, class TILE, bool PLAIN>
__global__ void __launch_bounds__(TILE::THREADS, TILE::CTAS)
    mptk_conv_wgrad_kernel(mptk::wgrad_args g) {
    if constexpr (mptk::has_tensor_cores<T, mptk::GENERATION>()) mptk::wgrad<T, TILE, PLAIN>(g);
}

template <class T>
__global__ void __launch_bounds__(mptk::PLAIN_THREADS)
    mptk_conv_plain_fprop_kernel(mptk::conv_args g) {
    const mptk::plain_fprop<T> problem = {g};
    mptk::plain_product(problem);
}

template <class T>
__global__ void __launch_bounds__(mptk::PLAIN_THREADS)
    mptk_conv_plain_dgrad_kernel(mptk::conv_args g) {
    const mptk::plain_dgrad<T> problem = {g};
    mptk::plain_product(problem);
}

template <class T>
__global__ void __launch_bounds__(mptk::PLAIN_THREADS)
    mptk_conv_plain_wgrad_kernel(mptk::conv_args g) {
    const mptk::plain_wgrad<T> problem = {g};
    mptk::plain_product(problem);
}

namespace mptk {

/* Channels are padded to a multiple of 8, or, of few, two pixels become one (below). Either way rows
   of `width` pixels with c channels go with rows of view_width pixels with padded_c channels, of
   which pixel 0 is pixel -shift. */
struct view_args {
    int rows, width, c;
    int view_width, padded_c, shift; /* padded_c a multiple of 4 */
    fastdiv by_quads, by_view_width; /* padded_c / 4 */
};

struct view_place { /* of four channels */
    int row, pixel, channel;
    bool exists;
};

MPTK_FN view_place view_place_of(int i, const view_args &g) {
    view_place at;
    int quad;
    at.row = quotient(quotient(i, g.by_quads, &quad), g.by_view_width, &at.pixel);
    at.pixel -= g.shift;
    at.channel = quad * 4;
    at.exists = at.pixel >= 0 && at.pixel < g.width && at.channel < g.c;
    return at;
}

MPTK_FN int view_quads(const view_args &g) {
    return g.rows * g.view_width * (g.padded_c / 4);
}

template <class T> struct __align__(8) four { /* of a 16-bit type */
    T element[4];
};

struct sum_columns_args {
    const void *x; /* (rows,columns) */
    float *sums;   /* (parts,columns): part i sums up rows i * SUM_ROWS ... */
    int rows, columns;
};

constexpr int ELEMENTWISE_THREADS = 256;
/* Rows of a part: 16 for each of a block's 32 rows of threads. Not more, so that a layer with few
   channels still fills a GPU; not fewer, so that the parts are little beside x. */
constexpr int SUM_ROWS = 512, SUM_COLUMNS = 64, SUM_THREADS = 256;

} // namespace mptk

/* dst (rows,view_width,padded_c) = src (rows,width,c) with zeros around, four channels a thread. */
template <class T>
__global__ void __launch_bounds__(mptk::ELEMENTWISE_THREADS)
    mptk_conv_pad_kernel(const void *src, void *dst, mptk::view_args g) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    mptk::four<T> values;

    if (i >= mptk::view_quads(g)) return;
    const mptk::view_place at = mptk::view_place_of(i, g);
    const T *from = static_cast<const T *>(src) +
                    ((static_cast<size_t>(at.row) * g.width + at.pixel) * g.c + at.channel);
    for (int e = 0; e < 4; e++)
        mptk::store(&values.element[e],
                    at.exists && at.channel + e < g.c ? mptk::load(from + e) : 0.0f);
    static_cast<mptk::four<T> *>(dst)[i] = values;
}

/* dw (rows,width,c), rows = k*r and width = s, = ((partial[0] + partial[1]) + ...) of each weight;
   partial (splits,rows,view_width,padded_c). */
__global__ void __launch_bounds__(mptk::ELEMENTWISE_THREADS)
    mptk_conv_add_splits_kernel(const float *partial, float *dw, int splits, mptk::view_args g) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, quads = mptk::view_quads(g);
    const float4 *from = reinterpret_cast<const float4 *>(partial) + i;

    if (i >= quads) return;
    const mptk::view_place at = mptk::view_place_of(i, g);
    if (!at.exists) return;
    float4 sum = from[0];
    for (int split = 1; split < splits; split++) {
        const float4 more = from[static_cast<size_t>(split) * quads];
        sum.x += more.x;
        sum.y += more.y;
        sum.z += more.z;
        sum.w += more.w;
    }
    float *to = dw + ((static_cast<size_t>(at.row) * g.width + at.pixel) * g.c + at.channel);
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
    if (g.c % 4 == 0) *reinterpret_cast<float4 *>(to) = sum;
    else
        for (int e = 0; e < 4; e++)
            if (at.channel + e < g.c) to[e] = values[e];
}

/* A block sums 512 rows of 64 columns: 8 chunks of 8 columns x 32 rows of threads. */
template <class T>
__global__ void __launch_bounds__(mptk::SUM_THREADS)
    mptk_conv_sum_columns_kernel(mptk::sum_columns_args g) {
    constexpr int CHUNKS = mptk::SUM_COLUMNS / 8, ROWS = mptk::SUM_THREADS / CHUNKS;
    __shared__ float shared[ROWS][mptk::SUM_COLUMNS];
    const int column = blockIdx.y * mptk::SUM_COLUMNS + threadIdx.x % CHUNKS * 8;
    const int row = threadIdx.x / CHUNKS, first = blockIdx.x * mptk::SUM_ROWS;
    const int count = g.columns - column;
    float sums[8] = {}, values[8];

    for (int i = row; i < mptk::SUM_ROWS && first + i < g.rows; i += ROWS) {
        const T *from =
            static_cast<const T *>(g.x) + (static_cast<size_t>(first + i) * g.columns + column);
        if (g.columns % 8 == 0 && count > 0) mptk::load8(from, values);
        else mptk::load8_ragged(from, count, values);
        for (int e = 0; e < 8; e++) sums[e] += values[e];
    }
    mptk::store8(&shared[row][threadIdx.x % CHUNKS * 8], sums);
    __syncthreads();
    if (threadIdx.x >= mptk::SUM_COLUMNS) return;
    const int mine = blockIdx.y * mptk::SUM_COLUMNS + threadIdx.x;
    float total = 0.0f;
    for (int i = 0; i < ROWS; i++) total += shared[i][threadIdx.x];
    if (mine < g.columns) g.sums[static_cast<size_t>(blockIdx.x) * g.columns + mine] = total;
}

/* sums[column] = the parts in order: 8 groups of threads take every eighth, then the groups add up. */
__global__ void __launch_bounds__(mptk::SUM_THREADS)
    mptk_conv_sum_parts_kernel(const float *parts, float *sums, int num_parts, int columns) {
    constexpr int GROUPS = mptk::SUM_THREADS / mptk::WARP;
    __shared__ float shared[GROUPS][mptk::WARP];
    const int lane = threadIdx.x % mptk::WARP, group = threadIdx.x / mptk::WARP;
    const int column = blockIdx.x * mptk::WARP + lane;
    float sum = 0.0f;

    for (int i = group; i < num_parts && column < columns; i += GROUPS)
        sum += parts[static_cast<size_t>(i) * columns + column];
    shared[group][lane] = sum;
    __syncthreads();
    if (group > 0 || column >= columns) return;
    for (int i = 1; i < GROUPS; i++) sum += shared[i][lane];
    sums[column] = sum;
}

/* y[row][column] += bias[column], one number a thread: after a matrix product that has no bias. */
template <class T>
__global__ void __launch_bounds__(mptk::ELEMENTWISE_THREADS)
    mptk_conv_add_bias_kernel(void *y, const float *bias, int count, mptk::fastdiv by_columns) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    int column;

    if (i >= count) return;
    mptk::quotient(i, by_columns, &column);
    T *at = static_cast<T *>(y) + i;
    mptk::store(at, mptk::load(at) + bias[column]);
}

#define MPTK_GATHER(T, TILE, DGRAD, SMALLC) \
    template __global__ void mptk_conv_gather_kernel<T, mptk::TILE, DGRAD, SMALLC>( \
        mptk::gather_args);
#define MPTK_WGRAD(T, TILE, PLAIN) \
    template __global__ void mptk_conv_wgrad_kernel<T, mptk::TILE, PLAIN>(mptk::wgrad_args);
#define MPTK_GATHER_TILES(T, DGRAD) \
    MPTK_GATHER(T, tile_256x128, DGRAD, false) \
    MPTK_GATHER(T, tile_128x128, DGRAD, false) \
    MPTK_GATHER(T, tile_256x64, DGRAD, false) \
    MPTK_GATHER(T, tile_128x64, DGRAD, false) \
    MPTK_GATHER(T, tile_64x64x64, DGRAD, false) \
    MPTK_GATHER(T, tile_64x64, DGRAD, false)
#define MPTK_TENSOR_CORE_KERNELS(T) \
    MPTK_GATHER_TILES(T, false) \
    MPTK_GATHER(T, tile_128x64, false, true) \
    MPTK_GATHER_TILES(T, true) \
    MPTK_WGRAD(T, tile_128x128, false) \
    MPTK_WGRAD(T, tile_128x128, true) \
    MPTK_WGRAD(T, tile_64x64, false) \
    MPTK_WGRAD(T, tile_64x64, true) \
    template __global__ void mptk_conv_pad_kernel<T>(const void *, void *, mptk::view_args);
#define MPTK_PLAIN_KERNELS(T) \
    template __global__ void mptk_conv_plain_fprop_kernel<T>(mptk::conv_args); \
    template __global__ void mptk_conv_plain_dgrad_kernel<T>(mptk::conv_args); \
    template __global__ void mptk_conv_plain_wgrad_kernel<T>(mptk::conv_args); \
    template __global__ void mptk_conv_sum_columns_kernel<T>(mptk::sum_columns_args); \
    template __global__ void mptk_conv_add_bias_kernel<T>(void *, const float *, int, \
                                                          mptk::fastdiv);
MPTK_TENSOR_CORE_KERNELS(half)
MPTK_TENSOR_CORE_KERNELS(__nv_bfloat16)
MPTK_PLAIN_KERNELS(float)
MPTK_PLAIN_KERNELS(half)
MPTK_PLAIN_KERNELS(__nv_bfloat16)

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

/* What kernels.cu is compiled for, as text: "700,750" becomes "70 75". */
#if defined(MPTK_ON_CPU)
#define MPTK_ARCH_LIST MPTK_ARCH
#elif defined(__CUDA_ARCH_LIST__)
#define MPTK_ARCH_LIST __CUDA_ARCH_LIST__
#else
#define MPTK_ARCH_LIST 0 /* nvcc before 11.5 doesn't tell */
#endif
struct arch_text {
    char text[128];
};

static constexpr arch_text arch_text_make() {
    constexpr int archs[] = {MPTK_ARCH_LIST};
    static_assert(sizeof(archs) / sizeof(archs[0]) <= 25, "five characters each");
    arch_text t = {};
    int at = 0;

    for (int arch : archs) {
        if (at > 0) t.text[at++] = ' ';
        if (arch >= 1000) t.text[at++] = static_cast<char>('0' + arch / 1000);
        t.text[at++] = static_cast<char>('0' + arch / 100 % 10);
        t.text[at++] = static_cast<char>('0' + arch / 10 % 10);
    }
    return t;
}

/* The launch just made, as launchers report it. */
static inline int launch_status() {
    return static_cast<int>(cudaGetLastError());
}

} // namespace mptk

/* ---- convolution --------------------------------------------------------------------------------
   What runs is a function of the shape alone: sizes, the capacity n (never num_valid), and the type.
   So the bits of a result are the same on every GPU of a generation. */
namespace mptk {

enum direction { FPROP, DGRAD, WGRAD };

/* For how many SMs tiles are chosen: between V100 (80), A100 (108) and H200 (132). Tests set it to 2
   to reach large tiles with small shapes. */
#ifndef MPTK_TILE_SMS
#define MPTK_TILE_SMS 108
#endif
/* wgrad: CTAs worth two waves of two a V100's SM; tiles of the depth a split has at least, so that
   start and end don't dominate; splits at most, which the reduction reads again. */
constexpr int WGRAD_CTAS = 320, WGRAD_MIN_STEPS = 16, WGRAD_MAX_SPLITS = 256;
constexpr int MAX_TAPS = 16; /* in each dimension, in a gather product: bits of a mask */

static inline int round8(int channels) {
    return (channels + 7) / 8 * 8;
}

static inline size_t round256(size_t bytes) {
    return (bytes + 255) / 256 * 256;
}

/* What a code was compiled for decides how much shared memory it wants, and that may be older than
   the device: PTX for sm_80 runs on sm_90. So the code is asked, not the device. */
template <class KERNEL> static int generation_of_code(KERNEL *kernel, generation *out) {
#ifdef MPTK_ON_CPU
    (void)kernel;
    *out = GENERATION;
    return 0;
#else
    cudaFuncAttributes about;
    const cudaError_t rc = cudaFuncGetAttributes(&about, reinterpret_cast<const void *>(kernel));
    if (rc == cudaSuccess) *out = generation_of(about.ptxVersion * 10);
    return static_cast<int>(rc);
#endif
}

/* Beyond 48 KB a kernel must be allowed its shared memory, on each device. */
template <class KERNEL> static int allow_smem(KERNEL *kernel, int bytes) {
    if (bytes <= 48 * 1024) return 0;
    return static_cast<int>(cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel),
                                                 cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 bytes));
}

/* PRODUCT<GEN>::SMEM_BYTES of the generation that the code is for. A kernel for T on tensor cores
   that don't know T is empty: that must not pass for a result. */
template <class T, template <generation> class PRODUCT, class KERNEL>
static int reserve_smem(KERNEL *kernel, int *bytes) {
    generation gen = TURING;
    const int rc = generation_of_code(kernel, &gen);

    if (rc) return rc;
    if (is_bf16<T>::value && gen < AMPERE) return cudaErrorNotSupported;
    switch (gen) {
    case VOLTA: *bytes = PRODUCT<VOLTA>::SMEM_BYTES; break;
    case TURING: *bytes = PRODUCT<TURING>::SMEM_BYTES; break;
    case AMPERE: *bytes = PRODUCT<AMPERE>::SMEM_BYTES; break;
    case AMPERE_100KB: *bytes = PRODUCT<AMPERE_100KB>::SMEM_BYTES; break;
    }
    return allow_smem(kernel, *bytes);
}

/* ---- the table of gather tiles --------------------------------------------------------------- */
template <class T, class TILE, bool DGRAD> struct gather_of {
    template <generation GEN> using product = gather_product<T, TILE, DGRAD, GEN>;
};

template <class T, class TILE, bool DGRAD, bool SMALLC>
static int launch_gather(const gather_args &g, int phases, void *stream) {
    auto kernel = mptk_conv_gather_kernel<T, TILE, DGRAD, SMALLC>;
    const dim3 grid(ceil_div(g.rows, TILE::BM) * ceil_div(g.oc, TILE::BN), phases);
    int bytes = 0;
    const int rc = reserve_smem<T, gather_of<T, TILE, DGRAD>::template product>(kernel, &bytes);

    if (rc) return rc;
    MPTK_LAUNCH(kernel, grid, dim3(TILE::THREADS), bytes, stream, g);
    return launch_status();
}

enum gather_tile { G256X128, G128X128, G256X64, G128X64, G64X64X64, G64X64, GSMALLC };
struct gather_shape {
    const char *name;
    int bm, bn;
};
static const gather_shape gather_shapes[] = {
    {"tensor cores, 256x128 tile", 256, 128}, {"tensor cores, 128x128 tile", 128, 128},
    {"tensor cores, 256x64 tile", 256, 64},   {"tensor cores, 128x64 tile", 128, 64},
    {"tensor cores, 64x64x64 tile", 64, 64},  {"tensor cores, 64x64 tile", 64, 64},
    {"tensor cores, 128x64 tile for few channels", 128, 64},
};

template <class T, bool DGRAD>
static int launch_gather_tile(gather_tile which, const gather_args &g, int phases, void *stream) {
    switch (which) {
    case G256X128: return launch_gather<T, tile_256x128, DGRAD, false>(g, phases, stream);
    case G128X128: return launch_gather<T, tile_128x128, DGRAD, false>(g, phases, stream);
    case G256X64: return launch_gather<T, tile_256x64, DGRAD, false>(g, phases, stream);
    case G128X64: return launch_gather<T, tile_128x64, DGRAD, false>(g, phases, stream);
    case G64X64X64: return launch_gather<T, tile_64x64x64, DGRAD, false>(g, phases, stream);
    case G64X64: return launch_gather<T, tile_64x64, DGRAD, false>(g, phases, stream);
    default: return launch_gather<T, tile_128x64, false, true>(g, phases, stream);
    }
}

static inline double gather_ctas(gather_tile which, int rows, int columns, int phases) {
    const gather_shape &t = gather_shapes[which];
    return static_cast<double>(ceil_div(rows, t.bm)) * ceil_div(columns, t.bn) * phases;
}

/* The rule, from a model of time per tile and simulation: the largest tile that keeps the SMs busy.
     columns                          tile       if there are that many CTAs an SM
     more than 64, unless that       256x128    2 (one fits: two waves)
       leaves half a tile empty       128x128    1
     else                            256x64     4
                                      128x64     1
     fewer CTAs than SMs             64x64x64   channels >= 64; else 64x64
     fprop, channels < 32            128x64 for few channels */
static inline gather_tile choose_gather(int rows, int columns, int channels, int phases,
                                        bool dgrad) {
    const bool narrow = columns <= 64 || (columns < 256 && columns % 128 > 0 && columns % 128 <= 64);
    const gather_tile large = narrow ? G256X64 : G256X128, small = narrow ? G128X64 : G128X128;
    const int waves = narrow ? 4 : 2;

    if (!dgrad && channels < tile_128x64::BK) return GSMALLC;
    if (gather_ctas(large, rows, columns, phases) >= waves * MPTK_TILE_SMS) return large;
    if (gather_ctas(small, rows, columns, phases) >= MPTK_TILE_SMS) return small;
    return channels >= tile_64x64x64::BK ? G64X64X64 : G64X64;
}

/* ---- plans: what runs, and where things lie in the workspace --------------------------------- */
struct conv_plan {
    bool plain;
    gather_tile tile; /* fprop and dgrad on tensor cores */
    bool large, flat; /* wgrad on tensor cores: 128x128 tiles; 1x1, stride 1, no padding */
    int phases, splits, chunk;
    int c8, k8; /* channels after padding */
    /* x and w in a row: as they are, or in pairs of pixels */
    bool paired;
    int wd, s, stride_w, pad_w;
    /* Byte offsets in the workspace; has_...: there is a copy */
    bool has_x, has_w, has_dy, has_partial;
    size_t x, w, dy, partial, bias, bytes;
};

static inline size_t reserve(size_t *bytes, size_t more) {
    const size_t at = *bytes;
    *bytes += round256(more);
    return at;
}

/* Offsets are computed in 32 bits, those of taps outside the image and of the up to 31 pixels behind
   the last included, which aren't used. */
static inline bool offsets_fit(double images, double pixels, double h, double wd, int channels,
                               int border) {
    const double behind = images * (1 + 31 / pixels);
    return (behind * h + border + MAX_TAPS) * wd * round8(channels) < 2147483648.0;
}

static inline bool is_plain(const mpt_conv2d_args *a, direction d) {
    const double pixels = static_cast<double>(a->n) * a->p * a->q;
    const int taps = ceil_div(max_of(a->r, a->s), d == DGRAD ? a->stride : 1);

    if (a->dtype == MPT_F32 || (d != WGRAD && taps > MAX_TAPS)) return true;
    return !offsets_fit(a->n, pixels, a->h, a->wd, a->c, 2 * a->padding) ||
           !offsets_fit(a->n, pixels, a->p, a->q, a->k, a->r + a->s) ||
           !offsets_fit(a->k, a->k, a->r, a->s, a->c, 0);
}

/* Few channels and an even stride, as the first layer of an ImageNet network has: channels padded to
   four and two pixels taken for one make eight, of which in the example six are used, not three.

       x (n,h,wd,3)   | 0: RGB | 1: RGB | 2: RGB | 3: RGB |    ->   (n,h,wd/2,8)  | RGB-RGB- | RGB-RGB- |
       w (k,7,7,3)    7 columns, behind one of zeros           ->   (k,7,4,8)
       stride 2, padding 3                                     ->   along rows 1 and 2

   The padding must be a whole number of pairs; a column of zeros (`shift`) makes up for an odd one. */
static inline void plan_pairs(const mpt_conv2d_args *a, direction d, conv_plan *plan) {
    plan->paired = !plan->plain && d != DGRAD && a->c <= 4 && a->stride % 2 == 0;
    plan->wd = a->wd;
    plan->s = a->s;
    plan->stride_w = a->stride;
    plan->pad_w = a->padding;
    if (!plan->paired) return;
    plan->wd = ceil_div(a->wd, 2);
    plan->stride_w = a->stride / 2;
    plan->pad_w = ceil_div(a->padding, 2);
    plan->s = ceil_div(a->s + a->padding % 2, 2);
}

/* How (rows,width,c) goes with what the product sees. */
static view_args view_of(const conv_plan &plan, int rows, int width, int c, int padded_c,
                         int view_width, int shift) {
    view_args g = {rows, width, c, view_width, padded_c, shift, {}, {}};

    if (plan.paired) {
        g.view_width *= 2;
        g.padded_c /= 2;
    }
    g.by_quads = fastdiv_make(g.padded_c / 4);
    g.by_view_width = fastdiv_make(g.view_width);
    return g;
}

static inline view_args view_of_x(const mpt_conv2d_args *a, const conv_plan &plan) {
    return view_of(plan, a->num_valid * a->h, a->wd, a->c, plan.c8, plan.wd, 0);
}

static inline view_args view_of_w(const mpt_conv2d_args *a, const conv_plan &plan) {
    return view_of(plan, a->k * a->r, a->s, a->c, plan.c8, plan.s,
                   plan.paired ? a->padding % 2 : 0);
}

static inline void plan_splits(const mpt_conv2d_args *a, conv_plan *plan) {
    const int tile = !plan->plain && plan->large ? 128 : 64, depth = plan->plain ? 16 : 32;
    const int columns = a->r * plan->s * plan->c8, pixels = a->n * a->p * a->q;
    const double tiles = static_cast<double>(ceil_div(a->k, tile)) * ceil_div(columns, tile);
    const int steps = ceil_div(pixels, depth);
    int splits = tiles >= WGRAD_CTAS ? 1 : ceil_div(WGRAD_CTAS, static_cast<int>(tiles));

    if (splits > WGRAD_MAX_SPLITS) splits = WGRAD_MAX_SPLITS;
    if (splits > steps / WGRAD_MIN_STEPS) splits = max_of(steps / WGRAD_MIN_STEPS, 1);
    plan->chunk = ceil_div(steps, splits) * depth;
    plan->splits = ceil_div(pixels, plan->chunk);
    plan->has_partial = plan->splits > 1 || plan->c8 != a->c;
    if (plan->has_partial)
        plan->partial = reserve(&plan->bytes, static_cast<size_t>(plan->splits) * a->k * columns *
                                                  sizeof(float));
}

static inline conv_plan plan_conv(const mpt_conv2d_args *a, direction d) {
    const size_t half_size = 2, pixels = static_cast<size_t>(a->n) * a->p * a->q;
    conv_plan plan = {};

    plan.plain = is_plain(a, d);
    plan.c8 = round8(a->c);
    plan.k8 = round8(a->k);
    plan.phases = d == DGRAD ? a->stride * a->stride : 1;
    plan.flat = a->r == 1 && a->s == 1 && a->stride == 1 && a->padding == 0;
    plan_pairs(a, d, &plan);
    plan.large = a->k >= 128 && a->r * plan.s * plan.c8 >= 128;
    if (d == FPROP) plan.tile = choose_gather(a->n * a->p * a->q, a->k, plan.c8, 1, false);
    if (d == DGRAD)
        plan.tile = choose_gather(a->n * ceil_div(a->h, a->stride) * ceil_div(a->wd, a->stride),
                                  a->c, plan.k8, plan.phases, true);
    plan.has_x = !plan.plain && d != DGRAD && plan.c8 != a->c;
    plan.has_w = !plan.plain && d != WGRAD && plan.c8 != a->c;
    plan.has_dy = !plan.plain && d != FPROP && plan.k8 != a->k;
    if (plan.has_x)
        plan.x = reserve(&plan.bytes, half_size * a->n * a->h * plan.wd * plan.c8);
    if (plan.has_w) plan.w = reserve(&plan.bytes, half_size * a->k * a->r * plan.s * plan.c8);
    if (plan.has_dy) plan.dy = reserve(&plan.bytes, half_size * pixels * plan.k8);
    if (d != WGRAD) return plan;
    plan_splits(a, &plan);
    if (a->dbias)
        plan.bias = reserve(&plan.bytes, mptk_sum_columns_workspace_bytes(
                                             static_cast<int64_t>(pixels), a->k));
    return plan;
}

static inline void *in_workspace(const mpt_conv2d_args *a, size_t offset) {
    return static_cast<char *>(a->workspace) + offset;
}

/* ---- launches -------------------------------------------------------------------------------- */
static inline int elementwise_blocks(int count) {
    return ceil_div(count, ELEMENTWISE_THREADS);
}

static int launch_pad(const void *src, void *dst, const view_args &g, mpt_dtype dtype,
                      void *stream) {
    const dim3 blocks(elementwise_blocks(g.rows * g.view_width * (g.padded_c / 4)));
    const dim3 threads(ELEMENTWISE_THREADS);

    if (g.rows == 0) return 0;
    if (dtype == MPT_F16)
        MPTK_LAUNCH((mptk_conv_pad_kernel<half>), blocks, threads, 0, stream, src, dst, g);
    else MPTK_LAUNCH((mptk_conv_pad_kernel<__nv_bfloat16>), blocks, threads, 0, stream, src, dst, g);
    return launch_status();
}

struct operands { /* as the product reads them: the caller's, or copies in the workspace */
    const void *x, *w, *dy;
};

static int pad_operands(const mpt_conv2d_args *a, const conv_plan &plan, operands *o,
                        void *stream) {
    int rc = 0;

    o->x = plan.has_x ? in_workspace(a, plan.x) : a->x;
    o->w = plan.has_w ? in_workspace(a, plan.w) : a->w;
    o->dy = plan.has_dy ? in_workspace(a, plan.dy) : a->dy;
    if (plan.has_x)
        rc = launch_pad(a->x, in_workspace(a, plan.x), view_of_x(a, plan), a->dtype, stream);
    if (!rc && plan.has_w)
        rc = launch_pad(a->w, in_workspace(a, plan.w), view_of_w(a, plan), a->dtype, stream);
    if (!rc && plan.has_dy)
        rc = launch_pad(a->dy, in_workspace(a, plan.dy),
                        view_of({}, a->num_valid * a->p, a->q, a->k, plan.k8, a->q, 0), a->dtype,
                        stream);
    return rc;
}

static gather_args gather_args_of(const mpt_conv2d_args *a, const conv_plan &plan, direction d,
                                  const operands &o) {
    gather_args g = {};
    const bool forward = d == FPROP;

    g.x = forward ? o.x : o.dy;
    g.w = o.w;
    g.y = forward ? a->y : a->dx;
    g.bias = forward ? a->bias : NULL;
    g.gh = forward ? a->h : a->p;
    g.gw = forward ? plan.wd : a->q;
    g.gc = forward ? plan.c8 : plan.k8;
    g.yh = forward ? a->p : a->h;
    g.yw = forward ? a->q : a->wd;
    g.oc = forward ? a->k : a->c;
    g.oh = forward ? a->p : ceil_div(a->h, a->stride);
    g.ow = forward ? a->q : ceil_div(a->wd, a->stride);
    g.k = a->k;
    g.r = a->r;
    g.s = plan.s;
    g.wc = plan.c8;
    g.stride_h = a->stride;
    g.stride_w = plan.stride_w;
    g.pad_h = a->padding;
    g.pad_w = plan.pad_w;
    g.rows = a->n * g.oh * g.ow;
    g.valid_rows = a->num_valid * g.oh * g.ow;
    g.by_ow = fastdiv_make(g.ow);
    g.by_ohw = fastdiv_make(g.oh * g.ow);
    return g;
}

static int run_gather(const mpt_conv2d_args *a, const conv_plan &plan, direction d, float *stats,
                      const float *pivot, void *stream) {
    operands o;
    const int rc = pad_operands(a, plan, &o, stream);
    gather_args g = gather_args_of(a, plan, d, o);

    if (rc) return rc;
    g.stats = stats;
    g.pivot = pivot;
    if (a->dtype == MPT_F16)
        return d == FPROP ? launch_gather_tile<half, false>(plan.tile, g, plan.phases, stream)
                          : launch_gather_tile<half, true>(plan.tile, g, plan.phases, stream);
    return d == FPROP ? launch_gather_tile<__nv_bfloat16, false>(plan.tile, g, plan.phases, stream)
                      : launch_gather_tile<__nv_bfloat16, true>(plan.tile, g, plan.phases, stream);
}

template <class T, class TILE> struct wgrad_of {
    template <generation GEN> using product = wgrad_product<T, TILE, GEN>;
};

template <class T, class TILE, bool PLAIN>
static int launch_wgrad(const wgrad_args &g, int splits, void *stream) {
    auto kernel = mptk_conv_wgrad_kernel<T, TILE, PLAIN>;
    const dim3 grid(ceil_div(g.k, TILE::BM) * ceil_div(g.r * g.s * g.xc, TILE::BN), splits);
    int bytes = 0;
    const int rc = reserve_smem<T, wgrad_of<T, TILE>::template product>(kernel, &bytes);

    if (rc) return rc;
    MPTK_LAUNCH(kernel, grid, dim3(TILE::THREADS), bytes, stream, g);
    return launch_status();
}

template <class T>
static int launch_wgrad_tile(const conv_plan &plan, const wgrad_args &g, void *stream) {
    if (plan.large && plan.flat)
        return launch_wgrad<T, tile_128x128, true>(g, plan.splits, stream);
    if (plan.large) return launch_wgrad<T, tile_128x128, false>(g, plan.splits, stream);
    if (plan.flat) return launch_wgrad<T, tile_64x64, true>(g, plan.splits, stream);
    return launch_wgrad<T, tile_64x64, false>(g, plan.splits, stream);
}

static int run_wgrad(const mpt_conv2d_args *a, const conv_plan &plan, float *partial,
                     void *stream) {
    wgrad_args g = {};
    operands o;
    const int rc = pad_operands(a, plan, &o, stream);

    if (rc) return rc;
    g.x = o.x;
    g.dy = o.dy;
    g.partial = partial;
    g.h = a->h;
    g.wd = plan.wd;
    g.xc = plan.c8;
    g.yc = plan.k8;
    g.k = a->k;
    g.r = a->r;
    g.s = plan.s;
    g.stride_h = a->stride;
    g.stride_w = plan.stride_w;
    g.pad_h = a->padding;
    g.pad_w = plan.pad_w;
    g.q = a->q;
    g.pixels = a->num_valid * a->p * a->q;
    g.chunk = plan.chunk;
    g.by_q = fastdiv_make(a->q);
    g.by_pq = fastdiv_make(a->p * a->q);
    g.by_xc = fastdiv_make(plan.c8);
    g.by_s = fastdiv_make(plan.s);
    return a->dtype == MPT_F16 ? launch_wgrad_tile<half>(plan, g, stream)
                               : launch_wgrad_tile<__nv_bfloat16>(plan, g, stream);
}

static conv_args plain_args(const mpt_conv2d_args *a, const conv_plan &plan, float *partial) {
    conv_args g = {};

    g.x = a->x, g.w = a->w, g.dy = a->dy, g.bias = a->bias;
    g.y = a->y, g.dx = a->dx, g.partial = partial;
    g.n = a->n, g.num_valid = a->num_valid, g.h = a->h, g.wd = a->wd, g.c = a->c, g.k = a->k;
    g.r = a->r, g.s = a->s, g.p = a->p, g.q = a->q, g.stride = a->stride, g.padding = a->padding;
    g.padded_c = plan.c8, g.chunk = plan.chunk;
    g.by_c = fastdiv_make(a->c);
    g.by_k = fastdiv_make(a->k);
    g.by_s = fastdiv_make(a->s);
    g.by_q = fastdiv_make(a->q);
    g.by_pq = fastdiv_make(a->p * a->q);
    g.by_wd = fastdiv_make(a->wd);
    g.by_hwd = fastdiv_make(a->h * a->wd);
    g.by_stride = fastdiv_make(a->stride);
    return g;
}

template <class T>
static int launch_plain(const mpt_conv2d_args *a, const conv_plan &plan, direction d,
                        float *partial, void *stream) {
    const conv_args g = plain_args(a, plan, partial);
    const int rows = d == FPROP ? a->n * a->p * a->q : d == DGRAD ? a->n * a->h * a->wd : a->k;
    const int columns = d == FPROP ? a->k : d == DGRAD ? a->c : a->r * a->s * a->c;
    const dim3 grid(ceil_div(rows, PLAIN_TILE) * ceil_div(columns, PLAIN_TILE),
                    d == WGRAD ? plan.splits : 1);

    if (d == FPROP)
        MPTK_LAUNCH((mptk_conv_plain_fprop_kernel<T>), grid, dim3(PLAIN_THREADS), 0, stream, g);
    else if (d == DGRAD)
        MPTK_LAUNCH((mptk_conv_plain_dgrad_kernel<T>), grid, dim3(PLAIN_THREADS), 0, stream, g);
    else MPTK_LAUNCH((mptk_conv_plain_wgrad_kernel<T>), grid, dim3(PLAIN_THREADS), 0, stream, g);
    return launch_status();
}

static int run_plain(const mpt_conv2d_args *a, const conv_plan &plan, direction d, float *partial,
                     void *stream) {
    MPTK_BY_DTYPE(a->dtype, T, return launch_plain<T>(a, plan, d, partial, stream));
}

static int add_splits(const mpt_conv2d_args *a, const conv_plan &plan, const float *partial,
                      void *stream) {
    const view_args g = view_of_w(a, plan);
    const dim3 blocks(elementwise_blocks(g.rows * g.view_width * (g.padded_c / 4)));

    MPTK_LAUNCH(mptk_conv_add_splits_kernel, blocks, dim3(ELEMENTWISE_THREADS), 0, stream, partial,
                a->dw, plan.splits, g);
    return launch_status();
}

static int run_conv(const mpt_conv2d_args *a, direction d, float *stats, const float *pivot,
                    void *stream) {
    const conv_plan plan = plan_conv(a, d);
    float *partial = a->dw;
    int rc;

    if (d != WGRAD)
        return plan.plain ? run_plain(a, plan, d, NULL, stream)
                          : run_gather(a, plan, d, stats, pivot, stream);
    if (plan.has_partial) partial = static_cast<float *>(in_workspace(a, plan.partial));
    rc = plan.plain ? run_plain(a, plan, d, partial, stream) : run_wgrad(a, plan, partial, stream);
    if (!rc && plan.has_partial) rc = add_splits(a, plan, partial, stream);
    if (rc || !a->dbias) return rc;
    return mptk_sum_columns(a->dy, a->dbias, static_cast<int64_t>(a->num_valid) * a->p * a->q,
                            a->k, a->dtype, in_workspace(a, plan.bias), stream);
}

template <class T>
static int launch_sum_columns(const sum_columns_args &g, int parts, void *stream) {
    const dim3 grid(parts, ceil_div(g.columns, SUM_COLUMNS));

    MPTK_LAUNCH((mptk_conv_sum_columns_kernel<T>), grid, dim3(SUM_THREADS), 0, stream, g);
    return launch_status();
}

template <class T>
static int launch_add_bias(void *y, const float *bias, int count, int columns, void *stream) {
    MPTK_LAUNCH((mptk_conv_add_bias_kernel<T>), dim3(elementwise_blocks(count)),
                dim3(ELEMENTWISE_THREADS), 0, stream, y, bias, count, fastdiv_make(columns));
    return launch_status();
}

static inline int sum_parts(int64_t rows) { /* one at least, which is zero */
    return rows > 0 ? static_cast<int>((rows + SUM_ROWS - 1) / SUM_ROWS) : 1;
}

} // namespace mptk

extern "C" {

size_t mptk_conv2d_fprop_workspace_bytes(const mpt_conv2d_args *a) {
    return mptk::plan_conv(a, mptk::FPROP).bytes;
}

size_t mptk_conv2d_dgrad_workspace_bytes(const mpt_conv2d_args *a) {
    return mptk::plan_conv(a, mptk::DGRAD).bytes;
}

size_t mptk_conv2d_wgrad_workspace_bytes(const mpt_conv2d_args *a) {
    return mptk::plan_conv(a, mptk::WGRAD).bytes;
}

const char *mptk_conv2d_fprop_kernel(const mpt_conv2d_args *a) {
    const mptk::conv_plan plan = mptk::plan_conv(a, mptk::FPROP);
    return plan.plain ? "simt" : mptk::gather_shapes[plan.tile].name;
}

const char *mptk_conv2d_dgrad_kernel(const mpt_conv2d_args *a) {
    const mptk::conv_plan plan = mptk::plan_conv(a, mptk::DGRAD);
    return plan.plain ? "simt" : mptk::gather_shapes[plan.tile].name;
}

const char *mptk_conv2d_wgrad_kernel(const mpt_conv2d_args *a) {
    const mptk::conv_plan plan = mptk::plan_conv(a, mptk::WGRAD);
    if (plan.plain) return "simt";
    if (plan.flat)
        return plan.large ? "tensor cores, 128x128 tile for 1x1" : "tensor cores, 64x64 tile for 1x1";
    return plan.large ? "tensor cores, 128x128 tile" : "tensor cores, 64x64 tile";
}

int mptk_conv2d_fprop(const mpt_conv2d_args *a, void *stream) {
    return mptk::run_conv(a, mptk::FPROP, NULL, NULL, stream);
}

int mptk_conv2d_dgrad(const mpt_conv2d_args *a, void *stream) {
    return mptk::run_conv(a, mptk::DGRAD, NULL, NULL, stream);
}

int mptk_conv2d_wgrad(const mpt_conv2d_args *a, void *stream) {
    return mptk::run_conv(a, mptk::WGRAD, NULL, NULL, stream);
}

int mptk_conv2d_fprop_stats_rows(const mpt_conv2d_args *a) {
    const mptk::conv_plan plan = mptk::plan_conv(a, mptk::FPROP);
    return plan.plain ? 0 : mptk::ceil_div(a->n * a->p * a->q, mptk::gather_shapes[plan.tile].bm);
}

int mptk_conv2d_fprop_stats(const mpt_conv2d_args *a, float *partial, const float *pivot,
                            void *stream) {
    if (mptk_conv2d_fprop_stats_rows(a) == 0) return cudaErrorNotSupported;
    return mptk::run_conv(a, mptk::FPROP, partial, pivot, stream);
}

size_t mptk_sum_columns_workspace_bytes(int64_t rows, int columns) {
    const int parts = mptk::sum_parts(rows);
    return parts > 1 ? static_cast<size_t>(parts) * columns * sizeof(float) : 0;
}

int mptk_sum_columns(const void *x, float *sums, int64_t rows, int columns, mpt_dtype dtype,
                     void *workspace, void *stream) {
    const int parts = mptk::sum_parts(rows);
    const mptk::sum_columns_args g = {x, parts > 1 ? static_cast<float *>(workspace) : sums,
                                      static_cast<int>(rows), columns};
    int rc = cudaErrorInvalidValue;

    MPTK_BY_DTYPE(dtype, T, rc = mptk::launch_sum_columns<T>(g, parts, stream));
    if (rc || parts == 1) return rc;
    MPTK_LAUNCH(mptk_conv_sum_parts_kernel, dim3(mptk::ceil_div(columns, mptk::WARP)),
                dim3(mptk::SUM_THREADS), 0, stream, static_cast<const float *>(g.sums), sums, parts,
                columns);
    return mptk::launch_status();
}

int mptk_add_bias(void *y, const float *bias, int64_t rows, int columns, mpt_dtype dtype,
                  void *stream) {
    const int count = static_cast<int>(rows * columns);

    if (count == 0) return 0;
    MPTK_BY_DTYPE(dtype, T, return mptk::launch_add_bias<T>(y, bias, count, columns, stream));
}

int mptk_abi_version(void) {
    return MPT_ABI_VERSION;
}

const char *mptk_arch_list(void) {
    static constexpr mptk::arch_text list = mptk::arch_text_make();
    return list.text;
}

} /* extern "C" */

/* ---- batch normalization, softmax, pointwise, update ----------------------------------------- */
#endif /* __CUDACC_RTC__ */
