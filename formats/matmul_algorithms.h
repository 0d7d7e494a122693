// matmul_algorithms.txt: the fastest algorithm found for each of a run's matrix products (--matmul-tuning). The file is
// in the folder of --out and in each checkpoint, so that a run that goes on has the same bits.
//   train_gpt matmul algorithms 3
//   library=130000 multiprocessors=132 gpu=NVIDIA H100 80GB HBM3
//   rows=8192 cols=2304 ... fused=0 candidate=3 first_us=117.25 us=109.5 algorithm=3c00000042...
// Each product has a line: the numbers that its algorithm depends on, under names that the caller gives; what was
// found; and the algorithm as the library's 64 bytes, which only the same version of the library can read.
#pragma once
#include "runtime/machine/error_text.h" // struct error_text
#include <stdbool.h>                    // bool
#include <stddef.h>                     // size_t
#include <stdint.h>                     // int64_t, uint64_t
#include <sys/cdefs.h>                  // __BEGIN_DECLS

#define MATMUL_ALGORITHMS_NAME "matmul_algorithms.txt"
enum {
    MATMUL_ALGORITHMS_KEY = 22,       // numbers of a product
    MATMUL_ALGORITHMS_ROWS = 128,     // products at most
    MATMUL_ALGORITHMS_BYTES = 1 << 20 // limit of the text
};

struct matmul_algorithm {
    int64_t key[MATMUL_ALGORITHMS_KEY];
    bool fused;              // the product's epilogue does what comes with it: a bias gradient, GELU's derivative
    int candidate;           // among those that were timed; 0: the library's first
    double first_us, us;     // microseconds of candidate 0, and of this one
    unsigned char bytes[64]; // the library's
};
struct matmul_algorithms {
    int64_t library; // version, as 130100 for 13.1.0
    int multiprocessors;
    char gpu[256];
    int count;
    struct matmul_algorithm rows[MATMUL_ALGORITHMS_ROWS];
};

__BEGIN_DECLS
// Parses a text, which may be malformed. key_names (MATMUL_ALGORITHMS_KEY): the names of a product's numbers. Returns
// NULL or the problem, as "NAME: line 3: ..."; *algorithms then has the products before that line.
const char *matmul_algorithms_parse(struct matmul_algorithms *algorithms, const char *const *key_names,
                                    const unsigned char *data, uint64_t bytes, const char *name,
                                    struct error_text *error);
// Returns the file's text, of *bytes, which the caller frees; NULL when out of memory.
char *matmul_algorithms_text(const struct matmul_algorithms *algorithms, const char *const *key_names, size_t *bytes);
__END_DECLS
