// Which activations a layer keeps for its backward, and which are recomputed: one table, and the policies over it.
// Recomputation calls block_forward again with the activations to produce, so recomputed values have the same bits.
#pragma once
#include "runtime/machine/error.h"    // fail
#include "runtime/machine/text_add.h" // text_add
#include <math.h>                     // fabs
#include <stdbool.h>                  // bool
#include <stdint.h>                   // int64_t, uint32_t
#include <stdio.h>                    // snprintf
#include <stdlib.h>                   // calloc, free, strtol, qsort
#include <string.h>                   // strcmp, strlen

// The forms in which a layer keeps inputs of its linear layers, if no other op of its backward reads them. FP8 is kept
// transposed, as the weight's gradient needs it. KEPT_FP8_ATTENTION: attention's inputs and output are FP8, too.
enum kept_input { KEPT_FLOATX, KEPT_FP8, KEPT_FP8_BLOCKS, KEPT_FP8_ATTENTION };

// The shape of a layer, on which the sizes in the table depend.
struct layer_shape {
    int C, H, G, D, F;           // hidden size, query heads, key/value heads (query groups), head dim, FFN width
    int T;                       // sequence length
    int x;                       // bytes of floatX
    bool gated;                  // the MLP's activation multiplies a second projection, up, by the activated one
    const char *activation_name; // the MLP activation's name
    int norm_statistics; // floats per token that a norm's backward reads: 1 / deviation and, for LayerNorm, the mean
    bool materialized;   // unfused attention: the T x T probabilities are kept, else one log-sum-exp per row
    bool norm_before, norm_after; // a branch has a norm of its input, of its output
    bool parallel;                // attention and MLP read the same residual stream
    int qk_statistics;            // floats per token that the backward of q's and k's norm reads; 0: they have none
    double keys;                  // that a query sees, on average over queries and layers
    enum kept_input kept_input;   // the layer's form; in a model's shape KEPT_FLOATX, as in its evaluation
    enum kept_input fp8_input;    // the form in training of the model's layers [fp8_first, fp8_end)
    int fp8_first, fp8_end;
};
// Returns layer l's shape in training: the model's, with kept_input set to fp8_input in an FP8 layer, else KEPT_FLOATX.
static inline struct layer_shape layer_shape_at(const struct layer_shape *model, int l) {
    struct layer_shape s = *model;
    s.kept_input = l >= s.fp8_first && l < s.fp8_end ? s.fp8_input : KEPT_FLOATX;
    return s;
}
// The elements of an activation. INPUT: a linear layer's input that no other op of the backward reads. ATTENTION: what
// attention reads or makes. These are floatX or FP8 (enum kept_input). SAVED: what attention keeps for its backward.
enum elements { ELEMENTS_FLOATX, ELEMENTS_FP32, ELEMENTS_INPUT, ELEMENTS_ATTENTION, ELEMENTS_SAVED };
// Returns the bytes per token of a kept input of `width` elements. FP8 in blocks adds a 4-byte scale per 128 elements.
static inline int64_t input_bytes(const struct layer_shape *s, int64_t width) {
    switch (s->kept_input) {
    case KEPT_FLOATX: return width * s->x;
    case KEPT_FP8:
    case KEPT_FP8_ATTENTION: return width;
    case KEPT_FP8_BLOCKS: return width + width / 32;
    }
    return 0;
}
// Returns the bytes per token of an activation of `width` elements a token.
static inline int64_t elements_bytes(const struct layer_shape *s, enum elements elements, int64_t width) {
    switch (elements) {
    case ELEMENTS_FLOATX: return width * s->x;
    case ELEMENTS_FP32: return width * 4;
    case ELEMENTS_INPUT: return input_bytes(s, width);
    case ELEMENTS_ATTENTION: return s->kept_input == KEPT_FP8_ATTENTION ? width : width * s->x;
    case ELEMENTS_SAVED: return width * (s->materialized ? s->x : 4);
    }
    return 0;
}
static inline int qkv_width(const struct layer_shape *s) { return (s->H + 2 * s->G) * s->D; }
// The number of columns of the MLP's first product. With a gated activation: the gate's, then the up projection's.
static inline int fc_width(const struct layer_shape *s) { return (s->gated ? 2 : 1) * s->F; }

