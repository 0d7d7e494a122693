// Reports of a placed plan: tables on the terminal (--plan=full) and every buffer as JSON (--plan-json).
#pragma once
#include "memory.cuh"          // struct plan
#include "run/report_file.h"   // report_file_open
#include "runtime/text/json.h" // json_writer
#include "runtime/text/log.h"  // log_bytes, log_count
#include <stdbool.h>           // bool
#include <stdint.h>            // SIZE_MAX
#include <stdio.h>             // FILE, fprintf
#include <stdlib.h>            // free

// Prints, by category of the device's memory, the live bytes in the peak phase (with gaps, their sum is the peak) and
// the most in any phase; then both memories' arenas and a step's copies. one_memory: the device's is the host's.
static void plan_print(const struct plan *plan, const size_t transfer_bytes[TRANSFER_DIRECTIONS], bool one_memory,
                       FILE *file);

// Writes the placed plan as JSON: sizes, predicted times if any, phases, buffers that own bytes, and transfers. Offsets
// count from a memory's first arena, as if arenas were adjacent. Ends the program if the file can't be written.
static void plan_write_json(const struct plan *plan, const char *path);

// ---- the table ----

// Returns the first phase of a buffer: 0 if its arena is not packed, as it then lives in every phase.
static int plan_first_phase(const struct plan_buffer *buffer) {
    return plan_arena_is_packed(buffer->arena) ? buffer->first_phase : 0;
}
// Returns the last phase of a buffer: the plan's last if its arena is not packed.
static int plan_last_phase(const struct plan *plan, const struct plan_buffer *buffer) {
    return plan_arena_is_packed(buffer->arena) ? buffer->last_phase : plan->phase_count > 0 ? plan->phase_count - 1 : 0;
}

enum { EVERY_CATEGORY = -1 };

// Returns how many bytes of the device's buffers live in each phase (phases, at least 1), which the caller frees: of
// one category or EVERY_CATEGORY, not rounded up. activations_only: only ARENA_ACTIVATIONS.
static size_t *plan_live_bytes(const struct plan *plan, int category, bool activations_only) {
    const int phases = plan->phase_count > 0 ? plan->phase_count : 1;
    size_t *live = (size_t *)plan_allocate((size_t)phases + 1, sizeof *live); // differences (modulo 2^64), then sums
    for (int i = 0; i < plan->count; i++) {
        const struct plan_buffer *buffer = &plan->buffers[i];
        if (plan_arena_memory(buffer->arena) != MEMORY_DEVICE || !plan_owns_bytes(buffer) ||
            (category != EVERY_CATEGORY && buffer->category != category) ||
            (activations_only && buffer->arena != ARENA_ACTIVATIONS))
            continue;
        live[plan_first_phase(buffer)] += buffer->bytes;
        live[plan_last_phase(plan, buffer) + 1] -= buffer->bytes;
    }
    for (int p = 1; p < phases; p++)
        live[p] += live[p - 1];
    return live;
}

// Prints a row. share_of: the bytes that are 100 %. most: the most bytes in any phase, or SIZE_MAX to leave it out.
static void plan_print_row(FILE *file, const char *name, size_t bytes, size_t share_of, size_t most) {
    char size[LOG_NUMBER], exact[LOG_NUMBER], largest[LOG_NUMBER];
    fprintf(file, "  %-36s %11s %23s %5.1f %%", name, log_bytes(size, (int64_t)bytes), log_count(exact, (int64_t)bytes),
            share_of > 0 ? 100.0 * (double)bytes / (double)share_of : 0.0);
    if (most != SIZE_MAX)
        fprintf(file, " %15s", log_bytes(largest, (int64_t)most));
    fputc('\n', file);
}

// Prints a memory's arenas as shares of `peak`, and by how much `peak` exceeds `bound`, the least of any placement.
static void plan_print_arenas(const struct plan *plan, enum plan_memory memory, size_t peak, size_t bound, FILE *file) {
    char text[LOG_NUMBER];
    for (int a = 0; a < ARENA_COUNT; a++)
        if (plan_arena_memory((enum plan_arena)a) == memory && (memory == MEMORY_DEVICE || plan->arena_bytes[a] > 0))
            plan_print_row(file, plan_arena_name((enum plan_arena)a), plan->arena_bytes[a], peak, SIZE_MAX);
    fprintf(file, "  no placement takes less than %s; this one takes %.2f %% more\n", log_bytes(text, (int64_t)bound),
            bound > 0 ? 100.0 * (double)(peak - bound) / (double)bound : 0.0);
}

