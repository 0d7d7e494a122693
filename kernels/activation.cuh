// The MLP's activations. Pointwise: GELU (Hendrycks and Gimpel 2016) in its tanh form (GPT-2's "gelu_new") and as it
// was defined, by the error function; squared ReLU (So et al. 2021, arXiv 2109.08668). Gated: SwiGLU and GeGLU (Shazeer
// 2020, arXiv 2002.05202), with GELU in its tanh form.
//
// A pointwise one is a function NAME and its derivative NAME_derivative: of a float for the cuda target, and by the
// names vecs_NAME and vecs_NAME_derivative of FLOATX_VECS vectors for the cpu. POINTWISE_ACTIVATION(NAME) makes of them
//
//   NAME_forward(out, in, n, amax, dev)                               out = NAME(in)
//   NAME_backward(din, bias_partial, dout, in, N, F, amax, dev)       din = dout * NAME_derivative(in); din may be dout
//
// A gated one is a function f(x) = x s(x), of which NAME_gradient (of a float) and vecs_NAME_gradient give s and f'.
// GATED_ACTIVATION(NAME, f) makes of them
//
//   NAME_forward    out = f(gate) * up
//   NAME_backward   dgate = dout * up * f'(gate), dup = dout * f(gate)
//
// All take a parameter `amax`, of what they write, as kernels/amax.cuh says; NULL: not taken. Backward takes
// `bias_partial`, (activation_bias_chunks(N), width): the sums of din's columns as stored, over runs of rows, which
// column_sums adds up to the gradient of the bias before the activation; NULL: not made.
//
// Tanh GELU and SiLU are x times a logistic function: 0.5 (1 + tanh(u)) = sigma(2u), which needs one exponential and,
// unlike 1 + tanh, loses nothing to cancellation where x is negative.
//
// In bf16 the cuda target takes the exponential and the division from the units for them: sigma(y) = 1 / (1 + 2^t),
// t = -y / ln 2. Each of t's roundings, at most four with those of constants, changes 2^t by |t| ln 2 2^-24 at most,
// relatively; ex2.approx errs by 2 units in the last place, 2^-22, rcp.approx by one, the sum by half of one. Where
// sigma is not nearly 1, |t| < 40, that is 4 * 28 * 2^-24 + 2^-22 + 2^-23 + 2^-24 = 119 * 2^-24 = 7.1e-6 of sigma, a
// 275th of bf16's rounding. Farther left sigma < 2^-40. fp32 takes a polynomial and a division, with their branches: 45
// instructions an element forward are fewer than its bytes leave room for.
//
// GELU by the error function has Phi(-z) = e^(-z^2 / 2) t P(t) there, t = 1 / (1 + 0.38 z), as in Abramowitz and Stegun
// 7.1.26, P of degree 4: minimax in the relative error, by Lawson's iteration; 3.6e-5 for z <= 13.3, behind which the
// exponential underflows. Its exponent's two roundings add 125 ln 2 2^-23 = 1.1e-5 there, all else less than 1e-6: 5e-5
// in all, a 39th of bf16's rounding.
#pragma once
#include "kernels/amax.cuh"           // amax_with_packed, amax_merge_block, amax_take
#include "kernels/column_sums.cuh"    // column_sums_of_warps
#include "kernels/device.cuh"         // floatX
#include "kernels/packed.cuh"         // packed_load_some, packed_store_some
#include "kernels/packed_floats.cuh"  // packed_to_floats, packed_from_floats
#include "kernels/ptx.cuh"            // exp2_approx, reciprocal_approx
#include "kernels/vector_math.cuh"    // vector_expf
#include "kernels/vectors_floatx.cuh" // vecs_exp, floatx_load, floatx_pad

typedef void pointwise_forward(floatX *out, const floatX *in, int64_t n, uint32_t *amax, struct device *dev);
typedef void pointwise_backward(floatX *din, float *bias_partial, const floatX *dout, const floatX *in, int64_t N,
                                int F, uint32_t *amax, struct device *dev);
// A gated activation's arrays: gate_up (N, 2F) has the gate's row, then the up projection's; out and dout are (N, F).
// dgate_up may be gate_up.
typedef void gated_forward(floatX *out, const floatX *gate_up, int64_t N, int F, uint32_t *amax, struct device *dev);
typedef void gated_backward(floatX *dgate_up, float *bias_partial, const floatX *dout, const floatX *gate_up, int64_t N,
                            int F, uint32_t *amax, struct device *dev);
static gated_forward swiglu_forward, geglu_forward;
static gated_backward swiglu_backward, geglu_backward;

// Rows whose sums are one chunk of bias_partial: 2 % of what backward moves, and three waves of blocks on an H200 at
// 16,384 rows of 3072.
enum { ACTIVATION_BIAS_ROWS = 64 };
static inline int64_t activation_bias_chunks(int64_t N) {
    return (N + ACTIVATION_BIAS_ROWS - 1) / ACTIVATION_BIAS_ROWS;
}
// bias_partial, or nothing where that is NULL, of a din (N, width) that lies there already: backward's, bit by bit.
static inline void activation_bias_sums(float *bias_partial, const floatX *din, int64_t N, int width,
                                        struct device *dev);

