// The whole GPT in plain loops in double: forward, mean cross-entropy, the gradient of every parameter, AdamW.
//
// The engine is compared with it where no golden file exists: other shapes, GPT-2 with GQA, dropout. It is written to
// be read and checked, one loop nest a formula; test/unit_reference.c compares it with PyTorch and with finite
// differences. Names and layouts of the tensors are as in test/golden/README.md.
//
// N is B T. In the comments qkv rows are (H + 2 Hkv) D wide: the heads of q, then of k, then of v.
#pragma once
#include "test/testing.h" // test_doubles

#include <stdbool.h> // bool
#include <string.h>  // memset, strcmp

struct reference_config {
    int L, C, H, Hkv, D, F, V; // layers, hidden size, heads, KV heads, head dim, MLP width, vocabulary
    int positions;             // learned positions; 0: rotary embedding instead
    bool layernorm;            // LayerNorm with a bias, else RMSNorm
    bool swiglu;               // SwiGLU, else GELU in the tanh form
    bool qkv_bias, biases;     // qkv_bias: q, k and v have biases; biases: all other linear layers have
    bool tied;                 // the head's weight is wte
    double norm_epsilon, rotary_base;
};

struct reference_tensor {
    char name[40];
    int64_t rows, cols;        // of a vector: cols is 1
    double *value, *gradient;  // (rows, cols)
    double *stored;            // (rows, cols) the value as ops read it: rounded where the model rounds
    double *moment1, *moment2; // (rows, cols) AdamW's
};

// Returns the scale of one element under dropout: 0, or 1 / (1 - p). `use` and `layer` say which mask it is; uses are
// numbered as the engine numbers them.
enum reference_dropout_use {
    REFERENCE_DROPOUT_EMBEDDING,            // element of (B*T, C), layer 0
    REFERENCE_DROPOUT_ATTENTION,            // element of (B, H, T, T)
    REFERENCE_DROPOUT_ATTENTION_PROJECTION, // element of (B*T, C)
    REFERENCE_DROPOUT_MLP_PROJECTION,       // element of (B*T, C)
};
typedef double reference_dropout(const void *context, enum reference_dropout_use use, int layer, int64_t element);

// Returns what storing x makes of it. Applied wherever the engine stores a floatX: to parameters, activations,
// gradients of activations, attention's probabilities and their gradients. Gradients of parameters and statistics stay
// exact.
typedef double reference_rounding(void *context, double x);

enum { REFERENCE_MAX_LAYERS = 32 };

// What deviates from plain causal attention.
struct reference_attention_options {
    double scale;                      // of scores; 0: 1 / sqrt(D)
    double softcap;                    // c > 0: a scaled score s becomes c tanh(s / c); 0: none
    int windows[REFERENCE_MAX_LAYERS]; // keys that a query of the layer sees, its own one included; 0: all
    const int32_t *document_starts;    // (B, T) the row at which a token's document begins; NULL: 0
};
struct reference {
    struct reference_config config;
    struct reference_tensor tensors[REFERENCE_MAX_LAYERS * 12 + 5];
    int num_tensors;
    struct reference_attention_options attention; // zeros: plain causal attention
    double z_loss;                                // factor of the z-loss: reference_cross_entropy
    reference_dropout *dropout;                   // NULL: none
    const void *dropout_context;
    reference_rounding *rounding; // NULL: none
    void *rounding_context;
};

// ---- Parameters ----------------------------------------------------------------------------------------------------

static inline void reference_add(struct reference *r, int layer, const char *name, int64_t rows, int64_t cols) {
    struct reference_tensor *tensor = &r->tensors[r->num_tensors++];
    if (layer < 0)
        snprintf(tensor->name, sizeof tensor->name, "%s", name);
    else
        snprintf(tensor->name, sizeof tensor->name, "layer.%d.%s", layer, name);
    tensor->rows = rows;
    tensor->cols = cols;
    tensor->value = test_doubles(rows * cols);
    tensor->gradient = test_doubles(rows * cols);
    tensor->stored = test_doubles(rows * cols);
    tensor->moment1 = test_doubles(rows * cols);
    tensor->moment2 = test_doubles(rows * cols);
}

