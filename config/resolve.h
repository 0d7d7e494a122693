// What the user asked for becomes what the engine runs: the command line is read, options that were left open are set
// from the preset or derived from others, and options that contradict each other end the program.
#pragma once
#include "config/config.h"   // struct config
#include "config/fit.h"      // state formats and offload
#include "config/fp8.h"      // the options of FP8
#include "config/finetune.h" // the options of finetuning
#include "config/layers.h"   // the lists of layers

// The divisors of n as a text: "1, 2, 3, 4, 6, 12".
static inline void config_divisors(int n, char text[OPTION_TEXT]) {
    size_t used = 0;
    for (int d = 1; d <= n && used < OPTION_TEXT; d++)
        if (n % d == 0)
            used += (size_t)snprintf(text + used, OPTION_TEXT - used, "%s%d", d > 1 ? ", " : "", d);
}

static inline void config_resolve_heads(struct config *c) {
    char divisors[OPTION_TEXT];
    if (c->num_query_groups == 0)
        c->num_query_groups = c->num_attention_heads;
    if (c->num_attention_heads % c->num_query_groups != 0) {
        config_divisors(c->num_attention_heads, divisors);
        fail("--num-query-groups %d does not divide --num-attention-heads %d; it may be one of %s", c->num_query_groups,
             c->num_attention_heads, divisors);
    }
    const bool derived = c->kv_channels == 0;
    if (derived && c->hidden_size % c->num_attention_heads != 0)
        fail("--hidden-size %d is not a multiple of --num-attention-heads %d; change one of them, or give the size "
             "of a head as --kv-channels",
             c->hidden_size, c->num_attention_heads);
    if (derived)
        c->kv_channels = c->hidden_size / c->num_attention_heads;
    if (c->kv_channels % 8 != 0)
        fail("the size of a head must be a multiple of 8, not %d: change %s", c->kv_channels,
             derived ? "--hidden-size or --num-attention-heads, or give --kv-channels" : "--kv-channels");
}

// Settings that the type of scaling does not use: one that the user gave ends the program, a preset's becomes the
// default again.
static inline void config_resolve_scaling(struct config *c) {
    const enum rope_scaling_type type = c->rope_scaling_type;
    const bool llama3 = type == SCALING_LLAMA3, yarn = type == SCALING_YARN, longrope = type == SCALING_LONGROPE;
    const struct {
        int row;
        bool used;
    } settings[] = {
        {CONFIG_ROW(rope_scaling_factor), type != SCALING_NONE},
        {CONFIG_ROW(rope_low_freq_factor), llama3},
        {CONFIG_ROW(rope_high_freq_factor), llama3},
        {CONFIG_ROW(rope_original_max_position_embeddings), llama3 || yarn || longrope},
        {CONFIG_ROW(yarn_beta_fast), yarn},
        {CONFIG_ROW(yarn_beta_slow), yarn},
        {CONFIG_ROW(yarn_truncate), yarn},
        {CONFIG_ROW(yarn_mscale), yarn},
        {CONFIG_ROW(yarn_mscale_all_dim), yarn},
        {CONFIG_ROW(rope_attention_factor), yarn || longrope},
        {CONFIG_ROW(rope_short_factors), longrope},
        {CONFIG_ROW(rope_long_factors), longrope},
    };
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++) {
        const struct option_row *row = &config_rows[settings[i].row];
        char text[OPTION_TEXT], name[OPTION_NAME], chosen[OPTION_NAME];
        const char *value = option_text(text, row, c);
        if (settings[i].used || strcmp(value, row->default_text) == 0)
            continue;
        if (c->given[settings[i].row])
            fail("--%s %s is not used with --rope-scaling-type %s; leave it out, or change the type",
                 option_display(name, row->name), value,
                 option_choice_name(CHOICES(ROPE_SCALING_TYPES), (int)type, chosen));
        option_set(row, c, row->default_text);
    }
}

