"""The lean runtime stays small: what `paceline[cpu]` brings, summed over the packages installed here."""

from __future__ import annotations

import tomllib
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

from .conftest import ROOT

LIMIT = 200_000_000  # bytes, without the bytecode that Python caches


def closure(requirements: list[str]) -> dict[str, Distribution]:
    """All packages that these need, by name, the extras left out."""
    found: dict[str, Distribution] = {}
    left = [Requirement(text) for text in requirements]
    while left:
        requirement = left.pop()
        if requirement.name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found[requirement.name] = distribution(requirement.name)
        left += [Requirement(text) for text in found[requirement.name].requires or ()]
    return found


def size_of(package: Distribution) -> int:
    paths = [Path(str(package.locate_file(file))) for file in package.files or () if file.suffix != ".pyc"]
    return sum(path.stat().st_size for path in paths if path.is_file())


def test_the_runtime_stays_under_200_megabytes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages = closure(project["dependencies"] + project["optional-dependencies"]["cpu"])
    sizes = {name: size_of(package) for name, package in packages.items()}
    assert {"numpy", "onnxruntime", "tokenizers", "jinja2"} <= {name.lower() for name in sizes}
    assert "torch" not in sizes
    assert sum(sizes.values()) < LIMIT, sizes
    print(f"{sum(sizes.values()) / 1e6:.0f} MB in {len(sizes)} packages")
