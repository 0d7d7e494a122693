// Holds what forward and backward of flash attention for Hopper (sm_90a) share: bf16 with sums in fp32. Attention is
// causal, with or without tables of the first key that each query sees, or full. The design of these files:
// - Tiles come and go by TMA, with 4-D maps (D, heads, T, B) of packed (B, T, (H + 2 Hkv) D): query head h reads KV
//   head h / (H / Hkv). Rows past T read as 0 and are not written; the causal mask hides them from queries below T.
// - A tile in shared memory is what TMA makes of its boxes: chunks of 64 columns (32 where 64 doesn't divide a head),
//   one after the other, each of ROWS rows of 128 (64) bytes, whose 16-byte units are XORed with the row's number.
// - A block is a producer warpgroup, of which one thread or a few start the copies, and consumer warpgroups, which
//   multiply by wgmma; they synchronize by full and empty mbarriers. setmaxnreg divides the registers among them.
// - Only instances of their own (the plan's SPANS) pay for the tables of first keys. There tiles that nobody sees are
//   neither loaded nor multiplied, and every warp that needs a range of tiles reads it from the tables for itself.
// - Every result has one writer and every sum one order, so that the same inputs give the same bits; except dQ where
//   options.any_order is set. At head dim 256 with several heads a group it is ignored: turns are faster.
// - lse is to base 2 and includes the scale: max scale log2(e) + log2(sum), which backward subtracts before its exp2.
#pragma once
#ifndef PRECISION_BF16
#error "these kernels take only bf16"
#endif
#include "kernels/amax.cuh"            // amax_larger, amax_merge_warp
#include "kernels/attention/flash.cuh" // the prototypes of what the two files define
#include "kernels/device.cuh"          // bf16, floatX, struct device, LAUNCH
#include "kernels/gpu_sizes.cuh"       // sm90_shape_unavailable_reason, sm90_backward_layout_of
#include "kernels/ptx.cuh"             // shared_memory, exp2_approx, pack_bf16x2
#include "kernels/ptx_sm90.cuh"        // wgmma, TMA, mbarriers
#include "kernels/tensor_map.cuh"      // tensor_map_of
#include "kernels/vector_math.cuh"     // LOG2E
#include "runtime/machine/error.h"     // fail
#include <stdio.h>                     // snprintf

// Returns the device's properties; all zero where there is no device, as when a run is only planned.
static struct cudaDeviceProp sm90_properties(const struct device *dev) {
    struct cudaDeviceProp properties;
    int count = 0;
    memset(&properties, 0, sizeof properties);
    if (cudaGetDeviceCount(&count) != cudaSuccess || count <= dev->index ||
        cudaGetDeviceProperties(&properties, dev->index) != cudaSuccess) {
        cudaGetLastError(); // clears the error: that there is no device is none here
        memset(&properties, 0, sizeof properties);
    }
    return properties;
}

// --- Tiles --------------------------------------------------------------------------------------------------------

// A tile's rows of D bf16 in shared memory.
template <int D> struct sm90_layout {
    static constexpr int COLUMNS = D % 64 == 0 ? 64 : 32; // of a chunk
    static constexpr int SPAN = 2 * COLUMNS;              // bytes of a chunk's row
    static constexpr int CHUNKS = D / COLUMNS;
    static constexpr int SWIZZLE = COLUMNS == 64 ? 1 : 2; // as matrix_descriptor has it
};

// Returns the swizzled byte offset of the 16-byte unit at byte `offset` of a chunk. Chunks begin at multiples of 1024.
template <int D> DEVICE_FUNCTION uint32_t sm90_swizzled(uint32_t offset) {
    return offset ^ ((offset >> 7 & (uint32_t)(sm90_layout<D>::SPAN / 16 - 1)) << 4);
}

// Returns wgmma's descriptor of a tile that is multiplied along its rows (K-major), in steps of 16 columns.
template <int D> DEVICE_FUNCTION uint64_t sm90_along_rows(uint32_t tile) {
    return matrix_descriptor(tile, 16, 8 * sm90_layout<D>::SPAN, sm90_layout<D>::SWIZZLE);
}
// Returns the descriptor of sm90_along_rows moved by k steps of 16 columns, in a tile of ROWS rows.
template <int D, int ROWS> DEVICE_FUNCTION uint64_t sm90_step_right(uint64_t descriptor, int k) {
    constexpr int STEPS = sm90_layout<D>::COLUMNS / 16;
    return descriptor + (uint64_t)((k / STEPS * ROWS * sm90_layout<D>::SPAN + k % STEPS * 32) >> 4);
}
// Returns wgmma's descriptor of a tile that is multiplied along its columns (MN-major), in steps of 16 rows.
template <int D, int ROWS> DEVICE_FUNCTION uint64_t sm90_along_columns(uint32_t tile) {
    return matrix_descriptor(tile, ROWS * sm90_layout<D>::SPAN, 8 * sm90_layout<D>::SPAN, sm90_layout<D>::SWIZZLE);
}
// Returns the descriptor of sm90_along_columns moved by k steps of 16 rows.
template <int D> DEVICE_FUNCTION uint64_t sm90_step_down(uint64_t descriptor, int k) {
    return descriptor + (uint64_t)((k * 16 * sm90_layout<D>::SPAN) >> 4);
}

