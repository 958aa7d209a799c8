"""The verdict on a whole comparison, with an exit code of its own for each kind.

Knows that silence is not consent: what could not be compared is red, and so is a comparison of nothing. Refuses to know
processes, files and how a verdict is told.
"""

import dataclasses

from benchmarks.harness.errors import InstrumentError
from benchmarks.harness.gate.evidence import Case, Evidence, name_of_case
from benchmarks.harness.gate.rows import Row, is_settled, row_of_counts, row_without_numbers
from benchmarks.harness.gate.rules import EXIT_CODES, GRAVITY, Rules, Verdict
from benchmarks.harness.gate.timed import timed_rows

__all__ = ["EXIT_CODES", "Judgement", "Row", "Rules", "Verdict", "judge"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What is said of everything, and what it rests on."""

    evidence: Evidence
    rules: Rules
    num_launches_done: int
    rows: tuple[Row, ...]

    @property
    def gated(self) -> tuple[Row, ...]:
        """The rows that the whole verdict is made of: what has a baseline, and may fail a build."""
        return tuple(row for row in self.rows if row.is_gated and row.verdict not in ("new", "skipped"))

    @property
    def verdict(self) -> Verdict:
        """The gravest verdict on anything that gates; no data where nothing does."""
        said = {row.verdict for row in self.gated} or {"no data"}
        return next(verdict for verdict in GRAVITY if verdict in said)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def is_clear(self, benchmark: str, case: str) -> bool:
        """Whether this case needs no more launches. Counts take two: one that varies is no count.

        Raises InstrumentError for a case that the evidence does not know.
        """
        rows = [row for row in self.rows if row.key.of_case == (benchmark, case)]
        if not rows:
            raise InstrumentError(f"the evidence holds nothing of {name_of_case((benchmark, case))}")
        is_counted_once = any(
            counts.num_launches < 2 for key, counts in self.evidence.counts.items() if key.of_case == (benchmark, case)
        )
        return not is_counted_once and not any(row.is_gated and not is_settled(row, self.rules) for row in rows)

    @property
    def open_cases(self) -> tuple[Case, ...]:
        """The cases on which more launches may change the verdict; none where no more are planned."""
        if self.rules.looks_once or self.num_launches_done >= self.rules.max_launches:
            return ()
        return tuple(case for case in dict.fromkeys(row.key.of_case for row in self.rows) if not self.is_clear(*case))


def judge(evidence: Evidence, rules: Rules, num_launches_done: int | None = None) -> Judgement:
    """What the evidence says under the rules. More of it may say otherwise: nothing is remembered from look to look.

    `num_launches_done` is the number of launches in the evidence, unless some left nothing at all. Raises
    InstrumentError for more undisturbed launches than the rules plan.
    """
    rows = list(timed_rows(evidence, rules))
    rows += [row_of_counts(key, counts) for key, counts in evidence.counts.items()]
    rows += [row_without_numbers(key, ("no data", why)) for key, why in evidence.gaps.items()]
    rows += [row_without_numbers(key, ("new", f"no baseline: {why}")) for key, why in evidence.new.items()]
    rows += [row_without_numbers(case, ("skipped", why)) for case, why in evidence.skipped.items()]
    done = evidence.num_launches if num_launches_done is None else num_launches_done
    return Judgement(evidence=evidence, rules=rules, num_launches_done=done, rows=tuple(rows))
