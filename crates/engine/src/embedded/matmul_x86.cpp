// Products of Q4_1 and Q5_1 weights with several tokens at once, for x86-64.
//
// ggml computes such a product one weight row and one token at a time, and unpacks the row's nibbles again for each token. Its faster
// paths (repacked weights, tiles) know neither of these two types, which models have whose rows are no multiple of 256: there
// the K types fall back to them. Here a tile of four rows and eight tokens stays in registers, and a row is unpacked once for all
// tokens of its part.
//
// Every bit of a finite number is ggml's: the tokens are quantized by ggml, and of each product the eight partial sums, their order
// and their rounding are those of its function for one row and one token. So no number depends on which of the two computed it, nor on
// how many tokens were computed together.
//
// Weights stay where they are, memory-mapped files too.

#include "cpu_hooks.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(_WIN32)

#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

using namespace sapwood;

namespace {

constexpr int BLOCK = 32;  // values that share a scale
constexpr int ROWS = 4;    // weight rows of a tile
constexpr int PAIRS = 4;   // pairs of tokens of a tile: a register of 512 bits holds a block of each of the two
constexpr int TOKENS = 2 * PAIRS;

// What a thread takes at most at a time: few enough tokens that they stay in its cache while all its rows pass.
constexpr int64_t PART_ROWS = 32;
constexpr int64_t PART_GROUPS = 16;

// The fewest tokens at which AVX2 is faster here than in ggml.
constexpr int64_t TOKENS_MIN_AVX2 = 4;

// ggml's layouts in memory.
struct Q4_1 {
    uint16_t scale, offset;
    uint8_t nibbles[BLOCK / 2];
};
struct Q5_1 {
    uint16_t scale, offset;
    uint8_t fifth_bits[4];
    uint8_t nibbles[BLOCK / 2];
};
struct Q8_1 {
    uint16_t scale, sum;
    int8_t values[BLOCK];
};
static_assert(sizeof(Q4_1) == 20 && sizeof(Q5_1) == 24 && sizeof(Q8_1) == 36, "ggml's layouts");

// One block of the tokens of a tile.
struct alignas(64) TokenBlock {
    int8_t values[PAIRS][2][BLOCK];
    float scales[PAIRS][2][8];  // each eight times, once for each partial sum
    float sums[TOKENS];         // of the values, scaled: what a weight's offset is multiplied with
};

// One block of the weight rows of a tile, a byte for each value.
struct alignas(32) RowBlock {
    uint8_t values[ROWS][BLOCK];
    float scales[ROWS];
    float offsets[ROWS];
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

TARGET_AVX2 inline __m256i bytes_of(const Q5_1 & block) {
    uint32_t bits;
    std::memcpy(&bits, block.fifth_bits, sizeof(bits));
    // Byte i of the result is of bit i: each byte of `bits` eight times, then one bit of it in each.
    const __m256i eightfold = _mm256_shuffle_epi8(
        _mm256_set1_epi32(static_cast<int>(bits)),
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
    const __m256i one_bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(eightfold, one_bit), one_bit);
    return _mm256_or_si256(bytes_of(block.nibbles), _mm256_and_si256(is_set, _mm256_set1_epi8(0x10)));
}

// The beginnings of the rows of a tile. One that is not there is computed as the last one, and not stored.
template <typename Block> struct TileRows {
    const Block * row[ROWS];

    TileRows(const char * weights, size_t row_bytes, int64_t rows) {
        for (int64_t at = 0; at < ROWS; at++) {
            row[at] = reinterpret_cast<const Block *>(weights + static_cast<size_t>(std::min(at, rows - 1)) * row_bytes);
        }
    }

    static int scale_and_offset(const Block & block) {
        int both;
        std::memcpy(&both, &block, sizeof(both));
        return both;
    }

    // Of one block of each row its scale and its offset.
    TARGET_AVX2 __m256 numbers(int64_t block) const {
        return _mm256_cvtph_ps(_mm_setr_epi32(scale_and_offset(row[0][block]), scale_and_offset(row[1][block]),
                                              scale_and_offset(row[2][block]), scale_and_offset(row[3][block])));
    }
};

template <typename Block>
TARGET_AVX2 void unpack_rows(const char * weights, size_t row_bytes, int64_t rows, int64_t blocks, RowBlock * to) {
    const TileRows<Block> tile(weights, row_bytes, rows);
    const __m256i scales_first = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    static_assert(offsetof(RowBlock, offsets) == offsetof(RowBlock, scales) + sizeof(RowBlock::scales), "they are stored together");
    for (int64_t block = 0; block < blocks; block++) {
        RowBlock & at = to[block];
        for (int row = 0; row < ROWS; row++) {
            _mm256_store_si256(reinterpret_cast<__m256i *>(at.values[row]), bytes_of(tile.row[row][block]));
        }
        _mm256_store_ps(at.scales, _mm256_permutevar8x32_ps(tile.numbers(block), scales_first));
    }
}

// Puts one token, as ggml has quantized it, at its place in a tile; zeros for a token that is not there.
TARGET_AVX2 void place_token(const Q8_1 * from, int token, int64_t blocks, TokenBlock * to) {
    for (int64_t block = 0; block < blocks; block++) {
        TokenBlock & at = to[block];
        const __m256i values =
            from ? _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from[block].values)) : _mm256_setzero_si256();
        _mm256_store_si256(reinterpret_cast<__m256i *>(at.values[token / 2][token % 2]), values);
        const float scale = from ? wide(from[block].scale) : 0.0f;
        _mm256_store_ps(at.scales[token / 2][token % 2], _mm256_set1_ps(scale));
        at.sums[token] = from ? wide(from[block].sum) : 0.0f;
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

template <int USED>
TARGET_AVX512 void multiply_avx512(const RowBlock * rows, const TokenBlock * tokens, int64_t blocks, Tile & tile) {
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
        const TokenBlock & values = tokens[block];
        const __m256 token_sums = _mm256_load_ps(values.sums);
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++) {
            const __m512i weight =
                _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i *>(weights.values[row])));
            const __m512 scale = _mm512_set1_ps(weights.scales[row]);
#pragma GCC unroll 4
            for (int pair = 0; pair < USED; pair++) {
                const __m512i value = _mm512_load_si512(values.values[pair]);
                const __m512 product = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), weight, value));
                const __m512 scales = _mm512_mul_ps(scale, _mm512_load_ps(&values.scales[pair][0][0]));
                sums[row][pair] = _mm512_fmadd_ps(scales, product, sums[row][pair]);
            }
            offsets[row] = _mm256_fmadd_ps(_mm256_set1_ps(weights.offsets[row]), token_sums, offsets[row]);
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
    add_offsets(offsets, tile);
}

