"""The profiles that ship, profiles/data/<device>.yaml, and a cluster with its speeds.

`profiles/build/__main__.py` writes those files from public measurements. A device without a file
gets the assumptions of `analytic_profile`, marked ANALYTIC throughout; it never gets another
device's figures.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from parplan.profiles.documents.reader import parse_yaml, read_yaml
from parplan.profiles.documents.schema import kind_text, parse
from parplan.profiles.errors import ConfigError
from parplan.profiles.machines.curves import CollectiveCurve, FlashCurve, MatmulCurve, MemoryCurve
from parplan.profiles.machines.hardware import Cluster
from parplan.profiles.machines.speeds import Compute, Inter, Intra, PassCurves, Profile
from parplan.profiles.machines.stack_terms import Terms, shipped_terms
from parplan.profiles.provenance import Kind, Seconds

LINK_TOLERANCE = 0.1  # datasheets round: 150 or 157 GB/s
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)  # name of a device that may have a file


@dataclass(frozen=True, eq=False)
class Machine:
    """A cluster and its speeds: the one argument of every price."""

    cluster: Cluster
    profile: Profile

    def corrected(self, cause: str, seconds: Seconds) -> Seconds:
        """Returns a price as the cluster's own runs correct it, by its cause.

        The causes are in profiles/machines/calibration_factors.py.
        """
        calibration = self.cluster.calibration
        return seconds if calibration is None else calibration.factor(cause).corrected(seconds)

    def launch_factor(self, cause: str) -> float:
        """Returns the factor of the host's time to launch the kernels of a pass, by its cause."""
        calibration = self.cluster.calibration
        return 1.0 if calibration is None else calibration.factor(cause).value

    @functools.cached_property
    def collective_curves(self) -> Mapping[str, tuple[CollectiveCurve, ...]]:
        """The curves by collective, by rising number of ranks.

        There are none where the node's link is not the one that they hold for. Where several groups
        were also measured at once, each number of ranks has the curve of the most groups, as a mesh
        runs them.
        """
        curves: dict[str, dict[int, CollectiveCurve]] = {}
        for curve in sorted(self._curves_inside, key=lambda curve: (curve.ranks, curve.groups)):
            curves.setdefault(curve.collective, {})[curve.ranks] = curve
        return {name: tuple(by_ranks.values()) for name, by_ranks in curves.items()}

    @functools.cached_property
    def placed_curves(self) -> Mapping[tuple[str, int, int, int], CollectiveCurve]:
        """The curves that were measured on the machine itself.

        The keys are collective, nodes, ranks per node and groups at once.
        """
        inter = self.profile.inter
        inside = self._curves_inside if self.profile.intra.kind is Kind.MEASURED else ()
        same_nics = _near(self.cluster.node_bytes_per_s, inter.node_bytes_per_s)
        across = inter.crossing if same_nics else ()
        return {
            (curve.collective, curve.nodes, curve.ranks, curve.groups): curve
            for curve in (*inside, *across)
        }

    @property
    def _curves_inside(self) -> tuple[CollectiveCurve, ...]:
        """The curves inside a node that hold on its link.

        Curves that were measured on the machine itself always hold, whatever its datasheet says.
        """
        intra = self.profile.intra
        measured_here = self.cluster.profile is not None and intra.kind is Kind.MEASURED
        same_link = _near(self.cluster.intra_node.bytes_per_s, intra.link_bytes_per_s)
        return intra.curves if measured_here or same_link else ()


def _near(bytes_per_s: float, of_curves: float | None) -> bool:
    """Returns True if a link has the speed of the one that curves were measured on."""
    return of_curves is not None and abs(bytes_per_s / of_curves - 1) <= LINK_TOLERANCE


def machine_for(
    cluster: Cluster,
    terms: Terms | None = None,
    *,
    without: str | None = None,
    measured: bool = True,
) -> Machine:
    """Returns the cluster with its own profile, else the shipped or the analytic one of its device.

    terms: the terms of another fit than the shipped one
    without: a source; the terms are those of the fit that did not see it
    measured: False for the analytic profile although the device has a shipped one
    """
    if cluster.profile is not None:
        return Machine(cluster, cluster.profile)
    name = cluster.device.name
    terms = shipped_terms() if terms is None else terms
    profile = (shipped_profile(name) if measured else None) or analytic_profile(name)
    share = terms.nic_share(cluster.nic.name, without)
    if share is not None:
        message_share = min(share, profile.inter.point_to_point_share)
        inter = replace(profile.inter, nic_share=share, point_to_point_share=message_share)
        profile = replace(profile, inter=inter)
    return Machine(cluster, profile)


