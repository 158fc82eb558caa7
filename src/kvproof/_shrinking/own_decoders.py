"""Writes a finding on one's own decoder as a file that imports its factory and makes the calls that show it.

Two functions are called as they are, without kvproof. Any other decoder is a `Subject` already, so the file opens
its sessions and feeds them; no audit runs. The decoder stays as it is: only the program is shrunk.
"""

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import torch

from kvproof._numerics.dtypes import name_of
from kvproof._numerics.tolerances import STRUCTURAL_FLOOR, TOP_RUNG
from kvproof._shrinking.programs import CLEAR
from kvproof._shrinking.writable import Found, WritableModel
from kvproof._system.machine import environment
from kvproof.contract.report import AuditRequest
from kvproof.errors import UsageError
from kvproof.scenarios import (
    Ability,
    CacheKind,
    Crop,
    Extend,
    Fork,
    Open,
    Operation,
    Poison,
    Refused,
    Reorder,
    Reset,
    SessionOperation,
    capacity,
)
from kvproof.subjects import Subject
from kvproof.subjects._registry import split_factory

#: What float32 leaves of a row's scale: a file that cannot compute in float64 calls nothing wrong below it.
FLOAT32_LIMIT = 1e-3
_WIDTH = 100


class OwnDecoder(WritableModel):
    """What a factory returns, in float64 where it can be cast."""

    def __init__(self, target: str, subject: Subject, *, is_pair: bool) -> None:
        """Take a loaded subject; ``is_pair`` says that the factory returns two functions.

        Raises `UsageError` for a decoder of low precision that cannot be cast: a file could not tell rounding.
        """
        can_cast = Ability.CAST in subject.info.abilities
        self.is_cast = can_cast and subject.info.dtype != name_of(TOP_RUNG)
        self._subject = subject.cast(TOP_RUNG) if self.is_cast else subject
        self.target, self.is_pair = target, is_pair
        if self._subject.info.dtype not in ("float64", "float32"):
            raise UsageError(
                f"{target} computes in {subject.info.dtype} and cannot be cast: a file could not tell a bug from "
                "rounding"
            )

    @property
    def subject(self) -> Subject:
        """The decoder that was loaded."""
        return self._subject

    @property
    def is_exact(self) -> bool:
        """Whether it computes in float64."""
        return self._subject.info.dtype == name_of(TOP_RUNG)

    @property
    def least_gap(self) -> float:
        """The smallest gap that is a bug and not rounding, as a part of the row's scale."""
        return STRUCTURAL_FLOOR.value if self.is_exact else CLEAR

    @property
    def num_weights(self) -> int:
        """The number of weights, or 0 if they cannot be seen."""
        root = self._subject.root_module
        return 0 if root is None else sum(weight.numel() for weight in root.parameters())

    @property
    def key(self) -> str:
        """The target."""
        return self.target

    def written_subject(self, *, single: bool) -> Subject:
        """Return the decoder: the file calls it as it is."""
        return self._subject

    def write(self, found: Found) -> str:
        """Return the file."""
        calls = list(self._pair_calls(found) if self.is_pair else self._session_calls(found))
        limit = found.limit if self.is_exact else max(found.limit, FLOAT32_LIMIT)
        ways = ("uncached", "cached") if found.cached else ("alone", "with later tokens")
        lines = [
            *_head(found),
            *_imports(found, calls, is_pair=self.is_pair),
            "",
            *self._decoder(),
            "",
            *calls,
            "gaps = np.nan_to_num(np.abs(actual - expected), nan=np.inf)",
            "worst, gap = int(gaps.argmax()), float(gaps.max() / np.abs(expected).max())",
            f'print("{ways[0]}:", expected)',
            f'print("{ways[1]}:", actual)',
            f'print(f"logit {{worst}}: {{expected[worst]:.6g}} {ways[0]}, {{actual[worst]:.6g}} {ways[1]}; '
            'relative gap {gap:.1e}")',
            f"sys.exit(0 if gap <= {limit:.0e} else 1)",
        ]
        return "\n".join(lines) + "\n"

    def _decoder(self) -> Iterator[str]:
        """Yield what imports the factory and calls it."""
        names = split_factory(self.target)
        assert names is not None
        home, name = names
        folder, module = Path.cwd(), home
        if home.endswith(".py"):
            folder, module = Path(home).resolve().parent, Path(home).stem
        yield f"sys.path.insert(0, {str(folder)!r})  # where {home} is"
        call = f"importlib.import_module({module!r}).{name}()"
        if self.is_pair:
            yield f"full, step = {call}"
            yield from ("", "", "def row(logits, place):")
            yield '    """Return one row of logits (vocab,), (token, vocab) or (1, token, vocab)."""'
            yield '    logits = np.asarray(logits.detach() if hasattr(logits, "detach") else logits, dtype=float)'
            yield from ("    return logits.reshape(-1, logits.shape[-1])[place]", "")
        else:
            cast = ".cast(torch.float64)" if self.is_cast else ""
            yield f"decoder = as_subject({call}){cast}"

    def _pair_calls(self, found: Found) -> Iterator[str]:
        """Yield the calls of two functions; their caches can only be copied."""
        prefix = f"np.array({list(found.prefix)})"
        if not found.cached:
            (operation,) = found.program.operations
            assert isinstance(operation, Extend)
            yield f"actual = row(full(np.array({list(operation.ids[0])})), {len(found.prefix) - 1})"
        else:
            names = ["cache_0"]
            yield "cache_0 = None"
            for operation in _until(found):
                match operation:
                    case Extend(session=number, ids=ids):
                        name = names[number]
                        yield f"logits, {name} = step(np.array({list(ids[0])}), {name})"
                    case Open():
                        names.append(f"cache_{len(names)}")
                        yield f"{names[-1]} = None"
                    case Fork(session=number):
                        names.append(f"cache_{len(names)}")
                        yield f"{names[-1]} = copy.deepcopy({names[number]})"
                    case Reset(session=number):
                        yield f"{names[number]} = None"
                    case _:
                        raise _cannot_write(operation)
            yield f"actual = row(logits, {found.place[2]})"
        yield f"expected = row(full({prefix}), -1)"

    def _session_calls(self, found: Found) -> Iterator[str]:
        """Yield the calls of a subject's sessions."""
        if not found.cached:
            (operation,) = found.program.operations
            assert isinstance(operation, Extend)
            yield f"actual = decoder.rows({list(operation.ids[0])})[{len(found.prefix) - 1}].double().numpy()"
        else:
            num_sessions = 1
            yield f"session_0 = decoder.session({self._opening(found, found.program.batch)})"
            for operation in _until(found):
                match operation:
                    case Open(batch=batch):
                        yield f"session_{num_sessions} = decoder.session({self._opening(found, batch)})"
                        num_sessions += 1
                    case Fork(session=number):
                        yield f"session_{num_sessions} = session_{number}.fork()"
                        num_sessions += 1
                    case SessionOperation(session=number):
                        yield f"{_act(operation, f'session_{number}')}"
                    case _:
                        raise _cannot_write(operation)
            yield f"actual = logits[{found.place[1]}, {found.place[2]}].double().numpy()"
        yield f"expected = decoder.rows({list(found.prefix)})[-1].double().numpy()"

    def _opening(self, found: Found, batch: int) -> str:
        """Return the arguments with which a session is opened."""
        program = found.program
        parts = [f"batch={batch}"] if batch > 1 else []
        needs = sorted(need.value for need in program.needs)
        parts += [f"needs=[{', '.join(f'Ability({need!r})' for need in needs)}]"] if needs else []
        if program.cache is not CacheKind.DYNAMIC:
            parts.append(f"cache=CacheKind({program.cache.value!r}), capacity={capacity(program)}")
        parts += ["omit_positions=True"] if program.omit_positions else []
        return ", ".join(parts)


