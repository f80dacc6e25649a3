"""The project's environment, made from nothing but Python and a package index: `python3 .ci/bootstrap.py`.

Uses uv where it is on PATH and pip otherwise; where Python brings no pip (a bare Debian has no ensurepip),
fetches pip's wheel from the configured index, checks its hash and runs that. The environment is stamped with
a hash of all that it was made from, so that a second run costs nothing. Standard library only.
"""

import base64
import configparser
import contextlib
import fcntl
import hashlib
import html.parser
import json
import os
import pathlib
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".stamp"
LOCK = ROOT / "requirements-dev.lock"
PIP_LOCK = ROOT / ".ci" / "pip.lock"
EDITABLE = ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
# The public index that pip itself falls back to. No registry's address stands in this repository: whoever
# has a mirror sets PIP_INDEX_URL or pip.conf, and this is the last resort.
PUBLIC_INDEX = "https://{}/simple".format(".".join(("pypi", "org")))  # noqa: FLY002


class Failure(Exception):
    """The environment cannot be made; the message says what to do."""


def say(text):
    print("setup: " + text, file=sys.stderr, flush=True)


def wanted_stamp():
    """Two lines: the interpreter and the place, and what is installed there."""
    import tomllib  # an older Python is told so in main()

    # entry points carry absolute paths: a moved checkout needs a new environment
    where = f"{ROOT} {os.path.realpath(sys.executable)} {sys.version}"
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    # the settings of the linters in there change nothing that is installed
    shape = json.dumps(
        [project["build-system"], project["project"], project["tool"]["hatch"]], sort_keys=True
    )
    what = LOCK.read_bytes() + shape.encode() + pathlib.Path(__file__).read_bytes()
    return f"{hashlib.sha256(where.encode()).hexdigest()}\n{hashlib.sha256(what).hexdigest()}\n"


def present_stamp():
    try:
        return STAMP.read_text() if os.access(str(PYTHON), os.X_OK) else ""
    except OSError:
        return ""


@contextlib.contextmanager
def one_at_a_time():
    with (ROOT / ".venv.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("another run is setting up the environment, waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


# --- running an installer ----------------------------------------------------------------------------------


def packages_in_lock():
    return len(re.findall(r"^[a-zA-Z0-9][^\s=]*==", LOCK.read_text(), flags=re.MULTILINE))


def run(command, label, env=None, expect=0):
    """Run an installer; show how far it is, and all that it said if it fails."""
    said, started, shown = [], time.monotonic(), 0.0
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=env,
        cwd=str(ROOT),
    )
    seen = 0
    terminal = sys.stderr.isatty()
    for raw in process.stdout:
        line = raw.decode(errors="replace").rstrip()
        said.append(line)
        seen += line.startswith("Collecting ")
        now = time.monotonic()
        installing = line.startswith("Installing collected")
        if expect and (installing or now - shown > (0.2 if terminal else 10)):
            shown = now
            step = "installing them" if installing else f"{min(seen, expect)} of {expect}"
            if terminal:
                sys.stderr.write(f"\r\033[Ksetup: {label}: {step}")
                sys.stderr.flush()
            else:
                say(f"{label}: {step}")
    code = process.wait()
    if terminal and expect:
        sys.stderr.write("\r\033[K")
    if code:
        print("\n".join(said[-40:]), file=sys.stderr)
        raise Failure("{} failed (exit {}): {}".format(label, code, " ".join(map(str, command[:4])) + " …"))
    return time.monotonic() - started


def fits():
    """Whether what is there is of this interpreter and this place."""
    return present_stamp().split("\n")[0] == wanted_stamp().split("\n")[0]


