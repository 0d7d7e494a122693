// The products of a linear layer on a GPU, by cuBLASLt, and any bias gradient. cuBLASLt stores matrices by columns, so
// that C (rows, cols) = A B is asked for as C^T (cols, rows) = B^T A^T: our B is its A. A plan is all that one product
// needs besides its pointers: what to compute, three layouts, and the algorithm that was chosen for it
// (kernels/matmul/tuning.cuh), else the heuristics' first. It depends only on the shapes, on whether there is a bias
// and on the pointers' alignment, so that recomputation takes the first forward's algorithm: buffers begin at multiples
// of 256 bytes under every memory plan. Whether the product is added to its output matters to no algorithm.
//
// Epilogues. The bias is added by one. GELU is not fused forward: an epilogue would apply it to the fp32 sums, while
// the backward pass makes it again from the stored sums, rounded to floatX: other bits. What comes with a backward
// product is done by kernels of our own, or, where that was faster, by the product's epilogue ("fused"):
// - The bias gradient, where no kernel that makes dout has summed it, by BGRADB of the product of the weight's
//   gradient: our A, dout^T, is cuBLASLt's B, whose sums over the depth are one for each column of its D, our rows.
//   They have the type of D, fp32. The epilogue overwrites, so that sums to be added go by way of the workspace.
// - GELU's derivative, in its tanh form, by DGELU of the product that makes the activation's gradient, which then is
//   not stored and read in between, nor rounded. Its sums of columns are left to a pass: DGELU_BGRAD rounds to bf16.
//
// FP8 operands both lie by rows, their scales in the device's memory: compute capability 8.9, 9.0 and 12.x take no
// others. Scales of blocks are for 9.0, from 12.9 on: the sum of a block of 128 becomes fp32 before it is scaled, as
// other sums do without `fast`; the tensor cores themselves keep some 13 bits.
#pragma once
#include "kernels/column_sums.cuh"    // column_sums, column_sums_of_warps
#include "kernels/device.cuh"         // struct device, floatX, LAUNCH
#include "kernels/gpu_sizes.cuh"      // GPU_MATMUL_BYTES, gpu_dbias_bytes, gpu_refuses_fp8
#include "kernels/matmul/choices.cuh" // struct matmul_library, struct matmul_plan
#include "kernels/matmul/gemm.cuh"    // struct gemm
#include "kernels/packed.cuh"         // packed_load, packed_load_some
#include "runtime/machine/error.h"    // fail
#include <cublasLt.h>                 // cublasLtMatmul
#include <stdio.h>                    // snprintf
#include <stdlib.h>                   // calloc, free

#if CUBLAS_VERSION < 120400
#error "cuBLASLt of CUDA 12.4 or newer is needed: CUBLASLT_DIR= names the folder that holds its include/ and lib/"
#endif

#define MATMUL_FP8_BLOCKS_VERSION 120900 // of the headers and of the library that have FP8 scales of blocks

static void cublas_check_at(cublasStatus_t status, const char *call, const char *file, int line) {
    if (status != CUBLAS_STATUS_SUCCESS)
        fail("%s:%d: %s: %s", file, line, call, cublasLtGetStatusName(status));
}
#define cublas_check(call) cublas_check_at(call, #call, __FILE__, __LINE__)

// Returns the library's handle, created at the first call, which needs a GPU and ends the program without one.
static cublasLtHandle_t matmul_handle(struct matmul_library *library) {
    if (library->handle == NULL)
        cublas_check(cublasLtCreate(&library->handle));
    return library->handle;
}

struct matmul_library *matmul_create(struct device *dev) {
    struct matmul_library *library = (struct matmul_library *)calloc(1, sizeof *library);
    if (library == NULL)
        fail("no memory for the matmul library's handle");
    const int version = (int)cublasLtGetVersion(); // 130100 is 13.1.0
    snprintf(library->description, sizeof library->description, "cuBLASLt %d.%d.%d %s", version / 10000,
             version / 100 % 100, version % 100, FLOATX_NAME);
    if (dev->open)
        matmul_handle(library);
    return library;
}
void matmul_destroy(struct matmul_library *library) {
    if (library && library->handle)
        cublas_check(cublasLtDestroy(library->handle));
    free(library);
}
const char *matmul_describe(const struct matmul_library *library) { return library->description; }

