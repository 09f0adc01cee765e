// The decoder of the Llama body, a whole step at a time: threads enter once and share every stage of every layer.
#pragma once

#include <stdio.h>
#include <stdlib.h>

#include "attention.hpp"
#include "product.hpp"
#include "rows.hpp"
#include "sampling.hpp"

namespace jitney {

struct Layer {
    Matrix qkv, o, gate_up, down;
    const float *input_norm, *post_norm, *q_norm, *k_norm;
    int32_t window, rotates;
};

// embedding: rows of the activations' kind, or null if they are taken out of the head's panels (tied, not quantised).
// The gate_up panels hold 16 columns of the gate and the same 16 of the other half.
struct Model {
    const Layer* layers;
    const float *norm, *frequencies;
    const void* embedding;
    Matrix head;
    int32_t kind, num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim, half_rotated;
    float eps, rope_scale, attention_scale, embedding_multiplier, residual_multiplier, logits_divisor;
};

// Memory that grows and is never handed back while the team lives. Models of other widths may have used it before: who
// reads the padding between rows has zeroed it.
class Room {
  public:
    ~Room() { free(memory_); }
    template <class T>
    T* of(long count) {
        const long bytes = (count * (long)sizeof(T) + 63) / 64 * 64 + 64;
        if (bytes > size_) {
            free(memory_);
            memory_ = aligned_alloc(64, (size_t)(size_ = bytes));
            if (memory_ == nullptr) {  // half a step cannot be taken back, and its threads wait for each other
                fprintf(stderr, "jitney: no memory for %ld bytes of a step\n", bytes);
                abort();
            }
        }
        return (T*)memory_;
    }

  private:
    void* memory_ = nullptr;
    long size_ = 0;
};

struct Rooms {
    Room normed, given, heads, queries, attended, activated, angles, bytes, scales, items, best, logits, candidates, places;
};

// A: what activations and the cache are kept as; W: what the weights are.
template <class A, class W>
class Decoder {
    using Stored = typename A::Stored;

  public:
    Decoder(Team& team, const Model& model, Rooms& rooms) : team_(team), m_(model), rooms_(rooms) {}

    // Hidden states before the last norm, [num_tokens][round_up(hidden, 32)], in `out`.
    // planes: of each layer.
    void forward(const Batch& batch, const Plane* planes, float* out) {
        lay_out(batch, out);
        auto work = [&](int thread) {
            embed(thread);
            for (int i = 0; i < m_.num_layers; ++i) layer(thread, m_.layers[i], planes[i]);
        };
        team_.run(work);
    }

    // Float32 logits [num_rows][vocabulary] of rows of hidden states.
    void logits(const float* hidden, int num_rows, float* out) {
        const float divisor = m_.logits_divisor;
        const long vocabulary = m_.head.num_columns;
        Stored* normed = rooms_.normed.template of<Stored>(num_rows * hidden_stride());
        make_bytes(num_rows, hidden_stride());
        auto work = [&](int thread) {
            norm_rows(thread, hidden, num_rows, m_.norm, normed);
            product<W>(team_, thread, input(normed, hidden_stride()), num_rows, m_.head,
                       [&](int row, int column, const float* values) {
                           float* to = out + row * vocabulary + column;
                           for (int i = 0; i < PANEL && column + i < vocabulary; ++i) to[i] = values[i] / divisor;
                       });
        };
        team_.run(work);
    }

