#!/bin/bash
# Checks the CUDA engine on this machine's GPU and times it beside PyTorch, in calls of under ten minutes.
#
#   scripts/gpu_check.sh [--stages LIST] [folder for results, default build/gpu]
#
# Stages, the most valuable first. All run, in this order, unless LIST names some, with commas:
#   build            builds what the named stages need, for this GPU
#   unit             products of wgmma, TMA copies and mbarriers, each by itself, on plain device memory
#   attention        op tests of attention, bf16 and fp32
#   model            op tests of matrix products and of whole models, bf16
#   curve            the start-up check of attention; 50 steps of a small GPT-2 and a small Llama, their losses compared
#                    with the cpu target's
#   attention_table  this GPU's rates of a copy and of a large product; TFLOP/s of flash attention beside PyTorch's
#                    flash and cuDNN; what ptxas made of the kernels
#   train_table      tokens/s, MFU and memory of six models, models with a goal first, beside torch.compile; then by
#                    recompute policy
#   kernels          the time of each kind of kernel in a step, by Nsight Compute, beside the least possible time
#   fp8              op tests of FP8; losses of small models in FP8, compared with bf16's and with the cpu target's;
#                    tokens/s beside bf16's and torchao's
#   ops              the other op tests, and golden tests, bf16 and fp32
#   ranks            10 steps by two ranks that share the GPU, over TCP, compared with one rank's; where there are NCCL
#                    and more GPUs, also over NCCL, and the tokens/s of all GPUs beside one GPU's
#   sanitize         compute-sanitizer's memcheck and racecheck on small op tests
# The folder for results holds gpu_check.json, gpu_check.md and gpu_check.log, brought up to date after every check,
# also where a signal ends the script. A later run with the same folder, or a copy of it, adds its checks; a check that
# runs again replaces its earlier result. So a machine that keeps no files can be visited several times, for a few
# stages each time.
#
# Needs nvcc and, for the comparisons, a python3 with torch (PYTHON names another Python). docs/gpu/README.md says how
# to bring this tree to a machine without a network. In the environment:
#   GPU_CHECK_SECONDS=560       the script ends by then; a check for which no time is left is reported as skipped
#   GPU_CHECK_STEP_SECONDS=N    lowers to N the limit of each check whose own limit is higher
#   GPU_CHECK_ONLY=REGEX        of the stages' checks, only those whose names match are run; the build, the data and
#                               probes of the machine are always run
#   GPU_CHECK_TOGETHER=N        so many op tests run side by side: their references keep the host busy, not the GPU; unless
#                               set, one for each 4 cores, at most 4, and in a rehearsal one
#   GPU_CHECK_MEMORY=pinned     op tests take pinned memory; unless set, a probe says whether they can take managed
#                               memory
#   GPU_CHECK_PROGRAMS=DIR      a rehearsal: train_gpt and the test programs in DIR (build/emu) run in place of build/'s
#                               and build/cuda's; nothing is built
#   GPU_CHECK_SMALL=1           small sizes, for a rehearsal
# Exit status: 0 every check that ran passed, 1 a check failed or hung, or none passed, 2 wrong use, 77 there is no GPU.
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
all=build,unit,attention,model,curve,attention_table,train_table,kernels,fp8,ops,ranks,sanitize
stages=$all
if [ "${1:-}" = --stages ]; then
    stages=${2:?--stages: a list with commas is missing}
    shift 2
