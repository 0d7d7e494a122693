// Makes the recomputation policy that --recompute-* ask for, and checks whether a plan fits into the machine's memory;
// if it doesn't, says what would help. Models are planned here, never allocated. run/fit_auto.cuh chooses for auto.
#pragma once
#include "config/fit.h"               // config_resolve_checkpoint_async
#include "run/model.cuh"              // gpt_create, gpt_destroy: a planned model
#include "run/fit_time.cuh"           // fit_flops_per_byte
#include "recompute.cuh"              // policies
#include "runtime/machine/error.h"    // fail
#include "runtime/machine/text_add.h" // text_add
#include "runtime/text/log.h"         // log_bytes

struct fit {
    const struct config *config;
    enum attention_backend backend;
    struct device *dev;
    struct layer_shape shape;
};
// Returns what this file's functions plan by. *config and *dev must outlive it. Options may change, layers' shapes not.
static struct fit fit_of(const struct config *config, enum attention_backend backend, struct device *dev);

// Returns the policy that --recompute-* ask for, which policy_free frees; for auto, before fit_choose, one that
// recomputes nothing. Ends the program where options contradict each other.
static struct recompute_policy fit_policy(const struct fit *f);

struct fit_bytes {
    size_t device, host;
};
// The bytes that this process may use of each memory, and of both together; SIZE_MAX: any.
struct fit_limits {
    size_t device, host, both;
};
// Of so many bytes that are free, a choice by the engine leaves one, since the memory that is free varies.
enum { FIT_VARIES = 64 };
static bool fit_is_within(struct fit_bytes bytes, struct fit_limits limits);

// Plans the model under a policy, frees the policy, and returns the peak bytes.
static struct fit_bytes fit_peaks(const struct fit *f, struct recompute_policy policy);
// Returns the device's part of fit_peaks' bytes. Frees the policy.
static size_t fit_peak(const struct fit *f, struct recompute_policy policy) { return fit_peaks(f, policy).device; }

// Returns how many tokens a chunk of logits has with about the fewest chunks that keep the plan within the limits.
// Returns 0, for the planned ones, if no fewer fit, the user named the tokens, on a CPU, or if the device has no limit.
static int64_t fit_loss_chunk(const struct fit *f, struct fit_limits limits);

// Whether a GPU has memory to keep FP8 weights over a step's micro-steps. False if parameters are sharded or offloaded.
static bool fit_caches_fp8_weights(const struct fit *f, struct fit_limits limits);

// Prints a note on `out` for each option of recomputation or chunks that saves less memory than it seems to.
static void fit_note_weak_options(const struct fit *f, FILE *out);

// Ends the program if a plan's peaks, `need`, exceed the limits, and says what would help. Call it before gpt_allocate.
static void fit_check(const struct fit *f, struct fit_bytes need, struct fit_limits limits);

// ---------------------------------------------------------------------------------------------------------------------

static struct fit fit_of(const struct config *config, enum attention_backend backend, struct device *dev) {
    struct fit f;
    f.config = config;
    f.backend = backend;
    f.dev = dev;
    f.shape = model_shape_of(config, sizeof(floatX), attention_row(backend)->keeps_probabilities).layer;
    return f;
}

static struct fit_bytes fit_bytes_of(const struct plan *plan) {
    const struct fit_bytes bytes = {plan->peak_bytes, plan->host_peak_bytes};
    return bytes;
}
static struct fit_bytes fit_peaks(const struct fit *f, struct recompute_policy policy) {
    struct gpt *m = gpt_create(f->config, policy, f->backend, f->dev);
    const struct fit_bytes bytes = fit_bytes_of(&m->timeline.plan);
    gpt_destroy(m);
    return bytes;
}
static bool fit_is_within(struct fit_bytes bytes, struct fit_limits limits) {
    return bytes.device <= limits.device && bytes.host <= limits.host && bytes.device + bytes.host <= limits.both;
}

