// Attention by every backend of the target: against naive loops in double, against finite differences, and against
// itself.
#include "attention.cuh"
#include "kernels/fp8/fp8.cuh"         // fp8_magnitude
#include "kernels/attention/spans.cuh" // attention_spans
#include "kernels/rope_table.cuh"      // rope_table
#if defined(TARGET_CUDA) && defined(PRECISION_BF16)
#include "kernels/attention/sm90_backward_plan.cuh" // sm90_backward_block_of
#include "kernels/attention/sm90_forward_plan.cuh"  // sm90_forward_next
#include "kernels/cudnn/attention.cu"               // what it asks of the library, and why it refuses
#elif !defined(TARGET_CUDA)
#include "kernels/blocks.cuh"  // ALIGN_BLOCK
#include "kernels/vectors.cuh" // vec_exp2, under test
#endif
#include "kernels/device_queue.cuh" // device_open
#include "run/attention_choice.cuh"
#include "test/attention_shape.h" // shape_of, columns_error
#include "test/testing.h"
#include "test/fails.h"
#include <float.h>  // DBL_MAX
#include <limits.h> // INT_MAX
#include <omp.h>    // omp_set_num_threads

static struct device dev;
static uint64_t case_seed; // of the inputs under test

#if (defined(PRECISION_BF16) && defined(AMX_EMULATE)) || defined(__SANITIZE_ADDRESS__)
enum { SLOW = 1 }; // every product of tiles takes long, so shapes are fewer and smaller
#elif (defined(CUDA_EMULATED) && !defined(EVERY_SHAPE)) || defined(QUICK)
// Still fewer shapes. QUICK: under compute-sanitizer. EVERY_SHAPE: the emulator takes a GPU's shapes, for 20 minutes.
enum { SLOW = 2 };
#else
#define SLOW (test_slowness() > 1 ? 1 : 0)
#endif
#if defined(TARGET_CUDA) && !defined(CUDA_EMULATED) && !defined(QUICK)
enum { ON_GPU = 1, LONG = 1 }; // longer shapes and more repeats, since blocks really run side by side
#elif defined(EVERY_SHAPE)
enum { ON_GPU = 0, LONG = 1 };
#else
enum { ON_GPU = 0, LONG = 0 };
#endif

#if defined(TARGET_CUDA) && !defined(PRECISION_BF16)
enum { TF32 = 1 }; // flash makes its products by 3xTF32
#else
enum { TF32 = 0 };
#endif

// Puts into reason (size bytes) why cuDNN's attention does not take a shape; "": it does. Frees the plans of earlier
// shapes where little room is left for more.
static void fused_reason(char *reason, size_t size, struct attention_shape s, float dropout) {
#if defined(TARGET_CUDA) && defined(PRECISION_BF16)
    if (dev.fused && dev.fused->planned > FUSED_PLANS - 8)
        attention_close(&dev);
#endif
    if (dropout > 0)
        snprintf(reason, size, "has no --attention-dropout");
    else
        fused_unavailable_reason(reason, size, s, true, &dev);
}
// Whether a backend takes a shape.
static bool backend_takes(enum attention_backend backend, struct attention_shape s, float dropout) {
    char reason[256] = "";
    struct attention_demands demands;
    memset(&demands, 0, sizeof demands);
    demands.dropout = dropout;
    switch (backend) {
    case ATTENTION_FLASH: flash_unavailable_reason(reason, sizeof reason, s, &dev); break;
    case ATTENTION_FLASH_SM90: attention_sm90_reason(reason, sizeof reason, ATTENTION_FLASH, s, &demands, &dev); break;
    case ATTENTION_FUSED: fused_reason(reason, sizeof reason, s, dropout); break;
    case ATTENTION_UNFUSED:
    case ATTENTION_AUTO: break;
    }
    return *reason == 0;
}
// Whether tests go through fused too. On a GPU only its own tests do, since plans take seconds there.
static bool fused_too = !ON_GPU;
// Returns the next backend after `after` that takes a shape. ATTENTION_AUTO stands before the first one and after the
// last one.
static enum attention_backend next_backend(enum attention_backend after, struct attention_shape s, float dropout) {
    switch (after) {
    case ATTENTION_AUTO: return ATTENTION_FLASH;
    case ATTENTION_FLASH: return ATTENTION_UNFUSED;
    case ATTENTION_UNFUSED:
        if (backend_takes(ATTENTION_FLASH_SM90, s, dropout))
            return ATTENTION_FLASH_SM90;
        break;
    case ATTENTION_FLASH_SM90: break;
    case ATTENTION_FUSED: return ATTENTION_AUTO;
    }
    return fused_too && backend_takes(ATTENTION_FUSED, s, dropout) ? ATTENTION_FUSED : ATTENTION_AUTO;
}
#define FOR_EACH_BACKEND(backend, s, dropout)                                                                          \
    for (enum attention_backend backend = next_backend(ATTENTION_AUTO, (s), (dropout)); backend != ATTENTION_AUTO;     \
         backend = next_backend(backend, (s), (dropout)))

static struct attention_backward_options options_of(const float *rotary, bool any_order) {
    const struct attention_backward_options options = {rotary, any_order, {NULL, NULL}};
    return options;
}
static struct dropout dropout_of(float p) {
    struct dropout d;
    d.p = p;
    d.seed = 1234;
    d.step = 5;
    d.layer = 3;
    d.use = DROPOUT_ATTENTION;
    d.micro_step = NULL;
    return d;
}

// ---------------------------------------------------------------------------------------------------------------------
// The naive form. `round` is applied to the result of each op: `exactly` gives the reference, and `to_precision` what
// plain ops in floatX compute.

typedef double (*rounder)(double);
static double exactly(double x) { return x; }
static double to_precision(double x) { return (double)to_float(to_floatX((float)x)); }

struct naive {
    double *out, *lse, *p, *dqkv; // (B,T,H*D), (B,H,T), (B,H,T,T), (B,T,(H+2Hkv)*D)
};

static double dot(const double *x, const double *y, int n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++)
        sum += x[i] * y[i];
    return sum;
}
static void add(double *x, double factor, const double *y, int n) {
#pragma omp simd
    for (int i = 0; i < n; i++)
        x[i] += factor * y[i];
}
static double capped(double score, double softcap) { return softcap > 0 ? softcap * tanh(score / softcap) : score; }
// Returns the derivative of a capped score by the score.
static double capped_slope(double score_tanh, double softcap) {
    return softcap > 0 ? 1 - score_tanh / softcap * (score_tanh / softcap) : 1;
}
// Computes one query of one head, forward and backward. ds (T), slope (T): scratch.
static void naive_row(struct naive r, const double *qkv, const double *dout, struct attention_shape s, struct dropout d,
                      rounder round, int b, int h, int i, double *ds, double *slope) {
    const int H = s.num_heads, Hkv = s.num_query_groups, D = s.head_dim, T = s.T;
    const int64_t W = (int64_t)(H + 2 * Hkv) * D, k_at = (int64_t)(H + h / (H / Hkv)) * D,
                  v_at = k_at + (int64_t)Hkv * D;
    const int64_t row = ((int64_t)b * H + h) * T + i, q_at = ((int64_t)b * T + i) * W + (int64_t)h * D;
    const int64_t out_at = (((int64_t)b * T + i) * H + h) * D;
    const double *first = qkv + (int64_t)b * T * W;
    double *p = r.p + row * T, *dfirst = r.dqkv + (int64_t)b * T * W, max = -DBL_MAX, sum = 0, mean = 0;
    const int begin = s.first_key ? s.first_key[b * T + i] : 0, last = s.full ? T - 1 : i;
    for (int j = begin; j <= last; j++) {
        p[j] = round(capped(round(s.scale * round(dot(qkv + q_at, first + j * W + k_at, D))), s.softcap));
        slope[j] = capped_slope(p[j], s.softcap);
        max = p[j] > max ? p[j] : max;
    }
    for (int j = begin; j <= last; j++)
        sum += exp(p[j] - max);
    r.lse[row] = max + log(sum);
    for (int j = begin; j <= last; j++) {
        p[j] = round(exp(p[j] - max) / sum);
        const double kept = d.p > 0 ? dropout_scale(d, (uint64_t)(row * T + j)) : 1;
        add(r.out + out_at, round(p[j] * kept), first + j * W + v_at, D);
        ds[j] = round(kept * round(dot(dout + out_at, first + j * W + v_at, D)));
        mean += p[j] * ds[j];
        add(dfirst + j * W + v_at, round(p[j] * kept), dout + out_at, D);
    }
    for (int j = begin; j <= last; j++) {
        const double g = round(s.scale * round(slope[j] * round(p[j] * (ds[j] - mean))));
        add(r.dqkv + q_at, g, first + j * W + k_at, D);
        add(dfirst + j * W + k_at, g, qkv + q_at, D);
    }
    for (int c = 0; c < D; c++)
        r.out[out_at + c] = round(r.out[out_at + c]);
}
static struct naive naive_attention(const double *qkv, const double *dout, struct attention_shape s, struct dropout d,
                                    rounder round) {
    const int group = s.num_heads / s.num_query_groups;
    struct naive r;
    r.out = test_doubles(out_count(s));
    r.lse = test_doubles((int64_t)s.B * s.num_heads * s.T);
    r.p = test_doubles((int64_t)s.B * s.num_heads * s.T * s.T);
    r.dqkv = test_doubles(qkv_count(s));
#pragma omp parallel for collapse(2)
    for (int b = 0; b < s.B; b++)
        for (int kv = 0; kv < s.num_query_groups; kv++) {
            double *ds = test_doubles(s.T), *slope = test_doubles(s.T);
            for (int h = kv * group; h < (kv + 1) * group; h++)
                for (int i = 0; i < s.T; i++)
                    naive_row(r, qkv, dout, s, d, round, b, h, i, ds, slope);
            free(ds);
            free(slope);
        }
    for (int64_t i = 0; i < qkv_count(s); i++)
        r.dqkv[i] = round(r.dqkv[i]);
    return r;
}
// Turns r.dqkv, the gradient by rotated q and k, into the gradient by q and k before their rotation. rotary (T, D).
static void naive_undo_rope(struct naive r, const float *rotary, struct attention_shape s, rounder round) {
    const int D = s.head_dim, turned = s.num_heads + s.num_query_groups, all = turned + s.num_query_groups;
    for (int64_t t = 0; t < (int64_t)s.B * s.T; t++)
        for (int h = 0; h < turned; h++)
            for (int i = 0; i < D / 2; i++) {
                double *a = r.dqkv + (t * all + h) * D + i, *b = a + D / 2;
                const double cosine = rotary[t % s.T * D + i], sine = rotary[t % s.T * D + D / 2 + i], x = *a;
                *a = round(x * cosine + *b * sine);
                *b = round(*b * cosine - x * sine);
            }
}
static void naive_free(struct naive r) {
    free(r.out);
    free(r.lse);
    free(r.p);
    free(r.dqkv);
}

// ---------------------------------------------------------------------------------------------------------------------
// Runs a backend in hostile memory: outputs and workspaces hold NaN, and the guards around each are checked

enum { GUARD_BYTES = 256, GUARD = 0xff }; // 0xffff.. is a NaN in bf16, fp32 and double

static void *guarded(size_t bytes) {
    char *memory = (char *)test_alloc(bytes + 2 * GUARD_BYTES);
    memset(memory, GUARD, bytes + 2 * GUARD_BYTES);
    return memory + GUARD_BYTES;
}
static void guarded_check(const void *memory, size_t bytes) {
    for (int i = 0; i < GUARD_BYTES; i++) {
        assert_int_equal(((const unsigned char *)memory)[-1 - i], GUARD);
        assert_int_equal(((const unsigned char *)memory)[bytes + (size_t)i], GUARD);
    }
}
static void guarded_free(void *memory, size_t bytes) {
    guarded_check(memory, bytes);
    free((char *)memory - GUARD_BYTES);
}

static char case_mask[64]; // the mask under test, for messages
static void test_case_shape(struct attention_shape s, float dropout, const char *backend) {
    test_case(case_seed, "%s, B %d, T %d, %d heads, %d KV heads of %d, scale %g, softcap %g, dropout %g%s%s", backend,
              s.B, s.T, s.num_heads, s.num_query_groups, s.head_dim, (double)s.scale, (double)s.softcap,
              (double)dropout, s.full ? ", without a causal mask" : "", s.first_key ? case_mask : "");
}

