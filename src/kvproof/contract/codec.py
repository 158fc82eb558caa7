"""Converts frozen dataclasses to plain JSON values and back without loss.

JSON has no NaN and no infinity, so non-finite numbers are written as the strings ``"nan"``, ``"inf"`` and
``"-inf"``. Reading is strict: an error names the path of a missing, unknown or wrongly typed key. But formats
grow: a member that was `added_in` a later minor version may be missing, and unknown keys in a newer file can be
collected instead of refused.
"""

import dataclasses
import json
import math
import sys
import types
import typing
from enum import Enum
from functools import cache
from typing import Any, TypeVar

from kvproof.errors import UsageError

T = TypeVar("T")
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class CodecError(ValueError):
    """A plain value does not have the shape of the expected type."""


def added_in(minor: int, default: Any) -> Any:
    """Declare a member that a minor version added: in older files it is missing and takes the ``default``."""
    return dataclasses.field(default=default, metadata={"added_in": minor})


def to_plain(value: Any) -> Any:
    """Return ``value`` as dicts, lists, strings, numbers, booleans and None."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def strict_loads(text: str) -> Any:
    """Return the value of a JSON text; raise `CodecError` for text that only lenient parsers accept.

    That is: NaN and infinity as numbers, duplicate keys, and excessive nesting or length.
    """
    try:
        return json.loads(
            text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_refuse_duplicates
        )
    except json.JSONDecodeError as error:
        raise CodecError(f"not JSON: {error.msg} at line {error.lineno} column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise CodecError(f"not JSON that can be read: {error}") from error


def _no_constant(name: str) -> Any:
    raise CodecError(f"{name} is not JSON; write it as a string")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise CodecError(f"{text} is too large for a number")
    return value


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) != len(pairs):
        names = [name for name, _ in pairs]
        raise CodecError(f"duplicate key {next(n for n in names if names.count(n) > 1)!r}")
    return plain


def from_plain(kind: type[T], plain: Any, path: str = "$", *, unknown: list[str] | None = None) -> T:
    """Return the ``kind`` that ``plain`` describes; raise `CodecError` naming the path of what does not fit.

    Unknown keys are refused, or, if ``unknown`` is a list, ignored after their paths are appended to it.
    """
    result: T = _Reader(unknown).read(kind, plain, path)
    return result


class _Reader:
    """Reads plain values as the types that are expected."""

    def __init__(self, unknown: list[str] | None) -> None:
        self.unknown = unknown

    def read(self, kind: Any, plain: Any, path: str) -> Any:
        origin = typing.get_origin(kind)
        if dataclasses.is_dataclass(kind):
            return self._dataclass(kind, plain, path)
        if origin in (types.UnionType, typing.Union):
            return self._union(typing.get_args(kind), plain, path)
        if origin is tuple:
            _expect(isinstance(plain, list), path, "a list", plain)
            return self._tuple(typing.get_args(kind), plain, path)
        if origin is typing.Literal:
            _expect(plain in typing.get_args(kind), path, f"one of {typing.get_args(kind)}", plain)
            return plain
        if isinstance(kind, type) and issubclass(kind, Enum):
            members = [member.value for member in kind]
            _expect(plain in members, path, f"one of {members}", plain)
            return kind(plain)
        return _read_scalar(kind, plain, path)

    def _tuple(self, kinds: tuple[Any, ...], plain: list[Any], path: str) -> tuple[Any, ...]:
        if kinds[-1] is Ellipsis:
            return tuple(self.read(kinds[0], item, f"{path}[{i}]") for i, item in enumerate(plain))
        _expect(len(plain) == len(kinds), path, f"{len(kinds)} entries", plain)
        pairs = enumerate(zip(kinds, plain, strict=True))
        return tuple(self.read(kind, value, f"{path}[{i}]") for i, (kind, value) in pairs)

    def _union(self, kinds: tuple[Any, ...], plain: Any, path: str) -> Any:
        """Try each type of the union: they differ in JSON type or in their literal ``kind``."""
        problems = []
        for kind in kinds:
            num_unknown = len(self.unknown or ())
            try:
                return self.read(kind, plain, path)
            except CodecError as error:
                problems.append(str(error))
                if self.unknown is not None:
                    del self.unknown[num_unknown:]
        raise CodecError("; or ".join(problems))

    def _dataclass(self, kind: Any, plain: Any, path: str) -> Any:
        _expect(isinstance(plain, dict), path, "an object", plain)
        hints = _hints(kind)
        unknown = sorted(plain.keys() - hints.keys())
        required = {field.name for field in dataclasses.fields(kind) if "added_in" not in field.metadata}
        missing = sorted(required - plain.keys())
        if unknown and self.unknown is None:
            raise CodecError(f"{path} has unknown key {unknown[0]!r}")
        if missing:
            raise CodecError(f"{path} is missing key {missing[0]!r}")
        present = {name: hint for name, hint in hints.items() if name in plain}
        members = {name: self.read(hint, plain[name], f"{path}.{name}") for name, hint in present.items()}
        if self.unknown is not None:
            self.unknown += (f"{path}.{name}" for name in unknown)
        try:
            return kind(**members)
        except UsageError as error:  # the type itself refuses the value
            raise CodecError(f"{path}: {error}") from error


def _read_scalar(kind: Any, plain: Any, path: str) -> Any:
    if kind is float:
        if isinstance(plain, str) and plain in _NON_FINITE:
            return _NON_FINITE[plain]
        _expect(isinstance(plain, int | float) and not isinstance(plain, bool), path, "a number", plain)
        _expect(abs(plain) <= sys.float_info.max, path, "a number that a float can hold", plain)
        return float(plain)
    wanted = {int: "an integer", str: "a string", bool: "true or false", types.NoneType: "null"}[kind]
    _expect(type(plain) is kind, path, wanted, plain)
    if kind is str:
        _expect(not any("\ud800" <= c <= "\udfff" for c in plain), path, "text without lone surrogates", plain)
    return plain


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _expect(holds: bool, path: str, wanted: str, plain: Any) -> None:
    if not holds:
        text = repr(plain)
        raise CodecError(f"{path} must be {wanted}, not {text if len(text) <= 60 else text[:57] + '...'}")