static inline void reference_add_layer(struct reference *r, int layer) {
    const struct reference_config *c = &r->config;
    const int64_t qkv_rows = (int64_t)(c->H + 2 * c->Hkv) * c->D, fc_rows = (int64_t)(c->swiglu ? 2 : 1) * c->F;
    reference_add(r, layer, "ln1.weight", c->C, 1);
    reference_add(r, layer, "qkv.weight", qkv_rows, c->C);
    reference_add(r, layer, "attproj.weight", c->C, (int64_t)c->H * c->D);
    reference_add(r, layer, "ln2.weight", c->C, 1);
    reference_add(r, layer, "fc.weight", fc_rows, c->C);
    reference_add(r, layer, "fcproj.weight", c->C, c->F);
    if (c->layernorm) {
        reference_add(r, layer, "ln1.bias", c->C, 1);
        reference_add(r, layer, "ln2.bias", c->C, 1);
    }
    if (c->qkv_bias)
        reference_add(r, layer, "qkv.bias", qkv_rows, 1);
    if (c->biases) {
        reference_add(r, layer, "attproj.bias", c->C, 1);
        reference_add(r, layer, "fc.bias", fc_rows, 1);
        reference_add(r, layer, "fcproj.bias", c->C, 1);
    }
}

// Makes a model whose values are all 0, for the caller to fill in. reference_destroy frees it.
static inline struct reference *reference_create(struct reference_config config) {
    struct reference *r = (struct reference *)calloc(1, sizeof *r);
    assert_non_null(r);
    assert_true(config.L <= REFERENCE_MAX_LAYERS && config.H % config.Hkv == 0);
    r->config = config;
    reference_add(r, -1, "wte", config.V, config.C);
    if (config.positions > 0)
        reference_add(r, -1, "wpe", config.positions, config.C);
    for (int layer = 0; layer < config.L; layer++)
        reference_add_layer(r, layer);
    reference_add(r, -1, "lnf.weight", config.C, 1);
    if (config.layernorm)
        reference_add(r, -1, "lnf.bias", config.C, 1);
    if (!config.tied)
        reference_add(r, -1, "lm_head", config.V, config.C);
    return r;
}
static inline void reference_destroy(struct reference *r) {
    for (int i = 0; i < r->num_tensors; i++) {
        free(r->tensors[i].value);
        free(r->tensors[i].gradient);
        free(r->tensors[i].stored);
        free(r->tensors[i].moment1);
        free(r->tensors[i].moment2);
    }
    free(r);
}

// Returns the tensor of that name; NULL where the model has none.
static inline struct reference_tensor *reference_find(struct reference *r, const char *name) {
    for (int i = 0; i < r->num_tensors; i++)
        if (strcmp(r->tensors[i].name, name) == 0)
            return &r->tensors[i];
    return NULL;
}
static inline struct reference_tensor *reference_find_in(struct reference *r, int layer, const char *name) {
    char full[40];
    snprintf(full, sizeof full, "layer.%d.%s", layer, name);
    return reference_find(r, full);
}
static inline struct reference_tensor *reference_head(struct reference *r) {
    return reference_find(r, r->config.tied ? "wte" : "lm_head");
}
static inline void reference_zero_gradients(struct reference *r) {
    for (int i = 0; i < r->num_tensors; i++)
        memset(r->tensors[i].gradient, 0, (size_t)(r->tensors[i].rows * r->tensors[i].cols) * sizeof(double));
}

// ---- Activations ---------------------------------------------------------------------------------------------------

struct reference_layer {
    double *x;             // (N, C) the layer's input
    double *norm1;         // (N, C)
    double *qkv;           // (N, (H + 2 Hkv) D), q and k rotated
    double *probabilities; // (B, H, T, T) softmax, before dropout
    double *attention;     // (N, H D)
    double *middle;        // (N, C) after the attention's residual
    double *norm2;         // (N, C)
    double *fc;            // (N, F), or (N, 2 F): gate, up
    double *activation;    // (N, F)
};
struct reference_activations {
    int B, T;
    int64_t N; // B * T
    const int32_t *tokens, *targets;
    struct reference_layer layers[REFERENCE_MAX_LAYERS + 1]; // layers[L] has only x, the final norm's input
    double *normf;                                           // (N, C)
    double *logits;                                          // (N, V)
    double loss;                                             // the mean over the N targets
};

