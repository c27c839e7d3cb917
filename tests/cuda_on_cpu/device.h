// device.h - CUDA C++ for an ordinary compiler. Included before anything else in a file of kernels:
//
//   g++ -std=c++17 -x c++ -include device.h -I include -fno-strict-aliasing kernels.cu
//
// -fno-strict-aliasing because kernels read 16-bit numbers through uint4, which nvcc allows.
#ifndef CUDA_ON_CPU_DEVICE_H
#define CUDA_ON_CPU_DEVICE_H

#define MPTK_ON_CPU 1

#include <new>
#include <math.h>
#include <tuple>
#include <type_traits>
#include "executor.h"
#include "float16.h"
#include "include/cuda_runtime.h"

// ---- qualifiers ---------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

// One block runs at a time, so a static variable is what its threads share. The runtime fills it
// with NaN before each block (runtime/shared_memory.cpp) and must know where it is: clang puts it
// into a section; gcc ignores that in templates, but thread-local variables lie together too.
// AddressSanitizer and ThreadSanitizer look after plain static variables best.
#if CUDA_ON_CPU_ASAN || CUDA_ON_CPU_TSAN
#define __shared__ static
#elif defined(__clang__)
#define __shared__ static __attribute__((section("cuda_on_cpu_shared")))
#else
#define __shared__ static __thread
#endif

#define MPTK_DYN_SMEM(type, name) \
    type *const name = reinterpret_cast<type *>(cuda_on_cpu::dynamic_shared)

// ---- launching ----------------------------------------------------------------------------------

