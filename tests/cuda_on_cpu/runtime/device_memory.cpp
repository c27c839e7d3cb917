// cudaMalloc and what copies between memories. An allocation ends at a page that is no memory, so
// an index beyond it faults; while the device does not work its memory can't be touched at all, so
// host code that does faults too. Fresh memory is full of NaN.
#include <sys/mman.h>
#include "internal.h"

namespace cuda_on_cpu {

namespace {

const size_t ALIGNMENT = 256; // of cudaMalloc, by its documentation

std::vector<Allocation> allocations; // in order of address
size_t used_bytes[MAX_DEVICES];
int access_depth;

} // namespace

// ---- access -------------------------------------------------------------------------------------

static void set_access(const Allocation &allocation, bool allowed) {
    if (allocation.space != Space::device || !settings().guard) return;
#if CUDA_ON_CPU_ASAN
    if (allowed) ASAN_UNPOISON_MEMORY_REGION(allocation.memory, allocation.bytes);
    else ASAN_POISON_MEMORY_REGION(allocation.memory, allocation.bytes);
#else
    mprotect(allocation.mapping, allocation.mapping_bytes - PAGE,
             allowed ? PROT_READ | PROT_WRITE : PROT_NONE);
#endif
}

DeviceAccess::DeviceAccess() {
    if (access_depth++) return;
    for (const Allocation &allocation : allocations) set_access(allocation, true);
}

DeviceAccess::~DeviceAccess() {
    if (--access_depth) return;
    for (const Allocation &allocation : allocations) set_access(allocation, false);
}

// ---- allocations --------------------------------------------------------------------------------

// The first allocation that begins beyond the address.
static std::vector<Allocation>::iterator first_beyond(const void *address) {
    return std::upper_bound(allocations.begin(), allocations.end(),
                            static_cast<const char *>(address),
                            [](const char *at, const Allocation &allocation) {
                                return at < allocation.memory;
                            });
}

const Allocation *find_allocation(const void *address) {
    const auto beyond = first_beyond(address);
    if (beyond == allocations.begin()) return nullptr;
    const Allocation &allocation = *std::prev(beyond);
    const char *end = allocation.memory + allocation.bytes;
    return static_cast<const char *>(address) < end ? &allocation : nullptr;
}

const Allocation *find_allocation_before(const void *address) {
    const auto beyond = first_beyond(address);
    if (beyond == allocations.begin()) return nullptr;
    const Allocation &allocation = *std::prev(beyond);
    const char *guard_end = allocation.mapping + allocation.mapping_bytes;
    return static_cast<const char *>(address) < guard_end ? &allocation : nullptr;
}

// AddressSanitizer guards what comes from the heap to the byte; elsewhere a page guards the end.
static bool get_memory(Allocation &allocation) {
#if CUDA_ON_CPU_ASAN
    void *memory;
    if (posix_memalign(&memory, ALIGNMENT, allocation.bytes) != 0) return false;
    allocation.memory = static_cast<char *>(memory);
#else
    const size_t bytes = round_up(allocation.bytes, ALIGNMENT);
    allocation.mapping_bytes = round_up(bytes, PAGE) + PAGE;
    void *mapping = mmap(nullptr, allocation.mapping_bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) return false;
    allocation.mapping = static_cast<char *>(mapping);
    char *end = allocation.mapping + allocation.mapping_bytes - PAGE;
    mprotect(end, PAGE, PROT_NONE);
    allocation.memory = end - bytes;
#endif
    memset(allocation.memory, POISON, allocation.bytes);
#if CUDA_ON_CPU_MSAN
    __msan_poison(allocation.memory, allocation.bytes);
#endif
    return true;
}

static void give_memory_back(const Allocation &allocation) {
    if (allocation.mapping) munmap(allocation.mapping, allocation.mapping_bytes);
    else free(allocation.memory);
}

static cudaError_t allocate(void **pointer, size_t bytes, Space space) {
    if (!pointer) return cudaErrorInvalidValue;
    *pointer = nullptr;
    if (bytes == 0) return cudaSuccess;
    Allocation allocation = {};
    allocation.bytes = bytes;
    allocation.space = space;
    allocation.device = current_device();
    if (!get_memory(allocation)) return cudaErrorMemoryAllocation;
    allocations.insert(first_beyond(allocation.memory), allocation);
    if (access_depth == 0) set_access(allocation, false);
    *pointer = allocation.memory;
    return cudaSuccess;
}

static void release(const Allocation &allocation) {
    set_access(allocation, true);
    allocations.erase(std::prev(first_beyond(allocation.memory)));
    give_memory_back(allocation);
}

static void count_device_bytes(size_t more, size_t less) {
    cuda_on_cpu_counters &values = counters().values;
    values.device_bytes += more;
    values.device_bytes -= less;
    if (values.device_bytes > values.device_bytes_peak)
        values.device_bytes_peak = values.device_bytes;
}

static void release_device(const Allocation &allocation) {
    used_bytes[allocation.device] -= round_up(allocation.bytes, ALIGNMENT);
    count_device_bytes(0, allocation.bytes);
    release(allocation);
}

void free_all_allocations(int device) {
    for (size_t i = allocations.size(); i-- > 0;) {
        const Allocation allocation = allocations[i];
        if (allocation.space == Space::device && allocation.device == device)
            release_device(allocation);
    }
}

// ---- copies -------------------------------------------------------------------------------------

// Where the bytes lie; false if they run over the end of an allocation.
static bool find_space(const void *address, size_t bytes, Space *space) {
    const Allocation *allocation = find_allocation(address);
    *space = allocation ? allocation->space : Space::pageable;
    if (!allocation) return true;
    const char *at = static_cast<const char *>(address);
    return bytes <= static_cast<size_t>(allocation->memory + allocation->bytes - at);
}

static bool fits_kind(cudaMemcpyKind kind, Space to, Space from) {
    const bool to_device = to == Space::device;
    const bool from_device = from == Space::device;
    switch (kind) {
    case cudaMemcpyHostToHost: return !to_device && !from_device;
    case cudaMemcpyHostToDevice: return to_device && !from_device;
    case cudaMemcpyDeviceToHost: return !to_device && from_device;
    case cudaMemcpyDeviceToDevice: return to_device && from_device;
    case cudaMemcpyDefault: return true;
    }
    return false;
}

static cudaError_t check_copy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                              Space *to_space, Space *from_space) {
    if (!to || !from) return cudaErrorInvalidValue;
    if (!find_space(to, bytes, to_space) || !find_space(from, bytes, from_space))
        return cudaErrorInvalidValue;
    if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault)
        return cudaErrorInvalidMemcpyDirection;
    return fits_kind(kind, *to_space, *from_space) ? cudaSuccess : cudaErrorInvalidValue;
}

