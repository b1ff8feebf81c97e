"""The configuration of nginx in the README serves over TLS, passes streams on as they are generated, and limits each
client."""

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import httpx
import pytest
from served import LONG, free_port, until

NGINX, OPENSSL = shutil.which("nginx"), shutil.which("openssl")
README = Path(__file__).parents[3] / "runner" / "serve" / "README.md"
FRAME = """daemon off; master_process off; pid {0}/pid; error_log {0}/errors; events {{}}
http {{ access_log off; client_body_temp_path {0}/body; proxy_temp_path {0}/proxy; fastcgi_temp_path {0}/f;
uwsgi_temp_path {0}/u; scgi_temp_path {0}/s; {1} }}"""


@pytest.fixture
def proxy(server, tmp_path):
    """The URL of nginx before the server."""
    if not (NGINX and OPENSSL):
        pytest.skip("no nginx with openssl here (Debian: nginx, openssl)")
    port, given = free_port(), re.search(r"```nginx\n(.*?)```", README.read_text(), re.DOTALL)[1]
    made = f"req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=x -keyout {tmp_path}/key -out {tmp_path}/certificate"
    subprocess.run([OPENSSL, *made.split()], check=True, capture_output=True)
    for theirs, ours in (
        (r"listen 443", f"listen 127.0.0.1:{port}"),
        (r"(?<=ssl_certificate )\S+;", f"{tmp_path}/certificate;"),
        (r"(?<=ssl_certificate_key )\S+;", f"{tmp_path}/key;"),
        (r"127\.0\.0\.1:8000", f"127.0.0.1:{server.port}"),
    ):
        given, count = re.subn(theirs, ours, given)
        assert count == 1, theirs
    (tmp_path / "nginx.conf").write_text(FRAME.format(tmp_path, given))
    running = subprocess.Popen([NGINX, "-p", tmp_path, "-e", tmp_path / "errors", "-c", tmp_path / "nginx.conf"])
    try:
        until(lambda: running.poll() is not None or _answers(port))
        assert running.poll() is None, (tmp_path / "errors").read_text()
        yield f"https://127.0.0.1:{port}"
    finally:
        running.terminate()
        running.wait()


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"https://127.0.0.1:{port}/health", verify=False).status_code == 200
    except httpx.ConnectError:
        return False


def test_nginx_passes_streams_on_and_limits_each_client(server, proxy, held):
    with httpx.Client(base_url=proxy, verify=False, timeout=60) as client:
        held.clear()  # after the first token the answer waits: it arrives all the same
        with client.stream(
            "POST", "/v1/completions", json=LONG | {"stream": True, "prompt": "a " * 40}, timeout=10
        ) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            held.set()
            assert sum(line.startswith("data: {") for line in lines) > 20
        statuses = Counter(client.get("/v1/models").status_code for _ in range(60))
        assert statuses[200] >= 20 and statuses[429] > 0 and len(statuses) == 2
        assert client.post("/v1/completions", content=b" " * (5 << 20)).status_code in (413, 429)
