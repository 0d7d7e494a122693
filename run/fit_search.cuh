// The search for the cheapest way to fit a training step into the device's and the host's memory: which layers are
// recomputed, what is offloaded, in which formats.
//
// A choice's bytes and time are known by its plan, which takes milliseconds to a tenth of a second; there are millions
// of choices. So they are estimated by what is linear in them, and the best by estimate are planned. A plan corrects the
// estimates of its set: of all choices that offload the same kinds of buffers in the same formats. A set is settled when
// no other choice of it is estimated to be better than one that was planned and fits. The search ends when the best sets
// are settled, and no other is estimated to be better. This file knows no model: what plans is a function of its caller.
#pragma once
#include <math.h>    // INFINITY, ceil, floor
#include <stdbool.h> // bool
#include <stdlib.h>  // calloc, free
#include <string.h>  // memset, memcmp

// One way to fit. recompute: k L + n, of L layers, on the ladder from nothing to all: the first n layers are of kind
// k + 1, the others of kind k; layers: the first ones, whose activations are offloaded; percent: of the optimizer states,
// offloaded; formats: index into the estimates of fit_space, 0: as asked for.
struct fit_choice {
    int recompute, layers, percent, gradients, weights, formats;
};
// What a choice takes: bytes of device and host memory, seconds of a step.
struct fit_outcome {
    double device, host, seconds;
};
enum { FIT_FORMATS_MOST = 8, FIT_KINDS_MOST = 64, FIT_BEST = 3, FIT_TRIES = 12, FIT_SETS_MOST = 16 * FIT_FORMATS_MOST };

// What a search is over.
struct fit_space {
    struct fit_choice least, most; // the range of each member
    int num_layers, kinds;         // kinds of layers, from the one that keeps all to the one that keeps its input
    // Estimates: of one layer by kind, the bytes that it keeps and the seconds of its recomputation
    double kept_bytes[FIT_KINDS_MOST], recompute_s[FIT_KINDS_MOST];
    double compute_s; // of a micro-step without recomputation
    double weights_bytes, gradients_bytes[FIT_FORMATS_MOST], states_bytes[FIT_FORMATS_MOST];
    double update_s[FIT_FORMATS_MOST]; // without a bus
    double bus;                        // bytes a second each way
    double micro_steps;
    // Limits, in bytes: device, host, and both together
    double device, host, both;
    // Plans a choice. `context` is the caller's.
    struct fit_outcome (*plan)(void *context, const struct fit_choice *choice);
    void *context;
};

// What the search looks for, within the limits of what it does not minimise.
enum fit_objective { FIT_SECONDS, FIT_DEVICE, FIT_HOST };
struct fit_found {
    int count, plans; // of best, sorted; choices that were planned
    struct fit_choice best[FIT_BEST];
    struct fit_outcome outcome[FIT_BEST];
    // FIT_SECONDS: the formats that would gain most, where only formats 0 are allowed; 0: none
    struct fit_choice gain;
    struct fit_outcome gain_estimate;
};

// Finds the best choices of different sets, with at most `most_plans` plans. Ties go to what is lossless, then to what
// offloads less. `known_formats`: how many formats there are estimates for; those from space->most.formats + 1 on are
// only estimated, for `gain`.
static struct fit_found fit_search(const struct fit_space *space, enum fit_objective objective, int most_plans,
                                   int known_formats);

// ---------------------------------------------------------------------------------------------------------------------

// All choices with the same formats, and the same kinds of buffers offloaded.
struct fit_set {
    struct fit_choice kind;         // layers and percent: 0 or 1
    struct fit_outcome correction;  // plan less estimate, of the last plan
    double margin;                  // bytes that limits are lowered by, where estimates fell short
    struct fit_choice next, chosen; // the best by estimate; the best that was planned and fits
    double next_value, value;       // their values; INFINITY: none
    struct fit_outcome outcome;     // of `chosen`
    struct fit_choice tried[FIT_TRIES];
    int tries;
    bool settled;
};

static double fit_most(double a, double b) { return a > b ? a : b; }

