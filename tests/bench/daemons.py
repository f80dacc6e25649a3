"""Daemons as real processes, as a service manager starts them, their JSON log lines in a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread

from gpustackd.store.embedded.identity import ServerUser
from tests.bench.stage import Stage

START_PATIENCE = 60.0
STOP_PATIENCE = 15.0
_COUNTED = "placement.overtaken"
_FOREIGN = ("GPUSTACKD_", "GPUSTACK_", "PG")


class Replica:
    """One daemon."""

    def __init__(self, name: str, url: str, folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._mark = 0
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
        command = ServerUser("same").command(
            Path(sys.executable), "-m", "gpustackd", "run", "--replica", name, "--http", "off",
            "--log-format", "json", death_signal=signal.SIGTERM,
        )  # fmt: skip
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command, env=environment | {"GPUSTACKD_DATABASE_URL": url}, stdout=out, stderr=out
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def events(self) -> Counter[str]:
        """What it told since the last call, by event; what one line counts, counts so often."""
        found: Counter[str] = Counter()
        with self.log.open("rb") as file:
            file.seek(self._mark)
            for line in file:
                try:
                    told = json.loads(line)
                    found[told["event"]] += told.get("count", 1) if told["event"] == _COUNTED else 1
                except (ValueError, KeyError, TypeError):
                    continue
            self._mark = file.tell()
        return found

    async def ready(self) -> None:
        """Wait until it listens. Raise RuntimeError where it ends or says nothing."""
        with anyio.move_on_after(START_PATIENCE):
            while self.process.poll() is None:
                if b'"listen.started"' in self.log.read_bytes():
                    return
                await anyio.sleep(0.05)
        raise RuntimeError(f"{self.name} did not start:\n{self.log.read_text(errors='replace')[-2000:]}")

    def memory(self) -> tuple[int, int]:
        """Resident bytes now and at most so far."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = {
            line.split(":")[0]: int(line.split()[1]) * 1024 for line in status.splitlines() if "kB" in line
        }
        return found["VmRSS"], found["VmHWM"]

    def cpu(self) -> float:
        """Seconds of processor time so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(STOP_PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@asynccontextmanager
async def replicas(stage: Stage, folder: Path, number: int) -> AsyncIterator[Sequence[Replica]]:
    """So many daemons on the stage's database, all up, none left behind."""
    made = [Replica(f"replica-{n}", stage.url, folder) for n in range(1, number + 1)]
    try:
        for replica in made:
            await replica.ready()
        yield made
    finally:
        with anyio.CancelScope(shield=True):
            for replica in made:
                await anyio.to_thread.run_sync(replica.stop)


async def warm(stage: Stage, number: int = 1) -> None:
    """Let every replica read every model's facts, place one instance of each, and forget them."""
    for _ in range(number):
        await stage.burst(stage.mixed, len(stage.mixed))
        await stage.clear()
    await stage.settled()
    await stage.clear()
