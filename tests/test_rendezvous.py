"""Ranks that find each other, and everything that can keep them from it.

Ranks are threads with an environment each where that is enough, and processes where a rank must die.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid

import pytest

from pynccl import _rendezvous
from pynccl._rendezvous import from_environ, share
from pynccl.errors import (
    InvalidUsageError,
    LibraryNotFoundError,
    NCCLError,
    NCCLTimeoutError,
    RemoteError,
)

SECRET = bytes(range(128))


def unexpected():
    raise AssertionError("make was called off rank 0")


def free_port():
    """Return the first of nine consecutive free ports."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return min(sock.getsockname()[1], 65000)


def environment(rank, nranks, *, job=None, machines=1, **more):
    env = {"RANK": str(rank), "WORLD_SIZE": str(nranks), "PYNCCL_JOB_ID": job or uuid.uuid4().hex}
    if machines == 1:
        env.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(nranks))
    else:  # each rank alone on its machine: the ranks must not use what only one machine has
        env.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    return env | more


class Ranks:
    """Threads that call `share` as the ranks of one job."""

    def __init__(self, nranks, *, machines=1, timeout=10.0, make=lambda: SECRET, **env):
        self.nranks = nranks
        self.timeout = timeout
        self.make = make
        self.job = uuid.uuid4().hex
        self.env = {"machines": machines, **env}
        if machines > 1:
            self.env.setdefault("MASTER_PORT", str(free_port()))
        self.results = {}
        self.seconds = {}
        self.threads = []

    def environ(self, rank, nranks=None):
        return environment(rank, nranks or self.nranks, job=self.job, **self.env)

    def start(self, *ranks, claim=None, nranks=None):
        for rank in ranks:
            args = (rank, rank if claim is None else claim, nranks or self.nranks)
            thread = threading.Thread(target=self._rank, args=args, daemon=True)
            self.threads.append(thread)
            thread.start()
        return self

    def _rank(self, key, rank, nranks):
        since = time.monotonic()
        make = self.make if rank == 0 else unexpected
        env = self.environ(rank, nranks)
        try:
            result = share(rank, nranks, make, timeout=self.timeout, env=env)
        except Exception as error:
            result = error
        self.results[key] = result
        self.seconds[key] = time.monotonic() - since

    def join(self, seconds=30.0):
        deadline = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), f"a rank hangs; the others: {self.results}"
        return self.results


@pytest.fixture
def as_processes(monkeypatch):
    """Let two threads that claim one rank count their meetings apart, as two processes do."""

    class Forgetful(dict):
        def get(self, key, default=None):
            return default

    monkeypatch.setattr(_rendezvous, "_begun", Forgetful())


@pytest.fixture(params=[1, 2], ids=["unix", "tcp"])
def machines(request):
    return request.param


@pytest.mark.parametrize("nranks", [1, 2, 5])
def test_every_rank_gets_what_rank_0_made(nranks, machines):
    results = Ranks(nranks, machines=machines).start(*range(nranks)).join()
    assert results == dict.fromkeys(range(nranks), SECRET)


def test_rank_0_may_come_last(machines):
    ranks = Ranks(3, machines=machines).start(2, 1)
    time.sleep(0.3)
    assert ranks.start(0).join() == dict.fromkeys(range(3), SECRET)


def test_nobody_leaves_before_everybody_came(machines):
    ranks = Ranks(3, machines=machines).start(0, 1)
    time.sleep(0.3)
    assert ranks.results == {}
    assert ranks.start(2).join() == dict.fromkeys(range(3), SECRET)


