// The parameters: one table of tensors, laid out in one flat buffer in the order in which backward finishes them.
//
// Gradients, master weights and optimizer moments use the same offsets in buffers of their own. Because the order is
// that of backward, a range at the front of the gradient buffer is complete while later layers still run: buckets of a
// gradient reduction, optimizer shards and decay groups are ranges.
#pragma once
#include "config.h"           // struct config
#include "kernels/random.cuh" // random_normal
#include "recompute.cuh"      // struct layer_shape
#include <stdbool.h>          // bool
#include <stdint.h>           // int64_t
#include <stdio.h>            // snprintf

// The shape of a whole model: what the config says, resolved.
struct model_shape {
    struct layer_shape layer;
    int L, V, Vp, P; // layers, vocabulary, vocabulary padded for the matmuls, learned positions (0: none)
    bool biases, qkv_bias, tied;
};

enum { VOCABULARY_MULTIPLE = 128 }; // padded columns are invisible outside: logits masked, gradients zero, never saved

static struct model_shape model_shape_of(const struct config *c, int element_bytes, bool materialised) {
    struct model_shape shape;
    shape.layer.C = c->hidden_size;
    shape.layer.H = c->num_attention_heads;
    shape.layer.G = c->num_query_groups;
    shape.layer.D = c->kv_channels;
    shape.layer.F = c->ffn_hidden_size;
    shape.layer.T = c->seq_length;
    shape.layer.x = element_bytes;
    shape.layer.swiglu = c->activation == ACTIVATION_SWIGLU;
    shape.layer.rmsnorm = c->normalization == NORMALIZATION_RMSNORM;
    shape.layer.materialised = materialised;
    shape.L = c->num_layers;
    shape.V = c->vocab_size;
    shape.Vp = (c->vocab_size + VOCABULARY_MULTIPLE - 1) / VOCABULARY_MULTIPLE * VOCABULARY_MULTIPLE;
    shape.P = c->position_embedding_type == POSITION_LEARNED ? c->max_position_embeddings : 0;
    shape.biases = c->add_bias_linear;
    shape.qkv_bias = c->add_bias_linear || c->add_qkv_bias;
    shape.tied = !c->untie_embeddings_and_output_weights;
    return shape;
}

enum initialisation {
    INIT_NORMAL,   // normal, --init-method-std
    INIT_RESIDUAL, // normal, the std divided by sqrt(2 L): projections that add to the residual stream (GPT-2)
    INIT_ONE,
    INIT_ZERO,
};

// One row a kind of tensor, in the order in which backward finishes them. Columns: name; 1 where every layer has one;
// rows (0: the model has none); columns (1: a vector); rows that are visible outside; initialisation.
// Matrices and embeddings decay, vectors do not, which is the rule of GPT-2's and Llama's trainers.
#define PARAMETER_ROWS(ROW)                                                                                            \
    ROW(LNF_W, "lnf.weight", 0, s->layer.C, 1, s->layer.C, INIT_ONE)                                                   \
    ROW(LNF_B, "lnf.bias", 0, s->layer.rmsnorm ? 0 : s->layer.C, 1, s->layer.C, INIT_ZERO)                             \
    ROW(LM_HEAD, "lm_head", 0, s->tied ? 0 : s->Vp, s->layer.C, s->V, INIT_NORMAL)                                     \
    ROW(FCPROJ_W, "fcproj.weight", 1, s->layer.C, s->layer.F, s->layer.C, INIT_RESIDUAL)                               \
    ROW(FCPROJ_B, "fcproj.bias", 1, s->biases ? s->layer.C : 0, 1, s->layer.C, INIT_ZERO)                              \
    ROW(FC_W, "fc.weight", 1, (s->layer.swiglu ? 2 : 1) * s->layer.F, s->layer.C,                                      \
        (s->layer.swiglu ? 2 : 1) * s->layer.F, INIT_NORMAL)                                                           \
    ROW(FC_B, "fc.bias", 1, s->biases ? (s->layer.swiglu ? 2 : 1) * s->layer.F : 0, 1,                                 \
        (s->layer.swiglu ? 2 : 1) * s->layer.F, INIT_ZERO)                                                             \
    ROW(LN2_W, "ln2.weight", 1, s->layer.C, 1, s->layer.C, INIT_ONE)                                                   \
    ROW(LN2_B, "ln2.bias", 1, s->layer.rmsnorm ? 0 : s->layer.C, 1, s->layer.C, INIT_ZERO)                             \
    ROW(ATTPROJ_W, "attproj.weight", 1, s->layer.C, s->layer.H * s->layer.D, s->layer.C, INIT_RESIDUAL)                \
    ROW(ATTPROJ_B, "attproj.bias", 1, s->biases ? s->layer.C : 0, 1, s->layer.C, INIT_ZERO)                            \
    ROW(QKV_W, "qkv.weight", 1, (s->layer.H + 2 * s->layer.G) * s->layer.D, s->layer.C,                                \
        (s->layer.H + 2 * s->layer.G) * s->layer.D, INIT_NORMAL)                                                       \
    ROW(QKV_B, "qkv.bias", 1, s->qkv_bias ? (s->layer.H + 2 * s->layer.G) * s->layer.D : 0, 1,                         \
        (s->layer.H + 2 * s->layer.G) * s->layer.D, INIT_ZERO)                                                         \
    ROW(LN1_W, "ln1.weight", 1, s->layer.C, 1, s->layer.C, INIT_ONE)                                                   \
    ROW(LN1_B, "ln1.bias", 1, s->layer.rmsnorm ? 0 : s->layer.C, 1, s->layer.C, INIT_ZERO)                             \
    ROW(WPE, "wpe", 0, s->P, s->layer.C, s->P, INIT_NORMAL)                                                            \
    ROW(WTE, "wte", 0, s->Vp, s->layer.C, s->V, INIT_NORMAL)

