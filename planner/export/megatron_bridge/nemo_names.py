"""NeMo's names of Megatron-LM's arguments, as NeMo-Framework-Launcher's YAML files have them.

Read in NVIDIA/NeMo-Framework-Launcher at 26e42fa91d, launcher_scripts/conf/training. The names that
Megatron-Bridge took over are in its own table; these are the others. They are read, never written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from parplan.planner.export.fields.arguments import (
    Argument,
    Facts,
    Given,
    Words,
    read_number,
    reading,
)
from parplan.planner.export.fields.spellings import spelled
from parplan.planner.export.files.nested_file import read_flag, unpriced
from parplan.planner.export.megatron.megatron_arguments import TABLE as MEGATRON_TABLE
from parplan.planner.export.megatron.megatron_model import MODEL_TABLE as MEGATRON_MODEL
from parplan.profiles.models.functions import Activations
from parplan.profiles.models.spec import Precision
from parplan.profiles.product_formats import ProductFormat

PREFIX = "training."  # of overrides on the launcher's command line
_VALUES = {
    "--micro-batch-size": "model.micro_batch_size",
    "--global-batch-size": "model.global_batch_size",
    "--recompute-granularity": "model.activations_checkpoint_granularity",
    "--recompute-method": "model.activations_checkpoint_method",
}
_SWITCHES = {
    "--tp-comm-overlap": "model.ub_tp_comm_overlap",
    "--use-tp-pp-dp-mapping": "model.use_tp_pp_dp_mapping",
    "--overlap-grad-reduce": "model.optim.overlap_grad_sync",
    "--overlap-param-gather": "model.optim.overlap_param_sync",
}
# settings of a model in examples/nlp/language_modeling/conf of NVIDIA/NeMo at 00a115fefd, where
# they are others than those that Megatron-LM's arguments begin with
EXAMPLES = {
    "megatron_gpt_config": {"model.hidden_dropout": "0.1", "model.attention_dropout": "0.1"},
    "megatron_llama_config": {
        "model.encoder_seq_length": "4096",
        "model.max_position_embeddings": "4096",
        "model.hidden_dropout": "0.0",
        "model.attention_dropout": "0.0",
        "model.normalization": "rmsnorm",
        "model.bias": "false",
        "model.activation": "fast-swiglu",
        "model.position_embedding_type": "rope",
        "model.share_embeddings_and_output_weights": "false",
    },
}
# optimizers of nemo/core/optim: those that divide their states, and those that do not
_SHARDED = ("mcore_distributed_optim", "distributed_fused_adam")
_WHOLE = ("fused_adam", "adam", "adamw", "megatron_fused_adam")
_INTERPOLATED = re.compile(r"\$\{(?:training)?([\w.]{1,200})\}")
_PRODUCT = re.compile(r"\$\{multiply: {0,9}([0-9]{1,9}) {0,9}, {0,9}([0-9]{1,9}) {0,9}\}")
_PRECISIONS = {"bf16": Precision.BF16, "16": Precision.FP16, "32": Precision.FP32}
_GATED = ("swiglu", "fast-swiglu", "geglu", "fast-geglu", "reglu", "fast-reglu")
_PLAIN = ("gelu", "relu")


def interpolated(given: Iterable[Given]) -> tuple[Given, ...]:
    """Returns values with the ones that they name in their places.

    The forms are `${training.model.x}`, `${.x}` of the same section and `${multiply:4, ${.x}}`.
    """
    found = tuple(given)
    values = {each.name: each.words[0] for each in found if len(each.words) == 1}

    def filled(one: Given, word: str) -> str:
        section = one.name.rpartition(".")[0]

        def value(match: re.Match[str]) -> str:
            name = match[1].removeprefix(".")
            return values.get(name, values.get(f"{section}.{name}", match[0]))

        def product(match: re.Match[str]) -> str:
            return f"{int(match[1]) * int(match[2])}"

        return _PRODUCT.sub(product, _INTERPOLATED.sub(value, word))

    return tuple(
        replace(one, words=tuple(filled(one, word) for word in one.words)) for one in found
    )


def _precision(words: Words, _: Facts) -> Facts:
    name = words[0].removesuffix("-mixed")
    if name not in _PRECISIONS:
        raise ValueError(f"one of {', '.join(_PRECISIONS)} is read")
    return {"precision": _PRECISIONS[name]}


def _optimizer(words: Words, _: Facts) -> Facts:
    if words[0] not in (*_SHARDED, *_WHOLE):
        raise ValueError(f"one of {', '.join((*_SHARDED, *_WHOLE))} is priced")
    return {"zero": int(words[0] in _SHARDED)}


def _products(words: Words, _: Facts) -> Facts:
    return {"products": ProductFormat.FP8_DELAYED if read_flag(words) else None}


def _gradients(words: Words, _: Facts) -> Facts:
    return {"gradient_precision": Precision.BF16} if words[0] == "bf16" else {}


def _recomputed_blocks(words: Words, facts: Facts) -> Facts:
    """Reads the blocks of the `block` method, 0 of which recompute nothing."""
    if facts.get("method") != "block" or "recompute" not in facts:
        return {}
    return {"recompute_blocks": read_number(words)}


def _activation(words: Words, _: Facts) -> Facts:
    name = words[0]
    if name == "squared-relu":
        return {"activation": Activations.RELU_SQUARED}
    if name not in (*_GATED, *_PLAIN):
        raise ValueError(f"one of {', '.join((*_GATED, *_PLAIN))}, squared-relu is priced")
    return {"gated_ffn": name in _GATED}


def _only_read(rows: Iterable[Argument]) -> tuple[Argument, ...]:
    return tuple(replace(row, write=lambda _: None) for row in rows)


TABLE: tuple[Argument, ...] = (
    *_only_read(spelled(MEGATRON_TABLE, _VALUES, _SWITCHES, {}, {})),
    reading("model.encoder_seq_length", lambda words, _: {"seq_length": read_number(words)}),
    reading("model.data.seq_length", lambda words, _: {"seq_length": read_number(words)}),
    reading("model.activations_checkpoint_num_layers", _recomputed_blocks),
    reading("trainer.precision", _precision),
    reading("model.optim.name", _optimizer),
    reading("model.optim.grad_sync_dtype", _gradients),
    reading("model.fp8", _products),
    reading("model.fp8_params", lambda words, _: {"narrow_weights": read_flag(words)}),
    unpriced("model.fsdp", "false"),
    unpriced("trainer.accumulate_grad_batches", "1"),
    unpriced("model.rampup_batch_size", "null"),
    unpriced("model.fp32_residual_connection", "false"),
    unpriced("model.fp16_lm_cross_entropy", "false"),
    unpriced("model.fp8_e4m3", "false", "true"),
    unpriced("model.ffn_dropout", "0", "0.0"),
    unpriced("model.num_micro_batches_with_partial_activation_checkpoints", "null", "0"),
    unpriced("model.activations_checkpoint_layers_per_pipeline", "null", "0"),
)
_SHAPE = {
    "--rotary-percent": "model.rotary_percentage",
    "--max-position-embeddings": "model.max_position_embeddings",
    "--tokenizer-type": "model.tokenizer.type",
    "--tokenizer-model": "model.tokenizer.model",
}
MODEL_TABLE: tuple[Argument, ...] = (
    *_only_read(spelled(MEGATRON_MODEL, _SHAPE, {}, {}, {})),
    reading("model.bias", lambda words, _: {"linear_bias": read_flag(words)}),
    reading("model.activation", _activation),
)