static inline struct reference_activations *reference_activations_create(const struct reference_config *c, int B,
                                                                         int T) {
    struct reference_activations *a = (struct reference_activations *)calloc(1, sizeof *a);
    assert_non_null(a);
    const int64_t N = (int64_t)B * T;
    a->B = B;
    a->T = T;
    a->N = N;
    for (int i = 0; i < c->L; i++) {
        struct reference_layer *layer = &a->layers[i];
        layer->x = test_doubles(N * c->C);
        layer->norm1 = test_doubles(N * c->C);
        layer->qkv = test_doubles(N * (c->H + 2 * c->Hkv) * c->D);
        layer->probabilities = test_doubles(N * c->H * T);
        layer->attention = test_doubles(N * c->H * c->D);
        layer->middle = test_doubles(N * c->C);
        layer->norm2 = test_doubles(N * c->C);
        layer->fc = test_doubles(N * (c->swiglu ? 2 : 1) * c->F);
        layer->activation = test_doubles(N * c->F);
    }
    a->layers[c->L].x = test_doubles(N * c->C);
    a->normf = test_doubles(N * c->C);
    a->logits = test_doubles(N * c->V);
    return a;
}
static inline void reference_activations_destroy(struct reference_activations *a) {
    for (int i = 0; i <= REFERENCE_MAX_LAYERS; i++) {
        struct reference_layer *layer = &a->layers[i];
        free(layer->x);
        free(layer->norm1);
        free(layer->qkv);
        free(layer->probabilities);
        free(layer->attention);
        free(layer->middle);
        free(layer->norm2);
        free(layer->fc);
        free(layer->activation);
    }
    free(a->normf);
    free(a->logits);
    free(a);
}

static inline double reference_rounded(const struct reference *r, double x) {
    return r->rounding ? r->rounding(r->rounding_context, x) : x;
}
static inline void reference_store(const struct reference *r, double *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        x[i] = reference_rounded(r, x[i]);
}
static inline void reference_store_parameters(struct reference *r) {
    for (int i = 0; i < r->num_tensors; i++)
        for (int64_t j = 0; j < r->tensors[i].rows * r->tensors[i].cols; j++)
            r->tensors[i].stored[j] = reference_rounded(r, r->tensors[i].value[j]);
}

// ---- Ops. Every backward adds to the gradients that it is given. ---------------------------------------------------

// out (N, rows) = in (N, cols) weight^T + bias. bias: NULL for none.
static inline void reference_linear(double *out, const double *in, const struct reference_tensor *weight,
                                    const struct reference_tensor *bias, int64_t N) {
    const int64_t K = weight->cols;
    for (int64_t n = 0; n < N; n++)
        for (int64_t o = 0; o < weight->rows; o++) {
            double sum = bias ? bias->stored[o] : 0;
            for (int64_t k = 0; k < K; k++)
                sum += in[n * K + k] * weight->stored[o * K + k];
            out[n * weight->rows + o] = sum;
        }
}
// din (N, cols) += dout (N, rows) weight, and adds to the gradients of weight and bias (NULL: there is none).
static inline void reference_linear_backward(double *din, struct reference_tensor *weight,
                                             struct reference_tensor *bias, const double *dout, const double *in,
                                             int64_t N) {
    const int64_t K = weight->cols;
    for (int64_t n = 0; n < N; n++)
        for (int64_t o = 0; o < weight->rows; o++) {
            const double d = dout[n * weight->rows + o];
            for (int64_t k = 0; k < K; k++) {
                din[n * K + k] += d * weight->stored[o * K + k];
                weight->gradient[o * K + k] += d * in[n * K + k];
            }
            if (bias)
                bias->gradient[o] += d;
        }
}

// Computes the mean and the reciprocal deviation of a row x (C). LayerNorm is (x - mean) / sqrt(variance + epsilon)
// weight + bias; RMSNorm has a mean of 0 and no bias.
static inline void reference_norm_statistics(double *mean, double *rstd, const double *x,
                                             const struct reference_config *c) {
    double sum = 0, squares = 0;
    for (int i = 0; i < c->C; i++)
        sum += x[i];
    *mean = c->layernorm ? sum / c->C : 0;
    for (int i = 0; i < c->C; i++)
        squares += (x[i] - *mean) * (x[i] - *mean);
    *rstd = 1 / sqrt(squares / c->C + c->norm_epsilon);
}
// out (N, C) = the norm of x (N, C). bias: NULL for none.
static inline void reference_norm(double *out, const double *x, const struct reference_tensor *weight,
                                  const struct reference_tensor *bias, const struct reference_config *c, int64_t N) {
    for (int64_t n = 0; n < N; n++) {
        const double *row = x + n * c->C;
        double mean, rstd;
        reference_norm_statistics(&mean, &rstd, row, c);
        for (int i = 0; i < c->C; i++)
            out[n * c->C + i] = (row[i] - mean) * rstd * weight->stored[i] + (bias ? bias->stored[i] : 0);
    }
}
// Adds to dx (N, C) and to the gradients of weight and bias (NULL: there is none) what dout (N, C) gives at x (N, C).
static inline void reference_norm_backward(double *dx, struct reference_tensor *weight, struct reference_tensor *bias,
                                           const double *dout, const double *x, const struct reference_config *c,
                                           int64_t N) {
    for (int64_t n = 0; n < N; n++) {
        const double *row = x + n * c->C, *d = dout + n * c->C;
        double mean, rstd, mean_g = 0, mean_gx = 0; // the means of g = dout weight, and of g times the normalized x
        reference_norm_statistics(&mean, &rstd, row, c);
        for (int i = 0; i < c->C; i++) {
            const double normalized = (row[i] - mean) * rstd, g = d[i] * weight->stored[i];
            weight->gradient[i] += d[i] * normalized;
            if (bias)
                bias->gradient[i] += d[i];
            mean_g += c->layernorm ? g / c->C : 0;
            mean_gx += g * normalized / c->C;
        }
        for (int i = 0; i < c->C; i++)
            dx[n * c->C + i] += rstd * (d[i] * weight->stored[i] - mean_g - (row[i] - mean) * rstd * mean_gx);
    }
}

