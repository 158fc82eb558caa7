"""Audits healthy decoders by the thousand, and counts those that do not pass: each one is a false alarm.

Run it as ``python tools/false_alarms.py KIND … --seeds N --out FILE``; KIND is one of `KINDS` or a model type of
transformers. One line of JSON for each audit goes to FILE; a second run goes on where the first stopped. It exits
with 1 if an audit did not pass, or if there was none. A type that has no such attention is counted apart.
"""

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from kvproof import CallableSubject, ModuleSubject, Subject, audit
from kvproof._numerics.casting import cast_module
from kvproof.errors import UsageError

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.detection.small_decoders import SmallDecoder, functions, numpy_functions

DTYPES = ("float32", "bfloat16", "float16")
NOT_BUILT = "not built"
SCENARIOS = ("token-by-token", "prefill+steps", "chunked prefill", "multi-turn")


def _module(dtype: torch.dtype, seed: int) -> Subject:
    return ModuleSubject(cast_module(SmallDecoder(seed), dtype), cache="past")


def _functions(dtype: torch.dtype, seed: int) -> Subject:
    return CallableSubject(
        *functions(SmallDecoder(seed), dtype),
        cast=lambda name: functions(SmallDecoder(seed), getattr(torch, name)),
    )


def _alone(dtype: torch.dtype, seed: int) -> Subject:
    return CallableSubject(*functions(SmallDecoder(seed), dtype))


def _numpy(dtype: torch.dtype, seed: int) -> Subject:
    return CallableSubject(*numpy_functions(seed=seed), cast=lambda name: numpy_functions(name, seed=seed))


def _numpy_alone(dtype: torch.dtype, seed: int) -> Subject:
    return CallableSubject(*numpy_functions(seed=seed))


def _narrow(dtype: torch.dtype, seed: int) -> Subject:
    """Return a reference decoder of width 2 to 12, whose norms go over few values."""
    from tests.strategies import random_subject

    from kvproof.reference import DecoderConfig

    generator = torch.Generator().manual_seed(seed)
    heads, head_dim, layers, mlp = (int(torch.randint(1, n, (1,), generator=generator)) for n in (4, 5, 4, 17))
    config = DecoderConfig(
        num_layers=layers,
        num_heads=heads,
        head_dim=max(2, head_dim),
        mlp_width=mlp,
        context_len=32,
        vocab_size=24,
    )
    return random_subject(config, seed, dtype)


def _example(name: str) -> Callable[[torch.dtype, int], Subject]:
    def make(dtype: torch.dtype, seed: int) -> Subject:
        from kvproof.subjects._adapter import LoadOptions
        from kvproof.subjects._targets import load_target

        torch.manual_seed(seed)
        return load_target(f"{Path(__file__).parents[1]}/examples/{name}.py:subject", LoadOptions(seed=seed))

    return make


EXAMPLES = ("grouped_rotary", "minimal_gpt", "numpy_gpt", "preallocated", "recurrent", "rotating_window")
KINDS: dict[str, Callable[[torch.dtype, int], Subject]] = {
    "module": _module,
    "functions": _functions,
    "functions-alone": _alone,
    "numpy": _numpy,
    "numpy-alone": _numpy_alone,
    "narrow": _narrow,
    **{name: _example(name) for name in EXAMPLES},
}
#: Kinds whose dtype is their own.
_OWN_DTYPE = frozenset({"numpy", "numpy-alone", *EXAMPLES})


def _subject(kind: str, dtype: torch.dtype, seed: int, attention: str) -> Subject:
    if kind in KINDS:
        return KINDS[kind](dtype, seed)
    from kvproof.subjects._transformers import random_model

    return random_model(kind, seed=seed, dtype=dtype, attention=attention)


def _audits(kinds: list[str], seeds: int, attentions: list[str]) -> Iterator[tuple[str, str, str, int]]:
    for seed in range(seeds):
        for kind in kinds:
            for dtype in DTYPES if kind not in _OWN_DTYPE else DTYPES[:1]:
                yield from ((kind, dtype, a, seed) for a in (attentions if kind not in KINDS else ["own"]))


def _run(kind: str, dtype: str, attention: str, seed: int, length: int) -> dict[str, Any]:
    start = perf_counter()
    try:
        subject = _subject(kind, getattr(torch, dtype), seed, attention)
    except UsageError as error:
        if attention in ("own", "eager"):  # every type has these, so the kind is wrong
            raise
        return {"audit": [kind, dtype, attention, seed], "verdict": NOT_BUILT, "summary": str(error)[:200]}
    length = min(length, subject.info.context_len)
    report = audit(subject, SCENARIOS, length=length, seed=seed, all_values=False, certificate=False)
    ratios = [result.errors.lowest for result in report.scenarios if result.errors]
    return {
        "audit": [kind, dtype, attention, seed],
        "verdict": report.verdict.value,
        "summary": report.summary,
        "lowest": max(ratios, default=None),
        "seconds": round(perf_counter() - start, 2),
    }


def main() -> int:
    """Run the audits that FILE does not hold yet; return 1 if one of all did not pass, or there is none."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--length", type=int, default=24)
    parser.add_argument("--attention", nargs="*", default=["eager"])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    options.out.touch()
    known = [json.loads(line) for line in options.out.read_text().splitlines()]
    done = {tuple(each["audit"]) for each in known}
    with options.out.open("a") as file:
        for each in _audits(options.kinds, options.seeds, options.attention):
            if each not in done:
                result = _run(*each, options.length)
                known.append(result)
                file.write(f"{json.dumps(result)}\n")
                file.flush()
    missing = [each for each in known if each["verdict"] == NOT_BUILT]
    known = [each for each in known if each["verdict"] != NOT_BUILT]
    verdicts = Counter(each["verdict"] for each in known)
    if missing:
        print(f"{len(missing)} not built: {', '.join(sorted({each['audit'][0] for each in missing}))}")
    print(f"{len(known)} audits: {', '.join(f'{n} {verdict}' for verdict, n in verdicts.items())}")
    alarms = [each for each in known if each["verdict"] not in ("match", "rounding")]
    for each in alarms:
        print(*each["audit"], each["verdict"], each["summary"], sep=": ")
    return 1 if alarms or not known else 0


if __name__ == "__main__":
    sys.exit(main())
