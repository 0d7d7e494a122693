// The choice of cuBLASLt's algorithms by timing: the fastest of those that the heuristics rank first, and, for a
// product that comes with a bias gradient or GELU's derivative, whether the epilogue or our own kernel does that. Each
// chosen algorithm gave the same bits twice and multiplied right (kernels/matmul/proof.cuh) or, with GELU's derivative,
// agreed with one that did; two may differ. Choices depend on times: who wants the same bits again has to keep them.
#pragma once
#include "kernels/matmul/candidates.cuh" // struct matmul_candidates, matmul_judge
#include "kernels/matmul/proof.cuh"      // matmul_is_proven
#include "runtime/files/hash.h"          // hash64

void matmul_list_begin(struct matmul_library *library) {
    library->listing = true;
    library->product_count = 0;
    library->list_overflowed = false;
}
void matmul_list_end(struct matmul_library *library) { library->listing = false; }

// Keeps a choice for its product, which has none yet, and drops all plans. Ends the program with MATMUL_PLANS kept.
static void matmul_keep_choice(struct matmul_library *library, const struct matmul_choice *choice) {
    if (library->choice_count == MATMUL_PLANS)
        fail("matmul: %d choices are kept already; products must be listed once", (int)MATMUL_PLANS);
    library->choices[library->choice_count++] = *choice;
    library->planned = 0;
}
bool matmul_take_choice(struct matmul_library *library, const struct matmul_choice *choice) {
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
// Returns the fastest candidate (matmul_fastest) that multiplies right and gives equal bits twice. Returns NULL if no
// unfused one is left, or all results are 0 or not finite. Drops candidates that fail, adds to `wrong` how many
// multiply wrongly, and waits. Overwrites what matmul_judge does.
static const struct matmul_candidate *matmul_best(struct matmul_candidates *candidates,
                                                  const struct matmul_product *product, struct device *dev) {
    for (;;) {
        matmul_drop_untimed(candidates);
        if (candidates->count == 0 || candidates->of[0].plan.fused)
            return NULL;
        struct matmul_candidate *best = &candidates->of[matmul_fastest(candidates)];
        struct matmul_candidate *const proven = matmul_can_be_proven(best, product) ? best : &candidates->of[0];
        if (!matmul_is_proven(proven, product, dev)) {
            candidates->wrong++;
            proven->us = INFINITY;
            continue;
        }
        switch (matmul_judge(best, &candidates->of[0], product, dev)) {
        case MATMUL_HOLDS: return best;
        case MATMUL_TELLS_NOTHING: return NULL;
        case MATMUL_FAILS: best->us = INFINITY;
        }
    }
}
static void matmul_fill_operands(const struct matmul_product *product, const struct matmul_noise *noise,
                                 struct device *dev) {
    const struct gemm *gemm = &product->gemm;
    matmul_fill_operand(&gemm->a, gemm->rows, gemm->depth, 0, noise, dev);
    matmul_fill_operand(&gemm->b, gemm->depth, gemm->cols, 1, noise, dev);
    if (gemm->gelu) {
        const struct gemm_operand pre = {gemm->gelu, gemm->ld_out, false, NULL};
        matmul_fill_operand(&pre, gemm->rows, gemm->cols, 0, noise, dev);
    }
}
void matmul_fail_wrong(const struct gemm *gemm, const char *which) {
    fail("cuBLASLt multiplies wrongly on this GPU: of a product of %lld x %lld x %lld %s from plain sums; another "
         "version of the library or of the driver may not",
         (long long)gemm->rows, (long long)gemm->cols, (long long)gemm->depth, which);
}
bool matmul_drop_choice(struct matmul_library *library, const struct matmul_product *product) {
    const struct matmul_key key = matmul_key_of(&product->gemm, product->dbias);
    const struct matmul_choice *const wrong = matmul_choice_of(library, &key);
    if (!wrong)
        return false;
    library->choices[wrong - library->choices] = library->choices[--library->choice_count];
    library->planned = 0;
    const struct matmul_choice first = {
        key, matmul_plan_for(&product->gemm, product->dbias, library)->algorithm, false, 0, 0, 0};
    matmul_keep_choice(library, &first);
    return true;
}
uint64_t matmul_products_hash(struct matmul_library *library) {
    uint64_t sum = 0;
    for (int i = 0; i < library->product_count; i++) {
        const struct matmul_product *product = &library->products[i];
        const struct matmul_plan *plan = matmul_plan_for(&product->gemm, product->dbias, library);
        sum += hash64(&plan->algorithm, sizeof plan->algorithm, hash64(&plan->key, sizeof plan->key, plan->fused));
    }
    return sum;
}
bool matmul_prove(struct matmul_library *library, const struct matmul_product *product,
                  const struct matmul_noise *noise, struct device *dev) {
    struct matmul_candidate candidate;
    struct matmul_candidates plain;
    memset(&candidate, 0, sizeof candidate);
    candidate.plan = *matmul_plan_for(&product->gemm, product->dbias, library);
    matmul_fill_operands(product, noise, dev);
    if (matmul_can_be_proven(&candidate, product))
        return matmul_is_proven(&candidate, product, dev);
    plain.count = 0;
    matmul_add_candidates(&plain, product, false, library);
    return plain.count > 0 && matmul_is_proven(&plain.of[0], product, dev) &&
           matmul_judge(&candidate, &plain.of[0], product, dev) != MATMUL_FAILS;
}
bool matmul_tune(struct matmul_library *library, const struct matmul_product *product, const struct matmul_noise *noise,
                 struct device *dev) {
    const struct gemm *gemm = &product->gemm;
    struct matmul_candidates candidates;
    struct matmul_candidate first;
    candidates.count = candidates.wrong = 0;
    matmul_fill_operands(product, noise, dev);
    matmul_add_candidates(&candidates, product, false, library);
    if (candidates.count == 0)
        return false;
    first = candidates.of[0];
    if (matmul_may_fuse(product))
        matmul_add_candidates(&candidates, product, true, library);
    struct matmul_choice choice = {candidates.of[0].plan.key, candidates.of[0].plan.algorithm, false, 0, 0, 0};
    matmul_time_candidates(&candidates, product, dev);
    const struct matmul_candidate *best = matmul_best(&candidates, product, dev);
    if (best) {
        choice.algorithm = best->plan.algorithm;
        choice.fused = best->plan.fused;
        choice.candidate = best->number;
        choice.first_us = candidates.of[0].us;
        choice.us = best->us;
    }
    library->wrong += candidates.wrong;
    if (!best && candidates.wrong > 0 && !matmul_is_proven(&first, product, dev)) {
        char which[80];
        snprintf(which, sizeof which, "its first algorithm and %d others differ", candidates.wrong - 1);
        matmul_fail_wrong(gemm, which);
    }
    matmul_keep_choice(library, &choice);
    return true;
}
