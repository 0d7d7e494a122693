// The choice of cuBLASLt's algorithms by timing them: of the algorithms that the heuristics rank first for a product,
// the fastest; and, for a product that comes with a bias gradient or with GELU's derivative, whether that is left to the
// product's epilogue or to a kernel of our own, which is timed with it.
//
// A product is timed in place: on the operands that the model will pass, filled with noise where they are activations,
// since zeros draw less power, and into its own output. Algorithms take turns, so that a change of the clock rate meets
// them all. A product that is small enough finds its operands in the L2 cache, where in a training step it might not.
//
// Each algorithm that is considered gives the same bits in every call, but two may differ from each other. A choice
// depends on times, which vary, so that whoever wants the same bits again has to keep the choices.
#pragma once
#include "kernels/activation.cuh"      // gelu_backward, activation_bias_sums
#include "kernels/device_memory.cuh"   // device_upload, device_copy, host_allocate
#include "kernels/device_queue.cuh"    // device_synchronize
#include "kernels/matmul_cublaslt.cuh" // struct matmul_choice, matmul_enqueue
#include "kernels/random.cuh"          // random_uniform
#include <math.h>                      // fabs, INFINITY

enum {
    MATMUL_CANDIDATES = 8, // algorithms of a product that are timed, and as many with the epilogue
    MATMUL_ROUNDS = 4,     // of timing
    MATMUL_RUNS = 8,       // most runs in a round
    MATMUL_NOISE_WORDS = 1 << 20,
    MATMUL_GELU_ROWS = 64, // of an output whose values are compared
};
#define MATMUL_ROUND_US 200.0  // what a round of an algorithm should take
#define MATMUL_LEAST_GAIN 0.02 // the part of candidate 0's time that another must save: more than times vary by

// ---- Noise ----

// What operands are filled with: pairs of bf16 numbers, of magnitudes from 0.125 to 2, as fp32 numbers the same. As FP8
// codes of either format no byte is a NaN or infinity.
struct matmul_noise {
    uint32_t *words; // [MATMUL_NOISE_WORDS] in pinned memory
    char *memory;    // device memory that may be filled
    size_t bytes;    // of it
};
static uint32_t matmul_noise_word(uint64_t i) {
    uint32_t word = 0;
    for (int half = 0; half < 2; half++) {
        const uint32_t bits = (uint32_t)(random_uniform(1, 2, 2 * i + (uint64_t)half) * 0x1p16f);
        uint32_t low = bits & 0xff;
        if ((low & 0x7c) == 0x7c)
            low ^= 0x40;
        const uint32_t high = (bits >> 8 & 0x80) | 0x3e | (bits >> 8 & 1);
        word |= (high << 8 | low) << 16 * half;
    }
    return word;
}
// Fills device memory from `to` on.
static void matmul_fill(char *to, size_t bytes, const struct matmul_noise *noise, struct device *dev) {
    const size_t block = MATMUL_NOISE_WORDS * sizeof(uint32_t);
    device_upload(to, noise->words, bytes < block ? bytes : block, dev);
    for (size_t at = block, n; at < bytes; at += n) {
        n = at < bytes - at ? at : bytes - at;
        device_copy(to + at, to, n, dev);
    }
}
// Makes noise for operands in `memory`, and fills all of it.
static struct matmul_noise matmul_noise_open(void *memory, size_t bytes, struct device *dev) {
    struct matmul_noise noise = {(uint32_t *)host_allocate(MATMUL_NOISE_WORDS * sizeof(uint32_t), dev), (char *)memory,
                                 bytes};
    for (int64_t i = 0; i < MATMUL_NOISE_WORDS; i++)
        noise.words[i] = matmul_noise_word((uint64_t)i);
    matmul_fill(noise.memory, bytes, &noise, dev);
    return noise;
}
static void matmul_noise_close(struct matmul_noise *noise, struct device *dev) {
    device_synchronize(dev);
    host_free(noise->words);
}
// Fills an operand (rows, cols), where it lies in the noise's memory: an earlier product may have overwritten it.
static void matmul_fill_operand(const struct gemm_operand *x, int64_t rows, int64_t cols,
                                const struct matmul_noise *noise, struct device *dev) {
    char *data = (char *)(uintptr_t)matmul_operand_data(x);
    const int64_t lines = x->transposed ? cols : rows, width = x->transposed ? rows : cols;
    const size_t bytes = (size_t)((lines - 1) * x->ld + width) * (x->fp8 ? sizeof(fp8) : sizeof(floatX));
    if (data >= noise->memory && data + bytes <= noise->memory + noise->bytes)
        matmul_fill(data, bytes, noise, dev);
}