// Bytes that the first `layers` layers keep, and the seconds of all layers' recomputation.
static double fit_kept_bytes(const struct fit_space *s, int recompute, int layers) {
    const int k = recompute / s->num_layers, n = recompute % s->num_layers, first = layers < n ? layers : n;
    return (first > 0 ? first * s->kept_bytes[k + 1] : 0) + (layers - first) * s->kept_bytes[k];
}
static double fit_recompute_s(const struct fit_space *s, int recompute) {
    const int k = recompute / s->num_layers, n = recompute % s->num_layers;
    return (n > 0 ? n * s->recompute_s[k + 1] : 0) + (s->num_layers - n) * s->recompute_s[k];
}

// Seconds for which the copies of offloaded activations outlast a pass's computation, layer by layer.
static double fit_exposed_s(const struct fit_space *s, const struct fit_choice *c, double pass_s) {
    const int k = c->recompute / s->num_layers, n = c->recompute % s->num_layers, first = c->layers < n ? c->layers : n;
    const double layer_s = pass_s / s->num_layers;
    return (first > 0 ? first * fit_most(s->kept_bytes[k + 1] / s->bus - layer_s, 0) : 0) +
           (c->layers - first) * fit_most(s->kept_bytes[k] / s->bus - layer_s, 0);
}

static struct fit_outcome fit_estimate(const struct fit_space *s, const struct fit_choice *c,
                                       const struct fit_outcome *correction) {
    struct fit_outcome e;
    const double away = fit_kept_bytes(s, c->recompute, c->layers), g = s->gradients_bytes[c->formats],
                 states = s->states_bytes[c->formats], part = states * c->percent / 100;
    e.host = away + c->gradients * g + c->weights * s->weights_bytes + part;
    e.device = fit_kept_bytes(s, c->recompute, s->num_layers) + g + s->weights_bytes + states - e.host;
    const double weights = c->weights * s->weights_bytes, gradients = c->gradients * g;
    const double forward = fit_most(s->compute_s / 3 + fit_exposed_s(s, c, s->compute_s / 3), weights / s->bus),
                 compute = s->compute_s * 2 / 3 + fit_recompute_s(s, c->recompute),
                 backward = fit_most(compute + fit_exposed_s(s, c, compute), (away + weights + gradients) / s->bus),
                 update = fit_most(s->update_s[c->formats], (part + weights + gradients) / s->bus);
    e.seconds = s->micro_steps * (forward + backward) + update;
    e.device += correction->device;
    e.host += correction->host;
    e.seconds += correction->seconds;
    return e;
}

// What is minimised. A lossy format must gain 2 % of the time; offloading everything costs a thousandth.
static double fit_value(const struct fit_choice *c, const struct fit_outcome *o, enum fit_objective objective) {
    const double offloaded = o->host / fit_most(o->host + o->device, 1);
    switch (objective) {
    case FIT_SECONDS: return o->seconds * (1 + 0.02 * c->formats + 0.001 * offloaded);
    case FIT_DEVICE: return o->device;
    case FIT_HOST: return o->host;
    }
    return INFINITY;
}
static bool fit_fits(const struct fit_space *s, const struct fit_outcome *o, double margin,
                     enum fit_objective objective) {
    return (objective == FIT_DEVICE || o->device <= s->device - margin) &&
           (objective == FIT_HOST || o->host <= s->host) &&
           (objective != FIT_SECONDS || o->device + o->host <= s->both - margin);
}

static bool fit_was_tried(const struct fit_set *set, const struct fit_choice *c) {
    for (int i = 0; i < set->tries; i++)
        if (memcmp(&set->tried[i], c, sizeof *c) == 0)
            return true;
    return false;
}

// The percentage of the states that a choice with a given remainder needs, or may have.
static int fit_percent(const struct fit_space *s, const struct fit_set *set, struct fit_choice c, int least, int most,
                       enum fit_objective objective) {
    c.percent = 0;
    const struct fit_outcome none = fit_estimate(s, &c, &set->correction);
    const double states = fit_most(s->states_bytes[c.formats], 1);
    if (objective == FIT_DEVICE) {
        const double room = floor(100 * (s->host - none.host) / states);
        return room >= most ? most : room > least ? (int)room : least;
    }
    const double need = ceil(100 * (none.device - s->device + set->margin) / states);
    return need <= least ? least : need < most ? (int)need : most;
}

