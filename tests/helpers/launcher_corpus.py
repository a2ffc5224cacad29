"""Configurations as users of launchers with arguments write them, in our own arrangement.

Their facts are those of the examples in the documentation of each launcher: Megatron-LM, NeMo,
Megatron-Bridge, torchtitan, ms-swift, GPT-NeoX, Galvatron and the FSDP2 program of an export.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LLAMA = """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
  --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --vocab-size 128256
  --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope
  --max-position-embeddings 8192 --seq-length 8192 --micro-batch-size 1 --global-batch-size 128
  --attention-dropout 0.0 --hidden-dropout 0.0 --bf16"""
MEGATRON = f"""#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
MODEL_ARGS=({LLAMA})
PARALLEL_ARGS=(
  --tensor-model-parallel-size ${{TP:-4}}  # inside a node
  --pipeline-model-parallel-size 2
  --sequence-parallel --use-distributed-optimizer
)
LOGGING=(--log-interval 1 --save-interval 1000 --tensorboard-dir logs --lr 3e-4 --min-lr 3e-5)
srun torchrun --nproc_per_node 8 --nnodes $SLURM_NNODES --rdzv_backend c10d pretrain_gpt.py \\
  "${{MODEL_ARGS[@]}}" ${{PARALLEL_ARGS[@]}} "${{LOGGING[@]}}" EXTRA
"""
NEMO = """# overrides on the command line
python examples/nlp/language_modeling/megatron_gpt_pretraining.py \\
  --config-name=megatron_gpt_config \\
  trainer.num_nodes=2 trainer.devices=8 trainer.precision=bf16-mixed ++trainer.max_steps=100 \\
  model.num_layers=40 model.hidden_size=5120 model.ffn_hidden_size=13824 \\
  model.num_attention_heads=40 model.encoder_seq_length=4096 model.data.seq_length=4096 \\
  model.max_position_embeddings=4096 model.micro_batch_size=1 model.global_batch_size=128 \\
  model.tensor_model_parallel_size=2 model.sequence_parallel=True \\
  +model.optim.name=distributed_fused_adam model.optim.lr=2e-4 \\
  exp_manager.create_checkpoint_callback=True EXTRA
"""
NEMO_YAML = """run: {name: gpt}
exp_manager:
  checkpoint_callback_params: {monitor: val_loss, model_parallel_size: 8}
trainer: &trainer
  num_nodes: 4
  devices: 8
  precision: bf16
  enable_checkpointing: False
model:
  micro_batch_size: 2  # fits
  global_batch_size: 256
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: null
  sequence_parallel: true
  encoder_seq_length: 2048
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 24
  hidden_size: 4096
  num_attention_heads: 32
  activations_checkpoint_granularity: selective
  activations_checkpoint_method: uniform
  optim: {name: distributed_fused_adam, lr: 1.0e-4}
  EXTRA
"""
BRIDGE = """torchrun --nproc-per-node 8 --nnodes 2 scripts/training/run_recipe.py \\
  --recipe vanilla_gpt_pretrain_config --mode pretrain \\
  model.tensor_model_parallel_size=2 model.context_parallel_size=2 model.sequence_parallel=true \\
  train.micro_batch_size=1 train.global_batch_size=64 dataset.seq_length=8192 \\
  ddp.use_distributed_optimizer=true mixed_precision=bf16_mixed \\
  logger.log_interval=5 checkpoint.save=/ckpt scheduler.lr_warmup_iters=10 EXTRA
"""
TITAN = """#!/usr/bin/bash
#SBATCH --nodes=8
srun torchrun --nnodes 8 --nproc_per_node 8 --rdzv_id 101 --rdzv_backend c10d \\
  --local-ranks-filter 0 --role rank --tee 3 \\
  -m torchtitan.train --module llama3 --config llama3_8b EXTRA
"""
TOML = """# torchtitan config
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "8B"  # of three
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 2
seq_len = 4096  # tokens
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
EXTRA
[checkpoint]
enable = false
"""
SWIFT = """NPROC_PER_NODE=8 \\
megatron sft \\
  --model Qwen/Qwen2.5-7B-Instruct --dataset 'a#500' 'b#500' --tensor_model_parallel_size 4 \\
  --sequence_parallel true --micro_batch_size 2 --global_batch_size 16 --max_length 4096 \\
  --cross_entropy_loss_fusion true --lr 1e-5 --finetune true --save_steps 100 EXTRA
"""
NEOX = """{
  "pipe-parallel-size": 2,
  "model-parallel-size": 2,
  "num-layers": 16, "hidden-size": 2048, "num-attention-heads": 16,
  "seq-length": 2048, "max-position-embeddings": 2048, "pos-emb": "rotary",
  "no-weight-tying": true, "attention-config": [[["flash"], 16]],
  "optimizer": {"type": "Adam", "params": {"lr": 0.0002, "betas": [0.9, 0.95]}},
  "zero_optimization": {"stage": 1, "allgather_partitions": true, "reduce_bucket_size": 500000000},
  "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8,
  "checkpoint-activations": true, "fp16": {"enabled": true, "loss_scale": 0},
  "train-iters": 1000, "log-interval": 10 EXTRA
}
"""
GALVATRON = """{
  "pp_deg": 2, "tp_sizes_enc": "TP", "tp_consecutive_flags": "1,1,1,1",
  "dp_types_enc": "1,1,1,1", "use_sp": "0,0,0,0", "checkpoint": "1,1,0,0",
  "global_bsz": 16, "chunks": 2, "pp_division": "2,2", "pipeline_type": "pipedream_flush",
  "default_dp_type": "zero2", "vtp": 2, "vsp": 0, "embed_sdp": 1 EXTRA
}
"""
FSDP2 = """shape:
  num_layers: 4
  EXTRA
mesh: {pipeline: 1, replicate: 1, shard: 8, context: 1, tensor: 1}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A file, and the settings that it says or the words of its refusal.

    extra    text for the place that a file keeps for it
    beside   further files in its folder, by name
    """

    name: str
    text: str
    gpus: int
    extra: str = ""
    model: str = ""
    vocab_size: int | None = None
    said: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""
    beside: Mapping[str, str] = field(default_factory=dict)
