// Chooses the copy of the engine: by --device, --precision, --instruction-set, this build and this machine.
#pragma once
#include "config/config.h"            // struct config
#include "kernels/amx.cuh"            // amx_available
#include "run/levels.h"               // levels, the copies of the engine for the cpu
#include "runtime/machine/error.h"    // fail
#include "runtime/machine/say.h"      // say
#include "runtime/machine/text_add.h" // text_add
#include "runtime/net/parallel.h"     // parallel_largest
#include "runtime/text/log.h"         // log_row
#include <stdio.h>                    // snprintf

// ---- the engines for CUDA, where the build has them ----

#ifdef HAVE_CUDA
enum { CUDA_IS_BUILT = 1 };
// Returns the engine for CUDA in fp32 or, for any other precision, in bf16; NULL: the build has none for CUDA.
static engine_entry *cuda_engine(enum config_precision precision) {
    return precision == WITH_FP32 ? train_cuda_fp32 : train_cuda_bf16;
}
// Returns why this build and this machine can't use a GPU; "" if they can. Never returns NULL.
static const char *cuda_unavailable_reason(void) { return train_cuda_bf16_unavailable_reason(); }
// Serves a request of run/self_check.cuh, whose first word is the precision, as a run's child. Returns the exit status.
static int cuda_self_check(const char *request) {
    return strncmp(request, "fp32 ", 5) == 0 ? train_cuda_fp32_self_check(request)
                                             : train_cuda_bf16_self_check(request);
}
static void cuda_print_build(void) {
    log_row("cuda", "fp32 and bf16, for %s", GPU_ARCHITECTURES);
    train_cuda_bf16_libraries();
}
#else
enum { CUDA_IS_BUILT = 0 };
static engine_entry *cuda_engine(enum config_precision precision) { return NULL; }
static const char *cuda_unavailable_reason(void) { return "this train_gpt was built without it (make cuda builds it)"; }
static int cuda_self_check(const char *request) { fail("%s", cuda_unavailable_reason()); }
static void cuda_print_build(void) { log_row("cuda", "%s", cuda_unavailable_reason()); }
#endif

// Returns the index in `levels` of the level `name`. Ends the program where this build or this CPU lacks that level.
static int level_asked(const char *name) {
    char list[256];
    bool is_built = false;
    for (int i = 0; i < NUM_LEVELS; i++) {
        if (strcmp(levels[i].name, name) != 0)
            continue;
        if (level_runs_here(&levels[i]))
            return i;
        is_built = true;
    }
    levels_list_here(list, sizeof list);
    fail("--instruction-set %s: %s; it may be auto, or of %s", name,
         is_built ? "this CPU lacks some of it" : "this train_gpt was not built for it", list);
}
// Returns the cpu engines' level: --instruction-set's, or the highest that every rank's CPU can run, as only equal
// instructions keep ranks' parameters equal to the bit. Ends the program if this CPU lacks it. Every rank calls this.
static const struct level *choose_level(const struct config *config) {
    int level = NUM_LEVELS - 1;
    if (strcmp(config->device.instruction_set, "auto") != 0)
        level = level_asked(config->device.instruction_set);
    while (level > 0 && !level_runs_here(&levels[level]))
        level--;
    level = NUM_LEVELS - 1 - parallel_largest(config->parallel, NUM_LEVELS - 1 - level, "the instruction set");
    return &levels[level > 0 ? level : 0]; // another rank may run another build, with more levels
}

