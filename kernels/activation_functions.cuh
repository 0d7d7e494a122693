// The functions of the MLP's activations and their derivatives: of a float on the cuda target, of vectors on the cpu.
//
// Tanh GELU and SiLU are x times a logistic function: 0.5 (1 + tanh(u)) = sigma(2u), which needs one exponential and,
// unlike 1 + tanh, loses nothing to cancellation where x is negative.
//
// In bf16 the cuda target takes the exponential and the division from the units for them: sigma(y) = 1 / (1 + 2^t),
// t = -y / ln 2. Each of t's roundings, at most four with the constants', changes 2^t by |t| ln 2 2^-24 at most,
// relatively; ex2.approx errs by 2 units in the last place, 2^-22, rcp.approx by one, the sum by half of one. Where
// sigma is not nearly 1, |t| < 40, that is 4 * 28 * 2^-24 + 2^-22 + 2^-23 + 2^-24 = 119 * 2^-24 = 7.1e-6 of sigma, a
// 275th of bf16's rounding. Farther left sigma < 2^-40. In fp32 it takes a polynomial and a division: memory is slower.
//
// GELU by the error function computes, in bf16, Phi(-z) = e^(-z^2 / 2) t P(t), t = 1 / (1 + 0.38 z), as in Abramowitz
// and Stegun 7.1.26. P has degree 4, minimax in the relative error, by Lawson's iteration: 3.6e-5 for z <= 13.3, from
// where the exponential underflows. Its roundings add 125 ln 2 2^-23 = 1.1e-5: 5e-5 in all, a 39th of bf16's.
#pragma once
#include "kernels/activation.cuh" // ACTIVATION_OPS
#include "kernels/device.cuh"     // floatX
#ifdef TARGET_CUDA
#include "kernels/ptx.cuh"         // exp2_approx, reciprocal_approx
#include "kernels/vector_math.cuh" // vector_expf

DEVICE_FUNCTION float logistic(float x) {
    if (sizeof(floatX) == 2)
        return reciprocal_approx(1.0f + exp2_approx(-LOG2E * x));
    return 1.0f / (1.0f + vector_expf(-x));
}

struct gate_gradient {
    float s, derivative; // s(x), f'(x)
};

DEVICE_FUNCTION float silu(float x) { return sizeof(floatX) == 2 ? x * logistic(x) : x / (1.0f + vector_expf(-x)); }
// Returns s = sigma(x) and silu'(x) = s + x s (1 - s). In the last term x counts as 64 at most. From there on s (1 - s)
// < 2^-92, but the approximate reciprocal may leave s just beside 1, and a large x would multiply that error.
DEVICE_FUNCTION struct gate_gradient silu_gradient(float x) {
    const float s = logistic(x), product = fminf(x, 64.0f) * s;
    const struct gate_gradient result = {s, s + fmaf(-product, s, product)};
    return result;
}

// Returns sigma(2u), u = sqrt(2 / pi) (x + 0.044715 x^3). square is x^2, or less where sigma is 0 or 1 anyway.
DEVICE_FUNCTION float gelu_logistic(float x, float square) {
    if (sizeof(floatX) == 2) // 2u and -log2(e) in one: -1.5957691216 log2(e), and that times 0.044715
        return reciprocal_approx(1.0f + exp2_approx(x * fmaf(-0.1029432397f, square, -2.3022081987f)));
    return logistic(1.5957691216f * x * (1.0f + 0.044715f * square));
}
// gelu(x) = 0.5 x (1 + tanh(u)) = x sigma(2u), u as in gelu_logistic
DEVICE_FUNCTION float gelu(float x) { return x * gelu_logistic(x, x * x); }
// Returns s = sigma(2u), u as in gelu_logistic, and gelu'(x) = s + x s (1 - s) 2u'. A larger x counts as 8, from where
// s (1 - s) < 2^-70. A larger x^2 counts as 2^20, where s is 0: 0 times an infinite u' would be NaN.
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
// Returns gelu_erf'(x) = Phi(x) + x phi(x), phi(x) = e^(-x^2 / 2) / sqrt(2 pi). In bf16, with z = |x| and d = Phi(-z) -
// z phi(z), the result is d where x is negative, else 1 - d.
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

#else
#include "kernels/vectors_floatx.cuh" // vecs_exp, vecs_logistic, vec_divide