// Rotates the pairs (i, i + D/2) of every head of q and k in qkv (N, ...) by direction * position * base^(-2i/D), in
// place. The rotation is orthogonal, so its backward is the rotation in direction -1.
static inline void reference_rope(double *qkv, const struct reference_config *c, int64_t N, int T, int direction) {
    const int width = (c->H + 2 * c->Hkv) * c->D, half = c->D / 2;
    for (int64_t n = 0; n < N; n++)
        for (int head = 0; head < c->H + c->Hkv; head++)
            for (int i = 0; i < half; i++) {
                const double angle = direction * (double)(n % T) * pow(c->rotary_base, -2.0 * i / c->D);
                double *first = qkv + n * width + head * c->D + i, *second = first + half;
                const double a = *first, b = *second;
                *first = a * cos(angle) - b * sin(angle);
                *second = b * cos(angle) + a * sin(angle);
            }
}

static inline double reference_scale(const struct reference *r, enum reference_dropout_use use, int layer,
                                     int64_t element) {
    return r->dropout ? r->dropout(r->dropout_context, use, layer, element) : 1;
}

// One head of one sequence: the places of its query, key and value of token 0 in qkv, and the stride to the next token.
struct reference_head_view {
    int64_t q, k, v, stride, out, out_stride, probabilities;
};
static inline struct reference_head_view reference_view(const struct reference_config *c, int b, int h, int T) {
    struct reference_head_view view;
    const int group = h / (c->H / c->Hkv); // consecutive query heads share a KV head
    view.stride = (int64_t)(c->H + 2 * c->Hkv) * c->D;
    view.q = b * T * view.stride + h * c->D;
    view.k = b * T * view.stride + (c->H + group) * c->D;
    view.v = b * T * view.stride + (c->H + c->Hkv + group) * c->D;
    view.out_stride = (int64_t)c->H * c->D;
    view.out = b * T * view.out_stride + h * c->D;
    view.probabilities = ((int64_t)b * c->H + h) * T * T;
    return view;
}

// Returns the first key that query i of sequence b sees in layer l.
static inline int reference_first_key(const struct reference *r, const struct reference_activations *a, int l, int b,
                                      int i) {
    const int32_t *starts = r->attention.document_starts;
    const int document = starts ? starts[(int64_t)b * a->T + i] : 0, window = r->attention.windows[l];
    return window > 0 && i - window + 1 > document ? i - window + 1 : document;
}
// Returns the score scale q k of q (D) and k (D), capped. *slope: the score's derivative by q k; NULL: not wanted.
static inline double reference_score(const struct reference *r, const double *q, const double *k, double *slope) {
    const double scale = r->attention.scale > 0 ? r->attention.scale : 1 / sqrt(r->config.D), c = r->attention.softcap;
    double score = 0;
    for (int d = 0; d < r->config.D; d++)
        score += scale * q[d] * k[d];
    const double capped = c > 0 ? c * tanh(score / c) : score;
    if (slope)
        *slope = c > 0 ? scale * (1 - capped / c * (capped / c)) : scale;
    return capped;
}

