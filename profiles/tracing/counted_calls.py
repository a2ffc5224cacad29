"""Numbers of Python that a forward pass changes for the next one, as a count of calls.

A recording holds the number of its own pass, and every later micro-batch would compute with it.
Such a number is looked for where a module can keep it: in the module, in its class, in the Python
file of its class, and in dicts of these. It is an error where another value of it would record
other calls, so that a count that is only reported stays allowed.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from parplan.profiles.errors import ConfigError
from parplan.profiles.tracing.program import Program
from parplan.profiles.tracing.traced_source import TracedWorkload

_FAR = 1_000_003  # odd and large, so that a count of steps passes every limit and every parity
_LIBRARIES = ("torch", "transformers", "peft", "builtins")

Number = bool | int | float
Place = tuple[str, int, str]  # the name of a holder, the id of what it holds, the key in it


@dataclass(frozen=True, slots=True)
class _Holder:
    """A dict, or a class or file of Python, which keeps numbers under names."""

    name: str
    owner: Any

    def values(self) -> Mapping[str, Any]:
        return self.owner if isinstance(self.owner, dict) else vars(self.owner)

    def put(self, key: str, value: Number) -> None:
        if isinstance(self.owner, dict):
            self.owner[key] = value
        else:
            setattr(self.owner, key, value)


class CountedCalls:
    """The numbers around a module, read before and after its recordings."""

    def __init__(self, workload: TracedWorkload) -> None:
        self._workload = workload
        self._before = self._numbers()

    def check(self, first: Program, record: Callable[[], Program]) -> None:
        """Raises ConfigError for a number that passes change and that the module computes with.

        first    a recording that was made after this object
        record   makes another one, of the same micro-batch size
        """
        once = self._numbers()
        changed = [place for place, value in once.items() if self._before.get(place) != value]
        if not changed:
            return
        again = _calls(record())
        twice = self._numbers()
        counts = [place for place in changed if twice.get(place, once[place]) != once[place]]
        if not counts:
            return
        if again != _calls(first):
            raise self._counts(counts[0])
        for place in counts:
            self._put(place, _far(twice[place]))
            there = _calls(record())
            self._put(place, twice[place])
            if there != again:
                raise self._counts(place)

    def _counts(self, place: Place) -> ConfigError:
        holder, _, key = place
        return ConfigError(
            f"module: {holder}.{key} changes in every forward pass of {self._workload.name}, which "
            "computes with it, and a trace has one value of it",
            hint="count in a buffer: self.register_buffer(..) and self.count.add_(1)",
        )

    def _numbers(self) -> dict[Place, Number]:
        return {
            (holder.name, id(holder.owner), key): value
            for holder in _holders(self._workload.module)
            for key, value in holder.values().items()
            if isinstance(key, str) and isinstance(value, Number)
        }

    def _put(self, place: Place, value: Number) -> None:
        for holder in _holders(self._workload.module):
            if (holder.name, id(holder.owner)) == place[:2]:
                holder.put(place[2], value)
                return


def _holders(module: nn.Module) -> Iterator[_Holder]:
    """Yields what can keep numbers of the module, each once."""
    seen: set[int] = set()
    for holder in _named_holders(module):
        if id(holder.owner) not in seen:
            seen.add(id(holder.owner))
            yield holder
            for key, value in list(holder.values().items()):
                if type(value) is dict and not key.startswith("__") and id(value) not in seen:
                    seen.add(id(value))
                    yield _Holder(f"{holder.name}.{key}", value)


def _named_holders(module: nn.Module) -> Iterator[_Holder]:
    for name, part in module.named_modules():
        yield _Holder(name or type(part).__name__, part.__dict__)
        for kind in type(part).__mro__:
            library = kind.__module__.partition(".")[0]
            if library in _LIBRARIES:
                continue
            yield _Holder(kind.__name__, kind)
            if kind.__module__ in sys.modules:
                yield _Holder(kind.__module__, sys.modules[kind.__module__])


def _far(value: Number) -> Number:
    return not value if isinstance(value, bool) else value + _FAR


def _calls(program: Program) -> list[tuple[str, str]]:
    """Returns the calls of a program with the values of their arguments and of its constants."""
    calls = [
        (str(node.target), repr(fx.node.map_aggregate((node.args, node.kwargs), _value)))
        for node in program.calls
    ]
    return [*calls, *((name, _digest(each)) for name, each in program.constants.items())]


def _value(leaf: Any) -> Any:
    if isinstance(leaf, fx.Node):
        return leaf.name
    return None if isinstance(leaf, Tensor) else leaf


def _digest(constant: Tensor) -> str:
    plain = constant.detach().to_dense().contiguous().reshape(-1)
    return hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).hexdigest()
