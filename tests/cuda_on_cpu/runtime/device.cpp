// Devices, their properties and limits, and the launch of kernels.
#include "internal.h"

namespace cuda_on_cpu {

namespace {

// What differs between architectures and matters to a program.
struct ArchLimits {
    int arch;
    int shared_kb_optin, shared_kb_multiprocessor; // a block's after opting in; a multiprocessor's
    int threads_multiprocessor;
    int multiprocessors; // of the usual card
    int l2_mb, bus_bits;
    const char *name;
};

const ArchLimits arch_limits[] = {
    {70, 96, 96, 2048, 80, 6, 4096, "CPU as sm_70"},
    {75, 64, 64, 1024, 40, 4, 256, "CPU as sm_75"},
    {80, 163, 164, 2048, 108, 40, 5120, "CPU as sm_80"},
    {86, 99, 100, 1536, 82, 6, 384, "CPU as sm_86"},
    {89, 99, 100, 1536, 128, 72, 384, "CPU as sm_89"},
    {90, 227, 228, 2048, 132, 50, 5120, "CPU as sm_90"},
};

const unsigned MAX_GRID_X = 0x7fffffff;
const unsigned MAX_GRID_YZ = 65535;
const int DRIVER_VERSION = CUDART_VERSION;
const int OLD_DRIVER_VERSION = 11040;

// cudaFuncSetAttribute's dynamic shared memory.
struct SharedAllowance {
    const void *function;
    size_t bytes;
};
std::vector<SharedAllowance> shared_allowances;

} // namespace

static const ArchLimits &limits() {
    for (const ArchLimits &candidate : arch_limits)
        if (candidate.arch == settings().arch) return candidate;
    return arch_limits[0];
}

static size_t max_shared_bytes() {
    return static_cast<size_t>(limits().shared_kb_optin) << 10;
}

static size_t &shared_bytes_allowed(const void *function) {
    for (SharedAllowance &allowance : shared_allowances)
        if (allowance.function == function) return allowance.bytes;
    shared_allowances.push_back({function, DEFAULT_SHARED_BYTES});
    return shared_allowances.back().bytes;
}

// ---- launching ----------------------------------------------------------------------------------

static cudaError_t check_launch(const Kernel &kernel) {
    const dim3 grid = kernel.grid;
    const dim3 threads = kernel.block;
    if (settings().kernel_error) return settings().kernel_error;
    const uint64_t all = static_cast<uint64_t>(threads.x) * threads.y * threads.z;
    if (all == 0 || all > MAX_THREADS || threads.z > 64) return cudaErrorInvalidConfiguration;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaErrorInvalidConfiguration;
    if (grid.x > MAX_GRID_X || grid.y > MAX_GRID_YZ || grid.z > MAX_GRID_YZ)
        return cudaErrorInvalidConfiguration;
    return kernel.shared_bytes <= shared_bytes_allowed(kernel.function) ? cudaSuccess
                                                                        : cudaErrorInvalidValue;
}

static void run_or_fault(const Kernel &kernel) {
    counters().values.kernel_launches++;
    int &countdown = counters().kernel_to_fault;
    if (countdown > 0 && --countdown == 0) {
        set_device_fault(cudaErrorIllegalAddress);
        return;
    }
    run_kernel(kernel);
}

cudaError_t enqueue_kernel(const Kernel &kernel, size_t arguments_bytes,
                           void (*copy)(void *to, const void *from), void (*destroy)(void *),
                           cudaStream_t stream) {
    Call call("cudaLaunchKernel");
    if (call.refused()) return call.refusal();
    const cudaError_t error = check_launch(kernel);
    if (error) return call.done(error);
    std::shared_ptr<void> arguments(::operator new(arguments_bytes, std::align_val_t(64)),
                                    [destroy](void *memory) {
                                        destroy(memory);
                                        ::operator delete(memory, std::align_val_t(64));
                                    });
    copy(arguments.get(), kernel.arguments);
    Kernel kept = kernel;
    kept.arguments = arguments.get();
    return call.done(submit(stream, [kept, arguments] { run_or_fault(kept); }));
}

} // namespace cuda_on_cpu

using namespace cuda_on_cpu;

// ---- the API: kernels ---------------------------------------------------------------------------

extern "C" cudaError_t cudaFuncSetAttribute(const void *function, cudaFuncAttribute attribute,
                                            int value) {
    Call call("cudaFuncSetAttribute");
    if (call.refused()) return call.refusal();
    if (settings().kernel_error) return call.done(settings().kernel_error);
    if (!function) return call.done(cudaErrorInvalidDeviceFunction);
    if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize)
        return call.done(cudaErrorInvalidValue);
    if (value < 0 || static_cast<size_t>(value) > max_shared_bytes())
        return call.done(cudaErrorInvalidValue);
    shared_bytes_allowed(function) = static_cast<size_t>(value);
    return cudaSuccess;
}

// Registers and static shared memory are the compiler's for a GPU: unknown here.
extern "C" cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *function) {
    Call call("cudaFuncGetAttributes");
    if (call.refused()) return call.refusal();
    if (settings().kernel_error) return call.done(settings().kernel_error);
    if (!attributes || !function) return call.done(cudaErrorInvalidDeviceFunction);
    *attributes = {};
    attributes->maxThreadsPerBlock = MAX_THREADS;
    attributes->numRegs = 32;
    attributes->ptxVersion = settings().arch;
    attributes->binaryVersion = settings().arch;
    attributes->maxDynamicSharedSizeBytes = static_cast<int>(shared_bytes_allowed(function));
    return cudaSuccess;
}

