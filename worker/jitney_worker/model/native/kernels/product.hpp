// Matrix products with weights that are re-laid once: out[row, column] = sum over k of in[row, k] * weight[column, k].
//
//     panel   32 columns over the whole depth: [depth / PACK][32][PACK], padded with zeros
//     tile    up to MOST_ROWS rows of one panel: all its sums stay in registers
//
// Every sum is added up along the depth in one order, whoever its neighbours are: a row's result does not depend on
// how many rows are computed beside it. That is what makes a batch invisible to its members.
#pragma once

#include "elements.hpp"
#include "team.hpp"

namespace jitney {

constexpr int PANEL = 32;

#if defined(__AVX512F__)
constexpr int VECTORS = 2, MOST_ROWS = 14;  // 28 sums and 2 rows of weights in 32 registers
#else
constexpr int VECTORS = 1, MOST_ROWS = 6;
#endif

constexpr int STRETCH = 8, LINES_A_STRETCH = 2 * STRETCH;  // steps between prefetches, and lines of weights in them

constexpr int BLOCK_ROWS = 16 * MOST_ROWS;  // rows whose inputs stay in the second-level cache while panels go by

// Kept by the caller; `panels` as `pack` makes them. scales and sums: of int8 alone, one for each column.
struct Matrix {
    const void* panels;
    const float* bias;
    const float* scales;
    const int32_t* sums;
    int32_t num_columns;
    int32_t depth;
    int32_t kind;

    int num_panels() const { return (num_columns + PANEL - 1) / PANEL; }
};

// Rows of activations. stride: numbers from one row to the next, a multiple of PANEL; what lies between a row's end
// and the next row is zero (or anything, in int8, where the weights are zero there). scales: of int8 alone.
template <class E>
struct Rows {
    const typename E::Stored* first;
    long stride;
    const float* scales;
};

template <class E>
INLINE long panel_size(const Matrix& matrix) {
    return round_up(matrix.depth, E::PACK) * PANEL;
}

template <class E, int ROWS>
INLINE void multiply(const typename E::Stored* in, long stride, const typename E::Stored* panel, int steps,
                     const char* ahead, int lines_ahead, typename E::Sum (&sums)[ROWS][VECTORS]) {
    for (auto& row : sums)
        for (auto& sum : row) sum = typename E::Sum{};
    constexpr int ROW = LANES * E::PACK, STEP = PANEL * E::PACK;
    for (int from = 0; from < steps; from += STRETCH) {
        int end = from + STRETCH < steps ? from + STRETCH : steps;
        for (int line = 0; line < lines_ahead; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        for (int step = from; step < end; ++step, panel += STEP, in += E::PACK) {
            Ints weights[VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; ++v) weights[v] = load_as<Ints>(panel + v * ROW);
#pragma GCC unroll 14
            for (int row = 0; row < ROWS; ++row) {
                int32_t few = broadcastable(in + row * stride);
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; ++v) sums[row][v] = E::dot(sums[row][v], few, weights[v]);
            }
        }
    }
}

// The 32 results of each of ROWS rows as floats, in `out`.
template <class E, int ROWS>
__attribute__((noinline)) void tile(const Rows<E>& in, int row, const Matrix& matrix, int panel, const char* ahead,
                                    int lines_ahead, float (*out)[PANEL]) {
    using Stored = typename E::Stored;
    const int steps = (int)(round_up(matrix.depth, E::PACK) / E::PACK);
    const Stored* weights = (const Stored*)matrix.panels + panel * panel_size<E>(matrix);
    for (int part = 0; part < PANEL / LANES; part += VECTORS) {
        typename E::Sum sums[ROWS][VECTORS];
        multiply<E, ROWS>(in.first + row * in.stride, in.stride, weights + part * LANES * E::PACK, steps, ahead,
                          part ? 0 : lines_ahead, sums);
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECTORS; ++v) {
                int column = (part + v) * LANES;
                if constexpr (E::KIND == INT8) {
                    Ints sum = sums[r][v] - load_as<Ints>(matrix.sums + panel * PANEL + column) * 128;
                    Floats scale = load(matrix.scales + panel * PANEL + column) * in.scales[row + r];
                    store(out[r] + column, __builtin_convertvector(sum, Floats) * scale);
                } else {
                    store(out[r] + column, sums[r][v]);
                }
            }
    }
}