// ---- Candidates ----

struct matmul_candidate {
    struct matmul_plan plan;
    double us; // the least of a run, over all rounds
};
struct matmul_candidates {
    int count;
    struct matmul_candidate of[2 * MATMUL_CANDIDATES];
};
// Whether an algorithm keeps to what is allowed: reductions that add in a fixed order, and the size of the workspace.
static bool matmul_is_allowed(const struct matmul_plan *plan, const cublasLtMatmulAlgo_t *algorithm,
                              size_t workspace_bytes) {
    uint32_t reduction = 0;
    size_t written = 0;
    return cublasLtMatmulAlgoConfigGetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &reduction,
                                                sizeof reduction, &written) == CUBLAS_STATUS_SUCCESS &&
           (reduction & ~matmul_reductions(plan)) == 0 && workspace_bytes <= matmul_library_bytes(plan);
}
// Adds the algorithms that the heuristics rank first, with or without the epilogue; none where they know none.
static void matmul_add_candidates(struct matmul_candidates *candidates, const struct matmul_product *product,
                                  bool fused, struct matmul_library *library) {
    cublasLtMatmulHeuristicResult_t results[MATMUL_CANDIDATES];
    struct matmul_plan plan;
    int found;
    matmul_plan_product(&plan, &product->gemm, product->dbias, fused);
    if (matmul_rank_algorithms(results, MATMUL_CANDIDATES, &found, &plan, library) != CUBLAS_STATUS_SUCCESS)
        return;
    for (int i = 0; i < found; i++) {
        if (results[i].state != CUBLAS_STATUS_SUCCESS ||
            !matmul_is_allowed(&plan, &results[i].algo, results[i].workspaceSize))
            continue;
        struct matmul_candidate *candidate = &candidates->of[candidates->count++];
        candidate->plan = plan;
        candidate->plan.algorithm = results[i].algo;
        candidate->us = INFINITY;
    }
}
// Bytes of the sums that follow GELU's derivative.
static size_t matmul_gelu_sums_bytes(const struct gemm *gemm) {
    return gemm->gelu_sums ? (size_t)(activation_bias_chunks(gemm->rows) * gemm->cols) * sizeof(float) : 0;
}
// Whether an epilogue can do what comes with the product. BGRADB's sums need the second half of the workspace. DGELU
// demands of its other input what packed accesses do; fp32 results would have its exponential's error. The sums that
// follow it are timed in the workspace.
static bool matmul_may_fuse(const struct matmul_product *product) {
    const struct gemm *gemm = &product->gemm;
    if (product->dbias)
        return (size_t)gemm->rows * sizeof(float) <= MATMUL_LIBRARY_BYTES / 2;
    return gemm->gelu && sizeof(floatX) == 2 && gemm->ld_out == gemm->cols && gemm->cols % PACK == 0 &&
           packed_aligned(gemm->gelu) && matmul_gelu_sums_bytes(gemm) <= MATMUL_LIBRARY_BYTES;
}
// A product by a candidate, and what comes with it. The sums that follow GELU's derivative overwrite the workspace.
static cublasStatus_t matmul_run_candidate(struct matmul_candidate *candidate, const struct matmul_product *product,
                                           struct device *dev) {
    const struct gemm *gemm = &product->gemm;
    const cublasStatus_t status = matmul_enqueue(&candidate->plan, gemm, product->dbias, product->workspace, dev);
    float *sums = gemm->gelu_sums ? (float *)product->workspace : NULL;
    if (status != CUBLAS_STATUS_SUCCESS || !gemm->gelu || !matmul_may_fuse(product))
        return status;
    if (candidate->plan.fused)
        activation_bias_sums(sums, gemm->out, gemm->rows, (int)gemm->cols, dev);
    else
        gelu_backward(gemm->out, sums, gemm->out, gemm->gelu, gemm->rows, (int)gemm->cols, NULL, dev);
    return status;
}

// ---- Times ----

