"""A CUDA device that is not there: enough of one to trace, plan and lower a training step for it. Nothing is run.

    environment(folder)   builds two small libraries with `cc` and returns the variables a child process needs
    install(profile)      in the child: torch and Inductor take the device of the profile for real
    with_estimated_host(profile)    a profile whose host was not measured, with the estimate below
    derived_times(...)    estimates for parts of a convolution, of which only the whole was timed

Tensors are fake (torch's FakeTensorMode). Inductor's CUDA lowering, its fusion and our own scheduler pass run as they
do on the device; generated kernels are written and never compiled. What a real device decides while it runs is not
seen: library workspaces come from measured operator times, clocks and contention not at all.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sysconfig
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fxhome.device import DeviceProfile
from fxhome.host_costs import HostCosts
from fxhome.passes.cost_model import op_signature
from fxhome.passes.op_timing import OpTiming

ESTIMATED_HOST = HostCosts(
    inner="inductor",
    forward_us=355.0,
    backward_us=366.0,
    input_us=3.0,
    gradient_us=9.0,
    kernel_us=22.0,
    library_us=35.0,
    convolution_us=45.0,
    view_us=1.5,
    swap_out_us=68.0,
    swap_in_us=63.0,
    wait_us=9.0,
    encode_us=38.0,
    decode_us=32.0,
)
"""An estimate from one run of benchmarks.host_costs on an H200 (benchmarks/results/host_h200.md): entries and copies as
they were measured by themselves, launches as its two workloads took them.
"""
_BACKWARD = torch.ops.aten.convolution_backward.default
_RUNTIME = r"""
#include <cuda_runtime_api.h>
#include <string.h>
#undef cudaGetDeviceProperties
cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { (void)device; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { (void)stream; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{ (void)stream; *status = cudaStreamCaptureStatusNone; return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{ (void)attribute; (void)device; *value = 1; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{ *least = 0; *greatest = -3; return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
    (void)device; memset(p, 0, sizeof *p); strcpy(p->name, "pretended"); p->major = 9; p->multiProcessorCount = 132;
    p->totalGlobalMem = 150000000000ull; p->warpSize = 32; p->maxThreadsPerMultiProcessor = 2048;
    p->maxThreadsPerBlock = 1024; p->sharedMemPerBlock = 49152; p->sharedMemPerBlockOptin = 232448;
    p->sharedMemPerMultiprocessor = 233472; p->regsPerBlock = 65536; p->regsPerMultiprocessor = 65536;
    return cudaSuccess;
}
"""
_DRIVER = r"""
int cuInit(unsigned flags) { (void)flags; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{ (void)device; *flags = 0; *active = 1; return 0; }
int cuGetErrorString(int error, const char **text) { (void)error; *text = "pretended"; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuCtxSetCurrent(void *context) { (void)context; return 0; }
"""


def environment(folder: Path) -> dict[str, str]:
    """Environment variables for a child process that pretends, with its libraries built in `folder`.

    Raises FileNotFoundError where torch came without CUDA's headers, CalledProcessError where `cc` fails.
    """
    site = Path(sysconfig.get_paths()["purelib"])
    headers = sorted(site.glob("nvidia/cu*/include/cuda_runtime_api.h"))
    if not headers:
        raise FileNotFoundError("no nvidia/cu*/include/cuda_runtime_api.h beside torch: install a CUDA build")
    # The runtime's wheel leaves out a few headers that Triton's brings.
    include = [f"-I{headers[-1].parent}", f"-I{site}/triton/backends/nvidia/include"]
    for name, source in (("libpretend.so", _RUNTIME), ("libcuda.so.1", _DRIVER)):
        command = ["cc", "-shared", "-fPIC", *include, "-x", "c", "-", "-o", str(folder / name)]
        subprocess.run(command, input=source, text=True, check=True)
    return os.environ | {
        "LD_PRELOAD": str(folder / "libpretend.so"),
        "LD_LIBRARY_PATH": str(folder),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        # Whether a padded product pays is tried out on the device.
        "TORCHINDUCTOR_SHAPE_PADDING": "0",
    }


def install(profile: DeviceProfile) -> None:
    """Let torch, Triton and Inductor of this process see one device; call it before anything is traced."""
    properties = types.SimpleNamespace(
        name=profile.name,
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=profile.total_memory_bytes,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        warp_size=32,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        L2_cache_size=60 << 20,
        gcnArchName="",
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "_get_device_properties": properties,
        "get_device_capability": (9, 0),
        "get_device_name": profile.name,
        "memory_allocated": 0,
        "mem_get_info": (profile.total_memory_bytes, profile.total_memory_bytes),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, functools.partial(_answer, answer))
    for name in ("_lazy_init", "synchronize", "empty_cache", "set_rng_state"):
        setattr(torch.cuda, name, functools.partial(_answer, None))
    for name in ("_cuda_getDevice", "_cuda_exchangeDevice", "_cuda_maybeExchangeDevice"):
        setattr(torch._C, name, functools.partial(_answer, 0))
    torch._subclasses.fake_tensor.init_gpu_context = functools.partial(_answer, None)  # type: ignore[assignment]
    _install_triton()
    _install_inductor()


def with_estimated_host(profile: DeviceProfile) -> DeviceProfile:
    """The profile, with `ESTIMATED_HOST` where it does not tell of Inductor's host."""
    if profile.host_costs(ESTIMATED_HOST.inner) is not None:
        return profile
    return dataclasses.replace(profile, host=(*profile.host, ESTIMATED_HOST))


def derived_times(
    wanted: Mapping[str, tuple[torch.fx.Node, tuple[Any, ...]]],
    times: Mapping[str, Sequence[float]],
    profile: DeviceProfile,
) -> dict[str, tuple[float, int]]:
    """(us, workspace bytes) by signature of what was timed as a part of something else only.

    A gradient takes half of what the whole convolution_backward took; a convolution without its bias what it took with
    it, less reading and writing the result once more. wanted: nodes and the arguments that they are timed with, by
    their signatures. What no whole was measured for is left out.
    """
    found = {}
    for signature, (node, _) in wanted.items():
        if signature in times:
            continue
        if (biased := times.get(op_signature(node))) is not None:
            add_us = 2 * node.meta["val"].nbytes / profile.memory_bytes_per_s * 1e6
            found[signature] = (max(biased[0] - add_us, biased[0] / 2), int(biased[1]))
            continue
        whole: torch.fx.Node | None = node
        if node.target is torch.ops.aten.convolution.default:
            siblings = [user for user in node.all_input_nodes[0].users if user.target is _BACKWARD]
            whole = next((user for user in siblings if user.args[2] is node.args[1]), None)
        if whole is not None and whole.target is _BACKWARD:
            measured = times.get(op_signature(whole).replace("[False,True,", "[True,True,"))
            if measured is not None:
                found[signature] = (measured[0] / 2, int(measured[1]) // 2)
    return found


def known_timings(
    wanted: Mapping[str, tuple[torch.fx.Node, tuple[Any, ...]]],
    times: Mapping[str, Sequence[float]],
    profile: DeviceProfile,
) -> dict[str, OpTiming]:
    """What was measured of the operators that are wanted, and what can be derived from it."""
    derived = derived_times(wanted, times, profile)
    found = {signature: times.get(signature) or derived.get(signature) for signature in wanted}
    return {signature: OpTiming(*figures) for signature, figures in found.items() if figures is not None}


def _answer(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _install_triton() -> None:
    import sys

    import torch._inductor.scheduler  # whoever asks for Triton has asked by now
    import torch.utils._triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        get_current_target = staticmethod(functools.partial(_answer, GPUTarget("cuda", 90, 32)))
        get_current_device = staticmethod(functools.partial(_answer, 0))
        get_active_torch_device = staticmethod(functools.partial(_answer, torch.device("cuda", 0)))
        get_device_interface = staticmethod(functools.partial(_answer, torch.cuda))
        is_active = staticmethod(functools.partial(_answer, True))

    driver.set_active(Driver())
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torch") and "has_triton" in vars(module):
            module.has_triton = functools.partial(_answer, True)  # type: ignore[attr-defined]


def _install_inductor() -> None:
    """What would touch the device while a graph is lowered is done on the CPU, or not at all."""
    import torch._inductor.fx_passes.fuse_attention as attention
    import torch._inductor.fx_passes.joint_graph as joint
    import torch._inductor.fx_passes.pad_mm as padding
    from torch._inductor import config, graph

    config.fx_graph_cache = False
    config.force_disable_caches = True
    for module, name in ((attention, "_sfdp_init"), (padding, "_pad_mm_init")):
        setattr(module, name, _on_cpu(getattr(module, name)))
    deduce = joint.UniformValueConstantFolder._deduce_value

    def deduce_on_cpu(folder: Any, node: torch.fx.Node) -> Any:
        given = node.kwargs
        if given.get("device") is not None:
            node.kwargs = {**given, "device": torch.device("cpu")}
        try:
            return deduce(folder, node)
        finally:
            node.kwargs = given

    joint.UniformValueConstantFolder._deduce_value = deduce_on_cpu

    def write_only(lowering: Any) -> types.ModuleType:
        lowering.codegen()
        module = types.ModuleType("pretended")
        module.call = functools.partial(_answer, None)  # type: ignore[attr-defined]
        module.__file__ = lowering.cache_path = __file__
        lowering.cache_key, lowering.cache_linemap = "pretended", []
        return module

    graph.GraphLowering._compile_to_module = write_only


def _on_cpu(initialise: Callable[[torch.device], Any]) -> Callable[..., Any]:
    """Patterns are traced on real tensors; the device in them does not matter."""
    return lambda *_: initialise(torch.device("cpu"))
