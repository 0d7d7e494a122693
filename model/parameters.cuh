// The parameters: one table of tensors, laid out in one flat buffer in the order in which backward finishes them.
// Gradients, master weights and optimizer moments use the same offsets. The gradients that backward has finished so far
// are always a range at the front of the buffer, which can be reduced while backward goes on.
//
// Frozen tensors (--freeze, and the base model under LoRA) have a flat buffer of their own, cut into the same units,
// but no gradients and no optimizer state. An adapter of LoRA is two rows of the table, next to its linear layer's.
#pragma once
#include "config/config.h"           // struct config
#include "config/finetune.h"         // enum lora_module
#include "config/layers.h"           // config_window
#include "kernels/frozen_format.cuh" // enum frozen_format
#include "kernels/random.cuh"        // random_normal
#include "recompute.cuh"             // struct layer_shape
#include <stdbool.h>                 // bool
#include <stdint.h>                  // int64_t
#include <stdio.h>                   // snprintf

// The linear layers of a block. `s` is the struct layer_shape. Columns: id; name; X, where PARAM_X_W, PARAM_X_B,
// PARAM_X_LORA_A and PARAM_X_LORA_B are its tensors; number of outputs; number of inputs; the activation that it reads
// (ACT_OUT: of the block below); whether other ops of the backward read that activation too, so that it is kept in
// floatX; the activation that its product makes; what makes the gradient of its output. A new row goes last, because
// adapters' dropout masks and the FP8 state in checkpoints go by the number of the row.
#define LINEAR_ROWS(ROW)                                                                                               \
    ROW(QKV, "qkv", QKV, qkv_width(s), s->C, s->norm_before ? ACT_NORM1 : ACT_OUT, !s->norm_before, ACT_QKV,           \
        GRADIENT_BY_ATTENTION)                                                                                         \
    ROW(ATT_PROJ, "attention projection", ATTPROJ, s->C, s->H * s->D, ACT_ATT, true,                                   \
        s->norm_after ? ACT_ATT_PROJ                                                                                   \
        : s->parallel ? ACT_OUT                                                                                        \
                      : ACT_MID,                                                                                       \
        GRADIENT_BY_STREAM)                                                                                            \
    ROW(FC, "fc", FC, fc_width(s), s->C, s->norm_before ? ACT_NORM2 : ACT_MID, !s->norm_before, ACT_FC,                \
        GRADIENT_BY_ACTIVATION)                                                                                        \
    ROW(MLP_PROJ, "mlp projection", FCPROJ, s->C, s->F, ACT_ACT, false, s->norm_after ? ACT_MLP_PROJ : ACT_OUT,        \
        GRADIENT_BY_STREAM)

enum linear {
#define ENUM_ROW(id, name, tensors, outputs, inputs, reads, shared, product, gradient_by) LINEAR_##id,
    LINEAR_ROWS(ENUM_ROW)
#undef ENUM_ROW
        LINEAR_COUNT
};
// The maker of the gradient of a linear layer's output: attention's backward; the residual stream or the norm after the
// branch; the MLP's activation; or another op, which computes neither the gradient's amax nor its column sums.
enum gradient_by { GRADIENT_BY_ATTENTION, GRADIENT_BY_STREAM, GRADIENT_BY_ACTIVATION, GRADIENT_BY_OTHERS };

// The adapters of LoRA. A part is a range of a linear layer's outputs that has an adapter of its own: q, k or v, gate
// or up, or the whole layer. The As of a layer's parts are one below the other in one tensor, and so are the Bs.
enum { LORA_PARTS = 3 };
struct lora_part {
    int first, rows; // outputs [first, first + rows)
};
struct lora_layer {
    int count; // of adapted parts; 0: the linear layer has no adapter
    struct lora_part parts[LORA_PARTS];
};
struct lora_shape {
    int rank; // 0: no LoRA
    struct lora_layer linear[LINEAR_COUNT];
};

