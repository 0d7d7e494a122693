// The self-check of ops that cast what they make to FP8: at the model's widths they give the bits of the op, fp8_amax
// and fp8_cast one after the other. And of the scales that come from earlier steps, on known numbers.
#pragma once
#include "run/check_deadline.cuh" // deadline_begin
#include "runtime/machine/say.h"  // say_warning

#ifdef TARGET_CUDA
#include "kernels/fp8/cast.cuh"   // fp8_cast, fp8_amax
#include "kernels/fp8/scales.cuh" // fp8_scales_update
#include "kernels/norm_fp8.cuh"   // norm_forward_fp8
#include "model/fp8_linear.cuh"   // gelu_forward_fp8 and the like
#include "model/mlp.cuh"          // mlp_activation_forward

// Warns that what->what is not checked, where `room` is less than the bytes that this takes. Returns whether it is not.
static bool check_lacks_room(struct run *r, const struct timed_check *what, size_t bytes, size_t room) {
    if (room >= bytes)
        return false;
    say_warning("self-check: %s was not checked, which takes %zu bytes of the activations' %zu", what->what, bytes,
                room);
    r->self_check.lacked_room = true;
    return true;
}

// ---- Ops that cast ----

enum fused_op { FUSED_NORM, FUSED_RESIDUAL_NORM, FUSED_ACTIVATION, FUSED_ACTIVATION_BACKWARD, FUSED_OPS };
// FUSED_ROWS: a whole tile of a cast or two blocks of a norm, and a part of another. FUSED_SHIFT: elements from an
// input to the next one in the same noise.
enum { FUSED_ROWS = 80, FUSED_SHIFT = 128 };
static const float FUSED_DELAYED = 100; // saturates some of the elements, and flushes some

// An op's results. The sum (FUSED_ROWS, columns), dbias (columns), and codes in row and in column form follow them.
struct fused_outputs {
    struct fp8_scale scale;
    uint64_t counts[FP8_COUNTS];
    float mean[FUSED_ROWS], rstd[FUSED_ROWS];
};
static_assert(sizeof(struct fused_outputs) % 16 == 0, "what follows is aligned, as columns are a multiple of 16");
static size_t fused_outputs_bytes(int columns) {
    return sizeof(struct fused_outputs) + (size_t)columns * (sizeof(float) + FUSED_ROWS * (sizeof(floatX) + 2));
}
static floatX *fused_sum(struct fused_outputs *o) { return (floatX *)(o + 1); }

