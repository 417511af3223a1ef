#!/bin/bash
# Starts one process per GPU of 1 x 8 ranks. Written by shardwright emit.
set -euo pipefail
# Segments that can grow: less fragmentation. Before PyTorch 2.9: PYTORCH_CUDA_ALLOC_CONF.
export PYTORCH_ALLOC_CONF=expandable_segments:True
exec torchrun --standalone --nproc-per-node=8 'train.py' "$@"
