"""Trains by one process, with DataParallel where it sees several devices, as the Trainer does."""

import torch
from torch import nn

model = nn.Linear(64, 64).cuda()
if torch.cuda.device_count() > 1:
    model = nn.DataParallel(model)  # type: ignore[assignment]
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(8):
    model(torch.randn(16, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
