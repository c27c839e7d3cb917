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
 * Storage is float, half or __nv_bfloat16; arithmetic is float. Everything here is a function of
 * the namespace mptk, inlined into the kernels.
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
#ifndef MPTK_DYN_SMEM_BYTES /* how much it is; tests/check_arch writes it into the PTX */
#define MPTK_DYN_SMEM_BYTES(bytes)
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
    const unsigned u = static_cast<unsigned>(n);
    return static_cast<int>((__umulhi(u, f.mul) + u) >> f.shift);
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
 *     problem               y (M x N) = a (M x depth) * b (depth x N), sums in FP32
 *
 *     CTA tile  BM x BN x BK          warps  WARPS_M x WARPS_N          one warp, 16 of the depth
 *              N                      +---------+---------+             WM / 16 fragments of a
 *         +--------+                  | w0      | w1      |             WN / 16 fragments of b
 *       M |        |  sums, in        | WM x WN |         |             each of a times each of b
 *         |        |  registers       +---------+---------+
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

/* Four 8x8 matrices of 16 bits; lanes 8i .. 8i+7 bring the addresses of the rows of matrix i. Lane
   l gets elements 2 (l % 4) and the next of row l / 4 of each; trans: of column l / 4. */
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

/* Four products d (8x8) += a (8x4) * b (4x8) at once, one for each quad pair of lanes. Fast on
   sm_70 alone: later ones emulate it. */
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
   Rows are padded against bank conflicts: by 8 elements where the depth is contiguous. Where M or N
   is, sm_70 reads by 8-byte loads, which have none with 16, and sm_75 by ldmatrix, with 8. */
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

    static_assert(LDA * sizeof(T) % 16 == 0 && LDB * sizeof(T) % 16 == 0, "leading dimension");
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

   a: a lane holds 4 of the depth of row (l & 3) + 4 (l >> 4), b of that column. Sum e of 8 is at
   row (l & 1) + (e & 2) + 4 (l >> 4), column (e & 4) + (l & 2) + (e & 1). */
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

    /* Rows m .. m+15, depth k .. k+15. Matrices in the order that mma wants: both halves of the
       rows, then the second half of the depth. */
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
 * thread's i-th chunk of the next tile and whether there is anything, advance() goes on by one
 * tile. Two loops use it:
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

    /* A group of copies is ended for every step, an empty one behind the last tile: so that "all
       but STAGES - 2 groups" always means this step's tile. */
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
 *                              rows             columns            depth
 *   gather   fprop and dgrad   written pixels   written channels   taps x channels
 *   wgrad                      k                (r,s,c)            pixels
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
       b                              w[k][tap][c],                w[k][tap][c]: TRANS, as
                                        c contiguous                 filters lie, nothing turned

     CTA tile 128 x 128 x 32    warps 2 x 2, 64 x 64 each    one warp, 16 of the depth
             n 128              +--------+--------+          a: 4 fragments of 16 x 16
         +-----------+          |   w0   |   w1   |          b: 4 fragments
       m |           |          +--------+--------+          16 products: 128 registers
      128|           |          |   w2   |   w3   |
         +-----------+          +--------+--------+
                                a thread brings chunk t % 4 of rows t / 4 + 32 i: 4 of a, 4 of b

     shared memory, one stage    wmma 2 x 128 rows x 40 elements = 20,480 bytes; sm_80 16,384
     the epilogue                4 warps x 16 x 68 floats = 17,408 bytes, and 2,048 for statistics

   dgrad with a stride: pixel h = stride * h' + residue of dx meets only the filter rows with
   (h + padding - r) % stride == 0: of a 3x3 filter with stride 2 and padding 1, in its four phases,
   2x2, 2x1, 1x2 and 1x1 taps, 9 in all, where a product over all taps would do 9 in each. Phases
   are numbered by their first filter row and column, so those with most taps come first. A phase
   without taps (1x1, stride 2) writes its zeros.

   A thread's rows never change, only tap and channel do. So each row keeps two registers: the
   offset of its tap (0,0), and which taps are inside the image. */
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

/* SMALLC: fewer channels than BK. Then a tile of the depth spans several taps, and each thread
   walks through taps and channels by itself; otherwise a tile lies within one tap, and the last of
   a tap has zeros behind the channels. */
