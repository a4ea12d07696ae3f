"""The list API: every collective on lists of every kind of array, as torch.cuda.nccl would do it and more."""

import array
import subprocess
import sys

import numpy as np
import pytest

import pynccl
import pynccl.multi as nccl
from helpers import arrays, data, oracle
from helpers.ranks import create, new_id
from helpers.scripts import environment

ROOTED = [name for name, spec in oracle.COLLECTIVES.items() if spec.root]
DTYPES = [*oracle.NCCL_DTYPES, "bool", *oracle.COMPLEX]
SIZES = (0, 1, 7, 1000)


def spread(name, dtype, n, size, op=None, root=0, form="out", seed=0):
    """Make one call on lists of guarded NumPy arrays and check everything about it."""
    spec = oracle.COLLECTIVES[name]
    parts = data.inputs(name, dtype, n, size, seed)
    wanted = data.expected(name, dtype, n, size, op, root, seed)
    xs = [data.Guarded.holding(part) for part in parts]
    words = {**({"op": op} if spec.op else {}), **({"root": root} if spec.root else {})}
    outs = [
        data.Guarded(parts[0].dtype, (size * (n if spec.recv_blocks else 1),)) for _ in range(n)
    ]
    function, inputs = getattr(nccl, name), [x.array for x in xs]
    in_place = form == "in place"
    if name == "broadcast":
        result = function(inputs, library="host", **words)
        outs, in_place = xs, True
    elif name == "scatter":
        result = function(inputs[root], [out.array for out in outs], library="host", **words)
    elif spec.receives == "root":
        given = None if form == "new" or in_place else outs[root].array
        result = [None] * n
        result[root] = function(inputs, given, library="host", **words)
        if in_place:
            outs = [x if rank == root else outs[rank] for rank, x in enumerate(xs)]
    elif form == "out":
        result = function(inputs, [out.array for out in outs], library="host", **words)
    else:
        result = function(inputs, library="host", **words)
        outs = xs if in_place else outs
    for rank in range(n):
        what = f"{name} {dtype} n={n} size={size} op={op} root={root} {form}, entry {rank}"
        if wanted[rank] is None:
            assert result[rank] is None
            if outs[rank] is not xs[rank]:
                outs[rank].check_poisoned(what)
        else:
            oracle.assert_same(result[rank], wanted[rank], what)
            outs[rank].check_guards(what)
            if form != "new":
                assert result[rank] is outs[rank].array
        if outs[rank] is not xs[rank] or (wanted[rank] is None):
            xs[rank].check_holds(parts[rank], f"input of {what}")


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", oracle.COLLECTIVES)
def test_lists_deliver_what_the_oracle_says(name, dtype, n):
    spec = oracle.COLLECTIVES[name]
    for op in oracle.ops_for(dtype) if spec.op else (None,):
        for root in range(n) if spec.root else (0,):
            for size in SIZES:
                spread(name, dtype, n, size, op, root)


@pytest.mark.parametrize("name", ["all_reduce", "reduce", "broadcast"])
def test_lists_are_worked_on_in_place_when_there_are_no_outputs(name):
    for size in SIZES:
        for root in range(3) if name != "all_reduce" else (0,):
            spread(name, "float32", 3, size, "sum", root, form="in place", seed=size)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all", "gather"])
def test_outputs_that_are_not_given_are_allocated_like_the_inputs(name):
    n = 3
    blocks = oracle.COLLECTIVES[name].send_blocks
    xs = [
        np.arange(6.0, dtype="f4").reshape((3, 2) if blocks else (2, 3)) + 10 * i for i in range(n)
    ]
    before = [x.copy() for x in xs]
    result = getattr(nccl, name)(xs, library="host")
    results = [result] if name == "gather" else result
    wanted = oracle.expected(name, [x.reshape(-1) for x in xs], "sum", 0)
    shape = {"reduce_scatter": (2,), "all_to_all": (3, 2)}.get(name, (3, 2, 3))
    assert type(results) is list and len(results) == (1 if name == "gather" else n)
    for got, want in zip(results, wanted):
        assert type(got) is np.ndarray and got.shape == shape
        oracle.assert_same(got, want)
    for x, old in zip(xs, before):
        oracle.assert_same(x, old.reshape(-1))


