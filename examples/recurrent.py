"""A recurrent decoder: kvproof audit examples/recurrent.py:subject

Each layer keeps the last inputs of a short convolution and a decaying state. With the bug, a block on a warm
cache starts its recurrence from zero, and single steps never show it:
``kvproof audit examples/recurrent.py:broken``.
"""

import torch
from torch import Tensor, nn

from kvproof.subjects import CacheOps, ModuleSubject

VOCAB, WIDTH, LAYERS, KERNEL = 61, 32, 2, 4

#: The last KERNEL - 1 inputs of the convolution (batch, WIDTH, KERNEL - 1), and the state (batch, WIDTH).
State = tuple[Tensor, Tensor]


class Mixer(nn.Module):
    """A causal convolution, and a state that each token's gate lets decay."""

    def __init__(self, *, bug: bool) -> None:
        super().__init__()
        self.inner, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, KERNEL, groups=WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.bug = bug

    def forward(self, x: Tensor, state: State | None) -> tuple[Tensor, State]:
        inputs = self.inner(x).transpose(1, 2)
        before = state[0] if state is not None else inputs.new_zeros(len(x), WIDTH, KERNEL - 1)
        joined = torch.cat([before, inputs], dim=-1)
        mixed = nn.functional.silu(self.conv(joined)).transpose(1, 2)
        decay = self.gate(x).sigmoid()
        h = state[1] if state is not None else x.new_zeros(len(x), WIDTH)
        if self.bug and x.shape[1] > 1:
            h = torch.zeros_like(h)
        states = []
        for token in range(x.shape[1]):
            h = decay[:, token] * h + (1 - decay[:, token]) * mixed[:, token]
            states.append(h)
        return self.out(torch.stack(states, dim=1)), (joined[..., 1 - KERNEL :], h)


class Decoder(nn.Module):
    """forward(ids, states) returns an object with ``.logits`` and ``.states``."""

    def __init__(self, *, bug: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(LAYERS)])
        self.layers = nn.ModuleList([Mixer(bug=bug) for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor, states: list[State] | None = None) -> "Output":
        x = self.tokens(ids)
        after = []
        for number, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            read, kept = layer(norm(x), states[number] if states else None)
            x = x + read
            after.append(kept)
        return Output(self.head(x), after)


class Output:
    """What a call returns."""

    def __init__(self, logits: Tensor, states: list[State]) -> None:
        self.logits, self.states = logits, states


def subject(*, bug: bool = False) -> ModuleSubject:
    """Return the module as kvproof takes it: ``new_cache`` names the states among what a call returns."""
    torch.manual_seed(0)
    ops = CacheOps(
        reorder=lambda states, rows: [(conv[list(rows)], h[list(rows)]) for conv, h in states],
        show=lambda states: [{"conv": conv, "state": h} for conv, h in states or []],
        put=lambda states, layers: [(layer["conv"], layer["state"]) for layer in layers],
    )
    return ModuleSubject(Decoder(bug=bug), cache="states", new_cache="states", windows=(KERNEL - 1,), ops=ops)


def broken() -> ModuleSubject:
    """Return the module with its bug."""
    return subject(bug=True)
