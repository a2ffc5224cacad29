"""A log's steps beside the plan of its run become a row of a table of measured steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parplan.costmodels.layers.recompute import Recompute
from parplan.planner.export.exported import as_priced, is_same_recompute
from parplan.planner.export.fields.settings import Settings, settings_of
from parplan.planner.export.megatron.megatron_layouts import layout_word
from parplan.planner.export.targets import TARGETS
from parplan.planner.logs.logged_run import LoggedRun
from parplan.planner.plan.plan import Plan
from parplan.planner.validation.frameworks import STACK_OF_LOG
from parplan.planner.validation.priced_rows import PricedRow
from parplan.planner.validation.row_cells import NEEDED, OPTIONAL, Row
from parplan.planner.validation.step_table import price_table
from parplan.profiles.documents.texts import name_of_file
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import ModelSpec, Optimizer
from parplan.profiles.product_formats import ProductFormat
from parplan.profiles.stack import AttentionKernel, ContextForm
from parplan.profiles.state_precision import StatePrecision
from parplan.profiles.units import gib

COLUMNS = (*dict.fromkeys(("id", "source", "framework", *NEEDED, *OPTIONAL)),)
SOURCE = "log"  # the start of an id, by which plan validate names the source
_DTYPES = {
    ProductFormat.FP8_DELAYED: "fp8",
    ProductFormat.FP8_CURRENT: "fp8-cs",
    ProductFormat.FP8_ROWWISE: "bf16+float8 rowwise",
    ProductFormat.FP8_BLOCK: "fp8-block",
    ProductFormat.MXFP8: "mxfp8",
    ProductFormat.NVFP4: "nvfp4",
}
_FORMS = {
    ContextForm.ALL_TO_ALL: "CP=all-to-all",
    ContextForm.TWO_LEVEL: "a2a_p2p",
    ContextForm.ALL_GATHER: "CP=all-gather",
}
_OPTIMIZERS = {Optimizer.ADAM_8BIT: "8-bit Adam", Optimizer.MUON: "muon"}
_BITS_A_GBIT = 8 / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """A log beside the plan of its run.

    row       the row of a steps table
    step_s    the median step, with the steps that a tenth are below and above
    priced    the row as `plan validate` prices it
    """

    run: LoggedRun
    plan: Plan
    row: Row
    step_s: float
    spread_s: tuple[float, float]
    priced: PricedRow


def measured_steps(run: LoggedRun, plan: Plan) -> MeasuredSteps:
    """Returns the row of a log that ran as a plan says.

    Raises ConfigError where the log is of another batch, or its run cannot be.
    """
    batch = plan.training.global_batch_size
    if run.batch is not None and run.batch != batch:
        raise ConfigError(
            f"{run.path}: its steps have {run.batch} sequences, the configuration {batch}",
            hint=f"say --global-batch-size {run.batch}, or give the configuration of this run",
        )
    step_s = step_seconds(run.middle, run, plan)
    ends = sorted(step_seconds(value, run, plan) for value in run.spread)
    spread_s = ends[0], ends[1]
    row = dict.fromkeys(COLUMNS, "") | _cells(run, plan, step_s, spread_s)
    (priced,) = price_table([row])
    return MeasuredSteps(
        run=run, plan=plan, row=row, step_s=step_s, spread_s=spread_s, priced=priced
    )


def step_seconds(value: float, run: LoggedRun, plan: Plan) -> float:
    """Returns the seconds of a step of a value that the log prints."""
    sequences = plan.training.global_batch_size
    match run.quantity:
        case "ms":
            return value / 1000
        case "s" | "s_per_it":
            return value
        case "it_per_s":
            return 1 / value
        case "samples_per_s":
            return sequences / value
    assert run.quantity == "tokens_per_s", "the formats have no other quantity"
    return sequences * plan.training.seq_length / (plan.cluster.num_gpus * value)


def _cells(
    run: LoggedRun, plan: Plan, step_s: float, spread_s: tuple[float, float]
) -> dict[str, str]:
    settings = _settings(plan)
    tokens = settings.global_batch_size * settings.seq_length
    cells: dict[str, object] = {
        "id": f"{SOURCE}-{name_of_file(run.path)}",
        "source": f"{run.path.name}, in the format of {run.format.source}",
        "framework": f"{run.format.framework} {STACK_OF_LOG.format(plan.training.stack.name)}",
        "step_time_s": f"{step_s:.6g}",
        "tokens_per_s_per_gpu": f"{tokens / plan.cluster.num_gpus / step_s:.6g}",
        "notes": "; ".join(_notes(run, settings, plan, spread_s)),
        **_machine(plan),
        **_memory(run),
        **_shape(plan.model),
        **_layout(settings),
        **_software(settings),
    }
    return {name: _text(value) for name, value in cells.items()}


def _settings(plan: Plan) -> Settings:
    """Returns the settings of a plan, with the recompute of a launcher that is that of its blocks.

    A plan whose recompute no launcher has keeps that of no block, at which the row is not priced.
    """
    own, usual = as_priced(plan), settings_of(plan)
    most = max(usual.blocks)
    choices = (each for target in TARGETS.values() for each in target.recomputes(plan.model, most))
    same = (each for each in choices if is_same_recompute(own, replace(usual, **each)))
    return replace(usual, **next(same, {"recompute_blocks": 0, "recompute": Recompute.FULL}))


def _text(value: object) -> str:
    if isinstance(value, bool):
        return f"{value}".lower()
    return "" if value is None else f"{value}"


def _machine(plan: Plan) -> dict[str, object]:
    cluster = plan.cluster
    gbit = round(cluster.nic.bytes_per_s * _BITS_A_GBIT)
    return {
        "gpu": cluster.device.name,
        "n_gpus": cluster.num_gpus,
        "gpus_per_node": cluster.gpus_per_node,
        "interconnect": f"{cluster.nics_per_node}x{gbit}Gb/s {cluster.nic.name}",
    }


def _memory(run: LoggedRun) -> dict[str, object]:
    """Returns the cells of memory: what the allocator took, else its tensors."""
    size = run.reserved_bytes or run.allocated_bytes
    if size is None:
        return {}
    kind = "torch max reserved" if run.reserved_bytes else "torch max allocated"
    return {"peak_memory_gib": f"{gib(size):.4g}", "memory_kind": f"{kind}, ranks that print it"}


def _shape(model: ModelSpec) -> dict[str, object]:
    latent, shared = model.latent, model.shared_experts
    dense = model.blocks[0].num_blocks if model.blocks and not model.blocks[0].experts else None
    cells: dict[str, object] = {
        "model": model.name,
        "layers": model.num_layers,
        "hidden": model.hidden_size,
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "ffn_hidden": model.ffn_hidden_size or model.expert_ffn_hidden_size,
        "gated_ffn": model.gated_ffn,
        "vocab": model.vocab_size,
        "vocab_multiple": model.vocab_multiple,
        "positions": model.positions.value,
        "qk_norm": model.qk_norm.value,
        "tied": model.tied_embeddings,
        "mtp_layers": model.mtp_layers or None,
    }
    if latent is not None:
        widths = latent.nope_head_dim, latent.rope_head_dim, latent.value_head_dim
        cells["latent"] = " ".join(map(str, (latent.q_rank, latent.kv_rank, *widths)))
    if model.num_experts:
        cells |= {
            "experts": model.num_experts,
            "top_k": model.experts_per_token,
            "moe_ffn_hidden": model.expert_ffn_hidden_size,
            "shared_ffn_hidden": shared.ffn_hidden_size if shared else None,
            "dense_layers": dense,
        }
    return cells


def _layout(settings: Settings) -> dict[str, object]:
    unequal = len(set(settings.blocks)) > 1
    return {
        "seq_len": settings.seq_length,
        "global_batch": settings.global_batch_size,
        "micro_batch": settings.micro_batch_size,
        "dp": settings.dp,
        "tp": settings.tp,
        "pp": settings.pp,
        "cp": settings.cp,
        "ep": settings.ep,
        "vpp": settings.virtual_stages,
        "sequence_parallel": settings.sequence_parallel,
        "zero_stage": settings.zero,
        "pipeline_layout": layout_word(settings.blocks, settings.mtp_layers) if unequal else None,
    }


def _software(settings: Settings) -> dict[str, object]:
    dtype = _DTYPES[settings.products] if settings.products else settings.precision.value
    states = settings.state_precision
    return {
        "dtype": f"{dtype} (pure)" if states is StatePrecision.BF16 else dtype,
        "moments": "bf16" if states is StatePrecision.BF16_MOMENTS else None,
        "recompute": _recompute(settings),
    }


def _recompute(settings: Settings) -> str:
    level, modules = settings.recompute, settings.recompute_modules
    if level is Recompute.SELECTIVE and modules is not None:
        return f"selective {'+'.join(modules)}"
    if level is Recompute.FULL and settings.recompute_blocks is not None:
        count = settings.recompute_blocks
        return f"full of {count} blocks a stage" if count else "unlike in its blocks"
    return level.value


def _notes(
    run: LoggedRun, settings: Settings, plan: Plan, spread_s: tuple[float, float]
) -> list[str]:
    """Returns the notes of a row, of which some are settings that no column has."""
    notes = [
        f"median of {len(run.values)} steps, 80 % from {spread_s[0]:.4g} to {spread_s[1]:.4g} s"
    ]
    if run.parts > 1:
        notes.append(f"{run.parts} starts")
    if run.reserved_bytes and run.allocated_bytes:
        notes.append(f"{gib(run.allocated_bytes):.4g} GiB allocated")
    if settings.overlap != plan.training.stack.overlap_grad_reduce or settings.overlap:
        notes.append("overlap=grad" if settings.overlap else "overlap=none")
    if settings.cp > 1 and settings.context_form in _FORMS:
        notes.append(_FORMS[settings.context_form])
    if settings.has_experts:
        notes.append(f"etp{settings.etp}")
    if settings.fused_loss:
        notes.append("cross-entropy fusion on")
    if settings.attention is AttentionKernel.UNFUSED:
        notes.append("attention=unfused")
    if settings.optimizer in _OPTIMIZERS:
        notes.append(_OPTIMIZERS[settings.optimizer])
    return notes
