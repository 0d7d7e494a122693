// The casts of FP8 attention that kernels/fp8/attention.cuh declares: of packed q, k and v, by a scale each, and back.
// A packed matrix is rows of three runs of columns, q's, k's and v's heads; other matrices have one run.
#include "kernels/amax.cuh"          // amax_with, amax_merge
#include "kernels/fp8/attention.cuh" // the prototypes of what is defined here
#include "kernels/fp8/tiles.cuh"     // vec_fp8_encode

enum { RUNS = 3 };
// The runs of columns of a matrix and the scales of their codes.
struct packed_runs {
    int64_t rows;
    int ends[RUNS]; // the column at which each run ends; the last is the row's width, of which 8 is a divisor
    struct fp8_scale *scales[RUNS];
    enum fp8_format format;
    bool powers_of_two; // casts round scales down to powers of two
};
static struct packed_runs runs_of(struct attention_shape s, struct fp8_scale *const scales[RUNS],
                                  enum fp8_format format, bool powers_of_two) {
    const int q = s.num_heads * s.head_dim, k = s.num_query_groups * s.head_dim;
    const struct packed_runs runs = {
        (int64_t)s.B * s.T, {q, q + k, q + 2 * k}, {scales[0], scales[1], scales[2]}, format, powers_of_two};
    return runs;
}
HOST_DEVICE int run_of_column(const struct packed_runs *runs, int64_t column) {
    return column < runs->ends[0] ? 0 : column < runs->ends[1] ? 1 : 2;
}
// Returns the scale of a run's cast, rounded down to a power of two where runs->powers_of_two. A NaN stays a NaN.
HOST_DEVICE float run_scale(const struct packed_runs *runs, int run) {
    const float scale = fp8_scale_for(runs->scales[run], runs->format);
    uint32_t bits;
    float power;
    memcpy(&bits, &scale, sizeof bits);
    bits &= 0xff800000u;
    memcpy(&power, &bits, sizeof power);
    return runs->powers_of_two && scale == scale ? power : scale;
}

#ifdef TARGET_CUDA

enum { THREADS = 256, BLOCKS = 2048, EACH = 8 }; // columns that a thread takes at a time: 16 bytes of bf16

// Returns the number of blocks for n elements, at most BLOCKS: beyond that each thread takes several groups of EACH.
static unsigned cast_blocks(int64_t n) {
    const unsigned blocks = blocks_for(n, THREADS * EACH);
    return blocks < BLOCKS ? blocks : (unsigned)BLOCKS;
}
static __global__ void __launch_bounds__(THREADS)
    fp8_attention_amax_kernel(const struct packed_runs runs, const floatX *x) {
    const int64_t width = runs.ends[RUNS - 1], n = runs.rows * width, step = (int64_t)gridDim.x * THREADS * EACH;
    uint32_t largest[RUNS] = {0, 0, 0};
    for (int64_t at = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * EACH; at < n; at += step) {
        const uint32_t amax = fp8_eight_amax(0, fp8_eight_load(x + at));
        const int run = run_of_column(&runs, at % width);
#pragma unroll
        for (int i = 0; i < RUNS; i++)
            largest[i] = amax_larger(largest[i], i == run ? amax : 0);
    }
    for (int i = 0; i < RUNS; i++) {
        amax_merge_block(&runs.scales[i]->amax, largest[i], shared_memory());
        __syncthreads();
    }
}
// Casts x by its runs' scales. The grid's first thread also sets these scales' `scale` and `inverse`.
static __global__ void __launch_bounds__(THREADS)
    fp8_attention_cast_kernel(fp8 *codes, const struct packed_runs runs, const floatX *x) {
    const int64_t width = runs.ends[RUNS - 1], n = runs.rows * width, step = (int64_t)gridDim.x * THREADS * EACH;
    const float scales[RUNS] = {run_scale(&runs, 0), run_scale(&runs, 1), run_scale(&runs, 2)};
    if (blockIdx.x == 0 && threadIdx.x == 0)
        for (int i = 0; i < RUNS; i++) {
            runs.scales[i]->scale = scales[i];
            runs.scales[i]->inverse = 1.0f / scales[i];
        }
    for (int64_t at = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * EACH; at < n; at += step) {
        const int run = run_of_column(&runs, at % width);
        const float scale = run == 0 ? scales[0] : run == 1 ? scales[1] : scales[2];
        float sums[FP8_THREAD_COLUMNS] = {0};
        uint32_t words[2];
        fp8_encode_eight(words, sums, fp8_eight_load(x + at), scale, runs.format);
        *(uint2 *)(codes + at) = make_uint2(words[0], words[1]);
    }
}
void fp8_attention_cast(fp8 *qkv8, const floatX *qkv, struct fp8_attention a, bool takes_amax, struct device *dev) {
    const struct packed_runs runs = runs_of(a.shape, a.scales, FP8_E4M3, !a.full);
    const unsigned blocks = cast_blocks(runs.rows * runs.ends[RUNS - 1]);
    if (takes_amax)
        LAUNCH(dev, fp8_attention_amax_kernel, blocks, THREADS, AMAX_BLOCK_BYTES, runs, qkv);
    LAUNCH(dev, fp8_attention_cast_kernel, blocks, THREADS, 0, qkv8, runs, qkv);
}

