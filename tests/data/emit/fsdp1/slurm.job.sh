#!/bin/bash
#SBATCH --job-name=shardwright
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=%x-%j.out
# Written by shardwright emit. One torchrun per node starts 8 processes.
set -euo pipefail
# Planned with the defaults of PyTorch's allocator.
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=8 --rdzv-backend=c10d \
  --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$HEAD:29500" 'train.py' "$@"
