// The vocabulary's product: float32 logits, or only what a greedy row needs of them, without storing any.
#pragma once

#include <cstdint>

#include "gemm.h"

extern "C" {

// For each of num_rows rows of `hidden`, bf16 [num_rows, num_in padded to 32], the lowest id below num_valid with the
// largest logit, and that logit less the log-sum-exp over all logits. Both are the same for any number of rows and threads.
// A row whose logits hold NaN or an infinity gets NaN for its log probability.
void pagemill_greedy(
    const pagemill::Weights* head, const pagemill::bf16* hidden, std::int64_t hidden_stride, std::int64_t num_rows,
    std::int32_t num_valid, std::int32_t num_threads, std::int32_t* token_ids, float* logprobs);
}
