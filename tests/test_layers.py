"""The house plan: imports run down, and the torch-free floors work where there is no torch."""

import ast
import shutil
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path

import pytest
from stored_runs import a_case, a_result, a_run
from without_torch import RUN_AND_PRINT_CODE, RUN_DDPBENCH, run_without_torch

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
    "render": (
        "version", "records", "analysis", "verdicts", "catalog.sizes", "catalog.parallel",
    ),
    "interchange": ("version", "records", "catalog"),
    "report": (
        "version", "records", "analysis", "verdicts", "render", "catalog.sizes", "catalog.parallel",
    ),
    "measure": ("version", "records", "analysis", "launch", "hang", "runtime", "catalog"),
    "replicas": ("version", "records", "analysis", "hang", "runtime", "catalog"),
    "session": (
        "version", "records", "analysis", "launch", "hang", "runtime", "catalog", "render",
        "interchange", "report", "measure", "replicas",
    ),
    "watch": (
        "version", "records", "analysis", "verdicts", "mpi_backend", "launch", "hang", "runtime",
        "catalog", "render", "measure", "replicas", "session",
    ),
    "doctor": (
        "version", "records", "analysis", "launch", "runtime", "catalog", "render", "measure",
        "session",
    ),
    "measuring": (
        "version", "records", "analysis", "launch", "runtime", "catalog", "render", "measure",
        "replicas", "session",
    ),
    "nested_runs": (
        "version", "records", "analysis", "verdicts", "launch", "catalog", "render", "session",
        "doctor", "measuring",
    ),
    "guide": (),
    "commands": (
        "version", "records", "analysis", "verdicts", "launch", "catalog", "render", "report",
        "interchange",
        "session", "doctor", "watch", "measuring", "nested_runs", "guide",
    ),
    # The commands are imported by name, when they are called: see the test of cycles.
    "cli": ("version", "records", "session", "commands"),
    "pytest_plugin": (
        "version", "records", "analysis", "verdicts", "render", "report", "nested_runs", "commands",
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
        return ast.unparse(node.test) == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef) and node.name == "__getattr__"


def is_left_out(node: ast.AST, module: str) -> bool:
    """Whether no layer answers for this code: the entry point of a module that is run, and what
    ddpbench/__init__.py gives its users when they ask for it."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
        return True
    return module == "ddpbench" and given_on_demand(node)


def imported(
    tree: ast.AST, module: str, modules: AbstractSet[str], everything: bool = False
) -> Iterator[tuple[int, str]]:
    """(line, module) of everything of ddpbench that this code imports, at the top, in functions,
    for type checking, relatively or through import_module with a constant; but for what is left
    out, unless everything is asked for. Code in ddpbench that uses what the package gives its users
    imports the module that has it."""
    for node in ast.iter_child_nodes(tree):
        if not everything and is_left_out(node, module):
            continue
        names: list[str] = []
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
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__")
            and isinstance(node.args[0], ast.Constant)
        ):
            names = [str(node.args[0].value)]
        for name in names:
            if name.split(".")[0] == "ddpbench":
                yield getattr(node, "lineno", 0), name
        yield from imported(node, module, modules, everything)


@cache
def imports_of(
    text: str, module: str, modules: frozenset[str], everything: bool = False
) -> tuple[tuple[int, str], ...]:
    """What `imported` gives for a file: of most files the same in every copy."""
    return tuple(imported(ast.parse(text), module, modules, everything))


def modules_below(root: Path) -> tuple[dict[str, Path], frozenset[str]]:
    """The files below `root`/ddpbench by dotted name, and all names by which they are imported."""
    paths = {
        ".".join(path.relative_to(root).with_suffix("").parts): path
        for path in (root / "ddpbench").rglob("*.py")
    }
    return paths, frozenset({name.removesuffix(".__init__") for name in paths} | set(paths))


def arrows_up(root: Path) -> list[str]:
    """Every import below `root`/ddpbench that its floor may not make."""
    paths, modules = modules_below(root)
    found = []
    for name, path in paths.items():
        module = name.removesuffix(".__init__")
        mine = floor(module)
        for line, target in imports_of(path.read_text(), module, modules):
            inside = target.removeprefix("ddpbench.")
            if floor(target) != mine and not {floor(target), inside} & set(FLOORS.get(mine, ())):
                found.append(f"{path.relative_to(root)}:{line} imports {target}")
    return sorted(found)


def cycles(root: Path) -> list[list[str]]:
    """The modules below `root`/ddpbench that import one another, in a circle of any length.

    An import counts wherever it stands. Only an import whose name is computed does not: cli finds
    a command by its name in the folder commands/, as a shell finds a program, and knows none.
    """
    paths, modules = modules_below(root)
    imports = {
        name.removesuffix(".__init__"): {
            target.removesuffix(".__init__")
            for _, target in imports_of(
                path.read_text(), name.removesuffix(".__init__"), modules, True
            )
        }
        for name, path in paths.items()
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
    assert cycles(ROOT) == []


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
def test_a_circle_is_found(tmp_path: Path, way: str) -> None:
    """An import that closes a circle, planted in a copy wherever Python allows one, is found."""
    shutil.copytree(ROOT / "ddpbench", tmp_path / "ddpbench")
    name, planted = CIRCLES[way]
    path = tmp_path / "ddpbench" / name
    path.write_text(f"{path.read_text()}{planted}\n")
    (circle,) = cycles(tmp_path)
    assert "ddpbench." + name.removesuffix(".py").replace("/", ".") in circle


def test_no_arrow_runs_up() -> None:
    """Every module of ddpbench imports from floors below its own only."""
    assert arrows_up(ROOT) == []


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
        "if TYPE_CHECKING:\n    from ddpbench.render import formats",
    ),
    "by name": ("measure/clock.py", "importlib.import_module('ddpbench.collectives')"),
    "relatively": ("runtime/cpu.py", "from ..catalog import backends"),
    "from a package": ("render/__init__.py", "from ..measure.loop import Samples"),
    "to the front door": ("collectives.py", "def f():\n    from ddpbench import cli"),
    "beside": ("render/collective_columns.py", "from ddpbench.catalog.backends import BACKENDS"),
    "of what users are given": ("runtime/control.py", "from ddpbench import verify_replicas"),
    "in the package itself": ("__init__.py", "from ddpbench.replicas import Report"),
    "under another test": (
        "session/recorder.py",
        "if __name__ != '__main__':\n    import ddpbench.cli",
    ),
}


@pytest.mark.parametrize("way", UP)
def test_an_arrow_up_is_found(tmp_path: Path, way: str) -> None:
    """An import that runs up, planted in a copy in any way that Python has, is found, alone and
    with its line."""
    shutil.copytree(ROOT / "ddpbench", tmp_path / "ddpbench")
    name, planted = UP[way]
    path = tmp_path / "ddpbench" / name
    first = len(path.read_text().splitlines()) + 1
    path.write_text(f"{path.read_text()}{planted}\n")
    line = first + planted.count("\n")
    assert [arrow.split(" ")[0] for arrow in arrows_up(tmp_path)] == [f"ddpbench/{name}:{line}"]


def test_a_module_that_is_run_may_call_the_front_door(tmp_path: Path) -> None:
    """`if __name__ == "__main__":` is no import of the module; a new command is on its floor."""
    shutil.copytree(ROOT / "ddpbench", tmp_path / "ddpbench")
    (tmp_path / "ddpbench/another.py").write_text(
        "from ddpbench import collectives\nfrom ddpbench.measure import loop\n"
        'if __name__ == "__main__":\n    from ddpbench.cli import main\n'
    )
    assert arrows_up(tmp_path) == []


# --- without torch --------------------------------------------------------------------------------


TORCH_FREE = ("analysis", "records", "render", "catalog", "interchange", "doctor")


def test_without_torch_all_its_free_floors_can_be_imported() -> None:
    """analysis, records, render, catalog, interchange, doctor, options and cli import
    where importing torch fails; the hook that makes it fail does so."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder in (
            "analysis",
            "records",
            "render",
            "catalog",
            "interchange",
            "doctor",
        )
        for path in (ROOT / "ddpbench" / folder).rglob("*.py")
        if path.name != "models.py"  # subclasses of nn.Module, which building a task imports
    ]
    modules += [
        f"ddpbench.{name}"
        for name in (
            "options",
            "cli",
            "collectives",
            "compare",
            "baseline",
            "report",
            "ddp",
        )
        if (ROOT / f"ddpbench/{name}.py").exists()
    ]
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
    assert "--reduce-op" in run_without_torch(
        RUN_DDPBENCH, "collectives", "--help", forbidden=heavy
    )
    said = run_without_torch(
        RUN_AND_PRINT_CODE,
        "collectives", "--op", "none", forbidden=heavy,
    )  # fmt: skip
    assert said == "2\n"


