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

// Returns the check of gradients whose sum of squares is `squares`. They are of the sum of losses divided by `targets`,
// of which `counted` counted: the gradients of the mean loss are targets / counted times as large. grad_norm is the
// norm of the mean loss's gradients; they are scaled down to norm `clip` (0: never) as torch.nn.utils.clip_grad_norm_
// does, where 1e-6 keeps a zero norm from dividing. Where there are targets and none counted, `finite` is 0.
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
// launch, to the workspace of all `count` ranges. Ranges that are complete earlier may have an earlier call.
void squares_of_ranges(void *workspace, const void *x, enum state_format format,
                       const struct gradient_range *ranges, // (count), in the device's memory
                       int first, int end, struct device *dev);
// total = the sum, in order and with the bits, of sum_of_squares of each of `count` ranges, once squares_of_ranges has
// filled `workspace` for all of them. Not to be called twice: the call may overwrite partial sums.
void squares_total(double *total, // (1)
                   int count, void *workspace, struct device *dev);
// store = in, or where `add` store + in, summed in fp32. A store of FORMAT_BF16 is rounded stochastically, by
// tensor_rounding of r for each tensor; FORMAT_FP32 does not read r. NaN stays NaN. In one launch for any number of
// tensors: elements [begin, begin + n) of the flat buffers, begin (at store[0]) a multiple of STATE_BLOCK; gaps stay.
void add_gradients(void *store, // (n)
                   enum state_format format,
                   const float *in, // (n)
                   int64_t begin, int64_t n, struct flat_tensors tensors, bool add, struct rounding r,
                   struct device *dev);
// Returns r for tensor `row`; r.first: flat element `begin`'s index in the tensor, below 0 if it is before the tensor.
HOST_DEVICE struct rounding tensor_rounding(struct rounding r, struct flat_tensor tensor, int row, int64_t begin) {
    r.tensor = (uint32_t)row;
    r.first = begin - tensor.begin;
    return r;
}
// Checks a step, with the same result on every rank, as each has all reports: the norm of the gradients of all ranks'
// shards, clipped to `clip` (0: never), and whether the norm and all losses are finite. targets: of the step, over all
// ranks, counted or not, by which the gradients' sum of losses was divided. A rank's report (width): the sum of its
// gradients' squares; num_losses pairs of a sum of losses and the number of targets that count in it; other columns.
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
