"""What a reduction means: literal results for each op, and the scalar operators of premul_sum."""

from fractions import Fraction

import numpy as np
import pytest

import pynccl
from helpers import cases, data, oracle
from helpers.ranks import ThreadWorld
from pynccl import ReduceOp


def reduce_all(comm, columns, op, dtype):
    """all_reduce of one literal input per rank; the result as a list of Python numbers."""
    x = np.array(columns[comm.rank]).astype(oracle.np_dtype(dtype))
    out = data.Guarded(x.dtype, x.shape)
    comm.all_reduce(x, out=out.array, op=op)
    out.check_guards()
    return (out.array.astype(float) if x.dtype.kind not in "biuc" else out.array).tolist()


def agree(world, columns, op, dtype, wanted):
    got = world.run(reduce_all, columns, op, dtype)
    np.testing.assert_equal(got, [wanted] * world.nranks)


OP_FORMS = {
    "sum": [ReduceOp.SUM, "sum", "SUM", "Sum", np.add],
    "prod": [ReduceOp.PROD, "prod", "PROD", np.multiply],
    "max": [ReduceOp.MAX, "max", "MAX", np.maximum],
    "min": [ReduceOp.MIN, "min", "MIN", np.minimum],
    "avg": [ReduceOp.AVG, "avg", "AVG"],
}
SMALL = {"sum": [5, 7], "prod": [4, 10], "max": [4, 5], "min": [1, 2], "avg": [2.5, 3.5]}


@pytest.mark.parametrize("op", OP_FORMS)
def test_every_spelling_of_an_op_means_that_op(threads, op):
    for spelling in OP_FORMS[op]:
        agree(threads(2), [[1, 5], [4, 2]], spelling, "float32", SMALL[op])


class TorchStyle:
    """Named and placed as torch's own: `RedOpType` members carry a name."""

    def __init__(self, name):
        self.name = name


TorchStyle.__module__ = "torch._C._distributed_c10d"


@pytest.mark.parametrize("name", SMALL)
def test_op_of_torch_is_taken_by_its_name(threads, name):
    agree(threads(2), [[1, 5], [4, 2]], TorchStyle(name.upper()), "float32", SMALL[name])


def test_op_of_torch_that_nccl_lacks_is_refused_by_name(threads):
    def refused(comm):
        for op in ("BAND", "BOR", "BXOR", "UNUSED"):
            with pytest.raises(ValueError, match=f"(?i){op}"):
                comm.all_reduce(np.array([6, 3]), op=TorchStyle(op))

    threads(2).run(refused)


# --- integers ------------------------------------------------------------------------------------------

LITERAL_INTEGERS = [
    ("int8", "sum", [[120], [100]], [-36]),
    ("uint8", "sum", [[200], [100]], [44]),
    ("int8", "sum", [[127], [1]], [-128]),
    ("int32", "sum", [[2**31 - 1], [1]], [-(2**31)]),
    ("uint64", "sum", [[2**64 - 1], [2]], [1]),
    ("int64", "prod", [[2**62, -3], [2, 5]], [-(2**63), -15]),
    ("uint32", "prod", [[2**31], [2]], [0]),
    ("int8", "avg", [[100, -7, 7, -128], [100, 0, 0, -128]], [-28, -3, 3, 0]),
    ("int32", "avg", [[-3, 3, 2**31 - 1], [0, 0, 1]], [-1, 1, -(2**30)]),
    ("uint8", "avg", [[255, 1], [255, 2]], [127, 1]),
    ("uint64", "avg", [[2**63, 5], [2**63, 2]], [0, 3]),
    ("int8", "max", [[-1, 5], [-128, 4]], [-1, 5]),
    ("uint8", "max", [[255, 5], [1, 4]], [255, 5]),
    ("int64", "min", [[-(2**63), 5], [1, 4]], [-(2**63), 4]),
    ("uint64", "min", [[2**63, 5], [1, 4]], [1, 4]),
]


