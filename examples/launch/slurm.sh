#!/bin/bash
# Trains under Slurm. Before the time limit the run saves and is queued again:
#   sbatch examples/launch/slurm.sh --optimizer muon --preset medium \
#     --data /shared/tokens --dtype bfloat16 --mesh fsdp=16 --out-dir /shared/run
# Set nodes, GPUs and time here or as flags of sbatch, which come first.

#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120

# The first signal counts, which srun hands on to all processes.
asked=''
trap 'trap "" USR1; asked=yes; kill -USR1 "$srun"' USR1

srun .venv/bin/python -m examples.gpt2.train "$@" &
srun=$!
wait "$srun"
status=$?
if [ "$asked" ]; then # The signal has ended the wait, not the run.
  wait "$srun"
  status=$?
fi

# 128 + SIGUSR1: a checkpoint has been saved.
if [ "$status" -eq 138 ]; then
  exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
