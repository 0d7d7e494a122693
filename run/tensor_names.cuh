// Tells which tensor of a model's folder holds which of our parameters: its name, its rows, transposed or not. The list
// of huggingface_tensors_of for an architecture has the file's order (transformers' models/*/modeling_*.py); for
// ARCHITECTURE_OURS it is the table of parameters. A start checks that it has each parameter, which checkpoints would
// lack otherwise: list a new one, or let no architecture fit models with it (formats/huggingface.h).
//
// RoPE rotates pairs of elements that lie half a head apart. If a model rotates only the first R elements of a head,
// its pairs lie R / 2 apart. Then the rows of each head of q and k are permuted when they are read, and back when they
// are written, so that the R / 2 pairs that are rotated are the head's first.
#pragma once
#include "formats/huggingface.h"   // enum architecture
#include "model/parameters.cuh"    // struct parameters, struct tensor
#include "runtime/machine/error.h" // fail
#include <stdio.h>                 // snprintf
#include <stdlib.h>                // realloc, free
#include <string.h>                // memcpy, memset

struct huggingface_tensor {
    char name[96];
    const struct tensor *ours;             // the parameter whose values it holds; NULL: zeros
    int rows, cols;                        // shape of the tensor; cols 0: a vector of `rows`
    int first_row;                         // the row of the parameter that is the tensor's first
    bool transposed;                       // GPT-2's Conv1D: (in, out), while the parameter is (out, in)
    int repeat, q_rows, kv_rows, head_dim; // repeat > 1: the outputs are q, k, v, each KV head repeated so many times
    bool interleaved;               // GPT-NeoX: the outputs are q, k, v of head 0, of head 1, ...; head_dim rows each
    int permuted_rows, rotary_dims; // in the parameter's rows below permuted_rows, heads are permuted
};

struct huggingface_tensors {
    struct huggingface_tensor *list; // owned
    int count, room;
};

// Returns the index in our head of element d of a file's head, of D elements, of which RoPE rotates the first R.
static int huggingface_permuted(int d, int R, int D) {
    if (d < R / 2 || d >= (D + R) / 2)
        return d;
    return d < R ? d + (D - R) / 2 : d - R / 2;
}
// Returns the parameter's row that the tensor's output `row` comes from; a transposed tensor's outputs are columns.
static int huggingface_row(const struct huggingface_tensor *t, int row) {
    int ours = t->first_row + row;
    if (t->repeat > 1 && row >= t->q_rows) {
        const int repeated = t->kv_rows * t->repeat, k_or_v = (row - t->q_rows) / repeated;
        const int at = (row - t->q_rows) % repeated, head = at / t->head_dim / t->repeat;
        ours = t->q_rows + k_or_v * t->kv_rows + head * t->head_dim + at % t->head_dim;
    }
    if (t->interleaved) {
        const int head = row / (3 * t->head_dim), part = row / t->head_dim % 3;
        ours = part * t->q_rows + head * t->head_dim + row % t->head_dim;
    }
    if (ours >= t->permuted_rows)
        return ours;
    return ours - ours % t->head_dim + huggingface_permuted(ours % t->head_dim, t->rotary_dims, t->head_dim);
}
// Whether the tensor is anything but a run of the parameter's elements in their order.
static bool huggingface_is_rearranged(const struct huggingface_tensor *t) {
    return t->transposed || t->interleaved || t->repeat > 1 || t->permuted_rows > 0;
}

struct huggingface_builder {
    struct huggingface_tensors *tensors;
    const struct parameters *table;
    const struct model_shape *shape;
    const char *layers; // the prefix of a layer's tensors
    int rotary_dims;    // elements of a head that RoPE rotates
};

