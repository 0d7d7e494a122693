# shellcheck shell=sh
# For the launch scripts: the environment variables of this host that ranks on other hosts get.

# The variables of run/environment.h, which change what is computed: all ranks must have the same values.
COMPUTING_VARIABLES="
NVTE_FLASH_ATTN NVTE_FUSED_ATTN NVTE_UNFUSED_ATTN NVTE_FP8_DPA_BWD CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT CUDNN_LIB_CONFIG
NVIDIA_TF32_OVERRIDE CUBLAS_EMULATE_SINGLE_PRECISION CUBLAS_EMULATION_STRATEGY CUBLASLT_HEURISTICS_LUT_FILE
NCCL_ALGO NCCL_PROTO NCCL_NVLS_ENABLE NCCL_COLLNET_ENABLE NCCL_BUFFSIZE NCCL_NTHREADS
NCCL_MIN_NCHANNELS NCCL_MAX_NCHANNELS NCCL_MIN_CTAS NCCL_MAX_CTAS
ONEDNN_MAX_CPU_ISA DNNL_MAX_CPU_ISA ONEDNN_CPU_ISA_HINTS DNNL_CPU_ISA_HINTS
ONEDNN_DEFAULT_FPMATH_MODE DNNL_DEFAULT_FPMATH_MODE OPENBLAS_CORETYPE OPENBLAS_BLOCK_FACTOR OPENBLAS_L2_SIZE
GLIBC_TUNABLES
"

# Prints the names of the COMPUTING_VARIABLES that are set, and of all variables that begin with NCCL_ or OMP_.
variables_to_take() {
    {
        env | sed -n 's/^\(\(NCCL\|OMP\)_[A-Z0-9_]*\)=.*/\1/p'
        for name in $COMPUTING_VARIABLES; do
            ! printenv "$name" >/dev/null || echo "$name"
        done
    } | sort -u
}
