"""What a report's page shows as pictures: each a figure with its title, its legend and a sentence, or nothing where the
report does not hold what it would be drawn from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from bench.render import PLACES, bucket_name, label, several_loads, speedup_of
from drafter.report import Report
from drafter.speedup import Costs, speedup
from drafter.svg import Mark, Row, Series, curves, rows, swatch

Variant = Mapping[str, Any]


def pictures(report: Report, costs: Costs | None = None) -> list[str]:
    """All figures, as HTML. costs: of the same deployment, for pictures over the number of draft steps."""
    styles = _styles(report)
    drawn = [picture for draw in PICTURES for picture in draw(report, styles)]
    return drawn if costs is None else drawn + _over_steps(report, costs)


def measured(report: Report) -> list[Variant]:
    """The variants that gave figures."""
    return [variant for variant in report["variants"] if variant["status"] == "ok"]


def _name(report: Report, variant: Variant) -> str:
    """A series: a drafter at all its numbers of requests at a time."""
    return label(report, variant, load=False)


def _styles(report: Report) -> dict[str, int]:
    """A style for each series, the same in every picture."""
    return {name: place for place, name in enumerate(dict.fromkeys(_name(report, each) for each in measured(report)))}


def _figure(title: str, picture: str, legend: Mapping[str, int], note: str = "") -> str:
    """A picture with its title and, where there is more than one series, its legend."""
    entries = "".join(f"<li>{swatch(style)}{escape(name)}</li>" for name, style in legend.items())
    shown = f'<ul class="legend">{entries}</ul>' if len(legend) > 1 else ""
    said = f"<p>{escape(note)}</p>" if note else ""
    return f"<figure><figcaption>{escape(title)}</figcaption>{shown}{picture}{said}</figure>"


def _interval(table: Mapping[str, Any], key: str) -> tuple[float | None, float | None]:
    low, high = table.get(f"{key}_ci95", (None, None))
    return low, high


def _speedups(report: Report, styles: Mapping[str, int]) -> list[str]:
    """Tokens/s against the baseline's: over the load where there are several, else drafter by drafter."""
    baseline = report["provenance"].get("baseline")
    compared = [
        (variant, gain)
        for variant in measured(report)
        if variant["drafter"] != baseline and (gain := speedup_of(report, variant)) is not None
    ]
    if not compared:
        return []
    title = f"Speed-up over {baseline}"
    legend = {name: styles[name] for name in dict.fromkeys(_name(report, variant) for variant, _ in compared)}
    if several_loads(report)[0]:
        loads = sorted({variant["concurrency"] for variant, _ in compared})
        series = [
            Series(
                name,
                style,
                tuple(
                    (loads.index(variant["concurrency"]), gain, *_interval(variant, "speedup"))
                    for variant, gain in sorted(compared, key=lambda pair: pair[0]["concurrency"])
                    if _name(report, variant) == name
                ),
            )
            for name, style in legend.items()
        ]
        picture = curves(
            series,
            what=title,
            x_label="requests at a time",
            x_ticks=[(place, str(load)) for place, load in enumerate(loads)],
            rule=1.0,
        )
    else:
        entries = [
            Row(name, (Mark(name, styles[name], gain, *_interval(variant, "speedup")),))
            for variant, gain in compared
            for name in [_name(report, variant)]
        ]
        picture = rows(entries, what=title, x_label=f"tokens/s over those of {baseline}", rule=1.0, from_zero=True)
        legend = {}
    return [_figure(title, picture, legend, "Dashed: as fast as without. Below it, speculation loses.")]


