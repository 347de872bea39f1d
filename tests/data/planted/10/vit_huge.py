import argparse
import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, transforms as T
from torchvision.models.vision_transformer import EncoderBlock, vit_h_14


def policy_for(name):
    if name == "size":
        return functools.partial(size_based_auto_wrap_policy, min_num_params=50_000_000)
    return transformer_auto_wrap_policy


def build(args, local):
    model = vit_h_14(weights=None, image_size=224, num_classes=1000)
    bf16 = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    sharded = FSDP(
        model,
        auto_wrap_policy=policy_for(args.wrap),
        mixed_precision=bf16,
        device_id=local,
        sync_module_states=True,
        use_orig_params=True,
    )
    if args.ckpt_blocks:
        wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        apply_activation_checkpointing(
            sharded, checkpoint_wrapper_fn=wrapper, check_fn=lambda m: isinstance(m, EncoderBlock)
        )
    return sharded


def data(root, bs):
    tf = T.Compose([
        T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor(),
        T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ])
    ds = datasets.ImageFolder(os.path.join(root, "train"), tf)
    sampler = DistributedSampler(ds)
    return sampler, DataLoader(ds, bs, sampler=sampler, num_workers=12, pin_memory=True, drop_last=True)


def dump(model, name):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, True)):
        sd = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(sd, name)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("root")
    ap.add_argument("--wrap", choices=["block", "size"], default="block")
    ap.add_argument("--bs", type=int, default=64)
    ap.add_argument("--epochs", type=int, default=90)
    ap.add_argument("--lr", type=float, default=3e-4)
    ap.add_argument("--ckpt-blocks", action="store_true")
    args = ap.parse_args()

    dist.init_process_group(backend="nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    torch.manual_seed(0)

    model = build(args, local)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.epochs)
    sampler, loader = data(args.root, args.bs)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            loss = F.cross_entropy(model(x).float(), y, label_smoothing=0.1)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            model.clip_grad_norm_(1.0)
            opt.step()
            if i % 100 == 0 and dist.get_rank() == 0:
                print(epoch, i, f"{loss.item():.3f}", flush=True)
        sched.step()
        if epoch % 10 == 9:
            dump(model, f"vit_h_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
