// Measures the speed of attention: bench_attention_fp32 [NAME], where NAME restricts the shapes to those whose name
// contains it. The name "masked" stands for the masks, in bench_attention_bf16 "fp8" for FP8 attention beside flash.
//
// Figures are medians over random data. FLOP are counted causal, half of T x T: 4 and 10 per score and head dimension.
// The peak is the rate of the unit that multiplies the blocks, with operands in registers. It is measured in turn with
// each run, since other work on the machine and its clock change both.
#include "attention.cuh"               // under test
#include "kernels/blocks.cuh"          // block_product
#include "kernels/fp8/attention.cuh"   // under test
#include "kernels/fp8/cast.cuh"        // fp8_cast_with_amax
#include "kernels/attention/spans.cuh" // attention_spans
#include "kernels/random.cuh"          // random_normal
#include <omp.h>                       // omp_get_wtime, omp_get_max_threads
#include <stdio.h>                     // printf
#include <stdlib.h>                    // aligned_alloc, qsort

enum { RUNS_LEAST = 5, RUNS_MAX = 15, UNFUSED_MAX = 1024 };
static const double SECONDS = 1.5; // for one figure; longer where RUNS_LEAST runs take longer

static const struct {
    const char *name;
    int layers;
    struct attention_shape shape;
} cases[] = {
    {"GPT-2 124M", 12, {4, 1024, 12, 12, 64, 0.125f, false}},
    {"long", 12, {1, 4096, 12, 12, 64, 0.125f, false}},
    {"GQA, D 64", 16, {1, 2048, 32, 8, 64, 0.125f, false}},
    {"GQA, D 128", 32, {1, 2048, 32, 8, 128, 0.0883883f, false}},
};

static void *fresh(size_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (memory == NULL)
        fail("bench_attention needs %zu more bytes of memory", bytes);
    return memory;
}
static floatX *random_floats(int64_t n, uint64_t stream) {
    floatX *x = (floatX *)fresh((size_t)n * sizeof *x);
#pragma omp parallel for schedule(static)
    for (int64_t begin = 0; begin < n; begin += 1024) {
        float values[1024];
        const int count = n - begin < 1024 ? (int)(n - begin) : 1024;
        random_normal(values, count, 1, 1, stream, (uint64_t)begin);
        for (int i = 0; i < count; i++)
            x[begin + i] = to_floatX(values[i]);
    }
    return x;
}

enum { CHAINS = 16, CHAIN_STEPS = 200000 };
// Returns the GFLOP/s of independent chains of multiply-adds on all threads.
static double fma_rate(void) {
    double sink = 0;
    const double start = omp_get_wtime();
#pragma omp parallel reduction(+ : sink)
    {
        vec sum[CHAINS], factor = vec_set(0.999f), term = vec_set(0.001f);
        for (int i = 0; i < CHAINS; i++)
            sum[i] = vec_set((float)(i + omp_get_thread_num()));
        for (int step = 0; step < CHAIN_STEPS; step++)
#pragma GCC unroll 16
            for (int i = 0; i < CHAINS; i++)
                sum[i] = sum[i] * factor + term;
        for (int i = 0; i < CHAINS; i++)
            sink += sum[i][0];
    }
    const double rate = 2.0 * CHAINS * CHAIN_STEPS * LANES * omp_get_max_threads() / (omp_get_wtime() - start);
    return sink == 12345 ? 0 : rate * 1e-9; // so that the compiler keeps the chains
}
// Returns the GFLOP/s of dot products of bf16 pairs, otherwise as fma_rate.
static double dot_rate(void) {
    double sink = 0;
    const double start = omp_get_wtime();
#pragma omp parallel reduction(+ : sink)
    {
        vec sum[CHAINS];
        const vec_words factor = vec_words_set(0x3f353eb7u),
                        term = vec_words_set(0x3e12bdcdu + (uint32_t)omp_get_thread_num());
        for (int i = 0; i < CHAINS; i++)
            sum[i] = vec_set((float)i);
        for (int step = 0; step < CHAIN_STEPS; step++)
#pragma GCC unroll 16
            for (int i = 0; i < CHAINS; i++)
                sum[i] = vec_dot(sum[i], factor, term);
        for (int i = 0; i < CHAINS; i++)
            sink += sum[i][0];
    }
    const double rate = 4.0 * CHAINS * CHAIN_STEPS * LANES * omp_get_max_threads() / (omp_get_wtime() - start);
    return sink == 12345 ? 0 : rate * 1e-9;
}
// Returns the GFLOP/s of AMX tiles of random numbers, otherwise as fma_rate: zeros would run faster.
static double amx_rate(void) {
    enum { STEPS = 20000 };
    static bf16 operands[4][512];
    for (int i = 0; i < 4 * 512; i++)
        operands[i / 512][i % 512] = bf16_from_float((float)random_uniform(1, 5, (uint64_t)i) - 0.5f);
    const double start = omp_get_wtime();
#pragma omp parallel
    {
        amx_begin();
        amx_load(4, operands[0], 64);
        amx_load(5, operands[1], 64);
        amx_load(6, operands[2], 64);
        amx_load(7, operands[3], 64);
        for (int step = 0; step < STEPS; step++) {
            amx_dot(0, 4, 6);
            amx_dot(1, 4, 7);
            amx_dot(2, 5, 6);
            amx_dot(3, 5, 7);
        }
        amx_end();
    }
    return 4.0 * 2 * 16 * 16 * 32 * STEPS * omp_get_max_threads() / (omp_get_wtime() - start) * 1e-9;
}
static double unit_rate(void) {
    switch (blocks_unit()) {
    case UNIT_FP32: return fma_rate();
    case UNIT_DOT: return dot_rate();
    case UNIT_AMX: return amx_rate();
    }
    return 0;
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
static double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, ascending);
    return x[n / 2];
}

