"""Decoders that other people write: sound ones raise no alarm, and broken ones do not pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.detection.small_decoders import (
    HEAD_DIM,
    VOCAB,
    SmallDecoder,
    functions,
    numpy_functions,
)
from torch import Tensor, nn

from kvproof import CallableSubject, ModuleSubject, Report, Subject, Verdict, audit
from kvproof._numerics.casting import cast_module
from kvproof.errors import UsageError
from kvproof.scenarios import chunked_prefill, token_by_token
from kvproof.subjects import CacheOps

SEEDS = range(2)
QUICK = ["token-by-token", "chunked prefill"]


def quick(subject: Subject, seed: int = 0, length: int = 14) -> Report:
    """Audit a few scenarios, without a certificate."""
    return audit(subject, QUICK, length=length, seed=seed, all_values=False, certificate=False)


def long(subject: Subject, length: int, seed: int) -> Report:
    """Audit single steps and small blocks over one long sequence."""
    generator = torch.Generator().manual_seed(seed)
    ids = tuple(torch.randint(0, subject.info.vocab_size, (length,), generator=generator).tolist())
    return audit(subject, [token_by_token(ids)], all_values=False, certificate=False)


def callable_of(kind: type[SmallDecoder], dtype: torch.dtype = torch.float32, seed: int = 0) -> CallableSubject:
    """Return a decoder as two functions with an honest cast."""
    return CallableSubject(
        *functions(kind(seed), dtype), cast=lambda name: functions(kind(seed), getattr(torch, name))
    )


def module_of(kind: type[SmallDecoder], dtype: torch.dtype = torch.float32, seed: int = 0) -> ModuleSubject:
    """Return a decoder as a module."""
    return ModuleSubject(cast_module(kind(seed), dtype), cache="past")


WAYS: dict[str, Callable[..., Subject]] = {"functions": callable_of, "module": module_of}


class LargerKeys(SmallDecoder):
    """Keys that were kept are read 10 % too large."""

    def read(self, k: Tensor, num_old: int) -> Tensor:
        return torch.cat([k[:, :, :num_old] * 1.1, k[:, :, num_old:]], 2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_sound_decoder_passes(way: str, dtype: torch.dtype, seed: int):
    report = quick(WAYS[way](SmallDecoder, dtype, seed), seed)
    assert report.verdict.passes, report.summary


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_broken_one_does_not(way: str, dtype: torch.dtype):
    assert quick(WAYS[way](LargerKeys, dtype)).verdict is Verdict.DIVERGED


def numpy_of(inner: str | None, scale_old: float = 1.0, *, cast: bool = True) -> CallableSubject:
    make = partial(numpy_functions, inner=inner, scale_old=scale_old)
    return CallableSubject(*make("float32"), cast=make if cast else None)


@pytest.mark.parametrize("cast", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_sound_decoder_in_numpy_passes(cast: bool, seed: int):
    report = quick(numpy_of(None, cast=cast), seed)
    assert report.verdict.passes, report.summary


@pytest.mark.parametrize("seed", SEEDS)
def test_float32_inside_a_float64_that_cannot_be_watched_convicts_nobody(seed: int):
    report = quick(numpy_of("float32"), seed)
    assert report.verdict is not Verdict.DIVERGED, report.summary
    assert any("rung is no better than" in note for note in report.notes)


@pytest.mark.parametrize(("inner", "cast"), [(None, True), ("float32", True), (None, False)])
def test_a_broken_one_in_numpy_is_not_passed(inner: str | None, cast: bool):
    report = quick(numpy_of(inner, 1.5, cast=cast))
    assert not report.verdict.passes
    if cast and inner is None:
        assert report.verdict is Verdict.DIVERGED


class InFloat32(SmallDecoder):
    """A kernel that accumulates in float32 whatever it is given."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(start)
        rows = [torch.from_numpy(part.numpy().astype("float32")) for part in (q * HEAD_DIM**-0.5, k, v)]
        weights = (rows[0] @ rows[1].mT).masked_fill(~visible, float("-inf")).softmax(-1)
        return (weights @ rows[2]).to(v.dtype)


