GPUS=8
ARGS=(
  --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
  --num-experts 4 --moe-layer-freq ([0]*1+[1]*1) --swiglu --num-layers-per-virtual-pipeline-stage 1
)
ARGS+=("--bf16 --clip-grad 1.0")
torchrun --nproc_per_node ${GPUS:-8} pretrain_gpt.py ${ARGS[@]} --micro-batch-size 1 --pipeline-model-parallel-size 2 --cp-comm-type a2a --context-parallel-size=2
