"""Frozen dataclasses to plain JSON values and back, without losing a bit or inventing one.

JSON has no NaN and no infinity, so non-finite numbers are written as the strings ``"nan"``, ``"inf"`` and
``"-inf"``. Reading is strict: a missing, unknown or wrongly typed member is named with its path.
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
    """A plain value does not have the shape of the type that was asked for."""


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
    """Return what JSON text holds; raise `CodecError` for what only lenient readers take.

    That is NaN and infinities as numbers, members that stand twice, and depths or lengths beyond reason.
    """
    try:
        return json.loads(
            text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_without_doubles
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


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) != len(pairs):
        names = [name for name, _ in pairs]
        raise CodecError(f"member {next(n for n in names if names.count(n) > 1)!r} stands twice")
    return plain


def from_plain(kind: type[T], plain: Any, path: str = "$") -> T:
    """Return the ``kind`` that ``plain`` describes; raise `CodecError` naming the path of what does not fit."""
    result: T = _read(kind, plain, path)
    return result


def _read(kind: Any, plain: Any, path: str) -> Any:
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, plain, path)
    if origin in (types.UnionType, typing.Union):
        return _read_union(typing.get_args(kind), plain, path)
    if origin is tuple:
        _expect(isinstance(plain, list), path, "a list", plain)
        return _read_tuple(typing.get_args(kind), plain, path)
    if origin is typing.Literal:
        _expect(plain in typing.get_args(kind), path, f"one of {typing.get_args(kind)}", plain)
        return plain
    if isinstance(kind, type) and issubclass(kind, Enum):
        members = [member.value for member in kind]
        _expect(plain in members, path, f"one of {members}", plain)
        return kind(plain)
    return _read_scalar(kind, plain, path)


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


def _read_tuple(kinds: tuple[Any, ...], plain: list[Any], path: str) -> tuple[Any, ...]:
    if kinds[-1] is Ellipsis:
        return tuple(_read(kinds[0], item, f"{path}[{i}]") for i, item in enumerate(plain))
    _expect(len(plain) == len(kinds), path, f"{len(kinds)} entries", plain)
    return tuple(_read(k, v, f"{path}[{i}]") for i, (k, v) in enumerate(zip(kinds, plain, strict=True)))


def _read_union(kinds: tuple[Any, ...], plain: Any, path: str) -> Any:
    """Try each member of the union: they differ in JSON type or in the literal of their ``kind``."""
    problems = []
    for kind in kinds:
        try:
            return _read(kind, plain, path)
        except CodecError as error:
            problems.append(str(error))
    raise CodecError("; or ".join(problems))


def _read_dataclass(kind: Any, plain: Any, path: str) -> Any:
    _expect(isinstance(plain, dict), path, "an object", plain)
    hints = _hints(kind)
    unknown, missing = sorted(plain.keys() - hints.keys()), sorted(hints.keys() - plain.keys())
    if unknown:
        raise CodecError(f"{path} has unknown member {unknown[0]!r}")
    if missing:
        raise CodecError(f"{path} lacks member {missing[0]!r}")
    members = {name: _read(hint, plain[name], f"{path}.{name}") for name, hint in hints.items()}
    try:
        return kind(**members)
    except UsageError as error:  # a value that the type itself refuses
        raise CodecError(f"{path}: {error}") from error


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _expect(holds: bool, path: str, wanted: str, plain: Any) -> None:
    if not holds:
        text = repr(plain)
        raise CodecError(f"{path} must be {wanted}, not {text if len(text) <= 60 else text[:57] + '...'}")
