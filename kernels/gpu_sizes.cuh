// Sizes of the CUDA kernels' workspace and partial sums, which memory plans count with, and the shapes and FP8
// granularities that the kernels take. All is host arithmetic in every build: kernels take their grids from it, and a
// build without CUDA plans a GPU's memory by it, to the byte. NAME_workspace_bytes are for the device at hand.
#pragma once
#include "kernels/attention/shape.cuh" // struct attention_shape
#include "kernels/device.cuh"          // floatX, struct compute_capability
#include "kernels/fp8/fp8.cuh"         // enum fp8_granularity
#include "kernels/qk_norm.cuh"         // struct qk_norm_shape
#include <stdio.h>                     // snprintf

// ---- products ----

enum {
    GPU_MATMUL_BYTES = 32 << 20, // scratch that cuBLASLt's algorithms may ask for: what NVIDIA recommends for sm_90
    GPU_DBIAS_ROWS = 128,        // rows of a partial sum of a bias gradient
};
static inline size_t gpu_dbias_bytes(int64_t M, int N) {
    return (size_t)((M + GPU_DBIAS_ROWS - 1) / GPU_DBIAS_ROWS) * (size_t)N * sizeof(float);
}

// Whether FP8 products of this granularity are refused: in every fp32 build, and on a GPU that can't do them. gpu.major
// 0, an unknown GPU, is not refused. Where refused, writes why, and the option to change, to text (n bytes).
static inline bool gpu_refuses_fp8(char *text, size_t n, enum fp8_granularity granularity,
                                   struct compute_capability gpu) {
    const int capability = gpu.major * 10 + gpu.minor;
    if (sizeof(floatX) == sizeof(float))
        snprintf(text, n, "FP8 products write bf16: --fp8-format needs --precision bf16");
    else if (gpu.major == 0)
        return false;
    else if (capability < 89)
        snprintf(text, n,
                 "FP8 needs a GPU of compute capability 8.9 or more, and this one has %d.%d: leave out "
                 "--fp8-format",
                 gpu.major, gpu.minor);
    else if (granularity != FP8_PER_TENSOR && capability != 90)
        snprintf(text, n,
                 "FP8 scales of blocks need a GPU of compute capability 9.0, and this one has %d.%d: leave out "
                 "--fp8-recipe blockwise",
                 gpu.major, gpu.minor);
    else
        return false;
    return true;
}

// ---- norms ----