#ifdef TARGET_CUDA

// 1 / (1 + e^-x)
DEVICE_FUNCTION float logistic(float x) {
    if (sizeof(floatX) == 2)
        return reciprocal_approx(1.0f + exp2_approx(-LOG2E * x));
    return 1.0f / (1.0f + vector_expf(-x));
}

// Of f(x) = x s(x).
struct gate_gradient {
    float s, derivative; // s(x), f'(x)
};

// silu(x) = x sigma(x); silu'(x) = s + x s (1 - s). Where x > 64, s (1 - s) < 2^-92; of an s that the reciprocal has a
// unit in the last place beside 1 it would be 2^-23, times any x.
DEVICE_FUNCTION float silu(float x) { return sizeof(floatX) == 2 ? x * logistic(x) : x / (1.0f + vector_expf(-x)); }
DEVICE_FUNCTION struct gate_gradient silu_gradient(float x) {
    const float s = logistic(x), product = fminf(x, 64.0f) * s;
    const struct gate_gradient result = {s, s + fmaf(-product, s, product)};
    return result;
}

// sigma(2u), u = sqrt(2 / pi) (x + 0.044715 x^3), of x and its square
DEVICE_FUNCTION float gelu_logistic(float x, float square) {
    if (sizeof(floatX) == 2) // 2u and -log2(e) in one: -1.5957691216 log2(e), and that times 0.044715
        return reciprocal_approx(1.0f + exp2_approx(x * fmaf(-0.1029432397f, square, -2.3022081987f)));
    return logistic(1.5957691216f * x * (1.0f + 0.044715f * square));
}
// gelu(x) = 0.5 x (1 + tanh(u)) = x sigma(2u)
DEVICE_FUNCTION float gelu(float x) { return x * gelu_logistic(x, x * x); }
// gelu'(x) = s + x s (1 - s) 2u', s = sigma(2u). Where x > 8, s (1 - s) < 2^-70, and as for silu' a larger x does not
// count; where x^2 > 2^20, s is 0: times an infinite u' it would be NaN.
DEVICE_FUNCTION struct gate_gradient gelu_gradient(float x) {
    const float least = fminf(x, 8.0f), square = fminf(least * least, 0x1p20f);
    const float s = gelu_logistic(x, square), product = least * s;
    const float slope = fmaf(1.5957691216f * 0.134145f, square, 1.5957691216f); // 2u'
    const struct gate_gradient result = {s, fmaf(fmaf(-product, s, product), slope, s)};
    return result;
}
DEVICE_FUNCTION float gelu_derivative(float x) { return gelu_gradient(x).derivative; }

// gelu_erf(x) = x Phi(x), Phi(x) = 0.5 (1 + erf(x / sqrt(2))) = 0.5 erfc(-x / sqrt(2)), the distribution function of
// the standard normal distribution; erfc loses nothing to cancellation where x is negative.
// In bf16 x Phi(x) = max(x, 0) - z Phi(-z), z = |x|, which has no subtraction where x is negative.
struct normal_tail {
    float z, below, e; // |x|, but no more than 16; Phi(-z); e^(-z^2 / 2)
};
DEVICE_FUNCTION struct normal_tail normal_tail_of(float x) {
    struct normal_tail tail;
    tail.z = fabsf(x) > 16 ? 16 : fabsf(x); // NaN stays NaN
    tail.e = exp2_approx(-0.5f * LOG2E * tail.z * tail.z);
    const float t = reciprocal_approx(fmaf(0.38f, tail.z, 1.0f));
    float p = fmaf(-0.08992806f, t, 0.18887582f);
    p = fmaf(p, t, 0.09198026f);
    p = fmaf(p, t, 0.15782931f);
    p = fmaf(p, t, 0.15122515f);
    tail.below = p * t * tail.e;
    return tail;
}
DEVICE_FUNCTION float gelu_erf(float x) {
    if (sizeof(floatX) != 2)
        return 0.5f * x * erfcf(-0.7071067812f * x);
    const struct normal_tail tail = normal_tail_of(x);
    return fmaf(-tail.z, tail.below, fmaxf(x, 0.0f));
}
// gelu_erf'(x) = Phi(x) + x phi(x), phi(x) = e^(-x^2 / 2) / sqrt(2 pi): in bf16 d = Phi(-z) - z phi(z) where x is
// negative, else 1 - d
DEVICE_FUNCTION float gelu_erf_derivative(float x) {
    if (sizeof(floatX) == 2) {
        const struct normal_tail tail = normal_tail_of(x);
        const float d = fmaf(-0.3989422804f * tail.z, tail.e, tail.below);
        return x < 0 ? d : 1.0f - d;
    }
    return 0.5f * erfcf(-0.7071067812f * x) + 0.3989422804f * x * vector_expf(-0.5f * x * x);
}

// squared_relu(x) = max(x, 0)^2; NaN stays NaN
DEVICE_FUNCTION float squared_relu(float x) { return x < 0 ? 0.0f : x * x; }
DEVICE_FUNCTION float squared_relu_derivative(float x) { return x < 0 ? 0.0f : 2.0f * x; }

