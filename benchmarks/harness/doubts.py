"""What in some results is not to be trusted, and why: every doubt that a reader should have before the numbers.

Knows finished results and the files they came from. Judges nothing: a doubt is a reason to look twice, or to measure
again, and never changes a number.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from benchmarks.harness.archive import Archive
from benchmarks.harness.report import name_of
from benchmarks.harness.results import BenchmarkResult, Flag, Measurement

_WHY = {
    "out of memory": "The device had too little memory for the case. It has no values: a gap, and no zero.",
    "contaminated": "Something else ran on the machine meanwhile. Measure again; do not compare these numbers.",
    "different commits": "The files hold different code. Differences between them may be the code's.",
    "different machines": "The files are from different machines or setups. Their times are not comparable.",
    "uncommitted changes": "The measured code is in no commit. Nobody else can measure it again.",
    "commit unknown": "The results do not say which commit they measured.",
    "one-time": "Something was compiled or captured inside a sample. That is paid once, and part of the number.",
    "leak": "The benchmark left memory on the GPU. What is measured after it has less, and a long run has none left.",
    "engine": "The engine did not run as its options say, and says why. The numbers are those of what ran.",
    "client": "The client was busy while answers came. It may have been what was measured.",
    "server": "The server says that it was slower than its client saw. One of the two clocks or counts is wrong.",
    "short": "Answers ended by themselves. Less was generated than was asked for, and the load was lighter.",
    "bundled": "A server sent several tokens in one message. Such answers have no ITL: the others alone make it.",
    "endpoint": "Somebody else's server was measured. It was not asked for all that is asked of nanoserve.",
    "step": "The samples jump within the series, as when a processor throttles. The median is of two states.",
    "drift": "The samples have a trend. The value depends on when one stopped.",
    "warm-up": "The first samples may still have been warming up.",
    "first": "The first sample is far above the rest. It may hold a cost that is paid once.",
    "too few runs": "A 95 % interval of a median needs at least six runs. How sure these values are is not known.",
    "n too small": "Too few observations to bound the quantile from above. The value may be far too low.",
    "undefined": "The value does not exist for these runs. It is not zero.",
    "outlier": "Single runs lie far off. They are kept, and the median hardly moves.",
    "near-tie": "The arms chose different tokens whose scores are equal within rounding. They did equal work.",
    "resumed": "The session was interrupted and went on later. No control judges the first part.",
    "ceiling": "A share of a ceiling came out above 1, so it is not shown. Small weights are read from a cache.",
    "resolution": "The times are close to what the clock resolves.",
}
"""Each kind of doubt, the gravest first, and what it means."""

_SETUP = ("model", "weights", "dtype", "attention", "device", "device_name", "cpu", "num_cpus", "num_threads")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """One kind of doubt: why it matters, and every place where it arose as (where, what)."""

    kind: str
    why: str
    places: tuple[tuple[str, str], ...]

    @property
    def anchor(self) -> str:
        return "doubt-" + "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in self.kind)


def doubts(archives: Sequence[Archive]) -> list[Doubt]:
    """Every doubt about some files, the gravest kind first; an unknown kind of flag comes last, as it is."""
    found: dict[str, list[tuple[str, str]]] = {}
    for kind, where, what in (*_about_files(archives), *_about_results(archives)):
        found.setdefault(kind, []).append((where, what))
    order = [*(kind for kind in _WHY if kind in found), *sorted(found.keys() - _WHY.keys())]
    return [Doubt(kind=kind, why=_WHY.get(kind, ""), places=tuple(dict.fromkeys(found[kind]))) for kind in order]


def doubts_of_cell(result: BenchmarkResult, measurement: Measurement) -> str:
    """Why to look twice at one number, in a few words; "" for no reason."""
    of_number = [kind for kind, applies in _NUMBER_DOUBTS.items() if applies(measurement)]
    of_arm = [flag.kind for flag in result.flags if _concerns(flag, measurement)]
    return ", ".join(dict.fromkeys([*of_number, *of_arm]))


def _concerns(flag: Flag, measurement: Measurement) -> bool:
    """A count of work is exact, whatever else the machine did; a ratio has the doubts of both its arms."""
    metric = measurement.metric
    return not metric.is_exact and (flag.arm in ("", measurement.arm) or metric.compares_arms)


Found = Iterator[tuple[str, str, str]]


def _about_results(archives: Sequence[Archive]) -> Found:
    for archive in archives:
        for result in archive.results:
            where = name_of(result) + (f" in {archive.label}" if len(archives) > 1 else "")
            for flag in result.flags:
                yield flag.kind, where, f"{flag.arm}: {flag.what}" if flag.arm else flag.what
            yield from _about_numbers(result, where)


def _about_numbers(result: BenchmarkResult, where: str) -> Found:
    for kind, applies in _NUMBER_DOUBTS.items():
        by_arm: dict[str, list[str]] = {}
        for measurement in filter(applies, result.measurements):
            by_arm.setdefault(measurement.arm, []).append(measurement.metric.title)
        for arm, titles in by_arm.items():
            yield kind, where, f"{arm}: {', '.join(titles)}"


def _has_no_interval(measurement: Measurement) -> bool:
    is_single = measurement.metric.is_exact or measurement.metric.weighting == "window"
    return measurement.value is not None and not is_single and None in (measurement.low, measurement.high)


_NUMBER_DOUBTS: dict[str, Callable[[Measurement], bool]] = {
    "undefined": lambda measurement: measurement.value is None and not measurement.metric.coefficient,
    "n too small": lambda measurement: measurement.value is not None and measurement.is_too_small,
    "too few runs": lambda measurement: not measurement.is_too_small and _has_no_interval(measurement),
}


def _about_files(archives: Sequence[Archive]) -> Found:
    for archive in archives:
        for commit in dict.fromkeys(result.provenance.get("commit") for result in archive.results):
            if not commit:
                yield "commit unknown", archive.label, "git did not know the measured package"
            elif str(commit).endswith("+dirty"):
                yield "uncommitted changes", archive.label, f"on top of {str(commit)[:12]}"
    yield from _differences("different commits", archives, ("commit", "source_sha256"))
    yield from _differences("different machines", archives, _SETUP)
    yield from _different_hosts(archives)


def _differences(kind: str, archives: Sequence[Archive], keys: Sequence[str]) -> Found:
    """What the provenance says differently between results, in one file or in several."""
    for key in keys:
        said: dict[str, list[str]] = {}
        for archive in archives:
            for result in archive.results:
                said.setdefault(_short(key, result.provenance.get(key)), []).append(archive.label)
        if len(said) > 1:
            yield (
                kind,
                key.replace("_", " "),
                "; ".join(f"{v} ({', '.join(dict.fromkeys(w))})" for v, w in said.items()),
            )


def _different_hosts(archives: Sequence[Archive]) -> Found:
    hosts = {archive.label: str(archive.machine.get("node", "unnamed")) for archive in archives}
    if len(set(hosts.values())) > 1:
        yield "different machines", "host", "; ".join(f"{host} ({label})" for label, host in hosts.items())


def _short(key: str, value: object) -> str:
    return str(value)[:12] if key in ("commit", "source_sha256") else str(value)
