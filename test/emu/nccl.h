// Stand-in for the part of NCCL that kernels/collectives_nccl.cuh uses, over MPI: its ranks are the ranks of
// MPI_COMM_WORLD, which the program has initialized.
//
// A collective runs when its stream does (test/emu/stream.h), and sums as NCCL's ring does: the sum for rank r begins
// with rank r + 1's part and ends with rank r's own. bf16 is rounded after each addition.
//
// It takes memory of the device for a communicator (EMU_NCCL_BYTES), and more when a collective first uses an
// algorithm, as NCCL does since 2.22. Here each function has one algorithm for small and one for large messages.
//
// Sends and receives run when their group ends.
//
// It is stricter than the library, and ends the program with status 3 at
// - messages that overlap, or whose receiver expects another number of bytes than are sent,
// - collectives that differ between the ranks in function, count, type or turn, where NCCL would hang or mix data up,
// - pointers that are not the device's, ranges that leave an allocation, results that overlap what is sent in another
//   way than NCCL's "in place",
// - a collective that is enqueued while a graph is recorded, or a communicator that is destroyed before all its work
//   has run.
// Like NCCL, it refuses a communicator whose ranks disagree on the id or the number of ranks, or share a device, and a
// call from a thread that has chosen another device.
#pragma once
#include "test/emu/enqueue.h" // emu_enqueue
#include <cuda_runtime.h>     // cudaStream_t, emu_enqueue, emu_device
#include <limits.h>           // INT_MAX
#define OMPI_SKIP_MPICXX 1    // the C interface in C++ too
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>    // MPI_Alltoall
#include <stdarg.h> // va_list
#include <string>   // std::string
#include <unistd.h> // gethostname

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7
} ncclResult_t;
typedef enum { ncclUint8 = 1, ncclFloat32 = 7, ncclBfloat16 = 9 } ncclDataType_t;
typedef enum { ncclSum = 0 } ncclRedOp_t;
#define NCCL_VERSION(major, minor, patch) ((major)*10000 + (minor)*100 + (patch))
#define NCCL_VERSION_CODE NCCL_VERSION(2, 27, 0)
enum { NCCL_UNIQUE_ID_BYTES = 128, EMU_NCCL_MADE = 0x6e63636c };
enum { EMU_NCCL_LARGE = 8192 }; // of a rank's part, from which on a collective counts as large
static const size_t EMU_NCCL_COMMUNICATOR_BYTES = 3 << 20, EMU_NCCL_ALGORITHM_BYTES = 1 << 20;
typedef struct {
    char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

static inline ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

// A collective that a rank is about to run; the ranks compare these before data move.
struct emu_nccl_call {
    char function[32];
    uint64_t turn, count;
    ncclDataType_t type;
};
typedef struct emu_nccl_communicator {
    int made, rank, ranks, device;
    MPI_Comm mpi;
    uint64_t enqueued, done;
    uint64_t groups, groups_done; // of messages; only ranks with messages count them
    std::vector<void *> memory;
    std::vector<std::string> algorithms; // used so far
} * ncclComm_t;

inline char emu_nccl_last_error[512];
__attribute__((format(printf, 2, 3))) static inline ncclResult_t emu_nccl_error(ncclResult_t status, const char *format,
                                                                                ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(emu_nccl_last_error, sizeof emu_nccl_last_error, format, arguments);
    va_end(arguments);
    return status;
}
static inline const char *ncclGetLastError(ncclComm_t) { return emu_nccl_last_error; }
static inline const char *ncclGetErrorString(ncclResult_t status) {
    static const char *const texts[] = {"no error",
                                        "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
                                        "unhandled system error (run with NCCL_DEBUG=INFO for details)",
                                        "internal error - please report this issue to the NCCL developers",
                                        "invalid argument (run with NCCL_DEBUG=WARN for details)",
                                        "invalid usage (run with NCCL_DEBUG=WARN for details)",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return texts[status];
}

// Takes memory of the device for as long as the communicator lives.
static inline ncclResult_t emu_nccl_take(ncclComm_t comm, size_t bytes) {
    void *memory = NULL;
    const cudaError_t status = cudaMalloc(&memory, bytes);
    if (status != cudaSuccess)
        return emu_nccl_error(ncclUnhandledCudaError, "Cuda failure '%s'", cudaGetErrorString(status));
    comm->memory.push_back(memory);
    return ncclSuccess;
}

// --- Communicators ------------------------------------------------------------------------------------------------

static inline ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    FILE *random = fopen("/dev/urandom", "rb");
    const bool read = random && fread(id->internal, sizeof id->internal, 1, random) == 1;
    if (random)
        fclose(random);
    return read ? ncclSuccess : emu_nccl_error(ncclSystemError, "no random bytes");
}

struct emu_nccl_hello {
    ncclUniqueId id;
    int ranks, rank, device;
    char host[256];
};
// Checks what all ranks asked for. Every rank sees all of it, and so finds the same.
static inline ncclResult_t emu_nccl_check_hellos(const std::vector<struct emu_nccl_hello> &all) {
    const int ranks = (int)all.size();
    for (int r = 0; r < ranks; r++) {
        const struct emu_nccl_hello *one = &all[(size_t)r];
        if (one->ranks != ranks)
            return emu_nccl_error(ncclInvalidArgument, "rank %d asks for %d ranks; there are %d", r, one->ranks, ranks);
        if (one->rank != r)
            return emu_nccl_error(ncclInvalidArgument, "MPI's rank %d calls itself %d", r, one->rank);
        if (memcmp(&one->id, &all[0].id, sizeof one->id) != 0)
            return emu_nccl_error(ncclInvalidArgument, "rank %d has another id than rank 0", r);
        for (int other = 0; other < r; other++)
            if (one->device == all[(size_t)other].device && strcmp(one->host, all[(size_t)other].host) == 0)
                return emu_nccl_error(ncclInvalidUsage,
                                      "Duplicate GPU detected : rank %d and rank %d both on CUDA device %d", other, r,
                                      one->device);
    }
    return ncclSuccess;
}
static inline ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank) {
    int initialized = 0, size = 0;
    MPI_Initialized(&initialized);
    if (!initialized)
        return emu_nccl_error(ncclSystemError, "the emulator's NCCL runs under mpirun, after MPI_Init");
    if (emu_forbid_while_recording() != cudaSuccess)
        return emu_nccl_error(ncclInvalidUsage, "a communicator is made while a graph is recorded");
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    struct emu_nccl_hello mine;
    memset(&mine, 0, sizeof mine);
    mine.id = id;
    mine.ranks = ranks;
    mine.rank = rank;
    mine.device = emu_device;
    gethostname(mine.host, sizeof mine.host - 1);
    std::vector<struct emu_nccl_hello> all((size_t)size);
    MPI_Comm mpi;
    MPI_Comm_dup(MPI_COMM_WORLD, &mpi);
    MPI_Comm_set_errhandler(mpi, MPI_ERRORS_ARE_FATAL); // whatever the program has chosen for its own calls
    MPI_Allgather(&mine, (int)sizeof mine, MPI_BYTE, all.data(), (int)sizeof mine, MPI_BYTE, mpi);
    const ncclResult_t status = emu_nccl_check_hellos(all);
    if (status != ncclSuccess) {
        MPI_Comm_free(&mpi);
        return status;
    }
    *comm = new emu_nccl_communicator();
    (*comm)->made = EMU_NCCL_MADE;
    (*comm)->rank = rank;
    (*comm)->ranks = ranks;
    (*comm)->device = emu_device;
    (*comm)->mpi = mpi;
    const char *bytes = getenv("EMU_NCCL_BYTES");
    return emu_nccl_take(*comm, bytes ? (size_t)strtoull(bytes, NULL, 0) : EMU_NCCL_COMMUNICATOR_BYTES);
}
static inline bool emu_nccl_valid(ncclComm_t comm) { return comm && comm->made == EMU_NCCL_MADE; }
static inline ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (!emu_nccl_valid(comm))
        return emu_nccl_error(ncclInvalidArgument, "no communicator");
    if (comm->groups_done < comm->groups)
        emu_report("ncclCommDestroy: %llu of the communicator's groups of messages have not run",
                   (unsigned long long)(comm->groups - comm->groups_done));
    if (comm->done < comm->enqueued)
        emu_report("ncclCommDestroy: %llu of the communicator's collectives have not run",
                   (unsigned long long)(comm->enqueued - comm->done));
    MPI_Comm_free(&comm->mpi);
    for (void *memory : comm->memory)
        cudaFree(memory);
    comm->made = 0;
    delete comm;
    return ncclSuccess;
}
// Finds no error, since MPI ends the program at an error. Any thread may call it.
static inline ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    *error = ncclSuccess;
    return emu_nccl_valid(comm) ? ncclSuccess : ncclInvalidArgument;
}

