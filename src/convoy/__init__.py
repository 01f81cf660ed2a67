"""Convoy: train convolutional networks on one to many devices, with the same result on every one of them."""

from typing import TYPE_CHECKING, Any

from convoy.version import __version__ as __version__

if TYPE_CHECKING:
    from convoy.engine.class_parallel import cross_entropy
    from convoy.engine.explain import explain
    from convoy.engine.parallelize import (
        accumulate,
        clip_grad_norm_,
        gradients,
        load_state_dict,
        local_samples,
        parallelize,
        state_dict,
    )
    from convoy.planning.interface import plan
    from convoy.plans import Mesh, Plan

__all__ = [
    "Mesh",
    "Plan",
    "accumulate",
    "clip_grad_norm_",
    "cross_entropy",
    "explain",
    "gradients",
    "load_state_dict",
    "local_samples",
    "parallelize",
    "plan",
    "state_dict",
]


def __getattr__(name: str) -> Any:
    """Import the engine, and torch with it, when it is first used: `convoy --help` needs neither."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "plan":
        from convoy.planning import interface

        return interface.plan
    from convoy import engine, plans
    from convoy.engine.parallelize import gradients

    if name == "gradients":  # `convoy.engine.gradients` is a package
        return gradients
    return getattr(plans if name in ("Mesh", "Plan") else engine, name)
