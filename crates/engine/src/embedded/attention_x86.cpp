// Attention over KV cells of 16-bit floats, for x86-64.
//
// ggml computes it one query and one head at a time, and sums the values up in 16 bits; from 64 queries on, and with one query
// over 512 cells, in other ways, whose numbers differ. Here all the heads that share keys, of several queries, pass over a block of
// cells together, all sums are of 32 bits, and hidden cells cost a look at the mask.
//
// No number depends on what is computed together: not on how many queries there are, which other sequences share the cells, where in the
// cache the cells of a sequence are as long as they are in the same order, nor on the number of threads. So a prompt that continues a
// cached prefix has the bits of one that is computed anew, where each slot has cells of its own; in shared cells llama.cpp puts the tokens of
// a sequence wherever there is room.

#include "cpu_hooks.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(_WIN32)

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

using namespace sapwood;

namespace {

constexpr int ROWS = 32;        // rows of a tile: heads times queries
constexpr int CELLS = 32;       // cells of a block
constexpr int WIDTH_MAX = 256;  // places of a key or a value
constexpr int PLACES = 16;      // a width is a multiple of this

// What is computed for one query and one head.
struct Row {
    const float * query;
    float * result;
    int cells;              // that it sees, from the first of the tile on
    const uint16_t * bias;  // for every cell of the cache; null if the mask only hides cells
    float sink;
    bool has_sink;
};

// Rows that share keys and values, each seeing the cells that the one before sees, and perhaps more.
struct Tile {
    const char *keys, *values;
    size_t key_bytes, value_bytes;  // from one cell to the next
    int key_width, value_width;
    float scale;
    const int32_t * cells;  // which ones, in order; null: those from `first` on
    int64_t first;
    int count;
    Row rows[ROWS];
};

// What a row has summed up: its largest score, and the sum of its weights, as they are beside it.
struct Summed {
    float most, total;
};

// What a thread works with.
struct alignas(64) Scratch {
    float keys[WIDTH_MAX * CELLS];
    float values[CELLS * WIDTH_MAX];
    float weights[ROWS][CELLS];
    float sums[ROWS][WIDTH_MAX];
    Summed summed[ROWS];
};

// Coefficients of e^x for |x| <= ln(2) / 2, and ln(2) in two parts of which the first has few bits.
constexpr float LOG2_E = 1.44269504f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
constexpr float EXPONENTIAL[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};

#define TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define TARGET_AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")))

namespace narrow {

#define TARGET TARGET_AVX2
using Vector = __m256;
constexpr int LANES = 8;

TARGET inline Vector zero() { return _mm256_setzero_ps(); }
TARGET inline Vector every(float value) { return _mm256_set1_ps(value); }
TARGET inline Vector load(const float * from) { return _mm256_load_ps(from); }
TARGET inline Vector load_halves(const uint16_t * from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}
TARGET inline void store(float * to, Vector value) { _mm256_store_ps(to, value); }
TARGET inline void store_anywhere(float * to, Vector value) { _mm256_storeu_ps(to, value); }
TARGET inline Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
TARGET inline Vector subtract(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
TARGET inline Vector multiply(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
TARGET inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
TARGET inline Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }
TARGET inline float first(Vector value) { return _mm256_cvtss_f32(value); }

// The first `count` lanes, and of the others those of `otherwise`.
TARGET inline Vector keep(Vector value, int count, Vector otherwise) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i kept = _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lanes);
    return _mm256_blendv_ps(otherwise, value, _mm256_castsi256_ps(kept));
}

TARGET inline float largest_of(Vector value) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

TARGET inline float sum_of(Vector value) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// e^x for x of at most 0.
TARGET inline Vector exponential(Vector value) {
    // Below, a float has no exponent for it. The second operand stays if it is no number.
    const Vector bounded = larger(every(-87.0f), value);
    const Vector power = _mm256_round_ps(multiply(bounded, every(LOG2_E)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vector rest = _mm256_fnmadd_ps(power, every(LN2_LOW), _mm256_fnmadd_ps(power, every(LN2_HIGH), bounded));
    Vector result = every(EXPONENTIAL[0]);
    for (int at = 1; at < 7; at++) {
        result = multiply_add(result, rest, every(EXPONENTIAL[at]));
    }
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
    return multiply(result, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

// LANES places of as many cells, as columns.
TARGET inline void load_columns(const uint16_t * const * from, int place, float * to) {
    Vector rows[8], pairs[8], fours[8];
#pragma GCC unroll 8
    for (int row = 0; row < 8; row++) {
        rows[row] = load_halves(from[row] + place);
    }
#pragma GCC unroll 4
    for (int row = 0; row < 8; row += 2) {
        pairs[row] = _mm256_unpacklo_ps(rows[row], rows[row + 1]);
        pairs[row + 1] = _mm256_unpackhi_ps(rows[row], rows[row + 1]);
    }
#pragma GCC unroll 4
    for (int row = 0; row < 8; row += 4) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const __m256d low = _mm256_castps_pd(pairs[row + half]), high = _mm256_castps_pd(pairs[row + half + 2]);
            fours[row + 2 * half] = _mm256_castpd_ps(_mm256_unpacklo_pd(low, high));
            fours[row + 2 * half + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low, high));
        }
    }
#pragma GCC unroll 4
    for (int at = 0; at < 4; at++) {
        store(to + at * CELLS, _mm256_permute2f128_ps(fours[at], fours[4 + at], 0x20));
        store(to + (4 + at) * CELLS, _mm256_permute2f128_ps(fours[at], fours[4 + at], 0x31));
    }
}

#include "attention_kernel.h"
#undef TARGET

}  // namespace narrow

namespace wide {

#define TARGET TARGET_AVX512
using Vector = __m512;
constexpr int LANES = 16;

TARGET inline Vector zero() { return _mm512_setzero_ps(); }
TARGET inline Vector every(float value) { return _mm512_set1_ps(value); }
TARGET inline Vector load(const float * from) { return _mm512_load_ps(from); }
TARGET inline Vector load_halves(const uint16_t * from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}
TARGET inline void store(float * to, Vector value) { _mm512_store_ps(to, value); }
TARGET inline void store_anywhere(float * to, Vector value) { _mm512_storeu_ps(to, value); }
TARGET inline Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
TARGET inline Vector subtract(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
TARGET inline Vector multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
TARGET inline Vector multiply_add(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
TARGET inline Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); }
TARGET inline float first(Vector value) { return _mm512_cvtss_f32(value); }
TARGET inline float largest_of(Vector value) { return _mm512_reduce_max_ps(value); }
TARGET inline float sum_of(Vector value) { return _mm512_reduce_add_ps(value); }

// The first `count` lanes, and of the others those of `otherwise`.
TARGET inline Vector keep(Vector value, int count, Vector otherwise) {
    const int lanes = std::clamp(count, 0, 16);
    return _mm512_mask_mov_ps(otherwise, static_cast<__mmask16>((1u << lanes) - 1), value);
}

// e^x for x of at most 0.
TARGET inline Vector exponential(Vector value) {
    // As with AVX2, whose numbers these are.
    const Vector bounded = larger(every(-87.0f), value);
    const Vector power = _mm512_roundscale_ps(multiply(bounded, every(LOG2_E)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vector rest = _mm512_fnmadd_ps(power, every(LN2_LOW), _mm512_fnmadd_ps(power, every(LN2_HIGH), bounded));
    Vector result = every(EXPONENTIAL[0]);
#pragma GCC unroll 8
    for (int at = 1; at < 7; at++) {
        result = multiply_add(result, rest, every(EXPONENTIAL[at]));
    }
    return _mm512_scalef_ps(result, power);
}

// LANES places of as many cells, as columns.
TARGET inline void load_columns(const uint16_t * const * from, int place, float * to) {
    Vector rows[16], pairs[16], fours[16];
#pragma GCC unroll 16
    for (int row = 0; row < 16; row++) {
        rows[row] = load_halves(from[row] + place);
    }
#pragma GCC unroll 8
    for (int row = 0; row < 16; row += 2) {
        pairs[row] = _mm512_unpacklo_ps(rows[row], rows[row + 1]);
        pairs[row + 1] = _mm512_unpackhi_ps(rows[row], rows[row + 1]);
    }
#pragma GCC unroll 4
    for (int row = 0; row < 16; row += 4) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const __m512d low = _mm512_castps_pd(pairs[row + half]), high = _mm512_castps_pd(pairs[row + half + 2]);
            fours[row + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            fours[row + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    }
    // A quarter of `fours[4 * i + at]` has the place `4 * quarter + at` of the cells from `4 * i` on.
#pragma GCC unroll 4
    for (int at = 0; at < 4; at++) {
        const Vector even_low = _mm512_shuffle_f32x4(fours[at], fours[4 + at], 0x88);
        const Vector odd_low = _mm512_shuffle_f32x4(fours[at], fours[4 + at], 0xdd);
        const Vector even_high = _mm512_shuffle_f32x4(fours[8 + at], fours[12 + at], 0x88);
        const Vector odd_high = _mm512_shuffle_f32x4(fours[8 + at], fours[12 + at], 0xdd);
        store(to + at * CELLS, _mm512_shuffle_f32x4(even_low, even_high, 0x88));
        store(to + (4 + at) * CELLS, _mm512_shuffle_f32x4(odd_low, odd_high, 0x88));
        store(to + (8 + at) * CELLS, _mm512_shuffle_f32x4(even_low, even_high, 0xdd));
        store(to + (12 + at) * CELLS, _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd));
    }
}

#include "attention_kernel.h"
#undef TARGET

}  // namespace wide

constexpr uint16_t HIDDEN = 0xfc00;  // minus infinity

// Which cells a query sees.
struct Seen {
    int64_t first = 0, count = 0;
    bool is_run = true;      // they follow each other
    bool has_bias = false;   // the mask has other numbers than zero for them
};

// A bit for each of sixteen numbers of a mask: whether the cell is seen, and whether something is added.
TARGET_AVX2 inline void look_at(const uint16_t * mask, uint32_t & seen, uint32_t & biased) {
    const __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(mask));
    const __m256i hidden = _mm256_cmpeq_epi16(numbers, _mm256_set1_epi16(static_cast<int16_t>(HIDDEN)));
    const __m256i zero = _mm256_cmpeq_epi16(_mm256_slli_epi16(numbers, 1), _mm256_setzero_si256());
    const auto bits = [](__m256i words) TARGET_AVX2 {
        const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
        return static_cast<uint32_t>(_mm_movemask_epi8(bytes));
    };
    seen = ~bits(hidden) & 0xffff;
    biased = seen & ~bits(zero);
}

// Looks through a query's row of a mask. Lists the cells that it sees, unless they follow each other.
TARGET_AVX2 Seen see(const uint16_t * mask, int64_t cells, int32_t * list) {
    Seen all;
    for (int64_t start = 0; start < cells; start += 16) {
        uint32_t seen, biased;
        if (start + 16 <= cells) {
            look_at(mask + start, seen, biased);
        } else {
            uint16_t rest[16];
            std::fill(rest, rest + 16, HIDDEN);
            std::copy(mask + start, mask + cells, rest);
            look_at(rest, seen, biased);
        }
        all.has_bias |= biased != 0;
        if (seen == 0xffff && all.is_run && all.count != 0 && start == all.first + all.count) {
            all.count += 16;
            continue;
        }
        for (; seen != 0; seen &= seen - 1) {
            const int64_t cell = start + __builtin_ctz(seen);
            if (all.count == 0) {
                all.first = cell;
            }
            if (all.is_run && cell != all.first + all.count) {
                std::iota(list, list + all.count, static_cast<int32_t>(all.first));
                all.is_run = false;
            }
            if (!all.is_run) {
                list[all.count] = static_cast<int32_t>(cell);
            }
            all.count++;
        }
    }
    return all;
}

// The shape of one operation, and how it is divided: a part has some heads that share keys, and some queries of one stream.
struct Plan {
    const ggml_tensor *queries, *keys, *values, *mask, *sinks;
    ggml_tensor * result;
    int64_t cells, count, heads, key_heads, streams;
    int64_t group;       // heads that share keys
    int64_t part_heads;  // of a group
    int64_t part_count;  // queries

