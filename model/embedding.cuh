// The embedding, forward and backward, and the batch that it reads: tokens, targets, documents, the spans of attention.
#pragma once
#include "kernels/attention/spans.cuh" // attention_spans
#include "kernels/device_memory.cuh"   // device_upload
#include "kernels/device_queue.cuh"    // device_event_record, device_event_wait
#include "kernels/embedding.cuh"       // embedding_forward, embedding_backward
#include "model/sequence.cuh"          // struct gpt, tokens_buffer, documents_buffer, spans_buffers

// ---- Batches ----

// Enqueues the upload of `from` (n), or of zeroes if it is NULL, through pinned (n). Only `from` may be reused at once.
static void upload_integers(struct gpt *m, int32_t *to, int32_t *pinned, const int32_t *from, int64_t n) {
    if (from) // planning passes none, which gcc would warn of
        memcpy(pinned, from, (size_t)n * sizeof *to);
    else
        memset(pinned, 0, (size_t)n * sizeof *to);
    device_upload(to, pinned, (size_t)n * sizeof *to, m->dev);
}
// Begins to upload a batch, first its inputs (B, T), in a phase that lasts to upload_end. First waits for the upload
// two batches before. Returns pinned memory, (2, host_batch_tokens), for the other arrays; invalid in planning.
static int32_t *upload_begin(struct gpt *m, enum pass pass, const int32_t *inputs) {
    const int slot = (int)(m->io.batches % 2);
    phase(m, forward_group(pass), -1, "batch");
    int32_t *pinned = m->io.host_batches + (int64_t)slot * 3 * m->io.host_batch_tokens;
    int32_t *tokens = tokens_buffer(m, pass);
    RUN(m, device_event_wait(m->dev, EVENT_BATCH + slot));
    RUN(m, upload_integers(m, tokens, pinned, inputs, extent_of(m, pass).N));
    return pinned + m->io.host_batch_tokens;
}
// Ends the upload of a batch, and counts it. Records an event by which upload_begin knows that pinned memory is free.
static void upload_end(struct gpt *m) {
    RUN(m, device_event_record(m->dev, EVENT_BATCH + (int)(m->io.batches % 2)));
    if (!m->timeline.planning)
        m->io.batches++;
}
// Enqueues the upload of a batch for training or evaluation, in a new phase. The caller may reuse the batch at once.
static void upload_batch(struct gpt *m, enum pass pass, struct batch batch) {
    const int64_t N = extent_of(m, pass).N;
    int32_t *pinned = upload_begin(m, pass, batch.inputs);
    int32_t *targets = targets_buffer(m, pass);
    RUN(m, upload_integers(m, targets, pinned, batch.targets, N));
    if (has_documents(m, pass)) {
        int32_t *documents = documents_buffer(m, pass);
        RUN(m, upload_integers(m, documents, pinned + m->io.host_batch_tokens, batch.document_starts, N));
    }
    upload_end(m);
}

// Computes each query's first key and each key's last query, (B, T) each, in this phase. With `window` they are for the
// layers whose window hides keys, otherwise for the other layers. Does nothing if none of these layers needs them.
static void make_spans(struct gpt *m, enum pass pass, bool window) {
    const struct extent e = extent_of(m, pass);
    bool used = false;
    for (int l = 0; l < m->shape.L; l++)
        used = used || window_hides_keys(m, pass, l) == window;
    if (!used || !needs_spans(m, pass, window))
        return;
    const struct spans spans = spans_buffers(m, pass, window);
    const int32_t *documents = masks_documents(m, pass) ? documents_buffer(m, pass) : NULL;
    RUN(m, attention_spans(spans.first_key, spans.last_query, documents, window ? m->window : 0, e.B, e.T, m->dev));
}

// ---- The embedding ----

// Computes the embeddings' output, OUT of layer -1, and attention's spans in a new phase, in which it also begins to
// fetch layer 0's parameters. First calls use_unit for the embeddings. Every rank must call this.
static void embed(struct gpt *m, enum pass pass) {
    const struct extent e = extent_of(m, pass);
    use_unit(m, pass, unit_of_embeddings(&m->table));
    phase(m, forward_group(pass), -1, "embedding");
    prefetch_unit(m, pass, unit_of_layer(&m->table, 0));
    make_spans(m, pass, false);
    make_spans(m, pass, true);
    const floatX *wte = param(m, pass, -1, PARAM_WTE), *wpe = param(m, pass, -1, PARAM_WPE);
    const int32_t *tokens = tokens_buffer(m, pass);
    if (!generates(pass))
        timeline_touch(targets_buffer(m, pass));
    const struct token_positions positions = position_starts_of(m, pass);
    floatX *out = activation(m, pass, -1, ACT_OUT);
    RUN(m, embedding_forward(out, tokens, wte, wpe, positions, e.B, e.T, m->shape.layer.C, embedding_scale(m),
                             dropout_of(m, m->config.model.hidden_dropout, 0, DROPOUT_EMBEDDING), m->dev));
}

// Returns where table `id`'s gradient goes. A frozen or absent table has 0 rows. Then, and when planning, sums is NULL.
static struct table_gradient table_gradient(struct gpt *m, enum parameter id) {
    const struct tensor *t = parameters_find(&m->table, -1, id);
    const struct table_gradient table = {grad(m, -1, id), t && !t->frozen ? t->rows : 0, accumulates(m)};
    return table;
}
// Writes the embedding tables' gradients in new phases, and begins to reduce them over the ranks. Adds to them instead
// if accumulates(m), and always to a tied table's gradient, which the head has begun. Every rank must call this.
static void embedding_gradients(struct gpt *m) {
    const struct extent e = extent_of(m, PASS_TRAIN);
    const int unit = unit_of_embeddings(&m->table);
    if (!m->shape.tied)
        zero_begin_gradients(&m->zero, unit);
    phase(m, PHASES_BACKWARD, -1, "embedding");
    struct table_gradient dwte = table_gradient(m, PARAM_WTE), dwpe = table_gradient(m, PARAM_WPE);
    dwte.add = dwte.add || m->shape.tied; // to the gradient of the tied head
    const floatX *dres = d_residual(m);
    const int32_t *tokens = tokens_buffer(m, PASS_TRAIN);
    const struct token_positions positions = position_starts_of(m, PASS_TRAIN);
    void *ws = workspace(m, embedding_backward_workspace_bytes(e.B, e.T, m->dev));
    RUN(m, embedding_backward(dwte, dwpe, dres, tokens, positions, e.B, e.T, m->shape.layer.C, embedding_scale(m),
                              dropout_of(m, m->config.model.hidden_dropout, 0, DROPOUT_EMBEDDING), ws, m->dev));
    zero_reduce(&m->zero, unit);
}