// Starts copying ROWS rows of a head from row `first` on to a tile. One thread calls, once `barrier` expects its bytes.
template <int D, int ROWS>
DEVICE_FUNCTION void sm90_load_tile(uint32_t tile, const struct tensor_map *map, uint32_t barrier, int head, int first,
                                    int b, uint64_t policy) {
    typedef sm90_layout<D> layout;
#pragma unroll
    for (int c = 0; c < layout::CHUNKS; c++)
        tma_load_4d(tile + (uint32_t)(c * ROWS * layout::SPAN), map, barrier, c * layout::COLUMNS, head, first, b,
                    policy);
}
// Stores this warp's 16 rows of a warpgroup's accumulators (64 x D), as bf16, to the warp's rows of a tile of 64 rows.
template <int D> DEVICE_FUNCTION void sm90_put_rows(uint32_t tile, const float *acc /*[D / 2]*/) {
    typedef sm90_layout<D> layout;
    const uint32_t lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        struct word_x4 words;
#pragma unroll
        for (int i = 0; i < 4; i++)
            words.x[i] = pack_bf16x2(acc[8 * k + 2 * i], acc[8 * k + 2 * i + 1]);
        const uint32_t piece = (uint32_t)(16 * k % layout::COLUMNS / 8) + lane / 16;
        const uint32_t chunk = (uint32_t)(16 * k / layout::COLUMNS * 64 * layout::SPAN);
        stmatrix_x4(tile + chunk + sm90_swizzled<D>(row * layout::SPAN + 16 * piece), words);
    }
}

// Starts copying this warp's 16 rows of a tile, where sm90_put_rows stored them, to global memory. first: the tile's
// first row in T; `map` has boxes of 16 rows. One thread of the warp calls, after all have fenced, and commits.
template <int D>
DEVICE_FUNCTION void sm90_copy_rows(const struct tensor_map *map, uint32_t tile, int head, int first, int b) {
    typedef sm90_layout<D> layout;
    const int row = (int)threadIdx.x / 32 % 4 * 16;
#pragma unroll
    for (int c = 0; c < layout::CHUNKS; c++)
        tma_store_4d(map, tile + (uint32_t)((c * 64 + row) * layout::SPAN), c * layout::COLUMNS, head, first + row, b);
}

// Returns this thread's first row of a warpgroup's 64. Element i of its accumulators is at row 8 (i / 2 % 2) +
// sm90_row() and column 8 (i / 4) + i % 2 + sm90_column().
DEVICE_FUNCTION int sm90_row(void) { return (int)threadIdx.x / 32 % 4 * 16 + (int)threadIdx.x % 32 / 4; }
DEVICE_FUNCTION int sm90_column(void) { return 2 * ((int)threadIdx.x % 4); }

// Returns the maximum, as fp32's bits, of `largest` and the magnitudes of the eight bf16 elements of `words`.
DEVICE_FUNCTION uint32_t sm90_amax_words(uint32_t largest, const struct word_x4 &words) {
#pragma unroll
    for (int i = 0; i < 4; i++)
        largest = amax_larger(largest, amax_larger(words.x[i] << 16 & 0x7fff0000u, words.x[i] & 0x7fff0000u));
    return largest;
}
// Returns the bits of the largest magnitude in this lane's part of the warp's first `left` rows, where sm90_put_rows
// stored them. amax_merge_warp joins the lanes. Taking amax from accumulators made loops up to 7 % longer.
template <int D> DEVICE_FUNCTION uint32_t sm90_amax_of_rows(uint32_t tile, int left) {
    typedef sm90_layout<D> layout;
    const uint32_t lane = threadIdx.x % 32, units = layout::SPAN / 16;
    const uint32_t from = tile + (threadIdx.x / 32 % 4 * 16 * units + lane) * 16;
    uint32_t largest = 0;
    __syncwarp();
#pragma unroll 1
    for (uint32_t c = 0; c < layout::CHUNKS; c++)
#pragma unroll
        for (uint32_t i = 0; i < units / 2; i++)
            if ((int)((32 * i + lane) / units) < left)
                largest = sm90_amax_words(largest, load_shared_words(from + c * 64 * layout::SPAN + i * 512));
    return largest;
}

