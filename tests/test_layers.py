"""The house plan: imports run down, and the torch-free floors work where there is no torch."""

import ast
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path

import pytest
from stored_runs import a_case, a_result, a_run
from without_torch import RUN_AND_PRINT_CODE, run_without_torch

import ddpbench
from ddpbench.records import store

ROOT = Path(ddpbench.__file__).parents[1]
# A floor and the floors, or single modules, that it may import besides itself. Each stands after
# all that it names, so that no order of entries could hide a circle.
FLOORS: dict[str, tuple[str, ...]] = {
    "version": (),  # ddpbench/__init__.py
    "records": ("version",),
    "analysis": ("version", "records"),
    "verdicts": ("version", "records", "analysis"),
    "launch": ("version", "records"),
    "mpi_backend": ("version", "records", "launch"),
    "mpi": ("launch", "mpi_backend"),
    "hang": ("version", "records", "launch", "mpi_backend"),
    "runtime": ("version", "records", "launch", "mpi_backend", "mpi", "hang"),
    "catalog": ("version", "records", "launch", "mpi_backend", "runtime"),
    "present": (
        "version", "records", "analysis", "verdicts", "catalog.sizes", "catalog.parallel",
    ),
    "interchange": ("version", "records", "catalog"),
    "measure": ("version", "records", "analysis", "launch", "hang", "runtime", "catalog"),
    "replicas": ("version", "records", "analysis", "hang", "runtime", "catalog"),
    "session": (
        "version", "records", "analysis", "launch", "hang", "runtime", "catalog", "present",
        "interchange", "measure", "replicas",
    ),
    "watch": (
        "version", "records", "analysis", "verdicts", "mpi_backend", "launch", "hang", "runtime",
        "catalog", "present", "measure", "replicas", "session",
    ),
    "doctor": (
        "version", "records", "analysis", "launch", "runtime", "catalog", "present", "measure",
        "session",
    ),
    "measuring": (
        "version", "records", "analysis", "launch", "runtime", "catalog", "present", "measure",
        "replicas", "session",
    ),
    "nested_runs": (
        "version", "records", "analysis", "verdicts", "launch", "catalog", "present", "session",
        "doctor", "measuring",
    ),
    "guide": (),
    "commands": (
        "version", "records", "analysis", "verdicts", "launch", "catalog", "present",
        "interchange", "session", "doctor", "watch", "measuring", "nested_runs", "guide",
    ),
    # The commands are imported by name, when they are called: see the test of cycles.
    "cli": ("version", "records", "session", "commands"),
    "pytest_plugin": (
        "version", "records", "analysis", "verdicts", "present", "nested_runs", "commands",
    ),
    "__main__": ("cli",),
}  # fmt: skip


def floor(module: str) -> str:
    """The floor of a module of ddpbench; one directly in it, unless named above, measures."""
    if module == "ddpbench":
        return "version"
    first, *rest = module.split(".")[1:]
    return first if rest or first in FLOORS else "measuring"


# What a user's script finds in ddpbench, and the module that has it.
GIVEN = {f"ddpbench.{n}": "ddpbench.replicas" for n in ddpbench.__all__ if n != "__version__"}
GIVEN["ddpbench.watchdog"] = "ddpbench.hang.guard"
GIVEN["ddpbench.watch"] = "ddpbench.watch.api"
GIVEN["ddpbench.load"] = "ddpbench.commands.show"


def given_on_demand(node: ast.AST) -> bool:
    """Whether this code of a module runs when a name is asked for, or when types are checked."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef) and node.name == "__getattr__"


def is_left_out(node: ast.AST, module: str) -> bool:
    """Whether no layer answers for this code: the entry point of a module that is run, and what
    ddpbench/__init__.py gives its users when they ask for it."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
        return True
    return module == "ddpbench" and given_on_demand(node)


Found = tuple[ast.Import | ast.ImportFrom | ast.Call, bool]


