#include "kernels/state_format.cuh"

void state_decode(float *out, const void *state, enum state_format format, int64_t n) {
    const int64_t blocks = (n + STATE_BLOCK - 1) / STATE_BLOCK, bytes = (int64_t)state_block_bytes(format);
#pragma omp parallel for schedule(static) if (blocks >= 64)
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t at = b * STATE_BLOCK;
        state_decode_block(out + at, (const char *)state + b * bytes, format,
                           n - at < STATE_BLOCK ? (int)(n - at) : (int)STATE_BLOCK);
    }
}
void state_encode(void *state, const float *values, enum state_format format, int64_t n) {
    const int64_t blocks = (n + STATE_BLOCK - 1) / STATE_BLOCK, bytes = (int64_t)state_block_bytes(format);
#pragma omp parallel for schedule(static) if (blocks >= 64)
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t at = b * STATE_BLOCK;
        char *block = (char *)state + b * bytes;
        if (n - at < STATE_BLOCK && (format == FORMAT_8BIT || format == FORMAT_8BIT_ROOT))
            memset(block, 0, (size_t)bytes);
        state_encode_block(block, values + at, format, n - at < STATE_BLOCK ? (int)(n - at) : (int)STATE_BLOCK);
    }
}
