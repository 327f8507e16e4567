#!/usr/bin/env python3
"""A server of a small Llama under PyTorch, for what an allocator holds and how fast the server is over it.

Each worker is a thread. For each batch of requests it takes a new stream, prefills the prompts, and generates tokens
one by one, with a key-value cache that grows by concatenation, as the transformers library's does. Batches and lengths
are drawn from a seed, so that each allocator serves the same requests. The weights are random; nothing is learnt or
said. One process measures one allocator with one number of workers:

  native      PyTorch's caching allocator            expandable  the same with expandable segments
  async       its cudaMallocAsync back end           vpmm        the library behind CUDAPluggableAllocator (--shim)
  vpmm_torch  the library as a back end of PyTorch's own (lib/torch, installed or on PYTHONPATH)

It prints held and in use, each its highest since the process began, in GiB, their ratio, and tokens a second. In use
is what PyTorch asked for: max_memory_allocated, and vpmm's peak_requested_bytes. With --samples it also appends to a
CSV file what both were at their highest in each twentieth of a second, which plot_held.py draws. Exit status 0: all was
served and finite.
"""
import argparse
import ctypes
import json
import os
import random
import sys
import threading
import time

GIB = 1 << 30
SAMPLE_S = 0.05
ALLOCATORS = ["native", "expandable", "async", "vpmm", "vpmm_torch"]


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--allocator", choices=ALLOCATORS, default="vpmm",
                        help="see above (default vpmm)")
    parser.add_argument("--shim", default="build/libvpmm_pytorch_shim.so",
                        help="the built shim, for vpmm (default build/libvpmm_pytorch_shim.so)")
    parser.add_argument("--workers", type=int, default=4, help="threads (default 4)")
    parser.add_argument("--rounds", type=int, default=8, help="batches that each worker serves (default 8)")
    parser.add_argument("--layers", type=int, default=12, help="of the model (default 12)")
    parser.add_argument("--width", type=int, default=2048, help="of the model, a multiple of 512 (default 2048)")
    parser.add_argument("--seed", type=int, default=1, help="of the requests (default 1)")
    parser.add_argument("--samples", metavar="FILE", help="append: allocator,workers,seconds,held bytes,in use")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the line")
    return parser.parse_args()


class Peaks:
    """The highest held and in use, in bytes, since the process began; and sampled, if there is a file for it."""

    def __init__(self, read, reset):
        self.read, self.reset, self.highest = read, reset, (0, 0)
        self.ended, self.sampler = threading.Event(), None

    def look(self):
        now = self.read()
        self.highest = tuple(map(max, self.highest, now))
        return now

    def sample(self, file, of):
        began = time.monotonic()
        while not self.ended.wait(SAMPLE_S):
            held, in_use = self.look()
            self.reset()
            file.write(f"{of},{time.monotonic() - began:.3f},{held},{in_use}\n")
        file.close()

    def start(self, path, of):
        if path:
            self.sampler = threading.Thread(target=self.sample, args=(open(path, "a", encoding="utf-8"), of))
            self.sampler.start()

    def end(self):
        self.ended.set()
        if self.sampler:
            self.sampler.join()
        self.look()
        return self.highest


def with_allocator(args):
    """Imports torch with the allocator that is asked for; returns torch and its Peaks."""
    back_end = {"expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync"}.get(args.allocator)
    if back_end:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = back_end
    import torch
    if args.allocator == "vpmm_torch":
        import vpmm_torch
        vpmm_torch.enable()
    if args.allocator != "vpmm":
        return torch, Peaks(lambda: (torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()),
                            torch.cuda.reset_peak_memory_stats)
    path = os.path.abspath(args.shim)
    torch.cuda.memory.change_current_allocator(
        torch.cuda.memory.CUDAPluggableAllocator(path, "vpmm_pytorch_malloc", "vpmm_pytorch_free"))
    shim = ctypes.CDLL(path)
    shim.vpmm_pytorch_peak_held.restype = shim.vpmm_pytorch_peak_in_use.restype = ctypes.c_uint64
    return torch, Peaks(lambda: (shim.vpmm_pytorch_peak_held(0), shim.vpmm_pytorch_peak_in_use(0)),
                        lambda: shim.vpmm_pytorch_reset_peaks(0))