    // A token for each row and the row's largest logit, NaN if it has one. `rows` null, or a row of temperature 0: the
    // lowest id that has the largest logit. Only the logits of the other rows are written down, and nobody else sees them.
    void choose(const float* hidden, int num_rows, const SamplingRow* rows, int64_t* ids, float* tops) {
        const long vocabulary = m_.head.num_columns, stride = round_up(vocabulary, PANEL);
        Stored* normed = rooms_.normed.template of<Stored>(num_rows * hidden_stride());
        Best* best = rooms_.best.of<Best>((long)num_rows * team_.size());
        Drawing drawing = drawn_rows(rows, num_rows);
        float* logits = rooms_.logits.of<float>(drawing.count * stride);
        Candidate* candidates = rooms_.candidates.of<Candidate>(drawing.count ? team_.size() * vocabulary : 0);
        make_bytes(num_rows, hidden_stride());
        auto work = [&](int thread) {
            Best* own = best + (long)thread * num_rows;
            for (int row = 0; row < num_rows; ++row) own[row].clear();
            norm_rows(thread, hidden, num_rows, m_.norm, normed);
            product<W>(team_, thread, input(normed, hidden_stride()), num_rows, m_.head,
                       [&](int row, int column, float* values) {
                           // Before they are compared: two numbers may become one by a division.
                           for (int i = 0; m_.logits_divisor != 1.0f && i < PANEL; ++i) values[i] /= m_.logits_divisor;
                           own[row].see(values, column, vocabulary);
                           if (drawing.count == 0 || drawing.place[row] < 0) return;
                           memcpy(logits + drawing.place[row] * stride + column, values, PANEL * sizeof(float));
                       });
            team_.barrier();
            for (int row; (row = team_.take(thread, num_rows)) >= 0;) {
                merge(best, row, num_rows, ids[row], tops[row]);
                if (drawing.count == 0 || drawing.place[row] < 0 || !isfinite(tops[row])) continue;
                ids[row] = draw(logits + drawing.place[row] * stride, vocabulary, tops[row], rows[row],
                                candidates + thread * vocabulary);
            }
        };
        team_.run(work);
    }

    // rows [num_rows][depth] times any matrix of this kind of weights, plus its bias, in `out` [num_rows][num_columns].
    void linear(const Matrix& matrix, const Stored* rows, int num_rows, float* out) {
        const long depth = matrix.depth, stride = round_up(depth, PANEL), columns = matrix.num_columns;
        Stored* given = rooms_.given.template of<Stored>(num_rows * stride);
        make_bytes(num_rows, stride);
        auto work = [&](int thread) {
            for (int row; (row = team_.take(thread, num_rows)) >= 0;)
                for (long i = 0; i < stride; ++i) given[row * stride + i] = i < depth ? rows[row * depth + i] : Stored(0);
            team_.barrier();
            quantise(thread, given, depth, stride, num_rows);
            product<W>(team_, thread, input(given, stride), num_rows, matrix,
                       [&](int row, int column, const float* values) {
                           float* to = out + row * columns + column;
                           for (int i = 0; i < PANEL && column + i < columns; ++i)
                               to[i] = values[i] + (matrix.bias ? matrix.bias[column + i] : 0.0f);
                       });
        };
        team_.run(work);
    }

  private:
    // What one thread has seen of a row: the largest value of each column of a panel, and whose it is.
    struct Best {
        float values[PANEL];
        int32_t panels[PANEL];
        int32_t broken[LANES];  // not zero where a NaN was

        void clear() {
            for (int i = 0; i < PANEL; ++i) values[i] = -INFINITY, panels[i] = 0, broken[i % LANES] = 0;
        }

        void see(const float* now, int column, long vocabulary) {
            for (int half = 0; half < PANEL; half += LANES) {
                Floats x = load(now + half), before = load(values + half);
                Ints owner = load_as<Ints>(panels + half);
                Ints is_better = (x > before) | ((x == before) & (splat(column) < owner));  // panels come in any order
                for (int i = 0; column + PANEL > vocabulary && i < LANES; ++i)
                    if (column + half + i >= vocabulary) is_better[i] = 0;
                store(values + half, (Floats)(((Ints)x & is_better) | ((Ints)before & ~is_better)));
                owner = (splat(column) & is_better) | (owner & ~is_better);
                memcpy(panels + half, &owner, sizeof owner);
                Ints now_broken = load_as<Ints>(broken) | (x != x);
                memcpy(broken, &now_broken, sizeof now_broken);
            }
        }
    };

    struct Drawing {
        const int32_t* place;
        long count;
    };

    // Where each row's logits are kept, -1 for those that need none.
    Drawing drawn_rows(const SamplingRow* rows, int num_rows) {
        if (rows == nullptr) return {nullptr, 0};
        int32_t *place = rooms_.places.of<int32_t>(num_rows), count = 0;
        for (int row = 0; row < num_rows; ++row) place[row] = rows[row].temperature > 0.0f ? count++ : -1;
        return {place, count};
    }

