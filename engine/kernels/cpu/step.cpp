// Runs the layers: all threads walk through the same jobs, each of which is done before the next begins.
//
// The residual stream stays float32. Rows go through the products in bf16, and what a product gives is taken from the
// registers by the function that needs it next: added to the stream, or gated. After the last layer's attention nothing is
// computed but for the rows whose hidden states are wanted: a prefill's others have left their keys and values.
#include "step.h"

#include <algorithm>

#include "elementwise.h"
#include "kv_codes.h"
#include "matrix.h"
#include "product.h"

namespace pagemill {

// Rows that a thread takes at once through what happens to each row by itself.
constexpr std::int64_t kRowsAtOnce = 4;

constexpr int kJobsPerLayer = 6 + 4 * kJobsPerProduct;
constexpr int kJobsOutsideLayers = 3;

class Workspace {
public:
    Workspace(const Model& model, std::int64_t max_tokens, int num_threads)
        : num_threads(num_threads),
          progress(kJobsOutsideLayers + kJobsPerLayer * model.num_layers, num_threads),
          stream(max_tokens, model.hidden_size),
          wanted_stream(max_tokens, model.hidden_size),
          normed(max_tokens, model.hidden_size),
          qkv(max_tokens, (model.num_heads + 2 * model.kv.num_kv_heads) * model.kv.head_dim),
          q(max_tokens, model.num_heads * model.kv.head_dim),
          kv(num_threads, 2 * model.kv.num_kv_heads * model.kv.head_dim),
          attended(max_tokens, model.num_heads * model.kv.head_dim),
          gated(max_tokens, model.intermediate_size),
          quantised(max_tokens, std::max({model.hidden_size, model.num_heads * model.kv.head_dim, model.intermediate_size})) {}

    const int num_threads;
    Progress progress;
    const Matrix<float> stream;         // [T, E], the residual stream
    const Matrix<float> wanted_stream;  // [M, E], the wanted rows of it
    const Matrix<bf16> normed;          // [T, E]
    const Matrix<float> qkv;            // [T, (H + 2K) x D]
    const Matrix<bf16> q;               // [T, H x D], rotated; in the end [M, H x D], the wanted rows of `attended`
    const Matrix<bf16> kv;              // a thread's row of keys and values on its way to the pool
    const Matrix<bf16> attended;        // [T, H x D]
    const Matrix<bf16> gated;           // [T, I]
    Quantised quantised;                // the inputs of a product with int8 weights
};

namespace {

struct Store {
    const Matrix<float>& out;
    std::int64_t column;
    const float* bias;

    void operator()(std::int64_t row, const Sums& sums) const {
        for (int v = 0; v < kPanelVectors; ++v)
            store(out.row(row) + column + v * kLanes, bias ? sums[v] + load(bias + column + v * kLanes) : sums[v]);
    }
};

struct AddToStream {
    const Matrix<float>& stream;
    std::int64_t column;
    const float* bias;

    void operator()(std::int64_t row, const Sums& sums) const {
        float* at = stream.row(row) + column;
        for (int v = 0; v < kPanelVectors; ++v, at += kLanes)
            store(at, load(at) + (bias ? sums[v] + load(bias + column + v * kLanes) : sums[v]));
    }
};

// The first half of a panel are gates, the second the ups that belong to them.
struct Gate {
    const Matrix<bf16>& out;
    std::int64_t column;

    void operator()(std::int64_t row, const Sums& sums) const {
        for (int v = 0; v < kPanelVectors / 2; ++v)
            store_bf16(out.row(row) + column + v * kLanes, silu_times(sums[v], sums[v + kPanelVectors / 2]));
    }
};

// One thread's way through a step.
class Walk {
public:
    Walk(const Model& model, Workspace& workspace, const Step& step)
        : model_(model),
          work_(workspace),
          step_(step),
          team_(workspace.progress),
          num_rows_(step.num_tokens),
          stream_(&workspace.stream),
          attended_(&workspace.attended) {}

    void run() {
        embed();
        for (int index = 0; index < model_.num_layers; ++index) {
            const Layer& layer = model_.layers[index];
            norm(layer.input_norm);
            project(layer.qkv, work_.normed, [&](std::int64_t panel) { return Store{work_.qkv, panel * kPanel, layer.qkv.bias}; });
            make_room(step_.pools[index]);
            rotate_and_cache(layer, step_.pools[index]);
            encode(step_.pools[index]);
            attend(step_.pools[index]);
            if (index + 1 == model_.num_layers) keep_wanted();
            project(layer.o, *attended_, [&](std::int64_t panel) { return add_to_stream(layer.o, panel); });
            norm(layer.post_attention_norm);
            project(layer.gate_up, work_.normed, [&](std::int64_t panel) { return Gate{work_.gated, panel * kPanel / 2}; });
            project(layer.down, work_.gated, [&](std::int64_t panel) { return add_to_stream(layer.down, panel); });
        }
        finish();
    }

private:
    AddToStream add_to_stream(const Weights& weights, std::int64_t panel) const { return {*stream_, panel * kPanel, weights.bias}; }