static __global__ void __launch_bounds__(THREADS)
    fp8_read_back_kernel(floatX *out, const fp8 *codes, const struct packed_runs runs) {
    const int64_t width = runs.ends[RUNS - 1], n = runs.rows * width, step = (int64_t)gridDim.x * THREADS * EACH;
    for (int64_t at = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * EACH; at < n; at += step) {
        const float inverse = runs.scales[run_of_column(&runs, at % width)]->inverse;
        const uint2 eight = *(const uint2 *)(codes + at);
        for (int i = 0; i < EACH; i++) {
            const uint32_t word = i < 4 ? eight.x : eight.y;
            out[at + i] = to_floatX(fp8_decode((fp8)(word >> i % 4 * 8), runs.format) * inverse);
        }
    }
}
static void read_back_runs(floatX *out, const fp8 *codes, const struct packed_runs *runs, struct device *dev) {
    LAUNCH(dev, fp8_read_back_kernel, cast_blocks(runs->rows * runs->ends[RUNS - 1]), THREADS, 0, out, codes, *runs);
}

struct scales_to_set {
    struct fp8_scale *scales[FP8_ATTENTION_TENSORS];
};
static __global__ void fp8_set_scales_kernel(const struct scales_to_set all, int count, enum fp8_format format) {
    const int i = (int)threadIdx.x;
    if (i >= count)
        return;
    const float scale = fp8_scale_for(all.scales[i], format);
    all.scales[i]->scale = scale;
    all.scales[i]->inverse = 1.0f / scale;
}
void fp8_set_scales(struct fp8_scale *const *scales, int count, enum fp8_format format, struct device *dev) {
    struct scales_to_set all;
    memset(&all, 0, sizeof all);
    memcpy(all.scales, scales, (size_t)count * sizeof *scales);
    LAUNCH(dev, fp8_set_scales_kernel, 1u, 32, 0, all, count, format);
}

static __global__ void fp8_attention_scale_lse_kernel(float *out, const float *lse, float factor, int64_t n) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < n)
        out[i] = lse[i] * factor;
}
void fp8_attention_scale_lse(float *out, const float *lse, float factor, int64_t n, struct device *dev) {
    LAUNCH(dev, fp8_attention_scale_lse_kernel, blocks_for(n, THREADS), THREADS, 0, out, lse, factor, n);
}

#else