class InFloat32AndBroken(InFloat32, LargerKeys):
    """The same, with keys too large."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_kernel_that_accumulates_in_float32_convicts_nobody(way: str, seed: int):
    report = quick(WAYS[way](InFloat32, seed=seed), seed)
    assert report.verdict is not Verdict.DIVERGED, report.summary
    assert quick(WAYS[way](InFloat32AndBroken, seed=seed), seed).verdict is Verdict.DIVERGED


class OutsideParameters(nn.Module):
    """A module whose weights are plain tensors in a list."""

    def __init__(self, scale_old: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weights = [torch.randn(VOCAB, 16, generator=generator), *torch.randn(4, 16, 16, generator=generator)]
        self.readout = torch.randn(16, VOCAB, generator=generator)
        self.scale_old = scale_old

    def forward(self, ids: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        embed, wq, wk, wv, wo = self.weights
        x = embed[ids]
        q, k, v = x @ wq, x @ wk, x @ wv
        if past is not None:
            k, v = torch.cat([past[0] * self.scale_old, k], 1), torch.cat([past[1], v], 1)
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        weights = (q @ k.mT / 16).masked_fill(~visible, float("-inf")).softmax(-1)
        return (x + weights @ v @ wo) @ self.readout, (k, v)


def test_weights_that_are_no_parameters_are_cast_too():
    sound = quick(ModuleSubject(OutsideParameters(1.0), cache="past"))
    assert sound.verdict.passes, sound.summary
    assert not sound.notes[:-1], "there is a float64 rung"
    assert quick(ModuleSubject(OutsideParameters(1.0001), cache="past")).verdict is Verdict.DIVERGED


class Buffered(nn.Module):
    """A running sum kept in a buffer that ``start`` makes in bfloat16: both paths round alike."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.shift = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB), shift

    def forward(self, ids: Tensor, state: Any = None) -> Tensor:
        x, rows = self.embed(ids), []
        kept = {"sum": torch.zeros(1, 16, dtype=torch.bfloat16)} if state is None else state
        for position in range(x.shape[1]):
            kept["sum"] = (kept["sum"] * 0.75 + x[:, position]).to(kept["sum"].dtype)
            rows.append(kept["sum"].to(x.dtype))
        shift = self.shift if state is not None else 0.0
        return self.head(torch.stack(rows, 1).tanh() + shift)


def buffered(shift: float) -> ModuleSubject:
    return ModuleSubject(
        Buffered(shift).to(torch.bfloat16),
        cache="state",
        start=lambda module: {"sum": torch.zeros(1, 16, dtype=torch.bfloat16)},
        batch=False,
    )


def test_a_buffer_that_start_makes_in_a_low_dtype_is_raised_with_the_rest():
    assert quick(buffered(0.0)).verdict is Verdict.MATCH
    assert quick(buffered(0.1)).verdict is Verdict.DIVERGED


class Turned(SmallDecoder):
    """Rotary as a complex buffer."""

    conjugates = False

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        angles = SmallDecoder.angles(self, 0, 64, is_cached=False)
        self.register_buffer("freqs", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def turned(self, x: Tensor, start: int, *, is_cached: bool) -> Tensor:
        freqs = self.freqs[start : start + x.shape[2]]
        if is_cached and self.conjugates:
            freqs = freqs.conj()
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], HEAD_DIM // 2, 2).contiguous())
        return torch.view_as_real(pairs * freqs).flatten(-2).type_as(x)


class TurnedBack(Turned):
    """The cached path turns by the conjugate."""

    conjugates = True


def test_a_complex_buffer_keeps_its_imaginary_part_in_float64():
    sound = quick(module_of(Turned))
    assert sound.verdict.passes, sound.summary
    assert quick(module_of(TurnedBack)).verdict is Verdict.DIVERGED


#: What three entries of the vocabulary are masked with; the first masks nothing.
MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "no mask": lambda logits: logits,
    "-1e9": lambda logits: torch.cat([torch.full_like(logits[..., :3], -1e9), logits[..., 3:]], -1),
    "-1e9 added": lambda logits: torch.cat([logits[..., :3] - 1e9, logits[..., 3:]], -1),
    "finfo.min": lambda logits: torch.cat(
        [torch.full_like(logits[..., :3], torch.finfo(logits.dtype).min), logits[..., 3:]], -1
    ),
    "-inf": lambda logits: torch.cat([torch.full_like(logits[..., :3], -torch.inf), logits[..., 3:]], -1),
    "softcap": lambda logits: 30 * (logits / 30).tanh(),
}


