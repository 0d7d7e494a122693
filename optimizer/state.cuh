// The optimizer's state: its kinds (OPTIMIZER_STATE_ROWS), and how and where each is stored. Each kind has a flat
// buffer, with an element for each parameter; it is sharded from ZeRO stage 1 on. An element's place is its index in
// this rank's buffers, which hold all elements or only the rank's shards (zero/shards.cuh). Places [0, cut) of every
// kind lie in the device's memory, the others in the host's. An element's group decides which kinds it has, and in
// which format. A segment is a run of places of one group; the byte at which it begins in each kind's buffer is known.
#pragma once
#include "config/config.h"           // struct config
#include "kernels/device_memory.cuh" // device_upload, device_zero, host_allocate
#include "kernels/device_queue.cuh"  // device_synchronize
#include "kernels/flat_tensors.cuh"  // struct flat_tensors
#include "kernels/gradients.cuh"     // struct gradient_range
#include "kernels/state_format.cuh"  // enum state_format, state_bytes
#include "model/fp8.cuh"             // struct fp8_state, fp8_weight_amax
#include "zero/units.cuh"            // struct zero, struct shards
#include <assert.h>                  // static_assert

// The values of a state's elements before the first step.
enum state_start {
    STATE_FROM_PARAMETERS, // the exact parameter, before its rounding to floatX
    STATE_COPY,            // a copy of the exact parameter, which then goes its own way
    STATE_ZERO,
};

// Columns: id; name in reports and plans; prefix of its tensors' names in optimizer.safetensors; initial value. Of a
// master weight only the bits that its parameter lacks are stored; where none are, the parameter is the master weight.
// The moments are AdamW's, the momentum is Muon's, and the averages are made with --ema-decay.
#define OPTIMIZER_STATE_ROWS(ROW)                                                                                      \
    ROW(MASTER, "master weights", "master", STATE_FROM_PARAMETERS)                                                     \
    ROW(MOMENT1, "first moments", "exp_avg", STATE_ZERO)                                                               \
    ROW(MOMENT2, "second moments", "exp_avg_sq", STATE_ZERO)                                                           \
    ROW(MOMENTUM, "momentum", "momentum", STATE_ZERO)                                                                  \
    ROW(AVERAGES, "moving averages", "ema", STATE_COPY)

enum optimizer_state {
#define ENUM_ROW(id, name, file_name, start) STATE_##id,
    OPTIMIZER_STATE_ROWS(ENUM_ROW)
#undef ENUM_ROW
        STATE_COUNT
};

struct optimizer_state_row {
    const char *name, *file_name;
    enum state_start start;
};
static const struct optimizer_state_row optimizer_state_rows[STATE_COUNT] = {
#define STRUCT_ROW(id, name, file_name, start) {name, file_name, start},
    OPTIMIZER_STATE_ROWS(STRUCT_ROW)
#undef STRUCT_ROW
};

// Groups of elements, by what updates them and how their states are stored. A gap is in the previous tensor's group.
enum state_group {
    GROUP_OTHERS, // head and embeddings, by AdamW
    GROUP_LAYERS, // tensors of layers, by AdamW
    GROUP_MUON,   // matrices of layers, by Muon
    STATE_GROUPS
};

struct state_segment {
    int64_t place; // of its first element
    enum state_group group;
    size_t offset[STATE_COUNT]; // bytes of each state before it
};
// Consecutive elements of the flat buffers that are of one group: from `begin` to the next run's begin.
struct state_run {
    int64_t begin;
    enum state_group group;
};

struct stored_state {
    enum state_format formats[STATE_GROUPS];
    int device_id, host_id; // buffers in the plan, -1: none
    char *device, *host;    // places [0, cut), and from cut on; NULL: none, or only planned
};

enum { UPDATE_SLOTS = 3 }; // pieces of the update on the device: arriving, in work, leaving

