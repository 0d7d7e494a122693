// The MLP's activations. Pointwise: GELU (Hendrycks and Gimpel 2016) in its tanh form (GPT-2's "gelu_new") and as it
// was defined, by the error function; squared ReLU (So et al. 2021, arXiv 2109.08668). Gated: SwiGLU and GeGLU (Shazeer
// 2020, arXiv 2002.05202), with GELU in its tanh form.
//
// A pointwise one is a function NAME and its derivative NAME_derivative: of a float for the cuda target, and by the
// names vecs_NAME and vecs_NAME_derivative of FLOATX_VECS vectors for the cpu. POINTWISE_ACTIVATION(NAME) makes of them
//
//   NAME_forward    out = NAME(in)
//   NAME_backward   din = dout * NAME_derivative(in); din may be dout
//
// A gated one is a function f(x) = x s(x), of which NAME_gradient (of a float) and vecs_NAME_gradient give s and f'.
// GATED_ACTIVATION(NAME, f) makes of them
//
//   NAME_forward    out = f(gate) * up
//   NAME_backward   dgate = dout * up * f'(gate), dup = dout * f(gate)
//
// All take a parameter `amax`, of what they write, as kernels/amax.cuh says; NULL: not taken.
//
// Tanh GELU and SiLU are x times a logistic function: 0.5 (1 + tanh(u)) = sigma(2u), which needs one exponential and,
// unlike 1 + tanh, loses nothing to cancellation where x is negative.
#pragma once
#include "kernels/amax.cuh"           // amax_with_packed, amax_merge_block, amax_take
#include "kernels/device.cuh"         // floatX
#include "kernels/packed.cuh"         // packed_load_some, packed_store_some
#include "kernels/vector_math.cuh"    // vector_expf
#include "kernels/vectors_floatx.cuh" // vecs_exp, floatx_load, floatx_pad

HOST_DEVICE float logistic(float x) { return 1.0f / (1.0f + vector_expf(-x)); }

// Of f(x) = x s(x).
struct gate_gradient {
    float s, derivative; // s(x), f'(x)
};

// silu(x) = x sigma(x); silu'(x) = s + x s (1 - s)
HOST_DEVICE float silu(float x) { return x / (1.0f + vector_expf(-x)); }
HOST_DEVICE struct gate_gradient silu_gradient(float x) {
    const float s = logistic(x);
    const struct gate_gradient result = {s, s + x * s * (1.0f - s)};
    return result;
}

// gelu(x) = 0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
HOST_DEVICE float gelu(float x) {
    const float two_u = 1.5957691216f * x * (1.0f + 0.044715f * x * x);
    return x / (1.0f + vector_expf(-two_u));
}
// gelu'(x) = s + x s (1 - s) 2u', s = sigma(2u)
HOST_DEVICE struct gate_gradient gelu_gradient(float x) {
    const float square = x * x;
    const float s = logistic(1.5957691216f * x * (1.0f + 0.044715f * square));
    const struct gate_gradient result = {s, s + x * s * (1.0f - s) * 1.5957691216f * (1.0f + 0.134145f * square)};
    return result;
}
HOST_DEVICE float gelu_derivative(float x) { return gelu_gradient(x).derivative; }

// gelu_erf(x) = x Phi(x), Phi(x) = 0.5 (1 + erf(x / sqrt(2))) = 0.5 erfc(-x / sqrt(2)), the distribution function of
// the standard normal distribution; erfc loses nothing to cancellation where x is negative.
HOST_DEVICE float gelu_erf(float x) { return 0.5f * x * erfcf(-0.7071067812f * x); }
// gelu_erf'(x) = Phi(x) + x phi(x), phi(x) = e^(-x^2 / 2) / sqrt(2 pi)
HOST_DEVICE float gelu_erf_derivative(float x) {
    return 0.5f * erfcf(-0.7071067812f * x) + 0.3989422804f * x * vector_expf(-0.5f * x * x);
}

