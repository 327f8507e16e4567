"""PyTorch's CUDA memory from vpmm.

    import vpmm_torch
    vpmm_torch.enable()          # before the first CUDA tensor

or VPMM_TORCH=1 in the environment of an unchanged script. The pools are configured by vpmm's VPMM_* variables.
"""
import ctypes
import os

_path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "libvpmm_torch.so")
_library = None


def enable():
    """Takes the place of PyTorch's allocator. RuntimeError: PyTorch has used CUDA memory already."""
    global _library
    import torch  # its libraries first: ours is linked against them

    del torch
    if _library is None:
        _library = ctypes.CDLL(_path)
        _library.vpmm_torch_enable.restype = ctypes.c_char_p
    refusal = _library.vpmm_torch_enable()
    if refusal:
        raise RuntimeError(refusal.decode())


def pluggable():
    """A torch.cuda.memory.CUDAPluggableAllocator over vpmm's default pool, for one MemPool beside PyTorch's own
    allocator: MemPool(pluggable().allocator()). Not for what is captured."""
    import torch

    return torch.cuda.memory.CUDAPluggableAllocator(_path, "vpmm_torch_malloc", "vpmm_torch_free")


def enable_if_asked():
    """What PyTorch calls at the end of its own import (the entry point torch.backends)."""
    if os.environ.get("VPMM_TORCH", "") not in ("", "0"):
        enable()
