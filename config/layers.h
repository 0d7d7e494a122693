// The options' differences between the layers of a model: a window in attention, rotary positions, FP8.
#pragma once
#include "config/config.h" // struct config
#include <stdlib.h>        // strtod

// Reads the finite number at *at in a list, and moves *at past its comma. Returns false for other text or a last comma.
static inline bool config_next_number(const char **at, double *value) {
    char *end;
    *value = strtod(*at, &end);
    if (end == *at || (*end && (*end != ',' || !end[1])) || !isfinite(*value))
        return false;
    *at = *end ? end + 1 : end;
    return true;
}
// out (n) = the n finite numbers of a list, each at least `least`; another list ends the program, naming `option`.
static inline void config_numbers(double *out, int n, const char *option, const char *list, double least) {
    const char *at = list;
    for (int i = 0; i < n; i++)
        if (!config_next_number(&at, &out[i]) || out[i] < least)
            fail("%s '%s': expected %d numbers of at least %g, as 1,1.5,2", option, list, n, least);
    if (*at)
        fail("%s '%s': has more than %d numbers", option, list, n);
}

// Whether `text`, the value of `option`, marks a layer. A list of num_layers 0s and 1s marks layers by 1. A number N
// marks layers N - 1, 2 N - 1, ...; the word none marks no layer. With `others` a number or none marks all other layers
// instead, but a list stays as it is. Another text ends the program.
static inline bool config_marks_layer(const char *option, const char *text, int layer, int num_layers, bool others) {
    if (strcmp(text, "none") == 0)
        return others;
    const char *at = text;
    double value = 0;
    const bool list_of_one = num_layers == 1 && (strcmp(text, "0") == 0 || strcmp(text, "1") == 0);
    if (!strchr(text, ',') && !list_of_one) {
        if (!config_next_number(&at, &value) || value < 1 || value > 1 << 16 || value != floor(value))
            fail("%s '%s': expected none, a number N of at least 1, or a list of a 0 or 1 for each of the %d layers",
                 option, text, num_layers);
        return ((layer + 1) % (int)value == 0) != others;
    }
    bool marked = false;
    int count = 0;
    for (; *at; count++) {
        if (!config_next_number(&at, &value) || (value != 0 && value != 1))
            fail("%s '%s': expected a list of a 0 or 1 for each layer", option, text);
        if (count == layer)
            marked = value == 1;
    }
    if (count != num_layers)
        fail("%s '%s': has %d layers, the model has %d", option, text, count, num_layers);
    return marked;
}

// The number of keys, its own too, that a query sees in a layer with a window; 0: no window. Bad text ends the program.
static inline int config_window(const struct config *c) {
    const char *at = c->model.window_size;
    double size = 0, right = 0;
    if (strcmp(at, "none") == 0)
        return 0;
    const bool pair = strchr(at, ',') != NULL;
    const bool good = config_next_number(&at, &size) && (!pair || (config_next_number(&at, &right) && right == 0)) &&
                      !*at && size == floor(size) && size <= 1 << 24 && size >= (pair ? 0 : 1);
    if (!good)
        fail("--window-size '%s': expected none, the number of keys that a query sees, 1 or more, or the pair W-1,0",
             c->model.window_size);
    return (int)size + (pair ? 1 : 0);
}
// Whether attention of this layer has --window-size's window, by --window-attn-skip-freq. Bad texts end the program.
static inline bool config_layer_is_windowed(const struct config *c, int layer) {
    return config_window(c) > 0 && config_marks_layer("--window-attn-skip-freq", c->model.window_attn_skip_freq, layer,
                                                      c->model.num_layers, true);
}
static inline bool config_learns_positions(const struct config *c) {
    switch (c->model.position_embedding_type) {
    case POSITION_LEARNED: return true;
    case POSITION_ROPE: return false;
    }
    return false;
}
// Whether --position-embedding-type is rope. Not every layer need be rotated: config_layer_is_rotary tells which are.
static inline bool config_rotates(const struct config *c) {
    switch (c->model.position_embedding_type) {
    case POSITION_LEARNED: return false;
    case POSITION_ROPE: return true;
    }
    return false;
}
// Whether RoPE rotates q and k of this layer. A list that can't be read ends the program.
static inline bool config_layer_is_rotary(const struct config *c, int layer) {
    return config_rotates(c) &&
           !config_marks_layer("--no-rope-freq", c->model.no_rope_freq, layer, c->model.num_layers, false);
}
// The number of elements of a head that RoPE rotates. Ignores --position-embedding-type and --no-rope-freq.
static inline int config_rotary_dims(const struct config *c) {
    return (int)(c->model.kv_channels * c->model.rotary_percent);
}

// Returns what of attention is in FP8 in config_fp8_layers' layers: none, forward or all. Options must be resolved.
static inline enum config_fp8_attention config_attention_in_fp8(const struct config *c) {
    switch (c->fp8.fp8_dot_product_attention) {
    case FP8_ATTENTION_NONE:
    case FP8_ATTENTION_FORWARD: break;
    case FP8_ATTENTION_FULL: return c->fp8_attention_forward ? FP8_ATTENTION_FORWARD : FP8_ATTENTION_FULL;
    }
    return c->fp8.fp8_dot_product_attention;
}
// Sets *first and *end to the layers, *end excluded, whose linear layers train in FP8; both to 0 where none do.
static inline void config_fp8_layers(const struct config *c, int *first, int *end) {
    const bool ends = c->fp8.first_last_layers_bf16;
    *first = ends ? c->fp8.num_layers_at_start_in_bf16 : 0;
    *end = c->model.num_layers - (ends ? c->fp8.num_layers_at_end_in_bf16 : 0);
    if (c->fp8.fp8_format == FP8_FORMAT_NONE || !config_trains(c) || *end <= *first)
        *first = *end = 0;
}
