"""Keeps a command's exit status its own while it runs code of the user's."""

import os
from collections.abc import Iterable

from kvproof.cli.options import Finished
from kvproof.subjects._registry import runs_named_code

#: How long a call of the user's code may take, in seconds, where nobody watches it.
_CI_LIMIT_S = 600


def guard(targets: Iterable[str | None], *, trusts_code: bool, timeout_s: int | None) -> None:
    """Go on in a child process if a target runs code of the user's; the parent ends with the child's exit status.

    Code of the user's can end or block the process that runs it. Call this before anything heavy is imported.
    Raises `UsageError` in the parent if that happens; ``timeout_s`` limits each call, and 0 sets no limit.
    """
    named = [target for target in targets if target is not None]
    codes = [target for target in named if runs_named_code(target)] or (named if trusts_code else [])
    if timeout_s is None and codes and os.environ.get("CI", "").lower() not in ("", "0", "false"):
        timeout_s = _CI_LIMIT_S
    if not codes and not timeout_s:
        return
    from kvproof._system.supervisor import supervise

    status = supervise((codes or named or ["the model"])[0], timeout_s or None)
    if status is not None:
        raise Finished(status)
