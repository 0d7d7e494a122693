// The interface to cuDNN for attention (cudnn/attention.cuh): the library's functions, looked up at run time, and the
// numbers of its backend (graph) API. The build needs no header of cuDNN's and the program no libcudnn to start.
//
// Every name is the library's own, in lower case where it is a type or a function. The numbers are its binary
// interface, the same in all of cuDNN 9; a comment names a value younger than 9.0. Sources: NVIDIA's reference of the
// cuDNN graph library ("Backend API", docs.nvidia.com/deeplearning/cudnn), cudnn_graph_v9.h of 9.19, 9.26 and 9.28.
//
// The API is used so: a descriptor is made of a type, given attributes one at a time, finalized, and read-only from
// then on; finalizing checks it and says what is wrong by its status and cudnnGetLastErrorString. An attribute's value
// is an array of `count` elements of the type that is named with it:
//   BOOLEAN                          bool, one byte
//   INT64, FLOAT, DOUBLE, VOID_PTR   int64_t, float, double, void *
//   HANDLE, BACKEND_DESCRIPTOR       struct cudnn_context *, struct cudnn_descriptor *
//   any other                        an enum, four bytes
// Tensors are combined to operations, operations to a graph, and the graph is given to heuristics, which answer with
// engine configurations, best first; one that can be finalized as an execution plan can be run, with a variant pack:
// the addresses of the graph's tensors that are not virtual, by their unique ids, and of a workspace.
//
// Plain C11 and C++17: the stand-in for the library that tests load is compiled with this file, too.
#pragma once
#include <assert.h>   // static_assert
#include <dlfcn.h>    // dlopen, dlsym, dlinfo
#include <link.h>     // struct link_map
#include <stdbool.h>  // bool
#include <stddef.h>   // size_t
#include <stdint.h>   // int64_t
#include <stdio.h>    // snprintf
#include <stdlib.h>   // getenv
#include <sys/stat.h> // stat
#include <string.h>   // memcpy
#include <unistd.h>   // access

struct cudnn_context;    // a library handle: a GPU and a stream
struct cudnn_descriptor; // any object of the backend API

typedef int cudnn_status; // 0: success; else 1000 times a category (2 bad parameter, 3 not supported, ...) plus detail
enum { CUDNN_STATUS_SUCCESS = 0, CUDNN_STATUS_BAD_PARAM = 2000, CUDNN_STATUS_NOT_SUPPORTED = 3000 };

enum cudnn_descriptor_type {
    CUDNN_BACKEND_POINTWISE_DESCRIPTOR = 0,
    CUDNN_BACKEND_ENGINE_DESCRIPTOR = 2,
    CUDNN_BACKEND_ENGINECFG_DESCRIPTOR = 3,
    CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR = 4,
    CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR = 5,
    CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR = 7,
    CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR = 13,
    CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR = 15,
    CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR = 16,
    CUDNN_BACKEND_TENSOR_DESCRIPTOR = 17,
    CUDNN_BACKEND_MATMUL_DESCRIPTOR = 18,
    CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR = 19,
    CUDNN_BACKEND_REDUCTION_DESCRIPTOR = 21,
    CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR = 22,
    CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR = 31,
    CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR = 41, // from 9.13 on
};

