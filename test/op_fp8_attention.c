// kernels/fp8/attention.cuh: casts to the bit, attention against its formulas in double, with codes and scales of its
// own, and how far it is from attention in bf16.
#include "kernels/attention/flash.cuh" // flash_forward, flash_backward
#include "kernels/cudnn/attention.cuh" // fused_close
#include "kernels/device_queue.cuh"    // device_open
#include "kernels/fp8/attention_rules.cuh"
#include "kernels/fp8/cast.cuh"   // fp8_cast_with_amax, fp8_transpose
#include "test/attention_shape.h" // shape_of, columns_error
#include "test/fp8_reference.h"
#include "test/testing.h"
#include <omp.h> // omp_set_num_threads
#ifdef CUDA_EMULATED
#include "kernels/cudnn/library.cuh" // fused_library_of
#endif

static struct device dev;
static const enum fp8_format formats[] = {FP8_E5M2, FP8_E4M3};
#ifdef CUDA_EMULATED
// Begins to emulate a GPU of another compute capability. No layer of the former one may be used any more.
static void emulate(const char *capability) {
    fused_close(&dev); // it has cached the capability
    setenv("EMU_CAPABILITY", capability, 1);
}
#endif

#if (defined(PRECISION_BF16) && defined(AMX_EMULATE)) || defined(__SANITIZE_ADDRESS__) || defined(CUDA_EMULATED)
enum { SLOW = 1 };
#else
#define SLOW (test_slowness() > 1 ? 1 : 0)
#endif

static int64_t lse_count(struct attention_shape s) { return (int64_t)s.B * s.T * s.num_heads; }

// ---- One layer's attention, with the scales that a model would keep ----

struct layer {
    struct attention_shape shape;
    struct fp8_attention call;
    struct fp8_scale *scales; // (FP8_ATTENTION_TENSORS + 1), the last is O's
    floatX *qkv, *dout, *out, *dqkv;
    fp8 *qkv8, *dout8, *out8;
    float *lse;
    uint32_t *amax; // of dqkv
    void *workspace;
};
static struct fp8_attention_demands demands_of(const struct fp8_attention *a) {
    const struct fp8_attention_demands demands = {a->full, a->outputs_in_fp8, a->any_order, a->gradients};
    return demands;
}
// Whether backward of a shape gives the same bits each time, if it is asked to.
static bool has_order(struct attention_shape s) {
    const struct fp8_attention_demands demands = {true, true, false, FP8_E5M2};
    char reason[256];
    fp8_attention_unavailable_reason(reason, sizeof reason, s, demands, &dev);
    return !*reason;
}
// Returns a number of a normal distribution (Box and Muller).
static double test_normal(uint64_t *state) {
    const double u = (double)((test_random(state) >> 11) + 1) * 0x1p-53, v = test_uniform(state);
    return sqrt(-2 * log(u)) * cos(3.14159265358979 * v);
}
// Returns a layer with normal inputs; the caller frees it by layer_free. sink: the first key has a score of about 12.
static struct layer layer_make(struct attention_shape s, enum fp8_format gradients, bool delayed, bool sink,
                               uint64_t *random) {
    struct layer l;
    memset(&l, 0, sizeof l);
    l.shape = s;
    l.scales = (struct fp8_scale *)test_alloc((FP8_ATTENTION_TENSORS + 1) * sizeof *l.scales);
    memset(l.scales, 0, (FP8_ATTENTION_TENSORS + 1) * sizeof *l.scales);
    l.call.shape = s;
    l.call.gradients = gradients;
    l.call.outputs_in_fp8 = delayed;
    l.call.full = l.call.calibrates = true;
    l.call.any_order = !has_order(s);
    for (int i = 0; i < FP8_ATTENTION_TENSORS; i++)
        l.call.scales[i] = &l.scales[i];
    l.call.out = &l.scales[FP8_ATTENTION_TENSORS];
    l.qkv = (floatX *)test_alloc((size_t)qkv_count(s) * sizeof *l.qkv);
    l.dqkv = (floatX *)test_alloc((size_t)qkv_count(s) * sizeof *l.dqkv);
    l.dout = (floatX *)test_alloc((size_t)out_count(s) * sizeof *l.dout);
    l.out = (floatX *)test_alloc((size_t)out_count(s) * sizeof *l.out);
    l.qkv8 = (fp8 *)test_alloc((size_t)qkv_count(s));
    l.dout8 = (fp8 *)test_alloc((size_t)out_count(s));
    l.out8 = (fp8 *)test_alloc((size_t)out_count(s));
    l.lse = (float *)test_alloc((size_t)lse_count(s) * sizeof *l.lse);
    l.amax = (uint32_t *)test_alloc(sizeof *l.amax);
    *l.amax = 0;
    const struct fp8_attention_demands demands = demands_of(&l.call);
    const size_t forward = fp8_attention_forward_workspace_bytes(s, demands, &dev);
    const size_t backward = fp8_attention_backward_workspace_bytes(s, demands, &dev);
    l.workspace = test_alloc(forward > backward ? forward : backward);
    const int width = (s.num_heads + 2 * s.num_query_groups) * s.head_dim, q = s.num_heads * s.head_dim;
    for (int64_t i = 0; i < qkv_count(s); i++) {
        const int column = (int)(i % width), t = (int)(i / width % s.T);
        double x = test_normal(random);
        if (sink && column < q)
            x += 3 / sqrt((double)s.head_dim);
        if (sink && t == 0 && column >= q && column < q + s.num_query_groups * s.head_dim)
            x = 4;
        l.qkv[i] = to_floatX((float)x);
    }
    for (int64_t i = 0; i < out_count(s); i++)
        l.dout[i] = to_floatX((float)(1e-3 * test_normal(random)));
    return l;
}
static void layer_free(struct layer *l) {
    void *all[] = {l->scales, l->qkv,  l->dqkv, l->dout, l->out,      l->qkv8,
                   l->dout8,  l->out8, l->lse,  l->amax, l->workspace};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}
