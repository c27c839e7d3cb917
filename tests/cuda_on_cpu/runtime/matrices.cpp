// The products that all matrix instructions come to, and the exchange of ldmatrix. Lanes bring
// their operands to the matrices of their warp, the last one multiplies, each takes its part.
#include "internal.h"

namespace cuda_on_cpu {

// ---- products -----------------------------------------------------------------------------------

// 16 rows, depth 16 and 8 * WIDE columns.
template <int WIDE>
CUDA_ON_CPU_UNCHECKED static inline void multiply_matrices(Warp &warp, const uint8_t *column_of_k) {
    const int together = 8 / WIDE; // rows at a time: eight sums keep the adders busy
    for (int row = 0; row < MATRIX_SIDE; row += together) {
        Row8 sums[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) sums[i] = row8(&warp.d[row + i / WIDE][i % WIDE * 8]);
        for (int k = 0; k < MATRIX_SIDE; k++) {
            const float *a = &warp.a[row][column_of_k[k]];
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++)
                sums[i] += a[i / WIDE * MATRIX_SIDE] * row8(&warp.b[k][i % WIDE * 8]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) row8(&warp.d[row + i / WIDE][i % WIDE * 8]) = sums[i];
    }
}

CUDA_ON_CPU_UNCHECKED void multiply_16x16x16(Warp &warp, const uint8_t *column_of_k) {
    multiply_matrices<2>(warp, column_of_k);
}

CUDA_ON_CPU_UNCHECKED void multiply_16x8x16(Warp &warp) {
    static const uint8_t column_of_k[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    multiply_matrices<1>(warp, column_of_k);
}

CUDA_ON_CPU_UNCHECKED void multiply_four_8x8x4(Warp &warp) {
    for (int q = 0; q < 4; q++) {
        for (int row = 0; row < 8; row++) {
            Row8 &sums = row8(&warp.d[q / 2 * 8 + row][q % 2 * 8]);
            for (int k = 4 * q; k < 4 * q + 4; k++) sums += warp.a[k][row] * row8(warp.b[k]);
        }
    }
}

// ---- ldmatrix -----------------------------------------------------------------------------------

CUDA_ON_CPU_UNCHECKED static uint32_t element_of_row(const Warp &warp, int row, int column) {
    return warp.rows[row][column / 2] >> 16 * (column % 2) & 0xffffu;
}

CUDA_ON_CPU_UNCHECKED static void distribute_rows(Warp &warp, bool transposed) {
    for (int lane = 0; lane < WARP_SIZE; lane++) {
        const int row = lane / 4;
        const int column = lane % 4 * 2;
        for (int matrix = 0; matrix < 4; matrix++) {
            const int first = matrix * 8;
            if (transposed)
                warp.pieces[lane][matrix] = element_of_row(warp, first + column, row) |
                                            element_of_row(warp, first + column + 1, row) << 16;
            else warp.pieces[lane][matrix] = warp.rows[first + row][column / 2];
        }
    }
}

CUDA_ON_CPU_UNCHECKED static void exchange_rows(unsigned r[4], const uint32_t row[4],
                                                bool transposed, Where where) {
    Warp &warp = *current_warp;
    const unsigned lane = current_lane;
    memcpy(warp.rows[lane], row, sizeof warp.rows[lane]);
    meet(~0u, Operation::ldmatrix, where, [=](Warp &w, unsigned lanes) CUDA_ON_CPU_UNCHECKED {
        need_whole_warp(lanes, where);
        distribute_rows(w, transposed);
    });
    memcpy(r, warp.pieces[lane], sizeof warp.pieces[lane]);
}

// Each lane reads its row itself, so that the sanitizers know who read it.
void load_matrices(unsigned r[4], const void *row, bool transposed, Where where) {
    if (!aligned(row, 16)) fault("ldmatrix with a row that is not a multiple of 16 bytes", where);
    uint32_t bytes[4];
    memcpy(bytes, row, sizeof bytes);
    exchange_rows(r, bytes, transposed, where);
}

} // namespace cuda_on_cpu
