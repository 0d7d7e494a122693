// The choices of --recompute-granularity auto: which layers are recomputed, what is offloaded, and in which formats.
// Formulas estimate what a choice takes, so that run/fit_search.cuh finds the best choice with few plans.
#pragma once
#include <math.h>    // ceil, floor
#include <stdbool.h> // bool

// One way to fit. recompute: k L + n: the first n of L layers are of kind k + 1, the others of kind k; kinds go from
// keeping all to keeping only the input. layers: how many of the first offload activations. percent: of the optimizer
// states, offloaded. gradients, weights: 1: offloaded. formats: index of fit_space's estimates; 0: as asked for.
struct fit_choice {
    int recompute, layers, percent, gradients, weights, formats;
};
struct fit_outcome {
    double device, host, seconds;
};
enum { FIT_FORMATS_MAX = 8, FIT_KINDS_MAX = 64, FIT_PERCENTAGES = 101 };

// Copies between the device's memory and the host's. copy_s: the time that the device itself spends on a byte; 0: none.
struct fit_bus {
    double bytes_s, copy_s; // bytes a second each way; seconds a byte
    double piece_bytes;     // of the update; nothing hides the first and the last one
};

struct fit_space {
    struct fit_choice least, most; // the range of each member
    int num_layers, kinds;         // kinds of layers, from the one that keeps all to the one that keeps its input
    // Of one layer by kind, the bytes that it keeps and the seconds of its recomputation
    double kept_bytes[FIT_KINDS_MAX], recompute_s[FIT_KINDS_MAX];
    double forward_s, backward_s;        // of one layer, without recomputation
    double head_s;                       // of a micro-step, beside the layers
    double weights_bytes, updated_bytes; // all weights; the weights that the update changes
    double outside;                      // the share of weights and gradients outside the layers: embeddings and head
    bool tied;                           // head and embeddings are one
    double gradients_bytes[FIT_FORMATS_MAX];
    double states_bytes[FIT_FORMATS_MAX][FIT_PERCENTAGES]; // offloaded, by the percentage; 100: all of them
    double update_s[FIT_FORMATS_MAX];                      // without a bus
    struct fit_bus bus;
    double micro_steps;
    // Limits, in bytes: device, host, and both together
    double device, host, both;
    // Plans a choice. Where not `placed`, its bytes are the lower bounds of any placing. `context` is the caller's.
    struct fit_outcome (*plan)(void *context, const struct fit_choice *choice, bool placed);
    void *context;
};

// Returns the seconds of an update that takes update_s without copies, and copies to_host and to_device bytes.
static double fit_update_on_bus_s(double update_s, double to_host, double to_device, const struct fit_bus *bus);

// What a choice takes, estimated. exposed_s, the wait for the bus, is a part of micro_step_s, which plans correct.
struct fit_estimate {
    double device, host, micro_step_s, exposed_s, update_s;
};
// Returns what a choice takes by formulas, without a plan.
static struct fit_estimate fit_formula(const struct fit_space *s, const struct fit_choice *c);

// ---------------------------------------------------------------------------------------------------------------------

static double fit_larger(double a, double b) { return a > b ? a : b; }

static double fit_update_on_bus_s(double update_s, double to_host, double to_device, const struct fit_bus *bus) {
    const double slower = fit_larger(to_host, to_device);
    double seconds = update_s + bus->copy_s * (to_host + to_device);
    seconds = fit_larger(seconds, slower / bus->bytes_s);
    seconds += (to_host < bus->piece_bytes ? to_host : bus->piece_bytes) / bus->bytes_s;
    return seconds + (to_device < bus->piece_bytes ? to_device : bus->piece_bytes) / bus->bytes_s;
}

// Returns for how many seconds of a micro-step `count` layers of a kind wait for the bus: by how much their copies take
// longer than their computation. away, weights, gradients: a layer's offloaded bytes; away: of activations.
static double fit_exposed_s(const struct fit_space *s, int kind, int count, double away, double weights,
                            double gradients) {
    const double HIDES = 1.1; // a copy begins before the last phase of a layer ends
    const double forward_s = s->forward_s + s->bus.copy_s * (away + weights),
                 backward_s = s->backward_s + s->recompute_s[kind] + s->bus.copy_s * (away + weights + 2 * gradients),
                 forward_bus_s = fit_larger(away, weights) / s->bus.bytes_s,
                 backward_bus_s = (away + weights + gradients) / s->bus.bytes_s;
    return count *
           (fit_larger(forward_bus_s - HIDES * forward_s, 0) + fit_larger(backward_bus_s - HIDES * backward_s, 0));
}
// Returns the seconds that a micro-step waits for copies of the head and the embeddings, which no layer's computation
// hides. weights, gradients: bytes of the whole model, 0 where not offloaded.
static double fit_exposed_outside_s(const struct fit_space *s, double weights, double gradients) {
    const double a_byte_s = fit_larger(1 / s->bus.bytes_s - s->bus.copy_s, 0);
    return (s->tied ? 2 : 1) * s->outside * (weights + gradients) * a_byte_s;
}

static struct fit_estimate fit_formula(const struct fit_space *s, const struct fit_choice *c) {
    const int L = s->num_layers, k = c->recompute / L, first = c->recompute % L; // of kind k + 1
    const int first_away = c->layers < first ? c->layers : first, rest_away = c->layers - first_away;
    const double weights = c->weights * s->weights_bytes, updated = c->weights * s->updated_bytes,
                 gradients = c->gradients * s->gradients_bytes[c->formats],
                 states = s->states_bytes[c->formats][c->percent];
    const double layer_weights = (1 - s->outside) * weights / L, layer_gradients = (1 - s->outside) * gradients / L;
    struct fit_estimate e;
    double kept = (L - first) * s->kept_bytes[k], away = rest_away * s->kept_bytes[k];
    e.exposed_s = fit_exposed_outside_s(s, weights, gradients) +
                  fit_exposed_s(s, k, rest_away, s->kept_bytes[k], layer_weights, layer_gradients) +
                  fit_exposed_s(s, k, L - first - rest_away, 0, layer_weights, layer_gradients);
    e.micro_step_s = s->head_s + L * (s->forward_s + s->backward_s) + (L - first) * s->recompute_s[k];
    if (first > 0) {
        kept += first * s->kept_bytes[k + 1];
        away += first_away * s->kept_bytes[k + 1];
        e.exposed_s += fit_exposed_s(s, k + 1, first_away, s->kept_bytes[k + 1], layer_weights, layer_gradients) +
                       fit_exposed_s(s, k + 1, first - first_away, 0, layer_weights, layer_gradients);
        e.micro_step_s += first * s->recompute_s[k + 1];
    }
    if (c->layers > 0) // the last one's output, which the layer after it reads, comes back with what that layer kept
        e.exposed_s = fit_larger(e.exposed_s - s->kept_bytes[s->kinds - 1] / s->bus.bytes_s, 0);
    e.micro_step_s += e.exposed_s + s->bus.copy_s * 2 * (away + weights + gradients);
    e.host = away + weights + gradients + states;
    e.device = kept + s->weights_bytes + s->gradients_bytes[c->formats] +
               s->states_bytes[c->formats][FIT_PERCENTAGES - 1] - e.host;
    e.update_s = fit_update_on_bus_s(s->update_s[c->formats], states + updated, states + updated + gradients, &s->bus);
    return e;
}
