"""What sessions hold at one point of a program, computed without a decoder."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Self

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """What a session holds at one point of a program."""

    rows: tuple[Ids, ...]  #: the tokens of each batch row
    columns: int = 0  #: the cache's slots for each row, left padding included
    peak: int = 0  #: the length that the longest row has reached since the session was last empty
    call_start: int = 0  #: the length before the newest call, or after a later crop

    @classmethod
    def empty(cls, num_rows: int) -> Self:
        """Return the state of a session that holds no token."""
        return cls(rows=((),) * num_rows)

    @property
    def length(self) -> int:
        """The number of tokens of the longest row."""
        return max(map(len, self.rows))

    @property
    def is_ragged(self) -> bool:
        """Whether rows have different lengths."""
        return len(set(map(len, self.rows))) > 1


#: The states of all open sessions, by number.
States = tuple[SessionState, ...]


def nearest_id(ids: Ids | None, token_id: int) -> int:
    """Return the id itself if it is one of ``ids``, which ascend, or else one of them that depends on it alone.

    Ids are drawn from the whole vocabulary first, so that avoiding one changes no other token of a program.
    """
    if ids is None:
        return token_id
    place = bisect_left(ids, token_id)
    return token_id if place < len(ids) and ids[place] == token_id else ids[token_id % len(ids)]
