"""``pynccl run``: what the ranks see, what the user sees, and that nothing is ever left behind."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid

import pytest

from helpers.scripts import wait_until

PYNCCL = [sys.executable, "-c", "import sys; from pynccl.cli import main; sys.exit(main())"]
LIMIT = 60  # seconds that no test comes near


def alive(token):
    """Ids of the processes that have `token` in their environment."""
    found = set()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit():
                with open(f"/proc/{name}/environ", "rb") as file:
                    if token.encode() in file.read():
                        found.add(int(name))
    return found


READY = """\
import os, signal, sys, time
rank = int(os.environ["RANK"])
def ready():
    with open(f"ready{rank}.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"ready{rank}.new", f"ready{rank}")
"""


class Launch:
    """One ``pynccl run`` in an empty folder; every process it leads to has `token` in its environment."""

    def __init__(self, folder):
        self.folder = folder
        self.token = uuid.uuid4().hex
        self.process = None

    def script(self, text, name="script.py"):
        """Write a script; one that calls ``ready()`` gets what `READY` defines."""
        text = textwrap.dedent(text)
        (self.folder / name).write_text(READY * ("ready()" in text) + text)
        return name

    def start(self, *arguments, stdin=subprocess.DEVNULL, **options):
        self.process = subprocess.Popen(
            [*PYNCCL, "run", *map(str, arguments)],
            cwd=self.folder,
            env=os.environ | {"TOKEN": self.token},
            stdin=stdin,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )
        return self.process

    def finish(self, data=None):
        """Wait for the end; return exit code and both outputs."""
        out, err = self.process.communicate(data, timeout=LIMIT)
        return self.process.returncode, (out or b"").decode(), (err or b"").decode()

    def run(self, *arguments, data=None, **options):
        self.start(*arguments, stdin=subprocess.PIPE if data else subprocess.DEVNULL, **options)
        return self.finish(data)

    def ranks_ready(self, count):
        """Wait until `count` ranks have made their files; return their process ids."""
        files = [self.folder / f"ready{rank}" for rank in range(count)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), 30)
        return [int(file.read_text()) for file in files]

    def nothing_left(self, pids=()):
        """Check that no process is left, and no zombie."""
        wait_until(lambda: not alive(self.token))
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


@pytest.fixture
def launch(tmp_path):
    made = Launch(tmp_path)
    yield made
    if made.process is not None:
        made.process.kill()
        made.process.communicate()
    for pid in alive(made.token):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_ranks_find_torchruns_variables(launch):
    script = launch.script("import json, os; print(json.dumps(dict(os.environ)))")
    code, out, err = launch.run("-n", 3, "--library", "host", script)
    assert (code, err) == (0, "")
    envs = sorted((json.loads(line) for line in out.splitlines()), key=lambda env: env["RANK"])
    for rank, env in enumerate(envs):
        for name in ("RANK", "LOCAL_RANK", "ROLE_RANK"):
            assert env[name] == str(rank)
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"):
            assert env[name] == "3"
        assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]) == ("0", "1")
        assert env["PYNCCL_LIBRARY"] == "host"
    assert len({(e["MASTER_ADDR"], e["MASTER_PORT"], e["PYNCCL_JOB_ID"]) for e in envs}) == 1
    assert len(envs) == 3


def test_an_outer_torchrun_is_forgotten(launch, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("RANK", "7")
    script = launch.script(
        "import os; print(os.environ['RANK'], 'TORCHELASTIC_USE_AGENT_STORE' in os.environ)"
    )
    assert launch.run("-n", 1, script)[1] == "0 False\n"


def test_ranks_meet(launch):
    """Several times in one job: see test_rendezvous for the ways that can fail."""
    script = launch.script("""
        import os
        from pynccl._rendezvous import from_environ, share
        rank, nranks, *_ = from_environ()
        for i in range(3):
            print(share(rank, nranks, lambda: b"%d" % i, timeout=20).decode())
    """)
    code, out, err = launch.run("-n", 4, script)
    assert (code, err) == (0, "")
    assert sorted(out.split()) == sorted("012" * 4)


def test_a_script_runs_as_with_plain_python(launch):
    launch.script("value = 41", "neighbour.py")
    script = launch.script("""
        import inspect, multiprocessing, os, pickle, sys
        import neighbour

        class Thing:
            pass

        def work(x):
            return x + 1

        if __name__ == "__main__":
            assert sys.modules["__main__"].Thing is Thing
            assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
            assert "pass" in inspect.getsource(Thing)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                assert pool.map(work, [neighbour.value]) == [42]
            print(sys.argv, sys.path[0] == os.path.dirname(os.path.abspath(sys.argv[0])))
            print(__file__ == os.path.abspath(sys.argv[0]), __spec__, __doc__)
            print(sorted(set(globals()) - {"__annotations__"}))
    """)
    plain = subprocess.run(
        [sys.executable, script, "-x", "--", "y"],
        cwd=launch.folder,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    code, out, err = launch.run("-n", 1, script, "-x", "--", "y")
    assert (code, out, err) == (plain.returncode, plain.stdout, plain.stderr)
    assert out.startswith(f"['{script}', '-x', '--', 'y'] True")


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    raise KeyError('x')\nf()\n",
        "import os\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    raise ValueError('y')\n",
        "a = (\n",
    ],
)
def test_a_traceback_is_that_of_plain_python(launch, text):
    script = launch.script(text)
    plain = subprocess.run(
        [sys.executable, script],
        cwd=launch.folder,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    code, _, err = launch.run("-n", 1, script)
    assert code == plain.returncode == 1
    shown, _, ours = err.rstrip("\n").rpartition("\n")
    assert shown + "\n" == plain.stderr
    assert re.fullmatch(r"pynccl run: rank 0 \(process \d+\) exited with code 1", ours)


def test_a_module_runs_as_with_python_m(launch):
    launch.script("import sys; print(__name__, sys.argv[1:])", "tool.py")
    assert launch.run("-n", 2, "-m", "tool", "-n", "5")[:2] == (0, "__main__ ['-n', '5']\n" * 2)
    code, _, err = launch.run("-n", 1, "-m", "no_such_module")
    assert code == 1
    assert "No module named no_such_module" in err


@pytest.mark.parametrize("how", ["script", "module", "PYTHONPATH"])
def test_an_uncompiled_source_tree_does_not_hide_the_package(launch, tmp_path_factory, how):
    tree = tmp_path_factory.mktemp("clone")
    (tree / "pynccl").mkdir()
    (tree / "pynccl" / "__init__.py").write_text("raise ImportError('the wrong one')")
    (tree / "pynccl" / "_nccl.pyx").touch()
    (tree / "neighbour.py").touch()
    (tree / "script.py").write_text("import neighbour, pynccl; print(pynccl.__file__)")
    launch.script("import neighbour, pynccl; print(pynccl.__file__)")
    env = {"TOKEN": launch.token}
    what = ["script.py"]
    if how == "module":
        what = ["-m", "script"]
    elif how == "PYTHONPATH":  # seen by the ranks alone: our own process would not even start
        env["PYTHONPATH"] = str(tree)
    import pynccl

    main = "import sys; from pynccl.cli import main; sys.exit(main())"
    if how == "PYTHONPATH":
        main = f"import os, sys; sys.path.remove({str(tree)!r}); {main}"
    else:
        main = f"import os, sys; sys.path.remove(''); {main}"
    done = subprocess.run(
        [sys.executable, "-c", main, "run", "-n", "2", *what],
        cwd=launch.folder if how == "PYTHONPATH" else tree,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{pynccl.__file__}\n" * 2


def test_the_exit_code_of_a_rank_is_passed_on(launch):
    script = launch.script("import os, sys; sys.exit(3 if os.environ['RANK'] == '1' else 0)")
    code, _, err = launch.run("-n", 2, script)
    assert code == 3
    assert re.search(r"^pynccl run: rank 1 \(process \d+\) exited with code 3$", err, re.M)


def test_a_signal_is_passed_on_as_128_and_its_number(launch):
    script = launch.script(
        "ready(); os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(60)"
    )
    code, _, err = launch.run("-n", 2, script)
    assert code == 128 + signal.SIGKILL
    assert re.search(r"rank 1 \(process \d+\) was killed by SIGKILL .*; stopping the others", err)
    launch.nothing_left(launch.ranks_ready(2))


def test_a_rank_may_end_early(launch):
    script = launch.script(
        "import os, time; time.sleep(0.5 * int(os.environ['RANK'])); print('done')"
    )
    assert launch.run("-n", 3, script) == (0, "done\n" * 3, "")


def test_the_others_are_stopped_when_one_rank_fails(launch):
    script = launch.script("ready(); time.sleep(60) if rank != 1 else 1 / 0")
    since = time.monotonic()
    code, _, err = launch.run("-n", 4, script)
    assert time.monotonic() - since < 10
    assert code == 1
    assert "ZeroDivisionError" in err
    assert re.search(r"rank 1 \(process \d+\) exited with code 1; stopping the others", err)
    launch.nothing_left(launch.ranks_ready(4))


def test_all_that_fail_together_are_told(launch):
    script = launch.script(
        "import os, sys, time; r = int(os.environ['RANK']); time.sleep(0.1 * r); sys.exit(r + 4)"
    )
    code, _, err = launch.run("-n", 2, script)
    assert code == 4
    assert "rank 0 (process" in err
    assert "then rank 1 exited with code 5" in err


DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); "


def test_a_rank_that_ignores_sigterm_is_killed(launch):
    script = launch.script(DEAF + "time.sleep(60) if rank == 0 else sys.exit(9)")
    code, _, err = launch.run("-n", 2, "--grace", 0.5, script)
    assert code == 9
    assert "rank 0 did not stop: killed" in err
    launch.nothing_left(launch.ranks_ready(2))


def test_a_stopped_rank_is_ended(launch):
    script = launch.script(
        "ready(); os.kill(os.getpid(), signal.SIGSTOP) if rank == 0 else time.sleep(60)"
    )
    launch.start("-n", 2, script)
    pids = launch.ranks_ready(2)
    time.sleep(0.2)
    launch.process.terminate()
    assert launch.finish()[0] == 128 + signal.SIGTERM
    launch.nothing_left(pids)


@pytest.mark.fault
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_to_the_launcher_ends_the_job(launch, name):
    """The ranks get the same signal, so that Python can clean up; one of them waits in C, one is deaf."""
    number = signal.Signals[name]
    script = launch.script(f"""
    if rank == 2:
        signal.signal({number}, signal.SIG_IGN)
    ready()
    try:
        time.sleep(60)
    finally:
        open(f"cleaned{{rank}}", "w").close()
    """)
    launch.start("-n", 3, "--grace", 1, script)
    pids = launch.ranks_ready(3)
    since = time.monotonic()
    launch.process.send_signal(number)
    code, _, err = launch.finish()
    assert time.monotonic() - since < 10
    assert code == 128 + number
    assert f"pynccl run: got {name}; stopping 3 ranks" in err
    assert "rank 2 did not stop: killed" in err
    assert (launch.folder / "cleaned0").exists() == (name == "SIGINT")
    launch.nothing_left(pids)


@pytest.mark.fault
def test_asked_twice_the_launcher_kills_at_once(launch):
    script = launch.script("signal.signal(2, signal.SIG_IGN); ready(); time.sleep(60)")
    launch.start("-n", 2, "--grace", 50, script)
    pids = launch.ranks_ready(2)
    for _ in range(2):
        launch.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert launch.finish()[0] == 128 + signal.SIGINT
    launch.nothing_left(pids)


@pytest.mark.fault
def test_a_killed_launcher_takes_its_ranks_with_it(launch):
    script = launch.script(DEAF + "time.sleep(60)")
    launch.start("-n", 3, script)
    launch.ranks_ready(3)
    launch.process.kill()
    launch.finish()
    launch.nothing_left()


def test_a_signal_that_is_ignored_stays_ignored(launch):
    """As under nohup."""
    script = launch.script("ready(); time.sleep(1); print(signal.getsignal(signal.SIGHUP))")
    launch.start("-n", 1, script, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    launch.ranks_ready(1)
    launch.process.send_signal(signal.SIGHUP)
    code, out, _ = launch.finish()
    assert (code, out) == (0, "1\n") or (code, out) == (0, "Handlers.SIG_IGN\n")


def test_what_a_rank_leaves_running_is_ended(launch):
    script = launch.script("""
        import subprocess
        child = subprocess.Popen(["sleep", "60"])
        print(child.pid)
    """)
    code, out, err = launch.run("-n", 1, "--prefix", script)
    pid = int(out.split()[1])
    assert code == 0
    assert f"rank 0 left process {pid} running; stopping it" in err
    launch.nothing_left([pid])


def test_what_ends_by_itself_after_its_rank_is_left_in_peace(launch):
    """As multiprocessing's resource tracker, which cleans up after a process."""
    script = launch.script("""
        import subprocess
        subprocess.Popen(["sh", "-c", "sleep 0.2; echo cleaned up"])
    """)
    assert launch.run("-n", 1, "--prefix", script) == (0, "[0] cleaned up\n", "")


def test_the_timeout_ends_the_job(launch):
    script = launch.script("ready(); time.sleep(60 if rank == 1 else 0)")
    since = time.monotonic()
    code, _, err = launch.run("-n", 2, "--timeout", 1.5, script)
    assert time.monotonic() - since < 10
    assert code == 124
    assert "after 1.5 s still running: rank 1; stopping" in err
    launch.nothing_left(launch.ranks_ready(2))


def test_rank_0_gets_the_input(launch):
    script = launch.script("import os, sys; print(os.environ['RANK'], repr(sys.stdin.read()))")
    code, out, _ = launch.run("-n", 3, script, data=b"some text")
    assert code == 0
    assert sorted(out.splitlines()) == ["0 'some text'", "1 ''", "2 ''"]


def test_lines_of_ranks_are_never_mixed(launch):
    """Written in pieces, longer than a pipe's atomic size, on both outputs."""
    script = launch.script("""
        import os, sys
        for i in range(200):
            for stream in (sys.stdout, sys.stderr):
                for part in ("<", os.environ["RANK"] * 7000, ">\\n"):
                    stream.write(part)
                    stream.flush()
    """)
    code, out, err = launch.run("-n", 4, script)
    assert code == 0
    expected = sorted(f"<{rank * 7000}>" for rank in "0123" for _ in range(200))
    assert sorted(out.splitlines()) == expected
    assert sorted(err.splitlines()) == expected


def test_output_is_shown_when_it_is_written(launch):
    """A line at once, an unfinished one (a prompt) soon, though output is no terminal."""
    script = launch.script("""
        import os, sys, time
        print("line")
        print("prompt> ", end="", flush=True)
        time.sleep(60)
    """)
    launch.start("-n", 1, "--prefix", script)
    out = launch.process.stdout
    assert out.readline() == b"[0] line\n"
    assert out.read(12) == b"[0] prompt> "
    launch.process.terminate()
    assert launch.finish()[0] == 143


def test_an_unfinished_line_is_not_continued_by_another_rank(launch):
    script = launch.script("""
        import os, sys, time
        if os.environ["RANK"] == "0":
            print("unfinished", end="", flush=True)
            time.sleep(2)
            print(" business")
        else:
            time.sleep(1)
            print("line")
    """)
    code, out, _ = launch.run("-n", 2, "--prefix", script)
    assert (code, out) == (0, "[0] unfinished\n[1] line\n[0]  business\n")


def test_progress_bars_are_passed_on(launch):
    script = launch.script(r"print('\r 10%\r 20%\r100%\nend', end='')")
    assert (
        launch.run("-n", 1, "--prefix", script)[1] == "[0] \r[0]  10%\r[0]  20%\r[0] 100%\n[0] end"
    )
    assert launch.run("-n", 2, script)[1].replace("\n\r", "\n") != ""


def test_much_output_to_a_slow_reader(launch):
    script = launch.script(
        "import sys; sys.stdout.write('x' * 99 + '\\n') ; print(('y' * 99 + '\\n') * 60000)"
    )
    launch.start("-n", 2, script)
    time.sleep(1)
    code, out, _ = launch.finish()
    assert code == 0
    assert len(out) == 2 * (100 + 6000000 + 1)


def test_a_reader_that_leaves_ends_the_job(launch):
    script = launch.script("while True: print('x' * 1000)")
    launch.start("-n", 2, script)
    launch.process.stdout.readline()
    launch.process.stdout.close()
    assert launch.process.wait(LIMIT) == 128 + signal.SIGPIPE
    launch.nothing_left()


def test_a_closed_standard_error_is_no_reason_to_fail(launch):
    script = launch.script("import sys; print('fine'); sys.stderr and print('x', file=sys.stderr)")
    done = subprocess.run(
        [*PYNCCL, "run", "-n", "2", script],
        cwd=launch.folder,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: os.close(2),
        timeout=LIMIT,
    )
    assert (done.returncode, done.stdout) == (0, b"fine\n" * 2)


def test_a_single_rank_keeps_the_terminal(launch):
    script = launch.script(
        "import sys; print(sys.stdin.isatty(), sys.stdout.isatty(), input('? '))"
    )
    ours, theirs = pty.openpty()
    try:
        launch.start("-n", 1, script, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        os.write(ours, b"typed\n")
        assert launch.process.wait(LIMIT) == 0
        shown = os.read(ours, 4096).decode()
        assert "? " in shown
        assert "True True typed" in shown
    finally:
        os.close(ours)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: -n/--nranks"),
        (["-n", "1000000", "x.py"], "-n: 1000000 ranks; expected 1 to 1024"),
        (["-n", "2"], "no script given"),
        (["-n", "2", "-m"], "no module given"),
        (["-n", "x", "s.py"], "invalid int value: 'x'"),
        (["-n", "0", "s.py"], "0 ranks; expected 1 to 1024"),
        (["-n", "2", "nope.py"], "there is no script nope.py"),
        (["-n", "2", "json"], "there is no script json; for a module, give -m"),
        (["-n", "2", "."], ". is a folder, not a script"),
        (["-n", "2", "--nope", "s.py"], "unrecognized arguments: --nope"),
        (["-n", "2", "--timeout", "-1", "s.py"], "--timeout: -1 is not a number of seconds"),
        (["-n", "2", "--library", "nope", "s.py"], "'nope' is neither auto, nccl, host nor a path"),
        (["-n", "2", "--library", "./nope.so", "s.py"], "there is no ./nope.so"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(launch, arguments, message):
    launch.script("", "s.py")
    code, out, err = launch.run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("pynccl run: ")
    assert message in err
    assert err.count("\n") == 1
