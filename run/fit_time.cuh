// Predicts the time of a training step from its plan, without the exchange between ranks. A micro-step is simulated on
// three clocks: the device's, which computes phase by phase and waits for copies where the plan says so, and one for
// each direction of the bus, which carries one copy after the other. The update copies and computes pieces, and takes
// as long as the slowest of memory and bus, and the first and the last piece.
#pragma once
#include "config/fit.h"        // main_dtype_bytes
#include "run/fit_space.cuh"   // struct fit_bus, fit_update_on_bus_s
#include "run/model.cuh"       // struct gpt
#include "run/planned_gpu.cuh" // planned_gpu, gpu_name
#include "run/utilization.cuh" // head_flops, measure_matmul

// Rates a second. traffic: bytes between the device's cores and its memory; bus: bytes each way to the host's memory.
struct fit_rates {
    double flops, traffic, bus; // bus: --bus-gbps, else measured; with --plan by data sheet, or half of traffic
    double fp8_flop;            // what a flop of a product in FP8 costs in flops
    char source[160];           // of the flops, in words
};
struct fit_time {
    double step_s, micro_step_s, update_s;
    double compute_s;                        // of a micro-step without a bus
    double moved_bytes[TRANSFER_DIRECTIONS]; // of a step
};

// Predicts the time of a recorded model's step without exchange between ranks; 0 without training. rates->flops: not 0.
static struct fit_time fit_predict(const struct gpt *m, const struct fit_rates *rates);

// Returns the rates of --plan-gpu or the device. flops and traffic are by data sheet, else by a measured matmul. The
// bus is by --bus-gbps, else measured. Measures in at most `room` bytes. --plan measures nothing: without a known sheet
// it takes an H100's rates, or a CPU's. flops is 0 if --plan-gpu's sheet lacks this precision; auto then ends the run.
static struct fit_rates fit_rates_of(const struct config *c, size_t room, struct device *dev);
// Returns what predictions and the choice of recomputation count by.
static struct activation_prices fit_prices(const struct fit_rates *r);

// ---- Rates ----

// Returns how many matmul flops take as long as a byte of memory traffic, by a constant. Two cores have 330 GFLOP/s
// (bf16 with AMX: 1800) and 30 GB/s; an H200's sheet has 67 TFLOP/s (bf16: 790) and 4.3 TB/s.
static double fit_flops_per_byte(const struct device *dev) {
    const bool bf16 = sizeof(floatX) == 2;
    return device_is_gpu(dev) ? (bf16 ? 184 : 16) : (bf16 ? 60 : 11);
}

// The share of a data sheet's peak that matmuls reach in training: Hopper's clock falls (docs/gpu/measured.md).
static const double FIT_OF_PEAK = 0.8, FIT_OF_HOPPERS_PEAK = 0.7;
static const double FIT_FP8_FLOP = 790.0 / 1400, FIT_CPU_FP8_FLOP = 1.3; // measured: H200, ncu; EPYC (docs/fp8.md)
static const double FIT_CPU_TRAFFIC = 30e9, FIT_CPU_FLOPS = sizeof(floatX) == 2 ? 1800e9 : 330e9; // of two cores

