#include "kv.h"

namespace pagemill {
namespace {

// The values of one head go to every second number, [dim][2]; the other token's numbers between them stay untouched.
void write_values(bf16* to, const bf16* v_D, int head_dim) {
#ifdef PAGEMILL_AVX512
    for (int dim = 0; dim < head_dim; dim += kLanes) {
        const __m512i spread = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(v_D + dim)));
        _mm512_mask_storeu_epi16(to + 2 * dim, 0x55555555, spread);
    }
#else
    for (int dim = 0; dim < head_dim; dim++) to[2 * dim] = v_D[dim];
#endif
}

}  // namespace

void kv_write_token(const KVLayout& layout, const KVPool& pool, std::int64_t slot, const bf16* k_KD, const bf16* v_KD) {
    const std::int64_t block = slot / layout.block_size;
    const int offset = int(slot % layout.block_size), head_dim = layout.head_dim;
    const int group = offset / kTokensPerGroup, place = offset % kTokensPerGroup;
    for (int head = 0; head < layout.num_kv_heads; head++) {
        bf16* keys = pool.keys(layout, block, head);
        bf16* key = keys + group * kTokensPerGroup * head_dim + 2 * place;
        for (int dim = 0; dim < head_dim; dim += 2) {
            std::memcpy(key + dim * kTokensPerGroup, k_KD + head * head_dim + dim, 2 * sizeof(bf16));
        }
        bf16* values = keys + layout.half();
        write_values(values + offset / 2 * 2 * head_dim + offset % 2, v_KD + head * head_dim, head_dim);
    }
}

void kv_move(const KVLayout& layout, const KVPool& pool, std::int64_t source, std::int64_t target) {
    const std::int64_t size = layout.num_kv_heads * 2 * layout.half();
    std::memcpy(pool.keys(layout, target, 0), pool.keys(layout, source, 0), size * sizeof(bf16));
}

}  // namespace pagemill

using namespace pagemill;

void pagemill_kv_write(
    const KVLayout* layout, const KVPool* pool, const bf16* k, std::int64_t k_stride, const bf16* v, std::int64_t v_stride,
    const std::int64_t* slots, std::int64_t num_tokens) {
    for (std::int64_t t = 0; t < num_tokens; t++) kv_write_token(*layout, *pool, slots[t], k + t * k_stride, v + t * v_stride);
}
