"""Reads a row of a steps table as a configuration: model, cluster, training, layout, open choices.

The columns are those of docs/accuracy.md. Settings that a framework implies come from the
framework's name (frameworks.py), shapes that a row leaves out from the published model that it
names (published_models.py), and settings that stand in another public file from that
(completion.py). Settings that nothing states (a micro-batch, a recompute level, virtual stages)
stay open, and priced_rows.py takes the fastest choice that fits, since published runs were tuned.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.stage_columns.block_counts import shorter_ends
from parplan.planner.validation.frameworks import (
    CONTEXT_FORMS,
    FOLDS,
    LAYOUT_STACKS,
    REFUSED,
)
from parplan.planner.validation.published_models import with_published_shape
from parplan.planner.validation.row_cells import (
    NEEDED,
    Row,
    UnpricedError,
    is_true,
    source_of,
    whole,
)
from parplan.planner.validation.row_cluster import cluster_of
from parplan.planner.validation.row_completion import completed
from parplan.planner.validation.row_model import (
    divides_vocabulary,
    in_flight_share,
    model_of,
    stages_of,
)
from parplan.planner.validation.row_stack import (
    NO_MODULES,
    Modules,
    described_stack,
    micro_batches_of,
    modules_of,
    on_device,
    precision_of,
    recompute_of,
    stack_facts,
    stack_name,
    stack_of,
    training_of,
    virtual_stages_of,
)
from parplan.planner.validation.uneven_divisions import with_longer_first_stages
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.stack_terms import Terms, shipped_terms
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.stack import ContextForm

_LATENT = re.compile(r"^gpt/\S*_mla|transformer_engine; (?:.*; )?MLA")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The configuration of a run.

    micro_batches, virtual_stages and recompute hold one choice if the row states it, else all
    sensible choices.

    recompute  choices, each with the levels that blocks take in turn
    modules    modules of the blocks that are recomputed or offloaded by name
    stages     blocks of each virtual stage, None when they are divided evenly
    in_flight  activations of a rank over those of its schedule
    every_end  every rank has its part of the token table and of the head
    taken      where settings that the row leaves out were taken from
    differing  cells of the row that contradict the published shape of its model
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
    modules: Modules = NO_MODULES
    stages: tuple[int, ...] | None = None
    in_flight: float = 1.0
    every_end: bool = False
    taken: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()

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

    def stages_of(self, layout: ParallelLayout) -> tuple[int, ...] | None:
        """Returns the blocks of each virtual stage of a layout, None where they are equal.

        Raises UnpricedError for another number of stages than the row states.
        """
        count, stages = layout.num_virtual_stages, self.stages
        if stages is None:
            equal = (
                not layout.equal_ranks or shorter_ends(layout, self.model.num_layers) is not None
            )
            if equal or self.training.stack.name not in LAYOUT_STACKS:
                return None
            stages = with_longer_first_stages(self.model.num_layers, count)
        if len(stages) != count or sum(stages) != self.model.num_layers:
            raise UnpricedError(
                f"{len(stages)} stages of {sum(stages)} layers are stated, not {count} of "
                f"{self.model.num_layers}"
            )
        return stages

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


def configuration_of(
    row: Row, terms: Terms | None = None, *, without: str | None = None
) -> Configuration:
    """Returns the configuration that the row states, under `terms` or the shipped terms.

    Raises UnpricedError for a row that cannot be priced, and ConfigError.
    """
    _refuse(row)
    row, taken = completed(row)
    cluster = cluster_of(row)
    precision_of(row)  # a row of an unknown precision says that first
    shape = with_published_shape(row)
    row = shape.row
    missing = [name for name in (*NEEDED, "vocab") if not row.get(name)]
    if missing:
        raise UnpricedError(f"{missing[0]} is not stated")
    terms = shipped_terms() if terms is None else terms
    stack = stack_of(row, terms.of_stack(stack_facts(stack_name(row)), without))
    stack = on_device(row, stack, cluster.device)
    mesh = _mesh(row)
    model = model_of(row, stack, shape.model)
    _require_ranks(row, model)
    if mesh.num_ranks != cluster.num_gpus:
        raise UnpricedError("dp x cp x tp x pp is not the number of GPUs")
    return Configuration(
        model=model,
        cluster=cluster,
        stages=stages_of(row, model, mesh),
        training=training_of(row, stack),
        mesh=mesh,
        sequence_parallel=_sequence_parallel(row, model, mesh),
        zero=whole(row, "zero_stage", 0),
        micro_batches=micro_batches_of(row, mesh),
        virtual_stages=virtual_stages_of(row, mesh, stack),
        recompute=recompute_of(row, stack),
        modules=modules_of(row),
        in_flight=in_flight_share(row),
        every_end=divides_vocabulary(row),
        known_framework=described_stack(row) is not None,
        taken=(*taken, *shape.taken),
        differing=shape.differing,
    )


def _refuse(row: Row) -> None:
    for column, pattern, reason in REFUSED:
        match = re.search(pattern, row[column], re.IGNORECASE)
        if match:
            raise UnpricedError(reason.format(*match.groups()))


def _require_ranks(row: Row, model: ModelSpec) -> None:
    """Raises UnpricedError for latent attention whose ranks neither row nor recipe states."""
    if _LATENT.search(f"{row['model']} {row['notes']}") and model.latent is None:
        raise UnpricedError("latent attention of ranks that are not stated")


def _mesh(row: Row) -> Mesh:
    """Returns the mesh of the row; `dp` excludes `cp`, experts lie over dp x cp x tp."""
    experts = whole(row, "experts", 1) > 1
    etp = expert_tensor_parallel(row) if experts else 1
    cp = max(1, whole(row, "cp", 1))
    return Mesh(
        pp=whole(row, "pp"),
        dp=whole(row, "dp"),
        cp=cp,
        tp=whole(row, "tp"),
        ep=max(1, whole(row, "ep", 1)) if experts else 1,
        etp=etp,
        context_form=_context_form(row) if cp > 1 else None,
    )


def _context_form(row: Row) -> ContextForm:
    """Returns the form that the row states, else the ring, which Megatron-LM runs by default.

    The default is cp_comm_type p2p of megatron/training/arguments.py.
    """
    stated = f"{row['id']} {row['notes']}"
    return next(
        (form for pattern, form in CONTEXT_FORMS if re.search(pattern, stated)), ContextForm.RING
    )


def expert_tensor_parallel(row: Row) -> int:
    """Returns the tensor parallel degree of a row's experts.

    A test or a card states it as `etp1` or `ETP1`. Megatron-LM takes the tensor parallel degree by
    default (expert_tensor_parallel_size, megatron/training/arguments.py), every recipe of NeMo and
    Megatron-Bridge sets 1.
    """
    stated = re.search(r"etp(\d+)", f"{row['id']} {row['notes']}", re.IGNORECASE)
    if stated:
        return int(stated[1])
    return whole(row, "tp") if row["framework"].startswith("Megatron-LM") else 1


def _sequence_parallel(row: Row, model: ModelSpec, mesh: Mesh) -> bool:
    """True for a row that says so, and for experts under tensor parallelism.

    Megatron refuses to train experts with tensor parallelism and without sequence parallelism.
    """
    return mesh.tp > 1 and (is_true(row, "sequence_parallel") or model.num_experts > 0)