// out_i = sum over keys j that query i sees of dropout(softmax_j(score(q_i, k_j))) v_j, for head h of sequence b in
// layer l of `a`.
static inline void reference_attention(const struct reference *r, struct reference_activations *a, int l, int b,
                                       int h) {
    const struct reference_config *c = &r->config;
    const struct reference_head_view w = reference_view(c, b, h, a->T);
    const double *q = a->layers[l].qkv + w.q, *k = a->layers[l].qkv + w.k, *v = a->layers[l].qkv + w.v;
    for (int i = 0; i < a->T; i++) {
        double *p = a->layers[l].probabilities + w.probabilities + (int64_t)i * a->T;
        double *out = a->layers[l].attention + w.out + i * w.out_stride;
        const int first = reference_first_key(r, a, l, b, i);
        double highest = -INFINITY, sum = 0;
        for (int j = first; j <= i; j++) {
            p[j] = reference_score(r, q + i * w.stride, k + j * w.stride, NULL);
            highest = fmax(highest, p[j]);
        }
        for (int j = first; j <= i; j++)
            sum += p[j] = exp(p[j] - highest);
        for (int d = 0; d < c->D; d++)
            out[d] = 0;
        for (int j = first; j <= i; j++) {
            p[j] /= sum;
            const int64_t element = w.probabilities + (int64_t)i * a->T + j;
            const double scale = reference_scale(r, REFERENCE_DROPOUT_ATTENTION, l, element);
            const double kept = reference_rounded(r, p[j] * scale);
            for (int d = 0; d < c->D; d++)
                out[d] += kept * v[j * w.stride + d];
        }
    }
}
// Adds to dqkv (N, ...) what dattention (N, H D), the gradient of attention's output, gives for head h of sequence b in
// layer l.
static inline void reference_attention_backward(double *dqkv, const double *dattention, const struct reference *r,
                                                const struct reference_activations *a, int l, int b, int h) {
    const struct reference_config *c = &r->config;
    const struct reference_head_view w = reference_view(c, b, h, a->T);
    const double *q = a->layers[l].qkv + w.q, *k = a->layers[l].qkv + w.k, *v = a->layers[l].qkv + w.v;
    double *dp = test_doubles(a->T);
    for (int i = 0; i < a->T; i++) {
        const double *p = a->layers[l].probabilities + w.probabilities + (int64_t)i * a->T;
        const double *dout = dattention + w.out + i * w.out_stride;
        const int first = reference_first_key(r, a, l, b, i);
        double mean = 0; // the sum of p dp, which the softmax's normalization takes away
        for (int j = first; j <= i; j++) {
            const int64_t element = w.probabilities + (int64_t)i * a->T + j;
            const double scale = reference_scale(r, REFERENCE_DROPOUT_ATTENTION, l, element);
            dp[j] = 0;
            for (int d = 0; d < c->D; d++) {
                dp[j] += scale * dout[d] * v[j * w.stride + d];
            }
            const double kept = reference_rounded(r, scale * p[j]);
            for (int d = 0; d < c->D; d++)
                dqkv[w.v + j * w.stride + d] += kept * dout[d];
            mean += p[j] * dp[j];
        }
        for (int j = first; j <= i; j++) {
            double slope;
            reference_score(r, q + i * w.stride, k + j * w.stride, &slope);
            const double dscore = reference_rounded(r, slope * (p[j] * (dp[j] - mean)));
            for (int d = 0; d < c->D; d++) {
                dqkv[w.q + i * w.stride + d] += dscore * k[j * w.stride + d];
                dqkv[w.k + j * w.stride + d] += dscore * q[i * w.stride + d];
            }
        }
    }
    free(dp);
}

// sqrt(2/pi), of GELU in the tanh form: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).
static const double REFERENCE_GELU_SCALE = 0.79788456080286535588;
static inline double reference_gelu(double x) {
    return 0.5 * x * (1 + tanh(REFERENCE_GELU_SCALE * (x + 0.044715 * x * x * x)));
}
static inline double reference_gelu_derivative(double x) {
    const double t = tanh(REFERENCE_GELU_SCALE * (x + 0.044715 * x * x * x));
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * REFERENCE_GELU_SCALE * (1 + 3 * 0.044715 * x * x);
}
// Returns SiLU, x sigmoid(x).
static inline double reference_silu(double x) { return x / (1 + exp(-x)); }
static inline double reference_silu_derivative(double x) {
    const double sigmoid = 1 / (1 + exp(-x));
    return sigmoid * (1 + x * (1 - sigmoid));
}

// out (N, F) = the activation of fc (N, F), or with SwiGLU of fc (N, 2 F), gate and up.
static inline void reference_activation(double *out, const double *fc, const struct reference_config *c, int64_t N) {
    for (int64_t n = 0; n < N; n++)
        for (int i = 0; i < c->F; i++) {
            const int64_t gate = n * 2 * c->F + i, up = gate + c->F;
            out[n * c->F + i] = c->swiglu ? reference_silu(fc[gate]) * fc[up] : reference_gelu(fc[n * c->F + i]);
        }
}
// Adds to dfc (as fc) what dout (N, F) gives at fc (N, F), with SwiGLU (N, 2 F).
static inline void reference_activation_backward(double *dfc, const double *dout, const double *fc,
                                                 const struct reference_config *c, int64_t N) {
    for (int64_t n = 0; n < N; n++)
        for (int i = 0; i < c->F; i++) {
            const double d = dout[n * c->F + i];
            if (c->swiglu) {
                const int64_t gate = n * 2 * c->F + i, up = gate + c->F;
                dfc[gate] += d * fc[up] * reference_silu_derivative(fc[gate]);
                dfc[up] += d * reference_silu(fc[gate]);
            } else {
                dfc[n * c->F + i] += d * reference_gelu_derivative(fc[n * c->F + i]);
            }
        }
}

