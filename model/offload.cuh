// Activations in host memory between forward and backward (--cpu-offloading-num-layers). What a layer keeps leaves the
// device while the next layer's forward computes. Backward goes by groups of layers that are recomputed together: what
// a group needs comes back, into other buffers, while the group above it computes. So at most two layers', or groups',
// activations are on the device. All transfers begin and end within a micro-step, so that a graph can record it.
#pragma once
#include "model/state.cuh" // struct gpt, activation, offloaded_activations

// The two ends of a transfer: an activation's buffers on the device and on the host, both live in this phase.
struct offload_operands {
    void *device, *host;
};
// Returns the buffers of a layer's activation for a transfer in `direction`, live in this phase; NULL when planning.
static struct offload_operands offload_operands(struct gpt *m, enum transfer_direction direction, int l,
                                                enum activation_id id) {
    struct offload_operands operands = {NULL, host_activation(m, l, id)};
    switch (direction) {
    case TRANSFER_TO_HOST: operands.device = activation_memory(m, PASS_TRAIN, l, id); break;
    case TRANSFER_TO_DEVICE: operands.device = activation_memory(m, PASS_BACKWARD, l, id); break;
    }
    return operands;
}

// Begins to transfer a set of layer l's activations, in this phase. The later phase that calls offload_enqueue_wait
// first calls offload_touch with the same arguments, which keeps the transfers' memory live until then.
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
// Keeps the memory of offload_begin's transfers live up to this phase, which calls offload_enqueue_wait next.
static void offload_touch(struct gpt *m, enum transfer_direction direction, int l, uint32_t set) {
    for (int i = 0; i < ACT_COUNT; i++) {
        const enum activation_id id = (enum activation_id)i;
        if (set & (1u << i) && activation_row_of(m, PASS_TRAIN, l, id).bytes_per_token > 0)
            offload_operands(m, direction, l, id);
    }
}
// Makes the device's later work wait for all transfers in `direction`. Call offload_touch for each set before.
static void offload_enqueue_wait(struct gpt *m, enum transfer_direction direction) {
    timeline_transfer_wait(&m->timeline, &m->transfers[direction]);
}

// Makes the device wait until layer l - 1's activations are on the host, and begins to copy layer l's (-1: the
// embedding's) there. Opens a phase for this; does nothing if neither layer has any to copy.
static void offload_layer_to_host(struct gpt *m, int l) {
    const uint32_t set = offloaded_activations(m, l), before = l < 0 ? 0 : offloaded_activations(m, l - 1);
    if (!(set | before))
        return;
    phase(m, PHASES_FORWARD, l, "offload");
    offload_touch(m, TRANSFER_TO_HOST, l - 1, before);
    offload_enqueue_wait(m, TRANSFER_TO_HOST);
    offload_begin(m, TRANSFER_TO_HOST, l, set);
}

// Returns the set of layer k's offloaded activations that the backward of the group of layers [first, last] reads. In
// layer first - 1 (-1: the embedding) that is only OUT, the group's input; in layer `last` it is all but OUT.
static uint32_t fetched_activations(const struct gpt *m, int first, int last, int k) {
    const uint32_t members = k < first ? BIT(OUT) : k < last ? ACT_ALL : ACT_ALL & ~BIT(OUT);
    return offloaded_activations(m, k) & members;
}
// Whether the backward of the group of layers [first, last] reads any offloaded activation, its input included.
static bool group_is_offloaded(const struct gpt *m, int first, int last) {
    for (int k = first - 1; k <= last; k++)
        if (fetched_activations(m, first, last, k))
            return true;
    return false;
}
// Makes the device wait for the offloaded activations that the group of layers ending with `last` reads, and begins to
// fetch what the group below reads. Opens a phase for each, if it has any. Call it before the group's recomputation.
static void fetch_group(struct gpt *m, int last) {
    const int first = m->policy.group_first[last];
    if (group_is_offloaded(m, first, last)) {
        phase(m, PHASES_BACKWARD, last, "fetched");
        for (int k = first - 1; k <= last; k++)
            offload_touch(m, TRANSFER_TO_DEVICE, k, fetched_activations(m, first, last, k));
        offload_enqueue_wait(m, TRANSFER_TO_DEVICE);
    }
    const int below = first - 1, below_first = below < 0 ? 0 : m->policy.group_first[below];
    if (below >= 0 && group_is_offloaded(m, below_first, below)) {
        phase(m, PHASES_BACKWARD, below, "fetch");
        for (int k = below_first - 1; k <= below; k++)
            offload_begin(m, TRANSFER_TO_DEVICE, k, fetched_activations(m, below_first, below, k));
    }
}
