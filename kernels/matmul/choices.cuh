// The products that cuBLASLt is asked for, their plans, and the choices of algorithms, which run/tune.cuh makes.
#pragma once
#include "kernels/fp8/fp8.cuh"     // struct fp8_matrix
#include "kernels/matmul/gemm.cuh" // struct gemm
#include <cublasLt.h>              // cublasLtMatmulAlgo_t
#include <sys/cdefs.h>             // __BEGIN_DECLS

enum {
    MATMUL_PLANS = 128,     // a training run of one model has some 20, with FP8 some 40
    MATMUL_ALIGNMENT = 256, // the largest that a key tells apart: the library asks for no more
};

// The members of a plan's key, each an int64 for comparison by bytes. Alignments are in bytes; gelu: enum matmul_gelu.
#define MATMUL_KEY(X)                                                                                                  \
    X(rows)                                                                                                            \
    X(cols)                                                                                                            \
    X(depth)                                                                                                           \
    X(a_ld)                                                                                                            \
    X(b_ld)                                                                                                            \
    X(ld_out)                                                                                                          \
    X(a_transposed)                                                                                                    \
    X(b_transposed)                                                                                                    \
    X(sums)                                                                                                            \
    X(has_bias)                                                                                                        \
    X(has_dbias)                                                                                                       \
    X(gelu)                                                                                                            \
    X(a_type)                                                                                                          \
    X(b_type)                                                                                                          \
    X(a_scaling)                                                                                                       \
    X(b_scaling)                                                                                                       \
    X(fast)                                                                                                            \
    X(a_alignment)                                                                                                     \
    X(b_alignment)                                                                                                     \
    X(c_alignment)                                                                                                     \
    X(bias_alignment)                                                                                                  \
    X(gelu_alignment)
enum matmul_gelu { MATMUL_NO_GELU, MATMUL_GELU, MATMUL_GELU_SUMS }; // the derivative, and then sums of columns
struct matmul_key {
#define MATMUL_KEY_MEMBER(name) int64_t name;
    MATMUL_KEY(MATMUL_KEY_MEMBER)
#undef MATMUL_KEY_MEMBER
};
enum { MATMUL_KEY_NUMBERS = sizeof(struct matmul_key) / sizeof(int64_t) };

// The algorithm chosen for a product. fused: its epilogue sums the bias gradient, or applies GELU's derivative.
struct matmul_choice {
    struct matmul_key key;
    cublasLtMatmulAlgo_t algorithm;
    bool fused;
    int candidate;       // its number among those that were timed, 0: what is taken without a choice
    double first_us, us; // microseconds of candidate 0, and of this one
};
// A product as a call asks for it. a, b: what the gemm's operands point to where they are FP8.
struct matmul_product {
    struct gemm gemm;
    struct fp8_matrix a, b;
    float *dbias;
    void *workspace;
};
struct matmul_plan {
    struct matmul_key key;
    bool fused; // with the epilogue
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t a, b, c; // by our names
    cublasLtMatmulAlgo_t algorithm;
};
struct matmul_library {
    cublasLtHandle_t handle; // NULL until it is needed: without one nothing asks for a GPU
    int64_t planned;         // plans made so far; plan i is plans[i % MATMUL_PLANS]
    struct matmul_plan plans[MATMUL_PLANS];
    int choice_count;
    struct matmul_choice choices[MATMUL_PLANS];
    bool listing; // products are listed, each key once, and not computed
    int product_count;
    struct matmul_product products[MATMUL_PLANS];
    bool list_overflowed; // a product was not listed, since MATMUL_PLANS are
    int wrong;            // algorithms that matmul_tune left out, as they multiply wrongly
    char description[64];
};

// The numbers that operands are filled with: pairs of bf16 numbers of magnitudes from 0.125 to 2, which a pair as an
// fp32 number has, too; codes of 0.5 to 2, whose sums are exact up to 2^13, in the 14 bits of Hopper's tensor cores.
struct matmul_noise {
    uint32_t *words, *codes; // [MATMUL_NOISE_WORDS + 1] each, in one piece of pinned memory
    char *memory;            // device memory that may be filled
    size_t bytes;            // of it
};

__BEGIN_DECLS
// Returns a product's key, whatever `add` is. Of pointers, dbias too, it has the alignment and whether they are NULL.
struct matmul_key matmul_key_of(const struct gemm *gemm, const float *dbias);

// Returns the choice that is kept for a key, which belongs to the library, or NULL where there is none.
const struct matmul_choice *matmul_choice_of(const struct matmul_library *library, const struct matmul_key *key);

// Empties the list. Until matmul_list_end gemm_run only lists products, each key once; list_overflowed: it was full.
void matmul_list_begin(struct matmul_library *library);

void matmul_list_end(struct matmul_library *library);

// Keeps a choice for the listed product with its key, and drops all plans. Returns false, and changes nothing, if no
// such product is listed, or if the product has a choice already or can't use this one.
bool matmul_take_choice(struct matmul_library *library, const struct matmul_choice *choice);

// Times the algorithms of a product without a choice, keeps the fastest that multiplies right and gives the same bits
// twice, and drops all plans. Keeps the heuristics' first if no other is clearly faster, and with times of 0 if none
// does or all results are 0 or not finite; if that first one multiplies wrongly, it ends the program. Returns false if
// there is no algorithm. Waits. Overwrites output, dbias, workspace, and operands in FP8 or in the noise's memory.
bool matmul_tune(struct matmul_library *library, const struct matmul_product *product, const struct matmul_noise *noise,
                 struct device *dev);

// Whether the algorithm of a product's plan agrees with sums of a few elements in double or, fused with GELU's
// derivative, with the heuristics' first, which agrees with such sums. Waits. Overwrites what matmul_tune does.
bool matmul_prove(struct matmul_library *library, const struct matmul_product *product,
                  const struct matmul_noise *noise, struct device *dev);

// Returns a hash of the listed products and their algorithms, in any order. A refused product ends the program.
uint64_t matmul_products_hash(struct matmul_library *library);

// Replaces a product's choice by the heuristics' first, with times of 0, and drops all plans. Returns false, and
// changes nothing, if the product has no choice.
bool matmul_drop_choice(struct matmul_library *library, const struct matmul_product *product);

// Ends the program, as cuBLASLt multiplies wrongly. which: what does, with its verb, as "its algorithm differs".
void matmul_fail_wrong(const struct gemm *gemm, const char *which) __attribute__((noreturn));

// Creates noise, which matmul_noise_close frees, and enqueues filling `memory`, `bytes` of device memory, with it.
struct matmul_noise matmul_noise_open(void *memory, size_t bytes, struct device *dev);

// Waits for the device, then frees the noise's words. *noise and the memory that it filled stay the caller's.
void matmul_noise_close(struct matmul_noise *noise, struct device *dev);
__END_DECLS
