// Groups of ranks, and the collectives between the ranks of a group.
#pragma once
#include "kernels/collectives.cuh" // collective_exchange

// The kinds of groups in a grid of ranks, of which each row is `size` ranks in order: GROUP_ROW, a rank's row;
// GROUP_COLUMN, the ranks that have its place in their rows.
enum group_kind { GROUP_ROW, GROUP_COLUMN };
struct rank_group {
    int first, stride, count; // ranks first, first + stride, ...
};
// The group of a kind that `rank` is in. size divides ranks.
static struct rank_group rank_group_of(enum group_kind kind, int rank, int ranks, int size) {
    struct rank_group group = {rank, 1, 1};
    switch (kind) {
    case GROUP_ROW:
        group.first = rank - rank % size;
        group.count = size;
        break;
    case GROUP_COLUMN:
        group.first = rank % size;
        group.stride = size;
        group.count = ranks / size;
        break;
    }
    return group;
}
// Begins an all-gather in a group: buffer (count, bytes) = `own` (bytes) of each rank of the group, which is not in
// `buffer`. Every rank of the job begins it, with the group of its own. `name` and the result are as
// collective_reduce_scatter's.
static uint64_t group_all_gather(struct collectives *c, struct rank_group group, void *buffer, void *own, size_t bytes,
                                 const char *name, struct device *dev) {
    struct exchange_message *sends = (struct exchange_message *)calloc((size_t)group.count * 2, sizeof *sends);
    if (!sends)
        fail("no memory for the messages of a group");
    struct exchange_message *receives = sends + group.count;
    for (int i = 0; i < group.count; i++) {
        sends[i].rank = receives[i].rank = group.first + i * group.stride;
        sends[i].data = own;
        receives[i].data = (char *)buffer + (size_t)i * bytes;
        sends[i].bytes = receives[i].bytes = bytes;
    }
    const uint64_t ticket = collective_exchange(c, sends, group.count, receives, group.count, name, dev);
    free(sends);
    return ticket;
}
