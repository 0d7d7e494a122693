// Which graphs the engine of test/emu/cudnn.cpp takes: scaled dot product attention as cuDNN's engines take it, forward
// and backward, operation by operation. Attention in FP8 is in test/emu/cudnn_sdpa_fp8.h. All of a graph must be of the pattern. What the graph computes then follows
// from its operations only (test/emu/cudnn_run.h). In the formulas (a, b) is a product of matrices, a * b one of
// elements, and x' is x transposed.
#pragma once
#include "test/emu/cudnn_operations.h"

struct emu_cudnn_match {
    const emu_cudnn_graph *graph;
    std::set<int64_t> used; // outputs of the operations that were found in the pattern
    // Unique ids of attention's tensors; -1: none. hidden: the score of a masked key.
    int64_t q, k, v, o, stats, scale, hidden, d_o, row_sum, dq, dk, dv, dq_sum;
    // FP8 attention's product that makes dQ, which is summed in memory that is not the graph's; -1: other attention
    int64_t dq_product;
    bool backward, causal, in_turn; // in_turn: dQ is added to one tile after another
    std::vector<int64_t> rounded;   // operands of products that must be of 16 bits, such as p
};

static const emu_cudnn_operation *emu_cudnn_writer(const emu_cudnn_match *m, int64_t uid) {
    const auto found = m->graph->written_by.find(uid);
    return found == m->graph->written_by.end() ? NULL : &m->graph->operations[found->second];
}
// Returns the operation that makes a tensor, and counts it as found; NULL if it is of another kind.
static const emu_cudnn_operation *emu_cudnn_pointwise_of(emu_cudnn_match *m, int64_t uid, cudnnPointwiseMode_t mode) {
    const emu_cudnn_operation *o = emu_cudnn_writer(m, uid);
    if (!o || o->kind != EMU_POINTWISE || o->mode != mode)
        return NULL;
    m->used.insert(uid);
    return o;
}
static const emu_cudnn_operation *emu_cudnn_reduction_of(emu_cudnn_match *m, int64_t uid, cudnnReduceTensorOp_t sum) {
    const emu_cudnn_operation *o = emu_cudnn_writer(m, uid);
    if (!o || o->kind != EMU_REDUCTION || o->sum != sum)
        return NULL;
    m->used.insert(uid);
    return o;
}
static const emu_cudnn_operation *emu_cudnn_kind_of(emu_cudnn_match *m, int64_t uid, enum emu_cudnn_kind kind) {
    const emu_cudnn_operation *o = emu_cudnn_writer(m, uid);
    if (!o || o->kind != kind)
        return NULL;
    m->used.insert(uid);
    return o;
}
static bool emu_cudnn_is_input(const emu_cudnn_match *m, int64_t uid) {
    return !emu_cudnn_writer(m, uid) && !m->graph->tensors.at(uid).is_virtual;
}