// squared_relu(x) = max(x, 0)^2; NaN stays NaN
HOST_DEVICE float squared_relu(float x) { return x < 0 ? 0.0f : x * x; }
HOST_DEVICE float squared_relu_derivative(float x) { return x < 0 ? 0.0f : 2.0f * x; }

// A gated activation's arrays: gate_up (N, 2F) has the gate's row, then the up projection's; out and dout are (N, F).
// dgate_up may be gate_up.
typedef void gated_forward(floatX *out, const floatX *gate_up, int64_t N, int F, uint32_t *amax, struct device *dev);
typedef void gated_backward(floatX *dgate_up, const floatX *dout, const floatX *gate_up, int64_t N, int F,
                            uint32_t *amax, struct device *dev);
static gated_forward swiglu_forward, geglu_forward;
static gated_backward swiglu_backward, geglu_backward;

#ifdef TARGET_CUDA

// Every kernel here moves 4 to 10 bytes of bf16 an element and is bound by memory. A thread takes one 16-byte access.
enum { ACTIVATION_THREADS = 256 };
DEVICE_FUNCTION int64_t activation_first(void) { return ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * PACK; }

#define ACTIVATION_LAUNCH(kernel, grid, ...)                                                                           \
    LAUNCH(dev, (amax != NULL ? kernel<true> : kernel<false>), grid, ACTIVATION_THREADS,                               \
           amax != NULL ? AMAX_BLOCK_BYTES : 0, __VA_ARGS__, amax)

