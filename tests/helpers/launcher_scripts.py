"""Scripts of launchers as their users have them."""

from __future__ import annotations

SCRIPT = """
TP=8
ARGS=(
    --num-layers 80 --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672
    --group-query-attention --num-query-groups 8 --swiglu --disable-bias-linear
    --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --seq-length 4096 --max-position-embeddings 4096
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size 8 --sequence-parallel
    --micro-batch-size 1 --global-batch-size 512 --bf16 --lr 1e-4
    --use-distributed-optimizer --recompute-granularity full --recompute-method uniform
    --recompute-num-layers 1 --vocab-size 32000
)
torchrun --nproc_per_node 8 --nnodes 16 pretrain_gpt.py ${ARGS[@]}
"""
# as in DeepSpeed's own examples
DEEPSPEED_JSON = """{
  "train_batch_size": 64,
  "train_micro_batch_size_per_gpu": 2,
  "steps_per_print": 10,
  "zero_optimization": {
    "stage": 3,
    "stage3_prefetch_bucket_size": 5e7
  },
  "gradient_clipping": 1.0,
  "fp16": {"enabled": true, "loss_scale": 0}
}
"""
# as users of trl and of LLaMA-Factory have it
TRAINER_YAML = """\
model_name_or_path: meta-llama/Meta-Llama-3-8B
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1.0e-5
bf16: true
gradient_checkpointing: true
cutoff_len: 4096
fsdp: full_shard auto_wrap
fsdp_config: {fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer, fsdp_cpu_offload: false}
"""
# of accelerate 0.2x for FSDP 1, as users still have it
ACCELERATE_YAML = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 16
rdzv_backend: static
use_cpu: false
"""
