"""Streams of the host library and their process: fork, Ctrl-C, exit, leftovers, and the threads of JAX."""

import pytest

from helpers import scripts


def test_threads_and_files_come_back():
    printed = scripts.run(
        """
        import os, time
        from array import array
        import pynccl
        from pynccl.host import Stream

        def state():
            return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

        comm = pynccl.Communicator(1, pynccl.unique_id("host"), 0)
        before = state()
        for _ in range(50):
            with Stream() as s:
                comm.all_reduce(array("d", [1.0]), stream=s)
                s.record().synchronize()
        end = time.monotonic() + 5
        while state() != before and time.monotonic() < end:
            time.sleep(0.01)
        print(before == state(), before, state())
        comm.close()
        """
    )
    assert printed.startswith("True"), printed


def test_a_forked_child_has_no_streams_of_its_parent():
    printed = scripts.run(
        """
        import os, threading
        from array import array
        import pynccl
        from pynccl.host import Stream

        opened, s, x = threading.Event(), Stream(), array("d", [1.0])
        with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm:
            s.call(opened.wait, 20)
            out = comm.all_reduce(x, stream=s)
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    s.synchronize(5)
                except pynccl.InvalidArgumentError:
                    mine, seen = Stream(), []
                    mine.call(seen.append, 1)
                    mine.synchronize(5)
                    status = 0 if seen == [1] else 2
                finally:
                    os._exit(status)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            opened.set()
            s.synchronize()
            print(status, out[0])
        """
    )
    assert printed.split() == ["0", "1.0"]


def test_ctrl_c_ends_a_wait():
    printed = scripts.run(
        """
        import os, signal, threading, time
        from pynccl.host import Stream
        s = Stream()
        s.call(time.sleep, 2)
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        try:
            s.synchronize()
        except KeyboardInterrupt:
            print("stopped", time.monotonic() - start < 1.5)
        """
    )
    assert printed.split() == ["stopped", "True"]


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "os._exit(0)"])
def test_the_process_ends_with_work_on_a_stream(end):
    script = scripts.start(
        f"""
        import os, time, array
        import pynccl
        from pynccl.host import Stream
        comm = pynccl.Communicator(1, pynccl.unique_id("host"), 0)
        s = Stream()
        s.call(time.sleep, 0.2)
        for _ in range(100):
            comm.all_reduce(array.array("d", [1.0]), stream=s)
        print("end", flush=True)
        {end}
        """
    )
    status, out, err = scripts.finish(script, 20)
    assert out.split() == ["end"]
    assert status == (3 if "3" in end else 0), err
    assert "Fatal" not in err


def test_a_result_that_never_changes_is_complete():
    pytest.importorskip("jax")
    printed = scripts.run(
        """
        import jax.numpy as jnp
        import pynccl
        from pynccl.host import Stream

        with pynccl.Communicator(1, pynccl.unique_id("host"), 0) as comm, Stream() as s:
            print(comm.all_reduce(jnp.arange(4.0), stream=s).tolist())
            print(comm.send_recv(jnp.arange(4.0), 0, stream=s).tolist())
        """,
        limit=60,
        PYNCCL_HOST_DELAY="150",
        JAX_PLATFORMS="cpu",
    )
    assert printed.splitlines() == ["[0.0, 1.0, 2.0, 3.0]"] * 2
