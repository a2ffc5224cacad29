"""Parity of plans with one process.

Plans run in a forked world of gloo ranks, and the same model runs in one process without
parallelism; losses and gradients are compared.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from parplan.costmodels.communication.mesh import Mesh
from parplan.costmodels.layers.model_states import StateBytes
from parplan.executor.data.batches import NO_TOKEN, synthetic_batches
from parplan.executor.data.document_places import build_places
from parplan.executor.data.seen_images import (
    IMAGE_PLACES,
    PIXELS,
    build_images,
    num_targets,
    of_text,
)
from parplan.executor.models.attention_modules import document_lengths
from parplan.executor.models.eight_bits import round_to_8_bits
from parplan.executor.models.loss import FURTHER_WEIGHT, TOKEN_DIMS
from parplan.executor.models.transformer_layers import (
    AttendedNorm,
    AttendingBlock,
    Patches,
    Projector,
    build_layer,
)
from parplan.executor.pipeline.passage import layer_name
from parplan.executor.pools.joined_ranks import JoinedRanks, PoolPlace, join_pool
from parplan.executor.run_options import Options
from parplan.executor.tensors import begin_fork, forget_meshes
from parplan.executor.training.optimizer import (
    build_optimizer,
    decays,
    layout_of,
    moment_type,
)
from parplan.executor.training.train import Trainer, build_trainer
from parplan.planner.plan.plan import Plan
from parplan.planner.runs.relative_error import relative_error
from parplan.planner.runs.run_file import ChunkMoved, PredictedAndMeasured
from parplan.profiles.documents.files import open_replacement
from parplan.profiles.errors import PlannerError
from parplan.profiles.interrupts import leave_signals_to_parent
from parplan.profiles.models.operator_graph import LayerKind, layer_kind
from parplan.profiles.models.spec import ModelSpec, Optimizer, TrainingSpec

# Tolerances of `plan check --execute` in fp32: of first-step gradients as `gradient_error` measures
# them, and relative ones of losses.
GRADIENT_TOLERANCE = 1e-5
LOSS_TOLERANCE = 1e-6
# A gradient that differs in its last bit may get another 8-bit code, or another bf16 number in
# Muon's products. Losses of three steps were within 6e-6.
ROUNDED_LOSS_TOLERANCE = 5e-5
ROUNDED = (Optimizer.ADAM_8BIT, Optimizer.MUON)
SMALLEST = 1e-4  # least scale of a gradient's error: some gradients are exactly zero

STEPS = 3
# A value that is not finite must not end the run: it is compared.
OPTIONS = Options(steps=STEPS, seed=7, learning_rate=1e-2, allow_non_finite=True)
TIMEOUT = timedelta(seconds=60)
_NO_ROOM = "make room in the folder of temporary files"

T = TypeVar("T", bound=Trainer)
Result = tuple[
    list[tuple[float, float]],
    dict[str, Tensor],
    tuple[Any, StateBytes, StateBytes],
    "Counter[str]",
    dict[int, int],
    ChunkMoved | None,
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOutcome:
    """The outcome of a short training run.

    losses       mean loss of each step
    norms        gradient norm of each step before clipping
    gradients    first-step gradients by parameter name
    states       predicted and measured bytes by rank
    collectives  rank 0's collectives in the first step by kind, without DTensor's for the embedding
    agree        True if all ranks have equal losses, and equal gradients of parameters they share
    in_flight    by pipeline stage, the most micro-batches that any rank held at once
    moved        transfers of chunks in the last step, by rank that has chunks
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    states: dict[tuple[int, int, int], tuple[StateBytes, StateBytes]]
    collectives: Counter[str]
    agree: bool = True
    in_flight: dict[int, int] = field(default_factory=dict)
    moved: dict[tuple[int, int, int], ChunkMoved] = field(default_factory=dict)


