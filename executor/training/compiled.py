"""torch.compile of every block, each as one graph.

`Module.compile` leaves parameters and their names alone. Embedding, head and loss are not compiled.
Blocks of one shape share compiled code. The compiler then chooses the saved tensors of a block,
which no price counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parplan.executor.pipeline.stages import Stage
from parplan.executor.placed_layers import layer_operators, recomputes_ahead
from parplan.planner.plan.plan import Plan
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.operator_graph import LayerKind


def validate_compiled(plan: Plan, device: torch.device) -> None:
    """Raise ConfigError if a block is no single graph or the machine cannot compile.

    Recipes (`parplan.executor.memory.saved_tensors`) run when autograd saves a tensor. A compiled
    block saves tensors of its own: tracing stops at the hooks, and if the block is compiled in
    pieces around them, a recomputed operator reads freed memory.
    """
    if plan.chunks is not None:
        raise ConfigError(
            "--compile: parameters in chunks come and go around the passes of their "
            "block, which torch.compile cannot trace",
            hint="leave --compile out, or make a plan without chunks",
        )
    if plan.mesh.cp > 1:
        raise ConfigError(
            f"--compile: with cp {plan.mesh.cp} attention waits for other ranks between its "
            "kernels, which torch.compile cannot trace",
            hint="leave --compile out, or make a plan with --cp 1",
        )
    if plan.mesh.tp > 1:
        raise ConfigError(
            f"--compile: with tp {plan.mesh.tp} the gathered inputs are kept by "
            "recipes, which torch.compile cannot trace",
            hint="leave --compile out, or make a plan with --tp 1",
        )
    for name, layer in plan.layer_plans.items():
        if (
            layer.layer is LayerKind.BLOCK
            and layer.recompute
            and set(layer.recompute) != set(layer_operators(plan, layer))
        ):
            raise ConfigError(
                f"--compile: layer_plans.{name} recomputes "
                f"{', '.join(layer.recompute)} by recipes, which torch.compile cannot "
                "trace",
                hint="leave --compile out, or make a plan with --recompute none,full",
            )
        if layer.keep_on_host:
            raise ConfigError(
                f"--compile: layer_plans.{name} has {', '.join(layer.keep_on_host)} "
                "keep on the host, which torch.compile cannot trace",
                hint="leave --compile out, or make a plan without --offload activations",
            )
    schedule = plan.pipeline.schedule
    if recomputes_ahead(plan) and any(layer.recompute for layer in plan.layer_plans.values()):
        raise ConfigError(
            f"--compile: {schedule} recomputes ahead of the gradient, and a compiled "
            "block does so when that is there",
            hint="leave --compile out, or make a plan with --schedule 1f1b",
        )
    if device.type == "cpu":
        _require_compiler()


def compile_blocks(stages: Sequence[Stage]) -> None:
    """Mark every block to be compiled when it first runs."""
    for stage in stages:
        for name, layer in stage.body.named_children():
            if name not in (LayerKind.EMBEDDING.value, LayerKind.HEAD.value):
                layer.compile(fullgraph=True)


def _require_compiler() -> None:
    # torch's compiler takes a second to import
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ConfigError(
            "--compile: torch finds no C++ compiler on this machine",
            hint="install g++, or set CXX to a compiler",
        ) from None
