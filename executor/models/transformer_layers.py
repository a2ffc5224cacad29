"""The layers of a described model as modules, built from their operators.

Every operator of `parplan.profiles.models.transformer` is a submodule with the same name and the
same parameters, which a layer runs in the order of its graph. The operators of a mixture of experts
are one module. `operator_modules` has the module of every other operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parplan.executor.context.context_attention import Context
from parplan.executor.models.adapters import SUM, A, cast_parameters, freeze
from parplan.executor.models.expert_exchange import ETP, ExpertRanks
from parplan.executor.models.initial_values import init, init_experts, materialize
from parplan.executor.models.loss import TOKEN_DIMS
from parplan.executor.models.mixture_of_experts import (
    Experts,
    Grouped,
    MixtureOfExperts,
    divide_experts,
    grouped_of,
    mark_biases,
)
from parplan.executor.models.operator_modules import Blueprint, linear_of, module_of
from parplan.executor.models.operators import Activation, SharedTokens
from parplan.executor.models.state_space_modules import Scan
from parplan.executor.models.tower_modules import PatchTables
from parplan.executor.tensors import DTYPES, local
from parplan.profiles.models.blocks import BlockRun
from parplan.profiles.models.operator_graph import (
    ADAPTER_RANK,
    LayerClass,
    LayerKind,
    ModelPart,
    Operator,
    OperatorKind,
)
from parplan.profiles.models.parts.cross_attention import ATTENDED
from parplan.profiles.models.parts.multi_token import MODULE
from parplan.profiles.models.parts.tower import as_model
from parplan.profiles.models.spec import ModelSpec, TrainingSpec
from parplan.profiles.models.transformer import all_block_kinds, build_graph, last_kind

READS_PLACES = ("attention", "positions", "image_tokens")  # modules that read places of tokens
MIXTURE = "mixture"  # the module of the operators of a mixture of experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call of a submodule: the tensors that it reads, and the one that it gives.

    reads   the name of each tensor, with whether it is read for the last time
    """

    module: str
    reads: tuple[tuple[str, bool], ...]
    gives: str


class Layer(nn.Module):
    """The operators of a layer, which run in the order of its graph on tensors by name.

    A tensor is dropped as soon as its last reader has it. `ranks` divide the experts, if there are
    any.
    """

    def __init__(
        self,
        layer: LayerClass,
        model: ModelSpec,
        training: TrainingSpec,
        block: BlockRun | None = None,
        ranks: ExpertRanks | None = None,
    ) -> None:
        super().__init__()
        tower = None if layer.part is ModelPart.LANGUAGE else model.tower
        model = model if tower is None else as_model(tower)
        block = block or model.block_kinds[0]
        for operator in layer.operators:
            if not operator.in_mixture:
                of = Blueprint(
                    operator=operator, model=model, training=training, block=block, tower=tower
                )
                self.add_module(operator.name, module_of(of))
            elif not hasattr(self, MIXTURE):
                mixture = tuple(each for each in layer.operators if each.in_mixture)
                self.add_module(MIXTURE, _mixture(mixture, model, ranks))
        self.functions = model.functions
        self.calls = _calls(layer)
        for module in self.children():
            if isinstance(module, Scan):
                module.of_heads = (self.get_submodule("steps"),)

    def forward(self, x: Tensor, places: Tensor | None = None) -> Tensor:
        return self.run(self.calls, x, places)

    def run(
        self, steps: Sequence[Step], x: Tensor, places: Tensor | None = None, **further: Tensor
    ) -> Tensor:
        """Returns the output of the last of `steps`, the first of which reads `x`.

        places    those of the tokens in their documents, [batch, sequence]; None where sequences
                  are whole; in the projector of a tower those of images
        further   other tensors that steps read, by name
        """
        tensors = {steps[0].reads[0][0]: x, **further}
        del x  # a name would hold the activation until the last step
        for step in steps:
            read = [tensors.pop(name) if last else tensors[name] for name, last in step.reads]
            if places is not None and step.module in READS_PLACES:
                read.append(places)
            tensors[step.gives] = getattr(self, step.module)(*read)
        return tensors[steps[-1].gives]


def _calls(layer: LayerClass) -> tuple[Step, ...]:
    """Returns the calls of a layer; a mixture of experts is one, and the schedule calls the loss.

    Token ids have no name in the graph, which are `ids` here.
    """
    calls: list[tuple[str, tuple[str, ...], str]] = []
    mixture = [operator for operator in layer.operators if operator.in_mixture]
    for operator in layer.operators:
        reads = tuple(tensor.name for tensor in operator.inputs) or ("ids",)
        gives = operator.outputs[0].name
        if operator.kind is OperatorKind.COMBINE:
            sent = next(each for each in mixture if each.kind is OperatorKind.DISPATCH)
            read = dict.fromkeys((mixture[0].inputs[0].name, sent.inputs[0].name))
            calls.append((MIXTURE, tuple(read), gives))
        elif not operator.in_mixture and operator.kind is not OperatorKind.CROSS_ENTROPY:
            calls.append((operator.name, reads, gives))
    later: set[str] = set()
    steps: list[Step] = []
    for module, reads, gives in reversed(calls):
        # an operator may read a tensor twice: the last of its reads drops it
        last = [
            name not in later and name not in reads[place + 1 :] for place, name in enumerate(reads)
        ]
        steps.append(Step(module=module, reads=tuple(zip(reads, last, strict=True)), gives=gives))
        later.update(reads)
    return tuple(reversed(steps))


