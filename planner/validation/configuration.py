"""Reads a row of a steps table as a configuration: model, cluster, training, layout, open choices.

The columns are those of docs/accuracy.md. Settings that a framework implies come from the
framework's name (frameworks.py). Settings that nothing states (a micro-batch, a recompute level,
virtual stages) stay open, and priced_rows.py takes the fastest choice that fits, since published
runs were tuned.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.validation.frameworks import (
    DEVICES,
    DROPOUT,
    FOLDS,
    FP8_DTYPES,
    FUSED_LOSS_LOGIT_BYTES,
    INTERLEAVING_STACKS,
    KERNELS,
    LAST_STAGE_OF_REDIS,
    NETWORKS,
    NO_OVERLAP,
    NOT_DECODERS,
    OPEN_MICRO_BATCHES,
    PCIE_IS_ANOTHER,
    PRECISIONS,
    RECOMPUTE,
    RELEASE_TEST_UNFUSED,
    RELEASE_TEST_VOCAB,
    SELECTIVE_OF,
    STACKS,
    UNKNOWN_STACK,
)
from parplan.planner.validation.uneven_divisions import blocks_by_compute
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.machine_catalog import load_cluster, load_stack, with_gpus
from parplan.profiles.machines.stack_terms import Terms, shipped_terms
from parplan.profiles.models.spec import ModelSpec, Norm, Positions, Precision, TrainingSpec
from parplan.profiles.stack import AttentionKernel, AvailableKernel, FlashKernel, Stack

Row = Mapping[str, str]

NEEDED = (
    "layers",
    "hidden",
    "heads",
    "ffn_hidden",
    "seq_len",
    "global_batch",
    "n_gpus",
    "dp",
    "tp",
    "pp",
)
OPTIONAL = (
    "gpu",
    "gpus_per_node",
    "interconnect",
    "model",
    "vocab",
    "kv_heads",
    "head_dim",
    "gated_ffn",
    "micro_batch",
    "recompute",
    "vpp",
    "cp",
    "ep",
    "experts",
    "sequence_parallel",
    "zero_stage",
    "dtype",
    "notes",
    "step_time_s",
    "derived_step_time_s",
    "peak_memory_gib",
    "memory_kind",
    "run_type",
)

_packaged_cluster = functools.cache(load_cluster)


@functools.cache
def _facts(stack: str) -> Stack:
    """Loads a packaged stack without fitted terms."""
    return load_stack(stack, Terms())


class UnpricedError(Exception):
    """A row that cannot be priced, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The configuration of a run.

    micro_batches, virtual_stages and recompute hold one choice if the row states it, else all
    sensible choices.

    recompute  choices, each with the levels that blocks take in turn
    blocks     blocks of each pipeline rank, None when they are divided evenly
    """

    model: ModelSpec
    cluster: Cluster
    training: TrainingSpec
    mesh: Mesh
    sequence_parallel: bool
    zero: int
    micro_batches: tuple[int, ...]
    virtual_stages: tuple[int, ...]
    recompute: tuple[tuple[Recompute, ...], ...]
    known_framework: bool = True
    blocks: tuple[int, ...] | None = None

    @property
    def assumed(self) -> tuple[str, ...]:
        """Names the settings that the row leaves open, and `framework` if no stack describes it."""
        open_ = {
            "micro_batch": self.micro_batches,
            "vpp": self.virtual_stages,
            "recompute": self.recompute,
        }
        left = tuple(name for name, choices in open_.items() if len(choices) > 1)
        return left if self.known_framework else ("framework", *left)

    def layout(self, micro_batch: int, virtual_stages: int) -> ParallelLayout:
        """Returns the layout of one choice of micro-batch size and virtual stages."""
        count = self.training.global_batch_size // (micro_batch * self.mesh.dp)
        # 1F1B runs in the order of GPipe when the pipeline never fills
        plain = Schedule.ONE_F_ONE_B if count >= self.mesh.pp else Schedule.GPIPE
        return ParallelLayout(
            mesh=self.mesh,
            schedule=Schedule.INTERLEAVED if virtual_stages > 1 else plain,
            virtual_stages=virtual_stages,
            micro_batch_size=micro_batch,
            num_micro_batches=count,
            sequence_parallel=self.sequence_parallel,
        )


def source_of(row: Row) -> str:
    """Returns the part of the id before the first dash."""
    return row["id"].split("-")[0]


def experiment_of(row: Row) -> str:
    """Names the fold of a row, whose rows cross-validation leaves out together.

    A fold is a source. A source that alone covers its stack is divided by one column (`FOLDS`),
    such as the number of GPUs; vTrain's tables of two machines are divided by table as well.
    """
    source = source_of(row)
    if source not in FOLDS:
        return source
    table = "-".join(row["id"].split("-")[:2]) if source == "vtrain" else source
    return f"{table}-{FOLDS[source]}-{row[FOLDS[source]]}"


def stack_name(row: Row) -> str:
    """Names the stack of the row's framework, by default one of plain PyTorch parts."""
    return _described_stack(row) or UNKNOWN_STACK


