// The head: logits and loss, a chunk of tokens at a time, and their backward, down through the final norm.
#pragma once
#include "kernels/loss.cuh"   // cross_entropy, losses_sum
#include "model/branch.cuh"   // norm_gradient, stream_sink
#include "model/sequence.cuh" // targets_buffer

// The default size of a chunk of logits: matmuls run at full speed, and it is small beside the rest. On a GPU each
// chunk but the first adds to the head's whole fp32 gradient, so chunks grow where memory is free (fit_loss_chunk). On
// a CPU a chunk's passes over weight and gradient cost as much as matmuls of 20 to 30 tokens: at most 3 %.
enum { LOGITS_CHUNK_TOKENS = 1024, LOGITS_CHUNK_BYTES_GPU = 512 << 20, LOGITS_CHUNK_BYTES_CPU = 128 << 20 };

// The number of tokens of a chunk, at most a micro-batch's: --loss-chunk-tokens or, if 0, by the LOGITS_CHUNK_ sizes.
static int64_t loss_chunk(const struct config *c, int Vp, const struct device *dev) {
    const int64_t chunk_bytes = device_is_gpu(dev) ? LOGITS_CHUNK_BYTES_GPU : LOGITS_CHUNK_BYTES_CPU;
    const int64_t N = (int64_t)c->training.micro_batch_size * c->model.seq_length;
    if (c->memory.loss_chunk_tokens > 0)
        return c->memory.loss_chunk_tokens < N ? c->memory.loss_chunk_tokens : N;
    const int64_t by_bytes = (N * Vp * (int64_t)sizeof(floatX) + chunk_bytes - 1) / chunk_bytes;
    const int64_t by_tokens = (N + LOGITS_CHUNK_TOKENS - 1) / LOGITS_CHUNK_TOKENS;
    const int64_t chunks = by_bytes < by_tokens ? by_bytes : by_tokens;
    const int64_t chunk = ((N + chunks - 1) / chunks + 63) / 64 * 64;
    return chunk < N ? chunk : N;
}

// Returns a chunk's logits or, in generation, the last tokens', (rows, Vp), live in this phase; NULL when planning.
static floatX *logits_buffer(struct gpt *m, enum pass pass, int64_t rows) {
    return (floatX *)buffer(m, pass, -1, SLOT_LOGITS, (size_t)rows * m->shape.Vp * sizeof(floatX), "logits and loss",
                            "logits");
}
// Returns the losses of a pass's tokens, (N), live in this phase; NULL when planning.
static float *losses_buffer(struct gpt *m, enum pass pass) {
    return (float *)buffer(m, pass, -1, SLOT_LOSSES, (size_t)extent_of(m, pass).N * sizeof(float), "logits and loss",
                           "losses");
}
// Returns where scoring notes whether each target's logit is the largest, (N), live in this phase; NULL when planning.
static int32_t *target_is_largest_buffer(struct gpt *m, enum pass pass) {
    return (int32_t *)buffer(m, pass, -1, SLOT_LARGEST, (size_t)extent_of(m, pass).N * sizeof(int32_t),
                             "logits and loss", "targets with the largest logit");
}

// The number of bytes of workspace for the head's matmuls: enough for a full chunk and for a shorter last one.
static size_t head_workspace_bytes(const struct gpt *m, enum pass pass) {
    const int C = m->shape.layer.C, Vp = m->shape.Vp;
    const int64_t rest = extent_of(m, pass).N % m->loss_chunk;
    const size_t whole = matmul_workspace_bytes(m->loss_chunk, Vp, C, m->dev);
    const size_t last = rest > 0 ? matmul_workspace_bytes(rest, Vp, C, m->dev) : 0;
    return whole > last ? whole : last;
}

