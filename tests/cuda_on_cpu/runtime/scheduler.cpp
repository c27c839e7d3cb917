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
Warp *current_warp;
unsigned current_lane;
char fence_token;

namespace {

struct Block {
    Thread threads[MAX_THREADS];
    Warp warps[MAX_WARPS];
    unsigned num_threads, num_warps;
    unsigned live; // threads that have not returned

    // __syncthreads
    unsigned at_barrier; // threads that wait in it
    Where barrier_where; // of the first of them
    int predicates;      // true ones among them
    int barrier_result;  // of the last barrier

    // the order
    bool greedy, downwards;
    unsigned lane_start; // lanes are tried round from here
    unsigned patience;   // switches until another warp has its turn
};

Block block;
const Kernel *kernel_now;

// For ThreadSanitizer: a block comes after its launch, and after the block before it.
char launch_token, block_token;

// Switches until a warp gives way, in the shuffled schedule: a few meetings of 32 lanes. Giving way
// at each meeting would find no more and cost the cache.
const unsigned MAX_PATIENCE = 256;

} // namespace

const Kernel *running_kernel() {
    return kernel_now;
}

// ---- choosing -----------------------------------------------------------------------------------

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
    block.lane_start = random_below(WARP_SIZE);
    block.patience = block.greedy ? ~0u : 1 + random_below(MAX_PATIENCE);
    unsigned i = random_below(block.num_warps);
    for (unsigned tried = 0; tried < block.num_warps; tried++) {
        if (block.warps[i].runnable) return &block.warps[i];
        i = i + 1 < block.num_warps ? i + 1 : 0;
    }
    return nullptr;
}

// The next lane of those that can run, round from block.lane_start.
CUDA_ON_CPU_UNCHECKED static unsigned choose_lane(unsigned runnable) {
    const unsigned start = block.lane_start;
    if (block.downwards) {
        const unsigned from_start = runnable << (31 - start) >> (31 - start);
        return 31u - static_cast<unsigned>(__builtin_clz(from_start ? from_start : runnable));
    }
    const unsigned from_start = runnable >> start << start;
    return static_cast<unsigned>(__builtin_ctz(from_start ? from_start : runnable));
}

// Makes the thread that runs next the current one; false if none can.
CUDA_ON_CPU_UNCHECKED static bool choose_thread() {
    if (!current_warp || !current_warp->runnable || --block.patience == 0)
        current_warp = choose_warp();
    if (!current_warp) return false;
    current_lane = choose_lane(current_warp->runnable);
    current = &current_warp->threads[current_lane];
    block.lane_start = (block.downwards ? current_lane + 31 : current_lane + 1) % WARP_SIZE;
    return true;
}

CUDA_ON_CPU_UNCHECKED static Place place_of_current() {
    Warp &warp = *current_warp;
    return {warp.fibers[current_lane], &warp.stack_pointers[current_lane]};
}

[[noreturn]] static void report_deadlock() {
    for (unsigned i = 0; i < block.num_warps; i++) {
        const Warp &warp = block.warps[i];
        if (!warp.num_meetings) continue;
        const Meeting &meeting = warp.meetings[0];
        char what[128];
        snprintf(what, sizeof what, "deadlock: a lane waits in %s for lanes that never come",
                 operation_name(meeting.operation));
        fault_in(warp, static_cast<unsigned>(__builtin_ctz(meeting.arrived)), what, meeting.where);
    }
    fault("deadlock: threads wait in __syncthreads", block.barrier_where);
}

// ---- waiting ------------------------------------------------------------------------------------

// Lets others run until this lane may go on; true if it must complete its meeting, as the last lane
// that it waited for has returned.
CUDA_ON_CPU_UNCHECKED static inline bool suspend() {
    const uint3 index = threadIdx;
    Warp &warp = *current_warp;
    const unsigned lane = current_lane;
    if (!choose_thread()) report_deadlock();
    if (current_warp != &warp || current_lane != lane) {
        if (!(current_warp->started >> current_lane & 1)) take_fiber(*current_warp, current_lane);
        switch_fibers({warp.fibers[lane], &warp.stack_pointers[lane]}, place_of_current());
        threadIdx = index;
    }
    const unsigned completes = warp.completes >> lane & 1;
    warp.completes &= ~(completes << lane);
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
    meeting = {mask, 0, operation, where};
    return meeting;
}

CUDA_ON_CPU_UNCHECKED static void close_meeting(Warp &warp, Meeting &meeting) {
    meeting = warp.meetings[--warp.num_meetings];
}

CUDA_ON_CPU_UNCHECKED bool meet_lanes(unsigned mask, Operation operation, Where where) {
    Warp &warp = *current_warp;
    const unsigned bit = 1u << current_lane;
    if (!(mask & bit)) fault("a lane outside the mask that it gives", where);
    Meeting &meeting = find_meeting(warp, mask, operation, where);
    meeting.arrived |= bit;
    if (meeting.arrived == (mask & warp.exists)) {
        close_meeting(warp, meeting);
        return true;
    }
    warp.runnable &= ~bit;
    return suspend();
}

