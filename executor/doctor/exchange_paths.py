"""Groups of ranks on GPUs: collectives, batched exchanges, objects and clocks."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from parplan.executor.context.carriers import Ring
from parplan.executor.doctor.path import (
    Checked,
    GpuPath,
    Place,
    RefusedError,
    WrongError,
    require_close,
    require_on,
)
from parplan.executor.pools.joined_ranks import JoinedRanks, PoolPlace
from parplan.executor.sharding.zero_units import all_reduce
from parplan.executor.tensors import GATHER, SCATTER
from parplan.executor.training.muon import _all_to_all
from parplan.executor.watch.run_recorder import environment, read_clock
from parplan.profiles.profiler.communication.collective_timing import elapsed_s
from parplan.profiles.profiler.gpus import backend_of, device_of

ELEMENTS = 1 << 16
TIMED_ELEMENTS = 1 << 22
CALLS = 10
LIMIT_S = 30.0
CLOSE_TIMES = 0.25  # relative difference of events and the host's clock


def collectives(place: Place) -> Checked:
    """Compares every kind of collective with what it must give."""
    own = place.normal(ELEMENTS, seed=place.rank).to(place.device)
    everyone = [place.normal(ELEMENTS, seed=rank) for rank in range(place.world)]
    total = torch.stack(everyone).sum(0)
    summed = own.clone()
    dist.all_reduce(summed)
    require_close("an all-reduce", summed, total, 1e-5)
    gathered = own.new_empty(place.world * ELEMENTS)
    GATHER(gathered, own)
    require_close("an all-gather", gathered, torch.cat(everyone), 0.0)
    scattered = own.new_empty(ELEMENTS)
    SCATTER(scattered, own.repeat(place.world))
    require_close("a reduce-scatter", scattered, total, 1e-5)
    shares = [
        ELEMENTS // place.world + (rank < ELEMENTS % place.world) for rank in range(place.world)
    ]
    arrived = own.new_empty(place.world * shares[place.rank])
    dist.all_to_all_single(arrived, own, [shares[place.rank]] * place.world, shares)
    first = sum(shares[: place.rank])
    parts = [each[first : first + shares[place.rank]] for each in everyone]
    require_close("an all-to-all", arrived, torch.cat(parts), 0.0)
    sent = own.clone()
    dist.broadcast(sent, src=0)
    require_close("a broadcast", sent, everyone[0], 0.0)
    return Checked(says=f"five kinds by {dist.get_backend()} over {place.world} ranks")


def buckets_of_both_sides(place: Place) -> Checked:
    """Sums tensors of device and host over the ranks, in buckets, and sends matrices of Muon."""
    group = dist.group.WORLD
    assert group is not None, "the ranks have joined"
    if device_of(group).type != place.device.type:
        raise WrongError(f"the group exchanges tensors of {device_of(group)}, not {place.device}")
    there, here = torch.ones(100, device=place.device), torch.ones(100)
    all_reduce([there, here], group)
    require_on("a sum", there, place.device)
    require_on("a sum of the host", here, torch.device("cpu"))
    for each in (there, here):
        require_close("a sum of ones", each, torch.full((100,), float(place.world)), 0.0)
    matrix = torch.full((4, 4), float(place.rank), dtype=torch.bfloat16, device=place.device)
    received = _all_to_all(
        [matrix] * place.world, [16] * place.world, [[(4, 4)]] * place.world, group
    )
    for rank, (part,) in enumerate(received):
        require_close("a matrix of another rank", part, torch.full((4, 4), float(rank)), 0.0)
    return Checked(says="sums and matrices arrive on the side that they came from")


def batched_exchanges(place: Place) -> Checked:
    """Passes tensors around a ring, a send and a receive in one batch, as pipelines do too."""
    group = dist.group.WORLD
    assert group is not None, "the ranks have joined"
    ring, own = Ring(group), place.normal(ELEMENTS, seed=place.rank).to(place.device)
    for step in range(1, place.world):
        own = ring._shift(own).wait()
        origin = (place.rank - step) % place.world
        require_close("a tensor of the ring", own, place.normal(ELEMENTS, seed=origin), 0.0)
    return Checked(says=f"{place.world - 1} batches of a send and a receive")


def objects_and_clocks(place: Place) -> Checked:
    """Gathers objects, and reads the clocks behind barriers."""
    everyone: list[int | None] = [None] * place.world
    dist.all_gather_object(everyone, place.rank)
    if everyone != list(range(place.world)):
        raise WrongError(f"objects of the ranks arrive as {everyone}")
    clock = read_clock(place.device)
    if sorted(clock.left_s) != list(clock.left_s):
        raise WrongError("a later barrier was left earlier")
    return Checked(says=f"{environment(place.device).device}, {len(clock.left_s)} barriers")


def group_of_pools(place: Place) -> Checked:
    """Makes a group outside of torch's world, as jobs of several pools do."""
    if place.on_gpu and backend_of(place.device) != "nccl":
        raise RefusedError("the stand-in has no group outside of torch's world")
    store = dist.PrefixStore("doctor-pools", dist.distributed_c10d._get_default_store())
    joined = JoinedRanks(
        PoolPlace(sizes=(place.world,), rank=place.rank),
        store,
        place.device,
        dist.distributed_c10d.default_pg_timeout,
    )
    one = torch.ones(8, device=place.device)
    joined.all_reduce(one)
    require_close("a sum over pools", one, torch.full((8,), float(place.world)), 0.0)
    if joined.everyone(place.rank) != list(range(place.world)):
        raise WrongError("documents of the ranks arrive in another order")
    return Checked(says=f"sums and documents of {place.world} ranks")