def masked(kind: type[SmallDecoder], mask: str) -> type[SmallDecoder]:
    class Masked(kind):  # type: ignore[misc,valid-type]
        def read_out(self, x: Tensor, *, is_cached: bool) -> Tensor:
            return MASKS[mask](super().read_out(x, is_cached=is_cached))

    return Masked


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masked_entries_set_no_scale(mask: str, dtype: torch.dtype):
    sound = quick(module_of(masked(SmallDecoder, mask), dtype))
    assert sound.verdict.passes, sound.summary
    assert quick(module_of(masked(LargerKeys, mask), dtype)).verdict is Verdict.DIVERGED
    largest = max(row.scale for result in sound.scenarios for row in result.rows)
    assert largest < 1e3


def test_a_mask_that_one_path_alone_applies_is_a_bug():
    class Once(SmallDecoder):
        def read_out(self, x: Tensor, *, is_cached: bool) -> Tensor:
            logits = super().read_out(x, is_cached=is_cached)
            return logits if is_cached else MASKS["-1e9"](logits)

    assert quick(module_of(Once)).verdict is Verdict.DIVERGED


class LowAngles(SmallDecoder):
    """Angles in bfloat16 in single steps, unless the weights are float64."""

    def angles(self, start: int, new: int, *, is_cached: bool) -> Tensor:
        angles = super().angles(start, new, is_cached=is_cached)
        if new > 1 or angles.dtype is torch.float64:
            return angles
        speeds = super().angles(1, 1, is_cached=is_cached)[0]
        return (torch.tensor([[start]]).bfloat16() * speeds.bfloat16()).float()


class LowCache(SmallDecoder):
    """Keys and values are kept in bfloat16, unless they are float64."""

    def keep(self, x: Tensor) -> Tensor:
        return x if x.dtype is torch.float64 else x.bfloat16().to(x.dtype)


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_angles_in_bfloat16_are_found_in_a_model_of_low_dtype(dtype: torch.dtype, seed: int):
    report = long(module_of(LowAngles, dtype, seed), 300, seed)
    assert report.verdict is Verdict.DIVERGED, report.summary
    reasons = [row.reason for result in report.scenarios for row in result.rows if not row.verdict.passes]
    assert all("too low a dtype" in reason for reason in (*reasons, *([] if reasons else [report.summary])))
    sound = long(module_of(SmallDecoder, dtype, seed), 300, seed)
    assert sound.verdict.passes, sound.summary


@pytest.mark.parametrize("seed", range(2))
def test_a_cache_in_bfloat16_is_found_in_a_float16_model(seed: int):
    report = long(module_of(LowCache, torch.float16, seed), 60, seed)
    assert report.verdict is Verdict.DIVERGED, report.summary
    sound = long(module_of(SmallDecoder, torch.float16, seed), 60, seed)
    assert sound.verdict.passes, sound.summary


class Dropping(SmallDecoder):
    dropout = 0.1

    def attend(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(start)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, dropout_p=self.dropout)


class NotDropping(Dropping):
    dropout = 0.0


class Counting(SmallDecoder):
    calls = 0

    def read_out(self, x: Tensor, *, is_cached: bool) -> Tensor:
        self.calls += 1
        return super().read_out(x, is_cached=is_cached) + 0.01 * self.calls


class Late(SmallDecoder):
    """Draws random numbers from the thirteenth token on."""

    def forward(self, ids: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        logits, past = super().forward(ids, past)
        late = torch.arange(past[0][0].shape[2] - ids.shape[1], past[0][0].shape[2]) > 11
        return logits + torch.randn_like(logits) * late[:, None], past


class Drifting(SmallDecoder):
    def read_out(self, x: Tensor, *, is_cached: bool) -> Tensor:
        self.head.weight.mul_(1.001)
        return super().read_out(x, is_cached=is_cached)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (Dropping, "draws random numbers"),
        (Late, "draws random numbers"),
        (Counting, "calls"),
        (Drifting, "head.weight"),
    ],
)
def test_what_gives_other_rows_for_the_same_call_is_not_called_acausal(
    way: str, kind: type[SmallDecoder], cause: str
):
    report = quick(WAYS[way](kind))
    assert report.verdict is Verdict.INCONCLUSIVE
    assert report.summary.startswith("The decoder is not deterministic")
    assert cause in report.summary
    assert "causal" not in report.summary
    assert quick(WAYS[way](NotDropping)).verdict.passes


