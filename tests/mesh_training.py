"""Real training on a mesh of gloo ranks: a small transformer under FSDP2, HSDP and tensor parallel,
for the tests of the replica check.

A rank runs the caller's own file: `python FILE FOLDER RANK SIZE WORDS…` (`run_ranks`).
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from patience import PATIENCE_SECONDS
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from ddpbench import Report

WAYS = {  # names of the dimensions of the mesh
    "fsdp": ("dp_shard",),
    "hsdp": ("dp_replicate", "dp_shard"),
    "tp": ("tp",),
    "fsdp+tp": ("dp_shard", "tp"),
    "hsdp+tp": ("dp_replicate", "dp_shard", "tp"),
}
WIDTH, HEADS, VOCABULARY, SEQUENCE = 16, 4, 32, 6


class Attention(nn.Module):
    """Causal attention over the heads that this rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wv, self.wo = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = [w(hidden).unflatten(-1, (-1, WIDTH // HEADS)) for w in (self.wq, self.wk, self.wv)]
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and a feed-forward net, each behind a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))  # type: ignore[no-any-return]


class Language(nn.Module):
    """A language model; forward returns the loss. An encoder of its inputs has no tensor plan."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.full((1,), 1.5))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.encoder(self.tokens(words)).relu() * self.scale
        for layer in self.layers:
            hidden = layer(hidden)
        scores = self.head(self.norm(hidden))[:, :-1].float()
        return functional.cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())


@cache
def make_mesh(way: str, sizes: tuple[int, ...]) -> DeviceMesh:
    """Return the mesh of all ranks; each is made once, because its process groups stay."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=WAYS[way])


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard attention and feed-forward nets; embeddings, norms, encoder and head have no plan."""
    for layer in model.layers:  # type: ignore[union-attr]
        plan = {f"attention.w{w}": ColwiseParallel() for w in "qkv"}
        plan |= {"attention.wo": RowwiseParallel(), "up": ColwiseParallel()}  # type: ignore[dict-item]
        parallelize_module(layer, mesh, {**plan, "down": RowwiseParallel()})


class Training:
    """This rank's part of a training run with AdamW."""

    def __init__(
        self,
        way: str,
        sizes: tuple[int, ...],
        *,
        seed: Callable[[DeviceMesh], int] = lambda mesh: 0,
        shard_over: Sequence[str] = ("dp_replicate", "dp_shard"),
        edit: Callable[[nn.Module, DeviceMesh], None] = lambda model, mesh: None,
    ) -> None:
        """Build the model; a fault plants its own seed, mesh of fully_shard, or edited model.

        way: one of WAYS. sizes: of the dimensions of the mesh.
        """
        self.mesh = make_mesh(way, sizes)
        self.at = {name: self.mesh.get_local_rank(name) for name in WAYS[way]}
        torch.manual_seed(seed(self.mesh))
        self.model: Any = Language()
        if "tp" in self.at:
            apply_tensor_parallel(self.model, self.mesh["tp"])
        edit(self.model, self.mesh)
        axes = tuple(name for name in WAYS[way] if name in shard_over)
        if axes:
            mesh = self.mesh[axes if len(axes) > 1 else axes[0]]
            for part in (*self.model.layers, self.model):
                fully_shard(part, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def words(self, step: int) -> Tensor:
        """Return a batch, which ranks along "tp" share."""
        data = [self.at[name] for name in self.at if name != "tp"]
        place = sum(at * 100**i for i, at in enumerate(data))
        generator = torch.Generator().manual_seed(10_000 * step + place)
        return torch.randint(VOCABULARY, (2, SEQUENCE), generator=generator)

    def backward(self, step: int) -> None:
        """Compute the gradients of the step."""
        self.optimizer.zero_grad()
        self.model(self.words(step * 10)).backward()


def local(tensor: Any) -> Tensor:
    """Return the memory of this rank's part of a tensor."""
    part: Tensor = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    return part


# --- ranks


def start_group(folder: Path, rank: int, size: int, seconds: float = 60) -> None:
    """Make the default process group of a job's ranks, which meet over a file in `folder`."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    limit = timedelta(seconds=seconds)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)


def play_all(folder: Path, rank: int, plays: Mapping[str, Callable[[], Any]]) -> None:
    """Write the results of all plays, which are JSON or reports, to a file of this rank."""
    results: dict[str, Any] = {}
    for name, play in plays.items():
        try:
            result = play()
            is_report = isinstance(result, Report)
            results[name] = report_as_json(result) if is_report else result
        except Exception:
            results[name] = {"error": traceback.format_exc()}
            break  # the ranks may no longer be together
    (folder / f"{rank}.json").write_text(json.dumps(results))


def play_in_rank(list_plays: Callable[[int, int], Mapping[str, Callable[[], Any]]]) -> None:
    """Play all that a function of rank and number of ranks returns, in a rank of `run_ranks`."""
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    start_group(folder, rank, size)
    play_all(folder, rank, list_plays(rank, size))
    dist.destroy_process_group()


def run_ranks(
    words: Sequence[str], size: int, folder: Path, seconds: float = 3 * PATIENCE_SECONDS
) -> list[dict[str, Any]]:
    """Run `WORDS FOLDER RANK SIZE` in each rank; return what each has written."""
    from command_lines import clean_environment  # which no rank needs

    ranks = [
        subprocess.Popen(
            [*words, str(folder), str(rank), str(size)],
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(),
        )
        for rank in range(size)
    ]
    try:
        errors = "".join(rank.communicate(timeout=seconds)[1] for rank in ranks)
    finally:
        for process in ranks:
            process.kill()
    paths = [folder / f"{rank}.json" for rank in range(size)]
    assert all(path.exists() for path in paths), errors
    return [json.loads(path.read_text()) for path in paths]


def agree(results: Sequence[dict[str, Any]], name: str) -> Any:
    """Return the result of a play, which these ranks have alike."""
    alike = [each.get(name, {"error": "did not run"}) for each in results]
    for result in alike:
        assert not (result and "error" in result), result["error"]
    assert all(result == alike[0] for result in alike)
    return alike[0]


# --- reports as JSON, which a rank can write to a file


def report_as_json(report: Any) -> dict[str, Any]:
    """Return the fields of a report and the properties that it derives from them."""
    return {
        **dataclasses.asdict(report),
        "equal": report.equal,
        "ok": report.ok,
        "failed": report.failed,
        "cause": report.cause.code if report.cause else None,
        "minorities": [d.minority for d in report.differences],
        "faults": report.faults,
        "minority": report.minority,
        "text": str(report),
    }


def facts_of(report: dict[str, Any], *drop: str) -> list[Any]:
    """Return severity, code and place of each finding, without these parts of a place."""
    return [
        [
            found["severity"],
            found["code"],
            {k: v for k, v in found["place"].items() if k not in drop},
        ]
        for found in report["findings"]
    ]


def without_figures(text: str) -> str:
    """Return a text with N for each number: values of a training differ between processors."""
    return re.sub(r"\d+(?:\.\d+)?(?:e-\d+)?", "N", text)
