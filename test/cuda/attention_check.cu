// Flash attention on the device against a naive loop in double precision, and its speed.
//
//   attention_check            every check          attention_check --quick    small shapes, for compute-sanitizer
//   attention_check --bench    TFLOP/s, one line a shape: "ours direction D H Hkv B T milliseconds TFLOP/s"
//
// Compiled by nvcc for a GPU, or by the host compiler against test/emu/ (CUDA_EMULATED), where shapes are smaller.
// The tolerance is FlashAttention's rule: with `plain` the same computation whose every result is rounded to bf16,
//   max|x - reference| <= 2 max|plain - reference| + 2 max|(reference + 0.3 - 0.3) - reference|,
// the last sum in bf16: an error of twice what any bf16 implementation makes, plus the grain of bf16 at the magnitude
// 0.3. Beside it the error of the whole tensor in the 2-norm, since a maximum alone would let a few wrong small rows
// pass: P, dS and the results are each rounded once (2^-9 at most, relative), delta comes from a rounded O, and dP -
// delta cancels, so that gradients get 2^-6, O 2^-7. Fewer than 1 in 2^5 such errors add up in phase.
#include "kernels/attention_sm80.cuh" // flash_forward, flash_backward
#include <math.h>                     // sqrt, fabs, exp, log
#include <stdio.h>                    // printf
#include <stdlib.h>                   // malloc, qsort
#include <string.h>                   // memset, memcmp, strcmp

#if defined(CUDA_EMULATED)
static const bool EMULATED = true;
#else
static const bool EMULATED = false;
#endif

struct check_case {
    int D, B, T, H, Hkv;
    float q_scale, k_scale, v_scale;
    float dropout;
};

// --- Data ---------------------------------------------------------------------------------------------------------

// splitmix64; a sum of uniforms is near enough to a normal distribution.
static float random_value(uint64_t *state) {
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        uint64_t z = (*state += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        sum += (float)((z ^ (z >> 31)) >> 40) * 0x1p-24f - 0.5f;
    }
    return sum * 1.7320508f;
}

// Device memory of n elements between two stretches of NaN, where nothing may be written and from where no NaN may
// come.
enum { GUARD_BYTES = 4096 };
struct guarded {
    char *memory;
    size_t bytes;
};
static struct guarded guarded_new(size_t bytes) {
    struct guarded result = {NULL, bytes};
    cuda_check(cudaMalloc((void **)&result.memory, bytes + 2 * GUARD_BYTES));
    cuda_check(cudaMemset(result.memory, 0xff, bytes + 2 * GUARD_BYTES));
    return result;
}
static void *guarded_data(struct guarded g) { return g.memory + GUARD_BYTES; }
static bool guarded_intact(struct guarded g) {
    unsigned char guards[2 * GUARD_BYTES];
    cuda_check(cudaMemcpy(guards, g.memory, GUARD_BYTES, cudaMemcpyDeviceToHost));
    cuda_check(cudaMemcpy(guards + GUARD_BYTES, g.memory + GUARD_BYTES + g.bytes, GUARD_BYTES, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 2 * GUARD_BYTES; i++)
        if (guards[i] != 0xff)
            return false;
    return true;
}

// --- The reference ------------------------------------------------------------------------------------------------

static double rounded(double x, bool plain) { return plain ? bf16_to_float(bf16_from_float((float)x)) : x; }

struct gradients {
    double *out, *lse, *dqkv; // laid out as the tensors
};

static double dot(const double *x, const double *y, int n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++)
        sum += x[i] * y[i];
    return sum;
}
static void add_scaled(double *to, double factor, const double *x, int n) {
#pragma omp simd
    for (int i = 0; i < n; i++)
        to[i] += factor * x[i];
}

