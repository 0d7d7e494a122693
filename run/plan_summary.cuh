// The summary of --plan, in ten lines: whether a run fits, what takes memory and time, and which option to change next.
#pragma once
#include "run/fp8_report.cuh"         // fp8_attention_passes
#include "run/plan_report.cuh"        // plan_live_bytes, plan_offloads
#include "run/planned_gpu.cuh"        // planned_gpu_bytes
#include "run/ranks.cuh"              // budgets_of
#include "run/report.cuh"             // report_device, report_offload
#include "run/run.cuh"                // struct run
#include "run/unused_options.h"       // report_unused_options
#include "runtime/machine/text_add.h" // text_add

// Prints the summary on stdout. r->model is planned and, if it trains and r->rates are known, its step is predicted.
static void plan_summary(const struct run *r);

// ---------------------------------------------------------------------------------------------------------------------

// The number of bytes of the device's memory that the plan takes; on a CPU, with its bytes of the host.
static size_t summary_need(const struct run *r) {
    const struct plan *plan = &r->model->timeline.plan;
    return plan->peak_bytes + (device_is_gpu(&r->dev) ? 0 : plan->host_peak_bytes);
}
// Prints whether the plan fits. limit: the bytes of the device's memory that it may take, or SIZE_MAX if not known.
static void summary_verdict(const struct run *r, size_t limit) {
    const struct config *c = r->config;
    const struct plan *plan = &r->model->timeline.plan;
    const bool on_gpu = device_is_gpu(&r->dev);
    const size_t need = summary_need(r);
    const char *whose = c->recompute.memory_budget > 0 ? "--memory-budget allows"
                        : on_gpu && c->ranks > 1       ? "each GPU leaves"
                        : on_gpu                       ? "this GPU leaves"
                                                       : "this machine leaves";
    char all[LOG_NUMBER], may[LOG_NUMBER], left[LOG_NUMBER], host[LOG_NUMBER + 32] = "";
    log_bytes(all, (int64_t)need);
    if (on_gpu && plan_offloads(plan))
        snprintf(host, sizeof host, ", with %s of the host's", log_bytes(left, (int64_t)plan->host_peak_bytes));
    if (limit == SIZE_MAX)
        log_row("verdict", "takes %s%s; --plan-gpu NAME or --memory-budget BYTES says whether that fits", all, host);
    else if (need <= limit)
        log_row("verdict", "fits: it takes %s%s, %s %s, %s stay free", all, host, whose, log_bytes(may, (int64_t)limit),
                log_bytes(left, (int64_t)(limit - need)));
    else
        log_row("verdict", "does NOT fit: it takes %s%s, %s %s", all, host, whose, log_bytes(may, (int64_t)limit));
}

// Prints a row of the bytes that each arena takes of a rank's device memory: parameters, gradients and so on.
static void summary_parts(const struct plan *plan) {
    char text[256] = "", bytes[LOG_NUMBER];
    for (int a = 0; a < ARENA_COUNT; a++)
        if (plan_arena_memory((enum plan_arena)a) == MEMORY_DEVICE && plan->arena_bytes[a] > 0)
            text_add(text, sizeof text, "%s%s %s", *text ? ", " : "", plan_arena_name((enum plan_arena)a),
                     log_bytes(bytes, (int64_t)plan->arena_bytes[a]));
    log_row("parts", "%s", text);
}

// Prints the peak's phase, if there is one, and the 3 categories of the activations arena that are largest in it.
static void summary_peak(const struct plan *plan) {
    enum { MAX = 3 };
    char text[384], bytes[LOG_NUMBER];
    size_t live[MAX] = {0, 0, 0};
    int category[MAX] = {-1, -1, -1};
    if (plan->peak_phase < 0)
        return;
    snprintf(text, sizeof text, "in \"%s\":", plan->phases[plan->peak_phase].name);
    for (int c = 0; c < plan->category_count; c++) {
        size_t *const all = plan_live_bytes(plan, c, true);
        size_t here = all[plan->peak_phase];
        int at = c;
        free(all);
        for (int i = 0; i < MAX; i++) // insertion into the largest so far
            if (here > live[i]) {
                const size_t less = live[i];
                const int whose = category[i];
                live[i] = here;
                category[i] = at;
                here = less;
                at = whose;
            }
    }
    for (int i = 0; i < MAX && live[i] > 0; i++)
        text_add(text, sizeof text, "%s %s %s", i > 0 ? "," : "", plan->categories[category[i]],
                 log_bytes(bytes, (int64_t)live[i]));
    log_row("peak", "%s", text);
}