def writable_model(request: AuditRequest, subject: Subject) -> OwnDecoder:
    """Return what a file can import in place of the subject that was audited."""
    assert request.target is not None
    names = split_factory(request.target)
    assert names is not None
    home, name = names
    module = sys.modules[f"kvproof_target_{Path(home).stem}" if home.endswith(".py") else home]
    is_pair = isinstance(getattr(module, name)(), tuple)
    return OwnDecoder(request.target, subject, is_pair=is_pair)


def _until(found: Found) -> Iterator[Operation]:
    """Yield the operations up to the call that gives the wrong row; a refused call changes nothing."""
    num_calls = 0
    for operation in found.program.operations:
        if isinstance(operation, Refused):
            continue
        yield operation
        num_calls += isinstance(operation, Extend)
        if num_calls > found.place[0]:
            return


def _act(operation: Operation, session: str) -> str:
    """Return the line that carries out an operation on a session."""
    match operation:
        case Extend(ids=ids):
            return f"logits = {session}.extend({[list(row) for row in ids]})"
        case Crop(length=length):
            return f"{session}.crop({length})"
        case Reorder(rows=rows):
            return f"{session}.reorder({list(rows)})"
        case Reset():
            return f"{session}.reset()"
        case Poison():
            return f"{session}.poison()"
        case _:
            raise _cannot_write(operation)


def _cannot_write(operation: Operation) -> UsageError:
    return UsageError(f"programs with {operation.kind()} are not written out")


def _head(found: Found) -> Iterator[str]:
    made = f"Written by kvproof shrink with kvproof {environment().kvproof}, torch {torch.__version__}."
    for text in (found.title, found.sentence, f"{made} Exits with 1 if the fault shows, with 0 if not."):
        yield from textwrap.wrap(repr(text)[1:-1], _WIDTH, initial_indent="# ", subsequent_indent="# ")


def _imports(found: Found, calls: list[str], *, is_pair: bool) -> Iterator[str]:
    text = "\n".join(calls)
    yield from ("import copy",) * ("copy.deepcopy" in text)
    yield from ("import importlib", "import sys", "", "import numpy as np")
    if not is_pair:
        yield from ("import torch", "")
        names = [name for name in ("Ability", "CacheKind") if f"{name}(" in text]
        yield from (f"from kvproof.scenarios import {', '.join(names)}",) * bool(names)
        yield "from kvproof.subjects import as_subject"
