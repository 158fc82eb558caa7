"""Small decoders of two attention layers, sound or broken in one way, as two functions and as a torch module."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

VOCAB, WIDTH, HEADS, LAYERS = 37, 24, 3, 2
HEAD_DIM = WIDTH // HEADS

#: Changes keys or values as they are read from the cache: (tensor, whether it was kept from an earlier call).
Change = Callable[[Tensor, bool], Tensor]


def as_read(kept: Tensor, is_old: bool) -> Tensor:
    """Return what a sound decoder reads."""
    return kept


class Attention(nn.Module):
    """One layer, with rotary positions in pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.RMSNorm(WIDTH)


class SmallDecoder(nn.Module):
    """``forward(ids, past)``: logits, and keys and values by layer. What may break is a method."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        for weight in self.parameters():
            if weight.dim() == 2 and weight is not self.embed.weight:
                weight.data *= 2.0
        self.requires_grad_(False).eval()

    def forward(self, ids: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        """Return logits (batch, new, vocab) and the cache."""
        start = 0 if past is None else past[0][0].shape[2]
        batch, new = ids.shape
        x, kept = self.embed(ids), []
        for number, layer in enumerate(self.layers):
            q, k, v = layer.qkv(layer.norm(x)).view(batch, new, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
            q, k = (self.turned(part, start, is_cached=past is not None) for part in (q, k))
            if past is not None:
                k, v = torch.cat([past[number][0], k], 2), torch.cat([past[number][1], v], 2)
            kept.append((self.keep(k), self.keep(v)))
            mixed = self.attend(q, self.read(k, start), v, start)
            x = x + layer.out(mixed.transpose(1, 2).reshape(batch, new, WIDTH))
        return self.read_out(self.norm(x), is_cached=past is not None), kept

    def angles(self, start: int, new: int, *, is_cached: bool) -> Tensor:
        """Return the angles (new, head_dim / 2), in float32 whatever the weights are."""
        speeds = 100.0 ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float32) / HEAD_DIM)
        return torch.arange(start, start + new, dtype=torch.float32)[:, None] * speeds

    def turned(self, x: Tensor, start: int, *, is_cached: bool) -> Tensor:
        """Return queries or keys, turned by their positions."""
        angles = self.angles(start, x.shape[2], is_cached=is_cached)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def keep(self, x: Tensor) -> Tensor:
        """Return what the cache keeps of keys or values."""
        return x

    def read(self, k: Tensor, num_old: int) -> Tensor:
        """Return the keys that attention reads, of which the first were kept from earlier calls."""
        return k

    def attend(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Return the mix of values."""
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(start)
        weights = (q @ k.mT * HEAD_DIM**-0.5).masked_fill(~visible, float("-inf"))
        return weights.softmax(-1) @ v

    def read_out(self, x: Tensor, *, is_cached: bool) -> Tensor:
        """Return the logits."""
        return self.head(x)


def functions(decoder: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return full(ids) and step(ids, cache) around a decoder."""
    decoder = decoder.to(dtype)

    def full(ids: Any) -> Tensor:
        return decoder(torch.as_tensor(ids)[None])[0][0]

    def step(ids: Any, past: Any) -> tuple[Tensor, Any]:
        logits, past = decoder(torch.as_tensor(ids)[None], past)
        return logits[0], past

    return full, step


def numpy_functions(
    dtype: str = "float32", *, inner: str | None = None, scale_old: float = 1.0, seed: int = 0
) -> tuple[Any, Any]:
    """Return such a decoder in NumPy: its softmax in ``inner``, kept keys ``scale_old`` times as large."""
    rng = np.random.default_rng(seed)
    embed = rng.normal(size=(VOCAB, WIDTH)).astype(np.float32).astype(dtype)
    layers = [rng.normal(size=(4, WIDTH, WIDTH)).astype(np.float32).astype(dtype) / 4 for _ in range(LAYERS)]
    head = rng.normal(size=(WIDTH, VOCAB)).astype(np.float32).astype(dtype)

    def run(ids: Any, past: Any) -> tuple[Any, Any]:
        x, kept = embed[np.asarray(ids)], []
        for number, (wq, wk, wv, wo) in enumerate(layers):
            h = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
            q, k, v = h @ wq, h @ wk, h @ wv
            if past is not None:
                k, v = (
                    np.concatenate([past[number][0] * np.asarray(scale_old, dtype), k]),
                    np.concatenate([past[number][1], v]),
                )
            kept.append((k, v))
            start = len(k) - len(q)
            visible = np.tril(np.ones((len(q), len(k)), bool), start)
            scores = np.where(visible, q @ k.T / np.sqrt(WIDTH), -np.inf).astype(inner or dtype)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = weights @ v.astype(inner or dtype) / weights.sum(-1, keepdims=True)
            x = x + mixed.astype(dtype) @ wo
        return (x @ head).astype(dtype), kept

    return (lambda ids: run(ids, None)[0]), run