@cache
def find_imports(text: str, module: str) -> tuple[Found, ...]:
    """What a file imports, at the top, in functions, for type checking or through import_module
    with a constant, and whether it is left out. A file is the same in nearly every copy."""
    found: list[Found] = []

    def look(node: ast.AST, left_out: bool) -> None:
        for child in ast.iter_child_nodes(node):
            out = left_out or is_left_out(child, module)
            named = isinstance(child, ast.Import | ast.ImportFrom)
            if named or (
                isinstance(child, ast.Call)
                and getattr(child.func, "attr", getattr(child.func, "id", ""))
                in ("import_module", "__import__")
                and isinstance(child.args[0], ast.Constant)
            ):
                found.append((child, out))
            look(child, out)

    look(ast.parse(text), False)
    return tuple(found)


def imported(
    text: str, module: str, modules: AbstractSet[str], everything: bool = False
) -> Iterator[tuple[int, str]]:
    """(line, module) of everything of ddpbench that this file imports, relatively, too; but for
    what is left out, unless everything is asked for. Code in ddpbench that uses what the package
    gives its users imports the module that has it."""
    for node, left_out in find_imports(text, module):
        if left_out and not everything:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")
            above = package if f"{module}.__init__" in modules else package[:-1]
            start = above[: len(above) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            within = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in modules else base for name in within]
            names = [GIVEN.get(one, name) for one, name in zip(within, names, strict=True)]
        else:
            assert isinstance(node.args[0], ast.Constant)
            names = [str(node.args[0].value)]
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "ddpbench")


@cache
def read_package() -> dict[str, str]:
    """The text of each file of the package, by its path below ddpbench/."""
    folder = ROOT / "ddpbench"
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.py")}


def plant(path: str, code: str) -> dict[str, str]:
    """The package with this code at the end of a file."""
    return {**read_package(), path: f"{read_package().get(path, '')}{code}\n"}


def read_imports(
    texts: dict[str, str], everything: bool = False
) -> dict[tuple[str, str], tuple[tuple[int, str], ...]]:
    """What each file imports, by its path and its dotted name."""
    names = {path: ".".join(("ddpbench", *Path(path).with_suffix("").parts)) for path in texts}
    short = {path: name.removesuffix(".__init__") for path, name in names.items()}
    modules = frozenset({*names.values(), *short.values()})
    return {
        (path, short[path]): tuple(imported(text, short[path], modules, everything))
        for path, text in texts.items()
    }


def arrows_up(texts: dict[str, str]) -> list[str]:
    """Every import in these files that its floor may not make."""
    found = []
    for (path, module), targets in read_imports(texts).items():
        mine = floor(module)
        for line, target in targets:
            inside = target.removeprefix("ddpbench.")
            if floor(target) != mine and not {floor(target), inside} & set(FLOORS.get(mine, ())):
                found.append(f"ddpbench/{path}:{line} imports {target}")
    return sorted(found)


def cycles(texts: dict[str, str]) -> list[list[str]]:
    """The modules that import one another, in a circle of any length.

    An import counts wherever it stands. Only an import whose name is computed does not: cli finds
    a command by its name in the folder commands/, as a shell finds a program, and knows none.
    """
    imports = {
        module: {target.removesuffix(".__init__") for _, target in targets}
        for (_, module), targets in read_imports(texts, True).items()
    }
    reached = {name: reachable(name, imports) for name in imports}
    circles = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in imports
        if name in reached[name]
    }
    return sorted(map(list, circles))


def reachable(start: str, imports: dict[str, set[str]]) -> set[str]:
    """The modules that this one imports, directly or through others."""
    reached, left = set[str](), [start]
    while left:
        new = imports[left.pop()] & set(imports) - reached
        reached |= new
        left += new
    return reached


def test_no_modules_import_one_another() -> None:
    """No strongly connected component of the imports has two modules, nor one that imports
    itself."""
    assert cycles(read_package()) == []


CIRCLES = {
    "for types": ("records/schema.py", "if TYPE_CHECKING:\n    from ddpbench.records import store"),
    "in a function": ("launch/family.py", "def f():\n    from ddpbench.launch import forks"),
    "when run": (
        "session/errors.py",
        "if __name__ == '__main__':\n    from ddpbench.cli import main",
    ),
    "when asked for": ("replicas/verify.py", "from ddpbench import __version__"),
}


@pytest.mark.parametrize("way", CIRCLES)
def test_a_circle_is_found(way: str) -> None:
    """An import that closes a circle, planted wherever Python allows one, is found."""
    name, planted = CIRCLES[way]
    (circle,) = cycles(plant(name, planted))
    assert "ddpbench." + name.removesuffix(".py").replace("/", ".") in circle


