// The runner itself, tested: device code against plain loops, the runtime against what CUDA's
// documentation promises. Built with -include device.h; check_runner.sh builds and runs it in all
// its ways.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_on_cpu.h>
#include <cublas_v2.h>
#include <mma.h>
#include <ptx_twins.h>

#include <string>
#include <thread>
#include <vector>

#include "mpt_test.h"

using namespace nvcuda;

#define CHECK_CUDA(call) CHECK_EQ_STR(cudaGetErrorName(call), "cudaSuccess")
#define CHECK_ERROR(call, error) CHECK_EQ_STR(cudaGetErrorName(call), #error)

// Memory of the device that goes when the test is over.
template <class T> struct DeviceArray {
    T *data;
    size_t count;

    explicit DeviceArray(size_t n) : data(nullptr), count(n) {
        CHECK_CUDA(cudaMalloc(&data, n * sizeof(T)));
    }
    explicit DeviceArray(const std::vector<T> &values) : DeviceArray(values.size()) {
        CHECK_CUDA(cudaMemcpy(data, values.data(), count * sizeof(T), cudaMemcpyHostToDevice));
    }
    DeviceArray(const DeviceArray &) = delete;
    DeviceArray &operator=(const DeviceArray &) = delete;
    ~DeviceArray() {
        cudaFree(data);
    }
    std::vector<T> get() const {
        std::vector<T> values(count);
        CHECK_CUDA(cudaMemcpy(values.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
        return values;
    }
};

// The seed for one test; then that of the environment again.
struct Seed {
    explicit Seed(unsigned long long seed) {
        cuda_on_cpu_set_seed(seed);
    }
    ~Seed() {
        const char *seed = getenv("CUDA_ON_CPU_SEED");
        cuda_on_cpu_set_seed(seed ? strtoull(seed, nullptr, 10) : 0);
    }
};

// Numbers in [-1, 1] that FP16 and BF16 hold exactly.
static std::vector<float> some_numbers(size_t n, unsigned seed) {
    std::vector<float> values(n);
    for (float &value : values) {
        seed = seed * 1664525u + 1013904223u;
        value = static_cast<float>(static_cast<int>(seed >> 24) - 128) / 128.0f;
    }
    return values;
}

template <class T> static std::vector<T> converted(const std::vector<float> &values) {
    std::vector<T> result;
    for (float value : values) result.push_back(T(value));
    return result;
}

// ---- grids, arguments, memory -------------------------------------------------------------------

__global__ void write_place(uint4 *out) {
    const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    out[block * threads + thread] = make_uint4(blockIdx.x, blockIdx.z, threadIdx.y, thread);
}

MPT_TEST(each_thread_of_a_grid_runs_once) {
    DeviceArray<uint4> out(2 * 3 * 4 * 5 * 3 * 7);
    MPTK_LAUNCH(write_place, dim3(2, 3, 4), dim3(5, 3, 7), 0, nullptr, out.data);
    const std::vector<uint4> got = out.get();
    for (unsigned i = 0; i < got.size(); i++) {
        const unsigned block = i / 105;
        const unsigned thread = i % 105;
        CHECK_EQ_INT(got[i].x, block % 2);
        CHECK_EQ_INT(got[i].y, block / 6);
        CHECK_EQ_INT(got[i].z, thread / 5 % 3);
        CHECK_EQ_INT(got[i].w, thread);
    }
}

struct BigArgument {
    int numbers[1000];
};

template <class T, int N> __global__ void sum_argument(BigArgument argument, T *out) {
    T sum = 0;
    for (int i = 0; i < N; i++) sum += static_cast<T>(argument.numbers[i]);
    argument.numbers[0] = -1; // a copy of this thread's own
    out[threadIdx.x] = sum;
}

MPT_TEST(arguments_are_copied_at_the_launch) {
    DeviceArray<float> out(64);
    BigArgument argument;
    for (int i = 0; i < 1000; i++) argument.numbers[i] = i;
    MPTK_LAUNCH((sum_argument<float, 1000>), 1, 64, 0, nullptr, argument, out.data);
    argument.numbers[1] = 100000;
    for (float sum : out.get()) CHECK_EQ_INT(sum, 999 * 1000 / 2);
}

template <int N> __global__ void copy_shared(float *from_static, float *from_dynamic) {
    __shared__ float fixed[N];
    MPTK_DYN_SMEM(float, dynamic);
    from_static[threadIdx.x] = fixed[threadIdx.x];
    from_dynamic[threadIdx.x] = dynamic[threadIdx.x];
    fixed[threadIdx.x] = 1;
    dynamic[threadIdx.x] = 1;
}

static thread_local int variable_of_the_program = 7;

// Two blocks: the second must not see what the first wrote. MemorySanitizer would report the look.
MPT_TEST(fresh_memory_is_nan) {
    if (CUDA_ON_CPU_MSAN) SKIP("MemorySanitizer reports uninitialised memory instead");
    DeviceArray<float> fixed(32), dynamic(32), never_written(1000);
    MPTK_LAUNCH((copy_shared<32>), 2, 32, 128, nullptr, fixed.data, dynamic.data);
    for (float value : dynamic.get()) CHECK(value != value);
    for (float value : never_written.get()) CHECK(value != value);
    CHECK_EQ_INT(variable_of_the_program, 7);
    if (CUDA_ON_CPU_ASAN || CUDA_ON_CPU_TSAN)
        SKIP("this sanitizer's build leaves static shared memory alone");
    for (float value : fixed.get()) CHECK(value != value);
}

__global__ void thread_locals_in_a_loop(int *out) {
    int numbers[512];
    for (int i = 0; i < 512; i++) numbers[i] = static_cast<int>(threadIdx.x) + i;
    __syncthreads();
    int sum = 0;
    for (int i = 0; i < 512; i++) sum += numbers[i];
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

MPT_TEST(the_largest_block_has_its_own_locals) {
    DeviceArray<int> out(2 * 1024);
    MPTK_LAUNCH(thread_locals_in_a_loop, 2, 1024, 0, nullptr, out.data);
    const std::vector<int> got = out.get();
    for (int i = 0; i < 2048; i++) CHECK_EQ_INT(got[i], 512 * (i % 1024) + 511 * 512 / 2);
}

// ---- shuffles, votes, barriers ------------------------------------------------------------------

template <class T> __global__ void shuffle_all(T *out) {
    const unsigned all = 0xffffffffu;
    const T lane = static_cast<T>(threadIdx.x);
    T *mine = out + threadIdx.x * 6;
    mine[0] = __shfl_sync(all, lane, 5);
    mine[1] = __shfl_up_sync(all, lane, 3);
    mine[2] = __shfl_down_sync(all, lane, 3);
    mine[3] = __shfl_xor_sync(all, lane, 6);
    mine[4] = __shfl_sync(all, lane, 9, 8);
    mine[5] = __shfl_down_sync(all, lane, 3, 8);
}

template <class T> static void check_shuffles() {
    DeviceArray<T> out(32 * 6);
    MPTK_LAUNCH((shuffle_all<T>), 1, 32, 0, nullptr, out.data);
    const std::vector<T> got = out.get();
    for (int lane = 0; lane < 32; lane++) {
        const T *mine = &got[lane * 6];
        CHECK_EQ_INT(mine[0], 5);
        CHECK_EQ_INT(mine[1], lane < 3 ? lane : lane - 3);
        CHECK_EQ_INT(mine[2], lane + 3 > 31 ? lane : lane + 3);
        CHECK_EQ_INT(mine[3], lane ^ 6);
        CHECK_EQ_INT(mine[4], lane / 8 * 8 + 1);
        CHECK_EQ_INT(mine[5], lane % 8 + 3 > 7 ? lane : lane + 3);
    }
}

MPT_TEST(shuffles_of_all_types) {
    check_shuffles<float>();
    check_shuffles<int>();
    check_shuffles<unsigned>();
    check_shuffles<double>();
}

// Odd lanes add among themselves while even lanes vote; then a quarter of the warp leaves.
__global__ void diverge(int *out, unsigned *votes) {
    const int lane = static_cast<int>(threadIdx.x);
    int value = lane;
    if (lane % 2) {
        for (int delta = 2; delta < 32; delta *= 2)
            value += __shfl_xor_sync(0xaaaaaaaau, value, delta);
    } else {
        votes[lane] = __ballot_sync(0x55555555u, lane >= 16);
    }
    out[lane] = value;
    if (lane >= 24) return;
    __syncwarp(0x00ffffffu);
    out[32 + lane] = __all_sync(0xffffffffu, out[lane] >= 0) + 2 * __any_sync(~0u, lane == 23);
}

MPT_TEST(a_warp_may_diverge) {
    DeviceArray<int> out(64);
    DeviceArray<unsigned> votes(32);
    MPTK_LAUNCH(diverge, 1, 32, 0, nullptr, out.data, votes.data);
    const std::vector<int> got = out.get();
    const std::vector<unsigned> voted = votes.get();
    for (int lane = 0; lane < 32; lane++) {
        CHECK_EQ_INT(got[lane], lane % 2 ? 256 : lane);
        if (lane % 2 == 0) CHECK_EQ_INT(voted[lane], 0x55550000u);
        if (lane < 24) CHECK_EQ_INT(got[32 + lane], 3);
    }
}

__global__ void barriers_that_count(int *out) {
    const int i = static_cast<int>(threadIdx.x);
    const int n = static_cast<int>(blockDim.x);
    out[i * 4] = __syncthreads_count(i % 3 == 0);
    out[i * 4 + 1] = __syncthreads_or(i == n - 1);
    out[i * 4 + 2] = __syncthreads_and(i != n - 1);
    out[i * 4 + 3] = __syncthreads_and(i >= 0) + __syncthreads_or(i < 0);
}

MPT_TEST(barriers_count) {
    DeviceArray<int> out(100 * 4);
    MPTK_LAUNCH(barriers_that_count, 1, 100, 0, nullptr, out.data);
    const std::vector<int> got = out.get();
    for (int i = 0; i < 100; i++) {
        CHECK_EQ_INT(got[i * 4], 34);
        CHECK_EQ_INT(got[i * 4 + 1], 1);
        CHECK_EQ_INT(got[i * 4 + 2], 0);
        CHECK_EQ_INT(got[i * 4 + 3], 1);
    }
}

// A tree in shared memory across warps, then in one warp.
__global__ void reduce(const float *in, float *out) {
    __shared__ float sums[256];
    sums[threadIdx.x] = in[blockIdx.x * 256 + threadIdx.x];
    for (unsigned half_size = 128; half_size >= 32; half_size /= 2) {
        __syncthreads();
        if (threadIdx.x < half_size) sums[threadIdx.x] += sums[threadIdx.x + half_size];
    }
    if (threadIdx.x >= 32) return;
    float sum = sums[threadIdx.x];
    for (int delta = 16; delta; delta /= 2) sum += __shfl_down_sync(0xffffffffu, sum, delta);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

MPT_TEST(a_reduction_over_a_block) {
    const std::vector<float> numbers = some_numbers(8 * 256, 1);
    DeviceArray<float> in(numbers), out(8);
    MPTK_LAUNCH(reduce, 8, 256, 0, nullptr, in.data, out.data);
    const std::vector<float> got = out.get();
    for (int block = 0; block < 8; block++) {
        double sum = 0;
        for (int i = 0; i < 256; i++) sum += numbers[block * 256 + i];
        CHECK_NEAR(got[block], sum, 0); // multiples of 1/128 below 256: exact in FP32
    }
}

// ---- atomics ------------------------------------------------------------------------------------

struct AtomicResults {
    float sum, largest_exchange;
    int count, smallest;
    unsigned largest, bits, toggles;
    unsigned long long big;
    int lock, inside;
};

__global__ void use_atomics(AtomicResults *r) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&r->sum, 0.5f);
    atomicAdd(&r->count, 1);
    atomicMin(&r->smallest, -static_cast<int>(i));
    atomicMax(&r->largest, i);
    atomicOr(&r->bits, 1u << (i % 32));
    atomicXor(&r->toggles, 1u << (i % 2));
    atomicAdd(&r->big, 1ull << 40);
    atomicExch(&r->largest_exchange, 7.0f);
    if (atomicCAS(&r->lock, 0, 1) == 0) atomicAdd(&r->inside, 1);
}

MPT_TEST(atomics_of_a_grid) {
    DeviceArray<AtomicResults> results(std::vector<AtomicResults>(1));
    MPTK_LAUNCH(use_atomics, 5, 100, 0, nullptr, results.data);
    const AtomicResults got = results.get()[0];
    CHECK_NEAR(got.sum, 250, 0);
    CHECK_NEAR(got.largest_exchange, 7, 0);
    CHECK_EQ_INT(got.count, 500);
    CHECK_EQ_INT(got.smallest, -499);
    CHECK_EQ_INT(got.largest, 499);
    CHECK_EQ_INT(got.bits, 0xffffffffu);
    CHECK_EQ_INT(got.toggles, 0); // 250 times each bit
    CHECK_EQ_INT(got.big, 500ull << 40);
    CHECK_EQ_INT(got.inside, 1);
}

// ---- 16-bit numbers -----------------------------------------------------------------------------

// The value of the bits by the definition of the format.
static double value_of(unsigned bits, int mantissa_bits, int bias) {
    const int exponent = static_cast<int>(bits >> mantissa_bits &
                                          ((1u << (15 - mantissa_bits)) - 1));
    const int mantissa = static_cast<int>(bits & ((1u << mantissa_bits) - 1));
    const double magnitude = exponent ? ldexp((1 << mantissa_bits) + mantissa,
                                              exponent - bias - mantissa_bits)
                                      : ldexp(mantissa, 1 - bias - mantissa_bits);
    return bits & 0x8000u ? -magnitude : magnitude;
}

// All finite numbers, and the point halfway to the next one, where the even one must win.
template <class T> static void check_rounding(int mantissa_bits, int bias, unsigned infinity) {
    for (unsigned bits = 0; bits < infinity; bits++) {
        const double value = value_of(bits, mantissa_bits, bias);
        const double next = bits + 1 < infinity
                                ? value_of(bits + 1, mantissa_bits, bias)
                                : 2 * value - value_of(bits - 1, mantissa_bits, bias);
        const float halfway = static_cast<float>((value + next) / 2);
        CHECK_NEAR(static_cast<float>(T(static_cast<float>(value))), value, 0);
        CHECK_EQ_INT(T(halfway).__x, bits % 2 ? bits + 1 : bits);
        CHECK_EQ_INT(T(nextafterf(halfway, 0)).__x, bits);
        CHECK_EQ_INT(T(-nextafterf(halfway, INFINITY)).__x, (bits + 1) | 0x8000u);
    }
    CHECK_EQ_INT(T(INFINITY).__x, infinity);
    CHECK_EQ_INT(T(NAN).__x, 0x7fff);
}

MPT_TEST(half_rounds_to_nearest_even) {
    check_rounding<__half>(10, 15, 0x7c00);
    CHECK_EQ_INT(__half(1.0 + 0x1p-11 + 0x1p-40).__x, 0x3c01); // rounded once, not twice
    CHECK_EQ_INT(__half_as_ushort(__hfma(__half(3), __half(5), __half(0.5f))), 0x4bc0);
    CHECK_EQ_INT(__hisinf(__half(-INFINITY)), -1);
    CHECK(__hisnan(__ushort_as_half(0x7e00)) && !__hisnan(__half(1)));
    const float2 pair = __half22float2(__floats2half2_rn(1.5f, -2.25f));
    CHECK(pair.x == 1.5f && pair.y == -2.25f);
}

MPT_TEST(bfloat_rounds_to_nearest_even) {
    // The halfway point below the smallest numbers is a float too, so all of them can be tried.
    check_rounding<__nv_bfloat16>(7, 127, 0x7f80);
    const float2 pair = __bfloat1622float2(__floats2bfloat162_rn(1.5f, -2.25f));
    CHECK(pair.x == 1.5f && pair.y == -2.25f);
}

// ---- matrix instructions ------------------------------------------------------------------------

// c = a * b for 16x16 matrices, a and b stored row- or column-major, c likewise.
template <class T, class LayoutA, class LayoutB>
__global__ void wmma_product(const T *a, const T *b, float *c, wmma::layout_t layout_c) {
    wmma::fragment<wmma::matrix_a, 16, 16, 16, T, LayoutA> fa;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, T, LayoutB> fb;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc, fd;
    wmma::load_matrix_sync(fa, a, 24);
    wmma::load_matrix_sync(fb, b, 24);
    wmma::load_matrix_sync(fc, c, 20, layout_c);
    wmma::mma_sync(fd, fa, fb, fc);
    for (int i = 0; i < fd.num_elements; i++) fd.x[i] *= 0.5f;
    wmma::store_matrix_sync(c, fd, 20, layout_c);
}

template <class T, class LayoutA, class LayoutB> static void check_wmma(wmma::layout_t layout_c) {
    const std::vector<float> a = some_numbers(16 * 24, 1);
    const std::vector<float> b = some_numbers(16 * 24, 2);
    const std::vector<float> c = some_numbers(16 * 20, 3);
    DeviceArray<T> da(converted<T>(a)), db(converted<T>(b));
    DeviceArray<float> dc(c);
    MPTK_LAUNCH((wmma_product<T, LayoutA, LayoutB>), 1, 32, 0, nullptr, da.data, db.data, dc.data,
                layout_c);
    const std::vector<float> got = dc.get();
    const bool a_rows = std::is_same<LayoutA, wmma::row_major>::value;
    const bool b_rows = std::is_same<LayoutB, wmma::row_major>::value;
    for (int row = 0; row < 16; row++) {
        for (int column = 0; column < 16; column++) {
            const int at = layout_c == wmma::mem_row_major ? row * 20 + column : column * 20 + row;
            float sum = c[at];
            for (int k = 0; k < 16; k++)
                sum += a[a_rows ? row * 24 + k : k * 24 + row] *
                       b[b_rows ? k * 24 + column : column * 24 + k];
            CHECK_NEAR(got[at], sum / 2, 0); // multiples of 2^-15 below 32: exact in FP32
        }
    }
}

template <class T> static void check_wmma_layouts() {
    check_wmma<T, wmma::row_major, wmma::row_major>(wmma::mem_row_major);
    check_wmma<T, wmma::row_major, wmma::col_major>(wmma::mem_row_major);
    check_wmma<T, wmma::col_major, wmma::row_major>(wmma::mem_col_major);
    check_wmma<T, wmma::col_major, wmma::col_major>(wmma::mem_row_major);
}

MPT_TEST(wmma_is_a_matrix_product) {
    check_wmma_layouts<half>();
    check_wmma_layouts<__nv_bfloat16>();
}

// A 16x16 matrix as two registers' worth of 8-column halves: d (16x8) += a (16x16) * b (16x8).
template <class T> __global__ void mma_product(const T *a, const T *b, float *d) {
    __shared__ __align__(16) T sa[16][24], sb[16][24];
    const int lane = static_cast<int>(threadIdx.x);
    for (int i = lane; i < 256; i += 32) {
        sa[i / 16][i % 16] = a[i];
        sb[i / 16][i % 16] = b[i];
    }
    __syncwarp();
    unsigned fa[4], fb[4];
    mptk_ldmatrix_x4(fa, &sa[lane % 16][lane / 16 * 8]);
    mptk_ldmatrix_x4_trans(fb, &sb[lane % 16][lane / 16 * 8]);
    for (int part = 0; part < 2; part++) {
        float sums[4] = {1, 1, 1, 1};
        mptk_mma_m16n8k16(sums, fa, fb + 2 * part, T());
        for (int i = 0; i < 4; i++)
            d[(lane / 4 + i / 2 * 8) * 16 + part * 8 + lane % 4 * 2 + i % 2] = sums[i];
    }
}

static void check_product(const std::vector<float> &got, const std::vector<float> &a,
                          const std::vector<float> &b, int rows, int columns, int depth,
                          float add) {
    for (int row = 0; row < rows; row++) {
        for (int column = 0; column < columns; column++) {
            float sum = add;
            for (int k = 0; k < depth; k++) sum += a[row * depth + k] * b[k * columns + column];
            CHECK_NEAR(got[row * columns + column], sum, 0); // exact, as above
        }
    }
}

template <class T> static void check_mma() {
    const std::vector<float> a = some_numbers(256, 4);
    const std::vector<float> b = some_numbers(256, 5);
    DeviceArray<T> da(converted<T>(a)), db(converted<T>(b));
    DeviceArray<float> d(256);
    MPTK_LAUNCH((mma_product<T>), 1, 32, 0, nullptr, da.data, db.data, d.data);
    check_product(d.get(), a, b, 16, 16, 16, 1);
}

MPT_TEST(ldmatrix_and_mma_are_a_matrix_product) {
    check_mma<half>();
    check_mma<__nv_bfloat16>();
}

// 16x16 from four 8x8x4 products, as on sm_70: quad pair q has rows 8 (q & 1) and columns
// 8 (q / 2).
__global__ void mma_884_product(const half *a, const half *b, float *d) {
    const int lane = static_cast<int>(threadIdx.x);
    const int pair = lane / 4 % 4;
    const int in_pair = lane % 4 + lane / 16 * 4;
    const int row0 = pair % 2 * 8;
    const int column0 = pair / 2 * 8;
    float sums[8] = {};
    for (int k = 0; k < 16; k += 4) {
        half fa[4], fb[4];
        for (int i = 0; i < 4; i++) {
            fa[i] = a[(row0 + in_pair) * 16 + k + i];
            fb[i] = b[(k + i) * 16 + column0 + in_pair];
        }
        unsigned ra[2], rb[2];
        memcpy(ra, fa, sizeof ra);
        memcpy(rb, fb, sizeof rb);
        mptk_mma_m8n8k4(sums, ra, rb);
    }
    for (int e = 0; e < 8; e++) {
        const int row = (lane & 1) + (e & 2) + lane / 16 * 4;
        const int column = (e & 4) + (lane & 2) + (e & 1);
        d[(row0 + row) * 16 + column0 + column] = sums[e];
    }
}

MPT_TEST(mma_m8n8k4_is_four_products) {
    const std::vector<float> a = some_numbers(256, 6);
    const std::vector<float> b = some_numbers(256, 7);
    DeviceArray<half> da(converted<half>(a)), db(converted<half>(b));
    DeviceArray<float> d(256);
    MPTK_LAUNCH(mma_884_product, 1, 32, 0, nullptr, da.data, db.data, d.data);
    check_product(d.get(), a, b, 16, 16, 16, 0);
}

// Three stages in flight; the last row is zero-filled.
__global__ void copy_in_stages(const uint4 *in, uint4 *out, int stages) {
    __shared__ uint4 buffers[3][32];
    const int lane = static_cast<int>(threadIdx.x);
    for (int s = 0; s < 2; s++) {
        mptk_cp_async16(&buffers[s][lane], in + s * 32 + lane, lane < 31);
        mptk_cp_async_commit();
    }
    for (int s = 0; s < stages; s++) {
        const int next = s + 2;
        if (next < stages)
            mptk_cp_async16(&buffers[next % 3][lane], in + next * 32 + lane, lane < 31);
        mptk_cp_async_commit();
        mptk_cp_async_wait<2>();
        __syncthreads();
        out[s * 32 + lane] = buffers[s % 3][(lane + 1) % 32];
        __syncthreads();
    }
}

MPT_TEST(asynchronous_copies_arrive_in_order) {
    const int stages = 7;
    std::vector<uint4> values(stages * 32);
    for (unsigned i = 0; i < values.size(); i++) values[i] = make_uint4(i, i + 1, i + 2, i + 3);
    DeviceArray<uint4> in(values), out(values.size());
    MPTK_LAUNCH(copy_in_stages, 1, 32, 0, nullptr, in.data, out.data, stages);
    const std::vector<uint4> got = out.get();
    for (int i = 0; i < stages * 32; i++) {
        const int from = (i + 1) % 32;
        const unsigned expected = from == 31 ? 0 : static_cast<unsigned>(i / 32 * 32 + from);
        CHECK_EQ_INT(got[i].x, expected);
        CHECK_EQ_INT(got[i].w, from == 31 ? 0 : expected + 3);
    }
}

// ---- cuBLAS -------------------------------------------------------------------------------------

struct GemmCase {
    cublasOperation_t op_a, op_b;
    int m, n, k;
    float alpha, beta;
};

template <class T> constexpr cudaDataType type_of() {
    return std::is_same<T, float>::value  ? CUDA_R_32F
           : std::is_same<T, half>::value ? CUDA_R_16F
                                          : CUDA_R_16BF;
}

// Columns a little apart, so that a wrong leading dimension shows.
template <class T, class C> static void check_gemm(cublasHandle_t blas, const GemmCase &g) {
    const int lda = (g.op_a == CUBLAS_OP_N ? g.m : g.k) + 3;
    const int ldb = (g.op_b == CUBLAS_OP_N ? g.k : g.n) + 1;
    const int ldc = g.m + 2;
    const std::vector<float> a = some_numbers(static_cast<size_t>(lda) * (g.m + g.k), 1);
    const std::vector<float> b = some_numbers(static_cast<size_t>(ldb) * (g.n + g.k), 2);
    std::vector<float> c = some_numbers(static_cast<size_t>(ldc) * g.n, 3);
    if (g.beta == 0) c[0] = NAN; // must not be read
    DeviceArray<T> da(converted<T>(a)), db(converted<T>(b));
    DeviceArray<C> dc(converted<C>(c));
    CHECK_EQ_INT(cublasGemmEx(blas, g.op_a, g.op_b, g.m, g.n, g.k, &g.alpha, da.data, type_of<T>(),
                              lda, db.data, type_of<T>(), ldb, &g.beta, dc.data, type_of<C>(), ldc,
                              CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                 CUBLAS_STATUS_SUCCESS);
    const std::vector<C> got = dc.get();
    for (int j = 0; j < g.n; j++) {
        for (int i = 0; i < g.m; i++) {
            float sum = 0;
            for (int p = 0; p < g.k; p++)
                sum += a[g.op_a == CUBLAS_OP_N ? i + p * lda : p + i * lda] *
                       b[g.op_b == CUBLAS_OP_N ? p + j * ldb : j + p * ldb];
            const int at = i + j * ldc;
            const float expected = g.alpha * sum + (g.beta == 0 ? 0 : g.beta * c[at]);
            CHECK_NEAR(static_cast<float>(got[at]), static_cast<float>(C(expected)),
                       0); // exact sums
        }
    }
}

template <class T, class C> static void check_gemms(cublasHandle_t blas) {
    const cublasOperation_t ops[] = {CUBLAS_OP_N, CUBLAS_OP_T};
    for (cublasOperation_t op_a : ops) {
        for (cublasOperation_t op_b : ops) {
            check_gemm<T, C>(blas, {op_a, op_b, 16, 4, 8, 1, 0});
            check_gemm<T, C>(blas, {op_a, op_b, 17, 5, 1, 0.5f, 1});
            check_gemm<T, C>(blas, {op_a, op_b, 1, 9, 33, 1, 0.5f});
        }
    }
}

MPT_TEST(gemm_of_all_types) {
    cublasHandle_t blas;
    CHECK_EQ_INT(cublasCreate(&blas), CUBLAS_STATUS_SUCCESS);
    check_gemms<half, half>(blas);
    check_gemms<half, float>(blas);
    check_gemms<__nv_bfloat16, __nv_bfloat16>(blas);
    check_gemms<__nv_bfloat16, float>(blas);
    check_gemms<float, float>(blas);
    CHECK_EQ_INT(cublasDestroy(blas), CUBLAS_STATUS_SUCCESS);
}

MPT_TEST(gemm_refuses_what_cublas_refuses) {
    cublasHandle_t blas;
    DeviceArray<half> x(64);
    const float one = 1;
    CHECK_EQ_INT(cublasCreate(&blas), CUBLAS_STATUS_SUCCESS);
    const auto gemm = [&](int m, int lda, cudaDataType b_type, cublasComputeType_t compute) {
        return cublasGemmEx(blas, CUBLAS_OP_N, CUBLAS_OP_N, m, 4, 4, &one, x.data, CUDA_R_16F, lda,
                            x.data, b_type, 4, &one, x.data, CUDA_R_16F, 4, compute,
                            CUBLAS_GEMM_DEFAULT);
    };
    CHECK_EQ_INT(gemm(4, 3, CUDA_R_16F, CUBLAS_COMPUTE_32F), CUBLAS_STATUS_INVALID_VALUE);
    CHECK_EQ_INT(gemm(-1, 4, CUDA_R_16F, CUBLAS_COMPUTE_32F), CUBLAS_STATUS_INVALID_VALUE);
    CHECK_EQ_INT(gemm(4, 4, CUDA_R_32F, CUBLAS_COMPUTE_32F), CUBLAS_STATUS_NOT_SUPPORTED);
    CHECK_EQ_INT(gemm(4, 4, CUDA_R_16F, CUBLAS_COMPUTE_16F), CUBLAS_STATUS_NOT_SUPPORTED);
    cuda_on_cpu_fail_call("cublasGemmEx", 1, CUBLAS_STATUS_EXECUTION_FAILED);
    CHECK_EQ_INT(gemm(4, 4, CUDA_R_16F, CUBLAS_COMPUTE_32F), CUBLAS_STATUS_EXECUTION_FAILED);
    CHECK_EQ_STR(cublasGetStatusName(CUBLAS_STATUS_EXECUTION_FAILED),
                 "CUBLAS_STATUS_EXECUTION_FAILED");
    CHECK_EQ_INT(cublasDestroy(blas), CUBLAS_STATUS_SUCCESS);
    CHECK_EQ_INT(gemm(4, 4, CUDA_R_16F, CUBLAS_COMPUTE_32F), CUBLAS_STATUS_NOT_INITIALIZED);
}

// ---- streams and events -------------------------------------------------------------------------

__global__ void append(int *list, int value) {
    list[++list[0]] = value;
}

__global__ void copy_number(const int *from, int *to) {
    *to = *from;
}

struct Stream {
    cudaStream_t handle;
    explicit Stream(unsigned flags = cudaStreamNonBlocking) {
        CHECK_CUDA(cudaStreamCreateWithFlags(&handle, flags));
    }
    ~Stream() {
        cudaStreamDestroy(handle);
    }
};

struct Event {
    cudaEvent_t handle;
    explicit Event(unsigned flags = cudaEventDisableTiming) {
        CHECK_CUDA(cudaEventCreateWithFlags(&handle, flags));
    }
    ~Event() {
        cudaEventDestroy(handle);
    }
};

MPT_TEST(a_stream_keeps_its_order) {
    Stream stream;
    DeviceArray<int> list(std::vector<int>(101));
    for (int i = 1; i <= 100; i++) MPTK_LAUNCH(append, 1, 1, 0, stream.handle, list.data, i);
    CHECK_CUDA(cudaStreamSynchronize(stream.handle));
    const std::vector<int> got = list.get();
    for (int i = 1; i <= 100; i++) CHECK_EQ_INT(got[i], i);
}

// Each append of one stream waits for the one before it, in the other.
MPT_TEST(events_order_streams) {
    for (unsigned seed = 0; seed < 12; seed++) {
        const Seed order(seed);
        Stream streams[2];
        Event events[2];
        DeviceArray<int> list(std::vector<int>(51));
        for (int i = 1; i <= 50; i++) {
            const int now = i % 2;
            CHECK_CUDA(cudaStreamWaitEvent(streams[now].handle, events[1 - now].handle, 0));
            MPTK_LAUNCH(append, 1, 1, 0, streams[now].handle, list.data, i);
            CHECK_CUDA(cudaEventRecord(events[now].handle, streams[now].handle));
        }
        CHECK_CUDA(cudaEventSynchronize(events[0].handle));
        const std::vector<int> got = list.get();
        for (int i = 1; i <= 50; i++) CHECK_EQ_INT(got[i], i);
    }
}

// Without a wait the order must vary with the seed.
MPT_TEST(streams_without_events_mix) {
    std::vector<std::string> orders;
    for (unsigned seed = 0; seed < 12; seed++) {
        const Seed order(seed);
        Stream streams[2];
        DeviceArray<int> list(std::vector<int>(21));
        for (int i = 1; i <= 20; i++)
            MPTK_LAUNCH(append, 1, 1, 0, streams[i % 2].handle, list.data, i);
        CHECK_CUDA(cudaDeviceSynchronize());
        std::string values;
        for (int value : list.get()) values += static_cast<char>('a' + value);
        bool known = false;
        for (const std::string &other : orders) known = known || other == values;
        if (!known) orders.push_back(values);
    }
    if (getenv("CUDA_ON_CPU_STREAMS")) SKIP("streams that run at once do not mix");
    CHECK(orders.size() >= 4);
}

MPT_TEST(the_null_stream_waits_for_blocking_streams_only) {
    const Seed seed(1); // nothing runs that nobody waits for
    if (getenv("CUDA_ON_CPU_STREAMS")) SKIP("all has run already");
    Stream blocking(cudaStreamDefault), free_running;
    DeviceArray<int> numbers(std::vector<int>{1, 2, 0, 0});
    int *n = numbers.data;
    CHECK_CUDA(cudaDeviceSynchronize());
    MPTK_LAUNCH(copy_number, 1, 1, 0, blocking.handle, n, n + 2);
    MPTK_LAUNCH(copy_number, 1, 1, 0, free_running.handle, n + 1, n + 3);
    int got[2];
    CHECK_CUDA(cudaMemcpy(got, n + 2, sizeof got, cudaMemcpyDeviceToHost));
    CHECK_EQ_INT(got[0], 1);
    CHECK_EQ_INT(got[1], 0);
}

MPT_TEST(queries_come_to_an_end) {
    Stream stream;
    Event event;
    DeviceArray<int> list(std::vector<int>(31));
    for (int i = 1; i <= 30; i++) MPTK_LAUNCH(append, 1, 1, 0, stream.handle, list.data, i);
    CHECK_CUDA(cudaEventRecord(event.handle, stream.handle));
    int asked = 0;
    while (cudaEventQuery(event.handle) == cudaErrorNotReady) asked++;
    CHECK_CUDA(cudaEventQuery(event.handle));
    if (!getenv("CUDA_ON_CPU_STREAMS")) CHECK(asked > 0 && asked <= 31);
    while (cudaStreamQuery(stream.handle) == cudaErrorNotReady) continue;
    CHECK_EQ_INT(list.get()[30], 30);
    cudaGetLastError(); // the cudaErrorNotReady of the last question but one
}

MPT_TEST(events_measure_time) {
    Event start(cudaEventDefault), end(cudaEventDefault), untimed;
    DeviceArray<int> list(std::vector<int>(2));
    CHECK_CUDA(cudaEventRecord(start.handle, nullptr));
    MPTK_LAUNCH(append, 1, 1, 0, nullptr, list.data, 1);
    CHECK_CUDA(cudaEventRecord(end.handle, nullptr));
    CHECK_CUDA(cudaEventRecord(untimed.handle, nullptr));
    CHECK_CUDA(cudaEventSynchronize(untimed.handle));
    float elapsed = -1;
    CHECK_CUDA(cudaEventElapsedTime(&elapsed, start.handle, end.handle));
    CHECK(elapsed >= 0);
    CHECK_ERROR(cudaEventElapsedTime(&elapsed, start.handle, untimed.handle),
                cudaErrorInvalidResourceHandle);
    cudaGetLastError();
}

// A pinned buffer is read when the copy runs, a pageable one when it is asked for.
MPT_TEST(pinned_copies_read_late) {
    if (getenv("CUDA_ON_CPU_STREAMS")) SKIP("all copies run at once");
    Stream stream;
    DeviceArray<int> numbers(2);
    int *pinned;
    int pageable = 1;
    CHECK_CUDA(cudaMallocHost(&pinned, sizeof(int)));
    *pinned = 1;
    cudaMemcpyAsync(numbers.data, pinned, sizeof(int), cudaMemcpyHostToDevice, stream.handle);
    cudaMemcpyAsync(numbers.data + 1, &pageable, sizeof(int), cudaMemcpyHostToDevice,
                    stream.handle);
    *pinned = 2;
    pageable = 2;
    CHECK_CUDA(cudaStreamSynchronize(stream.handle));
    const std::vector<int> got = numbers.get();
    CHECK_EQ_INT(got[0], 2);
    CHECK_EQ_INT(got[1], 1);
    CHECK_CUDA(cudaFreeHost(pinned));
}

// ---- graphs -------------------------------------------------------------------------------------

struct Graph {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    ~Graph() {
        if (executable) cudaGraphExecDestroy(executable);
        if (graph) cudaGraphDestroy(graph);
    }
};

// Forks into a second stream and comes back: 1 and 2 in any order, then 3.
static void capture_fork(Stream &stream, Stream &side, Graph &graph, int *list, int *other) {
    Event fork, join;
    CHECK_CUDA(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeGlobal));
    CHECK_CUDA(cudaEventRecord(fork.handle, stream.handle));
    CHECK_CUDA(cudaStreamWaitEvent(side.handle, fork.handle, 0));
    MPTK_LAUNCH(append, 1, 1, 0, stream.handle, list, 1);
    MPTK_LAUNCH(append, 1, 1, 0, side.handle, list, 2);
    CHECK_CUDA(cudaMemcpyAsync(other, list, sizeof(int), cudaMemcpyDeviceToDevice, side.handle));
    CHECK_CUDA(cudaEventRecord(join.handle, side.handle));
    CHECK_CUDA(cudaStreamWaitEvent(stream.handle, join.handle, 0));
    MPTK_LAUNCH(append, 1, 1, 0, stream.handle, list, 3);
    CHECK_CUDA(cudaStreamEndCapture(stream.handle, &graph.graph));
}

MPT_TEST(a_graph_replays_what_was_captured) {
    Stream stream, side;
    Graph graph;
    DeviceArray<int> list(std::vector<int>(31)), other(std::vector<int>(1));
    capture_fork(stream, side, graph, list.data, other.data);
    CHECK_CUDA(cudaDeviceSynchronize());
    CHECK_EQ_INT(list.get()[0], 0); // captured, not run
    size_t nodes;
    CHECK_CUDA(cudaGraphGetNodes(graph.graph, nullptr, &nodes));
    CHECK_EQ_INT(nodes, 4);
    CHECK_CUDA(cudaGraphInstantiate(&graph.executable, graph.graph, 0));
    for (int i = 0; i < 10; i++) CHECK_CUDA(cudaGraphLaunch(graph.executable, stream.handle));
    CHECK_CUDA(cudaStreamSynchronize(stream.handle));
    const std::vector<int> got = list.get();
    CHECK_EQ_INT(got[0], 30);
    bool first[3] = {};
    for (int i = 0; i < 10; i++) {
        CHECK_EQ_INT(got[3 * i + 1] + got[3 * i + 2], 3);
        CHECK_EQ_INT(got[3 * i + 3], 3);
        first[got[3 * i + 1]] = true;
    }
    CHECK(first[1] && first[2]); // ten coins on one side: one run in 500 of all seeds
}

MPT_TEST(waiting_spoils_a_capture) {
    Stream stream;
    void *memory = nullptr;
    cudaGraph_t graph = nullptr;
    const auto begin = [&] {
        CHECK_CUDA(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeGlobal));
    };
    begin();
    CHECK_ERROR(cudaStreamSynchronize(stream.handle), cudaErrorStreamCaptureUnsupported);
    CHECK_ERROR(cudaStreamEndCapture(stream.handle, &graph), cudaErrorStreamCaptureInvalidated);
    begin();
    CHECK_ERROR(cudaMalloc(&memory, 16), cudaErrorStreamCaptureUnsupported);
    CHECK_ERROR(cudaStreamEndCapture(stream.handle, &graph), cudaErrorStreamCaptureInvalidated);
    begin();
    CHECK_ERROR(cudaDeviceSynchronize(), cudaErrorStreamCaptureUnsupported);
    cudaStreamCaptureStatus status;
    CHECK_CUDA(cudaStreamIsCapturing(stream.handle, &status));
    CHECK_EQ_INT(status, cudaStreamCaptureStatusInvalidated);
    CHECK_ERROR(cudaStreamEndCapture(stream.handle, &graph), cudaErrorStreamCaptureInvalidated);
    CHECK(!graph);
    CHECK_CUDA(cudaDeviceSynchronize()); // all is well again
    cudaGetLastError();
}

MPT_TEST(a_capture_must_be_closed_in_itself) {
    Stream stream, side, blocking(cudaStreamDefault);
    Event before, fork;
    DeviceArray<int> list(std::vector<int>(5));
    cudaGraph_t graph = nullptr;
    CHECK_CUDA(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeRelaxed));
    CHECK_CUDA(cudaEventRecord(fork.handle, stream.handle));
    CHECK_CUDA(cudaStreamWaitEvent(side.handle, fork.handle, 0));
    MPTK_LAUNCH(append, 1, 1, 0, side.handle, list.data, 1);
    CHECK_ERROR(cudaEventSynchronize(fork.handle), cudaErrorCapturedEvent);
    CHECK_ERROR(cudaStreamEndCapture(stream.handle, &graph), cudaErrorStreamCaptureUnjoined);

    CHECK_CUDA(cudaEventRecord(before.handle, side.handle));
    CHECK_CUDA(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeRelaxed));
    CHECK_ERROR(cudaStreamWaitEvent(stream.handle, before.handle, 0),
                cudaErrorStreamCaptureIsolation);
    CHECK_ERROR(cudaStreamEndCapture(stream.handle, &graph), cudaErrorStreamCaptureInvalidated);

    CHECK_CUDA(cudaStreamBeginCapture(blocking.handle, cudaStreamCaptureModeRelaxed));
    cudaGetLastError();
    MPTK_LAUNCH(append, 1, 1, 0, nullptr, list.data, 1);
    CHECK_ERROR(cudaGetLastError(), cudaErrorStreamCaptureImplicit);
    CHECK_ERROR(cudaStreamEndCapture(blocking.handle, &graph), cudaErrorStreamCaptureInvalidated);
    cudaGetLastError();
}

