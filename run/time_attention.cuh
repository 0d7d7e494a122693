// Times attention's backends: forward and backward of a layer, in turn, so that the GPU's clocks favor none.
#pragma once
#include "model/timeline.cuh"      // seconds_now
#include "run/check_attention.cuh" // judge_numbers, judge_rotary, judge_raise_sizes

struct attention_timing {
    struct attention_shape shape; // without tables: the causal mask only
    bool rotary, any_order;       // as attention_backward_options has them
    bool candidates[ATTENTION_BACKENDS_COUNT];
    double seconds[ATTENTION_BACKENDS_COUNT]; // of forward and backward, the least of all rounds
};

struct timed_attention {
    floatX *qkv, *dqkv, *out, *dout;
    float *rotary; // (T, D); NULL: none
    void *saved, *workspace;
    size_t qkv_bytes, out_bytes, rotary_bytes, saved_bytes, workspace_bytes;
};

// Sets the sizes of operands that are large enough for each timed candidate. Zeroes all else in *a.
static void timed_sizes(struct timed_attention *a, const struct attention_timing *timing, struct device *dev) {
    const struct attention_shape s = timing->shape;
    const size_t rows = (size_t)s.B * (size_t)s.T, dim = (size_t)s.head_dim * sizeof(floatX);
    memset(a, 0, sizeof *a);
    a->out_bytes = rows * (size_t)s.num_heads * dim;
    a->qkv_bytes = a->out_bytes + rows * 2 * (size_t)s.num_query_groups * dim;
    a->rotary_bytes = timing->rotary ? (size_t)s.T * (size_t)s.head_dim * sizeof(float) : 0;
    for (int i = 0; i < ATTENTION_BACKENDS_COUNT; i++)
        if (timing->candidates[i])
            judge_raise_sizes(&a->saved_bytes, &a->workspace_bytes, (enum attention_backend)i, s, timing->any_order,
                              dev);
}
static size_t timed_bytes(const struct timed_attention *a) {
    return 2 * a->qkv_bytes + 2 * a->out_bytes + a->rotary_bytes + a->saved_bytes + a->workspace_bytes;
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
    return a;
}
static void timed_close(struct timed_attention *a) {
    void *const memory[] = {a->qkv, a->dout, a->out, a->dqkv, a->rotary, a->saved, a->workspace};
    const size_t bytes[] = {a->qkv_bytes,    a->out_bytes,   a->out_bytes,      a->qkv_bytes,
                            a->rotary_bytes, a->saved_bytes, a->workspace_bytes};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        device_free(memory[i], bytes[i]);
}

// Returns the seconds of one forward and backward of a backend, the mean of `launches`. Waits for the device.
static double timed_launches(struct timed_attention *a, const struct attention_timing *timing,
                             enum attention_backend backend, int launches, struct device *dev) {
    struct attention_backward_options options;
    struct dropout dropout;
    memset(&dropout, 0, sizeof dropout);
    memset(&options, 0, sizeof options);
    options.rotary = a->rotary;
    options.any_order = timing->any_order;
    device_synchronize(dev);
    const double begin = seconds_now();
    for (int i = 0; i < launches; i++) {
        attention_forward(a->out, a->saved, a->qkv, backend, timing->shape, dropout, NULL, a->workspace, dev);
        attention_backward(a->dqkv, a->dout, a->qkv, a->out, a->saved, backend, timing->shape, dropout, options,
                           a->workspace, dev);
    }
    device_synchronize(dev);
    return (seconds_now() - begin) / launches;
}

// The number of flops of forward and backward; the mask hides half of all pairs of tokens.
static double timed_flops(const struct attention_shape *s) {
    return 7.0 * s->B * s->num_heads * s->T * s->T * s->head_dim;
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
    while (timed_flops(&timing->shape) > most_flops && (timing->shape.B > 1 || timing->shape.T % 256 == 0))
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
