// reduce_scatter, all_gather and an exchange of lists of messages, of host memory, each in one exchange_all_to_all. The
// rank that owns a shard adds up its contributions in fp32, in rank order. So a sum's bits depend neither on the owner
// nor on how a buffer is cut into shards and buckets: every ZeRO stage computes the same. A ring would send no less,
// (ranks - 1) / ranks of the buffer from each rank, but add in an order that differs from shard to shard.
#pragma once
#include <stdbool.h>   // bool
#include <stddef.h>    // size_t
#include <stdint.h>    // int64_t
#include <sys/cdefs.h> // __BEGIN_DECLS

struct exchange;

// A message of an exchange of uneven ranges: `bytes` at `data`, to a rank or from it.
struct exchange_message {
    int rank;
    void *data;
    size_t bytes;
};

__BEGIN_DECLS
// Returns the bytes of scratch memory that host_reduce_scatter needs for shards of `shard` elements.
size_t host_reduce_scatter_scratch_bytes(int64_t shard, int ranks, bool bf16);
// out (shard) = this rank's shard of the sum of all ranks' buffers (ranks, shard); `out` may be that shard of `buffer`.
// bf16: contributions and sum are rounded to bf16. scratch: host_reduce_scatter_scratch_bytes. Every rank calls it.
void host_reduce_scatter(float *out, const float *buffer, int64_t shard, bool bf16, void *scratch, struct exchange *x);
// buffer (ranks, bytes) = every rank's `own` (bytes), which may lie at its place in `buffer`. Every rank calls it.
void host_all_gather(void *buffer, const void *own, size_t bytes, struct exchange *x);
// Sends and receives lists of messages; every rank calls it. In a's list the ith message to b is, in b's list, the ith
// from a, of equal bytes. Messages to oneself are copied. No memory overlaps. scratch: the bytes of both lists.
void host_exchange(const struct exchange_message *sends, int num_sends, const struct exchange_message *receives,
                   int num_receives, void *scratch, struct exchange *x);
__END_DECLS
