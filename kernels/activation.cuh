// The MLP's activations. Pointwise: GELU in its tanh form (Hendrycks and Gimpel 2016; GPT-2's "gelu_new") and squared ReLU
// (So et al. 2021, arXiv 2109.08668). Gated: SwiGLU (Shazeer 2020, arXiv 2002.05202).
//
// A pointwise one is a function NAME and its derivative NAME_derivative: of a float for the cuda target, and by the
// names vecs_NAME and vecs_NAME_derivative of FLOATX_VECS vectors for the cpu. POINTWISE_ACTIVATION(NAME) makes of them
//
//   NAME_forward    out = NAME(in)
//   NAME_backward   din = dout * NAME_derivative(in); din may be dout
//
// GELU and SwiGLU are x times a logistic function: 0.5 (1 + tanh(u)) = sigma(2u), which needs one exponential and, unlike
// 1 + tanh, loses nothing to cancellation where x is negative.
#pragma once
#include "kernels/device.cuh"         // floatX
#include "kernels/packed.cuh"         // packed_load_some, packed_store_some
#include "kernels/vector_math.cuh"    // vector_expf
#include "kernels/vectors_floatx.cuh" // vecs_exp, floatx_load, floatx_pad

HOST_DEVICE float logistic(float x) { return 1.0f / (1.0f + vector_expf(-x)); }

// gelu(x) = 0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
HOST_DEVICE float gelu(float x) {
    const float two_u = 1.5957691216f * x * (1.0f + 0.044715f * x * x);
    return x / (1.0f + vector_expf(-two_u));
}
// gelu'(x) = s + x s (1 - s) 2u', s = sigma(2u)
HOST_DEVICE float gelu_derivative(float x) {
    const float square = x * x;
    const float s = logistic(1.5957691216f * x * (1.0f + 0.044715f * square));
    return s + x * s * (1.0f - s) * 1.5957691216f * (1.0f + 0.134145f * square);
}

// squared_relu(x) = max(x, 0)^2; NaN stays NaN
HOST_DEVICE float squared_relu(float x) { return x < 0 ? 0.0f : x * x; }
HOST_DEVICE float squared_relu_derivative(float x) { return x < 0 ? 0.0f : 2.0f * x; }

// out = silu(gate) * up, silu(x) = x sigma(x)
static void swiglu_forward(floatX *out,           // (N, F)
                           const floatX *gate_up, // (N, 2F): the gate's row, then the up projection's
                           int64_t N, int F, struct device *dev);
// dgate = dout * up * silu'(gate), silu'(x) = s + x s (1 - s); dup = dout * silu(gate). dgate_up may be gate_up.
static void swiglu_backward(floatX *dgate_up,      // (N, 2F)
                            const floatX *dout,    // (N, F)
                            const floatX *gate_up, // (N, 2F)
                            int64_t N, int F, struct device *dev);

#ifdef TARGET_CUDA

// Every kernel here moves 4 to 10 bytes of bf16 an element and is bound by memory. A thread takes one 16-byte access.
enum { ACTIVATION_THREADS = 256 };
DEVICE_FUNCTION int64_t activation_first(void) { return ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * PACK; }

#define POINTWISE_ACTIVATION(name)                                                                                     \
    static __global__ void name##_forward_kernel(floatX *out, const floatX *in, int64_t n) {                           \
        const int64_t at = activation_first();                                                                         \
        if (at >= n)                                                                                                   \
            return;                                                                                                    \
        struct packed x = packed_load_some(in + at, n - at);                                                           \
        for (int i = 0; i < PACK; i++)                                                                                 \
            x.x[i] = to_floatX(name(to_float(x.x[i])));                                                                \
        packed_store_some(out + at, x, n - at);                                                                        \
    }                                                                                                                  \
    static void name##_forward(floatX *out, const floatX *in, int64_t n, struct device *dev) {                         \
        LAUNCH(dev, name##_forward_kernel, blocks_for(n, ACTIVATION_THREADS *PACK), ACTIVATION_THREADS, 0, out, in,    \
               n);                                                                                                     \
    }                                                                                                                  \
    static __global__ void name##_backward_kernel(floatX *din, const floatX *dout, const floatX *in, int64_t n) {      \
        const int64_t at = activation_first();                                                                         \
        if (at >= n)                                                                                                   \
            return;                                                                                                    \
        const struct packed x = packed_load_some(in + at, n - at);                                                     \
        struct packed d = packed_load_some(dout + at, n - at);                                                         \
        for (int i = 0; i < PACK; i++)                                                                                 \
            d.x[i] = to_floatX(to_float(d.x[i]) * name##_derivative(to_float(x.x[i])));                                \
        packed_store_some(din + at, d, n - at);                                                                        \
    }                                                                                                                  \
    static void name##_backward(floatX *din, const floatX *dout, const floatX *in, int64_t n, struct device *dev) {    \
        LAUNCH(dev, name##_backward_kernel, blocks_for(n, ACTIVATION_THREADS *PACK), ACTIVATION_THREADS, 0, din, dout, \
               in, n);                                                                                                 \
    }