// An op's check, in the device's memory.
struct fused_check {
    enum fused_op op;
    int wide, columns;                   // of the op's input, and of what is cast
    floatX *noise;                       // the inputs: (FUSED_ROWS wide + 2 FUSED_SHIFT)
    floatX *result;                      // (FUSED_ROWS, columns)
    void *workspace;                     // of the op that casts, or of the cast
    struct fused_outputs *apart, *fused; // the two results, each fused_outputs_bytes, from aligned addresses on
};
// Whether the op has a norm, so that it also makes a sum and statistics.
static bool fused_is_norm(enum fused_op op) { return op == FUSED_NORM || op == FUSED_RESIDUAL_NORM; }
// The number of bytes of c's `result` and `noise`, which lie one after the other.
static size_t fused_floats_bytes(const struct fused_check *c) {
    const size_t floats = (size_t)FUSED_ROWS * (size_t)(c->wide + c->columns) + 2 * FUSED_SHIFT;
    return plan_aligned(floats * sizeof(floatX));
}
// Returns a check without memory, and in *bytes how many bytes it takes.
static struct fused_check fused_check_of(const struct gpt *m, enum fused_op op, size_t *bytes) {
    const struct layer_shape *s = &m->shape.layer;
    struct fused_check c;
    memset(&c, 0, sizeof c);
    c.op = op;
    c.wide = fused_is_norm(op) ? s->C : fc_width(s);
    c.columns = op == FUSED_ACTIVATION ? s->F : c.wide;
    const size_t norm = norm_forward_fp8_workspace_bytes(FUSED_ROWS, c.columns, m->dev);
    const size_t cast = fp8_cast_workspace_bytes(FUSED_ROWS, c.columns);
    *bytes = fused_floats_bytes(&c) + 2 * plan_aligned(fused_outputs_bytes(c.columns)) + (norm > cast ? norm : cast);
    return c;
}
// Gives c its memory, at least fused_check_of's bytes.
static void fused_place(struct fused_check *c, char *memory) {
    const size_t outputs = plan_aligned(fused_outputs_bytes(c->columns));
    c->apart = (struct fused_outputs *)memory;
    c->fused = (struct fused_outputs *)(memory + outputs);
    c->result = (floatX *)(memory + 2 * outputs);
    c->noise = c->result + FUSED_ROWS * (int64_t)c->columns;
    c->workspace = memory + 2 * outputs + fused_floats_bytes(c);
}
// Returns the cast of c's op to o, as the model makes it.
static struct fp8_cast fused_cast(const struct gpt *m, const struct fused_check *c, struct fused_outputs *o) {
    const int64_t n = FUSED_ROWS * (int64_t)c->columns;
    const bool back = c->op == FUSED_ACTIVATION_BACKWARD;
    float *const dbias = (float *)(fused_sum(o) + n);
    struct fp8_cast to = empty_cast(&o->scale, o->counts);
    to.rows.codes = (fp8 *)(dbias + c->columns);
    to.columns.codes = to.rows.codes + n;
    to.rows.inverse = to.columns.inverse = &o->scale.inverse;
    to.rows.format = to.columns.format = fp8_format_of(&m->fp8, back ? FP8_GRADIENT : FP8_INPUT);
    to.add_dbias = back && is_trained(m, m->fp8.first_layer, linear_row(LINEAR_FC, &m->shape.layer).bias);
    to.dbias = to.add_dbias ? dbias : NULL;
    return to;
}
// Runs c's op to c->fused, or, if `apart`, the op, fp8_amax and fp8_cast one after the other to c->apart.
static void fused_run(const struct gpt *m, const struct fused_check *c, bool apart) {
    struct fused_outputs *const o = apart ? c->apart : c->fused;
    const struct fp8_cast to = fused_cast(m, c, o);
    const struct norm_options norm = norm_options_of(m, NULL);
    const struct dropout dropout = {(float)m->config.model.hidden_dropout, 9, 8, 7, DROPOUT_MLP_PROJECTION, NULL};
    const floatX *second = c->noise + FUSED_SHIFT, *third = second + FUSED_SHIFT;
    const floatX *bias = norm.kind == NORM_LAYERNORM ? c->noise : NULL;
    floatX *const sum = c->op == FUSED_RESIDUAL_NORM ? fused_sum(o) : NULL;
    const int N = FUSED_ROWS, F = m->shape.layer.F;
#define FORWARD(name) name##_forward_fp8(to, c->noise, N, F, c->workspace, m->dev)
#define BACKWARD(name) name##_backward_fp8(to, second, c->noise, N, F, c->workspace, m->dev)
    switch (c->op) {
    case FUSED_NORM:
    case FUSED_RESIDUAL_NORM:
        if (!apart)
            norm_forward_fp8(to, sum, o->mean, o->rstd, c->noise, sum, third, bias, N, c->columns, norm,
                             residual_scale(m), dropout, c->workspace, m->dev);
        else if (sum)
            residual_norm_forward(sum, c->result, o->mean, o->rstd, c->noise, sum, third, bias, N, c->columns, norm,
                                  residual_scale(m), dropout, m->dev);
        else
            norm_forward(c->result, o->mean, o->rstd, c->noise, third, bias, N, c->columns, norm, m->dev);
        break;
    case FUSED_ACTIVATION:
        if (apart)
            mlp_activation_forward(plain_sink(c->result), c->noise, N, &m->shape, m->dev);
        else
            ACTIVATION_SWITCH(m->shape.activation, FORWARD, FORWARD)
        break;
    case FUSED_ACTIVATION_BACKWARD:
        if (apart)
            mlp_activation_backward(plain_sink(c->result), second, c->noise, N, &m->shape, m->dev);
        else
            ACTIVATION_SWITCH(m->shape.activation, BACKWARD, BACKWARD)
        break;
    case FUSED_OPS: break;
    }
#undef BACKWARD
#undef FORWARD
    if (!apart)
        return;
    fp8_amax(&o->scale.amax, c->result, N * (int64_t)c->columns, m->dev);
    fp8_cast(to, c->result, N, c->columns, c->workspace, m->dev);
}
// Fills x (n) with numbers in [-2, 2), one in 19 times 2^-20 and another one times 16.
static void fused_fill(floatX *x, int64_t n) {
    uint32_t seed = 1;
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = to_floatX(ldexpf((float)(seed >> 8) * 0x1p-22f - 2, i % 19 == 3 ? -20 : i % 19 == 5 ? 4 : 0));
    }
}
// Whether c's op gives the same bits by itself and apart. delayed: the tensor's scale; 0: there is none yet.
static bool fused_is_right(const struct gpt *m, const struct fused_check *c, float delayed) {
    const size_t bytes = fused_outputs_bytes(c->columns);
    const int64_t n = FUSED_ROWS * (int64_t)c->columns, inputs = FUSED_ROWS * (int64_t)c->wide + 2 * FUSED_SHIFT;
    char *const outputs = (char *)plan_allocate(2, bytes);
    floatX *const noise = (floatX *)plan_allocate((size_t)inputs, sizeof *noise);
    struct fused_outputs *const start = (struct fused_outputs *)outputs;
    memset(outputs + sizeof *start, 0xff, bytes - sizeof *start); // NaNs, so that lost work shows
    start->scale.delayed = delayed;
    fused_fill(noise, inputs);
    fused_fill(fused_sum(start), n);
    memset(fused_sum(start) + n, 0, (size_t)c->columns * sizeof(float)); // dbias, which is added to
    device_upload(c->noise, noise, (size_t)inputs * sizeof *noise, m->dev);
    for (int i = 0; i < 2; i++) {
        device_upload(i == 0 ? c->apart : c->fused, outputs, bytes, m->dev);
        fused_run(m, c, i == 0);
    }
    device_download(outputs, c->apart, bytes, m->dev);
    device_download(outputs + bytes, c->fused, bytes, m->dev);
    const bool equal = memcmp(outputs, outputs + bytes, bytes) == 0;
    free(noise);
    free(outputs);
    return equal;
}
// Whether an FP8 layer of this run has the op, as producer_writes_fp8 says. FP8 must be on.
static bool fused_is_used(const struct gpt *m, enum fused_op op) {
    const struct layer_shape *s = &m->shape.layer;
    const bool norms = !linear_row(LINEAR_QKV, s).source.shared || !linear_row(LINEAR_FC, s).source.shared;
    return fp8_is_delayed(&m->fp8) && (fused_is_norm(op) ? norms : !linear_row(LINEAR_MLP_PROJ, s).source.shared);
}
// Ends the program if one of this run's ops that cast gives other bits than apart. memory: `room` bytes on the device.
static void check_fused_casts(struct run *r, char *memory, size_t room) {
    static const struct timed_check checks[FUSED_OPS] = {
        {"a norm that casts to FP8", "--fp8-recipe tensorwise has none"},
        {"a norm after a residual that casts to FP8", "--fp8-recipe tensorwise has none"},
        {"the activation that casts to FP8", "--fp8-recipe tensorwise has none"},
        {"the activation's backward that casts to FP8", "--fp8-recipe tensorwise has none"},
    };
    for (int i = 0; i < FUSED_OPS; i++) {
        size_t bytes = 0;
        struct fused_check c = fused_check_of(r->model, (enum fused_op)i, &bytes);
        if (!fused_is_used(r->model, c.op) || check_lacks_room(r, &checks[i], bytes, room))
            continue;
        fused_place(&c, memory);
        deadline_begin(r, &checks[i], 0);
        if (!fused_is_right(r->model, &c, 0) || !fused_is_right(r->model, &c, FUSED_DELAYED))
            fail("self-check: %s gives other bits on this GPU than the op and the cast one after the other; %s",
                 checks[i].what, checks[i].instead);
        deadline_end(r);
    }
}

