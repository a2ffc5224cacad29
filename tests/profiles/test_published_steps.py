"""The shipped table of published steps: every row is cited, and no cell contradicts another."""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from importlib.resources import files

import pytest

COLUMNS = (
    "id",
    "framework",
    "gpu",
    "n_gpus",
    "gpus_per_node",
    "interconnect",
    "model",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn_hidden",
    "gated_ffn",
    "vocab",
    "seq_len",
    "global_batch",
    "micro_batch",
    "dp",
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "experts",
    "top_k",
    "moe_ffn_hidden",
    "sequence_parallel",
    "zero_stage",
    "recompute",
    "dtype",
    "step_time_s",
    "peak_memory_gib",
    "memory_kind",
    "reserved_memory_gib",
    "notes",
    "citation",
)
COUNTS = (
    "n_gpus",
    "gpus_per_node",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn_hidden",
    "vocab",
    "seq_len",
    "global_batch",
    "micro_batch",
    "dp",
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "experts",
    "top_k",
    "moe_ffn_hidden",
)
MEASURED = ("step_time_s", "peak_memory_gib", "reserved_memory_gib")
MEMORY_KINDS = {
    "allocated",
    "allocated-last-stage",
    "active",
    "reserved",
    "nvidia-smi",
    "unspecified",
    "unspecified-last-stage",
    "out-of-memory",
}
ATTENTION = {"unfused", "flash1", "flash2", "cudnn", "sdpa", "te"}
PEAK_FLOPS_PER_S = {  # dense 16-bit, datasheets; FP8 doubles it
    "v100": 125e12,
    "a100": 312e12,
    "a800": 312e12,
    "h100": 989e12,
    "h200": 989e12,
    "b200": 2250e12,
    "gb200": 2500e12,
}
CAPACITY_GIB = {
    "a100-40g": 40,
    "a100-80g": 80,
    "h100-80g": 80,
    "v100-32g": 32,
    "v100-16g": 16,
    "b200-180g": 180,
}


def _text() -> str:
    return (files("parplan.profiles") / "data" / "published_steps.csv").read_bytes().decode("ascii")


def _rows() -> list[dict[str, str]]:
    return list(csv.DictReader(_text().splitlines()))


ROWS = _rows()
TIMED = [row for row in ROWS if row["step_time_s"]]


def _source(row: dict[str, str]) -> str:
    return row["id"].split("-")[0]


def _notes(row: dict[str, str]) -> dict[str, str]:
    return dict(
        note.split("=", 1) for note in row["notes"].split("; ") if re.match(r"[a-z_]+=", note)
    )


def _faults(rows: list[dict[str, str]], holds) -> list[str]:
    return [row["id"] for row in rows if not holds(row)]


def _mesh_is_the_gpus(row: dict[str, str]) -> bool:
    degrees = [row[axis] for axis in ("dp", "tp", "pp")]
    return (
        not row["n_gpus"]
        or not all(degrees)
        or math.prod(map(int, [*degrees, row["cp"] or "1"])) == int(row["n_gpus"])
    )


def _batch_divides(row: dict[str, str]) -> bool:
    parts = [row["global_batch"], row["micro_batch"], row["dp"]]
    return not all(parts) or int(parts[0]) % (int(parts[1]) * int(parts[2])) == 0


def _virtual_stages_divide(row: dict[str, str]) -> bool:
    """Returns True if the layers fill the stages; for Llama 3.1 405B with embedding and head."""
    layers = int(row["layers"]) + (2 if "405B" in row["model"] else 0)
    return row["vpp"] in ("", "1") or layers % (int(row["pp"]) * int(row["vpp"])) == 0


def _hardware_utilization(row: dict[str, str]) -> float:
    """Returns the FLOPs of products and head, recomputed ones too, over those of the devices.

    Causal attention counts half, the least FLOPs of a kernel that skips the other half.
    """
    layers, hidden = int(row["layers"]), int(row["hidden"])
    ffn, vocab = int(row["ffn_hidden"]), int(row["vocab"])
    heads, head_dim = int(row["heads"]), int(row["head_dim"])
    seq, batch = int(row["seq_len"]), int(row["global_batch"])
    weights = hidden * head_dim * 2 * (heads + int(row["kv_heads"])) + hidden * ffn * (
        3 if row["gated_ffn"] == "true" else 2
    )
    block = layers * (2 * weights + 2 * seq * heads * head_dim)
    flops = (
        batch * seq * (block * (4 if row["recompute"] == "full" else 3) + 3 * 2 * hidden * vocab)
    )
    peak = next(value for name, value in PEAK_FLOPS_PER_S.items() if row["gpu"].startswith(name))
    peak *= 2 if "fp8" in row["dtype"] or "float8" in row["dtype"] else 1
    return flops / (float(row["step_time_s"]) * int(row["n_gpus"]) * peak)


def test_the_file_is_one_that_every_reader_reads():
    text = _text()

    assert "\r" not in text
    assert text.endswith("\n")
    assert text.splitlines()[0] == ",".join(COLUMNS)
    assert all(None not in row and None not in row.values() for row in ROWS)
    assert all(cell == cell.strip() for row in ROWS for cell in row.values())


def test_a_few_hundred_runs_of_many_sources_have_an_id_each():
    assert 350 <= len(ROWS) <= 650
    assert len({_source(row) for row in ROWS}) >= 18
    assert [name for name, count in Counter(row["id"] for row in ROWS).items() if count > 1] == []
    assert [_source(row) for row in ROWS] == sorted(_source(row) for row in ROWS)


