#include "kernels/adamw.cuh"
#include "kernels/amax.cuh"        // amax_with, amax_merge_elements
#include "kernels/flat_states.cuh" // state_four_load, state_decoded, flat_merge_amaxes
#include "kernels/vectors.cuh"     // ALWAYS_INLINE
#include <assert.h>                // static_assert

#ifdef TARGET_CUDA

DEVICE_FUNCTION four<floatX> params_rounded(const struct adamw_range &r, const four<float> &value,
                                            const struct philox_words &random) {
    four<floatX> rounded;
    for (int i = 0; i < 4; i++)
        rounded.x[i] = adamw_params_are_stochastic(&r) ? parameter_stochastic(value.x[i], random.word[i] & 0xffffu)
                                                       : parameter_rounded(value.x[i]);
    return rounded;
}

// Updates the first `count` (0 to 4) of r's elements [at, at + 4), none past their tensor's end, if check is NULL or
// finite. Sets *index to the tensor's row, and returns the elements' largest fp8_magnitude, 0 without AMAX. All lanes
// of a warp call, lane l for element 4 l of a block. Elements load first: to await check or row doubles idle time.
template <bool AMAX>
DEVICE_FUNCTION uint32_t adamw_four(const struct adamw_range &r, const struct flat_tensors &tensors, int64_t at,
                                    int count, int *index, struct adamw_factors factors,
                                    const struct gradient_check *check, struct rounding rounding) {
    const four<float> g = state_four_load(r.grads, r.grads_format, at, count);
    four<float> first = state_four_load(r.m, r.m_format, at, count);
    four<float> second = state_four_load(r.v, r.v_format, at, count), value;
    four<floatX> rounded = four_load(r.params + at, count);
    four<uint16_t> low = {};
    if (r.remainder != NULL)
        low = four_load(r.remainder + at, count);
    *index = flat_tensor_at_warp(tensors, r.begin + at / STATE_BLOCK * STATE_BLOCK);
    const struct flat_tensor tensor = tensors.rows[*index];
    count = flat_tensor_clip_count(tensor, r.begin + at, count);
    for (int i = 0; i < 4; i++)
        value.x[i] = r.remainder != NULL ? parameter_joined(rounded.x[i], low.x[i]) : to_float(rounded.x[i]);
    const bool finite = check == NULL || check->finite;
    if (finite) {
        struct philox_words random = {};
        if (adamw_needs_random_words(&r))
            random = rounding_words(tensor_rounding(rounding, tensor, *index, r.begin), at);
        if (check != NULL)
            factors.grad_scale *= check->grad_scale;
        factors = adamw_tensor_factors(factors, &tensor);
        for (int i = 0; i < 4; i++) {
            value.x[i] = adamw_element(value.x[i], g.x[i], &first.x[i], &second.x[i], factors);
            low.x[i] = split_low(value.x[i]);
        }
        rounded = params_rounded(r, value, random);
        state_four_store(r.m, r.m_format, at, first, count, false, random);
        state_four_store(r.v, r.v_format, at, second, count, true, random);
        if (r.remainder != NULL)
            four_store(r.remainder + at, low, count);
        four_store(r.params + at, rounded, count);
    }
    uint32_t largest = 0;
    for (int i = 0; AMAX && i < 4; i++)
        if (i < count)
            largest = amax_with(largest, rounded.x[i]);
    return largest;
}
// Updates four elements a thread, and with AMAX merges amaxes. Four blocks an SM keep enough loads under way.
template <bool AMAX>
static __global__ void __launch_bounds__(FLAT_THREADS, 4)
    adamw_kernel(struct adamw_range r, struct flat_tensors tensors, struct adamw_factors factors,
                 const struct gradient_check *check, struct rounding rounding) {
    const int64_t at = ((int64_t)blockIdx.x * FLAT_THREADS + threadIdx.x) * 4;
    const int count = r.n - at >= 4 ? 4 : r.n > at ? (int)(r.n - at) : 0;
    int index;
    const uint32_t largest = adamw_four<AMAX>(r, tensors, at, count, &index, factors, check, rounding);
    if (AMAX)
        flat_merge_amaxes(tensors, index, largest, shared_memory());
}
void adamw_update(struct adamw_range r, struct flat_tensors tensors, struct adamw adamw,
                  const struct gradient_check *check, struct device *dev) {
    if (r.n > 0)
        LAUNCH(dev, (tensors.has_amaxes ? adamw_kernel<true> : adamw_kernel<false>), blocks_for(r.n, 4 * FLAT_THREADS),
               FLAT_THREADS, tensors.has_amaxes ? FLAT_AMAX_BYTES : 0, r, tensors, adamw_factors_of(adamw), check,
               adamw_rounding(&adamw));
}

#else

