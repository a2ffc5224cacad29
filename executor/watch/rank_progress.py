"""How far a rank is: written by the thread that trains, by assignments alone, and read by the one
that watches.
"""

from __future__ import annotations


class RankProgress:
    """The step and micro-batch that a rank is in, from 0, and what it does there. `moves` counts
    the changes.
    """

    __slots__ = ("doing", "micro_batch", "moves", "step")

    def __init__(self) -> None:
        self.moves = 0
        self.step = -1
        self.micro_batch = 0
        self.doing = "starts"

    def begin_step(self, step: int) -> None:
        self.step = step
        self.micro_batch = 0
        self.at("reads its batch")

    def end_micro_batch(self) -> None:
        """A backward pass is over."""
        self.micro_batch += 1
        self.moves += 1

    def moved(self) -> None:
        """A part of what it does is done."""
        self.moves += 1

    def at(self, doing: str) -> None:
        """`doing` starts with "waits" where it waits for others."""
        self.doing = doing
        self.moves += 1
