// Helpers for tests of the whole model: a config from a line of options, a step whose results are fetched at once,
// memory that holds NaN wherever the plan says that nothing is there, and a count of the bytes that transfers copy. The
// update's slots are so small that even a small model's states take several pieces.
#pragma once
#define UPDATE_SLOT_BYTES(dev) 6000
#include "kernels/transfers.cuh" // before model/timeline.cuh, whose transfers are counted
// Bytes of the transfers that were begun, by direction; a test that counts them sets it to 0 first.
static size_t transfer_watch[TRANSFER_DIRECTIONS];
static uint64_t watched_transfer_begin(struct transfers *t, enum transfer_direction direction, void *to,
                                       const void *from, size_t bytes, struct device *dev) {
    transfer_watch[direction] += bytes;
    return transfer_begin(t, direction, to, from, bytes, dev);
}
#define transfer_begin watched_transfer_begin
// What a test does as each phase of the model begins.
struct gpt;
static struct {
    void (*on_phase)(struct gpt *); // NULL: none
    struct gpt *model;
} phase_watch;
#define TIMELINE_ON_PHASE(t) (phase_watch.on_phase ? phase_watch.on_phase(phase_watch.model) : (void)0)
#define TIMELINE_IS_WATCHED (phase_watch.on_phase != NULL)
#include "config/resolve.h"
#include "run/model.cuh"
#include "test/testing.h"
#include <string.h>

// Has `on_phase` called with m as each phase begins; NULL, NULL: nothing is called.
static void watch_phases(struct gpt *m, void (*on_phase)(struct gpt *)) {
    phase_watch.on_phase = on_phase;
    phase_watch.model = m;
}

// Makes all gradients in memory NaN, but not the gaps between tensors: the first micro-step of a step has to overwrite
// each gradient. Where units' gradients have buffers, the plan's NaNs do that.
static inline void forget_gradients(struct gpt *m) {
    for (int i = 0; m->trains && !zero_buffers_gradients(&m->zero) && i < m->table.num_tensors; i++)
        memset((float *)m->zero.grads + m->table.tensors[i].offset, 0xff,
               (size_t)m->table.tensors[i].count * sizeof(float));
}

// Returns the config that two lines of options give on a command line, words separated by blanks.
static struct config config_of_options(const char *shape, const char *options) {
    enum { MAX_WORDS = 128, CONFIGS = 4, TEXT = 4096 };
    static char texts[CONFIGS][TEXT]; // configs point into these, the latest CONFIGS ones
    static int configs;
    static char *words[MAX_WORDS];
    int n = 0;
    char *text = texts[configs++ % CONFIGS];
    snprintf(text, TEXT, "train_gpt --plan %s %s", shape, options);
    for (char *word = strtok(text, " "); word && n < MAX_WORDS - 1; word = strtok(NULL, " "))
        words[n++] = word;
    words[n] = NULL;
    return config_parse(n, words);
}

// values (n) = elements [at, at + n) of a state in the flat buffers, as fp32, which this rank must hold; 0 where
// elements lack the state. For master weights: the unrounded parameters. `at` is a multiple of STATE_BLOCK. Waits for
// the device.
static void optimizer_values(const struct optimizer *o, enum optimizer_state id, int64_t at, int64_t n, float *values) {
    const struct zero *z = o->zero;
    for (int64_t begin = at, end; begin < at + n; begin = end) {
        const enum state_format format = o->states[id].formats[optimizer_group_at(o, begin, &end)];
        end = end < at + n ? end : at + n;
        const int64_t count = end - begin;
        char *native = (char *)calloc(1, 2 * state_bytes(FORMAT_FP32, count));
        if (!native)
            fail("out of memory");
        memset(values + (begin - at), 0, (size_t)count * sizeof *values);
        if (optimizer_holds(o, id) && format != FORMAT_NONE) {
            optimizer_download(o, id, begin, count, native);
            if (format != FORMAT_REMAINDER)
                state_decode(values + (begin - at), native, format, count);
        }
        if (optimizer_state_rows[id].start == STATE_FROM_PARAMETERS) {
            floatX *params = (floatX *)(native + state_bytes(FORMAT_FP32, count));
            int64_t place, some, first = begin;
            for (; (some = shards_next(&z->shards, shards_parameters(&z->shards), &first, end, &place)) > 0;
                 first += some)
                device_download(params + (first - begin), z->params + place, (size_t)some * sizeof *params,
                                z->timeline->dev);
            const uint16_t *low = optimizer_holds(o, id) ? (const uint16_t *)native : NULL;
            for (int64_t i = 0; i < count; i++)
                values[begin - at + i] = low ? parameter_joined(params[i], low[i]) : to_float(params[i]);
        }
        free(native);
    }
}

// Multiplies the initial weights by 3, so that no gradient is small against rounding.
static void enlarge_parameters(struct gpt *m) {
    for (int i = 0; i < m->table.num_tensors + m->table.num_frozen; i++) {
        const struct tensor *t = &m->table.tensors[i];
        float *values = (float *)test_alloc((size_t)t->count * sizeof *values);
        floatX *rounded = (floatX *)test_alloc(2 * (size_t)t->count * sizeof *rounded);
        tensor_initialize(values, 0, t->count, t, m->config.model.init_method_std, m->shape.L, m->config.training.seed);
        for (int64_t k = 0; k < t->count; k++)
            values[k] *= 3;
        gpt_set_parameters(m, t, 0, values, t->count, rounded);
        device_synchronize(m->dev);
        free(values);
        free(rounded);
    }
}