// Ends the program where options of recomputation contradict each other, lack others, or would be ignored.
static void fit_check_options(const struct config *c) {
    const enum recompute_granularity granularity = c->recompute.recompute_granularity;
    if (granularity != RECOMPUTE_FULL && (c->recompute.recompute_method != RECOMPUTE_METHOD_UNSET ||
                                          c->recompute.recompute_num_layers > 0 || *c->recompute.recompute_layers))
        fail("--recompute-method, --recompute-num-layers and --recompute-layers need --recompute-granularity full");
    if (granularity != RECOMPUTE_SELECTIVE && *c->recompute.recompute_modules)
        fail("--recompute-modules needs --recompute-granularity selective");
    if (granularity != RECOMPUTE_SELECTIVE && *c->recompute.recompute_layer_modules)
        fail("--recompute-layer-modules needs --recompute-granularity selective");
    if (*c->recompute.recompute_modules && *c->recompute.recompute_layer_modules)
        fail("--recompute-layer-modules names the modules itself: leave out --recompute-modules");
    if (*c->recompute.recompute_layers &&
        (c->recompute.recompute_method != RECOMPUTE_METHOD_UNSET || c->recompute.recompute_num_layers > 0))
        fail("--recompute-layers names the layers itself: leave out --recompute-method and --recompute-num-layers");
    if (c->recompute.recompute_method == RECOMPUTE_METHOD_BLOCK && c->recompute.recompute_num_layers == 0)
        fail("--recompute-method block needs --recompute-num-layers: how many of the first layers are recomputed");
    if (c->recompute.recompute_num_layers > c->model.num_layers)
        fail("--recompute-num-layers %d: the model has only %d layers", c->recompute.recompute_num_layers,
             c->model.num_layers);
}

// Returns --recompute-granularity full's policy, for policy_free. Ends the program where the list of layers is bad.
static struct recompute_policy fit_full(const struct config *c) {
    if (*c->recompute.recompute_layers)
        return policy_full_in_layers(c->model.num_layers, c->recompute.recompute_layers);
    switch (c->recompute.recompute_method) {
    case RECOMPUTE_METHOD_BLOCK:
        return policy_full_in_first_layers(c->model.num_layers, c->recompute.recompute_num_layers);
    case RECOMPUTE_METHOD_UNSET:
    case RECOMPUTE_METHOD_UNIFORM: break;
    }
    return policy_uniform(c->model.num_layers,
                          c->recompute.recompute_num_layers > 0 ? c->recompute.recompute_num_layers : 1);
}

// Returns the policy of --recompute-modules, for policy_free. "": of the modules that pay off with this backend.
static struct recompute_policy fit_selective(const struct fit *f, const char *modules) {
    struct recompute_policy policy =
        policy_selective(f->config->model.num_layers, recompute_modules_of(modules, f->shape.materialized), &f->shape);
    if (!*modules && f->shape.materialized)
        text_add(policy.description, sizeof policy.description, ", since unfused attention keeps T x T probabilities");
    return policy;
}

static struct recompute_policy fit_policy(const struct fit *f) {
    const struct config *c = f->config;
    fit_check_options(c);
    switch (c->recompute.recompute_granularity) {
    case RECOMPUTE_NONE:
    case RECOMPUTE_PARTIAL: // config_read makes it full
    case RECOMPUTE_AUTO: break;
    case RECOMPUTE_SELECTIVE:
        if (*c->recompute.recompute_layer_modules)
            return policy_read_layer_modules(c->model.num_layers, c->recompute.recompute_layer_modules, &f->shape);
        return fit_selective(f, c->recompute.recompute_modules);
    case RECOMPUTE_FULL: return fit_full(c);
    }
    return policy_keep_all(c->model.num_layers);
}

