// Which sanitizer this build has, and what the runner tells it. Without one, all of it is empty.
#ifndef CUDA_ON_CPU_SANITIZERS_H
#define CUDA_ON_CPU_SANITIZERS_H

#ifndef __has_feature
#define CUDA_ON_CPU_HAS(name) 0
#else
#define CUDA_ON_CPU_HAS(name) __has_feature(name)
#endif

#if defined(__SANITIZE_ADDRESS__) || CUDA_ON_CPU_HAS(address_sanitizer)
#define CUDA_ON_CPU_ASAN 1
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define CUDA_ON_CPU_ASAN 0
#endif

#if defined(__SANITIZE_THREAD__) || CUDA_ON_CPU_HAS(thread_sanitizer)
#define CUDA_ON_CPU_TSAN 1
extern "C" {
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
void __tsan_acquire(void *token);
void __tsan_release(void *token);
}
#else
#define CUDA_ON_CPU_TSAN 0
#endif

#if CUDA_ON_CPU_HAS(memory_sanitizer)
#define CUDA_ON_CPU_MSAN 1
#include <sanitizer/msan_interface.h>
#else
#define CUDA_ON_CPU_MSAN 0
#endif

// UNCHECKED: what stands for hardware, not for the program: the scheduler, and registers of other
// lanes read by a warp-wide instruction. ThreadSanitizer must not see those accesses.
#if CUDA_ON_CPU_TSAN && defined(__clang__)
#define CUDA_ON_CPU_UNCHECKED \
    __attribute__((no_sanitize("thread"), disable_sanitizer_instrumentation))
#elif CUDA_ON_CPU_TSAN
#define CUDA_ON_CPU_UNCHECKED __attribute__((no_sanitize("thread")))
#else
#define CUDA_ON_CPU_UNCHECKED
#endif

namespace cuda_on_cpu {

// What happened before order_release(token) happened before what follows order_acquire(token).
CUDA_ON_CPU_UNCHECKED inline void order_release(void *token) {
#if CUDA_ON_CPU_TSAN
    __tsan_release(token);
#endif
    (void)token;
}

CUDA_ON_CPU_UNCHECKED inline void order_acquire(void *token) {
#if CUDA_ON_CPU_TSAN
    __tsan_acquire(token);
#endif
    (void)token;
}

} // namespace cuda_on_cpu

#endif