// What *amax holds before a call. amax_taken: whether calls get an amax; NULL must not change a bit.
static uint32_t amax_before;
static bool amax_taken = true;
// Returns what *amax must hold after a call that stored x (n).
static uint32_t amax_after(const floatX *x, int64_t n) {
    uint32_t largest = amax_before;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t magnitude = fp8_magnitude(to_float(x[i]));
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

// What each word of backward's workspace holds: -1 (NaN), or a number that could be somebody's turn.
static int32_t workspace_word = -1;

struct result {
    floatX *out, *dqkv;
    void *saved;
};
// Checks Hopper's sums of dqkv's columns (chunks, columns): sums of queries over each of its tiles; sums of keys and
// values over each of its blocks, in the chunk of the block's first tile, and 0 in the others. A partial sum has at
// most 128 roundings.
static void check_bias(const float *partial, const floatX *dqkv, struct attention_shape s) {
    const int64_t W = (int64_t)(s.num_heads + 2 * s.num_query_groups) * s.head_dim;
    const int queries = s.head_dim == 64 ? 128 : 64, keys = s.head_dim == 256 ? 64 : 128;
    const int tiles = (s.T + queries - 1) / queries;
    for (int64_t chunk = 0; chunk < attention_bias_num_runs(ATTENTION_FLASH_SM90, s); chunk++)
        for (int64_t c = 0; c < W; c++) {
            const int first = (int)(chunk % tiles) * queries,
                      run = c < (int64_t)s.num_heads * s.head_dim ? queries : keys;
            double sum = 0, size = 0;
            for (int t = first; first % run == 0 && t < first + run && t < s.T; t++) {
                const double x = to_float(dqkv[(chunk / tiles * s.T + t) * W + c]);
                sum += x;
                size += fabs(x);
            }
            if (isfinite(sum))
                assert_near(partial[chunk * W + c], sum, 128 * 0x1p-24 * size, c);
            else
                assert_false(isfinite(partial[chunk * W + c]));
        }
}
static struct result run_with(const floatX *qkv, const floatX *dout, enum attention_backend backend,
                              struct attention_shape s, struct dropout d, struct attention_backward_options options) {
    test_case_shape(s, d.p, backend == ATTENTION_FLASH_SM90 ? "flash, wgmma" : attention_name(backend));
    const size_t forward_bytes = attention_forward_workspace_bytes(backend, s, &dev);
    const size_t backward_bytes = attention_backward_workspace_bytes(backend, s, options.any_order, &dev);
    struct result r;
    r.out = (floatX *)guarded((size_t)out_count(s) * sizeof(floatX));
    r.dqkv = (floatX *)guarded((size_t)qkv_count(s) * sizeof(floatX));
    r.saved = guarded(attention_saved_bytes(backend, s));
    void *workspace = guarded(forward_bytes);
    uint32_t *amax = (uint32_t *)guarded(2 * sizeof *amax);
    amax[0] = amax[1] = amax_before;
    options.amax = amax_taken ? amax + 1 : NULL;
    const int64_t qkv_width = (int64_t)(s.num_heads + 2 * s.num_query_groups) * s.head_dim;
    const size_t bias_bytes = (size_t)(attention_bias_num_runs(backend, s) * qkv_width) * sizeof(float);
    float *partial = (float *)guarded(bias_bytes);
    memset(partial, 0xff, bias_bytes); // NaN
    options.bias_partial = amax_taken && bias_bytes > 0 ? partial : NULL;
#ifdef CUDA_EMULATED
    const uint64_t conflicts = emu_conflicts;
#endif
    attention_forward(r.out, r.saved, qkv, backend, s, d, amax_taken ? amax : NULL, workspace, &dev);
    guarded_free(workspace, forward_bytes);
    workspace = guarded(backward_bytes);
    for (size_t i = 0; i < backward_bytes / sizeof workspace_word; i++)
        ((int32_t *)workspace)[i] = workspace_word;
    attention_backward(r.dqkv, dout, qkv, r.out, r.saved, backend, s, d, options, workspace, &dev);
    guarded_free(workspace, backward_bytes);
    assert_int_equal(amax[0], amax_taken ? amax_after(r.out, out_count(s)) : amax_before);
    assert_int_equal(amax[1], amax_taken ? amax_after(r.dqkv, qkv_count(s)) : amax_before);
    guarded_free(amax, 2 * sizeof *amax);
    if (options.bias_partial)
        check_bias(partial, r.dqkv, s);
    guarded_free(partial, bias_bytes);
#ifdef CUDA_EMULATED
    if (backend == ATTENTION_FLASH) // the rows that an ldmatrix reads must lie in different banks
        assert_true(emu_conflicts == conflicts);
#endif
    return r;
}
static struct result run(const floatX *qkv, const floatX *dout, enum attention_backend backend,
                         struct attention_shape s, struct dropout d) {
    return run_with(qkv, dout, backend, s, d, options_of(NULL, false));
}
static void result_free(struct result r, enum attention_backend backend, struct attention_shape s) {
    guarded_free(r.out, (size_t)out_count(s) * sizeof(floatX));
    guarded_free(r.dqkv, (size_t)qkv_count(s) * sizeof(floatX));
    guarded_free(r.saved, attention_saved_bytes(backend, s));
}

// ---------------------------------------------------------------------------------------------------------------------
// Tolerances
//
// bf16: FlashAttention's rule, max|x - ref| <= 2 max|plain - ref| + 2 max|(ref + 0.3 - 0.3) - ref|. plain: what plain
// ops in bf16 compute, which round after each op. The last term, in floatX, stands for the rounding of the result
// itself.
// fp32: a score is a sum of D products, whose error grows like sqrt(D) roundings of scale * sum |q k| <= scale * D *
// a^2 (a: the largest input). This error enters P as a relative error, beside 2e-7 for exp2 and for lse's rounding, and
// dS through each of its two factors. Sums over T terms add sqrt(T) roundings. A factor of 4 covers the factors that
// meet in a product. All of this is relative to the largest entry. For dq and dk it is relative to at least scale *
// |dP| * a, since dS is what is left of dP when its mean is subtracted; |dP| is about sqrt(D) for inputs in [-1, 1).

struct bound {
    double relative, least_size; // for fp32
    bool bf16;
};
static struct bound bound_of(struct attention_shape s, double input) {
    struct bound bound;
    const double score = s.scale * s.head_dim * input * input;
    bound.bf16 = sizeof(floatX) == 2;
    bound.least_size = s.scale * sqrt(s.head_dim) * input;
    bound.relative = 4 * (FLOATX_ROUNDING * (sqrt(s.head_dim) * score + sqrt(s.T) + 4) + 4e-7);
    return bound;
}
struct column_error {
    double error, allowed;
};
// Returns the largest error in columns [begin, end) of x (rows, width), and how large it may be. q, k and v of dqkv
// have different scales, so each is checked by itself.
static struct column_error column_error_of(const char *name, const floatX *x, const double *reference,
                                           const double *plain, int64_t rows, int64_t width, int64_t begin, int64_t end,
                                           struct bound bound) {
    double error = 0, plain_error = 0, rounding_error = 0,
           size = name[0] == 'd' && name[1] != 'v' ? bound.least_size : 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = begin; c < end; c++) {
            const int64_t i = r * width + c;
            const double e = fabs(to_float(x[i]) - reference[i]), pe = fabs(plain[i] - reference[i]);
            const float shifted = to_float(to_floatX((float)reference[i] + 0.3f));
            const double re = fabs(to_float(to_floatX(shifted - 0.3f)) - reference[i]);
            error = e <= error || isnan(error) ? error : e; // a NaN stays
            plain_error = pe > plain_error ? pe : plain_error;
            rounding_error = re > rounding_error ? re : rounding_error;
            size = fabs(reference[i]) > size ? fabs(reference[i]) : size;
        }
    const struct column_error found = {error,
                                       bound.bf16 ? 2 * plain_error + 2 * rounding_error : bound.relative * size};
    return found;
}
static void check_columns(const char *name, const floatX *x, const double *reference, const double *plain, int64_t rows,
                          int64_t width, int64_t begin, int64_t end, struct bound bound) {
    const struct column_error found = column_error_of(name, x, reference, plain, rows, width, begin, end, bound);
    if (found.error <= found.allowed)
        return;
    double *got = to_doubles(x, rows * width);
    for (int64_t i = 0; i < rows * width; i++) // outside these columns nothing counts as wrong
        got[i] = i % width >= begin && i % width < end ? got[i] : reference[i];
    const struct difference largest = largest_difference(got, reference, rows * width);
    free(got);
    fail_comparison(name, found.error, "", found.allowed, largest, __FILE__, __LINE__);
}

// Returns what plain ops in floatX compute. In fp32 the bounds do not need it: returns the reference.
static struct naive plain_attention(struct naive reference, const double *qkv, const double *dout,
                                    struct attention_shape s, struct dropout d) {
    return sizeof(floatX) == 2 ? naive_attention(qkv, dout, s, d, to_precision) : reference;
}
static void check_result(struct result r, enum attention_backend backend, struct naive reference, struct naive plain,
                         struct attention_shape s, double input) {
    const struct bound bound = bound_of(s, input);
    const int64_t rows = (int64_t)s.B * s.T, W = (int64_t)(s.num_heads + 2 * s.num_query_groups) * s.head_dim;
    const int64_t k = (int64_t)s.num_heads * s.head_dim, v = k + (int64_t)s.num_query_groups * s.head_dim;
    check_columns("out", r.out, reference.out, plain.out, rows, k, 0, k, bound);
    check_columns("dq", r.dqkv, reference.dqkv, plain.dqkv, rows, W, 0, k, bound);
    check_columns("dk", r.dqkv, reference.dqkv, plain.dqkv, rows, W, k, v, bound);
    check_columns("dv", r.dqkv, reference.dqkv, plain.dqkv, rows, W, v, W, bound);
    const int64_t lse_rows = (int64_t)s.B * s.num_heads * s.T;
    if (backend == ATTENTION_UNFUSED)
        check_columns("probabilities", (const floatX *)r.saved, reference.p, plain.p, lse_rows, s.T, 0, s.T, bound);
    const double unit = backend == ATTENTION_FLASH_SM90 ? log(2) : 1; // sm_90's lse is to base 2
    for (int64_t i = 0; backend != ATTENTION_UNFUSED && i < lse_rows; i++) {
        // Scores and lse are fp32 in either precision: lse has its own rounding and the scores' roundings.
        const double allowed =
            0x1p-24 * (2 * fabs(reference.lse[i]) + sqrt(s.head_dim) * s.scale * s.head_dim * input * input);
        assert_near(unit * ((const float *)r.saved)[i], reference.lse[i], 4 * allowed + 1e-6, i);
    }
}

// Checks one backend (`only`), or with ATTENTION_AUTO all. Frees the inputs, which lie in [-input, input). Returns the
// reference's first lse.
static double check_inputs(enum attention_backend only, struct attention_shape s, floatX *qkv, double *qkv_exact,
                           floatX *dout, double *dout_exact, double input, float dropout,
                           struct attention_backward_options options) {
    const struct dropout d = dropout_of(dropout);
    const struct naive reference = naive_attention(qkv_exact, dout_exact, s, d, exactly);
    const struct naive plain = plain_attention(reference, qkv_exact, dout_exact, s, d);
    const double first_lse = reference.lse[0];
    if (options.rotary && plain.dqkv != reference.dqkv)
        naive_undo_rope(plain, options.rotary, s, to_precision);
    if (options.rotary)
        naive_undo_rope(reference, options.rotary, s, exactly);
    FOR_EACH_BACKEND(backend, s, dropout) {
        if (only != ATTENTION_AUTO && only != backend)
            continue;
        const struct result r = run_with(qkv, dout, backend, s, d, options);
        check_result(r, backend, reference, plain, s, input);
        result_free(r, backend, s);
    }
    if (plain.out != reference.out)
        naive_free(plain);
    naive_free(reference);
    free(qkv);
    free(dout);
    free(qkv_exact);
    free(dout_exact);
    return first_lse;
}
static void check_with(enum attention_backend only, struct attention_shape s, double q_scale, double k_scale,
                       float dropout, struct attention_backward_options options) {
    uint64_t seed = case_seed = 17 + (uint64_t)(s.T * 1000 + s.head_dim);
    double *qkv_exact, *dout_exact;
    floatX *qkv = test_floats(&qkv_exact, qkv_count(s), 1, &seed),
           *dout = test_floats(&dout_exact, out_count(s), 1, &seed);
    const int64_t W = (int64_t)(s.num_heads + 2 * s.num_query_groups) * s.head_dim;
    const int64_t k = (int64_t)s.num_heads * s.head_dim, v = k + (int64_t)s.num_query_groups * s.head_dim;
    for (int64_t i = 0; i < qkv_count(s); i++) {
        qkv[i] = to_floatX((float)(qkv_exact[i] * (i % W < k ? q_scale : i % W < v ? k_scale : 1)));
        qkv_exact[i] = to_float(qkv[i]);
    }
    check_inputs(only, s, qkv, qkv_exact, dout, dout_exact, sqrt(q_scale * k_scale), dropout, options);
}

static void check_backend(enum attention_backend only, struct attention_shape s, double q_scale, double k_scale,
                          float dropout) {
    check_with(only, s, q_scale, k_scale, dropout, options_of(NULL, false));
}
static void check_shape(struct attention_shape s, double q_scale, double k_scale, float dropout) {
    check_backend(ATTENTION_AUTO, s, q_scale, k_scale, dropout);
}

// ---------------------------------------------------------------------------------------------------------------------
// Tests

#ifndef TARGET_CUDA
static float exp2_of(float x, int vector) {
    vec all[EXP2_VECS];
    for (int i = 0; i < EXP2_VECS; i++)
        all[i] = vec_set(i == vector ? x : 3);
    vec_exp2(all);
    return all[vector][LANES - 1];
}
static void test_exp2(void **state) {
    double worst = 0;
    int vector = 0;
    for (double x = -126; x <= 127; x += 253.0 / (1 << 20), vector = (vector + 1) % EXP2_VECS)
        worst = fmax(worst, fabs(exp2_of((float)x, vector) / exp2((double)(float)x) - 1));
    assert_true(worst < 2.2e-7); // the polynomial errs by 9.2e-8, and there are two roundings
    assert_true(exp2_of(0, 0) == 1);
    assert_true(exp2_of(-127, 1) == 0);
    assert_true(exp2_of(-1e9f, 2) == 0);
    assert_true(exp2_of(-INFINITY, 3) == 0);
    assert_true(isnan(exp2_of(NAN, 0)));
}

static void test_tanh(void **state) {
    double worst = 0;
    for (double x = -10; x <= 10; x += 20.0 / (1 << 20)) {
        const double exact = tanh((double)(float)x), error = fabs(vec_tanh(vec_set((float)x))[LANES - 1] - exact);
        worst = fmax(worst, exact == 0 ? error : error / fabs(exact));
    }
    assert_true(worst < 3.6e-7); // the fit errs by 2.1e-8, and the two polynomials and their quotient are rounded
    assert_true(vec_tanh(vec_set(0))[0] == 0);
    assert_true(vec_tanh(vec_set(1e-20f))[0] == 1e-20f);
    assert_true(vec_tanh(vec_set(INFINITY))[0] <= 1 && vec_tanh(vec_set(INFINITY))[0] > 0.9999999f);
    assert_true(vec_tanh(vec_set(-1e9f))[0] >= -1 && vec_tanh(vec_set(-1e9f))[0] < -0.9999999f);
    assert_true(isnan(vec_tanh(vec_set(NAN))[0]));
}

// Checks sums that are rounded to bf16, in rows and in pairs of rows, against bf16_from_float.
static void test_bf16_rows(void **state) {
    ALIGN_BLOCK float x[2 * LANES];
    ALIGN_BLOCK bf16 rows[2 * LANES], pairs[2 * LANES];
    uint64_t seed = case_seed = 2;
    for (int run = 0; run < 1000; run++) {
        for (int i = 0; i < 2 * LANES; i++)
            x[i] = (float)(test_uniform(&seed) * exp2(run % 40 - 30));
        x[0] = run % 2 ? 1 + 0x1p-8f : 1 + 0x3p-8f; // ties
        vec_store_bf16((word *)pairs, rows, rows + LANES, vec_load(x), vec_load(x + LANES));
        for (int i = 0; i < 2 * LANES; i++) {
            assert_int_equal(rows[i].bits, bf16_from_float(x[i]).bits);
            assert_int_equal(pairs[i].bits, bf16_from_float(x[i / 2 + i % 2 * LANES]).bits);
        }
    }
}

#endif

static const int lengths[] = {1, 2, 3, 64, 113, 128, 217, 239};
static const int heads[][2] = {{2, 2}, {6, 2}, {4, 1}};
static const int dims[] = {8, 64, 96, 128, 256, 40, 80, 192};
enum { LENGTHS = 8, HEADS = 3, DIMS = 8 };

// Checks every length with every grouping and every head dim; where tiles are slow, each length with one or two of
// these.
static void test_against_naive(void **state) {
    for (int t = 0; t < LENGTHS; t++)
        for (int i = SLOW > 0 ? t % DIMS : 0; takes_case(t, 2) && i < DIMS; i += SLOW == 2 ? DIMS : SLOW > 0 ? 5 : 1)
            check_shape(
                shape_of(1 + (i + t) % 2, lengths[t], heads[(i + t) % HEADS][0], heads[(i + t) % HEADS][1], dims[i]), 1,
                1, 0);
    check_shape(shape_of(1, SLOW > 0 ? 257 : 511, 2, 1, 64), 1, 1, 0);
    if (SLOW == 0)
        check_shape(shape_of(1, 513, 1, 1, 96), 1, 1, 0);
    for (int i = 1; LONG && i < DIMS; i++) {
        check_shape(shape_of(1, 799, 3, 1, dims[i]), 1, 1, 0);
        check_shape(shape_of(1, 1023 + i % 2, 2, 2, dims[i]), 1, 1, 0);
    }
    for (int i = 1; LONG && i < 4; i++)
        check_shape(shape_of(1, 4096 + 128 * (i % 2), 1, 1, dims[i]), 1, 1, 0);
}
// Checks long sequences with one KV head: backward cuts the queries into many segments, and then adds the segments' dK
// and dV.
static void test_segments(void **state) {
    check_shape(shape_of(1, SLOW > 0 ? 300 : 1030, 1, 1, 32), 1, 1, 0);
    check_shape(shape_of(1, SLOW == 2 ? 70 : 140, 12, 1, 32), 1, 1, 0);
    check_shape(shape_of(1, SLOW == 2 ? 100 : 300, 5, 1, 160), 1, 1, 0);
}
// Checks large scores: softmax nearly chooses one key, and without the maximum exponents would leave fp32's range.
static void test_large_scores(void **state) {
    check_shape(shape_of(1, 113, 2, 1, 64), 5, 3, 0);
    check_shape(shape_of(1, 128, 2, 2, 128), 5, 3, 0);
    check_shape(shape_of(1, 65, 2, 2, 64), 20, 20, 0);
    check_shape(shape_of(1, SLOW > 0 ? 200 : 400, 2, 1, 32), 8, 8, 0); // the maximum moves after the first panels
}
static void test_dropout(void **state) {
    check_shape(shape_of(2, 1, 2, 1, 16), 1, 1, 0.5f);
    check_shape(shape_of(1, 77, 4, 2, 64), 1, 1, 0.1f);
    check_shape(shape_of(2, 161, 3, 1, 40), 1, 1, 0.3f);
    check_shape(shape_of(1, SLOW > 0 ? 130 : 300, 2, 1, 64), 1, 1, 0.2f);
}

