"""What every store does alike: the verbs against a dictionary, waits, timeouts, prefixes, wrong arguments."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from helpers.scripts import finish, start
from pynccl import StoreError, StoreTimeoutError
from pynccl.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

KINDS = ["hash", "file", "tcp", "prefix"]
FILES = itertools.count()


class Opened:
    """A store of one kind, as two handles where the kind allows: what one sets, the other sees."""

    def __init__(self, kind: str, directory) -> None:
        self.closing: list[Store] = []
        if kind == "file":
            path = os.path.join(directory, f"store{next(FILES)}")
            self.a, self.b = FileStore(path, timeout=5), FileStore(path, timeout=5)
        elif kind == "tcp":
            self.b = TCPStore(is_master=True, timeout=5, secret="s")
            self.a = TCPStore(port=self.b.port, timeout=5, secret="s")
        else:
            whole = HashStore(timeout=5)
            self.closing.append(whole)
            self.a = self.b = whole if kind == "hash" else PrefixStore("p/q", whole)
        self.closing += [self.a, self.b]

    def close(self) -> None:
        for store in self.closing:
            store.close()


@pytest.fixture(params=KINDS)
def pair(request, tmp_path):
    opened = Opened(request.param, tmp_path)
    yield opened
    opened.close()


# ---- the verbs, against a dictionary -----------------------------------------------------------------

KEYS = st.sampled_from(["", "a", "b", "a/b", "ключ", "x" * 300])
VALUES = st.binary(max_size=40) | st.sampled_from([b"", b"\0", b"7", b"-3"])


def model_machine(kind: str, directory) -> type[RuleBasedStateMachine]:
    class Machine(RuleBasedStateMachine):
        @initialize()
        def begin(self):
            self.opened = Opened(kind, directory)
            self.turn = itertools.cycle([self.opened.a, self.opened.b])
            self.model: dict[str, bytes] = {}

        @property
        def store(self) -> Store:
            return next(self.turn)

        @rule(key=KEYS, value=VALUES)
        def set(self, key, value):
            self.store.set(key, value)
            self.model[key] = value

        @rule(key=KEYS)
        def get(self, key):
            if key in self.model:
                assert self.store.get(key) == self.model[key]
            else:
                with pytest.raises(StoreTimeoutError):
                    self.store.get(key, timeout=0)

        @rule(key=KEYS, amount=st.integers(-(1 << 63), (1 << 63) - 1))
        def add(self, key, amount):
            held = self.model.get(key, b"0")
            digits = held.removeprefix(b"-")
            number = 0 < len(digits) < 20 and all(c in b"0123456789" for c in digits)
            if number and -(1 << 63) <= int(held) + amount < 1 << 63:
                assert self.store.add(key, amount) == int(held) + amount
                self.model[key] = b"%d" % (int(held) + amount)
            elif not held.startswith(b"+"):
                with pytest.raises(StoreError, match="add: key"):
                    self.store.add(key, amount)

        @rule(key=KEYS, value=VALUES)
        def append(self, key, value):
            self.store.append(key, value)
            self.model[key] = self.model.get(key, b"") + value

        @rule(key=KEYS, expected=VALUES, desired=VALUES, right=st.booleans())
        def compare_set(self, key, expected, desired, right):
            if right:
                expected = self.model.get(key, b"")
            found = self.model.get(key)
            if found == expected or (found is None and expected == b""):
                self.model[key] = want = desired
            else:
                want = expected if found is None else found
            assert self.store.compare_set(key, expected, desired) == want

        @rule(key=KEYS)
        def delete(self, key):
            assert self.store.delete(key) is (self.model.pop(key, None) is not None)

        @rule(keys=st.lists(KEYS, max_size=4))
        def check(self, keys):
            assert self.store.check(keys) is all(key in self.model for key in keys)

        @rule(keys=st.lists(KEYS, max_size=4))
        def wait(self, keys):
            if all(key in self.model for key in keys):
                self.store.wait(keys, 0)
            else:
                with pytest.raises(StoreTimeoutError):
                    self.store.wait(keys, 0)

        @rule()
        def count(self):
            assert self.store.num_keys() == len(self.model)
            assert self.store.list_keys() == sorted(self.model)

        @rule(pairs=st.lists(st.tuples(KEYS, VALUES), max_size=4))
        def multi_set(self, pairs):
            self.store.multi_set([k for k, _ in pairs], [v for _, v in pairs])
            self.model.update(pairs)

        @precondition(lambda self: self.model)
        @rule(data=st.data())
        def multi_get(self, data):
            keys = data.draw(st.lists(st.sampled_from(sorted(self.model)), max_size=4))
            assert self.store.multi_get(keys) == [self.model[key] for key in keys]

        def teardown(self):
            if hasattr(self, "opened"):
                self.opened.close()

    Machine.TestCase.settings = settings(
        max_examples=30, stateful_step_count=30, deadline=None, derandomize=True, database=None
    )
    return Machine


@pytest.mark.parametrize("kind", KINDS)
def test_the_verbs_do_what_a_dictionary_does(kind, tmp_path):
    model_machine(kind, tmp_path).TestCase("runTest").runTest()


@pytest.mark.parametrize("value", [b"", bytes(range(256)), b"\r\n\0", bytes(1 << 20), "grün"])
def test_values_come_back_exactly(pair, value):
    pair.a.set("key", value)
    got = pair.b.get("key")
    assert type(got) is bytes and got == (value.encode() if isinstance(value, str) else value)


def test_an_id_of_all_kinds_of_bytes_passes_unharmed(pair):
    # B090
    unique = bytes([0x00, 0x7F, 0x80, 0xFF]) * 32
    pair.a.set("id", memoryview(unique))
    assert pair.b.get("id") == unique


# ---- waits -------------------------------------------------------------------------------------------


def timed(call) -> float:
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


def test_wait_returns_when_the_last_key_is_set(pair):
    # B097
    pair.a.set("a", b"")
    setter = threading.Timer(0.2, pair.b.set, ["b", b""])
    setter.start()
    assert 0.15 < timed(lambda: pair.a.wait(["a", "b"])) < 2
    setter.join()
    for keys in ([], ["a"], ["a", "a"], ["a", "b", "a"]):
        assert timed(lambda keys=keys: pair.a.wait(keys)) < 0.15


def test_a_thread_that_waits_lets_others_use_the_same_store(pair):
    # B073
    got = []
    waiter = threading.Thread(target=lambda: got.append(pair.a.get("late")))
    waiter.start()
    time.sleep(0.05)
    assert timed(lambda: pair.a.set("late", b"x")) < 1
    waiter.join(3)
    assert got == [b"x"]


def test_wait_needs_all_keys_at_one_time(pair):
    pair.a.set("a", b"")
    late = []

    def wait():
        try:
            pair.a.wait(["a", "b"], 0.6)
        except StoreTimeoutError as error:
            late.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.2)
    pair.b.delete("a")
    pair.b.set("b", b"")
    waiter.join(3)
    assert len(late) == 1 and "a' not set" in late[0]


@pytest.mark.parametrize("timeout", [0.3, timedelta(seconds=0.3)])
def test_a_wait_ends_by_its_own_timeout_and_names_the_keys(pair, timeout):
    # B099
    pair.a.set("there", b"")
    for call in (
        lambda: pair.a.get("nokey", timeout=timeout),
        lambda: pair.a.wait(["there", "nokey"], timeout),
        lambda: pair.a.multi_get(["nokey"], timeout=timeout),
    ):
        begun = time.monotonic()
        with pytest.raises(
            StoreTimeoutError, match=r"nokey' not set within 0.3 s in \w+Store"
        ) as e:
            call()
        assert 0.25 < time.monotonic() - begun < 1.3
        assert "there" not in str(e.value) and isinstance(e.value, TimeoutError)


def test_set_timeout_holds_for_the_next_call(pair):
    pair.a.set_timeout(0.1)
    assert pair.a.timeout == timedelta(seconds=0.1)
    with pytest.raises(StoreTimeoutError, match=r"0\.1 s"):
        pair.a.get("nokey")


def test_counters_of_many_threads_lose_nothing(pair):
    def work(store):
        for _ in range(50):
            store.add("n", 1)

    threads = [threading.Thread(target=work, args=(s,)) for s in (pair.a, pair.b) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert pair.a.add("n", 0) == 400


def test_a_closed_store_says_so(pair):
    pair.a.close()
    pair.a.close()
    if isinstance(pair.a, PrefixStore):
        pair.a.underlying_store.close()
    with pytest.raises(StoreError, match="is closed"):
        pair.a.set("a", b"")


@pytest.mark.parametrize("kind", KINDS[:3])
def test_ctrl_c_ends_a_wait(kind, tmp_path):
    code = """
        import sys, time
        from pynccl.distributed import *
        kind, path = sys.argv[1:]
        store = {"hash": HashStore, "file": lambda: FileStore(path),
                 "tcp": lambda: TCPStore(is_master=True)}[kind]()
        print("ready", flush=True)
        begun = time.monotonic()
        try:
            store.get("never")
        except KeyboardInterrupt:
            store.set("after", b"1")
            print("interrupted", store.get("after"), time.monotonic() - begun < 10)
    """
    process = start(code, kind, str(tmp_path / "store"))
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert finish(process)[:2] == (0, "interrupted b'1' True\n")


@pytest.mark.parametrize("kind", KINDS)
def test_a_forked_child_shares_the_store(kind, tmp_path):
    # A hash store is copied; the others stay one store for both.
    code = """
        import os, sys, threading
        sys.path.insert(0, sys.argv[3])
        from pathlib import Path
        from test_store import Opened
        opened = Opened(sys.argv[1], sys.argv[2])
        store = opened.a
        store.set("before", b"1")
        waiter = threading.Thread(target=lambda: store.wait(["end"]))
        waiter.start()
        pid = os.fork()
        if not pid:
            assert store.get("before") == b"1"
            store.set("child", b"2")
            assert store.add("n", 5) == 5
            opened.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        shared = sys.argv[1] in ("file", "tcp")
        assert store.check(["child"]) is shared
        assert store.add("n", 1) == (6 if shared else 1)
        store.set("end", b"")
        waiter.join(10)
        print("well")
    """
    process = start(code, kind, str(tmp_path), os.path.dirname(__file__))
    assert finish(process) == (0, "well\n", "")


# ---- prefixes ----------------------------------------------------------------------------------------


def test_prefixes_do_not_meet(pair):
    # B102
    whole = pair.a
    before = whole.num_keys()
    a, ab, nested = PrefixStore("a", whole), PrefixStore("a/b", whole), None
    nested = PrefixStore("b", a)
    for number, store in enumerate([whole, a, ab, nested]):
        store.set("key", b"%d" % number)
        store.set("b/key", b"b%d" % number)
    for number, store in enumerate([whole, a, ab, nested]):
        assert store.multi_get(["key", "b/key"]) == [b"%d" % number, b"b%d" % number]
    assert [s.num_keys() for s in (whole, a, ab, nested)] == [before + 8, 4, 2, 2]
    assert ab.list_keys() == ["b/key", "key"]
    assert ab.delete("key") and not ab.delete("key")
    assert [s.check(["key"]) for s in (whole, a, ab, nested)] == [True, True, False, True]
    with pytest.raises(StoreTimeoutError, match="key' not set within 0.05 s"):
        ab.get("key", timeout=0.05)
    assert ab.add("n", 2) == 2 and a.add("n", 3) == 3
    ab.append("t", "x")
    assert ab.compare_set("t", "x", "y") == b"y" and not a.check(["t"])


# ---- wrong arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda s: s.set(1, b""), TypeError, "set: the key is int; expected str"),
        (lambda s: s.set("k", 1), TypeError, "set: the value is int; expected bytes or str"),
        (lambda s: s.get(b"k"), TypeError, "get: the key is bytes"),
        (lambda s: s.get("k", timeout=-1), ValueError, "get: timeout is -1; expected a finite"),
        (lambda s: s.get("k", timeout=float("nan")), ValueError, "timeout is nan"),
        (lambda s: s.get("k", timeout=float("inf")), ValueError, "timeout is inf"),
        (lambda s: s.get("k", timeout="1"), TypeError, "timeout is str; expected seconds"),
        (lambda s: s.wait("key"), TypeError, "wait: keys is str; expected a list of str"),
        (lambda s: s.wait([1]), TypeError, "wait: the key is int"),
        (lambda s: s.add("k", 1.0), TypeError, "add: amount is float; expected int"),
        (lambda s: s.add("k", 1 << 63), ValueError, "64 bits are the limit"),
        (lambda s: s.multi_set(["a"], []), ValueError, "multi_set: 1 keys and 0 values"),
        (lambda s: s.multi_set(["a"], "b"), TypeError, "multi_set: values is one value"),
        (lambda s: s.set("k" * 70000, b""), ValueError, "the key has 70000 bytes; at most 65536"),
        (lambda s: s.set_timeout(None), TypeError, "set_timeout: timeout is NoneType"),
        (lambda s: PrefixStore(1, s), TypeError, "PrefixStore: prefix is int"),
        (lambda s: PrefixStore("a", {}), TypeError, "PrefixStore: store is dict"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(call, error, text):
    with pytest.raises(error, match=text):
        call(HashStore())


def test_the_abstract_store_cannot_be_made():
    with pytest.raises(TypeError):
        Store()
