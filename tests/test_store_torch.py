"""The stores beside torch's: one random program for both, and the differences of docs/distributed.md."""

from __future__ import annotations

import pytest

from helpers.elsewhere import needs
from helpers.scripts import run

pytestmark = needs("torch")

PROGRAM = """
    import os, random, sys, tempfile, warnings
    warnings.simplefilter("ignore")
    from datetime import timedelta
    import torch.distributed as dist
    from pynccl import StoreError, StoreTimeoutError
    from pynccl.distributed import FileStore, HashStore, PrefixStore, TCPStore

    kind = sys.argv[1]
    folder = tempfile.mkdtemp()
    second = timedelta(seconds=5)
    if kind == "hash":
        theirs, ours = dist.HashStore(), HashStore()
    elif kind == "file":
        theirs, ours = dist.FileStore(folder + "/a", 1), FileStore(folder + "/b", 1)
    elif kind == "tcp":
        theirs = dist.TCPStore("127.0.0.1", 0, 1, True, second)
        ours = TCPStore("127.0.0.1", 0, 1, True, second)
    else:
        theirs = dist.PrefixStore("p", dist.HashStore())
        ours = PrefixStore("p", HashStore())
    # c10d counts keys of its own: TCPStore the workers, FileStore its users.
    extra = theirs.num_keys()

    rng = random.Random(7)
    keys = ["a", "b", "a/b", "c"]
    values = [b"", b"x", b"\\x00\\xff", b"17", b"-4", "text"]
    verbs = ["set", "get", "add", "compare_set", "append", "delete_key", "check", "wait", "num",
             "multi_get", "multi_set"]
    known = {}
    steps = 0

    def both(verb, *args):
        global steps
        steps += 1
        a, b = getattr(theirs, verb)(*args), getattr(ours, verb)(*args)
        assert a == b and type(a) is type(b), (verb, args, a, b, known)
        return b

    for _ in range(3000):
        key, value = rng.choice(keys), rng.choice(values)
        some = [rng.choice(keys) for _ in range(rng.randrange(1, 4))]
        raw = value.encode() if isinstance(value, str) else value
        verb = rng.choice(verbs)
        if verb == "set":
            both("set", key, value)
            known[key] = raw
        elif verb == "get" and key in known:
            both("get", key)
        elif verb == "add" and known.get(key, b"0").lstrip(b"-").isdigit():
            known[key] = b"%d" % both("add", key, rng.randrange(-9, 9))
        elif verb == "compare_set":
            expected = known.get(key, b"").decode("latin-1") if rng.random() < 0.5 else "other"
            if not expected.isascii() or "\\0" in expected:
                continue   # torch takes str only
            both("compare_set", key, expected, "new")
            if ours.check([key]):
                known[key] = ours.get(key)
        elif verb == "append":
            if kind == "file" and known.get(key) == raw:
                continue   # torch's FileStore appends nothing then
            both("append", key, value)
            known[key] = known.get(key, b"") + raw
        elif verb == "delete_key":
            if kind == "file" and key not in known:
                continue   # torch's FileStore says that it was there
            both("delete_key", key)
            known.pop(key, None)
        elif verb == "check":
            both("check", some)
        elif verb == "wait" and all(k in known for k in some):
            both("wait", some)
        elif verb == "num":
            assert theirs.num_keys() - extra == ours.num_keys() == len(known), (
                theirs.num_keys(), extra, ours.num_keys(), known)
        elif verb == "multi_get" and all(k in known for k in some):
            both("multi_get", some)
        elif verb == "multi_set":
            some = list(dict.fromkeys(some))
            both("multi_set", some, [value] * len(some))
            known.update(dict.fromkeys(some, raw))

    # What is not there: both wait, and both end with an error that is a RuntimeError there, ours a timeout.
    short = timedelta(seconds=0.2)
    for key in known:
        both("delete_key", key)
    for store, error in ((theirs, RuntimeError), (ours, StoreTimeoutError)):
        store.set_timeout(short)
        for call in (lambda: store.get("a"), lambda: store.wait(["a", "b"], short)):
            try:
                call()
            except error:
                continue
            raise AssertionError((store, "no error"))
    # Every verb of theirs is here, but for the queues and the barrier that the documents name.
    lacking = {n for n in dir(dist.Store) if not n.startswith("_")} - set(dir(ours))
    assert lacking <= {"queue_len", "queue_pop", "queue_push", "barrier", "clone"}, lacking
    print("steps", steps > 1000)
"""


@pytest.mark.parametrize("kind", ["hash", "file", "tcp", "prefix"])
def test_a_random_program_gives_the_same_answers(kind):
    assert run(PROGRAM, kind, limit=120).splitlines()[-1] == "steps True"


DIFFERENCES = """
    import tempfile
    from datetime import timedelta
    import torch.distributed as dist
    from pynccl import StoreError
    from pynccl.distributed import FileStore, HashStore, PrefixStore, TCPStore

    folder, second = tempfile.mkdtemp(), timedelta(seconds=5)

    def fails(error, call, *args):
        try:
            call(*args)
        except error:
            return True
        return False

    def listens_on(port):
        # Of every listening socket (state 0A) of this machine: its address, in hex.
        found = []
        for name in ("/proc/net/tcp", "/proc/net/tcp6"):
            for line in list(open(name))[1:]:
                local, state = line.split()[1], line.split()[3]
                if state == "0A" and int(local.split(":")[1], 16) == port:
                    found.append(local.split(":")[0])
        return found

    theirs = dist.TCPStore("127.0.0.1", 0, 1, True, second)
    ours = TCPStore("127.0.0.1", 0, 1, True, second)
    assert set("".join(listens_on(theirs.port))) == {"0"}, "all interfaces"
    assert listens_on(ours.port) == ["0100007F"]
    assert theirs.num_keys() > 0 == ours.num_keys()

    theirs, ours = dist.FileStore(folder + "/a", 1), FileStore(folder + "/b", 1)
    assert theirs.delete_key("never") and not ours.delete_key("never")
    for store in (theirs, ours):
        store.append("twice", b"x"), store.append("twice", b"x")
    assert (theirs.get("twice"), ours.get("twice")) == (b"x", b"xx")

    lower = dist.HashStore()
    one, two = dist.PrefixStore("a", lower), dist.PrefixStore("a/b", lower)
    one.set("b/x", b"1")
    assert two.check(["x"]) and two.num_keys() == 1 and lower.check(["a/b/x"])
    lower = HashStore()
    one, two = PrefixStore("a", lower), PrefixStore("a/b", lower)
    one.set("b/x", b"1")
    assert not two.check(["x"]) and two.num_keys() == 0 and not lower.check(["a/b/x"])

    for theirs, ours in ((dist.HashStore(), HashStore()),):
        for store in (theirs, ours):
            store.set("n", b"12 monkeys")
            store.set("most", str(2**63 - 1))
        assert theirs.add("n", 1) == 13 and fails(StoreError, ours.add, "n", 1)
        assert theirs.add("most", 1) == -(2**63) and fails(StoreError, ours.add, "most", 1)
        assert fails(TypeError, theirs.get, "n", second)
        assert hasattr(theirs, "clone") and not hasattr(ours, "clone") and hasattr(TCPStore, "clone")
    print("as documented")
"""


def test_the_differences_in_the_documents_are_there():
    assert run(DIFFERENCES, limit=60) == "as documented\n"
