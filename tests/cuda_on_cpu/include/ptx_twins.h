// CPU twins of the inline wrappers around PTX instructions that wmma does not reach: asynchronous
// copies, ldmatrix, mma.sync. Same signatures as the wrappers for a GPU; the place that calls comes
// in as a default argument.
#ifndef CUDA_ON_CPU_PTX_TWINS_H
#define CUDA_ON_CPU_PTX_TWINS_H

#include "../executor.h"
#include "../float16.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"

// ---- cp.async ------------------------------------------------------------------------------------

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

// ---- ldmatrix ------------------------------------------------------------------------------------

// Four 8x8 matrices of 16-bit elements: lanes 8m to 8m + 7 give the rows of matrix m, 16 bytes each;
// r[m] receives two neighbours of row lane / 4 (of a column, if transposed).
inline void mptk_ldmatrix_x4(unsigned r[4], const void *row,
                             cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    cuda_on_cpu::load_matrices(r, row, false, where);
}

inline void mptk_ldmatrix_x4_trans(unsigned r[4], const void *row,
                                   cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    cuda_on_cpu::load_matrices(r, row, true, where);
}

// ---- mma.sync ------------------------------------------------------------------------------------

// d += a * b with the lane layouts of PTX; the last argument only names the operands' type.
inline void mptk_mma_m16n8k16(float d[4], const unsigned a[4], const unsigned b[2], half,
                              cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    cuda_on_cpu::mma_m16n8k16(d, a, b, cuda_on_cpu::halves_to_floats, where);
}

inline void mptk_mma_m16n8k16(float d[4], const unsigned a[4], const unsigned b[2], __nv_bfloat16,
                              cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    cuda_on_cpu::mma_m16n8k16(d, a, b, cuda_on_cpu::bfloats_to_floats, where);
}

inline void mptk_mma_m8n8k4(float d[8], const unsigned a[2], const unsigned b[2],
                            cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    cuda_on_cpu::mma_m8n8k4(d, a, b, where);
}

#endif
