// Fibers: stacks, and the switch from one to another. They are made once and reused by all blocks
// of all launches.
#include <sys/mman.h>
#include "internal.h"

#if !defined(__x86_64__) && !defined(CUDA_ON_CPU_UCONTEXT)
#define CUDA_ON_CPU_UCONTEXT
#endif

#ifdef CUDA_ON_CPU_UCONTEXT
#include <ucontext.h>
#endif

namespace cuda_on_cpu {

namespace {

// Locals of one CUDA thread, and the runner's own frames below them. A GPU allows 512 KB, a kernel
// of ours uses a few KB; sanitizers make frames several times larger.
const size_t STACK_BYTES = 256 << 10;

} // namespace

struct Fiber {
    char *stack; // lowest usable address; a page below it is no memory at all
    size_t stack_bytes;
    void *fake_stack;    // AddressSanitizer's
    void *tsan_fiber;    // ThreadSanitizer's
    void *stack_pointer; // while it is in the pool
#ifdef CUDA_ON_CPU_UCONTEXT
    ucontext_t context;
#endif
    Fiber *next_free;
};

static Fiber host_fiber; // the stack that launched: entered last when a block is done
static void *host_stack_pointer;
static int num_fibers;

// Fibers that no thread uses: one pool for all. Under ThreadSanitizer each thread of a block keeps
// its own, or one thread's locals would seem to race with the locals that another had there.
static Fiber *free_fibers[CUDA_ON_CPU_TSAN ? MAX_THREADS : 1];

CUDA_ON_CPU_UNCHECKED static Fiber *&pool_of(unsigned thread) {
    return free_fibers[CUDA_ON_CPU_TSAN ? thread : 0];
}

// ---- the switch ---------------------------------------------------------------------------------

#ifdef CUDA_ON_CPU_UCONTEXT

CUDA_ON_CPU_UNCHECKED static void switch_stacks(const Place &from, const Place &to) {
    swapcontext(&from.fiber->context, &to.fiber->context);
}

CUDA_ON_CPU_UNCHECKED static void prepare_stack(Fiber &fiber, void (*entry)()) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = fiber.stack_bytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
}

#else

// Saves what the calling convention preserves. It leaves by a jump and not by `ret`: lanes run the
// same code, so the jump's target is nearly always the last one, while a return address from
// another stack is never what the processor's return predictor expects.
extern "C" void cuda_on_cpu_switch_stacks(void **save, void *to);
__asm__(".text\n"
        ".type cuda_on_cpu_switch_stacks, @function\n"
        "cuda_on_cpu_switch_stacks:\n"
        "    push %rbp\n"
        "    push %rbx\n"
        "    push %r12\n"
        "    push %r13\n"
        "    push %r14\n"
        "    push %r15\n"
        "    mov %rsp, (%rdi)\n"
        "    mov %rsi, %rsp\n"
        "    pop %r15\n"
        "    pop %r14\n"
        "    pop %r13\n"
        "    pop %r12\n"
        "    pop %rbx\n"
        "    pop %rbp\n"
        "    pop %rcx\n"
        "    jmp *%rcx\n"
        ".size cuda_on_cpu_switch_stacks, . - cuda_on_cpu_switch_stacks\n");

CUDA_ON_CPU_UNCHECKED static void switch_stacks(const Place &from, const Place &to) {
    cuda_on_cpu_switch_stacks(from.stack_pointer, *to.stack_pointer);
}

// The stack as the switch leaves one: six registers, then where to go on. At the entry of a
// function the stack is 8 short of a multiple of 16, as after a call.
CUDA_ON_CPU_UNCHECKED static void prepare_stack(Fiber &fiber, void (*entry)()) {
    // Stacks lie a power of two apart. Without this shift the same local of all 32 lanes would
    // fall into one set of the cache, which holds 8 lines or so.
    const size_t shift = static_cast<size_t>(num_fibers) * 11 % 64 * 64;
    void **top = reinterpret_cast<void **>(fiber.stack + fiber.stack_bytes - shift - 64);
    *--top = nullptr; // the return address of entry, which never returns
    *--top = reinterpret_cast<void *>(entry);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    fiber.stack_pointer = top;
}

#endif

#if CUDA_ON_CPU_ASAN

static Fiber *came_from;

// AddressSanitizer wants to know which stack is next, and when we are on it.
static void leave_for(Fiber *from, const Fiber *to) {
    came_from = from;
    __sanitizer_start_switch_fiber(&from->fake_stack, to->stack, to->stack_bytes);
}

