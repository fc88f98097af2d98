// Attention over keys and values packed in panels, so that both its products are the same tile as a linear layer's.
#pragma once

#include "simd.h"

namespace vlm {

constexpr index_t kKeyBlock = 256;  // keys for which scores are held at once

// Keys as [keys / 32] panels of [head_dim / 2][2][16][2]; values as [head_dim / 32] panels of [keys / 2][2][16][2].
struct Panels {
    bf16* keys;
    bf16* values;
    index_t num_keys, head_dim;

    index_t padded_keys() const { return round_up(num_keys, kColumns); }
    static index_t keys_size(index_t n, index_t head_dim) { return round_up(n, kColumns) * head_dim; }
    static index_t values_size(index_t n, index_t head_dim) { return round_up(n, kColumns) * round_up(head_dim, kColumns); }
};

inline void transpose16(__m512i (&r)[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 16; i += 8) {
        for (int j = 0; j < 4; ++j) {
            t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
            t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
        }
    }
    for (int j = 0; j < 8; ++j) {
        r[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
        r[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
    }
}

// Sixteen keys, `row(i)` the pointer to one or null, into their half of a panel.
template <class Row>
inline void pack_sixteen_keys(Row&& row, index_t head_dim, bf16* panel) {
    for (index_t d = 0; d < head_dim; d += 32) {
        __m512i r[16];
        const index_t pairs = std::min<index_t>(16, (head_dim - d) / 2);
        for (int i = 0; i < 16; ++i) {
            const bf16* own = row(i);
            r[i] = own ? _mm512_maskz_loadu_epi32(first_lanes(pairs), own + d) : _mm512_setzero_si512();
        }
        transpose16(r);
        for (index_t k = 0; k < pairs; ++k) _mm512_storeu_si512(panel + (d / 2 + k) * 64, r[k]);
    }
}

// Two neighbouring values, interleaved, `columns` of them from `even` and `odd` on (null: zeros).
inline void pack_two_values(const bf16* even, const bf16* odd, index_t columns, bf16* out) {
    alignas(64) static const std::uint16_t low[32] = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                                                      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __mmask32 lanes = columns >= 32 ? 0xffffffffu : (1u << columns) - 1;
    const __m512i a = even ? _mm512_maskz_loadu_epi16(lanes, even) : _mm512_setzero_si512();
    const __m512i b = odd ? _mm512_maskz_loadu_epi16(lanes, odd) : _mm512_setzero_si512();
    const __m512i first = _mm512_load_si512(low);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(a, first, b));
    _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi16(a, second, b));
}

// Packs keys [begin, end) of `panels`; `key(i)` and `value(i)` point to the rows of key i. `begin` is a multiple of 32,
// `end` too unless it is the last key.
template <class Key, class Value>
inline void pack_panels(const Panels& panels, index_t begin, index_t end, Key&& key, Value&& value) {
    const index_t head_dim = panels.head_dim, padded = panels.padded_keys();
    for (index_t first = begin; first < end; first += 16) {
        auto row = [&](int i) { return first + i < end ? key(first + i) : static_cast<const bf16*>(nullptr); };
        pack_sixteen_keys(row, head_dim, panels.keys + first / 32 * 32 * head_dim + first % 32 * 2);
    }
    if (round_up(end, 16) % 32) {
        auto none = [](int) { return static_cast<const bf16*>(nullptr); };
        pack_sixteen_keys(none, head_dim, panels.keys + end / 32 * 32 * head_dim + 32);
    }
    for (index_t d = 0; d < head_dim; d += kColumns) {
        bf16* out = panels.values + d * padded;
        for (index_t j = begin; j < round_up(end, kColumns); j += 2) {
            const bf16* even = j < end ? value(j) + d : nullptr;
            const bf16* odd = j + 1 < end ? value(j + 1) + d : nullptr;
            pack_two_values(even, odd, head_dim - d, out + j / 2 * 64);
        }
    }
}

// Running softmax of one tile of queries.
struct Softmax {
    float top[kTileRows], total[kTileRows], shrink[kTileRows];
    alignas(64) float scores[kTileRows * kKeyBlock];
    alignas(64) bf16 weights[kTileRows * kKeyBlock];