def ignoring(ids: Any, past: Any, *, full: Any) -> tuple[Any, Any]:
    return full(ids), past or 1


def test_without_float64_a_gap_far_beyond_every_noise_is_a_bug():
    for full, step in (numpy_functions("float32"), functions(SmallDecoder())):
        broken = CallableSubject(full, partial(ignoring, full=full))
        report = quick(broken)
        assert report.verdict is Verdict.DIVERGED, report.summary
        sound = quick(CallableSubject(full, step))
        assert sound.verdict.passes, sound.summary


def test_without_float64_a_small_gap_stays_undecided_with_its_row_and_numbers():
    full, step = functions(SmallDecoder())

    def nudged(ids: Any, past: Any) -> tuple[Any, Any]:
        logits, past = step(ids, past)
        return logits + 1e-3, past

    report = quick(CallableSubject(full, nudged))
    assert report.verdict is Verdict.INCONCLUSIVE
    reasons = {row.reason for result in report.scenarios for row in result.rows if not row.verdict.passes}
    assert any("which no rounding explains" in reason for reason in reasons)


class Block(SmallDecoder):
    """Within blocks of four tokens, each sees those after it, in passes of more than eight."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        if q.shape[2] <= 8:
            return super().attend(q, k, v, start)
        rows, keys = torch.arange(start, k.shape[2])[:, None], torch.arange(k.shape[2])
        visible = keys // 4 <= rows // 4
        return (q @ k.mT * HEAD_DIM**-0.5).masked_fill(~visible, float("-inf")).softmax(-1) @ v


class BlockAndBroken(Block, LargerKeys):
    """The same, and keys are read too large."""


def test_a_leak_does_not_hide_a_fault_of_the_cached_path():
    report = quick(module_of(BlockAndBroken))
    assert report.verdict is Verdict.DIVERGED
    assert "not causal" in report.summary
    assert "passes of up to 8 tokens are causal" in report.summary
    assert "Against literal rows the cached path diverges, too" in report.summary


def test_a_cast_that_returns_other_weights_is_no_rung():
    def other(name: str) -> tuple[Any, Any]:
        return functions(SmallDecoder(seed=1), getattr(torch, name))

    for kind in (SmallDecoder, LargerKeys):
        report = quick(CallableSubject(*functions(kind()), cast=other))
        assert not report.verdict.passes
        assert "another function" in " ".join([report.summary, *report.notes])
    report = quick(CallableSubject(*functions(SmallDecoder()), cast=other))
    assert report.verdict is Verdict.INCONCLUSIVE
    assert "another function" in report.summary


@pytest.mark.parametrize("kind", [SmallDecoder, LargerKeys])
@pytest.mark.parametrize("reference", ["one-pass", "literal"])
def test_crops_and_forks_of_functions_are_judged_alike(kind: type[SmallDecoder], reference: Any):
    def crop(past: Any, length: int) -> Any:
        return [(k[:, :, :length], v[:, :, :length]) for k, v in past]

    subject = CallableSubject(
        *functions(kind()), cast=lambda name: functions(kind(), getattr(torch, name)), ops=CacheOps(crop=crop)
    )
    report = audit(subject, ["rollback", *QUICK], length=16, reference=reference, certificate=False)
    assert report.verdict.passes is (kind is SmallDecoder), report.summary


def test_the_finding_of_all_rows_together_names_its_numbers():
    report = long(module_of(LowCache, torch.float16), 60, 0)
    (result,) = (result for result in report.scenarios if result.errors is not None)
    assert result.errors is not None
    assert result.errors.ratio > result.errors.lowest > 1
    assert chunked_prefill((1, 2, 3), 2).name  # the scenario's own builder is untouched by what is judged


def test_the_truth_of_another_implementation_decides_where_there_is_no_float64():
    """Both rows' errors against it stand side by side, for one row and for all together."""
    truth = module_of(SmallDecoder)

    def without_float64(kind: type[SmallDecoder]) -> CallableSubject:
        full, step = functions(kind(), torch.bfloat16)
        return CallableSubject(lambda ids: full(ids).float(), lambda ids, past: _as_float32(step(ids, past)))

    sound = audit(without_float64(SmallDecoder), QUICK, truth=truth, certificate=False)
    assert sound.verdict.passes, sound.summary
    assert all(result.errors for result in sound.scenarios if result.name in QUICK)
    broken = audit(without_float64(LargerKeys), QUICK, truth=truth, certificate=False)
    assert not broken.verdict.passes
    with pytest.raises(UsageError, match="computes another function"):
        audit(without_float64(SmallDecoder), QUICK, truth=module_of(SmallDecoder, seed=3), certificate=False)
    with pytest.raises(UsageError, match="needs no truth"):
        audit(truth, QUICK, truth=truth, certificate=False)
    with pytest.raises(UsageError, match="cannot be cast to float64"):
        audit(without_float64(SmallDecoder), QUICK, truth=without_float64(SmallDecoder), certificate=False)


