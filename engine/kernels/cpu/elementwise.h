// What happens to one token's row between two products: norms, rotation, the activation. Sums are float32.
//
// Rows are padded with zeros to whole vectors, so that no loop has a tail; each function keeps the padding zero.
#pragma once

#include <cstdint>

#include "lanes.h"

namespace pagemill {

// RMSNorm (Zhang and Sennrich 2019): weight * x / sqrt(mean(x^2) + eps) over `size` numbers, written as bf16. x, weight and
// out are padded to a multiple of 16.
void rms_norm(const float* x, const float* weight, std::int64_t size, float eps, bf16* out);

// The same in place and in float32, for one head of `size` numbers; `size` is a multiple of 16.
void rms_norm_head(float* x, const float* weight, std::int64_t size, float eps);

// Rotary embedding of one head (Su et al. 2021, half-split pairing): turns the pairs (i, i + size / 2) by the angles whose
// cosines are at cos_sin and sines at cos_sin + size / 2, and writes bf16. `size` is even.
void rotate(const float* x, const float* cos_sin, std::int64_t size, bf16* out);

// Between the two number types, any size.
void narrow_row(const float* x, std::int64_t size, bf16* out);
void widen_row(const bf16* x, std::int64_t size, float* out);

// gate * sigmoid(gate) * up, in each lane.
PAGEMILL_INLINE Lanes silu_times(Lanes gate, Lanes up) {
    constexpr float kLog2E = 1.44269504f;
    const Lanes exponent = gate * -kLog2E;
    return gate / (power_of_two(exponent > 127.0f ? all(127.0f) : exponent) + 1.0f) * up;
}

}  // namespace pagemill
