torchrun --standalone --nproc-per-node 2 train_gpt.py --width 128 --layers 3 --length 64 --strategy fsdp2-zero2 --batch 4