def _as_float32(returned: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    return returned[0].float(), returned[1]


class Counted(SmallDecoder):
    """Two modules share a dict, and one of them changes what the other reads, in each call anew."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        shared = {"scale": torch.ones(1), "tables": [torch.arange(1.0, 4.0)]}
        self.shared, self.layers[0].shared = shared, shared

    def forward(self, ids: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        self.layers[0].shared["scale"] = self.shared["tables"][0][ids[:, -1:] % 3]
        return super().forward(ids, past)


def test_modules_share_after_a_cast_what_they_shared_before():
    cast = cast_module(Counted(), torch.float64)
    assert cast.shared is cast.layers[0].shared
    cast(torch.tensor([[1, 2]]))
    assert cast.shared["scale"].dtype is torch.float64
    assert cast.shared["scale"].item() == 3.0
    once, again = Counted(), Counted()
    cast_module(once, torch.float64)
    assert torch.equal(once.shared["scale"], again.shared["scale"]), "the original is left alone"
    assert once.shared["scale"].dtype is torch.float32


def test_without_float64_no_length_is_claimed_up_to_which_a_pass_is_causal():
    report = quick(CallableSubject(*functions(Block())))
    assert report.verdict is Verdict.DIVERGED
    assert "not causal" in report.summary
    assert "are causal" not in report.summary
    assert "is causal" not in report.summary


#: Kinds that no issue names: a sound decoder each, and what its logits or its attention do.
class Distances(SmallDecoder):
    """Logits are squared distances below zero: none is near zero, and they range over thousands."""

    def read_out(self, x: Tensor, *, is_cached: bool) -> Tensor:
        return -(8 * x[..., None, :] - 10 * self.head.weight).square().sum(-1)


class Offset(SmallDecoder):
    """All logits are near 10,000."""

    def read_out(self, x: Tensor, *, is_cached: bool) -> Tensor:
        return self.head(x) + 1e4


class Quantised(SmallDecoder):
    """The activations before the readout are quantised to 8 bits, each token alone."""

    def read_out(self, x: Tensor, *, is_cached: bool) -> Tensor:
        step = x.abs().amax(-1, keepdim=True) / 127
        return self.head((x / step).round() * step)


class Autocast(SmallDecoder):
    """Computes in bfloat16 inside, and returns float32."""

    def forward(self, ids: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        with torch.autocast("cpu", torch.bfloat16):
            logits, past = super().forward(ids, past)
        return logits.float(), past


class NewestFirst(SmallDecoder):
    """Single steps read their keys newest first: the sums are grouped otherwise."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        if q.shape[2] > 1:
            return super().attend(q, k, v, start)
        return (q @ k.flip(2).mT * HEAD_DIM**-0.5).softmax(-1) @ v.flip(2)


@pytest.mark.parametrize("kind", [Distances, Offset, Quantised, Autocast, NewestFirst])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kinds_of_sound_decoders_pass_and_their_broken_twins_do_not(kind: type[SmallDecoder], dtype: torch.dtype):
    class Broken(kind):  # type: ignore[misc,valid-type]
        def read(self, k: Tensor, num_old: int) -> Tensor:
            return torch.cat([k[:, :, :num_old] * 1.1, k[:, :, num_old:]], 2)

    sound = quick(module_of(kind, dtype))
    assert sound.verdict.passes, sound.summary
    assert quick(module_of(Broken, dtype)).verdict is Verdict.DIVERGED
