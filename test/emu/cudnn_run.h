// Runs a graph's operations for test/emu/cudnn.cpp, one after another. Each runs over whole tensors in fp32, and its
// result is rounded to the tensor's type.
#pragma once
#include "test/emu/cudnn_sdpa_fp8.h"
#include <math.h> // expf

struct emu_cudnn_run {
    std::shared_ptr<const emu_cudnn_graph> graph;
    emu_cudnn_match match;
    const struct emu_services *services;
    std::map<int64_t, void *> pointers;
    std::map<int64_t, float> values; // of tensors by value, as they were when the call was made
    char *workspace;
    int64_t workspace_bytes;
    bool broken;            // the version's result is wrong for this shape: NaN
    bool broken_low_scores; // dQ is wrong in rows whose log-sum-exp is low
};
typedef std::vector<float> emu_cudnn_data; // packed: the last dimension's elements lie side by side

// ---- elements ----

static float emu_cudnn_from_half(uint16_t bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float magnitude = exponent == 31  ? (mantissa ? NAN : INFINITY)
                            : exponent == 0 ? ldexpf((float)mantissa, -24)
                                            : ldexpf((float)(mantissa + 1024), exponent - 25);
    return bits >> 15 ? -magnitude : magnitude;
}
static uint16_t emu_cudnn_to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    const float magnitude = fabsf(value);
    if (!(magnitude <= INFINITY))
        return 0x7fff;
    if (magnitude >= 65520)
        return (uint16_t)(sign | 0x7c00u);
    if (magnitude < 0x1p-14f)
        return (uint16_t)(sign | (uint16_t)nearbyintf(ldexpf(magnitude, 24)));
    memcpy(&bits, &magnitude, sizeof bits);
    bits += 0xfffu + (bits >> 13 & 1u);
    return (uint16_t)(sign | (uint16_t)((bits >> 13) - (112u << 10)));
}
static float emu_cudnn_from_bf16(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static uint16_t emu_cudnn_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value)
        return 0x7fff;
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
// Returns the value of an FP8 code. E4M3 has no infinities and one NaN of each sign; E5M2 has IEEE 754's.
static float emu_cudnn_from_fp8(unsigned char code, cudnnDataType_t type) {
    const int bits = type == CUDNN_DATA_FP8_E4M3 ? 3 : 2, bias = type == CUDNN_DATA_FP8_E4M3 ? 7 : 15;
    const int exponent = (code & 0x7f) >> bits, mantissa = code & ((1 << bits) - 1);
    float magnitude = exponent == 0 ? ldexpf((float)mantissa, 1 - bias - bits)
                                    : ldexpf((float)(mantissa + (1 << bits)), exponent - bias - bits);
    if (type == CUDNN_DATA_FP8_E4M3 ? (code & 0x7f) == 0x7f : (code & 0x7f) > 0x7c)
        magnitude = NAN;
    if (type == CUDNN_DATA_FP8_E5M2 && (code & 0x7f) == 0x7c)
        magnitude = INFINITY;
    return code >> 7 ? -magnitude : magnitude;
}
// Returns the code nearest to a value, of two the even one; the largest finite one for what is beyond it.
static unsigned char emu_cudnn_to_fp8(float value, cudnnDataType_t type) {
    const int bits = type == CUDNN_DATA_FP8_E4M3 ? 3 : 2, bias = type == CUDNN_DATA_FP8_E4M3 ? 7 : 15;
    const float largest = type == CUDNN_DATA_FP8_E4M3 ? 448.0f : 57344.0f;
    const unsigned char sign = signbit(value) ? 0x80 : 0;
    int exponent = 0;
    if (value != value)
        return 0x7f;
    if (value == 0)
        return sign;
    const float magnitude = fminf(fabsf(value), largest);
    frexpf(magnitude, &exponent); // magnitude < 2^exponent
    exponent = exponent - 1 > 1 - bias ? exponent - 1 : 1 - bias;
    // in units of the last place: from 1 << bits on it is normal; a carry to the next exponent is the next code
    const int units = (int)nearbyintf(ldexpf(magnitude, bits - exponent));
    return (unsigned char)(sign | (((exponent + bias - 1) << bits) + units));
}
static float emu_cudnn_load(const void *at, int64_t i, cudnnDataType_t type) {
    switch (type) {
    case CUDNN_DATA_FLOAT: return ((const float *)at)[i];
    case CUDNN_DATA_HALF: return emu_cudnn_from_half(((const uint16_t *)at)[i]);
    case CUDNN_DATA_BFLOAT16: return emu_cudnn_from_bf16(((const uint16_t *)at)[i]);
    case CUDNN_DATA_INT32: return (float)((const int32_t *)at)[i];
    case CUDNN_DATA_BOOLEAN: return (float)((const unsigned char *)at)[i];
    case CUDNN_DATA_FP8_E4M3:
    case CUDNN_DATA_FP8_E5M2: return emu_cudnn_from_fp8(((const unsigned char *)at)[i], type);
    case CUDNN_DATA_DOUBLE: return (float)((const double *)at)[i];
    case CUDNN_DATA_INT64: return (float)((const int64_t *)at)[i];
    }
    return NAN;
}
static void emu_cudnn_store(void *at, int64_t i, cudnnDataType_t type, float value) {
    switch (type) {
    case CUDNN_DATA_FLOAT: ((float *)at)[i] = value; break;
    case CUDNN_DATA_HALF: ((uint16_t *)at)[i] = emu_cudnn_to_half(value); break;
    case CUDNN_DATA_BFLOAT16: ((uint16_t *)at)[i] = emu_cudnn_to_bf16(value); break;
    case CUDNN_DATA_INT32: ((int32_t *)at)[i] = (int32_t)value; break;
    case CUDNN_DATA_BOOLEAN: ((unsigned char *)at)[i] = value != 0; break;
    case CUDNN_DATA_FP8_E4M3:
    case CUDNN_DATA_FP8_E5M2: ((unsigned char *)at)[i] = emu_cudnn_to_fp8(value, type); break;
    case CUDNN_DATA_DOUBLE: ((double *)at)[i] = value; break;
    case CUDNN_DATA_INT64: ((int64_t *)at)[i] = (int64_t)value; break;
    }
}
static float emu_cudnn_round(float value, cudnnDataType_t type) {
    switch (type) {
    case CUDNN_DATA_HALF: return emu_cudnn_from_half(emu_cudnn_to_half(value));
    case CUDNN_DATA_BFLOAT16: return emu_cudnn_from_bf16(emu_cudnn_to_bf16(value));
    case CUDNN_DATA_INT32:
    case CUDNN_DATA_INT64: return truncf(value);
    case CUDNN_DATA_BOOLEAN: return value != 0;
    case CUDNN_DATA_FP8_E4M3:
    case CUDNN_DATA_FP8_E5M2: return emu_cudnn_from_fp8(emu_cudnn_to_fp8(value, type), type);
    case CUDNN_DATA_FLOAT:
    case CUDNN_DATA_DOUBLE: break;
    }
    return value;
}

