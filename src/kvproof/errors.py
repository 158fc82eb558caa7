"""What kvproof raises.

::

    KvproofError
    ├── UsageError            the caller's input is wrong; the command line exits 2
    │   ├── CheckpointError   a checkpoint that cannot be read, or is not what it says
    │   ├── LedgerError       a generation ledger that cannot be read
    │   ├── ReportError       a report that cannot be read
    │   └── AbilityError      the subject does not declare the ability that was asked for
    ├── OutputError           a result could not be written; the command line exits 73
    ├── TrainingError         the recipe did not reach the loss that it promises
    ├── SessionError          a call that breaks the cache's contract; the session is unchanged
    │   ├── TokenError        a token id outside the vocabulary, or no token at all
    │   ├── ContextError      a position past the context
    │   └── CacheError        wrong layer, wrong axes, double or missing append, mixed requests
    └── SubjectError          the decoder under audit itself raised; the cause is kept
"""


class KvproofError(Exception):
    """The base of everything that kvproof raises on purpose."""


class UsageError(KvproofError):
    """The caller's input is wrong; the message names the value and the way out."""


class CheckpointError(UsageError):
    """A checkpoint file is unreadable, altered, foreign or of another configuration."""


class LedgerError(UsageError):
    """A generation ledger is unreadable, foreign or of another schema version."""


class ReportError(UsageError):
    """A saved report is unreadable, foreign or of another schema version."""


class AbilityError(UsageError):
    """The subject or session does not declare the ability that was asked for."""


class OutputError(KvproofError):
    """A result exists but could not be written where the caller wanted it."""


class TrainingError(KvproofError):
    """The training recipe did not reach the loss that it promises."""


class SessionError(KvproofError):
    """A call breaks the cache's contract; the session is as it was before the call."""


class TokenError(SessionError):
    """A token id is not an integer inside the vocabulary, or there is no token at all."""


class ContextError(SessionError):
    """A position lies past the last one that the decoder accepts."""


class CacheError(SessionError):
    """A cache operation names the wrong layer, axes, length or request."""


class SubjectError(KvproofError):
    """The decoder under audit raised; ``__cause__`` is what it raised."""
