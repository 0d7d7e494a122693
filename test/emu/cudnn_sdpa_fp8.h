// Which graphs of attention in FP8 the engines of test/emu/cudnn.cpp take: cudnn-frontend's, operation by operation, as
// test/emu/cudnn_sdpa.h says. What cuDNN 9.28 refuses when it is asked for an engine without a GPU is refused here;
// stricter is that every scale, descale and amax is a tensor of its own.
#pragma once
#include "test/emu/cudnn_sdpa.h"
#include <string> // std::string

// Unique ids of FP8 attention's tensors, beside those of emu_cudnn_match, and of the virtual codes of p and ds; -1:
// none. cells: tensors of one number, those that are read (6 forward, 12 backward) and the amaxes.
struct emu_cudnn_fp8 {
    emu_cudnn_match *m;
    int64_t p, ds;
    std::set<int64_t> cells;
    std::map<std::string, int64_t> named; // cells by their role
    std::string breach;                   // why this is no attention in FP8; empty: it is
};

// Notes the breach unless there is one. Returns false.
static bool emu_cudnn_fp8_breach(emu_cudnn_fp8 *f, const std::string &breach) {
    if (f->breach.empty())
        f->breach = breach;
    return false;
}
// Gives a cell its role. False: a breach, as where the cell has another role, or the role another cell.
static bool emu_cudnn_fp8_cell(emu_cudnn_fp8 *f, int64_t uid, const std::string &role, bool written) {
    const emu_cudnn_tensor &t = f->m->graph->tensors.at(uid);
    const auto known = f->named.find(role);
    if (known != f->named.end())
        return known->second == uid || emu_cudnn_fp8_breach(f, "another " + role + " than before");
    if (!written && !emu_cudnn_is_input(f->m, uid))
        return emu_cudnn_fp8_breach(f, "the " + role + " is no input");
    if (t.is_virtual || t.by_value || t.type != CUDNN_DATA_FLOAT || emu_cudnn_count(t) != 1 || t.dims.size() != 4)
        return emu_cudnn_fp8_breach(f, "the " + role + " is not one fp32 number in the device's memory");
    if (!f->cells.insert(uid).second)
        return emu_cudnn_fp8_breach(f, "the " + role + " is another role's tensor, too");
    f->named[role] = uid;
    return true;
}
// Goes from *uid = x * cell to x. False: a breach.
static bool emu_cudnn_fp8_times(emu_cudnn_fp8 *f, int64_t *uid, const std::string &role) {
    const emu_cudnn_operation *times = emu_cudnn_pointwise_of(f->m, *uid, CUDNN_POINTWISE_MUL);
    if (!times)
        return emu_cudnn_fp8_breach(f, "nothing is multiplied by the " + role);
    *uid = times->x;
    return emu_cudnn_fp8_cell(f, times->b, role, false);
}
// Finds the amax of x. False: a breach, as where the amax is of x after its scale.
static bool emu_cudnn_fp8_amax(emu_cudnn_fp8 *f, int64_t x, const std::string &role) {
    for (const emu_cudnn_operation &o : f->m->graph->operations)
        if (o.kind == EMU_REDUCTION && o.sum == CUDNN_REDUCE_TENSOR_AMAX && o.x == x) {
            f->m->used.insert(o.y);
            return emu_cudnn_fp8_cell(f, o.y, role, true);
        }
    return emu_cudnn_fp8_breach(f, "no " + role + " is taken before the scale");
}
// Goes from an output, *uid = a product's sums * descale a * descale b * scale, with the amax before the scale, to the
// sums. False: a breach.
static bool emu_cudnn_fp8_output(emu_cudnn_fp8 *f, int64_t *uid, const std::string &name, const std::string &a,
                                 const std::string &b) {
    return emu_cudnn_fp8_times(f, uid, "scale of " + name) && emu_cudnn_fp8_amax(f, *uid, "amax of " + name) &&
           emu_cudnn_fp8_times(f, uid, "descale of " + b) && emu_cudnn_fp8_times(f, uid, "descale of " + a);
}
// Finds the scores (q, k) * scale * descale of q * descale of k, masked. False: a breach.
static bool emu_cudnn_fp8_scores(emu_cudnn_fp8 *f, int64_t uid) {
    emu_cudnn_match *m = f->m;
    if (!emu_cudnn_match_mask(m, &uid))
        return emu_cudnn_fp8_breach(f, "a mask that is not causal");
    if (!emu_cudnn_fp8_times(f, &uid, "descale of k") || !emu_cudnn_fp8_times(f, &uid, "descale of q"))
        return false;
    if (!emu_cudnn_match_scores(m, uid) || m->scale < 0 || !m->graph->tensors.at(m->scale).by_value)
        return emu_cudnn_fp8_breach(f, "no product of q and k, multiplied by a scale by value");
    return true;
}
// Finds o = (p8, v) and the stats; p8: p's codes. False: a breach.
static bool emu_cudnn_fp8_forward(emu_cudnn_fp8 *f, int64_t o) {
    emu_cudnn_match *m = f->m;
    m->o = o;
    if (!emu_cudnn_fp8_output(f, &o, "o", "p", "v"))
        return false;
    const emu_cudnn_operation *product = emu_cudnn_kind_of(m, o, EMU_MATMUL);
    if (!product || !emu_cudnn_is_input(m, product->b))
        return emu_cudnn_fp8_breach(f, "o is no product of v");
    m->v = product->b;
    int64_t p = f->p = product->x;
    if (!emu_cudnn_fp8_times(f, &p, "scale of p") || !emu_cudnn_fp8_amax(f, p, "amax of p"))
        return false;
    const emu_cudnn_operation *quotient = emu_cudnn_pointwise_of(m, p, CUDNN_POINTWISE_DIV);
    const emu_cudnn_operation *e = quotient ? emu_cudnn_pointwise_of(m, quotient->x, CUDNN_POINTWISE_EXP) : NULL;
    const emu_cudnn_operation *sum = quotient ? emu_cudnn_reduction_of(m, quotient->b, CUDNN_REDUCE_TENSOR_ADD) : NULL;
    const emu_cudnn_operation *less = e ? emu_cudnn_pointwise_of(m, e->x, CUDNN_POINTWISE_SUB) : NULL;
    const emu_cudnn_operation *max = less ? emu_cudnn_reduction_of(m, less->b, CUDNN_REDUCE_TENSOR_MAX) : NULL;
    if (!max || !sum || sum->x != quotient->x || max->x != less->x)
        return emu_cudnn_fp8_breach(f, "p is no softmax");
    for (const emu_cudnn_operation &add : m->graph->operations) {
        const emu_cudnn_operation *log =
            add.kind == EMU_POINTWISE && add.mode == CUDNN_POINTWISE_ADD && add.x == less->b
                ? emu_cudnn_pointwise_of(m, add.b, CUDNN_POINTWISE_LOG)
                : NULL;
        if (log && log->x == quotient->b)
            m->stats = *m->used.insert(add.y).first;
    }
    return m->stats >= 0 ? emu_cudnn_fp8_scores(f, max->x) : emu_cudnn_fp8_breach(f, "no stats");
}

