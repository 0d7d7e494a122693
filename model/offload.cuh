// Activations in host memory between forward and backward (--cpu-offloading-num-layers). What a layer keeps leaves the
// device after the layer's forward, while the next layer computes; at that layer's end the device's buffers are free.
// Backward goes by groups of layers, which are recomputed together: what a group needs comes back, into other buffers,
// while the group above it computes. At any time the activations of at most two layers, or groups, are on the device.
// All transfers begin and end within a micro-step, so that a graph can record it.
#pragma once
#include "model/state.cuh" // struct gpt, activation, offloaded_activations

// The addresses of an activation of a layer in the device's and the host's memory; both are live in this phase.
struct offload_operands {
    void *device, *host;
};
// Returns the addresses, live in this phase, of an activation of layer l for a transfer in `direction`; NULL: planning.
static struct offload_operands offload_operands(struct gpt *m, enum transfer_direction direction, int l,
                                                enum activation_id id) {
    struct offload_operands operands = {NULL, host_activation(m, l, id)};
    switch (direction) {
    case TRANSFER_TO_HOST: operands.device = activation_memory(m, PASS_TRAIN, l, id); break;
    case TRANSFER_TO_DEVICE: operands.device = activation_memory(m, PASS_BACKWARD, l, id); break;
    }
    return operands;
}

// Begins, in the caller's phase, the transfers of a set of layer l's activations. The later phase that calls
// offload_wait first calls offload_touch with the same set, which keeps the transfers' memory live until then.
static void offload_begin(struct gpt *m, enum transfer_direction direction, int l, uint32_t set) {
    for (int i = 0; i < ACT_COUNT; i++) {
        const enum activation_id id = (enum activation_id)i;
        const struct activation_row row = activation_row_of(m, PASS_TRAIN, l, id);
        if (!(set & (1u << i)) || row.bytes_per_token == 0)
            continue;
        const struct offload_operands at = offload_operands(m, direction, l, id);
        const bool to_host = direction == TRANSFER_TO_HOST;
        m->transfers[direction] =
            timeline_transfer(&m->timeline, direction, row.name, to_host ? at.host : at.device,
                              to_host ? at.device : at.host, activation_row_bytes(m, PASS_TRAIN, &row));
    }
}
// Keeps the operands of offload_begin's transfers of a set live up to this phase, which then calls offload_wait.
static void offload_touch(struct gpt *m, enum transfer_direction direction, int l, uint32_t set) {
    for (int i = 0; i < ACT_COUNT; i++) {
        const enum activation_id id = (enum activation_id)i;
        if (set & (1u << i) && activation_row_of(m, PASS_TRAIN, l, id).bytes_per_token > 0)
            offload_operands(m, direction, l, id);
    }
}
// Blocks later work of the device until all transfers begun in a direction are done, after offload_touch of each set.
static void offload_wait(struct gpt *m, enum transfer_direction direction) {
    timeline_transfer_wait(&m->timeline, &m->transfers[direction]);
}

// Opens a phase unless nothing is due: calls offload_wait for layer l - 1, begins to offload layer l (-1: embedding).
static void offload_layer(struct gpt *m, int l) {
    const uint32_t set = offloaded_activations(m, l), before = l < 0 ? 0 : offloaded_activations(m, l - 1);
    if (!(set | before))
        return;
    phase(m, PHASES_FORWARD, l, "offload");
    offload_touch(m, TRANSFER_TO_HOST, l - 1, before);
    offload_wait(m, TRANSFER_TO_HOST);
    offload_begin(m, TRANSFER_TO_HOST, l, set);
}

// Returns the members of layer k's offloaded activations that the backward of the group [first, last] reads. k goes
// from first - 1 (-1: the embedding), whose output is the group's input, to last, whose output the group doesn't read.
static uint32_t fetched_activations(const struct gpt *m, int first, int last, int k) {
    const uint32_t members = k < first ? BIT(OUT) : k < last ? ACT_ALL : ACT_ALL & ~BIT(OUT);
    return offloaded_activations(m, k) & members;
}
// Whether the backward of the group [first, last] reads any offloaded activation, also its input, from layer first - 1.
static bool group_is_offloaded(const struct gpt *m, int first, int last) {
    for (int k = first - 1; k <= last; k++)
        if (fetched_activations(m, first, last, k))
            return true;
    return false;
}
// Calls offload_wait for what the group of layers that ends with `last` needs, before its recomputation and backward,
// and begins to fetch what the group below it needs. Opens a phase for each, where there is any of this.
static void fetch_group(struct gpt *m, int last) {
    const int first = m->policy.group_first[last];
    if (group_is_offloaded(m, first, last)) {
        phase(m, PHASES_BACKWARD, last, "fetched");
        for (int k = first - 1; k <= last; k++)
            offload_touch(m, TRANSFER_TO_DEVICE, k, fetched_activations(m, first, last, k));
        offload_wait(m, TRANSFER_TO_DEVICE);
    }
    const int below = first - 1, below_first = below < 0 ? 0 : m->policy.group_first[below];
    if (below >= 0 && group_is_offloaded(m, below_first, below)) {
        phase(m, PHASES_BACKWARD, below, "fetch");
        for (int k = below_first - 1; k <= below; k++)
            offload_begin(m, TRANSFER_TO_DEVICE, k, fetched_activations(m, below_first, below, k));
    }
}