CUDA_ON_CPU_UNCHECKED static void release_barrier() {
    block.barrier_result = block.predicates;
    block.predicates = 0;
    block.at_barrier = 0;
    for (unsigned i = 0; i < block.num_warps; i++) block.warps[i].runnable = block.warps[i].exists;
    block.patience = 1; // any warp may go on first
}

CUDA_ON_CPU_UNCHECKED int sync_block(bool predicate, Where where) {
    if (block.live != block.num_threads)
        fault("__syncthreads after other threads of the block returned", where);
    if (block.at_barrier && block.barrier_where.line != where.line)
        fault("divergent __syncthreads: another thread waits in a different one", where);
    block.barrier_where = where;
    block.predicates += predicate;
    order_release(&block.at_barrier);
    current_warp->runnable &= ~(1u << current_lane);
    if (++block.at_barrier == block.num_threads) release_barrier();
    suspend();
    order_acquire(&block.at_barrier);
    return block.barrier_result;
}

// ---- a thread's life ----------------------------------------------------------------------------

// A lane that returns may be the one that others waited for.
CUDA_ON_CPU_UNCHECKED static void complete_without(Warp &warp) {
    for (int i = 0; i < warp.num_meetings; i++) {
        Meeting &meeting = warp.meetings[i];
        if (meeting.arrived != (meeting.mask & warp.exists)) continue;
        const unsigned bit = meeting.arrived & -meeting.arrived;
        warp.completes |= bit;
        warp.runnable |= bit;
        close_meeting(warp, meeting);
        i--;
    }
}

CUDA_ON_CPU_UNCHECKED static void thread_returned() {
    Warp &warp = *current_warp;
    const unsigned bit = 1u << current_lane;
    if (block.at_barrier)
        fault("a thread returned while others wait in __syncthreads", block.barrier_where);
    if (warp.matrix_moves < 0) warp.matrix_moves = current->matrix_moves;
    if (warp.matrix_moves != current->matrix_moves)
        fault("a wmma load or store that only some lanes of the warp made", Where::here());
    warp.exists &= ~bit;
    warp.runnable &= ~bit;
    block.live--;
    if (warp.num_meetings) complete_without(warp);
}

CUDA_ON_CPU_UNCHECKED static void run_thread() {
    threadIdx = current->index;
    order_acquire(&launch_token);
    kernel_now->call(kernel_now->arguments);
    order_release(&block_token);
    thread_returned();
}

CUDA_ON_CPU_UNCHECKED void work_on_fiber() {
    for (;;) {
        run_thread();
        Warp &warp = *current_warp;
        const unsigned lane = current_lane;
        if (!choose_thread()) {
            if (block.live) report_deadlock();
            current = nullptr;
            switch_fibers(give_fiber_back(warp, lane), host_place());
            continue;
        }
        const bool started = current_warp->started >> current_lane & 1;
        if (!started && inherit_fiber(warp, lane, *current_warp, current_lane)) continue;
        if (!started) take_fiber(*current_warp, current_lane);
        switch_fibers(give_fiber_back(warp, lane), place_of_current());
    }
}

// ---- a grid's life ------------------------------------------------------------------------------

// Once for each launch: what all blocks have in common.
static void prepare_block(const Kernel &launched) {
    const dim3 size = launched.block;
    block.greedy = settings().schedule == Schedule::greedy;
    block.num_threads = size.x * size.y * size.z;
    block.num_warps = (block.num_threads + WARP_SIZE - 1) / WARP_SIZE;
    for (unsigned i = 0; i < block.num_threads; i++)
        block.threads[i].index = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
}

CUDA_ON_CPU_UNCHECKED static void reset_block() {
    for (unsigned i = 0; i < block.num_threads; i++) {
        Thread &thread = block.threads[i];
        thread.matrix_moves = 0;
        thread.num_copies = 0;
        thread.open_group = 0;
    }
    for (unsigned i = 0; i < block.num_warps; i++) {
        Warp &warp = block.warps[i];
        const unsigned lanes = block.num_threads - i * WARP_SIZE;
        warp.number = i;
        warp.exists = lanes >= WARP_SIZE ? ~0u : (1u << lanes) - 1;
        warp.runnable = warp.exists;
        warp.started = 0;
        warp.completes = 0;
        warp.matrix_moves = -1;
        warp.num_meetings = 0;
        warp.threads = block.threads + i * WARP_SIZE;
    }
    block.live = block.num_threads;
    block.at_barrier = 0;
    block.predicates = 0;
    block.downwards = random_below(2);
    current_warp = nullptr;
}

CUDA_ON_CPU_UNCHECKED static void run_block() {
    reset_block();
    order_release(&launch_token);
    choose_thread();
    take_fiber(*current_warp, current_lane);
    switch_fibers(host_place(), place_of_current());
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
    kernel_now = &launched;
    gridDim = grid;
    blockDim = launched.block;
    prepare_block(launched);
    enter_host(block.num_threads);
    prepare_shared_memory(launched.shared_bytes);
    for (unsigned i : shuffled(grid.x * grid.y * grid.z)) {
        blockIdx = {i % grid.x, i / grid.x % grid.y, i / (grid.x * grid.y)};
        poison_shared_memory(launched.shared_bytes);
        run_block();
    }
    leave_shared_memory();
    kernel_now = nullptr;
}

} // namespace cuda_on_cpu