// Every kernel here moves 4 to 10 bytes of bf16 an element and is to be bound by memory: scripts/count_sass.py holds
// their instructions an element. A thread takes one 16-byte access; WHOLE: every row begins and ends with one.
enum { ACTIVATION_THREADS = 256 };
DEVICE_FUNCTION int64_t activation_first(void) { return ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * PACK; }
template <bool WHOLE> DEVICE_FUNCTION struct packed_floats activation_load(const floatX *from, int64_t count) {
    return packed_to_floats(WHOLE ? packed_load(from) : packed_load_some(from, count));
}
template <bool WHOLE> DEVICE_FUNCTION void activation_store(floatX *to, const struct packed &value, int64_t count) {
    if (WHOLE)
        packed_store(to, value);
    else
        packed_store_some(to, value, count);
}
static inline bool activation_whole(int64_t width, const void *a, const void *b, const void *c) {
    return width % PACK == 0 && packed_aligned(a) && packed_aligned(b) && packed_aligned(c);
}

#define ACTIVATION_LAUNCH(kernel, whole, grid, ...)                                                                    \
    LAUNCH(dev,                                                                                                        \
           (amax != NULL ? (whole) ? kernel<true, true> : kernel<true, false>                                          \
            : (whole) ? kernel<false, true>                                                                            \
                         : kernel<false, false>),                                                                         \
           grid, ACTIVATION_THREADS, amax != NULL ? AMAX_BLOCK_BYTES : 0, __VA_ARGS__, amax)

// Backward with sums of columns: a block takes ACTIVATION_BIAS_ROWS rows of 32 packs of columns, a warp every eighth
// row.
enum { ACTIVATION_WARPS = ACTIVATION_THREADS / 32, ACTIVATION_STRIP = 32 * PACK };
// Five blocks a multiprocessor, each thread with two loads in flight, have 5 MB in flight on an H200. Left to itself
// ptxas takes six, and registers for one load at a time.
#define ACTIVATION_BIAS_BOUNDS __launch_bounds__(ACTIVATION_THREADS, sizeof(floatX) == 2 ? 5 : 4)
static inline dim3 activation_bias_grid(int64_t N, int F) {
    return dim3((unsigned)activation_bias_chunks(N), blocks_for(F, ACTIVATION_STRIP));
}
static inline size_t activation_bias_shared_bytes(void) {
    return COLUMN_SUMS_OF_WARPS_BYTES(ACTIVATION_WARPS) + AMAX_BLOCK_BYTES;
}
DEVICE_FUNCTION int64_t activation_bias_end(int64_t N) { // of the block's rows
    const int64_t end = (int64_t)(blockIdx.x + 1) * ACTIVATION_BIAS_ROWS;
    return end < N ? end : N;
}
template <bool WHOLE>
static __global__ void activation_bias_sums_kernel(float *partial, const floatX *din, int64_t N, int F) {
    const int64_t end = activation_bias_end(N);
    const int strip = (int)blockIdx.y * ACTIVATION_STRIP, f = strip + (int)threadIdx.x % 32 * PACK;
    struct packed_floats sums = {};
#pragma unroll 4 // loads in flight
    for (int64_t n = (int64_t)blockIdx.x * ACTIVATION_BIAS_ROWS + threadIdx.x / 32; n < end && f < F;
         n += ACTIVATION_WARPS)
        column_sums_take(&sums, WHOLE ? packed_load(din + n * F + f) : packed_load_some(din + n * F + f, F - f));
    column_sums_of_warps(partial + blockIdx.x * (int64_t)F + strip, sums, F - strip);
}
static inline void activation_bias_sums(float *partial, const floatX *din, int64_t N, int F, struct device *dev) {
    if (partial == NULL)
        return;
    const bool whole = activation_whole(F, din, NULL, NULL);
    LAUNCH(dev, (whole ? activation_bias_sums_kernel<true> : activation_bias_sums_kernel<false>),
           activation_bias_grid(N, F), ACTIVATION_THREADS, activation_bias_shared_bytes(), partial, din, N, F);
}

