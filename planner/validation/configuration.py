"""A row of a steps table -> the configuration that was run: model, cluster, training, layout, and
what the row leaves open.

Columns are those of docs/accuracy.md. What a row does not say and its framework decides is read off
the framework's name (frameworks.py); what nobody says (a micro-batch, a recompute level, virtual
stages) stays open, and `priced.py` takes the fastest choice that fits, as whoever published a tuned
run did.
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
    """A packaged stack without fitted terms."""
    return load_stack(stack, Terms())


class UnpricedError(Exception):
    """Why a row is outside what can be priced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What was run. Tuples hold one choice where the row states it, all sensible ones where it
    leaves it open.
    """

    model: ModelSpec
    cluster: Cluster
    training: TrainingSpec
    mesh: Mesh
    sequence_parallel: bool
    zero: int
    micro_batches: tuple[int, ...]
    virtual_stages: tuple[int, ...]
    recompute: tuple[
        tuple[Recompute, ...], ...
    ]  # choices; each the levels that blocks take in turn
    known_framework: bool = True
    blocks: tuple[int, ...] | None = (
        None  # of each pipeline rank, where the framework does not divide them evenly
    )

    @property
    def assumed(self) -> tuple[str, ...]:
        """The settings that the row leaves open, and `framework` where no stack describes it."""
        open_ = {
            "micro_batch": self.micro_batches,
            "vpp": self.virtual_stages,
            "recompute": self.recompute,
        }
        left = tuple(name for name, choices in open_.items() if len(choices) > 1)
        return left if self.known_framework else ("framework", *left)

    def layout(self, micro_batch: int, virtual_stages: int) -> ParallelLayout:
        """The layout of one of the choices."""
        count = self.training.global_batch_size // (micro_batch * self.mesh.dp)
        plain = (
            Schedule.ONE_F_ONE_B if count >= self.mesh.pp else Schedule.GPIPE
        )  # the same order when the pipeline never fills
        return ParallelLayout(
            mesh=self.mesh,
            schedule=Schedule.INTERLEAVED if virtual_stages > 1 else plain,
            virtual_stages=virtual_stages,
            micro_batch_size=micro_batch,
            num_micro_batches=count,
            sequence_parallel=self.sequence_parallel,
        )


def source_of(row: Row) -> str:
    """The id prefix: the part before the first dash."""
    return row["id"].split("-")[0]


def experiment_of(row: Row) -> str:
    """What cross-validation leaves out together: the rows of one source.

    Of a source that alone shows how its stack behaves, the rows that agree in one column (`FOLDS`):
    every model, or every number of GPUs. Of vTrain's two tables, two machines, the name says which.
    """
    source = source_of(row)
    if source not in FOLDS:
        return source
    table = "-".join(row["id"].split("-")[:2]) if source == "vtrain" else source
    return f"{table}-{FOLDS[source]}-{row[FOLDS[source]]}"


def stack_name(row: Row) -> str:
    """The stack of the row's framework; plain PyTorch's parts for one that no stack describes."""
    return _described_stack(row) or UNKNOWN_STACK


def _described_stack(row: Row) -> str | None:
    return next((stack for pattern, stack in STACKS if re.search(pattern, row["framework"])), None)


def configuration_of(
    row: Row, terms: Terms | None = None, *, without: str | None = None
) -> Configuration:
    """The configuration that the row states, under the shipped terms or others. Raises
    UnpricedError, ConfigError.
    """
    _refuse(row)
    row = _completed(row)
    missing = [name for name in (*NEEDED, "vocab", "dtype") if not row.get(name)]
    if missing:
        raise UnpricedError(f"{missing[0]} is not stated")
    terms = shipped_terms() if terms is None else terms
    stack = _stack(row, terms.of_stack(_facts(stack_name(row)), without))
    mesh = Mesh(pp=_whole(row, "pp"), dp=_whole(row, "dp"), tp=_whole(row, "tp"))
    cluster, model = _cluster(row), _model(row, stack)
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
    """The row with what its source leaves out and its framework decides.

    Megatron's release tests have the vocabulary of their default tokenizer. BigScience's V100 runs
    shard optimizer states wherever there is data parallelism (tr3m-1B3-emb-norm-pile.slurm says so
    of some, of others it is assumed). vTrain divides 50,257 by tp without padding
    (src/model/gpt_model.py of the repository); and the head of its single-node rows takes 2.3 times
    as long at tp 1, where the share is odd, as the same head on two ranks says.
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
    """The stack as the row's notes specify it: `attention=flash1` names the kernel that ran, a
    fused cross entropy its bytes.
    """
    if (
        re.search(r"fused cross entropy|cross-entropy fusion on", row["notes"])
        or "cross_entropy_loss_fusion" in row["id"]
    ):
        stack = replace(stack, logit_bytes=FUSED_LOSS_LOGIT_BYTES)
    if NO_OVERLAP.search(row["notes"]):
        stack = replace(stack, overlap_tensor_parallel=False, overlap_transfers=False)
    if "asyncTP" in row["id"]:
        stack = replace(stack, overlap_tensor_parallel=True)
    if re.search(
        r"attention-backend unfused|TE impl local", row["notes"]
    ) or RELEASE_TEST_UNFUSED.search(row["id"]):
        return replace(stack, attention=AttentionKernel.UNFUSED)
    noted = re.search(r"\battention=(\w+)", row["notes"])
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
    gated, heads, hidden = _true(row, "gated_ffn"), _whole(row, "heads"), _whole(row, "hidden")
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
    """Whether the head shares the embedding's table: as the notes say, else as GPTs do and gated
    models do not.
    """
    if "untied" in row["notes"]:
        return False
    return "tied embeddings" in row["notes"] or (
        not gated and "Megatron-LM CI" not in row["framework"]
    )