// out (n) = x (n) + dropout(delta (n)).
static inline void reference_residual(double *out, const double *x, const double *delta, const struct reference *r,
                                      enum reference_dropout_use use, int layer, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        out[i] = x[i] + delta[i] * reference_scale(r, use, layer, i);
}
// ddelta (n) += what dout (n) gives through the dropout of delta.
static inline void reference_residual_backward(double *ddelta, const double *dout, const struct reference *r,
                                               enum reference_dropout_use use, int layer, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        ddelta[i] += dout[i] * reference_scale(r, use, layer, i);
}

static inline void reference_embedding(struct reference *r, struct reference_activations *a) {
    const struct reference_tensor *wte = reference_find(r, "wte"), *wpe = reference_find(r, "wpe");
    const int C = r->config.C;
    for (int64_t n = 0; n < a->N; n++)
        for (int i = 0; i < C; i++) {
            const double sum = wte->stored[a->tokens[n] * C + i] + (wpe ? wpe->stored[n % a->T * C + i] : 0);
            a->layers[0].x[n * C + i] = sum * reference_scale(r, REFERENCE_DROPOUT_EMBEDDING, 0, n * C + i);
        }
}
// Adds to the gradients of the embeddings what dx (N, C), the gradient of their sum after dropout, gives.
static inline void reference_embedding_backward(struct reference *r, const double *dx,
                                                const struct reference_activations *a) {
    const struct reference_tensor *wte = reference_find(r, "wte"), *wpe = reference_find(r, "wpe");
    const int C = r->config.C;
    for (int64_t n = 0; n < a->N; n++)
        for (int i = 0; i < C; i++) {
            const double d = dx[n * C + i] * reference_scale(r, REFERENCE_DROPOUT_EMBEDDING, 0, n * C + i);
            wte->gradient[a->tokens[n] * C + i] += d;
            if (wpe)
                wpe->gradient[n % a->T * C + i] += d;
        }
}

// Returns the mean over N of lse - logits[target] + z_loss lse^2, lse = logsumexp(logits); logits (N, V), targets (N).
// dlogits (N, V): its gradient; NULL: not wanted.
static inline double reference_cross_entropy(double *dlogits, const double *logits, const int32_t *targets, int64_t N,
                                             int V, double z_loss) {
    double loss = 0;
    for (int64_t n = 0; n < N; n++) {
        const double *row = logits + n * V;
        double highest = -INFINITY, sum = 0;
        for (int v = 0; v < V; v++)
            highest = fmax(highest, row[v]);
        for (int v = 0; v < V; v++)
            sum += exp(row[v] - highest);
        const double lse = log(sum) + highest, factor = 1 + 2 * z_loss * lse;
        loss += (lse - row[targets[n]] + z_loss * lse * lse) / (double)N;
        for (int v = 0; dlogits && v < V; v++)
            dlogits[n * V + v] = (factor * exp(row[v] - highest) / sum - (v == targets[n])) / (double)N;
    }
    return loss;
}

// ---- The model -----------------------------------------------------------------------------------------------------

// A tensor of layer l, for functions that have r and l.
#define LAYER_TENSOR(name) reference_find_in(r, l, name)

