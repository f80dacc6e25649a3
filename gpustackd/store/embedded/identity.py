"""The user PostgreSQL runs as: it refuses root, and needs a user with an entry in the password database."""

import json
import os
import pwd
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

LAUNCH = Path(__file__).with_name("launch.py")
NOBODY = 65534


@dataclass(frozen=True)
class ServerUser:
    """`same`: this process's user. `namespace`: the same, mapped to `uid` in a user namespace. `user`:
    another user; `reach`: with the capability to pass folders that are closed to others."""

    way: Literal["same", "namespace", "user"]
    uid: int = 0
    gid: int = 0
    reach: bool = False

    def command(self, program: Path, *arguments: str, death_signal: int = 0) -> list[str]:
        """A command line that runs `program` as this user; it gets `death_signal` when its parent dies."""
        order = {"parent": os.getpid(), "identity": asdict(self), "signal": int(death_signal)}
        return [sys.executable, "-I", "-S", str(LAUNCH), json.dumps(order), str(program), *arguments]

    def give(self, path: Path) -> None:
        """Make this user the owner of `path`, where it is another user."""
        if self.way == "user":
            os.chown(path, self.uid, self.gid)


def choose(data: Path, program: Path) -> ServerUser:
    """The user for a server with its data in `data`, which may not exist yet."""
    if os.geteuid() != 0:
        if _known(os.geteuid()):
            return ServerUser("same")
        # an arbitrary user id, as some clusters assign to containers: initdb looks up its name
        return _namespace() or ServerUser("same")
    owner = data.stat().st_uid if data.exists() else 0
    if owner == 0 and (mapped := _namespace()):
        return mapped
    uid = owner or _some_user()
    entry = pwd.getpwuid(uid) if _known(uid) else None
    # In a folder that is closed to others, such as /root, the other user needs a capability to pass.
    reach = not all(_open_to_others(path) for path in (data.resolve(), program.resolve()))
    return ServerUser("user", uid, entry.pw_gid if entry else uid, reach)


def _known(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _some_user() -> int:
    if _known(NOBODY):
        return NOBODY
    return max((entry.pw_uid for entry in pwd.getpwall() if entry.pw_uid), default=NOBODY)


@cache
def _namespace() -> ServerUser | None:
    """A user namespace, if this system allows one: tried, not guessed."""
    if sys.platform != "linux":
        return None
    uid = _some_user()
    identity = ServerUser("namespace", uid, pwd.getpwuid(uid).pw_gid if _known(uid) else uid)
    attempt = subprocess.run(identity.command(Path("/bin/true")), capture_output=True, check=False)
    return identity if attempt.returncode == 0 else None


def _open_to_others(path: Path) -> bool:
    return all(not folder.exists() or folder.stat().st_mode & 0o001 for folder in path.parents)