// The modules of --recompute-modules. Columns: id; name. A row of the activations below names the modules that drop the
// activation. FIRST stands for ROW in the first row, for lists with separators.
#define MODULE_ROWS(FIRST, ROW)                                                                                        \
    FIRST(CORE_ATTN, "core_attn")                                                                                      \
    ROW(NORM, "norm")                                                                                                  \
    ROW(ACTIVATION, "activation")                                                                                      \
    ROW(MLP, "mlp")                                                                                                    \
    ROW(QKV, "qkv")
// The modules that --recompute-granularity selective recomputes if none are named. With unfused attention, which makes
// T x T probabilities, it is attention's core, as in Korthikanti et al. (2022, arXiv 2205.05198, section 5).
#define RECOMPUTE_MODULES_DEFAULT "norm,activation"
#define RECOMPUTE_MODULES_UNFUSED "core_attn"

enum module_index {
#define INDEX_ROW(id, name) MODULE_INDEX_##id,
    MODULE_ROWS(INDEX_ROW, INDEX_ROW)
#undef INDEX_ROW
        NUM_MODULES
};
enum module {
#define BIT_ROW(id, name) MODULE_##id = 1 << MODULE_INDEX_##id,
    MODULE_ROWS(BIT_ROW, BIT_ROW)
#undef BIT_ROW
};
#define MODULE_NAME(id, name) name
#define MODULE_NEXT_NAME(id, name) "," name
#define MODULE_LIST MODULE_ROWS(MODULE_NAME, MODULE_NEXT_NAME) // "core_attn,norm,..."
static const char *const module_names[NUM_MODULES] = {
#define NAME_ROW(id, name) name,
    MODULE_ROWS(NAME_ROW, NAME_ROW)
#undef NAME_ROW
};

