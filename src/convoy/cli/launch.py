"""`convoy launch`: the commands, the job script or the manifest that train on more than one host.

What is to be given to `convoy train` there is read as that will read it, so that a slip is found here and now.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

import click

from convoy import interfaces
from convoy.cli import options
from convoy.cli.options import LazyGroup, written
from convoy.cli.requests import TrainRequest
from convoy.cli.train import command as train
from convoy.errors import ConvoyError
from convoy.files import writing
from convoy.launch.clusters import KINDS, RUNTIME, complete, job_script, manifest, name_for, submit, word
from convoy.launch.torchrun import Host, commands
from convoy.models.registry import check_name
from convoy.units import plural


def _named(context: click.Context, option: click.Parameter, interface: str | None) -> str | None:
    if interface is not None:
        interfaces.check_name(interface)
    return interface


_SOME = click.IntRange(min=1)  # at least one
trained = click.argument("arguments", metavar="-- TRAIN...", nargs=-1, type=click.UNPROCESSED)
interface_option = partial(click.option, "--interface", metavar="NAME", callback=_named)
restarts_option = partial(click.option, "--max-restarts", type=click.IntRange(min=0), show_default=True)

LAUNCHERS = {
    "hosts": ("convoy.cli.launch:on_hosts", "Print the command to start on each of several hosts."),
    "slurm": ("convoy.cli.launch:on_slurm", "Write a job script for Slurm, and submit it."),
    "kubernetes": ("convoy.cli.launch:on_kubernetes", "Write a manifest for Kubernetes."),
}


@click.command(
    "launch",
    cls=LazyGroup,
    verbs=LAUNCHERS,
    epilog="""\b
Examples:
  convoy launch hosts node1:4,node2:4 -- resnet50 --data /data/imagenet --recipe imagenet-90
  convoy launch slurm --nodes 2 --devices-per-node 4 --time 8h --submit -- resnet50 --data /data/imagenet
""",
)
def command() -> None:
    """Train on several hosts, by the engine that they have.

    What comes after -- is what convoy train would be given.
    """


@options.verb(
    "hosts",
    """
  convoy launch hosts node1:4,node2:4 -- resnet50 --data /data/imagenet --recipe imagenet-90
  convoy launch hosts --devices-per-host 8 --interface eth1 --min-hosts 2 --max-restarts 9 \\
      node1,node2,node3 -- resnet50 --data /data/imagenet --out runs/resnet50
""",
)
@click.argument("hosts")
@trained
@click.option("--devices-per-host", metavar="N", type=int, help="Of hosts without :N, so many ranks.")
@interface_option(help="Talk through it, e.g. eth1. [default: on the way to the first host]")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=29400,
    show_default=True,
    help="Where they meet, on the first host.",
)
@click.option("--min-hosts", "least", metavar="N", type=int, help="Begin, and go on, with so many. [default: all]")
@restarts_option(metavar="N", default=0, help="After failures of ranks.")
@click.option(
    "--rendezvous",
    type=click.Choice(["convoy", "c10d", "static"]),
    default="convoy",
    show_default=True,
    help="convoy is torch's c10d, listening on one address only.",
)
@click.option(
    "--secret",
    type=options.OutputPath(dir_okay=False),
    help="File with what hosts know each other by, which all see; made if missing. [default: in the commands]",
)
@options.as_json
def on_hosts(
    hosts: str, arguments: tuple[str, ...], secret: Path | None, interface: str | None, as_json: bool, **values: Any
) -> int:
    """Print the command that each of HOSTS is to start to train together.

    HOSTS are names or addresses, as in node1:4,node2:4. The first one is where they meet. What comes after -- is what
    convoy train would be given.
    """
    variables = (
        {interfaces.SECRET: token_hex(16)} if secret is None else {interfaces.SECRET_FILE: str(secret.absolute())}
    )
    group = Host.parse(hosts, values.pop("devices_per_host"))
    environment = dict.fromkeys(interfaces.VARIABLES, interface) if interface is not None else {}
    environment |= variables if len(group) > 1 else {}
    lines = commands(group, arguments, f"convoy-{token_hex(4)}", environment=environment, **values)
    elastic = values["least"] not in (None, len(group))
    check_recipe(requested(arguments, sum(host.devices for host in group), elastic))
    if secret is not None and not secret.exists():
        # a new file, through no link: others who may write into the folder would read there what is kept from them
        to_own = partial(os.open, mode=0o600)
        with writing(f"--secret {secret}", "choose another place"), open(secret, "x", opener=to_own) as file:
            file.write(f"{token_hex(16)}\n")
    interfaces.secret(variables)  # a file of before may be open to others
    if as_json:
        click.echo(json.dumps([{**asdict(line), "command": str(line)} for line in lines], indent=2))
        return 0
    for line in lines:
        click.echo(f"# {line.host}, {plural(line.devices, 'device')}")
        click.echo(str(line))
    click.echo(
        "start each on its host: the data are to be under one path, and the run directory on a file system of all; "
        "for a network of your own in the folder of its file (docs/hosts.md)",
        err=True,
    )
    return 0


@options.verb(
    "slurm",
    """
  convoy launch slurm --nodes 2 --devices-per-node 4 --time 8h --option partition=gpu --submit \\
      -- resnet50 --data /data/imagenet --recipe imagenet-90 --out runs/resnet50
  convoy launch slurm --nodes 4 --cores-per-device 16 --script job.sh -- lenet --data mnist-mini --device cpu
