"""Marks of real training loops. A loop is shown as the letters of its marks: see mark_letters."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from command_lines import run_command
from mark_letters import LETTERS, letters
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, dataloader
from warm_python import warm_python

from ddpbench.catalog import backends
from ddpbench.launch import starters
from ddpbench.runtime import devices
from ddpbench.watch.observe.phases import CALL, PATIENCE, Observer, find_waits
from ddpbench.watch.observe.steps import FORWARD, Marks, StepBuilder
from ddpbench.watch.window import BLOCKED


class Observed:
    """An observer, its marks and its errors."""

    def __init__(self) -> None:
        self.marks, self.errors = Marks(), []
        self.observer = Observer(self.marks, self.errors.append)

    def take(self) -> str:
        """Return the letters since the last call."""
        return letters(self.marks.take())

    def start(self) -> tuple[Net, torch.optim.Optimizer]:
        """Return a model that was found in a first step, and its optimizer."""
        model = Net()
        optimizer = start(model)
        self.take()
        return model, optimizer


@pytest.fixture(autouse=True)
def _few_objects() -> Iterator[None]:
    """Hide what exists from the search for root modules: it looks at all objects of a process."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def observed() -> Iterator[Observed]:
    one = Observed()
    yield one
    one.observer.close()
    assert one.errors == []


class Net(nn.Module):
    """A model with a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.head = nn.Linear(4, 1)

    def forward(self, batch: Tensor) -> Tensor:
        """Return a value for each row."""
        return self.head(self.body(batch))  # type: ignore[no-any-return]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def start(model: nn.Module) -> torch.optim.Optimizer:
    """Take the step in which the observer finds the model."""
    optimizer = sgd(model)
    train(model, optimizer)
    return optimizer


def test_plain_loop(observed: Observed) -> None:
    """Each step is forward, backward with its own end, and optimizer. Submodules have no marks."""
    model = Net()
    optimizer = start(model)
    assert observed.take() == "o|"
    train(model, optimizer, 3)
    assert observed.take() == "fFbwBo|" * 3
    assert observed.observer.modules == [model]
    assert observed.observer.optimizers == [optimizer]


def test_accumulation_and_several_losses(observed: Observed) -> None:
    """Each backward has its own marks, also those of a retained graph and of lists of tensors."""
    model, optimizer = observed.start()
    model(torch.ones(2, 4)).sum().backward()
    loss = model(torch.ones(2, 4)).sum()
    loss.backward(retain_graph=True)
    loss.backward(create_graph=True)
    torch.autograd.backward([loss * 1, loss * 2], [torch.ones(()), None])
    optimizer.step()
    assert observed.take() == "fFbwB" + "fF" + "bwB" * 3 + "o|"


def test_what_backward_is_called_with_is_left_alone(observed: Observed) -> None:
    """Generators and edges of a graph work as without marks."""
    model, _ = observed.start()
    torch.autograd.backward(model(torch.ones(2, 4)).sum() for _ in range(2))  # type: ignore[arg-type]
    edge = torch.autograd.graph.get_gradient_edge(model(torch.ones(2, 4)).sum())
    torch.autograd.backward(edge, torch.ones(()))
    assert model.head.bias.grad == 2 + 4 + 2


def test_forward_and_backward_that_fail_pass_on_their_error(observed: Observed) -> None:
    """The error is torch's, or the user's, and the end is marked."""
    model, optimizer = observed.start()

    def fail(gradient: Tensor) -> None:
        raise KeyError("mine")

    loss = model(torch.ones(2, 4))
    loss.register_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        loss.sum().backward()
    assert observed.take() == "fFbB"
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(torch.ones(2, 3))
    assert observed.take() == "fF"
    train(model, optimizer)
    assert observed.take() == "fFbwBo|"


def test_reentrant_backward_is_part_of_the_outer_one(observed: Observed) -> None:
    """Reentrant checkpoints call backward within backward, and forward without gradients."""
    model, optimizer = observed.start()
    batch = torch.ones(2, 4, requires_grad=True)
    value = torch.utils.checkpoint.checkpoint(model.body, batch, use_reentrant=True)
    model.head(value).sum().backward()
    optimizer.step()
    assert observed.take() == "bwBo|"


def test_gan(observed: Observed) -> None:
    """Of two optimizers that step in turn, the first to step divides the steps."""
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    first, second = sgd(critic), sgd(generator)
    for _ in range(4):
        with torch.no_grad():
            fake = generator(torch.ones(2, 4))
        critic(fake).sum().backward()
        first.step()
        critic(generator(torch.ones(2, 4))).sum().backward()
        second.step()
    assert observed.take().endswith("fFfFbwBoO" + "eEfFbwBo|" + "fFfFbwBoO")
    assert observed.observer.modules == [critic, generator]
    assert observed.observer.optimizers == [first, second]


def test_another_optimizer_takes_over(observed: Observed) -> None:
    """If the anchor steps no more, the one that steps instead becomes the anchor, after a while."""
    start(nn.Linear(4, 1))
    model = nn.Linear(4, 1)
    optimizer = sgd(model)
    train(model, optimizer, PATIENCE + 2)
    text = observed.take()
    assert text.count("|") == 1 + 3
    assert text.endswith("BoO" + "fFbwBo|" * 3)


class Done(dist.Work):  # type: ignore[misc]
    """Work of a backend that is written in Python."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return at once."""
        return True


