// The initial parameters and tables of a model.
#pragma once
#include "kernels/device_memory.cuh" // device_upload, device_zero
#include "kernels/device_queue.cuh"  // device_synchronize
#include "kernels/rope_table.cuh"    // rope_table, struct rope_settings
#include "model/state.cuh"           // struct gpt

// Returns a planned buffer's address, on device or host, live or not; NULL for id -1, no bytes, or before gpt_allocate.
static void *gpt_pointer(const struct gpt *m, int id) {
    return plan_pointer(&m->timeline.plan, &m->timeline.arenas, id);
}

// Returns the struct zero (ZeRO's shards) of a tensor's kind: &m->frozen of frozen tensors, &m->zero of trained ones.
static struct zero *zero_of_tensor(struct gpt *m, const struct tensor *t) { return t->frozen ? &m->frozen : &m->zero; }
// Whether this rank holds any of a tensor's elements [first, first + n). Every rank holds all of a stored weight.
static bool gpt_holds(struct gpt *m, const struct tensor *t, int64_t first, int64_t n) {
    const struct zero *z = zero_of_tensor(m, t);
    return tensor_is_stored(t) || zero_holds_any(z, shards_parameters(&z->shards), t->offset + first, n);
}
// Sets a tensor's elements [first, first + n), as far as this rank holds them, to `values` (n), on the host. Parameters
// are rounded to floatX; master weights and moving averages are exact. A stored weight follows frozen_weights_set's
// rules. No update may be in flight. values and scratch `rounded` (2 n) must stay until the device was waited for.
static void gpt_set_parameters(struct gpt *m, const struct tensor *t, int64_t first, const float *values, int64_t n,
                               floatX *rounded) {
    if (!t->frozen) {
        optimizer_set_parameters(&m->optimizer, t->offset + first, values, n, rounded);
        return;
    }
    if (tensor_is_stored(t)) {
        frozen_weights_set(&m->stored, t, first, values, n, m->dev);
        return;
    }
    for (int64_t i = 0; i < n; i++)
        rounded[i] = to_floatX(values[i]);
    zero_upload(&m->frozen, m->frozen.params, shards_parameters(&m->frozen.shards), t->offset + first, rounded, n,
                sizeof *rounded);
}

// Zeroes this rank's part of z's parameters and the gaps between tensors: at once if params_on_host, else enqueued.
static void zero_clear_parameters(struct zero *z, struct device *dev) {
    const size_t bytes = (size_t)shards_elements(&z->shards, shards_parameters(&z->shards)) * sizeof *z->params;
    if (z->params_on_host && bytes > 0)
        memset(z->params, 0, bytes);
    else if (bytes > 0)
        device_zero(z->params, bytes, dev);
}
// Sets initial parameters and optimizer states, and zeroes gradients that are on the device. With --init-from, frozen
// parameters get no values here, since they are still to be loaded. The caller waits for the device.
static void gpt_initialize(struct gpt *m) {
    const int64_t CHUNK = 1 << 20; // elements
    float *exact = (float *)host_allocate((size_t)CHUNK * sizeof *exact, m->dev);
    floatX *rounded = (floatX *)host_allocate(2 * (size_t)CHUNK * sizeof *rounded, m->dev);
    zero_clear_parameters(&m->zero, m->dev);
    zero_clear_parameters(&m->frozen, m->dev);
    optimizer_initialize(&m->optimizer);
    for (int i = 0; i < m->table.num_tensors + m->table.num_frozen; i++) {
        const struct tensor *t = &m->table.tensors[i];
        if (t->frozen && *m->config.checkpoints.init_from) // the base model, which is still to be loaded
            continue;
        for (int64_t first = 0; first < t->count; first += CHUNK) {
            const int64_t n = t->count - first < CHUNK ? t->count - first : CHUNK;
            if (!gpt_holds(m, t, first, n))
                continue;
            tensor_initialize(exact, first, n, t, m->config.model.init_method_std, m->shape.L, m->config.training.seed);
            gpt_set_parameters(m, t, first, exact, n, rounded);
            device_synchronize(m->dev);
        }
    }
    if (m->trains && !m->zero.grads_on_host) // zeroes between tensors, where nothing is written later
        device_zero(m->zero.grads, zero_gradients_bytes(&m->zero), m->dev);
    host_free(exact);
    host_free(rounded);
}
// Returns settings for the rotary table or, if `local`, for windowed layers' table, with another base and no scaling.
// *factors becomes longrope's lists, to which the settings point and which the caller frees; NULL without longrope.
static struct rope_settings rope_settings_of(const struct config *c, bool local, double **factors) {
    struct rope_settings s;
    memset(&s, 0, sizeof s);
    s.head_dim = c->model.kv_channels;
    s.rotary_dims = config_rotary_dims(c);
    s.theta = local ? c->model.rotary_base_local : c->model.rotary_base;
    s.scaling = ROPE_UNSCALED;
    *factors = NULL;
    if (local)
        return s;
    s.factor = c->model.rope_scaling_factor;
    s.low_freq_factor = c->model.rope_low_freq_factor;
    s.high_freq_factor = c->model.rope_high_freq_factor;
    s.original_positions = c->model.rope_original_max_position_embeddings;
    s.beta_fast = c->model.yarn_beta_fast;
    s.beta_slow = c->model.yarn_beta_slow;
    s.truncate = c->model.yarn_truncate;
    s.attention_factor = c->model.rope_attention_factor;
    s.mscale = c->model.yarn_mscale;
    s.mscale_all_dim = c->model.yarn_mscale_all_dim;
    s.max_positions = c->model.max_position_embeddings;
    s.longest = c->model.seq_length;
    switch (c->model.rope_scaling_type) {
    case SCALING_NONE: break;
    case SCALING_LINEAR: s.scaling = ROPE_LINEAR; break;
    case SCALING_LLAMA3: s.scaling = ROPE_LLAMA3; break;
    case SCALING_YARN: s.scaling = ROPE_YARN; break;
    case SCALING_LONGROPE: {
        const int pairs = s.rotary_dims / 2;
        s.scaling = ROPE_LONGROPE;
        *factors = (double *)calloc(2 * (size_t)pairs, sizeof **factors);
        if (!*factors)
            fail("out of memory for the rotary table");
        config_numbers(*factors, pairs, "--rope-short-factors", c->model.rope_short_factors, 1e-6);
        config_numbers(*factors + pairs, pairs, "--rope-long-factors", c->model.rope_long_factors, 1e-6);
        s.short_factors = *factors;
        s.long_factors = *factors + pairs;
        break;
    }
    }
    return s;
}
// Fills buffer `id` with the rotary table (if `local`, windowed layers' own) and returns it. Waits for the device.
static const float *gpt_initialize_rope(struct gpt *m, int id, bool local) {
    const size_t bytes = (size_t)m->config.model.seq_length * (size_t)m->shape.layer.D * sizeof(float);
    float *table = (float *)host_allocate(bytes, m->dev), *to = (float *)gpt_pointer(m, id);
    double *factors;
    const struct rope_settings settings = rope_settings_of(&m->config, local, &factors);
    rope_table(table, m->config.model.seq_length, &settings);
    device_upload(to, table, bytes, m->dev);
    device_synchronize(m->dev);
    host_free(table);
    free(factors);
    return to;
}