#define POINTWISE_ACTIVATION(name)                                                                                     \
    template <bool AMAX, bool WHOLE>                                                                                   \
    static __global__ void name##_forward_kernel(floatX *out, const floatX *in, int64_t n, uint32_t *amax) {           \
        const int64_t at = activation_first();                                                                         \
        struct packed y = {};                                                                                          \
        if (at < n) {                                                                                                  \
            struct packed_floats x = activation_load<WHOLE>(in + at, n - at);                                          \
            for (int i = 0; i < PACK; i++)                                                                             \
                x.x[i] = name(x.x[i]);                                                                                 \
            y = packed_from_floats(x);                                                                                 \
            activation_store<WHOLE>(out + at, y, n - at);                                                              \
        }                                                                                                              \
        if (AMAX)                                                                                                      \
            amax_merge_block(amax, amax_with_packed(0, y), shared_memory());                                           \
    }                                                                                                                  \
    static void name##_forward(floatX *out, const floatX *in, int64_t n, uint32_t *amax, struct device *dev) {         \
        ACTIVATION_LAUNCH(name##_forward_kernel, activation_whole(n, out, in, NULL),                                   \
                          blocks_for(n, ACTIVATION_THREADS *PACK), out, in, n);                                        \
    }                                                                                                                  \
    template <bool WHOLE>                                                                                              \
    DEVICE_FUNCTION struct packed name##_backward_pack(floatX *din, const floatX *dout, const floatX *in,              \
                                                       int64_t count) {                                                \
        const struct packed_floats x = activation_load<WHOLE>(in, count);                                              \
        struct packed_floats d = activation_load<WHOLE>(dout, count);                                                  \
        for (int i = 0; i < PACK; i++)                                                                                 \
            d.x[i] *= name##_derivative(x.x[i]);                                                                       \
        const struct packed y = packed_from_floats(d);                                                                 \
        activation_store<WHOLE>(din, y, count);                                                                        \
        return y;                                                                                                      \
    }                                                                                                                  \
    template <bool AMAX, bool WHOLE>                                                                                   \
    static __global__ void name##_backward_kernel(floatX *din, const floatX *dout, const floatX *in, int64_t n,        \
                                                  uint32_t *amax) {                                                    \
        const int64_t at = activation_first();                                                                         \
        struct packed y = {};                                                                                          \
        if (at < n)                                                                                                    \
            y = name##_backward_pack<WHOLE>(din + at, dout + at, in + at, n - at);                                     \
        if (AMAX)                                                                                                      \
            amax_merge_block(amax, amax_with_packed(0, y), shared_memory());                                           \
    }                                                                                                                  \
    template <bool AMAX, bool WHOLE>                                                                                   \
    static __global__ void ACTIVATION_BIAS_BOUNDS name##_backward_sums_kernel(                                         \
        floatX *din, float *partial, const floatX *dout, const floatX *in, int64_t N, int F, uint32_t *amax) {         \
        const int64_t end = activation_bias_end(N);                                                                    \
        const int strip = (int)blockIdx.y * ACTIVATION_STRIP, f = strip + (int)threadIdx.x % 32 * PACK;                \
        struct packed_floats sums = {};                                                                                \
        uint32_t largest = 0;                                                                                          \
        for (int64_t n = (int64_t)blockIdx.x * ACTIVATION_BIAS_ROWS + threadIdx.x / 32; n < end && f < F;              \
             n += ACTIVATION_WARPS) {                                                                                  \
            const struct packed y =                                                                                    \
                name##_backward_pack<WHOLE>(din + n * F + f, dout + n * F + f, in + n * F + f, F - f);                 \
            column_sums_take(&sums, y);                                                                                \
            if (AMAX)                                                                                                  \
                largest = amax_with_packed(largest, y, F - f);                                                         \
        }                                                                                                              \
        column_sums_of_warps(partial + blockIdx.x * (int64_t)F + strip, sums, F - strip);                              \
        if (AMAX)                                                                                                      \
            amax_merge_block(amax, largest, shared_memory() + COLUMN_SUMS_OF_WARPS_BYTES(ACTIVATION_WARPS));           \
    }                                                                                                                  \
    static void name##_backward(floatX *din, float *bias_partial, const floatX *dout, const floatX *in, int64_t N,     \
                                int F, uint32_t *amax, struct device *dev) {                                           \
        if (bias_partial == NULL)                                                                                      \
            ACTIVATION_LAUNCH(name##_backward_kernel, activation_whole(N *F, din, dout, in),                           \
                              blocks_for(N *F, ACTIVATION_THREADS *PACK), din, dout, in, N *F);                        \
        else                                                                                                           \
            ACTIVATION_BIAS_LAUNCH(name##_backward_sums_kernel, activation_whole(F, din, dout, in), din, bias_partial, \
                                   dout, in, N, F);                                                                    \
    }
#define ACTIVATION_BIAS_LAUNCH(kernel, whole, ...)                                                                     \
    LAUNCH(dev,                                                                                                        \
           (amax != NULL ? (whole) ? kernel<true, true> : kernel<true, false>                                          \
            : (whole) ? kernel<false, true>                                                                            \
                         : kernel<false, false>),                                                                         \
           activation_bias_grid(N, F), ACTIVATION_THREADS, activation_bias_shared_bytes(), __VA_ARGS__, amax)

// A row takes grid.x blocks; the grid's second and third dimensions are the rows.
DEVICE_FUNCTION int64_t activation_row_number(void) { return (int64_t)blockIdx.z * gridDim.y + blockIdx.y; }

