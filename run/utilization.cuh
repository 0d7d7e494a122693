// Model flops utilization (MFU): the model's flops per token, and the machine's peak.
#pragma once
#include "gpt.cuh" // struct gpt

// Floating-point operations per token in forward and backward: a multiply-add counts as two, backward as twice the
// forward, recomputation as nothing. Matmuls: 6 W, where W are the weights that they read, without the padding of the
// head; 4 W of frozen weights, 2 W where backward has ended above. Attention's two products, of L layers with H
// heads of size D at sequence length T, where backward goes through all of them:
//   done  12 L H D times the keys that a token sees on average: (T + 1) / 2, itself included, or what a window leaves
//         of them; what documents hide is counted as seen
//   palm  12 L H D T: each token with all T, as PaLM counts (Chowdhery et al. 2022, arXiv 2204.02311, appendix B) and
//         nanoGPT does too; it exceeds what a causal kernel computes, up to twice where T is long
struct flops_per_token {
    double done, palm;
};
struct layer_flops {
    double matmuls, attention;
};
// Returns a layer's flops per token in forward, by the table of activations (recompute.cuh), as predicted times do.
static struct layer_flops layer_flops_of(const struct layer_shape *s) {
    struct layer_flops flops = {0, activation_row(ACT_ATT, s).flops_per_token};
    for (int id = 0; id < ACT_COUNT; id++)
        if (activation_present(s) & ~BIT(ATT) & 1u << id)
            flops.matmuls += activation_row((enum activation_id)id, s).flops_per_token;
    return flops;
}
// Returns the flops per token of the head's matmuls, forward and backward. padded: with the vocabulary's padding.
static double head_flops(const struct gpt *m, bool padded) {
    double flops = 0;
    for (int i = 0; i < m->table.num_tensors + m->table.num_frozen; i++) {
        const struct tensor *t = &m->table.tensors[i];
        const bool is_head = t->unit == UNIT_HEAD || (m->shape.tied && t->parameter == PARAM_WTE);
        if (is_head && t->cols > 1)
            flops += (4 + 2 * !t->frozen) * (double)(padded ? t->rows : t->visible_rows) * t->cols;
    }
    return flops;
}
// Returns the flops per token of the whole model's forward and backward; done and palm count attention differently.
static struct flops_per_token gpt_flops_per_token(const struct gpt *m) {
    const struct layer_shape *s = &m->shape.layer;
    const struct layer_flops layer = layer_flops_of(s);
    const int L = m->shape.L, below = m->lowest_trained < 0 ? 0 : m->lowest_trained; // layers without a backward
    double matmuls = head_flops(m, false);
    matmuls += (2.0 * L - below) * layer.matmuls; // forward, and the gradients of inputs
    for (int i = 0; i < m->table.num_tensors + m->table.num_frozen; i++) {
        const struct tensor *t = &m->table.tensors[i];
        if (t->layer >= 0 && tensor_decays(t)) { // an adapter's matmuls are in no activation's row
            const int beside_rows = parameter_is_adapter(t->parameter) ? 2 + 2 * (t->layer >= below) : 0;
            matmuls += (beside_rows + 2 * !t->frozen) * (double)t->count;
        }
    }
    struct layer_shape all = *s; // where a query sees each key
    all.keys = s->T;
    const double layers = 3.0 * L - 2 * below; // backward is twice the forward
    const struct flops_per_token flops = {matmuls + layers * layer.attention,
                                          matmuls + layers * layer_flops_of(&all).attention};
    return flops;
}

// Returns the bytes of device memory for a matmul of n x n matrices: operands, result and workspace.
static size_t measured_matmul_bytes(int n, struct device *dev) {
    return 3 * (size_t)n * n * sizeof(floatX) + matmul_workspace_bytes(n, n, n, dev);
}
// Fills operands (count), on the device, with noise, a piece at a time to save host memory. Waits for the device.
static void measure_fill(floatX *operands, int64_t count, uint64_t seed, struct device *dev) {
    const int64_t PIECE = 1 << 16;
    floatX *noise = (floatX *)host_allocate((size_t)PIECE * sizeof *noise, dev);
    for (int64_t first = 0; first < count; first += PIECE) {
        const int64_t n = count - first < PIECE ? count - first : PIECE;
        for (int64_t i = 0; i < n; i++)
            noise[i] = to_floatX(random_uniform(seed, 1, (uint64_t)(first + i)) - 0.5f);
        device_upload(operands + first, noise, (size_t)n * sizeof *noise, dev);
        device_synchronize(dev);
    }
    host_free(noise);
}
// Measures the flop/s of the largest square matmul that fits into `bytes` of device memory, which it overwrites; 0 if
// none fits. It is MFU's peak where no data sheet has one, and a lower bound: other work or little memory may slow it,
// and attention may be faster. Operands are noise, as zeros are faster. Waits for the device.
static double measure_matmul(void *memory, size_t bytes, uint64_t seed, struct device *dev) {
    int n = DEVICE_PEAK_MATMUL;
    while (n > 128 && measured_matmul_bytes(n, dev) > bytes)
        n -= 128;
    if (measured_matmul_bytes(n, dev) > bytes)
        return 0;
    floatX *out = (floatX *)memory, *in = out + (size_t)n * n, *weight = in + (size_t)n * n;
    measure_fill(in, 2 * (int64_t)n * n, seed, dev); // `weight` lies after `in`
    double best = 0;
    for (int i = 0; i < 6; i++) {
        const double begin = seconds_now();
        for (int k = 0; k < DEVICE_PEAK_REPEATS; k++)
            matmul_forward(out, in, weight, NULL, n, n, n, weight + (size_t)n * n, dev);
        device_synchronize(dev);
        const double rate = DEVICE_PEAK_REPEATS * 2.0 * n * n * n / (seconds_now() - begin);
        best = rate > best ? rate : best;
    }
    return best;
}
// Returns matmuls' peak flop/s; 0 if the activations arena, which it overwrites, is too small. Waits for the device.
static double gpt_measure_peak(struct gpt *m) {
    return measure_matmul(m->timeline.arenas.base[ARENA_ACTIVATIONS], m->timeline.arenas.bytes[ARENA_ACTIVATIONS],
                          m->config.training.seed, m->dev);
}
