#!/bin/bash
# Trains under Slurm. Before the time limit the run saves and is queued again, if
# it has made a step since it began:
#   sbatch examples/launch/slurm.sh xl --optimizer muon \
#     --data /shared/tokens --mesh data=2,fsdp=8 --dtype bfloat16 --remat full \
#     --micro-batch-size 64 --out-dir /shared/run
# Set nodes, GPUs and time here or as flags of sbatch, which come first.

#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120

out=$(printf '%s\n' "$@" | sed -nE 's/^--out[-_]dir=//p; /^--out[-_]dir$/{n;p}')
if [[ ! $out || $out = *://* ]]; then
  echo 'slurm.sh: needs an --out-dir on a disk, to look for checkpoints.' >&2
  exit 2
fi
last_step() {
  find "$out/checkpoints" -maxdepth 1 -regex '.*/[0-9]+' -printf '%f\n' \
    2>/dev/null | sort -n | tail -n 1
}
before=$(last_step)

# The first signal counts, which srun hands on to all processes.
trap 'trap "" USR1; kill -USR1 "$srun"' USR1

# Left to itself, Slurm may bind a task to one core.
srun --cpu-bind=none .venv/bin/python -m examples.gpt2.train "$@" &
srun=$!
wait "$srun" # Until the end or the signal.
wait "$srun"
status=$?

if [ "$status" -eq 138 ]; then # 128 + SIGUSR1.
  if [[ $(last_step) -gt $before ]]; then
    exec scontrol requeue "$SLURM_JOB_ID"
  fi
  echo 'slurm.sh: not queued again, since no step was taken in time.' >&2
fi
exit "$status"
