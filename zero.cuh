// Which ranges of the flat buffers are whose, for a job of several ranks.
//
// A unit is what is computed with at a time: the head's tensors, a layer's, the embeddings'. Units are ranges of the flat
// buffers (parameters.cuh), in the order in which backward finishes their gradients. A unit is cut into pieces of at most
// --bucket-mib of fp32 gradients; a piece is reduced as soon as its unit's gradients are done. Each rank owns an equal part
// of each piece, so that every reduction and every gathering is balanced, and the parts do not depend on the ZeRO stage
// (Rajbhandari et al. 2020, arXiv 1910.02054):
//
//   stage 0   each rank holds and updates everything; gradients are reduced and gathered
//   stage 1   moments and master weights are held for the own parts only; gradients are reduced, updated parameters gathered
//   stage 2   gradients too: a unit's are reduced to the own parts after its backward, in each micro-step
//   stage 3   parameters too: a unit's are gathered before it is used, in forward and again in backward
//
// Units are padded to a multiple of the ranks, so that any number of ranks divides every piece; what a rank holds of a
// sharded buffer stands in the same order, without gaps: piece p's part lies at p.begin / ranks.
#pragma once
#include "parameters.cuh" // struct parameters, TENSOR_ALIGNMENT

struct piece {
    int64_t begin; // in the flat buffers
    int64_t part;  // elements of each rank: the piece is [begin, begin + ranks * part)
    int unit;
};

struct shards {
    int rank, ranks, stage;
    struct piece *pieces; // in flat order
    int count;
    int *first; // (units + 1) unit u consists of pieces first[u] .. first[u + 1] - 1
    int units;
    int64_t flat; // elements of a whole flat buffer
    int64_t largest_part;
};

// What a stage shards. With one rank nothing is.
static bool shards_optimizer(const struct shards *s) { return s->ranks > 1 && s->stage >= 1; }
static bool shards_gradients(const struct shards *s) { return s->ranks > 1 && s->stage >= 2; }
static bool shards_parameters(const struct shards *s) { return s->ranks > 1 && s->stage >= 3; }

// Cuts [begin, end) into pieces of at most about `most` elements, as equal as the alignment of their parts allows.
static void shards_cut(struct shards *s, int64_t begin, int64_t end, int64_t most, int unit) {
    const int64_t multiple = (int64_t)s->ranks * TENSOR_ALIGNMENT, n = end - begin;
    if (n == 0)
        return;
    const int64_t pieces = (n + most - 1) / most,
                  size = ((n + pieces - 1) / pieces + multiple - 1) / multiple * multiple;
    for (int64_t at = begin; at < end; at += size) {
        struct piece *p = &s->pieces[s->count++];
        p->begin = at;
        p->part = (end - at < size ? end - at : size) / s->ranks;
        p->unit = unit;
        s->largest_part = p->part > s->largest_part ? p->part : s->largest_part;
    }
}

static struct shards shards_create(const struct parameters *table, int rank, int ranks, int stage,
                                   int64_t bucket_bytes) {
    const int64_t most = ranks == 1 ? table->flat : bucket_bytes / (int64_t)sizeof(float); // one rank reduces nothing
    struct shards s;
    memset(&s, 0, sizeof s);
    s.rank = rank;
    s.ranks = ranks;
    s.stage = stage;
    s.units = table->num_units;
    s.flat = table->flat;
    s.pieces = (struct piece *)calloc((size_t)(s.flat / most) + (size_t)s.units + 1, sizeof *s.pieces);
    s.first = (int *)calloc((size_t)s.units + 1, sizeof *s.first);
    if (!s.pieces || !s.first)
        fail("out of memory for the table of shards");
    for (int unit = 0; unit < s.units; unit++) {
        s.first[unit] = s.count;
        if (ranks > 1)
            shards_cut(&s, table->unit_begin[unit], table->unit_begin[unit + 1], most, unit);
        else if (unit == 0)
            shards_cut(&s, 0, s.flat, most, unit);
    }
    s.first[s.units] = s.count;
    return s;
}
static void shards_free(struct shards *s) {
    free(s->pieces);
    free(s->first);
    memset(s, 0, sizeof *s);
}

// Elements of a buffer, sharded or whole.
static int64_t shards_elements(const struct shards *s, bool sharded) { return sharded ? s->flat / s->ranks : s->flat; }

// The first element of a piece that is this rank's, in the whole flat buffer.
static int64_t shards_own_begin(const struct shards *s, const struct piece *p) { return p->begin + s->rank * p->part; }

// Where an element of the own part of a piece lies in a buffer that is sharded or whole.
static int64_t shards_place(const struct shards *s, const struct piece *p, int64_t at, bool sharded) {
    return sharded ? p->begin / s->ranks + at - shards_own_begin(s, p) : at;
}

// The next range of [*at, end) that a buffer holds here: [*at, *at + n) of the flat buffer, which lies at *place of it.
// Returns n, 0 where nothing is left.
static int64_t shards_next(const struct shards *s, bool sharded, int64_t *at, int64_t end, int64_t *place) {
    if (!sharded) {
        *place = *at;
        return *at < end ? end - *at : 0;
    }
    for (int i = 0; i < s->count; i++) {
        const struct piece *p = &s->pieces[i];
        const int64_t own = shards_own_begin(s, p), first = own > *at ? own : *at;
        const int64_t last = own + p->part < end ? own + p->part : end;
        if (first >= last)
            continue;
        *at = first;
        *place = shards_place(s, p, first, true);
        return last - first;
    }
    return 0;
}
