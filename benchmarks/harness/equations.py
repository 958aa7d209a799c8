"""Equations as people write them: three digits, units, a minus where one belongs.

Knows numbers and names. Knows nothing of where they come from.
"""

from collections.abc import Sequence


def joined(terms: Sequence[str]) -> str:
    """The sum of some terms."""
    return " + ".join(terms).replace("+ -", "- ")


def term(value: float, power: int, x_name: str, unit: str) -> str:
    """One term: "0.45 ms/token · prompt tokens"; a name without a plural is a variable: "0.45 ms x"."""
    exponent = f"^{power}" if power > 1 else ""
    if not power:
        return f"{_digits(value)} {unit}".rstrip()
    if x_name == "x":
        return f"{_digits(value)} {unit}".rstrip() + f" x{exponent}"
    last = x_name.rsplit(maxsplit=1)[-1]
    per = f"/{last[:-1]}{exponent}" if unit and last.endswith("s") and len(last) > 1 else ""
    return f"{_digits(value)} {unit}{per}".rstrip() + f" · {x_name}{exponent}"


def _digits(value: float) -> str:
    """Three significant digits, without an exponent from 0.0001 up."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:.0f}" if abs(rounded) >= 100 else f"{rounded:.3g}"
