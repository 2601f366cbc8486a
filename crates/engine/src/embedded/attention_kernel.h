// Attention of a tile of rows over their cells, once for each set of instructions: included in a namespace of its own, after
// `TARGET`, `Vector`, `LANES` and the functions on vectors were defined there.
//
// Every row is computed by the same operations in the same order whatever else is in its tile: blocks of CELLS cells, counted from the
// first that the row sees, with the sum of products of a cell in the order of their places. Cells that a row does not see add nothing
// to it, not even a rounding. A score that is no number, or infinite, makes the row none: ggml's callers look for that.

constexpr int CELL_VECTORS = CELLS / LANES;
// Rows that share what is loaded. As many as leave eight sums in registers.
constexpr int SCORED_ROWS = 8 / CELL_VECTORS;
constexpr int ADDED_ROWS = 4;
constexpr int ADDED_VECTORS = LANES == 16 ? 4 : 2;

TARGET inline const uint16_t * cell_at(const char * start, size_t bytes, const Tile & tile, int index) {
    const int64_t cell = tile.cells ? tile.cells[index] : tile.first + index;
    return reinterpret_cast<const uint16_t *>(start + static_cast<size_t>(cell) * bytes);
}

// Keys as columns, `keys[place][cell]`; zeros for cells that are not there.
TARGET void load_keys(const Tile & tile, int start, int count, float * keys) {
    alignas(64) static const uint16_t NO_CELL[WIDTH_MAX] = {};
    const uint16_t * from[CELLS];
    for (int cell = 0; cell < CELLS; cell++) {
        from[cell] = cell < count ? cell_at(tile.keys, tile.key_bytes, tile, start + cell) : NO_CELL;
    }
    for (int place = 0; place < tile.key_width; place += LANES) {
        for (int cell = 0; cell < CELLS; cell += LANES) {
            load_columns(from + cell, place, keys + place * CELLS + cell);
        }
    }
}

// Values as they are, `values[cell][place]`.
TARGET void load_values(const Tile & tile, int start, int count, float * values) {
    for (int cell = 0; cell < count; cell++) {
        const uint16_t * from = cell_at(tile.values, tile.value_bytes, tile, start + cell);
        for (int place = 0; place < tile.value_width; place += LANES) {
            store(values + cell * tile.value_width + place, load_halves(from + place));
        }
    }
}

