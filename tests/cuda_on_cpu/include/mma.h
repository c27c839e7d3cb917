// wmma m16n16k16: half or bfloat16 operands, float accumulators.
//
// CUDA does not say which lane holds which element of a fragment, so here a key scatters them
// (CUDA_ON_CPU_FRAGMENTS): code that relies on a layout gives wrong numbers. Eight neighbours of a
// row make a chunk, a lane holds one chunk, and the eight lie in the fragment in another order:
//
//     row 0:  chunk 0 | chunk 1          fragment of lane l:  chunk  chunk_of[l]
//     row 1:  chunk 2 | chunk 3              x[i]:            column column_of[i] of the chunk
//     ...     16 rows of two chunks
//
// B and the accumulators have one order of columns, so that a row of B can be multiplied and added
// to a row of the sums without looking at it.
#ifndef CUDA_ON_CPU_MMA_H
#define CUDA_ON_CPU_MMA_H

#include <type_traits>
#include "../executor.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"

namespace cuda_on_cpu {

enum { CHUNK = 8, FRAGMENT_SIDE = 16 };

struct FragmentLayout {
    uint8_t chunk_of[WARP_SIZE]; // by lane
    uint8_t lane_of[WARP_SIZE];  // by chunk
    uint8_t column_of[CHUNK];    // by index in x
    uint8_t index_of[CHUNK];     // by column in the chunk
};

struct FragmentLayouts {
    FragmentLayout a, b, accumulator;
    uint8_t column_of_k[FRAGMENT_SIDE]; // where a row of A has its element k
};

extern const FragmentLayouts &fragment_layouts;

CUDA_ON_CPU_UNCHECKED inline float *place_of_chunk(float (*matrix)[MATRIX_SIDE], unsigned chunk) {
    return &matrix[chunk / 2][chunk % 2 * CHUNK];
}

CUDA_ON_CPU_UNCHECKED inline void bring_chunk(const half *from, float *to) {
    HalfBits::widen8(from, to);
}

CUDA_ON_CPU_UNCHECKED inline void bring_chunk(const __nv_bfloat16 *from, float *to) {
    BfloatBits::widen8(from, to);
}

// d = a * b + c, for this lane's chunks.
template <class T>
CUDA_ON_CPU_UNCHECKED inline void multiply_fragments(float *d, const T *a, const T *b,
                                                     const float *c, Where where) {
    Warp &warp = *current_warp;
    const unsigned lane = current_lane;
    float *sums = place_of_chunk(warp.d, fragment_layouts.accumulator.chunk_of[lane]);
    bring_chunk(a, place_of_chunk(warp.a, fragment_layouts.a.chunk_of[lane]));
    bring_chunk(b, place_of_chunk(warp.b, fragment_layouts.b.chunk_of[lane]));
    row8(sums) = row8(c);
    meet(~0u, Operation::mma, where, [where](Warp &w, unsigned lanes) CUDA_ON_CPU_UNCHECKED {
        need_whole_warp(lanes, where);
        multiply_16x16x16(w, fragment_layouts.column_of_k);
    });
    row8(d) = row8(sums);
}

} // namespace cuda_on_cpu

namespace nvcuda {
namespace wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};

enum layout_t { mem_row_major, mem_col_major };

template <class Use, int M, int N, int K, class T, class Layout = void> struct fragment {
    static_assert(M == 16 && N == 16 && K == 16, "only m16n16k16 is here");
    static_assert(std::is_same<Use, accumulator>::value ? std::is_same<T, float>::value
                                                        : sizeof(T) == 2,
                  "half or bfloat16 operands, float accumulators");
    enum { num_elements = cuda_on_cpu::CHUNK };
    alignas(32) T x[num_elements];
};

template <class Use> const cuda_on_cpu::FragmentLayout &layout_of();
template <> inline const cuda_on_cpu::FragmentLayout &layout_of<matrix_a>() {
    return cuda_on_cpu::fragment_layouts.a;
}
template <> inline const cuda_on_cpu::FragmentLayout &layout_of<matrix_b>() {
    return cuda_on_cpu::fragment_layouts.b;
}
template <> inline const cuda_on_cpu::FragmentLayout &layout_of<accumulator>() {
    return cuda_on_cpu::fragment_layouts.accumulator;
}

// What the documentation of load_matrix_sync and store_matrix_sync demands.
template <class T>
inline void check_matrix(const T *memory, unsigned ldm, cuda_on_cpu::Where where) {
    if (!cuda_on_cpu::aligned(memory, 32))
        cuda_on_cpu::fault("a wmma pointer that is not a multiple of 32 bytes", where);
    if (ldm * sizeof(T) % 16)
        cuda_on_cpu::fault("a wmma leading dimension that is not a multiple of 16 bytes", where);
    cuda_on_cpu::current->matrix_moves++; // compared with the other lanes' at the end
}

// Calls copy(index in the fragment, offset in memory) for the eight elements of this lane. Lanes
// copy when they get here and do not wait for each other: what other lanes wrote without a
// __syncwarp may not be there yet.
template <class Use, class Copy>
inline void for_elements(bool col_major_memory, unsigned ldm, Copy copy) {
    const cuda_on_cpu::FragmentLayout &layout = layout_of<Use>();
    const unsigned chunk = layout.chunk_of[cuda_on_cpu::current_lane];
    const size_t row = chunk / 2;
    const size_t column = chunk % 2 * cuda_on_cpu::CHUNK;
    const size_t start = col_major_memory ? column * ldm + row : row * ldm + column;
    const size_t step = col_major_memory ? ldm : 1;
    for (int i = 0; i < cuda_on_cpu::CHUNK; i++) copy(i, start + layout.column_of[i] * step);
}

template <class Use, int M, int N, int K, class T, class Layout>
inline void fill_fragment(fragment<Use, M, N, K, T, Layout> &f, T value) {
    for (T &element : f.x) element = value;
}

template <class Use, int M, int N, int K, class T, class Layout>
inline void load_matrix_sync(fragment<Use, M, N, K, T, Layout> &f, const T *memory, unsigned ldm,
                             cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    check_matrix(memory, ldm, where);
    for_elements<Use>(std::is_same<Layout, col_major>::value, ldm,
                      [&](int i, size_t at) { f.x[i] = memory[at]; });
}

template <int M, int N, int K>
inline void load_matrix_sync(fragment<accumulator, M, N, K, float> &f, const float *memory,
                             unsigned ldm, layout_t layout,
                             cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    check_matrix(memory, ldm, where);
    for_elements<accumulator>(layout == mem_col_major, ldm,
                              [&](int i, size_t at) { f.x[i] = memory[at]; });
}

template <int M, int N, int K>
inline void store_matrix_sync(float *memory, const fragment<accumulator, M, N, K, float> &f,
                              unsigned ldm, layout_t layout,
                              cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    check_matrix(memory, ldm, where);
    for_elements<accumulator>(layout == mem_col_major, ldm,
                              [&](int i, size_t at) { memory[at] = f.x[i]; });
}

template <int M, int N, int K, class T, class LayoutA, class LayoutB>
inline void mma_sync(fragment<accumulator, M, N, K, float> &d,
                     const fragment<matrix_a, M, N, K, T, LayoutA> &a,
                     const fragment<matrix_b, M, N, K, T, LayoutB> &b,
                     const fragment<accumulator, M, N, K, float> &c,
                     cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    cuda_on_cpu::multiply_fragments(d.x, a.x, b.x, c.x, where);
}

} // namespace wmma
} // namespace nvcuda

#endif
