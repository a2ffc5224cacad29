"""A family of models: one architecture at several sizes, smallest first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from parplan.profiles.documents.schema import parse
from parplan.profiles.errors import ConfigError
from parplan.profiles.models.spec import ModelEntry, ModelSpec, Norm, Positions

_FORBID = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """The fields that all members have in common.

    The heads divide the hidden size evenly, and the feed-forward network is 4 times as wide.
    """

    __pydantic_config__ = _FORBID

    vocab_size: int
    max_seq_length: int
    norm: Norm
    positions: Positions
    dropout: float
    tied_embeddings: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    __pydantic_config__ = _FORBID

    hidden_size: int
    num_layers: int
    num_heads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Training:
    __pydantic_config__ = _FORBID

    global_batch_size: int
    seq_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _FamilyDocument:
    __pydantic_config__ = _FORBID

    name: str
    model: _Shared
    members: Mapping[str, _Shape]
    training: _Training
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A family with its members, smallest first; a member is named `<family>-<member>`."""

    name: str
    members: tuple[ModelEntry, ...]

    def of_width(self, hidden_size: int, num_layers: int) -> ModelEntry:
        """Returns a model of the family's architecture with the given width and number of blocks.

        Its heads are those of the member whose width is nearest. Raises ConfigError where they do
        not divide the width.
        """
        nearest = min(self.members, key=lambda entry: abs(entry.spec.hidden_size - hidden_size))
        shape = _Shape(
            hidden_size=hidden_size, num_layers=num_layers, num_heads=nearest.spec.num_heads
        )
        return _resized(nearest, f"{self.name}-h{hidden_size}-l{num_layers}", shape)


def parse_family(document: object, where: str) -> ModelFamily:
    """Returns the family that a file describes. Raises ConfigError with the key's path."""
    body = parse(_FamilyDocument, document, where)
    if not body.members:
        raise ConfigError(
            f"{where}: members is empty, a family has at least one", hint="add a member"
        )
    members = tuple(_member(body, label, shape, where) for label, shape in body.members.items())
    for smaller, larger in pairwise(members):
        if _size(larger.spec) <= _size(smaller.spec):
            raise ConfigError(
                f"{where}: members: {larger.spec.name} is not larger than {smaller.spec.name} "
                "before it",
                hint="order them by size",
            )
    return ModelFamily(name=body.name, members=members)


def _size(spec: ModelSpec) -> int:
    """Returns a number in proportion to the parameters of the blocks."""
    return spec.num_layers * spec.hidden_size**2


def _member(body: _FamilyDocument, label: str, shape: _Shape, where: str) -> ModelEntry:
    shared = {field: getattr(body.model, field) for field in _Shared.__slots__}
    training = body.training
    return ModelEntry(
        spec=_spec(f"{body.name}-{label}", shape, f"{where}: members.{label}", **shared),
        global_batch_size=training.global_batch_size,
        seq_length=training.seq_length,
        source=body.source,
    )


def _resized(like: ModelEntry, name: str, shape: _Shape) -> ModelEntry:
    shared = {field: getattr(like.spec, field) for field in _Shared.__slots__}
    return ModelEntry(
        spec=_spec(name, shape, name, **shared),
        global_batch_size=like.global_batch_size,
        seq_length=like.seq_length,
        source=like.source,
    )


def _spec(name: str, shape: _Shape, where: str, **shared: Any) -> ModelSpec:
    hidden = shape.hidden_size
    heads = shape.num_heads
    if heads < 1 or hidden % heads:
        raise ConfigError(
            f"{where}: the hidden size {hidden} is not a multiple of the {heads} heads",
            hint="choose another width",
        )
    return ModelSpec(
        name=name,
        num_layers=shape.num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_hidden_size=4 * hidden,
        **shared,
    )