// The products of so many rows with the keys of a block.
template <int COUNT> TARGET void score(const Row * rows, int width, const float * keys, float * scores) {
    Vector sums[COUNT][CELL_VECTORS];
#pragma GCC unroll 8
    for (int row = 0; row < COUNT; row++) {
#pragma GCC unroll 8
        for (int part = 0; part < CELL_VECTORS; part++) {
            sums[row][part] = zero();
        }
    }
    for (int place = 0; place < width; place++) {
        Vector key[CELL_VECTORS];
#pragma GCC unroll 8
        for (int part = 0; part < CELL_VECTORS; part++) {
            key[part] = load(keys + place * CELLS + part * LANES);
        }
#pragma GCC unroll 8
        for (int row = 0; row < COUNT; row++) {
            const Vector query = every(rows[row].query[place]);
#pragma GCC unroll 8
            for (int part = 0; part < CELL_VECTORS; part++) {
                sums[row][part] = multiply_add(query, key[part], sums[row][part]);
            }
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < COUNT; row++) {
#pragma GCC unroll 8
        for (int part = 0; part < CELL_VECTORS; part++) {
            store(scores + row * CELLS + part * LANES, sums[row][part]);
        }
    }
}

// How many cells of the block from `start` on a row sees.
inline int seen_of(const Row & row, int start) { return row.cells - start < CELLS ? row.cells - start : CELLS; }

TARGET inline float exponential_of_one(float value) { return first(exponential(every(value))); }

TARGET void scale_sums(float * sums, int width, float by) {
    for (int place = 0; place < width; place += LANES) {
        store(sums + place, multiply(load(sums + place), every(by)));
    }
}

// What the mask adds, where it does more than hide cells.
TARGET void add_bias(const Tile & tile, const Row & row, int start, int count, float * scores) {
    for (int cell = 0; cell < count; cell++) {
        const uint16_t * bias = cell_at(reinterpret_cast<const char *>(row.bias), sizeof(uint16_t), tile, start + cell);
        scores[cell] += _cvtsh_ss(*bias);
    }
}

// Turns a row's scores of a block into weights, and what is summed up so far into what it is beside the largest score.
TARGET void weigh(const Tile & tile, const Row & row, int start, float * scores, Summed & summed, float * sums) {
    const int count = seen_of(row, start);
    for (int part = 0; part < CELL_VECTORS; part++) {
        store(scores + part * LANES, multiply(load(scores + part * LANES), every(tile.scale)));
    }
    if (row.bias) {
        add_bias(tile, row, start, count, scores);
    }
    Vector parts[CELL_VECTORS];
    Vector most = every(-INFINITY);
    for (int part = 0; part < CELL_VECTORS; part++) {
        parts[part] = keep(load(scores + part * LANES), count - part * LANES, every(-INFINITY));
        most = larger(most, parts[part]);
    }
    const float largest = largest_of(most);
    if (largest > summed.most) {
        if (summed.most > -INFINITY) {
            const float by = exponential_of_one(summed.most - largest);
            summed.total *= by;
            scale_sums(sums, tile.value_width, by);
        }
        summed.most = largest;
    }
    Vector total = zero();
    for (int part = 0; part < CELL_VECTORS; part++) {
        const Vector weight = exponential(subtract(parts[part], every(summed.most)));
        const Vector kept = keep(weight, count - part * LANES, zero());
        store(scores + part * LANES, kept);
        total = add(total, kept);
    }
    summed.total += sum_of(total);
}

// Adds the weighted values of a block to so many rows, at so many vectors of their places.
template <int COUNT, int VECTORS>
TARGET void add_values(const float * weights, const float * values, int count, int width, float * sums) {
    Vector rows[COUNT][VECTORS];
#pragma GCC unroll 8
    for (int row = 0; row < COUNT; row++) {
#pragma GCC unroll 8
        for (int part = 0; part < VECTORS; part++) {
            rows[row][part] = load(sums + row * WIDTH_MAX + part * LANES);
        }
    }
    for (int cell = 0; cell < count; cell++) {
        Vector value[VECTORS];
#pragma GCC unroll 8
        for (int part = 0; part < VECTORS; part++) {
            value[part] = load(values + cell * width + part * LANES);
        }
#pragma GCC unroll 8
        for (int row = 0; row < COUNT; row++) {
            const Vector weight = every(weights[row * CELLS + cell]);
#pragma GCC unroll 8
            for (int part = 0; part < VECTORS; part++) {
                rows[row][part] = multiply_add(weight, value[part], rows[row][part]);
            }
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < COUNT; row++) {
#pragma GCC unroll 8
        for (int part = 0; part < VECTORS; part++) {
            store(sums + row * WIDTH_MAX + part * LANES, rows[row][part]);
        }
    }
}

template <int COUNT> TARGET void add_all_values(const float * weights, const float * values, int count, int width, float * sums) {
    int place = 0;
    for (; place + ADDED_VECTORS * LANES <= width; place += ADDED_VECTORS * LANES) {
        add_values<COUNT, ADDED_VECTORS>(weights, values + place, count, width, sums + place);
    }
    for (; place < width; place += LANES) {
        add_values<COUNT, 1>(weights, values + place, count, width, sums + place);
    }
}

TARGET void score_rows(const Row * rows, int count, int width, const float * keys, float * scores) {
    int row = 0;
    for (; row + SCORED_ROWS <= count; row += SCORED_ROWS) {
        score<SCORED_ROWS>(rows + row, width, keys, scores + row * CELLS);
    }
    for (; row < count; row++) {
        score<1>(rows + row, width, keys, scores + row * CELLS);
    }
}

TARGET void add_rows(const float * weights, const float * values, int count, int cells, int width, float * sums) {
    int row = 0;
    for (; row + ADDED_ROWS <= count; row += ADDED_ROWS) {
        add_all_values<ADDED_ROWS>(weights + row * CELLS, values, cells, width, sums + row * WIDTH_MAX);
    }
    for (; row < count; row++) {
        add_all_values<1>(weights + row * CELLS, values, cells, width, sums + row * WIDTH_MAX);
    }
}

// Writes what a row has seen: the sum of values, each weighted with its share of all weights.
TARGET void finish(const Row & row, Summed summed, float * sums, int width) {
    if (row.has_sink) {
        // A cell without a value.
        const float most = summed.most > row.sink ? summed.most : row.sink;
        const float by = summed.most > -INFINITY ? exponential_of_one(summed.most - most) : 0.0f;
        summed.total = summed.total * by + exponential_of_one(row.sink - most);
        scale_sums(sums, width, by);
    }
    const float share = summed.total == 0.0f ? 0.0f : 1.0f / summed.total;
    for (int place = 0; place < width; place += LANES) {
        store_anywhere(row.result + place, multiply(load(sums + place), every(share)));
    }
}

TARGET void attend(const Tile & tile, Scratch & scratch) {
    for (int row = 0; row < tile.count; row++) {
        scratch.summed[row] = {-INFINITY, 0.0f};
        std::memset(scratch.sums[row], 0, static_cast<size_t>(tile.value_width) * sizeof(float));
    }
    const int cells = tile.rows[tile.count - 1].cells;
    int first = 0;
    for (int start = 0; start < cells; start += CELLS) {
        // Rows see the more cells the later they are.
        while (tile.rows[first].cells <= start) {
            first++;
        }
        const int count = cells - start < CELLS ? cells - start : CELLS;
        load_keys(tile, start, count, scratch.keys);
        load_values(tile, start, count, scratch.values);
        score_rows(tile.rows + first, tile.count - first, tile.key_width, scratch.keys, scratch.weights[first]);
        for (int row = first; row < tile.count; row++) {
            weigh(tile, tile.rows[row], start, scratch.weights[row], scratch.summed[row], scratch.sums[row]);
        }
        for (int row = first, end; row < tile.count; row = end) {
            // Not even with a weight of zero does a row take what it does not see: that may be infinite.
            const int seen = seen_of(tile.rows[row], start);
            for (end = row + 1; end < tile.count && seen_of(tile.rows[end], start) == seen;) {
                end++;
            }
            add_rows(scratch.weights[row], scratch.values, end - row, seen, tile.value_width, scratch.sums[row]);
        }
    }
    for (int row = 0; row < tile.count; row++) {
        finish(tile.rows[row], scratch.summed[row], scratch.sums[row], tile.value_width);
    }
}
