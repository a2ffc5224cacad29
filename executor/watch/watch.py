"""Ends a run that no longer moves, with one error that names the rank that is behind.

A thread of every rank writes its state to the job's store a few times a second. A rank that has not
moved for half the timeout reads the states of all ranks; if no rank has moved for the whole
timeout, the run ends on every rank that still answers. The rank behind is one whose thread is
silent too (stopped, dead, or in code that holds the interpreter), else one that does not wait for
other ranks, else the one with the least progress; its last beat gives its position. The same states
tell which rank died when a collective fails.

A rank waits where its host is inside a collective, or where its GPU has work that does not end:
the host only launches NCCL's collectives, and blocks wherever it next reads a number of the GPU.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

from parplan.costmodels.communication.mesh import Mesh
from parplan.executor.watch.rank_progress import RankProgress
from parplan.profiles.errors import RunError
from parplan.profiles.profiler.gpus import gpu, is_gpu

CPU = torch.device("cpu")
BEAT_S = 0.2
RANKS_PER_BEAT = 64  # more ranks write less often, so that their store has as little to do
SLACK_S = 10.0  # the run ends at most so long after the timeout
LOST_S = 1.5  # a rank without a beat for so long after a failed collective is gone
# A thread that waits in a collective has one of these files near the end of its stack.
_COLLECTIVES = (
    "distributed_c10d",
    "_functional_collectives",
    "torch/distributed/fsdp/",
    "torch/distributed/pipelining/",
)
_DEPTH = 3
_LIBRARIES = (os.path.dirname(torch.__file__), sysconfig.get_path("stdlib"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The state of a rank as it writes it.

    idle_s  seconds since it moved
    waits   True if it waits for other ranks
    place   the code line of its main thread
    """

    beat: int
    step: int
    micro_batch: int
    doing: str
    idle_s: float
    waits: bool
    place: str
    ended: bool = False


