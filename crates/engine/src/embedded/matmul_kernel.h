// Tiles of a product: four weight rows and eight tokens at a time, and four rows and at most four tokens. Included by
// `matmul_x86.cpp` alone.
//
// Of each product the eight partial sums, their order and their rounding are those of ggml's function for one row and one token.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

constexpr int BLOCK = 32;  // values that share a scale
constexpr int ROWS = 4;    // weight rows of a tile
constexpr int PAIRS = 4;   // pairs of tokens of a tile: a register of 512 bits holds a block of each of the two
constexpr int TOKENS = 2 * PAIRS;

// Blocks of ggml's, as they lie in memory.
struct TokensQ8_1 {
    uint16_t scale, sum;
    int8_t values[BLOCK];
};
struct TokensQ8_0 {
    uint16_t scale;
    int8_t values[BLOCK];
};
struct Q4_1 {
    using Tokens = TokensQ8_1;
    uint16_t scale, offset;
    uint8_t nibbles[BLOCK / 2];
};
struct Q5_1 {
    using Tokens = TokensQ8_1;
    uint16_t scale, offset;
    uint8_t fifth_bits[4];
    uint8_t nibbles[BLOCK / 2];
};
struct Q5_0 {
    using Tokens = TokensQ8_0;
    static constexpr int8_t ZERO = 16;
    uint16_t scale;
    uint8_t fifth_bits[4];
    uint8_t nibbles[BLOCK / 2];
};
struct Q8_0 {
    using Tokens = TokensQ8_0;
    static constexpr int8_t ZERO = -128;
    uint16_t scale;
    int8_t values[BLOCK];
};
static_assert(sizeof(Q4_1) == 20 && sizeof(Q5_1) == 24 && sizeof(Q5_0) == 22 && sizeof(Q8_0) == 34 && sizeof(TokensQ8_1) == 36 && sizeof(TokensQ8_0) == 34,
              "ggml's layouts");

// Weights with an offset are unsigned. Those without are signed, and lie or are loaded with ZERO added to them, which as an unsigned
// byte is 16 or 128: an instruction multiplies unsigned bytes with signed ones. A product begins with what that adds to it, negated.
template <typename Weights> constexpr bool HAS_OFFSETS = std::is_same_v<typename Weights::Tokens, TokensQ8_1>;

// One block of the tokens of a tile.
struct alignas(64) TokenValues {
    int8_t values[PAIRS][2][BLOCK];
    float scales[PAIRS][2][8];  // each eight times, once for each partial sum
};
struct TokensOfOffsets : TokenValues {
    float sums[TOKENS];  // of the values, scaled: what a weight's offset is multiplied with
};
struct TokensOfSigned : TokenValues {
    int32_t starts[PAIRS][2][8];  // what products begin with: -ZERO times the sums of four values each
};
template <typename Weights> using TokenBlock = std::conditional_t<HAS_OFFSETS<Weights>, TokensOfOffsets, TokensOfSigned>;

// One block of the weight rows of a tile, a byte for each value.
struct alignas(32) RowBlock {
    uint8_t values[ROWS][BLOCK];
    float numbers[2 * ROWS];  // scales, then offsets
};

#define TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define TARGET_AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))

TARGET_AVX2 inline float wide(uint16_t half) { return _cvtsh_ss(half); }

TARGET_AVX2 inline __m256i bytes_of(const uint8_t * nibbles) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i *>(nibbles));
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(packed), _mm_srli_epi16(packed, 4), 1);
    return _mm256_and_si256(both, _mm256_set1_epi8(0x0f));
}

TARGET_AVX2 inline __m256i bytes_of(const Q4_1 & block) { return bytes_of(block.nibbles); }

TARGET_AVX2 inline __m256i bytes_of(const uint8_t * nibbles, const uint8_t * fifth_bits) {
    uint32_t bits;
    std::memcpy(&bits, fifth_bits, sizeof(bits));
    // Byte i of the result is of bit i: each byte of `bits` eight times, then one bit of it in each.
    const __m256i eightfold = _mm256_shuffle_epi8(
        _mm256_set1_epi32(static_cast<int>(bits)),
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
    const __m256i one_bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(eightfold, one_bit), one_bit);
    return _mm256_or_si256(bytes_of(nibbles), _mm256_and_si256(is_set, _mm256_set1_epi8(0x10)));
}

TARGET_AVX2 inline __m256i bytes_of(const Q5_1 & block) { return bytes_of(block.nibbles, block.fifth_bits); }

