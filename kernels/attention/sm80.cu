// Flash attention by mma.sync, for sm_80 and every GPU after it: causal, bf16 or fp32 in and out, sums in fp32.
//
//   S = Q K^T, P = softmax(scale S) over j <= i, O = dropout(P) V
//
// after FlashAttention-2 (Dao 2023, arXiv 2307.08691): no (T, T) matrix reaches memory; forward keeps the logarithm of
// each row's sum (lse), from which backward makes P again.
//
// The design of attention/sm80_tiles.cuh, attention/sm80_forward.cuh and attention/sm80_backward.cuh:
// - Packed (B, T, (H + 2 Hkv) D) is read by 16 bytes; K and V are never expanded: head h reads KV head h / (H / Hkv).
// - Every result has one writer and every sum one order, so that the same inputs give the same bits.
// - Rows past T are zeroes in shared memory and are not written. The causal mask hides keys past T from the others.
// - Tiles have 64, 96, 128 or 256 columns. Other heads, multiples of 8, are padded to these by instances of their own.
// - Backward is two kernels. One holds dQ of a block of queries in registers and runs over the keys; it also makes
//   delta = rowsum(dO O). The other holds dK and dV of a block of keys and runs over the queries of every head of the
//   group. S and dP are made twice: 7 matmuls, not 5, but dQ needs neither an fp32 buffer nor an order among blocks.
// - With spans (spans.cuh) a tile of queries meets the tiles of keys from first_key of its first query to the diagonal;
//   a tile of keys meets the tiles of queries from there to last_query of its last key. Only edge tiles are masked.
// - An amax is taken by a kernel of its own, where rope_backward does not take it: in the others it made ptxas spill.
// - In fp32 a product is three of TF32 (3xTF32: small big + big small + big big, as in CUTLASS), to errors of 2e-6. As
//   tensor cores truncate sums, a sum leaves them every 64 of depth, else errors are 1.5e-5. The operands of S and dP
//   come by ldmatrix, the other products' right operands by 32-bit loads, as ldmatrix can't transpose floats.
// - In shared memory the 16-byte units of a row are XORed with the row's number, so that the eight rows an ldmatrix
//   reads lie in different banks, and in fp32 the 32 words that a warp loads: rows 0, 2, 4 and 6 by two units.
#if defined(TARGET_CUDA)
#include "kernels/attention/flash.cuh"         // the prototypes of what is defined here
#include "kernels/attention/sm80_backward.cuh" // flash_backward_query_kernel, flash_backward_key_kernel
#include "kernels/attention/sm80_forward.cuh"  // flash_forward_kernel
#include "kernels/device.cuh"                  // floatX, struct device, LAUNCH
#include "kernels/fp8/cast.cuh"                // fp8_amax
#include "kernels/gpu_sizes.cuh"               // gpu_flash_backward_bytes
#include "kernels/vector_math.cuh"             // LOG2E
#include "runtime/machine/error.h"             // fail
#include <stdio.h>                             // snprintf
#include <string.h>                            // memset

void flash_unavailable_reason(char *reason, size_t size, struct attention_shape shape, const struct device *dev) {
    gpu_flash_unavailable_reason(reason, size, shape);
}
const char *flash_describe(const struct device *dev) { return GPU_FLASH_NAME; }
bool flash_is_slower(const struct device *dev) {
    struct compute_capability gpu = dev->planned;
    struct cudaDeviceProp properties;
    if (gpu.major == 0 && cudaGetDeviceProperties(&properties, dev->index) == cudaSuccess) {
        gpu.major = properties.major;
        gpu.minor = properties.minor;
    }
    cudaGetLastError(); // clears the error: that there is no device is none here
    return gpu_flash_is_slower(gpu);
}
size_t flash_forward_workspace_bytes(struct attention_shape shape, const struct device *dev) { return 0; }
size_t flash_backward_workspace_bytes(struct attention_shape shape, const struct device *dev) {
    return gpu_flash_backward_bytes(shape);
}

