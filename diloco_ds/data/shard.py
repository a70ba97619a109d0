"""In which order a run reads its blocks: one fixed global order, of which the ledger leases pieces (core/ledger.py).

All blocks are visited in an order that looks random, once an epoch, in another order each epoch. The order is
computed, not stored: `BlockOrder` is an infinite sequence of block ids that any process can enter anywhere.
"""

from __future__ import annotations

import hashlib

_ROUNDS = 4


class BlockOrder:
    """The infinite sequence of block ids of a run; an epoch of it holds each block once.

    It has no beginning either: below position 0 lie the epochs -1, -2, ... (the reserve, core/reading.py).
    """

    def __init__(self, blocks: int, seed: int) -> None:
        """`blocks`: how many there are, at least 1; `seed` chooses the order."""
        if blocks < 1:
            raise ValueError("there are no blocks to order")
        self.blocks = blocks
        self._seed = seed
        self._half_bits = max(1, ((blocks - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half_bits) - 1
        self._epoch = -1
        self._keys: list[int] = []

    def __getitem__(self, position: int) -> int:
        """The block at `position` (any integer).

        A Feistel network permutes the next larger power of four; what falls outside is permuted again until
        it falls inside (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
        Below four steps on average.
        """
        epoch, value = divmod(position, self.blocks)
        if epoch != self._epoch:
            self._keys, self._epoch = _round_keys(self._seed, epoch), epoch
        value = self._permute(value)
        while value >= self.blocks:
            value = self._permute(value)
        return value

    def _permute(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half_bits) | right


def _round_keys(seed: int, epoch: int) -> list[int]:
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]


def _mix(value: int) -> int:
    """A 64-bit hash: the finalizer of MurmurHash3 (Appleby)."""
    value &= (1 << 64) - 1
    value = (value ^ (value >> 33)) * 0xFF51AFD7ED558CCD & ((1 << 64) - 1)
    value = (value ^ (value >> 33)) * 0xC4CEB9FE1A85EC53 & ((1 << 64) - 1)
    return value ^ (value >> 33)
