#!/bin/bash
#SBATCH --job-name=shardwright
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --exclusive
#SBATCH --output=%x-%j.out
# Written by shardwright emit. One torchrun per node starts 4 processes.
set -euo pipefail
# Planned with the defaults of PyTorch's allocator.
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=4 --rdzv-backend=c10d \
  --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$HEAD:29500" 'train.py' "$@"