// One query: its output, lse and dq, and what it adds to the head's dk and dv (T, D). s, dp: T numbers each.
static void reference_row(struct check_case c, struct dropout dropout, int64_t head, int i, const double *q,
                          const double *k, const double *v, int64_t stride, const double *dout, double *out,
                          double *lse, double *dq, double *dk, double *dv, double *s, double *dp, double *mask,
                          bool plain) {
    const double scale = 1 / sqrt((double)c.D);
    double maximum = -INFINITY, sum = 0, delta = 0;
    for (int j = 0; j <= i; j++) {
        s[j] = rounded(rounded(dot(q, k + j * stride, c.D), plain) * scale, plain);
        maximum = s[j] > maximum ? s[j] : maximum;
    }
    for (int j = 0; j <= i; j++)
        sum += exp(s[j] - maximum);
    *lse = maximum + log(sum);
    for (int j = 0; j <= i; j++) {
        mask[j] = c.dropout > 0 ? dropout_scale(dropout, (uint64_t)((head * c.T + i) * c.T + j)) : 1;
        s[j] = rounded(exp(s[j] - *lse), plain);
        add_scaled(out, rounded(s[j] * mask[j], plain), v + j * stride, c.D);
        dp[j] = rounded(dot(dout, v + j * stride, c.D), plain) * mask[j];
        delta += s[j] * dp[j];
    }
    for (int j = 0; j <= i; j++) {
        const double ds = rounded(s[j] * (dp[j] - delta), plain) * scale;
        add_scaled(dq, ds, k + j * stride, c.D);
        add_scaled(dk + (int64_t)j * c.D, ds, q, c.D);
        add_scaled(dv + (int64_t)j * c.D, rounded(s[j] * mask[j], plain), dout, c.D);
    }
}

static void reference(struct gradients result, struct check_case c, struct dropout dropout, const double *qkv,
                      const double *dout, bool plain) {
    const int64_t stride = (int64_t)(c.H + 2 * c.Hkv) * c.D, out_stride = (int64_t)c.H * c.D, T = c.T, D = c.D;
    const int64_t heads = (int64_t)c.B * c.H;
    double *dkv = (double *)calloc((size_t)(heads * 2 * T * D), sizeof *dkv); // of each query head
    memset(result.out, 0, sizeof(double) * (size_t)(c.B * T * out_stride));
    memset(result.dqkv, 0, sizeof(double) * (size_t)(c.B * T * stride));
#pragma omp parallel for schedule(dynamic)
    for (int64_t head = 0; head < heads; head++) {
        const int64_t b = head / c.H, h = head % c.H, group = h / (c.H / c.Hkv);
        double *row = (double *)malloc(sizeof *row * (size_t)(3 * T)), *dk = dkv + head * 2 * T * D, *dv = dk + T * D;
        const double *k = qkv + b * T * stride + (c.H + group) * D, *v = k + c.Hkv * D;
        for (int i = 0; i < T; i++) {
            const int64_t at = (b * T + i) * stride + h * D, out_at = (b * T + i) * out_stride + h * D;
            reference_row(c, dropout, head, i, qkv + at, k, v, stride, dout + out_at, result.out + out_at,
                          result.lse + head * T + i, result.dqkv + at, dk, dv, row, row + T, row + 2 * T, plain);
        }
        free(row);
    }
    for (int64_t head = 0; head < heads; head++)
        for (int part = 0; part < 2; part++)
            for (int64_t i = 0; i < T; i++)
                add_scaled(result.dqkv + (head / c.H * T + i) * stride +
                               (c.H + part * c.Hkv + head % c.H / (c.H / c.Hkv)) * D,
                           1, dkv + ((head * 2 + part) * T + i) * D, c.D);
    free(dkv);
    for (int64_t i = 0; plain && i < c.B * T * out_stride; i++)
        result.out[i] = rounded(result.out[i], true);
    for (int64_t i = 0; plain && i < c.B * T * stride; i++)
        result.dqkv[i] = rounded(result.dqkv[i], true);
}

// --- Running ------------------------------------------------------------------------------------------------------