// A row takes grid.x blocks; the grid's second and third dimensions are the rows.
DEVICE_FUNCTION int64_t activation_row_number(void) { return (int64_t)blockIdx.z * gridDim.y + blockIdx.y; }

static __global__ void swiglu_forward_kernel(floatX *out, const floatX *gate_up, int64_t N, int F) {
    const int64_t f = activation_first(), n = activation_row_number();
    if (f >= F || n >= N)
        return;
    struct packed gate = packed_load_some(gate_up + n * 2 * F + f, F - f);
    const struct packed up = packed_load_some(gate_up + n * 2 * F + F + f, F - f);
    for (int i = 0; i < PACK; i++) {
        const float g = to_float(gate.x[i]);
        gate.x[i] = to_floatX(g / (1.0f + vector_expf(-g)) * to_float(up.x[i]));
    }
    packed_store_some(out + n * F + f, gate, F - f);
}
static inline dim3 activation_grid(int64_t N, int F) {
    const unsigned rows = 32768; // the grid's second dimension ends at 65535
    return dim3(blocks_for(F, ACTIVATION_THREADS * PACK), N < rows ? (unsigned)N : rows, blocks_for(N, rows));
}
static void swiglu_forward(floatX *out, const floatX *gate_up, int64_t N, int F, struct device *dev) {
    LAUNCH(dev, swiglu_forward_kernel, activation_grid(N, F), ACTIVATION_THREADS, 0, out, gate_up, N, F);
}

static __global__ void swiglu_backward_kernel(floatX *dgate_up, const floatX *dout, const floatX *gate_up, int64_t N,
                                              int F) {
    const int64_t f = activation_first(), n = activation_row_number();
    if (f >= F || n >= N)
        return;
    struct packed gate = packed_load_some(gate_up + n * 2 * F + f, F - f);
    struct packed up = packed_load_some(gate_up + n * 2 * F + F + f, F - f);
    const struct packed dout_row = packed_load_some(dout + n * F + f, F - f);
    for (int i = 0; i < PACK; i++) {
        const float g = to_float(gate.x[i]), s = logistic(g), d = to_float(dout_row.x[i]);
        gate.x[i] = to_floatX(d * to_float(up.x[i]) * (s + g * s * (1.0f - s)));
        up.x[i] = to_floatX(d * g * s);
    }
    packed_store_some(dgate_up + n * 2 * F + f, gate, F - f);
    packed_store_some(dgate_up + n * 2 * F + F + f, up, F - f);
}
static void swiglu_backward(floatX *dgate_up, const floatX *dout, const floatX *gate_up, int64_t N, int F,
                            struct device *dev) {
    LAUNCH(dev, swiglu_backward_kernel, activation_grid(N, F), ACTIVATION_THREADS, 0, dgate_up, dout, gate_up, N, F);
}

