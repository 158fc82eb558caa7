"""Speed as ratios measured in one run: ``make bench``.

The reference decoder scaled up to 8 layers and width 512 generates and is audited over 256 tokens. A ratio
beyond its budget is marked and makes the exit status 1; nothing in the test suite is timed.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

import kvproof
from kvproof._engine.rung import Rung
from kvproof._engine.uncached_rows import Uncached
from kvproof.reference import Checkpoint, Decoder, DecoderConfig
from kvproof.scenarios import token_by_token


def scaled_up(length: int) -> kvproof.ReferenceSubject:
    """Return a random decoder of 8 layers and width 512."""
    config = DecoderConfig(
        num_layers=8, num_heads=8, head_dim=64, mlp_width=2048, context_len=length, vocab_size=8192
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        decoder = Decoder(config).eval().requires_grad_(False)
    return kvproof.ReferenceSubject(Checkpoint(decoder=decoder, seed=0, loss=math.nan))


@torch.no_grad()
def steps_by_hand(decoder: Decoder, ids: list[int]) -> list[Tensor]:
    """Return the cached rows as a person writes the loop: no checks, no taps, keys and values concatenated."""
    config = decoder.config
    shape = (1, 1, config.num_heads, config.head_dim)
    past: list[tuple[Tensor, Tensor] | None] = [None] * config.num_layers
    rows = []
    for position, token in enumerate(ids):
        x = decoder.token_embedding(torch.tensor([[token]])) + decoder.position_embedding(
            torch.tensor([[position]])
        )
        for layer, block in enumerate(decoder.blocks):
            a = block.attention
            h = block.attention_norm(x)
            q, k, v = (part(h).view(shape).transpose(1, 2) for part in (a.query, a.key, a.value))
            if past[layer] is not None:
                k, v = torch.cat([past[layer][0], k], dim=2), torch.cat([past[layer][1], v], dim=2)
            past[layer] = (k, v)
            weights = (q @ k.transpose(-1, -2) / math.sqrt(config.head_dim)).softmax(dim=-1)
            x = x + a.output((weights @ v).transpose(1, 2).reshape(1, 1, -1))
            x = x + block.mlp(block.mlp_norm(x))
        rows.append((decoder.final_norm(x) @ decoder.token_embedding.weight.T)[0, 0])
    return rows


@torch.no_grad()
def pass_by_hand(decoder: Decoder, ids: list[int]) -> Tensor:
    """Return the rows of one full pass."""
    return decoder(torch.tensor([ids]), torch.arange(len(ids))[None])[0]


def seconds(run: Callable[[], object]) -> float:
    """Return how long one call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> int:
    """Print the table; return 1 if a ratio is beyond its budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=256, help="tokens (default 256)")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default 5)")
    parser.add_argument("--only", default="", metavar="WORDS", help="the ratios whose name holds these words")
    options = parser.parse_args()
    subject = scaled_up(options.length)
    decoder = subject.decoder
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, decoder.config.vocab_size, (options.length,), generator=generator).tolist()

    def steps() -> None:
        session = subject.session()
        for token in ids:
            session.extend([[token]])

    def uncached() -> None:
        for length in range(1, len(ids) + 1):
            pass_by_hand(decoder, ids[:length])[-1]

    def audited() -> None:
        program = token_by_token(ids)
        report = kvproof.audit(subject, [program], reference="one-pass", top_rung=False, all_values=False)
        if not report.verdict.passes:
            raise SystemExit(f"the benchmark's decoder does not pass: {report.summary}")

    def steps_hand() -> None:
        steps_by_hand(decoder, ids)

    def audited_by_hand() -> None:
        rows = pass_by_hand(decoder, ids)
        gaps = [(row - rows[i]).abs().max() for i, row in enumerate(steps_by_hand(decoder, ids))]
        if float(max(gaps)) > 1e-3:
            raise SystemExit("the loop written by hand is wrong")

    def literal_audit_by_hand() -> None:
        uncached()
        steps_hand()

    def one_pass_rows() -> None:
        Rung(subject).one_pass(tuple(ids), len(ids))

    def reference_part() -> None:
        Uncached(subject, "one-pass", top_rung=False).measure([tuple(ids)])

    in_float64 = subject.cast(torch.float64)

    def steps_in_float64() -> None:
        session = in_float64.session()
        for token in ids:
            session.extend([[token]])

    pairs = [
        ("uncached loop / cached steps", uncached, steps, None, None, 1),
        ("session / the same steps by hand", steps, steps_hand, None, 1.05, options.rounds),
        ("audit / one pass + the same steps by hand", audited, audited_by_hand, None, 1.15, options.rounds),
        ("literal loop + steps by hand / audit", literal_audit_by_hand, audited, 5.0, None, 1),
        ("literal rows by hand / rows of one pass", uncached, one_pass_rows, 100.0, None, 1),
        ("  the same with proof and spot checks", uncached, reference_part, None, None, 1),
        ("steps in float64 / in float32", steps_in_float64, steps, None, 2.0, options.rounds),
    ]
    print(
        f"8 layers, width 512, {options.length} tokens, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}; median of {options.rounds} paired rounds, the uncached loop once\n"
    )
    beyond = 0
    for name, left, right, least, most, rounds in (pair for pair in pairs if options.only in pair[0]):
        if rounds > 1:
            left(), right()  # warm up
        else:
            right()
        ratios, times = [], []
        for number in range(rounds):
            # Each round runs both, in turns first, so that what else the machine does hits both alike.
            first, second = (left, right) if number % 2 else (right, left)
            took = {run: seconds(run) for run in (first, second)}
            ratios.append(took[left] / took[right])
            times.append((took[left], took[right]))
        ratio = statistics.median(ratios)
        late = (most is not None and ratio > most) or (least is not None and ratio < least)
        beyond += late
        spread = f"{min(ratios):.3f}..{max(ratios):.3f}" if rounds > 1 else ""
        allowed = f"at most {most}" if most else f"at least {least:g}" if least else ""
        seconds_each = " / ".join(f"{statistics.median(side):.2f}" for side in zip(*times, strict=True))
        print(f"{name:42} {ratio:6.3f}  {spread:14} {allowed:14}{seconds_each} s{'  BEYOND' if late else ''}")
    return int(bool(beyond))


if __name__ == "__main__":
    sys.exit(main())