@pytest.mark.parametrize("form", ["table", "csv", "json", "markdown"])
def test_a_stored_run_is_shown_without_torch(tmp_path: Path, form: str) -> None:
    """`show` reads and prints a run, in every format, on a machine that has no torch."""
    run = a_run(a_result(), a_result(a_case(nbytes=8, count=2)))
    store.create(tmp_path / "mine", run, "x")
    said = run_without_torch(RUN_DDPBENCH, "show", str(tmp_path / "mine"), "--format", form)
    assert "all_reduce" in said
    assert "gloo" in said


# --- kinds of devices -----------------------------------------------------------------------------

# Where the name of a kind decides something outside of runtime/devices.py, and why it may.
KINDS_NAMED = {
    "catalog/backends.py": "nccl carries CUDA tensors only; mpi may stage them",
    "doctor/preflight/dangers.py": "a finding counts more where GPUs are measured",
    "hang/cuda.py": "below the table; CUDA alone has a capture mode",
    "mpi_backend/work.py": "below the table; torch's futures take no CPU among their devices",
    "render/labels.py": "the CPU is not written out",
    "replicas/channel.py": "a group's own list of the kinds that it carries",
    "runtime/nccl_library.py": "torch's number of the NCCL that it was built with",
    "session/start_ranks.py": "what was asked for on the CPU is refused without a host's name",
}  # fmt: skip


def names_a_kind(node: ast.AST) -> bool:
    """Whether this code asks torch.cuda, or compares something with the name of a kind."""
    if isinstance(node, ast.Attribute):
        return node.attr == "is_cuda" or ast.unparse(node) == "torch.cuda"
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return any(isinstance(s, ast.Constant) and s.value in ("cpu", "cuda") for s in sides)
    return False


def kinds_named(root: Path) -> set[str]:
    """The files below `root`/ddpbench where the name of a kind of device decides something."""
    return {
        path.relative_to(root / "ddpbench").as_posix()
        for path in (root / "ddpbench").rglob("*.py")
        if any(names_a_kind(node) for node in ast.walk(ast.parse(path.read_text())))
    } - {"runtime/devices.py"}


def test_only_the_table_of_devices_knows_kinds() -> None:
    """Code outside the table neither calls torch.cuda nor compares the name of a kind, but for the
    files that are listed with their reasons. Ask `devices.of(device)` instead."""
    assert kinds_named(ROOT) == set(KINDS_NAMED)
