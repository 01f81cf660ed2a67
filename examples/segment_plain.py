"""Segmentation by a U-Net with cross-entropy and Dice loss, on one device, in plain PyTorch:

    python examples/segment_plain.py

segment.py is the same loop with Convoy: `diff examples/segment_plain.py examples/segment.py`.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from shapes import UNet, data, options

chosen = options()
torch.manual_seed(0)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
dtype = getattr(torch, chosen.dtype)
train, test = data(chosen.samples, dtype)

net = UNet().to(device, dtype)
loader = DataLoader(train, chosen.batch)
test_loader = DataLoader(test, 40)
optimizer = torch.optim.AdamW(net.parameters(), lr=chosen.lr)


@torch.no_grad()
def evaluate() -> float:
    """Intersection over union of the predicted and the true masks."""
    net.eval()
    both, either = 0.0, 0.0
    for images, masks in test_loader:
        found, masks = net(images.to(device)) > 0, masks.to(device) > 0
        both += (found & masks).sum().item()
        either += (found | masks).sum().item()
    net.train()
    return both / either


for epoch in range(chosen.epochs):
    losses = []
    for images, masks in loader:
        images, masks = images.to(device), masks.to(device)
        logits = net(images)
        chance = logits.sigmoid()
        dice = (2 * chance * masks).sum() / (chance + masks).sum()
        loss = F.binary_cross_entropy_with_logits(logits, masks) + 1 - dice
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean().item():.4f}, test IoU {evaluate():.2%}")

Path(chosen.out).mkdir(parents=True, exist_ok=True)
torch.save(net.state_dict(), Path(chosen.out) / "weights.pt")
