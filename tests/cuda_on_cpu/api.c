/* What a program relies on in the CUDA headers, stated so that the compiler checks it: numbers and
 * signatures. check_runner.sh compiles this against the runner's headers and, where CUDA is
 * installed, against NVIDIA's. C11. */
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#define SAME(name, number) _Static_assert((int)(name) == (number), #name)

SAME(cudaSuccess, 0);
SAME(cudaErrorInvalidValue, 1);
SAME(cudaErrorMemoryAllocation, 2);
SAME(cudaErrorInitializationError, 3);
SAME(cudaErrorInvalidConfiguration, 9);
SAME(cudaErrorInvalidDevicePointer, 17);
SAME(cudaErrorInvalidMemcpyDirection, 21);
SAME(cudaErrorStubLibrary, 34);
SAME(cudaErrorInsufficientDriver, 35);
SAME(cudaErrorDevicesUnavailable, 46);
SAME(cudaErrorInvalidDeviceFunction, 98);
SAME(cudaErrorNoDevice, 100);
SAME(cudaErrorInvalidDevice, 101);
SAME(cudaErrorInvalidKernelImage, 200);
SAME(cudaErrorNoKernelImageForDevice, 209);
SAME(cudaErrorInvalidPtx, 218);
SAME(cudaErrorUnsupportedPtxVersion, 222);
SAME(cudaErrorInvalidResourceHandle, 400);
SAME(cudaErrorIllegalState, 401);
SAME(cudaErrorNotReady, 600);
SAME(cudaErrorIllegalAddress, 700);
SAME(cudaErrorLaunchOutOfResources, 701);
SAME(cudaErrorLaunchTimeout, 702);
SAME(cudaErrorMisalignedAddress, 716);
SAME(cudaErrorLaunchFailure, 719);
SAME(cudaErrorNotPermitted, 800);
SAME(cudaErrorNotSupported, 801);
SAME(cudaErrorSystemDriverMismatch, 803);
SAME(cudaErrorStreamCaptureUnsupported, 900);
SAME(cudaErrorStreamCaptureInvalidated, 901);
SAME(cudaErrorStreamCaptureMerge, 902);
SAME(cudaErrorStreamCaptureUnmatched, 903);
SAME(cudaErrorStreamCaptureUnjoined, 904);
SAME(cudaErrorStreamCaptureIsolation, 905);
SAME(cudaErrorStreamCaptureImplicit, 906);
SAME(cudaErrorCapturedEvent, 907);
SAME(cudaErrorStreamCaptureWrongThread, 908);
SAME(cudaErrorUnknown, 999);

SAME(cudaMemcpyHostToHost, 0);
SAME(cudaMemcpyHostToDevice, 1);
SAME(cudaMemcpyDeviceToHost, 2);
SAME(cudaMemcpyDeviceToDevice, 3);
SAME(cudaMemcpyDefault, 4);
SAME(cudaMemoryTypeUnregistered, 0);
SAME(cudaMemoryTypeHost, 1);
SAME(cudaMemoryTypeDevice, 2);
SAME(cudaHostAllocDefault, 0);
SAME(cudaHostAllocPortable, 1);
SAME(cudaStreamDefault, 0);
SAME(cudaStreamNonBlocking, 1);
SAME(cudaEventDefault, 0);
SAME(cudaEventBlockingSync, 1);
SAME(cudaEventDisableTiming, 2);
SAME(cudaFuncAttributeMaxDynamicSharedMemorySize, 8);
SAME(cudaFuncAttributePreferredSharedMemoryCarveout, 9);
SAME(cudaStreamCaptureModeGlobal, 0);
SAME(cudaStreamCaptureModeThreadLocal, 1);
SAME(cudaStreamCaptureModeRelaxed, 2);
SAME(cudaStreamCaptureStatusActive, 1);
SAME(cudaStreamCaptureStatusInvalidated, 2);

SAME(cudaDevAttrMaxThreadsPerBlock, 1);
SAME(cudaDevAttrMaxGridDimY, 6);
SAME(cudaDevAttrMaxSharedMemoryPerBlock, 8);
SAME(cudaDevAttrWarpSize, 10);
SAME(cudaDevAttrMaxRegistersPerBlock, 12);
SAME(cudaDevAttrClockRate, 13);
SAME(cudaDevAttrMultiProcessorCount, 16);
SAME(cudaDevAttrMemoryClockRate, 36);
SAME(cudaDevAttrGlobalMemoryBusWidth, 37);
SAME(cudaDevAttrL2CacheSize, 38);
SAME(cudaDevAttrComputeCapabilityMajor, 75);
SAME(cudaDevAttrComputeCapabilityMinor, 76);
SAME(cudaDevAttrMaxSharedMemoryPerMultiprocessor, 81);
SAME(cudaDevAttrMaxSharedMemoryPerBlockOptin, 97);

