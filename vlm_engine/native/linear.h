// Linear layers over weights packed in panels.
#pragma once

#include <sys/mman.h>

#include "simd.h"

namespace vlm {

enum Activation : index_t { kNone = 0, kSiluTimesUp = 1 };

// A packed layer: [columns / 32] panels of [depth / 2][2][16][2]; the last one is filled up with zeros. Gated layers
// hold sixteen gates and sixteen ups in each panel.
struct Linear {
    const bf16* panels;
    const float* bias;  // [columns] or null
    index_t columns, depth;
    index_t activation;
};

// where: [columns, depth] row major at `weight`; with `up`, gates and ups of [columns / 2, depth] each.
inline void pack_linear(const bf16* weight, const bf16* up, bf16* panels, index_t columns, index_t depth) {
    const index_t num_panels = (columns + kColumns - 1) / kColumns;
    const std::uintptr_t page = 2u << 20, first = reinterpret_cast<std::uintptr_t>(panels);
    const std::uintptr_t begin = round_up(first, page), end = (first + num_panels * kColumns * depth * 2) / page * page;
    // why: a decode step reads all weights once; on small pages the reads wait for the page tables (a tenth slower).
    if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#pragma omp parallel for schedule(static)
    for (index_t p = 0; p < num_panels; ++p) {
        for (index_t c = 0; c < kColumns; ++c) {
            const index_t n = up ? p * 16 + c % 16 : p * kColumns + c;
            const bf16* row = n < (up ? columns / 2 : columns) ? (up && c >= 16 ? up : weight) + n * depth : nullptr;
            bf16* out = panels + p * kColumns * depth + c * 2;
            for (index_t k = 0; k < depth; ++k) out[k / 2 * 64 + k % 2] = row ? row[k] : 0;
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

    void run(index_t row, index_t rows, index_t panel) const {
        const bf16* own = layer.panels + panel * kColumns * layer.depth;
        const index_t n = panel * kColumns;
        tile_of(rows, own, x + row * ldx, ldx, layer.depth, [&](int m, __m512 left, __m512 right) {
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

// [rows, depth] to [rows, columns] (gated: [rows, columns / 2]). Threads take groups of panels as they come free, so
// that one that the machine holds up does not hold up the others.
inline void linear(const LinearCall& call, index_t rows) {
    const index_t num_panels = (call.layer.columns + kColumns - 1) / kColumns;
    const int team = threads.of_rows(rows);
    const index_t group = std::clamp<index_t>(num_panels / (8 * team), 1, 64);
    const index_t high = even_rows(rows);
#pragma omp parallel for schedule(dynamic) num_threads(team) if (team > 1)
    for (index_t first = 0; first < num_panels; first += group) {
        const index_t last = std::min(num_panels, first + group);
        for (index_t row = 0; row < rows; row += high)
            for (index_t panel = first; panel < last; ++panel) call.run(row, std::min(high, rows - row), panel);
    }
}

}  // namespace vlm