// Finds the causal mask select(row >= column, x, hidden) behind *uid, and puts x into *uid. Returns true where there is
// no mask; false: there is a wrong one.
static bool emu_cudnn_match_mask(emu_cudnn_match *m, int64_t *uid) {
    const emu_cudnn_operation *select = emu_cudnn_pointwise_of(m, *uid, CUDNN_POINTWISE_BINARY_SELECT);
    if (!select)
        return true;
    const emu_cudnn_operation *seen = emu_cudnn_pointwise_of(m, select->t, CUDNN_POINTWISE_CMP_GE);
    const emu_cudnn_operation *row = seen ? emu_cudnn_pointwise_of(m, seen->x, CUDNN_POINTWISE_GEN_INDEX) : NULL;
    const emu_cudnn_operation *column = seen ? emu_cudnn_pointwise_of(m, seen->b, CUDNN_POINTWISE_GEN_INDEX) : NULL;
    if (!row || !column || row->axis != 2 || column->axis != 3 || row->x != select->x || column->x != select->x ||
        !emu_cudnn_is_input(m, select->b))
        return false;
    m->causal = true;
    m->hidden = select->b;
    *uid = select->x;
    return true;
}
// Finds the scores (q, k) * scale behind uid; without a factor, scale is -1.
static bool emu_cudnn_match_scores(emu_cudnn_match *m, int64_t uid) {
    const emu_cudnn_operation *scaled = emu_cudnn_pointwise_of(m, uid, CUDNN_POINTWISE_MUL);
    const emu_cudnn_operation *product = emu_cudnn_kind_of(m, scaled ? scaled->x : uid, EMU_MATMUL);
    if (!product || !emu_cudnn_is_input(m, product->x) || !emu_cudnn_is_input(m, product->b) ||
        (scaled && !emu_cudnn_is_input(m, scaled->b)))
        return false;
    m->scale = scaled ? scaled->b : -1;
    m->q = product->x;
    m->k = product->b;
    return true;
}
// Finds o = (e / sum, v) and stats = max + log sum; e = exp(s - max), s: the scores, masked.
static bool emu_cudnn_match_forward(emu_cudnn_match *m, int64_t o) {
    const emu_cudnn_operation *out = emu_cudnn_kind_of(m, o, EMU_MATMUL);
    const emu_cudnn_operation *p = out ? emu_cudnn_pointwise_of(m, out->x, CUDNN_POINTWISE_DIV) : NULL;
    const emu_cudnn_operation *e = p ? emu_cudnn_pointwise_of(m, p->x, CUDNN_POINTWISE_EXP) : NULL;
    const emu_cudnn_operation *sum = p ? emu_cudnn_reduction_of(m, p->b, CUDNN_REDUCE_TENSOR_ADD) : NULL;
    const emu_cudnn_operation *less = e ? emu_cudnn_pointwise_of(m, e->x, CUDNN_POINTWISE_SUB) : NULL;
    const emu_cudnn_operation *max = less ? emu_cudnn_reduction_of(m, less->b, CUDNN_REDUCE_TENSOR_MAX) : NULL;
    if (!max || !sum || sum->x != p->x || max->x != less->x || !emu_cudnn_is_input(m, out->b))
        return false;
    int64_t scores = max->x;
    if (!emu_cudnn_match_mask(m, &scores) || !emu_cudnn_match_scores(m, scores))
        return false;
    m->o = o;
    m->v = out->b;
    m->rounded = {p->y};
    for (const auto &other : m->graph->written_by) {
        const emu_cudnn_operation *add = &m->graph->operations[other.second];
        if (m->graph->tensors.at(other.first).is_virtual || other.first == o)
            continue;
        add = emu_cudnn_pointwise_of(m, add->y, CUDNN_POINTWISE_ADD);
        const emu_cudnn_operation *log = add ? emu_cudnn_pointwise_of(m, add->b, CUDNN_POINTWISE_LOG) : NULL;
        if (!log || add->x != less->b || log->x != p->b || m->stats >= 0)
            return false;
        m->stats = add->y;
    }
    return m->stats >= 0; // 9.19 takes no graph without
}

