// All that differs between targets and precisions at the bottom: floatX and the device that ops run on.
//
// floatX is the type of parameters and activations. A translation unit is compiled once per precision: with
// PRECISION_BF16 defined floatX is bf16, without it float. Sums are fp32 in both.
//
// What every op looks like: outputs first, then inputs, then sizes, then `workspace` where the op needs scratch memory
// (the op exports NAME_workspace_bytes, and the caller plans it), then the device. Ops allocate nothing.
#pragma once
#include <stdbool.h> // bool
#include <stddef.h>  // size_t
#include <stdint.h>  // uint16_t, uint32_t, int64_t
#include <string.h>  // memcpy

// Brain floating point: the upper half of a float. A struct, so that the compiler refuses arithmetic on the bits.
typedef struct {
    uint16_t bits;
} bf16;

static inline float bf16_to_float(bf16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Rounds to nearest, ties to even; a NaN stays a NaN (its payload could round to infinity otherwise).
static inline bf16 bf16_from_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40u;
    bf16 result;
    result.bits = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
    return result;
}

#ifdef PRECISION_BF16
typedef bf16 floatX;
#define FLOATX_NAME "bf16"
static inline float to_float(floatX x) { return bf16_to_float(x); }
static inline floatX to_floatX(float x) { return bf16_from_float(x); }
#else
typedef float floatX;
#define FLOATX_NAME "fp32"
static inline float to_float(floatX x) { return x; }
static inline floatX to_floatX(float x) { return x; }
#endif

// What the host does with memory of the device. On the cpu target both are one.
static inline void device_upload(void *device_memory, const void *host, size_t bytes) {
    memcpy(device_memory, host, bytes);
}
static inline void device_download(void *host, const void *device_memory, size_t bytes) {
    memcpy(host, device_memory, bytes);
}
// Zeroes at memory bandwidth, which takes every thread.
static inline void device_zero(void *device_memory, size_t bytes) {
    const int64_t chunk = 1 << 20, chunks = ((int64_t)bytes + chunk - 1) / chunk;
#pragma omp parallel for
    for (int64_t i = 0; i < chunks; i++) {
        const int64_t begin = i * chunk, rest = (int64_t)bytes - begin;
        memset((char *)device_memory + begin, 0, (size_t)(rest < chunk ? rest : chunk));
    }
}

struct matmul_library; // kernels/matmul.cuh

// What an op runs on. One per process; passed to every op as its last argument.
struct device {
    int threads;                   // OpenMP threads
    struct matmul_library *matmul; // handles and cached plans of the matmul library, made by matmul_create
};
