// CPU twins of the inline wrappers around PTX instructions that wmma does not reach: asynchronous
// copies, ldmatrix, mma.sync. Same signatures as the wrappers for a GPU; the place that calls comes
// in as a default argument.
#ifndef CUDA_ON_CPU_PTX_TWINS_H
#define CUDA_ON_CPU_PTX_TWINS_H

#include "../executor.h"
#include "../float16.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"

// ---- cp.async -----------------------------------------------------------------------------------

// Copies 16 bytes to shared memory, or zeros if not valid. They arrive when waited for and not
// earlier; until then the place holds NaN.
inline void mptk_cp_async16(void *smem, const void *gmem, bool valid,
                            cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    cuda_on_cpu::begin_copy(smem, valid ? gmem : nullptr, where);
}

inline void mptk_cp_async_commit() {
    cuda_on_cpu::current->open_group++;
}

// Waits until at most N of the groups committed by this thread are under way.
template <int N> inline void mptk_cp_async_wait() {
    cuda_on_cpu::finish_copies(cuda_on_cpu::current->open_group - N);
}

// ---- ldmatrix -----------------------------------------------------------------------------------

// Four 8x8 matrices of 16-bit elements: lanes 8m to 8m + 7 give the rows of matrix m, 16 bytes
// each; r[m] receives two neighbours of row lane / 4 (of a column, if transposed).
inline void mptk_ldmatrix_x4(unsigned r[4], const void *row,
                             cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    cuda_on_cpu::load_matrices(r, row, false, where);
}

inline void mptk_ldmatrix_x4_trans(unsigned r[4], const void *row,
                                   cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    cuda_on_cpu::load_matrices(r, row, true, where);
}

// ---- mma.sync -----------------------------------------------------------------------------------

namespace cuda_on_cpu {

// With g = lane / 4 and t = lane % 4, each register two neighbours:
//   a[0] row g, k 2t    a[1] row g + 8, k 2t    a[2] row g, k 2t + 8    a[3] row g + 8, k 2t + 8
//   b[0] k 2t, column g      b[1] k 2t + 8, column g
//   d[0..1] row g, columns 2t, 2t + 1      d[2..3] row g + 8
template <class Bits>
CUDA_ON_CPU_UNCHECKED inline void mma_m16n8k16(float d[4], const unsigned a[4], const unsigned b[2],
                                               Where where) {
    Warp &warp = *current_warp;
    const unsigned g = current_lane / 4;
    const unsigned t = current_lane % 4;
    float wide_a[8], wide_b[4];
    Bits::widen8(a, wide_a);
    Bits::widen4(b, wide_b);
#pragma GCC unroll 4
    for (unsigned i = 0; i < 4; i++) {
        memcpy(&warp.a[g + i % 2 * 8][2 * t + i / 2 * 8], wide_a + 2 * i, 2 * sizeof(float));
        warp.b[2 * t + i % 2 + i / 2 * 8][g] = wide_b[i];
    }
    for (unsigned i = 0; i < 2; i++)
        memcpy(&warp.d[g + 8 * i][2 * t], d + 2 * i, 2 * sizeof(float));
    meet(~0u, Operation::mma, where, [where](Warp &w, unsigned lanes) CUDA_ON_CPU_UNCHECKED {
        need_whole_warp(lanes, where);
        multiply_16x8x16(w);
    });
    for (unsigned i = 0; i < 2; i++)
        memcpy(d + 2 * i, &warp.d[g + 8 * i][2 * t], 2 * sizeof(float));
}

// sm_70. Four products of 8x8x4 at once, each by the eight lanes of a quad pair: lanes 4q to 4q + 3
// and those 16 further on. Lane i of pair q brings row i of A and column i of B and has eight sums:
//   d[e]: row (i & 1) + (e & 2) + (i & 4), column (e & 4) + (i & 2) + (e & 1)
CUDA_ON_CPU_UNCHECKED inline void mma_m8n8k4(float d[8], const unsigned a[2], const unsigned b[2],
                                             Where where) {
    Warp &warp = *current_warp;
    const unsigned q = current_lane / 4 % 4;
    const unsigned i = current_lane % 4 + current_lane / 16 * 4;
    float wide_a[4], wide_b[4];
    HalfBits::widen4(a, wide_a);
    HalfBits::widen4(b, wide_b);
#pragma GCC unroll 4
    for (unsigned k = 0; k < 4; k++) {
        warp.a[4 * q + k][i] = wide_a[k];
        warp.b[4 * q + k][i] = wide_b[k];
    }
    float *sums[4]; // of neighbouring columns, two each
    for (unsigned e = 0; e < 8; e += 2) {
        const unsigned row = (i & 1) + (e & 2) + (i & 4);
        const unsigned column = (e & 4) + (i & 2);
        sums[e / 2] = &warp.d[q / 2 * 8 + row][q % 2 * 8 + column];
        memcpy(sums[e / 2], d + e, 2 * sizeof(float));
    }
    meet(~0u, Operation::mma, where, [where](Warp &w, unsigned lanes) CUDA_ON_CPU_UNCHECKED {
        need_whole_warp(lanes, where);
        multiply_four_8x8x4(w);
    });
    for (unsigned e = 0; e < 8; e += 2) memcpy(d + e, sums[e / 2], 2 * sizeof(float));
}

} // namespace cuda_on_cpu

// d += a * b with the lane layouts of PTX; the last argument only names the operands' type.
inline void mptk_mma_m16n8k16(float d[4], const unsigned a[4], const unsigned b[2], half,
                              cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    cuda_on_cpu::mma_m16n8k16<cuda_on_cpu::HalfBits>(d, a, b, where);
}

inline void mptk_mma_m16n8k16(float d[4], const unsigned a[4], const unsigned b[2], __nv_bfloat16,
                              cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    cuda_on_cpu::mma_m16n8k16<cuda_on_cpu::BfloatBits>(d, a, b, where);
}

inline void mptk_mma_m8n8k4(float d[8], const unsigned a[2], const unsigned b[2],
                            cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    cuda_on_cpu::mma_m8n8k4(d, a, b, where);
}

#endif