    Plan(ggml_tensor * operation, int threads)
        : queries(operation->src[0]), keys(operation->src[1]), values(operation->src[2]), mask(operation->src[3]),
          sinks(operation->src[4]), result(operation), cells(keys->ne[1]), count(queries->ne[1]), heads(queries->ne[2]),
          key_heads(keys->ne[2]), streams(queries->ne[3]), group(heads / key_heads) {
        part_heads = std::min<int64_t>(group, ROWS);
        part_count = std::clamp<int64_t>(ROWS / part_heads, 1, count);
        // No more parts than there have to be: each loads its keys and values anew.
        while (part_heads > 1 && parts() < threads) {
            part_heads = (part_heads + 1) / 2;
        }
    }

    int64_t head_parts() const { return (group + part_heads - 1) / part_heads; }
    int64_t query_parts() const { return (count + part_count - 1) / part_count; }
    int64_t parts() const { return streams * query_parts() * key_heads * head_parts(); }

    size_t list_bytes() const { return (static_cast<size_t>(cells) * sizeof(int32_t) + 63) / 64 * 64; }
    // Scratch, and two lists of cells.
    size_t thread_bytes() const { return sizeof(Scratch) + 2 * list_bytes(); }
    size_t bytes(int threads) const { return static_cast<size_t>(threads) * thread_bytes() + 64; }
};

const char * at(const ggml_tensor * tensor, int64_t one, int64_t two, int64_t three) {
    return static_cast<const char *>(tensor->data) + static_cast<size_t>(one) * tensor->nb[1] + static_cast<size_t>(two) * tensor->nb[2] +
           static_cast<size_t>(three) * tensor->nb[3];
}

class Attention final : public ggml::cpu::tensor_traits {
  public:
    Backend backend = {};

