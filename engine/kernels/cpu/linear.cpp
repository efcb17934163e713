// Packs weights of both kinds, and runs the plain linear layer over them; the tiles are tile_bf16.h's and tile_int8.h's.
#include "linear.h"

#include <cmath>

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

float to_float(bf16 x) {
    const bf16 several[kLanes] = {x};
    return load_bf16(several)[0];
}

// Output `place` of a panel in bf16.
void pack_output(const bf16* row, std::int64_t num_in, std::int64_t num_steps, int place, bf16* panel) {
    for (std::int64_t input = 0; input < num_steps * Bf16::kStepInputs; ++input)
        panel[(input / 2 * kPanel + place) * 2 + input % 2] = row != nullptr && input < num_in ? row[input] : bf16(0);
}

// The same in int8; gives the scale.
float pack_output(const bf16* row, std::int64_t num_in, std::int64_t num_steps, int place, std::byte* panel) {
    float largest = 0;
    for (std::int64_t input = 0; row != nullptr && input < num_in; ++input) largest = std::max(largest, std::fabs(to_float(row[input])));
    const float scale = largest / Int8::kLargest;
    for (std::int64_t step = 0; step < num_steps; ++step, panel += Int8::kStepBytes) {
        std::int32_t total = 0;
        for (int i = 0; i < Int8::kStepInputs; ++i) {
            const std::int64_t input = step * Int8::kStepInputs + i;
            const bool is_there = row != nullptr && input < num_in && scale > 0;
            const std::int8_t rounded = is_there ? std::int8_t(std::nearbyint(to_float(row[input]) / scale)) : std::int8_t(0);
            std::memcpy(panel + Int8::kOffsetBytes + (i / 4 * kPanel + place) * 4 + i % 4, &rounded, 1);
            total += rounded;
        }
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
#pragma omp parallel for
    for (std::int64_t output = 0; output < shape.num_panels() * kPanel; ++output) {
        const std::int64_t panel = output / kPanel;
        const int place = int(output % kPanel);
        if (shape.is_int8()) {
            const auto at = panels + panel * shape.num_steps<Int8>() * Int8::kStepBytes;
            scales[output] = pack_output(source.row(output), num_in, shape.num_steps<Int8>(), place, at);
        } else {
            const auto at = (bf16*)(panels + panel * shape.num_steps<Bf16>() * Bf16::kStepBytes);
            pack_output(source.row(output), num_in, shape.num_steps<Bf16>(), place, at);
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
