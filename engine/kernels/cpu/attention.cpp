#include "attention.h"

#include <algorithm>
#include <cassert>
#include <cmath>

#include "attention_plan.h"
#include "attention_tile.h"
#include "kv_codes.h"

namespace pagemill {
namespace {

constexpr float kLog2E = 1.44269504f;

// One item of one layer: its rows' carried sums in a thread's scratch, and the walk that completes them.
class Walk {
public:
    Walk(const Attention& attention, const AttentionLayer& layer, const Item& item, Scratch& scratch)
        : attention_(attention),
          layer_(layer),
          item_(item),
          scratch_(scratch),
          head_dim_(attention.spec.kv.head_dim),
          num_vectors_(head_dim_ / kLanes),
          group_(attention.queries_per_kv) {}

    void run() {
        start();
        for (int index = item_.first_span; index < item_.last_span; index++) {
            const Span& span = attention_.spans[index];
            const int first = std::max(item_.first_token, span.first_token), last = std::min(item_.last_token, span.last_token);
            if (first < last) read(span, first, last, next_span(index + 1));
        }
        finish();
    }

private:
    // Row of the scratch where a token's query heads begin.
    int row_of(int token) const { return (token - item_.first_token) * group_; }

    void start() {
        const int first_dim = item_.kv_head * group_ * head_dim_, width = group_ * head_dim_;
        for (int token = item_.first_token; token < item_.last_token; token++) {
            const bf16* q = layer_.q + attention_.tokens[token].row * layer_.q_stride + first_dim;
            std::copy(q, q + width, scratch_.queries.data() + std::size_t(row_of(token)) * head_dim_);
        }
        const std::size_t num_rows = row_of(item_.last_token);
        std::fill_n(scratch_.maxima.begin(), num_rows, kMinusInfinity);
        std::fill_n(scratch_.sums.begin(), num_rows, Lanes{});
        std::fill_n(scratch_.values.begin(), num_rows * num_vectors_, Lanes{});
    }

    void finish() {
        for (int token = item_.first_token; token < item_.last_token; token++) {
            bf16* out = layer_.out + attention_.tokens[token].row * layer_.out_stride + item_.kv_head * group_ * head_dim_;
            for (int row = row_of(token); row < row_of(token + 1); row++, out += head_dim_) {
                const Lanes part = all(1.0f / sum_of(scratch_.sums[row]));
                const Lanes* values = &scratch_.values[std::size_t(row) * num_vectors_];
                for (int v = 0; v < num_vectors_; v++) store_bf16(out + v * kLanes, values[v] * part);
            }
        }
    }

    // The span that this item reads after those before `index`, null after the last.
    const Span* next_span(int index) const {
        for (; index < item_.last_span; index++) {
            const Span& span = attention_.spans[index];
            if (span.first_token < item_.last_token && item_.first_token < span.last_token) return &span;
        }
        return nullptr;
    }

    // A tile and where it lies. Groups that are quantised have no address before they are decoded; they come before the others.
    struct PlacedTile : Tile {
        CodedGroup groups[kGroupsPerTile];
        int num_coded;

        bool is_coded(int g) const { return g < num_coded; }
    };

    PlacedTile tile_of(const Span& span, int index) const {
        const KVLayout& kv = attention_.spec.kv;
        const int first = index * kTileTokens;
        PlacedTile tile;
        tile.num_tokens = std::min(kTileTokens, attention_.length_of(span.sequence) - first);
        tile.num_coded = 0;
        for (int g = 0; g < kGroupsPerTile; g++) {
            const unsigned position = first + std::min(g, (tile.num_tokens - 1) / kTokensPerGroup) * kTokensPerGroup, block_size = kv.block_size;
            const CodedGroup group{attention_.blocks_of(span.sequence)[position / block_size], int(position % block_size)};
            const bool is_coded = layer_.pool.is_coded(group.block);
            assert(!is_coded || tile.num_coded == g);
            tile.groups[g] = group;
            tile.num_coded += is_coded;
            tile.keys[g] = is_coded ? nullptr : layer_.pool.keys(kv, group.block, item_.kv_head) + group.offset * head_dim_;
            tile.values[g] = is_coded ? nullptr : tile.keys[g] + kv.half();
        }
        return tile;
    }

#ifdef PAGEMILL_AVX512
    // Few rows read codes in the registers; for many it is better to decode the tile once.
    bool reads_codes(const PlacedTile& tile, int num_rows) const {
        return tile.num_coded > 0 && num_rows <= kMaxRows && num_vectors_ % kMaxColumns == 0;
    }