static void summary_time(const struct plan_prediction *p, int ranks) {
    char ms[LOG_NUMBER], tokens[LOG_NUMBER];
    if (p->step_ms > 0)
        log_row("predicted", "%s ms a step, %.0f %% of it the update; %s tokens/s%s: %s", log_digits(ms, p->step_ms),
                100 * p->update_ms / p->step_ms, log_digits(tokens, p->tokens_per_s),
                ranks > 1 ? " of all ranks, without their exchange" : "", p->rates);
}

// ---- the next thing to change ----

struct summary_change {
    struct fit_time time;
    struct fit_bytes bytes;
};
// Plans a run with the options `changed`, and returns the time and bytes it would take. Chooses anew in `changed`, by
// `limit`, the chunk of logits and --fp8-weight-cache, where the run itself chose those. Doesn't repeat auto's search.
static struct summary_change summary_plan(const struct run *r, struct config *changed, size_t limit) {
    const struct fit f = fit_of(changed, r->attention.backend, r->fit.dev);
    const struct fit_limits limits = {limit, SIZE_MAX, SIZE_MAX};
    struct summary_change change;
    if (r->asked.fp8.fp8_weight_cache == FP8_CACHE_AUTO) {
        changed->fp8.fp8_weight_cache = FP8_CACHE_OFF;
        if (changed->fp8.fp8_format != FP8_FORMAT_NONE && fit_caches_fp8_weights(&f, limits))
            changed->fp8.fp8_weight_cache = FP8_CACHE_ALWAYS;
    }
    if (r->chunk_grew) {
        changed->memory.loss_chunk_tokens = 0;
        changed->memory.loss_chunk_tokens = (int)fit_loss_chunk(&f, limits);
    }
    struct gpt *const m = gpt_create(changed, fit_policy(&f), r->attention.backend, r->fit.dev);
    change.time = fit_predict(m, &r->rates);
    change.bytes = fit_bytes_of(&m->timeline.plan);
    gpt_destroy(m);
    return change;
}

