// The report that a run prints when it starts: the model, how it is computed, its memory, its data.
#pragma once
#include "run/environment.h"          // environment_describe
#include "run/fp8_report.cuh"         // fp8_describe
#include "run/mixture_report.cuh"     // report_mixture
#include "run/other_tokenizer.h"      // report_other_tokenizer
#include "run/plan_report.cuh"        // plan_offloads
#include "run/planned_gpu.cuh"        // planned_gpu, gpu_name
#include "run/rank_spread.cuh"        // rank_spread_of
#include "run/run.cuh"                // struct run
#include "run/same_files.h"           // report_same_files
#include "run/self_measure.cuh"       // self_check_report, self_measure_report
#include "run/unused_options.h"       // report_unused_options
#include "run/utilization.cuh"        // gpt_flops_per_token
#include "runtime/machine/numa.h"     // numa_nodes_used
#include "runtime/machine/text_add.h" // text_add

static void report_training(const struct run *r) {
    const struct config *c = r->config;
    char tokens[LOG_NUMBER];
    log_row("training data", "%s: %s tokens in %d files", c->data.train_data,
            log_count(tokens, (int64_t)dataloader_total_tokens(r->train)), dataloader_num_files(r->train));
    report_mixture(r);
    log_row("batch", "%d sequences of %d tokens, in %d micro-batches", c->training.global_batch_size,
            c->model.seq_length, c->training.global_batch_size / c->training.micro_batch_size);
    if (c->ramp.samples > 0)
        log_row("batch warm-up", "from %d sequences on by %d more, in the first %s", c->ramp.start, c->ramp.increment,
                log_count(tokens, c->ramp.samples));
    log_row("steps", "%d, %.3g epochs", c->training.train_steps,
            (double)ramp_samples(&c->ramp, c->training.train_steps) / (double)dataloader_samples_per_epoch(r->train));
    if (c->checkpoints.checkpoint_every > 0)
        log_row("checkpoints", "every %d steps into %s%s%s", c->checkpoints.checkpoint_every, r->saver.job.root,
                *huggingface_note(c) ? "; " : "", huggingface_note(c));
    if (r->peak_flops > 0)
        log_row("matmul peak", "%.0f GFLOP/s %s, which MFU is held against", 1e-9 * r->peak_flops,
                r->peak_is_measured ? "measured" : "by the data sheet");
    else
        log_row("matmul peak", "not measured, as the activations take too little memory for it; MFU is left out");
}

// Advises a rank for each NUMA node if a CPU process spans several: its threads read most weights from other nodes.
static void report_numa(const struct run *r) {
    const int nodes = numa_nodes_used(NUMA_NODES);
    if (r->config->device.device == DEVICE_CPU && r->dev.threads > 1 && nodes > 1)
        log_row("NUMA",
                "this process spans %d nodes; a rank a node keeps memory near: mpirun -np %d --map-by "
                "ppr:1:numa --bind-to numa",
                nodes, nodes);
}

// Prints a row for each option of windows, rotary scaling and documents (attention, positions, targets) that is set.
static void report_positions(const struct run *r) {
    const struct config *c = r->config;
    char type[OPTION_NAME];
    int windowed = 0;
    for (int l = 0; l < c->model.num_layers; l++)
        windowed += r->model->kinds[l].windowed;
    if (windowed > 0)
        log_row("window", "%d keys, in %d of %d layers", r->model->window, windowed, c->model.num_layers);
    if (c->model.rope_scaling_type == SCALING_LONGROPE)
        log_row("rotary scaling", "longrope, the %s factors for sequences of %d",
                c->model.seq_length > c->model.rope_original_max_position_embeddings ? "long" : "short",
                c->model.seq_length);
    else if (c->model.rope_scaling_type != SCALING_NONE)
        log_row("rotary scaling", "%s, factor %g",
                option_choice_name(CHOICES(ROPE_SCALING_TYPES), (int)c->model.rope_scaling_type, type),
                c->model.rope_scaling_factor);
    if (c->data.reset_attention_mask)
        log_row("documents", "a token sees only its own document");
    if (c->data.reset_position_ids)
        log_row("positions", "begin at 0 in each document");
    if (c->data.eod_mask_loss)
        log_row("targets", "the first token of another document does not count, unless it is the delimiter");
}

