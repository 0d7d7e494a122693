// Reports of a memory plan: a table on the terminal (--plan), every buffer as JSON (--plan-json), and a picture as SVG
// (--plan-picture). The plan must have been placed (plan_place).
#pragma once
#include "memory.cuh"              // struct plan
#include "run/report_file.h"       // report_file_open
#include "runtime/machine/error.h" // fail
#include "runtime/text/json.h"     // json_writer
#include "runtime/text/log.h"      // log_bytes, log_count
#include <stdbool.h>               // bool
#include <stdint.h>                // SIZE_MAX
#include <stdio.h>                 // FILE, fprintf
#include <stdlib.h>                // free
#include <string.h>                // strlen, strncmp, strstr, strerror

// Prints one row per category of the device's memory: its live bytes in the peak phase, and the most in any phase. The
// rows sum up to the peak. Below them the host's arenas, and transfer_bytes: what a step copies each way.
// one_memory: the device's memory is the host's.
static void plan_print(const struct plan *plan, const size_t transfer_bytes[TRANSFER_DIRECTIONS], bool one_memory,
                       FILE *file);

// Writes the sizes of the plan, its phases, every buffer that owns bytes (name, category, layer, memory, offset,
// lifetime) and every transfer. Offsets count from the start of the first arena of the same memory, as if its arenas were
// adjacent, so that any two buffers of one memory may be compared and all end within its peak. Ends the program where the
// file cannot be written.
static void plan_write_json(const struct plan *plan, const char *path);

// Draws the activations arena, addresses upwards and phases to the right, and above it a bar of all the device's arenas.
// Ends the program where the file cannot be written.
static void plan_write_svg(const struct plan *plan, const char *path);

// ---- the table ----

// First and last phase of a buffer; one that is not of a packed arena is live in every phase.
static int plan_first_phase(const struct plan_buffer *buffer) {
    return plan_arena_is_packed(buffer->arena) ? buffer->first_phase : 0;
}
static int plan_last_phase(const struct plan *plan, const struct plan_buffer *buffer) {
    return plan_arena_is_packed(buffer->arena) ? buffer->last_phase : plan->phase_count > 0 ? plan->phase_count - 1 : 0;
}

enum { EVERY_CATEGORY = -1 };

// live[p] = the sum of the device's live buffers in phase p, not rounded up, of one category or of EVERY_CATEGORY. A
// plan without phases has one element. The caller frees the array.
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

// Prints a row. share_of: the bytes that are 100 %. most: the most bytes in any phase; SIZE_MAX: not printed.
static void plan_print_row(FILE *file, const char *name, size_t bytes, size_t share_of, size_t most) {
    char size[LOG_NUMBER], exact[LOG_NUMBER], largest[LOG_NUMBER];
    fprintf(file, "  %-36s %11s %23s %5.1f %%", name, log_bytes(size, (int64_t)bytes), log_count(exact, (int64_t)bytes),
            share_of > 0 ? 100.0 * (double)bytes / (double)share_of : 0.0);
    if (most != SIZE_MAX)
        fprintf(file, " %15s", log_bytes(largest, (int64_t)most));
    fputc('\n', file);
}

static void plan_print_arenas(const struct plan *plan, enum plan_memory memory, size_t peak, size_t bound, FILE *file) {
    char text[LOG_NUMBER];
    for (int a = 0; a < ARENA_COUNT; a++)
        if (plan_arena_memory((enum plan_arena)a) == memory && (memory == MEMORY_DEVICE || plan->arena_bytes[a] > 0))
            plan_print_row(file, plan_arena_name((enum plan_arena)a), plan->arena_bytes[a], peak, SIZE_MAX);
    fprintf(file, "  no placement takes less than %s; this one takes %.2f %% more\n", log_bytes(text, (int64_t)bound),
            bound > 0 ? 100.0 * (double)(peak - bound) / (double)bound : 0.0);
}

// Whether the host's memory holds more than what every run stages there.
static bool plan_offloads(const struct plan *plan) {
    return plan->host_peak_bytes > plan->arena_bytes[ARENA_HOST_STAGING];
}
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
                plan->phases[plan->peak_phase]);
    fprintf(file, "arenas (one allocation each)\n");
    plan_print_arenas(plan, MEMORY_DEVICE, plan->peak_bytes, plan->lower_bound_bytes, file);
    plan_print_host(plan, transfer_bytes, one_memory, file);
}

