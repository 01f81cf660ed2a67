"""`convoy launch kubernetes`: a manifest that trains on the pods of a cluster."""

from pathlib import Path

import click

from convoy.cli import options
from convoy.cli.launch_arguments import check_recipe, parsed
from convoy.cli.options import written
from convoy.errors import ConvoyError
from convoy.launch.kubernetes import KINDS, SecretVariable, Training, manifest, to_yaml
from convoy.launch.kubernetes.manifests import RUNTIME
from convoy.launch.kubernetes.training import complete, name_for

# Of each device: with an accelerator, and where a device is CPUs.
CPUS, MEMORY_GI, SHARED_GI = (4, 1), (16, 4), (2, 1)


@click.command(
    "kubernetes",
    epilog="""\b
Examples:
  convoy launch kubernetes --image registry.example/convoy:1.0 --nodes 2 --devices-per-node 4 \\
      --data-claim imagenet --run-claim runs --out job.yaml -- resnet50 --data /data --epochs 90
  convoy launch kubernetes --kind job --image convoy:1.0 --accelerator none --nodes 2 \\
      --run-claim runs -- lenet --data mnist-mini | kubectl apply -f -
""",
)
@click.argument("arguments", metavar="-- TRAIN...", nargs=-1, type=click.UNPROCESSED)
@click.option("--image", required=True, help="The container image, with Convoy in it (see the Dockerfile).")
@click.option("--run-claim", metavar="CLAIM", required=True, help="Volume claim for runs: /runs in the pods.")
@click.option("--data-claim", metavar="CLAIM", help="Volume claim with the data: /data in the pods, read-only.")
@click.option("--kind", type=click.Choice(list(KINDS)), default="trainjob", show_default=True, help="What to write.")
@click.option("--runtime", default=RUNTIME, show_default=True, help="Of a trainjob: its ClusterTrainingRuntime.")
@click.option("--name", help="Of the job and its run. [default: made from the model's]")
@click.option("--namespace", help="[default: kubectl's]")
@click.option("--nodes", type=int, default=1, show_default=True, help="Pods.")
@click.option("--min-nodes", type=int, help="Begin, and go on, with so many pods. [default: all]")
@click.option("--devices-per-node", type=int, default=1, show_default=True, help="Devices, so ranks, in each pod.")
@click.option("--accelerator", default="nvidia.com/gpu", show_default=True, help="What a device is; none for CPUs.")
@click.option("--cpu", metavar="N", help="CPUs of a pod. [default: 4 a device, 1 if it is a CPU]")
@click.option("--memory", metavar="N", help="Memory of a pod. [default: 16Gi a device, 4Gi if it is a CPU]")
@click.option("--shared-memory", metavar="N", help="Part of it that is /dev/shm. [default: 2Gi a device, or 1Gi]")
@click.option("--env", "environment", metavar="NAME=VALUE", multiple=True, help="An environment variable; repeatable.")
@click.option(
    "--env-from-secret",
    "secrets",
    metavar="NAME=SECRET/KEY",
    multiple=True,
    help="An environment variable whose value is in a Kubernetes Secret; repeatable.",
)
@click.option(
    "--max-restarts", type=int, default=3, show_default=True, help="Restarts of a pod's ranks, and of each pod."
)
@click.option("--user", metavar="UID", type=int, default=1000, show_default=True, help="User and group of the pods.")
@click.option("--out", type=options.Place(), help="The file. [default: print it]")
@options.verbose
def command(
    arguments: tuple[str, ...],
    image: str,
    run_claim: str,
    data_claim: str | None,
    kind: str,
    runtime: str,
    name: str | None,
    namespace: str | None,
    nodes: int,
    min_nodes: int | None,
    devices_per_node: int,
    accelerator: str,
    cpu: str | None,
    memory: str | None,
    shared_memory: str | None,
    environment: tuple[str, ...],
    secrets: tuple[str, ...],
    max_restarts: int,
    user: int,
    out: Path | None,
) -> int:
    """Write a manifest that runs convoy train on the pods of a Kubernetes cluster.

    What comes after -- is what convoy train would be given; --out and --resume are added, so that a pod that is
    started again goes on from the newest checkpoint.
    """
    said = parsed(arguments)  # a slip is found here, and not in the cluster
    name = name_for(said["model"], said["recipe"]) if name is None else name
    on_cpus = accelerator == "none"
    elastic = min_nodes is not None
    completed = complete(arguments, said, name, nodes * devices_per_node, elastic, data_claim is not None)
    training = Training(
        name=name,
        image=image,
        arguments=completed,
        num_nodes=nodes,
        devices_per_node=devices_per_node,
        least_nodes=min_nodes,
        accelerator=None if on_cpus else accelerator,
        cpu=cpu or str(CPUS[on_cpus] * devices_per_node),
        memory=memory or f"{MEMORY_GI[on_cpus] * devices_per_node}Gi",
        shared_memory=shared_memory or f"{SHARED_GI[on_cpus] * devices_per_node}Gi",
        data_claim=data_claim,
        run_claim=run_claim,
        namespace=namespace,
        environment=dict(_pair("--env", text, "NAME=VALUE") for text in environment),
        secrets=tuple(_secret(text) for text in secrets),
        max_restarts=max_restarts,
        user=user,
    )
    check_recipe(completed)  # after what is secret in it was refused: sentences may repeat it
    text = to_yaml(manifest(training, kind, runtime))
    module, colon, _ = (said["model"] or "").partition(":")
    if colon and module not in _LIBRARIES:
        click.echo(
            f"the module {module} must be in the image {image}: see 'Your own network' in docs/kubernetes.md",
            err=True,
        )
    if out is None:
        click.echo(text, nl=False)
        return 0
    written("--out", out, text)
    click.echo(f"manifest: {out}; start it with: kubectl apply -f {out}")
    return 0


_LIBRARIES = ("timm", "torchvision")
"""What may stand before the colon in the name of a network and is no module of the user's own."""


def _pair(option: str, text: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConvoyError(f"{option} {text!r} must be {form}")
    return name, value


def _secret(text: str) -> SecretVariable:
    form = "NAME=SECRET/KEY"
    name, place = _pair("--env-from-secret", text, form)
    secret, slash, key = place.partition("/")
    if not slash:
        raise ConvoyError(f"--env-from-secret {name} must be {form}")
    return SecretVariable(name, secret, key)
