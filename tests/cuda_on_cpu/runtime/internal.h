// internal.h - what the parts of the runtime know of each other.
#ifndef CUDA_ON_CPU_INTERNAL_H
#define CUDA_ON_CPU_INTERNAL_H

#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <stdio.h>
#include <stdlib.h>
#include <thread>
#include <vector>

#include "../executor.h"
#include "../include/cuda_on_cpu.h"
#include "../include/cuda_runtime.h"

namespace cuda_on_cpu {

const size_t PAGE = 4096;
const unsigned char POISON = 0xff; // fills memory that nobody has written

inline size_t round_up(size_t bytes, size_t unit) {
    return (bytes + unit - 1) / unit * unit;
}

// The objects of one kind that exist. A plain list, as they are few; and of templates only, since
// MemorySanitizer does not see into what the C++ library has compiled.
template <class T> struct Registry {
    std::vector<T *> objects;

    bool has(const T *object) const {
        return std::find(objects.begin(), objects.end(), object) != objects.end();
    }
    T *add(T *object) {
        objects.push_back(object);
        return object;
    }
    void remove(const T *object) {
        objects.erase(std::find(objects.begin(), objects.end(), object));
    }
};

// ---- settings.cpp: the environment, read once ---------------------------------------------------

enum { MAX_DEVICES = 8 };

enum class Schedule { shuffled, greedy };

struct Settings {
    uint64_t seed;
    uint64_t fragment_key; // of the layout of wmma fragments
    Schedule schedule;
    bool eager_streams; // run each operation when it is asked for
    bool guard;         // host code that touches device memory faults
    size_t memory;      // bytes of each device
    int arch;           // compute capability times ten
    int devices;
    bool old_driver;
    cudaError_t kernel_error; // of every launch
};

Settings &settings();
bool known_arch(int arch);

// ---- fibers.cpp ---------------------------------------------------------------------------------

// Where a fiber waits: the stack pointer is kept apart, with those of the other lanes of a warp.
struct Place {
    Fiber *fiber;
    void **stack_pointer;
};

void switch_fibers(const Place &from, const Place &to);
Place host_place();
void enter_host(unsigned num_threads);
void take_fiber(Warp &warp, unsigned lane);
Place give_fiber_back(Warp &warp, unsigned lane);
bool inherit_fiber(const Warp &from, unsigned from_lane, Warp &to, unsigned to_lane);
bool below_a_stack(const Fiber *fiber, const void *address);

// ---- scheduler.cpp ------------------------------------------------------------------------------

// What a fiber does all its life: run `current`, then other threads.
[[noreturn]] void work_on_fiber();

// All orders come from one sequence of numbers; random_below is uniform in [0, bound).
void seed_orders(uint64_t seed);
unsigned random_below(unsigned bound);

const Kernel *running_kernel();

// ---- shared_memory.cpp --------------------------------------------------------------------------

// A block can have 48 KB of it, or up to this after cudaFuncSetAttribute (on sm_90).
enum { DEFAULT_SHARED_BYTES = 48 << 10, MAX_SHARED_BYTES = 227 << 10 };

void prepare_shared_memory(size_t dynamic_bytes);
void leave_shared_memory();
void poison_shared_memory(size_t dynamic_bytes);
bool beyond_shared_memory(const void *address);

// ---- symbols.cpp --------------------------------------------------------------------------------

// False if the program has no symbol for the address.
bool name_of_function(const void *address, char *name, size_t bytes);

// ---- fault.cpp ----------------------------------------------------------------------------------

void catch_faults();

// ---- device_memory.cpp --------------------------------------------------------------------------

// While one lives, device memory may be touched: the device works.
struct DeviceAccess {
    DeviceAccess();
    ~DeviceAccess();
};

enum class Space { device, pinned, pageable };

struct Allocation {
    char *memory;
    size_t bytes;
    Space space;
    int device;
    char *mapping; // with the page that guards its end; null if from the heap
    size_t mapping_bytes;
};

// The allocation that holds the address, or null; likewise the one that ends just before it.
const Allocation *find_allocation(const void *address);
const Allocation *find_allocation_before(const void *address);
void free_all_allocations(int device);

// ---- streams.cpp --------------------------------------------------------------------------------

// Queues an operation; it runs when the host waits for something.
cudaError_t submit(cudaStream_t stream, std::function<void()> run);

void drain_device(int device);
void drain_stream(cudaStream_t stream);

// ---- graphs.cpp ---------------------------------------------------------------------------------

bool is_capturing(cudaStream_t stream);
// Whether a capture forbids calls that can't be recorded, such as cudaMalloc.
bool capture_forbids_calls();
void invalidate_captures();

// ---- calls.cpp: what all functions of the API have in common ------------------------------------

struct Counters {
    cuda_on_cpu_counters values;
    int kernel_to_fault; // counts down to 1; 0: none
};

Counters &counters();

std::recursive_mutex &runtime_mutex();

int current_device();

// One call of the API: takes the lock, says whether the call may go on, and keeps its error.
class Call {
  public:
    enum Kind {           // bits
        plain = 0,        // allowed whenever there is a device
        no_device = 1,    // allowed without one
        not_captured = 2, // waits or allocates: an error while a stream is captured
        gives_back = 4,   // allowed when the device has faulted, so that a test can tell its leaks
    };

    // A null name can't be made to fail by cuda_on_cpu_fail_call.
    explicit Call(const char *name, int kind = plain);
    bool refused() const {
        return error != cudaSuccess;
    }
    cudaError_t refusal() const {
        return error;
    }
    // Records the error for cudaGetLastError and returns it.
    cudaError_t done(cudaError_t result);

  private:
    std::lock_guard<std::recursive_mutex> lock;
    cudaError_t error;
};

void set_last_error(cudaError_t error);

// The device faulted: every call fails from now on.
void set_device_fault(cudaError_t error);
cudaError_t device_fault();

// A failure ordered by cuda_on_cpu_fail_call, or 0.
int ordered_failure(const char *function);

} // namespace cuda_on_cpu

#endif
