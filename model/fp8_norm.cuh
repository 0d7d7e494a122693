// Norms whose output only an FP8 linear layer reads, and which write it in FP8 (producer_writes_fp8).
#pragma once
#include "kernels/norm_fp8.cuh" // norm_forward_fp8
#include "model/fp8_linear.cuh" // input_cast, producer_writes_fp8

// Where such a norm puts its output.
struct fp8_norm {
    bool runs; // false: the output is floatX, and the other members are 0
    struct fp8_cast cast;
    void *workspace;
};
// Returns where the norm that makes the input of `reader` puts its output, if `wanted`, live in this phase.
static struct fp8_norm fp8_norm_of(struct at at, enum linear reader, bool wanted) {
    struct fp8_norm f;
    memset(&f, 0, sizeof f);
    f.runs = wanted && producer_writes_fp8(at, reader);
    if (f.runs) {
        f.cast = input_cast(at, reader);
        f.workspace = workspace(at.m, norm_forward_fp8_workspace_bytes(at.rows, at.m->shape.layer.C, at.m->dev));
    }
    return f;
}
// Does residual_norm_forward of x and sum, or, where sum is NULL, norm_forward of x, with the output in FP8, in this
// phase. Needs f->runs.
static void residual_norm_in_fp8(struct at at, const struct fp8_norm *f, floatX *sum, struct norm_stats stats,
                                 const floatX *x, const floatX *weight, const floatX *bias, struct dropout dropout) {
    struct gpt *m = at.m;
    RUN(m, norm_forward_fp8(f->cast, sum, stats.mean, stats.rstd, x, sum, weight, bias, at.rows, m->shape.layer.C,
                            norm_options_of(m, NULL), residual_scale(m), dropout, f->workspace, m->dev));
}
// Does norm_forward of x with the output in FP8, in this phase. Needs f->runs.
static void norm_in_fp8(struct at at, const struct fp8_norm *f, struct norm_stats stats, const floatX *x,
                        struct norm_weights weights) {
    const struct dropout none = {0, 0, 0, 0, 0, NULL};
    const floatX *w = param(at.m, at.pass, at.l, weights.weight), *b = param(at.m, at.pass, at.l, weights.bias);
    residual_norm_in_fp8(at, f, NULL, stats, x, w, b, none);
}