static inline void reference_block(struct reference *r, struct reference_activations *a, int l) {
    const struct reference_config *c = &r->config;
    struct reference_layer *layer = &a->layers[l];
    const int64_t N = a->N, qkv_count = N * (c->H + 2 * c->Hkv) * c->D;
    double *delta = test_doubles(N * c->C), *out = a->layers[l + 1].x;

    reference_norm(layer->norm1, layer->x, LAYER_TENSOR("ln1.weight"), LAYER_TENSOR("ln1.bias"), c, N);
    reference_store(r, layer->norm1, N * c->C);
    reference_linear(layer->qkv, layer->norm1, LAYER_TENSOR("qkv.weight"), LAYER_TENSOR("qkv.bias"), N);
    reference_store(r, layer->qkv, qkv_count);
    if (c->positions == 0) {
        reference_rope(layer->qkv, c, N, a->T, 1);
        reference_store(r, layer->qkv, qkv_count);
    }
    for (int b = 0; b < a->B; b++)
        for (int h = 0; h < c->H; h++)
            reference_attention(r, a, l, b, h);
    reference_store(r, layer->attention, N * c->H * c->D);
    reference_linear(delta, layer->attention, LAYER_TENSOR("attproj.weight"), LAYER_TENSOR("attproj.bias"), N);
    reference_store(r, delta, N * c->C);
    reference_residual(layer->middle, layer->x, delta, r, REFERENCE_DROPOUT_ATTENTION_PROJECTION, l, N * c->C);
    reference_store(r, layer->middle, N * c->C);

    reference_norm(layer->norm2, layer->middle, LAYER_TENSOR("ln2.weight"), LAYER_TENSOR("ln2.bias"), c, N);
    reference_store(r, layer->norm2, N * c->C);
    reference_linear(layer->fc, layer->norm2, LAYER_TENSOR("fc.weight"), LAYER_TENSOR("fc.bias"), N);
    reference_store(r, layer->fc, N * (c->swiglu ? 2 : 1) * c->F);
    reference_activation(layer->activation, layer->fc, c, N);
    reference_store(r, layer->activation, N * c->F);
    reference_linear(delta, layer->activation, LAYER_TENSOR("fcproj.weight"), LAYER_TENSOR("fcproj.bias"), N);
    reference_store(r, delta, N * c->C);
    reference_residual(out, layer->middle, delta, r, REFERENCE_DROPOUT_MLP_PROJECTION, l, N * c->C);
    reference_store(r, out, N * c->C);
    free(delta);
}

// Runs backward of a block's MLP half. dx (N, C): on entry the gradient of the block's output, on return the gradient
// of the residual stream between the two halves.
static inline void reference_mlp_backward(double *dx, struct reference *r, const struct reference_activations *a,
                                          int l) {
    const struct reference_config *c = &r->config;
    const struct reference_layer *layer = &a->layers[l];
    const int64_t N = a->N, fc_count = N * (c->swiglu ? 2 : 1) * c->F;
    double *ddelta = test_doubles(N * c->C), *dactivation = test_doubles(N * c->F), *dfc = test_doubles(fc_count);
    double *dnorm = test_doubles(N * c->C);
    reference_residual_backward(ddelta, dx, r, REFERENCE_DROPOUT_MLP_PROJECTION, l, N * c->C);
    reference_linear_backward(dactivation, LAYER_TENSOR("fcproj.weight"), LAYER_TENSOR("fcproj.bias"), ddelta,
                              layer->activation, N);
    reference_store(r, dactivation, N * c->F);
    reference_activation_backward(dfc, dactivation, layer->fc, c, N);
    reference_store(r, dfc, fc_count);
    reference_linear_backward(dnorm, LAYER_TENSOR("fc.weight"), LAYER_TENSOR("fc.bias"), dfc, layer->norm2, N);
    reference_store(r, dnorm, N * c->C);
    reference_norm_backward(dx, LAYER_TENSOR("ln2.weight"), LAYER_TENSOR("ln2.bias"), dnorm, layer->middle, c, N);
    reference_store(r, dx, N * c->C);
    free(ddelta);
    free(dactivation);
    free(dfc);
    free(dnorm);
}
// Runs backward of a block's attention half. dx (N, C): on entry the gradient of the residual stream between the two
// halves, on return the gradient of the block's input.
static inline void reference_attention_half_backward(double *dx, struct reference *r,
                                                     const struct reference_activations *a, int l) {
    const struct reference_config *c = &r->config;
    const struct reference_layer *layer = &a->layers[l];
    const int64_t N = a->N, qkv_count = N * (c->H + 2 * c->Hkv) * c->D, attention_count = N * c->H * c->D;
    double *ddelta = test_doubles(N * c->C), *dattention = test_doubles(attention_count),
           *dqkv = test_doubles(qkv_count);
    double *dnorm = test_doubles(N * c->C);
    reference_residual_backward(ddelta, dx, r, REFERENCE_DROPOUT_ATTENTION_PROJECTION, l, N * c->C);
    reference_linear_backward(dattention, LAYER_TENSOR("attproj.weight"), LAYER_TENSOR("attproj.bias"), ddelta,
                              layer->attention, N);
    reference_store(r, dattention, attention_count);
    for (int b = 0; b < a->B; b++)
        for (int h = 0; h < c->H; h++)
            reference_attention_backward(dqkv, dattention, r, a, l, b, h);
    reference_store(r, dqkv, qkv_count);
    if (c->positions == 0) {
        reference_rope(dqkv, c, N, a->T, -1);
        reference_store(r, dqkv, qkv_count);
    }
    reference_linear_backward(dnorm, LAYER_TENSOR("qkv.weight"), LAYER_TENSOR("qkv.bias"), dqkv, layer->norm1, N);
    reference_store(r, dnorm, N * c->C);
    reference_norm_backward(dx, LAYER_TENSOR("ln1.weight"), LAYER_TENSOR("ln1.bias"), dnorm, layer->x, c, N);
    reference_store(r, dx, N * c->C);
    free(ddelta);
    free(dattention);
    free(dqkv);
    free(dnorm);
}
#undef LAYER_TENSOR