// A part of a tensor, `count` elements in each array. g, m and v are fp32, or bf16 where `narrow`.
struct adamw_part {
    floatX *params;
    uint16_t *remainder; // NULL: none
    const void *g;
    void *m, *v;
    const uint32_t *words; // of random numbers
};
// Updates `count` elements of a part by their tensor's f. split: parameters have a remainder. One loop: two are slower.
ALWAYS_INLINE void adamw_update_part(struct adamw_part part, int count, struct adamw_factors f, bool split,
                                     bool narrow) {
    floatX *__restrict__ params = part.params;
    uint16_t *__restrict__ remainder = part.remainder;
    const float *__restrict__ g = (const float *)part.g;
    float *__restrict__ m = (float *)part.m, *__restrict__ v = (float *)part.v;
    const bf16 *__restrict__ g_bf16 = (const bf16 *)part.g;
    bf16 *__restrict__ m_bf16 = (bf16 *)part.m, *__restrict__ v_bf16 = (bf16 *)part.v;
    const uint32_t *__restrict__ words = part.words;
#pragma omp simd
    for (int i = 0; i < count; i++) {
        float first = narrow ? bf16_to_float(m_bf16[i]) : m[i], second = narrow ? bf16_to_float(v_bf16[i]) : v[i];
        float value = split ? parameter_joined(params[i], remainder[i]) : to_float(params[i]);
        value = adamw_element(value, narrow ? bf16_to_float(g_bf16[i]) : g[i], &first, &second, f);
        params[i] = split ? parameter_rounded(value) : parameter_stochastic(value, words[i] & 0xffffu);
        if (split)
            remainder[i] = split_low(value);
        if (narrow) {
            m_bf16[i] = bf16_from_float(first);
            v_bf16[i] = bf16_stochastic(second, words[i] >> 16);
        } else {
            m[i] = first;
            v[i] = second;
        }
    }
}
// Updates r's elements [at, at + count) by their tensor's f and rounding. at % STATE_BLOCK = 0, count <= FLAT_PART.
static inline void adamw_tensor_part(const struct adamw_range *r, int64_t at, int count, struct adamw_factors f,
                                     struct rounding rounding) {
    float g_room[FLAT_PART], m_room[FLAT_PART], v_room[FLAT_PART];
    uint32_t words[FLAT_PART];
    void *g_blocks = state_at((void *)r->grads, r->grads_format, at);
    void *m_blocks = state_at(r->m, r->m_format, at), *v_blocks = state_at(r->v, r->v_format, at);
    const bool narrow = r->grads_format == FORMAT_BF16 && r->m_format == FORMAT_BF16 && r->v_format == FORMAT_BF16;
    struct adamw_part part;
    part.params = r->params + at;
    part.remainder = r->remainder ? r->remainder + at : NULL;
    part.words = words;
    part.g = narrow ? g_blocks : state_decoded(g_blocks, r->grads_format, g_room, count);
    part.m = narrow ? m_blocks : state_decoded(m_blocks, r->m_format, m_room, count);
    part.v = narrow ? v_blocks : state_decoded(v_blocks, r->v_format, v_room, count);
    for (int i = 0; i < count && adamw_needs_random_words(r); i += PHILOX_CHUNK)
        rounding_chunk(words + i, rounding, at + i);
    if (part.remainder && narrow)
        adamw_update_part(part, count, f, true, true);
    else if (part.remainder)
        adamw_update_part(part, count, f, true, false);
    else if (narrow)
        adamw_update_part(part, count, f, false, true);
    else
        adamw_update_part(part, count, f, false, false);
    if (!narrow) {
        state_encode_decoded(m_blocks, r->m_format, m_room, count, NULL);
        state_encode_decoded(v_blocks, r->v_format, v_room, count, words);
    }
}
// Updates r's [begin, end), at most FLAT_PART elements, if `finite`, and merges amaxes in any case. f is the step's.
static inline void adamw_part_of_range(const struct adamw_range *r, const struct flat_tensors *tensors, int64_t begin,
                                       int64_t end, bool finite, struct adamw_factors f, struct rounding rounding) {
    int row = -1;
    for (int64_t first = r->begin + begin, last; flat_tensors_next(tensors, r->begin + end, &row, &first, &last);
         first = last) {
        const struct flat_tensor *t = &tensors->rows[row];
        const int64_t at = first - r->begin;
        if (finite)
            adamw_tensor_part(r, at, (int)(last - first), adamw_tensor_factors(f, t),
                              tensor_rounding(rounding, *t, row, r->begin));
        amax_merge_elements(t->amax, r->params + at, last - first);
    }
}
void adamw_update(struct adamw_range r, struct flat_tensors tensors, struct adamw adamw,
                  const struct gradient_check *check, struct device *dev) {
    const struct rounding rounding = adamw_rounding(&adamw);
    struct adamw_factors f = adamw_factors_of(adamw);
    const bool finite = check == NULL || check->finite;
    if (!finite && !tensors.has_amaxes)
        return;
    if (finite && check != NULL)
        f.grad_scale *= check->grad_scale;
#pragma omp parallel for schedule(static)
    for (int64_t begin = 0; begin < r.n; begin += FLAT_PART)
        adamw_part_of_range(&r, &tensors, begin, r.n - begin < FLAT_PART ? r.n : begin + FLAT_PART, finite, f,
                            rounding);
}

#endif
