// Schedules of a transformer, written without the engine's code: the planner must be good at schedules of this kind,
// not at one instance.
#pragma once
#include "memory.cuh"     // struct plan
#include "test/testing.h" // test_alloc
#include <stdbool.h>      // bool

enum { INPUT, NORM1, STATS1, QKV, LSE, ATT, MID, NORM2, STATS2, FC, ACT, OUT, ROWS };
static const char *const row_names[ROWS] = {"input", "norm 1", "statistics 1", "qkv", "log-sum-exp", "attention",
                                            "mid",   "norm 2", "statistics 2", "fc",  "act",         "out"};
static const char *const row_categories[ROWS] = {"residual", "norm", "norm", "qkv", "core attention", "core attention",
                                                 "residual", "norm", "norm", "mlp", "mlp activation", "residual"};
static const int row_made_from[ROWS] = {
    0,        1 << INPUT, 1 << INPUT, 1 << NORM1, 1 << QKV,           1 << QKV, 1 << ATT | 1 << INPUT,
    1 << MID, 1 << MID,   1 << NORM2, 1 << FC,    1 << ACT | 1 << MID};
enum { ALL_ROWS = (1 << ROWS) - 1, BACKWARD_ROWS = ALL_ROWS & ~(1 << OUT) };

struct schedule {
    int layers, head_chunks, generated_tokens;
    int *kept;        // (layers) rows that stay until backward
    int *group_first; // (layers)
    size_t size[ROWS], hidden, logits, workspace[8], kv_cache;
    bool dropout, logits_per_chunk; // logits_per_chunk: each chunk has its own buffer of logits, or all share one
    struct plan *plan;
    int *id; // (layers, ROWS) each activation's current buffer
};

static void phase_of(struct schedule *s, int layer, const char *what) {
    char name[96];
    if (layer >= 0)
        snprintf(name, sizeof name, "layer %d %s", layer, what);
    else
        snprintf(name, sizeof name, "%s", what);
    plan_phase(s->plan, 0, layer, name);
}
static int temporary(struct schedule *s, const char *name, int layer, size_t bytes) {
    return plan_add(s->plan, ARENA_ACTIVATIONS, "gradients of activations", name, layer, bytes);
}
static void workspace(struct schedule *s, int which) {
    plan_touch(s->plan, plan_add(s->plan, ARENA_ACTIVATIONS, "workspace", "workspace", -1, s->workspace[which]));
}
static int *activation(struct schedule *s, int layer, int row) { return &s->id[layer * ROWS + row]; }
static void touch_row(struct schedule *s, int layer, int row) {
    plan_touch(s->plan, row == INPUT && layer > 0 ? *activation(s, layer - 1, OUT) : *activation(s, layer, row));
}

static void forward(struct schedule *s, int layer, int produce, const char *category, const char *pass) {
    for (int row = NORM1; row < ROWS; row++) {
        if (!(produce & 1 << row))
            continue;
        char what[PLAN_NAME_CHARS];
        snprintf(what, sizeof what, "%s: %s", pass, row_names[row]);
        phase_of(s, layer, what);
        *activation(s, layer, row) = plan_add(s->plan, ARENA_ACTIVATIONS, category ? category : row_categories[row],
                                              row_names[row], layer, s->size[row]);
        touch_row(s, layer, row);
        for (int from = 0; from < ROWS; from++)
            if (row_made_from[row] & 1 << from)
                touch_row(s, layer, from);
        workspace(s, row % 4);
        if (row == QKV) { // rotary embedding
            phase_of(s, layer, what);
            touch_row(s, layer, QKV);
        }
        if ((row == MID || row == OUT) && s->dropout) { // the product is a buffer of its own
            const int delta = temporary(s, "delta", layer, s->hidden);
            plan_touch(s->plan, delta);
            phase_of(s, layer, what);
            plan_touch(s->plan, delta);
            touch_row(s, layer, row);
        }
    }
}

static int closure(int wanted, int kept) {
    int produce = wanted & ~kept & ~(1 << INPUT);
    for (int row = ROWS - 1; row > 0; row--)
        if (produce & 1 << row)
            produce |= row_made_from[row] & ~kept & ~(1 << INPUT);
    return produce;
}

// Plans one op of backward: it reads the gradient `in` and the activations `rows` (bits), and writes the gradient
// `out`; -1: none.
static void backward_op(struct schedule *s, int layer, const char *what, int in, int out, int rows, int which) {
    phase_of(s, layer, what);
    plan_touch(s->plan, in);
    plan_touch(s->plan, out);
    for (int row = 0; row < ROWS; row++)
        if (rows & 1 << row)
            touch_row(s, layer, row);
    workspace(s, which);
}

