// Planted bugs, to see that the runner finds them.
//
//   bugs                 lists them: build, name, what the output contains when it is found
//   bugs NAME            runs the code with the bug
//   bugs NAME fixed      runs it without: must print "right" in every build and order
//
// A bug is found by a fault, by a report of a sanitizer, or by wrong numbers under some order.
// check_runner.sh goes through the list.
#include <cuda_fp16.h>
#include <cuda_on_cpu.h>
#include <cublas_v2.h>
#include <mma.h>
#include <ptx_twins.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

using namespace nvcuda;

// ---- what the bugs share ------------------------------------------------------------------------

static void must(cudaError_t error) {
    if (!error) return;
    printf("error %s\n", cudaGetErrorName(error));
    exit(1);
}

template <class T> static T *device_array(const std::vector<T> &values) {
    T *data;
    must(cudaMalloc(&data, values.size() * sizeof(T)));
    must(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return data;
}

static std::vector<float> counting(int n) {
    std::vector<float> numbers;
    for (int i = 0; i < n; i++) numbers.push_back(static_cast<float>(i));
    return numbers;
}

// Frees what it reads.
static void judge(float *device, const std::vector<float> &expected) {
    std::vector<float> got(expected.size());
    must(cudaMemcpy(got.data(), device, got.size() * sizeof(float), cudaMemcpyDeviceToHost));
    must(cudaFree(device));
    bool right = true;
    for (size_t i = 0; i < got.size(); i++) right = right && got[i] == expected[i];
    puts(right ? "right" : "wrong");
}

// The kernels below have 64 threads, two warps, and turn numbers round by 33: each reads what a
// thread of the other warp wrote.
static std::vector<float> turned(int n) {
    std::vector<float> numbers;
    for (int i = 0; i < n; i++) numbers.push_back(static_cast<float>((i + 33) % n));
    return numbers;
}

typedef void (*TurnKernel)(float *out, bool bug);

static void run_turn(TurnKernel kernel, bool bug) {
    float *out = device_array(std::vector<float>(64));
    MPTK_LAUNCH(kernel, 1, 64, 64 * sizeof(float), nullptr, out, bug);
    judge(out, turned(64));
}

// ---- memory of the device -----------------------------------------------------------------------

__global__ void missing_barrier_kernel(float *out, bool bug) {
    MPTK_DYN_SMEM(float, numbers);
    numbers[threadIdx.x] = static_cast<float>(threadIdx.x);
    if (!bug) __syncthreads();
    out[threadIdx.x] = numbers[(threadIdx.x + 33) % 64];
}

static void missing_barrier(bool bug) {
    run_turn(missing_barrier_kernel, bug);
}

__global__ void missing_syncwarp_kernel(float *out, bool bug) {
    __shared__ float numbers[32];
    for (int round = 0; round < 2; round++) {
        numbers[threadIdx.x] = static_cast<float>(threadIdx.x + round);
        if (!bug) __syncwarp();
        out[threadIdx.x] = numbers[31 - threadIdx.x];
        if (!bug) __syncwarp();
    }
}

static void missing_syncwarp(bool bug) {
    std::vector<float> expected = counting(33);
    expected.erase(expected.begin());
    float *out = device_array(std::vector<float>(32));
    MPTK_LAUNCH(missing_syncwarp_kernel, 1, 32, 0, nullptr, out, bug);
    judge(out, std::vector<float>(expected.rbegin(), expected.rend()));
}

__global__ void sum_without_atomics_kernel(float *out, bool bug) {
    if (bug) *out = *out + 1;
    else atomicAdd(out, 1.0f);
}

// One thread at a time runs, so the numbers are right: only ThreadSanitizer sees it.
static void sum_without_atomics(bool bug) {
    float *out = device_array(std::vector<float>(1));
    MPTK_LAUNCH(sum_without_atomics_kernel, 1, 64, 0, nullptr, out, bug);
    judge(out, {64});
}

__global__ void index_global_kernel(float *out, bool bug) {
    const unsigned i = bug ? threadIdx.x + 1 : threadIdx.x;
    out[i] = static_cast<float>(threadIdx.x);
}

static void index_global(bool bug) {
    float *out = device_array(std::vector<float>(64));
    MPTK_LAUNCH(index_global_kernel, 1, 64, 0, nullptr, out, bug);
    judge(out, counting(64));
}

__global__ void index_static_shared_kernel(float *out, bool bug) {
    __shared__ float numbers[64];
    float *volatile unknown = numbers; // so that the compiler does not see the bug
    unknown[bug ? threadIdx.x + 1 : threadIdx.x] = static_cast<float>(threadIdx.x);
    __syncthreads();
    out[threadIdx.x] = numbers[(threadIdx.x + 33) % 64];
}

static void index_static_shared(bool bug) {
    run_turn(index_static_shared_kernel, bug);
}

__global__ void index_dynamic_shared_kernel(float *out, bool bug) {
    MPTK_DYN_SMEM(float, numbers);
    numbers[bug ? threadIdx.x + 1 : threadIdx.x] = static_cast<float>(threadIdx.x);
    __syncthreads();
    out[threadIdx.x] = numbers[(threadIdx.x + 33) % 64];
}

static void index_dynamic_shared(bool bug) {
    run_turn(index_dynamic_shared_kernel, bug);
}

__global__ void uninitialised_shared_kernel(float *out, bool bug) {
    MPTK_DYN_SMEM(float, numbers);
    if (!bug || threadIdx.x < 63) numbers[threadIdx.x] = static_cast<float>(threadIdx.x);
    __syncthreads();
    out[threadIdx.x] = numbers[(threadIdx.x + 33) % 64];
}

static void uninitialised_shared(bool bug) {
    run_turn(uninitialised_shared_kernel, bug);
}

__global__ void double_kernel(const float *in, float *out) {
    out[threadIdx.x] = 2 * in[threadIdx.x];
}

static void uninitialised_global(bool bug) {
    float *in = nullptr;
    must(cudaMalloc(&in, 64 * sizeof(float)));
    if (!bug) must(cudaMemset(in, 0, 64 * sizeof(float)));
    float *out = device_array(std::vector<float>(64));
    MPTK_LAUNCH(double_kernel, 1, 64, 0, nullptr, in, out);
    judge(out, std::vector<float>(64));
    must(cudaFree(in));
}

__global__ void misaligned_vector_kernel(const float *in, float *out) {
    const float4 four = *reinterpret_cast<const float4 *>(in);
    out[0] = four.x;
    out[1] = four.w;
}

static void misaligned_vector(bool bug) {
    float *in = device_array(counting(16));
    float *out = device_array(std::vector<float>(2));
    const int first = bug ? 2 : 4;
    MPTK_LAUNCH(misaligned_vector_kernel, 1, 1, 0, nullptr, in + first, out);
    judge(out, {static_cast<float>(first), static_cast<float>(first + 3)});
    must(cudaFree(in));
}

static void use_after_free(bool bug) {
    float *in = device_array(std::vector<float>(4096));
    float *out = device_array(std::vector<float>(64));
    if (bug) must(cudaFree(in));
    MPTK_LAUNCH(double_kernel, 1, 64, 0, nullptr, in, out);
    judge(out, std::vector<float>(64));
    if (!bug) must(cudaFree(in));
}

static void forgotten_free(bool bug) {
    float *kept = device_array(counting(64));
    judge(device_array(counting(64)), counting(64));
    if (!bug) must(cudaFree(kept));
}

__global__ void large_locals_kernel(float *out, int n) {
    volatile char locals[1 << 20];
    for (int i = 0; i < n; i++) locals[(1 << 20) - 1 - i * 4096] = 1;
    *out = locals[(1 << 20) - 1];
}

static void large_locals(bool bug) {
    float *out = device_array(std::vector<float>(1));
    if (bug) MPTK_LAUNCH(large_locals_kernel, 1, 1, 0, nullptr, out, 200);
    else MPTK_LAUNCH(sum_without_atomics_kernel, 1, 1, 0, nullptr, out, false);
    judge(out, {1});
}

// ---- barriers and warps -------------------------------------------------------------------------

__global__ void divergent_barrier_kernel(float *out, bool bug) {
    MPTK_DYN_SMEM(float, numbers);
    numbers[threadIdx.x] = static_cast<float>(threadIdx.x);
    if (bug && threadIdx.x % 2) __syncthreads();
    else __syncthreads();
    out[threadIdx.x] = numbers[(threadIdx.x + 33) % 64];
}

static void divergent_barrier(bool bug) {
    run_turn(divergent_barrier_kernel, bug);
}

__global__ void early_return_kernel(float *out, bool bug) {
    MPTK_DYN_SMEM(float, numbers);
    numbers[threadIdx.x] = static_cast<float>(threadIdx.x);
    if (bug && threadIdx.x >= 48) return;
    __syncthreads();
    out[threadIdx.x] = numbers[(threadIdx.x + 33) % 64];
}

static void early_return(bool bug) {
    run_turn(early_return_kernel, bug);
}

__global__ void barrier_in_one_warp_kernel(float *out, bool bug) {
    MPTK_DYN_SMEM(float, numbers);
    numbers[threadIdx.x] = static_cast<float>(threadIdx.x);
    if (bug && threadIdx.x == 5) __syncwarp(); // the others of its warp wait in the barrier
    __syncthreads();
    out[threadIdx.x] = numbers[(threadIdx.x + 33) % 64];
}

static void barrier_in_one_warp(bool bug) {
    run_turn(barrier_in_one_warp_kernel, bug);
}

__global__ void absent_lane_kernel(float *out, bool bug) {
    const float mine = static_cast<float>(threadIdx.x);
    const unsigned delta = bug || threadIdx.x < 15 ? 1 : 0;
    out[threadIdx.x] = __shfl_down_sync(0xffffu, mine, delta);
}

static void absent_lane(bool bug) {
    std::vector<float> expected = counting(16);
    for (float &number : expected) number = number < 15 ? number + 1 : number;
    float *out = device_array(std::vector<float>(16));
    MPTK_LAUNCH(absent_lane_kernel, 1, 16, 0, nullptr, out, bug);
    judge(out, expected);
}

__global__ void outside_its_mask_kernel(float *out, bool bug) {
    const float mine = static_cast<float>(threadIdx.x);
    out[threadIdx.x] = __shfl_xor_sync(bug ? 0xffffu : 0xffffffffu, mine, 1);
}

static void outside_its_mask(bool bug) {
    std::vector<float> expected;
    for (int i = 0; i < 32; i++) expected.push_back(static_cast<float>(i ^ 1));
    float *out = device_array(std::vector<float>(32));
    MPTK_LAUNCH(outside_its_mask_kernel, 1, 32, 0, nullptr, out, bug);
    judge(out, expected);
}

__global__ void different_operations_kernel(float *out, bool bug) {
    float sum = 1;
    if (bug && threadIdx.x % 2) __syncwarp();
    else
        for (int delta = 16; delta; delta /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, delta);
    out[threadIdx.x] = sum;
}

static void different_operations(bool bug) {
    float *out = device_array(std::vector<float>(32));
    MPTK_LAUNCH(different_operations_kernel, 1, 32, 0, nullptr, out, bug);
    judge(out, std::vector<float>(32, 32));
}

__global__ void shuffle_in_half_a_warp_kernel(float *out, bool bug) {
    float sum = 1;
    if (!bug || threadIdx.x < 16)
        for (int delta = 16; delta; delta /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, delta);
    __syncthreads();
    out[threadIdx.x] = sum;
}

static void shuffle_in_half_a_warp(bool bug) {
    float *out = device_array(std::vector<float>(32));
    MPTK_LAUNCH(shuffle_in_half_a_warp_kernel, 1, 32, 0, nullptr, out, bug);
    judge(out, std::vector<float>(32, 32));
}

// ---- matrices -----------------------------------------------------------------------------------

// Doubles a 16x16 matrix by the identity. The bug relies on the layout that sm_80 happens to have.
__global__ void fragment_layout_kernel(const half *a, float *out, bool bug) {
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> identity;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums;
    wmma::load_matrix_sync(fa, a, 16);
    wmma::load_matrix_sync(identity, a + 256, 16);
    wmma::fill_fragment(sums, 0.0f);
    wmma::mma_sync(sums, fa, identity, sums);
    for (float &element : sums.x) element *= 2;
    if (!bug) {
        wmma::store_matrix_sync(out, sums, 16, wmma::mem_row_major);
        return;
    }
    const unsigned lane = threadIdx.x;
    for (unsigned i = 0; i < 8; i++) {
        const unsigned row = lane / 4 + i / 2 % 2 * 8;
        const unsigned column = lane % 4 * 2 + i % 2 + i / 4 * 8;
        out[row * 16 + column] = sums.x[i];
    }
}

static void fragment_layout(bool bug) {
    std::vector<half> in;
    std::vector<float> expected;
    for (int i = 0; i < 256; i++) in.push_back(half(i));
    for (int i = 0; i < 256; i++) in.push_back(half(i / 16 == i % 16));
    for (int i = 0; i < 256; i++) expected.push_back(static_cast<float>(2 * i));
    half *a = device_array(in);
    float *out = device_array(std::vector<float>(256));
    MPTK_LAUNCH(fragment_layout_kernel, 1, 32, 0, nullptr, a, out, bug);
    judge(out, expected);
    must(cudaFree(a));
}

__global__ void wmma_address_kernel(float *out, int offset, unsigned ldm) {
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums;
    wmma::fill_fragment(sums, 1.0f);
    wmma::store_matrix_sync(out + offset, sums, ldm, wmma::mem_row_major);
}

static void run_wmma_address(int offset, unsigned ldm) {
    std::vector<float> expected(16 * 20);
    for (unsigned i = 0; i < 256; i++) expected[i / 16 * 20 + i % 16] = 1;
    float *out = device_array(std::vector<float>(16 * 20));
    MPTK_LAUNCH(wmma_address_kernel, 1, 32, 0, nullptr, out, offset, ldm);
    judge(out, expected);
}

static void misaligned_wmma(bool bug) {
    run_wmma_address(bug ? 4 : 0, 20);
}

static void wmma_leading_dimension(bool bug) {
    run_wmma_address(0, bug ? 18 : 20);
}

__global__ void wmma_in_half_a_warp_kernel(float *out, bool bug) {
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums;
    wmma::fill_fragment(sums, 1.0f);
    if (!bug || threadIdx.x % 2) wmma::store_matrix_sync(out, sums, 16, wmma::mem_row_major);
}

static void wmma_in_half_a_warp(bool bug) {
    float *out = device_array(std::vector<float>(256));
    MPTK_LAUNCH(wmma_in_half_a_warp_kernel, 1, 32, 0, nullptr, out, bug);
    judge(out, std::vector<float>(256, 1));
}

__global__ void misaligned_ldmatrix_kernel(float *out, int pitch) {
    __shared__ __align__(16) half rows[8 * 16];
    for (unsigned i = threadIdx.x; i < 8 * 16; i += 32) rows[i] = half(1);
    __syncwarp();
    unsigned r[4];
    mptk_ldmatrix_x4(r, rows + threadIdx.x % 8 * pitch);
    out[threadIdx.x] = __low2float(*reinterpret_cast<half2 *>(&r[0]));
}

static void misaligned_ldmatrix(bool bug) {
    float *out = device_array(std::vector<float>(32));
    MPTK_LAUNCH(misaligned_ldmatrix_kernel, 1, 32, 0, nullptr, out, bug ? 12 : 16);
    judge(out, std::vector<float>(32, 1));
}

__global__ void missing_copy_wait_kernel(const float4 *in, float4 *out, bool bug) {
    __shared__ float4 buffer[2][16];
    for (int stage = 0; stage < 2; stage++) {
        mptk_cp_async16(&buffer[stage][threadIdx.x], in + stage * 16 + threadIdx.x, true);
        mptk_cp_async_commit();
    }
    if (bug) mptk_cp_async_wait<1>();
    else mptk_cp_async_wait<0>();
    __syncthreads();
    for (int stage = 0; stage < 2; stage++)
        out[stage * 16 + threadIdx.x] = buffer[stage][threadIdx.x];
}

static void missing_copy_wait(bool bug) {
    float *in = device_array(counting(128));
    float *out = device_array(std::vector<float>(128));
    MPTK_LAUNCH(missing_copy_wait_kernel, 1, 16, 0, nullptr, reinterpret_cast<float4 *>(in),
                reinterpret_cast<float4 *>(out), bug);
    judge(out, counting(128));
    must(cudaFree(in));
}

// ---- streams ------------------------------------------------------------------------------------

__global__ void add_kernel(const float *in, float *sum) {
    sum[threadIdx.x] += in[threadIdx.x];
}

// Two batches through one pinned buffer.
static void pinned_reused(bool bug) {
    cudaStream_t stream;
    float *pinned;
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    must(cudaMallocHost(&pinned, 32 * sizeof(float)));
    float *in = device_array(std::vector<float>(32));
    float *sum = device_array(std::vector<float>(32));
    for (int batch = 1; batch <= 2; batch++) {
        for (int i = 0; i < 32; i++) pinned[i] = static_cast<float>(batch);
        must(cudaMemcpyAsync(in, pinned, 32 * sizeof(float), cudaMemcpyHostToDevice, stream));
        MPTK_LAUNCH(add_kernel, 1, 32, 0, stream, in, sum);
        if (!bug) must(cudaStreamSynchronize(stream));
    }
    must(cudaStreamSynchronize(stream));
    judge(sum, std::vector<float>(32, 3));
    must(cudaFree(in));
    must(cudaFreeHost(pinned));
    must(cudaStreamDestroy(stream));
}

// Batches are copied in one stream and used in another, over one buffer. `copied_waits`: the kernel
// waits for the copy; `used_waits`: the next copy waits for the kernel.
static void run_two_streams(bool copied_waits, bool used_waits) {
    cudaStream_t copy, compute;
    cudaEvent_t copied, used;
    float *pinned;
    must(cudaStreamCreateWithFlags(&copy, cudaStreamNonBlocking));
    must(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking));
    must(cudaEventCreateWithFlags(&copied, cudaEventDisableTiming));
    must(cudaEventCreateWithFlags(&used, cudaEventDisableTiming));
    must(cudaMallocHost(&pinned, 3 * 32 * sizeof(float)));
    float *in = device_array(std::vector<float>(32));
    float *sum = device_array(std::vector<float>(32));
    for (int i = 0; i < 3 * 32; i++) pinned[i] = static_cast<float>(1 << i / 32);
    for (int batch = 0; batch < 3; batch++) {
        if (used_waits) must(cudaStreamWaitEvent(copy, used, 0));
        must(cudaMemcpyAsync(in, pinned + 32 * batch, 32 * sizeof(float), cudaMemcpyHostToDevice,
                             copy));
        must(cudaEventRecord(copied, copy));
        if (copied_waits) must(cudaStreamWaitEvent(compute, copied, 0));
        MPTK_LAUNCH(add_kernel, 1, 32, 0, compute, in, sum);
        must(cudaEventRecord(used, compute));
    }
    must(cudaStreamSynchronize(compute));
    judge(sum, std::vector<float>(32, 7));
    must(cudaFree(in));
    must(cudaFreeHost(pinned));
    must(cudaEventDestroy(copied));
    must(cudaEventDestroy(used));
    must(cudaStreamDestroy(copy));
    must(cudaStreamDestroy(compute));
}

