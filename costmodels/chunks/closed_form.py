"""What chunks need and move, in closed form (EQUATIONS O2, O3, O4, O5): exact where every block has
the same tensors and none is padding.

Phi parameters of a pipeline rank, D data-parallel ranks, phi = Phi / D. w bytes a parameter, g a
gradient, M micro-batches.
delta: share of the parameters at home on the host; gamma: share whose optimizer states are.
The schedule (costmodels/chunks/chunk_schedule.py) is what a plan predicts; this is what it is
compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

from parplan.costmodels.layers.model_states import MASTER_BYTES, MOMENTS_BYTES
from parplan.profiles.errors import ConfigError

OPTIMIZER_BYTES = MASTER_BYTES + MOMENTS_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedShares:
    """delta and gamma of `parameters` (phi) that a device owns, in chunks of `utilisation` (u)."""

    parameters: float
    delta: float
    gamma: float
    utilisation: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.delta <= 1 and 0 <= self.gamma <= 1 and 0 < self.utilisation <= 1):
            raise ConfigError(
                f"delta {self.delta:g}, gamma {self.gamma:g} and utilisation {self.utilisation:g} must be shares"
            )

    @property
    def apart(self) -> float:
        """Of parameters on the device whose optimizer states are on the host."""
        return max(0.0, self.gamma - self.delta)


def state_bytes(*, in_parameters: bool, width: int = 2, gradient: int = 2) -> int:
    """Bytes of all states of a parameter: w + 12, and g where gradients do not take its place: 14,
    16 in 16 bits (EQUATIONS O2).
    """
    return width + OPTIMIZER_BYTES + gradient * (not in_parameters)


def device_bytes(
    shares: OwnedShares, *, in_parameters: bool = True, width: int = 2, gradient: int = 2
) -> float:
    """Of a device's states those that are always on it: phi [w' (1 - delta) + 12 (1 - gamma)] / u,
    w' = w or w + g (EQUATIONS O3).
    """
    low = state_bytes(in_parameters=in_parameters, width=width, gradient=gradient) - OPTIMIZER_BYTES
    return (
        shares.parameters
        * (low * (1 - shares.delta) + OPTIMIZER_BYTES * (1 - shares.gamma))
        / shares.utilisation
    )


def host_bytes(
    shares: OwnedShares,
    *,
    in_parameters: bool = True,
    width: int = 2,
    gradient: int = 2,
    returned: bool = False,
) -> float:
    """What the host holds for a device: phi [w' delta + 12 gamma] / u (EQUATIONS O3).

    returned: also the buffer of gradients, and of parameters to send back, that the host needs of
    gamma - delta, no part of EQUATIONS O3.
    """
    low = state_bytes(in_parameters=in_parameters, width=width, gradient=gradient) - OPTIMIZER_BYTES
    buffer = gradient * shares.apart * returned
    return (
        shares.parameters
        * (low * shares.delta + OPTIMIZER_BYTES * shares.gamma + buffer)
        / shares.utilisation
    )


def chunks_fit(
    shares: OwnedShares,
    device_room_bytes: float,
    host_room_bytes: float,
    gpus: int,
    *,
    in_parameters: bool = True,
) -> bool:
    """Whether a device has room for its states, and the host of `gpus` devices for theirs
    (EQUATIONS O3).

    device_room_bytes: a_g M_gpu - R - K, without non-model bytes at their peak and the working set;
    host_room_bytes: a_c M_host
    """
    on_device, on_host = (
        device_bytes(shares, in_parameters=in_parameters),
        host_bytes(shares, in_parameters=in_parameters),
    )
    return on_device <= device_room_bytes and gpus * on_host <= host_room_bytes


def copied_in_bytes(
    shares: OwnedShares,
    *,
    num_micro_batches: int = 1,
    width: int = 2,
    returned_width: int = 2,
    staying: float = 0.0,
) -> float:
    """To a device in a step: phi / u [w (delta + (2 M - 1)(delta - staying)) + r max(0, gamma -
    delta)] (EQUATIONS O4).

    2 M sweeps over the blocks, forward and backward in turn, of which all but the first find a
    share `staying` of the parameters on the device (PatrickStar: 0). r, `returned_width`, of a
    parameter that the host has updated: 4 where it is sent as fp32, else w.
    """
    swept = shares.delta + (2 * num_micro_batches - 1) * (shares.delta - staying)
    return shares.parameters * (width * swept + returned_width * shares.apart) / shares.utilisation


def copied_out_bytes(
    shares: OwnedShares,
    *,
    num_micro_batches: int = 1,
    width: int = 2,
    gradient: int = 2,
    in_parameters: bool = True,
    clean_copies: bool = True,
) -> float:
    """From a device in a step: phi / u g [M delta + max(0, gamma - delta)], gradients alone where
    the host has clean copies (EQUATIONS O4).

    clean_copies: without them (PatrickStar) a parameter that leaves the device is copied too: w a
    sweep, but for the backward where its gradient has taken its place.
    """
    sweeps = 0 if clean_copies else (1 if in_parameters else 2)
    per_micro_batch = shares.delta * (gradient + width * sweeps)
    return (
        shares.parameters
        * (num_micro_batches * per_micro_batch + gradient * shares.apart)
        / shares.utilisation
    )


def collective_bytes(
    parameters: float,
    ranks: int,
    *,
    num_micro_batches: int = 1,
    width: int = 2,
    gradient: int = 2,
    broadcast: bool = False,
) -> float:
    """Sent by a device in a step for `parameters` (Phi) of D ranks: M (D - 1)/D Phi (2 w + g), 6 in
    16 bits (EQUATIONS O5).

    Groups of chunks are gathered forward and backward, their gradients reduced and scattered.
    broadcast: each parameter by its owner instead, which costs twice the gather: 4 w + g, 10 in 16
    bits.
    """
    gathers = 4 if broadcast else 2
    return num_micro_batches * (ranks - 1) / ranks * parameters * (gathers * width + gradient)
