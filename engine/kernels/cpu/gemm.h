// Products of a step's rows with packed weights, y = x W^T: each output is summed in the order of the inputs, whatever the
// number of rows, their place and the threads. So a row's bits depend on that row alone.
//
// Weights are packed once, in panels of 64 outputs that stream from end to end; a panel is a run of steps, each a few
// inputs of all 64 outputs. A kind says what a step holds: Bf16 (tile_bf16.h) or Int8 (tile_int8.h), which also scales
// rows and outputs. Outputs are padded to whole panels with zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "lanes.h"
#include "team.h"

namespace pagemill {

constexpr int kPanel = 64;  // outputs of a panel
constexpr int kPanelVectors = kPanel / kLanes;
constexpr int kLineBytes = 64;

constexpr std::int64_t round_up(std::int64_t count, std::int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

struct Weights {
    const std::byte* panels;
    const float* scales;  // of each output, [num_out rounded up to 64]; null: the weights are bf16 and have none
    const float* bias;    // the same size, or null
    std::int32_t num_in;
    std::int32_t num_out;

    bool is_int8() const { return scales != nullptr; }
    std::int64_t num_panels() const { return round_up(num_out, kPanel) / kPanel; }

    template <class Kind>
    std::int64_t num_steps() const {
        return round_up(num_in, Kind::kStepInputs) / Kind::kStepInputs;
    }
    template <class Kind>
    const std::byte* panel(std::int64_t index) const {
        return panels + index * num_steps<Kind>() * Kind::kStepBytes;
    }
};

// Rows in the form that a kind multiplies, padded to whole steps.
struct Rows {
    const std::byte* at;
    std::int64_t stride;         // bytes from one row to the next
    std::int64_t count;
    const float* scales;         // Int8: of each row and step; Bf16: null
    std::int64_t scales_stride;  // numbers from one row to the next

    template <class Kind>
    std::int64_t num_tiles() const {
        return (count + Kind::kMaxRows - 1) / Kind::kMaxRows;
    }
};

// The sums of one row and one panel.
using Sums = Lanes[kPanelVectors];

// What a tile fetches while it computes: its share of the panel that comes next.
struct Ahead {
    const std::byte* at;
    int lines_per_step;
};

// kRows rows from `first_row` on times one panel. `done(row, sums)` takes each row's sums while they are in registers.
template <class Kind, int kRows, class Done>
__attribute__((noinline)) void multiply_tile(
    const Weights& weights, std::int64_t panel_index, const Rows& x, std::int64_t first_row, Ahead ahead, const Done& done) {
    Sums sums[kRows] = {};
    const std::byte* panel = weights.panel<Kind>(panel_index);
    for (std::int64_t step = 0; step < weights.num_steps<Kind>(); ++step) {
        for (int line = 0; line < ahead.lines_per_step; ++line) __builtin_prefetch(ahead.at + kLineBytes * line, 0, 2);
        ahead.at += kLineBytes * ahead.lines_per_step;
        Kind::template add_step<kRows>(sums, x, first_row, step, panel);
        panel += Kind::kStepBytes;
    }
    PAGEMILL_UNROLL for (int row = 0; row < kRows; ++row) {
        Kind::finish(sums[row], weights, panel_index * kPanel);
        done(first_row + row, sums[row]);
    }
}

// multiply_tile for a number of rows that is known when it runs, 1 to Kind::kMaxRows.
template <class Kind, class Done, int... kRowsLess1>
void multiply_rows(
    const Weights& weights, std::int64_t panel, const Rows& x, Range rows, Ahead ahead, const Done& done,
    std::integer_sequence<int, kRowsLess1...>) {
    using Tile = void (*)(const Weights&, std::int64_t, const Rows&, std::int64_t, Ahead, const Done&);
    constexpr Tile tiles[] = {multiply_tile<Kind, kRowsLess1 + 1, Done>...};
    tiles[rows.end - rows.begin - 1](weights, panel, x, rows.begin, ahead, done);
}

// The tiles begin : end of x W^T, where tile t is the row tile t % n of panel t / n, for n row tiles. `done_for(panel)`
// gives the `done` that takes that panel's sums.
template <class Kind, class DoneFor>
void multiply_tiles(const Weights& weights, const Rows& x, Range tiles, const DoneFor& done_for) {
    const std::int64_t num_row_tiles = x.num_tiles<Kind>();
    if (num_row_tiles == 0) return;
    const std::int64_t lines_of_step = Kind::kStepBytes / kLineBytes;
    const std::int64_t share = (lines_of_step + num_row_tiles - 1) / num_row_tiles;
    std::int64_t panel = tiles.begin / num_row_tiles, row_tile = tiles.begin % num_row_tiles;
    for (std::int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
        const std::int64_t lines_before = std::min(share * row_tile, lines_of_step);
        const std::int64_t lines = panel + 1 < weights.num_panels() ? std::min(share, lines_of_step - lines_before) : 0;
        const Ahead ahead{weights.panel<Kind>(panel + 1) + weights.num_steps<Kind>() * lines_before * kLineBytes, int(lines)};
        multiply_rows<Kind>(
            weights, panel, x, share_of(x.count, row_tile, num_row_tiles), ahead, done_for(panel),
            std::make_integer_sequence<int, Kind::kMaxRows>{});
        if (++row_tile == num_row_tiles) row_tile = 0, ++panel;
    }
}

}  // namespace pagemill
