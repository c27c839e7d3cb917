/* Occupancy as CUDA's own cuda_occupancy.h finds it, for lines "MAJOR MINOR SHARED_PER_SM
   SHARED_PER_CTA THREADS_PER_SM RESERVED THREADS REGISTERS SHARED" on stdin: one number a line.
   tests/check_arch/self_test.py compares them with occupancy.py's. */
#include <stdio.h>
#include <string.h>

#include "cuda_occupancy.h"

int main(void) {
    int major, minor, per_sm, per_cta, threads_per_sm, reserved, threads, registers, shared;

    while (scanf("%d %d %d %d %d %d %d %d %d", &major, &minor, &per_sm, &per_cta, &threads_per_sm,
                 &reserved, &threads, &registers, &shared) == 9) {
        struct cudaOccDeviceProp device;
        struct cudaOccFuncAttributes kernel;
        struct cudaOccDeviceState state;
        struct cudaOccResult result;
        cudaOccError error;

        memset(&device, 0, sizeof device);
        memset(&kernel, 0, sizeof kernel);
        memset(&state, 0, sizeof state);
        device.computeMajor = major;
        device.computeMinor = minor;
        device.maxThreadsPerBlock = 1024;
        device.maxThreadsPerMultiprocessor = threads_per_sm;
        device.regsPerBlock = device.regsPerMultiprocessor = 65536;
        device.warpSize = 32;
        device.numSms = 1;
        device.sharedMemPerBlock = 48 * 1024;
        device.sharedMemPerMultiprocessor = (size_t)per_sm;
        device.sharedMemPerBlockOptin = (size_t)per_cta;
        device.reservedSharedMemPerBlock = (size_t)reserved;
        kernel.maxThreadsPerBlock = 1024;
        kernel.numRegs = registers;
        kernel.numBlockBarriers = 1;
        kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
        kernel.maxDynamicSharedSizeBytes = (size_t)per_cta;
        state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
        error = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads,
                                                        (size_t)shared);
        if (error) {
            fprintf(stderr, "cuda_occupancy.h: error %d\n", error);
            return 1;
        }
        printf("%d\n", result.activeBlocksPerMultiprocessor);
    }
    return 0;
}
