"""Shared settings of all tests: --update-golden, their order, one torch thread, a frozen heap."""

from __future__ import annotations

import collections
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.helpers.parts import PARTS, chosen_part, split

# Every run draws other examples: a few of each property are enough, many runs try many.
settings.register_profile("few", max_examples=25)
settings.load_profile("few")

# until all is collected: thousands of tests and torch are a heap that a third of the collection
# went into walking
gc.disable()

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a background job of a shell starts so: tests interrupt, and so do what they start
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Where the environment forbids bytecode, each worker and each command that a test starts would
# compile every module again: a tenth of the run.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Matrix products round alike on all processors: parity tests compare to a few units of rounding,
# and MKL's kernels for AVX-512 round in another order than those for AVX2.
os.environ.setdefault("MKL_CBWR", "AVX2")

# Searches that are not about launchers look at every plan of a stack, as a user's settings file may
# say; tests of launchers name them, or take the file away.
_settings = tempfile.TemporaryDirectory(prefix="parplan-settings-")
Path(_settings.name, "parplan").mkdir()
Path(_settings.name, "parplan", "config.yaml").write_text("for: none\n", encoding="utf-8")
os.environ["XDG_CONFIG_HOME"] = _settings.name

os.environ.pop("COLUMNS", None)  # Tables are as wide as a terminal says; the tests have none.


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out all but a part where one is asked for, and orders the tests.

    Files that start several processes are first in each of two halves, one for each worker. A fork
    copies the tables of the pages of its worker, which grow with every test: a fifth of what
    the executor's tests take. A file stays whole, so that its fixtures are made once.
    """
    commit = config.getoption("--part")
    if commit is not None:
        items[:], left_out = split(items, chosen_part(commit))
        config.hook.pytest_deselected(items=left_out)
    forking = {item.path for item in items if item.get_closest_marker("multiproc")}
    sizes = collections.Counter(item.path for item in items)
    halves = dict.fromkeys(sizes, 0)
    filled = [0, 0]
    for path, size in sizes.items():
        halves[path] = filled.index(min(filled))
        filled[halves[path]] += size
    items.sort(key=lambda item: (halves[item.path], item.path not in forking))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(20_000)  # collections of every 700 objects are a twentieth of the run
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite tests/golden/ with what the code says now",
    )
    parser.addoption(
        "--part",
        metavar="COMMIT",
        help="of the selected tests, run the fiftieth that a commit id chooses",
    )


def pytest_report_header(config: pytest.Config) -> list[str]:
    commit = config.getoption("--part")
    if commit is None:
        return []
    return [f"part {chosen_part(commit)} of 0 to {PARTS - 1}, chosen by {commit}"]


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A fork must not inherit a pool of threads; where torch is not loaded there is none."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _before_fork() -> None:
    """Ends torch's cached groups before a test forks a world.

    Tests are other ranks in one process before they fork. A group that only torch's caches hold
    ends here, where its threads are; in a fork its end would wait for them.
    """
    tensors = sys.modules.get("parplan.executor.tensors")
    if tensors is not None:
        tensors.forget_meshes()


def _after_fork() -> None:
    tensors = sys.modules.get("parplan.executor.tensors")
    if tensors is not None:
        tensors.begin_fork()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
