// Keeps each row's largest logit and sum of exponentials while panels of the vocabulary go by; see head.h.
#include "head.h"

#include <cmath>
#include <vector>

#include "product.h"

namespace pagemill {
namespace {

// The vocabulary is cut into so many pieces whatever the threads, so that sums come out the same for any number of them.
constexpr int kPieces = 64;
constexpr float kLog2E = 1.44269504f;
constexpr float kVeryLow = -1e30f;  // stands for a logit that is not there; finite, so that it poisons no sum

// What is known of a row after some panels: its largest logit, the sum of e^(logit - largest), and the best valid token.
struct Standing {
    float largest = kVeryLow;
    float sum = 0;
    float best = kVeryLow;
    std::int32_t token_id = 0;

    // Take in what another run of panels, with higher ids, found.
    void join(const Standing& later) {
        const float top = std::max(largest, later.largest);
        sum = sum * std::exp(largest - top) + later.sum * std::exp(later.largest - top);
        largest = top;
        if (later.best > best) best = later.best, token_id = later.token_id;
    }
};

// Columns from `count` on replaced by kVeryLow.
PAGEMILL_INLINE Lanes first_of(Lanes x, std::int64_t count) {
    return lane_numbers() < std::int32_t(std::min<std::int64_t>(count, kLanes)) ? x : all(kVeryLow);
}

// The sums of one panel go into the standings of their rows.
struct Follow {
    Standing* standings;
    std::int64_t first_column, num_columns, num_valid;

    void operator()(std::int64_t row, const Sums& sums) const {
        Standing& standing = standings[row];
        Sums logits;
        for (int v = 0; v < kPanelVectors; ++v) logits[v] = sums[v];
        if (first_column + kPanel > num_columns)
            for (int v = 0; v < kPanelVectors; ++v) logits[v] = first_of(logits[v], num_columns - first_column - v * kLanes);
        const float top = largest_of(logits);
        add_exponentials(standing, logits, top);
        if (first_column + kPanel > num_valid)
            for (int v = 0; v < kPanelVectors; ++v) logits[v] = first_of(logits[v], num_valid - first_column - v * kLanes);
        const float best = first_column + kPanel > num_valid ? largest_of(logits) : top;
        if (best > standing.best) standing.best = best, standing.token_id = std::int32_t(first_column) + place_of(logits, best);
    }

    static float largest_of(const Sums& logits) {
        Lanes top = logits[0];
        for (int v = 1; v < kPanelVectors; ++v) top = max(top, logits[v]);
        return largest(top);
    }

    static void add_exponentials(Standing& standing, const Sums& logits, float top) {
        if (top > standing.largest) {
            standing.sum *= std::exp(standing.largest - top);
            standing.largest = top;
        }
        Lanes total{};
        for (int v = 0; v < kPanelVectors; ++v) {
            total += power_of_two((logits[v] - standing.largest) * kLog2E);
            total += logits[v] - logits[v];  // 0, or NaN where the logit is no finite number
        }
        standing.sum += sum_of(total);
    }

    static int place_of(const Sums& logits, float best) {
        for (int place = 0; place < kPanel; ++place)
            if (logits[place / kLanes][place % kLanes] == best) return place;
        return 0;
    }
};

}  // namespace
}  // namespace pagemill

using namespace pagemill;

extern "C" void pagemill_greedy(
    const Weights* head, const bf16* hidden, std::int64_t hidden_stride, std::int64_t num_rows, std::int32_t num_valid,
    std::int32_t num_threads, std::int32_t* token_ids, float* logprobs) {
    std::vector<Standing> standings(kPieces * num_rows);
    Progress progress(kJobsPerProduct, num_threads);
    Quantised room(head->is_int8() ? num_rows : 0, head->num_in);
#pragma omp parallel num_threads(num_threads)
    {
        Team team(progress);
        with_rows(team, *head, hidden, hidden_stride, num_rows, room, [&](auto kind, const Rows& rows) {
            using Kind = decltype(kind);
            team.run(kPieces, 1, [&](Range pieces) {
                const Range panels = share_of(head->num_panels(), pieces.begin, kPieces);
                const std::int64_t num_row_tiles = rows.num_tiles<Kind>();
                multiply_tiles<Kind>(*head, rows, {panels.begin * num_row_tiles, panels.end * num_row_tiles}, [&](std::int64_t panel) {
                    return Follow{standings.data() + pieces.begin * num_rows, panel * kPanel, head->num_out, num_valid};
                });
            });
        });
    }
    for (std::int64_t row = 0; row < num_rows; ++row) {
        Standing all = standings[row];
        for (int piece = 1; piece < kPieces; ++piece) all.join(standings[piece * num_rows + row]);
        token_ids[row] = all.token_id;
        logprobs[row] = all.best - (all.largest + std::log(all.sum));
    }
}
