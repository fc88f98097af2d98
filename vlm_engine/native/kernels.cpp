// What Python calls. All pointers are of tensors that the caller keeps alive; bfloat16 unless told otherwise.
#include "decoder.h"

using namespace vlm;

extern "C" {

// Threads for linear layers of `rows` rows, 0 for all; rows up to vlm_tile_rows().
void vlm_set_threads(index_t rows, index_t count) { threads.for_rows[rows] = static_cast<int>(count); }
index_t vlm_tile_rows() { return kTileRows; }

// Threads of all that the calling thread runs from now on.
void vlm_set_team(index_t count) { omp_set_num_threads(static_cast<int>(count)); }

// Elements of a packed layer.
index_t vlm_packed_size(index_t columns, index_t depth) { return round_up(columns, kColumns) * depth; }

void vlm_pack_linear(const bf16* weight, const bf16* up, bf16* panels, index_t columns, index_t depth) {
    pack_linear(weight, up, panels, columns, depth, [](bf16* pairs, index_t i, bf16 number) { pairs[i] = number; });
}

void vlm_pack_codes(const std::int8_t* weight, const std::int8_t* up, std::uint8_t* panels, index_t columns,
                    index_t depth) {
    pack_linear(weight, up, panels, columns, depth, [](std::uint8_t* pairs, index_t i, std::int8_t number) {
        pairs[CodedWeights::place(i)] = CodedWeights::code(number);
    });
}

// One of `out` (bfloat16) and `wide` (float32) is given.
void vlm_linear(const Linear* layer, const bf16* x, const bf16* residual, bf16* out, float* wide, index_t rows) {
    const index_t width = layer->activation == kSiluTimesUp ? layer->columns / 2 : layer->columns;
    linear({*layer, x, layer->depth, residual, out, wide, width}, rows);
}

void vlm_rms_norm(const bf16* x, const float* weight, bf16* out, index_t rows, index_t size, float epsilon) {
    rms_norm(x, weight, out, rows, size, epsilon);
}

// Layers over `hidden` [rows, hidden] in place; cos and sin float32 [rows, head_dim].
void vlm_decoder(const Geometry* geometry, const Layer* layers, index_t num_layers, bf16* hidden, index_t rows,
                 const float* cos, const float* sin, const std::int64_t* write_slots, const Span* spans,
                 index_t num_spans) {
    static thread_local Scratch normed, wide, attended;
    index_t width = geometry->qkv_width();
    for (index_t i = 0; i < num_layers; ++i) width = std::max(width, layers[i].down.depth);
    bf16* own_normed = static_cast<bf16*>(normed.get(2 * rows * geometry->hidden));
    bf16* own_wide = static_cast<bf16*>(wide.get(2 * rows * width));
    bf16* own_attended = static_cast<bf16*>(attended.get(2 * rows * geometry->query_width()));
    const std::vector<Task> tasks = attention_tasks(*geometry, spans, num_spans);
    const int team = attention_team(*geometry, spans, num_spans);
    for (index_t i = 0; i < num_layers; ++i)
        run_layer(*geometry, layers[i], hidden, rows, cos, sin, write_slots, spans, tasks, team, own_normed, own_wide,
                  own_attended);
}

// Splits qkv [rows, 3, num_heads, head_dim] into heads, out [3, num_heads, num_rows, head_dim] from row `first` on, queries
// and keys rotated by cos and sin (float32 [rows, head_dim] or null: as they are).
void vlm_split_heads(const bf16* qkv, const float* cos, const float* sin, bf16* out, index_t rows, index_t num_heads,
                     index_t head_dim, index_t num_rows, index_t first) {
#pragma omp parallel for schedule(static)
    for (index_t row = 0; row < rows; ++row) {
        for (index_t head = 0; head < 3 * num_heads; ++head) {
            bf16* own = out + (head * num_rows + first + row) * head_dim;
            std::copy_n(qkv + (row * 3 * num_heads + head) * head_dim, head_dim, own);
            if (cos && head < 2 * num_heads) rotate(own, cos + row * head_dim, sin + row * head_dim, head_dim);
        }
    }
}

// Sizes in elements of the panels of `num_keys` keys of a head.
index_t vlm_keys_size(index_t num_keys, index_t head_dim) { return Panels::keys_size(num_keys, head_dim); }
index_t vlm_values_size(index_t num_keys, index_t head_dim) { return Panels::values_size(num_keys, head_dim); }

// Keys and values [num_heads, num_keys, head_dim], rows [begin, end), into panels of all heads, one after the other.
void vlm_pack_panels(const bf16* keys, const bf16* values, bf16* key_panels, bf16* value_panels, index_t num_heads,
                     index_t num_keys, index_t head_dim, index_t begin, index_t end) {
#pragma omp parallel for schedule(dynamic)
    for (index_t head = 0; head < num_heads; ++head) {
        const Panels panels{key_panels + head * Panels::keys_size(num_keys, head_dim),
                            value_panels + head * Panels::values_size(num_keys, head_dim), num_keys, head_dim};
        const bf16 *k = keys + head * num_keys * head_dim, *v = values + head * num_keys * head_dim;
        pack_panels(panels, begin, end, [&](index_t i) { return k + i * head_dim; },
                    [&](index_t i) { return v + i * head_dim; });
    }
}

// Every query sees every key. Queries [num_heads, num_rows, head_dim] with stride `head_stride` between heads; out
// [num_rows, num_heads, head_dim].
void vlm_attend_panels(const bf16* query, index_t head_stride, const bf16* key_panels, const bf16* value_panels, bf16* out,
                       index_t num_heads, index_t num_rows, index_t num_keys, index_t head_dim, float scale) {
    const index_t high = even_rows(num_rows), group = 4 * high;
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (index_t head = 0; head < num_heads; ++head) {
        for (index_t first = 0; first < num_rows; first += group) {
            const Panels panels{const_cast<bf16*>(key_panels) + head * Panels::keys_size(num_keys, head_dim),
                                const_cast<bf16*>(value_panels) + head * Panels::values_size(num_keys, head_dim), num_keys,
                                head_dim};
            const index_t last = std::min(num_rows, first + group);
            for (index_t row = first; row < last; row += high)
                attend_tile(
                    panels, query + head * head_stride + row * head_dim, std::min(high, last - row), scale,
                    [&](index_t) { return num_keys; },
                    [&](index_t m) { return out + ((row + m) * num_heads + head) * head_dim; });
        }
    }
}

// Windows: rows [bounds[w], bounds[w + 1]) see each other. query, keys and values are [num_heads, rows, head_dim] with
// stride `head_stride` between heads, out [rows, num_heads, head_dim]; bounds count from their first row.
void vlm_attend_windows(const bf16* query, const bf16* keys, const bf16* values, index_t head_stride, bf16* out,
                        const std::int64_t* bounds, index_t num_windows, index_t num_heads, index_t head_dim, float scale) {
#pragma omp parallel for collapse(2) schedule(dynamic, 4)
    for (index_t w = 0; w < num_windows; ++w) {
        for (index_t head = 0; head < num_heads; ++head) {
            static thread_local Scratch key_scratch, value_scratch;
            const index_t begin = bounds[w], count = bounds[w + 1] - begin, high = even_rows(count);
            const index_t start = head * head_stride + begin * head_dim;
            const Panels panels{static_cast<bf16*>(key_scratch.get(2 * Panels::keys_size(count, head_dim))),
                                static_cast<bf16*>(value_scratch.get(2 * Panels::values_size(count, head_dim))), count,
                                head_dim};
            pack_panels(panels, 0, count, [&](index_t i) { return keys + start + i * head_dim; },
                        [&](index_t i) { return values + start + i * head_dim; });
            for (index_t row = 0; row < count; row += high)
                attend_tile(
                    panels, query + start + row * head_dim, std::min(high, count - row), scale,
                    [&](index_t) { return count; },
                    [&](index_t m) { return out + ((begin + row + m) * num_heads + head) * head_dim; });
        }
    }
}

}  // extern "C"
