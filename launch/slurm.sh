#!/usr/bin/env bash
# Trains on several hosts under Slurm: one process a node, which has all of the node's GPUs.
#
#     sbatch launch/slurm.sh --config=configs/grpo.py:qwen3_1p7b --workdir=/shared/runs/qwen
#
# Submit it in the repository, on a file system that the nodes share. A time limit or a preemption
# stops the run after its step, with a checkpoint; the same command resumes it.
#SBATCH --job-name=specrl_jax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600
set -euo pipefail

# Under Slurm JAX takes one GPU a task unless a flag says which.
gpus=${SLURM_GPUS_ON_NODE:-8}
JAX_LOCAL_DEVICE_IDS=$(seq -s, 0 $((gpus - 1)))
export JAX_LOCAL_DEVICE_IDS

srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-64}" --kill-on-bad-exit=1 \
  python launch/train.py "$@"