def _described_stack(row: Row) -> str | None:
    return next((stack for pattern, stack in STACKS if re.search(pattern, row["framework"])), None)


def configuration_of(
    row: Row, terms: Terms | None = None, *, without: str | None = None
) -> Configuration:
    """Returns the configuration that the row states, under `terms` or the shipped terms.

    Raises UnpricedError for a row that cannot be priced, and ConfigError.
    """
    _refuse(row)
    row = _completed(row)
    missing = [name for name in (*NEEDED, "vocab", "dtype") if not row.get(name)]
    if missing:
        raise UnpricedError(f"{missing[0]} is not stated")
    terms = shipped_terms() if terms is None else terms
    stack = _stack(row, terms.of_stack(_facts(stack_name(row)), without))
    mesh = Mesh(pp=_whole(row, "pp"), dp=_whole(row, "dp"), tp=_whole(row, "tp"))
    cluster = _cluster(row)
    model = _model(row, stack)
    if mesh.num_ranks != cluster.num_gpus:
        raise UnpricedError("dp x tp x pp is not the number of GPUs")
    return Configuration(
        model=model,
        cluster=cluster,
        blocks=_blocks(row, model, mesh),
        training=_training(row, stack),
        mesh=mesh,
        sequence_parallel=_true(row, "sequence_parallel") and mesh.tp > 1,
        zero=_whole(row, "zero_stage", 0),
        micro_batches=_micro_batches(row, mesh),
        virtual_stages=_virtual_stages(row, mesh, stack),
        recompute=_recompute(row, stack),
        known_framework=_described_stack(row) is not None,
    )


def _refuse(row: Row) -> None:
    if _whole(row, "experts", 1) > 1:
        raise UnpricedError("mixture of experts")
    if _whole(row, "cp", 1) > 1:
        raise UnpricedError("context parallelism")
    if "lora" in row["run_type"].lower():
        raise UnpricedError("LoRA")
    if row["model"].startswith(NOT_DECODERS) or re.search(r"grpo|mla", row["model"]):
        raise UnpricedError("not a plain decoder")
    if "bnb" in row["framework"]:
        raise UnpricedError("8-bit optimizer")
    if "INCONSISTENT" in row["notes"]:
        raise UnpricedError("its own figures disagree")
    method = re.search(r"method (vocab-\d|interlaced)", row["framework"])
    if method:
        raise UnpricedError(f"vocabulary parallelism over pipeline stages ({method[1]})")