// ---- JSON ----

static void plan_json_names(struct json *json, const char *key, char (*names)[PLAN_NAME_CHARS], int count) {
    json_array_begin(json, key);
    for (int i = 0; i < count; i++)
        json_str(json, NULL, names[i]);
    json_array_end(json);
}

// Begins an object of an array, on a line of its own.
static void plan_json_line_begin(struct json *json) {
    json_object_begin(json, NULL);
    json->pretty = false;
}
static void plan_json_line_end(struct json *json) {
    json_object_end(json);
    json->pretty = true;
}

// Writes the sizes of a memory's arenas, and sets where each begins.
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
    plan_json_names(&json, "categories", plan->categories, plan->category_count);
    plan_json_names(&json, "phases", plan->phases, plan->phase_count);
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

// ---- the picture ----

// The page of the SVG and the plot's place on it, in pixels.
struct plan_picture {
    FILE *file;
    const struct plan *plan;
    int *colours; // by category: its number, from 1, among those of the activations arena; 0: of another arena
    double width, height, left, right, top, bottom; // of the page, and the margins around the plot
};

static const char *plan_colour(const struct plan_picture *picture, int category) {
    static const char *const colours[] = {"#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#edc948", "#76b7b2",
                                          "#9c755f", "#ff9da7", "#1f4e79", "#a6d854", "#bcbd22", "#17becf", "#7f3c8d",
                                          "#d37295", "#a0cbe8", "#ffbe7d", "#2e6b34", "#c7c7c7"};
    return colours[(size_t)(picture->colours[category] - 1) % (sizeof colours / sizeof *colours)];
}

static double plan_x(const struct plan_picture *picture, int phase) {
    const int phases = picture->plan->phase_count > 0 ? picture->plan->phase_count : 1;
    return picture->left + (picture->width - picture->left - picture->right) * phase / phases;
}
static double plan_y(const struct plan_picture *picture, size_t bytes) {
    const size_t most = picture->plan->arena_bytes[ARENA_ACTIVATIONS];
    const double span = picture->height - picture->top - picture->bottom;
    return picture->height - picture->bottom - (most > 0 ? span * (double)bytes / (double)most : 0);
}

static void plan_svg_text(FILE *file, const char *text) {
    for (; *text; text++)
        switch (*text) {
        case '<': fputs("&lt;", file); break;
        case '>': fputs("&gt;", file); break;
        case '&': fputs("&amp;", file); break;
        case '"': fputs("&quot;", file); break;
        default: fputc((unsigned char)*text < 0x20 ? ' ' : *text, file);
        }
}

static void plan_svg_buffer(const struct plan_picture *picture, const struct plan_buffer *buffer) {
    const struct plan *plan = picture->plan;
    char size[LOG_NUMBER];
    const double x = plan_x(picture, buffer->first_phase), y = plan_y(picture, buffer->offset + buffer->bytes);
    fprintf(picture->file, "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\"><title>", x, y,
            plan_x(picture, buffer->last_phase + 1) - x, plan_y(picture, buffer->offset) - y,
            plan_colour(picture, buffer->category));
    if (buffer->layer >= 0)
        fprintf(picture->file, "layer %d: ", buffer->layer);
    plan_svg_text(picture->file, buffer->name);
    fprintf(picture->file, "\n%s (%zu bytes) at %zu\n", log_bytes(size, (int64_t)buffer->bytes), buffer->bytes,
            buffer->offset);
    plan_svg_text(picture->file, plan->categories[buffer->category]);
    fprintf(picture->file, "\nphases %d to %d: ", buffer->first_phase, buffer->last_phase);
    plan_svg_text(picture->file, plan->phases[buffer->first_phase]);
    fputs(" ... ", picture->file);
    plan_svg_text(picture->file, plan->phases[buffer->last_phase]);
    fputs("</title></rect>\n", picture->file);
}

// Characters of a phase's name that name its group: those before ": ", or all.
static int plan_group_chars(const char *phase) {
    const char *colon = strstr(phase, ": ");
    return colon ? (int)(colon - phase) : (int)strlen(phase);
}

