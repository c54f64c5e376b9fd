"""Imports point down, and the torch-free layers work where torch is missing."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from stored_runs import a_case, a_result, a_run
from without_torch import RUN_AND_PRINT_CODE, run_without_torch

import ddpbench
from ddpbench.records import store

ROOT = Path(ddpbench.__file__).parents[1]
# A layer, and the lower layers or single modules of them that it may import.
LAYERS: dict[str, tuple[str, ...]] = {
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
    # cli imports the commands by name, when they are called.
    "cli": ("version", "records", "session", "commands"),
    "pytest_plugin": (
        "version", "records", "analysis", "verdicts", "present", "session", "nested_runs",
        "commands",
    ),
    "__main__": ("cli",),
}  # fmt: skip


def find_layer(module: str) -> str:
    """Return the layer of a module; one directly in ddpbench, unless named above, measures."""
    if module == "ddpbench":
        return "version"
    first, *rest = module.split(".")[1:]
    return first if rest or first in LAYERS else "measuring"


@cache
def read_package() -> dict[str, str]:
    """Return the text of each file of the package, by the path below ddpbench/."""
    folder = ROOT / "ddpbench"
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.py")}


def is_entry_point(node: ast.AST) -> bool:
    """Return whether this code only runs with `python -m`: no layer is responsible for it."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def is_lazy_attribute(node: ast.AST) -> bool:
    """Return whether this code of ddpbench/__init__.py gives users a name when they ask for it."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef) and node.name == "__getattr__"


def walk(node: ast.AST, module: str) -> Iterator[ast.AST]:
    """Yield all nodes below a node for which the layer of its module is responsible."""
    for child in ast.iter_child_nodes(node):
        if not (is_entry_point(child) or (module == "ddpbench" and is_lazy_attribute(child))):
            yield child
            yield from walk(child, module)


@cache
def find_imports(path: str, text: str) -> tuple[str, tuple[tuple[int, str], ...]]:
    """Return the module's dotted name, and the (line, name) of all that it imports of ddpbench.

    An import counts at the top, in a function, for type checking and through import_module with a
    constant. A file is the same in nearly every copy of the package.
    """
    folder = ["ddpbench", *Path(path).parent.parts]
    module = ".".join([*folder, Path(path).stem]).removesuffix(".__init__")
    found: list[tuple[int, str]] = []
    for node in walk(ast.parse(text), module):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = folder[: len(folder) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found.append((node.lineno, ast.unparse(node.args[0]).strip("'")))  # if constant
    return module, tuple(each for each in found if each[1].split(".")[0] == "ddpbench")


def read_imports(texts: dict[str, str]) -> dict[tuple[str, str], list[tuple[int, str]]]:
    """Return (line, module) of each import, by path and module. A name in a module is no module.

    A public name of the package, such as ddpbench.verify_replicas, counts as a module of its own.
    """
    read = {path: find_imports(path, text) for path, text in texts.items()}
    modules = {module for module, _ in read.values()}

    def resolve(name: str) -> str:
        parent = name.rpartition(".")[0]
        is_public = parent == "ddpbench" and name != "ddpbench.__version__"
        return name if name in modules or is_public or not parent else parent

    return {
        (path, module): [(line, resolve(name)) for line, name in found]
        for path, (module, found) in read.items()
    }


def find_upward_imports(texts: dict[str, str]) -> list[str]:
    """Return every import in these files that their layer may not make."""
    found = []
    for (path, module), targets in read_imports(texts).items():
        layer = find_layer(module)
        allowed = {layer, *LAYERS.get(layer, ())}
        for line, target in targets:
            if not {find_layer(target), target.removeprefix("ddpbench.")} & allowed:
                found.append(f"ddpbench/{path}:{line} imports {target}")
            if target.removeprefix("ddpbench.") in ddpbench.__all__:
                found.append(f"ddpbench/{path}:{line} imports {target} as users do")
    return sorted(found)


def find_cycles(texts: dict[str, str]) -> list[str]:
    """Return the modules that import one another, in a cycle of any length."""
    imports = {
        module: {target for _, target in targets}
        for (_, module), targets in read_imports(texts).items()
    }

    def find_reachable(start: str) -> set[str]:
        reached, left = set[str](), [start]
        while left:
            new = imports[left.pop()] & set(imports) - reached
            reached |= new
            left += new
        return reached

    return sorted(module for module in imports if module in find_reachable(module))


def plant(path: str, code: str) -> dict[str, str]:
    """Return the package with this code at the end of a file."""
    return {**read_package(), path: f"{read_package().get(path, '')}{code}\n"}


def test_imports_point_down() -> None:
    """Every module imports only from lower layers, and no modules import one another."""
    assert find_upward_imports(read_package()) == []
    assert find_cycles(read_package()) == []


def test_the_layers_are_ordered() -> None:
    """Each layer names only layers above it in the table, and every package is a layer."""
    order = list(LAYERS)
    for position, allowed in enumerate(LAYERS.values()):
        assert {name.split(".")[0] for name in allowed} <= set(order[:position])
    packages = {path.parent.name for path in (ROOT / "ddpbench").glob("*/__init__.py")}
    assert packages <= set(order)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("records/codec.py", "from ddpbench.analysis import stats"),
        ("analysis/stats.py", "import ddpbench.runtime.world"),
        ("runtime/control.py", "def f():\n    from ddpbench.measure import loop"),
        ("catalog/sizes.py", "if TYPE_CHECKING:\n    from ddpbench.present import formats"),
        ("measure/clock.py", "importlib.import_module('ddpbench.collectives')"),
        ("runtime/cpu.py", "from ..catalog import backends"),
        ("runtime/control.py", "from ddpbench import verify_replicas"),
        ("__init__.py", "from ddpbench.replicas import Report"),
        ("session/launch_loop.py", "if __name__ != '__main__':\n    import ddpbench.cli"),
    ],
)
def test_an_upward_import_is_found(path: str, code: str) -> None:
    """Wherever Python allows one, it is found with its line."""
    line = len(read_package()[path].splitlines()) + 1 + code.count("\n")
    found = {each.split(" ")[0] for each in find_upward_imports(plant(path, code))}
    assert found == {f"ddpbench/{path}:{line}"}


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("records/schema.py", "if TYPE_CHECKING:\n    from ddpbench.records import store"),
        ("launch/family.py", "def f():\n    from ddpbench.launch import forks"),
    ],
)
def test_a_cycle_is_found(path: str, code: str) -> None:
    cycle = find_cycles(plant(path, code))
    assert "ddpbench." + path.removesuffix(".py").replace("/", ".") in cycle


def test_an_entry_point_may_import_the_command_line() -> None:
    """`if __name__ == "__main__":` isn't part of the module; a new command is in its layer."""
    code = (
        "from ddpbench import collectives\nfrom ddpbench.measure import loop\n"
        'if __name__ == "__main__":\n    from ddpbench.cli import main'
    )
    assert find_upward_imports(plant("another.py", code)) == []


# --- without torch --------------------------------------------------------------------------------


TORCH_FREE = ("analysis", "records", "present", "catalog", "interchange", "doctor")


def test_torch_free_layers_import_without_torch() -> None:
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
    "hang/flight_recorder.py": "below the table; CUDA alone has a capture mode",
    "mpi_backend/work.py": "below the table; torch's futures take no CPU among their devices",
    "present/case_labels.py": "the CPU is not written out",
    "replicas/channel.py": "a group's own list of the kinds that it carries",
    "runtime/nccl_library.py": "torch's number of the NCCL that it was built with",
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
