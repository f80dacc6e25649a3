"""What a host says of itself; NVIDIA's library is played, at the machine's edge."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from gpustackd.agent import host
from gpustackd.store.documents.reading import read_documents

MIB = 2**20


class NVMLError(Exception):
    """As the library's."""


class Library:
    """Two cards; `broken` names questions that fail."""

    NVMLError = NVMLError

    def __init__(self, *broken: str, count: int = 2) -> None:
        self.broken = broken
        self.count = count
        self.closed = 0
        self.sliced: int | None = None

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": self._close,
            "nvmlDeviceGetCount": lambda: self.count,
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 12080,
            "nvmlDeviceGetHandleByIndex": lambda n: n,
            "nvmlDeviceGetMemoryInfo": lambda n: SimpleNamespace(total=46068 * MIB),
            "nvmlDeviceGetName": lambda n: "NVIDIA L40S",
            "nvmlDeviceGetUUID": lambda n: f"GPU-{n}".encode(),
            "nvmlDeviceGetMigMode": lambda n: (n == self.sliced, 0),
            "nvmlDeviceGetArchitecture": lambda n: 8,
            "nvmlDeviceGetCudaComputeCapability": lambda n: (8, 9),
        }

        def ask(*about: Any) -> Any:
            if name in self.broken:
                raise NVMLError("Not Supported")
            return answers[name](*about)

        return ask

    def _close(self) -> None:
        self.closed += 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(*broken: str, count: int = 2) -> Library:
        made = Library(*broken, count=count)
        monkeypatch.setitem(sys.modules, "pynvml", made)
        return made

    return install


def test_cards_are_described_as_a_worker_document_takes_them(library: Any) -> None:
    nvml = library()
    gpus = host.nvidia_gpus()
    assert gpus.documents[1] == {
        "index": 1,
        "type": "cuda",
        "vendor": "nvidia",
        "name": "NVIDIA L40S",
        "uuid": "GPU-1",
        "arch_family": "ada-lovelace",
        "compute_capability": "8.9",
        "runtime_version": "12.8",
        "vram_total": 46068 * MIB,
    }
    assert (len(gpus.documents), gpus.problem, gpus.unified, nvml.closed) == (2, "", False, 1)
    (document,) = read_documents(json.dumps(host.host_document("here", gpus)), "here")
    assert document.gpus is not None
    assert [g["vram_total"] for g in document.gpus] == [46068 * MIB] * 2
    assert document.values["cpu_arch"] in {"amd64", "arm64"}
    assert document.values["ram_total"] > 2**28


def test_what_a_driver_does_not_answer_is_left_out(library: Any) -> None:
    library("nvmlDeviceGetArchitecture", "nvmlSystemGetCudaDriverVersion_v2", "nvmlDeviceGetUUID")
    (first, _) = host.nvidia_gpus().documents
    assert not {"arch_family", "runtime_version", "uuid"} & first.keys()
    assert first["compute_capability"] == "8.9"


def test_a_card_that_is_cut_into_slices_takes_nothing(library: Any) -> None:
    library().sliced = 1
    whole, sliced = host.nvidia_gpus().documents
    assert "schedulable" not in whole
    assert sliced["schedulable"] is False


def test_a_card_without_memory_of_its_own_shares_the_hosts(library: Any) -> None:
    library("nvmlDeviceGetMemoryInfo", count=1)
    gpus = host.nvidia_gpus()
    assert gpus.documents[0]["vram_total"] == host.memory()
    assert host.host_document("here", gpus)["unified_memory"] is True


@pytest.mark.parametrize(
    ("broken", "count", "says"),
    [
        (("nvmlInit",), 2, "no NVIDIA driver answers"),
        (("nvmlDeviceGetHandleByIndex",), 2, "failed while it was asked"),
        ((), 0, "knows no GPU"),
    ],
)
def test_a_host_without_cards_says_why_and_speaks_of_none(
    library: Any, broken: tuple[str, ...], count: int, says: str
) -> None:
    library(*broken, count=count)
    gpus = host.nvidia_gpus()
    assert says in gpus.problem
    assert "gpus" not in host.host_document("here", gpus)


def test_without_the_library_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install" in host.nvidia_gpus().problem


def test_an_address_that_is_given_goes_before_one_that_is_found() -> None:
    assert host.host_document("here", host.HostGpus(), ip="10.1.2.3")["ip"] == "10.1.2.3"