// One row per activation. Columns: id; name; category in the reports; modules that drop it; what its elements are and
// their number per token; flops of matmuls and attention, then bytes of memory traffic, per token to recompute it; the
// activations that it is computed from. `s` is the struct layer_shape. ACT_INPUT is the layer's input: the OUT of the
// layer before, not stored twice. The MLP's last product belongs to OUT, which no backward of its own layer reads: full
// recomputation skips it. One op makes SOFTMAX and ATT if either is needed; its cost is in ATT's row. An activation
// that a shape does not have has 0 elements, as MID with parallel residuals, where only the next op reads the sum.
// ROWS_OF is what a recomputed product is made from: its input `id`, where that is kept in floatX. FP8 keeps only the
// input's column form, and the product reads the row form: then the input is made again, from its `source`.
#define ROWS_OF(id, source) (s->kept_input == KEPT_FLOATX ? BIT(id) : (source))
// UNNORMED is for QKV. Attention reads QKV, but where q and k are normed QKN; then the norm's backward reads QKV.
#define ELEMENTS_UNNORMED (s->qk_statistics ? ELEMENTS_FLOATX : ELEMENTS_ATTENTION)
#define PROJECTION_INPUT BIT(ATT) // what the attention projection reads
#define ACTIVATION_ROWS(ROW)                                                                                           \
    ROW(NORM1, "norm 1", "norm", MODULE_NORM, INPUT, s->C * s->norm_before, 0, 2 * s->C * s->x, ACT_INPUT)             \
    ROW(NORM1_STATS, "norm 1 statistics", "norm", 0, FP32, s->norm_before * s->norm_statistics, 0, s->C * s->x,        \
        ACT_INPUT)                                                                                                     \
    ROW(QKV, "qkv", "qkv", MODULE_QKV, UNNORMED, qkv_width(s), 2.0 * s->C * qkv_width(s), 2 * qkv_width(s) * s->x,     \
        s->norm_before ? ROWS_OF(NORM1, ACT_INPUT) : ACT_INPUT)                                                        \
    ROW(QKN, "qkv with q and k normed", "norm", MODULE_NORM, ATTENTION, s->qk_statistics ? qkv_width(s) : 0, 0,        \
        2 * qkv_width(s) * s->x, BIT(QKV))                                                                             \
    ROW(QKN_STATS, "q and k norm statistics", "norm", 0, FP32, s->qk_statistics, 0, qkv_width(s) * s->x, BIT(QKV))     \
    ROW(SOFTMAX, s->materialized ? "probabilities" : "log-sum-exp", "core attention", MODULE_CORE_ATTN, SAVED,         \
        s->materialized ? (int64_t)s->H * s->T : s->H, 0, s->materialized ? 2.0 * s->H * s->T * s->x : 0,              \
        s->qk_statistics ? BIT(QKN) : BIT(QKV))                                                                        \
    ROW(ATT, "attention output", "core attention", MODULE_CORE_ATTN, ATTENTION, s->H * s->D,                           \
        4.0 * s->H * s->D * s->keys, s->H * s->D * s->x, s->qk_statistics ? BIT(QKN) : BIT(QKV))                       \
    ROW(ATT_PROJ, "attention projection", "residual branch", 0, FLOATX, s->norm_after * s->C,                          \
        2.0 * s->H * s->D * s->C, s->C * s->x, PROJECTION_INPUT)                                                       \
    ROW(POST1_STATS, "post-attention norm statistics", "norm", 0, FP32, s->norm_after * s->norm_statistics, 0,         \
        s->C * s->x, BIT(ATT_PROJ))                                                                                    \
    ROW(MID, "residual after attention", "residual", 0, FLOATX, s->parallel ? 0 : s->C,                                \
        s->norm_after ? 0 : 2.0 * s->H * s->D * s->C, (s->norm_after ? 5 : 3) * s->C * s->x,                           \
        ACT_INPUT | (s->norm_after ? BIT(ATT_PROJ) : PROJECTION_INPUT))                                                \
    ROW(NORM2, "norm 2", "norm", MODULE_NORM, INPUT, s->C * s->norm_before, 0, 2 * s->C * s->x,                        \
        s->parallel ? ACT_INPUT : BIT(MID))                                                                            \
    ROW(NORM2_STATS, "norm 2 statistics", "norm", 0, FP32, s->norm_before * s->norm_statistics, 0, s->C * s->x,        \
        s->parallel ? ACT_INPUT : BIT(MID))                                                                            \
    ROW(FC, s->gated ? "gate and up" : "fc", "mlp", MODULE_MLP, FLOATX, fc_width(s), 2.0 * s->C * fc_width(s),         \
        fc_width(s) * s->x, s->norm_before ? ROWS_OF(NORM2, s->parallel ? ACT_INPUT : BIT(MID)) : BIT(MID))            \
    ROW(ACT, s->activation_name, "mlp activation", MODULE_ACTIVATION | MODULE_MLP, INPUT, s->F, 0,                     \
        (fc_width(s) + s->F) * s->x, BIT(FC))                                                                          \
    ROW(MLP_PROJ, "mlp projection", "residual branch", MODULE_MLP, FLOATX, s->norm_after * s->C, 2.0 * s->F * s->C,    \
        s->C * s->x, ROWS_OF(ACT, BIT(FC)))                                                                            \
    ROW(POST2_STATS, "post-mlp norm statistics", "norm", 0, FP32, s->norm_after * s->norm_statistics, 0, s->C * s->x,  \
        BIT(MLP_PROJ))                                                                                                 \
    ROW(OUT, "residual after mlp", "residual", 0, FLOATX, s->C,                                                        \
        (s->norm_after ? 0 : 2.0 * s->F * s->C) + (s->parallel ? 2.0 * s->H * s->D * s->C : 0),                        \
        (s->norm_after ? 5 : 3) * s->C * s->x,                                                                         \
        (s->parallel ? ACT_INPUT | PROJECTION_INPUT : BIT(MID)) |                                                      \
            (s->norm_after ? BIT(MLP_PROJ) : ROWS_OF(ACT, BIT(FC))))

#define BIT(id) (1u << ACT_##id)
enum activation_id {
#define ENUM_ROW(id, name, category, modules, elements, width, flops, traffic, from) ACT_##id,
    ACTIVATION_ROWS(ENUM_ROW)
#undef ENUM_ROW
        ACT_COUNT
};
#define ACT_INPUT (1u << ACT_COUNT) // always present, never produced