struct run {
    struct attention_shape shape;
    struct dropout dropout;
    struct guarded qkv, dout, out, lse, dqkv, workspace;
};
static struct run run_new(struct check_case c, const bf16 *qkv, const bf16 *dout) {
    const size_t tokens = (size_t)c.B * c.T, qkv_bytes = tokens * (size_t)((c.H + 2 * c.Hkv) * c.D) * sizeof(bf16);
    const size_t out_bytes = tokens * (size_t)(c.H * c.D) * sizeof(bf16);
    struct run run;
    memset(&run, 0, sizeof run);
    run.shape.B = c.B;
    run.shape.T = c.T;
    run.shape.num_heads = c.H;
    run.shape.num_query_groups = c.Hkv;
    run.shape.head_dim = c.D;
    run.shape.scale = (float)(1 / sqrt((double)c.D));
    run.dropout.p = c.dropout;
    run.dropout.seed = 0x123456789abcdefu;
    run.dropout.step = 7;
    run.dropout.layer = 3;
    run.dropout.use = DROPOUT_ATTENTION;
    run.qkv = guarded_new(qkv_bytes);
    run.dout = guarded_new(out_bytes);
    run.out = guarded_new(out_bytes);
    run.lse = guarded_new(tokens * (size_t)c.H * sizeof(float));
    run.dqkv = guarded_new(qkv_bytes);
    run.workspace = guarded_new(flash_backward_workspace_bytes(run.shape));
    cuda_check(cudaMemcpy(guarded_data(run.qkv), qkv, qkv_bytes, cudaMemcpyHostToDevice));
    cuda_check(cudaMemcpy(guarded_data(run.dout), dout, out_bytes, cudaMemcpyHostToDevice));
    return run;
}
static void run_forward(struct run *run, struct device *dev) {
    flash_forward((bf16 *)guarded_data(run->out), (float *)guarded_data(run->lse), (const bf16 *)guarded_data(run->qkv),
                  run->shape, run->dropout, NULL, dev);
}
static void run_backward(struct run *run, struct device *dev) {
    flash_backward((bf16 *)guarded_data(run->dqkv), (const bf16 *)guarded_data(run->dout),
                   (const bf16 *)guarded_data(run->qkv), (const bf16 *)guarded_data(run->out),
                   (const float *)guarded_data(run->lse), run->shape, run->dropout, guarded_data(run->workspace), dev);
}
// Forward and backward into memory that holds NaN; true where nothing was written beside the results.
static bool run_both(struct run *run, struct device *dev) {
    cuda_check(cudaMemset(guarded_data(run->out), 0xff, run->out.bytes));
    cuda_check(cudaMemset(guarded_data(run->lse), 0xff, run->lse.bytes));
    cuda_check(cudaMemset(guarded_data(run->dqkv), 0xff, run->dqkv.bytes));
    cuda_check(cudaMemset(guarded_data(run->workspace), 0xff, run->workspace.bytes));
    run_forward(run, dev);
    run_backward(run, dev);
    cuda_check(cudaDeviceSynchronize());
    cuda_check(cudaGetLastError());
    return guarded_intact(run->out) && guarded_intact(run->lse) && guarded_intact(run->dqkv) &&
           guarded_intact(run->workspace) && guarded_intact(run->qkv) && guarded_intact(run->dout);
}
static void run_free(struct run *run) {
    struct guarded *all[6] = {&run->qkv, &run->dout, &run->out, &run->lse, &run->dqkv, &run->workspace};
    for (int i = 0; i < 6; i++)
        cuda_check(cudaFree(all[i]->memory));
}
static void *download(struct guarded from) {
    void *host = malloc(from.bytes);
    cuda_check(cudaMemcpy(host, guarded_data(from), from.bytes, cudaMemcpyDeviceToHost));
    return host;
}

// --- Comparing ----------------------------------------------------------------------------------------------------

struct comparison {
    double error, allowed, norm_error; // error / allowed: maxima of FlashAttention's rule
};
static void compare(struct comparison *worst, const bf16 *x, const double *exact, const double *plain, int64_t n) {
    double error = 0, plain_error = 0, grain = 0, difference = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        const double e = fabs(bf16_to_float(x[i]) - exact[i]), p = fabs(plain[i] - exact[i]);
        const double r = rounded(exact[i], true), g = fabs(rounded(rounded(r + 0.3, true) - 0.3, true) - r);
        error = e <= error ? error : e; // a NaN stays
        plain_error = p > plain_error ? p : plain_error;
        grain = g > grain ? g : grain;
        difference += e * e;
        norm += exact[i] * exact[i];
    }
    worst->error = error;
    worst->allowed = 2 * plain_error + 2 * grain;
    worst->norm_error = norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

// Splits a packed gradient into its three parts, so that each is compared by its own magnitude.
static int64_t take_part(bf16 *x, double *exact, double *plain, struct check_case c, int part, const bf16 *from,
                         const double *from_exact, const double *from_plain) {
    const int begin = part == 0 ? 0 : (c.H + (part - 1) * c.Hkv) * c.D, columns = (part == 0 ? c.H : c.Hkv) * c.D;
    const int stride = (c.H + 2 * c.Hkv) * c.D;
    int64_t n = 0;
    for (int64_t row = 0; row < (int64_t)c.B * c.T; row++)
        for (int i = begin; i < begin + columns; i++, n++) {
            x[n] = from[row * stride + i];
            exact[n] = from_exact[row * stride + i];
            plain[n] = from_plain[row * stride + i];
        }
    return n;
}

