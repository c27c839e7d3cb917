// wmma's fragments: their keyed layouts, and the product of three of them.
#include "../include/mma.h"
#include "internal.h"

namespace cuda_on_cpu {

// ---- layouts -------------------------------------------------------------------------------------

// Of their own, so that CUDA_ON_CPU_SEED leaves the layouts alone.
static unsigned key_random(uint64_t &state, unsigned bound) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<unsigned>((state >> 32) * bound >> 32);
}

static void shuffle_permutation(uint64_t &state, uint8_t *permutation, uint8_t *inverse, unsigned n) {
    for (unsigned i = 0; i < n; i++) permutation[i] = static_cast<uint8_t>(i);
    for (unsigned i = n; i > 1; i--)
        std::swap(permutation[i - 1], permutation[key_random(state, i)]);
    for (unsigned i = 0; i < n; i++) inverse[permutation[i]] = static_cast<uint8_t>(i);
}

static FragmentLayouts make_layouts(uint64_t key) {
    FragmentLayouts layouts;
    uint64_t state = key;
    key_random(state, 2);
    for (FragmentLayout *layout : {&layouts.a, &layouts.b, &layouts.accumulator}) {
        shuffle_permutation(state, layout->chunk_of, layout->lane_of, WARP_SIZE);
        shuffle_permutation(state, layout->column_of, layout->index_of, CHUNK);
    }
    memcpy(layouts.b.column_of, layouts.accumulator.column_of, CHUNK);
    memcpy(layouts.b.index_of, layouts.accumulator.index_of, CHUNK);
    return layouts;
}

static const FragmentLayouts &layouts_of_key() {
    static const FragmentLayouts layouts = make_layouts(settings().fragment_key);
    return layouts;
}

const FragmentLayouts &fragment_layouts = layouts_of_key();

// ---- the product ---------------------------------------------------------------------------------

typedef float Chunk __attribute__((vector_size(CHUNK * sizeof(float))));

// Rows of the sums that are multiplied together: 8 vectors of 8 floats, half of AVX2's registers.
enum { ROWS_TOGETHER = 4 };

// All chunks of one operand as floats, row by row.
CUDA_ON_CPU_UNCHECKED static void gather(const Warp &warp, int operand,
                                         const FragmentLayout &layout,
                                         void (*widen)(const uint16_t *from, float *to),
                                         float (*rows)[FRAGMENT_SIDE]) {
    for (int lane = 0; lane < WARP_SIZE; lane++) {
        const unsigned chunk = layout.chunk_of[lane];
        widen(static_cast<const uint16_t *>(warp.registers[lane][operand]),
              &rows[chunk / 2][chunk % 2 * CHUNK]);
    }
}

CUDA_ON_CPU_UNCHECKED static void load_chunk(const Warp &warp, int operand, int chunk, Chunk *to) {
    const int lane = fragment_layouts.accumulator.lane_of[chunk];
    memcpy(to, warp.registers[lane][operand], sizeof *to);
}

CUDA_ON_CPU_UNCHECKED static void store_chunk(const Warp &warp, int chunk, const Chunk &from) {
    const int lane = fragment_layouts.accumulator.lane_of[chunk];
    memcpy(warp.registers[lane][0], &from, sizeof from);
}

CUDA_ON_CPU_UNCHECKED void multiply_fragments(Warp &warp,
                                              void (*widen)(const uint16_t *from, float *to)) {
    alignas(64) float a[FRAGMENT_SIDE][FRAGMENT_SIDE], b[FRAGMENT_SIDE][FRAGMENT_SIDE];
    gather(warp, 1, fragment_layouts.a, widen, a);
    gather(warp, 2, fragment_layouts.b, widen, b);
    int column_of_k[FRAGMENT_SIDE]; // where A has its column k
    for (int k = 0; k < FRAGMENT_SIDE; k++)
        column_of_k[k] = k / CHUNK * CHUNK + fragment_layouts.a.index_of[k % CHUNK];
    for (int row = 0; row < FRAGMENT_SIDE; row += ROWS_TOGETHER) {
        Chunk sums[ROWS_TOGETHER][2];
#pragma GCC unroll 8
        for (int i = 0; i < ROWS_TOGETHER * 2; i++)
            load_chunk(warp, 3, row * 2 + i, &sums[i / 2][i % 2]);
        for (int k = 0; k < FRAGMENT_SIDE; k++) {
            Chunk low, high;
            memcpy(&low, &b[k][0], sizeof low);
            memcpy(&high, &b[k][CHUNK], sizeof high);
#pragma GCC unroll 4
            for (int i = 0; i < ROWS_TOGETHER; i++) {
                const float factor = a[row + i][column_of_k[k]];
                sums[i][0] += factor * low;
                sums[i][1] += factor * high;
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < ROWS_TOGETHER * 2; i++)
            store_chunk(warp, row * 2 + i, sums[i / 2][i % 2]);
    }
}

} // namespace cuda_on_cpu
