"""Fits programs to what one call of a decoder takes and returns."""

from collections.abc import Iterator
from dataclasses import replace

from kvproof.scenarios._calls import Extend
from kvproof.scenarios._operations import Operation
from kvproof.scenarios._walk import Scenario


def fit_calls(program: Scenario, *, max_block: int | None, last_row: bool) -> Scenario:
    """Return a program whose calls feed at most ``max_block`` tokens to a row.

    With ``last_row``, only the row after a call's last token is compared. Rows of unequal length that are longer
    than a block stay together: the padding of a part would fill it.
    """
    if max_block is None and not last_row:
        return program
    operations = tuple(part for each in program.operations for part in _fit(each, max_block, last_row=last_row))
    return replace(program, operations=operations)


def _fit(operation: Operation, max_block: int | None, *, last_row: bool) -> Iterator[Operation]:
    if not isinstance(operation, Extend):
        yield operation
        return
    operation = replace(operation, last_only=operation.last_only or last_row)
    if max_block is None or operation.is_ragged or operation.num_columns <= max_block:
        yield operation
        return
    for start in range(0, operation.num_columns, max_block):
        yield replace(operation, ids=tuple(row[start : start + max_block] for row in operation.ids))
