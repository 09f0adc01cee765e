// One token of a row of logits: temperature, min_p, top-k, top-p and seed, by the rules of sampler.py.
#pragma once

#include <algorithm>

#include "vectors.hpp"

namespace jitney {

constexpr float NOISE_REACH = 19.5f;  // a token further than this below the top cannot win: noise.py

// As `SamplingRow` in sampler.py. temperature 0: the top alone. min_p_reach: how far below the top min_p keeps, in
// units of logit / temperature; infinite where there is none.
struct SamplingRow {
    double top_p;
    int64_t key;
    float temperature, min_p_reach;
    int32_t top_k;
};

struct Candidate {
    float value;
    int32_t id;
};

// Gumbel noise of a token under its row's key: noise.py says why.
inline double gumbel(int64_t key, int64_t id) {
    uint64_t value = (uint64_t)key + (uint64_t)id * 0x9E3779B97F4A7C15u;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    value ^= value >> 31;
    const double uniform = ((double)(value >> 41) + 0.5) * 0x1p-23;
    return -log(-log(uniform));
}

// Tokens whose logit / temperature is at least `least`, by id; room for all of them in `found`. Where `mass` is given:
// the sum of exp(value - top) of every token of at least `floor`.
inline long gather(const float* logits, long vocabulary, float temperature, float top, float least, float floor,
                   Candidate* found, double* mass) {
    typedef double Doubles __attribute__((vector_size(8 * LANES)));
    long count = 0;
    Doubles total = Doubles{};  // one sum for each lane: added up across lanes for every sixteen tokens it took longest
    const Floats divisor = splat(temperature);
    for (long i = 0; i < vocabulary; i += LANES) {
        Floats values;
        if (i + LANES <= vocabulary)
            values = load(logits + i);
        else
            for (int j = 0; j < LANES; ++j) values[j] = i + j < vocabulary ? logits[i + j] : NAN;  // which reaches nothing
        values = values / divisor;
        if (mass) {
            Floats weights = (Floats)((Ints)exp_of(values - top) & (values >= floor));
            total = total + __builtin_convertvector(weights, Doubles);
        }
#if defined(__AVX512F__)
        const __mmask16 kept = _mm512_cmp_ps_mask(values, splat(least), _CMP_GE_OQ);
        if (kept == 0) continue;
#else
        Ints kept_lanes = values >= least;
        bool any = false;
        for (int j = 0; j < LANES; ++j) any |= kept_lanes[j] != 0;
        if (!any) continue;
#endif
        for (int j = 0; j < LANES; ++j)
            if (values[j] >= least) found[count++] = {values[j], (int32_t)(i + j)};
    }
    for (int half = LANES / 2; half; half /= 2)
        for (int j = 0; j < half; ++j) total[j] += total[j + half];
    if (mass) *mass = total[0];
    return count;
}

// Best first; of equal values the lower id.
inline bool comes_before(const Candidate& a, const Candidate& b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// How many of the candidates, best first, stand before the point where top_p of the mass is reached; one at least.
inline long leading(const Candidate* candidates, long count, float top, double needed) {
    double reached = 0.0;
    long kept = 0;
    for (; kept < count && (kept == 0 || reached < needed); ++kept) reached += exp((double)(candidates[kept].value - top));
    return kept;
}

inline double weight_of(const Candidate* candidates, long count, float top) {
    double weight = 0.0;
    for (long i = 0; i < count; ++i) weight += exp((double)(candidates[i].value - top));
    return weight;
}

// Top-k, and top-p of what that leaves.
inline long keep_top_k(Candidate* candidates, long count, const SamplingRow& row, float top) {
    const long k = row.top_k < count ? row.top_k : count;
    std::partial_sort(candidates, candidates + k, candidates + count, comes_before);
    if (row.top_p >= 1.0) return k;
    return leading(candidates, k, top, row.top_p * weight_of(candidates, k, top));
}

// Top-p alone. Most rows need only what lies close to their top; more is looked at when that is not enough, as far as
// the noise reaches.
inline long keep_top_p(const float* logits, long vocabulary, const SamplingRow& row, float top, float floor,
                       Candidate* candidates) {
    double mass = 0.0;
    long count = 0;
    for (float reach : {6.0f, 12.0f, NOISE_REACH}) {
        const float least = top - reach > floor ? top - reach : floor;
        count = gather(logits, vocabulary, row.temperature, top, least, floor, candidates, mass > 0.0 ? nullptr : &mass);
        if (weight_of(candidates, count, top) > row.top_p * mass * (1 + 1e-6)) break;
    }
    std::sort(candidates, candidates + count, comes_before);
    return leading(candidates, count, top, row.top_p * mass);
}

// logits: float32 [vocabulary], whose largest is `top`, a finite number. candidates: room for the vocabulary.
inline int64_t draw(const float* logits, long vocabulary, float top, const SamplingRow& row, Candidate* candidates) {
    const float scaled_top = top / row.temperature, floor = scaled_top - row.min_p_reach;
    const float noise_floor = scaled_top - NOISE_REACH > floor ? scaled_top - NOISE_REACH : floor;
    const bool has_top_k = row.top_k > 0 && row.top_k < vocabulary;
    long count;
    if (has_top_k || row.top_p >= 1.0) {
        count = gather(logits, vocabulary, row.temperature, scaled_top, noise_floor, floor, candidates, nullptr);
        // What the noise cannot reach is not drawn, but it is a part of the probability that top-p asks for a share of.
        if (has_top_k && row.top_p < 1.0 && count < row.top_k)
            count = gather(logits, vocabulary, row.temperature, scaled_top, floor, floor, candidates, nullptr);
        if (has_top_k) count = keep_top_k(candidates, count, row, scaled_top);
    } else {
        count = keep_top_p(logits, vocabulary, row, scaled_top, floor, candidates);
    }
    double best = -INFINITY;
    int64_t chosen = 0;
    for (long i = 0; i < count; ++i) {
        const double score = (double)candidates[i].value + gumbel(row.key, candidates[i].id);
        if (score > best || (score == best && candidates[i].id < chosen)) best = score, chosen = candidates[i].id;
    }
    return chosen;
}

}  // namespace jitney
