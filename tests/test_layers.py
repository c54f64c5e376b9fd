"""Imports point down, and the torch-free layers work where torch is missing."""

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from without_torch import RUN_AND_PRINT_CODE, run_without_torch

import ddpbench

ROOT = Path(ddpbench.__file__).parents[1]
# A layer, and the layers or single modules below it. What is below those is below it, too.
LAYERS = {
    "version": "",  # ddpbench/__init__.py
    "records": "version",
    "analysis": "records",
    "verdicts": "analysis",
    "launch": "records",
    "mpi_backend": "launch",
    "mpi": "mpi_backend",
    "hang": "mpi_backend",
    "runtime": "mpi hang",
    "catalog": "runtime",
    "present": "verdicts catalog.sizes catalog.parallel catalog.hooks",
    "interchange": "catalog",
    "measure": "analysis catalog",
    "replicas": "analysis catalog",
    "session": "present interchange measure replicas",
    "watch": "session",
    "doctor": "session",
    "measuring": "session",
    "tune": "session",
    "nested_runs": "doctor measuring",
    "guide": "",
    "commands": "watch tune nested_runs guide",
    "cli": "commands",  # which it imports by name, when they are called
    "pytest_plugin": "commands",
    "__main__": "cli",
}


@cache
def list_allowed(layer: str) -> set[str]:
    """Return what a layer may import: itself, and all below it."""
    below = LAYERS.get(layer, "").split()
    return {layer}.union(*map(list_allowed, below))


def find_layer(module: str) -> str:
    """Return the layer of a module; one directly in ddpbench, unless named above, measures."""
    if module == "ddpbench":
        return "version"
    first, *rest = module.split(".")[1:]
    return first if rest or first in LAYERS else "measuring"


@cache
def read_package() -> dict[str, str]:
    """Return the text of each file of the package, by the path below ddpbench/.

    Without ddpbench/__init__.py, which gives users a name when they ask for it.
    """
    folder = ROOT / "ddpbench"
    texts = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.py")}
    del texts["__init__.py"]
    return texts


@cache
def find_imports(text: str) -> tuple[tuple[int, str], ...]:
    """Return the (line, name) of each import of ddpbench, wherever Python allows one.

    Code that only runs with `python -m` belongs to no layer.
    """
    imports: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(text.partition("\nif __name__ ==")[0])):
        if isinstance(node, ast.Import):
            imports += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "ddpbench has no relative imports"
            imports += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            imports.append((node.lineno, ast.unparse(node.args[0]).strip("'")))
    return tuple(each for each in imports if each[1].split(".")[0] == "ddpbench")


def read_imports(texts: dict[str, str]) -> dict[tuple[str, str], list[tuple[int, str]]]:
    """Return (line, module) of each import, by path and module.

    A name in a module counts as the module, but a public name of the package as its own module.
    """
    names = {
        path: f"ddpbench.{path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}"
        for path in texts
    }
    modules = set(names.values())

    def resolve(name: str) -> str:
        parent = name.rpartition(".")[0]
        is_public = parent == "ddpbench" and name != "ddpbench.__version__"
        return name if name in modules or is_public or not parent else parent

    return {
        (path, names[path]): [(line, resolve(name)) for line, name in find_imports(text)]
        for path, text in texts.items()
    }


def find_upward_imports(texts: dict[str, str]) -> list[str]:
    """Return every import in these files that their layer may not make."""
    upward = []
    for (path, module), targets in read_imports(texts).items():
        allowed = list_allowed(find_layer(module))
        for line, target in targets:
            if not {find_layer(target), target.removeprefix("ddpbench.")} & allowed:
                upward.append(f"ddpbench/{path}:{line} imports {target}")
            if target.removeprefix("ddpbench.") in ddpbench.__all__:
                upward.append(f"ddpbench/{path}:{line} imports {target} as users do")
    return sorted(upward)


def find_cycles(texts: dict[str, str]) -> list[str]:
    """Return modules that import one another, in a cycle of any length."""
    imports = {
        module: {name for _, name in names} for (_, module), names in read_imports(texts).items()
    }
    sorter = TopologicalSorter(imports)
    try:
        sorter.prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


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
    for position, below in enumerate(LAYERS.values()):
        assert {name.split(".")[0] for name in below.split()} <= set(order[:position])
    packages = {path.parent.name for path in (ROOT / "ddpbench").glob("*/__init__.py")}
    assert packages <= set(order)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("analysis/stats.py", "import ddpbench.runtime.world"),
        ("runtime/control.py", "def f():\n    from ddpbench.measure import loop"),
        ("measure/clock.py", "importlib.import_module('ddpbench.collectives')"),
    ],
)
def test_an_upward_import_is_found(path: str, code: str) -> None:
    """It is found with its line wherever Python allows one."""
    line = len(read_package()[path].splitlines()) + 1 + code.count("\n")
    places = {each.split(" ")[0] for each in find_upward_imports(plant(path, code))}
    assert places == {f"ddpbench/{path}:{line}"}