// Draws the horizontal axis: groups of phases, alternately shaded, and as many of their names as have room.
static void plan_svg_phase_axis(const struct plan_picture *picture) {
    const struct plan *plan = picture->plan;
    const double bottom = picture->height - picture->bottom;
    double last_label = -1e9;
    bool shaded = false;
    for (int first = 0, next; first < plan->phase_count; first = next, shaded = !shaded) {
        const int chars = plan_group_chars(plan->phases[first]);
        for (next = first + 1; next < plan->phase_count; next++)
            if (plan_group_chars(plan->phases[next]) != chars ||
                strncmp(plan->phases[first], plan->phases[next], (size_t)chars) != 0)
                break;
        const double x = plan_x(picture, first), end = plan_x(picture, next), middle = (x + end) / 2;
        if (shaded)
            fprintf(picture->file, "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"#f0f0f0\"/>\n", x,
                    picture->top, end - x, bottom - picture->top);
        if (middle - last_label < 11) // pixels that a line of text needs
            continue;
        last_label = middle;
        fprintf(picture->file, "<text transform=\"translate(%.2f %.2f) rotate(-90)\" text-anchor=\"end\">",
                middle + 3.5, bottom + 6);
        char name[PLAN_NAME_CHARS];
        memcpy(name, plan->phases[first], (size_t)chars);
        name[chars] = 0;
        plan_svg_text(picture->file, name);
        fputs("</text>\n", picture->file);
    }
}

// Draws the vertical axis: lines and addresses at equal distances, a power of two.
static void plan_svg_address_axis(const struct plan_picture *picture) {
    const size_t most = picture->plan->arena_bytes[ARENA_ACTIVATIONS];
    size_t step = 1;
    while (step < most / 8)
        step *= 2;
    for (size_t at = 0; at <= most; at += step) {
        char size[LOG_NUMBER];
        const double y = plan_y(picture, at);
        fprintf(picture->file,
                "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%.2f\" y2=\"%.2f\" stroke=\"#ccc\"/>"
                "<text x=\"%.1f\" y=\"%.2f\" text-anchor=\"end\">%s</text>\n",
                picture->left - 4, picture->width - picture->right, y, y, picture->left - 8, y + 3.5,
                log_bytes(size, (int64_t)at));
        if (SIZE_MAX - at < step)
            break;
    }
}

// Draws the sum of the live buffers in each phase: the height of a placement without gaps.
static void plan_svg_live(const struct plan_picture *picture) {
    size_t *live = plan_live_bytes(picture->plan, EVERY_CATEGORY, true);
    fputs("<path fill=\"none\" stroke=\"#000\" stroke-width=\"0.8\" d=\"", picture->file);
    for (int p = 0; p < picture->plan->phase_count; p++)
        fprintf(picture->file, "%s%.2f %.2f H%.2f", p == 0 ? "M" : "L", plan_x(picture, p), plan_y(picture, live[p]),
                plan_x(picture, p + 1));
    fputs("\"/>\n", picture->file);
    free(live);
}

static void plan_svg_legend_row(const struct plan_picture *picture, double y, const char *colour, const char *name,
                                size_t bytes) {
    const double x = picture->width - picture->right + 20;
    char size[LOG_NUMBER];
    fprintf(picture->file,
            "<rect x=\"%.0f\" y=\"%.0f\" width=\"12\" height=\"12\" fill=\"%s\"/>"
            "<text x=\"%.0f\" y=\"%.0f\">",
            x, y - 10, colour, x + 18, y);
    plan_svg_text(picture->file, name);
    fprintf(picture->file, "</text><text x=\"%.0f\" y=\"%.0f\" text-anchor=\"end\">%s</text>\n", picture->width - 15, y,
            log_bytes(size, (int64_t)bytes));
}