// --- Collectives --------------------------------------------------------------------------------------------------

static inline size_t emu_nccl_bytes(ncclDataType_t type) {
    return type == ncclFloat32 ? 4 : type == ncclBfloat16 ? 2 : 1;
}
static inline const char *emu_nccl_type(ncclDataType_t type) {
    return type == ncclFloat32 ? "ncclFloat32" : type == ncclBfloat16 ? "ncclBfloat16" : "ncclUint8";
}
static inline void emu_nccl_check_memory(const char *function, const void *p, size_t bytes, const char *what) {
    const struct emu_allocation *a = emu_find_allocation(p);
    if (!a || a->kind == EMU_PINNED)
        emu_report("%s: %s at %p is no memory of the device", function, what, p);
    emu_check_range(p, bytes, function);
}
// Checks the buffers of a collective: a rank's part, `small`, must lie at its place in `large`, or outside of it.
static inline void emu_nccl_check_overlap(ncclComm_t comm, const char *function, const void *small, size_t bytes,
                                          const void *large) {
    const char *part = (const char *)small, *all = (const char *)large, *all_end = all + bytes * (size_t)comm->ranks;
    if (part < all_end && part + bytes > all && part != all + bytes * (size_t)comm->rank)
        emu_report("%s: its buffers overlap, and not as NCCL allows in place: rank %d's part is at byte %lld", function,
                   comm->rank, (long long)(part - all));
}
// Compares the calls of all ranks, and reports the first rank whose call differs from rank 0's.
static inline void emu_nccl_meet(ncclComm_t comm, const struct emu_nccl_call *mine) {
    std::vector<struct emu_nccl_call> all((size_t)comm->ranks);
    MPI_Allgather(mine, (int)sizeof *mine, MPI_BYTE, all.data(), (int)sizeof *mine, MPI_BYTE, comm->mpi);
    const struct emu_nccl_call *first = &all[0];
    for (int r = 1; r < comm->ranks; r++) {
        const struct emu_nccl_call *other = &all[(size_t)r];
        if (memcmp(first, other, sizeof *first) != 0)
            emu_report(
                "NCCL: the ranks' calls differ: rank 0's call %llu is %s of %llu %s, rank %d's call %llu is %s of %llu "
                "%s",
                (unsigned long long)first->turn, first->function, (unsigned long long)first->count,
                emu_nccl_type(first->type), r, (unsigned long long)other->turn, other->function,
                (unsigned long long)other->count, emu_nccl_type(other->type));
    }
}
static inline ncclResult_t emu_nccl_use_algorithm(ncclComm_t comm, const char *function, size_t bytes) {
    const std::string algorithm = std::string(function) + (bytes < EMU_NCCL_LARGE ? ", small" : ", large");
    for (const std::string &taken : comm->algorithms)
        if (taken == algorithm)
            return ncclSuccess;
    comm->algorithms.push_back(algorithm);
    return emu_nccl_take(comm, EMU_NCCL_ALGORITHM_BYTES);
}
static inline ncclResult_t emu_nccl_enqueue(ncclComm_t comm, const char *function, size_t count, ncclDataType_t type,
                                            cudaStream_t stream, std::function<void()> run) {
    if (!emu_nccl_valid(comm))
        return emu_nccl_error(ncclInvalidArgument, "%s: no communicator", function);
    if (comm->device != emu_device)
        return emu_nccl_error(ncclInvalidUsage, "%s: the communicator is of device %d, the thread uses device %d",
                              function, comm->device, emu_device);
    if (emu_forbid_while_recording() != cudaSuccess)
        emu_report("%s: called while a graph is recorded", function);
    if (count > INT_MAX / sizeof(float))
        emu_report("%s: %zu elements are more than this stand-in moves", function, count);
    const ncclResult_t ready = emu_nccl_use_algorithm(comm, function, count * emu_nccl_bytes(type));
    if (ready != ncclSuccess)
        return ready;
    struct emu_nccl_call call;
    memset(&call, 0, sizeof call);
    snprintf(call.function, sizeof call.function, "%s", function);
    call.turn = ++comm->enqueued;
    call.count = count;
    call.type = type;
    const cudaError_t status = emu_enqueue(stream, function, [=] {
        emu_nccl_meet(comm, &call);
        run();
        comm->done++;
    });
    return status == cudaSuccess ? ncclSuccess
                                 : emu_nccl_error(ncclUnhandledCudaError, "%s", cudaGetErrorString(status));
}

