#!/usr/bin/env bash
# First look at a GPU or TPU, in ten minutes at most: whether kernels are right, limits and seconds
# of every program, whole steps by kind of draft, the default job, a learned head.
#
#   launch/first_look.sh FOLDER    each part writes its text, its errors and its figures there
set -u
mkdir -p "${1:?usage: launch/first_look.sh FOLDER}"
folder=$(cd "$1" && pwd)
cd "$(dirname "$0")/.." || exit 1
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$folder/cache}
failed=0

part() { # part NAME SECONDS COMMAND...
  local name=$1 seconds=$2
  shift 2
  echo "== $(date +%T) $name"
  timeout "$seconds" "$@" >"$folder/$name.txt" 2>"$folder/$name.err"
  local code=$?
  tail -n 40 "$folder/$name.txt"
  if ((code)); then
    failed=1
    echo "exit code $code (124: its $seconds s were over); the last of $folder/$name.err:"
    tail -n 5 "$folder/$name.err"
  fi
}

benchmark=launch/benchmark.py
python -c "import jax; print(jax.__version__, jax.devices())" | tee "$folder/devices.txt"
part smollm2 170 python $benchmark device --size=smollm2 --json="$folder/smollm2.json"
part training 150 python $benchmark training --rows=256 --prompt-len=64 --response-len=128 \
  --json="$folder/training.json"
part tiny 90 python launch/train.py --config=configs/grpo.py --config.log.tracker=none \
  --config.log.report=False --config.train.steps=40 --workdir="$folder/tiny"
part qwen3_1p7b 130 python $benchmark device --size=qwen3_1p7b --json="$folder/qwen3_1p7b.json"
part heads 50 python $benchmark heads --drift=8 --config.rollout.noise_epochs=1 \
  --json="$folder/heads.json"
exit $failed
