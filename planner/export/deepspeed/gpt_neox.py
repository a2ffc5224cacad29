"""GPT-NeoX: its YAML or JSON, which has DeepSpeed's keys, a model, and degrees of its own.

Names and defaults were read in EleutherAI/gpt-neox at ea7aefd8: neox_args.py and arguments.py of
megatron/neox_arguments, and megatron/model/transformer.py. Keys may have dashes. It is read, and
never written as an export.
"""

from __future__ import annotations

import re
from dataclasses import replace

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.deepspeed.deepspeed import DEEPSPEED, without_disabled
from parplan.planner.export.deepspeed.deepspeed_arguments import (
    BATCH,
    ONE_VALUE,
    PRECISION,
    ZERO,
    finished,
)
from parplan.planner.export.fields.arguments import (
    Argument,
    Facts,
    Given,
    Words,
    free,
    number,
    read_arguments,
    read_number,
    reading,
)
from parplan.planner.export.fields.harmless import harmless
from parplan.planner.export.fields.program_facts import PROGRAM
from parplan.planner.export.fields.settings import Settings, model_facts
from parplan.planner.export.files.nested_file import nested_arguments, read_flag, unpriced
from parplan.planner.export.megatron.megatron_model import model_of_facts
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import ModelSpec, Norm, Positions, Precision
from parplan.profiles.stack import AttentionKernel

_OWN = re.compile(r"[\s{,\"']pipe[_-]parallel[_-]size[\"']?\s*:")
_PRECISIONS = {"fp16": Precision.FP16, "bfloat16": Precision.BF16, "fp32": Precision.FP32}
_ATTENTION = "attention_config"
# gradients are taken in fp32 where no `data_types` says them, which is the larger of both; NeoX
# warns of pipelines that accumulate them in 16 bits (arguments.py)
_DEFAULTS: Facts = {"attention": AttentionKernel.UNFUSED, "accumulated": Precision.FP32}
_GATED = ("swiglu", "geglu", "reglu", "bilinear")


def _degree(name: str, fact: str) -> Argument:
    """Returns the row of a degree, of which 0 is that of a run without it."""
    return reading(name, lambda words, _: {fact: max(1, int(read_number(words)))})


def _read_checkpoints(words: Words, _: Facts) -> Facts:
    return {"recompute": Recompute.FULL if read_flag(words) else Recompute.NONE}


def _read_units(words: Words, _: Facts) -> Facts:
    if words != ("1",):
        raise ValueError("units of one layer are priced")
    return {}


def _read_attention(words: Words, _: Facts) -> Facts:
    """Reads the attention of all layers such as `[[["flash"], 32]]`, by its text."""
    kinds = set(re.findall(r"[a-z_]+", " ".join(words)))
    if kinds not in ({"flash"}, {"global"}):
        raise ValueError("flash and global of all layers are priced")
    return {"attention": AttentionKernel.FLASH if kinds == {"flash"} else AttentionKernel.UNFUSED}


def _read_precision(words: Words, _: Facts) -> Facts:
    if words[0] not in _PRECISIONS:
        raise ValueError(f"one of {', '.join(_PRECISIONS)} is known")
    return {"precision": _PRECISIONS[words[0]]}


def _read_norm(words: Words, _: Facts) -> Facts:
    norms = {"layernorm": Norm.LAYER_NORM, "rmsnorm": Norm.RMS_NORM}
    norms |= {f"te_{name}": norm for name, norm in norms.items()}
    if words[0] not in norms:
        raise ValueError("layernorm and rmsnorm are priced")
    return {"norm": norms[words[0]]}


def _read_positions(words: Words, _: Facts) -> Facts:
    positions = {
        "learned": Positions.LEARNED,
        "rotary": Positions.ROTARY,
        "none": Positions.NONE,
    }
    if words[0] not in positions:
        raise ValueError(f"one of {', '.join(positions)} is priced")
    return {"positions": positions[words[0]]}


def _read_activation(words: Words, _: Facts) -> Facts:
    if words[0] not in (*_GATED, "gelu", "geglu", "relu"):
        raise ValueError("gelu, relu and gated activations are priced")
    return {"gated_ffn": words[0] in _GATED}