fi
for stage in ${stages//,/ }; do
    if [[ ,$all, != *",$stage,"* ]]; then
        echo "gpu_check.sh: '$stage' is no stage; expected some of $all" >&2
        exit 2
    fi
done
[[ '' =~ ${GPU_CHECK_ONLY:-} ]]
if [ $? = 2 ]; then
    echo "gpu_check.sh: GPU_CHECK_ONLY='$GPU_CHECK_ONLY' is no regular expression" >&2
    exit 2
fi
out=$(realpath -m "${1:-$root/build/gpu}")
rehearsal=${GPU_CHECK_PROGRAMS:-}
programs=build/cuda
if [ -n "$rehearsal" ]; then
    programs=$(realpath -m "$rehearsal")
    export TRAIN_GPT=$programs/train_gpt
fi
cd "$root" || exit 2
python=${PYTHON:-python3}
export PYTHON="$python" # make looks into this Python's nvidia wheels
export TRAIN_GPT_SELF_CHECK=off # each run has a folder of its own, and would check again; stage curve turns it on
limit=${GPU_CHECK_SECONDS:-560}
step_limit=${GPU_CHECK_STEP_SECONDS:-}
only=${GPU_CHECK_ONLY:-}
small=${GPU_CHECK_SMALL:-}
train_gpt=${TRAIN_GPT:-build/train_gpt}
jobs=$(nproc)
together=${GPU_CHECK_TOGETHER:-}
if [ -z "$together" ]; then
    together=$((jobs < 8 ? 1 : jobs > 15 ? 4 : jobs / 4))
    [ -z "$rehearsal" ] || together=1
fi
declare -A beside=() # by process, the checks that run side by side: name, own limit, limit, begin
failures=0
passes=0
memory='' torch='' check='' pid='' watch='' build_failed=''
flash_kernels=()
report() { "$python" scripts/gpu_report.py "$@"; }

# stopped_by SIGNAL: ends the check that runs, and reports that it was stopped. Earlier checks are in the report
# already.
stopped_by() {
    [ "$BASHPID" = $$ ] || exit 1 # a background job that has not yet started its program
    trap '' INT TERM HUP
    for pid in "${!beside[@]}"; do
        kill -KILL -- "-$pid" "$pid" 2>/dev/null
        take_beside "$pid"
        finish "stopped by $1" 0 0
    done
    if [ -n "$pid" ]; then
        kill -KILL "$watch" 2>/dev/null
        kill -TERM "$pid" 2>/dev/null # timeout passes the signal on to its whole group
        for _ in 1 2 3 4 5 6 7 8 9 10; do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.2
        done
        kill -KILL -- "-$pid" "$pid" 2>/dev/null
        finish "stopped by $1" 0 0
    fi
    exit $((128 + $(kill -l "$1")))
}
# finish STATUS LIMIT OWN_LIMIT [--probe]: puts what the check said into the log and the report. The limits are in
# seconds: what the check was allowed, and what it has by itself.
finish() {
    local status=$1 allowed=$2 own=$3 result=0
    shift 3
    {
        printf '==== %s of %s, %s\n' "$check" "$stage" "$(date '+%F %T')"
        cat "$work/output"
    } >>"$out/gpu_check.log"
    report add "$out" "$stage" "$check" "$status" $((SECONDS - begin)) "$allowed" "$own" "$work/output" "$@" || result=$?
    [ $result != 1 ] || failures=$((failures + 1))
    # Preparations and probes of the machine are no checks.
    [ $result != 0 ] || [ $# != 0 ] || [ "$stage" = build ] || [ "$check" = data ] || passes=$((passes + 1))
    check='' pid=''
    return $result
}
no_time_left() { [ $((limit - SECONDS)) -lt 3 ]; }
# is_chosen CHECK: whether GPU_CHECK_ONLY matches its name. The build and the data, which other checks need, are always
# chosen.
is_chosen() { [ -z "$only" ] || [ "$stage" = build ] || [ "$1" = data ] || [[ $1 =~ $only ]]; }
# step [--probe] NAME LIMIT COMMAND...: runs a check for at most LIMIT seconds, less where less time is left. Returns 0
# where it passed, 77 where it was left out. GPU_CHECK_ONLY does not hold for a probe.
step() {
    local probe=() own allowed ended status=0
    if [ "$1" = --probe ]; then
        probe=(--probe)
        shift
    fi
    [ ${#probe[@]} != 0 ] || is_chosen "$1" || return 77
    check=$1 own=$2
    shift 2
    [ -z "$step_limit" ] || [ "$own" -lt "$step_limit" ] || own=$step_limit
    allowed=$((limit - SECONDS))
    if no_time_left; then
        report skip "$out" "$stage" "$check" "no time left"
        return 77
    fi
    [ $allowed -lt "$own" ] || allowed=$own
    begin=$SECONDS
    : >"$work/output"
    # In the background, so that a trap need not wait for the command, and a process that the kernel can't kill is left
    # behind.
    timeout -k 5 "$allowed" "$@" >"$work/output" 2>&1 </dev/null &
    pid=$!
    sleep $((allowed + 20)) >/dev/null 2>&1 &
    watch=$!
    wait -n -p ended "$pid" "$watch" || status=$?
    if [ "$ended" = "$watch" ]; then
        status=stuck
    else
        kill -KILL "$watch"
        wait "$watch" 2>/dev/null
    fi
    finish "$status" "$allowed" "$own" "${probe[@]}"
}
# take_beside PID: sets what finish needs of a check that ran beside others, and forgets it.
take_beside() {
    read -r check own allowed begin <<<"${beside[$1]}"
    unset "beside[$1]"
    mv "$work/output.$check" "$work/output"
}
# Waits for the first of the checks that run side by side to end, and reports it. None ends later than the script should,
# unless the kernel can't kill it: it is left behind.
finish_beside() {
    local ended guard status=0 own allowed
    sleep $((limit > SECONDS ? limit - SECONDS + 20 : 20)) >/dev/null 2>&1 &
    guard=$!
    wait -n -p ended "${!beside[@]}" "$guard" || status=$?
    if [ "$ended" = "$guard" ]; then
        status=stuck
        for ended in "${!beside[@]}"; do break; done
    else
        kill -KILL "$guard"
        wait "$guard" 2>/dev/null
    fi
    take_beside "$ended"
    finish "$status" "$allowed" "$own"
}
# step_beside NAME LIMIT COMMAND...: as step, but beside the $together - 1 latest checks. `finish_all_beside` ends it.
step_beside() {
    local name=$1 own=$2 allowed
    shift 2
    is_chosen "$name" || return
    [ -z "$step_limit" ] || [ "$own" -lt "$step_limit" ] || own=$step_limit
    while [ ${#beside[@]} -ge "$together" ]; do
        finish_beside
    done
    if no_time_left; then
        report skip "$out" "$stage" "$name" "no time left"
        return
    fi
    allowed=$((limit - SECONDS))
    [ $allowed -lt "$own" ] || allowed=$own
    timeout -k 5 "$allowed" env OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((jobs / together > 0 ? jobs / together : 1))}" "$@" \
        >"$work/output.$name" 2>&1 </dev/null &
    beside[$!]="$name $own $allowed $SECONDS"
}
finish_all_beside() {
    while [ ${#beside[@]} -gt 0 ]; do
        finish_beside
    done
}
skip() { report skip "$out" "$stage" "$1" "$2"; }
# is_built PROGRAM [CHECK]: whether the program is there and made of these sources. Where it isn't, the check (named
# like the program unless given) is reported as skipped.
is_built() {
    if [ -x "$1" ] && { [ -n "$rehearsal" ] || [ -z "$build_failed" ] || make -q -f scripts/gpu_check.mk CUDA=yes "$1" 2>/dev/null; }; then
        return 0
    fi
    skip "${2:-$(basename "$1")}" "$1 was not built"
    return 1
}

# Installs the Python packages that scripts/gpu_pack.sh packed, only for this script.
install_wheels() {
    stage=build
    step wheels 60 "$python" -m pip install --quiet --no-index --no-deps --target "$work/wheels" .deps/wheels/*.whl
    export PYTHONPATH="$work/wheels${PYTHONPATH:+:$PYTHONPATH}"
}
# Adds folders to LD_LIBRARY_PATH. cuDNN is loaded by its name, and PyTorch's cuDNN lies in a wheel's folder, where no
# loader looks. Programs that were built on another machine name that machine's folders of cuBLASLt and NCCL; where they
# aren't here, the folders of the wheels and of nvcc are added.
find_libraries() {
    local wheel folder needed=
    ! ldd "$train_gpt" 2>/dev/null | grep -q 'lib\(cublasLt\|nccl\).*not found' || needed=yes
    while read -r wheel; do
        if [ -e "$wheel/cudnn/lib/libcudnn.so.9" ]; then
            export LD_LIBRARY_PATH="$wheel/cudnn/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
        fi
        for folder in "$wheel"/{cu13,cublas,nccl}/lib; do
            [ -z "$needed" ] || [ ! -d "$folder" ] || export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder"
        done
    done < <("$python" -c 'import nvidia; print(*nvidia.__path__, sep="\n")' 2>/dev/null)
    folder=$(dirname "$(dirname "$(readlink -f "$nvcc")")")/lib64
    [ -z "$needed" ] || [ ! -d "$folder" ] || export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder"
}
build() {
    local named=$stages target targets=()
    if [ -n "$rehearsal" ]; then
        skip build "a rehearsal by the programs in $rehearsal"
        return
    fi
    [ "$stages" != build ] || named=$all
    for target in ${named//,/ }; do
        [ "$target" = build ] || targets+=("gpu-${target//_/-}")
    done
    step build 420 make -j"$jobs" -k -f scripts/gpu_check.mk CUDA=yes "${targets[@]}" || build_failed=yes
}

# program_test NAME LIMIT COMMAND...: runs a test program, which reports in TAP.
program_test() {
    local name=$1 own=$2
    shift 2
    step "$name" "$own" env CMOCKA_MESSAGE_OUTPUT=TAP "$@"
}
unit() {
    local test found=
    for test in "$programs"/unit_*; do
        if [[ -f $test && -x $test && ${test##*/} != *.* ]] && is_built "$test"; then
            found=yes
            program_test "$(basename "$test")" 240 "$test"
        fi
    done
    [ -n "$found" ] || skip unit "there is no $programs/unit_*"
}

# Sets `memory` to the device memory that op tests read from the host: managed, pinned where managed is missing or
# hangs, or none.
choose_memory() {
    local kind
    [ -z "$memory" ] || return 0
    memory=managed
    [ -x "$programs/memory_probe" ] || return 0
    for memory in ${GPU_CHECK_MEMORY:-managed pinned}; do
        step --probe "memory_$memory" 30 "$programs/memory_probe" "$memory" && return
    done
    memory=none
    ! no_time_left || memory='' # no time to find out, nor for the tests that ask
}
# op_tests NAME...: runs op tests. Tests of ops read results on the host right after the call, so calls wait for the
# GPU; tests of models wait for results themselves, as training does.
op_tests() {
    local name blocking
    choose_memory
    for name; do
        blocking=1
        [[ $name == op_@(gpt|golden|block|zoo|fp8_gpt)_* ]] && blocking=0
        if [ "$memory" = none ]; then
            skip "$name" "the host and the GPU see no memory in common"
        elif is_built "$programs/$name"; then
            step_beside "$name" 240 CMOCKA_MESSAGE_OUTPUT=TAP TEST_MEMORY="$memory" CUDA_LAUNCH_BLOCKING=$blocking "$programs/$name"
        fi
    done
    finish_all_beside
}
attention() { op_tests op_attention_bf16 op_attention_fp32; }
model() { op_tests op_matmul_bf16 op_gpt_bf16; } # the tables' figures count only once these pass
is_fp8_test() { [[ $1 == */op_*fp8* ]]; }
ops() {
    local test names=()
    for test in "$programs"/op_*_bf16 "$programs"/op_*_fp32; do # without attention's, model's and fp8's
        [[ ! -f $test || $test == */op_@(attention_@(bf16|fp32)|@(matmul|gpt)_bf16) ]] || is_fp8_test "$test" ||
            names+=("$(basename "$test")")
    done
    op_tests "${names[@]}"
    if [ -n "$rehearsal" ] || [ ! -x "$cuobjdump" ]; then
        return
    fi
    # shellcheck disable=SC2016 # the inner shell's arguments
    step instructions 60 sh -c '"$3" -sass "$1" | "$2" scripts/count_sass.py' sh "$programs/op_activation_bf16" "$python" \
        "$cuobjdump"
}

torch_is_here() {
    if [ -z "$torch" ]; then
        torch=no
        step --probe torch 90 "$python" -c '
import torch
assert torch.cuda.is_available(), "torch sees no GPU"
print(torch.__version__, "with CUDA", torch.version.cuda, "and cuDNN", torch.backends.cudnn.version())' && torch=yes
    fi
    [ $torch = yes ]
}
attention_table() {
    local built=yes
    ! is_built "$programs/device_rates" || step device_rates 60 "$programs/device_rates" ${small:+--small}
    is_built "$programs/attention_bench" attention_ours || built=
    [ -z "$built" ] || step attention_ours 200 "$programs/attention_bench" ${small:+--small}
    if is_chosen attention_torch && torch_is_here; then
        step attention_torch 240 "$python" test/cuda/peer_torch.py attention ${small:+--quick}
    fi
    [ -n "$built" ] && [ -z "$rehearsal" ] || return
    step spills 30 "$python" scripts/ptxas_table.py "$programs/ptxas_attention.log"
    if [[ $gpu != *", 9.0,"* ]]; then
        skip overlap "the compute capability is not 9.0"
    elif [ ! -x "$cuobjdump" ]; then
        skip overlap "cuobjdump is not installed"
    else
        # shellcheck disable=SC2016 # the inner shell's arguments
        step overlap 60 sh -c '"$3" -sass "$1" | "$2" scripts/hopper_overlap.py' sh "$programs/attention_bench" "$python" \
            "$cuobjdump"
    fi
}

# train_run NAME LIMIT OPTION...: runs train_gpt with $work/NAME as its folder.
train_run() {
    local name=$1 own=$2
    shift 2
    step "$name" "$own" "$python" scripts/gpu_report.py run "$work/$name" "$@"
}
token_shards() { [ -e "$work/data/bytes_000.bin" ] || step data 60 "$python" scripts/gpu_report.py data "$work/data"; }
# case_options PRESET:LENGTH:BATCH[:MICRO_STEPS] POLICY: sets `case_name` and `case_run`, the options of a row of the
# table of training, on tokens of the preset's vocabulary.
case_options() {
    local preset length batch micro_steps policy=$2 steps=14 data=llama
    IFS=: read -r preset length batch micro_steps <<<"$1"
    [ -z "$micro_steps" ] && [ -z "$small" ] || steps=6
    case $preset in
    demo) data=bytes ;;
    gpt2*) data=gpt2 ;;
    esac
    case_name=${preset}_${length}_$policy
    case_run=(--preset "$preset" --seq-length "$length" --max-position-embeddings "$length" --micro-batch-size "$batch"
        --global-batch-size $((${micro_steps:-1} * batch)) --recompute-granularity "$policy" --train-steps "$steps"
        --train-data "$work/data/${data}_*.bin" --precision bf16)
    # A model whose fp32 states do not fit takes smaller states, within the GPU's memory less 2 % for its context and
    # libraries.
    if [ "$policy" = auto ]; then
        case_run+=(--memory-budget "$((gpu_memory_mib * 98 / 100))MiB" --allow-lossy-states)
    fi
}
train_case() {
    case_options "$1" "$2"
    train_run "train_$case_name" 120 "${case_run[@]}" --device cuda "${flash_kernels[@]}"
}
# A case is MODEL:T:B[:MICRO_STEPS]. Models with a goal (GOALS of gpu_report.py) come first, at the batches of
# kernels.md, and in steps of 8 micro-steps (4 at 7B) where the goal's steps are of hundreds of thousands of tokens: 9 to
# 28 s a run at the goals' rates. Our runs come before PyTorch's, which may compile a model for minutes; recomputation and
# other lengths come last.
train_table() {
    local case preset length batch micro_steps policy own
    local goals="gpt2-124m:1024:64 gpt2-1558m:1024:16:8 qwen2.5-0.5b:1024:16:8 qwen2.5-1.5b:1024:16:8"
    local lossy="qwen2.5-7b:1024:16:4" peers="$goals llama3.2-1b:4096:4" others="gpt2-124m:4096:16 gpt2-1558m:4096:4"
    if [ -n "$small" ]; then
        peers=demo:64:1:2 lossy='' others='' # auto first measures rates, which takes an emulator minutes
    fi
    is_built "$train_gpt" train_table && token_shards || return
    for case in $peers; do
        train_case "$case" none
    done
    for case in $lossy; do
        train_case "$case" auto
    done
    for case in $peers; do
        IFS=: read -r preset length batch micro_steps <<<"$case"
        own=180
        [ "$preset" != gpt2-1558m ] || own=300 # compiling 48 layers takes minutes
        if is_chosen "torch_${preset}_$length" && torch_is_here; then
            step "torch_${preset}_$length" $own "$python" test/cuda/peer_torch.py train --preset "$preset" --length "$length" \
                --batch "$batch" ${micro_steps:+--micro-steps "$micro_steps" --steps 4}
        fi
    done
    for case in $peers; do
        for policy in selective full; do
            train_case "$case" $policy
        done
    done
    for case in $others; do
        train_case "$case" none
    done
}

# kernel_times PRESET BATCH LENGTH OPTION...: times the kernels of a training step.
kernel_times() {
    local preset=$1 batch=$2 length=$3
    shift 3
    step "kernels_$preset" 150 "$python" scripts/kernel_times.py "$ncu" "$work/kernels_$preset" --preset "$preset" --batch "$batch" \
        --length "$length" "$@" --train-data "$work/data/gpt2_*.bin" "${flash_kernels[@]}"
}
kernels() {
    local ncu
    ncu=$(command -v ncu || echo "$(dirname "$(readlink -f "$nvcc")")/ncu")
    if [ ! -x "$ncu" ]; then
        skip kernels "ncu is not installed"
        return
    fi
    is_built "$train_gpt" kernels && token_shards || return
    if [ -n "$small" ]; then
        kernel_times gpt2-124m 1 64 --layers 1
        return
    fi
    kernel_times gpt2-124m 64 1024
    kernel_times gpt2-1558m 16 1024 --layers 4 # of 48 alike: ncu stops for each kernel
}

# small_model gpt2|llama|gpt2_64|llama_128: sets `model` to the options of a model that trains within seconds. gpt2_64
# and llama_128 have heads of 64 and 128 elements and no dropout: in bf16, Hopper's own attention takes them.
small_model() {
    local layers=3 length=128
    if [ -n "$small" ]; then
        layers=1 length=32
    fi
    model=(--preset demo)
    case $1 in
    gpt2) model=(--hidden-size 128 --num-attention-heads 4 --hidden-dropout 0.1 --attention-dropout 0.1) ;;
    gpt2_64) model=(--hidden-size 128 --num-attention-heads 2) ;;
    llama_128) model+=(--kv-channels 128) ;;
    esac
    model+=(--num-layers "$layers" --vocab-size 257 --seq-length "$length" --train-data "$work/data/bytes_*.bin")
}
# Runs the start-up check, which says whether attention's kernels are right, for the models that Hopper's own attention
# takes. A run that falls back fails.
self_checks() {
    local shape
    for shape in gpt2_64 llama_128; do
        small_model "$shape"
        # shellcheck disable=SC2016
        step "self_check_$shape" 120 bash -c '"$@" | tee /dev/stderr |
            awk "/^self-check .*kernels are right/ { right = 1 } /wgmma [^;]*failed the self-check/ { wrong = 1 } END { exit wrong || !right }"' check \
            "$train_gpt" "${model[@]}" --micro-batch-size 1 --global-batch-size 1 --train-steps 1 --precision bf16 \
            --device cuda --self-check always --out "$work/self_check_$shape"
    done
}
# fp32_on_cpu NAME OPTION...: trains on the cpu target in fp32, for other runs to be compared with, unless that was
# done.
fp32_on_cpu() {
    local name=$1
    shift
    [ -e "$work/$name/log.jsonl" ] || train_run "$name" 120 "$@" --precision fp32 --device cpu
}
# curve_options SHAPE PRECISION DEVICE: sets `kernels` to the options by which Hopper's own attention trains what it
# takes: `auto` may find others faster. A run whose report names another attention fails.
curve_options() {
    kernels=()
    if [[ $gpu == *", 9.0,"* && $1:$2:$3 =~ ^(gpt2_64|llama_128):bf16:cuda$ ]]; then
        kernels=(--attention-backend flash --flash-kernels wgmma)
    fi
}
curve() {
    local case shape precision device name exact kernels run=(--micro-batch-size 8 --global-batch-size 16 --train-steps 50 --lr 1e-3)
    [ -z "$small" ] || run=(--micro-batch-size 1 --global-batch-size 2 --train-steps 6 --lr 3e-3)
    is_built "$train_gpt" curve && token_shards || return
    self_checks
    for case in gpt2:fp32 gpt2:bf16 gpt2_64:bf16 llama:fp32 llama:bf16 llama_128:bf16; do
        IFS=: read -r shape precision <<<"$case"
        small_model "$shape"
        name=curve_${shape}_$precision
        for device in cpu cuda; do
            curve_options "$shape" "$precision" "$device"
            train_run "${name}_$device" 120 "${model[@]}" "${run[@]}" --precision "$precision" --device "$device" "${kernels[@]}"
        done
        exact=()
        if [ "$precision" = bf16 ]; then
            fp32_on_cpu "curve_${shape}_fp32_cpu" "${model[@]}" "${run[@]}"
            exact=("$work/curve_${shape}_fp32_cpu")
        fi
        step "$name" 20 "$python" scripts/gpu_report.py curve "$work/${name}_cpu" "$work/${name}_cuda" "${exact[@]}"
    done
}