@pytest.mark.parametrize(("dtype", "op", "columns", "wanted"), LITERAL_INTEGERS)
def test_integers_wrap_and_average_toward_zero(threads, dtype, op, columns, wanted):
    columns = [np.array(column, dtype) for column in columns]
    agree(threads(2), columns, op, dtype, wanted)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_average_divides_by_the_number_of_ranks(threads, dtype):
    agree(threads(2), [[1] * 5, [3] * 5], "avg", dtype, [2] * 5)


def test_average_of_three_ranks_is_toward_zero(threads):
    agree(threads(3), [[1, -1, 7], [1, -1, 0], [0, 0, 1]], "avg", "int64", [0, 0, 2])


# --- floats --------------------------------------------------------------------------------------------

FLOATS = oracle.FLOATS
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("place", range(4))
def test_minimum_and_maximum_prefer_numbers_to_nan_wherever_it_is(threads, dtype, place):
    values = [1.0, 2.0, 3.0, 4.0]
    columns = [[value, NAN] for value in values]
    columns[place][0] = NAN
    left = [value for i, value in enumerate(values) if i != place]
    agree(threads(4), columns, "min", dtype, [min(left), NAN])
    agree(threads(4), columns, "max", dtype, [max(left), NAN])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["sum", "prod", "avg"])
def test_nan_of_any_rank_spoils_a_sum(threads, dtype, op):
    for place in range(2):
        columns = [[1.0], [1.0]]
        columns[place] = [NAN]
        agree(threads(2), columns, op, dtype, [NAN])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_infinities_follow_ieee(threads, dtype):
    agree(threads(2), [[INF, INF, 1], [-INF, 1, -INF]], "sum", dtype, [NAN, INF, -INF])
    agree(threads(2), [[INF, INF, 1], [-INF, 1, -INF]], "max", dtype, [INF, INF, 1])
    agree(threads(2), [[INF, INF, 1], [-INF, 1, -INF]], "min", dtype, [-INF, 1, -INF])


def test_half_precision_rounds_once_per_rank_in_rank_order(threads):
    # 2048 + 1 is a tie that goes to 2048, three times; from the other end 1 + 1 + 1 + 2048 is 2052.
    agree(threads(4), [[2048], [1], [1], [1]], "sum", "float16", [2048])
    agree(threads(4), [[1], [1], [1], [2048]], "sum", "float16", [2052])
    agree(threads(4), [[256], [1], [1], [1]], "sum", "bfloat16", [256])
    agree(threads(4), [[1], [1], [1], [256]], "sum", "bfloat16", [260])


def test_single_precision_is_not_summed_in_double(threads):
    agree(threads(3), [[1e8], [1], [1]], "sum", "float32", [1e8])
    agree(threads(3), [[1], [1e8], [-1e8]], "sum", "float32", [0])


def test_half_overflows_to_infinity_and_keeps_subnormals(threads):
    agree(threads(2), [[65504, 2**-24], [65504, 2**-24]], "sum", "float16", [INF, 2**-23])
    agree(threads(2), [[3e38, 2**-149], [3e38, 2**-149]], "sum", "float32", [INF, 2**-148])


def test_floating_average_scales_each_input_before_adding(threads):
    # Neither is 7: a third of 7 is rounded, and so is each sum.
    agree(threads(3), [[7.0]] * 3, "avg", "float16", [6.99609375])
    agree(
        threads(3),
        [[7.0]] * 3,
        "avg",
        "float32",
        [float(np.nextafter(np.float32(7), np.float32(8)))],
    )
    # Scaled first, the sum of two large numbers does not overflow.
    agree(threads(2), [[65504], [65504]], "avg", "float16", [65504])


@pytest.mark.parametrize(("dtype", "top"), [("float8_e4m3fn", 448), ("float8_e5m2", 57344)])
def test_8_bit_floats_saturate_and_are_no_bit_patterns(threads, dtype, top):
    agree(threads(2), [[1.0, top, -top], [1.0, top, -top]], "sum", dtype, [2.0, top, -top])
    agree(threads(2), [[2.0, top, -top], [3.0, top, top]], "prod", dtype, [6.0, top, -top])
    agree(threads(2), [[-1.0, 2.0], [1.0, 3.0]], "max", dtype, [1.0, 3.0])
    agree(threads(2), [[-1.0, 2.0], [1.0, 3.0]], "min", dtype, [-1.0, 2.0])
    agree(threads(2), [[-1.0, 2.0], [2.0, 3.0]], "avg", dtype, [0.5, 2.5])