// Adds the tensor PREFIX[LAYER.]NAME (no LAYER if layer is -1): rows [first_row, first_row + rows) of a parameter or,
// if the model lacks it, zeros: ours NULL, cols 0. The result points into the list, and is valid until the next call.
static struct huggingface_tensor *huggingface_add(struct huggingface_builder *b, int layer, enum parameter id,
                                                  int first_row, int rows, const char *prefix, const char *name) {
    struct huggingface_tensors *tensors = b->tensors;
    if (tensors->count == tensors->room) {
        tensors->room = tensors->room ? 2 * tensors->room : 256;
        tensors->list =
            (struct huggingface_tensor *)realloc(tensors->list, (size_t)tensors->room * sizeof *tensors->list);
        if (!tensors->list)
            fail("out of memory for the table of parameters");
    }
    struct huggingface_tensor *t = &tensors->list[tensors->count++];
    memset(t, 0, sizeof *t);
    if (layer >= 0)
        snprintf(t->name, sizeof t->name, "%s%d.%s", prefix, layer, name);
    else
        snprintf(t->name, sizeof t->name, "%s%s", prefix, name);
    t->ours = parameters_find(b->table, layer, id);
    t->first_row = first_row;
    t->rows = rows;
    t->cols = t->ours && t->ours->cols > 1 ? t->ours->cols : 0;
    t->repeat = 1;
    return t;
}
// Marks GPT-2's tensor of q, k and v to hold a KV head once for each query head, if the model has fewer KV heads.
static void huggingface_mark_repeated_heads(struct huggingface_tensor *t, const struct layer_shape *s) {
    if (s->G == s->H)
        return;
    t->repeat = s->H / s->G;
    t->q_rows = s->H * s->D;
    t->kv_rows = s->G * s->D;
    t->head_dim = s->D;
}
// Adds GPT-2's NAME.weight (in, out) and NAME.bias (out), which is zeros if the model has no bias.
static void huggingface_add_conv1d(struct huggingface_builder *b, int layer, enum parameter weight, enum parameter bias,
                                   int out, int in, const char *name) {
    char text[64];
    snprintf(text, sizeof text, "%s.weight", name);
    struct huggingface_tensor *t = huggingface_add(b, layer, weight, 0, in, "transformer.h.", text);
    t->cols = out;
    t->transposed = true;
    if (weight == PARAM_QKV_W)
        huggingface_mark_repeated_heads(t, &b->shape->layer);
    snprintf(text, sizeof text, "%s.bias", name);
    t = huggingface_add(b, layer, bias, 0, out, "transformer.h.", text);
    if (bias == PARAM_QKV_B)
        huggingface_mark_repeated_heads(t, &b->shape->layer);
}
static void huggingface_add_untied_head(struct huggingface_builder *b, const char *name) {
    if (!b->shape->tied)
        huggingface_add(b, -1, PARAM_LM_HEAD, 0, b->shape->V, "", name);
}
static void huggingface_list_gpt2(struct huggingface_builder *b) {
    static const char prefix[] = "transformer.h.";
    const struct layer_shape *s = &b->shape->layer;
    huggingface_add(b, -1, PARAM_WTE, 0, b->shape->V, "", "transformer.wte.weight");
    huggingface_add(b, -1, PARAM_WPE, 0, b->shape->P, "", "transformer.wpe.weight");
    for (int l = 0; l < b->shape->L; l++) {
        huggingface_add(b, l, PARAM_LN1_W, 0, s->C, prefix, "ln_1.weight");
        huggingface_add(b, l, PARAM_LN1_B, 0, s->C, prefix, "ln_1.bias");
        huggingface_add_conv1d(b, l, PARAM_QKV_W, PARAM_QKV_B, 3 * s->H * s->D, s->C, "attn.c_attn");
        huggingface_add_conv1d(b, l, PARAM_ATTPROJ_W, PARAM_ATTPROJ_B, s->C, s->H * s->D, "attn.c_proj");
        huggingface_add(b, l, PARAM_LN2_W, 0, s->C, prefix, "ln_2.weight");
        huggingface_add(b, l, PARAM_LN2_B, 0, s->C, prefix, "ln_2.bias");
        huggingface_add_conv1d(b, l, PARAM_FC_W, PARAM_FC_B, s->F, s->C, "mlp.c_fc");
        huggingface_add_conv1d(b, l, PARAM_FCPROJ_W, PARAM_FCPROJ_B, s->C, s->F, "mlp.c_proj");
    }
    huggingface_add(b, -1, PARAM_LNF_W, 0, s->C, "", "transformer.ln_f.weight");
    huggingface_add(b, -1, PARAM_LNF_B, 0, s->C, "", "transformer.ln_f.bias");
    huggingface_add_untied_head(b, "lm_head.weight");
}
// Marks the heads of the first `rows` rows of the parameter as permuted, if RoPE rotates only a part of each head.
static void huggingface_mark_permuted_heads(struct huggingface_tensor *t, const struct huggingface_builder *b,
                                            int rows) {
    t->head_dim = b->shape->layer.D;
    t->rotary_dims = b->rotary_dims;
    t->permuted_rows = b->rotary_dims < t->head_dim ? rows : 0;
}
// Adds a norm's weight or bias, as `id` says, if the model has it. Marks heads of q's and k's norms that are permuted.
static void huggingface_add_norm(struct huggingface_builder *b, int layer, enum parameter id, const char *name) {
    const struct tensor *ours = parameters_find(b->table, layer, id);
    if (!ours)
        return;
    struct huggingface_tensor *t = huggingface_add(b, layer, id, 0, ours->visible_rows, b->layers, name);
    if (id == PARAM_QNORM_W || id == PARAM_KNORM_W)
        huggingface_mark_permuted_heads(t, b, ours->visible_rows);
}
// Adds a linear layer's weight (out, in) and, if there is one, bias (out). They are rows [first, first + out) of ours.
static void huggingface_add_linear(struct huggingface_builder *b, int layer, enum parameter weight, enum parameter bias,
                                   int first, int out, const char *name) {
    const enum parameter ids[2] = {weight, bias};
    static const char *const endings[2] = {"weight", "bias"};
    char text[64];
    for (int i = 0; i < 2; i++) {
        if (i == 1 && !parameters_find(b->table, layer, bias))
            continue;
        snprintf(text, sizeof text, "%s.%s", name, endings[i]);
        struct huggingface_tensor *t = huggingface_add(b, layer, ids[i], first, out, b->layers, text);
        if (weight == PARAM_QKV_W)
            huggingface_mark_permuted_heads(t, b, (b->shape->layer.H + b->shape->layer.G) * b->shape->layer.D);
    }
}
// Adds layer l's norms. post_attention_layernorm is the norm before the MLP, unless there is a norm after attention.
static void huggingface_add_norms(struct huggingface_builder *b, int l) {
    const bool after = parameters_find(b->table, l, PARAM_POST1_W) != NULL;
    huggingface_add_norm(b, l, PARAM_LN1_W, "input_layernorm.weight");
    huggingface_add_norm(b, l, PARAM_POST1_W, "post_attention_layernorm.weight");
    huggingface_add_norm(b, l, PARAM_LN2_W,
                         after ? "pre_feedforward_layernorm.weight" : "post_attention_layernorm.weight");
    huggingface_add_norm(b, l, PARAM_POST2_W, "post_feedforward_layernorm.weight");
    huggingface_add_norm(b, l, PARAM_QNORM_W, "self_attn.q_norm.weight");
    huggingface_add_norm(b, l, PARAM_KNORM_W, "self_attn.k_norm.weight");
}
// Lists the tensors of Llama and of models like it. fused: q, k and v are one tensor, and gate and up are one.
static void huggingface_list_llama(struct huggingface_builder *b, bool fused) {
    const struct layer_shape *s = &b->shape->layer;
    const int q = s->H * s->D, kv = s->G * s->D;
    b->layers = "model.layers.";
    huggingface_add(b, -1, PARAM_WTE, 0, b->shape->V, "", "model.embed_tokens.weight");
    for (int l = 0; l < b->shape->L; l++) {
        huggingface_add_norms(b, l);
        if (fused)
            huggingface_add_linear(b, l, PARAM_QKV_W, PARAM_QKV_B, 0, q + 2 * kv, "self_attn.qkv_proj");
        else {
            huggingface_add_linear(b, l, PARAM_QKV_W, PARAM_QKV_B, 0, q, "self_attn.q_proj");
            huggingface_add_linear(b, l, PARAM_QKV_W, PARAM_QKV_B, q, kv, "self_attn.k_proj");
            huggingface_add_linear(b, l, PARAM_QKV_W, PARAM_QKV_B, q + kv, kv, "self_attn.v_proj");
        }
        huggingface_add_linear(b, l, PARAM_ATTPROJ_W, PARAM_ATTPROJ_B, 0, s->C, "self_attn.o_proj");
        if (fused)
            huggingface_add_linear(b, l, PARAM_FC_W, PARAM_FC_B, 0, 2 * s->F, "mlp.gate_up_proj");
        else {
            huggingface_add_linear(b, l, PARAM_FC_W, PARAM_FC_B, 0, s->F, "mlp.gate_proj");
            huggingface_add_linear(b, l, PARAM_FC_W, PARAM_FC_B, s->F, s->F, "mlp.up_proj");
        }
        huggingface_add_linear(b, l, PARAM_FCPROJ_W, PARAM_FCPROJ_B, 0, s->C, "mlp.down_proj");
    }
    huggingface_add(b, -1, PARAM_LNF_W, 0, s->C, "", "model.norm.weight");
    huggingface_add_untied_head(b, "lm_head.weight");
}
static void huggingface_list_gpt_neox(struct huggingface_builder *b) {
    const struct layer_shape *s = &b->shape->layer;
    b->layers = "gpt_neox.layers.";
    huggingface_add(b, -1, PARAM_WTE, 0, b->shape->V, "", "gpt_neox.embed_in.weight");
    for (int l = 0; l < b->shape->L; l++) {
        huggingface_add_norm(b, l, PARAM_LN1_W, "input_layernorm.weight");
        huggingface_add_norm(b, l, PARAM_LN1_B, "input_layernorm.bias");
        huggingface_add_norm(b, l, PARAM_LN2_W, "post_attention_layernorm.weight");
        huggingface_add_norm(b, l, PARAM_LN2_B, "post_attention_layernorm.bias");
        const int first = b->tensors->count;
        huggingface_add_linear(b, l, PARAM_QKV_W, PARAM_QKV_B, 0, 3 * s->H * s->D, "attention.query_key_value");
        for (int i = first; i < b->tensors->count; i++) {
            b->tensors->list[i].interleaved = true;
            b->tensors->list[i].q_rows = s->H * s->D;
        }
        huggingface_add_linear(b, l, PARAM_ATTPROJ_W, PARAM_ATTPROJ_B, 0, s->C, "attention.dense");
        huggingface_add_linear(b, l, PARAM_FC_W, PARAM_FC_B, 0, s->F, "mlp.dense_h_to_4h");
        huggingface_add_linear(b, l, PARAM_FCPROJ_W, PARAM_FCPROJ_B, 0, s->C, "mlp.dense_4h_to_h");
    }
    huggingface_add(b, -1, PARAM_LNF_W, 0, s->C, "", "gpt_neox.final_layer_norm.weight");
    huggingface_add(b, -1, PARAM_LNF_B, 0, s->C, "", "gpt_neox.final_layer_norm.bias");
    huggingface_add_untied_head(b, "embed_out.weight");
}
// Lists our own tensors under their own names, without padding and adapters.
static void huggingface_list_ours(struct huggingface_builder *b) {
    for (int i = 0; i < b->table->num_tensors + b->table->num_frozen; i++) {
        const struct tensor *ours = &b->table->tensors[i];
        if (parameter_is_adapter(ours->parameter))
            continue;
        struct huggingface_tensor *t =
            huggingface_add(b, ours->layer, ours->parameter, 0, ours->visible_rows, "", ours->name);
        snprintf(t->name, sizeof t->name, "%s", ours->name);
    }
}

