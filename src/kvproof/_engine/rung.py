"""The uncached rows of a subject in one dtype, in blocks: all of a large vocabulary's may fill the memory."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvproof._numerics.dtypes import dtype_of
from kvproof._numerics.taps import Tap, untouched
from kvproof.subjects import Subject

Prefix = tuple[int, ...]
#: Rows that were computed together: the tokens of the pass, and the position of the first row.
Block = tuple[Prefix, int]

#: Rows are computed in blocks of at most this many bytes …
BLOCK_BYTES = 2**27
#: … of which no more than this is kept, for each rung.
KEPT_BYTES = 2**28


def fed_to_fresh_cache(subject: Subject, ids: Prefix, sizes: Iterable[int]) -> Iterator[Tensor]:
    """Feed tokens to a new session in calls of these sizes; yield each call's logits (new, vocab).

    Raises what the session refuses, and `SubjectError` where the decoder does.
    """
    session, start = subject.session(), 0
    for size in sizes:
        yield session.extend([ids[start : start + size]])[0]
        start += size


class Rung:
    """The uncached rows of a subject in one dtype, computed in blocks and kept while there is room."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._blocks: OrderedDict[Block, Tensor] = OrderedDict()
        row_bytes = subject.info.vocab_size * dtype_of(subject.info.dtype).itemsize
        self._block_len = max(1, BLOCK_BYTES // row_bytes)

    def literal(self, prefix: Prefix) -> Tensor:
        """Return the last row (vocab,) of the forward over exactly this prefix."""
        return self._kept(prefix, len(prefix) - 1, 1)[0]

    def one_pass(self, sequence: Prefix, length: int) -> Tensor:
        """Return the row (vocab,) that follows the first ``length`` tokens in the pass over a sequence."""
        start, num_rows = self._block(sequence, length)
        return self._kept(sequence, start, num_rows)[length - 1 - start]

    def tapped(self, sequence: Prefix, length: int, tap: Tap) -> None:
        """Run the pass over a sequence with a tap, and keep the rows around the first ``length`` tokens.

        Where that is not all rows, the tap need not see the readout: the rows themselves are it.
        """
        start, num_rows = self._block(sequence, length)
        self._compute(sequence, start, num_rows, tap)

    def _block(self, sequence: Prefix, length: int) -> tuple[int, int]:
        """Return where the block starts that holds a length's row, and how many rows it has."""
        start = (length - 1) // self._block_len * self._block_len
        return start, min(self._block_len, len(sequence) - start)

    def _kept(self, ids: Prefix, start: int, num_rows: int) -> Tensor:
        key = (ids, start)
        if key in self._blocks and len(self._blocks[key]) >= num_rows:
            self._blocks.move_to_end(key)
            return self._blocks[key]
        return self._compute(ids, start, num_rows)

    def _compute(self, ids: Prefix, start: int, num_rows: int, tap: Tap = untouched) -> Tensor:
        rows = self.subject.rows(ids, tap=tap, keep=range(start, start + num_rows))
        if num_rows < len(ids):
            rows = rows.clone()  # a view would hold the memory of the rows that were not asked for
        self._keep((ids, start), rows)
        return rows

    def _keep(self, key: Block, rows: Tensor) -> None:
        self._blocks[key] = rows
        while len(self._blocks) > 1 and sum(map(_num_bytes, self._blocks.values())) > KEPT_BYTES:
            self._blocks.popitem(last=False)

    def computed_since(self, known: Collection[Block]) -> dict[Block, NDArray[np.uint8]]:
        """Return the bytes of the blocks that are kept beyond those known, fit to be sent to another process."""
        return {
            key: rows.contiguous().view(torch.uint8).numpy()
            for key, rows in self._blocks.items()
            if key not in known
        }

    def take(self, blocks: Mapping[Block, NDArray[np.uint8]]) -> None:
        """Keep blocks that another process has computed."""
        dtype = dtype_of(self.subject.info.dtype)
        for key, rows in blocks.items():
            self._keep(key, torch.from_numpy(rows).view(dtype))

    @property
    def blocks(self) -> frozenset[Block]:
        """Which blocks are kept."""
        return frozenset(self._blocks)


def _num_bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()
