// Checks one backend of attention on this GPU before a run relies on it: forward and backward with the model's heads,
// against a second run, against sums in double on the host, and against the next simpler backend. The host computes
// only a few rows: a token's output and dQ need one row of scores, dK and dV near the end need only the last rows.
#pragma once
#include "attention.cuh"               // attention_forward, attention_backward
#include "kernels/amax.cuh"            // amax_with
#include "kernels/attention/spans.cuh" // attention_spans, attention_first_key
#include "kernels/device_memory.cuh"   // device_allocate, device_upload, device_download
#include "kernels/device_queue.cuh"    // device_synchronize
#include "kernels/random.cuh"          // dropout_scales
#include "kernels/rope_table.cuh"      // rope_table
#include <math.h>                      // exp, isfinite, sqrt, tanh

struct attention_check {
    enum attention_backend backend, simpler; // simpler: ATTENTION_AUTO: none
    struct attention_shape shape;            // B, T and the tables are chosen here
    bool hides_keys;                         // a window or documents hide keys in some layer
    bool rotary, biases, amax;               // what is fused into the run's calls
    float dropout;                           // --attention-dropout
    bool any_order;                          // backward's bits may differ between calls
    bool forward_only;                       // as where nothing trains; biases and amax must be false
    bool decodes;                            // decoding is judged, instead of the backend
    bool in_fp8;                             // by cuDNN, instead of bf16
    struct fp8_attention_demands fp8;        // where in_fp8
    uint64_t cudnn;                          // fused_installed(); 0 if `backend` is not fused
};

// The bounds are smaller by this factor in fp32: errors are about 2^-19, but 2^-11 if 1xTF32 stands in for 3xTF32.
enum { ATTENTION_CHECK_FINER = sizeof(floatX) == 4 ? 256 : 1 };
// The bound on a row's error, relative to the row's length. Roundings to bf16 (2^-9) make errors of 2^-8 to 2^-6.
static const double ATTENTION_CHECK_DISTANCE = 1.0 / 16 / ATTENTION_CHECK_FINER;
// The bound with dropout: the first tokens' dQ sums few numbers that cancel; it errs by up to 0.05 at p = 0.25.
static const double ATTENTION_CHECK_DROPPED = 1.0 / 8 / ATTENTION_CHECK_FINER;
// The bound on all rows of a kind together: errors of bf16 average out, errors of a mask that is off by one do not.
static const double ATTENTION_CHECK_ALL = 1.0 / 32 / ATTENTION_CHECK_FINER;
// Rows of dK and dV get shorter towards the end of a causal sequence, and their errors with them, down to this share of
// all rows' root mean square. The output's errors don't shrink so, and a first token's dQ is 0 but for rounding.
static const double ATTENTION_CHECK_SHORT = 1.0 / 64;
// The bound on the error of fp32 sums of thousands of stored values, relative to the sum of their magnitudes.
static const double ATTENTION_CHECK_SUM = 1.0 / 1024;

// The kinds of rows, head_dim elements each: a head of a token of the output or of one of the gradients.
enum judge_kind { JUDGE_OUT, JUDGE_DQ, JUDGE_DK, JUDGE_DV, JUDGE_KINDS };
struct attention_judge {
    struct attention_shape shape;
    struct dropout dropout;
    struct device *dev;
    int64_t rows, row, out_row; // tokens; elements of a token in qkv, in out
    int64_t bias_num_runs;
    int kinds; // of rows, the first of enum judge_kind, that are judged
    size_t qkv_bytes, out_bytes, saved_bytes, workspace_bytes, partial_bytes, table_bytes, rotary_bytes;
    floatX *host_qkv, *host_dout; // (rows, row), (rows, out_row)
    float *host_rotary;           // (T, D); NULL: none
    int32_t *document_starts;     // (B, T) of the host; NULL: no keys are hidden
    int window;
    floatX *qkv, *dout, *out, *dqkv;
    void *saved, *workspace;
    float *partial, *rotary;
    int32_t *first_key, *last_query, *starts;
    uint32_t *amax;
};
struct attention_results {
    floatX *out, *dqkv;
    float *partial; // (bias_num_runs, row); NULL: none
    uint32_t amax, out_amax;
};