def test_iterables_that_are_used_up_come_back_as_lists():
    xs = [np.array([1]), np.array([2])]
    outs = [np.array([0]), np.array([0])]
    assert nccl.all_reduce((x for x in xs), library="host") == xs == [3, 3]
    assert nccl.all_reduce(iter(xs), iter(outs), library="host") == outs == [6, 6]
    assert nccl.scatter(np.array([7, 8]), iter(outs), library="host") == outs == [7, 8]
    pairs = nccl.send_recv(iter(xs), iter(outs), iter([1, 0]), library="host")
    assert pairs == outs == [3, 3]
    assert nccl.all_reduce(tuple(xs), library="host")[1] is xs[1]


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all"])
def test_each_allocated_output_is_of_its_own_inputs_library(name):
    torch = pytest.importorskip("torch")
    xs = [np.arange(4, dtype="i4").reshape(2, 2), torch.arange(4, dtype=torch.int32).reshape(2, 2)]
    assert [type(out) for out in getattr(nccl, name)(xs, library="host")] == [type(x) for x in xs]


@pytest.mark.parametrize("kind", arrays.KINDS.values(), ids=str)
def test_lists_of_every_kind_of_array(kind):
    dtype = "uint8" if "uint8" in kind.dtypes else kind.dtypes[0]
    parts = [np.arange(1, 6).astype(dtype) * (i + 1) for i in range(3)]
    made = [kind.make(part.copy()) for part in parts]
    assert nccl.all_reduce([x for x, _ in made], library="host")[0] is made[0][0]
    for _, memory in made:
        oracle.assert_same(memory, sum(parts).astype(dtype))


def test_kinds_of_arrays_may_be_mixed_in_one_list():
    xs = [np.array([1, 2], "i4"), array.array("i", [3, 4]), memoryview(array.array("i", [5, 6]))]
    nccl.all_reduce(xs, library="host")
    assert [list(x) for x in xs] == [[9, 12]] * 3


def test_lists_of_torch_tensors_are_torch_tensors_before_and_after():
    torch = pytest.importorskip("torch")
    xs = [torch.arange(4, dtype=torch.bfloat16) + i for i in range(3)]
    assert nccl.all_reduce(xs, library="host") is xs
    assert all(torch.equal(x, torch.tensor([3, 6, 9, 12], dtype=torch.bfloat16)) for x in xs)
    got = nccl.all_gather(xs, library="host")
    assert all(type(g) is torch.Tensor and g.shape == (3, 4) for g in got)
    assert torch.equal(got[2], torch.stack(xs))


@pytest.mark.parametrize("container", [list, tuple, lambda xs: dict(enumerate(xs)).values()])
def test_a_list_may_be_any_collection(container):
    xs = [np.array([1.0]), np.array([2.0])]
    nccl.all_reduce(container(xs), library="host")
    assert xs == [3.0, 3.0]


# --- roots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", [0, 1, 2])
def test_root_of_a_broadcast_is_honoured(root):
    xs = [np.full(3, 10 * i) for i in range(3)]
    nccl.broadcast(xs, root, library="host")
    assert all((x == 10 * root).all() for x in xs)


@pytest.mark.parametrize("root", [0, 1, 2])
def test_reduce_writes_only_the_roots_place(root):
    xs = [np.array([1]), np.array([2]), np.array([4])]
    outs = [np.array([-1]) for _ in xs]
    assert nccl.reduce(xs, outs[root], root, library="host") is outs[root]
    assert [int(out[0]) for out in outs] == [7 if i == root else -1 for i in range(3)]
    assert [int(x[0]) for x in xs] == [1, 2, 4]


@pytest.mark.parametrize("how", ["outputs", "output"])
def test_torchs_older_form_of_reduce_takes_a_list_and_warns(how):
    xs, outs = [np.array([1]), np.array([2])], [np.array([-1]), np.array([-1])]
    with pytest.warns(FutureWarning, match="one output"):
        assert nccl.reduce(xs, root=1, library="host", **{how: outs}) is outs[1]
    assert [int(out[0]) for out in outs] == [-1, 3]
    with pytest.raises(ValueError, match="not both"):
        nccl.reduce(xs, outs[1], 1, outputs=outs, library="host")
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match="root 2 is no place"):
        nccl.reduce(xs, outputs=outs, root=2, library="host")


@pytest.mark.parametrize("root", [-1, 3, 2**40])
@pytest.mark.parametrize("name", ROOTED)
def test_root_outside_of_the_lists_is_an_error(name, root):
    xs = [np.arange(3.0) for _ in range(3)]
    inputs = xs[0] if name == "scatter" else xs
    outputs = [np.zeros(1) for _ in xs] if name == "scatter" else None
    words = {"outputs": outputs} if outputs else {}
    with pytest.raises(ValueError, match=rf"{name}: root {root} is not a rank .* 0 to 2"):
        getattr(nccl, name)(inputs, root=root, library="host", **words)


