"""Locations of model states held in chunks (EQUATIONS O3), and eviction from a full device."""

from __future__ import annotations

from enum import StrEnum

from parplan.costmodels.host.offload import Offload


class StateLocation(StrEnum):
    """The location of a block's model states.

    delta is the share of blocks at HOST, gamma that of blocks at HOST and OPTIMIZER together.

    DEVICE      all on the device, which updates the parameters
    OPTIMIZER   parameters and gradients on the device; fp32 master and moments on the host, which
                updates the parameters
    HOST        all on the host; parameters are copied to the device for use, gradients are copied
                back as soon as they are computed
    """

    DEVICE = "device"
    OPTIMIZER = "optimizer"
    HOST = "host"


class Eviction(StrEnum):
    """The chunk that leaves a full device.

    OPT    the chunk with the farthest next use (Belady)
    LRU    the chunk whose last use is longest ago
    FIFO   the chunk that is there longest
    """

    OPT = "opt"
    LRU = "lru"
    FIFO = "fifo"


class ChunkCommunication(StrEnum):
    """The ways in which data-parallel ranks gather the chunks of a group and reduce gradients.

    GROUP     all chunks at once
    SINGLE    one chunk after the other: its owner broadcasts it, and gets the sum of its gradients,
              which pass through one buffer (PatrickStar's memory saving communication)
    """

    GROUP = "group"
    SINGLE = "single"


class Access(StrEnum):
    """The unit of a block that has to be on the device together.

    BLOCK       the pass of a block uses all its parameters at once
    OPERATOR    an operator at a time (costmodels/layers/block_parts.py)
    """

    BLOCK = "block"
    OPERATOR = "operator"


OFFLOAD_OF = {
    StateLocation.DEVICE: (),
    StateLocation.OPTIMIZER: (Offload.OPTIMIZER,),
    StateLocation.HOST: (Offload.OPTIMIZER, Offload.PARAMETERS),
}