def every_pair(comm, dtype, op):
    """All 65536 pairs of 8-bit patterns at once."""
    patterns = np.arange(256, dtype=np.uint8).view(oracle.np_dtype(dtype))
    parts = [np.repeat(patterns, 256), np.tile(patterns, 256)]
    got = comm.all_reduce(parts[comm.rank], op=op)
    oracle.assert_same(got, oracle.reduced(parts, op), (dtype, op))


@pytest.mark.parametrize("op", oracle.OPS)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_pair_of_8_bit_floats_combines_as_halves(threads, dtype, op):
    threads(2).run(every_pair, dtype, op)


def every_half(comm, dtype, op, other):
    patterns = np.arange(65536, dtype=np.uint16).view(oracle.np_dtype(dtype))
    parts = [patterns, np.full_like(patterns, other)]
    got = comm.all_reduce(parts[comm.rank], op=op)
    oracle.assert_same(got, oracle.reduced(parts, op), (dtype, op, other))


@pytest.mark.parametrize("op", oracle.OPS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_float_combines_with_one_rounding(threads, dtype, op):
    for other in (0.0, -1.0, 1.0078125, 3e-5, 60000.0, 6e-8, INF, NAN):
        threads(2).run(every_half, dtype, op, other)


# --- bool and complex ----------------------------------------------------------------------------------

ALL_PAIRS = [[False, False, True, True], [False, True, False, True]]


@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        ("sum", [False, True, True, True]),
        ("max", [False, True, True, True]),
        ("prod", [False, False, False, True]),
        ("min", [False, False, False, True]),
    ],
)
def test_booleans_combine_as_or_and_and(threads, op, wanted):
    agree(threads(2), ALL_PAIRS, op, "bool", wanted)


def valid_booleans(comm):
    out = np.zeros(3, bool)
    comm.all_reduce(np.array([True, False, True]), out=out)
    assert out.view(np.uint8).tolist() == [1, 0, 1]


def test_sum_of_many_true_is_one_and_not_their_number(threads):
    threads(4).run(valid_booleans)


def test_complex_numbers_sum_and_average(threads):
    for dtype in oracle.COMPLEX:
        agree(threads(2), [[1 + 2j], [3 + 4j]], "sum", dtype, [4 + 6j])
        agree(threads(2), [[1 + 2j], [3 + 4j]], "avg", dtype, [2 + 3j])


# --- one rank ------------------------------------------------------------------------------------------


def one_rank(comm, dtype):
    for size in [*range(1, 41), 1023, 1025]:
        x = data.values(dtype, size, 0)
        for op in oracle.ops_for(dtype):
            out = data.Guarded(x.dtype, (size,))
            comm.all_reduce(x, out=out.array, op=op)
            out.check_holds(x, (dtype, op, size))
            out = data.Guarded(x.dtype, (size,))
            comm.reduce_scatter(x, out=out.array, op=op)
            out.check_holds(x, (dtype, op, size))


@pytest.mark.parametrize("dtype", [*oracle.NCCL_DTYPES, "bool", "complex64"])
def test_reduction_of_one_rank_is_its_input_to_the_last_element(threads, dtype):
    threads(1).run(one_rank, dtype)


def one_rank_scaled(comm):
    op = comm.premul_sum(3, "int32")
    assert comm.all_reduce(np.arange(5, dtype=np.int32), op=op).tolist() == [0, 3, 6, 9, 12]


def test_premul_sum_of_one_rank_still_multiplies(threads):
    threads(1).run(one_rank_scaled)


# --- premul_sum ----------------------------------------------------------------------------------------

