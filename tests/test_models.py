"""The protocol of the shared memory, as models that Spin explores in full; each model says what it promises.

Every interleaving of two or three ranks is looked at. A model that cannot fail proves nothing, so each has
mutations, named at its head, and each of them must fail.
"""

import re
import shutil
import subprocess

import pytest

from helpers.build import ROOT

MODELS = ROOT / "tests" / "model"
HOLDS, FAILS = 0, 1
SEARCHES = [
    ("lines", [], HOLDS),
    ("lines", ["N=2", "CALLS=9"], HOLDS),
    ("lines", ["ONE_PLACE"], FAILS),
    ("lines", ["EARLY"], FAILS),
    ("lines", ["HASTY"], FAILS),
    ("pipeline", [], HOLDS),
    ("pipeline", ["ROOTED"], HOLDS),
    ("pipeline", ["COPY"], HOLDS),
    ("pipeline", ["COPY", "ROOTED"], HOLDS),
    ("pipeline", ["N=3", "PLACES=3", "CHUNKS=4"], HOLDS),
    ("pipeline", ["N=3", "PLACES=3", "CHUNKS=4", "ROOTED"], HOLDS),
    ("pipeline", ["N=3", "PLACES=3", "CHUNKS=4", "COPY"], HOLDS),
    ("pipeline", ["SHORT", "ROOTED"], FAILS),
    ("pipeline", ["SHORT", "COPY"], FAILS),
    ("pipeline", ["EARLY"], FAILS),
    ("pipeline", ["HASTY"], FAILS),
    ("pipeline", ["BLIND"], FAILS),
    ("pipeline", ["BLIND", "COPY"], FAILS),
    ("message", [], HOLDS),
    ("message", ["ONE_MAIL"], FAILS),
    ("message", ["ONE_ORDER"], FAILS),
    ("message", ["BUFFERED"], FAILS),
    ("message", ["FULL"], FAILS),
    ("departure", [], HOLDS),
    ("departure", ["TRUSTING"], FAILS),
    ("departure", ["RELAXED"], FAILS),
    ("suspension", [], HOLDS),
    ("suspension", ["N=2", "TURNS=4"], HOLDS),
    ("suspension", ["ONCE"], FAILS),
    ("suspension", ["IMPATIENT"], FAILS),
    ("suspension", ["UNTOLD"], FAILS),
    ("sleep", ["BOUND"], HOLDS),
    ("sleep", ["FENCE"], HOLDS),
    ("sleep", [], FAILS),
    ("sleep", ["FENCE", "BLIND"], FAILS),
]

needs_spin = pytest.mark.skipif(not shutil.which("spin"), reason="needs spin, Debian's package")


def search(model, defines, where):
    """Explore a model; return what Spin says of it."""
    options = [f"-D{define}" for define in defines]
    # Where the model's own directory is not written to: Spin leaves files where it runs.
    subprocess.run(
        ["spin", "-a", *options, MODELS / f"{model}.pml"], cwd=where, check=True, timeout=60
    )
    compiler = ["gcc", "-O2", "-w", "-DSAFETY", "-DMEMLIM=2000", "-o", "pan", "pan.c"]
    subprocess.run(compiler, cwd=where, check=True, timeout=120)
    done = subprocess.run(
        ["./pan", "-m100000"], cwd=where, capture_output=True, text=True, timeout=300
    )
    assert "max search depth too small" not in done.stdout, done.stdout
    assert "out of memory" not in done.stdout, done.stdout
    return done.stdout


@needs_spin
@pytest.mark.parametrize(
    ("model", "defines", "wanted"), SEARCHES, ids=["-".join([row[0], *row[1]]) for row in SEARCHES]
)
def test_protocol_holds_in_every_interleaving(model, defines, wanted, tmp_path):
    said = search(model, defines, tmp_path)
    assert re.search(rf"errors: {wanted}$", said, re.M), said


def test_every_model_holds_and_every_mutation_of_it_is_tried():
    for path in MODELS.glob("*.pml"):
        rows = [(defines, wanted) for model, defines, wanted in SEARCHES if model == path.stem]
        assert any(wanted == HOLDS for _, wanted in rows), path
        failing = {define for defines, wanted in rows for define in defines if wanted == FAILS}
        head = path.read_text().split("*/")[0]
        mutations = head[re.search("Mutation|Without", head).start() :]
        named = set(re.findall(r"\b[A-Z_]{4,}\b", mutations))
        assert named <= failing | {"DEPTH", "BOUND"}, (path, named - failing)
