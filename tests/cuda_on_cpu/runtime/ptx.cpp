// What the twins of PTX instructions do (include/ptx_twins.h).
#include "../float16.h"
#include "internal.h"

namespace cuda_on_cpu {

// ---- cp.async ------------------------------------------------------------------------------------

void begin_copy(void *to, const void *from, Where where) {
    if (!aligned(to, COPY_BYTES) || (from && !aligned(from, COPY_BYTES)))
        fault("cp.async with an address that is not a multiple of 16 bytes", where);
    Thread &thread = *current;
    if (thread.num_copies == MAX_COPIES)
        fault("more asynchronous copies of one thread in flight than the runner holds", where);
    memset(to, POISON, COPY_BYTES);
    thread.copies[thread.num_copies++] = {to, from, thread.open_group};
}

void finish_copies(int groups) {
    Thread &thread = *current;
    int kept = 0;
    for (int i = 0; i < thread.num_copies; i++) {
        const AsyncCopy &copy = thread.copies[i];
        if (copy.group >= groups) thread.copies[kept++] = copy;
        else if (copy.from) memcpy(copy.to, copy.from, COPY_BYTES);
        else memset(copy.to, 0, COPY_BYTES);
    }
    thread.num_copies = kept;
}

// ---- ldmatrix ------------------------------------------------------------------------------------

CUDA_ON_CPU_UNCHECKED static uint32_t element_of_row(const Warp &warp, int row, int column) {
    return warp.row[row][column / 2] >> 16 * (column % 2) & 0xffffu;
}

CUDA_ON_CPU_UNCHECKED static void distribute_rows(Warp &warp, bool transposed) {
    for (int lane = 0; lane < WARP_SIZE; lane++) {
        const int row = lane / 4;
        const int column = lane % 4 * 2;
        uint32_t *registers = static_cast<uint32_t *>(warp.registers[lane][0]);
        for (int matrix = 0; matrix < 4; matrix++) {
            const int first = matrix * 8;
            if (transposed)
                registers[matrix] = element_of_row(warp, first + column, row) |
                                    element_of_row(warp, first + column + 1, row) << 16;
            else registers[matrix] = warp.row[first + row][column / 2];
        }
    }
}

CUDA_ON_CPU_UNCHECKED static void exchange_rows(unsigned r[4], const uint32_t row[4],
                                                bool transposed, Where where) {
    Warp &warp = *current_warp;
    warp.registers[current_lane][0] = r;
    for (int i = 0; i < 4; i++) warp.row[current_lane][i] = row[i];
    meet(~0u, Operation::ldmatrix, where, [=](Warp &w, unsigned lanes) CUDA_ON_CPU_UNCHECKED {
        need_whole_warp(lanes, where);
        distribute_rows(w, transposed);
    });
}

// Each lane reads its row itself, so that the sanitizers know who read it.
void load_matrices(unsigned r[4], const void *row, bool transposed, Where where) {
    if (!aligned(row, 16)) fault("ldmatrix with a row that is not a multiple of 16 bytes", where);
    uint32_t bytes[4];
    memcpy(bytes, row, sizeof bytes);
    exchange_rows(r, bytes, transposed, where);
}

// ---- mma.sync m16n8k16 ---------------------------------------------------------------------------
//
// With g = lane / 4 and t = lane % 4, each register two neighbours:
//   a[0] row g, k 2t    a[1] row g + 8, k 2t    a[2] row g, k 2t + 8    a[3] row g + 8, k 2t + 8
//   b[0] k 2t, column g      b[1] k 2t + 8, column g
//   d[0..1] row g, columns 2t, 2t + 1      d[2..3] row g + 8

typedef float Row8 __attribute__((vector_size(8 * sizeof(float))));

namespace {

struct Tile16816 {
    alignas(32) float a[16][16];
    alignas(32) float b[16][8];
    alignas(32) float d[16][8];
};

} // namespace

CUDA_ON_CPU_UNCHECKED static void gather_16816(const Warp &warp, Tile16816 &tile,
                                               void (*widen)(const uint16_t *, float *)) {
    for (int lane = 0; lane < WARP_SIZE; lane++) {
        const int g = lane / 4;
        const int t = lane % 4 * 2;
        const uint16_t *a = static_cast<const uint16_t *>(warp.registers[lane][1]);
        const uint16_t *b = static_cast<const uint16_t *>(warp.registers[lane][2]);
        const float *d = static_cast<const float *>(warp.registers[lane][0]);
        float wide[8];
        widen(a, wide);
        for (int i = 0; i < 4; i++)
            memcpy(&tile.a[g + i % 2 * 8][t + i / 2 * 8], wide + 2 * i, 2 * sizeof(float));
        uint16_t padded[8] = {b[0], b[1], b[2], b[3]};
        widen(padded, wide);
        for (int i = 0; i < 4; i++) tile.b[t + i % 2 + i / 2 * 8][g] = wide[i];
        for (int i = 0; i < 2; i++) memcpy(&tile.d[g + i * 8][t], d + 2 * i, 2 * sizeof(float));
    }
}

CUDA_ON_CPU_UNCHECKED static void multiply_16816(Tile16816 &tile) {
    Row8 b[16];
    memcpy(b, tile.b, sizeof b);
    for (int row = 0; row < 16; row++) {
        Row8 sum;
        memcpy(&sum, tile.d[row], sizeof sum);
        for (int k = 0; k < 16; k++) sum += tile.a[row][k] * b[k];
        memcpy(tile.d[row], &sum, sizeof sum);
    }
}

CUDA_ON_CPU_UNCHECKED static void scatter_16816(const Warp &warp, const Tile16816 &tile) {
    for (int lane = 0; lane < WARP_SIZE; lane++) {
        float *d = static_cast<float *>(warp.registers[lane][0]);
        for (int i = 0; i < 2; i++)
            memcpy(d + 2 * i, &tile.d[lane / 4 + i * 8][lane % 4 * 2], 2 * sizeof(float));
    }
}

CUDA_ON_CPU_UNCHECKED static void bring_registers(float *d, const unsigned *a, const unsigned *b) {
    void **registers = current_warp->registers[current_lane];
    registers[0] = d;
    registers[1] = const_cast<unsigned *>(a);
    registers[2] = const_cast<unsigned *>(b);
}

CUDA_ON_CPU_UNCHECKED void mma_m16n8k16(float d[4], const unsigned a[4], const unsigned b[2],
                                        void (*widen)(const uint16_t *, float *), Where where) {
    bring_registers(d, a, b);
    meet(~0u, Operation::mma, where, [=](Warp &warp, unsigned lanes) CUDA_ON_CPU_UNCHECKED {
        need_whole_warp(lanes, where);
        Tile16816 tile;
        gather_16816(warp, tile, widen);
        multiply_16816(tile);
        scatter_16816(warp, tile);
    });
}

// ---- mma.sync m8n8k4 (sm_70) ---------------------------------------------------------------------
//
// Four products of 8x8x4 at once, each by the eight lanes of a quad pair: lanes 4q to 4q + 3 and
// those 16 further on. Lane i of the pair holds row i of A, column i of B and eight sums:
//   d[e]: row (i & 1) + (e & 2) + (i & 4), column (e & 4) + (i & 2) + (e & 1)

CUDA_ON_CPU_UNCHECKED static int lane_of_pair(int pair, int i) {
    return pair * 4 + i % 4 + i / 4 * 16;
}

CUDA_ON_CPU_UNCHECKED static void multiply_884(const Warp &warp, int pair) {
    float a[8][4], b[8][4]; // rows of A, columns of B
    for (int i = 0; i < 8; i++) {
        void *const *registers = warp.registers[lane_of_pair(pair, i)];
        for (int k = 0; k < 4; k++) {
            a[i][k] = half_to_float(static_cast<const uint16_t *>(registers[1])[k]);
            b[i][k] = half_to_float(static_cast<const uint16_t *>(registers[2])[k]);
        }
    }
    for (int i = 0; i < 8; i++) {
        float *d = static_cast<float *>(warp.registers[lane_of_pair(pair, i)][0]);
        for (int e = 0; e < 8; e++) {
            const int row = (i & 1) + (e & 2) + (i & 4);
            const int column = (e & 4) + (i & 2) + (e & 1);
            for (int k = 0; k < 4; k++) d[e] += a[row][k] * b[column][k];
        }
    }
}

CUDA_ON_CPU_UNCHECKED void mma_m8n8k4(float d[8], const unsigned a[2], const unsigned b[2],
                                      Where where) {
    bring_registers(d, a, b);
    meet(~0u, Operation::mma, where, [=](Warp &warp, unsigned lanes) CUDA_ON_CPU_UNCHECKED {
        need_whole_warp(lanes, where);
        for (int pair = 0; pair < 4; pair++) multiply_884(warp, pair);
    });
}

} // namespace cuda_on_cpu