""",
)
@trained
@click.option("--nodes", metavar="N", type=_SOME, default=1, show_default=True)
@click.option(
    "--devices-per-node", metavar="N", type=_SOME, default=1, show_default=True, help="GPUs, so ranks, of each."
)
@click.option("--cores-per-device", metavar="N", type=_SOME, help="CPU cores of each. [default: Slurm's]")
@click.option(
    "--time", default="1h", show_default=True, help="At once: 8h, 90m, 1d12h. A run may take many times that."
)
@click.option(
    "--save-before", metavar="SECONDS", type=int, default=120, show_default=True, help="Save so long before its end."
)
@restarts_option(metavar="N", default=3, help="After failures of ranks.")
@interface_option(help="Talk through it, e.g. ib0. [default: on the way to the first node]")
@click.option("--name", help="Of the job. [default: of the network]")
@click.option("--option", "others", metavar="NAME=VALUE", multiple=True, help="Any other of sbatch's; repeatable.")
@click.option("--python", default=sys.executable, help="The Python that has Convoy, on the nodes. [default: this one]")
@click.option("--script", type=options.OutputPath(dir_okay=False), help="Write it there. [default: NAME.sbatch]")
@click.option("--submit", "to_submit", is_flag=True, help="Submit it, too.")
@options.as_json
def on_slurm(
    arguments: tuple[str, ...], name: str | None, interface: str | None, script: Path | None, **values: Any
) -> int:
    """Write a job for Slurm that trains on its nodes, and submit it.

    What comes after -- is what convoy train would be given. Before the time of the job is over the run is saved and
    the job queued again, until the run is done.
    """
    others, to_submit, as_json = (values.pop(name) for name in ("others", "to_submit", "as_json"))
    request = requested(arguments, values["nodes"] * values["devices_per_node"])
    check_recipe(request)
    name = name or word(request.model or Path(request.recipe or request.out or "").stem)
    added = [] if request.resume else ["--resume"]
    added += [] if interface is None else ["--interface", interface]
    text = job_script(
        (*arguments, *added),
        None if request.out is None else str(request.out),
        name,
        gpus=request.device != "cpu",
        options=dict(_option(option) for option in others),
        **values,
    )
    script = script or Path(f"{word(name)}.sbatch")
    written("--script", script, text)
    number = submit(script) if to_submit else None
    if as_json:
        click.echo(json.dumps({"script": str(script), "job": number}))
    elif number is None:
        click.echo(f"script: {script}; submit it by: sbatch {script}")
    else:
        click.echo(f"script: {script}; submitted as job {number}")
    return 0


def _option(text: str) -> tuple[str, str | None]:
    name, equals, value = text.lstrip("-").partition("=")
    return name, value if equals else None


# Of each device: with an accelerator, and where a device is CPUs.
AMOUNTS = (
    {"cpu": (4, ""), "memory": (16, "Gi"), "shared_memory": (2, "Gi")},
    {"cpu": (1, ""), "memory": (4, "Gi"), "shared_memory": (1, "Gi")},
)


@options.verb(
    "kubernetes",
    """
  convoy launch kubernetes --image registry.example/convoy:1.0 --nodes 2 --devices-per-node 4 \\
      --data-claim imagenet --run-claim runs --out job.yaml -- resnet50 --data /data --epochs 90
  convoy launch kubernetes --kind job --image convoy:1.0 --accelerator none --nodes 2 \\
      --run-claim runs -- lenet --data mnist-mini | kubectl apply -f -
