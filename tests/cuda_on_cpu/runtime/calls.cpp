// What every call of the API does first and last: the lock, reasons to refuse, the last error.
#include "internal.h"

namespace cuda_on_cpu {

namespace {

thread_local cudaError_t last_error;
thread_local int device_of_thread;
cudaError_t fault_of_device;

// The order of cuda_on_cpu_fail_call.
struct FailureOrder {
    char function[64]; // empty: any
    int countdown;     // 0: no order
    int error;
};
FailureOrder failure_order;

} // namespace

Counters &counters() {
    static Counters values = {};
    return values;
}

std::recursive_mutex &runtime_mutex() {
    static std::recursive_mutex mutex;
    return mutex;
}

int current_device() {
    return device_of_thread;
}

void set_device_fault(cudaError_t error) {
    fault_of_device = error;
}

cudaError_t device_fault() {
    return fault_of_device;
}

int ordered_failure(const char *function) {
    FailureOrder &order = failure_order;
    if (!order.countdown) return 0;
    if (order.function[0] && strcmp(order.function, function) != 0) return 0;
    return --order.countdown == 0 ? order.error : 0;
}

static void start_runtime() {
    static const bool started = (seed_orders(settings().seed), true);
    static thread_local const bool started_here = (catch_faults(), true);
    (void)started;
    (void)started_here;
}

static cudaError_t reason_to_refuse(const char *name, int kind) {
    start_runtime();
    const int ordered = name ? ordered_failure(name) : 0;
    if (ordered) return static_cast<cudaError_t>(ordered);
    if (kind & Call::no_device) return cudaSuccess;
    if (settings().old_driver) return cudaErrorInsufficientDriver;
    if (settings().devices == 0) return cudaErrorNoDevice;
    if (fault_of_device && !(kind & Call::gives_back)) return fault_of_device;
    if (!(kind & Call::not_captured) || !capture_forbids_calls()) return cudaSuccess;
    invalidate_captures();
    return cudaErrorStreamCaptureUnsupported;
}

Call::Call(const char *name, int kind)
    : lock(runtime_mutex()), error(reason_to_refuse(name, kind)) {
    if (error) last_error = error;
}

cudaError_t Call::done(cudaError_t result) {
    if (result) last_error = result;
    return result;
}

void set_last_error(cudaError_t error) {
    last_error = error;
}

} // namespace cuda_on_cpu

using namespace cuda_on_cpu;

// ---- errors -------------------------------------------------------------------------------------