// ---- Scales that come from earlier steps ----

enum { SCALES_CHECKED = FP8_OPERANDS + 2, SCALES_RANKS = 2, SCALES_WIDTH = SCALES_CHECKED + 1 };
// The arrays of fp8_scales_update but the histories (SCALES_CHECKED, delay.length), which follow them.
struct scales_check {
    struct fp8_scale scales[SCALES_CHECKED];
    struct gradient_check check;
    double reports[SCALES_RANKS][SCALES_WIDTH]; // the first column is not of scales
};
static size_t scales_check_bytes(struct fp8_delay delay) {
    return sizeof(struct scales_check) + (size_t)SCALES_CHECKED * (size_t)delay.length * sizeof(float);
}
// Does on the host what fp8_scales_update does. history: as struct scales_check's.
static void scales_by_host(struct scales_check *c, float *history, struct fp8_delay delay,
                           struct fp8_scales_order order) {
    for (int i = 0; i < SCALES_CHECKED; i++, history += delay.length) {
        const uint32_t bits = fp8_largest_report(&c->reports[0][1], SCALES_RANKS, SCALES_WIDTH, i);
        const float newest = fp8_float_from_bits(bits);
        float largest = newest;
        memmove(history + 1, history, (size_t)(delay.length - 1) * sizeof *history);
        history[0] = newest;
        for (int j = 1; j < delay.length; j++)
            largest = fmaxf(largest, history[j]);
        fp8_end_one(&c->scales[i], i, delay.most_recent ? newest : largest, true, delay.margin, order);
    }
}
// Whether fp8_scales_update gives the host's numbers. memory: scales_check_bytes on the device, overwritten.
static bool scales_are_right(const struct fp8_state *f, char *memory, struct device *dev) {
    const struct fp8_delay delay = fp8_delayed_scales(f).delay;
    const struct fp8_scales_order order = {FP8_OPERANDS, FP8_OPERANDS + 1, f->gradients};
    const size_t bytes = scales_check_bytes(delay);
    struct scales_check *const right = (struct scales_check *)plan_allocate(2, bytes);
    struct scales_check *const got = (struct scales_check *)((char *)right + bytes);
    struct scales_check *const there = (struct scales_check *)memory;
    float *const history = (float *)(right + 1);
    right->check.finite = 1;
    for (int i = 0; i < SCALES_CHECKED * delay.length; i++)
        history[i] = ldexpf((float)(i * 7 % 31), i % 5 - 3);
    for (int i = 0; i < SCALES_RANKS * SCALES_WIDTH; i++)
        right->reports[i / SCALES_WIDTH][i % SCALES_WIDTH] = ldexp(i * 5 % 13 + 0.5, i % 7 - 3);
    device_upload(there, right, bytes, dev);
    fp8_scales_update(there->scales, (float *)(there + 1), &there->check, &there->reports[0][0], SCALES_RANKS,
                      SCALES_WIDTH, 1, SCALES_CHECKED, delay, order, dev);
    device_download(got, there, bytes, dev);
    scales_by_host(right, history, delay, order);
    const bool equal = memcmp(right, got, bytes) == 0;
    free(right);
    return equal;
}
// Ends the program if the GPU makes other scales of histories than the host. memory: `room` bytes on the device.
static void check_scales(struct run *r, char *memory, size_t room) {
    static const struct timed_check check = {"the update of FP8's scales", "leave out --fp8-format"};
    const struct fp8_delayed delayed = fp8_delayed_scales(&r->model->fp8);
    if (delayed.count == 0 || check_lacks_room(r, &check, scales_check_bytes(delayed.delay), room))
        return;
    deadline_begin(r, &check, 0);
    if (!scales_are_right(&r->model->fp8, memory, &r->dev))
        fail("self-check: %s gives other numbers on this GPU than on the host; %s", check.what, check.instead);
    deadline_end(r);
}

#endif
