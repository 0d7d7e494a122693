// The algorithms of cuBLASLt that a product may take, timed in place: on the operands that the model will pass, filled
// with noise where they are activations, since zeros draw less power, and into its own output. GELU's derivative and
// sums of columns that come with the product run with it. Algorithms take turns, so that a change of the clock rate
// meets them all. A small product finds its operands in the L2 cache, where in a training step it might not.
#pragma once
#include "kernels/activation.cuh"      // gelu_backward, activation_bias_sums
#include "kernels/device_memory.cuh"   // device_upload, device_copy, host_allocate
#include "kernels/device_queue.cuh"    // device_synchronize
#include "kernels/matmul/cublaslt.cuh" // struct matmul_plan, matmul_enqueue
#include "kernels/random.cuh"          // random_uniform
#include <math.h>                      // fabs, INFINITY

enum {
    MATMUL_CANDIDATES = 8, // algorithms of a product that are timed, and as many with the epilogue
    MATMUL_ROUNDS = 3,     // of timing
    MATMUL_RUNS = 8,       // most runs in a round
    MATMUL_NOISE_WORDS = 1 << 20,
    MATMUL_SAMPLE_ROWS = 64, // of an output, which are compared
};
#define MATMUL_ROUND_US 200.0  // what a round of an algorithm should take
#define MATMUL_LEAST_GAIN 0.02 // the part of the first's time that another must save: more than times vary by

// ---- Noise ----

// Returns word i of the noise, as struct matmul_noise describes it.
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
// Returns word i of the noise for FP8 operands, as struct matmul_noise describes it.
static uint32_t matmul_noise_codes(uint64_t i) {
    uint32_t word = 0;
    for (int half = 0; half < 2; half++) {
        const uint32_t bits = (uint32_t)(random_uniform(1, 3, 2 * i + (uint64_t)half) * 0x1p16f);
        for (int byte = 0; byte < 2; byte++) {
            const uint32_t of_six = (bits >> 8 * byte & 0xff) * 6 >> 8;
            word |= ((0x38 + of_six / 2 * 4) | of_six % 2 << 7) << (16 * half + 8 * byte);
        }
    }
    return word;
}
static void matmul_fill(char *to, size_t bytes, const uint32_t *words, struct device *dev) {
    const size_t block = MATMUL_NOISE_WORDS * sizeof(uint32_t);
    device_upload(to, words, bytes < block ? bytes : block, dev);
    for (size_t at = block, n; at < bytes; at += n) {
        n = at < bytes - at ? at : bytes - at;
        device_copy(to + at, to, n, dev);
    }
}
struct matmul_noise matmul_noise_open(void *memory, size_t bytes, struct device *dev) {
    const int64_t words = MATMUL_NOISE_WORDS + 1; // since one operand's codes begin at the second word
    struct matmul_noise noise = {(uint32_t *)host_allocate(2 * (size_t)words * sizeof(uint32_t), dev), NULL,
                                 (char *)memory, bytes};
    noise.codes = noise.words + words;
    for (int64_t i = 0; i < words; i++) {
        noise.words[i] = matmul_noise_word((uint64_t)i);
        noise.codes[i] = matmul_noise_codes((uint64_t)i);
    }
    matmul_fill(noise.memory, bytes, noise.words, dev);
    return noise;
}
void matmul_noise_close(struct matmul_noise *noise, struct device *dev) {
    device_synchronize(dev);
    host_free(noise->words);
}
// Enqueues noise for an operand (rows, cols), gaps and blocks' scales too, if it is FP8, which casts overwrite, or lies
// wholly in the noise's memory. first: the word of codes to begin at, 0 or 1. Two operands that began alike would have
// sums beyond what is exact.
static void matmul_fill_operand(const struct gemm_operand *x, int64_t rows, int64_t cols, int first,
                                const struct matmul_noise *noise, struct device *dev) {
    char *data = (char *)(uintptr_t)matmul_operand_data(x);
    const int64_t lines = x->transposed ? cols : rows, width = x->transposed ? rows : cols;
    const size_t bytes = (size_t)((lines - 1) * x->ld + width) * (x->fp8 ? sizeof(fp8) : sizeof(floatX));
    if (!x->fp8 && (data < noise->memory || data + bytes > noise->memory + noise->bytes))
        return;
    matmul_fill(data, bytes, x->fp8 ? noise->codes + first : noise->words, dev);
    if (x->fp8 && x->fp8->granularity != FP8_PER_TENSOR) // the blocks' scales lie after the codes
        matmul_fill((char *)x->fp8->inverse,
                    (size_t)fp8_inverse_count(x->fp8->granularity, lines, width) * sizeof(float), noise->words, dev);
}

// ---- Candidates ----