""",
)
@trained
@click.option("--image", required=True, help="The container image, with Convoy in it (see the Dockerfile).")
@click.option("--run-claim", metavar="CLAIM", required=True, help="Volume claim for runs: /runs in the pods.")
@click.option("--data-claim", metavar="CLAIM", help="Volume claim with the data: /data in the pods, read-only.")
@click.option("--kind", type=click.Choice(KINDS), default="trainjob", show_default=True, help="What to write.")
@click.option("--runtime", default=RUNTIME, show_default=True, help="Of a trainjob: its ClusterTrainingRuntime.")
@click.option("--name", help="Of the job and its run. [default: made from the model's]")
@click.option("--namespace", help="[default: kubectl's]")
@click.option("--nodes", "num_nodes", type=_SOME, default=1, show_default=True, help="Pods.")
@click.option("--min-nodes", "least_nodes", type=int, help="Begin, and go on, with so many pods. [default: all]")
@click.option("--devices-per-node", type=_SOME, default=1, show_default=True, help="Devices, so ranks, in each pod.")
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
@restarts_option(default=3, help="Restarts of a pod's ranks, and of each pod.")
@click.option("--user", metavar="UID", type=_SOME, default=1000, show_default=True, help="User and group of the pods.")
@click.option("--out", type=options.OutputPath(), help="The file. [default: print it]")
def on_kubernetes(arguments: tuple[str, ...], name: str | None, out: Path | None, **values: Any) -> int:
    """Write a manifest that runs convoy train on the pods of a Kubernetes cluster.

    What comes after -- is what convoy train would be given; --out and --resume are added, so that a pod that is
    started again goes on from the newest checkpoint.
    """
    on_cpus, devices = values["accelerator"] == "none", values["devices_per_node"]
    values["accelerator"] = None if on_cpus else values["accelerator"]
    request = requested(arguments, values["num_nodes"] * devices, elastic=values["least_nodes"] is not None)
    name = name_for(request.model, request.recipe) if name is None else name
    completed = complete(arguments, vars(request), name, values["data_claim"] is not None)
    for option, (amount, unit) in AMOUNTS[on_cpus].items():
        values[option] = values[option] or f"{amount * devices}{unit}"
    variables = _pairs("--env", "NAME=VALUE", values.pop("environment"))
    references = {
        variable: (secret, key)
        for variable, place in _pairs("--env-from-secret", "NAME=SECRET/KEY", values.pop("secrets")).items()
        for secret, _, key in [place.partition("/")]
    }
    for variable in variables.keys() & references.keys():
        raise _given_twice(variable)
    text = manifest(completed, variables, references, name=name, **values)
    check_recipe(request)  # after secrets in it were refused: sentences may repeat it
    module, colon, _ = (request.model or "").partition(":")
    if colon and module not in ("timm", "torchvision"):
        click.echo(
            f"the module {module} must be in the image {values['image']}: see 'Your own network' in docs/kubernetes.md",
            err=True,
        )
    if out is None:
        click.echo(text, nl=False)
        return 0
    written("--out", out, text)
    click.echo(f"manifest: {out}; start it with: kubectl apply -f {out}")
    return 0


def _pairs(option: str, form: str, texts: Sequence[str]) -> dict[str, str]:
    """What an option's texts of the form `NAME=…` say, by name."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or ("/" in form and "/" not in value):
            raise ConvoyError(f"{option} {name} must be {form}")
        if name in pairs:
            raise _given_twice(name)
        pairs[name] = value
    return pairs


def _given_twice(variable: str) -> ConvoyError:
    return ConvoyError(f"the variable {variable} is given twice: leave one away")


def requested(arguments: Sequence[str], devices: int, elastic: bool = False) -> TrainRequest:
    """What `convoy train` is asked for by the arguments after --, on so many ranks or, if `elastic`, fewer."""
    values = train.make_context("convoy train", list(arguments), **options.HELP).params
    if values["model"] is None and values["recipe"] is None and not values["resume"]:
        raise ConvoyError("nothing to train: give after -- what convoy train is to be given, e.g. -- lenet --data DIR")
    asked = values["devices"]
    if asked is not None and (elastic or asked != devices):
        raise ConvoyError(f"--devices {asked} contradicts the {devices} ranks that are started: leave it out")
    if values["max_restarts"]:
        raise ConvoyError("--max-restarts after -- is for the ranks of one host: put it before the --")
    if values["interface"] is not None:
        interfaces.check_name(values["interface"])
    return TrainRequest(arguments, values | {"extend": None})  # the run that is made longer may be on the hosts alone


def check_recipe(request: TrainRequest) -> None:
    """Read the recipe as `convoy train` will, without the data; not a file `/…` that only the other hosts have."""
    if request.recipe is None or not Path(request.recipe).is_absolute() or Path(request.recipe).exists():
        check_name(request.recipe_of().model.name, here=False)
