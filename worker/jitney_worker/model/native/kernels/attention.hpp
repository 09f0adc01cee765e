// Attention over the paged cache (Kwon et al. 2023), tokens in tiles of sixteen:
//
//     keys    one block: [kv_head][tile][key_dim / PACK][16 tokens][PACK]      a row of 64 bytes meets one part of a query
//     values  one block: [kv_head][tile][16 / PACK tokens][value_dim][PACK]    a row meets the weights of PACK tokens
//
// Softmax is taken over stretches of 512 positions, counted from position 0, with a running maximum (Milakov and
// Gimelshein 2018). Each query goes through the same stretches and tiles in the same order whether it is decoded alone
// or prefilled among others; what it may not see adds exact zeros. So its result does not depend on its company.
#pragma once

#include "rows.hpp"
#include "team.hpp"

namespace jitney {

constexpr int TILE = LANES;
constexpr int STRETCH_TILES = 32;
constexpr int MOST_WIDTH = 512;  // of a head, padded
constexpr int ITEM_QUERIES = 16;
constexpr float LOWEST = -1e30f;

#if defined(__AVX512F__)
constexpr int MOST_PAIRS = 12;
#else
constexpr int MOST_PAIRS = 3;
#endif

// Rows of values whose sums stay in registers beside each other.
constexpr int value_vectors(int num_pairs) {
#if defined(__AVX512F__)
    return num_pairs <= 6 ? 4 : 2;
#else
    return num_pairs <= 1 ? 2 : 1;
#endif
}

// As `AttentionLayer` in layers.py. window, chunk: 0 for none. softcap: 0 for none.
struct Shape {
    int32_t num_heads, num_kv_heads, key_dim, value_dim;
    float scale, softcap;
    int32_t window, chunk;

    int group() const { return num_heads / num_kv_heads; }
    long keys_width() const { return round_up(key_dim, LANES); }
    long values_width() const { return round_up(value_dim, LANES); }

    long first_seen(long position) const {
        if (window) return position - window + 1 > 0 ? position - window + 1 : 0;
        return chunk ? position / chunk * chunk : 0;
    }
};

// As `StepBatch` in batch.py. row_firsts: [num_rows + 1], flat index of each row's first token.
struct Batch {
    const int64_t *token_ids, *positions, *slots, *block_table, *row_firsts;
    int32_t num_tokens, num_rows, table_width, block_size;
};

struct Plane {
    void *keys, *values;
};

// A query of one head: where it lies, which positions it sees, and where its result goes.
template <class E>
struct Pair {
    const typename E::Stored* query;
    typename E::Stored* out;
    long first, last;
    float sink;
    bool has_sink;
};

// One KV head's keys and values of one sequence.
template <class E>
struct Context {
    const typename E::Stored *keys, *values;
    const int64_t* table;
    long tiles_per_block, keys_per_block, values_per_block, keys_per_tile, values_per_tile;
    int key_width, value_width, value_dim;
    float scale, softcap;

