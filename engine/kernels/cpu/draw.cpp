// One row at a time: the candidates that may be kept are picked by their level alone, a few hundred of a vocabulary, and
// only those are ranked; see draw.h. A row's token depends on nothing but the row.
#include "draw.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "lanes.h"

namespace pagemill {
namespace {

constexpr float kLog2E = 1.44269504f;
constexpr float kMinTemperature = 1e-30f;  // transforms.py's
constexpr int kBlock = 64;                 // numbers that are summed or looked through at once
constexpr float kFirstCut = -3.0f;         // levels from here up are looked at first: most of what is ever drawn
constexpr float kLastCut = -100.0f;        // a candidate this low weighs nothing in float32: then all are looked at
constexpr std::ptrdiff_t kFewRanks = 16;

// A token that may be kept: its level is (logit - largest) / temperature, its weight e^level.
struct Candidate {
    float level;
    float weight;
    std::int64_t token_id;

    // Whether this one ranks before another: of equal levels the lower id.
    bool operator<(const Candidate& other) const {
        return level != other.level ? level > other.level : token_id < other.token_id;
    }
};

double mass_of(const Candidate* first, const Candidate* last) {
    double mass = 0;
    for (; first < last; ++first) mass += first->weight;
    return mass;
}

// The first place whose cumulative weight exceeds `chance` of the whole; weights are not all zero.
std::int64_t place_of(const std::vector<float>& weights, double chance) {
    const std::int64_t count = weights.size();
    std::vector<double> up_to;  // each block's end
    double total = 0;
    for (std::int64_t first = 0; first < count; first += kBlock) {
        float sum = 0;
        if (first + kBlock <= count) {
            Lanes sums{};
            for (int i = 0; i < kBlock; i += kLanes) sums += load(&weights[first + i]);
            sum = sum_of(sums);
        } else {
            for (std::int64_t i = first; i < count; ++i) sum += weights[i];
        }
        up_to.push_back(total += sum);
    }
    const double target = chance * total;
    const std::int64_t block = std::min<std::int64_t>(std::upper_bound(up_to.begin(), up_to.end(), target) - up_to.begin(), up_to.size() - 1);
    double reached = block > 0 ? up_to[block - 1] : 0;
    std::int64_t place = block * kBlock;  // rounding may leave the target past the block's last weight, which it then is
    for (std::int64_t i = block * kBlock; i < std::min(count, (block + 1) * kBlock); ++i) {
        if (weights[i] > 0) place = i;
        if ((reached += weights[i]) > target) break;
    }
    return place;
}

class Row {
public:
    Row(const float* logits, std::int64_t num_tokens, const DrawSettings& settings)
        : logits_(logits),
          num_tokens_(num_tokens),
          settings_(settings),
          temperature_(std::max(settings.temperature, kMinTemperature)),
          floor_(settings.min_p > 0 ? std::log(settings.min_p) : kMinusInfinity) {
        Lanes top = all(kMinusInfinity);
        Ints unknown{};  // a maximum does not tell of NaN: what comes behind it may replace it
        for (std::int64_t first = 0; first < num_tokens; first += kLanes) {
            const Lanes logits = logits_at(first);
            top = max(top, logits);
            unknown |= logits != logits;
        }
        largest_ = largest(top);
        for (int lane = 0; lane < kLanes; ++lane) holds_nan_ |= unknown[lane] != 0;
    }

    std::int64_t draw() {
        if (holds_nan_ || !std::isfinite(largest_)) return num_tokens_ - 1;
        const bool ranks = settings_.top_k > 0 || settings_.top_p < 1;
        if (!ranks && settings_.min_p <= 0) return place_of(all_weights(), settings_.chance);
        if (ranks) {
            keep_leading();
        } else {
            collect(floor_);
        }
        std::vector<float> weights;
        for (const Candidate& candidate : kept_) weights.push_back(candidate.weight);
        return kept_[place_of(weights, settings_.chance)].token_id;
    }

private:
    // Past the last token -inf.
    Lanes logits_at(std::int64_t first) const {
        if (first + kLanes <= num_tokens_) return load(logits_ + first);
        float padded[kLanes];
        std::fill(std::copy(logits_ + first, logits_ + num_tokens_, padded), padded + kLanes, kMinusInfinity);
        return load(padded);
    }