// Returns the product (a, b) behind an output, before the sum over a group's heads if there is one; NULL: a breach.
static const emu_cudnn_operation *emu_cudnn_fp8_gradient(emu_cudnn_fp8 *f, int64_t uid, const std::string &name,
                                                         const std::string &a, const std::string &b) {
    if (!emu_cudnn_fp8_output(f, &uid, name, a, b))
        return NULL;
    const emu_cudnn_operation *product = emu_cudnn_match_heads(f->m, uid);
    if (!product)
        emu_cudnn_fp8_breach(f, name + " is no product, or its heads are summed after the descales");
    return product;
}
// Finds dv = (p8', do), p8: the codes of p = exp(masked scores - stats). *p: p's unique id. False: a breach.
static bool emu_cudnn_fp8_dv(emu_cudnn_fp8 *f, int64_t dv, int64_t *p) {
    emu_cudnn_match *m = f->m;
    m->dv = dv;
    const emu_cudnn_operation *product = emu_cudnn_fp8_gradient(f, dv, "dv", "p", "do");
    const emu_cudnn_operation *turned = product ? emu_cudnn_kind_of(m, product->x, EMU_RESHAPE) : NULL;
    if (!turned || !emu_cudnn_is_input(m, product->b))
        return emu_cudnn_fp8_breach(f, "dv is no product of do");
    m->d_o = product->b;
    m->rounded = {turned->x, turned->y};
    f->p = *p = turned->x;
    if (!emu_cudnn_fp8_times(f, p, "scale of p"))
        return false;
    const emu_cudnn_operation *e = emu_cudnn_pointwise_of(m, *p, CUDNN_POINTWISE_EXP);
    const emu_cudnn_operation *less = e ? emu_cudnn_pointwise_of(m, e->x, CUDNN_POINTWISE_SUB) : NULL;
    if (!less || !emu_cudnn_is_input(m, less->b))
        return emu_cudnn_fp8_breach(f, "p is no exponential of masked scores less stats");
    m->stats = less->b;
    return emu_cudnn_fp8_scores(f, less->x);
}
// Finds the row sums (sum of do * o) * descale of do * descale of o. False: a breach.
static bool emu_cudnn_fp8_row_sums(emu_cudnn_fp8 *f, int64_t uid) {
    emu_cudnn_match *m = f->m;
    m->row_sum = uid;
    if (!emu_cudnn_fp8_times(f, &uid, "descale of o") || !emu_cudnn_fp8_times(f, &uid, "descale of do"))
        return false;
    const emu_cudnn_operation *sum = emu_cudnn_reduction_of(m, uid, CUDNN_REDUCE_TENSOR_ADD);
    const emu_cudnn_operation *product = sum ? emu_cudnn_pointwise_of(m, sum->x, CUDNN_POINTWISE_MUL) : NULL;
    if (!product || product->x != m->d_o || !emu_cudnn_is_input(m, product->b))
        return emu_cudnn_fp8_breach(f, "no sums of do * o");
    m->o = product->b;
    return true;
}
// Finds ds = ((do, v) * descale of do * descale of v - row sums) * p * scale, whose codes are ds8. False: a breach.
static bool emu_cudnn_fp8_ds(emu_cudnn_fp8 *f, int64_t ds8, int64_t p) {
    emu_cudnn_match *m = f->m;
    int64_t ds = f->ds = ds8;
    if (!emu_cudnn_fp8_times(f, &ds, "scale of ds") || !emu_cudnn_fp8_amax(f, ds, "amax of ds"))
        return false;
    const emu_cudnn_operation *scaled = emu_cudnn_pointwise_of(m, ds, CUDNN_POINTWISE_MUL);
    const emu_cudnn_operation *times = scaled ? emu_cudnn_pointwise_of(m, scaled->x, CUDNN_POINTWISE_MUL) : NULL;
    const emu_cudnn_operation *less = times ? emu_cudnn_pointwise_of(m, times->x, CUDNN_POINTWISE_SUB) : NULL;
    if (!less || scaled->b != m->scale || times->b != p)
        return emu_cudnn_fp8_breach(f, "ds is no difference * p * scale");
    int64_t dp = less->x;
    if (!emu_cudnn_fp8_times(f, &dp, "descale of v") || !emu_cudnn_fp8_times(f, &dp, "descale of do"))
        return false;
    const emu_cudnn_operation *product = emu_cudnn_kind_of(m, dp, EMU_MATMUL);
    if (!product || product->x != m->d_o || !emu_cudnn_is_input(m, product->b))
        return emu_cudnn_fp8_breach(f, "dp is no product of do and v");
    m->v = product->b;
    return emu_cudnn_fp8_row_sums(f, less->b);
}
// Finds dk = (ds8', q) and dq = (ds8, k'). False: a breach.
static bool emu_cudnn_fp8_backward(emu_cudnn_fp8 *f, int64_t dv, int64_t dk, int64_t dq) {
    emu_cudnn_match *m = f->m;
    int64_t p = -1;
    m->backward = true;
    m->dq = dq;
    m->dk = dk;
    if (!emu_cudnn_fp8_dv(f, dv, &p))
        return false;
    const emu_cudnn_operation *q_product = emu_cudnn_fp8_gradient(f, dq, "dq", "ds", "k");
    const emu_cudnn_operation *k_product = q_product ? emu_cudnn_fp8_gradient(f, dk, "dk", "ds", "q") : NULL;
    const emu_cudnn_operation *k_turned = k_product ? emu_cudnn_kind_of(m, q_product->b, EMU_RESHAPE) : NULL;
    const emu_cudnn_operation *ds_turned = k_product ? emu_cudnn_kind_of(m, k_product->x, EMU_RESHAPE) : NULL;
    if (!k_turned || !ds_turned || k_turned->x != m->k || k_product->b != m->q || ds_turned->x != q_product->x)
        return emu_cudnn_fp8_breach(f, "dq and dk are no products of ds with k and q");
    m->dq_product = q_product->y;
    m->rounded.push_back(ds_turned->y);
    return emu_cudnn_fp8_ds(f, q_product->x, p);
}

