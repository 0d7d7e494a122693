// Attention of one new token per sequence against a cache of keys and values, as generation needs it.
// A cache is a ring of the last `capacity` positions of each sequence: position p lies in slot p % capacity. Where
// every query sees all keys up to its own, capacity is the longest sequence, and the ring never turns. A layer with a
// window has min(window, longest sequence) slots: the keys that are still there are those that the window shows, so
// that nothing here takes the window itself. Keys are summed in the order of the slots.
#pragma once
#include "kernels/attention/shape.cuh" // struct attention_shape
#include "kernels/device.cuh"          // floatX, struct device
#include "kernels/positions.cuh"       // position_of
#include "kernels/vector_math.cuh"     // LOG2E, vector_tanhf
#include <sys/cdefs.h>                 // __BEGIN_DECLS

__BEGIN_DECLS
// Stores the k and v of (B, T) tokens, taken from their qkv rows, in the caches at positions starts[b] to starts[b] + T
// - 1. Leaves out positions before ends[b] - capacity, as a prompt may be longer than the ring, and positions from
// ends[b] on, whose rows are no tokens and must not push a prompt's tokens out. Other slots stay.
void kv_cache_append(floatX *keys,          // (B, Hkv, capacity, D)
                     floatX *values,        // (B, Hkv, capacity, D)
                     const floatX *qkv,     // (B, T, (H + 2 Hkv) * D)
                     const int32_t *starts, // (B) in device memory; NULL: 0
                     const int32_t *ends,   // (B) in device memory; NULL: starts[b] + T, as all T tokens count
                     int capacity, struct attention_shape shape, struct device *dev);

static size_t attention_decode_workspace_bytes(struct attention_shape shape, int capacity, struct device *dev) {
    return 0;
}
// out = softmax(cap(scale q K^T)) V over the min(positions[b] + 1, capacity) keys up to positions[b]. The last is the
// new token's own, so call kv_cache_append first. Doesn't read shape.T, first_key, last_query or workspace. D <= 256.
void attention_decode(floatX *out,              // (B, H * D)
                      const floatX *qkv,        // (B, (H + 2 Hkv) * D)
                      const floatX *keys,       // (B, Hkv, capacity, D)
                      const floatX *values,     // (B, Hkv, capacity, D)
                      const int32_t *positions, // (B) of the new tokens, in device memory
                      int capacity, struct attention_shape shape, void *workspace, struct device *dev);
__END_DECLS

// Returns the slot where kv_cache_append, with these starts and ends, stores a row of (B, T) tokens; -1: nowhere.
HOST_DEVICE int kv_cache_slot(const int32_t *starts, const int32_t *ends, int capacity, int64_t row, int T) {
    const int position = (int)position_of(starts, row, T);
    const int end = ends ? ends[row / T] : position + T - (int)(row % T);
    return position < end && position >= end - capacity ? position % capacity : -1;
}
// The number of cached keys that sequence b's new token attends to, with its own key.
HOST_DEVICE int decode_num_keys(const int32_t *positions, int64_t b, int capacity) {
    return positions[b] < capacity ? positions[b] + 1 : capacity;
}
// Returns the factor that turns q k into a score in units of ln 2 or, with a softcap, into the argument of decode_cap.
HOST_DEVICE float decode_scale(struct attention_shape shape) {
    return shape.softcap > 0 ? shape.scale / shape.softcap : shape.scale * LOG2E;
}
// Returns the capped score in units of ln 2, from q k times decode_scale. softcap > 0.
HOST_DEVICE float decode_cap(float score, float softcap) { return softcap * LOG2E * vector_tanhf(score); }
