"""Records one forward pass of a module on fake tensors, without memory or arithmetic.

Every call of torch with a tensor that depends on the batch or on a parameter becomes a node of a
torch.fx graph. Nodes are at the level at which the module calls torch (functional.linear,
Tensor.view, ...), so that repeating them runs with autograd as the module does. A value that
depends on neither is computed at once, for real, and is a *constant*. A torch.autograd.Function is
one call.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import Precision
from parplan.profiles.tracing.assigned_buffers import keep_assigned
from parplan.profiles.tracing.program import BUFFER, PARAMETER, Program, memory_of
from parplan.profiles.tracing.recorder import APPLY, CallRecorder
from parplan.profiles.tracing.source_lines import Paths
from parplan.profiles.tracing.stand_ins import replaced_parameters
from parplan.profiles.tracing.traced_source import TracedWorkload
from parplan.profiles.tracing.user_code import explained_user_errors

DTYPES = {
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
    Precision.FP32: torch.float32,
}


def record(
    workload: TracedWorkload,
    micro_batch_size: int,
    precision: Precision = Precision.FP32,
    *,
    on_cpu: bool = False,
    check: Callable[[], None] = lambda: None,
) -> Program:
    """Records one micro-batch with parameters and float inputs in `precision`.

        on_cpu   lays tensors out as a CPU's kernels do, else as a GPU's
        check    is called at every call of torch and may raise

    Raises ConfigError with the line of the user's code for control flow that depends on values of
    tensors, for a tensor that no call of torch made, and for a loss that is not a scalar.
    """
    program, counted = _recorded(
        workload, micro_batch_size, precision, frozenset(), on_cpu=on_cpu, check=check
    )
    if counted:
        program, _ = _recorded(
            workload, micro_batch_size, precision, counted, on_cpu=on_cpu, check=check
        )
    return program


def _recorded(
    workload: TracedWorkload,
    micro_batch_size: int,
    precision: Precision,
    counted: frozenset[str],
    *,
    on_cpu: bool,
    check: Callable[[], None],
) -> tuple[Program, frozenset[str]]:
    """Returns the program, and the buffers that were read as constants although calls write them.

    The buffers in `counted` are not treated as constants.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = CallRecorder(fake, Paths(workload.module), on_cpu=on_cpu, check=check)
    recorder.changed |= {
        memory_of(value): value
        for name, value in workload.module.named_buffers()
        if name in counted
    }
    with torch.random.fork_rng(devices=[]):
        drawn = workload.batch(micro_batch_size)
        batch: dict[str, Tensor] = {
            key: fake.from_tensor(_cast(value, precision)) for key, value in drawn.items()
        }
    for key, value in batch.items():
        recorder.enter(value, recorder.graph.placeholder(key))
    buffers = [
        (part, key, value)
        for part in workload.module.modules()
        for key, value in part._buffers.items()
        if value is not None
    ]
    state = _fake_parameters(workload.module, fake, precision)
    recorder.attributes |= {id(value): (name, PARAMETER) for name, value in state.items()}
    recorder.attributes |= {
        id(value): (name, BUFFER) for name, value in workload.module.named_buffers()
    }
    before = _generators()
    with ExitStack() as stack:
        for context in (
            explained_user_errors(f"a forward pass of {workload.name}"),
            _quiet(),
            replaced_parameters(workload.module, state),
            recorder.paths,
            _functions_as_calls(recorder),
            recorder,
        ):
            stack.enter_context(context)
        loss = workload.loss_of(workload.module, batch)
        keep_assigned(recorder, buffers)
    if _generators() != before:
        raise ConfigError(
            f"module: a forward pass of {workload.name} draws random numbers of Python or numpy, "
            "so it could differ between "
            "micro-batches",
            hint="draw with torch, and use what is drawn in tensors alone",
        )
    return _finished(workload, micro_batch_size, recorder, loss), frozenset(
        recorder.read & recorder.written
    )


def _cast(value: Tensor, precision: Precision) -> Tensor:
    return value.to(DTYPES[precision]) if value.is_floating_point() else value


def _fake_parameters(
    module: nn.Module, fake: FakeTensorMode, precision: Precision
) -> dict[str, Tensor]:
    """Returns fake parameters by name, made as nn.Parameter does without its dispatched calls."""
    made: dict[str, Tensor] = {}
    for name, p in module.named_parameters():
        empty = torch.empty(p.shape, dtype=DTYPES[precision], device="meta")
        made[name] = FakeTensor(fake, empty, torch.device("cpu"))
        made[name].requires_grad_(p.requires_grad)._is_param = True
    return made


def _finished(
    workload: TracedWorkload, micro_batch_size: int, recorder: CallRecorder, loss: Any
) -> Program:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or id(loss) not in recorder.nodes:
        actual = f"of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(
            f"module: the loss of {workload.name} is {actual}, it must be a scalar tensor that "
            "depends on the batch",
            hint="let the function return (module, batch, loss)",
        )
    if not loss.requires_grad:
        raise ConfigError(
            f"module: the loss of {workload.name} depends on no parameter that learns",
            hint="leave requires_grad of some parameters as it is",
        )
    recorder.graph.output(recorder.nodes[id(loss)])
    _drop_unused(recorder.graph)
    return Program(
        workload=workload,
        micro_batch_size=micro_batch_size,
        graph=recorder.graph,
        constants=recorder.constants,
    )


def _drop_unused(graph: fx.Graph) -> None:
    """Removes nodes that nothing reads, except calls that write or draw."""
    for node in reversed(graph.nodes):
        if (
            not node.users
            and node.op in ("call_function", "get_attr")
            and not node.meta.get("written")
            and not node.meta.get("random")
        ):
            graph.erase_node(node)


def _generators() -> tuple[object, ...]:
    """The states of the random generators of Python and numpy.

    The position and the printed part of the keys of numpy's generator change with every draw.
    """
    return random.getstate(), repr(np.random.get_state())


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch's log of calls that fail on fake tensors; their error has the same text."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def _functions_as_calls(recorder: CallRecorder) -> Iterator[None]:
    """Routes torch.autograd.Function.apply, which bypasses __torch_function__, to the recorder."""
    noted = classmethod(lambda kind, *args, **kwargs: recorder.function(kind, args, kwargs))
    torch.autograd.Function.apply = noted  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = APPLY  # type: ignore[method-assign]