enum parameter {
#define ENUM_ROW(id, name, per_layer, rows, cols, visible, init) PARAM_##id,
    PARAMETER_ROWS(ENUM_ROW)
#undef ENUM_ROW
        PARAM_COUNT
};

struct tensor {
    char name[40]; // "layer.3.qkv.weight"
    enum parameter parameter;
    int layer;        // -1: of the whole model
    int rows, cols;   // cols = 1: a vector
    int visible_rows; // the rest is padding
    enum initialisation init;
    int64_t offset, count; // in elements of the flat buffers; count includes padded rows
};

static bool tensor_decays(const struct tensor *t) { return t->cols > 1; }

struct parameters {
    struct tensor *tensors; // in flat order
    int num_tensors;
    int *index; // (L + 1, PARAM_COUNT) into tensors, -1 where absent; the last row is the whole model's
    int L;
    int64_t flat;    // elements of a flat buffer, alignment gaps included
    int64_t visible; // parameters as the world counts them
    // Units: the head's tensors, each layer's from the last on, the embeddings'. Unit u is [unit_begin[u], unit_begin[u + 1]).
    int num_units;
    int64_t *unit_begin; // (num_units + 1)
};

enum { TENSOR_ALIGNMENT = 128 }; // elements: 256 bytes of bf16, what cuBLASLt assumes of its operands

static struct tensor tensor_row(enum parameter id, const struct model_shape *s, bool *per_layer) {
    struct tensor t;
    memset(&t, 0, sizeof t);
    t.parameter = id;
    t.layer = -1;
    switch (id) {
#define CASE_ROW(id, text, each, rows_, cols_, visible_, init_)                                                        \
    case PARAM_##id:                                                                                                   \
        snprintf(t.name, sizeof t.name, "%s", text);                                                                   \
        *per_layer = each;                                                                                             \
        t.rows = rows_;                                                                                                \
        t.cols = cols_;                                                                                                \
        t.visible_rows = visible_;                                                                                     \
        t.init = init_;                                                                                                \
        break;
        PARAMETER_ROWS(CASE_ROW)
#undef CASE_ROW
    default: break;
    }
    return t;
}

static void parameters_add(struct parameters *p, struct tensor t, int layer) {
    if (t.rows == 0)
        return;
    if (layer >= 0) {
        char name[sizeof t.name + 32];
        snprintf(name, sizeof name, "layer.%d.%s", layer, t.name);
        memcpy(t.name, name, sizeof t.name - 1);
    }
    t.layer = layer;
    t.count = (int64_t)t.rows * t.cols;
    t.offset = p->flat;
    p->flat += (t.count + TENSOR_ALIGNMENT - 1) / TENSOR_ALIGNMENT * TENSOR_ALIGNMENT;
    p->visible += (int64_t)t.visible_rows * t.cols;
    p->index[(layer < 0 ? p->L : layer) * PARAM_COUNT + t.parameter] = p->num_tensors;
    p->tensors[p->num_tensors++] = t;
}

