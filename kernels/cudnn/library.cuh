// The library and its plans, as cudnn/attention.cu and cudnn/attention_check.cu see them.
#pragma once
#include "kernels/cudnn/attention_graphs.cuh" // struct fused_key, struct cudnn_builder
#include "kernels/device.cuh"                 // struct device
#include <sys/cdefs.h>                        // __BEGIN_DECLS

enum {
    FUSED_PLANS = 64, // one model has one shape, two of evaluation's, and one for each length of a prompt
};

struct fused_plan {
    struct fused_key key;
    struct cudnn_builder builder;
    struct cudnn_descriptor *plan; // NULL: builder.reason says why there is none
    int64_t workspace_bytes;
    bool may_differ; // the engine says that its bits may differ from run to run
    bool operation;  // forward, as one operation
};
struct fused_library {
    struct cudnn_functions functions;
    struct cudnn_context *handle; // NULL: `obstacle` says why
    char obstacle[256], name[24]; // name: with the version
    bool composes;                // forward is asked for only by a graph of operations
    bool checks;                  // the error of a call goes to `broken`; else it ends the program
    char broken[192];
    size_t version;
    double most_dp_bytes; // that FUSED_SUM_NONE may keep, where there is a choice
    int major, minor;     // of the GPU's compute capability
    cudaStream_t stream;  // the handle's
    double planning_s;    // what plans took to make, so far
    double distance;      // the largest from flash attention that cudnn/attention_check.cu has seen
    int planned;
    struct fused_plan plans[FUSED_PLANS];
};

// The addresses of a call's tensors, by id; NULL: not in the graph. fused_run sets the addresses of the three numbers.
struct fused_call {
    const void *tensors[FUSED_TENSORS];
    float scale, hidden, one;
};

__BEGIN_DECLS
enum { FUSED_CHECK_TOKENS = 256 }; // two tiles or more, and a length that every version takes
// Returns the device's library, never NULL, until fused_close; opens it first. `obstacle` says why a handle is NULL.
struct fused_library *fused_library_of(struct device *dev);
// Destroys all plans, which no recorded graph or pointer may use any more. fused_plan_for makes them again.
void fused_forget_plans(struct fused_library *library);
// Returns the key of a shape's bf16 plan; for FP8 the caller sets `types` and `wide`. order isn't read for forward.
struct fused_key fused_key_of(struct attention_shape s, bool backward, enum fused_order order);
// Chooses how backward sums dQ. It is FUSED_SUM_ANY if any_order; else FUSED_SUM_TURNS where this GPU has an engine for
// it and dP is larger than library->most_dp_bytes; else FUSED_SUM_NONE, faster says cudnn-frontend's pull request 398.
enum fused_order fused_order_of(struct attention_shape s, bool any_order, struct device *dev);
// Writes to `reason` (size bytes) why cuDNN can't do both forward and this order's backward; else empty. Makes plans.
void fused_refuses_order(char *reason, size_t size, struct attention_shape shape, enum fused_order order,
                         struct device *dev);
// Returns a key's plan, made at first use: its `plan` is NULL if cuDNN refuses; NULL: too many plans. Needs a handle.
struct fused_plan *fused_plan_for(struct fused_library *library, const struct fused_key *key);
// Returns a key's plan as fused_plan_for does, but ends the program where there is no handle, no room or no plan.
struct fused_plan *fused_plan_to_run(struct fused_library *library, const struct fused_key *key);
// Returns a call whose numbers scale, hidden and one are set. Its addresses are NULL, for the caller to set.
struct fused_call fused_call_of(const struct fused_library *library, float scale);
// Enqueues a call; workspace is cuDNN's part. A refusal ends the program or, if library->checks, fills library->broken.
void fused_run(struct fused_library *library, const struct fused_plan *p, struct fused_call *call, void *workspace,
               struct device *dev);
// The number of bytes of workspace, ours and cuDNN's, of a bf16 call. Makes its plan; 0 without one. Needs a handle.
size_t fused_workspace_bytes(const struct fused_key *k, struct device *dev);
// Does fused_backward with dQ summed in this order. workspace: fused_workspace_bytes of backward's key in this order.
void fused_backward_by(enum fused_order order,
                       floatX *dqkv,       // (B, T, (H + 2 Hkv) * D)
                       const floatX *dout, // (B, T, H * D)
                       const floatX *qkv,  // (B, T, (H + 2 Hkv) * D)
                       const floatX *out,  // (B, T, H * D)
                       const float *lse,   // (B, H, T)
                       struct attention_shape shape, uint32_t *amax, void *workspace, struct device *dev);
__END_DECLS
