// How fast the runner is: a GEMM through wmma, a barrier, a shuffle, a thread that does not wait.
// Prints the best of several runs of each; judges the numbers but no time.
//
//   g++ -std=c++17 -O2 -mavx2 -mfma -mf16c -fno-strict-aliasing -I tests/cuda_on_cpu/include
//       -include tests/cuda_on_cpu/device.h tests/cuda_on_cpu/test_speed.cpp
//       tests/cuda_on_cpu/runtime.cpp -o test_speed
#include <cuda_fp16.h>
#include <mma.h>

#include <chrono>
#include <stdio.h>
#include <stdlib.h>
#include <vector>

using namespace nvcuda;

enum { SIZE = 256, TILE = 128, DEPTH = 32, PADDING = 8, WARP_TILE = 64, FRAGMENTS = 4 };
enum { LD_A = DEPTH + PADDING, LD_B = TILE + PADDING, THREADS = 128 };

static void must(cudaError_t error) {
    if (!error) return;
    printf("error %s\n", cudaGetErrorName(error));
    exit(1);
}

typedef wmma::fragment<wmma::accumulator, 16, 16, 16, float> Sums;

// One tile of A and one of B from global to shared memory, 8 halves at a time.
static inline void load_tiles(const half *a, const half *b, half *tile_a, half *tile_b) {
    for (int i = static_cast<int>(threadIdx.x) * 8; i < TILE * DEPTH; i += THREADS * 8) {
        const int row_a = i / DEPTH, column_a = i % DEPTH;
        const int row_b = i / TILE, column_b = i % TILE;
        *reinterpret_cast<uint4 *>(tile_a + row_a * LD_A + column_a) =
            *reinterpret_cast<const uint4 *>(a + row_a * SIZE + column_a);
        *reinterpret_cast<uint4 *>(tile_b + row_b * LD_B + column_b) =
            *reinterpret_cast<const uint4 *>(b + row_b * SIZE + column_b);
    }
}

static inline void multiply_tiles(const half *tile_a, const half *tile_b,
                                  Sums (&sums)[FRAGMENTS][FRAGMENTS]) {
    for (int k = 0; k < DEPTH; k += 16) {
        wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a[FRAGMENTS];
        wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> b[FRAGMENTS];
        for (int i = 0; i < FRAGMENTS; i++) {
            wmma::load_matrix_sync(a[i], tile_a + 16 * i * LD_A + k, LD_A);
            wmma::load_matrix_sync(b[i], tile_b + k * LD_B + 16 * i, LD_B);
        }
        for (int i = 0; i < FRAGMENTS; i++)
            for (int j = 0; j < FRAGMENTS; j++) wmma::mma_sync(sums[i][j], a[i], b[j], sums[i][j]);
    }
}

__global__ void gemm(const half *a, const half *b, float *c) {
    MPTK_DYN_SMEM(half, tile_a);
    half *tile_b = tile_a + TILE * LD_A;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int row = warp / 2 * WARP_TILE, column = warp % 2 * WARP_TILE;
    Sums sums[FRAGMENTS][FRAGMENTS];
    a += blockIdx.y * TILE * SIZE;
    b += blockIdx.x * TILE;
    c += (blockIdx.y * TILE + static_cast<unsigned>(row)) * SIZE + blockIdx.x * TILE;
    for (auto &row_of_sums : sums)
        for (Sums &sum : row_of_sums) wmma::fill_fragment(sum, 0.0f);
    for (int k = 0; k < SIZE; k += DEPTH) {
        load_tiles(a + k, b + k * SIZE, tile_a, tile_b);
        __syncthreads();
        multiply_tiles(tile_a + row * LD_A, tile_b + column, sums);
        __syncthreads();
    }
    for (int i = 0; i < FRAGMENTS; i++)
        for (int j = 0; j < FRAGMENTS; j++)
            wmma::store_matrix_sync(c + 16 * i * SIZE + column + 16 * j, sums[i][j], SIZE,
                                    wmma::mem_row_major);
}

__global__ void barriers(float *out, int rounds) {
    for (int i = 0; i < rounds; i++) __syncthreads();
    out[threadIdx.x] = 1;
}

__global__ void shuffles(float *out, int rounds) {
    float value = 1;
    for (int i = 0; i < rounds; i++) value = __shfl_xor_sync(0xffffffffu, value, 1);
    out[threadIdx.x] = value;
}

__global__ void threads(float *out, int) {
    out[blockIdx.x * blockDim.x + threadIdx.x] = 1;
}

template <class Launch> static double best_seconds(Launch launch) {
    double best = 1e9;
    for (int i = 0; i < 50; i++) {
        const auto begun = std::chrono::steady_clock::now();
        launch();
        must(cudaDeviceSynchronize());
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begun;
        best = std::min(best, taken.count());
    }
    return best;
}

static bool all_are(const float *device, size_t count, float expected) {
    std::vector<float> values(count);
    must(cudaMemcpy(values.data(), device, count * sizeof(float), cudaMemcpyDeviceToHost));
    for (float value : values)
        if (value != expected) return false;
    return true;
}

// A and B are full of ones: each number of the product is SIZE.
static bool measure_gemm() {
    const size_t count = SIZE * SIZE, bytes = count * sizeof(half);
    const std::vector<half> ones(count, half(1));
    half *a;
    float *c;
    must(cudaMalloc(&a, bytes));
    must(cudaMalloc(&c, count * sizeof(float)));
    must(cudaMemcpy(a, ones.data(), bytes, cudaMemcpyHostToDevice));
    const size_t shared = (TILE * LD_A + DEPTH * LD_B) * sizeof(half);
    const double seconds = best_seconds([=] {
        MPTK_LAUNCH(gemm, dim3(SIZE / TILE, SIZE / TILE), THREADS, shared, nullptr, a, a, c);
    });
    printf("GEMM %d^3, tiles of %dx%dx%d: %.2f G multiply-adds a second\n", SIZE, TILE, TILE, DEPTH,
           1e-9 * SIZE * SIZE * SIZE / seconds);
    const bool right = all_are(c, count, SIZE);
    must(cudaFree(a));
    must(cudaFree(c));
    return right;
}

static bool measure(const char *what, void (*kernel)(float *, int), unsigned blocks, unsigned block,
                    int rounds) {
    float *out;
    must(cudaMalloc(&out, blocks * block * sizeof(float)));
    const double seconds = best_seconds(
        [=] { MPTK_LAUNCH(kernel, blocks, block, 0, nullptr, out, rounds); });
    printf("%s: %.1f ns a thread\n", what, 1e9 * seconds / blocks / block / rounds);
    const bool right = all_are(out, blocks * block, 1);
    must(cudaFree(out));
    return right;
}

int main() {
    bool right = measure_gemm();
    right = measure("a barrier of 256 threads", barriers, 1, 256, 1000) && right;
    right = measure("a shuffle", shuffles, 1, 256, 1000) && right;
    right = measure("a thread that does not wait", threads, 1000, 256, 1) && right;
    puts(right ? "the numbers are right" : "WRONG numbers");
    return !right;
}
