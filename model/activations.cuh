// The MLP's activation functions by the enumerator of --activation.
#pragma once
#include "config/choices.h"       // enum activation
#include "kernels/activation.cuh" // gelu_forward, swiglu_forward and the like, and their backward

// Calls POINTWISE(name) or, where fc has gate and up, GATED(name), with what the activation's functions begin with.
#define ACTIVATION_SWITCH(activation, POINTWISE, GATED)                                                                \
    switch (activation) {                                                                                              \
    case ACTIVATION_GELU: POINTWISE(gelu); break;                                                                      \
    case ACTIVATION_GELU_ERF: POINTWISE(gelu_erf); break;                                                              \
    case ACTIVATION_SQUARED_RELU: POINTWISE(squared_relu); break;                                                      \
    case ACTIVATION_SWIGLU: GATED(swiglu); break;                                                                      \
    case ACTIVATION_GEGLU: GATED(geglu); break;                                                                        \
    }
