"""Parts of sentences: counts, rates, names of ranks, and names to choose from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def explain_unknown(kind: str, word: str, known: Iterable[str]) -> str:
    """Return "unknown KIND 'WORD': choose a, b or c. Did you mean b?"."""
    table = list(known)
    return f"unknown {kind} {word!r}: choose {list_choices(table)}{did_you_mean(word, table)}"


def install_extra(name: str) -> str:
    """Return how to install an extra of pyproject.toml. ddpbench is on no package index."""
    return f"pip install '.[{name}]' in a checkout of ddpbench"


def list_choices(known: Iterable[str]) -> str:
    """Return "a, b or c"."""
    return list_all(known, "or")


def list_all(names: Iterable[str], word: str = "and") -> str:
    """Return "a, b and c"; word: the last conjunction."""
    *most, last = names
    return f"{', '.join(most)} {word} {last}" if most else str(last)


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ". Did you mean NAME?" for the closest name; "" if none is as similar as cutoff."""
    import difflib

    closest = difflib.get_close_matches(word, list(known), 1, cutoff)
    return f". Did you mean {closest[0]}?" if closest else ""


def counted(number: int, noun: str) -> str:
    """Return "1 link", "3 links" or "3 launches"."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def list_kinds(counts: Mapping[str, int]) -> str:
    """Return "2 parameters, 24 optimizer values", without the kinds of which there are none.

    A value is an option of an optimizer, or a tensor or number of its state.
    """
    nouns = {"optimizer": "optimizer value"}
    parts = [counted(n, nouns.get(kind, kind)) for kind, n in counts.items() if n]
    return ", ".join(parts) or "nothing"


def format_rate(bytes_per_second: float) -> str:
    """Format a rate with three digits, in MB/s below 1 GB/s, else in GB/s."""
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.3g} GB/s"
    return f"{bytes_per_second / 1e6:.3g} MB/s"


def name_ranks(ranks: Sequence[int], shortest: int = 2) -> str:
    """Return "rank 3" or "ranks 0-2, 5"; `shortest` as in spans."""
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks, shortest)}"


def spans(numbers: Sequence[int], shortest: int = 2) -> str:
    """Return "0-2, 5" for 0, 1, 2, 5. A run of fewer than `shortest` numbers is listed singly."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) >= shortest else ", ".join(map(str, run)) for run in runs
    )
