#!/bin/sh
# Checks each ratio that `make bench` promises against its bound, on a machine that does nothing else: status 1 where a
# ratio misses it. A machine counts as busy, and so as missing, if the load of its last minute does not fall below 1
# within four minutes, after which the load of the row's own build is gone.
set -u
cd "$(dirname "$0")/../.." || exit 2
waited=0
load=$(cut -d ' ' -f 1 /proc/loadavg)
while [ "${load%.*}" -ge 1 ]; do
    if [ $waited -ge 240 ]; then
        echo "missing: an idle machine (its load is $load)"
        exit 77
    fi
    sleep 10
    waited=$((waited + 10))
    load=$(cut -d ' ' -f 1 /proc/loadavg)
done
BENCH_ROUNDS="${BENCH_ROUNDS:-2}" scripts/bench.sh "${B:-build}" || exit 1
failed=$(grep -c ' missed$' out/bench/ratios.txt)
sed -n 's/^\(.*[^ ]\)  *\([0-9.]*\) \([<>]=\) *\([0-9.]*\)\(.*\)$/\1 \2 \3 \4\5/p' out/bench/ratios.txt | sed -n 's/ missed$/: missed/p'
echo "$(($(grep -c '[<>]=' out/bench/ratios.txt) - failed)) passed, $failed failed"
[ "$failed" -eq 0 ]