struct optimizer {
    struct zero *zero;           // parameters and gradients; not owned
    const struct config *config; // not owned
    struct fp8_state *fp8;       // whose amaxes of weights the update collects; not owned
    struct stored_state states[STATE_COUNT];
    struct state_run *runs; // (num_runs + 1) of all elements, in flat order; the last one begins after them
    int num_runs;
    struct state_segment *segments; // (num_segments + 1) of this rank's places; the last one begins after them
    int num_segments;
    int64_t elements; // places of this rank's buffers
    int64_t cut;
    // Device memory, filled once: the table of the tensors, which the update reads, and of this rank's shards of the
    // buckets of gradients, (shards.count), whose norm is taken.
    int tensors_id, buckets_id;
    struct flat_tensors tensors;
    struct gradient_range *buckets;
    int slots_id;
    int64_t piece; // elements; 0: nothing is streamed
    size_t slot_bytes;
};

// Whether optimizer states are sharded, by shards_optimizer; never on one rank.
static bool optimizer_is_sharded(const struct optimizer *o) { return shards_optimizer(&o->zero->shards); }

// ---- formats and places ----

// Returns the format of moments that an option asks for. in_8bit: the format that 8bit means for this state and group.
static enum state_format moment_format(enum config_moment_dtype dtype, enum state_format in_8bit) {
    switch (dtype) {
    case MOMENT_FP32: return FORMAT_FP32;
    case MOMENT_BF16: return FORMAT_BF16;
    case MOMENT_8BIT: return in_8bit;
    }
    return FORMAT_FP32;
}
// Returns the format in which a group's elements store a state; FORMAT_NONE if they don't. With 8-bit moments head and
// embeddings have bf16 ones, as 8 bits make pretraining unstable (Dettmers, huggingface/transformers #14819).
static enum state_format state_format_of(const struct config *c, enum optimizer_state id, enum state_group group) {
    const bool by_muon = group == GROUP_MUON, others = group == GROUP_OTHERS;
    switch (id) {
    case STATE_MASTER:
        return sizeof(floatX) < sizeof(float) && c->states.main_params_dtype == MAIN_FP32 ? FORMAT_REMAINDER
                                                                                          : FORMAT_NONE;
    case STATE_MOMENT1:
        return by_muon ? FORMAT_NONE : moment_format(c->states.exp_avg_dtype, others ? FORMAT_BF16 : FORMAT_8BIT);
    case STATE_MOMENT2:
        return by_muon ? FORMAT_NONE
                       : moment_format(c->states.exp_avg_sq_dtype, others ? FORMAT_BF16 : FORMAT_8BIT_ROOT);
    case STATE_MOMENTUM: return by_muon ? moment_format(c->states.exp_avg_dtype, FORMAT_8BIT) : FORMAT_NONE;
    case STATE_AVERAGES: return c->training.ema_decay > 0 ? FORMAT_FP32 : FORMAT_NONE;
    case STATE_COUNT: break;
    }
    return FORMAT_NONE;
}
// Whether Muon updates a trained tensor: with --optimizer muon the weights of blocks' linear layers, not of adapters.
static bool muon_updates(const struct config *c, const struct tensor *t) {
    switch (c->training.optimizer) {
    case OPTIMIZER_ADAM: return false;
    case OPTIMIZER_MUON: return parameter_is_linear_weight(t->parameter);
    }
    return false;
}
// Returns the state group of a trained tensor: Muon's matrices, the layers' other tensors, or head and embeddings.
static enum state_group tensor_group(const struct config *c, const struct tensor *t) {
    return muon_updates(c, t) ? GROUP_MUON : t->unit == UNIT_LAYER ? GROUP_LAYERS : GROUP_OTHERS;
}
static enum state_format optimizer_format(const struct optimizer *o, enum optimizer_state id, const struct tensor *t) {
    return o->states[id].formats[tensor_group(o->config, t)];
}

