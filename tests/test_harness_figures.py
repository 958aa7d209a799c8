"""Curves and their fits: which there are, what stays visible on them, and SVG that can stand inside a page."""

import dataclasses
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_results import streamed_case, sweep

from benchmarks.harness.curves import columns_of, curves_of, draw_curves, off_scale, visible_range
from benchmarks.harness.figures import curve_figure, fit_line, gaps_figure
from benchmarks.harness.metrics import metric
from benchmarks.harness.results import Flag, exact_count, summarise_values


def case(x, *measurements, label="", **params):
    result = streamed_case(x, measurements=measurements, params={"x": x} | params, details={}, runs={})
    return label, result


def values(*samples, name="ttft_s", arm="cached"):
    return summarise_values(metric(name), arm, samples)


def line(*centres, name="ttft_s"):
    """A curve at x = 1, 2, ... with six samples within 2 % of each centre."""
    spread = (0.98, 0.99, 1.0, 1.0, 1.01, 1.02)
    [curve] = curves_of([case(x, values(*(y * s for s in spread), name=name)) for x, y in enumerate(centres, start=1)])
    return curve


def drawn(curve, key="f0"):
    return curve_figure(curve, {name: place for place, name in enumerate(curve.lines)}, key)


# Which curves there are.


def test_each_number_that_varies_is_an_axis_of_its_own():
    results = [case(x, values(0.1 * x * y), y=y) for x in (1, 2) for y in (3, 4)]
    assert [(curve.axis, list(curve.lines)) for curve in curves_of(results)] == [
        ("x", ["cached, y=3", "cached, y=4"]), ("y", ["cached, x=1", "cached, x=2"]),
    ]  # fmt: skip


def test_two_numbers_that_move_together_make_no_line():
    assert list(curves_of([case(x, values(0.1 * x), y=x) for x in (1, 2, 3)])) == []


def test_files_are_lines_of_their_own():
    results = [case(x, values(0.1), label=label) for label in ("base", "head") for x in (1, 2)]
    assert [list(curve.lines) for curve in curves_of(results)] == [["cached, base", "cached, head"]]


def test_a_case_without_enough_memory_is_a_gap_with_a_reason():
    flags = (Flag(kind="out of memory", arm="naive", what="no memory"),)
    cases = [case(x, values(0.1 * x)) for x in (1, 3)]
    lost = dataclasses.replace(case(2, values())[1], flags=flags)
    [curve] = curves_of([*cases, ("", lost)])
    assert [x for x, _ in curve.lines["cached"]] == [1, 3]
    assert drawn(curve).off_scale == "nothing at x=2: out of memory"


# What stays visible.


def test_one_stalled_run_does_not_stretch_the_axis(tmp_path):
    calm = line(0.010, 0.020)
    stalled = [case(1, values(*[0.010] * 5, 3.0)), case(2, values(*[0.020, 0.0201, 0.0199] * 2))]
    [curve] = curves_of(stalled)
    assert visible_range(curve)[1] == pytest.approx(visible_range(calm)[1], rel=0.05)
    assert off_scale(curve) == "1 run off the scale, up to 3000 ms"
    assert drawn(curve).off_scale == "1 run off the scale, up to 3000 ms"
    svg = next(path for path in draw_curves([result for _, result in stalled], tmp_path) if path.suffix == ".svg")
    assert "<!-- 1 run off the scale, up to 3000 ms -->" in svg.read_text()
    assert off_scale(calm) == ""


def test_honest_scatter_is_all_on_the_axis():
    [curve] = curves_of([case(x, values(*(0.01 * s for s in (1, 1.1, 0.9, 1.3, 0.8, 1.4)))) for x in (1, 2)])
    assert off_scale(curve) == ""
    assert visible_range(curve)[1] > 14


def test_the_axis_begins_at_zero_or_below_the_lowest():
    assert visible_range(line(0.01, 0.02))[0] == 0
    assert visible_range(line(0.0, 0.0)) == (0, 1)


@given(st.lists(st.floats(0, 100), max_size=30), st.floats(0.1, 5))
def test_dots_of_one_column_never_hide_each_other(ys, gap):
    placed = columns_of(ys, gap)
    assert sorted(y for _, y in placed) == sorted(ys)
    for column in range(5):
        tops = [y for at, y in placed if at == column]
        assert all(after - before >= gap for before, after in itertools.pairwise(tops))


def test_equal_runs_stand_side_by_side():
    assert columns_of([5.0, 5.0, 5.0, 9.0], 1) == [(0, 5.0), (1, 5.0), (2, 5.0), (0, 9.0)]


def test_every_run_is_drawn():
    curve = line(0.01, 0.02, 0.03)
    assert drawn(curve).svg.count("<use") - drawn(without_runs(curve)).svg.count("<use") >= 18


def without_runs(curve):
    lines = {n: [(x, dataclasses.replace(m, samples=())) for x, m in points] for n, points in curve.lines.items()}
    return dataclasses.replace(curve, lines=lines)