# fp8_options RECIPE: sets `recipe_options` to the recipe's options.
fp8_options() {
    recipe_options=(--fp8-format hybrid --fp8-recipe "$1")
    [ "$1" != delayed ] || recipe_options+=(--fp8-amax-history-len 16 --fp8-amax-compute-algo max)
}
# fp8_runs NAME RECIPES OPTION...: trains in bf16, unless the stage train_table did, then in FP8 by each of RECIPES, and
# compares each FP8 run with bf16's.
fp8_runs() {
    local name=$1 recipes=$2 recipe bf16=$work/train_$1
    shift 2
    set -- "$@" --device cuda "${flash_kernels[@]}"
    if [ ! -e "$bf16/log.jsonl" ]; then
        bf16=$work/fp8_${name}_bf16
        train_run "fp8_${name}_bf16" 120 "$@" || return
    fi
    for recipe in $recipes; do
        fp8_options "$recipe"
        step "fp8_${name}_$recipe" 120 "$python" scripts/gpu_report.py fp8 "$work/fp8_${name}_$recipe" "$bf16" "$@" \
            "${recipe_options[@]}"
    done
}
# fp8_case CASE POLICY RECIPES: the same for a row of the table of training.
fp8_case() {
    case_options "$1" "$2"
    fp8_runs "$case_name" "$3" "${case_run[@]}"
}
fp8_curves() {
    local recipes=$1 shape recipe name run=(--micro-batch-size 8 --global-batch-size 16 --train-steps 50 --lr 1e-3)
    [ -z "$small" ] || run=(--micro-batch-size 4 --global-batch-size 4 --train-steps 6 --lr 3e-3)
    for shape in gpt2_64 llama_128; do
        small_model $shape
        fp8_runs "$shape" "$recipes" "${model[@]}" "${run[@]}" --precision bf16
        fp32_on_cpu "fp8_${shape}_exact" "${model[@]}" "${run[@]}"
        for recipe in $recipes; do
            name=fp8_${shape}_$recipe
            fp8_options "$recipe"
            train_run "${name}_cpu" 120 "${model[@]}" "${run[@]}" "${recipe_options[@]}" --precision bf16 --device cpu
            step "${name}_curve" 20 "$python" scripts/gpu_report.py curve "$work/${name}_cpu" "$work/$name" "$work/fp8_${shape}_exact"
        done
    done
}
# fp8_speed BLOCKWISE: times training in FP8. BLOCKWISE is the recipe's name, or empty where the GPU lacks it.
# gpt2-1558m goes without: its width of 1600 is no multiple of 128.
fp8_speed() {
    local blockwise=$1
    if [ -n "$small" ]; then
        fp8_case demo:64:1 none "tensorwise delayed"
        return
    fi
    fp8_case qwen2.5-1.5b:1024:16:8 none "delayed tensorwise $blockwise"
    fp8_case qwen2.5-7b:1024:16:4 auto "delayed tensorwise"
    fp8_case gpt2-1558m:1024:16:8 none "delayed tensorwise"
    if is_chosen torchao_gpt2-1558m && torchao_is_here; then
        step torchao_gpt2-1558m 240 "$python" test/cuda/peer_torch.py train --preset gpt2-1558m --length 1024 --batch 16 --float8
    fi
    # 80 GB hold 8 of its layers: optimizer and gradients take 18 bytes a parameter.
    fp8_runs llama3-8b "tensorwise delayed $blockwise" --preset llama3-8b --num-layers 8 --micro-batch-size 2 --seq-length 4096 \
        --train-steps 14 --precision bf16 --train-data "$work/data/llama_*.bin"
    fp8_case gpt2-124m:1024:64 none "delayed tensorwise"
}
torchao_is_here() {
    torch_is_here && step --probe torchao 60 "$python" -c 'import torchao.float8; print(torchao.__version__)'
}
fp8() {
    local test names=() capability=0 blockwise=
    for test in "$programs"/op_*_bf16 "$programs"/op_*_fp32; do
        [ ! -f "$test" ] || ! is_fp8_test "$test" || names+=("$(basename "$test")")
    done
    op_tests "${names[@]}"
    [[ ! $gpu =~ ,\ ([0-9]+)\.([0-9]),\ [^,]*$ ]] || capability=${BASH_REMATCH[1]}${BASH_REMATCH[2]}
    if [ "$capability" -lt 89 ]; then
        skip fp8_training "the compute capability is below 8.9"
        return
    fi
    [ "$capability" != 90 ] || blockwise=blockwise
    is_built "$train_gpt" fp8_training && token_shards || return
    fp8_curves "tensorwise delayed $blockwise"
    fp8_speed "$blockwise"
}

