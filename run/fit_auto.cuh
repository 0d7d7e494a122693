// --recompute-granularity auto: searches a model's plans by run/fit_search.cuh. The run's options get what is found, as
// if given: config.json and checkpoints keep it, and a run started with these searches nothing.
#pragma once
#include "run/fit.cuh"                // struct fit, policies
#include "run/fit_search.cuh"         // fit_search
#include "run/fit_time.cuh"           // fit_predict, struct fit_rates
#include "runtime/machine/text_add.h" // text_add
#include "runtime/net/parallel.h"     // control_all_gather, control_broadcast

// The texts on a choice for the start-up report: a line for each of the best, the chosen first, and one on formats.
struct fit_chosen {
    int count, plans; // 0: this rank searched nothing
    double search_s;
    char best[FIT_BEST][512], gain[512];
    // That --optimizer-cpu-offload, which was given, takes memory instead of freeing it; "": it does not
    char forced[256];
};

// Replaces auto, and what the user left open of offload and formats, by the choice within the limits with the fastest
// predicted step. own: f->config itself. Lowers rates, flops not 0, to the lowest of any rank. parallel: NULL for one
// rank. Ends the program where nothing fits. Every rank calls this and gets the same choice; only rank 0 gets texts.
static struct fit_chosen fit_choose(const struct fit *f, struct config *own, struct fit_limits limits,
                                    struct fit_rates *rates, struct parallel *parallel);

struct fit_alternative {
    bool fits;
    size_t device, host; // bytes
    double seconds;
    char text[320];
};
// Returns fit_choose's choice on one rank for f's options within the limits. Sets no options. rates->flops: not 0.
static struct fit_alternative fit_alternative_of(const struct fit *f, struct fit_limits limits,
                                                 const struct fit_rates *rates);

// ---- the space ----

struct fit_formats {
    enum config_main_dtype params, grads;
    enum config_moment_dtype m, v;
};
struct fit_auto {
    const struct fit *f;
    const struct fit_rates *rates;
    uint32_t frontier[FRONTIER_MAX];
    struct fit_formats formats[FIT_FORMATS_MAX];
    int known_formats;
    struct fit_space space;
};
static_assert((int)FRONTIER_MAX <= (int)FIT_KINDS_MAX, "a kind for each place on the frontier");

// Returns the policy that `recompute` stands for, a member of struct fit_choice; policy_free frees the policy.
static struct recompute_policy fit_auto_policy(const struct fit_auto *a, int recompute) {
    const int L = a->space.num_layers, k = recompute / L, n = recompute % L;
    return policy_mixed(L, a->frontier[n > 0 ? k + 1 : k], a->frontier[k], n);
}
// Whether the user gave the fraction of the states that --optimizer-cpu-offload moves, and that option too.
static bool fit_fraction_is_given(const struct config *c) {
    return config_given(c, states.optimizer_cpu_offload) && config_given(c, states.optimizer_offload_fraction);
}
// Sets a choice's options in *config, except recomputation's and an --optimizer-offload-fraction that the user gave.
static void fit_apply(const struct fit_auto *a, const struct fit_choice *choice, struct config *config) {
    const struct fit_formats *formats = &a->formats[choice->formats];
    config->states.optimizer_cpu_offload = choice->percent > 0;
    if (!fit_fraction_is_given(config))
        config->states.optimizer_offload_fraction = choice->percent > 0 ? choice->percent / 100.0 : 1;
    config->states.cpu_offloading_num_layers = choice->layers;
    config->states.offload_gradients = choice->gradients;
    config->states.offload_weights = choice->weights;
    config->states.main_params_dtype = formats->params;
    config->states.main_grads_dtype = formats->grads;
    config->states.exp_avg_dtype = formats->m;
    config->states.exp_avg_sq_dtype = formats->v;
    config_resolve_checkpoint_async(config);
}
// Plans a choice, as fit_space's `plan`. Returns seconds, and bytes: lower bounds unless `placed`. context: fit_auto.
static struct fit_outcome fit_plan_choice(void *context, const struct fit_choice *choice, bool placed) {
    const struct fit_auto *a = (const struct fit_auto *)context;
    struct config config = *a->f->config;
    fit_apply(a, choice, &config);
    struct gpt *m = gpt_record(&config, fit_auto_policy(a, choice->recompute), a->f->backend, a->f->dev);
    const struct plan *plan = &m->timeline.plan;
    if (placed)
        plan_place(&m->timeline.plan);
    else
        plan_set_bounds(&m->timeline.plan);
    const struct fit_outcome outcome = {(double)(placed ? plan->peak_bytes : plan->lower_bound_bytes),
                                        (double)(placed ? plan->host_peak_bytes : plan->host_lower_bound_bytes),
                                        fit_predict(m, a->rates).step_s};
    gpt_destroy(m);
    return outcome;
}

