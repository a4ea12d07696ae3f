"""A rank is killed, stopped, leaves or aborts: the others get an error, in time, and go on without it.

The sweep strikes a program at every step in every way; `helpers.faults` says what a survivor must do and
checks most of it where it happens. The rest of the file are the cases that need a program of their own.
"""

import os
import re

import pytest

from helpers import faults
from helpers.mishaps import Scene, together
from helpers.nursery import Nursery

pytestmark = pytest.mark.fault

SEED = 20
POINTS = faults.sweep(SEED)
# Seconds within which a fault must be noticed. The library promises one; a busy machine needs patience.
NOTICE = 12.0


@pytest.fixture(scope="module")
def nursery():
    """A server for the rank processes; nothing may be left of it and of what it ran."""
    before = faults.belongings()["descriptors"], shared_memory()
    server = Nursery()
    server.ask(faults.prepare)
    at_first = server.ask(faults.belongings)
    yield server
    at_last = server.ask(faults.belongings)
    status = server.close()
    assert at_last == at_first
    assert status == 0
    assert (faults.belongings()["descriptors"], shared_memory()) == before


def shared_memory():
    return sorted(name for name in os.listdir("/dev/shm") if "nccl" in name.lower())


# --- the sweep -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def aftermath(nursery):
    """``aftermath(point)``: what became of a point of the sweep, which is played as a whole."""
    results = {}
    running = nursery.run(faults.strike, POINTS)

    def get(point):
        while point.number not in results:
            index, value = next(running)
            results[index] = value
        return results[point.number]

    yield get
    for _ in running:  # when not all tests ran
        pass


def test_sweep_covers_every_step_and_kind():
    assert len(POINTS) >= 100
    assert {p.step for p in POINTS} == {"create", "stream", *faults.STEPS}
    assert {p.moment for p in POINTS} == {"before", "waiting", "midway"}
    assert {(p.nprocs, p.nlocal) for p in POINTS} == {(2, 1), (3, 1), (4, 1), (2, 2)}
    for step in faults.STEPS:
        assert {p.kind for p in POINTS if p.step == step} == set(faults.KINDS)


def expected_errors(point):
    if point.step == "create":
        # Who came before it happened learns it from the connection; who comes later can only wait.
        return {"NCCLTimeoutError"} | ({"RemoteError"} if point.moment != "before" else set())
    return {"NCCLTimeoutError"} if point.kind == "stop" else {"RemoteError"}


def names_a_lost_rank(text, point, pids):
    lists = re.findall(r"ranks?((?:,? \d+)+)", text)
    numbers = {int(n) for each in lists for n in re.findall(r"\d+", each)}
    lost = pids[point.victim // point.nlocal]
    return bool(numbers & set(point.hit)) or f"pid {lost}" in text


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_fault_becomes_an_error_on_every_survivor(point, aftermath):
    result = aftermath(point)
    if isinstance(result, Exception):
        raise result
    problems = list(result.wrong)
    patience = point.timeout if "NCCLTimeoutError" in expected_errors(point) else 0.0
    for rank, report in enumerate(result.reports):
        if report is None:
            if rank not in point.hit:
                problems.append(f"rank {rank} is lost, which was not hit")
            continue
        problems += [f"rank {rank}: {text}" for text in report.wrong]
        if rank == point.victim:
            continue
        seen = f"rank {rank} at {report.failed_at}: {report.error}: {report.text}"
        if report.error not in expected_errors(point):
            problems.append(f"{seen}; expected {expected_errors(point)}")
        if not names_a_lost_rank(report.text, point, result.pids):
            problems.append(f"{seen}; it does not name rank {point.victim}")
        if report.at - result.fault_at > patience + NOTICE:
            problems.append(f"{seen}; after {report.at - result.fault_at:.1f} s")
    assert not problems, "\n".join([f"{point}:", *problems])


# --- peers that are gone -------------------------------------------------------------------------------

STATUS = {"kill": -9, "exit": 3, "quit": 3, "close": 0, "abort": 0}


@pytest.mark.parametrize("how", STATUS)
@pytest.mark.parametrize("end", ["close", "abort", "collect"])
def test_communicator_whose_peer_is_gone_ends_at_once(nursery, how, end):
    scene = Scene("left_alone", 2, (how, end), (0, STATUS[how]))
    assert nursery.one(together, scene)[0].seconds < 1.0


@pytest.mark.parametrize("how", STATUS)
def test_what_a_rank_has_sent_arrives_after_it_is_gone(nursery, how):
    scene = Scene("needs_nothing_more", 2, (how,), (0, STATUS[how]))
    found = nursery.one(together, scene)[0]
    assert found.error == "RemoteError"
    assert "rank 1" in found.text


def test_four_ranks_become_three_two_and_one(nursery):
    scene = Scene("one_after_the_other", 4, (), (0, -9, -9, -9))
    found = nursery.one(together, scene)[0]
    assert [each.error for each in found] == ["RemoteError"] * 3
    for each, rank in zip(found, (3, 2, 1), strict=True):
        assert f"rank {rank}" in each.text


@pytest.mark.parametrize("how", ["kill", "exit", "quit"])
def test_ranks_of_one_thread_notice_together(nursery, how):
    scene = Scene("grouped_ranks", 2, (how,), (0, STATUS[how]))
    in_group, first, second = nursery.one(together, scene)[0]
    assert in_group.error == first.error == second.error == "RemoteError"
    assert re.search("rank [23]", in_group.text)


# --- calls that nobody answers -------------------------------------------------------------------------

UNANSWERED = [
    ("recv", ""),
    ("send", ""),
    ("large send", ""),
    ("recv in a group", ""),
    ("send in a group", ""),
    ("all_reduce and recv in a group", ""),
    ("all_reduce", ""),
    ("barrier", ""),
    ("split", ""),
    ("recv in a group", "all_reduce"),
    ("recv", "recv"),
    ("send", "all_reduce"),
]


@pytest.mark.parametrize(("call", "other"), UNANSWERED)
def test_call_that_is_not_answered_times_out_and_says_what_it_was(nursery, call, other):
    for rank, found in enumerate(nursery.one(together, Scene("unanswered", 2, (call, other)))):
        if rank and not other:
            assert [each.error for each in found] == [""]
            continue
        first, second = found
        assert first.error == second.error == "NCCLTimeoutError", (rank, found)
        assert 0.4 < first.seconds < 4.0, first
        assert second.seconds < 1.0
        assert f"rank {1 - rank}" in first.text, first
        words = {"recv": "recv", "send": "send", "all_reduce": "allreduce", "barrier": "reduce"}
        made = other if rank else call
        wanted = [word for key, word in words.items() if key in made] or ["split"]
        assert any(word in first.text.lower() for word in wanted), first