struct matmul_candidate {
    struct matmul_plan plan;
    int number; // among all that were added
    double us;  // the least of a run, over all rounds; INFINITY: of none, or not to be taken
};
struct matmul_candidates {
    int count; // those without an epilogue come first
    int wrong; // that were found to multiply wrongly, and are not among them any more
    struct matmul_candidate of[2 * MATMUL_CANDIDATES];
};
// Whether an algorithm keeps to the reductions that the plan allows, and workspace_bytes fit in the plan's workspace.
static bool matmul_is_allowed(const struct matmul_plan *plan, const cublasLtMatmulAlgo_t *algorithm,
                              size_t workspace_bytes) {
    uint32_t reduction = 0;
    size_t written = 0;
    return cublasLtMatmulAlgoConfigGetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &reduction,
                                                sizeof reduction, &written) == CUBLAS_STATUS_SUCCESS &&
           (reduction & ~matmul_reductions(plan)) == 0 && workspace_bytes <= matmul_library_bytes(plan);
}
// Appends up to MATMUL_CANDIDATES allowed algorithms, in the heuristics' order, with us INFINITY. fused: with the
// epilogue, which needs matmul_may_fuse. The first call must pass false, so that candidate 0 has no epilogue.
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
        struct matmul_candidate *candidate = &candidates->of[candidates->count];
        candidate->number = candidates->count++;
        candidate->plan = plan;
        candidate->plan.algorithm = results[i].algo;
        candidate->us = INFINITY;
    }
}
static size_t matmul_gelu_sums_bytes(const struct gemm *gemm) {
    return gemm->gelu_sums ? (size_t)(activation_bias_num_runs(gemm->rows) * gemm->cols) * sizeof(float) : 0;
}
// Whether an epilogue can do what comes with the product: dbias or, in bf16 only, GELU's derivative. False if neither
// comes. BGRADB's sums need room in the second half of the workspace. DGELU's other input must suit packed accesses,
// and the sums after it are timed in the workspace. In fp32, results would have the error of DGELU's exponential.
static bool matmul_may_fuse(const struct matmul_product *product) {
    const struct gemm *gemm = &product->gemm;
    if (product->dbias)
        return (size_t)gemm->rows * sizeof(float) <= GPU_MATMUL_BYTES / 2;
    return gemm->gelu && sizeof(floatX) == 2 && gemm->ld_out == gemm->cols && gemm->cols % PACK == 0 &&
           packed_aligned(gemm->gelu) && matmul_gelu_sums_bytes(gemm) <= GPU_MATMUL_BYTES;
}
// Enqueues a product by a candidate, with its dbias: by the epilogue if the candidate is fused, else by our kernels.
// Applies GELU's derivative likewise, but only where matmul_may_fuse; then, with gemm.gelu_sums, sums of columns go to
// the workspace. Returns the library's status.
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
// Returns the mean time of `runs` runs, in microseconds, and waits for them. INFINITY: the library refuses the
// candidate. A run before them isn't counted, so that the host is ahead of the GPU when the clock starts.
static double matmul_time_runs(struct matmul_candidate *candidate, const struct matmul_product *product, int runs,
                               const struct matmul_clock *clock, struct device *dev) {
    float milliseconds = 0;
    for (int i = 0; i <= runs; i++) {
        if (matmul_run_candidate(candidate, product, dev) != CUBLAS_STATUS_SUCCESS)
            return INFINITY;
        if (i == 0)
            cuda_check(cudaEventRecord(clock->begin, dev->stream));
    }
    cuda_check(cudaEventRecord(clock->end, dev->stream));
    cuda_check(cudaEventSynchronize(clock->end));
    cuda_check(cudaEventElapsedTime(&milliseconds, clock->begin, clock->end));
    return round(64e3 * milliseconds / runs) / 64; // a short number in a file
}
// Times all candidates, in turns, and waits. Sets `us`, INFINITY before, to the least of rounds; a refused one's stays.
static void matmul_time_candidates(struct matmul_candidates *candidates, const struct matmul_product *product,
                                   struct device *dev) {
    struct matmul_clock clock;
    cuda_check(cudaEventCreate(&clock.begin));
    cuda_check(cudaEventCreate(&clock.end));
    for (int round = 0; round < MATMUL_ROUNDS; round++)
        for (int i = 0; i < candidates->count; i++) {
            struct matmul_candidate *candidate = &candidates->of[i];
            if (round > 0 && !isfinite(candidate->us)) // it was refused
                continue;
            const double wished = MATMUL_ROUND_US / candidate->us; // 0 in the first round
            const int runs = wished < 1 ? 1 : wished > MATMUL_RUNS ? MATMUL_RUNS : (int)wished;
            candidate->us = fmin(candidate->us, matmul_time_runs(candidate, product, runs, &clock, dev));
        }
    cuda_check(cudaEventDestroy(clock.begin));
    cuda_check(cudaEventDestroy(clock.end));
}
// Removes the candidates whose `us` is INFINITY: the library refused them, or matmul_best found that they fail.
static void matmul_drop_untimed(struct matmul_candidates *candidates) {
    int kept = 0;
    for (int i = 0; i < candidates->count; i++)
        if (isfinite(candidates->of[i].us))
            candidates->of[kept++] = candidates->of[i];
    candidates->count = kept;
}
// Returns the index of the fastest candidate, or 0 where it saves less than MATMUL_LEAST_GAIN of candidate 0's time.
static int matmul_fastest(const struct matmul_candidates *candidates) {
    int best = 0;
    for (int i = 1; i < candidates->count; i++)
        if (candidates->of[i].us < candidates->of[best].us)
            best = i;
    return candidates->of[best].us <= (1 - MATMUL_LEAST_GAIN) * candidates->of[0].us ? best : 0;
}

