"""Runs resume only from whole checkpoints of one step, whose files match the manifest.

No checkpoint file can run code.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from parplan.executor.checkpoint import folder
from parplan.executor.checkpoint.index import INDEX, metadata_of
from parplan.profiles.errors import ConfigError
from tests.executor.checkpoint.test_checkpoints import TIMEOUT, make_plan, run_world, train

pytestmark = pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"
)

PLAN = make_plan()
OWN, OTHER = "__0_0.distcp", "__1_0.distcp"


def join() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)


@pytest.fixture
def alone():
    """A world of one rank in this process."""
    join()
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The checkpoints of three steps of one rank, and the loss of the step after them."""
    place = tmp_path_factory.mktemp("written")
    join()
    train(PLAN, 3, directory=place, every=1)
    losses, _ = train(PLAN, 4, resume=str(place / "step-000003"))
    dist.destroy_process_group()
    return place, losses


@pytest.fixture
def saved(written, tmp_path):
    """A copy of those checkpoints."""
    return Path(shutil.copytree(written[0], tmp_path / "saved"))


def document_of(path: Path) -> dict:
    return json.loads((path / folder.DOCUMENT).read_text())


def put_checksum(path: Path, name: str) -> None:
    """Let the manifest say what the file now is, as who made the file on purpose would."""
    document, data = document_of(path), (path / name).read_bytes()
    document["files"][name] = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    (path / folder.DOCUMENT).write_text(json.dumps(document))