@pytest.mark.parametrize("root", [True, "0", None, 1.0])
def test_root_is_an_int(root):
    with pytest.raises(TypeError, match="broadcast: root must be"):
        nccl.broadcast([np.zeros(1), np.zeros(1)], root, library="host")


# --- ops ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["SUM", "PROD", "MAX", "MIN", "AVG"])
@pytest.mark.parametrize("form", ["enum", "name", "number"])
def test_op_is_an_enum_a_name_or_nccls_number(op, form):
    member = pynccl.ReduceOp[op]
    given = {"enum": member, "name": op.lower(), "number": int(member)}[form]
    xs = [np.array([1.0, 5.0]), np.array([4.0, 2.0])]
    nccl.all_reduce(xs, op=given, library="host")
    wanted = {"SUM": [5, 7], "PROD": [4, 10], "MAX": [4, 5], "MIN": [1, 2], "AVG": [2.5, 3.5]}[op]
    assert all(list(x) == wanted for x in xs)


@pytest.mark.parametrize("op", [5, -1, 99, "bxor", "band", np.bitwise_xor, True, None, 1.5])
@pytest.mark.parametrize("name", ["all_reduce", "reduce", "reduce_scatter"])
def test_op_that_nccl_has_not_changes_nothing(name, op):
    xs = [np.array([6, 3]), np.array([3, 6])]
    with pytest.raises((TypeError, ValueError), match=name):
        getattr(nccl, name)(xs, op=op, library="host")
    assert [list(x) for x in xs] == [[6, 3], [3, 6]]


def test_every_entry_may_have_a_premul_sum_of_its_own():
    comms = pynccl.init_all(2, library="host")
    try:
        ops = [comm.premul_sum(factor, "float64") for comm, factor in zip(comms, (10, 0.5))]
        xs = [np.array([1.0]), np.array([4.0])]
        nccl.all_reduce(xs, op=ops, comms=comms)
        assert xs == [12.0, 12.0]
        with pytest.raises(ValueError, match="op has 1 entries, expected 2"):
            nccl.all_reduce(xs, op=ops[:1], comms=comms)
        with pytest.raises(ValueError, match="belongs to another communicator"):
            nccl.all_reduce(xs, op=ops[0], comms=comms)
    finally:
        for comm in comms:
            comm.close()


# --- communicators --------------------------------------------------------------------------------


def test_communicators_may_be_given():
    comms = pynccl.init_all(3, library="host")
    xs = [np.array([1.0]), np.array([2.0]), np.array([4.0])]
    assert nccl.all_reduce(xs, comms=comms) is xs
    assert xs == [7.0, 7.0, 7.0]
    for comm in comms:
        comm.close()
    with pytest.raises(pynccl.CommunicatorClosedError, match="all_reduce"):
        nccl.all_reduce(xs, comms=comms)


def test_one_communicator_stands_for_a_list_of_one(threads):
    def work(comm):
        x = np.array([1.0 + comm.rank])
        nccl.all_reduce([x], comms=comm)
        y = np.array([float(comm.rank)])
        nccl.broadcast([y], root=2, comms=[comm])
        into = np.zeros(1)
        reduced = nccl.reduce([np.ones(1)], into if comm.rank == 1 else None, root=1, comms=comm)
        return float(x[0]), float(y[0]), None if reduced is None else float(reduced[0])

    assert threads(3).run(work) == [(6.0, 2.0, None), (6.0, 2.0, 3.0), (6.0, 2.0, None)]


def test_lists_may_be_some_of_the_ranks(crew):
    uid = new_id()

    def work(thread):
        with pynccl.group():
            comms = [create(4, uid, 2 * thread + i) for i in range(2)]
        xs = [np.array([float(comm.rank)]) for comm in comms]
        nccl.all_reduce(xs, comms=comms)
        gathered = nccl.gather([np.array([comm.rank]) for comm in comms], root=3, comms=comms)
        ys = [np.array([comm.rank]) for comm in comms]
        nccl.broadcast(ys, root=1, comms=comms)
        with pytest.raises(ValueError, match="2 entries, and the communicator 4 ranks"):
            nccl.send_recv(xs, xs, [1, 0], comms=comms)
        for comm in comms:
            comm.close()
        return xs, gathered, ys

    for thread, outcome in enumerate(crew(2).run(work, 20)):
        assert outcome.error is None, outcome
        xs, gathered, ys = outcome.value
        assert xs == [6.0, 6.0] and ys == [1, 1]
        assert gathered is None if thread == 0 else list(gathered.reshape(-1)) == [0, 1, 2, 3]