SCALARS = {
    "int8": [3, -2, 127],
    "uint8": [3, 200, 255],
    "int32": [-7, 2**31 - 1],
    "uint32": [5, 2**32 - 1],
    "int64": [-(2**63), 2**53 + 1],
    "uint64": [2**64 - 1, 2**53 + 1],
    "float16": [0.1, -2.0, 6e-8, 65504.0],
    "float32": [0.1, 1 / 3, 1e-40],
    "float64": [0.1, 1 / 3, 5e-324],
    "bfloat16": [0.1, 1 / 3, -2.0],
    "float8_e4m3fn": [0.5, 1.1, -3.0],
    "float8_e5m2": [0.5, 1.1, -3.0],
}


def scaled(comm, dtype, scalars, wrap):
    np_dtype = oracle.np_dtype(dtype)
    mine = scalars[comm.rank % len(scalars)]
    op = comm.premul_sum(wrap(mine), dtype)
    for size in (1, 7, 3000):
        parts = [data.values(dtype, size, r) for r in range(comm.nranks)]
        factors = [
            np.array([scalars[r % len(scalars)]]).astype(np_dtype)[0] for r in range(comm.nranks)
        ]
        wanted = oracle.reduced(parts, "premul_sum", factors)
        for name in ("all_reduce", "reduce", "reduce_scatter"):
            if name == "reduce_scatter":
                whole = [
                    np.concatenate([data.values(dtype, size, r)] * comm.nranks)
                    for r in range(comm.nranks)
                ]
                got = comm.reduce_scatter(whole[comm.rank], out=np.empty_like(parts[0]), op=op)
            else:
                got = getattr(comm, name)(parts[comm.rank], op=op)
            if got is not None:
                oracle.assert_same(got, wanted, (name, dtype, scalars, size))


@pytest.mark.parametrize("dtype", SCALARS)
def test_premul_sum_multiplies_each_input_by_its_own_ranks_scalar(threads, dtype):
    for scalar in SCALARS[dtype]:
        threads(2).run(scaled, dtype, [scalar], _as_is)
    threads(3).run(scaled, dtype, SCALARS[dtype], _as_is)


def _as_is(scalar):
    return scalar


WRAPPINGS = {
    "numpy scalar": lambda dtype, v: oracle.np_dtype(dtype).type(v),
    "0-d array": lambda dtype, v: np.array(v, oracle.np_dtype(dtype)),
    "int or fraction": lambda dtype, v: v if isinstance(v, int) else Fraction(v),
}


@pytest.mark.parametrize("dtype", ["int32", "float32", "bfloat16", "float8_e5m2"])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_scalar_may_be_any_number(threads, wrapping, dtype):
    wrap = WRAPPINGS[wrapping]
    value = 3 if dtype == "int32" else 0.5

    def run(comm):
        scaled(comm, dtype, [value], lambda v: wrap(dtype, v))

    threads(2).run(run)


@pytest.mark.parametrize(
    ("scalar", "dtype", "wanted"),
    [
        (0.1, "float32", "3dcccccd"),
        (0.1, "float64", "3fb999999999999a"),
        (0.1, "float16", "2e66"),
        (0.1, "bfloat16", "3dcd"),
        (1 + 2**-8 + 2**-30, "bfloat16", "3f81"),  # rounded once: through float it would be a tie
        (1 + 2**-11 + 2**-40, "float16", "3c01"),
        (2.0**-24 * 1.5, "float16", "0002"),
        (2.0**-150 * 1.5, "float32", "00000001"),
        (1.1, "float8_e4m3fn", "39"),
        (1.1, "float8_e5m2", "3c"),
        (-0.0, "float32", "80000000"),
        (float("inf"), "bfloat16", "7f80"),
        (255, "uint8", "ff"),
    ],
)
def test_scalar_is_rounded_once_to_the_dtype(threads, scalar, dtype, wanted):
    threads(1).run(product_with_one, scalar, dtype, wanted)


def product_with_one(comm, scalar, dtype, wanted):
    one = np.ones(1).astype(oracle.np_dtype(dtype))
    got = comm.all_reduce(one, op=comm.premul_sum(scalar, dtype))
    assert got.tobytes()[::-1].hex() == wanted


