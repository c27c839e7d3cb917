/* What a test may ask of the runner beyond CUDA: counters, faults on demand, other devices.
 * C and C++. A program that calls these runs on the CPU only: MPTK_ON_CPU tells. */
#ifndef CUDA_ON_CPU_H
#define CUDA_ON_CPU_H

#include <stddef.h>
#include "cuda_runtime_api.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct cuda_on_cpu_counters {
    long kernel_launches;     /* kernels that ran, in graphs too */
    long graph_launches;      /* calls of cudaGraphLaunch */
    long synchronisations;    /* calls in which the host waited for the device */
    long allocations;         /* calls of cudaMalloc that succeeded */
    size_t device_bytes;      /* allocated now, on all devices */
    size_t device_bytes_peak; /* the most since the last cuda_on_cpu_reset_peak */
    size_t pinned_bytes;      /* of cudaMallocHost and cudaHostAlloc, now */
    int streams;              /* created and not destroyed */
    int events;               /* likewise */
    int graphs;               /* likewise, executable ones counted too */
    int cublas_handles;       /* likewise */
    long pending;             /* operations queued and not yet run */
} cuda_on_cpu_counters;

void cuda_on_cpu_get_counters(cuda_on_cpu_counters *counters);
void cuda_on_cpu_reset_peak(void);

/* The device's memory, as CUDA_ON_CPU_MEMORY; what is allocated stays. */
void cuda_on_cpu_set_memory(size_t bytes);

/* The compute capability, as CUDA_ON_CPU_ARCH: 70, 75, 80, 86, 89, 90. */
void cuda_on_cpu_set_arch(int arch);

/* The seed of all orders from now on, as CUDA_ON_CPU_SEED. */
void cuda_on_cpu_set_seed(unsigned long long seed);

/* From now on, the n-th call (1: the next) of the function of this name returns `error` and does
 * nothing; a NULL name counts all functions. For cublasGemmEx, `error` is a cublasStatus_t. n = 0
 * takes the order back. */
void cuda_on_cpu_fail_call(const char *function, int n, int error);

/* All kernels lack code for this device (cudaErrorNoKernelImageForDevice) or are not found
 * (cudaErrorInvalidDeviceFunction), as CUDA_ON_CPU_KERNELS; cudaSuccess: they are there. */
void cuda_on_cpu_set_kernel_error(cudaError_t error);

/* The n-th kernel run from now on (1: the next) does not run but faults on the device: what waits
 * for it and every later call returns cudaErrorIllegalAddress, until cudaDeviceReset. */
void cuda_on_cpu_fault_kernel(int n);

/* Whether the pointer lies in memory of cudaMalloc. */
int cuda_on_cpu_is_device(const void *pointer);

#ifdef __cplusplus
}
#endif

#endif
