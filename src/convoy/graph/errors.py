"""Why a network could not be captured."""


class CaptureError(Exception):
    """The network does something in its forward pass that a graph cannot say.

    Attributes:
        reason: what it does, without the layer.
        layer: qualified name of the innermost module that does it; empty for the network itself.
    """

    def __init__(self, reason: str, layer: str = "") -> None:
        self.reason = reason
        self.layer = layer
        super().__init__(f"layer {layer}: {reason}" if layer else reason)
