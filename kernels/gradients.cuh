// Gradients on their way to the update: their sum over micro-steps, its squares, and the check that may clip or forbid.
#pragma once
#include "kernels/flat_tensors.cuh" // struct flat_tensors
#include "kernels/random.cuh"       // struct rounding, bf16_stochastic
#include "kernels/state_format.cuh" // enum state_format
#include <math.h>                   // sqrt
#include <sys/cdefs.h>              // __BEGIN_DECLS

// Tells the update what it must know of a step's losses and gradients, on the device: the host need not wait for it.
struct gradient_check {
    double grad_norm;
    float grad_scale; // of the update: clipping, and the mean over the targets that count
    int32_t finite;   // 1 where every loss and the norm are, and a target counted: there is an update
};

// Returns the check of gradients whose sum of squares is `squares`. They are the gradients of the losses' sum divided
// by `targets`. Only `counted` targets have a loss: the mean loss's gradients are targets / counted times as large, and
// grad_norm is their norm. grad_scale turns the gradients into these, clipped to norm `clip` (0: never) as
// torch.nn.utils.clip_grad_norm_ does, with 1e-6 against a norm of 0. With targets, but none counted, `finite` is 0.
HOST_DEVICE struct gradient_check gradient_check_of(double squares, double targets, double counted, double clip) {
    struct gradient_check check;
    const double mean = counted == targets ? 1 : counted > 0 ? targets / counted : 0;
    check.grad_norm = sqrt(squares) * mean;
    const double scale = clip > 0 ? clip / (check.grad_norm + 1e-6) : 1;
    check.grad_scale = (float)(mean * (scale < 1 ? scale : 1));
    check.finite = isfinite(check.grad_norm) && (counted > 0 || targets == 0) ? 1 : 0;
    return check;
}

__BEGIN_DECLS
size_t sum_of_squares_workspace_bytes(const struct device *dev);
// total = the sum of x[i]^2 in double, or += where `add`; x is FORMAT_FP32 or FORMAT_BF16. A fixed number of partial
// sums is added in a fixed order: the bits depend neither on the number of threads nor on the GPU.
void sum_of_squares(double *total, // (1)
                    const void *x, // (n)
                    enum state_format format, int64_t n, bool add, void *workspace, struct device *dev);
struct gradient_range {
    int64_t at, n; // elements; at is a multiple of STATE_BLOCK
};
size_t squares_of_ranges_workspace_bytes(int count, const struct device *dev);
// Writes the partial sums of squares of x, FORMAT_FP32 or FORMAT_BF16, over ranges[first] to ranges[end - 1], in one
// launch, into the workspace of all `count` ranges. Several calls may take some ranges each, as these become complete.
void squares_of_ranges(void *workspace, const void *x, enum state_format format,
                       const struct gradient_range *ranges, // (count), in the device's memory
                       int first, int end, struct device *dev);
// total = the sum over `count` ranges, in order, of what sum_of_squares gives for each, to the bit. Call this once,
// after squares_of_ranges has taken all of them: the partial sums in `workspace` may be overwritten.
void squares_total(double *total, // (1)
                   int count, void *workspace, struct device *dev);
// store = in or, where `add`, store + in, summed in fp32: elements [begin, begin + n) of the flat buffers, any number
// of tensors in one launch. store[0] is element begin, a multiple of STATE_BLOCK; gaps stay. FORMAT_BF16 is rounded
// stochastically, by r, which tensor_rounding sets for each tensor. FORMAT_FP32 does not read r. NaN stays NaN.
void add_gradients(void *store, // (n)
                   enum state_format format,
                   const float *in, // (n)
                   int64_t begin, int64_t n, struct flat_tensors tensors, bool add, struct rounding r,
                   struct device *dev);
// Returns r for tensor `row`: r.first is flat element `begin`'s index in the tensor, negative if `begin` is before it.
HOST_DEVICE struct rounding tensor_rounding(struct rounding r, struct flat_tensor tensor, int row, int64_t begin) {
    r.tensor = (uint32_t)row;
    r.first = begin - tensor.begin;
    return r;
}
// Checks a step by all ranks' reports, with the same result on every rank: the result is gradient_check_of's, but
// `finite` is 0 also where any sum of losses is not finite. A rank's report (width) has the sum of its gradients'
// squares, then num_losses pairs of a sum of losses and the number of targets that count in it, then other columns.
// `targets`: the step's on all ranks, counted or not, by which the losses were divided. A `clip` of 0 never clips.
void gradient_check(struct gradient_check *check, // (1)
                    const double *reports,        // (ranks, width)
                    int ranks, int width, int num_losses, double targets, double clip, struct device *dev);
__END_DECLS
enum { REPORT_SQUARES, REPORT_LOSSES }; // columns of reports

// Ends the program unless the format is FORMAT_FP32 or FORMAT_BF16.
static inline void gradients_format_check(enum state_format format) {
    if (format != FORMAT_FP32 && format != FORMAT_BF16)
        fail("gradients are fp32 or bf16");
}