// The rotary settings: each must be one that the positions and the type of scaling can use.
static inline void config_check_rope(const struct config *c) {
    const enum rope_scaling_type type = c->rope_scaling_type;
    const int dims = config_rotary_dims(c), pairs = dims / 2;
    double factors[1 << 12];
    if (!config_rotates(c) && (type != SCALING_NONE || c->rotary_percent != 1 || c->rotary_base_local != 0 ||
                               strcmp(c->no_rope_freq, "none")))
        fail(
            "--rope-scaling-type, --rotary-percent, --rotary-base-local and --no-rope-freq are of rotary positions; add "
            "--position-embedding-type rope");
    if (!config_rotates(c) && config_given(c, rotary_base) && c->rotary_base != 10000)
        fail("--rotary-base %g is of rotary positions; add --position-embedding-type rope", (double)c->rotary_base);
    if (dims < 2 || dims % 2 != 0)
        fail("--rotary-percent %g rotates %d of a head's %d elements; expected an even number of them, 2 at least",
             c->rotary_percent, dims, c->kv_channels);
    if (c->rotary_base_local != 0 && c->rotary_base_local < 1)
        fail("--rotary-base-local %g: expected 0, or at least 1", c->rotary_base_local);
    if (c->rotary_base_local != 0 && config_window(c) == 0)
        fail("--rotary-base-local %g is of layers with a window; add --window-size", c->rotary_base_local);
    if ((type == SCALING_LLAMA3 || type == SCALING_YARN || type == SCALING_LONGROPE) &&
        c->rope_original_max_position_embeddings < 2)
        fail("this --rope-scaling-type needs --rope-original-max-position-embeddings, the longest sequence before the "
             "scaling, of at least 2");
    if (type == SCALING_LLAMA3 && c->rope_low_freq_factor >= c->rope_high_freq_factor)
        fail("--rope-low-freq-factor %g is not below --rope-high-freq-factor %g", c->rope_low_freq_factor,
             c->rope_high_freq_factor);
    if (type == SCALING_YARN && c->rotary_base <= 1)
        fail("--rope-scaling-type yarn needs a --rotary-base above 1, not %g", (double)c->rotary_base);
    if (type == SCALING_YARN && c->yarn_beta_slow >= c->yarn_beta_fast)
        fail("--yarn-beta-slow %g is not below --yarn-beta-fast %g", c->yarn_beta_slow, c->yarn_beta_fast);
    if (type == SCALING_LONGROPE && pairs <= (int)(sizeof factors / sizeof *factors)) {
        config_numbers(factors, pairs, "--rope-short-factors", c->rope_short_factors, 1e-6);
        config_numbers(factors, pairs, "--rope-long-factors", c->rope_long_factors, 1e-6);
    }
}
static inline void config_check_model(const struct config *c) {
    config_check_rope(c);
    if (config_window(c) == 0 && strcmp(c->window_attn_skip_freq, "none") != 0)
        fail("--window-attn-skip-freq %s needs --window-size", c->window_attn_skip_freq);
    for (int l = 0; l < c->num_layers; l++) {
        config_layer_is_windowed(c, l);
        config_layer_is_rotary(c, l);
    }
    if (c->qk_layernorm && c->normalization != NORMALIZATION_RMSNORM)
        fail("--qk-layernorm takes --normalization RMSNorm alone");
    if (c->qk_layernorm_width != QK_LAYERNORM_HEAD && !c->qk_layernorm)
        fail("--qk-layernorm-width full needs --qk-layernorm");
    if (c->parallel_residual && c->norm_placement != NORM_PLACEMENT_PRE)
        fail("--parallel-residual takes --norm-placement pre alone");
    if (c->logit_multiplier == 0 || c->embedding_multiplier == 0 || c->residual_multiplier == 0)
        fail("--logit-multiplier, --embedding-multiplier and --residual-multiplier must not be 0");
}

// Where the user takes a preset's window away, what the preset sets beside it goes too.
static inline void config_resolve_companions(struct config *c) {
    if (config_window(c) == 0 && !config_given(c, window_attn_skip_freq))
        c->window_attn_skip_freq = "none";
    if (config_window(c) == 0 && !config_given(c, rotary_base_local))
        c->rotary_base_local = 0;
}

static inline void config_resolve_model(struct config *c) {
    config_resolve_companions(c);
    config_resolve_heads(c);
    if (c->ffn_hidden_size == 0)
        c->ffn_hidden_size =
            activation_is_gated(c->activation) ? (c->hidden_size * 8 / 3 + 127) / 128 * 128 : 4 * c->hidden_size;
    // A preset's positions grow with a longer sequence; a number that the user gave does not.
    if (c->max_position_embeddings < c->seq_length) {
        if (config_learns_positions(c) && c->max_position_embeddings > 0 && config_given(c, max_position_embeddings))
            fail("--max-position-embeddings %d is less than --seq-length %d; raise it or shorten the sequence",
                 c->max_position_embeddings, c->seq_length);
        c->max_position_embeddings = c->seq_length;
    }
    if (c->add_bias_linear && !config_given(c, add_qkv_bias))
        c->add_qkv_bias = true;
    if (c->add_bias_linear && !config_given(c, add_attention_proj_bias))
        c->add_attention_proj_bias = true;
    if (c->add_bias_linear && !config_given(c, add_mlp_bias))
        c->add_mlp_bias = true;
    config_resolve_scaling(c);
    config_check_model(c);
}