// The number of rows of the parameter, t->ours, that the tensor holds.
static int huggingface_rows_held(const struct huggingface_tensor *t) {
    if (t->repeat > 1)
        return t->q_rows + 2 * t->kv_rows;
    return t->transposed ? t->cols : t->rows;
}
// Ends the program unless the list holds as many rows of each parameter, except adapters', as the parameter has.
static void huggingface_tensors_check(const struct huggingface_tensors *tensors, const struct parameters *table,
                                      enum architecture a) {
    const int count = table->num_tensors + table->num_frozen;
    int64_t *held = (int64_t *)calloc((size_t)count, sizeof *held);
    if (!held)
        fail("out of memory for the table of parameters");
    for (int i = 0; i < tensors->count; i++)
        if (tensors->list[i].ours)
            held[tensors->list[i].ours - table->tensors] += huggingface_rows_held(&tensors->list[i]);
    for (int i = 0; i < count; i++) {
        const struct tensor *t = &table->tensors[i];
        if (!parameter_is_adapter(t->parameter) && held[i] != t->visible_rows)
            fail(
                "%s has no tensor for %lld of the %d rows of the parameter %s; give it one in run/tensor_names.cuh, or "
                "let no architecture of Hugging Face fit such a model",
                architecture_class(a), (long long)(t->visible_rows - held[i]), t->visible_rows, t->name);
    }
    free(held);
}