RUN: tuple[Argument, ...] = (
    _degree("pipe_parallel_size", "pp"),
    _degree("model_parallel_size", "tp"),
    reading("sequence_parallel", lambda words, _: {"sequence_parallel": read_flag(words)}),
    number("seq_length", "seq_length"),
    reading("checkpoint_activations", _read_checkpoints),
    reading("checkpoint_num_layers", _read_units),
    reading("precision", _read_precision),
    reading("attention_config", _read_attention),
    unpriced("checkpoint_in_cpu", "false"),
    unpriced("partition_activations", "false", "true"),
    unpriced("contiguous_checkpointing", "false", "true"),
    unpriced("pipe_partition_method", "type:transformer|mlp", "type:transformer"),
    unpriced("moe_num_experts", "1"),
    unpriced("expert_interval", "1", "2"),
    unpriced("train_impl", "normal"),
    unpriced("pack_impl", "packed"),
    unpriced("use_bnb_optimizer", "false"),
    reading("fp16.type", _read_precision),
)
SHAPE: tuple[Argument, ...] = (
    number("num_layers", "num_layers"),
    number("hidden_size", "hidden_size"),
    number("num_attention_heads", "num_heads"),
    number("num_kv_heads", "num_kv_heads"),
    reading("intermediate_size", lambda words, _: {"ffn": read_number(words)}),
    reading("mlp_multiple_of", lambda words, _: {"multiple": read_number(words)}),
    number("max_position_embeddings", "max_seq_length"),
    number("padded_vocab_size", "vocab_size"),
    number("make_vocab_size_divisible_by", "vocab_multiple"),
    reading("norm", _read_norm),
    reading("pos_emb", _read_positions),
    number("rotary_pct", "rotary_fraction"),
    number("rotary_emb_base", "rope_theta"),
    reading("no_weight_tying", lambda words, _: {"tied_embeddings": not read_flag(words)}),
    reading("gpt_j_residual", lambda words, _: {"parallel": read_flag(words)}),
    reading("activation", _read_activation),
    reading("use_bias_in_mlp", lambda words, _: {"linear_bias": read_flag(words)}),
    reading("use_bias_in_attn_linear", lambda words, _: {"qkv_bias": read_flag(words)}),
    reading("hidden_dropout", lambda words, _: {"dropout": read_number(words)}),
    free("attention_dropout"),
    unpriced("gpt_j_tied", "false"),
    unpriced("use_qk_layernorm", "false"),
    unpriced("sliding_window_width"),
    unpriced("soft_prompt_tuning"),
)
TABLE: tuple[Argument, ...] = (*BATCH, *PRECISION, *ZERO, *ONE_VALUE, *RUN, *PROGRAM)
HARMLESS = (
    harmless(
        "configs/neox_arguments.md of EleutherAI/gpt-neox at ea7aefd8",
        """vocab-file merge-file save load data-path train-data-* valid-data-* test-data-*
        data-impl split mmap-warmup num-workers tokenizer-type weight-by-num-documents
        use-shared-fs weighted-sampler-alpha init-method* output-layer-init-method
        output-layer-parallelism *fusion scaled-* bias-gelu-fusion bias-dropout-fusion
        rope-fusion layernorm-fusion rmsnorm-fusion rms-norm-epsilon layernorm-epsilon
        scalenorm-epsilon use-bias-in-norms optimizer.params.* scheduler.* lr lr-* min-lr
        warmup override-lr-scheduler use-checkpoint-lr-scheduler gradient-clipping
        weight-decay clip-grad fp16.loss-scale* fp16.initial-scale-power fp16.hysteresis
        fp16.min-loss-scale fp16.fp16 bf16.bf16 bf16.loss-scale* bf16.initial-scale-power
        bf16.hysteresis bf16.min-loss-scale fp16.consecutive-hysteresis loss-scale* hysteresis
        min-scale dynamic-loss-scale train-iters train-epochs eval-* checkpoint-factor
        checkpoint-scale extra-save-iters keep-last-n-checkpoints log-* steps-per-print
        wall-clock-breakdown distributed-backend tensorboard-* use-wandb wandb-* use-comet
        comet-* launcher deepspeed-mpi deepspeed-slurm hostfile finetune no-load-* no-save-*
        seed exit-interval local-rank rank git-hash synchronize-each-layer
        deepspeed-activation-checkpointing zero-optimization.allgather-*
        zero-allow-untested-optimizer zero-optimization.round-robin-gradients profile*
        memory-profiling* attention-softmax-in-fp32 fp32-allreduce
        apply-query-key-layer-scaling rotary-save-freqs-buffer dataset-impl allow-chopped
        deepspeed-extra-args gradient-noise-* checkpoint.* checkpoint-validation-*
        char-level-ppl include exclude num-gpus num-nodes master-port use-mup mup-*
        coord-check s3-* comms-logger* autotuning-run flops-profiler.* flops-profiler
        csv-monitor.* wandb.* peak-theoretical-tflops eod-mask-loss short-seq-prob onnx-safe
        lazy-mpu-init use-cpu-initialization text-gen-type temperature top-p top-k
        maximum-tokens sample-* num-samples prefetch* job-name slurm-* user-script
        fused-kernels-build-path no-ssh-check dump-state prescale-gradients
        gradient-predivide-factor sparse-gradients""",
    ),
)


