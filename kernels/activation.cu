#include "kernels/activation.cuh"
#include "kernels/activation_functions.cuh" // gelu, silu, vecs_gelu, ...
#include "kernels/amax.cuh"                 // amax_with_packed, amax_merge_block, amax_merge_elements
#include "kernels/column_sums.cuh"          // column_sums_of_warps
#include "kernels/packed.cuh"               // packed_load_some, packed_store_some
#include "kernels/packed_floats.cuh"        // packed_to_floats, packed_from_floats
#include "kernels/vectors_floatx.cuh"       // vecs_exp, floatx_load, floatx_pad

#ifdef TARGET_CUDA

// Every kernel here moves 4 to 10 bytes of bf16 per element and is meant to be bound by memory: scripts/count_sass.py
// checks the instructions per element. A thread makes one 16-byte access. WHOLE: all rows are whole, aligned accesses.
enum { ACTIVATION_THREADS = 256 };

// Returns the index of this thread's first element: in the whole array or, in activation_grid's grid, in its row.
DEVICE_FUNCTION int64_t activation_first_element(void) {
    return ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * PACK;
}
// Loads a pack in fp32. Unless WHOLE, `from` may have any alignment, and elements from `count` on are 0.
template <bool WHOLE> DEVICE_FUNCTION struct packed_floats activation_load(const floatX *from, int64_t count) {
    return packed_to_floats(WHOLE ? packed_load(from) : packed_load_some(from, count));
}
template <bool WHOLE> DEVICE_FUNCTION void activation_store(floatX *to, const struct packed &value, int64_t count) {
    if (WHOLE)
        packed_store(to, value);
    else
        packed_store_some(to, value, count);
}
// Whether each row of `width` elements of a, b and c consists of whole, aligned packs. NULL counts as aligned.
static inline bool activation_whole(int64_t width, const void *a, const void *b, const void *c) {
    return width % PACK == 0 && packed_aligned(a) && packed_aligned(b) && packed_aligned(c);
}

#define ACTIVATION_LAUNCH(kernel, whole, grid, ...)                                                                    \
    LAUNCH(dev,                                                                                                        \
           (amax != NULL ? (whole) ? kernel<true, true> : kernel<true, false>                                          \
            : (whole) ? kernel<false, true>                                                                            \
                         : kernel<false, false>),                                                                         \
           grid, ACTIVATION_THREADS, amax != NULL ? AMAX_BLOCK_BYTES : 0, __VA_ARGS__, amax)

// Backward with sums of columns: a block takes ACTIVATION_BIAS_ROWS rows of 32 packs, a warp every eighth row.
enum { ACTIVATION_WARPS = ACTIVATION_THREADS / 32, ACTIVATION_STRIP = 32 * PACK };
// Five blocks a multiprocessor, two loads a thread, are 5 MB in flight on an H200; ptxas chooses six, with one load.
#define ACTIVATION_BIAS_BOUNDS __launch_bounds__(ACTIVATION_THREADS, sizeof(floatX) == 2 ? 5 : 4)
// Returns the grid of a backward with sums of columns: x counts the runs of rows, y the strips of columns.
static inline dim3 activation_bias_grid(int64_t N, int F) {
    return dim3((unsigned)activation_bias_num_runs(N), blocks_for(F, ACTIVATION_STRIP));
}
static inline size_t activation_bias_shared_bytes(void) {
    return COLUMN_SUMS_OF_WARPS_BYTES(ACTIVATION_WARPS) + AMAX_BLOCK_BYTES;
}
DEVICE_FUNCTION int64_t activation_bias_end_row(int64_t N) {
    const int64_t end = (int64_t)(blockIdx.x + 1) * ACTIVATION_BIAS_ROWS;
    return end < N ? end : N;
}
template <bool WHOLE>
static __global__ void activation_bias_sums_kernel(float *partial, const floatX *din, int64_t N, int F) {
    const int64_t end = activation_bias_end_row(N);
    const int strip = (int)blockIdx.y * ACTIVATION_STRIP, f = strip + (int)threadIdx.x % 32 * PACK;
    struct packed_floats sums = {};
#pragma unroll 4 // loads in flight
    for (int64_t n = (int64_t)blockIdx.x * ACTIVATION_BIAS_ROWS + threadIdx.x / 32; n < end && f < F;
         n += ACTIVATION_WARPS)
        column_sums_add_pack(&sums, WHOLE ? packed_load(din + n * F + f) : packed_load_some(din + n * F + f, F - f));
    column_sums_of_warps(partial + blockIdx.x * (int64_t)F + strip, sums, F - strip);
}
void activation_bias_sums(float *bias_partial, const floatX *din, int64_t N, int width, struct device *dev) {
    if (bias_partial == NULL)
        return;
    const bool whole = activation_whole(width, din, NULL, NULL);
    LAUNCH(dev, (whole ? activation_bias_sums_kernel<true> : activation_bias_sums_kernel<false>),
           activation_bias_grid(N, width), ACTIVATION_THREADS, activation_bias_shared_bytes(), bias_partial, din, N,
           width);
}

