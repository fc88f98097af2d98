// Decoder layers of the Llama kind: norm, attention through the paged cache, norm, gated MLP.
#pragma once

#include <vector>

#include "attention.h"
#include "linear.h"

namespace vlm {

// One sequence's share of a step: queries are rows [first_row, first_row + num_queries), the last of its context.
struct Span {
    index_t first_row, num_queries, num_context;
    const std::int32_t* slots;  // [num_context], where its keys and values are
};

struct Geometry {
    index_t hidden, num_heads, num_kv_heads, head_dim;
    float scale, epsilon;

    index_t query_width() const { return num_heads * head_dim; }
    index_t kv_width() const { return num_kv_heads * head_dim; }
    index_t qkv_width() const { return query_width() + 2 * kv_width(); }
};

struct Layer {
    const float *norm1, *norm2;          // [hidden]
    const float *query_norm, *key_norm;  // [head_dim] or null
    Linear qkv, output, gate_up, down;
    bf16 *keys, *values;  // [num_slots, num_kv_heads, head_dim]
};

// The stock order of roundings: normed to bfloat16, then times the weight. `x` and `out` may be the same.
inline void rms_norm_row(const bf16* x, const float* weight, bf16* out, index_t size, float epsilon) {
    __m512 squares = _mm512_setzero_ps();
    for (index_t i = 0; i < size; i += 16) {
        const __m512 v = load(x + i, first_lanes(size - i));
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / size + epsilon));
    for (index_t i = 0; i < size; i += 16) {
        const __mmask16 lanes = first_lanes(size - i);
        const __m512 normed = rounded(_mm512_mul_ps(load(x + i, lanes), factor));
        store(out + i, _mm512_mul_ps(normed, _mm512_maskz_loadu_ps(lanes, weight + i)), lanes);
    }
}

inline void rms_norm(const bf16* x, const float* weight, bf16* out, index_t rows, index_t size, float epsilon) {
#pragma omp parallel for schedule(static) if (rows > 16)
    for (index_t row = 0; row < rows; ++row) rms_norm_row(x + row * size, weight, out + row * size, size, epsilon);
}

// Rotates a head in place: halves (a, b) to (a cos - b sin, b cos + a sin); cos and sin [head_dim], halves alike.
inline void rotate(bf16* head, const float* cos, const float* sin, index_t head_dim) {
    const index_t half = head_dim / 2;
    for (index_t i = 0; i < half; i += 16) {
        const __mmask16 lanes = first_lanes(half - i);
        const __m512 a = load(head + i, lanes), b = load(head + half + i, lanes);
        const __m512 c0 = _mm512_maskz_loadu_ps(lanes, cos + i), s0 = _mm512_maskz_loadu_ps(lanes, sin + i);
        const __m512 c1 = _mm512_maskz_loadu_ps(lanes, cos + half + i), s1 = _mm512_maskz_loadu_ps(lanes, sin + half + i);
        store(head + i, _mm512_fmsub_ps(a, c0, _mm512_mul_ps(b, s0)), lanes);
        store(head + half + i, _mm512_fmadd_ps(b, c1, _mm512_mul_ps(a, s1)), lanes);
    }
}

// Norms and rotates the queries and keys of a row of `qkv`, and writes its key and value to the cache.
inline void place_row(const Geometry& g, const Layer& layer, bf16* qkv, const float* cos, const float* sin, index_t slot) {
    for (index_t head = 0; head < g.num_heads + g.num_kv_heads; ++head) {
        bf16* own = qkv + head * g.head_dim;
        const float* norm = head < g.num_heads ? layer.query_norm : layer.key_norm;
        if (norm) rms_norm_row(own, norm, own, g.head_dim, g.epsilon);
        rotate(own, cos, sin, g.head_dim);
    }
    const bf16* keys = qkv + g.query_width();
    std::copy_n(keys, g.kv_width(), layer.keys + slot * g.kv_width());
    std::copy_n(keys + g.kv_width(), g.kv_width(), layer.values + slot * g.kv_width());
}

