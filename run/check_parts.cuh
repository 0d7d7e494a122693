// The self-check of FP8's casts and of copies between host and device, on known numbers: a wrong one ends the program.
#pragma once
#include "run/check_deadline.cuh" // deadline_begin
#include "run/check_fp8_ops.cuh"  // check_fused_casts, check_scales
#include "run/self_check.cuh"     // self_check_any_rank_wants
#include "run/self_known.cuh"     // self_check_known, self_check_keep_right

#ifdef TARGET_CUDA
#include "run/check_copies.cuh"   // copies_are_right
#include "kernels/fp8/blocks.cuh" // fp8_block_scale, fp8_block_inverse
#include "kernels/fp8/cast.cuh"   // fp8_cast

// ---- FP8's casts ----

enum { CAST_ROWS = 128, CAST_COLUMNS = 256, CAST_ELEMENTS = CAST_ROWS * CAST_COLUMNS, CAST_MAX_INVERSES = 1024 };
struct cast_check {
    floatX x[CAST_ELEMENTS]; // (CAST_ROWS, CAST_COLUMNS)
    fp8 rows[CAST_ELEMENTS], columns[CAST_ELEMENTS];
    float row_inverses[CAST_MAX_INVERSES], column_inverses[CAST_MAX_INVERSES];
    struct fp8_scale scale;
    uint64_t counts[FP8_COUNTS];
};

// Fills c->x with numbers in [-2, 2), times 2^0 to 2^-23 by the row, so that one scale for all rows flushes some to 0.
static void cast_fill(struct cast_check *c) {
    uint32_t seed = 1;
    for (int i = 0; i < CAST_ELEMENTS; i++) {
        seed = seed * 1664525u + 1013904223u;
        c->x[i] = to_floatX(ldexpf((float)(seed >> 8) * 0x1p-22f - 2, -(i / CAST_COLUMNS) % 24));
    }
    c->x[CAST_COLUMNS / 2] = to_floatX(0);
}
static struct fp8_cast cast_of(struct cast_check *c, enum fp8_format format, enum fp8_granularity granularity) {
    struct fp8_cast to;
    memset(&to, 0, sizeof to);
    to.rows.codes = c->rows;
    to.columns.codes = c->columns;
    to.rows.inverse = granularity == FP8_PER_TENSOR ? &c->scale.inverse : c->row_inverses;
    to.columns.inverse = granularity == FP8_PER_TENSOR ? &c->scale.inverse : c->column_inverses;
    to.rows.format = to.columns.format = format;
    to.rows.granularity = to.columns.granularity = granularity;
    to.scale = granularity == FP8_PER_TENSOR ? &c->scale : NULL;
    to.counts = c->counts;
    return to;
}
// Casts right->x on the host to ->rows, or transposed to ->columns. Sets inverse scales (FP8_PER_TENSOR: in ->scale).
static void cast_by_host(struct cast_check *right, enum fp8_format format, enum fp8_granularity granularity,
                         bool transposed) {
    const int rows = transposed ? CAST_COLUMNS : CAST_ROWS, depth = transposed ? CAST_ROWS : CAST_COLUMNS;
    const int tall = granularity == FP8_PER_TENSOR ? rows : granularity == FP8_128X128 ? FP8_BLOCK : 1;
    const int wide = granularity == FP8_PER_TENSOR ? depth : FP8_BLOCK;
    const int64_t pitch = fp8_inverse_pitch(granularity, rows, depth);
    fp8 *const codes = transposed ? right->columns : right->rows;
    float *const inverses = transposed ? right->column_inverses : right->row_inverses;
    for (int row = 0; row < rows; row += tall)
        for (int k = 0; k < depth; k += wide) {
            uint32_t amax = 0;
            for (int i = row; i < row + tall; i++)
                for (int j = k; j < k + wide; j++)
                    amax = amax_with(amax, right->x[transposed ? j * CAST_COLUMNS + i : i * CAST_COLUMNS + j]);
            const float scale =
                granularity == FP8_PER_TENSOR ? fp8_scale_of(amax, format) : fp8_block_scale(amax, format);
            for (int i = row; i < row + tall; i++)
                for (int j = k; j < k + wide; j++)
                    codes[i * depth + j] = fp8_encode(
                        to_float(right->x[transposed ? j * CAST_COLUMNS + i : i * CAST_COLUMNS + j]) * scale, format);
            switch (granularity) {
            case FP8_PER_TENSOR:
                right->scale.amax = amax;
                right->scale.inverse = 1.0f / scale;
                break;
            case FP8_1X128: inverses[k / FP8_BLOCK * pitch + row] = fp8_block_inverse(scale); break;
            case FP8_128X128: inverses[row / FP8_BLOCK * pitch + k / FP8_BLOCK] = fp8_block_inverse(scale); break;
            }
        }
}
static bool cast_equal(const struct cast_check *a, const struct cast_check *b, enum fp8_granularity granularity) {
    bool equal =
        memcmp(a->rows, b->rows, sizeof a->rows) == 0 && memcmp(a->columns, b->columns, sizeof a->columns) == 0;
    const int64_t counts[] = {fp8_inverse_count(granularity, CAST_ROWS, CAST_COLUMNS),
                              fp8_inverse_count(granularity, CAST_COLUMNS, CAST_ROWS)};
    if (granularity == FP8_PER_TENSOR)
        return equal && a->scale.inverse == b->scale.inverse && a->scale.amax == b->scale.amax;
    for (int64_t i = 0; i < counts[0]; i++)
        equal = equal && a->row_inverses[i] == b->row_inverses[i];
    for (int64_t i = 0; i < counts[1]; i++)
        equal = equal && a->column_inverses[i] == b->column_inverses[i];
    return equal;
}
// Whether a cast on the device has the same bits as on the host. memory: cast_bytes on the device, overwritten.
static bool cast_is_right(enum fp8_format format, enum fp8_granularity granularity, char *memory, struct device *dev) {
    struct cast_check *const right = (struct cast_check *)calloc(2, sizeof *right), *const got = right + 1;
    struct cast_check *const there = (struct cast_check *)memory;
    if (!right)
        fail("out of memory");
    cast_fill(right);
    *got = *right;
    memset(got->rows, 0xff, sizeof got->rows + sizeof got->columns);
    device_upload(there, got, sizeof *there, dev);
    if (granularity == FP8_PER_TENSOR)
        fp8_amax(&there->scale.amax, there->x, CAST_ELEMENTS, dev);
    fp8_cast(cast_of(there, format, granularity), there->x, CAST_ROWS, CAST_COLUMNS, there + 1, dev);
    device_download(got, there, sizeof *there, dev);
    cast_by_host(right, format, granularity, false);
    cast_by_host(right, format, granularity, true);
    const bool equal = cast_equal(right, got, granularity);
    free(right);
    return equal;
}
static size_t cast_bytes(void) { return sizeof(struct cast_check) + fp8_cast_workspace_bytes(CAST_ROWS, CAST_COLUMNS); }
// Ends the program if FP8, which must be on, casts other bits than the host. Overwrites memory, `room` bytes on device.
static void check_casts(struct run *r, char *memory, size_t room) {
    const struct fp8_state *const f = &r->model->fp8;
    struct timed_check check = {"FP8's cast", "leave out --fp8-format"};
    if (check_lacks_room(r, &check, cast_bytes(), room))
        return;
    static const char *const names[FP8_OPERANDS] = {"inputs", "weights", "gradients"};
    for (int i = 0; i < FP8_OPERANDS; i++) {
        const enum fp8_operand operand = (enum fp8_operand)i;
        snprintf(check.what, sizeof check.what, "FP8's cast of %s", names[i]);
        deadline_begin(r, &check, 0);
        if (!cast_is_right(fp8_format_of(f, operand), fp8_granularity_of(f, operand), memory, &r->dev))
            fail("self-check: FP8's casts of %s have other bits on this GPU than on the host; leave out --fp8-format",
                 names[i]);
        deadline_end(r);
    }
}

