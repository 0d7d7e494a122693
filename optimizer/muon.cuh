// Which matrices Muon updates, in which waves they are orthogonalized, and by which rank. Each rank has the momentum of
// its own elements (zero/shards.cuh). But a matrix is orthogonalized whole, by one rank, its owner. The others send the
// owner their parts of the update, and get back their parts of the orthogonal factor.
//   update   (places of the wave) this rank's elements of the momentum's update, in flat order
//   whole    the matrices of the wave that this rank owns, one after the other, each aligned
// Where each rank holds all states (one rank, or stage 0), it makes the whole update, orthogonalizes its own matrices
// where they are, and sends their factors to all others. A wave is a run of consecutive tensors. The last comes first,
// as the next forward needs its layers first. A matrix has the same bits for any number of ranks.
#pragma once
#include "kernels/collectives.cuh"     // struct exchange_message, collective_exchange
#include "optimizer/orthogonalize.cuh" // orthogonalize, struct newton_schulz
#include "optimizer/state.cuh"         // struct optimizer, muon_updates
#include <stdlib.h>                    // qsort

struct muon_rows { // rows [first, first + rows) of a linear layer's weight
    int first, rows;
};
struct muon_matrix {
    int64_t begin; // in the flat buffers
    int rows, cols;
    int tensor;    // of the table
    int owner;     // rank
    int64_t place; // in the owner's `whole`, elements
};
struct muon_wave {
    int first, end;      // matrices
    int64_t begin, stop; // elements of the flat buffers, the gaps within too
    int64_t place, n;    // this rank's places of them: [place, place + n)
};

struct muon {
    struct optimizer *o; // not owned
    struct newton_schulz iteration;
    struct muon_matrix *matrices; // in flat order
    int count;
    struct muon_wave *waves; // in flat order
    int num_waves;
    double flops, rank_flops;                  // of an update: in all, and of the most loaded rank of each wave
    int64_t update_max, whole_max;             // elements of the largest wave's `update` and `whole`, on any rank
    struct exchange_message *sends, *receives; // room for a wave's messages
    size_t workspace_bytes;
    int table_id, update_id, whole_id;
    struct flat_tensors table; // of the matrices, with the scale of their updates, in the device's memory
};

// Cuts a weight by rows into Muon's matrices: QKV by `split`, FC in two if gated. Returns how many. cuts: (3 s->G + 4).
static int muon_cut(struct muon_rows *cuts, const struct tensor *t, const struct layer_shape *s,
                    enum config_muon_split_qkv split) {
    const int q = s->H * s->D, kv = s->G * s->D, of_group = q / s->G;
    int count = 0;
#define CUT(at, size)                                                                                                  \
    do {                                                                                                               \
        cuts[count].first = (at);                                                                                      \
        cuts[count++].rows = (size);                                                                                   \
    } while (0)
    if (t->parameter == PARAM_FC_W && s->gated) {
        CUT(0, s->F);
        CUT(s->F, s->F);
        return count;
    }
    if (t->parameter != PARAM_QKV_W) {
        CUT(0, t->rows);
        return count;
    }
    switch (split) {
    case MUON_SPLIT_NONE: CUT(0, t->rows); break;
    case MUON_SPLIT_QKV:
        CUT(0, q);
        CUT(q, kv);
        CUT(q + kv, kv);
        break;
    case MUON_SPLIT_GROUPS:
        for (int g = 0; g < s->G; g++)
            CUT(g * of_group, of_group);
        for (int g = 0; g < 2 * s->G; g++)
            CUT(q + g * s->D, s->D);
        break;
    }
#undef CUT
    return count;
}
// Makes the table u->matrices: begin, rows and columns of each matrix that Muon updates. Owners are assigned later.
static void muon_make_matrices(struct muon *u, const struct layer_shape *s) {
    const struct optimizer *o = u->o;
    const struct parameters *table = o->zero->table;
    const int most = 3 * s->G + 4; // of a tensor
    struct muon_rows *cuts = (struct muon_rows *)calloc((size_t)most, sizeof *cuts);
    u->matrices = (struct muon_matrix *)calloc((size_t)table->num_tensors * (size_t)most, sizeof *u->matrices);
    if (!cuts || !u->matrices)
        fail("out of memory for the table of matrices");
    for (int i = 0; i < table->num_tensors; i++) {
        const struct tensor *t = &table->tensors[i];
        if (!muon_updates(o->config, t))
            continue;
        const int count = muon_cut(cuts, t, s, o->config->training.muon_split_qkv);
        for (int k = 0; k < count; k++) {
            const struct muon_matrix matrix = {
                t->offset + (int64_t)cuts[k].first * t->cols, cuts[k].rows, t->cols, i, 0, 0};
            u->matrices[u->count++] = matrix;
        }
    }
    free(cuts);
}
static int64_t matrix_elements(const struct muon_matrix *m) { return (int64_t)m->rows * m->cols; }
static double matrix_flops(const struct muon *u, const struct muon_matrix *m) {
    return orthogonalize_flops(m->rows, m->cols, &u->iteration);
}
// Returns the factor, by the matrix's shape, on Muon's update of a matrix, without the learning rate. Changes nothing.
static float muon_update_scale(const struct config *c, const struct muon_matrix *m) {
    return (float)(muon_scale(c->training.muon_scale_mode, m->rows, m->cols) * c->training.muon_extra_scale_factor);
}

