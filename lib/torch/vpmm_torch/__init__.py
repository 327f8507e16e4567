"""PyTorch's CUDA memory from vpmm.

    import vpmm_torch
    vpmm_torch.enable()          # before the first CUDA tensor

or VPMM_TORCH=1 in the environment of an unchanged script. The pools are configured by vpmm's VPMM_* variables.
"""
import ctypes
import os
import warnings

_library = None
_is_enabled = False


def enable():
    """Takes the place of PyTorch's allocator.

    RuntimeError: that holds CUDA memory already, or is not the caching one, or vpmm_torch was installed for another
    PyTorch.
    """
    global _library, _is_enabled
    path = _path()
    _leave_registered_segments_alone()
    if _library is None:
        library = ctypes.CDLL(path)
        for function in (library.vpmm_torch_enable, library.vpmm_torch_park, library.vpmm_torch_wake):
            function.restype = ctypes.c_char_p
        library.vpmm_torch_park.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_bool]
        library.vpmm_torch_wake.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
        _library = library  # whole: another thread may enable it meanwhile
    _raise(_library.vpmm_torch_enable())
    _is_enabled = True


def park(pool, keep=False):
    """Gives the GPU memory of a pool back to the device, and keeps its tensors at their addresses.

    pool: a torch.cuda.MemPool, or what torch.cuda.graph_pool_handle() or CUDAGraph.pool() gives.
    keep: what the pool's tensors hold is copied to the host, in pinned memory, and back by wake; else it is lost. That
    memory is the pool's for its next park, which is many times as quick, until torch.cuda.empty_cache().
    Until wake nothing may use the tensors and no graph of the pool may be replayed; they may be deleted, and none is
    made in the pool (RuntimeError). Waits for the device. With keep no graph is captured meanwhile.
    RuntimeError: the pool is not known, or has another allocator, or memory of it was given to a request from outside
    (use_on_oom), or the driver refuses: the text says what is so then.
    """
    _raise(_enabled().vpmm_torch_park(*_id_of(pool), keep))


def wake(pool):
    """Makes the memory of a parked pool anew, at the same addresses; a pool that is not parked is as it was.

    Where memory is short it waits, as a request does, for what is freed and still in use.

    torch.OutOfMemoryError: the device has not as much now, also after the other pools' free memory has been given
    back. RuntimeError: the driver refuses. The pool is parked as before.
    """
    _raise(_enabled().vpmm_torch_wake(*_id_of(pool)))


def _path():
    """Of the library. It is for one PyTorch: in the next one an allocator has other functions, in another order."""
    import torch  # its libraries first: ours is linked against them

    try:
        from .built_for import TORCH
    except ImportError:
        raise RuntimeError("vpmm_torch is not built here: pip install --no-build-isolation ./lib/torch") from None
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version != TORCH:
        raise RuntimeError(f"vpmm_torch was built for PyTorch {TORCH[0]}.{TORCH[1]}, and this is {torch.__version__}: "
                           "install it again (pip install --force-reinstall --no-build-isolation ./lib/torch)")
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "libvpmm_torch.so")


def _leave_registered_segments_alone():
    """NCCL would register segments, and not hear of what is mapped there later. PyTorch reads this when NCCL begins."""
    name = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"
    if os.environ.get(name, "0").lower() not in ("0", "n", "no", "f", "false"):
        os.environ[name] = "0"
        warnings.warn(f"{name} is set to 0: vpmm maps other memory where segments were, as expandable segments do")


def _id_of(pool):
    return getattr(pool, "id", pool)


def _enabled():
    if not _is_enabled:
        raise RuntimeError("vpmm_torch is not enabled")
    return _library


def _raise(refusal):
    if not refusal:
        return
    text = refusal.decode(errors="replace")
    if text.startswith("CUDA out of memory"):
        import torch

        raise torch.OutOfMemoryError(text)
    raise RuntimeError(text)


def pluggable():
    """A torch.cuda.memory.CUDAPluggableAllocator over a vpmm pool of its own, for one MemPool beside PyTorch's own
    allocator: MemPool(pluggable().allocator()). Not for what is captured, nor for requests that name another stream
    than the current one, of which PyTorch does not tell such an allocator."""
    import torch

    return torch.cuda.memory.CUDAPluggableAllocator(_path(), "vpmm_torch_malloc", "vpmm_torch_free")


def enable_if_asked():
    """What PyTorch calls at the end of its own import (the entry point torch.backends)."""
    asked = os.environ.get("VPMM_TORCH", "").lower()
    if asked in ("1", "on", "yes", "true"):
        enable()
    elif asked not in ("", "0", "off", "no", "false"):
        raise RuntimeError(f'VPMM_TORCH is "{asked}"; allowed: on, yes, true or 1, or off, no, false or 0')
