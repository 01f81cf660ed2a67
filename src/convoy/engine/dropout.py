"""Dropout whose mask is a function of (seed, step, layer, sample)."""

from torch import Tensor, nn

from convoy.errors import ConvoyError
from convoy.ops.context import StepContext
from convoy.ops.random import drop
from convoy.ops.random_bits import layer_key, random_bits

DROPOUT_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class SampleDropout(nn.Module):
    """Drop elements, or whole channels, of each sample by its own random key (Srivastava et al., 2014).

    The same sample loses the same elements on whatever device, in whatever batch and order it is computed. Without an
    announced step (`StepContext.enter`) it refuses to run in training mode rather than draw from a hidden state.
    """

    def __init__(self, name: str, p: float, channels: bool, context: StepContext) -> None:
        super().__init__()
        self.p = p
        self.channels = channels
        self.name = name
        self.key = layer_key(name)
        self.context = context
        context.draws = True

    def forward(self, x: Tensor) -> Tensor:
        """Input and output: [samples, ...]; channel dropout takes dim 1 for the channels."""
        if not self.training or self.p == 0.0:
            return x
        keys = self.context.keys
        if len(keys) != len(x):
            raise folded(f"the dropout layer {self.name}", len(x), len(keys))
        shape = x.shape[:2] if self.channels else x.shape
        bits = random_bits(keys, self.key, shape[1:].numel())
        return drop(x, bits.view(*shape, *[1] * (x.dim() - len(shape))), self.p)

    def extra_repr(self) -> str:
        """The probability, as `nn.Dropout` prints it."""
        return f"p={self.p}"


def folded(layer: str, seen: int, samples: int) -> ConvoyError:
    """A dropout that cannot tell the samples apart."""
    return ConvoyError(
        f"{layer} sees {seen} samples of a batch of {samples}: the network folds something into the batch, so its "
        "masks cannot follow the samples; remove that dropout"
    )


def replace_dropout(model: nn.Module, context: StepContext) -> None:
    """Replace every `nn.Dropout`, `Dropout1d`, `Dropout2d` and `Dropout3d` of the model, in place."""
    for name, module in list(model.named_modules()):
        if type(module) in DROPOUT_LAYERS:
            assert isinstance(module, nn.modules.dropout._DropoutNd)
            replacement = SampleDropout(name, module.p, type(module) is not nn.Dropout, context)
            model.set_submodule(name, replacement.train(module.training))