template <class T, class TILE, bool DGRAD, bool SMALLC> struct gather_loader {
    typedef chunks<TILE::THREADS, TILE::BM, TILE::BK> chunks_a;
    typedef chunks<TILE::THREADS, DGRAD ? TILE::BK : TILE::BN, DGRAD ? TILE::BN : TILE::BK>
        chunks_b;
    static constexpr int STEP = DGRAD ? -1 : 1;
    static_assert(!(DGRAD && SMALLC), "fprop only");

    const gather_args &g;
    const tap_range in_rows, in_columns;
    const int n0;
    int i, j, channel; /* tap and channel: of this thread if SMALLC, else of the CTA */
    int depth;         /* SMALLC: of the tile */
    int offset[chunks_a::COUNT];      /* of tap (0,0), channel 0; may be outside */
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
   will read it, less a pivot near the mean, without which the difference of large sums would
   cancel. A lane's channels are the same for all its rows. */
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
    typedef gather_product<T, TILE, DGRAD, GENERATION> product;
    typedef typename product::engine engine_type;
    typedef gather_loader<T, TILE, DGRAD, SMALLC> loader_type;
    const int column_tiles = ceil_div(g.oc, TILE::BN);
    const int tile_row = blockIdx.x / column_tiles;
    const int n0 = (blockIdx.x - tile_row * column_tiles) * TILE::BN;
    const int phase_row = blockIdx.y / g.stride_w, phase_column = blockIdx.y % g.stride_w;
    const tap_range in_rows = taps_of<DGRAD>(phase_row, g.r, g.stride_h, g.pad_h);
    const tap_range in_columns = taps_of<DGRAD>(phase_column, g.s, g.stride_w, g.pad_w);
    MPTK_DYN_SMEM_BYTES(product::SMEM_BYTES);
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

     problem as a matrix product    dw[k][tap][c] = sum over m of dy[m][k] * x[pixel(m,tap)][c]
       a                            dy, k contiguous: TRANS
       b                            x, c contiguous: TRANS
       depth                        n*p*q pixels, cut into splits of `chunk`: CTAs along blockIdx.y

     CTA tile 128 x 128 x 32    warps 2 x 2, 64 x 64 each    one warp, 16 of the depth
                                as above                     4 + 4 fragments, 16 products
                                a thread brings chunk t % 16 of pixels t / 16 + 8 i: 4 of dy, 4 of x

     shared memory, one stage   wmma, sm_75 2 x 32 rows x 136 elements = 17,408 bytes; sm_80 16,384

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
    typedef wgrad_product<T, TILE, GENERATION> product;
    typedef typename product::engine engine_type;
    typedef wgrad_loader<T, TILE, PLAIN> loader_type;
    const int columns = g.r * g.s * g.xc, column_tiles = ceil_div(columns, TILE::BN);
    const int tile_row = blockIdx.x / column_tiles, k0 = tile_row * TILE::BM;
    const int n0 = (blockIdx.x - tile_row * column_tiles) * TILE::BN;
    const int begin = blockIdx.y * g.chunk;
    const int end = begin + g.chunk < g.pixels ? begin + g.chunk : g.pixels;
    MPTK_DYN_SMEM_BYTES(product::SMEM_BYTES);
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
     CTA tile 64 x 64 x 16          256 threads, each 4 x 4 sums: rows 4 (t / 16) ..,
                                    columns 4 (t % 16) ..
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

/* Channels are padded to a multiple of 8, or, of few, two pixels become one (below). Either way
   rows of `width` pixels with c channels go with rows of view_width pixels with padded_c channels,
   of which pixel 0 is pixel -shift. */
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

/* sums[column] = the parts in a fixed order: 8 groups of threads take every eighth, then the groups
   add up. */
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
 * Variance without cancellation. sum(x^2) / m - mean^2 in FP32 is worthless for a mean of 3000 and
 * a deviation of 0.5. So each thread subtracts the first value that it meets, a pivot p of its own,
 * and sums d = x - p and d^2; these become count, mean and m2 = sum((x - mean)^2), which merge as
 *
 *   mean = mean_a + delta n_b / n
 *   m2 = m2_a + m2_b + delta^2 n_a n_b / n,  delta = mean_b - mean_a
 *
 * (Chan, Golub, LeVeque 1979). As p is one of the thread's R values, m2 is at least about
 * (p - mean)^2, so what cancels in sum(d^2) - sum(d)^2 / R is at most R times m2: a relative error
 * of R 2^-23 in the worst case (one value far from all others), 2^-22 or so in the usual one. R is
 * 4 to some hundred. Means are kept relative to the channel's value in the first row: 3000.2 has no
 * more than 12 bits behind the point, too few for differences between means.
 */
namespace mptk {

/* Blocks of 256 threads an SM that a streaming kernel asks for: 64 registers a thread, and the 1024
   threads that every architecture has room for. Without it ptxas aims at more, and spills. */
constexpr int STREAM_BLOCKS = 4;

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
    float *reference; /* (c): values of the first row, which means in parts are relative to */
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
    float count, mean[VEC], m2[VEC]; /* mean: relative to the channel's reference */
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
__global__ void __launch_bounds__(mptk::BATCHNORM_THREADS, mptk::STREAM_BLOCKS)
    mptk_batchnorm_moments_kernel(mptk::batchnorm_args a) {
    const mptk::batchnorm_place place = mptk::batchnorm_place_of<VEC>(a, a.part_rows, a.valid_rows);
    const int count = max((place.end - place.begin + place.step - 1) / place.step, 0);
    const T *x = static_cast<const T *>(a.x) + place.channel;
    mptk::batchnorm_moments<VEC> m;
    float reference[VEC], pivot[VEC], sum[VEC], squares[VEC];

    mptk::fill_vec<VEC>(reference, 0.0f);
    mptk::fill_vec<VEC>(pivot, 0.0f);
    mptk::fill_vec<VEC>(sum, 0.0f);
    mptk::fill_vec<VEC>(squares, 0.0f);
    if (count > 0) {
        mptk::load_vec<VEC>(x, reference);
        mptk::load_vec<VEC>(x + static_cast<size_t>(place.begin) * a.c, pivot);
    }
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
        m.mean[i] = (pivot[i] - reference[i]) + mean;
        m.m2[i] = squares[i] - sum[i] * mean;
    }
    const mptk::batchnorm_moments<1> all = mptk::block_merge_moments<VEC>(a.lanes, m);
    int channel;
    if (mptk::batchnorm_owns_channel(a, a.lanes * VEC, blockIdx.x % a.columns, &channel)) {
        float *part = a.parts + static_cast<size_t>(place.part) * 2 * a.c;
        part[channel] = all.mean[0];
        part[a.c + channel] = all.m2[0];
        if (place.part == 0 && a.valid_rows > 0)
            a.reference[channel] = mptk::load(static_cast<const T *>(a.x) + channel);
    }
}

/* Between the passes: parts -> batch_mean, batch_var, batch_inv_std. A block has 8 channels, and 32
   threads for each, which take every 32nd part. */
__global__ void __launch_bounds__(mptk::BATCHNORM_THREADS, mptk::STREAM_BLOCKS)
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
        a.batch_mean[channel] = a.valid_rows > 0 ? a.reference[channel] + m.mean[0] : 0.0f;
        a.batch_inv_std[channel] = a.valid_rows > 0 ? inv_std : 0.0f;
        a.batch_var[channel] = a.valid_rows > 1 ? m.m2[0] / (count - 1.0f) : var;
    }
}

