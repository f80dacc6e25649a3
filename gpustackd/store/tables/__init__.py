"""The tables as SQLModel classes; `migrations/` must agree (checked by `make check`)."""

from sqlmodel import SQLModel

from gpustackd.store.tables.catalogue import InferenceBackend, InstanceType, ModelFile
from gpustackd.store.tables.decisions import SchedulingDecision
from gpustackd.store.tables.fleet import Cluster, GpuDevice, Worker
from gpustackd.store.tables.instances import InstanceClaim, ModelInstance
from gpustackd.store.tables.models import Model

metadata = SQLModel.metadata

__all__ = [
    "Cluster",
    "GpuDevice",
    "InferenceBackend",
    "InstanceClaim",
    "InstanceType",
    "Model",
    "ModelFile",
    "ModelInstance",
    "SchedulingDecision",
    "Worker",
    "metadata",
]