// Each with the type and the number of elements that it takes.
enum cudnn_attribute_name {
    // a pointwise function
    CUDNN_ATTR_POINTWISE_MODE = 0,      // POINTWISE_MODE
    CUDNN_ATTR_POINTWISE_MATH_PREC = 1, // DATA_TYPE, what is computed in
    CUDNN_ATTR_POINTWISE_AXIS = 9,      // INT64, of GEN_INDEX: the dimension whose index is generated
    // heuristics
    CUDNN_ATTR_ENGINEHEUR_MODE = 200,            // HEUR_MODE
    CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH = 201, // BACKEND_DESCRIPTOR
    CUDNN_ATTR_ENGINEHEUR_RESULTS = 202,         // BACKEND_DESCRIPTORs, got: the caller makes ENGINECFGs to be filled
    // an engine configuration
    CUDNN_ATTR_ENGINECFG_ENGINE = 300,       // BACKEND_DESCRIPTOR; to get it, the caller makes an ENGINE to be filled
    CUDNN_ATTR_ENGINECFG_KNOB_CHOICES = 302, // BACKEND_DESCRIPTORs
    // an execution plan
    CUDNN_ATTR_EXECUTION_PLAN_HANDLE = 400,         // HANDLE
    CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG = 401,  // BACKEND_DESCRIPTOR
    CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE = 402, // INT64, got: bytes
    // the value of one knob of an engine
    CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE = 600,  // KNOB_TYPE
    CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE = 601, // INT64
    // a pointwise operation: Y = f(X), f(X, B) or, of BINARY_SELECT, T ? X : B
    CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR = 750, // BACKEND_DESCRIPTOR each
    CUDNN_ATTR_OPERATION_POINTWISE_XDESC = 751,
    CUDNN_ATTR_OPERATION_POINTWISE_BDESC = 752,
    CUDNN_ATTR_OPERATION_POINTWISE_YDESC = 753,
    CUDNN_ATTR_OPERATION_POINTWISE_TDESC = 758,
    // a graph of operations
    CUDNN_ATTR_OPERATIONGRAPH_HANDLE = 800, // HANDLE
    CUDNN_ATTR_OPERATIONGRAPH_OPS = 801,    // BACKEND_DESCRIPTORs
    // a tensor
    CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT = 900, // INT64
    CUDNN_ATTR_TENSOR_DATA_TYPE = 901,      // DATA_TYPE
    CUDNN_ATTR_TENSOR_DIMENSIONS = 902,     // INT64s, one a dimension
    CUDNN_ATTR_TENSOR_STRIDES = 903,        // INT64s, one a dimension, in elements
    CUDNN_ATTR_TENSOR_UNIQUE_ID = 906,      // INT64
    CUDNN_ATTR_TENSOR_IS_VIRTUAL = 907,     // BOOLEAN: an intermediate, never in memory
    CUDNN_ATTR_TENSOR_IS_BY_VALUE = 908,    // BOOLEAN: one element, its address in the variant pack is the host's
    // a variant pack
    CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS = 1000,    // INT64s
    CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS = 1001, // VOID_PTRs, in the order of the ids
    CUDNN_ATTR_VARIANT_PACK_WORKSPACE = 1003,     // VOID_PTR
    // an engine
    CUDNN_ATTR_ENGINE_OPERATION_GRAPH = 1300, // BACKEND_DESCRIPTOR
    CUDNN_ATTR_ENGINE_GLOBAL_INDEX = 1301,    // INT64
    CUDNN_ATTR_ENGINE_NUMERICAL_NOTE = 1303,  // NUMERICAL_NOTEs, got
    // a matrix product, batched over all but the last two dimensions
    CUDNN_ATTR_MATMUL_COMP_TYPE = 1500,       // DATA_TYPE
    CUDNN_ATTR_OPERATION_MATMUL_ADESC = 1520, // BACKEND_DESCRIPTOR each; C (M, N) = A (M, K) B (K, N)
    CUDNN_ATTR_OPERATION_MATMUL_BDESC = 1521,
    CUDNN_ATTR_OPERATION_MATMUL_CDESC = 1522,
    CUDNN_ATTR_OPERATION_MATMUL_DESC = 1523,
    // a reduction over the dimensions in which Y is smaller than X
    CUDNN_ATTR_REDUCTION_OPERATOR = 1600,        // REDUCTION_OPERATOR_TYPE
    CUDNN_ATTR_REDUCTION_COMP_TYPE = 1601,       // DATA_TYPE
    CUDNN_ATTR_OPERATION_REDUCTION_XDESC = 1610, // BACKEND_DESCRIPTOR each
    CUDNN_ATTR_OPERATION_REDUCTION_YDESC = 1611,
    CUDNN_ATTR_OPERATION_REDUCTION_DESC = 1612,
    // another view of a tensor's elements
    CUDNN_ATTR_OPERATION_RESHAPE_XDESC = 2200, // BACKEND_DESCRIPTOR each
    CUDNN_ATTR_OPERATION_RESHAPE_YDESC = 2201,
    // attention, from 9.13 on: O = softmax(f(scale Q K^T)) V, STATS = the log-sum-exp of each row of f(scale Q K^T)
    CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC = 2800, // BACKEND_DESCRIPTOR each; K is (B, heads, T, D), as V
    CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC = 2801,
    CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC = 2802,
    CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC = 2803,
    CUDNN_ATTR_OPERATION_SDPA_FWD_STATSDESC = 2804,
    CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC = 2805,
    CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH = 2811, // BACKEND_DESCRIPTOR, f as a graph without a handle; from 9.21 on
    CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_INPUT_UID = 2812, // INT64, f's virtual tensors; from 9.21 on
    CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_OUTPUT_UID = 2813,
};