struct activation_row {
    const char *name, *category;
    uint32_t modules; // modules of --recompute-modules that drop it
    enum elements elements;
    int64_t bytes_per_token; // exact
    double flops_per_token, traffic_per_token;
    uint32_t made_from;
};

// Returns an activation's row for a layer of shape s. If the layer lacks it, only bytes_per_token is certain to be 0.
static struct activation_row activation_row(enum activation_id id, const struct layer_shape *s) {
    switch (id) {
#define CASE_ROW(id, name, category, modules, kind, width, flops, traffic, from)                                       \
    case ACT_##id: {                                                                                                   \
        const enum elements elements = ELEMENTS_##kind;                                                                \
        const struct activation_row row = {                                                                            \
            name, category, modules, elements, elements_bytes(s, elements, width), (double)(flops), (double)(traffic), \
            from};                                                                                                     \
        return row;                                                                                                    \
    }
        ACTIVATION_ROWS(CASE_ROW)
#undef CASE_ROW
    case ACT_COUNT: break;
    }
    const struct activation_row none = {"", "", 0, ELEMENTS_FLOATX, 0, 0, 0, 0};
    return none;
}

static const uint32_t ACT_ALL = (1u << ACT_COUNT) - 1;
static const uint32_t ACT_BACKWARD = ((1u << ACT_COUNT) - 1) & ~BIT(OUT); // read by backward, besides the input

// Returns the set of activations (BIT of each) that a layer of this shape has.
static uint32_t activation_present(const struct layer_shape *s) {
    uint32_t present = 0;
    for (int id = 0; id < ACT_COUNT; id++)
        if (activation_row((enum activation_id)id, s).bytes_per_token > 0)
            present |= 1u << id;
    return present;
}
// Returns the bytes per token of a set of one layer's activations. Activations that the layer does not have count 0.
static int64_t activation_bytes(uint32_t set, const struct layer_shape *s) {
    int64_t bytes = 0;
    for (int id = 0; id < ACT_COUNT; id++)
        if (set & (1u << id))
            bytes += activation_row((enum activation_id)id, s).bytes_per_token;
    return bytes;
}

// Returns the activations to produce in order to have `wanted`, as far as this shape has it. `kept` and the layer's
// input are there already. The result is the missing part of `wanted`, of what that is made from, and so on.
static uint32_t activation_closure(uint32_t wanted, uint32_t kept, const struct layer_shape *s) {
    uint32_t produce = wanted & ~kept, before;
    produce &= activation_present(s);
    do {
        before = produce;
        for (int id = 0; id < ACT_COUNT; id++)
            if (produce & (1u << id))
                produce |= activation_row((enum activation_id)id, s).made_from & ~kept & ACT_ALL;
    } while (produce != before);
    return produce;
}

// ---- Policies ----

// Reads the next range of `list`, layers such as 0-3,8, into *first and *last, unchecked against a model. *at, at first
// `list`, moves past the range and its comma. A malformed list, the value of `option`, ends the program.
static inline void recompute_read_range(const char *option, const char *list, const char **at, int *first, int *last) {
    const char *end = *at;
    int read = 0;
    bool good = *end >= '0' && *end <= '9' && sscanf(end, "%9d%n", first, &read) == 1;
    end += read;
    *last = *first;
    if (good && *end == '-') {
        end++;
        read = 0;
        good = *end >= '0' && *end <= '9' && sscanf(end, "%9d%n", last, &read) == 1 && *first <= *last;
        end += read;
    }
    const bool more = *end == ',' && end[1];
    if (!good || (*end && !more))
        fail("%s: '%s' is not a list of layers; expected numbers and ranges like 0-3,8", option, list);
    *at = end + more;
}

