"""The parts of a plan file that no search tries, and that no gap covers.

`--explain` lists them beside the candidates that were pruned.
"""

from __future__ import annotations

from dataclasses import dataclass

from parplan.planner.host_options.state_locations import has_chunks
from parplan.planner.request import Constraints
from parplan.profiles.stack import NEUTRAL, Stack


@dataclass(frozen=True, slots=True)
class UnsearchedPart:
    """A part of a plan file that is not searched, with the reason."""

    what: str
    reason: str


_ALWAYS = (
    UnsearchedPart(
        "recompute under zero-bubble V and DualPipeV",
        "schedules that split backward passes run without recompute",
    ),
    UnsearchedPart(
        "ZeRO 3 under zero-bubble V and DualPipeV",
        "it frees what a split backward pass still needs",
    ),
    UnsearchedPart(
        "ZeRO 3 under early recompute and the shifted critical path",
        "its gather for a recompute ahead of the gradient has no price",
    ),
    UnsearchedPart(
        "interleaved 1F1B with unequal virtual stages",
        "each holds as many blocks, but for one less on the first and the last",
    ),
    UnsearchedPart(
        "blocks of one stage whose weights are divided in different ways",
        "a stage has one layout of the weights",
    ),
    UnsearchedPart("different ZeRO stages of embedding and head on one rank", "they have one"),
    UnsearchedPart(
        "other divisions of a head with modules that predict further tokens",
        "they look tokens up in one table, which Megatron's way divides",
    ),
)
_UNLIKE = (
    UnsearchedPart(
        "a tower that every tensor-parallel rank repeats where they can divide its images",
        "it computes as often as there are ranks",
    ),
    UnsearchedPart(
        "different ZeRO stages of the layers of one pipeline rank",
        "where blocks are of several classes a rank has one",
    ),
    UnsearchedPart(
        "weights that tensor parallelism leaves whole, and other divisions of embedding and head",
        "blocks of several classes divide the weights that Megatron divides, and all operators of "
        "a model with experts as Megatron does",
    ),
    UnsearchedPart(
        "other recompute lists",
        "a class of blocks with more than eight has those on the hull of time and saved bytes",
    ),
    UnsearchedPart(
        "several virtual stages of other lengths than equal ones",
        "blocks that equal stages leave over are on the stages in the middle",
    ),
    UnsearchedPart(
        "a part of the states, activations or the token table on the host",
        "where blocks are of several classes the states of all layers are there, or none",
    ),
    UnsearchedPart(
        "sub-pipelined tensor parallelism, and weights over the data-parallel ranks",
        "they are searched where blocks are alike",
    ),
)
_OVER_POOLS = (
    UnsearchedPart("pools with idle GPUs, or none of their GPUs", "a plan over pools uses all"),
    UnsearchedPart("stages of one pool apart from each other", "they are neighbours"),
    UnsearchedPart(
        "anything on the host, and weights over the data-parallel ranks",
        "they are searched on equal nodes",
    ),
)
HOST_WHERE_NEEDED = UnsearchedPart(
    "the host, where something fits without it", "--host-memory or --offload asks for it"
)

ORDERS_IN_CHUNKS = UnsearchedPart(
    "other orders of a rank's blocks in chunks",
    "those with the largest workspace come first, which takes the least memory",
)
OPERATORS_WHERE_NEEDED = UnsearchedPart(
    "blocks in chunks that are used an operator at a time, where something fits by blocks",
    "--chunk-access block,operator asks for both",
)


def unsearched_parts(
    pins: Constraints, stack: Stack = NEUTRAL, *, unlike: bool = False, pools: bool = False
) -> tuple[UnsearchedPart, ...]:
    """Returns the parts that a search within `pins` leaves out, for the abilities of the stack.

    unlike    the blocks of the model are of several classes
    pools     the cluster has unequal pools
    """
    parts = [*_ALWAYS, *(_UNLIKE if unlike else ()), *(_OVER_POOLS if pools else ())]
    if "operators" not in stack.recompute:
        parts.append(
            UnsearchedPart(
                "recompute of any list of operators",
                f"{stack.name} runs {', '.join(stack.recompute)}",
            )
        )
    if "last-no-recompute" not in (pins.schedule or ()):
        parts.append(
            UnsearchedPart(
                "last-no-recompute",
                "early recompute has its plans and takes at most one recompute longer; "
                "--schedule last-no-recompute",
            )
        )
    if "dualpipev" in stack.schedules and "dualpipev" not in (pins.schedule or ()):
        parts.append(
            UnsearchedPart(
                "DualPipeV",
                "zero-bubble V idles as long where the parts of a pass are equal; "
                "--schedule dualpipev",
            )
        )
    if pins.tp_overlap is None and not unlike:
        parts.append(
            UnsearchedPart(
                "sub-pipelined tensor parallelism that the stack does not run",
                "--tp-overlap asks for it",
            )
        )
    if pins.recompute_first_stage is not None:
        parts.append(
            UnsearchedPart(
                "blocks of one stage that recompute alike with other ZeRO stages or divisions",
                "under --recompute-first-stage they are alike",
            )
        )
    if not pins.zero_by_operator:
        asks = (
            "they are searched where blocks are alike"
            if unlike
            else "--zero-by-operator asks for them"
        )
        parts.append(UnsearchedPart("two ZeRO stages in one block", asks))
    if pins.zero_ranks is None:
        parts.append(
            UnsearchedPart(
                "states sharded over some of the data-parallel ranks", "--zero-ranks asks for it"
            )
        )
    if pins.offload is None:
        parts.append(HOST_WHERE_NEEDED)
    if not pools and (pins.offload is None or has_chunks(pins.offload)):
        parts.append(ORDERS_IN_CHUNKS)
    if has_chunks(pins.offload) and pins.access is None:
        parts.append(OPERATORS_WHERE_NEEDED)
    return tuple(parts)
