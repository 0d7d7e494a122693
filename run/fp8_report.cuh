// The report on FP8 in a run: a row of the start-up report, and the shares of values in log.jsonl.
#pragma once
#include "config/layers.h"    // config_fp8_layers
#include "model/fp8.cuh"      // struct fp8_state
#include "runtime/text/log.h" // struct log_fp8

static_assert((int)FP8_OPERANDS == (int)LOG_FP8_OPERANDS, "struct log_fp8 has an element for each operand");

enum { FP8_TEXT = 512 };
// Writes the recipe in words to text and, if scales are delayed, from what amaxes they follow.
static void fp8_describe_recipe(char text[FP8_TEXT], const struct config *c) {
    char name[OPTION_NAME], margin[64] = "";
    option_choice_name(CHOICES(FP8_RECIPES), (int)c->fp8.fp8_recipe, name);
    if (c->fp8.fp8_recipe != FP8_RECIPE_DELAYED) {
        snprintf(text, FP8_TEXT, "%s", name);
        return;
    }
    if (c->fp8.fp8_margin > 0)
        snprintf(margin, sizeof margin, ", scales 2^%d smaller", c->fp8.fp8_margin);
    if (c->fp8.fp8_amax_compute_algo == FP8_AMAX_MOST_RECENT || c->fp8.fp8_amax_history_len == 1)
        snprintf(text, FP8_TEXT, "%s by the last step's amax%s", name, margin);
    else
        snprintf(text, FP8_TEXT, "%s by the largest amax of %d steps%s", name, c->fp8.fp8_amax_history_len, margin);
}
static const char *fp8_describe_sums(const struct config *c) {
    if (c->device.device == DEVICE_CPU)
        return "sums in fp32";
    switch (c->fp8.fp8_fast_accumulation) {
    case FP8_FAST_FORWARD: return "fast accumulation in forward";
    case FP8_FAST_NONE: return "sums in fp32, to which tensor cores add theirs at intervals";
    case FP8_FAST_ALL: return "fast accumulation in forward and backward";
    }
    __builtin_unreachable();
}
// Returns what of attention is in FP8, and that norms, embedding and head are not, as a constant or in `text`.
static const char *fp8_describe_attention(char text[FP8_TEXT], const struct config *c) {
    switch (config_attention_in_fp8(c)) {
    case FP8_ATTENTION_NONE: return "attention, norms, embedding and head in bf16";
    case FP8_ATTENTION_FORWARD:
        snprintf(
            text, FP8_TEXT,
            "attention's forward in FP8, its backward in bf16 of FP8's values%s; norms, embedding and head in bf16",
            c->fp8_attention_forward ? ", by NVTE_FP8_DPA_BWD=0 in the environment" : "");
        return text;
    case FP8_ATTENTION_FULL: return "attention in FP8, forward and backward; norms, embedding and head in bf16";
    }
    __builtin_unreachable();
}
// Returns in words which passes of attention are in FP8, such as "FP8 forward", or NULL where none is.
static const char *fp8_attention_passes(const struct config *c) {
    int first, end;
    config_fp8_layers(c, &first, &end);
    switch (end > first ? config_attention_in_fp8(c) : FP8_ATTENTION_NONE) {
    case FP8_ATTENTION_NONE: return NULL;
    case FP8_ATTENTION_FORWARD: return "FP8 forward";
    case FP8_ATTENTION_FULL: return "FP8 forward and backward";
    }
    __builtin_unreachable();
}
// Returns what --fp8-format quantizes, and how, or that this run uses no FP8, as a constant or in `text`.
static const char *fp8_describe(char text[FP8_TEXT], const struct config *c, bool caches_weights) {
    char recipe[FP8_TEXT], attention[FP8_TEXT], layers[64] = "", format[OPTION_NAME];
    int first, end;
    config_fp8_layers(c, &first, &end);
    if (end == first)
        return "not used: validation and generation compute without it";
    if (end - first < c->model.num_layers)
        snprintf(layers, sizeof layers, ", %d to %d", first, end - 1);
    fp8_describe_recipe(recipe, c);
    snprintf(text, FP8_TEXT, "%s, %.100s: %s, in the linear layers of %d of %d layers%s; %.150s; %s%s",
             option_choice_name(CHOICES(FP8_FORMATS), (int)c->fp8.fp8_format, format), recipe,
             c->fp8.fp8_format == FP8_FORMAT_HYBRID ? "inputs and weights in E4M3, gradients in E5M2"
                                                    : "inputs, weights and gradients in E4M3",
             end - first, c->model.num_layers, layers, fp8_describe_attention(attention, c), fp8_describe_sums(c),
             caches_weights ? "; weights cast once a step" : "");
    return text;
}

