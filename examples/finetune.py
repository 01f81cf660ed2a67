"""Fine-tuning under any plan: a network that knows ten digits learns to tell odd ones from even ones.

    torchrun --nproc-per-node 2 -- examples/classify.py --plan sample=2
    torchrun --nproc-per-node 2 -- examples/finetune.py --plan sample=2 --out runs/parity

finetune_plain.py is the same loop without Convoy: `diff examples/finetune_plain.py examples/finetune.py`.
"""

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import convoy
from digits import data, network, options

chosen = options()
torch.manual_seed(0)
device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
dtype = getattr(torch, chosen.dtype)
train, test = (TensorDataset(d.tensors[0], d.tensors[1] % 2) for d in data(chosen.synthetic, dtype))

net = network().to(device, dtype)
net.load_state_dict(torch.load(chosen.weights)[0])  # classify.py leaves the weights, and averages of them
net[-1] = nn.Linear(64, 2, device=device, dtype=dtype)
net[:-3].requires_grad_(False)  # the convolutions stay as they are; the two linear layers learn
net = convoy.parallelize(net, chosen.plan, example=train.tensors[0][:2].to(device))
sampler = convoy.BatchSampler(net, len(train), chosen.batch, shuffle=not chosen.in_order, drop_last=True)
loader = DataLoader(train, batch_sampler=sampler)
test_loader = DataLoader(test, batch_sampler=convoy.BatchSampler(net, len(test), 200))
groups = [{"params": net[-1].parameters()}, {"params": net[-3].parameters(), "lr": chosen.lr / 10}]
optimizer = torch.optim.SGD(groups, lr=chosen.lr, momentum=0.9)


def is_right(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(1) == labels


for epoch in range(chosen.epochs):
    sampler.set_epoch(epoch)
    net.train()
    net[1].eval()  # frozen batch norm keeps its running statistics
    for images, labels in loader:
        loss = F.cross_entropy(net(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    convoy.print(f"epoch {epoch + 1}: test {convoy.evaluate(net, test_loader, is_right):.2%}")

weights = convoy.state_dict(net)
if convoy.rank() == 0:
    Path(chosen.out).mkdir(parents=True, exist_ok=True)
    torch.save(weights, Path(chosen.out) / "weights.pt")
