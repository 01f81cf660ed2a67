"""What can be refused at once: before ranks are started, data are opened or a network is built."""

from convoy.engine.coupling import microbatch_sizes
from convoy.plans.plan import Plan
from convoy.training.derived import num_microbatches
from convoy.training.division import divide
from convoy.training.parallel_config import check_shares, plan_of
from convoy.training.recipe import Recipe, load_recipe
from convoy.training.resume import check_same
from convoy.training.run_directory import RunDirectory


def check_run(run: RunDirectory, recipe: Recipe, resume: bool) -> bool:
    """Whether there is a run to go on with, which this recipe may.

    Raises:
        ConvoyError: it may not, or the folder is taken or cannot be written.
    """
    if resume and run.is_run():
        check_same(recipe, load_recipe(str(run.config)), run)
        return True
    run.check_free()
    run.check_writable()
    return False


def check_devices(recipe: Recipe, num_devices: int) -> None:
    """Refuse devices and shares that the plan or the batch cannot have.

    Into how many parts `owt`, and plans of several patterns, divide a batch depends on the network's layers: these are
    refused when it is there.

    Raises:
        ConvoyError: the plan is for another number of devices, there are too few microbatches, or not as many shares
            as parts of the batch.
    """
    plan, _ = plan_of(recipe.parallel, num_devices)
    shares = recipe.parallel.shares if isinstance(recipe.parallel.shares, tuple) else None
    if plan is None:
        check_shares(shares, num_devices)
    elif plan.parts > 1 and _divides_all_layers_alike(plan):
        divide(microbatch_sizes(recipe.batch, num_microbatches(recipe)), plan.parts, shares)


def _divides_all_layers_alike(plan: Plan) -> bool:
    return all(pattern == "*" and "owt" not in given.values() for pattern, given in plan.layers)
