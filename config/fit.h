// The options of state formats and of offload to the host's memory: those that contradict each other end the program.
#pragma once
#include "config/config.h" // struct config

static inline double main_dtype_bytes(enum config_main_dtype dtype) {
    switch (dtype) {
    case MAIN_FP32: return 4;
    case MAIN_BF16: return 2;
    }
    __builtin_unreachable();
}

// Whether gradients may be in host memory or bf16: several ranks need the units' buffers of --zero-stage 2 or 3.
static inline bool config_may_move_gradients(const struct config *c) {
    return c->ranks <= 1 || c->processes.zero_stage >= 2;
}
// Whether parameters may be in host memory: several ranks need the units' buffers of --zero-stage 3.
static inline bool config_may_move_weights(const struct config *c) {
    return c->ranks <= 1 || c->processes.zero_stage >= 3;
}

// Switches --checkpoint-async off, unless given, if optimizer states, gradients or weights go to host memory.
static inline void config_resolve_checkpoint_async(struct config *c) {
    if ((c->states.optimizer_cpu_offload || c->states.offload_gradients || c->states.offload_weights) &&
        !config_given(c, checkpoints.checkpoint_async))
        c->checkpoints.checkpoint_async = false;
}

// Ends the program if options of offload, or of formats of the training state, do not go with the other options.
static inline void config_check_offload(const struct config *c) {
    if (c->states.optimizer_offload_fraction != 1 && !c->states.optimizer_cpu_offload)
        fail("--optimizer-offload-fraction %g needs --optimizer-cpu-offload", c->states.optimizer_offload_fraction);
    if (c->states.optimizer_offload_fraction == 0)
        fail("--optimizer-offload-fraction 0 offloads nothing; leave out --optimizer-cpu-offload");
    if (c->states.cpu_offloading_num_layers > c->model.num_layers)
        fail("--cpu-offloading-num-layers %d: the model has only %d layers", c->states.cpu_offloading_num_layers,
             c->model.num_layers);
    if (c->states.offload_gradients && !config_may_move_gradients(c))
        fail("--offload-gradients on %d ranks needs --zero-stage 2 or 3", c->ranks);
    if (c->states.main_grads_dtype != MAIN_FP32 && !config_may_move_gradients(c))
        fail("--main-grads-dtype bf16 on %d ranks needs --zero-stage 2 or 3", c->ranks);
    if (c->states.offload_weights && !config_may_move_weights(c))
        fail("--offload-weights on %d ranks needs --zero-stage 3", c->ranks);
    if (c->states.main_params_dtype != MAIN_FP32 && c->device.precision == WITH_FP32)
        fail("--main-params-dtype bf16 needs --precision bf16, not fp32%s; %sleave --main-params-dtype out",
             *c->checkpoint ? " as in the checkpoint" : "", *c->checkpoint ? "" : "change --precision, or ");
    if (c->states.main_params_dtype != MAIN_FP32 && c->training.ema_decay > 0)
        fail(
            "--ema-decay %g averages fp32 parameters, which --main-params-dtype bf16 does not keep; leave out one of them",
            c->training.ema_decay);
    if (config_trains(c))
        return;
    if (c->states.optimizer_cpu_offload || c->states.offload_gradients || c->states.cpu_offloading_num_layers > 0)
        fail("--optimizer-cpu-offload, --offload-gradients and --cpu-offloading-num-layers are of training, and "
             "--%s does not train; --offload-weights serves both",
             config_option_against_training(c));
}

// Ends the program if options of offload, formats or the plan contradict each other. May switch --checkpoint-async off.
static inline void config_resolve_fit(struct config *c) {
    config_check_offload(c);
    if (*c->memory.plan_json && strcmp(c->memory.plan_json, c->memory.plan_picture) == 0)
        fail("--plan-json and --plan-picture both write %s; name two files", c->memory.plan_json);
    if (*c->memory.plan_gpu && !c->memory.plan)
        fail("--plan-gpu is the GPU that --plan plans for; a run has the device that it is on");
    if (c->recompute.recompute_granularity == RECOMPUTE_AUTO && c->memory.plan && c->recompute.memory_budget == 0 &&
        !*c->memory.plan_gpu)
        fail("--recompute-granularity auto with --plan needs --memory-budget, as 6GiB, or --plan-gpu");
    config_resolve_checkpoint_async(c);
}
