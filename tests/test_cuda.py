"""The driver layer against a stub driver: what is called, in which context, in which order."""

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from helpers.build import ROOT, build_shared
from helpers.scripts import wait_until
from helpers.stubs import CudaStub, build_cuda_stub

NOT_INITIALIZED, INVALID_DEVICE, INVALID_CONTEXT, INVALID_HANDLE = 3, 101, 201, 400
LEGACY, PER_THREAD = 1, 2


class Cuda:
    """The C functions of ``_cuda.c``."""

    def __init__(self, path):
        self.lib = lib = ctypes.CDLL(str(path))
        lib.cuda_error.restype = ctypes.c_char_p
        for name in ("cuda_pointer_device", "cuda_stream_sync", "cuda_device_leave", "cuda_free"):
            getattr(lib, name).argtypes = [ctypes.c_void_p]
        lib.cuda_stream_wait.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
        lib.cuda_malloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]

    def __getattr__(self, name):
        return getattr(self.lib, f"cuda_{name}")

    def device(self):
        out = ctypes.c_int(-7)
        assert self.get_device(ctypes.byref(out)) == 0
        return out.value

    def enter(self, device):
        saved = ctypes.c_void_p(1)
        return self.device_enter(device, ctypes.byref(saved)), saved


@pytest.fixture(scope="module")
def built():
    return build_shared("libcudalayer.so", [ROOT / "pynccl" / "_cuda.c"])


def load(built, tmp_path, monkeypatch, **options):
    """Return a driver layer and a stub driver never used: each copy is a library of its own."""
    driver = shutil.copy(build_cuda_stub(**options), tmp_path / "driver.so")
    monkeypatch.setenv("PYNCCL_LIBCUDA", str(driver))
    return Cuda(shutil.copy(built, tmp_path / "layer.so")), CudaStub(driver)


@pytest.fixture
def pair(built, tmp_path, monkeypatch):
    """The layer and an initialised driver."""
    cuda, stub = load(built, tmp_path, monkeypatch)
    stub.start()
    stub.reset()
    return cuda, stub


def in_thread(function):
    """Call a function in a thread of its own, where no context is current."""
    out = []
    thread = threading.Thread(target=lambda: out.append(function()))
    thread.start()
    thread.join(20)
    (result,) = out
    return result


# ---- no driver ----------------------------------------------------------------------------------------

ABSENT = """
import ctypes, sys
lib = ctypes.CDLL(sys.argv[1])
lib.cuda_error.restype = ctypes.c_char_p
out, pointer = ctypes.c_int(5), ctypes.c_void_p(5)
print(lib.cuda_ready())
print(lib.cuda_pointer_device(None))
print(lib.cuda_stream_wait(1, 9), lib.cuda_stream_wait(0, 1), lib.cuda_stream_sync(0))
print(lib.cuda_get_device(ctypes.byref(out)), out.value)
print(lib.cuda_set_device(0), lib.cuda_device_leave(None))
print(lib.cuda_device_enter(0, ctypes.byref(pointer)), pointer.value)
print(lib.cuda_device_count(ctypes.byref(out)), out.value)
print(lib.cuda_malloc(ctypes.byref(pointer), 8), pointer.value, lib.cuda_free(None))
print(lib.cuda_error(3).decode(), "|", lib.cuda_error(700).decode())
"""


def test_without_a_driver_everything_says_so(built):
    environment = {k: v for k, v in os.environ.items() if k != "PYNCCL_LIBCUDA"}
    done = subprocess.run(
        [sys.executable, "-c", ABSENT, str(built)],
        env=environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "0",
        "-2",
        "3 0 3",
        "3 -1",
        "3 3",
        "3 None",
        "3 0",
        "3 None 0",
        "no CUDA driver is loaded | unknown CUDA error 700",
    ]


@pytest.mark.parametrize("what", ["missing", "text", "other library"])
def test_a_driver_that_is_none(built, tmp_path, monkeypatch, what):
    path = tmp_path / "libcuda.so.1"
    if what == "text":
        path.write_text("no driver")
    elif what == "other library":
        shutil.copy(built, path)  # a library, but without the driver's functions
    monkeypatch.setenv("PYNCCL_LIBCUDA", str(path))
    cuda = Cuda(shutil.copy(built, tmp_path / "layer.so"))
    assert cuda.ready() == 0
    assert cuda.open() == 0
    assert cuda.pointer_device(1) == -2
    assert str(path) not in Path("/proc/self/maps").read_text(), "it must not stay loaded"