// --- Launches -----------------------------------------------------------------------------------------------------

// Returns the grid for blocks that take `rows` queries or keys of a head each: x is along T, y over heads, z over B.
static dim3 flash_grid(struct attention_shape shape, int rows, int heads) {
    return dim3(blocks_for(shape.T, rows), (unsigned)heads, (unsigned)shape.B);
}
// Returns a kernel's arguments: `any`, with `spans` or NULL. At its first use asks CUDA to allow its shared memory.
template <class plan>
static typename plan::arguments flash_prepare(void (*kernel)(typename plan::arguments), const int32_t *spans,
                                              const struct flash_any_arguments &any) {
    // Once a kernel: more than 48 KB of shared memory has to be asked for.
    static const cudaError_t prepared =
        cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan::SHARED_BYTES);
    cuda_check(prepared);
    struct flash_any_arguments with_spans = any;
    with_spans.spans = spans;
    return with_spans;
}

struct flash_forward_launcher {
    template <int D, bool DROPOUT, bool PADDED, flash_scores SCORES>
    static void launch(const struct flash_any_arguments &a, struct attention_shape shape, struct device *dev) {
        typedef forward_plan<D, DROPOUT, PADDED, SCORES> plan;
        LAUNCH(dev, flash_forward_kernel<plan>, flash_grid(shape, plan::QUERIES, shape.num_heads), plan::THREADS,
               plan::SHARED_BYTES, flash_prepare<plan>(flash_forward_kernel<plan>, shape.first_key, a));
    }
};
struct flash_backward_launcher {
    template <int D, bool DROPOUT, bool PADDED, flash_scores SCORES>
    static void launch(const struct flash_any_arguments &a, struct attention_shape shape, struct device *dev) {
        typedef backward_query_plan<D, DROPOUT, PADDED, SCORES> query;
        typedef backward_key_plan<D, DROPOUT, PADDED, SCORES> key;
        LAUNCH(dev, flash_backward_query_kernel<query>, flash_grid(shape, query::QUERIES, shape.num_heads),
               query::THREADS, query::SHARED_BYTES,
               flash_prepare<query>(flash_backward_query_kernel<query>, shape.first_key, a));
        LAUNCH(dev, flash_backward_key_kernel<key>, flash_grid(shape, key::KEYS, shape.num_query_groups), key::THREADS,
               key::SHARED_BYTES, flash_prepare<key>(flash_backward_key_kernel<key>, shape.last_query, a));
    }
};

// Enqueues the instance for a tile of D columns. A softcap, or spans with dropout, takes flash_choose_any instead.
template <class launcher, int D>
static void flash_choose_plan(const struct flash_any_arguments &a, struct attention_shape shape, struct device *dev) {
    const bool dropout = a.dropout.p > 0, exact = a.head_dim == D;
    if (shape.first_key && exact)
        launcher::template launch<D, false, false, FLASH_SPANS>(a, shape, dev);
    else if (shape.first_key)
        launcher::template launch<D, false, true, FLASH_SPANS>(a, shape, dev);
    else if (dropout && exact)
        launcher::template launch<D, true, false, FLASH_CAUSAL>(a, shape, dev);
    else if (dropout)
        launcher::template launch<D, true, true, FLASH_CAUSAL>(a, shape, dev);
    else if (exact)
        launcher::template launch<D, false, false, FLASH_CAUSAL>(a, shape, dev);
    else
        launcher::template launch<D, false, true, FLASH_CAUSAL>(a, shape, dev);
}
// Enqueues the instance for a softcap, or spans with dropout. As these are rare, they have instances only with padding.
template <class launcher, int D>
static void flash_choose_any(const struct flash_any_arguments &a, struct attention_shape shape, struct device *dev) {
    if (a.dropout.p > 0)
        launcher::template launch<D, true, true, FLASH_ANY>(a, shape, dev);
    else
        launcher::template launch<D, false, true, FLASH_ANY>(a, shape, dev);
}
// Enqueues the instance with the smallest tile that holds a head. flash_choose_any has no tile of 96 columns.
template <class launcher>
static void flash_choose(const struct flash_any_arguments &a, struct attention_shape shape, struct device *dev) {
    const bool any = shape.softcap > 0 || (shape.first_key && a.dropout.p > 0);
    if (any && a.head_dim <= 64)
        flash_choose_any<launcher, 64>(a, shape, dev);
    else if (any && a.head_dim <= 128)
        flash_choose_any<launcher, 128>(a, shape, dev);
    else if (any)
        flash_choose_any<launcher, 256>(a, shape, dev);
    else if (a.head_dim <= 64)
        flash_choose_plan<launcher, 64>(a, shape, dev);
    else if (a.head_dim <= 96)
        flash_choose_plan<launcher, 96>(a, shape, dev);
    else if (a.head_dim <= 128)
        flash_choose_plan<launcher, 128>(a, shape, dev);
    else
        flash_choose_plan<launcher, 256>(a, shape, dev);
}

