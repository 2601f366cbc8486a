// Products of weights with several tokens at once, for x86-64: of Q4_1 and Q5_1, and with AVX-512 of Q5_0 and Q8_0.
//
// ggml computes such a product of Q4_1 or Q5_1 one weight row and one token at a time, and unpacks the row's nibbles again for each
// token. Its faster paths (repacked weights, tiles) know neither of these two types, which models have whose rows are no multiple of
// 256: there the K types fall back to them. Here a tile of four rows and eight tokens stays in registers, and a row is unpacked once
// for all tokens of its part. For Q5_0 and Q8_0 ggml has tiles, of registers half as wide; the same models have these types too, for
// the output's weights among others.
//
// Every bit of a finite product of finite tokens is ggml's: the tokens are quantized by ggml, and the tiles (`matmul_kernel.h`) add as it does. So no
// number depends on which of the two computed it, nor on how many tokens were computed together.
//
// A token that has a NaN is quantized to -128 there, whose sign ggml cannot change: its products with signed weights are other garbage here.
//
// Weights stay where they are, memory-mapped files too.

#include "cpu_hooks.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(_WIN32)

#include "matmul_kernel.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>

using namespace sapwood;

namespace {

// What a thread takes at most at a time: few enough tokens that they stay in its cache while all its rows pass.
constexpr int64_t PART_ROWS = 32;
constexpr int64_t PART_GROUPS = 16;
// With so few groups of tokens at most, it takes as many rows as are fair.
constexpr int64_t LONG_PART_GROUPS = 2;

// A tile reads four rows at once. Where they are short, a processor sees four streams that end before it has found out where they go
// on, and each tile begins by waiting for the memory: for half of its time, with rows of 576 values. So rows of tiles up to this size are
// asked for before their turn, two tiles ahead. Longer ones come as fast by themselves, and this would only be in their way.
constexpr size_t FETCHED_TILE_BYTES = 6144;
constexpr int64_t FETCHED_AHEAD = 2 * ROWS;
constexpr size_t CACHE_LINE_BYTES = 64;

// What differs between the types of weights: the fewest tokens at which a product is faster here than in ggml without AVX-512. With it, any
// number is.
template <typename Weights> struct TypeOf;
template <> struct TypeOf<Q4_1> {
    static constexpr ggml_type TYPE = GGML_TYPE_Q4_1, TOKENS_TYPE = GGML_TYPE_Q8_1;
    static constexpr int64_t TOKENS_MIN_AVX2 = 4;
};
template <> struct TypeOf<Q5_1> {
    static constexpr ggml_type TYPE = GGML_TYPE_Q5_1, TOKENS_TYPE = GGML_TYPE_Q8_1;
    static constexpr int64_t TOKENS_MIN_AVX2 = 4;
};
template <> struct TypeOf<Q5_0> {
    static constexpr ggml_type TYPE = GGML_TYPE_Q5_0, TOKENS_TYPE = GGML_TYPE_Q8_0;
    static constexpr int64_t TOKENS_MIN_AVX2 = INT64_MAX;
};
template <> struct TypeOf<Q8_0> {
    static constexpr ggml_type TYPE = GGML_TYPE_Q8_0, TOKENS_TYPE = GGML_TYPE_Q8_0;
    static constexpr int64_t TOKENS_MIN_AVX2 = INT64_MAX;
};

template <typename Weights> using Multiply = void (*)(const RowBlock *, const TokenBlock<Weights> *, int64_t, Tile &);

// Returns what multiplies so many tokens, at most those of a tile.
template <typename Weights> Multiply<Weights> multiply_for(int64_t tokens) {
    constexpr Multiply<Weights> AVX512[PAIRS] = {multiply_avx512<Weights, 1>, multiply_avx512<Weights, 2>,
                                                 multiply_avx512<Weights, 3>, multiply_avx512<Weights, 4>};
    const int64_t pairs = (tokens + 1) / 2 - 1;
    if constexpr (HAS_OFFSETS<Weights>) {
        constexpr Multiply<Weights> AVX2[PAIRS] = {multiply_avx2<1>, multiply_avx2<2>, multiply_avx2<3>, multiply_avx2<4>};
        return (is_wide() ? AVX512 : AVX2)[pairs];
    } else {
        return AVX512[pairs];
    }
}

constexpr int64_t FEW = 4;

template <typename Weights> using MultiplyFew = void (*)(const char *, size_t, int64_t, const TokenBlock<Weights> *, int64_t, Tile &);

// The same for at most FEW tokens.
template <typename Weights> MultiplyFew<Weights> multiply_few_for(int64_t tokens) {
    constexpr MultiplyFew<Weights> BY_TOKENS[FEW] = {multiply_few<Weights, 1>, multiply_few<Weights, 2>, multiply_few<Weights, 3>,
                                                     multiply_few<Weights, 4>};
    return BY_TOKENS[tokens - 1];
}

// The shape of one operation and where its parts lie in the work buffer that its threads share: the tokens, then for each thread
// its unpacked rows.
template <typename Weights> struct Plan {
    const ggml_tensor *weights, *tokens;
    ggml_tensor * result;
    int64_t blocks, rows, count, groups;

    explicit Plan(ggml_tensor * operation)
        : weights(operation->src[0]), tokens(operation->src[1]), result(operation), blocks(weights->ne[0] / BLOCK),
          rows(weights->ne[1]), count(tokens->ne[1]), groups((count + TOKENS - 1) / TOKENS) {}

    // Each thread gets several parts where there are rows for it, so that all end at about the same time. With few tokens they are
    // long: a row takes some 30 ns then, and what the threads take in turns has to come from the other's cache.
    int64_t part_rows(int threads) const {
        const bool are_long = groups <= LONG_PART_GROUPS;
        const int64_t parts = are_long ? 2 * threads : 4 * threads;
        const int64_t fair = ((rows + parts - 1) / parts + ROWS - 1) / ROWS * ROWS;
        return are_long ? std::max<int64_t>(fair, ROWS) : std::clamp<int64_t>(fair, ROWS, PART_ROWS);
    }

    const char * row(int64_t at) const { return static_cast<const char *>(weights->data) + static_cast<size_t>(at) * weights->nb[1]; }

    // Has the tile of a part fetched that comes after the next one.
    void fetch_ahead(int64_t row, int64_t rows_end) const {
        const size_t bytes = ROWS * weights->nb[1];
        if (bytes > FETCHED_TILE_BYTES || row + FETCHED_AHEAD + ROWS > rows_end) {
            return;
        }
        const char * tile = this->row(row + FETCHED_AHEAD);
        for (size_t at = 0; at < bytes; at += CACHE_LINE_BYTES) {
            __builtin_prefetch(tile + at);
        }
    }

    bool is_few() const { return count <= FEW && is_wide(); }

    size_t token_bytes() const { return static_cast<size_t>(groups * blocks) * sizeof(TokenBlock<Weights>); }
    // Of one thread: the rows of a tile, and behind them its blocks of a token as ggml quantizes them.
    size_t thread_bytes() const {
        const size_t bytes = static_cast<size_t>(blocks) * (sizeof(RowBlock) + sizeof(typename Weights::Tokens));
        return (bytes + 63) / 64 * 64;
    }
    size_t bytes(int threads) const { return token_bytes() + static_cast<size_t>(threads) * thread_bytes() + 64; }
};

// Blocks for a comparison.
struct Noise {
    uint32_t seed = 1;

