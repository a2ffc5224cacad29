"""Communication under compute: the seconds that it adds (EQUATIONS C8)."""

from __future__ import annotations

from parplan.profiles.elementwise import anywhere, smaller_of
from parplan.profiles.machines.shipped_profiles import Machine
from parplan.profiles.provenance import ZERO, Seconds

# Compute seconds lost to a second of hidden communication, where the machine's own profile has no
# measurement: its kernels hold 16 to 24 of an A100's 108 multiprocessors, and memory bandwidth.
# Assumed from that share.
CONTENTION = 0.2


def contention(machine: Machine) -> float:
    """Compute seconds lost to a second of hidden communication: measured, else CONTENTION."""
    measured = machine.profile.contention
    return CONTENTION if measured is None else measured


def under(communication: Seconds, window_s: float, machine: Machine) -> Seconds:
    """Seconds that communication adds to the compute that hides it (EQUATIONS C8).

    max(0, c - window) + contention min(c, window)
    """
    if not anywhere(communication.value_s):
        return ZERO
    hidden = smaller_of(1.0, window_s / communication.value_s)
    return communication.scaled(1 - hidden + contention(machine) * hidden)
