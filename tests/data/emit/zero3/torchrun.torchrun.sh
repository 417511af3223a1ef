#!/bin/bash
# Starts one process per GPU of 1 x 8 ranks. Written by shardwright emit.
set -euo pipefail
# Planned with the defaults of PyTorch's allocator.
exec torchrun --standalone --nproc-per-node=8 'train.py' "$@"
