// Linear layers as Python calls them: weights into panels, rows through them. Shapes: see gemm.h.
#pragma once

#include "gemm.h"

extern "C" {

// Bytes that the panels of so many outputs take, in bf16 or in int8.
std::int64_t pagemill_panel_bytes(std::int32_t num_out, std::int32_t num_in, std::int32_t is_int8);

// Pack bf16 weights [num_out, num_in], rows `stride` numbers apart, into `panels`. With num_gates > 0 the rows are that
// many gates and then as many ups, and each panel gets 32 gates and the 32 ups that belong to them. With `scales`, float32
// [outputs rounded up to 64], the weights are rounded to 8 bits: each output's largest is 127 times its scale.
void pagemill_pack(
    const pagemill::bf16* weights, std::int64_t stride, std::int32_t num_out, std::int32_t num_in, std::int32_t num_gates,
    std::byte* panels, float* scales);

// x, bf16 [num_rows, num_in padded to 32] -> float32 [num_rows, num_out] with `out_stride` numbers from one row to the next.
void pagemill_linear(
    const pagemill::Weights* weights, const pagemill::bf16* x, std::int64_t x_stride, std::int64_t num_rows, float* out,
    std::int64_t out_stride, std::int32_t num_threads);
}
