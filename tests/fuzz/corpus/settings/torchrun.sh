# --no 1
torchrun --nproc_per_node=4 --nnodes 2 train.py --bf16 True --optim sgd --per_device_train_batch_size 2 --fsdp "full_shard auto_wrap" --model_max_length 64