// Does what a model does in forward, the projection's cast of O too.
static void layer_forward(struct layer *l, bool first) {
    fp8_attention_cast(l->qkv8, l->qkv, l->call, first, &dev);
    fp8_attention_forward(l->call.outputs_in_fp8 ? l->out8 : NULL, l->call.outputs_in_fp8 ? NULL : l->out, l->lse,
                          l->qkv8, l->call, first, l->workspace, &dev);
    device_synchronize(&dev);
    if (l->call.outputs_in_fp8)
        return;
    uint32_t largest = 0;
    for (int64_t i = 0; i < out_count(l->shape); i++)
        largest = fp8_magnitude(to_float(l->out[i])) > largest ? fp8_magnitude(to_float(l->out[i])) : largest;
    assert_int_equal(l->call.out->amax, largest);
    fp8_cast_with_amax(l->out8, l->call.out, FP8_E4M3, l->out, out_count(l->shape) / 16, 16, &dev);
    device_synchronize(&dev);
}
static void layer_backward(struct layer *l) {
    fp8_cast_with_amax(l->dout8, l->call.scales[FP8_ATTENTION_DOUT], l->call.gradients, l->dout,
                       out_count(l->shape) / 16, 16, &dev);
    fp8_attention_backward(l->dqkv, l->dout8, l->qkv8, l->out8, l->lse, l->call, l->amax, l->workspace, &dev);
    device_synchronize(&dev);
}
// Whether the target computes a shape, forward and backward; says why not. The emulated GPU and cuDNN's stand-in must.
static bool takes(struct attention_shape s, bool delayed) {
    const struct fp8_attention_demands demands = {true, delayed, true, FP8_E5M2};
    char reason[256];
    fp8_attention_unavailable_reason(reason, sizeof reason, s, demands, &dev);
    if (!*reason)
        return true;
#if defined(CUDA_EMULATED) && defined(PRECISION_BF16)
    fail_msg("the emulated GPU and cuDNN's stand-in take it: %s", reason);
#endif
    print_message("FP8 attention %s\n", reason);
    return false;
}
// Skips the test that it begins where the target can't compute a shape.
static void needs_fp8_attention(struct attention_shape s, bool delayed) {
    if (!takes(s, delayed))
        skip();
}

// ---- The formulas, in double ----

// Returns E(x, scale) / scale.
static double rounded_by(double x, double scale, enum fp8_format format) {
    const int mantissa = format == FP8_E4M3 ? 3 : 2, least = format == FP8_E4M3 ? -6 : -14;
    const double size = fabs(x * scale), largest = fp8_reference_value(fp8_reference_largest(format), format);
    const int exponent = size > 0 && ilogb(size) > least ? ilogb(size) : least;
    const double unit = ldexp(1, exponent - mantissa), rounded = nearbyint(size / unit) * unit;
    return copysign(rounded < largest ? rounded : largest, x) / scale;
}
// x (n) = the values of codes by a scale
static double *decoded(const fp8 *codes, const struct fp8_scale *scale, enum fp8_format format, int64_t n) {
    double *x = test_doubles(n);
    for (int64_t i = 0; i < n; i++)
        x[i] = fp8_reference_decode(codes[i], format) / (double)scale->scale;
    return x;
}
// What the formulas make of a layer's codes and scales. scale_of: dS's scale is by its own largest magnitude where
// that of the layer is 0.
struct expected {
    int first;                // rows of a sequence before this one are left out
    double *out, *lse, *dqkv; // before they are rounded to FP8
    double amax_out, amax_ds, amax[3];
};
static void larger_into(double *amax, double x) { *amax = fabs(x) > *amax ? fabs(x) : *amax; }