// ---- plans ----

// Returns the largest power of two, MATMUL_ALIGNMENT at most, that divides the address; of NULL MATMUL_ALIGNMENT.
static int64_t pointer_alignment(const void *pointer) {
    const uintptr_t bits = (uintptr_t)pointer | MATMUL_ALIGNMENT;
    return (int64_t)(bits & -bits);
}

static const cudaDataType_t MATMUL_TYPE = sizeof(floatX) == sizeof(float) ? CUDA_R_32F : CUDA_R_16BF;

static const void *matmul_operand_data(const struct gemm_operand *x) {
    return x->fp8 ? (const void *)x->fp8->codes : (const void *)x->data;
}
static cudaDataType_t matmul_operand_type(const struct gemm_operand *x) {
    return x->fp8 == NULL ? MATMUL_TYPE : x->fp8->format == FP8_E4M3 ? CUDA_R_8F_E4M3 : CUDA_R_8F_E5M2;
}
static enum fp8_granularity matmul_operand_scaling(const struct gemm_operand *x) {
    return x->fp8 ? x->fp8->granularity : FP8_PER_TENSOR;
}
struct matmul_key matmul_key_of(const struct gemm *gemm, const float *dbias) {
    const void *c = gemm->sum ? (const void *)gemm->sum : (const void *)gemm->out;
    const void *bias = gemm->bias ? (const void *)gemm->bias : (const void *)dbias;
    const struct matmul_key key = {gemm->rows,
                                   gemm->cols,
                                   gemm->depth,
                                   gemm->a.ld,
                                   gemm->b.ld,
                                   gemm->ld_out,
                                   gemm->a.transposed,
                                   gemm->b.transposed,
                                   gemm->sum != NULL,
                                   gemm->bias != NULL,
                                   dbias != NULL,
                                   gemm->gelu == NULL ? MATMUL_NO_GELU
                                   : gemm->gelu_sums  ? MATMUL_GELU_SUMS
                                                      : MATMUL_GELU,
                                   matmul_operand_type(&gemm->a),
                                   matmul_operand_type(&gemm->b),
                                   matmul_operand_scaling(&gemm->a),
                                   matmul_operand_scaling(&gemm->b),
                                   gemm->fast,
                                   pointer_alignment(matmul_operand_data(&gemm->a)),
                                   pointer_alignment(matmul_operand_data(&gemm->b)),
                                   pointer_alignment(c),
                                   pointer_alignment(bias),
                                   pointer_alignment(gemm->gelu)};
    return key;
}
static bool matmul_same_key(const struct matmul_key *a, const struct matmul_key *b) {
    return memcmp(a, b, sizeof *a) == 0;
}

// Sets an attribute of the plan's operation to `bytes` bytes at `value`. Ends the program where the library refuses.
static void matmul_set(struct matmul_plan *plan, cublasLtMatmulDescAttributes_t attribute, const void *value,
                       size_t bytes) {
    cublas_check(cublasLtMatmulDescSetAttribute(&plan->operation, attribute, value, bytes));
}
static bool matmul_fuses_dbias(const struct matmul_plan *plan) { return plan->fused && plan->key.has_dbias; }
static bool matmul_fuses_dgelu(const struct matmul_plan *plan) {
    return plan->fused && plan->key.gelu != MATMUL_NO_GELU;
}

// Sets the plan's pointers of bias, GELU's input and FP8 scales. bias_sums (gemm->rows): where an epilogue puts dbias.
static void matmul_set_pointers(struct matmul_plan *plan, const struct gemm *gemm, const float *bias_sums) {
    if (matmul_fuses_dgelu(plan))
        matmul_set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &gemm->gelu, sizeof gemm->gelu);
    if (matmul_fuses_dbias(plan))
        matmul_set(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias_sums, sizeof bias_sums);
    else if (gemm->bias)
        matmul_set(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &gemm->bias, sizeof gemm->bias);
    if (gemm->a.fp8 == NULL)
        return;
    matmul_set(plan, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &gemm->b.fp8->inverse, sizeof gemm->b.fp8->inverse);
    matmul_set(plan, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &gemm->a.fp8->inverse, sizeof gemm->a.fp8->inverse);
}