// Prints the formats of moments, gradients and master weights, if the run trains and they are not all fp32.
static void report_formats(const struct run *r) {
    const struct config *c = r->config;
    char m[OPTION_NAME], v[OPTION_NAME], grads[OPTION_NAME];
    if (!r->model->trains || (c->states.exp_avg_dtype == MOMENT_FP32 && c->states.exp_avg_sq_dtype == MOMENT_FP32 &&
                              c->states.main_grads_dtype == MAIN_FP32 && c->states.main_params_dtype == MAIN_FP32))
        return;
    log_row("state formats", "first moments%s %s, second moments %s, gradients %s%s",
            r->model->muon.count > 0 ? " and momentum" : "",
            option_choice_name(CHOICES(MOMENT_DTYPES), (int)c->states.exp_avg_dtype, m),
            option_choice_name(CHOICES(MOMENT_DTYPES), (int)c->states.exp_avg_sq_dtype, v),
            option_choice_name(CHOICES(MAIN_DTYPES), (int)c->states.main_grads_dtype, grads),
            c->states.main_params_dtype == MAIN_BF16 ? ", no master weights" : "");
}
// text (n bytes) = the tensors of a layer that Muon updates: "qkv.weight, fc.weight"; "": none.
static void muon_names(char *text, size_t n, const struct gpt *m) {
    int layer = -1;
    text[0] = 0;
    for (int i = 0; i < m->muon.count; i++) {
        const struct tensor *t = &m->table.tensors[m->muon.matrices[i].tensor];
        const char *name = strchr(t->name, '.') + 1; // after "layer."
        layer = layer < 0 ? t->layer : layer;
        if (t->layer == layer && (i == 0 || m->muon.matrices[i - 1].tensor != m->muon.matrices[i].tensor))
            text_add(text, n, "%s%s", *text ? ", " : "", strchr(name, '.') + 1);
    }
}
// Prints what Muon updates and costs, if it is used, and the decay of the moving averages, if there are any.
static void report_optimizer(const struct run *r) {
    const struct config *c = r->config;
    const struct gpt *m = r->model;
    const struct muon *u = &m->muon;
    const double step = gpt_flops_per_token(m).done * c->training.global_batch_size * c->model.seq_length;
    char names[160] = "", number[LOG_NUMBER];
    int64_t elements = 0;
    for (int i = 0; i < u->count; i++)
        elements += matrix_elements(&u->matrices[i]);
    muon_names(names, sizeof names, m);
    if (u->count > 0)
        log_row("Muon", "%d matrices of %s parameters (%s), in %d waves, %.2g %% of a step's flops; AdamW for the rest",
                u->count, log_count(number, elements), names, u->num_waves, 100 * u->flops / step);
    if (m->trains && c->training.ema_decay > 0)
        log_row("moving averages", "of decay %.6g; validation, samples and scores are theirs", c->training.ema_decay);
}
// Prints the environment variables that are set and change what is computed, as a row; nothing if there are none.
static void report_environment(void) {
    char *const variables = environment_describe();
    if (*variables)
        log_row("environment", "%s", variables);
    free(variables);
}
// Prints the plan's bytes in the host's memory and what a step copies, if it offloads. kind: words after the bytes.
static void report_offload(const struct run *r, const char *row, const char *kind) {
    const struct plan *plan = &r->model->timeline.plan;
    size_t bytes[TRANSFER_DIRECTIONS];
    char held[LOG_NUMBER], out[LOG_NUMBER], in[LOG_NUMBER];
    if (!plan_offloads(plan))
        return;
    gpt_step_transfer_bytes(r->model, bytes);
    log_row(row, "%s %s; a step copies %s there and %s back%s", log_bytes(held, (int64_t)plan->host_peak_bytes), kind,
            log_bytes(out, (int64_t)bytes[TRANSFER_TO_HOST]), log_bytes(in, (int64_t)bytes[TRANSFER_TO_DEVICE]),
            device_is_gpu(&r->dev) ? "" : "; on the cpu target that saves nothing");
}
// Prints auto's choice, what it did not choose, notes on it, and the predicted time, as far as there are any.
static void report_fit(const struct run *r) {
    const struct plan *plan = &r->model->timeline.plan;
    const struct plan_prediction *p = &plan->predicted;
    const struct fit_chosen *chosen = &r->chosen;
    char text[LOG_NUMBER], more[LOG_NUMBER], ms[LOG_NUMBER], update[LOG_NUMBER], tokens[LOG_NUMBER];
    for (int i = 0; i < chosen->count; i++)
        log_row(i == 0 ? "auto" : "not chosen", "%s", chosen->best[i]);
    if (*chosen->gain)
        log_row("with --allow-lossy-states", "about %s", chosen->gain);
    if (*chosen->forced)
        log_row("note", "%s", chosen->forced);
    if (r->planned_again)
        log_row("note",
                "planned again: memory that was free at first was taken since, by the collectives' library or by "
                "another process");
    if (chosen->count > 0)
        log_row("search", "%d plans in %.2f s", chosen->plans, chosen->search_s);
    if (p->step_ms > 0)
        log_row("predicted", "%s ms a step, %s of it the update; %s tokens/s; %s to the host, %s back: %s",
                log_digits(ms, p->step_ms), log_digits(update, p->update_ms), log_digits(tokens, p->tokens_per_s),
                log_bytes(text, (int64_t)p->to_host_bytes), log_bytes(more, (int64_t)p->to_device_bytes), p->rates);
}