// Replaces --precision auto: by bf16 where FP8, or parameters without master weights, need it, or where every rank's
// device multiplies bf16 faster than fp32, as GPUs do, and CPUs that have instructions for it; else by fp32. Sets
// config->precision_reason. --device must be chosen. Every rank calls this.
static void resolve_precision(struct config *config, const struct level *level) {
    static char reason[128];
    const char *const on_cpu = amx_available() ? "AMX" : level_bf16_products(level);
    const char *const products = config->device.device == DEVICE_CUDA ? "tensor cores" : on_cpu;
    const bool a_rank_has_none = parallel_largest(config->parallel, !products, "the precision") != 0;
    if (config->device.precision != WITH_AUTO)
        return;
    const bool fp8 = config->fp8.fp8_format != FP8_FORMAT_NONE,
               no_master = config->states.main_params_dtype != MAIN_FP32;
    config->device.precision = a_rank_has_none && !fp8 && !no_master ? WITH_FP32 : WITH_BF16;
    if (fp8 || no_master)
        snprintf(reason, sizeof reason, "--%s needs it", fp8 ? "fp8-format" : "main-params-dtype bf16");
    else if (!products)
        snprintf(reason, sizeof reason, "%s has no products of bf16", level->name);
    else if (a_rank_has_none)
        snprintf(reason, sizeof reason, "another rank's CPU has no products of bf16");
    else
        snprintf(reason, sizeof reason, "this %s multiplies it (%s) faster than fp32; --precision fp32 is more exact",
                 config->device.device == DEVICE_CUDA ? "GPU" : "CPU", products);
    config->precision_reason = reason;
}
// Returns a level's engine for the options' precision. Sets the level's name, instructions and reason in *config.
static engine_entry *cpu_engine(struct config *config, const struct level *level) {
    static char reason[64], instructions[512];
    if (NUM_LEVELS > 1)
        snprintf(reason, sizeof reason, "of %d that this program has", (int)NUM_LEVELS);
    else
        snprintf(reason, sizeof reason, "the one that this program has");
    level_list_features(instructions, sizeof instructions, level);
    config->instructions = instructions;
    config->device.instruction_set = level->name;
    config->instruction_set_reason = reason;
    return config->device.precision == WITH_FP32 ? level->fp32 : level->bf16;
}

// Chooses the device for --device auto: a GPU if one can be used, else the CPU. A build for GPUs then prints why it
// uses none. Ends the program where only other ranks have a GPU. Every rank calls this.
static enum config_device choose_device(struct parallel *parallel) {
    const char *reason = cuda_unavailable_reason();
    const bool any_has_one = parallel_largest(parallel, !*reason, "the device") != 0;
    if (*reason && any_has_one)
        fail(
            "--device auto: other ranks have a GPU, and this one uses none: %s; start each rank where it has a GPU, or "
            "all with --device cpu",
            reason);
    if (CUDA_IS_BUILT && *reason)
        say(stdout, "no GPU is used: %s\n", reason);
    return *reason ? DEVICE_CPU : DEVICE_CUDA;
}
// Ends the program where --device cuda can't be used. A plan needs a build for CUDA, but no GPU.
static void check_cuda(bool plans) {
    const char *reason = cuda_unavailable_reason();
    if (*reason && !(CUDA_IS_BUILT && plans))
        fail("--device cuda: %s; %s", reason,
             plans ? "--plan-gpu NAME plans for a GPU that is not here" : "--device cpu trains on the CPU");
}

// Ends the job where ranks' programs are of different commits. In training at stage 0 on CPUs their instructions, set
// by cpu_engine, must be the same, too, as every rank updates all parameters to equal bits. Every rank calls this.
static void check_programs(const struct config *config) {
    char text[1024];
    snprintf(text, sizeof text, "commit %s\n", build_commit);
    if (config->instructions && config->processes.zero_stage == 0 && config_trains(config))
        text_add(text, sizeof text, "instructions%s (which may differ from --zero-stage 1 on)\n", config->instructions);
    parallel_check_same(config->parallel, text, "programs");
}

// Chooses the engine by the options and, for auto, by all ranks' machines; never NULL. Sets the options to the choice,
// with reasons. --plan-gpu sets --device cuda, though a cpu engine may plan. May end the job. Every rank calls this.
static engine_entry *choose_engine(struct config *config) {
    // Every build plans a GPU's memory, by the same arithmetic: --device says which copy of the engine does.
    const bool plans_gpu = *config->memory.plan_gpu, by_cpu = config->device.device == DEVICE_CPU || !CUDA_IS_BUILT;
    if (plans_gpu)
        config->device.device = DEVICE_CUDA;
    switch (config->device.device) {
    case DEVICE_AUTO: config->device.device = choose_device(config->parallel); break;
    case DEVICE_CUDA:
        if (!plans_gpu)
            check_cuda(config->memory.plan);
        break;
    case DEVICE_CPU: break;
    }
    config->precision_reason = *config->checkpoint ? "the checkpoint's" : "by --precision";
    const struct level *const level = choose_level(config); // by all ranks, some of which may have GPUs
    resolve_precision(config, level);
    engine_entry *const engine = config->device.device == DEVICE_CUDA && !(plans_gpu && by_cpu)
                                     ? cuda_engine(config->device.precision)
                                     : cpu_engine(config, level);
    check_programs(config);
    return engine;
}
