"""Files that were priced wrongly, with the memory and the time that their programs' settings have.

The facts are those of public files; what each was priced at before is beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.helpers.command_runs import succeed

LLAMA_FACTORY = """\
finetuning_type: full
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
cutoff_len: 2048
"""
AXOLOTL = """\
base_model: meta-llama/Llama-3.1-8B
dp_shard_size: 4
dp_replicate_size: 2
tensor_parallel_size: 2
fsdp_version: 2
fsdp_config:
  offload_params: false
  reshard_after_forward: true
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: LlamaDecoderLayer
sequence_len: 2048
sample_packing: true
gradient_accumulation_steps: 1
micro_batch_size: 1
optimizer: adamw_torch_fused
bf16: true
tf32: true
"""
SCRIPT = """\
torchrun --nproc_per_node 8 sft.py --block_size 4096 --per_device_train_batch_size 1 \\
  --bf16 True --fsdp "full_shard auto_wrap" --fsdp_config fsdp_config.json \\
  --gradient_checkpointing True
"""
FSDP_CONFIG = """\
{"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"], "min_num_params": 0, "xla": false,
 "activation_checkpointing": false}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A file with options of `plan read`, and the lines of the answer."""

    text: str
    options: str
    says: tuple[str, ...]
    name: str = "train.yaml"


FAULTS = {
    "megatron-of-llama-factory": Fault(  # 167.2 GiB, ZeRO 0
        text=f"{LLAMA_FACTORY.replace('steps: 2', 'steps: 8')}bf16: true\n"
        "tensor_model_parallel_size: 2\npipeline_model_parallel_size: 2\n"
        "use_distributed_optimizer: true\nrecompute_granularity: full\n",
        options="--model qwen3-8b --gpus 8",
        says=("pp 2 x dp 2 x tp 2", "ZeRO 1", "recompute full", "26.9 GiB"),
    ),
    "axolotl": Fault(  # 248.6 GiB, ZeRO 0, micro-batches of 8
        text=AXOLOTL,
        options="--gpus 16",
        says=("dp 8 x tp 2", "micro-batch 1 x 1", "ZeRO 3 over 4 ranks", "25.1 GiB", "211 ms"),
    ),
    "recompute-by-default": Fault(  # 167.2 GiB, no recompute
        text=f"{LLAMA_FACTORY}bf16: true\n",
        options="--model qwen3-8b --gpus 8",
        says=("recompute full", "153.4 GiB"),
    ),
    "recompute-of-the-user": Fault(  # the option was passed over
        text="per_device_train_batch_size: 1\nbf16: true\nmax_length: 2048\n",
        options="--model qwen3-8b --gpus 8 --recompute full --global-batch-size 16",
        says=("recompute full", "153.4 GiB", "micro-batch 1 x 2"),
    ),
    "pure-bf16": Fault(  # fp32, 5.28 s
        text=f"{LLAMA_FACTORY}pure_bf16: true\n",
        options="--model llama3-8b --gpus 8",
        says=("bf16, Adam (bf16 states)", "69.5 GiB", "648 ms"),
    ),
    "fsdp-config-file": Fault(  # an error
        text=SCRIPT,
        options="--model qwen2.5-7b --gpus 8",
        says=("ZeRO 3", "recompute full", "24.3 GiB"),
        name="train.sh",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_file_is_priced_as_its_program_runs_it(name, tmp_path):
    fault = FAULTS[name]
    (tmp_path / "fsdp_config.json").write_text(FSDP_CONFIG, encoding="utf-8")
    file = tmp_path / fault.name
    file.write_text(fault.text, encoding="utf-8")

    shown = succeed("read", str(file), "--gpu", "h100-80gb", *fault.options.split()).stdout

    assert [words for words in fault.says if words not in shown] == []
    assert "not understood" not in shown