static void missing_wait_for_copy(bool bug) {
    run_two_streams(!bug, true);
}

static void missing_wait_for_use(bool bug) {
    run_two_streams(true, !bug);
}

static void read_before_synchronize(bool bug) {
    cudaStream_t stream;
    float *pinned;
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    must(cudaMallocHost(&pinned, sizeof(float)));
    float *number = device_array(std::vector<float>{1});
    *pinned = 0;
    must(cudaMemcpyAsync(pinned, number, sizeof(float), cudaMemcpyDeviceToHost, stream));
    if (!bug) must(cudaStreamSynchronize(stream));
    puts(*pinned == 1 ? "right" : "wrong");
    must(cudaFree(number));
    must(cudaFreeHost(pinned));
    must(cudaStreamDestroy(stream));
}

// ---- the host -----------------------------------------------------------------------------------

static void too_much_shared(bool bug) {
    float *out = device_array(std::vector<float>(64));
    if (!bug)
        must(cudaFuncSetAttribute(missing_barrier_kernel,
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, 96 << 10));
    MPTK_LAUNCH(missing_barrier_kernel, 1, 64, 96 << 10, nullptr, out, false);
    must(cudaGetLastError());
    judge(out, turned(64));
}

static void host_touches_device(bool bug) {
    float *numbers = device_array(counting(64));
    float host = 0;
    must(cudaMemcpy(&host, numbers, sizeof host, cudaMemcpyDeviceToHost));
    if (bug) host += numbers[1];
    std::vector<float> expected = counting(64);
    expected[0] = host;
    judge(numbers, expected);
}