// Returns the largest fp8_magnitude in one run of `row`'s columns: q's (run 0), k's (1) or v's (2).
static uint32_t run_amax(const struct packed_runs *runs, const floatX *row, int run) {
    const int begin = run == 0 ? 0 : runs->ends[run - 1];
    return amax_elements(row + begin, runs->ends[run] - begin);
}
static void merge_run_amaxes(const struct packed_runs *runs, const floatX *x) {
    uint32_t q = 0, k = 0, v = 0;
#pragma omp parallel for schedule(static) reduction(max : q, k, v)
    for (int64_t row = 0; row < runs->rows; row++) {
        const floatX *elements = x + row * runs->ends[RUNS - 1];
        q = amax_larger(q, run_amax(runs, elements, 0));
        k = amax_larger(k, run_amax(runs, elements, 1));
        v = amax_larger(v, run_amax(runs, elements, 2));
    }
    amax_merge(&runs->scales[0]->amax, q);
    amax_merge(&runs->scales[1]->amax, k);
    amax_merge(&runs->scales[2]->amax, v);
}
void fp8_attention_cast(fp8 *qkv8, const floatX *qkv, struct fp8_attention a, bool takes_amax, struct device *dev) {
    const struct packed_runs runs = runs_of(a.shape, a.scales, FP8_E4M3, !a.full);
    if (takes_amax)
        merge_run_amaxes(&runs, qkv);
    for (int run = 0; run < RUNS; run++) {
        runs.scales[run]->scale = run_scale(&runs, run);
        runs.scales[run]->inverse = 1.0f / runs.scales[run]->scale;
    }
    const int64_t width = runs.ends[RUNS - 1];
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < runs.rows; row++)
        for (int run = 0, c = 0; run < RUNS; run++)
            for (const float scale = runs.scales[run]->scale; c < runs.ends[run]; c += LANES)
                *(vec_bytes_anywhere *)(qkv8 + row * width + c) = __builtin_convertvector(
                    vec_fp8_encode(floatx_load(qkv + row * width + c) * scale, FP8_E4M3), vec_bytes_anywhere);
}

// values[code] = the code's value times the inverse, rounded to floatX
static void fill_values(floatX values[256], enum fp8_format format, float inverse) {
    for (int code = 0; code < 256; code++)
        values[code] = to_floatX(fp8_decode((fp8)code, format) * inverse);
}
static void read_back_runs(floatX *out, const fp8 *codes, const struct packed_runs *runs, struct device *dev) {
    floatX values[RUNS][256];
    for (int run = 0; run < RUNS; run++)
        fill_values(values[run], runs->format, runs->scales[run]->inverse);
    const int64_t width = runs->ends[RUNS - 1];
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < runs->rows; row++)
        for (int run = 0, c = 0; run < RUNS; run++)
            for (; c < runs->ends[run]; c++)
                out[row * width + c] = values[run][codes[row * width + c]];
}

void fp8_set_scales(struct fp8_scale *const *scales, int count, enum fp8_format format, struct device *dev) {
    for (int i = 0; i < count; i++) {
        scales[i]->scale = fp8_scale_for(scales[i], format);
        scales[i]->inverse = 1.0f / scales[i]->scale;
    }
}

void fp8_attention_scale_lse(float *out, const float *lse, float factor, int64_t n, struct device *dev) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++)
        out[i] = lse[i] * factor;
}

#endif

void fp8_attention_read_back(floatX *out, const fp8 *codes, struct fp8_scale *const scales[3], enum fp8_format format,
                             struct attention_shape shape, struct device *dev) {
    const struct packed_runs runs = runs_of(shape, scales, format, false);
    read_back_runs(out, codes, &runs, dev);
}
void fp8_read_back(floatX *out, const fp8 *codes, struct fp8_scale *scale, enum fp8_format format, int64_t n,
                   struct device *dev) {
    const struct packed_runs runs = {n / 16, {16, 16, 16}, {scale, scale, scale}, format, false};
    read_back_runs(out, codes, &runs, dev);
}
