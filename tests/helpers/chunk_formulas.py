"""Memory and traffic of chunks in closed form (EQUATIONS O2, O3, O4, O5).

Exact if every block has the same tensors and there is no padding.

    Phi      parameters of a pipeline rank
    D        data-parallel ranks, phi = Phi / D
    w, g     bytes of a parameter and of a gradient
    M        micro-batches
    delta    share of the parameters that lie on the host
    gamma    share of the parameters whose optimizer states lie on the host

A plan's predictions come from the schedule (costmodels/chunks/chunk_schedule.py), which is compared
with these formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from parplan.profiles.errors import ConfigError

OPTIMIZER_BYTES = 12  # the fp32 master copy and two moments


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedShares:
    """Offloaded shares delta and gamma of the `parameters` (phi) that a device owns.

    utilisation    u, the used share of the chunks
    """

    parameters: float
    delta: float
    gamma: float
    utilisation: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.delta <= 1 and 0 <= self.gamma <= 1 and 0 < self.utilisation <= 1):
            raise ConfigError(
                f"delta {self.delta:g}, gamma {self.gamma:g} "
                f"and utilisation {self.utilisation:g} must be shares"
            )

    @property
    def apart(self) -> float:
        """Share of parameters on the device whose optimizer states are on the host."""
        return max(0.0, self.gamma - self.delta)


def state_bytes(*, in_parameters: bool, width: int = 2, gradient: int = 2) -> int:
    """Bytes of all states of a parameter (EQUATIONS O2).

    w + 12        gradients overwrite parameters: 14 in 16 bits
    w + 12 + g    else: 16 in 16 bits
    """
    return width + OPTIMIZER_BYTES + (0 if in_parameters else gradient)


def device_bytes(
    shares: OwnedShares, *, in_parameters: bool = True, width: int = 2, gradient: int = 2
) -> float:
    """Bytes of the states that stay on a device (EQUATIONS O3).

    phi [w' (1 - delta) + 12 (1 - gamma)] / u        w' = w or w + g
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
    """Host bytes for one device: phi [w' delta + 12 gamma] / u (EQUATIONS O3).

    returned    adds the buffer for gradients, and for parameters to send back, of the share gamma -
                delta; it is no part of EQUATIONS O3
    """
    low = state_bytes(in_parameters=in_parameters, width=width, gradient=gradient) - OPTIMIZER_BYTES
    buffer = gradient * shares.apart if returned else 0.0
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
    """True if a device and the host of `gpus` devices have room for the states (EQUATIONS O3).

    device_room_bytes    a_g M_gpu - R - K: without the peak of non-model bytes and the working set
    host_room_bytes      a_c M_host
    """
    on_device = device_bytes(shares, in_parameters=in_parameters)
    on_host = host_bytes(shares, in_parameters=in_parameters)
    return on_device <= device_room_bytes and gpus * on_host <= host_room_bytes


def copied_in_bytes(
    shares: OwnedShares,
    *,
    num_micro_batches: int = 1,
    width: int = 2,
    returned_width: int = 2,
    staying: float = 0.0,
) -> float:
    """Bytes copied to a device in a step (EQUATIONS O4).

        phi / u [w (delta + (2 M - 1)(delta - staying)) + r max(0, gamma - delta)]

    staying           share of the parameters that each of the 2 M sweeps over the blocks but the
                      first finds on the device (PatrickStar: 0)
    returned_width    r of a parameter that the host has updated: 4 in fp32, else w
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
    """Bytes copied from a device in a step (EQUATIONS O4).

        phi / u g [M delta + max(0, gamma - delta)]

    clean_copies    the host keeps copies of parameters, and only gradients are copied. Without them
                    (PatrickStar) a parameter that leaves the device is copied too: w per sweep,
                    except in the backward sweep if its gradient has overwritten it
    """
    sweeps = 0
    if not clean_copies:
        sweeps = 1 if in_parameters else 2
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
    """Bytes that a device sends in a step for `parameters` (Phi) of D ranks (EQUATIONS O5).

        M (D - 1)/D Phi (2 w + g)        6 bytes per parameter in 16 bits

    Groups of chunks are gathered forward and backward, and their gradients are reduce-scattered.

    broadcast    each owner broadcasts its parameters, at twice the bytes of a gather: 4 w + g, 10
                 bytes per parameter in 16 bits
    """
    gathers = 4 if broadcast else 2
    return num_micro_batches * (ranks - 1) / ranks * parameters * (gathers * width + gradient)
