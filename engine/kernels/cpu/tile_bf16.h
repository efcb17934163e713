// Products in bf16: a step is 32 inputs, bf16 [16][64][2], so that the two inputs that a dot product sums lie together.
// A row is bf16 [num_in rounded up to 32], zeros at the end.
#pragma once

#include "gemm.h"

namespace pagemill {

struct Bf16 {
    static constexpr int kStepInputs = 32;
    static constexpr int kStepRowBytes = kStepInputs * sizeof(bf16);
    static constexpr int kStepBytes = kStepRowBytes * kPanel;
#ifdef PAGEMILL_AVX512
    static constexpr int kMaxRows = 6;  // 6 x 4 sums, 4 vectors of weights and one of inputs: 29 of 32 registers
#else
    static constexpr int kMaxRows = 1;
#endif

    template <int kRows>
    PAGEMILL_INLINE void add_step(
        Sums (&sums)[kRows], const Rows& x, std::int64_t first_row, std::int64_t step, const std::byte* panel) {
        const std::byte* inputs = x.at + first_row * x.stride + step * kStepRowBytes;
#pragma GCC unroll 4
        for (int pair = 0; pair < kStepInputs / 2; ++pair) {
            Pairs weights[kPanelVectors];
            PAGEMILL_UNROLL for (int v = 0; v < kPanelVectors; ++v) weights[v] = load_as<Pairs>(panel + sizeof(Pairs) * v);
            PAGEMILL_UNROLL for (int row = 0; row < kRows; ++row) {
                const Pairs input = all_pairs((const bf16*)(inputs + row * x.stride) + 2 * pair);
                PAGEMILL_UNROLL for (int v = 0; v < kPanelVectors; ++v) sums[row][v] = add_dot(sums[row][v], input, weights[v]);
            }
            panel += 2 * sizeof(bf16) * kPanel;
        }
    }

    PAGEMILL_INLINE void finish(Sums&, const Weights&, std::int64_t) {}
};

}  // namespace pagemill