static double fp8_elements(const struct linear_row *row, enum fp8_operand operand, double M) {
    switch (operand) {
    case FP8_INPUT: return M * row->inputs;
    case FP8_WEIGHT: return (double)row->outputs * row->inputs;
    case FP8_GRADIENT: return M * row->outputs;
    case FP8_OPERANDS: break;
    }
    return 0;
}
// Whether no cast counts this operand's values, because attention writes it in FP8 itself.
static bool fp8_is_uncounted(const struct fp8_state *f, enum linear linear, enum fp8_operand operand) {
    return linear == LINEAR_ATT_PROJ && operand == FP8_INPUT && f->attention != FP8_ATTENTION_NONE && fp8_is_delayed(f);
}
// Sets linear layers' names and the shares of a step's values that casts saturated or flushed to 0; NaN where no cast
// counts them. counts: (FP8_KINDS, FP8_COUNTS) of each rank, `width` doubles apart. micro_steps: a rank's, of M tokens.
static void fp8_shares(struct log_fp8 shares[LINEAR_COUNT], const struct fp8_state *f, const struct layer_shape *s,
                       const double *counts, int ranks, int width, int micro_steps, double M) {
    const double casts = (double)(f->end_layer - f->first_layer) * micro_steps * ranks;
    for (int l = 0; l < LINEAR_COUNT; l++) {
        const struct linear_row row = linear_row((enum linear)l, s);
        shares[l].linear = row.name;
        for (int o = 0; o < FP8_OPERANDS; o++) {
            const bool counted = !fp8_is_uncounted(f, (enum linear)l, (enum fp8_operand)o);
            const double times = o == FP8_WEIGHT && f->caches_weights ? casts / micro_steps : casts;
            const double elements = counted ? times * fp8_elements(&row, (enum fp8_operand)o, M) : NAN;
            double sums[FP8_COUNTS] = {0, 0};
            for (int i = 0; i < ranks * FP8_COUNTS; i++)
                sums[i % FP8_COUNTS] +=
                    counts[(int64_t)(i / FP8_COUNTS) * width +
                           fp8_index(0, (enum linear)l, (enum fp8_operand)o) * FP8_COUNTS + i % FP8_COUNTS];
            shares[l].saturated[o] = sums[FP8_SATURATED] / elements;
            shares[l].flushed[o] = sums[FP8_FLUSHED] / elements;
        }
    }
}

enum { FP8_TENSOR_TEXT = 80 };
// Whether an amax of a delayed scale is infinite or NaN on some rank; then sets *value, and text to its tensor, in
// words ("largest input of qkv of layer 0, in FP8"). amaxes: the first rank's; ranks are `width` doubles apart.
static bool fp8_nonfinite_tensor(char text[FP8_TENSOR_TEXT], double *value, const struct fp8_state *f,
                                 const struct layer_shape *s, const double *amaxes, int ranks, int width) {
    static const char *const operands[FP8_OPERANDS] = {"input", "weight", "gradient"};
    static const char *const of_attention[FP8_ATTENTION_TENSORS] = {"q", "k", "v", "dO", "dS", "dQ", "dK", "dV"};
    const struct fp8_delayed delayed = fp8_delayed_scales(f);
    for (int i = 0; i < delayed.count; i++)
        for (int rank = 0; rank < ranks; rank++) {
            if (isfinite(amaxes[(int64_t)rank * width + i]))
                continue;
            const int at = delayed.first + i, behind = at - f->num_layers * FP8_KINDS;
            const enum linear linear = (enum linear)(at / FP8_OPERANDS % LINEAR_COUNT);
            *value = amaxes[(int64_t)rank * width + i];
            if (behind >= 0)
                snprintf(text, FP8_TENSOR_TEXT, "largest %s of attention of layer %d, in FP8",
                         of_attention[behind / f->num_layers], behind % f->num_layers);
            else
                snprintf(text, FP8_TENSOR_TEXT, "largest %s of %s of layer %d, in FP8", operands[at % FP8_OPERANDS],
                         linear_row(linear, s).name, at / FP8_KINDS);
            return true;
        }
    return false;
}
