/* Element types that cuBLAS is told of, with CUDA's numbers. C and C++. */
#ifndef CUDA_ON_CPU_LIBRARY_TYPES_H
#define CUDA_ON_CPU_LIBRARY_TYPES_H

typedef enum cudaDataType_t {
    CUDA_R_32F = 0,
    CUDA_R_64F = 1,
    CUDA_R_16F = 2,
    CUDA_R_16BF = 14
} cudaDataType;

#endif
