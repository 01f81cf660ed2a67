"""The loss over one or several heads."""

import pytest
import torch
import torch.nn.functional as F

from convoy.errors import ConvoyError
from convoy.training.loss import ClassificationLoss, heads, num_correct

LOGITS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
AUX = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
LABELS = torch.tensor([0, 1, 2, 3, 0, 1])


def test_auxiliary_heads_count_with_their_weight() -> None:
    loss = ClassificationLoss(aux_weight=0.3)((LOGITS, AUX, AUX), LABELS)
    assert torch.allclose(loss, F.cross_entropy(LOGITS, LABELS) + 0.6 * F.cross_entropy(AUX, LABELS))


def test_a_head_that_is_off_is_left_out() -> None:
    assert torch.equal(ClassificationLoss()((LOGITS, None, None), LABELS), F.cross_entropy(LOGITS, LABELS))


def test_label_smoothing_is_a_mix_with_the_uniform_distribution() -> None:
    soft = 0.9 * F.one_hot(LABELS, 4).float() + 0.1 / 4
    assert torch.allclose(ClassificationLoss(0.1)(LOGITS, LABELS), F.cross_entropy(LOGITS, soft))


def test_right_answers_of_labels_and_of_mixed_targets() -> None:
    right = int((LOGITS.argmax(1) == LABELS).sum())
    assert num_correct((LOGITS, AUX), LABELS) == right
    assert num_correct(LOGITS, F.one_hot(LABELS, 4).float() * 0.7 + 0.05) == right


@pytest.mark.parametrize("outputs", [torch.zeros(2, 3, 4, 4), None, ()])
def test_what_is_no_classifier_is_refused(outputs: object) -> None:
    with pytest.raises(ConvoyError, match="logits"):
        heads(outputs)