// Prints a note on `out` where --mlp-chunk-tokens does nothing in training, as every layer keeps its MLP's activations.
static void fit_note_weak_chunks(const struct fit *f, FILE *out) {
    const struct config *c = f->config;
    struct recompute_policy policy = fit_policy(f);
    int chunked = 0;
    for (int l = 0; l < c->model.num_layers; l++)
        chunked += (policy.kept[l] & (BIT(FC) | BIT(ACT))) == 0;
    policy_free(&policy);
    if (c->memory.mlp_chunk_tokens > 0 && config_trains(c) && chunked == 0)
        fprintf(out,
                "note: --mlp-chunk-tokens %d does nothing in training, since every layer keeps its MLP's activations; "
                "--recompute-granularity full or --recompute-modules mlp keeps none\n",
                c->memory.mlp_chunk_tokens);
}
static void fit_note_weak_options(const struct fit *f, FILE *out) {
    const struct config *c = f->config;
    const struct layer_shape shape = layer_shape_at(&f->shape, c->model.num_layers / 2), *s = &shape;
    if (c->recompute.recompute_granularity == RECOMPUTE_SELECTIVE && !f->shape.materialized &&
        recompute_modules_of(c->recompute.recompute_modules, false) & MODULE_CORE_ATTN) {
        const double saved = (double)activation_bytes(modules_dropped(MODULE_CORE_ATTN, s), s),
                     all = (double)activation_bytes(ACT_ALL, s);
        fprintf(
            out,
            "note: flash attention never stores the T x T matrix, so recomputing core_attn saves only its output and "
            "log-sum-exp, %.0f %% of a layer's activations, for one attention forward more a layer\n",
            100 * saved / all);
    }
    if (c->recompute.recompute_granularity == RECOMPUTE_FULL &&
        c->recompute.recompute_method == RECOMPUTE_METHOD_UNIFORM && c->recompute.recompute_num_layers > 1) {
        const size_t one = fit_peak(f, policy_uniform(c->model.num_layers, 1));
        const size_t grouped = fit_peak(f, policy_uniform(c->model.num_layers, c->recompute.recompute_num_layers));
        char a[LOG_NUMBER], b[LOG_NUMBER];
        if (grouped > one)
            fprintf(
                out,
                "note: groups of %d layers peak at %s, single layers at %s: a whole group's activations exist at once; "
                "--recompute-num-layers 1 takes less at the same cost\n",
                c->recompute.recompute_num_layers, log_bytes(a, (int64_t)grouped), log_bytes(b, (int64_t)one));
    }
    fit_note_weak_chunks(f, out);
}

static int64_t fit_loss_chunk(const struct fit *f, struct fit_limits limits) {
    struct config changed = *f->config;
    const struct fit g = {&changed, f->backend, f->dev, f->shape};
    const int64_t N = (int64_t)changed.training.micro_batch_size * changed.model.seq_length;
    const int64_t planned = loss_chunk(&changed, model_shape_of(&changed, sizeof(floatX), false).Vp, f->dev);
    if (!device_is_gpu(f->dev) || changed.memory.loss_chunk_tokens > 0 || limits.device == SIZE_MAX)
        return 0;
    for (int64_t chunks = 1; chunks < (N + planned - 1) / planned; chunks += (chunks + 2) / 3) {
        changed.memory.loss_chunk_tokens = (int)(((N + chunks - 1) / chunks + 63) / 64 * 64);
        if (fit_is_within(fit_peaks(&g, fit_policy(&g)), limits))
            return changed.memory.loss_chunk_tokens;
    }
    return 0;
}

static bool fit_caches_fp8_weights(const struct fit *f, struct fit_limits limits) {
    struct config changed = *f->config;
    const struct fit g = {&changed, f->backend, f->dev, f->shape};
    if (!device_is_gpu(f->dev) || !config_trains(&changed) || changed.processes.zero_stage == 3 ||
        changed.states.offload_weights || limits.device == SIZE_MAX)
        return false;
    changed.fp8.fp8_weight_cache = FP8_CACHE_ALWAYS;
    return fit_is_within(fit_peaks(&g, fit_policy(&g)), limits);
}

// ---- what would help ----