// Advises a larger global batch if the update takes over 25 % of a predicted step: doubled, at most 10 times, until the
// update takes at most 10 %, and only if it fits `limit` or auto would choose anew. Returns whether it printed.
static bool summary_next_batch(const struct run *r, size_t limit) {
    const double SLOW_UPDATE = 0.25, SMALL_UPDATE = 0.1;
    const struct plan_prediction *p = &r->model->timeline.plan.predicted;
    struct config changed = *r->config;
    struct summary_change change;
    char bytes[LOG_NUMBER];
    int times = 1;
    if (p->step_ms <= 0 || p->update_ms <= SLOW_UPDATE * p->step_ms)
        return false;
    do {
        times *= 2;
        changed.training.global_batch_size *= 2;
        change = summary_plan(r, &changed, limit);
    } while (change.time.update_s > SMALL_UPDATE * change.time.step_s && times < 1024 &&
             changed.training.global_batch_size < INT32_MAX / 2);
    const bool by_auto = r->chosen.count > 0;
    if (change.bytes.device > limit && !by_auto)
        return false;
    log_row(
        "next",
        "the update is %.0f %% of a step: --global-batch-size %d makes it %.0f %%, and %s%.2g times the tokens/s, in %s; "
        "a larger batch trains otherwise",
        100 * p->update_ms / p->step_ms, changed.training.global_batch_size,
        100 * change.time.update_s / change.time.step_s, by_auto ? "about " : "",
        times * p->step_ms / (1e3 * change.time.step_s),
        by_auto ? "what auto then chooses" : log_bytes(bytes, (int64_t)change.bytes.device));
    return true;
}
// Advises against recomputation if the user chose it and a plan without it fits `limit`. Returns whether it printed.
static bool summary_next_recomputation(const struct run *r, size_t limit) {
    struct config changed = *r->config;
    char bytes[LOG_NUMBER];
    if (r->chosen.count > 0 || (changed.recompute.recompute_granularity != RECOMPUTE_FULL &&
                                changed.recompute.recompute_granularity != RECOMPUTE_SELECTIVE))
        return false;
    changed.recompute.recompute_granularity = RECOMPUTE_NONE;
    changed.recompute.recompute_method = RECOMPUTE_METHOD_UNSET;
    changed.recompute.recompute_num_layers = 0;
    changed.recompute.recompute_layers = changed.recompute.recompute_modules =
        changed.recompute.recompute_layer_modules = "";
    const size_t peak = summary_plan(r, &changed, limit).bytes.device;
    if (peak > limit)
        return false;
    log_row("next", "recomputation isn't needed: --recompute-granularity none takes %s, which fits",
            log_bytes(bytes, (int64_t)peak));
    return true;
}
// Advises the largest micro-batch, up to 16 times as large, that fits `limit`; not after auto. Returns whether it did.
static bool summary_next_micro_batch(const struct run *r, size_t limit) {
    const struct config *c = r->config;
    size_t peak = 0;
    int best = 0;
    char bytes[LOG_NUMBER];
    for (int B = 2 * c->training.micro_batch_size; B <= 16 * c->training.micro_batch_size && r->chosen.count == 0;
         B *= 2) {
        struct config changed = *c;
        changed.training.micro_batch_size = B;
        if ((int64_t)B * c->ranks > c->training.global_batch_size ||
            c->training.global_batch_size % (B * c->ranks) != 0)
            break;
        const size_t then = summary_plan(r, &changed, limit).bytes.device;
        if (then > limit)
            break;
        best = B;
        peak = then;
    }
    if (best == 0)
        return false;
    log_row("next", "there is room: --micro-batch-size %d takes %s, and has fewer, larger products", best,
            log_bytes(bytes, (int64_t)peak));
    return true;
}

// Prints auto's first choice that fits `limit`, less a margin, and the host's budget, or that none does. Tries auto by
// itself, with --zero-stage 3, with --micro-batch-size 1, with both, and at last with --allow-lossy-states, too.
static void summary_next_auto(const struct run *r, size_t limit) {
    static const struct {
        const char *text;
        bool shards, small, lossy;
    } with[] = {{"", false, false, false},
                {" --zero-stage 3", true, false, false},
                {" --micro-batch-size 1", false, true, false},
                {" --zero-stage 3 --micro-batch-size 1", true, true, false},
                {" --micro-batch-size 1 --allow-lossy-states", false, true, true},
                {" --zero-stage 3 --micro-batch-size 1 --allow-lossy-states", true, true, true}};
    const bool can_shard = r->config->ranks > 1 && r->config->processes.zero_stage < 3;
    const struct fit_limits limits = {
        limit - limit / FIT_VARIES,
        r->config->states.host_memory_budget > 0 ? (size_t)r->config->states.host_memory_budget : SIZE_MAX, SIZE_MAX};
    char bytes[LOG_NUMBER], host[LOG_NUMBER], of_host[LOG_NUMBER + 48] = "", tokens[LOG_NUMBER];
    for (size_t i = 0; i < sizeof with / sizeof *with; i++) {
        struct config changed = *r->config;
        if (with[i].shards && !can_shard)
            continue;
        changed.recompute.recompute_granularity = RECOMPUTE_AUTO;
        changed.recompute.recompute_method = RECOMPUTE_METHOD_UNSET;
        changed.recompute.recompute_num_layers = 0;
        changed.recompute.recompute_layers = changed.recompute.recompute_modules =
            changed.recompute.recompute_layer_modules = "";
        changed.processes.zero_stage = with[i].shards ? 3 : changed.processes.zero_stage;
        changed.training.micro_batch_size = with[i].small ? 1 : changed.training.micro_batch_size;
        changed.states.allow_lossy_states = changed.states.allow_lossy_states || with[i].lossy;
        const struct fit f = fit_of(&changed, r->attention.backend, r->fit.dev);
        const struct fit_alternative then = fit_alternative_of(&f, limits, &r->rates);
        if (!then.fits)
            continue;
        if (then.host > 0)
            snprintf(of_host, sizeof of_host, " and %s of the host's%s", log_bytes(host, (int64_t)then.host),
                     changed.ranks > 1 ? " for each rank" : "");
        log_row(
            "next", "--recompute-granularity auto%s fits: %s%s, %s tokens/s%s: %s", with[i].text,
            log_bytes(bytes, (int64_t)then.device), of_host,
            log_digits(tokens, (double)changed.training.global_batch_size * changed.model.seq_length / then.seconds),
            changed.ranks > 1 ? " without the exchange between ranks" : "", then.text);
        return;
    }
    log_row("next",
            "nothing fits, not even --recompute-granularity auto%s: %sa shorter --seq-length, a smaller model, or "
            "--lora-rank to finetune",
            with[can_shard ? 5 : 4].text, r->config->ranks > 1 ? "more GPUs with --zero-stage 3, " : "");
}