// ---- waves and owners ----

struct muon_cost {
    double flops;
    int matrix;
};
// Compares costs for qsort: the costliest matrix comes first, of equal ones the first in flat order.
static int muon_costlier(const void *left, const void *right) {
    const struct muon_cost *a = (const struct muon_cost *)left, *b = (const struct muon_cost *)right;
    return a->flops != b->flops ? (a->flops < b->flops ? 1 : -1) : a->matrix - b->matrix;
}
// Gives matrices [first, end) their owners: the costliest first, each to the rank with the least load so far. Returns
// the flops of the most loaded rank. costs (end - first) and load (ranks) are scratch memory.
static double muon_assign_owners(struct muon *u, int first, int end, int ranks, struct muon_cost *costs, double *load) {
    double most = 0;
    for (int r = 0; r < ranks; r++)
        load[r] = 0;
    for (int i = first; i < end; i++) {
        costs[i - first].flops = matrix_flops(u, &u->matrices[i]);
        costs[i - first].matrix = i;
    }
    qsort(costs, (size_t)(end - first), sizeof *costs, muon_costlier);
    for (int i = 0; i < end - first; i++) {
        int least = 0;
        for (int r = 1; r < ranks; r++)
            least = load[r] < load[least] ? r : least;
        u->matrices[costs[i].matrix].owner = least;
        load[least] += costs[i].flops;
        most = load[least] > most ? load[least] : most;
    }
    return most;
}
// Returns the end, a matrix's index, of a wave from matrix `first` on that has `tensors` tensors, or all that are left.
static int muon_wave_end(const struct muon *u, int first, int tensors) {
    int end = first;
    for (int last = -1; end < u->count; end++)
        if (u->matrices[end].tensor != last) {
            last = u->matrices[end].tensor;
            if (tensors-- == 0)
                break;
        }
    return end;
}
// Fills u->waves, each with the matrices of up to `tensors` tensors, and sets the matrices' owners. Returns the flops
// of each wave's most loaded rank, summed over the waves. costs (u->count) and load (ranks) are scratch memory.
static double muon_assign_waves(struct muon *u, int tensors, int ranks, struct muon_cost *costs, double *load) {
    double flops = 0;
    u->num_waves = 0;
    for (int first = 0, end; first < u->count; first = end) {
        end = muon_wave_end(u, first, tensors);
        flops += muon_assign_owners(u, first, end, ranks, costs, load);
        u->waves[u->num_waves].first = first;
        u->waves[u->num_waves++].end = end;
    }
    return flops;
}
// Makes the waves, for muon_free, and sets owners and flops. Tries 1, 2, 4 ... tensors a wave until the most loaded
// ranks' flops, summed over the waves, are at most 1.1 times an even share, or until there is only one wave.
static void muon_make_waves(struct muon *u) {
    const int ranks = u->o->zero->shards.ranks;
    double all = 0, *load = (double *)calloc((size_t)ranks, sizeof *load);
    struct muon_cost *costs = (struct muon_cost *)calloc((size_t)u->count, sizeof *costs);
    u->waves = (struct muon_wave *)calloc((size_t)u->count + 1, sizeof *u->waves);
    if (!u->waves || !load || !costs)
        fail("out of memory for the table of matrices");
    for (int i = 0; i < u->count; i++)
        all += matrix_flops(u, &u->matrices[i]);
    u->flops = all;
    for (int tensors = 1; tensors < 2 * u->count + 2; tensors *= 2) {
        u->rank_flops = muon_assign_waves(u, tensors, ranks, costs, load);
        if (u->rank_flops <= 1.1 * all / ranks)
            break;
    }
    free(load);
    free(costs);
}

