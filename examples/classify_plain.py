"""A plain training loop on one device:

    python examples/classify_plain.py

classify.py is the same loop with Convoy: `diff examples/classify_plain.py examples/classify.py`.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from digits import data, network, options

chosen = options()
torch.manual_seed(0)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
dtype = getattr(torch, chosen.dtype)
autocast = torch.autocast(device.type, torch.bfloat16, enabled=chosen.bf16)
train, test = data(chosen.synthetic, dtype)

net = network().to(device, dtype)
loader = DataLoader(train, chosen.batch // chosen.accumulate, shuffle=not chosen.in_order, drop_last=True)
test_loader = DataLoader(test, 200)

updates = chosen.epochs * (len(loader) // chosen.accumulate)
optimizer = torch.optim.SGD(net.parameters(), lr=chosen.lr, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.99))
parts = {"net": net, "optimizer": optimizer, "scheduler": scheduler, "ema": ema}
first_epoch = 0
if chosen.resume:
    saved = torch.load(chosen.resume)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    first_epoch = saved["epoch"]


@torch.no_grad()
def evaluate(model: torch.nn.Module) -> float:
    model.eval()
    right = sum(
        (model(images.to(device)).argmax(1) == labels.to(device)).sum().item() for images, labels in test_loader
    )
    model.train()
    return right / len(test)


for epoch in range(first_epoch, chosen.epochs):
    losses = []
    for number, (images, labels) in enumerate(loader, 1):
        images, labels = images.to(device), labels.to(device)
        updating = number % chosen.accumulate == 0
        with autocast:
            loss = F.cross_entropy(net(images), labels)
        (loss / chosen.accumulate).backward()
        losses.append(loss.detach())
        if updating:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            ema.update_parameters(net)
    optimizer.zero_grad()
    with autocast:
        accuracy = evaluate(net)
        ema_accuracy = evaluate(ema.module)
    mean = torch.stack(losses).mean().item()
    print(f"epoch {epoch + 1}: loss {mean:.4f}, test {accuracy:.2%}, averaged weights {ema_accuracy:.2%}")
    Path(chosen.out).mkdir(parents=True, exist_ok=True)
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save(state | {"epoch": epoch + 1}, f"{chosen.out}/epoch-{epoch + 1}.pt")

weights = net.state_dict(), ema.module.state_dict()
torch.save(weights, Path(chosen.out) / "weights.pt")