    Lanes levels_at(std::int64_t first) const { return (logits_at(first) - largest_) / temperature_; }

    // Exactly 0 for what is ruled out.
    static Lanes weights_of(Lanes levels) { return levels > kMinusInfinity ? power_of_two(levels * kLog2E) : Lanes{}; }

    std::vector<float> all_weights() const {
        std::vector<float> weights((num_tokens_ + kLanes - 1) / kLanes * kLanes);
        for (std::int64_t first = 0; first < num_tokens_; first += kLanes) store(&weights[first], weights_of(levels_at(first)));
        return weights;
    }

    double mass_from_floor() const {
        double mass = 0;
        for (std::int64_t first = 0; first < num_tokens_; first += kLanes) {
            const Lanes levels = levels_at(first);
            mass += sum_of(levels >= floor_ ? weights_of(levels) : Lanes{});
        }
        return mass;
    }

    // What is at `cut` or above, in id order.
    void collect(float cut) {
        kept_.clear();
        for (std::int64_t first = 0; first < num_tokens_; first += kLanes) {
            const Lanes levels = levels_at(first);
            if (!(largest(levels) >= cut)) continue;
            const Lanes weights = weights_of(levels);
            for (int lane = 0; lane < kLanes; ++lane)
                if (levels[lane] >= cut) kept_.push_back({levels[lane], weights[lane], first + lane});
        }
    }

    // top_k and top_p: looks at ever more candidates until those that are kept must be among them, then ranks these.
    void keep_leading() {
        const std::int64_t num_kept = settings_.top_k > 0 ? settings_.top_k : num_tokens_;
        double mass = settings_.top_k > 0 ? 0 : settings_.top_p * mass_from_floor();
        for (float cut = kFirstCut;; cut = cut > kLastCut ? 2 * cut : kMinusInfinity) {
            collect(std::max(cut, floor_));
            const bool enough = settings_.top_k > 0 ? std::int64_t(kept_.size()) >= num_kept : mass_of(kept_.data(), kept_.data() + kept_.size()) >= mass;
            if (enough || cut <= floor_) break;
        }
        std::vector<Candidate> ranked = kept_;
        if (num_kept < std::int64_t(ranked.size())) {
            std::nth_element(ranked.begin(), ranked.begin() + num_kept, ranked.end());
            ranked.resize(num_kept);
        }
        if (settings_.top_k > 0) mass = settings_.top_p * mass_of(ranked.data(), ranked.data() + ranked.size());
        const Candidate last = settings_.top_p < 1 ? last_within(mass, ranked) : *std::max_element(ranked.begin(), ranked.end());
        kept_.erase(std::remove_if(kept_.begin(), kept_.end(), [&](const Candidate& one) { return last < one; }), kept_.end());
    }

    // The last of the fewest leading candidates that weigh `mass` together; halves the range in which it may be.
    static Candidate last_within(double mass, std::vector<Candidate>& ranked) {
        auto first = ranked.begin(), end = ranked.end();
        while (end - first > kFewRanks) {
            const auto middle = first + (end - first) / 2;
            std::nth_element(first, middle, end);
            const double half = mass_of(&*first, &*middle);
            if (half >= mass) {
                end = middle;
            } else {
                mass -= half;
                first = middle;
            }
        }
        std::sort(first, end);
        while (end - first > 1 && first->weight < mass) mass -= (first++)->weight;
        return *first;
    }

    const float* logits_;
    const std::int64_t num_tokens_;
    const DrawSettings& settings_;
    const float temperature_;
    const float floor_;  // of levels, by min_p
    float largest_;
    bool holds_nan_ = false;
    std::vector<Candidate> kept_;
};

}  // namespace
}  // namespace pagemill

using namespace pagemill;

void pagemill_draw(
    const float* logits, std::int64_t stride, std::int64_t num_rows, std::int64_t num_tokens, const DrawSettings* settings,
    std::int32_t num_threads, std::int64_t* token_ids) {
#pragma omp parallel for num_threads(num_threads) schedule(dynamic)
    for (std::int64_t row = 0; row < num_rows; ++row) token_ids[row] = Row(logits + row * stride, num_tokens, settings[row]).draw();
}