namespace {

struct ErrorText {
    cudaError_t error;
    const char *name, *text;
};

#define ERROR_TEXT(error, text) \
    { error, #error, text }

const ErrorText error_texts[] = {
    ERROR_TEXT(cudaSuccess, "no error"),
    ERROR_TEXT(cudaErrorInvalidValue, "invalid argument"),
    ERROR_TEXT(cudaErrorMemoryAllocation, "out of memory"),
    ERROR_TEXT(cudaErrorInitializationError, "initialization error"),
    ERROR_TEXT(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    ERROR_TEXT(cudaErrorInvalidDevicePointer, "invalid device pointer"),
    ERROR_TEXT(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    ERROR_TEXT(cudaErrorStubLibrary, "CUDA driver is a stub library"),
    ERROR_TEXT(cudaErrorInsufficientDriver,
               "CUDA driver version is insufficient for CUDA runtime version"),
    ERROR_TEXT(cudaErrorDevicesUnavailable, "CUDA-capable device(s) is/are busy or unavailable"),
    ERROR_TEXT(cudaErrorInvalidDeviceFunction, "invalid device function"),
    ERROR_TEXT(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    ERROR_TEXT(cudaErrorInvalidDevice, "invalid device ordinal"),
    ERROR_TEXT(cudaErrorInvalidKernelImage, "device kernel image is invalid"),
    ERROR_TEXT(cudaErrorNoKernelImageForDevice,
               "no kernel image is available for execution on the device"),
    ERROR_TEXT(cudaErrorInvalidPtx, "a PTX JIT compilation failed"),
    ERROR_TEXT(cudaErrorUnsupportedPtxVersion,
               "the provided PTX was compiled with an unsupported toolchain."),
    ERROR_TEXT(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    ERROR_TEXT(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    ERROR_TEXT(cudaErrorNotReady, "device not ready"),
    ERROR_TEXT(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    ERROR_TEXT(cudaErrorLaunchOutOfResources, "too many resources requested for launch"),
    ERROR_TEXT(cudaErrorLaunchTimeout, "the launch timed out and was terminated"),
    ERROR_TEXT(cudaErrorMisalignedAddress, "misaligned address"),
    ERROR_TEXT(cudaErrorLaunchFailure, "unspecified launch failure"),
    ERROR_TEXT(cudaErrorNotPermitted, "operation not permitted"),
    ERROR_TEXT(cudaErrorNotSupported, "operation not supported"),
    ERROR_TEXT(cudaErrorSystemDriverMismatch,
               "system has unsupported display driver / cuda driver combination"),
    ERROR_TEXT(cudaErrorStreamCaptureUnsupported,
               "operation not permitted when stream is capturing"),
    ERROR_TEXT(cudaErrorStreamCaptureInvalidated,
               "operation failed due to a previous error during capture"),
    ERROR_TEXT(cudaErrorStreamCaptureMerge,
               "operation would result in a merge of separate capture sequences"),
    ERROR_TEXT(cudaErrorStreamCaptureUnmatched,
               "capture was not ended in the same stream as it began"),
    ERROR_TEXT(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    ERROR_TEXT(cudaErrorStreamCaptureIsolation,
               "dependency created on uncaptured work in another stream"),
    ERROR_TEXT(cudaErrorStreamCaptureImplicit,
               "operation would make the legacy stream depend on a capturing blocking stream"),
    ERROR_TEXT(cudaErrorCapturedEvent,
               "operation not permitted on an event last recorded in a capturing stream"),
    ERROR_TEXT(cudaErrorStreamCaptureWrongThread,
               "attempt to terminate a thread-local capture sequence from another thread"),
    ERROR_TEXT(cudaErrorUnknown, "unknown error"),
};

#undef ERROR_TEXT

const ErrorText *find_text(cudaError_t error) {
    for (const ErrorText &text : error_texts)
        if (text.error == error) return &text;
    return nullptr;
}

} // namespace

extern "C" const char *cudaGetErrorName(cudaError_t error) {
    const ErrorText *text = find_text(error);
    return text ? text->name : "unrecognized error code";
}

extern "C" const char *cudaGetErrorString(cudaError_t error) {
    const ErrorText *text = find_text(error);
    return text ? text->text : "unrecognized error code";
}

extern "C" cudaError_t cudaPeekAtLastError() {
    std::lock_guard<std::recursive_mutex> lock(runtime_mutex());
    return fault_of_device ? fault_of_device : last_error;
}

extern "C" cudaError_t cudaGetLastError() {
    const cudaError_t error = cudaPeekAtLastError();
    last_error = cudaSuccess;
    return error;
}

extern "C" cudaError_t cudaSetDevice(int device) {
    Call call("cudaSetDevice");
    if (call.refused()) return call.refusal();
    if (device < 0 || device >= settings().devices) return call.done(cudaErrorInvalidDevice);
    device_of_thread = device;
    return cudaSuccess;
}

extern "C" cudaError_t cudaGetDevice(int *device) {
    Call call("cudaGetDevice");
    if (call.refused()) return call.refusal();
    if (!device) return call.done(cudaErrorInvalidValue);
    *device = device_of_thread;
    return cudaSuccess;
}

// ---- orders of a test ---------------------------------------------------------------------------

extern "C" void cuda_on_cpu_fail_call(const char *function, int n, int error) {
    std::lock_guard<std::recursive_mutex> lock(runtime_mutex());
    snprintf(failure_order.function, sizeof failure_order.function, "%s", function ? function : "");
    failure_order.countdown = n;
    failure_order.error = error;
}

extern "C" void cuda_on_cpu_set_kernel_error(cudaError_t error) {
    std::lock_guard<std::recursive_mutex> lock(runtime_mutex());
    settings().kernel_error = error;
}

extern "C" void cuda_on_cpu_fault_kernel(int n) {
    std::lock_guard<std::recursive_mutex> lock(runtime_mutex());
    counters().kernel_to_fault = n;
}

extern "C" void cuda_on_cpu_set_memory(size_t bytes) {
    std::lock_guard<std::recursive_mutex> lock(runtime_mutex());
    settings().memory = bytes;
}

extern "C" void cuda_on_cpu_set_arch(int arch) {
    std::lock_guard<std::recursive_mutex> lock(runtime_mutex());
    settings().arch = arch;
}

extern "C" void cuda_on_cpu_set_seed(unsigned long long seed) {
    std::lock_guard<std::recursive_mutex> lock(runtime_mutex());
    settings().seed = seed;
    seed_orders(seed);
}

extern "C" void cuda_on_cpu_get_counters(cuda_on_cpu_counters *values) {
    std::lock_guard<std::recursive_mutex> lock(runtime_mutex());
    *values = counters().values;
}

extern "C" void cuda_on_cpu_reset_peak() {
    std::lock_guard<std::recursive_mutex> lock(runtime_mutex());
    counters().values.device_bytes_peak = counters().values.device_bytes;
}
