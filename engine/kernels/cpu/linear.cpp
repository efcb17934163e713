// Packs weights of both kinds, and runs the plain linear layer over them; the tiles are tile_bf16.h's and tile_int8.h's.
#include "linear.h"

#include <vector>

#include "product.h"

namespace pagemill {
namespace {

// The weights as Python has them, and which of their rows the outputs of the panels are.
struct Source {
    const bf16* weights;
    std::int64_t stride;
    std::int64_t num_out, num_in, num_gates;

    std::int64_t num_outputs() const { return num_gates > 0 ? 2 * round_up(num_gates, kPanel / 2) : num_out; }

    // Null for padding.
    const bf16* row(std::int64_t output) const {
        if (num_gates == 0) return output < num_out ? weights + output * stride : nullptr;
        const std::int64_t panel = output / kPanel, place = output % kPanel, half = kPanel / 2;
        const std::int64_t gate = panel * half + place % half;
        if (gate >= num_gates) return nullptr;
        return weights + (place < half ? gate : num_gates + gate) * stride;
    }
};

// Output `place` of a panel in bf16; `row` has zeros up to whole steps.
void pack_output(const std::vector<bf16>& row, int place, bf16* panel) {
    for (std::size_t input = 0; input < row.size(); input += 2)
        std::memcpy(panel + input * kPanel + 2 * place, &row[input], 2 * sizeof(bf16));
}

// The same in int8; gives the scale.
float pack_output(const std::vector<bf16>& row, int place, std::byte* panel) {
    bf16 most = 0;
    for (std::size_t input = 0; input < row.size(); input += 64) most = std::max(most, largest_magnitude_of_64(&row[input]));
    const float scale = widen(most) / Int8::kLargest;
    const Lanes inverse = all(scale > 0 ? 1.0f / scale : 0.0f);
    for (std::size_t first = 0; first < row.size(); first += Int8::kStepInputs, panel += Int8::kStepBytes) {
        std::uint8_t rounded[Int8::kStepInputs];
        for (int i = 0; i < Int8::kStepInputs; i += kLanes)
            store_bytes(rounded + i, multiply_add(load_bf16(&row[first + i]), inverse, all(float(Int8::kZero))));
        std::int32_t total = 0;
        for (std::uint8_t& number : rounded) {
            total += number - Int8::kZero;
            number = std::uint8_t(number - Int8::kZero);
        }
        for (int quad = 0; quad < Int8::kStepInputs / 4; ++quad)
            std::memcpy(panel + Int8::kOffsetBytes + (quad * kPanel + place) * 4, rounded + 4 * quad, 4);
        const std::int32_t offset = -Int8::kZero * total;
        std::memcpy(panel + place * sizeof offset, &offset, sizeof offset);
    }
    return scale;
}

// Writes the columns that the matrix has, and none of the padding.
struct StoreRow {
    float* out;
    std::int64_t stride, first_column, num_columns;
    const float* bias;

    void operator()(std::int64_t row, const Sums& sums) const {
        for (int v = 0; v < kPanelVectors; ++v) {
            const std::int64_t column = first_column + v * kLanes;
            if (column >= num_columns) return;
            const Lanes y = bias ? sums[v] + load(bias + column) : sums[v];
            std::memcpy(out + row * stride + column, &y, sizeof(float) * std::min<std::int64_t>(kLanes, num_columns - column));
        }
    }
};

}  // namespace
}  // namespace pagemill

using namespace pagemill;

std::int64_t pagemill_panel_bytes(std::int32_t num_out, std::int32_t num_in, std::int32_t is_int8) {
    const Weights shape{nullptr, nullptr, nullptr, num_in, num_out};
    return shape.num_panels() * (is_int8 ? shape.num_steps<Int8>() * Int8::kStepBytes : shape.num_steps<Bf16>() * Bf16::kStepBytes);
}

void pagemill_pack(
    const bf16* weights, std::int64_t stride, std::int32_t num_out, std::int32_t num_in, std::int32_t num_gates, std::byte* panels,
    float* scales) {
    const Source source{weights, stride, num_out, num_in, num_gates};
    const Weights shape{panels, scales, nullptr, num_in, std::int32_t(source.num_outputs())};
    const std::int64_t num_steps = scales ? shape.num_steps<Int8>() : shape.num_steps<Bf16>();
    const std::int64_t step_inputs = scales ? Int8::kStepInputs : Bf16::kStepInputs;
    const std::int64_t step_bytes = scales ? Int8::kStepBytes : Bf16::kStepBytes;
#pragma omp parallel for
    for (std::int64_t panel = 0; panel < shape.num_panels(); ++panel) {
        std::byte* at = panels + panel * num_steps * step_bytes;
        for (int place = 0; place < kPanel; ++place) {
            std::vector<bf16> row(num_steps * step_inputs);
            const std::int64_t output = panel * kPanel + place;
            if (const bf16* from = source.row(output)) std::copy(from, from + num_in, row.begin());
            if (scales) {
                scales[output] = pack_output(row, place, at);
            } else {
                pack_output(row, place, (bf16*)at);
            }
        }
    }
}

void pagemill_linear(
    const Weights* weights, const bf16* x, std::int64_t x_stride, std::int64_t num_rows, float* out, std::int64_t out_stride,
    std::int32_t num_threads) {
    Progress progress(kJobsPerProduct, num_threads);
    Quantised room(weights->is_int8() ? num_rows : 0, weights->num_in);
#pragma omp parallel num_threads(num_threads)
    {
        Team team(progress);
        multiply(team, *weights, x, x_stride, num_rows, room, [&](std::int64_t panel) {
            return StoreRow{out, out_stride, panel * kPanel, weights->num_out, weights->bias};
        });
    }
}
