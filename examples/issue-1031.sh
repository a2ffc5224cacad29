#!/bin/bash
# The run of NVIDIA/Megatron-LM issue 1031 (2024-08): 70B on 128 H100 at TP 8, PP 8, DP 2 gave
# 296.5 TFLOP/s a GPU.
# Of the thread: the degrees, the GPUs, both overlaps, and the recompute in units of 5 layers with
# --distribute-saved-activations, which excludes sequence parallelism.
# Not of the thread: the shape (Llama 3 70B, whose 80 layers such units divide), the sequence, the
# batch, and bf16.
MODEL=(
    --num-layers 80 --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672
    --group-query-attention --num-query-groups 8 --swiglu --disable-bias-linear
    --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --vocab-size 128256
    --seq-length 8192 --max-position-embeddings 8192
)
RUN=(
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8
    --micro-batch-size 1 --global-batch-size 512 --bf16
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 5
    --distribute-saved-activations
)
torchrun --nnodes 16 --nproc-per-node 8 pretrain_gpt.py "${MODEL[@]}" "${RUN[@]}"
