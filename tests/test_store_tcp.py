"""TCPStore: strangers, forged frames, a server that leaves or dies, many clients, forks and exits."""

from __future__ import annotations

import os
import random
import resource
import selectors
import signal
import socket
import struct
import threading
import time

import pytest

from helpers.scripts import finish, start, wait_until
from pynccl import StoreError, StoreTimeoutError
from pynccl.distributed import TCPStore
from pynccl.distributed._store import protocol
from pynccl.distributed._store.protocol import Greeter, answer_greeting, key_of

SECRET = "of this test"


@pytest.fixture
def server():
    store = TCPStore(is_master=True, timeout=10, secret=SECRET)
    yield store
    store.close()


def client(server: TCPStore, **options) -> TCPStore:
    return TCPStore(port=server.port, timeout=options.pop("timeout", 10), secret=SECRET, **options)


def dial(server: TCPStore) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    sock.settimeout(10)
    return sock


def is_closed(sock: socket.socket) -> bool:
    """Read to the end; the server must hang up, not fall silent."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


# ---- strangers ---------------------------------------------------------------------------------------


def test_another_secret_is_refused_at_once(server):
    begun = time.monotonic()
    for secret in ("wrong", None):
        with pytest.raises(StoreError, match=rf"refused at .*:{server.port}: .* another secret"):
            TCPStore(port=server.port, secret=secret, timeout=30)
    assert time.monotonic() - begun < 5


def test_a_server_that_does_not_know_the_secret_is_not_believed():
    listener = socket.create_server(("127.0.0.1", 0))

    def impostor():
        for answer in (os.urandom(32), None):
            sock, _ = listener.accept()
            with sock:
                if answer is None:
                    sock.sendall(b"220 smtp.example.org ESMTP ready\r\n")
                    continue
                greeter = Greeter(key_of(b"a guess"))
                sock.sendall(greeter.greeting)
                sock.recv(protocol.HELLO_SIZE)
                sock.sendall(answer)

    thread = threading.Thread(target=impostor)
    thread.start()
    port = listener.getsockname()[1]
    with pytest.raises(StoreError, match="the server does not know the secret"):
        TCPStore(port=port, secret=SECRET, timeout=5)
    with pytest.raises(StoreError, match="not a pynccl store"):
        TCPStore(port=port, secret=SECRET, timeout=5)
    thread.join(5)
    listener.close()


def test_junk_costs_the_server_nothing(server):
    rng = random.Random(11)
    good = client(server)
    for round_ in range(150):
        with dial(server) as sock:
            kind = round_ % 4
            if kind == 0:
                junk = rng.randbytes(rng.randrange(1, 300))
            elif kind == 1:
                junk = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
            elif kind == 2:  # the right beginning, then junk
                junk = protocol._MAGIC + rng.randbytes(rng.randrange(48, 200))
            else:
                junk = b"\0" * rng.randrange(57, 4000)
            try:
                sock.sendall(junk)
            except ConnectionError:
                continue
            assert is_closed(sock)
        if not round_ % 10:
            good.set("n", b"%d" % round_)
            assert server.get("n") == b"%d" % round_
    wait_until(lambda: len(server._server._peers) == 2, what="strangers are left")


def handshake(server: TCPStore) -> tuple[socket.socket, protocol.Channel]:
    sock = dial(server)
    greeting = sock.recv(protocol.GREETING_SIZE, socket.MSG_WAITALL)
    hello, welcome, channel = answer_greeting(key_of(SECRET.encode()), greeting)
    sock.sendall(hello)
    assert sock.recv(protocol.WELCOME_SIZE, socket.MSG_WAITALL) == welcome
    return sock, channel


SET = protocol.pack(1, 1.0, [b"forged", b"yes"])


def frames(channel: protocol.Channel) -> dict[str, bytes]:
    good = channel.seal(SET)
    flipped = bytearray(good)
    flipped[-40] ^= 1
    return {
        "changed": bytes(flipped),
        "skipped ahead": channel.seal(SET),
        "without a tag": good[:-32] + bytes(32),
        "too long": struct.pack("<I", protocol.MAX_PAYLOAD + 1) + bytes(100),
        "too short": struct.pack("<I", 1) + bytes(100),
    }


@pytest.mark.parametrize(
    "kind", ["changed", "skipped ahead", "without a tag", "too long", "too short"]
)
def test_a_forged_frame_ends_the_connection_and_changes_nothing(server, kind):
    sock, channel = handshake(server)
    with sock:
        sock.sendall(frames(channel)[kind])
        assert is_closed(sock)
    assert not server.check(["forged"])


def test_a_frame_repeated_or_of_another_connection_is_refused(server):
    sock, channel = handshake(server)
    frame = channel.seal(SET)
    with sock:
        sock.sendall(frame)
        assert sock.recv(4)  # done, for once it is right
        server.delete("forged")
        sock.sendall(frame)
        assert is_closed(sock)
    other, _ = handshake(server)
    with other:
        other.sendall(frame)
        assert is_closed(other)
    assert not server.check(["forged"])


@pytest.mark.parametrize(
    "payload",
    [
        protocol.pack(77, 1.0, []),  # no such verb
        protocol.pack(1, 1.0, [b"key without value"]),
        protocol.pack(3, 1.0, [b"key", b"not a number"]),
        protocol.pack(7, 1.0, []),
        struct.pack("<BdI", 2, 1.0, 1 << 31),  # more strings than bytes
        struct.pack("<BdII", 2, 1.0, 1, 1 << 31),
        protocol.pack(1, 1.0, [b"a", b"b"]) + b"left over",
    ],
)
def test_a_member_that_talks_nonsense_loses_its_connection_only(server, payload):
    sock, channel = handshake(server)
    with sock:
        sock.sendall(channel.seal(payload))
        assert is_closed(sock)
    server.set("still", b"here")
    assert server.get("still") == b"here"


@pytest.mark.slow
def test_the_slow_are_hung_up_on_and_keep_nobody_waiting(server):
    # Slow-loris: a byte now and then, for ever.
    slow = [dial(server) for _ in range(40)]
    begun = time.monotonic()
    hello = protocol._MAGIC + bytes(48)
    gone = 0
    for i in range(60):
        for sock in slow:
            try:
                sock.send(hello[i % 50 : i % 50 + 1])
            except ConnectionError:
                gone += 1
        good = client(server)
        good.set("a", b"")
        good.close()
        if gone >= len(slow):
            break
        time.sleep(0.15)
    assert 4 < time.monotonic() - begun < 9
    for sock in slow:
        assert is_closed(sock)
        sock.close()


def test_strangers_beyond_a_thousand_push_out_the_oldest(monkeypatch):
    from pynccl.distributed._store import server as module

    monkeypatch.setattr(module, "_MAX_STRANGERS", 20)
    store = TCPStore(is_master=True, secret=SECRET)
    strangers = [dial(store) for _ in range(60)]
    assert client(store).add("n", 1) == 1
    assert len(store._server._strangers) <= 20
    assert is_closed(strangers[0])
    for sock in strangers:
        sock.close()
    store.close()


def test_a_client_that_does_not_read_costs_one_answer(server):
    server.set("big", bytes(8 << 20))
    sock, channel = handshake(server)
    get = protocol.pack(2, 1.0, [b"big"])
    sock.setblocking(False)
    try:
        for _ in range(2000):
            sock.sendall(channel.seal(get))
    except BlockingIOError:
        pass
    assert server.add("n", 1) == 1
    assert sum(len(peer.out) for peer in server._server._peers) <= (8 << 20) + 100
    sock.close()


def test_a_value_over_the_limit_is_refused_before_it_is_sent(server):
    with pytest.raises(ValueError, match=r"set: \d+ bytes in one call; at most 67108864"):
        server.set("a", bytes(protocol.MAX_PAYLOAD))
    half = bytes(protocol.MAX_PAYLOAD // 2 + 100)
    server.set("a", half), server.set("b", half)
    with pytest.raises(StoreError, match="the answer has"):
        server.multi_get(["a", "b"])
    assert server.get("a") == half


# ---- where it listens --------------------------------------------------------------------------------


def test_it_listens_on_the_loopback_only_unless_told(server):
    assert server._server.address[0] == "127.0.0.1"
    with pytest.raises(ValueError, match="beyond this machine, give a secret"):
        TCPStore("0.0.0.0", is_master=True)
    with pytest.raises(ValueError, match="'every interface', beyond this machine"):
        TCPStore(is_master=True, bind="")
    with TCPStore("localhost", is_master=True, bind="", secret=SECRET) as wide:
        assert TCPStore("localhost", wide.port, secret=SECRET).add("n", 1) == 1


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"port": 0}, ValueError, "port is 0; expected 1 to 65535, or 0 where is_master"),
        ({"port": 70000}, ValueError, "port is 70000"),
        ({"port": "1"}, TypeError, "port is str"),
        ({"host": 1}, TypeError, "host is int"),
        ({"port": 1, "secret": 5}, TypeError, "secret is int; expected bytes or str"),
        ({"port": 1, "timeout": -1}, ValueError, "TCPStore: timeout is -1"),
    ],
)
def test_wrong_arguments_are_named(options, error, text):
    with pytest.raises(error, match=text):
        TCPStore(**options)


def test_a_taken_port_is_named(server):
    with pytest.raises(StoreError, match=rf"cannot listen on 127.0.0.1:{server.port}: .*in use"):
        TCPStore(port=server.port, is_master=True)


# ---- deadlines ---------------------------------------------------------------------------------------


def test_nobody_at_the_port_ends_in_time_and_names_it():
    # B099
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    begun = time.monotonic()
    with pytest.raises(
        StoreTimeoutError, match=rf"no server at 127.0.0.1:{port} within 1 s: .*refused"
    ):
        TCPStore(port=port, timeout=1)
    assert 0.9 < time.monotonic() - begun < 2


def test_a_port_that_accepts_and_says_nothing_ends_in_time():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        begun = time.monotonic()
        with pytest.raises(StoreTimeoutError, match="within 0.5 s: timed out"):
            TCPStore(port=listener.getsockname()[1], timeout=0.5)
        assert time.monotonic() - begun < 2


def test_a_client_may_come_before_the_server():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    made = []
    early = threading.Thread(target=lambda: made.append(TCPStore(port=port, timeout=10)))
    early.start()
    time.sleep(0.3)
    with TCPStore(port=port, is_master=True) as server:
        early.join(5)
        made[0].set("a", b"1")
        assert server.get("a") == b"1"
        made[0].close()


def test_the_server_waits_for_its_world_and_says_who_came():
    with pytest.raises(StoreTimeoutError, match=r"1 of 3 processes came to .* within 0.3 s"):
        TCPStore(world_size=3, is_master=True, timeout=0.3)
    lazy = TCPStore(world_size=2, is_master=True, timeout=5, wait_for_workers=False)
    TCPStore(port=lazy.port, world_size=2).close()
    assert lazy._server.wait_for_workers(5) == 2
    lazy.close()


STAY = """
    import sys, time
    from pynccl.distributed import TCPStore
    store = TCPStore(
        is_master=True, world_size=2, wait_for_workers=False, secret="of this test", timeout=60
    )
    print(store.port, flush=True)
    sys.stdin.close()
    time.sleep(float(sys.argv[1]))