static inline dim3 activation_grid(int64_t N, int F) {
    const unsigned rows = 32768; // the grid's second dimension ends at 65535
    return dim3(blocks_for(F, ACTIVATION_THREADS * PACK), N < rows ? (unsigned)N : rows, blocks_for(N, rows));
}
struct packed_gate_up {
    struct packed gate, up;
};
#define GATED_ACTIVATION(name, function)                                                                               \
    template <bool AMAX, bool WHOLE>                                                                                   \
    static __global__ void name##_forward_kernel(floatX *out, const floatX *gate_up, int64_t N, int F,                 \
                                                 uint32_t *amax) {                                                     \
        const int64_t f = activation_first(), n = activation_row_number();                                             \
        struct packed y = {};                                                                                          \
        if (f < F && n < N) {                                                                                          \
            struct packed_floats gate = activation_load<WHOLE>(gate_up + n * 2 * F + f, F - f);                        \
            const struct packed_floats up = activation_load<WHOLE>(gate_up + n * 2 * F + F + f, F - f);                \
            for (int i = 0; i < PACK; i++)                                                                             \
                gate.x[i] = function(gate.x[i]) * up.x[i];                                                             \
            y = packed_from_floats(gate);                                                                              \
            activation_store<WHOLE>(out + n * F + f, y, F - f);                                                        \
        }                                                                                                              \
        if (AMAX)                                                                                                      \
            amax_merge_block(amax, amax_with_packed(0, y), shared_memory());                                           \
    }                                                                                                                  \
    static void name##_forward(floatX *out, const floatX *gate_up, int64_t N, int F, uint32_t *amax,                   \
                               struct device *dev) {                                                                   \
        ACTIVATION_LAUNCH(name##_forward_kernel, activation_whole(F, out, gate_up, NULL), activation_grid(N, F), out,  \
                          gate_up, N, F);                                                                              \
    }                                                                                                                  \
    /* of row n, columns from f on */                                                                                  \
    template <bool WHOLE>                                                                                              \
    DEVICE_FUNCTION struct packed_gate_up name##_backward_pack(floatX *dgate_up, const floatX *dout,                   \
                                                               const floatX *gate_up, int64_t n, int64_t f, int F) {   \
        const int64_t at = n * 2 * F + f;                                                                              \
        struct packed_floats gate = activation_load<WHOLE>(gate_up + at, F - f);                                       \
        struct packed_floats up = activation_load<WHOLE>(gate_up + at + F, F - f);                                     \
        const struct packed_floats d = activation_load<WHOLE>(dout + n * F + f, F - f);                                \
        for (int i = 0; i < PACK; i++) {                                                                               \
            const struct gate_gradient of_gate = function##_gradient(gate.x[i]);                                       \
            const float product = d.x[i] * gate.x[i] * of_gate.s;                                                      \
            gate.x[i] = d.x[i] * up.x[i] * of_gate.derivative;                                                         \
            up.x[i] = product;                                                                                         \
        }                                                                                                              \
        const struct packed_gate_up y = {packed_from_floats(gate), packed_from_floats(up)};                            \
        activation_store<WHOLE>(dgate_up + at, y.gate, F - f);                                                         \
        activation_store<WHOLE>(dgate_up + at + F, y.up, F - f);                                                       \
        return y;                                                                                                      \
    }                                                                                                                  \
    template <bool AMAX, bool WHOLE>                                                                                   \
    static __global__ void name##_backward_kernel(floatX *dgate_up, const floatX *dout, const floatX *gate_up,         \
                                                  int64_t N, int F, uint32_t *amax) {                                  \
        const int64_t f = activation_first(), n = activation_row_number();                                             \
        struct packed_gate_up y = {};                                                                                  \
        if (f < F && n < N)                                                                                            \
            y = name##_backward_pack<WHOLE>(dgate_up, dout, gate_up, n, f, F);                                         \
        if (AMAX)                                                                                                      \
            amax_merge_block(amax, amax_with_packed(amax_with_packed(0, y.gate), y.up), shared_memory());              \
    }                                                                                                                  \
    template <bool AMAX, bool WHOLE>                                                                                   \
    static __global__ void name##_backward_sums_kernel(floatX *dgate_up, float *partial, const floatX *dout,           \
                                                       const floatX *gate_up, int64_t N, int F, uint32_t *amax) {      \
        const int64_t end = activation_bias_end(N);                                                                    \
        const int strip = (int)blockIdx.y * ACTIVATION_STRIP, f = strip + (int)threadIdx.x % 32 * PACK;                \
        struct packed_floats gate_sums = {}, up_sums = {};                                                             \
        uint32_t largest = 0;                                                                                          \
        for (int64_t n = (int64_t)blockIdx.x * ACTIVATION_BIAS_ROWS + threadIdx.x / 32; n < end && f < F;              \
             n += ACTIVATION_WARPS) {                                                                                  \
            const struct packed_gate_up y = name##_backward_pack<WHOLE>(dgate_up, dout, gate_up, n, f, F);             \
            column_sums_take(&gate_sums, y.gate);                                                                      \
            column_sums_take(&up_sums, y.up);                                                                          \
            if (AMAX)                                                                                                  \
                largest = amax_with_packed(amax_with_packed(largest, y.gate, F - f), y.up, F - f);                     \
        }                                                                                                              \
        partial += blockIdx.x * 2 * (int64_t)F + strip;                                                                \
        column_sums_of_warps(partial, gate_sums, F - strip);                                                           \
        __syncthreads();                                                                                               \
        column_sums_of_warps(partial + F, up_sums, F - strip);                                                         \
        if (AMAX)                                                                                                      \
            amax_merge_block(amax, largest, shared_memory() + COLUMN_SUMS_OF_WARPS_BYTES(ACTIVATION_WARPS));           \
    }                                                                                                                  \
    static void name##_backward(floatX *dgate_up, float *bias_partial, const floatX *dout, const floatX *gate_up,      \
                                int64_t N, int F, uint32_t *amax, struct device *dev) {                                \
        if (bias_partial == NULL)                                                                                      \
            ACTIVATION_LAUNCH(name##_backward_kernel, activation_whole(F, dgate_up, dout, gate_up),                    \
                              activation_grid(N, F), dgate_up, dout, gate_up, N, F);                                   \
        else                                                                                                           \
            ACTIVATION_BIAS_LAUNCH(name##_backward_sums_kernel, activation_whole(F, dgate_up, dout, gate_up),          \
                                   dgate_up, bias_partial, dout, gate_up, N, F);                                       \
    }

