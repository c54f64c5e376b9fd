"""A Kubernetes manifest that runs ddpbench with Kubeflow; not tested on a cluster.

python -m ddpbench manifest --nodes 2 --ranks-per-node 8 --image registry/ddpbench:1 > job.yaml
python -m ddpbench manifest --kind trainjob -- ddp --workload mlp
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import resources
from string import Template

from ddpbench.commands import launch as launch_node
from ddpbench.launch.placement import Refused
from ddpbench.records import redact
from ddpbench.session import options

GROUP = "measure"
HELP = "write a manifest for Kubernetes with Kubeflow; not tested on a cluster"
KINDS = ("pytorchjob", "trainjob")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this command; imports no torch."""
    add = parser.add_argument
    add(
        "--kind",
        choices=KINDS,
        default=KINDS[0],
        help="pytorchjob: Training Operator v1 (default); trainjob: Trainer v2",
    )
    add("--nodes", type=options.whole(1), default=2, metavar="N", help="pods; default 2")
    add("--ranks-per-node", type=options.whole(1), default=1, metavar="R", help="default 1")
    add(
        "--image",
        default="ddpbench:latest",
        help="with Python, torch and ddpbench in it; default %(default)s",
    )
    launch_node.add_command(parser)


def run(asked: argparse.Namespace, words: Sequence[str]) -> int:
    """Print it."""
    name, *rest = launch_node.command(asked.command or ["collectives"])
    if redact.HIDDEN in " ".join(redact.arguments([asked.image, *rest])):
        raise Refused(
            "a manifest is for everybody who may read it, and these options hold a secret: give it "
            "to the pods as a Kubernetes Secret"
        )
    # The folder it starts in may not be writable; results leave the pod by its log.
    inside = ["torchrun", "-m", f"ddpbench.{name}", "--output", "/tmp/ddpbench", *rest]
    file = resources.files("ddpbench.commands") / "manifests" / f"{asked.kind}.yaml"
    filled = Template(file.read_text(encoding="utf-8")).substitute(
        image=json.dumps(asked.image),  # JSON is YAML, whatever stands in it
        command=json.dumps(inside),
        nodes=asked.nodes,
        workers=asked.nodes - 1,
        ranks=asked.ranks_per_node,
    )
    sys.stdout.write(filled)
    return 0