// Ends the program if a copy to the GPU and back is not what it was. Overwrites memory, `room` bytes on the device.
static void check_copies(struct run *r, char *memory, size_t room) {
    const size_t most_bytes = 1 << 20, alignment = 256, share = room / (2 * COPIES) / alignment * alignment;
    const struct timed_check copies = {"a copy to this GPU and back", "a run without offloads makes none"};
    struct gpt *m = r->model;
    if (check_lacks_room(r, &copies, 2 * COPIES * alignment, room))
        return;
    deadline_begin(r, &copies, 0);
    if (!copies_are_right(&m->timeline.transfers, memory, share < most_bytes ? share : most_bytes, &r->dev))
        fail("self-check: what is copied to this GPU and back is not what it was; a run without offloads copies none");
    deadline_end(r);
}
// Whether this run copies between host and device while it trains.
static bool check_parts_offloads(const struct arenas *arenas) {
    bool offloads = false;
    for (int i = ARENA_HOST_PARAMETERS; i <= ARENA_HOST_ACTIVATIONS; i++)
        offloads = offloads || arenas->bytes[i] > 0;
    return offloads;
}
// Checks the run's casts and copies, where --self-check asks for it and no earlier start did, in the activations' memory
// before the first step. Warns of what has no room there. A wrong one ends the program. Every rank calls this.
static void check_parts(struct run *r) {
    const struct arenas *arenas = &r->model->timeline.arenas;
    char *const memory = arenas->base[ARENA_ACTIVATIONS], request[SELF_CHECK_REQUEST], key[SELF_CHECK_KEY];
    const size_t room = arenas->bytes[ARENA_ACTIVATIONS];
    const bool casts = fp8_is_on(&r->model->fp8), copies = check_parts_offloads(arenas);
    if (!self_check_any_rank_wants(r) || !parallel_largest(r->parallel, casts || copies, "whether to check"))
        return;
    snprintf(request, sizeof request, " casts and copies, run=%016" PRIx64, self_check_hash_run(r));
    self_check_write_key(key, request, &r->dev);
    if (self_check_known(r, key) == SELF_CHECK_RIGHT)
        return;
    if (casts) {
        check_casts(r, memory, room);
        check_fused_casts(r, memory, room);
        check_scales(r, memory, room);
    }
    if (copies)
        check_copies(r, memory, room);
    if (!parallel_largest(r->parallel, r->self_check.lacked_room, "the check of casts and copies"))
        self_check_keep_right(r, "casts and copies", key);
}

#else

static void check_parts(struct run *r) {}

#endif
