// The plain C interface: pointers and numbers, loaded by library.py. One file, so that one call of a compiler makes it.
#include <new>

#include "decoder.hpp"

using namespace jitney;

namespace {

// call(activations, weights) with the element types that a model's kinds name.
template <class Call>
void by_kind(int kind, int weights, Call call) {
    if (kind == BFLOAT16) {
        if (weights == INT8)
            call(Bf16(), Int8());
        else
            call(Bf16(), Bf16());
    } else {
        if (weights == INT8)
            call(F32(), Int8());
        else
            call(F32(), F32());
    }
}

template <class Call>
void with_decoder(void* team, const Model* model, void* rooms, Call call) {
    const Team::Turn turn(*(Team*)team);
    by_kind(model->kind, model->head.kind, [&](auto a, auto w) {
        Decoder<decltype(a), decltype(w)> decoder(*(Team*)team, *model, *(Rooms*)rooms);
        call(decoder);
    });
}

// Weights of one signed byte. One scale a row, by its largest magnitude; NaN where a number is not finite.
template <class E>
void quantise_all(Team& team, const typename E::Stored* weight, int num_rows, long depth, int8_t* bytes, float* scales,
                  int32_t* sums) {
    auto work = [&](int thread) {
        for (int row; (row = team.take(thread, num_rows)) >= 0;) {
            const typename E::Stored* from = weight + row * depth;
            float most = 0.0f;
            bool is_broken = false;
            for (long i = 0; i < depth; ++i) {
                const float x = fabsf(E::as_float(from[i]));
                most = x > most ? x : most;
                is_broken |= !(x < INFINITY);
            }
            const float scale = most / 127.0f, inverse = scale > 0.0f && !is_broken ? 127.0f / most : 0.0f;
            int32_t sum = 0;
            for (long i = 0; i < depth; ++i) {
                const int32_t whole = is_broken ? 0 : (int32_t)nearbyintf(E::as_float(from[i]) * inverse);
                bytes[row * depth + i] = (int8_t)whole;
                sum += whole;
            }
            scales[row] = is_broken ? NAN : scale, sums[row] = sum;
        }
    };
    team.run(work);
}

template <class E>
void pack_all(Team& team, const typename E::Stored* weight, long num_columns, long depth, const int64_t* order,
              typename E::Stored* panels) {
    const int num_panels = (int)((num_columns + PANEL - 1) / PANEL);
    const long size = round_up(depth, E::PACK) * PANEL;
    auto work = [&](int thread) {
        for (int panel; (panel = team.take(thread, num_panels)) >= 0;) {
            const typename E::Stored* columns[PANEL];
            for (int i = 0; i < PANEL; ++i) {
                const long column = (long)panel * PANEL + i, from = column < num_columns ? order[column] : -1;
                columns[i] = from < 0 ? nullptr : weight + from * depth;
            }
            pack_panel<E>(columns, (int)depth, panels + panel * size);
        }
    };
    team.run(work);
}

template <class E>
void attend_tensors(Team& team, const Shape& shape, const Plane& plane, const Batch& batch, Rooms& rooms,
                    const typename E::Stored* queries, const typename E::Stored* keys,
                    const typename E::Stored* values, const float* sinks, typename E::Stored* out) {
    const long width = shape.keys_width();
    Item* items = rooms.items.of<Item>(batch.num_rows + batch.num_tokens / ITEM_QUERIES + 1);
    const int num_items = items_of(batch, items);
    auto* padded = rooms.queries.of<typename E::Stored>((long)batch.num_tokens * shape.num_heads * width);
    auto work = [&](int thread) {
        for (int token; (token = team.take(thread, batch.num_tokens)) >= 0;) {
            for (int head = 0; head < shape.num_heads; ++head) {
                auto* to = padded + ((long)token * shape.num_heads + head) * width;
                const auto* from = queries + ((long)token * shape.num_heads + head) * shape.key_dim;
                for (int i = 0; i < width; ++i) to[i] = i < shape.key_dim ? from[i] : typename E::Stored(0);
            }
            for (int head = 0; head < shape.num_kv_heads; ++head) {
                float key[MOST_WIDTH], value[MOST_WIDTH];
                const auto* k = keys + ((long)token * shape.num_kv_heads + head) * shape.key_dim;
                const auto* v = values + ((long)token * shape.num_kv_heads + head) * shape.value_dim;
                for (int i = 0; i < shape.key_dim; ++i) key[i] = E::as_float(k[i]);
                for (int i = 0; i < shape.value_dim; ++i) value[i] = E::as_float(v[i]);
                keep<E>(shape, plane, batch, token, head, key, value);
            }
        }
        team.barrier();
        attention<E>(team, thread, shape, plane, batch, items, num_items, padded, out,
                     (long)shape.num_heads * shape.value_dim, sinks);
    };
    team.run(work);
}

}  // namespace