// Checks a recorded graph's dropout: it reads the micro-step from the device's memory, and adds it to the call's step.
static void test_dropout_step(void **state) {
    const struct attention_shape s = shape_of(1, 70, 2, 1, 64);
    uint64_t seed = case_seed = 12, *micro_step = (uint64_t *)test_alloc(sizeof *micro_step);
    double *exact;
    floatX *qkv = test_floats(&exact, qkv_count(s), 1, &seed);
    struct dropout d = dropout_of(0.5f), moved = d;
    *micro_step = 2;
    moved.step = d.step - 2;
    moved.micro_step = micro_step;
    FOR_EACH_BACKEND(which, s, 0.5f) {
        const struct result r = run(qkv, qkv, which, s, d), same = run(qkv, qkv, which, s, moved);
        assert_memory_equal(r.out, same.out, (size_t)out_count(s) * sizeof(floatX));
        assert_memory_equal(r.dqkv, same.dqkv, (size_t)qkv_count(s) * sizeof(floatX));
        result_free(same, which, s);
        result_free(r, which, s);
    }
    free(micro_step);
    free(qkv);
    free(exact);
}

// Checks scores that are all near -200: if a padded key scored 0 instead of -inf, exp(0 - lse) would overflow.
static void check_low_scores(enum attention_backend only, struct attention_shape s) {
    const int64_t n = qkv_count(s), D = s.head_dim, W = 3 * D;
    uint64_t seed = case_seed = 5;
    double *qkv_exact, *dout_exact;
    floatX *qkv = test_floats(&qkv_exact, n, 0.1, &seed), *dout = test_floats(&dout_exact, out_count(s), 1, &seed);
    for (int64_t i = 0; i < n; i++) {
        const double shift = i % W < D ? 5 : i % W < 2 * D ? -5 : 0;
        qkv[i] = to_floatX((float)(qkv_exact[i] + shift));
        qkv_exact[i] = to_float(qkv[i]);
    }
    assert_true(check_inputs(only, s, qkv, qkv_exact, dout, dout_exact, 5.1, 0, options_of(NULL, false)) < -150);
}

static void test_low_scores(void **state) { check_low_scores(ATTENTION_AUTO, shape_of(1, 192 - 31, 1, 1, 64)); }

// Checks the gradient by q and k before their rotation, with every backend, for head dims that only some backends take
// and for others.
static void test_rotary(void **state) {
    static const int sizes[] = {24, 64, 96, 128, 256};
    enum { T = 150 };
    for (int i = SLOW == 2 ? 1 : 0; i < 5; i++) {
        if (!takes_case(i - 1, 3))
            continue;
        float *table = (float *)test_alloc(T * (size_t)sizes[i] * sizeof *table);
        const struct rope_settings settings = rope_unscaled(sizes[i], 100);
        rope_table(table, T, &settings); // at these positions angles have all sizes
        check_with(ATTENTION_AUTO, shape_of(2 - i % 2, T - i, 2, 1 + i % 2, sizes[i]), 1, 1, 0,
                   options_of(table, i % 2));
        free(table);
    }
}

// Checks the naive gradient, by which all others are judged, against differences of sum(dout * out) in double.
static void test_finite_differences(void **state) {
    const struct attention_shape s = shape_of(2, 5, 4, 2, 8);
    const struct dropout d = dropout_of(0.25f);
    uint64_t seed = case_seed = 9;
    test_case_shape(s, d.p, "naive");
    double *qkv, *dout;
    free(test_floats(&qkv, qkv_count(s), 1, &seed));
    free(test_floats(&dout, out_count(s), 1, &seed));
    const struct naive r = naive_attention(qkv, dout, s, d, exactly);
    double *differences = test_doubles(qkv_count(s));
    const double step = 1e-5; // the error is about step^2 plus 1e-16 / step
    for (int64_t i = 0; i < qkv_count(s); i++) {
        const double x = qkv[i];
        for (int side = -1; side <= 1; side += 2) {
            qkv[i] = x + side * step;
            const struct naive moved = naive_attention(qkv, dout, s, d, exactly);
            differences[i] += side * dot(moved.out, dout, (int)out_count(s)) / (2 * step);
            naive_free(moved);
        }
        qkv[i] = x;
    }
    assert_close(r.dqkv, differences, qkv_count(s), 1e-8);
    naive_free(r);
    free(differences);
    free(qkv);
    free(dout);
}

// Checks that one backend, or with ATTENTION_AUTO each, gives the same bits in repeated calls, with 1, 2 and 3 threads
// of the host, with an amax and without.
static void check_bits(enum attention_backend only, struct attention_shape s, float p) {
    uint64_t seed = case_seed = 3;
    double *qkv_exact, *dout_exact;
    floatX *qkv = test_floats(&qkv_exact, qkv_count(s), 1, &seed),
           *dout = test_floats(&dout_exact, out_count(s), 1, &seed);
    const int threads = omp_get_max_threads();
    FOR_EACH_BACKEND(which, s, p) {
        if (only != ATTENTION_AUTO && only != which)
            continue;
        const struct result first = run(qkv, dout, which, s, dropout_of(p));
        // On a GPU, as often as it takes to see races; less often where a call takes long, or where no block waits for
        // another.
        const int often = s.T > 2000 ? 20 : which == ATTENTION_UNFUSED ? 10 : 250;
        for (int i = 0; i < (ON_GPU ? often : SLOW == 2 ? 2 : 4); i++) {
            omp_set_num_threads(i ? 1 + (i - 1) % 3 : threads);
            workspace_word = i % 2 ? 1 : -1;
            amax_taken = i % 2 != 0;
            const struct result again = run(qkv, dout, which, s, dropout_of(p));
            workspace_word = -1;
            amax_taken = true;
            assert_memory_equal(first.out, again.out, (size_t)out_count(s) * sizeof(floatX));
            assert_memory_equal(first.dqkv, again.dqkv, (size_t)qkv_count(s) * sizeof(floatX));
            assert_memory_equal(first.saved, again.saved, attention_saved_bytes(which, s));
            result_free(again, which, s);
        }
        omp_set_num_threads(threads);
        result_free(first, which, s);
    }
    free(qkv);
    free(dout);
    free(qkv_exact);
    free(dout_exact);
}
static void test_same_bits(void **state) {
    check_bits(ATTENTION_AUTO, shape_of(1, SLOW == 2 ? 150 : 257, 4, 1, 64), 0.1f);
    check_bits(ATTENTION_AUTO, shape_of(2, SLOW == 2 ? 70 : 130, 6, 2, 32), 0);
    for (int i = 2; ON_GPU && i < DIMS; i++)
        check_bits(ATTENTION_AUTO, shape_of(1, 1023, 4, 2, dims[i]), 0);
    if (SLOW == 2)
        return; // the rest tests how the CPU's loops are divided among threads
    check_bits(ATTENTION_AUTO, shape_of(2, 70, 8, 4, 16),
               0); // 8 KV heads: whole ones for each of 2 threads, but not of 3
    check_bits(ATTENTION_AUTO, shape_of(4, SLOW > 0 ? 70 : 200, 8, 8, 32),
               0); // 32 KV heads, one segment each: whole ones for each thread
}

#ifdef TARGET_CUDA
static void skip_without_sm90(void) {
    char reason[192];
    sm90_unavailable_reason(reason, sizeof reason, shape_of(1, 1, 1, 1, 64), &dev);
    if (*reason) {
        print_message("flash attention by wgmma %s\n", reason);
        skip();
    }
}
// Checks the backend of compute capability 9.0 with every head dim that it takes: lengths around its tiles' edges, and
// lengths beyond two tiles of keys, so that each buffer is used twice.
static void test_sm90(void **state) {
    skip_without_sm90();
    static const int edges[] = {1, 2, 64, 65, 113, 127, 129, 191, 193, 217};
    const int count = (int)(sizeof edges / sizeof edges[0]), step = SLOW == 2 ? 3 : 1;
    for (int i = 1; i < 5; i++) {
        for (int t = (step - i % step) % step; t < count; t += step)
            if (takes_case(t / step + i, 3))
                check_backend(ATTENTION_FLASH_SM90,
                              shape_of(edges[t] > 129 ? 1 : 1 + (i + t) % 2, edges[t], heads[(i + t / step) % HEADS][0],
                                       heads[(i + t / step) % HEADS][1], dims[i]),
                              1, 1, 0);
        if (takes_case(i, 3))
            check_backend(ATTENTION_FLASH_SM90, shape_of(1, 511 + i % 2 * 2, 1, 1, dims[i]), 1, 1, 0);
        check_backend(ATTENTION_FLASH_SM90, shape_of(1, 200, 2, 1, dims[i]), 5, 3, 0);
        if (takes_case(i, 2))
            check_backend(ATTENTION_FLASH_SM90, shape_of(1, 130, 1, 1, dims[i]), 20, 20, 0);
        if (takes_case(i + 1, 2))
            check_bits(ATTENTION_FLASH_SM90, shape_of(1, 217, 2, 1, dims[i]), 0);
        if (SLOW != 2)
            check_backend(ATTENTION_FLASH_SM90, shape_of(2, 513, 6, 2, dims[i]), 1, 1, 0);
    }
    // Groups of heads, and a number of key blocks at which every other gang of backward's visits its tiles upwards.
    check_bits(ATTENTION_FLASH_SM90, shape_of(1, 300, 4, 1, 256), 0);
    if (takes_case(1, 2))
        check_backend(ATTENTION_FLASH_SM90, shape_of(1, 520, 4, 1, 64), 1, 1, 0);
    if (takes_case(1, 2))
        check_bits(ATTENTION_FLASH_SM90, shape_of(1, 520, 4, 1, 64), 0);
    for (int i = 1; ON_GPU && i < 5; i++)
        check_bits(ATTENTION_FLASH_SM90, shape_of(1, 4224, 16, 4, dims[i]), 0);
    for (int i = 1; i < (SLOW == 2 ? 2 : 5) && takes_case(1, 2); i++)
        check_backend(ATTENTION_FLASH_SM90, shape_of(1, 1025, 1, 1, dims[i]), 1, 1, 0);
}
// Checks dQ that is summed in any order: it meets the same bounds, in memory that held NaN, with several blocks of keys
// and several heads of a group.
static void test_sm90_any_order(void **state) {
    skip_without_sm90();
    for (int i = 1; i < 5; i++) {
        if (takes_case(i, 2))
            check_with(ATTENTION_FLASH_SM90, shape_of(1, 300, 4 - i % 2, 1, dims[i]), 1, 1, 0, options_of(NULL, true));
        if (takes_case(i + 1, 2))
            check_with(ATTENTION_FLASH_SM90, shape_of(2, 65, 2, 2, dims[i]), 1, 1, 0, options_of(NULL, true));
    }
}
// Checks attention without a causal mask: lengths around the tiles' edges, where only keys past the end are masked.
static void test_sm90_full(void **state) {
    skip_without_sm90();
    static const int edges[] = {1, 64, 79, 127, 128, 129, 191, 257};
    for (int i = 1; i < 5; i++) {
        for (int t = SLOW == 2 ? i % 2 : 0; t < 8; t += SLOW == 2 ? 2 : 1) {
            if (!takes_case(i + t / 2, 3))
                continue;
            struct attention_shape s = shape_of(1 + (i + t) % 2, edges[t], 2, 1 + t % 2, dims[i]);
            s.full = true;
            check_with(ATTENTION_FLASH_SM90, s, 1, 1, 0, options_of(NULL, t % 4 == 3));
        }
        struct attention_shape s = shape_of(1, 192 - 31, 1, 1, dims[i]);
        s.full = true;
        check_low_scores(ATTENTION_FLASH_SM90, s);
    }
}
static void full_elsewhere(void *unused) {
    struct attention_shape s = shape_of(1, 8, 1, 1, 64);
    s.full = true;
    attention_forward(NULL, NULL, NULL, ATTENTION_UNFUSED, s, dropout_of(0), NULL, NULL, &dev);
}
static void test_full_elsewhere(void **state) {
    assert_fails(full_elsewhere, NULL, "attention by unfused has no attention without a causal mask");
}
#ifdef PRECISION_BF16
static __global__ void visits_kernel(struct sm90_forward_arguments a, int *visits /*(heads, blocks)*/,
                                     int *work /*(grid)*/) {
    struct sm90_forward_tile tile = sm90_forward_begin();
    work[blockIdx.x] = 0;
    for (int number = 0; sm90_forward_next<sm90_forward_plan<64>>(tile, a); number++) {
        const int block = tile.first / sm90_forward_plan<64>::QUERIES;
        atomicAdd(visits + tile.head * a.blocks + block, tile.number == number ? 1 : 1000);
        work[blockIdx.x] += a.full ? 1 : block + 1;
    }
}
// Checks forward's schedules: each tile of queries is visited once, and the blocks' work is as even as promised.
static void check_schedule(int heads, int blocks, int section_heads, int grid, bool full) {
    struct sm90_forward_arguments a;
    memset(&a, 0, sizeof a);
    a.heads = heads;
    a.blocks = blocks;
    a.section_heads = section_heads;
    a.full = full;
    sm90_forward_divide(a);
    const size_t bytes = (size_t)(heads * blocks + grid) * sizeof(int);
    int *visits = (int *)test_alloc(bytes), *work = visits + heads * blocks, least = INT_MAX, most = 0;
    memset(visits, 0, bytes);
    LAUNCH(&dev, visits_kernel, grid, 1, 0, a, visits, work);
    for (int i = 0; i < heads * blocks; i++)
        assert_int_equal(visits[i], 1);
    for (int i = 0; i < grid; i++) {
        least = work[i] < least ? work[i] : least;
        most = work[i] > most ? work[i] : most;
    }
    int pairs = 0; // all pairs are equally long
    for (int first = 0; section_heads > 0 && first < heads; first += section_heads) {
        const int some = heads - first < section_heads ? heads - first : section_heads;
        pairs += some * (blocks / 2) + blocks % 2 * ((some + 1) / 2);
    }
    if (section_heads == 0)
        assert_true(most - least <= (full ? 1 : blocks));
    else if (full)
        assert_true(most <= (heads * blocks + grid - 1) / grid);
    else
        assert_true(most <= (pairs + grid - 1) / grid * (blocks + 1));
    free(visits);
}
static void test_forward_schedule(void **state) {
    for (int heads = 1; heads <= 7; heads += 2)
        for (int blocks = 1; blocks <= 8; blocks++)
            for (int section_heads = 0; section_heads <= 4; section_heads++)
                for (int grid = 1; grid <= 9; grid += 2)
                    for (int full = 0; full < 2; full++)
                        check_schedule(heads, blocks, section_heads, grid, full != 0);
    for (int full = 0; full < 2; full++) {
        check_schedule(64, 33, 12, 132, full != 0);
        check_schedule(64, 33, 0, 132, full != 0);
    }
}

// Adds to *wrong how often quotients by a multiplication differ from divisions.
static __global__ void quotients_kernel(struct sm90_divisor by, int *wrong) {
    const uint64_t divisor = by.divisor, end = 1ull << 31;
    for (uint64_t multiple = 0; multiple < end; multiple += divisor * (1 + end / divisor / 50))
        for (int i = -1; i <= 1; i++) {
            const uint64_t x = multiple + (uint64_t)(int64_t)i;
            if (x < end && (uint64_t)sm90_quotient((int)x, by) != x / divisor)
                atomicAdd(wrong, 1);
        }
    if ((uint64_t)sm90_quotient(INT_MAX, by) != INT_MAX / divisor)
        atomicAdd(wrong, 1);
}
static void quotients_are_divisions(void **state) {
    int *wrong = (int *)test_alloc(sizeof *wrong);
    *wrong = 0;
    for (int64_t divisor = 1; divisor <= INT_MAX; divisor += 1 + divisor / 8) {
        LAUNCH(&dev, quotients_kernel, 1, 1, 0, sm90_divisor_of((int)divisor), wrong);
        LAUNCH(&dev, quotients_kernel, 1, 1, 0, sm90_divisor_of((int)(INT_MAX - divisor + 1)), wrong);
    }
    for (int shift = 0; shift < 31; shift++)
        LAUNCH(&dev, quotients_kernel, 1, 1, 0, sm90_divisor_of(1 << shift), wrong);
    assert_int_equal(*wrong, 0);
    free(wrong);
}