// As a device does it: pinned memory is read and written when the copy runs; pageable memory is
// read at once, through a staging buffer, and the host waits until it is written.
static cudaError_t copy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                        cudaStream_t stream, bool wait) {
    Space to_space, from_space;
    if (bytes == 0) return cudaSuccess;
    cudaError_t error = check_copy(to, from, bytes, kind, &to_space, &from_space);
    if (error) return error;
    const bool capturing = is_capturing(stream);
    if (from_space == Space::pageable && !capturing) {
        const char *bytes_from = static_cast<const char *>(from);
        auto staging = std::make_shared<std::vector<char>>(bytes_from, bytes_from + bytes);
        error = submit(stream, [=] { memcpy(to, staging->data(), bytes); });
    } else {
        error = submit(stream, [=] { memmove(to, from, bytes); });
    }
    if (error || capturing) return error;
    if (!wait && to_space != Space::pageable) return cudaSuccess;
    counters().values.synchronisations++;
    drain_stream(stream);
    return device_fault();
}

static cudaError_t set(void *pointer, int value, size_t bytes, cudaStream_t stream) {
    Space space;
    if (bytes == 0) return cudaSuccess;
    if (!pointer || !find_space(pointer, bytes, &space) || space == Space::pageable)
        return cudaErrorInvalidValue;
    return submit(stream, [=] { memset(pointer, value, bytes); });
}

} // namespace cuda_on_cpu

using namespace cuda_on_cpu;

extern "C" cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    Call call("cudaMalloc", Call::not_captured);
    if (call.refused()) return call.refusal();
    size_t &used = used_bytes[current_device()];
    const size_t rounded = round_up(bytes, ALIGNMENT);
    if (rounded < bytes || used > settings().memory || rounded > settings().memory - used) {
        if (pointer) *pointer = nullptr;
        return call.done(cudaErrorMemoryAllocation);
    }
    const cudaError_t error = allocate(pointer, bytes, Space::device);
    if (error || bytes == 0) return call.done(error);
    used += rounded;
    count_device_bytes(bytes, 0);
    counters().values.allocations++;
    return cudaSuccess;
}