#else

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
ALWAYS_INLINE void vecs_gelu_derivative(vec x[FLOATX_VECS]) {
    vec s[FLOATX_VECS];
    EACH_VEC s[i] = 1.5957691216f * x[i] * (1.0f + 0.044715f * (x[i] * x[i]));
    vecs_logistic(s);
    EACH_VEC x[i] = s[i] + x[i] * s[i] * (1.0f - s[i]) * 1.5957691216f * (1.0f + 0.134145f * (x[i] * x[i]));
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
    static void name##_forward(floatX *out, const floatX *in, int64_t n, struct device *dev) {                         \
        _Pragma("omp parallel for schedule(static)") for (int64_t begin = 0; begin < n; begin += ACTIVATION_BLOCK) {   \
            int64_t at = begin;                                                                                        \
            for (; at < begin + ACTIVATION_BLOCK && at + FLOATX_GROUP <= n; at += FLOATX_GROUP)                        \
                name##_forward_group(out + at, in + at);                                                               \
            if (at < begin + ACTIVATION_BLOCK && at < n) {                                                             \
                floatX x[FLOATX_GROUP];                                                                                \
                floatx_pad(x, in + at, (int)(n - at), 0);                                                              \
                name##_forward_group(x, x);                                                                            \
                memcpy(out + at, x, (size_t)(n - at) * sizeof *x);                                                     \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    ALWAYS_INLINE void name##_backward_group(floatX *din, const floatX *dout, const floatX *in) {                      \
        vec x[FLOATX_VECS];                                                                                            \
        EACH_VEC x[i] = floatx_load(in + i * LANES);                                                                   \
        vecs_##name##_derivative(x);                                                                                   \
        EACH_VEC floatx_store(din + i * LANES, floatx_load(dout + i * LANES) * x[i]);                                  \
    }                                                                                                                  \
    static void name##_backward(floatX *din, const floatX *dout, const floatX *in, int64_t n, struct device *dev) {    \
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
            }                                                                                                          \
        }                                                                                                              \
    }

ALWAYS_INLINE void swiglu_forward_group(floatX *out, const floatX *gate, const floatX *up) {
    vec g[FLOATX_VECS], e[FLOATX_VECS];
    EACH_VEC g[i] = floatx_load(gate + i * LANES);
    EACH_VEC e[i] = -g[i];
    vecs_exp(e);
    EACH_VEC floatx_store(out + i * LANES, vec_divide(g[i], 1.0f + e[i]) * floatx_load(up + i * LANES));
}
static void swiglu_forward(floatX *out, const floatX *gate_up, int64_t N, int F, struct device *dev) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        const floatX *gate = gate_up + n * 2 * F, *up = gate + F;
        int f = 0;
        for (; f + FLOATX_GROUP <= F; f += FLOATX_GROUP)
            swiglu_forward_group(out + n * F + f, gate + f, up + f);
        if (f < F) {
            floatX last_gate[FLOATX_GROUP], last_up[FLOATX_GROUP];
            floatx_pad(last_gate, gate + f, F - f, 0);
            floatx_pad(last_up, up + f, F - f, 0);
            swiglu_forward_group(last_gate, last_gate, last_up);
            memcpy(out + n * F + f, last_gate, (size_t)(F - f) * sizeof *out);
        }
    }
}

ALWAYS_INLINE void swiglu_backward_group(floatX *dgate, floatX *dup, const floatX *dout, const floatX *gate,
                                         const floatX *up) {
    vec g[FLOATX_VECS], s[FLOATX_VECS];
    EACH_VEC g[i] = floatx_load(gate + i * LANES);
    EACH_VEC s[i] = g[i];
    vecs_logistic(s);
    EACH_VEC {
        const vec d = floatx_load(dout + i * LANES), u = floatx_load(up + i * LANES);
        floatx_store(dgate + i * LANES, d * u * (s[i] + g[i] * s[i] * (1.0f - s[i])));
        floatx_store(dup + i * LANES, d * g[i] * s[i]);
    }
}
static void swiglu_backward(floatX *dgate_up, const floatX *dout, const floatX *gate_up, int64_t N, int F,
                            struct device *dev) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        const floatX *gate = gate_up + n * 2 * F, *up = gate + F, *dout_row = dout + n * F;
        floatX *dgate = dgate_up + n * 2 * F, *dup = dgate + F;
        int f = 0;
        for (; f + FLOATX_GROUP <= F; f += FLOATX_GROUP)
            swiglu_backward_group(dgate + f, dup + f, dout_row + f, gate + f, up + f);
        if (f < F) {
            floatX last_gate[FLOATX_GROUP], last_up[FLOATX_GROUP], d[FLOATX_GROUP];
            floatx_pad(last_gate, gate + f, F - f, 0);
            floatx_pad(last_up, up + f, F - f, 0);
            floatx_pad(d, dout_row + f, F - f, 0);
            swiglu_backward_group(last_gate, last_up, d, last_gate, last_up);
            memcpy(dgate + f, last_gate, (size_t)(F - f) * sizeof *dgate);
            memcpy(dup + f, last_up, (size_t)(F - f) * sizeof *dup);
        }
    }
}

#endif

POINTWISE_ACTIVATION(gelu)
POINTWISE_ACTIVATION(squared_relu)