// --- Divisions ----------------------------------------------------------------------------------------------------

// Division by a number that the host knows, done as a product. It takes a few clocks where a division takes a hundred,
// and ptxas believes that a division's result differs among a warp's lanes.
struct sm90_divisor {
    uint32_t divisor, multiplier, shift;
};
// Returns what sm90_quotient needs to divide by a number > 0.
static struct sm90_divisor sm90_divisor_of(int divisor) {
    struct sm90_divisor by = {(uint32_t)divisor, 0, 31};
    while (1ull << by.shift < (uint64_t)by.divisor << 31)
        by.shift++;
    by.multiplier = (uint32_t)(((1ull << by.shift) + by.divisor - 1) / by.divisor);
    return by;
}
// Returns x / by.divisor, for 0 <= x < 2^31 (Granlund and Montgomery, 1994).
DEVICE_FUNCTION int sm90_quotient(int x, const struct sm90_divisor &by) {
    return (int)((uint64_t)(uint32_t)x * by.multiplier >> by.shift);
}
// --- Pipelines ----------------------------------------------------------------------------------------------------

// STAGES buffers, each with a full and an empty barrier of 8 bytes. All full barriers come before the empty ones.
template <int STAGES> struct sm90_pipeline {
    uint32_t barriers;
    int use; // the tiles that went through

    __device__ __forceinline__ uint32_t stage(void) const { return (uint32_t)(use % STAGES); }
    __device__ __forceinline__ uint32_t full(void) const { return barriers + 8 * stage(); }
    __device__ __forceinline__ uint32_t empty(void) const { return barriers + 8 * (STAGES + stage()); }
    __device__ __forceinline__ void wait_full(void) const { mbarrier_wait(full(), (uint32_t)(use / STAGES % 2)); }
    // The first use of a buffer finds it empty.
    __device__ __forceinline__ void wait_empty(void) const { mbarrier_wait(empty(), (uint32_t)(use / STAGES % 2 ^ 1)); }
    // Initializes the barriers; `readers` arrivals make a buffer empty. One thread calls, before the others use them.
    __device__ __forceinline__ void open(int readers) const {
        for (uint32_t i = 0; i < STAGES; i++) {
            mbarrier_init(barriers + 8 * i, 1);
            mbarrier_init(barriers + 8 * (STAGES + i), (uint32_t)readers);
        }
    }
};
// Signals at barrier `empty` that this warp has read a buffer. All lanes call, after __syncwarp unless wgmma read it.
DEVICE_FUNCTION void sm90_release(uint32_t empty) {
    if (elect_one())
        mbarrier_arrive(empty);
}

// --- Host ---------------------------------------------------------------------------------------------------------

// Returns the map of (B, T, heads * D), in boxes of `rows` rows of one head and the columns of one chunk (sm90_layout).
template <int D>
static struct tensor_map sm90_map(const bf16 *base, int heads, struct attention_shape shape, int rows) {
    const uint64_t row_bytes = (uint64_t)heads * D * sizeof(bf16);
    const uint64_t dims[4] = {(uint64_t)D, (uint64_t)heads, (uint64_t)shape.T, (uint64_t)shape.B};
    const uint64_t strides[3] = {D * sizeof(bf16), row_bytes, row_bytes * (uint64_t)shape.T};
    return tensor_map_of(base, dims, strides, sm90_layout<D>::COLUMNS, rows);
}
// The number of heads side by side in a row of qkv: of q, k and v.
static int sm90_packed_heads(struct attention_shape shape) { return shape.num_heads + 2 * shape.num_query_groups; }

// Ends the program where the kernels can't take the shape, `full` has a first_key, or a pointer isn't aligned to 16.
static void sm90_check(const void *const aligned[], int count, struct attention_shape shape) {
    char reason[128];
    sm90_shape_unavailable_reason(reason, sizeof reason, shape);
    if (*reason)
        fail("flash attention by wgmma %s", reason);
    if (shape.full && shape.first_key)
        fail("attention without a causal mask has no first keys");
    for (int i = 0; i < count; i++)
        if ((uintptr_t)aligned[i] % 16 != 0)
            fail("flash attention by wgmma reads 16 bytes at a time, and a buffer is not aligned to that");
}

// Calls launcher::launch<D> for the shape's head dim. sm90_check must have taken the shape.
template <class launcher, class arguments>
static void sm90_choose(const arguments &a, struct attention_shape shape, struct device *dev) {
    switch (shape.head_dim) {
    case 64: launcher::template launch<64>(a, shape, dev); break;
    case 96: launcher::template launch<96>(a, shape, dev); break;
    case 128: launcher::template launch<128>(a, shape, dev); break;
    default: launcher::template launch<256>(a, shape, dev);
    }
}