// Lists all tensors of the model's folder, without adapters, in the order in which they are written, for
// huggingface_tensors_free. They point into *table. rotary_dims: how many elements of a head RoPE rotates.
static struct huggingface_tensors huggingface_tensors_of(const struct parameters *table,
                                                         const struct model_shape *shape, enum architecture a,
                                                         int rotary_dims) {
    struct huggingface_tensors tensors;
    struct huggingface_builder b = {&tensors, table, shape, "", rotary_dims};
    memset(&tensors, 0, sizeof tensors);
    switch (a) {
    case ARCHITECTURE_OURS: huggingface_list_ours(&b); break;
    case ARCHITECTURE_GPT2: huggingface_list_gpt2(&b); break;
    case ARCHITECTURE_LLAMA:
    case ARCHITECTURE_QWEN2:
    case ARCHITECTURE_QWEN3:
    case ARCHITECTURE_MISTRAL:
    case ARCHITECTURE_MINISTRAL:
    case ARCHITECTURE_CWM:
    case ARCHITECTURE_SMOLLM3:
    case ARCHITECTURE_GRANITE:
    case ARCHITECTURE_OLMO2:
    case ARCHITECTURE_OLMO3:
    case ARCHITECTURE_GEMMA:
    case ARCHITECTURE_GEMMA2:
    case ARCHITECTURE_GEMMA3: huggingface_list_llama(&b, false); break;
    case ARCHITECTURE_PHI3: huggingface_list_llama(&b, true); break;
    case ARCHITECTURE_GPT_NEOX: huggingface_list_gpt_neox(&b); break;
    }
    huggingface_tensors_check(&tensors, table, a);
    return tensors;
}
static void huggingface_tensors_free(struct huggingface_tensors *tensors) {
    free(tensors->list);
    memset(tensors, 0, sizeof *tensors);
}

