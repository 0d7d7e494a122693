#!/bin/bash
# Checks the CUDA kernels on the GPU of this machine and times them beside PyTorch's, in one run.
#
#   scripts/gpu_check.sh [folder for results, default build/gpu]
#
# Needs nvcc (CUDA_HOME, PATH or /usr/local/cuda); for the comparison a python3 with torch (PYTHON names another one).
# Exit status: 0 every check passed, 1 one failed, 77 the kernels compile but there is no GPU to run them on.
set -u
cd "$(dirname "$0")/.." || exit 1
OUT=${1:-build/gpu}
PYTHON=${PYTHON:-python3}
mkdir -p "$OUT"
failures=0

say() { printf '%s\n' "$*"; }
skip() { say "skipped: $*"; }
# step NAME COMMAND...: runs it with its output in $OUT/NAME.txt, and shows that if it fails.
step() {
    local name=$1 begin=$SECONDS
    shift
    if "$@" >"$OUT/$name.txt" 2>&1; then
        say "ok: $name ($((SECONDS - begin)) s)"
    else
        say "FAILED: $name ($((SECONDS - begin)) s): $*"
        grep -v '^ok' "$OUT/$name.txt" | tail -n 30
        failures=$((failures + 1))
        return 1
    fi
}

NVCC=
for candidate in "${CUDA_HOME:-/nowhere}/bin/nvcc" "$(command -v nvcc)" /usr/local/cuda/bin/nvcc; do
    if [ -x "$candidate" ]; then
        NVCC=$candidate
        break
    fi
done
if [ -z "$NVCC" ]; then
    say "FAILED: no nvcc in CUDA_HOME, PATH or /usr/local/cuda: nothing can be built"
    exit 1
fi
gpu=$(nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader 2>/dev/null | head -n 1)
case $gpu in
*", 9.0") architecture=90a ;;
*", "*.*) architecture=$(printf '%s' "${gpu##*, }" | tr -d .) ;;
*)
    gpu=
    architecture=90a
    ;;
esac
say "GPU: ${gpu:-none found}; $("$NVCC" --version | grep release); $(date +%Y-%m-%d)"

# 1675: #pragma GCC unroll in host code
compile() {
    "$NVCC" -std=c++17 -O3 -I. -DPRECISION_BF16 -lineinfo -Xptxas -v -diag-suppress 1675 \
        -gencode="arch=compute_$1,code=sm_$1" -Xcompiler -O3,-march=native,-fopenmp \
        test/cuda/attention_check.cu -o "$OUT/attention_check_$1"
}
# One line a kernel: registers and bytes of spills, from what ptxas said.
resources() {
    awk '/Compiling entry function/ {
             match($0, /flash_[a-z_]*_kernel/); kernel = substr($0, RSTART + 6, RLENGTH - 13)
             match($0, /ILi[0-9]+ELb[01]/); split(substr($0, RSTART + 3, RLENGTH - 3), part, /ELb/) }
         /spill stores/ { split($0, words, ","); stores = words[2] + 0; loads = words[3] + 0 }
         /Used [0-9]+ registers/ {
             sub(/.*Used /, "")
             printf "%-14s D %3d %-8s registers %3d, spill stores %3d loads %3d bytes\n", kernel, part[1],
                    part[2] == "1" ? "dropout" : "", $1, stores, loads }' "$1" | sort
}
# Forward spills nothing; backward no more than 128 bytes.
spills_are_bounded() {
    resources "$OUT/compile_$1.txt" | tee "$OUT/resources_$1.txt"
    awk '{ for (i = 1; i < NF; i++) if ($i == "stores") bytes = $(i + 1) }
         bytes > 128 || ($1 == "forward" && bytes > 0) { print "spills too much: " $0; bad = 1 }
         END { exit NR != 24 || bad }' "$OUT/resources_$1.txt"
}
step "compile_$architecture" compile "$architecture" || exit 1
step "spills_$architecture" spills_are_bounded "$architecture"

if [ -z "$gpu" ]; then
    skip "every run on a GPU: nvidia-smi names none"
    [ $failures = 0 ] && exit 77
    exit 1
fi
program=$OUT/attention_check_$architecture
step attention "$program"
sanitizer=$(command -v compute-sanitizer || echo "$(dirname "$NVCC")/compute-sanitizer")
if [ -x "$sanitizer" ]; then
    step memcheck "$sanitizer" --tool memcheck --error-exitcode 9 "$program" --quick
    step racecheck "$sanitizer" --tool racecheck --error-exitcode 9 "$program" --quick
else
    skip "compute-sanitizer's memcheck and racecheck: not installed"
fi
step bench "$program" --bench
if "$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    step torch "$PYTHON" test/cuda/attention_sdpa.py
else
    skip "the comparison with PyTorch: $PYTHON has no torch that sees a GPU"
    : >"$OUT/torch.txt"
fi

# A Markdown table: a line a shape, our TFLOP/s, PyTorch's, and ours over the better of them.
{
    say "$(date +%Y-%m-%d), $gpu, $("$NVCC" --version | grep -o 'release.*'). TFLOP/s, bf16, causal."
    grep -h '^# torch' "$OUT/torch.txt"
    say
    say "| | head dim | heads | B | T | ours | PyTorch flash | PyTorch cuDNN | ours / better |"
    say "|---|---|---|---|---|---|---|---|---|"
    awk '$1 ~ /^(ours|flash|cudnn)$/ { shape = $2 " | " $3 " | " $4 "/" $5 " | " $6 " | " $7
                                       if ($1 == "ours") order[++n] = shape
                                       rate[$1, shape] = $9 }
         END { for (i = 1; i <= n; i++) {
                   s = order[i]; flash = rate["flash", s]; cudnn = rate["cudnn", s]
                   better = flash + 0 > cudnn + 0 ? flash + 0 : cudnn + 0
                   printf "| %s | %s | %s | %s | %s |\n", s, rate["ours", s], flash == "" ? "-" : flash,
                          cudnn == "" ? "-" : cudnn, better > 0 ? sprintf("%.2f", rate["ours", s] / better) : "-" } }' \
        "$OUT/bench.txt" "$OUT/torch.txt"
} >"$OUT/attention.md"
cat "$OUT/attention.md"
say "$failures failed"
[ $failures = 0 ]