// Returns zeroed memory of the host, never NULL, which the caller frees. Ends the program where none is left.
static void *judge_memory(size_t bytes) {
    void *const memory = calloc(1, bytes > 0 ? bytes : 1);
    if (!memory)
        fail("no memory to check attention");
    return memory;
}
// Returns `bytes` of floatX in the host's memory, uniform in [-2, 2), which the caller frees; never NULL.
static floatX *judge_numbers(size_t bytes, uint32_t seed) {
    floatX *const x = (floatX *)judge_memory(bytes);
    for (size_t i = 0; i < bytes / sizeof *x; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = to_floatX((float)(seed >> 8) * 0x1p-22f - 2);
    }
    return x;
}
// Returns a copy in the device's memory of `bytes` at `host`, for device_free; NULL for 0 bytes. Waits for the device.
static void *judge_upload(const void *host, size_t bytes, struct device *dev) {
    void *const memory = device_allocate(bytes);
    device_upload(memory, host, bytes, dev);
    device_synchronize(dev);
    return memory;
}
// Returns rope_table's table (T, D), `bytes` long, for heads like the shape's, on the host; the caller frees the table.
static float *judge_rotary(const struct attention_shape *shape, size_t bytes) {
    const struct rope_settings settings = rope_unscaled(shape->head_dim, 10000);
    float *const rotary = (float *)judge_memory(bytes);
    rope_table(rotary, shape->T, &settings);
    return rotary;
}
// Raises *saved and *workspace to the bytes that a backend needs. any_order: backward's bits may differ between calls.
static void judge_raise_sizes(size_t *saved, size_t *workspace, enum attention_backend backend,
                              struct attention_shape shape, bool any_order, struct device *dev) {
    const size_t forward = attention_forward_workspace_bytes(backend, shape, dev);
    const size_t backward = attention_backward_workspace_bytes(backend, shape, any_order, dev);
    *saved = attention_larger(*saved, attention_saved_bytes(backend, shape));
    *workspace = attention_larger(*workspace, attention_larger(forward, backward));
}
// Sets shape->B to 2, and ->T to whole tiles of 128 tokens and 5 tokens more, which are an incomplete tile. All KV
// heads together get about two tiles for each multiprocessor. A sequence gets no more than 16 tiles.
static void judge_choose_size(struct attention_shape *shape, int multiprocessors) {
    enum { B = 2, TILE = 128, REST = 5, MAX_TILES = 16 };
    const int heads = B * shape->num_query_groups, tiles = (2 * multiprocessors + heads - 1) / heads;
    shape->B = B;
    shape->T = (tiles < MAX_TILES ? tiles : MAX_TILES) * TILE + REST;
}
// Makes j->shape hide keys: by a window of T / 3 tokens, and by two documents in each sequence. j->shape, ->rows and
// ->dev must be set. judge_close frees the tables. Waits for the device.
static void judge_hide_keys(struct attention_judge *j) {
    const int T = j->shape.T;
    j->table_bytes = (size_t)j->rows * sizeof(int32_t);
    j->window = T / 3;
    j->document_starts = (int32_t *)judge_memory(j->table_bytes);
    for (int64_t row = 0; row < j->rows; row++) { // the second sequence's documents begin elsewhere
        const int t = (int)(row % T), first = row < T ? T / 4 : T / 2 + 1;
        j->document_starts[row] = t < first ? 0 : first;
    }
    j->starts = (int32_t *)judge_upload(j->document_starts, j->table_bytes, j->dev);
    j->first_key = (int32_t *)device_allocate(j->table_bytes);
    j->last_query = (int32_t *)device_allocate(j->table_bytes);
    attention_spans(j->first_key, j->last_query, j->starts, j->window, j->shape.B, T, j->dev);
    j->shape.first_key = j->first_key;
    j->shape.last_query = j->last_query;
}
// Chooses the sizes of a check, and allocates and fills its operands; judge_close frees them. Waits for the device.
static struct attention_judge judge_open(const struct attention_check *check, int multiprocessors, struct device *dev) {
    struct attention_judge j;
    memset(&j, 0, sizeof j);
    j.dev = dev;
    j.shape = check->shape;
    j.kinds = check->forward_only ? JUDGE_OUT + 1 : JUDGE_KINDS;
    j.dropout.p = check->dropout;
    j.dropout.seed = 1;
    j.dropout.use = DROPOUT_ATTENTION;
    judge_choose_size(&j.shape, multiprocessors);
    j.rows = (int64_t)j.shape.B * j.shape.T;
    j.out_row = (int64_t)j.shape.num_heads * j.shape.head_dim;
    j.row = j.out_row + 2 * (int64_t)j.shape.num_query_groups * j.shape.head_dim;
    j.qkv_bytes = (size_t)(j.rows * j.row) * sizeof(floatX);
    j.out_bytes = (size_t)(j.rows * j.out_row) * sizeof(floatX);
    if (check->hides_keys)
        judge_hide_keys(&j);
    if (check->rotary) {
        j.rotary_bytes = (size_t)j.shape.T * (size_t)j.shape.head_dim * sizeof(float);
        j.host_rotary = judge_rotary(&j.shape, j.rotary_bytes);
        j.rotary = (float *)judge_upload(j.host_rotary, j.rotary_bytes, dev);
    }
    judge_raise_sizes(&j.saved_bytes, &j.workspace_bytes, check->backend, j.shape, check->any_order, dev);
    if (check->simpler != ATTENTION_AUTO)
        judge_raise_sizes(&j.saved_bytes, &j.workspace_bytes, check->simpler, j.shape, check->any_order, dev);
    j.bias_num_runs = check->biases ? attention_bias_num_runs(check->backend, j.shape) : 0;
    j.partial_bytes = (size_t)(j.bias_num_runs * j.row) * sizeof(float);
    j.host_qkv = judge_numbers(j.qkv_bytes, 1);
    j.host_dout = judge_numbers(j.out_bytes, 2);
    j.qkv = (floatX *)judge_upload(j.host_qkv, j.qkv_bytes, dev);
    j.dout = (floatX *)judge_upload(j.host_dout, j.out_bytes, dev);
    j.out = (floatX *)device_allocate(j.out_bytes);
    j.dqkv = (floatX *)device_allocate(j.qkv_bytes);
    j.saved = device_allocate(j.saved_bytes);
    j.workspace = device_allocate(j.workspace_bytes);
    j.partial = (float *)device_allocate(j.partial_bytes);
    j.amax = (uint32_t *)device_allocate(sizeof *j.amax);
    return j;
}
static void judge_close(struct attention_judge *j) {
    void *const device[] = {j->qkv,     j->dout,   j->out,       j->dqkv,       j->saved,  j->workspace,
                            j->partial, j->rotary, j->first_key, j->last_query, j->starts, j->amax};
    const size_t bytes[] = {j->qkv_bytes,   j->out_bytes,       j->out_bytes,     j->qkv_bytes,
                            j->saved_bytes, j->workspace_bytes, j->partial_bytes, j->rotary_bytes,
                            j->table_bytes, j->table_bytes,     j->table_bytes,   sizeof *j->amax};
    for (size_t i = 0; i < sizeof device / sizeof *device; i++)
        device_free(device[i], bytes[i]);
    free(j->host_qkv);
    free(j->host_dout);
    free(j->host_rotary);
    free(j->document_starts);
}