# several NAME RANKS COLLECTIVES STAGES OPTION...: trains by one rank, then by RANKS over each of COLLECTIVES at each of
# the ZeRO STAGES, on the same batches, and compares.
several() {
    local name=$1 count=$2 kinds=$3 zero_stages=$4 kind zero_stage
    shift 4
    train_run "ranks_${name}_one" 120 "$@" || return
    for kind in $kinds; do
        for zero_stage in $zero_stages; do
            step "ranks_${name}_${kind}_$zero_stage" 120 "$python" scripts/gpu_report.py ranks \
                "$work/ranks_${name}_${kind}_$zero_stage" "$work/ranks_${name}_one" "$count" "$@" --collectives "$kind" \
                --zero-stage "$zero_stage"
        done
    done
}
ranks() {
    local gpus missing="" kinds=sockets
    local run=(--micro-batch-size 4 --global-batch-size 16 --train-steps 10 --lr 1e-3 --bucket-mib 0.5)
    [ -z "$small" ] || run=(--micro-batch-size 1 --global-batch-size 2 --train-steps 6 --lr 1e-3 --bucket-mib 0.25)
    is_built "$train_gpt" ranks && token_shards || return
    gpus=$(nvidia-smi -L | wc -l)
    ldd "$train_gpt" | grep -q libnccl || missing="train_gpt was built without NCCL"
    [ "$gpus" -ge 2 ] || missing="there is one GPU"
    [ -n "$missing" ] || kinds="sockets nccl"
    small_model gpt2
    several small 2 "$kinds" "0 3" "${model[@]}" "${run[@]}" --precision fp32 --device cuda
    if [ -n "$missing" ]; then
        skip ranks_nccl "$missing"
        return
    fi
    several gpt2-124m "$gpus" nccl "0 1 3" --preset gpt2-124m --micro-batch-size 16 --global-batch-size $((16 * gpus)) \
        --train-steps 14 --train-data "$work/data/gpt2_*.bin" --precision bf16 --device cuda "${flash_kernels[@]}"
}

