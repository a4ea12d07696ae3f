"""The ``pynccl`` command as a whole, ``info`` and ``host-path``."""

import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pynccl
from pynccl.cli import COMMANDS, main

LIMIT = 60
SCRIPT = Path(sys.executable).with_name("pynccl")


def run(*arguments, cwd, code=0, **env):
    """Run the command in a process of its own; return both outputs."""
    command = [sys.executable, "-c", "import sys; from pynccl.cli import main; sys.exit(main())"]
    done = subprocess.run(
        [*command, *arguments],
        cwd=cwd,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def test_the_version(tmp_path):
    assert run("--version", cwd=tmp_path)[0] == f"pynccl {pynccl.__version__}\n"


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for command, text in COMMANDS.items():
        assert re.search(rf"^  {command} +{re.escape(text)}$", shown, re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: pynccl {command}")


def test_without_arguments_there_is_help_and_code_2(capsys):
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "pynccl: argument COMMAND: invalid choice: 'nope'"),
        (["info", "nope"], "pynccl info: unrecognized arguments: nope"),
        (["info", "--nope"], "pynccl info: unrecognized arguments: --nope"),
        (["host-path", "--link"], "pynccl host-path: argument --link: expected one argument"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_python_m_pynccl_is_the_same_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pynccl", "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert (done.returncode, done.stdout) == (0, f"pynccl {pynccl.__version__}\n")


@pytest.mark.skipif(not SCRIPT.exists(), reason="this environment has no console scripts")
def test_the_console_script_works_from_the_clone():
    """There the source tree, which is not compiled, must not hide the installed package."""
    clone = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [SCRIPT, "info", "--json"], cwd=clone, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["pynccl"]["path"] == os.path.dirname(pynccl.__file__)


def test_a_reader_that_leaves_is_no_error(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", "import sys; from pynccl.cli import main; sys.exit(main())"]
    done = subprocess.run(
        [*command, "info"], cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, timeout=LIMIT
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


# ---- info ---------------------------------------------------------------------------------------


def test_info_tells_what_is_there(tmp_path):
    library = pynccl.library("host")
    shown, err = run(
        "info", cwd=tmp_path, PYNCCL_LIBRARY="host", PYNCCL_TIMEOUT="7", NCCL_P2P_LEVEL="SYS"
    )
    assert err == ""
    assert pynccl.__version__ in shown
    assert sys.executable in shown
    assert re.search(r"^  auto +host \d+\.\d+\.\d+  \(PYNCCL_LIBRARY=host\)$", shown, re.M)
    assert re.search(rf"^ +{re.escape(library.path)}$", shown, re.M)
    assert re.search(r"^  PYNCCL_TIMEOUT +7.0  \(set\)$", shown, re.M)
    assert re.search(r"^  PYNCCL_CAI_SYNC +True  \(default\)$", shown, re.M)
    assert re.search(r"^  NCCL_P2P_LEVEL +SYS  \(set\)$", shown, re.M)
    for function, _ in library.missing:
        assert function in shown


def test_info_as_json_holds_the_same(tmp_path):
    found = json.loads(run("info", "--json", cwd=tmp_path, PYNCCL_LIBRARY="host")[0])
    library = pynccl.library("host")
    assert found["libraries"]["auto"]["path"] == library.path
    assert found["libraries"]["host"]["kind"] == "host"
    assert set(found["libraries"]["host"]["missing"]) == {name for name, _ in library.missing}
    assert found["environment"]["PYNCCL_LIBRARY"]["value"] == "host"
    assert found["python"]["executable"] == sys.executable


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"PYNCCL_LIBRARY": "/no/such/libnccl.so"}, "/no/such/libnccl.so: no such file"),
        ({"PYNCCL_LIBRARY": "nonsense"}, "'nonsense' is neither"),
        ({"PYNCCL_LIBRARY": os.__file__}, os.__file__),
        ({"PYNCCL_TIMEOUT": "soon"}, "PYNCCL_TIMEOUT='soon' is not a positive number"),
        ({"PYNCCL_LIBCUDA": "/no/libcuda"}, "/no/libcuda: cannot open shared object file"),
    ],
)
def test_info_never_fails(env, message, tmp_path):
    for arguments in (["info"], ["info", "--json"]):
        shown, err = run(*arguments, cwd=tmp_path, **env)
        assert err == ""
        assert message.replace(" ", "") in shown.replace("\\", "").replace(" ", "").replace(
            "\n", ""
        )


def test_info_works_without_the_host_library(monkeypatch, capsys, tmp_path):
    from pynccl import _config

    monkeypatch.setattr(_config, "HOST_NAME", "libmissing.so")
    assert main(["info"]) == 0
    assert "the host library is missing from this installation" in capsys.readouterr().out


def test_info_survives_whatever_a_probe_raises(monkeypatch, capsys):
    from pynccl.cli import info

    def broken(*arguments):
        raise RuntimeError("broken probe")

    for name in ("_platform", "_packages", "_library", "_nodes", "_names", "_driver", "_variable"):
        monkeypatch.setattr(info, name, broken)
    for arguments in (["info"], ["info", "--json"]):
        assert main(arguments) == 0
        assert "broken probe" in capsys.readouterr().out


# ---- host-path ----------------------------------------------------------------------------------


def test_host_path_is_where_the_library_is(tmp_path):
    shown, err = run("host-path", cwd=tmp_path)
    assert err == ""
    assert shown == pynccl.library("host").path + "\n"


def test_host_path_links_it_for_other_programs(tmp_path):
    """Made twice: a link that is there is replaced, in a folder whose name a shell must quote."""
    for _ in range(2):
        shown, err = run("host-path", "--link", "new folder/lib", cwd=tmp_path)
    link = tmp_path / "new folder" / "lib" / "libnccl.so.2"
    assert os.readlink(link) == pynccl.library("host").path
    assert os.listdir(link.parent) == ["libnccl.so.2"]
    assert str(link) in err
    # As a shell understands what was printed, another program finds the library by NCCL's name.
    program = "import ctypes; ctypes.CDLL('libnccl.so.2').pyncclHostStamp(); print('found')"
    done = subprocess.run(
        ["sh", "-c", f"{shown}\nexec '{sys.executable}' -c \"{program}\""],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.stdout == "found\n", done.stderr
    assert ctypes.CDLL(str(link)).pyncclHostStamp() != 0


def test_host_path_leaves_a_real_file_alone(tmp_path):
    (tmp_path / "libnccl.so.2").write_text("mine")
    _, err = run("host-path", "--link", ".", cwd=tmp_path, code=2)
    assert (
        err == f"pynccl host-path: {tmp_path / 'libnccl.so.2'} is there already and is not a link\n"
    )
    assert (tmp_path / "libnccl.so.2").read_text() == "mine"


def test_host_path_says_why_a_link_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    _, err = run("host-path", "--link", "file/lib", cwd=tmp_path, code=2)
    assert re.fullmatch(
        r"pynccl host-path: cannot make .*/file/lib/libnccl.so.2: Not a directory\n", err
    )


def test_a_missing_host_library_is_code_1(monkeypatch, capsys):
    from pynccl import _config

    monkeypatch.setattr(_config, "HOST_NAME", "libmissing.so")
    assert main(["host-path"]) == 1
    assert "pynccl host-path: the host library is missing" in capsys.readouterr().err