// Fills `bytes` of the device's memory with 0xff, which is NaN in every type of float. Doesn't wait.
static void judge_fill_with_nans(void *memory, size_t bytes, struct device *dev) {
#ifdef TARGET_CUDA
    if (bytes > 0)
        cuda_check(cudaMemsetAsync(memory, 0xff, bytes, dev->stream));
#else
    memset(memory, 0xff, bytes);
#endif
}
// Runs forward and, unless forward_only, backward of `backend`: the check's own, with sums of biases if asked, or the
// simpler one. Returns results in host memory, for results_free. Outputs are NaNs before, so that what is left out or
// read early shows.
static struct attention_results judge_run(struct attention_judge *j, enum attention_backend backend,
                                          const struct attention_check *check) {
    struct attention_results results;
    struct attention_backward_options options;
    const bool judged = backend == check->backend;
    memset(&options, 0, sizeof options);
    results.out = (floatX *)judge_memory(j->out_bytes);
    results.dqkv = (floatX *)judge_memory(j->qkv_bytes);
    results.partial = judged && j->partial ? (float *)judge_memory(j->partial_bytes) : NULL;
    options.rotary = j->rotary;
    options.any_order = check->any_order;
    options.amax = check->amax ? j->amax : NULL;
    options.bias_partial = judged ? j->partial : NULL;
    judge_fill_with_nans(j->out, j->out_bytes, j->dev);
    judge_fill_with_nans(j->dqkv, j->qkv_bytes, j->dev);
    judge_fill_with_nans(j->saved, j->saved_bytes, j->dev);
    judge_fill_with_nans(j->partial, j->partial_bytes, j->dev);
    judge_fill_with_nans(j->workspace, j->workspace_bytes, j->dev);
    device_zero(j->amax, sizeof *j->amax, j->dev);
    attention_forward(j->out, j->saved, j->qkv, backend, j->shape, j->dropout, options.amax, j->workspace, j->dev);
    device_download(&results.out_amax, j->amax, sizeof results.out_amax, j->dev);
    device_zero(j->amax, sizeof *j->amax, j->dev);
    judge_fill_with_nans(j->workspace, j->workspace_bytes, j->dev);
    if (!check->forward_only)
        attention_backward(j->dqkv, j->dout, j->qkv, j->out, j->saved, backend, j->shape, j->dropout, options,
                           j->workspace, j->dev);
    device_download(results.out, j->out, j->out_bytes, j->dev);
    device_download(results.dqkv, j->dqkv, j->qkv_bytes, j->dev);
    device_download(&results.amax, j->amax, sizeof results.amax, j->dev);
    if (results.partial)
        device_download(results.partial, j->partial, j->partial_bytes, j->dev);
    return results;
}
static void results_free(struct attention_results *results) {
    free(results->out);
    free(results->dqkv);
    free(results->partial);
}