def timed_collectives(place: Place) -> Checked:
    """Compares the events around collectives with the host's clock."""
    tensor = torch.zeros(TIMED_ELEMENTS, device=place.device)

    def run() -> None:
        dist.all_reduce(tensor)

    run()
    place.synchronize()
    started_s = time.perf_counter()
    events_s = elapsed_s(run, CALLS, place.device, LIMIT_S)
    place.synchronize()
    wall_s = time.perf_counter() - started_s
    says = f"{CALLS} all-reduces of 16 MiB: {events_s * 1e3:.2f} ms, clock {wall_s * 1e3:.2f} ms"
    if place.real and events_s > wall_s * (1 + CLOSE_TIMES):
        raise WrongError(says)
    return Checked(says=says)


_RECORDER = "executor/watch/run_recorder.py"
_TIMING = "profiles/profiler/communication/collective_timing.py"

PATHS = (
    GpuPath(
        name="collectives",
        checks="all-reduce, all-gather, reduce-scatter, all-to-all, broadcast",
        run=collectives,
    ),
    GpuPath(
        name="sums of both sides",
        checks="gradients of device and host over one group, matrices between ranks",
        run=buckets_of_both_sides,
        covers=(
            "executor/sharding/zero_units.py:all_reduce",
            "executor/training/muon.py:_all_to_all",
            "profiles/profiler/gpus.py:device_of",
            "profiles/profiler/gpus.py:own_gpu",
        ),
    ),
    GpuPath(
        name="batched exchanges",
        checks="a send and a receive posted together, around a ring",
        run=batched_exchanges,
        covers=("executor/context/carriers.py:Ring._shift",),
        ranks=2,
    ),
    GpuPath(
        name="objects and clocks",
        checks="gathered objects, barriers and clocks of the ranks",
        run=objects_and_clocks,
        covers=(f"{_RECORDER}:read_clock", f"{_RECORDER}:environment"),
    ),
    GpuPath(
        name="group of pools",
        checks="a group of all pools beside torch's world",
        run=group_of_pools,
        covers=(
            "executor/pools/joined_ranks.py:JoinedRanks.__init__",
            "executor/pools/joined_ranks.py:join_pool",
        ),
    ),
    GpuPath(
        name="timed collectives",
        checks="events around collectives beside the host's clock",
        run=timed_collectives,
        covers=(f"{_TIMING}:elapsed_s", f"{_TIMING}:_device_elapsed_s"),
    ),
)
