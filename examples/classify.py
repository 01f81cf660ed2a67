"""A training loop of one's own under any plan, on any number of devices:

    torchrun --nproc-per-node 2 -- examples/classify.py --plan sample=2
    torchrun --nproc-per-node 4 -- examples/classify.py --plan sample=2,filter=2 --resume runs/digits/epoch-2

classify_plain.py is the same loop without Convoy: `diff examples/classify_plain.py examples/classify.py`.
"""

import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import convoy
from digits import data, network, options

chosen = options()
torch.manual_seed(0)
device = (
    torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
)
dtype = getattr(torch, chosen.dtype)
autocast = torch.autocast(device.type, torch.bfloat16, enabled=chosen.bf16)
train, test = data(chosen.synthetic, dtype)

net = network().to(device, dtype)
net = convoy.parallelize(net, chosen.plan, example=train.tensors[0][:2].to(device))
sampler = convoy.BatchSampler(
    net, len(train), chosen.batch // chosen.accumulate, shuffle=not chosen.in_order, drop_last=True
)
loader = DataLoader(train, batch_sampler=sampler)
test_loader = DataLoader(test, batch_sampler=convoy.BatchSampler(net, len(test), 200))

updates = chosen.epochs * (len(loader) // chosen.accumulate)
optimizer = torch.optim.SGD(net.parameters(), lr=chosen.lr, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates)
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.99))
first_epoch = 0
if chosen.resume:
    saved = convoy.load(chosen.resume, net, optimizer, scheduler=scheduler, ema=ema)
    first_epoch = saved["epoch"]


def is_right(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return outputs.argmax(1) == labels


for epoch in range(first_epoch, chosen.epochs):
    sampler.set_epoch(epoch)
    losses = []
    for number, (images, labels) in enumerate(loader, 1):
        images, labels = images.to(device), labels.to(device)
        updating = number % chosen.accumulate == 0
        with autocast:
            loss = convoy.global_mean(net, F.cross_entropy(net(images), labels, reduction="none"))
        with nullcontext() if updating else convoy.accumulate(net):
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
        accuracy = convoy.evaluate(net, test_loader, is_right)
        ema_accuracy = convoy.evaluate(ema.module, test_loader, is_right)
    mean = torch.stack(losses).mean().item()
    convoy.print(f"epoch {epoch + 1}: loss {mean:.4f}, test {accuracy:.2%}, averaged weights {ema_accuracy:.2%}")
    convoy.save(f"{chosen.out}/epoch-{epoch + 1}", net, optimizer, scheduler=scheduler, ema=ema, epoch=epoch + 1)

weights = convoy.state_dict(net), convoy.state_dict(ema.module)
if convoy.rank() == 0:
    torch.save(weights, Path(chosen.out) / "weights.pt")