struct exact_head { // a head's rows
    const double *q, *k, *v, *dout, *out;
    double *dq, *dk, *dv;
    int64_t stride, out_stride;
};
static double dot(const double *a, const double *b, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}
// Computes O, lse, dQ, dK and dV of one head; dK and dV are added to. ds_scale 0: only amax_ds.
static void expect_head(struct expected *e, const struct exact_head *x, struct attention_shape s, int64_t row, int h,
                        double *out, bool backward, double ds_scale, enum fp8_format gradients) {
    double *p = test_doubles(s.T);
    for (int t = e->first; t < s.T; t++) {
        double max = -INFINITY, sum = 0, delta = 0;
        for (int j = 0; j <= t; j++) {
            p[j] = dot(x->q + t * x->stride, x->k + j * x->stride, s.head_dim) * (double)s.scale;
            max = p[j] > max ? p[j] : max;
        }
        for (int j = 0; j <= t; j++)
            sum += exp(p[j] - max);
        e->lse[(row * s.num_heads + h) * s.T + t] = max + log(sum);
        for (int d = 0; d < s.head_dim; d++)
            delta += backward ? x->dout[t * x->out_stride + d] * x->out[t * x->out_stride + d] : 0;
        for (int j = 0; j <= t; j++) {
            const double exact = exp(p[j] - max) / sum, p8 = rounded_by(exact, 256, FP8_E4M3);
            for (int d = 0; d < s.head_dim; d++)
                out[t * x->out_stride + d] += p8 * x->v[j * x->stride + d];
            if (!backward)
                continue;
            const double dp = dot(x->dout + t * x->out_stride, x->v + j * x->stride, s.head_dim);
            const double ds = (dp - delta) * exact * (double)s.scale;
            larger_into(&e->amax_ds, ds);
            if (ds_scale == 0)
                continue;
            const double ds8 = rounded_by(ds, ds_scale, gradients);
            for (int d = 0; d < s.head_dim; d++) {
                x->dv[j * x->stride + d] += p8 * x->dout[t * x->out_stride + d];
                x->dq[t * x->stride + d] += ds8 * x->k[j * x->stride + d];
                x->dk[j * x->stride + d] += ds8 * x->q[t * x->stride + d];
            }
        }
        for (int d = 0; d < s.head_dim; d++)
            larger_into(&e->amax_out, out[t * x->out_stride + d]);
    }
    free(p);
}
// Returns what the formulas make of the layer's codes; the caller frees out, lse and dqkv.
static struct expected expect(const struct layer *l, bool backward, int first) {
    const struct attention_shape s = l->shape;
    const int D = s.head_dim, group = s.num_heads / s.num_query_groups;
    const int64_t width = (s.num_heads + 2 * s.num_query_groups) * D, out_width = s.num_heads * D;
    struct expected e;
    memset(&e, 0, sizeof e);
    e.first = first;
    e.out = test_doubles(out_count(s));
    e.lse = test_doubles(lse_count(s));
    e.dqkv = test_doubles(qkv_count(s));
    memset(e.out, 0, (size_t)out_count(s) * sizeof *e.out);
    memset(e.dqkv, 0, (size_t)qkv_count(s) * sizeof *e.dqkv);
    double *parts[3];
    for (int i = 0; i < 3; i++)
        parts[i] = decoded(l->qkv8, l->call.scales[i], FP8_E4M3, qkv_count(s));
    double *dout = NULL, *out = NULL, ds_scale = 0;
    if (backward) {
        dout = decoded(l->dout8, l->call.scales[FP8_ATTENTION_DOUT], l->call.gradients, out_count(s));
        out = decoded(l->out8, l->call.out, FP8_E4M3, out_count(s));
        ds_scale = (double)l->call.scales[FP8_ATTENTION_DS]->scale;
    }
    for (int64_t i = 0; i < (int64_t)s.B * s.num_heads; i++) {
        const int64_t b = i / s.num_heads, row = b * s.T;
        const int h = (int)(i % s.num_heads), kv = s.num_heads + h / group;
        const int64_t q_at = row * width + h * D, k_at = row * width + kv * D, v_at = k_at + s.num_query_groups * D,
                      out_at = row * out_width + h * D;
        const struct exact_head x = {parts[0] + q_at,
                                     parts[1] + k_at,
                                     parts[2] + v_at,
                                     backward ? dout + out_at : NULL,
                                     backward ? out + out_at : NULL,
                                     e.dqkv + q_at,
                                     e.dqkv + k_at,
                                     e.dqkv + v_at,
                                     width,
                                     out_width};
        expect_head(&e, &x, s, b, h, e.out + out_at, backward, ds_scale, l->call.gradients);
    }
    for (int64_t i = 0; i < qkv_count(s); i++) {
        const int column = (int)(i % width) / D;
        larger_into(&e.amax[column < s.num_heads ? 0 : column < s.num_heads + s.num_query_groups ? 1 : 2], e.dqkv[i]);
    }
    for (int i = 0; i < 3; i++)
        free(parts[i]);
    free(dout);
    free(out);
    return e;
}
static void expected_free(struct expected *e) {
    free(e->out);
    free(e->lse);
    free(e->dqkv);
}
// Returns an amax's value.
static double amax_of(const struct fp8_scale *scale) {
    float x;
    memcpy(&x, &scale->amax, sizeof x);
    return (double)x;
}
// Returns the place of a code among all of its format.
static int place_of(fp8 code) { return code & 0x80 ? -(code & 0x7f) : code & 0x7f; }

