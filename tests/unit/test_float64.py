"""True float64 raises every way to ask for a lower float type, and nothing else."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kvproof._numerics.true_float64 import TrueFloat64

LOWERED: dict[str, Callable[[Tensor], Tensor]] = {
    "float()": lambda x: x.float(),
    "half()": lambda x: x.half(),
    "bfloat16()": lambda x: x.bfloat16(),
    "to(dtype)": lambda x: x.to(torch.float32),
    "to(dtype=)": lambda x: x.to(dtype=torch.bfloat16),
    "to(device, dtype)": lambda x: x.to("cpu", torch.float16),
    "type(dtype)": lambda x: x.type(torch.float32),
    "type(name)": lambda x: x.type("torch.FloatTensor"),
    "softmax(dtype=)": lambda x: torch.softmax(x, dim=-1, dtype=torch.float32),
    "functional softmax(dtype=)": lambda x: nn.functional.softmax(x, dim=-1, dtype=torch.float32),
    "cumsum(dtype=)": lambda x: x.cumsum(0, dtype=torch.float32),
    "sum(dtype=)": lambda x: x.sum(dtype=torch.float32),
    "arange(dtype=)": lambda x: torch.arange(4, dtype=torch.float32),
    "zeros(dtype=)": lambda x: torch.zeros(4, dtype=torch.float16),
    "tensor(dtype=)": lambda x: torch.tensor([0.1, 0.2], dtype=torch.float32),
    "full_like(dtype=)": lambda x: torch.full_like(x, 0.1, dtype=torch.float32),
}


@pytest.mark.parametrize("ask", LOWERED.values(), ids=LOWERED)
def test_every_way_to_ask_for_a_lower_float_type_gives_float64(ask: Callable[[Tensor], Tensor]):
    x = torch.rand(4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert ask(x).dtype in (torch.float32, torch.float16, torch.bfloat16), "outside, the request is honoured"
    with TrueFloat64():
        assert ask(x).dtype is torch.float64
    assert ask(x).dtype is not torch.float64, "the mode is left behind"


UNNAMED: dict[str, Callable[[], Tensor]] = {
    "full": lambda: torch.full((), torch.finfo(torch.float64).min),
    "tensor": lambda: torch.tensor(0.1),
    "zeros": lambda: torch.zeros(2),
    "arange": lambda: torch.arange(0.0, 1.0, 0.1),
    "linspace": lambda: torch.linspace(0, 1, 3),
    "division of whole numbers": lambda: torch.tensor(1) / torch.tensor(3),
}


@pytest.mark.parametrize("make", UNNAMED.values(), ids=UNNAMED)
def test_what_names_no_type_is_float64(make: Callable[[], Tensor]):
    """A mask's stand-in for minus infinity, made without a type, would overflow in float32."""
    with TrueFloat64():
        assert make().dtype is torch.float64
    assert torch.get_default_dtype() is torch.float32, "the mode is left behind"


def test_an_error_inside_leaves_the_default_type_as_it_was():
    with pytest.raises(RuntimeError, match="inside"), TrueFloat64():
        raise RuntimeError("inside")
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.complex128, torch.float64])
def test_other_types_stay_what_they_are(dtype: torch.dtype):
    with TrueFloat64():
        assert torch.zeros(2).to(dtype).dtype is dtype


class CastingNorm(nn.Module):
    """A norm as real models write it: computed in float32, given back in the input's type."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def test_a_cast_inside_a_model_costs_six_digits_without_the_mode_and_none_with_it():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 16, dtype=torch.float64, generator=generator)
    exact = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    residue = (CastingNorm()(x) - exact).abs().max()
    with TrueFloat64():
        raised = (CastingNorm()(x) - exact).abs().max()
    assert 1e-9 < residue < 1e-5
    assert raised <= 1e-15


@pytest.mark.parametrize("largest", [True, False])
def test_a_top_k_takes_the_lowest_index_among_equal_ones_at_any_length(largest: bool):
    scores = torch.tensor([[1.0, 0.0, 2.0, 0.0, 2.0, 0.0, 1.0]], dtype=torch.float64)
    with TrueFloat64():
        for padding in range(60):
            longer = torch.nn.functional.pad(scores, (0, padding), value=1.5)
            values, indices = longer.topk(2, dim=-1, largest=largest)
            assert indices.tolist() == ([[2, 4]] if largest else [[1, 3]])
            assert values.tolist() == ([[2.0, 2.0]] if largest else [[0.0, 0.0]])
            assert torch.topk(longer, 2, 1, largest).indices.tolist() == indices.tolist()


def test_a_top_k_without_ties_is_the_same_as_outside():
    scores = torch.randn(3, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    outside = scores.topk(7, dim=-1)
    with TrueFloat64():
        inside = scores.topk(7)
    assert torch.equal(outside.values, inside.values)
    assert torch.equal(outside.indices, inside.indices)
    assert inside.indices.view(-1).shape == (21,), "a view of it works as outside"