// Runs forward. `tokens` and `targets` must live as long as the result, which reference_activations_destroy frees.
static inline struct reference_activations *reference_forward(struct reference *r, const int32_t *tokens /*(B, T)*/,
                                                              const int32_t *targets /*(B, T)*/, int B, int T) {
    const struct reference_config *c = &r->config;
    struct reference_activations *a = reference_activations_create(c, B, T);
    a->tokens = tokens;
    a->targets = targets;
    reference_store_parameters(r);
    reference_embedding(r, a);
    reference_store(r, a->layers[0].x, a->N * c->C);
    for (int l = 0; l < c->L; l++)
        reference_block(r, a, l);
    reference_norm(a->normf, a->layers[c->L].x, reference_find(r, "lnf.weight"), reference_find(r, "lnf.bias"), c,
                   a->N);
    reference_store(r, a->normf, a->N * c->C);
    reference_linear(a->logits, a->normf, reference_head(r), NULL, a->N);
    reference_store(r, a->logits, a->N * c->V);
    a->loss = reference_cross_entropy(NULL, a->logits, targets, a->N, c->V, r->z_loss);
    return a;
}

// Adds the gradient of the mean loss to every tensor's gradient. The parameters must be as they were in the forward
// that made `a`.
static inline void reference_backward(struct reference *r, const struct reference_activations *a) {
    const struct reference_config *c = &r->config;
    double *dlogits = test_doubles(a->N * c->V), *dnormf = test_doubles(a->N * c->C), *dx = test_doubles(a->N * c->C);
    reference_cross_entropy(dlogits, a->logits, a->targets, a->N, c->V, r->z_loss);
    reference_store(r, dlogits, a->N * c->V);
    reference_linear_backward(dnormf, reference_head(r), NULL, dlogits, a->normf, a->N);
    reference_store(r, dnormf, a->N * c->C);
    reference_norm_backward(dx, reference_find(r, "lnf.weight"), reference_find(r, "lnf.bias"), dnormf,
                            a->layers[c->L].x, c, a->N);
    reference_store(r, dx, a->N * c->C);
    for (int l = c->L - 1; l >= 0; l--) {
        reference_mlp_backward(dx, r, a, l);
        reference_attention_half_backward(dx, r, a, l);
    }
    reference_embedding_backward(r, dx, a);
    free(dlogits);
    free(dnormf);
    free(dx);
}

// ---- The step ------------------------------------------------------------------------------------------------------

struct reference_adamw {
    double lr, beta1, beta2, eps, weight_decay, clip_grad;
};
// Updates the values: clips as torch.nn.utils.clip_grad_norm_, then steps as torch.optim.AdamW, with decay of matrices
// only. Returns the norm before clipping.
static inline double reference_adamw_step(struct reference *r, struct reference_adamw o, int step /*from 1*/) {
    double squares = 0;
    for (int i = 0; i < r->num_tensors; i++)
        for (int64_t j = 0; j < r->tensors[i].rows * r->tensors[i].cols; j++)
            squares += r->tensors[i].gradient[j] * r->tensors[i].gradient[j];
    const double norm = sqrt(squares), scale = fmin(1, o.clip_grad / (norm + 1e-6));
    for (int i = 0; i < r->num_tensors; i++) {
        const struct reference_tensor *t = &r->tensors[i];
        for (int64_t j = 0; j < t->rows * t->cols; j++) {
            const double g = t->gradient[j] * scale;
            t->moment1[j] = o.beta1 * t->moment1[j] + (1 - o.beta1) * g;
            t->moment2[j] = o.beta2 * t->moment2[j] + (1 - o.beta2) * g * g;
            const double m = t->moment1[j] / (1 - pow(o.beta1, step)), v = t->moment2[j] / (1 - pow(o.beta2, step));
            t->value[j] -= o.lr * (t->cols > 1 ? o.weight_decay : 0) * t->value[j];
            t->value[j] -= o.lr * m / (sqrt(v) + o.eps);
        }
    }
    return norm;
}