    void merge(const Best* best, int row, int num_rows, int64_t& id, float& top) const {
        top = -INFINITY, id = 0;
        for (int thread = 0; thread < team_.size(); ++thread) {
            const Best& b = best[(long)thread * num_rows + row];
            for (int i = 0; i < PANEL; ++i) {
                const int64_t candidate = b.panels[i] + i;
                if (b.values[i] > top || (b.values[i] == top && candidate < id)) top = b.values[i], id = candidate;
            }
        }
        for (int thread = 0; thread < team_.size(); ++thread)
            for (int i = 0; i < LANES; ++i)
                if (best[(long)thread * num_rows + row].broken[i]) top = NAN, id = 0;
    }

    long hidden_stride() const { return round_up(m_.hidden, PANEL); }
    long attended_stride() const { return round_up((long)m_.num_heads * m_.head_dim, PANEL); }
    long activated_stride() const { return round_up(m_.intermediate, PANEL); }
    long heads_stride() const { return round_up((long)(m_.num_heads + 2 * m_.num_kv_heads) * m_.head_dim, PANEL); }

    void lay_out(const Batch& batch, float* out) {
        const long tokens = batch.num_tokens;
        batch_ = batch;
        hidden_ = out;
        normed_ = rooms_.normed.template of<Stored>(tokens * hidden_stride());
        heads_ = rooms_.heads.of<float>(tokens * heads_stride());
        queries_width_ = round_up(m_.head_dim, LANES);
        queries_ = rooms_.queries.template of<Stored>(tokens * m_.num_heads * queries_width_);
        attended_ = rooms_.attended.template of<Stored>(tokens * attended_stride());
        activated_ = rooms_.activated.template of<Stored>(tokens * activated_stride());
        angles_ = rooms_.angles.of<float>(tokens * 2 * m_.half_rotated);
        items_ = rooms_.items.of<Item>(batch.num_rows + tokens / ITEM_QUERIES + 1);
        num_items_ = items_of(batch, items_);
        long widest = hidden_stride();
        widest = attended_stride() > widest ? attended_stride() : widest;
        make_bytes(tokens, activated_stride() > widest ? activated_stride() : widest);
    }

    // Room for quantised rows, if weights are.
    void make_bytes(long rows, long stride) {
        if (W::KIND != INT8) return;
        bytes_ = rooms_.bytes.of<uint8_t>(rows * stride);
        scales_ = rooms_.scales.of<float>(rows);
    }

    Rows<W> input(const Stored* rows, long stride) const {
        if constexpr (W::KIND == INT8)
            return {bytes_, stride, scales_};
        else
            return {rows, stride, nullptr};
    }

    void quantise(int thread, Stored* rows, long width, long stride, int num_rows) {
        if constexpr (W::KIND == INT8) {
            for (int row; (row = team_.take(thread, num_rows)) >= 0;)
                scales_[row] = quantise_row<A>(rows + row * stride, width, stride, bytes_ + row * stride);
            team_.barrier();
        }
    }

    void norm_rows(int thread, const float* hidden, int num_rows, const float* weight, Stored* out) {
        const long stride = hidden_stride();
        for (int row; (row = team_.take(thread, num_rows)) >= 0;) {
            norm_row<A>(hidden + row * stride, weight, stride, m_.hidden, m_.eps,
                        out + row * stride);
            if constexpr (W::KIND == INT8)
                scales_[row] = quantise_row<A>(out + row * stride, m_.hidden, stride, bytes_ + row * stride);
        }
        team_.barrier();
    }

    void embed(int thread) {
        const int half = m_.half_rotated;
        for (int token; (token = team_.take(thread, batch_.num_tokens)) >= 0;) {
            float* row = hidden_ + token * hidden_stride();
            const long id = batch_.token_ids[token];
            const bool is_known = id >= 0 && id < m_.head.num_columns;  // another row fails as NaN does, alone
            for (int i = 0; i < m_.hidden; ++i)
                row[i] = is_known ? A::as_float(embedded(id, i)) * m_.embedding_multiplier : NAN;
            for (long i = m_.hidden; i < hidden_stride(); ++i) row[i] = 0.0f;
            float* angles = angles_ + (long)token * 2 * half;
            for (int i = 0; i < half; ++i) {  // one by one: a vector's last places differ with where it ends
                const float angle = (float)batch_.positions[token] * m_.frequencies[i];
                angles[i] = cosf(angle) * m_.rope_scale;
                angles[half + i] = sinf(angle) * m_.rope_scale;
            }
        }
        team_.barrier();
    }