/* Pass 2, or the only one in inference. Rows that don't count become zeros. */
template <class T, int VEC>
__global__ void __launch_bounds__(mptk::BATCHNORM_THREADS, mptk::STREAM_BLOCKS)
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
__global__ void __launch_bounds__(mptk::BATCHNORM_THREADS,
                                  sizeof(T) == 4 ? 3 : mptk::STREAM_BLOCKS)
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
__global__ void __launch_bounds__(mptk::BATCHNORM_THREADS, mptk::STREAM_BLOCKS)
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

/* Pass 2: dx, which may lie where dy does, and the residual's gradient, which is g. Eight channels
   of FP32 are 48 numbers with their constants, too many for 64 registers. */
template <class T, int VEC>
__global__ void __launch_bounds__(mptk::BATCHNORM_THREADS,
                                  sizeof(T) == 4 ? 3 : mptk::STREAM_BLOCKS)
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

/* A row that counts: results, and what it adds to the statistics. Uniform over a team, and so over
   a block where teams meet at barriers. */
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
__global__ void __launch_bounds__(mptk::SOFTMAX_THREADS, mptk::STREAM_BLOCKS)
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
__global__ void __launch_bounds__(mptk::POINTWISE_THREADS, mptk::STREAM_BLOCKS)
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
__global__ void __launch_bounds__(mptk::POINTWISE_THREADS, mptk::STREAM_BLOCKS)
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
   an input, and looks at the windows that held it: no two threads at one number. Sums run over
   rows, then columns, as on the CPU. */
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