def _speeds(report: Report, styles: Mapping[str, int]) -> list[str]:
    """Tokens/s over the load, where there are several."""
    if not several_loads(report)[0]:
        return []
    ordered = sorted(measured(report), key=lambda variant: int(variant["concurrency"]))
    loads = sorted({variant["concurrency"] for variant in ordered})
    series = [
        Series(
            name,
            style,
            tuple(
                (loads.index(each["concurrency"]), each["tokens_per_second"], None, None)
                for each in ordered
                if _name(report, each) == name
            ),
        )
        for name, style in styles.items()
    ]
    ticks = [(place, str(load)) for place, load in enumerate(loads)]
    picture = curves(series, what="Tokens per second", x_label="requests at a time", x_ticks=ticks)
    return [_figure("Tokens per second, all requests together", picture, styles)]


def _break_even(report: Report, styles: Mapping[str, int]) -> list[str]:
    """Acceptance length against the one that would break even, variant by variant."""
    known = [each for each in measured(report) if "step_cost" in each and "acceptance_length" in each]
    if not known:
        return []
    entries = []
    for variant in known:
        name = _name(report, variant)
        mark = Mark(name, styles[name], variant["acceptance_length"], *_interval(variant, "acceptance_length"))
        entries.append(Row(label(report, variant), (mark,), variant["step_cost"]))
    picture = rows(entries, what="Acceptance length against break-even", x_label="acceptance length; tick: break-even")
    return [_figure("Does it pay?", picture, {}, "Right of its tick, a drafter is worth its verify steps.")]


def _firsts(report: Report) -> list[Variant]:
    """One variant that speculated for each series: at its smallest load."""
    found: dict[str, Variant] = {}
    for variant in sorted(measured(report), key=lambda each: int(each["concurrency"])):
        if "acceptance_length" in variant:
            found.setdefault(_name(report, variant), variant)
    return list(found.values())


def _positions(report: Report, styles: Mapping[str, int]) -> list[str]:
    """Shares of steps that accept each draft position, and the acceptance length of shorter chains."""
    firsts = [variant for variant in _firsts(report) if variant["full_acc"]]
    if not firsts:
        return []
    longest = max(len(variant["full_acc"]) for variant in firsts)
    ticks = [(float(place), str(place)) for place in range(1, longest + 1)]
    legend = {name: styles[name] for name in (_name(report, variant) for variant in firsts)}
    shares, lengths = [], []
    for variant in firsts:
        name, chances = _name(report, variant), variant["full_acc"]
        sums = [1 + sum(chances[: place + 1]) for place in range(len(chances))]
        shares.append(_plain(name, legend[name], chances))
        lengths.append(_plain(name, legend[name], sums))
    accepted = curves(shares, what="Accepted by position", x_label="draft position", x_ticks=ticks)
    chains = curves(
        lengths, what="Acceptance length over draft steps", x_label="draft steps", x_ticks=ticks, from_zero=False
    )
    return [
        _figure("Verify steps that accept up to a position", accepted, legend),
        _figure("Acceptance length over draft steps", chains, legend, "Of the same drafter with a shorter chain."),
    ]


def _plain(name: str, style: int, values: Sequence[float]) -> Series:
    return Series(name, style, tuple((place + 1.0, value, None, None) for place, value in enumerate(values)))


def _categories(report: Report, styles: Mapping[str, int]) -> list[str]:
    firsts = _firsts(report)
    names = list(dict.fromkeys(name for variant in firsts for name in variant["categories"]))
    entries = []
    for category in names:
        marks = tuple(
            Mark(
                name,
                styles[name],
                found["acceptance_length"],
                *_interval(found, "acceptance_length"),
            )
            for variant in firsts
            if "acceptance_length" in (found := variant["categories"].get(category, {}))
            for name in [_name(report, variant)]
        )
        if marks:
            entries.append(Row(category, marks))
    if len(entries) < 2:
        return []
    legend = {name: styles[name] for name in (_name(report, variant) for variant in firsts)}
    picture = rows(entries, what="Acceptance length by category", x_label="acceptance length")
    return [_figure("Acceptance length by category", picture, legend)]