def make_venv():
    """An environment without pip (venv alone needs no ensurepip); one that fits is kept and updated."""
    if fits():
        STAMP.write_text(wanted_stamp().split("\n")[0])  # until it is done, it is in step with nothing
        return
    if VENV.is_symlink() or VENV.exists():
        shutil.rmtree(str(VENV)) if VENV.is_dir() and not VENV.is_symlink() else VENV.unlink()
    try:
        import venv
    except ImportError:
        raise Failure("this Python has no venv module; on Debian: apt install python3-venv") from None
    venv.EnvBuilder(symlinks=True, with_pip=False).create(str(VENV))


def with_uv(uv):
    env = dict(os.environ)
    env.pop("VIRTUAL_ENV", None)
    index, extras = configured_indexes()
    # uv does not read pip's settings: hand on an index that someone has set there
    if index != PUBLIC_INDEX and not {"UV_DEFAULT_INDEX", "UV_INDEX_URL"} & set(env):
        env["UV_DEFAULT_INDEX"] = index
    remote = [extra for extra in extras if not extra.startswith("file:")]
    if remote and not {"UV_INDEX", "UV_EXTRA_INDEX_URL"} & set(env):
        env["UV_EXTRA_INDEX_URL"] = " ".join(remote)
    if pip_setting("cert") and "SSL_CERT_FILE" not in env:
        env["SSL_CERT_FILE"] = pip_setting("cert")
    common = [uv, "pip", "install", "--python", str(PYTHON), "--quiet"]
    run([*common, "--require-hashes", "--requirement", str(LOCK)], "packages (uv)", env)
    run([*common, *EDITABLE], "gpustackd", env)