// ---- walks over tensors ----

// Calls f(element, offsets) for each element of `dims`, in order. offsets (N): the element's place by each of N
// tensors' strides.
template <size_t N, class F>
static void emu_cudnn_walk(const std::vector<int64_t> &dims, const std::vector<int64_t> (&strides)[N], F f) {
    const size_t axes = dims.size();
    const int64_t inner = dims[axes - 1];
    int64_t rows = 1;
    for (size_t i = 0; i + 1 < axes; i++)
        rows *= dims[i];
#pragma omp parallel for if (rows * inner > 100000)
    for (int64_t row = 0; row < rows; row++) {
        int64_t offsets[N] = {}, rest = row;
        for (size_t i = axes - 1; i-- > 0; rest /= dims[i])
            for (size_t n = 0; n < N; n++)
                offsets[n] += rest % dims[i] * strides[n][i];
        for (int64_t i = 0; i < inner; i++) {
            f(row * inner + i, offsets);
            for (size_t n = 0; n < N; n++)
                offsets[n] += strides[n][axes - 1];
        }
    }
}
static std::vector<int64_t> emu_cudnn_packed(const std::vector<int64_t> &dims) {
    std::vector<int64_t> strides(dims.size(), 1);
    for (size_t i = dims.size() - 1; i-- > 0;)
        strides[i] = strides[i + 1] * dims[i + 1];
    return strides;
}
// Returns the strides of a packed tensor, 0 along dimensions of one element, which are broadcast.
static std::vector<int64_t> emu_cudnn_broadcast(const emu_cudnn_tensor &x) {
    std::vector<int64_t> strides = emu_cudnn_packed(x.dims);
    for (size_t i = 0; i < x.dims.size(); i++)
        strides[i] = x.dims[i] == 1 ? 0 : strides[i];
    return strides;
}

// ---- operations ----

