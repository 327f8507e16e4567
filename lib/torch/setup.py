"""Builds libvpmm_torch.so against the installed PyTorch:  pip install --no-build-isolation ./lib/torch

VPMM_LIBRARY  a libvpmm.a that is built already; without it the one of this repository is built by CMake

A libvpmm_exporter.a beside it is linked too: then VPMM_TORCH_METRICS serves metrics. CMake builds one where
libmicrohttpd, GnuTLS, zlib and libcrypt are found.
"""
import os
import pathlib
import subprocess
import tempfile

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
OLDEST = (2, 8)  # see src/compat.h
OLDEST_OF_CXX20 = (2, 13)  # whose headers want it


def build_vpmm(folder, cuda_home):
    built = os.environ.get("VPMM_LIBRARY")
    if built and not os.path.exists(built):
        raise SystemExit(f"VPMM_LIBRARY={built} is not there, seen from {os.getcwd()}: an absolute path is meant")
    if built:
        return built
    options = ["-DCMAKE_BUILD_TYPE=Release"]
    options += [f"-DVPMM_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "STRESS", "PRELOAD")]
    if cuda_home and os.path.exists(os.path.join(cuda_home, "include", "cuda.h")):
        options.append(f"-DCUDA_INCLUDE_DIR={cuda_home}/include")
    subprocess.check_call(["cmake", "-S", str(ROOT), "-B", folder, *options])
    subprocess.check_call(["cmake", "--build", folder, "--parallel"])
    return os.path.join(folder, "libvpmm.a")


def libraries_of(vpmm):
    """What is linked of vpmm's: the library, and before it the exporter, with what that stands on, if it was built."""
    exporter = pathlib.Path(vpmm).with_name("libvpmm_exporter.a")
    if not exporter.exists():
        return [vpmm]
    return ["-DVPMM_TORCH_EXPORTER", str(exporter), vpmm, "-lmicrohttpd", "-lgnutls", "-lz", "-lcrypt"]


def build_back_end(out):
    """The version of PyTorch that it is for."""
    import torch
    from torch.utils import cpp_extension

    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST:
        raise SystemExit(f"vpmm_torch needs PyTorch {OLDEST[0]}.{OLDEST[1]} or later, and this is {torch.__version__}")
    flags = ["-std=c++20" if version >= OLDEST_OF_CXX20 else "-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden",
             f"-I{ROOT / 'include'}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    for folder in cpp_extension.include_paths(device_type="cuda"):
        flags += ["-isystem", folder]
    libraries = pathlib.Path(torch.__file__).parent / "lib"
    with tempfile.TemporaryDirectory() as folder:
        vpmm = build_vpmm(folder, cpp_extension.CUDA_HOME)
        sources = sorted(str(path) for path in (HERE / "src").glob("*.cpp"))
        subprocess.check_call([os.environ.get("CXX", "g++"), "-shared", *flags, "-o", out, *sources, *libraries_of(vpmm),
                               "-Wl,--exclude-libs,ALL", f"-L{libraries}", "-lc10", "-lc10_cuda", "-lpthread", "-ldl"])
    return version


class BuildWithLibrary(build_py):
    def run(self):
        super().run()
        package = os.path.join(self.build_lib, "vpmm_torch")
        os.makedirs(package, exist_ok=True)
        version = build_back_end(os.path.join(package, "libvpmm_torch.so"))
        with open(os.path.join(package, "built_for.py"), "w") as file:
            file.write(f'"""Written by setup.py."""\nTORCH = {version}  # what libvpmm_torch.so was built for\n')


class PlatformDistribution(Distribution):
    def has_ext_modules(self):  # the wheel is for this platform
        return True


setup(packages=["vpmm_torch"], cmdclass={"build_py": BuildWithLibrary}, distclass=PlatformDistribution)
