"""The tables of `plan calibrate`: factors with their sources, and the runs priced with them."""

from __future__ import annotations

from rich.console import Console

from parplan.profiles.machines.calibration_factors import CAUSES
from parplan.profiles.machines.user_profile import ProfiledRun, UserProfile
from parplan.report.text import percent, print_table, say, seconds_text

_NAMES = {
    "forward": "forward passes",
    "backward": "backward passes",
    "tensor": "tensor-parallel communication",
    "data": "data-parallel communication",
    "pipeline": "transfers between stages",
    "optimizer": "optimizer",
}


def print_calibration(profile: UserProfile, out: Console) -> None:
    """Print the calibration of a profile for a person; nothing without one."""
    calibration = profile.calibration
    if calibration is None:
        return
    say(
        out,
        f"{profile.device}, {calibration.stack}, {calibration.precision}: measured over predicted "
        f"seconds",
        "bold",
    )
    rows = []
    for cause in CAUSES:
        factor = calibration.factor(cause)
        rows.append(
            (_NAMES[cause], f"{factor.value:.3g}" if factor.measured else "-", factor.source)
        )
    print_table(out, ("price of", "factor", "from"), rows, left=("price of", "from"))
    if profile.allocator_share is not None:
        say(
            out,
            f"  the allocator held {percent(profile.allocator_share)} beyond what was allocated",
        )
    say(out)
    print_table(
        out,
        ("run", "model", "mesh", "step", "priced before", "with the profile", "off by"),
        [
            (
                run.fingerprint,
                run.model,
                run.mesh,
                seconds_text(run.measured_s) if run.measured_s else "-",
                seconds_text(run.priced_s),
                seconds_text(run.calibrated_s),
                _off(run),
            )
            for run in profile.runs
        ],
        left=("run", "model", "mesh"),
    )


def _off(run: ProfiledRun) -> str:
    if not run.measured_s:
        return "-"
    return f"{100 * (run.calibrated_s / run.measured_s - 1):+.1f} %"
