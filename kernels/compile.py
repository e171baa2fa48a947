"""Compile the kernels ahead of time, on any machine, and read from the machine code what the compiler made of them.

`variants` names the shapes; a shape is run on tensors of no memory, its launches are noted instead of made, and each is
compiled with the signature that a launch on a GPU would have. Needs `cuobjdump` and `nvdisasm` beside the
compiler (packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm) or on the path.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from longscan.kernels.tuning import compiling_for, spill_allowed
from longscan.kernels.variants import OPERATORS, calls

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
"""What every change of a kernel is compiled for."""
SUPPORTED = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""What the kernels are for."""
PRODUCTS = ("ssd.scan", "ssd.products", "ssd.prepare", "ssd.span_ends", "logprob.score_rows")
"""Kernels that multiply matrices."""
ALIGNMENT = 16
"""A launch tells the compiler where a base address or a stride is a multiple of 16 bytes, and a length one of 16 elements."""


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """A kernel as an operator launches it: `arguments` are tensors of no memory and numbers."""

    operator: str
    variant: str
    kernel: Any
    arguments: tuple[Any, ...]

    @property
    def name(self) -> str:
        return str(self.kernel._pyfunc.__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What the compiler made of one kernel for one architecture."""

    kernel: str
    variant: str
    arch: str
    registers: int
    spill_bytes: int
    """Bytes of stack a thread: registers that did not fit."""
    shared_bytes: int
    hgmma: int
    """Instructions of Hopper's warp-group tensor cores."""
    hmma: int
    """Instructions of a single warp's tensor cores."""

    def as_dict(self) -> dict[str, str | int]:
        return dataclasses.asdict(self)


class _Recorder:
    """`cuda.tile`, save that a launch is noted and not made."""

    def __init__(self, ct: ModuleType) -> None:
        self._ct = ct
        self.launches: list[tuple[Any, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ct, name)

    def launch(self, stream: object, grid: tuple[int, ...], kernel: Any, arguments: tuple[Any, ...]) -> None:
        del stream, grid
        self.launches.append((kernel, arguments))


def _no_stream(device: object = None) -> Any:
    """For builds of torch that have none; nothing is launched on it."""
    del device


@contextmanager
def _recording(module: ModuleType) -> Iterator[_Recorder]:
    recorder, ct, stream = _Recorder(module.ct), module.ct, torch.cuda.current_stream
    module.ct = recorder  # type: ignore[attr-defined]
    torch.cuda.current_stream = _no_stream
    try:
        yield recorder
    finally:
        module.ct = ct  # type: ignore[attr-defined]
        torch.cuda.current_stream = stream


def launches(operators: Sequence[str] = OPERATORS, *, arch: str | None = None, full: bool = False) -> list[Launch]:
    """Every launch of every variant, one of each signature: a kernel that two shapes launch alike is listed once.

    arch: whose tuning is used; None: this machine's. full: the whole matrix of `variants` instead of the models' shapes.
    """
    found: dict[tuple[int, str], Launch] = {}
    for operator in operators:
        module = importlib.import_module(f"longscan.kernels.{operator}.cutile")
        for variant, call in calls(operator, full=full):
            with _recording(module) as recorder, compiling_for(arch) if arch else nullcontext():
                call()
            for kernel, arguments in recorder.launches:
                launch = Launch(operator, variant, kernel, arguments)
                found.setdefault((id(kernel), signature(launch).symbol), launch)
    return list(found.values())


def signature(launch: Launch) -> Any:
    """The signature with which a launch on a GPU has the kernel compiled."""
    ct = importlib.import_module(f"longscan.kernels.{launch.operator}.cutile").ct
    compilation = ct.compilation
    constraints = [_constraint(ct, value) for value in launch.arguments]
    unnamed = compilation.KernelSignature(constraints, compilation.CallingConvention.cutile_python_v1())
    return unnamed.with_mangled_symbol(launch.name)


def _constraint(ct: Any, value: Any) -> Any:
    compilation = ct.compilation
    if isinstance(value, float):
        return compilation.ScalarConstraint(ct.float32)
    if not isinstance(value, torch.Tensor):
        return compilation.ConstantConstraint(value)
    strides, unit = value.stride(), ALIGNMENT // value.element_size()
    aligned = value.storage_offset() * value.element_size() % ALIGNMENT == 0
    return compilation.ArrayConstraint(
        getattr(ct, str(value.dtype).removeprefix("torch.")),
        value.ndim,
        index_dtype=ct.int32,
        stride_lower_bound_incl=[None if stride == 1 else 0 for stride in strides],
        alias_groups=(),
        may_alias_internally=False,
        stride_constant=[1 if stride == 1 else None for stride in strides],
        stride_divisible_by=[unit if stride != 1 and stride % unit == 0 else 1 for stride in strides],
        shape_divisible_by=[ALIGNMENT if length % ALIGNMENT == 0 else 1 for length in value.shape],
        base_addr_divisible_by=ALIGNMENT if aligned else 1,
    )


def compile_launch(launch: Launch, arch: str) -> Report:
    """Compile for `arch`, such as sm_90. Raises what the compiler raises."""
    ct = importlib.import_module(f"longscan.kernels.{launch.operator}.cutile").ct
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        ct.compilation.export_kernel(launch.kernel, [signature(launch)], cubin, gpu_code=arch, output_format="cubin")
        usage = _tool("cuobjdump", "--dump-resource-usage", str(cubin))
        code = _tool("nvdisasm", "-c", str(cubin))
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED):(\d+)", usage)}
    return Report(
        kernel=f"{launch.operator}.{launch.name}",
        variant=launch.variant,
        arch=arch,
        registers=numbers["REG"],
        spill_bytes=numbers["STACK"],
        shared_bytes=numbers["SHARED"],
        hgmma=len(re.findall(r"\bHGMMA\.", code)),
        hmma=len(re.findall(r"\bHMMA\.", code)),
    )


def compile_all(archs: Sequence[str] = ARCHITECTURES, operators: Sequence[str] = OPERATORS, *, full: bool = False) -> Iterator[Report]:
    """A report for each kernel, variant and architecture, in this order, on as many cores as there are. Raises what the compiler raises."""
    wanted = [(launch, arch) for arch in archs for launch in launches(operators, arch=arch, full=full)]
    # The compiler is a program of its own, so threads are enough.
    pool = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="longscan-compile")
    try:
        yield from pool.map(compile_launch, *zip(*wanted, strict=True))
    finally:
        pool.shutdown(cancel_futures=True)


