// Global memory in 16-byte accesses, for CUDA kernels: what one thread reads and writes at a time.
#pragma once
#include "kernels/device.cuh" // floatX, DEVICE_FUNCTION

#ifdef TARGET_CUDA

enum { PACK = 16 / (int)sizeof(floatX) }; // elements of one access

struct packed {
    floatX x[PACK];
};

// Whether p is a multiple of 16 bytes, as packed_load and packed_store need it.
HOST_DEVICE bool packed_aligned(const void *p) { return (uintptr_t)p % 16 == 0; }

// Tells the emulator of a 16-byte access, whose address and order it checks; on a GPU does nothing.
DEVICE_FUNCTION void packed_check(const void *p, bool write) {
#ifdef CUDA_EMULATED
    emu_touch_global(p, 16, write);
#endif
}
// Tells the emulator of a write of 8 bytes, as packed_check does.
DEVICE_FUNCTION void pair_check(void *p) {
#ifdef CUDA_EMULATED
    emu_touch_global(p, 8, true);
#endif
}

// Loads a pack in one access; `from` is aligned to 16 bytes.
DEVICE_FUNCTION struct packed packed_load(const floatX *from) {
    struct packed result;
    packed_check(from, false);
    const uint4 words = *(const uint4 *)from;
    memcpy(&result, &words, sizeof result);
    return result;
}
// Loads a pack as packed_load does or, unless `valid`, returns zeros and does not read `from`. By a predicated
// instruction: with a branch the compiler makes two copies of the loop around it, which take more registers together.
DEVICE_FUNCTION struct packed packed_load_if(const floatX *from, bool valid) {
#ifdef __CUDACC__
    struct packed result;
    uint4 words;
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
                 "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
                 "@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
                 : "=&r"(words.x), "=&r"(words.y), "=&r"(words.z), "=&r"(words.w)
                 : "l"(__cvta_generic_to_global(from)), "r"((int)valid));
    memcpy(&result, &words, sizeof result);
    return result;
#else
    const struct packed none = {};
    return valid ? packed_load(from) : none;
#endif
}
// Stores a pack in one access; `to` is aligned to 16 bytes.
DEVICE_FUNCTION void packed_store(floatX *to, const struct packed &value) {
    uint4 words;
    memcpy(&words, &value, sizeof words);
    packed_check(to, true);
    *(uint4 *)to = words;
}
// Stores as packed_store does, by inline PTX, for kernels in which the compiler splits the assignment into four stores
// of 4 bytes (cuobjdump -sass shows STG.E in place of STG.E.128). In other kernels it takes more registers.
DEVICE_FUNCTION void packed_store_unsplit(floatX *to, const struct packed &value) {
#ifdef __CUDACC__
    uint4 words;
    memcpy(&words, &value, sizeof words);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words.x),
                 "r"(words.y), "r"(words.z), "r"(words.w)
                 : "memory");
#else
    packed_store(to, value);
#endif
}
// Returns the first `count` elements, PACK at most, others 0, at any alignment; in one access where that is possible.
DEVICE_FUNCTION struct packed packed_load_some(const floatX *from, int64_t count) {
    if (count >= PACK && packed_aligned(from))
        return packed_load(from);
    struct packed result;
    for (int i = 0; i < PACK; i++)
        result.x[i] = i < count ? from[i] : to_floatX(0);
    return result;
}
// Stores the first `count` elements, PACK at most, at any alignment; in one access where that is possible.
DEVICE_FUNCTION void packed_store_some(floatX *to, const struct packed &value, int64_t count) {
    if (count >= PACK && packed_aligned(to))
        packed_store(to, value);
    else
        for (int i = 0; i < PACK && i < count; i++)
            to[i] = value.x[i];
}

#endif