// Returns the set of modules in `list`, such as norm,mlp, the value of `option`. Ends the program for an unknown name.
static inline uint32_t recompute_read_modules(const char *option, const char *list) {
    uint32_t modules = 0;
    for (const char *word = list; *word;) {
        const size_t length = strcspn(word, ",");
        uint32_t module = 0;
        for (int i = 0; i < NUM_MODULES; i++)
            if (strlen(module_names[i]) == length && strncmp(word, module_names[i], length) == 0)
                module = 1u << i;
        if (!module)
            fail("%s: '%.*s' is not known; expected any of " MODULE_LIST, option, (int)length, word);
        modules |= module;
        word += length;
        if (*word == ',' && !*++word)
            fail("%s: '%s' ends in a comma", option, list);
    }
    return modules;
}

// Returns the set of modules in `list`, the value of --recompute-modules. If it is empty, returns the default, which
// depends on whether attention keeps its probabilities (materialized). Ends the program for an unknown name.
static inline uint32_t recompute_modules_of(const char *list, bool materialized) {
    const char *const usual = materialized ? RECOMPUTE_MODULES_UNFUSED : RECOMPUTE_MODULES_DEFAULT;
    return recompute_read_modules("--recompute-modules", *list ? list : usual);
}

// An entry of --recompute-layer-modules, such as full:12-15,20. recompute_read_range reads `layers`, here 12-15,20.
struct recompute_entry {
    bool full;        // the layers keep only their input
    uint32_t modules; // else the modules that the layers drop
    char layers[128];
};
// Reads the entry MODULES:LAYERS at *at, in `list`, and moves *at past its `;`. A bad entry ends the program.
static inline struct recompute_entry recompute_read_entry(const char *list, const char **at) {
    const char *const option = "--recompute-layer-modules";
    struct recompute_entry entry;
    char modules[128];
    const size_t length = strcspn(*at, ";"), words = strcspn(*at, ":;");
    memset(&entry, 0, sizeof entry);
    if ((*at)[words] != ':' || words == 0 || words >= sizeof modules || length - words > sizeof entry.layers ||
        ((*at)[length] == ';' && !(*at)[length + 1]))
        fail("%s: '%s' is no list of modules and their layers; expected one like norm,activation:0-11;full:12-15",
             option, list);
    snprintf(modules, sizeof modules, "%.*s", (int)words, *at);
    snprintf(entry.layers, sizeof entry.layers, "%.*s", (int)(length - words - 1), *at + words + 1);
    entry.full = strcmp(modules, "full") == 0;
    if (!entry.full)
        entry.modules = recompute_read_modules(option, modules);
    int first = 0, last = 0;
    for (const char *range = entry.layers; *range || range == entry.layers;)
        recompute_read_range(option, entry.layers, &range, &first, &last);
    *at += length + ((*at)[length] == ';');
    return entry;
}

// The activations that each layer keeps for backward. The owner frees it by policy_free; gpt_plan takes it over.
struct recompute_policy {
    int num_layers;
    uint32_t *kept;   // (num_layers) activations that stay from forward to backward
    int *group_first; // (num_layers) the first layer of the group that layer l is recomputed with
    char description[256];
};

static struct recompute_policy policy_keep_all(int num_layers);
// Returns a policy of full recomputation by groups of `group` layers; the last group may be smaller. A group keeps only
// the OUT of its last layer. policy_free frees the policy.
static struct recompute_policy policy_uniform(int num_layers, int group);
// Returns a policy of full recomputation for n <= num_layers first layers: they keep only OUT. policy_free frees it.
static struct recompute_policy policy_full_in_first_layers(int num_layers, int n);
// Returns a policy of full recomputation in the layers of a list such as 0-3,8, which keep only OUT. policy_free frees
// it. Ends the program if the list is malformed, or has a layer that the model lacks.
static struct recompute_policy policy_full_in_layers(int num_layers, const char *list);
// Returns a policy by which all layers drop the activations of a set of modules. policy_free frees it.
static struct recompute_policy policy_selective(int num_layers, uint32_t modules, const struct layer_shape *s);
// Returns the policy of a list such as norm,activation:0-11;full:12-15. A layer's last entry counts; layers without an
// entry keep all. policy_free frees it. A malformed list, or a layer that the model lacks, ends the program.
static struct recompute_policy policy_read_layer_modules(int num_layers, const char *list, const struct layer_shape *s);
// Writes a policy as the list that policy_read_layer_modules reads, cut to the `n` bytes of `out`: equal layers as one
// range, and "" if all layers keep everything. Each of the policy's groups must be one layer. Returns `out`.
static const char *policy_write_layer_modules(char *out, size_t n, const struct recompute_policy *policy,
                                              const struct layer_shape *s);