struct matmul_clock {
    cudaEvent_t begin, end;
};
// Microseconds of a run, of `runs` one after the other; INFINITY where the library refuses to run the candidate.
static double matmul_time_runs(struct matmul_candidate *candidate, const struct matmul_product *product, int runs,
                               const struct matmul_clock *clock, struct device *dev) {
    float milliseconds = 0;
    cuda_check(cudaEventRecord(clock->begin, dev->stream));
    for (int i = 0; i < runs; i++)
        if (matmul_run_candidate(candidate, product, dev) != CUBLAS_STATUS_SUCCESS)
            return INFINITY;
    cuda_check(cudaEventRecord(clock->end, dev->stream));
    cuda_check(cudaEventSynchronize(clock->end));
    cuda_check(cudaEventElapsedTime(&milliseconds, clock->begin, clock->end));
    return round(64e3 * milliseconds / runs) / 64; // a short number in a file
}
// Sets the times of all candidates. A first run loads kernels and is not counted.
static void matmul_time_candidates(struct matmul_candidates *candidates, const struct matmul_product *product,
                                   struct device *dev) {
    struct matmul_clock clock;
    cuda_check(cudaEventCreate(&clock.begin));
    cuda_check(cudaEventCreate(&clock.end));
    for (int round = 0; round < MATMUL_ROUNDS; round++)
        for (int i = 0; i < candidates->count; i++) {
            struct matmul_candidate *candidate = &candidates->of[i];
            if (round == 0 && !isfinite(matmul_time_runs(candidate, product, 1, &clock, dev)))
                candidate->us = -1;
            if (candidate->us < 0)
                continue;
            const double wished = MATMUL_ROUND_US / candidate->us; // 0 in the first round
            const int runs = wished < 1 ? 1 : wished > MATMUL_RUNS ? MATMUL_RUNS : (int)wished;
            const double us = matmul_time_runs(candidate, product, runs, &clock, dev);
            candidate->us = us < candidate->us ? us : candidate->us;
        }
    for (int i = 0; i < candidates->count; i++)
        if (candidates->of[i].us < 0)
            candidates->of[i].us = INFINITY;
    cuda_check(cudaEventDestroy(clock.begin));
    cuda_check(cudaEventDestroy(clock.end));
}

// Whether BGRADB's sums are the same bits each time, and those of our own kernel but for rounding.
static bool matmul_sums_hold(struct matmul_candidate *candidate, const struct matmul_product *product,
                             struct device *dev) {
    struct gemm gemm = product->gemm;
    const size_t n = (size_t)gemm.rows;
    float *sums = (float *)host_allocate(3 * n * sizeof *sums, dev);
    gemm.add = false;
    bool hold = true;
    for (int i = 0; i < 2 && hold; i++) {
        hold =
            matmul_enqueue(&candidate->plan, &gemm, product->dbias, product->workspace, dev) == CUBLAS_STATUS_SUCCESS;
        device_download(sums + (size_t)i * n, product->dbias, n * sizeof *sums, dev);
    }
    dbias_sums(product->dbias, gemm.a.data, gemm.depth, (int)gemm.rows, false, product->workspace, dev);
    device_download(sums + 2 * n, product->dbias, n * sizeof *sums, dev);
    double difference = 0, magnitude = 0;
    for (size_t i = 0; i < n; i++) {
        difference += fabs((double)sums[i] - sums[2 * n + i]);
        magnitude += fabs((double)sums[2 * n + i]);
    }
    hold = hold && memcmp(sums, sums + n, n * sizeof *sums) == 0 && difference <= 1e-4 * magnitude;
    host_free(sums);
    return hold;
}
// Whether DGELU's output is the same bits each time, and ours but for rounding: that of bf16, twice in ours. Of the
// first rows.
static bool matmul_gelu_holds(struct matmul_candidate *fused, struct matmul_candidate *plain,
                              const struct matmul_product *product, struct device *dev) {
    const struct gemm *gemm = &product->gemm;
    const size_t n = (size_t)(gemm_min(gemm->rows, MATMUL_GELU_ROWS) * gemm->cols);
    struct matmul_candidate *const runs[3] = {fused, fused, plain};
    floatX *values = (floatX *)host_allocate(3 * n * sizeof *values, dev);
    bool hold = true;
    for (size_t i = 0; i < 3 && hold; i++) {
        hold = matmul_run_candidate(runs[i], product, dev) == CUBLAS_STATUS_SUCCESS;
        device_download(values + i * n, gemm->out, n * sizeof *values, dev);
    }
    double difference = 0, magnitude = 0;
    for (size_t i = 0; i < n; i++) {
        difference += fabs((double)to_float(values[i]) - to_float(values[2 * n + i]));
        magnitude += fabs((double)to_float(values[2 * n + i]));
    }
    hold = hold && memcmp(values, values + n, n * sizeof *values) == 0 && difference <= 0x1p-8 * magnitude;
    host_free(values);
    return hold;
}
// Whether a fused candidate may be chosen. plain: one that is not.
static bool matmul_fused_holds(struct matmul_candidate *fused, struct matmul_candidate *plain,
                               const struct matmul_product *product, struct device *dev) {
    return product->dbias ? matmul_sums_hold(fused, product, dev) : matmul_gelu_holds(fused, plain, product, dev);
}

