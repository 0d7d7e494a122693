// Measures the speed of the ops other than matmuls and attention, at the sizes of GPT-2 124M, B4 T1024. Their bound is
// memory bandwidth, so the last column compares with a triad, which runs in turn with the op, since other work on the
// machine changes both. When an op is timed, the caches hold the triad's arrays, which are larger than any cache;
// `warm` is the time with what the op itself left in the caches. Figures above 100 % are right: the triad also reads
// the lines that it writes, which does not count, and what an op adds to may be in the caches. An argument restricts
// the list to names that contain it.
#include "kernels/activation.cuh"
#include "kernels/adamw.cuh"
#include "kernels/device_memory.cuh"
#include "kernels/embedding.cuh"
#include "kernels/loss.cuh"
#include "kernels/norm.cuh"
#include "kernels/qk_norm.cuh"
#include "kernels/rope_table.cuh" // rope_table
#include "kernels/random.cuh"
#include "kernels/rope.cuh"
#include <omp.h>    // omp_get_wtime, omp_get_max_threads
#include <stdio.h>  // printf
#include <stdlib.h> // aligned_alloc, qsort

enum { B = 4, T = 1024, C = 768, F = 3072, V = 50257, VP = 50304, REPEATS = 9 };
static const int64_t N = B * T, PARAMETERS = 124 * 1000 * 1000;

struct buffers {
    struct device device;
    floatX *logits; // (N, VP); also the memory of the MLP's activations
    floatX *hidden_in, *hidden_out;
    floatX *qkv, *x, *delta, *out, *weight, *bias, *wte, *wpe, *params;
    float *mean, *rstd, *dweight, *dbias, *losses, *grads, *m, *v, *table;
    uint16_t *remainder;
    void *grads_bf16, *m_8bit, *v_8bit, *m_bf16, *v_bf16;
    void *workspace;
    int32_t *tokens;
    struct dropout dropout;
    double sink;
};

static void *fresh(size_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (memory == NULL) {
        fprintf(stderr, "bench_ops: no %zu bytes of memory\n", bytes);
        exit(1);
    }
    return memory;
}
static floatX *random_floats(int64_t n, float scale) {
    floatX *x = (floatX *)fresh((size_t)n * sizeof *x);
#pragma omp parallel for schedule(static)
    for (int64_t begin = 0; begin < n; begin += 1024) {
        float values[1024];
        const int count = n - begin < 1024 ? (int)(n - begin) : 1024;
        random_normal(values, count, scale, 1, (uint64_t)scale, (uint64_t)begin);
        for (int i = 0; i < count; i++)
            x[begin + i] = to_floatX(values[i]);
    }
    return x;
}
static float *random_fp32(int64_t n, float scale) {
    float *x = (float *)fresh((size_t)n * sizeof *x);
    random_normal(x, n, scale, 2, 3, 0);
    return x;
}
static void *encoded(const float *values, enum state_format format) {
    void *state = fresh(state_bytes(format, PARAMETERS));
    state_encode(state, values, format, PARAMETERS);
    return state;
}
static struct buffers buffers_create(void) {
    struct buffers b;
    memset(&b, 0, sizeof b);
    b.device.threads = omp_get_max_threads();
    b.logits = random_floats(N * VP, 2);
    b.hidden_in = random_floats(N * 2 * F, 2);
    b.hidden_out = random_floats(N * 2 * F, 2);
    b.qkv = random_floats(N * 3 * C, 1);
    b.x = random_floats(N * C, 1);
    b.delta = random_floats(N * C, 1);
    b.out = random_floats(N * C, 1);
    b.weight = random_floats(C, 1);
    b.bias = random_floats(C, 1);
    b.wte = random_floats((int64_t)VP * C, 1);
    b.wpe = random_floats((int64_t)T * C, 1);
    b.params = random_floats(PARAMETERS, 1);
    b.mean = random_fp32(N, 1);
    b.rstd = random_fp32(N * 2 * 12, 1);
    b.dweight = random_fp32(C, 1);
    b.dbias = random_fp32(C, 1);
    b.losses = random_fp32(N, 1);
    b.grads = random_fp32(PARAMETERS, 1);
    b.m = random_fp32(PARAMETERS, 1);
    b.v = random_fp32(PARAMETERS, 1);
#pragma omp parallel for
    for (int64_t i = 0; i < PARAMETERS; i++)
        b.v[i] *= b.v[i];
    b.remainder = (uint16_t *)encoded(b.grads, FORMAT_BF16); // any bits will do
    b.grads_bf16 = encoded(b.grads, FORMAT_BF16);
    b.m_bf16 = encoded(b.m, FORMAT_BF16);
    b.v_bf16 = encoded(b.v, FORMAT_BF16);
    b.m_8bit = encoded(b.m, FORMAT_8BIT);
    b.v_8bit = encoded(b.v, FORMAT_8BIT_ROOT);
    b.table = (float *)fresh((size_t)T * 64 * sizeof(float));
    const struct rope_settings rope = rope_unscaled(64, 10000);
    rope_table(b.table, T, &rope);
    b.workspace = fresh(norm_backward_workspace_bytes(N, C, &b.device)); // QK-norm's, for twice C columns, is no larger
    b.tokens = (int32_t *)fresh((size_t)N * sizeof *b.tokens);
    for (int64_t i = 0; i < N; i++)
        b.tokens[i] = (int32_t)(random_uniform(7, 8, (uint64_t)i) * V);
    return b;
}

