// Which parameters are frozen: under LoRA all but the adapters, else what --freeze names.
#pragma once
#include "config/layers.h"      // config_rotary_dims
#include "model/branch.cuh"     // struct norm_weights, the branches
#include "run/tensor_names.cuh" // huggingface_tensors_of
#include <fnmatch.h>            // fnmatch

// Whether any comma-separated shell pattern matches. Sets used[i] if pattern i does. Too long a one ends the program.
static bool freezing_matches(const char *patterns, const char *name, bool *used) {
    bool matches = false;
    int i = 0;
    for (const char *at = patterns; *at; i++) {
        const size_t length = strcspn(at, ",");
        char pattern[256];
        if (length >= sizeof pattern)
            fail("--freeze: the pattern %.40s... is too long", at);
        snprintf(pattern, sizeof pattern, "%.*s", (int)length, at);
        if (fnmatch(pattern, name, 0) == 0)
            matches = used[i] = true;
        at += length + (at[length] == ',');
    }
    return matches;
}
// Ends the program where a pattern has matched no name: used[i] is false for pattern i. example: a name, for messages.
static void freezing_check_used(const char *patterns, const bool *used, const char *example) {
    int i = 0;
    for (const char *at = patterns; *at; i++) {
        const size_t length = strcspn(at, ",");
        if (!used[i])
            fail("--freeze: no parameter of the model has a name like '%.*s'; a name is %s", (int)length, at, example);
        at += length + (at[length] == ',');
    }
}

// Returns the bias that belongs to a weight, or PARAM_COUNT if there is none.
static enum parameter freezing_bias(enum parameter weight) {
    const struct norm_weights norms[] = {ATTENTION_BRANCH.before_weights, MLP_BRANCH.before_weights,
                                         ATTENTION_BRANCH.after_weights, MLP_BRANCH.after_weights, NORM_FINAL};
    struct layer_shape none;
    memset(&none, 0, sizeof none);
    for (size_t i = 0; i < sizeof norms / sizeof *norms; i++)
        if (norms[i].weight == weight)
            return norms[i].bias;
    for (int i = 0; i < LINEAR_COUNT; i++)
        if (linear_row((enum linear)i, &none).weight == weight)
            return linear_row((enum linear)i, &none).bias;
    return PARAM_COUNT;
}

// Marks in frozen (L + 1, PARAM_COUNT; last row: outside layers) the tensors that --freeze matches by Hugging Face
// names, and their biases. Ends the program if a pattern matches nothing, or part of a parameter, or all is frozen.
static void freezing_by_names(bool *frozen, const struct config *c, const struct model_shape *s) {
    struct parameters table = parameters_create(s, 1, NULL);
    struct huggingface_tensors names = huggingface_tensors_of(&table, s, architecture_of(c), config_rotary_dims(c));
    const char **matched = (const char **)calloc((size_t)table.num_tensors, sizeof *matched),
               **other = (const char **)calloc((size_t)table.num_tensors, sizeof *other);
    bool *used = (bool *)calloc(strlen(c->finetuning.freeze) + 1, sizeof *used);
    if (!matched || !other || !used)
        fail("out of memory for the names of parameters");
    for (int i = 0; i < names.count; i++) {
        const struct huggingface_tensor *t = &names.list[i];
        const bool matches = freezing_matches(c->finetuning.freeze, t->name, used);
        if (t->ours)
            (matches ? matched : other)[t->ours - table.tensors] = t->name;
    }
    freezing_check_used(c->finetuning.freeze, used, names.list[names.count / 2].name);
    bool any_trained = false;
    for (int i = 0; i < table.num_tensors; i++) {
        const struct tensor *t = &table.tensors[i];
        bool *row = frozen + (t->layer < 0 ? table.L : t->layer) * PARAM_COUNT;
        if (matched[i] && other[i])
            fail("--freeze names %s and not %s, which are one parameter here; freeze both or none", matched[i],
                 other[i]);
        if (matched[i]) {
            const enum parameter bias = freezing_bias(t->parameter);
            row[t->parameter] = true;
            if (bias != PARAM_COUNT)
                row[bias] = true;
        }
    }
    for (int i = 0; i < table.num_tensors; i++) {
        const struct tensor *t = &table.tensors[i];
        any_trained = any_trained || !frozen[(t->layer < 0 ? table.L : t->layer) * PARAM_COUNT + t->parameter];
    }
    if (!any_trained)
        fail("--freeze %s leaves nothing to train", c->finetuning.freeze);
    free(matched);
    free(other);
    free(used);
    huggingface_tensors_free(&names);
    parameters_free(&table);
}

// Returns what is frozen (L + 1, PARAM_COUNT; row L: no layer), for free(), or NULL. A bad --freeze ends the program.
static bool *freezing_of(const struct config *c, const struct model_shape *s) {
    if (!config_freezes(c))
        return NULL;
    const size_t rows = (size_t)s->L + 1;
    bool *frozen = (bool *)calloc(rows * PARAM_COUNT, sizeof *frozen);
    if (!frozen)
        fail("out of memory for the table of parameters");
    if (c->finetuning.lora_rank == 0)
        freezing_by_names(frozen, c, s);
    else
        for (size_t i = 0; i < rows * PARAM_COUNT; i++)
            frozen[i] = !parameter_is_adapter((enum parameter)(i % PARAM_COUNT));
    return frozen;
}