def test_one_job_may_meet_many_times(machines):
    """A rank that is an exchange ahead must not meet one that is behind."""
    nranks, rounds = 3, 20
    env = Ranks(nranks, machines=machines).environ
    got = {rank: [] for rank in range(nranks)}
    count = iter(range(rounds))

    def work(rank):
        for i in range(rounds):
            if (i + rank) % 7 == 0:
                time.sleep(0.01)
            make = (lambda: b"%d" % next(count)) if rank == 0 else unexpected
            got[rank].append(share(rank, nranks, make, timeout=10, env=env(rank)))

    threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(nranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert got == {rank: [b"%d" % i for i in range(rounds)] for rank in range(nranks)}


def test_two_jobs_at_once_do_not_meet(machines):
    """They share a machine, and over TCP also the port."""
    port = {"MASTER_PORT": str(free_port())} if machines > 1 else {}
    jobs = [Ranks(3, machines=machines, make=lambda i=i: b"job %d" % i, **port) for i in range(3)]
    for rank in range(3):
        for job in jobs:
            job.start(rank)
    for i, job in enumerate(jobs):
        assert job.join() == dict.fromkeys(range(3), b"job %d" % i)


def test_missing_ranks_are_named_on_every_rank(machines):
    ranks = Ranks(5, machines=machines, timeout=1.0).start(0, 2, 4)
    for rank, error in ranks.join().items():
        assert isinstance(error, NCCLTimeoutError)
        assert error.rank == rank
        assert "ranks 1, 3 of 5 did not come within 1 s (3 came)" in str(error)
        assert 0.8 < ranks.seconds[rank] < 2.5


def test_a_missing_rank_0_is_named(machines):
    ranks = Ranks(3, machines=machines, timeout=0.7).start(1, 2)
    for rank, error in ranks.join().items():
        assert isinstance(error, NCCLTimeoutError)
        assert error.rank == rank
        assert "rank 0 did not come within 0.7 s" in str(error)
        assert 0.5 < ranks.seconds[rank] < 2.0


def test_a_failure_of_rank_0_is_raised_on_all(machines):
    """Also on a rank that comes when rank 0 has failed already; rank 0's own error is unchanged."""

    def make():
        raise LibraryNotFoundError("no libnccl.so.2 anywhere")

    ranks = Ranks(3, machines=machines, make=make).start(0, 1)
    time.sleep(0.3)
    results = ranks.start(2).join()
    assert type(results[0]) is LibraryNotFoundError
    for rank in (1, 2):
        assert isinstance(results[rank], RemoteError)
        assert "rank 0 failed: LibraryNotFoundError: no libnccl.so.2 anywhere" in str(results[rank])
        assert ranks.seconds[rank] < 2


def test_a_failure_of_rank_0_does_not_wait_for_ever():
    def make():
        raise ValueError("no")

    ranks = Ranks(2, timeout=0.5, make=make).start(0)
    assert str(ranks.join()[0]) == "no"
    assert ranks.seconds[0] < 2


@pytest.mark.usefixtures("as_processes")
def test_a_rank_that_comes_twice_is_an_error_for_all(machines):
    ranks = Ranks(3, machines=machines).start(0, 1)
    time.sleep(0.2)
    ranks.start(99, claim=1)
    time.sleep(0.2)
    results = ranks.start(2).join()
    assert set(results) == {0, 1, 2, 99}
    for error in results.values():
        assert isinstance(error, InvalidUsageError)
        assert "rank 1 came twice" in str(error)
    assert max(ranks.seconds.values()) < 8


@pytest.mark.usefixtures("as_processes")
def test_a_second_rank_0_is_an_error_for_all():
    ranks = Ranks(2).start(0)
    time.sleep(0.2)
    results = ranks.start(99, claim=0).join()
    for error in results.values():
        assert isinstance(error, InvalidUsageError)
        assert "rank 0 came twice" in str(error)
        assert f"(process {os.getpid()})" in str(error)


def test_ranks_must_agree_on_their_number(machines):
    ranks = Ranks(3, machines=machines).start(0, 1)
    ranks.start(2, nranks=4)
    for error in ranks.join().values():
        assert isinstance(error, InvalidUsageError)
        assert "has 4 ranks in its job, rank 0 has 3" in str(error)


def test_more_than_an_id_is_refused():
    results = Ranks(2, make=lambda: bytes(10000)).start(0, 1).join()
    assert type(results[0]) is ValueError
    assert "10000 bytes" in str(results[1])


def connect(job, machines, env):
    """Connect to rank 0 as a stranger would."""
    deadline = time.monotonic() + 5
    while True:
        try:
            if machines == 1:
                with contextlib.ExitStack() as stack:
                    sock = stack.enter_context(socket.socket(socket.AF_UNIX))
                    sock.connect(_rendezvous._Local(f"{job}/1").address)
                    stack.pop_all()
                    return sock
            return socket.create_connection(("127.0.0.1", int(env["MASTER_PORT"])), timeout=5)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 1000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        _rendezvous._MAGIC + b"\xff" * 48,
        _rendezvous._HELLO.pack(_rendezvous._MAGIC, 1, 3, 10.0, b"\x00" * 32),
    ],
    ids=["http", "zeros", "tls", "magic", "forged"],
)
def test_strangers_are_hung_up_on_and_cost_nothing(junk, machines):
    ranks = Ranks(3, machines=machines).start(0, 1)
    env = ranks.environ(0)
    job = _rendezvous.job_name(env, local=machines == 1)
    since = time.monotonic()
    for _ in range(20):
        with connect(job, machines, env) as sock:
            sock.settimeout(3)
            sock.sendall(junk)
            received = b""
            with contextlib.suppress(ConnectionError):
                while part := sock.recv(4096):
                    received += part
            assert SECRET not in received
    assert time.monotonic() - since < 3
    assert ranks.start(2).join() == dict.fromkeys(range(3), SECRET)


