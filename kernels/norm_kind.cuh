// Which norm a model has.
#pragma once
#include <stdbool.h> // bool

enum norm_kind { NORM_LAYERNORM, NORM_RMSNORM };
struct norm_options {
    enum norm_kind kind;
    bool one_plus; // the weight is stored as its difference from 1, which is added in fp32 (Gemma)
    float epsilon; // added to the variance
};
