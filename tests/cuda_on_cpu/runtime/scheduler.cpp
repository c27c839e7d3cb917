// The scheduler: which CUDA thread runs, how threads wait for each other, how a grid is run.
//
//   grid     blocks one after another, in shuffled order
//   block    a warp is chosen at random and runs on until all its lanes wait for the block
//            (greedy), or now and then gives way to another warp (shuffled)
//   warp     lanes one after another, round from a random one, up or down; each runs until it waits
//
// A barrier that is missing shows as a warp that reads what another has not written yet: greedy
// lets one warp run as far ahead as it can. A thread starts on the fiber of one that has returned,
// so a kernel whose threads never wait runs on a single fiber without any switch.
#include "internal.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace cuda_on_cpu {

Thread *current;
char fence_token;

namespace {

struct Block {
    Thread threads[MAX_THREADS];
    Warp warps[MAX_WARPS];
    int num_threads, num_warps;
    int live; // threads that have not returned

    // __syncthreads
    int at_barrier;      // threads that wait in it
    Where barrier_where; // of the first of them
    int predicates;      // true ones among them
    int barrier_result;  // of the last barrier

    // the order
    bool greedy;
    Warp *warp;     // that runs
    int lane_start; // the first lane after a choice of warp
    bool downwards;
    unsigned patience; // switches until another warp has its turn
};

Block block;
const Kernel *kernel;

// What ThreadSanitizer knows of order: tokens, and one of its fibers for each CUDA thread.
char launch_token, block_token;
#if CUDA_ON_CPU_TSAN
void *host_context, *thread_contexts[MAX_THREADS];
#endif

// Switches until a warp gives way, in the shuffled schedule: a few meetings of 32 lanes. Giving way
// at each meeting would find no more and cost the cache.
const unsigned MAX_PATIENCE = 256;

} // namespace

const Kernel *running_kernel() {
    return kernel;
}

// ---- choosing ------------------------------------------------------------------------------------

static uint64_t random_state;

void seed_orders(uint64_t seed) {
    random_state = seed * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull;
    if (!random_state) random_state = 1;
}

// xorshift64*: the orders need to vary with the seed, no more.
CUDA_ON_CPU_UNCHECKED unsigned random_below(unsigned bound) {
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return static_cast<unsigned>((random_state * 0x2545f4914f6cdd1dull >> 32) * bound >> 32);
}

// A warp with a lane that can run, from a random one on; null if there is none.
CUDA_ON_CPU_UNCHECKED static Warp *choose_warp() {
    block.lane_start = static_cast<int>(random_below(WARP_SIZE));
    block.patience = block.greedy ? ~0u : 1 + random_below(MAX_PATIENCE);
    unsigned i = random_below(static_cast<unsigned>(block.num_warps));
    for (int tried = 0; tried < block.num_warps; tried++) {
        if (block.warps[i].runnable) return &block.warps[i];
        i = i + 1 < static_cast<unsigned>(block.num_warps) ? i + 1 : 0;
    }
    return nullptr;
}

// The next lane of those that can run, round from block.lane_start.
CUDA_ON_CPU_UNCHECKED static int choose_lane(unsigned runnable) {
    const int start = block.lane_start;
    if (block.downwards) {
        const unsigned below = runnable << (31 - start); // lane `start` is bit 31
        const unsigned bits = below ? below >> (31 - start) : runnable;
        return 31 - __builtin_clz(bits);
    }
    const unsigned from_start = runnable >> start << start;
    return __builtin_ctz(from_start ? from_start : runnable);
}

// The thread that runs next; null if none can.
CUDA_ON_CPU_UNCHECKED static Thread *choose_thread() {
    if (!block.warp || !block.warp->runnable || --block.patience == 0) block.warp = choose_warp();
    if (!block.warp) return nullptr;
    const int lane = choose_lane(block.warp->runnable);
    block.lane_start = (block.downwards ? lane + 31 : lane + 1) % WARP_SIZE;
    return &block.warp->threads[lane];
}

CUDA_ON_CPU_UNCHECKED static void become(Thread *thread) {
    current = thread;
    if (thread) threadIdx = thread->index;
#if CUDA_ON_CPU_TSAN
    __tsan_switch_to_fiber(thread ? thread_contexts[thread - block.threads] : host_context, 1);
#endif
}

