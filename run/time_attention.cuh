// Times attention's backends: forward and backward of a layer, in turn, so that the GPU's clocks favor none. They do
// what the run fuses into them or, where a backend can't, what the run then does after them.
#pragma once
#include "kernels/column_sums.cuh" // column_sums
#include "kernels/matmul/gemm.cuh" // dbias_sums, dbias_workspace_bytes
#include "model/timeline.cuh"      // seconds_now
#include "run/check_attention.cuh" // judge_numbers, judge_rotary, judge_raise_sizes

enum { TIMED_DOCUMENTS = 4 };                    // of a sequence, where they hide keys from each other
enum { MASK_PLAIN, MASK_WINDOWED, TIMED_MASKS }; // of layers without and with a window
struct attention_timing {
    struct attention_shape shape; // without tables
    bool rotary, any_order;       // as attention_backward_options has them
    bool out_amax, gradient_amax; // merges these, for FP8
    bool biases;                  // sums dqkv's columns: biases' gradients
    bool documents;               // hide each other's keys
    int window, layers[TIMED_MASKS];
    bool candidates[ATTENTION_BACKENDS_COUNT];
    double seconds[ATTENTION_BACKENDS_COUNT]; // of a mean layer's forward and backward, the least of all rounds
};

struct timed_attention {
    floatX *qkv, *dqkv, *out, *dout;
    float *rotary;                    // (T, D); NULL: none
    float *partial, *dbias;           // (runs, row) or dbias_workspace_bytes, (row); NULL: no sums
    int32_t *tables[2 * TIMED_MASKS]; // a mask's first_key and last_query (B, T); NULL: no keys are hidden
    uint32_t *amax;
    void *saved, *workspace;
    size_t qkv_bytes, out_bytes, rotary_bytes, partial_bytes, dbias_bytes, table_bytes, saved_bytes, workspace_bytes;
};