// The least that is worth to be a set's own: what was asked for, else 1 or `some`.
static int fit_least(int least, int most, int some) {
    const int wanted = least > 0 ? least : some > 1 ? some : 1;
    return wanted < most ? wanted : most;
}

// Finds the set's best choice by estimate.
static void fit_propose(const struct fit_space *s, struct fit_set *set, enum fit_objective objective) {
    const struct fit_choice *kind = &set->kind;
    const int some = objective == FIT_SECONDS ? 5 : 1;
    const int layers_least = kind->layers ? fit_least(s->least.layers, s->most.layers, some * s->num_layers / 80) : 0;
    const int percent_least = kind->percent ? fit_least(s->least.percent, s->most.percent, some) : 0;
    struct fit_choice c = *kind;
    set->next_value = INFINITY;
    for (c.recompute = s->least.recompute; c.recompute <= s->most.recompute; c.recompute++)
        for (c.layers = layers_least; c.layers <= (kind->layers ? s->most.layers : 0); c.layers++) {
            c.percent = kind->percent ? fit_percent(s, set, c, percent_least, s->most.percent, objective) : 0;
            const struct fit_outcome e = fit_estimate(s, &c, &set->correction);
            const double value = fit_value(&c, &e, objective);
            if (value < set->next_value && fit_fits(s, &e, set->margin, objective)) {
                set->next = c;
                set->next_value = value;
            }
        }
}

// Fills in all sets that the space allows; returns their number.
static int fit_sets(const struct fit_space *s, struct fit_set sets[FIT_SETS_MOST], int formats_least,
                    int formats_most) {
    int count = 0;
    struct fit_choice c;
    memset(&c, 0, sizeof c);
    for (c.formats = formats_least; c.formats <= formats_most; c.formats++)
        for (c.gradients = s->least.gradients; c.gradients <= s->most.gradients; c.gradients++)
            for (c.weights = s->least.weights; c.weights <= s->most.weights; c.weights++)
                for (c.percent = s->least.percent > 0; c.percent <= (s->most.percent > 0); c.percent++)
                    for (c.layers = s->least.layers > 0; c.layers <= (s->most.layers > 0); c.layers++) {
                        memset(&sets[count], 0, sizeof sets[count]);
                        sets[count].kind = c;
                        sets[count++].value = INFINITY;
                    }
    return count;
}

// Plans the set's next choice and corrects the estimates by it.
static void fit_try(const struct fit_space *s, struct fit_set *set, enum fit_objective objective) {
    const struct fit_outcome zero = {0, 0, 0};
    const struct fit_choice c = set->next;
    const struct fit_outcome raw = fit_estimate(s, &c, &zero), o = s->plan(s->context, &c);
    const double value = fit_value(&c, &o, objective);
    set->correction.device = o.device - raw.device;
    set->correction.host = o.host - raw.host;
    set->correction.seconds = o.seconds - raw.seconds;
    set->tried[set->tries++] = c;
    if (fit_fits(s, &o, 0, objective) && value < set->value) {
        set->chosen = c;
        set->value = value;
        set->outcome = o;
    }
    fit_propose(s, set, objective);
    // Estimates that lead back to a choice that was planned, and is not as good, fall short: more room is asked for.
    for (int i = 0; i < 8 && set->next_value < 0.998 * set->value && fit_was_tried(set, &set->next); i++) {
        set->margin += 0.01 * s->device;
        fit_propose(s, set, objective);
    }
    set->settled = set->next_value == INFINITY || set->tries == FIT_TRIES || fit_was_tried(set, &set->next) ||
                   set->next_value > 0.998 * set->value;
}