// Whether two groups are updated or stored differently. If not, neighboring tensors of the two form one run.
static bool groups_differ(const struct optimizer *o, enum state_group a, enum state_group b) {
    bool differ = (a == GROUP_MUON) != (b == GROUP_MUON);
    for (int id = 0; id < STATE_COUNT; id++)
        differ = differ || o->states[id].formats[a] != o->states[id].formats[b];
    return differ;
}
// Makes o->runs: each joins neighboring tensors whose states are updated and stored in the same way (groups_differ).
static void optimizer_make_runs(struct optimizer *o) {
    const struct parameters *table = o->zero->table;
    o->runs = (struct state_run *)calloc((size_t)table->num_tensors + 1, sizeof *o->runs);
    if (!o->runs)
        fail("out of memory for the table of states");
    for (int i = 0; i < table->num_tensors; i++) {
        const struct state_run run = {table->tensors[i].offset, tensor_group(o->config, &table->tensors[i])};
        if (o->num_runs == 0 || groups_differ(o, run.group, o->runs[o->num_runs - 1].group))
            o->runs[o->num_runs++] = run;
    }
    o->runs[o->num_runs].begin = o->zero->shards.flat;
}
// Returns the group of the run that has the flat buffers' element `at`. The element's own group may be another, for
// which groups_differ is false. Sets *end to the end of the run.
static enum state_group optimizer_group_at(const struct optimizer *o, int64_t at, int64_t *end) {
    int first = 0, last = o->num_runs; // the run is in [first, last)
    while (last - first > 1) {
        const int middle = first + (last - first) / 2;
        if (o->runs[middle].begin <= at)
            first = middle;
        else
            last = middle;
    }
    *end = o->runs[first + 1].begin;
    return o->runs[first].group;
}

// Fills segment o->num_segments, which begins at `place`. Does not count it, as the last one only marks the end.
static void optimizer_begin_segment(struct optimizer *o, int64_t place, enum state_group group) {
    struct state_segment *s = &o->segments[o->num_segments];
    memset(s, 0, sizeof *s);
    s->place = place;
    s->group = group;
    for (int id = 0; id < STATE_COUNT && o->num_segments > 0; id++)
        s->offset[id] = s[-1].offset[id] + state_bytes(o->states[id].formats[s[-1].group], place - s[-1].place);
}
// Makes o->segments from o->runs: which of this rank's places are of which group, and each state's bytes before them.
static void optimizer_make_segments(struct optimizer *o) {
    const struct shards *s = &o->zero->shards;
    o->segments = (struct state_segment *)calloc((size_t)o->num_runs + (size_t)s->count + 1, sizeof *o->segments);
    if (!o->segments)
        fail("out of memory for the table of states");
    int64_t at = 0, place, n, end;
    for (; (n = shards_next(s, optimizer_is_sharded(o), &at, s->flat, &place)) > 0; at += n) {
        const enum state_group group = optimizer_group_at(o, at, &end);
        n = n < end - at ? n : end - at;
        if (o->num_segments > 0 && o->segments[o->num_segments - 1].group == group)
            continue;
        optimizer_begin_segment(o, place, group);
        o->num_segments++;
    }
    optimizer_begin_segment(o, o->elements, GROUP_OTHERS);
}
// The number of this rank's elements of a group, padding included. They may count in another group that doesn't differ.
static int64_t optimizer_elements(const struct optimizer *o, enum state_group group) {
    int64_t n = 0;
    for (int i = 0; i < o->num_segments; i++)
        n += o->segments[i].group == group ? o->segments[i + 1].place - o->segments[i].place : 0;
    return n;
}
// The number of bytes of all states that this rank has, on device and host together.
static double optimizer_states_bytes(const struct optimizer *o) {
    double bytes = 0;
    for (int id = 0; id < STATE_COUNT; id++)
        for (int group = 0; group < STATE_GROUPS; group++)
            bytes += (double)optimizer_elements(o, (enum state_group)group) / STATE_BLOCK *
                     (double)state_block_bytes(o->states[id].formats[group]);
    return bytes;
}
// The number of bytes, on device and host together, of a state before this rank's `place`, a multiple of STATE_BLOCK.
static size_t state_offset(const struct optimizer *o, enum optimizer_state id, int64_t place) {
    int first = 0, last = o->num_segments; // the segment is in [first, last)
    while (last - first > 1) {
        const int middle = first + (last - first) / 2;
        if (o->segments[middle].place <= place)
            first = middle;
        else
            last = middle;
    }
    const struct state_segment *s = &o->segments[first];
    return s->offset[id] + state_bytes(o->states[id].formats[s->group], place - s->place);
}

// Returns the address of a state at `place`, a multiple of STATE_BLOCK; the state is one that optimizer_holds. Sets
// *on_host to whether this is the host's memory, and *count to how many of the next n elements lie in the same memory.
static char *state_address(const struct optimizer *o, enum optimizer_state id, int64_t place, int64_t n, int64_t *count,
                           bool *on_host) {
    const struct stored_state *s = &o->states[id];
    *on_host = place >= o->cut;
    *count = !*on_host && place + n > o->cut ? o->cut - place : n;
    const size_t offset = state_offset(o, id, place);
    return *on_host ? s->host + (offset - state_offset(o, id, o->cut)) : s->device + offset;
}