TARGET_AVX2 inline __m256i bytes_of(const Q5_0 & block) { return bytes_of(block.nibbles, block.fifth_bits); }

TARGET_AVX2 inline __m256i bytes_of(const Q8_0 & block) {
    return _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(block.values)), _mm256_set1_epi8(Q8_0::ZERO));
}

// The beginnings of the rows of a tile. One that is not there is computed as the last one, and not stored.
template <typename Weights> struct TileRows {
    const Weights * row[ROWS];

    TileRows(const char * weights, size_t row_bytes, int64_t rows) {
        for (int64_t at = 0; at < ROWS; at++) {
            row[at] = reinterpret_cast<const Weights *>(weights + static_cast<size_t>(std::min(at, rows - 1)) * row_bytes);
        }
    }

    static int scale_and_offset(const Weights & block) {
        if constexpr (HAS_OFFSETS<Weights>) {
            int both;
            std::memcpy(&both, &block, sizeof(both));
            return both;
        } else {
            return block.scale;
        }
    }

    // Of one block of each row its scale and its offset.
    TARGET_AVX2 __m256 numbers(int64_t block) const {
        return _mm256_cvtph_ps(_mm_setr_epi32(scale_and_offset(row[0][block]), scale_and_offset(row[1][block]),
                                              scale_and_offset(row[2][block]), scale_and_offset(row[3][block])));
    }
};

template <typename Weights>
TARGET_AVX2 void unpack_rows(const char * weights, size_t row_bytes, int64_t rows, int64_t blocks, RowBlock * to) {
    const TileRows<Weights> tile(weights, row_bytes, rows);
    const __m256i scales_first = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    for (int64_t block = 0; block < blocks; block++) {
        RowBlock & at = to[block];
        for (int row = 0; row < ROWS; row++) {
            _mm256_store_si256(reinterpret_cast<__m256i *>(at.values[row]), bytes_of(tile.row[row][block]));
        }
        _mm256_store_ps(at.numbers, _mm256_permutevar8x32_ps(tile.numbers(block), scales_first));
    }
}

// Puts one token, as ggml has quantized it, at its place in a tile; zeros for a token that is not there.
template <typename Weights>
TARGET_AVX2 void place_token(const typename Weights::Tokens * from, int token, int64_t blocks, TokenBlock<Weights> * to) {
    for (int64_t block = 0; block < blocks; block++) {
        TokenBlock<Weights> & at = to[block];
        const __m256i values =
            from ? _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from[block].values)) : _mm256_setzero_si256();
        _mm256_store_si256(reinterpret_cast<__m256i *>(at.values[token / 2][token % 2]), values);
        const float scale = from ? wide(from[block].scale) : 0.0f;
        _mm256_store_ps(at.scales[token / 2][token % 2], _mm256_set1_ps(scale));
        if constexpr (HAS_OFFSETS<Weights>) {
            at.sums[token] = from ? wide(from[block].sum) : 0.0f;
        } else {
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(Weights::ZERO), values);
            const __m256i sums = _mm256_madd_epi16(pairs, _mm256_set1_epi16(-1));
            _mm256_store_si256(reinterpret_cast<__m256i *>(at.starts[token / 2][token % 2]), sums);
        }
    }
}

// Adds the eight partial sums of each of four rows in the order in which ggml adds those of one.
TARGET_AVX2 inline __m128 add_partial_sums(__m256 row_0, __m256 row_1, __m256 row_2, __m256 row_3) {
    const auto halves = [](__m256 row) TARGET_AVX2 {
        return _mm_add_ps(_mm256_extractf128_ps(row, 1), _mm256_castps256_ps128(row));
    };
    const __m128 four_0 = halves(row_0), four_1 = halves(row_1), four_2 = halves(row_2), four_3 = halves(row_3);
    const __m128 two_01 = _mm_add_ps(_mm_movelh_ps(four_0, four_1), _mm_movehl_ps(four_1, four_0));
    const __m128 two_23 = _mm_add_ps(_mm_movelh_ps(four_2, four_3), _mm_movehl_ps(four_3, four_2));
    return _mm_add_ps(_mm_shuffle_ps(two_01, two_23, 0x88), _mm_shuffle_ps(two_01, two_23, 0xdd));
}

// The products of a tile: `results[token]` holds one for each row.
struct Tile {
    __m128 results[TOKENS];
};

