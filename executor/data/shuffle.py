"""A shuffled order of n items in constant memory: each position is computed, no list is stored."""

from __future__ import annotations

import hashlib

# Luby and Rackoff 1988, doi:10.1137/0217022: three rounds make a Feistel network pseudorandom, four
# also against inverse queries.
_ROUNDS = 4


def shuffled_item(place: int, num: int, *, seed: int, epoch: int) -> int:
    """Returns the item at position `place` of a permutation of `num` items.

    Each seed and epoch gives another permutation. A Feistel network permutes the 4^b >= num numbers
    of 2 b bits; a result outside the first `num` is permuted again until it falls inside (cycle
    walking: Black and Rogaway 2002, doi:10.1007/3-540-45760-7_9), at most four times on average.
    """
    half_bits = max(1, ((num - 1).bit_length() + 1) // 2)
    key = f"{seed}/{epoch}/".encode()
    item = _feistel(place, half_bits, key)
    while item >= num:
        item = _feistel(item, half_bits, key)
    return item


def _feistel(value: int, half_bits: int, key: bytes) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(_ROUNDS):
        digest = hashlib.blake2b(b"%d/%d" % (number, right), key=key, digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return left << half_bits | right
