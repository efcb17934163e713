// Attention of a step's queries over the paged pool of kv.h, for any mix of decodes and prefill chunks.
//
// Every query walks over tiles of 64 positions, counted from position 0, and carries maximum, sum and weighted values along
// (online softmax, Milakov and Gimelshein 2018). The order of every sum is fixed by the position alone, so a row's bits
// depend on nothing but its own sequence: not on its mates, the cut into chunks, the threads or what is shared.
// Tiles that several sequences have in common (equal leading blocks) are read once for all their rows.
//
// Shape suffixes: T tokens of the step, S sequences, N blocks a sequence at most, H query heads, D head size.
#pragma once

#include <cstdint>

#include "kv.h"
#include "team.h"

namespace pagemill {

constexpr int kTileTokens = 64;

// Fixed for the life of an engine. Query head h reads key/value head h / (num_heads / num_kv_heads); the softmax runs over
// scale * q . k. `share_prefixes` = 0 lets every sequence read all of its own tiles: the same bits, more memory traffic.
struct AttentionSpec {
    KVLayout kv;
    std::int32_t num_heads;
    float scale;
    std::int32_t num_threads;
    std::int32_t share_prefixes;
};

// One step, the same for all layers. Sequence s has the query rows query_starts[s] : query_starts[s + 1], which are the
// last ones of its kv_lengths[s] positions; position p lies in block block_tables[s * table_stride + p / block_size].
struct AttentionBatch {
    std::int32_t num_seqs;
    std::int32_t table_stride;         // N
    const std::int32_t* query_starts;  // [S + 1], from 0 to T, rising
    const std::int32_t* kv_lengths;    // [S]
    const std::int32_t* block_tables;  // [S, N]; entries past a sequence's last block are not read
};

// One layer's numbers. Keys and values of all T tokens must be in the pool before any thread attends.
struct AttentionLayer {
    KVPool pool;
    const bf16* q;            // [T, H, D]; a token's row of H x D numbers is contiguous
    std::int64_t q_stride;    // numbers from one token to the next
    bf16* out;                // [T, H, D]
    std::int64_t out_stride;
};

class Attention;  // the plan of the current step and each thread's scratch

// A layer's work is cut into items, which may be done in any order by any thread; those of lot t are thread t's, so that
// all have about the same to do. All of the step's keys and values must be written before the first of them.
Range items_of(const Attention& attention, int lot);
void attend_items(const Attention& attention, const AttentionLayer& layer, Range items, int thread);

}  // namespace pagemill

extern "C" {

// Scratch for all threads, allocated once. Never null: what cannot be served is refused by the caller beforehand.
pagemill::Attention* pagemill_attention_create(const pagemill::AttentionSpec* spec);
void pagemill_attention_destroy(pagemill::Attention* attention);

// Once a step, before its first layer: group the sequences by the blocks they share and split the work over the threads.
// Copies what it needs; the batch's arrays may go afterwards.
void pagemill_attention_plan(pagemill::Attention* attention, const pagemill::AttentionBatch* batch);

// The tiles that one layer reads for each key/value head, those that sequences share counted once.
std::int64_t pagemill_attention_num_tiles(const pagemill::Attention* attention);

// One layer by all threads: opens a parallel region around attend_items.
void pagemill_attend(const pagemill::Attention* attention, const pagemill::AttentionLayer* layer);
}