// ---- Rows of results ----

static const char *const judge_names[JUDGE_KINDS] = {"output", "dQ", "dK", "dV"};
// The number of heads that a token has in rows of this kind: KV heads for dK and dV, else query heads.
static int judge_heads(const struct attention_judge *j, enum judge_kind kind) {
    return kind == JUDGE_OUT || kind == JUDGE_DQ ? j->shape.num_heads : j->shape.num_query_groups;
}
// Returns where head h of token `row`, b T + t, begins in out or a matrix like qkv. For dK and dV, h is a KV head.
static int64_t judge_row_offset(const struct attention_judge *j, enum judge_kind kind, int64_t row, int h) {
    const int64_t D = j->shape.head_dim, kv = (int64_t)j->shape.num_query_groups * D;
    switch (kind) {
    case JUDGE_OUT: return row * j->out_row + h * D;
    case JUDGE_DQ: return row * j->row + h * D;
    case JUDGE_DK: return row * j->row + j->out_row + h * D;
    case JUDGE_DV: return row * j->row + j->out_row + kv + h * D;
    case JUDGE_KINDS: break;
    }
    return 0;
}
// Returns the row (head_dim) of head h of token `row`, b T + t, in the results. For dK and dV, h is a KV head.
static const floatX *judge_row(const struct attention_judge *j, const struct attention_results *results,
                               enum judge_kind kind, int64_t row, int h) {
    return (kind == JUDGE_OUT ? results->out : results->dqkv) + judge_row_offset(j, kind, row, h);
}
static double judge_sum_of_squares(const floatX *x, int D) {
    double sum = 0;
    for (int i = 0; i < D; i++)
        sum += (double)to_float(x[i]) * (double)to_float(x[i]);
    return sum;
}
// Returns the mean sum of squares of a kind's rows; it is not finite where an element is not.
static double judge_mean_square(const struct attention_judge *j, const struct attention_results *results,
                                enum judge_kind kind) {
    const int heads = judge_heads(j, kind);
    double sum = 0;
    for (int64_t row = 0; row < j->rows; row++)
        for (int h = 0; h < heads; h++)
            sum += judge_sum_of_squares(judge_row(j, results, kind, row, h), j->shape.head_dim);
    return sum / ((double)j->rows * heads);
}

// ---- One row by the host ----

