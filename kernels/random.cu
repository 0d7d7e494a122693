#include "kernels/random.cuh"

#ifdef TARGET_CUDA
static __global__ void dropout_step_kernel(uint64_t *micro_step, uint64_t value) { *micro_step = value; }
void dropout_step_set(uint64_t *micro_step, uint64_t value, struct device *dev) {
    LAUNCH(dev, dropout_step_kernel, 1, 1, 0, micro_step, value);
}
#else
void dropout_step_set(uint64_t *micro_step, uint64_t value, struct device *dev) { *micro_step = value; }
#endif

void dropout_scales(float *out, struct dropout d, uint64_t first_element, int n) {
    const float kept = 1.0f / (1.0f - d.p);
    const uint64_t step = dropout_step(d);
    // the test uniform >= p, in whole steps of 2^-24
    const int32_t dropped_below = (int32_t)ceilf(d.p * 0x1p24f);
    const int skip = (int)(first_element % 4); // elements of the first block that lie before first_element
    for (int i = -skip; i < n; i += PHILOX_CHUNK) {
        uint32_t words[PHILOX_CHUNK];
        float parts[PHILOX_CHUNK];
        philox_chunk(words, (first_element + (uint64_t)(int64_t)i) / 4, (uint32_t)step, d.layer << 8 | d.use, d.seed);
        const int from = i < 0 ? -i : 0, to = n - i < PHILOX_CHUNK ? n - i : (int)PHILOX_CHUNK;
        float *scales = to - from == PHILOX_CHUNK ? out + i : parts;
#pragma omp simd
        for (int k = 0; k < PHILOX_CHUNK; k++)
            scales[k] = (int32_t)(words[k] >> 8) >= dropped_below ? kept : 0.0f;
        if (scales == parts)
            memcpy(out + i + from, parts + from, (size_t)(to - from) * sizeof *out);
    }
}

// Draws by Box-Muller: each pair of words (u1, u2) makes r cos(2 pi u2) and r sin(2 pi u2), with r = sqrt(-2 ln u1).
void random_normal(float *out, int64_t n, float std, uint64_t seed, uint64_t stream, uint64_t first_element) {
    const int64_t skip = (int64_t)(first_element % 4);
#pragma omp parallel for schedule(static)
    for (int64_t i = -skip; i < n; i += PHILOX_CHUNK) {
        uint32_t words[PHILOX_CHUNK];
        float normals[PHILOX_CHUNK];
        philox_chunk(words, (first_element + (uint64_t)i) / 4, (uint32_t)stream, stream_word(stream), seed);
#pragma omp simd
        for (int pair = 0; pair < PHILOX_CHUNK / 2; pair++) {
            // Half a step keeps u1 off 0; all 32 bits of it let z reach 6.7.
            const float u1 = (float)words[2 * pair] * 0x1p-32f + 0x1p-33f;
            const float radius = std * sqrtf(-2.0f * vector_logf(u1));
            float sine, cosine;
            vector_sincos_turn(&sine, &cosine, (float)words[2 * pair + 1] * 0x1p-32f);
            normals[2 * pair] = radius * cosine;
            normals[2 * pair + 1] = radius * sine;
        }
        const int from = i < 0 ? (int)-i : 0, to = n - i < PHILOX_CHUNK ? (int)(n - i) : PHILOX_CHUNK;
        for (int k = from; k < to; k++)
            out[i + k] = normals[k];
    }
}