template <int USED>
TARGET_AVX2 void multiply_avx2(const RowBlock * rows, const TokenBlock * tokens, int64_t blocks, Tile & tile) {
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
                const __m256 scale = _mm256_set1_ps(rows[block].scales[row]);
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
            offsets[row] = _mm256_fmadd_ps(_mm256_set1_ps(rows[block].offsets[row]), token_sums, offsets[row]);
        }
    }
    add_offsets(offsets, tile);
}

// Blocks of two rows in one register.
template <typename Block> TARGET_AVX512 inline __m512i bytes_of_both(const Block & first, const Block & second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(bytes_of(first)), bytes_of(second), 1);
}

template <typename Block, int COUNT>
TARGET_AVX512 void multiply_few(const char * weights, size_t row_bytes, int64_t rows, const TokenBlock * tokens, int64_t blocks, Tile & tile) {
    const TileRows<Block> tile_rows(weights, row_bytes, rows);
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
            const TokenBlock & at = tokens[block];
            const int8_t * values = at.values[token / 2][token % 2];
            const __m512i value = _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i *>(values)));
            const __m512 scale = _mm512_set1_ps(at.scales[token / 2][token % 2][0]);
            const __m512 product_01 = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), weights_01, value));
            const __m512 product_23 = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), weights_23, value));
            sums_01[token] = _mm512_fmadd_ps(_mm512_mul_ps(scale_01, scale), product_01, sums_01[token]);
            sums_23[token] = _mm512_fmadd_ps(_mm512_mul_ps(scale_23, scale), product_23, sums_23[token]);
            offsets[token] = _mm_fmadd_ps(offset, _mm_set1_ps(at.sums[token]), offsets[token]);
        }
    }
    for (int token = 0; token < COUNT; token++) {
        const __m128 sums =
            add_partial_sums(_mm512_castps512_ps256(sums_01[token]), _mm512_extractf32x8_ps(sums_01[token], 1),
                             _mm512_castps512_ps256(sums_23[token]), _mm512_extractf32x8_ps(sums_23[token], 1));
        tile.results[token] = _mm_add_ps(sums, offsets[token]);
    }
}

