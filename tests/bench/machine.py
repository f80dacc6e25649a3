"""The machine that figures belong to, and its two cores: what more there is stays unused."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

CORES = 2


def pin(cores: int = CORES) -> list[int]:
    """Keep this process and all its children, PostgreSQL among them, on so many cores."""
    if not hasattr(os, "sched_setaffinity"):
        return list(range(os.cpu_count() or 1))
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    os.sched_setaffinity(0, chosen)
    return chosen


def cpu_name() -> str:
    """The processor as the kernel calls it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


async def machine(connection: Any, cores: list[int]) -> dict[str, Any]:
    """Cores used and there, processor, load at the start, Python, PostgreSQL and its way to the disk."""
    shown = {
        name: await connection.fetchval(f"SHOW {name}")
        for name in ("server_version", "fsync", "synchronous_commit", "shared_buffers")
    }
    return {
        "cores": len(cores),
        "cores_of_machine": os.cpu_count(),
        "cpu": cpu_name(),
        "load": [round(x, 2) for x in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "postgresql": shown["server_version"],
        "fsync": shown["fsync"],
        "synchronous_commit": shown["synchronous_commit"],
        "shared_buffers": shown["shared_buffers"],
    }


def line(found: dict[str, Any]) -> str:
    return (
        f"{found['cores']} of {found['cores_of_machine']} cores, {found['cpu']},"
        f" load at start {found['load'][0]}, {found['system']}, Python {found['python']},"
        f" PostgreSQL {found['postgresql']}, fsync {found['fsync']},"
        f" shared_buffers {found['shared_buffers']}"
    )