enum {
    GPU_PACK = 16 / (int)sizeof(floatX), // elements of one access
    GPU_SMS = 132,                       // streaming multiprocessors that runs of rows fill: an H100's or H200's
};
// A thread of norm_backward holds, besides its packs of two rows, sums for dweight and dbias, twice GPU_PACK registers
// a pack in bf16. So a warp takes rows of up to 3 packs a lane; longer rows take threads of 2 packs each.
enum { NORM_BACKWARD_WARP_PACKS = 3, NORM_BACKWARD_PACKS = 2 };
static inline int norm_backward_row_threads(int C) {
    if (C <= NORM_BACKWARD_WARP_PACKS * 32 * GPU_PACK)
        return 32;
    int threads = 128;
    while (threads < 512 && C > NORM_BACKWARD_PACKS * threads * GPU_PACK)
        threads *= 2;
    return threads;
}
// The number of runs that norm_backward cuts N rows into; a block takes one run. It is N / 16, or N / 4 where
// norm_backward_row_threads is more than 32, but no more than 2 for each of GPU_SMS, or 4 for each where
// norm_backward_row_threads is 128. Only the sizes decide, so that all GPUs give the same bits.
static inline int64_t gpu_norm_backward_num_runs(int64_t N, int C) {
    const int threads = norm_backward_row_threads(C);
    const int64_t most = threads == 128 ? 4 * GPU_SMS : 2 * GPU_SMS,
                  runs = (N + (threads == 32 ? 15 : 3)) / (threads == 32 ? 16 : 4);
    return runs < most ? runs : most;
}
static inline size_t gpu_norm_backward_bytes(int64_t N, int C) {
    return (size_t)gpu_norm_backward_num_runs(N, C) * 2 * (size_t)C * sizeof(float);
}
// Rows that a lane of norm_forward_fp8 holds in 16 packs. Longer rows are stored in floatX, in the workspace.
enum { GPU_NORM_FP8_COLUMNS = 16 * 32 * GPU_PACK };
static inline size_t gpu_norm_fp8_bytes(int64_t N, int C) {
    return C <= GPU_NORM_FP8_COLUMNS ? 0 : (size_t)(N * C) * sizeof(floatX);
}
static inline int residual_backward_column_blocks(int C) { return (C + 32 * GPU_PACK - 1) / (32 * GPU_PACK); }
// The number of runs of rows of residual_backward: N / 16, but no more than make 64 warps on each of GPU_SMS.
static inline int64_t gpu_residual_backward_num_runs(int64_t N, int C) {
    const int blocks = residual_backward_column_blocks(C);
    const int64_t most = (8 * GPU_SMS + blocks - 1) / blocks, chunks = (N + 15) / 16;
    return chunks < most ? chunks : most;
}
// The number of runs that qk_norm_backward cuts N tokens into, a block a run; it depends only on the sizes.
static inline int64_t gpu_qk_norm_backward_num_runs(int64_t N, struct qk_norm_shape shape) {
    const int64_t most = (shape.full_width ? 2 : 4) * GPU_SMS, runs = (N + 3) / 4;
    return runs < most ? runs : most;
}
static inline size_t gpu_qk_norm_backward_bytes(int64_t N, struct qk_norm_shape shape) {
    const struct qk_rows rows = qk_rows_of(shape);
    return (size_t)gpu_qk_norm_backward_num_runs(N, shape) * (size_t)(rows.q_width + rows.k_width) * sizeof(float);
}

// ---- embedding and gradients ----

// The number of sort keys of the embedding's backward: the smallest power of two, from 2 on, that is B T or more.
static inline int64_t embedding_sort_size(int B, int T) {
    int64_t size = 2;
    while (size < (int64_t)B * T)
        size *= 2;
    return size;
}
static inline size_t gpu_embedding_backward_bytes(int B, int T) {
    return (size_t)embedding_sort_size(B, T) * sizeof(uint64_t);
}
// Blocks of a sum of squares, each with a partial sum: the same number on all GPUs, and so the same bits.
enum { SQUARES_BLOCKS = 1024 };
static inline size_t gpu_squares_bytes(int ranges) { return (size_t)ranges * SQUARES_BLOCKS * sizeof(double); }

// ---- attention ----

// The instructions of attention's kernels, for the report.
#define GPU_FLASH_NAME (sizeof(floatX) == 2 ? "mma.sync bf16" : "mma.sync 3xTF32")
#define GPU_SM90_NAME "wgmma bf16"
enum { FLASH_MAX_HEAD_DIM = 256 }; // the largest tile of attention/sm80.cu
// Writes to `reason` (size bytes) why attention/sm80.cu can't take the shape; an empty text where it can.
static inline void gpu_flash_unavailable_reason(char *reason, size_t size, struct attention_shape shape) {
    reason[0] = 0;
    if (shape.head_dim % 8 != 0 || shape.head_dim > FLASH_MAX_HEAD_DIM)
        snprintf(reason, size, "takes heads of a multiple of 8 up to %d, not %d", FLASH_MAX_HEAD_DIM, shape.head_dim);
    else if (shape.B > 65535 || shape.num_heads > 65535) // the grid's other dimensions
        snprintf(reason, size, "takes at most 65535 sequences and heads: lower --micro-batch-size");
}
// Whether unfused attention, with its T x T probabilities, is predicted to be faster on a GPU than attention/sm80.cu:
// in fp32 on 8.6, 8.9 and 12.x, where FMA units do more than a third of what tensor cores do with TF32.
static inline bool gpu_flash_is_slower(struct compute_capability gpu) {
    return sizeof(floatX) == 4 && ((gpu.major == 8 && (gpu.minor == 6 || gpu.minor == 9)) || gpu.major == 12);
}
static inline size_t gpu_flash_backward_bytes(struct attention_shape shape) {
    return 2 * sizeof(float) * (size_t)shape.B * (size_t)shape.num_heads * (size_t)shape.T;
}
static inline size_t gpu_unfused_backward_bytes(struct attention_shape shape) {
    return (size_t)shape.B * shape.num_heads * shape.T * shape.T * sizeof(floatX);
}

