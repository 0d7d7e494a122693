// The choices of options: each option's list of rows, X(enumerator, "name", ...), makes the enum and the users' names.
#pragma once
#include "runtime/schedule.h" // LR_DECAY_STYLES, whose rows have the same form
#include <math.h>             // sqrt
#include <stdbool.h>          // bool

#define CHOICE_ENUMERATOR(enumerator, ...) enumerator,
#define CHOICE_NAME(enumerator, name, ...) "|" name
#define CHOICES(list) (&("" list(CHOICE_NAME))[1]) // "first|second|third"

#define NORMALIZATIONS(X) X(NORMALIZATION_LAYERNORM, "LayerNorm") X(NORMALIZATION_RMSNORM, "RMSNorm")
#define POSITION_EMBEDDING_TYPES(X) X(POSITION_LEARNED, "learned_absolute") X(POSITION_ROPE, "rope")
// X(enumerator, name, gated): a gated activation multiplies a second projection, up, by the activated one.
#define ACTIVATIONS(X)                                                                                                 \
    X(ACTIVATION_GELU, "gelu", false)                                                                                  \
    X(ACTIVATION_GELU_ERF, "gelu_erf", false)                                                                          \
    X(ACTIVATION_SQUARED_RELU, "squared_relu", false)                                                                  \
    X(ACTIVATION_SWIGLU, "swiglu", true)                                                                               \
    X(ACTIVATION_GEGLU, "geglu", true)
#define ROPE_SCALING_TYPES(X)                                                                                          \
    X(SCALING_NONE, "none")                                                                                            \
    X(SCALING_LINEAR, "linear")                                                                                        \
    X(SCALING_LLAMA3, "llama3")                                                                                        \
    X(SCALING_YARN, "yarn")                                                                                            \
    X(SCALING_LONGROPE, "longrope")
#define QK_LAYERNORM_WIDTHS(X) X(QK_LAYERNORM_HEAD, "head") X(QK_LAYERNORM_FULL, "full")
#define NORM_PLACEMENTS(X)                                                                                             \
    X(NORM_PLACEMENT_PRE, "pre")                                                                                       \
    X(NORM_PLACEMENT_POST, "post")                                                                                     \
    X(NORM_PLACEMENT_SANDWICH, "sandwich")
#define DOCUMENT_DELIMITERS(X) X(DELIMITER_AUTO, "auto") X(DELIMITER_FIRST, "first") X(DELIMITER_LAST, "last")
#define ATTENTION_BACKENDS(X)                                                                                          \
    X(BACKEND_AUTO, "auto") X(BACKEND_FLASH, "flash") X(BACKEND_UNFUSED, "unfused") X(BACKEND_FUSED, "fused")
#define FLASH_KERNELS(X) X(KERNELS_AUTO, "auto") X(KERNELS_WGMMA, "wgmma") X(KERNELS_MMA, "mma")
#define SELF_CHECKS(X) X(CHECK_AUTO, "auto") X(CHECK_ALWAYS, "always") X(CHECK_OFF, "off")
#define RECOMPUTE_GRANULARITIES(X)                                                                                     \
    X(RECOMPUTE_NONE, "none")                                                                                          \
    X(RECOMPUTE_SELECTIVE, "selective")                                                                                \
    X(RECOMPUTE_FULL, "full")                                                                                          \
    X(RECOMPUTE_AUTO, "auto")                                                                                          \
    X(RECOMPUTE_PARTIAL, "partial") /* full or nothing, by layer; config_read makes it full */
#define RECOMPUTE_METHODS(X)                                                                                           \
    X(RECOMPUTE_METHOD_UNSET, "unset")                                                                                 \
    X(RECOMPUTE_METHOD_UNIFORM, "uniform")                                                                             \
    X(RECOMPUTE_METHOD_BLOCK, "block")