@functools.cache
def shipped_profile(device_name: str) -> Profile | None:
    """Returns the profile in profiles/data/<device name>.yaml, or None.

    Raises ConfigError when the file is malformed.
    """
    if not _NAME.fullmatch(device_name):
        return None
    path = resources.files("parplan.profiles") / "data" / f"{device_name}.yaml"
    return _profile(read_yaml(path, path.name), path.name) if path.is_file() else None


def read_profile(text: str, where: str) -> Profile:
    """Returns a profile from its YAML.

    Raises ConfigError with `where` and the key when something is unknown or missing.
    """
    return _profile(parse_yaml(text, where), where)


def _profile(document: object, where: str) -> Profile:
    if not isinstance(document, Mapping):
        raise ConfigError(
            f"{where}: found {kind_text(document)}, needed a mapping",
            hint="rebuild it with parplan.profiles.build",
        )
    return parse(Profile, document, where)


# the assumptions for a device without measurements: round figures near the shipped fits
ASSUMED = (
    "assumed: round figures near those fitted on A100 and H100, of this device's own datasheet"
)
# forward, backward; un-fused cross entropy and embedding move many times the fewest bytes
ASSUMED_SHARES = {
    "norm": (0.55, 0.45),
    "elementwise": (0.70, 0.75),
    "residual": (0.75, 0.75),
    "softmax": (0.60, 0.55),
    "dropout": (0.70, 0.75),
    "embedding": (0.08, 0.07),
    "cross_entropy": (0.06, 0.20),
}
_LAUNCH_S = 4e-6
_OPTIMIZER_SHARE = 0.75
_LINK_SHARE = 0.75
_NIC_SHARE = 0.9
_POINT_TO_POINT_SHARE = 0.7


def assumed_memory(share: float) -> MemoryCurve:
    """Returns a memory-bound curve with assumed constants."""
    return MemoryCurve(
        launch_s=_LAUNCH_S, kind=Kind.ANALYTIC, source=ASSUMED, bandwidth_share=share
    )


def _assumed_matmul() -> MatmulCurve:
    return MatmulCurve(
        launch_s=_LAUNCH_S,
        kind=Kind.ANALYTIC,
        source=ASSUMED,
        efficiency=0.75,
        k_half=130.0,
        bandwidth_share=0.7,
    )


def _assumed_flash(efficiency: float) -> FlashCurve:
    return FlashCurve(
        launch_s=_LAUNCH_S,
        kind=Kind.ANALYTIC,
        source=ASSUMED,
        efficiency=efficiency,
        keys_half=250.0,
        head_half=20.0,
    )


def _assumed_compute() -> Compute:
    product = _assumed_matmul()
    passes: dict[str, Any] = {
        name: PassCurves(forward=assumed_memory(there), backward=assumed_memory(back))
        for name, (there, back) in ASSUMED_SHARES.items()
    }
    return Compute(
        forward=product,
        input_gradient=product,
        weight_gradient=product,
        batched_forward=product,
        batched_backward=product,
        flash_forward=_assumed_flash(0.75),
        flash_backward=_assumed_flash(0.60),
        optimizer=assumed_memory(_OPTIMIZER_SHARE),
        **passes,
    )


@functools.cache
def analytic_profile(device_name: str) -> Profile:
    """Returns assumed shares of the datasheet for a device without measurements.

    They are marked ANALYTIC throughout.
    """
    return Profile(
        name=device_name,
        compute=_assumed_compute(),
        intra=Intra(
            link_bytes_per_s=1.0,
            link_share=_LINK_SHARE,
            point_to_point_share=_POINT_TO_POINT_SHARE,
            kind=Kind.ANALYTIC,
            source=ASSUMED,
        ),
        inter=Inter(
            nic_share=_NIC_SHARE,
            point_to_point_share=_POINT_TO_POINT_SHARE,
            kind=Kind.ANALYTIC,
            source=ASSUMED,
        ),
    )
