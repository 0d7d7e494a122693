// The table of environment variables that change what is computed, whether this program or a library reads them. Ranks
// that differ in one are refused at the start, and the report names those that are set. Launch scripts take the same
// names to other hosts (scripts/launch_environment.sh). Not in the table are OMP_NUM_THREADS, OMP_THREAD_LIMIT and
// OPENBLAS_NUM_THREADS, since ranks may have different numbers of cores, though a library's sums may round otherwise
// then (docs/cpu.md); NVTE_ALLOW_NONDETERMINISTIC_ALGO, since --deterministic-mode says it; and
// CUBLAS_WORKSPACE_CONFIG, since only cuBLASLt is called, with a workspace of the plan's.
#pragma once
#include "runtime/machine/error.h" // fail
#include "runtime/net/parallel.h"  // parallel_check_same
#include <stdio.h>                 // open_memstream
#include <stdlib.h>                // getenv, free
#include <string.h>                // strcmp

struct environment_variable {
    const char *name;
    const char *usual; // the value that means the same as unset; NULL: none does
    const char *why;   // what it decides
};
static const struct environment_variable environment_variables[] = {
    {"NVTE_FLASH_ATTN", "1", "attention's backend"},
    {"NVTE_FUSED_ATTN", "1", "attention's backend"},
    {"NVTE_UNFUSED_ATTN", "1", "attention's backend"},
    {"NVTE_FP8_DPA_BWD", "1", "whether attention's backward is in FP8"},
    {"CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT", NULL, "the form of cuDNN's backward"},
    {"CUDNN_LIB_CONFIG", NULL, "which engines cuDNN has"},
    {"NVIDIA_TF32_OVERRIDE", NULL, "TF32 in cuBLASLt and cuDNN"},
    {"CUBLAS_EMULATE_SINGLE_PRECISION", "0", "fp32 products out of bf16 in cuBLASLt"},
    {"CUBLAS_EMULATION_STRATEGY", NULL, "fp32 products out of bf16 in cuBLASLt"},
    {"CUBLASLT_HEURISTICS_LUT_FILE", NULL, "cuBLASLt's algorithms"},
    {"NCCL_ALGO", NULL, "the order of NCCL's sums"},
    {"NCCL_PROTO", NULL, "the order of NCCL's sums"},
    {"NCCL_NVLS_ENABLE", NULL, "the order of NCCL's sums"},
    {"NCCL_COLLNET_ENABLE", NULL, "the order of NCCL's sums"},
    {"NCCL_BUFFSIZE", NULL, "the order of NCCL's sums"},
    {"NCCL_NTHREADS", NULL, "the order of NCCL's sums"},
    {"NCCL_MIN_NCHANNELS", NULL, "the order of NCCL's sums"},
    {"NCCL_MAX_NCHANNELS", NULL, "the order of NCCL's sums"},
    {"NCCL_MIN_CTAS", NULL, "the order of NCCL's sums"},
    {"NCCL_MAX_CTAS", NULL, "the order of NCCL's sums"},
    {"ONEDNN_MAX_CPU_ISA", NULL, "oneDNN's instructions"},
    {"DNNL_MAX_CPU_ISA", NULL, "oneDNN's instructions"},
    {"ONEDNN_CPU_ISA_HINTS", "NO_HINTS", "oneDNN's instructions"},
    {"DNNL_CPU_ISA_HINTS", "NO_HINTS", "oneDNN's instructions"},
    {"ONEDNN_DEFAULT_FPMATH_MODE", "STRICT", "oneDNN's precision"},
    {"DNNL_DEFAULT_FPMATH_MODE", "STRICT", "oneDNN's precision"},
    {"OPENBLAS_CORETYPE", NULL, "OpenBLAS's instructions"},
    {"OPENBLAS_BLOCK_FACTOR", NULL, "the order of OpenBLAS's sums"},
    {"OPENBLAS_L2_SIZE", NULL, "the order of OpenBLAS's sums"},
    {"GLIBC_TUNABLES", NULL, "libm's instructions"},
};
enum { ENVIRONMENT_VARIABLES = sizeof environment_variables / sizeof *environment_variables };

// Returns a variable's value; NULL where it is unset, empty, or `usual`.
static const char *environment_value(const struct environment_variable *variable) {
    const char *const value = getenv(variable->name);
    return value && *value && !(variable->usual && strcmp(value, variable->usual) == 0) ? value : NULL;
}

// Ends the job where a variable of the table is not as on rank 0. parallel: NULL for one rank. Every rank calls this.
static void environment_check_ranks(struct parallel *parallel) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *const out = open_memstream(&text, &bytes);
    if (!out)
        fail("out of memory");
    for (int i = 0; i < ENVIRONMENT_VARIABLES; i++) {
        const struct environment_variable *const variable = &environment_variables[i];
        const char *const value = environment_value(variable);
        if (value)
            fprintf(out, "%s=%s\n", variable->name, value);
        else
            fprintf(out, "%s is not set%s%s\n", variable->name, variable->usual ? ", or " : "",
                    variable->usual ? variable->usual : "");
    }
    fclose(out);
    parallel_check_same(parallel, text, "environment variables");
    free(text);
}

// Returns the variables that are set, as "NAME=VALUE (why)" with commas, or "". The caller frees the text.
static char *environment_describe(void) {
    char *text = NULL;
    size_t bytes = 0;
    const char *comma = "";
    FILE *const out = open_memstream(&text, &bytes);
    if (!out)
        fail("out of memory");
    for (int i = 0; i < ENVIRONMENT_VARIABLES; i++) {
        const char *const value = environment_value(&environment_variables[i]);
        if (!value)
            continue;
        fprintf(out, "%s%s=%s (%s)", comma, environment_variables[i].name, value, environment_variables[i].why);
        comma = ", ";
    }
    fclose(out);
    return text;
}
