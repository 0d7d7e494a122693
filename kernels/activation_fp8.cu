#include "kernels/activation_fp8.cuh"
#include "kernels/activation_functions.cuh" // gelu, silu, vecs_gelu, ...
#include "kernels/fp8/tiles.cuh"            // fp8_cast_tiles
#include "kernels/packed_floats.cuh"        // packed_from_floats

#ifdef TARGET_CUDA

// Merges the largest magnitude of from's outputs, each (M, N), into scale->amax, unless scale->delayed is set (not 0).
template <class source>
static __global__ void __launch_bounds__(FP8_TILE_THREADS)
    activation_amax_kernel(struct fp8_scale *scale, const source from, int64_t M, int64_t N) {
    if (scale->delayed != 0)
        return;
    const int64_t across = (N + FP8_TILE - 1) / FP8_TILE, tiles = across * ((M + FP8_TILE - 1) / FP8_TILE);
    uint32_t amax = 0;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const struct fp8_place at = fp8_thread_place(tile / across * FP8_TILE, tile % across * FP8_TILE);
        if (at.row >= M || at.column >= N)
            continue;
        typename source::loaded in[FP8_THREAD_ROWS];
#pragma unroll
        for (int r = 0; r < FP8_THREAD_ROWS; r++)
            in[r] = from.load(at.row + r, at.column);
#pragma unroll
        for (int r = 0; r < FP8_THREAD_ROWS; r++) {
            struct fp8_eight values[source::OUTPUTS];
            from.values(values, in[r]);
#pragma unroll
            for (int o = 0; o < source::OUTPUTS; o++)
                amax = fp8_eight_amax(amax, values[o]);
        }
    }
    amax_merge_block(&scale->amax, amax, shared_memory());
}
// Casts the source's outputs, each (N, F), side by side into one FP8 matrix, and merges their amax into to.scale->amax.
// The scale is to.scale->delayed or, if that is 0, made of the amax. workspace may be NULL where to.dbias is NULL.
template <class source>
static void activation_cast(struct fp8_cast to, const source &from, int64_t N, int F, void *workspace,
                            struct device *dev) {
    const int64_t tiles = fp8_tiles(N) * fp8_tiles(F);
    LAUNCH(dev, activation_amax_kernel<source>, tiles < FP8_AMAX_BLOCKS ? (unsigned)tiles : (unsigned)FP8_AMAX_BLOCKS,
           FP8_TILE_THREADS, AMAX_BLOCK_BYTES, to.scale, from, N, (int64_t)F);
    fp8_cast_tiles(to, from, N, F, workspace, dev);
}

// What the sources below read: dout (N, F), NULL in forward, and `in`, (N, F) or, of a gated activation, (N, 2F).
struct activation_arrays {
    const floatX *dout, *in;
    int64_t F;
};
struct activation_eight {
    struct fp8_eight dout, x;
};
struct gate_up_eight {
    struct fp8_eight gate, up;
};
struct gated_eight {
    struct fp8_eight dout, gate, up;
};

// Rounds eight numbers to floatX, as ops do to their results before a cast to FP8.
DEVICE_FUNCTION struct fp8_eight fp8_eight_rounded(const float (&x)[FP8_THREAD_COLUMNS]) {
    struct fp8_eight result;
#pragma unroll
    for (int k = 0; k < FP8_THREAD_COLUMNS; k += PACK) {
        struct packed_floats part;
        memcpy(&part, &x[k], sizeof part);
        const struct packed rounded = packed_from_floats(part);
        memcpy(&result.x[k], &rounded, sizeof rounded);
    }
    return result;
}

