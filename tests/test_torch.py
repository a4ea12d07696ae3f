"""Torch's own tensors, on the CPU: what is read, what is refused, what comes back."""

import warnings
import weakref

import numpy as np
import pytest

import pynccl
from helpers import oracle, scripts
from helpers.elsewhere import elsewhere, needs
from pynccl import Buffer, LayoutError

pytestmark = needs("torch")
here = elsewhere("library_process")

REDUCED = (
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64",
    "float8_e4m3fn", "float8_e5m2", "bool", "complex64", "complex128",
)  # fmt: skip
MOVED = ("int16", "uint16", "complex32", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")


def tensor(dtype, shape=(2, 3), fill=1):
    """A tensor of any dtype that holds `fill`."""
    import torch

    return torch.full(shape, fill, dtype=torch.float32).to(getattr(torch, dtype))


def alone():
    return pynccl.Communicator(1, pynccl.unique_id("host"), 0, library="host")


def bits(x):
    """A tensor's memory, whatever its dtype."""
    import ctypes

    return ctypes.string_at(x.data_ptr(), x.nbytes)


@pytest.mark.parametrize("dtype", REDUCED)
@here
def test_two_ranks_reduce_tensors(dtype):
    comms = pynccl.init_all(2, library="host")
    xs = [tensor(dtype, fill=1 + comm.rank) for comm in comms]
    with pynccl.group():
        sums = [comm.all_reduce(x) for comm, x in zip(comms, xs)]
    wanted = tensor(dtype, fill=3)
    for x, total in zip(xs, sums):
        assert (total.dtype, total.shape, total.device) == (x.dtype, x.shape, x.device)
        assert bits(total) == bits(wanted)
    for comm in comms:
        comm.close()


@pytest.mark.parametrize("dtype", REDUCED + MOVED)
@here
def test_every_dtype_moves_and_gives_its_own(dtype):
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental, says Torch
        x = torch.zeros((2, 3), dtype=getattr(torch, dtype))
    np.frombuffer((bytearray_of(x)), "u1")[:] = np.arange(x.nbytes) % (
        2 if dtype == "bool" else 251
    )
    with alone() as comm:
        blocks = comm.all_gather(x)
    assert type(blocks) is torch.Tensor
    assert (blocks.dtype, tuple(blocks.shape)) == (x.dtype, (1, 2, 3))
    assert bits(blocks) == bits(x)
    assert Buffer(x).dtype == dtype


def bytearray_of(x):
    import ctypes

    return (ctypes.c_char * x.nbytes).from_address(x.data_ptr())


@pytest.mark.parametrize("dtype", MOVED)
@here
def test_what_only_moves_is_not_reduced(dtype):
    import torch

    with alone() as comm, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(TypeError, match=f"^all_reduce: {dtype} cannot be reduced"):
            comm.all_reduce(torch.zeros(3, dtype=getattr(torch, dtype)))


@here
def test_scalars_and_empty_tensors():
    import torch

    with alone() as comm:
        total = comm.all_reduce(torch.tensor(2.5))
        assert (tuple(total.shape), total.item()) == ((), 2.5)
        empty = comm.all_gather(torch.empty(0, 3))
        assert tuple(empty.shape) == (1, 0, 3)
        assert Buffer(torch.empty(0, 3)).ptr == 0


# ---- layout -----------------------------------------------------------------------------------------


@here
def test_gaps_are_refused():
    import torch

    grid = torch.arange(12.0).reshape(3, 4)
    with alone() as comm:
        for cut in (grid[:, 1], grid[:, ::2], grid[::2], torch.ones(1).expand(4)):
            with pytest.raises(
                LayoutError, match="^all_reduce: x is not contiguous: shape .*strides"
            ):
                comm.all_reduce(cut)
            with pytest.raises(LayoutError, match="^all_reduce: out is not contiguous"):
                comm.all_reduce(torch.zeros(cut.shape), out=cut)
        assert comm.all_reduce(grid[1]).tolist() == [4.0, 5.0, 6.0, 7.0]


@here
def test_fortran_order_stays():
    import torch

    x = torch.arange(6.0).reshape(2, 3).t()
    with alone() as comm:
        total = comm.all_reduce(x)
        assert total.stride() == x.stride() == (1, 3)
        assert torch.equal(total, x)
        with pytest.raises(LayoutError, match="Fortran"):
            comm.all_reduce(x, out=torch.zeros(3, 2))
        with pytest.raises(LayoutError, match="Fortran"):
            comm.all_gather(x)


@here
def test_channels_last_is_passed_as_it_lies():
    import torch

    x = torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    with alone() as comm:
        with pytest.raises(LayoutError, match="not contiguous"):
            comm.all_reduce(x)
        total = torch.empty_like(x)
        comm.all_reduce(x.permute(0, 2, 3, 1), out=total.permute(0, 2, 3, 1))
        assert torch.equal(total, x)


# ---- gradients, subclasses --------------------------------------------------------------------------


@here
def test_tensors_that_require_grad_are_read_and_written_and_no_gradient_flows():
    import torch

    leaf = torch.arange(3.0, requires_grad=True)
    later = leaf * 2
    weight = torch.nn.Parameter(torch.zeros(3))
    with alone() as comm:
        total = comm.all_reduce(later)
        assert total.tolist() == [0, 2, 4]
        assert not total.requires_grad
        assert comm.all_reduce(leaf, out=weight) is weight
        assert weight.tolist() == [0, 1, 2]
        assert weight.requires_grad
        assert comm.broadcast(leaf) is leaf
        assert type(comm.all_reduce(weight)) is torch.Tensor
        assert type(comm.all_gather(weight)) is torch.Tensor
        weight.grad = torch.ones(3)
        assert comm.all_reduce(weight.grad, op="avg").tolist() == [1, 1, 1]


@here
def test_subclasses_give_plain_tensors():
    import torch

    class Mine(torch.Tensor):
        pass

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return super().__torch_function__(function, types, args, kwargs or {})

    with alone() as comm:
        for kind in (Mine, Watched):
            x = torch.arange(3.0).as_subclass(kind)
            out = torch.zeros(3).as_subclass(kind)
            assert type(comm.all_reduce(x)) is torch.Tensor
            assert comm.all_reduce(x, out=out) is out
            assert out.tolist() == [0, 1, 2]


@here
def test_inference_mode():
    import torch

    with alone() as comm:
        with torch.inference_mode():
            x = torch.ones(3)
            inside = comm.all_reduce(x)
        assert inside.tolist() == comm.all_reduce(x).tolist() == [1, 1, 1]


# ---- memory that holds other numbers, or none -------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
def test_lazy_conjugates_and_negatives_are_never_sent(known):
    """Also where the bits in Torch's object are not found, and its methods are asked."""
    text = scripts.run(LAZY.replace("KNOWN", str(known)), limit=60)
    assert text.split() == ["18"]


LAZY = """
import pytest, pynccl, torch
if not KNOWN:
    view, torch._neg_view = torch._neg_view, lambda x: 1 / 0
    pynccl.Buffer(torch.ones(1))        # Torch becomes known
    torch._neg_view = view

z = torch.tensor([1 + 2j, 3 - 4j])
one = torch.tensor([1 + 2j])
ones = torch.ones(3)
lazy = {
    "conj": [z.conj(), z.conj()[1:], z.reshape(2, 1).mH, torch.nn.Parameter(z).conj()],
    "neg": [one.conj().imag, *map(torch._neg_view, (ones, z, ones.to(torch.int32), ones.to(torch.uint8)))],
}
plain = [
    z, z.conj().conj(), z.conj().resolve_conj(), z.conj().clone(), one.conj().real,
    one.conj().imag.resolve_neg(), z.real.clone(),
]
count = 0
with pynccl.Communicator(1, pynccl.unique_id("host"), 0, library="host") as comm:
    for how, tensors in lazy.items():
        for x in tensors:
            source = torch.zeros_like(x).clone()
            for call in (lambda: comm.broadcast(x), lambda: comm.all_reduce(source, out=x)):
                with pytest.raises(ValueError, match=f"is a lazy .* pass x.resolve_{how}"):
                    call()
                count += 1
    for x in plain:
        assert torch.equal(comm.all_reduce(x), x)
    assert comm.all_reduce(z.conj().resolve_conj()).tolist() == [1 - 2j, 3 + 4j]
print(count)
"""


def without_memory():
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.arange(6.0).reshape(2, 3)
    freed = x.clone()
    part = freed.view(-1)[2:]
    freed.untyped_storage().resize_(0)
    with FakeTensorMode():
        fake = torch.empty(3)
    return {
        r"has the layout torch.sparse_coo, .*to_dense": x.to_sparse(),
        r"has the layout torch.sparse_csr, .*to_dense": x.to_sparse_csr(),
        r"has the layout torch._mkldnn": x.to_mkldnn(),
        r"is quantised \(torch.qint8\), .*int_repr": torch.quantize_per_tensor(
            x, 0.1, 0, torch.qint8
        ),
        r"is on the device meta": x.to("meta"),
        r"is a torch._subclasses.fake_tensor.FakeTensor, which holds no memory of its own": fake,
        r"has 6 elements and no memory": freed,
        r"has 4 elements and no memory": part,
        r"is a parameter that has no shape yet": torch.nn.LazyLinear(3).weight,
        r"is a nested tensor": torch.nested.nested_tensor([x[0], x[1]]),
        r"has the dtype torch.bits8, .*view\(torch.uint8\)": torch.empty(3, dtype=torch.bits8),
    }


@here
def test_tensors_without_plain_memory_are_refused_by_name():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = without_memory()
    with alone() as comm:
        for text, x in cases.items():
            with pytest.raises(TypeError, match=f"^broadcast: x {text}"):
                comm.broadcast(x)


@here
def test_tensors_that_reach_out_of_their_storage_are_refused():
    """Torch itself reads and writes beyond the end of a storage that was made smaller."""
    import torch

    def cut(first, nbytes):
        x = torch.ones(1000)[first:]
        x.untyped_storage().resize_(nbytes)
        return x

    with alone() as comm:
        for first, nbytes in ((0, 4), (0, 3999), (999, 3996), (999, 100)):
            x = cut(first, nbytes)
            text = f"^broadcast: x has {x.nbytes} bytes from {4 * first} on in its storage, .* has {nbytes};"
            with pytest.raises(ValueError, match=text):
                comm.broadcast(x)
        for x in (cut(0, 4000), cut(10, 4000), cut(5, 8000)):
            assert comm.all_reduce(x).tolist() == x.tolist()
        memory = np.arange(6.0)
        shared = torch.arange(6.0).share_memory_()
        for x in (torch.from_numpy(memory[2:])[1:], torch.from_dlpack(memory[2:])[1:], shared[3:]):
            assert comm.all_reduce(x).tolist() == [3, 4, 5]


def test_torch_is_studied_on_the_cpu_whatever_its_default_device():
    scripts.run(
        """
        import pytest, pynccl, torch
        torch.set_default_device("meta")
        x = torch.ones(9, device="cpu")
        pynccl.Buffer(x)
        x.untyped_storage().resize_(8)
        with pytest.raises(ValueError, match="in its storage"):
            pynccl.Buffer(x)
        """,
        limit=60,
    )


def test_threads_that_meet_torch_at_the_same_time():
    scripts.run(
        """
        import sys, threading
        import pynccl, torch
        sys.setswitchinterval(1e-6)
        threads, wrong = [], []
        cut = torch.ones(100)
        cut.untyped_storage().resize_(4)
        start = threading.Barrier(8)
        def meet():
            start.wait()
            for x in (torch.ones(3, dtype=torch.complex64).conj(), cut, torch.nn.Parameter(torch.ones(2))):
                try:
                    pynccl.Buffer(x)
                    wrong.append(x) if x is cut or x.is_conj() else None
                except ValueError as error:
                    wrong.append(error) if x.numel() == 2 else None
        for _ in range(8):
            threads.append(threading.Thread(target=meet))
            threads[-1].start()
        for thread in threads:
            thread.join()
        assert not wrong, wrong
        """,
        limit=60,
    )


@here
def test_tensors_under_a_transformation_are_refused():
    import torch

    def look(x):
        with pytest.raises(TypeError, match="^Buffer: x is a tensor inside of vmap, grad"):
            Buffer(x)
        return x.sum()

    x = torch.ones(2, 3)
    torch.vmap(look)(x)
    torch.func.grad(look)(x)


# ---- lifetime ---------------------------------------------------------------------------------------


@here
def test_what_is_used_later_keeps_the_memory_that_it_saw():
    import torch

    memory = np.ones(1000, "f4")
    alive = weakref.ref(memory)
    x, out = torch.from_numpy(memory), torch.zeros(1000)
    with alone() as comm:
        with pynccl.group(run=False) as plan:
            comm.all_reduce(x, out=out)
        buffer, address = Buffer(x), x.data_ptr()
        del memory
        x.data = torch.full((1000,), 7.0)
        assert alive() is not None
        plan()
        assert out.tolist() == [1.0] * 1000
        assert buffer.ptr == address
        assert comm.all_reduce(x).tolist() == [7.0] * 1000
        del plan
        assert alive() is not None
        del buffer
        assert alive() is None


@here
def test_a_call_leaves_no_reference_and_no_shared_write():
    import sys

    import torch

    x, out = torch.ones(8), torch.zeros(8)
    before = sys.getrefcount(x), sys.getrefcount(out)
    with alone() as comm:
        for _ in range(10):
            comm.all_reduce(x, out=out)
        assert (sys.getrefcount(x), sys.getrefcount(out)) == before
        twin = torch._lazy_clone(out)  # shares its memory until somebody writes
        comm.all_reduce(torch.full((8,), 5.0), out=twin)
    assert twin.tolist() == [5.0] * 8
    assert out.tolist() == [1.0] * 8


@here
def test_tensors_mix_with_numpy():
    import torch

    with alone() as comm:
        out = np.zeros(3)
        comm.all_reduce(torch.arange(3.0, dtype=torch.float64), out=out)
        assert out.tolist() == [0, 1, 2]
        shared = torch.from_numpy(out)
        comm.all_reduce(np.full(3, 4.0), out=shared)
        assert out.tolist() == [4, 4, 4]


@here
def test_every_collective_gives_tensors():
    import torch

    comms = pynccl.init_all(2, library="host")
    for name, spec in oracle.COLLECTIVES.items():
        parts = [torch.arange(4.0).reshape(2, 2) + 10 * comm.rank for comm in comms]
        wanted = oracle.expected(name, [p.numpy().ravel().copy() for p in parts], "sum", 0)
        results = []
        with pynccl.group():
            for comm, x in zip(comms, parts):
                words = {"root": 0} if spec.root else {}
                if name == "scatter" and comm.rank:
                    x, words["out"] = None, torch.zeros(2)
                results.append(getattr(comm, name)(x, **words))
        for result, want in zip(results, wanted):
            assert (result is None) == (want is None), name
            if want is not None:
                assert type(result) is torch.Tensor
                oracle.assert_same(result.numpy().ravel(), want.ravel(), name)
    for comm in comms:
        comm.close()


def test_a_torch_from_before_the_exchange_table():
    scripts.run(
        """
        import pytest, pynccl, torch
        del torch.Tensor.__dlpack_c_exchange_api__
        x = torch.arange(3.0, requires_grad=True)
        with pynccl.Communicator(1, pynccl.unique_id("host"), 0, library="host") as comm:
            assert comm.all_reduce(x).tolist() == [0, 1, 2]
            assert comm.all_reduce(x, out=torch.nn.Parameter(torch.zeros(3))).tolist() == [0, 1, 2]
            z = torch.tensor([1 + 2j])
            for lazy in (z.conj(), z.conj().imag):
                with pytest.raises(ValueError, match="is a lazy"):
                    comm.all_reduce(lazy)
            buffer = pynccl.Buffer(x)
            y, x.data = x.data, torch.zeros(3)
            assert comm.all_reduce(buffer, out=torch.zeros(3)).tolist() == [0, 1, 2]
        """,
        limit=60,
    )
