"""Where the parts of a module are: its blocks, what runs before them (the embedding), what runs
after them (the head).

The blocks are the list of as many modules of one class as the plan's model has layers. Whatever
else holds parameters is part of the embedding or of the head, by when it runs in one forward pass
without data (`parplan.executor.external.module_calls`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from parplan.executor.external.module_calls import Trace, trace_module
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.transformer import build_graph

Place = tuple[str, str]  # a module's name, and its parameter's


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Names of modules: of the list of blocks, of the blocks, of what is the embedding and what is
    the head.

    tied: the token table and the weight of the head that is the same parameter, or None
    """

    blocks: tuple[str, ...]
    embedding: tuple[str, ...]
    head: tuple[str, ...]
    tied: tuple[Place, Place] | None
    trace: Trace

    def names(self, kind: LayerKind, index: int) -> tuple[str, ...]:
        """The modules of the layer that a plan counts as `index`: embedding 0, blocks 1 to L, head
        L + 1.
        """
        if kind is LayerKind.BLOCK:
            return (self.blocks[index - 1],)
        return self.embedding if kind is LayerKind.EMBEDDING else self.head


def find_structure(model: nn.Module, plan: Plan) -> Structure:
    """The parts of `model`, which must be the parts of the plan's model. Raises ConfigError that
    says what is not.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            raise ConfigError(
                f"module: parameter {name} is not trained, all must be",
                hint="leave requires_grad as it is, or use a buffer",
            )
    holder = _list_of_blocks(model, plan.model.num_layers)
    blocks = tuple(f"{holder}.{key}" for key, _ in model.get_submodule(holder).named_children())
    others = tuple(_other_parts(model, holder))
    ran = trace_module(model, blocks, others, plan)
    for name in others:
        if name not in ran.order:
            raise ConfigError(
                f"module: {name} holds parameters and did not run",
                hint="a pipeline stage cannot own what it does not run",
            )
    embedding = tuple(name for name in ran.order if name in others and ran.order[name] == 0)
    head = tuple(name for name in ran.order if name in others and ran.order[name] == 1)
    found = Structure(
        blocks=blocks,
        embedding=embedding,
        head=head,
        tied=_tied(model, embedding, head, plan),
        trace=ran,
    )
    _check_sizes(model, found, plan)
    return found


def _list_of_blocks(model: nn.Module, num_layers: int) -> str:
    lists = {
        name: len(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        and len({type(child) for child in module.children()}) == 1
        and any(True for _ in module.parameters())
    }
    if not lists:
        raise ConfigError(
            f"module: {type(model).__name__} has no list of blocks",
            hint="keep its blocks in one torch.nn.ModuleList",
        )
    fitting = [name for name, count in lists.items() if count == num_layers]
    if not fitting:
        longest = max(lists, key=lambda name: lists[name])
        raise ConfigError(
            f"module: {longest} has {lists[longest]} blocks, the model of the plan has {num_layers} layers",
            hint="plan with a --model that describes the module",
        )
    return max(
        fitting, key=lambda name: sum(p.numel() for p in model.get_submodule(name).parameters())
    )


def _other_parts(model: nn.Module, holder: str) -> Iterator[str]:
    """Modules with parameters beside the path that leads to the blocks. Raises ConfigError for
    parameters on the path itself.
    """
    path = holder.split(".")
    for depth in range(len(path)):
        before = ".".join(path[:depth])
        module = model.get_submodule(before)
        for name, _ in module.named_parameters(prefix=before, recurse=False):
            raise ConfigError(
                f"module: parameter {name} belongs to a module that holds the blocks, no stage could own it",
                hint="put it into a module of its own that runs before or after the blocks",
            )
        for key, child in module.named_children():
            if key != path[depth] and any(True for _ in child.parameters()):
                yield f"{before}.{key}" if before else key


def _tied(
    model: nn.Module, embedding: tuple[str, ...], head: tuple[str, ...], plan: Plan
) -> tuple[Place, Place] | None:
    first, last = (dict(_places(model, names)) for names in (embedding, head))
    shared = [
        (place, other)
        for place, parameter in first.items()
        for other, again in last.items()
        if parameter is again
    ]
    if bool(shared) != plan.model.tied_embeddings:
        raise ConfigError(
            f"module: embedding and head {'share' if shared else 'do not share'} a parameter, the model of the plan has tied_embeddings "
            f"{plan.model.tied_embeddings}",
            hint="plan with a --model that describes the module",
        )
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    whole = len(list(model.parameters())) + len(shared)
    if len(shared) > 1 or len(names) != whole:
        raise ConfigError(
            "module: parameters are shared beside that of embedding and head",
            hint="only tied embeddings can be shared",
        )
    return shared[0] if shared else None


def _places(model: nn.Module, names: tuple[str, ...]) -> Iterator[tuple[Place, nn.Parameter]]:
    for name in names:
        for inner, module in model.get_submodule(name).named_modules(prefix=name):
            yield from (
                ((inner, key), parameter)
                for key, parameter in module.named_parameters(recurse=False)
            )


def _check_sizes(model: nn.Module, found: Structure, plan: Plan) -> None:
    """The parts must hold as many parameters as the planner counted: prices and memory are of
    those.
    """
    graph = build_graph(plan.model, plan.training, plan.pipeline.micro_batch_size)
    parts: Mapping[LayerKind, list[tuple[str, ...]]] = {
        LayerKind.EMBEDDING: [found.embedding],
        LayerKind.BLOCK: [(name,) for name in found.blocks],
        LayerKind.HEAD: [found.head],
    }
    for kind, members in parts.items():
        planned = sum(operator.num_parameters for operator in graph.layer_class(kind).operators)
        for names in members:
            held = sum(
                parameter.numel()
                for name in names
                for parameter in model.get_submodule(name).parameters()
            )
            if held != planned:
                raise ConfigError(
                    f"module: the {kind} ({', '.join(names)}) holds {held:,} parameters, that of the plan's model {planned:,}",
                    hint="plan with a --model that describes the module",
                )