sanitize() {
    local sanitizer test tool own
    sanitizer=$(command -v compute-sanitizer || echo "$(dirname "$(readlink -f "$nvcc")")/compute-sanitizer")
    if [ ! -x "$sanitizer" ]; then
        skip sanitizer "compute-sanitizer is not installed"
        return
    fi
    choose_memory
    # Some virtual machines let compute-sanitizer run no program.
    step --probe sanitizer 60 "$sanitizer" --tool memcheck --error-exitcode 9 "$programs/memory_probe" "$memory" || return
    for tool in memcheck racecheck; do
        for test in op_attention_quick op_activation_bf16 op_norm_bf16 op_rope_bf16 op_loss_bf16; do
            is_built "$programs/$test" "${tool}_$test" || continue
            if [[ ${tool}_$test == racecheck_op_attention_quick && $gpu == *", 9.0,"* ]]; then
                # On an H200 it reported races of bulk copies in a unit test, too, whose warps arrive by one lane.
                skip "${tool}_$test" "racecheck does not follow mbarriers at which one lane arrives for a warp"
                continue
            fi
            own=120
            [ "$test" != op_attention_quick ] || own=400
            step "${tool}_$test" $own env TEST_MEMORY="$memory" CUDA_LAUNCH_BLOCKING=1 "$sanitizer" --tool $tool \
                --target-processes all --error-exitcode 9 "$programs/$test"
        done
    done
}