    void read_codes(const PlacedTile& tile, const PlacedTile& next, int first_position, int first_row, int last_row) {
        const KVLayout& kv = attention_.spec.kv;
        CodedTile coded;
        coded.num_groups = std::min(tile.num_coded, (tile.num_tokens + kTokensPerGroup - 1) / kTokensPerGroup);
        for (int g = 0; g < coded.num_groups; g++) {
            const CodedGroup& after = next.is_coded(g) ? next.groups[g] : tile.groups[g];
            coded.groups[g].open(kv, layer_.pool, item_.kv_head, tile.groups[g], after);
            coded.next_keys[g] = codes_of(kv, layer_.pool, item_.kv_head, after);
            coded.next_values[g] = coded.next_keys[g] + kv.half();
        }
        Tile plain = tile;
        plain.num_tokens = std::max(0, tile.num_tokens - coded.num_groups * kTokensPerGroup);
        for (int g = coded.num_groups; g < kGroupsPerTile; g++) {
            plain.keys[g - coded.num_groups] = tile.keys[g];
            plain.values[g - coded.num_groups] = tile.values[g];
        }
        with_constant<kMaxRows>(last_row - first_row, [&](auto R) { read_coded_rows<R>(coded, plain, first_position, first_row); });
    }

    template <int R>
    void read_coded_rows(const CodedTile& coded, const Tile& plain, int first_position, int row) {
        const int num_coded = coded.num_groups * kTokensPerGroup;
        int visible[R];
        for (int r = 0; r < R; r++) {
            const Token& token = attention_.tokens[item_.first_token + (row + r) / group_];
            visible[r] = std::min(num_coded + plain.num_tokens, token.visible - first_position);
        }
        const bf16* queries = scratch_.queries.data() + std::size_t(row) * head_dim_;
        alignas(64) float scores[R][kTileTokens];
        alignas(64) bf16 weights[R][kTileTokens];
        alignas(64) float decay[kLanes];
        if (coded.num_groups == kGroupsPerTile) {
            score_coded<R, kGroupsPerTile>(queries, head_dim_, coded, 0, scores);
        } else {
            for (int g = 0; g < coded.num_groups; g++) score_coded<R, 1>(queries, head_dim_, coded, g, scores);
        }
        if (plain.num_tokens > 0) {
            with_constant<kVectorsPerTile - 1>((plain.num_tokens + kLanes - 1) / kLanes, [&](auto V) {
                score<R, V>(queries, head_dim_, plain, plain, from_token(scores, num_coded));
            });
        }
        with_constant<kVectorsPerTile>((num_coded + plain.num_tokens + kLanes - 1) / kLanes, [&](auto V) {
            if (visible[0] < V * kLanes) hide<R, V>(visible, scores);
            weigh<R, V>(scores, attention_.spec.scale * kLog2E, &scratch_.maxima[row], &scratch_.sums[row], weights, decay);
        });
        take_scales<R>(coded, weights);
        Lanes* values = &scratch_.values[std::size_t(row) * num_vectors_];
        const int num_plain = visible[R - 1] - num_coded;
        alignas(64) float no_decay[kLanes];
        store(no_decay, all(1.0f));
        for (int first = 0; first < num_vectors_; first += kMaxColumns) {
            add_coded_values<R>(weights, decay, coded, head_dim_, first, values);
            if (num_plain > 0) {
                add_values<R, kMaxColumns>(from_token(weights, num_coded), no_decay, num_plain, plain, plain, head_dim_, first, values);
            }
        }
    }
#endif

    // Where full blocks are quantised, read those of the tile; fetches those of the next one.
    void decode(PlacedTile& tile, const PlacedTile& next) const {
        const KVLayout& kv = attention_.spec.kv;
        const int num_groups = (tile.num_tokens + kTokensPerGroup - 1) / kTokensPerGroup;
        for (int g = 0; g < tile.num_coded; g++) {
            if (g >= num_groups) {
                tile.keys[g] = tile.keys[num_groups - 1];
                tile.values[g] = tile.values[num_groups - 1];
                continue;
            }
            bf16* const keys = scratch_.decoded->row(0) + g * kTokensPerGroup * head_dim_;
            bf16* const values = scratch_.decoded->row(1) + g * kTokensPerGroup * head_dim_;
            const CodedGroup& after = next.is_coded(g) ? next.groups[g] : tile.groups[g];
            kv_decode_group(kv, layer_.pool, item_.kv_head, tile.groups[g], after, keys, values);
            tile.keys[g] = keys;
            tile.values[g] = values;
        }
    }

