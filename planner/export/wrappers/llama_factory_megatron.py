"""LLaMA-Factory on Megatron-Core: the keys of mcore_adapter, and of its Megatron-Bridge.

Names and defaults were read in alibaba/ROLL at 8eb27cc2dc,
mcore_adapter/src/mcore_adapter/training_args.py, and for Megatron-Bridge in hiyouga/LLaMA-Factory
at ff6d4d12ee, src/llamafactory/hparams/megatron_bridge_args.py. Both read arguments of
Megatron-LM with underscores, and count a step as the Trainer does: gradient_accumulation_steps
micro-batches on every data-parallel rank. Gradients are added up in fp32 beside bf16.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.fields.arguments import (
    Argument,
    Facts,
    Given,
    Words,
    number,
    read_arguments,
    read_number,
    reading,
)
from parplan.planner.export.fields.settings import Settings, model_facts
from parplan.planner.export.fields.spellings import switched, valued
from parplan.planner.export.files.nested_file import read_flag, unpriced
from parplan.planner.export.hugging_face.hf_trainer_arguments import precision_row
from parplan.planner.export.hugging_face.trainer_names import TRAINER_NAMES
from parplan.planner.export.megatron.megatron import MEGATRON
from parplan.planner.export.megatron.megatron_arguments import TABLE
from parplan.planner.export.megatron.megatron_stages import finished
from parplan.planner.export.wrappers.wrapper import fixed, passed
from parplan.planner.export.wrappers.wrapper_names import LLAMA_FACTORY_NAMES
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import ModelSpec, Precision

_VALUES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "pipeline_model_parallel_layout", "recompute_granularity"),
    *("recompute_method", "recompute_num_layers", "recompute_modules", "optimizer"),
    *("moe_token_dispatcher_type", "moe_expert_capacity_factor"),
)
_SWITCHES = (
    *("sequence_parallel", "use_distributed_optimizer", "overlap_grad_reduce"),
    *("overlap_param_gather", "moe_grouped_gemm", "cross_entropy_loss_fusion"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)
# keys that mark a file of Megatron-Core
_MARKS = frozenset((*_VALUES[:6], "virtual_pipeline_model_parallel_size", *_SWITCHES[:4]))
# keys of Megatron-Bridge alone
_OF_BRIDGE = frozenset(
    ("mixed_precision", "use_packed_sequences", "megatron_pretrained_checkpoint", "extra_config")
)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _either_way(row: Argument) -> Argument:
    """Returns the row of a switch whose default may be on: `false` says the opposite facts."""

    def read(words: Words, facts: Facts) -> Facts:
        on = row.read(("true",), facts)
        return on if read_flag(words) else {name: _OFF[name] for name in on if name in _OFF}

    return replace(row, read=read)


# facts of switches that Megatron-Bridge has on by default
_OFF: Facts = {"zero": 0, "overlap": False, "fused_loss": False, "sequence_parallel": False}
_ROWS = {row.name: row for row in TABLE}
_OWN: tuple[Argument, ...] = (
    *(valued(_ROWS[_option(name)], name) for name in _VALUES),
    *(_either_way(switched(_ROWS[_option(name)], name)) for name in _SWITCHES),
    reading(
        "virtual_pipeline_model_parallel_size",
        lambda words, _: {"virtual_stages": read_number(words)},
    ),
    reading("expert_tensor_parallel_size", lambda words, _: {"etp": read_number(words)}),
    number("per_device_train_batch_size", "micro_batch_size"),
    Argument(
        name="gradient_accumulation_steps",
        facts=("global_batch_size",),
        write=lambda run: (f"{run.num_micro_batches}",),
        read=lambda words, _: {"accumulation": read_number(words)},
    ),
    number("cutoff_len", "seq_length"),
    precision_row("bf16", Precision.BF16),
    precision_row("fp16", Precision.FP16),
    unpriced("mixed_precision", "bf16_mixed"),
    unpriced("finetuning_type", "full"),
    unpriced("stage", "sft", "pt"),
    unpriced("neat_packing", "false"),
    unpriced("sequence_packing", "false"),
    unpriced("use_packed_sequences", "false"),
    unpriced("mtp_num_layers", "0"),
    *(
        fixed(name, "changes the step")
        for name in (
            *("moe_layer_recompute", "moe_shared_expert_overlap", "optimizer_cpu_offload", "fp8"),
            *("fp8_param", "fp8_recipe", "cuda_graph_impl", "additional_configs", "extra_config"),
            *("freeze_language_model", "enable_liger_kernel", "deepspeed", "optim"),
        )
    ),
    *passed(
        *("bias_activation_fusion", "apply_rope_fusion", "masked_softmax_fusion"),
        *("moe_aux_loss_coeff", "moe_router_dtype", "calculate_per_token_loss", "ddp_bucket_size"),
        *("overlap_p2p_comm", "variable_seq_lengths", "transformer_impl", "packing"),
        *("accumulate_allreduce_grads_in_fp32", "check_for_nan_in_loss_and_grad"),
        *("gradient_checkpointing", "disable_gradient_checkpointing", "flash_attn"),
        *("freeze_vision_tower", "freeze_multi_modal_projector", "delay_grad_reduce"),
        *("megatron_pretrained_checkpoint", "export_hf_on_finish", "use_mca"),
    ),
)


def runs_megatron(text: str, given: Iterable[Given]) -> bool:
    """Tells that LLaMA-Factory runs a file on Megatron-Core."""
    named = {each.name for each in given}
    return bool(named & _MARKS) or "USE_MCA=" in text or "USE_MEGATRON_BRIDGE=" in text


def settings(given: tuple[Given, ...], model: ModelSpec, num_gpus: int) -> Settings:
    """Returns the settings that keys say. Raises ConfigError."""
    bridge = not _OF_BRIDGE.isdisjoint(each.name for each in given)
    defaults: Facts = {"seq_length": 2048, "micro_batch_size": 8, "accumulation": 1}
    if bridge:
        on = {"zero": 1, "overlap": True, "fused_loss": True}  # the last in gpt_provider.py
        defaults |= {**on, "precision": Precision.BF16}
    else:
        defaults |= {"etp": 1}
        _require_dispatcher(given, model)
    facts = read_arguments(_READ, given, defaults) | model_facts(model)
    steps = facts.pop("accumulation")
    one = finished(facts, num_gpus)
    if facts.get("recompute") is Recompute.FULL and one.recompute_blocks is None:
        one = replace(one, recompute=Recompute.FULL)
    whole = facts.get("global_batch_size", one.micro_batch_size * steps * one.dp)
    return replace(one, global_batch_size=whole)


def _require_dispatcher(given: Iterable[Given], model: ModelSpec) -> None:
    """Raises ConfigError for mcore_adapter's usual dispatcher of tokens, which has no price."""
    said = {each.name: each.words for each in given}
    divided = said.get("expert_model_parallel_size", ("1",)) != ("1",)
    if model.num_experts and divided and "moe_token_dispatcher_type" not in said:
        raise ConfigError(
            "moe_token_dispatcher_type is left out: allgather, the default, has no price",
            hint="write moe_token_dispatcher_type: alltoall",
        )


_STATED = (
    reading("--seq-length", lambda words, _: {"seq_length": read_number(words)}),
    reading("--global-batch-size", lambda words, _: {"global_batch_size": read_number(words)}),
    reading("--micro-batch-size", lambda words, _: {"micro_batch_size": read_number(words)}),
)
_READ = (*_OWN, *_STATED)
LLAMA_FACTORY_MEGATRON = replace(
    MEGATRON,
    rows=_READ,
    table=_READ,
    settings=settings,
    model=None,
    refused=(),
    stated=_STATED,
    remarks=lambda _, __: (),
    harmless=(LLAMA_FACTORY_NAMES, TRAINER_NAMES),
    source="hiyouga/LLaMA-Factory at ff6d4d12ee, alibaba/ROLL at 8eb27cc2dc",
)
