#!/usr/bin/env bash
# Times variants of Hopper's attention kernels (tiles, stages, turns, the order of backward's blocks) on this machine's
# GPU, and names the fastest variant for each shape and direction.
#
#   scripts/attention_sweep.sh [VARIANT ...]     a variant is compiler options, such as '-DSM90_FORWARD_STAGES=1'
#
# A variant that does not compile, or whose kernels spill, is reported and left out. Needs nvcc and a GPU of compute
# capability 9.0. The fastest variant goes into the macros of kernels/attention/sm90_forward_plan.cuh and
# sm90_backward_plan.cuh.
set -u
cd "$(dirname "$0")/.." || exit 1
out=out/attention_sweep
mkdir -p "$out"
if [ $# -eq 0 ]; then
    set -- '-DSM90_SWEEP=0' \
        '-DSM90_FORWARD_TURNS=0' \
        '-DSM90_FORWARD_KEYS=112' \
        '-DSM90_FORWARD_KEYS=96' \
        '-DSM90_FORWARD_STAGES=1' \
        '-DSM90_BACKWARD_GANG=4 -DSM90_BACKWARD_MANY_HEADS=4 -DSM90_BACKWARD_L2_SHARE=0.6' \
        '-DSM90_BACKWARD_GANG=16 -DSM90_BACKWARD_MANY_HEADS=4 -DSM90_BACKWARD_L2_SHARE=0.6' \
        '-DSM90_BACKWARD_GANG=8 -DSM90_BACKWARD_MANY_HEADS=4 -DSM90_BACKWARD_L2_SHARE=0' \
        '-DSM90_BACKWARD_GANG=8 -DSM90_BACKWARD_MANY_HEADS=4 -DSM90_BACKWARD_L2_SHARE=1' \
        '-DSM90_BACKWARD_GANG=8 -DSM90_BACKWARD_MANY_HEADS=1000 -DSM90_BACKWARD_L2_SHARE=0.6'
fi
: >"$out/results.jsonl"
number=0
for variant; do
    build=$out/build_$number
    number=$((number + 1))
    mkdir -p "$build/cuda"
    if ! CFLAGS="-O3 -g $variant" make -s -f scripts/gpu_check.mk CUDA=yes B="$build" "$build/cuda/attention_bench" >"$build/log" 2>&1; then
        echo "$variant: does not compile: $(grep -m1 -E 'error|static assertion' "$build/log")"
    elif ! why=$(python3 scripts/ptxas_table.py "$build/cuda/ptxas_attention.log" 2>&1 >/dev/null); then
        echo "$variant: ${why%%$'\n'*}"
    elif ! "$build/cuda/attention_bench" >"$build/bench.jsonl"; then
        echo "$variant: fails"
    else
        echo "$variant: timed"
        python3 - "$variant" "$build/bench.jsonl" >>"$out/results.jsonl" <<'PYTHON'
import json, sys
for line in open(sys.argv[2]):
    row = json.loads(line)
    if row["engine"] == "ours":
        print(json.dumps({**row, "variant": sys.argv[1]}))
PYTHON
    fi
done
python3 - "$out/results.jsonl" <<'PYTHON'
import json, sys
best = {}
for line in open(sys.argv[1]):
    row = json.loads(line)
    shape = (row["direction"], row["mask"], row["head_dim"], row["heads"], row["groups"], row["length"])
    best.setdefault(shape, []).append((row["tflops"], row["variant"]))
for shape, rows in sorted(best.items()):
    rows.sort(reverse=True)
    print("%-22s %-6s hd %3d  heads %2d/%-2d  T %5d  %6.1f TFLOP/s by %s" % (*shape, *rows[0]),
          "(next: %.1f by %s)" % rows[1] if len(rows) > 1 else "")
PYTHON