static __global__ void blocks_kernel(struct sm90_backward_arguments a, struct sm90_backward_block *blocks /*(grid)*/) {
    blocks[blockIdx.x] = sm90_backward_block_of<sm90_backward_plan<128>>(a, (int)blockIdx.x);
}
// Checks backward's order. Each block of keys comes once; a KV head's blocks come in ascending order, on which waits
// rely; and each block visits the tiles from its diagonal to the last one, in one direction or the other.
static void check_order(struct attention_shape s, int multiprocessors, double l2_bytes) {
    typedef sm90_backward_plan<128> plan;
    struct sm90_backward_arguments a = sm90_backward_arguments_of(s);
    assert_int_equal(a.tiles, (s.T + plan::QUERIES - 1) / plan::QUERIES);
    sm90_backward_order(a, s, plan::KEYS, multiprocessors, l2_bytes);
    assert_int_equal(a.blocks, (s.T + plan::KEYS - 1) / plan::KEYS);
    const int units = s.B * s.num_query_groups, grid = units * a.blocks;
    struct sm90_backward_block *blocks = (struct sm90_backward_block *)test_alloc((size_t)grid * sizeof *blocks);
    int *next = (int *)test_alloc((size_t)units * sizeof *next);
    memset(next, 0, (size_t)units * sizeof *next);
    LAUNCH(&dev, blocks_kernel, grid, 1, 0, a, blocks);
    for (int i = 0; i < grid; i++) {
        const struct sm90_backward_block block = blocks[i];
        const int diagonal = s.full ? 0 : block.number * plan::KEYS / plan::QUERIES;
        assert_in_range(block.b, 0, s.B - 1);
        assert_in_range(block.group, 0, s.num_query_groups - 1);
        assert_int_equal(block.number, next[block.b * s.num_query_groups + block.group]++);
        assert_int_equal(block.first_key, block.number * plan::KEYS);
        assert_int_equal(block.step > 0 ? block.first_tile : block.end_tile + 1, diagonal);
        assert_int_equal(block.step > 0 ? block.end_tile : block.first_tile + 1, a.tiles);
    }
    for (int i = 0; i < units; i++)
        assert_int_equal(next[i], a.blocks);
    free(blocks);
    free(next);
}
// Returns the KV heads of a section, for (B, T) with H heads of 64, on an H200's multiprocessors and L2 cache.
static int section_of(int B, int T, int H, int groups) {
    struct attention_shape s = shape_of(B, T, H, groups, 64);
    struct sm90_backward_arguments a = sm90_backward_arguments_of(s);
    sm90_backward_order(a, s, sm90_backward_plan<64>::KEYS, 132, 50 << 20);
    return a.section;
}
static void test_backward_sections(void **state) {
    assert_int_equal(section_of(65, 1024, 12, 12), 60); // 30 MiB hold 60 heads of 512 KiB
    assert_int_equal(section_of(32, 64, 12, 12), 128);  // more would fit than there are multiprocessors: 3 sections
    assert_int_equal(section_of(8, 4096, 12, 12), 16);  // 15 would fit, which is less than a gang of 8 divides
    assert_int_equal(section_of(2, 1024, 64, 8), 16);   // all heads
}
static void test_backward_order(void **state) {
    for (int full = 0; full < 2; full++)
        for (int B = 1; B <= 3; B++)
            for (int groups = 1; groups <= 5; groups += 2)
                for (int heads = 1; heads <= 8; heads += 7)
                    for (int T = 1; T <= 2700; T += 300)
                        for (int multiprocessors = 1; multiprocessors <= 132;
                             multiprocessors = 3 * multiprocessors + 21) {
                            struct attention_shape s = shape_of(B, T, groups * heads, groups, 128);
                            s.full = full;
                            check_order(s, multiprocessors, 0);
                            check_order(s, multiprocessors, 4e6);
                        }
}
#endif
// Checks that a backend agrees with flash of compute capability 8.0 to within bf16, in either order of dQ's sums: the
// two round at nearly the same places.
static void check_agrees(enum attention_backend which, struct attention_shape s) {
    const int64_t lse_rows = (int64_t)s.B * s.num_heads * s.T;
    uint64_t seed = case_seed = 21;
    double *qkv_exact, *dout_exact, *x = test_doubles(qkv_count(s)), *y = test_doubles(qkv_count(s));
    floatX *qkv = test_floats(&qkv_exact, qkv_count(s), 1, &seed),
           *dout = test_floats(&dout_exact, out_count(s), 1, &seed);
    const struct result other = run(qkv, dout, ATTENTION_FLASH, s, dropout_of(0));
    for (int any_order = 0; any_order < 2; any_order++) {
        const struct result r = run_with(qkv, dout, which, s, dropout_of(0), options_of(NULL, any_order != 0));
        for (int64_t j = 0; j < lse_rows; j++) {
            x[j] = ((const float *)r.saved)[j] * (which == ATTENTION_FLASH_SM90 ? log(2) : 1);
            y[j] = ((const float *)other.saved)[j];
        }
        assert_close(x, y, lse_rows, 1e-6);
        for (int64_t j = 0; j < out_count(s); j++) {
            x[j] = to_float(r.out[j]);
            y[j] = to_float(other.out[j]);
        }
        assert_close(x, y, out_count(s), 2 * FLOATX_ROUNDING);
        for (int64_t j = 0; j < qkv_count(s); j++) {
            x[j] = to_float(r.dqkv[j]);
            y[j] = to_float(other.dqkv[j]);
        }
        assert_close(x, y, qkv_count(s), 2 * FLOATX_ROUNDING);
        result_free(r, which, s);
    }
    result_free(other, ATTENTION_FLASH, s);
    void *all[] = {x, y, qkv, dout, qkv_exact, dout_exact};
    for (int j = 0; j < 6; j++)
        free(all[j]);
}
static void test_sm90_agrees(void **state) {
    skip_without_sm90();
    for (int i = 1; i < 5; i++) {
        if (takes_case(i, 2))
            check_agrees(ATTENTION_FLASH_SM90, shape_of(1, 200, 2, 1, dims[i]));
        if (ON_GPU) // as many blocks as run at a time, and more
            check_agrees(ATTENTION_FLASH_SM90, shape_of(2, 4224, 32, 8, dims[i]));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Attention by cuDNN: by the library that is installed, or by the emulator's stand-in

static void skip_without_fused(void) {
    char reason[256];
    fused_reason(reason, sizeof reason, shape_of(1, 128, 2, 1, 64), 0);
#if defined(CUDA_EMULATED) && defined(PRECISION_BF16)
    assert_string_equal(reason, ""); // the emulator always has its stand-in
#endif
    if (*reason) {
        print_message("fused: %s\n", reason);
        skip();
    }
}
// Whether fused takes a shape. by_all: all known versions take it. A version on a GPU that refuses such a shape is
// printed, but is no error of this program.
static bool fused_takes_here(struct attention_shape s, bool by_all) {
    char reason[256];
    fused_reason(reason, sizeof reason, s, 0);
    if (*reason && by_all)
        print_message("fused refuses %d heads of %d, %d tokens%s: %s\n", s.num_heads, s.head_dim, s.T,
                      s.full ? ", full" : "", reason);
#ifdef CUDA_EMULATED
    assert_true(!by_all || !*reason);
#endif
    return !*reason;
}
// Checks lengths below, at and past a tile's, every head dim, with and without groups, in either order of dQ's sums,
// without the mask and, beside test_against_naive and others, with it.
static void test_fused(void **state) {
    static const int lengths[] = {2, 37, 64, 113, 127, 128, 129, 200}, fused_dims[] = {8, 40, 64, 80, 96, 128};
    skip_without_fused();
    fused_too = true;
    for (int i = ON_GPU ? 2 : 0; i < 6; i += ON_GPU ? 3 : 1)
        for (int t = SLOW == 2 ? i % 2 : 0; t < 8; t += SLOW == 2 || ON_GPU ? 3 : 1) {
            if (!takes_case(i + t / 3, 2))
                continue;
            const int groups = 1 + (i + t) % 3 % 2; // 4 heads of one group, or 2 heads of each of two groups
            struct attention_shape s = shape_of(1 + t % 2, lengths[t], 4, groups, fused_dims[i]);
            if (fused_takes_here(s, true))
                check_with(ATTENTION_FUSED, s, 1, 1, 0, options_of(NULL, t % 2 != 0));
            s.num_query_groups = s.num_heads;
            s.full = true;
            // 64: test_fused_low_scores has these lengths, for versions that take them
            if (fused_takes_here(s, s.T % 128 != 64))
                check_with(ATTENTION_FUSED, s, 1, 1, 0, options_of(NULL, t % 2 == 0));
        }
    check_backend(ATTENTION_FUSED, shape_of(1, 130, 1, 1, 64), 20, 20, 0);
    check_bits(ATTENTION_FUSED, shape_of(2, 130, 4, 2, 64), 0);
    check_agrees(ATTENTION_FUSED, shape_of(1, 200, 4, 2, 64));
    fused_too = !ON_GPU;
}
#ifdef CUDA_EMULATED
// Checks head dims above 128 where a GPU and a version take them, in either order of dQ's sums.
static void test_fused_wide_heads(void **state) {
    static const char *const capabilities[] = {"9.0", "10.0"};
    skip_without_fused();
    setenv("EMU_CUDNN_VERSION", "92600", 1);
    for (int i = 0; i < 4; i++) {
        attention_close(&dev); // it has cached the version and the capability
        setenv("EMU_CAPABILITY", capabilities[i % 2], 1);
        const struct attention_shape s = shape_of(1, 130, 2, 1 + i / 2, i / 2 ? 136 : 256);
        for (int any_order = 0; any_order <= 1; any_order++) {
            assert_true(backend_takes(ATTENTION_FUSED, s, 0));
            check_with(ATTENTION_FUSED, s, 1, 1, 0, options_of(NULL, any_order));
        }
    }
    setenv("EMU_CAPABILITY", "9.0", 1);
    unsetenv("EMU_CUDNN_VERSION");
    attention_close(&dev);
}
#endif
#if defined(CUDA_EMULATED) && defined(PRECISION_BF16)
// Chooses cuDNN's version and its limit for dP. From 9.25 on, where dP would exceed the limit, compute capability 9.0
// has a deterministic backward whose memory is linear in T.
static void use_fused(const char *version, const char *limit) {
    attention_close(&dev); // it has cached the version and the limit
    setenv("EMU_CUDNN_VERSION", version, 1);
    setenv("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT", limit, 1);
}
static void negative_limit(void *unused) {
    use_fused("92500", "-2");
    fused_takes(shape_of(1, 128, 2, 1, 64), &dev);
}
// Checks that backward, which sums dQ in turn: it computes the gradient, in the same bits each time, and is checked
// before it is chosen.
static void test_fused_in_turn(void **state) {
    const struct attention_shape longer = shape_of(2, 4096, 12, 4, 80); // dP takes 768 MiB
    skip_without_fused();
    use_fused("92500", "0");
    for (int i = 0; i < 4; i++) {
        struct attention_shape s = shape_of(1 + i % 2, i / 2 ? 200 : 130, 4, 2 * (1 + i % 2), i / 2 ? 128 : 80);
        if (!takes_case(i, 3))
            continue;
        assert_int_equal(fused_order_of(s, false, &dev), FUSED_SUM_TURNS);
        assert_int_equal(fused_order_of(s, true, &dev), FUSED_SUM_ANY);
        check_with(ATTENTION_FUSED, s, 1, 1, 0, options_of(NULL, false));
        s.full = true;
        check_with(ATTENTION_FUSED, s, 1, 1, 0, options_of(NULL, false));
    }
    check_bits(ATTENTION_FUSED, shape_of(2, 130, 4, 2, 80), 0);
    static const struct {
        const char *version, *limit;
        enum fused_order order;
        size_t least_mib, most_mib;
    } cases[] = {{"92499", "", FUSED_SUM_NONE, 768, 840},
                 {"92500", "", FUSED_SUM_TURNS, 30, 100},
                 {"92500", "805306368", FUSED_SUM_NONE, 768, 840},
                 {"92500", "805306367", FUSED_SUM_TURNS, 30, 100},
                 {"92500", "-1", FUSED_SUM_NONE, 768, 840}};
    const struct attention_demands demands = {0, NULL, false};
    unsetenv("NVTE_FUSED_ATTN");
    for (int i = 0; i < 5; i++) {
        if (!takes_case(i, 3)) // in the short run the default and the order of turns
            continue;
        use_fused(cases[i].version, cases[i].limit);
        const size_t mib = fused_backward_workspace_bytes(longer, false, &dev) >> 20;
        if (fused_order_of(longer, false, &dev) != cases[i].order || mib < cases[i].least_mib ||
            mib > cases[i].most_mib)
            fail_msg("case %d: order %d, %zu MiB", i, (int)fused_order_of(longer, false, &dev), mib);
        const struct attention_choice c = attention_choose(ATTENTION_AUTO, longer, demands, &dev);
        const bool turns = cases[i].order == FUSED_SUM_TURNS;
        if (!strstr(c.reason, turns ? " MiB backward, which sums dQ in turn; " : "fused: its backward takes "))
            fail_msg("case %d: %s", i, c.reason);
        bool checked = false; // on few tokens, in the model's order of sums
        for (int k = 0; k < dev.fused->planned; k++)
            checked = checked || (dev.fused->plans[k].key.T == FUSED_CHECK_TOKENS && dev.fused->plans[k].key.backward &&
                                  dev.fused->plans[k].key.order == (int64_t)cases[i].order);
        assert_true(checked == turns); // what auto refuses is not computed
    }
    setenv("EMU_CAPABILITY", "10.0", 1);
    use_fused("92500", "0");
    assert_int_equal(fused_order_of(longer, false, &dev), FUSED_SUM_NONE);
    setenv("EMU_CAPABILITY", "9.0", 1);
    assert_fails(negative_limit, NULL, "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT=-2|expected bytes");
    attention_close(&dev);
    setenv("NVTE_FUSED_ATTN", "0", 1); // as main sets it
    unsetenv("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT");
    unsetenv("EMU_CUDNN_VERSION");
}
#endif
#if defined(CUDA_EMULATED) && defined(PRECISION_BF16)
// Whether the plan by which a shape's forward ran is of one operation.
static bool was_one_operation(struct attention_shape s) {
    const struct fused_key key = fused_key_of(s, false, FUSED_SUM_ANY);
    const struct fused_plan *p = fused_plan_for(dev.fused, &key);
    return p->plan && p->operation;
}
// Checks forward as one operation, from 9.21 on, and by a graph of operations in earlier versions and where the one
// operation is refused.
static void test_fused_operation(void **state) {
    static const struct {
        const char *version, *refuse;
        bool operation;
    } cases[] = {{"92099", "", false}, {"92100", "", true}, {"92800", "operation", false}, {"92800", "", true}};
    skip_without_fused();
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            struct attention_shape s = shape_of(1 + j % 2, j < 2 ? 37 : 130, 4, 1 << j % 3, j < 2 ? 80 : 64);
            s.full = j % 2 != 0;
            use_fused(cases[i].version, "");
            setenv("EMU_CUDNN_REFUSE", cases[i].refuse, 1);
            check_with(ATTENTION_FUSED, s, 1, 1, 0, options_of(NULL, false));
            assert_true(was_one_operation(s) == cases[i].operation);
        }
    unsetenv("EMU_CUDNN_REFUSE");
    use_fused("92800", "");
    check_backend(ATTENTION_FUSED, shape_of(1, 130, 1, 1, 64), 20, 20, 0);
    check_bits(ATTENTION_FUSED, shape_of(2, 130, 4, 2, 80), 0);
    attention_close(&dev);
    unsetenv("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT");
    unsetenv("EMU_CUDNN_VERSION");
}
// Checks that a fault of the one operation is found before it is chosen, and that the graph of operations is then
// taken.
static void test_choice_of_operation(void **state) {
    static const struct {
        const char *variable, *value, *words;
    } cases[] = {
        {"EMU_NONE", "", "fused, cuDNN 9.28.0 bf16"},
        {"EMU_NONE", "", "; forward as one operation, plans made in "},
        {"EMU_CUDNN_REFUSE", "operation", "; forward as a graph of operations, plans made in "},
        {"EMU_CUDNN_REFUSE", "execute operation", "; forward as a graph of operations, plans made in "},
        {"EMU_CUDNN_FAULT", "operation", "; forward as a graph of operations, plans made in "},
        {"EMU_CUDNN_FAULT", "operation", "; here within 0.00"},
        {"EMU_CUDNN_FAULT", "forward", "fused: its output is wrong on this GPU"},
        {"EMU_CUDNN_REFUSE", "execute", "fused: it can't be run on this GPU: the call: CUDNN_STATUS_EXECUTION"}};
    const struct attention_demands demands = {0, NULL, false};
    skip_without_fused();
    unsetenv("NVTE_FUSED_ATTN");
    for (int i = 0; i < 8; i++) {
        if (!takes_case(i, 3))
            continue;
        use_fused("92800", "");
        setenv(cases[i].variable, cases[i].value, 1);
        const struct attention_choice c = attention_choose(ATTENTION_AUTO, shape_of(1, 128, 2, 1, 80), demands, &dev);
        unsetenv(cases[i].variable);
        if (!strstr(c.reason, cases[i].words))
            fail_msg("%s=%s: \"%s\" without \"%s\"", cases[i].variable, cases[i].value, c.reason, cases[i].words);
    }
    attention_close(&dev);
    setenv("NVTE_FUSED_ATTN", "0", 1); // as main sets it
    unsetenv("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT");
    unsetenv("EMU_CUDNN_VERSION");
}
#endif
// Checks lengths that end within a tile of 64 or of 128 keys, with the mask, and without it by a version that takes
// that.
static void test_fused_low_scores(void **state) {
    static const int lengths[] = {192 - 31, 192, 704};
    skip_without_fused();
    for (int newer = 0; newer <= !ON_GPU; newer++) {
#ifdef CUDA_EMULATED
        attention_close(&dev); // it has cached the version
        setenv("EMU_CUDNN_VERSION", newer ? "92600" : "92503", 1);
#endif
        for (int i = 0; i < 3; i++) {
            struct attention_shape s = shape_of(1, lengths[i], 1, 1, 64);
            check_low_scores(ATTENTION_FUSED, s);
            s.full = true;
            if (fused_takes_here(s, newer || s.T % 128 != 64))
                check_low_scores(ATTENTION_FUSED, s);
        }
    }
#ifdef CUDA_EMULATED
    attention_close(&dev);
    unsetenv("EMU_CUDNN_VERSION");
#endif
}
// Checks that flash computes what fused does not take: a layer with a window, or a sequence of one token.
static void check_in_place(struct attention_shape s) {
    uint64_t seed = case_seed = 31;
    double *exact, *dexact;
    floatX *qkv = test_floats(&exact, qkv_count(s), 1, &seed), *dout = test_floats(&dexact, out_count(s), 1, &seed);
    const struct result flash = run(qkv, dout, ATTENTION_FLASH, s, dropout_of(0));
    const struct result fused = run(qkv, dout, ATTENTION_FUSED, s, dropout_of(0));
    assert_false(backend_takes(ATTENTION_FUSED, s, 0));
    assert_memory_equal(flash.out, fused.out, (size_t)out_count(s) * sizeof(floatX));
    assert_memory_equal(flash.dqkv, fused.dqkv, (size_t)qkv_count(s) * sizeof(floatX));
    assert_memory_equal(flash.saved, fused.saved, attention_saved_bytes(ATTENTION_FUSED, s));
    result_free(flash, ATTENTION_FLASH, s);
    result_free(fused, ATTENTION_FUSED, s);
    void *all[] = {qkv, dout, exact, dexact};
    for (int i = 0; i < 4; i++)
        free(all[i]);
}
#ifdef PRECISION_BF16
static void assert_refuses(const char *why, size_t version, int major, struct attention_shape s, bool any_order) {
    char reason[256];
    fused_refuses(reason, sizeof reason, version, major, s, any_order);
    if (!why)
        assert_string_equal(reason, "");
    else if (!strstr(reason, why))
        fail_msg("cuDNN %d, compute capability %d: \"%s\" instead of \"%s\"", (int)version, major, reason, why);
}
// Checks what versions and GPUs can't do, by the conditions of NVIDIA's frontend and of TransformerEngine.
static void test_fused_refuses(void **state) {
    struct attention_shape s = shape_of(1, 256, 2, 1, 128);
    static const int oldest[] = {90000, 90000, 90700, 90700, 91801}; // for compute capabilities 8.x to 12.x
    for (int major = 8; major <= 12; major++) {
        const char *unproven = major == 8 || major > 10 ? "not proven on compute capability" : NULL;
        assert_refuses(NULL, (size_t)oldest[major - 8], major, s, true);
        assert_refuses(unproven, 91801, major, s, false);
        assert_refuses(unproven, 92600, major, s, false);
        assert_refuses(major >= 10 ? "before 9.7 " : NULL, 90699, major, s, true);
    }
    assert_refuses("before 9.18.1 does not take compute capability 12.x", 91800, 12, s, true);
    assert_refuses("before 9.18.1 has no deterministic backward", 91800, 10, s, false);
    assert_refuses("--deterministic-mode=false", 91900, 12, s, false);
    assert_refuses(NULL, 90000, 9, s, false);
    assert_refuses("compute capability 8.0", 91900, 7, s, true);
    assert_refuses("9.10.1", 91000, 9, s, true);
    assert_refuses("9.10.1", 91001, 9, s, true);
    assert_refuses(NULL, 91002, 9, s, true);
    s.T = 200;
    assert_refuses("multiples of 128", 91500, 9, s, true);
    assert_refuses(NULL, 91501, 9, s, true);
    s.T = 1;
    assert_refuses("one token", 91900, 9, s, true);
    s.T = 192;
    assert_refuses(NULL, 92503, 9, s, false);
    s.full = true;
    for (int T = 64; T < 1400; T += 128) {
        s.T = T;
        assert_refuses("before 9.26 without a causal mask", 92503, 9, s, true);
        assert_refuses(NULL, 92600, 9, s, true);
        assert_refuses(NULL, 92503, 10, s, true);
        s.T = T + 32;
        assert_refuses(NULL, 92503, 9, s, true);
    }
    s.T = 128;
    assert_refuses(NULL, 92503, 9, s, true);
    s = shape_of(1, 256, 2, 1, 136);
    assert_refuses("heads of up to 128", 91900, 8, s, true);
    assert_refuses(NULL, 90500, 9, s, true);
    assert_refuses("heads of up to 128 on this GPU before 9.5", 90499, 9, s, true);
    assert_refuses("heads of up to 128 on this GPU before 9.26", 92599, 10, s, true);
    assert_refuses("heads of up to 128 on this GPU, not 136", 92600, 12, s, true);
    s.head_dim = 256;
    assert_refuses(NULL, 92600, 10, s, true);
    assert_refuses(NULL, 92600, 10, s, false);
    s.softcap = 1;
    assert_refuses("--attn-logit-softcapping", 91900, 9, s, true);
}
#endif
#endif

// Checks that a NaN reaches every later query, and no earlier query of another block. clean: the number of tokens
// before the block of the NaN.
static void check_nan(struct attention_shape s, int clean) {
    const int at = 100, D = s.head_dim;
    uint64_t seed = case_seed = 4;
    double *exact;
    floatX *qkv = test_floats(&exact, qkv_count(s), 1, &seed);
    qkv[at * 3 * D + D + 3] = to_floatX(NAN); // k of token `at`
    FOR_EACH_BACKEND(backend, s, 0) {
        const struct result r = run(qkv, qkv, backend, s, dropout_of(0));
        for (int t = 0; t < s.T; t++)
            for (int d = 0; d < D; d++) {
                assert_false(t < clean && isnan(to_float(r.out[t * D + d])));
                assert_true(t < at || isnan(to_float(r.out[t * D + d])));
            }
        result_free(r, backend, s);
    }
    free(qkv);
    free(exact);
}
static void test_nan(void **state) {
    check_nan(shape_of(1, 150, 1, 1, 16), 100 / 32 * 32); // the CPU's blocks take 32 tokens
    check_nan(shape_of(1, 150, 1, 1, 64), 100 / 32 * 32);
}

// Without lse, as in evaluation: the same out.
static void test_without_lse(void **state) {
    const struct attention_shape s = shape_of(2, 70, 2, 1, 24);
    uint64_t seed = case_seed = 8;
    double *exact;
    floatX *qkv = test_floats(&exact, qkv_count(s), 1, &seed);
    void *workspace = test_alloc(flash_forward_workspace_bytes(s, &dev));
    floatX *out = (floatX *)test_alloc((size_t)out_count(s) * sizeof(floatX));
    const struct result r = run(qkv, qkv, ATTENTION_FLASH, s, dropout_of(0));
    flash_forward(out, NULL, qkv, s, dropout_of(0), NULL, workspace, &dev);
    assert_memory_equal(out, r.out, (size_t)out_count(s) * sizeof(floatX));
    result_free(r, ATTENTION_FLASH, s);
    free(workspace);
    free(out);
    free(qkv);
    free(exact);
}

// ---------------------------------------------------------------------------------------------------------------------
// 3xTF32

// Returns the largest magnitude of x - reference (n).
static double largest_error(const floatX *x, const double *reference, int64_t n) {
    double largest = 0;
    for (int64_t i = 0; i < n; i++) {
        const double error = fabs(to_float(x[i]) - reference[i]);
        largest = error > largest ? error : largest; // fmax here ends gcc 12 for SVE with an internal error
    }
    return largest;
}
// Sets x (n) to normally distributed numbers, exact (n) to the same.
static void normal_numbers(floatX *x, double *exact, int64_t n, double deviation, uint64_t *seed) {
    for (int64_t i = 0; i < n; i++) {
        const double radius = sqrt(-2 * log(0.5 + 0.49999 * test_uniform(seed)));
        x[i] = to_floatX((float)(deviation * radius * cos(M_PI * test_uniform(seed))));
        exact[i] = to_float(x[i]);
    }
}
// Checks flash's errors against double: root mean squares within twice what numpy gave with sums truncated to 24 bits
// (O 1.1e-6, dQ 1.7e-6, dK 1.9e-6, dV 1.4e-6 at T 1024, head dim 128), where 1xTF32 has 4e-4, and sums that stay in the
// tensor core 1.5e-5; the largest within 4 times unfused's. deviation: of q and k.
static void check_tf32(struct attention_shape s, double deviation) {
    uint64_t seed = case_seed = 61;
    const int64_t rows = (int64_t)s.B * s.T, W = (int64_t)(s.num_heads + 2 * s.num_query_groups) * s.head_dim;
    const int64_t k = (int64_t)s.num_heads * s.head_dim, v = k + (int64_t)s.num_query_groups * s.head_dim;
    floatX *qkv = (floatX *)test_alloc((size_t)qkv_count(s) * sizeof *qkv),
           *dout = (floatX *)test_alloc((size_t)out_count(s) * sizeof *dout);
    double *exact = test_doubles(qkv_count(s)), *dexact = test_doubles(out_count(s));
    for (int64_t i = 0; i < qkv_count(s); i++)
        normal_numbers(qkv + i, exact + i, 1, i % W < v ? deviation : 1, &seed);
    normal_numbers(dout, dexact, out_count(s), 1, &seed);
    const struct naive reference = naive_attention(exact, dexact, s, dropout_of(0), exactly);
    const struct result r = run(qkv, dout, ATTENTION_FLASH, s, dropout_of(0));
    const struct result u = run(qkv, dout, ATTENTION_UNFUSED, s, dropout_of(0));
    const double grows = deviation * deviation; // errors of scores grow as the scores do
    const struct {
        const char *name;
        double error, allowed;
    } checks[] = {
        {"out", columns_error(r.out, reference.out, rows, k, 0, k), 2.2e-6 * grows},
        {"dq", columns_error(r.dqkv, reference.dqkv, rows, W, 0, k), 3.4e-6 * grows},
        {"dk", columns_error(r.dqkv, reference.dqkv, rows, W, k, v), 3.8e-6 * grows},
        {"dv", columns_error(r.dqkv, reference.dqkv, rows, W, v, W), 2.8e-6 * grows},
        {"out, largest", largest_error(r.out, reference.out, rows * k),
         4 * largest_error(u.out, reference.out, rows * k) + 0x1p-22},
        {"dqkv, largest", largest_error(r.dqkv, reference.dqkv, rows * W),
         4 * largest_error(u.dqkv, reference.dqkv, rows * W) + 0x1p-22},
    };
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) {
        if (getenv("TEST_FILTER"))
            print_message("%s: %.2g, at most %.2g\n", checks[i].name, checks[i].error, checks[i].allowed);
        if (!(checks[i].error <= checks[i].allowed))
            fail_msg("%s: an error of %g, at most %g", checks[i].name, checks[i].error, checks[i].allowed);
    }
    result_free(r, ATTENTION_FLASH, s);
    result_free(u, ATTENTION_UNFUSED, s);
    naive_free(reference);
    free(qkv);
    free(dout);
    free(exact);
    free(dexact);
}
static void tf32_errs_like_fp32(void **state) {
    if (!TF32)
        skip();
    check_tf32(shape_of(1, 1024, 1, 1, 128), 1);
    check_tf32(shape_of(1, 1024, 1, 1, 64), 1);
    check_tf32(shape_of(1, 300, 2, 1, 96), 1);
    check_tf32(shape_of(1, 200, 1, 1, 256), 1);
    check_tf32(shape_of(1, 300, 1, 1, 128), 3.9); // scores of 15 and more
}
// Checks that an infinity in q, k or v is a NaN in the rows that it meets, never a number, and that numbers near the
// ends of fp32's range keep 2^-11: of the smallest the small part is lost.
static void tf32_carries_infinities(void **state) {
    if (!TF32)
        skip();
    const struct attention_shape s = shape_of(1, 70, 1, 1, 64);
    for (int part = 0; part < 3; part++) {
        uint64_t seed = case_seed = 62;
        double *exact;
        floatX *qkv = test_floats(&exact, qkv_count(s), 1, &seed);
        qkv[(50 * 3 + part) * 64 + 7] = to_floatX(part == 1 ? -INFINITY : INFINITY);
        const struct result r = run(qkv, qkv, ATTENTION_FLASH, s, dropout_of(0));
        for (int t = 50; t < (part == 0 ? 51 : 70); t++) // v's only in its own column
            assert_true(isnan(to_float(r.out[t * 64 + 7])));
        assert_false(isnan(to_float(r.out[31 * 64 + 7]))); // of another block of rows
        result_free(r, ATTENTION_FLASH, s);
        free(qkv);
        free(exact);
    }
}
static void tf32_takes_wide_values(void **state) {
    if (!TF32)
        skip();
    const struct attention_shape s = shape_of(1, 70, 1, 1, 64);
    const int64_t D = s.head_dim;
    for (int i = 0; i < 2; i++) {
        const double value = i == 0 ? 1e30 : 1e-30;
        uint64_t seed = case_seed = 63;
        double *exact;
        floatX *qkv = test_floats(&exact, qkv_count(s), 1, &seed);
        for (int64_t j = 0; j < qkv_count(s); j++) {
            const int64_t part = j / D % 3;
            qkv[j] = to_floatX((float)(exact[j] * (part == 0 ? value : part == 1 ? 1 / value : value)));
            exact[j] = to_float(qkv[j]);
        }
        double *zeros = test_doubles(out_count(s));
        const struct naive reference = naive_attention(exact, zeros, s, dropout_of(0), exactly);
        const struct result r = run(qkv, qkv, ATTENTION_FLASH, s, dropout_of(0));
        assert_true(columns_error(r.out, reference.out, s.T, D, 0, D) < (i == 0 ? 2.2e-6 : 0x1p-11));
        result_free(r, ATTENTION_FLASH, s);
        naive_free(reference);
        free(zeros);
        free(qkv);
        free(exact);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Masks: documents that do not see each other, windows, capped scores. Each backend has tests NAME_... of the cases
// that it takes.

// The tokens at which documents begin after the first one, up to a 0; -1 is T - 1. Each sequence takes the list after
// its predecessor's. The backends' tiles have 32, 64, 80, 128 or 192 tokens.
static const int document_lists[][8] = {
    {1},                // the first document has one token
    {-1},               // the last document has one token
    {1, 2, 3, 5},       // several such documents in a row
    {32, 64, 128, 192}, // borders of tiles
    {31, 63, 127, 191}, // one token before
    {33, 65, 129, 193}, // one token after
    {79, 80, 81},
    {40, 100, 101, 150}, // inside a tile, and two in one tile
};
enum { DOCUMENT_LISTS = sizeof document_lists / sizeof document_lists[0], ONE_DOCUMENT = -1 };

// Fills starts (B, T) with the row at which each token's document begins. moved: is added to the borders.
static void documents_fill(int32_t *starts, int B, int T, int list, int moved) {
    for (int b = 0; b < B; b++) {
        memset(starts + b * T, 0, (size_t)T * sizeof *starts);
        const int *begins = document_lists[(list + b) % DOCUMENT_LISTS];
        for (int i = 0; begins[i]; i++)
            for (int t = (begins[i] < 0 ? T - 1 : begins[i]) + moved; t < T; t++)
                starts[b * T + t] = (begins[i] < 0 ? T - 1 : begins[i]) + moved;
    }
}
static struct attention_shape masked_by(struct attention_shape s, const int32_t *starts, int window) {
    const size_t bytes = (size_t)(s.B * s.T) * sizeof(int32_t);
    int32_t *first_key = (int32_t *)guarded(bytes), *last_query = (int32_t *)guarded(bytes);
    attention_spans(first_key, last_query, starts, window, s.B, s.T, &dev);
    s.first_key = first_key;
    s.last_query = last_query;
    return s;
}
// Adds a mask to a shape; unmask frees it. list: number of document_lists, or ONE_DOCUMENT.
static struct attention_shape masked(struct attention_shape s, int list, int window) {
    int32_t *starts = (int32_t *)test_alloc((size_t)(s.B * s.T) * sizeof *starts);
    if (list != ONE_DOCUMENT)
        documents_fill(starts, s.B, s.T, list, 0);
    s = masked_by(s, list == ONE_DOCUMENT ? NULL : starts, window);
    snprintf(case_mask, sizeof case_mask, ", documents %d, window %d", list, window);
    free(starts);
    return s;
}
static void unmask(struct attention_shape s) {
    const size_t bytes = (size_t)(s.B * s.T) * sizeof(int32_t);
    guarded_free((void *)s.first_key, bytes);
    guarded_free((void *)s.last_query, bytes);
}
static void skip_without(enum attention_backend which) {
    if (!backend_takes(which, shape_of(1, 1, 1, 1, 64), 0))
        skip();
}
static void check_masked(enum attention_backend which, struct attention_shape s, int list, int window, double q_scale,
                         double k_scale, float dropout) {
    s = masked(s, list, window);
    if (backend_takes(which, s, dropout))
        check_backend(which, s, q_scale, k_scale, dropout);
    unmask(s);
}
// Returns the i-th head dim that the backend takes.
static int some_head_dim(enum attention_backend which, int i) {
    return which == ATTENTION_FLASH_SM90 ? dims[1 + i % 4] : dims[i % DIMS];
}

// Checks the two tables of spans against the definition.
static void spans_are_what_a_query_sees(void **state) {
    static const int windows[] = {0, 1, 2, 31, 32, 33, 129, 130, 131};
    enum { B = 3, T = 130 };
    const struct attention_shape s = shape_of(B, T, 1, 1, 8);
    int32_t *starts = (int32_t *)test_alloc(B * T * sizeof *starts);
    for (int list = ONE_DOCUMENT; list < DOCUMENT_LISTS; list++)
        for (int i = 0; i < 9; i++) {
            const struct attention_shape m = masked(s, list, windows[i]);
            memset(starts, 0, B * T * sizeof *starts);
            if (list != ONE_DOCUMENT)
                documents_fill(starts, B, T, list, 0);
            test_case_shape(m, 0, "spans");
            for (int row = 0; row < B * T; row++) {
                const int b = row / T, at = row % T;
                int first = at, last = at;
                for (int t = 0; t < T; t++) {
                    const bool together = starts[row] == starts[b * T + t];
                    const int apart = t < at ? at - t : t - at;
                    if (together && (windows[i] == 0 || apart < windows[i])) {
                        first = t < first ? t : first;
                        last = t > last ? t : last;
                    }
                }
                assert_int_equal(m.first_key[row], first);
                assert_int_equal(m.last_query[row], last);
            }
            unmask(m);
        }
    free(starts);
}

static void check_windows(enum attention_backend which) {
    enum { T = 217 };
    static const int windows[] = {1, 2, 31, 32, 33, 63, 64, 65, 79, 80, 81, 127, 128, 129, T - 1, T, T + 1};
    skip_without(which);
    for (int i = 0; i < 17; i++)
        for (int d = i; takes_case(i, 5) && d < i + (SLOW > 0 ? 1 : 2); d++)
            check_masked(which,
                         shape_of(1 + (SLOW != 2 && d % 2), T, heads[(i + d) % HEADS][0], heads[(i + d) % HEADS][1],
                                  some_head_dim(which, d)),
                         ONE_DOCUMENT, windows[i], 1, 1, 0);
    for (int d = 1; d < (SLOW > 0 ? 2 : 4); d++) { // so that nothing sees some tiles
        check_masked(which, shape_of(1, 513, 2, 1, some_head_dim(which, d)), ONE_DOCUMENT, 100, 1, 1, 0);
        check_masked(which, shape_of(1, 400, 1, 1, some_head_dim(which, d)), ONE_DOCUMENT, 60, 8, 8, 0);
    }
}
static void check_documents(enum attention_backend which) {
    static const int windows[] = {1, 20, 33, 64};
    skip_without(which);
    for (int i = 0; i < DOCUMENT_LISTS; i++)
        for (int d = i; d < i + (SLOW > 0 ? 1 : 2); d++) {
            const int *h = heads[(i + d) % HEADS], D = some_head_dim(which, d + 1);
            if (takes_case(i, 3))
                check_masked(which, shape_of(2, 217, h[0], h[1], D), i, 0, 1, 1, 0);
            if (takes_case(i + 1, 3))
                check_masked(which, shape_of(1, 217 - i, h[0], h[1], D), i, windows[(i + d) % 4], 1, 1, 0);
            if (takes_case(i + 2, 3))
                check_masked(which, shape_of(1, 150, 2, 1, D), i, i % 2 ? 40 : 0, 1, 1, 0.2f); // with dropout
        }
    check_masked(which, shape_of(1, 217, 1, 1, 64), 7, 0, 20, 20, 0);
    check_masked(which, shape_of(2, 1, 2, 1, 64), 0, 1, 1, 1, 0);
    if (SLOW == 0)
        check_masked(which, shape_of(1, 1030, 3, 1, 64), 3, 300, 1, 1, 0); // the CPU's backward cuts it into segments
}
// Checks queries and keys so large that the cap bends most scores.
static void check_softcap(enum attention_backend which) {
    struct attention_shape s = shape_of(1, 1, 1, 1, 64);
    skip_without(which);
    s.softcap = 3;
    if (!backend_takes(which, s, 0))
        skip();
    for (int i = 0; i < (SLOW > 0 ? 4 : DIMS); i++) {
        s = shape_of(1 + i % 2, 150 + i, heads[i % HEADS][0], heads[i % HEADS][1], some_head_dim(which, i + 1));
        s.softcap = 3;
        if (takes_case(i, 2))
            check_backend(which, s, 5, 3, i % 3 == 2 ? 0.2f : 0);
        if (takes_case(i + 1, 2))
            check_masked(which, s, i, i % 2 ? 50 : 0, 5, 3, i % 3 == 1 ? 0.2f : 0);
        s.softcap = 50; // bends hardly any score
        if (takes_case(i, 3))
            check_backend(which, s, 1, 1, 0);
    }
    s = shape_of(1, 300, 2, 1, 64); // scores near 400: nothing overflows, and slopes are 0
    s.softcap = 30;
    check_backend(which, s, 20, 20, 0);
    check_masked(which, s, ONE_DOCUMENT, 70, 20, 20, 0);
}

struct inputs {
    floatX *qkv, *dout;
};
static struct inputs inputs_of(struct attention_shape s, uint64_t seed) {
    struct inputs x;
    double *exact;
    case_seed = seed;
    x.qkv = test_floats(&exact, qkv_count(s), 1, &seed);
    free(exact);
    x.dout = test_floats(&exact, out_count(s), 1, &seed);
    free(exact);
    return x;
}
static void inputs_free(struct inputs x) {
    free(x.qkv);
    free(x.dout);
}
// Checks that queries [begin, end) of sequence b have equal results.
static void assert_rows_equal(struct result a, struct result b, enum attention_backend which, struct attention_shape s,
                              int sequence, int begin, int end) {
    const size_t out_row = (size_t)out_count(s) / (size_t)(s.B * s.T), row = (size_t)qkv_count(s) / (size_t)(s.B * s.T);
    const size_t first = (size_t)(sequence * s.T + begin), count = (size_t)(end - begin);
    assert_memory_equal(a.out + first * out_row, b.out + first * out_row, count * out_row * sizeof(floatX));
    assert_memory_equal(a.dqkv + first * row, b.dqkv + first * row, count * row * sizeof(floatX));
    for (int h = 0; h < s.num_heads; h++) {
        const size_t bytes = attention_saved_bytes(which, s) / (size_t)(s.B * s.num_heads * s.T);
        const size_t at = ((size_t)(sequence * s.num_heads + h) * (size_t)s.T + (size_t)begin) * bytes;
        assert_memory_equal((const char *)a.saved + at, (const char *)b.saved + at, count * bytes);
    }
}

static void check_one_document(enum attention_backend which) {
    skip_without(which);
    for (int i = 0; i < 3; i++) {
        if (!takes_case(i + 1, 2))
            continue;
        const struct attention_shape s = shape_of(2, SLOW == 2 ? 150 : 217, 4, 2, some_head_dim(which, i + 1));
        const struct inputs x = inputs_of(s, 31);
        const struct result causal = run(x.qkv, x.dout, which, s, dropout_of(0));
        const struct attention_shape m = masked(s, ONE_DOCUMENT, i ? s.T + i - 1 : 0);
        const struct result same = run(x.qkv, x.dout, which, m, dropout_of(0));
        for (int b = 0; b < s.B; b++)
            assert_rows_equal(causal, same, which, m, b, 0, s.T);
        result_free(same, which, m);
        result_free(causal, which, s);
        unmask(m);
        inputs_free(x);
    }
}

// Checks that a document of a packed sequence gives the same out, gradients and log-sum-exps as by itself. exact: to
// the bit.
static void check_alone(struct result packed, struct inputs x, enum attention_backend which, struct attention_shape s,
                        int begin, int end, int window, bool exact) {
    struct attention_shape one = s;
    one.T = end - begin;
    one.B = 1;
    one = window ? masked(one, ONE_DOCUMENT, window) : one;
    if (!window)
        one.first_key = one.last_query = NULL;
    const int64_t out_row = out_count(s) / s.T, row = qkv_count(s) / s.T;
    const struct result alone =
        run(x.qkv + begin * row, x.dout + begin * out_row, which, one, dropout_of(0)); // with s.B = 1
    const floatX *out = packed.out + begin * out_row, *dqkv = packed.dqkv + begin * row;
    if (exact) {
        assert_memory_equal(alone.out, out, (size_t)out_count(one) * sizeof *out);
        assert_memory_equal(alone.dqkv, dqkv, (size_t)qkv_count(one) * sizeof *dqkv);
        for (int h = 0; h < s.num_heads; h++)
            assert_memory_equal((const float *)alone.saved + h * one.T, (const float *)packed.saved + h * s.T + begin,
                                (size_t)one.T * sizeof(float));
    } else {
        const double bound = sizeof(floatX) == 2 ? FLOATX_ROUNDING : bound_of(s, 1).relative;
        double *got = to_doubles(out, out_count(one)), *expected = to_doubles(alone.out, out_count(one));
        assert_close(got, expected, out_count(one), bound);
        free(got);
        free(expected);
        got = to_doubles(dqkv, qkv_count(one));
        expected = to_doubles(alone.dqkv, qkv_count(one));
        assert_close(got, expected, qkv_count(one), bound);
        free(got);
        free(expected);
    }
    result_free(alone, which, one);
    if (window)
        unmask(one);
}
static void check_packed(enum attention_backend which, struct attention_shape s, const int *begins /*(count + 1)*/,
                         int count, int window, bool exact) {
    int32_t *starts = (int32_t *)test_alloc((size_t)s.T * sizeof *starts);
    for (int i = 0; i < count; i++)
        for (int t = begins[i]; t < begins[i + 1]; t++)
            starts[t] = begins[i];
    s = masked_by(s, starts, window);
    snprintf(case_mask, sizeof case_mask, ", %d documents, window %d", count, window);
    const struct inputs x = inputs_of(s, 33);
    const struct result packed = run(x.qkv, x.dout, which, s, dropout_of(0));
    for (int i = 0; i < count; i++)
        check_alone(packed, x, which, s, begins[i], begins[i + 1], window, exact);
    result_free(packed, which, s);
    inputs_free(x);
    unmask(s);
    free(starts);
}
static void check_packed_equals_alone(enum attention_backend which) {
    static const int begins[] = {0, 1, 2, 40, 72, 136, 199, 200}, tiles[] = {0, 384, 768}, more[] = {0, 128, 512, 640};
    skip_without(which);
    for (int d = 1; d < 5; d++)
        if (takes_case(d, 3) || takes_case(d, 4)) // without a window and with one
            check_packed(which, shape_of(1, 200, 4, 2, some_head_dim(which, d)), begins, 7, d % 2 ? 0 : 30, false);
    if (which == ATTENTION_UNFUSED) // its products sum over all keys, in another order
        return;
    // 384 is a multiple of all tiles for heads of 64; 128, of all tiles for heads of 128. First few segments on the
    // CPU, then one.
    if (takes_case(1, 2))
        check_packed(which, shape_of(1, 768, 2, 1, 64), tiles, 2, 0, true);
    check_packed(which, shape_of(1, 640, 1, 1, 128), more, 3, SLOW == 2 ? 90 : 0, true);
    if (SLOW == 0)
        check_packed(which, shape_of(1, 640, 64, 32, 128), more, 3, 200, true);
}

// Checks that only one document's results change where all of a token's row, and of its gradient's, changes.
static void check_apart(enum attention_backend which, struct attention_shape s, int list, int sequence, int at) {
    s = masked(s, list, 0);
    const struct inputs x = inputs_of(s, 35);
    const struct result before = run(x.qkv, x.dout, which, s, dropout_of(0));
    const int64_t out_row = out_count(s) / (s.B * s.T), row = qkv_count(s) / (s.B * s.T), token = sequence * s.T + at;
    for (int64_t i = 0; i < row; i++)
        x.qkv[token * row + i] = to_floatX(i % 3 ? 40.0f : -50.0f);
    for (int64_t i = 0; i < out_row; i++)
        x.dout[token * out_row + i] = to_floatX(i % 2 ? 30.0f : -70.0f);
    const struct result after = run(x.qkv, x.dout, which, s, dropout_of(0));
    for (int b = 0; b < s.B; b++) {
        const int begin = b == sequence ? s.first_key[token] : s.T,
                  end = b == sequence ? s.last_query[sequence * s.T + begin] + 1 : s.T;
        assert_rows_equal(before, after, which, s, b, 0, begin);
        assert_rows_equal(before, after, which, s, b, end, s.T);
    }
    assert_memory_not_equal(before.out + token * out_row, after.out + token * out_row,
                            (size_t)out_row * sizeof(floatX));
    result_free(before, which, s);
    result_free(after, which, s);
    inputs_free(x);
    unmask(s);
}
static void check_documents_apart(enum attention_backend which) {
    static const int tokens[] = {0, 1, 31, 32, 33, 63, 64, 65, 100, 128, 149};
    skip_without(which);
    for (int i = 0; i < DOCUMENT_LISTS; i++)
        for (int t = i % (SLOW == 2 ? 4 : 2); t < 11; t += SLOW == 2 ? 4 : 2)
            if (takes_case(i + t / 4, 5))
                check_apart(which, shape_of(2, 150, 2, 1, some_head_dim(which, i + 1)), i, i / 2 % 2, tokens[t]);
}

// Checks that the comparison with the naive form sees faults: with tables that are wrong at one edge, `run` misses the
// bounds.
static void check_fault(enum attention_backend which, struct attention_shape s, const struct naive reference,
                        const struct naive plain, struct inputs x, bool expected) {
    const struct result r = run(x.qkv, x.dout, which, s, dropout_of(0));
    const struct bound bound = bound_of(s, 1);
    const int64_t W = (int64_t)(s.num_heads + 2 * s.num_query_groups) * s.head_dim,
                  k = (int64_t)s.num_heads * s.head_dim;
    const struct column_error out = column_error_of("out", r.out, reference.out, plain.out, s.T, k, 0, k, bound);
    const struct column_error dv = column_error_of("dv", r.dqkv, reference.dqkv, plain.dqkv, s.T, W,
                                                   k + (int64_t)s.num_query_groups * s.head_dim, W, bound);
    if ((out.error > out.allowed || dv.error > dv.allowed) != expected)
        fail_msg("%s: out is off by %g, allowed %g, dv by %g, allowed %g",
                 expected ? "not seen" : "seen without a fault", out.error, out.allowed, dv.error, dv.allowed);
    result_free(r, which, s);
}
// Fills last_query (T) so that it belongs to first_key (T).
static void refill_last_query(int32_t *last_query, const int32_t *first_key, int T) {
    for (int j = 0; j < T; j++)
        for (int t = j; t < T; t++)
            if (first_key[t] <= j)
                last_query[j] = t;
}
static void check_mask_faults(enum attention_backend which) {
    enum { T = 150, WINDOW = 12, ROWS = 16 };
    static const int rows[ROWS] = {1, 31, 32, 33, 42, 43, 44, 63, 64, 65, 74, 75, 127, 128, 129, T - 1};
    skip_without(which);
    for (int window = 0; window <= WINDOW; window += WINDOW)
        for (int i = 0; i < ROWS; i++) {
            if (!takes_case(i + (window > 0), 4))
                continue;
            // Without a window a document begins at the row; with a window, the row's window ends one key too early or
            // too late.
            const struct attention_shape s = shape_of(1, T, 1, 1, 64);
            int32_t *starts = (int32_t *)test_alloc(T * sizeof *starts);
            for (int t = 0; t < T; t++)
                starts[t] = window == 0 && t >= rows[i] ? rows[i] : 0;
            const struct attention_shape right = masked_by(s, starts, window);
            struct inputs x = inputs_of(s, 37);
            double *qkv = to_doubles(x.qkv, qkv_count(s)), *dout = to_doubles(x.dout, out_count(s));
            const struct naive reference = naive_attention(qkv, dout, right, dropout_of(0), exactly);
            const struct naive plain = plain_attention(reference, qkv, dout, right, dropout_of(0));
            snprintf(case_mask, sizeof case_mask, ", %s at %d", window ? "window" : "document", rows[i]);
            check_fault(which, right, reference, plain, x, false);
            for (int moved = -1; moved <= 1; moved += 2) {
                for (int t = 0; t < T; t++)
                    starts[t] = window == 0 && t >= rows[i] + moved ? rows[i] + moved : 0;
                const struct attention_shape wrong = masked_by(s, starts, window);
                int32_t *first_key = (int32_t *)wrong.first_key;
                const int key = first_key[rows[i]] + moved, next = rows[i] + 1;
                if (window > 0 && key >= first_key[rows[i] - 1] && key <= (next < T ? first_key[next] : T - 1))
                    first_key[rows[i]] = key; // still nondecreasing
                refill_last_query((int32_t *)wrong.last_query, first_key, T);
                const bool same = memcmp(first_key, right.first_key, T * sizeof *first_key) == 0;
                snprintf(case_mask, sizeof case_mask, ", %s at %d moved by %d", window ? "window" : "document", rows[i],
                         moved);
                check_fault(which, wrong, reference, plain, x, !same);
                unmask(wrong);
            }
            if (plain.out != reference.out)
                naive_free(plain);
            naive_free(reference);
            inputs_free(x);
            unmask(right);
            void *all[] = {starts, qkv, dout};
            for (int j = 0; j < 3; j++)
                free(all[j]);
        }
}
static void check_masked_bits(enum attention_backend which) {
    skip_without(which);
    for (int i = 0; i < (SLOW > 0 ? 2 : 6); i++) {
        if (!takes_case(i, 2))
            continue;
        const int *h = heads[i % HEADS];
        const struct attention_shape s =
            masked(shape_of(1 + i % 2, SLOW == 2 ? 150 : 300, h[0], h[1], some_head_dim(which, i + 1)), i + 2, i * 30);
        check_bits(which, s, i == 1 && which != ATTENTION_FLASH_SM90 ? 0.1f : 0);
        unmask(s);
    }
    if (SLOW == 0) { // so that threads take whole KV heads
        const struct attention_shape s = masked(shape_of(4, 200, 8, 8, 32), 4, 0);
        if (backend_takes(which, s, 0))
            check_bits(which, s, 0);
        unmask(s);
    }
}

#define MASK_TEST(name, which, promise, check)                                                                         \
    static void name##_##promise(void **state) { check(which); }
#define MASK_TESTS_OF(name, which)                                                                                     \
    MASK_TEST(name, which, sees_a_window, check_windows)                                                               \
    MASK_TEST(name, which, sees_documents, check_documents)                                                            \
    MASK_TEST(name, which, caps_scores, check_softcap)                                                                 \
    MASK_TEST(name, which, takes_one_document_as_causal, check_one_document)                                           \
    MASK_TEST(name, which, packed_equals_alone, check_packed_equals_alone)                                             \
    MASK_TEST(name, which, keeps_documents_apart, check_documents_apart)                                               \
    MASK_TEST(name, which, mask_faults_are_seen, check_mask_faults)                                                    \
    MASK_TEST(name, which, repeats_masked_bits, check_masked_bits)
MASK_TESTS_OF(flash, ATTENTION_FLASH)
MASK_TESTS_OF(unfused, ATTENTION_UNFUSED)
#ifdef TARGET_CUDA
MASK_TESTS_OF(sm90, ATTENTION_FLASH_SM90)
// Checks tiles of keys that all rows of a tile see, between tiles that the diagonal cuts and tiles that the first keys
// cut; and a document that begins with a warpgroup's last row.
static void sm90_visits_whole_tiles(void **state) {
    static const int begins[] = {40, 255}, lengths_of[] = {450, 300}, windows[] = {260, 0};
    skip_without(ATTENTION_FLASH_SM90);
    for (int i = 0; i < 8; i++) {
        if (!takes_case(i, 3))
            continue;
        const struct attention_shape s = shape_of(1, lengths_of[i % 2], 1, 1, dims[1 + i / 2]);
        int32_t *starts = (int32_t *)test_alloc((size_t)s.T * sizeof *starts);
        for (int t = 0; t < s.T; t++)
            starts[t] = t >= begins[i % 2] ? begins[i % 2] : 0;
        const struct attention_shape m = masked_by(s, starts, windows[i % 2]);
        snprintf(case_mask, sizeof case_mask, ", document at %d, window %d", begins[i % 2], windows[i % 2]);
        check_backend(ATTENTION_FLASH_SM90, m, 1, 1, 0);
        unmask(m);
        free(starts);
    }
}
#endif
#define MASK_TESTS(name)                                                                                               \
    cmocka_unit_test(name##_sees_a_window), cmocka_unit_test(name##_sees_documents),                                   \
        cmocka_unit_test(name##_caps_scores), cmocka_unit_test(name##_takes_one_document_as_causal),                   \
        cmocka_unit_test(name##_packed_equals_alone), cmocka_unit_test(name##_keeps_documents_apart),                  \
        cmocka_unit_test(name##_mask_faults_are_seen), cmocka_unit_test(name##_repeats_masked_bits)

// ---------------------------------------------------------------------------------------------------------------------
// The amaxes of out and of dqkv. Every run compares them with what was stored; these tests have the hard cases.

// Checks that a call does not clear an amax: a larger one stays.
static void amax_keeps_what_is_larger(void **state) {
    const struct attention_shape s = shape_of(1, 40, 2, 1, 64);
    uint64_t seed = case_seed = 51;
    double *exact;
    floatX *qkv = test_floats(&exact, qkv_count(s), 1, &seed);
    static const uint32_t before[] = {0x3c000000u, 0x7f000000u, 0x7fc00000u}; // 2^-7, 2^127, NaN
    for (int i = 0; i < 3; i++)
        FOR_EACH_BACKEND(which, s, 0) {
            amax_before = before[i];
            const struct result r = run(qkv, qkv, which, s, dropout_of(0));
            amax_before = 0;
            assert_true((amax_after(r.out, out_count(s)) > before[i]) == (i == 0));
            result_free(r, which, s);
        }
    free(qkv);
    free(exact);
}
// Checks that rows past T, which are not stored, do not count. Every query sees little but the first key, whose value
// is small, while rows past T would have the mean of all values. Tiles hold 8 to 128 tokens and 8 to 256 columns.
static void amax_leaves_out_rows_past_T(void **state) {
    static const int sizes[] = {40, 64, 96, 128, 256};
    for (int i = 0; i < 5; i++) {
        const struct attention_shape s = shape_of(2, 35, 2, 1, sizes[i]);
        const int64_t D = s.head_dim, W = 4 * D;
        uint64_t seed = case_seed = 52;
        double *exact;
        floatX *qkv = test_floats(&exact, qkv_count(s), 0.01, &seed);
        for (int64_t t = 0; t < s.B * s.T; t++)
            for (int64_t d = 0; d < D; d++) {
                qkv[t * W + d] = qkv[t * W + D + d] = to_floatX(8);
                qkv[t * W + 2 * D + d] = to_floatX(t % s.T == 0 ? 8.0f : -8.0f);
                if (t % s.T != 0)
                    qkv[t * W + 3 * D + d] = to_floatX(1000);
            }
        FOR_EACH_BACKEND(which, s, 0) {
            const struct result r = run(qkv, qkv, which, s, dropout_of(0));
            assert_true(amax_after(r.out, out_count(s)) < fp8_magnitude(0.02f));
            result_free(r, which, s);
        }
        free(qkv);
        free(exact);
    }
}
// Checks that every element counts, so that a thread that was left out would be seen: one element of out, or of dv, is
// the largest, each in turn. As each query sees only its own key, out is v, dv is the sum of its group's dout, and dq
// and dk are 0.
static void amax_sees_every_element(void **state) {
    static const int sizes[] = {24, 64, 96, 128, 256};
    for (int i = 0; i < 5; i++) {
        const int64_t D = sizes[i];
        for (int64_t at = 0; at < D; at += SLOW == 2 ? D / (in_long_run() ? 8 : 3) + 1 : 1) {
            const struct attention_shape s = masked(shape_of(1, 21, 2, 1, (int)D), ONE_DOCUMENT, 1);
            const int64_t token = at * 5 % s.T;
            floatX *qkv = (floatX *)test_alloc((size_t)qkv_count(s) * sizeof *qkv),
                   *dout = (floatX *)test_alloc((size_t)out_count(s) * sizeof *dout);
            for (int64_t j = 0; j < qkv_count(s); j++)
                qkv[j] = to_floatX(j == token * 4 * D + 3 * D + at ? -3.0f : 0.5f);
            for (int64_t j = 0; j < out_count(s); j++)
                dout[j] = to_floatX(j == token * 2 * D + D + at ? 5.0f : 0.25f);
            FOR_EACH_BACKEND(which, s, 0) {
                const struct result r = run(qkv, dout, which, s, dropout_of(0));
                assert_int_equal(amax_after(r.out, out_count(s)), fp8_magnitude(3));
                assert_int_equal(amax_after(r.dqkv, qkv_count(s)), fp8_magnitude(5.25f));
                result_free(r, which, s);
            }
            free(qkv);
            free(dout);
            unmask(s);
        }
    }
}
// Checks that infinities and NaNs in a value or a gradient are in the amax. 3xTF32 makes an infinity a NaN.
static void amax_carries_overflow(void **state) {
    static const float bad[] = {INFINITY, -INFINITY, NAN};
    for (int i = 0; i < 6; i++) {
        const struct attention_shape s = shape_of(1, i < 3 ? 1 : 70, 1, 1, 64);
        const int64_t D = s.head_dim, token = i < 3 ? 0 : 50;
        uint64_t seed = case_seed = 53;
        double *exact, *dexact;
        floatX *qkv = test_floats(&exact, qkv_count(s), 1, &seed), *dout = test_floats(&dexact, out_count(s), 1, &seed);
        qkv[token * 3 * D + 2 * D + 13] = to_floatX(bad[i % 3]);
        dout[token * D + 29] = to_floatX(bad[i % 3]);
        FOR_EACH_BACKEND(which, s, 0) {
            const struct result r = run(qkv, dout, which, s, dropout_of(0));
            const uint32_t out = amax_after(r.out, out_count(s));
            const bool may_be_nan = i > 2 || (TF32 && which == ATTENTION_FLASH);
            assert_true(may_be_nan ? out >= 0x7f800000u : i < 2 ? out == 0x7f800000u : out > 0x7f800000u);
            assert_true(amax_after(r.dqkv, qkv_count(s)) >= 0x7f800000u);
            result_free(r, which, s);
        }
        free(qkv);
        free(dout);
        free(exact);
        free(dexact);
    }
}
// Checks that the amax of dqkv is taken after RoPE is undone. In one case the largest element is of q or k, where
// angles make it larger; in the other it is of v.
static void amax_is_of_what_rope_leaves(void **state) {
    static const int sizes[] = {24, 64, 96, 128, 256};
    enum { T = 70 };
    for (int i = 0; i < 5; i++)
        for (int values = 0; values < 2; values++) {
            if (!takes_case(2 * i + values, 3))
                continue;
            const struct attention_shape s = shape_of(2, T, 4, 2, sizes[i]);
            const struct rope_settings settings = rope_unscaled(sizes[i], 100);
            float *table = (float *)test_alloc(T * (size_t)sizes[i] * sizeof *table);
            uint64_t seed = case_seed = 54;
            double *exact, *dexact;
            floatX *qkv = test_floats(&exact, qkv_count(s), values ? 0.01 : 5, &seed),
                   *dout = test_floats(&dexact, out_count(s), 1, &seed);
            rope_table(table, T, &settings);
            const int64_t W = qkv_count(s) / (s.B * T), v = W - (int64_t)s.num_query_groups * s.head_dim;
            FOR_EACH_BACKEND(which, s, 0) {
                const struct result r = run_with(qkv, dout, which, s, dropout_of(0), options_of(table, false));
                uint32_t in_v = 0, elsewhere = 0;
                for (int64_t t = 0; t < s.B * T; t++) {
                    const uint32_t first = amax_after(r.dqkv + t * W, v),
                                   second = amax_after(r.dqkv + t * W + v, W - v);
                    elsewhere = first > elsewhere ? first : elsewhere;
                    in_v = second > in_v ? second : in_v;
                }
                assert_true(values ? in_v > elsewhere : elsewhere > in_v);
                result_free(r, which, s);
            }
            free(qkv);
            free(dout);
            free(exact);
            free(dexact);
            free(table);
        }
}

// ---------------------------------------------------------------------------------------------------------------------
// The choice of a backend

static struct attention_demands demands_of(float dropout) {
    const struct attention_demands demands = {dropout, NULL, false};
    return demands;
}
static void choose(enum attention_backend wanted, const char *flash, const char *unfused,
                   struct attention_choice *choice) {
    if (flash)
        setenv("NVTE_FLASH_ATTN", flash, 1);
    if (unfused)
        setenv("NVTE_UNFUSED_ATTN", unfused, 1);
    *choice = attention_choose(wanted, shape_of(1, 8, 2, 1, 64), demands_of(0), &dev);
    unsetenv("NVTE_FLASH_ATTN");
    unsetenv("NVTE_UNFUSED_ATTN");
}
static void choose_none(void *unused) {
    struct attention_choice c;
    choose(ATTENTION_AUTO, "0", "0", &c);
}
static void choose_contradiction(void *unused) {
    struct attention_choice c;
    choose(ATTENTION_FLASH, "0", NULL, &c);
}
static void choose_bad_switch(void *unused) {
    struct attention_choice c;
    choose(ATTENTION_AUTO, "no", NULL, &c);
}
static void choose_head_dim(void *head_dim) {
    attention_choose(ATTENTION_AUTO, shape_of(1, 8, 2, 1, *(int *)head_dim), demands_of(0), &dev);
}
static void test_choice(void **state) {
    struct attention_choice c;
    choose(ATTENTION_AUTO, "0", "1", &c);
    assert_int_equal(c.backend, ATTENTION_UNFUSED);
    assert_non_null(strstr(c.reason, "NVTE_FLASH_ATTN=0"));
    choose(ATTENTION_UNFUSED, NULL, NULL, &c);
    assert_int_equal(c.backend, ATTENTION_UNFUSED);
    assert_non_null(strstr(c.reason, "--attention-backend"));
    assert_fails(choose_none, NULL, "flash|NVTE_FLASH_ATTN=0|unfused|NVTE_UNFUSED_ATTN=0");
    assert_fails(choose_contradiction, NULL, "NVTE_FLASH_ATTN=0|unfused|--attention-backend flash");
    assert_fails(choose_bad_switch, NULL, "NVTE_FLASH_ATTN=no|expected");
    int head_dim = 12;
    assert_fails(choose_head_dim, &head_dim, "12|multiple of 8|--kv-channels|--hidden-size");
    head_dim = 264;
    assert_fails(choose_head_dim, &head_dim, "264|--kv-channels|--hidden-size");
}
static void test_choice_of_flash(void **state) {
    struct attention_choice c;
    // a head dim that the backend of compute capability 9.0 does not take
    const struct attention_shape s = shape_of(1, 8, 2, 1, 40);
    c = attention_choose(ATTENTION_AUTO, s, demands_of(0), &dev);
    assert_int_equal(c.backend, ATTENTION_FLASH);
    assert_non_null(strstr(c.reason, "flash"));
    assert_non_null(strstr(c.reason, flash_describe(&dev)));
    setenv("NVTE_UNFUSED_ATTN", "0", 1);
    c = attention_choose(ATTENTION_AUTO, s, demands_of(0), &dev);
    unsetenv("NVTE_UNFUSED_ATTN");
    assert_int_equal(c.backend, ATTENTION_FLASH);
#ifdef CUDA_EMULATED
    static const char *const gpus[] = {"8.0", "8.6", "8.9", "9.0", "12.0"}; // slower in fp32: the second, third, last
    for (int i = 0; i < 5; i++) {
        setenv("EMU_CAPABILITY", gpus[i], 1);
        c = attention_choose(ATTENTION_AUTO, s, demands_of(0), &dev);
        assert_int_equal(c.backend, ATTENTION_FLASH);
        assert_int_equal(strstr(c.reason, "unfused, in T x T memory, is predicted to be faster on this GPU") != NULL,
                         TF32 && i != 0 && i != 3);
    }
    setenv("EMU_CAPABILITY", "9.0", 1);
#endif
}
#ifdef TARGET_CUDA
static void test_fused_leaves_to_flash(void **state) {
    skip_without_fused();
    check_in_place(shape_of(2, 1, 2, 1, 64));
    const struct attention_shape windowed = masked(shape_of(1, 128, 2, 1, 64), ONE_DOCUMENT, 33);
    check_in_place(windowed);
    unmask(windowed);
}
// Checks that compute capability 9.0 gets its faster flash backend, unless there is dropout or the head dim is another
// one. The reason says which backend it is, and why not the other.
static void test_choice_of_sm90(void **state) {
    struct attention_choice c;
    skip_without_sm90();
    for (int wanted = ATTENTION_AUTO; wanted <= ATTENTION_FLASH; wanted++) {
        choose((enum attention_backend)wanted, NULL, NULL, &c);
        assert_int_equal(c.backend, ATTENTION_FLASH_SM90);
        assert_non_null(strstr(c.reason, "flash, wgmma bf16"));
        c = attention_choose((enum attention_backend)wanted, shape_of(1, 8, 2, 1, 64), demands_of(0.1f), &dev);
        assert_int_equal(c.backend, ATTENTION_FLASH);
        assert_non_null(strstr(c.reason, "flash, mma.sync bf16"));
        assert_non_null(strstr(c.reason, "wgmma bf16 has no --attention-dropout"));
    }
    c = attention_choose(ATTENTION_AUTO, shape_of(1, 8, 2, 1, 80), demands_of(0), &dev);
    assert_int_equal(c.backend, ATTENTION_FLASH);
    assert_non_null(strstr(c.reason, "wgmma bf16 takes heads of 64, 96, 128 or 256, not 80"));
    choose(ATTENTION_AUTO, "0", NULL, &c);
    assert_int_equal(c.backend, ATTENTION_UNFUSED);
#ifdef CUDA_EMULATED
    setenv("EMU_CAPABILITY", "8.0", 1);
    choose(ATTENTION_AUTO, NULL, NULL, &c);
    setenv("EMU_CAPABILITY", "9.0", 1);
    assert_int_equal(c.backend, ATTENTION_FLASH);
    assert_non_null(strstr(c.reason, "wgmma bf16 needs compute capability 9.0, not 8.0"));
#endif
}
// Chooses a backend for a head dim. Fused is taken where it is asked for, where flash is ruled out and, by auto, where
// our kernels are known to be slower.
static struct attention_choice choose_fused(enum attention_backend wanted, struct attention_demands demands,
                                            int head_dim) {
    attention_close(&dev); // it has cached the GPU's compute capability
    return attention_choose(wanted, shape_of(1, 128, 2, 1, head_dim), demands, &dev);
}
static void choose_fused_alone(void *demands) {
    choose_fused(ATTENTION_FUSED, *(const struct attention_demands *)demands, 64);
}
static void test_choice_of_fused(void **state) {
    struct attention_demands demands = demands_of(0);
    skip_without_fused();
    unsetenv("NVTE_FUSED_ATTN");
    struct attention_choice c = choose_fused(ATTENTION_FUSED, demands, 64);
    assert_int_equal(c.backend, ATTENTION_FUSED);
    assert_non_null(strstr(c.reason, "fused, cuDNN 9."));
    assert_non_null(strstr(c.reason, "asked for by --attention-backend fused"));
    assert_non_null(strstr(c.reason, "plans made in "));
    assert_non_null(strstr(c.reason, "MiB of workspace forward and "));
    assert_non_null(strstr(c.reason, "; here within 0.00"));
    assert_non_null(strstr(c.reason, "recomputation changes no bit"));
    setenv("NVTE_FLASH_ATTN", "0", 1);
    assert_int_equal(choose_fused(ATTENTION_AUTO, demands, 64).backend, ATTENTION_FUSED);
    setenv("NVTE_FUSED_ATTN", "0", 1);
    assert_int_equal(choose_fused(ATTENTION_AUTO, demands, 64).backend, ATTENTION_UNFUSED);
    assert_fails(choose_fused_alone, &demands, "flash: --attention-backend fused|NVTE_FUSED_ATTN=0|unfused");
    unsetenv("NVTE_FLASH_ATTN");
    unsetenv("NVTE_FUSED_ATTN");
    demands.documents = "--perplexity";
    assert_fails(choose_fused_alone, &demands, "fused: hides no documents from each other, as --perplexity asks");
    demands = demands_of(0.1f);
    assert_fails(choose_fused_alone, &demands, "fused: has no --attention-dropout");
#ifdef CUDA_EMULATED
    demands = demands_of(0);
    static const struct {
        const char *capability;
        int head_dim;
        bool any_order;
        enum attention_backend backend;
        const char *version; // cuDNN's
    } cases[] = {{"8.0", 64, false, ATTENTION_FLASH, "91900"},  {"8.9", 80, false, ATTENTION_FLASH, "91900"},
                 {"9.0", 80, false, ATTENTION_FUSED, "91900"},  {"9.0", 64, false, ATTENTION_FLASH_SM90, "91900"},
                 {"10.0", 64, true, ATTENTION_FUSED, "91900"},  {"10.0", 64, false, ATTENTION_FUSED, "91900"},
                 {"10.0", 256, true, ATTENTION_FLASH, "91900"}, {"10.0", 256, false, ATTENTION_FUSED, "92600"},
                 {"12.0", 64, true, ATTENTION_FLASH, "91900"}};
    for (int i = 0; i < 9; i++) {
        if (!takes_case(i, 2))
            continue;
        setenv("EMU_CAPABILITY", cases[i].capability, 1);
        setenv("EMU_CUDNN_VERSION", cases[i].version, 1);
        demands.any_order = cases[i].any_order;
        c = choose_fused(ATTENTION_AUTO, demands, cases[i].head_dim);
        if (c.backend != cases[i].backend)
            fail_msg("compute capability %s, heads of %d: %s", cases[i].capability, cases[i].head_dim, c.reason);
        char why_own[64]; // why our own kernels are taken
        snprintf(why_own, sizeof why_own, "fused: %s",
                 cases[i].head_dim == 256 ? "cuDNN 9.19.0: takes heads of up to 128" : "not taken by auto on ");
        const char *fused = c.backend == ATTENTION_FUSED ? "by published figures faster" : why_own;
        if (!strstr(c.reason, fused))
            fail_msg("compute capability %s: \"%s\" without \"%s\"", cases[i].capability, c.reason, fused);
    }
    unsetenv("EMU_CUDNN_VERSION");
    setenv("EMU_CAPABILITY", "8.9", 1);
    c = choose_fused(ATTENTION_AUTO, demands, 64);
    assert_non_null(strstr(c.reason, "not taken by auto on 8.9: --attention-backend fused tries it"));
    c = choose_fused(ATTENTION_FLASH, demands, 64);
    assert_null(strstr(c.reason, "fused"));
    setenv("NVTE_FUSED_ATTN", "0", 1);
    c = choose_fused(ATTENTION_AUTO, demands, 64);
    unsetenv("NVTE_FUSED_ATTN");
    assert_non_null(strstr(c.reason, "fused: switched off by NVTE_FUSED_ATTN=0 in the environment"));
    demands.any_order = false;
    setenv("EMU_CAPABILITY", "9.0", 1);
    static const char *const refused[][2] = {
        {"create", "can't be opened: CUDNN_STATUS_NOT_INITIALIZED: EMU_CUDNN_REFUSE=create"},
        {"graph", "refuses forward"},
        {"plan", "refuses forward"}};
    for (int i = 0; i < 3; i++) {
        setenv("EMU_CUDNN_REFUSE", refused[i][0], 1);
        assert_fails(choose_fused_alone, &demands, refused[i][1]);
    }
    unsetenv("EMU_CUDNN_REFUSE");
    static const char *const faults[][2] = {{"forward", "its output is wrong on this GPU"},
                                            {"backward", "its dV is wrong on this GPU"},
                                            {"nan", "its dQ is wrong on this GPU"},
                                            {"bits", "its forward pass, computed again on this GPU, gives other bits"},
                                            {"order", "its deterministic backward pass, computed again"}};
    for (int i = 0; i < 5; i++) {
        if (!takes_case(i, 2))
            continue;
        char reason[320];
        setenv("EMU_CUDNN_FAULT", faults[i][0], 1);
        attention_close(&dev);
        attention_fused_reason(reason, sizeof reason, ATTENTION_FUSED, shape_of(1, 128, 2, 1, 64), demands, &dev);
        if (!strstr(reason, faults[i][1]))
            fail_msg("EMU_CUDNN_FAULT=%s: \"%s\"", faults[i][0], reason);
        c = choose_fused(ATTENTION_AUTO, demands, 80);
        assert_int_equal(c.backend, ATTENTION_FLASH);
        assert_non_null(strstr(c.reason, faults[i][1]));
    }
    demands.any_order = true; // then the last fault is none
    assert_int_equal(choose_fused(ATTENTION_AUTO, demands, 80).backend, ATTENTION_FUSED);
    unsetenv("EMU_CUDNN_FAULT");
    setenv("EMU_CUDNN_VERSION", "91001", 1);
    assert_fails(choose_fused_alone, &demands, "9.10.0 and 9.10.1 have known bugs");
    unsetenv("EMU_CUDNN_VERSION");
    attention_close(&dev);
#endif
    setenv("NVTE_FUSED_ATTN", "0", 1); // as main sets it
}
// Asks for flash where it can't take the shape. Auto falls back on unfused there, and says why; asking for flash is an
// error that has every reason.
static void choose_many_sequences(void *unused) {
    attention_choose(ATTENTION_FLASH, shape_of(65536, 8, 2, 1, 64), demands_of(0), &dev);
}
static void test_choice_without_flash(void **state) {
    const struct attention_choice c =
        attention_choose(ATTENTION_AUTO, shape_of(65536, 8, 2, 1, 64), demands_of(0), &dev);
    assert_int_equal(c.backend, ATTENTION_UNFUSED);
    assert_non_null(strstr(c.reason, "65535 sequences"));
    assert_fails(choose_many_sequences, NULL, "65535 sequences|--micro-batch-size|unfused: --attention-backend flash");
}
#endif

int main(void) {
    test_keep_memory();
    setenv("NVTE_FUSED_ATTN", "0", 1); // for the choice between our own backends
#ifdef CUDA_EMULATED
    setenv("EMU_CAPABILITY", "9.0", 1);
    setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
#endif
    device_open(&dev, 0, false);
    const struct CMUnitTest tests[] = {
#ifdef TARGET_CUDA
        cmocka_unit_test(test_choice_without_flash),
        cmocka_unit_test(test_choice_of_sm90),
        cmocka_unit_test(test_sm90),
        cmocka_unit_test(test_sm90_agrees),
#ifdef PRECISION_BF16
        cmocka_unit_test(test_forward_schedule),
        cmocka_unit_test(quotients_are_divisions),
        cmocka_unit_test(test_backward_sections),
        cmocka_unit_test(test_backward_order),
#endif
        cmocka_unit_test(test_sm90_any_order),
        cmocka_unit_test(test_sm90_full),
        cmocka_unit_test(test_fused),
#if defined(CUDA_EMULATED) && defined(PRECISION_BF16)
        cmocka_unit_test(test_fused_wide_heads),
        cmocka_unit_test(test_fused_in_turn),
        cmocka_unit_test(test_fused_operation),
        cmocka_unit_test(test_choice_of_operation),
#endif
        cmocka_unit_test(test_fused_low_scores),
#ifdef PRECISION_BF16
        cmocka_unit_test(test_fused_refuses),
#endif
        cmocka_unit_test(test_fused_leaves_to_flash),
        cmocka_unit_test(test_choice_of_fused),
        cmocka_unit_test(test_full_elsewhere),
#else
        cmocka_unit_test(test_exp2),
        cmocka_unit_test(test_tanh),
        cmocka_unit_test(test_bf16_rows),
#endif
        cmocka_unit_test(test_finite_differences),
        cmocka_unit_test(test_against_naive),
        cmocka_unit_test(test_segments),
        cmocka_unit_test(test_large_scores),
        cmocka_unit_test(test_low_scores),
        cmocka_unit_test(test_rotary),
        cmocka_unit_test(test_dropout),
        cmocka_unit_test(test_dropout_step),
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_nan),
        cmocka_unit_test(test_without_lse),
        cmocka_unit_test(tf32_errs_like_fp32),
        cmocka_unit_test(tf32_carries_infinities),
        cmocka_unit_test(tf32_takes_wide_values),
        cmocka_unit_test(amax_keeps_what_is_larger),
        cmocka_unit_test(amax_leaves_out_rows_past_T),
        cmocka_unit_test(amax_sees_every_element),
        cmocka_unit_test(amax_carries_overflow),
        cmocka_unit_test(amax_is_of_what_rope_leaves),
        cmocka_unit_test(spans_are_what_a_query_sees),
        MASK_TESTS(flash),
        MASK_TESTS(unfused),
#ifdef TARGET_CUDA
        MASK_TESTS(sm90),
        cmocka_unit_test(sm90_visits_whole_tiles),
#endif
        cmocka_unit_test(test_choice),
        cmocka_unit_test(test_choice_of_flash),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
