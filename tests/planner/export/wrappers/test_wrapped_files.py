"""Files as the documentation of programs around the Trainer has them, read right or refused.

Each row has the files, the first of which is read, and what its launcher runs: the facts were taken
from the examples of LLaMA-Factory, axolotl, trl, ms-swift, accelerate and DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.fields.settings import Settings
from parplan.planner.export.launcher_file import read_launcher_file
from parplan.planner.export.targets import TARGETS
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.model_catalog import load_model
from parplan.profiles.models.spec import Optimizer, Precision
from parplan.profiles.stack import AttentionKernel, ContextForm
from parplan.profiles.state_precision import StatePrecision

FULL, NONE = Recompute.FULL, Recompute.NONE
BF16, FP32, FP16 = Precision.BF16, Precision.FP32, Precision.FP16
LLAMA_FACTORY = """\
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: full
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 4096
output_dir: saves/llama3
plot_loss: true
overwrite_output_dir: true
report_to: none
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1.0e-5
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
"""
LORA = """\
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
{method}
dataset: identity
template: llama3
per_device_train_batch_size: 1
bf16: true
"""
MOE = """\
model_name_or_path: Qwen/Qwen3-30B-A3B
do_train: true
stage: sft
finetuning_type: full
dataset: alpaca_en_demo
cutoff_len: 4096
template: qwen3_nothink
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
tensor_model_parallel_size: 1
sequence_parallel: false
pipeline_model_parallel_size: 4
bias_activation_fusion: true
apply_rope_fusion: true
use_distributed_optimizer: true
overlap_param_gather: true
overlap_grad_reduce: true
moe_grouped_gemm: true
moe_token_dispatcher_type: alltoall
expert_model_parallel_size: 2
recompute_granularity: full
"""
BRIDGE = """\
stage: sft
finetuning_type: full
template: llama3
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
bf16: true
tensor_model_parallel_size: 2
pipeline_model_parallel_size: 2
virtual_pipeline_model_parallel_size: 2
sequence_parallel: true
mixed_precision: bf16_mixed
"""
AXOLOTL = """\
base_model: NousResearch/Meta-Llama-3-8B
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.05
output_dir: ./outputs/out
sequence_len: 8192
sample_packing: true
pad_to_sequence_len: true
wandb_project:
gradient_accumulation_steps: 8
micro_batch_size: 1
num_epochs: 1
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-5
bf16: auto
tf32: false
gradient_checkpointing: true
gradient_checkpointing_kwargs:
  use_reentrant: false
resume_from_checkpoint:
logging_steps: 1
flash_attention: true
warmup_steps: 100
evals_per_epoch: 2
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: <|end_of_text|>
"""
ADAM = ("paged_adamw_8bit", "adamw_torch_fused")
FSDP1 = """\
fsdp:
  - full_shard
  - auto_wrap
fsdp_config:
  fsdp_limit_all_gathers: true
  fsdp_sync_module_states: true
  fsdp_offload_params: true
  fsdp_use_orig_params: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sharding_strategy: FULL_SHARD
"""
FSDP2 = """\
fsdp_version: 2
fsdp_config:
  offload_params: false
  state_dict_type: FULL_STATE_DICT
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
  reshard_after_forward: {reshard}
"""
SWIFT = """\
NPROC_PER_NODE=8 CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    {method} \\
    --dataset AI-ModelScope/alpaca-gpt4-data-zh#500 \\
    --torch_dtype bfloat16 \\
    --num_train_epochs 1 \\
    --per_device_train_batch_size 1 \\
    --learning_rate 1e-5 \\
    --eval_steps 100 \\
    --save_total_limit 2 \\
    --logging_steps 5 \\
    --max_length 8192 \\
    --warmup_ratio 0.05 \\
    --dataloader_num_workers 4
