"""Tensor parallelism of a module by torch's styles, as transformers names them for a block.

A region is the child of a block that holds divided layers: attention, feed-forward. It reads whole
sequences, and its row-divided layer returns whole sums. Under sequence parallelism its input is
gathered, its sums are scattered, and the norms outside the regions run on this rank's tokens. The
token table and the head are divided over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.nn import functional

from parplan.executor.tensors import as_dtensor
from parplan.profiles.errors import ConfigError

_KNOWN = {"colwise", "rowwise"}


def place_block(
    block: nn.Module,
    styles: Mapping[str, str],
    inputs: Mapping[str, int | str],
    mesh: DeviceMesh,
    *,
    sequence: bool,
) -> None:
    """Divides a block over `mesh`; `inputs` says how its children are called.

    Raises ConfigError for layers that no style covers.
    """
    unknown = sorted(set(styles.values()) - _KNOWN)
    if not styles or unknown:
        problem = f"has the style {unknown[0]}" if unknown else "is not there"
        raise ConfigError(
            f"module: the tensor-parallel plan of {type(block).__name__} in transformers {problem}",
            hint="plan with --tp 1",
        )
    stream: Placement = Shard(1) if sequence else Replicate()
    regions = {name.split(".")[0] for name in styles}
    for name, _ in block.named_parameters():
        inside = name.split(".")[0] in regions
        if inside and not any(name.startswith(f"{layer}.") for layer in styles):
            raise ConfigError(
                f"module: {name} of {type(block).__name__} has no style, and others beside it have",
                hint="plan with --tp 1",
            )
    plan: dict[str, ParallelStyle] = {
        name: ColwiseParallel() if style == "colwise" else RowwiseParallel(output_layouts=stream)
        for name, style in styles.items()
    }
    plan |= {name: _gather(inputs[name], stream) for name in regions}
    if sequence:
        plan |= {
            name: _on_tokens()
            for name, child in block.named_children()
            if name not in regions and _has_parameters(child)
        }
    parallelize_module(block, mesh, plan, src_data_rank=None)


def _gather(where: int | str, stream: Placement) -> ParallelStyle:
    """Makes the region's input a whole DTensor.

    The gradients of all its readers are then reduced once.
    """
    if isinstance(where, str):
        return PrepareModuleInput(
            input_kwarg_layouts={where: stream}, desired_input_kwarg_layouts={where: Replicate()}
        )
    rest = (None,) * (where - 1)
    return PrepareModuleInput(
        input_layouts=(stream, *rest), desired_input_layouts=(Replicate(), *rest)
    )


def _on_tokens() -> SequenceParallel:
    return SequenceParallel(use_local_output=True)


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def place_embedding(parts: list[nn.Module], mesh: DeviceMesh) -> None:
    """Divides the token table over the vocabulary; its output is whole.

    Raises ConfigError unless `parts` is one table.
    """
    if len(parts) != 1 or type(parts[0]) is not nn.Embedding:
        raise ConfigError(
            f"module: an embedding of {', '.join(type(part).__name__ for part in parts)} "
            "has no tensor-parallel plan",
            hint="plan with --tp 1",
        )
    table = parts[0]
    shard = distribute_tensor(table.weight.data, mesh, (Shard(0),), src_data_rank=None)
    table.register_parameter("weight", nn.Parameter(shard))
    table.forward = partial(_look_up, table, mesh)  # type: ignore[method-assign]


def _look_up(table: nn.Embedding, mesh: DeviceMesh, ids: Tensor) -> Tensor:
    weight = table.weight
    # DTensor makes the gradient of a vocabulary shard whole; this no-op cuts it at once
    weight = weight.redistribute(placements=weight.placements)
    embedded = functional.embedding(as_dtensor(ids, mesh), weight, table.padding_idx)
    return embedded.redistribute(mesh, (Replicate(),)).to_local()


def place_head(parts: list[nn.Module], mesh: DeviceMesh, *, sequence: bool) -> None:
    """Divides the last product over the vocabulary: every rank gets its slice of the logits.

    The other parts are norms.
    """
    *norms, product = parts
    if type(product) is not nn.Linear:
        raise ConfigError(
            f"module: a head that ends with {type(product).__name__} has no tensor-parallel plan",
            hint="plan with --tp 1",
        )
    if sequence:
        for norm in norms:
            parallelize_module(norm, mesh, _on_tokens(), src_data_rank=None)
    stream: Placement = Shard(1) if sequence else Replicate()
    parallelize_module(product, mesh, ColwiseParallel(input_layouts=stream), src_data_rank=None)


def split_sequence(mesh: DeviceMesh, x: Tensor) -> Tensor:
    """Returns this rank's tokens of a whole [batch, sequence, hidden]."""
    whole = DTensor.from_local(x, mesh, (Replicate(),), run_check=False)
    return whole.redistribute(mesh, (Shard(1),)).to_local()