#define POINTWISE_ACTIVATION(name)                                                                                     \
    template <bool AMAX, bool WHOLE>                                                                                   \
    static __global__ void name##_forward_kernel(floatX *out, const floatX *in, int64_t n, uint32_t *amax) {           \
        const int64_t at = activation_first_element();                                                                 \
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
    void name##_forward(floatX *out, const floatX *in, int64_t n, uint32_t *amax, struct device *dev) {                \
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
        const int64_t at = activation_first_element();                                                                 \
        struct packed y = {};                                                                                          \
        if (at < n)                                                                                                    \
            y = name##_backward_pack<WHOLE>(din + at, dout + at, in + at, n - at);                                     \
        if (AMAX)                                                                                                      \
            amax_merge_block(amax, amax_with_packed(0, y), shared_memory());                                           \
    }                                                                                                                  \
    template <bool AMAX, bool WHOLE>                                                                                   \
    static __global__ void ACTIVATION_BIAS_BOUNDS name##_backward_sums_kernel(                                         \
        floatX *din, float *partial, const floatX *dout, const floatX *in, int64_t N, int F, uint32_t *amax) {         \
        const int64_t end = activation_bias_end_row(N);                                                                \
        const int strip = (int)blockIdx.y * ACTIVATION_STRIP, f = strip + (int)threadIdx.x % 32 * PACK;                \
        struct packed_floats sums = {};                                                                                \
        uint32_t largest = 0;                                                                                          \
        for (int64_t n = (int64_t)blockIdx.x * ACTIVATION_BIAS_ROWS + threadIdx.x / 32; n < end && f < F;              \
             n += ACTIVATION_WARPS) {                                                                                  \
            const struct packed y =                                                                                    \
                name##_backward_pack<WHOLE>(din + n * F + f, dout + n * F + f, in + n * F + f, F - f);                 \
            column_sums_add_pack(&sums, y);                                                                            \
            if (AMAX)                                                                                                  \
                largest = amax_with_packed(largest, y, F - f);                                                         \
        }                                                                                                              \
        column_sums_of_warps(partial + blockIdx.x * (int64_t)F + strip, sums, F - strip);                              \
        if (AMAX)                                                                                                      \
            amax_merge_block(amax, largest, shared_memory() + COLUMN_SUMS_OF_WARPS_BYTES(ACTIVATION_WARPS));           \
    }                                                                                                                  \
    void name##_backward(floatX *din, float *bias_partial, const floatX *dout, const floatX *in, int64_t N, int F,     \
                         uint32_t *amax, struct device *dev) {                                                         \
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

// Returns the row that this block, with its neighbors along the grid's x, works on; N or more where there is none left.
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
        const int64_t f = activation_first_element(), n = activation_row_number();                                     \
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
    void name##_forward(floatX *out, const floatX *gate_up, int64_t N, int F, uint32_t *amax, struct device *dev) {    \
        ACTIVATION_LAUNCH(name##_forward_kernel, activation_whole(F, out, gate_up, NULL), activation_grid(N, F), out,  \
                          gate_up, N, F);                                                                              \
    }                                                                                                                  \
    /* Stores a pack of dgate and of dup, at column f of row n, and returns what it stored. */                         \
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
        const int64_t f = activation_first_element(), n = activation_row_number();                                     \
        struct packed_gate_up y = {};                                                                                  \
        if (f < F && n < N)                                                                                            \
            y = name##_backward_pack<WHOLE>(dgate_up, dout, gate_up, n, f, F);                                         \
        if (AMAX)                                                                                                      \
            amax_merge_block(amax, amax_with_packed(amax_with_packed(0, y.gate), y.up), shared_memory());              \
    }                                                                                                                  \
    template <bool AMAX, bool WHOLE>                                                                                   \
    static __global__ void name##_backward_sums_kernel(floatX *dgate_up, float *partial, const floatX *dout,           \
                                                       const floatX *gate_up, int64_t N, int F, uint32_t *amax) {      \
        const int64_t end = activation_bias_end_row(N);                                                                \
        const int strip = (int)blockIdx.y * ACTIVATION_STRIP, f = strip + (int)threadIdx.x % 32 * PACK;                \
        struct packed_floats gate_sums = {}, up_sums = {};                                                             \
        uint32_t largest = 0;                                                                                          \
        for (int64_t n = (int64_t)blockIdx.x * ACTIVATION_BIAS_ROWS + threadIdx.x / 32; n < end && f < F;              \
             n += ACTIVATION_WARPS) {                                                                                  \
            const struct packed_gate_up y = name##_backward_pack<WHOLE>(dgate_up, dout, gate_up, n, f, F);             \
            column_sums_add_pack(&gate_sums, y.gate);                                                                  \
            column_sums_add_pack(&up_sums, y.up);                                                                      \
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
    void name##_backward(floatX *dgate_up, float *bias_partial, const floatX *dout, const floatX *gate_up, int64_t N,  \
                         int F, uint32_t *amax, struct device *dev) {                                                  \
        if (bias_partial == NULL)                                                                                      \
            ACTIVATION_LAUNCH(name##_backward_kernel, activation_whole(F, dgate_up, dout, gate_up),                    \
                              activation_grid(N, F), dgate_up, dout, gate_up, N, F);                                   \
        else                                                                                                           \
            ACTIVATION_BIAS_LAUNCH(name##_backward_sums_kernel, activation_whole(F, dgate_up, dout, gate_up),          \
                                   dgate_up, bias_partial, dout, gate_up, N, F);                                       \
    }

#else

// Sums in a second pass over din. The model on the cpu target passes a NULL bias_partial: its wgrad products sum.
void activation_bias_sums(float *bias_partial, const floatX *din, int64_t N, int width, struct device *dev) {
    if (bias_partial == NULL)
        return;
#pragma omp parallel for schedule(static)
    for (int64_t chunk = 0; chunk < activation_bias_num_runs(N); chunk++) {
        const int64_t end = (chunk + 1) * ACTIVATION_BIAS_ROWS < N ? (chunk + 1) * ACTIVATION_BIAS_ROWS : N;
        float *sums = bias_partial + chunk * width;
        memset(sums, 0, (size_t)width * sizeof *sums);
        for (int64_t n = chunk * ACTIVATION_BIAS_ROWS; n < end; n++)
#pragma omp simd
            for (int c = 0; c < width; c++)
                sums[c] += to_float(din[n * width + c]);
    }
}

enum { ACTIVATION_BLOCK = 16 * FLOATX_GROUP };

#define POINTWISE_ACTIVATION(name)                                                                                     \
    void name##_forward(floatX *out, const floatX *in, int64_t n, uint32_t *amax, struct device *dev) {                \
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
            amax_merge_elements(amax, out + begin, at - begin);                                                        \
        }                                                                                                              \
    }                                                                                                                  \
    void name##_backward(floatX *din, float *bias_partial, const floatX *dout, const floatX *in, int64_t N, int F,     \
                         uint32_t *amax, struct device *dev) {                                                         \
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
            amax_merge_elements(amax, din + begin, at - begin);                                                        \
        }                                                                                                              \
        activation_bias_sums(bias_partial, din, N, F, dev);                                                            \
    }

#define GATED_ACTIVATION(name, function)                                                                               \
    void name##_forward(floatX *out, const floatX *gate_up, int64_t N, int F, uint32_t *amax, struct device *dev) {    \
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
            amax_merge_elements(amax, out + n * F, F);                                                                 \
        }                                                                                                              \
    }                                                                                                                  \
    void name##_backward(floatX *dgate_up, float *bias_partial, const floatX *dout, const floatX *gate_up, int64_t N,  \
                         int F, uint32_t *amax, struct device *dev) {                                                  \
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
            amax_merge_elements(amax, dgate, 2 * (int64_t)F);                                                          \
        }                                                                                                              \
        activation_bias_sums(bias_partial, dgate_up, N, 2 * F, dev);                                                   \
    }

#endif

ACTIVATION_OPS(POINTWISE_ACTIVATION, GATED_ACTIVATION)