static int unit_of_head(void) { return 0; }
static int unit_of_layer(const struct parameters *p, int l) { return p->L - l; }
static int unit_of_embeddings(const struct parameters *p) { return p->L + 1; }
static int unit_of(const struct parameters *p, int layer, enum parameter id) {
    return layer >= 0 ? unit_of_layer(p, layer) : id < PARAM_FCPROJ_W ? unit_of_head() : unit_of_embeddings(p);
}

// A unit ends: the next begins at a multiple of `multiple` elements.
static void parameters_end_unit(struct parameters *p, int64_t multiple) {
    p->flat = (p->flat + multiple - 1) / multiple * multiple;
    p->unit_begin[++p->num_units] = p->flat;
}

// For `ranks` processes: each unit is a multiple of as many aligned parts.
static struct parameters parameters_create(const struct model_shape *s, int ranks) {
    const int64_t multiple = (int64_t)ranks * TENSOR_ALIGNMENT;
    struct parameters p;
    memset(&p, 0, sizeof p);
    p.L = s->L;
    p.unit_begin = (int64_t *)calloc((size_t)s->L + 3, sizeof *p.unit_begin);
    p.tensors = (struct tensor *)calloc((size_t)(s->L + 1) * PARAM_COUNT, sizeof *p.tensors);
    p.index = (int *)calloc((size_t)(s->L + 1) * PARAM_COUNT, sizeof *p.index);
    if (!p.tensors || !p.index || !p.unit_begin)
        fail("out of memory for the table of parameters");
    for (int i = 0; i < (s->L + 1) * PARAM_COUNT; i++)
        p.index[i] = -1;
    bool per_layer = false;
    for (int id = 0; id < PARAM_COUNT; id++) {
        const struct tensor t = tensor_row((enum parameter)id, s, &per_layer);
        if (!per_layer) {
            parameters_add(&p, t, -1);
            continue;
        }
        if (id != PARAM_FCPROJ_W) // the rows of a layer stand together: the first of them adds all
            continue;
        parameters_end_unit(&p, multiple);
        for (int l = s->L - 1; l >= 0; l--) {
            for (int row = PARAM_FCPROJ_W; row <= PARAM_LN1_B; row++)
                parameters_add(&p, tensor_row((enum parameter)row, s, &per_layer), l);
            parameters_end_unit(&p, multiple);
        }
    }
    parameters_end_unit(&p, multiple);
    return p;
}
static void parameters_free(struct parameters *p) {
    free(p->tensors);
    free(p->index);
    free(p->unit_begin);
    memset(p, 0, sizeof *p);
}

// The tensor, or NULL where this model has none. layer -1: of the whole model.
static const struct tensor *parameters_find(const struct parameters *p, int layer, enum parameter id) {
    const int at = p->index[(layer < 0 ? p->L : layer) * PARAM_COUNT + id];
    return at < 0 ? NULL : &p->tensors[at];
}

// Initial values of elements [first, first + n) of one tensor, fp32. They depend on the seed and the tensor's place alone.
static void tensor_initialise(float *out, int64_t first, int64_t n, const struct tensor *t, double std, int L,
                              uint64_t seed) {
    int64_t visible = (int64_t)t->visible_rows * t->cols - first;
    visible = visible < 0 ? 0 : visible < n ? visible : n;
    memset(out, 0, (size_t)n * sizeof *out);
    if (t->init == INIT_ONE)
        for (int64_t i = 0; i < visible; i++)
            out[i] = 1;
    if (t->init == INIT_RESIDUAL)
        std /= sqrt(2.0 * L);
    const uint64_t stream = (uint64_t)(t->layer + 1) * PARAM_COUNT + (uint64_t)t->parameter;
    if (t->init == INIT_NORMAL || t->init == INIT_RESIDUAL)
        random_normal(out, visible, (float)std, seed, stream, (uint64_t)first);
}
