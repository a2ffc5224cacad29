"""Mixes: the numbers of a rank's blocks that run on each option of the catalogue.

The price of a rank is a sum over its blocks, so a mix is a tuple of counts. With few options every
tuple is tried. With many, a rank takes at most two options with the same layout of the weights,
which may differ in recompute, in ZeRO stage, or in both. The linear relaxation takes two for one
memory limit as well, so that only its fraction of a block is lost. The relaxation itself is the
bound of that loss.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, combinations_with_replacement, pairwise, permutations
from typing import Any

import numpy as np

from parplan.planner.dominance import Array, Ints, lower_hull, new_lows, undominated_rows
from parplan.planner.layer_options.layer_option import LayerOption

_BY_ROW = (
    "counts",
    "chunk_counts",
    "saved_bytes",
    "ideal_saved_bytes",
    "workspace_bytes",
    "host_bytes",
    "window_bytes",
    "last_s",
)
# of numbers of blocks: a rank may have a hundred thousand mixes of a hundred options
COUNTS: np.dtype[np.signedinteger[Any]] = np.dtype(np.int32)
MOST_TUPLES = 2000  # up to which every tuple of counts is tried
NEAR = 2  # the options of a mix are neighbours on a hull, or have a single option between them
MOST_PRICES = 6  # of an offloaded byte, at which the relaxation of offloading options is solved


@dataclass(frozen=True, slots=True)
class Mixes:
    """Mixes of the blocks of one rank, one a row.

    counts                           by row and option, the blocks of the rank
    chunk_counts                     by row and option, the blocks of its longest model chunk
    saved_bytes, ideal_saved_bytes   of a micro-batch of the longest chunk
    workspace_bytes                  the largest of the options in use
    host_bytes                       offloaded bytes of a micro-batch, of the longest chunk
    window_bytes                     bytes that copies of other blocks to and from the host may hold
                                     beside a running layer
    last_s                           extra wait of each chunk's last offloading block, summed over
                                     chunks
    """

    options: tuple[LayerOption, ...]
    counts: Ints
    chunk_counts: Ints
    saved_bytes: Array
    ideal_saved_bytes: Array
    workspace_bytes: Array
    host_bytes: Array
    window_bytes: Array
    last_s: Array

    def at(self, rows: Ints) -> Mixes:
        """Returns some of the mixes."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _BY_ROW})


def column_of(options: Sequence[object], name: str) -> Array:
    """Returns one attribute of every option as an array."""
    return np.array([float(getattr(option, name)) for option in options])


@dataclass(frozen=True, slots=True)
class OptionPairs:
    """Pairs of options, of which a rank runs any share each.

    index             by side and pair, the number of the option
    saved_bytes       of one block, by side and pair
    workspace_bytes   the larger of the pair, with the larger window of copies to the host
    """

    index: Ints
    saved_bytes: Array
    workspace_bytes: Array

    def at(self, rows: Ints) -> OptionPairs:
        """Returns some of the pairs."""
        return OptionPairs(
            self.index[:, rows], self.saved_bytes[:, rows], self.workspace_bytes[rows]
        )


def option_pairs(options: tuple[LayerOption, ...]) -> OptionPairs:
    """Returns every ordered pair of options, including an option with itself."""
    count = len(options)
    index = np.stack(np.meshgrid(np.arange(count), np.arange(count), indexing="ij")).reshape(2, -1)
    workspace = sum(
        column_of(options, name)[index].max(axis=0) for name in ("workspace_bytes", "host_bytes")
    )
    return OptionPairs(index, column_of(options, "saved_bytes")[index], workspace)