// ---- memory ----

static size_t optimizer_tensor_table_bytes(const struct parameters *table) {
    return (size_t)table->num_tensors * sizeof(struct flat_tensor);
}
static size_t optimizer_bucket_table_bytes(const struct shards *s) {
    return (size_t)s->count * sizeof(struct gradient_range);
}
// Returns the place, a multiple of STATE_BLOCK, from which states are offloaded: about `fraction` (0 to 1) of places.
static int64_t optimizer_offload_begin(const struct optimizer *o, double fraction) {
    const int64_t blocks = o->elements / STATE_BLOCK;
    return (blocks - (int64_t)((double)blocks * fraction + 0.5)) * STATE_BLOCK;
}
// The number of bytes of all states together from this rank's `place`, a multiple of STATE_BLOCK, to the end.
static size_t optimizer_bytes_from(const struct optimizer *o, int64_t place) {
    size_t bytes = 0;
    for (int id = 0; id < STATE_COUNT; id++)
        bytes +=
            state_offset(o, (enum optimizer_state)id, o->elements) - state_offset(o, (enum optimizer_state)id, place);
    return bytes;
}
// Sets up o, for optimizer_free, and plans its states and tables if `trains`. zero, fp8 and config must outlive o.
static void optimizer_plan(struct optimizer *o, struct zero *zero, struct fp8_state *fp8, const struct config *config,
                           bool trains) {
    struct plan *plan = &zero->timeline->plan;
    memset(o, 0, sizeof *o);
    o->zero = zero;
    o->config = config;
    o->fp8 = fp8;
    o->slots_id = o->tensors_id = o->buckets_id = -1;
    o->elements = shards_elements(&zero->shards, optimizer_is_sharded(o));
    o->cut = optimizer_offload_begin(o, config->states.optimizer_cpu_offload ? config->states.optimizer_offload_fraction
                                                                             : 0);
    for (int id = 0; id < STATE_COUNT; id++)
        for (int group = 0; group < STATE_GROUPS; group++)
            o->states[id].formats[group] = state_format_of(config, (enum optimizer_state)id, (enum state_group)group);
    optimizer_make_runs(o);
    optimizer_make_segments(o);
    for (int i = 0; i < STATE_COUNT; i++) {
        const enum optimizer_state id = (enum optimizer_state)i;
        const struct optimizer_state_row *row = &optimizer_state_rows[id];
        struct stored_state *s = &o->states[id];
        s->device_id = s->host_id = -1;
        if (!trains)
            continue;
        const size_t below = state_offset(o, id, o->cut), all = state_offset(o, id, o->elements);
        if (below > 0)
            s->device_id = plan_add(plan, ARENA_OPTIMIZER, row->name, row->name, -1, below);
        if (all > below)
            s->host_id = plan_add(plan, ARENA_HOST_OPTIMIZER, row->name, row->name, -1, all - below);
    }
    if (!trains)
        return;
    o->tensors_id =
        plan_add(plan, ARENA_OPTIMIZER, "tables", "table of tensors", -1, optimizer_tensor_table_bytes(zero->table));
    o->buckets_id =
        plan_add(plan, ARENA_OPTIMIZER, "tables", "table of buckets", -1, optimizer_bucket_table_bytes(&zero->shards));
}
// Frees o's tables in host memory. The states belong to the arenas.
static void optimizer_free(struct optimizer *o) {
    free(o->runs);
    free(o->segments);
}
// Returns where updates collect a tensor's amax, in device memory. NULL: they collect none; only FP8 weights have one.
static uint32_t *optimizer_amax(const struct optimizer *o, const struct tensor *t) {
    for (int linear = 0; linear < LINEAR_COUNT && t->layer >= 0; linear++)
        if (linear_row((enum linear)linear, o->fp8->shape).weight == t->parameter)
            return fp8_weight_amax(o->fp8, t->layer, (enum linear)linear);
    return NULL;
}
static_assert(TENSOR_ALIGNMENT % STATE_BLOCK == 0, "no block of a state is of two tensors");
// Fills the table of tensors at `rows`, in device memory, and points o->tensors to it. Waits for the device.
static void optimizer_fill_tensors(struct optimizer *o, struct flat_tensor *rows) {
    const struct parameters *table = o->zero->table;
    struct device *dev = o->zero->timeline->dev;
    struct flat_tensor *filled = (struct flat_tensor *)host_allocate(optimizer_tensor_table_bytes(table), dev);
    memset(filled, 0, optimizer_tensor_table_bytes(table));
    o->tensors.rows = rows;
    o->tensors.count = table->num_tensors;
    for (int i = 0; i < table->num_tensors; i++) {
        const struct tensor *t = &table->tensors[i];
        filled[i].begin = t->offset;
        filled[i].end = t->offset + t->count;
        filled[i].amax = optimizer_amax(o, t);
        filled[i].decays = tensor_decays(t);
        filled[i].lr_scale = (float)lr_multiplier(o->config, tensor_lr_group(t));
        o->tensors.has_amaxes = o->tensors.has_amaxes || filled[i].amax;
    }
    device_upload(rows, filled, optimizer_tensor_table_bytes(table), dev);
    device_synchronize(dev);
    host_free(filled);
}
// Fills o->buckets, in device memory: where each bucket's shard lies in this rank's gradients. Waits for the device.
static void optimizer_fill_buckets(struct optimizer *o) {
    const struct shards *s = &o->zero->shards;
    struct device *dev = o->zero->timeline->dev;
    struct gradient_range *filled = (struct gradient_range *)host_allocate(optimizer_bucket_table_bytes(s), dev);
    memset(filled, 0, optimizer_bucket_table_bytes(s));
    for (int i = 0; i < s->count; i++) {
        const struct bucket *b = &s->buckets[i];
        filled[i].at = shards_place(s, b, shards_own_begin(s, b), shards_gradients(s));
        filled[i].n = b->shard;
    }
    device_upload(o->buckets, filled, optimizer_bucket_table_bytes(s), dev);
    device_synchronize(dev);
    host_free(filled);
}
// Sets the addresses of what optimizer_plan planned, and fills the tables; optimizer_initialize sets the states'
// values. Comes after arenas_allocate and fp8_allocate, since a table points to FP8's amaxes. Waits for the device.
static void optimizer_allocate(struct optimizer *o) {
    const struct timeline *t = o->zero->timeline;
    for (int id = 0; id < STATE_COUNT; id++) {
        o->states[id].device = (char *)plan_pointer(&t->plan, &t->arenas, o->states[id].device_id);
        o->states[id].host = (char *)plan_pointer(&t->plan, &t->arenas, o->states[id].host_id);
    }
    if (o->tensors_id < 0)
        return;
    optimizer_fill_tensors(o, (struct flat_tensor *)plan_pointer(&t->plan, &t->arenas, o->tensors_id));
    o->buckets = (struct gradient_range *)plan_pointer(&t->plan, &t->arenas, o->buckets_id);
    optimizer_fill_buckets(o);
}
// Whether this rank has memory for a state, on the device or on the host; false before optimizer_allocate.
static bool optimizer_holds(const struct optimizer *o, enum optimizer_state id) {
    return o->states[id].device != NULL || o->states[id].host != NULL;
}