SAME(CUBLAS_STATUS_SUCCESS, 0);
SAME(CUBLAS_STATUS_NOT_INITIALIZED, 1);
SAME(CUBLAS_STATUS_ALLOC_FAILED, 3);
SAME(CUBLAS_STATUS_INVALID_VALUE, 7);
SAME(CUBLAS_STATUS_ARCH_MISMATCH, 8);
SAME(CUBLAS_STATUS_MAPPING_ERROR, 11);
SAME(CUBLAS_STATUS_EXECUTION_FAILED, 13);
SAME(CUBLAS_STATUS_INTERNAL_ERROR, 14);
SAME(CUBLAS_STATUS_NOT_SUPPORTED, 15);
SAME(CUBLAS_STATUS_LICENSE_ERROR, 16);
SAME(CUBLAS_OP_N, 0);
SAME(CUBLAS_OP_T, 1);
SAME(CUBLAS_OP_C, 2);
SAME(CUBLAS_POINTER_MODE_HOST, 0);
SAME(CUBLAS_POINTER_MODE_DEVICE, 1);
SAME(CUBLAS_ATOMICS_NOT_ALLOWED, 0);
SAME(CUBLAS_DEFAULT_MATH, 0);
SAME(CUBLAS_TENSOR_OP_MATH, 1);
SAME(CUBLAS_PEDANTIC_MATH, 2);
SAME(CUBLAS_TF32_TENSOR_OP_MATH, 3);
SAME(CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION, 16);
SAME(CUBLAS_COMPUTE_16F, 64);
SAME(CUBLAS_COMPUTE_32F, 68);
SAME(CUBLAS_COMPUTE_32F_PEDANTIC, 69);
SAME(CUBLAS_GEMM_DEFAULT, -1);
SAME(CUBLAS_GEMM_DEFAULT_TENSOR_OP, 99);
SAME(CUDA_R_32F, 0);
SAME(CUDA_R_64F, 1);
SAME(CUDA_R_16F, 2);
SAME(CUDA_R_16BF, 14);

/* Each call with a signature written out: the compiler warns where a header has another. */
void use_calls(void);
void use_calls(void) {
    cudaError_t (*get_last_error)(void) = cudaGetLastError;
    const char *(*get_error_name)(cudaError_t) = cudaGetErrorName;
    cudaError_t (*get_device_count)(int *) = cudaGetDeviceCount;
    cudaError_t (*set_device)(int) = cudaSetDevice;
    cudaError_t (*get_properties)(struct cudaDeviceProp *, int) = cudaGetDeviceProperties;
    cudaError_t (*get_attribute)(int *, enum cudaDeviceAttr, int) = cudaDeviceGetAttribute;
    cudaError_t (*create_stream)(cudaStream_t *, unsigned) = cudaStreamCreateWithFlags;
    cudaError_t (*wait_event)(cudaStream_t, cudaEvent_t, unsigned) = cudaStreamWaitEvent;
    cudaError_t (*create_event)(cudaEvent_t *, unsigned) = cudaEventCreateWithFlags;
    cudaError_t (*record)(cudaEvent_t, cudaStream_t) = cudaEventRecord;
    cudaError_t (*elapsed)(float *, cudaEvent_t, cudaEvent_t) = cudaEventElapsedTime;
    cudaError_t (*allocate)(void **, size_t) = cudaMalloc;
    cudaError_t (*allocate_host)(void **, size_t) = cudaMallocHost;
    cudaError_t (*memory_info)(size_t *, size_t *) = cudaMemGetInfo;
    cudaError_t (*copy)(void *, const void *, size_t, enum cudaMemcpyKind) = cudaMemcpy;
    cudaError_t (*copy_async)(void *, const void *, size_t, enum cudaMemcpyKind,
                              cudaStream_t) = cudaMemcpyAsync;
    cudaError_t (*set_async)(void *, int, size_t, cudaStream_t) = cudaMemsetAsync;
    cudaError_t (*set_function)(const void *, enum cudaFuncAttribute, int) = cudaFuncSetAttribute;
    cudaError_t (*get_function)(struct cudaFuncAttributes *, const void *) = cudaFuncGetAttributes;
    cudaError_t (*begin_capture)(cudaStream_t, enum cudaStreamCaptureMode) = cudaStreamBeginCapture;
    cudaError_t (*end_capture)(cudaStream_t, cudaGraph_t *) = cudaStreamEndCapture;
    cudaError_t (*instantiate)(cudaGraphExec_t *, cudaGraph_t,
                               unsigned long long) = cudaGraphInstantiate;
    cudaError_t (*launch)(cudaGraphExec_t, cudaStream_t) = cudaGraphLaunch;
    cublasStatus_t (*create_handle)(cublasHandle_t *) = cublasCreate;
    cublasStatus_t (*set_stream)(cublasHandle_t, cudaStream_t) = cublasSetStream;
    cublasStatus_t (*set_workspace)(cublasHandle_t, void *, size_t) = cublasSetWorkspace;
    cublasStatus_t (*set_math)(cublasHandle_t, cublasMath_t) = cublasSetMathMode;
    const char *(*status_name)(cublasStatus_t) = cublasGetStatusName;
    cublasStatus_t (*gemm)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int,
                           const void *, const void *, cudaDataType, int, const void *,
                           cudaDataType, int, const void *, void *, cudaDataType, int,
                           cublasComputeType_t, cublasGemmAlgo_t) = cublasGemmEx;
    struct cudaDeviceProp properties;
    struct cudaFuncAttributes attributes;

    (void)get_last_error, (void)get_error_name, (void)get_device_count, (void)set_device;
    (void)get_properties, (void)get_attribute, (void)create_stream, (void)wait_event;
    (void)create_event, (void)record, (void)elapsed, (void)allocate, (void)allocate_host;
    (void)memory_info, (void)copy, (void)copy_async, (void)set_async, (void)set_function;
    (void)get_function, (void)begin_capture, (void)end_capture, (void)instantiate, (void)launch;
    (void)create_handle, (void)set_stream, (void)set_workspace, (void)set_math, (void)status_name;
    (void)gemm, (void)properties.totalGlobalMem, (void)properties.multiProcessorCount;
    (void)properties.major, (void)properties.sharedMemPerBlockOptin, (void)attributes.numRegs;
    (void)attributes.maxThreadsPerBlock, (void)attributes.binaryVersion;
}