def _completed(row: Row) -> Row:
    """Completes the row with settings that its framework implies.

    Megatron's release tests have the vocabulary of their default tokenizer. BigScience's V100 runs
    shard optimizer states under data parallelism (tr3m-1B3-emb-norm-pile.slurm says so for some
    runs; for the rest it is assumed). vTrain divides 50,257 by tp without padding
    (src/model/gpt_model.py of the repository). The head of its single-node rows takes 2.3 times as
    long at tp 1, where the share is odd, as the rows on two ranks imply.
    """
    row = dict(row)
    if "Megatron-LM CI" in row["framework"] and not row["vocab"]:
        row["vocab"] = str(RELEASE_TEST_VOCAB)
    if row["id"].startswith("bs") and not row["zero_stage"]:
        row["zero_stage"] = str(int(_whole(row, "dp", 1) > 1))
    if row["id"].startswith("vtrain-single-") and row["vocab"] and row["tp"]:
        tp = _whole(row, "tp")
        row |= {"vocab": str(_whole(row, "vocab") // tp * tp), "vocab_multiple": "1"}
    return row


def _stack(row: Row, stack: Stack) -> Stack:
    """Returns the stack with the changes in the row's notes, such as `attention=flash1`."""
    notes = row["notes"]
    fused_loss = re.search(r"fused cross entropy|cross-entropy fusion on", notes)
    if fused_loss or "cross_entropy_loss_fusion" in row["id"]:
        stack = replace(stack, logit_bytes=FUSED_LOSS_LOGIT_BYTES)
    if NO_OVERLAP.search(notes):
        stack = replace(stack, overlap_tensor_parallel=False, overlap_transfers=False)
    if "asyncTP" in row["id"]:
        stack = replace(stack, overlap_tensor_parallel=True)
    unfused = re.search(r"attention-backend unfused|TE impl local", notes)
    if unfused or RELEASE_TEST_UNFUSED.search(row["id"]):
        return replace(stack, attention=AttentionKernel.UNFUSED)
    noted = re.search(r"\battention=(\w+)", notes)
    if noted is None:
        return stack
    kernel = KERNELS.get(noted[1], noted[1])
    if kernel == AttentionKernel.UNFUSED:
        return replace(stack, attention=AttentionKernel.UNFUSED)
    if kernel not in list(FlashKernel):
        raise UnpricedError(f"no attention kernel {noted[1]!r}")
    return replace(
        stack,
        attention=AttentionKernel.FLASH,
        flash_kernels=(AvailableKernel(kernel=FlashKernel(kernel)),),
    )


def _model(row: Row, stack: Stack) -> ModelSpec:
    gated = _true(row, "gated_ffn")
    heads = _whole(row, "heads")
    hidden = _whole(row, "hidden")
    old = stack.attention is AttentionKernel.UNFUSED and source_of(row) != "bloom"
    dropout = DROPOUT if old or "Megatron-LM CI" in row["framework"] else 0.0
    return ModelSpec(
        name=row["model"] or row["id"],
        num_layers=_whole(row, "layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_whole(row, "kv_heads", heads),
        head_dim=_whole(row, "head_dim", hidden // heads),
        ffn_hidden_size=_whole(row, "ffn_hidden"),
        vocab_size=_whole(row, "vocab"),
        max_seq_length=_whole(row, "seq_len"),
        dropout=dropout,
        gated_ffn=gated,
        vocab_multiple=int(row.get("vocab_multiple") or 128),
        norm=Norm.RMS_NORM if gated else Norm.LAYER_NORM,
        positions=Positions.ROTARY if gated else Positions.LEARNED,
        linear_bias=not gated,
        qkv_bias=not gated,
        tied_embeddings=_tied(row, gated),
    )


def _tied(row: Row, gated: bool) -> bool:
    """True if the head shares the embedding's table: per the notes, else for ungated models."""
    if "untied" in row["notes"]:
        return False
    return "tied embeddings" in row["notes"] or (
        not gated and "Megatron-LM CI" not in row["framework"]
    )


def _blocks(row: Row, model: ModelSpec, mesh: Mesh) -> tuple[int, ...] | None:
    """Returns blocks of each pipeline rank, None when the framework divides them evenly."""
    if "nanotron" in row["framework"] and mesh.pp > 1:
        return blocks_by_compute(model, mesh)
    if "method redis" not in row["framework"]:
        return None
    if model.vocab_size not in LAST_STAGE_OF_REDIS:
        raise UnpricedError("layers moved between stages, how many is not stated")
    last = LAST_STAGE_OF_REDIS[model.vocab_size]
    each, more = divmod(model.num_layers - last, mesh.pp - 1)
    return (*[each] * (mesh.pp - 1 - more), *[each + 1] * more, last)


def _cluster(row: Row) -> Cluster:
    name = _device(row["gpu"])
    if name is None:
        raise UnpricedError(f"no device profile for {row['gpu'] or 'an unnamed GPU'}")
    cluster = _packaged_cluster(name)
    gpus = _whole(row, "n_gpus")
    per_node = _whole(row, "gpus_per_node", cluster.gpus_per_node)
    cluster = with_gpus(cluster, gpus, min(gpus, per_node))
    network = re.search(r"(\d+)x ?(\d+) ?Gb", row["interconnect"]) or re.search(
        r"()(\d+) Gb/s (?:IB )?per node", row["interconnect"]
    )
    if network:
        nics = max(1, int(network[1] or 1))
        if not int(network[2]):
            raise UnpricedError("interconnect is 0 Gb/s")
        nic = replace(cluster.nic, bytes_per_s=int(network[2]) * 1e9 / 8)
        cluster = replace(cluster, nics_per_node=nics, nic=nic)
    interconnect = row["interconnect"].lower()
    kind = next((ours for theirs, ours in NETWORKS.items() if theirs in interconnect), None)
    return replace(cluster, nic=replace(cluster.nic, name=kind)) if kind else cluster


def _device(gpu: str) -> str | None:
    """Names the cluster file of a gpu cell; whole words are compared, since an L40S is no L4."""
    gpu = re.sub(r"(\d)gb\b", r"\1g", gpu.lower())
    name = next(
        (ours for theirs, ours in DEVICES.items() if re.match(rf"{theirs}(?![a-z0-9])", gpu)), None
    )
    if name and "pcie" in gpu and "pcie" not in name and name.startswith(PCIE_IS_ANOTHER):
        return None
    return name


def _training(row: Row, stack: Stack) -> TrainingSpec:
    dtype = row["dtype"].lower()
    fp8 = dtype in FP8_DTYPES
    if dtype not in PRECISIONS and not fp8:
        raise UnpricedError(f"precision {row['dtype']!r}")
    precision = Precision.BF16 if fp8 else PRECISIONS[dtype]
    # Megatron-LM has a flag for it that is off by default
    overlap = stack.overlap_grad_reduce and "Megatron-LM" not in row["framework"]
    if NO_OVERLAP.search(row["notes"]):
        overlap = False
    elif "overlap=grad" in row["notes"]:
        overlap = True
    return TrainingSpec(
        global_batch_size=_whole(row, "global_batch"),
        seq_length=_whole(row, "seq_len"),
        precision=precision,
        gradient_precision=_gradient_precision(row, precision),
        attention=stack.attention,
        fp8_matmuls=fp8,
        overlap_grad_reduce=overlap,
        stack=stack,
    )


def _gradient_precision(row: Row, precision: Precision) -> Precision:
    """Returns fp32 for bf16 weights (except in InternEvo), else the precision of the weights."""
    if precision is Precision.BF16 and "InternEvo" not in row["framework"]:
        return Precision.FP32
    return precision


def _micro_batches(row: Row, mesh: Mesh) -> tuple[int, ...]:
    if row["micro_batch"]:
        return (_whole(row, "micro_batch"),)
    per_rank = _whole(row, "global_batch") // mesh.dp
    return tuple(
        size for size in OPEN_MICRO_BATCHES if size <= per_rank and per_rank % size == 0
    ) or (1,)


def _virtual_stages(row: Row, mesh: Mesh, stack: Stack) -> tuple[int, ...]:
    """Returns open choices only if the framework interleaves and the row states no micro-batch."""
    if row["vpp"] or mesh.pp == 1 or row["micro_batch"] or stack.name not in INTERLEAVING_STACKS:
        return (max(1, _whole(row, "vpp", 1)),)  # some write 0 for no interleaving
    per_rank = _whole(row, "layers") // mesh.pp
    return tuple(count for count in range(1, per_rank + 1) if per_rank % count == 0)


def _recompute(row: Row, stack: Stack) -> tuple[tuple[Recompute, ...], ...]:
    if not row["recompute"]:
        return tuple((level,) for level in Recompute)
    cell = row["recompute"]
    if cell == Recompute.SELECTIVE:
        cell = SELECTIVE_OF.get(stack.name, cell)
    if cell not in RECOMPUTE:
        raise UnpricedError(f"recompute {cell!r}")
    return (RECOMPUTE[cell],)


def _true(row: Row, name: str) -> bool:
    """Reads a cell of true or false; an empty cell is false. Raises UnpricedError."""
    if row[name].lower() not in ("", "true", "false"):
        raise UnpricedError(f"{name} is neither true nor false")
    return row[name].lower() == "true"


def _whole(row: Row, name: str, default: int | None = None) -> int:
    """Reads a whole number; an empty cell has the default. Raises UnpricedError."""
    if not row.get(name) and default is not None:
        return default
    try:
        return int(row[name])
    except ValueError:
        raise UnpricedError(f"{name} is no whole number") from None
