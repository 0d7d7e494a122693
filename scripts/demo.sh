#!/bin/sh
# Trains the demo's model on real text, as `make demo` does: scripts/demo.sh [TEXT [OPTION...]]. TEXT is a file or a
# folder, /usr/include by default, of which it takes the C headers. OPTIONs are train_gpt's: --train-steps 100 for a
# shorter run.
set -eu
text=${1:-/usr/include}
[ $# -eq 0 ] || shift
data=data/demo
out=out/demo
mkdir -p data

echo "== shards of bytes from $text"
headers=
if [ "$text" = /usr/include ]; then headers=--include=*.h; fi
python3 scripts/prepare_data.py "$text" $headers --max-bytes 40M --out "$data"

run() {
    build/train_gpt --preset demo --train-data "${data}_train_*.bin" --val-data "${data}_val_*.bin" --out "$out" \
        --micro-batch-size 8 --train-steps 1200 --optimizer muon --muon-momentum 0.9 --muon-num-ns-steps 3 --lr 3e-3 \
        --lr-warmup-steps 40 --lr-decay-style linear --init-method-std 0.06 --val-every 300 --val-steps 64 \
        --sample-every 1200 --sample-count 3 --temperature 0.8 --log-every 100 "$@" # docs/recipes.md says why
}
run --plan --plan-picture data/demo_plan.svg "$@" >data/demo_plan.txt
sed -n 's/^verdict  */memory plan: /p' data/demo_plan.txt

echo "== training"
rm -rf "$out/checkpoints" # of an earlier demo
run --checkpoint-every 1200 "$@"
python3 scripts/plot_loss.py "$out/log.jsonl" --out "$out/loss.svg"
python3 scripts/report.py "$out"
echo
for model in "$out"/checkpoints/step_*; do :; done # the newest
echo "model: $model   log: $out/log.jsonl   to look at: $out/report.html (curves, memory, samples)"
echo "try: build/train_gpt --init-from $model --generate '#include'"
