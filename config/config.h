// Every option of the engine: one struct, one table with a row for each. Names are Megatron-LM's where it has one;
// --lora-rank is config.finetuning.lora_rank. To add an option, add a field to its section's struct (config/sections.h)
// and a row: --help, config.json, the presets and what a checkpoint remembers follow from the table.
#pragma once
#include "config/choices.h"        // the choices of other options
#include "config/presets.h"        // the choices of --preset
#include "config/sections.h"       // the options' fields
#include "config/synonyms.h"       // other trainers' names of them, and values
#include "recompute.cuh"           // the modules of --recompute-modules
#include "runtime/machine/error.h" // fail
#include "runtime/text/options.h"  // the parser
#include "runtime/schedule.h"      // struct schedule
#include <assert.h>                // static_assert
#include <math.h>                  // INFINITY
#include <stdbool.h>               // bool
#include <string.h>                // size_t

enum { CONFIG_ROWS_MAX = 256 };

struct config {
    struct model_options model;
    struct attention_options attention;
    struct recompute_options recompute;
    struct state_options states;
    struct memory_options memory;
    struct training_options training;
    struct finetuning_options finetuning;
    struct fp8_options fp8;
    struct evaluation_options evaluation;
    struct checkpoint_options checkpoints;
    struct data_options data;
    struct tracker_options trackers;
    struct device_options device;
    struct process_options processes;

    bool given[CONFIG_ROWS_MAX]; // by row of the table: whether the user set the option
    bool typed[CONFIG_ROWS_MAX]; // given by the command line or --config: a model's folder sets more of `given` later
    bool fp8_attention_forward;  // the environment turns --fp8-dot-product-attention full into forward
    void *file;                  // the json_t of --config, which strings point into and nothing frees; NULL: none
    const struct config *asked;  // the options before config_resolve, which a checkpoint stores; NULL: not kept
    const char *checkpoint;      // the verified folder that the run resumes from; "": a new run
    int prompt_tokens;           // in the longest prompt of --generate; 0: not known, and one token is planned
    struct batch_ramp ramp;      // of --global-batch-size and --rampup-batch-size
    unsigned lora_modules;       // the modules with adapters: a set of enum lora_module
    int rank, ranks;             // this process's rank, and how many the job has; `ranks` is 0 before start_ranks
    struct parallel *parallel;   // the connections to the other ranks; NULL: one rank, or a plan
    int out_lock;                // the open file that holds the lock of --out, on rank 0; -1: not taken
    const char *precision_reason, *instruction_set_reason; // why choose_engine took these, for the start-up report
    const char *instructions; // the engine's instruction set, set by choose_engine; NULL: not the cpu target
    // Returns the run's samples up to the end of --train-epochs epochs. main, which reads data, sets it; NULL: unknown.
    uint64_t (*samples_of_epochs)(const struct config *config);
};

// Flags of a row: how a resumed run, several ranks and config.json treat the option.
enum config_flag {
    CONFIG_FIXED = 1,      // a resumed run can't change it: data or random numbers would be others
    CONFIG_BLOCKS = 2,     // shape of the blocks: fixed, and in config.json by this name for ARCHITECTURE_OURS
    CONFIG_EMBEDDING = 4,  // shape of embedding and head: as CONFIG_BLOCKS, written after these
    CONFIG_THIS_START = 8, // of one start only: a resumed run does not take it from the checkpoint
    CONFIG_PER_RANK = 16,  // may differ between the ranks
    CONFIG_EXTENDS = 32,   // --init-from: the command line may give another value, as to train for longer sequences
};
enum { CONFIG_FIXED_ON_RESUME = CONFIG_FIXED | CONFIG_BLOCKS | CONFIG_EMBEDDING };

