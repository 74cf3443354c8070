"""`paceline plan`: what speculative sampling can bring, from the theory alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import click

from paceline.costs import Costs
from paceline.theory import best_num_draft_tokens, speedup, tokens_per_round

from .arguments import NUMBERS, NumberRange
from .tables import number, table

__all__ = ["command"]

# Of a cost. Whatever the unit, a thousand times either way of what runs take, from nanoseconds to hours, has room.
_LEAST, _MOST = 1e-9, 1e9

FORMULAS = """\
Tokens per round: 1 + a1 + a1·a2 + … + a1·…·aK, which is (1 - a^(K+1)) / (1 - a) where all acceptance rates are a.
Cost of a round: K·c + v(K) + o, with a draft step c, the target's pass of K + 1 rows v(K), and overhead o.
Speedup over plain decoding: tokens per round / cost of a round, both for a target pass of one row that costs 1.
Source: Leviathan et al. 2022, arXiv 2211.17192, section 3, where v = 1 and o = 0; v and o for rows that cost."""


@click.command("plan")
@click.option(
    "--acceptance",
    metavar="A[,A…]",
    type=NUMBERS,
    required=True,
    help="Probability that a drafted token stands if those before it do; several: of the first, second, … of a round.",
)
@click.option(
    "--draft-cost",
    metavar="C",
    type=NumberRange(min=0, max=_MOST),
    required=True,
    help="Cost of a draft step, over a target pass of one row (or in the unit of --pass-costs).",
)
@click.option(
    "--row-cost",
    metavar="R",
    type=NumberRange(min=0, max=_MOST),
    help="Cost of each further row of a target pass: near 0 on a GPU, about 0.2 on a CPU.  [default: 0]",
)
@click.option(
    "--pass-costs",
    metavar="V,V…",
    type=NUMBERS,
    help="Costs of target passes of 1, 2, … rows instead, in any unit; beyond, their mean step goes on.",
)
@click.option(
    "--overhead",
    metavar="O",
    type=NumberRange(min=0, max=_MOST),
    default=0.0,
    show_default=True,
    help="What a round takes outside the models, in the unit of --draft-cost.",
)
@click.option(
    "--draft-tokens",
    "most",
    metavar="K",
    type=click.IntRange(1, 64),
    default=12,
    show_default=True,
    help="Most tokens to draft per round.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of the table.")
def command(
    acceptance: tuple[float, ...],
    draft_cost: float,
    row_cost: float | None,
    pass_costs: tuple[float, ...] | None,
    overhead: float,
    most: int,
    as_json: bool,
) -> None:
    """Say how many tokens to draft, and what it brings, for an acceptance rate and costs. Needs no model.

    \b
    A CPU, where rows cost:   paceline plan --acceptance .8 --draft-cost .3 --pass-costs 1,1.2,1.45,1.7,1.95
    A GPU, where they do not: paceline plan --acceptance .8 --draft-cost .1 --row-cost .01
    In milliseconds:          paceline plan --acceptance .9,.85,.8 --draft-cost 10.5 --pass-costs 30,38,47
    """
    if row_cost is not None and pass_costs is not None:
        raise click.UsageError("--row-cost and --pass-costs exclude each other; give one of them.")
    given = 0 if pass_costs is None else len(pass_costs)
    if pass_costs is None:
        pass_costs = (1.0, 1.0 + (row_cost or 0.0))
    if not _LEAST <= min(pass_costs) <= max(pass_costs) <= _MOST:
        raise click.UsageError(f"--pass-costs must be from {_LEAST:g} to {_MOST:g}, got {pass_costs!r:.80}.")
    if pass_costs[-1] < pass_costs[0]:
        raise click.UsageError(
            f"--pass-costs falls from {pass_costs[0]:g} to {pass_costs[-1]:g}, so passes of more rows would in the end "
            "cost nothing; give costs that rise."
        )
    costs = Costs(draft_cost, pass_costs)
    unit = pass_costs[0]
    c, o = draft_cost / unit, overhead / unit
    rates: float | tuple[float, ...] = acceptance[0] if len(acceptance) == 1 else acceptance
    if not isinstance(rates, float):
        most = min(most, len(rates))

    def v(num_draft_tokens: int) -> float:
        return costs.target(num_draft_tokens + 1) / unit

    rows = [
        {
            "num_draft_tokens": k,
            "tokens_per_round": tokens_per_round(rates, k),
            "round_cost": k * c + v(k) + (o if k else 0.0),
            "speedup": speedup(rates, k, c, verification_cost=v, overhead=o),
        }
        for k in range(most + 1)
    ]
    best, gain = best_num_draft_tokens(rates, c, verification_cost=v, overhead=o, most=most)
    least = _break_even(lambda a: best_num_draft_tokens(a, c, verification_cost=v, overhead=o, most=most)[0] > 0)
    if as_json:
        settings = {
            "acceptance": acceptance,
            "draft_cost": c,
            "overhead": o,
            "pass_costs": [v(k) for k in range(most + 1)],
            "pass_costs_given": given,
        }
        best_row = {"num_draft_tokens": best, "speedup": gain, "break_even_acceptance": least}
        click.echo(json.dumps({"settings": settings, "best": best_row, "plans": rows}, ensure_ascii=False))
        return
    click.echo(_text(rows, best, gain, least))
    if most + 1 > given > 0:
        click.echo(
            f"Passes of more than the {given} rows that --pass-costs gives go on in a straight line from the "
            "first to the last.",
            err=True,
        )


def _break_even(pays: Callable[[float], bool]) -> float | None:
    """The acceptance rate, the same for each token, above which drafting pays; None where it never does."""
    low, high = 0.0, 1.0
    if not pays(high):
        return None
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def _text(rows: Sequence[dict[str, Any]], best: int, gain: float, least: float | None) -> str:
    cells = [
        (
            str(row["num_draft_tokens"]),
            number(row["tokens_per_round"]),
            number(row["round_cost"]),
            number(row["speedup"], 2, "×") + (" *" if row["num_draft_tokens"] == best else "  "),
        )
        for row in rows
    ]
    if best:
        answer = f"Best: draft {best} a round, {gain:.2f} times the speed of plain decoding."
    else:
        answer = "Best: draft nothing; plain decoding is as fast as any of these, or faster."
    pays = "never pays at these costs" if least is None else f"pays where more than {100 * least:.0f} % stand"
    return "\n".join(
        (
            table(("K", "tokens per round", "cost of a round", "speedup  "), cells),
            "",
            f"{answer} Drafting {pays}, if all places have the same rate.",
            "",
            FORMULAS,
        )
    )
