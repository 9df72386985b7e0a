"""The roofline against public measurements: six that count at least, and an error that is not tuned away."""

import statistics
import tomllib

from drafter.public_points import DATA, median_error, median_error_by_source, points
from drafter.roofline import data


def test_at_least_six_points_count_on_several_machines():
    counted = [point for point in points() if point.kind == "speedup" and point.missing is None]
    assert len(counted) >= 6 and len({point.source for point in counted}) >= 3
    assert {point.machine for point in counted} >= {"8xb200", "4xgb200", "1xh100"}
    assert {"8xh200", "8xrtx-pro-6000-switch"} <= {point.machine for point in points()}


def test_the_median_error_of_the_speed_ups_is_at_most_a_quarter():
    counted = [point for point in points() if point.kind == "speedup"]
    assert median_error(counted) <= 0.25
    assert median_error_by_source(counted) <= 0.25


def test_points_that_lack_something_do_not_decide():
    """Were they counted, the median would hold as well: leaving them out flatters nothing."""
    every = [abs(point.error) for point in points() if point.kind == "speedup"]
    assert statistics.median(every) <= 0.25


def test_a_decode_step_on_paper_is_a_lower_bound():
    assert all(point.predicted < point.measured for point in points() if point.kind == "decode")


def test_no_constant_comes_from_a_point():
    """The sources of the constants and those of the points are different ones, but for one wiki with pages of both."""
    table = data()
    constants = {entry["source"] for kind in ("gpus", "allreduces") for entry in table[kind].values()}
    for point in points():
        assert not any(point.source.split(" ")[0] in constant for constant in constants if "rtx6kpro" not in constant)
    assert "models/kimi-k25.md" in table["allreduces"]["pcie-switch-nccl"]["source"]
    assert all("kimi-k25.md" not in point.source for point in points())


def test_every_entry_of_the_table_is_a_point():
    table = tomllib.loads(DATA.read_text("utf-8"))
    assert len(points()) == len(table["speedup"]) + len(table["decode"])
    assert all(point.source and point.measured > 0 and point.predicted > 0 for point in points())
