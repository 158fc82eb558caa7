"""The decoder against hand-written arithmetic, and its sizes, order and causality (spec R1)."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import sequences, subjects

from kvproof import ReferenceSubject
from kvproof._numerics.taps import Recorder
from kvproof.contract.stages import Site, Stage, causal_order
from kvproof.errors import ContextError
from kvproof.reference import Checkpoint, Decoder, DecoderConfig


def test_the_reference_system_has_the_declared_sizes(checkpoint: Checkpoint):
    shapes = {name: tuple(weight.shape) for name, weight in checkpoint.decoder.named_parameters()}
    assert shapes["token_embedding.weight"] == (8, 4)
    assert shapes["position_embedding.weight"] == (4, 4)
    for layer in (0, 1):
        for projection in ("query", "key", "value", "output"):
            assert shapes[f"blocks.{layer}.attention.{projection}.weight"] == (4, 4)
    assert not any(name.startswith("blocks.2") for name in shapes)
    config = checkpoint.decoder.config
    assert (config.num_layers, config.num_heads, config.head_dim, config.width) == (2, 2, 2, 4)


def test_the_readout_is_the_token_embedding_itself(checkpoint: Checkpoint):
    names = [name for name, _ in checkpoint.decoder.named_parameters()]
    assert not any("readout" in name or "head" in name or "unembed" in name for name in names)
    recorder = Recorder()
    subject = ReferenceSubject(checkpoint)
    logits = subject.rows((0, 2), tap=recorder)
    tied = recorder.values[Site(Stage.FINAL_NORM)] @ checkpoint.decoder.token_embedding.weight.T
    assert torch.equal(logits, tied[0])


def test_the_checkpoint_is_frozen(checkpoint: Checkpoint):
    assert not checkpoint.decoder.training
    assert not any(weight.requires_grad for weight in checkpoint.decoder.parameters())


def test_position_4_is_refused(subject: ReferenceSubject):
    with pytest.raises(ContextError, match=r"position 4 is past the context.*positions 0\.\.3"):
        subject.rows((0, 2, 3, 5, 1))


def test_values_are_tapped_in_causal_order(subject: ReferenceSubject):
    recorder = Recorder()
    subject.rows((0, 2, 3), tap=recorder)
    tapped = list(recorder.values)
    order = [site for site in causal_order(2) if site.stage not in (Stage.CACHE_LEN, Stage.POLICY)]
    assert tapped == order


def test_the_decoder_goes_on_with_what_a_tap_returns(subject: ReferenceSubject):
    def blank_logits(site: Site, value: torch.Tensor) -> torch.Tensor:
        return torch.full_like(value, 7.0) if site.stage is Stage.LOGITS else value

    assert torch.equal(subject.rows((0, 2), tap=blank_logits), torch.full((2, 8), 7.0))


@given(st.data())
def test_a_later_token_changes_no_earlier_row(data: st.DataObject):
    subject = data.draw(subjects())
    ids = data.draw(sequences(subject, min_len=2))
    changed = (*ids[:-1], (ids[-1] + 1) % subject.info.vocab_size)
    assert torch.equal(subject.rows(ids)[:-1], subject.rows(changed)[:-1])


def row_by_hand(decoder: Decoder, ids: tuple[int, ...]) -> list[float]:
    """Return the last row of logits with Python's own arithmetic, one number at a time."""
    config: DecoderConfig = decoder.config
    weights = {name: weight.tolist() for name, weight in decoder.named_parameters()}

    def linear(x: list[float], name: str) -> list[float]:
        rows, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return [sum(w * v for w, v in zip(row, x, strict=True)) + b for row, b in zip(rows, bias, strict=True)]

    def norm(x: list[float], name: str) -> list[float]:
        mean = sum(x) / len(x)
        spread = math.sqrt(sum((v - mean) ** 2 for v in x) / len(x) + 1e-5)
        scale, shift = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return [(v - mean) / spread * w + b for v, w, b in zip(x, scale, shift, strict=True)]

    def gelu(v: float) -> float:
        return 0.5 * v * (1 + math.erf(v / math.sqrt(2)))

    def add(a: list[float], b: list[float]) -> list[float]:
        return [v + w for v, w in zip(a, b, strict=True)]

    stream = [
        add(weights["token_embedding.weight"][token], weights["position_embedding.weight"][position])
        for position, token in enumerate(ids)
    ]
    for layer in range(config.num_layers):
        block = f"blocks.{layer}"
        normed = [norm(x, f"{block}.attention_norm") for x in stream]
        q, k, v = ([linear(x, f"{block}.attention.{part}") for x in normed] for part in ("query", "key", "value"))
        for position in range(len(ids)):
            mixed: list[float] = []
            for head in range(config.num_heads):
                part = slice(head * config.head_dim, (head + 1) * config.head_dim)
                scores = [
                    sum(a * b for a, b in zip(q[position][part], k[slot][part], strict=True))
                    / math.sqrt(config.head_dim)
                    for slot in range(position + 1)
                ]
                total = sum(math.exp(s - max(scores)) for s in scores)
                shares = [math.exp(s - max(scores)) / total for s in scores]
                for component in range(config.head_dim):
                    mixed.append(sum(p * v[slot][part][component] for slot, p in enumerate(shares)))
            x = add(stream[position], linear(mixed, f"{block}.attention.output"))
            hidden = [gelu(h) for h in linear(norm(x, f"{block}.mlp_norm"), f"{block}.mlp.0")]
            stream[position] = add(x, linear(hidden, f"{block}.mlp.2"))
    last = norm(stream[-1], "final_norm")
    return [sum(a * b for a, b in zip(last, row, strict=True)) for row in weights["token_embedding.weight"]]


@given(st.data())
def test_the_decoder_computes_what_its_slow_twin_computes(data: st.DataObject):
    subject = data.draw(subjects()).cast(torch.float64)
    assert isinstance(subject, ReferenceSubject)
    ids = data.draw(sequences(subject))
    expected = row_by_hand(subject.decoder, ids)
    torch.testing.assert_close(
        subject.rows(ids)[-1], torch.tensor(expected, dtype=torch.float64), rtol=1e-11, atol=1e-11
    )
