// The copies of the engine in one train_gpt as main sees them: one for each target, precision and, on cpu, level.
#pragma once
#include "config/config.h" // struct config

#ifdef __cplusplus
extern "C" {
#endif
typedef int engine_entry(const struct config *config); // runs what the options ask for; returns the exit status
typedef const char *engine_unavailable_reason(void);   // why this machine can't use the target; "": it can
typedef void engine_libraries(void);                   // prints the libraries of a target with their versions
typedef int engine_self_check(const char *request);    // makes a check as run/self_check.cuh's child; the exit status
#define SELF_CHECK_ARGUMENT "self-check"               // the first argument of that child; the request is the second

// The cpu engines are declared in run/levels.h.
engine_entry train_cuda_fp32, train_cuda_bf16;
engine_unavailable_reason train_cuda_fp32_unavailable_reason, train_cuda_bf16_unavailable_reason;
engine_libraries train_cuda_fp32_libraries, train_cuda_bf16_libraries;
engine_self_check train_cuda_fp32_self_check, train_cuda_bf16_self_check;
#ifdef __cplusplus
}
#endif
