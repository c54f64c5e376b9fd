"""Write a Kubernetes manifest that runs ddpbench with Kubeflow; not tested on a cluster.

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
    """Add the options of this command; imports no torch."""
    add = parser.add_argument
    add(
        "--kind",
        choices=KINDS,
        default=KINDS[0],
        help="pytorchjob: for Training Operator v1; trainjob: for Trainer v2 (default: pytorchjob)",
    )
    add("--nodes", type=options.whole(1), default=2, metavar="N", help="pods (default: 2)")
    add(
        "--ranks-per-node",
        type=options.whole(1),
        default=1,
        metavar="R",
        help="ranks in each pod (default: 1)",
    )
    add(
        "--image",
        default="ddpbench:latest",
        help="image with Python, torch and ddpbench (default: %(default)s)",
    )
    launch_node.add_command(parser)


def run(namespace: argparse.Namespace, words: Sequence[str]) -> int:
    """Print the manifest; return the exit code. Raises Refused."""
    name, *rest = launch_node.read_command(namespace.command or ["collectives"])
    if redact.HIDDEN in " ".join(redact.arguments([namespace.image, *rest])):
        raise Refused(
            "these options hold a secret, and others may read a manifest: give the secret to the "
            "pods as a Kubernetes Secret"
        )
    # The folder in which a pod starts may not be writable. Results leave the pod by its log.
    pod_command = ["torchrun", "-m", f"ddpbench.{name}", "--output", "/tmp/ddpbench", *rest]
    file = resources.files("ddpbench.commands") / "manifests" / f"{namespace.kind}.yaml"
    text = Template(file.read_text(encoding="utf-8")).substitute(
        image=json.dumps(namespace.image),  # JSON is YAML, whatever stands in it
        command=json.dumps(pod_command),
        nodes=namespace.nodes,
        workers=namespace.nodes - 1,
        ranks=namespace.ranks_per_node,
    )
    sys.stdout.write(text)
    return 0