#else

// A loop of its own, since on the CPU products sum the bias gradient while they pack it, and nothing asks for it here.
static inline void activation_bias_sums(float *partial, const floatX *din, int64_t N, int width, struct device *dev) {
    if (partial == NULL)
        return;
#pragma omp parallel for schedule(static)
    for (int64_t chunk = 0; chunk < activation_bias_chunks(N); chunk++) {
        const int64_t end = (chunk + 1) * ACTIVATION_BIAS_ROWS < N ? (chunk + 1) * ACTIVATION_BIAS_ROWS : N;
        float *sums = partial + chunk * width;
        memset(sums, 0, (size_t)width * sizeof *sums);
        for (int64_t n = chunk * ACTIVATION_BIAS_ROWS; n < end; n++)
#pragma omp simd
            for (int c = 0; c < width; c++)
                sums[c] += to_float(din[n * width + c]);
    }
}

// Elements that a thread takes at a time.
enum { ACTIVATION_BLOCK = 16 * FLOATX_GROUP };

// The functions above, of vectors: x[i] <- NAME(x[i]).
//
// On two cores of a Zen 4 GELU's multiplications take 13 cycles for 16 elements of bf16, the memory 11: a further
// operation would show in the time.
ALWAYS_INLINE void vecs_gelu(vec x[FLOATX_VECS]) {
    vec e[FLOATX_VECS];
    EACH_VEC e[i] = -1.5957691216f * x[i] * (1.0f + 0.044715f * x[i] * x[i]);
    vecs_exp(e);
    EACH_VEC x[i] = vec_divide(x[i], 1.0f + e[i]);
}
ALWAYS_INLINE void vecs_gelu_gradient(vec s[FLOATX_VECS], vec derivative[FLOATX_VECS], const vec x[FLOATX_VECS]) {
    EACH_VEC s[i] = 1.5957691216f * x[i] * (1.0f + 0.044715f * (x[i] * x[i]));
    vecs_logistic(s);
    EACH_VEC derivative[i] = s[i] + x[i] * s[i] * (1.0f - s[i]) * 1.5957691216f * (1.0f + 0.134145f * (x[i] * x[i]));
}
ALWAYS_INLINE void vecs_gelu_derivative(vec x[FLOATX_VECS]) {
    vec s[FLOATX_VECS];
    vecs_gelu_gradient(s, x, x);
}
ALWAYS_INLINE void vecs_silu(vec x[FLOATX_VECS]) {
    vec e[FLOATX_VECS];
    EACH_VEC e[i] = -x[i];
    vecs_exp(e);
    EACH_VEC x[i] = vec_divide(x[i], 1.0f + e[i]);
}
ALWAYS_INLINE void vecs_silu_gradient(vec s[FLOATX_VECS], vec derivative[FLOATX_VECS], const vec x[FLOATX_VECS]) {
    EACH_VEC s[i] = x[i];
    vecs_logistic(s);
    EACH_VEC derivative[i] = s[i] + x[i] * s[i] * (1.0f - s[i]);
}

// |x|, but no more than 20, from where on e^(-x^2 / 2) is 0: an infinity times it would be NaN.
ALWAYS_INLINE vec vec_magnitude(vec x) { return vec_min(vec_set(20.0f), (vec)((vec_words)x & 0x7fffffffu)); }