@pytest.mark.parametrize(
    ("scalar", "dtype", "error"),
    [
        (0.5, "int32", (TypeError, ValueError)),
        (256, "uint8", (OverflowError, ValueError)),
        (-1, "uint64", (OverflowError, ValueError)),
        (2**63, "int64", (OverflowError, ValueError)),
        ("2", "float32", TypeError),
        (True, "int8", TypeError),
        (1e39, "float32", OverflowError),
        (500.0, "float8_e4m3fn", OverflowError),
        (float("inf"), "float8_e4m3fn", OverflowError),
        (None, "float32", TypeError),
        (1 + 2j, "float32", TypeError),
        (np.complex64(1 + 2j), "float32", TypeError),
        (np.array(1 + 2j), "float32", TypeError),
        (np.bool_(True), "int8", TypeError),
        (np.ones(1), "float32", TypeError),
        (2.0, "bool", (TypeError, ValueError)),
        (2.0, "complex64", (TypeError, ValueError)),
        (2.0, "int16", (TypeError, ValueError)),
        (2.0, "nonsense", (TypeError, ValueError)),
        (np.arange(2.0), "float32", (TypeError, ValueError)),
    ],
)
def test_scalar_that_the_dtype_cannot_hold_is_refused(threads, scalar, dtype, error):
    def refused(comm):
        with pytest.raises(error, match="premul_sum|dtype"):
            comm.premul_sum(scalar, dtype)

    threads(1).run(refused)


def other_dtype(comm):
    op = comm.premul_sum(2.0, "float32")
    with pytest.raises(TypeError, match="float32.*float64"):
        comm.all_reduce(np.arange(3.0), op=op)
    assert comm.all_reduce(np.ones(2, np.float32), op=op).tolist() == [2.0 * comm.nranks] * 2


def test_premul_sum_serves_only_its_dtype(threads):
    threads(2).run(other_dtype)


def other_communicator(comm):
    op = comm.premul_sum(2.0, "float64")
    other = comm.split(0, key=comm.rank)
    with pytest.raises(ValueError, match="another communicator"):
        other.all_reduce(np.arange(3.0), op=op)
    cases.sum_of_ranks(other)
    other.close()


def test_premul_sum_serves_only_its_communicator(threads):
    threads(2).run(other_communicator)


def after_close(comm):
    inner = comm.split(0, key=comm.rank)
    op = inner.premul_sum(2.0, "float64")
    assert "2.0" in repr(op) and "float64" in repr(op)
    inner.close()
    assert "destroyed" in repr(op)
    with pytest.raises(ValueError, match="destroyed"):
        comm.all_reduce(np.arange(3.0), op=op)


def test_premul_sum_is_destroyed_with_its_communicator(threads):
    threads(2).run(after_close)


def many_ops(comm):
    for i in range(2000):
        op = comm.premul_sum(i, "int64")
        if i % 100 == 0:
            assert comm.all_reduce(np.array([1]), op=op).tolist() == [i * comm.nranks]


def test_thousands_of_operators_may_come_and_go(threads):
    threads(2).run(many_ops)


def grouped_ops(comm):
    out, other = np.zeros(2, int), np.zeros(2, int)
    with pynccl.group() as plan:
        comm.all_reduce(np.array([1, 2]), out=out, op=comm.premul_sum(3, "int64"))
        comm.all_reduce(np.array([1, 2]), out=other, op=comm.premul_sum(5, "int64"))
    for _ in range(2):  # the plan holds its operators
        assert out.tolist() == [3 * comm.nranks, 6 * comm.nranks]
        assert other.tolist() == [5 * comm.nranks, 10 * comm.nranks]
        out[:] = other[:] = 0
        plan()


def test_plan_holds_its_operators(threads):
    threads(2).run(grouped_ops)


def use_closed(comm):
    comm.close()
    with pytest.raises(pynccl.CommunicatorClosedError):
        comm.premul_sum(2.0, "float32")


def test_closed_communicator_makes_no_operator():
    with ThreadWorld(1) as world:
        world.run(use_closed)