// Returns the product that makes y, before the sum over the heads that share a KV head, if there is one.
static const emu_cudnn_operation *emu_cudnn_match_heads(emu_cudnn_match *m, int64_t uid) {
    const emu_cudnn_operation *sum = emu_cudnn_reduction_of(m, uid, CUDNN_REDUCE_TENSOR_ADD);
    return emu_cudnn_kind_of(m, sum ? sum->x : uid, EMU_MATMUL);
}
// Finds dv = (p', do), p = exp(s - stats), s: the scores; the mask comes after the subtraction. *p: its unique id.
static bool emu_cudnn_match_dv(emu_cudnn_match *m, int64_t dv, int64_t *p) {
    const emu_cudnn_operation *product = emu_cudnn_match_heads(m, dv);
    const emu_cudnn_operation *turned = product ? emu_cudnn_kind_of(m, product->x, EMU_RESHAPE) : NULL;
    const emu_cudnn_operation *e = turned ? emu_cudnn_pointwise_of(m, turned->x, CUDNN_POINTWISE_EXP) : NULL;
    if (!e || !emu_cudnn_is_input(m, product->b))
        return false;
    int64_t shifted = e->x;
    if (!emu_cudnn_match_mask(m, &shifted))
        return false;
    const emu_cudnn_operation *less = emu_cudnn_pointwise_of(m, shifted, CUDNN_POINTWISE_SUB);
    if (!less || !emu_cudnn_is_input(m, less->b) || !emu_cudnn_match_scores(m, less->x))
        return false;
    m->dv = dv;
    m->d_o = product->b;
    m->stats = less->b;
    m->rounded.push_back(turned->y);
    *p = e->y;
    return true;
}
// Finds ds = ((do, v) - row_sum) * p * scale, row_sum = (sum of do * o) * 1.
static bool emu_cudnn_match_ds(emu_cudnn_match *m, int64_t ds, int64_t p) {
    const emu_cudnn_operation *scaled = emu_cudnn_pointwise_of(m, ds, CUDNN_POINTWISE_MUL);
    if (scaled && m->scale >= 0 && scaled->b != m->scale)
        return false;
    const emu_cudnn_operation *times = m->scale < 0 ? scaled : NULL;
    if (scaled && m->scale >= 0)
        times = emu_cudnn_pointwise_of(m, scaled->x, CUDNN_POINTWISE_MUL);
    const emu_cudnn_operation *less = times ? emu_cudnn_pointwise_of(m, times->x, CUDNN_POINTWISE_SUB) : NULL;
    const emu_cudnn_operation *dp = less ? emu_cudnn_kind_of(m, less->x, EMU_MATMUL) : NULL;
    if (!dp || times->b != p || dp->x != m->d_o || !emu_cudnn_is_input(m, dp->b))
        return false;
    m->v = dp->b;
    m->row_sum = less->b;
    const emu_cudnn_operation *one = emu_cudnn_pointwise_of(m, less->b, CUDNN_POINTWISE_MUL);
    const emu_cudnn_operation *sum = one ? emu_cudnn_reduction_of(m, one->x, CUDNN_REDUCE_TENSOR_ADD) : NULL;
    const emu_cudnn_operation *product = sum ? emu_cudnn_pointwise_of(m, sum->x, CUDNN_POINTWISE_MUL) : NULL;
    if (!product || product->x != m->d_o || !emu_cudnn_is_input(m, one->b) || !emu_cudnn_is_input(m, product->b))
        return false;
    m->o = product->b;
    return true;
}
// Finds dk = (ds', q) and dq = (ds, k'). dq may come of a sum in fp32 in memory, which is then copied.
static bool emu_cudnn_match_backward(emu_cudnn_match *m, int64_t dv, int64_t dk, int64_t dq) {
    int64_t p = -1;
    if (!emu_cudnn_match_dv(m, dv, &p))
        return false;
    const emu_cudnn_operation *copy = emu_cudnn_pointwise_of(m, dq, CUDNN_POINTWISE_IDENTITY);
    const emu_cudnn_operation *q_product = emu_cudnn_kind_of(m, copy ? copy->x : dq, EMU_MATMUL);
    const emu_cudnn_operation *k_turned = q_product ? emu_cudnn_kind_of(m, q_product->b, EMU_RESHAPE) : NULL;
    const emu_cudnn_operation *k_product = emu_cudnn_match_heads(m, dk);
    const emu_cudnn_operation *ds_turned = k_product ? emu_cudnn_kind_of(m, k_product->x, EMU_RESHAPE) : NULL;
    if (!k_turned || !ds_turned || k_turned->x != m->k || k_product->b != m->q || ds_turned->x != q_product->x)
        return false;
    m->dq = dq;
    m->dk = dk;
    m->dq_sum = copy ? copy->x : -1;
    m->rounded.push_back(ds_turned->y);
    return emu_cudnn_match_ds(m, q_product->x, p);
}

static emu_cudnn_match emu_cudnn_match_none(const emu_cudnn_graph *graph) {
    return {graph, {}, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, false, false, false, {}};
}
// Returns the tensors that the graph writes and does not read: forward o and stats, backward dq, dk and dv.
static std::vector<int64_t> emu_cudnn_results(const emu_cudnn_graph *graph) {
    std::set<int64_t> read;
    std::vector<int64_t> results;
    for (const emu_cudnn_operation &o : graph->operations)
        for (const int64_t uid : emu_cudnn_reads(o))
            read.insert(uid);
    for (const auto &written : graph->written_by)
        if (!read.count(written.first))
            results.push_back(written.first);
    return results;
}
static bool emu_cudnn_find_match(const emu_cudnn_graph *graph, emu_cudnn_match *match) {
    const std::vector<int64_t> results = emu_cudnn_results(graph);
    const size_t all = graph->operations.size();
    for (const int64_t o : results) {
        *match = emu_cudnn_match_none(graph);
        if (results.size() <= 2 && emu_cudnn_match_forward(match, o) && match->used.size() == all)
            return true;
    }
    for (const int64_t dv : results)
        for (const int64_t dk : results)
            for (const int64_t dq : results) {
                *match = emu_cudnn_match_none(graph);
                match->backward = true;
                if (results.size() == 3 && dv != dk && dk != dq && dv != dq &&
                    emu_cudnn_match_backward(match, dv, dk, dq) && match->used.size() == all)
                    return true;
            }
    return false;
}