// MPTK_LAUNCH(kernel, grid, block, dynamic shared bytes, stream, arguments...), as
// kernel<<<grid, block, bytes, stream>>>(arguments...). Template kernels stand in parentheses.
#define MPTK_LAUNCH(kernel, grid, block, bytes, ...) \
    cuda_on_cpu::launch(#kernel, kernel, grid, block, bytes, __VA_ARGS__)

namespace cuda_on_cpu {

// Queues the kernel in the stream. `arguments` is copied by `copy`, and the copy lives as long as
// the kernel may still run, which for one in a graph is long.
cudaError_t enqueue_kernel(const Kernel &kernel, size_t arguments_bytes,
                           void (*copy)(void *to, const void *from), void (*destroy)(void *),
                           cudaStream_t stream);

// The kernel and its arguments as the kernel takes them, by value.
template <class... P> struct Invocation {
    void (*kernel)(P...);
    std::tuple<std::decay_t<P>...> arguments;

    static void call(const void *self) {
        const Invocation &invocation = *static_cast<const Invocation *>(self);
        std::apply(invocation.kernel, invocation.arguments);
    }
    static void copy(void *to, const void *from) {
        new (to) Invocation(*static_cast<const Invocation *>(from));
    }
    static void destroy(void *self) {
        static_cast<Invocation *>(self)->~Invocation();
    }
};

// Arguments beyond this do not fit a launch on a GPU.
enum { MAX_ARGUMENT_BYTES = 4096 };

template <class... P, class... A>
void launch(const char *name, void (*kernel)(P...), dim3 grid, dim3 block, size_t bytes,
            void *stream, A &&...arguments) {
    typedef Invocation<P...> Call;
    static_assert(sizeof...(P) == sizeof...(A), "a kernel takes exactly its arguments");
    static_assert((sizeof(std::decay_t<P>) + ... + 0) <= MAX_ARGUMENT_BYTES,
                  "the arguments of a kernel are at most 4 KB");
    const Call call = {kernel, {static_cast<std::decay_t<P>>(arguments)...}};
    const void *function = reinterpret_cast<const void *>(kernel);
    const Kernel launched = {name, function, grid, block, bytes, Call::call, &call};
    enqueue_kernel(launched, sizeof call, Call::copy, Call::destroy,
                   static_cast<cudaStream_t>(stream));
}

} // namespace cuda_on_cpu

// ---- built-in variables -------------------------------------------------------------------------

// threadIdx, blockIdx, blockDim and gridDim are in executor.h.
static const int warpSize = cuda_on_cpu::WARP_SIZE;

// ---- barriers and fences ------------------------------------------------------------------------

inline void __syncthreads(cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    cuda_on_cpu::sync_block(false, where);
}
inline int __syncthreads_count(int predicate,
                               cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    return cuda_on_cpu::sync_block(predicate != 0, where);
}
inline int __syncthreads_or(int predicate, cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    return cuda_on_cpu::sync_block(predicate != 0, where) != 0;
}
inline int __syncthreads_and(int predicate, cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    return cuda_on_cpu::sync_block(predicate == 0, where) == 0;
}

// The only warp-wide operation that orders memory.
inline void __syncwarp(unsigned mask = 0xffffffffu,
                       cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    using namespace cuda_on_cpu;
    Warp *const warp = current_warp;
    order_release(warp);
    meet(mask, Operation::syncwarp, where, [](Warp &, unsigned) CUDA_ON_CPU_UNCHECKED {});
    order_acquire(warp);
}

// Threads run one at a time, so memory is in order without them; they are for ThreadSanitizer.
inline void __threadfence() {
    cuda_on_cpu::order_release(&cuda_on_cpu::fence_token);
    cuda_on_cpu::order_acquire(&cuda_on_cpu::fence_token);
}
inline void __threadfence_block() {
    __threadfence();
}
inline void __threadfence_system() {
    __threadfence();
}

[[noreturn]] inline void __trap(cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    cuda_on_cpu::fault("__trap", where);
}

// ---- shuffles and votes -------------------------------------------------------------------------

namespace cuda_on_cpu {

// The value that the lane `source` of this segment brought.
template <class T>
CUDA_ON_CPU_UNCHECKED inline T shuffle(unsigned mask, T value, int source, Where where) {
    static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_trivially_copyable<T>::value,
                  "shuffles move at most 8 bytes");
    Warp &warp = *current_warp;
    const unsigned lane = current_lane;
    memcpy(&warp.in[lane], &value, sizeof value);
    warp.source[lane] = source;
    meet(mask, Operation::shuffle, where, [where](Warp &w, unsigned lanes) CUDA_ON_CPU_UNCHECKED {
        for (unsigned rest = lanes; rest; rest &= rest - 1) {
            const unsigned reader = static_cast<unsigned>(__builtin_ctz(rest));
            if (!(lanes >> w.source[reader] & 1))
                fault_in(w, reader, "a shuffle reads a lane that is not there", where);
            w.out[reader] = w.in[w.source[reader]];
        }
    });
    memcpy(&value, &warp.out[lane], sizeof value);
    return value;
}

// A lane reads its own value where the source lies outside its segment of `width` lanes.
CUDA_ON_CPU_UNCHECKED inline int in_segment(int source, int width) {
    const int lane = static_cast<int>(current_lane);
    const int first = lane & ~(width - 1);
    return source < first || source >= first + width ? lane : source;
}

CUDA_ON_CPU_UNCHECKED inline unsigned vote(unsigned mask, bool predicate, Where where) {
    Warp &warp = *current_warp;
    warp.in[current_lane] = predicate;
    meet(mask, Operation::vote, where, [](Warp &w, unsigned lanes) CUDA_ON_CPU_UNCHECKED {
        unsigned result = 0;
        for (unsigned rest = lanes; rest; rest &= rest - 1) {
            const int lane = __builtin_ctz(rest);
            result |= static_cast<unsigned>(w.in[lane]) << lane;
        }
        for (unsigned rest = lanes; rest; rest &= rest - 1) w.out[__builtin_ctz(rest)] = result;
    });
    return static_cast<unsigned>(warp.out[current_lane]);
}

} // namespace cuda_on_cpu

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32,
                     cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    const int first = static_cast<int>(cuda_on_cpu::current_lane) & ~(width - 1);
    return cuda_on_cpu::shuffle(mask, value, first + (source & (width - 1)), where);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                        cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    const int source = static_cast<int>(cuda_on_cpu::current_lane) - static_cast<int>(delta);
    return cuda_on_cpu::shuffle(mask, value, cuda_on_cpu::in_segment(source, width), where);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                          cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    const int source = static_cast<int>(cuda_on_cpu::current_lane) + static_cast<int>(delta);
    return cuda_on_cpu::shuffle(mask, value, cuda_on_cpu::in_segment(source, width), where);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32,
                         cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    const int source = static_cast<int>(cuda_on_cpu::current_lane) ^ lanes;
    return cuda_on_cpu::shuffle(mask, value, cuda_on_cpu::in_segment(source, width), where);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    return cuda_on_cpu::vote(mask, predicate != 0, where);
}
inline int __any_sync(unsigned mask, int predicate,
                      cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    return cuda_on_cpu::vote(mask, predicate != 0, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate,
                      cuda_on_cpu::Where where = cuda_on_cpu::Where::here()) {
    return cuda_on_cpu::vote(mask, predicate == 0, where) == 0;
}
// Any lanes may happen to run together: the lane alone is the answer that finds most mistakes.
inline unsigned __activemask() {
    return 1u << cuda_on_cpu::current_lane;
}

// ---- atomics ------------------------------------------------------------------------------------

// Relaxed, as on a GPU: they order nothing else.
namespace cuda_on_cpu {

template <class T, class Change> inline T atomic_change(T *address, Change change) {
    T old = __atomic_load_n(address, __ATOMIC_RELAXED);
    T wanted;
    do {
        wanted = change(old);
    } while (!__atomic_compare_exchange_n(address, &old, wanted, false, __ATOMIC_RELAXED,
                                          __ATOMIC_RELAXED));
    return old;
}

template <class Change> inline float atomic_change_float(float *address, Change change) {
    return bits_float(atomic_change(reinterpret_cast<uint32_t *>(address), [&](uint32_t old) {
        return float_bits(change(bits_float(old)));
    }));
}

} // namespace cuda_on_cpu

inline int atomicAdd(int *address, int value) {
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline unsigned atomicAdd(unsigned *address, unsigned value) {
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline unsigned long long atomicAdd(unsigned long long *address, unsigned long long value) {
    return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline float atomicAdd(float *address, float value) {
    return cuda_on_cpu::atomic_change_float(address, [=](float old) { return old + value; });
}
inline int atomicSub(int *address, int value) {
    return __atomic_fetch_sub(address, value, __ATOMIC_RELAXED);
}
inline unsigned atomicSub(unsigned *address, unsigned value) {
    return __atomic_fetch_sub(address, value, __ATOMIC_RELAXED);
}
template <class T> inline T atomicMax(T *address, T value) {
    return cuda_on_cpu::atomic_change(address, [=](T old) { return old < value ? value : old; });
}
template <class T> inline T atomicMin(T *address, T value) {
    return cuda_on_cpu::atomic_change(address, [=](T old) { return value < old ? value : old; });
}
template <class T> inline T atomicOr(T *address, T value) {
    return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}
template <class T> inline T atomicAnd(T *address, T value) {
    return __atomic_fetch_and(address, value, __ATOMIC_RELAXED);
}
template <class T> inline T atomicXor(T *address, T value) {
    return __atomic_fetch_xor(address, value, __ATOMIC_RELAXED);
}
template <class T> inline T atomicExch(T *address, T value) {
    return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
}
inline float atomicExch(float *address, float value) {
    return cuda_on_cpu::atomic_change_float(address, [=](float) { return value; });
}
template <class T> inline T atomicCAS(T *address, T expected, T value) {
    __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
    return expected;
}

// ---- numbers ------------------------------------------------------------------------------------

template <class T> inline T __ldg(const T *address) {
    return *address;
}
template <class T> inline T __ldcs(const T *address) {
    return *address;
}
template <class T> inline void __stcs(T *address, T value) {
    *address = value;
}

inline int __float_as_int(float value) {
    return static_cast<int>(cuda_on_cpu::float_bits(value));
}
inline unsigned __float_as_uint(float value) {
    return cuda_on_cpu::float_bits(value);
}
inline float __int_as_float(int bits) {
    return cuda_on_cpu::bits_float(static_cast<unsigned>(bits));
}
inline float __uint_as_float(unsigned bits) {
    return cuda_on_cpu::bits_float(bits);
}

// The fast forms of a GPU are less exact than these.
inline float rsqrtf(float x) {
    return 1.0f / sqrtf(x);
}
inline float __frsqrt_rn(float x) {
    return 1.0f / sqrtf(x);
}
inline float __fsqrt_rn(float x) {
    return sqrtf(x);
}
inline float __fdividef(float a, float b) {
    return a / b;
}
inline float __fdiv_rn(float a, float b) {
    return a / b;
}
inline float __fmaf_rn(float a, float b, float c) {
    return fmaf(a, b, c);
}
inline float __fadd_rn(float a, float b) {
    return a + b;
}
inline float __fmul_rn(float a, float b) {
    return a * b;
}
inline float __expf(float x) {
    return expf(x);
}
inline float __logf(float x) {
    return logf(x);
}
inline float __saturatef(float x) {
    return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f;
}
inline float __int2float_rn(int x) {
    return static_cast<float>(x);
}
inline float __uint2float_rn(unsigned x) {
    return static_cast<float>(x);
}
inline int __float2int_rn(float x) {
    return static_cast<int>(rintf(x));
}

inline unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    __extension__ typedef unsigned __int128 Wide;
    return static_cast<unsigned long long>(static_cast<Wide>(a) * b >> 64);
}
inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}
inline int __clz(int x) {
    return x ? __builtin_clz(static_cast<unsigned>(x)) : 32;
}
inline int __ffs(int x) {
    return __builtin_ffs(x);
}
inline unsigned __brev(unsigned x) {
    unsigned result = 0;
    for (int i = 0; i < 32; i++) result |= (x >> i & 1) << (31 - i);
    return result;
}

// Overloads and not a template, so that mixed types convert as they do in CUDA.
#define CUDA_ON_CPU_MIN_MAX(T) \
    inline T min(T a, T b) { \
        return b < a ? b : a; \
    } \
    inline T max(T a, T b) { \
        return a < b ? b : a; \
    }
CUDA_ON_CPU_MIN_MAX(int)
CUDA_ON_CPU_MIN_MAX(unsigned)
CUDA_ON_CPU_MIN_MAX(long)
CUDA_ON_CPU_MIN_MAX(unsigned long)
CUDA_ON_CPU_MIN_MAX(long long)
CUDA_ON_CPU_MIN_MAX(unsigned long long)
#undef CUDA_ON_CPU_MIN_MAX

// A NaN loses against a number, as in CUDA.
inline float min(float a, float b) {
    return fminf(a, b);
}
inline float max(float a, float b) {
    return fmaxf(a, b);
}
inline double min(double a, double b) {
    return fmin(a, b);
}
inline double max(double a, double b) {
    return fmax(a, b);
}
inline unsigned min(int a, unsigned b) {
    return min(static_cast<unsigned>(a), b);
}
inline unsigned min(unsigned a, int b) {
    return min(a, static_cast<unsigned>(b));
}
inline unsigned max(int a, unsigned b) {
    return max(static_cast<unsigned>(a), b);
}
inline unsigned max(unsigned a, int b) {
    return max(a, static_cast<unsigned>(b));
}

inline int2 make_int2(int x, int y) {
    return {x, y};
}
inline int4 make_int4(int x, int y, int z, int w) {
    return {x, y, z, w};
}
inline uint2 make_uint2(unsigned x, unsigned y) {
    return {x, y};
}
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) {
    return {x, y, z};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}
inline float2 make_float2(float x, float y) {
    return {x, y};
}
inline float3 make_float3(float x, float y, float z) {
    return {x, y, z};
}
inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}
inline uchar4 make_uchar4(unsigned char x, unsigned char y, unsigned char z, unsigned char w) {
    return {x, y, z, w};
}

#endif
