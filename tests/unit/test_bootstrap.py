"""How the environment is made on a machine with nothing but Python."""

import base64
import hashlib
import http.server
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
WHEEL = b"not really a wheel"
NAME = "pip-9.9-py3-none-any.whl"


class Index(http.server.ThreadingHTTPServer):
    """A package index with one package, as PEP 503 has it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Page)
        self.asked: list[tuple[str, str | None]] = []


class Page(http.server.BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        pages = {
            "/simple/pip/": f'<a href="../../files/{NAME}#sha256=00">{NAME}</a>'.encode(),
            f"/files/{NAME}": WHEEL,
        }
        self.send_response(200 if self.path in pages else 404)
        self.end_headers()
        self.wfile.write(pages.get(self.path, b""))

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index() -> Iterator[Index]:
    with Index() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, on a machine where nothing is configured."""
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / ".ci" / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for variable in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(module, "pip_files", lambda: [tmp_path / "pip.conf"])
    monkeypatch.setattr(module, "PIP_LOCK", tmp_path / "pip.lock")
    write_lock(tmp_path, WHEEL)
    return module


def write_lock(folder: Path, content: bytes) -> None:
    digest = hashlib.sha256(content).hexdigest()
    (folder / "pip.lock").write_text(f"pip==9.9 \\\n    --hash=sha256:{digest}\n")


def test_pip_is_fetched_from_the_index_of_the_environment(
    bootstrap: ModuleType, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.server_port}/simple/")
    assert bootstrap.fetch_pip(tmp_path).read_bytes() == WHEEL
    assert [path for path, _ in index.asked] == ["/simple/pip/", f"/files/{NAME}"]


def test_pip_is_fetched_from_the_index_of_pips_settings_with_its_password(
    bootstrap: ModuleType, index: Index, tmp_path: Path
) -> None:
    where = f"http://me:p%40ss@127.0.0.1:{index.server_port}/simple"
    (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {where}\n")
    assert bootstrap.fetch_pip(tmp_path).name == NAME
    assert index.asked[0][1] == "Basic " + base64.b64encode(b"me:p@ss").decode()


def test_a_pip_with_another_hash_is_refused(
    bootstrap: ModuleType, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.server_port}/simple")
    write_lock(tmp_path, b"what it should have been")
    with pytest.raises(bootstrap.Failure, match="hash"):
        bootstrap.fetch_pip(tmp_path)
    assert not (tmp_path / NAME).exists()


def test_an_index_without_pip_is_named_as_the_reason(
    bootstrap: ModuleType, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.server_port}/elsewhere")
    with pytest.raises(bootstrap.Failure, match=r"404.*PIP_INDEX_URL"):
        bootstrap.fetch_pip(tmp_path)


def test_the_pip_that_is_fetched_is_pinned_by_hash() -> None:
    text = (ROOT / ".ci" / "pip.lock").read_text()
    assert text.startswith("pip==")
    assert "--hash=sha256:" in text
