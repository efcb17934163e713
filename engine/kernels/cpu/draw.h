// Tokens drawn by chance from rows of logits, as engine/sampling/transforms.py defines it, without sorting a vocabulary.
#pragma once

#include <cstdint>

namespace pagemill {

// What one row is drawn by. `chance` is its uniform number in [0, 1); top_k = 0 and min_p = 0 and top_p = 1 cut nothing.
struct DrawSettings {
    float temperature;
    float min_p;
    std::int64_t top_k;
    double top_p;
    double chance;
};

}  // namespace pagemill

extern "C" {

// For each row of float32 logits, `stride` numbers apart, the first of its num_tokens ids whose cumulative probability,
// over what its settings keep and in id order, exceeds its chance. Of a row that holds NaN, or whose largest logit is not finite, the last id.
void pagemill_draw(
    const float* logits, std::int64_t stride, std::int64_t num_rows, std::int64_t num_tokens, const pagemill::DrawSettings* settings,
    std::int32_t num_threads, std::int64_t* token_ids);
}
