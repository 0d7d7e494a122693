// LoRA's adapters in peft's adapter_config.json and adapter_model.safetensors. An adapted module has two tensors:
//   base_model.model.MODULE.lora_A.weight   (rank, inputs)
//   base_model.model.MODULE.lora_B.weight   (outputs, rank), outputs in the order of the file's weight
#pragma once
#include "run/adapter_targets.cuh"    // struct adapter_module
#include "run/load.cuh"               // model_load_tensor
#include "runtime/machine/text_add.h" // text_copy

// ---- adapter_model.safetensors ----

// Returns a module's index among its linear layer's adapted parts (shape->lora), or -1 if the module has no adapter.
static int adapter_part_of(const struct model_shape *shape, const struct adapter_module *module) {
    const struct lora_layer *adapter = &shape->lora.linear[module->linear];
    for (int p = 0; p < adapter->count; p++)
        if (adapter->parts[p].first == module->first && adapter->parts[p].rows == module->rows)
            return p;
    return -1;
}
// pair = lora_A and lora_B of a module as the file has them: name, shape, rows in *table. part: from adapter_part_of.
static void adapter_tensors(struct huggingface_tensor pair[2], const struct parameters *table,
                            const struct model_shape *shape, const struct huggingface_tensor *weight,
                            const struct adapter_module *module, int part) {
    const struct linear_row row = linear_row(module->linear, &shape->layer);
    const struct lora_layer *adapter = &shape->lora.linear[module->linear];
    const struct module_name name = module_name_of(weight);
    struct huggingface_tensor *a = &pair[0], *b = &pair[1];
    int above = 0; // rows of B above the module's
    for (int p = 0; p < part; p++)
        above += adapter->parts[p].rows;
    const int lacks = module->first - above; // rows of the weight above the module's that B lacks: whole heads
    memset(a, 0, sizeof *a);
    *b = *weight;
    snprintf(a->name, sizeof a->name, "base_model.model.%.60s.lora_A.weight", name.text);
    snprintf(b->name, sizeof b->name, "base_model.model.%.60s.lora_B.weight", name.text);
    a->ours = parameters_find(table, weight->ours->layer, row.lora_a);
    a->first_row = part * shape->lora.rank;
    a->rows = shape->lora.rank;
    a->cols = module->inputs;
    a->repeat = 1;
    b->ours = parameters_find(table, weight->ours->layer, row.lora_b);
    b->first_row = above;
    b->permuted_rows = weight->permuted_rows > lacks ? weight->permuted_rows - lacks : 0;
    b->rows = weight->transposed ? weight->cols : weight->rows;
    b->cols = shape->lora.rank;
    b->transposed = false;
}
// Lists the tensors of a model's adapters, lora_A and then lora_B of each module that has an adapter, in the order of
// the weights. The list points into *table; huggingface_tensors_free frees the list. rotary_dims: config_rotary_dims.
static struct huggingface_tensors adapters_tensors_of(const struct parameters *table, const struct model_shape *shape,
                                                      enum architecture a, int rotary_dims) {
    struct huggingface_tensors weights = huggingface_tensors_of(table, shape, a, rotary_dims), adapters;
    struct adapter_module module;
    memset(&adapters, 0, sizeof adapters);
    adapters.room = 2 * weights.count;
    adapters.list = (struct huggingface_tensor *)calloc((size_t)adapters.room, sizeof *adapters.list);
    if (!adapters.list)
        fail("out of memory for the table of parameters");
    for (int i = 0; i < weights.count; i++) {
        if (!is_adapter_module(&module, &weights.list[i], &shape->layer))
            continue;
        const int part = adapter_part_of(shape, &module);
        if (part >= 0) {
            adapter_tensors(&adapters.list[adapters.count], table, shape, &weights.list[i], &module, part);
            adapters.count += 2;
        }
    }
    huggingface_tensors_free(&weights);
    return adapters;
}

