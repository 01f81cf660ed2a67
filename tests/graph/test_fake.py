import torch

from convoy.graph.fake import Fakes, FakeTensor, storage


def test_the_private_module_still_does_what_the_capture_needs() -> None:
    fakes = Fakes()
    with fakes:
        made = torch.empty(2, 3) + torch.ones(3)
        assert isinstance(made, FakeTensor)
        assert made.shape == (2, 3)
        assert storage(made.view(6)) == storage(made)
        assert storage(made + 1) != storage(made)
        with fakes.real():
            assert torch.arange(3).tolist() == [0, 1, 2]
        assert fakes.draws == 0
        torch.nn.functional.dropout(made, 0.5)
        assert fakes.draws > 0
        before = fakes.draws
        torch.nn.functional.scaled_dot_product_attention(made, made, made)
        assert fakes.draws == before
        torch.nn.functional.scaled_dot_product_attention(made, made, made, dropout_p=0.5)
        assert fakes.draws > before
    assert not isinstance(torch.ones(1), FakeTensor)