// Returns the output whose product multiplies transposed codes (turned) of an exponential, dv, or of something else, dk;
// or codes as they are, o and dq. -1: there is none.
static int64_t emu_cudnn_fp8_find(emu_cudnn_match *m, bool turned, bool exponential) {
    for (const auto &written : m->graph->written_by) {
        int64_t at = written.first;
        if (m->graph->tensors.at(at).is_virtual)
            continue;
        for (int i = 0; i < 3; i++) { // the scale and both descales
            const emu_cudnn_operation *times = emu_cudnn_writer(m, at);
            at = times && times->kind == EMU_POINTWISE && times->mode == CUDNN_POINTWISE_MUL ? times->x : -1;
        }
        const emu_cudnn_operation *product = emu_cudnn_writer(m, at);
        if (product && product->kind == EMU_REDUCTION)
            product = emu_cudnn_writer(m, product->x);
        const emu_cudnn_operation *left = product ? emu_cudnn_writer(m, product->x) : NULL;
        if (!product || product->kind != EMU_MATMUL || !left || (left->kind == EMU_RESHAPE) != turned)
            continue;
        const emu_cudnn_operation *codes = turned ? emu_cudnn_writer(m, left->x) : NULL;
        const emu_cudnn_operation *before = codes ? emu_cudnn_writer(m, codes->x) : NULL;
        const bool found = before && before->kind == EMU_POINTWISE && before->mode == CUDNN_POINTWISE_EXP;
        if (!turned || found == exponential)
            return written.first;
    }
    return -1;
}
// Whether a graph has a tensor in FP8 in memory.
static bool emu_cudnn_has_fp8(const emu_cudnn_graph *graph) {
    for (const auto &tensor : graph->tensors)
        if (!tensor.second.is_virtual && emu_cudnn_is_fp8(tensor.second.type))
            return true;
    return false;
}

