#include "attention_plan.h"

#include <algorithm>
#include <numeric>

namespace pagemill {
namespace {

constexpr int kMaxRowsPerItem = 96;    // their queries and carried sums take 37 KiB at head_dim 64
constexpr int kFewestRowsPerItem = 6;  // as many as meet a tile at once
constexpr int kItemsPerThread = 8;     // enough for an even split by cost
constexpr int kCostOfTile = 8;         // fetching a tile from memory takes about as long as computing so many rows over it

int divide_up(int a, int b) { return (a + b - 1) / b; }

}  // namespace

Attention::Attention(const AttentionSpec& given)
    : spec(given),
      queries_per_kv(given.num_heads / given.kv.num_kv_heads),
      tokens_per_item(std::max(1, kMaxRowsPerItem / queries_per_kv)),
      first_item(given.num_threads + 1),
      scratch(given.num_threads) {
    const std::size_t num_rows = std::size_t(tokens_per_item) * queries_per_kv;
    for (Scratch& own : scratch) {
        own.queries.resize(num_rows * spec.kv.head_dim);
        own.maxima.resize(num_rows + kLanes);
        own.sums.resize(num_rows);
        own.values.resize(num_rows * spec.kv.head_dim / kLanes);
        if (spec.kv.codes != Codes::kNone) own.decoded = std::make_unique<Matrix<bf16>>(2, kTileTokens * spec.kv.head_dim);
    }
}

void Attention::plan(const AttentionBatch& batch) {
    const int num_seqs = batch.num_seqs;
    table_stride_ = batch.table_stride;
    query_starts_.assign(batch.query_starts, batch.query_starts + num_seqs + 1);
    kv_lengths_.assign(batch.kv_lengths, batch.kv_lengths + num_seqs);
    tables_.assign(batch.block_tables, batch.block_tables + std::size_t(num_seqs) * table_stride_);
    order_sequences();
    add_tokens();
    spans.clear();
    if (num_seqs > 0) add_spans(0, num_seqs, 0);
    add_items();
    split_items();
}

std::int64_t Attention::num_tiles() const {
    return std::accumulate(spans.begin(), spans.end(), std::int64_t(0), [](std::int64_t sum, const Span& span) {
        return sum + span.last_tile - span.first_tile;
    });
}

// Tiles that every query of the sequence sees whole, so that no mask is needed where they are shared.
int Attention::num_shareable(int sequence) const {
    return spec.share_prefixes ? (kv_lengths_[sequence] - num_queries(sequence) + 1) / kTileTokens : 0;
}

int Attention::num_common(int a, int b) const {
    const int num_tiles = std::min(num_shareable(a), num_shareable(b));
    const int num_blocks = divide_up(num_tiles * kTileTokens, spec.kv.block_size);
    const std::int32_t* blocks = blocks_of(a);
    const int num_equal = int(std::mismatch(blocks, blocks + num_blocks, blocks_of(b)).first - blocks);
    return std::min(num_tiles, int(std::int64_t(num_equal) * spec.kv.block_size / kTileTokens));
}

void Attention::order_sequences() {
    order_.resize(kv_lengths_.size());
    std::iota(order_.begin(), order_.end(), 0);
    if (spec.share_prefixes) {
        const auto end_of = [&](int sequence) {
            return blocks_of(sequence) + divide_up(num_shareable(sequence) * kTileTokens, spec.kv.block_size);
        };
        std::sort(order_.begin(), order_.end(), [&](int a, int b) {
            const auto [in_a, in_b] = std::mismatch(blocks_of(a), end_of(a), blocks_of(b), end_of(b));
            if (in_a != end_of(a) && in_b != end_of(b)) return *in_a < *in_b;
            return in_a == end_of(a) && in_b == end_of(b) ? a < b : in_a == end_of(a);
        });
    }
    common_.clear();
    for (std::size_t place = 0; place + 1 < order_.size(); place++) common_.push_back(num_common(order_[place], order_[place + 1]));
}

void Attention::add_tokens() {
    tokens.clear();
    place_starts_.assign(1, 0);
    for (const int sequence : order_) {
        const int num_new = num_queries(sequence);
        for (int query = 0; query < num_new; query++) {
            tokens.push_back({query_starts_[sequence] + query, kv_lengths_[sequence] - num_new + query + 1});
        }
        place_starts_.push_back(std::int32_t(tokens.size()));
    }
}

// The spans of the sequences in places first .. last - 1 from first_tile on: what they all share, then part by part.
void Attention::add_spans(int first, int last, int first_tile) {
    const bool alone = last - first == 1;
    const int shared = alone ? divide_up(kv_lengths_[order_[first]], kTileTokens)
                             : *std::min_element(common_.begin() + first, common_.begin() + last - 1);
    if (shared > first_tile) spans.push_back({place_starts_[first], place_starts_[last], first_tile, shared, order_[first]});
    if (alone) return;
    for (int part = first, place = first; place < last; place++) {
        if (place + 1 < last && common_[place] > shared) continue;
        add_spans(part, place + 1, shared);
        part = place + 1;
    }
}

void Attention::add_items() {
    items.clear();
    costs_.clear();
    const int num_tokens = int(tokens.size());
    const int fewest = divide_up(kFewestRowsPerItem, queries_per_kv);
    const int wanted = std::max(fewest, divide_up(num_tokens, kItemsPerThread * spec.num_threads));
    const int size = std::min(tokens_per_item, wanted);
    std::int32_t first_span = 0;
    for (int first = 0; first < num_tokens; first += size) {
        const int last = std::min(first + size, num_tokens);
        std::int64_t cost = 0;
        std::int32_t last_span = 0;
        for (std::int32_t index = 0; index < std::int32_t(spans.size()); index++) {
            const Span& span = spans[index];
            const int met = std::min(last, int(span.last_token)) - std::max(first, int(span.first_token));
            if (met <= 0) continue;
            if (cost == 0) first_span = index;
            last_span = index + 1;
            cost += std::int64_t(span.last_tile - span.first_tile) * (met * queries_per_kv + kCostOfTile);
        }
        for (int head = 0; head < spec.kv.num_kv_heads; head++) {
            items.push_back({head, first, last, first_span, last_span});
            costs_.push_back(cost);
        }
    }
}

// Neighbouring items stay together, as they read the same blocks; a thread's share ends where its part of the cost does.
void Attention::split_items() {
    const std::int64_t total = std::accumulate(costs_.begin(), costs_.end(), std::int64_t(0));
    std::int64_t before = 0;
    std::size_t item = 0;
    for (int thread = 0; thread < spec.num_threads; thread++) {
        first_item[thread] = std::int32_t(item);
        while (item < items.size() && (2 * before + costs_[item]) * spec.num_threads < 2 * total * (thread + 1)) before += costs_[item++];
    }
    first_item[spec.num_threads] = std::int32_t(items.size());
}

}  // namespace pagemill

using namespace pagemill;

Attention* pagemill_attention_create(const AttentionSpec* spec) { return new Attention(*spec); }
void pagemill_attention_destroy(Attention* attention) { delete attention; }
void pagemill_attention_plan(Attention* attention, const AttentionBatch* batch) { attention->plan(*batch); }
std::int64_t pagemill_attention_num_tiles(const Attention* attention) { return attention->num_tiles(); }