ask_gpu() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -n 1; }
gpu=$(ask_gpu name,compute_cap,memory.total)
if [ -z "$gpu" ]; then
    echo "skipped: nvidia-smi names no GPU to check on"
    exit 77
fi
tools="timeout realpath"
[[ ,$stages, != *,build,* || -n $rehearsal ]] || tools+=" make g++" # programs that were built elsewhere need neither
for tool in $tools; do
    if ! command -v "$tool" >/dev/null; then
        echo "gpu_check.sh: $tool is not installed" >&2
        exit 2
    fi
done
mkdir -p "$out" && work=$(mktemp -d) || exit 2
# torch.compile's cache serves later checks. It goes with $work, unless TORCHINDUCTOR_CACHE_DIR names a folder.
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$work/torchinductor}"
# Seconds that a run waits for kernels that hang, before it falls back on simpler ones.
export TRAIN_GPT_SELF_CHECK_SECONDS="${TRAIN_GPT_SELF_CHECK_SECONDS:-30}"
# Keeps the GPU open: a GPU that no process has open is started anew for each process, which takes 1 to 3 s.
gpu_file=/dev/nvidia0
if [ -r $gpu_file ] && [ -w $gpu_file ]; then
    exec 9<>$gpu_file
fi
trap '[ "$BASHPID" != $$ ] || rm -rf "$work"' EXIT
for signal in INT TERM HUP; do
    # shellcheck disable=SC2064 # the name is to be expanded now
    trap "stopped_by $signal" $signal