// A sequence's first row of O is v, whose codes are often in the middle between two of O's, and may become either.
// An element of P near the middle between two of its values may be rounded to the other one. That moves O by a step of
// E4M3 at most where O is not much smaller than the values that it is a mean of, and else by little of the largest O.
static void check_forward(const struct layer *l, const struct expected *e) {
    int64_t other = 0;
    for (int64_t i = 0; i < lse_count(l->shape); i++)
        if (i % l->shape.T >= e->first)
            assert_near((double)l->lse[i], e->lse[i], 2e-5 * (1 + fabs(e->lse[i])), i);
    if (e->first == 0)
        assert_near(amax_of(l->call.out), e->amax_out, (l->call.outputs_in_fp8 ? 2e-3 : 6e-3) * e->amax_out, 0);
    if (!l->call.outputs_in_fp8) {
        double *out = test_doubles(out_count(l->shape));
        for (int64_t i = 0; i < out_count(l->shape); i++)
            out[i] = (double)to_float(l->out[i]);
        assert_close(out, e->out, out_count(l->shape), 0.004);
        free(out);
        return;
    }
    for (int64_t i = 0; i < out_count(l->shape); i++) {
        if (i / (l->shape.num_heads * l->shape.head_dim) % l->shape.T < e->first)
            continue;
        const double wanted = rounded_by(e->out[i], (double)l->call.out->scale, FP8_E4M3);
        const fp8 code = fp8_reference_encode((float)(wanted * (double)l->call.out->scale), FP8_E4M3);
        const int steps = abs(place_of(l->out8[i]) - place_of(code));
        const double scale = (double)l->call.out->scale,
                     moved = fp8_reference_decode(l->out8[i], FP8_E4M3) / scale - wanted;
        if (steps > 1 && !(fabs(moved) <= 0.002 * e->amax_out))
            fail_msg("O8[%d] is %d steps from the formulas' code", (int)i, steps);
        other += steps > 0;
    }
    assert_true((double)other <= 0.02 * (double)out_count(l->shape) + 2);
}
// Checks dqkv, of which the parts have an error each.
static void check_backward(const struct layer *l, const struct expected *e, double bound) {
    const struct attention_shape s = l->shape;
    const int D = s.head_dim, width = (s.num_heads + 2 * s.num_query_groups) * D;
    const int ends[] = {s.num_heads * D, (s.num_heads + s.num_query_groups) * D, width};
    static const char *const names[] = {"dQ", "dK", "dV"};
    assert_near(amax_of(l->call.scales[FP8_ATTENTION_DS]), e->amax_ds, 1e-4 * e->amax_ds, 0);
    uint32_t largest = 0;
    for (int part = 0; part < 3; part++) {
        struct fp8_scale *scale = l->call.scales[FP8_ATTENTION_DQ + part];
        double *x = test_doubles(qkv_count(s)), *wanted = test_doubles(qkv_count(s));
        int64_t n = 0;
        for (int64_t i = 0; i < qkv_count(s); i++) {
            const int column = (int)(i % width);
            largest = fp8_magnitude(to_float(l->dqkv[i])) > largest ? fp8_magnitude(to_float(l->dqkv[i])) : largest;
            if (column >= ends[part] || column < (part ? ends[part - 1] : 0))
                continue;
            x[n] = (double)to_float(l->dqkv[i]);
            wanted[n++] =
                l->call.outputs_in_fp8 ? rounded_by(e->dqkv[i], (double)scale->scale, l->call.gradients) : e->dqkv[i];
        }
        assert_close_at(x, wanted, n, bound, names[part], __FILE__, __LINE__);
        if (l->call.outputs_in_fp8)
            assert_near(amax_of(scale), e->amax[part], 0.005 * e->amax[part], part);
        free(x);
        free(wanted);
    }
    assert_int_equal(*l->amax, largest);
}
// Whether tests' shapes take a way: 0 without a history; 1 with scales 4 times too large, so that values saturate.
static void set_history(struct layer *l, int stale) {
    for (int i = 0; stale && i <= FP8_ATTENTION_TENSORS; i++) {
        l->scales[i].delayed = l->scales[i].scale * 4;
        l->scales[i].amax = 0;
    }
    l->call.calibrates = !stale;
}
// Checks that scales by which outputs were cast are those of their own amaxes, or the history's.
static void check_scales(const struct layer *l) {
    for (int i = FP8_ATTENTION_DS; i <= FP8_ATTENTION_TENSORS; i++) {
        const struct fp8_scale *scale = &l->scales[i];
        const enum fp8_format format = i == FP8_ATTENTION_TENSORS ? FP8_E4M3 : l->call.gradients;
        if (i > FP8_ATTENTION_DS && !l->call.outputs_in_fp8)
            continue;
        const float wanted = scale->delayed != 0 ? scale->delayed : fp8_scale_of(scale->amax, format);
        assert_true(scale->scale == wanted && scale->inverse == 1 / wanted);
    }
}
// Checks one shape, first without a history, then with a stale one.
static void check_formulas(struct attention_shape s, enum fp8_format gradients, bool delayed, bool sink) {
    uint64_t random = (uint64_t)(s.T + 3 * s.head_dim);
    test_case(random, "B %d, T %d, %d heads over %d of %d, %s, %s%s", s.B, s.T, s.num_heads, s.num_query_groups,
              s.head_dim, gradients == FP8_E5M2 ? "hybrid" : "e4m3", delayed ? "delayed" : "tensorwise",
              sink ? ", with a sink" : "");
    struct layer l = layer_make(s, gradients, delayed, sink, &random);
    for (int stale = 0; stale < (delayed ? 2 : 1); stale++) {
        set_history(&l, stale);
        *l.amax = 0;
        layer_forward(&l, true);
        struct expected e = expect(&l, false, 0);
        check_forward(&l, &e);
        expected_free(&e);
        layer_backward(&l);
        e = expect(&l, true, 0);
        check_backward(&l, &e, 0.01);
        check_scales(&l);
        expected_free(&e);
    }
    layer_free(&l);
}
static void attention_follows_the_formulas(void **state) {
    needs_fp8_attention(shape_of(1, 128, 1, 1, 128), true);
    static const int shapes[][5] = {
        {2, 130, 4, 1, 64}, {1, 128, 4, 2, 128}, {1, 37, 3, 3, 48}, {1, 300, 2, 1, 16}, {3, 33, 2, 2, 80}};
    for (int i = 0; i < 5; i++)
        for (int kind = 0; kind < 4; kind++) {
            const int *n = shapes[i];
            if ((SLOW || i > 1) && kind != i % 4)
                continue;
            const struct attention_shape s = shape_of(n[0], n[1], n[2], n[3], n[4]);
            if (takes(s, kind % 2 == 0))
                check_formulas(s, formats[kind / 2], kind % 2 == 0, i == 3);
        }
}
#ifdef CUDA_EMULATED
// Checks compute capability 9.0, whose dQ is summed in any order.
static void attention_on_hopper_follows_the_formulas(void **state) {
    const struct attention_shape s = shape_of(1, 130, 4, 2, 128);
    emulate("9.0");
    needs_fp8_attention(s, true);
    assert_false(has_order(s));
    check_formulas(s, FP8_E5M2, true, true);
    emulate("10.0");
}
#endif
// Checks the last rows of a sequence whose scores the CPU does not keep all.
static void long_sequences_follow_the_formulas(void **state) {
    const struct attention_shape s = shape_of(1, 2200, 1, 1, 16);
    uint64_t random = 2200;
    needs_fp8_attention(s, true);
#ifdef CUDA_EMULATED
    skip(); // cuDNN's stand-in keeps all scores
#endif
    test_case(random, "T %d", s.T);
    struct layer l = layer_make(s, FP8_E5M2, true, false, &random);
    layer_forward(&l, true);
    struct expected e = expect(&l, false, 2150);
    check_forward(&l, &e);
    expected_free(&e);
    layer_free(&l);
}