def _mixture(
    operators: tuple[Operator, ...], model: ModelSpec, ranks: ExpertRanks | None
) -> nn.Module:
    router = next(linear_of(each) for each in operators if each.kind is OperatorKind.MATMUL)
    held = range(model.num_experts) if ranks is None else ranks.held(model.num_experts)
    parts = 1 if ranks is None else ranks.degree(ETP)
    adapters = {
        each.name.removesuffix(A): each.size(ADAPTER_RANK)
        for each in operators
        if each.kind is OperatorKind.EXPERTS and each.name.endswith(A)
    }
    experts = Experts(model, held, parts, Activation(model), adapters)
    return MixtureOfExperts(model, router, experts, tuple(each.name for each in operators))


class Embedding(Layer):
    """Maps token ids [batch, sequence] to [batch, sequence, hidden]."""

    def forward(self, ids: Tensor, places: Tensor | None = None) -> Tensor:
        factor = self.functions.embedding_factor
        x = super().forward(ids, places)
        return x if factor == 1.0 else x * factor


class Block(Layer):
    """One transformer block."""

    @property
    def parallel_residual(self) -> bool:
        return not hasattr(self, "residual1")

    def attend(self, x: Tensor) -> Tensor:
        """Returns the attention branch of `x`, which the residual adds."""
        return self.run(self.calls[: self._ends_at("attention_out") + 1], x)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Returns the branch of the feed-forward network or of the mixture."""
        first = self._ends_at("attention_out") + (1 if self.parallel_residual else 2)
        return self.run(self.calls[first:-1], x)

    def _ends_at(self, name: str) -> int:
        """Returns the number of the last step of an operator and its adapter."""
        names = (name, name + SUM)
        return max(at for at, step in enumerate(self.calls) if step.module in names)


class AttendingBlock(Block):
    """A block that attends to the output of a tower."""

    def forward(self, x: Tensor, states: Tensor) -> Tensor:  # type: ignore[override]
        """Returns the output for `x` and `states`, the output of the tower."""
        return self.run(self.calls, x, **{ATTENDED: states})


class AttendedNorm(Layer):
    """The last layer of a tower that blocks attend to."""


class Patches(Layer):
    """The first layer of a tower."""

    def forward(self, pixels: Tensor) -> Tensor:  # type: ignore[override]
        """Returns tokens of images, [images of all sequences, tokens, features].

        pixels   [sequences, images of each, patches, features of a patch]
        """
        return self.run(self.calls, pixels.flatten(0, 1))


class Projector(Layer):
    """The last layer of a tower."""

    def forward(self, x: Tensor, embedded: Tensor, first: Tensor) -> Tensor:  # type: ignore[override]
        """Returns the tokens of the sequences, with those of images among them.

        embedded   tokens of the sequences, [sequences, tokens, features]
        first      the place of the first token of each image, [sequences, images of each]
        """
        return self.run(self.calls, x, first, embedded=embedded)


class FurtherToken(Layer):
    """A module of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    Its `operators` have the names of those in the head's graph.
    """

    operators: tuple[str, ...] = ()

    def forward(  # type: ignore[override]
        self, x: Tensor, ids: Tensor, places: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the states that the next module reads, and those that predict a token.

        x     states, [batch, sequence, hidden]
        ids   of the tokens behind them
        """
        state = self.run(self.calls[:-1], x, places, ids=ids)
        return state, self.norm(state)


class Head(Layer):
    """Maps [batch, sequence, hidden] to logits [batch, sequence, padded vocabulary].

    With modules of multi-token prediction the logits are [batch, sequence, predictions, padded
    vocabulary], of the next token and of those behind it. The schedule calls `loss` on them.
    """

    def __init__(
        self,
        layer: LayerClass,
        model: ModelSpec,
        training: TrainingSpec,
        block: BlockRun | None = None,
        ranks: ExpertRanks | None = None,
    ) -> None:
        names = tuple(f"{MODULE}{number}" for number in range(1, model.mtp_layers + 1))
        super().__init__(_of_module(layer, ""), model, training, block, ranks)
        self.modules_ahead = names
        self.tied = model.tied_embeddings
        for name in names:
            described = _of_module(layer, name)
            module = FurtherToken(described, model, training, block, ranks)
            module.operators = tuple(f"{name}.{each.name}" for each in described.operators)
            if model.tied_embeddings:
                module.tokens = SharedTokens(self.lm_head)
            elif name != names[0]:
                module.tokens = self.get_submodule(names[0]).tokens
            self.add_module(name, module)

    @property
    def table(self) -> nn.Module:
        """The module whose weight is that of the token table, in a model that has such a one."""
        if self.tied or not self.modules_ahead:
            return self.lm_head
        return self.get_submodule(self.modules_ahead[0]).tokens

    def forward(self, x: Tensor, *of_tokens: Tensor) -> Tensor:  # type: ignore[override]
        """Returns the logits.

        of_tokens   places in documents, [batch, sequence], where sequences are packed; targets,
                    [batch, sequence, predictions], where there are several: a module reads the ids
                    that the one before it predicts
        """
        places = next((each for each in of_tokens if each.ndim == TOKEN_DIMS), None)
        targets = next((each for each in of_tokens if each.ndim > TOKEN_DIMS), None)
        if targets is None:
            logits = super().forward(x)
        else:
            states = [self.norm(x)]
            for name, ids in zip(self.modules_ahead, targets.unbind(-1), strict=False):
                x, state = self.get_submodule(name)(x, ids.clamp(min=0), places)
                states.append(state)
            logits = self.run(self.calls[1:], stacked(states))
        divisor = self.functions.logit_divisor
        return logits if divisor == 1.0 else logits / divisor