#define POINTWISE_ACTIVATION(name)                                                                                     \
    template <bool AMAX>                                                                                               \
    static __global__ void name##_forward_kernel(floatX *out, const floatX *in, int64_t n, uint32_t *amax) {           \
        const int64_t at = activation_first();                                                                         \
        struct packed x = {};                                                                                          \
        if (at < n) {                                                                                                  \
            x = packed_load_some(in + at, n - at);                                                                     \
            for (int i = 0; i < PACK; i++)                                                                             \
                x.x[i] = to_floatX(name(to_float(x.x[i])));                                                            \
            packed_store_some(out + at, x, n - at);                                                                    \
        }                                                                                                              \
        if (AMAX)                                                                                                      \
            amax_merge_block(amax, amax_with_packed(0, x), shared_memory());                                           \
    }                                                                                                                  \
    static void name##_forward(floatX *out, const floatX *in, int64_t n, uint32_t *amax, struct device *dev) {         \
        ACTIVATION_LAUNCH(name##_forward_kernel, blocks_for(n, ACTIVATION_THREADS *PACK), out, in, n);                 \
    }                                                                                                                  \
    template <bool AMAX>                                                                                               \
    static __global__ void name##_backward_kernel(floatX *din, const floatX *dout, const floatX *in, int64_t n,        \
                                                  uint32_t *amax) {                                                    \
        const int64_t at = activation_first();                                                                         \
        struct packed d = {};                                                                                          \
        if (at < n) {                                                                                                  \
            const struct packed x = packed_load_some(in + at, n - at);                                                 \
            d = packed_load_some(dout + at, n - at);                                                                   \
            for (int i = 0; i < PACK; i++)                                                                             \
                d.x[i] = to_floatX(to_float(d.x[i]) * name##_derivative(to_float(x.x[i])));                            \
            packed_store_some(din + at, d, n - at);                                                                    \
        }                                                                                                              \
        if (AMAX)                                                                                                      \
            amax_merge_block(amax, amax_with_packed(0, d), shared_memory());                                           \
    }                                                                                                                  \
    static void name##_backward(floatX *din, const floatX *dout, const floatX *in, int64_t n, uint32_t *amax,          \
                                struct device *dev) {                                                                  \
        ACTIVATION_LAUNCH(name##_backward_kernel, blocks_for(n, ACTIVATION_THREADS *PACK), din, dout, in, n);          \
    }

// A row takes grid.x blocks; the grid's second and third dimensions are the rows.
DEVICE_FUNCTION int64_t activation_row_number(void) { return (int64_t)blockIdx.z * gridDim.y + blockIdx.y; }

static inline dim3 activation_grid(int64_t N, int F) {
    const unsigned rows = 32768; // the grid's second dimension ends at 65535
    return dim3(blocks_for(F, ACTIVATION_THREADS * PACK), N < rows ? (unsigned)N : rows, blocks_for(N, rows));
}
#define GATED_ACTIVATION(name, function)                                                                               \
    template <bool AMAX>                                                                                               \
    static __global__ void name##_forward_kernel(floatX *out, const floatX *gate_up, int64_t N, int F,                 \
                                                 uint32_t *amax) {                                                     \
        const int64_t f = activation_first(), n = activation_row_number();                                             \
        struct packed gate = {};                                                                                       \
        if (f < F && n < N) {                                                                                          \
            gate = packed_load_some(gate_up + n * 2 * F + f, F - f);                                                   \
            const struct packed up = packed_load_some(gate_up + n * 2 * F + F + f, F - f);                             \
            for (int i = 0; i < PACK; i++)                                                                             \
                gate.x[i] = to_floatX(function(to_float(gate.x[i])) * to_float(up.x[i]));                              \
            packed_store_some(out + n * F + f, gate, F - f);                                                           \
        }                                                                                                              \
        if (AMAX)                                                                                                      \
            amax_merge_block(amax, amax_with_packed(0, gate), shared_memory());                                        \
    }                                                                                                                  \
    static void name##_forward(floatX *out, const floatX *gate_up, int64_t N, int F, uint32_t *amax,                   \
                               struct device *dev) {                                                                   \
        ACTIVATION_LAUNCH(name##_forward_kernel, activation_grid(N, F), out, gate_up, N, F);                           \
    }                                                                                                                  \
    template <bool AMAX>                                                                                               \
    static __global__ void name##_backward_kernel(floatX *dgate_up, const floatX *dout, const floatX *gate_up,         \
                                                  int64_t N, int F, uint32_t *amax) {                                  \
        const int64_t f = activation_first(), n = activation_row_number();                                             \
        struct packed gate = {}, up = {};                                                                              \
        if (f < F && n < N) {                                                                                          \
            gate = packed_load_some(gate_up + n * 2 * F + f, F - f);                                                   \
            up = packed_load_some(gate_up + n * 2 * F + F + f, F - f);                                                 \
            const struct packed dout_row = packed_load_some(dout + n * F + f, F - f);                                  \
            for (int i = 0; i < PACK; i++) {                                                                           \
                const float g = to_float(gate.x[i]), d = to_float(dout_row.x[i]);                                      \
                const struct gate_gradient of_gate = function##_gradient(g);                                           \
                gate.x[i] = to_floatX(d * to_float(up.x[i]) * of_gate.derivative);                                     \
                up.x[i] = to_floatX(d * g * of_gate.s);                                                                \
            }                                                                                                          \
            packed_store_some(dgate_up + n * 2 * F + f, gate, F - f);                                                  \
            packed_store_some(dgate_up + n * 2 * F + F + f, up, F - f);                                                \
        }                                                                                                              \
        if (AMAX)                                                                                                      \
            amax_merge_block(amax, amax_with_packed(amax_with_packed(0, gate), up), shared_memory());                  \
    }                                                                                                                  \
    static void name##_backward(floatX *dgate_up, const floatX *dout, const floatX *gate_up, int64_t N, int F,         \
                                uint32_t *amax, struct device *dev) {                                                  \
        ACTIVATION_LAUNCH(name##_backward_kernel, activation_grid(N, F), dgate_up, dout, gate_up, N, F);               \
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
    static void name##_backward(floatX *din, const floatX *dout, const floatX *in, int64_t n, uint32_t *amax,          \
                                struct device *dev) {                                                                  \
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
    static void name##_backward(floatX *dgate_up, const floatX *dout, const floatX *gate_up, int64_t N, int F,         \
                                uint32_t *amax, struct device *dev) {                                                  \
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
