// Searches the choices of run/fit_space.cuh for the cheapest way to fit a training step into the device's and the
// host's memory. A plan tells what a choice takes, but costs a millisecond or more, and there may be millions of
// choices. So all are estimated, by formulas that are corrected by plans of each group of choices that offload the same
// kinds of buffers, and then planned in the order of their estimates, until the best is planned and fits. It is the
// best of all, as estimates of time are below the plan's. Whether a choice fits depends only on its own estimate and
// plan: more memory never leads to a slower choice, and a budget that one search names suffices for the next.
#pragma once
#include "run/fit_space.cuh"       // struct fit_space, fit_formula
#include "runtime/machine/error.h" // fail
#include <stdlib.h>                // realloc, free
#include <string.h>                // memset

// A search minimizes one of these, within the limits of the others.
enum fit_objective { FIT_SECONDS, FIT_DEVICE, FIT_HOST };
enum { FIT_BEST = 3 };
struct fit_found {
    int count, plans; // of best, sorted; plans that were made
    struct fit_choice best[FIT_BEST];
    struct fit_outcome outcome[FIT_BEST];
    // FIT_SECONDS: the formats that would gain most, where only formats 0 are allowed; 0: none
    struct fit_choice gain;
    struct fit_outcome gain_estimate;
};

// Finds the best choice and, by a few more plans, the best of other sets, which offload other kinds of buffers or have
// other formats. count is 0 where none fits. Of equal choices, less offload wins. known_formats, for FIT_SECONDS: how
// many formats have estimates. Formats after space->most.formats are never chosen, only estimated for `gain`.
static struct fit_found fit_search(const struct fit_space *space, enum fit_objective objective, int known_formats);

// ---- Estimates ----

enum {
    FIT_GROUPS = 8 * FIT_FORMATS_MAX,
    // How many numbers of layers are tried, of a kind and of offloaded ones. States fill what deep models leave free.
    FIT_STEPS_PLAIN = 24,
    FIT_STEPS_OFFLOADED = 12,
    FIT_OTHERS_PLANS = 24 // for the best of other sets
};
// By how much estimates are lowered, to be below a plan's. Times: by shares of a micro-step and of its wait for the
// bus, which are larger while nothing is known of the group. Bytes: by what rounding adds.
static const double FIT_FORMULA_SLACK = 0.12, FIT_FORMULA_EXPOSED_SLACK = 0.4, FIT_TIME_SLACK = 0.002,
                    FIT_EXPOSED_SLACK = 0.02, FIT_ROUNDING = 4096;
// By which shares of a wait for the bus times are lowered: where layers are of two kinds, as one may hide what the
// other waits for; and, divided by the number of offloaded layers, for the last of these, which is different.
static const double FIT_MIXED_EXPOSED_SLACK = 0.045, FIT_LAST_EXPOSED_SLACK = 0.2;

// By how much plans of a group exceed the formulas, by the kind of all layers: bytes, and a factor of micro-step time.
struct fit_beside {
    bool known[FIT_KINDS_MAX];
    double device[FIT_KINDS_MAX], host[FIT_KINDS_MAX], slower[FIT_KINDS_MAX];
};
// A choice's group: a sum of what is offloaded, and the format of gradients. FIT_GROUP_PLAIN offloads nothing.
enum {
    FIT_GROUP_GRADIENTS = 1,
    FIT_GROUP_WEIGHTS = 2,
    FIT_GROUP_LAYERS = 4,
    FIT_GROUP_FORMATS = 8,
    FIT_GROUP_PLAIN = 0
};
// Returns a choice's group, which its optimizer states don't change. Formats with gradients of equal bytes are one.
static int fit_group(const struct fit_space *s, const struct fit_choice *c) {
    int formats = 0;
    while (s->gradients_bytes[formats] != s->gradients_bytes[c->formats])
        formats++;
    return c->gradients * FIT_GROUP_GRADIENTS + c->weights * FIT_GROUP_WEIGHTS +
           (c->layers > 0 ? FIT_GROUP_LAYERS : 0) + formats * FIT_GROUP_FORMATS;
}