    bool work_size(int threads, const ggml_tensor * operation, size_t & size) override {
        size = Plan(const_cast<ggml_tensor *>(operation), threads).bytes(threads);
        return true;
    }

    bool compute_forward(ggml_compute_params * thread, ggml_tensor * operation) override {
        const Plan plan(operation, thread->nth);
        // The buffer is smaller if ggml planned it for other instructions; all threads see the same.
        if (thread->use_ref || thread->wsize < plan.bytes(thread->nth)) {
            return false;
        }
        char * work = aligned(thread->wdata) + static_cast<size_t>(thread->ith) * plan.thread_bytes();
        share_parts(backend, *thread, plan.parts(), [&](int64_t part) { compute_part(plan, part, work); });
        return true;
    }

  private:
    static void compute_part(const Plan & plan, int64_t part, char * work) {
        const int64_t key_head = part % plan.key_heads;
        const int64_t head_part = part / plan.key_heads % plan.head_parts();
        const int64_t rest = part / plan.key_heads / plan.head_parts();
        // The last queries see most cells, and those that take longest begin first.
        const int64_t query_part = plan.query_parts() - 1 - rest % plan.query_parts();
        const int64_t stream = rest / plan.query_parts();
        const int64_t first_head = key_head * plan.group + head_part * plan.part_heads;
        const int64_t heads_end = std::min(first_head + plan.part_heads, (key_head + 1) * plan.group);
        const int64_t first = query_part * plan.part_count;
        const int64_t end = std::min(first + plan.part_count, plan.count);

        Scratch & scratch = *reinterpret_cast<Scratch *>(work);
        int32_t * list = reinterpret_cast<int32_t *>(work + sizeof(Scratch));
        int32_t * next = list + plan.list_bytes() / sizeof(int32_t);
        Tile tile = empty_tile(plan, key_head, stream);
        Seen before;
        for (int64_t query = first; query < end; query++) {
            const uint16_t * mask = nullptr;
            Seen seen;
            seen.count = plan.cells;
            if (plan.mask) {
                mask = reinterpret_cast<const uint16_t *>(at(plan.mask, query, 0, stream % plan.mask->ne[3]));
                seen = see(mask, plan.cells, next);
            }
            if (tile.count != 0 && (tile.count + heads_end - first_head > ROWS || !continues(before, list, seen, next))) {
                run(tile, scratch);
                tile.count = 0;
            }
            std::swap(list, next);
            before = seen;
            tile.cells = seen.is_run ? nullptr : list;
            tile.first = seen.first;
            for (int64_t head = first_head; head < heads_end; head++) {
                Row & row = tile.rows[tile.count++];
                row.query = reinterpret_cast<const float *>(at(plan.queries, query, head, stream));
                row.result = reinterpret_cast<float *>(static_cast<char *>(plan.result->data) +
                                                       static_cast<size_t>((stream * plan.count + query) * plan.heads + head) * plan.result->nb[1]);
                row.cells = static_cast<int>(seen.count);
                row.bias = seen.has_bias ? mask : nullptr;
                row.has_sink = plan.sinks != nullptr;
                row.sink = plan.sinks ? static_cast<const float *>(plan.sinks->data)[head] : 0.0f;
            }
        }
        run(tile, scratch);
    }