// ---- reading and writing ----

// Copies elements [at, at + n) of a state, as stored, from this rank's buffers to `native`, in host memory, or back.
// `at` is a multiple of STATE_BLOCK, to which n is rounded up. Elements of other ranks or of groups without the state
// have no bytes in `native`. The state must be one that optimizer_holds, and no update in flight. Returns when done.
static void optimizer_copy_state(const struct optimizer *o, enum optimizer_state id, int64_t at, int64_t n,
                                 char *native, enum transfer_direction direction) {
    const struct shards *s = &o->zero->shards;
    struct device *dev = o->zero->timeline->dev;
    int64_t place, count, some;
    n = (n + STATE_BLOCK - 1) / STATE_BLOCK * STATE_BLOCK;
    for (int64_t first = at; (count = shards_next(s, optimizer_is_sharded(o), &first, at + n, &place)) > 0;
         first += count)
        for (int64_t done = 0; done < count; done += some) {
            bool on_host;
            char *stored = state_address(o, id, place + done, count - done, &some, &on_host);
            const size_t bytes = state_offset(o, id, place + done + some) - state_offset(o, id, place + done);
            if (bytes == 0) // elements whose group does not have the state
                continue;
            if (direction == TRANSFER_TO_DEVICE && on_host)
                memcpy(stored, native, bytes);
            else if (direction == TRANSFER_TO_DEVICE)
                device_upload(stored, native, bytes, dev);
            else if (on_host)
                memcpy(native, stored, bytes);
            else
                device_download_begin(native, stored, bytes, dev);
            native += bytes;
        }
    device_synchronize(dev);
}
// Copies this rank's elements of [at, at + n) of a state to `native`, host memory, packed as optimizer_copy_state says.
static void optimizer_download(const struct optimizer *o, enum optimizer_state id, int64_t at, int64_t n,
                               void *native) {
    optimizer_copy_state(o, id, at, n, (char *)native, TRANSFER_TO_HOST);
}
// Sets this rank's elements of a state's [at, at + n) from native, host memory of only these. See optimizer_copy_state.
static void optimizer_upload(struct optimizer *o, enum optimizer_state id, int64_t at, int64_t n, const void *native) {
    optimizer_copy_state(o, id, at, n, (char *)(uintptr_t)native, TRANSFER_TO_DEVICE);
}