static void backward(struct schedule *s, int layer, int dresidual) {
    const int dact = temporary(s, "dact", layer, s->size[ACT]), dfc = temporary(s, "dfc", layer, s->size[FC]);
    const int dnorm2 = temporary(s, "dnorm2", layer, s->hidden), datt = temporary(s, "datt", layer, s->size[ATT]);
    const int dqkv = temporary(s, "dqkv", layer, s->size[QKV]), dnorm1 = temporary(s, "dnorm1", layer, s->hidden);
    int dout = dresidual;
    if (s->dropout) {
        dout = temporary(s, "ddelta", layer, s->hidden);
        backward_op(s, layer, "backward: dropout", dresidual, dout, 0, 0);
    }
    backward_op(s, layer, "backward: mlp projection", dout, dact, 0, 4);
    backward_op(s, layer, "backward: mlp projection weight", dout, -1, 1 << ACT, 5);
    backward_op(s, layer, "backward: activation", dact, dfc, 1 << FC, 0);
    backward_op(s, layer, "backward: fc", dfc, dnorm2, 0, 4);
    backward_op(s, layer, "backward: fc weight", dfc, -1, 1 << NORM2, 5);
    backward_op(s, layer, "backward: norm 2", dnorm2, dresidual, 1 << MID | 1 << STATS2, 6);
    dout = dresidual;
    if (s->dropout) {
        dout = temporary(s, "ddelta", layer, s->hidden);
        backward_op(s, layer, "backward: dropout", dresidual, dout, 0, 0);
    }
    backward_op(s, layer, "backward: projection", dout, datt, 0, 4);
    backward_op(s, layer, "backward: projection weight", dout, -1, 1 << ATT, 5);
    backward_op(s, layer, "backward: attention", datt, dqkv, 1 << QKV | 1 << LSE | 1 << ATT, 7);
    backward_op(s, layer, "backward: rope", dqkv, -1, 0, 0);
    backward_op(s, layer, "backward: qkv", dqkv, dnorm1, 0, 4);
    backward_op(s, layer, "backward: qkv weight", dqkv, -1, 1 << NORM1, 5);
    backward_op(s, layer, "backward: norm 1", dnorm1, dresidual, 1 << INPUT | 1 << STATS1, 6);
}

static void head(struct schedule *s, int hidden, int dresidual, bool train) {
    const int norm = temporary(s, "final norm", -1, s->hidden);
    const int dnorm = temporary(s, "dfinal", -1, train ? s->hidden : 0);
    phase_of(s, -1, "head: norm");
    plan_touch(s->plan, norm);
    plan_touch(s->plan, hidden);
    const int losses = plan_add(s->plan, ARENA_ACTIVATIONS, "logits and loss", "losses", -1, s->hidden / 64);
    int logits = plan_add(s->plan, ARENA_ACTIVATIONS, "logits and loss", "logits", -1, s->logits);
    for (int chunk = 0; chunk < s->head_chunks; chunk++) {
        if (s->logits_per_chunk)
            logits = plan_add(s->plan, ARENA_ACTIVATIONS, "logits and loss", "logits", -1, s->logits);
        backward_op(s, -1, "head: logits", norm, logits, 0, 3);
        backward_op(s, -1, "head: loss", losses, logits, 0, 0);
        if (train) {
            backward_op(s, -1, "head: dinput", dnorm, logits, 0, 4);
            backward_op(s, -1, "head: dweight", norm, logits, 0, 5);
        }
    }
    if (train) {
        backward_op(s, -1, "head: norm backward", dnorm, dresidual, 0, 6);
        plan_touch(s->plan, hidden);
    }
}

static void embed(struct schedule *s) {
    phase_of(s, -1, "embed");
    *activation(s, 0, INPUT) = plan_add(s->plan, ARENA_ACTIVATIONS, "residual", "embedding", -1, s->hidden);
    touch_row(s, 0, INPUT);
}

