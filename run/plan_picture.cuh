// Draws a placed plan (--plan-picture). On the left is a bar for each memory, with its arenas to scale and a line at
// its budget. On the right is the activations arena, with addresses upwards and phases to the right.
#pragma once
#include "memory.cuh"          // struct plan
#include "model/timeline.cuh"  // enum phase_group
#include "run/plan_report.cuh" // plan_live_bytes, plan_offloads
#include "runtime/text/log.h"  // log_bytes
#include <stdio.h>             // FILE, fprintf
#include <stdlib.h>            // free
#include <string.h>            // strcmp, strlen

// Draws the placed plan as SVG. budget[memory]: the bytes that the plan may take there, or SIZE_MAX, for no line.
static void plan_draw(FILE *file, const struct plan *plan, const size_t budget[MEMORY_COUNT]);

// ---------------------------------------------------------------------------------------------------------------------

#define PLAN_NO_COLOR "#333333"
// Returns a category's color, the same in all pictures, or PLAN_NO_COLOR if it has no row, which a test finds.
static const char *plan_category_color(const char *category) {
    static const struct {
        const char *category, *color;
    } rows[] = {
        {"activations: residual", "#4e79a7"},
        {"activations: norm", "#a0cbe8"},
        {"activations: qkv", "#f28e2b"},
        {"activations: core attention", "#ffbe7d"},
        {"activations: residual branch", "#1f4e79"},
        {"activations: mlp", "#59a14f"},
        {"activations: mlp activation", "#a6d854"},
        {"chunk of the mlp", "#2e6b34"},
        {"recomputed activations", "#76b7b2"},
        {"offloaded activations", "#17becf"},
        {"gradients of activations", "#e15759"},
        {"sums of bias gradients", "#ff9da7"},
        {"gradients of a unit", "#b07aa1"},
        {"parameters of a unit", "#7f3c8d"},
        {"logits and loss", "#edc948"},
        {"workspace", "#c7c7c7"},
        {"update", "#9c755f"},
        {"tokens", "#000000"},
        {"attention spans", "#6b6b6b"},
        {"forward", "#86bcb6"},
        {"evaluate", "#bcbd22"},
        {"prefill", "#d37295"},
        {"generate", "#fabfd2"},
        {"kv cache", "#d4a6c8"},
        {"fp8 row form", "#b6992d"},
        {"fp8 column form", "#f1ce63"},
        {"fp8 weight", "#d7b5a6"},
        {"fp8 gradients", "#79706e"},
        {"fp8 sources", "#8cd17d"},
        {"fp8 attention", "#499894"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (strcmp(rows[i].category, category) == 0)
            return rows[i].color;
    return PLAN_NO_COLOR;
}
static const char *plan_arena_color(enum plan_arena arena) {
    switch (arena) {
    case ARENA_PARAMETERS:
    case ARENA_HOST_PARAMETERS: return "#5b6770";
    case ARENA_GRADIENTS:
    case ARENA_HOST_GRADIENTS: return "#8b979f";
    case ARENA_OPTIMIZER:
    case ARENA_HOST_OPTIMIZER: return "#b4bec5";
    case ARENA_ACTIVATIONS:
    case ARENA_HOST_ACTIVATIONS: return "#dfe6ea";
    case ARENA_HOST_STAGING: return "#eeeeee";
    case ARENA_COUNT: break;
    }
    return PLAN_NO_COLOR;
}

struct plan_picture {
    FILE *file;
    const struct plan *plan;
    double width, height, left, right, top, bottom; // of the page, and the margins around the plot
};
enum { PLAN_TEXT_WIDTH = 6, PLAN_TEXT_HEIGHT = 14 }; // pixels that a character of a label takes, about, and a line

static double plan_x(const struct plan_picture *picture, int phase) {
    const int phases = picture->plan->phase_count > 0 ? picture->plan->phase_count : 1;
    return picture->left + (picture->width - picture->left - picture->right) * phase / phases;
}
static double plan_y_of(const struct plan_picture *picture, size_t bytes, size_t most) {
    const double span = picture->height - picture->top - picture->bottom;
    return picture->height - picture->bottom - (most > 0 ? span * (double)bytes / (double)most : 0);
}
static double plan_y(const struct plan_picture *picture, size_t bytes) {
    return plan_y_of(picture, bytes, picture->plan->arena_bytes[ARENA_ACTIVATIONS]);
}

static void plan_svg_escape(FILE *file, const char *text) {
    for (; *text; text++)
        switch (*text) {
        case '<': fputs("&lt;", file); break;
        case '>': fputs("&gt;", file); break;
        case '&': fputs("&amp;", file); break;
        case '"': fputs("&quot;", file); break;
        default: fputc((unsigned char)*text < 0x20 ? ' ' : *text, file);
        }
}

// ---- the bars of the memories ----

enum { PLAN_BAR_WIDTH = 46, PLAN_FAR_BUDGET = 8 };

// Draws a memory's bar at x, its arenas to scale, as high as the larger of peak and budget (SIZE_MAX: none). A budget
// over PLAN_FAR_BUDGET peaks is only a text. For MEMORY_DEVICE sets activations[] to that arena's bottom and top, y.
static void plan_svg_bar(const struct plan_picture *picture, double x, enum plan_memory memory, const char *name,
                         size_t budget, double activations[2]) {
    const struct plan *plan = picture->plan;
    const size_t peak = memory == MEMORY_DEVICE ? plan->peak_bytes : plan->host_peak_bytes;
    const bool is_far = budget != SIZE_MAX && budget / PLAN_FAR_BUDGET > peak;
    const size_t most = budget != SIZE_MAX && budget > peak && !is_far ? budget : peak;
    char bytes[LOG_NUMBER];
    size_t at = 0;
    fprintf(picture->file,
            "<g class=\"memory\"><rect x=\"%.2f\" y=\"%.2f\" width=\"%d\" height=\"%.2f\" fill=\"none\" "
            "stroke=\"#bbb\"/>\n",
            x, picture->top, PLAN_BAR_WIDTH, picture->height - picture->bottom - picture->top);
    for (int a = 0; a < ARENA_COUNT; a++) {
        if (plan_arena_memory((enum plan_arena)a) != memory)
            continue;
        const double bottom = plan_y_of(picture, at, most), top = plan_y_of(picture, at + plan->arena_bytes[a], most);
        fprintf(
            picture->file,
            "<rect x=\"%.2f\" y=\"%.2f\" width=\"%d\" height=\"%.2f\" fill=\"%s\"><title>%s (%zu bytes)</title></rect>\n",
            x, top, PLAN_BAR_WIDTH, bottom - top, plan_arena_color((enum plan_arena)a),
            plan_arena_name((enum plan_arena)a), plan->arena_bytes[a]);
        if (a == ARENA_ACTIVATIONS) {
            activations[0] = bottom;
            activations[1] = top;
        }
        at += plan->arena_bytes[a];
    }
    fprintf(picture->file, "<text x=\"%.2f\" y=\"%.2f\" text-anchor=\"middle\">%s</text>", x + PLAN_BAR_WIDTH / 2,
            picture->height - picture->bottom + PLAN_TEXT_HEIGHT, name);
    fprintf(picture->file, "<text x=\"%.2f\" y=\"%.2f\" text-anchor=\"middle\">%s</text>\n", x + PLAN_BAR_WIDTH / 2,
            picture->height - picture->bottom + 2 * PLAN_TEXT_HEIGHT, log_bytes(bytes, (int64_t)peak));
    if (is_far)
        fprintf(picture->file, "<text x=\"%.2f\" y=\"%.2f\" text-anchor=\"middle\" fill=\"#c00\">of %s</text>\n",
                x + PLAN_BAR_WIDTH / 2, picture->top - 5, log_bytes(bytes, (int64_t)budget));
    else if (budget != SIZE_MAX) {
        const double y = plan_y_of(picture, budget, most);
        fprintf(
            picture->file,
            "<line class=\"budget\" x1=\"%.2f\" x2=\"%.2f\" y1=\"%.2f\" y2=\"%.2f\" stroke=\"#c00\" stroke-width=\"2\" "
            "stroke-dasharray=\"5 3\"/><text x=\"%.2f\" y=\"%.2f\" text-anchor=\"middle\" fill=\"#c00\">%s</text>\n",
            x - 8, x + PLAN_BAR_WIDTH + 8, y, y, x + PLAN_BAR_WIDTH / 2, y - 5, log_bytes(bytes, (int64_t)budget));
    }
    fputs("</g>\n", picture->file);
}

// Draws the device's bar, the host's if the plan offloads, and lines from the activations to their magnified plot.
static void plan_svg_bars(const struct plan_picture *picture, const size_t budget[MEMORY_COUNT]) {
    const bool offloads = plan_offloads(picture->plan);
    const double host_x = 30, device_x = 110, end = device_x + PLAN_BAR_WIDTH;
    double activations[2] = {0, 0};
    if (offloads)
        plan_svg_bar(picture, host_x, MEMORY_HOST, "host", budget[MEMORY_HOST], activations);
    plan_svg_bar(picture, device_x, MEMORY_DEVICE, "device", budget[MEMORY_DEVICE], activations);
    fprintf(
        picture->file,
        "<path d=\"M%.2f %.2f L%.2f %.2f M%.2f %.2f L%.2f %.2f\" stroke=\"#999\" stroke-dasharray=\"2 3\" fill=\"none\"/>\n",
        end, activations[0], picture->left, picture->height - picture->bottom, end, activations[1], picture->left,
        picture->top);
}

// ---- the plot ----

// Draws a buffer of the activations arena as a rectangle, phases wide and addresses high, with a describing title.
static void plan_svg_buffer(const struct plan_picture *picture, const struct plan_buffer *buffer) {
    const struct plan *plan = picture->plan;
    char size[LOG_NUMBER];
    const double x = plan_x(picture, buffer->first_phase), y = plan_y(picture, buffer->offset + buffer->bytes);
    fprintf(picture->file, "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\"><title>", x, y,
            plan_x(picture, buffer->last_phase + 1) - x, plan_y(picture, buffer->offset) - y,
            plan_category_color(plan->categories[buffer->category]));
    if (buffer->layer >= 0)
        fprintf(picture->file, "layer %d: ", buffer->layer);
    plan_svg_escape(picture->file, buffer->name);
    fprintf(picture->file, "\n%s (%zu bytes) at %zu\n", log_bytes(size, (int64_t)buffer->bytes), buffer->bytes,
            buffer->offset);
    plan_svg_escape(picture->file, plan->categories[buffer->category]);
    fprintf(picture->file, "\nphases %d to %d: ", buffer->first_phase, buffer->last_phase);
    plan_svg_escape(picture->file, plan->phases[buffer->first_phase].name);
    fputs(" ... ", picture->file);
    plan_svg_escape(picture->file, plan->phases[buffer->last_phase].name);
    fputs("</title></rect>\n", picture->file);
}

// Returns the group (enum phase_group) that the axis shows a phase in: recomputation counts as backward.
static int plan_section(const struct plan_phase *phase) {
    return phase->group == PHASES_RECOMPUTE ? PHASES_BACKWARD : phase->group;
}

// Draws the layers' numbers in a section, phases [first, end), each below the first of its phases that has room.
static void plan_svg_layers(const struct plan_picture *picture, int first, int end) {
    double free_from = 0;
    int last = -1;
    for (int p = first; p < end; p++) {
        const int layer = picture->plan->phases[p].layer;
        const double x = plan_x(picture, p);
        if (layer < 0 || layer == last || x < free_from)
            continue;
        fprintf(picture->file, "<text x=\"%.2f\" y=\"%.2f\">%d</text>\n", x,
                picture->height - picture->bottom + PLAN_TEXT_HEIGHT, layer);
        last = layer;
        free_from = x + 5 * PLAN_TEXT_WIDTH; // three digits, and a gap
    }
}

// Draws the horizontal axis: sections with layers and names. A name goes into the first row with room, or is left out.
static void plan_svg_phase_axis(const struct plan_picture *picture) {
    enum { ROWS = 3 };
    const struct plan *plan = picture->plan;
    const double bottom = picture->height - picture->bottom;
    double free_from[ROWS] = {0, 0, 0};
    bool shaded = false;
    for (int first = 0, next; first < plan->phase_count; first = next, shaded = !shaded) {
        for (next = first + 1; next < plan->phase_count; next++)
            if (plan_section(&plan->phases[first]) != plan_section(&plan->phases[next]))
                break;
        const double x = plan_x(picture, first), end = plan_x(picture, next), middle = (x + end) / 2;
        const char *name = group_name((enum phase_group)plan_section(&plan->phases[first]));
        const double half = (double)strlen(name) * PLAN_TEXT_WIDTH / 2.0;
        if (shaded)
            fprintf(picture->file, "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"#f0f0f0\"/>\n", x,
                    picture->top, end - x, bottom - picture->top);
        plan_svg_layers(picture, first, next);
        for (int row = 0; row < ROWS; row++) {
            const double y = bottom + (2 + row) * PLAN_TEXT_HEIGHT;
            if (middle - half < free_from[row])
                continue;
            free_from[row] = middle + half + 2 * PLAN_TEXT_WIDTH;
            fprintf(picture->file, "<text class=\"section\" x=\"%.2f\" y=\"%.2f\" text-anchor=\"middle\">", middle, y);
            plan_svg_escape(picture->file, name);
            fputs("</text>\n", picture->file);
            break;
        }
    }
}

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

// Draws, in each phase, the sum of the activations arena's live buffers, as high as a placement without gaps would be.
static void plan_svg_live(const struct plan_picture *picture) {
    size_t *live = plan_live_bytes(picture->plan, EVERY_CATEGORY, true);
    fputs("<path fill=\"none\" stroke=\"#000\" stroke-width=\"0.8\" d=\"", picture->file);
    for (int p = 0; p < picture->plan->phase_count; p++)
        fprintf(picture->file, "%s%.2f %.2f H%.2f", p == 0 ? "M" : "L", plan_x(picture, p), plan_y(picture, live[p]),
                plan_x(picture, p + 1));
    fputs("\"/>\n", picture->file);
    free(live);
}

// ---- the legend ----

static void plan_svg_legend_row(const struct plan_picture *picture, double y, const char *color, const char *name,
                                size_t bytes) {
    const double x = picture->width - picture->right + 20;
    char size[LOG_NUMBER];
    fprintf(picture->file,
            "<rect x=\"%.0f\" y=\"%.0f\" width=\"12\" height=\"12\" fill=\"%s\"/>"
            "<text x=\"%.0f\" y=\"%.0f\">",
            x, y - 10, color, x + 18, y);
    plan_svg_escape(picture->file, name);
    fprintf(picture->file, "</text><text x=\"%.0f\" y=\"%.0f\" text-anchor=\"end\">%s</text>\n", picture->width - 15, y,
            log_bytes(size, (int64_t)bytes));
}
static void plan_svg_legend_title(const struct plan_picture *picture, double y, const char *text) {
    fprintf(picture->file, "<text x=\"%.0f\" y=\"%.0f\" font-weight=\"bold\">%s</text>\n",
            picture->width - picture->right + 20, y, text);
}

static double plan_svg_legend_arenas(const struct plan_picture *picture, double y) {
    plan_svg_legend_title(picture, y, "arenas, one allocation each");
    for (int a = 0; a < ARENA_COUNT; a++)
        if (picture->plan->arena_bytes[a] > 0)
            plan_svg_legend_row(picture, y += 20, plan_arena_color((enum plan_arena)a),
                                plan_arena_name((enum plan_arena)a), picture->plan->arena_bytes[a]);
    return y + 30;
}
static void plan_svg_legend(const struct plan_picture *picture) {
    const struct plan *plan = picture->plan;
    const double x = picture->width - picture->right + 20;
    double y = plan_svg_legend_arenas(picture, picture->top + 4);
    plan_svg_legend_title(picture, y, "activations: most at any time");
    for (int c = 0; c < plan->category_count; c++) {
        size_t *live = plan_live_bytes(plan, c, true), most = 0;
        for (int p = 0; p < plan->phase_count; p++)
            most = live[p] > most ? live[p] : most;
        if (most > 0)
            plan_svg_legend_row(picture, y += 20, plan_category_color(plan->categories[c]), plan->categories[c], most);
        free(live);
    }
    y += 24;
    fprintf(picture->file,
            "<line x1=\"%.0f\" x2=\"%.0f\" y1=\"%.0f\" y2=\"%.0f\" stroke=\"#000\"/>"
            "<text x=\"%.0f\" y=\"%.0f\">sum of the live buffers</text>\n",
            x, x + 12, y - 4, y - 4, x + 18, y);
}

static void plan_svg_title(const struct plan_picture *picture) {
    const struct plan *plan = picture->plan;
    char peak[LOG_NUMBER];
    fprintf(picture->file, "<text x=\"30\" y=\"34\" font-size=\"17\">Memory of a step: peak %s (%zu bytes)",
            log_bytes(peak, (int64_t)plan->peak_bytes), plan->peak_bytes);
    if (plan->peak_phase >= 0) {
        fputs(", reached in '", picture->file);
        plan_svg_escape(picture->file, plan->phases[plan->peak_phase].name);
        fputc('\'', picture->file);
    }
    fputs("</text>\n", picture->file);
}

static void plan_draw(FILE *file, const struct plan *plan, const size_t budget[MEMORY_COUNT]) {
    const struct plan_picture picture = {file, plan, 1500, 860, 260, 310, 70, 90};
    fprintf(file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" height=\"%.0f\" "
            "font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n",
            picture.width, picture.height, picture.width, picture.height);
    plan_svg_title(&picture);
    plan_svg_bars(&picture, budget);
    plan_svg_phase_axis(&picture);
    plan_svg_address_axis(&picture);
    fputs("<g class=\"buffers\" stroke=\"#fff\" stroke-width=\"0.25\">\n", file);
    for (int i = 0; i < plan->count; i++) {
        const struct plan_buffer *buffer = &plan->buffers[i];
        if (buffer->arena == ARENA_ACTIVATIONS && plan_is_packed(buffer))
            plan_svg_buffer(&picture, buffer);
    }
    fputs("</g>\n", file);
    plan_svg_live(&picture);
    plan_svg_legend(&picture);
    fprintf(
        file,
        "<text x=\"%.0f\" y=\"%.0f\" text-anchor=\"middle\" font-size=\"13\">phases of the step, by layer; upwards: "
        "addresses in the activations arena</text>\n</svg>\n",
        (picture.width + picture.left - picture.right) / 2, picture.height - 14);
}
