// Generation: a prefill takes all prompts whole; then each decode takes one token of each sequence.
#pragma once
#include "block.cuh"           // block_forward
#include "model/embedding.cuh" // embed, upload_begin, upload_end
#include "model/head.cuh"      // final_norm_buffer, logits_buffer

// Keeps all layers' KV caches live in this phase. They have to live from a prefill's first phase to a decode's last.
static void kv_cache_touch(struct gpt *m) {
    for (int l = 0; l < m->shape.L; l++) {
        timeline_touch(kv_cache(m, l, SLOT_KEYS));
        timeline_touch(kv_cache(m, l, SLOT_VALUES));
    }
}

// rows (B, C) = the last token's row, lengths[b] - 1, of each sequence of `from` (B, T, C). lengths (B): on the host.
static void copy_last_rows(floatX *rows, const floatX *from, const int *lengths, struct extent e, int C,
                           struct device *dev) {
    for (int b = 0; b < e.B; b++)
        device_copy(rows + (int64_t)b * C, from + ((int64_t)b * e.T + lengths[b] - 1) * C, (size_t)C * sizeof *rows,
                    dev);
}

// Returns next-token logits (sequences, Vp) of final_norm_buffer, scaled and capped, on the device; NULL in planning.
// Columns from V on are undefined. Opens phases. Only a prefill reads host lengths: the last token is lengths[b] - 1.
static const floatX *next_logits(struct gpt *m, enum pass pass, const int *lengths) {
    const int B = m->generation.sequences, C = m->shape.layer.C, Vp = m->shape.Vp;
    use_unit(m, pass, unit_with_head_weight(m));
    phase(m, forward_group(pass), -1, "logits");
    const floatX *lnf = final_norm_buffer(m, pass);
    floatX *logits = logits_buffer(m, pass, B);
    const floatX *w = param(m, pass, -1, head_weight(m));
    void *ws = workspace(m, matmul_workspace_bytes(B, Vp, C, m->dev));
    if (pass == PASS_PREFILL) {
        floatX *rows = (floatX *)buffer(m, pass, -1, SLOT_LAST_ROWS, (size_t)B * (size_t)C * sizeof *rows,
                                        forward_group_name(pass), "last tokens");
        RUN(m, copy_last_rows(rows, lnf, lengths, extent_of(m, pass), C, m->dev));
        lnf = rows;
    }
    MATMUL(m, matmul_forward(logits, lnf, w, NULL, B, Vp, C, ws, m->dev));
    RUN(m, logits_transform(logits, B, m->shape.V, Vp, logit_transform_of(m), m->dev));
    kv_cache_touch(m);
    return logits;
}

// Uploads a decode's tokens and positions, (B) each, or a prefill's prompts (B, T) and lengths (B), in a new phase.
static void upload_generation_inputs(struct gpt *m, enum pass pass, const int32_t *inputs, const int32_t *positions) {
    int32_t *pinned = upload_begin(m, pass, inputs);
    int32_t *to = positions_buffer(m, pass);
    RUN(m, upload_integers(m, to, pinned, positions, m->generation.sequences));
    upload_end(m);
}

// Enqueues the forward of the prompts, from position 0 on, and fills the KV cache. tokens (sequences, prompt_tokens)
// and lengths, on the host, may be reused at once. Row b's prompt is its first lengths[b] tokens, at least 1; the
// others may be any below V. Returns next_logits, on the device until the model's next call. Every rank calls this.
static const floatX *gpt_prefill(struct gpt *m, const int32_t *tokens, const int *lengths) {
    region(m, REGION_PREFILL);
    upload_generation_inputs(m, PASS_PREFILL, tokens, lengths);
    kv_cache_touch(m);
    embed(m, PASS_PREFILL);
    for (int l = 0; l < m->shape.L; l++)
        block_forward(m, l, ACT_ALL, PASS_PREFILL);
    return next_logits(m, PASS_PREFILL, lengths);
}

// Enqueues the forward of one token of each sequence, at positions[b] < decode_tokens. The KV cache has the earlier
// positions, and gets this one. tokens and positions (sequences), on the host, may be reused at once. Returns
// next_logits (sequences, Vp), on the device, valid until the model's next call. Every rank calls this.
static const floatX *gpt_decode(struct gpt *m, const int32_t *tokens, const int32_t *positions) {
    region(m, REGION_GENERATE);
    upload_generation_inputs(m, PASS_GENERATE, tokens, positions);
    embed(m, PASS_GENERATE);
    for (int l = 0; l < m->shape.L; l++)
        block_forward(m, l, ACT_ALL & ~BIT(SOFTMAX), PASS_GENERATE);
    return next_logits(m, PASS_GENERATE, NULL);
}