// The buffers and sizes of one shape.
struct buffers {
    floatX *qkv, *dout, *out, *dqkv;
    void *saved, *forward_workspace, *backward_workspace;
};
static struct buffers buffers_of(enum attention_backend backend, struct attention_shape s, struct device *dev) {
    const int64_t rows = (int64_t)s.B * s.T, out_count = rows * s.num_heads * s.head_dim;
    const int64_t qkv_count = rows * (s.num_heads + 2 * s.num_query_groups) * s.head_dim;
    struct buffers b;
    b.qkv = random_floats(qkv_count, 1);
    b.dout = random_floats(out_count, 2);
    b.out = random_floats(out_count, 3);
    b.dqkv = random_floats(qkv_count, 4);
    b.saved = fresh(attention_saved_bytes(backend, s));
    b.forward_workspace = fresh(attention_forward_workspace_bytes(backend, s, dev));
    b.backward_workspace = fresh(attention_backward_workspace_bytes(backend, s, false, dev));
    return b;
}
static void buffers_free(struct buffers b) {
    void *all[] = {b.qkv, b.dout, b.out, b.dqkv, b.saved, b.forward_workspace, b.backward_workspace};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

struct times {
    double forward, backward, peak; // forward, backward: seconds; peak: GFLOP/s
};
static struct times run_once(struct buffers b, enum attention_backend backend, struct attention_shape s,
                             struct device *dev) {
    const struct dropout none = {0, 0, 0, 0, 0};
    const struct attention_backward_options plain = {NULL, false};
    struct times t;
    t.peak = 0;
    const double start = omp_get_wtime();
    attention_forward(b.out, b.saved, b.qkv, backend, s, none, NULL, b.forward_workspace, dev);
    t.forward = omp_get_wtime() - start;
    attention_backward(b.dqkv, b.dout, b.qkv, b.out, b.saved, backend, s, none, plain, b.backward_workspace, dev);
    t.backward = omp_get_wtime() - start - t.forward;
    return t;
}
// Measures a shape. The first run, which touches fresh memory, does not count.
static struct times measure(enum attention_backend backend, struct attention_shape s, struct device *dev) {
    const struct buffers b = buffers_of(backend, s, dev);
    double forward[RUNS_MAX], backward[RUNS_MAX], peak[RUNS_MAX], total = 0;
    int n = 0;
    for (int run = 0; n < RUNS_MAX && (n < RUNS_LEAST || total < SECONDS); run++) {
        peak[n] = unit_rate();
        const struct times t = run_once(b, backend, s, dev);
        forward[n] = t.forward;
        backward[n] = t.backward;
        total += forward[n] + backward[n];
        n += run > 0;
    }
    buffers_free(b);
    const struct times t = {median(forward, n), median(backward, n), median(peak, n)};
    return t;
}

// ---- Masks: their time against the causal mask's, whose area is known ----

enum { MASKED_T = 8192, MASKED_DOCUMENTS = 8, MASKED_WINDOW = 512, MASKS = 4 };
static const char *const mask_names[MASKS] = {"causal", "causal by tables", "documents of T / 8", "window of 512"};

// Fills starts (T) with documents whose lengths are log-normal, with mean T / MASKED_DOCUMENTS and as large a deviation
// as text has: sigma 1.
static void fill_documents(int32_t *starts, int T) {
    double end = 0;
    for (int t = 0, begin = 0, n = 0; t < T; t++) {
        if (t >= end) {
            float z;
            random_normal(&z, 1, 1, 5, 1, (uint64_t)n++);
            end = t + fmax(1, (double)T / MASKED_DOCUMENTS * exp(z - 0.5));
            begin = t;
        }
        starts[t] = begin;
    }
}
static void bench_masks(struct device *dev) {
    struct attention_shape shapes[MASKS];
    double area[MASKS] = {0}, forward[MASKS][RUNS_LEAST], backward[MASKS][RUNS_LEAST];
    double ratios[3][MASKS][RUNS_LEAST]; // [0]: of forward, [1]: of backward, [2]: of the two together
    int32_t *starts = (int32_t *)fresh(MASKED_T * sizeof *starts);
    int32_t *tables = (int32_t *)fresh(2 * MASKS * MASKED_T * sizeof *tables);
    fill_documents(starts, MASKED_T);
    for (int m = 0; m < MASKS; m++) {
        const struct attention_shape s = {1, MASKED_T, 4, 2, 64, 0.125f, false, 0, NULL, NULL};
        int32_t *first_key = tables + 2 * m * MASKED_T, *last_query = first_key + MASKED_T;
        attention_spans(first_key, last_query, m == 2 ? starts : NULL, m == 3 ? MASKED_WINDOW : 0, 1, MASKED_T, dev);
        for (int t = 0; t < MASKED_T; t++)
            area[m] += t - first_key[t] + 1;
        shapes[m] = s;
        if (m > 0) {
            shapes[m].first_key = first_key;
            shapes[m].last_query = last_query;
        }
    }
    const struct buffers b = buffers_of(ATTENTION_FLASH, shapes[0], dev);
    for (int run = -1; run < RUNS_LEAST; run++)
        for (int m = 0; m < MASKS; m++) {
            const struct times t = run_once(b, ATTENTION_FLASH, shapes[m], dev);
            const int at = run < 0 ? 0 : run;
            forward[m][at] = t.forward;
            backward[m][at] = t.backward;
            const double expected = area[m] / area[0], causal = forward[0][at] + backward[0][at];
            ratios[0][m][at] = t.forward / (forward[0][at] * expected);
            ratios[1][m][at] = t.backward / (backward[0][at] * expected);
            ratios[2][m][at] = (t.forward + t.backward) / (causal * expected);
        }
    printf("%-11s %-20s %9s %9s %9s %30s\n", "", "1 8192 4/2 64", "visible", "fwd ms", "bwd ms",
           "time / causal time x visible");
    for (int m = 0; m < MASKS; m++)
        printf("masked      %-20s %8.1f%% %9.2f %9.2f   fwd %.3f bwd %.3f both %.3f\n", mask_names[m],
               100 * area[m] / area[0], median(forward[m], RUNS_LEAST) * 1e3, median(backward[m], RUNS_LEAST) * 1e3,
               median(ratios[0][m], RUNS_LEAST), median(ratios[1][m], RUNS_LEAST), median(ratios[2][m], RUNS_LEAST));
    buffers_free(b);
    free(starts);
    free(tables);
}

#ifdef PRECISION_BF16
// ---- FP8 attention, forward and backward without its casts, in turn with flash attention ----

enum { FP8_RUNS = 21 };
static void bench_fp8_shape(struct attention_shape s, struct device *dev) {
    const struct buffers b = buffers_of(ATTENTION_FLASH, s, dev);
    const int64_t rows = (int64_t)s.B * s.T, columns = (int64_t)s.num_heads * s.head_dim;
    const int64_t qkv_columns = columns + 2 * (int64_t)s.num_query_groups * s.head_dim;
    struct fp8_scale scales[FP8_ATTENTION_TENSORS + 1];
    struct fp8_attention a;
    const struct fp8_attention_demands demands = {true, true, false, FP8_E5M2};
    double forward[2][FP8_RUNS], backward[2][FP8_RUNS], ratios[3][FP8_RUNS]; // [0]: flash, [1]: FP8
    memset(&a, 0, sizeof a);
    memset(scales, 0, sizeof scales);
    a.shape = s;
    a.gradients = demands.gradients;
    a.full = a.outputs_in_fp8 = true;
    for (int i = 0; i < FP8_ATTENTION_TENSORS; i++)
        a.scales[i] = &scales[i];
    a.out = &scales[FP8_ATTENTION_TENSORS];
    fp8 *qkv8 = (fp8 *)fresh((size_t)(rows * qkv_columns)), *dout8 = (fp8 *)fresh((size_t)(rows * columns));
    fp8 *out8 = (fp8 *)fresh((size_t)(rows * columns));
    float *lse = (float *)fresh((size_t)rows * (size_t)s.num_heads * sizeof *lse);
    void *forward_workspace = fresh(fp8_attention_forward_workspace_bytes(s, demands, dev));
    void *backward_workspace = fresh(fp8_attention_backward_workspace_bytes(s, demands, dev));
    fp8_attention_cast(qkv8, b.qkv, a, true, dev);
    fp8_cast_with_amax(dout8, a.scales[FP8_ATTENTION_DOUT], a.gradients, b.dout, rows, columns, dev);
    for (int run = -1; run < FP8_RUNS; run++) { // the first run finds the scales that a step would know
        const int at = run < 0 ? 0 : run;
        const struct times flash = run_once(b, ATTENTION_FLASH, s, dev);
        const double start = omp_get_wtime();
        fp8_attention_forward(out8, NULL, lse, qkv8, a, true, forward_workspace, dev);
        const double middle = omp_get_wtime();
        fp8_attention_backward(b.dqkv, dout8, qkv8, out8, lse, a, NULL, backward_workspace, dev);
        forward[0][at] = flash.forward;
        backward[0][at] = flash.backward;
        forward[1][at] = middle - start;
        backward[1][at] = omp_get_wtime() - middle;
        ratios[0][at] = forward[0][at] / forward[1][at];
        ratios[1][at] = backward[0][at] / backward[1][at];
        ratios[2][at] = (forward[0][at] + backward[0][at]) / (forward[1][at] + backward[1][at]);
        for (int i = 0; run < 0 && i <= FP8_ATTENTION_TENSORS; i++)
            scales[i].delayed = scales[i].scale;
    }
    char name[64];
    snprintf(name, sizeof name, "%d %d %d/%d %d", s.B, s.T, s.num_heads, s.num_query_groups, s.head_dim);
    printf("fp8         %-20s %9.2f %9.2f %9.2f   fwd %.3f bwd %.3f both %.3f\n", name,
           median(forward[1], FP8_RUNS) * 1e3, median(backward[1], FP8_RUNS) * 1e3,
           (median(forward[0], FP8_RUNS) + median(backward[0], FP8_RUNS)) * 1e3, median(ratios[0], FP8_RUNS),
           median(ratios[1], FP8_RUNS), median(ratios[2], FP8_RUNS));
    void *all[] = {qkv8, dout8, out8, lse, forward_workspace, backward_workspace};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
    buffers_free(b);
}
static void bench_fp8(struct device *dev) {
    static const struct attention_shape shapes[] = {
        {8, 256, 8, 8, 32, 0.1767767f, false},
        {4, 256, 8, 8, 64, 0.125f, false},
        {2, 1024, 12, 12, 64, 0.125f, false},
        {1, 1024, 16, 4, 128, 0.0883883f, false},
    };
    printf("%-11s %-20s %9s %9s %9s %30s\n", "", "B T H/Hkv D", "fwd ms", "bwd ms", "flash ms", "speed / flash's");
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++)
        bench_fp8_shape(shapes[i], dev);
}
#endif

