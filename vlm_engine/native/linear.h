// Linear layers over weights packed in panels.
#pragma once

#include <sys/mman.h>

#include "simd.h"

namespace vlm {

enum Activation : index_t { kNone = 0, kSiluTimesUp = 1 };

// A packed layer: [columns / 32] panels of [depth / 2][2][16][2]; the last one is filled up with zeros. Gated layers
// hold sixteen gates and sixteen ups in each panel. With scales the panels are codes of
// eight bits, each depth pair in the order of `CodedWeights::place`.
struct Linear {
    const void* panels;   // bfloat16, or codes with scales
    const float* scales;  // [columns of all panels, in their order] or null
    const float* bias;    // [columns] or null
    index_t columns, depth;
    index_t activation;
};

// where: [columns, depth] row major at `weight`; with `up`, gates and ups of [columns / 2, depth] each.
// `put(pairs, i, number)` writes element `i` of a depth pair.
template <class Number, class Element, class Put>
inline void pack_linear(const Number* weight, const Number* up, Element* panels, index_t columns, index_t depth,
                        Put&& put) {
    const index_t num_panels = (columns + kColumns - 1) / kColumns, size = kColumns * depth * sizeof(Element);
    const std::uintptr_t page = 2u << 20, first = reinterpret_cast<std::uintptr_t>(panels);
    const std::uintptr_t begin = round_up(first, page), end = (first + num_panels * size) / page * page;
    // why: a decode step reads all weights once; on small pages the reads wait for the page tables (a tenth slower).
    if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#pragma omp parallel for schedule(static)
    for (index_t p = 0; p < num_panels; ++p) {
        for (index_t c = 0; c < kColumns; ++c) {
            const index_t n = up ? p * 16 + c % 16 : p * kColumns + c;
            const Number* row = n < (up ? columns / 2 : columns) ? (up && c >= 16 ? up : weight) + n * depth : nullptr;
            for (index_t k = 0; k < depth; ++k)
                put(panels + p * kColumns * depth + k / 2 * 64, c * 2 + k % 2, row ? row[k] : Number{0});
        }
    }
}

struct LinearCall {
    const Linear& layer;
    const bf16* x;
    index_t ldx;
    const bf16* residual;  // [rows, columns] or null, may be `out`
    bf16* out;
    float* wide;  // [rows, columns] instead of `out`
    index_t ldo;

    template <class Weights>
    void run(const Weights& weights, index_t row, index_t rows, index_t panel,
             const typename Weights::Element* own) const {
        const index_t n = panel * kColumns;
        tile_of(weights, rows, own, x + row * ldx, ldx, layer.depth, [&](int m, __m512 left, __m512 right) {
            if (layer.scales) {
                left = _mm512_mul_ps(left, _mm512_loadu_ps(layer.scales + n));
                right = _mm512_mul_ps(right, _mm512_loadu_ps(layer.scales + n + 16));
            }
            if (layer.activation == kSiluTimesUp) return gated(row + m, panel * 16, left, right);
            half(row + m, n, left);
            half(row + m, n + 16, right);
        });
    }

    void half(index_t row, index_t n, __m512 sum) const {
        const __mmask16 lanes = first_lanes(layer.columns - n);
        if (!lanes) return;
        if (layer.bias) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(lanes, layer.bias + n));
        if (wide) return _mm512_mask_storeu_ps(wide + row * ldo + n, lanes, rounded(sum));
        if (residual) sum = _mm512_add_ps(rounded(sum), load(residual + row * ldo + n, lanes));
        store(out + row * ldo + n, sum, lanes);
    }

    void gated(index_t row, index_t n, __m512 gate, __m512 up) const {
        const index_t half = layer.columns / 2;
        const __mmask16 lanes = first_lanes(half - n);
        if (layer.bias) {
            gate = _mm512_add_ps(gate, _mm512_maskz_loadu_ps(lanes, layer.bias + n));
            up = _mm512_add_ps(up, _mm512_maskz_loadu_ps(lanes, layer.bias + half + n));
        }
        store(out + row * ldo + n, _mm512_mul_ps(rounded(silu(rounded(gate))), rounded(up)), lanes);
    }
};

// All rows over panels [first, last).
template <class Weights>
inline void run_panels(const LinearCall& call, const Weights& weights, index_t rows, index_t first, index_t last) {
    const auto* panels = static_cast<const typename Weights::Element*>(call.layer.panels);
    const index_t high = even_rows(rows), size = kColumns * call.layer.depth;
    for (index_t row = 0; row < rows; row += high)
        for (index_t panel = first; panel < last; ++panel)
            call.run(weights, row, std::min(high, rows - row), panel, panels + panel * size);
}

// The same for many rows: codes are widened once, and read by all tiles from the cache.
inline void run_widened(const LinearCall& call, index_t rows, index_t first, index_t last) {
    static thread_local Scratch scratch;
    const index_t high = even_rows(rows), size = kColumns * call.layer.depth;
    bf16* wide = static_cast<bf16*>(scratch.get(2 * size));
    for (index_t panel = first; panel < last; ++panel) {
        const std::uint8_t* codes = static_cast<const std::uint8_t*>(call.layer.panels) + panel * size;
        for (index_t i = 0; i < size; i += 64) {
            const Pair pair = coded.pair(codes + i);
            _mm512_store_si512(wide + i, (__m512i)pair.left);
            _mm512_store_si512(wide + i + 32, (__m512i)pair.right);
        }
        for (index_t row = 0; row < rows; row += high)
            call.run(plain, row, std::min(high, rows - row), panel, wide);
    }
}

// [rows, depth] to [rows, columns] (gated: [rows, columns / 2]). Threads take groups of panels as they come free, so
// that one that the machine holds up does not hold up the others.
inline void linear(const LinearCall& call, index_t rows) {
    const index_t num_panels = (call.layer.columns + kColumns - 1) / kColumns;
    const int team = threads.of_rows(rows);
    const index_t group = std::clamp<index_t>(num_panels / (8 * team), 1, 64);
#pragma omp parallel for schedule(dynamic) num_threads(team) if (team > 1)
    for (index_t first = 0; first < num_panels; first += group) {
        const index_t last = std::min(num_panels, first + group);
        if (!call.layer.scales) run_panels(call, plain, rows, first, last);
        else if (rows <= kTileRows) run_panels(call, coded, rows, first, last);
        else run_widened(call, rows, first, last);
    }
}

}  // namespace vlm