    template <class Each>
    void each_row(std::int64_t count, const Each& each) {
        team_.run(count, kRowsAtOnce, [&](Range rows) {
            for (std::int64_t row = rows.begin; row < rows.end; ++row) each(row);
        });
    }

    void embed() {
        each_row(step_.num_tokens, [&](std::int64_t row) {
            widen_row(model_.embedding + step_.token_ids[row] * model_.hidden_size, model_.hidden_size, work_.stream.row(row));
        });
    }

    void norm(const float* weight) {
        each_row(num_rows_, [&](std::int64_t row) {
            rms_norm(stream_->row(row), weight, model_.hidden_size, model_.rms_norm_eps, work_.normed.row(row));
        });
    }

    template <class DoneFor>
    void project(const Weights& weights, const Matrix<bf16>& x, const DoneFor& done_for) {
        multiply(team_, weights, x.row(0), x.stride(), num_rows_, work_.quantised, done_for);
    }

    // Head norms and rotation; queries stay here, keys and values go to their slots.
    void rotate_and_cache(const Layer& layer, const KVPool& pool) {
        const std::int64_t size = model_.kv.head_dim, num_q = model_.num_heads, num_kv = model_.kv.num_kv_heads;
        bf16* const keys = work_.kv.row(team_.thread());
        bf16* const values = keys + num_kv * size;
        each_row(step_.num_tokens, [&](std::int64_t row) {
            const float* cos_sin = model_.cos_sin + step_.positions[row] * size;
            float* head = work_.qkv.row(row);
            for (std::int64_t h = 0; h < num_q + num_kv; ++h, head += size) {
                const float* weight = h < num_q ? layer.q_norm : layer.k_norm;
                if (weight != nullptr) rms_norm_head(head, weight, size, model_.rms_norm_eps);
                rotate(head, cos_sin, size, h < num_q ? work_.q.row(row) + h * size : keys + (h - num_q) * size);
            }
            narrow_row(head, num_kv * size, values);
            kv_write_token(model_.kv, pool, step_.slots[row], keys, values);
        });
    }

    // Blocks that get full leave their places to others.
    void make_room(const KVPool& pool) {
        team_.run(step_.num_moves, 1, [&](Range moves) {
            for (std::int64_t i = moves.begin; i < moves.end; ++i) kv_move(model_.kv, pool, step_.moves[i], step_.moves[step_.num_moves + i]);
        });
    }

    void encode(const KVPool& pool) {
        const std::int64_t num_heads = model_.kv.num_kv_heads;
        team_.run(step_.num_full * num_heads, num_heads, [&](Range shares) {
            for (std::int64_t i = shares.begin; i < shares.end; ++i) {
                const std::int64_t block = i / num_heads;
                kv_encode(model_.kv, pool, step_.full[block], step_.full[step_.num_full + block], int(i % num_heads));
            }
        });
    }

    void attend(const KVPool& pool) {
        const AttentionLayer layer{pool, work_.q.row(0), work_.q.stride(), work_.attended.row(0), work_.attended.stride()};
        const auto lot_of = [&](int lot) { return items_of(*step_.attention, lot); };
        team_.run_lots(lot_of, 1, [&](Range items) { attend_items(*step_.attention, layer, items, team_.thread()); });
    }

    // From here on the rows are the wanted ones, in their order.
    void keep_wanted() {
        each_row(step_.num_wanted, [&](std::int64_t i) {
            const std::int64_t row = step_.wanted[i];
            std::copy_n(work_.stream.row(row), work_.stream.stride(), work_.wanted_stream.row(i));
            std::copy_n(work_.attended.row(row), work_.attended.stride(), work_.q.row(i));
        });
        num_rows_ = step_.num_wanted;
        stream_ = &work_.wanted_stream;
        attended_ = &work_.q;
    }

    void finish() {
        each_row(num_rows_, [&](std::int64_t i) {
            rms_norm(stream_->row(i), model_.final_norm, model_.hidden_size, model_.rms_norm_eps, step_.hidden + i * step_.hidden_stride);
        });
    }

    const Model& model_;
    Workspace& work_;
    const Step& step_;
    Team team_;
    std::int64_t num_rows_;  // T, in the end M
    const Matrix<float>* stream_;
    const Matrix<bf16>* attended_;
};

}  // namespace
}  // namespace pagemill

using namespace pagemill;

extern "C" {

Workspace* pagemill_workspace_create(const Model* model, std::int64_t max_tokens, std::int32_t num_threads) {
    return new Workspace(*model, max_tokens, num_threads);
}

void pagemill_workspace_destroy(Workspace* workspace) { delete workspace; }

void pagemill_step(const Model* model, Workspace* workspace, const Step* step) {
    workspace->progress.reset();
#pragma omp parallel num_threads(workspace->num_threads)
    Walk(*model, *workspace, *step).run();
}
}
