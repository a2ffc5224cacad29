"""Finds where in the user's code a call of torch comes from: the module, and file:line."""

from __future__ import annotations

import functools
import os
import sys
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PROJECT = tuple(
    os.path.join(os.path.dirname(os.path.dirname(_HERE.rstrip(os.sep))), part)
    for part in ("profiles", "executor", "cli")
)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_LIBRARY = os.sep + "transformers" + os.sep
_MODELS = _LIBRARY + "models" + os.sep


def line_of_caller() -> str:
    """The file:line of the innermost frame outside torch and transformers' shared code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""


def line_of(trace: TracebackType | None) -> str:
    """The file:line of the innermost user frame of a traceback, "" if there is none."""
    line = ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not _is_machinery(file) and not file.startswith(_PROJECT):
            line = f"{_short(file)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line


@functools.cache
def _short(file: str) -> str:
    """Returns the relative path where that is shorter."""
    return min(file, os.path.relpath(file), key=len)


def _is_machinery(file: str) -> bool:
    if file.startswith((_TORCH, _HERE, "<")):
        return True
    return (_LIBRARY in file and _MODELS not in file) or file.endswith(f"{os.sep}contextlib.py")


class Paths:
    """Tracks the module that runs.

    While entered, `current` is its full name in `module`, "" for the outermost.
    """

    def __init__(self, module: nn.Module) -> None:
        self.names = {id(part): name for name, part in module.named_modules()}
        self.stack = [""]
        self.handles: list[Any] = []

    @property
    def current(self) -> str:
        return self.stack[-1]

    def __enter__(self) -> Paths:
        self.handles = [
            register_module_forward_pre_hook(
                lambda part, _: self.stack.append(self.names.get(id(part), self.current))
            ),
            register_module_forward_hook(
                lambda part, inputs, output: self._leave(), always_call=True
            ),
        ]
        return self

    def _leave(self) -> None:
        self.stack.pop()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self.handles:
            handle.remove()