// Returns a policy, for policy_free: layers [0, n) keep kept_first, others kept_rest. `description` is untrue.
static struct recompute_policy policy_mixed(int num_layers, uint32_t kept_first, uint32_t kept_rest, int n);
static void policy_free(struct recompute_policy *policy);

// Whether layer l is the last layer of its group of layers that are recomputed together.
static bool policy_is_group_last(const struct recompute_policy *policy, int l);
// Returns what layer l recomputes: for its backward and, inside a group, for the next layer. s is the model's shape.
static uint32_t policy_recomputed(const struct recompute_policy *policy, int l, const struct layer_shape *s);
// Returns the bytes per token that all layers together keep from forward to backward. s is the model's shape.
static int64_t policy_bytes_per_token(const struct recompute_policy *policy, const struct layer_shape *s);
// What a byte of memory traffic, and a flop of an FP8 layer's products, costs in flops of products in floatX.
struct activation_prices {
    double byte, fp8_flop;
};
// Returns the cost per token, in flops, of making a set of activations; what is read from outside the set costs
// nothing. SOFTMAX in the set counts ATT as well: one op makes the two.
static double activation_cost(uint32_t set, const struct layer_shape *s, struct activation_prices prices);

// Returns a default for --mlp-chunk-tokens: the smallest power of two, at least 256, whose chunks add at most 1 % to
// the time of a fully recomputed layer. Returns 0, for no chunks, if that is `tokens` or more.
static int64_t mlp_chunk_default(const struct layer_shape *s, int64_t tokens, double flops_per_byte);

// Returns the activations of this shape that a set of modules drops; no module drops the statistics of a norm.
static uint32_t modules_dropped(uint32_t modules, const struct layer_shape *s);
// Writes a set of modules as "norm,activation" into the `n` bytes of `out`, cut to what fits, and returns `out`.
static const char *modules_text(char *out, size_t n, uint32_t modules);

enum { FRONTIER_MAX = (1 << NUM_MODULES) + 1 };
// Fills `kept` with the sets of activations that are worth keeping in a layer of shape s, from all to the fewest bytes,
// and returns their number. Considers what each set of modules would drop, and keeping only OUT. Leaves out a set if
// some layers with one other set and the rest with another take as many bytes at no more cost.
static int recompute_frontier(uint32_t kept[FRONTIER_MAX], const struct layer_shape *s,
                              struct activation_prices prices);

static struct recompute_policy policy_keep_all(int num_layers) {
    struct recompute_policy policy;
    policy.num_layers = num_layers;
    policy.kept = (uint32_t *)calloc((size_t)num_layers, sizeof *policy.kept);
    policy.group_first = (int *)calloc((size_t)num_layers, sizeof *policy.group_first);
    if (!policy.kept || !policy.group_first)
        fail("out of memory for the recomputation policy of %d layers", num_layers);
    for (int l = 0; l < num_layers; l++) {
        policy.kept[l] = ACT_ALL;
        policy.group_first[l] = l;
    }
    snprintf(policy.description, sizeof policy.description, "none: every activation is kept");
    return policy;
}

static void policy_free(struct recompute_policy *policy) {
    free(policy->kept);
    free(policy->group_first);
    policy->kept = NULL;
    policy->group_first = NULL;
}

static bool policy_is_group_last(const struct recompute_policy *policy, int l) {
    return l + 1 == policy->num_layers || policy->group_first[l + 1] == l + 1;
}

static uint32_t policy_recomputed(const struct recompute_policy *policy, int l, const struct layer_shape *s) {
    const uint32_t wanted = ACT_BACKWARD | (policy_is_group_last(policy, l) ? 0 : BIT(OUT));
    const struct layer_shape layer = layer_shape_at(s, l);
    return activation_closure(wanted, policy->kept[l], &layer);
}

static void policy_keep_only_output(struct recompute_policy *policy, int l) { policy->kept[l] = BIT(OUT); }

