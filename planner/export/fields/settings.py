"""The settings of a training run that launchers can say: one choice for all blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from parplan.costmodels.communication.mesh import Mesh, MeshOrder
from parplan.costmodels.host.offload import Offload
from parplan.costmodels.layers.context_parallel import ranks_with_heads
from parplan.costmodels.layers.recompute import Recompute
from parplan.costmodels.schedules.schedule import Schedule
from parplan.costmodels.strategy import ParallelLayout
from parplan.planner.export.fields.arguments import Facts
from parplan.planner.plan.derived import blocks_of, layout_of
from parplan.planner.plan.plan import LayerPlan, Plan
from parplan.planner.validation.frameworks import FUSED_LOSS_LOGIT_BYTES
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.spec import ModelSpec, Optimizer, Precision, TrainingSpec
from parplan.profiles.product_formats import ProductFormat
from parplan.profiles.stack import AttentionKernel, ContextForm
from parplan.profiles.state_precision import StatePrecision


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The facts that a launcher is told of a run, the same for all blocks.

    near               context-parallel ranks of the inner group, of the two-level form alone
    blocks             blocks of each virtual stage in the order of the model
    recompute          recompute level of blocks
    recompute_modules  modules that run again at the selective level, as Megatron-Core names them;
                       None: the operators that the planner calls selective
    offload_modules    modules of every block whose inputs the host keeps, as Megatron-Core names
                       them
    recompute_blocks   the first blocks of each virtual stage that recompute; None for all of them
    zero_of_blocks     ZeRO stage of each block of the model, None where all have `zero`
    zero_of_ends       ZeRO stage of the embedding and the head, None where they have `zero`
    recompute_of_blocks  recompute level of each block, None where all have `recompute`
    full_in_turn       every second block of those that recompute selectively recomputes all, which
                       is about what torchtitan's selective recompute costs (planner/validation/
                       frameworks.py)
    states_on_host     the host holds parameters, gradients and optimizer states of all layers
    overlap            gradients are reduced, and parameters gathered, under compute
    tp_overlap         products hide the collectives of sequence parallelism
    tokens_once        a token goes once to a node that has several of its experts
    overlap_exchanges  exchanges of tokens hide under the products of another micro-batch
    fused_loss         one kernel computes the loss, and holds fp32 logits beside their gradient
    narrow_weights     parameters are gathered in the format of narrow products
    bucket_elements    gradients that are reduced at a time; None for the stack's own number
    num_layers         blocks of the model, and whether any has experts
    pools              pool of each pipeline rank on an unequal cluster, which no launcher is told:
                       it follows from the order of the nodes
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    order: MeshOrder = MeshOrder.PP_DP_TP
    context_form: ContextForm | None = None
    near: int | None = None
    sequence_parallel: bool = False
    schedule: Schedule = Schedule.ONE_F_ONE_B
    virtual_stages: int = 1
    blocks: tuple[int, ...] = ()
    micro_batch_size: int = 1
    global_batch_size: int = 1
    seq_length: int = 1
    zero: int = 0
    zero_ranks: int | None = None
    recompute: Recompute = Recompute.NONE
    recompute_modules: tuple[str, ...] | None = None
    offload_modules: tuple[str, ...] = ()
    recompute_blocks: int | None = None
    zero_of_blocks: tuple[int, ...] | None = None
    zero_of_ends: int | None = None
    recompute_of_blocks: tuple[Recompute, ...] | None = None
    full_in_turn: bool = False
    states_on_host: bool = False
    precision: Precision = Precision.FP32
    gradient_precision: Precision = Precision.FP32
    products: ProductFormat | None = None
    state_precision: StatePrecision = StatePrecision.FP32
    optimizer: Optimizer = Optimizer.ADAM
    attention: AttentionKernel = AttentionKernel.FLASH
    expert_capacity: float = 0.0
    overlap: bool = False
    tp_overlap: bool = False
    tokens_once: bool = False
    overlap_exchanges: bool = False
    fused_loss: bool = False
    narrow_weights: bool = False
    bucket_elements: int | None = None
    num_layers: int = 1
    has_experts: bool = False
    mtp_layers: int = 0
    pools: tuple[str, ...] = ()

    @property
    def replicas(self) -> int:
        """The ranks of a stage that hold the same part of dense parameters."""
        return self.dp * self.cp

    @property
    def num_micro_batches(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.dp)

    @property
    def num_stages(self) -> int:
        return self.pp * self.virtual_stages

    @property
    def accumulates(self) -> int:
        """Micro-batches that run one after the other without a pipeline; 1 with one."""
        return 1 if self.pp > 1 else self.num_micro_batches

    @property
    def local_batch_size(self) -> int:
        """Sequences of a data-parallel rank that one pass through the pipeline takes."""
        return self.micro_batch_size * self.num_micro_batches // self.accumulates

    @property
    def shorter_ends(self) -> tuple[int, int] | None:
        """1 for the first and the last stage if it has a block less; None for other stages."""
        most = max(self.blocks)
        first, last = most - self.blocks[0], most - self.blocks[-1]
        even = all(count == most for count in self.blocks[1:-1]) and max(first, last) <= 1
        return (first, last) if even else None

    @property
    def layout(self) -> ParallelLayout:
        """The mesh, the schedule and the micro-batches. Raises ConfigError for illegal degrees."""
        short = self.num_micro_batches < self.pp and self.schedule is Schedule.ONE_F_ONE_B
        return ParallelLayout(
            mesh=Mesh(
                pp=self.pp,
                dp=self.dp,
                cp=self.cp,
                tp=self.tp,
                ep=self.ep,
                etp=self.etp,
                order=self.order,
                context_form=self.context_form,
            ),
            # 1F1B runs in the order of GPipe when the pipeline never fills
            schedule=Schedule.GPIPE if short else self.schedule,
            virtual_stages=self.virtual_stages,
            micro_batch_size=self.micro_batch_size,
            num_micro_batches=self.num_micro_batches,
            sequence_parallel=self.sequence_parallel,
            pools=self.pools,
        )


def settings_of(plan: Plan) -> Settings:
    """Returns the settings of a plan, those of most blocks where the blocks differ."""
    block = _usual_block(plan)
    return Settings(
        blocks=stage_blocks(plan),
        zero=block.zero,
        zero_ranks=block.zero_ranks if block.highest_zero else None,  # else it says nothing
        states_on_host=Offload.STATES in block.offload,
        **layout_facts(layout_of(plan), plan.model, plan.cluster),
        **model_facts(plan.model),
        **training_facts(plan.training),
    )


def layout_facts(layout: ParallelLayout, model: ModelSpec, cluster: Cluster) -> Facts:
    """Returns the fields of `Settings` that a layout decides."""
    mesh = layout.mesh
    near = ranks_with_heads(
        mesh.context_form, mesh.cp, mesh.tp, model.num_heads, cluster.gpus_per_node
    )
    short = layout.schedule is Schedule.GPIPE and layout.num_micro_batches < mesh.pp
    axes = ("pp", "dp", "cp", "tp", "ep", "etp", "order", "context_form")
    return {name: getattr(mesh, name) for name in axes} | {
        "near": near if mesh.context_form is ContextForm.TWO_LEVEL else None,
        "sequence_parallel": layout.sequence_parallel,
        "schedule": Schedule.ONE_F_ONE_B if short else layout.schedule,
        "virtual_stages": layout.virtual_stages,
        "micro_batch_size": layout.micro_batch_size,
        "pools": layout.pools,
    }


def model_facts(model: ModelSpec) -> Facts:
    """Returns the fields of `Settings` that a model decides."""
    return {
        "num_layers": model.num_layers,
        "has_experts": model.num_experts > 0,
        "mtp_layers": model.mtp_layers,
    }


def training_facts(training: TrainingSpec) -> Facts:
    """Returns the fields of `Settings` that a training decides."""
    stack = training.stack
    return {
        "global_batch_size": training.global_batch_size,
        "seq_length": training.seq_length,
        "precision": training.precision,
        "gradient_precision": training.gradient_precision,
        "products": training.products,
        "state_precision": stack.states or StatePrecision.FP32,
        "optimizer": training.optimizer,
        "attention": training.attention,
        "expert_capacity": training.expert_capacity,
        "overlap": training.overlap_grad_reduce,
        "tp_overlap": stack.overlap_tensor_parallel,
        "tokens_once": stack.sends_tokens_once,
        "overlap_exchanges": stack.overlap_exchanges,
        "fused_loss": stack.logit_bytes == FUSED_LOSS_LOGIT_BYTES,
        "narrow_weights": training.narrow_weights,
    }


def with_training(training: TrainingSpec, settings: Settings) -> TrainingSpec:
    """Returns a training with what the settings say of it."""
    stack = training.stack.keeping(settings.state_precision)
    if settings.fused_loss:
        stack = replace(stack, logit_bytes=FUSED_LOSS_LOGIT_BYTES)
    if settings.bucket_elements is not None:
        stack = replace(stack, bucket_elements=settings.bucket_elements)
    return replace(
        training,
        global_batch_size=settings.global_batch_size,
        seq_length=settings.seq_length,
        precision=settings.precision,
        gradient_precision=settings.gradient_precision,
        products=settings.products,
        optimizer=settings.optimizer,
        attention=settings.attention,
        expert_capacity=settings.expert_capacity,
        overlap_grad_reduce=settings.overlap,
        narrow_weights=settings.narrow_weights,
        stack=replace(
            stack,
            overlap_tensor_parallel=settings.tp_overlap,
            sends_tokens_once=settings.tokens_once,
            overlap_exchanges=settings.overlap_exchanges,
        ),
    )


def stage_blocks(plan: Plan) -> tuple[int, ...]:
    """Returns the blocks of each virtual stage of a plan, in the order of the model."""
    return tuple(sum(len(blocks_of(plan, run)) for run in stage.layers) for stage in plan.stages)


def _usual_block(plan: Plan) -> LayerPlan:
    """Returns the layer plan that most blocks have."""
    counts = Counter[str]()
    for stage in plan.stages:
        for run in stage.layers:
            if plan.layer_plans[run.plan].layer is LayerKind.BLOCK:
                counts[run.plan] += len(run.indices)
    return plan.layer_plans[counts.most_common(1)[0][0]]
