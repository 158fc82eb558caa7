"""Checks that an adapter keeps the promises of the `Subject` interface. For authors of a `Subject`.

An audit trusts the adapter: for example, that a fork shares nothing, and that the decoder continues with the
value that a tap returns. If that is not true, the audit reports the adapter's bugs as the decoder's. `check`
tests each promise, one ability at a time, on a few tokens.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvproof._engine.prompts import random_sequences
from kvproof._numerics.dtypes import dtype_of, name_of
from kvproof._numerics.taps import Recorder
from kvproof._numerics.tolerances import declared_tolerance
from kvproof._system.user_frames import describe_origin
from kvproof.contract.stages import Site, Stage
from kvproof.errors import ContextError, KvproofError, RefusedError
from kvproof.scenarios import Ability
from kvproof.subjects import Session, Subject, as_subject

_NUM_TOKENS = 8
#: What a quick check looks at besides plain sessions.
_QUICK = frozenset({Ability.FORK, Ability.CROP})
#: A gap beyond this many times the declared tolerance is not rounding from the same calls in another order.
_FACTOR = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One promise of an adapter, and whether the adapter keeps it."""

    promise: str
    problem: str | None  #: None if the promise is kept
    where: str | None = None  #: file, line and function of what the adapter or the decoder raised

    def __str__(self) -> str:
        """Return the result on one line."""
        if self.problem is None:
            return f"kept: {self.promise}"
        place = "" if self.where is None else f" ({self.where})"
        return f"BROKEN: {self.promise}: {self.problem}{place}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conformance:
    """The results for all promises that the declared abilities make."""

    name: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether all promises are kept."""
        return all(check.problem is None for check in self.checks)

    def __str__(self) -> str:
        """Return one line for each promise, broken ones first."""
        ordered = sorted(self.checks, key=lambda check: check.problem is None)
        return "\n".join((f"{self.name}:", *map(str, ordered)))


class _Broken(Exception):
    """A promise that is not kept, and the evidence."""


def check(decoder: object, *, quick: bool = False) -> Conformance:
    """Check an adapter against what it declares; ``decoder`` is any argument that `audit` accepts.

    ``quick`` leaves out casts, taps, batches and cache tensors.

    Raises `UsageError` if it is not a decoder, or its context holds fewer than 4 tokens.
    """
    subject = as_subject(decoder)
    examiner = _Examiner(subject)
    return Conformance(
        name=subject.info.name,
        checks=tuple(_checked(promise, run) for promise, run in examiner.promises(quick=quick)),
    )


def assert_conforms(decoder: object) -> None:
    """Raise `AssertionError` with every promise that an adapter breaks."""
    result = check(decoder)
    assert result.passed, str(result)


def _checked(promise: str, run: Callable[[], None]) -> Check:
    try:
        run()
    except _Broken as error:
        return Check(promise=promise, problem=str(error))
    except KvproofError as error:
        return Check(promise=promise, problem=_first_line(error), where=describe_origin(error))
    except Exception as error:  # what an adapter returns may be anything
        problem = f"{type(error).__name__}: {_first_line(error)}"
        return Check(promise=promise, problem=problem, where=describe_origin(error))
    return Check(promise=promise, problem=None)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "no message")


class _Examiner:
    """Tests promises on two short sequences of tokens."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        length = min(_NUM_TOKENS, subject.info.context_len)
        self.a, self.b = random_sequences(subject, length, seed=0)
        self.half = length // 2
        self.tolerance = declared_tolerance(dtype_of(subject.info.dtype))

    def promises(self, *, quick: bool) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yield each promise of the interface and of the declared abilities, with the function that tests it."""
        yield "rows are of the declared dtype, and the same each time", self._rows
        yield "tokens past the context are refused, and nothing is changed by that", self._context
        if not self.subject.one_session:
            yield "sessions do not affect each other", self._sessions
        yield "a reset session is as good as a new one", self._reset
        for ability, promise, run in (
            (Ability.TAP, "a tap sees the tokens, and changes nothing by looking", self._looking),
            (Ability.TAP, "what a tap returns is what the decoder goes on with", self._changing),
            (Ability.TAP, "a call that raises leaves the session as it was", self._raising),
            (Ability.CAST, "a cast decoder is the same one in another dtype", self._cast),
            (Ability.FORK, "a fork shares nothing with what it was forked from", self._fork),
            (Ability.CROP, "after a crop other tokens follow as if the old ones had never been", self._crop),
            (Ability.BATCH, "a batch row is what it is alone", self._batch),
            (Ability.REORDER, "rows that are reordered take their state along", self._reorder),
            (Ability.INSPECT, "cache tensors are by layer, with the batch on axis 0", self._inspect),
            (Ability.EDIT, "tensors that are put back change nothing, and others do", self._edit),
        ):
            if ability in self.subject.info.abilities and (ability in _QUICK or not quick):
                yield promise, run

    def _stepped(self, ids: tuple[int, ...], session: Session | None = None) -> Tensor:
        """Return the rows (new, vocab) of feeding one token after another."""
        session = self.subject.session() if session is None else session
        return torch.cat([session.extend([[token]])[0] for token in ids])

    def _same(self, one: Tensor, other: Tensor, what: str) -> None:
        gap = float((one.double() - other.double()).abs().max())
        scale = float(other.abs().max())
        if not gap <= _FACTOR * self.tolerance.allowed(scale):
            raise _Broken(f"{what} differs by {gap:.3g} of {scale:.3g}")

    def _rows(self) -> None:
        first, second = self.subject.rows(self.a), self.subject.rows(self.a)
        dtype = name_of(first.dtype)
        if dtype != self.subject.info.dtype:
            raise _Broken(f"rows are {dtype}, and {self.subject.info.dtype} is declared")
        if not torch.equal(first, second):
            raise _Broken("two calls with the same tokens give different rows")

    def _context(self) -> None:
        if self.subject.boundaries.context_len != self.subject.info.context_len:
            raise _Broken(
                f"the boundaries say {self.subject.boundaries.context_len} positions, the info "
                f"{self.subject.info.context_len}"
            )
        if self.subject.info.context_len > len(self.a):
            return  # the context end scenario fills long contexts
        session = self.subject.session()
        session.extend([self.a])
        try:
            session.extend([self.a[:1]])
        except ContextError:
            return
        raise _Broken("a token past the last position was taken")

    def _sessions(self) -> None:
        one, two = self.subject.session(), self.subject.session()
        rows = [(one.extend([[x]])[0, 0], two.extend([[y]])[0, 0]) for x, y in zip(self.a, self.b, strict=True)]
        self._same(
            torch.stack([x for x, _ in rows]), self._stepped(self.a), "a session run in turns with another"
        )

    def _reset(self) -> None:
        session = self.subject.session()
        session.extend([self.b])
        session.reset()
        self._same(self._stepped(self.a, session), self._stepped(self.a), "a reset session")

    def _looking(self) -> None:
        recorder = Recorder()
        looked = self._stepped(self.a, self.subject.session(tap=recorder))
        if not torch.equal(looked, self._stepped(self.a)):
            raise _Broken("rows change when a tap looks on")
        tokens = recorder.take().get(Site(Stage.TOKEN))
        if tokens is None:
            raise _Broken("the tap is never shown the tokens")

    def _changing(self) -> None:
        other = self.b[-1] if self.b[-1] != self.a[-1] else self.subject.token_ids.another(self.a[-1])

        def tap(site: Site, value: Tensor, /) -> Tensor:
            return torch.full_like(value, other) if site.stage is Stage.TOKEN else value

        rows = self.subject.session(tap=tap).extend([self.a[-1:]])[0]
        self._same(rows, self.subject.session().extend([[other]])[0], "a call whose token a tap replaced")

    def _raising(self) -> None:
        armed = False

        def tap(site: Site, value: Tensor, /) -> Tensor:
            if armed:
                raise RuntimeError("a tap raised")
            return value

        session = self.subject.session(tap=tap)
        before = self._stepped(self.a[: self.half], session)
        armed = True
        try:
            session.extend([self.b[:2]])
            raise _Broken("a tap that raises is not heard")
        except KvproofError:
            armed = False
        rows = torch.cat([before, self._stepped(self.a[self.half :], session)])
        self._same(rows, self._stepped(self.a), "what follows a call that raised")

    def _cast(self) -> None:
        cast = self.subject.cast(torch.float64)
        if cast.info.dtype != "float64" or cast.rows(self.a).dtype is not torch.float64:
            raise _Broken("cast to float64, it does not compute in float64")
        self._same(self.subject.rows(self.a), cast.rows(self.a), "the decoder in float64")

    def _fork(self) -> None:
        session = self.subject.session()
        head, a, b = self.a[: self.half], self.a[self.half :], self.b[self.half :]
        session.extend([head])
        child = session.fork()
        rows = [(session.extend([[x]])[0, 0], child.extend([[y]])[0, 0]) for x, y in zip(a, b, strict=True)]
        self._same(torch.stack([x for x, _ in rows]), self._after(head, a), "what was forked from")
        self._same(torch.stack([y for _, y in rows]), self._after(head, b), "the fork")

    def _after(self, head: tuple[int, ...], ids: tuple[int, ...]) -> Tensor:
        session = self.subject.session()
        session.extend([head])
        return self._stepped(ids, session)

    def _crop(self) -> None:
        head, refused = self.a[:-1], list[str]()
        lengths = dict.fromkeys((1, self.half, len(head) - 1))
        for length in lengths:
            session = self.subject.session(needs={Ability.CROP})
            session.extend([head])
            try:
                session.crop(length)
            except RefusedError as error:
                refused.append(str(error))
                rows, own = self._stepped(self.b[-1:], session), self._after(head, self.b[-1:])
                self._same(rows, own, "what follows a crop that was refused")
                continue
            rows = self._stepped(self.b[length:], session)
            self._same(rows, self._after(self.a[:length], self.b[length:]), "what follows a crop")
        if len(refused) == len(lengths):
            raise _Broken(f"every crop is refused: {refused[0]}")

    def _batch(self) -> None:
        session = self.subject.session(batch=2)
        session.extend([self.a[: self.half], self.b[: self.half]])
        pairs = zip(self.a[self.half :], self.b[self.half :], strict=True)
        rows = torch.stack([session.extend([[x], [y]])[:, 0] for x, y in pairs], dim=1)
        for row, ids in zip(rows, (self.a, self.b), strict=True):
            self._same(row, self._after(ids[: self.half], ids[self.half :]), "a batch row")

    def _reorder(self) -> None:
        session = self.subject.session(batch=2, needs={Ability.REORDER})
        session.extend([self.a[: self.half], self.b[: self.half]])
        session.reorder([1, 0])
        rows = session.extend([[self.b[self.half]], [self.a[self.half]]])[:, 0]
        for row, ids in zip(rows, (self.b, self.a), strict=True):
            self._same(row, self._after(ids[: self.half], ids[self.half : self.half + 1])[0], "a reordered row")

    def _inspect(self) -> None:
        batch = 2 if Ability.BATCH in self.subject.info.abilities else 1
        session = self.subject.session(batch=batch)
        session.extend([self.a[: self.half], self.b[: self.half]][:batch])
        layers = session.cache_tensors()
        if not any(layers):
            raise _Broken("no layer shows a tensor")
        for number, layer in enumerate(layers):
            for name, tensor in layer.items():
                if not isinstance(tensor, Tensor) or tensor.dim() == 0 or len(tensor) != batch:
                    raise _Broken(f"{name} of layer {number} is not a tensor with {batch} rows on axis 0")

    def _edit(self) -> None:
        head, rest = self.a[: self.half], self.a[self.half :]
        session = self.subject.session()
        session.extend([head])
        session.edit(lambda layers: None)
        own = self._after(head, rest)
        self._same(self._stepped(rest, session), own, "a session whose own tensors were put back")
        changed = self.subject.session()
        changed.extend([head])
        changed.edit(_negated)
        if torch.equal(self._stepped(rest, changed), own):
            raise _Broken("tensors that were replaced change nothing")


def _negated(layers: tuple[dict[str, Tensor], ...]) -> None:
    for layer in layers:
        for name, tensor in layer.items():
            if tensor.is_floating_point():
                layer[name] = -tensor