// Whether the host's memory holds more than the staging that every run has there.
static bool plan_offloads(const struct plan *plan) {
    return plan->host_peak_bytes > plan->arena_bytes[ARENA_HOST_STAGING];
}
// Prints the host's arenas, staging too, and a step's copies. With one_memory, adds that offloading saves nothing.
static void plan_print_host(const struct plan *plan, const size_t transfer_bytes[TRANSFER_DIRECTIONS], bool one_memory,
                            FILE *file) {
    char out[LOG_NUMBER], in[LOG_NUMBER];
    fprintf(file, "pinned memory of the host\n");
    plan_print_arenas(plan, MEMORY_HOST, plan->host_peak_bytes, plan->host_lower_bound_bytes, file);
    plan_print_row(file, "sum", plan->host_peak_bytes, plan->host_peak_bytes, SIZE_MAX);
    if (plan->transfer_count > 0)
        fprintf(file, "  a step copies %s to the host and %s to the device\n",
                log_bytes(out, (int64_t)transfer_bytes[TRANSFER_TO_HOST]),
                log_bytes(in, (int64_t)transfer_bytes[TRANSFER_TO_DEVICE]));
    if (one_memory && plan_offloads(plan))
        fprintf(file, "  on the cpu target the device's memory is the host's: what is offloaded saves nothing there\n");
}

static void plan_print(const struct plan *plan, const size_t transfer_bytes[TRANSFER_DIRECTIONS], bool one_memory,
                       FILE *file) {
    const int peak_phase = plan->peak_phase >= 0 ? plan->peak_phase : 0;
    fprintf(file, "memory plan\n  %-36s %11s %23s %7s %15s\n", "category", "at the peak", "bytes", "share",
            "largest in time");
    size_t sum = 0;
    for (int c = 0; c < plan->category_count; c++) {
        size_t *live = plan_live_bytes(plan, c, false), most = 0;
        for (int p = 0; p < plan->phase_count || p < 1; p++)
            most = live[p] > most ? live[p] : most;
        if (most > 0)
            plan_print_row(file, plan->categories[c], live[peak_phase], plan->peak_bytes, most);
        sum += live[peak_phase];
        free(live);
    }
    plan_print_row(file, "alignment and gaps", plan->peak_bytes - sum, plan->peak_bytes, SIZE_MAX);
    plan_print_row(file, "peak", plan->peak_bytes, plan->peak_bytes, SIZE_MAX);
    if (plan->peak_phase >= 0)
        fprintf(file, "  reached in phase %d of 0 to %d: %s\n", plan->peak_phase, plan->phase_count - 1,
                plan->phases[plan->peak_phase].name);
    fprintf(file, "arenas (one allocation each)\n");
    plan_print_arenas(plan, MEMORY_DEVICE, plan->peak_bytes, plan->lower_bound_bytes, file);
    plan_print_host(plan, transfer_bytes, one_memory, file);
}

// ---- JSON ----

// Writes the names of all categories, then of all phases.
static void plan_json_names(struct json *json, const struct plan *plan) {
    json_array_begin(json, "categories");
    for (int i = 0; i < plan->category_count; i++)
        json_str(json, NULL, plan->categories[i]);
    json_array_end(json);
    json_array_begin(json, "phases");
    for (int i = 0; i < plan->phase_count; i++)
        json_str(json, NULL, plan->phases[i].name);
    json_array_end(json);
}

// Begins an unnamed object on one line of a pretty JSON; plan_json_line_end ends it.
static void plan_json_line_begin(struct json *json) {
    json_object_begin(json, NULL);
    json->pretty = false;
}
// Ends the object that plan_json_line_begin began. What follows is on lines of its own again.
static void plan_json_line_end(struct json *json) {
    json_object_end(json);
    json->pretty = true;
}