// Adds formats to a->formats, if new. Members that the user gave, or that can't change, first get the options' values.
static void fit_add_formats(struct fit_auto *a, struct fit_formats formats) {
    const struct config *c = a->f->config;
    if (config_given(c, states.main_params_dtype) || sizeof(floatX) == 4 || c->training.ema_decay > 0)
        formats.params = c->states.main_params_dtype;
    if (config_given(c, states.main_grads_dtype) || !config_may_move_gradients(c))
        formats.grads = c->states.main_grads_dtype;
    if (config_given(c, states.exp_avg_dtype))
        formats.m = c->states.exp_avg_dtype;
    if (config_given(c, states.exp_avg_sq_dtype))
        formats.v = c->states.exp_avg_sq_dtype;
    for (int i = 0; i < a->known_formats; i++)
        if (memcmp(&a->formats[i], &formats, sizeof formats) == 0)
            return;
    a->formats[a->known_formats++] = formats;
}
// Lists the formats that the options leave open, from the most exact, which are as given, to the least.
static void fit_list_formats(struct fit_auto *a) {
    static const struct fit_formats all[] = {
        {MAIN_FP32, MAIN_FP32, MOMENT_FP32, MOMENT_FP32}, {MAIN_FP32, MAIN_FP32, MOMENT_BF16, MOMENT_BF16},
        {MAIN_FP32, MAIN_BF16, MOMENT_BF16, MOMENT_BF16}, {MAIN_FP32, MAIN_BF16, MOMENT_8BIT, MOMENT_8BIT},
        {MAIN_BF16, MAIN_BF16, MOMENT_8BIT, MOMENT_8BIT},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        fit_add_formats(a, all[i]);
}

// Returns how many bytes of the device's memory, or of both memories on a CPU, each choice takes at least. So much may
// be used before a choice is made without raising the run's peak. The options have --recompute-granularity auto.
static size_t fit_least_bytes(const struct fit *f) {
    struct fit_auto *a = (struct fit_auto *)calloc(1, sizeof *a);
    if (!a)
        fail("out of memory");
    a->f = f;
    fit_list_formats(a);
    struct config config = *f->config;
    struct fit_choice c = {0, 0, 0, 0, 0, 0};
    c.formats = config.states.allow_lossy_states ? a->known_formats - 1 : 0;
    if (device_is_gpu(f->dev)) {
        c.layers = config.model.num_layers - 1;
        c.percent = 100;
        c.gradients = config_may_move_gradients(&config);
        c.weights = config_may_move_weights(&config);
    }
    fit_apply(a, &c, &config);
    free(a);
    struct gpt *m = gpt_record(&config, policy_uniform(config.model.num_layers, 1), f->backend, f->dev);
    plan_set_bounds(&m->timeline.plan);
    const struct plan *plan = &m->timeline.plan;
    const size_t bytes = plan->lower_bound_bytes + (device_is_gpu(f->dev) ? 0 : plan->host_lower_bound_bytes);
    gpt_destroy(m);
    return bytes;
}

// Sets the range of each member of a choice; given options are fixed. a->space.kinds and the formats must be set.
static void fit_set_ranges(struct fit_auto *a) {
    const struct config *c = a->f->config;
    struct fit_choice *least = &a->space.least, *most = &a->space.most;
    most->recompute = (a->space.kinds - 1) * c->model.num_layers;
    most->layers = c->model.num_layers - 1; // the last layer's backward comes at once
    if (config_given(c, states.cpu_offloading_num_layers))
        least->layers = most->layers = c->states.cpu_offloading_num_layers;
    most->percent = 100;
    if (config_given(c, states.optimizer_cpu_offload) && !c->states.optimizer_cpu_offload)
        most->percent = 0;
    else if (config_given(c, states.optimizer_cpu_offload)) {
        const int given = (int)(100 * c->states.optimizer_offload_fraction + 0.5);
        least->percent = fit_fraction_is_given(c) && given > 1 ? given : 1;
        most->percent = fit_fraction_is_given(c) ? least->percent : 100;
    }
    most->gradients = config_may_move_gradients(c);
    if (config_given(c, states.offload_gradients))
        least->gradients = most->gradients = c->states.offload_gradients;
    most->weights = config_may_move_weights(c);
    if (config_given(c, states.offload_weights))
        least->weights = most->weights = c->states.offload_weights;
    most->formats = c->states.allow_lossy_states ? a->known_formats - 1 : 0;
}

// Sets the kinds of recomputation (a->frontier) by the middle layer: their bytes and times, and the time of forward.
static void fit_set_layers(struct fit_auto *a) {
    const struct config *c = a->f->config;
    const struct fit_rates *r = a->rates;
    const struct activation_prices prices = fit_prices(r);
    const double tokens = (double)c->training.micro_batch_size * c->model.seq_length;
    const struct layer_shape layer = layer_shape_at(&a->f->shape, c->model.num_layers / 2); // what most layers are
    struct fit_space *s = &a->space;
    s->num_layers = c->model.num_layers;
    s->kinds = recompute_frontier(a->frontier, &layer, prices);
    for (int k = 0; k < s->kinds; k++) {
        const uint32_t missing = activation_closure(ACT_BACKWARD, a->frontier[k], &layer);
        s->kept_bytes[k] = (double)activation_bytes(a->frontier[k], &layer) * tokens;
        s->recompute_s[k] = activation_cost(missing, &layer, prices) * tokens / r->flops;
    }
    s->forward_s = activation_cost(ACT_ALL, &layer, prices) * tokens / r->flops;
}
static double fit_share_outside_layers(const struct parameters *table) {
    double all = 0, outside = 0;
    for (int i = 0; i < table->num_tensors + table->num_frozen; i++) {
        const struct tensor *t = &table->tensors[i];
        all += (double)t->count;
        outside += t->layer < 0 ? (double)t->count : 0;
    }
    return outside / fit_larger(all, 1);
}
// Sets the estimates in a->space of a->formats[i]: bytes of gradients and states, seconds of the update.
static void fit_set_format_estimates(struct fit_auto *a, int i) {
    const struct fit_formats *formats = &a->formats[i];
    struct config config = *a->f->config;
    config.states.main_params_dtype = formats->params;
    config.states.main_grads_dtype = formats->grads;
    config.states.exp_avg_dtype = formats->m;
    config.states.exp_avg_sq_dtype = formats->v;
    struct gpt *m = gpt_record(&config, policy_keep_all(config.model.num_layers), a->f->backend, a->f->dev);
    const struct shards *shards = &m->zero.shards;
    const double fraction = config.states.optimizer_offload_fraction;
    const int given = fit_fraction_is_given(&config) ? (int)(100 * fraction + 0.5) : -1;
    a->space.gradients_bytes[i] =
        (double)shards_elements(shards, shards_gradients(shards)) * main_dtype_bytes(formats->grads);
    for (int percent = 0; percent < FIT_PERCENTAGES; percent++)
        a->space.states_bytes[i][percent] = (double)optimizer_bytes_from(
            &m->optimizer, optimizer_offload_begin(&m->optimizer, percent == given ? fraction : percent / 100.0));
    a->space.update_s[i] = fit_update_device_s(m, a->rates);
    gpt_destroy(m);
}
// Sets all estimates of a->space, and of each format. The formats must be listed.
static void fit_set_estimates(struct fit_auto *a) {
    const struct config *c = a->f->config;
    const struct fit_rates *r = a->rates;
    struct fit_space *s = &a->space;
    fit_set_layers(a);
    struct gpt *m = gpt_record(c, policy_keep_all(c->model.num_layers), a->f->backend, a->f->dev);
    const struct shards *shards = &m->zero.shards;
    const double weights = (double)shards_elements(shards, shards_parameters(shards)),
                 frozen = (double)shards_elements(&m->frozen.shards, shards_parameters(shards));
    s->head_s = fit_group_cost(m, PHASES_HEAD, -1, fit_prices(r)) * c->training.micro_batch_size * c->model.seq_length /
                r->flops;
    s->backward_s = fit_larger((fit_predict(m, r).compute_s - s->head_s) / c->model.num_layers - s->forward_s, 0);
    s->weights_bytes = (weights + frozen) * sizeof(floatX);
    s->updated_bytes = weights * sizeof(floatX);
    s->outside = fit_share_outside_layers(&m->table);
    s->tied = m->shape.tied;
    s->micro_steps = m->steps.most;
    s->bus = fit_bus_of(m, r);
    gpt_destroy(m);
    for (int i = 0; i < a->known_formats; i++)
        fit_set_format_estimates(a, i);
}

// ---- words ----

static void fit_add_text(char *out, size_t n, const char *separator, const char *text) {
    text_add(out, n, "%s%s", *out ? separator : "", text);
}
// Writes a choice to out (n bytes): "recomputes nothing; activations of 12 layers, gradients in host memory; ...".
static void fit_choice_text(const struct fit_auto *a, const struct fit_choice *choice, char *out, size_t n) {
    char away[128] = "", part[320], list[256];
    const struct fit_formats *formats = &a->formats[choice->formats];
    struct recompute_policy policy = fit_auto_policy(a, choice->recompute);
    out[0] = 0;
    policy_write_layer_modules(list, sizeof list, &policy, &a->f->shape);
    policy_free(&policy);
    snprintf(part, sizeof part, "recomputes %s", *list ? list : "nothing");
    fit_add_text(out, n, "", part);
    snprintf(part, sizeof part, "activations of %d layer%s", choice->layers, choice->layers == 1 ? "" : "s");
    if (choice->layers > 0)
        fit_add_text(away, sizeof away, ", ", part);
    snprintf(part, sizeof part, "%d %% of the optimizer states", choice->percent);
    if (choice->percent > 0)
        fit_add_text(away, sizeof away, ", ", part);
    if (choice->gradients)
        fit_add_text(away, sizeof away, ", ", "gradients");
    if (choice->weights)
        fit_add_text(away, sizeof away, ", ", "weights");
    snprintf(part, sizeof part, "%s in host memory", *away ? away : "nothing");
    fit_add_text(out, n, "; ", part);
    if (choice->formats == 0)
        return;
    char m[OPTION_NAME], v[OPTION_NAME], grads[OPTION_NAME];
    snprintf(part, sizeof part, "moments in %s and %s, gradients in %s%s",
             option_choice_name(CHOICES(MOMENT_DTYPES), (int)formats->m, m),
             option_choice_name(CHOICES(MOMENT_DTYPES), (int)formats->v, v),
             option_choice_name(CHOICES(MAIN_DTYPES), (int)formats->grads, grads),
             formats->params == MAIN_BF16 ? ", no master weights" : "");
    fit_add_text(out, n, "; ", part);
}
static void fit_outcome_text(const struct fit_auto *a, const struct fit_choice *choice,
                             const struct fit_outcome *outcome, char *out, size_t n) {
    char text[320], ms[LOG_NUMBER], device[LOG_NUMBER], host[LOG_NUMBER];
    fit_choice_text(a, choice, text, sizeof text);
    snprintf(out, n, "%s ms a step, %s of the device, %s of the host: %s", log_digits(ms, 1e3 * outcome->seconds),
             log_bytes(device, (int64_t)outcome->device), log_bytes(host, (int64_t)outcome->host), text);
}

// Writes to out (n bytes) that --optimizer-cpu-offload, which the user gave, takes more of the device's memory than it
// frees, or "". It may, where states are smaller than an update's pieces. without, with: the device's bytes.
static void fit_forced_text(const struct fit_auto *a, double without, double with, char *out, size_t n) {
    const struct config *c = a->f->config;
    char less[LOG_NUMBER], more[LOG_NUMBER];
    out[0] = 0;
    if (config_given(c, states.optimizer_cpu_offload) && c->states.optimizer_cpu_offload && without < with)
        snprintf(out, n,
                 "--optimizer-cpu-offload takes more of the device's memory than it frees: without it %s, with it %s",
                 log_bytes(less, (int64_t)without), log_bytes(more, (int64_t)with));
}
// Writes to out (n bytes) fit_forced_text's text: found's best choice against the same choice without offloaded states.
static void fit_forced_choice_text(struct fit_auto *a, const struct fit_found *found, char *out, size_t n) {
    struct fit_choice choice = found->best[0];
    choice.percent = 0;
    fit_forced_text(a, fit_plan_choice(a, &choice, true).device, found->outcome[0].device, out, n);
}

// ---- the choice ----

// Appends to out (n bytes) the least bytes of the device without the offload that the user gave, if they are fewer than
// `with`. After this, searches of a->space offload no optimizer states.
static void fit_add_forced_text(struct fit_auto *a, double with, char *out, size_t n) {
    char forced[256] = "";
    a->space.least.percent = a->space.most.percent = 0;
    const struct fit_found without = fit_search(&a->space, FIT_DEVICE, 0);
    if (without.count > 0)
        fit_forced_text(a, without.outcome[0].device, with, forced, sizeof forced);
    if (*forced)
        fit_add_text(out, n, "; ", forced);
}
// Writes to out (n bytes) that nothing fits, and which budgets would do: the device's least with the host's as it is,
// and the reverse; if neither does, the device's least with any of the host's. Changes a->space: no search may follow.
static void fit_no_choice_text(struct fit_auto *a, struct fit_limits limits, char *out, size_t n) {
    char have[LOG_NUMBER], more[LOG_NUMBER], need[LOG_NUMBER], with[LOG_NUMBER];
    const struct fit_found device = fit_search(&a->space, FIT_DEVICE, 0), host = fit_search(&a->space, FIT_HOST, 0);
    snprintf(out, n, "no choice of recomputation and offload fits %s of the device's memory%s%s",
             log_bytes(have, (int64_t)limits.device), limits.host == SIZE_MAX ? "" : " and, of the host's, ",
             limits.host == SIZE_MAX ? "" : log_bytes(more, (int64_t)limits.host));
    if (device.count > 0)
        text_add(out, n, "; the least is --memory-budget %.0f (%s, with %s of the host's)", device.outcome[0].device,
                 log_bytes(need, (int64_t)device.outcome[0].device), log_bytes(with, (int64_t)device.outcome[0].host));
    if (host.count > 0)
        text_add(out, n, "%s --host-memory-budget %.0f (%s)", device.count > 0 ? ", or" : "; the least is",
                 host.outcome[0].host, log_bytes(need, (int64_t)host.outcome[0].host));
    if (device.count == 0 && host.count == 0) {
        a->space.host = INFINITY;
        const struct fit_found any = fit_search(&a->space, FIT_DEVICE, 0);
        if (any.count > 0)
            text_add(out, n, "; the least is --memory-budget %.0f (%s) with --host-memory-budget %.0f (%s)",
                     any.outcome[0].device, log_bytes(need, (int64_t)any.outcome[0].device), any.outcome[0].host,
                     log_bytes(with, (int64_t)any.outcome[0].host));
    }
    if (device.count > 0 && a->space.least.percent > 0)
        fit_add_forced_text(a, device.outcome[0].device, out, n);
    fit_add_text(out, n, "; ",
                 a->f->config->states.allow_lossy_states
                     ? "else lower --micro-batch-size or --seq-length"
                     : "else lower --micro-batch-size or --seq-length, or give --allow-lossy-states");
}

// Sets a choice's options in *own, recomputation's too. The user's own --optimizer-offload-fraction stays.
static void fit_apply_all(const struct fit_auto *a, const struct fit_choice *choice, struct config *own) {
    char list[256];
    const struct fit_space *s = &a->space;
    struct recompute_policy policy = fit_auto_policy(a, choice->recompute);
    policy_write_layer_modules(list, sizeof list, &policy, &a->f->shape);
    policy_free(&policy);
    fit_apply(a, choice, own);
    own->recompute.recompute_granularity = !*list                                                ? RECOMPUTE_NONE
                                           : choice->recompute == (s->kinds - 1) * s->num_layers ? RECOMPUTE_FULL
                                                                                                 : RECOMPUTE_SELECTIVE;
    if (own->recompute.recompute_granularity != RECOMPUTE_SELECTIVE)
        return;
    own->recompute.recompute_layer_modules = text_copy(list); // lives as long as the options
}

// Lowers the limits and each rate to the lowest of any rank. parallel: not NULL. Every rank calls this.
static void fit_agree(struct fit_limits *limits, struct fit_rates *rates, struct parallel *parallel) {
    struct values {
        struct fit_limits limits;
        double flops, traffic, bus;
    } mine = {*limits, rates->flops, rates->traffic, rates->bus};
    const size_t ranks = (size_t)parallel->launch.ranks;
    struct values *all = (struct values *)calloc(ranks, sizeof *all);
    if (!all)
        fail("out of memory");
    control_all_gather(parallel->control, all, &mine, sizeof mine, "memory and rates of the ranks", true);
    for (size_t i = 0; i < ranks; i++) {
        const struct values *other = &all[i];
        limits->device = other->limits.device < limits->device ? other->limits.device : limits->device;
        limits->host = other->limits.host < limits->host ? other->limits.host : limits->host;
        limits->both = other->limits.both < limits->both ? other->limits.both : limits->both;
        rates->flops = other->flops < rates->flops ? other->flops : rates->flops;
        rates->traffic = other->traffic < rates->traffic ? other->traffic : rates->traffic;
        rates->bus = other->bus < rates->bus ? other->bus : rates->bus;
    }
    free(all);
}

// Opens a search over the plans of `f`, which fit_auto_close frees. f and rates must outlive the search.
static struct fit_auto *fit_auto_open(const struct fit *f, const struct fit_rates *rates, struct fit_limits limits) {
    struct fit_auto *a = (struct fit_auto *)calloc(1, sizeof *a);
    if (!a)
        fail("out of memory");
    a->f = f;
    a->rates = rates;
    a->space.plan = fit_plan_choice;
    a->space.context = a;
    a->space.device = (double)limits.device;
    a->space.host = limits.host == SIZE_MAX ? INFINITY : (double)limits.host;
    a->space.both = limits.both == SIZE_MAX ? INFINITY : (double)limits.both;
    fit_list_formats(a);
    fit_set_estimates(a);
    fit_set_ranges(a);
    return a;
}
static void fit_auto_close(struct fit_auto *a) { free(a); }

static struct fit_chosen fit_choose(const struct fit *f, struct config *own, struct fit_limits limits,
                                    struct fit_rates *rates, struct parallel *parallel) {
    struct fit_chosen chosen;
    struct {
        struct fit_choice choice;
        char problem[1024];
    } decision;
    memset(&chosen, 0, sizeof chosen);
    memset(&decision, 0, sizeof decision);
    const double begin = seconds_now();
    if (parallel)
        fit_agree(&limits, rates, parallel);
    struct fit_auto *a = fit_auto_open(f, rates, limits);
    if (own->rank == 0) {
        const struct fit_found found = fit_search(&a->space, FIT_SECONDS, a->known_formats);
        chosen.count = found.count;
        chosen.plans = found.plans;
        for (int i = 0; i < found.count; i++)
            fit_outcome_text(a, &found.best[i], &found.outcome[i], chosen.best[i], sizeof chosen.best[i]);
        if (found.count > 0)
            fit_forced_choice_text(a, &found, chosen.forced, sizeof chosen.forced);
        if (found.gain.formats > 0)
            fit_outcome_text(a, &found.gain, &found.gain_estimate, chosen.gain, sizeof chosen.gain);
        if (found.count > 0)
            decision.choice = found.best[0];
        else
            fit_no_choice_text(a, limits, decision.problem, sizeof decision.problem);
    }
    if (parallel)
        control_broadcast(parallel->control, &decision, sizeof decision, "the choice of recomputation and offload",
                          true);
    if (*decision.problem)
        fail("%s", decision.problem);
    fit_apply_all(a, &decision.choice, own);
    fit_auto_close(a);
    chosen.search_s = seconds_now() - begin;
    return chosen;
}

static struct fit_alternative fit_alternative_of(const struct fit *f, struct fit_limits limits,
                                                 const struct fit_rates *rates) {
    struct fit_alternative alternative;
    memset(&alternative, 0, sizeof alternative);
    struct fit_auto *const a = fit_auto_open(f, rates, limits);
    const struct fit_found found = fit_search(&a->space, FIT_SECONDS, a->known_formats);
    if (found.count > 0) {
        alternative.fits = true;
        alternative.device = (size_t)found.outcome[0].device;
        alternative.host = (size_t)found.outcome[0].host;
        alternative.seconds = found.outcome[0].seconds;
        fit_choice_text(a, &found.best[0], alternative.text, sizeof alternative.text);
    }
    fit_auto_close(a);
    return alternative;
}
