// Says which norm a model has.
#pragma once
#include "kernels/device.cuh" // HOST_DEVICE
#include <stdbool.h>          // bool

enum norm_kind { NORM_LAYERNORM, NORM_RMSNORM };
struct norm_options {
    enum norm_kind kind;
    bool one_plus;  // the weight is stored as its difference from 1, which is added in fp32 (Gemma)
    float epsilon;  // added to the variance
    uint32_t *amax; // (1) raised to the largest magnitude in forward's out or backward's dx (kernels/amax.cuh); or NULL
};

// Returns what a norm adds to each weight: 1, or -0.0, which changes no float. Adding 0.0 would turn -0 into 0.
HOST_DEVICE float norm_weight_offset(bool one_plus) { return one_plus ? 1.0f : -0.0f; }