// Prints the first advice that applies. limit: the bytes of the device's memory for a plan, or SIZE_MAX if not known.
static void summary_next(const struct run *r, size_t limit) {
    const struct config *c = r->config;
    char budget[OPTION_NAME] = "";
    if (limit == SIZE_MAX)
        log_row("next", "--plan-gpu 'H100 80GB HBM3', or --memory-budget 80GiB, says what fits and what is faster");
    else if (summary_need(r) > limit && *c->memory.plan_gpu && r->rates.flops > 0) {
        summary_next_auto(r, limit);
    } else if (summary_need(r) > limit) { // a --memory-budget that is exceeded has ended the program
        if (!*c->memory.plan_gpu)
            snprintf(budget, sizeof budget, " --memory-budget %zuMiB", limit >> 20);
        log_row("next", "--recompute-granularity auto%s searches recomputation and offload for what fits", budget);
    } else if (!summary_next_batch(r, limit) && !summary_next_recomputation(r, limit) &&
               !summary_next_micro_batch(r, limit))
        log_row("next", "nothing is seen: memory or the global batch allows no micro-batch of twice the size");
}

static void plan_summary(const struct run *r) {
    const struct config *c = r->config;
    const struct gpt *m = r->model;
    size_t budget[MEMORY_COUNT];
    char number[LOG_NUMBER];
    budgets_of(r, true, budget);
    log_row("model", "%s parameters, %s, %d layers, hidden size %d", log_count(number, m->table.visible), FLOATX_NAME,
            c->model.num_layers, c->model.hidden_size);
    report_device(r);
    if (m->trains) {
        log_row("batch", "micro-batches of %d x %d tokens, %d sequences a step%s", c->training.micro_batch_size,
                c->model.seq_length, c->training.global_batch_size, c->ranks > 1 ? " of all ranks" : "");
        const char *passes = fp8_attention_passes(c);
        log_row("computed by", "%s attention%s%s; recomputation %s", attention_name(m->backend), passes ? ", " : "",
                passes ? passes : "", m->policy.description);
    }
    if (r->chosen.count > 0) // without its time and bytes, which other rows have
        log_row("auto", "%s", strstr(r->chosen.best[0], ": ") + 2);
    summary_verdict(r, budget[MEMORY_DEVICE]);
    summary_parts(&m->timeline.plan);
    summary_peak(&m->timeline.plan);
    report_offload(r, "host", device_is_gpu(&r->dev) ? "pinned" : "more");
    summary_time(&m->timeline.plan.predicted, c->ranks);
    if (m->trains)
        summary_next(r, budget[MEMORY_DEVICE]);
    log_row("more", "--plan=full prints all of it; --plan-json and --plan-picture FILE write every buffer");
    if (*r->chosen.forced)
        log_row("note", "%s", r->chosen.forced);
    report_unused_options(c);
    fit_note_weak_options(&r->fit, stdout);
}
