// Holds a row for each architecture. Converts numbers and lists of layers for config.json's reader and writer.
#include "formats/huggingface_traits.h"

#include <stdlib.h> // malloc, strtod
#include <string.h> // strchr, strcmp

#include "config/layers.h"         // config_next_number
#include "runtime/machine/error.h" // fail

// What a row leaves out is false, 0, or its enum's first value. Values are the defaults of transformers' classes.
#define LLAMA_LIKE .form = FORM_LLAMA
#define GEMMA_LIKE .form = FORM_LLAMA, .tied = true
#define TRAITS(ROW)                                                                                                    \
    ROW(OURS, .form = FORM_OURS)                                                                                       \
    ROW(GPT2, .form = FORM_GPT2, .tied = true, .epsilon = 1e-5)                                                        \
    ROW(LLAMA, LLAMA_LIKE, .epsilon = 1e-6, .theta = 1e4, .has_attention_bias = true, .has_mlp_bias = true)            \
    ROW(QWEN2, LLAMA_LIKE, .groups = 32, .epsilon = 1e-6, .theta = 1e4, .qkv_bias = true, .windows = WINDOWS_SWITCHED, \
        .window = 4096)                                                                                                \
    ROW(QWEN3, LLAMA_LIKE, .groups = 32, .head_dim = 128, .epsilon = 1e-6, .theta = 1e4, .has_attention_bias = true,   \
        .windows = WINDOWS_SWITCHED, .window = 4096, .qk_layernorm = true)                                             \
    ROW(MISTRAL, LLAMA_LIKE, .groups = 8, .epsilon = 1e-6, .theta = 1e4, .windows = WINDOWS_ALL, .window = 4096)       \
    ROW(MINISTRAL, LLAMA_LIKE, .groups = 8, .epsilon = 1e-6, .theta = 1e4, .windows = WINDOWS_LAYERS, .window = 4096)  \
    ROW(CWM, LLAMA_LIKE, .groups = 8, .head_dim = 128, .epsilon = 1e-5, .theta = 1e6, .has_mlp_bias = true,            \
        .windows = WINDOWS_LAYERS, .window = 8192, .full_each = 4)                                                     \
    ROW(SMOLLM3, LLAMA_LIKE, .tied = true, .groups = 4, .epsilon = 1e-6, .theta = 2e6, .has_attention_bias = true,     \
        .has_mlp_bias = true, .windows = WINDOWS_SWITCHED, .no_rope_layers = true)                                     \
    ROW(GRANITE, LLAMA_LIKE, .epsilon = 1e-6, .theta = 1e4, .has_attention_bias = true, .has_mlp_bias = true,          \
        .multipliers = true)                                                                                           \
    ROW(OLMO2, LLAMA_LIKE, .epsilon = 1e-5, .theta = 1e4, .has_attention_bias = true,                                  \
        .norm_placement = NORM_PLACEMENT_POST, .qk_layernorm = true, .qk_layernorm_width = QK_LAYERNORM_FULL)          \
    ROW(OLMO3, LLAMA_LIKE, .epsilon = 1e-5, .theta = 5e5, .has_attention_bias = true, .windows = WINDOWS_LAYERS,       \
        .window = 4096, .full_each = 4, .norm_placement = NORM_PLACEMENT_POST, .qk_layernorm = true,                   \
        .qk_layernorm_width = QK_LAYERNORM_FULL, .rope_by_layers = true)                                               \
    ROW(GEMMA, GEMMA_LIKE, .groups = 16, .head_dim = 256, .epsilon = 1e-6, .theta = 1e4, .has_attention_bias = true,   \
        .gemma = true)                                                                                                 \
    ROW(GEMMA2, GEMMA_LIKE, .groups = 4, .head_dim = 256, .epsilon = 1e-6, .theta = 1e4, .has_attention_bias = true,   \
        .windows = WINDOWS_LAYERS, .window = 4096, .full_each = 2, .norm_placement = NORM_PLACEMENT_SANDWICH,          \
        .gemma = true, .query_pre_attn_scalar = true, .attn_cap = 50, .final_cap = 30)                                 \
    ROW(GEMMA3, GEMMA_LIKE, .groups = 4, .head_dim = 256, .epsilon = 1e-6, .theta = 1e6, .has_attention_bias = true,   \
        .windows = WINDOWS_LAYERS, .window = 4096, .full_each = 6, .norm_placement = NORM_PLACEMENT_SANDWICH,          \
        .qk_layernorm = true, .gemma = true, .rope_by_layers = true, .local_theta = 1e4,                               \
        .query_pre_attn_scalar = true, .final_cap = NO_CAP)                                                            \
    ROW(PHI3, LLAMA_LIKE, .epsilon = 1e-5, .theta = 1e4, .windows = WINDOWS_ALL, .partial_rotary = 1)                  \
    ROW(GPT_NEOX, .form = FORM_GPT_NEOX, .epsilon = 1e-5, .theta = 1e4, .qkv_bias = true, .proj_bias = true,           \
        .mlp_bias = true, .has_attention_bias = true, .partial_rotary = 0.25)

const struct architecture_traits *architecture_traits_of(enum architecture a) {
    switch (a) {
#define CASE_ROW(id, ...)                                                                                              \
    case ARCHITECTURE_##id: {                                                                                          \
        static const struct architecture_traits traits = {__VA_ARGS__};                                                \
        return &traits;                                                                                                \
    }
        TRAITS(CASE_ROW)
#undef CASE_ROW
    }
    __builtin_unreachable();
}

void huggingface_marks(bool *marks, const char *text, int num_layers, bool others) {
    const char *at = text;
    double value = 0;
    const bool list = strchr(text, ',') || (num_layers == 1 && (strcmp(text, "0") == 0 || strcmp(text, "1") == 0));
    const bool each = strcmp(text, "none") != 0 && !list;
    if (each)
        config_next_number(&at, &value);
    for (int l = 0; l < num_layers; l++) {
        if (list)
            config_next_number(&at, &value);
        marks[l] = list ? value == 1 : each && value >= 1 ? ((l + 1) % (int)value == 0) != others : others;
    }
}
char *huggingface_marks_text(const bool *marks, int num_layers, bool others) {
    char *text = (char *)malloc(2 * (size_t)num_layers + 16);
    if (!text)
        fail("out of memory");
    strcpy(text, "none");
    int first = 0; // the first layer that N would name
    while (first < num_layers && marks[first] == others)
        first++;
    if (first == num_layers)
        return text;
    bool each = true;
    for (int l = 0; l < num_layers; l++)
        each = each && marks[l] == (((l + 1) % (first + 1) == 0) != others);
    if (each) {
        snprintf(text, 16, "%d", first + 1);
        return text;
    }
    for (int l = 0; l < num_layers; l++)
        memcpy(text + 2 * l, marks[l] ? "1," : "0,", 2);
    text[2 * num_layers - 1] = '\0';
    return text;
}

struct huggingface_number huggingface_show(double value) {
    struct huggingface_number number;
    for (int digits = 9; digits <= 17; digits++) {
        snprintf(number.text, sizeof number.text, "%.*g", digits, value);
        if (strtod(number.text, NULL) == value)
            break;
    }
    return number;
}
