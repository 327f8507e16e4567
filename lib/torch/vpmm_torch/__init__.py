"""PyTorch's CUDA memory from vpmm.

    import vpmm_torch
    vpmm_torch.enable()          # before the first CUDA tensor

or VPMM_TORCH=1 in the environment of an unchanged script. The pools are configured by vpmm's VPMM_* variables.
"""
import ctypes
import os

_here = os.path.dirname(os.path.abspath(__file__))
_library = None


def library():
    """The path of the shared library, which also has vpmm_torch_malloc and vpmm_torch_free for CUDAPluggableAllocator."""
    return os.path.join(_here, "libvpmm_torch.so")


def enable():
    """Takes the place of PyTorch's allocator. RuntimeError: PyTorch has used CUDA memory already."""
    global _library
    import torch  # its libraries first: ours is linked against them

    del torch
    if _library is None:
        _library = ctypes.CDLL(library())
        _library.vpmm_torch_enable.restype = ctypes.c_char_p
    refusal = _library.vpmm_torch_enable()
    if refusal:
        raise RuntimeError(refusal.decode())


def enable_if_asked():
    """What PyTorch calls at the end of its own import (the entry point torch.backends)."""
    if os.environ.get("VPMM_TORCH", "") not in ("", "0"):
        enable()