// x += y, each rounded to the type.
static inline void emu_nccl_add(char *x, const char *y, size_t count, ncclDataType_t type) {
    for (size_t i = 0; i < count; i++)
        if (type == ncclFloat32)
            ((float *)x)[i] += ((const float *)y)[i];
        else
            ((uint16_t *)x)[i] = emu_to_bf16(emu_bf16(((const uint16_t *)x)[i]) + emu_bf16(((const uint16_t *)y)[i]));
}
// receive (count) = the sum of all ranks' parts for this rank; send (ranks, count).
static inline ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t count, ncclDataType_t type,
                                             ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
    const size_t bytes = count * emu_nccl_bytes(type);
    if (type != ncclFloat32 && type != ncclBfloat16)
        return emu_nccl_error(ncclInvalidArgument, "ncclReduceScatter: sums of type %d are not modeled", (int)type);
    if (emu_nccl_valid(comm)) {
        emu_nccl_check_memory("ncclReduceScatter", send, bytes * (size_t)comm->ranks, "what is sent");
        emu_nccl_check_memory("ncclReduceScatter", receive, bytes, "what is received");
        emu_nccl_check_overlap(comm, "ncclReduceScatter", receive, bytes, send);
    }
    return emu_nccl_enqueue(comm, "ncclReduceScatter", count, type, stream, [=] {
        std::vector<char> parts(bytes * (size_t)comm->ranks + 1); // + 1, so that it is never empty
        MPI_Alltoall(send, (int)bytes, MPI_BYTE, parts.data(), (int)bytes, MPI_BYTE, comm->mpi);
        char *sum = &parts[bytes * (size_t)((comm->rank + 1) % comm->ranks)];
        for (int i = 2; i <= comm->ranks; i++)
            emu_nccl_add(sum, &parts[bytes * (size_t)((comm->rank + i) % comm->ranks)], count, type);
        memcpy(receive, sum, bytes);
    });
}
// receive (ranks, count) = what each rank sends; send (count).
static inline ncclResult_t ncclAllGather(const void *send, void *receive, size_t count, ncclDataType_t type,
                                         ncclComm_t comm, cudaStream_t stream) {
    const size_t bytes = count * emu_nccl_bytes(type);
    if (emu_nccl_valid(comm)) {
        emu_nccl_check_memory("ncclAllGather", send, bytes, "what is sent");
        emu_nccl_check_memory("ncclAllGather", receive, bytes * (size_t)comm->ranks, "what is received");
        emu_nccl_check_overlap(comm, "ncclAllGather", send, bytes, receive);
    }
    return emu_nccl_enqueue(comm, "ncclAllGather", count, type, stream, [=] {
        const std::vector<char> mine((const char *)send, (const char *)send + bytes);
        MPI_Allgather(mine.data(), (int)bytes, MPI_BYTE, receive, (int)bytes, MPI_BYTE, comm->mpi);
    });
}