// What the rows' offsets add: for each row, of eight tokens.
TARGET_AVX2 inline void add_offsets(const __m256 (&offsets)[ROWS], Tile & tile) {
    alignas(32) float rows[ROWS][TOKENS];
    for (int row = 0; row < ROWS; row++) {
        _mm256_store_ps(rows[row], offsets[row]);
    }
    for (int token = 0; token < TOKENS; token++) {
        const __m128 offset = _mm_setr_ps(rows[0][token], rows[1][token], rows[2][token], rows[3][token]);
        tile.results[token] = _mm_add_ps(tile.results[token], offset);
    }
}

// What the product of an unsigned weight begins with, for a pair of tokens.
template <typename Weights> TARGET_AVX512 inline __m512i start_of_pair(const TokenBlock<Weights> & tokens, int pair) {
    if constexpr (HAS_OFFSETS<Weights>) {
        return _mm512_setzero_si512();
    } else {
        return _mm512_load_si512(tokens.starts[pair]);
    }
}

template <typename Weights, int USED>
TARGET_AVX512 void multiply_avx512(const RowBlock * rows, const TokenBlock<Weights> * tokens, int64_t blocks, Tile & tile) {
    __m512 sums[ROWS][USED];
    __m256 offsets[ROWS];
    for (int row = 0; row < ROWS; row++) {
        offsets[row] = _mm256_setzero_ps();
        for (int pair = 0; pair < USED; pair++) {
            sums[row][pair] = _mm512_setzero_ps();
        }
    }
    for (int64_t block = 0; block < blocks; block++) {
        const RowBlock & weights = rows[block];
        const TokenBlock<Weights> & values = tokens[block];
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++) {
            const __m512i weight =
                _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i *>(weights.values[row])));
            const __m512 scale = _mm512_set1_ps(weights.numbers[row]);
#pragma GCC unroll 4
            for (int pair = 0; pair < USED; pair++) {
                const __m512i value = _mm512_load_si512(values.values[pair]);
                const __m512i start = start_of_pair<Weights>(values, pair);
                const __m512 product = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(start, weight, value));
                const __m512 scales = _mm512_mul_ps(scale, _mm512_load_ps(&values.scales[pair][0][0]));
                sums[row][pair] = _mm512_fmadd_ps(scales, product, sums[row][pair]);
            }
            if constexpr (HAS_OFFSETS<Weights>) {
                offsets[row] = _mm256_fmadd_ps(_mm256_set1_ps(weights.numbers[ROWS + row]), _mm256_load_ps(values.sums), offsets[row]);
            }
        }
    }
    for (int pair = 0; pair < USED; pair++) {
        tile.results[2 * pair] =
            add_partial_sums(_mm512_castps512_ps256(sums[0][pair]), _mm512_castps512_ps256(sums[1][pair]),
                             _mm512_castps512_ps256(sums[2][pair]), _mm512_castps512_ps256(sums[3][pair]));
        tile.results[2 * pair + 1] =
            add_partial_sums(_mm512_extractf32x8_ps(sums[0][pair], 1), _mm512_extractf32x8_ps(sums[1][pair], 1),
                             _mm512_extractf32x8_ps(sums[2][pair], 1), _mm512_extractf32x8_ps(sums[3][pair], 1));
    }
    if constexpr (HAS_OFFSETS<Weights>) {
        add_offsets(offsets, tile);
    }
}

template <int USED>
TARGET_AVX2 void multiply_avx2(const RowBlock * rows, const TokensOfOffsets * tokens, int64_t blocks, Tile & tile) {
    const __m256i ones = _mm256_set1_epi16(1);
    for (int pair = 0; pair < USED; pair++) {
        __m256 sums[ROWS][2];
        for (int row = 0; row < ROWS; row++) {
            sums[row][0] = sums[row][1] = _mm256_setzero_ps();
        }
        for (int64_t block = 0; block < blocks; block++) {
#pragma GCC unroll 4
            for (int row = 0; row < ROWS; row++) {
                const __m256i weight = _mm256_load_si256(reinterpret_cast<const __m256i *>(rows[block].values[row]));
                const __m256 scale = _mm256_set1_ps(rows[block].numbers[row]);
#pragma GCC unroll 2
                for (int half = 0; half < 2; half++) {
                    const __m256i value =
                        _mm256_load_si256(reinterpret_cast<const __m256i *>(tokens[block].values[pair][half]));
                    // No sum of two products leaves 16 bits: a weight is below 32.
                    const __m256i product = _mm256_madd_epi16(_mm256_maddubs_epi16(weight, value), ones);
                    const __m256 scales = _mm256_mul_ps(scale, _mm256_load_ps(tokens[block].scales[pair][half]));
                    sums[row][half] = _mm256_fmadd_ps(scales, _mm256_cvtepi32_ps(product), sums[row][half]);
                }
            }
        }
        for (int half = 0; half < 2; half++) {
            tile.results[2 * pair + half] =
                add_partial_sums(sums[0][half], sums[1][half], sums[2][half], sums[3][half]);
        }
    }
    __m256 offsets[ROWS] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int64_t block = 0; block < blocks; block++) {
        const __m256 token_sums = _mm256_load_ps(tokens[block].sums);
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++) {
            offsets[row] = _mm256_fmadd_ps(_mm256_set1_ps(rows[block].numbers[ROWS + row]), token_sums, offsets[row]);
        }
    }
    add_offsets(offsets, tile);
}