struct fit_advice {
    const struct fit *f;
    struct fit_bytes need;
    struct fit_limits limits;
    char lines[3072];
};
// Returns what `bytes` takes of the exceeded memory: the device's, else the host's, else both together.
static size_t fit_exceeding(const struct fit_advice *a, struct fit_bytes bytes) {
    if (a->need.device > a->limits.device)
        return bytes.device;
    return a->need.host > a->limits.host ? bytes.host : bytes.device + bytes.host;
}
// Adds a line on an option if its peaks, `then`, save a thousandth of the exceeded memory. Returns whether `then` fits.
static bool fit_suggest(struct fit_advice *a, const char *option, struct fit_bytes then) {
    char saves[LOG_NUMBER], peak[LOG_NUMBER], host[LOG_NUMBER], beside[LOG_NUMBER + 32] = "";
    const size_t before = fit_exceeding(a, a->need), after = fit_exceeding(a, then);
    const bool fits = fit_is_within(then, a->limits);
    if (then.host > a->need.host && after != then.host)
        snprintf(beside, sizeof beside, " and %s of the host's", log_bytes(host, (int64_t)then.host));
    if (after < before - before / 1000)
        text_add(a->lines, sizeof a->lines, "\n  %-44s saves %10s: %10s%s%s", option,
                 log_bytes(saves, (int64_t)(before - after)), log_bytes(peak, (int64_t)after), beside,
                 fits ? ", which fits" : "");
    return fits;
}
// Plans with changed options and the policy that they ask for, and calls fit_suggest. Returns whether the plan fits.
static bool fit_suggest_options(struct fit_advice *a, const char *option, const struct config *changed) {
    struct fit g = fit_of(changed, a->f->backend, a->f->dev);
    return fit_suggest(a, option, fit_peaks(&g, fit_policy(&g)));
}

// Suggests the usual policies of recomputation, if the run trains, and flash attention in the place of unfused.
static void fit_suggest_policies(struct fit_advice *a) {
    const struct fit *f = a->f;
    const int L = f->config->model.num_layers;
    if (config_trains(f->config)) {
        fit_suggest(a, "--recompute-granularity selective", fit_peaks(f, fit_selective(f, "")));
        fit_suggest(a, "--recompute-granularity full", fit_peaks(f, policy_uniform(L, 1)));
    }
    if (f->backend != ATTENTION_UNFUSED)
        return;
    struct fit g = *f;
    g.backend = ATTENTION_FLASH;
    g.shape.materialized = false;
    fit_suggest(a, "--attention-backend flash", fit_peaks(&g, fit_policy(&g)));
}

// Suggests offload and moments in bf16, as the run allows, or less offload where the device's memory is enough.
static void fit_suggest_offload(struct fit_advice *a) {
    const struct config *c = a->f->config;
    struct config changed = *c;
    const bool host = a->need.device <= a->limits.device;
    char option[64];
    changed.states.optimizer_cpu_offload = !host;
    changed.states.optimizer_offload_fraction = 1;
    config_resolve_checkpoint_async(&changed);
    if (config_trains(c))
        fit_suggest_options(a, host ? "--no-optimizer-cpu-offload" : "--optimizer-cpu-offload", &changed);
    changed = *c;
    changed.states.cpu_offloading_num_layers = host ? 0 : c->model.num_layers;
    snprintf(option, sizeof option, "--cpu-offloading-num-layers %d", changed.states.cpu_offloading_num_layers);
    if (config_trains(c))
        fit_suggest_options(a, option, &changed);
    changed = *c;
    changed.states.offload_gradients = !host;
    if (config_trains(c) && config_may_move_gradients(c))
        fit_suggest_options(a, host ? "--no-offload-gradients" : "--offload-gradients", &changed);
    changed = *c;
    changed.states.offload_weights = !host;
    if (config_may_move_weights(c))
        fit_suggest_options(a, host ? "--no-offload-weights" : "--offload-weights", &changed);
    changed = *c;
    changed.states.exp_avg_dtype = changed.states.exp_avg_sq_dtype = MOMENT_BF16;
    if (config_trains(c))
        fit_suggest_options(a, "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", &changed);
}