// T = 1: P = 1 whatever Q and K are, so that dQ = dK = 0 but for rounding: dP - delta, both of the order of |dO| |V|
// sqrt(D).
static bool accept(struct comparison x, double norm_allowed, bool single_key) {
    return x.error <= x.allowed && (single_key || x.norm_error <= norm_allowed);
}

static bool check(struct check_case c, struct device *dev) {
    const int64_t n_qkv = (int64_t)c.B * c.T * (c.H + 2 * c.Hkv) * c.D, n_out = (int64_t)c.B * c.T * c.H * c.D;
    const int64_t n_lse = (int64_t)c.B * c.H * c.T;
    uint64_t state = (uint64_t)c.T * 1000003 + (uint64_t)c.D * 31 + (uint64_t)c.H;
    bf16 *qkv = (bf16 *)malloc(sizeof *qkv * (size_t)n_qkv), *dout = (bf16 *)malloc(sizeof *dout * (size_t)n_out);
    double *qkv_exact = (double *)malloc(sizeof(double) * (size_t)n_qkv);
    double *dout_exact = (double *)malloc(sizeof(double) * (size_t)n_out);
    for (int64_t i = 0; i < n_qkv; i++) {
        const int column = (int)(i % ((c.H + 2 * c.Hkv) * c.D)) / c.D;
        const float scale = column < c.H ? c.q_scale : column < c.H + c.Hkv ? c.k_scale : c.v_scale;
        qkv[i] = bf16_from_float(scale * random_value(&state));
        qkv_exact[i] = bf16_to_float(qkv[i]);
    }
    for (int64_t i = 0; i < n_out; i++) {
        dout[i] = bf16_from_float(random_value(&state));
        dout_exact[i] = bf16_to_float(dout[i]);
    }
    struct run run = run_new(c, qkv, dout);
    const bool intact = run_both(&run, dev);
    bf16 *out = (bf16 *)download(run.out), *dqkv = (bf16 *)download(run.dqkv);
    float *lse = (float *)download(run.lse);

    struct gradients g[2]; // exact, plain
    for (int i = 0; i < 2; i++) {
        g[i].out = (double *)malloc(sizeof(double) * (size_t)n_out);
        g[i].lse = (double *)malloc(sizeof(double) * (size_t)n_lse);
        g[i].dqkv = (double *)malloc(sizeof(double) * (size_t)n_qkv);
        reference(g[i], c, run.dropout, qkv_exact, dout_exact, i == 1);
    }
    struct comparison o, d[3];
    compare(&o, out, g[0].out, g[1].out, n_out);
    bf16 *x = (bf16 *)malloc(sizeof *x * (size_t)n_qkv);
    double *exact = (double *)malloc(sizeof(double) * (size_t)n_qkv),
           *plain = (double *)malloc(sizeof(double) * (size_t)n_qkv);
    for (int part = 0; part < 3; part++)
        compare(&d[part], x, exact, plain, take_part(x, exact, plain, c, part, dqkv, g[0].dqkv, g[1].dqkv));
    double lse_error = 0, lse_size = 1; // fp32 sums of D products of bf16, and one logarithm
    for (int64_t i = 0; i < n_lse; i++) {
        const double e = fabs(lse[i] - g[0].lse[i]);
        lse_error = e <= lse_error ? lse_error : e;
        lse_size = fabs(g[0].lse[i]) > lse_size ? fabs(g[0].lse[i]) : lse_size;
    }
    const bool passed = intact && accept(o, 0x1p-7, false) && accept(d[0], 0x1p-6, c.T == 1) &&
                        accept(d[1], 0x1p-6, c.T == 1) && accept(d[2], 0x1p-6, false) &&
                        lse_error <= 0x1p-18 * lse_size;
    printf("%s D=%-3d B=%d T=%-4d H=%d/%d%s%s error/allowed o %.2f dq %.2f dk %.2f dv %.2f, norm o %.1e dq %.1e dk "
           "%.1e dv "
           "%.1e, lse %.1e%s\n",
           passed ? "ok  " : "FAIL", c.D, c.B, c.T, c.H, c.Hkv, c.q_scale != 1 ? " large" : "",
           c.dropout > 0 ? " dropout" : "", o.error / o.allowed, d[0].error / d[0].allowed, d[1].error / d[1].allowed,
           d[2].error / d[2].allowed, o.norm_error, d[0].norm_error, d[1].norm_error, d[2].norm_error,
           lse_error / lse_size, intact ? "" : ", WROTE OUTSIDE");
    fflush(stdout);
    run_free(&run);
    for (int i = 0; i < 2; i++) {
        free(g[i].out);
        free(g[i].lse);
        free(g[i].dqkv);
    }
    free(x);
    free(exact);
    free(plain);
    free(out);
    free(dqkv);
    free(lse);
    free(qkv);
    free(dout);
    free(qkv_exact);
    free(dout_exact);
    return passed;
}

