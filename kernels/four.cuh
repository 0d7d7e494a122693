// Four neighbors in flat ranges, as the kernels over gradients and states of the optimizer take them.
#pragma once
#include "kernels/device.cuh" // DEVICE_FUNCTION

#ifdef TARGET_CUDA

enum { FLAT_THREADS = 256 };

template <class T> struct alignas(4 * sizeof(T)) four { T x[4]; };
// Tells the emulator of an access to four elements, whose address and order it checks; on a GPU does nothing.
template <class T> DEVICE_FUNCTION void four_check(const T *at, bool write) {
#ifdef CUDA_EMULATED
    emu_access_global(at, sizeof(four<T>), write);
#endif
}
// Whether four elements at this address can be read or written in one access.
template <class T> DEVICE_FUNCTION bool four_aligned(const T *at) { return (uintptr_t)at % sizeof(four<T>) == 0; }
// Returns from[0..3], with 0 in place of elements from `count` on, which are not read. Takes any alignment.
template <class T> DEVICE_FUNCTION struct four<T> four_load(const T *from, int count) {
    if (count >= 4 && four_aligned(from)) {
        four_check(from, false);
        return *(const four<T> *)from;
    }
    four<T> result = {};
    for (int i = 0; i < 4; i++)
        if (i < count)
            result.x[i] = from[i];
    return result;
}
// Stores the first `count` of value.x[0..3] at `to`, of any alignment. Stores nothing where count <= 0.
template <class T>
DEVICE_FUNCTION void four_store(T *to, const four<T> &value, int count) {
    if (count >= 4 && four_aligned(to)) {
        four_check(to, true);
        *(four<T> *)to = value;
    } else
        for (int i = 0; i < 4; i++)
            if (i < count)
                to[i] = value.x[i];
}

#endif
