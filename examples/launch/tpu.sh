#!/bin/bash
# Trains on spot TPU VMs: when they are preempted, it asks for new ones and
# starts the same command there, which goes on from its last checkpoint. Runs
# anywhere that has gcloud, until the training is over:
#   NAME=xl ZONE=us-west4-a TYPE=v5litepod-256 VERSION=v2-alpha-tpuv5-lite \
#   SETUP='bash <(gcloud storage cat gs://BUCKET/setup.sh)' \
#     examples/launch/tpu.sh xl --optimizer muon \
#     --data gs://BUCKET/tokens --mesh fsdp=64 --dtype bfloat16 --remat full \
#     --micro-batch-size 32 --out-dir gs://BUCKET/run
# SETUP makes the folder merit_optax with its .venv on a new VM, and does
# nothing where it is: docs/train.md has one.

: "${NAME:?}" "${ZONE:?}" "${TYPE:?}" "${VERSION:?}" "${SETUP:?}"
out=$(printf '%s\n' "$@" | sed -nE 's/^--out[-_]dir=//p; /^--out[-_]dir$/{n;p}')
if [[ $out != gs://* ]]; then
  echo 'tpu.sh: needs an --out-dir in gs://, which outlives the VMs.' >&2
  exit 2
fi

tpus() { gcloud compute tpus "$@" --zone="$ZONE"; }
delete() { tpus queued-resources delete "$NAME" --force --quiet; }
last_step() {
  gcloud storage ls "$out/checkpoints/" 2>/dev/null |
    sed -nE 's|.*/([0-9]+)/$|\1|p' | sort -n | tail -n 1
}

train="cd merit_optax && .venv/bin/python -m examples.gpt2.train $(printf '%q ' "$@")"
pause=${PAUSE:-30} # Seconds between looks at the state.
failures=0 step=0 status=255
while sleep "$pause"; do
  if ! state=$(tpus queued-resources describe "$NAME" --verbosity=error \
    --format='value(state.state)' 2>&1); then
    case $state in
      *NOT_FOUND*) state=missing ;;
      *) state="unknown: $state" ;; # The network may be away.
    esac
  fi
  echo "$(date +%T) $NAME: $state"
  now=$(last_step)
  if [[ $now -gt $step ]]; then
    failures=0 step=$now
  fi

  case $failures$state in
    [3-9]missing | [3-9]ACTIVE)
      echo "$NAME: three failures without a new checkpoint; giving up." >&2
      # 255: the connection has failed, and the hosts may go on.
      [ "$state" = ACTIVE ] && [ "$status" -ne 255 ] && delete
      exit 1
      ;;
    ?missing)
      tpus queued-resources create "$NAME" --node-id="$NAME" --spot \
        --accelerator-type="$TYPE" --runtime-version="$VERSION" ||
        failures=$((failures + 1))
      ;;
    ?ACTIVE)
      tpus tpu-vm ssh "$NAME" --worker=all --command="$SETUP && $train"
      status=$?
      [ "$status" -eq 0 ] && delete && exit
      failures=$((failures + 1))
      # The state may tell late of a preemption.
      sleep "$pause"
      sleep "$pause"
      ;;
    ?FAILED) # As of a quota or a wrong type.
      failures=$((failures + 1))
      delete
      ;;
    ?SUSPENDED) # Preempted: the command has not failed by itself.
      failures=0
      delete
      ;;
  esac
done