def faults(report: Report, *, full: bool = False) -> list[str]:
    """What is wrong with a kernel, a line each: spills beyond what its tuning table allows, products beside the tensor cores.

    full: the variant is one of the whole matrix, where Hopper's own instructions are too large for some shapes.
    """
    found = []
    where = f"{report.kernel} ({report.variant}) on {report.arch}"
    allowed = spill_allowed(report.kernel, report.arch, full=full)
    if report.spill_bytes > allowed:
        found.append(f"{where}: expected at most {allowed} bytes of spills (spill_allowed), found {report.spill_bytes}")
    if report.arch == "sm_90" and report.kernel in PRODUCTS and not (report.hgmma or (full and report.hmma)):
        found.append(f"{where}: expected products on Hopper's tensor cores (HGMMA), found {report.hmma} HMMA and no HGMMA")
    return found


def missing_tools() -> list[str]:
    """Which of the tools that read machine code are not there."""
    return [name for name in ("cuobjdump", "nvdisasm") if shutil.which(name, path=_path()) is None]


def _path() -> str:
    """Where the CUDA packages put their programs, then the PATH."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else [str(path) for root in spec.submodule_search_locations or () for path in Path(root).glob("cu*/bin")]
    return os.pathsep.join([*folders, os.environ.get("PATH", "")])


def _tool(name: str, *arguments: str) -> str:
    path = _path()
    program = shutil.which(name, path=path)
    if program is None:
        raise FileNotFoundError(f"{name}: expected beside the CUDA compiler or on the PATH; install nvidia-cuda-{name}")
    environment = {**os.environ, "PATH": path}
    return subprocess.run([program, *arguments], env=environment, capture_output=True, text=True, check=True).stdout
