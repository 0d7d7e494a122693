#include "kernels/muon.cuh"
#include "kernels/device_memory.cuh" // device_zero
#include "kernels/flat_states.cuh"   // state_four_load, state_decoded, flat_merge_amaxes
#include "kernels/vectors.cuh"       // ALWAYS_INLINE

#ifdef TARGET_CUDA

static __global__ void muon_momentum_kernel(struct muon_momentum_range r, struct flat_tensors tensors, float rest,
                                            const struct gradient_check *check) {
    const int64_t at = ((int64_t)blockIdx.x * FLAT_THREADS + threadIdx.x) * 4;
    int count = r.n - at >= 4 ? 4 : r.n > at ? (int)(r.n - at) : 0;
    const four<float> g = state_four_load(r.grads, r.grads_format, at, count);
    four<float> momentum = state_four_load(r.momentum, r.format, at, count);
    const int row = flat_tensor_at_warp(tensors, r.begin + at / STATE_BLOCK * STATE_BLOCK);
    const bool finite = check == NULL || check->finite;
    const float scale = check == NULL ? 1 : check->grad_scale;
    four<floatX> update = {};
    count = flat_tensor_clip_count(tensors.rows[row], r.begin + at, count);
    for (int i = 0; i < 4 && finite; i++) {
        float u;
        momentum.x[i] = muon_momentum_element(momentum.x[i], g.x[i] * scale, r.mu, rest, r.nesterov, &u);
        update.x[i] = to_floatX(u);
    }
    if (finite)
        state_four_store(r.momentum, r.format, at, momentum, count, false, philox_words{});
    four_store(r.update + at, update, count);
}
void muon_momentum(struct muon_momentum_range r, struct flat_tensors tensors, const struct gradient_check *check,
                   struct device *dev) {
    if (r.n > 0)
        LAUNCH(dev, muon_momentum_kernel, blocks_for(r.n, 4 * FLAT_THREADS), FLAT_THREADS, 0, r, tensors,
               (float)(1 - (double)r.mu), check);
}

// Does muon_step for four elements a thread, loads first as in adamw_four. A STATE_BLOCK may have several matrices.
template <bool AMAX>
static __global__ void muon_step_kernel(struct muon_step_range r, struct flat_tensors tensors,
                                        struct flat_tensors matrices, struct muon_factors factors,
                                        const struct gradient_check *check) {
    const int64_t at = ((int64_t)blockIdx.x * FLAT_THREADS + threadIdx.x) * 4;
    int count = r.n - at >= 4 ? 4 : r.n > at ? (int)(r.n - at) : 0;
    const four<floatX> factor = four_load(r.factor + at, count);
    four<floatX> rounded = four_load(r.params + at, count);
    four<uint16_t> low = {};
    if (r.remainder != NULL)
        low = four_load(r.remainder + at, count);
    const int64_t block = r.begin + at / STATE_BLOCK * STATE_BLOCK;
    const int index = flat_tensor_at_warp(tensors, block);
    int matrix = flat_tensor_at_warp(matrices, block);
    const struct flat_tensor tensor = tensors.rows[index];
    count = flat_tensor_clip_count(tensor, r.begin + at, count);
    if (check == NULL || check->finite) {
        struct philox_words random = {};
        factors = muon_tensor_factors(factors, &tensor);
        if (muon_is_stochastic(&r))
            random = rounding_words(tensor_rounding(r.rounding, tensor, index, r.begin), at);
        for (int i = 0; i < 4; i++) {
            while (i < count && matrices.rows[matrix].end <= r.begin + at + i)
                matrix++;
            const float before =
                r.remainder != NULL ? parameter_joined(rounded.x[i], low.x[i]) : to_float(rounded.x[i]);
            const float value =
                factors.keep * before - factors.lr * matrices.rows[matrix].scale * to_float(factor.x[i]);
            rounded.x[i] = muon_is_stochastic(&r) ? parameter_stochastic(value, random.word[i] & 0xffffu)
                                                  : parameter_rounded(value);
            low.x[i] = split_low(value);
        }
        if (r.remainder != NULL)
            four_store(r.remainder + at, low, count);
        four_store(r.params + at, rounded, count);
    }
    if (!AMAX)
        return;
    uint32_t largest = 0;
    for (int i = 0; i < 4; i++)
        if (i < count)
            largest = amax_with(largest, rounded.x[i]);
    flat_merge_amaxes(tensors, index, largest, shared_memory());
}
void muon_step(struct muon_step_range r, struct flat_tensors tensors, struct flat_tensors matrices,
               const struct gradient_check *check, struct device *dev) {
    if (r.n > 0)
        LAUNCH(dev, (tensors.has_amaxes ? muon_step_kernel<true> : muon_step_kernel<false>),
               blocks_for(r.n, 4 * FLAT_THREADS), FLAT_THREADS, tensors.has_amaxes ? FLAT_AMAX_BYTES : 0, r, tensors,
               matrices, muon_factors_of(&r), check);
}

