"""Stand-in."""

from __future__ import annotations

from parplan.profiles.divisors import divisors
from parplan.profiles.stack import ContextForm


def ranks_with_heads(
    form: ContextForm | None, cp: int, tp: int, heads: int, gpus_per_node: int
) -> int | None:
    """Returns the neighbours among `cp` ranks that exchange tokens for heads, None if illegal."""
    if form in (None, ContextForm.RING, ContextForm.ALL_GATHER):
        return 1
    local = heads // tp
    if form is ContextForm.ALL_TO_ALL:
        return cp if local % cp == 0 else None
    near = [a for a in divisors(cp)[1:-1] if local % a == 0 and a * tp <= gpus_per_node]
    return max(near, default=None)