#define POINTWISE_ACTIVATION_FP8(name)                                                                                 \
    struct name##_forward_source {                                                                                     \
        enum { OUTPUTS = 1, TAKES_AMAX = 1 };                                                                          \
        typedef struct fp8_eight loaded;                                                                               \
        struct activation_arrays a;                                                                                    \
        __device__ __forceinline__ loaded load(int64_t row, int64_t column) const {                                    \
            return fp8_eight_load(a.in + row * a.F + column);                                                          \
        }                                                                                                              \
        __device__ __forceinline__ void values(struct fp8_eight out[OUTPUTS], const loaded &in) const {                \
            float y[FP8_THREAD_COLUMNS];                                                                               \
            for (int i = 0; i < FP8_THREAD_COLUMNS; i++)                                                               \
                y[i] = name(to_float(in.x[i]));                                                                        \
            out[0] = fp8_eight_rounded(y);                                                                             \
        }                                                                                                              \
    };                                                                                                                 \
    struct name##_backward_source {                                                                                    \
        enum { OUTPUTS = 1, TAKES_AMAX = 1 };                                                                          \
        typedef struct activation_eight loaded;                                                                        \
        struct activation_arrays a;                                                                                    \
        __device__ __forceinline__ loaded load(int64_t row, int64_t column) const {                                    \
            const int64_t at = row * a.F + column;                                                                     \
            const loaded result = {fp8_eight_load(a.dout + at), fp8_eight_load(a.in + at)};                            \
            return result;                                                                                             \
        }                                                                                                              \
        __device__ __forceinline__ void values(struct fp8_eight out[OUTPUTS], const loaded &in) const {                \
            float y[FP8_THREAD_COLUMNS];                                                                               \
            for (int i = 0; i < FP8_THREAD_COLUMNS; i++)                                                               \
                y[i] = to_float(in.dout.x[i]) * name##_derivative(to_float(in.x.x[i]));                                \
            out[0] = fp8_eight_rounded(y);                                                                             \
        }                                                                                                              \
    };                                                                                                                 \
    ACTIVATION_FP8(name)

#define GATED_ACTIVATION_FP8(name, function)                                                                           \
    struct name##_forward_source {                                                                                     \
        enum { OUTPUTS = 1, TAKES_AMAX = 1 };                                                                          \
        typedef struct gate_up_eight loaded;                                                                           \
        struct activation_arrays a;                                                                                    \
        __device__ __forceinline__ loaded load(int64_t row, int64_t column) const {                                    \
            const int64_t at = row * 2 * a.F + column;                                                                 \
            const loaded result = {fp8_eight_load(a.in + at), fp8_eight_load(a.in + at + a.F)};                        \
            return result;                                                                                             \
        }                                                                                                              \
        __device__ __forceinline__ void values(struct fp8_eight out[OUTPUTS], const loaded &in) const {                \
            float y[FP8_THREAD_COLUMNS];                                                                               \
            for (int i = 0; i < FP8_THREAD_COLUMNS; i++)                                                               \
                y[i] = function(to_float(in.gate.x[i])) * to_float(in.up.x[i]);                                        \
            out[0] = fp8_eight_rounded(y);                                                                             \
        }                                                                                                              \
    };                                                                                                                 \
    struct name##_backward_source {                                                                                    \
        enum { OUTPUTS = 2, TAKES_AMAX = 1 };                                                                          \
        typedef struct gated_eight loaded;                                                                             \
        struct activation_arrays a;                                                                                    \
        __device__ __forceinline__ loaded load(int64_t row, int64_t column) const {                                    \
            const int64_t at = row * 2 * a.F + column;                                                                 \
            const loaded result = {fp8_eight_load(a.dout + row * a.F + column), fp8_eight_load(a.in + at),             \
                                   fp8_eight_load(a.in + at + a.F)};                                                   \
            return result;                                                                                             \
        }                                                                                                              \
        __device__ __forceinline__ void values(struct fp8_eight out[OUTPUTS], const loaded &in) const {                \
            float gate[FP8_THREAD_COLUMNS], up[FP8_THREAD_COLUMNS];                                                    \
            for (int i = 0; i < FP8_THREAD_COLUMNS; i++) {                                                             \
                const float g = to_float(in.gate.x[i]), d = to_float(in.dout.x[i]);                                    \
                const struct gate_gradient of_gate = function##_gradient(g);                                           \
                gate[i] = d * to_float(in.up.x[i]) * of_gate.derivative;                                               \
                up[i] = d * g * of_gate.s;                                                                             \
            }                                                                                                          \
            out[0] = fp8_eight_rounded(gate);                                                                          \
            out[1] = fp8_eight_rounded(up);                                                                            \
        }                                                                                                              \
    };                                                                                                                 \
    ACTIVATION_FP8(name)

