// The reference model as a golden file describes it: its shape, initial parameters and optimizer.
#pragma once
#include "test/golden.h"    // struct golden
#include "test/reference.h" // struct reference

static inline struct reference_config reference_config_of(const struct golden *g) {
    const bool rope = golden_is(g, "position_embedding_type", "rope");
    struct reference_config c;
    c.L = golden_int(g, "num_layers");
    c.C = golden_int(g, "hidden_size");
    c.H = golden_int(g, "num_attention_heads");
    c.Hkv = golden_int(g, "num_query_groups");
    c.D = golden_int(g, "kv_channels");
    c.F = golden_int(g, "ffn_hidden_size");
    c.V = golden_int(g, "vocab_size");
    c.positions = rope ? 0 : golden_int(g, "max_position_embeddings");
    c.layernorm = golden_is(g, "normalization", "LayerNorm");
    c.swiglu = golden_int(g, "swiglu");
    c.qkv_bias = golden_int(g, "add_qkv_bias");
    c.biases = golden_int(g, "add_bias_linear");
    c.tied = !golden_int(g, "untie_embeddings_and_output_weights");
    c.norm_epsilon = golden_double(g, "norm_epsilon");
    c.rotary_base = rope ? golden_double(g, "rotary_base") : 0;
    return c;
}

static inline struct reference *reference_of(const struct golden *g) {
    struct reference *r = reference_create(reference_config_of(g));
    for (int i = 0; i < r->num_tensors; i++) {
        const struct golden_tensor *tensor = golden_tensor(g, r->tensors[i].name);
        const float *values = golden_floats(g, r->tensors[i].name);
        assert_int_equal(tensor->count, r->tensors[i].rows * r->tensors[i].cols);
        for (int64_t j = 0; j < tensor->count; j++)
            r->tensors[i].value[j] = values[j];
    }
    return r;
}

static inline struct reference_adamw reference_adamw_of(const struct golden *g) {
    struct reference_adamw adamw;
    adamw.lr = golden_double(g, "lr");
    adamw.beta1 = golden_double(g, "adam_beta1");
    adamw.beta2 = golden_double(g, "adam_beta2");
    adamw.eps = golden_double(g, "adam_eps");
    adamw.weight_decay = golden_double(g, "weight_decay");
    adamw.clip_grad = golden_double(g, "clip_grad");
    return adamw;
}

// Returns the inputs ("tokens") or the targets ("targets") (B, T) of one batch.
static inline const int32_t *golden_batch(const struct golden *g, const char *tokens_or_targets, int step) {
    const struct golden_tensor *tensor = golden_tensor(g, tokens_or_targets);
    assert_true(tensor->ndim == 3 && step < tensor->dims[0]);
    return golden_ints(g, tokens_or_targets) + step * tensor->dims[1] * tensor->dims[2];
}
