/* The small vector types of CUDA, with its alignments: a float4 is loaded 16 bytes at a time, so a
 * pointer that is not a multiple of 16 faults on a GPU, and here. C and C++. */
#ifndef CUDA_ON_CPU_VECTOR_TYPES_H
#define CUDA_ON_CPU_VECTOR_TYPES_H

#define CUDA_ON_CPU_ALIGN(bytes) __attribute__((aligned(bytes)))

typedef struct CUDA_ON_CPU_ALIGN(2) uchar2 {
    unsigned char x, y;
} uchar2;
typedef struct CUDA_ON_CPU_ALIGN(4) uchar4 {
    unsigned char x, y, z, w;
} uchar4;
typedef struct CUDA_ON_CPU_ALIGN(4) ushort2 {
    unsigned short x, y;
} ushort2;
typedef struct CUDA_ON_CPU_ALIGN(8) ushort4 {
    unsigned short x, y, z, w;
} ushort4;
typedef struct CUDA_ON_CPU_ALIGN(8) int2 {
    int x, y;
} int2;
typedef struct int3 {
    int x, y, z;
} int3;
typedef struct CUDA_ON_CPU_ALIGN(16) int4 {
    int x, y, z, w;
} int4;
typedef struct CUDA_ON_CPU_ALIGN(8) uint2 {
    unsigned int x, y;
} uint2;
typedef struct uint3 {
    unsigned int x, y, z;
} uint3;
typedef struct CUDA_ON_CPU_ALIGN(16) uint4 {
    unsigned int x, y, z, w;
} uint4;
typedef struct CUDA_ON_CPU_ALIGN(8) float2 {
    float x, y;
} float2;
typedef struct float3 {
    float x, y, z;
} float3;
typedef struct CUDA_ON_CPU_ALIGN(16) float4 {
    float x, y, z, w;
} float4;
typedef struct CUDA_ON_CPU_ALIGN(16) double2 {
    double x, y;
} double2;
typedef struct CUDA_ON_CPU_ALIGN(16) ulonglong2 {
    unsigned long long int x, y;
} ulonglong2;

typedef struct dim3 {
    unsigned int x, y, z;
#ifdef __cplusplus
    constexpr dim3(unsigned int x_ = 1, unsigned int y_ = 1, unsigned int z_ = 1)
        : x(x_), y(y_), z(z_) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
#endif
} dim3;

#endif
