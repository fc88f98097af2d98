// bfloat16 arithmetic with AVX-512: the matrix tile that everything here is made of, and what goes around it.
#pragma once

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace vlm {

using bf16 = std::uint16_t;
using index_t = std::int64_t;

constexpr index_t kColumns = 32;   // columns of a panel: two vectors of sixteen
constexpr index_t kTileRows = 10;  // rows of a tile: twenty accumulators, two weights, a broadcast

inline index_t round_up(index_t n, index_t unit) { return (n + unit - 1) / unit * unit; }

// Lanes [0, count) of a vector of `16`, as a mask; all of them where count is larger.
inline __mmask16 first_lanes(index_t count) {
    return count >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1u << std::max<index_t>(count, 0)) - 1);
}

inline __m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

inline __m512 load(const bf16* x, __mmask16 lanes) { return widen(_mm256_maskz_loadu_epi16(lanes, x)); }

inline void store(bf16* out, __m512 x, __mmask16 lanes) {
    _mm256_mask_storeu_epi16(out, lanes, (__m256i)_mm512_cvtneps_pbh(x));
}

// Rounded to bfloat16 and back: where the stock model stores a bfloat16, so do we.
inline __m512 rounded(__m512 x) { return widen((__m256i)_mm512_cvtneps_pbh(x)); }

