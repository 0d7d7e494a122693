// The kinds of norms, which both targets' files of kernels/norm.cuh need.
#pragma once

enum norm_kind { NORM_LAYERNORM, NORM_RMSNORM };
