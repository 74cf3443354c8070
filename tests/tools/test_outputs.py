"""Files that commands write: never ones of a bundle."""

from __future__ import annotations

import importlib
from pathlib import Path

import click
import pytest

from paceline.bundle import MANIFEST_NAME
from paceline_tools.arguments import OUTPUT_FILE, OutputFile
from paceline_tools.cli import COMMANDS

from .conftest import Invoke, write_table_bundle

OUTPUTS = [
    ("bench", "--json"),
    ("bench", "--html"),
    ("bench", "--markdown"),
    ("build", "--timing-cache"),
    ("demo", "--json"),
    ("tune", "--output"),
]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_table_bundle(tmp_path / "other")


@pytest.mark.parametrize(("command", "option"), OUTPUTS)
@pytest.mark.parametrize("name", [MANIFEST_NAME, "target/model.onnx"])
def test_files_of_a_bundle_are_not_replaced(
    invoke: Invoke, table_bundle: Path, bundle: Path, command: str, option: str, name: str
) -> None:
    before = (bundle / name).read_bytes()
    result = invoke(command, table_bundle, option, bundle / name)
    assert result.exit_code == 2
    assert f"lies in the bundle {bundle}, which holds what the export wrote" in " ".join(result.stderr.split())
    assert (bundle / name).read_bytes() == before
    assert not list(bundle.rglob("*.partial-*"))


def test_links_are_followed_and_nothing_new_is_put_there(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(bundle / "tokenizer.json")
    (bundle / MANIFEST_NAME).write_text("{")  # damaged, but there
    for path in (tmp_path / "link", bundle / "new.json", bundle / "target" / "new.json"):
        with pytest.raises(click.BadParameter, match="lies in the bundle"):
            OUTPUT_FILE.convert(path, None, None)
    assert OUTPUT_FILE.convert(tmp_path / "new.json", None, None) == tmp_path / "new.json"


def test_every_option_for_a_file_that_need_not_exist_is_one_of_these() -> None:
    found = [
        (name, max(option.opts, key=len))
        for name in COMMANDS
        for option in importlib.import_module(f"paceline_tools.{name}").command.params
        if isinstance(option.type, click.Path) and option.type.file_okay and not option.type.exists
    ]
    assert sorted(found) == sorted(OUTPUTS)
    for name, text in OUTPUTS:
        for option in importlib.import_module(f"paceline_tools.{name}").command.params:
            if text in option.opts:
                assert isinstance(option.type, OutputFile)
