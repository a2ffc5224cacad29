"""The progress of a rank.

The training thread writes it by assignments alone, and the watching thread reads it.
"""

from __future__ import annotations


class RankProgress:
    """The step and micro-batch that a rank is in, from 0, and its current activity.

    `moves` counts the changes.
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
        """Note the end of a backward pass."""
        self.micro_batch += 1
        self.moves += 1

    def moved(self) -> None:
        """Note that a part of the activity is done."""
        self.moves += 1

    def at(self, doing: str) -> None:
        """Set the activity; `doing` starts with "waits" if the rank waits for other ranks."""
        self.doing = doing
        self.moves += 1