def test_silent_strangers_cost_nothing(machines):
    ranks = Ranks(3, machines=machines).start(0, 1)
    env = ranks.environ(0)
    job = _rendezvous.job_name(env, local=machines == 1)
    silent = [connect(job, machines, env) for _ in range(30)]
    try:
        assert ranks.start(2).join() == dict.fromkeys(range(3), SECRET)
        assert max(ranks.seconds.values()) < 5
    finally:
        for sock in silent:
            sock.close()


def test_silent_strangers_are_dropped(monkeypatch):
    monkeypatch.setattr(_rendezvous, "_HELLO_SECONDS", 0.2)
    ranks = Ranks(2).start(0)
    job = _rendezvous.job_name(ranks.environ(0), local=True)
    with connect(job, 1, None) as sock:
        sock.settimeout(5)
        assert len(sock.recv(100)) == _rendezvous._GREETING.size
        assert sock.recv(1) == b""
    assert ranks.start(1).join() == dict.fromkeys(range(2), SECRET)


def test_another_users_processes_are_strangers(monkeypatch):
    """Both ways: rank 0 does not answer them, and a peer does not believe them."""
    real = _rendezvous.process_at
    monkeypatch.setattr(_rendezvous, "process_at", lambda sock: (real(sock)[0], os.geteuid() + 1))
    results = Ranks(2, timeout=0.5).start(0, 1).join()
    assert "rank 1 of 2 did not come" in str(results[0])
    assert "what listens there is not rank 0 of this job" in str(results[1])