// The limits keep every product of sizes within 63 bits and are far above what any machine can hold.
#define PLACE(path) offsetof(struct config, path), sizeof(((struct config *)0)->path)
#define ROW(kind, section, field, ...)                                                                                 \
    { #field, OPTION_##kind, PLACE(section.field), __VA_ARGS__ }
#define GROUP(section, topic, heading)                                                                                 \
    { heading, OPTION_GROUP, PLACE(section), NULL, topic, 0, 0, NULL, 0 }
static const struct option_row config_rows[] = {
    GROUP(model, "model", "Model (a preset sets these; any of them given too overrides it)"),
    ROW(ENUM, model, preset, "none", PRESET_NAMES, 0, 0, "A known model's shape", CONFIG_FIXED | OPTION_USUAL),
    ROW(INT, model, num_layers, "12", "N", 1, 1 << 16, "Transformer blocks", CONFIG_BLOCKS),
    ROW(INT, model, hidden_size, "768", "N", 1, 1 << 20, "Width of the residual stream", CONFIG_BLOCKS),
    ROW(INT, model, num_attention_heads, "12", "N", 1, 1 << 16, "Query heads", CONFIG_BLOCKS),
    ROW(INT, model, num_query_groups, "0", "N", 0, 1 << 16, "Key and value heads (1: MQA, a divisor: GQA); 0: as heads",
        CONFIG_BLOCKS),
    ROW(INT, model, kv_channels, "0", "N", 0, 1 << 16, "Size of a head, a multiple of 8; 0: hidden size over heads",
        CONFIG_BLOCKS),
    ROW(INT, model, ffn_hidden_size, "0", "N", 0, 1 << 22,
        "Width of the MLP; 0: 4 x hidden, with a gate 8/3 x, rounded up to 128s", CONFIG_BLOCKS),
    ROW(INT, model, seq_length, "1024", "N", 1, 1 << 24,
        "Tokens in a sequence; presets say 1024 (GPT-2), 2048 (Pythia) or 4096", CONFIG_FIXED | OPTION_USUAL),
    ROW(INT, model, max_position_embeddings, "0", "N", 0, 1 << 24, "Learned positions; 0: as --seq-length",
        CONFIG_EMBEDDING),
    ROW(INT, model, vocab_size, "50257", "N", 1, 1 << 26,
        "Tokens in the vocabulary (padded to a multiple of 128 inside)", CONFIG_FIXED),
    ROW(ENUM, model, normalization, "LayerNorm", CHOICES(NORMALIZATIONS), 0, 0,
        "Kind of every norm but that of q and k", CONFIG_BLOCKS),
    ROW(FLOAT, model, norm_epsilon, "1e-5", "X", 1e-12, 1, "Added to the variance", CONFIG_BLOCKS),
    ROW(ENUM, model, position_embedding_type, "learned_absolute", CHOICES(POSITION_EMBEDDING_TYPES), 0, 0,
        "What tells tokens their positions", CONFIG_BLOCKS),
    ROW(FLOAT, model, rotary_base, "10000", "X", 1, INFINITY, "Base of the rotary frequencies (theta)", CONFIG_BLOCKS),
    ROW(DOUBLE, model, rotary_percent, "1", "X", 1e-3, 1.0000001, "Fraction of a head's elements that RoPE rotates",
        CONFIG_BLOCKS),
    ROW(DOUBLE, model, rotary_base_local, "0", "X", 0, INFINITY,
        "Base of the rotary frequencies, unscaled, of layers with a window; 0: as the other layers", CONFIG_BLOCKS),
    ROW(ENUM, model, rope_scaling_type, "none", CHOICES(ROPE_SCALING_TYPES), 0, 0,
        "How rotary frequencies are scaled for longer sequences", CONFIG_BLOCKS | CONFIG_EXTENDS),
    ROW(DOUBLE, model, rope_scaling_factor, "1", "X", 1e-6, INFINITY,
        "Divisor of frequencies: of all (linear), of the low ones (llama3, yarn); longrope: sets the amplitude",
        CONFIG_BLOCKS | CONFIG_EXTENDS),
    ROW(DOUBLE, model, rope_low_freq_factor, "1", "X", 0, INFINITY, "llama3: longest wavelength kept, as T0 over this",
        CONFIG_BLOCKS | CONFIG_EXTENDS),
    ROW(DOUBLE, model, rope_high_freq_factor, "4", "X", 0, INFINITY,
        "llama3: shortest wavelength scaled, as T0 over this", CONFIG_BLOCKS | CONFIG_EXTENDS),
    ROW(INT, model, rope_original_max_position_embeddings, "0", "T0", 0, 1 << 24,
        "llama3, yarn, longrope: longest sequence before the scaling", CONFIG_BLOCKS | CONFIG_EXTENDS),
    ROW(DOUBLE, model, yarn_beta_fast, "32", "X", 0, INFINITY,
        "yarn: rotations within T0 above which a frequency is kept", CONFIG_BLOCKS | CONFIG_EXTENDS),
    ROW(DOUBLE, model, yarn_beta_slow, "1", "X", 0, INFINITY,
        "yarn: rotations within T0 below which it is scaled whole", CONFIG_BLOCKS | CONFIG_EXTENDS),
    ROW(BOOL, model, yarn_truncate, "true", "", 0, 0, "yarn: round the pairs at these two bounds outwards",
        CONFIG_BLOCKS | CONFIG_EXTENDS),
    ROW(DOUBLE, model, yarn_mscale, "0", "X", 0, INFINITY,
        "yarn: amplitude (0.1 X ln(factor) + 1) over the next one's; either 0: 0.1 ln(factor) + 1",
        CONFIG_BLOCKS | CONFIG_EXTENDS),
    ROW(DOUBLE, model, yarn_mscale_all_dim, "0", "X", 0, INFINITY, "yarn: the same formula, as the amplitude's divisor",
        CONFIG_BLOCKS | CONFIG_EXTENDS),
    ROW(DOUBLE, model, rope_attention_factor, "0", "X", 0, INFINITY,
        "yarn, longrope: amplitude of rotated q and k; 0: by the type's formula", CONFIG_BLOCKS | CONFIG_EXTENDS),
    ROW(STRING, model, rope_short_factors, "", "LIST", 0, 0,
        "longrope: divisor of each pair's frequency up to T0 tokens", CONFIG_BLOCKS | CONFIG_EXTENDS),
    ROW(STRING, model, rope_long_factors, "", "LIST", 0, 0,
        "longrope: divisor of each pair's frequency beyond T0 tokens", CONFIG_BLOCKS | CONFIG_EXTENDS),
    ROW(STRING, model, no_rope_freq, "none", "none|N|LIST", 0, 0,
        "Layers without rotary positions: each N-th, or by layer, as 0,0,0,1 (1: without)", CONFIG_BLOCKS),
    ROW(STRING, model, window_size, "none", "none|W|W-1,0", 0, 0,
        "Keys that a query sees, its own included; Megatron-LM's pair counts those to its left",
        CONFIG_BLOCKS | CONFIG_EXTENDS),
    ROW(STRING, model, window_attn_skip_freq, "none", "none|N|LIST", 0, 0,
        "Layers with the window: all but each N-th, or by layer, as 1,1,1,0 (1: window); none: all",
        CONFIG_BLOCKS | CONFIG_EXTENDS),
    ROW(ENUM, model, norm_placement, "pre", CHOICES(NORM_PLACEMENTS), 0, 0,
        "Norms before attention and MLP, after them (OLMo 2), or both (Gemma 2)", CONFIG_BLOCKS),
    ROW(BOOL, model, apply_layernorm_1p, "false", "", 0, 0, "Norm weights are stored as their difference from 1",
        CONFIG_BLOCKS),
    ROW(BOOL, model, qk_layernorm, "false", "", 0, 0, "RMSNorm of q and k before rotary positions", CONFIG_BLOCKS),
    ROW(ENUM, model, qk_layernorm_width, "head", CHOICES(QK_LAYERNORM_WIDTHS), 0, 0,
        "--qk-layernorm over each head by itself, or over all heads together", CONFIG_BLOCKS),
    ROW(BOOL, model, parallel_residual, "false", "", 0, 0, "x + attention(norm(x)) + mlp(norm(x)) (GPT-NeoX)",
        CONFIG_BLOCKS),
    ROW(DOUBLE, model, softmax_scale, "0", "X", 0, INFINITY,
        "Factor of attention's scores; 0: 1 / sqrt(size of a head)", CONFIG_BLOCKS),
    ROW(DOUBLE, model, attn_logit_softcapping, "0", "C", 0, INFINITY, "Scores become C tanh(score / C); 0: not",
        CONFIG_BLOCKS),
    ROW(ENUM, model, activation, "gelu", CHOICES(ACTIVATIONS), 0, 0,
        "MLP: GELU (tanh form), GELU, max(x, 0)^2, SiLU(gate) x up, or GELU (tanh form) of gate x up", CONFIG_BLOCKS),
    ROW(BOOL, model, add_bias_linear, "true", "", 0, 0, "Biases in all linear layers of a block", CONFIG_BLOCKS),
    ROW(BOOL, model, add_qkv_bias, "false", "", 0, 0, "Biases for q, k and v; on with --add-bias-linear too",
        CONFIG_BLOCKS),
    ROW(BOOL, model, add_attention_proj_bias, "false", "", 0, 0,
        "A bias of attention's projection; on with --add-bias-linear too", CONFIG_BLOCKS),
    ROW(BOOL, model, add_mlp_bias, "false", "", 0, 0, "Biases in the MLP; on with --add-bias-linear too",
        CONFIG_BLOCKS),
    ROW(DOUBLE, model, residual_multiplier, "1", "X", -INFINITY, INFINITY,
        "Factor of what attention and MLP each add to the residual stream", CONFIG_BLOCKS),
    ROW(DOUBLE, model, embedding_multiplier, "1", "X", -INFINITY, INFINITY,
        "Factor of the embedding, rounded to the parameters' type", CONFIG_EMBEDDING),
    ROW(DOUBLE, model, logit_multiplier, "1", "X", 0, INFINITY, "Factor of the logits", CONFIG_EMBEDDING),
    ROW(DOUBLE, model, final_logit_softcapping, "0", "C", 0, INFINITY, "Logits become C tanh(logit / C); 0: not",
        CONFIG_EMBEDDING),
    ROW(BOOL, model, untie_embeddings_and_output_weights, "false", "", 0, 0, "The head has weights of its own",
        CONFIG_EMBEDDING),
    ROW(FLOAT, model, hidden_dropout, "0", "P", 0, 1, "Dropout after the embedding and before each residual addition"),
    ROW(FLOAT, model, attention_dropout, "0", "P", 0, 1, "Dropout on attention's probabilities"),
    ROW(FLOAT, model, init_method_std, "0.02", "X", 0, INFINITY,
        "Deviation of initial weights (residual ones: / sqrt(2L))"),
    ROW(BOOL, model, zero_init_projections, "false", "", 0, 0,
        "Projections onto the residual stream begin at 0, and so each block as the identity", CONFIG_FIXED),

    GROUP(attention, "attention", "Attention"),
    ROW(ENUM, attention, attention_backend, "auto", CHOICES(ATTENTION_BACKENDS), 0, 0,
        "flash: tile by tile; fused: cuDNN's; unfused: T x T probabilities in memory; auto: what is fastest of what can "
        "run. NVTE_FLASH_ATTN=0, NVTE_FUSED_ATTN=0 and NVTE_UNFUSED_ATTN=0 in the environment switch one off"),
    ROW(ENUM, attention, flash_kernels, "auto", CHOICES(FLASH_KERNELS), 0, 0,
        "flash on a GPU, not fused: by wgmma (compute capability 9.0) or by mma.sync; auto: what is fastest",
        CONFIG_THIS_START),
    ROW(BOOL, attention, deterministic_mode, "true", "", 0, 0,
        "The same inputs give the same bits; off: attention's backward on Hopper or by cuDNN may sum dQ in any order. "
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO is not read"),

    GROUP(recompute, "memory", "Recomputation"),
    ROW(ENUM, recompute, recompute_granularity, "none", CHOICES(RECOMPUTE_GRANULARITIES), 0, 0,
        "What backward computes again; partial: full in the layers of --recompute-num-layers or --recompute-layers",
        OPTION_USUAL),
    ROW(ENUM, recompute, recompute_method, "unset", CHOICES(RECOMPUTE_METHODS), 0, 0,
        "full: groups of layers, or the first ones only"),
    ROW(INT, recompute, recompute_num_layers, "0", "N", 0, 1 << 16,
        "full: layers in a group (uniform), or recomputed (block)"),
    ROW(STRING, recompute, recompute_layers, "", "LIST", 0, 0,
        "full: the recomputed layers, as 0-3,8, in place of a method"),
    ROW(STRING, recompute, recompute_modules, "", "LIST", 0, 0,
        "selective: any of " MODULE_LIST "; none: " RECOMPUTE_MODULES_UNFUSED
        " with unfused attention, whose probabilities are what is large, else " RECOMPUTE_MODULES_DEFAULT),
    ROW(STRING, recompute, recompute_layer_modules, "", "LIST", 0, 0,
        "selective by layers, as norm,activation:0-11;full:12-15, in place of --recompute-modules; auto writes it"),
    ROW(BYTES, recompute, memory_budget, "0", "BYTES", 0, INFINITY,
        "The device's memory to fit into, as 6GiB; 0: what it has"),

    GROUP(states, "memory", "State formats and offload to the host's memory"),
    ROW(ENUM, states, main_params_dtype, "fp32", CHOICES(MAIN_DTYPES), 0, 0,
        "Master weights: fp32, exact; bf16: none, the update rounds the bf16 parameters stochastically"),
    ROW(ENUM, states, main_grads_dtype, "fp32", CHOICES(MAIN_DTYPES), 0, 0,
        "Gradients between micro-steps; bf16: rounded stochastically"),
    ROW(ENUM, states, exp_avg_dtype, "fp32", CHOICES(MOMENT_DTYPES), 0, 0,
        "AdamW's first moments and Muon's momentum; 8bit: in blocks of 128"),
    ROW(ENUM, states, exp_avg_sq_dtype, "fp32", CHOICES(MOMENT_DTYPES), 0, 0, "AdamW's second moments"),
    ROW(BOOL, states, allow_lossy_states, "false", "", 0, 0,
        "auto: it may choose bf16 and 8bit for what was not given"),
    ROW(BOOL, states, optimizer_cpu_offload, "false", "", 0, 0,
        "Optimizer states in the host's memory, streamed through the update on the device; states only"),
    ROW(DOUBLE, states, optimizer_offload_fraction, "1", "X", 0, 1.0000001,
        "Fraction of the optimizer states that is offloaded"),
    ROW(INT, states, cpu_offloading_num_layers, "0", "N", 0, 1 << 16,
        "The first N layers keep what backward needs in the host's memory"),
    ROW(BOOL, states, offload_gradients, "false", "", 0, 0,
        "Gradients in the host's memory, a unit at a time on the device"),
    ROW(BOOL, states, offload_weights, "false", "", 0, 0,
        "Parameters in the host's memory, a unit at a time on the device"),
    ROW(BYTES, states, host_memory_budget, "0", "BYTES", 0, INFINITY,
        "The host's memory for what each rank offloads, as 64GiB; 0: what it has, --plan: any"),
    ROW(DOUBLE, states, bus_gbps, "0", "X", 0, INFINITY,
        "10^9 bytes a second each way between host and GPU, to plan with; 0: measured, or the data sheet's; on the "
        "cpu target copies are as slow as that"),

    GROUP(memory, "memory", "Memory"),
    ROW(ENUM, memory, plan, "false", CHOICES(PLANS), 0, 0,
        "Print whether a run fits, by its memory plan, and exit; full: all of the plan; allocates nothing",
        CONFIG_THIS_START | OPTION_USUAL),
    ROW(STRING, memory, plan_gpu, "", "NAME", 0, 0,
        "--plan: the GPU whose memory and speed are planned with, as 4090, 'a100 80gb' or 2x3090 for two; without a "
        "NAME lists the known ones",
        CONFIG_THIS_START | OPTION_USUAL),
    ROW(STRING, memory, plan_json, "", "FILE", 0, 0, "Write the plan, every buffer with its place and life",
        CONFIG_THIS_START),
    ROW(STRING, memory, plan_picture, "", "FILE", 0, 0,
        "Draw the plan, addresses against phases: as SVG, or as a page to hover and zoom where FILE ends with .html",
        CONFIG_THIS_START),
    ROW(INT, memory, mlp_chunk_tokens, "0", "N", 0, 1 << 30,
        "Tokens of a chunk of the MLP in layers that recompute it, where its activations are the peak; its weights' "
        "gradients are rounded otherwise; 0: all at once"),
    ROW(INT, memory, loss_chunk_tokens, "0", "N", 0, 1 << 30,
        "Tokens whose logits exist at a time; 0: chosen, on a GPU by the memory that the plan leaves"),

    GROUP(training, "training", "Training"),
    ROW(INT, training, micro_batch_size, "4", "N", 1, 1 << 24, "Sequences in a forward and backward pass",
        OPTION_USUAL),
    ROW(INT, training, global_batch_size, "0", "N", 0, 1 << 24,
        "Sequences in a step, over all ranks; 0: a micro batch each", OPTION_USUAL),
    ROW(STRING, training, rampup_batch_size, "", "'START INCREMENT SAMPLES'", 0, 0,
        "The batch is START sequences at first, and grows by INCREMENT to the global one in equal parts of SAMPLES",
        CONFIG_FIXED),
    ROW(INT, training, train_steps, "1000", "N", 1, INFINITY, "Optimizer steps", OPTION_USUAL),
    ROW(DOUBLE, training, train_epochs, "0", "X", 0, INFINITY,
        "Sets --train-steps to take all samples of --train-data X times, from its first on; 0: it is given"),
    ROW(UINT64, training, seed, "1234", "N", 0, 0, "Seed of initial weights, data order, dropout and samples",
        CONFIG_FIXED),
    ROW(DOUBLE, training, lr, "6e-4", "X", 0, INFINITY, "Learning rate, at its highest", OPTION_USUAL),
    ROW(DOUBLE, training, min_lr, "0", "X", 0, INFINITY, "Learning rate after the decay"),
    ROW(DOUBLE, training, embedding_lr_mult, "1", "X", 1e-6, INFINITY,
        "Learning rate of the embeddings of tokens and positions, and so of a tied head: X times --lr"),
    ROW(DOUBLE, training, head_lr_mult, "1", "X", 1e-6, INFINITY,
        "Learning rate of a head that is not tied: X times --lr"),
    ROW(DOUBLE, training, matrix_lr_mult, "1", "X", 1e-6, INFINITY,
        "Learning rate of the matrices of the blocks, and of LoRA's: X times --lr"),
    ROW(DOUBLE, training, vector_lr_mult, "1", "X", 1e-6, INFINITY, "Learning rate of norms and biases: X times --lr"),
    ROW(ENUM, training, lr_decay_style, "cosine", CHOICES(LR_DECAY_STYLES), 0, 0, "Shape of the decay"),
    ROW(INT, training, lr_warmup_steps, "0", "N", 0, INFINITY, "Steps of linear warm-up", OPTION_USUAL),
    ROW(INT, training, lr_decay_steps, "0", "N", 0, INFINITY, "Step at which the decay ends; 0: --train-steps"),
    ROW(INT, training, lr_wsd_decay_steps, "0", "N", 0, INFINITY,
        "WSD: length of the decay; 0: a tenth of --lr-decay-steps"),
    ROW(ENUM, training, lr_wsd_decay_style, "exponential", CHOICES(LR_WSD_DECAY_STYLES), 0, 0, "WSD: shape of that"),
    ROW(ENUM, training, optimizer, "adam", CHOICES(OPTIMIZERS), 0, 0,
        "adam: AdamW for all; muon: Muon for the blocks' matrices, which pays from some 16 to 50 x hidden size in "
        "tokens a step on (docs/muon.md)",
        CONFIG_FIXED),
    ROW(DOUBLE, training, z_loss, "0", "X", 0, INFINITY,
        "Adds X times the mean of ln(sum of e^logit)^2 to what is minimized (PaLM's 1e-4); losses are reported without it"),
    ROW(FLOAT, training, weight_decay, "0.1", "X", 0, INFINITY, "Decay of matrices and embeddings, decoupled"),
    ROW(FLOAT, training, adam_beta1, "0.9", "X", 0, 1, "AdamW's first moment"),
    ROW(FLOAT, training, adam_beta2, "0.95", "X", 0, 1, "AdamW's second moment"),
    ROW(FLOAT, training, adam_eps, "1e-8", "X", 1e-20, INFINITY, "AdamW's epsilon"),
    ROW(FLOAT, training, muon_momentum, "0.95", "X", 0, 0.9999999, "Muon's momentum"),
    ROW(BOOL, training, muon_nesterov, "true", "", 0, 0, "Muon: Nesterov's momentum"),
    ROW(ENUM, training, muon_coefficient_type, "polar_express", CHOICES(MUON_COEFFICIENT_TYPES), 0, 0,
        "Muon: polynomials of the Newton-Schulz iteration (docs/muon.md)"),
    ROW(INT, training, muon_num_ns_steps, "0", "N", 0, 100,
        "Muon: steps of that iteration; 0: as many as the type has"),
    ROW(ENUM, training, muon_scale_mode, "spectral", CHOICES(MUON_SCALE_MODES), 0, 0,
        "Muon: updates are scaled by sqrt(max(rows, columns)), sqrt(rows / columns), or sqrt(max(1, rows / columns))"),
    ROW(FLOAT, training, muon_extra_scale_factor, "0.2", "X", 0, INFINITY,
        "Muon: and by this; with spectral 0.2 gives updates of AdamW's size, so that one --lr serves both"),
    ROW(ENUM, training, muon_split_qkv, "qkv", CHOICES(MUON_QKV_SPLITS), 0, 0,
        "Muon: q, k and v are a matrix each; groups: of each query group; none: one matrix in all"),
    ROW(DOUBLE, training, ema_decay, "0", "X", 0, 0.99999999,
        "Validate, sample and score by moving averages of the parameters, of this decay, kept beside them; 0: by the "
        "parameters"),
    ROW(FLOAT, training, clip_grad, "1", "X", 0, INFINITY, "Largest global norm of the gradient; 0: not clipped"),
    ROW(INT, training, skip_nonfinite, "0", "N", 0, INFINITY,
        "Steps with a NaN or Inf loss or gradient to skip before stopping"),

    GROUP(finetuning, "finetune", "Finetuning (LoRA trains adapters beside the frozen weights of --init-from)"),
    ROW(INT, finetuning, lora_rank, "0", "N", 0, 1 << 14, "Rank of the adapters; 0: no LoRA",
        CONFIG_FIXED | OPTION_USUAL),
    ROW(FLOAT, finetuning, lora_alpha, "0", "X", 0, INFINITY, "Adapters count X / rank times; 0: twice the rank",
        CONFIG_FIXED),
    ROW(BOOL, finetuning, lora_use_rslora, "false", "", 0, 0, "Adapters count --lora-alpha / sqrt(rank) times",
        CONFIG_FIXED),
    ROW(FLOAT, finetuning, lora_dropout, "0", "X", 0, 1, "Dropout of the adapters' input", CONFIG_FIXED),
    ROW(STRING, finetuning, lora_target_modules, "all-linear", "LIST", 0, 0,
        "Modules with adapters, by their names in the model's files or the ends of these, as q_proj,v_proj; "
        "all-linear: each linear layer of the blocks",
        CONFIG_FIXED),
    ROW(STRING, finetuning, lora_adapter, "", "DIR", 0, 0,
        "Begin with the adapters of a folder of peft or of a checkpoint; sets the options above but the dropout",
        CONFIG_THIS_START),
    ROW(STRING, finetuning, lora_merge, "", "DIR", 0, 0,
        "Write the model of --init-from with --lora-adapter added to its weights, and exit", CONFIG_THIS_START),
    ROW(ENUM, finetuning, frozen_weights_format, "none", CHOICES(FROZEN_WEIGHTS_FORMATS), 0, 0,
        "LoRA: how frozen weights of linear layers are stored; none: as --precision; fp8: E4M3 with scales of 128 x "
        "128 weights; nf4: 4 bits (QLoRA)",
        CONFIG_FIXED),
    ROW(STRING, finetuning, freeze, "", "LIST", 0, 0,
        "Parameters that are not trained: patterns of their names in the model's files, as model.layers.[0-9].*",
        CONFIG_FIXED),

    GROUP(fp8, "fp8",
          "FP8 (linear layers of the blocks, in training with --precision bf16; CPUs, and GPUs from sm_89 on)"),
    ROW(ENUM, fp8, fp8_format, "none", CHOICES(FP8_FORMATS), 0, 0,
        "hybrid: inputs and weights in E4M3, gradients in E5M2; e4m3: all in E4M3"),
    ROW(ENUM, fp8, fp8_recipe, "tensorwise", CHOICES(FP8_RECIPES), 0, 0,
        "Scales: by a tensor's largest value, by that of earlier steps, or of 128 or 128 x 128 elements (Hopper)"),
    ROW(INT, fp8, fp8_margin, "0", "N", 0, 64, "delayed: scales are 2^N times smaller than the history asks for"),
    ROW(INT, fp8, fp8_amax_history_len, "1", "N", 1, 1 << 16,
        "delayed: steps whose largest values are kept; a checkpoint's can't change"),
    ROW(ENUM, fp8, fp8_amax_compute_algo, "most_recent", CHOICES(FP8_AMAX_ALGOS), 0, 0,
        "delayed: scale by the last step's value, or by the largest of the history"),
    ROW(ENUM, fp8, fp8_fast_accumulation, "forward", CHOICES(FP8_FAST_ACCUMULATIONS), 0, 0,
        "Products that a GPU sums in fewer bits, which is faster; with blockwise: none"),
    ROW(ENUM, fp8, fp8_weight_cache, "auto", CHOICES(FP8_WEIGHT_CACHES), 0, 0,
        "Cast weights in a step's first micro-step only, and keep them, 2 bytes each; auto: where a GPU's memory is free",
        CONFIG_THIS_START),
    ROW(ENUM, fp8, fp8_dot_product_attention, "none", CHOICES(FP8_ATTENTIONS), 0, 0,
        "Attention in FP8 too, forward only or full, backward as well (GPUs: cuDNN, sm_90 and sm_100); "
        "NVTE_FP8_DPA_BWD=0 in the environment makes full forward"),
    ROW(BOOL, fp8, first_last_layers_bf16, "false", "", 0, 0,
        "The first and the last layers stay in bf16: as many as the next two options say"),
    ROW(INT, fp8, num_layers_at_start_in_bf16, "1", "N", 0, 1 << 16,
        "Layers at the start that stay in bf16, with --first-last-layers-bf16"),
    ROW(INT, fp8, num_layers_at_end_in_bf16, "1", "N", 0, 1 << 16,
        "Layers at the end that stay in bf16, with --first-last-layers-bf16"),

    GROUP(evaluation, "evaluate", "Validation and samples"),
    ROW(INT, evaluation, val_every, "100", "N", 0, INFINITY, "Steps between validations, and after the last; 0: never"),
    ROW(INT, evaluation, val_steps, "20", "N", 1, INFINITY, "Micro batches of the fixed validation set"),
    ROW(INT, evaluation, early_stop, "0", "N", 0, INFINITY,
        "Save and exit after N validations in a row without a new lowest loss; 0: never"),
    ROW(INT, evaluation, sample_every, "0", "N", 0, INFINITY,
        "Steps between samples of the model, and after the last; 0: never"),
    ROW(INT, evaluation, sample_tokens, "256", "N", 1, 1 << 24,
        "Tokens of a sample, or what its prompt leaves of the positions"),
    ROW(INT, evaluation, sample_count, "1", "N", 1, 1 << 16, "Samples at a time, of each prompt"),
    ROW(FLOAT, evaluation, temperature, "1", "X", 0, INFINITY, "Sampling temperature; 0: always the likeliest token"),
    ROW(INT, evaluation, top_k, "0", "N", 0, INFINITY, "Sample among the k likeliest tokens; 0: all"),
    ROW(FLOAT, evaluation, top_p, "1", "P", 0, 1.0000001,
        "Sample among the likeliest tokens that together reach this probability"),
    ROW(LIST, evaluation, generate, "", "TEXT", 0, 0, "Continue this prompt and exit; may be repeated",
        CONFIG_THIS_START | OPTION_USUAL),
    ROW(BOOL, evaluation, eval_only, "false", "", 0, 0,
        "Print the validation loss, or scores of tasks and texts, and exit", CONFIG_THIS_START),
    ROW(LIST, evaluation, eval_tasks, "", "FILE.jsonl", 0, 0,
        "Score this file of tasks, as lm-evaluation-harness does; may be repeated", CONFIG_THIS_START | OPTION_FILES),
    ROW(INT, evaluation, eval_tasks_every, "0", "N", 0, INFINITY,
        "Steps between scorings of tasks, and after the last; 0: only after the last", CONFIG_THIS_START),
    ROW(STRING, evaluation, eval_tasks_output, "", "FILE.jsonl", 0, 0, "Where each item's scores go",
        CONFIG_THIS_START),
    ROW(LIST, evaluation, perplexity, "", "FILE.txt", 0, 0,
        "Print the perplexity of this text by sliding windows and exit; may be repeated",
        CONFIG_THIS_START | OPTION_FILES),
    ROW(INT, evaluation, perplexity_stride, "0", "N", 0, INFINITY,
        "Tokens between the windows of --perplexity, whose length is --seq-length; 0: half of that", CONFIG_THIS_START),
    ROW(BOOL, evaluation, chat, "false", "", 0, 0,
        "Talk to the model: turns from the terminal; an answer has at most --sample-tokens", CONFIG_THIS_START),
    ROW(STRING, evaluation, chat_system, "", "TEXT", 0, 0,
        "--chat: the system turn; none given: that of the model's template", CONFIG_THIS_START),

    GROUP(checkpoints, "checkpoints",
          "Checkpoints (folders that Hugging Face's from_pretrained opens, in OUT/checkpoints)"),
    ROW(STRING, checkpoints, init_from, "", "DIR", 0, 0,
        "Begin with the parameters of a Hugging Face folder, a run's newest checkpoint, or an llm.c .bin; sets the "
        "model's options",
        CONFIG_THIS_START | OPTION_USUAL),
    ROW(BOOL, checkpoints, init_from_ema, "false", "", 0, 0,
        "Take the moving averages of --init-from, a checkpoint with --ema-decay, for the parameters",
        CONFIG_THIS_START),
    ROW(BOOL, checkpoints, check_weights, "true", "", 0, 0,
        "Refuse files of --init-from and --lora-adapter that differ from the manifest beside them, and weights not "
        "finite",
        CONFIG_THIS_START),
    ROW(STRING, checkpoints, resume, "none", "auto|none|DIR", 0, 0,
        "Go on from a checkpoint, bit for bit; auto: the newest in OUT that is whole, if any; without --out, a run's "
        "folder or checkpoint goes on there",
        CONFIG_THIS_START | OPTION_USUAL),
    ROW(INT, checkpoints, checkpoint_every, "1000", "N", 0, INFINITY,
        "Steps between checkpoints, and after the last; 0: never", OPTION_USUAL),
    ROW(INT, checkpoints, keep_checkpoints, "0", "N", 0, INFINITY, "Keep the newest N; 0: all"),
    ROW(BOOL, checkpoints, save_best, "false", "", 0, 0,
        "Save after each validation with a new lowest loss too, as OUT/checkpoints/best, beside those to keep"),
    ROW(ENUM, checkpoints, checkpoint_dtype, "auto", CHOICES(CHECKPOINT_DTYPES), 0, 0,
        "Of model.safetensors; auto: as --precision"),
    ROW(STRING, checkpoints, checkpoint_architecture, "auto", "auto|MODEL_TYPE", 0, 0,
        "Class of Hugging Face, as llama, to write checkpoints as where it fits the model; auto: that of --init-from, "
        "else the first that fits"),
    ROW(FLOAT, checkpoints, max_shard_gib, "5", "X", 1e-6, INFINITY, "model.safetensors is split above this size"),
    ROW(BOOL, checkpoints, checkpoint_async, "true", "", 0, 0,
        "Write checkpoints in a thread, from a copy in the host's memory: in bf16 12 bytes a parameter of each rank's "
        "part; with offload the default is false"),
    ROW(FLOAT, checkpoints, exit_after, "0", "MINUTES", 0, INFINITY,
        "Save and exit after this time, for a job's limit; 0: never", CONFIG_THIS_START),

    GROUP(data, "data", "Data and output"),
    ROW(STRING, data, config, "", "FILE", 0, 0,
        "Read options from a JSON file, as a run's config.json; the command line overrides them",
        CONFIG_THIS_START | CONFIG_PER_RANK | OPTION_ONCE | OPTION_USUAL),
    ROW(STRING, data, train_data, "", "GLOB", 0, 0,
        "Token shards to train on; patterns are separated by commas; a mixture as '0.7 web_*.bin 0.3 code_*.bin'",
        OPTION_ONCE | OPTION_USUAL | OPTION_FILES),
    ROW(STRING, data, val_data, "", "GLOB", 0, 0, "Token shards to validate on; each set of a mixture by itself",
        OPTION_ONCE | OPTION_USUAL | OPTION_FILES),
    ROW(BOOL, data, new_data, "false", "", 0, 0,
        "--resume: the data may differ from the checkpoint's from here on; the optimizer's state is kept",
        CONFIG_THIS_START),
    ROW(BOOL, data, separate_documents, "false", "", 0, 0, "The next three options together, but for those given too",
        CONFIG_FIXED),
    ROW(BOOL, data, reset_attention_mask, "false", "", 0, 0, "A token sees only those of its own document",
        CONFIG_FIXED),
    ROW(BOOL, data, reset_position_ids, "false", "", 0, 0, "Positions begin at 0 in each document", CONFIG_FIXED),
    ROW(BOOL, data, eod_mask_loss, "false", "", 0, 0,
        "No loss where the target is the first token of another document, unless that is the delimiter", CONFIG_FIXED),
    ROW(ENUM, data, document_delimiter, "auto", CHOICES(DOCUMENT_DELIMITERS), 0, 0,
        "The end-of-text token is a document's first or last token; auto: first in shards, .idx files say it themselves",
        CONFIG_FIXED),
    ROW(INT, data, eod_token, "-1", "ID", -1, 1 << 26,
        "The end-of-text token; -1: as the tokenizer beside the data says", CONFIG_FIXED),
    ROW(STRING, data, out, "out", "DIR", 0, 0, "Where log.jsonl, config.json and checkpoints go; made where missing",
        CONFIG_THIS_START | OPTION_USUAL),
    ROW(INT, data, log_every, "10", "N", 1, INFINITY,
        "Steps between progress lines in a pipe or file, or under mpirun, and between FP8's shares in log.jsonl"),

    GROUP(trackers, "trackers",
          "Trackers (all but TensorBoard's by scripts/follow.py, which reads log.jsonl beside the run)"),
    ROW(STRING, trackers, tensorboard_dir, "", "DIR", 0, 0,
        "Write the numbers of log.jsonl as an event file for TensorBoard too; a folder for each run",
        CONFIG_THIS_START),
    ROW(STRING, trackers, wandb_project, "", "NAME", 0, 0,
        "Send the run to this project of Weights & Biases, by the Python package wandb"),
    ROW(STRING, trackers, wandb_name, "", "NAME", 0, 0, "The run's name there; none: the folder of --out"),
    ROW(STRING, trackers, mlflow_tracking_uri, "", "URL", 0, 0,
        "Send the run to this MLflow server, as http://127.0.0.1:5000"),
    ROW(STRING, trackers, mlflow_experiment, "", "NAME", 0, 0, "The run's experiment there; none: train_gpt"),
    ROW(INT, trackers, metrics_port, "0", "PORT", 0, 65536,
        "Answer Prometheus on this port, GET /metrics, with the latest numbers; any host may ask; 0: not",
        CONFIG_THIS_START),

    GROUP(device, "device", "Device"),
    ROW(ENUM, device, device, "auto", CHOICES(DEVICES), 0, 0, "Where to compute; auto: a GPU where there is one",
        CONFIG_THIS_START),
    ROW(ENUM, device, precision, "auto", CHOICES(PRECISIONS), 0, 0,
        "Of parameters and activations; auto: bf16 where the device multiplies it faster than fp32", CONFIG_THIS_START),
    ROW(STRING, device, instruction_set, "auto", "auto|NAME", 0, 0,
        "Level of the CPU's instructions, one that --version lists; auto: the highest that every rank's CPU has",
        CONFIG_THIS_START | CONFIG_PER_RANK),
    ROW(BOOL, device, cuda_graphs, "true", "", 0, 0,
        "Record a micro-step's work on a GPU once; enqueue it by one call, or one between any two collectives",
        CONFIG_THIS_START),
    ROW(BOOL, device, matmul_tuning, "true", "", 0, 0,
        "On a GPU: time the algorithms of matrix products at the start; keep the fastest in OUT and checkpoints"),
    ROW(ENUM, device, self_check, "auto", CHOICES(SELF_CHECKS), 0, 0,
        "On a GPU: judge attention's kernels before their use, fall back where they are wrong, time those for "
        "--attention-backend auto; auto: to train, once a GPU, driver and commit, unless TRAIN_GPT_SELF_CHECK=off in "
        "the environment; always: each start",
        CONFIG_THIS_START),
    ROW(INT, device, threads, "0", "N", 0, 1 << 16, "Threads; 0: all that this process may use",
        CONFIG_THIS_START | CONFIG_PER_RANK),

    GROUP(processes, "parallel", "Several processes, one a GPU or a socket, started by mpirun, srun or --rendezvous"),
    ROW(INT, processes, zero_stage, "0", "0..3", 0, 4,
        "Shard over the ranks: 1 optimizer state, 2 gradients too, 3 parameters too", OPTION_USUAL),
    ROW(FLOAT, processes, bucket_mib, "0", "X", 0, 65536,
        "MiB of fp32 gradients reduced at a time; 0: 32, or 1 a rank where that is more"),
    ROW(BOOL, processes, grad_reduce_in_bf16, "false", "", 0, 0, "Gradients are rounded to bf16 before they are sent"),
    ROW(ENUM, processes, collectives, "auto", CHOICES(COLLECTIVES), 0, 0,
        "How ranks exchange data; auto: NCCL on GPUs, else MPI under mpirun, else TCP", CONFIG_THIS_START),
    ROW(STRING, processes, rendezvous, "", "HOST:PORT", 0, 0,
        "Where rank 0 listens, with RANK, WORLD_SIZE and LOCAL_RANK in the environment: needs neither MPI nor Slurm",
        CONFIG_THIS_START),
    ROW(STRING, processes, rendezvous_secret, "", "FILE", 0, 0,
        "File with a secret of all ranks, without which no process joins; else of TRAIN_GPT_SECRET; neither: none",
        CONFIG_THIS_START | CONFIG_PER_RANK),
    ROW(FLOAT, processes, collective_timeout, "600", "SECONDS", 0, INFINITY,
        "A rank that others wait for longer than this ends the job; 0: never"),
    ROW(INT, processes, check_replicas, "0", "N", 0, INFINITY,
        "Steps between checks that all ranks hold the same bits; 0: never"),
    ROW(INT, processes, world_size, "0", "N", 0, 1 << 16, "--plan for so many ranks; 0: as launched",
        CONFIG_THIS_START),
};
#undef ROW
#undef GROUP
#undef PLACE
enum { CONFIG_ROWS = sizeof config_rows / sizeof config_rows[0], CONFIG_PRESETS = sizeof presets / sizeof presets[0] };
static_assert((int)CONFIG_ROWS <= (int)CONFIG_ROWS_MAX, "config.given has an element for each row");

#define TRAIN_GPT_VERSION "0.1.0" // the newest of CHANGELOG.md
static const struct options config_options = {
    config_rows,
    CONFIG_ROWS,
    "train_gpt",
    "train_gpt " TRAIN_GPT_VERSION,
    "Trains GPT-style transformers on tokenized shards.",
    "An option that is on or off takes =true or =false; --NAME alone switches it on, --no-NAME off. A name may be\n"
    "shortened as long as it stays unambiguous. BYTES take K, M, G, T or KiB, MiB, ... (1024), KB, MB, ... (1000).\n",
    config_synonyms,
    NULL,
    NULL,
    config_values,
};

// The index of the row of the option with this field, as CONFIG_ROW(training.seed).
#define CONFIG_ROW(field) config_row_at(offsetof(struct config, field))
// Returns the index of the row whose field is at byte `offset` of struct config; ends the program where none is.
static inline int config_row_at(size_t offset) {
    for (int row = 0; row < CONFIG_ROWS; row++)
        if (config_rows[row].kind != OPTION_GROUP && config_rows[row].offset == offset)
            return row;
    fail("struct config has no option at byte %zu", offset);
}
// Whether the user set the option with this field, as training.seed, rather than a preset or the default.
#define config_given(config, field) ((config)->given[CONFIG_ROW(field)])

// Returns the learning rate's schedule. The options must be resolved.
static inline struct schedule config_schedule(const struct config *c) {
    struct schedule schedule;
    schedule.style = c->training.lr_decay_style;
    schedule.wsd_style = c->training.lr_wsd_decay_style;
    schedule.lr = c->training.lr;
    schedule.min_lr = c->training.min_lr;
    schedule.warmup_steps = c->training.lr_warmup_steps;
    schedule.decay_steps = c->training.lr_decay_steps;
    schedule.wsd_decay_steps = c->training.lr_wsd_decay_steps;
    return schedule;
}

// Whether the run generates text instead of training: --generate or --chat, but not --sample-every.
static inline bool config_generates(const struct config *c) { return *c->evaluation.generate || c->evaluation.chat; }
// Whether the run updates parameters, or would do so without --plan.
static inline bool config_trains(const struct config *c) {
    return !c->evaluation.eval_only && !config_generates(c) && !*c->finetuning.lora_merge;
}
// Whether the run draws text from the model: --generate, --chat, or --sample-every while it trains.
static inline bool config_samples(const struct config *c) {
    return config_generates(c) || (config_trains(c) && c->evaluation.sample_every > 0);
}
// Returns the option that keeps a run from training, without its leading dashes. config_trains must be false.
static inline const char *config_option_against_training(const struct config *c) {
    return c->evaluation.eval_only     ? "eval-only"
           : *c->finetuning.lora_merge ? "lora-merge"
           : c->evaluation.chat        ? "chat"
                                       : "generate";
}
// Returns the option to name where data.reset_attention_mask is set: itself, or what implied it.
static inline const char *config_documents_option(const struct config *c) {
    const bool implied = c->data.separate_documents && !config_given(c, data.reset_attention_mask);
    return implied ? "--separate-documents" : "--reset-attention-mask";
}
// Whether the run scores tasks (--eval-tasks, also while it trains) or texts (--perplexity), token by token.
static inline bool config_scores(const struct config *c) {
    return *c->evaluation.eval_tasks || *c->evaluation.perplexity;
}
