// Checks attention of decoding on this GPU before a run relies on it: a KV cache is filled as a prompt and then new
// tokens fill it, and what the new tokens get from it is compared with sums in double on the host.
#pragma once
#include "run/check_attention.cuh" // judge_open, judge_scores_of

// TILES: of 128 tokens a sequence. RING: what part of a sequence the cache of a window holds.
enum { DECODE_CHECK_TILES = 3, DECODE_CHECK_RING = 4, DECODE_CHECK_HEADS = 8, DECODE_CHECK_B = 2 };
// The bound on a row's error, as a share of what a row of flash may err by: only the output is rounded to floatX here.
static const double DECODE_CHECK_SHARE = 1.0 / 4;

struct decode_cache {
    floatX *keys, *values; // (B, Hkv, capacity, D)
    int32_t *positions;    // (B) of the new tokens; of a prompt its lengths
    void *workspace;
    floatX *host; // (2, B, H * D) of the host: the new tokens' output, and the same computed again
    size_t bytes, workspace_bytes, out_bytes;
    int capacity;
};
// Allocates a cache of `capacity` tokens a sequence of the judge's, for decode_cache_close.
static struct decode_cache decode_cache_open(const struct attention_judge *j, int capacity) {
    struct decode_cache c;
    c.capacity = capacity;
    c.bytes = (size_t)DECODE_CHECK_B * (size_t)capacity * sizeof(floatX) * (size_t)(j->row - j->out_row) / 2;
    c.out_bytes = (size_t)(DECODE_CHECK_B * j->out_row) * sizeof(floatX);
    c.workspace_bytes = attention_decode_workspace_bytes(j->shape, capacity, j->dev);
    c.keys = (floatX *)device_allocate(c.bytes);
    c.values = (floatX *)device_allocate(c.bytes);
    c.positions = (int32_t *)device_allocate(DECODE_CHECK_B * sizeof *c.positions);
    c.workspace = device_allocate(c.workspace_bytes);
    c.host = (floatX *)judge_memory(2 * c.out_bytes);
    return c;
}
static void decode_cache_close(struct decode_cache *c) {
    device_free(c->keys, c->bytes);
    device_free(c->values, c->bytes);
    device_free(c->positions, DECODE_CHECK_B * sizeof *c->positions);
    device_free(c->workspace, c->workspace_bytes);
    free(c->host);
}
static void decode_upload_positions(struct decode_cache *c, const int32_t *positions, struct device *dev) {
    device_upload(c->positions, positions, DECODE_CHECK_B * sizeof *positions, dev);
    device_synchronize(dev);
}
// Stores the first lengths[b] tokens of the judge's sequence b in the cache, which holds NaNs before.
static void decode_prompt(struct decode_cache *c, const struct attention_judge *j, const int32_t *lengths) {
    decode_upload_positions(c, lengths, j->dev);
    judge_fill_with_nans(c->keys, c->bytes, j->dev);
    judge_fill_with_nans(c->values, c->bytes, j->dev);
    kv_cache_append(c->keys, c->values, j->qkv, NULL, c->positions, c->capacity, j->shape, j->dev);
}
// Stores the judge's tokens at positions (B) in the cache, and computes their output twice. Overwrites j->out, j->dqkv.
static void decode_token(struct decode_cache *c, const struct attention_judge *j, const int32_t *positions) {
    const size_t row = (size_t)j->row;
    struct attention_shape shape = j->shape;
    shape.T = 1;
    decode_upload_positions(c, positions, j->dev);
    for (int b = 0; b < DECODE_CHECK_B; b++)
        device_copy(j->dqkv + (size_t)b * row, j->qkv + ((size_t)b * (size_t)j->shape.T + (size_t)positions[b]) * row,
                    row * sizeof(floatX), j->dev);
    judge_fill_with_nans(j->out, 2 * c->out_bytes, j->dev);
    kv_cache_append(c->keys, c->values, j->dqkv, c->positions, NULL, c->capacity, shape, j->dev);
    for (int i = 0; i < 2; i++) {
        judge_fill_with_nans(c->workspace, c->workspace_bytes, j->dev);
        attention_decode(j->out + i * DECODE_CHECK_B * j->out_row, j->dqkv, c->keys, c->values, c->positions,
                         c->capacity, shape, c->workspace, j->dev);
    }
    device_download(c->host, j->out, 2 * c->out_bytes, j->dev);
}
// Judges some heads of decode_token's output, all in a few steps. reason ("" before), largest: as in judge_samples.
static void decode_judge(char *reason, size_t size, const struct decode_cache *c, const struct attention_judge *j,
                         struct judge_scores *s, const int32_t *positions, int step, double *largest) {
    const int stride = 1 + j->shape.num_heads / DECODE_CHECK_HEADS;
    if (memcmp(c->host, (const char *)c->host + c->out_bytes, c->out_bytes) != 0)
        snprintf(reason, size, "a token, decoded again, gets other bits");
    for (int b = 0; b < DECODE_CHECK_B; b++)
        for (int h = (step + b) % stride; h < j->shape.num_heads && !*reason; h += stride) {
            const floatX *const row = c->host + judge_row_offset(j, JUDGE_OUT, b, h);
            double square = 0;
            judge_scores_of(s, j, b, positions[b], h);
            for (int d = 0; d < j->shape.head_dim; d++)
                square += s->out[d] * s->out[d];
            const double distance = sqrt(judge_apart(s->out, row, j->shape.head_dim) / square);
            *largest = fmax(*largest, distance);
            if (!isfinite(distance))
                snprintf(reason, size, "its output is wrong: it is not finite");
            else if (distance > DECODE_CHECK_SHARE * judge_allowed_distance(j))
                snprintf(reason, size,
                         "its output is wrong: head %d of token %d, with a cache of %d, is %.2g from sums in double, "
                         "relative",
                         h, positions[b], c->capacity, distance);
        }
}
// Judges a cache of `capacity` tokens; j->window hides what it loses. reason ("" before), largest: as in judge_samples.
static void decode_judge_cache(char *reason, size_t size, const struct attention_judge *j, int capacity,
                               double *largest) {
    enum { PROMPTS = 4, NEW_TOKENS = 2 };
    const int T = j->shape.T, lengths[PROMPTS][DECODE_CHECK_B] = {{1, T / 2}, {63, 126}, {127, 64}, {T - 3, T - 2}};
    struct decode_cache cache = decode_cache_open(j, capacity);
    struct judge_scores s = judge_scores_open(T);
    for (int step = 0; step < PROMPTS * NEW_TOKENS && !*reason; step++) {
        const int *const length = lengths[step / NEW_TOKENS], at = step % NEW_TOKENS;
        const int32_t positions[DECODE_CHECK_B] = {length[0] + at, length[1] + at};
        if (at == 0)
            decode_prompt(&cache, j, positions);
        decode_token(&cache, j, positions);
        decode_judge(reason, size, &cache, j, &s, positions, step, largest);
    }
    judge_scores_close(&s);
    decode_cache_close(&cache);
}
// Checks decoding with the shape's heads, also from a ring if the model has a window (check->hides_keys). Writes what is
// wrong to `reason` (size bytes), or "" if nothing is. Raises *largest to the largest relative distance.
static void check_decode(char *reason, size_t size, const struct attention_check *check, double *largest,
                         struct device *dev) {
    struct attention_check plain = *check;
    plain.hides_keys = false;
    struct attention_judge j = judge_open(&plain, DECODE_CHECK_TILES * check->shape.num_query_groups, dev);
    reason[0] = '\0';
    decode_judge_cache(reason, size, &j, j.shape.T, largest);
    if (check->hides_keys && !*reason) {
        j.window = j.shape.T / DECODE_CHECK_RING;
        j.document_starts = (int32_t *)judge_memory((size_t)j.rows * sizeof *j.document_starts);
        decode_judge_cache(reason, size, &j, j.window, largest);
    }
    judge_close(&j);
}
