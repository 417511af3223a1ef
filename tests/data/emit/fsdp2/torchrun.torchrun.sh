#!/bin/bash
# Starts one process per GPU of 2 x 4 ranks. Written by shardwright emit.
set -euo pipefail
# Planned with the defaults of PyTorch's allocator.
# On every node, with HEAD set to the name of one of them.
: "${HEAD:?the node where ranks meet}"
exec torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d \
  --rdzv-id="${RUN_ID:-shardwright}" --rdzv-endpoint="$HEAD:29500" 'train.py' "$@"
