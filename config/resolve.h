// The resolution of options. config_read reads the command line. config_resolve_... set options that were left open.
// They and config_check_... end the program if options contradict each other.
#pragma once
#include "config/config.h"            // struct config
#include "config/config_file.h"       // config_read_file
#include "config/epochs.h"            // --train-epochs
#include "config/fit.h"               // state formats and offload
#include "config/fp8.h"               // the options of FP8
#include "config/finetune.h"          // the options of finetuning
#include "config/layers.h"            // the lists of layers
#include "config/planned_gpus.h"      // planned_gpus
#include "runtime/machine/say.h"      // say_warning
#include "runtime/machine/text_add.h" // text_add

// Writes the divisors of n, as "1, 2, 3, 4, 6, 12", cut where the text is full.
static inline void config_divisors(int n, char text[OPTION_TEXT]) {
    text[0] = 0;
    for (int d = 1; d <= n; d++)
        if (n % d == 0)
            text_add(text, OPTION_TEXT, "%s%d", d > 1 ? ", " : "", d);
}

// Sets query groups of 0 to the heads' number and a head size of 0 to hidden size / heads. Bad sizes end the program.
static inline void config_resolve_heads(struct config *c) {
    char divisors[OPTION_TEXT];
    if (c->model.num_query_groups == 0)
        c->model.num_query_groups = c->model.num_attention_heads;
    if (c->model.num_attention_heads % c->model.num_query_groups != 0) {
        config_divisors(c->model.num_attention_heads, divisors);
        fail("--num-query-groups %d does not divide --num-attention-heads %d; it may be one of %s",
             c->model.num_query_groups, c->model.num_attention_heads, divisors);
    }
    const bool derived = c->model.kv_channels == 0;
    if (derived && c->model.hidden_size % c->model.num_attention_heads != 0)
        fail("--hidden-size %d is not a multiple of --num-attention-heads %d; change one of them, or give the size "
             "of a head as --kv-channels",
             c->model.hidden_size, c->model.num_attention_heads);
    if (derived)
        c->model.kv_channels = c->model.hidden_size / c->model.num_attention_heads;
    if (c->model.kv_channels % 8 != 0)
        fail("the size of a head must be a multiple of 8, not %d: change %s", c->model.kv_channels,
             derived ? "--hidden-size or --num-attention-heads, or give --kv-channels" : "--kv-channels");
}