def test_no_arrow_runs_up() -> None:
    """Every module of ddpbench imports from floors below its own only."""
    assert arrows_up(read_package()) == []


def test_the_floors_have_an_order() -> None:
    """Each floor names only floors that stand before it, and every package is one of them."""
    order = list(FLOORS)
    for position, allowed in enumerate(FLOORS.values()):
        assert {name.split(".")[0] for name in allowed} <= set(order[:position])
    packages = {path.parent.name for path in (ROOT / "ddpbench").glob("*/__init__.py")}
    assert packages <= set(order)


UP = {
    "at the top": ("records/codec.py", "from ddpbench.analysis import stats"),
    "of a module": ("analysis/stats.py", "import ddpbench.runtime.world"),
    "of a whole package": ("analysis/stats.py", "from ddpbench import runtime"),
    "in a function": ("runtime/control.py", "def f():\n    from ddpbench.measure import loop"),
    "for types": (
        "catalog/sizes.py",
        "if TYPE_CHECKING:\n    from ddpbench.present import formats",
    ),
    "by name": ("measure/clock.py", "importlib.import_module('ddpbench.collectives')"),
    "relatively": ("runtime/cpu.py", "from ..catalog import backends"),
    "from a package": ("present/__init__.py", "from ..measure.loop import Samples"),
    "to the front door": ("collectives.py", "def f():\n    from ddpbench import cli"),
    "beside": ("present/collectives/columns.py", "from ddpbench.catalog.backends import BACKENDS"),
    "of what users are given": ("runtime/control.py", "from ddpbench import verify_replicas"),
    "in the package itself": ("__init__.py", "from ddpbench.replicas import Report"),
    "under another test": (
        "session/recorder.py",
        "if __name__ != '__main__':\n    import ddpbench.cli",
    ),
}


@pytest.mark.parametrize("way", UP)
def test_an_arrow_up_is_found(way: str) -> None:
    """An import that runs up, planted in any way that Python has, is found, alone and with its
    line."""
    name, planted = UP[way]
    line = len(read_package()[name].splitlines()) + 1 + planted.count("\n")
    arrows = arrows_up(plant(name, planted))
    assert [arrow.split(" ")[0] for arrow in arrows] == [f"ddpbench/{name}:{line}"]


def test_a_module_that_is_run_may_call_the_front_door() -> None:
    """`if __name__ == "__main__":` is no import of the module; a new command is on its floor."""
    code = (
        "from ddpbench import collectives\nfrom ddpbench.measure import loop\n"
        'if __name__ == "__main__":\n    from ddpbench.cli import main'
    )
    assert arrows_up(plant("another.py", code)) == []


# --- without torch --------------------------------------------------------------------------------


TORCH_FREE = ("analysis", "records", "present", "catalog", "interchange", "doctor")


