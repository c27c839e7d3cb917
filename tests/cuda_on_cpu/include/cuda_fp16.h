// __half and the intrinsics of it that kernels use. Arithmetic on the type itself goes through
// float, rounded once: for +, -, * and / that gives the bits of a GPU.
#ifndef CUDA_ON_CPU_CUDA_FP16_H
#define CUDA_ON_CPU_CUDA_FP16_H

#include "../float16.h"
#include "cuda_runtime.h"

struct CUDA_ON_CPU_ALIGN(2) __half {
    unsigned short __x;

    __half() = default;
    __half(float value) : __x(cuda_on_cpu::float_to_half(value)) {}
    __half(double value) : __half(cuda_on_cpu::double_to_odd_float(value)) {}
    __half(int value) : __half(static_cast<double>(value)) {}
    __half(unsigned int value) : __half(static_cast<double>(value)) {}
    operator float() const {
        return cuda_on_cpu::half_to_float(__x);
    }
};

struct CUDA_ON_CPU_ALIGN(4) __half2 {
    __half x, y;

    __half2() = default;
    __half2(__half low, __half high) : x(low), y(high) {}
};

typedef __half half;
typedef __half2 half2;

inline __half __ushort_as_half(unsigned short bits) {
    __half result;
    result.__x = bits;
    return result;
}
inline unsigned short __half_as_ushort(__half value) {
    return value.__x;
}
inline __half __short_as_half(short bits) {
    return __ushort_as_half(static_cast<unsigned short>(bits));
}
inline short __half_as_short(__half value) {
    return static_cast<short>(value.__x);
}

inline __half __float2half(float value) {
    return __half(value);
}
inline __half __float2half_rn(float value) {
    return __half(value);
}
inline __half __double2half(double value) {
    return __half(value);
}
inline __half __int2half_rn(int value) {
    return __half(value);
}
inline float __half2float(__half value) {
    return value;
}

inline __half2 __halves2half2(__half low, __half high) {
    return {low, high};
}
inline __half2 __half2half2(__half value) {
    return {value, value};
}
inline __half2 __float2half2_rn(float value) {
    return {value, value};
}
inline __half2 __floats2half2_rn(float low, float high) {
    return {low, high};
}
inline __half2 __float22half2_rn(float2 value) {
    return {value.x, value.y};
}
inline float2 __half22float2(__half2 value) {
    return {value.x, value.y};
}
inline __half __low2half(__half2 value) {
    return value.x;
}
inline __half __high2half(__half2 value) {
    return value.y;
}
inline float __low2float(__half2 value) {
    return value.x;
}
inline float __high2float(__half2 value) {
    return value.y;
}

inline bool __hisnan(__half value) {
    return (value.__x & 0x7fff) > 0x7c00;
}
inline int __hisinf(__half value) {
    if ((value.__x & 0x7fff) != 0x7c00) return 0;
    return value.__x >> 15 ? -1 : 1;
}
inline __half __hneg(__half value) {
    return __ushort_as_half(value.__x ^ 0x8000);
}
inline __half __habs(__half value) {
    return __ushort_as_half(value.__x & 0x7fff);
}
inline __half __hadd(__half a, __half b) {
    return __half(static_cast<float>(a) + static_cast<float>(b));
}
inline __half __hsub(__half a, __half b) {
    return __half(static_cast<float>(a) - static_cast<float>(b));
}
inline __half __hmul(__half a, __half b) {
    return __half(static_cast<float>(a) * static_cast<float>(b));
}
inline __half __hdiv(__half a, __half b) {
    return __half(static_cast<float>(a) / static_cast<float>(b));
}
// The product of two halves is exact in double, and the sum has one rounding there.
inline __half __hfma(__half a, __half b, __half c) {
    return __half(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c));
}
inline bool __heq(__half a, __half b) {
    return static_cast<float>(a) == static_cast<float>(b);
}
inline bool __hlt(__half a, __half b) {
    return static_cast<float>(a) < static_cast<float>(b);
}
inline bool __hle(__half a, __half b) {
    return static_cast<float>(a) <= static_cast<float>(b);
}
inline bool __hgt(__half a, __half b) {
    return static_cast<float>(a) > static_cast<float>(b);
}
inline bool __hge(__half a, __half b) {
    return static_cast<float>(a) >= static_cast<float>(b);
}
// A NaN loses against a number.
inline __half __hmax(__half a, __half b) {
    if (__hisnan(a)) return b;
    return __hlt(a, b) ? b : a;
}
inline __half __hmin(__half a, __half b) {
    if (__hisnan(a)) return b;
    return __hgt(a, b) ? b : a;
}

inline __half2 __hneg2(__half2 a) {
    return {__hneg(a.x), __hneg(a.y)};
}
inline __half2 __hadd2(__half2 a, __half2 b) {
    return {__hadd(a.x, b.x), __hadd(a.y, b.y)};
}
inline __half2 __hsub2(__half2 a, __half2 b) {
    return {__hsub(a.x, b.x), __hsub(a.y, b.y)};
}
inline __half2 __hmul2(__half2 a, __half2 b) {
    return {__hmul(a.x, b.x), __hmul(a.y, b.y)};
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
inline __half2 __hmax2(__half2 a, __half2 b) {
    return {__hmax(a.x, b.x), __hmax(a.y, b.y)};
}
inline __half2 __hmin2(__half2 a, __half2 b) {
    return {__hmin(a.x, b.x), __hmin(a.y, b.y)};
}

#endif