static void arrived_on(Fiber *fiber) {
    const void *bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(fiber->fake_stack, &bottom, &bytes);
    if (came_from != &host_fiber) return;
    host_fiber.stack = static_cast<char *>(const_cast<void *>(bottom));
    host_fiber.stack_bytes = bytes;
}

#elif CUDA_ON_CPU_TSAN

// To ThreadSanitizer a fiber is a thread. The switch itself must not order anything (1).
CUDA_ON_CPU_UNCHECKED static void leave_for(Fiber *, const Fiber *to) {
    __tsan_switch_to_fiber(to->tsan_fiber, 1);
}
CUDA_ON_CPU_UNCHECKED static void arrived_on(Fiber *) {}

#else

static void leave_for(Fiber *, const Fiber *) {}
static void arrived_on(Fiber *) {}

#endif

CUDA_ON_CPU_UNCHECKED void switch_fibers(const Place &from, const Place &to) {
    leave_for(from.fiber, to.fiber);
    switch_stacks(from, to);
    arrived_on(from.fiber);
}

CUDA_ON_CPU_UNCHECKED Place host_place() {
    return {&host_fiber, &host_stack_pointer};
}

// ---- the pool -----------------------------------------------------------------------------------

CUDA_ON_CPU_UNCHECKED static void fiber_entry() {
    arrived_on(current_warp->fibers[current_lane]);
    work_on_fiber();
}

CUDA_ON_CPU_UNCHECKED static Fiber *make_fiber() {
    Fiber *fiber = new Fiber();
    char *memory = static_cast<char *>(mmap(nullptr, PAGE + STACK_BYTES, PROT_READ | PROT_WRITE,
                                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (memory == MAP_FAILED || mprotect(memory, PAGE, PROT_NONE) != 0)
        fault("no memory for the stacks of a block's threads", Where::here());
    fiber->stack = memory + PAGE;
    fiber->stack_bytes = STACK_BYTES;
    prepare_stack(*fiber, fiber_entry);
#if CUDA_ON_CPU_TSAN
    fiber->tsan_fiber = __tsan_create_fiber(0);
#endif
    num_fibers++;
    return fiber;
}

// Before a launch. ThreadSanitizer's fibers must all come from the host: it takes it that what a
// thread did before it made another one happened before all that the other does.
void enter_host(unsigned num_threads) {
#if CUDA_ON_CPU_TSAN
    host_fiber.tsan_fiber = __tsan_get_current_fiber();
    for (unsigned i = 0; i < num_threads; i++)
        if (!pool_of(i)) pool_of(i) = make_fiber();
#endif
    (void)num_threads;
}

// A fiber for a lane that has not run yet. Switching to it runs the current thread.
CUDA_ON_CPU_UNCHECKED void take_fiber(Warp &warp, unsigned lane) {
    Fiber *&first_free = pool_of(warp.number * WARP_SIZE + lane);
    Fiber *fiber = first_free;
    if (fiber) first_free = fiber->next_free;
    else fiber = make_fiber();
    warp.fibers[lane] = fiber;
    warp.stack_pointers[lane] = fiber->stack_pointer;
    warp.started |= 1u << lane;
}

// Back to the pool; it goes on from here when it is taken again.
CUDA_ON_CPU_UNCHECKED Place give_fiber_back(Warp &warp, unsigned lane) {
    Fiber *&first_free = pool_of(warp.number * WARP_SIZE + lane);
    Fiber *fiber = warp.fibers[lane];
    fiber->next_free = first_free;
    first_free = fiber;
    return {fiber, &fiber->stack_pointer};
}

// A lane that has not run yet goes on, without a switch, on the fiber of one that returned; false
// where fibers belong to threads.
CUDA_ON_CPU_UNCHECKED bool inherit_fiber(const Warp &from, unsigned from_lane, Warp &to,
                                         unsigned to_lane) {
    if (CUDA_ON_CPU_TSAN) return false;
    to.fibers[to_lane] = from.fibers[from_lane];
    to.started |= 1u << to_lane;
    return true;
}

// Whether the address is in the page below a stack: a thread's locals did not fit.
bool below_a_stack(const Fiber *fiber, const void *address) {
    const char *at = static_cast<const char *>(address);
    return fiber && at < fiber->stack && at >= fiber->stack - PAGE;
}

} // namespace cuda_on_cpu