CUDA_ON_CPU_UNCHECKED [[noreturn]] static void report_deadlock() {
    for (int i = 0; i < block.num_threads; i++) {
        const Thread &thread = block.threads[i];
        if (!(thread.warp->exists >> thread.lane & 1)) continue;
        if (thread.waits_for == Operation::none) continue;
        char what[128];
        snprintf(what, sizeof what, "deadlock: a lane waits in %s for lanes that never come",
                 operation_name(thread.waits_for));
        fault_in(thread, what, thread.where);
    }
    for (int i = 0; i < block.num_threads; i++) {
        const Thread &thread = block.threads[i];
        if (thread.warp->exists >> thread.lane & 1)
            fault_in(thread, "deadlock: a thread waits in __syncthreads", thread.where);
    }
    fault("deadlock", Where::here());
}

// ---- waiting -------------------------------------------------------------------------------------

CUDA_ON_CPU_UNCHECKED bool suspend() {
    Thread *self = current;
    Thread *next = choose_thread();
    if (!next) report_deadlock();
    if (!next->fiber) next->fiber = take_fiber();
    become(next);
    if (next != self) switch_to(next->fiber);
    const bool completes = self->completes;
    self->completes = false;
    self->waits_for = Operation::none;
    return completes;
}

CUDA_ON_CPU_UNCHECKED static Meeting &find_meeting(Warp &warp, unsigned mask, Operation operation,
                                                   Where where) {
    for (int i = 0; i < warp.num_meetings; i++) {
        Meeting &meeting = warp.meetings[i];
        if (meeting.mask != mask) continue;
        if (meeting.operation != operation)
            fault("lanes of a warp meet in different operations", where);
        return meeting;
    }
    Meeting &meeting = warp.meetings[warp.num_meetings++];
    meeting = {mask, 0, operation};
    return meeting;
}

CUDA_ON_CPU_UNCHECKED static void close_meeting(Warp &warp, Meeting &meeting) {
    meeting = warp.meetings[--warp.num_meetings];
}

CUDA_ON_CPU_UNCHECKED bool arrive(unsigned mask, Operation operation, Where where) {
    Thread &thread = *current;
    Warp &warp = *thread.warp;
    const unsigned bit = 1u << thread.lane;
    if (!(mask & bit)) fault("a lane outside the mask that it gives", where);
    Meeting &meeting = find_meeting(warp, mask, operation, where);
    meeting.arrived |= bit;
    if (meeting.arrived == (mask & warp.exists)) {
        close_meeting(warp, meeting);
        return true;
    }
    warp.runnable &= ~bit;
    thread.where = where;
    thread.waits_for = operation;
    return false;
}

CUDA_ON_CPU_UNCHECKED static void release_barrier() {
    block.barrier_result = block.predicates;
    block.predicates = 0;
    block.at_barrier = 0;
    for (int i = 0; i < block.num_warps; i++) block.warps[i].runnable = block.warps[i].exists;
    block.warp = nullptr; // any may go on first
}

CUDA_ON_CPU_UNCHECKED int sync_block(bool predicate, Where where) {
    Thread &thread = *current;
    if (block.live != block.num_threads)
        fault("__syncthreads after other threads of the block returned", where);
    if (block.at_barrier && block.barrier_where.line != where.line)
        fault("divergent __syncthreads: another thread waits in a different one", where);
    block.barrier_where = where;
    block.predicates += predicate;
    thread.where = where;
    order_release(&block.at_barrier);
    thread.warp->runnable &= ~(1u << thread.lane);
    if (++block.at_barrier == block.num_threads) release_barrier();
    suspend();
    order_acquire(&block.at_barrier);
    return block.barrier_result;
}

// ---- a thread's life -----------------------------------------------------------------------------

// A lane that returns may be the one that others waited for.
CUDA_ON_CPU_UNCHECKED static void complete_without(Warp &warp) {
    for (int i = 0; i < warp.num_meetings; i++) {
        Meeting &meeting = warp.meetings[i];
        if (meeting.arrived != (meeting.mask & warp.exists)) continue;
        const int lane = __builtin_ctz(meeting.arrived);
        warp.threads[lane].completes = true;
        warp.runnable |= 1u << lane;
        close_meeting(warp, meeting);
        i--;
    }
}

