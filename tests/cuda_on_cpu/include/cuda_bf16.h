// __nv_bfloat16 and the intrinsics of it that kernels use. Arithmetic on the type itself goes
// through float, rounded once: for +, -, * and / that gives the bits of a GPU.
#ifndef CUDA_ON_CPU_CUDA_BF16_H
#define CUDA_ON_CPU_CUDA_BF16_H

#include "../float16.h"
#include "cuda_runtime.h"

struct CUDA_ON_CPU_ALIGN(2) __nv_bfloat16 {
    unsigned short __x;

    __nv_bfloat16() = default;
    __nv_bfloat16(float value) : __x(cuda_on_cpu::float_to_bfloat(value)) {}
    __nv_bfloat16(double value) : __nv_bfloat16(cuda_on_cpu::double_to_odd_float(value)) {}
    __nv_bfloat16(int value) : __nv_bfloat16(static_cast<double>(value)) {}
    __nv_bfloat16(unsigned int value) : __nv_bfloat16(static_cast<double>(value)) {}
    operator float() const {
        return cuda_on_cpu::bfloat_to_float(__x);
    }
};

struct CUDA_ON_CPU_ALIGN(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;

    __nv_bfloat162() = default;
    __nv_bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) : x(low), y(high) {}
};

typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    __nv_bfloat16 result;
    result.__x = bits;
    return result;
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) {
    return value.__x;
}

inline __nv_bfloat16 __float2bfloat16(float value) {
    return __nv_bfloat16(value);
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
    return __nv_bfloat16(value);
}
inline __nv_bfloat16 __double2bfloat16(double value) {
    return __nv_bfloat16(value);
}
inline __nv_bfloat16 __int2bfloat16_rn(int value) {
    return __nv_bfloat16(value);
}
inline float __bfloat162float(__nv_bfloat16 value) {
    return value;
}

inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 low, __nv_bfloat16 high) {
    return {low, high};
}
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 value) {
    return {value, value};
}
inline __nv_bfloat162 __float2bfloat162_rn(float value) {
    return {value, value};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
    return {low, high};
}
inline __nv_bfloat162 __float22bfloat162_rn(float2 value) {
    return {value.x, value.y};
}
inline float2 __bfloat1622float2(__nv_bfloat162 value) {
    return {value.x, value.y};
}
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 value) {
    return value.x;
}
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 value) {
    return value.y;
}
inline float __low2float(__nv_bfloat162 value) {
    return value.x;
}
inline float __high2float(__nv_bfloat162 value) {
    return value.y;
}

inline bool __hisnan(__nv_bfloat16 value) {
    return (value.__x & 0x7fff) > 0x7f80;
}
inline int __hisinf(__nv_bfloat16 value) {
    if ((value.__x & 0x7fff) != 0x7f80) return 0;
    return value.__x >> 15 ? -1 : 1;
}
inline __nv_bfloat16 __hneg(__nv_bfloat16 value) {
    return __ushort_as_bfloat16(value.__x ^ 0x8000);
}
inline __nv_bfloat16 __habs(__nv_bfloat16 value) {
    return __ushort_as_bfloat16(value.__x & 0x7fff);
}
inline __nv_bfloat16 __hadd(__nv_bfloat16 a, __nv_bfloat16 b) {
    return __nv_bfloat16(static_cast<float>(a) + static_cast<float>(b));
}
inline __nv_bfloat16 __hsub(__nv_bfloat16 a, __nv_bfloat16 b) {
    return __nv_bfloat16(static_cast<float>(a) - static_cast<float>(b));
}
inline __nv_bfloat16 __hmul(__nv_bfloat16 a, __nv_bfloat16 b) {
    return __nv_bfloat16(static_cast<float>(a) * static_cast<float>(b));
}
inline __nv_bfloat16 __hdiv(__nv_bfloat16 a, __nv_bfloat16 b) {
    return __nv_bfloat16(static_cast<float>(a) / static_cast<float>(b));
}
// The product of two is exact in double, and the sum has one rounding there.
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
    return __nv_bfloat16(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c));
}
inline bool __hlt(__nv_bfloat16 a, __nv_bfloat16 b) {
    return static_cast<float>(a) < static_cast<float>(b);
}
inline bool __hgt(__nv_bfloat16 a, __nv_bfloat16 b) {
    return static_cast<float>(a) > static_cast<float>(b);
}
// A NaN loses against a number.
inline __nv_bfloat16 __hmax(__nv_bfloat16 a, __nv_bfloat16 b) {
    if (__hisnan(a)) return b;
    return __hlt(a, b) ? b : a;
}
inline __nv_bfloat16 __hmin(__nv_bfloat16 a, __nv_bfloat16 b) {
    if (__hisnan(a)) return b;
    return __hgt(a, b) ? b : a;
}

inline __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) {
    return {__hadd(a.x, b.x), __hadd(a.y, b.y)};
}
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
    return {__hmul(a.x, b.x), __hmul(a.y, b.y)};
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}

#endif