using MultiplyFew = void (*)(const char *, size_t, int64_t, const TokenBlock *, int64_t, Tile &);

// By the number of tokens, less one.
constexpr int FEW = 4;
constexpr MultiplyFew FEW_Q4_1[FEW] = {multiply_few<Q4_1, 1>, multiply_few<Q4_1, 2>, multiply_few<Q4_1, 3>, multiply_few<Q4_1, 4>};
constexpr MultiplyFew FEW_Q5_1[FEW] = {multiply_few<Q5_1, 1>, multiply_few<Q5_1, 2>, multiply_few<Q5_1, 3>, multiply_few<Q5_1, 4>};

using Multiply = void (*)(const RowBlock *, const TokenBlock *, int64_t, Tile &);

// By the number of pairs that a tile holds, less one.
constexpr Multiply AVX512[PAIRS] = {multiply_avx512<1>, multiply_avx512<2>, multiply_avx512<3>, multiply_avx512<4>};
constexpr Multiply AVX2[PAIRS] = {multiply_avx2<1>, multiply_avx2<2>, multiply_avx2<3>, multiply_avx2<4>};

// The shape of one operation and where its parts lie in the work buffer that its threads share: the tokens, then for each thread
// its unpacked rows.
struct Plan {
    const ggml_tensor *weights, *tokens;
    ggml_tensor * result;
    int64_t blocks, rows, count, groups;

    explicit Plan(ggml_tensor * operation)
        : weights(operation->src[0]), tokens(operation->src[1]), result(operation), blocks(weights->ne[0] / BLOCK),
          rows(weights->ne[1]), count(tokens->ne[1]), groups((count + TOKENS - 1) / TOKENS) {}

    // Each thread gets several parts where there are rows for it, so that all end at about the same time.
    int64_t part_rows(int threads) const {
        const int64_t fair = (rows + 4 * threads - 1) / (4 * threads);
        return std::clamp<int64_t>((fair + ROWS - 1) / ROWS * ROWS, ROWS, PART_ROWS);
    }

    bool is_few() const { return count <= FEW && is_wide(); }

    size_t token_bytes() const { return static_cast<size_t>(groups * blocks) * sizeof(TokenBlock); }
    // Of one thread: the rows of a tile, and behind them its blocks of a token as ggml quantizes them.
    size_t thread_bytes() const {
        const size_t bytes = static_cast<size_t>(blocks) * (sizeof(RowBlock) + sizeof(Q8_1));
        return (bytes + 63) / 64 * 64;
    }
    size_t bytes(int threads) const { return token_bytes() + static_cast<size_t>(threads) * thread_bytes() + 64; }
};

class Products final : public ggml::cpu::tensor_traits {
  public:
    Backend backend = {};
    ggml_from_float_t quantize = nullptr;

    bool work_size(int threads, const ggml_tensor * operation, size_t & size) override {
        size = Plan(const_cast<ggml_tensor *>(operation)).bytes(threads);
        return true;
    }

    bool compute_forward(ggml_compute_params * thread, ggml_tensor * operation) override {
        const Plan plan(operation);
        // The buffer is smaller if ggml planned it for other instructions; all threads see the same.
        if (thread->use_ref || thread->wsize < plan.bytes(thread->nth)) {
            return false;
        }
        char * work = aligned(thread->wdata);
        TokenBlock * tokens = reinterpret_cast<TokenBlock *>(work);
        RowBlock * rows = reinterpret_cast<RowBlock *>(work + plan.token_bytes() +
                                                       static_cast<size_t>(thread->ith) * plan.thread_bytes());
        place_tokens(plan, *thread, tokens, reinterpret_cast<Q8_1 *>(rows + plan.blocks));
        const int64_t part_rows = plan.part_rows(thread->nth);
        const int64_t row_parts = (plan.rows + part_rows - 1) / part_rows;
        const int64_t parts = row_parts * ((plan.groups + PART_GROUPS - 1) / PART_GROUPS);
        share_parts(backend, *thread, parts, [&](int64_t part) {
            if (plan.is_few()) {
                compute_few(plan, part * part_rows, part_rows, tokens);
            } else {
                compute_part(plan, part % row_parts * part_rows, part_rows, part / row_parts * PART_GROUPS, tokens, rows);
            }
        });
        return true;
    }