// Returns the arguments, with no pointer set but qkv. Ends the program where the kernels don't take the shape, or where
// a pointer in `aligned` isn't aligned to 16 bytes. A NULL in `aligned` is fine.
static struct flash_any_arguments flash_arguments_of(const floatX *qkv, const void *const aligned[4],
                                                     struct attention_shape shape, struct dropout dropout) {
    char reason[128];
    gpu_flash_unavailable_reason(reason, sizeof reason, shape);
    if (*reason)
        fail("flash attention on CUDA %s", reason);
    for (int i = 0; i < 4; i++)
        if ((uintptr_t)aligned[i] % 16 != 0)
            fail("flash attention on CUDA reads 16 bytes at a time, and a buffer is not aligned to that");
    struct flash_any_arguments a;
    memset(&a, 0, sizeof a);
    a.qkv = qkv;
    a.T = shape.T;
    a.H = shape.num_heads;
    a.Hkv = shape.num_query_groups;
    a.head_dim = shape.head_dim;
    a.qkv_stride = (a.H + 2 * a.Hkv) * shape.head_dim;
    a.out_stride = a.H * shape.head_dim;
    a.group_magic = ((1u << 31) - 1) / (uint32_t)(a.H / a.Hkv) + 1;
    a.scale = shape.scale;
    a.dropout = dropout;
    a.unit = shape.softcap > 0 ? shape.softcap : shape.scale;
    a.cap_factor = shape.softcap > 0 ? (FP32 ? 1 : 2 * LOG2E) * shape.scale / shape.softcap : 0;
    return a;
}

void flash_forward(floatX *out, float *lse, const floatX *qkv, struct attention_shape shape, struct dropout dropout,
                   uint32_t *amax, void *workspace, struct device *dev) {
    const void *const aligned[4] = {qkv, out, NULL, NULL};
    struct flash_any_arguments a = flash_arguments_of(qkv, aligned, shape, dropout);
    a.out = out;
    a.lse = lse;
    flash_choose<flash_forward_launcher>(a, shape, dev);
    if (amax)
        fp8_amax(amax, out, (int64_t)shape.B * shape.T * a.out_stride, dev);
}

void flash_backward(floatX *dqkv, const floatX *dout, const floatX *qkv, const floatX *out, const float *lse,
                    struct attention_shape shape, struct dropout dropout, uint32_t *amax, void *workspace,
                    struct device *dev) {
    const void *const aligned[4] = {qkv, dout, dqkv, out};
    struct flash_any_arguments a = flash_arguments_of(qkv, aligned, shape, dropout);
    a.out = (floatX *)out;
    a.lse = (float *)lse;
    a.dout = dout;
    a.dqkv = dqkv;
    a.rows = (float2 *)workspace;
    flash_choose<flash_backward_launcher>(a, shape, dev);
    if (amax)
        fp8_amax(amax, dqkv, (int64_t)shape.B * shape.T * a.qkv_stride, dev);
}

#endif