// Draws the bar of the device's arenas, to scale, and their rows of the legend.
static void plan_svg_arenas(const struct plan_picture *picture) {
    static const char *const greys[] = {"#6e6e6e", "#969696", "#bababa", "#dedede"};
    enum { GREYS = sizeof greys / sizeof *greys };
    const double span = picture->width - picture->left - picture->right;
    double x = picture->left;
    for (int a = 0, row = 0; a < ARENA_COUNT; a++) {
        if (plan_arena_memory((enum plan_arena)a) != MEMORY_DEVICE)
            continue;
        const char *grey = greys[row % GREYS];
        const size_t bytes = picture->plan->arena_bytes[a];
        const double width = bytes > 0 ? span * (double)bytes / (double)picture->plan->peak_bytes : 0;
        fprintf(picture->file,
                "<rect x=\"%.2f\" y=\"48\" width=\"%.2f\" height=\"22\" fill=\"%s\"><title>%s (%zu bytes)</title>"
                "</rect>\n",
                x, width, grey, plan_arena_name((enum plan_arena)a), bytes);
        plan_svg_legend_row(picture, 40 + 20 * row++, grey, plan_arena_name((enum plan_arena)a), bytes);
        x += width;
    }
}

static void plan_svg_legend(const struct plan_picture *picture) {
    const struct plan *plan = picture->plan;
    const double x = picture->width - picture->right + 20;
    double y = picture->top + 40;
    fprintf(picture->file, "<text x=\"%.0f\" y=\"%.0f\" font-weight=\"bold\">activations: most at any time</text>\n", x,
            y);
    for (int c = 0; c < plan->category_count; c++) {
        size_t *live = plan_live_bytes(plan, c, true), most = 0;
        for (int p = 0; p < plan->phase_count; p++)
            most = live[p] > most ? live[p] : most;
        if (most > 0)
            plan_svg_legend_row(picture, y += 20, plan_colour(picture, c), plan->categories[c], most);
        free(live);
    }
    y += 24;
    fprintf(picture->file,
            "<line x1=\"%.0f\" x2=\"%.0f\" y1=\"%.0f\" y2=\"%.0f\" stroke=\"#000\"/>"
            "<text x=\"%.0f\" y=\"%.0f\">sum of the live buffers</text>\n",
            x, x + 12, y - 4, y - 4, x + 18, y);
}

static int *plan_picture_colours(const struct plan *plan) {
    int *colours = (int *)plan_allocate((size_t)plan->category_count, sizeof *colours), next = 0;
    for (int i = 0; i < plan->count; i++)
        if (plan->buffers[i].arena == ARENA_ACTIVATIONS && colours[plan->buffers[i].category] == 0)
            colours[plan->buffers[i].category] = ++next;
    return colours;
}

static void plan_write_svg(const struct plan *plan, const char *path) {
    struct report_file out = report_file_open("--plan-picture", path);
    struct plan_picture picture = {out.file, plan, NULL, 1500, 860, 100, 310, 90, 150};
    picture.colours = plan_picture_colours(plan);
    char peak[LOG_NUMBER];
    fprintf(out.file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" height=\"%.0f\" "
            "font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n",
            picture.width, picture.height, picture.width, picture.height);
    fprintf(out.file, "<text x=\"%.0f\" y=\"34\" font-size=\"17\">Memory of a step: peak %s (%zu bytes)", picture.left,
            log_bytes(peak, (int64_t)plan->peak_bytes), plan->peak_bytes);
    if (plan->peak_phase >= 0) {
        fputs(", reached in '", out.file);
        plan_svg_text(out.file, plan->phases[plan->peak_phase]);
        fputc('\'', out.file);
    }
    fputs("</text>\n", out.file);
    plan_svg_arenas(&picture);
    plan_svg_phase_axis(&picture);
    plan_svg_address_axis(&picture);
    fputs("<g stroke=\"#fff\" stroke-width=\"0.25\">\n", out.file);
    for (int i = 0; i < plan->count; i++) {
        const struct plan_buffer *buffer = &plan->buffers[i];
        if (buffer->arena == ARENA_ACTIVATIONS && plan_is_packed(buffer))
            plan_svg_buffer(&picture, buffer);
    }
    fputs("</g>\n", out.file);
    plan_svg_live(&picture);
    plan_svg_legend(&picture);
    fprintf(out.file,
            "<text transform=\"translate(18 %.0f) rotate(-90)\" text-anchor=\"middle\" font-size=\"13\">address in the "
            "activations arena</text>\n<text x=\"%.0f\" y=\"%.0f\" text-anchor=\"middle\" font-size=\"13\">phases of "
            "the step</text>\n</svg>\n",
            (picture.height + picture.top - picture.bottom) / 2, (picture.width + picture.left - picture.right) / 2,
            picture.height - 10);
    free(picture.colours);
    report_file_close(&out);
}