extern "C" cudaError_t cudaFree(void *pointer) {
    Call call("cudaFree", Call::not_captured | Call::gives_back);
    if (call.refused()) return call.refusal();
    if (!pointer) return cudaSuccess;
    const Allocation *found = find_allocation(pointer);
    if (!found || found->memory != pointer || found->space != Space::device)
        return call.done(cudaErrorInvalidValue);
    const Allocation allocation = *found;
    drain_device(allocation.device);
    release_device(allocation);
    return call.done(device_fault());
}

extern "C" cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned int) {
    Call call("cudaHostAlloc", Call::not_captured);
    if (call.refused()) return call.refusal();
    const cudaError_t error = allocate(pointer, bytes, Space::pinned);
    if (!error) counters().values.pinned_bytes += bytes;
    return call.done(error);
}

extern "C" cudaError_t cudaMallocHost(void **pointer, size_t bytes) {
    Call call("cudaMallocHost", Call::not_captured);
    if (call.refused()) return call.refusal();
    const cudaError_t error = allocate(pointer, bytes, Space::pinned);
    if (!error) counters().values.pinned_bytes += bytes;
    return call.done(error);
}

extern "C" cudaError_t cudaFreeHost(void *pointer) {
    Call call("cudaFreeHost", Call::not_captured | Call::gives_back);
    if (call.refused()) return call.refusal();
    if (!pointer) return cudaSuccess;
    const Allocation *found = find_allocation(pointer);
    if (!found || found->memory != pointer || found->space != Space::pinned)
        return call.done(cudaErrorInvalidValue);
    const Allocation allocation = *found;
    for (int device = 0; device < settings().devices; device++) drain_device(device);
    counters().values.pinned_bytes -= allocation.bytes;
    release(allocation);
    return call.done(device_fault());
}

extern "C" cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    Call call("cudaMemGetInfo");
    if (call.refused()) return call.refusal();
    if (!free_bytes || !total_bytes) return call.done(cudaErrorInvalidValue);
    const size_t used = used_bytes[current_device()];
    *total_bytes = settings().memory;
    *free_bytes = used < settings().memory ? settings().memory - used : 0;
    return cudaSuccess;
}

extern "C" cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes,
                                                const void *pointer) {
    Call call("cudaPointerGetAttributes");
    if (call.refused()) return call.refusal();
    if (!attributes || !pointer) return call.done(cudaErrorInvalidValue);
    void *address = const_cast<void *>(pointer);
    const Allocation *allocation = find_allocation(pointer);
    if (!allocation) *attributes = {cudaMemoryTypeUnregistered, -2, nullptr, address};
    else if (allocation->space == Space::device)
        *attributes = {cudaMemoryTypeDevice, allocation->device, address, nullptr};
    else *attributes = {cudaMemoryTypeHost, allocation->device, address, address};
    return cudaSuccess;
}

extern "C" cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    Call call("cudaMemcpy", Call::not_captured);
    if (call.refused()) return call.refusal();
    return call.done(copy(to, from, bytes, kind, nullptr, true));
}

extern "C" cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes,
                                       cudaMemcpyKind kind, cudaStream_t stream) {
    Call call("cudaMemcpyAsync");
    if (call.refused()) return call.refusal();
    return call.done(copy(to, from, bytes, kind, stream, false));
}

extern "C" cudaError_t cudaMemset(void *pointer, int value, size_t bytes) {
    Call call("cudaMemset", Call::not_captured);
    if (call.refused()) return call.refusal();
    return call.done(set(pointer, value, bytes, nullptr));
}

extern "C" cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes,
                                       cudaStream_t stream) {
    Call call("cudaMemsetAsync");
    if (call.refused()) return call.refusal();
    return call.done(set(pointer, value, bytes, stream));
}

extern "C" int cuda_on_cpu_is_device(const void *pointer) {
    std::lock_guard<std::recursive_mutex> lock(runtime_mutex());
    const Allocation *allocation = find_allocation(pointer);
    return allocation && allocation->space == Space::device;
}
