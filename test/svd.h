// The singular value decomposition in double, by one-sided Jacobi rotations. It judges Newton-Schulz iterations, whose
// exact result has the same singular vectors and the polynomial of each singular value; and it tells what rounding
// changes.
#pragma once
#include "optimizer/orthogonalize.cuh" // struct newton_schulz
#include "test/testing.h"              // test_doubles
#include <float.h>                     // DBL_EPSILON
#include <string.h>                    // memcpy

// A matrix of `length` rows and `side` <= length columns: the sum over c of values[c] left[c] right[c]^T. Vectors are
// stored one after another.
struct svd {
    int length, side;
    double *left, *right, *values; // (side, length), (side, side), (side)
};
// (x, y) = (cosine x - sine y, sine x + cosine y), both of n elements.
static void svd_rotate(double *x, double *y, int n, double cosine, double sine) {
    for (int i = 0; i < n; i++) {
        const double before = x[i];
        x[i] = cosine * before - sine * y[i];
        y[i] = sine * before + cosine * y[i];
    }
}
// Rotates columns p and q of s->left until they are orthogonal; returns the cosine of the angle that they had.
static double svd_orthogonalize_pair(struct svd *s, int p, int q) {
    double *x = s->left + (int64_t)p * s->length, *y = s->left + (int64_t)q * s->length, xx = 0, yy = 0, xy = 0;
    for (int i = 0; i < s->length; i++) {
        xx += x[i] * x[i];
        yy += y[i] * y[i];
        xy += x[i] * y[i];
    }
    if (xx == 0 || yy == 0 || fabs(xy) <= DBL_EPSILON * sqrt(xx * yy))
        return 0;
    const double zeta = (yy - xx) / (2 * xy), t = (zeta >= 0 ? 1 : -1) / (fabs(zeta) + sqrt(1 + zeta * zeta));
    const double cosine = 1 / sqrt(1 + t * t);
    svd_rotate(x, y, s->length, cosine, cosine * t);
    svd_rotate(s->right + (int64_t)p * s->side, s->right + (int64_t)q * s->side, s->side, cosine, cosine * t);
    return fabs(xy) / sqrt(xx * yy);
}
// Computes the decomposition of x (rows, cols), transposed where it has more columns than rows. svd_free frees the
// result.
static struct svd svd_of(const double *x, int rows, int cols) {
    const bool tall = rows >= cols;
    struct svd s = {tall ? rows : cols, tall ? cols : rows, NULL, NULL, NULL};
    s.left = test_doubles((int64_t)s.side * s.length);
    s.right = test_doubles((int64_t)s.side * s.side);
    s.values = test_doubles(s.side);
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++)
            s.left[tall ? (int64_t)j * rows + i : (int64_t)i * cols + j] = x[(int64_t)i * cols + j];
    for (int i = 0; i < s.side; i++)
        s.right[(int64_t)i * s.side + i] = 1;
    for (int sweep = 0, done = 0; sweep < 60 && !done; sweep++) {
        double worst = 0;
        for (int p = 0; p < s.side; p++)
            for (int q = p + 1; q < s.side; q++)
                worst = fmax(worst, svd_orthogonalize_pair(&s, p, q));
        done = worst < 1e-14;
    }
    for (int c = 0; c < s.side; c++) {
        double squares = 0;
        for (int i = 0; i < s.length; i++)
            squares += s.left[(int64_t)c * s.length + i] * s.left[(int64_t)c * s.length + i];
        s.values[c] = sqrt(squares);
        for (int i = 0; i < s.length && squares > 0; i++)
            s.left[(int64_t)c * s.length + i] /= s.values[c];
    }
    return s;
}
static void svd_free(struct svd *s) {
    free(s->left);
    free(s->right);
    free(s->values);
}

