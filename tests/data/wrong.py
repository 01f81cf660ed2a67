"""Cases of data sets that are missing or damaged, and what their refusals have in common."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from convoy.data import DataConfig, open_data
from convoy.errors import ConvoyError

Make = Callable[[Path], Path | None]


class Cases(list):
    """Cases to parametrize a test by; as a decorator it takes up a function that makes a data set.

    The function may return another path than it is given; `message` must be in the sentence.
    """

    def __call__(self, message: str, **options: Any) -> Callable[[Make], Make]:
        def register(make: Make) -> Make:
            self.append(pytest.param(make, message, options, id=make.__name__))
            return make

        return register


def check_refusal(folder: Path, make: Make, message: str, options: dict[str, Any]) -> None:
    """The data set is refused in one sentence, and nothing is written."""
    root = folder / "set"
    root.mkdir()
    path = make(root) or root
    before = sorted(folder.rglob("*"))
    with pytest.raises(ConvoyError) as error:
        open_data(DataConfig(path=str(path), **options))
    sentence = str(error.value)
    assert re.search(message, sentence), sentence
    assert len(sentence) < 400 and sentence.isprintable()
    assert sorted(folder.rglob("*")) == before