// ---- Against bf16 ----

// The errors that were computed in numpy for normal inputs, T 1024 and heads of 128, of the whole attention, casts
// included; each may be 1.2 times as large. The backward of forward only reads the decoded q, k, v and O.
static void errors_are_those_of_the_formats(void **state) {
    const struct attention_shape s = shape_of(1, 1024, 2, 2, 128);
    static const struct {
        const char *what;
        bool delayed, full, sink;
        enum fp8_format gradients;
        double most[4]; // O, dQ, dK, dV
    } kinds[] = {
        {"hybrid, outputs FP8", true, true, false, FP8_E5M2, {.053, .105, .104, .084}},
        {"hybrid, outputs bf16", false, true, false, FP8_E5M2, {.046, .089, .089, .065}},
        {"e4m3, outputs bf16", false, true, false, FP8_E4M3, {.046, .062, .062, .048}},
        {"forward only", true, false, false, FP8_E5M2, {.053, .050, .050, .032}},
        {"hybrid, outputs FP8, sink", true, true, true, FP8_E5M2, {.044, .33, .34, .080}},
        {"forward only, sink", true, false, true, FP8_E5M2, {.043, .33, .34, .010}},
    };
    needs_fp8_attention(s, true);
    if (SLOW)
        skip();
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        uint64_t random = 1024;
        if (!takes(s, kinds[k].delayed))
            continue;
        test_case(random, "%s", kinds[k].what);
        struct layer l = layer_make(s, kinds[k].gradients, kinds[k].delayed, kinds[k].sink, &random);
        l.call.full = kinds[k].full;
        const int width = 6 * 128;
        floatX *out = (floatX *)test_alloc((size_t)out_count(s) * sizeof *out);
        floatX *dqkv = (floatX *)test_alloc((size_t)qkv_count(s) * sizeof *dqkv);
        floatX *qkv = (floatX *)test_alloc((size_t)qkv_count(s) * sizeof *qkv);
        float *lse = (float *)test_alloc((size_t)lse_count(s) * sizeof *lse);
        void *workspace = test_alloc(flash_forward_workspace_bytes(s, &dev) + flash_backward_workspace_bytes(s, &dev));
        const struct dropout none = {0, 0, 0, 0, 0, NULL};
        flash_forward(out, lse, l.qkv, s, none, NULL, workspace, &dev);
        flash_backward(dqkv, l.dout, l.qkv, out, lse, s, none, NULL, workspace, &dev);
        layer_forward(&l, true);
        if (kinds[k].delayed)
            fp8_read_back(l.out, l.out8, l.call.out, FP8_E4M3, out_count(s), &dev);
        if (kinds[k].full)
            layer_backward(&l);
        else {
            fp8_attention_read_back(qkv, l.qkv8, l.call.scales, FP8_E4M3, s, &dev);
            flash_backward(l.dqkv, l.dout, qkv, l.out, l.lse, s, none, NULL, workspace, &dev);
        }
        double *exact_out = to_doubles(out, out_count(s)), *exact_dqkv = to_doubles(dqkv, qkv_count(s));
        double errors[4] = {columns_error(l.out, exact_out, s.T, 256, 0, 256)};
        for (int part = 0; part < 3; part++)
            errors[1 + part] = columns_error(l.dqkv, exact_dqkv, s.T, width, part * 256, part * 256 + 256);
        if (in_long_run())
            print_message("%s: O %.3f, dQ %.3f, dK %.3f, dV %.3f\n", kinds[k].what, errors[0], errors[1], errors[2],
                          errors[3]);
        for (int i = 0; i < 4; i++)
            if (!(errors[i] <= 1.2 * kinds[k].most[i]))
                fail_msg("error %d (O, dQ, dK, dV) is %.3f, above 1.2 times %.3f", i, errors[i], kinds[k].most[i]);
        void *all[] = {out, dqkv, qkv, lse, workspace, exact_out, exact_dqkv};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            free(all[i]);
        layer_free(&l);
    }
}

// ---- State ----