static inline void config_resolve_ranks(struct config *c) {
    if (c->world_size > 0 && !c->plan)
        fail("--world-size is what --plan plans for; a run has the ranks that it was started with, by mpirun -np N or "
             "srun -n N");
    if (c->world_size > 0) {
        c->ranks = c->world_size;
        c->rank = 0;
    }
    c->ranks = c->ranks > 1 ? c->ranks : 1;
    // The latency of a ring grows with the ranks; larger buckets keep it small beside the time of the transfer.
    if (c->bucket_mib == 0)
        c->bucket_mib = c->ranks > 32 ? (float)c->ranks : 32;
    if (c->bucket_mib < 0.001f)
        fail("--bucket-mib %g is too little; 32 suits a node", (double)c->bucket_mib);
}

// Reads --rampup-batch-size: three integers, between them spaces or commas.
static inline void config_resolve_ramp(struct config *c) {
    const int least = c->micro_batch_size * c->ranks;
    const char *text = c->rampup_batch_size;
    double start, increment, samples;
    char rest;
    memset(&c->ramp, 0, sizeof c->ramp);
    c->ramp.batch = c->global_batch_size;
    if (!*text)
        return;
    if (sscanf(text, "%lf%*1[ ,]%lf%*1[ ,]%lf %c", &start, &increment, &samples, &rest) != 3 ||
        !(start >= 1 && start <= 1 << 24 && start == floor(start)) ||
        !(increment >= 1 && increment <= 1 << 24 && increment == floor(increment)) ||
        !(samples >= 1 && samples < 0x1p38 && samples == floor(samples)))
        fail("--rampup-batch-size '%s': expected three integers, START INCREMENT SAMPLES, as '%d %d 1000000'", text,
             least, least);
    c->ramp.start = (int)start;
    c->ramp.increment = (int)increment;
    c->ramp.samples = (int64_t)samples;
    if (c->ramp.start % least != 0 || c->ramp.increment % least != 0)
        fail("--rampup-batch-size '%s': START and INCREMENT must be multiples of %d, --micro-batch-size %d on %d %s",
             text, least, c->micro_batch_size, c->ranks, c->ranks > 1 ? "ranks" : "rank");
    if (c->ramp.start > c->ramp.batch || (c->ramp.batch - c->ramp.start) % c->ramp.increment != 0)
        fail(
            "--rampup-batch-size '%s': increments of %d from %d on do not reach --global-batch-size %d; change one of them",
            text, c->ramp.increment, c->ramp.start, c->ramp.batch);
}

static inline void config_resolve_batches(struct config *c) {
    if ((double)c->micro_batch_size * c->ranks > 1 << 30)
        fail("--micro-batch-size %d on %d ranks are too many sequences to count; lower it", c->micro_batch_size,
             c->ranks);
    const int least = c->micro_batch_size * c->ranks;
    if (c->global_batch_size == 0)
        c->global_batch_size = least;
    const long long next = ((long long)c->global_batch_size / least + 1) * least;
    if (c->global_batch_size % least != 0 && c->ranks > 1)
        fail("--global-batch-size %d is not a multiple of --micro-batch-size %d on %d ranks; the next multiple is %lld",
             c->global_batch_size, c->micro_batch_size, c->ranks, next);
    if (c->global_batch_size % least != 0)
        fail("--global-batch-size %d is not a multiple of --micro-batch-size %d; the next multiple is %lld",
             c->global_batch_size, c->micro_batch_size, next);
    config_resolve_ramp(c);
}