// Whether matrices are copied to be orthogonalized: all are if states are sharded, or if one lacks TENSOR_ALIGNMENT.
static bool muon_needs_copies(const struct muon *u) {
    bool needs = optimizer_is_sharded(u->o);
    for (int i = 0; i < u->count; i++)
        needs = needs || u->matrices[i].begin % TENSOR_ALIGNMENT != 0;
    return needs;
}
// Sets where a wave of matrices [first, end) lies: at elements [begin, stop) of the flat buffers, and this rank's part
// of them at [place, place + n) of its states. n must be 0 before; it stays 0 where the rank has no part.
static void muon_place_wave(struct muon *u, struct muon_wave *w) {
    const struct shards *s = &u->o->zero->shards;
    const bool sharded = optimizer_is_sharded(u->o);
    const struct muon_matrix *last = &u->matrices[w->end - 1];
    w->begin = u->matrices[w->first].begin;
    w->stop = last->begin + matrix_elements(last);
    int64_t at = w->begin, place, n;
    for (; (n = shards_next(s, sharded, &at, w->stop, &place)) > 0; at += n) {
        w->place = w->n == 0 ? place : w->place;
        w->n = place + n - w->place;
    }
}
// The number of elements that suffices for a placed wave's `update` on any rank; if states are unsharded, w->n.
static int64_t muon_update_max(const struct muon *u, const struct muon_wave *w) {
    const struct shards *s = &u->o->zero->shards;
    int64_t n = 0;
    if (!optimizer_is_sharded(u->o))
        return w->n;
    for (int i = 0; i < s->count; i++) {
        const struct bucket *b = &s->buckets[i];
        if (b->begin < w->stop && b->begin + b->shard * s->ranks > w->begin)
            n += b->shard;
    }
    return n;
}
// Sets the elements that each wave covers, the matrices' places in `whole`, and update_max and whole_max, which suffice
// on any rank. whole_max is 0 if no matrix is copied. The waves must have their matrices, and these their owners.
static void muon_place_waves(struct muon *u) {
    const int ranks = u->o->zero->shards.ranks;
    int64_t *used = (int64_t *)calloc((size_t)ranks, sizeof *used);
    if (!used)
        fail("out of memory for the table of matrices");
    for (int i = 0; i < u->num_waves; i++) {
        struct muon_wave *w = &u->waves[i];
        muon_place_wave(u, w);
        const int64_t update = muon_update_max(u, w);
        u->update_max = update > u->update_max ? update : u->update_max;
        for (int r = 0; r < ranks; r++)
            used[r] = 0;
        for (int k = w->first; k < w->end; k++) {
            struct muon_matrix *m = &u->matrices[k];
            m->place = used[m->owner];
            used[m->owner] += (matrix_elements(m) + TENSOR_ALIGNMENT - 1) / TENSOR_ALIGNMENT * TENSOR_ALIGNMENT;
            u->whole_max = used[m->owner] > u->whole_max ? used[m->owner] : u->whole_max;
        }
    }
    if (!muon_needs_copies(u))
        u->whole_max = 0;
    free(used);
}

// ---- messages ----

