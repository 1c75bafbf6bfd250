"""Google Cloud Storage as far as reading goes: a folder whose sub-folders are buckets,
by fsspec (which etils asks for small files) and by HTTP (which TensorStore asks for arrays)."""

import contextlib
import http.server
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from etils.epath import backend
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import _registry


@contextlib.contextmanager
def fake_gcs(root: Path, patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """``gs://BUCKET/...`` is ``root / BUCKET / ...``; gives the objects asked for by HTTP."""
    asked: list[str] = []

    class Objects(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            bucket, _, name = self.path.partition("?")[0].removeprefix(
                "/storage/v1/b/").partition("/o/")
            file = root / bucket / urllib.parse.unquote(name)
            asked.append(str(file.relative_to(root)))
            content = file.read_bytes() if name and file.is_file() else None
            wanted = self.headers.get("Range")
            if content is not None and wanted:
                first, last = wanted.removeprefix("bytes=").split("-")
                start, whole = int(first), len(content)
                content = content[start:int(last) + 1 if last else None]
                self.send_response(206)
                self.send_header("Content-Range",
                                 f"bytes {start}-{start + len(content) - 1}/{whole}")
            else:
                self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(content or b"")))
            self.send_header("x-goog-generation", "1")
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *_: object) -> None:
            pass

    class Files(LocalFileSystem):
        cachable = False

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            text = str(path)
            return str(root / text.removeprefix("gs://")) if "://" in text else text

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Objects)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    patch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{server.server_port}")
    patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
    fsspec.register_implementation("gcs", Files, clobber=True)
    try:
        yield asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        del _registry["gcs"]
        backend.fsspec_backend._get_filesystem.cache_clear()
