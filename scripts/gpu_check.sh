#!/bin/bash
# Checks the CUDA engine on the GPU of this machine and times it beside PyTorch, in one run of under ten minutes.
#
#   scripts/gpu_check.sh [--stages LIST] [folder for results, default build/gpu]
#
# Stages, all of them in this order unless LIST (with commas) names some:
#   build      the engine, its op tests and the attention benchmark, for this GPU; what ptxas made of attention
#   test       op and golden tests on the GPU, fp32 and bf16
#   sanitize   compute-sanitizer's memcheck and racecheck on the small ones
#   curve      50 steps of a small GPT-2 and a small Llama, held against the cpu target's losses
#   ranks      10 steps by two ranks that share the GPU, over TCP, held against one rank's; where there are more GPUs, and
#              NCCL, over NCCL too, and the tokens/s of all GPUs beside one's
#   attention  TFLOP/s of flash attention beside PyTorch's flash and cuDNN
#   train      tokens/s, MFU and memory of three models under each recompute policy, beside torch.compile
#   report     gpu_check.json and gpu_check.md from what the stages before left in the folder
#
# Needs nvcc, and for the comparisons a python3 with torch (PYTHON names another one). GPU_CHECK_SECONDS (560) bounds the
# benchmarks: none is begun later than that after the start.
# Exit status: 0 every check passed, 1 one failed, 77 there is no GPU.
set -u
cd "$(dirname "$0")/.." || exit 1
stages=build,test,sanitize,curve,ranks,attention,train,report
if [ "${1:-}" = --stages ]; then
    stages=${2:?--stages: a list with commas is missing}
    shift 2
fi
out=${1:-build/gpu}
python=${PYTHON:-python3}
limit=${GPU_CHECK_SECONDS:-560}
jobs=$(nproc)
failures=0
mkdir -p "$out"
report() { "$python" scripts/gpu_report.py "$@"; }

# step NAME COMMAND...: its output goes to $out/NAME.txt, and is shown where it fails. Each is a line of the report.
step() {
    local name=$1 begin=$SECONDS status=0
    shift
    "$@" >"$out/$name.txt" 2>&1 || status=$?
    if [ $status = 0 ]; then
        printf 'ok: %s (%d s)\n' "$name" $((SECONDS - begin))
    else
        printf 'FAILED: %s (%d s, status %d): %s\n' "$name" $((SECONDS - begin)) $status "$*"
        tail -n 30 "$out/$name.txt"
        failures=$((failures + 1))
    fi
    printf '{"check": "%s", "status": %d, "seconds": %d}\n' "$name" $status $((SECONDS - begin)) >>"$out/checks.jsonl"
    return $status
}
skip() {
    printf 'skipped: %s: %s\n' "$1" "$2"
    printf '{"check": "%s", "skipped": "%s"}\n' "$1" "$2" >>"$out/checks.jsonl"
}
# bench NAME COMMAND...: its JSON lines go to $out/bench.jsonl. Not begun when time is up.
bench() {
    local name=$1
    shift
    if [ "$SECONDS" -gt "$limit" ]; then
        skip "$name" "no time left"
    else
        step "$name" timeout 240 "$@"
        grep '^{' "$out/$name.txt" >>"$out/bench.jsonl" # a failure is a row too
    fi
}

build() {
    step build_engine make -j"$jobs" cuda || exit 1
    step build_checks make -j"$jobs" -k -f scripts/gpu_check.mk CUDA=yes gpu-check
    step spills "$python" scripts/ptxas_table.py build/cuda/ptxas_attention.log
    if [[ $gpu != *", 9.0,"* ]]; then
        skip overlap "the compute capability is not 9.0"
    elif ! command -v cuobjdump >/dev/null; then
        skip overlap "cuobjdump is not installed"
    else
        step overlap sh -c "cuobjdump -sass build/cuda/attention_bench | $python scripts/hopper_overlap.py"
    fi
}

run_tests() {
    local test blocking
    for test in build/cuda/op_*_fp32 build/cuda/op_*_bf16; do
        # Tests of ops read results on the host right after the call; those of the model wait for them, as training does.
        blocking=1
        [[ $test == */op_gpt_* || $test == */op_golden_* ]] && blocking=0
        step "$(basename "$test")" timeout 240 env CUDA_LAUNCH_BLOCKING=$blocking "$test"
    done
}

sanitize() {
    local sanitizer test tool
    sanitizer=$(command -v compute-sanitizer || echo "$(dirname "$(readlink -f "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")")/compute-sanitizer")
    if [ ! -x "$sanitizer" ]; then
        skip sanitize "compute-sanitizer is not installed"
        return
    fi
    for tool in memcheck racecheck; do
        for test in op_attention_quick op_activation_bf16 op_norm_bf16 op_rope_bf16 op_loss_bf16; do
            step "${tool}_$test" timeout 120 env CUDA_LAUNCH_BLOCKING=1 "$sanitizer" --tool $tool --target-processes all \
                --error-exitcode 9 "build/cuda/$test"
        done
    done
}