#else

// Does muon_momentum for flat elements [first, last) of one tensor, FLAT_PART at most. `first` begins a block.
static inline void muon_momentum_part(const struct muon_momentum_range *r, int64_t first, int64_t last, float scale) {
    float g_room[FLAT_PART], m_room[FLAT_PART];
    const int64_t at = first - r->begin;
    const int count = (int)(last - first);
    const float mu = r->mu, rest = (float)(1 - (double)r->mu);
    const bool nesterov = r->nesterov;
    void *blocks = state_at(r->momentum, r->format, at);
    const float *g = state_decoded(state_at((void *)r->grads, r->grads_format, at), r->grads_format, g_room, count);
    float *m = state_decoded(blocks, r->format, m_room, count);
    floatX *update = r->update + at;
#pragma omp simd
    for (int i = 0; i < count; i++) {
        float u;
        m[i] = muon_momentum_element(m[i], g[i] * scale, mu, rest, nesterov, &u);
        update[i] = to_floatX(u);
    }
    state_encode_decoded(blocks, r->format, m_room, count, NULL);
}
void muon_momentum(struct muon_momentum_range r, struct flat_tensors tensors, const struct gradient_check *check,
                   struct device *dev) {
    if (check != NULL && !check->finite) {
        device_zero(r.update, (size_t)r.n * sizeof *r.update, dev);
        return;
    }
    const float scale = check == NULL ? 1 : check->grad_scale;
#pragma omp parallel for schedule(static)
    for (int64_t part = 0; part < r.n; part += FLAT_PART) {
        const int64_t end = r.begin + (r.n - part < FLAT_PART ? r.n : part + FLAT_PART);
        int row = -1;
        for (int64_t first = r.begin + part, last; flat_tensors_next(&tensors, end, &row, &first, &last); first = last)
            muon_momentum_part(&r, first, last, scale);
    }
}

// Updates flat elements [first, last) of one matrix: value = keep value - step factor. With `split` they have a
// remainder, and words may be NULL. Else words (last - first) are their random numbers, which are not read in fp32.
ALWAYS_INLINE void muon_step_elements(const struct muon_step_range *r, int64_t first, int64_t last, float keep,
                                      float step, const uint32_t *words, bool split) {
    const int64_t at = first - r->begin, count = last - first;
    floatX *__restrict__ params = r->params + at;
    uint16_t *__restrict__ remainder = r->remainder + (split ? at : 0);
    const floatX *__restrict__ factor = r->factor + at;
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        const float before = split ? parameter_joined(params[i], remainder[i]) : to_float(params[i]);
        const float value = keep * before - step * to_float(factor[i]);
        params[i] = split ? parameter_rounded(value) : parameter_stochastic(value, words[i] & 0xffffu);
        if (split)
            remainder[i] = split_low(value);
    }
}
// Updates flat elements [part, end) as far as they are in `matrices`. They are at most FLAT_PART elements of one
// tensor. f are this tensor's factors (muon_tensor_factors), and `rounding` is set to it (tensor_rounding).
static inline void muon_step_part(const struct muon_step_range *r, int64_t part, int64_t end, struct muon_factors f,
                                  const struct flat_tensors *matrices, struct rounding rounding) {
    uint32_t words[FLAT_PART];
    for (int64_t i = part; i < end && muon_is_stochastic(r); i += PHILOX_CHUNK)
        rounding_chunk(words + (i - part), rounding, i - r->begin);
    int row = -1;
    for (int64_t first = part, last; flat_tensors_next(matrices, end, &row, &first, &last); first = last) {
        const float step = f.lr * matrices->rows[row].scale;
        if (r->remainder)
            muon_step_elements(r, first, last, f.keep, step, NULL, true);
        else
            muon_step_elements(r, first, last, f.keep, step, words + (first - part), false);
    }
}
void muon_step(struct muon_step_range r, struct flat_tensors tensors, struct flat_tensors matrices,
               const struct gradient_check *check, struct device *dev) {
    const bool finite = check == NULL || check->finite;
    const struct muon_factors factors = muon_factors_of(&r);
#pragma omp parallel for schedule(static)
    for (int64_t part = 0; part < r.n; part += FLAT_PART) {
        const int64_t end = r.begin + (r.n - part < FLAT_PART ? r.n : part + FLAT_PART);
        int row = -1;
        for (int64_t first = r.begin + part, last; flat_tensors_next(&tensors, end, &row, &first, &last);
             first = last) {
            const struct flat_tensor *t = &tensors.rows[row];
            if (finite)
                muon_step_part(&r, first, last, muon_tensor_factors(factors, t), &matrices,
                               tensor_rounding(r.rounding, *t, row, r.begin));
            amax_merge_elements(t->amax, r.params + (first - r.begin), last - first);
        }
    }
}

#endif