def test_without_torch_all_its_free_floors_can_be_imported() -> None:
    """They, the measuring commands and cli import where importing torch fails; the hook that makes
    it fail does so."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder in TORCH_FREE
        for path in (ROOT / "ddpbench" / folder).rglob("*.py")
        if path.name != "models.py"  # subclasses of nn.Module, which building a task imports
    ]
    modules += ["ddpbench.cli", "ddpbench.collectives", "ddpbench.ddp"]
    assert len(modules) > 15
    said = run_without_torch(
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "try: import torch\nexcept ImportError as error: print(error)",
        *modules,
    )
    assert said == "torch is imported\n"


def test_the_package_gives_without_torch_what_needs_none() -> None:
    """`import ddpbench` loads no torch, and no numpy; what needs torch is imported when it is asked
    for, and an unknown name is an AttributeError."""
    said = run_without_torch(
        "import ddpbench; print(ddpbench.__version__, hasattr(ddpbench, 'nothing'))\n"
        "try: ddpbench.verify_replicas\nexcept ImportError as error: print(error)",
        forbidden=("torch", "numpy", "xxhash"),
    )
    assert said.startswith(f"{ddpbench.__version__} False\n")
    assert said.endswith(" is imported\n")
    for name in ddpbench.__all__:
        assert getattr(ddpbench, name)


@pytest.mark.parametrize("words", [("--help",), ("list", "--help")])
def test_the_overview_imports_little(words: tuple[str, ...]) -> None:
    """The overview needs a name and a line per command: it imports no command and few modules."""
    heavy = ("torch", "numpy", "pandas", "scipy", "pyarrow", "rich", "psutil", "tabulate")
    said = run_without_torch(
        RUN_AND_PRINT_CODE.replace("as end: print(end.code)", ": print(*sys.modules)"),
        *words,
        forbidden=heavy if words == ("--help",) else heavy[:6],
    )
    modules = said.splitlines()[-1].split()
    commands = [name for name in modules if name.startswith("ddpbench.commands.")]
    assert commands == ([] if words == ("--help",) else ["ddpbench.commands.list"])
    if not commands:
        assert len([name for name in modules if name.startswith("ddpbench")]) <= 22
        assert not {"argparse", "asyncio", "unittest"} & set(modules)


def test_help_loads_nothing_heavy() -> None:
    """`python -m ddpbench collectives --help` works without torch, numpy, pandas, scipy, pyarrow
    and MPI, and so does a refused option: typing is answered at once."""
    heavy = ("torch", "numpy", "pandas", "scipy", "pyarrow", "mpi4py")
    program = (
        "from ddpbench import cli\n"
        "for words in ['--help'], ['--op', 'none']:\n"
        "    try: cli.main(['collectives', *words])\n"
        "    except SystemExit as end: print(end.code)"
    )
    *_, said, code = run_without_torch(program, forbidden=heavy).partition("--reduce-op")
    assert (said, code.splitlines()[-2:]) == ("--reduce-op", ["0", "2"])


def test_a_stored_run_is_shown_without_torch(tmp_path: Path) -> None:
    """`show` reads and prints a run, in every format, on a machine that has no torch."""
    run = a_run(a_result(), a_result(a_case(nbytes=8, count=2)))
    store.create(tmp_path / "mine", run, "x")
    program = (
        "from ddpbench.cli import main\n"
        "for form in sys.argv[2:]: main(['show', sys.argv[1], '--format', form]), print('=====')"
    )
    forms = ("table", "csv", "json", "markdown")
    *shown, end = run_without_torch(program, str(tmp_path / "mine"), *forms).split("=====\n")
    assert (len(shown), end) == (4, "")
    for text in shown:
        assert "all_reduce" in text
        assert "gloo" in text


# --- kinds of devices -----------------------------------------------------------------------------

# Where the name of a kind decides something outside of runtime/devices.py, and why it may.
KINDS_NAMED = {
    "catalog/backends.py": "nccl carries CUDA tensors only; mpi may stage them",
    "doctor/preflight/checks.py": "a finding counts more where GPUs are measured",
    "hang/cuda.py": "below the table; CUDA alone has a capture mode",
    "mpi_backend/work.py": "below the table; torch's futures take no CPU among their devices",
    "present/case_labels.py": "the CPU is not written out",
    "replicas/channel.py": "a group's own list of the kinds that it carries",
    "runtime/nccl_library.py": "torch's number of the NCCL that it was built with",
    "session/start_ranks.py": "what was asked for on the CPU is refused without a host's name",
}  # fmt: skip


def names_a_kind(node: ast.AST) -> bool:
    """Whether this code asks torch.cuda, or compares something with the name of a kind."""
    if isinstance(node, ast.Attribute):
        return node.attr == "is_cuda" or (node.attr == "cuda" and ast.unparse(node) == "torch.cuda")
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return any(isinstance(s, ast.Constant) and s.value in ("cpu", "cuda") for s in sides)
    return False


def kinds_named() -> set[str]:
    """The files of the package where the name of a kind of device decides something."""
    return {
        path
        for path, text in read_package().items()
        if "cuda" in text or '"cpu"' in text
        if any(names_a_kind(node) for node in ast.walk(ast.parse(text)))
    } - {"runtime/devices.py"}


def test_only_the_table_of_devices_knows_kinds() -> None:
    """Code outside the table neither calls torch.cuda nor compares the name of a kind, but for the
    files that are listed with their reasons. Ask `devices.of(device)` instead."""
    assert kinds_named() == set(KINDS_NAMED)
