"""Fine-tuning on one device, in plain PyTorch: a network that knows ten digits learns to tell odd ones from even ones.

    python examples/classify_plain.py
    python examples/finetune_plain.py --out runs/parity

finetune.py is the same loop with Convoy: `diff examples/finetune_plain.py examples/finetune.py`.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from digits import data, network, options

chosen = options()
torch.manual_seed(0)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
dtype = getattr(torch, chosen.dtype)
train, test = (TensorDataset(d.tensors[0], d.tensors[1] % 2) for d in data(chosen.synthetic, dtype))

net = network().to(device, dtype)
net.load_state_dict(torch.load(chosen.weights)[0])  # classify_plain.py leaves the weights, and averages of them
net[-1] = nn.Linear(64, 2, device=device, dtype=dtype)
net[:-3].requires_grad_(False)  # the convolutions stay as they are; the two linear layers learn
loader = DataLoader(train, chosen.batch, shuffle=not chosen.in_order, drop_last=True)
test_loader = DataLoader(test, 200)
groups = [{"params": net[-1].parameters()}, {"params": net[-3].parameters(), "lr": chosen.lr / 10}]
optimizer = torch.optim.SGD(groups, lr=chosen.lr, momentum=0.9)


@torch.no_grad()
def evaluate() -> float:
    """The accuracy on the test set."""
    net.eval()
    right = sum((net(images.to(device)).argmax(1) == labels.to(device)).sum().item() for images, labels in test_loader)
    return right / len(test)


for epoch in range(chosen.epochs):
    net.train()
    net[1].eval()  # frozen batch norm keeps its running statistics
    for images, labels in loader:
        loss = F.cross_entropy(net(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch + 1}: test {evaluate():.2%}")

Path(chosen.out).mkdir(parents=True, exist_ok=True)
torch.save(net.state_dict(), Path(chosen.out) / "weights.pt")
