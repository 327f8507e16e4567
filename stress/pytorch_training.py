#!/usr/bin/env python3
"""Training under PyTorch: what an allocator holds, how fast it is, and whether the result is the same over each.

resnet is a ResNet-50 on random images, of a few resolutions in turn; llama a small decoder on random tokens, of a few
lengths in turn, with gradients that are accumulated and AdamW. Both in bfloat16 autocast, with deterministic
algorithms. One process trains one model over one allocator:

  native      PyTorch's caching allocator            expandable  the same with expandable segments
  async       its cudaMallocAsync back end           vpmm        the library behind CUDAPluggableAllocator (--shim)
  vpmm_torch  the library as a back end of PyTorch's own (lib/torch, installed or on PYTHONPATH)

It prints held and in use, each its highest since the process began, in GiB, their ratio, samples a second after the
first tenth of the steps, and a digest of the weights at the end, which is the same over every allocator. Exit status 0:
the losses were finite.
"""
import argparse
import hashlib
import json
import math
import os
import sys
import time

from pytorch_server import ALLOCATORS, GIB, with_allocator


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["resnet", "llama"], default="resnet", help="see above (default resnet)")
    parser.add_argument("--allocator", choices=ALLOCATORS, default="vpmm_torch", help="see above (default vpmm_torch)")
    parser.add_argument("--shim", default="build/libvpmm_pytorch_shim.so",
                        help="the built shim, for vpmm (default build/libvpmm_pytorch_shim.so)")
    parser.add_argument("--steps", type=int, default=60, help="of the optimizer (default 60)")
    parser.add_argument("--batch", type=int, default=0, help="samples a step (default 64 images, 8 sequences)")
    parser.add_argument("--seed", type=int, default=1, help="of weights and samples (default 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the line")
    return parser.parse_args()


def resnet(torch):
    """ResNet-50, as its paper has it (He and others, 2015)."""
    nn = torch.nn

    class Bottleneck(nn.Module):
        def __init__(self, inner, width, stride):
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
                nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width))
            self.past = nn.Identity() if stride == 1 and inner == 4 * width else nn.Sequential(
                nn.Conv2d(inner, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

        def forward(self, x):
            return torch.relu(self.body(x) + self.past(x))

    class Mean(nn.Module):
        def forward(self, x):
            return x.mean((2, 3))

    layers, inner = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(blocks):
            layers.append(Bottleneck(inner, width, 2 if i == 0 and width > 64 else 1))
            inner = 4 * width
    return nn.Sequential(*layers, Mean(), nn.Linear(inner, 1000))


def llama(torch, width=1024, layers=12, vocabulary=8192):
    """Decoder blocks with RMS norm and a gated feed-forward part, and causal attention by sixteen heads."""
    nn, f, heads = torch.nn, torch.nn.functional, 16

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.up, self.gate = (nn.Linear(width, width * 8 // 3, bias=False) for _ in range(2))
            self.down = nn.Linear(width * 8 // 3, width, bias=False)

        def forward(self, x):
            batch, length, _ = x.shape
            q, k, v = self.qkv(self.first(x)).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            seen = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(width // heads) + causal(length), -1) @ v
            x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
            y = self.second(x)
            return x + self.down(f.silu(self.gate(y)) * self.up(y))

    def causal(length):
        return torch.full((length, length), -torch.inf, device="cuda", dtype=torch.bfloat16).triu(1)

    return nn.Sequential(nn.Embedding(vocabulary, width), *[Block() for _ in range(layers)], nn.RMSNorm(width),
                         nn.Linear(width, vocabulary, bias=False))


def batch_of(torch, args, step):
    """Samples and what is to be said of them."""
    if args.model == "resnet":
        side = (224, 192, 160)[step % 3]
        images = torch.randn(args.batch, 3, side, side, device="cuda")
        return images, torch.randint(0, 1000, (args.batch,), device="cuda")
    length = (1024, 640, 896, 512)[step % 4]
    tokens = torch.randint(0, 8192, (args.batch, length + 1), device="cuda")
    return tokens[:, :-1], tokens[:, 1:].reshape(-1)


def train(torch, args):
    """Seconds after the first tenth of the steps, the last loss, and a digest of the weights."""
    torch.manual_seed(args.seed)
    model = {"resnet": resnet, "llama": llama}[args.model](torch).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(args.steps):
        if step == args.steps // 10:
            torch.cuda.synchronize()
            began = time.monotonic()
        for part in range(2 if args.model == "llama" else 1):
            samples, expected = batch_of(torch, args, step + part)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out = model(samples)
            loss = torch.nn.functional.cross_entropy(out.float().reshape(-1, out.shape[-1]), expected)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    last = loss.item()
    seconds = time.monotonic() - began
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return seconds, last, digest.hexdigest()[:16]


def main():
    args = options()
    args.batch = args.batch or (64 if args.model == "resnet" else 8)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch, peaks = with_allocator(args)
    torch.use_deterministic_algorithms(True)
    seconds, loss, digest = train(torch, args)
    held, in_use = peaks.end()
    samples = args.batch * (args.steps - args.steps // 10) * (2 if args.model == "llama" else 1)
    result = {"model": args.model, "allocator": args.allocator, "held_gib": round(held / GIB, 2),
              "in_use_gib": round(in_use / GIB, 2), "ratio": round(held / in_use, 3),
              "samples_per_s": round(samples / seconds, 1), "loss": round(loss, 4), "digest": digest}
    print(json.dumps(result) if args.json else
          "{model:<6} {allocator:<10}: held {held_gib} GiB, in use {in_use_gib}, ratio {ratio}, "
          "{samples_per_s} samples/s, loss {loss}, weights {digest}".format(**result), flush=True)
    sys.stdout.flush()
    os._exit(0 if math.isfinite(loss) else 1)  # as pytorch_server.py


if __name__ == "__main__":
    main()