    static Tile empty_tile(const Plan & plan, int64_t key_head, int64_t stream) {
        Tile tile;
        tile.keys = at(plan.keys, 0, key_head, stream / (plan.streams / plan.keys->ne[3]));
        tile.values = at(plan.values, 0, key_head, stream / (plan.streams / plan.values->ne[3]));
        tile.key_bytes = plan.keys->nb[1];
        tile.value_bytes = plan.values->nb[1];
        tile.key_width = static_cast<int>(plan.keys->ne[0]);
        tile.value_width = static_cast<int>(plan.values->ne[0]);
        std::memcpy(&tile.scale, plan.result->op_params, sizeof(float));
        tile.cells = nullptr;
        tile.first = 0;
        tile.count = 0;
        return tile;
    }

    // Whether what a query sees begins with what the one before saw.
    static bool continues(const Seen & before, const int32_t * list, const Seen & seen, const int32_t * next) {
        if (seen.count < before.count || before.count == 0) {
            return false;
        }
        if (seen.is_run) {
            return before.is_run && before.first == seen.first;
        }
        if (before.is_run) {
            // The list ascends.
            return next[0] == before.first && next[before.count - 1] == before.first + before.count - 1;
        }
        return std::memcmp(list, next, static_cast<size_t>(before.count) * sizeof(int32_t)) == 0;
    }