int main(int count, char **arguments) {
    struct device dev = {omp_get_max_threads(), NULL};
    printf("%s, %s, %d threads; medians, GFLOP counted causal\n", blocks_describe(), FLOATX_NAME, dev.threads);
    printf("%-11s %-23s %-8s %9s %8s %9s %8s %9s %9s\n", "", "B T H/Hkv D", "backend", "fwd ms", "GFLOP/s", "bwd ms",
           "GFLOP/s", "peak", "of it");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const struct attention_shape s = cases[i].shape;
        if (count > 1 && !strstr(cases[i].name, arguments[1]))
            continue;
        const double gflop = 2e-9 * s.B * s.num_heads * s.head_dim * (double)s.T * (double)s.T;
        for (int backend = ATTENTION_FLASH; backend <= (s.T <= UNFUSED_MAX ? ATTENTION_UNFUSED : ATTENTION_FLASH);
             backend++) {
            char name[64];
            snprintf(name, sizeof name, "%d %d %d/%d %d", s.B, s.T, s.num_heads, s.num_query_groups, s.head_dim);
            const struct times t = measure((enum attention_backend)backend, s, &dev);
            printf("%-11s %-23s %-8s %9.2f %8.0f %9.2f %8.0f %9.0f %8.0f%%\n", cases[i].name, name,
                   backend == ATTENTION_FLASH ? "flash" : "unfused", t.forward * 1e3, gflop / t.forward,
                   t.backward * 1e3, 2.5 * gflop / t.backward, t.peak,
                   100 * 3.5 * gflop / (t.forward + t.backward) / t.peak);
            printf("%-11s %d layers: %.0f ms\n", "", cases[i].layers, cases[i].layers * (t.forward + t.backward) * 1e3);
            fflush(stdout);
        }
    }
    if (count < 2 || strstr("masked", arguments[1]))
        bench_masks(&dev);
#ifdef PRECISION_BF16
    if (count < 2 || strstr("fp8", arguments[1]))
        bench_fp8(&dev);
#endif
    return 0;
}
