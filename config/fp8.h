// The options of FP8 against each other and against the model's sizes.
#pragma once
#include "config/config.h" // struct config
#include "config/layers.h" // config_fp8_layers

// An option of FP8, and whether the other options leave it a use.
struct config_fp8_option {
    int row;
    bool used;
    const char *needs; // for an error, after its name and value: why it has no use; "": it lacks only --fp8-format
};
enum { CONFIG_FP8_OPTIONS = 10 };
// Lists all options of FP8 but --fp8-format, each with whether the other options leave it a use, and if not, why.
static inline void config_fp8_options(struct config_fp8_option options[CONFIG_FP8_OPTIONS], const struct config *c) {
    const bool on = c->fp8.fp8_format != FP8_FORMAT_NONE, delayed = on && c->fp8.fp8_recipe == FP8_RECIPE_DELAYED;
    const bool ends = on && c->fp8.first_last_layers_bf16;
    const bool slow = c->fp8.fp8_recipe == FP8_RECIPE_BLOCKWISE && c->fp8.fp8_fast_accumulation != FP8_FAST_NONE;
    const struct config_fp8_option all[CONFIG_FP8_OPTIONS] = {
        {CONFIG_ROW(fp8.fp8_recipe), on, ""},
        {CONFIG_ROW(fp8.first_last_layers_bf16), on, ""},
        {CONFIG_ROW(fp8.fp8_dot_product_attention), on || c->fp8.fp8_dot_product_attention == FP8_ATTENTION_NONE, ""},
        {CONFIG_ROW(fp8.fp8_fast_accumulation), on && !slow,
         "is none with --fp8-recipe blockwise, whose scales are applied between sums in fp32"},
        {CONFIG_ROW(fp8.fp8_weight_cache), on, ""},
        {CONFIG_ROW(fp8.fp8_margin), delayed, "is of --fp8-recipe delayed"},
        {CONFIG_ROW(fp8.fp8_amax_history_len), delayed, "is of --fp8-recipe delayed"},
        {CONFIG_ROW(fp8.fp8_amax_compute_algo), delayed, "is of --fp8-recipe delayed"},
        {CONFIG_ROW(fp8.num_layers_at_start_in_bf16), ends, "needs --first-last-layers-bf16"},
        {CONFIG_ROW(fp8.num_layers_at_end_in_bf16), ends, "needs --first-last-layers-bf16"},
    };
    memcpy(options, all, sizeof all);
}

// Resets options of FP8 without a use to defaults, as if not given. Keeps an option where by_user (CONFIG_ROWS) is set.
static inline void config_drop_unused_fp8(struct config *c, const bool *by_user) {
    struct config_fp8_option options[CONFIG_FP8_OPTIONS];
    config_fp8_options(options, c);
    for (int i = 0; i < CONFIG_FP8_OPTIONS; i++) {
        const struct option_row *row = &config_rows[options[i].row];
        if (options[i].used || by_user[options[i].row])
            continue;
        option_set(row, c, row->default_text);
        c->given[options[i].row] = false;
    }
}

// Ends the program where the user gave an option of FP8 that has no use.
static inline void config_check_fp8_use(const struct config *c) {
    struct config_fp8_option options[CONFIG_FP8_OPTIONS];
    char text[OPTION_TEXT], name[OPTION_NAME];
    config_fp8_options(options, c);
    for (int i = 0; i < CONFIG_FP8_OPTIONS; i++) {
        const struct option_row *row = &config_rows[options[i].row];
        if (options[i].used || !c->given[options[i].row])
            continue;
        const bool off = c->fp8.fp8_format == FP8_FORMAT_NONE;
        fail("--%s %s %s; %sleave it out", option_display(name, row->name), option_text(text, row, c),
             off ? "needs --fp8-format" : options[i].needs, off ? "add --fp8-format hybrid, or " : "");
    }
}