    static void run(const Tile & tile, Scratch & scratch) {
        if (is_wide()) {
            wide::attend(tile, scratch);
        } else {
            narrow::attend(tile, scratch);
        }
    }
};

Attention attention;

bool is_of_halves(const ggml_tensor * tensor) {
    return tensor->type == GGML_TYPE_F16 && tensor->nb[0] == sizeof(uint16_t) && tensor->ne[0] % PLACES == 0 && tensor->ne[0] <= WIDTH_MAX &&
           lies_as_ggml_has_it(tensor);
}

}  // namespace

void sapwood::prepare_attention(const Backend & backend) { attention.backend = backend; }

ggml::cpu::tensor_traits * sapwood::attention_of(const ggml_tensor * operation) {
    const ggml_tensor *queries = operation->src[0], *keys = operation->src[1], *values = operation->src[2], *mask = operation->src[3];
    float of_position, cap;
    std::memcpy(&of_position, operation->op_params + 1, sizeof(float));
    std::memcpy(&cap, operation->op_params + 2, sizeof(float));
    const bool is_ours = !ggml_is_empty(operation) && of_position == 0.0f && cap == 0.0f && queries->type == GGML_TYPE_F32 && queries->nb[0] == sizeof(float) &&
                         is_of_halves(keys) && is_of_halves(values) && keys->ne[1] == values->ne[1] &&
                         keys->ne[1] <= INT32_MAX && keys->ne[2] == values->ne[2] && queries->ne[2] % keys->ne[2] == 0 &&
                         queries->ne[3] % keys->ne[3] == 0 && queries->ne[3] % values->ne[3] == 0 &&
                         (!mask || (mask->type == GGML_TYPE_F16 && mask->ne[2] == 1 && mask->ne[0] >= keys->ne[1]));
    return is_ours ? &attention : nullptr;
}

#endif