// The number of elements of a token in qkv.
static int timed_row(const struct attention_shape *s) { return (s->num_heads + 2 * s->num_query_groups) * s->head_dim; }
// Returns the window of a mask's layers; 0: none, or one that hides no keys.
static int timed_window(const struct attention_timing *timing, int mask) {
    return mask == MASK_WINDOWED && timing->window < timing->shape.T ? timing->window : 0;
}
static bool timed_hides(const struct attention_timing *timing, int mask) {
    return timing->layers[mask] > 0 && (timing->documents || timed_window(timing, mask) > 0);
}
// Sets the sizes of operands that are large enough for each timed candidate. Zeroes all else in *a.
static void timed_sizes(struct timed_attention *a, const struct attention_timing *timing, struct device *dev) {
    const struct attention_shape s = timing->shape;
    const int row = timed_row(&s);
    const size_t rows = (size_t)s.B * (size_t)s.T;
    memset(a, 0, sizeof *a);
    a->out_bytes = rows * (size_t)(s.num_heads * s.head_dim) * sizeof(floatX);
    a->qkv_bytes = rows * (size_t)row * sizeof(floatX);
    a->rotary_bytes = timing->rotary ? (size_t)s.T * (size_t)s.head_dim * sizeof(float) : 0;
    a->table_bytes = rows * sizeof(int32_t);
    a->dbias_bytes = timing->biases ? (size_t)row * sizeof(float) : 0;
    a->partial_bytes = timing->biases ? dbias_workspace_bytes((int64_t)rows, row, dev) : 0;
    for (int i = 0; i < ATTENTION_BACKENDS_COUNT; i++)
        if (timing->candidates[i]) {
            const enum attention_backend backend = (enum attention_backend)i;
            judge_raise_sizes(&a->saved_bytes, &a->workspace_bytes, backend, s, timing->any_order, dev);
            a->partial_bytes =
                attention_larger(a->partial_bytes, (size_t)attention_bias_num_runs(backend, s) * a->dbias_bytes);
        }
}
static size_t timed_bytes(const struct timed_attention *a) {
    return 2 * a->qkv_bytes + 2 * a->out_bytes + a->rotary_bytes + a->partial_bytes + a->dbias_bytes +
           2 * TIMED_MASKS * a->table_bytes + a->saved_bytes + a->workspace_bytes;
}
// Returns `bytes` of random numbers in device memory, for device_free; zeros would run faster. Waits for the device.
static floatX *timed_numbers(size_t bytes, struct device *dev) {
    const size_t block_bytes = 1 << 20, first = bytes < block_bytes ? bytes : block_bytes;
    floatX *const numbers = (floatX *)device_allocate(bytes), *const block = judge_numbers(first, 1);
    device_upload(numbers, block, first, dev);
    for (size_t done = first, some; done < bytes; done += some) {
        some = bytes - done < done ? bytes - done : done;
        device_copy((char *)numbers + done, numbers, some, dev);
    }
    device_synchronize(dev);
    free(block);
    return numbers;
}
// Returns RoPE's table (T, D) in `bytes` of device memory, which device_free frees. Waits for the device.
static float *timed_rotary(const struct attention_timing *timing, size_t bytes, struct device *dev) {
    float *const host = judge_rotary(&timing->shape, bytes), *const rotary = (float *)judge_upload(host, bytes, dev);
    free(host);
    return rotary;
}
// Allocates and fills the tables of the masks that hide keys. Waits for the device.
static void timed_open_tables(struct timed_attention *a, const struct attention_timing *timing, struct device *dev) {
    const int B = timing->shape.B, T = timing->shape.T;
    const int length = timing->documents ? T / TIMED_DOCUMENTS + 1 : T; // borders are within tiles
    int32_t *const host = (int32_t *)judge_memory(a->table_bytes);
    for (int64_t i = 0; i < (int64_t)B * T; i++)
        host[i] = (int32_t)(i % T) / length * length;
    int32_t *const starts = (int32_t *)judge_upload(host, a->table_bytes, dev);
    for (int i = 0; i < 2 * TIMED_MASKS; i++)
        a->tables[i] = timed_hides(timing, i / 2) ? (int32_t *)device_allocate(a->table_bytes) : NULL;
    for (int mask = 0; mask < TIMED_MASKS; mask++)
        if (a->tables[2 * mask])
            attention_spans(a->tables[2 * mask], a->tables[2 * mask + 1], starts, timed_window(timing, mask), B, T,
                            dev);
    device_synchronize(dev);
    device_free(starts, a->table_bytes);
    free(host);
}
// Allocates the operands, sized for each candidate, and fills the inputs; timed_close frees all. Waits for the device.
static struct timed_attention timed_open(const struct attention_timing *timing, struct device *dev) {
    struct timed_attention a;
    timed_sizes(&a, timing, dev);
    a.qkv = timed_numbers(a.qkv_bytes, dev);
    a.dout = timed_numbers(a.out_bytes, dev);
    a.out = (floatX *)device_allocate(a.out_bytes);
    a.dqkv = (floatX *)device_allocate(a.qkv_bytes);
    a.rotary = timing->rotary ? timed_rotary(timing, a.rotary_bytes, dev) : NULL;
    a.saved = device_allocate(a.saved_bytes);
    a.workspace = device_allocate(a.workspace_bytes);
    a.partial = (float *)device_allocate(a.partial_bytes);
    a.dbias = (float *)device_allocate(a.dbias_bytes);
    a.amax = (uint32_t *)device_allocate(sizeof *a.amax);
    device_zero(a.amax, sizeof *a.amax, dev);
    timed_open_tables(&a, timing, dev);
    return a;
}
static void timed_close(struct timed_attention *a) {
    void *const memory[] = {a->qkv,   a->dout,      a->out,     a->dqkv,  a->rotary,
                            a->saved, a->workspace, a->partial, a->dbias, a->amax};
    const size_t bytes[] = {a->qkv_bytes,   a->out_bytes,       a->out_bytes,     a->qkv_bytes,   a->rotary_bytes,
                            a->saved_bytes, a->workspace_bytes, a->partial_bytes, a->dbias_bytes, sizeof *a->amax};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        device_free(memory[i], bytes[i]);
    for (int i = 0; i < 2 * TIMED_MASKS; i++)
        device_free(a->tables[i], a->table_bytes);
}