// The same bits every time, whatever the order in which blocks run.
static bool check_repeats(struct check_case c, int repeats, struct device *dev) {
    const size_t n_qkv = (size_t)c.B * c.T * (c.H + 2 * c.Hkv) * c.D, n_out = (size_t)c.B * c.T * c.H * c.D;
    uint64_t state = 5;
    bf16 *data = (bf16 *)malloc(sizeof *data * (n_qkv + n_out));
    for (size_t i = 0; i < n_qkv + n_out; i++)
        data[i] = bf16_from_float(random_value(&state));
    struct run run = run_new(c, data, data + n_qkv);
    void *first[3] = {NULL, NULL, NULL};
    bool same = true;
    for (int repeat = 0; repeat < repeats; repeat++) {
        run_both(&run, dev);
        const struct guarded results[3] = {run.out, run.lse, run.dqkv};
        for (int i = 0; i < 3; i++) {
            void *now = download(results[i]);
            if (repeat == 0) {
                first[i] = now;
                continue;
            }
            same = same && memcmp(first[i], now, results[i].bytes) == 0;
            free(now);
        }
    }
    printf("%s D=%-3d B=%d T=%-4d H=%d/%d%s %d repeats give %s bits\n", same ? "ok  " : "FAIL", c.D, c.B, c.T, c.H,
           c.Hkv, c.dropout > 0 ? " dropout" : "", repeats, same ? "the same" : "DIFFERENT");
    for (int i = 0; i < 3; i++)
        free(first[i]);
    free(data);
    run_free(&run);
    return same;
}

static int check_lengths(const int *lengths, int num_lengths, struct device *dev) {
    const int dims[4] = {64, 96, 128, 256}, heads[3][2] = {{2, 2}, {6, 2}, {3, 1}};
    int failures = 0;
    for (int d = 0; d < 4; d++)
        for (int h = 0; h < 3; h++)
            for (int i = 0; i < num_lengths; i++) {
                const int T = lengths[i];
                if (EMULATED && (i + h) % 3 != d % 3) // a third of them, each head dimension with each heads
                    continue;
                if (T >= 4096 && heads[h][0] > 3) // the reference takes most of the time
                    continue;
                const struct check_case c = {dims[d], T <= 300 ? 2 : 1, T, heads[h][0], heads[h][1], 1, 1, 1, 0};
                failures += !check(c, dev);
            }
    return failures;
}
static int check_special(bool quick, struct device *dev) {
    const int dims[4] = {64, 96, 128, 256};
    int failures = 0;
    for (int d = 0; d < 4; d++) {
        // Scores of some hundreds: a row's lse is far below -88, where exp of an unmasked padded key would overflow.
        const struct check_case large = {dims[d], 1, quick ? 65 : 192, 2, 1, 5, 3, 3, 0};
        const struct check_case dropped = {dims[d], 1, quick ? 65 : 193, 2, 1, 1, 1, 1, 0.25f};
        const struct check_case dropped_even = {dims[d], 2, quick ? 68 : 132, 2, 2, 1, 1, 1, 0.1f};
        failures += !check(large, dev) + !check(dropped, dev) + !check(dropped_even, dev);
        const struct check_case repeated = {dims[d], 1, quick ? 130 : EMULATED ? 200 : 1023, 4, 2, 1, 1, 1, 0};
        failures += !check_repeats(repeated, quick || EMULATED ? 2 : 50, dev);
    }
    return failures;
}

// --- Speed --------------------------------------------------------------------------------------------------------

#if !defined(CUDA_EMULATED)
static int by_value(const void *x, const void *y) { return *(const float *)x < *(const float *)y ? -1 : 1; }

