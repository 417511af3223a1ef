#!/bin/sh
# What can only be checked on a machine with an NVIDIA GPU: scripts/gpu_check.sh --help
exec python3 "$(dirname "$0")/gpu_check.py" "$@"
