// A decoder-only transformer's step over a batch of tokens as one call; the model is data, so families need no code.
//
// Shapes: T tokens of the step, M of them whose hidden state is wanted, E hidden size, I feed-forward size, H query heads,
// K key/value heads, D head size. Vectors of float32 are padded to a multiple of 64 with zeros.
#pragma once

#include <cstdint>

#include "attention.h"
#include "gemm.h"

namespace pagemill {

struct Layer {
    Weights qkv;      // E -> (H + 2K) x D
    Weights o;        // H x D -> E
    Weights gate_up;  // E -> I gates and I ups, packed together
    Weights down;     // I -> E
    const float* input_norm;           // [E]
    const float* post_attention_norm;  // [E]
    const float* q_norm;               // [D], or null
    const float* k_norm;               // [D], or null
};

struct Model {
    const Layer* layers;
    std::int32_t num_layers;
    std::int32_t hidden_size;
    std::int32_t intermediate_size;
    std::int32_t num_heads;
    KVLayout kv;
    float rms_norm_eps;
    const bf16* embedding;    // [vocabulary, E]
    const float* final_norm;  // [E]
    const float* cos_sin;     // [positions, D]: D / 2 cosines, then as many sines
};

struct Step {
    std::int64_t num_tokens;         // T
    const std::int64_t* token_ids;   // [T]
    const std::int64_t* positions;   // [T]
    const std::int64_t* slots;       // [T], where each token's key and value go
    const Attention* attention;      // planned for this step
    const KVPool* pools;             // one of each layer
    std::int64_t num_moves;          // places to copy in each layer before it is written to
    const std::int64_t* moves;       // [2, num_moves], from and to
    std::int64_t num_full;           // blocks to quantise in each layer once it is written to
    const std::int64_t* full;        // [2, num_full], places and blocks
    std::int64_t num_wanted;         // M
    const std::int64_t* wanted;      // [M], rows of T
    bf16* hidden;                    // [M, E padded to 32], the final norm applied
    std::int64_t hidden_stride;
};

class Workspace;  // a step's activations

}  // namespace pagemill

extern "C" {

// Room for steps of up to max_tokens tokens.
pagemill::Workspace* pagemill_workspace_create(const pagemill::Model* model, std::int64_t max_tokens, std::int32_t num_threads);
void pagemill_workspace_destroy(pagemill::Workspace* workspace);

// Writes the step's keys and values to the pools and the wanted rows' hidden states to step->hidden.
void pagemill_step(const pagemill::Model* model, pagemill::Workspace* workspace, const pagemill::Step* step);
}
