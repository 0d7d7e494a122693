// The emulator of a GPU, an object of its own that each copy of the engine and each test's program links: what
// test/emu/cuda_runtime.h, warp.h and sm90.h declare. A kernel's object has only what must be inline, since this part
// takes two seconds to compile.
#include "test/emu/async.h"        // emu_explain_wait
#include "test/emu/cuda_runtime.h" // cudaError_t
#include "test/emu/fibers.h"       // emu_run_kernel
#include "test/emu/streams.h"      // emu_enqueue

// --- The device ---------------------------------------------------------------------------------------------------

const char *cudaGetErrorString(cudaError_t status) {
    switch (status) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNoKernelImageForDevice: return "no kernel image is available for execution on the device";
    case cudaErrorECCUncorrectable: return "uncorrectable ECC error encountered";
    case cudaErrorNvlinkUncorrectable: return "uncorrectable NVLink error detected during the execution";
    case cudaErrorInvalidResourceHandle: return "invalid resource handle";
    case cudaErrorIllegalState: return "the operation cannot be performed in the present state";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorLaunchTimeout: return "the launch timed out and was terminated";
    case cudaErrorAssert: return "device-side assert triggered";
    case cudaErrorHardwareStackError: return "hardware stack error";
    case cudaErrorIllegalInstruction: return "an illegal instruction was encountered";
    case cudaErrorMisalignedAddress: return "misaligned address";
    case cudaErrorInvalidAddressSpace: return "operation not supported on global/shared address space";
    case cudaErrorInvalidPc: return "invalid program counter";
    case cudaErrorLaunchFailure: return "unspecified launch failure";
    case cudaErrorHostMemoryAlreadyRegistered: return "part or all of the requested memory range is already mapped";
    case cudaErrorHostMemoryNotRegistered: return "pointer does not correspond to a registered memory region";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureMerge: return "operation would result in a merge of separate capture sequences";
    case cudaErrorStreamCaptureUnmatched: return "capture was not ended in the same stream as it began";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
    case cudaErrorStreamCaptureImplicit:
        return "operation would make the legacy stream depend on a capturing blocking stream";
    case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
    }
    return "unrecognized error code";
}
cudaError_t cudaGetLastError(void) {
    const cudaError_t status = emu_last_error;
    emu_last_error = cudaSuccess;
    return status;
}
cudaError_t cudaGetDeviceCount(int *count) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    const bool none = visible && (visible[0] == 0 || strcmp(visible, "-1") == 0);
    const char *devices = getenv("EMU_DEVICES");
    *count = none ? 0 : devices ? atoi(devices) : 1;
    return none ? emu_error(cudaErrorNoDevice) : cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    int count;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess)
        return status;
    if (device < 0 || device >= count)
        return emu_error(cudaErrorInvalidDevice);
    emu_device = device;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
    *device = emu_device;
    return cudaSuccess;
}
static void emu_read_capability(int *major, int *minor) {
    const char *capability = getenv("EMU_CAPABILITY");
    if (sscanf(capability ? capability : "8.0", "%d.%d", major, minor) != 2)
        emu_report("EMU_CAPABILITY is not of the form 9.0: %s", capability);
}
// Returns the most shared memory that a block can have on a GPU of the compute capability.
static int emu_shared_bytes_max(void) {
    int major, minor;
    emu_read_capability(&major, &minor);
    const bool small = (major == 8 && (minor == 6 || minor == 9)) || major >= 12;
    return (small ? 99 : major == 8 ? 163 : EMU_MAX_SHARED_BYTES / 1024) * 1024;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "emulated GPU");
    properties->totalGlobalMem = emu_memory_bytes();
    properties->sharedMemPerBlock = EMU_DEFAULT_SHARED_BYTES;
    properties->sharedMemPerBlockOptin = emu_shared_bytes_max();
    emu_read_capability(&properties->major, &properties->minor);
    properties->managedMemory = properties->concurrentManagedAccess = 1;
    const char *multiprocessors = getenv("EMU_MULTIPROCESSORS");
    properties->multiProcessorCount = multiprocessors ? atoi(multiprocessors) : 3;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = EMU_MAX_THREADS;
    properties->l2CacheSize = 1 << 17; // small, so that tests run the schedules for tensors that exceed it
    int count;
    const cudaError_t status = cudaGetDeviceCount(&count);
    return status != cudaSuccess ? status
                                 : emu_error(device >= 0 && device < count ? cudaSuccess : cudaErrorInvalidDevice);
}