// ---- types and shapes ----

// Returns the number of elements of 16 bytes.
static int64_t emu_cudnn_16_bytes(cudnnDataType_t type) { return 16 / emu_cudnn_type_bytes(type); }
// Checks a matrix as emu_cudnn_hold_matrix does, of elements of any size.
static cudnnStatus_t emu_cudnn_fp8_hold(const emu_cudnn_match *m, int64_t uid, cudnnDataType_t type,
                                        const std::vector<int64_t> &dims, int width_axis) {
    EMU_CUDNN_PASS(emu_cudnn_hold_matrix(m, uid, type, dims, width_axis));
    const emu_cudnn_tensor &t = m->graph->tensors.at(uid);
    for (int i = 0; i < 4; i++)
        EMU_CUDNN_HOLD(i == width_axis || t.dims[(size_t)i] == 1 ||
                           t.strides[(size_t)i] % emu_cudnn_16_bytes(type) == 0,
                       CUDNN_STATUS_NOT_SUPPORTED_LAYOUT, "tensor %lld: stride %lld is no multiple of 16 bytes",
                       (long long)uid, (long long)t.strides[(size_t)i]);
    return CUDNN_STATUS_SUCCESS;
}
static cudnnStatus_t emu_cudnn_fp8_hold_codes(const emu_cudnn_match *m, int64_t uid, cudnnDataType_t type) {
    EMU_CUDNN_HOLD(m->graph->tensors.at(uid).type == type, CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE,
                   "tensor %lld, an operand of a product, is of type %d, not %d", (long long)uid,
                   m->graph->tensors.at(uid).type, type);
    return CUDNN_STATUS_SUCCESS;
}
static cudnnStatus_t emu_cudnn_fp8_hold_tensors(const emu_cudnn_fp8 *f) {
    const emu_cudnn_match *m = f->m;
    const emu_cudnn_tensor &q = m->graph->tensors.at(m->q), &k = m->graph->tensors.at(m->k);
    EMU_CUDNN_HOLD(q.dims.size() == 4 && k.dims.size() == 4, CUDNN_STATUS_NOT_SUPPORTED_SHAPE,
                   "q has %zu dimensions, k %zu", q.dims.size(), k.dims.size());
    const int64_t B = q.dims[0], H = q.dims[1], T = q.dims[2], D = q.dims[3], G = k.dims[1], S = k.dims[3];
    const cudnnDataType_t type = CUDNN_DATA_FP8_E4M3;
    const cudnnDataType_t out = m->graph->tensors.at(m->backward ? m->dq : m->o).type;
    EMU_CUDNN_PASS(emu_cudnn_fp8_hold(m, m->q, type, {B, H, T, D}, 3));
    EMU_CUDNN_PASS(emu_cudnn_fp8_hold(m, m->k, type, {B, G, D, S}, 2));
    EMU_CUDNN_PASS(emu_cudnn_hold_rows(m, m->stats, {B, H, T, 1}));
    EMU_CUDNN_PASS(emu_cudnn_fp8_hold_codes(m, f->p, type));
    EMU_CUDNN_HOLD(out != CUDNN_DATA_BFLOAT16 || emu_cudnn_capability() / 10 == 10,
                   CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH, "outputs in bf16 are only supported on Blackwell");
    if (!m->backward) {
        EMU_CUDNN_PASS(emu_cudnn_fp8_hold(m, m->v, type, {B, G, S, D}, 3));
        return emu_cudnn_fp8_hold(m, m->o, out == CUDNN_DATA_BFLOAT16 ? out : type, {B, H, T, D}, 3);
    }
    const cudnnDataType_t gradients = m->graph->tensors.at(m->d_o).type;
    const cudnnDataType_t outputs = out == CUDNN_DATA_BFLOAT16 ? out : gradients;
    EMU_CUDNN_HOLD(emu_cudnn_is_fp8(gradients), CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE, "do is of type %d", gradients);
    EMU_CUDNN_PASS(emu_cudnn_fp8_hold(m, m->v, type, {B, G, D, S}, 2));
    EMU_CUDNN_PASS(emu_cudnn_fp8_hold(m, m->o, type, {B, H, T, D}, 3));
    EMU_CUDNN_PASS(emu_cudnn_fp8_hold(m, m->d_o, gradients, {B, H, T, D}, 3));
    EMU_CUDNN_PASS(emu_cudnn_fp8_hold(m, m->dq, outputs, {B, H, T, D}, 3));
    EMU_CUDNN_PASS(emu_cudnn_fp8_hold(m, m->dk, outputs, {B, G, S, D}, 3));
    EMU_CUDNN_PASS(emu_cudnn_fp8_hold(m, m->dv, outputs, {B, G, S, D}, 3));
    EMU_CUDNN_PASS(emu_cudnn_fp8_hold_codes(m, m->rounded[1], type)); // p8'
    EMU_CUDNN_PASS(emu_cudnn_fp8_hold_codes(m, f->ds, gradients));    // ds8
    return emu_cudnn_fp8_hold_codes(m, m->rounded[2], gradients);     // ds8'
}
static cudnnStatus_t emu_cudnn_supports_fp8(const emu_cudnn_graph *graph, emu_cudnn_match *match) {
    *match = emu_cudnn_match_none(graph);
    emu_cudnn_fp8 f = {match, -1, -1, {}, {}, ""};
    const int64_t dv = emu_cudnn_fp8_find(match, true, true), dk = emu_cudnn_fp8_find(match, true, false);
    const int64_t other = emu_cudnn_fp8_find(match, false, false); // dq, or o
    const bool found =
        other >= 0 && (dv < 0 && dk < 0 ? emu_cudnn_fp8_forward(&f, other)
                                        : dv >= 0 && dk >= 0 && emu_cudnn_fp8_backward(&f, dv, dk, other));
    EMU_CUDNN_HOLD(found && f.breach.empty() && match->used.size() == graph->operations.size(),
                   CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN,
                   "a graph of %zu operations that is not attention in FP8: %s", graph->operations.size(),
                   f.breach.empty() ? found ? "more operations" : "no product is an output" : f.breach.c_str());
    const int capability = emu_cudnn_capability();
    EMU_CUDNN_HOLD(capability >= 90, CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH, "compute capability %d", capability);
    EMU_CUDNN_PASS(emu_cudnn_fp8_hold_tensors(&f));
    const emu_cudnn_tensor &q = graph->tensors.at(match->q), &k = graph->tensors.at(match->k);
    const int64_t width = q.dims[3], most = capability / 10 == 9 || !match->backward ? 256 : 128;
    EMU_CUDNN_HOLD(width % 16 == 0 && width <= most && q.dims[1] % k.dims[1] == 0, CUDNN_STATUS_NOT_SUPPORTED_SHAPE,
                   "heads of %lld, %lld of %lld", (long long)width, (long long)q.dims[1], (long long)k.dims[1]);
    EMU_CUDNN_HOLD(!match->backward || capability / 10 != 9 || width == 128, CUDNN_STATUS_NOT_SUPPORTED_SHAPE,
                   "Only D=128 for BPROP fp8");
    EMU_CUDNN_HOLD(!match->backward || capability < 110, CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN,
                   "no pattern matches on compute capability %d", capability);
    return CUDNN_STATUS_SUCCESS;
}