// Ends the program unless widths and a micro-batch's tokens are multiples of 16 (blockwise: 128). Call it only for FP8.
static inline void config_check_fp8_sizes(const struct config *c) {
    const bool blocks = c->fp8.fp8_recipe == FP8_RECIPE_BLOCKWISE;
    const long long unit = blocks ? 128 : 16, tokens = (long long)c->training.micro_batch_size * c->model.seq_length;
    const long long H = c->model.num_attention_heads, G = c->model.num_query_groups, D = c->model.kv_channels;
    const struct {
        long long size;
        const char *what;
    } sizes[] = {
        {c->model.hidden_size, "the width of the residual stream, --hidden-size,"},
        {c->model.ffn_hidden_size, "the width of the MLP, --ffn-hidden-size,"},
        {H * D, "the width of attention, --num-attention-heads times --kv-channels,"},
        {(H + 2 * G) * D, "the width of q, k and v, heads and two times --num-query-groups, times --kv-channels,"},
        {tokens, "the tokens of a micro batch, --micro-batch-size times --seq-length,"},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i].size % unit != 0)
            fail("FP8 needs multiples of %lld: %s is %lld; change it, or %s", unit, sizes[i].what, sizes[i].size,
                 blocks ? "take --fp8-recipe tensorwise, which needs multiples of 16" : "leave --fp8-format out");
}

// Ends the program if no layer is left in FP8. Call this only for a run that trains with --fp8-format.
static inline void config_check_fp8_layers(const struct config *c) {
    int first, end;
    config_fp8_layers(c, &first, &end);
    if (end == first)
        fail(
            "--num-layers-at-start-in-bf16 %d and --num-layers-at-end-in-bf16 %d leave none of %d layers in FP8; lower "
            "one of them, or leave --fp8-format out",
            c->fp8.num_layers_at_start_in_bf16, c->fp8.num_layers_at_end_in_bf16, c->model.num_layers);
}

// Sets c->fp8_attention_forward where NVTE_FP8_DPA_BWD=0 in the environment makes full FP8 attention forward only. Does
// nothing without FP8 attention. A wrong value there, or options that FP8 attention does not go with, end the program.
static inline void config_resolve_fp8_attention(struct config *c) {
    static const char variable[] = "NVTE_FP8_DPA_BWD", option[] = "--fp8-dot-product-attention";
    const char *value = getenv(variable);
    if (c->fp8.fp8_dot_product_attention == FP8_ATTENTION_NONE)
        return;
    if (value && *value && strcmp(value, "0") != 0 && strcmp(value, "1") != 0)
        fail("%s=%s in the environment: expected 0 (attention's backward is not in FP8) or 1; change it or unset it",
             variable, value);
    c->fp8_attention_forward =
        c->fp8.fp8_dot_product_attention == FP8_ATTENTION_FULL && value && strcmp(value, "0") == 0;
    if (c->fp8.fp8_recipe == FP8_RECIPE_BLOCKWISE)
        fail("%s does not go with --fp8-recipe blockwise, whose scales attention does not have; take --fp8-recipe "
             "delayed or tensorwise, or leave %s out",
             option, option);
    const struct {
        bool asked;
        const char *what, *change;
    } lacks[] = {
        {c->model.attention_dropout > 0, "--attention-dropout", "set it to 0"},
        {config_window(c) > 0, "--window-size", "set it to none"},
        {c->data.reset_attention_mask, config_documents_option(c), "leave it out"},
        {c->model.attn_logit_softcapping > 0, "--attn-logit-softcapping", "set it to 0"},
        {c->attention.attention_backend == BACKEND_UNFUSED, "--attention-backend unfused", "take auto"},
    };
    for (size_t i = 0; i < sizeof lacks / sizeof *lacks; i++)
        if (lacks[i].asked)
            fail("%s does not go with %s: %s, or leave %s out", option, lacks[i].what, lacks[i].change, option);
}

// Resolves --fp8-fast-accumulation and fp8_attention_forward. Sizes must be resolved. Contradictions end the program.
static inline void config_resolve_fp8(struct config *c) {
    if (c->fp8.fp8_recipe == FP8_RECIPE_BLOCKWISE && !config_given(c, fp8.fp8_fast_accumulation))
        c->fp8.fp8_fast_accumulation = FP8_FAST_NONE;
    config_check_fp8_use(c);
    if (c->fp8.fp8_format == FP8_FORMAT_NONE || !config_trains(c))
        return;
    if (c->device.precision == WITH_FP32)
        fail("--fp8-format needs --precision bf16, not fp32%s; %sleave --fp8-format out",
             *c->checkpoint ? " as in the checkpoint" : "", *c->checkpoint ? "" : "change --precision, or ");
    if (c->memory.mlp_chunk_tokens > 0)
        fail("--mlp-chunk-tokens %d does not go with --fp8-format: a tensor's scale is of all its tokens; leave one of "
             "them out",
             c->memory.mlp_chunk_tokens);
    config_check_fp8_layers(c);
    config_check_fp8_sizes(c);
    config_resolve_fp8_attention(c);
}