def test_communicators_of_init_rank_make_a_list():
    uid = nccl.unique_id("host")
    assert type(uid) is pynccl.UniqueId
    with pynccl.group():
        comms = [nccl.init_rank(2, uid, rank) for rank in range(2)]
    xs = [np.array([1]), np.array([2])]
    nccl.all_reduce(xs, comms=comms)
    assert xs == [3, 3]
    for comm in comms:
        comm.close()


def capsule(comm, name=b"torch.cuda.nccl.Communicator"):
    import ctypes

    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(comm.handle, name, None)


CAPSULE_NAME = b"torch.cuda.nccl.Communicator"  # a capsule keeps the address of its name


def test_capsules_of_torch_are_communicators_too():
    comms = pynccl.init_all(2, library="host")
    capsules = [capsule(comm, CAPSULE_NAME) for comm in comms]
    xs = [np.array([1]), np.array([2])]
    for _ in range(2):
        nccl.all_reduce(xs, comms=capsules, library="host")
    assert xs == [6, 6]
    nccl.all_reduce(xs, comms=[capsules[0], comms[1]], library="host")
    assert xs == [12, 12], "and they are nobody's to destroy"
    with create(1, new_id(), 0) as comm:
        for single in (comm, capsule(comm, CAPSULE_NAME)):  # stands for a list of one
            assert nccl.all_reduce([np.array([5])], comms=single, library="host")[0] == 5
    for comm in comms:
        comm.close()


def test_capsule_of_something_else_is_refused():
    with create(1, new_id(), 0) as comm:
        other = capsule(comm, b"something.else")
        with pytest.raises(TypeError, match=r"comms\[0\] must be a Communicator or a capsule"):
            nccl.all_reduce([np.zeros(1)], comms=[other], library="host")


def test_handle_of_other_code_is_used_and_not_destroyed():
    with create(1, new_id(), 0) as comm:
        with pynccl.Communicator.from_handle(comm.handle, library="host") as same:
            assert (same.rank, same.nranks, same.handle) == (0, 1, comm.handle)
            assert list(same.all_reduce(np.array([4]))) == [4]
        assert same.closed
        pynccl.Communicator.from_handle(comm.handle, library="host").abort()
        assert list(comm.all_reduce(np.array([5]))) == [5]


@pytest.mark.parametrize(
    ("handle", "error"), [(0, ValueError), (-1, ValueError), (2**64, ValueError), (True, TypeError),
                          ("0x10", TypeError), (None, TypeError)],
)  # fmt: skip
def test_handle_is_an_address(handle, error):
    with pytest.raises(error, match="from_handle"):
        pynccl.Communicator.from_handle(handle, library="host")


# --- pairs ----------------------------------------------------------------------------------------