#define ACTIVATION_FP8(name)                                                                                           \
    void name##_forward_fp8(struct fp8_cast to, const floatX *fc, int64_t N, int F, void *workspace,                   \
                            struct device *dev) {                                                                      \
        const struct name##_forward_source from = {{NULL, fc, F}};                                                     \
        activation_cast(to, from, N, F, workspace, dev);                                                               \
    }                                                                                                                  \
    void name##_backward_fp8(struct fp8_cast to, const floatX *dact, const floatX *fc, int64_t N, int F,               \
                             void *workspace, struct device *dev) {                                                    \
        const struct name##_backward_source from = {{dact, fc, F}};                                                    \
        activation_cast(to, from, N, F, workspace, dev);                                                               \
    }

#else

// Casts 1 or 2 `outputs`, each (N, F), which `fill` computes from `from`, as the cuda target's activation_cast does.
static void activation_cast(struct fp8_cast to, fp8_fill_tiles *fill, const void *from, int outputs, int64_t N, int F,
                            void *workspace, struct device *dev) {
    const bool delayed = to.scale->delayed != 0;
    if (!delayed)
        fp8_amax_tiles(&to.scale->amax, fill, from, outputs, N, F);
    fp8_cast_tiles(to, fill, from, outputs, delayed, N, F, workspace, dev);
}

struct activation_arrays {
    const floatX *dout, *in; // dout: NULL in forward; in: of a gated activation gate and up (N, 2F)
    int64_t F;
};

// Elements are taken by groups of FLOATX_GROUP, as in the ops of activation.cuh, so that results have the same bits.
#define POINTWISE_ACTIVATION_FP8(name)                                                                                 \
    static __attribute__((noinline)) void name##_forward_fill(floatX *tiles, const void *from, int64_t row,            \
                                                              int64_t column, int rows, int columns) {                 \
        const struct activation_arrays *a = (const struct activation_arrays *)from;                                    \
        for (int r = 0; r < rows; r++)                                                                                 \
            for (int c = 0; c < columns; c += FLOATX_GROUP) {                                                          \
                const floatX *in = a->in + (row + r) * a->F + column + c;                                              \
                floatX x[FLOATX_GROUP], *out = tiles + r * FP8_TILE + c;                                               \
                if (columns - c >= FLOATX_GROUP) {                                                                     \
                    name##_forward_group(out, in);                                                                     \
                    continue;                                                                                          \
                }                                                                                                      \
                floatx_pad(x, in, columns - c, 0);                                                                     \
                name##_forward_group(x, x);                                                                            \
                memcpy(out, x, (size_t)(columns - c) * sizeof *x);                                                     \
            }                                                                                                          \
    }                                                                                                                  \
    static __attribute__((noinline)) void name##_backward_fill(floatX *tiles, const void *from, int64_t row,           \
                                                               int64_t column, int rows, int columns) {                \
        const struct activation_arrays *a = (const struct activation_arrays *)from;                                    \
        for (int r = 0; r < rows; r++)                                                                                 \
            for (int c = 0; c < columns; c += FLOATX_GROUP) {                                                          \
                const int64_t at = (row + r) * a->F + column + c;                                                      \
                floatX x[FLOATX_GROUP], d[FLOATX_GROUP], *out = tiles + r * FP8_TILE + c;                              \
                if (columns - c >= FLOATX_GROUP) {                                                                     \
                    name##_backward_group(out, a->dout + at, a->in + at);                                              \
                    continue;                                                                                          \
                }                                                                                                      \
                floatx_pad(x, a->in + at, columns - c, 0);                                                             \
                floatx_pad(d, a->dout + at, columns - c, 0);                                                           \
                name##_backward_group(d, d, x);                                                                        \
                memcpy(out, d, (size_t)(columns - c) * sizeof *d);                                                     \
            }                                                                                                          \
    }                                                                                                                  \
    ACTIVATION_FP8(name, 1)

