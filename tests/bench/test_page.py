"""The page: whole, on its own, and with every figure of the report on it."""

import json
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from bench.page import main, page, write_pages
from bench.pictures import _style_of
from bench.render import grids, markdown
from bench.textfile import METRICS, textfile
from drafter.costs import to_document, write_costs
from drafter.report import check_report, write_report
from drafter.speedup import Costs
from tests.bench.made_up_report import RATES, STEPS, made_up

COSTS = Costs(
    {1: 9.0, 8: 16.0},
    {1: {1: 10.0, 2: 11.0, 3: 12.0}, 8: {1: 20.0, 2: 26.0, 3: 38.0}},
    "measured: small",
)
VOID = {"meta", "line", "circle", "polygon", "polyline"}


class Balanced(HTMLParser):
    """Reads a page, keeps its text, and fails where a tag is closed that is not open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.links: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [(name, value or "") for name, value in attributes if name in ("src", "href", "srcset", "style")]
        if tag not in VOID or (tag != "meta" and not (self.get_starttag_text() or "").endswith("/>")):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def titles(text: str) -> list[str]:
    return re.findall(r"<figcaption>(.*?)</figcaption>", text)


def test_the_made_up_report_follows_the_schema():
    check_report(made_up())
    check_report(made_up(loads=(4,), thinking=("on", "off")))


@pytest.mark.parametrize(
    "report",
    [
        made_up(),
        made_up(loads=(4,)),
        made_up(drafters=("none",)),
        made_up(thinking=("on", "off")),
        made_up(("old",), (2,)),
    ],
    ids=["loads", "one load", "no drafter", "thinking", "no baseline"],
)
def test_the_page_is_whole_and_needs_nothing_else(report: dict[str, Any]):
    text = page(report)
    read = Balanced(text)
    assert read.links == [] and not {"script", "link", "img", "iframe", "object"} & set(read.seen)
    assert "url(" not in text and "@import" not in text
    shown = "".join(read.words)
    for grid in grids(report):
        assert grid.title in shown
        for cell in (cell for row in grid.rows for cell in row):
            assert cell in shown
    for said in (
        "it died.\n  <last line>",
        report["provenance"]["command"],
        "2" * 64,
        "too few answers <without> loops",
    ):
        assert said in shown


def test_the_pictures_of_several_loads():
    assert titles(page(made_up(), COSTS)) == [
        "Speed-up over none",
        "Does it pay?",
        "Differences of acceptance length, prompt by prompt",
        "Acceptance length by category",
        "Verify steps that accept up to a position",
        "Acceptance length over draft steps",
        "Tokens per second, all requests together",
        "Acceptance length by position in the answer",
        "Acceptance length by context length",
        *(f"Predicted speed-up of {escape(name)} over draft steps" for name in RATES if name not in ("none", "ngram")),
        "Acceptance length that breaks even",
    ]


def test_what_is_not_known_is_not_drawn():
    assert titles(page(made_up(drafters=("none",), loads=(4,)))) == []
    alone = titles(page(made_up(drafters=("old",), loads=(4,))))
    assert "Speed-up over none" not in alone and "Verify steps that accept up to a position" in alone


def test_every_mark_tells_its_value():
    """Hover, or a screen reader: the figure and its interval are in the mark's title."""
    report = made_up()
    text = page(report)
    for variant in report["variants"]:
        if variant["status"] == "ok" and "speedup" in variant:
            low, high = variant["speedup_ci95"]
            assert f"{escape(variant['drafter'])}: {variant['speedup']:.3g} ({low:.3g} to {high:.3g})" in text
    for row in report["comparisons"]:
        low, high = row["ci95"]
        assert f"{row['delta_acceptance_length']:.3g} ({low:.3g} to {high:.3g})" in text


def test_a_simulation_is_shouted():
    assert "SIMULATED" in page(made_up() | {"simulated": True})
    assert "SIMULATED" not in page(made_up())


@given(st.text(min_size=1, max_size=40))
def test_no_name_breaks_the_page(name: str):
    report = made_up(drafters=("none", "old"), loads=(1, 8))
    for variant in report["variants"]:
        if variant["drafter"] == "old":
            variant["drafter"] = name
            variant["categories"] = {
                f"{name}{place}": each for place, each in enumerate(variant["categories"].values())
            }
    report["verdict"]["reasons"] = [name]
    Balanced(page(report))