struct model_shape {
    struct layer_shape layer;
    struct lora_shape lora;
    enum frozen_format frozen_format; // of the frozen weights of linear layers
    int L, V, Vp, P; // layers, vocabulary, vocabulary padded for the matmuls, learned positions (0: none)
    enum normalization normalization;
    enum activation activation;
    enum qk_layernorm_width qk_norm_width;
    bool norm_one_plus;    // norm weights are stored as their difference from 1
    bool zero_projections; // projections onto the residual stream begin at 0
    bool qkv_bias, attention_proj_bias, mlp_bias, tied;
};
// The number of elements of the weight of a norm over the hidden size; 0 if the model lacks the norm (not `has`).
static int norm_weight_rows(const struct model_shape *s, bool has) { return has ? s->layer.C : 0; }
// The number of elements of the bias of a norm over the hidden size; 0 in RMSNorm, and without the norm (not `has`).
static int norm_bias_rows(const struct model_shape *s, bool has) {
    switch (s->normalization) {
    case NORMALIZATION_LAYERNORM: return norm_weight_rows(s, has);
    case NORMALIZATION_RMSNORM: return 0;
    }
    return 0;
}
// The number of elements of the weight of q's or k's norm, for q or k of `heads` heads; 0 if q and k are not normed.
static int qk_norm_weight_rows(const struct model_shape *s, int heads) {
    if (s->layer.qk_statistics == 0)
        return 0;
    switch (s->qk_norm_width) {
    case QK_LAYERNORM_HEAD: return s->layer.D;
    case QK_LAYERNORM_FULL: return heads * s->layer.D;
    }
    return 0;
}
// The number of 1 / RMS values per token that the backward of q's and k's norms reads: one for each head of q and of k,
// or 2 for norms of full width. It is 0 if q and k are not normed.
static int qk_norm_statistics(const struct config *c) {
    if (!c->model.qk_layernorm)
        return 0;
    switch (c->model.qk_layernorm_width) {
    case QK_LAYERNORM_HEAD: return c->model.num_attention_heads + c->model.num_query_groups;
    case QK_LAYERNORM_FULL: return 2;
    }
    return 0;
}
static bool norm_is_before(enum norm_placement placement) {
    switch (placement) {
    case NORM_PLACEMENT_PRE:
    case NORM_PLACEMENT_SANDWICH: return true;
    case NORM_PLACEMENT_POST: return false;
    }
    return true;
}
// Whether a branch has a norm of its output, before the output is added to the residual stream.
static bool norm_is_after(enum norm_placement placement) {
    switch (placement) {
    case NORM_PLACEMENT_PRE: return false;
    case NORM_PLACEMENT_POST:
    case NORM_PLACEMENT_SANDWICH: return true;
    }
    return false;
}
// Returns the mean number of keys that a query sees, over a sequence's queries and the layers, ignoring documents.
static double mean_keys(const struct config *c) {
    const double T = c->model.seq_length, W = config_window(c) < c->model.seq_length ? config_window(c) : T;
    double windowed = 0;
    for (int l = 0; l < c->model.num_layers; l++)
        windowed += config_layer_is_windowed(c, l);
    const double causal = (T + 1) / 2, window = W - W * (W - 1) / (2 * T);
    return causal + (window - causal) * windowed / c->model.num_layers;
}

// The number of floats per token that a norm's backward reads: 1 / deviation and, for LayerNorm, the mean.
static int norm_statistics(enum normalization kind) {
    switch (kind) {
    case NORMALIZATION_LAYERNORM: return 2;
    case NORMALIZATION_RMSNORM: return 1;
    }
    return 0;
}

// Returns the form in which FP8 linear layers keep their inputs for backward. Without FP8 nobody uses the value.
static enum kept_input fp8_input(const struct config *c) {
    switch (c->fp8.fp8_recipe) {
    case FP8_RECIPE_TENSORWISE:
    case FP8_RECIPE_DELAYED: return config_attention_in_fp8(c) == FP8_ATTENTION_NONE ? KEPT_FP8 : KEPT_FP8_ATTENTION;
    case FP8_RECIPE_BLOCKWISE: return KEPT_FP8_BLOCKS;
    }
    return KEPT_FLOATX;
}

// The number of rows of a linear layer's A of LoRA: the rank times the number of adapted parts; 0 for LINEAR_COUNT.
static int lora_a_rows(const struct lora_shape *lora, enum linear linear) {
    return linear == LINEAR_COUNT ? 0 : lora->linear[linear].count * lora->rank; // gcc 12 follows a switch's last case
}
// The number of rows of a linear layer's B of LoRA: the number of outputs of all its adapted parts.
static int lora_b_rows(const struct lora_shape *lora, enum linear linear) {
    int rows = 0;
    for (int p = 0; p < lora->linear[linear].count; p++)
        rows += lora->linear[linear].parts[p].rows;
    return rows;
}

enum { VOCABULARY_MULTIPLE = 128 }; // padded columns are invisible outside: logits masked, gradients zero, never saved