// Enqueues a layer's forward and backward by a backend. shape: with the layer's tables.
static void timed_layer(struct timed_attention *a, const struct attention_timing *timing,
                        enum attention_backend backend, struct attention_shape shape, struct device *dev) {
    const int row = timed_row(&shape);
    const int64_t runs = timing->biases ? attention_bias_num_runs(backend, shape) : 0;
    struct attention_backward_options options;
    struct dropout dropout;
    memset(&dropout, 0, sizeof dropout);
    memset(&options, 0, sizeof options);
    options.rotary = a->rotary;
    options.any_order = timing->any_order;
    options.amax = timing->gradient_amax ? a->amax : NULL;
    options.bias_partial = runs > 0 ? a->partial : NULL;
    attention_forward(a->out, a->saved, a->qkv, backend, shape, dropout, timing->out_amax ? a->amax : NULL,
                      a->workspace, dev);
    attention_backward(a->dqkv, a->dout, a->qkv, a->out, a->saved, backend, shape, dropout, options, a->workspace, dev);
    if (runs > 0)
        column_sums(a->dbias, a->partial, runs, row, false, dev);
    else if (timing->biases) // what the run does, unless its product has a faster epilogue
        dbias_sums(a->dbias, a->dqkv, (int64_t)shape.B * shape.T, row, false, a->partial, dev);
}
// Returns the seconds of a mean layer's forward and backward by a backend, over `launches` of each mask. Waits.
static double timed_launches(struct timed_attention *a, const struct attention_timing *timing,
                             enum attention_backend backend, int launches, struct device *dev) {
    double seconds = 0;
    for (int mask = 0; mask < TIMED_MASKS; mask++)
        if (timing->layers[mask] > 0) {
            struct attention_shape shape = timing->shape;
            shape.first_key = a->tables[2 * mask];
            shape.last_query = a->tables[2 * mask + 1];
            device_synchronize(dev);
            const double begin = seconds_now();
            for (int i = 0; i < launches; i++)
                timed_layer(a, timing, backend, shape, dev);
            device_synchronize(dev);
            seconds += timing->layers[mask] * (seconds_now() - begin) / launches;
        }
    return seconds / (timing->layers[MASK_PLAIN] + timing->layers[MASK_WINDOWED]);
}

// The number of flops of a forward and backward of each mask, by the pairs of tokens that it leaves visible.
static double timed_flops(const struct attention_timing *timing) {
    const struct attention_shape *s = &timing->shape;
    const double documents = timing->documents ? TIMED_DOCUMENTS : 1, length = s->T / documents;
    double pairs = 0;
    for (int mask = 0; mask < TIMED_MASKS; mask++) {
        const double window = timed_window(timing, mask) > 0 ? fmin(timing->window, length) : length;
        pairs += timing->layers[mask] > 0 ? documents * window * (length - window / 2) : 0;
    }
    return 14.0 * s->B * s->num_heads * s->head_dim * pairs;
}
// Times the candidates into timing->seconds. First halves timing->shape.B while operands exceed most_bytes, then B and
// T while the flops exceed 5e13. Calls `begins` before it enqueues a backend's work, so that a fault has a culprit.
static void time_attention(struct attention_timing *timing, size_t most_bytes,
                           void (*begins)(enum attention_backend backend), struct device *dev) {
    enum { ROUNDS = 5, LAUNCHES = 4 };
    const double most_seconds = 0.3;  // after which no round begins
    const double long_seconds = 0.01; // of a launch that is timed once a round
    const double most_flops = 5e13;   // a sixth of a second at 300 TFLOP/s
    struct timed_attention a;
    for (timed_sizes(&a, timing, dev); timed_bytes(&a) > most_bytes && timing->shape.B > 1;
         timed_sizes(&a, timing, dev))
        timing->shape.B /= 2;
    while (timed_flops(timing) > most_flops && (timing->shape.B > 1 || timing->shape.T % 256 == 0))
        *(timing->shape.B > 1 ? &timing->shape.B : &timing->shape.T) /= 2;
    a = timed_open(timing, dev);
    const double begin = seconds_now();
    for (int round = 0; round <= ROUNDS && (round < 2 || seconds_now() - begin < most_seconds); round++)
        for (int i = 0; i < ATTENTION_BACKENDS_COUNT; i++)
            if (timing->candidates[i]) {
                begins((enum attention_backend)i);
                // the first round loads the kernels
                const int launches = round == 0 || timing->seconds[i] > long_seconds ? 1 : LAUNCHES;
                const double seconds = timed_launches(&a, timing, (enum attention_backend)i, launches, dev);
                if (round < 2 || seconds < timing->seconds[i])
                    timing->seconds[i] = seconds;
            }
    timed_close(&a);
}
