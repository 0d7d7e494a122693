#!/bin/sh
# Prints the tables of speed and memory, and writes them to out/bench/*.txt, with JSON beside them. The last table has
# each promised ratio and its bound.
#
#   scripts/bench.sh [BUILD_FOLDER]     build unless named
#
# BENCH_MODEL   options of train_gpt for another model than GPT-2 124M
# BENCH_ROUNDS  how often each precision's training step is timed (2); the precisions take turns
# BENCH_BF16=1  times bf16 also where --precision auto does not take it, since it is slower than fp32 there
set -eu
build=${1:-build}
out=out/bench
mkdir -p "$out"
rm -f "$out"/step-*.json "$out"/generate-*.txt # an earlier call's rounds would count
precisions=fp32
if "$build/train_gpt" --device cpu --preset demo --plan=full | grep -q '^precision  *bf16' || [ "${BENCH_BF16:-0}" = 1 ]; then
    precisions="fp32 bf16"
fi
{
    echo "date: $(date -u +%F)"
    echo "cpu: $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1), $(nproc) cores"
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
done
for round in $(seq "${BENCH_ROUNDS:-2}"); do
    for precision in $precisions; do
        echo
        echo "== training step, $precision, round $round"
        # shellcheck disable=SC2086
        "$build/bench_step_$precision" --rounds 1 --json "$out/step-$precision-$round.json" ${BENCH_MODEL:---preset gpt2-124m} |
            tee "$out/step-$precision-$round.txt"
    done
done
if command -v mpirun >/dev/null; then
    echo
    echo "== one and two ranks, fp32"
    TRAIN_GPT="$build/train_gpt" python3 scripts/bench_parallel.py --json "$out/parallel.json" >"$out/parallel.txt" || failed=1
    cat "$out/parallel.txt"
fi
echo
python3 scripts/bench_report.py "$out" | tee "$out/ratios.txt"
echo
echo "tables: $out/*.txt   JSON: $out/step-*.json, $out/parallel.json"
exit "${failed:-0}"