static float median_ms(void (*call)(struct run *, struct device *), struct run *run, struct device *dev) {
    enum { WARM_UP = 3, REPEATS = 10 };
    float times[REPEATS];
    cudaEvent_t events[2];
    for (int i = 0; i < 2; i++)
        cuda_check(cudaEventCreate(&events[i]));
    for (int i = 0; i < WARM_UP; i++)
        call(run, dev);
    for (int i = 0; i < REPEATS; i++) {
        cuda_check(cudaEventRecord(events[0], ((struct cuda_device *)dev)->stream));
        call(run, dev);
        cuda_check(cudaEventRecord(events[1], ((struct cuda_device *)dev)->stream));
        cuda_check(cudaEventSynchronize(events[1]));
        cuda_check(cudaEventElapsedTime(&times[i], events[0], events[1]));
    }
    for (int i = 0; i < 2; i++)
        cuda_check(cudaEventDestroy(events[i]));
    qsort(times, REPEATS, sizeof times[0], by_value);
    return (times[REPEATS / 2 - 1] + times[REPEATS / 2]) / 2;
}

static void bench(struct check_case c, struct device *dev) {
    const size_t n_qkv = (size_t)c.B * c.T * (c.H + 2 * c.Hkv) * c.D, n_out = (size_t)c.B * c.T * c.H * c.D;
    uint64_t state = 1;
    bf16 *data = (bf16 *)malloc(sizeof *data * (n_qkv + n_out));
    for (size_t i = 0; i < n_qkv + n_out; i++)
        data[i] = i < 1 << 20 ? bf16_from_float(random_value(&state)) : data[i - (1 << 20) + 1];
    struct run run = run_new(c, data, data + n_qkv);
    // 4 T^2 D for the two products of a head, half of it below the diagonal; backward has five products where forward
    // has two.
    const double flops = 2.0 * c.B * c.H * c.T * c.T * c.D;
    const float forward = median_ms(run_forward, &run, dev), backward = median_ms(run_backward, &run, dev);
    printf("%-8s %-8s %4d %3d %3d %3d %6d %9.4f %7.1f\n", "ours", "forward", c.D, c.H, c.Hkv, c.B, c.T, forward,
           flops / forward * 1e-9);
    printf("%-8s %-8s %4d %3d %3d %3d %6d %9.4f %7.1f\n", "ours", "backward", c.D, c.H, c.Hkv, c.B, c.T, backward,
           2.5 * flops / backward * 1e-9);
    fflush(stdout);
    free(data);
    run_free(&run);
}
static void bench_all(struct device *dev) {
    for (int D = 64; D <= 128; D += 64)
        for (int gqa = 0; gqa < 2; gqa++)
            for (int T = 1024; T <= 16384; T *= 2) {
                const struct check_case c = {D, 16384 / T, T, gqa ? 64 : 2048 / D, gqa ? 8 : 2048 / D, 1, 1, 1, 0};
                bench(c, dev);
            }
}
#endif

int main(int argc, char **argv) {
    static const int all[] = {1, 2, 3, 64, 113, 128, 217, 239, 511, 513, 799, 1023, 1024, 4096, 4224};
    static const int emulated[] = {1, 2, 3, 64, 113, 128, 217, 239, 321};
    static const int quick[] = {1, 113, 130};
    const bool is_quick = argc > 1 && strcmp(argv[1], "--quick") == 0;
    struct cuda_device dev;
    memset((void *)&dev, 0, sizeof dev);
    int failures;
    if (argc > 1 && strcmp(argv[1], "--bench") == 0) {
#if !defined(CUDA_EMULATED)
        cuda_check(cudaStreamCreate(&dev.stream));
        bench_all(&dev);
#endif
        return 0;
    }
    if (is_quick)
        failures = check_lengths(quick, 3, &dev);
    else if (EMULATED)
        failures = check_lengths(emulated, sizeof emulated / sizeof emulated[0], &dev);
    else
        failures = check_lengths(all, sizeof all / sizeof all[0], &dev);
    failures += check_special(is_quick, &dev);
#if defined(CUDA_EMULATED)
    printf("%s ldmatrix met %llu bank conflicts\n", emu_conflicts ? "FAIL" : "ok  ", (unsigned long long)emu_conflicts);
    failures += emu_conflicts != 0;
#endif
    printf("%d failures\n", failures);
    return failures != 0;
}
