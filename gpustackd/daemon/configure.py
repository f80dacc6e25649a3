"""What the settings mean for the parts: policy of decisions, options of the reader of models."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import SecretStr

from gpustackd.daemon.reconcile.replicas import AT_ONCE, ReplicaPolicy
from gpustackd.domain.timeouts import Timeouts
from gpustackd.placement.policy import Policy
from gpustackd.placement.preferences import (
    PREFER_DOMINANT_RESOURCE,
    PREFER_DRAFT_WEIGHTS,
    PREFER_MEAN_OVER_GPUS,
)
from gpustackd.replicas.retention_score import RetentionWeights
from gpustackd.settings import Settings
from gpustackd.sources.access import ReaderOptions


def policy(settings: Settings) -> Policy:
    """What the settings say to decisions."""
    preferences = {
        PREFER_MEAN_OVER_GPUS: settings.prefer_mean_over_gpus,
        PREFER_DOMINANT_RESOURCE: settings.prefer_dominant_resource,
        PREFER_DRAFT_WEIGHTS: settings.prefer_draft_weights,
    }
    return Policy(
        strategy=settings.placement_strategy,
        placement_max=settings.scheduler_scale_up_placement_max_score,
        locality_max=settings.scheduler_scale_up_locality_max_score,
        commit_check=settings.commit_check,
        prefer=frozenset(name for name, on in preferences.items() if on),
    )


def replica_policy(settings: Settings) -> ReplicaPolicy:
    """What the settings say of replicas. Most of the pool's connections stay free for placing."""
    return ReplicaPolicy(
        weights=RetentionWeights(
            settings.scheduler_scale_down_status_max_score,
            settings.scheduler_scale_down_offload_max_score,
            settings.scheduler_scale_down_placement_max_score,
            settings.scheduler_scale_down_pairing_max_score,
        ),
        strategy=settings.placement_strategy,
        window=settings.drain_window,
        group_window=settings.scheduler_drain_window_seconds,
        zone=settings.timezone,
        at_once=min(AT_ONCE, max(1, (settings.pool_size - 1) // 2)),
    )


def timeouts(settings: Settings) -> Timeouts:
    """How long is waited for workers and placed instances."""
    return Timeouts(
        heartbeat_interval=settings.worker_heartbeat_interval,
        grace=settings.worker_heartbeat_grace_period,
        reschedule=settings.model_instance_reschedule_grace_period,
        unreachable=settings.unreachable_window,
        pickup=settings.pickup_window,
        stable=settings.stable_window,
        backoff=settings.restart_backoff,
        avoid=settings.avoid_window,
    )


def sample_age(settings: Settings) -> float | None:
    """Seconds for which a usage sample is trusted: as long as a worker counts as alive without a heartbeat;
    None where others' memory does not count."""
    avoid = settings.foreign_memory == "avoid"
    return settings.worker_heartbeat_grace_period if avoid else None


def reader_options(settings: Settings) -> ReaderOptions:
    """Endpoints, tokens and the folder of the cache for reading models."""
    return ReaderOptions(
        huggingface_endpoint=settings.hf_endpoint,
        huggingface_token=_secret(settings.huggingface_token),
        modelscope_endpoint=settings.modelscope_endpoint,
        worker_token=worker_token(settings),
        cache_dir=_cache_folder(),
        size_draft=settings.prefer_draft_weights,
    )


def worker_token(settings: Settings) -> str | None:
    """Bearer token of the workers' file API."""
    return _secret(settings.worker_token)


def _secret(value: SecretStr | None) -> str | None:
    return value.get_secret_value() if value else None


def _cache_folder() -> Path:
    """Where systemd says (`CacheDirectory=`), else where the desktop standard does."""
    if given := os.environ.get("CACHE_DIRECTORY"):
        return Path(given.split(":")[0])
    home = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(home) / "gpustackd"