// Finds the first range at or after element *at of the flat buffers in which `rank` has elements of matrix m. Sets *at
// to its begin and returns its length, 0 if none is left; the caller adds the length to *at for the next call. A range
// is within one bucket or, if states are unsharded, the rest of m.
static int64_t matrix_range_next(const struct muon *u, const struct muon_matrix *m, int rank, int64_t *at) {
    const struct shards *s = &u->o->zero->shards;
    const int64_t end = m->begin + matrix_elements(m);
    if (!optimizer_is_sharded(u->o))
        return *at < end ? end - *at : 0;
    for (int i = s->first[unit_of(u->o->zero->table, &u->o->zero->table->tensors[m->tensor])]; i < s->count; i++) {
        const struct bucket *b = &s->buckets[i];
        const int64_t own = b->begin + rank * b->shard, first = own > *at ? own : *at,
                      last = own + b->shard < end ? own + b->shard : end;
        if (b->begin >= end)
            return 0;
        if (first < last) {
            *at = first;
            return last - first;
        }
    }
    return 0;
}
// Returns the address, in a wave's `update`, of this rank's element `at` of the flat buffers; NULL if `update` is NULL.
static floatX *muon_update_at(const struct muon *u, const struct muon_wave *w, floatX *update, int64_t at) {
    const struct shards *s = &u->o->zero->shards;
    int64_t first = at, place = 0;
    shards_next(s, optimizer_is_sharded(u->o), &first, at + 1, &place);
    return update ? update + (place - w->place) : NULL;
}
// The messages that this rank sends and receives. On the way back the two lists change their roles (muon_moves_back).
struct muon_moves {
    struct exchange_message *sends, *receives;
    int num_sends, num_receives;
};
// Appends a message of n elements to a list, which must have room for it, and adds 1 to *count.
static void muon_add_message(struct exchange_message *list, int *count, int rank, floatX *data, int64_t n) {
    list[*count].rank = rank;
    list[*count].data = data;
    list[(*count)++].bytes = (size_t)n * sizeof *data;
}
// Lists the messages that bring a sharded wave's matrices to their owners: each rank's ranges go from `update` to the
// matrix's place in the owner's `whole`. A rank also sends messages to itself. The next call overwrites the lists.
static struct muon_moves muon_moves_to_owners(const struct muon *u, const struct muon_wave *w, floatX *update,
                                              floatX *whole) {
    const struct shards *s = &u->o->zero->shards;
    struct muon_moves moves = {u->sends, u->receives, 0, 0};
    for (int k = w->first; k < w->end; k++) {
        const struct muon_matrix *m = &u->matrices[k];
        int64_t at = m->begin, n;
        for (; (n = matrix_range_next(u, m, s->rank, &at)) > 0; at += n)
            muon_add_message(moves.sends, &moves.num_sends, m->owner, muon_update_at(u, w, update, at), n);
        for (int r = 0; r < s->ranks && m->owner == s->rank; r++)
            for (at = m->begin; (n = matrix_range_next(u, m, r, &at)) > 0; at += n)
                muon_add_message(moves.receives, &moves.num_receives, r, whole + m->place + (at - m->begin), n);
    }
    return moves;
}
// Lists this rank's messages when owners send a wave's factors from `update` to the same places in other ranks'
// `update`. States must be unsharded. The next call, also of muon_moves_to_owners, overwrites the lists.
static struct muon_moves muon_moves_of_factors(const struct muon *u, const struct muon_wave *w, floatX *update) {
    const struct shards *s = &u->o->zero->shards;
    struct muon_moves moves = {u->sends, u->receives, 0, 0};
    for (int k = w->first; k < w->end; k++) {
        const struct muon_matrix *m = &u->matrices[k];
        floatX *const at = update + (m->begin - w->place);
        for (int r = 0; r < s->ranks; r++)
            if (r != s->rank && m->owner == s->rank)
                muon_add_message(moves.sends, &moves.num_sends, r, at, matrix_elements(m));
        if (m->owner != s->rank)
            muon_add_message(moves.receives, &moves.num_receives, m->owner, at, matrix_elements(m));
    }
    return moves;
}