@pytest.mark.parametrize("how", ["somebody loads it", "it is opened"])
def test_a_driver_on_the_system_waits_until_it_is_loaded(how):
    """No variable, a device node, and a libcuda.so.1 that the linker would find: looking must not load it."""
    layer = build_shared(
        "libcudalayer.so", [ROOT / "pynccl" / "_cuda.c"], {"DEVICE_NODES": '"/proc/self/exe"'}
    )
    driver = build_cuda_stub()
    script = (
        "import ctypes, sys; layer = ctypes.CDLL(sys.argv[1]); "
        "loaded = lambda: 'libcuda.so.1' in open('/proc/self/maps').read(); "
        "print(layer.cuda_ready(), layer.cuda_pointer_device(None), loaded()); "
        "driver = ctypes.CDLL(sys.argv[2]) if len(sys.argv) > 2 else layer.cuda_open(); "
        "print(layer.cuda_ready(), layer.cuda_pointer_device(None), loaded())"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYNCCL_LIBCUDA"}
    environment["LD_LIBRARY_PATH"] = str(driver.parent)
    done = subprocess.run(
        [sys.executable, "-c", script, str(layer), *([str(driver)] if how[0] == "s" else [])],
        env=environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["0 -2 False", "1 -1 True"]


def test_looking_does_not_initialise_the_driver(built, tmp_path, monkeypatch):
    """A process that only looks at arrays must stay safe to fork."""
    cuda, stub = load(built, tmp_path, monkeypatch)
    assert cuda.ready() == 1
    assert cuda.open() == 1
    assert cuda.pointer_device(ctypes.addressof(ctypes.c_int())) == -1
    assert cuda.device() == -1
    assert cuda.stream_wait(LEGACY, PER_THREAD) == NOT_INITIALIZED
    assert "cuInit" not in stub.names
    assert cuda.set_device(1) == 0
    assert stub.names[0] == "cuInit"


# ---- pointers -----------------------------------------------------------------------------------------


def test_pointers(pair):
    cuda, stub = pair
    stub.memory(0x10000, 0x100, device=2)
    stub.memory(0x20000, 0x100, device=0)
    stub.memory(0x30000, 0x100, device=1, kind=1)  # page-locked host memory
    assert cuda.pointer_device(0x10000) == 2
    assert cuda.pointer_device(0x100FF) == 2
    assert cuda.pointer_device(0x10100) == -1
    assert cuda.pointer_device(0x20000) == 0
    assert cuda.pointer_device(0x30000) == -1
    assert cuda.pointer_device(None) == -1
    stub.fail("cuPointerGetAttributes", 999)
    assert cuda.pointer_device(0x10000) == -2


def test_device_memory(pair):
    cuda, stub = pair
    pointer = ctypes.c_void_p(1)
    assert cuda.malloc(ctypes.byref(pointer), 64) == INVALID_CONTEXT
    assert pointer.value is None
    assert cuda.set_device(3) == 0
    assert cuda.malloc(ctypes.byref(pointer), 64) == 0
    assert cuda.pointer_device(pointer) == 3
    assert cuda.free(pointer) == 0
    assert cuda.pointer_device(pointer) == -1
    assert cuda.free(None) == 0
    assert stub.names.count("cuMemFree_v2") == 1


# ---- devices ------------------------------------------------------------------------------------------


def test_current_device(pair):
    cuda, stub = pair

    def check():
        assert cuda.device() == -1
        assert cuda.set_device(2) == 0
        assert cuda.device() == 2
        assert stub.current_context == stub.primary(2)
        assert cuda.set_device(0) == 0
        assert cuda.device() == 0
        assert cuda.set_device(-1) == 0
        assert cuda.device() == -1
        assert cuda.set_device(4) == INVALID_DEVICE
        assert cuda.set_device(-2) == INVALID_DEVICE
        assert cuda.set_device(1000) == INVALID_DEVICE
        assert cuda.device() == -1
        return True

    assert in_thread(check)


def test_device_count(pair):
    cuda, _ = pair
    out = ctypes.c_int()
    assert cuda.device_count(ctypes.byref(out)) == 0
    assert out.value == 4


def test_enter_and_leave_restore_the_very_context(pair):
    cuda, stub = pair

    def check():
        own = stub.context(1)  # of device 1, but not its primary context
        for before in (None, own, stub.primary(3)):
            stub.make_current(before)
            result, saved = cuda.enter(1)
            assert result == 0
            assert stub.current_context == stub.primary(1)
            assert cuda.device_leave(saved) == 0
            assert stub.current_context == (before or 0)
        stub.make_current(own)
        result, saved = cuda.enter(77)
        assert result == INVALID_DEVICE
        assert stub.current_context == own, "a failed enter changes nothing"
        return True

    assert in_thread(check)


def test_enter_where_the_device_is_current_already(pair):
    cuda, stub = pair
    assert cuda.set_device(2) == 0
    stub.reset()
    result, saved = cuda.enter(2)
    assert result == 0
    assert stub.names == [], "nothing to switch"
    assert cuda.device_leave(saved) == 0
    assert stub.current_device == 2


def test_primary_contexts_are_retained_once(pair):
    cuda, stub = pair
    barrier = threading.Barrier(8)

    def use():
        barrier.wait(10)
        for _ in range(50):
            assert cuda.set_device(1) == 0

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert stub.lib.stub_retained(1) == 1


# ---- streams ------------------------------------------------------------------------------------------


def ordering(stub):
    """Return what was recorded where and waited for where: [(function, stream)]."""
    return [
        (call.function, call.stream)
        for call in stub.calls
        if call.function in ("cuEventRecord", "cuStreamWaitEvent")
    ]


def test_the_consumer_waits_for_an_event_of_the_producer(pair):
    cuda, stub = pair
    producer, consumer = stub.stream(1), stub.stream(1)
    assert cuda.stream_wait(producer, consumer) == 0
    assert ordering(stub) == [("cuEventRecord", producer), ("cuStreamWaitEvent", consumer)]
    record, wait = stub.of("cuEventRecord")[0], stub.of("cuStreamWaitEvent")[0]
    assert record.event == wait.event
    assert record.device == 1, "made and recorded in the stream's own context"
    assert stub.of("cuEventCreate")[0].flags == 2, "without timing"


def test_no_order_is_needed_within_a_stream(pair):
    cuda, stub = pair
    stream = stub.stream(0)
    for a, b in [(stream, stream), (0, 0), (0, 1), (1, 0), (1, 1), (2, 2)]:
        assert cuda.stream_wait(a, b) == 0
    assert stub.calls == []


def test_default_streams_keep_their_handles(pair):
    cuda, stub = pair
    stream = stub.stream(2)
    for producer, consumer in [(0, stream), (stream, 0), (2, stream), (stream, 2)]:
        stub.reset()
        assert cuda.stream_wait(producer, consumer) == 0
        assert ordering(stub) == [
            ("cuEventRecord", producer or LEGACY),
            ("cuStreamWaitEvent", consumer or LEGACY),
        ]
        # The default stream meant is that of the created stream's device, whatever is current.
        assert {call.device for call in stub.of("cuEventRecord")} == {2}
        assert {call.device for call in stub.of("cuStreamWaitEvent")} == {2}


def test_two_default_streams_belong_to_the_current_context(pair):
    cuda, stub = pair

    def check():
        assert cuda.stream_wait(LEGACY, PER_THREAD) == INVALID_CONTEXT
        assert cuda.set_device(3) == 0
        stub.reset()
        assert cuda.stream_wait(LEGACY, PER_THREAD) == 0
        assert ordering(stub) == [("cuEventRecord", 1), ("cuStreamWaitEvent", 2)]
        assert stub.of("cuEventRecord")[0].device == 3
        return True

    assert in_thread(check)


def test_streams_of_two_devices(pair):
    cuda, stub = pair
    producer, consumer = stub.stream(0), stub.stream(1)
    assert cuda.stream_wait(producer, consumer) == 0
    assert stub.of("cuEventRecord")[0].device == 0


def test_the_current_context_stays(pair):
    cuda, stub = pair

    def check():
        own = stub.context(2)
        for before in (None, own, stub.primary(1)):
            stub.make_current(before)
            assert cuda.stream_wait(stub.stream(1), stub.stream(1)) == 0
            assert stub.current_context == (before or 0)
            stub.fail("cuEventRecord", 700, times=9)  # also when something fails
            assert cuda.stream_wait(stub.stream(1), stub.stream(1)) == 700
            assert stub.current_context == (before or 0)
            stub.reset()
        return True

    assert in_thread(check)


def test_events_are_made_once_for_a_thread_and_context(pair):
    cuda, stub = pair
    streams = [stub.stream(0) for _ in range(5)]

    def check():
        stub.reset()
        for i in range(100):
            assert cuda.stream_wait(streams[i % 5], streams[(i + 1) % 5]) == 0
        assert stub.names.count("cuEventCreate") == 1
        assert cuda.stream_wait(stub.stream(1), stub.stream(1)) == 0
        assert stub.names.count("cuEventCreate") == 2
        return {call.event for call in stub.of("cuEventRecord")}

    before = stub.live_events
    first, second = in_thread(check), in_thread(check)
    assert not first & second, "threads do not share events"
    # A thread that Python has joined may still be on its way out.
    wait_until(lambda: stub.live_events == before, what="a thread's events did not go with it")


@pytest.mark.parametrize("context_ids", [True, False])
def test_more_contexts_than_slots(built, tmp_path, monkeypatch, context_ids):
    cuda, stub = load(built, tmp_path, monkeypatch, context_ids=context_ids)
    stub.start()
    contexts = [stub.context(i % 4) for i in range(40)]

    def check():
        for context in contexts * 2:
            stream, other = stub.stream(0, context), stub.stream(0, context)
            assert cuda.stream_wait(stream, other) == 0
        return stub.live_events

    assert in_thread(check) == 16
    wait_until(lambda: stub.live_events == 0)


@pytest.mark.parametrize("status", [1, 2])
def test_a_captured_consumer_is_left_alone(pair, status):
    cuda, stub = pair
    producer, consumer = stub.stream(0), stub.stream(0)
    stub.capture(consumer, status)
    assert cuda.stream_wait(producer, consumer) == 0
    assert ordering(stub) == []
    stub.capture(consumer, 0)
    assert cuda.stream_wait(producer, consumer) == 0
    assert len(ordering(stub)) == 2


def test_a_captured_producer_takes_the_consumer_into_its_graph(pair):
    cuda, stub = pair
    producer, consumer = stub.stream(0), stub.stream(0)
    stub.capture(producer)
    assert cuda.stream_wait(producer, consumer) == 0
    assert len(ordering(stub)) == 2


def test_events_survive_a_device_reset(pair):
    cuda, stub = pair
    assert cuda.stream_wait(stub.stream(0), stub.stream(0)) == 0
    stub.reset_device(0)
    stub.reset()
    assert cuda.stream_wait(stub.stream(0), stub.stream(0)) == 0
    assert stub.names.count("cuEventCreate") == 1, "the old event died with the reset: a new one"
    assert stub.names.count("cuStreamWaitEvent") == 1


@pytest.mark.parametrize(
    "function", ["cuStreamGetCtx", "cuStreamIsCapturing", "cuEventCreate", "cuStreamWaitEvent"]
)
def test_an_error_of_the_driver_is_returned(pair, function):
    cuda, stub = pair
    stub.fail(function, 906)
    assert cuda.stream_wait(stub.stream(0), stub.stream(0)) == 906
    assert cuda.stream_wait(stub.stream(0), stub.stream(0)) == 0


def test_synchronise(pair):
    cuda, stub = pair
    stream = stub.stream(1)
    assert cuda.set_device(0) == 0
    stub.reset()
    for handle in (stream, 0, 1, 2):
        assert cuda.stream_sync(handle) == 0
    assert [call.stream for call in stub.of("cuStreamSynchronize")] == [stream, 1, 1, 2]
    stub.fail("cuStreamSynchronize", 700)
    assert cuda.stream_sync(stream) == 700


def test_error_texts(pair):
    cuda, _ = pair
    assert cuda.error(1) == b"invalid argument (CUDA_ERROR_INVALID_VALUE)"
    assert cuda.error(INVALID_HANDLE) == b"invalid resource handle (CUDA_ERROR_INVALID_HANDLE)"
    assert cuda.error(31337) == b"unknown CUDA error 31337"
