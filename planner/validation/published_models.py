"""Shapes that measured rows leave out, from the published configurations of their models.

A row that names a public model and leaves out a part of its shape, or that has experts, is that
model of `plan models`: its experts, attention and unlike layers are those of the published
configuration. The figures of the row go before the published ones: a row of fewer layers is the
model cut to that depth, and any other cell that contradicts the published shape is named.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from parplan.planner.validation.frameworks import PUBLISHED_MODELS
from parplan.planner.validation.row_cells import Row, UnpricedError, whole
from parplan.profiles.models.model_catalog import load_model, model_names
from parplan.profiles.models.spec import ModelSpec, text_alone

TAKEN = "shape of the published model"
_SHAPE = {  # cell -> the field of a spec
    "layers": "num_layers",
    "hidden": "hidden_size",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "vocab": "vocab_size",
    "experts": "num_experts",
    "top_k": "experts_per_token",
    "moe_ffn_hidden": "expert_ffn_hidden_size",
}
# cells that sources of latent attention fill in several ways: its heads have three widths
_OF_HEADS = ("kv_heads", "head_dim")
_CUT = re.compile(r"truncated|_l\d+_")  # a model cell, or an id, of fewer layers than published


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """A row whose shape is complete as far as it is published.

    model      the published model with the figures of the row, None if only the row's cells count
    taken      `TAKEN` where cells were filled
    differing  cells of the row that contradict the published shape
    """

    row: Row
    model: ModelSpec | None = None
    taken: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()


def with_published_shape(row: Row) -> RowShape:
    """Returns the row with the shape of its published model, where it needs one.

    Raises UnpricedError for a public model that `plan models` does not list: the cells of a row do
    not tell its attention and its unlike layers.
    """
    left_out = [cell for cell in ("layers", "hidden", "heads", "vocab") if not row[cell]]
    experts = whole(row, "experts", 1) > 1
    if not left_out and not experts:
        return RowShape(row=row)
    name = published_name(row["model"])
    if name is None:
        return RowShape(row=row)
    if name not in model_names():
        raise UnpricedError(f"plan models does not list {name}")
    return _as_published(row, text_alone(load_model(name).spec))


def published_name(model: str) -> str | None:
    """Returns the name in `plan models` of a model cell, None for a model that is not public."""
    cell = re.sub(r"[ _]", "-", model.lower())
    return next((name for pattern, name in PUBLISHED_MODELS if re.search(pattern, cell)), None)


def _as_published(row: Row, spec: ModelSpec) -> RowShape:
    unstated = _OF_HEADS if spec.latent else ()
    own = {cell: whole(row, cell) for cell in _SHAPE if row.get(cell) and cell not in unstated}
    differing = {
        cell: figure for cell, figure in own.items() if figure != getattr(spec, _SHAPE[cell])
    }
    filled = {
        cell: str(getattr(spec, field)) for cell, field in _SHAPE.items() if not row.get(cell)
    }
    filled |= {"ffn_hidden": row["ffn_hidden"] or str(spec.ffn_hidden_size or 1)}
    changes: dict[str, Any] = {_SHAPE[cell]: figure for cell, figure in differing.items()}
    model = replace(
        spec, max_seq_length=max(spec.max_seq_length, whole(row, "seq_len", 1)), **changes
    )
    contradicting = set(differing)
    if _CUT.search(row["model"]) or _CUT.search(row["id"]):
        contradicting.discard("layers")
    return RowShape(
        row={**row, **filled},
        model=model,
        taken=(TAKEN,) if any(not row.get(cell) for cell in _SHAPE) else (),
        differing=tuple(sorted(contradicting)),
    )