def test_the_manifest_has_the_step_and_the_size_and_checksum_of_every_file(written):
    path = written[0] / "step-000003"
    files = {
        file.name: file.read_bytes() for file in path.iterdir() if file.name != folder.DOCUMENT
    }

    document = document_of(path)

    assert document["step"] == 3
    assert set(files) == {OWN, INDEX, ".metadata"}
    assert document["files"] == {
        name: {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
        for name, data in files.items()
    }


def _from_the_step_before(name: str) -> Callable[[Path], object]:
    return lambda path: shutil.copy(path.with_name("step-000002") / name, path / name)


def _flip(name: str, where: int) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[where] ^= 1
        (path / name).write_bytes(data)

    return change


def _rewrite(**changes: object) -> Callable[[Path], object]:
    return lambda path: (path / folder.DOCUMENT).write_text(json.dumps(document_of(path) | changes))


CHANGES = {
    "an-earlier-step": (
        _from_the_step_before(OWN),
        rf"{OWN} has the checksum \w{{8}}, \w{{8}} was written",
    ),
    "an-earlier-index": (
        _flip(INDEX, 40),
        rf"{INDEX} has the checksum \w{{8}}, \w{{8}} was written",
    ),
    "one-bit": (_flip(OWN, -1), rf"{OWN} has the checksum"),
    "truncated": (
        lambda path: os.truncate(path / OWN, 100),
        rf"{OWN} has 100 bytes, \d+ were written",
    ),
    "missing": (lambda path: (path / OWN).unlink(), rf"{OWN}: No such file"),
    "a-folder": (
        lambda path: ((path / INDEX).unlink(), (path / INDEX).mkdir()),
        rf"{INDEX} has \d+ bytes",
    ),
    "no-manifest": (
        lambda path: (path / folder.DOCUMENT).unlink(),
        r"checkpoint\.json: No such file",
    ),
    "an-earlier-manifest": (
        _from_the_step_before(folder.DOCUMENT),
        r"checkpoint\.json is of step 2, the folder's name says 3",
    ),
    "without-checksums": (
        _rewrite(format=1),
        "its format is 1, this parplan reads 2, which has checksums",
    ),
    "outside": (
        _rewrite(files={"../file": {"bytes": 1, "crc32": "0"}}),
        r"checkpoint\.json is not that of a checkpoint",
    ),
    "no-model": (_rewrite(model=None), r"checkpoint\.json is not that of a checkpoint"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_named_checkpoint_that_is_not_as_it_was_written_is_one_error_that_names_the_one_before(
    name, saved, alone
):
    change, said = CHANGES[name]
    change(saved / "step-000003")

    with pytest.raises(
        ConfigError, match=rf"--resume .*step-000003: it is not whole: {said}"
    ) as error:
        train(PLAN, 4, resume=str(saved / "step-000003"))

    assert error.value.hint == f"go on from the one before: --resume {saved / 'step-000002'}"


def test_a_file_of_an_earlier_step_costs_that_checkpoint_and_not_the_run(saved, alone, written):
    _from_the_step_before(OWN)(saved / "step-000003")

    losses, notes = train(PLAN, 4, directory=saved)

    assert notes[0].startswith(f"step-000003 is skipped, it is not whole: {OWN} has the checksum")
    assert notes[1] == f"goes on from {saved / 'step-000002'}, after step 2"
    assert losses[1:] == written[1]


def test_files_that_the_manifest_does_not_name_are_not_read(saved, alone, written):
    (saved / "step-000003" / "__7_0.distcp").write_bytes(b"of another run")
    (saved / "step-000003" / "notes.txt").write_text("mine")

    assert train(PLAN, 4, resume=str(saved / "step-000003"))[0] == written[1]


@pytest.mark.multiproc
def test_files_of_two_ranks_that_changed_places_are_found_by_their_checksums(tmp_path):
    plan = make_plan(dp=2, zero=(3,))
    run_world([(plan, 1, {"directory": tmp_path})])
    path = tmp_path / "step-000001"
    files = document_of(path)["files"]
    (path / OWN).rename(path / "third")
    (path / OTHER).rename(path / OWN)
    (path / "third").rename(path / OTHER)

    actual = [
        folder.find_damage(path, {"files": files}, share, 2, lambda: None) for share in range(2)
    ]

    assert {text.split(" has the checksum ")[0] for text in actual} == {OWN, OTHER}
    assert files[OWN]["crc32"] != files[OTHER]["crc32"]


def test_every_file_is_read_by_one_rank(saved):
    path = saved / "step-000003"
    files = {f"file{index}": {"bytes": 3, "crc32": "0"} for index in range(5)}
    for name in files:
        (path / name).write_bytes(b"abc")

    shares = [_read_by(path, files, share) for share in range(3)]

    assert shares == [["file0", "file3"], ["file1", "file4"], ["file2"]]


def _read_by(path: Path, files: dict, share: int) -> list[str]:
    """The files of a share: those by whose damage alone it is told."""
    good = {name: {"bytes": 3, "crc32": f"{zlib.crc32(b'abc'):08x}"} for name in files}
    return [
        name
        for name in files
        if folder.find_damage(path, {"files": good | {name: files[name]}}, share, 3, lambda: None)
    ]


class Touching:
    """Pickled, it makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_a_pickle_in_a_checkpoint_runs_nothing(saved, alone, tmp_path, written):
    path, touched = saved / "step-000003", tmp_path / "touched"
    (path / ".metadata").write_bytes(pickle.dumps(Touching(touched)))
    put_checksum(path, ".metadata")

    losses, _ = train(PLAN, 4, resume=str(path))

    assert losses == written[1]
    assert not touched.exists()
    with pytest.raises(AttributeError):  # torch's own reader runs it
        FileSystemReader(path).read_metadata()
    assert touched.exists()


@pytest.mark.parametrize("name", ["model.head.lm_head.weight", "rng.0.cpu"])
def test_a_pickle_in_the_place_of_a_tensor_runs_nothing(name, saved, alone, tmp_path):
    path, touched = saved / "step-000003", tmp_path / "touched"
    torch.save(Touching(touched), path / "__9_0.distcp")
    index = json.loads((path / INDEX).read_text())
    name = name if name in index else next(key for key in index if key.startswith("model."))
    index[name] = {
        "file": "__9_0.distcp",
        "start": 0,
        "bytes": (path / "__9_0.distcp").stat().st_size,
    }
    (path / INDEX).write_text(json.dumps(index))
    for file in (INDEX, "__9_0.distcp"):
        put_checksum(path, file)

    with pytest.raises(ConfigError, match=r"it cannot be read: .*[Ww]eights"):
        train(PLAN, 4, resume=str(path))

    assert not touched.exists()


class Counter:
    """An object with state, as a sampler is."""

    def __init__(self, count: int) -> None:
        self.values = {"count": count, "names": ["a", "b"], "position": torch.tensor([count])}

    def state_dict(self) -> dict:
        return self.values

    def load_state_dict(self, values: dict) -> None:
        self.values = values


def test_plain_values_of_objects_are_read_back(tmp_path, alone):
    final = tmp_path / "step-000001"
    parts = {part: {} for part in folder.PARTS}
    dcp.save(
        {"sampler": Counter(7)},
        storage_writer=folder.AtomicWriter(final, {"step": 1, **parts}, keep=1),
    )
    loaded = Counter(0)

    dcp.load(
        {"sampler": loaded},
        storage_reader=folder.CheckedReader(final, folder.read_document(final)),
        planner=folder.SafeLoadPlanner(),
    )

    assert loaded.values == {"count": 7, "names": ["a", "b"], "position": torch.tensor([7])}


def test_torchs_own_tools_read_the_tensors_too(written):
    path = written[0] / "step-000003"
    index = json.loads((path / INDEX).read_text())

    theirs = FileSystemReader(path).read_metadata()
    ours = metadata_of(
        index, {name: file["bytes"] for name, file in document_of(path)["files"].items()}
    )

    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    assert {
        key: (metadata.size, metadata.chunks, metadata.properties.dtype)
        for key, metadata in ours.state_dict_metadata.items()
    } == {
        key: (metadata.size, metadata.chunks, metadata.properties.dtype)
        for key, metadata in theirs.state_dict_metadata.items()
    }
    assert ours.storage_data == theirs.storage_data


PART = {"offset": [0], "shape": [2], "file": "a", "start": 0, "bytes": 8}
TENSOR = {"dtype": "float32", "shape": [2], "parts": [PART]}


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"x": 1},
        {"x": {}},
        {"x": {**TENSOR, "dtype": "Tensor"}},
        {"x": {**TENSOR, "shape": [-1]}},
        {"x": {**TENSOR, "shape": [True]}},
        {"x": {**TENSOR, "shape": [2**63]}},
        {"x": {**TENSOR, "parts": [{**PART, "file": "../a"}]}},
        {"x": {**TENSOR, "parts": [{**PART, "start": 1}]}},
        {"x": {**TENSOR, "parts": [{**PART, "offset": [0, 0]}]}},
        {"x": {**TENSOR, "parts": [{**PART, "shape": [3]}]}},
    ],
)
def test_an_index_that_no_save_wrote_is_refused(document):
    with pytest.raises(ValueError, match=r"index\.json is not that of a checkpoint"):
        metadata_of(document, {"a": 8})