curve() {
    local shape precision device name
    step data report data "$out/data" || return
    local -A options=(
        [gpt2]="--num-layers 3 --hidden-size 128 --num-attention-heads 4 --hidden-dropout 0.1 --attention-dropout 0.1"
        [llama]="--preset demo --num-layers 3"
    )
    for shape in gpt2 llama; do
        for precision in fp32 bf16; do
            name=curve_${shape}_$precision
            for device in cpu cuda; do
                # shellcheck disable=SC2086 # a shape is several words
                step "${name}_$device" timeout 120 "$python" scripts/gpu_report.py run "$out/${name}_$device" \
                    ${options[$shape]} --vocab-size 257 --seq-length 128 --train-data "$out/data/bytes_*.bin" \
                    --micro-batch-size 8 --global-batch-size 16 --train-steps 50 --lr 1e-3 \
                    --precision "$precision" --device "$device"
            done
            step "$name" report curve "$out/${name}_cpu" "$out/${name}_cuda"
        done
    done
}

# several NAME RANKS COLLECTIVES STAGES OPTION...: a run by one rank, then by RANKS over each of COLLECTIVES with each of the
# ZeRO STAGES, on the same batches.
several() {
    local name=$1 count=$2 kinds=$3 zero_stages=$4 kind stage
    shift 4
    step "ranks_${name}_one" timeout 120 "$python" scripts/gpu_report.py run "$out/ranks_${name}_one" "$@" || return
    for kind in $kinds; do
        for stage in $zero_stages; do
            bench "ranks_${name}_${kind}_$stage" "$python" scripts/gpu_report.py ranks "$out/ranks_${name}_${kind}_$stage" \
                "$out/ranks_${name}_one" "$count" "$@" --collectives "$kind" --zero-stage "$stage"
        done
    done
}

ranks() {
    local gpus missing="" kinds=sockets
    step data report data "$out/data" || return
    gpus=$(nvidia-smi -L | wc -l)
    ldd build/train_gpt | grep -q libnccl || missing="train_gpt was built without NCCL"
    [ "$gpus" -ge 2 ] || missing="there is one GPU"
    [ -n "$missing" ] || kinds="sockets nccl"
    several small 2 "$kinds" "0 3" --num-layers 3 --hidden-size 128 --num-attention-heads 4 --hidden-dropout 0.1 \
        --attention-dropout 0.1 --vocab-size 257 --seq-length 128 --train-data "$out/data/bytes_*.bin" \
        --micro-batch-size 4 --global-batch-size 16 --train-steps 10 --lr 1e-3 --bucket-mib 0.5 \
        --precision fp32 --device cuda
    if [ -n "$missing" ]; then
        skip ranks_nccl "$missing"
        return
    fi
    several gpt2-124m "$gpus" nccl "0 1 3" --preset gpt2-124m --micro-batch-size 16 --global-batch-size $((16 * gpus)) \
        --train-steps 14 --train-data "$out/data/gpt2_*.bin" --precision bf16 --device cuda
}

attention() {
    bench attention_ours build/cuda/attention_bench
    if [ -n "$has_torch" ]; then
        bench attention_torch "$python" test/cuda/peer_torch.py attention
    fi
}

train() {
    local preset length batch policy data
    step data report data "$out/data" || return
    for length in 1024 4096; do
        for preset in gpt2-124m gpt2-1558m llama3.2-1b; do
            batch=$((16384 / length))
            data="$out/data/gpt2_*.bin"
            [ $preset = llama3.2-1b ] && data="$out/data/llama_*.bin"
            for policy in none selective full; do
                bench "train_${preset}_${length}_$policy" "$python" scripts/gpu_report.py run \
                    "$out/train_${preset}_${length}_$policy" --preset $preset --seq-length $length \
                    --max-position-embeddings $length --micro-batch-size $batch --recompute-granularity $policy \
                    --train-steps 14 --train-data "$data" --precision bf16 --device cuda
            done
            if [ -n "$has_torch" ]; then
                bench "torch_${preset}_$length" "$python" test/cuda/peer_torch.py train --preset $preset \
                    --length $length --batch $batch
            fi
        done
    done
}

write_report() { report report "$out"; }

gpu=$(nvidia-smi --query-gpu=name,driver_version,compute_cap,memory.total --format=csv,noheader 2>/dev/null | head -n 1)
if [ -z "$gpu" ]; then
    echo "skipped: nvidia-smi names no GPU to check on"
    exit 77
fi
has_torch=
if "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    has_torch=yes
else
    echo "without PyTorch's figures: $python has no torch that sees a GPU"
fi
if [[ $stages == *build* ]]; then # a new set of results
    rm -f "$out/checks.jsonl" "$out/bench.jsonl"
    printf '{"gpu": "%s", "date": "%s", "commit": "%s"}\n' "$gpu" "$(date +%F)" \
        "$(git rev-parse --short HEAD 2>/dev/null)" >"$out/machine.jsonl"
fi
for stage in ${stages//,/ }; do
    case $stage in
    build) build ;;
    test) run_tests ;;
    sanitize) sanitize ;;
    curve) curve ;;
    ranks) ranks ;;
    attention) attention ;;
    train) train ;;
    report) write_report ;;
    *)
        echo "gpu_check.sh: '$stage' is no stage; see the head of this script" >&2
        exit 2
        ;;
    esac
done
echo "$failures failed, $SECONDS s"
[ $failures = 0 ]