  private:
    // Each thread has its blocks of every token.
    void place_tokens(const Plan & plan, const ggml_compute_params & thread, TokenBlock * to, Q8_1 * quantized) const {
        const int64_t first = plan.blocks * thread.ith / thread.nth;
        const int64_t blocks = plan.blocks * (thread.ith + 1) / thread.nth - first;
        const int64_t end = plan.is_few() ? plan.count : plan.groups * TOKENS;
        for (int64_t token = 0; token < end; token++) {
            const Q8_1 * from = nullptr;
            if (token < plan.count) {
                const char * row = static_cast<const char *>(plan.tokens->data) + static_cast<size_t>(token) * plan.tokens->nb[1];
                quantize(reinterpret_cast<const float *>(row) + first * BLOCK, quantized, blocks * BLOCK);
                from = quantized;
            }
            place_token(from, static_cast<int>(token % TOKENS), blocks, to + token / TOKENS * plan.blocks + first);
        }
    }

    // Of few tokens: a row passes once, and is unpacked in registers.
    void compute_few(const Plan & plan, int64_t first_row, int64_t part_rows, const TokenBlock * tokens) const {
        const int64_t rows_end = std::min(first_row + part_rows, plan.rows);
        for (int64_t row = first_row; row < rows_end; row += ROWS) {
            const char * weights = static_cast<const char *>(plan.weights->data) + static_cast<size_t>(row) * plan.weights->nb[1];
            const int64_t rows = std::min<int64_t>(ROWS, rows_end - row);
            Tile tile;
            const MultiplyFew * by_count = plan.weights->type == GGML_TYPE_Q4_1 ? FEW_Q4_1 : FEW_Q5_1;
            by_count[plan.count - 1](weights, plan.weights->nb[1], rows, tokens, plan.blocks, tile);
            store(plan, tile, row, rows, 0, plan.count);
        }
    }

    void compute_part(const Plan & plan, int64_t first_row, int64_t part_rows, int64_t first_group, const TokenBlock * tokens, RowBlock * unpacked) const {
        const Multiply * by_pairs = is_wide() ? AVX512 : AVX2;
        const int64_t rows_end = std::min(first_row + part_rows, plan.rows);
        const int64_t groups_end = std::min(first_group + PART_GROUPS, plan.groups);
        const size_t row_bytes = plan.weights->nb[1];
        for (int64_t row = first_row; row < rows_end; row += ROWS) {
            const char * weights = static_cast<const char *>(plan.weights->data) + static_cast<size_t>(row) * row_bytes;
            const int64_t rows = std::min<int64_t>(ROWS, rows_end - row);
            if (plan.weights->type == GGML_TYPE_Q4_1) {
                unpack_rows<Q4_1>(weights, row_bytes, rows, plan.blocks, unpacked);
            } else {
                unpack_rows<Q5_1>(weights, row_bytes, rows, plan.blocks, unpacked);
            }
            for (int64_t group = first_group; group < groups_end; group++) {
                const int64_t count = std::min<int64_t>(TOKENS, plan.count - group * TOKENS);
                Tile tile;
                by_pairs[(count + 1) / 2 - 1](unpacked, tokens + group * plan.blocks, plan.blocks, tile);
                store(plan, tile, row, rows, group * TOKENS, count);
            }
        }
    }

    static void store(const Plan & plan, const Tile & tile, int64_t row, int64_t rows, int64_t token, int64_t count) {
        char * to = static_cast<char *>(plan.result->data) + static_cast<size_t>(row) * sizeof(float);
        for (int64_t at = 0; at < count; at++) {
            std::memcpy(to + static_cast<size_t>(token + at) * plan.result->nb[1], &tile.results[at],
                        static_cast<size_t>(rows) * sizeof(float));
        }
    }
};