enum cudnn_attribute_type {
    CUDNN_TYPE_HANDLE = 0,
    CUDNN_TYPE_DATA_TYPE = 1,
    CUDNN_TYPE_BOOLEAN = 2,
    CUDNN_TYPE_INT64 = 3,
    CUDNN_TYPE_FLOAT = 4,
    CUDNN_TYPE_DOUBLE = 5,
    CUDNN_TYPE_VOID_PTR = 6,
    CUDNN_TYPE_HEUR_MODE = 8,
    CUDNN_TYPE_KNOB_TYPE = 9,
    CUDNN_TYPE_NUMERICAL_NOTE = 11,
    CUDNN_TYPE_POINTWISE_MODE = 14,
    CUDNN_TYPE_BACKEND_DESCRIPTOR = 15,
    CUDNN_TYPE_REDUCTION_OPERATOR_TYPE = 18,
};

enum cudnn_data_type {
    CUDNN_DATA_FLOAT = 0,
    CUDNN_DATA_INT32 = 4,
    CUDNN_DATA_BFLOAT16 = 9,
    CUDNN_DATA_BOOLEAN = 11,
    CUDNN_DATA_FP8_E4M3 = 12,
    CUDNN_DATA_FP8_E5M2 = 13,
};

enum cudnn_pointwise_mode {
    CUDNN_POINTWISE_ADD = 0,
    CUDNN_POINTWISE_MUL = 1,
    CUDNN_POINTWISE_DIV = 6,
    CUDNN_POINTWISE_SUB = 9,
    CUDNN_POINTWISE_EXP = 13,
    CUDNN_POINTWISE_LOG = 15,
    CUDNN_POINTWISE_IDENTITY = 21,
    CUDNN_POINTWISE_CMP_GE = 303,
    CUDNN_POINTWISE_GEN_INDEX = 501, // the index of each element along an axis
    CUDNN_POINTWISE_BINARY_SELECT = 601,
};

enum cudnn_reduction { CUDNN_REDUCE_TENSOR_ADD = 0, CUDNN_REDUCE_TENSOR_MAX = 3, CUDNN_REDUCE_TENSOR_AMAX = 4 };

enum cudnn_heuristics_mode { CUDNN_HEUR_MODE_A = 3 }; // by a decision tree, for all graphs

enum cudnn_numerical_note { CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC = 4, CUDNN_NUMERICAL_NOTE_TYPE_COUNT = 10 };

enum cudnn_knob_type {
    CUDNN_KNOB_TYPE_STAGES = 14,
    CUDNN_KNOB_TYPE_KERNEL_CFG = 24,
    CUDNN_KNOB_TYPE_TILE_CGA_M = 27,
    CUDNN_KNOB_TYPE_STREAM_K = 38,
    CUDNN_KNOB_TYPE_TILE_M = 40,
    CUDNN_KNOB_TYPE_TILE_N = 41,
};

// The library's functions; `stream` is a cudaStream_t. A descriptor's creator destroys it, after any it was given to.
struct cudnn_functions {
    size_t (*get_version)(void);                                       // 10000 * major + 100 * minor + patch
    const char *(*get_error_string)(cudnn_status status);              // the status's name
    void (*get_last_error_string)(char *message, size_t message_size); // of this thread's last failure; clears it
    cudnn_status (*create)(struct cudnn_context **handle);             // for the current GPU
    cudnn_status (*destroy)(struct cudnn_context *handle);
    cudnn_status (*set_stream)(struct cudnn_context *handle, void *stream);
    cudnn_status (*create_descriptor)(enum cudnn_descriptor_type type, struct cudnn_descriptor **descriptor);
    cudnn_status (*destroy_descriptor)(struct cudnn_descriptor *descriptor);
    cudnn_status (*finalize)(struct cudnn_descriptor *descriptor);
    cudnn_status (*set_attribute)(struct cudnn_descriptor *descriptor, enum cudnn_attribute_name name,
                                  enum cudnn_attribute_type type, int64_t count, const void *elements);
    // Writes up to `room` elements and, where `count` is given, how many there are.
    cudnn_status (*get_attribute)(struct cudnn_descriptor *descriptor, enum cudnn_attribute_name name,
                                  enum cudnn_attribute_type type, int64_t room, int64_t *count, void *elements);
    cudnn_status (*execute)(struct cudnn_context *handle, struct cudnn_descriptor *plan,
                            struct cudnn_descriptor *variant_pack); // enqueues, on the handle's stream
};

