"""The models whose DDP step can be measured. To add one, add an entry to WORKLOADS.

All data are generated. Importing this module imports no torch; building a task does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from ddpbench.catalog.parallel import Plan
from ddpbench.catalog.task import RankSetup, Task, Workload, build_model, generate_batches
from ddpbench.launch.placement import Refused
from ddpbench.records.wording import counted, explain_unknown

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

BAG, HEAD = 32, 64  # embedding: rows per sample; transformer: width of an attention head


def _linear(settings: Mapping[str, int], setup: RankSetup) -> Task:
    from torch import nn

    return _random_targets(lambda: nn.Linear(10, 10), 10, setup)


def _wide(settings: Mapping[str, int], setup: RankSetup) -> Task:
    from ddpbench.catalog.models import build_mlp

    width, depth = settings["width"], settings["depth"]
    return _random_targets(lambda: build_mlp(*[width] * (depth + 1)), width, setup)


def _wide_layers(model: Any) -> list[nn.Module]:
    return [layer for layer in model if next(layer.parameters(), None) is not None]


def _wide_splits(model: Any) -> dict[str, str]:
    """Divide the layers in pairs, so that ranks need not communicate within a pair."""
    names = [name for name, layer in model.named_children() if hasattr(layer, "weight")]
    pairs = zip(names[0::2], names[1::2], strict=False)  # an odd last layer stays whole
    return {
        name: style for pair in pairs for name, style in zip(pair, ("column", "row"), strict=True)
    }


def _wide_objection(settings: Mapping[str, int], ranks: int) -> str | None:
    width, depth = settings["width"], settings["depth"]
    if depth < 2:
        return f"mlp has {depth} layer, but tensor parallel divides pairs: choose --depth 2 or more"
    if width % ranks:
        return (
            f"mlp: width {width} does not divide among {ranks} ranks of tensor parallel: choose a "
            f"multiple of {ranks}"
        )
    return None


def _random_targets(make: Callable[[], nn.Module], width: int, setup: RankSetup) -> Task:
    """Mean squared error against random targets. Inputs and targets are `width` wide."""
    import torch
    from torch.nn import functional

    def sample(g: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randn(width, generator=g), torch.randn(width, generator=g)

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return functional.mse_loss(model(batch[0]), batch[1])

    return Task(build_model(make, setup), generate_batches(setup, sample), loss)


def _convnet(settings: Mapping[str, int], setup: RankSetup) -> Task:
    import torch
    from torch.nn import functional

    from ddpbench.catalog.models import CLASSES, IMAGE, build_residual_net

    def sample(g: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randn(IMAGE, generator=g), torch.randint(CLASSES, (), generator=g)

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    model = build_model(lambda: build_residual_net(settings["width"], settings["depth"]), setup)
    return Task(model, generate_batches(setup, sample), loss)


def _heads(settings: Mapping[str, int]) -> int:
    return max(1, settings["width"] // HEAD)


def _transformer(settings: Mapping[str, int], setup: RankSetup) -> Task:
    import torch
    from torch.nn import functional

    from ddpbench.catalog.models import Decoder

    vocabulary, sequence = settings["vocabulary"], settings["sequence"]
    heads = _heads(settings)
    if settings["width"] % heads:
        raise Refused(
            f"transformer: width {settings['width']} does not divide among {heads} heads "
            f"(width // {HEAD}): choose a multiple of {HEAD}, or less than {2 * HEAD}"
        )

    def sample(g: torch.Generator) -> tuple[Tensor, ...]:
        return (torch.randint(vocabulary, (sequence + 1,), generator=g),)

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        (tokens,) = batch  # one more than the model's input: each token's target is the next one
        scores = model(tokens[:, :-1])
        return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())

    model = build_model(lambda: Decoder(settings, heads), setup)
    return Task(model, generate_batches(setup, sample), loss)


def _blocks(model: Any) -> list[nn.Module]:
    return list(model.blocks)[:-1]  # without the last norm


def _block_splits(model: Any) -> dict[str, str]:
    """Divide attention by heads and the inner layer by its width; the tables stay whole."""
    layers = {"qkv": "column", "joined": "row", "mlp.1": "column", "mlp.3": "row"}
    count = len(_blocks(model))
    return {f"blocks.{i}.{name}": style for i in range(count) for name, style in layers.items()}


def _heads_objection(settings: Mapping[str, int], ranks: int) -> str | None:
    heads = _heads(settings)
    if heads % ranks == 0:
        return None
    return (
        f"transformer: width {settings['width']} has {counted(heads, 'attention head')} "
        f"(width // {HEAD}), which must divide evenly among {ranks} ranks of tensor parallel: use "
        f"--width {HEAD * ranks} or a multiple of it"
    )


def _embedding(settings: Mapping[str, int], setup: RankSetup) -> Task:
    """Dense gradients, which DDP reduces fastest; most rows of the gradient are zero."""
    import torch
    from torch import nn
    from torch.nn import functional

    from ddpbench.catalog.models import build_mlp

    rows, width = settings["rows"], settings["width"]

    def make() -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(rows, width), *build_mlp(width, width, 1))

    def sample(g: torch.Generator) -> tuple[Tensor, ...]:
        bag = torch.randint(rows, (BAG,), generator=g)
        return bag, torch.randint(2, (1,), generator=g).float()

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    return Task(build_model(make, setup), generate_batches(setup, sample), loss)


def _contrastive(settings: Mapping[str, int], setup: RankSetup) -> Task:
    """Two towers trained as in CLIP: each pair against all pairs in the joint batch of all ranks.

    Each rank computes the loss of the joint batch. Backward through the gather sums the gradients
    of these equal losses, which DDP then averages: the result is the gradient of one process.
    """
    import torch
    from torch.nn import functional

    from ddpbench.catalog.models import TOWERS, Towers, make_gather

    gather = make_gather(setup)

    def sample(g: torch.Generator) -> tuple[Tensor, ...]:
        return tuple(torch.randn(inputs, generator=g) for inputs in TOWERS)

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        features, scale = model(batch)
        left, right = gather(features)
        scores = scale * left @ right.T
        pairs = torch.arange(len(scores), device=scores.device)
        both = [functional.cross_entropy(part, pairs) for part in (scores, scores.T)]
        return (both[0] + both[1]) / 2

    model = build_model(lambda: Towers(settings["width"]), setup)
    return Task(model, generate_batches(setup, sample), loss)


def _both(value: int) -> dict[str, int]:
    return {"cpu": value, "cuda": value}


# The help text of each setting that a workload has.
SETTINGS = {
    "width": "width of the layers, or channels of the first stage",
    "depth": "number of layers, or of blocks per stage",
    "layers": "number of transformer blocks",
    "sequence": "tokens per sample",
    "vocabulary": "number of different tokens",
    "rows": "rows in the embedding table",
}
WORKLOADS: dict[str, Workload] = {
    entry.name: entry
    for entry in (
        Workload(
            name="linear",
            help="one Linear(10, 10) as in PyTorch's DDP notes: shows overhead and latency",
            batch=_both(20),
            build=_linear,
            learning_rate=0.001,
        ),
        Workload(
            name="mlp",
            help="equal wide layers: large gradients, reduced while backward computes others",
            batch={"cpu": 256, "cuda": 512},
            settings={"width": {"cpu": 1024, "cuda": 4096}, "depth": _both(8)},
            build=_wide,
            plan=Plan(_wide_layers, _wide_splits, _wide_objection),
        ),
        Workload(
            name="convnet",
            help="a small residual net with BatchNorm: small gradients, and buffers to broadcast",
            batch={"cpu": 32, "cuda": 256},
            settings={"width": {"cpu": 16, "cuda": 64}, "depth": {"cpu": 1, "cuda": 3}},
            build=_convnet,
        ),
        Workload(
            name="transformer",
            help="a language model like GPT-2, by default with the sizes of GPT-2 small",
            batch={"cpu": 4, "cuda": 8},
            settings={
                "layers": _both(12),
                "width": _both(768),
                "sequence": {"cpu": 64, "cuda": 1024},
                "vocabulary": _both(50257),
            },
            build=_transformer,
            plan=Plan(_blocks, _block_splits, _heads_objection),
            optimizer="adamw",
            learning_rate=3e-4,
        ),
        Workload(
            name="embedding",
            help="a large embedding table and a small net: dense gradients that are mostly zero",
            batch=_both(256),
            settings={"rows": {"cpu": 100_000, "cuda": 1_000_000}, "width": _both(64)},
            build=_embedding,
        ),
        Workload(
            name="contrastive",
            help="two towers as in CLIP: the loss gathers the features of all ranks",
            batch=_both(64),
            settings={"width": _both(256)},
            build=_contrastive,
            optimizer="adamw",
            learning_rate=3e-4,
        ),
    )
}


def get(name: str) -> Workload:
    """Return a workload by name, or the user's own for "package.module:function".

    The user's function(rank, world_size, device) returns (model, batch, loss) as in Task; the model
    is moved to the device. `Workload.batch` is then 0: count_samples counts a batch.
    Raises ValueError with one sentence for an unknown name.
    """
    if name in WORKLOADS:
        return WORKLOADS[name]
    if ":" not in name:
        choices = [*WORKLOADS, "package.module:function of your own"]
        raise ValueError(explain_unknown("workload", name, choices))
    function = import_function(name)
    return Workload(
        name=name,
        help="your own",
        batch=_both(0),
        build=lambda _, setup: build_task(name, function, setup),
    )


# --- the user's own workload, package.module:function ---------------------------------------------

RETURNS = "(model, batch, loss): a torch.nn.Module, batch(step) and loss(model, batch)"


def count_samples(batch: Any) -> int:
    """Return the first dimension of the first tensor in a batch; 1 if there is none."""
    import torch

    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    return count_samples(batch[0]) if isinstance(batch, (list, tuple)) and batch else 1


def import_function(name: str) -> Callable[..., Any]:
    """Import package.module:function. Raises ValueError with one sentence."""
    module, _, attribute = name.partition(":")
    try:
        function = getattr(import_module(module), attribute)
    except Exception as error:  # the user's module may raise any error
        lines = str(error).strip().splitlines() or ["no text"]
        raise ValueError(
            f"workload {name!r} cannot be imported ({type(error).__name__}: {lines[0]}): "
            "write package.module:function, with a module that Python can import from here"
        ) from error
    if not callable(function):
        raise ValueError(
            f"workload {name!r} is a {type(function).__name__}, not a function(rank, world_size, "
            f"device) that returns {RETURNS}"
        )
    return cast("Callable[..., Any]", function)


def build_task(name: str, function: Callable[..., Any], setup: RankSetup) -> Task:
    """Call the user's function in this rank. Raises Refused if it returns another type."""
    from torch import nn

    result = function(setup.rank, setup.world_size, setup.device)
    match result:
        case (nn.Module() as model, batch, loss) if callable(batch) and callable(loss):
            return Task(model.to(setup.device), batch, loss)
    parts = result if isinstance(result, tuple) else (result,)
    kinds = ", ".join(type(part).__name__ for part in parts)
    kinds = f"({kinds})" if isinstance(result, tuple) else kinds
    raise Refused(f"workload {name!r} must return {RETURNS}; it returned {kinds}")