#if CUBLAS_VERSION >= MATMUL_FP8_BLOCKS_VERSION
static int32_t matmul_scale_mode(enum fp8_granularity granularity) {
    switch (granularity) {
    case FP8_PER_TENSOR: return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    case FP8_1X128: return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case FP8_128X128: return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    }
    return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
}
// Sets the modes of the operands' FP8 scales, where one operand or both have scales of blocks. Ends the program if it
// was built with a cuBLASLt before 12.9. Our A is cuBLASLt's B, and our B its A.
static void matmul_set_blocks(struct matmul_plan *plan, const struct gemm *gemm) {
    const int32_t a = matmul_scale_mode(gemm->b.fp8->granularity), b = matmul_scale_mode(gemm->a.fp8->granularity);
    matmul_set(plan, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &a, sizeof a);
    matmul_set(plan, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &b, sizeof b);
}
#else // matmul_fp8_refusal says so at start
static void matmul_set_blocks(struct matmul_plan *plan, const struct gemm *gemm) {
    fail("this program was built with cuBLASLt %d.%d, which has no FP8 scales of blocks: leave out --fp8-recipe "
         "blockwise",
         CUBLAS_VERSION / 10000, CUBLAS_VERSION / 100 % 100);
}
#endif

// Sets FP8's attributes, except scale pointers. Scales of blocks turn `fast` off; before 12.9 they end the program.
static void matmul_set_fp8(struct matmul_plan *plan, const struct gemm *gemm) {
    const bool blocks = gemm->a.fp8->granularity != FP8_PER_TENSOR || gemm->b.fp8->granularity != FP8_PER_TENSOR;
    const int8_t fast = gemm->fast && !blocks;
    matmul_set(plan, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast);
    if (blocks)
        matmul_set_blocks(plan, gemm);
}