def test_a_foreign_service_on_the_port_is_passed_over():
    """As torch's own store, in torchrun's agent or in rank 0: rank 0 takes the next port."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        results = Ranks(2, machines=2, MASTER_PORT=port).start(0, 1).join()
        assert results == dict.fromkeys(range(2), SECRET)


def test_the_port_of_torchruns_agent_is_left_alone():
    port = free_port()
    env = {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = Ranks(2, machines=2, **env).start(0)
    time.sleep(0.3)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1)
    assert ranks.start(1).join() == dict.fromkeys(range(2), SECRET)


def test_no_port_free_is_a_clear_error():
    held = []
    try:
        port = free_port()
        for i in range(_rendezvous._TCP_PORTS):
            with contextlib.suppress(OSError):  # someone else's: as good
                held.append(socket.create_server(("127.0.0.1", port + i)))
        error = Ranks(2, machines=2, MASTER_PORT=str(port)).start(0).join()[0]
        assert isinstance(error, NCCLError)
        assert f"no port to listen on at 127.0.0.1:{port}-{port + 7}" in str(error)
    finally:
        for sock in held:
            sock.close()


def test_several_machines_need_an_address():
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with pytest.raises(ValueError, match="MASTER_ADDR is not set"):
        share(1, 2, unexpected, timeout=1, env=env)


RANK = """
    import os, sys, time
    from pynccl._rendezvous import share
    rank = int(os.environ["RANK"])
    try:
        result = share(rank, int(os.environ["WORLD_SIZE"]), lambda: b"x" * 128, timeout=20)
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(result.decode(), flush=True)
"""


@pytest.fixture
def process(tmp_path):
    """Start rank processes; those left at the end are killed."""
    started = []

    def start(env):
        command = [sys.executable, "-c", textwrap.dedent(RANK)]
        child = subprocess.Popen(
            command,
            env=os.environ | env,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


@pytest.mark.fault
@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies_waiting_is_an_error_for_the_others(process, machines, dies):
    ranks = Ranks(3, machines=machines)
    children = {rank: process(ranks.environ(rank)) for rank in (0, 1)}
    time.sleep(0.8)
    assert {rank: child.poll() for rank, child in children.items()} == {0: None, 1: None}
    children[dies].send_signal(signal.SIGKILL)
    survivor = children[1 - dies]
    since = time.monotonic()
    _, text = survivor.communicate(timeout=15)
    assert survivor.returncode == 1
    assert text.startswith("RemoteError")
    assert f"rank {dies}" in text
    assert "went away" in text
    if machines == 1 and dies == 1:
        assert f"(process {children[dies].pid})" in text
    assert time.monotonic() - since < 8


@pytest.mark.fault
def test_a_killed_job_leaves_its_name_free(process):
    ranks = Ranks(2)
    first = process(ranks.environ(0))
    time.sleep(0.5)
    first.kill()
    first.wait(5)
    children = [process(ranks.environ(rank)) for rank in range(2)]
    for child in children:
        assert child.communicate(timeout=15)[0] == "x" * 128 + "\n"


@pytest.mark.parametrize(
    ("env", "layout"),
    [
        ({}, (0, 1, 0, 1)),
        # A batch script that srun did not start is no rank of eight.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1, 0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, (1, 2, 1, 2)),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
            (5, 8, 1, 4),
        ),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node7"},
            (5, 8, 1, 0),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            (3, 4, 1, 2),
        ),
        (
            {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            (3, 4, 1, 2),
        ),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 4, 3, 4)),
        (
            {
                "SLURM_PROCID": "9",
                "SLURM_NTASKS": "64",
                "SLURM_STEP_NUM_TASKS": "11",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
                "SLURM_NODEID": "2",
            },
            (9, 11, 1, 3),
        ),
        # The inner launcher wins: Hydra in a Slurm step; and a torchrun under mpiexec.
        (
            {
                "PMI_RANK": "1",
                "PMI_SIZE": "2",
                "MPI_LOCALRANKID": "1",
                "MPI_LOCALNRANKS": "2",
                "SLURM_PROCID": "0",
                "SLURM_STEP_NUM_TASKS": "1",
            },
            (1, 2, 1, 2),
        ),
        (
            {
                "RANK": "0",
                "WORLD_SIZE": "1",
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "4",
            },
            (0, 1, 0, 1),
        ),
        # srun that offers PMI: PMI's variables do not say what is on this machine, Slurm's do.
        (
            {
                "PMI_RANK": "3",
                "PMI_SIZE": "4",
                "SLURM_PROCID": "3",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
                "SLURM_NODEID": "1",
            },
            (3, 4, 1, 2),
        ),
    ],
)
def test_launchers_are_understood(env, layout):
    assert from_environ(env) == layout


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0"}, "of RANK and WORLD_SIZE, WORLD_SIZE is not set; `pynccl run"),
        ({"WORLD_SIZE": "2"}, "of RANK and WORLD_SIZE, RANK is not set"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE is not set"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set"),
        ({"PMI_RANK": "1"}, "of PMI_RANK and PMI_SIZE, PMI_SIZE is not set"),
        (
            {"LOCAL_RANK": "1"},
            "LOCAL_RANK is set, but neither RANK nor WORLD_SIZE; set both, or unset",
        ),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE is set, but neither RANK nor WORLD_SIZE"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x', not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2; expected 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is 0; expected 1 or more"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK is 2; expected 0 to 1",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node7"}, "LOCAL_RANK is not set"),
    ],
)
def test_what_is_missing_or_wrong_is_named(env, message):
    with pytest.raises(ValueError, match=r"^init: ") as caught:
        from_environ(env)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("env", "host", "port"),
    [
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1000"}, "a", 1000),
        ({"SLURM_JOB_NODELIST": "node[004-007,9],big1", "MASTER_PORT": "1"}, "node004", 1),
        ({"SLURM_JOB_NODELIST": "big1,node[004-007,9]", "MASTER_PORT": "1"}, "big1", 1),
        ({"SLURM_JOB_NODELIST": "alone", "MASTER_PORT": "65535"}, "alone", 65527),
    ],
)
def test_where_several_machines_meet(env, host, port):
    remote = _rendezvous._Remote("job", env)
    assert (remote.host, remote.ports[0]) == (host, port)


def test_a_port_is_derived_where_none_is_given():
    def ports(job):
        return _rendezvous._Remote(job, {"MASTER_ADDR": "a"}).ports

    assert ports("job 1") == ports("job 1")
    assert ports("job 1") != ports("job 2")
