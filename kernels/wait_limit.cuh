// A time limit for the loops in which a thread waits for others (mbarrier_wait, wait_acquire). With DEVICE_WAIT_LIMIT
// defined, in seconds, a longer wait ends the kernel, and the error says which thread waited where for what.
//
// A call of printf would change the kernel that is tested: its wgmmas would run one by one, and setmaxnreg might be
// ignored. So the thread leaves a record in pinned memory of the host, and traps; all of it is one asm to the compiler.
#pragma once
#ifdef TARGET_CUDA
#include <cuda_runtime.h> // cudaMallocHost, cudaMemcpyToSymbol
#include <stdint.h>       // uint64_t
#include <stdio.h>        // snprintf
#include <string.h>       // memset, strcmp

// The record of a wait that took too long. PTX_WAIT in kernels/ptx_sm90.cuh writes it, at the offsets in the comments.
struct wait_record {
    uint64_t address;             // 0: of an mbarrier in shared memory, or of an int in global memory
    uint32_t mbarrier;            // 8: 1 for an mbarrier, 0 for an int
    int awaited;                  // 12: the parity of a phase, or the int's value
    int found;                    // 16: the int's value
    unsigned block[3], thread[3]; // 20, 32
    int place;                    // 44: wait_place; 0: no thread has waited too long
};
static_assert(sizeof(struct wait_record) == 48, "as PTX_WAIT has it");

// A place is a line and the number of a file, one of those whose threads wait.
enum { WAIT_FILES = 16 };
// Returns the last two parts of the path of the file of that number, from 1 on; "another file" for other numbers.
__host__ __device__ static constexpr const char *wait_file(int number) {
    return number == 1   ? "attention/sm90.cuh"
           : number == 2 ? "attention/sm90_forward.cu"
           : number == 3 ? "attention/sm90_backward.cu"
           : number == 4 ? "cuda/unit_sm90.cu"
                         : "another file";
}
__host__ __device__ static constexpr bool wait_same_text(const char *a, const char *b) {
    return *a == *b && (*a == 0 || wait_same_text(a + 1, b + 1));
}
// Returns a place: line * WAIT_FILES + the number that wait_file has for the path's file, WAIT_FILES - 1 for others.
__host__ __device__ static constexpr int wait_place(const char *path, int line) {
    const char *name = path, *last = path; // after the last slash but one, and after the last
    int file = 1;
    for (const char *at = path; *at; at++)
        if (*at == '/') {
            name = last;
            last = at + 1;
        }
    while (file < WAIT_FILES - 1 && !wait_same_text(name, wait_file(file)))
        file++;
    return line * WAIT_FILES + file;
}

// Writes which thread has waited where, for what and for `seconds`, the limit, to text (size bytes); returns text.
static inline const char *wait_describe(char *text, size_t size, const struct wait_record *r, double seconds) {
    char what[128];
    if (r->mbarrier)
        snprintf(what, sizeof what, "the phase of parity %d of the mbarrier at shared address 0x%llx", r->awaited,
                 (unsigned long long)r->address);
    else
        snprintf(what, sizeof what, "%d at address 0x%llx, which is %d", r->awaited, (unsigned long long)r->address,
                 r->found);
    snprintf(text, size, "block (%u, %u, %u), thread (%u, %u, %u) has waited for %g s at %s:%d for %s", r->block[0],
             r->block[1], r->block[2], r->thread[0], r->thread[1], r->thread[2], seconds,
             wait_file(r->place % WAIT_FILES), r->place / WAIT_FILES, what);
    return text;
}

#if defined(DEVICE_WAIT_LIMIT) && defined(__CUDACC__)
static_assert((DEVICE_WAIT_LIMIT) > 0 && (DEVICE_WAIT_LIMIT) <= 4, "seconds that 32 bits of nanoseconds hold");
enum : uint32_t { WAIT_LIMIT_NS = (uint32_t)(1e9 * (DEVICE_WAIT_LIMIT)) };

// PTX_WAIT uses these by their names.
extern "C" {
static __device__ __attribute__((used)) struct wait_record *device_wait_record; // NULL: no memory for a record
static __device__ __attribute__((used)) int device_wait_taken;                  // 1: a thread has written the record
}
// Returns the record, which all files share: pinned, never freed, zero until a wait is too long. NULL: no memory.
inline struct wait_record *wait_limit_record(void) {
    static struct wait_record *const record = [] {
        struct wait_record *memory = NULL;
        if (cudaMallocHost((void **)&memory, sizeof *memory) == cudaSuccess)
            memset(memory, 0, sizeof *memory);
        return memory;
    }();
    return record;
}
// Tells this compiled file's kernels where the record is, at the first call; LAUNCH calls this. Returns CUDA's error.
static cudaError_t wait_limit_open(void) {
    static const cudaError_t status = [] {
        struct wait_record *const record = wait_limit_record();
        return record ? cudaMemcpyToSymbol(device_wait_record, &record, sizeof record) : cudaGetLastError();
    }();
    return status;
}
// Returns the end of an error's message, in static memory: which thread has waited too long, or "" where none has.
static const char *wait_limit_message(void) {
    static char text[512] = ": ";
    const struct wait_record *record = wait_limit_record();
    return record && record->place > 0 ? (wait_describe(text + 2, sizeof text - 2, record, DEVICE_WAIT_LIMIT), text)
                                       : "";
}
#else // the emulator finds a thread that waits for ever by itself
static inline cudaError_t wait_limit_open(void) { return cudaSuccess; }
static inline const char *wait_limit_message(void) { return ""; }
#endif
#endif