static struct recompute_policy policy_uniform(int num_layers, int group) {
    struct recompute_policy policy = policy_keep_all(num_layers);
    for (int l = 0; l < num_layers; l++) {
        policy.group_first[l] = l - l % group;
        policy.kept[l] = 0;
    }
    for (int l = 0; l < num_layers; l++)
        if (policy_is_group_last(&policy, l))
            policy_keep_only_output(&policy, l);
    snprintf(policy.description, sizeof policy.description, "full, uniform: groups of %d layer%s keep their input",
             group, group == 1 ? "" : "s");
    return policy;
}

static struct recompute_policy policy_full_in_first_layers(int num_layers, int n) {
    struct recompute_policy policy = policy_keep_all(num_layers);
    for (int l = 0; l < n; l++)
        policy_keep_only_output(&policy, l);
    snprintf(policy.description, sizeof policy.description, "full, block: the first %d of %d layers keep their input",
             n, num_layers);
    return policy;
}

static struct recompute_policy policy_full_in_layers(int num_layers, const char *list) {
    struct recompute_policy policy = policy_keep_all(num_layers);
    snprintf(policy.description, sizeof policy.description, "full: layers %.100s keep their input", list);
    int first = 0, last = 0;
    for (const char *at = list; *at;) {
        recompute_read_range("--recompute-layers", list, &at, &first, &last);
        if (last >= num_layers)
            fail("--recompute-layers '%s' names layers %d-%d, but the model has layers 0 to %d", list, first, last,
                 num_layers - 1);
        for (int l = first; l <= last; l++)
            policy_keep_only_output(&policy, l);
    }
    return policy;
}

static uint32_t modules_dropped(uint32_t modules, const struct layer_shape *s) {
    uint32_t dropped = 0;
    for (int id = 0; id < ACT_COUNT; id++)
        if (activation_row((enum activation_id)id, s).modules & modules)
            dropped |= 1u << id;
    return dropped & activation_present(s);
}

static const char *modules_text(char *out, size_t n, uint32_t modules) {
    out[0] = 0;
    for (int i = 0; i < NUM_MODULES; i++)
        if (modules & (1u << i))
            text_add(out, n, "%s%s", *out ? "," : "", module_names[i]);
    return out;
}

static struct recompute_policy policy_selective(int num_layers, uint32_t modules, const struct layer_shape *s) {
    struct recompute_policy policy = policy_keep_all(num_layers);
    for (int l = 0; l < num_layers; l++)
        policy.kept[l] = ACT_ALL & ~modules_dropped(modules, s);
    char text[sizeof(MODULE_LIST)];
    snprintf(policy.description, sizeof policy.description, "selective: %s", modules_text(text, sizeof text, modules));
    return policy;
}

static struct recompute_policy policy_read_layer_modules(int num_layers, const char *list,
                                                         const struct layer_shape *s) {
    struct recompute_policy policy = policy_keep_all(num_layers);
    snprintf(policy.description, sizeof policy.description, "selective by layers: %.200s", list);
    for (const char *at = list; *at;) {
        const struct recompute_entry entry = recompute_read_entry(list, &at);
        int first = 0, last = 0;
        for (const char *range = entry.layers; *range;) {
            recompute_read_range("--recompute-layer-modules", entry.layers, &range, &first, &last);
            if (last >= num_layers)
                fail("--recompute-layer-modules '%s' names layers %d-%d, but the model has layers 0 to %d", list, first,
                     last, num_layers - 1);
            for (int l = first; l <= last; l++)
                policy.kept[l] = entry.full ? BIT(OUT) : ACT_ALL & ~modules_dropped(entry.modules, s);
        }
    }
    return policy;
}

