"""Calls that do not match, on ranks in processes and in mixtures of processes and threads.

For every collective, every part of its fingerprint and every rank that is the one to deviate: all ranks
raise, no receive buffer is written, and the text names both calls.
"""

import pytest

from helpers import faults, oracle
from helpers.mishaps import Call, Scene, together
from helpers.nursery import Nursery
from helpers.ranks import new_id

pytestmark = pytest.mark.fault

FORMS = {"2 processes": (2, 1), "3 processes": (3, 1), "2 processes × 2 threads": (2, 2)}
NAMES = list(oracle.COLLECTIVES)


def deviations(name):
    """Field: (the usual call, the deviating one, words that the error must hold)."""
    spec = oracle.COLLECTIVES[name]
    found = {
        "count": (Call(name), Call(name, size=6), ["count=4", "count=6"]),
        "large count": (
            Call(name, size=70_000),
            Call(name, size=70_001),
            ["count=70000", "count=70001"],
        ),
        "count across paths": (Call(name, size=3), Call(name, size=70_000), ["count=70000"]),
        "dtype": (Call(name), Call(name, dtype="int32"), ["float32", "int32"]),
        "width": (Call(name), Call(name, dtype="float64"), ["float32", "float64"]),
        "kind": (Call(name), Call(NAMES[NAMES.index(name) - 1]), []),
    }
    if spec.op:
        found |= {
            "op": (Call(name), Call(name, op="max"), ["sum", "max"]),
            "average": (Call(name), Call(name, op="avg"), ["sum", "avg"]),
            "scaled": (Call(name), Call(name, op="premul"), ["sum", "premul"]),
        }
    if spec.root:
        found["root"] = (Call(name), Call(name, root=1), ["root=0", "root=1"])
    return found


CASES = [(name, field) for name in NAMES for field in deviations(name)]


@pytest.fixture(scope="module")
def nursery():
    """A server for the rank processes."""
    server = Nursery()
    server.ask(faults.prepare)
    yield server
    assert server.close() == 0


def function_name(name):
    return {"all_to_all": "alltoall"}.get(name, name.replace("_", ""))


@pytest.mark.parametrize(("name", "field"), CASES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_deviation_is_an_error_on_every_rank(nursery, form, name, field):
    nprocs, nlocal = form
    nranks = nprocs * nlocal
    usual, other, words = deviations(name)[field]
    words = [*words, function_name(usual.name), function_name(other.name)]
    rounds = [[other if rank == odd else usual for rank in range(nranks)] for odd in range(nranks)]
    uids = tuple(bytes(new_id()) for _ in rounds)
    by_process = nursery.one(together, Scene("mismatches", nprocs, (nlocal, rounds), (), uids))
    for odd in range(nranks):
        for rank, found in enumerate([rank for process in by_process for rank in process]):
            first, after = found[odd]
            assert first.error == after.error == "InvalidUsageError", (odd, rank, first, after)
            assert first.seconds + after.seconds < 3.0
            for word in words:
                assert word in first.text.lower(), (odd, rank, first)
            assert f"rank {odd} called" in first.text, (odd, rank, first)