static void training_step(struct schedule *s) {
    embed(s);
    for (int l = 0; l < s->layers; l++)
        forward(s, l, ALL_ROWS & ~(1 << INPUT), NULL, "forward");
    const int dresidual = temporary(s, "dresidual", -1, s->hidden);
    head(s, *activation(s, s->layers - 1, OUT), dresidual, true);
    for (int l = s->layers - 1; l >= 0; l--) {
        // a group's last layer: all of the group is made again
        if (l + 1 == s->layers || s->group_first[l + 1] == l + 1)
            for (int again = s->group_first[l]; again <= l; again++)
                forward(s, again, closure(BACKWARD_ROWS | (again < l ? 1 << OUT : 0), s->kept[again]),
                        "recomputed activations", "recompute");
        backward(s, l, dresidual);
    }
    backward_op(s, -1, "embedding backward", dresidual, -1, 0, 0);
    backward_op(s, -1, "gradient norm", -1, -1, 0, 1);
    backward_op(s, -1, "optimizer", -1, -1, 0, 2);
}

static void evaluation(struct schedule *s) {
    embed(s);
    for (int l = 0; l < s->layers; l++)
        forward(s, l, ALL_ROWS & ~(1 << INPUT), NULL, "evaluation");
    head(s, *activation(s, s->layers - 1, OUT), -1, false);
}

static void generation(struct schedule *s) {
    const int cache = plan_add(s->plan, ARENA_ACTIVATIONS, "kv cache", "kv cache", -1, s->kv_cache);
    for (int t = 0; t < s->generated_tokens; t++) {
        embed(s);
        for (int l = 0; l < s->layers; l++) {
            forward(s, l, ALL_ROWS & ~(1 << INPUT), NULL, "generation");
            plan_touch(s->plan, cache);
        }
        head(s, *activation(s, s->layers - 1, OUT), -1, false);
    }
}

enum policy {
    POLICY_NONE,
    POLICY_NORM_ACTIVATION,
    POLICY_ATTENTION,
    POLICY_MLP,
    POLICY_UNIFORM,
    POLICY_BLOCK,
    POLICY_ALTERNATING,
    POLICIES
};

static void set_policy(struct schedule *s, enum policy policy, int n) {
    for (int l = 0; l < s->layers; l++) {
        s->group_first[l] = l;
        s->kept[l] = ALL_ROWS;
        switch (policy) {
        case POLICY_NORM_ACTIVATION: s->kept[l] &= ~(1 << NORM1 | 1 << NORM2 | 1 << ACT); break;
        case POLICY_ATTENTION: s->kept[l] &= ~(1 << ATT | 1 << LSE); break;
        case POLICY_MLP: s->kept[l] &= ~(1 << FC | 1 << ACT | 1 << NORM2); break;
        case POLICY_UNIFORM:
            s->group_first[l] = l - l % n;
            s->kept[l] = l % n == n - 1 ? 1 << OUT : 0;
            break;
        case POLICY_BLOCK: s->kept[l] = l < n ? 1 << OUT : ALL_ROWS; break;
        case POLICY_ALTERNATING: s->kept[l] = l % (n + 1) ? 1 << OUT : ALL_ROWS; break;
        default: break;
        }
    }
}

// Sets the sizes of a model of width C with H heads, G KV heads and MLP width F at N tokens, 2 bytes an element.
static void set_sizes(struct schedule *s, size_t N, size_t T, size_t C, size_t H, size_t G, size_t F, bool swiglu,
                      bool unfused, size_t V, int head_chunks) {
    const size_t D = C / H;
    s->hidden = N * C * 2;
    for (int row = 0; row < ROWS; row++)
        s->size[row] = s->hidden;
    s->size[STATS1] = s->size[STATS2] = N * 8;
    s->size[QKV] = N * (H + 2 * G) * D * 2;
    s->size[LSE] = unfused ? N * H * T * 2 : N * H * 4;
    s->size[FC] = N * F * (swiglu ? 4 : 2);
    s->size[ACT] = N * F * 2;
    s->head_chunks = head_chunks;
    s->logits = N / (size_t)head_chunks * V * 2;
    const size_t spaces[8] = {0, 64, F * C / 8, 1 << 20, F * C * 2, N * 96, C * 4 * 16, N * H * 8 + C * 512};
    memcpy(s->workspace, spaces, sizeof spaces);
    s->kv_cache = (size_t)s->layers * 2 * T * G * D * 2;
}

static void schedule_begin(struct schedule *s, struct plan *plan, int layers) {
    memset(s, 0, sizeof *s);
    s->layers = layers;
    s->plan = plan;
    s->kept = (int *)test_alloc(sizeof(int) * (size_t)layers);
    s->group_first = (int *)test_alloc(sizeof(int) * (size_t)layers);
    s->id = (int *)test_alloc(sizeof(int) * (size_t)layers * ROWS);
    plan_begin(plan);
}
static void schedule_end(struct schedule *s) {
    free(s->kept);
    free(s->group_first);
    free(s->id);
    plan_free(s->plan);
}