// A search: the choices that may still be the best, and what was learned of groups.
struct fit_queue {
    const struct fit_space *space;
    enum fit_objective objective;
    struct fit_beside groups[FIT_GROUPS];
    struct fit_node *nodes; // (count)
    int count, capacity, plans;
};

// A choice in the search. What is known of it grows: by its group's plans, its own plan unplaced, its own plan placed.
enum fit_known { FIT_BY_FORMULA, FIT_BY_GROUP, FIT_UNPLACED, FIT_PLANNED };
struct fit_node {
    struct fit_choice c;
    enum fit_known known;
    double device, host;  // by how much its own plan's bytes exceed the formula's
    double seconds;       // by how much its own plan's time exceeds the formula's
    struct fit_outcome o; // estimated, or planned
    double value;         // what is minimized; INFINITY: it is out
};

static double fit_step_s(const struct fit_space *s, const struct fit_estimate *e) {
    return s->micro_steps * e->micro_step_s + e->update_s;
}
// Returns a planned micro-step's time over the formula's, for a choice whose layers all recompute as `kind` says. It is
// interpolated between two plans of the choice's group: with no layers offloaded, and with as many as may be.
static double fit_micro_step_factor(const struct fit_queue *q, const struct fit_choice *c, int kind) {
    const int group = fit_group(q->space, c);
    const double none = q->groups[group & ~FIT_GROUP_LAYERS].slower[kind], most = q->groups[group].slower[kind];
    const double share = c->layers / fit_larger(q->space->most.layers, 1), other = 1 - share;
    return most > none ? none + (most - none) * share * share : most + (none - most) * other * other;
}
// Returns the device's estimated bytes: the formula's, plus what the group's plan without offloaded layers took beyond
// it. It is at least the same estimate for the most offloaded layers, as copies of layers in transfer take memory.
static double fit_device_bytes(const struct fit_queue *q, const struct fit_choice *c, int kind) {
    const int group = fit_group(q->space, c);
    struct fit_choice most = *c;
    most.layers = group & FIT_GROUP_LAYERS ? q->space->most.layers : 0;
    return fit_larger(fit_formula(q->space, c).device + q->groups[group & ~FIT_GROUP_LAYERS].device[kind],
                      fit_formula(q->space, &most).device + q->groups[group].device[kind]);
}
// Returns the seconds of a step of `c` in which nothing waits for the bus: no plan of `c` takes less.
static double fit_without_bus_s(const struct fit_queue *q, const struct fit_choice *c) {
    const struct fit_space *s = q->space;
    const int L = s->num_layers, k = c->recompute / L, first = c->recompute % L;
    const double *slower = q->groups[FIT_GROUP_PLAIN].slower;
    double micro_step_s = s->head_s + L * (s->forward_s + s->backward_s) + (L - first) * s->recompute_s[k];
    if (first > 0)
        micro_step_s += first * s->recompute_s[k + 1];
    micro_step_s *= first > 0 && slower[k + 1] < slower[k] ? slower[k + 1] : slower[k];
    return s->micro_steps * micro_step_s + s->update_s[c->formats];
}
// Returns the seconds by which an estimate by plans of the group is lowered, to be below the plan. e: by fit_formula.
static double fit_slack_s(const struct fit_space *s, const struct fit_choice *c, const struct fit_estimate *e) {
    double exposed = c->recompute % s->num_layers > 0 ? FIT_MIXED_EXPOSED_SLACK : FIT_EXPOSED_SLACK;
    if (c->layers > 0)
        exposed += FIT_LAST_EXPOSED_SLACK / c->layers;
    return s->micro_steps * (FIT_TIME_SLACK * e->micro_step_s + exposed * e->exposed_s);
}
// Returns an estimate of a node's choice by all that is known of it. The choice's own plan may raise the group's
// estimate of bytes but never lower it: what a choice needs must not depend on which choices were planned.
static struct fit_outcome fit_estimate(const struct fit_queue *q, const struct fit_node *n) {
    const struct fit_space *s = q->space;
    const int k = n->c.recompute / s->num_layers;
    const bool mixed = n->c.recompute % s->num_layers > 0;
    const struct fit_estimate e = fit_formula(s, &n->c);
    // A group that nothing is known of takes no less than the group that offloads no buffers.
    const struct fit_beside *b = &q->groups[n->known == FIT_BY_FORMULA ? FIT_GROUP_PLAIN : fit_group(q->space, &n->c)];
    struct fit_outcome o = {e.device + b->device[k], e.host + b->host[k], fit_step_s(s, &e)};
    if (n->known > FIT_BY_FORMULA)
        o.device = fit_device_bytes(q, &n->c, k);
    if (n->known == FIT_BY_GROUP) {
        double slower = fit_micro_step_factor(q, &n->c, k);
        if (mixed && fit_micro_step_factor(q, &n->c, k + 1) < slower)
            slower = fit_micro_step_factor(q, &n->c, k + 1);
        o.seconds += s->micro_steps * e.micro_step_s * (slower - 1);
    }
    if (n->known == FIT_BY_FORMULA)
        o.seconds -= s->micro_steps * (FIT_FORMULA_SLACK * e.micro_step_s + FIT_FORMULA_EXPOSED_SLACK * e.exposed_s);
    else
        o.seconds -= fit_slack_s(s, &n->c, &e);
    o.seconds = fit_larger(o.seconds, fit_without_bus_s(q, &n->c));
    if (n->known >= FIT_UNPLACED) {
        o.device = fit_larger(o.device, e.device + n->device);
        o.host = fit_larger(o.host, e.host + n->host);
        o.seconds = fit_step_s(s, &e) + n->seconds;
    }
    return o;
}