def test_loader(observed: Observed) -> None:
    """Each iter() and next() of a DataLoader is input. Workers that were forked have no marks."""
    model, optimizer = observed.start()
    for batch in DataLoader(torch.ones(8, 4), batch_size=4, num_workers=2):  # type: ignore[arg-type]
        model(batch).sum().backward()
        optimizer.step()
    assert observed.take() == "iI" + "iIfFbwBo|" * 2 + "iI"


def test_other_threads_and_forked_children_add_nothing(observed: Observed) -> None:
    """Marks come from the thread that trains first, in the process that installed the observer."""
    model, optimizer = observed.start()
    thread = threading.Thread(target=train, args=(Net(), sgd(Net())))
    thread.start()
    thread.join()
    pid = os.fork()
    if pid == 0:
        with torch.no_grad():
            model(torch.ones(2, 4))
        os._exit(len(observed.take()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert observed.take() == ""
    train(model, optimizer)
    assert observed.take() == "fFbwBo|"


def test_after_step(observed: Observed) -> None:
    """Callbacks run after the anchor's step, get its number, and their time is other."""
    numbers: list[int] = []
    observed.observer.after_step = numbers.append
    model = Net()
    train(model, start(model), 2)
    assert numbers == [0, 1, 2]
    assert observed.take() == "o|eE" + "fFbwBo|eE" * 2


def test_an_error_in_a_mark_never_reaches_the_job() -> None:
    """Wherever a mark fails, the error is reported once, and the loop goes on without marks."""
    for kind in LETTERS:
        one = Observed()
        add = one.marks.add

        def fail(mark: int, kind: int = kind, add: Callable[[int], None] = add) -> None:
            if mark == kind:
                raise OSError("mine")
            add(mark)

        one.marks.add = fail  # type: ignore[method-assign]
        model = Net()
        optimizer = start(model)
        with torch.no_grad():
            model(torch.ones(2, 4))
        next(iter(DataLoader(torch.ones(8, 4))))  # type: ignore[arg-type]
        Done().wait()
        one.observer.after_step = lambda number: None
        train(model, optimizer, 2)
        train(model, sgd(nn.Linear(1, 1)), 2)
        assert [str(error) for error in one.errors] == ["mine"], LETTERS[kind]
        one.observer.close()


def installed() -> list[Any]:
    """Return what an observer replaces in torch, and what it adds to."""
    return [
        torch.autograd.backward,
        dataloader._BaseDataLoaderIter.__next__,
        *(vars(dist.ProcessGroup)[name] for name in ("send", "recv", "recv_anysource")),
        *(vars(owner)[name] for owner, name in find_waits()),
        *_global_optimizer_pre_hooks.values(),
        *_global_optimizer_post_hooks.values(),
    ]


def test_close_leaves_nothing_behind() -> None:
    """After close, torch and the model are as before; a second one does nothing."""
    before = installed()
    one = Observed()
    model = Net()
    train(model, start(model), 2)
    one.observer.close()
    one.observer.close()
    assert one.errors == []
    assert CALL not in model.__dict__
    assert installed() == before


def test_models_are_pickled_copied_and_scripted_as_ever(observed: Observed) -> None:
    """The root module's pickle, state and copies have no trace of the observer."""
    model = Net()
    keys = list(model.state_dict())
    start(model)
    assert CALL in model.__dict__
    observed.take()
    for other in (copy.deepcopy(model), torch.jit.script(model)):
        other(torch.ones(2, 4))
        assert CALL not in other.__dict__
    assert observed.take() == ""
    assert list(model.state_dict()) == keys
    saved = pickle.dumps(model)
    observed.observer.close()
    assert pickle.dumps(model) == saved


def test_a_dropped_model_is_freed_at_once(observed: Observed) -> None:
    """The observer keeps neither model nor optimizer alive."""
    model = Net()
    optimizer = start(model)
    del model, optimizer
    assert observed.observer.modules == []
    assert observed.observer.optimizers == []


@pytest.mark.thorough
@pytest.mark.parametrize("is_whole_step", [False, True], ids=("model", "step"))
def test_compiled(observed: Observed, is_whole_step: bool) -> None:
    """A compiled model, or a whole step in a compiled function, trains as without the observer, and
    observing it compiles nothing again."""

    def run() -> tuple[list[float], int]:
        torch.manual_seed(1)
        graphs: list[int] = []

        def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs.append(1)
            return graph.forward

        model: Any = Net()
        optimizer, step = start(model), train
        if is_whole_step:
            step = torch.compile(train, backend=count)
        else:
            model = torch.compile(model, backend=count, fullgraph=True)
        for _ in range(3):
            step(model, optimizer)
        return torch.cat([one.flatten() for one in model.parameters()]).tolist(), len(graphs)

    with_marks = run()
    observed.observer.close()
    assert run() == with_marks
    assert with_marks[1] > 0


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device with a stream, in place of the CPU."""
    monkeypatch.setitem(devices.KINDS, "cpu", devices.KINDS["cpu"])
    monkeypatch.setitem(backends.BACKENDS, "stream", backends.BACKENDS["gloo"])
    import stream_backend

    devices.KINDS["cpu"] = stream_backend.StreamCpu()
    return stream_backend


def test_phases_of_a_device(stream: Any, observed: Observed) -> None:
    """Rows are times of the device, and nothing waits for an event."""
    gate = threading.Event()
    model = Net()
    optimizer = sgd(model)
    model.head.register_forward_hook(lambda *_: stream.STREAM.give(gate.wait))
    train(model, optimizer, 3)
    assert observed.take() == ""
    gate.set()
    stream.STREAM.wait()
    model.head._forward_hooks.clear()
    sleep = partial(devices.KINDS["cpu"].sleep, torch.device("cpu"), 0.05)
    model.head.register_forward_hook(lambda *_: sleep())
    train(model, optimizer, 2)
    stream.STREAM.wait()
    observed.marks.resolve()
    steps = StepBuilder().add(observed.marks.take())
    assert [step.number for step in steps] == [1, 2, 3, 4]
    for step in steps[2:]:
        assert step.row[FORWARD] >= 0.05


def test_waits_in_other_streams_have_no_marks(
    stream: Any, observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait is marked only where it delays the stream of the latest step."""
    current = ["main"]
    kind = devices.KINDS["cpu"]
    monkeypatch.setattr(kind, "current_stream", lambda device: current[0], raising=False)
    model = Net()
    train(model, start(model))
    Done().wait()
    current[0] = "side"
    Done().wait()
    stream.STREAM.wait()
    observed.marks.resolve()
    assert observed.take() == "o|fFbwBo|wW"


def test_no_marks_while_a_graph_is_captured(
    stream: Any, observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events must not become part of a CUDA graph, nor be queried while one is captured."""
    model = Net()
    optimizer = start(model)
    queried: list[int] = []
    monkeypatch.setattr(devices.KINDS["cpu"], "capturing", lambda: True)
    monkeypatch.setattr(stream.StreamEvent, "query", lambda event: queried.append(1))
    train(model, optimizer, 2)
    assert queried == []
    monkeypatch.undo()
    stream.STREAM.wait()
    observed.marks.resolve()
    assert observed.take() == "o|"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks over gloo have observed: see `run_rank`."""
    folder = tmp_path_factory.mktemp("ranks")
    done = run_command([*warm_python(), __file__, str(folder)], folder)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "rank0.json").read_text())  # type: ignore[no-any-return]


# wrapper → marks of a step, name of the root
WRAPPED = {
    "plain": ("fFbwBo|", "DistributedDataParallel"),
    "buffers": ("fwWFbwBo|", "DistributedDataParallel"),
    "no_sync": ("fFbwBfFbwBo|", "DistributedDataParallel"),
    "fsdp": ("fwWwWFbwWwwWwWBo|", "FSDPNet"),
    "tensor parallel": ("fFwWbwBo|", "Net"),
    "zero": ("fFbwBooO" + "wW" * 4 + "|", "DistributedDataParallel"),
    "compiled": ("fFbwBo|", "OptimizedModule"),
}


@pytest.mark.thorough
def test_distributed(ranks: dict[str, Any]) -> None:
    """The outermost wrapper is the root, and each backward has its own end before it ends."""
    assert {name: ranks[name] for name in WRAPPED} == {
        name: {"marks": text * 3, "root": root, "errors": []}
        for name, (text, root) in WRAPPED.items()
    }


WAITS: dict[str, Callable[[Tensor, int], Any]] = {
    "all_reduce": lambda data, peer: dist.all_reduce(data),
    "async_op": lambda data, peer: dist.all_reduce(data, async_op=True).wait(),  # type: ignore[union-attr]
    "future": lambda data, peer: dist.all_reduce(data, async_op=True).get_future().wait(),  # type: ignore[union-attr]
    "barrier": lambda data, peer: dist.barrier(),
    "objects": lambda data, peer: dist.all_gather_object([None, None], peer),
    "message": lambda data, peer: dist.send(data, 1) if peer else dist.recv(data, 0),
    "isend": lambda data, peer: (dist.isend if peer else dist.irecv)(data, peer).wait(),  # type: ignore[union-attr]
    "functional": lambda data, peer: functional.all_reduce(data, "sum", [0, 1]) + 1,
}


@pytest.mark.thorough
def test_waits_for_other_ranks_are_blocked(ranks: dict[str, Any]) -> None:
    """Whatever a rank calls: its wait begins and ends. DDP's wait for reductions comes after the
    own end of a backward."""
    assert ranks["waits"] == {name: "wW" * (1 + (name == "objects")) for name in WAITS}
    # While rank 1 is still in backward, rank 0 marks the end of its own.
    assert ranks["late"] == "fFbwBo|"


def wrap(name: str, model: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    """Return a wrapped model and its optimizer."""
    if name == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.body)
        fully_shard(model)
        return model, sgd(model)
    if name == "tensor parallel":
        plan = {"body.0": ColwiseParallel(), "head": RowwiseParallel()}
        model = parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
        return model, sgd(model)
    if name == "buffers":
        model.register_buffer("buffer", torch.ones(4))
    wrapped: Any = DistributedDataParallel(model)
    if name == "compiled":
        wrapped = torch.compile(wrapped, backend="eager")
    if name == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.01)
    return wrapped, sgd(wrapped)


