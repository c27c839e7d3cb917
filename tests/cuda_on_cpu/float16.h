// Bits of FP16 and BF16 to float and back, rounding to nearest even, NaN to 0x7fff as GPUs do.
#ifndef CUDA_ON_CPU_FLOAT16_H
#define CUDA_ON_CPU_FLOAT16_H

#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif
#include "sanitizers.h"

namespace cuda_on_cpu {

CUDA_ON_CPU_UNCHECKED inline uint32_t float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

CUDA_ON_CPU_UNCHECKED inline float bits_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

CUDA_ON_CPU_UNCHECKED inline uint16_t float_to_half(float value) {
    const uint32_t bits = float_bits(value);
    const uint32_t sign = bits >> 16 & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fff;
#ifdef __F16C__
    (void)sign;
    return static_cast<uint16_t>(
        _mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT), 0));
#else
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u); // 65520 and more
    if (magnitude < 0x38800000u) { // subnormal: the addition of 0.5 rounds at 2^-24
        const uint32_t rounded = float_bits(bits_float(magnitude) + 0.5f);
        return static_cast<uint16_t>(sign | (rounded - 0x3f000000u));
    }
    const uint32_t odd = magnitude >> 13 & 1;
    const uint32_t rebiased = magnitude - (112u << 23) + 0xfffu + odd;
    return static_cast<uint16_t>(sign | rebiased >> 13);
#endif
}

CUDA_ON_CPU_UNCHECKED inline float half_to_float(uint16_t half) {
#ifdef __F16C__
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
#else
    const uint32_t sign = (half & 0x8000u) << 16;
    const uint32_t exponent = half >> 10 & 31;
    const uint32_t mantissa = half & 1023;
    if (exponent == 31) return bits_float(sign | 0x7f800000u | mantissa << 13);
    if (exponent) return bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
    return bits_float(sign | float_bits(static_cast<float>(mantissa) * 0x1p-24f));
#endif
}

CUDA_ON_CPU_UNCHECKED inline uint16_t float_to_bfloat(float value) {
    const uint32_t bits = float_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

CUDA_ON_CPU_UNCHECKED inline float bfloat_to_float(uint16_t bfloat) {
    return bits_float(static_cast<uint32_t>(bfloat) << 16);
}

// A double to float such that rounding the float once more, to 16 bits, is as if rounded once:
// a float that is not exact is made odd.
inline float double_to_odd_float(double value) {
    const float nearest = static_cast<float>(value);
    const uint32_t bits = float_bits(nearest);
    const double error = value - static_cast<double>(nearest);
    if (!(error != 0) || bits & 1) return nearest;
    return bits_float((error > 0) == (nearest > 0) ? bits + 1 : bits - 1);
}

// Four or eight at a time, as the matrix instructions need them.
struct HalfBits {
    CUDA_ON_CPU_UNCHECKED static inline void widen4(const void *from, float *to) {
#ifdef __F16C__
        const __m128i halves = _mm_loadl_epi64(static_cast<const __m128i *>(from));
        _mm_storeu_ps(to, _mm_cvtph_ps(halves));
#else
        uint16_t halves[4];
        memcpy(halves, from, sizeof halves);
        for (int i = 0; i < 4; i++) to[i] = half_to_float(halves[i]);
#endif
    }
    CUDA_ON_CPU_UNCHECKED static inline void widen8(const void *from, float *to) {
#ifdef __F16C__
        const __m128i halves = _mm_loadu_si128(static_cast<const __m128i *>(from));
        _mm256_storeu_ps(to, _mm256_cvtph_ps(halves));
#else
        widen4(from, to);
        widen4(static_cast<const char *>(from) + 8, to + 4);
#endif
    }
};

struct BfloatBits {
    CUDA_ON_CPU_UNCHECKED static inline void widen4(const void *from, float *to) {
        uint16_t bfloats[4];
        memcpy(bfloats, from, sizeof bfloats);
        for (int i = 0; i < 4; i++) to[i] = bfloat_to_float(bfloats[i]);
    }
    CUDA_ON_CPU_UNCHECKED static inline void widen8(const void *from, float *to) {
        widen4(from, to);
        widen4(static_cast<const char *>(from) + 8, to + 4);
    }
};

} // namespace cuda_on_cpu

#endif