// Computes the losses of tokens [first, first + rows), rows <= loss_chunk, in a new phase; if m->scores also
// target_is_largest_buffer. In training a second phase makes D_LNF and a trained head weight's gradient. The phase adds
// to the weight's gradient if accumulates(m) or first > 0, else overwrites it.
static void head_chunk(struct gpt *m, enum pass pass, int64_t first, int64_t rows, float dloss) {
    const int C = m->shape.layer.C, Vp = m->shape.Vp;
    const enum parameter weight = head_weight(m);
    const int64_t row = first * C;

    phase(m, PHASES_HEAD, -1, "logits and loss");
    floatX *logits = logits_buffer(m, pass, m->loss_chunk);
    const floatX *lnf = final_norm_buffer(m, pass);
    float *losses = losses_buffer(m, pass);
    int32_t *largest = m->scores ? target_is_largest_buffer(m, pass) : NULL;
    const int32_t *targets = targets_buffer(m, pass);
    const floatX *w = param(m, head_pass(m, pass), -1, weight);
    void *ws = workspace(m, head_workspace_bytes(m, pass));
    MATMUL(m, matmul_forward(logits, lnf + row, w, NULL, rows, Vp, C, ws, m->dev));
    RUN(m, cross_entropy(losses + first, logits, targets + first, dloss, (float)m->config.training.z_loss, rows,
                         m->shape.V, Vp, logit_transform_of(m), pass == PASS_TRAIN, m->dev));
    if (m->scores)
        RUN(m, targets_are_largest(largest + first, logits, targets + first, rows, m->shape.V, Vp, m->dev));
    if (pass != PASS_TRAIN)
        return;

    phase(m, PHASES_HEAD, -1, "gradients");
    logits = logits_buffer(m, pass, m->loss_chunk);
    lnf = final_norm_buffer(m, pass);
    floatX *dlnf = d_buffer(m, -1, SLOT_D_LNF, C);
    w = param(m, head_pass(m, pass), -1, weight);
    float *dw = grad(m, -1, weight);
    ws = workspace(m, head_workspace_bytes(m, pass));
    if (is_trained(m, -1, weight))
        MATMUL(m, matmul_backward_weight(dw, NULL, logits, lnf + row, rows, Vp, C, accumulates(m) || first > 0, ws,
                                         m->dev));
    MATMUL(m, matmul_backward_input(dlnf + row, logits, w, rows, Vp, C, ws, m->dev));
}

// Computes the loss from final_norm_buffer, in new phases: results->loss, on the device, gets the losses' sum and
// count. In training goes back to d_residual. Writes the gradients of head and final norm or, if accumulates(m), adds
// to them, and begins to reduce all but a tied weight's. dloss multiplies all gradients. Every rank calls this.
static void head(struct gpt *m, enum pass pass, float dloss) {
    const int64_t N = extent_of(m, pass).N;
    use_unit(m, head_pass(m, pass), unit_with_head_weight(m));
    if (pass == PASS_TRAIN) {
        zero_begin_gradients(&m->zero, unit_of_head());
        if (m->shape.tied)
            zero_begin_gradients(&m->zero, unit_of_embeddings(&m->table));
    }
    // What outlives a chunk is live from before the first one until after the last one.
    phase(m, PHASES_HEAD, -1, "begin");
    timeline_touch(final_norm_buffer(m, pass));
    timeline_touch(losses_buffer(m, pass));
    if (m->scores)
        timeline_touch(target_is_largest_buffer(m, pass));
    if (pass == PASS_TRAIN)
        timeline_touch(d_buffer(m, -1, SLOT_D_LNF, m->shape.layer.C));
    struct timeline_loop loop = timeline_loop_of(&m->timeline, m->loss_chunk, N);
    while (timeline_loop_next(&m->timeline, &loop))
        head_chunk(m, pass, loop.first, N - loop.first < loop.step ? N - loop.first : loop.step, dloss);
    phase(m, PHASES_HEAD, -1, "final norm");
    timeline_touch(final_norm_buffer(m, pass));
    const int32_t *targets = targets_buffer(m, pass);
    const float *losses = losses_buffer(m, pass);
    RUN(m, losses_sum(&m->io.results->loss, losses, targets, N, m->dev));
    if (pass == PASS_TRAIN) {
        const floatX *dlnf = d_buffer(m, -1, SLOT_D_LNF, m->shape.layer.C);
        floatX *dres = d_residual(m);
        const floatX *x = activation(m, pass, m->shape.L - 1, ACT_OUT);
        const struct sink sink = stream_sink(m, dres, m->shape.L - 1, LINEAR_MLP_PROJ);
        norm_gradient(at_layer(m, pass, -1, 0), sink, NULL, dlnf, x, final_norm_stats_of(m, pass), NORM_FINAL);
        if (next_backward_layer(m, m->shape.L) >= 0)
            prefetch_unit(m, PASS_BACKWARD, unit_of_layer(&m->table, next_backward_layer(m, m->shape.L)));
        zero_reduce(&m->zero, unit_of_head());
    }
}