def make_mixes(options: tuple[LayerOption, ...], num_blocks: int, num_chunks: int) -> Mixes:
    """Returns all mixes of `num_blocks` blocks at one ZeRO stage that no other beats.

    With several model chunks every chunk has the same mix.
    """
    pairs = [
        (i, j)
        for i, j in combinations(hull_options(options), 2)
        if options[i].weight_layout == options[j].weight_layout
    ]
    mixes = _mixes(
        options, _tuples(options, -(-num_blocks // num_chunks), pairs), num_blocks, num_chunks
    )
    rows = _worth_it(mixes, mixes.counts @ column_of(options, "time_s") + mixes.last_s)
    return mixes.at(rows)


def near_mixes(
    options: tuple[LayerOption, ...],
    chains: Sequence[Sequence[int]],
    num_blocks: int,
    num_chunks: int,
) -> Mixes:
    """Returns mixes of `num_blocks` blocks whose options may differ in ZeRO stage.

    A mix has a single option, or two that are near each other on one of `chains`. With several
    model chunks every chunk has the same mix, or the two options differ in their ZeRO stage alone:
    states add up over the chunks of a rank, so any number of its blocks may be on the second.
    """
    pairs = sorted(
        {
            (i, j)
            for chain in chains
            for a, i in enumerate(chain)
            for j in chain[a + 1 : a + 1 + NEAR]
        }
    )
    mixes = _mixes(
        options, _tuples(options, -(-num_blocks // num_chunks), pairs), num_blocks, num_chunks
    )
    if num_chunks == 1:
        return mixes
    if all_tried(options, num_blocks, num_chunks):
        return _spread(options, _tuples(options, num_blocks, ()), num_blocks, num_chunks)
    spread = [(i, j) for i, j in pairs if _same_but_zero(options[i], options[j])]
    whole = np.concatenate(
        [np.zeros((0, len(options)), COUNTS), *_of_pairs(len(options), num_blocks, spread)]
    )
    return _joined(mixes, _spread(options, whole, num_blocks, num_chunks))


def staged_mixes(options: tuple[LayerOption, ...], num_blocks: int, counts: range) -> Mixes:
    """Returns mixes with `counts` recomputed blocks, of one model chunk.

    The recomputed blocks have one option, and the others have one with the same layout of the
    weights. All counts of one pair of options follow one another.
    """
    kept = [i for i, option in enumerate(options) if not option.recompute]
    again = [i for i, option in enumerate(options) if option.recompute]
    if counts.stop == 1 or counts.start == num_blocks:
        pairs = [(i, i) for i in (kept if counts.stop == 1 else again)]
    else:
        pairs = [
            (i, j)
            for i in kept
            for j in again
            if options[i].weight_layout == options[j].weight_layout
        ]
    whole = np.zeros((len(pairs), len(counts), len(options)), COUNTS)
    for row, (i, j) in enumerate(pairs):
        whole[row, :, i] = num_blocks - np.array(counts)
        whole[row, :, j] += np.array(counts)
    return _mixes(options, whole.reshape(-1, len(options)), num_blocks, 1)


def all_tried(options: Sequence[LayerOption], num_blocks: int, num_chunks: int) -> bool:
    """Returns whether `near_mixes` has every choice of an option for each block.

    With several chunks that holds only where the options differ in nothing but their ZeRO stage.
    """
    return exhaustive(options, num_blocks) and (
        num_chunks == 1 or all(_same_but_zero(options[0], option) for option in options)
    )


def one_way_of_running(options: Sequence[LayerOption], num_blocks: int, num_chunks: int) -> bool:
    """Returns whether blocks that differ in more than their ZeRO stage gain nothing.

    Chunks of at most one block take as much memory as the one that saves most. So all of them may
    run as the fastest of them does, which is among those in use: it saves no more, and has no
    larger workspace. The seconds of data parallelism, and the states, depend on the ZeRO stage
    alone where all options have one sharding.
    """
    return (
        1 < num_chunks >= num_blocks
        and len({option.sharding for option in options}) == 1
        and not any(option.on_host or option.own_zero for option in options)
    )


def by_way_of_running(options: Sequence[LayerOption]) -> Ints:
    """Returns by option a number that options have in common which differ in ZeRO stage alone."""
    ways = [(option.recompute, option.sharding, option.on_host) for option in options]
    numbers = {way: number for number, way in enumerate(dict.fromkeys(ways))}
    return np.array([numbers[way] for way in ways], np.int64)


def _same_but_zero(first: LayerOption, second: LayerOption) -> bool:
    return (first.recompute, first.sharding, first.on_host) == (
        second.recompute,
        second.sharding,
        second.on_host,
    )


def _spread(
    options: tuple[LayerOption, ...], whole: Ints, num_blocks: int, num_chunks: int
) -> Mixes:
    """Returns mixes with any counts over the chunks, of options that save the same bytes."""
    chunk = np.zeros_like(whole)  # the longest chunk counts as of the first option in use
    chunk[np.arange(len(whole)), (whole > 0).argmax(axis=1)] = -(-num_blocks // num_chunks)
    return _summed(options, whole, chunk, num_chunks)


def _joined(first: Mixes, second: Mixes) -> Mixes:
    rows = {name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in _BY_ROW}
    return Mixes(options=first.options, **rows)


def pure_mixes(options: tuple[LayerOption, ...], num_blocks: int, num_chunks: int) -> Mixes:
    """Returns one mix for each option, with all blocks on it."""
    return _mixes(
        options,
        -(-num_blocks // num_chunks) * np.eye(len(options), dtype=COUNTS),
        num_blocks,
        num_chunks,
    )


def lean_mixes(options: tuple[LayerOption, ...], num_blocks: int, num_chunks: int) -> Mixes:
    """Returns the pure mixes, and those whose last block of a chunk saves more and needs less.

    The leanest mix is among them, whatever the order of its blocks.
    """
    total, some = -(-num_blocks // num_chunks), np.eye(len(options), dtype=COUNTS)
    narrow = undominated_rows(
        column_of(options, "saved_bytes"), column_of(options, "workspace_bytes")
    )
    pairs = [(total - 1) * some[i] + some[j] for i, j in permutations(narrow, 2) if total > 1]
    return _mixes(options, np.array([*(total * some), *pairs], COUNTS), num_blocks, num_chunks)


def _mixes(
    options: tuple[LayerOption, ...], chunk: Ints, num_blocks: int, num_chunks: int
) -> Mixes:
    counts = chunk if num_chunks == 1 else chunk * num_chunks
    if num_blocks % num_chunks:  # the shorter chunk lacks a block of its last option
        last = chunk.shape[1] - 1 - (chunk[:, ::-1] > 0).argmax(axis=1)
        counts[np.arange(len(counts)), last] -= 1
    return _summed(options, counts, chunk, num_chunks)


def _summed(options: tuple[LayerOption, ...], counts: Ints, chunk: Ints, num_chunks: int) -> Mixes:
    names = ("saved_bytes", "ideal_saved_bytes", "host_bytes")
    saved, ideal_saved, host = (
        chunk.astype(np.float64) @ np.stack([column_of(options, name) for name in names], axis=1)
    ).T
    sends = bool(host.any())
    return Mixes(
        options=options,
        counts=counts,
        chunk_counts=chunk,
        saved_bytes=saved,
        ideal_saved_bytes=ideal_saved,
        host_bytes=host,
        workspace_bytes=widest_mixes(chunk, column_of(options, "workspace_bytes")),
        window_bytes=widest_mixes(chunk, column_of(options, "host_bytes"))
        if sends
        else np.zeros(len(chunk)),
        last_s=num_chunks * _of_the_last(options, chunk) if sends else np.zeros(len(chunk)),
    )


def _of_the_last(options: Sequence[LayerOption], counts: Ints) -> Array:
    """Returns by row the `last_s` of the last offloading option, whose blocks come last."""
    sends = (counts > 0) & (column_of(options, "host_bytes") > 0)
    last = counts.shape[1] - 1 - sends[:, ::-1].argmax(axis=1)
    waits_s: Array = np.where(sends.any(axis=1), column_of(options, "last_s")[last], 0.0)
    return waits_s


def widest_mixes(counts: Ints, values: Array) -> Array:
    """Returns by row the largest value of an option that is in use."""
    widest: Array = np.where(counts > 0, values, -np.inf).max(axis=1, initial=-np.inf)
    return widest


def _tuples(options: tuple[LayerOption, ...], total: int, pairs: Sequence[tuple[int, int]]) -> Ints:
    if exhaustive(options, total):
        return np.array(list(_every_tuple(len(options), total)), COUNTS).reshape(-1, len(options))
    return np.concatenate(
        [total * np.eye(len(options), dtype=COUNTS), *_of_pairs(len(options), total, pairs)]
    )


def exhaustive(options: Sequence[LayerOption], total: int) -> bool:
    """Returns whether every tuple of counts of `total` blocks is tried."""
    return math.comb(total + len(options) - 1, len(options) - 1) <= MOST_TUPLES


def _every_tuple(num_options: int, total: int) -> Iterator[list[int]]:
    """Yields every tuple of counts that adds up to `total`."""
    for chosen in combinations_with_replacement(range(num_options), total):
        counts = [0] * num_options
        for index in chosen:
            counts[index] += 1
        yield counts


def _of_pairs(num_options: int, total: int, pairs: Sequence[tuple[int, int]]) -> Iterator[Ints]:
    """Yields for every pair the counts with `total` - 1 to 1 blocks on its first option."""
    first = np.arange(1, total)
    for i, j in pairs:
        counts = np.zeros((total - 1, num_options), COUNTS)
        counts[:, i], counts[:, j] = first, total - first
        yield counts


def hull_options(options: Sequence[LayerOption]) -> list[int]:
    """Returns the options on one of the `chains` of (time, saved bytes).

    The workspace needs no hull: it consists of the recomputed bytes, which are not saved. Offloaded
    bytes also have a window.
    """
    all_chains = chains(options, column_of(options, "time_s"), column_of(options, "saved_bytes"))
    return sorted({index for chain in all_chains for index in chain})


def averaged_options(options: Sequence[LayerOption]) -> dict[int, float]:
    """Returns the options that an average of blocks may need, each with a least workspace.

    Options with one sharding and one ZeRO stage differ in their recompute alone. Of these the lower
    hulls of seconds against saved bytes, and against redundant ones, stay. An average of two
    options on a hull takes no longer and saves no more than any option above it. Where that option
    has the smaller workspace, both count with it: the average is then a bound of it.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, option in enumerate(options):
        key = option.sharding, option.zero, option.own_zero, option.on_host
        alike.setdefault(key, []).append(i)
    least = {i: option.workspace_bytes for i, option in enumerate(options)}
    kept: set[int] = set()
    for some in alike.values():
        lean = lower_hull((options[i].time_s, options[i].redundant_bytes, i) for i in some)
        on_hull = _lower_hull(options, some)
        kept.update(lean, on_hull)
        saved = [-options[i].saved_bytes for i in on_hull]
        for i in set(some).difference(lean, on_hull):
            place = bisect_left(saved, -options[i].saved_bytes)
            for j in on_hull[max(0, place - 1) : place + 1]:
                least[j] = min(least[j], options[i].workspace_bytes)
    return {i: least[i] for i in sorted(kept)}


def chains(options: Sequence[LayerOption], seconds: Array, held: Array) -> list[list[int]]:
    """Returns lower convex hulls of (seconds, held bytes) of a block.

    For each layout of the weights and each limit on the ZeRO stage there are two hulls: that of all
    options, and that of the options without offload. A limit on the ZeRO stage has its own hull
    because the buffers of a higher stage are a maximum over blocks, not a sum.
    """
    distinct: dict[tuple[int, ...], None] = {}
    for weight_layout in dict.fromkeys(option.weight_layout for option in options):
        for most in sorted({option.highest_zero for option in options}):
            allowed = [
                i
                for i, option in enumerate(options)
                if option.weight_layout == weight_layout and option.highest_zero <= most
            ]
            for some in (allowed, [i for i in allowed if not options[i].on_host]):
                points = ((float(seconds[i]), float(held[i]), i) for i in some)
                distinct[tuple(lower_hull(points))] = None
    return [list(chain) for chain in distinct if chain]


def _lower_hull(options: Sequence[LayerOption], indices: Sequence[int]) -> list[int]:
    """Returns the indices on the lower hull of (time, saved bytes), by increasing time."""
    return lower_hull((options[i].time_s, options[i].saved_bytes, i) for i in indices)


@dataclass(frozen=True, slots=True)
class MixHulls:
    """Lower convex hulls of saved bytes and seconds of a block, for fractional mixes.

    There is a hull for each price of an offloaded byte and each workspace, as the lines along its
    sides.

    kept             by price and workspace, the least saved bytes
    first_s, slope   by price, workspace and side, the line at the least saved bytes
    """

    prices: Array
    workspace: Array
    kept: Array
    first_s: Array
    slope: Array

    def least_s(self, room: Array, in_flight: float, freed: float) -> Array:
        """Returns the least seconds of a block by price and `room`, infinity where none fits.

        The saved bytes of `in_flight` blocks must fit beside the least workspace. Without those of
        `freed` blocks, which other blocks may free before, they must fit beside any workspace.
        """
        each = (room - self.workspace[:, :1, None]) / in_flight
        beside = room - self.workspace[:, :, None]
        kept = in_flight - freed
        each = np.minimum(each, beside / kept if kept > 0 else np.where(beside < 0, -1.0, np.inf))
        beyond = each - self.kept[:, :, None]
        block_s = self.first_s[:, :, 0, None] + self.slope[:, :, 0, None] * beyond
        for side in range(1, self.slope.shape[2]):
            block_s = np.maximum(
                block_s, self.first_s[:, :, side, None] + self.slope[:, :, side, None] * beyond
            )
        least: Array = np.where(beyond >= 0, block_s, np.inf).min(axis=1)
        return least


def hulls(options: Sequence[LayerOption]) -> MixHulls:
    """Returns the convex hulls of time against saved bytes, by workspace limit and host-byte price.

    The offloaded bytes of an option count twice besides: as workspace, and at the price as seconds.
    """
    prices = sent_prices(options)
    by_price = [_hulls(options, price) for price in prices]
    most = max(map(len, by_price))
    sides = max(len(kept) for corners in by_price for _, kept, _ in corners)
    shape = len(prices), most
    made = MixHulls(
        np.array(prices),
        np.zeros(shape),
        np.zeros(shape),
        np.full((*shape, sides), -np.inf),
        np.zeros((*shape, sides)),
    )
    for i, corners in enumerate(by_price):
        for j, (workspace, kept, time_s) in enumerate(
            corners + corners[-1:] * (most - len(corners))
        ):
            made.workspace[i, j] = workspace
            made.kept[i, j] = kept[0]
            slope = np.append(np.diff(time_s) / np.diff(kept), 0.0)
            made.slope[i, j, : len(kept)] = slope
            made.first_s[i, j, : len(kept)] = time_s - slope * (kept - kept[0])
    return made


def _hulls(
    options: Sequence[LayerOption], sent_s_per_byte: float
) -> list[tuple[float, Array, Array]]:
    """Returns the saved bytes and seconds of the hull corners, by workspace, where they are new."""
    corners: list[tuple[float, Array, Array]] = []
    needs = [option.workspace_bytes + option.host_bytes for option in options]
    values_s = [option.time_s + sent_s_per_byte * option.host_bytes for option in options]
    for workspace in sorted(set(needs)):
        chain = lower_hull(
            (values_s[i], option.saved_bytes, i)
            for i, option in enumerate(options)
            if needs[i] <= workspace
        )[::-1]
        kept = np.array([float(options[i].saved_bytes) for i in chain])
        time_s = np.array([values_s[i] for i in chain])
        if not corners or not (
            np.array_equal(kept, corners[-1][1]) and np.array_equal(time_s, corners[-1][2])
        ):
            corners.append((workspace, kept, time_s))
    return corners


def sent_prices(options: Sequence[LayerOption]) -> tuple[float, ...]:
    """Returns prices of an offloaded byte in seconds: zero, and slopes of the hull without offload.

    A slope is the time that options without offload take to save one byte less on the device.
    """
    if not any(option.on_host for option in options):
        return (0.0,)
    chain = [
        options[i]
        for i in _lower_hull(options, [i for i, option in enumerate(options) if not option.on_host])
    ]
    slopes = sorted(
        {
            (slower.time_s - faster.time_s) / (faster.saved_bytes - slower.saved_bytes)
            for faster, slower in pairwise(chain)
        }
    )
    return (0.0, *slopes[:: max(1, -(-len(slopes) // MOST_PRICES))])


def _worth_it(mixes: Mixes, time_s: Array) -> Ints:
    """Returns rows that no other beats in time and saved bytes, or time and redundant bytes."""
    numbers = {
        weight_layout: n
        for n, weight_layout in enumerate(
            dict.fromkeys(option.weight_layout for option in mixes.options)
        )
    }
    weight_layout = (mixes.chunk_counts > 0) @ np.array(
        [2 ** numbers[option.weight_layout] for option in mixes.options]
    )
    _, group = np.unique(
        np.stack([weight_layout.astype(float), mixes.workspace_bytes, mixes.window_bytes]),
        axis=1,
        return_inverse=True,
    )
    kept = np.zeros(len(time_s), np.bool_)
    for held in (mixes.saved_bytes, mixes.saved_bytes - mixes.ideal_saved_bytes):
        kept[skyline(group.ravel(), time_s, held)] = True
    return np.flatnonzero(kept)


def skyline(group: Ints, time_s: Array, held: Array) -> Ints:
    """Returns, by group, the rows whose `held` is below that of all faster rows."""
    order = np.lexsort((held, time_s, group))
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    kept = []
    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        rows = order[start:end]
        kept.append(rows[new_lows(held[rows])])
    return np.concatenate(kept)
