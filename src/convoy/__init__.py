"""Train convolutional networks on one to many devices, with the same result on every one of them.

A network becomes this rank's part of it by `parallelize`, and the training loop around it stays one's own:

    net = convoy.parallelize(model, "sample=2", example=images)     under torchrun; without it, one device
    loss = loss_fn(net(images[mine]), labels[mine])                 mine = convoy.local_samples(net, len(images))
    loss.backward()                                                 gradients are those of the global batch

Beside it stand `plan` (the fastest plan for some devices, and why), `plan_on` (for devices that are not at hand),
`save` and `load` (any plan to any other), `global_mean` and `penalty` (losses that are exact under every plan),
`BatchSampler` and `evaluate`. `train` is `convoy train` from Python; `load_run` its result. See docs/your-own-loop.md.
"""

from typing import TYPE_CHECKING

from convoy.late import lazily
from convoy.version import __version__ as __version__

if TYPE_CHECKING:
    from convoy.cli.from_python import train as train
    from convoy.engine.parallelize import accumulate as accumulate
    from convoy.engine.parallelize import clip_grad_norm_ as clip_grad_norm_
    from convoy.engine.parallelize import explain as explain
    from convoy.engine.parallelize import forward_backward as forward_backward
    from convoy.engine.parallelize import gradients as gradients
    from convoy.engine.parallelize import local_samples as local_samples
    from convoy.engine.parallelize import parallelize as parallelize
    from convoy.engine.shards import deferred as deferred
    from convoy.errors import ConvoyError as ConvoyError
    from convoy.planner.interface import plan as plan
    from convoy.planner.machines import plan_on as plan_on
    from convoy.plans.mesh import Mesh as Mesh
    from convoy.plans.plan import Plan as Plan
    from convoy.script.checkpoint import load as load
    from convoy.script.checkpoint import save as save
    from convoy.script.data import BatchSampler as BatchSampler
    from convoy.script.data import evaluate as evaluate
    from convoy.script.loss import global_mean as global_mean
    from convoy.script.loss import penalty as penalty
    from convoy.script.ranks import num_ranks as num_ranks
    from convoy.script.ranks import print as print
    from convoy.script.ranks import rank as rank
    from convoy.script.recorded import recorded as recorded
    from convoy.script.state import load_optimizer_state_dict as load_optimizer_state_dict
    from convoy.script.state import load_state_dict as load_state_dict
    from convoy.script.state import optimizer_state_dict as optimizer_state_dict
    from convoy.script.state import state_dict as state_dict
    from convoy.training.restore import load_run as load_run

# The public names by their modules: imported when they are first used, as `convoy --help` waits for neither them nor
# torch.
_NAMES = {
    "cli.from_python": "train",
    "errors": "ConvoyError",
    "engine.parallelize": "accumulate clip_grad_norm_ explain forward_backward gradients local_samples parallelize",
    "engine.shards": "deferred",
    "planner.machines": "plan_on",
    "planner.interface": "plan",
    "plans.mesh": "Mesh",
    "plans.plan": "Plan",
    "script.checkpoint": "load save",
    "script.data": "BatchSampler evaluate",
    "script.loss": "global_mean penalty",
    "script.ranks": "num_ranks print rank",
    "script.recorded": "recorded",
    "script.state": "load_optimizer_state_dict load_state_dict optimizer_state_dict state_dict",
    "training.restore": "load_run",
}

# `import *` leaves Python's print
__all__ = ["ConvoyError", *sorted({*" ".join(_NAMES.values()).split()} - {"ConvoyError", "print"})]

__getattr__ = lazily("convoy", _NAMES)


def __dir__() -> list[str]:
    """The public names, for `help` and completion, also those not used yet."""
    return [*__all__, "__version__", "print"]