// ---- shapes ----

static int emu_cudnn_capability(void) {
    const char *text = getenv("EMU_CAPABILITY");
    int major = 8, minor = 0;
    if (text && sscanf(text, "%d.%d", &major, &minor) != 2)
        emu_cudnn_report("EMU_CAPABILITY is not of the form 9.0: %s", text);
    return major * 10 + minor;
}
// Checks a matrix in memory: four dimensions, rows whose elements lie side by side, addresses and strides that are
// multiples of 16 bytes.
static cudnnStatus_t emu_cudnn_hold_matrix(const emu_cudnn_match *m, int64_t uid, cudnnDataType_t type,
                                           const std::vector<int64_t> &dims, int width_axis) {
    const emu_cudnn_tensor &t = m->graph->tensors.at(uid);
    EMU_CUDNN_HOLD(!t.by_value && !t.is_virtual && t.type == type, CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE,
                   "tensor %lld is of type %d, not %d in memory", (long long)uid, t.type, type);
    EMU_CUDNN_HOLD(t.dims == dims, CUDNN_STATUS_NOT_SUPPORTED_SHAPE, "tensor %lld has another shape than expected",
                   (long long)uid);
    EMU_CUDNN_HOLD(t.strides[(size_t)width_axis] == 1 && t.alignment >= 16, CUDNN_STATUS_NOT_SUPPORTED_LAYOUT,
                   "tensor %lld: its rows' elements must lie side by side, aligned to 16 bytes", (long long)uid);
    for (int i = 0; i < 4; i++)
        EMU_CUDNN_HOLD(i == width_axis || t.dims[(size_t)i] == 1 || t.strides[(size_t)i] % 8 == 0,
                       CUDNN_STATUS_NOT_SUPPORTED_LAYOUT, "tensor %lld: stride %lld is no multiple of 16 bytes",
                       (long long)uid, (long long)t.strides[(size_t)i]);
    return CUDNN_STATUS_SUCCESS;
}
static cudnnStatus_t emu_cudnn_hold_rows(const emu_cudnn_match *m, int64_t uid, const std::vector<int64_t> &dims) {
    const emu_cudnn_tensor &t = m->graph->tensors.at(uid);
    EMU_CUDNN_HOLD(t.dims == dims && !t.by_value, CUDNN_STATUS_NOT_SUPPORTED_SHAPE,
                   "tensor %lld doesn't have one element a query and head", (long long)uid);
    EMU_CUDNN_HOLD(t.type == CUDNN_DATA_FLOAT, CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE,
                   "tensor %lld is of type %d, not fp32", (long long)uid, t.type);
    EMU_CUDNN_HOLD(!t.is_virtual, CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN, "tensor %lld is virtual", (long long)uid);
    return CUDNN_STATUS_SUCCESS;
}
#define EMU_CUDNN_PASS(call)                                                                                           \
    do {                                                                                                               \
        const cudnnStatus_t passed = call;                                                                             \
        if (passed != CUDNN_STATUS_SUCCESS)                                                                            \
            return passed;                                                                                             \
    } while (0)
