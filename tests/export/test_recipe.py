from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import CheckpointError
from paceline_export.recipe import (
    ModelRecipe,
    PairRecipe,
    find_model_recipe,
    find_recipe,
    hub_recipe,
    read_recipe,
    recipe_names,
    resolve_pair,
)

GOOD = """
description = "a model"
licence = "Apache-2.0"

[hub]
id = "org/model"

[pypi]
packages = "some-part{n}"
members = "some_part{n}/part{nn}.bin"
count = 2
version = "1.0.0"
file = "some.gguf"
bytes = 10
sha256 = "SHA"
download_bytes = 9
""".replace("SHA", "0" * 64)


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_pattern_counts_from_one_with_one_or_two_digits(tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, GOOD))
    assert isinstance(recipe, ModelRecipe)
    assert recipe.name == "mine"
    assert recipe.pypi is not None
    assert recipe.pypi.packages == ("some-part1", "some-part2")
    assert recipe.pypi.members == ("some_part1/part01.bin", "some_part2/part02.bin")
    assert recipe.prefer == "hub"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("licence =", "license =", "'licence' is missing"),
        ('licence = "Apache-2.0"', 'licence = "Apache-2.0"\nlicense = "x"', "does not know: 'license'"),
        ('id = "org/model"', 'id = "org/model"\nbranch = "x"', "does not know: 'hub.branch'"),
        ('id = "org/model"', 'id = "model"', "not a hub id"),
        ("bytes = 10", 'bytes = "10"', "'pypi.bytes' is '10'; expected int"),
        ("bytes = 10", "bytes = 0", "at least 1"),
        ("0" * 64, "0" * 63, "64 lower-case hexadecimal digits"),
        ("count = 2\n", "", "pypi.count must be 1 to 999"),
        ("count = 2", "count = 0", "pypi.count must be 1 to 999"),
        ('"some-part{n}"', '["some-part1"]', "'pypi.packages' lists 1 names, but pypi.count is 2"),
        ('"some-part{n}"', "[1, 2]", "list of strings"),
        ('"some-part{n}"', '"--index-url={n}"', "not a package name"),
        ('"1.0.0"', '">=1"', "not an exact version"),
        ('"some.gguf"', '"../some.gguf"', "plain file name"),
        ("some_part{n}/", "../{n}/", "relative path inside a wheel"),
        ('licence = "Apache-2.0"', 'licence = "Apache-2.0"\nprefer = "torrent"', "expected 'hub' or 'pypi'"),
        ("[hub]", "[hub", "cannot be read as a recipe"),
    ],
)
def test_a_bad_recipe_is_refused_with_its_file_and_its_key(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(CheckpointError) as caught:
        read_recipe(path)
    assert told in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_recipe_without_a_route_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"needs a table \[hub\]"):
        read_recipe(write(tmp_path, 'description = "x"\nlicence = "y"\n'))


def test_a_recipe_that_does_not_exist_is_told_with_those_that_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no recipe at .*smollm2-135m"):
        find_recipe(str(tmp_path / "none.toml"))


def test_the_shipped_recipes_can_be_read_and_their_pairs_exist() -> None:
    assert {"qwen2.5-coder", "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "smollm2-135m", "gemma-3-270m"} <= set(
        recipe_names()
    )
    for name in recipe_names():
        recipe = find_recipe(name)
        if isinstance(recipe, PairRecipe):
            assert find_model_recipe(recipe.target) is not None
            assert find_model_recipe(recipe.draft) is not None
        else:
            assert recipe is not None
            assert recipe.hub is not None
            assert recipe.pypi is not None


def test_a_pair_names_its_two_recipes_and_is_no_model() -> None:
    assert resolve_pair("qwen2.5-coder") == ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b")
    with pytest.raises(CheckpointError, match=r"names a pair.*--target qwen2.5-coder-1.5b --draft qwen2.5-coder-0.5b"):
        find_model_recipe("qwen2.5-coder")
    with pytest.raises(CheckpointError, match=r"recipe of one model; a pair is expected here. Pairs: qwen2.5-coder"):
        resolve_pair("smollm2-135m")
    with pytest.raises(CheckpointError, match="is no recipe"):
        resolve_pair("none")


def test_hub_ids() -> None:
    recipe = hub_recipe("Org/Model-1.5@v1.0")
    assert recipe is not None
    assert recipe.hub is not None
    assert (recipe.hub.id, recipe.hub.revision, recipe.name) == ("Org/Model-1.5", "v1.0", "Org--Model-1.5--v1.0")
    for text in ("model", "a/b/c", "../x", "/etc/passwd", "a/b@", "a b/c", "-a/b"):
        assert hub_recipe(text) is None, text