// Writes the sizes of a memory's arenas, and sets their entries of arena_offset to where each begins.
static void plan_json_arenas(struct json *json, const struct plan *plan, enum plan_memory memory,
                             size_t arena_offset[ARENA_COUNT]) {
    size_t end = 0;
    json_array_begin(json, "arenas");
    for (int a = 0; a < ARENA_COUNT; a++) {
        if (plan_arena_memory((enum plan_arena)a) != memory)
            continue;
        arena_offset[a] = end;
        end += plan->arena_bytes[a];
        plan_json_line_begin(json);
        json_str(json, "name", plan_arena_name((enum plan_arena)a));
        json_uint(json, "offset", arena_offset[a]);
        json_uint(json, "bytes", plan->arena_bytes[a]);
        plan_json_line_end(json);
    }
    json_array_end(json);
}
// Writes a buffer, with its offset in its whole memory. arena_offset: set by plan_json_arenas.
static void plan_json_buffer(struct json *json, const struct plan *plan, const struct plan_buffer *buffer,
                             const size_t arena_offset[ARENA_COUNT]) {
    plan_json_line_begin(json);
    json_str(json, "name", buffer->name);
    json_str(json, "category", plan->categories[buffer->category]);
    json_int(json, "layer", buffer->layer);
    json_str(json, "memory", plan_arena_memory(buffer->arena) == MEMORY_HOST ? "host" : "device");
    json_str(json, "arena", plan_arena_name(buffer->arena));
    json_uint(json, "bytes", buffer->bytes);
    json_uint(json, "offset", arena_offset[buffer->arena] + buffer->offset);
    json_int(json, "first_phase", plan_first_phase(buffer));
    json_int(json, "last_phase", plan_last_phase(plan, buffer));
    plan_json_line_end(json);
}
static void plan_json_transfers(struct json *json, const struct plan *plan) {
    json_array_begin(json, "transfers");
    for (int i = 0; i < plan->transfer_count; i++) {
        const struct plan_transfer *transfer = &plan->transfers[i];
        plan_json_line_begin(json);
        json_int(json, "phase", transfer->phase);
        json_str(json, "name", transfer->name);
        json_str(json, "direction", transfer->direction == TRANSFER_TO_HOST ? "to host" : "to device");
        json_uint(json, "bytes", transfer->bytes);
        plan_json_line_end(json);
    }
    json_array_end(json);
}
static void plan_json_predicted(struct json *json, const struct plan_prediction *p) {
    json_object_begin(json, "predicted");
    json_double(json, "step_ms", p->step_ms);
    json_double(json, "micro_step_ms", p->micro_step_ms);
    json_double(json, "update_ms", p->update_ms);
    json_double(json, "tokens_per_s", p->tokens_per_s);
    json_double(json, "to_host_bytes", p->to_host_bytes);
    json_double(json, "to_device_bytes", p->to_device_bytes);
    json_str(json, "rates", p->rates);
    json_object_end(json);
}

static void plan_write_json(const struct plan *plan, const char *path) {
    struct report_file out = report_file_open("--plan-json", path);
    struct json json = json_writer(out.file, true);
    json_object_begin(&json, NULL);
    json_uint(&json, "peak_bytes", plan->peak_bytes);
    json_uint(&json, "lower_bound_bytes", plan->lower_bound_bytes);
    json_int(&json, "peak_phase", plan->peak_phase);
    if (plan->predicted.step_ms > 0)
        plan_json_predicted(&json, &plan->predicted);
    size_t arena_offset[ARENA_COUNT];
    plan_json_arenas(&json, plan, MEMORY_DEVICE, arena_offset);
    json_object_begin(&json, "host");
    json_uint(&json, "peak_bytes", plan->host_peak_bytes);
    json_uint(&json, "lower_bound_bytes", plan->host_lower_bound_bytes);
    plan_json_arenas(&json, plan, MEMORY_HOST, arena_offset);
    json_object_end(&json);
    plan_json_names(&json, plan);
    json_array_begin(&json, "buffers");
    for (int i = 0; i < plan->count; i++) {
        const struct plan_buffer *buffer = &plan->buffers[i];
        if (plan_owns_bytes(buffer))
            plan_json_buffer(&json, plan, buffer, arena_offset);
    }
    json_array_end(&json);
    plan_json_transfers(&json, plan);
    json_object_end(&json);
    report_file_close(&out);
}