#define PLANS(X) X(PLAN_NONE, "false") X(PLAN_SUMMARY, "true") X(PLAN_FULL, "full") // --plan
#define DEVICES(X) X(DEVICE_AUTO, "auto") X(DEVICE_CPU, "cpu") X(DEVICE_CUDA, "cuda")
// The prefix is WITH_, since PRECISION_BF16 is a macro of the compiler's command line.
#define PRECISIONS(X) X(WITH_AUTO, "auto") X(WITH_BF16, "bf16") X(WITH_FP32, "fp32")
#define CHECKPOINT_DTYPES(X) X(CHECKPOINT_AUTO, "auto") X(CHECKPOINT_BF16, "bf16") X(CHECKPOINT_FP32, "fp32")
#define FP8_FORMATS(X) X(FP8_FORMAT_NONE, "none") X(FP8_FORMAT_HYBRID, "hybrid") X(FP8_FORMAT_E4M3, "e4m3")
#define FP8_RECIPES(X)                                                                                                 \
    X(FP8_RECIPE_TENSORWISE, "tensorwise")                                                                             \
    X(FP8_RECIPE_DELAYED, "delayed")                                                                                   \
    X(FP8_RECIPE_BLOCKWISE, "blockwise")
#define FP8_AMAX_ALGOS(X) X(FP8_AMAX_MOST_RECENT, "most_recent") X(FP8_AMAX_MAX, "max")
#define FP8_FAST_ACCUMULATIONS(X) X(FP8_FAST_FORWARD, "forward") X(FP8_FAST_NONE, "none") X(FP8_FAST_ALL, "all")
#define FP8_WEIGHT_CACHES(X) X(FP8_CACHE_AUTO, "auto") X(FP8_CACHE_ALWAYS, "always") X(FP8_CACHE_OFF, "off")
#define FP8_ATTENTIONS(X)                                                                                              \
    X(FP8_ATTENTION_NONE, "none") X(FP8_ATTENTION_FORWARD, "forward") X(FP8_ATTENTION_FULL, "full")
// The prefixes are MAIN_ and MOMENT_, since BF16 without a prefix would be a macro of some compilers' headers.
#define MAIN_DTYPES(X) X(MAIN_FP32, "fp32") X(MAIN_BF16, "bf16")
#define MOMENT_DTYPES(X) X(MOMENT_FP32, "fp32") X(MOMENT_BF16, "bf16") X(MOMENT_8BIT, "8bit")
#define OPTIMIZERS(X) X(OPTIMIZER_ADAM, "adam") X(OPTIMIZER_MUON, "muon")
// X(enumerator, name, the factor of the update of a matrix (rows, cols)).
#define MUON_SCALE_MODES(X)                                                                                            \
    X(MUON_SCALE_SPECTRAL, "spectral", sqrt(rows > cols ? rows : cols))                                                \
    X(MUON_SCALE_UNIT_RMS_NORM, "unit_rms_norm", sqrt(rows / cols))                                                    \
    X(MUON_SCALE_SHAPE_SCALING, "shape_scaling", sqrt(rows > cols ? rows / cols : 1))
#define MUON_COEFFICIENT_TYPES(X)                                                                                      \
    X(MUON_SIMPLE, "simple")                                                                                           \
    X(MUON_QUINTIC, "quintic")                                                                                         \
    X(MUON_POLAR_EXPRESS, "polar_express")                                                                             \
    X(MUON_DEEPSEEKV4, "deepseekv4")                                                                                   \
    X(MUON_CLASSIC, "classic")
#define MUON_QKV_SPLITS(X) X(MUON_SPLIT_QKV, "qkv") X(MUON_SPLIT_GROUPS, "groups") X(MUON_SPLIT_NONE, "none")
#define FROZEN_WEIGHTS_FORMATS(X)                                                                                      \
    X(FROZEN_WEIGHTS_NONE, "none") X(FROZEN_WEIGHTS_FP8, "fp8") X(FROZEN_WEIGHTS_NF4, "nf4")
#define COLLECTIVES(X) X(BY_AUTO, "auto") X(BY_NCCL, "nccl") X(BY_MPI, "mpi") X(BY_SOCKETS, "sockets")

