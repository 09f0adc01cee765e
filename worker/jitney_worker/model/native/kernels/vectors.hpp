// Sixteen numbers at once. Written with the compiler's vector types, so that the same source becomes AVX-512, two halves
// of AVX2, or four quarters of NEON or SSE; intrinsics stand only where the compiler does not find the instruction.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace jitney {

constexpr int LANES = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

#define INLINE static inline __attribute__((always_inline))

INLINE Floats splat(float value) { return Floats{} + value; }
INLINE Ints splat(int32_t value) { return Ints{} + value; }

template <class Vector, class Element>
INLINE Vector load_as(const Element* from) {
    Vector value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE Floats load(const float* from) { return load_as<Floats>(from); }
INLINE void store(float* to, Floats value) { memcpy(to, &value, sizeof value); }

// a * b + c, rounded once where the CPU can do that. Said here and never left to the compiler, which would fuse in one
// instance of a template and not in another: build.py forbids it.
INLINE Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    union Parts {
        Floats all;
        __m256 part[2];
    } x = {a}, y = {b}, z = {c};
    for (int i = 0; i < 2; ++i) z.part[i] = _mm256_fmadd_ps(x.part[i], y.part[i], z.part[i]);
    return z.all;
#elif defined(__aarch64__)
    union Parts {
        Floats all;
        float32x4_t part[4];
    } x = {a}, y = {b}, z = {c};
    for (int i = 0; i < 4; ++i) z.part[i] = vfmaq_f32(z.part[i], x.part[i], y.part[i]);
    return z.all;
#else
    return a * b + c;
#endif
}

INLINE Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
    return _mm512_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

INLINE Floats rounded(Floats value) {
#if defined(__AVX512F__)
    return _mm512_roundscale_ps(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const Floats shift = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves no room for a fraction
    return (value + shift) - shift;
#endif
}

// Always in the same order, so that a sum depends on its sixteen numbers alone.
INLINE float sum_of(Floats value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(value);
#else
    float lanes[LANES];
    store(lanes, value);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
#endif
}

INLINE float largest_of(Floats value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(value);
#else
    float lanes[LANES];
    store(lanes, value);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
#endif
}

// e^r for |r| <= ln(2) / 2 by its Taylor series; the first term left out is below 2e-7.
INLINE Floats exp_of_remainder(Floats r) {
    Floats series = splat(1.38888889e-3f);
    series = fused(series, r, splat(8.33333333e-3f));
    series = fused(series, r, splat(4.16666667e-2f));
    series = fused(series, r, splat(1.66666667e-1f));
    series = fused(series, r, splat(0.5f));
    series = fused(series, r, splat(1.0f));
    return fused(series, r, splat(1.0f));
}

// e^x to a few units in the last place; exactly 0 below -87, NaN for NaN. x = n ln 2 + r.
INLINE Floats exp_of(Floats x) {
#if defined(__AVX512F__)
    const __mmask16 counts = _mm512_cmp_ps_mask(x, splat(-87.0f), _CMP_NLT_UQ);
    const Floats n = rounded(x * 1.44269504088896341f);
    const Floats r = fused(n, splat(2.12194440e-4f), fused(n, splat(-0.693359375f), x));
    return _mm512_maskz_scalef_ps(counts, exp_of_remainder(r), n);
#else
    const Floats most = splat(88.0f), least = splat(-87.0f);
    Ints too_small = x < least;
    Floats clamped = x > most ? most : x;
    clamped = clamped < least ? least : clamped;
    Floats n = rounded(clamped * 1.44269504088896341f);
    Floats r = fused(n, splat(2.12194440e-4f), fused(n, splat(-0.693359375f), clamped));
    Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
    Floats value = exp_of_remainder(r) * (Floats)exponent;
    return (Floats)((Ints)value & ~too_small);
#endif
}

INLINE Floats silu(Floats x) { return x / (1.0f + exp_of(-x)); }

INLINE Floats tanh_of(Floats x) {
    Floats twice = exp_of(2.0f * x);
    return 1.0f - 2.0f / (twice + 1.0f);
}

// bfloat16: the upper half of a float32. Rounded to the nearest, ties to even; a NaN stays one.
INLINE Halves to_bfloat16(Floats value) {
#if defined(__AVX512BF16__)
    return (Halves)_mm512_cvtneps_pbh(value);
#else
    Words bits = (Words)value;
    Words result = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    Words quiet = (bits >> 16) | 0x40u;
    Words is_nan = (Words)(value != value);
    return __builtin_convertvector((result & ~is_nan) | (quiet & is_nan), Halves);
#endif
}

INLINE Floats from_bfloat16(Halves value) { return (Floats)(__builtin_convertvector(value, Words) << 16); }

INLINE uint16_t bfloat16_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

INLINE float float_of(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

constexpr long round_up(long value, long to) { return (value + to - 1) / to * to; }

}  // namespace jitney
