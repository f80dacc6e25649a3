"""Becomes a PostgreSQL program, as the right user and ending with its parent: a script, never imported.

`python -I -S launch.py '{"parent": pid, "identity": {…}, "signal": n}' PROGRAM ARGUMENTS…`

It is a script rather than code between fork and exec: the parent has threads, and locks that they hold at the
fork stay locked. Being single-threaded, it may also enter a user namespace. Standard library only.
"""

import ctypes
import json
import os
import signal
import sys

CLONE_NEWUSER = 0x10000000
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_SECUREBITS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 1, 8, 28, 47, 2
SECBIT_NO_SETUID_FIXUP = 1 << 2
CAP_DAC_OVERRIDE = 1
CAPABILITY_VERSION_3 = 0x20080522
REFUSED = 121  # exit status: the namespace is refused on this system


def libc_call(name: str, *arguments: object) -> None:
    """Call a function of the C library. Raises OSError where it does not return 0."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def enter_namespace(uid: int, gid: int) -> None:
    """Map this process to `uid` in a new user namespace; files still see its real user."""
    outer_uid, outer_gid = os.geteuid(), os.getegid()
    libc_call("unshare", CLONE_NEWUSER)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {outer_uid} 1"),
        ("gid_map", f"{gid} {outer_gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123
            file.write(text)


def become(uid: int, gid: int, reach: bool) -> None:
    """Change from root to another user; with `reach`, keep the capability to pass closed folders."""
    if reach:
        try:  # else access(2), by which initdb looks for postgres, leaves the right out of account
            libc_call("prctl", PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0)
        except OSError:  # a root without CAP_SETPCAP
            libc_call("prctl", PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    if reach:
        bit = 1 << CAP_DAC_OVERRIDE
        header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
        sets = (ctypes.c_uint32 * 6)(bit, bit, bit, 0, 0, 0)
        libc_call("capset", header, sets)
        libc_call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_OVERRIDE, 0, 0)


def main() -> None:
    """Change to the user and signal that the first argument asks for, then become the program."""
    order = json.loads(sys.argv[1])
    program = sys.argv[2:]
    identity = order["identity"]
    if identity["way"] == "namespace":
        try:
            enter_namespace(identity["uid"], identity["gid"])
        except OSError as error:
            print(f"user namespace: {error}", file=sys.stderr)
            raise SystemExit(REFUSED) from None
    elif identity["way"] == "user":
        become(identity["uid"], identity["gid"], identity["reach"])
    # Only now: the kernel resets it whenever credentials change.
    if order["signal"] and sys.platform == "linux":
        libc_call("prctl", PR_SET_PDEATHSIG, order["signal"], 0, 0, 0)
        if os.getppid() != order["parent"]:  # it died before the signal was set
            raise SystemExit(1)
    # Signals that the parent ignores would stay ignored through exec.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o077)
    os.execv(program[0], program)  # noqa: S606


if __name__ == "__main__":
    main()