// Plans a choice of a group with all layers of one kind, unless done before. Records how it exceeds the formulas.
static void fit_plan_group(struct fit_queue *q, int group, int kind) {
    const struct fit_space *s = q->space;
    struct fit_beside *b = &q->groups[group];
    struct fit_choice c = s->least;
    if (b->known[kind])
        return;
    c.formats = group / FIT_GROUP_FORMATS;
    c.gradients = (group & FIT_GROUP_GRADIENTS) > 0;
    c.weights = (group & FIT_GROUP_WEIGHTS) > 0;
    c.layers = group & FIT_GROUP_LAYERS ? s->most.layers : 0;
    c.recompute = kind * s->num_layers;
    const struct fit_estimate e = fit_formula(s, &c);
    const struct fit_outcome o = s->plan(s->context, &c, false);
    b->device[kind] = o.device - e.device - FIT_ROUNDING;
    b->host[kind] = o.host - e.host - FIT_ROUNDING;
    b->slower[kind] = (o.seconds - e.update_s) / (s->micro_steps * e.micro_step_s);
    b->known[kind] = true;
    q->plans++;
}
// Returns how many kinds of layers a choice has: 1 or 2.
static int fit_kinds_of_choice(const struct fit_space *s, const struct fit_choice *c) {
    return 1 + (c->recompute % s->num_layers > 0);
}
// Whether fit_plan_groups_of has planned all that a choice's estimate reads.
static bool fit_is_known(const struct fit_queue *q, const struct fit_choice *c) {
    const int group = fit_group(q->space, c), k = c->recompute / q->space->num_layers,
              n = fit_kinds_of_choice(q->space, c);
    bool known = true;
    for (int i = k; i < k + n; i++)
        known = known && q->groups[group].known[i] && q->groups[group & ~FIT_GROUP_LAYERS].known[i];
    return known;
}
// Plans what a choice's estimate reads: for each kind of its layers, its group with and without offloaded layers.
static void fit_plan_groups_of(struct fit_queue *q, const struct fit_choice *c) {
    const int group = fit_group(q->space, c), k = c->recompute / q->space->num_layers,
              n = fit_kinds_of_choice(q->space, c);
    for (int i = k; i < k + n; i++) {
        fit_plan_group(q, group & ~FIT_GROUP_LAYERS, i);
        fit_plan_group(q, group, i);
    }
}