// Returns the peak flop/s of a data sheet in this precision, or 0 if gpu is NULL or the sheet has none.
static double fit_sheet_flops(const struct gpu_peak *gpu) {
    return gpu ? 1e12 * (sizeof(floatX) == 2 ? gpu->bf16_tflops : gpu->fp32_tflops) : 0;
}
// Returns a GPU's rates by its data sheet, which must have flop/s.
static struct fit_rates fit_rates_of_gpu(const struct gpu_peak *gpu) {
    struct fit_rates r;
    memset(&r, 0, sizeof r);
    r.flops = (gpu->capability == 90 ? FIT_OF_HOPPERS_PEAK : FIT_OF_PEAK) * fit_sheet_flops(gpu);
    r.traffic = 1e9 * gpu->memory_gbps;
    r.bus = 1e9 * gpu_link_gbps(gpu->link);
    char name[GPU_NAME_MAX];
    snprintf(r.source, sizeof r.source, "%s by its data sheet", gpu_name(name, gpu));
    return r;
}
// Returns the measured flop/s of a square matmul, as large as DEVICE_PEAK_MATMUL and `room` bytes allow, or 0.
static double fit_measure_flops(const struct config *c, size_t room, struct device *dev) {
    const size_t most = measured_matmul_bytes(DEVICE_PEAK_MATMUL, dev), bytes = most < room ? most : room;
    void *memory = device_allocate(bytes);
    const double flops = measure_matmul(memory, bytes, c->training.seed, dev);
    device_free(memory, bytes);
    return flops;
}
// Returns the measured bytes a second between device and host, the slower way. Allocates at most `room` bytes in all.
static double fit_measure_bus(size_t room, struct device *dev) {
    const size_t share = room / (2 * TRANSFER_DIRECTIONS); // two of each in the device's memory and in the host's
    const size_t bytes = share < (size_t)TRANSFER_MEASURED_BYTES ? share : (size_t)TRANSFER_MEASURED_BYTES;
    struct transfers transfers;
    double gbps[TRANSFER_DIRECTIONS];
    transfers_open(&transfers, 0, dev);
    transfers_measure(&transfers, dev, bytes, gbps);
    transfers_close(&transfers, dev);
    return 1e9 * (gbps[0] < gbps[1] ? gbps[0] : gbps[1]);
}

static struct fit_rates fit_rates_of(const struct config *c, size_t room, struct device *dev) {
    struct fit_rates r;
    char name[256];
    const struct gpu_peak *gpu = planned_gpu(c);
    memset(&r, 0, sizeof r);
    device_name(name, sizeof name, dev);
    if (!*name && c->memory.plan && !DEVICE_MEMORY_IS_HOSTS)
        snprintf(name, sizeof name, "H100 80GB HBM3");
    if (gpu == NULL && *name)
        gpu = gpu_peak_find(name, 0);
    if (*c->memory.plan_gpu && fit_sheet_flops(gpu) == 0) {
        if (c->recompute.recompute_granularity == RECOMPUTE_AUTO)
            fail(
                "--plan-gpu '%s': its data sheet gives no rate of %s, by which --recompute-granularity auto would choose",
                c->memory.plan_gpu, FLOATX_NAME);
        return r; // nothing is predicted
    }
    if (fit_sheet_flops(gpu) > 0)
        r = fit_rates_of_gpu(gpu);
    else if (!c->memory.plan) {
        r.flops = fit_measure_flops(c, room, dev);
        snprintf(r.source, sizeof r.source, "a matmul measured");
    }
    if (r.flops == 0) {
        r.flops = FIT_CPU_FLOPS * dev->threads / 2;
        r.traffic = FIT_CPU_TRAFFIC * dev->threads / 2;
        snprintf(r.source, sizeof r.source, "a CPU's %d threads, about", dev->threads);
    } else if (r.traffic == 0) {
        r.traffic = r.flops / fit_flops_per_byte(dev);
    }
    if (c->states.bus_gbps > 0)
        r.bus = 1e9 * c->states.bus_gbps;
    else if (!c->memory.plan)
        r.bus = fit_measure_bus(room, dev);
    else if (r.bus == 0)
        r.bus = r.traffic / 2; // copies within the host's memory
    r.fp8_flop = device_is_gpu(dev) || gpu ? FIT_FP8_FLOP : FIT_CPU_FP8_FLOP;
    return r;
}
static struct activation_prices fit_prices(const struct fit_rates *r) {
    const struct activation_prices prices = {r->flops / r->traffic, r->fp8_flop};
    return prices;
}

// ---- Prediction ----

