// Where a layer's keys and values lie in the pool, and how a token's rows get there; knows no sequences and no queries.
//
// Pool of one layer: bfloat16 [num_blocks][num_kv_heads][2][block_size * head_dim], 64-byte aligned. Index 0 of the pair is
// the keys' half, index 1 the values'; so one head's share of a block is one piece of memory, and both halves stream.
//
//   keys    [block_size / 16][head_dim / 2][16][2]   16 tokens side by side; a step of 64 bytes goes to the next two dims
//   values  [block_size / 2][head_dim][2]            2 tokens side by side; a step of 4 x head_dim bytes goes to the next two
//
// Both put the pair that a bf16 dot product sums next to one another: two dims of a key, two tokens of the values.
// A slot is block * block_size + offset. Slots that nobody wrote may hold anything, NaN too.
#pragma once

#include <cstdint>

#include "lanes.h"

namespace pagemill {

constexpr int kTokensPerGroup = 16;

// The sizes that the layout depends on; the same for all layers. block_size and head_dim are multiples of 16.
struct KVLayout {
    std::int32_t num_kv_heads;
    std::int32_t head_dim;
    std::int32_t block_size;

    // Numbers of one head's keys in one block; its values take as many.
    std::int64_t half() const { return std::int64_t(block_size) * head_dim; }

    // Index in the pool of the keys of (block, head); the values follow at + half().
    std::int64_t keys_at(std::int64_t block, int head) const { return (block * num_kv_heads + head) * 2 * half(); }
};

// Store one token's keys and values, each [num_kv_heads, head_dim] contiguous, in `slot` of a layer's pool.
// Threads may write neighbouring slots at the same time: nothing but the slot's own numbers is touched.
void kv_write_token(const KVLayout& layout, bf16* pool, std::int64_t slot, const bf16* k_KD, const bf16* v_KD);

}  // namespace pagemill

extern "C" {

// Store num_tokens rows k and v, each [num_tokens, num_kv_heads, head_dim] with `k_stride` and `v_stride` numbers from one
// token to the next, in int64 slots [num_tokens], all distinct.
void pagemill_kv_write(
    const pagemill::KVLayout* layout, pagemill::bf16* pool, const pagemill::bf16* k, std::int64_t k_stride,
    const pagemill::bf16* v, std::int64_t v_stride, const std::int64_t* slots, std::int64_t num_tokens);
}
