"""Builds all that a run needs from its recipe, and nothing on disk: what is wrong is said before a file is made."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from convoy.comm.joining import identify
from convoy.comm.ranks import Ranks
from convoy.data.dataset import DataSet, open_data
from convoy.data.loader import check_augmentation
from convoy.data.sources import Progress
from convoy.engine.coupling import microbatch_sizes
from convoy.engine.recorded import leave_default_stream
from convoy.engine.shards import lacks_numbers
from convoy.errors import ConvoyError
from convoy.plans.plan import Plan
from convoy.plans.schedule import PARTS_PER_STAGE
from convoy.recipe.parallel_config import check_shares, plan_of
from convoy.recipe.recipe import LossConfig, Recipe
from convoy.tasks.metric import metric_name
from convoy.tasks.own import add_own, check_own_task
from convoy.tasks.registry import create_task
from convoy.tasks.task import Task
from convoy.training.assemble import assemble
from convoy.training.build import TriedNetwork, build_for, divisible_sizes, has_batch_norm, on_meta
from convoy.training.derived import check_batch, fitting_batch, left_out_of_epochs, num_microbatches, resolve
from convoy.training.division import divide
from convoy.training.optimizer import thaws
from convoy.training.precision import set_numerics, settle
from convoy.training.resume import check_ranks, code_of
from convoy.training.session import ChosenPlan, Prepared, Session
from convoy.training.workloads import choose_plan


def set_up(
    recipe: Recipe,
    device: torch.device,
    progress: Progress | None = None,
    ranks: Ranks | None = None,
    data: DataSet | None = None,
    keep: bool = True,
    explicit_keys: Collection[str] = (),
    rivals: Sequence[Plan] = (),
) -> Session:
    """Open the data, build the network and everything around it; what the recipe leaves open is settled for the devices
    here. All ranks call it. A ConvoyError where the recipe, the plan, the data or the weights cannot be used as they
    are.

    `progress` is told of long work on the data: what, done, total. `data` stand in place of what the recipe names,
    where only the speed counts. `keep` says whether measured times are kept for the next time, and those that are kept
    are used; `explicit_keys` are keys of the recipe that the user has set just now; `rivals` are plans beside those
    that the planner finds, where it chooses.
    """
    ranks = ranks or Ranks()
    say: Progress = progress if progress is not None and ranks.rank == 0 else lambda what, done, total: None
    leave_default_stream(device)
    set_numerics(recipe)
    check_devices(recipe, ranks.num)
    plan, notes = plan_of(recipe.parallel, ranks.num)
    if data is None:
        say("opening the data", 0, 1)

        def check(most: int) -> None:
            check_batch(fitting_batch(recipe, most, explicit_keys).batch, most, "sample")

        data = open_data(recipe.data, say, selects=recipe.selects, check=check, task=recipe.task)
        check_ranks(data, ranks)
    said, recipe = recipe.batch, fitting_batch(recipe, len(data.train), explicit_keys)
    if recipe.batch != said:
        notes.append(f"the batch is {recipe.batch}, not {said}, as there are {len(data.train)} training samples")
    gpu = identify(device).gpu
    gpus = ranks.gather(gpu)
    sharing = gpus.count(gpu) if gpu else ranks.on_host  # ranks that share the memory of the GPU, or of the host
    quantities = resolve(recipe, len(data.train))
    notes += left_out_of_epochs(recipe.batch, len(data.train))
    every = recipe.parallel.local_sgd
    if isinstance(every, int) and every > quantities.total_updates and ranks.num > 1:
        notes.append(f"parallel.local_sgd={every} is more than {quantities.total_updates} updates: once, at the end")
    model, build_notes = build_for(recipe, data, plan, ranks)
    notes += build_notes
    if recipe.batch_norm != "microbatch" and not has_batch_norm(model):
        notes.append(f"batch_norm={recipe.batch_norm} has no effect: {recipe.model.name} has no batch norm")
    as_graph = ranks.any(lacks_numbers(model))
    settled = settle(recipe, device, ranks)
    recipe = settled.recipe
    memory_format = torch.channels_last if recipe.channels_last else torch.contiguous_format
    # parts alone are brought to the device of a network that the first rank has
    model.to(device=None if as_graph else device, memory_format=memory_format)  # type: ignore[call-overload]
    shape = data.channels, data.image_size, data.image_size
    change = "data.image_size, data.channels, the microbatch or the model"
    task = create_task(recipe, data.classes, data.task, data.train.labels)
    if recipe.own_code():
        add_own(task, recipe)
        check_augmentation(data, recipe.data, recipe.seed)
        check_own_task(task, recipe, data)
    if recipe.best is not None:
        check_best(task, recipe.best)
    tried = TriedNetwork.of(recipe, model, shape, device, change, task)
    tried.probe = replace(tried.probe, on_device=sharing)
    notes += settled.notes
    if tried.probe.outputs == 1 and recipe.loss.aux_weight != LossConfig().aux_weight:
        notes.append(f"loss.aux_weight has no effect: {recipe.model.name} has no auxiliary heads")
    sizes, smaller = tried.divisible_sizes(*parts_of(recipe, plan, ranks.num))
    notes += [smaller] if smaller is not None else []
    ready = Prepared(
        **vars(tried),
        data=data,
        task=task,
        quantities=replace(quantities, sizes=sizes),
        ranks=ranks,
        keeps_times=keep,
        derived=settled.derived,
        notes=notes,
        code=ranks.first(lambda: code_of(model, tried.probe.graph)),
        thaws=thaws(model, recipe.optimizer, quantities),
    )
    ready.order()  # refuses classes that are not there before long work
    session = assemble(ready, choose_plan(ready, rivals, say) if plan is None else ChosenPlan(plan))
    if why := session.reason_not_recorded:
        session.notes.append(f"updates are not recorded as CUDA graphs: {why}")
    return session


def check_best(task: Task, name: str) -> None:
    """Refuse a metric that a task does not have, or never a value of, such as top-5 of five classes."""
    has = {*task.evaluation().metrics(), *(metric.name for metric in task.own_metrics)}
    if task.metric(name).name not in has:
        raise ConvoyError(
            f"{task.name} of {len(task.classes)} classes has no {metric_name(name)}: best={name} can be "
            f"{', '.join(metric.name for metric in task.all_metrics if metric.name in has)}"
        )


def parts_of(recipe: Recipe, plan: Plan | None, num_devices: int) -> tuple[int, int]:
    """Into how many parts a batch has to be divided, and how many are of use where they go through stages."""
    if plan is None:
        return num_devices, num_devices
    if plan.num_stages == 1:
        return plan.parts, plan.parts
    return plan.parts, plan.parts * min(PARTS_PER_STAGE * plan.num_stages, max(1, recipe.batch // plan.parts))


def check_devices(recipe: Recipe, num_devices: int) -> None:
    """Refuse devices and shares that the plan or the batch cannot have: another number of devices, too few
    microbatches, or not as many shares as parts of the batch.

    Into how many parts `owt`, and plans of several patterns, divide a batch depends on the network's layers: these are
    refused when it is there.
    """
    plan, _ = plan_of(recipe.parallel, num_devices)
    shares = recipe.parallel.shares if isinstance(recipe.parallel.shares, tuple) else None
    if plan is None:
        check_shares(shares, num_devices)
    elif plan.parts > 1 and all(pattern == "*" and "owt" not in rows.values() for pattern, rows in plan.layers):
        sizes = microbatch_sizes(recipe.batch, num_microbatches(recipe))
        if len(sizes) < plan.parts <= recipe.batch:
            model = on_meta(recipe)
            if model is None:  # what it is made of is seen when it is there
                return
            sizes, _ = divisible_sizes(recipe, model, plan.parts)
        divide(sizes, plan.parts, shares)
