"""Two models with an optimizer each train against each other, and resume together.

flyte-ddp run --nproc-per-node 2 examples/scripts/adversarial.py
torchrun --nproc-per-node 2 examples/scripts/adversarial.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from flyte_ddp import session

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(3 + torch.randn(256, 2), torch.zeros(256))
generator, critic = nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
ours = [DistributedDataParallel(generator), DistributedDataParallel(critic)]
optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in ours]
parts, step = [generator, critic, *optimizers], 0
state = session.load()  # None in a new run
if state:
    step = state["step"]
    for part, saved in zip(parts, state["parts"], strict=True):
        part.load_state_dict(saved)

for epoch in session.epochs(3):
    for (real, _), weight in session.batches(data, 64, epoch):
        made = ours[0](torch.randn(len(real), 4))
        scores = ours[1](torch.cat([real, made.detach()])).chunk(2)
        loss = scores[1].mean() - scores[0].mean()
        optimizers[1].zero_grad()
        (weight * loss).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (-weight * critic(made).mean()).backward()
        optimizers[0].step()
        step += 1
    session.save({"step": step, "parts": [each.state_dict() for each in parts]}, step)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.6f}")
dist.destroy_process_group()