    Stored embedded(long id, int i) const {
        if (m_.embedding) return ((const Stored*)m_.embedding)[id * m_.hidden + i];
        const Stored* panel = (const Stored*)m_.head.panels + id / PANEL * panel_size<A>(m_.head);
        return panel[(i / A::PACK * PANEL + id % PANEL) * A::PACK + i % A::PACK];
    }

    void layer(int thread, const Layer& layer, const Plane& plane) {
        const int tokens = batch_.num_tokens;
        norm_rows(thread, hidden_, tokens, layer.input_norm, normed_);
        product<W>(team_, thread, input(normed_, hidden_stride()), tokens, layer.qkv,
                   [&](int row, int column, const float* values) {
                       float* to = heads_ + row * heads_stride() + column;
                       for (int i = 0; i < PANEL; ++i) to[i] = values[i] + (layer.qkv.bias ? layer.qkv.bias[column + i] : 0.0f);
                   });
        team_.barrier();
        prepare_heads(thread, layer, plane);
        team_.barrier();
        Shape shape = shape_of(layer);
        attention<A>(team_, thread, shape, plane, batch_, items_, num_items_, queries_, attended_,
                     attended_stride(), nullptr);
        team_.barrier();
        quantise(thread, attended_, layer.o.depth, attended_stride(), tokens);
        add_product(thread, input(attended_, attended_stride()), layer.o);
        norm_rows(thread, hidden_, tokens, layer.post_norm, normed_);
        product<W>(team_, thread, input(normed_, hidden_stride()), tokens, layer.gate_up,
                   [&](int row, int column, const float* values) {
                       Floats gate = load(values), up = load(values + LANES);
                       if (layer.gate_up.bias)
                           gate = gate + load(layer.gate_up.bias + column), up = up + load(layer.gate_up.bias + column + LANES);
                       A::put(activated_ + row * activated_stride() + column / 2, silu(gate) * up);
                   });
        team_.barrier();
        quantise(thread, activated_, layer.down.depth, activated_stride(), tokens);
        add_product(thread, input(activated_, activated_stride()), layer.down);
    }

    void add_product(int thread, const Rows<W>& in, const Matrix& matrix) {
        const float multiplier = m_.residual_multiplier;
        product<W>(team_, thread, in, batch_.num_tokens, matrix, [&](int row, int column, const float* values) {
            float* to = hidden_ + row * hidden_stride() + column;
            for (int i = 0; i < PANEL; ++i) to[i] += (values[i] + (matrix.bias ? matrix.bias[column + i] : 0.0f)) * multiplier;
        });
        team_.barrier();
    }

    Shape shape_of(const Layer& layer) const {
        return {m_.num_heads, m_.num_kv_heads, m_.head_dim, m_.head_dim, m_.attention_scale, 0.0f, layer.window, 0};
    }

    void prepare_heads(int thread, const Layer& layer, const Plane& plane) {
        const int dim = m_.head_dim, half = m_.half_rotated;
        const Shape shape = shape_of(layer);
        for (int token; (token = team_.take(thread, batch_.num_tokens)) >= 0;) {
            float* heads = heads_ + token * heads_stride();
            const float *cos = angles_ + (long)token * 2 * half, *sin = cos + half;
            for (int head = 0; head < m_.num_heads + m_.num_kv_heads; ++head) {
                const float* weight = head < m_.num_heads ? layer.q_norm : layer.k_norm;
                if (weight) norm_head(heads + head * dim, weight, dim, m_.eps);
                if (layer.rotates) rotate(heads + head * dim, cos, sin, half);
            }
            Stored* queries = queries_ + (long)token * m_.num_heads * queries_width_;
            for (int head = 0; head < m_.num_heads; ++head, queries += queries_width_) {
                convert<A>(heads + head * dim, dim, queries);
                for (long i = dim; i < queries_width_; ++i) queries[i] = Stored(0);
            }
            const float *keys = heads + m_.num_heads * dim, *values = keys + m_.num_kv_heads * dim;
            for (int head = 0; head < m_.num_kv_heads; ++head)
                keep<A>(shape, plane, batch_, token, head, keys + head * dim, values + head * dim);
        }
    }

    Team& team_;
    const Model& m_;
    Rooms& rooms_;
    Batch batch_;
    float *hidden_, *heads_, *angles_, *scales_ = nullptr;
    Stored *normed_, *queries_, *attended_, *activated_;
    uint8_t* bytes_ = nullptr;
    Item* items_;
    int num_items_;
    long queries_width_;
};

}  // namespace jitney