static int64_t huggingface_elements(const struct huggingface_tensor *t) {
    return (int64_t)t->rows * (t->cols ? t->cols : 1);
}

// out (n, cols or 1) = rows [first, first + n) of the tensor, by `ours`, the whole parameter; zeros if t->ours is NULL.
static void huggingface_gather(float *out, const struct huggingface_tensor *t, const float *ours, int first, int n) {
    const int cols = t->cols ? t->cols : 1;
    if (!t->ours) {
        memset(out, 0, (size_t)n * (size_t)cols * sizeof *out);
        return;
    }
    const int64_t width = t->ours->cols;
#pragma omp parallel for
    for (int r = first; r < first + n; r++) {
        float *row = out + (int64_t)(r - first) * cols;
        if (!t->transposed)
            memcpy(row, ours + huggingface_row(t, r) * width, (size_t)cols * sizeof *row);
        else
            for (int c = 0; c < cols; c++)
                row[c] = ours[huggingface_row(t, c) * width + r];
    }
}
// Inverts huggingface_gather: copies rows [first, first + n) of the tensor, in (n, cols), to their places in `ours`,
// the whole parameter. t->ours is not NULL. Repeated heads are taken to be equal, as huggingface_gather makes them.
static void huggingface_scatter(float *ours, const struct huggingface_tensor *t, const float *in, int first, int n) {
    const int cols = t->cols ? t->cols : 1;
    const int64_t width = t->ours->cols;
    for (int r = first; r < first + n; r++) {
        const float *row = in + (int64_t)(r - first) * cols;
        if (!t->transposed)
            memcpy(ours + huggingface_row(t, r) * width, row, (size_t)cols * sizeof *row);
        else
            for (int c = 0; c < cols; c++)
                ours[huggingface_row(t, c) * width + r] = row[c];
    }
}