#define GATED_ACTIVATION_FP8(name, function)                                                                           \
    static __attribute__((noinline)) void name##_forward_fill(floatX *tiles, const void *from, int64_t row,            \
                                                              int64_t column, int rows, int columns) {                 \
        const struct activation_arrays *a = (const struct activation_arrays *)from;                                    \
        for (int r = 0; r < rows; r++)                                                                                 \
            for (int c = 0; c < columns; c += FLOATX_GROUP) {                                                          \
                const floatX *in = a->in + (row + r) * 2 * a->F + column + c;                                          \
                floatX gate[FLOATX_GROUP], up[FLOATX_GROUP], *out = tiles + r * FP8_TILE + c;                          \
                if (columns - c >= FLOATX_GROUP) {                                                                     \
                    name##_forward_group(out, in, in + a->F);                                                          \
                    continue;                                                                                          \
                }                                                                                                      \
                floatx_pad(gate, in, columns - c, 0);                                                                  \
                floatx_pad(up, in + a->F, columns - c, 0);                                                             \
                name##_forward_group(gate, gate, up);                                                                  \
                memcpy(out, gate, (size_t)(columns - c) * sizeof *gate);                                               \
            }                                                                                                          \
    }                                                                                                                  \
    static __attribute__((noinline)) void name##_backward_fill(floatX *tiles, const void *from, int64_t row,           \
                                                               int64_t column, int rows, int columns) {                \
        const struct activation_arrays *a = (const struct activation_arrays *)from;                                    \
        for (int r = 0; r < rows; r++)                                                                                 \
            for (int c = 0; c < columns; c += FLOATX_GROUP) {                                                          \
                const floatX *in = a->in + (row + r) * 2 * a->F + column + c;                                          \
                const floatX *dout = a->dout + (row + r) * a->F + column + c;                                          \
                floatX gate[FLOATX_GROUP], up[FLOATX_GROUP], d[FLOATX_GROUP];                                          \
                floatX *dgate = tiles + r * FP8_TILE + c, *dup = dgate + FP8_TILE_ELEMENTS;                            \
                if (columns - c >= FLOATX_GROUP) {                                                                     \
                    name##_backward_group(dgate, dup, dout, in, in + a->F);                                            \
                    continue;                                                                                          \
                }                                                                                                      \
                floatx_pad(gate, in, columns - c, 0);                                                                  \
                floatx_pad(up, in + a->F, columns - c, 0);                                                             \
                floatx_pad(d, dout, columns - c, 0);                                                                   \
                name##_backward_group(gate, up, d, gate, up);                                                          \
                memcpy(dgate, gate, (size_t)(columns - c) * sizeof *gate);                                             \
                memcpy(dup, up, (size_t)(columns - c) * sizeof *up);                                                   \
            }                                                                                                          \
    }                                                                                                                  \
    ACTIVATION_FP8(name, 2)

#define ACTIVATION_FP8(name, gradients)                                                                                \
    void name##_forward_fp8(struct fp8_cast to, const floatX *fc, int64_t N, int F, void *workspace,                   \
                            struct device *dev) {                                                                      \
        const struct activation_arrays from = {NULL, fc, F};                                                           \
        activation_cast(to, name##_forward_fill, &from, 1, N, F, workspace, dev);                                      \
    }                                                                                                                  \
    void name##_backward_fp8(struct fp8_cast to, const floatX *dact, const floatX *fc, int64_t N, int F,               \
                             void *workspace, struct device *dev) {                                                    \
        const struct activation_arrays from = {dact, fc, F};                                                           \
        activation_cast(to, name##_backward_fill, &from, gradients, N, F, workspace, dev);                             \
    }

#endif

ACTIVATION_OPS(POINTWISE_ACTIVATION_FP8, GATED_ACTIVATION_FP8)