static void gemm_on_host_memory(bool bug) {
    cublasHandle_t blas;
    const float one = 1, zero = 0;
    float host[4] = {1, 0, 0, 1};
    float *a = device_array(std::vector<float>(host, host + 4));
    float *c = device_array(std::vector<float>(4));
    cublasCreate(&blas);
    cublasGemmEx(blas, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 2, &one, bug ? host : a, CUDA_R_32F, 2, a,
                 CUDA_R_32F, 2, &zero, c, CUDA_R_32F, 2, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    must(cudaDeviceSynchronize());
    judge(c, {1, 0, 0, 1});
    must(cudaFree(a));
    cublasDestroy(blas);
}

// ---- the list -----------------------------------------------------------------------------------

// What the output contains when the bug is found, by build; null: not looked for there. "wrong" has
// to come under one seed only, anything else under all.
struct Bug {
    const char *name;
    void (*run)(bool bug);
    const char *plain, *asan, *tsan, *msan;
};

#define BUG(function, ...) \
    { #function, function, __VA_ARGS__ }
// Faults that the runner itself reports come in all builds.
#define FAULT(function, text) BUG(function, text, text, nullptr, nullptr)

static const Bug bugs[] = {
    BUG(missing_barrier, "wrong", nullptr, "data race", nullptr),
    BUG(missing_syncwarp, "wrong", nullptr, "data race", nullptr),
    BUG(sum_without_atomics, nullptr, nullptr, "data race", nullptr),
    BUG(index_global, "byte 256 of 256", "heap-buffer-overflow", nullptr, nullptr),
    BUG(index_static_shared, nullptr, "global-buffer-overflow", nullptr, nullptr),
    BUG(index_dynamic_shared, "beyond dynamic shared memory", "use-after-poison", nullptr, nullptr),
    BUG(uninitialised_shared, "wrong", "wrong", nullptr, "use-of-uninitialized-value"),
    BUG(uninitialised_global, "wrong", "wrong", nullptr, "use-of-uninitialized-value"),
    BUG(misaligned_vector, nullptr, "misaligned address", nullptr, nullptr),
    BUG(use_after_free, "which is no memory", "heap-use-after-free", nullptr, nullptr),
    BUG(forgotten_free, nullptr, "detected memory leaks", nullptr, nullptr),
    BUG(large_locals, "larger than its stack", nullptr, nullptr, nullptr),
    FAULT(divergent_barrier, "divergent __syncthreads"),
    FAULT(early_return, "returned"),
    FAULT(barrier_in_one_warp, "deadlock: a lane waits in __syncwarp"),
    FAULT(absent_lane, "a shuffle reads a lane that is not there"),
    FAULT(outside_its_mask, "a lane outside the mask"),
    FAULT(different_operations, "meet in different operations"),
    FAULT(shuffle_in_half_a_warp, "deadlock: a lane waits in a shuffle"),
    FAULT(fragment_layout, "wrong"),
    FAULT(misaligned_wmma, "a multiple of 32 bytes"),
    FAULT(wmma_leading_dimension, "a multiple of 16 bytes"),
    FAULT(wmma_in_half_a_warp, "only some lanes"),
    FAULT(misaligned_ldmatrix, "ldmatrix with a row"),
    FAULT(missing_copy_wait, "wrong"),
    FAULT(pinned_reused, "wrong"),
    FAULT(missing_wait_for_copy, "wrong"),
    FAULT(missing_wait_for_use, "wrong"),
    FAULT(read_before_synchronize, "wrong"),
    FAULT(too_much_shared, "error cudaErrorInvalidValue"),
    BUG(host_touches_device, "host code touches device memory", "use-after-poison", nullptr,
        nullptr),
    FAULT(gemm_on_host_memory, "error cudaErrorIllegalAddress"),
};

#undef FAULT
#undef BUG

static void list_bugs() {
    for (const Bug &bug : bugs) {
        const char *const found[] = {bug.plain, bug.asan, bug.tsan, bug.msan};
        const char *const builds[] = {"plain", "asan", "tsan", "msan"};
        for (int i = 0; i < 4; i++)
            if (found[i]) printf("%s %s %s\n", builds[i], bug.name, found[i]);
    }
}

int main(int argc, char **argv) {
    if (argc < 2) {
        list_bugs();
        return 0;
    }
    for (const Bug &bug : bugs) {
        if (strcmp(bug.name, argv[1]) != 0) continue;
        bug.run(argc < 3 || strcmp(argv[2], "fixed") != 0);
        return 0;
    }
    fprintf(stderr, "bugs: there is no %s\n", argv[1]);
    return 2;
}
