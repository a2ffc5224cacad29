"""The table of paths that only GPUs have, in the order in which they run."""

from __future__ import annotations

from parplan.executor.doctor import (
    exchange_paths,
    kernel_paths,
    measuring_paths,
    runtime_paths,
    training_paths,
)
from parplan.executor.doctor.path import GpuPath

PATHS: tuple[GpuPath, ...] = (
    *runtime_paths.PATHS,
    *kernel_paths.PATHS,
    *exchange_paths.PATHS,
    *measuring_paths.PATHS,
    *training_paths.PATHS,
)
# Places that every path runs before it begins, or that the doctor itself stands for.
EVERYWHERE = {
    "profiles/profiler/environment.py:<module>": "names of fields of the report's environment",
    "profiles/profiler/environment.py:_with_gpu": "the report's environment",
    "profiles/profiler/environment.py:_nccl_version": "the report's environment",
    "profiles/profiler/gpus.py:<module>": "the names of backends",
    "executor/run_plan.py:device_of": "a rank's device by its local number, as the doctor's",
    "executor/run_plan.py:_join": "a world bound to its GPU, as the doctor's",
    "profiles/profiler/communication/measuring_ranks.py:chosen_device": "as run_plan's",
    "profiles/profiler/communication/measuring_ranks.py:join_world": "a world of two backends",
    "profiles/profiler/communication/measuring_ranks.py:MeasuringRank._made": "a group of it",
    "profiles/profiler/communication/collective_timing.py:_communicator": "bytes of a group",
    "executor/checking/parity.py:_rank": "CPU ranks alone",
    "executor/checking/lone_rank.py:alone": "a rank on fake tensors alone",
    "executor/traced/traced_trainer.py:TracedTrainer.batch": "to_device, as a trainer's batch",
}


def path_of(name: str) -> GpuPath:
    """Returns the path of a name that the table has."""
    return next(path for path in PATHS if path.name == name)