template <class E>
INLINE void any_tile(int height, const Rows<E>& in, int row, const Matrix& matrix, int panel, const char* ahead,
                     int lines_ahead, float (*out)[PANEL]) {
    switch (height) {
#define JITNEY_TILE(ROWS)                                                        \
    case ROWS:                                                                   \
        if constexpr (ROWS <= MOST_ROWS)                                         \
            tile<E, ROWS>(in, row, matrix, panel, ahead, lines_ahead, out);      \
        return;
        JITNEY_TILE(1) JITNEY_TILE(2) JITNEY_TILE(3) JITNEY_TILE(4) JITNEY_TILE(5) JITNEY_TILE(6) JITNEY_TILE(7)
        JITNEY_TILE(8) JITNEY_TILE(9) JITNEY_TILE(10) JITNEY_TILE(11) JITNEY_TILE(12) JITNEY_TILE(13) JITNEY_TILE(14)
#undef JITNEY_TILE
    }
}

// All rows times all columns, shared out among the team. finish(row, column, values): what becomes of 32 results.
// The caller passes a barrier before anybody reads what `finish` wrote.
template <class E, class Finish>
void product(Team& team, int thread, const Rows<E>& in, int num_rows, const Matrix& matrix, Finish finish) {
    const int num_panels = matrix.num_panels(), num_blocks = (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const long panel_bytes = panel_size<E>(matrix) * (long)sizeof(typename E::Stored);
    alignas(64) float out[MOST_ROWS][PANEL];
    for (int index; (index = team.take(thread, num_panels * num_blocks)) >= 0;) {
        const int panel = index % num_panels, first = index / num_panels * BLOCK_ROWS;
        const int rows = num_rows - first < BLOCK_ROWS ? num_rows - first : BLOCK_ROWS;
        const int num_tiles = (rows + MOST_ROWS - 1) / MOST_ROWS, height = (rows + num_tiles - 1) / num_tiles;
        // The panel after this one is fetched while this one is multiplied, a share of it beside each tile.
        const int lines_ahead = panel + 1 < num_panels ? (LINES_A_STRETCH + num_tiles - 1) / num_tiles : 0;
        const char* ahead = (const char*)matrix.panels + (panel + 1) * panel_bytes;
        const long ahead_bytes = (panel_bytes / num_tiles + 63) / 64 * 64;
        for (int done = 0; done < rows; done += height, ahead += ahead_bytes) {
            const int some = rows - done < height ? rows - done : height;
            any_tile<E>(some, in, first + done, matrix, panel, ahead, lines_ahead, out);
            for (int r = 0; r < some; ++r) finish(first + done + r, panel * PANEL, out[r]);
        }
    }
}

// One panel of weights: `rows` are pointers to the depth numbers of each of its 32 columns, or null for none.
template <class E>
void pack_panel(const typename E::Stored* const (&columns)[PANEL], int depth, typename E::Stored* panel) {
    for (int k = 0; k < depth; ++k)
        for (int c = 0; c < PANEL; ++c)
            panel[(k / E::PACK * PANEL + c) * E::PACK + k % E::PACK] = columns[c] ? columns[c][k] : typename E::Stored(0);
    for (int k = depth; k < round_up(depth, E::PACK); ++k)
        for (int c = 0; c < PANEL; ++c) panel[(k / E::PACK * PANEL + c) * E::PACK + k % E::PACK] = typename E::Stored(0);
}

}  // namespace jitney