// Writes to `reason` (size bytes) why the kernels by wgmma can't take the shape; an empty text where they can.
static inline void sm90_shape_unavailable_reason(char *reason, size_t size, struct attention_shape shape) {
    const int D = shape.head_dim;
    reason[0] = 0;
    if (D != 64 && D != 96 && D != 128 && D != 256)
        snprintf(reason, size, "takes heads of 64, 96, 128 or 256, not %d", D);
    else if (shape.softcap > 0)
        snprintf(reason, size, "has no --attn-logit-softcapping");
}
// Writes to `reason` (size bytes) why attention by wgmma in bf16 can't take the shape on this GPU; an empty text where
// it can. A gpu.major of 0 means that no GPU is here: that is a reason too.
static inline void gpu_sm90_unavailable_reason(char *reason, size_t size, struct attention_shape shape,
                                               struct compute_capability gpu) {
    sm90_shape_unavailable_reason(reason, size, shape);
    if (*reason)
        return;
    if (gpu.major == 0)
        snprintf(reason, size, "needs compute capability 9.0, and no GPU is here");
    else if (gpu.major != 9 || gpu.minor != 0)
        snprintf(reason, size, "needs compute capability 9.0, not %d.%d", gpu.major, gpu.minor);
}
enum { SM90_FORWARD_QUERIES_OF_64 = 192, SM90_FORWARD_QUERIES = 128 };
enum { SM90_BACKWARD_QUERIES_OF_64 = 128, SM90_BACKWARD_QUERIES = 64 };
struct sm90_forward_item {
    int head, first; // b H + h; row
};
// Returns the bytes of workspace of attention's forward by wgmma, which holds the order in which tiles are taken.
static inline size_t gpu_sm90_forward_bytes(struct attention_shape shape) {
    const int queries = shape.head_dim == 64 ? SM90_FORWARD_QUERIES_OF_64 : SM90_FORWARD_QUERIES;
    const size_t blocks = ((size_t)shape.T + queries - 1) / queries;
    return (size_t)shape.B * shape.num_heads * blocks * sizeof(struct sm90_forward_item);
}
struct sm90_backward_layout {
    size_t tiles, dq_bytes, rows_bytes, counters_bytes;
};
static inline struct sm90_backward_layout sm90_backward_layout_of(struct attention_shape shape) {
    struct sm90_backward_layout layout;
    const size_t queries = shape.head_dim == 64 ? SM90_BACKWARD_QUERIES_OF_64 : SM90_BACKWARD_QUERIES;
    layout.tiles = ((size_t)shape.T + queries - 1) / queries;
    const size_t tiles = (size_t)shape.B * (size_t)shape.num_heads * layout.tiles;
    layout.dq_bytes = tiles * queries * (size_t)shape.head_dim * sizeof(float);
    layout.rows_bytes = tiles * queries * 2 * sizeof(float);
    layout.counters_bytes = tiles * sizeof(int);
    return layout;
}
static inline size_t gpu_sm90_backward_bytes(struct attention_shape shape) {
    const struct sm90_backward_layout layout = sm90_backward_layout_of(shape);
    return layout.dq_bytes + layout.rows_bytes + layout.counters_bytes;
}
// The number of runs of rows over which attention's backward by wgmma sums dqkv's columns.
static inline int64_t gpu_sm90_bias_num_runs(struct attention_shape shape) {
    return (int64_t)shape.B * (int64_t)sm90_backward_layout_of(shape).tiles;
}
