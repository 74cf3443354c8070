"""The page of `paceline bench --html`, by its structure."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from paceline_tools.benchmark.crowds import Crowd
from paceline_tools.benchmark.document import Document, MeasuredPrompt, SkippedPrompt
from paceline_tools.benchmark.figures import summarise
from paceline_tools.benchmark.page import charts, page

from .bench_documents import made_up

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Outline(HTMLParser):
    """Tags in their order, whether they close as they opened, and what could reach out."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.reaching: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.reaching += [pair for pair in attrs if pair[0] in ("src", "href", "srcset", "action", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def rendered(document: Document) -> str:
    return page(document, summarise(document))


def svgs(text: str) -> list[ET.Element]:
    return [ET.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


def test_it_is_one_page_that_asks_for_nothing() -> None:
    text = rendered(made_up(1))
    outline = Outline(text)
    assert outline.open == []
    assert outline.reaching == []
    assert not {"script", "link", "img", "iframe", "object"} & set(outline.tags)
    assert "url(" not in text
    assert "@import" not in text
    assert "default-src 'none'" in text
    assert '<html lang="en">' in text
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    assert outline.tags.count("h1") == 1
    assert len(text) < 400_000


def test_every_chart_is_there_with_its_figures() -> None:
    document = made_up(1, temperatures=(0.0, 0.8))
    text = rendered(document)
    titles = [
        "Speedup by category",
        "Speedup against K",
        "Acceptance by place",
        "Accepted tokens per round",
        "Time between bursts",
        "Where the time goes",
    ]
    assert re.findall(r"<h3>(.*?)</h3>", text) == 2 * titles
    drawn = svgs(text)
    assert len(drawn) == 2 * len(titles)
    assert all(one.get("role") == "img" and one.get("aria-label") for one in drawn)
    assert all("nan" not in ET.tostring(one, "unicode").lower() for one in drawn)
    speedups, against_k, places, lengths, latency, shares = drawn[: len(titles)]
    assert len(speedups.findall("circle")) == 3 * 3  # three methods in two categories and all
    assert len(speedups.findall("line[@class='whisker c1']")) == 3
    assert [one.get("class") for one in against_k.findall("polyline")] == ["dashed c2", "line c2"]
    assert len(against_k.findall("circle")) == 2
    assert len(places.findall("circle")) == 3 + 2 + 4
    assert len(lengths.findall("rect")) == 4 + 3 + 5
    assert len(latency.findall("polyline")) == 4
    assert len(shares.findall("rect")) == 4 * 4


def test_marks_stand_where_the_figures_say() -> None:
    document = made_up(1)
    summary = summarise(document)
    drawn = svgs(page(document, summary))[0]
    ticks = {
        float((text.text or "").rstrip("×")): float(text.get("x", "nan")) for text in drawn.findall("text[@class='']")
    }
    low, high = min(ticks), max(ticks)
    value = summary["samplings"]["greedy"]["methods"]["auto"]["all"]["speedup"]["value"]
    expected = ticks[low] + (value - low) / (high - low) * (ticks[high] - ticks[low])
    first = next(one for one in drawn.findall("circle") if "c1" in one.get("class", ""))
    assert float(first.get("cx", "nan")) == pytest.approx(expected, abs=0.1)


def test_bars_of_shares_fill_the_width() -> None:
    drawn = svgs(rendered(made_up(1)))[-1]
    tops = {bar.get("y") for bar in drawn.findall("rect")}
    for top in tops:
        widths = [float(bar.get("width", "nan")) for bar in drawn.findall("rect") if bar.get("y") == top]
        assert sum(widths) == pytest.approx(420 - 2 * 20, rel=0.02)


def test_names_are_escaped() -> None:
    document = made_up(1)
    evil = "<script>alert(1)</script>"
    prompts = tuple(
        MeasuredPrompt(f"{evil} {index}", evil if index < 3 else "b&w", prompt.tokens)
        for index, prompt in enumerate(document.prompts)
    )
    text = rendered(replace(document, prompts=prompts))
    assert evil not in text
    assert "script" not in Outline(text).tags
    assert any(evil in word for word in Outline(text).words)


def test_a_run_that_was_broken_off_early_still_makes_a_page() -> None:
    document = made_up(1)
    skipped = (SkippedPrompt("long", "prose", 9000, "with 64 new tokens they exceed the context of 4096"),)
    one = replace(
        document, measurements=document.measurements[:1], run={**document.run, "complete": False}, skipped=skipped
    )
    text = rendered(one)
    assert "This run was broken off:" in text
    assert "1 prompts were skipped: with 64 new tokens" in text
    assert Outline(text).open == []


def test_plain_decoding_alone_has_its_charts() -> None:
    document = made_up(1, num_draft_tokens=())
    found = summarise(document)["samplings"]["greedy"]
    assert [chart.title for chart in charts(document, "greedy", found)] == [
        "Time between bursts",
        "Where the time goes",
    ]
    assert Outline(rendered(document)).open == []


def test_texts_at_once_have_a_table() -> None:
    document = made_up(1)
    crowds = tuple(
        Crowd(method, repeat, (0, 1), 2.0, ((0.5, 0.25), (1.0, 0.5)), ((1, 3), (1, 2)))
        for method in range(len(document.methods))
        for repeat in range(2)
    )
    text = rendered(replace(document, crowds=crowds))
    assert "Several texts at once" in text
    assert "2: K = 4" in text
    assert Outline(text).open == []
    assert "Several texts at once" not in rendered(document)
