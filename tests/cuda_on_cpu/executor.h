// executor.h - CUDA threads on the CPU, as the device headers and the runtime see them.
//
// A CUDA thread is a fiber: a stack of its own that the scheduler of runtime/scheduler.cpp switches
// to. All run on one thread of the operating system, one at a time, until they wait: for the block
// (__syncthreads) or for lanes of their warp (a meeting: shuffles, votes, __syncwarp, mma). The
// lane that arrives last at a meeting does the work of all, then all go on with their results.
#ifndef CUDA_ON_CPU_EXECUTOR_H
#define CUDA_ON_CPU_EXECUTOR_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "include/vector_types.h"
#include "sanitizers.h"

// What kernels know of where they are.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace cuda_on_cpu {

enum {
    WARP_SIZE = 32,
    MAX_THREADS = 1024, // of a block, as on every GPU
    MAX_WARPS = MAX_THREADS / WARP_SIZE,
    COPY_BYTES = 16, // of a cp.async
    MAX_COPIES = 64  // that one thread may have in flight
};

// The place in the program that called a device function.
struct Where {
    const char *file;
    int line;

    static constexpr Where here(const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
};

enum class Operation { syncwarp, shuffle, vote, ldmatrix, mma };

const char *operation_name(Operation operation);

struct Fiber;
struct Warp;

// One cp.async: 16 bytes on their way from global to shared memory.
struct AsyncCopy {
    void *to;
    const void *from; // null: zeros
    int group;        // the number of the commit it belongs to
};

struct Thread {
    uint3 index;      // threadIdx
    int matrix_moves; // wmma loads and stores so far
    int num_copies;   // in copies[], oldest first
    int open_group;   // the group of cp.async's not yet committed
    AsyncCopy copies[MAX_COPIES];
};

// Lanes that wait for each other. Several are open at once only when a warp has diverged.
struct Meeting {
    unsigned mask;
    unsigned arrived;
    Operation operation;
    Where where; // of the first to arrive
};

enum { MATRIX_SIDE = 16 };

// What the scheduler touches at each switch lies together here, by lane, and not in Thread: the
// cache holds little more than the stacks of one warp.
struct Warp {
    unsigned number;    // in the block
    unsigned exists;    // lanes that have not returned
    unsigned runnable;  // of those, lanes that do not wait
    unsigned started;   // lanes that have a fiber
    unsigned completes; // lanes that a lane which returned left the last of their meeting
    int matrix_moves;   // of the lanes that returned; -1: none has
    int num_meetings;
    Meeting meetings[WARP_SIZE];
    Thread *threads; // of its 32 lanes
    Fiber *fibers[WARP_SIZE];
    void *stack_pointers[WARP_SIZE];

    // What lanes bring to a meeting and take from it. They bring values, not addresses of them:
    // what one lane has at hand is far from the others.
    uint64_t in[WARP_SIZE];
    uint64_t out[WARP_SIZE];
    int source[WARP_SIZE];                         // shuffles: the lane to read
    alignas(32) uint32_t rows[WARP_SIZE][4];       // ldmatrix: the 16 bytes that a lane reads
    alignas(32) uint32_t pieces[WARP_SIZE][4];     // ldmatrix: the registers that it gets
    alignas(32) float a[MATRIX_SIDE][MATRIX_SIDE]; // mma: a product, d += a * b
    alignas(32) float b[MATRIX_SIDE][MATRIX_SIDE];
    alignas(32) float d[MATRIX_SIDE][MATRIX_SIDE];
};

// The running CUDA thread; null while the host runs.
extern Thread *current;
extern Warp *current_warp;
extern unsigned current_lane;

// Prints one line - what, kernel, block, thread, place - and aborts.
[[noreturn]] void fault(const char *what, Where where);
[[noreturn]] void fault_in(const Warp &warp, unsigned lane, const char *what, Where where);

// The current lane meets the others of mask. True for the one of them that must do the work of all:
// the last to arrive. The others come back when that is done.
bool meet_lanes(unsigned mask, Operation operation, Where where);

// All lanes of mask meet. `job(warp, lanes)` runs once, for all of them.
template <class Job>
CUDA_ON_CPU_UNCHECKED inline void meet(unsigned mask, Operation operation, Where where, Job job) {
    if (!meet_lanes(mask, operation, where)) return;
    Warp &warp = *current_warp;
    const unsigned lanes = mask & warp.exists;
    job(warp, lanes);
    warp.runnable |= lanes;
}

// __syncthreads: waits for the block, then returns how many threads gave a true predicate.
int sync_block(bool predicate, Where where);

// What __threadfence orders.
extern char fence_token;

// The start of the block's dynamic shared memory.
extern unsigned char *dynamic_shared;

// Whether all lanes of the warp are there, as wmma and mma demand.
CUDA_ON_CPU_UNCHECKED inline void need_whole_warp(unsigned lanes, Where where) {
    if (lanes != ~0u) fault("a warp-wide matrix instruction without all 32 lanes", where);
}

inline bool aligned(const void *pointer, size_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// ---- matrix instructions ------------------------------------------------------------------------

// Eight neighbours of a row, in a register where the processor has such. Moved by assignment, as
// memcpy may go in smaller pieces, which the processor can't hand on from store to load.
typedef float Row8 __attribute__((vector_size(8 * sizeof(float)), may_alias));

CUDA_ON_CPU_UNCHECKED inline Row8 &row8(float *eight) {
    return *reinterpret_cast<Row8 *>(eight);
}
CUDA_ON_CPU_UNCHECKED inline const Row8 &row8(const float *eight) {
    return *reinterpret_cast<const Row8 *>(eight);
}

// warp.d += warp.a * warp.b. Column k of a is at column_of_k[k].
void multiply_16x16x16(Warp &warp, const uint8_t *column_of_k);
void multiply_16x8x16(Warp &warp);
// Four products of 8x8x4: q's a, transposed, and b are rows 4q to 4q + 3 of the warp's.
void multiply_four_8x8x4(Warp &warp);

void load_matrices(unsigned r[4], const void *row, bool transposed, Where where);

// ---- asynchronous copies ------------------------------------------------------------------------

void begin_copy(void *to, const void *from, Where where); // from null: zeros
void finish_copies(int groups);                           // all of groups 0 to groups - 1

// ---- launching ----------------------------------------------------------------------------------

// A kernel with its arguments copied, ready to run any number of times.
struct Kernel {
    const char *name;
    const void *function;
    dim3 grid, block;
    size_t shared_bytes; // dynamic
    void (*call)(const void *arguments);
    const void *arguments;
};

void run_kernel(const Kernel &kernel);

} // namespace cuda_on_cpu

#endif