    const typename E::Stored* keys_of(long tile) const {
        return keys + table[tile / tiles_per_block] * keys_per_block + tile % tiles_per_block * keys_per_tile;
    }
    const typename E::Stored* values_of(long tile) const {
        return values + table[tile / tiles_per_block] * values_per_block + tile % tiles_per_block * values_per_tile;
    }
};

template <class E>
Context<E> context_of(const Shape& shape, const Plane& plane, const Batch& batch, int row, int kv_head) {
    Context<E> c;
    c.key_width = (int)shape.keys_width(), c.value_width = (int)shape.values_width(), c.value_dim = shape.value_dim;
    c.tiles_per_block = batch.block_size / TILE;
    c.keys_per_tile = (long)c.key_width * TILE, c.values_per_tile = (long)c.value_width * TILE;
    c.keys_per_block = c.keys_per_tile * c.tiles_per_block * shape.num_kv_heads;
    c.values_per_block = c.values_per_tile * c.tiles_per_block * shape.num_kv_heads;
    c.keys = (const typename E::Stored*)plane.keys + c.keys_per_tile * c.tiles_per_block * kv_head;
    c.values = (const typename E::Stored*)plane.values + c.values_per_tile * c.tiles_per_block * kv_head;
    c.table = batch.block_table + (long)row * batch.table_width;
    c.scale = shape.scale, c.softcap = shape.softcap;
    return c;
}

// Store one token's key and value of one KV head.
template <class E>
void keep(const Shape& shape, const Plane& plane, const Batch& batch, int token, int kv_head, const float* key,
          const float* value) {
    using Stored = typename E::Stored;
    const long slot = batch.slots[token], block = slot / batch.block_size, offset = slot % batch.block_size;
    const long tile = (block * shape.num_kv_heads + kv_head) * (batch.block_size / TILE) + offset / TILE;
    const int at = (int)(offset % TILE);
    Stored* keys = (Stored*)plane.keys + tile * shape.keys_width() * TILE;
    Stored* values = (Stored*)plane.values + tile * shape.values_width() * TILE;
    Stored row[MOST_WIDTH];
    convert<E>(key, shape.key_dim, row);
    for (int d = 0; d < shape.key_dim; ++d) keys[(d / E::PACK * TILE + at) * E::PACK + d % E::PACK] = row[d];
    convert<E>(value, shape.value_dim, row);
    values += at / E::PACK * shape.values_width() * E::PACK + at % E::PACK;
    for (int d = 0; d < shape.value_dim; ++d) values[d * E::PACK] = row[d];
}

// next_keys: the tile that will be wanted next, null where all of them are in the cache already.
template <class E, int N>
INLINE void score(const Context<E>& c, const Pair<E> (&pairs)[N], long tile, const char* next_keys,
                  Floats (&scores)[N]) {
    const typename E::Stored* keys = c.keys_of(tile);
    const char* values = (const char*)c.values_of(tile);
    // Two sums a query, of even and of odd rows: one alone would wait for itself at every row.
    Floats odd[N];
    for (int n = 0; n < N; ++n) scores[n] = odd[n] = Floats{};
    for (int d = 0; d < c.key_width; d += 2 * E::PACK, keys += 2 * TILE * E::PACK) {
        Ints row = load_as<Ints>(keys), next_row = load_as<Ints>(keys + TILE * E::PACK);
        if (next_keys) {  // blocks lie scattered, so the hardware cannot guess the next one
            const int line = d / E::PACK * 64;
            __builtin_prefetch(next_keys + line, 0, 3), __builtin_prefetch(next_keys + line + 64, 0, 3);
            __builtin_prefetch(values + line, 0, 3), __builtin_prefetch(values + line + 64, 0, 3);
        }
#pragma GCC unroll 12
        for (int n = 0; n < N; ++n) {
            scores[n] = E::dot(scores[n], broadcastable(pairs[n].query + d), row);
            odd[n] = E::dot(odd[n], broadcastable(pairs[n].query + d + E::PACK), next_row);
        }
    }
    for (int n = 0; n < N; ++n) scores[n] = scores[n] + odd[n];
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const long start = tile * TILE;
    for (int n = 0; n < N; ++n) {
        scores[n] = scores[n] * c.scale;
        if (c.softcap != 0.0f) scores[n] = c.softcap * tanh_of(scores[n] / c.softcap);
        if (start < pairs[n].first || start + TILE - 1 > pairs[n].last) {
            Ints position = lane + (int32_t)start;
            Ints seen = (position >= (int32_t)pairs[n].first) & (position <= (int32_t)pairs[n].last);
            scores[n] = (Floats)(((Ints)scores[n] & seen) | ((Ints)splat(-INFINITY) & ~seen));
        }
    }
}

template <class E, int N, int V>
INLINE void weigh(const Context<E>& c, const typename E::Stored (*weights)[STRETCH_TILES * TILE], long from, long end,
                  int dim, const float (&factors)[N], float (*sums)[MOST_WIDTH]) {
    Floats sum[N][V];
    for (int n = 0; n < N; ++n)
        for (int v = 0; v < V; ++v) sum[n][v] = load(sums[n] + dim + v * LANES) * factors[n];
    for (long tile = from; tile < end; ++tile) {
        const typename E::Stored* values = c.values_of(tile) + dim * E::PACK;
        const long at = tile % STRETCH_TILES * TILE;
        for (int t = 0; t < TILE; t += E::PACK, values += c.value_width * E::PACK) {
            Ints row[V];
            for (int v = 0; v < V; ++v) row[v] = load_as<Ints>(values + v * LANES * E::PACK);
#pragma GCC unroll 12
            for (int n = 0; n < N; ++n) {
                int32_t few = broadcastable(weights[n] + at + t);
                for (int v = 0; v < V; ++v) sum[n][v] = E::dot(sum[n][v], few, row[v]);
            }
        }
    }
    for (int n = 0; n < N; ++n)
        for (int v = 0; v < V; ++v) store(sums[n] + dim + v * LANES, sum[n][v]);
}

template <class E, int N>
__attribute__((noinline)) void attend_pairs(const Context<E>& c, const Pair<E> (&pairs)[N], const void* after) {
    using Stored = typename E::Stored;
    alignas(64) float scores[N][STRETCH_TILES * TILE];
    alignas(64) Stored weights[N][STRETCH_TILES * TILE];
    alignas(64) float sums[N][MOST_WIDTH];
    constexpr int V = value_vectors(N);
    float most[N], total[N], factors[N];
    long first = pairs[0].first, last = pairs[0].last;
    for (int n = 0; n < N; ++n) {
        first = pairs[n].first < first ? pairs[n].first : first;
        last = pairs[n].last > last ? pairs[n].last : last;
        most[n] = pairs[n].has_sink ? pairs[n].sink : LOWEST;
        total[n] = pairs[n].has_sink ? 1.0f : 0.0f;
        memset(sums[n], 0, sizeof(float) * c.value_width);
    }
    const long end = last / TILE + 1;
    for (long from = first / TILE; from < end;) {
        const long next = (from / STRETCH_TILES + 1) * STRETCH_TILES, until = next < end ? next : end;
        Floats best[N];
        for (auto& b : best) b = splat(LOWEST);
        for (long tile = from; tile < until; ++tile) {
            Floats tile_scores[N];
            const void* next_keys = after && tile + 1 < end ? c.keys_of(tile + 1) : after;
            score<E, N>(c, pairs, tile, (const char*)next_keys, tile_scores);
            for (int n = 0; n < N; ++n) {
                store(scores[n] + tile % STRETCH_TILES * TILE, tile_scores[n]);
                best[n] = larger(best[n], tile_scores[n]);
            }
        }
        for (int n = 0; n < N; ++n) {
            float now = largest_of(best[n]);
            now = now > most[n] ? now : most[n];
            factors[n] = exp_of(splat(most[n] - now))[0];
            most[n] = now;
            Floats added = Floats{};
            for (long at = from % STRETCH_TILES * TILE; at < (until - 1) % STRETCH_TILES * TILE + TILE; at += LANES) {
                Floats weight = exp_of(load(scores[n] + at) - now);
                added = added + weight;
                E::put(weights[n] + at, weight);
            }
            total[n] = total[n] * factors[n] + sum_of(added);
        }
        int dim = 0;
        for (; dim + V * LANES <= c.value_width; dim += V * LANES)
            weigh<E, N, V>(c, weights, from, until, dim, factors, sums);
        for (; dim < c.value_width; dim += LANES) weigh<E, N, 1>(c, weights, from, until, dim, factors, sums);
        from = until;
    }
    for (int n = 0; n < N; ++n) {
        int d = 0;
        for (; d + LANES <= c.value_dim; d += LANES) E::put(pairs[n].out + d, load(sums[n] + d) / splat(total[n]));
        for (; d < c.value_dim; ++d) pairs[n].out[d] = E::of(sums[n][d] / total[n]);
    }
}

template <class E, int N>
INLINE void attend_first(const Context<E>& c, const Pair<E>* pairs, const void* after) {
    Pair<E> some[N];
    for (int n = 0; n < N; ++n) some[n] = pairs[n];
    attend_pairs<E, N>(c, some, after);
}

template <class E>
void attend_some(const Context<E>& c, const Pair<E>* pairs, int count, const void* after) {
    switch (count) {
#define JITNEY_PAIRS(N)                                                     \
    case N:                                                                 \
        if constexpr (N <= MOST_PAIRS) attend_first<E, N>(c, pairs, after); \
        return;
        JITNEY_PAIRS(1) JITNEY_PAIRS(2) JITNEY_PAIRS(3) JITNEY_PAIRS(4) JITNEY_PAIRS(5) JITNEY_PAIRS(6)
        JITNEY_PAIRS(7) JITNEY_PAIRS(8) JITNEY_PAIRS(9) JITNEY_PAIRS(10) JITNEY_PAIRS(11) JITNEY_PAIRS(12)
#undef JITNEY_PAIRS
    }
}

// Queries [first, first + count) of one row.
struct Item {
    int32_t row, first, count;
};

// The work of a step, in pieces that threads can share; `items` has room for num_rows + num_tokens / ITEM_QUERIES.
inline int items_of(const Batch& batch, Item* items) {
    int count = 0;
    for (int row = 0; row < batch.num_rows; ++row)
        for (long token = batch.row_firsts[row], end = batch.row_firsts[row + 1]; token < end; token += ITEM_QUERIES)
            items[count++] = {row, (int32_t)token, (int32_t)(end - token < ITEM_QUERIES ? end - token : ITEM_QUERIES)};
    return count;
}

// queries: [T][num_heads][keys_width]; out: [T], rows of `out_stride` numbers; sinks: [num_heads] or null.
template <class E>
void attention(Team& team, int thread, const Shape& shape, const Plane& plane, const Batch& batch, const Item* items,
               int num_items, const typename E::Stored* queries, typename E::Stored* out, long out_stride,
               const float* sinks) {
    const int group = shape.group();
    const long width = shape.keys_width();
    Pair<E> pairs[MOST_PAIRS];
    for (int index; (index = team.take(thread, num_items * shape.num_kv_heads)) >= 0;) {
        const Item item = items[index / shape.num_kv_heads];
        const int kv_head = index % shape.num_kv_heads;
        const Context<E> context = context_of<E>(shape, plane, batch, item.row, kv_head);
        const int total = item.count * group, num_pieces = (total + MOST_PAIRS - 1) / MOST_PAIRS;
        for (int piece = 0; piece < num_pieces; ++piece) {
            const int from = total * piece / num_pieces, end = total * (piece + 1) / num_pieces;
            for (int i = from; i < end; ++i) {
                const int token = item.first + i / group, head = kv_head * group + i % group;
                const long position = batch.positions[token];
                pairs[i - from] = {queries + ((long)token * shape.num_heads + head) * width,
                                   out + token * out_stride + head * shape.value_dim,
                                   shape.first_seen(position),
                                   position,
                                   sinks ? sinks[head] : 0.0f,
                                   sinks != nullptr};
            }
            const typename E::Stored* after = piece == 0 ? context.keys_of(pairs[0].first / TILE) : nullptr;
            if (after && num_pieces == 1 && index + 1 < num_items * shape.num_kv_heads) {
                // What this thread most likely attends to next is fetched beside the last tile.
                const Item& next = items[(index + 1) / shape.num_kv_heads];
                const int next_head = (index + 1) % shape.num_kv_heads;
                const Context<E> ahead = context_of<E>(shape, plane, batch, next.row, next_head);
                after = ahead.keys_of(shape.first_seen(batch.positions[next.first]) / TILE);
            }
            attend_some<E>(context, pairs, end - from, after);
        }
    }
}

}  // namespace jitney