static double newton_schulz_value(double x, struct newton_schulz_step p) {
    return x * (p.a + p.b * x * x + p.c * x * x * x * x);
}
// out (rows, cols) = the iteration of x (rows, cols) in exact arithmetic.
static void newton_schulz_exact(double *out, const double *x, int rows, int cols, const struct newton_schulz *ns) {
    struct svd s = svd_of(x, rows, cols);
    double squares = 0;
    for (int c = 0; c < s.side; c++)
        squares += s.values[c] * s.values[c];
    for (int c = 0; c < s.side; c++) {
        s.values[c] = squares > 0 ? s.values[c] / (ns->divisor * sqrt(squares)) : 0;
        for (int k = 0; k < ns->steps; k++)
            s.values[c] = newton_schulz_value(s.values[c], newton_schulz_step_of(ns, k));
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) {
            double sum = 0;
            for (int c = 0; c < s.side; c++)
                sum += s.values[c] * s.left[(int64_t)c * s.length + (rows >= cols ? i : j)] *
                       s.right[(int64_t)c * s.side + (rows >= cols ? j : i)];
            out[(int64_t)i * cols + j] = sum;
        }
    svd_free(&s);
}

// ---- What rounding does ----

// out (rows, cols) = a b^T, or with `plain` a b; a (rows, depth), b (cols, depth), with `plain` (depth, cols). Each
// number is off at random by up to `rounding` of itself, and by `summing` times sqrt(depth) times the norm of its
// products.
static void rounded_product(double *out, const double *a, const double *b, bool plain, int rows, int cols, int depth,
                            double rounding, double summing, uint64_t *random) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) {
            double sum = 0, squares = 0;
            for (int k = 0; k < depth; k++) {
                const double x = a[(int64_t)i * depth + k] * b[plain ? (int64_t)k * cols + j : (int64_t)j * depth + k];
                sum += x;
                squares += x * x;
            }
            sum += summing * sqrt(depth * squares) * test_uniform(random);
            out[(int64_t)i * cols + j] = sum * (1 + rounding * test_uniform(random));
        }
}
// Iterates x (side, length), side <= length, in place, with a random relative error on all that floatX or a sum in fp32
// rounds.
static void newton_schulz_rounded(double *x, int side, int length, const struct newton_schulz *ns, uint64_t *random) {
    const double summing = 0x1p-24, u = FLOATX_ROUNDING;
    double *gram = test_doubles((int64_t)side * side), *power = test_doubles((int64_t)side * side),
           *next = test_doubles((int64_t)side * length), squares = 0;
    const int64_t n = (int64_t)side * length;
    for (int64_t i = 0; i < n; i++)
        squares += x[i] * x[i];
    for (int64_t i = 0; i < n; i++)
        x[i] = squares > 0 ? x[i] / (ns->divisor * sqrt(squares)) * (1 + u * test_uniform(random)) : 0;
    for (int step = 0; step < ns->steps; step++) {
        const struct newton_schulz_step p = newton_schulz_step_of(ns, step);
        rounded_product(gram, x, x, false, side, side, length, u, summing, random);
        rounded_product(power, gram, gram, false, side, side, side, u, summing, random);
        for (int64_t i = 0; i < (int64_t)side * side; i++)
            power[i] =
                ((i % (side + 1) == 0 ? p.a : 0) + p.b * gram[i] + p.c * power[i]) * (1 + u * test_uniform(random));
        rounded_product(next, power, x, true, side, length, side, u, summing, random);
        memcpy(x, next, (size_t)n * sizeof *x);
    }
    free(gram);
    free(power);
    free(next);
}
// Returns how far rounding moves the iteration of x (rows, cols) from `exact` (rows, cols), relative, in the norm: the
// root mean square over runs with random errors (Monte Carlo arithmetic: Parker, UCLA CSD-970002, 1997).
static double newton_schulz_deviation(const double *x, const double *exact, int rows, int cols,
                                      const struct newton_schulz *ns) {
    enum { DRAWS = 8 };
    const int64_t n = (int64_t)rows * cols;
    const bool tall = rows > cols;
    double *y = test_doubles(n), *expected = test_doubles(n), sum = 0;
    uint64_t random = 77;
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++)
            expected[tall ? (int64_t)j * rows + i : (int64_t)i * cols + j] = exact[(int64_t)i * cols + j];
    for (int draw = 0; draw < DRAWS; draw++) {
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < cols; j++)
                y[tall ? (int64_t)j * rows + i : (int64_t)i * cols + j] = x[(int64_t)i * cols + j];
        newton_schulz_rounded(y, tall ? cols : rows, tall ? rows : cols, ns, &random);
        const double error = relative_error(y, expected, n);
        sum += error * error;
    }
    free(y);
    free(expected);
    return sqrt(sum / DRAWS);
}