def test_the_textfile_says_what_the_report_says():
    report = made_up()
    found: dict[tuple[Any, ...], float] = {}
    for family in text_string_to_metric_families(textfile(report)):
        for sample in family.samples:
            found[sample.name, frozenset(sample.labels.items())] = sample.value
    for variant in report["variants"]:
        if variant["status"] != "ok":
            continue
        at = {
            "target": "small-model",
            "drafter": variant["drafter"],
            "concurrency": str(variant["concurrency"]),
            "thinking": "default",
            "simulated": "false",
        }
        for key, (name, _, factor) in METRICS.items():
            value = found.get((f"eyas_bench_{name}", frozenset(at.items())))
            assert value == (pytest.approx(variant[key] * factor) if key in variant else None)
        if "full_acc" in variant:
            third = found["eyas_bench_accepted_share", frozenset((at | {"position": str(STEPS - 1)}).items())]
            assert third == pytest.approx(variant["full_acc"][STEPS - 1])
            low = found["eyas_bench_speedup_ci95", frozenset((at | {"bound": "low"}).items())]
            assert low == pytest.approx(variant["speedup_ci95"][0])
    assert found["eyas_bench_verdict", frozenset({"target": "small-model", "decision": "hold"}.items())] == 1
    assert found["eyas_bench_variant_failed", frozenset({"target": "small-model", "drafter": "broken"}.items())] == 1


def test_a_simulated_report_says_so_in_every_sample():
    lines = [line for line in textfile(made_up() | {"simulated": True}).splitlines() if not line.startswith("#")]
    figures = [line for line in lines if "concurrency=" in line]
    assert figures and all('simulated="true"' in line for line in figures)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    report, costs = tmp_path / "report.json", tmp_path / "costs.json"
    write_report(made_up(), report)
    write_costs(to_document(COSTS, simulated=True, provenance={}), costs)
    assert main([str(report), "--costs", str(costs), "--out", str(tmp_path / "out")]) == 0
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"report.html", "report.md", "report.prom"}
    assert "Predicted speed-up" in (tmp_path / "out" / "report.html").read_text("utf-8")
    assert main([str(report)]) == 0 and (tmp_path / "report.html").is_file()
    capsys.readouterr()
    for words in ([str(tmp_path / "no.json")], [str(report), "--costs", str(tmp_path / "no.json")]):
        assert main(words) == 1
        said = capsys.readouterr().err
        assert said.startswith("page: ") and len(said.splitlines()) == 1
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert main([str(report), "--out", str(blocked)]) == 1
    assert "choose another folder by --out" in capsys.readouterr().err


def test_all_pages_are_written_whole(tmp_path: Path):
    write_pages(made_up(loads=(1,)), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report.html", "report.md", "report.prom"]


@pytest.mark.parametrize("names", [("ngram:a=1", "ngram:a=1,b=2"), ("x, y", "x"), ("x", "x, thinking")])
def test_a_difference_is_drawn_in_the_style_of_its_drafter(names: tuple[str, str]):
    styles = {name: place for place, name in enumerate(names)}
    assert [_style_of(name, styles) for name in names] == [0, 1]
    thinking = {f"{name}, thinking on": place for place, name in enumerate(names)}
    assert [_style_of(name, thinking) for name in names] == [0, 1]


@given(name=st.text(min_size=1, max_size=20))
def test_no_name_breaks_the_markdown(name: str):
    report = made_up(("none", "old"), loads=(4,))
    for variant in report["variants"]:
        if variant["drafter"] == "old":
            variant["drafter"] = name
    for row in report["comparisons"]:
        row["a"], row["b"] = (name if each == "old" else each for each in (row["a"], row["b"]))
    report["verdict"]["reasons"] = [name]
    shown, plain = markdown(report), markdown(made_up(("none", "old"), loads=(4,)))
    cells = [line.replace("\\|", "").count("|") for line in shown.split("\n") if line.startswith("| ")]
    assert cells == [line.replace("\\|", "").count("|") for line in plain.split("\n") if line.startswith("| ")]
    assert "<" not in "".join(line for line in shown.split("\n") if not line.startswith(("    ", "`")))


def test_what_was_made_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_report(made_up(), tmp_path / "report.json")
    assert main([str(tmp_path / "report.json"), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert sorted(Path(path).name for path in made.values()) == ["report.html", "report.md", "report.prom"]
    assert all(Path(path).is_file() for path in made.values())


def test_costs_that_are_none_are_said_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    report = made_up()
    write_report(report, tmp_path / "report.json")
    for variant in report["variants"]:
        variant.pop("decode_step_ms", None)
    for name, text in (("a.json", json.dumps(report)), ("b.json", "[]"), ("c.json", '{"kind": "step_cost"}')):
        (tmp_path / name).write_text(text)
        assert main([str(tmp_path / "report.json"), "--costs", str(tmp_path / name)]) == 1
        assert capsys.readouterr().err.count("\n") == 1