// Zeroes this rank's states, enqueued if on the device. optimizer_set_parameters then sets states that begin otherwise.
static void optimizer_initialize(struct optimizer *o) {
    for (int i = 0; i < STATE_COUNT; i++) {
        const enum optimizer_state id = (enum optimizer_state)i;
        const size_t below = state_offset(o, id, o->cut);
        if (o->states[id].device)
            device_zero(o->states[id].device, below, o->zero->timeline->dev);
        if (o->states[id].host)
            memset(o->states[id].host, 0, state_offset(o, id, o->elements) - below);
    }
}

// Sets elements [at, at + n) of a state, as far as this rank holds them, to `values` (n), as stored: each takes `width`
// bytes, in every group. The state is one that optimizer_holds; `at` may be any element. Copies to the device are
// enqueued, so that `values` must stay until the caller has waited for the device. No update may be in flight.
static void optimizer_set_elements(struct optimizer *o, enum optimizer_state id, int64_t at, const void *values,
                                   int64_t n, size_t width) {
    const struct shards *s = &o->zero->shards;
    const struct stored_state *state = &o->states[id];
    int64_t place, count;
    for (int64_t first = at; (count = shards_next(s, optimizer_is_sharded(o), &first, at + n, &place)) > 0;
         first += count) {
        const int64_t below = place >= o->cut ? 0 : o->cut - place < count ? o->cut - place : count;
        const char *from = (const char *)values + (size_t)(first - at) * width;
        if (below > 0)
            device_upload(state->device + (size_t)place * width, from, (size_t)below * width, o->zero->timeline->dev);
        if (below < count)
            memcpy(state->host + (size_t)(place + below - o->cut) * width, from + (size_t)below * width,
                   (size_t)(count - below) * width);
    }
}
// Sets parameters [at, at + n), as far as this rank holds them, to `exact` (n): rounded in the parameters, exactly in
// master weights and averages. `exact` and the scratch memory `rounded` (2 n), on the host, must stay until the caller
// has waited for the device. No update may be in flight. FP8 weights' amaxes become unknown.
static void optimizer_set_parameters(struct optimizer *o, int64_t at, const float *exact, int64_t n, floatX *rounded) {
    uint16_t *low = (uint16_t *)(rounded + n);
    for (int64_t i = 0; i < n; i++) {
        rounded[i] = parameter_rounded(exact[i]);
        low[i] = split_low(exact[i]);
    }
    if (optimizer_holds(o, STATE_MASTER))
        optimizer_set_elements(o, STATE_MASTER, at, low, n, sizeof *low);
    if (optimizer_holds(o, STATE_AVERAGES))
        optimizer_set_elements(o, STATE_AVERAGES, at, exact, n, sizeof *exact);
    zero_upload(o->zero, o->zero->params, shards_parameters(&o->zero->shards), at, rounded, n, sizeof *rounded);
    o->fp8->weights_known = false;
}