def _differences(report: Report, styles: Mapping[str, int]) -> list[str]:
    """Paired differences with their intervals."""
    compared = report.get("comparisons", [])
    if not compared:
        return []
    entries = [
        Row(
            label(report, each),
            (
                Mark(
                    f"p {each['p_adjusted']:.3f}",
                    _style_of(each["b"], styles),
                    each["delta_acceptance_length"],
                    *each["ci95"],
                ),
            ),
        )
        for each in compared
    ]
    title = "Differences of acceptance length, prompt by prompt"
    picture = rows(entries, what=title, x_label="difference, with its 95 % interval", rule=0.0)
    return [_figure(title, picture, {}, "Dashed: no difference.")]


def _style_of(drafter: str, styles: Mapping[str, int]) -> int:
    """A series is named as its drafter is, which may itself hold commas, or after that by how it thinks."""
    names = (drafter, *(f"{drafter}, thinking {way}" for way in ("default", "on", "off")))
    return next((styles[name] for name in names if name in styles), 0)


def _places(report: Report, styles: Mapping[str, int]) -> list[str]:
    """Acceptance length by position in the answer and by context length."""
    drawn = []
    for key, title in PLACES.items():
        firsts = [variant for variant in _firsts(report) if variant.get(key)]
        buckets = sorted({(each["from"], each["to"]) for variant in firsts for each in variant[key]})
        if len(buckets) < 2:
            continue
        legend = {name: styles[name] for name in (_name(report, variant) for variant in firsts)}
        series = [
            Series(
                _name(report, variant),
                legend[_name(report, variant)],
                tuple(
                    (buckets.index((each["from"], each["to"])), each["acceptance_length"], None, None)
                    for each in sorted(variant[key], key=lambda bucket: int(bucket["from"]))
                ),
            )
            for variant in firsts
        ]
        ticks = [(float(place), bucket_name(low, high)) for place, (low, high) in enumerate(buckets)]
        picture = curves(series, what=title, x_label="tokens", x_ticks=ticks, from_zero=False)
        drawn.append(_figure(title, picture, legend))
    return drawn


def _over_steps(report: Report, costs: Costs) -> list[str]:
    """Speed-up over draft steps for each drafter, and break-even, from measured costs."""
    drawn = []
    batches = costs.batches
    shades = {f"{batch} at a time": place for place, batch in enumerate(batches)}
    for variant in (each for each in _firsts(report) if "steps" in each):  # NGRAM has none, and other costs
        chances = variant["full_acc"]
        series = []
        for name, batch in zip(shades, batches, strict=True):
            steps = [each for each in sorted(costs.step_ms[batch]) if each <= len(chances)]
            points = [(float(each), speedup(costs, chances, batch, each), None, None) for each in steps]
            series.append(Series(name, shades[name], tuple(points)))
        if all(len(each.points) > 1 for each in series):
            title = f"Predicted speed-up of {_name(report, variant)} over draft steps"
            ticks = [(x, f"{x:g}") for x in sorted({point[0] for each in series for point in each.points})]
            picture = curves(series, what=title, x_label="draft steps", x_ticks=ticks, rule=1.0)
            drawn.append(_figure(title, picture, shades, "Its acceptance here, with measured costs of a step."))
    steps = sorted(set.intersection(*(set(row) for row in costs.step_ms.values())))
    series = [
        Series(
            f"{each} draft step{'' if each == 1 else 's'}",
            place,
            tuple((float(at), costs.ratio(batch, each), None, None) for at, batch in enumerate(batches)),
        )
        for place, each in enumerate(steps)
    ]
    if series and len(batches) > 1:
        ticks = [(float(at), str(batch)) for at, batch in enumerate(batches)]
        title = "Acceptance length that breaks even"
        picture = curves(series, what=title, x_label="requests at a time", x_ticks=ticks, from_zero=False)
        drawn.append(_figure(title, picture, {each.name: each.style for each in series}, costs.source))
    return drawn


PICTURES: tuple[Callable[[Report, Mapping[str, int]], list[str]], ...] = (
    _speedups,
    _break_even,
    _differences,
    _categories,
    _positions,
    _speeds,
    _places,
)