done
nvcc=$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")
cuobjdump=$(command -v cuobjdump || echo "$(dirname "$(readlink -f "$nvcc")")/cuobjdump")
gpu_memory_mib=$(sed -n 's/.*, \([0-9]*\) MiB$/\1/p' <<<"$gpu")
# Without safe.directory git refuses a tree that belongs to another user, as a copied tree may.
commit=$({ [ -e .git ] && git -c safe.directory='*' describe --always --dirty --abbrev=12 || cat .packed_commit; } 2>/dev/null)
report start "$out" "gpu=$gpu" "driver=$(ask_gpu driver_version)" "date=$(date +%F)" "commit=$commit" "rehearsal=$rehearsal" \
    "nvcc=$("$nvcc" --version 2>/dev/null | sed -n 's/^Cuda compilation.*release/CUDA/p')" || exit
[ ! -d .deps/wheels ] || install_wheels
find_libraries
for stage in ${stages//,/ }; do
    # Stages whose runs make no start-up check leave wgmma out where its check failed: each run might hang up to its limit.
    case $stage in
    train_table | kernels | fp8 | ranks)
        chosen=$(report flash_options "$out") || chosen="--flash-kernels mma"
        read -ra flash_kernels <<<"$chosen"
        ;;
    esac
    $stage
done
echo "$passes passed, $failures failed, $SECONDS s; $out/gpu_check.md"
[ $failures = 0 ] && { [ $passes != 0 ] || [ "$stages" = build ]; }