def arguments(text: str, file: str) -> tuple[Given, ...]:
    """Returns the keys of a YAML or JSON file, with underscores for dashes."""
    if not file.endswith((".yml", ".yaml", ".json")) or not _OWN.search(text):
        return ()
    given = (
        replace(each, name=each.name.replace("-", "_")) for each in nested_arguments(text, file)
    )
    return without_disabled(_with_attention(tuple(given)))


def _with_attention(given: tuple[Given, ...]) -> tuple[Given, ...]:
    """Returns the keys with the nested list of kinds of attention as one."""
    parts = [each for each in given if each.name.startswith(_ATTENTION)]
    if not parts:
        return given
    words = tuple(word for each in parts for word in each.words)
    rest = (each for each in given if each not in parts)
    return (*rest, Given(_ATTENTION, words, parts[0].where))


def settings(given: tuple[Given, ...], model: ModelSpec, num_gpus: int) -> Settings:
    """Returns the settings that keys say. Raises ConfigError."""
    facts = _DEFAULTS | read_arguments(TABLE, given)
    run = finished(facts | model_facts(model), num_gpus)
    return replace(run, sequence_parallel=run.sequence_parallel and run.tp > 1)


def read_model(given: tuple[Given, ...], name: str, where: str) -> ModelSpec:
    """Returns the model of the keys. Raises ConfigError for a size that is missing."""
    facts: Facts = {"dropout": 0.0} | read_arguments(SHAPE, given)
    if "vocab_size" not in facts:
        raise ConfigError(
            f"{where}: the tokenizer has the size of the vocabulary",
            hint="state it with plan read FILE --vocab-size N",
        )
    gated, hidden = facts.get("gated_ffn", False), facts.get("hidden_size", 0)
    width, multiple = facts.pop("ffn", 4 * hidden), facts.pop("multiple", 1)
    if gated:  # ParallelMLP: a third of the width, in whole multiples
        width = -(-int(width * 2 / 3) // (2 * multiple)) * multiple
    parallel: bool = facts.pop("parallel", False)
    model = model_of_facts(facts | {"ffn_hidden_size": width}, name, where)
    return replace(model, parallel_residual=parallel)


GPT_NEOX = replace(
    DEEPSPEED,
    name="gpt-neox",
    stacks=("megatron-deepspeed", "deepspeed"),
    rows=(*TABLE, *SHAPE),
    table=TABLE,
    arguments=arguments,
    settings=settings,
    model=read_model,
    refused=(),
    harmless=HARMLESS,
    further=None,
    owns=lambda text: _OWN.search(text) is not None,
    source="EleutherAI/gpt-neox at ea7aefd8",
)
