"""`convoy train`: train a network and leave a run directory with its report."""

from collections.abc import Sequence
from typing import Any

import click

from convoy.cli import keys, options
from convoy.cli.requests import TrainRequest
from convoy.launch import find_place
from convoy.terminal import waiting_for


@options.verb(
    "train",
    """
  convoy train lenet --data mnist-mini
  convoy train --recipe cifar-quick --data /data/cifar10 --out runs/cifar
  convoy train resnet50 --recipe imagenet-90 --data /data/imagenet --devices 8 --batch 1024
  convoy train timm:efficientnet_b0 --data photos/ --epochs 30 --weights b0.safetensors
  convoy train runs/cifar --resume
  convoy train runs/cifar --extend 8ep                 # a new run, runs/cifar-extended
  convoy train resnet18 --data flowers/ --weights runs/photos --freeze trunk:2ep --set optimizer.layer_decay=0.7
  convoy train unet --data scans/labels.csv            # path,mask.png: the labels say the task
""",
    verbose="Say how all numbers follow; the traceback of an error.",
)
@click.argument("model", required=False)
@keys.sets(
    "data.path",
    "--data",
    metavar="PATH",
    text="A folder or file of pictures, or mnist-mini.",
    default="the recipe's, else mnist-mini",
)
@click.option("--recipe", metavar="NAME|FILE", help="How to train: a built-in recipe (convoy recipes) or a YAML file.")
@click.option("--out", type=options.OutputPath(), help="A new run directory. [default: runs/MODEL-DATA, or …-2]")
@click.option("--resume", is_flag=True, help="Go on with the run in --out (or in MODEL, if that is a run directory).")
@click.option("--accept-code-change", is_flag=True, help="Go on with a run although the network's code has changed.")
@options.trust_code
@click.option("--extend", metavar="N", help="Train the run in MODEL for so much longer, e.g. 8ep, in a new run.")
@keys.sets("task", metavar="TASK")
@keys.sets("epochs", metavar="N", default="the recipe's, else 90")
@keys.sets("target", metavar="TOP1")
@keys.sets("batch")
@keys.sets("data.image_size", metavar="N", text="Height and width of the images.", default="the network's")
@keys.sets("optimizer.lr", text="Peak learning rate, as it is (no scaling).")
@keys.sets("seed")
@keys.microbatches
@keys.batch_norm
@keys.sets("reproducible", is_flag=True)
@keys.precision
@keys.channels_last
@keys.sets("compile", "--compile/--no-compile")
@keys.sets("cuda_graphs", metavar="WHAT", default="auto")
@keys.recompute
@keys.sets("data.workers", text="Processes that load data.", default="chosen for the data")
@keys.sets("data.bad_images", metavar="WHAT", text="A picture that cannot be read: error or skip.")
@keys.sets("model.weights", metavar="FILE|RUN")
@keys.freeze
@keys.sets("loss.function", "--loss", metavar="FILE:NAME", text="Your own loss, e.g. mine.py:focal.")
@keys.sets(
    "metrics",
    "--metric",
    metavar="FILE:NAME,…",
    text="Your own metrics, e.g. mine.py:kappa.",
    as_yaml=keys.patterns_as_yaml,
)
@keys.sets("data.augment.function", "--augment", metavar="FILE:NAME", text="Your own change of training pictures.")
@keys.sets("best", metavar="METRIC")
@keys.sets("stop_after", metavar="N")
@keys.sets("loss.class_weights", metavar="WHAT", text="balanced, effective or A=1,B=3.", as_yaml=keys.weights_as_yaml)
@keys.sets("log", metavar="NAME,…", text="Tell wandb, mlflow or trackio, too.", as_yaml=keys.patterns_as_yaml)
@click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="Any other key of the recipe; repeatable.")
@options.device
@keys.sets("parallel.devices", metavar="N")
@keys.sets("parallel.plan", metavar="TEXT|FILE")
@keys.sets("parallel.shares", metavar="A,B,…", as_yaml=keys.shares_as_yaml)
@keys.cores_per_device
@keys.sets("parallel.gradient_compression", metavar="TYPE")
@keys.sets("parallel.local_sgd", metavar="H")
@click.option(
    "--max-restarts", metavar="N", type=click.IntRange(min=0), help="Start failed ranks again so often. [default: 0]"
)
@click.option("--timeout", metavar="TIME", help="End when no rank moves for so long, e.g. 30s, 10min. [default: 5min]")
@click.option("--interface", metavar="NAME", help="Talk to other ranks through it. [default: loopback, within a host]")
@keys.schedule
@keys.sets("parallel.memory_limit", metavar="SIZE")
@keys.sets("parallel.lost_group", metavar="WHAT")
@click.pass_obj
def command(arguments: Sequence[str], /, **values: Any) -> int:
    """Train MODEL (convoy models lists them; mine.py:net is yours) and write a report.

    MODEL may be left out where the recipe names it.

    --extend makes a finished run longer in a new one, which begins with the old one's weights, optimizer, averages and
    place in the data; the old one stays as it is. The learning rate is that of a run of the whole length: where it is
    constant or falls at certain epochs it goes on, and a cosine, which has ended, rises to where it would stand.
    Schedule, loss and augmentation may change. To begin anew with the weights alone, use --weights.
    """
    request = TrainRequest(arguments, values)
    if find_place() is None:  # ranks find mistakes together
        request.check()
    with waiting_for("loading PyTorch"):
        from convoy.cli.train_run import run  # with torch, for which no mistake is to wait
    return run(request)
