// Products of 8-bit integers: weights have a scale an output, rows a scale for every 64 inputs, so that an outlier costs
// precision in its own group only. The sums of a group are exact integers.
//
// The dot product takes unsigned rows and signed weights, so a row's numbers are stored + 128, and what that adds to a
// group's sum is taken off from the start. A step is one group: int32 [64], -128 times the sum of each output's weights,
// then int8 [16][64][4]. A row is uint8 [num_in rounded up to 64].
#pragma once

#include "gemm.h"

namespace pagemill {

struct Int8 {
    static constexpr int kStepInputs = 64;
    static constexpr int kStepRowBytes = kStepInputs;
    static constexpr int kOffsetBytes = kPanel * sizeof(std::int32_t);
    static constexpr int kStepBytes = kOffsetBytes + kStepInputs * kPanel;
    static constexpr int kZero = 128;
    static constexpr int kLargest = 127;
#ifdef PAGEMILL_AVX512
    static constexpr int kMaxRows = 4;
#else
    static constexpr int kMaxRows = 1;
#endif

    template <int kRows>
    PAGEMILL_INLINE void add_step(
        Sums (&sums)[kRows], const Rows& x, std::int64_t first_row, std::int64_t step, const std::byte* panel) {
        const std::byte* inputs = x.at + first_row * x.stride + step * kStepRowBytes;
        const float* scales = x.scales + first_row * x.scales_stride + step;
        Ints group[kRows][kPanelVectors];
        PAGEMILL_UNROLL for (int row = 0; row < kRows; ++row)
            PAGEMILL_UNROLL for (int v = 0; v < kPanelVectors; ++v) group[row][v] = load_as<Ints>(panel + sizeof(Ints) * v);
        panel += kOffsetBytes;
#pragma GCC unroll 4
        for (int quad = 0; quad < kStepInputs / 4; ++quad) {
            Ints weights[kPanelVectors];
            PAGEMILL_UNROLL for (int v = 0; v < kPanelVectors; ++v) weights[v] = load_as<Ints>(panel + sizeof(Ints) * v);
            PAGEMILL_UNROLL for (int row = 0; row < kRows; ++row) {
                const Ints input = Ints{} + load_as<std::int32_t>(inputs + row * x.stride + 4 * quad);
                PAGEMILL_UNROLL for (int v = 0; v < kPanelVectors; ++v) group[row][v] = add_dot4(group[row][v], input, weights[v]);
            }
            panel += 4 * kPanel;
        }
        PAGEMILL_UNROLL for (int row = 0; row < kRows; ++row) {
            const Lanes scale = all(scales[row * x.scales_stride]);
            PAGEMILL_UNROLL for (int v = 0; v < kPanelVectors; ++v)
                sums[row][v] = multiply_add(__builtin_convertvector(group[row][v], Lanes), scale, sums[row][v]);
        }
    }

    PAGEMILL_INLINE void finish(Sums& sums, const Weights& weights, std::int64_t first_output) {
        PAGEMILL_UNROLL for (int v = 0; v < kPanelVectors; ++v) sums[v] *= load(weights.scales + first_output + v * kLanes);
    }
};

// A bf16 row of `size` numbers to 8 bits and a scale for each group; one that holds NaN or an infinity has no finite scale.
void quantise_row(const bf16* x, std::int64_t size, std::uint8_t* out, float* scales);

}  // namespace pagemill
