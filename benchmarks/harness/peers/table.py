"""The document as a person reads it: one table in a terminal or in Markdown, and what has to be known beside it.

Knows a document. Refuses to compute anything from it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness import markdown
from benchmarks.harness.report import number_text

Document = Mapping[str, Any]
WIDTH = 160


def headings(told: Document) -> list[str]:
    """A column for each peer, then one for each of our arms that was set against others."""
    return [
        "quantity",
        "better",
        *(peer["name"] for peer in told["peers"]),
        *(f"{ours} / best" for ours in _our_arms(told)),
    ]


def rows(told: Document) -> list[list[str]]:
    """A row for each quantity: median and spread of each peer, then the ratios."""
    return [
        [
            f"{column['title']}, {column['unit']}",
            "higher" if column["is_more_better"] else "lower",
            *(_cell_text(column["cells"][peer["name"]]) for peer in told["peers"]),
            *(_ratio_text(column, ours) for ours in _our_arms(told)),
        ]
        for column in told["columns"]
    ]


def _our_arms(told: Document) -> list[str]:
    return list(dict.fromkeys(ratio["ours"] for column in told["columns"] for ratio in column["ratios"]))


def _cell_text(cell: Mapping[str, Any]) -> str:
    if cell["median"] is None:
        return "failed"
    return number_text(cell["median"]) + ("" if cell["mad"] is None else f" ±{number_text(cell['mad'])}")


def _ratio_text(column: Mapping[str, Any], ours: str) -> str:
    for each in column["ratios"]:
        if each["ours"] == ours and each["value"] is not None:
            ends = "" if each["low"] is None else f" [{each['low']:.2f} .. {each['high']:.2f}]"
            return f"{each['value']:.2f}{ends} x {each['best']}{_verdict(each, column['is_more_better'])}"
    return ""


def _verdict(ratio: Mapping[str, Any], is_more_better: bool) -> str:
    """Given by the interval alone: without one, and with a 1 in it, nobody is ahead."""
    if ratio["low"] is None or ratio["low"] <= 1 <= ratio["high"]:
        return ""
    return ", ahead" if (ratio["low"] > 1) == is_more_better else ", behind"


def foot(told: Document) -> Iterator[str]:
    """How to read it, what failed and why, whose tokens agree, and what the machine gave."""
    about, host = told["about"], told["host"]
    most = max((cell["n"] for column in told["columns"] for cell in column["cells"].values()), default=0)
    yield (
        f"median ± median absolute deviation of n = {most}, one value a round; the ratio is the median of the rounds' "
        f"ratios to the best other peer with weights of the same dtype, with its 95 % interval"
    )
    yield from _failures(told)
    yield from _few(told, most)
    for name, each in told["agreement"].items():
        yield (
            f"greedy tokens of {name} against nanoserve's, of {each['num_runs']} x {each['num_tokens']}: the first "
            f"agrees in {each['num_equal_first']}, all in {each['num_equal_runs']}; the median before a difference is "
            f"{each['median_equal']:g}"
        )
    yield from _share_lines(told["shares"])
    yield from _host_lines(host)
    yield (
        f"model {about['model']}, batch 1 but where it says 8, greedy, EOS ignored, {about['num_threads']} threads "
        f"each, seed {about['seed']}, {about['cpu']}, commit {about['commit']}"
    )
    for peer in told["peers"]:
        versions = ", ".join(f"{name} {version}" for name, version in peer["said"].get("versions", {}).items())
        yield f"{peer['name']}: {peer['what']}; weights {peer['dtype']}{'; ' if versions else ''}{versions}"
        yield from (f"! {peer['name']}: {note}" for note in peer["said"].get("notes", ()))


def _failures(told: Document) -> Iterator[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for column in told["columns"]:
        for peer, cell in column["cells"].items():
            if cell["failure"]:
                reasons.setdefault((peer, cell["failure"]), []).append(column["name"])
    for (peer, why), names in reasons.items():
        where = "everything" if len(names) == len(told["columns"]) else ", ".join(names)
        yield f"! {peer} failed in {where}: {why}"


def _few(told: Document, most: int) -> Iterator[str]:
    for column in told["columns"]:
        few = {peer: cell["n"] for peer, cell in column["cells"].items() if 0 < cell["n"] < most}
        if few:
            yield f"! {column['name']} has fewer rounds of " + ", ".join(f"{peer}: {n}" for peer, n in few.items())


def _share_lines(shares: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for what in dict.fromkeys(each["what"] for each in shares):
        its = [each for each in shares if each["what"] == what]
        yield f"{what}: " + ", ".join(f"{each['peer']} {_share_text(each['value'])}" for each in its)


def _share_text(value: float) -> str:
    """A share above 1 says that the ceiling was none for it."""
    return f"{value:.2f}" if value <= 1 else "above what was measured as the ceiling"


def _host_lines(host: Mapping[str, Any]) -> Iterator[str]:
    if host["read_bytes_per_s"]:
        looks = ", ".join(f"{each / 1e9:.1f}" for each in host["read_bytes_per_s"])
        yield f"read bandwidth before the first round and after each: {looks} GB/s; {_best_flops(host)}"
    busy = {name: cores for name, cores in host["cores_at_rest"].items() if cores > 0.02}
    for name, cores in busy.items():
        yield f"! {name} took {100 * cores:.0f} % of a core while it had nothing to do: the others ran beside that"
    if host["cores_at_rest"] and not busy:
        yield "workers at rest took no processor time between turns"


def _best_flops(host: Mapping[str, Any]) -> str:
    return f"{max(host['flops_per_s']) / 1e9:.0f} GFLOP/s in bfloat16"


def as_markdown(told: Document) -> str:
    """The table, and below it a line for each of the rest."""
    lines = "\n".join(f"- {markdown.escaped(line)}" for line in foot(told))
    title = markdown.escaped(told["about"]["model"])
    return f"## Peers on {title}\n\n{markdown.table(headings(told), rows(told))}\n\n{lines}\n"


def as_text(told: Document, *, width: int = WIDTH) -> str:
    """The same for a terminal."""
    import io

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(
        box=SIMPLE_HEAD, title=f"peers on {told['about']['model']}", title_justify="left", padding=(0, 1, 0, 0)
    )
    for heading in headings(told):
        table.add_column(heading, no_wrap=not heading.endswith("/ best"))
    for row in rows(told):
        table.add_row(*row)
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, emoji=False, soft_wrap=False)
    console.print(table)
    for line in foot(told):
        console.print(line)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n") + "\n"
