"""A shuffled order of n things in constant memory: where each goes is computed, no list of them is
made.
"""

from __future__ import annotations

import hashlib

# Luby and Rackoff 1988, doi:10.1137/0217022: three make a Feistel network look random, four against
# inverse queries
_ROUNDS = 4


def shuffled(place: int, num: int, *, seed: int, epoch: int) -> int:
    """Which of `num` things comes at `place`: over all places each comes once, another order for
    each seed and epoch.

    A Feistel network permutes the 4^b >= num numbers of 2 b bits; where it leaves the first `num`
    it is applied again until it comes back (cycle walking: Black and Rogaway 2002,
    doi:10.1007/3-540-45760-7_9), at most four times on average.
    """
    half_bits = max(1, ((num - 1).bit_length() + 1) // 2)
    key = f"{seed}/{epoch}/".encode()
    found = _feistel(place, half_bits, key)
    while found >= num:
        found = _feistel(found, half_bits, key)
    return found


def _feistel(value: int, half_bits: int, key: bytes) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(_ROUNDS):
        digest = hashlib.blake2b(b"%d/%d" % (number, right), key=key, digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return left << half_bits | right