// Returns the most bytes that one rank sends plus receives in one wave's exchange; 0 if waves exchange nothing.
static size_t muon_exchanged_bytes(const struct muon *u) {
    const int ranks = u->o->zero->shards.ranks;
    int64_t most = 0;
    if (optimizer_is_sharded(u->o))
        return (size_t)(u->update_max + u->whole_max) * sizeof(floatX);
    for (int i = 0; i < u->num_waves && ranks > 1; i++)
        for (int r = 0; r < ranks; r++) { // sends what it owns to each other rank, and receives the rest
            int64_t n = 0;
            for (int k = u->waves[i].first; k < u->waves[i].end; k++)
                n += matrix_elements(&u->matrices[k]) * (u->matrices[k].owner == r ? ranks - 1 : 1);
            most = n > most ? n : most;
        }
    return (size_t)most * sizeof(floatX);
}
// Returns the most messages that all ranks together exchange in a wave: enough room for any rank's sends or receives.
static int muon_messages_max(const struct muon *u) {
    int most = 0;
    for (int i = 0; i < u->num_waves; i++) {
        int count = 0;
        for (int k = u->waves[i].first; k < u->waves[i].end; k++)
            for (int r = 0; r < u->o->zero->shards.ranks; r++)
                for (int64_t at = u->matrices[k].begin, n; (n = matrix_range_next(u, &u->matrices[k], r, &at)) > 0;
                     at += n)
                    count++;
        most = count > most ? count : most;
    }
    return most;
}

// ---- making and planning ----

// Sets up u, after optimizer_plan; muon_free frees it. If the model trains by Muon, finds its matrices and plans their
// table; ends the program where there are none. o must outlive u.
static void muon_plan(struct muon *u, struct optimizer *o, const struct layer_shape *shape, bool trains) {
    const struct config *c = o->config;
    memset(u, 0, sizeof *u);
    u->o = o;
    u->table_id = u->update_id = u->whole_id = -1;
    u->iteration = newton_schulz_of(c->training.muon_coefficient_type, c->training.muon_num_ns_steps);
    if (!trains)
        return;
    muon_make_matrices(u, shape);
    if (u->count == 0 && c->training.optimizer == OPTIMIZER_MUON)
        fail("--optimizer muon has nothing to update: no matrix of the blocks is trained%s; leave it out",
             c->finetuning.lora_rank > 0 ? ", LoRA's adapters are AdamW's" : "");
    if (u->count == 0)
        return;
    muon_make_waves(u);
    muon_place_waves(u);
    const size_t messages = (size_t)muon_messages_max(u);
    u->sends = (struct exchange_message *)calloc(messages, sizeof *u->sends);
    u->receives = (struct exchange_message *)calloc(messages, sizeof *u->receives);
    if (!u->sends || !u->receives)
        fail("out of memory for the table of matrices");
    u->table_id = plan_add(&o->zero->timeline->plan, ARENA_OPTIMIZER, "tables", "table of matrices", -1,
                           (size_t)u->count * sizeof *u->table.rows);
}
// Fills the table of matrices, in device memory, if there are any. Comes after arenas_allocate. Waits for the device.
static void muon_allocate(struct muon *u) {
    const struct timeline *t = u->o->zero->timeline;
    const size_t bytes = (size_t)u->count * sizeof(struct flat_tensor);
    if (u->count == 0)
        return;
    struct flat_tensor *rows = (struct flat_tensor *)plan_pointer(&t->plan, &t->arenas, u->table_id);
    struct flat_tensor *filled = (struct flat_tensor *)host_allocate(bytes, t->dev);
    memset(filled, 0, bytes);
    for (int i = 0; i < u->count; i++) {
        filled[i].begin = u->matrices[i].begin;
        filled[i].end = u->matrices[i].begin + matrix_elements(&u->matrices[i]);
        filled[i].scale = muon_update_scale(u->o->config, &u->matrices[i]);
    }
    device_upload(rows, filled, bytes, t->dev);
    device_synchronize(t->dev);
    host_free(filled);
    u->table.rows = rows;
    u->table.count = u->count;
}
// Frees u's tables in host memory. Its device memory belongs to the arenas.
static void muon_free(struct muon *u) {
    free(u->matrices);
    free(u->waves);
    free(u->sends);
    free(u->receives);
}

// ---- a wave ----