/* Places within windows, a byte each; eight of them aligned to 8 bytes. */
template <int VEC> MPTK_FN void store_indices(uint8_t *p, const int index[VEC]) {
    if constexpr (VEC == 8) {
        uint2 bytes = make_uint2(0, 0);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            bytes.x |= static_cast<unsigned>(index[i]) << 8 * i;
            bytes.y |= static_cast<unsigned>(index[i + 4]) << 8 * i;
        }
        *reinterpret_cast<uint2 *>(p) = bytes;
    } else {
        *p = static_cast<uint8_t>(index[0]);
    }
}

template <int VEC> MPTK_FN void load_indices(const uint8_t *p, int index[VEC]) {
    if constexpr (VEC == 8) {
        const uint2 bytes = *reinterpret_cast<const uint2 *>(p);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            index[i] = static_cast<int>(bytes.x >> 8 * i & 255u);
            index[i + 4] = static_cast<int>(bytes.y >> 8 * i & 255u);
        }
    } else {
        index[0] = *p;
    }
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
__global__ void __launch_bounds__(mptk::POINTWISE_THREADS, mptk::STREAM_BLOCKS)
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
__global__ void __launch_bounds__(mptk::POINTWISE_THREADS, mptk::STREAM_BLOCKS)
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
#pragma unroll 2 /* more of them spill on sm_100 */
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
__global__ void __launch_bounds__(mptk::POINTWISE_THREADS, mptk::STREAM_BLOCKS)
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
                int maximum[VEC];
                mptk::load_vec<VEC>(static_cast<const T *>(a.x) + at, dy);
                if (MAX) mptk::load_indices<VEC>(a.argmax_in + at, maximum);
#pragma unroll
                for (int e = 0; e < VEC; e++)
                    sum[e] += !MAX || maximum[e] == index ? dy[e] : 0.0f;
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
__global__ void __launch_bounds__(mptk::POINTWISE_THREADS, mptk::STREAM_BLOCKS)
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

/* y = (x - mean) / std, bytes as x / 255: three roundings in FP32, where the CPU has FP64. */
template <class S, class D>
__global__ void __launch_bounds__(mptk::POINTWISE_THREADS, mptk::STREAM_BLOCKS)
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
__global__ void __launch_bounds__(mptk::POINTWISE_THREADS, mptk::STREAM_BLOCKS)
    mptk_pointwise_fill_kernel(mptk::fill_args a) {
    long long at = static_cast<long long>(blockIdx.x) * mptk::POINTWISE_BLOCK + threadIdx.x;

    for (int i = 0; i < 8 && at < a.count; i++, at += mptk::POINTWISE_THREADS)
        mptk::store(static_cast<T *>(a.dst) + at, a.value);
}

template __global__ void mptk_pointwise_fill_kernel<float>(mptk::fill_args a);
template __global__ void mptk_pointwise_fill_kernel<half>(mptk::fill_args a);
template __global__ void mptk_pointwise_fill_kernel<__nv_bfloat16>(mptk::fill_args a);

/* A factor of 0 makes zeros, of NaN too. */
__global__ void __launch_bounds__(mptk::POINTWISE_THREADS, mptk::STREAM_BLOCKS)
    mptk_pointwise_scale_kernel(mptk::scale_args a) {
    long long at = static_cast<long long>(blockIdx.x) * mptk::POINTWISE_BLOCK + threadIdx.x;
    const bool keeps = __float_as_uint(a.factor) != 0;

    for (int i = 0; i < 8 && at < a.count; i++, at += mptk::POINTWISE_THREADS)
        a.x[at] = keeps ? a.factor * a.x[at] : 0.0f;
}