// Returns the gradients (flat) of a model whose gradients are unsharded fp32, in the model's own memory, on the device
// or the host.
static float *fp32_gradients(const struct gpt *m) { return (float *)m->zero.grads; }
// Returns a state (flat) of an unsharded model as fp32, which the caller frees.
static float *state_values(const struct gpt *m, enum optimizer_state id) {
    float *values = (float *)test_alloc((size_t)m->table.trained.flat * sizeof *values);
    optimizer_values(&m->optimizer, id, 0, m->table.trained.flat, values);
    return values;
}
// Copies the states and the parameters of one model to another one of the same options; neither is sharded.
static void copy_states(struct gpt *to, const struct gpt *from) {
    const size_t bytes = (size_t)from->table.trained.flat * sizeof(float);
    char *native = (char *)test_alloc(bytes);
    for (int id = 0; id < STATE_COUNT; id++)
        if (optimizer_holds(&from->optimizer, (enum optimizer_state)id)) {
            optimizer_download(&from->optimizer, (enum optimizer_state)id, 0, from->table.trained.flat, native);
            optimizer_upload(&to->optimizer, (enum optimizer_state)id, 0, from->table.trained.flat, native);
        }
    free(native);
    memcpy(to->zero.params, from->zero.params, (size_t)from->table.trained.flat * sizeof(floatX));
}

// Runs forward and backward of one micro-batch, number `index` of the step; returns the mean loss.
static double micro_step_loss_of(struct gpt *m, int index, struct batch batch, double scale) {
    struct loss_sum loss;
    gpt_micro_step(m, index, batch, scale);
    device_download(&loss, &m->io.losses[index], sizeof loss, m->dev);
    return loss_mean(loss);
}
static double micro_step_loss(struct gpt *m, int index, const int32_t *inputs, const int32_t *targets, double scale) {
    return micro_step_loss_of(m, index, batch_of(inputs, targets), scale);
}
// Runs the update; returns the norm of the gradients.
static double update_norm(struct gpt *m, int64_t step, double lr) {
    const double *losses;
    gpt_update(m, step, lr);
    gpt_fetch_results(m, 0);
    return gpt_results(m, 0, &losses).check.grad_norm;
}

// Bytes that are overwritten at each end of a stretch that only workspaces use. A matrix library's workspace on an
// emulated GPU has 32 MiB, of which the products of the tests' shapes use less than 1 MiB.
enum { POISON_EDGE = 1 << 20 };
// Overwrites bytes of an arena with NaN. A GPU does so itself in its memory, which the host would fetch for each phase.
static void poison_bytes(struct gpt *m, enum plan_arena arena, char *from, size_t bytes) {
#ifdef TARGET_CUDA
    if (arena == ARENA_ACTIVATIONS) {
        assert_int_equal(cudaMemsetAsync(from, 0xff, bytes, m->dev->stream), cudaSuccess);
        return;
    }
#endif
    memset(from, 0xff, bytes);
}
// Overwrites with NaN those bytes of an arena that, by the plan, no buffer holds in this phase, or whose buffer begins
// in it. workspaces: also bytes that only workspaces ever hold. first_time: the phase begins for the first time since
// its region began, so that its new buffers are still unwritten.
static void poison_arena(struct gpt *m, enum plan_arena arena, bool workspaces, bool first_time) {
    enum { LIVE, WORKSPACES, DEAD }; // WORKSPACES: bytes that only workspaces ever hold
    const size_t lines = m->timeline.plan.arena_bytes[arena] / PLAN_ALIGNMENT;
    unsigned char *line = (unsigned char *)malloc(lines + 1);
    memset(line, workspaces ? WORKSPACES : LIVE, lines);
    for (int live = 0; live < 2; live++) // first all bytes that any buffer ever holds, then without those that are live
        for (int i = 0; i < m->timeline.plan.count; i++) {
            const struct plan_buffer *b = &m->timeline.plan.buffers[i];
            const char *category = m->timeline.plan.categories[b->category];
            if (b->arena != arena || b->first_phase < 0 || (!live && !strcmp(category, "workspace")))
                continue;
            if (live && (m->timeline.phase < b->first_phase || m->timeline.phase > b->last_phase))
                continue;
            if (live && b->first_phase == m->timeline.phase && first_time && strcmp(category, "kv cache"))
                continue;
            memset(line + b->offset / PLAN_ALIGNMENT, live ? LIVE : DEAD,
                   (b->bytes + PLAN_ALIGNMENT - 1) / PLAN_ALIGNMENT);
        }
    for (size_t begin = 0, end; begin < lines; begin = end) {
        for (end = begin + 1; end < lines && line[end] == line[begin];)
            end++;
        if (line[begin] == LIVE)
            continue;
        char *const from = m->timeline.arenas.base[arena] + begin * PLAN_ALIGNMENT;
        const size_t bytes = (end - begin) * PLAN_ALIGNMENT;
        const size_t edge = line[begin] == DEAD || bytes < (size_t)POISON_EDGE ? bytes : (size_t)POISON_EDGE;
        poison_bytes(m, arena, from, edge);
        poison_bytes(m, arena, from + bytes - edge, edge);
    }
    free(line);
}
// Overwrites with NaN what the plan says is dead in this phase in the arenas of activations, the device's and the
// host's. workspaces: also bytes that only workspaces ever hold.
static void poison_with(struct gpt *m, bool workspaces) {
    static int latest_phase; // since the region that runs began
    device_synchronize(m->dev);
    for (int r = 0; r < REGION_COUNT; r++)
        if (m->timeline.phase == m->timeline.region_first[r])
            latest_phase = -1;
    const bool first_time = m->timeline.phase > latest_phase;
    latest_phase = first_time ? m->timeline.phase : latest_phase;
    poison_arena(m, ARENA_ACTIVATIONS, workspaces, first_time);
    poison_arena(m, ARENA_HOST_ACTIVATIONS, workspaces, first_time);
}
static void poison(struct gpt *m) { poison_with(m, true); }