class Watch:
    """The watch of one rank; `store` is a connection of its own, since other users may block.

    meshes   the mesh of each pool of the job, one where pools do not divide the batch
    device   that of the calling thread's computation
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        meshes: Sequence[Mesh],
        progress: RankProgress,
        timeout_s: float,
        device: torch.device = CPU,
    ) -> None:
        self.device = device
        self.store = dist.PrefixStore("watch", store)
        self.rank = rank
        self.meshes = meshes
        self.num_ranks = sum(mesh.num_ranks for mesh in meshes)
        self.progress = progress
        self.timeout_s = timeout_s
        self.beat_s = min(BEAT_S * max(1.0, self.num_ranks / RANKS_PER_BEAT), SLACK_S / 4)
        # A rank without a beat for so long does not answer.
        self.quiet_s = max(5 * self.beat_s, min(timeout_s / 2, SLACK_S / 2))
        self._beat = 0
        self._moved = (-1, time.monotonic())
        self._seen: dict[int, tuple[int, float]] = {}
        self._stopped = threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Watch the calling thread, which must have made the watch."""
        self._say()
        self._thread.start()

    def stop(self) -> None:
        """End the watch; the rank does not count as silent from now on."""
        self._stopped.set()
        self._thread.join()

    def claim(self) -> bool:
        """Return True if this rank is the first to end the run, so that it prints the reason."""
        try:
            return self.store.add("ends", 1) == 1
        except RuntimeError:  # the store went with the rank that held it
            return True

    def lost(self) -> str | None:
        """Return which rank is gone after a collective failed, or None if all are there.

        Takes a second or two. torchrun asks the remaining ranks to end, so SIGTERM is ignored if a
        rank is gone: the caller can still print the answer.
        """
        if self.num_ranks == 1:
            return None
        self.progress.at("asks which rank is gone")
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            beats = {rank: state.beat for rank, state in self._states()}
            time.sleep(max(LOST_S, 5 * self.beat_s))
            gone = {rank: state for rank, state in self._states() if state.beat == beats.get(rank)}
        except RuntimeError:
            return "the job's store is gone, and with it the rank or the torchrun that held it"
        if not gone:
            signal.signal(signal.SIGTERM, before)
            return None
        rank = min(gone, key=lambda rank: not gone[rank].ended)
        how = "ended" if gone[rank].ended else "died"
        return f"{self._name(rank, len(gone) - 1)} {how} in {_position(gone[rank])}"

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self.beat_s):
                idle_s = self._say()
                if idle_s >= self.timeout_s / 2:
                    self._look(idle_s)
            self._say(ended=True)
        except RuntimeError:
            return  # the store's holder has ended, so a collective will fail

    def _say(self, *, ended: bool = False) -> float:
        """Write this rank's state; return the seconds since it moved."""
        progress, now = self.progress, time.monotonic()
        if progress.moves != self._moved[0]:
            self._moved = (progress.moves, now)
        idle_s = now - self._moved[1]
        stuck = idle_s >= self.timeout_s / 4
        self._beat += 1
        state = RankState(
            beat=self._beat,
            step=progress.step,
            micro_batch=progress.micro_batch,
            doing=progress.doing,
            idle_s=idle_s,
            waits=stuck and self._waits(),
            place=_place(sys._current_frames()[self._main]) if stuck else "",
            ended=ended,
        )
        self.store.set(str(self.rank), json.dumps(asdict(state)))
        return idle_s

    def _waits(self) -> bool:
        """Return True if the main thread is inside a collective, or a thread of autograd is.

        Python did not start autograd's threads. A rank whose GPU has work left waits for it.
        """
        if self.progress.doing.startswith("waits") or has_work(self.device):
            return True
        # Python's other threads are the watch and the one that saves checkpoints.
        excluded = {thread.ident for thread in threading.enumerate()} - {self._main}
        return any(
            _in_collective(frame)
            for ident, frame in sys._current_frames().items()
            if ident not in excluded
        )

    def _states(self) -> Iterator[tuple[int, RankState]]:
        """Yield the states of the ranks that have written any."""
        for rank in range(self.num_ranks):
            if self.store.check([str(rank)]):
                yield rank, RankState(**json.loads(self.store.get(str(rank))))

    def _look(self, rank_idle_s: float) -> None:
        """End the run if no rank has moved for the timeout."""
        now = time.monotonic()
        states = dict(self._states())
        for rank, state in states.items():
            if self._seen.get(rank, (-1, 0.0))[0] != state.beat:
                self._seen[rank] = (state.beat, now)
        silent = [rank for rank in states if now - self._seen[rank][1] >= self.quiet_s]
        idle_s = [state.idle_s for rank, state in states.items() if rank not in silent]
        if (
            rank_idle_s >= self.timeout_s
            and min(idle_s, default=rank_idle_s) >= self.timeout_s - 2 * self.beat_s
        ):
            self._end(self._verdict(states, silent))

    def _verdict(self, states: dict[int, RankState], silent: Sequence[int]) -> str:
        never = [rank for rank in range(self.num_ranks) if rank not in states]
        if never:
            name = self._name(never[0], len(never) - 1)
            return f"{name} has not started within {self.timeout_s:g} s"
        running = [rank for rank, state in states.items() if not state.ended]
        gone = [rank for rank in running if rank in silent]
        busy = [rank for rank in running if not states[rank].waits]
        least = min(
            gone or busy or running,
            key=lambda rank: (states[rank].step, states[rank].micro_batch, -states[rank].idle_s),
        )
        state = states[least]
        silence = "it does not answer, so it is stopped, dead or stuck outside Python"
        what = silence if gone else f"it {state.doing}{state.place}"
        waiting = ""
        if len(states) > 1:
            waiting = "; the others wait for it" if gone or busy else "; all wait for one another"
        name = self._name(least, len(gone) - 1)
        since = f"since {_position(state)}, for {self.timeout_s:g} s"
        return f"{name} has not moved {since}: {what}{waiting}"

    def _name(self, rank: int, num_more: int) -> str:
        """Return a rank with its coordinates."""
        pool, inside = 0, rank
        while inside >= self.meshes[pool].num_ranks:
            inside -= self.meshes[pool].num_ranks
            pool += 1
        mesh = self.meshes[pool]
        pp, dp, cp, tp = mesh.coordinates(inside)
        of_pool = f"pool {pool}, " if len(self.meshes) > 1 else ""
        context = f", cp {cp}" if mesh.cp > 1 else ""
        more = f" and {num_more} more" if num_more > 0 else ""
        return f"rank {rank} ({of_pool}pp {pp}, dp {dp}{context}, tp {tp}){more}"

    def _end(self, text: str) -> None:
        if self.claim():
            os.write(
                sys.stderr.fileno(),
                f"error: {text}\nhint: a longer --timeout lets a slow step end\n".encode(),
            )
        else:
            time.sleep(self.beat_s)  # torchrun must not stop the rank that prints the error first
        os._exit(RunError.exit_code)


def has_work(device: torch.device) -> bool:
    """Return True if a GPU has not ended the work of its default stream; does not wait for it."""
    if not is_gpu(device):
        return False
    try:
        return not gpu(device).default_stream(device).query()
    except RuntimeError:  # the GPU failed, which its rank reports
        return False


def _position(state: RankState) -> str:
    if state.step < 0:
        return "its start"
    where = f"after micro-batch {state.micro_batch}" if state.micro_batch else "micro-batch 1"
    return f"step {state.step + 1}, {where}"


def _in_collective(frame: FrameType | None) -> bool:
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if any(part in frame.f_code.co_filename for part in _COLLECTIVES):
            return True
        frame = frame.f_back
    return False


def _place(frame: FrameType | None) -> str:
    """Return the innermost code line outside torch and Python's library."""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None:
        return ""
    file = os.path.basename(frame.f_code.co_filename)
    return f" ({file}:{frame.f_lineno}, {frame.f_code.co_name})"


def second_connection(store: dist.Store) -> dist.Store:
    """Return a second connection to the job's store, in which no other user blocks."""
    store = store.clone()
    store.set_timeout(timedelta(seconds=SLACK_S))
    return store