// The fastest candidate; the first, unless that is slower by MATMUL_LEAST_GAIN.
static int matmul_fastest(const struct matmul_candidates *candidates) {
    int best = 0;
    for (int i = 1; i < candidates->count; i++)
        if (candidates->of[i].us < candidates->of[best].us)
            best = i;
    return candidates->of[best].us <= (1 - MATMUL_LEAST_GAIN) * candidates->of[0].us ? best : 0;
}

// ---- Choices ----

// Begins to list products in place of computing them; matmul_list_end ends it.
static void matmul_list_begin(struct matmul_library *library) {
    library->listing = true;
    library->product_count = 0;
}
static void matmul_list_end(struct matmul_library *library) { library->listing = false; }

// Keeps a choice, which all later calls of its product take. A plan that was made without it is dropped.
static void matmul_keep_choice(struct matmul_library *library, const struct matmul_choice *choice) {
    if (library->choice_count == MATMUL_PLANS)
        return;
    library->choices[library->choice_count++] = *choice;
    library->planned = 0;
}
// Keeps a choice that was made before, if the library can compute a listed product by it. Returns whether it did.
static bool matmul_take_choice(struct matmul_library *library, const struct matmul_choice *choice) {
    for (int i = 0; i < library->product_count; i++) {
        const struct matmul_product *product = &library->products[i];
        const struct matmul_key key = matmul_key_of(&product->gemm, product->dbias);
        cublasLtMatmulHeuristicResult_t result;
        struct matmul_plan plan;
        if (!matmul_same_key(&key, &choice->key))
            continue;
        if (matmul_choice_of(library, &key) || (choice->fused && !matmul_may_fuse(product)))
            return false;
        matmul_plan_product(&plan, &product->gemm, product->dbias, choice->fused);
        if (cublasLtMatmulAlgoCheck(matmul_handle(library), &plan.operation, &plan.b, &plan.a, &plan.c, &plan.c,
                                    &choice->algorithm, &result) != CUBLAS_STATUS_SUCCESS ||
            !matmul_is_allowed(&plan, &choice->algorithm, result.workspaceSize))
            return false;
        matmul_keep_choice(library, choice);
        return true;
    }
    return false;
}
// Times a product's algorithms and keeps the choice. Overwrites its output and dbias, and the noise's memory where its
// operands are. Returns false, without a choice, where the library has no algorithm for it.
static bool matmul_tune(struct matmul_library *library, const struct matmul_product *product,
                        const struct matmul_noise *noise, struct device *dev) {
    const struct gemm *gemm = &product->gemm;
    struct matmul_candidates candidates;
    candidates.count = 0;
    matmul_fill_operand(&gemm->a, gemm->rows, gemm->depth, noise, dev);
    matmul_fill_operand(&gemm->b, gemm->depth, gemm->cols, noise, dev);
    if (gemm->gelu) {
        const struct gemm_operand pre = {gemm->gelu, gemm->ld_out, false, NULL};
        matmul_fill_operand(&pre, gemm->rows, gemm->cols, noise, dev);
    }
    matmul_add_candidates(&candidates, product, false, library);
    if (candidates.count == 0)
        return false;
    if (matmul_may_fuse(product))
        matmul_add_candidates(&candidates, product, true, library);
    matmul_time_candidates(&candidates, product, dev);
    int best = matmul_fastest(&candidates);
    while (candidates.of[best].plan.fused &&
           !matmul_fused_holds(&candidates.of[best], &candidates.of[0], product, dev)) {
        candidates.of[best].us = INFINITY;
        best = matmul_fastest(&candidates);
    }
    const struct matmul_candidate *chosen = &candidates.of[best];
    const struct matmul_choice choice = {
        chosen->plan.key, chosen->plan.algorithm, chosen->plan.fused, best, candidates.of[0].us, chosen->us};
    matmul_keep_choice(library, &choice);
    return true;
}
