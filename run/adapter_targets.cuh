// Finds the linear layers of the blocks that --lora-target-modules names. A name is a module's whole name in the
// model's files, as model.layers.0.self_attn.q_proj, or what follows a dot in it, as q_proj; all-linear names all.
#pragma once
#include "config/layers.h"            // config_rotary_dims
#include "formats/peft_config.h"      // peft_name_matches
#include "run/tensor_names.cuh"       // huggingface_tensors_of
#include "runtime/machine/text_add.h" // text_add

// A module of the model's files that may have an adapter. Its weight is rows [first, first + rows) of a parameter.
struct adapter_module {
    enum linear linear;
    enum lora_module module;
    int first, rows, inputs;
};

// Returns the linear layer whose weight the parameter is, or LINEAR_COUNT if it is none's.
static enum linear linear_of_weight(enum parameter weight, const struct layer_shape *s) {
    for (int i = 0; i < LINEAR_COUNT; i++)
        if (linear_row((enum linear)i, s).weight == weight)
            return (enum linear)i;
    return LINEAR_COUNT;
}
// Whether a tensor is the weight of a module that may have an adapter. If so, *module becomes that module.
static bool is_adapter_module(struct adapter_module *module, const struct huggingface_tensor *t,
                              const struct layer_shape *s) {
    const enum linear linear = t->ours ? linear_of_weight(t->ours->parameter, s) : LINEAR_COUNT;
    if (linear == LINEAR_COUNT)
        return false;
    const struct linear_row row = linear_row(linear, s);
    module->linear = linear;
    module->first = t->first_row;
    module->rows = huggingface_rows_held(t);
    module->inputs = row.inputs;
    return lora_module_at(&module->module, linear, module->first, module->rows, s);
}

struct module_name {
    char text[sizeof(((struct huggingface_tensor *)0)->name)];
};
// Returns a tensor's name up to its last dot: model.layers.0.mlp.up_proj, without .weight; "" without a dot.
static struct module_name module_name_of(const struct huggingface_tensor *t) {
    struct module_name name;
    const char *dot = strrchr(t->name, '.');
    snprintf(name.text, sizeof name.text, "%.*s", (int)(dot ? dot - t->name : 0), t->name);
    return name;
}
static bool is_weight(const struct huggingface_tensor *t) {
    const char *dot = strrchr(t->name, '.');
    return dot && strcmp(dot, ".weight") == 0;
}
// Returns a module's name within layer `layer`, as mlp.up_proj, or its whole name outside of it; points into *name.
static const char *name_in_layer(const struct module_name *name, int layer) {
    char number[16];
    const int length = snprintf(number, sizeof number, ".%d.", layer);
    const char *at = strstr(name->text, number);
    return at ? at + length : name->text;
}
// ---- the option ----

