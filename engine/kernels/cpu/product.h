// A product of bf16 rows with weights of either kind, as jobs of a team: the one place that knows that there are two kinds.
#pragma once

#include "gemm.h"
#include "matrix.h"
#include "tile_bf16.h"
#include "tile_int8.h"

namespace pagemill {

constexpr int kJobsPerProduct = 2;

// Room for the rows of one product in 8 bits.
struct Quantised {
    Quantised(std::int64_t num_rows, std::int64_t num_in)
        : numbers(num_rows, num_in), scales(num_rows, round_up(num_in, Int8::kStepInputs) / Int8::kStepInputs) {}

    Matrix<std::uint8_t> numbers;
    Matrix<float> scales;
};

// Calls `work(kind, rows)` with the weights' kind, Bf16{} or Int8{}, and the rows of x in its form. Rows of x are bf16,
// `stride` numbers apart, with zeros up to a multiple of 32.
template <class Work>
void with_rows(
    Team& team, const Weights& weights, const bf16* x, std::int64_t stride, std::int64_t num_rows, Quantised& room, const Work& work) {
    if (!weights.is_int8()) {
        work(Bf16{}, Rows{(const std::byte*)x, stride * std::int64_t(sizeof(bf16)), num_rows, nullptr, 0});
        return;
    }
    team.run(num_rows, 1, [&](Range rows) {
        for (std::int64_t row = rows.begin; row < rows.end; ++row)
            quantise_row(x + row * stride, weights.num_in, room.numbers.row(row), room.scales.row(row));
    });
    const std::byte* numbers = (const std::byte*)room.numbers.row(0);
    work(Int8{}, Rows{numbers, room.numbers.stride(), num_rows, room.scales.row(0), room.scales.stride()});
}

// x W^T; see multiply_tiles for `done_for`.
template <class DoneFor>
void multiply(
    Team& team, const Weights& weights, const bf16* x, std::int64_t stride, std::int64_t num_rows, Quantised& room,
    const DoneFor& done_for) {
    with_rows(team, weights, x, stride, num_rows, room, [&](auto kind, const Rows& rows) {
        using Kind = decltype(kind);
        const std::int64_t num_tiles = weights.num_panels() * rows.num_tiles<Kind>();
        team.run(num_tiles, 1, [&](Range tiles) { multiply_tiles<Kind>(weights, rows, tiles, done_for); });
    });
}

}  // namespace pagemill
