// The options of finetuning, LoRA and frozen parameters, against each other and against other options.
#pragma once
#include "config/config.h" // struct config

// The modules of a block that adapters may change, bits of config.lora_modules. q, k and v, or gate and up, may be one.
enum lora_module {
    LORA_QKV = 1 << 0, // one module
    LORA_Q = 1 << 1,
    LORA_K = 1 << 2,
    LORA_V = 1 << 3,
    LORA_ATT_PROJ = 1 << 4,
    LORA_FC = 1 << 5, // one module, with or without a gate
    LORA_GATE = 1 << 6,
    LORA_UP = 1 << 7,
    LORA_MLP_PROJ = 1 << 8,
};

// Returns --lora-alpha or, if that is 0, twice the rank.
static inline double config_lora_alpha(const struct config *c) {
    return c->finetuning.lora_alpha > 0 ? c->finetuning.lora_alpha : 2.0 * c->finetuning.lora_rank;
}
// Returns LoRA's scale: alpha / rank, or with rsLoRA alpha / sqrt(rank) (Kalajdzievski 2023, arXiv 2312.03732).
static inline double config_lora_scale(const struct config *c) {
    const double alpha = config_lora_alpha(c);
    return c->finetuning.lora_use_rslora ? alpha / sqrt((double)c->finetuning.lora_rank)
                                         : alpha / c->finetuning.lora_rank;
}

// Whether --lora-rank or --freeze keeps some parameters from being trained.
static inline bool config_freezes(const struct config *c) {
    return c->finetuning.lora_rank > 0 || *c->finetuning.freeze;
}

static inline void config_check_finetune(const struct config *c) {
    if (c->finetuning.lora_rank == 0 &&
        (c->finetuning.lora_alpha > 0 || c->finetuning.lora_dropout > 0 || c->finetuning.lora_use_rslora ||
         strcmp(c->finetuning.lora_target_modules, "all-linear") != 0))
        fail(
            "--lora-alpha, --lora-dropout, --lora-target-modules and --lora-use-rslora are of LoRA; add --lora-rank, as "
            "--lora-rank 16");
    if (c->finetuning.lora_rank > 0 && *c->finetuning.freeze)
        fail("--freeze %s does not go with --lora-rank, which freezes all but the adapters; leave one of them out",
             c->finetuning.freeze);
    if (*c->checkpoint && *c->finetuning.lora_adapter && c->finetuning.lora_rank == 0)
        fail("--lora-adapter %s: the run in %s trains no adapters; leave the option out", c->finetuning.lora_adapter,
             c->checkpoint);
    if (*c->finetuning.lora_merge && !*c->finetuning.lora_adapter)
        fail("--lora-merge %s needs --lora-adapter: name the folder of the adapters", c->finetuning.lora_merge);
    if (c->finetuning.frozen_weights_format != FROZEN_WEIGHTS_NONE && c->finetuning.lora_rank == 0 &&
        !*c->finetuning.lora_adapter)
        fail("--frozen-weights-format is of the weights beside LoRA's adapters; add --lora-rank, as --lora-rank 16");
    if (!config_freezes(c))
        return;
    if (c->fp8.fp8_format != FP8_FORMAT_NONE && config_trains(c))
        fail("--fp8-format does not go with --%s: scales of frozen weights are not kept; leave one of them out",
             c->finetuning.lora_rank > 0 ? "lora-rank" : "freeze");
    if (c->finetuning.lora_dropout > 0 && c->memory.mlp_chunk_tokens > 0)
        fail("--lora-dropout %g does not go with --mlp-chunk-tokens: its mask is of all tokens; leave one of them out",
             (double)c->finetuning.lora_dropout);
}
