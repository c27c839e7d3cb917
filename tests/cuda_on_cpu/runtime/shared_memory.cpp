// Shared memory: one block runs at a time, so all blocks use the same bytes. They are filled with
// 0xff before each, which is NaN in every floating-point format: a value read before it was written
// spoils what it touches.
#include <sys/mman.h>
#include "internal.h"

// The ends of the section that __shared__ variables lie in; null where there are none (and under
// AddressSanitizer, which checks the variables of its own choice of sections only).
extern "C" {
extern char __start_cuda_on_cpu_shared[] __attribute__((weak));
extern char __stop_cuda_on_cpu_shared[] __attribute__((weak));
}

namespace cuda_on_cpu {

unsigned char *dynamic_shared;

namespace {

const size_t SHARED_ALIGNMENT = 128;

// Dynamic shared memory ends at the end of this arena, so that an index beyond it meets the page
// that is no memory.
unsigned char *arena;
const size_t ARENA_BYTES = (MAX_SHARED_BYTES + PAGE - 1) / PAGE * PAGE;

// The part of the __shared__ variables that the first block of this launch wrote: what the others
// need to find poisoned.
char *touched_begin, *touched_end;
int blocks_begun;

} // namespace

static void make_arena() {
    void *memory = mmap(nullptr, ARENA_BYTES + PAGE, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fault("no memory for shared memory", Where::here());
    arena = static_cast<unsigned char *>(memory);
    mprotect(arena + ARENA_BYTES, PAGE, PROT_NONE);
}

bool beyond_shared_memory(const void *address) {
    const unsigned char *at = static_cast<const unsigned char *>(address);
    return arena && at >= arena + ARENA_BYTES && at < arena + ARENA_BYTES + PAGE;
}

void prepare_shared_memory(size_t dynamic_bytes) {
    if (!arena) make_arena();
    dynamic_shared = arena + ARENA_BYTES - round_up(dynamic_bytes, SHARED_ALIGNMENT);
#if CUDA_ON_CPU_ASAN
    dynamic_shared = arena; // AddressSanitizer's own guard follows, exact to the byte
    ASAN_POISON_MEMORY_REGION(arena, ARENA_BYTES);
    ASAN_UNPOISON_MEMORY_REGION(dynamic_shared, dynamic_bytes);
#endif
    blocks_begun = 0;
}

static void fill(void *memory, size_t bytes) {
    if (bytes) memset(memory, POISON, bytes);
#if CUDA_ON_CPU_MSAN
    __msan_poison(memory, bytes);
#endif
}

static bool is_poison(const char *at) {
    return static_cast<unsigned char>(*at) == POISON;
}

static void touch_all() {
    touched_begin = __start_cuda_on_cpu_shared;
    touched_end = __stop_cuda_on_cpu_shared;
}

// After the first block: what it left other than poisoned. MemorySanitizer would report the look.
static void find_touched() {
    if (CUDA_ON_CPU_MSAN) return;
    while (touched_begin < touched_end && is_poison(touched_begin)) touched_begin++;
    while (touched_end > touched_begin && is_poison(touched_end - 1)) touched_end--;
}

void poison_shared_memory(size_t dynamic_bytes) {
    fill(dynamic_shared, dynamic_bytes);
    if (blocks_begun == 0) touch_all();
    if (blocks_begun == 1) find_touched();
    blocks_begun++;
    fill(touched_begin, static_cast<size_t>(touched_end - touched_begin));
}

} // namespace cuda_on_cpu
