// Rows to 8 bits, group by group; see tile_int8.h.
#include "tile_int8.h"

namespace pagemill {

void quantise_row(const bf16* x, std::int64_t size, std::uint8_t* out, float* scales) {
    constexpr int kGroup = Int8::kStepInputs;
    constexpr float kNegligible = 1e-30f;  // under it a group counts as zeros: its scale's inverse would overflow
    const auto quantise = [&](const bf16* group) {
        const float most = widen(largest_magnitude_of_64(group));
        const Lanes inverse = all(most > kNegligible ? Int8::kLargest / most : 0.0f);
        PAGEMILL_UNROLL for (int i = 0; i < kGroup; i += kLanes)
            store_bytes(out + i, multiply_add(load_bf16(group + i), inverse, all(float(Int8::kZero))));
        *scales++ = most / Int8::kLargest;  // NaN or infinity where a number is none, which then no sum of the row hides
        out += kGroup;
    };
    for (; size >= kGroup; size -= kGroup, x += kGroup) quantise(x);
    if (size > 0) {
        alignas(64) bf16 rest[kGroup] = {};
        std::memcpy(rest, x, sizeof(bf16) * size);
        quantise(rest);
    }
}

}  // namespace pagemill
