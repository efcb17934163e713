// What a few query rows do with one tile of keys and values: scores, weights, weighted values; knows no pool and no plan.
//
// Each sum runs in the order of its positions or dims, whatever the number of rows beside it: R rows and V vectors below
// only say how many sums are held in registers at once.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention.h"
#include "kv_codes.h"

namespace pagemill {

constexpr int kGroupsPerTile = kTileTokens / kTokensPerGroup;
constexpr int kVectorsPerTile = kTileTokens / kLanes;
constexpr int kVectorsPerGroup = kTokensPerGroup / kLanes;
constexpr int kMaxColumns = 64 / kLanes;  // vectors of values at once
#ifdef PAGEMILL_AVX512
constexpr int kMaxRows = 6;  // 6 x 4 sums, 4 operands and what is broadcast fill the 32 registers
#else
constexpr int kMaxRows = 1;  // 8 sums of half the size fill half of 16 registers
#endif

// The groups of 16 tokens that a tile is made of, as kv.h lays them out. Past the last token they repeat an earlier one.
struct Tile {
    const bf16* keys[kGroupsPerTile];
    const bf16* values[kGroupsPerTile];
    int num_tokens;  // that hold something
};

// The quantised groups that a tile begins with, all of whose tokens hold something.
struct CodedTile {
    int num_groups;
    GroupReader groups[kGroupsPerTile];
    const std::uint8_t* next_keys[kGroupsPerTile];  // of the tile after it
    const std::uint8_t* next_values[kGroupsPerTile];
};

// The same rows from a later token on.
template <class Number>
PAGEMILL_INLINE auto from_token(Number (*rows_RL)[kTileTokens], int token) {
    return (Number(*)[kTileTokens])(rows_RL[0] + token);
}

// Into the second cache and no nearer: a tile and the one after it do not fit the first.
PAGEMILL_INLINE void fetch(const void* line) { __builtin_prefetch(line, 0, 2); }

// Call work(std::integral_constant<int, value>()) for a value of 1 .. Most.
template <int Most, class Work>
PAGEMILL_INLINE void with_constant(int value, const Work& work) {
    if constexpr (Most > 1) {
        if (value < Most) return with_constant<Most - 1>(value, work);
    }
    work(std::integral_constant<int, Most>());
}

// scores_RL[r][t] = q_RD[r] . key t, for the first V vectors of the tile's tokens. Fetches the same of the tile after it.
template <int R, int V>
static __attribute__((noinline)) void score(const bf16* q_RD, int head_dim, const Tile& tile, const Tile& next, float (*scores_RL)[kTileTokens]) {
    Lanes sums[R][V];
    PAGEMILL_UNROLL for (int r = 0; r < R; r++) {
        PAGEMILL_UNROLL for (int v = 0; v < V; v++) sums[r][v] = Lanes{};
    }
    for (int dim = 0; dim < head_dim; dim += 2) {
        Pairs keys[V];
        PAGEMILL_UNROLL for (int v = 0; v < V; v++) {
            const int group = v / kVectorsPerGroup, place = v % kVectorsPerGroup;
            keys[v] = load_pairs(tile.keys[group] + dim * kTokensPerGroup + 2 * place * kLanes);
            if (place == 0) fetch(next.keys[group] + dim * kTokensPerGroup);
        }
        PAGEMILL_UNROLL for (int r = 0; r < R; r++) {
            const Pairs query = all_pairs(q_RD + r * head_dim + dim);
            PAGEMILL_UNROLL for (int v = 0; v < V; v++) sums[r][v] = add_dot(sums[r][v], query, keys[v]);
        }
    }
    PAGEMILL_UNROLL for (int r = 0; r < R; r++) {
        PAGEMILL_UNROLL for (int v = 0; v < V; v++) store(scores_RL[r] + v * kLanes, sums[r][v]);
    }
}

// Scores of the tokens that a row does not see become -inf.
template <int R, int V>
PAGEMILL_INLINE void hide(const int* visible_R, float (*scores_RL)[kTileTokens]) {
    for (int r = 0; r < R; r++) {
        for (int token = visible_R[r]; token < V * kLanes; token++) scores_RL[r][token] = kMinusInfinity;
    }
}

// Online softmax of R rows over the tile's first V vectors of tokens: updates each row's maximum and the lanes of its sum,
// writes its weights, and what its earlier sums are to be multiplied with. maxima_R and decay_R are whole vectors.
template <int R, int V>
PAGEMILL_INLINE void weigh(
    const float (*scores_RL)[kTileTokens], float log2_scale, float* maxima_R, Lanes* sums_R, bf16 (*weights_RL)[kTileTokens],
    float* decay_R) {
    alignas(64) float now_R[kLanes];
    const Lanes before = load(maxima_R);
    store(now_R, before);
    PAGEMILL_UNROLL for (int r = 0; r < R; r++) {
        Lanes highest = load(scores_RL[r]);
        PAGEMILL_UNROLL for (int v = 1; v < V; v++) highest = max(highest, load(scores_RL[r] + v * kLanes));
        now_R[r] = std::max(now_R[r], largest(highest) * log2_scale);
    }
    const Lanes now = load(now_R);
    store(maxima_R, now);
    store(decay_R, power_of_two(before - now));
    PAGEMILL_UNROLL for (int r = 0; r < R; r++) {
        Lanes sum = sums_R[r] * all(decay_R[r]);
        PAGEMILL_UNROLL for (int v = 0; v < V; v++) {
            const Lanes weights = power_of_two(multiply_add(load(scores_RL[r] + v * kLanes), all(log2_scale), all(-now_R[r])));
            store_bf16(weights_RL[r] + v * kLanes, weights);
            sum = sum + weights;
        }
        sums_R[r] = sum;
    }
}

// values_RD[r] = values_RD[r] * decay_R[r] + sum over the first num_tokens of weight * value, in V vectors of dims from
// vector `first` of the head on. Fetches the same part of the tile after it.
template <int R, int V>
static __attribute__((noinline)) void add_values(
    const bf16 (*weights_RL)[kTileTokens], const float* decay_R, int num_tokens, const Tile& tile, const Tile& next, int head_dim, int first,
    Lanes* values_RD) {
    Lanes sums[R][V];
    PAGEMILL_UNROLL for (int r = 0; r < R; r++) {
        const Lanes* values = values_RD + r * (head_dim / kLanes) + first;
        PAGEMILL_UNROLL for (int v = 0; v < V; v++) sums[r][v] = values[v] * all(decay_R[r]);
    }
    for (int begin = 0; begin < num_tokens; begin += kTokensPerGroup) {
        const bf16* values = tile.values[begin / kTokensPerGroup] + 2 * first * kLanes;
        const bf16* ahead = next.values[begin / kTokensPerGroup] + 2 * first * kLanes;
        const int end = std::min(begin + kTokensPerGroup, num_tokens);
        for (int token = begin; token < end; token += 2, values += 2 * head_dim, ahead += 2 * head_dim) {
            Pairs pairs[V];
            PAGEMILL_UNROLL for (int v = 0; v < V; v++) {
                pairs[v] = load_pairs(values + 2 * v * kLanes);
                if (v % kVectorsPerGroup == 0) fetch(ahead + 2 * v * kLanes);
            }
            // The second of a last pair was never written: anything may be there, and 0 x NaN is NaN.
            if (__builtin_expect(token + 1 == num_tokens, false)) {
                PAGEMILL_UNROLL for (int v = 0; v < V; v++) pairs[v] = without_second(pairs[v]);
            }
            PAGEMILL_UNROLL for (int r = 0; r < R; r++) {
                const Pairs weights = all_pairs(weights_RL[r] + token);
                PAGEMILL_UNROLL for (int v = 0; v < V; v++) sums[r][v] = add_dot(sums[r][v], weights, pairs[v]);
            }
        }
    }
    PAGEMILL_UNROLL for (int r = 0; r < R; r++) {
        Lanes* values = values_RD + r * (head_dim / kLanes) + first;
        PAGEMILL_UNROLL for (int v = 0; v < V; v++) values[v] = sums[r][v];
    }
}

#ifdef PAGEMILL_AVX512

// `score` for G groups from `first` on whose keys are read from their codes on the way: the same numbers in the same order, so
// the same bits.
template <int R, int G>
static __attribute__((noinline)) void score_coded(
    const bf16* q_RD, int head_dim, const CodedTile& tile, int first, float (*scores_RL)[kTileTokens]) {
    Lanes sums[R][G];
    PAGEMILL_UNROLL for (int r = 0; r < R; r++) {
        PAGEMILL_UNROLL for (int g = 0; g < G; g++) sums[r][g] = Lanes{};
    }
    const CodeTable& table = *tile.groups[first].table;
    for (int dim = 0; dim < head_dim; dim += 4) {
        PAGEMILL_UNROLL for (int g = 0; g < G; g++) {
            const GroupReader& group = tile.groups[first + g];
            fetch(tile.next_keys[first + g] + dim * kTokensPerGroup);
            const TwoPairs keys = decoded(
                table, group.keys + dim * kTokensPerGroup, all_pairs(group.key_shifts + dim), all_pairs(group.key_shifts + dim + 2));
            PAGEMILL_UNROLL for (int r = 0; r < R; r++) {
                sums[r][g] = add_dot(sums[r][g], all_pairs(q_RD + r * head_dim + dim), keys.first);
                sums[r][g] = add_dot(sums[r][g], all_pairs(q_RD + r * head_dim + dim + 2), keys.second);
            }
        }
    }
    PAGEMILL_UNROLL for (int r = 0; r < R; r++) {
        PAGEMILL_UNROLL for (int g = 0; g < G; g++) store(scores_RL[r] + (first + g) * kLanes, sums[r][g]);
    }
}

// Weights of such groups' tokens, times the scales of their values, so that these can be added up as the codes that they are.
template <int R>
PAGEMILL_INLINE void take_scales(const CodedTile& tile, bf16 (*weights_RL)[kTileTokens]) {
    for (int g = 0; g < tile.num_groups; g++) {
        PAGEMILL_UNROLL for (int r = 0; r < R; r++) shift_16(weights_RL[r] + g * kTokensPerGroup, tile.groups[g].value_shifts);
    }
}

// `add_values` for such groups, whose weights have taken the scales: the same products, but for those with weights so small
// (under 2^-66) that they change no sum. In kMaxColumns vectors of dims from vector `first` of the head on.
template <int R>
static __attribute__((noinline)) void add_coded_values(
    const bf16 (*weights_RL)[kTileTokens], const float* decay_R, const CodedTile& tile, int head_dim, int first, Lanes* values_RD) {
    Lanes sums[R][kMaxColumns];
    PAGEMILL_UNROLL for (int r = 0; r < R; r++) {
        const Lanes* values = values_RD + r * (head_dim / kLanes) + first;
        PAGEMILL_UNROLL for (int v = 0; v < kMaxColumns; v++) sums[r][v] = values[v] * all(decay_R[r]);
    }
    const CodeTable& table = *tile.groups[0].table;
    for (int g = 0; g < tile.num_groups; g++) {
        const std::uint8_t* values = tile.groups[g].values + 2 * first * kLanes;
        const std::uint8_t* ahead = tile.next_values[g] + 2 * first * kLanes;
        for (int token = 0; token < kTokensPerGroup; token += 2, values += 2 * head_dim, ahead += 2 * head_dim) {
            PAGEMILL_UNROLL for (int v = 0; v < kMaxColumns; v += 2) {
                fetch(ahead + 2 * v * kLanes);
                const TwoPairs pairs = decoded(table, values + 2 * v * kLanes);
                PAGEMILL_UNROLL for (int r = 0; r < R; r++) {
                    const Pairs weights = all_pairs(weights_RL[r] + g * kTokensPerGroup + token);
                    sums[r][v] = add_dot(sums[r][v], weights, pairs.first);
                    sums[r][v + 1] = add_dot(sums[r][v + 1], weights, pairs.second);
                }
            }
        }
    }
    PAGEMILL_UNROLL for (int r = 0; r < R; r++) {
        Lanes* values = values_RD + r * (head_dim / kLanes) + first;
        PAGEMILL_UNROLL for (int v = 0; v < kMaxColumns; v++) values[v] = sums[r][v];
    }
}

#endif

}  // namespace pagemill