class CountCollectives(TorchDispatchMode):
    """Counts the calls of torch.distributed by operator name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name():
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def run_plans(plans: Sequence[Plan]) -> list[TrainingOutcome]:
    """Train the plans one after the other, in a new world of as many ranks as their mesh has.

    No process is left.
    """
    return [joined(results) for results in run_ranks(plans, _train)]


def run_pools(plans: Sequence[Plan]) -> list[TrainingOutcome]:
    """Train the plans of pools that divide the batch, as one job, and return each pool's outcome.

    Their losses agree. No process is left.
    """
    sizes = tuple(plan.mesh.num_ranks for plan in plans)
    (results,) = run_ranks([tuple(plans)], _train_pool, sizes=sizes)
    ends = list(itertools.accumulate(sizes, initial=0))
    outcomes = [joined(results[first:end]) for first, end in itertools.pairwise(ends)]
    first_pool = outcomes[0]
    return [
        replace(each, agree=each.agree and each.losses == first_pool.losses) for each in outcomes
    ]


def run_ranks(
    plans: Sequence[Any],
    train: Callable[..., Any],
    *types: type,
    sizes: tuple[int, ...] = (),
) -> list[list[Any]]:
    """Return by plan the result of `train` on every rank.

    Results are tensors, plain values, and objects of `types`. With the `sizes` of several pools a
    plan is that of all of them, and `train` gets the joined ranks too.
    """
    world = sum(sizes) or plans[0].mesh.num_ranks
    # A fork drops the process groups in torch's caches, which would wait for threads that no fork
    # has, so the caches are emptied first.
    forget_meshes()
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _rank,
            args=(world, list(plans), train, folder, sizes),
            nprocs=world,
            start_method="fork",
            join=False,
            daemon=True,
        )
        try:
            while not context.join():
                pass
        except (mp.ProcessExitedException, mp.ProcessRaisedException):
            for file in sorted(Path(folder).glob("error*.pt")):
                with torch.serialization.safe_globals([*_errors(PlannerError)]):
                    raise torch.load(file, weights_only=True) from None
            raise
        finally:
            for process in context.processes:
                process.terminate()
                process.join()
        with torch.serialization.safe_globals(
            [StateBytes, ChunkMoved, PredictedAndMeasured, *types]
        ):
            results = [
                torch.load(Path(folder) / f"rank{rank}.pt", weights_only=True)
                for rank in range(world)
            ]
    return [[result[i] for result in results] for i in range(len(plans))]


def _errors(error: type[PlannerError]) -> Iterator[type[PlannerError]]:
    """Yield an error class and all its subclasses."""
    yield error
    for each in error.__subclasses__():
        yield from _errors(each)


def _rank(
    rank: int,
    world: int,
    plans: list[Any],
    train: Callable[..., Any],
    folder: str,
    sizes: tuple[int, ...],
) -> None:
    begin_fork()
    leave_signals_to_parent()
    torch.set_num_threads(1)
    # torch warns that full_tensor() of a gradient sharded twice is slow.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    store = dist.FileStore(f"{folder}/store", world)
    if sizes:
        place = PoolPlace(sizes=sizes, rank=rank)
        pools = join_pool(place, store, torch.device("cpu"), TIMEOUT)
        train = partial(train, pools=pools)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        torch.save([train(plan) for plan in plans], f"{folder}/rank{rank}.pt")
    except PlannerError as error:
        without_traceback = type(error)(error.message, hint=error.hint)
        # whole or not there: others end this rank
        with open_replacement(Path(folder) / f"error{rank}.pt", hint=_NO_ROOM) as file:
            torch.save(without_traceback, file)
        sys.exit(1)
    dist.destroy_process_group()


def _train(plan: Plan) -> Result:
    return observed(build_trainer(plan, OPTIONS, torch.device("cpu")), whole_gradients)


def _train_pool(plans: Sequence[Plan], pools: JoinedRanks) -> Result:
    plan = plans[pools.place.pool]
    trainer = build_trainer(plan, OPTIONS, torch.device("cpu"), joined=pools)
    return observed(trainer, whole_gradients)


def observed(trainer: T, gradients_of: Callable[[T], dict[str, Tensor]]) -> Result:
    """Return the result of a rank.

    It has the collectives and gradients of the first step, and losses and norms of all steps.
    """
    with CountCollectives() as counted:
        loss = trainer.gradients(0)
    gradients = gradients_of(trainer)
    first = loss.item(), trainer.update(0).item()
    steps = [first, *((result.loss, result.gradient_norm) for result in trainer.run(first=1))]
    return (
        steps,
        gradients,
        trainer.state_bytes(),
        counted.calls,
        trainer.pipeline.in_flight,
        trainer.moved(),
    )


def whole_gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Return the gradients of this rank's trained parameters by name.

    Gradients are gathered over the data and tensor parallel ranks. A rank returns those gradients
    in chunks that it owns.
    """
    chunks = trainer.pipeline.chunks
    in_chunks = set(chunks.parameters) if chunks is not None else set()
    owned = chunks.gradients() if chunks is not None else {}
    outside = {
        name.replace(_CHECKPOINT_PREFIX, ""): parameter.grad
        for stage in trainer.pipeline.stages
        for name, parameter in stage.body.named_parameters(remove_duplicate=False)
        if parameter.requires_grad and parameter not in in_chunks
    }
    return {
        name: (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()
        for name, gradient in (outside | owned).items()
    }


def joined(results: list[Result]) -> TrainingOutcome:
    """Return the outcome of all ranks together."""
    gradients: dict[str, Tensor] = {}
    agree = all(steps == results[0][0] for steps, *_ in results)
    losses = [loss for loss, _ in results[0][0]]
    norms = [norm for _, norm in results[0][0]]
    in_flight: dict[int, int] = {}
    for _, rank_gradients, _, _, most_held, _ in results:
        for stage, most in most_held.items():
            in_flight[stage] = max(most, in_flight.get(stage, 0))
        for name, gradient in rank_gradients.items():
            agree = torch.equal(gradient, gradients.setdefault(name, gradient)) and agree
    states = {at: (predicted, measured) for _, _, (at, predicted, measured), *_ in results}
    moved = {result[2][0]: result[5] for result in results if result[5] is not None}
    return TrainingOutcome(
        losses=losses,
        norms=norms,
        gradients=gradients,
        states=states,
        collectives=results[0][3],
        agree=agree,
        in_flight=in_flight,
        moved=moved,
    )


def reference_layers(model: ModelSpec, training: TrainingSpec, seed: int) -> nn.ModuleDict:
    """Return the layers of the whole model, for one process.

    Frozen weights that a plan holds in 8 bits have those numbers in fp32.
    """
    num_blocks = model.num_blocks
    layers = nn.ModuleDict(
        {
            layer_name(index, num_blocks): build_layer(
                model, training, layer_kind(index, num_blocks), index, seed, torch.device("cpu")
            )
            for index in range(num_blocks + 2)
        }
    )
    if model.shares_table:
        layers["head"].table.weight = layers["embedding"].tokens.weight
    round_to_8_bits(layers)
    return layers


def forward(
    layers: nn.ModuleDict, ids: Tensor, *of_head: Tensor, images: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Return the logits of token ids; `of_head` are further inputs of the head."""
    x = embedded = states = ids
    for name, layer in layers.items():
        if isinstance(layer, Patches):
            assert images is not None, "a model with a tower reads images"
            embedded, x = x, layer(images[PIXELS])
        elif isinstance(layer, Projector):
            assert images is not None, "a model with a tower reads images"
            x = layer(x, embedded, images[IMAGE_PLACES])
        elif isinstance(layer, AttendedNorm):
            states, x = layer(x), embedded
        elif isinstance(layer, AttendingBlock):
            x = layer(x, states)
        else:
            x = layer(x, *(of_head if name == LayerKind.HEAD else ()))
    return x


def summed_loss(
    layers: nn.ModuleDict, ids: Tensor, targets: Tensor, images: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Return the loss summed over tokens, by torch's own cross entropy.

    Modules of multi-token prediction add the mean of theirs, of all tokens that there are.
    """
    if targets.ndim == TOKEN_DIMS:
        return _summed(forward(layers, ids, images=images), targets)
    pairs = zip(
        forward(layers, ids, targets, images=images).unbind(2), targets.unbind(2), strict=True
    )
    first, *further = (_summed(*pair) for pair in pairs)
    return first + FURTHER_WEIGHT * torch.stack(further).mean()


def _summed(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), reduction="sum", ignore_index=NO_TOKEN
    )


def packed_loss(layers: nn.ModuleDict, ids: Tensor, targets: Tensor, places: Tensor) -> Tensor:
    """Return the loss summed over tokens of packed sequences, each document by itself.

    places   those of the tokens in their documents
    """
    total = torch.zeros(())
    for row_ids, row_targets, row_places in zip(ids, targets, places, strict=True):
        (lengths,) = document_lengths(row_places[None])
        for each in zip(row_ids.split(lengths), row_targets.split(lengths), strict=True):
            total = total + summed_loss(layers, *(part[None] for part in each))
    return total


def reference_optimizer(
    layers: nn.Module,
    options: Options,
    optimizer: Optimizer = Optimizer.ADAM,
    moments: torch.dtype = torch.float32,
) -> torch.optim.Optimizer:
    """Return the optimizer of one process, without decay of vectors.

    AdamW runs in torch's plain loop, and its moments are rounded to their type after every step;
    other optimizers are those of a run, on whole tensors.
    """
    if optimizer is not Optimizer.ADAM:
        parameters = list(layers.parameters())
        return build_optimizer(parameters, options, optimizer, layout_of(layers), moments)
    groups = [
        {
            "params": [p for p in layers.parameters() if decays(p) is decay],
            "weight_decay": options.weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
    adam = torch.optim.AdamW(groups, lr=options.learning_rate, betas=options.betas, foreach=False)
    adam.register_step_post_hook(lambda *_: _round_moments(adam, moments))
    return adam


def _round_moments(adam: torch.optim.AdamW, moments: torch.dtype) -> None:
    for state in adam.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].copy_(state[name].to(moments))


def run_reference(plan: Plan) -> TrainingOutcome:
    """Run the same batches through plain modules in one process.

    A batch runs whole, with the sequences of all pools: there is no mesh, no micro-batch and no
    wrapper.
    """
    layers = reference_layers(plan.model, plan.training, OPTIONS.seed)
    optimizer = reference_optimizer(
        layers, OPTIONS, plan.training.optimizer, moment_type(plan.training)
    )
    sequences = plan.whole_batch.of
    whole = replace(
        plan.pipeline,
        micro_batch_size=sequences,
        num_micro_batches=1,
        micro_batches_of_replicas=(),
    )
    alone = replace(
        plan,
        mesh=Mesh(pp=1, dp=1, tp=1),
        pipeline=whole,
        training=replace(plan.training, global_batch_size=sequences),
        batch_share=None,
    )
    batches = of_text(synthetic_batches(alone, 0, OPTIONS.seed), alone, 0, OPTIONS.seed)
    places, images = build_places(alone, 0, OPTIONS), build_images(alone, 0, OPTIONS)
    losses, norms = [], []
    first = {}
    for step in range(STEPS):
        ids, targets = batches(step)
        if places is None:
            seen = None if images is None else images(step)
            loss = summed_loss(layers, ids, targets, seen) / num_targets(alone)
        else:
            loss = packed_loss(layers, ids, targets, places(step)) / ids.numel()
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            first = {
                name: parameter.grad.clone()
                for name, parameter in layers.named_parameters(remove_duplicate=False)
                if parameter.requires_grad
            }
        norms.append(nn.utils.clip_grad_norm_(layers.parameters(), OPTIONS.clip_gradients).item())
        optimizer.step()
        losses.append(loss.item())
    return TrainingOutcome(
        losses=losses, norms=norms, gradients=first, states={}, collectives=Counter()
    )


def gradient_errors(actual: TrainingOutcome, expected: TrainingOutcome) -> dict[str, float]:
    """Return the error of every gradient; infinite for a parameter that only one side has."""
    names = [
        *expected.gradients,
        *(name for name in actual.gradients if name not in expected.gradients),
    ]
    both = expected.gradients.keys() & actual.gradients.keys()
    return {
        name: gradient_error(actual.gradients[name], expected.gradients[name])
        if name in both
        else float("inf")
        for name in names
    }


def gradient_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest error of a gradient relative to its largest entry.

        max |actual - expected| / max(max |expected|, SMALLEST)

    Infinite if an entry is not finite.
    """
    error = float((actual - expected).abs().max() / max(float(expected.abs().max()), SMALLEST))
    return error if math.isfinite(error) else math.inf


def loss_tolerance(optimizer: Optimizer) -> float:
    """Return the largest relative error of a loss in fp32, by the precision of the update."""
    return ROUNDED_LOSS_TOLERANCE if optimizer in ROUNDED else LOSS_TOLERANCE


def loss_errors(actual: TrainingOutcome, expected: TrainingOutcome) -> tuple[float, ...]:
    """Return the relative errors of the losses, step by step."""
    return tuple(relative_error(a, b) for a, b in zip(actual.losses, expected.losses, strict=True))