def test_pairs_of_any_size_and_dtype_are_exchanged_at_once():
    inputs = [np.arange(5.0), np.arange(3, dtype="i2"), None]
    outputs = [np.zeros(3, "i2"), None, np.zeros(5)]
    assert nccl.send_recv(inputs, outputs, [2, 0, None], library="host") is outputs
    assert list(outputs[0]) == [0, 1, 2] and list(outputs[2]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_ring_of_large_messages(n):
    inputs = [data.values("float32", 100_000, i) for i in range(n)]
    outputs = [data.Guarded("float32", (100_000,)) for _ in range(n)]
    nccl.send_recv(
        inputs, [out.array for out in outputs], [(i + 1) % n for i in range(n)], library="host"
    )
    for i, out in enumerate(outputs):
        out.check_holds(inputs[i - 1])


def test_nothing_to_exchange_is_fine():
    assert nccl.send_recv([None], [None], [None], library="host") == [None]


A, B = np.zeros(2), np.ones(2)
PAIRS = {
    "send without peer": (([A, B], [None, None], [None, None]),
                          r"inputs\[0\] is an array, and peers\[0\] is None"),
    "peer without send": (([None], [A], [0]), r"inputs\[0\] is None, and peers\[0\] is 0"),
    "no receiver": (([A, None], [None, None], [1, None]),
                    r"outputs\[1\] is None, and entry 0 sends to it"),
    "no sender": (([None, None], [A, None], [None, None]),
                  r"outputs\[0\] is an array, and no entry sends"),
    "two senders": (([A, B], [None, np.zeros(2)], [1, 1]), "entries 0 and 1 both send to entry 1"),
    "sizes": (([A, None], [None, np.zeros(3)], [1, None]),
              r"inputs\[0\] has 2 elements, and outputs\[1\], which receives it, has 3"),
    "dtypes": (([A, None], [None, np.zeros(2, "f4")], [1, None]),
               r"inputs\[0\] is float64, and outputs\[1\], which receives it, is float32"),
    "peer outside": (([A], [None], [1]), "dest 1 is not a rank"),
    "lengths": (([A], [A], [0, 0]), "peers has 2 entries, expected 1"),
    "lengths of outputs": (([A], [A, B], [0]), "outputs has 2 entries, expected 1"),
    "overlap": (([A, None], [None, A], [1, None]), r"outputs\[1\] and inputs\[0\] share memory"),
    "output twice": (([np.ones(2), np.ones(2)], [A, A], [1, 0]), r"outputs\[0\] and outputs\[1\] share"),
}  # fmt: skip


@pytest.mark.parametrize("which", PAIRS)
def test_pairs_that_do_not_match_are_told_by_index(which):
    arguments, message = PAIRS[which]
    with pytest.raises((TypeError, ValueError), match=f"send_recv: .*{message}"):
        nccl.send_recv(*arguments, library="host")
    assert list(A) == [0, 0] and list(B) == [1, 1]


# --- questions ------------------------------------------------------------------------------------


def test_version_is_torchs_tuple():
    code = pynccl.version_code("host")
    assert nccl.version("host") == (code // 10000, code // 100 % 100, code % 100)


def test_sum_is_nccls_zero():
    assert nccl.SUM == 0 and nccl.SUM is pynccl.ReduceOp.SUM


@pytest.mark.parametrize(
    ("tensors", "answer"),
    [
        ([np.zeros(3), np.zeros(2)], True),
        ([np.zeros((3, 2))[:, 0]], False),
        ([np.zeros(3), "text"], False),
        ([np.array([object()])], False),
        ([], True),
    ],
)
def test_availability_is_asked_without_a_call(tensors, answer):
    assert nccl.is_available(tensors, library="host") is answer


# --- in place, as NCCL means it -------------------------------------------------------------------


def test_blocks_in_their_places_are_gathered_in_place():
    n = 3
    outputs = [np.zeros((n, 2)) for _ in range(n)]
    for rank, out in enumerate(outputs):
        out[rank] = rank + 1
    nccl.all_gather([out[rank] for rank, out in enumerate(outputs)], outputs, library="host")
    assert all(out.tolist() == [[1, 1], [2, 2], [3, 3]] for out in outputs)

    whole = np.zeros((n, 2))
    whole[1] = 7
    nccl.gather([np.full(2, 5.0), whole[1], np.full(2, 9.0)], whole, root=1, library="host")
    assert whole.tolist() == [[5, 5], [7, 7], [9, 9]]


def test_blocks_are_reduced_and_scattered_in_place():
    xs = [np.arange(6.0).reshape(3, 2) + rank for rank in range(3)]
    nccl.reduce_scatter(xs, [x[rank] for rank, x in enumerate(xs)], library="host")
    assert [x[rank].tolist() for rank, x in enumerate(xs)] == [[3, 6], [9, 12], [15, 18]]

    whole = np.arange(6.0).reshape(3, 2)
    outputs = [np.zeros(2), np.zeros(2), whole[2]]
    nccl.scatter(whole, outputs, root=2, library="host")
    assert [out.tolist() for out in outputs] == [[0, 1], [2, 3], [4, 5]]


def test_block_in_another_ranks_place_is_refused():
    outputs = [np.zeros((2, 2)), np.zeros((2, 2))]
    with pytest.raises(
        ValueError, match=r"let inputs\[0\] be outputs\[0\]\[0\], this rank's block"
    ):
        nccl.all_gather([outputs[0][1], outputs[1][1]], outputs, library="host")


def test_array_whose_property_makes_a_list_call_is_fine():
    class Nested:
        def __init__(self, values):
            self.values = values

        @property
        def __cuda_array_interface__(self):
            inner = [np.ones(1), np.ones(1), np.ones(1)]
            nccl.all_reduce(inner, library="host")
            assert inner == [3.0, 3.0, 3.0]
            return arrays.interface(self.values)

    xs = [np.ones(2), np.full(2, 4.0)]
    nccl.all_reduce([Nested(x) for x in xs], library="host")
    assert all((x == 5).all() for x in xs)


def test_warning_about_the_fallback_names_the_callers_line(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import array\nimport pynccl.multi as nccl\nnccl.all_reduce([array.array('i', [1])])\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment(PYNCCL_LIBRARY=None, PYNCCL_LIBCUDA=None),
    )
    assert "program.py:3: HostFallbackWarning" in done.stderr
