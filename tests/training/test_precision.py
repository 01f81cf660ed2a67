import pytest
import torch
import torch.nn.functional as F

from convoy.errors import ConvoyError
from convoy.training.precision import check_precision

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_every_cpu_does(precision: str) -> None:
    check_precision(precision, CPU)


def test_what_torch_cannot_do_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> torch.Tensor:
        raise RuntimeError("no kernel for Half\n[C++ lines]")

    monkeypatch.setattr(F, "conv2d", refuse)
    with pytest.raises(ConvoyError) as caught:
        check_precision("fp16", CPU)
    assert str(caught.value) == "precision=fp16 does not train on cpu here (no kernel for Half): choose bf16 or fp32"


def test_gradients_that_are_not_finite_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w: linear(x, w) * float("inf"))
    with pytest.raises(ConvoyError, match="gradients are not finite"):
        check_precision("bf16", CPU)