struct judge_scores {
    int first, count; // keys
    double *p, *ds;   // (T) probabilities times dropout's factors; gradients of scaled scores, before the soft cap
    float *factors;   // (T) of dropout
    double out[ATTENTION_MAX_HEAD_DIM];
};
static double judge_dot(const floatX *a, const floatX *b, int D) {
    double sum = 0;
    for (int i = 0; i < D; i++)
        sum += (double)to_float(a[i]) * (double)to_float(b[i]);
    return sum;
}
// Returns arrays for a row of scores in a sequence of T tokens; judge_scores_close frees them.
static struct judge_scores judge_scores_open(int T) {
    struct judge_scores s;
    memset(&s, 0, sizeof s);
    s.p = (double *)judge_memory((size_t)T * sizeof *s.p);
    s.ds = (double *)judge_memory((size_t)T * sizeof *s.ds);
    s.factors = (float *)judge_memory((size_t)T * sizeof *s.factors);
    return s;
}
static void judge_scores_close(struct judge_scores *s) {
    free(s->p);
    free(s->ds);
    free(s->factors);
}
// Sets s->factors of s->count keys, from s->first on, to dropout's for query head h, token t of sequence b, or to 1.
static void judge_factors_of(struct judge_scores *s, const struct attention_judge *j, int b, int t, int h) {
    const uint64_t T = (uint64_t)j->shape.T, head = (uint64_t)b * (uint64_t)j->shape.num_heads + (uint64_t)h;
    if (j->dropout.p > 0)
        dropout_scales(s->factors, j->dropout, (head * T + (uint64_t)t) * T + (uint64_t)s->first, s->count);
    for (int i = 0; i < s->count && !(j->dropout.p > 0); i++)
        s->factors[i] = 1;
}
// Computes into *s (judge_scores_open) query head h of token t of sequence b: probabilities, scores' gradients, output.
static void judge_scores_of(struct judge_scores *s, const struct attention_judge *j, int b, int t, int h) {
    const int D = j->shape.head_dim, group = h / (j->shape.num_heads / j->shape.num_query_groups);
    const int64_t sequence = (int64_t)b * j->shape.T, row = sequence + t;
    const floatX *q = j->host_qkv + judge_row_offset(j, JUDGE_DQ, row, h),
                 *dout = j->host_dout + judge_row_offset(j, JUDGE_OUT, row, h);
    double largest = -INFINITY, sum = 0, mean = 0;
    s->first = j->document_starts ? attention_first_key(j->document_starts, j->window, sequence, t) : 0;
    s->count = t + 1 - s->first;
    memset(s->out, 0, sizeof s->out);
    judge_factors_of(s, j, b, t, h);
    for (int i = 0; i < s->count; i++) {
        const double score =
            (double)j->shape.scale *
            judge_dot(q, j->host_qkv + judge_row_offset(j, JUDGE_DK, sequence + s->first + i, group), D);
        const double cap = (double)j->shape.softcap;
        s->p[i] = cap > 0 ? cap * tanh(score / cap) : score;
        s->ds[i] = cap > 0 ? 1 - s->p[i] / cap * (s->p[i] / cap) : 1;
        largest = fmax(largest, s->p[i]);
    }
    for (int i = 0; i < s->count; i++)
        sum += s->p[i] = exp(s->p[i] - largest);
    for (int i = 0; i < s->count; i++) {
        const floatX *v = j->host_qkv + judge_row_offset(j, JUDGE_DV, sequence + s->first + i, group);
        s->p[i] /= sum;
        s->ds[i] *= s->p[i];
        s->p[i] *= (double)s->factors[i];
        mean += s->p[i] * judge_dot(dout, v, D);
        for (int d = 0; d < D; d++)
            s->out[d] += s->p[i] * (double)to_float(v[d]);
    }
    for (int i = 0; i < s->count; i++) {
        const floatX *v = j->host_qkv + judge_row_offset(j, JUDGE_DV, sequence + s->first + i, group);
        s->ds[i] *= (double)s->factors[i] * judge_dot(dout, v, D) - mean;
    }
}
// Undoes RoPE on x (head_dim), the gradient of a row at position t. j->host_rotary is not NULL.
static void judge_undo_rope(double *x, const struct attention_judge *j, int t) {
    const int half = j->shape.head_dim / 2;
    const float *const cosines = j->host_rotary + (int64_t)t * j->shape.head_dim, *const sines = cosines + half;
    for (int i = 0; i < half; i++) {
        const double a = x[i], b = x[i + half], c = (double)cosines[i], s = (double)sines[i];
        x[i] = a * c + b * s;
        x[i + half] = b * c - a * s;
    }
}
// right (ATTENTION_MAX_HEAD_DIM) = a row by the host's sums, then zeros. For dK and dV, h is a KV head. Overwrites *s.
static void judge_row_by_host(double *right, const struct attention_judge *j, struct judge_scores *s,
                              enum judge_kind kind, int b, int t, int h) {
    const int D = j->shape.head_dim, heads_a_group = j->shape.num_heads / j->shape.num_query_groups;
    const int64_t sequence = (int64_t)b * j->shape.T;
    const double scale = (double)j->shape.scale;
    memset(right, 0, ATTENTION_MAX_HEAD_DIM * sizeof *right);
    switch (kind) {
    case JUDGE_OUT:
        judge_scores_of(s, j, b, t, h);
        memcpy(right, s->out, sizeof s->out);
        return;
    case JUDGE_DQ:
        judge_scores_of(s, j, b, t, h);
        for (int i = 0; i < s->count; i++)
            for (int d = 0; d < D; d++)
                right[d] +=
                    scale * s->ds[i] *
                    (double)to_float(
                        j->host_qkv[judge_row_offset(j, JUDGE_DK, sequence + s->first + i, h / heads_a_group) + d]);
        break;
    case JUDGE_DK:
    case JUDGE_DV:
        for (int query = t; query < j->shape.T; query++)
            for (int head = h * heads_a_group; head < (h + 1) * heads_a_group; head++) {
                judge_scores_of(s, j, b, query, head);
                if (s->first > t)
                    continue;
                const floatX *q = j->host_qkv + judge_row_offset(j, JUDGE_DQ, sequence + query, head);
                const floatX *dout = j->host_dout + judge_row_offset(j, JUDGE_OUT, sequence + query, head);
                for (int d = 0; d < D; d++)
                    right[d] += kind == JUDGE_DK ? scale * s->ds[t - s->first] * (double)to_float(q[d])
                                                 : s->p[t - s->first] * (double)to_float(dout[d]);
            }
        break;
    case JUDGE_KINDS: break;
    }
    if (j->host_rotary && kind != JUDGE_DV)
        judge_undo_rope(right, j, t);
}

