"""CollConfig: what NCCL is told of one call, and that the host library does the same with it as without."""

import gc
import pickle
import struct

import numpy as np
import pytest

import pynccl
from helpers import oracle
from helpers.ranks import create, new_id
from helpers.stubs import NcclStub, build_nccl_stub

UNDEF = -(2**31)
FIELDS = {
    "min_ctas": 2, "max_ctas": 4, "nvls_ctas": 3, "cga_cluster_size": 1, "alg_selection": "RING",
    "force_alg_selection": False, "cta_policy": 3, "user_profiler_tag": 2**64 - 1,
    "launch_completion_event": 0x7F00_0000_1230,
}  # fmt: skip
VERBS = {
    "all_reduce": "ncclAllReduceConfig", "reduce": "ncclReduceConfig", "broadcast": "ncclBroadcastConfig",
    "all_gather": "ncclAllGatherConfig", "reduce_scatter": "ncclReduceScatterConfig",
    "all_to_all": "ncclAlltoAllConfig", "gather": "ncclGatherConfig", "scatter": "ncclScatterConfig",
}  # fmt: skip


def plain_and_configured(comm):
    config = pynccl.CollConfig(max_ctas=4, user_profiler_tag=comm.rank)
    n = comm.nranks
    for verb in VERBS:
        blocks = oracle.COLLECTIVES[verb].send_blocks
        results = []
        for words in ({}, {"config": config}):
            x = (
                np.arange(6.0 * n).reshape(n, 6) * (comm.rank + 1)
                if blocks
                else np.arange(6.0) + comm.rank
            )
            if verb == "scatter":
                words = words | {"out": np.zeros(6)}
            results.append(getattr(comm, verb)(x, **words))
        assert (results[0] is None) == (results[1] is None)
        assert results[0] is None or (results[0] == results[1]).all(), verb


def test_results_are_the_same_with_a_configuration(threads):
    threads(3).run(plain_and_configured)


def test_it_is_a_value():
    config = pynccl.CollConfig(**FIELDS)
    assert config.values == FIELDS
    assert all(getattr(config, name) == value for name, value in FIELDS.items())
    assert config.nvls_ctas == 3
    assert pynccl.CollConfig().nvls_ctas is None
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert hash(again) == hash(config)
    assert config != pynccl.CollConfig()
    assert eval(repr(config), {"CollConfig": pynccl.CollConfig}) == config
    with pytest.raises(AttributeError, match="no field 'blocks'"):
        config.blocks  # noqa: B018


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("min_ctas", "2", TypeError),
        ("min_ctas", True, TypeError),
        ("max_ctas", 2**31, ValueError),
        ("max_ctas", 1.0, TypeError),
        ("alg_selection", b"RING", TypeError),
        ("alg_selection", "a\0b", ValueError),
        ("force_alg_selection", 1, TypeError),
        ("user_profiler_tag", -1, ValueError),
        ("user_profiler_tag", 2**64, ValueError),
        ("launch_completion_event", object(), TypeError),
    ],
)
def test_what_is_no_value_of_a_field_is_refused(field, value, error):
    with pytest.raises(error, match=f"CollConfig: {field}"):
        pynccl.CollConfig(**{field: value})


@pytest.fixture
def alone_on_stub():
    stub = NcclStub(build_nccl_stub())
    stub.reset()
    with pynccl.Communicator(1, pynccl.unique_id(library=stub.path), 0, library=stub.path) as comm:
        stub.reset()
        yield comm, stub


def empty(verb):
    """Arguments of a call that needs no device: nothing is moved."""
    x = np.zeros((1, 0) if oracle.COLLECTIVES[verb].send_blocks else 0, "f4")
    return (x,), {"out": np.zeros(0, "f4")} if verb == "scatter" else {}


@pytest.mark.parametrize("verb", VERBS)
def test_nccl_is_told_every_field(verb, alone_on_stub):
    comm, stub = alone_on_stub
    args, words = empty(verb)
    getattr(comm, verb)(*args, **words, config=pynccl.CollConfig(**FIELDS))
    (call,) = stub.of(VERBS[verb])
    said = struct.unpack("@NIIPiiiiPiiQP", call.attached["config"][:72])
    assert said[:8] == (72, 0xCAFEBEEF, 23203, 0, 2, 4, 3, 1)
    assert said[9:] == (0, 3, 2**64 - 1, 0x7F00_0000_1230)
    assert said[8] != 0
    getattr(comm, verb)(*args, **words, config=pynccl.CollConfig())
    said = struct.unpack("@NIIPiiiiPiiQP", stub.of(VERBS[verb])[1].attached["config"][:72])
    assert said[3:] == (0, UNDEF, UNDEF, UNDEF, UNDEF, 0, 1, UNDEF, 0, 0)
    stub.reset()
    getattr(comm, verb)(*args, **words)
    assert stub.names == [VERBS[verb].removesuffix("Config")]


def test_a_plan_keeps_the_settings_of_its_calls(alone_on_stub):
    comm, stub = alone_on_stub
    config = pynccl.CollConfig(user_profiler_tag=77, alg_selection="RING")
    with pynccl.group(run=False) as plan:
        comm.all_reduce(np.zeros(0, "f4"), config=config)
        comm.all_reduce(np.zeros(0, "f4"))
    del config
    gc.collect()
    for _ in range(2):
        stub.reset()
        plan()
        assert stub.names == [
            "ncclGroupStart",
            "ncclAllReduceConfig",
            "ncclAllReduce",
            "ncclGroupEnd",
        ]
        (call,) = stub.of("ncclAllReduceConfig")
        assert struct.unpack_from("@Q", call.attached["config"], 56)[0] == 77


@pytest.mark.parametrize("config", [3, "RING", {"max_ctas": 3}, pynccl.Config()])
def test_anything_else_is_refused_before_something_moves(config):
    with create(1, new_id(), 0) as comm:
        out = np.full(2, -1.0)
        with pytest.raises(
            TypeError, match=r"all_reduce: config must be a pynccl\.CollConfig, not"
        ):
            comm.all_reduce(np.ones(2), out, config=config)
        assert (out == -1).all()


def test_an_older_nccl_says_what_it_lacks():
    path = str(build_nccl_stub(23000))
    with (
        pynccl.Communicator(1, pynccl.unique_id(library=path), 0, library=path) as comm,
        pytest.raises(
            pynccl.UnsupportedError, match=r"ncclAllReduceConfig needs NCCL 2\.31, loaded 2\.30"
        ),
    ):
        comm.all_reduce(np.zeros(0, "f4"), config=pynccl.CollConfig())


def test_the_host_library_answers_as_nccl():
    with create(1, new_id(), 0) as comm:
        for field, value in (("cta_policy", 4), ("launch_completion_event", 8)):
            with pytest.raises(pynccl.InvalidArgumentError, match="config->"):
                comm.all_reduce(np.ones(2), config=pynccl.CollConfig(**{field: value}))
        assert comm.all_reduce(np.ones(2)).tolist() == [1, 1]
