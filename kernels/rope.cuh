// Rotary position embedding (Su et al. 2021) in the half-split form of Hugging Face: element i of a head is paired with
// element i + D/2, and the pair turns by the angle position * theta^(-2i/D).
#pragma once
#include "kernels/device.cuh" // floatX
#include <math.h>             // pow, cos, sin

// Row p holds D/2 cosines, then D/2 sines, of position p's angles. Computed in double: at position 100,000 an angle in
// fp32 would already be off by 0.004.
static void rope_table(float *table, // (T, D)
                       int T, int D, float theta) {
#pragma omp parallel for schedule(static)
    for (int position = 0; position < T; position++)
        for (int i = 0; i < D / 2; i++) {
            const double angle = position * pow((double)theta, -2.0 * i / D);
            table[(int64_t)position * D + i] = (float)cos(angle);
            table[(int64_t)position * D + D / 2 + i] = (float)sin(angle);
        }
}

// (a, b) <- (a cos - b sin, b cos + a sin) for the first `heads` heads of a token; direction -1 turns back.
static inline void rope_rotate(floatX *token, const float *table_row, int heads, int D, float direction) {
    const float *__restrict__ cosines = table_row, *__restrict__ sines = table_row + D / 2;
    for (int h = 0; h < heads; h++) {
        floatX *__restrict__ a = token + (int64_t)h * D, *__restrict__ b = a + D / 2;
#pragma omp simd
        for (int i = 0; i < D / 2; i++) {
            const float x = to_float(a[i]), y = to_float(b[i]), s = direction * sines[i];
            a[i] = to_floatX(x * cosines[i] - y * s);
            b[i] = to_floatX(y * cosines[i] + x * s);
        }
    }
}
static void rope_rotate_all(floatX *qkv, const float *table, int B, int T, int start, int H, int Hkv, int D,
                            float direction) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < (int64_t)B * T; row++)
        rope_rotate(qkv + row * (H + 2 * Hkv) * D, table + (start + row % T) * D, H + Hkv, D, direction);
}

// Turns the q and k heads in place; v stays. Row t has position start + t.
static void rope_forward(floatX *qkv,        // (B, T, (H + 2 Hkv) * D): H q heads, Hkv k heads, Hkv v heads
                         const float *table, // (at least start + T, D)
                         int B, int T, int start, int H, int Hkv, int D, struct device *dev) {
    rope_rotate_all(qkv, table, B, T, start, H, Hkv, D, 1.0f);
}

// A rotation's transpose is the rotation back.
static void rope_backward(floatX *dqkv,       // (B, T, (H + 2 Hkv) * D)
                          const float *table, // (at least start + T, D)
                          int B, int T, int start, int H, int Hkv, int D, struct device *dev) {
    rope_rotate_all(dqkv, table, B, T, start, H, Hkv, D, -1.0f);
}