// ---- Choices ----

// Whether an outcome is within the limits. A minimized memory has none; `both` holds only where seconds are minimized.
static bool fit_meets_limits(const struct fit_space *s, const struct fit_outcome *o, enum fit_objective objective) {
    return (objective == FIT_DEVICE || o->device <= s->device) && (objective == FIT_HOST || o->host <= s->host) &&
           (objective != FIT_SECONDS || o->device + o->host <= s->both);
}
// Returns the number that `objective` minimizes. Seconds of format i of the list count as 2 i % more: a later format
// must gain more. Seconds are rounded to seven digits, so that rounding errors do not decide.
static double fit_value(const struct fit_choice *c, const struct fit_outcome *o, enum fit_objective objective) {
    switch (objective) {
    case FIT_SECONDS: return (float)(o->seconds * (1 + 0.02 * c->formats));
    case FIT_DEVICE: return o->device;
    case FIT_HOST: return o->host;
    }
    return INFINITY;
}

// Returns the least p in [least, most] with states_bytes[p] - states_bytes[least] >= bytes, or most + 1.
static int fit_percent_to_free(const double states_bytes[FIT_PERCENTAGES], int least, int most, double bytes) {
    int first = least, end = most + 1;
    while (first < end) {
        const int middle = (first + end) / 2;
        if (states_bytes[middle] - states_bytes[least] >= bytes)
            end = middle;
        else
            first = middle + 1;
    }
    return first;
}
// Sets n->c.percent, in [least, most], to the least with which the choice fits by its estimate or, where the device's
// memory is minimized, to the largest for which the host has room. Sets n->o, and n->value: INFINITY where none fits.
static void fit_set_percent(const struct fit_queue *q, struct fit_node *n, int least, int most) {
    const struct fit_space *s = q->space;
    const double *states_bytes = s->states_bytes[n->c.formats];
    n->value = INFINITY;
    if (least > most)
        return;
    n->c.percent = least;
    n->o = fit_estimate(q, n);
    if (q->objective == FIT_DEVICE) {
        const int beyond = fit_percent_to_free(states_bytes, least, most, s->host - n->o.host);
        const bool all = beyond > most || states_bytes[beyond] - states_bytes[least] == s->host - n->o.host;
        n->c.percent = beyond > most ? most : all || beyond == least ? beyond : beyond - 1;
    } else {
        const int enough = fit_percent_to_free(states_bytes, least, most, n->o.device - s->device);
        n->c.percent = enough > most ? most : enough;
    }
    n->o = fit_estimate(q, n);
    if (fit_meets_limits(s, &n->o, q->objective))
        n->value = fit_value(&n->c, &n->o, q->objective);
}

// Calls fit_set_percent with 0 if n->c.percent is 0, else with all others that are allowed: the set stays the same.
static void fit_set_any_percent(const struct fit_queue *q, struct fit_node *n) {
    const struct fit_space *s = q->space;
    if (n->c.percent > 0)
        fit_set_percent(q, n, s->least.percent > 1 ? s->least.percent : 1, s->most.percent);
    else
        fit_set_percent(q, n, 0, 0);
}
// Whether two choices are of one set: they offload the same kinds of buffers, in the same formats.
static bool fit_same_set(const struct fit_choice *a, const struct fit_choice *b) {
    return a->formats == b->formats && a->gradients == b->gradients && a->weights == b->weights &&
           (a->percent > 0) == (b->percent > 0) && (a->layers > 0) == (b->layers > 0);
}

// Returns the next of about `steps` values from least to most, or more than most if `value` was the last.
static int fit_next_value(int value, int least, int most, int steps) {
    const int step = (most - least + steps - 1) / steps, next = value + (step > 0 ? step : 1);
    return value < most && next > most ? most : next;
}

