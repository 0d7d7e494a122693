// Which rank owns which ranges of the flat buffers, by the stages of ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054).
// Units (the tensors of the head, of a layer, of the embeddings) are ranges of the flat buffers, in the order in which
// backward finishes their gradients. A unit is cut into buckets of about --bucket-mib of fp32 at most, reduced when the
// gradients are complete. Each rank owns an equal shard of each bucket, for balance. All stages have the same shards:
//   stage 0   each rank holds and updates everything; gradients are all-reduced
//   stage 1   a rank holds the optimizer state of its shards; gradients are reduced to shards, new parameters gathered
//   stage 2   gradients too: a unit's are reduce-scattered after its backward, in each micro-step
//   stage 3   parameters too: a unit's are gathered before it is used, in forward and again in backward
// Units are padded to a multiple of the ranks. A rank's shards fill a sharded buffer, bucket b's at b.begin / ranks.
#pragma once
#include "model/parameters.cuh" // struct flat_layout, TENSOR_ALIGNMENT

struct bucket {
    int64_t begin; // element of the flat buffers
    int64_t shard; // elements of each rank's shard: the bucket is [begin, begin + ranks * shard)
    int unit;
};

struct shards {
    int rank, ranks, stage;
    struct bucket *buckets; // in flat order
    int count;
    int *first; // (units + 1) unit u consists of buckets first[u] .. first[u + 1] - 1
    int units;
    int64_t flat; // elements of a whole flat buffer
    int64_t largest_shard;
};

// Whether optimizer states are sharded: from stage 1 on, but never on one rank.
static bool shards_optimizer(const struct shards *s) { return s->ranks > 1 && s->stage >= 1; }
// Whether gradients are sharded: from stage 2 on, but never on one rank.
static bool shards_gradients(const struct shards *s) { return s->ranks > 1 && s->stage >= 2; }
// Whether parameters are sharded: in stage 3, but never on one rank.
static bool shards_parameters(const struct shards *s) { return s->ranks > 1 && s->stage >= 3; }

// Appends a unit's elements [begin, end) to s->buckets, which must have room for them, as buckets of equal size, about
// `most` > 0 elements or less. The last bucket may be smaller.
static void shards_cut(struct shards *s, int64_t begin, int64_t end, int64_t most, int unit) {
    const int64_t multiple = (int64_t)s->ranks * TENSOR_ALIGNMENT, n = end - begin;
    if (n == 0)
        return;
    const int64_t buckets = (n + most - 1) / most,
                  size = ((n + buckets - 1) / buckets + multiple - 1) / multiple * multiple;
    for (int64_t at = begin; at < end; at += size) {
        struct bucket *b = &s->buckets[s->count++];
        b->begin = at;
        b->shard = (end - at < size ? end - at : size) / s->ranks;
        b->unit = unit;
        s->largest_shard = b->shard > s->largest_shard ? b->shard : s->largest_shard;
    }
}

// Returns the buckets of a layout's units, which shards_free frees. A bucket is at most about bucket_bytes of fp32; 0
// makes each unit one bucket. An empty unit has no bucket. The layout may be freed before the result.
static struct shards shards_create(const struct flat_layout *layout, int units, int rank, int ranks, int stage,
                                   int64_t bucket_bytes) {
    const int64_t most = bucket_bytes > 0 ? bucket_bytes / (int64_t)sizeof(float) : layout->flat;
    struct shards s;
    memset(&s, 0, sizeof s);
    s.rank = rank;
    s.ranks = ranks;
    s.stage = stage;
    s.units = units;
    s.flat = layout->flat;
    s.buckets =
        (struct bucket *)calloc((size_t)(most > 0 ? s.flat / most : 0) + (size_t)s.units + 1, sizeof *s.buckets);
    s.first = (int *)calloc((size_t)s.units + 1, sizeof *s.first);
    if (!s.buckets || !s.first)
        fail("out of memory for the table of shards");
    for (int unit = 0; unit < s.units; unit++) {
        s.first[unit] = s.count;
        shards_cut(&s, layout->unit_begin[unit], layout->unit_begin[unit + 1], most, unit);
    }
    s.first[s.units] = s.count;
    return s;
}
// Frees the table of shards. The buffers that the table describes stay.
static void shards_free(struct shards *s) {
    free(s->buckets);
    free(s->first);
    memset(s, 0, sizeof *s);
}

// The number of elements of this rank's flat buffer: of the rank's shards if `sharded`, else of all tensors, with gaps.
static int64_t shards_elements(const struct shards *s, bool sharded) { return sharded ? s->flat / s->ranks : s->flat; }

// Returns the first element, in the flat buffers, of this rank's shard of bucket b.
static int64_t shards_own_begin(const struct shards *s, const struct bucket *b) {
    return b->begin + s->rank * b->shard;
}

// Returns where this rank's buffer, whole or sharded, has element `at`, which must be in this rank's shard of b.
static int64_t shards_place(const struct shards *s, const struct bucket *b, int64_t at, bool sharded) {
    return sharded ? b->begin / s->ranks + at - shards_own_begin(s, b) : at;
}

// Finds the next elements of [*at, end) in this rank's buffer: all if it is whole, else one bucket's at a time. Sets
// *at to the first, *place to its index in the buffer. Returns how many, 0 at the end; the caller adds that to *at.
static int64_t shards_next(const struct shards *s, bool sharded, int64_t *at, int64_t end, int64_t *place) {
    if (!sharded) {
        *place = *at;
        return *at < end ? end - *at : 0;
    }
    for (int i = 0; i < s->count; i++) {
        const struct bucket *b = &s->buckets[i];
        const int64_t own = shards_own_begin(s, b), first = own > *at ? own : *at;
        const int64_t last = own + b->shard < end ? own + b->shard : end;
        if (first >= last)
            continue;
        *at = first;
        *place = shards_place(s, b, first, true);
        return last - first;
    }
    return 0;
}