static inline void config_resolve_schedule(struct config *c) {
    if (c->head_lr_mult != 1 && !c->untie_embeddings_and_output_weights)
        fail("--head-lr-mult %g is of a head of its own, and this model's is the embedding: --embedding-lr-mult is its "
             "rate; or add --untie-embeddings-and-output-weights",
             c->head_lr_mult);
    if (c->min_lr > c->lr)
        fail("--min-lr %g is above --lr %g; lower it", c->min_lr, c->lr);
    if (c->lr_decay_steps == 0)
        c->lr_decay_steps = c->train_steps;
    if (c->lr_decay_style == LR_DECAY_CONSTANT)
        return;
    if (c->lr_warmup_steps > c->lr_decay_steps) {
        if (config_given(c, lr_warmup_steps))
            fail("--lr-warmup-steps %d is more than the %d steps of the schedule; lower it, or raise --lr-decay-steps "
                 "or --train-steps",
                 c->lr_warmup_steps, c->lr_decay_steps);
        c->lr_warmup_steps = c->lr_decay_steps;
    }
    const int after_warmup = c->lr_decay_steps - c->lr_warmup_steps;
    const int tenth = (c->lr_decay_steps - 1) / 10 + 1;
    if (c->lr_wsd_decay_steps == 0)
        c->lr_wsd_decay_steps = tenth < after_warmup ? tenth : after_warmup;
    if (c->lr_decay_style == LR_DECAY_WSD && c->lr_wsd_decay_steps > after_warmup)
        fail("--lr-wsd-decay-steps %d and --lr-warmup-steps %d do not fit into the %d steps of the schedule; lower "
             "one, or raise --lr-decay-steps or --train-steps",
             c->lr_wsd_decay_steps, c->lr_warmup_steps, c->lr_decay_steps);
}

// Settings of Muon without it.
static inline void config_check_optimizer(const struct config *c) {
    char name[OPTION_NAME];
    for (int row = 0; row < CONFIG_ROWS && c->optimizer != OPTIMIZER_MUON; row++)
        if (c->given[row] && config_rows[row].name && strncmp(config_rows[row].name, "muon_", 5) == 0)
            fail("--%s needs --optimizer muon", option_display(name, config_rows[row].name));
}

static inline void config_check_scoring(const struct config *c) {
    if (*c->generate && config_scores(c))
        fail("--generate and --%s are two runs; give one of them", *c->eval_tasks ? "eval-tasks" : "perplexity");
    if (*c->perplexity && config_trains(c))
        fail("--perplexity is of a run that does not train; leave out --train-data, or score tasks by --eval-tasks");
    if (!*c->eval_tasks && config_given(c, eval_tasks_every))
        fail("--eval-tasks-every %d needs --eval-tasks: name the files of tasks", c->eval_tasks_every);
    if (!*c->eval_tasks && *c->eval_tasks_output)
        fail("--eval-tasks-output %s needs --eval-tasks: name the files of tasks", c->eval_tasks_output);
    if (!*c->perplexity && config_given(c, perplexity_stride))
        fail("--perplexity-stride %d needs --perplexity: name the texts", c->perplexity_stride);
    if (*c->perplexity && c->seq_length < 2)
        fail("--perplexity with --seq-length %d: a window of one token has none to score; raise it", c->seq_length);
    if (c->perplexity_stride > c->seq_length)
        fail("--perplexity-stride %d is more than --seq-length %d, and would pass over tokens; lower it",
             c->perplexity_stride, c->seq_length);
}

static inline void config_resolve_data(struct config *c) {
    if (c->separate_documents && !config_given(c, reset_attention_mask))
        c->reset_attention_mask = true;
    if (c->separate_documents && !config_given(c, reset_position_ids))
        c->reset_position_ids = true;
    if (c->separate_documents && !config_given(c, eod_mask_loss))
        c->eod_mask_loss = true;
    if (c->eod_token >= c->vocab_size)
        fail("--eod-token %d is outside the vocabulary: give one below --vocab-size %d", c->eod_token, c->vocab_size);
    if (c->eval_only + (*c->generate != 0) + c->chat > 1)
        fail("--eval-only, --generate and --chat are several runs; give one of them");
    if (*c->chat_system && !c->chat)
        fail("--chat-system needs --chat");
    if (c->chat && c->ranks > 1)
        fail("--chat is a run of one process, not of %d", c->ranks);
    if (c->eval_only && !*c->val_data && !config_scores(c))
        fail("--eval-only needs --val-data, --eval-tasks or --perplexity: name the token shards to validate on, or the "
             "files to score");
    config_check_scoring(c);
    if (c->init_from_ema && (!*c->init_from || c->lora_rank > 0))
        fail("--init-from-ema needs --init-from, the folder of a checkpoint%s",
             c->lora_rank > 0 ? ", and no LoRA" : "");
    if (!config_trains(c) && !*c->init_from && !c->plan)
        fail("--%s needs --init-from: name the folder of the model", config_other_run(c));
    if (!*c->train_data && !c->plan && config_trains(c))
        fail("--train-data is missing: name the token shards to train on, as --train-data 'data/train_*.bin' (or print "
             "the memory plan alone by --plan)");
    if (!*c->out)
        fail("--out is empty; name the folder for the results");
    if (!*c->val_data && c->val_every > 0) {
        if (config_given(c, val_every) && !c->plan)
            fail("--val-every %d needs --val-data: name the token shards to validate on", c->val_every);
        c->val_every = 0;
    }
    if (c->sample_tokens > c->seq_length && (!*c->generate || c->plan)) { // those of --generate follow from its prompts
        if (config_given(c, sample_tokens))
            fail("--sample-tokens %d is more than --seq-length %d; lower it", c->sample_tokens, c->seq_length);
        c->sample_tokens = c->seq_length;
    }
}