# Fits.


def test_a_straight_curve_is_fitted_by_a_line_and_a_bent_one_by_a_parabola():
    assert fit_line(line(0.01, 0.02, 0.03, 0.04, 0.05).lines["cached"]).kind == "affine"
    bent = fit_line(line(*(0.01 * x * x for x in range(1, 8))).lines["cached"])
    assert bent.kind == "quadratic"
    assert bent.predict(10) == pytest.approx(1.0, rel=0.01)


def test_two_places_are_no_fit():
    assert fit_line(line(0.01, 0.02).lines["cached"]) is None
    assert drawn(line(0.01, 0.02)).fits == ()


def test_an_equation_is_in_the_unit_of_the_axis():
    [fit] = drawn(line(0.012, 0.022, 0.032, 0.042)).fits
    assert re.match(r"2(\.00)? ms \+ 10(\.0)? ms\b", fit.equation)
    assert fit.name == "cached"


def test_a_stalled_run_does_not_move_the_fit():
    calm = [case(x, values(*[0.01 * x] * 6)) for x in (1, 2, 3, 4)]
    stalled = [*calm[:3], case(4, values(*[0.04] * 5, 9.0))]
    [before], [after] = ([drawn(curve).fits[0].equation for curve in curves_of(each)] for each in (calm, stalled))
    assert before == after


def test_an_exact_count_has_no_rounding_in_its_equation():
    results = [case(x, exact_count(metric("flops"), "cached", 4096 * x * x)) for x in (1, 2, 3, 5, 8)]
    [curve] = curves_of(results)
    [fit] = drawn(curve).fits
    assert "e-" not in fit.equation
    assert fit.coefficients[-1] == "c exact"


# SVG.


def test_the_same_curve_gives_the_same_text():
    curve = line(0.01, 0.02, 0.03)
    assert drawn(curve).svg == drawn(curve).svg


def test_two_figures_share_no_id():
    ids = [set(re.findall(r'\bid="([^"]*)"', drawn(line(0.01, 0.02), key).svg)) for key in ("f0", "f1")]
    assert ids[0]
    assert not ids[0] & ids[1]


def test_every_reference_inside_a_figure_leads_to_it():
    svg = drawn(line(0.01, 0.02, 0.03)).svg
    used = set(re.findall(r'href="#([^"]*)"', svg)) | set(re.findall(r"url\(#([^)]*)\)", svg))
    assert used
    assert used <= set(re.findall(r'\bid="([^"]*)"', svg))


def test_a_figure_brings_nothing_that_a_page_has_to_suffer():
    svg = drawn(line(0.01, 0.02, 0.03)).svg
    assert svg.startswith('<svg viewBox="0 0 316.8 208.8" role="img" aria-label="TTFT in ms against x: cached">')
    for unwanted in ("<style", "<metadata", "<!--", "xmlns", "http", "font-family", "DejaVu", "xlink", "#0072b2"):
        assert unwanted not in svg, unwanted
    assert "var(--line-0)" in svg
    assert "currentColor" in svg


def test_markup_and_colours_in_a_name_stay_text():
    [curve] = curves_of([case(x, values(0.1)) for x in (1, 2)])
    curve = dataclasses.replace(curve, axis='id="a" #0072b2 <b>')
    svg = drawn(curve, "f7").svg
    assert '>id="a" #0072b2 &lt;b&gt;</text>' in svg


@pytest.mark.parametrize(
    ("gaps", "labels"), [([0.001, 0.002, 0.003], ["1.0", "2.0"]), ([0.001, 0.002, 0.5], ["1", "10"])]
)
def test_gaps_of_every_size_have_readable_labels(gaps, labels):
    svg = gaps_figure({"cached": gaps}, {"cached": 0}, "f0").svg
    assert all(f">{label}</text>" in svg for label in labels)
    assert "mathdefault" not in svg


def test_one_gap_and_equal_gaps_are_drawn():
    assert "<svg" in gaps_figure({"a": [0.001], "b": [0.0] * 3}, {"a": 0, "b": 7}, "f0").svg


# Files.


def test_a_second_axis_is_a_file_of_its_own(tmp_path):
    results = [case(x, values(0.1 * x * y), y=y)[1] for x in (1, 2) for y in (3, 4)]
    stem = "benchmarks-bench_x-test_growth"
    assert sorted(path.name for path in draw_curves(results, tmp_path)) == sorted(
        f"{stem}{axis}.{suffix}" for axis in ("", "-y") for suffix in ("png", "svg")
    )


@pytest.mark.parametrize("arm", ["$x^$", "_under", "a<b"])
def test_an_odd_arm_is_named_in_the_legend_as_it_is(tmp_path, arm):
    results = sweep((2, 3), arms=("cached", arm), num_runs=2)
    svg = next(path for path in draw_curves(results, tmp_path) if path.suffix == ".svg").read_text()
    assert f"<!-- {arm.replace('<', '&lt;')} -->" in svg