// The formats beyond those that are allowed that would gain most, by the estimates for what the best choice offloads.
static void fit_estimate_gain(const struct fit_space *s, const struct fit_set *best, int known_formats,
                              struct fit_found *found) {
    struct fit_space lossy = *s;
    double least = best->value;
    lossy.most.formats = known_formats - 1;
    struct fit_set *sets = (struct fit_set *)calloc(FIT_SETS_MOST, sizeof *sets);
    const int count = sets ? fit_sets(&lossy, sets, s->most.formats + 1, known_formats - 1) : 0;
    for (int i = 0; i < count; i++) {
        sets[i].correction = best->correction;
        fit_propose(&lossy, &sets[i], FIT_SECONDS);
        if (sets[i].next_value < least) {
            least = sets[i].next_value;
            found->gain = sets[i].next;
            found->gain_estimate = fit_estimate(s, &sets[i].next, &sets[i].correction);
        }
    }
    free(sets);
}

// The set that a choice belongs to, of `count`.
static struct fit_set *fit_set_of(struct fit_set *sets, int count, const struct fit_choice *c) {
    for (int i = 0; i < count; i++) {
        const struct fit_choice *kind = &sets[i].kind;
        if (kind->formats == c->formats && kind->gradients == c->gradients && kind->weights == c->weights &&
            kind->percent == (c->percent > 0) && kind->layers == (c->layers > 0))
            return &sets[i];
    }
    return &sets[0];
}

// A search whose first plan, which corrects all sets, is of the choice `from`.
static struct fit_found fit_search_from(const struct fit_space *s, const struct fit_choice *from,
                                        enum fit_objective objective, int most_plans, int known_formats) {
    struct fit_found found;
    struct fit_set *sets = (struct fit_set *)calloc(FIT_SETS_MOST, sizeof *sets), *first = NULL;
    memset(&found, 0, sizeof found);
    if (!sets)
        return found;
    const int count = fit_sets(s, sets, s->least.formats, s->most.formats);
    struct fit_set *begin = fit_set_of(sets, count, from);
    begin->next = *from;
    fit_try(s, begin, objective);
    found.plans = 1;
    for (int i = 0; i < count; i++)
        if (&sets[i] != begin) {
            sets[i].correction = begin->correction;
            fit_propose(s, &sets[i], objective);
        }
    while (found.count < FIT_BEST) {
        struct fit_set *set = NULL;
        double least = INFINITY;
        for (int i = 0; i < count; i++) {
            const double value = sets[i].settled ? sets[i].value : fmin(sets[i].value, sets[i].next_value);
            if (value < least) {
                least = value;
                set = &sets[i];
            }
        }
        if (!set)
            break;
        if (!set->settled && found.plans < most_plans) {
            fit_try(s, set, objective);
            found.plans++;
            continue;
        }
        if (set->value < INFINITY) {
            first = first ? first : set;
            found.best[found.count] = set->chosen;
            found.outcome[found.count++] = set->outcome;
        }
        set->settled = true;
        set->value = INFINITY;
        set->next_value = INFINITY;
    }
    if (first && objective == FIT_SECONDS && known_formats > s->most.formats + 1) {
        first->value = fit_value(&found.best[0], &found.outcome[0], objective);
        fit_estimate_gain(s, first, known_formats, &found);
    }
    free(sets);
    return found;
}

// What a plan has beside its estimate differs between the choice that offloads nothing and one that barely fits: where
// the first finds nothing, the leanest choice is where the estimates are corrected.
static struct fit_found fit_search(const struct fit_space *s, enum fit_objective objective, int most_plans,
                                   int known_formats) {
    struct fit_found found = fit_search_from(s, &s->least, objective, most_plans, known_formats);
    if (found.count > 0 || objective != FIT_SECONDS)
        return found;
    const struct fit_found lean = fit_search_from(s, &s->least, FIT_DEVICE, most_plans, 0);
    const int plans = found.plans + lean.plans;
    if (lean.count > 0 && fit_fits(s, &lean.outcome[0], 0, objective))
        found = fit_search_from(s, &lean.best[0], objective, most_plans, known_formats);
    else
        found.plans = 0;
    found.plans += plans;
    return found;
}
