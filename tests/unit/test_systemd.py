"""What the daemon tells systemd."""

import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpustackd.daemon.surface.systemd import Systemd

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")


class Manager:
    """A service manager's end of the socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address.replace("@", "\0", 1))
        self._socket.setblocking(False)

    def heard(self) -> list[str]:
        messages = []
        while True:
            try:
                messages.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return messages

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", pytest.param("abstract", marks=on_linux)])
def manager(request: pytest.FixtureRequest) -> Iterator[Manager]:
    with tempfile.TemporaryDirectory(prefix="gpustackd-") as folder:
        path = str(Path(folder) / "notify")
        manager = Manager(path if request.param == "path" else f"@gpustackd-{secrets.token_hex(8)}")
        yield manager
        manager.close()


def test_it_says_ready_status_and_stopping(manager: Manager) -> None:
    systemd = Systemd(manager.address)
    assert systemd.listening
    systemd.ready("12 workers")
    systemd.status("placing\n3 instances")
    systemd.stopping()
    assert manager.heard() == ["READY=1\nSTATUS=12 workers", "STATUS=placing 3 instances", "STOPPING=1"]


def test_the_same_status_is_not_sent_again(manager: Manager) -> None:
    systemd = Systemd(manager.address)
    for text in ("idle", "idle", "busy", "idle"):
        systemd.status(text)
    assert manager.heard() == ["STATUS=idle", "STATUS=busy", "STATUS=idle"]


def test_signs_of_life_are_sent_a_few_times_per_interval_however_often_the_loop_turns(
    manager: Manager,
) -> None:
    now = 100.0
    systemd = Systemd(manager.address, watchdog_interval=20.0, clock=lambda: now)
    for _ in range(200):
        systemd.alive()
        now += 0.1
    assert manager.heard() == ["WATCHDOG=1"] * 4


def test_a_loop_that_stands_still_sends_no_sign_of_life(manager: Manager) -> None:
    systemd = Systemd(manager.address, watchdog_interval=20.0, clock=lambda: 100.0)
    systemd.alive()
    manager.heard()
    systemd.alive()
    assert manager.heard() == []


def test_the_environment_names_socket_and_interval_and_children_do_not_inherit_them(manager: Manager) -> None:
    environment = {
        "NOTIFY_SOCKET": manager.address,
        "WATCHDOG_USEC": "30000000",
        "WATCHDOG_PID": str(os.getpid()),
    }
    systemd = Systemd.from_environment(environment)
    assert systemd.watchdog_interval == 30.0
    assert environment == {}
    systemd.ready()
    assert manager.heard() == ["READY=1"]


def test_a_watchdog_meant_for_another_process_is_not_ours(manager: Manager) -> None:
    environment = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}
    assert Systemd.from_environment(environment).watchdog_interval is None


@pytest.mark.parametrize("address", [None, "", "vsock:2:1234", "relative/path"])
def test_without_a_socket_of_ours_it_is_silent(address: str | None) -> None:
    systemd = Systemd(address, watchdog_interval=1.0)
    assert not systemd.listening
    assert systemd.watchdog_interval is None
    systemd.ready("x")
    systemd.status("x")
    systemd.alive()
    systemd.stopping()


def test_a_manager_that_is_gone_or_does_not_read_holds_nothing_up(manager: Manager) -> None:
    systemd = Systemd(manager.address)
    for number in range(2000):  # more than any socket's buffer takes
        systemd.status(str(number))
    manager.close()
    systemd.ready()


@pytest.mark.parametrize("microseconds", ["", "0", "soon", "-1"])
def test_an_interval_that_is_none_turns_the_watchdog_off(microseconds: str) -> None:
    environment = {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": microseconds}
    assert Systemd.from_environment(environment).watchdog_interval is None