// Fills *plan, except the algorithm. fused: the epilogue does dbias or GELU's derivative. fp32 stays fp32, never TF32.
static void matmul_plan_product(struct matmul_plan *plan, const struct gemm *gemm, const float *dbias, bool fused) {
    const cublasOperation_t transposed = CUBLAS_OP_T, as_stored = CUBLAS_OP_N;
    const int32_t sums_type = CUDA_R_32F;
    plan->key = matmul_key_of(gemm, dbias);
    plan->fused = fused;
    const cublasLtEpilogue_t epilogue = matmul_fuses_dbias(plan)   ? CUBLASLT_EPILOGUE_BGRADB
                                        : matmul_fuses_dgelu(plan) ? CUBLASLT_EPILOGUE_DGELU
                                        : gemm->bias               ? CUBLASLT_EPILOGUE_BIAS
                                                                   : CUBLASLT_EPILOGUE_DEFAULT;
    cublas_check(cublasLtMatmulDescInit(&plan->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    matmul_set(plan, CUBLASLT_MATMUL_DESC_TRANSA, gemm->b.transposed ? &transposed : &as_stored, sizeof transposed);
    matmul_set(plan, CUBLASLT_MATMUL_DESC_TRANSB, gemm->a.transposed ? &transposed : &as_stored, sizeof transposed);
    matmul_set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
    if (matmul_fuses_dbias(plan))
        matmul_set(plan, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &sums_type, sizeof sums_type);
    if (matmul_fuses_dgelu(plan))
        matmul_set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &gemm->ld_out, sizeof gemm->ld_out);
    matmul_set_pointers(plan, gemm, dbias);
    if (gemm->a.fp8)
        matmul_set_fp8(plan, gemm);
    // (lda, ...) by columns is what is stored (..., lda) by rows
    const int64_t a_lines = gemm->a.transposed ? gemm->depth : gemm->rows;
    const int64_t b_lines = gemm->b.transposed ? gemm->cols : gemm->depth;
    const int64_t a_width = gemm->a.transposed ? gemm->rows : gemm->depth;
    const int64_t b_width = gemm->b.transposed ? gemm->depth : gemm->cols;
    cublas_check(cublasLtMatrixLayoutInit(&plan->a, matmul_operand_type(&gemm->a), (uint64_t)a_width, (uint64_t)a_lines,
                                          gemm->a.ld));
    cublas_check(cublasLtMatrixLayoutInit(&plan->b, matmul_operand_type(&gemm->b), (uint64_t)b_width, (uint64_t)b_lines,
                                          gemm->b.ld));
    cublas_check(cublasLtMatrixLayoutInit(&plan->c, gemm->sum ? CUDA_R_32F : MATMUL_TYPE, (uint64_t)gemm->cols,
                                          (uint64_t)gemm->rows, gemm->ld_out));
}

// Returns the bytes of workspace that the library may use: with BGRADB the first half, since the sums lie after it.
static size_t matmul_library_bytes(const struct matmul_plan *plan) {
    return matmul_fuses_dbias(plan) ? GPU_MATMUL_BYTES / 2 : GPU_MATMUL_BYTES;
}
// Returns a mask of the allowed split-K schemes: adding fp32 partial sums in a step of their own, in a fixed order.
// Others round partial sums to the output's type. With BGRADB none, as the order of the bias's sums is unknown.
static uint32_t matmul_reductions(const struct matmul_plan *plan) {
    return matmul_fuses_dbias(plan) ? CUBLASLT_REDUCTION_SCHEME_NONE
                                    : CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
}
// Sets *preference, which the heuristics are asked with: the plan's workspace, reductions and alignments.
static void matmul_prefer(cublasLtMatmulPreferenceOpaque_t *preference, const struct matmul_plan *plan) {
    const uint32_t reductions = matmul_reductions(plan);
    const uint64_t workspace_bytes = matmul_library_bytes(plan);
    const uint32_t a = (uint32_t)plan->key.b_alignment, b = (uint32_t)plan->key.a_alignment;
    const uint32_t c = (uint32_t)plan->key.c_alignment;
    const struct {
        cublasLtMatmulPreferenceAttributes_t attribute;
        const void *value;
        size_t bytes;
    } wishes[] = {{CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes, sizeof workspace_bytes},
                  {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof reductions},
                  {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &a, sizeof a},
                  {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &b, sizeof b},
                  {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &c, sizeof c},
                  {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &c, sizeof c}};
    cublas_check(cublasLtMatmulPreferenceInit(preference));
    for (size_t i = 0; i < sizeof wishes / sizeof *wishes; i++)
        cublas_check(
            cublasLtMatmulPreferenceSetAttribute(preference, wishes[i].attribute, wishes[i].value, wishes[i].bytes));
}

// Fills results (most) with the *found that heuristics rank first. Returns success only if results[0] can be run.
static cublasStatus_t matmul_rank_algorithms(cublasLtMatmulHeuristicResult_t *results, int most, int *found,
                                             struct matmul_plan *plan, struct matmul_library *library) {
    cublasLtMatmulPreferenceOpaque_t preference;
    *found = 0;
    matmul_prefer(&preference, plan);
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(matmul_handle(library), &plan->operation, &plan->b, &plan->a, &plan->c, &plan->c,
                                       &preference, most, results, found);
    if (status != CUBLAS_STATUS_SUCCESS)
        return status;
    return *found == 0 || results[0].state != CUBLAS_STATUS_SUCCESS ? CUBLAS_STATUS_NOT_SUPPORTED
                                                                    : CUBLAS_STATUS_SUCCESS;
}
// Puts the algorithm that the library's heuristics rank first into the plan. Returns as matmul_rank_algorithms does.
static cublasStatus_t matmul_choose_algorithm(struct matmul_plan *plan, struct matmul_library *library) {
    cublasLtMatmulHeuristicResult_t best;
    int found;
    const cublasStatus_t status = matmul_rank_algorithms(&best, 1, &found, plan, library);
    if (status == CUBLAS_STATUS_SUCCESS)
        plan->algorithm = best.algo;
    return status;
}
const struct matmul_choice *matmul_choice_of(const struct matmul_library *library, const struct matmul_key *key) {
    for (int i = 0; i < library->choice_count; i++)
        if (matmul_same_key(&library->choices[i].key, key))
            return &library->choices[i];
    return NULL;
}
// Fills the plan, with the choice's algorithm, else the heuristics' first. Returns as matmul_rank_algorithms does.
static cublasStatus_t matmul_make_plan(struct matmul_plan *plan, const struct gemm *gemm, const float *dbias,
                                       struct matmul_library *library) {
    const struct matmul_key key = matmul_key_of(gemm, dbias);
    const struct matmul_choice *choice = matmul_choice_of(library, &key);
    matmul_plan_product(plan, gemm, dbias, choice && choice->fused);
    if (choice == NULL)
        return matmul_choose_algorithm(plan, library);
    plan->algorithm = choice->algorithm;
    return CUBLAS_STATUS_SUCCESS;
}

// Writes which product was refused, and what to change, to `text` (n bytes), and returns it. A layer's widths are
// multiples of 8 in any usual model, for FP8 of 16; where they are, the number of tokens is what the library refuses.
static const char *matmul_refusal_text(char *text, size_t n, const struct gemm *gemm, cublasStatus_t status,
                                       const struct matmul_library *library) {
    const int multiple = gemm->a.fp8 ? 16 : 8;
    const bool widths_fit = gemm->cols % multiple == 0 && (gemm->sum ? gemm->rows : gemm->depth) % multiple == 0;
    snprintf(text, n, "%s has no algorithm for %s product of (%lld x %lld)%s by (%lld x %lld)%s%s: %s; use %s%s%s",
             library->description, gemm->a.fp8 ? "an FP8" : "a", (long long)gemm->rows, (long long)gemm->depth,
             gemm->a.transposed ? " transposed" : "", (long long)gemm->depth, (long long)gemm->cols,
             gemm->b.transposed ? " transposed" : "", gemm->bias ? " with a bias" : "", cublasLtGetStatusName(status),
             widths_fit
                 ? "another --micro-batch-size, --seq-length or --sample-count: their product is the number of tokens"
             : gemm->a.fp8 ? "multiples of 16"
                           : "multiples of 8",
             widths_fit ? "" : " for --hidden-size, --ffn-hidden-size, --kv-channels and --lora-rank",
             gemm->a.fp8 ? ", or leave out --fp8-format" : "");
    return text;
}
// Returns why there is no algorithm for the product without dbias, in `text` (n bytes); NULL if there is. For tests.
static inline const char *matmul_refusal(char *text, size_t n, const struct gemm *gemm,
                                         struct matmul_library *library) {
    struct matmul_plan plan;
    const cublasStatus_t status = matmul_make_plan(&plan, gemm, NULL, library);
    return status == CUBLAS_STATUS_SUCCESS ? NULL : matmul_refusal_text(text, n, gemm, status, library);
}

// Returns the plan of this product with its dbias (NULL: none), made now unless the table has it. A full table loses
// its oldest plan, which would be made again unchanged. Ends the program where the library refuses the product.
static struct matmul_plan *matmul_plan_for(const struct gemm *gemm, const float *dbias,
                                           struct matmul_library *library) {
    const struct matmul_key key = matmul_key_of(gemm, dbias);
    const int64_t kept = gemm_min(library->planned, MATMUL_PLANS);
    for (int64_t i = 0; i < kept; i++)
        if (matmul_same_key(&library->plans[i].key, &key))
            return &library->plans[i];
    struct matmul_plan *plan = &library->plans[library->planned++ % MATMUL_PLANS];
    const cublasStatus_t status = matmul_make_plan(plan, gemm, dbias, library);
    char text[512];
    if (status != CUBLAS_STATUS_SUCCESS)
        fail("%s", matmul_refusal_text(text, sizeof text, gemm, status, library));
    return plan;
}

// ---- dbias: column sums of dout ----

// Stage 1: a block sums DBIAS_ROWS rows of 32 packs of columns, stage 2 the blocks' partial sums; both in a fixed
// order. The partial sums are 8 bytes for every DBIAS_ROWS elements of dout, 3 % of its bytes in bf16. The blocks for
// 16384 rows of 768 columns have 6 MB of loads in flight, two thirds more than 4 TB/s at 0.9 us of latency ask for.
enum { DBIAS_ROWS = GPU_DBIAS_ROWS, DBIAS_WARPS = 8, DBIAS_COLUMNS = 32 * PACK, DBIAS_AHEAD = 4 };

size_t dbias_workspace_bytes(int64_t M, int N, const struct device *dev) { return gpu_dbias_bytes(M, N); }

// partial (chunks, N) = dout's column sums over DBIAS_ROWS rows; a block per chunk and strip of DBIAS_COLUMNS columns
static __global__ void __launch_bounds__(32 * DBIAS_WARPS)
    dbias_partial_kernel(float *partial, const floatX *dout, int64_t M, int N, int strips) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    const int64_t chunk = blockIdx.x / (unsigned)strips, first_row = chunk * DBIAS_ROWS;
    const int first_column = (int)(blockIdx.x % (unsigned)strips) * DBIAS_COLUMNS, column = first_column + lane * PACK;
    const int rows = M - first_row < DBIAS_ROWS ? (int)(M - first_row) : (int)DBIAS_ROWS;
    const floatX *from = dout + first_row * N + column;
    struct packed_floats sums = {};
    if (column + PACK <= N && N % PACK == 0 && packed_aligned(dout)) {
        int row = warp;
        for (; row + (DBIAS_AHEAD - 1) * DBIAS_WARPS < rows; row += DBIAS_AHEAD * DBIAS_WARPS) {
            struct packed x[DBIAS_AHEAD];
            for (int i = 0; i < DBIAS_AHEAD; i++)
                x[i] = packed_load(from + (int64_t)(row + i * DBIAS_WARPS) * N);
            for (int i = 0; i < DBIAS_AHEAD; i++)
                column_sums_add_pack(&sums, x[i]);
        }
        for (; row < rows; row += DBIAS_WARPS)
            column_sums_add_pack(&sums, packed_load(from + (int64_t)row * N));
    } else if (column < N)
        for (int row = warp; row < rows; row += DBIAS_WARPS)
            column_sums_add_pack(&sums, packed_load_some(from + (int64_t)row * N, N - column));
    column_sums_of_warps(partial + chunk * N + first_column, sums, N - first_column);
}