// The modules that an adapter may change, each outputs [first, first + rows) of a linear layer. `s` is the layer_shape.
// Columns: id in enum lora_module; linear layer; first; rows. A whole layer stands before parts that may be as large.
#define LORA_MODULE_ROWS(ROW)                                                                                          \
    ROW(QKV, QKV, 0, qkv_width(s))                                                                                     \
    ROW(Q, QKV, 0, s->H * s->D)                                                                                        \
    ROW(K, QKV, s->H * s->D, s->G * s->D)                                                                              \
    ROW(V, QKV, (s->H + s->G) * s->D, s->G * s->D)                                                                     \
    ROW(ATT_PROJ, ATT_PROJ, 0, s->C)                                                                                   \
    ROW(FC, FC, 0, fc_width(s))                                                                                        \
    ROW(GATE, FC, 0, s->F)                                                                                             \
    ROW(UP, FC, s->F, s->F)                                                                                            \
    ROW(MLP_PROJ, MLP_PROJ, 0, s->C)

// Returns the adapters that a layer of shape s has, for the modules in c->lora_modules, which the caller has set.
static struct lora_shape lora_shape_of(const struct config *c, const struct layer_shape *s) {
    struct lora_shape lora;
    memset(&lora, 0, sizeof lora);
    lora.rank = c->finetuning.lora_rank;
#define ADD_ROW(id, linear_id, first, rows)                                                                            \
    if (lora.rank > 0 && (c->lora_modules & (unsigned)LORA_##id)) {                                                    \
        struct lora_layer *layer = &lora.linear[LINEAR_##linear_id];                                                   \
        const struct lora_part part = {first, rows};                                                                   \
        layer->parts[layer->count++] = part;                                                                           \
    }
    LORA_MODULE_ROWS(ADD_ROW)
#undef ADD_ROW
    return lora;
}
// Whether a linear layer's outputs [first_row, first_row + num_rows) are one of LORA_MODULE_ROWS. If so, sets *module.
static bool lora_module_at(enum lora_module *module, enum linear linear, int first_row, int num_rows,
                           const struct layer_shape *s) {
#define FIND_ROW(id, linear_id, first, rows)                                                                           \
    if (linear == LINEAR_##linear_id && first_row == (first) && num_rows == (rows)) {                                  \
        *module = LORA_##id;                                                                                           \
        return true;                                                                                                   \
    }
    LORA_MODULE_ROWS(FIND_ROW)
#undef FIND_ROW
    return false;
}

static enum frozen_format frozen_format_of(const struct config *c) {
    switch (c->finetuning.frozen_weights_format) {
    case FROZEN_WEIGHTS_NONE: return FROZEN_FLOATX;
    case FROZEN_WEIGHTS_FP8: return FROZEN_FP8;
    case FROZEN_WEIGHTS_NF4: return FROZEN_NF4;
    }
    return FROZEN_FLOATX;
}
// Returns the model's shape by the resolved options. element_bytes is floatX's; materialized means unfused attention.
static struct model_shape model_shape_of(const struct config *c, int element_bytes, bool materialized) {
    struct model_shape shape;
    memset(&shape, 0, sizeof shape);
    shape.layer.C = c->model.hidden_size;
    shape.layer.H = c->model.num_attention_heads;
    shape.layer.G = c->model.num_query_groups;
    shape.layer.D = c->model.kv_channels;
    shape.layer.F = c->model.ffn_hidden_size;
    shape.layer.T = c->model.seq_length;
    shape.layer.x = element_bytes;
    shape.layer.gated = activation_is_gated(c->model.activation);
    shape.layer.activation_name = activation_name(c->model.activation);
    shape.layer.norm_statistics = norm_statistics(c->model.normalization);
    shape.layer.materialized = materialized;
    shape.layer.norm_before = norm_is_before(c->model.norm_placement);
    shape.layer.norm_after = norm_is_after(c->model.norm_placement);
    shape.layer.parallel = c->model.parallel_residual;
    shape.layer.qk_statistics = qk_norm_statistics(c);
    shape.layer.keys = mean_keys(c);
    shape.layer.kept_input = KEPT_FLOATX;
    shape.layer.fp8_input = fp8_input(c);
    config_fp8_layers(c, &shape.layer.fp8_first, &shape.layer.fp8_end);
    shape.lora = lora_shape_of(c, &shape.layer);
    shape.frozen_format = frozen_format_of(c);
    shape.qk_norm_width = c->model.qk_layernorm_width;
    shape.norm_one_plus = c->model.apply_layernorm_1p;
    shape.zero_projections = c->model.zero_init_projections;
    shape.normalization = c->model.normalization;
    shape.activation = c->model.activation;
    shape.L = c->model.num_layers;
    shape.V = c->model.vocab_size;
    shape.Vp = (c->model.vocab_size + VOCABULARY_MULTIPLE - 1) / VOCABULARY_MULTIPLE * VOCABULARY_MULTIPLE;
    shape.P = config_learns_positions(c) ? c->model.max_position_embeddings : 0;
    shape.qkv_bias = c->model.add_qkv_bias;
    shape.attention_proj_bias = c->model.add_attention_proj_bias;
    shape.mlp_bias = c->model.add_mlp_bias;
    shape.tied = !c->model.untie_embeddings_and_output_weights;
    return shape;
}

enum initialization {
    INIT_NORMAL,   // normal, --init-method-std
    INIT_RESIDUAL, // normal, the std divided by sqrt(2 L): projections onto the residual stream (GPT-2)
    INIT_UNIFORM,  // uniform, up to 1 / sqrt(columns) either way: LoRA's A (Kaiming's rule with a = sqrt(5))
    INIT_ONE,
    INIT_ZERO,
};
// Initial weights of norms, such that a norm multiplies by 1.
#define INIT_NORM (s->norm_one_plus ? INIT_ZERO : INIT_ONE)
#define INIT_PROJECTION (s->zero_projections ? INIT_ZERO : INIT_RESIDUAL)

// The kinds of units, in the order in which backward finishes them. ZeRO gathers and reduces a unit's tensors together.
enum unit_kind { UNIT_HEAD, UNIT_LAYER, UNIT_EMBEDDINGS };

// PARAMETER_ROWS has one row per kind of tensor; a unit's rows stand in the order in which its backward finishes them.
// Columns: id; name; unit (a row of UNIT_LAYER is a tensor in every layer); rows (0: the model has no such tensor);
// columns (1: a vector); rows without padding; initialization; the random stream of the initial values (0 to
// RANDOM_STREAMS - 1, each once; NO_STREAM for constants).
// LINEAR_TENSORS makes the rows of a linear layer. Its arguments: ROW; the layer's id and X in LINEAR_ROWS; name;
// whether it has a bias; initialization; the random streams of the weight and of LoRA's A.
#define LINEAR_TENSORS(ROW, id, X, name, has_bias, init, stream, lora_stream)                                          \
    ROW(X##_LORA_B, name ".lora_b", UNIT_LAYER, lora_b_rows(&s->lora, LINEAR_##id), s->lora.rank,                      \
        lora_b_rows(&s->lora, LINEAR_##id), INIT_ZERO, NO_STREAM)                                                      \
    ROW(X##_LORA_A, name ".lora_a", UNIT_LAYER, lora_a_rows(&s->lora, LINEAR_##id),                                    \
        linear_row(LINEAR_##id, &s->layer).inputs, lora_a_rows(&s->lora, LINEAR_##id), INIT_UNIFORM, lora_stream)      \
    ROW(X##_W, name ".weight", UNIT_LAYER, linear_row(LINEAR_##id, &s->layer).outputs,                                 \
        linear_row(LINEAR_##id, &s->layer).inputs, linear_row(LINEAR_##id, &s->layer).outputs, init, stream)           \
    ROW(X##_B, name ".bias", UNIT_LAYER, (has_bias) ? linear_row(LINEAR_##id, &s->layer).outputs : 0, 1,               \
        linear_row(LINEAR_##id, &s->layer).outputs, INIT_ZERO, NO_STREAM)
#define PARAMETER_ROWS(ROW)                                                                                            \
    ROW(LNF_W, "lnf.weight", UNIT_HEAD, s->layer.C, 1, s->layer.C, INIT_NORM, NO_STREAM)                               \
    ROW(LNF_B, "lnf.bias", UNIT_HEAD, norm_bias_rows(s, true), 1, s->layer.C, INIT_ZERO, NO_STREAM)                    \
    ROW(LM_HEAD, "lm_head", UNIT_HEAD, s->tied ? 0 : s->Vp, s->layer.C, s->V, INIT_NORMAL, 2)                          \
    ROW(POST2_W, "post2.weight", UNIT_LAYER, norm_weight_rows(s, s->layer.norm_after), 1, s->layer.C, INIT_NORM,       \
        NO_STREAM)                                                                                                     \
    ROW(POST2_B, "post2.bias", UNIT_LAYER, norm_bias_rows(s, s->layer.norm_after), 1, s->layer.C, INIT_ZERO,           \
        NO_STREAM)                                                                                                     \
    LINEAR_TENSORS(ROW, MLP_PROJ, FCPROJ, "fcproj", s->mlp_bias, INIT_PROJECTION, 3, 0)                                \
    LINEAR_TENSORS(ROW, FC, FC, "fc", s->mlp_bias, INIT_NORMAL, 5, 1)                                                  \
    ROW(LN2_W, "ln2.weight", UNIT_LAYER, norm_weight_rows(s, s->layer.norm_before), 1, s->layer.C, INIT_NORM,          \
        NO_STREAM)                                                                                                     \
    ROW(LN2_B, "ln2.bias", UNIT_LAYER, norm_bias_rows(s, s->layer.norm_before), 1, s->layer.C, INIT_ZERO, NO_STREAM)   \
    ROW(POST1_W, "post1.weight", UNIT_LAYER, norm_weight_rows(s, s->layer.norm_after), 1, s->layer.C, INIT_NORM,       \
        NO_STREAM)                                                                                                     \
    ROW(POST1_B, "post1.bias", UNIT_LAYER, norm_bias_rows(s, s->layer.norm_after), 1, s->layer.C, INIT_ZERO,           \
        NO_STREAM)                                                                                                     \
    LINEAR_TENSORS(ROW, ATT_PROJ, ATTPROJ, "attproj", s->attention_proj_bias, INIT_PROJECTION, 9, 4)                   \
    ROW(QNORM_W, "qnorm.weight", UNIT_LAYER, qk_norm_weight_rows(s, s->layer.H), 1,                                    \
        qk_norm_weight_rows(s, s->layer.H), INIT_NORM, NO_STREAM)                                                      \
    ROW(KNORM_W, "knorm.weight", UNIT_LAYER, qk_norm_weight_rows(s, s->layer.G), 1,                                    \
        qk_norm_weight_rows(s, s->layer.G), INIT_NORM, NO_STREAM)                                                      \
    LINEAR_TENSORS(ROW, QKV, QKV, "qkv", s->qkv_bias, INIT_NORMAL, 11, 6)                                              \
    ROW(LN1_W, "ln1.weight", UNIT_LAYER, norm_weight_rows(s, s->layer.norm_before), 1, s->layer.C, INIT_NORM,          \
        NO_STREAM)                                                                                                     \
    ROW(LN1_B, "ln1.bias", UNIT_LAYER, norm_bias_rows(s, s->layer.norm_before), 1, s->layer.C, INIT_ZERO, NO_STREAM)   \
    ROW(WPE, "wpe", UNIT_EMBEDDINGS, s->P, s->layer.C, s->P, INIT_NORMAL, 15)                                          \
    ROW(WTE, "wte", UNIT_EMBEDDINGS, s->Vp, s->layer.C, s->V, INIT_NORMAL, 16)

// The number of random streams of each layer, and of the rest of the model. Another number would change initial values.
enum { RANDOM_STREAMS = 17, NO_STREAM = -1 };

#define STREAM_BIT(stream) ((stream) < 0 ? 0u : 1u << ((stream) < 0 ? 0 : (stream)))
#define OR_ROW(id, name, unit, rows, cols, visible, init, stream) | STREAM_BIT(stream)
#define PLUS_ROW(id, name, unit, rows, cols, visible, init, stream) +STREAM_BIT(stream)
static_assert((0u PARAMETER_ROWS(OR_ROW)) == (0u PARAMETER_ROWS(PLUS_ROW)), "each random stream is used once");
static_assert((0u PARAMETER_ROWS(OR_ROW)) < 1u << RANDOM_STREAMS, "random streams are below RANDOM_STREAMS");
#undef PLUS_ROW
#undef OR_ROW

enum parameter {
#define ENUM_ROW(id, name, unit, rows, cols, visible, init, stream) PARAM_##id,
    PARAMETER_ROWS(ENUM_ROW)
#undef ENUM_ROW
        PARAM_COUNT
};

struct linear_source {
    enum activation_id id;
    bool below;  // it is the layer below's
    bool shared; // other ops of the backward read it too, so that it is kept in floatX
    enum activation_id product;
};
struct linear_row {
    const char *name;
    enum parameter weight, bias, lora_a, lora_b;
    int outputs, inputs;
    struct linear_source source;
    enum gradient_by gradient_by;
};
// Returns the row of the table LINEAR_ROWS for a linear layer, not of a weight, with sizes by the layer's shape.
static struct linear_row linear_row(enum linear id, const struct layer_shape *s) {
    switch (id) {
#define CASE_ROW(id, name, X, outputs, inputs, reads, shared, product, gradient_by)                                    \
    case LINEAR_##id: {                                                                                                \
        const struct linear_source source = {reads, (reads) == ACT_OUT, shared, product};                              \
        const struct linear_row row = {name,    PARAM_##X##_W, PARAM_##X##_B, PARAM_##X##_LORA_A, PARAM_##X##_LORA_B,  \
                                       outputs, inputs,        source,        gradient_by};                            \
        return row;                                                                                                    \
    }
        LINEAR_ROWS(CASE_ROW)
#undef CASE_ROW
    case LINEAR_COUNT: break;
    }
    const struct linear_row none = {"",
                                    PARAM_COUNT,
                                    PARAM_COUNT,
                                    PARAM_COUNT,
                                    PARAM_COUNT,
                                    0,
                                    0,
                                    {ACT_OUT, false, false, ACT_OUT},
                                    GRADIENT_BY_OTHERS};
    return none;
}

static bool parameter_is_adapter(enum parameter id) {
#define IS_ROW(linear, name, X, outputs, inputs, reads, shared, product, gradient_by)                                  \
    if (id == PARAM_##X##_LORA_A || id == PARAM_##X##_LORA_B)                                                          \
        return true;
    LINEAR_ROWS(IS_ROW)
#undef IS_ROW
    return false;
}

// Whether a parameter is the weight of a linear layer of the blocks: no head, no embedding, no adapter.
static bool parameter_is_linear_weight(enum parameter id) {
#define IS_ROW(linear, name, X, outputs, inputs, reads, shared, product, gradient_by)                                  \
    if (id == PARAM_##X##_W)                                                                                           \
        return true;
    LINEAR_ROWS(IS_ROW)
#undef IS_ROW
    return false;
}

struct tensor {
    char name[40]; // "layer.3.qkv.weight"
    enum parameter parameter;
    enum unit_kind unit;
    int layer;        // -1: of the whole model
    int rows, cols;   // cols = 1: a vector
    int visible_rows; // the rest is padding
    enum initialization init;
    int stream;            // random stream of the initial values, NO_STREAM: constants
    bool frozen;           // not trained: in the flat buffer of frozen tensors
    int64_t offset, count; // in elements of the flat buffers; count includes padded rows
    // A frozen linear weight that is not FROZEN_FLOATX is in no flat buffer, but at byte stored_at of stored weights.
    enum frozen_format format;
    int64_t stored_at;
};

// Whether a tensor has weight decay: as in GPT-2 and Llama, a matrix has. LoRA's B counts as one even at rank 1.
static bool tensor_decays(const struct tensor *t) { return t->cols > 1 || parameter_is_adapter(t->parameter); }

// The groups of tensors whose learning rates have a multiplier of their own: X(enumerator, the option's field).
#define LR_GROUPS(X)                                                                                                   \
    X(LR_EMBEDDING, embedding_lr_mult)                                                                                 \
    X(LR_HEAD, head_lr_mult)                                                                                           \
    X(LR_MATRIX, matrix_lr_mult)                                                                                       \
    X(LR_VECTOR, vector_lr_mult)
#define ENUM_ROW(enumerator, field) enumerator,
enum lr_group { LR_GROUPS(ENUM_ROW) };
#undef ENUM_ROW
// Returns a tensor's group of learning rates. A tied head's weight is in LR_EMBEDDING, LoRA's A and B in LR_MATRIX.
static enum lr_group tensor_lr_group(const struct tensor *t) {
    if (t->unit == UNIT_EMBEDDINGS)
        return LR_EMBEDDING;
    if (t->unit == UNIT_HEAD && t->cols > 1)
        return LR_HEAD;
    return tensor_decays(t) ? LR_MATRIX : LR_VECTOR;
}
static double lr_multiplier(const struct config *c, enum lr_group group) {
    switch (group) {
#define CASE_ROW(enumerator, field)                                                                                    \
    case enumerator: return c->training.field;
        LR_GROUPS(CASE_ROW)
#undef CASE_ROW
    }
    return 1;
}

// The layout of a flat buffer. Unit u, as unit_of numbers units, is elements [unit_begin[u], unit_begin[u + 1]).
struct flat_layout {
    int64_t flat;        // elements of a flat buffer, alignment gaps included
    int64_t *unit_begin; // (num_units + 1)
};

struct parameters {
    struct tensor *tensors; // the trained ones in flat order, then the frozen ones in theirs
    int num_tensors;        // trained
    int num_frozen;
    int *index; // (L + 1, PARAM_COUNT) into tensors, -1 where absent; the last row is the whole model's
    int L;
    int num_units;
    struct flat_layout trained, frozen;
    int64_t stored_bytes; // of the frozen weights that are not in floatX
    int64_t visible;      // parameters without padding, as published counts have them, trained or frozen
    int64_t visible_trained;
};

enum { TENSOR_ALIGNMENT = 128 }; // elements: 256 bytes of bf16, what cuBLASLt assumes of its operands

// Returns a tensor as PARAMETER_ROWS describes it, for parameters_add. Its rows are 0 if the model has no such tensor.
static struct tensor tensor_row(enum parameter id, const struct model_shape *s) {
    struct tensor t;
    memset(&t, 0, sizeof t);
    t.parameter = id;
    t.layer = -1;
    switch (id) {
#define CASE_ROW(id, text, unit_, rows_, cols_, visible_, init_, stream_)                                              \
    case PARAM_##id:                                                                                                   \
        snprintf(t.name, sizeof t.name, "%s", text);                                                                   \
        t.unit = unit_;                                                                                                \
        t.rows = rows_;                                                                                                \
        t.cols = cols_;                                                                                                \
        t.visible_rows = visible_;                                                                                     \
        t.init = init_;                                                                                                \
        t.stream = stream_;                                                                                            \
        break;
        PARAMETER_ROWS(CASE_ROW)
#undef CASE_ROW
    case PARAM_COUNT: break;
    }
    return t;
}

// The number of parameters, with adapters, without padding. It is a double, as options can ask for more than 2^64.
static double parameters_number(const struct model_shape *s) {
    double number = 0;
    for (int id = 0; id < PARAM_COUNT; id++) {
        const struct tensor t = tensor_row((enum parameter)id, s);
        if (t.rows > 0)
            number += (double)t.visible_rows * t.cols * (t.unit == UNIT_LAYER ? s->L : 1);
    }
    return number;
}

// Returns the unit of the final norm and of an untied head's weight. A tied weight is in the embeddings' unit.
static int unit_of_head(void) { return 0; }
// Returns the unit of layer l. Units are numbered in the order in which backward finishes them, so the head's is 0.
static int unit_of_layer(const struct parameters *p, int l) { return p->L - l; }
static int unit_of_embeddings(const struct parameters *p) { return p->L + 1; }

// Returns the number of a tensor's unit: 0 for the head, then the layers from last to first, then the embeddings.
static int unit_of(const struct parameters *p, const struct tensor *t) {
    switch (t->unit) {
    case UNIT_HEAD: return unit_of_head();
    case UNIT_LAYER: return unit_of_layer(p, t->layer);
    case UNIT_EMBEDDINGS: return unit_of_embeddings(p);
    }
    return 0;
}

// Appends a tensor to p->tensors and `layout`: &p->trained or, after all trained tensors, &p->frozen. Puts "layer.N."
// before its name unless `layer` is -1. If `format` is FP8 or NF4, a frozen linear weight takes only stored bytes.
static void parameters_add(struct parameters *p, struct flat_layout *layout, struct tensor t, int layer,
                           enum frozen_format format) {
    if (layer >= 0) {
        char name[sizeof t.name + 32];
        snprintf(name, sizeof name, "layer.%d.%s", layer, t.name);
        memcpy(t.name, name, sizeof t.name - 1);
    }
    t.layer = layer;
    t.frozen = layout == &p->frozen;
    t.count = (int64_t)t.rows * t.cols;
    t.offset = layout->flat;
    t.format = t.frozen && parameter_is_linear_weight(t.parameter) ? format : FROZEN_FLOATX;
    t.stored_at = p->stored_bytes;
    if (t.format == FROZEN_FLOATX)
        layout->flat += (t.count + TENSOR_ALIGNMENT - 1) / TENSOR_ALIGNMENT * TENSOR_ALIGNMENT;
    else
        p->stored_bytes += (int64_t)frozen_bytes(t.format, t.rows, t.cols);
    p->visible += (int64_t)t.visible_rows * t.cols;
    p->visible_trained += t.frozen ? 0 : (int64_t)t.visible_rows * t.cols;
    const int i = p->num_tensors + p->num_frozen;
    p->index[(layer < 0 ? p->L : layer) * PARAM_COUNT + t.parameter] = i;
    p->tensors[i] = t;
    if (t.frozen)
        p->num_frozen++;
    else
        p->num_tensors++;
}

// Appends the next unit's trained tensors to `layout` if it is &p->trained, or frozen ones if it is &p->frozen. Pads
// the unit to a multiple of `multiple` elements. layer is -1 except for UNIT_LAYER; frozen is as in parameters_create.
static void parameters_add_unit(struct parameters *p, struct flat_layout *layout, const struct model_shape *s,
                                enum unit_kind unit, int layer, const bool *frozen, int64_t multiple) {
    const bool *row = frozen ? frozen + (layer < 0 ? p->L : layer) * PARAM_COUNT : NULL;
    for (int id = 0; id < PARAM_COUNT; id++) {
        const struct tensor t = tensor_row((enum parameter)id, s);
        if (t.unit == unit && t.rows > 0 && (row && row[id]) == (layout == &p->frozen))
            parameters_add(p, layout, t, layer, s->frozen_format);
    }
    layout->flat = (layout->flat + multiple - 1) / multiple * multiple;
    layout->unit_begin[++p->num_units] = layout->flat;
}
// Appends all units, in backward's order, as parameters_add_unit does. Call it for &p->trained before &p->frozen.
static void parameters_add_layout(struct parameters *p, struct flat_layout *layout, const struct model_shape *s,
                                  const bool *frozen, int64_t multiple) {
    p->num_units = 0;
    parameters_add_unit(p, layout, s, UNIT_HEAD, -1, frozen, multiple);
    for (int l = s->L - 1; l >= 0; l--)
        parameters_add_unit(p, layout, s, UNIT_LAYER, l, frozen, multiple);
    parameters_add_unit(p, layout, s, UNIT_EMBEDDINGS, -1, frozen, multiple);
}

// Builds the table of a model's tensors. Each unit is padded so that it can be divided into `ranks` aligned shards.
// frozen (L + 1, PARAM_COUNT) marks the tensors that are not trained; its last row is the whole model's, NULL marks
// none. Ends the program if the model is too large to be addressed. parameters_free frees the table.
static struct parameters parameters_create(const struct model_shape *s, int ranks, const bool *frozen) {
    const int64_t multiple = (int64_t)ranks * TENSOR_ALIGNMENT;
    struct parameters p;
    memset(&p, 0, sizeof p);
    if (parameters_number(s) >= 0x1p50)
        fail("this model has %.3g parameters, more than the 2^50 that can be addressed; lower --num-layers, "
             "--hidden-size, --ffn-hidden-size or --vocab-size",
             parameters_number(s));
    p.L = s->L;
    p.trained.unit_begin = (int64_t *)calloc((size_t)s->L + 3, sizeof *p.trained.unit_begin);
    p.frozen.unit_begin = (int64_t *)calloc((size_t)s->L + 3, sizeof *p.frozen.unit_begin);
    p.tensors = (struct tensor *)calloc((size_t)(s->L + 1) * PARAM_COUNT, sizeof *p.tensors);
    p.index = (int *)calloc((size_t)(s->L + 1) * PARAM_COUNT, sizeof *p.index);
    if (!p.tensors || !p.index || !p.trained.unit_begin || !p.frozen.unit_begin)
        fail("out of memory for the table of parameters");
    for (int i = 0; i < (s->L + 1) * PARAM_COUNT; i++)
        p.index[i] = -1;
    parameters_add_layout(&p, &p.trained, s, frozen, multiple);
    parameters_add_layout(&p, &p.frozen, s, frozen, multiple);
    return p;
}
static void parameters_free(struct parameters *p) {
    free(p->tensors);
    free(p->index);
    free(p->trained.unit_begin);
    free(p->frozen.unit_begin);
    memset(p, 0, sizeof *p);
}

// Returns a layer's tensor or, for layer -1, the whole model's; NULL if the model has none, and for PARAM_COUNT.
static const struct tensor *parameters_find(const struct parameters *p, int layer, enum parameter id) {
    if (id == PARAM_COUNT)
        return NULL;
    const int at = p->index[(layer < 0 ? p->L : layer) * PARAM_COUNT + id];
    return at < 0 ? NULL : &p->tensors[at];
}

// out (n) = the initial values of a tensor's elements [first, first + n), 0 in padding, however calls split the tensor.
static void tensor_initialize(float *out, int64_t first, int64_t n, const struct tensor *t, double std, int L,
                              uint64_t seed) {
    int64_t visible = (int64_t)t->visible_rows * t->cols - first;
    visible = visible < 0 ? 0 : visible < n ? visible : n;
    memset(out, 0, (size_t)n * sizeof *out);
    const uint64_t stream = (uint64_t)(t->layer + 1) * RANDOM_STREAMS + (uint64_t)t->stream;
    switch (t->init) {
    case INIT_NORMAL: random_normal(out, visible, (float)std, seed, stream, (uint64_t)first); break;
    case INIT_RESIDUAL: random_normal(out, visible, (float)(std / sqrt(2.0 * L)), seed, stream, (uint64_t)first); break;
    case INIT_UNIFORM: {
        const float bound = 1 / sqrtf((float)t->cols);
        for (int64_t i = 0; i < visible; i++)
            out[i] = bound * (2 * random_uniform(seed, stream, (uint64_t)(first + i)) - 1);
        break;
    }
    case INIT_ONE:
        for (int64_t i = 0; i < visible; i++)
            out[i] = 1;
        break;
    case INIT_ZERO: break;
    }
}
