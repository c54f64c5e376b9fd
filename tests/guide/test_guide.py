"""The manual: its commands run as written, its links have targets, and `ddpbench guide` shows it.

A fenced block of a chapter begins with one of these:
    ```sh                    run here, line by line, in one empty folder per chapter
    ```sh not-run: REASON    shown to the reader only
    ```python                compiled; if its first line is `# file: NAME.py`, written first
    ```text                  output, or another format of KINDS
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_lines import (
    ROOT,
    clean_environment,
    ddpbench_command,
)
from patience import PATIENCE_SECONDS
from without_torch import RUN_DDPBENCH, run_without_torch

from ddpbench import cli, guide
from ddpbench.launch import placement

README = ROOT / "README.md"
CHAPTERS = sorted((ROOT / "ddpbench" / "guide").glob("*.md"))
FIRST_PAGE = ROOT / "ddpbench" / "guide" / "start.md"
PAGES = [README, *CHAPTERS]
KINDS = ("sh", "text", "python", "yaml", "json", "csv", "toml", "markdown")
FENCE = re.compile(
    r"^ *(?P<fence>`{3,})(?P<info>[^`\n]*)\n(?P<text>.*?)^ *(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
# Scripts that pip installs beside Python.
SCRIPTS = {"torchrun": "torch.distributed.run:main", "ddpbench": "ddpbench.cli:main"}

each_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
each_chapter = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)


@dataclass(frozen=True)
class Block:
    """A fenced block and the place of its first line."""

    place: str
    info: str
    text: str


def read_blocks(path: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = path.read_text(encoding="utf-8")
    return [
        Block(
            f"{path.name}, line {text.count(chr(10), 0, match.start('text')) + 1}",
            match["info"].strip(),
            textwrap.dedent(match["text"]),
        )
        for match in FENCE.finditer(text)
    ]


def read_prose(path: Path) -> str:
    """Return a page without its fenced blocks."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