void dbias_sums(float *dbias, const floatX *dout, int64_t M, int N, bool add, void *workspace, struct device *dev) {
    float *partial = (float *)workspace; // (chunks, N)
    const int64_t chunks = (M + DBIAS_ROWS - 1) / DBIAS_ROWS;
    const int strips = (N + DBIAS_COLUMNS - 1) / DBIAS_COLUMNS;
    LAUNCH(dev, dbias_partial_kernel, (unsigned)(chunks * strips), 32 * DBIAS_WARPS,
           COLUMN_SUMS_OF_WARPS_BYTES(DBIAS_WARPS), partial, dout, M, N, strips);
    column_sums(dbias, partial, chunks, N, add, dev);
}

// ---- what the layer calls ----

size_t gemm_workspace_bytes(const struct gemm *gemm, const struct device *dev) { return GPU_MATMUL_BYTES; }

// Enqueues a product by its plan, with GELU's derivative only if fused, and with gemm_run's dbias (gemm->rows) unless
// NULL. workspace: gemm_workspace_bytes or, with dbias, dbias_workspace_bytes if more. Returns the library's status.
static cublasStatus_t matmul_enqueue(struct matmul_plan *plan, const struct gemm *gemm, float *dbias, void *workspace,
                                     struct device *dev) {
    const float one = 1, beta = gemm->add ? 1 : 0;
    void *c = gemm->sum ? (void *)gemm->sum : (void *)gemm->out;
    float *bias_sums = gemm->add ? (float *)((char *)workspace + matmul_library_bytes(plan)) : dbias;
    matmul_set_pointers(plan, gemm, bias_sums);
    launched_record("cublasLtMatmul");
    const cublasStatus_t status =
        cublasLtMatmul(matmul_handle(dev->matmul), &plan->operation, &one, matmul_operand_data(&gemm->b), &plan->b,
                       matmul_operand_data(&gemm->a), &plan->a, &beta, c, &plan->c, c, &plan->c, &plan->algorithm,
                       workspace, matmul_library_bytes(plan), dev->stream);
    if (status != CUBLAS_STATUS_SUCCESS || dbias == NULL)
        return status;
    if (!plan->fused)
        dbias_sums(dbias, gemm->a.data, gemm->depth, (int)gemm->rows, gemm->add, workspace, dev);
    else if (gemm->add)
        column_sums(dbias, bias_sums, 1, gemm->rows, true, dev);
    return status;
}

