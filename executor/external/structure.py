"""The parts of a module: its blocks, the embedding before them, the head after them.

The blocks are the list with as many modules of one class as the plan's model has layers. All other
modules with parameters belong to the embedding or to the head, by their time in one forward pass
without data (`parplan.executor.external.module_calls`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from parplan.executor.external.module_calls import AFTER, BEFORE, Trace, trace_module
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import LayerKind
from parplan.profiles.models.transformer import build_graph

ParameterName = tuple[str, str]  # a module's name, and the parameter's name in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """The names of a module's parts.

    tied   the token table and the weight of the head that is the same parameter, or None
    trace  the record of the forward pass
    """

    blocks: tuple[str, ...]
    embedding: tuple[str, ...]
    head: tuple[str, ...]
    tied: tuple[ParameterName, ParameterName] | None
    trace: Trace

    def names(self, kind: LayerKind, index: int) -> tuple[str, ...]:
        """Returns the modules of the layer that a plan counts as `index`.

        The embedding is 0, blocks are 1 to L, the head is L + 1.
        """
        if kind is LayerKind.BLOCK:
            return (self.blocks[index - 1],)
        return self.embedding if kind is LayerKind.EMBEDDING else self.head


def find_structure(model: nn.Module, plan: Plan) -> Structure:
    """Finds the parts of `model`, which must match the plan's model.

    Raises ConfigError with the part that does not.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            raise ConfigError(
                f"module: parameter {name} is not trained, all must be",
                hint="leave requires_grad as it is, or use a buffer",
            )
    holder = _list_of_blocks(model, plan.model.num_layers)
    blocks = tuple(f"{holder}.{key}" for key, _ in model.get_submodule(holder).named_children())
    outside = tuple(_parts_outside(model, holder))
    trace = trace_module(model, blocks, outside, plan)
    for name in outside:
        if name not in trace.order:
            raise ConfigError(
                f"module: {name} holds parameters and did not run",
                hint="a pipeline stage cannot own what it does not run",
            )
    parts = [name for name in trace.order if name in outside]
    embedding = tuple(name for name in parts if trace.order[name] == BEFORE)
    head = tuple(name for name in parts if trace.order[name] == AFTER)
    tied = _tied(model, embedding, head, plan)
    structure = Structure(blocks=blocks, embedding=embedding, head=head, tied=tied, trace=trace)
    _check_sizes(model, structure, plan)
    return structure


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
            f"module: {longest} has {lists[longest]} blocks, "
            f"the model of the plan has {num_layers} layers",
            hint="plan with a --model that describes the module",
        )

    def num_parameters(name: str) -> int:
        return sum(parameter.numel() for parameter in model.get_submodule(name).parameters())

    return max(fitting, key=num_parameters)


def _parts_outside(model: nn.Module, holder: str) -> Iterator[str]:
    """Yields the modules with parameters outside the path that leads to the blocks.

    Raises ConfigError for parameters on the path itself.
    """
    path = holder.split(".")
    for depth in range(len(path)):
        before = ".".join(path[:depth])
        module = model.get_submodule(before)
        for name, _ in module.named_parameters(prefix=before, recurse=False):
            raise ConfigError(
                f"module: parameter {name} belongs to a module that holds the blocks, "
                "no stage could own it",
                hint="put it into a module of its own that runs before or after the blocks",
            )
        for key, child in module.named_children():
            if key != path[depth] and any(True for _ in child.parameters()):
                yield f"{before}.{key}" if before else key


def _tied(
    model: nn.Module, embedding: tuple[str, ...], head: tuple[str, ...], plan: Plan
) -> tuple[ParameterName, ParameterName] | None:
    shared = [
        (name, head_name)
        for name, parameter in _parameters(model, embedding).items()
        for head_name, head_parameter in _parameters(model, head).items()
        if parameter is head_parameter
    ]
    if bool(shared) != plan.model.tied_embeddings:
        raise ConfigError(
            f"module: embedding and head {'share' if shared else 'do not share'} a parameter, "
            f"the model of the plan has tied_embeddings {plan.model.tied_embeddings}",
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


def _parameters(model: nn.Module, names: tuple[str, ...]) -> dict[ParameterName, nn.Parameter]:
    return {
        (inner, key): parameter
        for name in names
        for inner, module in model.get_submodule(name).named_modules(prefix=name)
        for key, parameter in module.named_parameters(recurse=False)
    }


def _check_sizes(model: nn.Module, structure: Structure, plan: Plan) -> None:
    """Checks that the parts hold as many parameters as the planner counted."""
    graph = build_graph(plan.model, plan.training, plan.pipeline.micro_batch_size)
    parts: Mapping[LayerKind, list[tuple[str, ...]]] = {
        LayerKind.EMBEDDING: [structure.embedding],
        LayerKind.BLOCK: [(name,) for name in structure.blocks],
        LayerKind.HEAD: [structure.head],
    }
    for kind, members in parts.items():
        planned = sum(operator.num_parameters for operator in graph.layer_class(kind).operators)
        for names in members:
            modules = [model.get_submodule(name) for name in names]
            held = sum(p.numel() for module in modules for p in module.parameters())
            if held != planned:
                raise ConfigError(
                    f"module: the {kind} ({', '.join(names)}) holds {held:,} parameters, "
                    f"that of the plan's model {planned:,}",
                    hint="plan with a --model that describes the module",
                )
