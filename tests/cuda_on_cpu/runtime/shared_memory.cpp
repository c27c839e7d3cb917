// Shared memory: one block runs at a time, so all blocks use the same bytes. They are filled with
// 0xff before each, which is NaN in every floating-point format: a value read before it was written
// spoils what it touches.
#include <link.h>
#include <sys/mman.h>
#include "internal.h"

// The ends of the section that __shared__ variables lie in if clang compiled them; else null.
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

// Where __shared__ variables are: in their section or among the program's thread-local variables.
// The latter are not all ours, so they are saved for the time of a launch: no device code and
// nothing of the runtime that runs meanwhile has any.
char *shared_begin, *shared_end;
std::vector<char> saved;

// The part of them that the first block of this launch wrote: what the others must find poisoned.
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

// The program itself is asked first. If it is alone it is linked statically, and the thread-local
// variables are the C library's too: better not to touch them.
static int find_thread_locals(dl_phdr_info *info, size_t, void *objects) {
    if (++*static_cast<int *>(objects) > 1) return 1;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type != PT_TLS) continue;
        shared_begin = static_cast<char *>(info->dlpi_tls_data);
        shared_end = shared_begin + info->dlpi_phdr[i].p_memsz;
    }
    return 0;
}

static void find_shared_variables() {
    int objects = 0;
    shared_begin = __start_cuda_on_cpu_shared;
    shared_end = __stop_cuda_on_cpu_shared;
    const bool elsewhere = CUDA_ON_CPU_ASAN || CUDA_ON_CPU_TSAN || CUDA_ON_CPU_MSAN;
    if (shared_begin || elsewhere) return;
    dl_iterate_phdr(find_thread_locals, &objects);
    if (objects == 1) shared_begin = shared_end = nullptr;
    saved.assign(shared_begin, shared_end);
}

void leave_shared_memory() {
    if (!saved.empty()) memcpy(shared_begin, saved.data(), saved.size());
    saved.clear();
}

void prepare_shared_memory(size_t dynamic_bytes) {
    if (!arena) make_arena();
    find_shared_variables();
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
    touched_begin = shared_begin;
    touched_end = shared_end;
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