    // Scores of keys [begin, begin + count) to weights; a row sees its first `seen` keys. `factor` turns a score into
    // a power of two.
    void row(int m, index_t begin, index_t count, index_t seen, float factor) {
        float* own = scores + m * kKeyBlock;
        const __m512 none = _mm512_set1_ps(-INFINITY);
        __m512 best = none;
        for (index_t j = 0; j < count; j += 16) {
            const __mmask16 lanes = first_lanes(seen - begin - j);
            const __m512 s = _mm512_mask_blend_ps(lanes, none, _mm512_load_ps(own + j));
            _mm512_store_ps(own + j, s);
            best = _mm512_max_ps(best, s);
        }
        const float now = std::max(top[m], _mm512_reduce_max_ps(best));
        const __m512 offset = _mm512_set1_ps(-now * factor), scale = _mm512_set1_ps(factor);
        __m512 sum = _mm512_setzero_ps();
        for (index_t j = 0; j < count; j += 16) {
            const __m512 w = exp2(_mm512_fmadd_ps(_mm512_load_ps(own + j), scale, offset));
            sum = _mm512_add_ps(sum, w);
            _mm256_store_si256((__m256i*)(weights + m * kKeyBlock + j), (__m256i)_mm512_cvtneps_pbh(w));
        }
        shrink[m] = top[m] == now ? 1.0f : std::exp2((top[m] - now) * factor);
        total[m] = total[m] * shrink[m] + _mm512_reduce_add_ps(sum);
        top[m] = now;
    }
};

// Attention of up to kTileRows queries; `seen(m)` keys for row m. query is [rows, head_dim] packed; out[m] points to
// [head_dim] of row m.
template <class Seen, class Out>
inline void attend_tile(const Panels& panels, const bf16* query, index_t rows, float scale, Seen&& seen, Out&& out) {
    static thread_local Softmax softmax;
    static thread_local Scratch scratch;
    const index_t head_dim = panels.head_dim, width = round_up(head_dim, kColumns);
    float* sums = static_cast<float*>(scratch.get(kTileRows * width * sizeof(float)));
    index_t reach = 0;
    for (index_t m = 0; m < rows; ++m) {
        softmax.top[m] = -INFINITY, softmax.total[m] = 0;
        reach = std::max<index_t>(reach, seen(m));
    }
    std::fill(sums, sums + rows * width, 0.0f);
    for (index_t begin = 0; begin < reach; begin += kKeyBlock) {
        const index_t count = round_up(std::min(kKeyBlock, reach - begin), kColumns);
        for (index_t j = 0; j < count; j += kColumns) {
            const bf16* panel = panels.keys + (begin + j) * head_dim;
            tile_of(plain, rows, panel, query, head_dim, head_dim, [&](int m, __m512 left, __m512 right) {
                _mm512_store_ps(softmax.scores + m * kKeyBlock + j, left);
                _mm512_store_ps(softmax.scores + m * kKeyBlock + j + 16, right);
            });
        }
        for (index_t m = 0; m < rows; ++m) softmax.row(m, begin, count, seen(m), scale * 1.44269504f);
        for (index_t d = 0; d < width; d += kColumns) {
            const bf16* panel = panels.values + d * panels.padded_keys() + begin / 2 * 64;
            tile_of(plain, rows, panel, softmax.weights, kKeyBlock, count, [&](int m, __m512 left, __m512 right) {
                float* own = sums + m * width + d;
                const __m512 shrink = _mm512_set1_ps(softmax.shrink[m]);
                _mm512_storeu_ps(own, _mm512_fmadd_ps(_mm512_loadu_ps(own), shrink, left));
                _mm512_storeu_ps(own + 16, _mm512_fmadd_ps(_mm512_loadu_ps(own + 16), shrink, right));
            });
        }
    }
    for (index_t m = 0; m < rows; ++m) {
        const __m512 total = _mm512_set1_ps(softmax.total[m]);
        for (index_t d = 0; d < head_dim; d += 16)
            store(out(m) + d, _mm512_div_ps(_mm512_loadu_ps(sums + m * width + d), total), first_lanes(head_dim - d));
    }
}

}  // namespace vlm