// Checks that the engine takes a graph; *match: attention's tensors in it.
static cudnnStatus_t emu_cudnn_supports(const emu_cudnn_graph *graph, emu_cudnn_match *match) {
    EMU_CUDNN_HOLD(!graph->written_by.empty(), CUDNN_STATUS_BAD_PARAM, "a graph without a handle");
    EMU_CUDNN_HOLD(!emu_cudnn_refuses("operation") || !graph->single, CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN,
                   "EMU_CUDNN_REFUSE=operation");
    EMU_CUDNN_HOLD(!emu_cudnn_refuses("graph"), CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN, "EMU_CUDNN_REFUSE=graph");
    return emu_cudnn_has_fp8(graph) ? emu_cudnn_supports_fp8(graph, match) : emu_cudnn_supports_16bit(graph, match);
}
// Returns the bytes of workspace that an engine asks for. In FP8 that is what 9.28 asks for on 9.0: dq in fp32, row sums
// and, where heads are shared, dk and dv of each head in fp32.
static int64_t emu_cudnn_workspace_bytes(const emu_cudnn_match *m) {
    if (!emu_cudnn_has_fp8(m->graph) || !m->backward)
        return emu_cudnn_workspace_16bit_bytes(m);
    const emu_cudnn_tensor &q = m->graph->tensors.at(m->q), &k = m->graph->tensors.at(m->k);
    const int64_t rows = emu_cudnn_count(q) / q.dims[3], shared = q.dims[1] == k.dims[1] ? 1 : 3;
    return 4 * (rows + shared * emu_cudnn_count(q));
}