def test_every_row_says_where_it_was_published():
    place = re.compile(r"@[0-9a-f]{7,40}\b|Table \d|table \d|README|log_metrics\.csv")

    assert _faults(ROWS, lambda row: place.search(row["citation"])) == []
    assert _faults(ROWS, lambda row: "/" in row["citation"]) == []


def test_numbers_are_numbers_in_the_unit_of_their_column():
    assert (
        _faults(ROWS, lambda row: all(re.fullmatch(r"[1-9]\d*|", row[name]) for name in COUNTS))
        == []
    )
    assert (
        _faults(
            ROWS,
            lambda row: all(not row[name] or 0 < float(row[name]) < math.inf for name in MEASURED),
        )
        == []
    )
    assert _faults(ROWS, lambda row: row["zero_stage"] in ("", "0", "1", "2", "3")) == []
    assert (
        _faults(
            ROWS, lambda row: {row["sequence_parallel"], row["gated_ffn"]} <= {"", "true", "false"}
        )
        == []
    )


def test_every_measured_value_is_of_a_known_kind():
    assert (
        _faults(
            ROWS,
            lambda row: (
                row["memory_kind"] in MEMORY_KINDS
                or not (row["memory_kind"] or row["peak_memory_gib"])
            ),
        )
        == []
    )
    assert (
        _faults(
            ROWS,
            lambda row: (
                bool(row["peak_memory_gib"]) == (row["memory_kind"] not in ("", "out-of-memory"))
            ),
        )
        == []
    )
    assert (
        _faults(
            TIMED,
            lambda row: re.match(
                r"measured|derived from (tokens/s|TFLOP/s|MFU)", _notes(row)["time"]
            ),
        )
        == []
    )
    assert _faults(ROWS, lambda row: _notes(row).get("attention", "unfused") in ATTENTION) == []


def test_a_run_out_of_memory_has_neither_time_nor_memory():
    lost = [row for row in ROWS if row["memory_kind"] == "out-of-memory"]

    assert len(lost) == 7
    assert _faults(lost, lambda row: not row["step_time_s"] and not row["peak_memory_gib"]) == []


def test_every_other_row_has_a_measured_value():
    assert (
        _faults(
            ROWS,
            lambda row: (
                row["step_time_s"]
                or row["peak_memory_gib"]
                or row["memory_kind"] == "out-of-memory"
            ),
        )
        == []
    )


def test_times_of_launch_bound_models_are_not_kept():
    tiny = [row for row in ROWS if row["hidden"] == "512" and "weekly" not in row["id"]]

    assert len(tiny) >= 40
    assert (
        _faults(tiny, lambda row: not row["step_time_s"] and "launch-bound" in row["notes"]) == []
    )


@pytest.mark.parametrize("holds", [_mesh_is_the_gpus, _batch_divides, _virtual_stages_divide])
def test_a_configuration_can_have_been_run(holds):
    assert _faults(ROWS, holds) == []


def test_heads_and_dimensions_agree():
    stated = [row for row in ROWS if row["heads"] and row["kv_heads"]]

    assert _faults(stated, lambda row: int(row["heads"]) % int(row["kv_heads"]) == 0) == []
    assert (
        _faults(
            [row for row in stated if row["tp"]],
            lambda row: int(row["heads"]) % int(row["tp"]) == 0,
        )
        == []
    )


def test_no_step_is_faster_than_the_devices_can_be():
    needed = (
        "layers",
        "hidden",
        "ffn_hidden",
        "heads",
        "kv_heads",
        "head_dim",
        "seq_len",
        "global_batch",
        "vocab",
        "n_gpus",
    )
    dense = [row for row in TIMED if not row["experts"] and all(row[name] for name in needed)]

    assert len(dense) >= 400
    assert _faults(dense, lambda row: _hardware_utilization(row) < 0.78) == []
    assert _faults(dense, lambda row: _hardware_utilization(row) > 0.005) == []


def test_no_peak_is_above_the_memory_of_its_device():
    known = [
        (row, gib)
        for row in ROWS
        for name, gib in CAPACITY_GIB.items()
        if row["gpu"].startswith(name) and row["peak_memory_gib"]
    ]

    assert len(known) >= 200
    assert [row["id"] for row, gib in known if float(row["peak_memory_gib"]) > gib] == []
    reserved = [row for row in ROWS if row["reserved_memory_gib"]]
    assert (
        _faults(
            reserved, lambda row: float(row["reserved_memory_gib"]) >= float(row["peak_memory_gib"])
        )
        == []
    )


def test_whole_grids_of_one_model_are_there_to_judge_rankings():
    grids = Counter(
        tuple(
            row[name]
            for name in ("gpu", "layers", "hidden", "heads", "n_gpus", "global_batch", "seq_len")
        )
        for row in TIMED
        if _source(row) == "vtrain"
    )

    assert sum(count >= 8 for count in grids.values()) >= 6


def test_what_the_authors_published_apart_from_the_table_is_filled_in():
    filled = {row["id"]: (row["micro_batch"], row["vpp"]) for row in ROWS if _source(row) == "sc21"}

    assert filled == {
        "sc21-1.7B": ("16", "1"),
        "sc21-7.5B": ("16", "1"),
        "sc21-39.1B": ("4", "1"),
        "sc21-145.6B": ("2", "2"),
        "sc21-529.6B": ("1", "3"),
    }
    assert {_notes(row)["attention"] for row in ROWS if _source(row) == "mpt"} == {"flash1"}
    assert {row["zero_stage"] for row in ROWS if _source(row) == "bs1b3"} == {"1"}


def test_rows_that_contradict_themselves_are_left_out():
    assert (
        _faults(
            ROWS,
            lambda row: (
                not re.search(r"INCONSISTENT|STALE|lora", row["notes"] + row["id"], re.IGNORECASE)
            ),
        )
        == []
    )