// Whether any weight of layer l's linear layers is trained; else backward computes only the gradients of inputs.
static bool fit_trains_products(const struct gpt *m, int l) {
    bool trains = false;
    for (int i = 0; i < LINEAR_COUNT; i++)
        trains = trains || is_trained(m, l, linear_row((enum linear)i, &m->shape.layer).weight);
    return trains;
}
// Returns the bytes a token that a layer's casts of inputs, or of gradients, move: 2 of bf16, 1 each of two forms.
static double fit_cast_bytes(const struct layer_shape *layer, bool gradients) {
    double bytes = 0;
    for (int i = 0; layer->kept_input != KEPT_FLOATX && i < LINEAR_COUNT; i++) {
        const struct linear_row row = linear_row((enum linear)i, layer);
        bytes += 4.0 * (gradients ? row.outputs : row.inputs);
    }
    return bytes;
}
// Returns the bytes that casts of all weights to both forms move.
static double fit_weight_cast_bytes(const struct gpt *m) {
    double bytes = 0;
    for (int i = 0; i < LINEAR_COUNT; i++) {
        const struct linear_row row = linear_row((enum linear)i, &m->shape.layer);
        bytes += (2 + 1 + 2 + 1) * (double)row.outputs * row.inputs;
    }
    return bytes * (m->fp8.end_layer - m->fp8.first_layer);
}
// Returns a group's flops a token in layer l (-1: outside layers); 0 outside a micro-step.
static double fit_group_cost(const struct gpt *m, enum phase_group group, int l, struct activation_prices prices) {
    const struct layer_shape *s = &m->shape.layer, layer = layer_shape_at(s, l);
    const double forward = activation_cost(ACT_ALL, &layer, prices);
    switch (group) {
    case PHASES_HEAD: return head_flops(m, true);
    case PHASES_FORWARD: return l < 0 ? 0 : forward + prices.byte * fit_cast_bytes(&layer, false);
    case PHASES_RECOMPUTE: return l < 0 ? 0 : activation_cost(policy_recomputed(&m->policy, l, s), &layer, prices);
    case PHASES_BACKWARD:
        return l < 0 ? 0 : (fit_trains_products(m, l) ? 2 : 1) * forward + prices.byte * fit_cast_bytes(&layer, true);
    case PHASES_UPDATE:
    case PHASES_AVERAGES:
    case PHASES_EVALUATE:
    case PHASES_PREFILL:
    case PHASES_GENERATE: break;
    }
    return 0;
}
// Returns the seconds that each of a micro-step's phases [first, end) computes, (end - first), for free().
static double *fit_phase_costs(const struct gpt *m, int first, int end, const struct fit_rates *r) {
    enum { GROUPS = PHASES_BACKWARD + 1 }; // of a micro-step
    const int layers = m->shape.L + 1;     // place 0: of no layer
    double *cost_s = (double *)plan_allocate((size_t)(end - first) + 1, sizeof *cost_s);
    double *share_s = (double *)plan_allocate((size_t)GROUPS * (size_t)layers, sizeof *share_s); // (GROUPS, layers)
    int *count = (int *)plan_allocate((size_t)GROUPS * (size_t)layers, sizeof *count);           // of phases
    const double tokens = (double)m->config.training.micro_batch_size * m->config.model.seq_length;
    const struct plan_phase *phases = m->timeline.plan.phases;
    for (int p = first; p < end; p++)
        count[phases[p].group * layers + phases[p].layer + 1]++;
    for (int i = 0; i < GROUPS * layers; i++)
        if (count[i] > 0) {
            const double cost = fit_group_cost(m, (enum phase_group)(i / layers), i % layers - 1, fit_prices(r));
            share_s[i] = cost * tokens / r->flops / count[i];
        }
    for (int p = first; p < end; p++)
        cost_s[p - first] = share_s[phases[p].group * layers + phases[p].layer + 1];
    free(share_s);
    free(count);
    return cost_s;
}

// Returns the bus of the model's device by the rates. A CPU itself makes the copies, and so spends time on each byte.
static struct fit_bus fit_bus_of(const struct gpt *m, const struct fit_rates *r) {
    const double PIECE_BYTES = device_is_gpu(m->dev) ? 64 << 20 : 1 << 20; // of the update
    struct fit_bus bus = {r->bus, 0, PIECE_BYTES};
    if (!device_is_gpu(m->dev)) // a CPU copies by itself
        bus.copy_s = 2 / r->traffic;
    return bus;
}

