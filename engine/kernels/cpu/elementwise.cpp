// One token's row at a time; see elementwise.h.
#include "elementwise.h"

#include <cmath>

namespace pagemill {
namespace {

float inverse_rms(const float* x, std::int64_t size, float eps) {
    Lanes squares{};
    for (std::int64_t i = 0; i < size; i += kLanes) squares = multiply_add(load(x + i), load(x + i), squares);
    const float mean = sum_of(squares) / float(size);
    return 1.0f / std::sqrt(mean + eps) + (mean - mean);  // NaN, not zeros, where the squares overflow
}

bf16 narrow_one(float x) {
    bf16 lanes[kLanes];
    store_bf16(lanes, all(x));
    return lanes[0];
}

}  // namespace

void rms_norm(const float* x, const float* weight, std::int64_t size, float eps, bf16* out) {
    const float scale = inverse_rms(x, size, eps);
    for (std::int64_t i = 0; i < size; i += kLanes) store_bf16(out + i, load(x + i) * scale * load(weight + i));
}

void rms_norm_head(float* x, const float* weight, std::int64_t size, float eps) {
    const float scale = inverse_rms(x, size, eps);
    for (std::int64_t i = 0; i < size; i += kLanes) store(x + i, load(x + i) * scale * load(weight + i));
}

void rotate(const float* x, const float* cos_sin, std::int64_t size, bf16* out) {
    const std::int64_t half = size / 2;
    std::int64_t i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const Lanes first = load(x + i), second = load(x + half + i);
        const Lanes cos = load(cos_sin + i), sin = load(cos_sin + half + i);
        store_bf16(out + i, first * cos - second * sin);
        store_bf16(out + half + i, second * cos + first * sin);
    }
    for (; i < half; ++i) {
        out[i] = narrow_one(x[i] * cos_sin[i] - x[half + i] * cos_sin[half + i]);
        out[half + i] = narrow_one(x[half + i] * cos_sin[i] + x[i] * cos_sin[half + i]);
    }
}

void narrow_row(const float* x, std::int64_t size, bf16* out) {
    std::int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store_bf16(out + i, load(x + i));
    for (; i < size; ++i) out[i] = narrow_one(x[i]);
}

void widen_row(const bf16* x, std::int64_t size, float* out) {
    std::int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(out + i, load_bf16(x + i));
    for (; i < size; ++i) out[i] = widen(x[i]);
}

}  // namespace pagemill
