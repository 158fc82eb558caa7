"""Several requests at once: each owns its state, whenever it joins and however the steps fall."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof._generation.requests import Request, generate, serve
from kvproof.contract.ledger import StopReason
from kvproof.errors import UsageError
from kvproof.policies import Greedy, Policy, Sample, Stops
from kvproof.reference.corpus import BOS_ID
from kvproof.subjects import CallableSubject, ReferenceSubject, Subject
from kvproof.subjects._adapter import LoadOptions
from kvproof.subjects._targets import load_target

POLICIES: list[Policy] = [
    Greedy(),
    Greedy(repetition_penalty=1.5),
    *(Sample(temperature=2.0, top_p=0.95, seed=seed) for seed in range(3)),
]


@pytest.fixture(scope="module", params=["reference", "llama", "mamba", "recurrent_gemma"])
def decoder(request: pytest.FixtureRequest) -> Subject:
    """Caches as values, caches of a library's, and recurrences: one of them on the model's own modules."""
    if request.param == "reference":
        return ReferenceSubject(request.getfixturevalue("checkpoint"))
    return load_target(f"random:{request.param}", LoadOptions())


def request_of(subject: Subject, number: int) -> Request:
    context = min(subject.info.context_len, 8)
    prompt = [(3 * number + i) % subject.info.vocab_size for i in range(1 + number % (context - 2))]
    stops = Stops(max_tokens=1 + number % 4)
    return Request(subject, prompt, POLICIES[number % len(POLICIES)], stops, margins=number % 3 == 0)


#: When requests arrive and which of those that are there steps next, as integers that are taken modulo.
ARRIVALS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7), st.booleans()), min_size=1, max_size=24)


@given(arrivals=ARRIVALS)
@settings(max_examples=4)
def test_a_request_returns_the_same_bits_whatever_others_do_between_its_steps(
    arrivals: list[tuple[int, int, bool]], decoder: Subject
):
    """Tokens, probabilities, digests of whole rows and the generator's states, at every step."""
    alone = {}
    running: list[tuple[int, Request]] = []
    for number, which, joins in arrivals:
        if joins or not running:
            running.append((number, request_of(decoder, number)))
        number, request = running[which % len(running)]
        request.step()
        if request.end is not None:
            running.remove((number, request))
        if number not in alone:
            alone[number] = request_of(decoder, number)
            serve([alone[number]])
        assert request.steps == alone[number].steps[: len(request.steps)]
        assert request.end in (None, alone[number].end)


@given(num_requests=st.integers(0, 7), batch=st.integers(1, 9))
@settings(max_examples=8)
def test_requests_join_as_others_leave_and_all_end(num_requests: int, batch: int, trained: ReferenceSubject):
    made: list[Request] = []
    largest, ended = 0, []

    def arriving():
        nonlocal largest
        for number in range(num_requests):
            made.append(request_of(trained, number))
            largest = max(largest, sum(request.end is None for request in made))
            yield made[-1]

    serve(arriving(), batch=batch, on_end=ended.append)
    assert sorted(map(id, ended)) == sorted(map(id, made))
    assert len(made) == num_requests
    assert largest <= batch
    for number, request in enumerate(made):
        alone = request_of(trained, number)
        serve([alone])
        assert (request.steps, request.end) == (alone.steps, alone.end)


@pytest.fixture(scope="module")
def trained(checkpoint) -> ReferenceSubject:
    return ReferenceSubject(checkpoint)


def test_ctrl_c_marks_those_that_run_and_leaves_those_that_ended(trained: ReferenceSubject):
    requests = [request_of(trained, number) for number in (0, 3, 1)]

    def interrupt(request: Request) -> None:
        if request is requests[2]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        serve(requests, batch=3, on_step=interrupt)
    reasons = [request.end.stop_reason for request in requests]
    assert reasons == [StopReason.MAX_TOKENS, StopReason.INTERRUPTED, StopReason.INTERRUPTED]


def test_a_partial_run_is_returned_only_where_it_is_asked_for(trained: ReferenceSubject):
    def interrupt(request: Request) -> None:
        raise KeyboardInterrupt

    stops = Stops(max_tokens=3)
    run = generate(trained, [BOS_ID], stops=stops, on_step=interrupt, keep_partial=True)
    assert (len(run.steps), run.end.stop_reason) == (1, StopReason.INTERRUPTED)
    with pytest.raises(KeyboardInterrupt):
        generate(trained, [BOS_ID], stops=stops, on_step=interrupt)


def test_a_batch_holds_at_least_one(trained: ReferenceSubject):
    with pytest.raises(UsageError, match=r"^batch must be at least 1, not 0$"):
        serve([], batch=0)


def test_a_request_that_nothing_can_end_is_refused():
    subject = CallableSubject(
        lambda ids: np.zeros((len(ids), 3), np.float32), lambda ids, cache: (np.zeros((len(ids), 3)), 0)
    )
    with pytest.raises(UsageError, match=r"has no last position, so nothing ends the request: give max_tokens$"):
        generate(subject, [0], stops=Stops())
    assert len(generate(subject, [0], stops=Stops(max_tokens=2), margins=False).returned) == 2
