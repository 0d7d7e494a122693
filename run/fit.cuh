// A recomputation policy whose plan fits: the policy of --recompute-*, the cheapest one within --memory-budget, and
// what to change when a plan exceeds the machine. Models are planned here, never allocated.
#pragma once
#include "config.h"                // struct config
#include "run/model.cuh"           // gpt_create, gpt_destroy: a planned model
#include "recompute.cuh"           // policies
#include "runtime/machine/error.h" // fail
#include "runtime/text/log.h"      // log_bytes

// The inputs of the search and the advice.
struct fit {
    const struct config *config;
    enum attention_backend backend;
    struct device *dev;
    struct layer_shape shape;
};
static struct fit fit_of(const struct config *config, enum attention_backend backend, struct device *dev);

// The policy that --recompute-* ask for. Options that contradict each other, and a --memory-budget that no policy
// meets, end the program.
static struct recompute_policy fit_policy(const struct fit *f);

// Peak bytes of the whole plan under a policy, which is freed.
static size_t fit_peak(const struct fit *f, struct recompute_policy policy);

// Prints a note on `out` where the policy that was asked for does less than it seems to.
static void fit_advise(const struct fit *f, FILE *out);

// Ends the program, before the model's memory is allocated, where a plan of `peak` bytes exceeds `limit`; the message
// lists the options that would help, each with the peak it leads to.
static void fit_check(const struct fit *f, size_t peak, size_t limit);

// ---------------------------------------------------------------------------------------------------------------------

static struct fit fit_of(const struct config *config, enum attention_backend backend, struct device *dev) {
    struct fit f;
    f.config = config;
    f.backend = backend;
    f.dev = dev;
    f.shape = model_shape_of(config, sizeof(floatX), backend == ATTENTION_UNFUSED).layer;
    return f;
}

static size_t fit_peak(const struct fit *f, struct recompute_policy policy) {
    struct gpt *m = gpt_create(f->config, policy, f->backend, f->dev);
    const size_t peak = m->timeline.plan.peak_bytes;
    gpt_destroy(m);
    return peak;
}

// The matmul flops that take as long as one byte of memory traffic: what the cost of ops without matmuls is weighted
// by. On the cpu target, the ratio of the two rates measured on two cores (fp32: 330 GFLOP/s to 30 GB/s; bf16 with AMX:
// 1800 to 30); on the cuda target, of an H200 (bf16: 790 TFLOP/s to 4.3 TB/s; fp32: 67 TFLOP/s by the data sheet).
#ifdef TARGET_CUDA
static const double FLOPS_PER_BYTE = sizeof(floatX) == 2 ? 184 : 16;
#else
static const double FLOPS_PER_BYTE = sizeof(floatX) == 2 ? 60 : 11;
#endif

// Time of the policy's recomputation over that of a step without any, which counts as three forwards: backward as two.
static double fit_overhead(const struct fit *f, const struct recompute_policy *policy) {
    const struct config *c = f->config;
    const double layers = c->num_layers * activation_cost(ACT_ALL, &f->shape, FLOPS_PER_BYTE);
    const double head = 2.0 * c->hidden_size * c->vocab_size;
    return policy_cost(policy, &f->shape, FLOPS_PER_BYTE) / (3 * (layers + head));
}

// Candidate i = k L + n of the budget search: the first n layers keep frontier[k + 1], the others frontier[k]. Memory
// falls and cost rises with i.
static struct recompute_policy fit_candidate(const struct fit *f, const uint32_t *frontier, int i) {
    const int L = f->config->num_layers, k = i / L, n = i % L;
    return n == 0 ? policy_mixed(L, frontier[k], frontier[k], L) : policy_mixed(L, frontier[k + 1], frontier[k], n);
}

// Writes the description of a policy of at most two kinds of layers, the first ones and the others.
static void fit_describe(struct recompute_policy *policy, const struct layer_shape *s, size_t peak, double overhead) {
    char dropped[2][sizeof(MODULE_LIST)], bytes[LOG_NUMBER];
    int first = 0;
    const int L = policy->num_layers;
    while (first < L && policy->kept[first] == policy->kept[0])
        first++;
    for (int i = 0; i < 2; i++) {
        const uint32_t kept = policy->kept[i ? L - 1 : 0];
        if (kept == BIT(OUT)) {
            snprintf(dropped[i], sizeof dropped[i], "full");
            continue;
        }
        uint32_t modules = 0;
        for (int j = 0; j < NUM_MODULES; j++)
            if ((modules_dropped(1u << j, s) & kept) == 0)
                modules |= 1u << j;
        if (modules)
            modules_text(dropped[i], sizeof dropped[i], modules);
        else
            snprintf(dropped[i], sizeof dropped[i], "none");
    }
    log_bytes(bytes, (int64_t)peak);
    if (first == L)
        snprintf(policy->description, sizeof policy->description,
                 "auto: %s in all layers; predicted peak %s, step +%.1f %%", dropped[0], bytes, 100 * overhead);
    else
        snprintf(policy->description, sizeof policy->description,
                 "auto: %s in layers 0-%d, %s in the others; predicted peak %s, step +%.1f %%", dropped[0], first - 1,
                 dropped[1], bytes, 100 * overhead);
}

