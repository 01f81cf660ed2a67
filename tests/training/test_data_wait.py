"""The share of the time in which a run waited for data does not count the start of what loads them."""

from types import SimpleNamespace

import pytest
import torch

from convoy.comm.ranks import Ranks
from convoy.progress import Reporter
from convoy.training.log import Log, MetricsWindow
from convoy.training.summary import RunProgress


def test_the_first_update_is_no_wait_for_data() -> None:
    quantities = SimpleNamespace(schedule=SimpleNamespace(lr=lambda update: 0.1), total_updates=20)
    session = SimpleNamespace(ranks=Ranks(), quantities=quantities, device=torch.device("cpu"), division=None)
    progress = RunProgress()
    log = Log(session, progress, None, Reporter(), lambda sentence: None)  # type: ignore[arg-type]
    log._place = lambda *_: ""  # type: ignore[method-assign]
    for done, seconds, wait_s in ((1, 10.0, 9.0), (11, 4.0, 1.0)):
        window = MetricsWindow(before_s=seconds, data_wait_s=wait_s)
        window.pause()
        log.train(done, window)
    assert progress.data_wait_s == 1.0
    assert progress.train_s - progress.start_s == pytest.approx(4.0, abs=0.1)