static const struct norm_options layernorm_options = {NORM_LAYERNORM, false, 1e-5f},
                                 rmsnorm_options = {NORM_RMSNORM, false, 1e-5f};
static void bench_residual(struct buffers *b) {
    residual_forward(b->out, b->x, b->delta, N, C, 1, b->dropout, &b->device);
}
static void bench_layernorm(struct buffers *b) {
    norm_forward(b->delta, b->mean, b->rstd, b->out, b->weight, b->bias, N, C, layernorm_options, &b->device);
}
static void bench_rmsnorm(struct buffers *b) {
    norm_forward(b->delta, NULL, b->rstd, b->out, b->weight, NULL, N, C, rmsnorm_options, &b->device);
}
static void bench_residual_layernorm(struct buffers *b) {
    bench_residual(b);
    bench_layernorm(b);
}
static void bench_norm_backward(struct buffers *b) {
    norm_backward(b->x, NULL, b->dweight, b->dbias, b->x, b->delta, b->out, b->weight, b->mean, b->rstd, N, C, true,
                  layernorm_options, b->workspace, &b->device);
}
static void bench_rmsnorm_backward(struct buffers *b) {
    norm_backward(b->x, NULL, b->dweight, NULL, b->x, b->delta, b->out, b->weight, NULL, b->rstd, N, C, true,
                  rmsnorm_options, b->workspace, &b->device);
}
static void bench_residual_backward(struct buffers *b) {
    const struct dropout d = {0.1f, 1, 2, 3, DROPOUT_MLP_PROJECTION, NULL};
    residual_backward(b->out, NULL, b->delta, N, C, 1, d, &b->device);
}
static const struct token_positions in_order = {NULL, NULL};
static const struct qk_norm_shape by_head = {12, 12, 64, false, false, 1e-5f},
                                  full_width = {12, 12, 64, true, false, 1e-5f};
