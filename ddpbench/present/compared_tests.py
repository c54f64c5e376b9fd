"""The tests of a pytest session that measured ranks, and verdicts if there are any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ddpbench.present.changes import describe_change, format_noticeable, list_changes
from ddpbench.present.document import Section
from ddpbench.records.schema import Finding
from ddpbench.records.wording import counted
from ddpbench.verdicts.comparison import ONLY_NEW, count_verdicts
from ddpbench.verdicts.regression import JudgedTest, Measured


def build_section(measured: Mapping[str, Measured], rows: Sequence[JudgedTest]) -> Section:
    """Return the section of a session.

    measured: test → its measurement. rows: the verdicts.
    """
    names = {test: test.rpartition("::")[2] for test in measured}  # without files, if distinct
    if len(set(names.values())) < len(names):
        names = {test: test for test in measured}
    verdicts = ", ".join(f"{count} {name}" for name, count in count_verdicts(rows).items())
    changes = [_describe(names[row.test], row) for row in rows if row.saved is not None]
    charts = [list_changes("tests-changes", "test", changes)] if changes else []
    return Section(
        "tests",
        "Tests",
        f"{counted(len(names), 'test')} measured{f': {verdicts}' if verdicts else ''}.",
        findings=tuple(_find(names, measured, rows)),
        rows=tuple((chart,) for chart in charts),
    )


def _describe(name: str, row: JudgedTest) -> dict[str, str]:
    saved = row.saved or row.measured
    versions = (saved.torch, row.measured.torch)
    more = {
        "saved in": saved.source,
        "torch": " → ".join(dict.fromkeys(filter(None, versions))),
        "margin": f"±{row.margin * 100:.3g} %",
    }
    return describe_change({"test": name}, row, **more)


def _find(
    names: Mapping[str, str], measured: Mapping[str, Measured], rows: Sequence[JudgedTest]
) -> Iterator[Finding]:
    """Yield warnings about times, and tests without verdicts."""
    bases = {row.test: row.saved for row in rows if row.saved is not None}
    for side, every in (("base", bases), ("new", measured)):
        for test, one in every.items():
            for warning in one.warnings:
                yield Finding("warning", "conditions", f"{side}, {names[test]}: {warning}")
    if unknown := [names[row.test] for row in rows if row.saved is None]:
        sentence = f"{ONLY_NEW}, no saved run to compare with: {', '.join(unknown)}"
        yield Finding("note", "not-compared", sentence)
    if text := format_noticeable(rows):
        yield Finding("note", "sensitivity", text)
