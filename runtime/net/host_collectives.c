#include "runtime/net/host_collectives.h"
#include <string.h> // memcpy

#include "runtime/machine/float_convert.h" // float_to_bf16_bits
#include "runtime/net/exchange.h"          // exchange_all_to_all

enum { SUM_BLOCK = 1024 }; // elements whose sum stays in the L1 cache while contributions are added

size_t host_reduce_scatter_scratch_bytes(int64_t shard, int ranks, bool bf16) {
    // fp32: what is received from the other ranks. bf16: half as many bytes, and as many again for what is sent.
    return (size_t)(ranks - 1) * (size_t)shard * (bf16 ? 2 * sizeof(uint16_t) : sizeof(float));
}

// Returns the position of a rank's shard among the shards of all ranks but `own`, in rank order.
static int64_t position_among_others(int rank, int own) { return rank < own ? rank : rank - 1; }

// out (n) = in (n) in bf16, rounded to nearest, ties to even.
static void round_to_bf16(uint16_t *out, const float *in, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        out[i] = float_to_bf16_bits(in[i]);
}

// out (n) = the sum over all ranks, in rank order, of n elements, at most SUM_BLOCK: `own` (n) of this rank, and the
// first n of each other rank's row of `others` (ranks - 1, shard). `out` may be `own`.
static void sum_fp32(float *out, const float *own, const float *others, int64_t shard, int64_t n, int rank, int ranks) {
    float sum[SUM_BLOCK];
    for (int r = 0; r < ranks; r++) {
        const float *const in = r == rank ? own : others + position_among_others(r, rank) * shard;
        if (r == 0)
            memcpy(sum, in, (size_t)n * sizeof *sum);
        else
#pragma omp simd
            for (int64_t i = 0; i < n; i++)
                sum[i] += in[i];
    }
    memcpy(out, sum, (size_t)n * sizeof *sum);
}

// Sets out (n) to sum_fp32's sum, rounded to bf16. Rounds a copy of `own`; `others` (ranks - 1, shard) are bf16.
static void sum_bf16(float *out, const float *own, const uint16_t *others, int64_t shard, int64_t n, int rank,
                     int ranks) {
    float sum[SUM_BLOCK];
    uint16_t rounded_own[SUM_BLOCK];
    round_to_bf16(rounded_own, own, n);
    for (int r = 0; r < ranks; r++) {
        const uint16_t *const in = r == rank ? rounded_own : others + position_among_others(r, rank) * shard;
        if (r == 0) {
#pragma omp simd
            for (int64_t i = 0; i < n; i++)
                sum[i] = float_from_bf16_bits(in[i]);
        } else {
#pragma omp simd
            for (int64_t i = 0; i < n; i++)
                sum[i] += float_from_bf16_bits(in[i]);
        }
    }
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        out[i] = float_from_bf16_bits(float_to_bf16_bits(sum[i]));
}

void host_reduce_scatter(float *out, const float *buffer, int64_t shard, bool bf16, void *scratch, struct exchange *x) {
    const int64_t element_bytes = bf16 ? (int64_t)sizeof(uint16_t) : (int64_t)sizeof(float);
    uint16_t *const rounded = (uint16_t *)scratch + (x->ranks - 1) * shard; // after what is received
    for (int r = 0; r < x->ranks; r++) {
        if (r == x->rank)
            continue;
        const int64_t other = position_among_others(r, x->rank);
        x->send[r].bytes = x->receive[r].bytes = (size_t)(shard * element_bytes);
        x->receive[r].data = (char *)scratch + other * shard * element_bytes;
        x->send[r].data = bf16 ? (void *)(rounded + other * shard) : (void *)(buffer + r * shard);
        if (bf16)
            round_to_bf16(rounded + other * shard, buffer + r * shard, shard);
    }
    exchange_all_to_all(x, x->send, x->receive);
    for (int64_t i = 0; i < shard; i += SUM_BLOCK) {
        const int64_t left = shard - i, n = left < SUM_BLOCK ? left : (int64_t)SUM_BLOCK;
        const float *const own = buffer + x->rank * shard + i;
        if (bf16)
            sum_bf16(out + i, own, (const uint16_t *)scratch + i, shard, n, x->rank, x->ranks);
        else
            sum_fp32(out + i, own, (const float *)scratch + i, shard, n, x->rank, x->ranks);
    }
}

void host_all_gather(void *buffer, const void *own, size_t bytes, struct exchange *x) {
    char *const place = (char *)buffer + (size_t)x->rank * bytes;
    if (place != (const char *)own && bytes)
        memcpy(place, own, bytes);
    for (int r = 0; r < x->ranks; r++) {
        x->send[r].data = place;
        x->receive[r].data = (char *)buffer + (size_t)r * bytes;
        x->send[r].bytes = x->receive[r].bytes = bytes;
    }
    exchange_all_to_all(x, x->send, x->receive);
}

// Copies messages with `rank` end to end to `packed` or, with `unpacks`, from it; NULL: no copy. Returns their bytes.
static size_t pack_messages(const struct exchange_message *list, int count, int rank, char *packed, bool unpacks) {
    size_t bytes = 0;
    for (int i = 0; i < count; i++) {
        if (list[i].rank != rank || list[i].bytes == 0)
            continue;
        if (packed && unpacks)
            memcpy(list[i].data, packed + bytes, list[i].bytes);
        else if (packed)
            memcpy(packed + bytes, list[i].data, list[i].bytes);
        bytes += list[i].bytes;
    }
    return bytes;
}
void host_exchange(const struct exchange_message *sends, int num_sends, const struct exchange_message *receives,
                   int num_receives, void *scratch, struct exchange *x) {
    char *at = (char *)scratch;
    for (int r = 0; r < x->ranks; r++) {
        x->send[r].data = at;
        x->send[r].bytes = pack_messages(sends, num_sends, r, at, false);
        at += x->send[r].bytes;
        x->receive[r].data = r == x->rank ? x->send[r].data : at;
        x->receive[r].bytes = pack_messages(receives, num_receives, r, NULL, false);
        at += r == x->rank ? 0 : x->receive[r].bytes;
    }
    exchange_all_to_all(x, x->send, x->receive);
    for (int r = 0; r < x->ranks; r++)
        pack_messages(receives, num_receives, r, (char *)x->receive[r].data, true);
}
