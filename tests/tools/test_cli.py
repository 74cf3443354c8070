"""The group: what it imports, its exit codes, and what becomes of errors."""

from __future__ import annotations

import errno
import importlib
import re
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

import paceline
from paceline import errors
from paceline_tools.cli import COMMANDS, cli

from .conftest import Invoke, environment, run_paceline, write_table_bundle

HEAVY = ("numpy", "torch", "transformers", "onnx", "onnxruntime")


def modules_after(*args: str) -> tuple[set[str], float]:
    """Heavy modules that a run of the command line has imported, and the seconds that it took."""
    code = (
        "import sys, atexit\n"
        f"atexit.register(lambda: print('LOADED', *[m for m in {HEAVY!r} if m in sys.modules]))\n"
        f"sys.argv[1:] = {list(args)!r}\n"
        "from paceline_tools.__main__ import main\n"
        "main()\n"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - started
    return set(done.stdout.rpartition("LOADED")[2].split()), seconds


def test_help_is_fast_and_loads_nothing_heavy() -> None:
    loaded, seconds = modules_after("--help")
    assert loaded == set()
    assert min(seconds, modules_after("--help")[1]) < 1.0


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_needs_neither_torch_nor_onnxruntime(name: str) -> None:
    assert modules_after(name, "--help")[0] <= {"numpy"}


def test_a_command_loads_its_own_module_alone() -> None:
    code = (
        "import sys; sys.argv[1:] = ['info', '--help']\n"
        "from paceline_tools.__main__ import main\n"
        "try:\n    main()\n"
        "finally:\n    print('LOADED', *[m for m in sys.modules if m.startswith('paceline_')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    loaded = done.stdout.rpartition("LOADED")[2].split()
    assert {name.removeprefix("paceline_tools.") for name in loaded} & set(COMMANDS) == {"info"}


def test_help_lists_every_command_in_order(invoke: Invoke) -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    listed = re.findall(r"^  (\w+)  ", result.stdout.partition("Commands:")[2], re.MULTILINE)
    assert listed == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_and_its_options(name: str) -> None:
    command = importlib.import_module(f"paceline_tools.{name}").command
    assert command.name == name
    assert command.help
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    assert [option.name for option in options if not option.help] == []


def test_the_version(invoke: Invoke) -> None:
    assert invoke("--version").stdout == f"paceline {paceline.__version__}\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generat"], "Did you mean"),
        (["--nope"], "No such option"),
        (["info"], "Missing argument 'DIR'"),
        (["info", "x", "--nope"], "No such option"),
        (["fetch"], "NAME is missing"),
    ],
)
def test_wrong_usage_exits_with_2(invoke: Invoke, args: list[str], message: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("name", errors.__all__)
def test_an_error_of_paceline_becomes_a_sentence(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    error: type[errors.PacelineError] = getattr(errors, name)

    def fail(*_: object, **__: object) -> None:
        raise error("This was given; that is expected.")

    monkeypatch.setattr("paceline.Bundle.open", fail)
    result = invoke("info", "somewhere")
    assert result.exit_code == (2 if issubclass(error, errors.InvalidInputError) else 1)
    assert result.stderr == "Error: This was given; that is expected.\n"
    assert result.stdout == ""


def test_an_unexpected_error_keeps_its_traceback(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("paceline.Bundle.open", fail)
    assert isinstance(invoke("info", "somewhere").exception, ZeroDivisionError)


def test_ctrl_c_ends_quietly_with_130(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.Bundle.open", interrupt)
    result = invoke("info", "somewhere")
    assert result.exit_code == 130
    assert result.output == "\n"


def test_ctrl_c_before_the_command_is_known_ends_quietly_with_130(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("click.Group.parse_args", interrupt)
    result = invoke("info", "somewhere")
    assert (result.exit_code, result.output) == (130, "\n")


@pytest.mark.parametrize("start", ["-m", "console script"])
@pytest.mark.parametrize("module", ["click", "paceline_tools.cli", "paceline_tools.wording", "paceline_tools.info"])
def test_ctrl_c_while_modules_are_imported_ends_quietly_with_130(start: str, module: str) -> None:
    run = "import runpy; runpy.run_module('paceline_tools', run_name='__main__', alter_sys=True)"
    if start != "-m":
        run = "from paceline_tools.__main__ import main; main()"
    code = (
        "import sys; sys.argv[1:] = ['info', 'nowhere']\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, *_):\n"
        f"        if name == {module!r}: raise KeyboardInterrupt\n"
        f"sys.meta_path.insert(0, Finder); {run}"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")


@pytest.mark.parametrize(
    ("missing", "args", "expected"),
    [
        ("click", ["--help"], "pip install 'paceline[cpu,tools]'"),
        ("torch", ["export", "--target", "x.gguf", "-o", "nowhere"], "pip install 'paceline[cpu,export,tools]'"),
        ("tokenizers", ["info", "nowhere"], "pip install 'paceline[tools]'"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    missing: str, args: list[str], expected: str
) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv[1:] = {args!r}\n"
        "from paceline_tools.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == 1
    assert expected in done.stderr
    assert missing in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_reader_that_has_gone_ends_it_quietly() -> None:
    """`paceline fetch --list | true`"""
    with subprocess.Popen(
        [sys.executable, "-m", "paceline_tools", "fetch", "--list"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


def shell(line: str, **options: str) -> subprocess.CompletedProcess[str]:
    """Run a line of the shell in which `$paceline` stands for the command."""
    command = f"{sys.executable} -m paceline_tools"
    env = {**environment(), **options, "paceline": command}
    return subprocess.run(["sh", "-c", line], env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("$paceline fetch --list >&-", 1, "Error: stdout is closed; redirect it to a file, or to /dev/null.\n"),
        ("$paceline --help >&- <&-", 1, "Error: stdout is closed; redirect it to a file, or to /dev/null.\n"),
        *(
            (
                f"$paceline {args} >/dev/full",
                1,
                "Error: a stream cannot be read or written (No space left on device); look where stdout goes.\n",
            )
            for args in ("fetch --list", "--help", "--version", "info $bundle", "info $bundle --json")
        ),
        ("$paceline info nowhere 2>/dev/full", 1, ""),
        ("$paceline info nowhere 2>&-", 1, ""),
        ("$paceline info $bundle --verify 2>&-", 0, ""),
        ("$paceline info $bundle <&-", 0, ""),
        *(
            (
                f"$paceline generate $bundle {args} <&-",
                1,
                "Error: The prompt cannot be read from stdin (it is closed); give --prompt TEXT, or another "
                "--prompt-file.\n",
            )
            for args in ("", "--prompt-file -")
        ),
    ],
)
def test_streams_that_are_closed_or_full(tmp_path: Path, line: str, code: int, message: str) -> None:
    done = shell(line, bundle=str(write_table_bundle(tmp_path / "tables")))
    assert (done.returncode, done.stderr) == (code, message)


@pytest.mark.parametrize("name", ["info", "check", "generate", "demo"])
@pytest.mark.parametrize(
    ("folder", "code", "message"),
    [
        ("", 2, "got an empty text where a path is expected"),
        (__file__, 2, "is a file"),
        ("nowhere", 1, "There is no bundle at nowhere"),
        ("a" * 300, 1, "File name too long"),
    ],
)
def test_what_is_no_bundle(invoke: Invoke, name: str, folder: str, code: int, message: str) -> None:
    result = invoke(name, folder, *(["--prompt", "a"] if name == "generate" else []))
    assert result.exit_code == code
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_what_the_system_refuses_becomes_a_sentence(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "bundle/paceline.json")

    monkeypatch.setattr("paceline.Bundle.open", fail)
    result = invoke("info", "somewhere")
    assert result.exit_code == 1
    assert result.stderr == "Error: bundle/paceline.json: Permission denied.\n"


def test_a_process_separates_its_streams(tmp_path: object) -> None:
    done = run_paceline("info", f"{tmp_path}/none")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("Error: There is no bundle at ")
    assert "Traceback" not in done.stderr


def test_the_group_has_no_command_beyond_its_table() -> None:
    assert cli.list_commands(click.Context(cli)) == list(COMMANDS)


def test_sigterm_clears_away_what_an_export_was_writing(tmp_path: Path) -> None:
    export = f"""
import os, pathlib, signal
from paceline_export import export, partial_folder, source
source.resolve = lambda *args, **options: None
def work(*args, **options):
    with partial_folder.partial_folder(pathlib.Path({str(tmp_path / "bundle")!r}), overwrite=False) as folder:
        (folder / "model.onnx").write_text("half")
        os.kill(os.getpid(), signal.SIGTERM)
export.export_bundle = work
import sys
sys.argv = ["paceline", "export", "--target", "x", "-o", {str(tmp_path / "bundle")!r}]
from paceline_tools.__main__ import main
main()
"""
    process = subprocess.run([sys.executable, "-c", export], env=environment(), capture_output=True, text=True)
    assert process.returncode == 143, process.stderr
    assert list(tmp_path.iterdir()) == []