// Queries [first, last) of a span that read one key head: packs what they see, then attends tile by tile. The heads
// that share a key head are rows of the same tiles.
inline void attend_span(const Geometry& g, const Layer& layer, const Span& span, index_t kv_head, index_t first,
                        index_t last, const bf16* qkv, bf16* out) {
    static thread_local Scratch key_scratch, value_scratch, query_scratch;
    const index_t before = span.num_context - span.num_queries, reach = before + last;
    const index_t group = g.num_heads / g.num_kv_heads, rows = (last - first) * group;
    Panels panels{static_cast<bf16*>(key_scratch.get(2 * Panels::keys_size(reach, g.head_dim))),
                  static_cast<bf16*>(value_scratch.get(2 * Panels::values_size(reach, g.head_dim))), reach, g.head_dim};
    const index_t stride = g.kv_width(), offset = kv_head * g.head_dim;
    pack_panels(
        panels, 0, reach, [&](index_t i) { return layer.keys + span.slots[i] * stride + offset; },
        [&](index_t i) { return layer.values + span.slots[i] * stride + offset; });
    bf16* query = static_cast<bf16*>(query_scratch.get(2 * kTileRows * g.head_dim));
    const index_t high = even_rows(rows);
    for (index_t row = 0; row < rows; row += high) {
        const index_t count = std::min(high, rows - row);
        auto token = [&](index_t m) { return first + (row + m) / group; };
        auto head = [&](index_t m) { return kv_head * group + (row + m) % group; };
        for (index_t m = 0; m < count; ++m) {
            const bf16* own = qkv + (span.first_row + token(m)) * g.qkv_width() + head(m) * g.head_dim;
            std::copy_n(own, g.head_dim, query + m * g.head_dim);
        }
        attend_tile(
            panels, query, count, g.scale, [&](index_t m) { return before + token(m) + 1; },
            [&](index_t m) { return out + (span.first_row + token(m)) * g.query_width() + head(m) * g.head_dim; });
    }
}

struct Task {
    index_t span, kv_head, first, last;
};

// Spans cut by key head, and long ones by queries too, so that all threads have work; the largest first.
inline std::vector<Task> attention_tasks(const Geometry& g, const Span* spans, index_t num_spans) {
    const index_t shortest = 64;
    std::vector<Task> tasks;
    for (index_t s = 0; s < num_spans; ++s) {
        const index_t wanted = (4 * omp_get_max_threads() + g.num_kv_heads - 1) / g.num_kv_heads;
        const index_t parts = std::clamp<index_t>(spans[s].num_queries / shortest, 1, wanted);
        for (index_t p = parts; p-- > 0;)
            for (index_t h = 0; h < g.num_kv_heads; ++h)
                tasks.push_back({s, h, spans[s].num_queries * p / parts, spans[s].num_queries * (p + 1) / parts});
    }
    std::stable_sort(tasks.begin(), tasks.end(), [&](const Task& a, const Task& b) {
        auto work = [&](const Task& t) { return (t.last - t.first + 8) * spans[t.span].num_context; };
        return work(a) > work(b);
    });
    return tasks;
}

inline int attention_team(const Geometry& g, const Span* spans, index_t num_spans) {
    double flops = 0;
    for (index_t s = 0; s < num_spans; ++s)
        flops += 4.0 * g.query_width() * spans[s].num_queries * spans[s].num_context;
    return Threads::of_work(flops);
}

// One layer over `hidden` [rows, hidden], in place.
inline void run_layer(const Geometry& g, const Layer& layer, bf16* hidden, index_t rows, const float* cos,
                      const float* sin, const std::int64_t* write_slots, const Span* spans,
                      const std::vector<Task>& tasks, int team, bf16* normed, bf16* wide, bf16* attended) {
    rms_norm(hidden, layer.norm1, normed, rows, g.hidden, g.epsilon);
    linear({layer.qkv, normed, g.hidden, nullptr, wide, nullptr, g.qkv_width()}, rows);
#pragma omp parallel for schedule(static) if (rows > 16)
    for (index_t row = 0; row < rows; ++row)
        place_row(g, layer, wide + row * g.qkv_width(), cos + row * g.head_dim, sin + row * g.head_dim, write_slots[row]);
#pragma omp parallel for schedule(dynamic) num_threads(team) if (team > 1)
    for (std::size_t t = 0; t < tasks.size(); ++t)
        attend_span(g, layer, spans[tasks[t].span], tasks[t].kv_head, tasks[t].first, tasks[t].last, wide, attended);
    linear({layer.output, attended, g.query_width(), hidden, hidden, nullptr, g.hidden}, rows);
    rms_norm(hidden, layer.norm2, normed, rows, g.hidden, g.epsilon);
    linear({layer.gate_up, normed, g.hidden, nullptr, wide, nullptr, layer.down.depth}, rows);
    linear({layer.down, wide, layer.down.depth, hidden, hidden, nullptr, g.hidden}, rows);
}

}  // namespace vlm