def observe_job(name: str) -> dict[str, Any]:
    one = Observed()
    model, optimizer = wrap(name, Net())
    train(model, optimizer, 2)
    one.take()
    for _ in range(3):
        if name == "no_sync":
            with model.no_sync():
                model(torch.ones(2, 4)).sum().backward()
        train(model, optimizer)
    root = type(one.observer.modules[0]).__name__
    result = {"marks": one.take(), "root": root, "errors": [repr(error) for error in one.errors]}
    one.observer.close()
    return result


def observe_waits() -> dict[str, str]:
    one = Observed()
    start(Net())
    one.take()
    letters_of = {}
    for name, wait in WAITS.items():
        wait(torch.ones(2), 1 - dist.get_rank())
        letters_of[name] = one.take()
    one.observer.close()
    return letters_of


def observe_late() -> str:
    one = Observed()
    model = DistributedDataParallel(Net())
    optimizer = start(model)
    train(model, optimizer)
    one.take()
    add = one.marks.add

    def publish(mark: int) -> None:
        add(mark)
        if mark == BLOCKED and dist.get_rank() == 0:
            _get_default_store().set("own end", "")

    def wait(gradient: Tensor) -> None:
        if dist.get_rank() == 1:
            _get_default_store().wait(["own end"], timedelta(seconds=60))

    one.marks.add = publish  # type: ignore[method-assign]
    output = model(torch.ones(2, 4))
    output.register_hook(wait)
    output.sum().backward()
    optimizer.step()
    one.observer.close()
    return one.take()


def run_rank(folder: Path) -> int:
    """Observe jobs of all kinds; rank 0 writes what it saw."""
    torch.set_num_threads(1)
    os.environ |= {name: os.environ[f"DDPBENCH_{name}"] for name in ("RANK", "WORLD_SIZE")}
    dist.init_process_group("gloo")
    results: dict[str, Any] = {name: observe_job(name) for name in WRAPPED}
    results["late"] = observe_late()
    results["waits"] = observe_waits()
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(
        starters.run_forked(lambda: run_rank(Path(sys.argv[1])), 2, preloaded=("torch._dynamo",))
    )
