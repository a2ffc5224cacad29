"""Recursive halving: ranks and blocks are divided in two until each part is one rank.

It is the shape of recursive partitioning (Wang et al. 2019, Tofu, arXiv 1807.08887, section 5),
applied to the stages of a pipeline. A division is never looked at again, so that it takes few
steps and may miss the best.
"""

from __future__ import annotations

from math import inf
from random import Random

from parplan.planner.search_methods.dynamic_program import RankChoice, RankTable, by_stages
from parplan.planner.search_methods.ledger import Ledger

NEAR = 3  # blocks around the equal division that are tried


def recursive_halving(ledger: Ledger, draw: Random) -> None:
    """Halves the pipeline of every promising layout."""
    by_stages(ledger, halved)


def halved(tables: list[RankTable], num_blocks: int) -> list[RankChoice]:
    """Returns a choice for each rank, from halves whose slower half is fastest; or none."""
    if len(tables) == 1:
        choice = tables[0].get(num_blocks)
        return [choice] if choice else []
    half = len(tables) // 2
    first, second = tables[:half], tables[half:]
    equal = round(num_blocks * half / len(tables))
    number = min(
        range(max(0, equal - NEAR), equal + NEAR + 1),
        key=lambda blocks: max(slowest_s(first, blocks), slowest_s(second, num_blocks - blocks)),
    )
    left, right = halved(first, number), halved(second, num_blocks - number)
    return [*left, *right] if left and right else []


def slowest_s(tables: list[RankTable], num_blocks: int) -> float:
    """Cost of the slowest rank if the ranks hold equally many blocks, the later ones the fewer."""
    share, more = divmod(num_blocks, len(tables))
    costs = []
    for rank, table in enumerate(tables):
        choice = table.get(share + (rank < more)) or table.get(share)
        costs.append(choice.cost_s if choice else inf)
    return max(costs)
