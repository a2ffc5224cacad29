"""Where the model states of a block lie when they are held in chunks (EQUATIONS O3), and what a
full device evicts.
"""

from __future__ import annotations

from enum import StrEnum

from parplan.costmodels.host.offload import Offload


class StateLocation(StrEnum):
    """delta is the share of blocks at HOST, gamma that of those at HOST and OPTIMIZER together.

    DEVICE      all on the device, which updates the parameters
    OPTIMIZER   parameters and gradients on the device; fp32 master and moments on the host, which
                updates the parameters
    HOST        all on the host; parameters come to the device to be used, gradients leave it as
                soon as they are there
    """

    DEVICE = "device"
    OPTIMIZER = "optimizer"
    HOST = "host"


class Eviction(StrEnum):
    """Which chunk leaves a full device: the one whose next use is farthest (Belady), the one used
    longest ago, the one there longest.
    """

    OPT = "opt"
    LRU = "lru"
    FIFO = "fifo"


OFFLOAD_OF = {
    StateLocation.DEVICE: (),
    StateLocation.OPTIMIZER: (Offload.OPTIMIZER,),
    StateLocation.HOST: (Offload.OPTIMIZER, Offload.PARAMETERS),
}
