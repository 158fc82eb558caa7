"""Writes a failing program as one Python file that needs torch and transformers alone.

What the file calls is what `_model` calls: the same arguments, cache by cache. Whatever comes from a report or a
model, names and tokens among them, is written through ``repr``.
"""

import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache

from kvproof._shrinking.models import Recipe, scaled
from kvproof.errors import UsageError
from kvproof.scenarios import (
    Ability,
    CacheKind,
    Crop,
    Extend,
    Fork,
    Generate,
    Open,
    Operation,
    Poison,
    Reorder,
    Reset,
    Scenario,
    capacity,
)
from kvproof.subjects._transformers import positions as _positions
from kvproof.subjects._transformers import states as _states
from kvproof.subjects._transformers.model import SELECTIONS, TransformersSubject

_WIDTH = 110
#: Files are shorter than this, or they are no reproduction that a maintainer reads.
MOST_LINES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The wrong row that a file shows."""

    program: Scenario
    place: tuple[
        int, int, int
    ]  #: the `Extend` that gives it, the batch row, and which of the new tokens it follows
    prefix: tuple[int, ...]
    cached: bool  #: False: from one pass over longer ids, with no cache
    single: bool  #: the file computes in float32, and not in float64
    limit: float  #: the part of the row's scale beyond which the file calls it wrong
    title: str
    sentence: str  #: what was found, in words


@dataclass(slots=True, kw_only=True)
class _Held:
    """What one cache of the file holds when a line is written."""

    name: str
    ids: list[tuple[int, ...]]
    columns: int = 0
    owes_crop: bool = False


@dataclass(slots=True, kw_only=True)
class _Feed:
    """One call of the model, as numbers."""

    cache: str
    ids: list[list[int]]
    mask: list[list[int]]
    positions: list[list[int]]
    start: int

    @property
    def is_plain(self) -> bool:
        """Whether mask and positions are what the number of cached tokens says."""
        stop = len(self.mask[0])
        counted = all(row == list(range(self.start, stop)) for row in self.positions)
        return counted and all(map(all, self.mask))


def standalone(found: Found, subject: TransformersSubject, source: Recipe | dict[str, Any], device: str) -> str:
    """Return the file's text: it exits with 1 where the row is wrong, and with 0 where it is right.

    ``source`` is a random model's recipe, or the arguments with which ``from_pretrained`` gives the model.
    Raises `UsageError` for a program that cannot be written out, or that takes too many lines.
    """
    writer = _Writer(found, subject)
    body = list(writer.cached() if found.cached else writer.uncached())
    lines = [
        *_head(found),
        "",
        *writer.imports(source),
        *_model(source, device, has_experts=writer.has_experts, single=found.single),
        *writer.helper(),
        "",
        *body,
        "away = (actual - expected).abs().nan_to_num(torch.inf)",
        # The first of those that rounding might put in either order, so that every machine names the same.
        "worst, gap = int((away >= 0.99 * away.max()).int().argmax()), float(away.max() / expected.abs().max())",
        f'print(f"logit {{worst}}: {{expected[worst]:.6g}} {writer.ways[0]}, '
        f'{{actual[worst]:.6g}} {writer.ways[1]}; relative gap {{gap:.1e}}")',
        f"sys.exit(0 if gap <= {found.limit:.0e} else 1)",
    ]
    if len(lines) >= MOST_LINES:
        raise UsageError(
            f"{found.title} takes {len(lines)} lines written out, and a reproduction has fewer than {MOST_LINES}"
        )
    return "\n".join(lines) + "\n"


def _head(found: Found) -> Iterator[str]:
    import transformers

    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    made = f"Written by kvproof shrink with {versions}. Exits with 1 if the fault shows, with 0 if not."
    for text in (found.title, found.sentence, made):
        yield from textwrap.wrap(repr(text)[1:-1], _WIDTH, initial_indent="# ", subsequent_indent="# ")


def _model(source: Recipe | dict[str, Any], device: str, *, has_experts: bool, single: bool) -> Iterator[str]:
    """Yield what makes ``model``."""
    if isinstance(source, Recipe):
        yield from ("", "", *inspect.getsource(scaled).rstrip("\n").split("\n"), "", "")
        yield from _assigned("CONFIG", source.values)
        yield f"torch.manual_seed({source.seed})"
        yield f"config = AutoConfig.for_model({source.model_type!r}, **CONFIG)"
        made = f"AutoModelForCausalLM.from_config(config, attn_implementation={source.attention!r})"
        yield f"model = scaled({made}.double())"
    else:
        given = dict(source)
        name = given.pop("pretrained_model_name_or_path")
        yield from ("", *_assigned("OPTIONS", given))
        yield f"model = AutoModelForCausalLM.from_pretrained({name!r}, **OPTIONS).double().eval()"
    if has_experts:
        yield 'model.set_experts_implementation("eager")  # the grouped kernels know no float64'
    if single:
        yield "model.float()  # in float64 some attention gives NaN where a row sees nothing but padding"
    if device != "cpu":
        yield f"model.to({device!r})"
        yield f"torch.set_default_device({device!r})"


def _assigned(name: str, values: dict[str, Any]) -> Iterator[str]:
    """Yield a dictionary, as many of its entries in a line as fit."""
    if re.search(r"\binf\b", repr(values)):
        yield 'inf = float("inf")'
    yield f"{name} = {{"
    line = ""
    for key, value in values.items():
        entry = f"{key!r}: {value!r},"
        if line and len(line) + len(entry) > _WIDTH - 5:
            yield f"    {line}"
            line = ""
        line += f" {entry}" if line else entry
    yield from (f"    {line}",) * bool(line)
    yield "}"


class _Writer:
    """Turns a program into lines, following what each cache holds."""

    def __init__(self, found: Found, subject: TransformersSubject) -> None:
        self.found = found
        self.subject = subject
        self.program = found.program
        self.ways = ("uncached", "cached") if found.cached else ("alone", "with later tokens")
        self.returned = subject.cache_argument in _states.RETURNED
        self.records_past = Ability.CROP in self.program.needs and hasattr(
            subject.new_cache(1), "activate_past_recording"
        )
        model = subject.model
        names = (name for name, _ in model.named_modules())
        self.has_experts = hasattr(model, "set_experts_implementation") and any(
            "expert" in name for name in names
        )
        self._feeds: list[_Feed] = []
        self._lines = list(self._written()) if found.cached else []
        self.is_plain = all(feed.is_plain for feed in self._feeds)

    def imports(self, source: Recipe | dict[str, Any]) -> Iterator[str]:
        names = ["AutoModelForCausalLM"] + (["AutoConfig"] if isinstance(source, Recipe) else [])
        text = "\n".join(self._lines)
        names += [name for name in ("DynamicCache", "StaticCache") if f"{name}(" in text]
        yield from ("import copy",) * ("copy." in text)
        yield from ("import sys", "", "import torch")
        yield f"from transformers import {', '.join(sorted(names))}"
        own = self.subject.own_cache
        if own is not None and f"{own.__name__}(" in text:
            yield f"from {own.__module__} import {own.__name__}"

    def uncached(self) -> Iterator[str]:
        """Yield the same row from two forwards without a cache."""
        (operation,) = self.program.operations
        assert isinstance(operation, Extend)
        yield from ("with torch.no_grad():", f"    ids = torch.tensor({[list(operation.ids[0])]!r})")
        length, off = len(self.found.prefix), f"{self.subject.cache_switch}=False"
        yield f"    actual = model(ids, {off}).logits[0, {length - 1}]"
        yield f"    expected = model(ids[:, :{length}], {off}).logits[0, -1]"

    def cached(self) -> Iterator[str]:
        """Yield the calls on the cache, and the forward that they must equal."""
        yield "with torch.no_grad():"
        feeds = iter(self._feeds)
        for line in self._lines:
            yield "    " + (self._call(next(feeds)) if line == _FEED else line)
        yield f"    actual = logits[{self.found.place[1]}, {self.found.place[2]}]"
        ids, off = [list(self.found.prefix)], f"{self.subject.cache_switch}=False"
        yield f"    expected = model(torch.tensor({ids!r}), {off}).logits[0, -1]"

    def helper(self) -> Iterator[str]:
        """Yield the function that calls the model with a cache."""
        subject = self.subject
        if not self.found.cached:
            return
        takes_positions = subject.takes_positions and not self.program.omit_positions
        yield from ("", "", f"def feed(cache, ids, {'start' if self.is_plain else 'mask, positions'}):")
        yield "    tokens = torch.tensor(ids)"
        given = [f"{subject.cache_argument}=cache", f"{subject.cache_switch}=True"]
        if self.is_plain:
            yield "    stop = start + tokens.shape[1]"
        if subject.takes_mask:
            warm = "" if subject.takes_positions else " if stop == tokens.shape[1] else None"
            mask = (
                f"torch.ones(len(ids), stop, dtype=torch.long){warm}" if self.is_plain else "torch.tensor(mask)"
            )
            yield f"    mask = {mask}"
            given.append("attention_mask=mask")
        if takes_positions:
            plain = "torch.arange(start, stop).expand(tokens.shape)"
            yield f"    positions = {plain if self.is_plain else 'torch.tensor(positions)'}"
            given.append("position_ids=positions")
        if subject.takes_cache_positions:
            yield f"    columns = torch.arange({'stop' if self.is_plain else 'len(mask[0])'})[-tokens.shape[1] :]"
            given.append("cache_position=columns")
        yield f"    output = model(tokens, {', '.join(given)})"
        state = f", output.{subject.cache_argument}" if self.returned else ""
        yield from (f"    return output.logits{state}", "")

    def _call(self, feed: _Feed) -> str:
        target = f"logits, {feed.cache}" if self.returned else "logits"
        rest = f"{feed.start}" if self.is_plain else f"{feed.mask}, {feed.positions}"
        return f"{target} = feed({feed.cache}, {feed.ids}, {rest})"

    def _written(self) -> Iterator[str]:
        """Yield a line for each operation up to the wrong row's call; what feeds stands for itself."""
        program, num_calls = self.program, 0
        batches = [program.batch, *(o.batch for o in program.operations if isinstance(o, Open))]
        many = len(batches) > 1 or any(isinstance(o, Fork) for o in program.operations)
        if many and self.subject.stateful_modules:
            raise UsageError("its modules keep the state, so a file cannot hold several sessions apart")
        if program.cache not in (CacheKind.DYNAMIC, CacheKind.STATIC):
            raise UsageError(f"programs on a {program.cache.value} cache are not written out")
        sessions = [_Held(name="cache_0" if many else "cache", ids=[()] * program.batch)]
        yield from self._opened(sessions[0])
        for operation in program.operations:
            match operation:
                case Generate():
                    raise UsageError("programs that go through generate() are not written out")
                case Open(batch=batch):
                    sessions.append(_Held(name=f"cache_{len(sessions)}", ids=[()] * batch))
                    yield from self._opened(sessions[-1])
                case Fork(session=index):
                    held = sessions[index]
                    sessions.append(replace(held, name=f"cache_{len(sessions)}", ids=[*held.ids]))
                    yield f"{sessions[-1].name} = copy.deepcopy({held.name})"
                case Extend(session=index):
                    yield from self._fed(sessions[index], operation)
                    num_calls += 1
                    if num_calls > self.found.place[0]:
                        return
                case _:
                    yield from self._changed(sessions[getattr(operation, "session", 0)], operation)

    def _opened(self, held: _Held) -> Iterator[str]:
        """Yield what makes an empty cache."""
        subject = self.subject
        config = (
            "model.config"
            if subject.config is subject.model.config
            else "model.config.get_text_config(decoder=True)"
        )
        if self.returned:
            yield f"{held.name} = None"
        elif self.program.cache is CacheKind.STATIC:
            yield f"{held.name} = StaticCache(config={config}, max_cache_len={capacity(self.program)})"
        elif subject.own_cache is not None:
            yield f"{held.name} = {subject.own_cache.__name__}({self._own_arguments(config, len(held.ids))})"
        else:
            forgets = Ability.CROP in self.program.needs and not self.records_past
            yield f"{held.name} = DynamicCache({'' if forgets else f'config={config}'})"
            if self.records_past:
                yield f"{held.name}.activate_past_recording()  # so that it can be cropped past a window"

    def _own_arguments(self, config: str, batch: int) -> str:
        subject = self.subject
        assert subject.own_cache is not None
        known = {
            "config": config,
            "batch_size": str(batch),
            "max_batch_size": str(batch),
            "dtype": "model.dtype",
            "device": repr(str(subject.model.device)),
            "devices": f"[{str(subject.model.device)!r}] * {int(subject.config.num_hidden_layers)}",
        }
        wanted = inspect.signature(subject.own_cache).parameters
        return ", ".join(f"{name}={value}" for name, value in known.items() if name in wanted)

    def _fed(self, held: _Held, operation: Extend) -> Iterator[str]:
        if held.owes_crop:
            yield f"{held.name}.crop(0)  # a cache that records is cropped after each call"
        num_new = max(map(len, operation.ids))
        total = held.columns + num_new
        rows = [(*old, *new) for old, new in zip(held.ids, operation.ids, strict=True)]
        tokens = [[0] * (total - len(row)) + list(row) for row in rows]
        mask = [[0] * (total - len(row)) + [1] * len(row) for row in rows]
        positions = _positions.positions(torch.tensor(mask), torch.tensor(tokens), self.subject.padding_position)
        self._feeds.append(
            _Feed(
                cache=held.name,
                ids=[row[-num_new:] for row in tokens],
                mask=mask,
                positions=positions[:, -num_new:].tolist(),
                start=held.columns,
            )
        )
        held.ids, held.columns, held.owes_crop = rows, total, self.records_past
        yield _FEED

    def _changed(self, held: _Held, operation: Operation) -> Iterator[str]:
        cache_class: Any = self.subject.own_cache or DynamicCache
        match operation:
            case Crop(length=length):
                gone = len(held.ids[0]) - length
                counts_kept = "max_length" in inspect.signature(cache_class.crop).parameters
                yield f"{held.name}.crop({held.columns - gone if counts_kept else -gone})"
                held.ids, held.columns = [row[:length] for row in held.ids], held.columns - gone
                held.owes_crop = False
            case Reorder(rows=rows):
                wanted = SELECTIONS if len(rows) == len(held.ids) else SELECTIONS[::-1]
                name = next(name for name in wanted if hasattr(cache_class, name))
                yield f"{held.name}.{name}(torch.tensor({list(rows)}))"
                held.ids = [held.ids[row] for row in rows]
            case Reset():
                if self.program.cache is CacheKind.STATIC:
                    yield f"{held.name}.reset()"
                else:
                    yield from self._opened(held)
                held.ids, held.columns, held.owes_crop = [()] * len(held.ids), 0, False
            case Poison():
                yield f"for layer in {held.name}.layers:  # what holds no token must not matter"
                yield f"    layer.keys[:, :, {held.columns}:] = layer.values[:, :, {held.columns}:] = 1e4"


#: Stands for the line of a call until all calls are known.
_FEED = "feed"