// Returns the simulated seconds of a micro-step, phases [first, end), with copies. *compute_s: without copies.
static double fit_play(const struct gpt *m, int first, int end, const struct fit_rates *r, double *compute_s) {
    const struct plan *plan = &m->timeline.plan;
    double *cost_s = fit_phase_costs(m, first, end, r);
    double *done_s = (double *)plan_allocate((size_t)plan->transfer_count + 1, sizeof *done_s);
    const double copy_s = fit_bus_of(m, r).copy_s;
    double clock_s = 0, free_s[TRANSFER_DIRECTIONS] = {0, 0};
    int next = 0, waiting = 0; // transfers are in the order in which they begin; all before `waiting` were waited for
    *compute_s = 0;
    while (next < plan->transfer_count && plan->transfers[next].phase < first)
        next++;
    waiting = next;
    for (int p = first; p < end; p++) {
        for (int i = waiting; i < next; i++)
            if (plan->transfers[i].waited_phase == p && done_s[i] > clock_s)
                clock_s = done_s[i];
        while (waiting < next && plan->transfers[waiting].waited_phase >= 0 &&
               plan->transfers[waiting].waited_phase <= p)
            waiting++;
        for (; next < plan->transfer_count && plan->transfers[next].phase == p; next++) {
            const struct plan_transfer *t = &plan->transfers[next];
            double *bus_s = &free_s[t->direction];
            *bus_s = (*bus_s > clock_s ? *bus_s : clock_s) + (double)t->bytes / r->bus;
            done_s[next] = *bus_s;
            clock_s += copy_s * (double)t->bytes;
            if (t->waited_phase == p && done_s[next] > clock_s)
                clock_s = done_s[next];
        }
        clock_s += cost_s[p - first];
        *compute_s += cost_s[p - first];
    }
    for (int d = 0; d < TRANSFER_DIRECTIONS; d++)
        clock_s = free_s[d] > clock_s ? free_s[d] : clock_s;
    free(done_s);
    free(cost_s);
    return clock_s;
}

// Returns the bytes that the update reads and writes in the device's memory: this rank's parameters, states, averages,
// gradients (norm and update), and what Muon hands from pass to pass: an update written, summed up, scaled, read.
static double fit_update_traffic(const struct gpt *m) {
    const struct config *c = &m->config;
    const struct optimizer *o = &m->optimizer;
    const double elements = (double)o->elements, x = (double)sizeof(floatX);
    const double averaged = c->training.ema_decay > 0 ? elements * 4 : 0; // master weights, read once more
    return 2 * (optimizer_states_bytes(o) + elements * x) +
           2 * elements * main_dtype_bytes(c->states.main_grads_dtype) +
           5 * x * (double)optimizer_elements(o, GROUP_MUON) + averaged;
}
// Returns the seconds of the update on the device, its memory traffic and Muon's products, without copies over the bus.
static double fit_update_device_s(const struct gpt *m, const struct fit_rates *r) {
    return fit_update_traffic(m) / r->traffic + m->muon.rank_flops / r->flops;
}

static struct fit_time fit_predict(const struct gpt *m, const struct fit_rates *r) {
    const struct fit_bus bus = fit_bus_of(m, r);
    const struct plan *plan = &m->timeline.plan;
    const int first = m->timeline.region_first[REGION_MICRO_STEP], update = m->timeline.region_first[REGION_UPDATE];
    struct fit_time time;
    double moved[TRANSFER_DIRECTIONS] = {0, 0}; // by the update
    size_t bytes[TRANSFER_DIRECTIONS];
    memset(&time, 0, sizeof time);
    if (!m->trains)
        return time;
    time.micro_step_s = fit_play(m, first, update, r, &time.compute_s);
    int end = plan->phase_count;
    for (int region = 0; region < REGION_COUNT; region++)
        if (m->timeline.region_first[region] > update && m->timeline.region_first[region] < end)
            end = m->timeline.region_first[region];
    for (int i = 0; i < plan->transfer_count; i++)
        if (plan->transfers[i].phase >= update && plan->transfers[i].phase < end)
            moved[plan->transfers[i].direction] += (double)plan->transfers[i].bytes;
    time.update_s =
        fit_update_on_bus_s(fit_update_device_s(m, r), moved[TRANSFER_TO_HOST], moved[TRANSFER_TO_DEVICE], &bus);
    gpt_step_transfer_bytes(m, bytes);
    for (int d = 0; d < TRANSFER_DIRECTIONS; d++)
        time.moved_bytes[d] = (double)bytes[d];
    const double casts_s = fit_weight_cast_bytes(m) / r->traffic * (m->fp8.caches_weights ? 1 : m->steps.most);
    time.step_s = m->steps.most * time.micro_step_s + casts_s + time.update_s;
    return time;
}
