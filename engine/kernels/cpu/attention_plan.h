// A step's attention as work for threads: which tokens read which tiles together, and who does what; knows no numbers.
//
// Sequences are ordered by their block tables, so that those which begin alike are neighbours; `tokens` are the step's
// queries in that order. A span is a run of tiles that a run of tokens reads: the tiles which several sequences share,
// then each sequence's own. An item is one key/value head for a run of few enough tokens that their carried sums stay in
// a core's cache; it walks over the spans that it meets, so a thread does each of its items alone, from the first tile to
// the result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"
#include "matrix.h"

namespace pagemill {

struct Token {
    std::int32_t row;      // of q and out
    std::int32_t visible;  // positions that it looks at: 0 .. visible - 1
};

struct Span {
    std::int32_t first_token, last_token;  // half-open, as all ranges here
    std::int32_t first_tile, last_tile;
    std::int32_t sequence;                 // whose block table leads to the tiles
};

struct Item {
    std::int32_t kv_head;
    std::int32_t first_token, last_token;
    std::int32_t first_span, last_span;    // all spans of these tokens lie between, and perhaps others
};

// What a thread carries along for the rows of its item. A row is one query head of one token.
struct Scratch {
    std::vector<bf16> queries;  // [rows, D]
    std::vector<float> maxima;  // [rows and a vector more], of log2(e) * scale * q . k
    std::vector<Lanes> sums;    // [rows] of the weights 2^(score - maximum), each spread over the lanes
    std::vector<Lanes> values;  // [rows, D / kLanes], each times its weight
    std::unique_ptr<Matrix<bf16>> decoded;  // the keys and the values of a tile, where full blocks are quantised
};

class Attention {
public:
    explicit Attention(const AttentionSpec& spec);

    void plan(const AttentionBatch& batch);

    const AttentionSpec spec;
    const int queries_per_kv;
    const int tokens_per_item;  // at most

    std::vector<Token> tokens;
    std::vector<Span> spans;
    std::vector<Item> items;
    std::vector<std::int32_t> first_item;  // [num_threads + 1]: thread t does the items first_item[t] : first_item[t + 1]
    mutable std::vector<Scratch> scratch;  // one a thread

    const std::int32_t* blocks_of(int sequence) const { return tables_.data() + std::size_t(sequence) * table_stride_; }
    std::int64_t num_tiles() const;
    int length_of(int sequence) const { return kv_lengths_[sequence]; }

private:
    void order_sequences();
    void add_tokens();
    void add_spans(int first, int last, int first_tile);
    void add_items();
    void split_items();
    int num_queries(int sequence) const { return query_starts_[sequence + 1] - query_starts_[sequence]; }
    int num_shareable(int sequence) const;
    int num_common(int a, int b) const;

    std::vector<std::int32_t> query_starts_, kv_lengths_, tables_;
    std::size_t table_stride_ = 0;
    std::vector<std::int32_t> order_;    // [S]: the sequence in each place
    std::vector<std::int32_t> common_;   // [S - 1]: leading tiles that the sequences in places i and i + 1 have in common
    std::vector<std::int32_t> place_starts_;  // [S + 1]: the first token of each place
    std::vector<std::int64_t> costs_;    // of each item
};

}  // namespace pagemill
