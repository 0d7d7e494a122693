#!/bin/sh
# Example: a run on two plain hosts, with a process for each GPU, without scheduler and without MPI. Run it on the first
# host. The tree, the data and --out lie at the same paths on both hosts.
#
#   GPUS=8 scripts/launch_two_hosts.sh node2 --preset llama3-8b --zero-stage 1 --train-data 'data/mine_train_*.bin' ...
#   GPUS=2 BIND=sockets scripts/launch_two_hosts.sh node2 --device cpu ...    a process on each of two sockets (numactl)
#
# GPUS     processes on each host (8)
# ADDRESS  this host's name or address on the other host (what `hostname` prints)
# PORT     a free port of this host that no firewall closes (29400)
# RSH      what runs a command on the other host ("ssh OTHER_HOST")
# TRAIN_GPT_SECRET   by which the ranks prove to each other that they are of this run; made here unless it is set. The
#          other host gets it through RSH's input, where no list of processes shows it
#
# To save and stop: kill -TERM this script's process or any rank's process; the other ranks follow.
set -eu
if [ $# -lt 1 ]; then
    echo "usage: launch_two_hosts.sh OTHER_HOST [OPTION OF train_gpt]..." >&2
    exit 2
fi
other=$1
shift
cd "$(dirname "$0")/.."
. scripts/launch_environment.sh
gpus=${GPUS:-8} port=${PORT:-29400} address=${ADDRESS:-$(hostname)}
pids=
trap 'interrupted=1; kill -TERM $pids 2>/dev/null || true' INT TERM

# quoted TEXT: prints the text as one word of a shell command.
quoted() { printf "'%s'" "$(printf %s "$1" | sed "s/'/'\\\\''/g")"; }

# start FIRST_RANK OPTION...: starts this host's processes, and adds their ids to `pids`.
start() {
    first=$1 local_rank=0
    shift
    while [ "$local_rank" -lt "$gpus" ]; do
        bind=
        [ "${BIND:-}" != sockets ] || bind="numactl --cpunodebind=$local_rank --membind=$local_rank"
        # shellcheck disable=SC2086
        RANK=$((first + local_rank)) WORLD_SIZE=$((2 * gpus)) LOCAL_RANK=$local_rank LOCAL_WORLD_SIZE=$gpus \
            $bind "${TRAIN_GPT:-build/train_gpt}" --rendezvous "$address:$port" "$@" &
        pids="$pids $!"
        local_rank=$((local_rank + 1))
    done
}

# status_of PID: waits for the process and returns its status. A signal to this script ends `wait`, with the signal's
# status, while the process runs or as it ends, so `wait` is called again. By then the shell may have forgotten (127) a
# status that it has told once.
status_of() {
    told=
    while :; do
        interrupted=
        wait "$1" && status=0 || status=$?
        [ "$status" -ne 127 ] || status=${told:-127}
        [ -n "$interrupted" ] || return "$status"
        told=$status
    done
}

if [ "$other" = - ]; then # on the second host
    read -r TRAIN_GPT_SECRET
    export TRAIN_GPT_SECRET
    start "$gpus" "$@"
else
    : "${TRAIN_GPT_SECRET:=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')}"
    export TRAIN_GPT_SECRET
    # The second host runs this script too, with - for the other host. Its processes end with the job: every rank
    # watches its connection to rank 0. RSH passes no variables on, so the command sets them.
    command="cd $(quoted "$PWD") &&"
    for name in $(variables_to_take); do
        command="$command $name=$(quoted "$(printenv "$name")")"
    done
    command="$command GPUS=$gpus PORT=$port ADDRESS=$(quoted "$address") BIND=${BIND:-} scripts/launch_two_hosts.sh -"
    for option in "$@"; do
        command="$command $(quoted "$option")"
    done
    printf '%s\n' "$TRAIN_GPT_SECRET" | ${RSH:-ssh "$other"} "$command" &
    remote=$!
    start 0 "$@"
fi
worst=0
for pid in ${remote:-} $pids; do
    status_of "$pid" || status=$?
    [ "$status" -le "$worst" ] || worst=$status
done
exit "$worst"
