"""Products in a narrow format in words: the bytes that they keep and gather (EQUATIONS M8)."""

from __future__ import annotations

from collections.abc import Iterator

from parplan.costmodels.layers.narrow_products import narrow_weights
from parplan.profiles.models.spec import TrainingSpec
from parplan.profiles.product_formats import FORMATS


def format_notes(training: TrainingSpec, capability: float | None) -> Iterator[str]:
    """Yields a sentence on the bytes of narrow products, nothing where there are none.

    capability: the compute capability of the device
    """
    weights = narrow_weights(training, capability)
    if training.products is None or weights is None:
        return
    width = training.precision.num_bytes
    row, keeps = FORMATS[training.products], training.stack.keeps_casts
    kept = f"{row.element_bytes:.3g}" if keeps else f"{width}"
    beside = f" and {weights.casts:.3g} of its casts" if weights.casts else ""
    held = (
        f"{weights.weight:.3g} of a weight{beside}"
        if weights.weight
        else (f"{weights.casts:.3g} of the casts of a weight, which replace it")
    )
    yield (
        f"{training.products} products as {training.stack.name} runs them, in bytes of an element: "
        f"{kept} of an input until the backward pass, {held}, {weights.gathered:.3g} where ranks "
        "gather a weight"
    )
