"""Numbers as people read them."""

from __future__ import annotations


def count(number: float | None) -> str:
    """Three digits and a suffix: 950, 1.23k, 45.6M; an en dash for None."""
    if number is None:
        return "–"
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit * 0.9995:
            return _three_digits(number / limit) + suffix
    return f"{number:.0f}" if float(number).is_integer() or abs(number) >= 100 else _three_digits(number)


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds: 0:07, 12:05, 1:02:03; an en dash for None."""
    if seconds is None:
        return "–"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def fixed(number: float | None, digits: int) -> str:
    """`digits` decimals; an en dash for None."""
    return "–" if number is None else f"{number:.{digits}f}"


def percent(share: float | None) -> str:
    """A share of one in whole percent; an en dash for None."""
    return "–" if share is None else f"{100 * share:.0f} %"


def _three_digits(number: float) -> str:
    decimals = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:.{decimals}f}"