// ---- the API: devices ---------------------------------------------------------------------------

extern "C" cudaError_t cudaGetDeviceCount(int *count) {
    Call call("cudaGetDeviceCount");
    if (count) *count = 0;
    if (call.refused()) return call.refusal();
    if (!count) return call.done(cudaErrorInvalidValue);
    *count = settings().devices;
    return cudaSuccess;
}

static bool is_device(int device) {
    return device >= 0 && device < settings().devices;
}

static cudaDeviceProp properties_of(int device) {
    const ArchLimits &arch = limits();
    cudaDeviceProp p = {};
    snprintf(p.name, sizeof p.name, "%s", arch.name);
    p.totalGlobalMem = settings().memory;
    p.sharedMemPerBlock = DEFAULT_SHARED_BYTES;
    p.regsPerBlock = 65536;
    p.warpSize = WARP_SIZE;
    p.maxThreadsPerBlock = MAX_THREADS;
    p.maxThreadsDim[0] = 1024;
    p.maxThreadsDim[1] = 1024;
    p.maxThreadsDim[2] = 64;
    p.maxGridSize[0] = MAX_GRID_X;
    p.maxGridSize[1] = MAX_GRID_YZ;
    p.maxGridSize[2] = MAX_GRID_YZ;
    p.totalConstMem = 64 << 10;
    p.major = arch.arch / 10;
    p.minor = arch.arch % 10;
    p.multiProcessorCount = arch.multiprocessors;
    p.concurrentKernels = 1;
    p.pciBusID = device + 1;
    p.asyncEngineCount = 2;
    p.unifiedAddressing = 1;
    p.memoryBusWidth = arch.bus_bits;
    p.l2CacheSize = arch.l2_mb << 20;
    p.maxThreadsPerMultiProcessor = arch.threads_multiprocessor;
    p.sharedMemPerMultiprocessor = static_cast<size_t>(arch.shared_kb_multiprocessor) << 10;
    p.regsPerMultiprocessor = 65536;
    p.sharedMemPerBlockOptin = max_shared_bytes();
    p.reservedSharedMemPerBlock = arch.arch >= 80 ? 1024 : 0;
    return p;
}

extern "C" cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
    Call call("cudaGetDeviceProperties");
    if (call.refused()) return call.refusal();
    if (!properties) return call.done(cudaErrorInvalidValue);
    if (!is_device(device)) return call.done(cudaErrorInvalidDevice);
    *properties = properties_of(device);
    return cudaSuccess;
}

static bool attribute_of(const cudaDeviceProp &p, cudaDeviceAttr attribute, int *value) {
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; return true;
    case cudaDevAttrMaxBlockDimX: *value = p.maxThreadsDim[0]; return true;
    case cudaDevAttrMaxBlockDimY: *value = p.maxThreadsDim[1]; return true;
    case cudaDevAttrMaxBlockDimZ: *value = p.maxThreadsDim[2]; return true;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; return true;
    case cudaDevAttrMaxGridDimY: *value = p.maxGridSize[1]; return true;
    case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[2]; return true;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; return true;
    case cudaDevAttrWarpSize: *value = p.warpSize; return true;
    case cudaDevAttrMaxRegistersPerBlock: *value = p.regsPerBlock; return true;
    case cudaDevAttrClockRate: *value = 1500000; return true;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; return true;
    case cudaDevAttrConcurrentKernels: *value = p.concurrentKernels; return true;
    case cudaDevAttrMemoryClockRate: *value = 1000000; return true;
    case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; return true;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; return true;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        *value = p.maxThreadsPerMultiProcessor;
        return true;
    case cudaDevAttrAsyncEngineCount: *value = p.asyncEngineCount; return true;
    case cudaDevAttrUnifiedAddressing: *value = p.unifiedAddressing; return true;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; return true;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; return true;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = (int)p.sharedMemPerMultiprocessor;
        return true;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = p.regsPerMultiprocessor; return true;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = (int)p.sharedMemPerBlockOptin;
        return true;
    }
    return false;
}

extern "C" cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    Call call("cudaDeviceGetAttribute");
    if (call.refused()) return call.refusal();
    if (!is_device(device)) return call.done(cudaErrorInvalidDevice);
    if (!value || !attribute_of(properties_of(device), attribute, value))
        return call.done(cudaErrorInvalidValue);
    return cudaSuccess;
}

extern "C" cudaError_t cudaDriverGetVersion(int *version) {
    Call call("cudaDriverGetVersion", Call::no_device);
    if (call.refused()) return call.refusal();
    if (!version) return call.done(cudaErrorInvalidValue);
    *version = settings().old_driver ? OLD_DRIVER_VERSION : DRIVER_VERSION;
    return cudaSuccess;
}

extern "C" cudaError_t cudaRuntimeGetVersion(int *version) {
    Call call("cudaRuntimeGetVersion", Call::no_device);
    if (call.refused()) return call.refusal();
    if (!version) return call.done(cudaErrorInvalidValue);
    *version = CUDART_VERSION;
    return cudaSuccess;
}

// Ends a fault too: the memory is gone, the device works again.
extern "C" cudaError_t cudaDeviceReset() {
    Call call("cudaDeviceReset", Call::no_device);
    if (call.refused()) return call.refusal();
    drain_device(current_device());
    free_all_allocations(current_device());
    set_device_fault(cudaSuccess);
    set_last_error(cudaSuccess);
    return cudaSuccess;
}