Products products;

// Whether a tile has ggml's bits: a compiler that was told not to fuse its multiplications and additions gives ggml others.
template <typename Block> bool agrees(const Backend & backend, ggml_type type) {
    constexpr int64_t BLOCKS = 4;
    Block weights[ROWS][BLOCKS];
    Q8_1 values[TOKENS][BLOCKS];
    TokenBlock tokens[BLOCKS];
    RowBlock rows[BLOCKS];
    uint32_t seed = 1;
    const auto fill = [&seed](void * to, size_t bytes, uint16_t & first, uint16_t & second) {
        for (size_t at = 0; at < bytes; at++) {
            seed = seed * 1664525 + 1013904223;
            static_cast<uint8_t *>(to)[at] = static_cast<uint8_t>(seed >> 24);
        }
        // Halves from 1/16 to 1/4.
        first = static_cast<uint16_t>(0x2c00 + (first & 0x7ff));
        second = static_cast<uint16_t>(0xac00 + (second & 0x7ff));
    };
    for (auto & row : weights) {
        for (auto & block : row) {
            fill(&block, sizeof(block), block.scale, block.offset);
        }
    }
    for (int token = 0; token < TOKENS; token++) {
        for (auto & block : values[token]) {
            fill(&block, sizeof(block), block.scale, block.sum);
        }
        place_token(values[token], token, BLOCKS, tokens);
    }
    Tile tile, few;
    unpack_rows<Block>(reinterpret_cast<const char *>(weights), sizeof(weights[0]), ROWS, BLOCKS, rows);
    (is_wide() ? AVX512 : AVX2)[PAIRS - 1](rows, tokens, BLOCKS, tile);
    if (is_wide()) {
        multiply_few<Block, FEW>(reinterpret_cast<const char *>(weights), sizeof(weights[0]), ROWS, tokens, BLOCKS, few);
    }
    for (int token = 0; token < TOKENS; token++) {
        float expected[ROWS];
        for (int row = 0; row < ROWS; row++) {
            backend.traits(type)->vec_dot(BLOCKS * BLOCK, &expected[row], 0, weights[row], 0, values[token], 0, 1);
        }
        const bool is_few = is_wide() && token < FEW;
        if (std::memcmp(expected, &tile.results[token], sizeof(expected)) != 0 ||
            (is_few && std::memcmp(expected, &few.results[token], sizeof(expected)) != 0)) {
            return false;
        }
    }
    return true;
}

// Whether a tile of each type has them.
bool is_agreed = false;

}  // namespace

bool sapwood::prepare_products(const Backend & backend) {
    products.backend = backend;
    products.quantize = backend.traits(GGML_TYPE_Q8_1)->from_float;
    is_agreed = agrees<Q4_1>(backend, GGML_TYPE_Q4_1) && agrees<Q5_1>(backend, GGML_TYPE_Q5_1);
    return is_agreed;
}

ggml::cpu::tensor_traits * sapwood::product_of(const ggml_tensor * operation) {
    // A hint asks for another way to compute the product.
    if (!is_agreed || operation->op != GGML_OP_MUL_MAT || operation->op_params[1] != 0) {
        return nullptr;
    }
    const ggml_tensor *weights = operation->src[0], *tokens = operation->src[1];
    int64_t tokens_min = TOKENS_MIN_AVX2;
    if (is_wide()) {
        // One token of Q5_1 is as fast as ggml has it.
        tokens_min = weights->type == GGML_TYPE_Q5_1 ? 2 : 1;
    }
    const bool is_known = weights->type == GGML_TYPE_Q4_1 || weights->type == GGML_TYPE_Q5_1;
    const bool is_ours = is_known && tokens->type == GGML_TYPE_F32 && tokens->ne[1] >= tokens_min && ggml_is_matrix(weights) &&
                         ggml_is_matrix(tokens) && tokens->nb[0] == sizeof(float) && lies_as_ggml_has_it(weights);
    return is_ours ? &products : nullptr;
}

#endif
