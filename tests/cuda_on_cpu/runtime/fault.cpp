// Faults: one line that says what happened where, then abort, so that a debugger stops there.
#include <signal.h>
#include <stdarg.h>
#include <ucontext.h>
#include "internal.h"

namespace cuda_on_cpu {

const char *operation_name(Operation operation) {
    switch (operation) {
    case Operation::syncwarp: return "__syncwarp";
    case Operation::shuffle: return "a shuffle";
    case Operation::vote: return "a vote";
    case Operation::ldmatrix: return "ldmatrix";
    case Operation::mma: return "mma";
    }
    return "";
}

// Without the folders: the lines are compared in tests.
static const char *file_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

// One line from several writes, which a test may print beside.
struct Line {
    char text[1024];
    int length;

    __attribute__((format(printf, 2, 3))) void add(const char *format, ...) {
        const size_t room = sizeof text - static_cast<size_t>(length);
        va_list arguments;
        va_start(arguments, format);
        const int wanted = vsnprintf(text + length, room, format, arguments);
        va_end(arguments);
        length += std::min(wanted, static_cast<int>(room) - 1);
    }
};

static void add_kernel(Line &line, const Thread &thread) {
    const Kernel &kernel = *running_kernel();
    char name[400];
    const bool found = name_of_function(kernel.function, name, sizeof name);
    line.add(": kernel %s, block (%u,%u,%u), thread (%u,%u,%u)", found ? name : kernel.name,
             blockIdx.x, blockIdx.y, blockIdx.z, thread.index.x, thread.index.y, thread.index.z);
}

// `where` or, for faults that the processor finds, `code`: the address of the instruction.
static void print_fault(const Thread *thread, const char *what, const Where *where,
                        const void *code) {
    Line line = {};
    char name[400];
    line.add("cuda_on_cpu: %s", what);
    if (thread && running_kernel()) add_kernel(line, *thread);
    if (where) line.add(", %s:%d", file_name(where->file), where->line);
    if (code && name_of_function(code, name, sizeof name)) line.add(", in %s", name);
    fprintf(stderr, "%s\n", line.text);
    fflush(stderr);
}

void fault_in(const Warp &warp, unsigned lane, const char *what, Where where) {
    print_fault(&warp.threads[lane], what, &where, nullptr);
    abort();
}

void fault(const char *what, Where where) {
    print_fault(current, what, &where, nullptr);
    abort();
}

// ---- faults that the processor finds ------------------------------------------------------------

static size_t offset_in(const Allocation &allocation, const void *address) {
    return static_cast<size_t>(static_cast<const char *>(address) - allocation.memory);
}

static void describe_address(const void *address, char *what, size_t bytes) {
    const Allocation *inside = find_allocation(address);
    const Allocation *before = find_allocation_before(address);
    if (current && below_a_stack(current_warp->fibers[current_lane], address))
        snprintf(what, bytes, "the locals of a thread are larger than its stack");
    else if (current && beyond_shared_memory(address))
        snprintf(what, bytes, "an access beyond dynamic shared memory");
    else if (inside && !current)
        snprintf(what, bytes, "host code touches device memory (byte %zu of %zu)",
                 offset_in(*inside, address), inside->bytes);
    else if (before)
        snprintf(what, bytes, "an access to byte %zu of %zu that were allocated",
                 offset_in(*before, address), before->bytes);
    else snprintf(what, bytes, "an access to address %p, which is no memory", address);
}

static const void *code_address(const void *context) {
#ifdef __x86_64__
    const ucontext_t *state = static_cast<const ucontext_t *>(context);
    return reinterpret_cast<const void *>(state->uc_mcontext.gregs[REG_RIP]);
#else
    (void)context;
    return nullptr;
#endif
}

// The line of the program is not known here: a debugger shows it.
static void on_signal(int, siginfo_t *info, void *context) {
    char what[160] = "a misaligned vector access, or a wild pointer";
    // For those the processor gives no address.
    if (info->si_code != SI_KERNEL) describe_address(info->si_addr, what, sizeof what);
    print_fault(current, what, nullptr, code_address(context));
    abort();
}

// For the calling thread. On a stack of its own, as the fault may be that a fiber's stack is full;
// threads can share it, as only one at a time is the device.
void catch_faults() {
    if (CUDA_ON_CPU_ASAN || CUDA_ON_CPU_MSAN) return; // they have better words for it
    static char handler_stack[64 << 10];
    stack_t stack = {};
    stack.ss_sp = handler_stack;
    stack.ss_size = sizeof handler_stack;
    sigaltstack(&stack, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
}

} // namespace cuda_on_cpu
