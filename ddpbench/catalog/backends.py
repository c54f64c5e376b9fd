"""Backends that carry operations. To add one, add an entry to BACKENDS.

Other names registered with torch work too. Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddpbench.launch.placement import NO_MPIRUN, Refused, find_mpirun
from ddpbench.mpi_backend import library as mpi_library
from ddpbench.records.wording import counted, explain_unknown, install_extra
from ddpbench.runtime import devices, nccl_library


@dataclass(frozen=True)
class Backend:
    """A backend of torch.distributed, or one that ddpbench provides.

    unavailable  device → None, or one sentence: why the backend cannot run, and what to do
    library      () → name and version of the library that carries the data
    provider     device → "native", or the package that implements it and how it accesses GPUs
    register     () → the backend's name in torch, after registering it there
    size         () → the number of ranks that the backend's own launcher started; None: unknown
    transport    the limit between ranks of one host: "memory", "tcp", "links" (of GPUs), or "" if
                 unknown
    in_stream    whether a call returns once it is enqueued on the current stream; its kernel launch
                 can then be hidden
    """

    name: str
    help: str
    unavailable: Callable[[str], str | None]
    library: Callable[[], str]
    provider: Callable[[str], str] = lambda _: "native"
    register: Callable[[], str] | None = None
    size: Callable[[], int | None] = lambda: None
    launcher: str = "torchrun"
    transport: str = ""
    in_stream: bool = False


def _torch() -> str:
    import torch

    return f"torch {torch.__version__}"


def _gloo_unavailable(device: str) -> str | None:
    import torch.distributed as dist

    if not dist.is_gloo_available():
        return "this torch was built without gloo: install a torch wheel for Linux"
    return _no_device("gloo", device)


def _nccl_unavailable(device: str) -> str | None:
    import torch.distributed as dist

    if device != "cuda":
        return f"nccl carries CUDA tensors only, not {device}: use --device cuda, or --backend gloo"
    if not dist.is_nccl_available():
        return "this torch was built without NCCL: install a CUDA build, or use --device cpu"
    return _no_device("nccl", device)


def _no_device(backend: str, device: str) -> str | None:
    kind = devices.get(device)
    if (why := kind.unusable()) is None:
        return None
    advice = "fix this error" if kind.broken() else "run where torch finds a GPU"
    return (
        f"{backend} with {device.upper()} tensors needs a GPU, but {why}: "
        f"{advice}, or use --device cpu --backend gloo"
    )


def _mpi_native() -> bool:
    import torch.distributed as dist

    return dist.is_mpi_available()


def _mpi_unavailable(device: str) -> str | None:
    from importlib.util import find_spec

    if (why := _no_device("mpi", device)) is not None:
        return why
    if not _mpi_native() and find_spec("mpi4py") is None:
        return (
            "torch was built without MPI and mpi4py is not installed: "
            f"{install_extra('mpi')} brings mpi4py and Open MPI, without system packages"
        )
    return None


def _mpi_register() -> str:
    if _mpi_native():
        return "mpi"
    from ddpbench.mpi_backend import group as mpi_group

    mpi_group.register()
    return mpi_group.NAME


def _mpi_provider(device: str) -> str:
    if _mpi_native():
        return "native"
    if device == "cpu":
        return "mpi4py"
    return f"mpi4py, {'CUDA-aware' if mpi_library.cuda_aware() else 'staged through host memory'}"


def _mpi_library() -> str:
    if _mpi_native():
        return "the MPI torch was built with"
    import mpi4py

    return f"{mpi_library.library()}, mpi4py {mpi4py.__version__}"


BACKENDS: dict[str, Backend] = {
    entry.name: entry
    for entry in (
        Backend(
            name="gloo",
            help="part of torch, over TCP; for CPU tensors, carries CUDA tensors too",
            unavailable=_gloo_unavailable,
            library=lambda: f"gloo of {_torch()}",
            transport="tcp",
        ),
        Backend(
            name="nccl",
            help="NVIDIA's library for CUDA tensors (RCCL on AMD)",
            unavailable=_nccl_unavailable,
            library=nccl_library.describe,
            transport="links",
            in_stream=True,
        ),
        Backend(
            name="mpi",
            help="any MPI: torch's own if torch was built with MPI, else ddpbench's over mpi4py",
            unavailable=_mpi_unavailable,
            library=_mpi_library,
            provider=_mpi_provider,
            register=_mpi_register,
            size=lambda: None if _mpi_native() else mpi_library.world()[1],
            launcher="mpirun",
            transport="memory",
        ),
    )
}

BEST = {"cpu": "gloo", "cuda": "nccl"}


def get(name: str) -> Backend:
    """Return a backend by name; a plain one for a name registered only with torch, as `ucc`."""
    return BACKENDS.get(name) or Backend(
        name=name,
        help="registered with torch.distributed",
        unavailable=lambda device: _unregistered(name, device),
        library=lambda: f"{name} with {_torch()}",
    )


def choose_device(
    names: Sequence[str], device: str, warn: Callable[[str], None] = lambda sentence: None
) -> str:
    """Resolve `auto`: torch's accelerator if it works and the first chosen backend can use it.

    Otherwise it is the CPU, with a warning if the host has GPUs that this process does not see.
    Raises Refused for broken GPUs: the user does not expect figures of the CPU.
    """
    if device != "auto":
        return device
    if "nccl" in names:
        return "cuda"
    if names[0] not in ("auto", "all"):
        return "cpu"
    kind = devices.get("cuda")
    why = kind.unusable()
    if why is None:
        return kind.name
    if kind.broken():
        raise Refused(
            f"the GPUs cannot be used: {why}: fix this error, or measure with --device cpu"
        )
    if number := kind.installed():
        warn(
            f"measuring on the CPU: this host has {counted(number, 'GPU')}, but {why}; "
            "add --device cpu to silence this warning"
        )
    return "cpu"


def choose(names: Sequence[str], device: str, launcher: str | None) -> tuple[str, ...]:
    """Return the chosen backends, with `auto` and `all` resolved.

    launcher: what started this rank; None if ddpbench starts the ranks itself.
    Raises Refused for the first backend that cannot run here.
    """
    chosen: list[str] = []
    for name in names:
        if name == "auto":
            import torch.distributed as dist

            chosen.append(BEST.get(device) or dist.get_default_backend_for_device(device))
        elif name == "all":
            chosen += [b for b in BACKENDS if unavailable(b, device, launcher) is None]
        else:
            chosen.append(name)
    for name in chosen:
        if (why := unavailable(name, device, launcher)) is not None:
            raise Refused(why)
    return tuple(dict.fromkeys(chosen))


def unavailable(name: str, device: str, launcher: str | None) -> str | None:
    """Return None, or one sentence: why a backend cannot run here, and what to do."""
    backend = get(name)
    if backend.launcher == "mpirun" and launcher == "torchrun":
        return (
            f"{name} needs ranks that MPI started, but each rank of torchrun is its own MPI world: "
            f"type mpirun -n 2 python -m ddpbench.collectives --backend {name}, or, without a "
            f"launcher, ddpbench collectives -n 2 --backend {name}"
        )
    if backend.launcher == "mpirun" and launcher is None and find_mpirun() is None:
        return f"{name}: {NO_MPIRUN}"
    return backend.unavailable(device)


def _unregistered(name: str, device: str) -> str | None:
    import torch.distributed as dist

    # torch also lists two that move no data, and those that it was built without.
    known = name in dist.Backend.backend_list and name not in ("fake", "undefined")
    if not known or not dist.is_backend_available(name):
        choices = [*BACKENDS, "auto", "all", "a name that --import MODULE registers with torch"]
        return explain_unknown("backend", name, choices)
    return _no_device(name, device)