// ---- Comparisons: each writes what is wrong; an empty text where nothing is ----

// Returns the largest relative distance at which a row is right. It is larger with dropout.
static double judge_allowed_distance(const struct attention_judge *j) {
    return j->dropout.p > 0 ? ATTENTION_CHECK_DROPPED : ATTENTION_CHECK_DISTANCE;
}
// Returns what a row's squared error is divided by: the row's square or, if larger, the mean square of the kind's rows.
// For dK and dV, of which some rows are short, only a share of the mean counts.
static double judge_yardstick(enum judge_kind kind, double square, double mean) {
    const double share = ATTENTION_CHECK_SHORT * ATTENTION_CHECK_SHORT;
    switch (kind) {
    case JUDGE_OUT:
    case JUDGE_DQ: return fmax(square, mean);
    case JUDGE_DK:
    case JUDGE_DV: return fmax(square, share * mean);
    case JUDGE_KINDS: break;
    }
    return square;
}
// Returns the squared distance of a row from the right one (D each).
static double judge_apart(const double *right, const floatX *row, int D) {
    double sum = 0;
    for (int i = 0; i < D; i++)
        sum += (right[i] - (double)to_float(row[i])) * (right[i] - (double)to_float(row[i]));
    return sum;
}
struct judge_sample {
    int b, t, h;
    double right[ATTENTION_MAX_HEAD_DIM], square;
};
// Compares a backend's rows with the host's (samples). Writes what is wrong to reason (size bytes), empty before.
// Raises *largest to the largest relative distance. The yardstick for output and dQ is at most the largest sample.
static void judge_samples(char *reason, size_t size, const struct attention_judge *j,
                          const struct attention_results *results, enum judge_kind kind,
                          const struct judge_sample *samples, int count, double *largest) {
    double mean = judge_mean_square(j, results, kind), most = 0;
    if (!isfinite(mean)) {
        snprintf(reason, size, "its %s is wrong: it is not finite", judge_names[kind]);
        return;
    }
    for (int i = 0; i < count; i++)
        most = fmax(most, samples[i].square);
    if (kind == JUDGE_OUT || kind == JUDGE_DQ) // samples of dK and dV are from the end, where rows are short
        mean = fmin(mean, most);
    for (int i = 0; i < count && !*reason; i++) {
        const struct judge_sample *s = &samples[i];
        const floatX *row = judge_row(j, results, kind, (int64_t)s->b * j->shape.T + s->t, s->h);
        const double apart = judge_apart(s->right, row, j->shape.head_dim);
        const double distance = sqrt(apart / judge_yardstick(kind, s->square, mean));
        *largest = fmax(*largest, distance);
        if (!(distance <= judge_allowed_distance(j)))
            snprintf(reason, size, "its %s is wrong: head %d of token %d is %.2g from sums in double, relative",
                     judge_names[kind], s->h, s->t, distance);
    }
}
// Compares rows near tiles' borders with the host's sums. reason (size bytes, "" before), largest: as in judge_samples.
static void judge_by_host(char *reason, size_t size, const struct attention_judge *j,
                          const struct attention_results *results, double *largest) {
    enum { TOKENS = 10, KV_FROM = 7, MAX = 2 * TOKENS };
    const int T = j->shape.T;
    // Around the borders of tiles of 64 and of 128; of dK and dV, from KV_FROM on, around the last border.
    const int tokens[TOKENS] = {0, 1, 63, 64, 127, 128, T / 2, T - 6, T - 5, T - 1};
    struct judge_scores s = judge_scores_open(T);
    struct judge_sample *const samples = (struct judge_sample *)judge_memory(MAX * sizeof *samples);
    for (int k = 0; k < j->kinds && !*reason; k++) {
        const enum judge_kind kind = (enum judge_kind)k;
        const int ends[] = {0, judge_heads(j, kind) - 1};
        int count = 0;
        for (int i = kind == JUDGE_DK || kind == JUDGE_DV ? KV_FROM : 0; i < TOKENS; i++)
            for (int b = 0; b < j->shape.B; b++) {
                struct judge_sample *const sample = &samples[count++];
                sample->b = b;
                sample->t = tokens[i];
                sample->h = ends[(i + b) % 2];
                sample->square = 0;
                judge_row_by_host(sample->right, j, &s, kind, b, sample->t, sample->h);
                for (int d = 0; d < j->shape.head_dim; d++)
                    sample->square += sample->right[d] * sample->right[d];
            }
        judge_samples(reason, size, j, results, kind, samples, count, largest);
    }
    free(samples);
    judge_scores_close(&s);
}
// Compares every row with the simpler backend's (theirs), one by one and all together. Writes what is wrong to `reason`
// (size bytes), empty before. name: the simpler backend's. Raises *largest to a row's largest relative distance.
static void judge_by_simpler(char *reason, size_t size, const struct attention_judge *j,
                             const struct attention_results *ours, const struct attention_results *theirs,
                             const char *name, double *largest) {
    const int D = j->shape.head_dim;
    for (int k = 0; k < j->kinds && !*reason; k++) {
        const enum judge_kind kind = (enum judge_kind)k;
        const int heads = judge_heads(j, kind);
        const double mean = judge_mean_square(j, theirs, kind);
        double all = 0;
        for (int64_t row = 0; row < j->rows; row++)
            for (int h = 0; h < heads && !*reason; h++) {
                const floatX *a = judge_row(j, ours, kind, row, h), *b = judge_row(j, theirs, kind, row, h);
                double apart = 0;
                for (int d = 0; d < D; d++) {
                    const double difference = (double)to_float(a[d]) - (double)to_float(b[d]);
                    apart += difference * difference;
                }
                all += apart;
                const double distance = sqrt(apart / judge_yardstick(kind, judge_sum_of_squares(b, D), mean));
                *largest = fmax(*largest, distance);
                if (!(distance <= judge_allowed_distance(j)))
                    snprintf(reason, size, "its %s is wrong: head %d of token %d is %.2g from that of %s, relative",
                             judge_names[kind], h, (int)(row % j->shape.T), distance, name);
            }
        const double distance = sqrt(all / ((double)j->rows * heads * mean));
        if (!*reason && !(distance <= ATTENTION_CHECK_ALL))
            snprintf(reason, size, "its %s is wrong: all rows together are %.2g from those of %s, relative",
                     judge_names[kind], distance, name);
    }
}
// Writes to reason (size bytes) which pass differs in a bit between two runs: forward or, unless any_order, backward.
static void judge_by_repeat(char *reason, size_t size, const struct attention_judge *j,
                            const struct attention_results *one, const struct attention_results *other,
                            bool any_order) {
    if (memcmp(one->out, other->out, j->out_bytes) != 0)
        snprintf(reason, size, "its forward, computed again, gives other bits");
    else if (!any_order && memcmp(one->dqkv, other->dqkv, j->qkv_bytes) != 0)
        snprintf(reason, size, "its backward, computed again, gives other bits");
}
// Checks what the backend sums up from its results: the largest magnitudes of output and dqkv, if takes_amax, and the
// sums of dqkv's columns, if results->partial is not NULL. Writes what is wrong to `reason` (size bytes), empty before.
static void judge_by_sums(char *reason, size_t size, const struct attention_judge *j,
                          const struct attention_results *results, bool takes_amax) {
    uint32_t largest = 0, of_out = 0;
    for (int64_t i = 0; i < j->rows * j->row && takes_amax; i++)
        largest = amax_with(largest, results->dqkv[i]);
    for (int64_t i = 0; i < j->rows * j->out_row && takes_amax; i++)
        of_out = amax_with(of_out, results->out[i]);
    if (takes_amax && (largest != results->amax || of_out != results->out_amax))
        snprintf(reason, size, "the largest magnitude of its %s is wrong",
                 of_out != results->out_amax ? "output" : "gradients");
    for (int64_t column = 0; column < j->row && results->partial && !*reason; column++) {
        double right = 0, size_of_sum = 0, sum = 0;
        for (int64_t row = 0; row < j->rows; row++) {
            const double x = (double)to_float(results->dqkv[row * j->row + column]);
            right += x;
            size_of_sum += fabs(x);
        }
        for (int64_t chunk = 0; chunk < j->bias_num_runs; chunk++)
            sum += (double)results->partial[chunk * j->row + column];
        if (!(fabs(sum - right) <= ATTENTION_CHECK_SUM * size_of_sum))
            snprintf(reason, size, "the gradient of its biases is wrong: column %d sums to %.4g, not %.4g", (int)column,
                     sum, right);
    }
}