// Adds a choice to q->nodes, with a percentage that fits by its estimate; 0 stays 0. Adds nothing where none fits.
static void fit_add(struct fit_queue *q, struct fit_choice c) {
    struct fit_node n;
    if (q->count == q->capacity) {
        q->capacity = q->capacity > 0 ? 2 * q->capacity : 4096;
        q->nodes = (struct fit_node *)realloc(q->nodes, (size_t)q->capacity * sizeof *q->nodes);
        if (!q->nodes)
            fail("out of memory for the search of what fits");
    }
    memset(&n, 0, sizeof n);
    n.c = c;
    n.known = fit_is_known(q, &c) ? FIT_BY_GROUP : FIT_BY_FORMULA;
    fit_set_any_percent(q, &n);
    if (n.value < INFINITY)
        q->nodes[q->count++] = n;
}
// Adds choices of c's set, in steps. c.layers and c.percent only say whether the set offloads layers and states.
static void fit_add_set(struct fit_queue *q, struct fit_choice c) {
    const struct fit_space *s = q->space;
    const int L = s->num_layers, layers = c.layers, steps = layers ? FIT_STEPS_OFFLOADED : FIT_STEPS_PLAIN;
    const int least = !layers ? 0 : s->least.layers > 1 ? s->least.layers : 1, most = layers ? s->most.layers : 0;
    for (int k = 0; k < s->kinds - 1 || k == 0; k++)
        for (int first = k > 0; first <= (s->kinds > 1 ? L : 0); first = fit_next_value(first, 0, L, steps)) {
            c.recompute = k * L + first;
            for (c.layers = least; c.layers <= most;
                 c.layers = fit_next_value(c.layers, least, most, FIT_STEPS_OFFLOADED))
                if (c.recompute >= s->least.recompute && c.recompute <= s->most.recompute)
                    fit_add(q, c);
        }
}
// Adds choices of all sets within q->space->least and q->space->most to q->nodes. Their formats are `first` to `last`.
static void fit_add_sets(struct fit_queue *q, int first, int last) {
    const struct fit_space *s = q->space;
    struct fit_choice c;
    memset(&c, 0, sizeof c);
    for (c.formats = first; c.formats <= last; c.formats++)
        for (c.gradients = s->least.gradients; c.gradients <= s->most.gradients; c.gradients++)
            for (c.weights = s->least.weights; c.weights <= s->most.weights; c.weights++)
                for (c.percent = s->least.percent > 0; c.percent <= (s->most.percent > 0); c.percent++)
                    for (c.layers = s->least.layers > 0; c.layers <= (s->most.layers > 0); c.layers++)
                        fit_add_set(q, c);
}

// ---- The search ----

// Plans the groups of a node's choice. Nodes whose groups become known get a new estimate and percentage, or are out.
static void fit_correct(struct fit_queue *q, const struct fit_node *of) {
    const struct fit_choice c = of->c;
    fit_plan_groups_of(q, &c);
    for (int i = 0; i < q->count; i++) {
        struct fit_node *n = &q->nodes[i];
        if (n->known != FIT_BY_FORMULA || n->value == INFINITY || !fit_is_known(q, &n->c))
            continue;
        n->known = FIT_BY_GROUP;
        fit_set_any_percent(q, n);
    }
}

// Returns the node with the smallest value, or NULL if none is left. Of equal nodes, the least offload wins.
static struct fit_node *fit_next(const struct fit_queue *q) {
    struct fit_node *next = NULL;
    for (int i = 0; i < q->count; i++) {
        struct fit_node *n = &q->nodes[i];
        if (n->value < INFINITY &&
            (!next || n->value < next->value || (n->value == next->value && n->o.host < next->o.host)))
            next = n;
    }
    return next;
}

