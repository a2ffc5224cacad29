"""Reads measured times of whole layers: Metis's profile files and Galvatron's computation files.

    DeviceType.<X>_tp<t>_bs<b>.json     Metis: ms of each layer, forward and backward, of the
                                        optimizer, and of the step
    computation_profiling_<precision>_<model>_<..>.json
                                        Galvatron: layernum[<l>]_bsz<b>_seq<s>: ms of the forward
                                        pass of l layers, embedding and head on one GPU;
                                        layertype_0_.. and layertype_other_..: of a layer, and of
                                        all else, for each sample

Source: SamsungLabs/Metis, README.md and profile_data_samples; PKU-DAIR/Hetu-Galvatron,
galvatron/core/profiler/model_profiler.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parplan.profiles.errors import ConfigError
from parplan.profiles.imports.imported import mapping_at, needed, positive

METIS = "Metis"
GALVATRON = "Galvatron"
_NAME = re.compile(r"DeviceType\.(.{1,100})_tp([0-9]{1,7})_bs([0-9]{1,9})")
_COMPUTATION = re.compile(
    r"(layernum\[[0-9]{1,4}\]|layertype_[0-9]{1,4}|layertype_other)_bsz([0-9]{1,9})_seq([0-9]{1,9})"
)
_MS = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayers:
    """Measured seconds of one micro-batch of a model on `tp` GPUs.

    forward_s    the forward pass of a model by its number of blocks, with embedding and head; or
    passes_s     both passes of the model with `num_blocks` blocks
    device       the device as the file names it, empty where it does not
    seq_length   None where the file does not say it
    optimizer_s, step_s   None where the file does not say them
    """

    tool: str
    micro_batch_size: int
    tp: int
    device: str = ""
    seq_length: int | None = None
    forward_s: Mapping[int, float] | None = None
    passes_s: float | None = None
    num_blocks: int | None = None
    optimizer_s: float | None = None
    step_s: float | None = None


def is_layer_file(body: Any) -> bool:
    """Returns whether a document has times of layers, in either format."""
    if not isinstance(body, Mapping):
        return False
    is_galvatron = bool(body) and all(_COMPUTATION.fullmatch(str(key)) for key in body)
    return is_galvatron or "execution_time" in body


def read_layer_file(body: Any, where: str, micro_batch_size: int) -> MeasuredLayers:
    """Returns the times at a micro-batch size. Raises ConfigError where a field is missing."""
    if "execution_time" in body:
        return _metis(body, where)
    return _galvatron(body, where, micro_batch_size)


def _metis(body: Any, where: str) -> MeasuredLayers:
    named = _NAME.search(Path(where).name)
    if named is None:
        raise ConfigError(
            f"{where}: its name does not say the device, tp and the batch",
            hint="name it as Metis does: DeviceType.A100_tp1_bs1.json",
        )
    times = mapping_at(body, "execution_time", where, METIS)
    layers = needed(body, "execution_time.layer_compute_total_ms", where, METIS)
    if not isinstance(layers, list) or len(layers) < 3:
        raise ConfigError(
            f"{where}: execution_time.layer_compute_total_ms is no list of an embedding, layers "
            "and a head",
            hint="give the whole file of Metis",
        )
    each_ms = [positive(ms, "execution_time.layer_compute_total_ms", where) for ms in layers]
    passes_ms = times.get("forward_backward_time_ms", sum(each_ms))
    return MeasuredLayers(
        tool=METIS,
        device=named[1],
        tp=int(named[2]),
        micro_batch_size=int(named[3]),
        passes_s=positive(passes_ms, "execution_time.forward_backward_time_ms", where) * _MS,
        num_blocks=len(layers) - 2,
        optimizer_s=_milliseconds(times, "optimizer_time_ms", where),
        step_s=_milliseconds(times, "total_time_ms", where),
    )


def _milliseconds(times: Mapping[str, Any], name: str, where: str) -> float:
    path = f"execution_time.{name}"
    return positive(needed({"execution_time": times}, path, where, METIS), path, where) * _MS


def _galvatron(body: Any, where: str, micro_batch_size: int) -> MeasuredLayers:
    """Returns forward passes by depth: as measured, or else from the times of a layer and a sample.

    t(l) = b (other + l layer)
    """
    measured_s: dict[int, float] = {}
    of_sample_s: dict[str, float] = {}
    found: set[tuple[int, int]] = set()
    for key, value in body.items():
        what, batch, seq = _COMPUTATION.findall(key)[0]
        found.add((int(batch), int(seq)))
        if int(batch) != micro_batch_size:
            continue
        seconds = positive(value, key, where) * _MS
        if what.startswith("layernum"):
            measured_s[int(what[len("layernum[") : -1])] = seconds
        else:
            of_sample_s[what] = seconds
    sequences = {seq for batch, seq in found if batch == micro_batch_size}
    if len(measured_s) < 2 and set(of_sample_s) == {"layertype_0", "layertype_other"}:
        other_s = micro_batch_size * of_sample_s["layertype_other"]
        measured_s = {0: other_s, 1: other_s + micro_batch_size * of_sample_s["layertype_0"]}
    if len(measured_s) < 2 or len(sequences) != 1:
        shown = ", ".join(f"batch {batch} of {seq} tokens" for batch, seq in sorted(found))
        raise ConfigError(
            f"{where}: needed are times at batch {micro_batch_size}, of one kind of layers in two "
            f"depths and of one sequence length, found are {shown}",
            hint="give the plan of one of these batches",
        )
    return MeasuredLayers(
        tool=GALVATRON,
        micro_batch_size=micro_batch_size,
        tp=1,
        seq_length=sequences.pop(),
        forward_s=measured_s,
    )