static void qk_norm(struct buffers *b, struct qk_norm_shape shape) {
    const struct qk_norm_rotary none = {NULL, {NULL, NULL}, T};
    qk_norm_forward(b->hidden_out, b->rstd, b->qkv, b->weight, b->bias, N, shape, none, &b->device);
}
static void qk_norm_rotary(struct buffers *b, struct qk_norm_shape shape) {
    const struct qk_norm_rotary rotary = {b->table, {NULL, NULL}, T};
    qk_norm_forward(b->hidden_out, b->rstd, b->qkv, b->weight, b->bias, N, shape, rotary, &b->device);
}
static void qk_norm_gradient(struct buffers *b, struct qk_norm_shape shape) {
    qk_norm_backward(b->hidden_out, b->dweight, b->dbias, b->qkv, b->weight, b->bias, b->rstd, N, shape, true,
                     b->workspace, &b->device);
}
static void bench_qk_norm(struct buffers *b) { qk_norm(b, by_head); }
static void bench_qk_norm_rotary(struct buffers *b) { qk_norm_rotary(b, by_head); }
static void bench_qk_norm_then_rope(struct buffers *b) {
    qk_norm(b, by_head);
    rope_forward(b->hidden_out, b->table, in_order, B, T, 12, 12, 64, &b->device);
}
static void bench_qk_norm_backward(struct buffers *b) { qk_norm_gradient(b, by_head); }
static void bench_qk_norm_full(struct buffers *b) { qk_norm(b, full_width); }
static void bench_qk_norm_full_backward(struct buffers *b) { qk_norm_gradient(b, full_width); }
static void bench_gelu(struct buffers *b) { gelu_forward(b->hidden_out, b->hidden_in, N * F, NULL, &b->device); }
static void bench_gelu_backward(struct buffers *b) {
    gelu_backward(b->hidden_out, NULL, b->hidden_out, b->hidden_in, N, F, NULL, &b->device);
}
static void bench_gelu_erf(struct buffers *b) {
    gelu_erf_forward(b->hidden_out, b->hidden_in, N * F, NULL, &b->device);
}
static void bench_gelu_erf_backward(struct buffers *b) {
    gelu_erf_backward(b->hidden_out, NULL, b->hidden_out, b->hidden_in, N, F, NULL, &b->device);
}
static void bench_geglu(struct buffers *b) { geglu_forward(b->hidden_out, b->hidden_in, N, F, NULL, &b->device); }
static void bench_geglu_backward(struct buffers *b) {
    geglu_backward(b->hidden_out, NULL, b->logits, b->hidden_in, N, F, NULL, &b->device);
}
static void bench_swiglu(struct buffers *b) { swiglu_forward(b->hidden_out, b->hidden_in, N, F, NULL, &b->device); }
static void bench_swiglu_backward(struct buffers *b) {
    swiglu_backward(b->hidden_out, NULL, b->logits, b->hidden_in, N, F, NULL, &b->device);
}
static void bench_rope(struct buffers *b) {
    rope_forward(b->hidden_in, b->table, in_order, B, T, 12, 12, 64, &b->device);
}
static void bench_rope_backward(struct buffers *b) {
    rope_backward(b->hidden_in, b->table, in_order, B, T, 12, 12, 64, NULL, &b->device);
}
static void bench_embedding(struct buffers *b) {
    embedding_forward(b->out, b->tokens, b->wte, b->wpe, in_order, B, T, C, 1, b->dropout, &b->device);
}
static void bench_embedding_backward(struct buffers *b) {
    const struct table_gradient dwte = {b->grads, VP, true}, dwpe = {b->grads + (int64_t)VP * C, T, true};
    embedding_backward(dwte, dwpe, b->out, b->tokens, in_order, B, T, C, 1, b->dropout, NULL, &b->device);
}
// Runs the cross entropy. The logits become gradients in the first run, and are small numbers from then on, which
// changes no timing.
static void cross_entropy_of(struct buffers *b, float scale, float softcap) {
    const struct logit_transform transform = {scale, softcap};
    cross_entropy(b->losses, b->logits, b->tokens, 1e-3f, 0, N, V, VP, transform, true, &b->device);
}
static void bench_cross_entropy(struct buffers *b) { cross_entropy_of(b, 1, 0); }
static void bench_scaled_cross_entropy(struct buffers *b) { cross_entropy_of(b, 0.125f, 0); }
static void bench_capped_cross_entropy(struct buffers *b) { cross_entropy_of(b, 1, 30); }
static struct adamw_range fp32_range(struct buffers *b) {
    struct adamw_range r;
    memset(&r, 0, sizeof r);
    r.params = b->params;
    r.remainder = sizeof(floatX) == 2 ? b->remainder : NULL;
    r.grads = b->grads;
    r.m = b->m;
    r.v = b->v;
    r.n = PARAMETERS;
    r.grads_format = r.m_format = r.v_format = FORMAT_FP32;
    return r;
}
static void adamw(struct buffers *b, struct adamw_range r) {
    const struct adamw adamw = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 10, 1.0f, 1};
    const struct flat_tensor tensor = {0, PARAMETERS, NULL, true};
    const struct flat_tensors tensors = {&tensor, 1, false};
    adamw_update(r, tensors, adamw, NULL, &b->device);
}
static void bench_adamw(struct buffers *b) { adamw(b, fp32_range(b)); }
static void adamw_of(struct buffers *b, void *m, enum state_format m_format, void *v, enum state_format v_format) {
    struct adamw_range r = fp32_range(b);
    r.remainder = NULL;
    r.grads = b->grads_bf16;
    r.m = m;
    r.v = v;
    r.grads_format = FORMAT_BF16;
    r.m_format = m_format;
    r.v_format = v_format;
    adamw(b, r);
}
static void bench_adamw_bf16(struct buffers *b) { adamw_of(b, b->m_bf16, FORMAT_BF16, b->v_bf16, FORMAT_BF16); }
static void bench_adamw_8bit(struct buffers *b) { adamw_of(b, b->m_8bit, FORMAT_8BIT, b->v_8bit, FORMAT_8BIT_ROOT); }
static void add_to(struct buffers *b, void *store, enum state_format format) {
    struct rounding r;
    memset(&r, 0, sizeof r);
    r.use = ROUNDING_GRADIENTS;
    const struct flat_tensor tensor = {0, PARAMETERS, NULL, true};
    const struct flat_tensors tensors = {&tensor, 1, false};
    add_gradients(store, format, b->grads, 0, PARAMETERS, tensors, true, r, &b->device);
}
static void bench_add_gradients(struct buffers *b) { add_to(b, b->m, FORMAT_FP32); }
static void bench_add_gradients_bf16(struct buffers *b) { add_to(b, b->grads_bf16, FORMAT_BF16); }
static void bench_zero(struct buffers *b) { device_zero(b->grads, PARAMETERS * sizeof *b->grads, &b->device); }
static void bench_sum_of_squares(struct buffers *b) {
    double sums[1 << 10], total;
    sum_of_squares(&total, b->grads, FORMAT_FP32, PARAMETERS, false, sums, &b->device);
    b->sink += total;
}
static void bench_dropout(struct buffers *b) {
    const struct dropout d = {0.1f, 1, 2, 3, DROPOUT_MLP_PROJECTION};
    residual_forward(b->out, b->x, b->delta, N, C, 1, d, &b->device);
}
// Elements of the triad a = b + s c: arrays that no cache holds. 12 bytes an element count, as in STREAM.
enum { TRIAD_ELEMENTS = 1 << 24 };
static void bench_triad(struct buffers *b) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < TRIAD_ELEMENTS; i++)
        b->grads[i] = b->m[i] + 0.5f * b->v[i];
}