def _blocks(row: Row, model: ModelSpec, mesh: Mesh) -> tuple[int, ...] | None:
    """Blocks of each pipeline rank where the framework does not divide them evenly."""
    if "nanotron" in row["framework"] and mesh.pp > 1:
        return blocks_by_compute(model, mesh)
    if "method redis" not in row["framework"]:
        return None
    if model.vocab_size not in LAST_STAGE_OF_REDIS:
        raise UnpricedError("layers moved between stages, how many is not stated")
    last = LAST_STAGE_OF_REDIS[model.vocab_size]
    others, more = divmod(model.num_layers - last, mesh.pp - 1)
    return (*(others + (rank >= mesh.pp - 1 - more) for rank in range(mesh.pp - 1)), last)


def _cluster(row: Row) -> Cluster:
    name = _device(row["gpu"])
    if name is None:
        raise UnpricedError(f"no device profile for {row['gpu'] or 'an unnamed GPU'}")
    cluster = _packaged_cluster(name)
    gpus, per_node = _whole(row, "n_gpus"), _whole(row, "gpus_per_node", cluster.gpus_per_node)
    cluster = with_gpus(cluster, gpus, min(gpus, per_node))
    network = re.search(r"(\d+)x ?(\d+) ?Gb", row["interconnect"]) or re.search(
        r"()(\d+) Gb/s (?:IB )?per node", row["interconnect"]
    )
    if network:
        nics = max(1, int(network[1] or 1))
        if not int(network[2]):
            raise UnpricedError("interconnect is 0 Gb/s")
        cluster = replace(
            cluster,
            nics_per_node=nics,
            nic=replace(cluster.nic, bytes_per_s=int(network[2]) * 1e9 / 8),
        )
    kind = next(
        (ours for theirs, ours in NETWORKS.items() if theirs in row["interconnect"].lower()), None
    )
    return replace(cluster, nic=replace(cluster.nic, name=kind)) if kind else cluster


def _device(gpu: str) -> str | None:
    """The cluster file of a gpu cell, never that of a device whose name only begins alike: an L40S
    is no L4.
    """
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
    overlap = (
        stack.overlap_grad_reduce and "Megatron-LM" not in row["framework"]
    )  # a flag there, off by default
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
    """What gradients are held in: fp32 under bf16 weights, but for InternEvo, and the weights' own
    under fp16.
    """
    return (
        Precision.FP32
        if precision is Precision.BF16 and "InternEvo" not in row["framework"]
        else precision
    )


def _micro_batches(row: Row, mesh: Mesh) -> tuple[int, ...]:
    if row["micro_batch"]:
        return (_whole(row, "micro_batch"),)
    per_rank = _whole(row, "global_batch") // mesh.dp
    return tuple(
        size for size in OPEN_MICRO_BATCHES if size <= per_rank and per_rank % size == 0
    ) or (1,)


def _virtual_stages(row: Row, mesh: Mesh, stack: Stack) -> tuple[int, ...]:
    """Open only where the framework interleaves and nothing else of the pipeline is stated."""
    if row["vpp"] or mesh.pp == 1 or row["micro_batch"] or stack.name not in INTERLEAVING_STACKS:
        return (max(1, _whole(row, "vpp", 1)),)  # some write 0 for no interleaving
    per_rank = _whole(row, "layers") // mesh.pp
    return tuple(count for count in range(1, per_rank + 1) if per_rank % count == 0)


def _recompute(row: Row, stack: Stack) -> tuple[tuple[Recompute, ...], ...]:
    if not row["recompute"]:
        return tuple((level,) for level in Recompute)
    cell = (
        SELECTIVE_OF.get(stack.name, row["recompute"])
        if row["recompute"] == Recompute.SELECTIVE
        else row["recompute"]
    )
    if cell not in RECOMPUTE:
        raise UnpricedError(f"recompute {cell!r}")
    return (RECOMPUTE[cell],)


def _true(row: Row, name: str) -> bool:
    """Whether a cell says true; an empty one does not. Raises UnpricedError."""
    if row[name].lower() not in ("", "true", "false"):
        raise UnpricedError(f"{name} is neither true nor false")
    return row[name].lower() == "true"


def _whole(row: Row, name: str, default: int | None = None) -> int:
    """The whole number in a cell, or the default of an empty one. Raises UnpricedError."""
    if not row.get(name) and default is not None:
        return default
    try:
        return int(row[name])
    except ValueError:
        raise UnpricedError(f"{name} is no whole number") from None