static cudnnStatus_t emu_cudnn_hold_tensors(const emu_cudnn_match *m) {
    const emu_cudnn_tensor &q = m->graph->tensors.at(m->q), &k = m->graph->tensors.at(m->k);
    const int64_t B = q.dims[0], H = q.dims[1], T = q.dims[2], D = q.dims[3], G = k.dims[1], S = k.dims[3];
    const cudnnDataType_t type = q.type;
    EMU_CUDNN_HOLD(emu_cudnn_is_16bit(type), CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE, "q is of type %d", type);
    EMU_CUDNN_PASS(emu_cudnn_hold_matrix(m, m->q, type, {B, H, T, D}, 3));
    EMU_CUDNN_PASS(emu_cudnn_hold_matrix(m, m->k, type, {B, G, D, S}, 2));
    EMU_CUDNN_PASS(emu_cudnn_hold_matrix(m, m->o, type, {B, H, T, D}, 3));
    for (const int64_t uid : m->rounded)
        EMU_CUDNN_HOLD(m->graph->tensors.at(uid).type == type, CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE,
                       "tensor %lld, an operand of a product, is of type %d, not %d", (long long)uid,
                       m->graph->tensors.at(uid).type, type);
    EMU_CUDNN_PASS(emu_cudnn_hold_rows(m, m->stats, {B, H, T, 1}));
    if (!m->backward)
        return emu_cudnn_hold_matrix(m, m->v, type, {B, G, S, D}, 3);
    EMU_CUDNN_PASS(emu_cudnn_hold_matrix(m, m->v, type, {B, G, D, S}, 2));
    EMU_CUDNN_PASS(emu_cudnn_hold_matrix(m, m->d_o, type, {B, H, T, D}, 3));
    EMU_CUDNN_PASS(emu_cudnn_hold_matrix(m, m->dq, type, {B, H, T, D}, 3));
    EMU_CUDNN_PASS(emu_cudnn_hold_matrix(m, m->dk, type, {B, G, S, D}, 3));
    EMU_CUDNN_PASS(emu_cudnn_hold_matrix(m, m->dv, type, {B, G, S, D}, 3));
    if (m->dq_sum >= 0)
        EMU_CUDNN_PASS(emu_cudnn_hold_matrix(m, m->dq_sum, CUDNN_DATA_FLOAT, {B, H, T, D}, 3));
    return emu_cudnn_hold_rows(m, m->row_sum, {B, H, T, 1});
}
// Checks that the engine takes a graph without FP8; *match: attention's tensors in it.
static cudnnStatus_t emu_cudnn_supports_16bit(const emu_cudnn_graph *graph, emu_cudnn_match *match) {
    const int capability = emu_cudnn_capability();
    EMU_CUDNN_HOLD(emu_cudnn_find_match(graph, match), CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN,
                   "a graph of %zu operations that is not attention", graph->operations.size());
    const emu_cudnn_tensor &q = graph->tensors.at(match->q), &k = graph->tensors.at(match->k);
    EMU_CUDNN_HOLD(q.dims.size() == 4, CUDNN_STATUS_NOT_SUPPORTED_SHAPE, "q has %zu dimensions", q.dims.size());
    EMU_CUDNN_PASS(emu_cudnn_hold_tensors(match));
    EMU_CUDNN_HOLD(capability >= 80, CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH, "compute capability %d", capability);
    const bool wide = capability / 10 == 9 || (capability / 10 == 10 && emu_cudnn_version() >= 92600);
    const int64_t width = q.dims[3], most = wide ? 256 : 128;
    EMU_CUDNN_HOLD(width % 8 == 0 && width <= most, CUDNN_STATUS_NOT_SUPPORTED_SHAPE,
                   "a head's width must be a multiple of 8, at most %lld, not %lld", (long long)most, (long long)width);
    EMU_CUDNN_HOLD(q.dims[1] % k.dims[1] == 0, CUDNN_STATUS_NOT_SUPPORTED_SHAPE, "%lld heads of %lld",
                   (long long)q.dims[1], (long long)k.dims[1]);
    const size_t version = emu_cudnn_version();
    EMU_CUDNN_HOLD(!match->backward || (version != 91000 && version != 91001), CUDNN_STATUS_NOT_SUPPORTED,
                   "attention's backward pass is broken in 9.10.0 and 9.10.1");
    EMU_CUDNN_HOLD(!match->backward || q.dims[2] > 1 || k.dims[3] > 1, CUDNN_STATUS_NOT_SUPPORTED_SHAPE,
                   "one query of one key");
    return CUDNN_STATUS_SUCCESS;
}
// Returns about as many bytes as the real engines ask for, without FP8: dk and dv of each head before heads are added; and, unless
// dq is summed in memory, that sum in fp32 or, on compute capability 9.0, all of dp. On 9.0 this is never 0, elsewhere
// often.
static int64_t emu_cudnn_workspace_16bit_bytes(const emu_cudnn_match *m) {
    const emu_cudnn_tensor &q = m->graph->tensors.at(m->q), &k = m->graph->tensors.at(m->k);
    const int64_t least = emu_cudnn_capability() / 10 == 9 ? 256 : 0;
    if (!m->backward)
        return least;
    const int64_t dp = q.dims[0] * q.dims[1] * q.dims[2] * k.dims[3] * 2;
    const int64_t dq = m->dq_sum >= 0 ? 0 : least ? dp : emu_cudnn_count(q) * 4;
    const int64_t heads = q.dims[1] == k.dims[1] ? 0 : 2 * q.dims[0] * q.dims[1] * q.dims[3] * k.dims[3] * 2;
    return least + dq + heads;
}