extern "C" {

// Sizes of what the caller lays out, so that it can refuse a library that disagrees: Matrix, Layer, Model, Batch, Shape,
// SamplingRow.
void jitney_sizes(int64_t* sizes) {
    sizes[0] = sizeof(Matrix), sizes[1] = sizeof(Layer), sizes[2] = sizeof(Model), sizes[3] = sizeof(Batch);
    sizes[4] = sizeof(Shape), sizes[5] = sizeof(SamplingRow);
}

void* jitney_team(int32_t size) { return new (std::nothrow) Team(size); }
int32_t jitney_team_size(void* team) { return ((Team*)team)->size(); }
void jitney_end_team(void* team) { delete (Team*)team; }
void* jitney_rooms() { return new (std::nothrow) Rooms(); }
void jitney_end_rooms(void* rooms) { delete (Rooms*)rooms; }

// Bytes that `pack` writes.
int64_t jitney_packed_size(int32_t kind, int64_t num_columns, int64_t depth) {
    const long panels = (num_columns + PANEL - 1) / PANEL * PANEL;
    if (kind == INT8) return panels * round_up(depth, Int8::PACK);
    if (kind == BFLOAT16) return panels * round_up(depth, Bf16::PACK) * 2;
    return panels * depth * 4;
}

// Re-lay weight [.., depth]: column i of the result is its row order[i], or zeros for -1.
void jitney_pack(void* team, int32_t kind, const void* weight, int64_t num_columns, int64_t depth,
                 const int64_t* order, void* panels) {
    const Team::Turn turn(*(Team*)team);
    if (kind == INT8)
        pack_all<Int8>(*(Team*)team, (const uint8_t*)weight, num_columns, depth, order, (uint8_t*)panels);
    else if (kind == BFLOAT16)
        pack_all<Bf16>(*(Team*)team, (const uint16_t*)weight, num_columns, depth, order, (uint16_t*)panels);
    else
        pack_all<F32>(*(Team*)team, (const float*)weight, num_columns, depth, order, (float*)panels);
}

// Of weight [num_rows, depth]: signed bytes of the same shape, and each row's scale and sum of bytes.
void jitney_quantise(void* team, int32_t kind, const void* weight, int32_t num_rows, int64_t depth, int8_t* bytes,
                     float* scales, int32_t* sums) {
    const Team::Turn turn(*(Team*)team);
    if (kind == BFLOAT16)
        quantise_all<Bf16>(*(Team*)team, (const uint16_t*)weight, num_rows, depth, bytes, scales, sums);
    else
        quantise_all<F32>(*(Team*)team, (const float*)weight, num_rows, depth, bytes, scales, sums);
}

// One matrix by itself: rows [num_rows][depth] of `kind`, out float32 [num_rows][num_columns].
void jitney_linear(void* team, int32_t kind, const Matrix* matrix, void* rooms, const void* rows, int32_t num_rows,
                   float* out) {
    const Team::Turn turn(*(Team*)team);
    const Model none{};
    by_kind(kind, matrix->kind, [&](auto a, auto w) {
        Decoder<decltype(a), decltype(w)> decoder(*(Team*)team, none, *(Rooms*)rooms);
        decoder.linear(*matrix, (const typename decltype(a)::Stored*)rows, num_rows, out);
    });
}

void jitney_forward(void* team, const Model* model, void* rooms, const Batch* batch, const Plane* planes,
                    float* hidden) {
    with_decoder(team, model, rooms, [&](auto& decoder) { decoder.forward(*batch, planes, hidden); });
}

void jitney_logits(void* team, const Model* model, void* rooms, const float* hidden, int32_t num_rows,
                   float* logits) {
    with_decoder(team, model, rooms, [&](auto& decoder) { decoder.logits(hidden, num_rows, logits); });
}

// rows: [num_rows], or null if the largest logit decides everywhere.
void jitney_choose(void* team, const Model* model, void* rooms, const float* hidden, int32_t num_rows,
                   const SamplingRow* rows, int64_t* ids, float* tops) {
    with_decoder(team, model, rooms, [&](auto& decoder) { decoder.choose(hidden, num_rows, rows, ids, tops); });
}

// One layer's attention for a decoder that computes the rest itself: queries [T][num_heads][key_dim], keys and values
// [T][num_kv_heads][..], sinks [num_heads] or null, out [T][num_heads * value_dim].
void jitney_attend(void* team, int32_t kind, const Shape* shape, const Plane* plane, const Batch* batch, void* rooms,
                   const void* queries, const void* keys, const void* values, const float* sinks, void* out) {
    const Team::Turn turn(*(Team*)team);
    by_kind(kind, kind, [&](auto a, auto) {
        using Stored = const typename decltype(a)::Stored*;
        attend_tensors<decltype(a)>(*(Team*)team, *shape, *plane, *batch, *(Rooms*)rooms, (Stored)queries, (Stored)keys,
                                    (Stored)values, sinks, (typename decltype(a)::Stored*)out);
    });
}

}  // extern "C"
