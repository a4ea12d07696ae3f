"""Creations that cannot come about, by processes: an error in time on each of them, and no trace."""

import os

import pytest

from helpers import faults
from helpers.mishaps import Scene, together
from helpers.nursery import Nursery
from helpers.ranks import new_id

pytestmark = pytest.mark.fault


@pytest.fixture(scope="module")
def nursery():
    """A server for the rank processes."""
    server = Nursery()
    server.ask(faults.prepare)
    yield server
    assert server.close() == 0


def play(nursery, ranks, timeout, delays=()):
    """Every process creates with its (nranks, rank); returns the errors."""
    return nursery.one(together, Scene("creation", len(ranks), (ranks, timeout, list(delays))))


@pytest.mark.parametrize("ranks", [[(2, 0)], [(2, 1)], [(3, 0), (3, 2)], [(4, 1), (4, 2), (4, 3)]])
def test_missing_rank_times_out_and_is_named(nursery, ranks):
    nranks = ranks[0][0]
    missing = set(range(nranks)) - {rank for _, rank in ranks}
    for found in play(nursery, ranks, 1.0):
        assert found.error == "NCCLTimeoutError"
        assert 0.3 < found.seconds < 4.0  # the first rank's time counts, and others may come late
        for rank in missing:
            assert str(rank) in found.text.split("missing")[1]


@pytest.mark.parametrize("delays", [(0, 0.2), (0.2, 0)])
def test_disagreement_about_the_number_of_ranks(nursery, delays):
    for found in play(nursery, [(2, 0), (3, 1)], 20.0, delays):
        assert found.error == "InvalidUsageError"
        assert found.seconds < 3.0
        assert "nranks=2" in found.text
        assert "nranks=3" in found.text


@pytest.mark.parametrize("delays", [(0, 0.2, 0.4), (0.4, 0.2, 0), (0.2, 0, 0.1)])
def test_rank_that_comes_twice(nursery, delays):
    seen = play(nursery, [(3, 0), (3, 1), (3, 1)], 20.0, delays)
    for found in seen:
        assert found.error == "InvalidUsageError", seen
        assert found.seconds < 3.0
        assert "rank 1" in found.text
        assert "twice" in found.text


@pytest.mark.parametrize("keep", [True, False])
def test_id_serves_once(nursery, keep):
    for (found,) in nursery.one(together, Scene("creation_twice", 2, (keep,))):
        assert found.error == "InvalidUsageError"
        assert "already been used" in found.text
        assert found.seconds < 2.0


def test_stranger_with_the_id_of_others_is_refused(nursery):
    found = nursery.one(together, Scene("stranger_after", 3))[2]
    assert found.error == "InvalidUsageError"
    assert "already been used" in found.text
    assert found.seconds < 2.0


def test_id_may_hold_any_bytes(nursery):
    uid = bytes(new_id())
    some = os.urandom(10)
    heads = [
        b"\xff" * 16,
        b"\x00\xff" * 8,
        b"\x00" * 6 + some,
        b"\xff" * 6 + some,
        some + b"\x00" * 6,
    ]
    uids = tuple(head + uid[16:] for head in heads)
    nursery.one(together, Scene("several_with_any_id", 2, (), (), uids))


def test_id_of_nobody_times_out(nursery):
    uid = bytes(new_id())
    uids = tuple(os.urandom(16) + uid[16:] for _ in range(2))
    (found,) = nursery.one(together, Scene("creation", 1, ([(2, 1)], 0.6, []), (), uids))
    assert found.error == "NCCLTimeoutError"
    assert found.seconds < 3.0