// ---- memory -------------------------------------------------------------------------------------

MPT_TEST(device_memory_has_an_end) {
    size_t free_before, free_after, total;
    void *large = nullptr, *larger = nullptr;
    cuda_on_cpu_set_memory(1 << 20);
    CHECK_CUDA(cudaMemGetInfo(&free_before, &total));
    CHECK_EQ_INT(total, 1 << 20);
    CHECK_CUDA(cudaMalloc(&large, 700 << 10));
    CHECK_ERROR(cudaMalloc(&larger, 400 << 10), cudaErrorMemoryAllocation);
    CHECK(!larger);
    CHECK_ERROR(cudaGetLastError(), cudaErrorMemoryAllocation);
    CHECK_CUDA(cudaGetLastError()); // told once, and the device works on
    CHECK_CUDA(cudaFree(large));
    CHECK_CUDA(cudaMalloc(&larger, 400 << 10));
    CHECK_CUDA(cudaMemset(larger, 0, 400 << 10));
    CHECK_CUDA(cudaFree(larger));
    CHECK_CUDA(cudaMemGetInfo(&free_after, &total));
    CHECK_EQ_INT(free_after, free_before);
    cuda_on_cpu_set_memory(static_cast<size_t>(4) << 30);
}

MPT_TEST(copies_know_their_direction) {
    DeviceArray<int> device(std::vector<int>{1, 2, 3, 4});
    int host[4] = {};
    int *d = device.data;
    CHECK_ERROR(cudaMemcpy(host, d, 16, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    CHECK_ERROR(cudaMemcpy(d, host, 16, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
    CHECK_ERROR(cudaMemcpy(host, host, 16, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    CHECK_ERROR(cudaMemcpy(host, d + 2, 16, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
    CHECK_ERROR(cudaMemset(host, 0, 16), cudaErrorInvalidValue);
    CHECK_ERROR(cudaFree(d + 1), cudaErrorInvalidValue);
    CHECK_CUDA(cudaMemcpy(host, d + 2, 8, cudaMemcpyDefault));
    CHECK_EQ_INT(host[1], 4);
    CHECK(cuda_on_cpu_is_device(d + 3) && !cuda_on_cpu_is_device(host));
    cudaPointerAttributes attributes;
    CHECK_CUDA(cudaPointerGetAttributes(&attributes, d));
    CHECK_EQ_INT(attributes.type, cudaMemoryTypeDevice);
    cudaGetLastError();
}

// ---- limits and errors --------------------------------------------------------------------------

__global__ void fill_shared(int *out, int n) {
    MPTK_DYN_SMEM(int, numbers);
    for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x))
        numbers[i] = i;
    __syncthreads();
    if (threadIdx.x == 0) *out = numbers[n - 1];
}

static const char *error_of_launch(dim3 grid, dim3 block, size_t bytes) {
    DeviceArray<int> out(1);
    MPTK_LAUNCH(fill_shared, grid, block, bytes, nullptr, out.data, 1);
    cudaDeviceSynchronize();
    return cudaGetErrorName(cudaGetLastError());
}

MPT_TEST(launches_have_limits) {
    CHECK_EQ_STR(error_of_launch(1, 1024, 4), "cudaSuccess");
    CHECK_EQ_STR(error_of_launch(1, 1025, 4), "cudaErrorInvalidConfiguration");
    CHECK_EQ_STR(error_of_launch(1, dim3(32, 33, 1), 4), "cudaErrorInvalidConfiguration");
    CHECK_EQ_STR(error_of_launch(1, dim3(1, 1, 65), 4), "cudaErrorInvalidConfiguration");
    CHECK_EQ_STR(error_of_launch(0, 32, 4), "cudaErrorInvalidConfiguration");
    CHECK_EQ_STR(error_of_launch(dim3(1, 65536), 32, 4), "cudaErrorInvalidConfiguration");
    CHECK_EQ_STR(error_of_launch(1, 32, (48 << 10) + 1), "cudaErrorInvalidValue");
}

MPT_TEST(more_shared_memory_must_be_asked_for) {
    const int bytes[][2] = {{70, 96 << 10}, {75, 64 << 10}, {80, 163 << 10}, {90, 227 << 10}};
    const auto max_shared = cudaFuncAttributeMaxDynamicSharedMemorySize;
    DeviceArray<int> out(1);
    for (const int(&arch)[2] : bytes) {
        cuda_on_cpu_set_arch(arch[0]);
        int allowed;
        CHECK_CUDA(cudaDeviceGetAttribute(&allowed, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
        CHECK_EQ_INT(allowed, arch[1]);
        CHECK_ERROR(cudaFuncSetAttribute(fill_shared, max_shared, allowed + 1),
                    cudaErrorInvalidValue);
        CHECK_CUDA(cudaFuncSetAttribute(fill_shared, max_shared, allowed));
        MPTK_LAUNCH(fill_shared, 1, 64, static_cast<size_t>(allowed), nullptr, out.data,
                    allowed / 4);
        CHECK_EQ_INT(out.get()[0], allowed / 4 - 1);
        CHECK_CUDA(cudaFuncSetAttribute(fill_shared, max_shared, 48 << 10));
    }
    cuda_on_cpu_set_arch(80);
    cudaGetLastError();
}

MPT_TEST(a_fault_of_the_device_stays) {
    DeviceArray<int> list(std::vector<int>(3));
    Stream stream;
    cuda_on_cpu_fault_kernel(2);
    MPTK_LAUNCH(append, 1, 1, 0, stream.handle, list.data, 1);
    MPTK_LAUNCH(append, 1, 1, 0, stream.handle, list.data, 2);
    if (!getenv("CUDA_ON_CPU_STREAMS")) CHECK_CUDA(cudaGetLastError()); // nothing has run yet
    CHECK_ERROR(cudaStreamSynchronize(stream.handle), cudaErrorIllegalAddress);
    CHECK_ERROR(cudaGetLastError(), cudaErrorIllegalAddress);
    CHECK_ERROR(cudaGetLastError(), cudaErrorIllegalAddress);
    int number;
    CHECK_ERROR(cudaMemcpy(&number, list.data, sizeof number, cudaMemcpyDeviceToHost),
                cudaErrorIllegalAddress);
    cudaStreamDestroy(stream.handle);
    CHECK_CUDA(cudaDeviceReset());
    CHECK_CUDA(cudaGetLastError());
    list.data = nullptr; // gone with the reset
}

MPT_TEST(calls_fail_on_demand) {
    void *memory;
    cudaStream_t stream;
    cuda_on_cpu_fail_call("cudaMalloc", 2, cudaErrorMemoryAllocation);
    CHECK_CUDA(cudaMalloc(&memory, 16));
    CHECK_CUDA(cudaFree(memory));
    CHECK_ERROR(cudaMalloc(&memory, 16), cudaErrorMemoryAllocation);
    CHECK_ERROR(cudaPeekAtLastError(), cudaErrorMemoryAllocation);
    cuda_on_cpu_fail_call(nullptr, 1, cudaErrorUnknown);
    CHECK_ERROR(cudaStreamCreate(&stream), cudaErrorUnknown);
    CHECK_ERROR(cudaGetLastError(), cudaErrorUnknown);
    CHECK_CUDA(cudaGetLastError());
    CHECK_EQ_STR(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory");
}

MPT_TEST(kernels_for_another_architecture) {
    DeviceArray<int> list(std::vector<int>(3));
    cudaFuncAttributes attributes;
    const void *kernel = reinterpret_cast<const void *>(append);
    CHECK_CUDA(cudaFuncGetAttributes(&attributes, kernel));
    CHECK_EQ_INT(attributes.binaryVersion, 80);
    cuda_on_cpu_set_kernel_error(cudaErrorNoKernelImageForDevice);
    CHECK_ERROR(cudaFuncGetAttributes(&attributes, kernel), cudaErrorNoKernelImageForDevice);
    cudaGetLastError();
    MPTK_LAUNCH(append, 1, 1, 0, nullptr, list.data, 1);
    CHECK_ERROR(cudaGetLastError(), cudaErrorNoKernelImageForDevice);
    cuda_on_cpu_set_kernel_error(cudaSuccess);
    CHECK_EQ_INT(list.get()[0], 0);
}

MPT_TEST(counters_count) {
    cuda_on_cpu_counters before, during, after;
    cuda_on_cpu_reset_peak();
    cuda_on_cpu_get_counters(&before);
    {
        DeviceArray<int> list(std::vector<int>(100));
        Stream stream;
        Event event;
        MPTK_LAUNCH(append, 1, 1, 0, stream.handle, list.data, 1);
        CHECK_CUDA(cudaStreamSynchronize(stream.handle));
        cuda_on_cpu_get_counters(&during);
    }
    cuda_on_cpu_get_counters(&after);
    CHECK_EQ_INT(during.device_bytes - before.device_bytes, 400);
    CHECK_EQ_INT(during.kernel_launches - before.kernel_launches, 1);
    CHECK_EQ_INT(during.synchronisations - before.synchronisations, 2); // cudaMemcpy waits too
    CHECK_EQ_INT(during.streams - before.streams, 1);
    CHECK_EQ_INT(during.events - before.events, 1);
    CHECK_EQ_INT(after.device_bytes, before.device_bytes);
    CHECK_EQ_INT(after.device_bytes_peak, before.device_bytes + 400);
    CHECK_EQ_INT(after.streams, before.streams);
    CHECK_EQ_INT(after.events, before.events);
}

// Two threads of the host, each with a stream of its own.
MPT_TEST(threads_share_the_device) {
    std::vector<int> results(2);
    const auto work = [&results](int i) {
        Stream stream;
        DeviceArray<int> list(std::vector<int>(51));
        for (int j = 1; j <= 50; j++) MPTK_LAUNCH(append, 1, 1, 0, stream.handle, list.data, i);
        CHECK_CUDA(cudaStreamSynchronize(stream.handle));
        for (int value : list.get()) results[i] += value;
    };
    std::thread other(work, 1);
    work(0);
    other.join();
    CHECK_EQ_INT(results[0], 50);
    CHECK_EQ_INT(results[1], 100);
}

// check_runner.sh runs this with the variables that take the device away.
MPT_TEST(no_device) {
    int count = -1, version = 0;
    void *memory;
    const bool old_driver = getenv("CUDA_ON_CPU_DRIVER") != nullptr;
    if (!old_driver && !getenv("CUDA_ON_CPU_DEVICES")) SKIP("there is a device");
    const char *error = old_driver ? "cudaErrorInsufficientDriver" : "cudaErrorNoDevice";
    CHECK_EQ_STR(cudaGetErrorName(cudaGetDeviceCount(&count)), error);
    CHECK_EQ_INT(count, 0);
    CHECK_EQ_STR(cudaGetErrorName(cudaMalloc(&memory, 16)), error);
    cublasHandle_t blas;
    CHECK_EQ_INT(cublasCreate(&blas), CUBLAS_STATUS_NOT_INITIALIZED);
    CHECK_CUDA(cudaDriverGetVersion(&version));
    CHECK_EQ_INT(version < CUDART_VERSION, old_driver);
}

static const mpt_test_case tests[] = {
    MPT_TEST_CASE(each_thread_of_a_grid_runs_once),
    MPT_TEST_CASE(arguments_are_copied_at_the_launch),
    MPT_TEST_CASE(fresh_memory_is_nan),
    MPT_TEST_CASE(the_largest_block_has_its_own_locals),
    MPT_TEST_CASE(shuffles_of_all_types),
    MPT_TEST_CASE(a_warp_may_diverge),
    MPT_TEST_CASE(barriers_count),
    MPT_TEST_CASE(a_reduction_over_a_block),
    MPT_TEST_CASE(atomics_of_a_grid),
    MPT_TEST_CASE(half_rounds_to_nearest_even),
    MPT_TEST_CASE(bfloat_rounds_to_nearest_even),
    MPT_TEST_CASE(wmma_is_a_matrix_product),
    MPT_TEST_CASE(ldmatrix_and_mma_are_a_matrix_product),
    MPT_TEST_CASE(mma_m8n8k4_is_four_products),
    MPT_TEST_CASE(asynchronous_copies_arrive_in_order),
    MPT_TEST_CASE(gemm_of_all_types),
    MPT_TEST_CASE(gemm_refuses_what_cublas_refuses),
    MPT_TEST_CASE(a_stream_keeps_its_order),
    MPT_TEST_CASE(events_order_streams),
    MPT_TEST_CASE(streams_without_events_mix),
    MPT_TEST_CASE(the_null_stream_waits_for_blocking_streams_only),
    MPT_TEST_CASE(queries_come_to_an_end),
    MPT_TEST_CASE(events_measure_time),
    MPT_TEST_CASE(pinned_copies_read_late),
    MPT_TEST_CASE(a_graph_replays_what_was_captured),
    MPT_TEST_CASE(waiting_spoils_a_capture),
    MPT_TEST_CASE(a_capture_must_be_closed_in_itself),
    MPT_TEST_CASE(device_memory_has_an_end),
    MPT_TEST_CASE(copies_know_their_direction),
    MPT_TEST_CASE(launches_have_limits),
    MPT_TEST_CASE(more_shared_memory_must_be_asked_for),
    MPT_TEST_CASE(a_fault_of_the_device_stays),
    MPT_TEST_CASE(calls_fail_on_demand),
    MPT_TEST_CASE(kernels_for_another_architecture),
    MPT_TEST_CASE(counters_count),
    MPT_TEST_CASE(threads_share_the_device),
    MPT_TEST_CASE(no_device),
};

int main(int argc, char **argv) {
    return mpt_test_main(argc, argv, tests, sizeof tests / sizeof tests[0]);
}