static int ascending(const void *a, const void *b) { return (*(const double *)a > *(const double *)b) * 2 - 1; }
static double timed_ms(void (*op)(struct buffers *), struct buffers *b) {
    const double begin = omp_get_wtime();
    op(b);
    return 1e3 * (omp_get_wtime() - begin);
}
struct medians {
    double ms, warm_ms, triad_rate;
};
static double median(double *x) {
    qsort(x, REPEATS, sizeof *x, ascending);
    return x[REPEATS / 2];
}
static struct medians measure(void (*op)(struct buffers *), struct buffers *b) {
    double ms[REPEATS], warm_ms[REPEATS], triad_ms[REPEATS];
    for (int i = 0; i < REPEATS; i++) {
        triad_ms[i] = timed_ms(bench_triad, b);
        ms[i] = timed_ms(op, b);
        warm_ms[i] = timed_ms(op, b);
    }
    const struct medians result = {median(ms), median(warm_ms), 12.0 * TRIAD_ELEMENTS / median(triad_ms) * 1e-6};
    return result;
}

int main(int argc, char **argv) {
    struct buffers b = buffers_create();
    const double X = sizeof(floatX), hidden = (double)N * F, rows = (double)N * C, n = (double)PARAMETERS;
    const struct {
        const char *name;
        void (*op)(struct buffers *);
        double bytes; // each operand counts once, read or written
    } ops[] = {
        {"residual", bench_residual, 3 * rows * X},
        {"residual with dropout", bench_dropout, 3 * rows * X},
        {"LayerNorm", bench_layernorm, 2 * rows * X},
        {"RMSNorm", bench_rmsnorm, 2 * rows * X},
        {"residual + LayerNorm", bench_residual_layernorm, 5 * rows * X},
        {"LayerNorm backward", bench_norm_backward, 4 * rows * X},
        {"RMSNorm backward", bench_rmsnorm_backward, 4 * rows * X},
        {"residual backward", bench_residual_backward, 2 * rows * X},
        {"QK-norm", bench_qk_norm, 6 * rows * X},
        {"QK-norm with RoPE", bench_qk_norm_rotary, 6 * rows * X},
        {"QK-norm, then RoPE", bench_qk_norm_then_rope, 10 * rows * X},
        {"QK-norm backward", bench_qk_norm_backward, 6 * rows * X},
        {"QK-norm, full width", bench_qk_norm_full, 6 * rows * X},
        {"QK-norm, full, backward", bench_qk_norm_full_backward, 6 * rows * X},
        {"GELU", bench_gelu, 2 * hidden * X},
        {"GELU backward", bench_gelu_backward, 3 * hidden * X},
        {"GELU by erf", bench_gelu_erf, 2 * hidden * X},
        {"GELU by erf backward", bench_gelu_erf_backward, 3 * hidden * X},
        {"SwiGLU", bench_swiglu, 3 * hidden * X},
        {"SwiGLU backward", bench_swiglu_backward, 5 * hidden * X},
        {"GeGLU", bench_geglu, 3 * hidden * X},
        {"GeGLU backward", bench_geglu_backward, 5 * hidden * X},
        {"RoPE", bench_rope, 4 * rows * X},
        {"RoPE backward", bench_rope_backward, 4 * rows * X},
        {"embedding", bench_embedding, 2 * rows * X},
        {"embedding backward", bench_embedding_backward, rows * (X + 8)},
        {"softmax to dlogits", bench_cross_entropy, 2.0 * (double)N * VP * X},
        {"scaled softmax", bench_scaled_cross_entropy, 2.0 * (double)N * VP * X},
        {"capped softmax", bench_capped_cross_entropy, 2.0 * (double)N * VP * X},
        {"sum of squares", bench_sum_of_squares, 4 * n},
        {"AdamW", bench_adamw, (20 + 8) * n}, // 4: of an fp32 parameter, or of a bf16 one and its remainder
        {"AdamW, all bf16", bench_adamw_bf16, (2 + 2 * X + 8) * n},
        {"AdamW, 8-bit moments", bench_adamw_8bit, (2 + 2 * X + 4 * 132 / 128.0) * n},
        {"add gradients", bench_add_gradients, 12 * n},
        {"add gradients, bf16", bench_add_gradients_bf16, 8 * n},
        {"zero the gradients", bench_zero, 4 * n},
    };
    printf("%s, %d threads\n", FLOATX_NAME, b.device.threads);
    printf("%-22s %8s %8s %8s %7s %7s %9s\n", "", "MB", "ms", "warm ms", "GB/s", "triad", "of triad");
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++) {
        if (argc > 1 && strstr(ops[i].name, argv[1]) == NULL)
            continue;
        const struct medians m = measure(ops[i].op, &b);
        const double rate = ops[i].bytes / m.ms * 1e-6;
        printf("%-22s %8.1f %8.3f %8.3f %7.1f %7.1f %8.0f%%\n", ops[i].name, ops[i].bytes * 1e-6, m.ms, m.warm_ms, rate,
               m.triad_rate, 100 * rate / m.triad_rate);
    }
    return b.sink < 0;
}