// Plans a node whose groups are known; a second call also places it. A misfit gets another percentage, or is out.
static void fit_plan_node(struct fit_queue *q, struct fit_node *n) {
    const struct fit_space *s = q->space;
    const bool placed = n->known >= FIT_UNPLACED;
    const struct fit_estimate e = fit_formula(s, &n->c);
    const struct fit_outcome by_group = fit_estimate(q, n), o = s->plan(s->context, &n->c, placed);
    const int percent = n->c.percent;
    q->plans++;
    n->device = o.device - e.device - FIT_ROUNDING;
    n->host = o.host - e.host - FIT_ROUNDING;
    n->seconds = o.seconds - fit_step_s(s, &e);
    n->known = placed ? FIT_PLANNED : FIT_UNPLACED;
    n->o = o;
    if (q->objective != FIT_SECONDS) { // a budget that is named is what a search with it asks for
        n->o.device = fit_larger(o.device, ceil(by_group.device));
        n->o.host = fit_larger(o.host, ceil(by_group.host));
    }
    n->value = fit_value(&n->c, &n->o, q->objective);
    if (fit_meets_limits(s, &o, q->objective))
        return;
    n->known = FIT_UNPLACED;
    if (percent == 0)
        n->value = INFINITY;
    else if (q->objective == FIT_DEVICE)
        fit_set_percent(q, n, s->least.percent > 1 ? s->least.percent : 1, percent - 1);
    else
        fit_set_percent(q, n, percent + 1, s->most.percent);
}

// Finds the fastest choice with formats [first, last], which the search may not choose, of groups planned already. If
// its estimated fit_value is below `value`, sets found->gain and found->gain_estimate to it. Replaces q->nodes.
static void fit_estimate_gain(struct fit_queue *q, int first, int last, double value, struct fit_found *found) {
    const struct fit_space *s = q->space;
    q->count = 0;
    fit_add_sets(q, first, last);
    for (int i = 0; i < q->count; i++) {
        struct fit_node *n = &q->nodes[i];
        const struct fit_estimate e = fit_formula(s, &n->c);
        n->o.seconds += fit_slack_s(s, &n->c, &e);
        const double gained = fit_value(&n->c, &n->o, FIT_SECONDS);
        if (n->known == FIT_BY_GROUP && gained < value) {
            value = gained;
            found->gain = n->c;
            found->gain_estimate = n->o;
        }
    }
}

// Adds a planned node to what is found, and takes all choices of its set out of the search.
static void fit_accept_best(struct fit_queue *q, const struct fit_node *n, struct fit_found *found) {
    const struct fit_choice c = n->c;
    found->best[found->count] = c;
    found->outcome[found->count++] = n->o;
    for (int i = 0; i < q->count; i++)
        if (fit_same_set(&q->nodes[i].c, &c))
            q->nodes[i].value = INFINITY;
}

static struct fit_found fit_search(const struct fit_space *s, enum fit_objective objective, int known_formats) {
    struct fit_found found;
    struct fit_queue q;
    double best = INFINITY;
    int most_plans = 0; // once the best is found
    memset(&found, 0, sizeof found);
    memset(&q, 0, sizeof q);
    q.space = s;
    q.objective = objective;
    for (int k = 0; k < s->kinds; k++)
        fit_plan_group(&q, FIT_GROUP_PLAIN, k);
    fit_add_sets(&q, s->least.formats, s->most.formats);
    while (found.count < FIT_BEST && (found.count == 0 || q.plans < most_plans)) {
        struct fit_node *n = fit_next(&q);
        if (!n)
            break;
        if (n->known == FIT_BY_FORMULA) {
            fit_correct(&q, n);
        } else if (n->known == FIT_PLANNED) {
            best = n->value < best ? n->value : best;
            fit_accept_best(&q, n, &found);
            most_plans = found.count == 1 ? q.plans + FIT_OTHERS_PLANS : most_plans;
        } else {
            fit_plan_node(&q, n);
        }
    }
    found.plans = q.plans;
    if (found.count > 0 && objective == FIT_SECONDS)
        fit_estimate_gain(&q, s->most.formats + 1, known_formats - 1, best, &found);
    free(q.nodes);
    return found;
}
