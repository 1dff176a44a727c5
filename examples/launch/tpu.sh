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
case " $* " in
  *' --from-scratch '* | *' --from_scratch '* | *' --fresh '*)
    echo 'tpu.sh: --from-scratch would start over after each preemption.' >&2
    exit 2
    ;;
esac
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
was_active=
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
      was_active=yes
      if tpus tpu-vm ssh "$NAME" --worker=all --command="$SETUP && $train"; then
        delete
        exit
      fi
      failures=$((failures + 1))
      # The state may tell late of a preemption.
      for _ in 1 2 3; do sleep "$pause"; done
      ;;
    FAILED | SUSPENDED)
      if [ "$now$was_active" = FAILED ]; then # As of a quota or a wrong type.
        failures=$((failures + 1))
      else # Preempted: the command has not failed by itself.
        failures=0
      fi
      was_active=
      delete
      ;;
  esac
  sleep "$pause"
done
echo "$NAME: three failures without a preemption; giving up." >&2
delete
exit 1
