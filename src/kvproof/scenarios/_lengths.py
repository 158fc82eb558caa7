"""What a program consumes: its sequences, its compared prefixes, and the room that it needs."""

from collections.abc import Iterator

from kvproof.scenarios._data import Crop, Extend, Fork, Generate, Open, Reorder, Reset, Scenario

Ids = tuple[int, ...]


def longest_sequences(scenario: Scenario) -> tuple[Ids, ...]:
    """Return every token sequence that the scenario consumes and none of whose continuations it does."""
    seen = {sequence for sequence, _ in _consumed(scenario)}
    return tuple(sorted(s for s in seen if not any(o != s and o[: len(s)] == s for o in seen)))


def compared_prefixes(scenario: Scenario) -> frozenset[Ids]:
    """Return every prefix whose row is compared when the scenario runs to its end."""
    return frozenset(
        sequence[:length] for sequence, first in _consumed(scenario) for length in range(first, len(sequence) + 1)
    )


def capacity(scenario: Scenario) -> int:
    """Return how many tokens a session of the scenario holds at most; its caches are made for that many."""
    return max((len(sequence) for sequence, _ in _consumed(scenario)), default=0)


def _consumed(scenario: Scenario) -> Iterator[tuple[Ids, int]]:
    """Yield what each batch row has consumed after each call, and the length of its first compared prefix."""
    sessions: list[list[Ids]] = [[()] * scenario.batch]
    for operation in scenario.operations:
        match operation:
            case Open(batch=batch):
                sessions.append([()] * batch)
            case Fork(session=index):
                sessions.append(list(sessions[index]))
            case Extend(session=index, ids=ids, last_only=last_only):
                sessions[index] = [old + new for old, new in zip(sessions[index], ids, strict=True)]
                for row, new in zip(sessions[index], ids, strict=True):
                    yield row, len(row) if last_only else len(row) - len(new) + 1
            case Crop(session=index, length=length):
                sessions[index] = [row[:length] for row in sessions[index]]
            case Reorder(session=index, rows=rows):
                sessions[index] = [sessions[index][row] for row in rows]
            case Reset(session=index):
                sessions[index] = [()] * len(sessions[index])
            case Generate():
                yield from ((row, len(row)) for rows in operation.prefixes() for row in rows)