struct muon_buffers {
    floatX *update, *whole;
    void *workspace;
};
// Returns the waves' buffers, live in this phase; NULL while the plan is recorded. whole is NULL if nothing is copied.
static struct muon_buffers muon_buffers_of(struct muon *u) {
    struct timeline *t = u->o->zero->timeline;
    struct muon_buffers b = {NULL, NULL, NULL};
    for (int i = 0; i < u->count && timeline_is_planning(t); i++) {
        const size_t bytes = orthogonalize_workspace_bytes(u->matrices[i].rows, u->matrices[i].cols, t->dev);
        u->workspace_bytes = bytes > u->workspace_bytes ? bytes : u->workspace_bytes;
    }
    b.update = (floatX *)timeline_buffer(t, &u->update_id, (size_t)u->update_max * sizeof(floatX), "update",
                                         "updates of matrices", -1);
    if (u->whole_max > 0)
        b.whole = (floatX *)timeline_buffer(t, &u->whole_id, (size_t)u->whole_max * sizeof(floatX), "update",
                                            "whole matrices", -1);
    b.workspace = timeline_workspace(t, u->workspace_bytes);
    return b;
}

// Exchanges messages, enqueued: later work of the device waits for them. Every rank calls this, but never in planning.
static void muon_exchange(const struct muon *u, struct muon_moves moves, const char *name) {
    struct zero *z = u->o->zero;
    const uint64_t ticket = collective_exchange(z->collectives, moves.sends, moves.num_sends, moves.receives,
                                                moves.num_receives, name, z->timeline->dev);
    collective_wait(z->collectives, ticket, z->timeline->dev);
}
// Returns the moves that undo `moves`: sends and receives change places. Exchanges and copies no data.
static struct muon_moves muon_moves_back(struct muon_moves moves) {
    const struct muon_moves back = {moves.receives, moves.sends, moves.num_receives, moves.num_sends};
    return back;
}
// Enqueues copies of a wave's matrices that this rank owns: from an unsharded `update` to `whole`, or back if `back`.
static void muon_copy_wave(const struct muon *u, const struct muon_wave *w, struct muon_buffers b, bool back) {
    for (int k = w->first; k < w->end; k++) {
        const struct muon_matrix *m = &u->matrices[k];
        floatX *const here = b.update + (m->begin - w->place), *const there = b.whole + m->place;
        if (m->owner == u->o->zero->shards.rank)
            device_copy(back ? here : there, back ? there : here, (size_t)matrix_elements(m) * sizeof *here,
                        u->o->zero->timeline->dev);
    }
}
// Replaces, enqueued, this rank's elements of a wave in b.update by the orthogonal factors' elements. b.whole and
// b.workspace are scratch. A dry run only calls matmuls, for all matrices on each rank. Every rank calls this.
static void muon_orthogonalize(struct muon *u, const struct muon_wave *w, struct muon_buffers b) {
    struct zero *z = u->o->zero;
    struct timeline *t = z->timeline;
    const bool sharded = optimizer_is_sharded(u->o);
    struct muon_moves moves = {NULL, NULL, 0, 0};
    if (sharded && !t->planning) {
        moves = muon_moves_to_owners(u, w, b.update, b.whole);
        muon_exchange(u, moves, "updates of matrices");
    } else if (b.whole && !t->planning)
        muon_copy_wave(u, w, b, false);
    for (int k = w->first; k < w->end; k++) {
        const struct muon_matrix *m = &u->matrices[k];
        floatX *const x = u->whole_max > 0 ? b.whole + m->place : b.update + (m->begin - w->place);
        if (m->owner == z->shards.rank || t->dry_run)
            orthogonalize(t, x, m->rows, m->cols, &u->iteration, b.workspace);
    }
    if (t->planning)
        return;
    if (sharded)
        muon_exchange(u, muon_moves_back(moves), "orthogonal factors of matrices");
    else if (b.whole)
        muon_copy_wave(u, w, b, true);
    if (!sharded && z->shards.ranks > 1)
        muon_exchange(u, muon_moves_of_factors(u, w, b.update), "orthogonal factors of matrices");
}