enum normalization { NORMALIZATIONS(CHOICE_ENUMERATOR) };
enum position_embedding_type { POSITION_EMBEDDING_TYPES(CHOICE_ENUMERATOR) };
enum activation { ACTIVATIONS(CHOICE_ENUMERATOR) };
enum rope_scaling_type { ROPE_SCALING_TYPES(CHOICE_ENUMERATOR) };
enum qk_layernorm_width { QK_LAYERNORM_WIDTHS(CHOICE_ENUMERATOR) };
enum norm_placement { NORM_PLACEMENTS(CHOICE_ENUMERATOR) };
enum document_delimiter { DOCUMENT_DELIMITERS(CHOICE_ENUMERATOR) };
enum config_backend { ATTENTION_BACKENDS(CHOICE_ENUMERATOR) };
enum config_flash_kernels { FLASH_KERNELS(CHOICE_ENUMERATOR) };
enum config_self_check { SELF_CHECKS(CHOICE_ENUMERATOR) };
enum recompute_granularity { RECOMPUTE_GRANULARITIES(CHOICE_ENUMERATOR) };
enum recompute_method { RECOMPUTE_METHODS(CHOICE_ENUMERATOR) };
enum config_plan { PLANS(CHOICE_ENUMERATOR) };
enum config_device { DEVICES(CHOICE_ENUMERATOR) };
enum config_precision { PRECISIONS(CHOICE_ENUMERATOR) };
enum config_checkpoint_dtype { CHECKPOINT_DTYPES(CHOICE_ENUMERATOR) };
enum config_fp8_format { FP8_FORMATS(CHOICE_ENUMERATOR) };
enum config_fp8_recipe { FP8_RECIPES(CHOICE_ENUMERATOR) };
enum config_fp8_amax_algo { FP8_AMAX_ALGOS(CHOICE_ENUMERATOR) };
enum config_fp8_fast_accumulation { FP8_FAST_ACCUMULATIONS(CHOICE_ENUMERATOR) };
enum config_fp8_weight_cache { FP8_WEIGHT_CACHES(CHOICE_ENUMERATOR) };
enum config_fp8_attention { FP8_ATTENTIONS(CHOICE_ENUMERATOR) };
enum config_main_dtype { MAIN_DTYPES(CHOICE_ENUMERATOR) };
enum config_moment_dtype { MOMENT_DTYPES(CHOICE_ENUMERATOR) };
enum config_optimizer { OPTIMIZERS(CHOICE_ENUMERATOR) };
enum config_muon_scale_mode { MUON_SCALE_MODES(CHOICE_ENUMERATOR) };
enum config_muon_coefficient_type { MUON_COEFFICIENT_TYPES(CHOICE_ENUMERATOR) };
enum config_muon_split_qkv { MUON_QKV_SPLITS(CHOICE_ENUMERATOR) };
enum config_frozen_weights_format { FROZEN_WEIGHTS_FORMATS(CHOICE_ENUMERATOR) };
enum config_collectives { COLLECTIVES(CHOICE_ENUMERATOR) };

static inline bool activation_is_gated(enum activation activation) {
    switch (activation) {
#define ACTIVATION_CASE(enumerator, name, gated)                                                                       \
    case enumerator: return gated;
        ACTIVATIONS(ACTIVATION_CASE)
#undef ACTIVATION_CASE
    }
    __builtin_unreachable();
}
static inline const char *activation_name(enum activation activation) {
    switch (activation) {
#define ACTIVATION_CASE(enumerator, name, gated)                                                                       \
    case enumerator: return name;
        ACTIVATIONS(ACTIVATION_CASE)
#undef ACTIVATION_CASE
    }
    __builtin_unreachable();
}

// Returns the factor of a scale mode for Muon's update of a matrix (rows, cols), before --muon-extra-scale-factor.
static inline double muon_scale(enum config_muon_scale_mode mode, double rows, double cols) {
    switch (mode) {
#define MUON_SCALE_CASE(enumerator, name, scale)                                                                       \
    case enumerator: return scale;
        MUON_SCALE_MODES(MUON_SCALE_CASE)
#undef MUON_SCALE_CASE
    }
    __builtin_unreachable();
}