// The cheapest policy whose plan fits the budget, in bytes. Where none does, ends the program and says what the
// smallest plan takes.
static struct recompute_policy fit_budget(const struct fit *f, int64_t budget) {
    uint32_t frontier[FRONTIER_MOST];
    const int L = f->config->num_layers;
    const struct layer_shape layer = layer_shape_at(&f->shape, L / 2); // what most layers are
    const int kinds = recompute_frontier(frontier, &layer, FLOPS_PER_BYTE);
    int low = 0, high = (kinds - 1) * L; // every candidate below `low` is too large
    size_t peak = fit_peak(f, fit_candidate(f, frontier, high));
    if (peak > (size_t)budget) {
        char need[LOG_NUMBER], have[LOG_NUMBER];
        fail("--memory-budget %s: even with full recomputation the step takes %s; lower --micro-batch-size or "
             "--seq-length, or raise the budget",
             log_bytes(have, budget), log_bytes(need, (int64_t)peak));
    }
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (fit_peak(f, fit_candidate(f, frontier, middle)) <= (size_t)budget)
            high = middle;
        else
            low = middle + 1;
    }
    peak = fit_peak(f, fit_candidate(f, frontier, high));
    struct recompute_policy policy = fit_candidate(f, frontier, high);
    fit_describe(&policy, &f->shape, peak, fit_overhead(f, &policy));
    return policy;
}

// Ends the program where an option of one granularity is given under another, instead of ignoring it.
static void fit_check_options(const struct config *c) {
    const enum recompute_granularity granularity = c->recompute_granularity;
    if (granularity != RECOMPUTE_FULL &&
        (c->recompute_method != RECOMPUTE_METHOD_UNSET || c->recompute_num_layers > 0 || *c->recompute_layers))
        fail("--recompute-method, --recompute-num-layers and --recompute-layers need --recompute-granularity full");
    if (granularity != RECOMPUTE_SELECTIVE && *c->recompute_modules)
        fail("--recompute-modules needs --recompute-granularity selective");
    if (granularity != RECOMPUTE_AUTO && c->memory_budget > 0)
        fail("--memory-budget needs --recompute-granularity auto");
    if (granularity == RECOMPUTE_AUTO && c->memory_budget == 0)
        fail("--recompute-granularity auto needs --memory-budget, as 6GiB");
    if (*c->recompute_layers && (c->recompute_method != RECOMPUTE_METHOD_UNSET || c->recompute_num_layers > 0))
        fail("--recompute-layers names the layers itself: leave out --recompute-method and --recompute-num-layers");
    if (c->recompute_method == RECOMPUTE_METHOD_BLOCK && c->recompute_num_layers == 0)
        fail("--recompute-method block needs --recompute-num-layers: how many of the first layers are recomputed");
    if (c->recompute_num_layers > c->num_layers)
        fail("--recompute-num-layers %d: the model has only %d layers", c->recompute_num_layers, c->num_layers);
}

static struct recompute_policy fit_full(const struct config *c) {
    if (*c->recompute_layers)
        return policy_of_layers(c->num_layers, c->recompute_layers);
    switch (c->recompute_method) {
    case RECOMPUTE_METHOD_BLOCK: return policy_block(c->num_layers, c->recompute_num_layers);
    case RECOMPUTE_METHOD_UNSET:
    case RECOMPUTE_METHOD_UNIFORM: break;
    }
    return policy_uniform(c->num_layers, c->recompute_num_layers > 0 ? c->recompute_num_layers : 1);
}

static struct recompute_policy fit_policy(const struct fit *f) {
    const struct config *c = f->config;
    fit_check_options(c);
    switch (c->recompute_granularity) {
    case RECOMPUTE_NONE: break;
    case RECOMPUTE_SELECTIVE:
        return policy_selective(c->num_layers, recompute_modules_of(c->recompute_modules), &f->shape);
    case RECOMPUTE_FULL: return fit_full(c);
    case RECOMPUTE_AUTO: return fit_budget(f, c->memory_budget);
    }
    return policy_none(c->num_layers);
}