// Sets options that this RoPE scaling does not use to defaults. Ends the program if the user gave one any other value.
static inline void config_resolve_scaling(struct config *c) {
    const enum rope_scaling_type type = c->model.rope_scaling_type;
    const bool llama3 = type == SCALING_LLAMA3, yarn = type == SCALING_YARN, longrope = type == SCALING_LONGROPE;
    const struct {
        int row;
        bool used;
    } settings[] = {
        {CONFIG_ROW(model.rope_scaling_factor), type != SCALING_NONE},
        {CONFIG_ROW(model.rope_low_freq_factor), llama3},
        {CONFIG_ROW(model.rope_high_freq_factor), llama3},
        {CONFIG_ROW(model.rope_original_max_position_embeddings), llama3 || yarn || longrope},
        {CONFIG_ROW(model.yarn_beta_fast), yarn},
        {CONFIG_ROW(model.yarn_beta_slow), yarn},
        {CONFIG_ROW(model.yarn_truncate), yarn},
        {CONFIG_ROW(model.yarn_mscale), yarn},
        {CONFIG_ROW(model.yarn_mscale_all_dim), yarn},
        {CONFIG_ROW(model.rope_attention_factor), yarn || longrope},
        {CONFIG_ROW(model.rope_short_factors), longrope},
        {CONFIG_ROW(model.rope_long_factors), longrope},
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

// Ends the program if rotary settings contradict positions, scaling, the window or each other. All must be resolved.
static inline void config_check_rope(const struct config *c) {
    const enum rope_scaling_type type = c->model.rope_scaling_type;
    const int dims = config_rotary_dims(c), pairs = dims / 2;
    double factors[1 << 12];
    if (!config_rotates(c) && (type != SCALING_NONE || c->model.rotary_percent != 1 ||
                               c->model.rotary_base_local != 0 || strcmp(c->model.no_rope_freq, "none")))
        fail(
            "--rope-scaling-type, --rotary-percent, --rotary-base-local and --no-rope-freq are of rotary positions; add "
            "--position-embedding-type rope");
    if (!config_rotates(c) && config_given(c, model.rotary_base) && c->model.rotary_base != 10000)
        fail("--rotary-base %g is of rotary positions; add --position-embedding-type rope",
             (double)c->model.rotary_base);
    if (dims < 2 || dims % 2 != 0)
        fail("--rotary-percent %g rotates %d of a head's %d elements; expected an even number of them, 2 at least",
             c->model.rotary_percent, dims, c->model.kv_channels);
    if (c->model.rotary_base_local != 0 && c->model.rotary_base_local < 1)
        fail("--rotary-base-local %g: expected 0, or at least 1", c->model.rotary_base_local);
    if (c->model.rotary_base_local != 0 && config_window(c) == 0)
        fail("--rotary-base-local %g is of layers with a window; add --window-size", c->model.rotary_base_local);
    if ((type == SCALING_LLAMA3 || type == SCALING_YARN || type == SCALING_LONGROPE) &&
        c->model.rope_original_max_position_embeddings < 2)
        fail("this --rope-scaling-type needs --rope-original-max-position-embeddings, the longest sequence before the "
             "scaling, of at least 2");
    if (type == SCALING_LLAMA3 && c->model.rope_low_freq_factor >= c->model.rope_high_freq_factor)
        fail("--rope-low-freq-factor %g is not below --rope-high-freq-factor %g", c->model.rope_low_freq_factor,
             c->model.rope_high_freq_factor);
    if (type == SCALING_YARN && c->model.rotary_base <= 1)
        fail("--rope-scaling-type yarn needs a --rotary-base above 1, not %g", (double)c->model.rotary_base);
    if (type == SCALING_YARN && c->model.yarn_beta_slow >= c->model.yarn_beta_fast)
        fail("--yarn-beta-slow %g is not below --yarn-beta-fast %g", c->model.yarn_beta_slow, c->model.yarn_beta_fast);
    if (type == SCALING_LONGROPE && pairs <= (int)(sizeof factors / sizeof *factors)) {
        config_numbers(factors, pairs, "--rope-short-factors", c->model.rope_short_factors, 1e-6);
        config_numbers(factors, pairs, "--rope-long-factors", c->model.rope_long_factors, 1e-6);
    }
}
// Ends the program if options of RoPE, windows, norms or multipliers contradict each other. All must be resolved.
static inline void config_check_model(const struct config *c) {
    config_check_rope(c);
    if (config_window(c) == 0 && strcmp(c->model.window_attn_skip_freq, "none") != 0)
        fail("--window-attn-skip-freq %s needs --window-size", c->model.window_attn_skip_freq);
    for (int l = 0; l < c->model.num_layers; l++) {
        config_layer_is_windowed(c, l);
        config_layer_is_rotary(c, l);
    }
    if (c->model.qk_layernorm && c->model.normalization != NORMALIZATION_RMSNORM)
        fail("--qk-layernorm takes only --normalization RMSNorm");
    if (c->model.qk_layernorm_width != QK_LAYERNORM_HEAD && !c->model.qk_layernorm)
        fail("--qk-layernorm-width full needs --qk-layernorm");
    if (c->model.parallel_residual && c->model.norm_placement != NORM_PLACEMENT_PRE)
        fail("--parallel-residual takes only --norm-placement pre");
    if (c->model.logit_multiplier == 0 || c->model.embedding_multiplier == 0 || c->model.residual_multiplier == 0)
        fail("--logit-multiplier, --embedding-multiplier and --residual-multiplier must not be 0");
}

// Resets --window-attn-skip-freq and --rotary-base-local if there is no window. Keeps a value that the user gave.
static inline void config_resolve_companions(struct config *c) {
    if (config_window(c) == 0 && !config_given(c, model.window_attn_skip_freq))
        c->model.window_attn_skip_freq = "none";
    if (config_window(c) == 0 && !config_given(c, model.rotary_base_local))
        c->model.rotary_base_local = 0;
}
// Switches on the bool option of a row if `all`, an option that stands for several, is on. Keeps what the user gave.
static inline void config_imply(struct config *c, bool all, int row) {
    if (all && !c->given[row])
        *(bool *)option_field(&config_rows[row], c) = true;
}

// Sets the model's options that were left open, and raises --max-position-embeddings to --seq-length.
static inline void config_resolve_model(struct config *c) {
    config_resolve_companions(c);
    config_resolve_heads(c);
    if (c->model.ffn_hidden_size == 0)
        c->model.ffn_hidden_size = activation_is_gated(c->model.activation)
                                       ? (c->model.hidden_size * 8 / 3 + 127) / 128 * 128
                                       : 4 * c->model.hidden_size;
    if (c->model.max_position_embeddings < c->model.seq_length) {
        if (config_learns_positions(c) && c->model.max_position_embeddings > 0 &&
            config_given(c, model.max_position_embeddings))
            fail("--max-position-embeddings %d is less than --seq-length %d; raise it or shorten the sequence",
                 c->model.max_position_embeddings, c->model.seq_length);
        c->model.max_position_embeddings = c->model.seq_length;
    }
    config_imply(c, c->model.add_bias_linear, CONFIG_ROW(model.add_qkv_bias));
    config_imply(c, c->model.add_bias_linear, CONFIG_ROW(model.add_attention_proj_bias));
    config_imply(c, c->model.add_bias_linear, CONFIG_ROW(model.add_mlp_bias));
    config_resolve_scaling(c);
    config_check_model(c);
}

// Sets, with --plan, c->ranks to --world-size or to the number in --plan-gpu, and c->rank to 0. Without such a number
// keeps c->ranks, but at least 1. Sets --bucket-mib if it is 0. Ends the program if the two numbers differ, if
// --world-size is given without --plan, or if --bucket-mib is too small.
static inline void config_resolve_ranks(struct config *c) {
    int gpus;
    planned_gpus(c->memory.plan_gpu, &gpus);
    if (gpus > 0 && c->processes.world_size > 0 && c->processes.world_size != gpus)
        fail("--plan-gpu '%s' are %d ranks, and --world-size %d says otherwise; leave it out", c->memory.plan_gpu, gpus,
             c->processes.world_size);
    if (gpus > 0 && c->memory.plan)
        c->processes.world_size = gpus;
    if (c->processes.world_size > 0 && !c->memory.plan)
        fail("--world-size is what --plan plans for; a run has the ranks that it was started with, by mpirun -np N or "
             "srun -n N");
    if (c->processes.world_size > 0) {
        c->ranks = c->processes.world_size;
        c->rank = 0;
    }
    c->ranks = c->ranks > 1 ? c->ranks : 1;
    // The latency of a ring grows with the ranks; larger buckets keep it small beside the time of the transfer.
    if (c->processes.bucket_mib == 0)
        c->processes.bucket_mib = c->ranks > 32 ? (float)c->ranks : 32;
    if (c->processes.bucket_mib < 0.001f)
        fail("--bucket-mib %g is too little; 32 suits a node", (double)c->processes.bucket_mib);
}

// Sets c->ramp by --rampup-batch-size, three integers; if it is empty, every step has --global-batch-size. Other text,
// sizes that are no multiple of all ranks' micro-batches, and increments that miss the final size end the program.
static inline void config_resolve_ramp(struct config *c) {
    const int least = c->training.micro_batch_size * c->ranks;
    const char *text = c->training.rampup_batch_size;
    double start, increment, samples;
    char rest;
    memset(&c->ramp, 0, sizeof c->ramp);
    c->ramp.batch = c->training.global_batch_size;
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
             text, least, c->training.micro_batch_size, c->ranks, c->ranks > 1 ? "ranks" : "rank");
    if (c->ramp.start > c->ramp.batch || (c->ramp.batch - c->ramp.start) % c->ramp.increment != 0)
        fail(
            "--rampup-batch-size '%s': increments of %d from %d on do not reach --global-batch-size %d; change one of them",
            text, c->ramp.increment, c->ramp.start, c->ramp.batch);
}

// Sets --global-batch-size, if 0, to a micro-batch per rank, and c->ramp. A size that is no multiple ends the program.
static inline void config_resolve_batches(struct config *c) {
    if ((double)c->training.micro_batch_size * c->ranks > 1 << 30)
        fail("--micro-batch-size %d on %d ranks are too many sequences to count; lower it",
             c->training.micro_batch_size, c->ranks);
    const int least = c->training.micro_batch_size * c->ranks;
    if (c->training.global_batch_size == 0)
        c->training.global_batch_size = least;
    const long long next = ((long long)c->training.global_batch_size / least + 1) * least;
    if (c->training.global_batch_size % least != 0 && c->ranks > 1)
        fail("--global-batch-size %d is not a multiple of --micro-batch-size %d on %d ranks; the next multiple is %lld",
             c->training.global_batch_size, c->training.micro_batch_size, c->ranks, next);
    if (c->training.global_batch_size % least != 0)
        fail("--global-batch-size %d is not a multiple of --micro-batch-size %d; the next multiple is %lld",
             c->training.global_batch_size, c->training.micro_batch_size, next);
    config_resolve_ramp(c);
}

// Sets lengths of the learning rate's schedule that were not given. Rates or lengths that don't fit end the program.
static inline void config_resolve_schedule(struct config *c) {
    if (c->training.head_lr_mult != 1 && !c->model.untie_embeddings_and_output_weights)
        fail("--head-lr-mult %g is of a head of its own, and this model's is the embedding: --embedding-lr-mult is its "
             "rate; or add --untie-embeddings-and-output-weights",
             c->training.head_lr_mult);
    if (c->training.min_lr > c->training.lr)
        fail("--min-lr %g is above --lr %g; lower it", c->training.min_lr, c->training.lr);
    if (c->training.lr_decay_steps == 0)
        c->training.lr_decay_steps = c->training.train_steps;
    if (c->training.lr_decay_style == LR_DECAY_CONSTANT)
        return;
    if (c->training.lr_warmup_steps > c->training.lr_decay_steps) {
        if (config_given(c, training.lr_warmup_steps))
            fail("--lr-warmup-steps %d is more than the %d steps of the schedule; lower it, or raise --lr-decay-steps "
                 "or --train-steps",
                 c->training.lr_warmup_steps, c->training.lr_decay_steps);
        c->training.lr_warmup_steps = c->training.lr_decay_steps;
    }
    const int after_warmup = c->training.lr_decay_steps - c->training.lr_warmup_steps;
    const int tenth = (c->training.lr_decay_steps - 1) / 10 + 1;
    if (c->training.lr_wsd_decay_steps == 0)
        c->training.lr_wsd_decay_steps = tenth < after_warmup ? tenth : after_warmup;
    if (c->training.lr_decay_style == LR_DECAY_WSD && c->training.lr_wsd_decay_steps > after_warmup)
        fail("--lr-wsd-decay-steps %d and --lr-warmup-steps %d do not fit into the %d steps of the schedule; lower "
             "one, or raise --lr-decay-steps or --train-steps",
             c->training.lr_wsd_decay_steps, c->training.lr_warmup_steps, c->training.lr_decay_steps);
}

static inline void config_check_optimizer(const struct config *c) {
    char name[OPTION_NAME];
    for (int row = 0; row < CONFIG_ROWS && c->training.optimizer != OPTIMIZER_MUON; row++)
        if (c->given[row] && config_rows[row].name && strncmp(config_rows[row].name, "muon_", 5) == 0)
            fail("--%s needs --optimizer muon", option_display(name, config_rows[row].name));
}

static inline void config_check_scoring(const struct config *c) {
    if (!config_trains(c) && !c->evaluation.eval_only && config_scores(c))
        fail("--%s and --%s are two runs; give one of them", config_option_against_training(c),
             *c->evaluation.eval_tasks ? "eval-tasks" : "perplexity");
    if (*c->evaluation.perplexity && config_trains(c))
        fail("--perplexity is of a run that does not train; leave out --train-data, or score tasks by --eval-tasks");
    if (!*c->evaluation.eval_tasks && config_given(c, evaluation.eval_tasks_every))
        fail("--eval-tasks-every %d needs --eval-tasks: name the files of tasks", c->evaluation.eval_tasks_every);
    if (!*c->evaluation.eval_tasks && *c->evaluation.eval_tasks_output)
        fail("--eval-tasks-output %s needs --eval-tasks: name the files of tasks", c->evaluation.eval_tasks_output);
    if (!*c->evaluation.perplexity && config_given(c, evaluation.perplexity_stride))
        fail("--perplexity-stride %d needs --perplexity: name the texts", c->evaluation.perplexity_stride);
    if (*c->evaluation.perplexity && c->model.seq_length < 2)
        fail("--perplexity with --seq-length %d: a window of one token has none to score; raise it",
             c->model.seq_length);
    if (c->evaluation.perplexity_stride > c->model.seq_length)
        fail("--perplexity-stride %d is more than --seq-length %d, and would pass over tokens; lower it",
             c->evaluation.perplexity_stride, c->model.seq_length);
}

// Sets the options of data and evaluation that were left open. Contradictions and missing options end the program.
static inline void config_resolve_data(struct config *c) {
    config_imply(c, c->data.separate_documents, CONFIG_ROW(data.reset_attention_mask));
    config_imply(c, c->data.separate_documents, CONFIG_ROW(data.reset_position_ids));
    config_imply(c, c->data.separate_documents, CONFIG_ROW(data.eod_mask_loss));
    if (c->data.eod_token >= c->model.vocab_size)
        fail("--eod-token %d is outside the vocabulary: give one below --vocab-size %d", c->data.eod_token,
             c->model.vocab_size);
    if (c->evaluation.eval_only + (*c->evaluation.generate != 0) + c->evaluation.chat > 1)
        fail("--eval-only, --generate and --chat are several runs; give one of them");
    if (*c->evaluation.chat_system && !c->evaluation.chat)
        fail("--chat-system needs --chat");
    if (c->evaluation.chat && c->ranks > 1)
        fail("--chat is a run of one process, not of %d", c->ranks);
    if (c->evaluation.eval_only && !*c->data.val_data && !config_scores(c))
        fail("--eval-only needs --val-data, --eval-tasks or --perplexity: name the token shards to validate on, or the "
             "files to score");
    config_check_scoring(c);
    if (c->checkpoints.init_from_ema && (!*c->checkpoints.init_from || c->finetuning.lora_rank > 0))
        fail("--init-from-ema needs --init-from, the folder of a checkpoint%s",
             c->finetuning.lora_rank > 0 ? ", and no LoRA" : "");
    if (!config_trains(c) && !*c->checkpoints.init_from && !c->memory.plan) {
        const bool implied = c->evaluation.eval_only && !config_given(c, evaluation.eval_only);
        const bool tasks = implied && *c->evaluation.eval_tasks;
        fail("--%s needs --init-from: name the folder of the model%s",
             tasks     ? "eval-tasks"
             : implied ? "perplexity"
                       : config_option_against_training(c),
             tasks ? " to score, or --train-data to train one that is scored at its end" : "");
    }
    if (!*c->data.train_data && !c->memory.plan && config_trains(c))
        fail("--train-data is missing: name the token shards to train on, as --train-data 'data/train_*.bin' (or print "
             "only the memory plan by --plan)");
    if (!*c->data.out)
        fail("--out is empty; name the folder for the results");
    if (!*c->data.val_data && c->evaluation.val_every > 0) {
        if (config_given(c, evaluation.val_every) && !c->memory.plan)
            fail("--val-every %d needs --val-data: name the token shards to validate on", c->evaluation.val_every);
        c->evaluation.val_every = 0;
    }
    if ((c->evaluation.early_stop > 0 || c->checkpoints.save_best) && c->evaluation.val_every == 0 &&
        config_trains(c) && !c->memory.plan)
        fail("--%s needs validations: name --val-data, and a --val-every above 0",
             c->checkpoints.save_best ? "save-best" : "early-stop");
    if (c->data.new_data && strcmp(c->checkpoints.resume, "none") == 0)
        fail("--new-data needs --resume: a new run has no other data; leave it out");
    if (c->evaluation.sample_tokens > c->model.seq_length &&
        (!*c->evaluation.generate || c->memory.plan)) { // with --generate its prompts decide
        if (config_given(c, evaluation.sample_tokens))
            fail("--sample-tokens %d is more than --seq-length %d; lower it", c->evaluation.sample_tokens,
                 c->model.seq_length);
        c->evaluation.sample_tokens = c->model.seq_length;
    }
}

// Ends the program where --recompute-layers, --recompute-modules or --recompute-layer-modules can't be read.
static inline void config_check_recompute_lists(const struct config *c) {
    int first = 0, last = 0;
    for (const char *at = c->recompute.recompute_layers; *at;)
        recompute_read_range("--recompute-layers", c->recompute.recompute_layers, &at, &first, &last);
    recompute_modules_of(c->recompute.recompute_modules, false);
    for (const char *at = c->recompute.recompute_layer_modules; *at;)
        recompute_read_entry(c->recompute.recompute_layer_modules, &at);
}

// Ends the program for sizes whose products other code could not hold in 32 or 64 bits.
static inline void config_check_sizes(const struct config *c) {
    const double tokens = (double)c->training.micro_batch_size * c->model.seq_length;
    const double qkv = ((double)c->model.num_attention_heads + 2.0 * c->model.num_query_groups) * c->model.kv_channels;
    const double scores =
        (double)c->training.micro_batch_size * c->model.num_attention_heads * c->model.seq_length * c->model.seq_length;
    const double per_token = 32.0 * c->model.hidden_size + 16.0 * qkv + 32.0 * c->model.ffn_hidden_size;
    if (qkv >= 0x1p30)
        fail("--num-attention-heads %d with heads of %d make q, k and v %.3g wide; the limit is 2^30",
             c->model.num_attention_heads, c->model.kv_channels, qkv);
    if (tokens >= 0x1p30)
        fail("--micro-batch-size %d of --seq-length %d are %.3g tokens; a micro batch holds less than 2^30",
             c->training.micro_batch_size, c->model.seq_length, tokens);
    if (c->model.num_layers * (tokens * per_token + 8 * scores) >= 0x1p60)
        fail("the activations of this model at --micro-batch-size %d and --seq-length %d can't be addressed in 64 "
             "bits; lower one of them, or --num-layers, --hidden-size or --ffn-hidden-size",
             c->training.micro_batch_size, c->model.seq_length);
    if ((double)c->training.train_steps * c->training.global_batch_size * c->model.seq_length >= 0x1p60)
        fail("--train-steps %d of --global-batch-size %d are more tokens than 64 bits count; lower one of them",
             c->training.train_steps, c->training.global_batch_size);
}

// Replaces --recompute-granularity partial by full, and warns of it. --recompute-layers then names the layers, or else
// the method becomes block. Ends the program if block lacks --recompute-num-layers, or uniform is given instead.
static inline void config_resolve_partial(struct config *c) {
    struct recompute_options *const r = &c->recompute;
    if (r->recompute_granularity != RECOMPUTE_PARTIAL)
        return;
    r->recompute_granularity = RECOMPUTE_FULL;
    if (*r->recompute_layers) {
        say_warning("--recompute-granularity partial is taken as full, of --recompute-layers %s", r->recompute_layers);
        return;
    }
    if (r->recompute_method == RECOMPUTE_METHOD_UNIFORM)
        fail(
            "--recompute-granularity partial is full with --recompute-method block, not uniform; leave the method out, "
            "or write --recompute-granularity full");
    if (r->recompute_num_layers == 0)
        fail("--recompute-granularity partial is full with --recompute-method block, and needs --recompute-num-layers: "
             "how many of the first layers are recomputed; or --recompute-layers, which names them");
    r->recompute_method = RECOMPUTE_METHOD_BLOCK;
    c->given[CONFIG_ROW(recompute.recompute_method)] = true;
    say_warning(
        "--recompute-granularity partial is taken as full with --recompute-method block: of the first %d layers",
        r->recompute_num_layers);
}

// The functions by which main answers questions of the command line.
struct config_answers {
    options_build *describe_build; // prints what --version adds
    options_list *list_values;     // prints what an option may be, where its value is missing
};
// Reads the options from the command line, else from --config's file, else defaults. config_resolve comes next. Sets
// eval_only where scores are asked for without --train-data and --resume. Strings point into argv and config.file.
// answers may be NULL. Ends the program for --help, --version or a wrong option.
static inline struct config config_read(int argc, char **argv, const struct config_answers *answers) {
    struct options options = config_options;
    struct config config;
    memset(&config, 0, sizeof config);
    options.describe_build = answers ? answers->describe_build : NULL;
    options.list_values = answers ? answers->list_values : NULL;
    options_set_defaults(&options, &config);
    options_parse(&options, &config, config.given, argc, argv);
    if (*config.data.config)
        config_read_file(&config);
    config_resolve_partial(&config);
    memcpy(config.typed, config.given, sizeof config.typed);
    config.checkpoint = "";
    config.out_lock = -1;
    if (config_scores(&config) && !*config.data.train_data && config_trains(&config) &&
        strcmp(config.checkpoints.resume, "none") == 0)
        config.evaluation.eval_only = true; // there is nothing to train on
    return config;
}
// Sets the options that were left open. config->ranks must be set before; 0 counts as 1, and --plan may change it.
static inline void config_resolve(struct config *config) {
    if (config->model.preset > 0)
        options_fill(&config_options, config, config->given, presets[config->model.preset - 1].settings);
    config_resolve_model(config);
    config_resolve_ranks(config);
    config_resolve_batches(config);
    config_resolve_epochs(config);
    config_resolve_schedule(config);
    config_check_optimizer(config);
    config_resolve_data(config);
    config_check_recompute_lists(config);
    config_check_sizes(config);
    config_resolve_fp8(config);
    config_resolve_fit(config);
    config_check_finetune(config);
}
// Calls config_read and config_resolve, for tests. The number of ranks is 1, unless --plan has another.
static inline struct config config_parse(int argc, char **argv) {
    struct config config = config_read(argc, argv, NULL);
    config_resolve(&config);
    return config;
}