static float emu_cudnn_apply(cudnnPointwiseMode_t mode, float x, float b, float t) {
    switch (mode) {
    case CUDNN_POINTWISE_ADD: return x + b;
    case CUDNN_POINTWISE_MUL: return x * b;
    case CUDNN_POINTWISE_MIN: return fminf(x, b);
    case CUDNN_POINTWISE_MAX: return fmaxf(x, b);
    case CUDNN_POINTWISE_SQRT: return sqrtf(x);
    case CUDNN_POINTWISE_DIV: return x / b;
    case CUDNN_POINTWISE_SUB: return x - b;
    case CUDNN_POINTWISE_EXP: return expf(x);
    case CUDNN_POINTWISE_LOG: return logf(x);
    case CUDNN_POINTWISE_NEG: return -x;
    case CUDNN_POINTWISE_RSQRT: return 1 / sqrtf(x);
    case CUDNN_POINTWISE_IDENTITY: return x;
    case CUDNN_POINTWISE_RECIPROCAL: return 1 / x;
    case CUDNN_POINTWISE_CMP_EQ: return x == b;
    case CUDNN_POINTWISE_CMP_NEQ: return x != b;
    case CUDNN_POINTWISE_CMP_GT: return x > b;
    case CUDNN_POINTWISE_CMP_GE: return x >= b;
    case CUDNN_POINTWISE_CMP_LT: return x < b;
    case CUDNN_POINTWISE_CMP_LE: return x <= b;
    case CUDNN_POINTWISE_LOGICAL_AND: return x != 0 && b != 0;
    case CUDNN_POINTWISE_LOGICAL_OR: return x != 0 || b != 0;
    case CUDNN_POINTWISE_LOGICAL_NOT: return x == 0;
    case CUDNN_POINTWISE_BINARY_SELECT: return t != 0 ? x : b;
    case CUDNN_POINTWISE_GEN_INDEX: break; // depends on places, not on values
    }
    return NAN;
}
struct emu_cudnn_operand_data {
    const emu_cudnn_tensor *tensor;
    const emu_cudnn_data *data;
};
static void emu_cudnn_run_pointwise(const emu_cudnn_operation &o, const emu_cudnn_tensor &y, emu_cudnn_data *result,
                                    const std::vector<emu_cudnn_operand_data> &from) {
    if (o.mode == CUDNN_POINTWISE_GEN_INDEX) {
        std::vector<int64_t> strides[1] = {std::vector<int64_t>(y.dims.size(), 0)};
        strides[0][(size_t)o.axis] = 1;
        emu_cudnn_walk(y.dims, strides, [&](int64_t i, const int64_t *at) {
            (*result)[(size_t)i] = emu_cudnn_round((float)at[0], y.type);
        });
        return;
    }
    const emu_cudnn_operand_data x = from[0], b = from.size() > 1 ? from[1] : x, t = from.size() > 2 ? from[2] : x;
    const std::vector<int64_t> strides[3] = {emu_cudnn_broadcast(*x.tensor), emu_cudnn_broadcast(*b.tensor),
                                             emu_cudnn_broadcast(*t.tensor)};
    emu_cudnn_walk(y.dims, strides, [&](int64_t i, const int64_t *at) {
        const float value =
            emu_cudnn_apply(o.mode, (*x.data)[(size_t)at[0]], (*b.data)[(size_t)at[1]], (*t.data)[(size_t)at[2]]);
        (*result)[(size_t)i] = emu_cudnn_round(value, y.type);
    });
}
// Runs a reduction. Along a dimension that is shorter in y, each element of y sums as many adjacent elements of x as
// fit.
static void emu_cudnn_run_reduction(const emu_cudnn_operation &o, const emu_cudnn_tensor &y, emu_cudnn_data *result,
                                    const emu_cudnn_operand_data &x) {
    const std::vector<int64_t> packed = emu_cudnn_packed(x.tensor->dims);
    std::vector<int64_t> strides[1] = {packed}, parts = y.dims;
    for (size_t i = 0; i < parts.size(); i++) {
        parts[i] = x.tensor->dims[i] / y.dims[i];
        strides[0][i] *= parts[i];
    }
    const int64_t count = emu_cudnn_count(*x.tensor) / emu_cudnn_count(y);
    const bool whole = emu_cudnn_count(y) == 1; // the elements lie in order
    emu_cudnn_walk(y.dims, strides, [&](int64_t i, const int64_t *at) {
        const bool amax = o.sum == CUDNN_REDUCE_TENSOR_AMAX;
        float sum = o.sum == CUDNN_REDUCE_TENSOR_ADD || amax ? 0
                    : o.sum == CUDNN_REDUCE_TENSOR_MUL       ? 1
                    : o.sum == CUDNN_REDUCE_TENSOR_MAX       ? -INFINITY
                                                             : INFINITY;
        for (int64_t j = 0; j < count; j++) {
            int64_t rest = j, offset = whole ? j : at[0];
            for (size_t axis = whole ? 0 : parts.size(); axis-- > 0; rest /= parts[axis])
                offset += rest % parts[axis] * packed[axis];
            const float element = (*x.data)[(size_t)offset], value = amax ? fabsf(element) : element;
            sum = o.sum == CUDNN_REDUCE_TENSOR_ADD           ? sum + value
                  : o.sum == CUDNN_REDUCE_TENSOR_MUL         ? sum * value
                  : value != value                           ? value
                  : o.sum == CUDNN_REDUCE_TENSOR_MAX || amax ? (value > sum ? value : sum)
                                                             : (value < sum ? value : sum);
        }
        (*result)[(size_t)i] = emu_cudnn_round(sum, y.type);
    });
}
// Runs a reshape: the same memory by other dimensions and strides.
static void emu_cudnn_run_reshape(const emu_cudnn_tensor &y, emu_cudnn_data *result, const emu_cudnn_operand_data &x) {
    emu_cudnn_data memory((size_t)emu_cudnn_extent(*x.tensor), NAN);
    const std::vector<int64_t> from[1] = {x.tensor->strides}, to[1] = {y.strides};
    emu_cudnn_walk(x.tensor->dims, from,
                   [&](int64_t i, const int64_t *at) { memory[(size_t)at[0]] = (*x.data)[(size_t)i]; });
    emu_cudnn_walk(y.dims, to, [&](int64_t i, const int64_t *at) {
        (*result)[(size_t)i] = emu_cudnn_round(memory[(size_t)at[0]], y.type);
    });
}
// Returns a product's operand. Tensor cores take operands of 16 bits: where the other one has 16, an operand in fp32 is
// rounded to the other's type.
static emu_cudnn_data emu_cudnn_factor(const emu_cudnn_operand_data &x, const emu_cudnn_tensor &other) {
    emu_cudnn_data data = *x.data;
    if (!emu_cudnn_is_16bit(x.tensor->type) && emu_cudnn_is_16bit(other.type))
        for (float &value : data)
            value = emu_cudnn_round(value, other.type);
    return data;
}
// Runs a product. first: where along the depth sums begin, for sums in any order.
static void emu_cudnn_run_matmul(const emu_cudnn_tensor &y, emu_cudnn_data *result, const emu_cudnn_operand_data &a,
                                 const emu_cudnn_operand_data &b, int64_t first) {
    const size_t axes = y.dims.size();
    const int64_t M = y.dims[axes - 2], N = y.dims[axes - 1], K = a.tensor->dims[axes - 1];
    const int64_t batches = emu_cudnn_count(y) / (M * N);
    const emu_cudnn_data a_data = emu_cudnn_factor(a, *b.tensor), b_data = emu_cudnn_factor(b, *a.tensor);
#pragma omp parallel for collapse(2) if (batches * M * N * K > 100000)
    for (int64_t batch = 0; batch < batches; batch++)
        for (int64_t row = 0; row < M; row++) {
            int64_t rest = batch, a_batch = 0, b_batch = 0, a_step = 1, b_step = 1;
            for (size_t i = axes - 2; i-- > 0; rest /= y.dims[i]) {
                const int64_t at = rest % y.dims[i];
                a_batch += at * a.tensor->dims[i] / y.dims[i] * a_step;
                b_batch += at * b.tensor->dims[i] / y.dims[i] * b_step;
                a_step *= a.tensor->dims[i];
                b_step *= b.tensor->dims[i];
            }
            float *const sums = result->data() + (batch * M + row) * N;
            const float *const a_row = a_data.data() + (a_batch * M + row) * K,
                               *b_matrix = b_data.data() + b_batch * K * N;
            for (int64_t n = 0; n < N; n++)
                sums[n] = 0;
            for (int64_t i = 0; i < K; i++) {
                const int64_t k = (first + i) % K;
#pragma omp simd
                for (int64_t n = 0; n < N; n++)
                    sums[n] += a_row[k] * b_matrix[k * N + n];
            }
            for (int64_t n = 0; n < N; n++)
                sums[n] = emu_cudnn_round(sums[n], y.type);
        }
}

