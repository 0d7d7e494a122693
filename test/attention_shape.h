// What tests of attention share: shapes, their arrays' elements, and errors by columns.
#pragma once
#include "kernels/attention/shape.cuh" // struct attention_shape
#include "kernels/device.cuh"          // floatX
#include <math.h>                      // sqrt
#include <string.h>                    // memset

// Returns a shape that asks for no feature.
static inline struct attention_shape shape_of(int B, int T, int num_heads, int num_query_groups, int head_dim) {
    struct attention_shape shape;
    memset(&shape, 0, sizeof shape);
    shape.B = B;
    shape.T = T;
    shape.num_heads = num_heads;
    shape.num_query_groups = num_query_groups;
    shape.head_dim = head_dim;
    shape.scale = (float)(1 / sqrt((double)head_dim));
    return shape;
}
// The number of elements of a token's q, k and v.
static inline int64_t token_elements(struct attention_shape s) {
    return (int64_t)(s.num_heads + 2 * s.num_query_groups) * s.head_dim;
}
static inline int64_t qkv_count(struct attention_shape s) { return (int64_t)s.B * s.T * token_elements(s); }
static inline int64_t out_count(struct attention_shape s) { return (int64_t)s.B * s.T * s.num_heads * s.head_dim; }

// Returns the root of the mean square of x - reference in columns [begin, end) of (rows, width), relative to the
// reference's.
static inline double columns_error(const floatX *x, const double *reference, int64_t rows, int64_t width, int64_t begin,
                                   int64_t end) {
    double errors = 0, squares = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = r * width + begin; i < r * width + end; i++) {
            errors += (to_float(x[i]) - reference[i]) * (to_float(x[i]) - reference[i]);
            squares += reference[i] * reference[i];
        }
    return sqrt(errors / squares);
}