// --- Memory -------------------------------------------------------------------------------------------------------

cudaError_t emu_allocate(void **memory, size_t bytes, enum emu_memory_kind kind) {
    const cudaError_t status = emu_forbid_while_recording();
    *memory = NULL;
    if (status != cudaSuccess || bytes == 0)
        return status;
    *memory = emu_memory_allocate(bytes, kind);
    return emu_error(*memory ? cudaSuccess : cudaErrorMemoryAllocation);
}
static inline cudaError_t emu_free(void *memory, bool pinned) {
    const cudaError_t status = emu_forbid_while_recording();
    if (status != cudaSuccess || !memory)
        return status;
    emu_run_everything();
    emu_memory_open();
    emu_check_red_zones("(or the host, since the last)");
    emu_memory_close();
    return emu_error(emu_memory_free(memory, pinned) ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaFree(void *memory) { return emu_free(memory, false); }
cudaError_t cudaFreeHost(void *memory) { return emu_free(memory, true); }
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *total = emu_memory_bytes();
    *available = *total > emu_allocated_bytes ? *total - emu_allocated_bytes : 0;
    return cudaSuccess;
}

// Memory of the host, allocated elsewhere, whose pages were then pinned.
struct emu_registration {
    const char *begin, *end;
};
static std::vector<struct emu_registration> emu_registrations;

cudaError_t cudaHostRegister(void *memory, size_t bytes, unsigned flags) {
    const cudaError_t status = emu_forbid_while_recording();
    const char *limit = getenv("EMU_PINNED_BYTES"), *begin = (const char *)memory, *end = begin + bytes;
    size_t pinned = bytes;
    if (status != cudaSuccess)
        return status;
    if (!memory || bytes == 0 || flags != cudaHostRegisterDefault)
        return emu_error(cudaErrorInvalidValue);
    for (const struct emu_registration &r : emu_registrations) {
        if (begin < r.end && r.begin < end)
            return emu_error(cudaErrorHostMemoryAlreadyRegistered);
        pinned += (size_t)(r.end - r.begin);
    }
    if (limit && pinned > (size_t)strtoull(limit, NULL, 0))
        return emu_error(cudaErrorMemoryAllocation);
    for (const char *page = begin; page < end; page += EMU_PAGE) {
        unsigned char resident = 0;
        if (mincore((void *)((uintptr_t)page / EMU_PAGE * EMU_PAGE), 1, &resident) != 0 || !(resident & 1))
            emu_report("cudaHostRegister: the page at %p was never touched: one thread would touch them all", page);
    }
    const struct emu_registration registration = {begin, end};
    emu_registrations.push_back(registration);
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *memory) {
    const cudaError_t status = emu_forbid_while_recording();
    if (status != cudaSuccess)
        return status;
    emu_run_everything();
    for (size_t i = 0; i < emu_registrations.size(); i++)
        if (emu_registrations[i].begin == memory) {
            emu_registrations.erase(emu_registrations.begin() + (long)i);
            return cudaSuccess;
        }
    return emu_error(cudaErrorHostMemoryNotRegistered);
}
static bool emu_is_pinned(const void *memory, size_t bytes) {
    const struct emu_allocation *a = emu_find_allocation(memory);
    bool pinned = a && a->kind != EMU_DEVICE;
    for (const struct emu_registration &r : emu_registrations)
        pinned = pinned || ((const char *)memory >= r.begin && (const char *)memory + bytes <= r.end);
    return pinned;
}
cudaError_t cudaDeviceGetPCIBusId(char *address, int length, int device) {
    snprintf(address, (size_t)length, "0000:FF:1F.%d", device % 8); // an address at which no machine has a device
    return cudaSuccess;
}

// Reports a copy whose `kind` contradicts what is known of an address, or that leaves an allocation.
static inline void emu_check_copy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    const struct emu_allocation *target = emu_find_allocation(to), *source = emu_find_allocation(from);
    emu_check_range(to, bytes, "a copy writes");
    emu_check_range(from, bytes, "a copy reads");
    if (target && target->kind == EMU_DEVICE && (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyHostToHost))
        emu_report("a copy to the host writes to device memory");
    if (source && source->kind == EMU_DEVICE && (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyHostToHost))
        emu_report("a copy from the host reads device memory");
    if (target && target->kind == EMU_PINNED && (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice))
        emu_report("a copy to the device writes to memory of the host");
    if (source && source->kind == EMU_PINNED && (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice))
        emu_report("a copy from the device reads memory of the host");
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    emu_check_copy(to, from, bytes, kind);
    // CUDA stages such a copy through memory of its own while the host waits, so that it would not run beside the
    // stream that computes.
    if (stream && stream->beside && !stream->computes && bytes > 0 &&
        ((kind == cudaMemcpyHostToDevice && !emu_is_pinned(from, bytes)) ||
         (kind == cudaMemcpyDeviceToHost && !emu_is_pinned(to, bytes))))
        emu_report("a copy on a stream beside the first one uses memory of the host that is not pinned");
    return bytes == 0 ? cudaSuccess : emu_enqueue(stream, "a copy", [=] {
        if (stream)
            stream->copies++;
        memmove(to, from, bytes);
    });
}
cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream) {
    emu_check_range(memory, bytes, "cudaMemset writes");
    if (stream)
        stream->computes = true;
    return bytes == 0 ? cudaSuccess : emu_enqueue(stream, "cudaMemset", [=] { memset(memory, value, bytes); });
}

