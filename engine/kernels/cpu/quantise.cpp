// Rows to 8 bits, group by group; see tile_int8.h.
#include "tile_int8.h"

namespace pagemill {

void quantise_row(const bf16* x, std::int64_t size, std::uint8_t* out, float* scales) {
    constexpr int kVectors = Int8::kStepInputs / kLanes;
    constexpr float kNegligible = 1e-30f;  // under it a group counts as zeros: its scale's inverse would overflow
    for (std::int64_t first = 0; first < size; first += Int8::kStepInputs, out += Int8::kStepInputs) {
        alignas(64) bf16 group[Int8::kStepInputs] = {};
        std::memcpy(group, x + first, sizeof(bf16) * std::min<std::int64_t>(Int8::kStepInputs, size - first));
        Lanes numbers[kVectors], largest_of{}, fault{};
        for (int v = 0; v < kVectors; ++v) {
            numbers[v] = load_bf16(group + v * kLanes);
            largest_of = max(largest_of, max(numbers[v], -numbers[v]));
            fault += numbers[v] - numbers[v];  // 0, or NaN where a number is none
        }
        const float most = largest(largest_of);
        const float inverse = most > kNegligible ? Int8::kLargest / most : 0.0f;
        for (int v = 0; v < kVectors; ++v) store_bytes(out + v * kLanes, multiply_add(numbers[v], all(inverse), all(float(Int8::kZero))));
        *scales++ = most / Int8::kLargest + sum_of(fault);
    }
}

}  // namespace pagemill
