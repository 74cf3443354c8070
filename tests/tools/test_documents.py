"""The documents against the code: examples run, commands and options exist, files are where the tree has them."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from paceline_tools.cli import COMMANDS

from .conftest import ROOT, environment

PAGES = ("README.md", "benchmark.md", "serving.md", "engines.md", "architectures.md", "inputs.md", "pairs.md", "cpu.md")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", *(f"models/{page}" for page in PAGES), "Makefile")
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_an_example_of_the_readme_runs(index: int, smol_bundle: Path) -> None:
    example, count = re.subn(r'"bundles/[^"]*"', repr(str(smol_bundle)), EXAMPLES[index])
    assert count == 1
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(done.stdout) > 100


def test_the_readme_has_examples() -> None:
    assert len(EXAMPLES) == 5
    assert EXAMPLES[0].count("\n") <= 10
    assert max(example.count("\n") for example in EXAMPLES) <= 40


def options_of(name: str) -> set[str]:
    command = importlib.import_module(f"paceline_tools.{name}").command
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    return {"--help", "-h"} | {text for option in options for text in (*option.opts, *option.secondary_opts)}


def command_lines(document: str) -> Iterator[list[str]]:
    """What stands behind `paceline` in code, split into words."""
    text = (ROOT / document).read_text(encoding="utf-8").replace("\\\n", " ")
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    lines = [line for block in fenced for line in block.splitlines()] + inline
    if document == "Makefile":
        lines = text.splitlines()
    for line in lines:
        for found in re.finditer(r"(?:^|[\s|@/])paceline ([a-z].*)", line):
            if not line.lstrip().startswith(("import ", "from ", "#")):
                words = shlex.split(found[1].replace("…", ""), comments=True)
                yield list(itertools.takewhile(lambda word: word not in ("|", "||") and ">" not in word, words))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_and_option_that_a_document_names_exists(document: str) -> None:
    lines = list(command_lines(document))
    assert lines or document == "CONTRIBUTING.md"
    for name, *words in lines:
        assert name in COMMANDS, f"paceline {name}"
        named = {word.partition("=")[0] for word in words if re.match(r"-{1,2}[a-z]", word)}
        assert named <= options_of(name), f"paceline {name} {words}"


def test_the_readme_names_every_command() -> None:
    assert {name for name, *_ in command_lines("README.md")} == set(COMMANDS)


def test_the_tree_of_the_readme_names_every_file() -> None:
    tree = README.partition("## Folders")[2].partition("```\n")[2].partition("```")[0]
    listed, folder = set(), ""
    for line in tree.splitlines():
        path = line.split()[0]
        if line.startswith("  "):
            listed.add(folder + path)
        elif path.endswith(".sh"):
            listed.add(path)
        else:
            folder = path
    files = {
        path.relative_to(ROOT).as_posix()
        for folder in ("runtime", "export", "tools")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".sh")
    }
    assert listed == files


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    (unit,) = re.findall(r"^```ini\n(.*?)^```", (ROOT / "models/serving.md").read_text(), re.MULTILINE | re.DOTALL)
    file = tmp_path / "paceline.service"
    file.write_text(unit.replace("/opt/paceline/bin/paceline", sys.executable))  # it looks whether that exists
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, timeout=60)
    ours = [line for line in done.stderr.splitlines() if "paceline.service" in line]
    assert ours == []


def test_the_containerfile_starts_what_there_is() -> None:
    (block,) = re.findall(r"^```dockerfile\n(.*?)^```", (ROOT / "models/serving.md").read_text(), re.M | re.S)
    lines = [line.split(" ", 1) for line in block.splitlines()]
    assert {name for name, _ in lines} <= {
        "FROM", "COPY", "RUN", "USER", "ENV", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT",
    }  # fmt: skip
    given = dict(lines)
    program, name, *words = json.loads(given["ENTRYPOINT"])
    assert (program, name) == ("paceline", "serve")
    assert {word for word in words if word.startswith("-")} <= options_of("serve")
    assert json.loads(given["HEALTHCHECK"].partition("CMD ")[2])[0] == "python"
    (extras,) = re.findall(r"/src\[(.*?)\]", given["RUN"] + block)[:1]
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known)


def test_make_targets_that_a_document_names_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+(?: [a-z-]+)*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    known = {name for target in targets for name in target.split()}
    for document in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text(encoding="utf-8")
        for name in re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE):
            assert name in known, f"{document}: make {name}"