    template <typename Block> void fill(Block & block) {
        for (size_t at = 0; at < sizeof(block); at++) {
            seed = seed * 1664525 + 1013904223;
            reinterpret_cast<uint8_t *>(&block)[at] = static_cast<uint8_t>(seed >> 24);
        }
        // Halves from 1/16 to 1/4; offsets and sums are negative.
        block.scale = static_cast<uint16_t>(0x2c00 + (block.scale & 0x7ff));
        narrow(block);
    }

    static uint16_t negative(uint16_t half) { return static_cast<uint16_t>(0xac00 + (half & 0x7ff)); }
    static void narrow(Q4_1 & block) { block.offset = negative(block.offset); }
    static void narrow(Q5_1 & block) { block.offset = negative(block.offset); }
    static void narrow(TokensQ8_1 & block) { block.sum = negative(block.sum); }
    static void narrow(TokensQ8_0 & block) {
        // ggml quantizes no value as -128, whose negation has no place in a byte.
        std::replace(std::begin(block.values), std::end(block.values), INT8_MIN, -127);
    }
    static void narrow(Q5_0 &) {}
    static void narrow(Q8_0 & block) {
        std::replace(std::begin(block.values), std::end(block.values), INT8_MIN, -127);
    }
};

template <typename Weights> class Products final : public ggml::cpu::tensor_traits {
  public:
    // Takes what it needs of ggml. Returns whether a tile has ggml's bits; otherwise no product is taken over.
    bool prepare(const Backend & of) {
        backend = of;
        quantize = of.traits(TypeOf<Weights>::TOKENS_TYPE)->from_float;
        is_agreed = agrees();
        return is_agreed;
    }

    bool takes(const ggml_tensor & weights, const ggml_tensor & tokens) const {
        const int64_t tokens_min = is_wide() ? 1 : TypeOf<Weights>::TOKENS_MIN_AVX2;
        return is_agreed && weights.type == TypeOf<Weights>::TYPE && tokens.ne[1] >= tokens_min;
    }

    bool work_size(int threads, const ggml_tensor * operation, size_t & size) override {
        size = Plan<Weights>(const_cast<ggml_tensor *>(operation)).bytes(threads);
        return true;
    }

    bool compute_forward(ggml_compute_params * thread, ggml_tensor * operation) override {
        const Plan<Weights> plan(operation);
        // The buffer is smaller if ggml planned it for other instructions; all threads see the same.
        if (thread->use_ref || thread->wsize < plan.bytes(thread->nth)) {
            return false;
        }
        char * work = aligned(thread->wdata);
        Tokens * tokens = reinterpret_cast<Tokens *>(work);
        RowBlock * rows = reinterpret_cast<RowBlock *>(work + plan.token_bytes() +
                                                       static_cast<size_t>(thread->ith) * plan.thread_bytes());
        place_tokens(plan, *thread, tokens, reinterpret_cast<Quantized *>(rows + plan.blocks));
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
    using Tokens = TokenBlock<Weights>;
    using Quantized = typename Weights::Tokens;

    Backend backend = {};
    ggml_from_float_t quantize = nullptr;
    bool is_agreed = false;

    // Each thread has its blocks of every token.
    void place_tokens(const Plan<Weights> & plan, const ggml_compute_params & thread, Tokens * to, Quantized * quantized) const {
        const int64_t first = plan.blocks * thread.ith / thread.nth;
        const int64_t blocks = plan.blocks * (thread.ith + 1) / thread.nth - first;
        const int64_t end = plan.is_few() ? plan.count : plan.groups * TOKENS;
        for (int64_t token = 0; token < end; token++) {
            const Quantized * from = nullptr;
            if (token < plan.count) {
                const char * row = static_cast<const char *>(plan.tokens->data) + static_cast<size_t>(token) * plan.tokens->nb[1];
                quantize(reinterpret_cast<const float *>(row) + first * BLOCK, quantized, blocks * BLOCK);
                from = quantized;
            }
            place_token<Weights>(from, static_cast<int>(token % TOKENS), blocks, to + token / TOKENS * plan.blocks + first);
        }
    }

    // Of few tokens: a row passes once, and is unpacked in registers.
    void compute_few(const Plan<Weights> & plan, int64_t first_row, int64_t part_rows, const Tokens * tokens) const {
        const int64_t rows_end = std::min(first_row + part_rows, plan.rows);
        const MultiplyFew<Weights> multiply = multiply_few_for<Weights>(plan.count);
        for (int64_t row = first_row; row < rows_end; row += ROWS) {
            const int64_t rows = std::min<int64_t>(ROWS, rows_end - row);
            plan.fetch_ahead(row, rows_end);
            Tile tile;
            multiply(plan.row(row), plan.weights->nb[1], rows, tokens, plan.blocks, tile);
            store(plan, tile, row, rows, 0, plan.count);
        }
    }

    void compute_part(const Plan<Weights> & plan, int64_t first_row, int64_t part_rows, int64_t first_group, const Tokens * tokens,
                      RowBlock * unpacked) const {
        const int64_t rows_end = std::min(first_row + part_rows, plan.rows);
        const int64_t groups_end = std::min(first_group + PART_GROUPS, plan.groups);
        for (int64_t row = first_row; row < rows_end; row += ROWS) {
            const int64_t rows = std::min<int64_t>(ROWS, rows_end - row);
            plan.fetch_ahead(row, rows_end);
            unpack_rows<Weights>(plan.row(row), plan.weights->nb[1], rows, plan.blocks, unpacked);
            for (int64_t group = first_group; group < groups_end; group++) {
                const int64_t count = std::min<int64_t>(TOKENS, plan.count - group * TOKENS);
                Tile tile;
                multiply_for<Weights>(count)(unpacked, tokens + group * plan.blocks, plan.blocks, tile);
                store(plan, tile, row, rows, group * TOKENS, count);
            }
        }
    }

    static void store(const Plan<Weights> & plan, const Tile & tile, int64_t row, int64_t rows, int64_t token, int64_t count) {
        char * to = static_cast<char *>(plan.result->data) + static_cast<size_t>(row) * sizeof(float);
        for (int64_t at = 0; at < count; at++) {
            std::memcpy(to + static_cast<size_t>(token + at) * plan.result->nb[1], &tile.results[at],
                        static_cast<size_t>(rows) * sizeof(float));
        }
    }

    // Whether a tile has ggml's bits: a compiler that was told not to fuse its multiplications and additions gives ggml others.
    bool agrees() const {
        if (!HAS_OFFSETS<Weights> && !is_wide()) {
            return false;
        }
        constexpr int64_t BLOCKS = 4;
        Weights weights[ROWS][BLOCKS];
        Quantized values[TOKENS][BLOCKS];
        Tokens tokens[BLOCKS];
        RowBlock rows[BLOCKS];
        Noise noise;
        for (auto & row : weights) {
            for (auto & block : row) {
                noise.fill(block);
            }
        }
        for (int token = 0; token < TOKENS; token++) {
            for (auto & block : values[token]) {
                noise.fill(block);
            }
            place_token<Weights>(values[token], token, BLOCKS, tokens);
        }
        const char * first = reinterpret_cast<const char *>(weights);
        Tile tile, few;
        unpack_rows<Weights>(first, sizeof(weights[0]), ROWS, BLOCKS, rows);
        multiply_for<Weights>(TOKENS)(rows, tokens, BLOCKS, tile);
        if (is_wide()) {
            multiply_few_for<Weights>(FEW)(first, sizeof(weights[0]), ROWS, tokens, BLOCKS, few);
        }
        for (int token = 0; token < TOKENS; token++) {
            float expected[ROWS];
            for (int row = 0; row < ROWS; row++) {
                backend.traits(TypeOf<Weights>::TYPE)->vec_dot(BLOCKS * BLOCK, &expected[row], 0, weights[row], 0, values[token], 0, 1);
            }
            const bool is_few = is_wide() && token < FEW;
            if (std::memcmp(expected, &tile.results[token], sizeof(expected)) != 0 ||
                (is_few && std::memcmp(expected, &few.results[token], sizeof(expected)) != 0)) {
                return false;
            }
        }
        return true;
    }
};

Products<Q4_1> of_q4_1;
Products<Q5_1> of_q5_1;
Products<Q5_0> of_q5_0;
Products<Q8_0> of_q8_0;

}  // namespace

bool sapwood::prepare_products(const Backend & backend) {
    const bool prepared[] = {of_q4_1.prepare(backend), of_q5_1.prepare(backend), of_q5_0.prepare(backend), of_q8_0.prepare(backend)};
    return std::find(std::begin(prepared), std::end(prepared), true) != std::end(prepared);
}

ggml::cpu::tensor_traits * sapwood::product_of(const ggml_tensor * operation) {
    // A hint asks for another way to compute the product.
    if (operation->op != GGML_OP_MUL_MAT || operation->op_params[1] != 0) {
        return nullptr;
    }
    const ggml_tensor *weights = operation->src[0], *tokens = operation->src[1];
    const bool are_rows_whole = weights->nb[0] == ggml_type_size(weights->type) && tokens->nb[0] == sizeof(float);
    if (tokens->type != GGML_TYPE_F32 || !ggml_is_matrix(weights) || !ggml_is_matrix(tokens) || !are_rows_whole ||
        !lies_as_ggml_has_it(weights)) {
        return nullptr;
    }
    if (of_q4_1.takes(*weights, *tokens)) {
        return &of_q4_1;
    }
    if (of_q5_1.takes(*weights, *tokens)) {
        return &of_q5_1;
    }
    if (of_q5_0.takes(*weights, *tokens)) {
        return &of_q5_0;
    }
    return of_q8_0.takes(*weights, *tokens) ? &of_q8_0 : nullptr;
}

#endif