// Adds a product, with its pointers, to the list, unless the list has its key; where it is full, sets list_overflowed.
static void matmul_list(const struct gemm *gemm, float *dbias, void *workspace, struct matmul_library *library) {
    const struct matmul_key key = matmul_key_of(gemm, dbias);
    for (int i = 0; i < library->product_count; i++) {
        const struct matmul_key other = matmul_key_of(&library->products[i].gemm, library->products[i].dbias);
        if (matmul_same_key(&other, &key))
            return;
    }
    if (library->product_count == MATMUL_PLANS) {
        library->list_overflowed = true;
        return;
    }
    struct matmul_product *product = &library->products[library->product_count++];
    product->gemm = *gemm;
    product->dbias = dbias;
    product->workspace = workspace;
    if (gemm->a.fp8 == NULL)
        return;
    product->a = *gemm->a.fp8;
    product->b = *gemm->b.fp8;
    product->gemm.a.fp8 = &product->a;
    product->gemm.b.fp8 = &product->b;
}

void gemm_run(const struct gemm *gemm, float *dbias, void *workspace, struct device *dev) {
    if (dev->matmul->listing)
        matmul_list(gemm, dbias, workspace, dev->matmul);
    else
        cublas_check(matmul_enqueue(matmul_plan_for(gemm, dbias, dev->matmul), gemm, dbias, workspace, dev));
}

