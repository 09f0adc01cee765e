// What numbers are kept as, and how they are multiplied. One packed row of 64 bytes holds sixteen columns of PACK
// consecutive numbers along the depth; a 32-bit broadcast of PACK numbers meets it in one instruction.
#pragma once

#include "vectors.hpp"

namespace jitney {

enum Kind { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

template <class Element>
INLINE int32_t broadcastable(const Element* from) {
    int32_t word;
    memcpy(&word, from, sizeof word);
    return word;
}

struct F32 {
    using Stored = float;
    using Sum = Floats;
    static constexpr int PACK = 1;
    static constexpr Kind KIND = FLOAT32;

    INLINE Floats dot(Floats sum, int32_t few, Ints row) { return fused((Floats)splat(few), (Floats)row, sum); }
    INLINE void put(float* to, Floats value) { store(to, value); }
    INLINE Floats get(const float* from) { return load(from); }
    INLINE float of(float value) { return value; }
    INLINE float as_float(float value) { return value; }
};

struct Bf16 {
    using Stored = uint16_t;
    using Sum = Floats;
    static constexpr int PACK = 2;
    static constexpr Kind KIND = BFLOAT16;

    INLINE Floats dot(Floats sum, int32_t few, Ints row) {
#if defined(__AVX512BF16__)
        return _mm512_dpbf16_ps(sum, (__m512bh)splat(few), (__m512bh)row);
#else
        sum = fused((Floats)splat(few << 16), (Floats)(row << 16), sum);
        return fused((Floats)splat((int32_t)(few & 0xffff0000)), (Floats)(row & (int32_t)0xffff0000), sum);
#endif
    }
    INLINE void put(uint16_t* to, Floats value) {
        Halves halves = to_bfloat16(value);
        memcpy(to, &halves, sizeof halves);
    }
    INLINE Floats get(const uint16_t* from) { return from_bfloat16(load_as<Halves>(from)); }
    INLINE uint16_t of(float value) { return bfloat16_of(value); }
    INLINE float as_float(uint16_t value) { return float_of(value); }
};

// Weights of one signed byte; activations of one unsigned byte, 128 standing for zero (the offset is taken back with
// the weights' column sums).
struct Int8 {
    using Stored = uint8_t;
    using Sum = Ints;
    static constexpr int PACK = 4;
    static constexpr Kind KIND = INT8;

    INLINE Ints dot(Ints sum, int32_t few, Ints row) {
#if defined(__AVX512VNNI__)
        return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)splat(few), (__m512i)row);
#else
        for (int shift = 0; shift < 32; shift += 8)
            sum += splat((few >> shift) & 0xff) * ((row << (24 - shift)) >> 24);
        return sum;
#endif
    }
};

}  // namespace jitney