static const char *policy_write_layer_modules(char *out, size_t n, const struct recompute_policy *policy,
                                              const struct layer_shape *s) {
    out[0] = 0;
    for (int first = 0, end; first < policy->num_layers; first = end) {
        const uint32_t kept = policy->kept[first];
        char text[sizeof(MODULE_LIST)];
        uint32_t modules = 0;
        for (end = first + 1; end < policy->num_layers && policy->kept[end] == kept; end++)
            continue;
        for (int i = 0; i < NUM_MODULES; i++)
            if ((modules_dropped(1u << i, s) & kept) == 0)
                modules |= 1u << i;
        if (kept == ACT_ALL)
            continue;
        text_add(out, n, "%s%s:%d", *out ? ";" : "",
                 kept == BIT(OUT) ? "full" : modules_text(text, sizeof text, modules), first);
        if (end - first > 1)
            text_add(out, n, "-%d", end - 1);
    }
    return out;
}

static struct recompute_policy policy_mixed(int num_layers, uint32_t kept_first, uint32_t kept_rest, int n) {
    struct recompute_policy policy = policy_keep_all(num_layers);
    for (int l = 0; l < num_layers; l++)
        policy.kept[l] = l < n ? kept_first : kept_rest;
    return policy;
}

static int64_t policy_bytes_per_token(const struct recompute_policy *policy, const struct layer_shape *s) {
    int64_t bytes = 0;
    for (int l = 0; l < policy->num_layers; l++) {
        const struct layer_shape layer = layer_shape_at(s, l);
        bytes += activation_bytes(policy->kept[l], &layer);
    }
    return bytes;
}

static double activation_cost(uint32_t set, const struct layer_shape *s, struct activation_prices prices) {
    if (set & BIT(SOFTMAX)) // one op makes SOFTMAX and ATT
        set |= BIT(ATT);
    double cost = 0;
    for (int id = 0; id < ACT_COUNT; id++)
        if (set & activation_present(s) & (1u << id)) {
            const struct activation_row row = activation_row((enum activation_id)id, s);
            const bool fp8 = s->kept_input != KEPT_FLOATX && id != ACT_ATT;
            cost += row.flops_per_token * (fp8 ? prices.fp8_flop : 1) + row.traffic_per_token * prices.byte;
        }
    return cost;
}

static int64_t mlp_chunk_default(const struct layer_shape *s, int64_t tokens, double flops_per_byte) {
    const double weights = (double)s->C * (fc_width(s) + s->F);
    // A chunk reads each weight in the products of forward, recomputation and backward, x bytes each, and reads and
    // writes its fp32 gradient: 3 x + 8 bytes an element. Recomputation skips the second projection, which is not
    // counted in favor. The estimate hides none of these bytes behind the products; a GPU hides most.
    const double chunk = weights * (3 * s->x + 8) * flops_per_byte;
    const struct activation_prices prices = {flops_per_byte, 1};
    const double token = 4 * activation_cost(ACT_ALL, s, prices); // forward, recomputation, backward as two
    int64_t n = 256;
    while (n < tokens && chunk > 0.01 * token * (double)n)
        n *= 2;
    return n < tokens ? n : 0;
}

static int recompute_frontier(uint32_t kept[FRONTIER_MAX], const struct layer_shape *s,
                              struct activation_prices prices) {
    struct candidate {
        uint32_t kept;
        double bytes, cost;
    } all[FRONTIER_MAX];
    int n = 0;
    for (uint32_t modules = 0; modules <= 1u << NUM_MODULES; modules++) {
        const uint32_t set = modules == 1u << NUM_MODULES ? BIT(OUT) : ACT_ALL & ~modules_dropped(modules, s);
        all[n].kept = set;
        all[n].bytes = (double)activation_bytes(set, s);
        all[n++].cost = activation_cost(activation_closure(ACT_BACKWARD, set, s), s, prices);
    }
    // Starts with the candidate that keeps all, and goes on to the candidate of the lowest cost per byte saved.
    int count = 0, at = 0;
    kept[count++] = all[at].kept;
    for (;;) {
        int best = -1;
        double best_price = 0;
        for (int i = 0; i < n; i++)
            if (all[i].bytes < all[at].bytes) {
                const double price = (all[i].cost - all[at].cost) / (all[at].bytes - all[i].bytes);
                if (best < 0 || price < best_price || (price == best_price && all[i].bytes < all[best].bytes)) {
                    best = i;
                    best_price = price;
                }
            }
        if (best < 0)
            return count;
        at = best;
        kept[count++] = all[at].kept;
    }
}
