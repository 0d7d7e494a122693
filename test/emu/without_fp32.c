// What stands for the emulated engine in fp32 in the program of the short run, which trains in bf16 on the emulator: the
// engine's ops take as long to compile in fp32 as in bf16.
#include "run/engine.h"
#include "runtime/machine/error.h" // fail

// Ends the program.
int train_cuda_fp32(const struct config *config) { fail("this train_gpt has no emulated engine in fp32 (make emu)"); }
// Ends the program.
int train_cuda_fp32_self_check(const char *request) { return train_cuda_fp32(NULL); }