static void fit_advise(const struct fit *f, FILE *out) {
    const struct config *c = f->config;
    const struct layer_shape shape = layer_shape_at(&f->shape, c->num_layers / 2), *s = &shape;
    if (c->recompute_granularity == RECOMPUTE_SELECTIVE && f->backend != ATTENTION_UNFUSED &&
        recompute_modules_of(c->recompute_modules) & MODULE_CORE_ATTN) {
        const double saved = (double)activation_bytes(BIT(ATT) | BIT(SOFTMAX), s),
                     all = (double)activation_bytes(ACT_ALL, s);
        fprintf(
            out,
            "note: flash attention never stores the T x T matrix, so recomputing core_attn saves only its output and "
            "log-sum-exp, %.0f %% of a layer's activations, for one attention forward more a layer\n",
            100 * saved / all);
    }
    if (c->recompute_granularity == RECOMPUTE_FULL && c->recompute_method == RECOMPUTE_METHOD_UNIFORM &&
        c->recompute_num_layers > 1) {
        const size_t one = fit_peak(f, policy_uniform(c->num_layers, 1));
        const size_t grouped = fit_peak(f, policy_uniform(c->num_layers, c->recompute_num_layers));
        char a[LOG_NUMBER], b[LOG_NUMBER];
        if (grouped > one)
            fprintf(
                out,
                "note: groups of %d layers peak at %s, single layers at %s: a whole group's activations exist at once; "
                "--recompute-num-layers 1 takes less at the same cost\n",
                c->recompute_num_layers, log_bytes(a, (int64_t)grouped), log_bytes(b, (int64_t)one));
    }
}

// Adds a line to `out`, of n bytes, for an option that makes the plan smaller: the peak without and with it.
static void fit_suggest(char *out, size_t n, const char *option, size_t now, size_t then, size_t limit) {
    char saves[LOG_NUMBER], peak[LOG_NUMBER];
    const size_t used = strlen(out);
    if (then < now)
        snprintf(out + used, n - used, "\n  %-44s saves %10s: %10s%s", option, log_bytes(saves, (int64_t)(now - then)),
                 log_bytes(peak, (int64_t)then), then <= limit ? ", which fits" : "");
}

static void fit_check(const struct fit *f, size_t peak, size_t limit) {
    if (peak <= limit)
        return;
    char options[2048] = "", option[64], need[LOG_NUMBER], have[LOG_NUMBER];
    const int L = f->config->num_layers;
    fit_suggest(options, sizeof options, "--recompute-granularity selective", peak,
                fit_peak(f, policy_selective(L, recompute_modules_of(""), &f->shape)), limit);
    fit_suggest(options, sizeof options, "--recompute-granularity full", peak, fit_peak(f, policy_uniform(L, 1)),
                limit);
    struct config changed = *f->config;
    struct fit g = *f;
    g.config = &changed;
    if (f->backend == ATTENTION_UNFUSED) {
        g.backend = ATTENTION_FLASH;
        g.shape.materialised = false;
        fit_suggest(options, sizeof options, "--attention-backend flash", peak, fit_peak(&g, fit_policy(&g)), limit);
        g = *f;
        g.config = &changed;
    }
    for (int stage = changed.zero_stage + 1; stage <= 3 && changed.ranks > 1; stage++) {
        changed.zero_stage = stage;
        snprintf(option, sizeof option, "--zero-stage %d", stage);
        const size_t then = fit_peak(&g, fit_policy(&g));
        fit_suggest(options, sizeof options, option, peak, then, limit);
        if (then <= limit)
            break;
    }
    changed = *f->config;
    for (int B = changed.micro_batch_size / 2; B >= 1; B /= 2) {
        changed.micro_batch_size = B;
        snprintf(option, sizeof option, "--micro-batch-size %d", B);
        const size_t then = fit_peak(&g, fit_policy(&g));
        fit_suggest(options, sizeof options, option, peak, then, limit);
        if (then <= limit)
            break;
    }
    changed = *f->config;
    changed.micro_batch_size = 1;
    snprintf(option, sizeof option, "--micro-batch-size 1 with full recomputation");
    fit_suggest(options, sizeof options, option, peak, fit_peak(&g, policy_uniform(L, 1)), limit);
    changed = *f->config;
    changed.loss_chunk_tokens = 256;
    fit_suggest(options, sizeof options, "--loss-chunk-tokens 256", peak, fit_peak(&g, fit_policy(&g)), limit);
    changed = *f->config;
    if (changed.seq_length > 256) {
        changed.seq_length /= 2;
        g.shape.T = changed.seq_length;
        snprintf(option, sizeof option, "--seq-length %d", changed.seq_length);
        fit_suggest(options, sizeof options, option, peak, fit_peak(&g, fit_policy(&g)), limit);
    }
    fail("the plan needs %s, and this process may use %s. What would help:%s", log_bytes(need, (int64_t)peak),
         log_bytes(have, (int64_t)limit), *options ? options : "\n  a smaller model");
}
