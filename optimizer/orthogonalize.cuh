// The orthogonal factor of a matrix, by Newton-Schulz iterations: what Muon makes of a momentum (Jordan et al. 2024,
// kellerjordan.github.io/posts/muon). All singular values become about 1 while the singular vectors stay.
//   X = U / (divisor |U|), where |U| is the Frobenius norm; then for each step, which has its own (a, b, c):
//   A = X X^T;  B = a I + b A + c A A;  X = B X
// or, where X has more rows than columns, A = X^T X and X = X B, so that A is small and nothing is transposed.
// B includes a I, since X = a X + (b A + c A A) X would take a further pass over X. The products are the engine's own
// matmuls. No epsilon is added to |U|, so that a factor of U changes nothing; if U is 0, X is 0.
#pragma once
#include "config/config.h"           // enum config_muon_coefficient_type
#include "kernels/device_memory.cuh" // device_copy
#include "kernels/gradients.cuh"     // sum_of_squares
#include "kernels/matmul/matmul.cuh" // matmul_forward
#include "kernels/newton_schulz.cuh" // newton_schulz_polynomial
#include "kernels/state_format.cuh"  // FORMAT_BF16
#include "model/timeline.cuh"        // TIMELINE_MATMUL

struct newton_schulz_step {
    double a, b, c;
};
// An iteration of `steps` steps by `count` rows of `list`. Further steps repeat the list (`cycles`) or its last row.
struct newton_schulz {
    struct newton_schulz_step list[10];
    int count;
    bool cycles;
    int steps;
    double divisor;
};

// simple: Jordan's, as in torch.optim.Muon. quintic, deepseekv4: Megatron-LM's. Polar Express: Amsel et al. 2025 (arXiv
// 2505.16932), with a larger divisor as rounding may leave a singular value above 1. classic: slope 0 at fixed point 1.
static const struct newton_schulz newton_schulz_simple = {{{3.4445, -4.7750, 2.0315}}, 1, false, 5, 1};
static const struct newton_schulz newton_schulz_quintic = {{{4.0848, -6.8946, 2.9270},
                                                            {3.9505, -6.3029, 2.6377},
                                                            {3.7418, -5.5913, 2.3037},
                                                            {2.8769, -3.1427, 1.2046},
                                                            {2.8366, -3.0525, 1.2012}},
                                                           5,
                                                           true,
                                                           5,
                                                           1};
static const struct newton_schulz newton_schulz_polar_express = {
    {{8.156554524902461, -22.48329292557795, 15.878769915207462},
     {4.042929935166739, -2.808917465908714, 0.5000178451051316},
     {3.8916678022926607, -2.772484153217685, 0.5060648178503393},
     {3.285753657755655, -2.3681294933425376, 0.46449024233003106},
     {2.3465413258596377, -1.7097828382687081, 0.42323551169305323}},
    5,
    false,
    5,
    1.02};
static const struct newton_schulz newton_schulz_deepseekv4 = {{{3.4445, -4.7750, 2.0315},
                                                               {3.4445, -4.7750, 2.0315},
                                                               {3.4445, -4.7750, 2.0315},
                                                               {3.4445, -4.7750, 2.0315},
                                                               {3.4445, -4.7750, 2.0315},
                                                               {3.4445, -4.7750, 2.0315},
                                                               {3.4445, -4.7750, 2.0315},
                                                               {3.4445, -4.7750, 2.0315},
                                                               {2, -1.5, 0.5},
                                                               {2, -1.5, 0.5}},
                                                              10,
                                                              false,
                                                              10,
                                                              1};
static const struct newton_schulz newton_schulz_classic = {{{2, -1.5, 0.5}}, 1, false, 12, 1};
// Returns the coefficients of a type of iteration, to be run for `steps` steps; 0: for the type's own number.
static struct newton_schulz newton_schulz_of(enum config_muon_coefficient_type type, int steps) {
    struct newton_schulz ns = newton_schulz_simple;
    switch (type) {
    case MUON_SIMPLE: break;
    case MUON_QUINTIC: ns = newton_schulz_quintic; break;
    case MUON_POLAR_EXPRESS: ns = newton_schulz_polar_express; break;
    case MUON_DEEPSEEKV4: ns = newton_schulz_deepseekv4; break;
    case MUON_CLASSIC: ns = newton_schulz_classic; break;
    }
    ns.steps = steps > 0 ? steps : ns.steps;
    return ns;
}
// Returns the coefficients of step number `step`, which counts from 0 and may lie beyond the list's end (ns->cycles).
static struct newton_schulz_step newton_schulz_step_of(const struct newton_schulz *ns, int step) {
    return ns->list[step < ns->count ? step : ns->cycles ? step % ns->count : ns->count - 1];
}

// The number of flops of all of a matrix's products: 4 side^2 length + 2 side^3 a step. They make no use of symmetry.
static double orthogonalize_flops(double rows, double cols, const struct newton_schulz *ns) {
    const double side = rows < cols ? rows : cols, length = rows < cols ? cols : rows;
    return ns->steps * (4 * side * side * length + 2 * side * side * side);
}