def stacked(states: Sequence[Tensor]) -> Tensor:
    """Returns [batch, sequence, states, features], divided as the states are."""
    parts = torch.stack(tuple(map(local, states)), dim=2)
    first = states[0]
    if not isinstance(first, DTensor):
        return parts
    return DTensor.from_local(parts, first.device_mesh, first.placements, run_check=False)


def _of_module(head: LayerClass, name: str) -> LayerClass:
    """Returns the operators of a module of multi-token prediction, or the others without a name.

    The product with the vocabulary then reads one tensor, of all states.
    """
    begins = f"{name}." if name else ""
    operators = tuple(
        replace(
            each,
            name=each.name.removeprefix(begins),
            inputs=each.inputs if name else each.inputs[:1],
        )
        for each in head.operators
        if (each.name.startswith(begins) if name else "." not in each.name)
    )
    return replace(head, operators=operators)


def divide_sequences(layer: nn.Module, context: Context) -> None:
    """Tells the operators of a layer that need it which tokens of each sequence this rank has."""
    for module in layer.modules():
        if hasattr(module, "context"):
            module.context = context


def described(
    model: ModelSpec, training: TrainingSpec, kind: LayerKind, index: int
) -> tuple[LayerClass, BlockRun]:
    """Returns the operators of a layer by its number, and its kind of block.

    Blocks are counted on behind the last one; embedding and head have any number. The kind of a
    head is that of its module of multi-token prediction.
    """
    graph = build_graph(model, training, 1)
    if kind is LayerKind.HEAD:
        return graph.head, last_kind(model)
    kinds = all_block_kinds(model)
    place = (index - 1) % len(kinds)
    key = graph.key(place + 1) if kind is LayerKind.BLOCK else kind
    return graph.layer_class(key), kinds[place]


_OF_KIND: dict[LayerKind, type[Layer]] = {
    LayerKind.EMBEDDING: Embedding,
    LayerKind.BLOCK: Block,
    LayerKind.HEAD: Head,
}
_OF_PART: dict[ModelPart, type[Layer]] = {
    ModelPart.PATCHES: Patches,
    ModelPart.PROJECTOR: Projector,
}


_ATTENDED: dict[ModelPart, type[Layer]] = {  # where blocks attend to the tower
    ModelPart.PROJECTOR: AttendedNorm,
    ModelPart.LANGUAGE: AttendingBlock,
}


def build_layer(
    model: ModelSpec,
    training: TrainingSpec,
    kind: LayerKind,
    index: int,
    seed: int,
    device: torch.device,
    ranks: ExpertRanks | None = None,
) -> nn.Module:
    """Builds a whole layer on `device`, in fp32, or in the precision of training without masters.

    Its values are a function of `seed`, the layer's index and the parameter alone, so every mesh
    starts from the same model: each rank builds the layer and retains its shard. A rank of `ranks`
    builds only its part of the experts, each of which has separate values.
    """
    operators, block = described(model, training, kind, index)
    made = _OF_PART.get(operators.part) or _OF_KIND[kind]
    if model.tower is not None and model.tower.attended:
        made = _ATTENDED.get(operators.part, made) if kind is LayerKind.BLOCK else made
    with torch.device("meta"):
        layer = made(operators, model, training, block, ranks)
    materialize(layer, device)
    of_experts = {parameter for each in grouped_of(layer) for parameter in each.parameters()}
    for name, parameter in layer.named_parameters():
        tied = model.shares_table and isinstance(layer, Head) and parameter is layer.table.weight
        if parameter not in of_experts:
            init(parameter, f"{seed}/0/tokens.weight" if tied else f"{seed}/{index}/{name}")
    for name, module in layer.named_modules():
        if isinstance(module, Grouped):
            init_experts(module, f"{seed}/{index}/{name}", ranks)
    if ranks is not None:
        divide_experts(layer, ranks)
    for module in layer.modules():
        if isinstance(module, PatchTables):
            module.fill_fixed()
    freeze(layer, operators)
    if not training.has_masters:
        cast_parameters((layer,), DTYPES[training.precision])
    mark_biases(layer)
    return layer
