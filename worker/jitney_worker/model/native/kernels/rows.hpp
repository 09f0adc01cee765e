// What is done to one row at a time: normalise, rotate, quantise.
#pragma once

#include "elements.hpp"

namespace jitney {

// RMSNorm (Zhang and Sennrich 2019) of `width` numbers padded with zeros to `stride`.
INLINE float norm_factor(const float* row, long stride, long width, float eps) {
    Floats squares = Floats{};
    for (long i = 0; i < stride; i += LANES) {
        Floats x = load(row + i);
        squares = fused(x, x, squares);
    }
    return 1.0f / sqrtf(sum_of(squares) / (float)width + eps);
}

template <class E>
INLINE void norm_row(const float* row, const float* weight, long stride, long width, float eps,
                     typename E::Stored* out) {
    const float factor = norm_factor(row, stride, width, eps);
    for (long i = 0; i < stride; i += LANES) E::put(out + i, load(row + i) * factor * load(weight + i));
}

// Of one head, in place: not padded.
INLINE void norm_head(float* head, const float* weight, int width, float eps) {
    float squares = 0.0f;
    for (int i = 0; i < width; ++i) squares += head[i] * head[i];
    const float factor = 1.0f / sqrtf(squares / (float)width + eps);
    for (int i = 0; i < width; ++i) head[i] = head[i] * factor * weight[i];
}

// Rotary embedding (Su et al. 2021), the first half against the second, in place.
INLINE void rotate(float* head, const float* cos, const float* sin, int half) {
    for (int i = 0; i < half; ++i) {
        const float a = head[i], b = head[half + i];
        head[i] = a * cos[i] - b * sin[i];
        head[half + i] = b * cos[i] + a * sin[i];
    }
}

template <class E>
INLINE void convert(const float* from, int count, typename E::Stored* to) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) E::put(to + i, load(from + i));
    for (; i < count; ++i) to[i] = E::of(from[i]);
}

// One byte a number, 128 for zero, also from `width` to `stride`, whatever lies there; returns the scale. Symmetric, by the row's largest magnitude. Of a row with a NaN the
// scale is NaN: no byte can say it, and the row must not come out as if it were sound.
template <class E>
INLINE float quantise_row(typename E::Stored* row, long width, long stride, uint8_t* out) {
    for (long i = width; i < stride; ++i) row[i] = typename E::Stored(0);
    Floats most = Floats{};
    Ints broken = Ints{};
    for (long i = 0; i < stride; i += LANES) {
        Floats x = E::get(row + i);
        most = larger(most, larger(x, -x));
        broken |= x != x;
    }
    bool is_broken = false;
    for (int i = 0; i < LANES; ++i) is_broken |= broken[i] != 0;
    const float scale = is_broken ? NAN : largest_of(most) / 127.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    typedef uint8_t Bytes __attribute__((vector_size(16)));
    for (long i = 0; i < stride; i += LANES) {
        Ints whole = __builtin_convertvector(rounded(E::get(row + i) * inverse), Ints) + 128;
        Bytes bytes = __builtin_convertvector(whole, Bytes);
        memcpy(out + i, &bytes, sizeof bytes);
    }
    return scale;
}

}  // namespace jitney