// below[i] = Phi(-|x[i]|), e[i] = e^(-x[i]^2 / 2). With t = 1 / (1 + a |x|) the quotient of the two is t P(t), as in
// Abramowitz and Stegun 7.1.26, and P a polynomial: minimax in the relative error for |x| <= 13.3, where e underflows,
// by Lawson's iteration; that error is 2.5e-8, in bf16 7.3e-6.
ALWAYS_INLINE void vecs_normal_tail(vec below[FLOATX_VECS], vec e[FLOATX_VECS], const vec x[FLOATX_VECS]) {
#ifdef PRECISION_BF16
    enum { TERMS = 6 };
    static const float a = 0.3f, coefficients[TERMS] = {-0x1.3e27e0p-4f, 0x1.be0062p-3f, -0x1.363c6ap-6f,
                                                        0x1.2982d6p-3f,  0x1.d0c696p-4f, 0x1.ebedc4p-4f};
#else
    enum { TERMS = 9 };
    static const float a = 0.34f, coefficients[TERMS] = {-0x1.b1b704p-6f, 0x1.21133ap-3f,  -0x1.1b0c3ep-2f,
                                                         0x1.a56e9ap-3f,  -0x1.81b75cp-5f, 0x1.dc6c36p-4f,
                                                         0x1.d6e838p-4f,  0x1.16d1d0p-3f,  0x1.15bf56p-3f};
#endif
    vec t[FLOATX_VECS];
    EACH_VEC t[i] = vec_magnitude(x[i]);
    EACH_VEC e[i] = -0.5f * t[i] * t[i];
    vecs_exp(e);
    EACH_VEC t[i] = vec_divide(vec_set(1.0f), 1.0f + a * t[i]);
    EACH_VEC below[i] = t[i] * coefficients[0] + coefficients[1];
#pragma GCC unroll 9
    for (int k = 2; k < TERMS; k++)
        EACH_VEC below[i] = below[i] * t[i] + coefficients[k];
    EACH_VEC below[i] = below[i] * t[i] * e[i];
}
// x Phi(x) = max(x, 0) - |x| Phi(-|x|), which has no subtraction where x is negative
ALWAYS_INLINE void vecs_gelu_erf(vec x[FLOATX_VECS]) {
    vec below[FLOATX_VECS], e[FLOATX_VECS];
    vecs_normal_tail(below, e, x);
    EACH_VEC below[i] *= vec_magnitude(x[i]);
    EACH_VEC x[i] = vec_max(vec_set(0.0f), x[i]) - below[i];
}
// Phi(x) + x phi(x): d = Phi(-|x|) - |x| phi(x) where x is negative, else 1 - d
ALWAYS_INLINE void vecs_gelu_erf_derivative(vec x[FLOATX_VECS]) {
    vec d[FLOATX_VECS], e[FLOATX_VECS];
    vecs_normal_tail(d, e, x);
    EACH_VEC d[i] -= 0.3989422804f * e[i] * vec_magnitude(x[i]);
    EACH_VEC {
        const vec_words negative = -((vec_words)x[i] >> 31); // all bits of a lane, or none
        x[i] = (vec)(((vec_words)d[i] & negative) | ((vec_words)(1.0f - d[i]) & ~negative));
    }
}
ALWAYS_INLINE void vecs_squared_relu(vec x[FLOATX_VECS]) {
    EACH_VEC x[i] = vec_max(vec_set(0.0f), x[i]);
    EACH_VEC x[i] = x[i] * x[i];
}
ALWAYS_INLINE void vecs_squared_relu_derivative(vec x[FLOATX_VECS]) {
    EACH_VEC x[i] = 2.0f * vec_max(vec_set(0.0f), x[i]);
}

// Elements are taken by groups of FLOATX_GROUP, where they lie; what is left of an array goes through a padded copy.
#define POINTWISE_ACTIVATION(name)                                                                                     \
    ALWAYS_INLINE void name##_forward_group(floatX *out, const floatX *in) {                                           \
        vec x[FLOATX_VECS];                                                                                            \
        EACH_VEC x[i] = floatx_load(in + i * LANES);                                                                   \
        vecs_##name(x);                                                                                                \
        EACH_VEC floatx_store(out + i * LANES, x[i]);                                                                  \
    }                                                                                                                  \
    static void name##_forward(floatX *out, const floatX *in, int64_t n, uint32_t *amax, struct device *dev) {         \
        _Pragma("omp parallel for schedule(static)") for (int64_t begin = 0; begin < n; begin += ACTIVATION_BLOCK) {   \
            int64_t at = begin;                                                                                        \
            for (; at < begin + ACTIVATION_BLOCK && at + FLOATX_GROUP <= n; at += FLOATX_GROUP)                        \
                name##_forward_group(out + at, in + at);                                                               \
            if (at < begin + ACTIVATION_BLOCK && at < n) {                                                             \
                floatX x[FLOATX_GROUP];                                                                                \
                floatx_pad(x, in + at, (int)(n - at), 0);                                                              \
                name##_forward_group(x, x);                                                                            \
                memcpy(out + at, x, (size_t)(n - at) * sizeof *x);                                                     \
                at = n;                                                                                                \
            }                                                                                                          \
            amax_take(amax, out + begin, at - begin);                                                                  \
        }                                                                                                              \
    }                                                                                                                  \
    ALWAYS_INLINE void name##_backward_group(floatX *din, const floatX *dout, const floatX *in) {                      \
        vec x[FLOATX_VECS];                                                                                            \
        EACH_VEC x[i] = floatx_load(in + i * LANES);                                                                   \
        vecs_##name##_derivative(x);                                                                                   \
        EACH_VEC floatx_store(din + i * LANES, floatx_load(dout + i * LANES) * x[i]);                                  \
    }                                                                                                                  \
    static void name##_backward(floatX *din, float *bias_partial, const floatX *dout, const floatX *in, int64_t N,     \
                                int F, uint32_t *amax, struct device *dev) {                                           \
        const int64_t n = N * F;                                                                                       \
        _Pragma("omp parallel for schedule(static)") for (int64_t begin = 0; begin < n; begin += ACTIVATION_BLOCK) {   \
            int64_t at = begin;                                                                                        \
            for (; at < begin + ACTIVATION_BLOCK && at + FLOATX_GROUP <= n; at += FLOATX_GROUP)                        \
                name##_backward_group(din + at, dout + at, in + at);                                                   \
            if (at < begin + ACTIVATION_BLOCK && at < n) {                                                             \
                floatX x[FLOATX_GROUP], d[FLOATX_GROUP];                                                               \
                floatx_pad(x, in + at, (int)(n - at), 0);                                                              \
                floatx_pad(d, dout + at, (int)(n - at), 0);                                                            \
                name##_backward_group(d, d, x);                                                                        \
                memcpy(din + at, d, (size_t)(n - at) * sizeof *d);                                                     \
                at = n;                                                                                                \
            }                                                                                                          \
            amax_take(amax, din + begin, at - begin);                                                                  \
        }                                                                                                              \
        activation_bias_sums(bias_partial, din, N, F, dev);                                                            \
    }