    // The rows of tokens first .. last - 1 over the tiles of a span. Tokens of a span see ever more positions.
    void read(const Span& span, int first, int last, const Span* after) {
        const int num_tiles = std::min(span.last_tile, (attention_.tokens[last - 1].visible + kTileTokens - 1) / kTileTokens);
        PlacedTile tile = tile_of(span, span.first_tile);
        for (int index = span.first_tile; index < num_tiles; index++) {
            PlacedTile next = tile;
            if (index + 1 < num_tiles) {
                next = tile_of(span, index + 1);
            } else if (after) {
                next = tile_of(*after, after->first_tile);
            }
            while (attention_.tokens[first].visible <= index * kTileTokens) first++;
            read_placed(tile, next, index * kTileTokens, row_of(first), row_of(last));
            tile = next;
        }
    }

    void read_placed(PlacedTile& tile, const PlacedTile& next, int first_position, int first_row, int last_row) {
#ifdef PAGEMILL_AVX512
        if (reads_codes(tile, last_row - first_row)) return read_codes(tile, next, first_position, first_row, last_row);
#endif
        if (tile.num_coded > 0) decode(tile, next);
        read_tile(tile, next.num_coded > 0 ? tile : next, first_position, first_row, last_row);
    }

    void read_tile(const Tile& tile, const Tile& next, int first_position, int first_row, int last_row) {
        const int num_blocks = (last_row - first_row + kMaxRows - 1) / kMaxRows;
        for (int block = 0, row = first_row; block < num_blocks; block++) {
            const int size = (last_row - row + num_blocks - block - 1) / (num_blocks - block);
            with_constant<kMaxRows>(size, [&](auto R) { read_rows<R>(tile, next, first_position, row); });
            row += size;
        }
    }

    template <int R>
    void read_rows(const Tile& tile, const Tile& next, int first_position, int row) {
        int visible[R];
        for (int r = 0; r < R; r++) {
            const Token& token = attention_.tokens[item_.first_token + (row + r) / group_];
            visible[r] = std::min(tile.num_tokens, token.visible - first_position);
        }
        const int num_tokens = visible[R - 1];
        alignas(64) float scores[R][kTileTokens];
        alignas(64) bf16 weights[R][kTileTokens];
        alignas(64) float decay[kLanes];
        with_constant<kVectorsPerTile>((num_tokens + kLanes - 1) / kLanes, [&](auto V) {
            score<R, V>(scratch_.queries.data() + std::size_t(row) * head_dim_, head_dim_, tile, next, scores);
            if (visible[0] < V * kLanes) hide<R, V>(visible, scores);
            weigh<R, V>(scores, attention_.spec.scale * kLog2E, &scratch_.maxima[row], &scratch_.sums[row], weights, decay);
        });
        Lanes* values = &scratch_.values[std::size_t(row) * num_vectors_];
        for (int first = 0; first < num_vectors_; first += kMaxColumns) {
            with_constant<kMaxColumns>(std::min(kMaxColumns, num_vectors_ - first), [&](auto V) {
                add_values<R, V>(weights, decay, num_tokens, tile, next, head_dim_, first, values);
            });
        }
    }

    const Attention& attention_;
    const AttentionLayer& layer_;
    const Item& item_;
    Scratch& scratch_;
    const int head_dim_;
    const int num_vectors_;  // of values in a head
    const int group_;
};

}  // namespace

Range items_of(const Attention& attention, int lot) { return {attention.first_item[lot], attention.first_item[lot + 1]}; }

void attend_items(const Attention& attention, const AttentionLayer& layer, Range items, int thread) {
    for (std::int64_t item = items.begin; item < items.end; item++) {
        Walk(attention, layer, attention.items[item], attention.scratch[thread]).run();
    }
}

}  // namespace pagemill

using namespace pagemill;

void pagemill_attend(const Attention* attention, const AttentionLayer* layer) {
    Progress progress(1, attention->spec.num_threads);
#pragma omp parallel num_threads(attention->spec.num_threads)
    {
        Team team(progress);
        const auto lot_of = [&](int lot) { return items_of(*attention, lot); };
        team.run_lots(lot_of, 1, [&](Range items) { attend_items(*attention, *layer, items, team.thread()); });
    }
}
