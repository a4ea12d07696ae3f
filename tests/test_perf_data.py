"""The verification of ``pynccl perf``: one right answer, and no wrong one that passes.

The checker is shown wrong results of every kind, alone and as part of a rank whose communicator lies.
"""

import ml_dtypes
import numpy as np
import pytest

from pynccl.cli._perf_cases import COLLECTIVES, DTYPES, OPS, REDUCED, Segment, lay_out
from pynccl.cli._perf_data import PERIOD, bits_of, dtype_of, make_data
from pynccl.cli._perf_rank import Rank

NRANKS = (1, 2, 3, 4, 5, 8, 13)


def test_ml_dtypes_are_what_they_are_called():
    for name in DTYPES:
        assert dtype_of(name).name == name
        assert dtype_of(name).itemsize == DTYPES[name].itemsize
    assert dtype_of("bfloat16") == np.dtype(ml_dtypes.bfloat16)


# ---- the data -----------------------------------------------------------------------------------


def rounded(values, dtype):
    with np.errstate(all="ignore"):
        return values.astype(dtype).astype(np.float64)


def combine(op, a, b):
    return {"prod": np.multiply, "max": np.maximum, "min": np.minimum}.get(op, np.add)(a, b)


@pytest.mark.parametrize("nranks", NRANKS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", [name for name, dtype in DTYPES.items() if dtype.exact])
def test_floats_have_one_right_answer_in_any_order(name, op, nranks):
    """Combined one by one, each time rounded to the type: forwards, backwards and in pairs."""
    dtype = dtype_of(name)
    data = make_data(name, op, nranks)
    parts = data.inputs.view(dtype).astype(np.float64)
    if op == "avg":
        part = np.float64(1 / nranks) if name == "float64" else np.float32(1 / nranks)
        parts = rounded(parts * rounded(np.array(part), dtype), dtype)
    if op == "premul":
        parts = rounded(parts * np.array(data.factors)[:, None], dtype)
    assert np.isfinite(parts).all()
    for order in (parts, parts[::-1]):
        total = order[0]
        for part in order[1:]:
            total = rounded(combine(op, total, part), dtype)
        assert np.array_equal(total.astype(dtype).view(bits_of(dtype)), data.reduced)
    pairs = list(parts)
    while len(pairs) > 1:
        pairs = [
            rounded(combine(op, *pairs[i : i + 2]), dtype) if i + 1 < len(pairs) else pairs[i]
            for i in range(0, len(pairs), 2)
        ]
    assert np.array_equal(pairs[0].astype(dtype).view(bits_of(dtype)), data.reduced)


@pytest.mark.parametrize("nranks", NRANKS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", [name for name, dtype in DTYPES.items() if not dtype.exact])
def test_integers_are_reduced_as_python_would(name, op, nranks):
    dtype = np.dtype(name)
    data = make_data(name, op, nranks)
    inputs = data.inputs.view(dtype)
    bits = 8 * dtype.itemsize

    def wrap(value):
        value &= (1 << bits) - 1
        return value - (1 << bits) if dtype.kind == "i" and value >> (bits - 1) else value

    for position in (0, 1, 77, PERIOD - 1):
        values = [int(value) for value in inputs[:, position]]
        if op == "prod":
            result = 1
            for value in values:
                result = wrap(result * value)
        elif op in ("max", "min"):
            result = max(values) if op == "max" else min(values)
        elif op == "premul":
            result = wrap(sum(v * f for v, f in zip(values, data.factors, strict=True)))
        else:
            result = wrap(sum(values))
            if op == "avg":
                result = abs(result) // nranks * (-1 if result < 0 else 1)
        assert int(data.reduced.view(dtype)[position]) == result


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("op", [*OPS, "none"])
def test_data_depends_on_rank_and_position(name, op):
    data = make_data(name, op, 4)
    for period in (*data.inputs, data.reduced):
        for shift in (1, 2, 64, 4096):
            assert np.count_nonzero(period != np.roll(period, shift)) > PERIOD // 5
    for rank in range(3):
        assert np.count_nonzero(data.inputs[rank] != data.inputs[rank + 1]) > PERIOD // 5
    if op != "none":
        for rank in range(4):  # a result that is any rank's input, unreduced, does not pass
            assert np.count_nonzero(data.inputs[rank] != data.reduced) > PERIOD // 20


def test_no_shift_by_blocks_goes_unseen():
    assert all(PERIOD % factor for factor in range(2, int(PERIOD**0.5) + 1))


SIZES = (1, 7, PERIOD - 1, PERIOD, PERIOD + 1, 3 * PERIOD + 5, 40 * PERIOD + 3)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["float32", "int8", "float8_e5m2", "int64"])
def test_the_checker_counts_every_wrong_element(name, size):
    data = make_data(name, "sum", 3)
    buffer = np.empty(size, bits_of(dtype_of(name)))
    segments = [Segment(REDUCED, 5, size)]
    data.write(buffer, segments)
    assert data.wrong(buffer, segments) == 0
    for position in {0, size // 2, size - 1}:
        element = buffer[position : position + 1]  # an array: NumPy 1 knows no uint64 scalar ^ int
        element ^= 1
        assert data.wrong(buffer, segments) == 1
        element ^= 1
    rng = np.random.default_rng(1)
    some = rng.choice(size, max(1, size // 3), replace=False)
    buffer[some] ^= 0x80
    assert data.wrong(buffer, segments) == len(some)
    data.write(buffer, segments, poison=True)
    assert data.wrong(buffer, segments) == size


@pytest.mark.parametrize(
    "mistake",
    [
        "shifted",
        "of another rank",
        "unreduced",
        "blocks swapped",
        "tail missing",
        "zeros",
        "off by a chunk",
    ],
)
def test_the_checker_sees_typical_mistakes(mistake):
    size = 5 * PERIOD + 17
    data = make_data("float32", "sum", 3)
    right = np.empty(3 * size, np.uint32)
    segments = [Segment(rank, 0, size) for rank in range(3)]
    data.write(right, segments)
    wrong = right.copy()
    if mistake == "shifted":
        wrong[: size - 1] = right[1:size]
    elif mistake == "of another rank":
        wrong[:size] = right[size : 2 * size]
    elif mistake == "unreduced":
        segments = [Segment(REDUCED, 0, size)]
        wrong = wrong[:size]
    elif mistake == "blocks swapped":
        wrong[:size], wrong[size : 2 * size] = right[size : 2 * size], right[:size]
    elif mistake == "tail missing":
        wrong[-16:] = 0
    elif mistake == "zeros":
        wrong[:] = 0
    elif mistake == "off by a chunk":
        wrong[: 1 << 14] = right[1 << 14 : 2 << 14]
    assert data.wrong(wrong, segments) > 0


# ---- one rank, with a communicator that does what a test wants ------------------------------------


class Fake:
    """A communicator that computes with NumPy what rank `rank` gets when all ranks hold their data."""

    def __init__(self, rank, nranks, spoil=None):
        self.rank = rank
        self.nranks = nranks
        self.spoil = spoil
        self.case = None  # (row, block, root, data), set by the test

    def barrier(self):
        pass

    def premul_sum(self, factor, dtype):
        return "premul"

    def __getattr__(self, name):
        if name not in COLLECTIVES:
            raise AttributeError(name)

        def call(x, *args, out=None):
            row, block, root, data = self.case
            assert row.name == name
            if name == "send_recv":
                assert (args[0], args[2]) == (
                    (self.rank + 1) % self.nranks,
                    (self.rank - 1) % self.nranks,
                )
                out = args[1]
            elif name != "broadcast":
                out = args[0]
            if row.root:
                assert args[-1] == root
            self.deliver(x, out, row, block, root, data)

        return call

    def deliver(self, x, out, row, block, root, data):
        rank, nranks = self.rank, self.nranks

        def sent(source):
            """Return what a rank has sent, by the definition of the data: position by position."""
            size = block * nranks if row.send_blocks else block
            return np.resize(data.inputs[source], size)

        if out is not None:
            result = out.view(bits_of(out.dtype))
            mine = slice(rank * block, (rank + 1) * block)
            if row.name in ("all_reduce", "reduce"):
                result[:] = np.resize(data.reduced, block)
            elif row.name == "reduce_scatter":
                result[:] = np.resize(data.reduced, nranks * block)[mine]
            elif row.name == "broadcast":
                result[:] = sent(root)
            elif row.name in ("all_gather", "gather"):
                result[:] = np.concatenate([sent(source) for source in range(nranks)])
            elif row.name == "scatter":
                result[:] = sent(root)[mine]
            elif row.name == "all_to_all":
                result[:] = np.concatenate([sent(source)[mine] for source in range(nranks)])
            elif row.name == "send_recv":
                result[:] = sent((rank - 1) % nranks)
        if self.spoil is not None:
            self.spoil(x, out)


def measure(fake, row, op, root, block, in_place, name="float32"):
    """Have `perf`'s rank make one verified call; return how many elements it found wrong."""
    rank = Rank(fake)
    fake.case = (row, block, root, make_data(name, op, fake.nranks))
    rank.set_up(row.name, "numpy", name, op, root, block, in_place)
    return rank.check()[0]


def forms():
    cases = []
    for row in COLLECTIVES.values():
        for in_place in (False, True)[: 1 + row.in_place]:
            cases.append(
                pytest.param(row, in_place, id=f"{row.name}-{'in' if in_place else 'out'}")
            )
    return cases


@pytest.mark.parametrize(("row", "in_place"), forms())
@pytest.mark.parametrize("name", ["float32", "uint8", "bfloat16"])
def test_right_results_pass(row, in_place, name):
    for nranks in (1, 3, 4):
        for rank in range(nranks):
            for root in range(nranks if row.root else 1):
                for block in (1, 1000, 2 * PERIOD + 1):
                    op = "avg" if row.op else "none"
                    fake = Fake(rank, nranks)
                    assert measure(fake, row, op, root, block, in_place, name) == 0


@pytest.mark.parametrize(("row", "in_place"), forms())
def test_a_call_that_does_nothing_is_found_out(row, in_place):
    """Every element that should have been written counts, if none of it was there before."""
    fake = Fake(1, 3)
    fake.deliver = lambda *args: None
    op = "sum" if row.op else "none"
    wrong = measure(fake, row, op, 1, 500, in_place)
    received = sum(s.size for s in lay_out(row, 1, 3, 500, 1, False).areas[-1].after)
    if in_place and row.name in ("scatter", "broadcast"):
        assert wrong == 0  # this is the root, which has its data already
    elif in_place:
        assert wrong > received // 4
    else:
        assert wrong == received


@pytest.mark.parametrize(("row", "in_place"), forms())
def test_one_wrong_element_is_found_out(row, in_place):
    def spoil(x, out):
        if out is not None:
            out.view(np.uint32)[-1] ^= 1

    fake = Fake(1, 3, spoil)
    assert measure(fake, row, "max" if row.op else "none", 1, 500, in_place) == 1


@pytest.mark.parametrize("row", list(COLLECTIVES.values()), ids=list(COLLECTIVES))
def test_a_changed_input_is_found_out(row):
    def spoil(x, out):
        if x is not None:
            x.view(np.uint32)[0] ^= 1

    fake = Fake(1, 3, spoil)
    assert measure(fake, row, "sum" if row.op else "none", 1, 500, in_place=False) == 1


@pytest.mark.parametrize(("row", "in_place"), forms())
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_write_past_the_end_is_found_out(row, in_place, side):
    def spoil(x, out):
        array = x if out is None else out
        base = array.base
        offset = (array.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // 4
        if side == "before":
            offset -= 1
        else:
            offset += array.size
        base.view(np.uint32)[offset] ^= 0xFF

    fake = Fake(1, 3, spoil)
    assert measure(fake, row, "sum" if row.op else "none", 1, 500, in_place) == 1


def test_the_last_of_many_calls_is_verified():
    """An error that shows only when calls follow each other without a pause."""
    calls = []

    def spoil(x, out):
        calls.append(1)
        if len(calls) == 8:  # the warm-up is long over
            out.view(np.uint32)[3] ^= 1

    fake = Fake(0, 2, spoil)
    rank = Rank(fake)
    row = COLLECTIVES["all_reduce"]
    fake.case = (row, 100, 0, make_data("float32", "sum", 2))
    case = {
        "collective": "all_reduce",
        "arrays": "numpy",
        "dtype": "float32",
        "op": "sum",
        "root": 0,
    }
    answer = rank.obey({"case": case | {"block": 100, "in_place": False}, "checks": 1})
    assert answer["wrong"] == 0
    answer = rank.obey({"warmup": 2, "calls": 5, "batches": 1, "check": True})
    assert answer["wrong"] == 1
    assert len(answer["seconds"]) == 1


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("all_reduce", 1.5),
        ("reduce", 1),
        ("broadcast", 1),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("gather", 0.75),
        ("scatter", 0.75),
        ("send_recv", 1),
    ],
)
def test_factors_are_those_of_nccl_tests(name, factor):
    assert COLLECTIVES[name].factor(4) == factor