// Loads a library that libcudnn.so.9, a mere shim, loads at its first call: the file beside the shim, as its rpath
// prefers, or without one what the dynamic linker finds. Returns false, with `reason` (size bytes), on failure.
static inline bool cudnn_load_part(void *shim, const char *name, char *reason, size_t size) {
    struct link_map *map = NULL;
    char path[4096];
    const char *from = name;
    const char *slash = dlinfo(shim, RTLD_DI_LINKMAP, &map) == 0 && map ? strrchr(map->l_name, '/') : NULL;
    if (slash &&
        snprintf(path, sizeof path, "%.*s/%s", (int)(slash - map->l_name), map->l_name, name) < (int)sizeof path &&
        access(path, F_OK) == 0)
        from = path;
    if (dlopen(from, RTLD_NOW | RTLD_LOCAL))
        return true;
    const char *error = dlerror();
    snprintf(reason, size, "cuDNN is incomplete: %s", error ? error : name);
    return false;
}
// Loads the shim's parts, because at the shim's first call a missing or damaged part would abort the process. Here that
// only returns false, with `reason` (size bytes). CUDNN_LIB_CONFIG=GRAPH_JIT_ONLY, without precompiled kernels, needs
// only the first two parts (the guide of cuDNN's frontend, "cuDNN Library Configuration").
static inline bool cudnn_load_parts(void *shim, char *reason, size_t size) {
    static const char *const parts[] = {"libcudnn_graph.so.9", "libcudnn_engines_runtime_compiled.so.9",
                                        "libcudnn_engines_precompiled.so.9", "libcudnn_heuristic.so.9"};
    const char *configuration = getenv("CUDNN_LIB_CONFIG");
    const int count = configuration && strcmp(configuration, "GRAPH_JIT_ONLY") == 0 ? 2 : 4;
    for (int i = 0; i < count; i++)
        if (!cudnn_load_part(shim, parts[i], reason, size))
            return false;
    return true;
}
// Returns a number that tells the installed shim from another, made of its file's size and time; 0 where cudnn_load
// would find none. Loads the shim, which stays loaded, but calls nothing of it.
static inline uint64_t cudnn_installed(void) {
    struct link_map *map = NULL;
    struct stat file;
    void *const shim = dlopen("libcudnn.so.9", RTLD_LAZY | RTLD_LOCAL);
    if (!shim || dlinfo(shim, RTLD_DI_LINKMAP, &map) != 0 || !map || stat(map->l_name, &file) != 0)
        return 0;
    return (uint64_t)file.st_size * 1000003u + (uint64_t)file.st_mtim.tv_sec;
}
// Loads the library from where the dynamic linker looks (LD_LIBRARY_PATH, the program's rpath, ldconfig's list), to
// stay loaded to the end, and fills *functions. Returns false, with `reason` (size bytes), unless it is complete.
static inline bool cudnn_load(struct cudnn_functions *functions, char *reason, size_t size) {
    static const char *const names[] = {"cudnnGetVersion",
                                        "cudnnGetErrorString",
                                        "cudnnGetLastErrorString",
                                        "cudnnCreate",
                                        "cudnnDestroy",
                                        "cudnnSetStream",
                                        "cudnnBackendCreateDescriptor",
                                        "cudnnBackendDestroyDescriptor",
                                        "cudnnBackendFinalize",
                                        "cudnnBackendSetAttribute",
                                        "cudnnBackendGetAttribute",
                                        "cudnnBackendExecute"};
    enum { COUNT = sizeof names / sizeof *names };
    void *found[COUNT], *const library = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *error = dlerror();
        snprintf(reason, size, "%s", error ? error : "libcudnn.so.9 can't be loaded");
        return false;
    }
    if (!cudnn_load_parts(library, reason, size))
        return false;
    for (int i = 0; i < COUNT; i++)
        if ((found[i] = dlsym(library, names[i])) == NULL) {
            snprintf(reason, size, "libcudnn.so.9 has no %s", names[i]);
            return false;
        }
    static_assert(sizeof found == sizeof *functions, "one name a function");
    memcpy(functions, found, sizeof found); // ISO C converts no pointer to data to a pointer to a function
    return true;
}
