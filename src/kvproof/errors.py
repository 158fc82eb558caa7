"""The exceptions that kvproof raises.

::

    KvproofError
    ├── UsageError            the caller's input is wrong; the command line exits with 2
    │   ├── CheckpointError   a checkpoint is unreadable or altered
    │   ├── LedgerError       a ledger cannot be read
    │   ├── ReportError       a report cannot be read
    │   └── AbilityError      the subject does not declare the required ability
    ├── OutputError           a result could not be written; the command line exits with 73
    ├── TrainingError         training did not reach the promised loss
    ├── SessionError          a call breaks the contract of the cache; the session is unchanged
    │   ├── TokenError        a token id is outside the vocabulary, or there are no tokens
    │   ├── ContextError      a position is beyond the context
    │   └── CacheError        wrong layer or axes, duplicate or missing append, mixed requests
    └── SubjectError          the audited decoder raised; ``__cause__`` is its exception
        ├── MalformedRowError it returned something other than a row of logits
        └── RefusedError      it cannot do this here, by design; the session is unchanged

`kvproof.MismatchError` is an ``AssertionError`` instead, so that test runners show it as a failure.
"""


class KvproofError(Exception):
    """The base class of the exceptions that kvproof raises on purpose."""


class UsageError(KvproofError):
    """The caller's input is wrong; the message names the value and what to do."""


class CheckpointError(UsageError):
    """A checkpoint file is unreadable, was altered, or has another format or configuration."""


class LedgerError(UsageError):
    """A ledger is unreadable, or has another format or an unsupported version."""


class ReportError(UsageError):
    """A saved report is unreadable, or has another format or an unsupported version."""


class AbilityError(UsageError):
    """The subject or session does not declare the required ability."""


class OutputError(KvproofError):
    """A result exists but could not be written."""


class TrainingError(KvproofError):
    """Training did not reach the loss that the recipe promises."""


class SessionError(KvproofError):
    """A call breaks the contract of the cache; the session is as it was before the call."""


class TokenError(SessionError):
    """A token id is not an integer in the vocabulary, or there are no tokens."""


class ContextError(SessionError):
    """A position is beyond the last one that the decoder accepts."""


class CacheError(SessionError):
    """A cache operation has the wrong layer, axes, length or request."""


class SubjectError(KvproofError):
    """The audited decoder raised; ``__cause__`` is its exception. Without one, an adapter refused a call."""


class MalformedRowError(SubjectError):
    """The audited decoder returned no logits, or logits of another shape or type."""


class RefusedError(SubjectError):
    """The decoder cannot do this at this place, by design: a crop, fork or reorder, or a generation method.

    For example, a ring buffer cannot be cropped to a length whose entries it has overwritten. The session must be
    as it was before. A scenario in which this happens is `not-checked`, with the message as its reason.
    """