// Suggests the higher stages of ZeRO, up to the first that fits, where there are several ranks.
static void fit_suggest_stages(struct fit_advice *a) {
    struct config changed = *a->f->config;
    char option[64];
    for (int stage = changed.processes.zero_stage + 1; stage <= 3 && changed.ranks > 1; stage++) {
        changed.processes.zero_stage = stage;
        snprintf(option, sizeof option, "--zero-stage %d", stage);
        if (fit_suggest_options(a, option, &changed))
            break;
    }
}

// Suggests halved micro-batches to the first that fits, a batch of 1 fully recomputed, chunks, and half the sequence.
static void fit_suggest_sizes(struct fit_advice *a) {
    const struct config *c = a->f->config;
    struct config changed = *c;
    char option[64];
    for (int B = c->training.micro_batch_size / 2; B >= 1; B /= 2) {
        changed.training.micro_batch_size = B;
        snprintf(option, sizeof option, "--micro-batch-size %d", B);
        if (fit_suggest_options(a, option, &changed))
            break;
    }
    changed = *c;
    changed.training.micro_batch_size = 1;
    const struct fit g = fit_of(&changed, a->f->backend, a->f->dev);
    if (config_trains(c))
        fit_suggest(a, "--micro-batch-size 1 with full recomputation",
                    fit_peaks(&g, policy_uniform(c->model.num_layers, 1)));
    changed = *c;
    changed.memory.mlp_chunk_tokens = (int)mlp_chunk_default(
        &a->f->shape, (int64_t)c->training.micro_batch_size * c->model.seq_length, fit_flops_per_byte(a->f->dev));
    snprintf(option, sizeof option, "--mlp-chunk-tokens %d", changed.memory.mlp_chunk_tokens);
    if (c->memory.mlp_chunk_tokens == 0 && changed.memory.mlp_chunk_tokens > 0 && c->fp8.fp8_format == FP8_FORMAT_NONE)
        fit_suggest_options(a, option, &changed);
    changed = *c;
    changed.memory.loss_chunk_tokens = 256;
    fit_suggest_options(a, "--loss-chunk-tokens 256", &changed);
    changed = *c;
    changed.model.seq_length /= 2;
    snprintf(option, sizeof option, "--seq-length %d", changed.model.seq_length);
    if (c->model.seq_length > 256)
        fit_suggest_options(a, option, &changed);
}

static void fit_check(const struct fit *f, struct fit_bytes need, struct fit_limits limits) {
    if (fit_is_within(need, limits))
        return;
    struct fit_advice a;
    char device[LOG_NUMBER], host[LOG_NUMBER], may[LOG_NUMBER], both[4 * LOG_NUMBER + 128];
    memset(&a, 0, sizeof a);
    a.f = f;
    a.need = need;
    a.limits = limits;
    fit_suggest_policies(&a);
    fit_suggest_offload(&a);
    fit_suggest_stages(&a);
    fit_suggest_sizes(&a);
    log_bytes(device, (int64_t)need.device);
    log_bytes(host, (int64_t)need.host);
    if (need.device > limits.device)
        snprintf(both, sizeof both, "%s, and this process may use %s", device, log_bytes(may, (int64_t)limits.device));
    else if (need.host > limits.host)
        snprintf(both, sizeof both, "%s of the host's memory, and this process may use %s of it", host,
                 log_bytes(may, (int64_t)limits.host));
    else
        snprintf(both, sizeof both, "%s and, for what is offloaded, %s of the same memory, and this process may use %s",
                 device, host, log_bytes(may, (int64_t)limits.both));
    fail("the plan needs %s. What would help:%s%s", both, *a.lines ? a.lines : "\n  a smaller model",
         config_trains(f->config) ? "\n  --recompute-granularity auto searches all of recomputation and offload" : "");
}
