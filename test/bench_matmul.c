// Measures the speed of the matmuls at the five shapes of GPT-2 124M: bench_matmul_bf16 [TOKENS [BACKEND]], where
// BACKEND is a name in the table of kernels/matmul/matmul.cu. Figures are medians over random data, since zeros run
// faster on real hardware. The last line is what one training step spends.
#include "kernels/matmul/backend.cuh" // matmul_backends
#include "kernels/matmul/matmul.cuh"  // under test
#include "kernels/random.cuh"         // random_normal
#include <omp.h>                      // omp_get_wtime, omp_get_max_threads
#include <stdio.h>                    // printf
#include <stdlib.h>                   // aligned_alloc, qsort, strtol

enum { LAYERS = 12, RUNS_LEAST = 3, RUNS_MAX = 15 };
static const double SECONDS = 1.0; // for one figure; longer where RUNS_LEAST runs take longer

struct shape {
    int K, N, uses;
    bool bias;
};
static const struct shape shapes[] = {{768, 2304, LAYERS, true},
                                      {768, 768, LAYERS, true},
                                      {768, 3072, LAYERS, true},
                                      {3072, 768, LAYERS, true},
                                      {768, 50304, 1, false}};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };
enum call { FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, CALLS };

struct buffers {
    floatX *in, *weight, *bias, *dout, *out, *din;
    float *dweight, *dbias;
    void *workspace;
};

static void *fresh(size_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (memory == NULL)
        fail("bench_matmul needs %zu more bytes of memory: try fewer tokens", bytes);
    return memory;
}
static floatX *random_floats(int64_t n, float std, uint64_t stream) {
    floatX *x = (floatX *)fresh((size_t)n * sizeof *x);
#pragma omp parallel for schedule(static)
    for (int64_t begin = 0; begin < n; begin += 1024) {
        float values[1024];
        const int count = (int)gemm_min(1024, n - begin);
        random_normal(values, count, std, 1, stream, (uint64_t)begin);
        for (int i = 0; i < count; i++)
            x[begin + i] = to_floatX(values[i]);
    }
    return x;
}
static float *zeros(int64_t n) {
    float *x = (float *)fresh((size_t)n * sizeof *x);
    memset(x, 0, (size_t)n * sizeof *x);
    return x;
}
static struct buffers buffers_create(struct shape s, int64_t M, struct device *dev) {
    struct buffers b;
    b.in = random_floats(M * s.K, 1, 1);
    b.weight = random_floats((int64_t)s.N * s.K, 0.02f, 2);
    b.bias = random_floats(s.N, 0.02f, 3);
    b.dout = random_floats(M * s.N, 1, 4);
    b.out = random_floats(M * s.N, 1, 5);
    b.din = random_floats(M * s.K, 1, 6);
    b.dweight = zeros((int64_t)s.N * s.K);
    b.dbias = zeros(s.N);
    b.workspace = fresh(matmul_workspace_bytes(M, s.N, s.K, dev));
    return b;
}
static void buffers_free(struct buffers *b) {
    void *all[] = {b->in, b->weight, b->bias, b->dout, b->out, b->din, b->dweight, b->dbias, b->workspace};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        free(all[i]);
}

static void run(enum call call, struct buffers *b, struct shape s, int64_t M, struct device *dev) {
    if (call == FORWARD)
        matmul_forward(b->out, b->in, b->weight, s.bias ? b->bias : NULL, M, s.N, s.K, b->workspace, dev);
    else if (call == BACKWARD_INPUT)
        matmul_backward_input(b->din, b->dout, b->weight, M, s.N, s.K, b->workspace, dev);
    else
        matmul_backward_weight(b->dweight, s.bias ? b->dbias : NULL, b->dout, b->in, M, s.N, s.K, true, b->workspace,
                               dev);
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
// Returns the median seconds of one call. The first call, which touches fresh memory and makes the library's plans,
// does not count.
static double seconds(enum call call, struct buffers *b, struct shape s, int64_t M, struct device *dev) {
    double times[RUNS_MAX], total = 0;
    int runs = 0;
    run(call, b, s, M, dev);
    while (runs < RUNS_MAX && (runs < RUNS_LEAST || total < SECONDS)) {
        const double start = omp_get_wtime();
        run(call, b, s, M, dev);
        times[runs] = omp_get_wtime() - start;
        total += times[runs++];
    }
    qsort(times, (size_t)runs, sizeof *times, ascending);
    return times[runs / 2];
}

// Returns the backend of that name; NULL where this machine or build has none.
static struct matmul_library *library_named(const char *name, struct device *dev) {
    for (int i = 0; i < matmul_backends_count; i++)
        if (strcmp(name, matmul_backends[i].name) == 0)
            return matmul_create_backend(dev, &matmul_backends[i]);
    return NULL;
}
static void fail_for_backend(const char *name, struct device *dev) {
    char names[256] = "";
    for (int i = 0; i < matmul_backends_count; i++) {
        struct matmul_library *library = matmul_create_backend(dev, &matmul_backends[i]);
        if (library)
            snprintf(names + strlen(names), sizeof names - strlen(names), " %s", matmul_backends[i].name);
        matmul_destroy(library);
    }
    fail("bench_matmul: this machine or build has no backend '%s'; there are:%s", name, names);
}

int main(int count, char **arguments) {
    const int64_t M = count > 1 ? strtol(arguments[1], NULL, 10) : 4096;
    if (M < 1)
        fail("bench_matmul: '%s' is no number of tokens", arguments[1]);
    struct device dev = {omp_get_max_threads(), NULL};
    dev.matmul = count > 2 ? library_named(arguments[2], &dev) : matmul_create(&dev);
    if (dev.matmul == NULL)
        fail_for_backend(arguments[2], &dev);
    printf("%s, %s operands, %d threads, %lld tokens; GFLOP/s, medians\n", matmul_describe(dev.matmul), FLOATX_NAME,
           dev.threads, (long long)M);
    printf("%13s %10s %10s %10s %14s\n", "K x N", "forward", "dX", "dW + dbias", "workspace MB");
    double step_seconds = 0, step_flop = 0;
    for (int i = 0; i < SHAPES; i++) {
        const struct shape s = shapes[i];
        const double flop = 2.0 * (double)M * s.N * s.K;
        struct buffers b = buffers_create(s, M, &dev);
        printf("%6d x %-5d", s.K, s.N);
        for (int call = 0; call < CALLS; call++) {
            const double time = seconds((enum call)call, &b, s, M, &dev);
            printf("%10.0f ", flop * 1e-9 / time);
            fflush(stdout);
            step_seconds += s.uses * time;
            step_flop += s.uses * flop;
        }
        printf("%14.1f\n", (double)matmul_workspace_bytes(M, s.N, s.K, &dev) * 1e-6);
        buffers_free(&b);
    }
    printf("one step of GPT-2 124M: %.0f GFLOP in %.0f ms, %.0f GFLOP/s\n", step_flop * 1e-9, step_seconds * 1e3,
           step_flop * 1e-9 / step_seconds);
    matmul_destroy(dev.matmul);
    return 0;
}