// Blocks of two rows in one register.
template <typename Weights> TARGET_AVX512 inline __m512i bytes_of_both(const Weights & first, const Weights & second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(bytes_of(first)), bytes_of(second), 1);
}

// What the products of unsigned weights begin with, for one token and two rows.
template <typename Weights> TARGET_AVX512 inline __m512i start_of_token(const TokenBlock<Weights> & tokens, int token) {
    if constexpr (HAS_OFFSETS<Weights>) {
        return _mm512_setzero_si512();
    } else {
        return _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i *>(tokens.starts[token / 2][token % 2])));
    }
}

// Of few tokens: a row is unpacked in registers.
template <typename Weights, int COUNT>
TARGET_AVX512 void multiply_few(const char * weights, size_t row_bytes, int64_t rows, const TokenBlock<Weights> * tokens, int64_t blocks, Tile & tile) {
    const TileRows<Weights> tile_rows(weights, row_bytes, rows);
    const auto & row = tile_rows.row;
    const __m512i scales_01 = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2);
    const __m512i scales_23 = _mm512_setr_epi32(4, 4, 4, 4, 4, 4, 4, 4, 6, 6, 6, 6, 6, 6, 6, 6);
    const __m256i every_offset = _mm256_setr_epi32(1, 3, 5, 7, 1, 3, 5, 7);
    __m512 sums_01[COUNT], sums_23[COUNT];
    __m128 offsets[COUNT];
    for (int token = 0; token < COUNT; token++) {
        sums_01[token] = sums_23[token] = _mm512_setzero_ps();
        offsets[token] = _mm_setzero_ps();
    }
    for (int64_t block = 0; block < blocks; block++) {
        const __m256 numbers = tile_rows.numbers(block);
        const __m512 twice = _mm512_castps256_ps512(numbers);
        const __m512 scale_01 = _mm512_permutexvar_ps(scales_01, twice), scale_23 = _mm512_permutexvar_ps(scales_23, twice);
        const __m128 offset = _mm256_castps256_ps128(_mm256_permutevar8x32_ps(numbers, every_offset));
        const __m512i weights_01 = bytes_of_both(row[0][block], row[1][block]), weights_23 = bytes_of_both(row[2][block], row[3][block]);
#pragma GCC unroll 4
        for (int token = 0; token < COUNT; token++) {
            const TokenBlock<Weights> & at = tokens[block];
            const int8_t * values = at.values[token / 2][token % 2];
            const __m512i value = _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i *>(values)));
            const __m512 scale = _mm512_set1_ps(at.scales[token / 2][token % 2][0]);
            const __m512i start = start_of_token<Weights>(at, token);
            const __m512 product_01 = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(start, weights_01, value));
            const __m512 product_23 = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(start, weights_23, value));
            sums_01[token] = _mm512_fmadd_ps(_mm512_mul_ps(scale_01, scale), product_01, sums_01[token]);
            sums_23[token] = _mm512_fmadd_ps(_mm512_mul_ps(scale_23, scale), product_23, sums_23[token]);
            if constexpr (HAS_OFFSETS<Weights>) {
                offsets[token] = _mm_fmadd_ps(offset, _mm_set1_ps(at.sums[token]), offsets[token]);
            }
        }
    }
    for (int token = 0; token < COUNT; token++) {
        const __m128 sums =
            add_partial_sums(_mm512_castps512_ps256(sums_01[token]), _mm512_extractf32x8_ps(sums_01[token], 1),
                             _mm512_castps512_ps256(sums_23[token]), _mm512_extractf32x8_ps(sums_23[token], 1));
        tile.results[token] = HAS_OFFSETS<Weights> ? _mm_add_ps(sums, offsets[token]) : sums;
    }
}

}  // namespace