static void report_finetuning(const struct run *r) {
    const struct config *c = r->config;
    const struct parameters *table = &r->model->table;
    char trained[LOG_NUMBER];
    if (r->model->trains && table->num_frozen > 0)
        log_row("trained", "%s of the parameters, %.3g %%", log_count(trained, table->visible_trained),
                100.0 * (double)table->visible_trained / (double)table->visible);
    if (c->finetuning.lora_rank > 0)
        log_row("adapters", "LoRA of rank %d, scaled by %.4g, on %s", c->finetuning.lora_rank, config_lora_scale(c),
                c->finetuning.lora_target_modules);
}

static void report_memory(const struct rank_spread *s) {
    char all[LOG_NUMBER], most[LOG_NUMBER], of_it[LOG_NUMBER], most_of_it[LOG_NUMBER];
    log_bytes(all, s->planned.least);
    log_bytes(of_it, s->activations.least);
    if (s->planned.least == s->planned.most && s->activations.least == s->activations.most)
        log_row("memory", "%s planned, %s of it activations", all, of_it);
    else
        log_row("memory", "%s to %s planned a rank, %s to %s of it activations", all, log_bytes(most, s->planned.most),
                of_it, log_bytes(most_of_it, s->activations.most));
}

static void report_device(const struct run *r) {
    char text[384], name[GPU_NAME_MAX], larger[GPU_NAME_MAX], memory[LOG_NUMBER], times[32] = "";
    const struct gpu_peak *const gpu = planned_gpu(r->config), *const other = gpu ? gpu_larger_edition(gpu) : NULL;
    if (r->config->ranks > 1)
        snprintf(times, sizeof times, "%d x ", r->config->ranks);
    if (gpu)
        log_row("device", "%s%s of %s, compute capability %d.%d, %s: planned for%s%s", times, gpu_name(name, gpu),
                log_bytes(memory, (int64_t)gpu->memory_mib << 20), r->dev.planned.major, r->dev.planned.minor,
                FLOATX_NAME, other ? "; with more memory there is the " : "", other ? gpu_name(larger, other) : "");
    else
        log_row("device", "%s", device_describe(text, sizeof text, &r->dev));
}