// Refuses an open folder of adapters with a tensor that `tensors` lacks. Returns NULL, or what is wrong.
static const char *adapters_check_names(const struct model_folder *folder, const struct huggingface_tensors *tensors,
                                        struct error_text *error) {
    for (int i = 0; i < folder->files[0].count; i++) {
        const char *name = folder->files[0].tensors[i].name;
        bool known = false;
        for (int t = 0; t < tensors->count && !known; t++)
            known = strcmp(name, tensors->list[t].name) == 0;
        if (!known)
            return error_format(error,
                                "%s: has the tensor '%s', which is no adapter of a module that --lora-target-modules "
                                "names",
                                folder->names[0], json_show(name).text);
    }
    return NULL;
}
// Loads this rank's part of the adapters in folder `path`: exactly into master weights, if there are any, and rounded
// into the parameters. *exact: whether all are fp32 in the file. Waits for the device. Returns NULL, or an error.
static const char *adapters_load(struct gpt *m, const char *path, bool *exact, struct error_text *error) {
    struct model_folder folder;
    struct model_loader loader;
    const struct config *c = &m->config;
    struct huggingface_tensors tensors =
        adapters_tensors_of(&m->table, &m->shape, architecture_of(c), config_rotary_dims(c));
    const char *problem = model_loader_create(&loader, m, error), *opened = adapter_folder_open(&folder, path, error);
    *exact = true;
    if (!problem)
        problem = opened;
    if (!problem)
        problem = adapters_check_names(&folder, &tensors, error);
    for (int i = 0; i < tensors.count && !problem; i++)
        problem = model_load_tensor(&loader, &folder, &tensors.list[i], error);
    for (int i = 0; i < (problem ? 0 : folder.files[0].count); i++)
        *exact = *exact && folder.files[0].tensors[i].dtype == SAFETENSORS_F32;
    model_folder_close(&folder);
    model_loader_free(&loader);
    huggingface_tensors_free(&tensors);
    return problem;
}

// ---- adapter_config.json ----

// Whether a module without an adapter has a name that ends in `last`, too, as two modules of GPT-2 end in c_proj.
static bool adapter_name_is_shared(const struct huggingface_tensors *weights, const struct model_shape *shape,
                                   const char *last) {
    struct adapter_module module;
    for (int i = 0; i < weights->count; i++) {
        const struct module_name name = module_name_of(&weights->list[i]);
        if (is_adapter_module(&module, &weights->list[i], &shape->layer) && adapter_part_of(shape, &module) < 0 &&
            peft_name_matches(last, strlen(last), name.text))
            return true;
    }
    return false;
}
// Returns the names of the modules with adapters, with commas between them, which the caller frees. A name is only the
// last part, as q_proj, unless a module without an adapter ends in it, too; then it is the name in the layer.
static char *adapters_targets(const struct huggingface_tensors *weights, const struct model_shape *shape) {
    char *text = NULL;
    size_t bytes = 0;
    struct adapter_module module;
    struct module_name names[LINEAR_COUNT * LORA_PARTS];
    int count = 0;
    for (int i = 0; i < weights->count; i++) {
        const struct huggingface_tensor *t = &weights->list[i];
        if (!is_adapter_module(&module, t, &shape->layer) || t->ours->layer != 0 || adapter_part_of(shape, &module) < 0)
            continue;
        const struct module_name whole = module_name_of(t);
        const char *in_layer = name_in_layer(&whole, 0), *dot = strrchr(in_layer, '.'),
                   *last = dot ? dot + 1 : in_layer;
        const char *name = adapter_name_is_shared(weights, shape, last) ? in_layer : last;
        bool again = false;
        for (int k = 0; k < count; k++)
            again = again || strcmp(names[k].text, name) == 0;
        if (!again && count < LINEAR_COUNT * LORA_PARTS)
            snprintf(names[count++].text, sizeof names->text, "%s", name);
    }
    FILE *out = open_memstream(&text, &bytes);
    for (int k = 0; k < count && out; k++)
        fprintf(out, "%s%s", k ? "," : "", names[k].text);
    if (!out || fclose(out) != 0)
        fail("out of memory for the names of modules");
    return text;
}
// Writes the adapter_config.json of a model with LoRA. base: the folder of its base model. An error shows in `out`.
static void adapters_write_config(FILE *out, const struct gpt *m, const char *base) {
    const struct config *c = &m->config;
    const enum architecture a = architecture_of(c);
    struct huggingface_tensors weights = huggingface_tensors_of(&m->table, &m->shape, a, config_rotary_dims(c));
    struct peft_config peft;
    memset(&peft, 0, sizeof peft);
    peft.rank = c->finetuning.lora_rank;
    peft.alpha = (float)config_lora_alpha(c);
    peft.dropout = c->finetuning.lora_dropout;
    peft.rslora = c->finetuning.lora_use_rslora;
    peft.fan_in_fan_out = a == ARCHITECTURE_GPT2;
    peft.targets = adapters_targets(&weights, &m->shape);
    peft.base = text_copy(base);
    peft_config_write(out, &peft);
    peft_config_free(&peft);
    huggingface_tensors_free(&weights);
}