struct orthogonalize_buffers {
    floatX *other;        // (rows, cols) X of every second step
    floatX *gram, *power; // (side, side) A, and A A, which becomes B
    float *sums;          // (side, side) A of a tall matrix before it is rounded
    double *squares;      // (1) |U|^2
    void *scratch;        // of the products and of sum_of_squares
    size_t bytes;         // in all
};
// Returns the next `bytes` of a workspace, after *used, and adds them, rounded up, to *used. NULL for workspace NULL.
static void *orthogonalize_take(char *workspace, size_t *used, size_t bytes) {
    void *const at = workspace ? workspace + *used : NULL;
    *used += plan_aligned(bytes);
    return at;
}
// The number of bytes of `scratch`, which the products and sum_of_squares share: as many as the largest needs.
static size_t orthogonalize_scratch_bytes(int rows, int cols, struct device *dev) {
    const int side = rows < cols ? rows : cols;
    const size_t bytes[] = {sum_of_squares_workspace_bytes(dev),
                            rows > cols ? matmul_workspace_bytes(rows, cols, cols, dev)
                                        : matmul_workspace_bytes(rows, rows, cols, dev),
                            matmul_workspace_bytes(side, side, side, dev)};
    size_t most = 0;
    for (size_t i = 0; i < sizeof bytes / sizeof *bytes; i++)
        most = bytes[i] > most ? bytes[i] : most;
    return most;
}
// Divides a workspace into the buffers for a matrix (rows, cols). With workspace NULL only `bytes` has a meaning.
static struct orthogonalize_buffers orthogonalize_buffers_of(void *workspace, int rows, int cols, struct device *dev) {
    const size_t side = (size_t)(rows < cols ? rows : cols), tall = rows > cols;
    char *const at = (char *)workspace;
    struct orthogonalize_buffers b;
    b.bytes = 0;
    b.other = (floatX *)orthogonalize_take(at, &b.bytes, (size_t)rows * (size_t)cols * sizeof(floatX));
    b.gram = (floatX *)orthogonalize_take(at, &b.bytes, side * side * sizeof(floatX));
    b.power = (floatX *)orthogonalize_take(at, &b.bytes, side * side * sizeof(floatX));
    b.sums = (float *)orthogonalize_take(at, &b.bytes, tall * side * side * sizeof(float));
    b.squares = (double *)orthogonalize_take(at, &b.bytes, sizeof(double));
    b.scratch = orthogonalize_take(at, &b.bytes, orthogonalize_scratch_bytes(rows, cols, dev));
    return b;
}
static size_t orthogonalize_workspace_bytes(int rows, int cols, struct device *dev) {
    return orthogonalize_buffers_of(NULL, rows, cols, dev).bytes;
}

// Enqueues in this phase a step of the formula above, from X, `in` (rows, cols), to the next X, `out`, another buffer.
static void newton_schulz_iterate(struct timeline *t, floatX *out, const floatX *in, int rows, int cols,
                                  struct newton_schulz_step p, const struct orthogonalize_buffers *b) {
    const int side = rows < cols ? rows : cols;
    const bool tall = rows > cols;
    if (tall) {
        TIMELINE_MATMUL(t, matmul_backward_weight(b->sums, NULL, in, in, rows, cols, cols, false, b->scratch, t->dev));
        TIMELINE_RUN(t, newton_schulz_round(b->gram, b->sums, (int64_t)side * side, t->dev));
    } else
        TIMELINE_MATMUL(t, matmul_forward(b->gram, in, in, NULL, rows, rows, cols, b->scratch, t->dev));
    // A is symmetric: A A^T is its square.
    TIMELINE_MATMUL(t, matmul_forward(b->power, b->gram, b->gram, NULL, side, side, side, b->scratch, t->dev));
    TIMELINE_RUN(t, newton_schulz_polynomial(b->power, b->gram, (float)p.a, (float)p.b, (float)p.c, side, t->dev));
    if (tall)
        TIMELINE_MATMUL(t, matmul_forward(out, in, b->power, NULL, rows, cols, cols, b->scratch, t->dev));
    else
        TIMELINE_MATMUL(t, matmul_backward_input(out, b->power, in, rows, rows, cols, b->scratch, t->dev));
}

// Replaces x, enqueued, by its orthogonal factor. x must be aligned to TENSOR_ALIGNMENT elements. workspace: device
// memory of orthogonalize_workspace_bytes. Does nothing while the plan is recorded; a dry run only calls matmuls.
static void orthogonalize(struct timeline *t, floatX *x, // (rows, cols)
                          int rows, int cols, const struct newton_schulz *ns, void *workspace) {
    if (timeline_is_planning(t))
        return;
    const struct orthogonalize_buffers b = orthogonalize_buffers_of(workspace, rows, cols, t->dev);
    const enum state_format format = sizeof(floatX) == sizeof(float) ? FORMAT_FP32 : FORMAT_BF16;
    const int64_t n = (int64_t)rows * cols;
    floatX *from = x, *to = b.other;
    TIMELINE_RUN(t, sum_of_squares(b.squares, x, format, n, false, b.scratch, t->dev));
    TIMELINE_RUN(t, newton_schulz_normalize(x, b.squares, ns->divisor, n, t->dev));
    for (int step = 0; step < ns->steps; step++) {
        newton_schulz_iterate(t, to, from, rows, cols, newton_schulz_step_of(ns, step), &b);
        floatX *const last = from;
        from = to;
        to = last;
    }
    if (from != x)
        TIMELINE_RUN(t, device_copy(x, from, (size_t)n * sizeof *x, t->dev));
}