def with_pip(pip):
    env = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_ROOT_USER_ACTION="ignore", PIP_NO_INPUT="1")
    for name in ("PIP_REQUIRE_VIRTUALENV", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PYTHONPATH"):
        env.pop(name, None)
    install = [*pip, "install", "--progress-bar", "off"]
    run(
        [*install, "--require-hashes", "--requirement", str(LOCK)],
        "packages (pip)",
        env,
        expect=packages_in_lock(),
    )
    run([*install, *EDITABLE], "gpustackd", env)


def find_pip(scratch):
    """A pip for the environment: Python's own copy, one on PATH, or the wheel from the index."""
    own = [str(PYTHON), "-m", "pip"]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if subprocess.call([str(PYTHON), "-m", "ensurepip", "--default-pip"], **quiet) == 0:
        return own
    say("this Python brings no pip; fetching it")
    wheel = None
    for pip in ([sys.executable, "-m", "pip"], ["pip3"], ["pip"]):
        download = [
            "download",
            "--no-deps",
            "--require-hashes",
            "--dest",
            scratch,
            "--requirement",
            str(PIP_LOCK),
        ]
        try:
            if subprocess.call([*pip, *download], **quiet) == 0:
                wheel = next(pathlib.Path(scratch).glob("pip-*.whl"))
                break
        except OSError:
            continue
    wheel = wheel or fetch_pip(pathlib.Path(scratch))
    # a wheel is a zip file, and Python runs code from zip files
    run([str(PYTHON), str(wheel / "pip"), "install", "--no-index", "--no-cache-dir", str(wheel)], "pip")
    return own


# --- an index, asked with the standard library --------------------------------------------------------------


def pip_files():
    home, xdg = pathlib.Path.home(), os.environ.get("XDG_CONFIG_HOME")
    yield from (
        pathlib.Path(d) / "pip" / "pip.conf" for d in os.environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")
    )
    yield pathlib.Path("/etc/pip.conf")
    yield home / ".pip" / "pip.conf"
    yield (pathlib.Path(xdg) if xdg else home / ".config") / "pip" / "pip.conf"
    yield home / "Library" / "Application Support" / "pip" / "pip.conf"
    yield pathlib.Path(sys.prefix) / "pip.conf"
    if os.environ.get("PIP_CONFIG_FILE"):
        yield pathlib.Path(os.environ["PIP_CONFIG_FILE"])


def pip_setting(name):
    """What pip would take for an option: the environment, or the last of its files that says something."""
    if os.environ.get("PIP_" + name.upper().replace("-", "_")):
        return os.environ["PIP_" + name.upper().replace("-", "_")]
    found = ""
    for path in pip_files():
        parser = configparser.RawConfigParser()
        try:
            parser.read(str(path))
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue
        for section in ("global", "install", "download"):
            found = parser.get(section, name, fallback="") or found
    return found


def configured_indexes():
    return pip_setting("index-url") or PUBLIC_INDEX, pip_setting("extra-index-url").split()


class Links(html.parser.HTMLParser):
    """The links of a page of the simple index (PEP 503)."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        href = dict(attrs).get("href")
        if tag == "a" and href:
            self.found.append(href)


def get(url):
    parts = urllib.parse.urlsplit(url)
    headers = {"Accept": "text/html", "User-Agent": "gpustackd-bootstrap"}
    if parts.username:
        secret = "{}:{}".format(
            urllib.parse.unquote(parts.username), urllib.parse.unquote(parts.password or "")
        )
        headers["Authorization"] = "Basic " + base64.b64encode(secret.encode()).decode()
        url = urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    context = ssl.create_default_context(cafile=pip_setting("cert") or None)
    with urllib.request.urlopen(
        urllib.request.Request(url, headers=headers), timeout=60, context=context
    ) as answer:
        return answer.geturl(), answer.read()


def fetch_pip(scratch):
    """pip's wheel by name and version from the index, refused unless its hash is the one written down."""
    text = PIP_LOCK.read_text()
    version = re.search(r"pip==(\S+)", text).group(1)
    hashes = set(re.findall(r"sha256:([0-9a-f]{64})", text))
    name = f"pip-{version}-py3-none-any.whl"
    index, extras = configured_indexes()
    failures = []
    for base in [index, *extras]:
        try:
            page, body = get(base.rstrip("/") + "/pip/")
            links = Links()
            links.feed(body.decode(errors="replace"))
            href = next(
                link for link in links.found if link.partition("#")[0].endswith("/" + name) or link == name
            )
            _, data = get(urllib.parse.urldefrag(urllib.parse.urljoin(page, href)).url)
        except StopIteration:
            failures.append(f"one index has no {name}")
            continue
        except (OSError, ValueError) as error:
            failures.append(str(error))
            continue
        if hashlib.sha256(data).hexdigest() not in hashes:
            raise Failure(f"the index gave a {name} whose hash is not the one in .ci/pip.lock")
        wheel = scratch / name
        wheel.write_bytes(data)
        return wheel
    raise Failure(
        "pip cannot be had ({}). Install python3-pip and python3-venv, or uv, or set PIP_INDEX_URL".format(
            "; ".join(failures)
        )
    )


def set_up():
    started = time.monotonic()
    uv = shutil.which("uv")
    verb = "updating" if fits() else "making"
    say("{} .venv with {} and Python {}.{}.{}".format(verb, "uv" if uv else "pip", *sys.version_info[:3]))
    make_venv()
    if uv:
        try:
            with_uv(uv)
        except Failure as failure:
            say(f"{failure}; trying pip")
            uv = None
    if not uv:
        with tempfile.TemporaryDirectory() as scratch:
            with_pip(find_pip(scratch))
    STAMP.write_text(wanted_stamp())
    say(f"ready after {time.monotonic() - started:.0f} s: {packages_in_lock()} packages in .venv")


def main():
    if sys.version_info < (3, 11):  # noqa: UP036
        raise Failure("Python 3.11 or newer is needed, this is {}.{}".format(*sys.version_info[:2]))
    if present_stamp() == wanted_stamp():
        return
    if not os.access(str(ROOT), os.W_OK):
        raise Failure(f"{ROOT} cannot be written to by this user; clone it to a folder of your own")
    with one_at_a_time():
        if present_stamp() != wanted_stamp():
            set_up()


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        say(str(failure))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