#define GATED_ACTIVATION(name, function)                                                                               \
    ALWAYS_INLINE void name##_forward_group(floatX *out, const floatX *gate, const floatX *up) {                       \
        vec x[FLOATX_VECS];                                                                                            \
        EACH_VEC x[i] = floatx_load(gate + i * LANES);                                                                 \
        vecs_##function(x);                                                                                            \
        EACH_VEC floatx_store(out + i * LANES, x[i] * floatx_load(up + i * LANES));                                    \
    }                                                                                                                  \
    static void name##_forward(floatX *out, const floatX *gate_up, int64_t N, int F, uint32_t *amax,                   \
                               struct device *dev) {                                                                   \
        _Pragma("omp parallel for schedule(static)") for (int64_t n = 0; n < N; n++) {                                 \
            const floatX *gate = gate_up + n * 2 * F, *up = gate + F;                                                  \
            int f = 0;                                                                                                 \
            for (; f + FLOATX_GROUP <= F; f += FLOATX_GROUP)                                                           \
                name##_forward_group(out + n * F + f, gate + f, up + f);                                               \
            if (f < F) {                                                                                               \
                floatX last_gate[FLOATX_GROUP], last_up[FLOATX_GROUP];                                                 \
                floatx_pad(last_gate, gate + f, F - f, 0);                                                             \
                floatx_pad(last_up, up + f, F - f, 0);                                                                 \
                name##_forward_group(last_gate, last_gate, last_up);                                                   \
                memcpy(out + n * F + f, last_gate, (size_t)(F - f) * sizeof *out);                                     \
            }                                                                                                          \
            amax_take(amax, out + n * F, F);                                                                           \
        }                                                                                                              \
    }                                                                                                                  \
    ALWAYS_INLINE void name##_backward_group(floatX *dgate, floatX *dup, const floatX *dout, const floatX *gate,       \
                                             const floatX *up) {                                                       \
        vec g[FLOATX_VECS], s[FLOATX_VECS], derivative[FLOATX_VECS];                                                   \
        EACH_VEC g[i] = floatx_load(gate + i * LANES);                                                                 \
        vecs_##function##_gradient(s, derivative, g);                                                                  \
        EACH_VEC {                                                                                                     \
            const vec d = floatx_load(dout + i * LANES), u = floatx_load(up + i * LANES);                              \
            floatx_store(dgate + i * LANES, d * u * derivative[i]);                                                    \
            floatx_store(dup + i * LANES, d * g[i] * s[i]);                                                            \
        }                                                                                                              \
    }                                                                                                                  \
    static void name##_backward(floatX *dgate_up, float *bias_partial, const floatX *dout, const floatX *gate_up,      \
                                int64_t N, int F, uint32_t *amax, struct device *dev) {                                \
        _Pragma("omp parallel for schedule(static)") for (int64_t n = 0; n < N; n++) {                                 \
            const floatX *gate = gate_up + n * 2 * F, *up = gate + F, *dout_row = dout + n * F;                        \
            floatX *dgate = dgate_up + n * 2 * F, *dup = dgate + F;                                                    \
            int f = 0;                                                                                                 \
            for (; f + FLOATX_GROUP <= F; f += FLOATX_GROUP)                                                           \
                name##_backward_group(dgate + f, dup + f, dout_row + f, gate + f, up + f);                             \
            if (f < F) {                                                                                               \
                floatX last_gate[FLOATX_GROUP], last_up[FLOATX_GROUP], d[FLOATX_GROUP];                                \
                floatx_pad(last_gate, gate + f, F - f, 0);                                                             \
                floatx_pad(last_up, up + f, F - f, 0);                                                                 \
                floatx_pad(d, dout_row + f, F - f, 0);                                                                 \
                name##_backward_group(last_gate, last_up, d, last_gate, last_up);                                      \
                memcpy(dgate + f, last_gate, (size_t)(F - f) * sizeof *dgate);                                         \
                memcpy(dup + f, last_up, (size_t)(F - f) * sizeof *dup);                                               \
            }                                                                                                          \
            amax_take(amax, dgate, 2 * (int64_t)F);                                                                    \
        }                                                                                                              \
        activation_bias_sums(bias_partial, dgate_up, N, 2 * F, dev);                                                   \
    }

#endif

// The ops, by their functions; kernels/activation_fp8.cuh makes those that write FP8 of the same rows.
#define ACTIVATION_OPS(POINTWISE, GATED)                                                                               \
    POINTWISE(gelu)                                                                                                    \
    POINTWISE(gelu_erf)                                                                                                \
    POINTWISE(squared_relu)                                                                                            \
    GATED(swiglu, silu)                                                                                                \
    GATED(geglu, gelu)
ACTIVATION_OPS(POINTWISE_ACTIVATION, GATED_ACTIVATION)
