// The keyed layouts of wmma's fragments (include/mma.h).
#include "../include/mma.h"
#include "internal.h"

namespace cuda_on_cpu {

// Of their own, so that CUDA_ON_CPU_SEED leaves the layouts alone.
static unsigned key_random(uint64_t &state, unsigned bound) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<unsigned>((state >> 32) * bound >> 32);
}

static void shuffle_permutation(uint64_t &state, uint8_t *permutation, uint8_t *inverse,
                                unsigned n) {
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
    for (unsigned k = 0; k < FRAGMENT_SIDE; k++)
        layouts.column_of_k[k] = static_cast<uint8_t>(k / CHUNK * CHUNK +
                                                      layouts.a.index_of[k % CHUNK]);
    return layouts;
}

static const FragmentLayouts &layouts_of_key() {
    static const FragmentLayouts layouts = make_layouts(settings().fragment_key);
    return layouts;
}

const FragmentLayouts &fragment_layouts = layouts_of_key();

} // namespace cuda_on_cpu
