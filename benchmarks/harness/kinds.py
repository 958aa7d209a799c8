"""The kinds of metrics there are, each with what its declarations have in common: unit, direction, gate, floor.

Which metrics there are stands in `metrics.py` and `reuse_metrics.py`.
"""

from typing import Any

from benchmarks.harness.declaration import Metric, Observations

_FLOOR = 0.01
"""Below one percent no change of a latency is called one: placement of memory alone moves that much."""


def if_defined(value: float | None) -> Observations:
    """None is no observation."""
    return () if value is None else (value,)


def latency(name: str, title: str, formula: str, *, gate: bool, floor_s: float, **how: Any) -> Metric:
    """Of a request, in seconds, lower is better."""
    usual: dict[str, Any] = {"unit": "s", "weighting": "request", "better": "lower", "floor_relative": _FLOOR}
    return Metric(name=name, title=title, formula=formula, gate=gate, floor_absolute=floor_s, **usual | how)


def rate(name: str, title: str, formula: str, **how: Any) -> Metric:
    """Per second, or a share, higher is better; of each request unless said otherwise."""
    usual: dict[str, Any] = {"unit": "tokens/s", "weighting": "request", "gate": False, "floor_relative": _FLOOR}
    return Metric(name=name, title=title, formula=formula, better="higher", **usual | how)


def ratio(name: str, title: str, formula: str, **how: Any) -> Metric:
    """How many times; of a pair of runs, and better when higher, unless said otherwise."""
    usual: dict[str, Any] = {"weighting": "pair", "better": "higher", "gate": True}
    return Metric(name=name, title=title, unit="x", formula=formula, floor_relative=_FLOOR, **usual | how)


def coefficient(name: str, title: str, unit: str, formula: str, **how: Any) -> Metric:
    """Of a curve: it may be below zero, and no gate judges it."""
    usual: dict[str, Any] = {"weighting": "sweep", "better": "lower", "gate": False}
    return Metric(name=name, title=title, unit=unit, formula=formula, coefficient=True, **usual | how)


def count(name: str, unit: str, formula: str) -> Metric:
    """Of work: exact, and a gate."""
    title = name.removeprefix("num_").replace("_", " ").replace("kv", "KV").replace("flops", "FLOPs")
    return Metric(
        name=name, title=title[0].upper() + title[1:], unit=unit, formula=formula, weighting="count", better="lower",
        gate=True,
    )  # fmt: skip