# --- the commands of the chapters -----------------------------------------------------------------


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a reader who has installed ddpbench: its commands are in PATH."""
    folders = [tmp_path_factory.mktemp("scripts"), Path(sys.executable).parent]
    for name, entry in SCRIPTS.items():
        module, _, function = entry.partition(":")
        (folders[0] / name).write_text(
            f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\n"
            f"sys.exit({function}())\n"
        )
        (folders[0] / name).chmod(0o755)
    if (mpirun := placement.find_mpirun()) is not None:
        folders.append(Path(mpirun).parent)
    clean = {k: v for k, v in clean_environment().items() if not k.startswith("PYTEST_")}
    if os.geteuid() == 0:  # mpirun refuses root; a reader is someone else
        clean |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    path = os.pathsep.join([*map(str, folders), clean["PATH"]])
    plugin = "ddpbench.pytest_plugin"  # pytest finds it by its entry point, if it is installed
    return {**clean, "PATH": path, "PYTHONPATH": str(ROOT), "PYTEST_PLUGINS": plugin}


def run_block(block: Block, folder: Path, environ: dict[str, str]) -> None:
    """Run the commands of a block; fail with the command and its output if one fails."""
    report = "trap 'echo \"exit code $? of: $BASH_COMMAND\" >&2' ERR"
    script = f"set -eo pipefail\n{report}\n{block.text}"
    words = ["timeout", "--kill-after=5", str(PATIENCE_SECONDS), "bash", "-c", script]
    log = folder.with_name("output")
    with log.open("w") as output:  # a pipe would stay open in a process that is left behind
        code = subprocess.run(
            words, cwd=folder, env=environ, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, check=False,
        ).returncode  # fmt: skip
    if code != 0:  # 124 after the deadline
        shown = log.read_text(encoding="utf-8", errors="replace")
        pytest.fail(
            f"{block.place}: exit code {code} of\n\n{block.text}\nOutput:\n\n{shown}",
            pytrace=False,
        )


# All chapters take three minutes: the suite runs two, .ci/nightly all.
QUICK = ("start", "method")
each_run = pytest.mark.parametrize(
    "path",
    [path for path in CHAPTERS if path.stem in QUICK or os.environ.get("DDPBENCH_TEST_NIGHTLY")],
    ids=lambda path: path.stem,
)


@pytest.mark.thorough
@each_run
def test_the_commands_of_a_chapter_run(path: Path, tmp_path: Path, shell: dict[str, str]) -> None:
    """Each `sh` block ends with exit code 0, in one folder per chapter."""
    blocks = read_blocks(path)
    commands = [block for block in blocks if block.info == "sh"]
    if any("mpi" in block.text for block in commands) and placement.find_mpirun() is None:
        pytest.skip("there is no mpirun: install the extra `mpi`")
    folder = tmp_path / "empty"
    folder.mkdir()
    for block in blocks:
        if (name := find_file_name(block)) is not None:
            (folder / name).write_text(block.text, encoding="utf-8")
    for block in commands:
        run_block(block, folder, shell)


def find_file_name(block: Block) -> str | None:
    """Return the file that a Python block is written to; None if it is not."""
    named = re.match(r"# file: (.*)\n", block.text) if block.info == "python" else None
    if named is None:
        return None
    assert re.fullmatch(r"[\w-]+\.py", named[1]), f"{block.place}: {named[1]} is no file name"
    return named[1]


# --- the text -------------------------------------------------------------------------------------


@each_page
def test_blocks_have_a_kind(path: Path) -> None:
    """Each block has a kind, each command that is not run has a reason, Python compiles, and no
    fence is open."""
    for block in read_blocks(path):
        kind, _, rest = block.info.partition(" ")
        assert kind in KINDS, f"{block.place}: ```{block.info}: choose one of {', '.join(KINDS)}"
        if kind == "sh" and (rest or path == README):
            reason = re.fullmatch(r"not-run: \S.*", rest)
            assert reason, f"{block.place}: write ```sh or ```sh not-run: REASON"
        else:
            assert not rest, f"{block.place}: only sh may have a reason: {block.info}"
        if kind == "python":
            compile(block.text, block.place, "exec", dont_inherit=True)
            find_file_name(block)
    assert not re.search(r"^ *```", read_prose(path), re.MULTILINE), f"{path.name}: a fence is open"


@each_page
def test_links_have_targets(path: Path) -> None:
    """Each link to a file of this checkout has its file and its heading."""
    prose = re.sub(r"`[^`\n]*`", "", read_prose(path))
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{path.name} links {link}, which is missing"
        if anchor:
            assert anchor in read_anchors(target), f"{path.name} links {link}: no such heading"


def read_anchors(path: Path) -> set[str]:
    """Return the headings of a page as GitHub names them in links."""
    headings = re.findall(r"^#+ +(.*?) *$", read_prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@each_chapter
def test_a_chapter_begins_with_a_sentence_for_the_list(path: Path) -> None:
    """A title, then a sentence that `ddpbench guide` can list."""
    text = path.read_text(encoding="utf-8")
    assert re.match(r"(<!--.*?-->\n+)?# \S", text, re.DOTALL)
    sentence = guide.first_sentence(text)
    assert re.fullmatch(r"\S.*[.!?]", sentence), f"{path.name} begins with {sentence!r}"


def test_the_readme_is_short() -> None:
    """It has at most 150 lines, the two commands first, and only existing commands."""
    text = README.read_text(encoding="utf-8")
    assert text.count("\n") <= 150
    first, second = re.findall(r"^\./run_bench\.sh (\w+)", text, re.MULTILINE)[:2]
    assert (first, second) == ("cpu", "test")
    assert "start" in re.findall(r"\]\(ddpbench/guide/(\w+)\.md", text)
    assert read_commands(README) <= set(cli.list_names())


def test_the_first_page_names_everything() -> None:
    """It links every other chapter, and has every command and no other."""
    text = FIRST_PAGE.read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\((\w+)\.md", text))
    assert linked == {path.stem for path in CHAPTERS} - {FIRST_PAGE.stem}
    assert read_commands(FIRST_PAGE) == set(cli.list_names())


def read_commands(path: Path) -> set[str]:
    """Return the commands of ddpbench on a page, as in `ddpbench list` or in a block."""
    commands = re.findall(r"`ddpbench ([a-z]+)\b", read_prose(path))
    for block in read_blocks(path):
        commands += re.findall(r"^ddpbench ([a-z]+)\b", block.text, re.MULTILINE)
    return set(commands)


def test_the_manual_is_short() -> None:
    """It has at most 24,000 words, tables and output included."""
    assert sum(len(path.read_text(encoding="utf-8").split()) for path in CHAPTERS) <= 24_000


# --- the command ----------------------------------------------------------------------------------

HEAVY = ("torch", "numpy", "pandas", "scipy", "pyarrow", "mpi4py", "rich")


def test_the_commands_are_listed_by_purpose() -> None:
    """`ddpbench --help` lists every command once, under its group, and loads nothing heavy."""
    text = run_without_torch(RUN_DDPBENCH, "--help", forbidden=HEAVY)
    groups = re.findall(r"^(\w+):\n((?:  .*\n)+)", text, re.MULTILINE)
    listed = {title: re.findall(r"^  (\w+) +\S", lines, re.MULTILINE) for title, lines in groups}
    assert listed == {title: list(entries) for title, entries in cli.read_groups().items()}
    assert tuple(listed) == cli.GROUPS
    assert sorted(itertools.chain(*listed.values())) == cli.list_names()


def test_the_list_has_every_chapter() -> None:
    """Without a chapter, each is listed with its first sentence. Neither the list nor a chapter
    loads anything heavy."""
    text = run_without_torch(RUN_DDPBENCH, "guide", forbidden=HEAVY)
    listed = dict(re.findall(r"^  (\w+) +(\S.*)$", text, re.MULTILINE))
    assert sorted(listed) == [path.stem for path in CHAPTERS]
    chapters = guide.read_chapters()
    assert listed == {name: guide.first_sentence(text) for name, text in chapters.items()}
    text = run_without_torch(RUN_DDPBENCH, "guide", "contributing", forbidden=HEAVY)
    assert text == chapters["contributing"]


# These variables change how a terminal is used.
HIDDEN = ("MANPAGER", "PAGER", "LESS", "NO_COLOR", "COLUMNS", "LINES")


def show_on_terminal(words: list[str], **extra: str) -> str:
    """Run these words on a terminal of 100 columns; return its text."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    clean = {k: v for k, v in clean_environment().items() if k not in HIDDEN}
    process = subprocess.Popen(
        words, stdin=follower, stdout=follower, stderr=follower,
        env={**clean, "TERM": "xterm-256color", **extra},
    )  # fmt: skip
    os.close(follower)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while piece := os.read(leader, 2**16):
            shown += piece
    os.close(leader)
    assert process.wait(PATIENCE_SECONDS) == 0, shown.decode()
    return shown.decode().replace("\r\n", "\n")


def test_a_terminal_gets_a_page() -> None:
    """On a terminal, a chapter goes through the user's pager."""
    command = ddpbench_command("guide", "contributing")
    lines = show_on_terminal(command, PAGER="sed 's/^/| /'").splitlines()
    assert all(line.startswith("| ") for line in lines)


@each_chapter
def test_a_pipe_gets_a_chapter(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["guide", path.stem]) == 0
    assert capsys.readouterr().out == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("# X\n\nFind the rank. More.\n", "Find the rank."),
        ("# X\nFind it\nin ddpbench.ddp, today! More.", "Find it in ddpbench.ddp, today!"),
        ("<!--a-->\n# X\n\n[hangs](hangs.md) **all** *of* `x`. More", "hangs all of `x`."),
        ("# X\n\nNo end\n\nMore.", "No end"),
        ("# X\n", ""),
    ],
)  # fmt: skip
def test_the_first_sentence(text: str, sentence: str) -> None:
    """It ends at a dot before a space, and has no links or emphasis."""
    assert guide.first_sentence(text) == sentence