struct target_search {
    const struct config *config;
    const struct layer_shape *shape;
    struct huggingface_tensors names;
    bool *matched; // (names.count)
};
// text = the names, within a layer, of the modules that may have adapters, with commas between them, cut to what fits.
static void targets_known(const struct target_search *s, char text[OPTION_TEXT]) {
    struct adapter_module module;
    text[0] = 0;
    for (int i = 0; i < s->names.count; i++) {
        const struct huggingface_tensor *t = &s->names.list[i];
        if (!is_adapter_module(&module, t, s->shape) || t->ours->layer != 0)
            continue;
        const struct module_name name = module_name_of(t);
        text_add(text, OPTION_TEXT, "%s%s", *text ? ", " : "", name_in_layer(&name, 0));
    }
}
// Marks in s->matched the modules that a target (length bytes) names; all-linear names all that may have adapters. Ends
// the program where the target names no module, or names a weight that can't have an adapter.
static void target_find(struct target_search *s, const char *target, size_t length) {
    const bool all = length == strlen(PEFT_ALL_LINEAR) && strncmp(target, PEFT_ALL_LINEAR, length) == 0;
    struct adapter_module module;
    char known[OPTION_TEXT];
    int count = 0, others = 0;
    for (int i = 0; i < s->names.count; i++) {
        const struct module_name name = module_name_of(&s->names.list[i]);
        const bool linear = is_adapter_module(&module, &s->names.list[i], s->shape);
        if (length == 0 || (!all && !peft_name_matches(target, length, name.text)))
            continue;
        count += linear;
        others += !linear && !all && is_weight(&s->names.list[i]);
        s->matched[i] = s->matched[i] || linear;
    }
    if (count > 0 && others == 0)
        return;
    targets_known(s, known);
    if (others > 0)
        fail("--lora-target-modules: '%.*s' is no linear layer of a block; expected " PEFT_ALL_LINEAR
             " or names among %s",
             (int)length, target, known);
    fail("--lora-target-modules: the model has no module '%.*s'; expected " PEFT_ALL_LINEAR " or names among %s",
         (int)length, target, known);
}
// Returns the marked modules' kinds, as bits of enum lora_module. Ends the program if only some layers have one marked.
static unsigned targets_found(const struct target_search *s) {
    unsigned modules = 0, absent = 0;
    struct adapter_module module;
    struct module_name found = {""}, missing = {""};
    for (int i = 0; i < s->names.count; i++) {
        if (!is_adapter_module(&module, &s->names.list[i], s->shape))
            continue;
        if (s->matched[i])
            modules |= (unsigned)module.module;
        else
            absent |= (unsigned)module.module;
    }
    for (int i = 0; i < s->names.count && (modules & absent); i++)
        if (is_adapter_module(&module, &s->names.list[i], s->shape) && (modules & absent & (unsigned)module.module))
            *(s->matched[i] ? &found : &missing) = module_name_of(&s->names.list[i]);
    if (modules & absent)
        fail("--lora-target-modules names %s and not %s; expected the same modules in every layer", found.text,
             missing.text);
    return modules;
}
// Ends the program where --lora-rank is more than the inputs or the outputs of a marked module.
static void targets_check_rank(const struct target_search *s) {
    struct adapter_module module;
    for (int i = 0; i < s->names.count; i++) {
        if (!s->matched[i] || !is_adapter_module(&module, &s->names.list[i], s->shape))
            continue;
        const int outputs = s->names.list[i].transposed ? s->names.list[i].cols : s->names.list[i].rows;
        const int most = module.inputs < outputs ? module.inputs : outputs;
        if (s->config->finetuning.lora_rank > most)
            fail("--lora-rank %d is more than the %d %s of the module %s; expected %d at most",
                 s->config->finetuning.lora_rank, most, module.inputs < outputs ? "inputs" : "outputs",
                 module_name_of(&s->names.list[i]).text, most);
    }
}

// Sets c->lora_modules, bits of enum lora_module, from --lora-target-modules; 0 without --lora-rank. The model's
// options must be resolved. Ends the program for bad names, layers that would differ, or too large a --lora-rank.
static void adapters_resolve(struct config *c) {
    c->lora_modules = 0;
    if (c->finetuning.lora_rank == 0)
        return;
    const struct model_shape shape = model_shape_of(c, sizeof(float), false);
    struct parameters table = parameters_create(&shape, 1, NULL);
    struct target_search s = {c, &shape.layer,
                              huggingface_tensors_of(&table, &shape, architecture_of(c), config_rotary_dims(c)), NULL};
    s.matched = (bool *)calloc((size_t)s.names.count, sizeof *s.matched);
    if (!s.matched)
        fail("out of memory for the names of modules");
    const char *at = c->finetuning.lora_target_modules;
    do {
        const size_t length = strcspn(at, ",");
        target_find(&s, at, length);
        at += length + (at[length] == ',');
    } while (*at);
    c->lora_modules = targets_found(&s);
    targets_check_rank(&s);
    free(s.matched);
    huggingface_tensors_free(&s.names);
    parameters_free(&table);
}
