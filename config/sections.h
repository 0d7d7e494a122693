// The values of the engine's options: a struct for each section of --help. A field has its option's name with
// underscores. config/config.h puts the structs together and has the table with a row for each field.
#pragma once
#include "config/choices.h"   // the choices of options
#include "runtime/schedule.h" // enum lr_decay_style
#include <stdbool.h>          // bool
#include <stdint.h>           // int64_t

// config_resolve replaces a 0 that stands for "choose".
struct model_options {
    int preset; // 0: none, else presets[preset - 1]
    int num_layers, hidden_size, num_attention_heads, num_query_groups, kv_channels, ffn_hidden_size;
    int seq_length, max_position_embeddings, vocab_size;
    enum normalization normalization;
    float norm_epsilon;
    enum position_embedding_type position_embedding_type;
    float rotary_base;
    double rotary_percent, rotary_base_local;
    enum rope_scaling_type rope_scaling_type;
    double rope_scaling_factor, rope_low_freq_factor, rope_high_freq_factor;
    int rope_original_max_position_embeddings;
    double yarn_beta_fast, yarn_beta_slow, yarn_mscale, yarn_mscale_all_dim, rope_attention_factor;
    bool yarn_truncate;
    const char *rope_short_factors, *rope_long_factors;
    const char *no_rope_freq, *window_size, *window_attn_skip_freq;
    enum norm_placement norm_placement;
    bool apply_layernorm_1p, qk_layernorm, parallel_residual;
    enum qk_layernorm_width qk_layernorm_width;
    double softmax_scale, attn_logit_softcapping;
    enum activation activation;
    bool add_bias_linear;
    // config_resolve sets these three where add_bias_linear is set
    bool add_qkv_bias, add_attention_proj_bias, add_mlp_bias;
    double embedding_multiplier, residual_multiplier, logit_multiplier, final_logit_softcapping;
    bool untie_embeddings_and_output_weights;
    float hidden_dropout, attention_dropout, init_method_std;
    bool zero_init_projections;
};

struct attention_options {
    enum config_backend attention_backend;
    enum config_flash_kernels flash_kernels;
    bool deterministic_mode;
};

struct recompute_options {
    enum recompute_granularity recompute_granularity;
    enum recompute_method recompute_method;
    int recompute_num_layers;
    const char *recompute_layers, *recompute_modules, *recompute_layer_modules;
    int64_t memory_budget; // bytes; 0: what the device has
};

// Formats of the training state, and what of it is in the host's memory.
struct state_options {
    enum config_main_dtype main_params_dtype, main_grads_dtype;
    enum config_moment_dtype exp_avg_dtype, exp_avg_sq_dtype;
    bool allow_lossy_states, optimizer_cpu_offload, offload_gradients, offload_weights;
    double optimizer_offload_fraction;
    int cpu_offloading_num_layers;
    int64_t host_memory_budget; // bytes; 0: what the host has
    double bus_gbps;            // 0: measured, or by the device's tables
};

struct memory_options {
    enum config_plan plan;
    const char *plan_gpu, *plan_json, *plan_picture;
    int mlp_chunk_tokens; // 0: none
    int loss_chunk_tokens;
};

struct training_options {
    int micro_batch_size, global_batch_size, train_steps;
    double train_epochs;
    const char *rampup_batch_size;
    uint64_t seed;
    double lr, min_lr, z_loss;
    enum lr_decay_style lr_decay_style;
    double embedding_lr_mult, head_lr_mult, matrix_lr_mult, vector_lr_mult;
    int lr_warmup_steps, lr_decay_steps, lr_wsd_decay_steps;
    enum lr_wsd_decay_style lr_wsd_decay_style;
    enum config_optimizer optimizer;
    double ema_decay;
    float weight_decay, adam_beta1, adam_beta2, adam_eps, clip_grad;
    float muon_momentum, muon_extra_scale_factor;
    bool muon_nesterov;
    enum config_muon_coefficient_type muon_coefficient_type;
    int muon_num_ns_steps;
    enum config_muon_scale_mode muon_scale_mode;
    enum config_muon_split_qkv muon_split_qkv;
    int skip_nonfinite;
};

struct finetuning_options {
    int lora_rank;
    float lora_alpha, lora_dropout;
    bool lora_use_rslora;
    enum config_frozen_weights_format frozen_weights_format;
    const char *lora_target_modules, *lora_adapter, *lora_merge, *freeze;
};

struct fp8_options {
    enum config_fp8_format fp8_format;
    enum config_fp8_recipe fp8_recipe;
    int fp8_margin, fp8_amax_history_len;
    enum config_fp8_amax_algo fp8_amax_compute_algo;
    enum config_fp8_fast_accumulation fp8_fast_accumulation;
    enum config_fp8_weight_cache fp8_weight_cache;
    enum config_fp8_attention fp8_dot_product_attention;
    bool first_last_layers_bf16;
    int num_layers_at_start_in_bf16, num_layers_at_end_in_bf16;
};

struct evaluation_options {
    int val_every, val_steps, early_stop, sample_every, sample_tokens, sample_count;
    float temperature, top_p;
    int top_k;
    const char *generate; // prompts, each ended by OPTION_LIST_END
    bool eval_only, chat;
    const char *chat_system;
    const char *eval_tasks, *perplexity; // files, each ended by OPTION_LIST_END
    const char *eval_tasks_output;
    int eval_tasks_every, perplexity_stride;
};

struct checkpoint_options {
    const char *init_from, *resume;
    bool init_from_ema, check_weights;
    int checkpoint_every, keep_checkpoints;
    bool save_best;
    enum config_checkpoint_dtype checkpoint_dtype;
    const char *checkpoint_architecture;
    bool checkpoint_async;
    float max_shard_gib, exit_after;
};

struct data_options {
    const char *config, *train_data, *val_data, *out;
    bool new_data;
    // config_resolve sets the first three where separate_documents is set
    bool reset_attention_mask, reset_position_ids, eod_mask_loss, separate_documents;
    enum document_delimiter document_delimiter;
    int eod_token;
    int log_every;
};

// The trackers that get a run's numbers, beside log.jsonl.
struct tracker_options {
    const char *tensorboard_dir, *wandb_project, *wandb_name, *mlflow_tracking_uri, *mlflow_experiment;
    int metrics_port; // 0: none
};

struct device_options {
    enum config_device device;
    enum config_precision precision;
    const char *instruction_set;
    bool cuda_graphs, matmul_tuning;
    enum config_self_check self_check;
    int threads;
};

struct process_options {
    int zero_stage;
    float bucket_mib;
    bool grad_reduce_in_bf16;
    enum config_collectives collectives;
    const char *rendezvous, *rendezvous_secret;
    float collective_timeout; // seconds
    int check_replicas;
    int world_size; // ranks that --plan plans for; 0: as launched
};