// ---- memory ----

// A run of elements that lie side by side in memory. No written element may be another tensor's, or be read.
struct emu_cudnn_span {
    uintptr_t begin, end;
    int64_t uid;
    bool write;
};
static void emu_cudnn_add_spans(std::vector<emu_cudnn_span> *spans, const emu_cudnn_tensor &t, const void *pointer,
                                bool write) {
    const int64_t bytes = emu_cudnn_type_bytes(t.type);
    std::vector<int64_t> dims = t.dims;
    int64_t length = 1;
    for (size_t i = 0; i < dims.size(); i++)
        if (t.strides[i] == 1 && dims[i] > 1) {
            length = dims[i];
            dims[i] = 1;
            break;
        }
    int64_t count = 1;
    for (const int64_t dim : dims)
        count *= dim;
    for (int64_t row = 0; row < count; row++) {
        int64_t rest = row, offset = 0;
        for (size_t i = dims.size(); i-- > 0; rest /= dims[i])
            offset += rest % dims[i] * t.strides[i];
        const uintptr_t begin = (uintptr_t)pointer + (uintptr_t)(offset * bytes);
        spans->push_back({begin, begin + (uintptr_t)(length * bytes), t.uid, write});
    }
}
static void emu_cudnn_check_overlap(const emu_cudnn_run *run) {
    std::vector<emu_cudnn_span> spans;
    for (const auto &pointer : run->pointers)
        emu_cudnn_add_spans(&spans, run->graph->tensors.at(pointer.first), pointer.second,
                            run->graph->written_by.count(pointer.first) > 0);
    const uintptr_t workspace = (uintptr_t)run->workspace;
    if (run->workspace_bytes > 0)
        spans.push_back({workspace, workspace + (uintptr_t)run->workspace_bytes, -1, true});
    std::sort(spans.begin(), spans.end(),
              [](const emu_cudnn_span &a, const emu_cudnn_span &b) { return a.begin < b.begin; });
    emu_cudnn_span last = {0, 0, 0, false}, last_written = last;
    for (const emu_cudnn_span &span : spans) {
        const emu_cudnn_span &before = span.write ? last : last_written;
        if (span.begin < before.end)
            emu_cudnn_report("tensors %lld and %lld (-1: the workspace) overlap, and one is written",
                             (long long)before.uid, (long long)span.uid);
        last = span.end > last.end ? span : last;
        last_written = span.write && span.end > last_written.end ? span : last_written;
    }
}
static void emu_cudnn_check_memory(const emu_cudnn_run *run) {
    for (const auto &pointer : run->pointers) {
        const emu_cudnn_tensor &t = run->graph->tensors.at(pointer.first);
        const int64_t bytes = emu_cudnn_extent(t) * emu_cudnn_type_bytes(t.type);
        if (!run->services->holds(pointer.second, (size_t)bytes))
            emu_cudnn_report("tensor %lld: no allocation of the device has all of the %lld bytes at %p",
                             (long long)pointer.first, (long long)bytes, pointer.second);
    }
    if (run->workspace_bytes > 0 && !run->services->holds(run->workspace, (size_t)run->workspace_bytes))
        emu_cudnn_report("no allocation of the device has all of the workspace, %lld bytes at %p",
                         (long long)run->workspace_bytes, (void *)run->workspace);
    emu_cudnn_check_overlap(run);
}
static emu_cudnn_data emu_cudnn_read(const emu_cudnn_run *run, const emu_cudnn_tensor &t) {
    emu_cudnn_data data((size_t)emu_cudnn_count(t));
    if (t.by_value) {
        data[0] = run->values.at(t.uid);
        return data;
    }
    const void *const pointer = run->pointers.at(t.uid);
    const std::vector<int64_t> strides[1] = {t.strides};
    emu_cudnn_walk(t.dims, strides,
                   [&](int64_t i, const int64_t *at) { data[(size_t)i] = emu_cudnn_load(pointer, at[0], t.type); });
    return data;
}
static void emu_cudnn_write(const emu_cudnn_run *run, const emu_cudnn_tensor &t, const emu_cudnn_data *data) {
    void *const pointer = run->pointers.at(t.uid);
    const std::vector<int64_t> strides[1] = {t.strides};
    emu_cudnn_walk(t.dims, strides, [&](int64_t i, const int64_t *at) {
        emu_cudnn_store(pointer, at[0], t.type, data ? (*data)[(size_t)i] : NAN);
    });
}