// --- Launches -----------------------------------------------------------------------------------------------------

// A kernel that may have more dynamic shared memory than others.
struct emu_shared_limit {
    const void *kernel;
    int bytes;
};
static std::vector<struct emu_shared_limit> emu_shared_limits;
static int emu_shared_limit_of(const void *kernel) {
    for (const struct emu_shared_limit &limit : emu_shared_limits)
        if (limit.kernel == kernel)
            return limit.bytes;
    return EMU_DEFAULT_SHARED_BYTES;
}
cudaError_t emu_set_shared_limit(const void *kernel, int bytes) {
    if (bytes < 0 || bytes > emu_shared_bytes_max())
        return emu_error(cudaErrorInvalidValue);
    for (struct emu_shared_limit &limit : emu_shared_limits)
        if (limit.kernel == kernel) {
            limit.bytes = bytes;
            return cudaSuccess;
        }
    const struct emu_shared_limit limit = {kernel, bytes};
    emu_shared_limits.push_back(limit);
    return cudaSuccess;
}

// Reports a launch that no GPU takes.
static void emu_check_launch(const char *name, const cudaLaunchConfig_t *config, const void *kernel) {
    const dim3 grid = config->gridDim, block = config->blockDim;
    const uint64_t threads = (uint64_t)block.x * block.y * block.z;
    if (threads < 1 || threads > EMU_MAX_THREADS || block.z > 64)
        emu_report("kernel %s: launched with a block of %u x %u x %u threads; 1 to 1024 are possible, and 64 in z",
                   name, block.x, block.y, block.z);
    if (grid.x < 1 || grid.y < 1 || grid.z < 1 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
        emu_report(
            "kernel %s: launched with a grid of %u x %u x %u blocks; 1 to 2147483647 x 65535 x 65535 are possible",
            name, grid.x, grid.y, grid.z);
    if (config->dynamicSmemBytes > (size_t)emu_shared_bytes_max())
        emu_report("kernel %s: launched with %zu bytes of shared memory; a block can have %d", name,
                   config->dynamicSmemBytes, emu_shared_bytes_max());
    if (config->dynamicSmemBytes > (size_t)emu_shared_limit_of(kernel))
        emu_report("kernel %s: launched with %zu bytes of shared memory; without cudaFuncSetAttribute it can have %d",
                   name, config->dynamicSmemBytes, emu_shared_limit_of(kernel));
}

static uint64_t emu_launches; // launches that ran so far

cudaError_t emu_launch_call(const char *name, const cudaLaunchConfig_t *config, const void *kernel,
                            void (*body)(void *), const void *call, size_t bytes) {
    emu_check_launch(name, config, kernel);
    if (emu_planted.kind == EMU_REFUSED && strstr(name, emu_planted.name))
        return emu_error(cudaErrorInvalidValue);
    if (config->stream)
        config->stream->computes = true;
    const dim3 grid = config->gridDim, size = config->blockDim;
    const uint32_t shared_bytes = (uint32_t)config->dynamicSmemBytes;
    // the work holds the call; a tensor map among its arguments is aligned to 64 bytes
    const std::shared_ptr<void> kept(aligned_alloc(64, (bytes + 63) / 64 * 64), free);
    memcpy(kept.get(), call, bytes);
    return emu_enqueue(config->stream, name, [=] {
        struct emu_kernel launch = {name, grid, size, shared_bytes, body, kept.get(), emu_launches++, NULL, NULL};
        emu_conflicts += emu_run_kernel(&launch);
    });
}