// Checks that recomputation, which takes no amax, and other numbers of threads give the same bits; and so does a call
// whose history has what a call without one has found.
static void bits_are_the_same_again(void **state) {
    const struct attention_shape s = shape_of(2, 70, 4, 2, 64);
    needs_fp8_attention(s, true);
    const int threads = omp_get_max_threads();
    for (int delayed = 0; delayed < 2; delayed++) {
        uint64_t random = 7, other = 7;
        if (!takes(s, delayed))
            continue;
        test_case(random, "%s", delayed ? "delayed" : "tensorwise");
        struct layer l = layer_make(s, FP8_E5M2, delayed, false, &random),
                     again = layer_make(s, FP8_E5M2, delayed, false, &other);
        layer_forward(&l, true);
        layer_backward(&l);
        memcpy(again.scales, l.scales, (FP8_ATTENTION_TENSORS + 1) * sizeof *l.scales);
        for (int turn = 0; turn < 3; turn++) {
            for (int i = 0; turn == 2 && i <= FP8_ATTENTION_TENSORS; i++) {
                again.scales[i].delayed = l.scales[i].scale;
                again.scales[i].amax = 0;
            }
            omp_set_num_threads(turn + 1);
            *again.amax = 0;
            layer_forward(&again, turn == 2);
            for (int i = 0; turn < 2 && i <= FP8_ATTENTION_TENSORS; i++) // no call has changed a first forward's
                assert_memory_equal(&again.scales[i].amax, &l.scales[i].amax, sizeof l.scales[i].amax);
            layer_backward(&again);
            assert_memory_equal(again.out8, l.out8, out_count(s));
            assert_memory_equal(again.lse, l.lse, lse_count(s) * sizeof *l.lse);
            if (l.call.any_order)
                continue;
            assert_memory_equal(again.dqkv, l.dqkv, qkv_count(s) * sizeof *l.dqkv);
            for (int i = 0; i <= FP8_ATTENTION_TENSORS; i++)
                if (i != FP8_ATTENTION_TENSORS || delayed || turn < 2)
                    assert_memory_equal(&again.scales[i].amax, &l.scales[i].amax, sizeof l.scales[i].amax);
        }
        layer_free(&l);
        layer_free(&again);
    }
    omp_set_num_threads(threads);
}
// Checks that an infinity or a NaN reaches the amaxes, by which the step is skipped; with a history NaN does, as a code.
static void overflow_reaches_the_amaxes(void **state) {
    const struct attention_shape s = shape_of(1, 40, 2, 2, 64);
    needs_fp8_attention(s, true);
    for (int kind = 0; kind < 4; kind++) {
        uint64_t random = 3;
        const bool in_dout = kind % 2 == 1, stale = kind > 1;
        test_case(random, "%s in %s%s", kind ? "NaN" : "infinity", in_dout ? "dO" : "v", stale ? ", history" : "");
        struct layer l = layer_make(s, FP8_E5M2, true, false, &random);
        if (stale) {
            layer_forward(&l, true);
            layer_backward(&l);
            set_history(&l, 1);
        }
        if (in_dout)
            l.dout[70] = to_floatX(NAN);
        else
            l.qkv[5 * 64] = to_floatX(kind ? NAN : INFINITY);
        layer_forward(&l, true);
        layer_backward(&l);
        assert_true(l.scales[in_dout ? FP8_ATTENTION_DOUT : FP8_ATTENTION_V].amax >= 0x7f800000u);
        assert_true(in_dout || l.call.out->amax >= 0x7f800000u);
        assert_true(l.scales[FP8_ATTENTION_DQ].amax >= 0x7f800000u);
        layer_free(&l);
    }
}
// Checks q and k whose inverse scales have a product below all floats: every score is 0, and O the mean of v so far.
static void tiny_queries_and_keys_see_all_keys_alike(void **state) {
    const struct attention_shape s = shape_of(1, 70, 2, 2, 64);
    needs_fp8_attention(s, true);
    uint64_t random = 4;
    struct layer l = layer_make(s, FP8_E5M2, true, false, &random);
    for (int64_t i = 0; i < qkv_count(s); i++)
        l.qkv[i] = to_floatX(to_float(l.qkv[i]) * (i % 384 < 256 ? 1e-30f : 1));
    layer_forward(&l, true);
    for (int t = 0; t < s.T; t++)
        assert_near((double)l.lse[t], log(t + 1.0), 1e-5, t);
    layer_backward(&l);
    for (int64_t i = 0; i < qkv_count(s); i++)
        assert_true(isfinite(to_float(l.dqkv[i])));
    layer_free(&l);
}

// ---- Casts ----