// Makes dQ NaN in rows whose lse is low. The library scores a tile's keys past the end 0 there, so that exp(0 - lse) is
// infinite.
static void emu_cudnn_break_low_scores(const emu_cudnn_run *run, emu_cudnn_data *dq) {
    const emu_cudnn_data lse = emu_cudnn_read(run, run->graph->tensors.at(run->match.stats));
    const size_t width = dq->size() / lse.size();
    for (size_t i = 0; i < dq->size(); i++)
        if (isinf(expf(-lse[i / width])))
            (*dq)[i] = NAN;
}
// Changes a result as EMU_CUDNN_FAULT asks, as a library would that is wrong without an error.
static void emu_cudnn_plant(const emu_cudnn_run *run, int64_t uid, int64_t turn, emu_cudnn_data *result) {
    const char *const fault = getenv("EMU_CUDNN_FAULT");
    const bool forward = !run->match.backward && uid == run->match.o;
    const auto is = [&](const char *name, bool here) { return fault && here && strcmp(fault, name) == 0; };
    if (is("forward", forward) || is("operation", forward && run->graph->single) ||
        is("backward", run->match.backward && uid == run->match.dv))
        for (float &x : *result)
            x *= 1.1f;
    if (is("nan", run->match.backward && uid == run->match.dq))
        result->back() = NAN;
    const float other =
        (float)(turn % 7); // another one's than a few runs before, of the other direction or to calibrate
    if (is("order", run->match.backward && uid == run->match.dq))
        (*result)[0] += 0.1f * other;
    if (is("bits", forward && emu_cudnn_is_fp8(run->graph->tensors.at(uid).type)))
        (*result)[0] = 60 * other; // in FP8 small differences are rounded off
    else if (is("bits", forward))
        (*result)[0] += 0.1f * other;
}
// Runs a graph's operations, in its turn on the stream. The tensors that are written hold NaN before, and so does the
// whole workspace.
static void emu_cudnn_run_graph(const emu_cudnn_run *run) {
    static int64_t turn, runs; // turn: gives sums that many blocks add to at once another order each time
    runs++;
    const emu_cudnn_graph &graph = *run->graph;
    emu_cudnn_check_memory(run);
    if (run->workspace_bytes > 0)
        memset(run->workspace, 0xff, (size_t)run->workspace_bytes);
    std::map<int64_t, emu_cudnn_data> data;
    std::map<int64_t, int> readers;
    for (const emu_cudnn_operation &o : graph.operations)
        for (const int64_t uid : emu_cudnn_reads(o))
            readers[uid]++;
    for (const auto &written : graph.written_by)
        if (!graph.tensors.at(written.first).is_virtual)
            emu_cudnn_write(run, graph.tensors.at(written.first), NULL);
    for (const emu_cudnn_operation &o : graph.operations) {
        std::vector<emu_cudnn_operand_data> from;
        for (const int64_t uid : emu_cudnn_reads(o)) {
            const emu_cudnn_tensor &x = graph.tensors.at(uid);
            if (!data.count(uid))
                data[uid] = emu_cudnn_read(run, x);
            from.push_back({&x, &data[uid]});
        }
        const emu_cudnn_tensor &y = graph.tensors.at(o.y);
        emu_cudnn_data &result = data[o.y];
        result.resize((size_t)emu_cudnn_count(y));
        switch (o.kind) {
        case EMU_POINTWISE: emu_cudnn_run_pointwise(o, y, &result, from); break;
        case EMU_MATMUL: {
            const bool any_order = (o.y == run->match.dq_sum || o.y == run->match.dq_product) && !run->match.in_turn;
            const int64_t K = from[0].tensor->dims.back(), some = any_order ? 7 * turn++ % K : 0;
            emu_cudnn_run_matmul(y, &result, from[0], from[1], some);
            break;
        }
        case EMU_REDUCTION: emu_cudnn_run_reduction(o, y, &result, from[0]); break;
        case EMU_RESHAPE: emu_cudnn_run_reshape(y, &result, from[0]); break;
        }
        if (run->broken_low_scores && o.y == run->match.dq)
            emu_cudnn_break_low_scores(run, &result);
        emu_cudnn_plant(run, o.y, runs, &result);
        if (!y.is_virtual)
            emu_cudnn_write(run, y, run->broken ? NULL : &result);
        for (const int64_t uid : emu_cudnn_reads(o))
            if (--readers[uid] == 0)
                data.erase(uid);
    }
}