// The functions above, of vectors: vecs_NAME has x[i] <- NAME(x[i]). On two cores of a Zen 4 GELU's multiplications
// take 13 cycles for 16 elements of bf16, the memory 11: a further operation would show in the time.

ALWAYS_INLINE void vecs_gelu(vec x[FLOATX_VECS]) {
    vec e[FLOATX_VECS];
    EACH_VEC e[i] = -1.5957691216f * x[i] * (1.0f + 0.044715f * x[i] * x[i]);
    vecs_exp(e);
    EACH_VEC x[i] = vec_divide(x[i], 1.0f + e[i]);
}
// s[i] = sigma(2u), u = sqrt(2 / pi) (x[i] + 0.044715 x[i]^3); derivative[i] = gelu'(x[i]). x may be derivative, not s.
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
// s[i] = sigma(x[i]); derivative[i] = silu'(x[i]). x may be `derivative`, not s.
ALWAYS_INLINE void vecs_silu_gradient(vec s[FLOATX_VECS], vec derivative[FLOATX_VECS], const vec x[FLOATX_VECS]) {
    EACH_VEC s[i] = x[i];
    vecs_logistic(s);
    EACH_VEC derivative[i] = s[i] + x[i] * s[i] * (1.0f - s[i]);
}

// Returns min(|x|, 20) in each lane, NaN for NaN: from 20 on e^(-x^2 / 2) is 0, which times infinity would be NaN.
ALWAYS_INLINE vec vec_magnitude(vec x) { return vec_min(vec_set(20.0f), (vec)((vec_words)x & 0x7fffffffu)); }

// below[i] = Phi(-|x[i]|), e[i] = e^(-x[i]^2 / 2). With t = 1 / (1 + a |x|), `below` is e t P(t), as in Abramowitz and
// Stegun 7.1.26. P is minimax for |x| <= 13.3, where e underflows: its relative error is 2.5e-8, in bf16 7.3e-6.
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
// x[i] <- gelu_erf(x[i]): x Phi(x) = max(x, 0) - |x| Phi(-|x|), which has no subtraction where x is negative
ALWAYS_INLINE void vecs_gelu_erf(vec x[FLOATX_VECS]) {
    vec below[FLOATX_VECS], e[FLOATX_VECS];
    vecs_normal_tail(below, e, x);
    EACH_VEC below[i] *= vec_magnitude(x[i]);
    EACH_VEC x[i] = vec_max(vec_set(0.0f), x[i]) - below[i];
}
// x[i] <- Phi(x[i]) + x[i] phi(x[i]), by d = Phi(-|x|) - |x| phi(x): d where x is negative, else 1 - d.
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
#define POINTWISE_GROUPS(name)                                                                                         \
    ALWAYS_INLINE void name##_forward_group(floatX *out, const floatX *in) {                                           \
        vec x[FLOATX_VECS];                                                                                            \
        EACH_VEC x[i] = floatx_load(in + i * LANES);                                                                   \
        vecs_##name(x);                                                                                                \
        EACH_VEC floatx_store(out + i * LANES, x[i]);                                                                  \
    }                                                                                                                  \
    ALWAYS_INLINE void name##_backward_group(floatX *din, const floatX *dout, const floatX *in) {                      \
        vec x[FLOATX_VECS];                                                                                            \
        EACH_VEC x[i] = floatx_load(in + i * LANES);                                                                   \
        vecs_##name##_derivative(x);                                                                                   \
        EACH_VEC floatx_store(din + i * LANES, floatx_load(dout + i * LANES) * x[i]);                                  \
    }
#define GATED_GROUPS(name, function)                                                                                   \
    ALWAYS_INLINE void name##_forward_group(floatX *out, const floatX *gate, const floatX *up) {                       \
        vec x[FLOATX_VECS];                                                                                            \
        EACH_VEC x[i] = floatx_load(gate + i * LANES);                                                                 \
        vecs_##function(x);                                                                                            \
        EACH_VEC floatx_store(out + i * LANES, x[i] * floatx_load(up + i * LANES));                                    \
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
    }
ACTIVATION_OPS(POINTWISE_GROUPS, GATED_GROUPS)
#undef POINTWISE_GROUPS
#undef GATED_GROUPS

#endif
