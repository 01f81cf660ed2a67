"""Segmentation by a U-Net with cross-entropy and Dice loss, under any plan, on any number of devices:

    torchrun --nproc-per-node 2 -- examples/segment.py --plan sample=2
    torchrun --nproc-per-node 2 -- examples/segment.py --plan height=2

segment_plain.py is the same loop without Convoy: `diff examples/segment_plain.py examples/segment.py`.
"""

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import convoy
from shapes import UNet, data, options

chosen = options()
torch.manual_seed(0)
device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
dtype = getattr(torch, chosen.dtype)
train, test = data(chosen.samples, dtype)

net = UNet().to(device, dtype)
net = convoy.parallelize(net, chosen.plan, example=train.tensors[0][:2].to(device))
loader = DataLoader(train, batch_sampler=convoy.BatchSampler(net, len(train), chosen.batch))
test_loader = DataLoader(test, batch_sampler=convoy.BatchSampler(net, len(test), 40))
optimizer = torch.optim.AdamW(net.parameters(), lr=chosen.lr)


def overlap(logits: torch.Tensor, masks: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of every sample, the pixels of the intersection and of the union of predicted and true masks."""
    found, masks = logits.flatten(1) > 0, masks.flatten(1) > 0
    return {"both": (found & masks).sum(1), "either": (found | masks).sum(1)}


for epoch in range(chosen.epochs):
    losses = []
    for images, masks in loader:
        images, masks = images.to(device), masks.to(device)
        logits = net(images)
        chance = logits.sigmoid()
        dice = convoy.global_mean(net, 2 * chance * masks, chance + masks)
        entropy = F.binary_cross_entropy_with_logits(logits, masks, reduction="none")
        loss = convoy.global_mean(net, entropy) + 1 - dice
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    mean = convoy.evaluate(net, test_loader, overlap)
    iou = mean["both"] / mean["either"]
    convoy.print(f"epoch {epoch + 1}: loss {torch.stack(losses).mean().item():.4f}, test IoU {iou:.2%}")

weights = convoy.state_dict(net)
if convoy.rank() == 0:
    Path(chosen.out).mkdir(parents=True, exist_ok=True)
    torch.save(weights, Path(chosen.out) / "weights.pt")