"""


def elsewhere(seconds: float):
    process = start(STAY, str(seconds))
    return process, int(process.stdout.readline())


@pytest.mark.fault
def test_a_stopped_server_ends_in_a_timeout_and_a_killed_one_at_once():
    process, port = elsewhere(60)
    store = TCPStore(port=port, secret=SECRET, timeout=10)
    process.send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(StoreTimeoutError, match=rf"get: no answer within 0.5 s .*:{port} .*'key'"):
        store.get("key", timeout=0.5)
    assert time.monotonic() - begun < 2
    process.send_signal(signal.SIGCONT)
    store.set("key", b"")
    failed = []

    def wait():
        try:
            store.wait(["never"])
        except StoreError as error:
            failed.append((str(error), time.monotonic()))

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.3)
    begun = time.monotonic()
    process.kill()
    process.communicate()
    waiter.join(5)
    ((text, when),) = failed
    assert f"the server at 127.0.0.1:{port} is gone" in text and "'never'" in text
    assert when - begun < 1
    begun = time.monotonic()
    with pytest.raises(StoreError, match=f"set: the server at 127.0.0.1:{port} is gone"):
        store.set("a", b"")
    assert time.monotonic() - begun < 1


# ---- who leaves first --------------------------------------------------------------------------------


@pytest.mark.fault
def test_rank_0_leaves_first_and_the_server_stays_for_the_others():
    # B100: its process ends at once; the other comes then, works a second later, and leaves.
    process, port = elsewhere(0)
    time.sleep(0.5)
    store = TCPStore(port=port, world_size=2, secret=SECRET, timeout=10)
    time.sleep(1)
    store.set("a", b"1")
    assert store.get("a") == b"1" and process.poll() is None
    store.close()
    begun = time.monotonic()
    assert finish(process)[0] == 0
    assert time.monotonic() - begun < 1.5


@pytest.mark.fault
def test_a_server_that_cannot_stay_longer_says_so():
    process, port = elsewhere(0)
    store = TCPStore(port=port, world_size=2, secret=SECRET, timeout=30)
    begun = time.monotonic()
    with pytest.raises(
        StoreError, match=rf"the server at 127.0.0.1:{port} is gone: the process that"
    ):
        store.wait(["never"])
    assert 2 < time.monotonic() - begun < 5
    assert finish(process)[0] == 0


@pytest.mark.fault
def test_a_world_that_never_comes_does_not_keep_the_process():
    begun = time.monotonic()
    process, _ = elsewhere(0)
    assert finish(process)[0] == 0
    assert 2.5 < time.monotonic() - begun < 6


def test_a_closed_store_serves_on_in_its_process(server):
    other = client(server)
    server.close()
    other.set("a", b"1")
    assert other.get("a") == b"1"
    thread = server._server._thread
    other.close()
    thread.join(3)
    assert not thread.is_alive()
    with socket.create_server(("127.0.0.1", server.port)):
        pass  # the port is free


def test_a_program_that_ends_with_its_store_open_ends_at_once():
    # B074
    for world in ("None", "1"):
        code = f"""
            from pynccl.distributed import TCPStore
            store = TCPStore(is_master=True, world_size={world})
            clone = store.clone()
            print(store.add("n", 1) + clone.add("n", 1))
        """
        begun = time.monotonic()
        assert finish(start(code)) == (0, "3\n", "")
        assert time.monotonic() - begun < 5


def test_a_forked_child_holds_no_port_and_no_connection():
    code = """
        import os, time
        from pynccl.distributed import TCPStore
        store = TCPStore(is_master=True)
        store.set("a", b"1")
        port = store.port
        r, w = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(w)
            os.read(r, 1)       # lives on, and does nothing
            os._exit(0)
        os.close(r)
        thread = store._server._thread
        store.close()
        thread.join(3)
        print(thread.is_alive())
        TCPStore(port=port, is_master=True).close()
        os.close(w)
        os.waitpid(pid, 0)
    """
    assert finish(start(code)) == (0, "False\n", "")


# ---- many clients ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_512_clients_meet_on_one_server():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2048:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
    nclients = 512
    before = threading.active_count()
    server = TCPStore(is_master=True, secret=SECRET, timeout=60)
    assert threading.active_count() == before + 1, "one thread, however many clients"
    clients = [client(server, timeout=60) for _ in range(nclients)]
    assert threading.active_count() == before + 1
    # All wait for one key, then each adds itself; the waits need no thread on this side either.
    selector = selectors.DefaultSelector()
    wait = protocol.pack(4 + 1, 60.0, [b"go"])
    for one in clients:
        link = one._links.idle[0]
        link.sock.sendall(link.channel.seal(wait))
        selector.register(link.sock, selectors.EVENT_READ, link)
    wait_until(lambda: len(server._server._waiting.get(b"go", ())) == nclients)
    begun = time.monotonic()
    server.set("go", b"")
    for one in clients:
        link = one._links.idle[0]
        link.sock.settimeout(30)
        while missing := link.channel.wanted(link.received):
            link.received += link.sock.recv(missing)
        assert protocol.unpack(link.channel.open(link.received)) == (0, 0.0, [])
    for one in clients:
        one.add("n", 1)
    assert time.monotonic() - begun < 20
    assert server.add("n", 0) == nclients
    for one in clients:
        one.close()
    wait_until(lambda: len(server._server._peers) == 1)
    selector.close()
    server.close()


def test_without_descriptors_the_server_waits_for_some():
    code = """
        import os, resource, socket, time
        from pynccl.distributed import TCPStore
        server = TCPStore(is_master=True, timeout=10)
        caller = socket.socket()
        caller.settimeout(5)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        held = []
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        caller.connect(("127.0.0.1", server.port))
        server.set("a", b"1")       # the connection that is there works on
        cpu = time.process_time()
        time.sleep(1)
        assert time.process_time() - cpu < 0.3, "the server's thread spins"
        for fd in held:
            os.close(fd)
        print(len(caller.recv(100)), TCPStore(port=server.port, timeout=5).get("a"))
    """
    assert finish(start(code)) == (0, "24 b'1'\n", "")


def test_without_descriptors_strangers_go_first():
    code = """
        import os, resource, socket
        from pynccl.distributed import TCPStore
        server = TCPStore(is_master=True, timeout=10)
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, used + 8))
        held = []
        try:
            while True:
                held.append(socket.create_connection(("127.0.0.1", server.port)))
        except OSError:
            pass
        server.set("a", b"1")
        held[0].settimeout(3)       # sooner than its five seconds are over
        while held[0].recv(100):
            pass
        for sock in held:
            sock.close()
        print(TCPStore(port=server.port, timeout=5).get("a"))
    """
    assert finish(start(code)) == (0, "b'1'\n", "")