// Prints what a process holds beside its plan, with --plan on the CPU: fixed texts, measured on steps of 5 to 800 MiB.
static void report_beside_plan(const struct run *r) {
    if (!r->config->memory.plan || device_is_gpu(&r->dev))
        return;
    if (sizeof(floatX) == 4)
        log_row("beside the plan",
                "the program with its libraries, and what oneDNN packs of a product's operands: 19 to 67 "
                "MiB were measured");
    else
        log_row("beside the plan", "the program with its libraries: 13 to 20 MiB were measured");
}

// Prints the report, on rank 0, once the model is allocated or, with --plan, planned. Every rank calls this.
static void report(const struct run *r) {
    const struct config *c = r->config;
    const struct gpt *m = r->model;
    const struct rank_spread spread = rank_spread_of(r);
    char text[LOG_NUMBER], fp8[FP8_TEXT];
    log_row("model", "%d layers, hidden %d, %d heads, %d KV heads of %d, FFN %d, vocabulary %d", c->model.num_layers,
            c->model.hidden_size, c->model.num_attention_heads, c->model.num_query_groups, c->model.kv_channels,
            c->model.ffn_hidden_size, c->model.vocab_size);
    log_row("parameters", "%s", log_count(text, m->table.visible));
    report_finetuning(r);
    report_device(r);
    if (c->instruction_set_reason && !*c->memory.plan_gpu)
        log_row("instruction set", "%s, %s", c->device.instruction_set, c->instruction_set_reason);
    report_environment();
    log_row("precision", "%s: %s", c->device.precision == WITH_BF16 ? "bf16" : "fp32", c->precision_reason);
    if (c->fp8.fp8_format != FP8_FORMAT_NONE)
        log_row("FP8", "%s", fp8_describe(fp8, c, m->fp8.caches_weights));
    log_row("matmul", "%s", matmul_describe(r->dev.matmul));
    if (*r->tuning)
        log_row("matmul algorithms", "%s", r->tuning);
    if (*r->tuning_note)
        log_row("not used", "%s", r->tuning_note);
    log_row("attention", "%s", r->attention.reason);
    self_check_report(r);
    self_measure_report(r);
    if (*spread.differs)
        log_row("ranks differ",
                "%s; replicas of parameters stay equal, but losses' last bits depend on which rank has what",
                spread.differs);
    report_positions(r);
    report_numa(r);
    log_row("recomputation", "%s", m->policy.description);
    if (c->ranks > 1)
        log_row("ranks", "%d, ZeRO stage %d; gradients in %s, in %d pieces of %s at most; memory is a rank's", c->ranks,
                c->processes.zero_stage, c->processes.grad_reduce_in_bf16 ? "bf16" : "fp32", m->zero.shards.count,
                log_bytes(text, m->zero.shards.largest_shard * c->ranks * (int64_t)sizeof(float)));
    if (r->parallel && launch_has_no_secret(&r->parallel->launch))
        log_row("secret", "none: any host that reaches rank 0's port may join at the start; see --rendezvous-secret");
    report_memory(&spread);
    report_beside_plan(r);
    if (m->trains)
        log_row("logits", "%lld tokens at a time, of %lld in a micro-batch", (long long)m->loss_chunk,
                (long long)extent_of(m, PASS_TRAIN).N);
    report_optimizer(r);
    report_formats(r);
    report_offload(r, "offloaded", "of the host's memory");
    report_fit(r);
    if (r->train)
        report_training(r);
    if (*c->checkpoint)
        log_row("goes on from", "%s%s%s", c->checkpoint, *r->base_folder ? " and the base model " : "", r->base_folder);
    else if (*c->checkpoints.init_from)
        log_row("begins from", "%s%s%s", c->checkpoints.init_from,
                *c->finetuning.lora_adapter ? " with the adapters of " : "", c->finetuning.lora_adapter);
    fit_note_weak_options(&r->fit, stdout);
    report_unused_options(c);
    report_other_tokenizer(r, stdout);
    report_unused_vocabulary(r, stdout);
    if (r->train && c->rank == 0)
        report_same_files(r->train, r->val, stdout);
    printf("\n");
    fflush(stdout);
}