static void casts_have_a_scale_a_part(void **state) {
    const struct attention_shape s = shape_of(2, 37, 6, 2, 48);
    const int D = s.head_dim, width = 10 * D;
    for (int full = 0; full < 2; full++)
        for (int delayed = 0; delayed < 2; delayed++) {
            uint64_t random = 11;
            test_case(random, "full %d, delayed %d", full, delayed);
            struct layer l = layer_make(s, FP8_E5M2, true, false, &random);
            floatX *back = (floatX *)test_alloc((size_t)qkv_count(s) * sizeof *back);
            uint32_t largest[3] = {0, 0, 0};
            l.call.full = full;
            for (int i = 0; i < 3; i++)
                l.scales[i].delayed = delayed ? 3.0f + (float)i : 0;
            fp8_attention_cast(l.qkv8, l.qkv, l.call, true, &dev);
            fp8_attention_read_back(back, l.qkv8, l.call.scales, FP8_E4M3, s, &dev);
            for (int64_t i = 0; i < qkv_count(s); i++) {
                const int head = (int)(i % width) / D, part = head < 6 ? 0 : head < 8 ? 1 : 2;
                const uint32_t size = fp8_magnitude(to_float(l.qkv[i]));
                largest[part] = size > largest[part] ? size : largest[part];
            }
            for (int i = 0; i < 3; i++) {
                float scale = delayed ? 3.0f + (float)i : fp8_scale_of(largest[i], FP8_E4M3);
                if (!full)
                    scale = (float)ldexp(1, ilogb((double)scale));
                assert_int_equal(l.scales[i].amax, largest[i]);
                assert_true(l.scales[i].scale == scale && l.scales[i].inverse == 1 / scale);
            }
            for (int64_t i = 0; i < qkv_count(s); i++) {
                const int head = (int)(i % width) / D, part = head < 6 ? 0 : head < 8 ? 1 : 2;
                assert_int_equal(l.qkv8[i], fp8_encode(to_float(l.qkv[i]) * l.scales[part].scale, FP8_E4M3));
                const float value = fp8_decode(l.qkv8[i], FP8_E4M3) * l.scales[part].inverse;
                assert_true(to_float(back[i]) == to_float(to_floatX(value)));
                assert_true(full || to_float(back[i]) == value);
            }
            free(back);
            layer_free(&l);
        }
}
static void codes_are_transposed(void **state) {
    static const int shapes[][2] = {{16, 16}, {64, 128}, {80, 208}, {144, 48}};
    for (int k = 0; k < 4; k++) {
        const int M = shapes[k][0], N = shapes[k][1];
        uint64_t random = 5;
        test_case(random, "M %d, N %d", M, N);
        fp8 *rows = (fp8 *)test_alloc((size_t)(M * N)), *columns = (fp8 *)test_alloc((size_t)(M * N));
        for (int i = 0; i < M * N; i++)
            rows[i] = (fp8)test_random(&random);
        fp8_transpose(columns, rows, M, N, &dev);
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++)
                assert_int_equal(columns[n * M + m], rows[m * N + n]);
        free(rows);
        free(columns);
    }
}
static void scales_are_settled(void **state) {
    struct fp8_scale *scales = (struct fp8_scale *)test_alloc(3 * sizeof *scales),
                     *all[] = {scales, scales + 1, scales + 2};
    float *lse = (float *)test_alloc(300 * sizeof *lse), *out = (float *)test_alloc(300 * sizeof *out);
    const float seven = 7;
    memset(scales, 0, 3 * sizeof *scales);
    scales[0].delayed = 5;
    memcpy(&scales[1].amax, &seven, sizeof seven);
    fp8_set_scales(all, 3, FP8_E5M2, &dev);
    assert_true(scales[0].scale == 5 && scales[1].scale == 57344.0f / 7 && scales[2].scale == 1);
    for (int i = 0; i < 3; i++)
        assert_true(scales[i].inverse == 1 / scales[i].scale);
    for (int i = 0; i < 300; i++)
        lse[i] = (float)i;
    fp8_attention_scale_lse(out, lse, 1.5f, 300, &dev);
    for (int i = 0; i < 300; i++)
        assert_true(out[i] == 1.5f * (float)i);
    free(scales);
    free(lse);
    free(out);
}

// ---- Refusals ----

// Checks which GPUs and libraries take what, and that each refusal names its cause or the option to change.
static void what_is_not_taken_is_refused_by_name(void **state) {
    static const struct {
        int version, major, minor, D, T;
        bool full, delayed, any_order;
        const char *names; // "": it is taken
    } cases[] = {
        {92800, 9, 0, 128, 128, true, true, true, ""},
        {92800, 9, 0, 64, 37, false, true, false, ""},
        {92800, 10, 0, 64, 128, true, false, false, ""},
        {92800, 10, 3, 128, 128, true, true, false, ""},
        {92800, 8, 9, 128, 128, true, true, true, "compute capability"},
        {92800, 12, 0, 128, 128, false, true, true, "compute capability"},
        {92400, 10, 0, 128, 128, true, true, true, "cuDNN 9.25"},
        {92800, 9, 0, 128, 128, true, false, true, "--fp8-recipe delayed"},
        {92800, 9, 0, 64, 128, true, true, true, "heads of 128"},
        {92800, 9, 0, 128, 128, true, true, false, "--deterministic-mode"},
        {92800, 10, 0, 256, 128, false, true, true, "heads of up to 128"},
        {92800, 9, 0, 264, 128, false, true, true, "--kv-channels"},
        {92800, 9, 0, 128, 1, true, true, true, "--seq-length"},
    };
    if (sizeof(floatX) == sizeof(float)) {
        char reason[256];
        fp8_attention_refuses_shape(reason, sizeof reason, shape_of(1, 128, 1, 1, 64));
        assert_true(strstr(reason, "--precision bf16") != NULL);
        return;
    }
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct compute_capability gpu = {cases[i].major, cases[i].minor};
        const struct fp8_attention_demands demands = {cases[i].full, cases[i].delayed, cases[i].any_order, FP8_E5M2};
        char reason[256];
        test_case_without_seed("row %d", (int)i);
        fp8_attention_refuses(reason, sizeof reason, (size_t)cases[i].version, gpu,
                              shape_of(1, cases[i].T, 2, 2, cases[i].D), demands);
        assert_true(*cases[i].names ? strstr(reason, cases[i].names) != NULL : !*reason);
    }
    struct attention_shape windowed = shape_of(1, 128, 2, 2, 64);
    char reason[256];
    windowed.softcap = 30;
    fp8_attention_refuses_shape(reason, sizeof reason, windowed);
    assert_true(strstr(reason, "--attn-logit-softcapping") != NULL);
}