static inline void config_check_recompute(const struct config *c) {
    int first = 0, last = 0;
    for (const char *at = c->recompute_layers; *at;)
        recompute_next_layers("--recompute-layers", c->recompute_layers, &at, &first, &last);
    recompute_modules_of(c->recompute_modules);
    for (const char *at = c->recompute_layer_modules; *at;)
        recompute_next_entry(c->recompute_layer_modules, &at);
}

// ---- sizes ----

// Fails where a product of sizes could overflow: other files compute them in 64 bits, rows of a projection in 32.
static inline void config_check_sizes(const struct config *c) {
    const double tokens = (double)c->micro_batch_size * c->seq_length;
    const double qkv = ((double)c->num_attention_heads + 2.0 * c->num_query_groups) * c->kv_channels;
    const double scores = (double)c->micro_batch_size * c->num_attention_heads * c->seq_length * c->seq_length;
    const double per_token = 32.0 * c->hidden_size + 16.0 * qkv + 32.0 * c->ffn_hidden_size;
    if (qkv >= 0x1p30)
        fail("--num-attention-heads %d with heads of %d make q, k and v %.3g wide; the limit is 2^30",
             c->num_attention_heads, c->kv_channels, qkv);
    if (tokens >= 0x1p30)
        fail("--micro-batch-size %d of --seq-length %d are %.3g tokens; a micro batch holds less than 2^30",
             c->micro_batch_size, c->seq_length, tokens);
    if (c->num_layers * (tokens * per_token + 8 * scores) >= 0x1p60)
        fail("the activations of this model at --micro-batch-size %d and --seq-length %d can't be addressed in 64 "
             "bits; lower one of them, or --num-layers, --hidden-size or --ffn-hidden-size",
             c->micro_batch_size, c->seq_length);
    if ((double)c->train_steps * c->global_batch_size * c->seq_length >= 0x1p60)
        fail("--train-steps %d of --global-batch-size %d are more tokens than 64 bits count; lower one of them",
             c->train_steps, c->global_batch_size);
}

// ---- the entry points ----

// Reads the command line over the defaults; config_resolve is still to be called. describe_build prints what --version
// adds; NULL: nothing.
static inline struct config config_read(int argc, char **argv, options_build *describe_build) {
    struct options options = config_options;
    struct config config;
    memset(&config, 0, sizeof config);
    options.describe_build = describe_build;
    options_set_defaults(&options, &config);
    options_parse(&options, &config, config.given, argc, argv);
    config.checkpoint = "";
    config.out_lock = -1;
    if (config_scores(&config) && !*config.train_data && !*config.generate && strcmp(config.resume, "none") == 0)
        config.eval_only = true; // there is nothing to train on
    return config;
}
// Sets the options that the user left open: from the preset, then derived from the other options. Fails where options
// contradict each other.
static inline void config_resolve(struct config *config) {
    if (config->preset > 0)
        options_fill(&config_options, config, config->given, presets[config->preset - 1].settings);
    config_resolve_model(config);
    config_resolve_ranks(config);
    config_resolve_batches(config);
    config_resolve_schedule(config);
    config_check_optimizer(config);
    config_resolve_data(config);
    config_check_recompute(config);
    config_check_sizes(config);
    config_resolve_fp8(config);
    config_resolve_fit(config);
    config_resolve_finetune(config);
}
// config_read and config_resolve.
static inline struct config config_parse(int argc, char **argv) {
    struct config config = config_read(argc, argv, NULL);
    config_resolve(&config);
    return config;
}