// --- Messages -----------------------------------------------------------------------------------------------------

enum { EMU_NCCL_TAG = 7 };
struct emu_nccl_message {
    bool sends;
    int rank;
    char *data;
    size_t bytes;
};
struct emu_nccl_group {
    int depth;
    ncclComm_t comm;
    cudaStream_t stream;
    std::vector<struct emu_nccl_message> messages;
};
inline struct emu_nccl_group emu_nccl_current;

// Runs a group's messages. Sends do not wait for receives, so that each rank may take its own messages in their order.
static inline void emu_nccl_run_messages(ncclComm_t comm, const std::vector<struct emu_nccl_message> &messages) {
    std::vector<MPI_Request> requests;
    for (const struct emu_nccl_message &m : messages)
        if (m.sends) {
            requests.push_back(MPI_REQUEST_NULL);
            MPI_Isend(m.data, (int)m.bytes, MPI_BYTE, m.rank, EMU_NCCL_TAG, comm->mpi, &requests.back());
        }
    for (const struct emu_nccl_message &m : messages) {
        MPI_Status status;
        int bytes = 0;
        if (m.sends)
            continue;
        MPI_Probe(m.rank, EMU_NCCL_TAG, comm->mpi, &status);
        MPI_Get_count(&status, MPI_BYTE, &bytes);
        if ((size_t)bytes != m.bytes)
            emu_report("ncclRecv: rank %d receives %zu bytes from rank %d, which sends %d", comm->rank, m.bytes, m.rank,
                       bytes);
        MPI_Recv(m.data, (int)m.bytes, MPI_BYTE, m.rank, EMU_NCCL_TAG, comm->mpi, MPI_STATUS_IGNORE);
    }
    MPI_Waitall((int)requests.size(), requests.data(), MPI_STATUSES_IGNORE);
}
static inline void emu_nccl_check_messages(const std::vector<struct emu_nccl_message> &messages) {
    for (const struct emu_nccl_message &in : messages)
        for (const struct emu_nccl_message &other : messages)
            if (!in.sends && &in != &other && in.data < other.data + other.bytes && other.data < in.data + in.bytes)
                emu_report("NCCL: a message from rank %d overlaps one %s rank %d", in.rank, other.sends ? "to" : "from",
                           other.rank);
}
static inline ncclResult_t ncclGroupStart(void) {
    emu_nccl_current.depth++;
    return ncclSuccess;
}
static inline ncclResult_t ncclGroupEnd(void) {
    struct emu_nccl_group *group = &emu_nccl_current;
    if (group->depth == 0)
        return emu_nccl_error(ncclInvalidUsage, "ncclGroupEnd: no group was started");
    if (--group->depth > 0 || group->messages.empty())
        return ncclSuccess;
    const std::vector<struct emu_nccl_message> messages = group->messages;
    ncclComm_t comm = group->comm;
    group->messages.clear();
    emu_nccl_check_messages(messages);
    if (comm->device != emu_device)
        return emu_nccl_error(ncclInvalidUsage, "ncclGroupEnd: the communicator is of device %d, the thread uses %d",
                              comm->device, emu_device);
    if (emu_forbid_while_recording() != cudaSuccess)
        emu_report("ncclGroupEnd: called while a graph is recorded");
    size_t largest = 0;
    for (const struct emu_nccl_message &m : messages)
        largest = m.bytes > largest ? m.bytes : largest;
    const ncclResult_t ready = emu_nccl_use_algorithm(comm, "messages", largest);
    if (ready != ncclSuccess)
        return ready;
    comm->groups++;
    const cudaError_t status = emu_enqueue(group->stream, "messages", [=] {
        emu_nccl_run_messages(comm, messages);
        comm->groups_done++;
    });
    return status == cudaSuccess ? ncclSuccess
                                 : emu_nccl_error(ncclUnhandledCudaError, "%s", cudaGetErrorString(status));
}
static inline ncclResult_t emu_nccl_message_add(const char *function, bool sends, const void *data, size_t count,
                                                ncclDataType_t type, int rank, ncclComm_t comm, cudaStream_t stream) {
    struct emu_nccl_group *group = &emu_nccl_current;
    if (!emu_nccl_valid(comm) || rank < 0 || rank >= comm->ranks)
        return emu_nccl_error(ncclInvalidArgument, "%s: no communicator, or no rank %d", function, rank);
    emu_nccl_check_memory(function, data, count * emu_nccl_bytes(type), "the message");
    const struct emu_nccl_message message = {sends, rank, (char *)data, count * emu_nccl_bytes(type)};
    ncclGroupStart();
    group->comm = comm;
    group->stream = stream;
    group->messages.push_back(message);
    return ncclGroupEnd();
}
static inline ncclResult_t ncclSend(const void *data, size_t count, ncclDataType_t type, int rank, ncclComm_t comm,
                                    cudaStream_t stream) {
    return emu_nccl_message_add("ncclSend", true, data, count, type, rank, comm, stream);
}
static inline ncclResult_t ncclRecv(void *data, size_t count, ncclDataType_t type, int rank, ncclComm_t comm,
                                    cudaStream_t stream) {
    return emu_nccl_message_add("ncclRecv", false, data, count, type, rank, comm, stream);
}
