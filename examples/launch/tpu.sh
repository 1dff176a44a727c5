#!/bin/bash
# Trains on spot TPU VMs: when they are preempted, it asks for new ones and
# starts the same command there, which goes on from its last checkpoint. Runs
# anywhere that has gcloud, until the training is over:
#   NAME=run ZONE=us-west4-a TYPE=v5litepod-16 VERSION=v2-alpha-tpuv5-lite \
#   SETUP='bash <(gcloud storage cat gs://BUCKET/setup.sh)' \
#     examples/launch/tpu.sh --optimizer muon --preset large \
#     --data gs://BUCKET/tokens --dtype bfloat16 --mesh fsdp=16 \
#     --out-dir gs://BUCKET/run
# SETUP makes the folder merit_optax with its .venv on a new VM, and does
# nothing where it is.

set -u
: "${NAME:?}" "${ZONE:?}" "${TYPE:?}" "${VERSION:?}" "${SETUP:?}"
pause=${PAUSE:-30} # Seconds between looks at the state.

tpus() { gcloud compute tpus "$@" --zone="$ZONE"; }
state() {
  tpus queued-resources describe "$NAME" --format='value(state.state)' \
    2>/dev/null
}
delete() { tpus queued-resources delete "$NAME" --force --quiet; }

train="cd merit_optax && .venv/bin/python -m examples.gpt2.train $(printf '%q ' "$@")"
failures=0
while [ "$failures" -lt 3 ]; do
  now=$(state)
  echo "$(date +%T) $NAME: ${now:-to be asked for}"
  case "$now" in
    '')
      tpus queued-resources create "$NAME" --node-id="$NAME" --spot \
        --accelerator-type="$TYPE" --runtime-version="$VERSION" ||
        failures=$((failures + 1))
      ;;
    ACTIVE)
      if tpus tpu-vm ssh "$NAME" --worker=all --command="$SETUP && $train"; then
        delete
        exit
      fi
      failures=$((failures + 1))
      ;;
    FAILED | SUSPENDED) # Preempted: the command has not failed by itself.
      failures=0
      delete
      ;;
  esac
  sleep "$pause"
done
echo "$NAME: three failures without a preemption; giving up." >&2
delete
exit 1
