"""What this host is: name, address, architecture, RAM, and its NVIDIA GPUs."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpustackd.domain.backends import architecture

INSTALL = "install NVIDIA's library with `pip install 'gpustackd[worker]'` (or `pip install nvidia-ml-py`)"

_FAMILIES = {
    2: "kepler", 3: "maxwell", 4: "pascal", 5: "volta", 6: "turing", 7: "ampere", 8: "ada-lovelace",
    9: "hopper", 10: "blackwell", 13: "rubin",
}  # fmt: skip
"""NVML's `nvmlDeviceArchitecture_t`."""


@dataclass(frozen=True, slots=True)
class HostGpus:
    """GPUs as entries of a Worker document. `problem` says why there are none; `unified`: they share the
    host's memory."""

    documents: tuple[dict[str, Any], ...] = ()
    problem: str = ""
    unified: bool = False


def host_document(name: str, gpus: HostGpus, *, ip: str | None = None) -> dict[str, Any]:
    """This host as a Worker document: RAM in bytes, CPU architecture as `amd64` or `arm64`.

    Where no GPU can be seen, the document does not list GPUs, and an existing worker keeps its own.
    """
    document: dict[str, Any] = {
        "kind": "Worker",
        "name": name,
        "hostname": socket.gethostname(),
        "ram_total": memory(),
        "cpu_arch": architecture(platform.machine()),
    }
    if ip := ip or address():
        document["ip"] = ip
    if gpus.documents:
        document["gpus"] = list(gpus.documents)
    if gpus.unified:
        document["unified_memory"] = True
    return document


def memory() -> int:
    """Bytes of RAM of this host (MemTotal on Linux)."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def address() -> str | None:
    """The address of this host's default route; None where there is none. No packet is sent."""
    # addresses reserved for documentation (RFC 5737, RFC 3849)
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as end:
                end.connect((target, 9))
                return str(end.getsockname()[0])
        except OSError:
            continue
    return None


def nvidia_gpus() -> HostGpus:
    """GPUs by NVIDIA's management library (NVML). Never raises: `problem` says what went wrong."""
    try:
        import pynvml
    except ImportError:
        return HostGpus(problem=f"NVIDIA's library is not installed; {INSTALL}")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return HostGpus(problem=f"no NVIDIA driver answers: {error}")
    try:
        return _read(pynvml)
    except pynvml.NVMLError as error:
        return HostGpus(problem=f"the NVIDIA driver failed while it was asked: {error}")
    finally:
        pynvml.nvmlShutdown()


def _read(nvml: Any) -> HostGpus:
    count = nvml.nvmlDeviceGetCount()
    if not count:
        return HostGpus(problem="the NVIDIA driver knows no GPU")
    cuda = _asked(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)
    documents = []
    unified = False
    for index in range(count):
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        memory_of = _asked(nvml, nvml.nvmlDeviceGetMemoryInfo, device)
        total = int(memory_of.total) if memory_of is not None else 0
        unified = unified or not total  # a GPU that shares the host's memory answers "not supported"
        capability = _asked(nvml, nvml.nvmlDeviceGetCudaComputeCapability, device)
        gpu = {
            "index": index,
            "type": "cuda",
            "vendor": "nvidia",
            "name": _text(_asked(nvml, nvml.nvmlDeviceGetName, device)),
            "uuid": _text(_asked(nvml, nvml.nvmlDeviceGetUUID, device)),
            "arch_family": _FAMILIES.get(_asked(nvml, nvml.nvmlDeviceGetArchitecture, device)),
            "compute_capability": ".".join(map(str, capability)) if capability else None,
            "runtime_version": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
            "vram_total": total or memory(),
        }
        if (_asked(nvml, nvml.nvmlDeviceGetMigMode, device) or (0,))[0]:
            gpu["schedulable"] = False  # engines cannot use it whole, and its slices are not described
        documents.append({k: v for k, v in gpu.items() if v is not None})
    return HostGpus(tuple(documents), unified=unified)


def _asked(nvml: Any, question: Callable[..., Any], *about: Any) -> Any:
    """The answer; None where this driver or GPU does not support the question."""
    try:
        return question(*about)
    except nvml.NVMLError:
        return None


def _text(value: Any) -> str | None:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
