#!/usr/bin/env bash
# Trains on all hosts of a Cloud TPU slice; for a machine with gcloud.
#
#     TPU=my-slice ZONE=us-west4-a launch/tpu_pod.sh \
#       --config=configs/grpo.py:qwen3_1p7b --workdir=/mnt/shared/runs/qwen
#
# Every host has the repository in the folder REPO (default: specrl_jax in the home folder), its
# `pip install -e '.[tpu]'` done, and the work directory's file system mounted.
set -euo pipefail

command="cd ${REPO:-specrl_jax} && exec python launch/train.py --coordinator=auto"
for argument in "$@"; do
  command+=" $(printf '%q' "$argument")"
done
gcloud compute tpus tpu-vm ssh "${TPU:?the name of the slice}" --zone="${ZONE:?its zone}" \
  --worker=all --command="$command"
