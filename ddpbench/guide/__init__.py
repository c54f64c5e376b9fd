"""The manual: Markdown, one chapter per file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources

# The order of the list. A chapter that is missing here comes after these.
ORDER = (
    "start", "hangs", "watch", "doctor", "replicas", "collectives", "ddp", "tune", "parallel",
    "your_model", "faults", "compare", "pytest", "results", "report", "api", "launchers", "mpi",
    "gpu", "method", "contributing",
)  # fmt: skip


def read_chapters() -> dict[str, str]:
    """Return the text of every chapter by its name, in the order of the manual."""
    folder = resources.files("ddpbench.guide")
    files = [file for file in folder.iterdir() if file.name.endswith(".md")]
    texts = {file.name.removesuffix(".md"): file.read_text(encoding="utf-8") for file in files}
    known = [name for name in ORDER if name in texts]
    return {name: texts[name] for name in [*known, *sorted(texts.keys() - ORDER)]}


def format_list(chapters: Mapping[str, str]) -> str:
    """Return the chapters with their first sentences, one per line."""
    width = max(map(len, chapters))
    lines = [f"  {name:<{width}}  {first_sentence(text)}" for name, text in chapters.items()]
    return "\n".join(["Show a chapter: ddpbench guide CHAPTER", "", *lines, ""])


def first_sentence(text: str) -> str:
    """Return the first sentence below a chapter's title, without links and emphasis."""
    body = re.sub(r"<!--.*?-->|^#[^\n]*$", "", text, flags=re.DOTALL | re.MULTILINE).strip()
    paragraph = " ".join(re.split(r"\n\s*\n", body)[0].split())
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", paragraph)
    plain = re.sub(r"\*{1,2}(\w[^*]*)\*{1,2}", r"\1", plain)
    sentence = re.match(r".*?[.!?](?=\s|$)", plain)
    return sentence[0] if sentence else plain
