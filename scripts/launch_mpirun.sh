#!/bin/sh
# Example: a run under Open MPI's mpirun, with a process for each GPU or, on the cpu target, for each socket.
#
#   scripts/launch_mpirun.sh --preset llama3-8b --zero-stage 1 --train-data 'data/mine_train_*.bin' --out out/mine
#   RANKS=16 HOSTS=node1:8,node2:8 scripts/launch_mpirun.sh ...   two hosts of eight GPUs, this tree at one path on both
#   TARGET=cpu RANKS=2 scripts/launch_mpirun.sh ...                 one process on each of two sockets
#
# MPICH's mpiexec finds the ranks as well:  mpiexec -n 16 -ppn 8 -hosts node1,node2 build/train_gpt ...
# and on the cpu target:                    mpiexec -n 2 -bind-to socket build/train_gpt --device cpu ...
#
# As root, as in a container, Open MPI wants OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1.
#
# To save and go on: kill -USR1 mpirun's process. To save and stop: kill -TERM one rank's process; the other ranks
# follow.
set -eu
cd "$(dirname "$0")/.."
. scripts/launch_environment.sh
ranks=${RANKS:-8}

case ${TARGET:-cuda} in
cuda)
    # A rank takes the GPU of its local rank. The rank's threads only feed the GPU, so they may run on any core.
    set -- --map-by slot --bind-to none build/train_gpt --device cuda --collectives nccl "$@"
    ;;
cpu)
    # The threads of a rank stay on its socket, and so does the memory that they touch first.
    set -- --map-by ppr:1:socket --bind-to socket build/train_gpt --device cpu --collectives mpi "$@"
    ;;
*)
    echo "launch_mpirun.sh: TARGET=$TARGET is not known; expected cuda or cpu" >&2
    exit 2
    ;;
esac
# mpirun passes on to other hosts only the variables that are named. Rank 0 makes a secret for the ranks' connections,
# which MPI gives to the other ranks; a TRAIN_GPT_SECRET that is set here is a part of that secret.
for name in $(variables_to_take) ${TRAIN_GPT_SECRET:+TRAIN_GPT_SECRET}; do
    set -- -x "$name" "$@"
done
if [ -n "${HOSTS:-}" ]; then
    set -- --host "$HOSTS" "$@"
fi
exec "${MPIRUN:-mpirun}" -np "$ranks" "$@"
