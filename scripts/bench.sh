#!/bin/sh
# The speed and memory table: scripts/bench.sh BUILD_FOLDER. Text on stdout and in out/bench/*.txt, JSON beside it.
# bf16 runs where the CPU has AMX, or with BENCH_BF16=1; without AMX it is slower than fp32 and of no use.
set -eu
build=${1:-build}
out=out/bench
mkdir -p "$out"
precisions=fp32
if grep -q amx_bf16 /proc/cpuinfo || [ "${BENCH_BF16:-0}" = 1 ]; then
    precisions="bf16 fp32"
fi
{
    echo "date: $(date -u +%F)"
    echo "cpu: $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(nproc) cores"
    echo "flags: $(grep -om1 -E 'amx_bf16|avx512_bf16' /proc/cpuinfo | sort -u | tr '\n' ' ')"
} | tee "$out/machine.txt"
for precision in $precisions; do
    for bench in matmul attention ops; do
        echo
        echo "== $bench, $precision"
        "$build/bench_${bench}_$precision" | tee "$out/$bench-$precision.txt"
    done
    echo
    echo "== generation, $precision"
    {
        "$build/bench_generate_$precision"
        "$build/bench_generate_$precision" --preset llama3.2-1b --num-layers 4 --tokens 32
    } | tee "$out/generate-$precision.txt"
    echo
    echo "== training step, $precision"
    # $BENCH_MODEL: options of train_gpt for another model
    # shellcheck disable=SC2086
    "$build/bench_step_$precision" --json "$out/step-$precision.json" ${BENCH_MODEL:-} | tee "$out/step-$precision.txt"
done
if command -v mpirun >/dev/null; then
    echo
    echo "== one and two ranks, fp32"
    TRAIN_GPT="$build/train_gpt" python3 scripts/bench_parallel.py --json "$out/parallel.json" >"$out/parallel.txt" || failed=1
    cat "$out/parallel.txt"
fi
echo
echo "tables: $out/*.txt   JSON: $out/step-*.json, $out/parallel.json"
exit "${failed:-0}"