// The ways to judge a backend: by a second run and the host's sums, or by the simpler backend, which may be wrong.
enum judge_stage { JUDGE_BY_ITSELF, JUDGE_BY_SIMPLER };
// Checks a backend on this GPU. Writes what is wrong to `reason` (size bytes), or "" if nothing is. JUDGE_BY_SIMPLER
// writes "", too, without a right simpler backend. Raises *largest to the largest relative distance.
static void check_attention(char *reason, size_t size, const struct attention_check *check, enum judge_stage stage,
                            int multiprocessors, double *largest, struct device *dev) {
    reason[0] = '\0';
    if (stage == JUDGE_BY_SIMPLER && check->simpler == ATTENTION_AUTO)
        return;
    struct attention_judge j = judge_open(check, multiprocessors, dev);
    struct attention_results ours = judge_run(&j, check->backend, check);
    struct attention_results other = judge_run(&j, stage == JUDGE_BY_ITSELF ? check->backend : check->simpler, check);
    char not_right[256] = "";
    double unused = 0;
    switch (stage) {
    case JUDGE_BY_ITSELF:
        judge_by_repeat(reason, size, &j, &ours, &other, check->any_order);
        if (!*reason)
            judge_by_host(reason, size, &j, &ours, largest);
        if (!*reason)
            judge_by_sums(reason, size, &j, &ours, check->amax);
        break;
    case JUDGE_BY_SIMPLER:
        judge_by_host(not_right, sizeof not_right, &j, &other, &unused);
        if (!*not_right)
            judge_by_simpler(reason, size, &j, &ours, &other, attention_name(check->simpler), largest);
        break;
    }
    results_free(&ours);
    results_free(&other);
    judge_close(&j);
}
