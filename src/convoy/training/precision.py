"""Whether a device can train in a precision: tried out, not looked up."""

import torch
import torch.nn.functional as F

from convoy.errors import ConvoyError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(precision: str, device: torch.device) -> None:
    """Run one small convolution and matrix product forwards and backwards as the training would.

    Raises:
        ConvoyError: torch cannot do that on this device; the sentence says what to choose.
    """
    if precision == "fp32":
        return
    images = torch.ones(2, 8, 8, 8, device=device)
    weight = torch.full((8, 8, 3, 3), 0.01, device=device, requires_grad=True)
    matrix = torch.full((8, 8), 0.01, device=device, requires_grad=True)
    try:
        with torch.autocast(device.type, DTYPES[precision]):
            loss = F.linear(F.conv2d(images, weight, padding=1).mean((2, 3)), matrix).float().sum()
        loss.backward()
        works = all(p.grad is not None and bool(p.grad.isfinite().all()) for p in (weight, matrix))
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConvoyError(_refusal(precision, device, reason)) from error
    if not works:
        raise ConvoyError(_refusal(precision, device, "gradients are not finite"))


def _refusal(precision: str, device: torch.device, reason: str) -> str:
    other = "bf16 or fp32" if precision == "fp16" else "fp32"
    return f"precision={precision} does not train on {device} here ({reason}): choose {other}"
