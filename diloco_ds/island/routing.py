"""What an island tells of its experts: the tokens that all its ranks routed to each, beside the fragment they belong to.

Every rank writes its own counts of an answered fragment into its row of a board in shared memory, as it writes its slices
of the fragment; when the copies of all ranks are done (completion.py) rank 0 adds the rows up. No collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from diloco_ds.exchange.mapping import PAGE, WORD, aligned, create_mapped_file, map_file
from diloco_ds.island.transfer import DeviceCopy, HostMemory
from diloco_ds.model.experts import RoutedTokens

_MAGIC = int.from_bytes(b"DDS-RTD\0", "little")
_FORMAT = 1
_FIRST = 8


class RoutingBoard:
    """int64 [ranks, experts of all fragments] in the file `path`; a row is written by its rank alone. `experts`: of each
    fragment, as in the layout.
    """

    def __init__(self, path: Path, experts: Sequence[int]) -> None:
        self._mapping, words = map_file(path, _MAGIC, _FORMAT)
        ranks, ends = words[2], list(accumulate(experts))
        self._rows = torch.frombuffer(
            self._mapping, dtype=torch.int64, count=ranks * ends[-1], offset=_FIRST * WORD
        ).view(ranks, ends[-1])
        self._of_fragment = [slice(end - count, end) for end, count in zip(ends, experts, strict=True)]

    @classmethod
    def renew(cls, path: Path, ranks: int, experts: Sequence[int]) -> None:
        """A new board in place of an older one."""
        path.unlink(missing_ok=True)
        create_mapped_file(
            path, aligned((_FIRST + ranks * sum(experts)) * WORD, PAGE), (_MAGIC, _FORMAT, ranks)
        )

    @property
    def address(self) -> int:
        """Address of the whole mapping, for `Engine.pin`."""
        return torch.frombuffer(self._mapping, dtype=torch.uint8, count=1).data_ptr()

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return len(self._mapping)

    def row(self, rank: int, fragment: int) -> Tensor:
        """What `rank` says of the fragment: int64 [experts], the shared memory itself."""
        return self._rows[rank, self._of_fragment[fragment]]

    def total(self, fragment: int) -> list[int]:
        """The sum over all ranks."""
        return [int(count) for count in self._rows[:, self._of_fragment[fragment]].sum(0)]


class Routing:
    """One rank's part. `routed` counts, `host` carries what was counted to `board`."""

    def __init__(self, routed: RoutedTokens, board: RoutingBoard, host: HostMemory, rank: int) -> None:
        self._routed, self._board, self._host, self._rank = routed, board, host, rank

    def answer(self, fragment: int) -> list[DeviceCopy]:
        """Write this rank's counts of a fragment that is being answered; no transfer where it has no experts."""
        counts = self._routed.answered(fragment)
        return [] if counts is None else [self._host.bring(counts, self._board.row(self._rank, fragment))]

    def adopted(self, fragment: int, keeps: bool) -> None:
        """As `RoutedTokens.adopted`."""
        self._routed.adopted(fragment, keeps)

    def told(self, fragment: int, tokens: int) -> tuple[int, ...]:
        """Rank 0's, once the copies of all ranks are done: of the answer's `tokens` those routed to each expert."""
        return self._routed.tokens(fragment, self._board.total(fragment), tokens)