bool gemm_applies_gelu(const struct gemm *gemm, struct device *dev) {
    return gemm->gelu && !dev->matmul->listing && matmul_plan_for(gemm, NULL, dev->matmul)->fused;
}

// ---- FP8 ----

const char *matmul_fp8_refusal(char *text, size_t n, enum fp8_granularity granularity, const struct device *dev) {
    const int version = (int)cublasLtGetVersion();
    struct cudaDeviceProp properties;
    struct compute_capability gpu = dev->planned;
    if (dev->open) {
        cuda_check(cudaGetDeviceProperties(&properties, dev->index));
        gpu.major = properties.major;
        gpu.minor = properties.minor;
    }
    if (gpu_refuses_fp8(text, n, granularity, gpu))
        return text;
    if (!dev->open || granularity == FP8_PER_TENSOR)
        return NULL;
    if (CUBLAS_VERSION < MATMUL_FP8_BLOCKS_VERSION || version < MATMUL_FP8_BLOCKS_VERSION)
        snprintf(text, n,
                 "FP8 scales of blocks need cuBLASLt 12.9 or newer; this program was built with %d.%d and runs "
                 "with %d.%d: leave out --fp8-recipe blockwise",
                 CUBLAS_VERSION / 10000, CUBLAS_VERSION / 100 % 100, version / 10000, version / 100 % 100);
    else
        return NULL;
    return text;
}

size_t matmul_fp8_workspace_bytes(int64_t M, int64_t N, int64_t K, struct device *dev) { return GPU_MATMUL_BYTES; }

// Returns the gemm of a b^T + bias (NULL: none) to `out`, or of a b^T to `sum`; the other is NULL. *a and *b must stay
// as long as the gemm. Ends the program unless M, N and K are multiples of 16.
static struct gemm gemm_fp8(floatX *out, float *sum, const struct fp8_matrix *a, const struct fp8_matrix *b,
                            const floatX *bias, int64_t M, int64_t N, int64_t K, bool add, bool fast) {
    if (M % 16 || N % 16 || K % 16)
        fail("FP8 products need sizes that are multiples of 16, and one is (%lld x %lld) by (%lld x %lld): change "
             "--micro-batch-size or --seq-length, whose product is the number of tokens, or --hidden-size, "
             "--ffn-hidden-size or --kv-channels, or leave out --fp8-format",
             (long long)M, (long long)K, (long long)K, (long long)N);
    const struct gemm gemm = {M, N, K, {NULL, K, false, a}, {NULL, K, true, b}, out, N, bias, sum, add, fast};
    return gemm;
}
void matmul_fp8(floatX *out, struct fp8_matrix a, struct fp8_matrix b, const floatX *bias, int64_t M, int64_t N,
                int64_t K, bool fast, void *workspace, struct device *dev) {
    const struct gemm gemm = gemm_fp8(out, NULL, &a, &b, bias, M, N, K, false, fast);
    gemm_run(&gemm, NULL, workspace, dev);
}
void matmul_fp8_sum(float *sum, struct fp8_matrix a, struct fp8_matrix b, int64_t M, int64_t N, int64_t K, bool add,
                    bool fast, void *workspace, struct device *dev) {
    const struct gemm gemm = gemm_fp8(NULL, sum, &a, &b, NULL, M, N, K, add, fast);
    gemm_run(&gemm, NULL, workspace, dev);
}