"""
TRL_YAML = """\
model_name_or_path: Qwen/Qwen2.5-7B
dataset_name: stanfordnlp/imdb
dataset_text_field: text
report_to: none
learning_rate: 0.0001
lr_scheduler_type: cosine
per_device_train_batch_size: 4
"""
ZERO3 = """\
{
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": "auto",
  "zero_allow_untested_optimizer": true,
  "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
  "bf16": {"enabled": "auto"},
  "zero_optimization": {
    "stage": 3, "overlap_comm": false, "contiguous_gradients": true, "sub_group_size": 1e9,
    "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true
  }
}
"""
OFFLOADED = ZERO3.replace(
    '"stage": 3,',
    '"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true}, '
    '"offload_param": {"device": "cpu", "pin_memory": true},',
)
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
debug: false
{kind}
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
ACCELERATE_FSDP = """\
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2"""
ACCELERATE_ZERO = """\
distributed_type: DEEPSPEED
deepspeed_config:
  deepspeed_multinode_launcher: standard
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Files of a program by name, the first of which is read, and what it says of 8 GPUs."""

    files: Mapping[str, str]
    model: str = "llama3-8b"
    gpus: int = 8
    says: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""


def one(
    text: str,
    beside: Mapping[str, str] | None = None,
    *,
    name: str = "train.yaml",
    model: str = "llama3-8b",
    gpus: int = 8,
    refused: str = "",
    **says: Any,
) -> Row:
    """Returns the row of a text, with further files and what it says."""
    files = {name: text, **(beside or {})}
    return Row(files=files, model=model, gpus=gpus, says=says, refused=refused)


def deepspeed(name: str) -> str:
    return f"{LLAMA_FACTORY}deepspeed: {name}\n"


LLAMA_FACTORY_ROWS = {
    "ddp": one(
        LLAMA_FACTORY,
        zero=0,
        recompute=FULL,
        precision=BF16,
        seq_length=4096,
        micro_batch_size=2,
        global_batch_size=64,
        state_precision=StatePrecision.FP32,
    ),
    "defaults": one(
        "stage: pt\nfinetuning_type: full\n",
        micro_batch_size=8,
        seq_length=2048,
        precision=FP32,
        recompute=FULL,
    ),
    "no-checkpointing": one(
        f"{LLAMA_FACTORY}disable_gradient_checkpointing: true\nflash_attn: fa2\n", recompute=NONE
    ),
    "gradient-checkpointing-false-has-no-say": one(
        f"{LLAMA_FACTORY}gradient_checkpointing: false\n", recompute=FULL
    ),
    "attention-disabled": one(
        f"{LLAMA_FACTORY}flash_attn: disabled\n", attention=AttentionKernel.UNFUSED
    ),
    "zero-3-beside": one(
        deepspeed("examples/deepspeed/ds_z3_config.json"),
        {"examples/deepspeed/ds_z3_config.json": ZERO3},
        zero=3,
        precision=BF16,
        recompute=FULL,
        global_batch_size=64,
        overlap=False,
        gradient_precision=BF16,
    ),
    "zero-3-missing": one(deepspeed("ds_z3_config.json"), refused="no ds_z3_config.json beside"),
    "zero-3-offload": one(
        deepspeed("ds_z3_offload_config.json"),
        {"ds_z3_offload_config.json": OFFLOADED},
        zero=3,
        states_on_host=True,
    ),
    "optimizer-offload-alone": one(
        deepspeed("ds.json"),
        {"ds.json": OFFLOADED.replace('"stage": 3', '"stage": 2').replace("offload_param", "x")},
        refused="zero_optimization.x|offload",
    ),
    "zero-inline": one(
        f"{LLAMA_FACTORY}deepspeed:\n  zero_optimization: {{stage: 2}}\n"
        "  bf16: {enabled: auto}\n",
        zero=2,
        micro_batch_size=2,
        precision=BF16,
    ),
    "pure-bf16": one(
        LLAMA_FACTORY.replace("bf16: true", "pure_bf16: true"),
        precision=BF16,
        gradient_precision=BF16,
        state_precision=StatePrecision.BF16,
    ),
    "pure-bf16-deepspeed": one(
        f"{deepspeed('ds.json')}pure_bf16: true\n", refused="no ds.json|pure_bf16 beside deepspeed"
    ),
    "fsdp-of-accelerate": one(
        "accelerate launch --config_file fsdp.yaml src/train.py sft.yaml\n",
        {"fsdp.yaml": ACCELERATE.format(kind=ACCELERATE_FSDP), "sft.yaml": LLAMA_FACTORY},
        name="train.sh",
        zero=3,
        recompute=FULL,
        seq_length=4096,
    ),
    "command-line-over-yaml": one(
        "FORCE_TORCHRUN=1 llamafactory-cli train sft.yaml per_device_train_batch_size=4\n",
        {"sft.yaml": LLAMA_FACTORY},
        name="train.sh",
        micro_batch_size=4,
        global_batch_size=128,
    ),
    "file-in-a-variable": one(
        'CONFIG="sft.yaml"\nllamafactory-cli train ${CONFIG}\n',
        {"sft.yaml": LLAMA_FACTORY},
        name="train.sh",
        seq_length=4096,
        recompute=FULL,
    ),
    "no-file": one(
        "llamafactory-cli train $1\n", name="train.sh", refused="does not name the file"
    ),
    "configuration-of-no-file": one(
        f"{LLAMA_FACTORY}deepspeed: zero3\n", refused="deepspeed zero3: it names no"
    ),
    "two-batches": one(
        deepspeed("ds.json"),
        {"ds.json": ZERO3.replace('_per_gpu": "auto"', '_per_gpu": 4')},
        refused="train_micro_batch_size_per_gpu 4 is not the 2",
    ),
    "arguments": one(
        "torchrun --nproc_per_node 8 src/train.py --stage sft --finetuning_type full \\\n"
        "  --cutoff_len 1024 --per_device_train_batch_size 2 --bf16 --do_train\n",
        name="train.sh",
        seq_length=1024,
        recompute=FULL,
        global_batch_size=16,
    ),
    "megatron-experts": one(
        MOE,
        model="qwen3-30b-a3b",
        pp=4,
        tp=1,
        ep=2,
        dp=2,
        zero=1,
        recompute=FULL,
        global_batch_size=16,
        seq_length=4096,
        overlap=True,
    ),
    "megatron-bridge": one(
        BRIDGE,
        tp=2,
        pp=2,
        virtual_stages=2,
        sequence_parallel=True,
        zero=1,
        overlap=True,
        recompute=NONE,
        global_batch_size=4,
    ),
    "megatron-bridge-without": one(
        f"{BRIDGE}use_distributed_optimizer: false\noverlap_grad_reduce: false\n"
        "cross_entropy_loss_fusion: false\n",
        zero=0,
        overlap=False,
        fused_loss=False,
    ),
    "megatron-by-environment": one(
        "USE_MCA=1 llamafactory-cli train sft.yaml\n",
        {"sft.yaml": LLAMA_FACTORY},
        name="train.sh",
        zero=0,
        recompute=NONE,
        gradient_precision=FP32,
        micro_batch_size=2,
    ),
    "megatron-usual-dispatcher": one(
        MOE.replace("moe_token_dispatcher_type: alltoall\n", ""),
        model="qwen3-30b-a3b",
        refused="allgather, the default",
    ),
    "megatron-fp8": one(f"{MOE}fp8: hybrid\n", refused="fp8 hybrid"),
    "megatron-unknown-size": one(f"{MOE}hybrid_shard_size: 2\n", refused="hybrid_shard_size"),
    "lora": one(LORA.format(method="finetuning_type: lora"), refused="finetuning_type lora"),
    "lora-by-default": one(LORA.format(method="lora_rank: 8"), refused="lora"),
    "qlora": one(LORA.format(method="quantization_bit: 4"), refused="quantization_bit|lora"),
    "freeze": one(LORA.format(method="finetuning_type: freeze"), refused="finetuning_type freeze"),
    "dpo": one(LLAMA_FACTORY.replace("sft", "dpo"), refused="stage dpo"),
    "reference-model": one(f"{LLAMA_FACTORY}ref_model: x/y\n", refused="ref_model"),
    "galore": one(f"{LLAMA_FACTORY}use_galore: true\ngalore_target: mlp\n", refused="galore"),
    "badam": one(f"{LLAMA_FACTORY}use_badam: true\n", refused="use_badam"),
    "neat-packing": one(f"{LLAMA_FACTORY}neat_packing: true\n", refused="neat_packing"),
    "sequence-parallel": one(
        f"{LLAMA_FACTORY}sequence_parallel_size: 4\n", refused="sequence_parallel_size 4"
    ),
    "unsloth": one(f"{LLAMA_FACTORY}use_unsloth: true\n", refused="use_unsloth"),
    "liger": one(f"{LLAMA_FACTORY}enable_liger_kernel: true\n", refused="enable_liger_kernel"),
    "fp8": one(f"{LLAMA_FACTORY}fp8: true\n", refused="fp8"),
    "unknown-of-a-subject": one(
        f"{LLAMA_FACTORY}ulysses_degree: 4\n", refused="4: LLaMA-Factory's reader.*parallelism"
    ),
    "new-format": one(
        "model: Qwen/Qwen3-0.6B\ndist_config:\n  name: fsdp2\ncutoff_len: 2048\n"
        "micro_batch_size: 1\nlearning_rate: 1e-4\n",
        refused="dist_config",
    ),
}
AXOLOTL_ROWS = {
    "paged-optimizer": one(AXOLOTL, refused="optimizer paged_adamw_8bit"),
    "ddp": one(
        AXOLOTL.replace(*ADAM),
        zero=0,
        micro_batch_size=1,
        global_batch_size=64,
        seq_length=8192,
        precision=BF16,
        recompute=FULL,
        state_precision=StatePrecision.BF16,
    ),
    "8-bit-adam": one(
        AXOLOTL.replace("paged_adamw_8bit", "adamw_bnb_8bit"), optimizer=Optimizer.ADAM_8BIT
    ),
    "defaults": one(
        "base_model: meta-llama/Llama-3.1-8B\ndatasets:\n  - path: x\nnum_epochs: 1\n",
        micro_batch_size=1,
        seq_length=512,
        precision=BF16,
        recompute=NONE,
        global_batch_size=8,
    ),
    "fsdp-1": one(
        AXOLOTL.replace(*ADAM) + FSDP1,
        zero=3,
        states_on_host=True,
        recompute=FULL,
        state_precision=StatePrecision.FP32,
    ),
    "fsdp-2": one(AXOLOTL.replace(*ADAM) + FSDP2.format(reshard="true"), zero=3, zero_ranks=None),
    "fsdp-2-kept": one(AXOLOTL.replace(*ADAM) + FSDP2.format(reshard="false"), zero=2),
    "hsdp-and-tp": one(
        AXOLOTL.replace(*ADAM)
        + FSDP2.format(reshard="true")
        + "dp_shard_size: 4\ndp_replicate_size: 2\ntensor_parallel_size: 2\n",
        gpus=16,
        tp=2,
        dp=8,
        zero=3,
        zero_ranks=4,
        global_batch_size=64,
    ),
    "copies-fill-the-gpus": one(
        AXOLOTL.replace(*ADAM) + FSDP2.format(reshard="true") + "dp_shard_size: 4\n",
        gpus=16,
        dp=16,
        zero=3,
        zero_ranks=4,
    ),
    "tp-and-cp": one(
        AXOLOTL.replace(*ADAM)
        + FSDP2.format(reshard="true")
        + "dp_shard_size: 2\ntensor_parallel_size: 2\ncontext_parallel_size: 2\n",
        tp=2,
        cp=2,
        dp=2,
        zero=3,
        context_form=ContextForm.ALL_GATHER,
        global_batch_size=16,
    ),
    "shards-without-fsdp": one(
        f"{AXOLOTL.replace(*ADAM)}dp_shard_size: 4\n", refused="dp_shard_size.*FSDP alone"
    ),
    "zero-3": one(
        f"{AXOLOTL.replace(*ADAM)}deepspeed: deepspeed_configs/zero3_bf16.json\n",
        {"deepspeed_configs/zero3_bf16.json": ZERO3},
        zero=3,
        micro_batch_size=1,
        global_batch_size=64,
        precision=BF16,
        recompute=FULL,
        state_precision=StatePrecision.FP32,
    ),
    "cp-and-deepspeed": one(
        f"{AXOLOTL.replace(*ADAM)}deepspeed: zero3.json\ncontext_parallel_size: 2\n",
        {"zero3.json": ZERO3},
        refused="context_parallel_size beside deepspeed",
    ),
    "command": one(
        "accelerate launch -m axolotl.cli.train config.yml\n",
        {"config.yml": AXOLOTL.replace(*ADAM)},
        name="run.sh",
        seq_length=8192,
        recompute=FULL,
    ),
    "lora": one(f"{AXOLOTL}adapter: lora\nlora_r: 32\n", refused="lora"),
    "qlora": one(
        f"{AXOLOTL.replace(*ADAM)}load_in_4bit: true\nadapter: qlora\n",
        refused="adapter|load_in_4bit",
    ),
    "no-adapter": one(
        f"{AXOLOTL.replace(*ADAM)}adapter:\nlora_r:\nload_in_8bit: false\n", recompute=FULL
    ),
    "dpo": one(f"{AXOLOTL.replace(*ADAM)}rl: dpo\n", refused="rl dpo"),
    "unfrozen": one(
        f"{AXOLOTL.replace(*ADAM)}unfrozen_parameters:\n  - ^lm_head.weight$\n", refused="unfrozen"
    ),
    "plugins": one(
        f"{AXOLOTL.replace(*ADAM)}plugins:\n  - axolotl.integrations.liger.LigerPlugin\n",
        refused="plugins",
    ),
    "cut-cross-entropy": one(
        f"{AXOLOTL.replace(*ADAM)}cut_cross_entropy: true\n", refused="cut_cross_entropy"
    ),
    "offloaded-checkpoints": one(
        AXOLOTL.replace(*ADAM).replace("checkpointing: true", "checkpointing: offload"),
        refused="gradient_checkpointing offload",
    ),
    "activation-offloading": one(
        f"{AXOLOTL.replace(*ADAM)}activation_offloading: true\n", refused="activation_offloading"
    ),
    "relora": one(f"{AXOLOTL.replace(*ADAM)}relora: true\n", refused="relora"),
    "experts": one(f"{AXOLOTL.replace(*ADAM)}expert_parallel_size: 2\n", refused="expert_parallel"),
}
SWIFT_ROWS = {
    "ddp": one(
        SWIFT.format(method="--train_type full"),
        name="sft.sh",
        model="qwen2.5-7b",
        zero=0,
        micro_batch_size=1,
        global_batch_size=16,
        seq_length=8192,
        recompute=FULL,
        precision=BF16,
        state_precision=StatePrecision.BF16,
    ),
    "zero-3": one(
        SWIFT.format(method="--tuner_type full --deepspeed zero3"),
        name="sft.sh",
        model="qwen2.5-7b",
        zero=3,
        overlap=False,
        states_on_host=False,
        recompute=FULL,
        state_precision=StatePrecision.FP32,
        precision=BF16,
        global_batch_size=16,
    ),
    "zero-3-offload": one(
        SWIFT.format(method="--tuner_type full --deepspeed zero3_offload"),
        name="sft.sh",
        model="qwen2.5-7b",
        zero=3,
        states_on_host=True,
    ),
    "zero-2-offload": one(
        SWIFT.format(method="--tuner_type full --deepspeed zero2_offload"),
        name="sft.sh",
        model="qwen2.5-7b",
        refused="offload_optimizer without offload_param",
    ),
    "fsdp-2": one(
        SWIFT.format(method="--tuner_type full --fsdp fsdp2 --packing true --attn_impl flash_attn"),
        name="sft.sh",
        model="qwen2.5-7b",
        zero=3,
        recompute=FULL,
        state_precision=StatePrecision.FP32,
    ),
    "lora": one(
        SWIFT.format(method="--train_type lora --lora_rank 8"), name="sft.sh", refused="lora"
    ),
    "lora-by-default": one(SWIFT.format(method="--seed 42"), name="sft.sh", refused="lora"),
    "sequence-parallel": one(
        SWIFT.format(method="--train_type full --sequence_parallel_size 4"),
        name="sft.sh",
        refused="sequence_parallel_size 4",
    ),
    "padding-free": one(
        SWIFT.format(method="--train_type full --padding_free true"),
        name="sft.sh",
        refused="padding_free",
    ),
    "frozen": one(
        SWIFT.format(method="--train_type full --freeze_parameters_ratio 0.5"),
        name="sft.sh",
        refused="freeze_parameters_ratio 0.5",
    ),
}
TRL_ROWS = {
    "command": one(
        "trl sft --config sft.yaml --gradient_accumulation_steps 2\n",
        {"sft.yaml": TRL_YAML},
        name="run.sh",
        model="qwen2.5-7b",
        recompute=FULL,
        precision=BF16,
        seq_length=1024,
        micro_batch_size=4,
        global_batch_size=64,
        zero=0,
        state_precision=StatePrecision.FP32,
    ),
    "yaml": one(
        f"{TRL_YAML}gradient_checkpointing: false\nmax_length: 2048\npacking: true\n",
        model="qwen2.5-7b",
        recompute=NONE,
        seq_length=2048,
        precision=BF16,
    ),
    "older-release": one(
        f"{TRL_YAML}max_seq_length: 2048\n", model="qwen2.5-7b", recompute=NONE, precision=FP32
    ),
    "dtype": one(
        f"{TRL_YAML}dtype: bfloat16\n", model="qwen2.5-7b", state_precision=StatePrecision.BF16
    ),
    "zero-3-of-accelerate": one(
        "accelerate launch --config_file zero3.yaml trl/scripts/sft.py \\\n"
        "  --model_name_or_path Qwen/Qwen2.5-7B --dataset_name x --max_length 4096 \\\n"
        "  --per_device_train_batch_size 1 --gradient_accumulation_steps 2\n",
        {"zero3.yaml": ACCELERATE.format(kind=ACCELERATE_ZERO)},
        name="run.sh",
        model="qwen2.5-7b",
        zero=3,
        recompute=FULL,
        seq_length=4096,
        global_batch_size=16,
        precision=BF16,
        states_on_host=False,
    ),
    "dpo": one(
        "trl dpo --model_name_or_path Qwen/Qwen2.5-7B --dataset_name x --max_length 1024 \\\n"
        "  --per_device_train_batch_size 1 --bf16 True\n",
        name="run.sh",
        refused="trl dpo runs another model",
    ),
    "grpo-script": one(
        "accelerate launch examples/scripts/grpo_vlm.py --per_device_train_batch_size 1\n",
        name="run.sh",
        refused=r"grpo_vlm\.py runs another model",
    ),
    "peft": one(f"{TRL_YAML}use_peft: true\n", model="qwen2.5-7b", refused="use_peft"),
    "padding-free": one(f"{TRL_YAML}padding_free: true\n", refused="padding_free"),
    "activation-offloading": one(
        f"{TRL_YAML}activation_offloading: true\n", refused="activation_offloading"
    ),
}
TRAINER = "per_device_train_batch_size: 1\ngradient_accumulation_steps: 2\nbf16: true\n"
TRAINER_ROWS = {
    "fsdp-config-file": one(
        "torchrun --nproc_per_node 8 sft.py --block_size 4096 --per_device_train_batch_size 1 "
        '--bf16 True --fsdp "full_shard auto_wrap" --fsdp_config fsdp.json\n',
        {"fsdp.json": '{"fsdp_version": 2, "activation_checkpointing": true, "xla": false}'},
        name="run.sh",
        zero=3,
        recompute=FULL,
        seq_length=4096,
    ),
    "fsdp-config-file-missing": one(
        "torchrun sft.py --block_size 4096 --per_device_train_batch_size 1 --fsdp full_shard "
        "--fsdp_config fsdp.json\n",
        name="run.sh",
        refused="no fsdp.json beside",
    ),
    "fsdp-config-in-place": one(
        "torchrun src/train.py --stage sft --finetuning_type full --fsdp full_shard \\\n"
        """  --fsdp_config '{"reshard_after_forward": false}' --cutoff_len 1024\n""",
        name="run.sh",
        zero=2,
    ),
    "use-deepspeed": one(
        "accelerate launch --mixed_precision bf16 --num_processes 8 --use_deepspeed \\\n"
        "  --deepspeed_config_file ds.json finetune.py --max_seq_length 4096 --use_flash_attn \\\n"
        "  --per_device_train_batch_size 1 --gradient_accumulation_steps 16\n",
        {"ds.json": ZERO3},
        name="run.sh",
        zero=3,
        global_batch_size=128,
    ),
    "recipe": one(
        "accelerate launch --config_file zero3.yaml sft.py sft.yaml --max_seq_length=1024\n",
        {
            "zero3.yaml": ACCELERATE.format(kind=ACCELERATE_ZERO),
            "sft.yaml": f"{TRAINER}max_seq_length: 2048\ntorch_dtype: bfloat16\n"
            "use_flash_attention_2: true\ngradient_checkpointing: true\n",
        },
        name="run.sh",
        zero=3,
        seq_length=1024,
        recompute=FULL,
        state_precision=StatePrecision.FP32,
    ),
    "two-accumulations": one(
        "accelerate launch --config_file zero3.yaml sft.py --max_seq_length=1024 \\\n"
        "  --per_device_train_batch_size 1 --gradient_accumulation_steps 2\n",
        {
            "zero3.yaml": ACCELERATE.format(
                kind=f"{ACCELERATE_ZERO}\n  gradient_accumulation_steps: 4"
            )
        },
        name="run.sh",
        refused="gradient_accumulation_steps 4 is not the 2",
    ),
    "names-that-change-nothing": one(
        "torchrun train_mem.py --block_size 2048 --per_device_train_batch_size 2 --tf32 True \\\n"
        "  --fsdp 'full_shard auto_wrap offload' --adam_beta2 0.95 --lazy_preprocess True \\\n"
        "  --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer --use_lora False\n",
        name="run.sh",
        zero=3,
        states_on_host=True,
    ),
    "accelerate-missing": one(
        "accelerate launch --config_file zero3.yaml run_clm.py --block_size 4096 \\\n"
        "  --per_device_train_batch_size 1 --gradient_accumulation_steps 1\n",
        name="run.sh",
        refused="no zero3.yaml beside",
    ),
    "underscores": one(f"{TRAINER}max_length: 4_096\nmax_steps: 500_000\n", seq_length=4096),
    "flash-attention": one(f"{TRAINER}max_length: 4096\nflash_attn: fa2\n", recompute=NONE),
    "parameters-in-bf16": one(
        f"{TRAINER}max_length: 4096\ntorch_dtype: bfloat16\n",
        state_precision=StatePrecision.BF16,
        gradient_precision=BF16,
    ),
    "paged-optimizer": one(
        f"{TRAINER}max_length: 4096\noptim: paged_adamw_32bit\n", refused="paged_adamw_32bit"
    ),
    "lora": one(f"{TRAINER}max_length: 4096\nuse_peft: true\nlora_r: 16\n", refused="lora_r"),
    "hybrid-shards": one(
        f"{TRAINER}max_length: 4096\nfsdp: hybrid_shard auto_wrap\n", refused="hybrid_shard"
    ),
    "one-unit": one(
        f"{TRAINER}max_length: 4096\nfsdp: full_shard\nfsdp_config:\n  auto_wrap_policy: NO_WRAP\n",
        refused="auto_wrap_policy",
    ),
    "unknown-of-a-subject": one(
        f"{TRAINER}max_length: 4096\nring_attention_size: 4\n",
        refused="ring_attention_size 4: huggingface's reader",
    ),
}
DEEPSPEED = (
    '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}'
)
DEEPSPEED_ROWS = {
    "hpz": one(
        f'{DEEPSPEED}, "zero_optimization": {{"stage": 3, "zero_hpz_partition_size": 8}}}}',
        name="ds.json",
        refused="zero_hpz_partition_size",
    ),
    "nvme": one(
        f'{DEEPSPEED}, "zero_optimization": {{"stage": 3, '
        '"offload_param": {"device": "nvme"}}}',
        name="ds.json",
        refused="offload_param.device nvme",
    ),
    "ratio": one(
        f'{DEEPSPEED}, "zero_optimization": {{"stage": 3, "offload_optimizer": '
        '{"device": "cpu", "ratio": 0.3}}}',
        name="ds.json",
        refused="ratio",
    ),
    "unknown": one(
        f'{DEEPSPEED}, "zero_optimization": {{"stage": 3, "super_offload": true}}}}',
        name="ds.json",
        refused="super_offload",
    ),
    "accelerate-megatron": one(
        ACCELERATE.format(
            kind="distributed_type: MEGATRON_LM\nmegatron_lm_config:\n  megatron_lm_tp_degree: 2"
        ),
        refused="megatron_lm",
    ),
    "accelerate-one-unit": one(
        ACCELERATE.format(kind="distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2"),
        refused="auto_wrap_policy",
    ),
}
ROWS = {
    f"{name}-{key}": row
    for name, rows in (
        ("llama-factory", LLAMA_FACTORY_ROWS),
        ("axolotl", AXOLOTL_ROWS),
        ("swift", SWIFT_ROWS),
        ("trl", TRL_ROWS),
        ("trainer", TRAINER_ROWS),
        ("deepspeed", DEEPSPEED_ROWS),
    )
    for key, row in rows.items()
}


def settings_of(row: Row, folder: Path, stated: Mapping[str, object]) -> Settings:
    """Returns what a row's first file says, all of which are written into a folder."""
    for name, text in row.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    file = read_launcher_file(folder / next(iter(row.files)), TARGETS)
    assert file is not None
    return file.with_stated(stated).settings(load_model(row.model).spec, row.gpus)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.refused])
def test_a_file_says_what_its_program_runs(name, tmp_path):
    settings = settings_of(ROWS[name], tmp_path, {})

    assert {key: getattr(settings, key) for key in ROWS[name].says} == ROWS[name].says


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.refused])
def test_what_has_no_price_is_an_error_by_name(name, tmp_path):
    stated = {"--seq-length": 4096, "--micro-batch-size": 1}

    with pytest.raises(ConfigError, match=ROWS[name].refused) as caught:
        settings_of(ROWS[name], tmp_path, stated)

    assert caught.value.hint
