"""Trains a network by its recipe: the session, its steps and passes, the loop, evaluations and checkpoints."""

from typing import TYPE_CHECKING

from convoy.late import lazily

if TYPE_CHECKING:
    from convoy.training.environment import choose_device as choose_device
    from convoy.training.session import Session as Session
    from convoy.training.trainer import Outcome as Outcome
    from convoy.training.trainer import Trainer as Trainer

__getattr__ = lazily(__name__, {"environment": "choose_device", "session": "Session", "trainer": "Outcome Trainer"})
