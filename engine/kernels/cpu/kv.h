// Where a layer's keys and values lie in the pool, and how a token's rows get there; knows no sequences and no queries.
//
// Plain pool of one layer: bfloat16 [num_blocks][num_kv_heads][2][block_size * head_dim], 64-byte aligned. Index 0 of the pair is
// the keys' half, index 1 the values'; so one head's share of a block is one piece of memory, and both halves stream.
//
//   keys    [block_size / 16][head_dim / 2][16][2]   16 tokens side by side; a step of 64 bytes goes to the next two dims
//   values  [block_size / 2][head_dim][2]            2 tokens side by side; a step of 4 x head_dim bytes goes to the next two
//
// Both put the pair that a bf16 dot product sums next to one another: two dims of a key, two tokens of the values.
// A slot is block * block_size + offset. Slots that nobody wrote may hold anything, NaN too.
//
// Where full blocks are quantised, block ids up to first_place are codes in the layout of kv_codes.h, and those behind are
// places, plain as above: up to first_open those of blocks that get full in this step, which all layers share, then the
// layer's own of blocks that stay open. Only places are written to; what is full is encoded.
#pragma once

#include <cstdint>

#include "lanes.h"

namespace pagemill {

constexpr int kTokensPerGroup = 16;

enum class Codes : std::int32_t { kNone, kInt8, kE4M3 };

// The sizes that the layout depends on; the same for all layers. block_size and head_dim are multiples of 16.
struct KVLayout {
    std::int32_t num_kv_heads;
    std::int32_t head_dim;
    std::int32_t block_size;
    Codes codes;  // of full blocks; kNone where all are plain

    // Numbers of one head's keys in one block; its values take as many.
    std::int64_t half() const { return std::int64_t(block_size) * head_dim; }

    // Index of the keys of (block, head) in a piece of memory; the values follow at + half().
    std::int64_t keys_at(std::int64_t block, int head) const { return (block * num_kv_heads + head) * 2 * half(); }
};

// One layer's memory.
struct KVPool {
    bf16* open;                // of a plain format all blocks, else the open places
    bf16* filling;             // null or 0 in a plain format, as are those that follow
    std::uint8_t* codes;
    std::int8_t* exponents;
    std::int64_t first_place;  // the number of quantised blocks
    std::int64_t first_open;

    bool is_coded(std::int64_t block) const { return block < first_place; }

    // The keys of (block, head), which is not coded.
    bf16* keys(const KVLayout& layout, std::int64_t block, int head) const {
        return block >= first_open ? open + layout.keys_at(block - first_open, head) : filling + layout.keys_at(block - first_place, head);
    }
};

// Store one token's keys and values, each [num_kv_heads, head_dim] contiguous, in `slot` of a layer's pool.
// Threads may write neighbouring slots at the same time: nothing but the slot's own numbers is touched.
void kv_write_token(const KVLayout& layout, const KVPool& pool, std::int64_t slot, const bf16* k_KD, const bf16* v_KD);

// Make the place `target` hold what the place `source` holds.
void kv_move(const KVLayout& layout, const KVPool& pool, std::int64_t source, std::int64_t target);

}  // namespace pagemill

extern "C" {

// Store num_tokens rows k and v, each [num_tokens, num_kv_heads, head_dim] with `k_stride` and `v_stride` numbers from one
// token to the next, in int64 slots [num_tokens], all distinct.
void pagemill_kv_write(
    const pagemill::KVLayout* layout, const pagemill::KVPool* pool, const pagemill::bf16* k, std::int64_t k_stride,
    const pagemill::bf16* v, std::int64_t v_stride, const std::int64_t* slots, std::int64_t num_tokens);
}
