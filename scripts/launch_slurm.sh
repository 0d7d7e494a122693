#!/bin/sh
#SBATCH --job-name=train_gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=train_gpt-%j.txt
# Example: a run under Slurm, with a process for each GPU, started by srun. It needs no MPI library: ranks come from
# SLURM_*.
#
#   sbatch scripts/launch_slurm.sh --preset llama3-8b --zero-stage 1 --train-data 'data/mine_train_*.bin' --out out/mine
#   sbatch --nodes=4 --ntasks-per-node=2 --gpus-per-node=0 --cpus-per-task=32 scripts/launch_slurm.sh --device cpu ...
#
# Options of sbatch go before the script, options of train_gpt after it. GPUs are asked for by node and not by task:
# every rank sees all GPUs of its node and takes the GPU of its local rank, and NCCL reaches the other GPUs directly.
# All ranks get sbatch's environment, unless --export says otherwise.
#
# 120 s before the time limit Slurm sends SIGTERM to every rank. The ranks save, which must take less than 120 s, and
# end with status 3: stopped before the last step. Then this script puts the job back into the queue, and --resume auto
# goes on from the checkpoint. To save and go on at any time: scancel --signal=USR1 JOB.
set -eu
cd "${SLURM_SUBMIT_DIR:?run it by sbatch}"
# From Slurm 22.05 on, srun does not take --cpus-per-task from sbatch's options.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
export OMP_NUM_THREADS="$SRUN_CPUS_PER_TASK"

# By this secret the ranks prove to each other that they are of this job; srun passes it to every rank.
: "${TRAIN_GPT_SECRET:=$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')}"
export TRAIN_GPT_SECRET

status=0
${SRUN:-srun} --cpu-bind=cores build/train_gpt --resume auto "$@" || status=$?
if [ "$status" -eq 3 ]; then
    ${SCONTROL:-scontrol} requeue "$SLURM_JOB_ID"
fi
exit "$status"
