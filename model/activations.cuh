// Maps --activation's value, an enum activation, to the kernels of that activation function of the MLP.
#pragma once
#include "config/choices.h"       // enum activation
#include "kernels/activation.cuh" // gelu_forward, swiglu_forward and the like, and their backward

// Calls POINTWISE(name) or, for a gated activation, GATED(name). `name` is the prefix of the activation's kernels.
#define ACTIVATION_SWITCH(activation, POINTWISE, GATED)                                                                \
    switch (activation) {                                                                                              \
    case ACTIVATION_GELU: POINTWISE(gelu); break;                                                                      \
    case ACTIVATION_GELU_ERF: POINTWISE(gelu_erf); break;                                                              \
    case ACTIVATION_SQUARED_RELU: POINTWISE(squared_relu); break;                                                      \
    case ACTIVATION_SWIGLU: GATED(swiglu); break;                                                                      \
    case ACTIVATION_GEGLU: GATED(geglu); break;                                                                        \
    }
