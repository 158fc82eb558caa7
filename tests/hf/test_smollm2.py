"""A real pretrained model, from a GGUF file: its text, its vocabulary, and an audit in bfloat16."""

from ast import literal_eval
from pathlib import Path

import pytest
import torch
from benchmarks.field import library_tokens
from tests.hf.smollm2 import gguf_file

from kvproof import Stops, audit, generate, replay
from kvproof._engine.prompts import sequences_for
from kvproof.contract.ledger import MarginVerdict
from kvproof.render.html import render
from kvproof.scenarios import chunked_prefill, token_by_token
from kvproof.subjects import Subject
from kvproof.subjects._adapter import LoadOptions
from kvproof.subjects._targets import load_target

PROMPT = "A decoder generates fast because it caches keys and values."

# The file takes many seconds to load: these tests share one subject, and belong in one process.
pytestmark = pytest.mark.xdist_group("smollm2")


@pytest.fixture(scope="module")
def smollm2() -> Subject:
    return load_target(str(gguf_file()), LoadOptions(dtype="bfloat16"))


def test_the_file_gives_the_pretrained_model(smollm2: Subject):
    assert smollm2.info.name == gguf_file().name
    assert (smollm2.info.vocab_size, smollm2.info.num_layers, smollm2.info.context_len) == (49152, 30, 8192)
    assert smollm2.info.dtype == "bfloat16"


def test_text_survives_the_tokenizer(smollm2: Subject):
    ids = smollm2.encode(f"{PROMPT} é\n")
    assert "".join(literal_eval(smollm2.token(i)) for i in ids) == f"{PROMPT} é\n"
    assert smollm2.token(ids[1]) == "' decoder'"


def test_its_weights_are_those_that_were_trained(smollm2: Subject):
    row = smollm2.rows(smollm2.encode("The capital of France is"))[-1]
    assert smollm2.token(int(row.argmax())) == "' Paris'"


def test_its_cached_path_passes(smollm2: Subject):
    ids, _ = sequences_for(smollm2, PROMPT, 16, seed=0)
    report = audit(smollm2, [token_by_token(ids), chunked_prefill(ids, 5)], all_values=False)
    assert report.verdict.passes, report.summary
    rows = {scenario.name: scenario.rows for scenario in report.scenarios}
    assert len(rows["token-by-token"]) == len(rows["chunked prefill"]) == 16
    assert "' decoder'" in rows["token-by-token"][-1].tokens
    assert len(render(report).encode()) < 2_000_000, "a page is sent by mail"


def test_it_generates_what_transformers_own_generate_does_and_replays(smollm2: Subject, tmp_path: Path):
    subject = smollm2.cast(torch.float32)
    question = "What is the capital of France?"
    stops = Stops(eos_id=subject.eos_ids, stop_texts=("Paris",), max_tokens=12)
    run = generate(subject, question, stops=stops, chat=True, ledger=tmp_path / "ledger.jsonl")
    assert run.end.stop_reason == "stop_text"
    assert run.end.text == "The capital of France is "
    assert subject.text(run.header.prompt).endswith(f"user\n{question}<|im_end|>\n<|im_start|>assistant\n")
    assert run.steps[-1].chosen_token == "' Paris'"
    assert {step.margin_verdict for step in run.steps} == {MarginVerdict.SAFE}
    assert list(run.returned) == library_tokens(subject, list(run.header.prompt), len(run.returned))
    result = replay(run, subject, from_step=len(run.steps) - 1)
    assert result.problem is None
    assert result.bit_identical
