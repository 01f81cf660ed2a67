"""Normalization layers."""

from convoy.graph.normalize.seen import Normal, Normalizer, Seen


def _batch_norm(seen: Seen) -> Normal:
    found = seen.bound(
        input=None,
        running_mean=None,
        running_var=None,
        weight=None,
        bias=None,
        training=False,
        momentum=0.1,
        eps=1e-5,
    )
    counter = seen.updates[-1] if seen.updates and found["training"] and found["running_mean"] else None
    if counter and hasattr(seen.module, "momentum"):  # the argument is 1 / count where the layer has None
        found["momentum"] = seen.module.momentum
    return Normal("batch_norm", {**found, "num_batches_tracked": counter})


def _instance_norm(seen: Seen) -> Normal | None:
    found = seen.bound(
        input=None,
        running_mean=None,
        running_var=None,
        weight=None,
        bias=None,
        use_input_stats=True,
        momentum=0.1,
        eps=1e-5,
    )
    names = {name: found[name] for name in ("input", "weight", "bias", "eps")}
    statistics = {name: found[name] for name in ("running_mean", "running_var")}
    if not found["use_input_stats"]:
        fixed = {"training": False, "momentum": found["momentum"], "num_batches_tracked": None}
        return Normal("batch_norm", {**names, **statistics, **fixed})
    if found["running_mean"] is not None or len(seen.shape(found["input"])) < 3:
        return None
    return Normal("group_norm", {**names, "num_groups": seen.shape(found["input"])[1]})


def _group_norm(seen: Seen) -> Normal:
    return Normal("group_norm", seen.bound(input=None, num_groups=1, weight=None, bias=None, eps=1e-5))


def _layer_norm(seen: Seen) -> Normal:
    found = seen.bound(input=None, normalized_shape=None, weight=None, bias=None, eps=1e-5)
    return Normal("layer_norm", {**found, "normalized_shape": tuple(found["normalized_shape"])})


def _lrn(seen: Seen) -> Normal:
    return Normal("lrn", seen.bound(input=None, size=1, alpha=1e-4, beta=0.75, k=1.0))


NORMALIZERS: dict[str, Normalizer] = {
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "layer_norm": _layer_norm,
    "local_response_norm": _lrn,
}