#if defined(CUDA_EMULATED) && defined(PRECISION_BF16)
// Checks that a library that computes something else is found out, on compute capability 10.x and 9.0.
static void a_wrong_library_is_found_out(void **state) {
    static const struct {
        const char *fault, *words; // words "": nothing is wrong
        bool hopper;
    } cases[] = {{"none", "", true},
                 {"none", "", false},
                 {"forward", "its output is wrong on this GPU", false},
                 {"backward", "its dV is wrong on this GPU", true},
                 {"nan", "its dQ is wrong on this GPU", false},
                 {"bits", "its forward pass, computed again on this GPU, gives other bits", false},
                 {"order", "its deterministic backward pass, computed again", false}};
    if (!in_long_run()) // a case takes a second; test_cuda_engine.py has one
        skip();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct fp8_attention_demands demands = {true, cases[i].hopper, cases[i].hopper, formats[i % 2]};
        const struct attention_shape s = shape_of(2, 64, 2, 1, cases[i].hopper ? 128 : 64);
        char reason[256];
        test_case_without_seed("fault %s, compute capability %s", cases[i].fault, cases[i].hopper ? "9.0" : "10.0");
        emulate(cases[i].hopper ? "9.0" : "10.0");
        setenv("EMU_CUDNN_FAULT", cases[i].fault, 1);
        fp8_attention_check(reason, sizeof reason, s, demands, &dev);
        if (*cases[i].words ? !strstr(reason, cases[i].words) : *reason)
            fail_msg("\"%s\", expected \"%s\"", reason, cases[i].words);
    }
    unsetenv("EMU_CUDNN_FAULT");
    emulate("10.0");
}
// Checks that neither the refusal nor the check of forward alone makes a plan of backward.
static void forward_makes_no_plan_of_backward(void **state) {
    const struct fp8_attention_demands demands = {false, true, false, FP8_E5M2};
    const struct attention_shape s = shape_of(1, 64, 1, 1, 64);
    char reason[256];
    emulate("10.0");
    fp8_attention_unavailable_reason(reason, sizeof reason, s, demands, &dev);
    assert_string_equal(reason, "");
    fp8_attention_check(reason, sizeof reason, s, demands, &dev);
    assert_string_equal(reason, "");
    assert_int_equal(fused_library_of(&dev)->planned, 2); // of the shape's tokens and of the check's
}
// Checks that calls run the plans that the demands have asked for and planned workspaces of, in both formats.
static void calls_run_the_plans_that_were_asked_for(void **state) {
    for (int i = 0; i < 2; i++) {
        uint64_t random = 6;
        char reason[256];
        test_case(random, "format %d", i);
        emulate("10.0");
        struct layer l = layer_make(shape_of(1, 32, 1, 1, 64), formats[i], false, false, &random);
        fp8_attention_unavailable_reason(reason, sizeof reason, l.shape, demands_of(&l.call), &dev);
        assert_string_equal(reason, "");
        const int planned = fused_library_of(&dev)->planned;
        layer_forward(&l, true);
        layer_backward(&l);
        assert_int_equal(fused_library_of(&dev)->planned, planned);
        layer_free(&l);
    }
}
// Checks the refusals that depend on the library: none is there, it refuses, it is old.
static void a_missing_library_is_named(void **state) {
    static const char *const cases[][3] = {{"EMU_CUDNN_REFUSE", "create", "needs cuDNN: "},
                                           {"EMU_CUDNN_REFUSE", "graph", "is refused by cuDNN 9.28.0, forward: "},
                                           {"EMU_CUDNN_VERSION", "92400", "needs cuDNN 9.25, and 9.24.0 is installed"}};
    const struct fp8_attention_demands demands = {true, true, true, FP8_E5M2};
    for (int i = 0; i < 3; i++) {
        char reason[256];
        setenv(cases[i][0], cases[i][1], 1);
        emulate("9.0");
        fp8_attention_unavailable_reason(reason, sizeof reason, shape_of(1, 128, 2, 2, 128), demands, &dev);
        if (!strstr(reason, cases[i][2]))
            fail_msg("\"%s\", expected \"%s\"", reason, cases[i][2]);
        unsetenv(cases[i][0]);
    }
    setenv("EMU_CUDNN_VERSION", "92800", 1);
    emulate("10.0");
}
#endif

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_follows_the_formulas),
#ifdef CUDA_EMULATED
        cmocka_unit_test(attention_on_hopper_follows_the_formulas),
#endif
        cmocka_unit_test(long_sequences_follow_the_formulas),
        cmocka_unit_test(errors_are_those_of_the_formats),
        cmocka_unit_test(bits_are_the_same_again),
        cmocka_unit_test(overflow_reaches_the_amaxes),
        cmocka_unit_test(tiny_queries_and_keys_see_all_keys_alike),
        cmocka_unit_test(casts_have_a_scale_a_part),
        cmocka_unit_test(codes_are_transposed),
        cmocka_unit_test(scales_are_settled),
        cmocka_unit_test(what_is_not_taken_is_refused_by_name),
#if defined(CUDA_EMULATED) && defined(PRECISION_BF16)
        cmocka_unit_test(a_wrong_library_is_found_out),
        cmocka_unit_test(forward_makes_no_plan_of_backward),
        cmocka_unit_test(calls_run_the_plans_that_were_asked_for),
        cmocka_unit_test(a_missing_library_is_named),
#endif
    };
    setenv("CUDA_LAUNCH_BLOCKING", "1", 1); // the tests read what ops write
#ifdef CUDA_EMULATED
    setenv("EMU_CAPABILITY", "10.0", 1);
    setenv("EMU_CUDNN_VERSION", "92800", 1);
#endif
    device_open(&dev, 0, false);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
