"""A doctor's run: its setup, its examinations, then the findings and the verdict."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ddpbench.present.columns import Column, choose_columns, text_column
from ddpbench.present.doctor.section import build_sections
from ddpbench.present.document import Chart, Document, ReportRun, Section, show_known
from ddpbench.records.schema import Finding, Run
from ddpbench.records.wording import counted

FINDING_COLUMNS: dict[str, Column[Finding]] = {
    "severity": text_column("severity", lambda f: f.severity, "error, warning or note"),
    "code": text_column("code", lambda f: f.code, "name of the finding"),
    "sentence": text_column("sentence", lambda f: f.sentence, "what was found"),
    "next_step": text_column("next_step", lambda f: f.next_step, "what to do"),
    "place": text_column(
        "place",
        lambda f: " ".join(f"{k}={v}" for k, v in f.place.items()),
        "rank, host, link, … as name=value",
    ),
}


def build_document(run: Run, columns: tuple[str, ...] | None, quiet: bool) -> Document:
    """Return the document of a run.

    columns: show the findings as a table of these columns instead of sentences. quiet: leave out
    setup and examinations.
    """
    from ddpbench.present import header  # loads numpy

    sections = [header.build_setup(run, "Setup"), *build_sections(ReportRun(run.id, run))]
    result = Section("result", "Result", verdict(run), tuple(header.partial(run)), run.findings)
    if columns is not None:
        shown = choose_columns(columns, FINDING_COLUMNS, run.findings)
        block = Chart("findings", "Findings", "", show_known("", shown, run.findings))
        result = replace(result, findings=(), rows=((block,),))
    return Document("", (result,)) if quiet else Document(header.title(run), (*sections, result))


def verdict(run: Run) -> str:
    """Return one line: what was found, or that nothing was found and what remains open."""
    counts = Counter(finding.severity for finding in run.findings)
    seconds = sum(examination.seconds for examination in run.examinations)
    where = f"{counted(len(run.examinations), 'examination')} in {seconds:.0f} s"
    bad = [counted(counts[name], name).upper() for name in ("error", "warning") if counts[name]]
    if bad:
        return f"{' AND '.join(bad)} in {where}"
    if run.state != "complete":
        return f"UNDECIDED: nothing found in {where}, but the run is not complete"
    open_questions = sum(len(examination.unchecked) for examination in run.examinations)
    if open_questions:
        questions = counted(open_questions, "question")
        return f'NOTHING FOUND in {where}; {questions} not answered (see "Not checked")'
    return f"HEALTHY: nothing found in {where}"