CUDA_ON_CPU_UNCHECKED static void run_thread(Thread &thread) {
    order_acquire(&launch_token);
    kernel->call(kernel->arguments);
    order_release(&block_token);
    Warp &warp = *thread.warp;
    const unsigned bit = 1u << thread.lane;
    if (warp.matrix_moves < 0) warp.matrix_moves = thread.matrix_moves;
    if (warp.matrix_moves != thread.matrix_moves)
        fault("a wmma load or store that only some lanes of the warp made", Where::here());
    warp.exists &= ~bit;
    warp.runnable &= ~bit;
    block.live--;
    if (block.at_barrier)
        fault("a thread returned while others wait in __syncthreads", block.barrier_where);
    if (warp.num_meetings) complete_without(warp);
}

CUDA_ON_CPU_UNCHECKED void work_on_fiber() {
    for (;;) {
        Thread *thread = current;
        run_thread(*thread);
        Thread *next = choose_thread();
        if (!next && block.live) report_deadlock();
        become(next);
        if (next && !next->fiber) {
            next->fiber = thread->fiber;
            continue;
        }
        give_fiber_back(thread->fiber);
        if (next) switch_to(next->fiber);
        else switch_to_host();
    }
}

// ---- a grid's life -------------------------------------------------------------------------------

// Once for each launch: what all blocks have in common.
static void prepare_block(const Kernel &launched) {
    const dim3 size = launched.block;
    block.greedy = settings().schedule == Schedule::greedy;
    block.num_threads = static_cast<int>(size.x * size.y * size.z);
    block.num_warps = (block.num_threads + WARP_SIZE - 1) / WARP_SIZE;
    for (unsigned i = 0; i < static_cast<unsigned>(block.num_threads); i++) {
        Thread &thread = block.threads[i];
        thread.index = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
        thread.lane = i % WARP_SIZE;
        thread.warp = &block.warps[i / WARP_SIZE];
    }
#if CUDA_ON_CPU_TSAN
    host_context = __tsan_get_current_fiber();
    for (int i = 0; i < block.num_threads; i++)
        if (!thread_contexts[i]) thread_contexts[i] = __tsan_create_fiber(0);
#endif
}

CUDA_ON_CPU_UNCHECKED static void reset_block() {
    for (int i = 0; i < block.num_threads; i++) {
        Thread &thread = block.threads[i];
        thread.fiber = nullptr;
        thread.waits_for = Operation::none;
        thread.completes = false;
        thread.matrix_moves = 0;
        thread.num_copies = 0;
        thread.open_group = 0;
    }
    for (int i = 0; i < block.num_warps; i++) {
        Warp &warp = block.warps[i];
        const int lanes = block.num_threads - i * WARP_SIZE;
        warp.exists = lanes >= WARP_SIZE ? ~0u : (1u << lanes) - 1;
        warp.runnable = warp.exists;
        warp.matrix_moves = -1;
        warp.num_meetings = 0;
        warp.threads = block.threads + i * WARP_SIZE;
    }
    block.live = block.num_threads;
    block.at_barrier = 0;
    block.predicates = 0;
    block.warp = nullptr;
    block.downwards = random_below(2);
}

CUDA_ON_CPU_UNCHECKED static void run_block() {
    reset_block();
    order_release(&launch_token);
    Thread *first = choose_thread();
    first->fiber = take_fiber();
    become(first);
    switch_to(first->fiber);
    order_acquire(&block_token);
}

static std::vector<unsigned> shuffled(unsigned count) {
    std::vector<unsigned> order(count);
    for (unsigned i = 0; i < count; i++) order[i] = i;
    for (unsigned i = count; i > 1; i--) std::swap(order[i - 1], order[random_below(i)]);
    return order;
}

void run_kernel(const Kernel &launched) {
    const dim3 grid = launched.grid;
    kernel = &launched;
    gridDim = grid;
    blockDim = launched.block;
    prepare_block(launched);
    prepare_shared_memory(launched.shared_bytes);
    for (unsigned i : shuffled(grid.x * grid.y * grid.z)) {
        blockIdx = {i % grid.x, i / grid.x % grid.y, i / (grid.x * grid.y)};
        poison_shared_memory(launched.shared_bytes);
        run_block();
    }
    kernel = nullptr;
}

} // namespace cuda_on_cpu
