// Speed of attention: bench_attention_fp32 [NAME], where NAME restricts the shapes to those whose name contains it.
// Medians over random data. FLOP are counted causal, half of T x T: 4 and 10 per score and head dimension. The peak is
// that of the unit that multiplies the blocks, in registers, measured in turn with each run, since other work on a
// machine and its clock change both.
#include "attention.cuh"      // under test
#include "kernels/random.cuh" // random_normal
#include <omp.h>              // omp_get_wtime, omp_get_max_threads
#include <stdio.h>            // printf
#include <stdlib.h>           // aligned_alloc, qsort

enum { RUNS_LEAST = 5, RUNS_MOST = 15, UNFUSED_MOST = 1024 };
static const double SECONDS = 1.5; // for one figure, unless RUNS_LEAST take longer

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
// GFLOP/s of independent chains of multiply-adds on all threads.
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
    return sink == 12345 ? 0 : rate * 1e-9; // so that the chains are not optimised away
}
// As fma_rate, of dot products of bf16 pairs.
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
// As fma_rate, of AMX tiles of random numbers: zeros run faster.
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

struct times {
    double forward, backward, peak; // seconds, seconds, GFLOP/s
};
// The first run, which touches fresh memory, is not counted.
static struct times measure(enum attention_backend backend, struct attention_shape s, struct device *dev) {
    const struct dropout none = {0, 0, 0, 0, 0};
    const struct attention_backward_options plain = {NULL, false};
    const int64_t rows = (int64_t)s.B * s.T, out_count = rows * s.num_heads * s.head_dim;
    const int64_t qkv_count = rows * (s.num_heads + 2 * s.num_query_groups) * s.head_dim;
    floatX *qkv = random_floats(qkv_count, 1), *dout = random_floats(out_count, 2);
    floatX *out = random_floats(out_count, 3), *dqkv = random_floats(qkv_count, 4);
    void *saved = fresh(attention_saved_bytes(backend, s));
    void *forward_workspace = fresh(attention_forward_workspace_bytes(backend, s, dev));
    void *backward_workspace = fresh(attention_backward_workspace_bytes(backend, s, dev));
    double forward[RUNS_MOST], backward[RUNS_MOST], peak[RUNS_MOST], total = 0;
    int n = 0;
    for (int run = 0; n < RUNS_MOST && (n < RUNS_LEAST || total < SECONDS); run++) {
        peak[n] = unit_rate();
        const double start = omp_get_wtime();
        attention_forward(out, saved, qkv, backend, s, none, forward_workspace, dev);
        const double middle = omp_get_wtime();
        attention_backward(dqkv, dout, qkv, out, saved, backend, s, none, plain, backward_workspace, dev);
        forward[n] = middle - start;
        backward[n] = omp_get_wtime() - middle;
        total += forward[n] + backward[n];
        n += run > 0;
    }
    void *all[] = {qkv, dout, out, dqkv, saved, forward_workspace, backward_workspace};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
    const struct times t = {median(forward, n), median(backward, n), median(peak, n)};
    return t;
}

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
        for (int backend = ATTENTION_FLASH; backend <= (s.T <= UNFUSED_MOST ? ATTENTION_UNFUSED : ATTENTION_FLASH);
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
    return 0;
}