// 2^x, relative error below 1e-6 (a polynomial on [-1/2, 1/2]); 0 for very negative x, -inf too, and NaN for NaN.
inline __m512 exp2(__m512 x) {
    // why: of two numbers of which one is NaN, max gives the second.
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 part = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.5403530e-4f);
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.3333558e-3f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(9.6181291e-3f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(5.5504109e-2f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(2.4022651e-1f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(6.9314718e-1f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, whole);
}

inline __m512 silu(__m512 x) {
    const __m512 e = exp2(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

// A depth pair of a panel: two neighbours in depth of sixteen columns, and of the sixteen others.
struct Pair {
    __m512bh left, right;
};

struct PlainWeights {
    using Element = bf16;
    Pair pair(const bf16* panel) const {
        return {(__m512bh)_mm512_loadu_si512(panel), (__m512bh)_mm512_loadu_si512(panel + 32)};
    }
};

constexpr PlainWeights plain;

// Whole numbers from -127 to 127, a sign and seven bits each, as bfloat16: its bytes are looked up by the seven bits.
// invariant: they are exact in bfloat16, so that the sums are those of plain weights.
struct CodedWeights {
    using Element = std::uint8_t;
    __m512i high[2], low[2];

    CodedWeights() {
        alignas(64) std::uint8_t bytes[2][128];
        for (int code = 0; code < 128; ++code) {
            const float number = static_cast<float>(code);
            std::uint32_t bits;
            std::memcpy(&bits, &number, sizeof bits);
            bytes[0][code] = static_cast<std::uint8_t>(bits >> 24);
            bytes[1][code] = static_cast<std::uint8_t>(bits >> 16);
        }
        for (int half = 0; half < 2; ++half) {
            high[half] = _mm512_load_si512(bytes[0] + 64 * half);
            low[half] = _mm512_load_si512(bytes[1] + 64 * half);
        }
    }

    Pair pair(const std::uint8_t* panel) const {
        const __m512i codes = _mm512_loadu_si512(panel), signs = _mm512_set1_epi8(static_cast<char>(0x80));
        const __m512i tops = _mm512_permutex2var_epi8(high[0], codes, high[1]);
        const __m512i bottoms = _mm512_permutex2var_epi8(low[0], codes, low[1]);
        const __m512i with_sign = _mm512_ternarylogic_epi32(tops, codes, signs, 0xf8);  // tops | (codes & signs)
        return {(__m512bh)_mm512_unpacklo_epi8(bottoms, with_sign), (__m512bh)_mm512_unpackhi_epi8(bottoms, with_sign)};
    }

    static std::uint8_t code(std::int8_t number) {
        return static_cast<std::uint8_t>(number < 0 ? 0x80 | std::min(-number, 127) : number);
    }
    // Where element `i` of a depth pair, [2][16][2], lies so that unpacking puts it in its place.
    static index_t place(index_t i) { return i % 32 / 8 * 16 + i / 32 * 8 + i % 8; }
};

inline const CodedWeights coded;

// `M` rows of x times one panel: x is [M, depth] with row stride `ldx`, the panel [depth / 2][2][16][2], so that a
// vector holds two neighbours in depth of sixteen columns. `finish(row, left, right)` gets the 32 sums of a row.
// invariant: the order of additions is that of depth, whatever M is: a row's result never depends on its neighbours.
template <int M, class Weights, class Finish>
inline void tile(const Weights& weights, const typename Weights::Element* panel, const bf16* x, index_t ldx,
                 index_t depth, Finish&& finish) {
    __m512 left[M], right[M];
    for (int m = 0; m < M; ++m) left[m] = right[m] = _mm512_setzero_ps();
    for (index_t k = 0; k < depth; k += 2, panel += 64) {
        const Pair w = weights.pair(panel);
#pragma GCC unroll 10
        for (int m = 0; m < M; ++m) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(*reinterpret_cast<const std::int32_t*>(x + m * ldx + k));
            left[m] = _mm512_dpbf16_ps(left[m], w.left, pair);
            right[m] = _mm512_dpbf16_ps(right[m], w.right, pair);
        }
    }
#pragma GCC unroll 10
    for (int m = 0; m < M; ++m) finish(m, left[m], right[m]);
}

template <class Weights, class Finish>
inline void tile_of(const Weights& weights, index_t rows, const typename Weights::Element* panel, const bf16* x,
                    index_t ldx, index_t depth, Finish&& finish) {
    switch (rows) {
        case 1: return tile<1>(weights, panel, x, ldx, depth, finish);
        case 2: return tile<2>(weights, panel, x, ldx, depth, finish);
        case 3: return tile<3>(weights, panel, x, ldx, depth, finish);
        case 4: return tile<4>(weights, panel, x, ldx, depth, finish);
        case 5: return tile<5>(weights, panel, x, ldx, depth, finish);
        case 6: return tile<6>(weights, panel, x, ldx, depth, finish);
        case 7: return tile<7>(weights, panel, x, ldx, depth, finish);
        case 8: return tile<8>(weights, panel, x, ldx, depth, finish);
        case 9: return tile<9>(weights, panel, x, ldx, depth, finish);
        case 10: return tile<10>(weights, panel, x, ldx, depth, finish);
    }
}

// Rows of each tile so that all tiles of `rows` are about equally high.
inline index_t even_rows(index_t rows) {
    const index_t tiles = (rows + kTileRows - 1) / kTileRows;
    return tiles ? (rows + tiles - 1) / tiles : 0;
}

// Threads for linear layers of so many rows. Few rows are as fast as memory gives weights, and often one core can ask
// for all that memory gives: then a second one only makes the step wait for whoever the machine holds up.
struct Threads {
    int for_rows[kTileRows + 1] = {};  // 0: all

    int of_rows(index_t rows) const {
        const int own = rows <= kTileRows ? for_rows[rows] : 0;
        return own ? std::min(own, omp_get_max_threads()) : omp_get_max_threads();
    }
    // For work that memory does not hold up; a team is worth its start from some tens of microseconds on.
    static int of_work(double flops) { return flops < 1e7 ? 1 : omp_get_max_threads(); }
};

inline Threads threads;

// Memory of a thread that is kept between calls and only grows, aligned to a cache line.
class Scratch {
   public:
    ~Scratch() { std::free(data_); }
    void* get(std::size_t bytes) {
        if (bytes > size_) {
            std::free(data_);
            size_ = (bytes + 4095) / 4096 * 4096;
            data_ = std::aligned_alloc(64, size_);
        }
        return data_;
    }

   private:
    void* data_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace vlm