// ---- Results ----

struct matmul_sample {
    size_t elements, element_bytes, out_bytes, bytes;
};
// Returns a sample's sizes: the first MATMUL_SAMPLE_ROWS rows of the output, with gaps, then, at out_bytes, any dbias.
static struct matmul_sample matmul_sample_of(const struct matmul_product *product) {
    const struct gemm *gemm = &product->gemm;
    struct matmul_sample sample;
    sample.elements = (size_t)((gemm_min(gemm->rows, MATMUL_SAMPLE_ROWS) - 1) * gemm->ld_out + gemm->cols);
    sample.element_bytes = gemm->sum ? sizeof(float) : sizeof(floatX);
    sample.out_bytes = (sample.elements * sample.element_bytes + 15) / 16 * 16;
    sample.bytes = sample.out_bytes + (product->dbias ? (size_t)gemm->rows * sizeof(float) : 0);
    return sample;
}
// Runs a candidate and brings its sample to `to` (sample.bytes) on the host. Overwrites the product's output, also
// where the product adds, its dbias and the workspace. Returns false where the library refuses.
static bool matmul_sample_candidate(char *to, struct matmul_sample sample, struct matmul_candidate *candidate,
                                    const struct matmul_product *product, struct device *dev) {
    struct matmul_product once = *product;
    once.gemm.add = false;
    if (matmul_run_candidate(candidate, &once, dev) != CUBLAS_STATUS_SUCCESS)
        return false;
    const void *out = once.gemm.sum ? (const void *)once.gemm.sum : (const void *)once.gemm.out;
    memset(to, 0, sample.bytes);
    device_download(to, out, sample.elements * sample.element_bytes, dev);
    if (once.dbias)
        device_download(to + sample.out_bytes, once.dbias, sample.bytes - sample.out_bytes, dev);
    return true;
}
// Whether dbias, or without one the output with GELU's derivative, agrees in a (fused) and b (ours) but for rounding.
static bool matmul_samples_agree(const char *a, const char *b, struct matmul_sample sample,
                                 const struct matmul_product *product) {
    double difference = 0, magnitude = 0;
    const float *x_sums = (const float *)(a + sample.out_bytes), *y_sums = (const float *)(b + sample.out_bytes);
    const floatX *x_out = (const floatX *)a, *y_out = (const floatX *)b;
    const size_t n = product->dbias ? (size_t)product->gemm.rows : sample.elements;
    for (size_t i = 0; i < n; i++) {
        const double x = product->dbias ? x_sums[i] : to_float(x_out[i]);
        const double y = product->dbias ? y_sums[i] : to_float(y_out[i]);
        difference += fabs(x - y);
        magnitude += fabs(y);
    }
    return difference <= (product->dbias ? 1e-4 : 0x1p-8) * magnitude;
}
// Whether a sample's output (not its dbias) has a finite number other than 0: zeros are the same by any algorithm.
static bool matmul_sample_tells(const char *of, struct matmul_sample sample) {
    for (size_t i = 0; i < sample.elements; i++) {
        const float x =
            sample.element_bytes == sizeof(float) ? ((const float *)of)[i] : to_float(((const floatX *)of)[i]);
        if (x != 0 && isfinite(x))
            return true;
    }
    return false;
}
// Whether a candidate may be chosen. MATMUL_TELLS_NOTHING: all results are 0 or not finite, as a new adapter's may be.
enum matmul_verdict { MATMUL_HOLDS, MATMUL_FAILS, MATMUL_TELLS_NOTHING };
// Judges a candidate by two runs. It fails if one is refused, if samples differ in a bit, or if it is fused and beyond
// rounding from `plain`. Else it holds, if matmul_sample_tells. Overwrites the output, dbias and workspace.
static enum matmul_verdict matmul_judge(struct matmul_candidate *candidate, struct matmul_candidate *plain,
                                        const struct matmul_product *product, struct device *dev) {
    const struct matmul_sample sample = matmul_sample_of(product);
    struct matmul_candidate *const runs[3] = {candidate, candidate, plain};
    char *samples = (char *)host_allocate(3 * sample.bytes, dev), *first = samples, *second = first + sample.bytes,
         *ours = second + sample.bytes;
    bool hold = true;
    for (int i = 0; i < (candidate->plan.fused ? 3 : 2) && hold; i++)
        hold = matmul_sample_candidate(samples + (size_t)i * sample.bytes, sample, runs[i], product, dev);
    hold = hold && memcmp(first, second, sample.bytes) == 0 &&
           (!candidate->plan.fused || matmul_samples_agree(first, ours, sample, product));
    const enum matmul_verdict verdict = !hold                                ? MATMUL_FAILS
                                        : matmul_sample_tells(first, sample) ? MATMUL_HOLDS
                                                                             : MATMUL_TELLS_NOTHING;
    host_free(samples);
    return verdict;
}
