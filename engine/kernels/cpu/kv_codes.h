// Full blocks at one byte a number: how they lie in memory, how they come to be, and how they are read.
//
// Codes of one layer: bytes [num_blocks][num_kv_heads][2][block_size * head_dim], keys and values as in kv.h but for the
// order in each 64 of them: two vectors of 32 numbers lie in it 8 by 8 in turn, so that one load gives both.
// Exponents: bytes [num_blocks][num_kv_heads][keys' and then values']: with int8 codes one for each channel of the keys and
// one for each token of the values, with 8-bit floats one for all keys and one for all values.
//
// A code is a sign and seven bits: a whole number up to 127, or an e4m3 float. A number is its code times two to its
// exponent, which bfloat16 holds exactly. A zero is read as 2^-63 of its scale, so that exponents can be added blindly.
#pragma once

#include <cstdint>

#include "kv.h"

namespace pagemill {

inline int num_key_exponents(const KVLayout& layout) { return layout.codes == Codes::kInt8 ? layout.head_dim : 1; }
inline int num_value_exponents(const KVLayout& layout) { return layout.codes == Codes::kInt8 ? layout.block_size : 1; }

// Quantise one head's share of the plain block in `place` as that of `block`. A scale is the least power of two that brings
// its numbers within the largest code; what is no number makes all of its scale as large as can be.
void kv_encode(const KVLayout& layout, const KVPool& pool, std::int64_t place, std::int64_t block, int head);

// Where 16 tokens of one head lie: those of `block` from `offset` on.
struct CodedGroup {
    std::int64_t block;
    int offset;
};

constexpr int kMostDims = 256;

// What it takes to read one head's share of a group.
struct GroupReader {
    const std::uint8_t* keys;
    const std::uint8_t* values;
    const CodeTable* table;
    bf16 key_shifts[kMostDims];            // to add to the bits of a number: one a channel
    bf16 value_shifts[kTokensPerGroup];    // one a token

    // Fetches the exponents of `next`.
    void open(const KVLayout& layout, const KVPool& pool, int head, const CodedGroup& group, const CodedGroup& next);
};

const std::uint8_t* codes_of(const KVLayout& layout, const KVPool& pool, int head, const CodedGroup& group);

// Read one head's share of a group: keys and values, 16 * head_dim each, as in a plain block. Fetches what will be needed
// to read `next`, which may be the same.
void kv_decode_group(
    const KVLayout& layout, const KVPool& pool, int head, const CodedGroup& group, const CodedGroup& next, bf16* keys, bf16* values);

}  // namespace pagemill

extern "C" {

// Quantise whole blocks: num_full places and blocks, int64 [2, num_full].
void pagemill_kv_encode(const pagemill::KVLayout* layout, const pagemill::KVPool* pool, const std::int64_t* full, std::int64_t num_full);

// Copy places, int64 [2, num_moves]: from and to.
void pagemill_kv_move(const pagemill::KVLayout* layout, const pagemill::KVPool* pool, const std::int64_t* moves, std::int64_t num_moves);

// Read whole coded blocks, int64 [num_blocks], as plain ones one behind the other: bf16 [num_blocks][num_kv_heads][2][...].
void pagemill_kv_decode(
    const pagemill::KVLayout* layout, const pagemill::KVPool* pool, const std::int64_t* blocks, std::int64_t num_blocks, pagemill::bf16* out);
}