def test_a_cycle_is_found() -> None:
    code = "if TYPE_CHECKING:\n    from ddpbench.records import store"
    assert "ddpbench.records.schema" in find_cycles(plant("records/schema.py", code))


# --- without torch --------------------------------------------------------------------------------


TORCH_FREE = ("analysis", "records", "present", "catalog", "interchange", "doctor")


def test_torch_free_layers_import_without_torch() -> None:
    """They, the measuring commands and cli import where importing torch fails."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder in TORCH_FREE
        for path in (ROOT / "ddpbench" / folder).rglob("*.py")
        if path.name != "models.py"  # subclasses of nn.Module, which building a task imports
    ]
    modules += ["ddpbench.cli", "ddpbench.collectives", "ddpbench.ddp"]
    assert len(modules) > 15
    printed = run_without_torch(
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "try: import torch\nexcept ImportError as error: print(error)",
        *modules,
    )
    assert printed == "torch is imported\n"


def test_the_package_imports_torch_on_demand() -> None:
    """`import ddpbench` loads neither torch nor numpy. A public name imports what it needs, and an
    unknown name is an AttributeError."""
    printed = run_without_torch(
        "import ddpbench; print(ddpbench.__version__, hasattr(ddpbench, 'nothing'))\n"
        "try: ddpbench.verify_replicas\nexcept ImportError as error: print(error)",
        forbidden=("torch", "numpy", "xxhash"),
    )
    assert printed.startswith(f"{ddpbench.__version__} False\n")
    assert printed.endswith(" is imported\n")
    for name in ddpbench.__all__:
        assert getattr(ddpbench, name)


@pytest.mark.parametrize(
    ("words", "code", "commands"),
    [
        (["--help"], 0, []),
        (["list", "--help"], 0, ["list"]),
        (["collectives", "--help"], 0, ["collectives"]),
        (["collectives", "--op", "none"], 2, ["collectives"]),
    ],
)
def test_help_and_refusals_load_nothing_heavy(
    words: list[str], code: int, commands: list[str]
) -> None:
    """They load no torch, numpy or pandas, so that they are printed at once. The overview imports
    no command and few modules."""
    printed = run_without_torch(
        RUN_AND_PRINT_CODE.replace("print(end.code)", "print(end.code, *sys.modules)"),
        *words,
        forbidden=("torch", "numpy", "pandas", "scipy", "pyarrow", "mpi4py"),
    )
    ended, *modules = printed.splitlines()[-1].split()
    assert ended == str(code)
    parents = ("ddpbench.commands.", "ddpbench.collectives")
    loaded = [name.rpartition(".")[2] for name in modules if name.startswith(parents)]
    assert loaded == commands
    if not commands:
        assert len([name for name in modules if name.startswith("ddpbench")]) <= 22
        assert not {"argparse", "asyncio", "unittest", "rich", "psutil", "tabulate"} & set(modules)


# --- kinds of devices -----------------------------------------------------------------------------

# Files outside of runtime/devices.py where the name of a kind decides something, and the reason.
KINDS_NAMED = {
    "catalog/backends.py": "nccl carries CUDA tensors only; mpi may stage them",
    "doctor/preflight/checks.py": "a finding counts more where GPUs are measured",
    "hang/flight_recorder.py": "below the table; CUDA alone has a capture mode",
    "mpi_backend/work.py": "below the table; torch's futures take no CPU among their devices",
    "present/case_labels.py": "the CPU is not written out",
    "replicas/channel.py": "a group's own list of the kinds that it carries",
    "runtime/nccl_library.py": "torch's number of the NCCL that it was built with",
}  # fmt: skip


# A call of torch.cuda, or a comparison with the name of a kind.
NAMES_A_KIND = re.compile(r'\btorch\.cuda\b|\.is_cuda\b|[!=]= "(cpu|cuda)"|"(cpu|cuda)" (in|[!=]=)')


def test_only_the_table_of_devices_distinguishes_kinds() -> None:
    """Code outside the table neither calls torch.cuda nor compares the name of a kind, except in
    the files that are listed with their reasons. Ask `devices.of(device)` instead."""
    files = {path for path, text in read_package().items() if NAMES_A_KIND.search(text)}
    assert files - {"runtime/devices.py"} == set(KINDS_NAMED)