class Llama:
    """Decoder blocks with RMS norm, rotary positions, grouped heads and a gated feed-forward part, in bfloat16."""

    def __init__(self, torch, layers, width, vocabulary=32000):
        self.torch, self.width, self.heads, self.head = torch, width, width // 128, 128

        def weight(*shape):
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02

        inner = width * 11 // 4
        self.embedding = weight(vocabulary, width)
        self.layers = [{"qkv": weight(3 * width, width), "out": weight(width, width), "up": weight(inner, width),
                        "gate": weight(inner, width), "down": weight(width, inner)} for _ in range(layers)]

    def norm(self, x):
        y = x.float()
        return (y * self.torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

    def rotate(self, x, first):
        torch, half = self.torch, self.head // 2
        at = torch.arange(first, first + x.shape[2], device="cuda", dtype=torch.float32)
        angle = at[:, None] * (10000.0 ** (-torch.arange(half, device="cuda", dtype=torch.float32) / half))
        cos, sin, (a, b) = angle.cos(), angle.sin(), x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)

    def block(self, layer, x, cache, first):
        torch, f = self.torch, self.torch.nn.functional
        batch, length, _ = x.shape
        q, k, v = f.linear(self.norm(x), layer["qkv"]).view(batch, length, 3, self.heads, self.head).permute(
            2, 0, 3, 1, 4)
        q, k = self.rotate(q, first), self.rotate(k, first)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        seen = f.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        x = x + f.linear(seen.transpose(1, 2).reshape(batch, length, self.width), layer["out"])
        y = self.norm(x)
        return x + f.linear(f.silu(f.linear(y, layer["gate"])) * f.linear(y, layer["up"]), layer["down"]), (k, v)

    def step(self, tokens, caches, first):
        """The next token of each request, and the caches with what the step has added."""
        x = self.embedding[tokens]
        for i, layer in enumerate(self.layers):
            x, caches[i] = self.block(layer, x, caches[i], first)
        return self.torch.nn.functional.linear(self.norm(x), self.embedding)[:, -1].float().argmax(-1, keepdim=True)

    def serve(self, batch, prompt, new_tokens):
        torch, caches = self.torch, [None] * len(self.layers)
        tokens = self.step(torch.randint(0, 32000, (batch, prompt), device="cuda"), caches, 0)
        for i in range(new_tokens - 1):
            tokens = self.step(tokens, caches, prompt + i)
        return bool(torch.isfinite(caches[-1][0]).all())


def worker(torch, model, rounds, seed, account):
    draw = random.Random(seed)
    with torch.no_grad():
        for _ in range(rounds):
            batch, prompt, new = draw.choice([1, 2, 4, 8, 16]), draw.randint(64, 1024), draw.randint(16, 48)
            with torch.cuda.stream(torch.cuda.Stream()):
                fine = model.serve(batch, prompt, new)
            account.append((batch * new, fine))


def main():
    args = options()
    torch, peaks = with_allocator(args)
    torch.manual_seed(args.seed)
    model = Llama(torch, args.layers, args.width)
    model.serve(1, 64, 2)  # libraries load, before the clock starts
    torch.cuda.synchronize()
    account = []
    threads = [threading.Thread(target=worker, args=(torch, model, args.rounds, args.seed * 1000 + i, account))
               for i in range(args.workers)]
    peaks.start(args.samples, f"{args.allocator},{args.workers}")
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    seconds = time.monotonic() - began
    held, in_use = peaks.end()
    result = {"allocator": args.allocator, "workers": args.workers, "held_gib": round(held / GIB, 2),
              "in_use_gib": round(in_use / GIB, 2), "ratio": round(held / in_use, 3),
              "tokens_per_s": round(sum(tokens for tokens, _ in account) / seconds, 1), "seconds": round(seconds, 1)}
    print(json.dumps(result) if args.json else
          "{allocator:<10} workers {workers}: held {held_gib} GiB, in use {in_use_gib}, ratio {ratio}, "
          "{tokens_per_s} tokens/s, {seconds} s".format(**result), flush=True)
    served = len(account) == args.workers * args.rounds and all(fine for _, fine in account)
    sys.stdout.flush()
    os._exit(0 if served else 1)  # the pluggable allocator cannot be taken away before the interpreter ends


if __name__ == "__main__":
    main()