/* -------------------------------------------------------------------------------------------------
 * >>update   Is every gradient finite? The scaler, the optimizer, running statistics
 * -------------------------------------------------------------------------------------------------
 * The end of a step, without the host. Three kernels in a row over the flat buffers, cut into
 * chunks of at most 16384 weights that never cross a tensor's border:
 *
 *   check    a block a chunk: sum of squares of the unscaled gradient, first inf or NaN of the row;
 *            blocks behind look at the statistics of batch norms
 *   decide   one block: the norm, the scaler's verdict, the rate, clipping, LARS's ratios, report
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

__global__ void __launch_bounds__(mptk::UPDATE_THREADS, mptk::STREAM_BLOCKS)
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

MPTK_FN double sqrt_of(double x) { /* by way of FP32 */
    return static_cast<double>(sqrtf(static_cast<float>(x)));
}

/* sqrt of a sum of squares of FP32 numbers, 2^-300 .. 2^300, by way of sqrtf; within 1e-7 of it. */
MPTK_FN float norm_of(double sum) {
    const double far = 1.2676506002282294e30; /* 2^100 */
    const double most = 3.4028234663852886e38; /* of FP32 */
    double norm;

    if (sum > far) norm = sqrt_of(sum / far / far) * far;
    else if (sum < 1 / far) norm = sqrt_of(sum * far * far) / far;
    else norm = sqrt_of(sum);
    return static_cast<float>(norm > most ? most : norm);
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
__global__ void __launch_bounds__(mptk::UPDATE_THREADS, mptk::STREAM_BLOCKS)
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

/* Three in one: factors of 1 and 0 change no bit. LARS has the rate inside the momentum, so that
   old steps keep theirs (inner); Nesterov looks one step ahead (ahead, the factor of g). */
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
__global__ void __launch_bounds__(mptk::UPDATE_THREADS, mptk::STREAM_BLOCKS)
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
   What runs is a function of the shape alone: sizes, the capacity n (never num_valid), and the
   type. So the bits of a result are the same on every GPU of a generation. */

/* For how many SMs tiles are chosen: between V100 (80), A100 (108) and H200 (132). Tests on the CPU
   set it to 2, to reach large tiles with small shapes. */
#ifdef MPTK_ON_CPU
extern "C" {
extern int mptk_tile_sms;
int mptk_tile_sms = 108;
}
#else
static constexpr int mptk_tile_sms = 108;
#endif

namespace mptk {

enum direction { FPROP, DGRAD, WGRAD };

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
    const int rest = columns % 128; /* of the last tile */
    const bool narrow = columns <= 64 || (columns < 256 && rest > 0 && rest <= 64);
    const gather_tile large = narrow ? G256X64 : G256X128, small = narrow ? G128X64 : G128X128;
    const int waves = narrow ? 4 : 2;

    if (!dgrad && channels < tile_128x64::BK) return GSMALLC;
    if (gather_ctas(large, rows, columns, phases) >= waves * mptk_tile_sms) return large;
    if (gather_ctas(small, rows, columns, phases) >= mptk_tile_sms) return small;
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

/* Offsets are computed in 32 bits, those of taps outside the image and of the up to 31 pixels
   behind the last included, which aren't used. */
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

/* Few channels and an even stride, as the first layer of an ImageNet network has: channels padded
   to four and two pixels taken for one make eight, of which in the example six are used, not three.

       x (n,h,wd,3)   | RGB | RGB | RGB | RGB |        ->   (n,h,wd/2,8)  | RGB-RGB- | RGB-RGB- |
       w (k,7,7,3)    7 columns, behind one of zeros   ->   (k,7,4,8)
       stride 2, padding 3                             ->   along rows 1 and 2

   The padding must be a whole number of pairs: a column of zeros, `shift`, completes an odd one. */
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
    /* With or without dbias: sizes are a matter of shapes alone. */
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
    else
        MPTK_LAUNCH((mptk_conv_pad_kernel<__nv_bfloat16>), blocks, threads, 0, stream, src, dst, g);
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
    if (plan.large)
        return plan.flat ? "tensor cores, 128x128 tile for 1x1" : "tensor cores, 128x128 tile";
    return plan.flat ? "tensor cores, 64x64 tile for 1x1" : "tensor cores, 64x64 tile";
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
    return (static_cast<size_t>(p.num_parts) * 2 + 1) * p.c * sizeof(float);
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
    p.reference = p.parts + static_cast<size_t>(p.num_parts) * 2 * p.c;
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

template <class RULE>
static void update_apply(const mpt_update_args *a, unsigned parts, void *stream) {
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
