"""nginx and HAProxy as processes, with a configuration as a page of the docs has it, on a port of the test's."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest
from tests.support.launchers import free_port
from tests.support.servers import ServerProcess, run_process

_NGINX = """
{user}
worker_processes 1;
pid {directory}/nginx.pid;
error_log stderr notice;
events {{}}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    include {directory}/site.conf;
}}
"""


def program(name: str) -> str:
    """Where a proxy is installed; skips the test if it is not."""
    found = shutil.which(name, path=os.environ.get("PATH", "") + os.pathsep + "/usr/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install {name})")
    return found


def with_ports(text: str, listen: str, public: str, ports: dict[int, int]) -> str:
    """The configuration with the test's ports for those of the text, each of which has to be in it."""
    assert text.count(listen) == 1, listen
    for port, chosen in ports.items():
        assert text.count(f"127.0.0.1:{port}") == 1, port
        text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{chosen}")
    return text.replace(listen, public)


@asynccontextmanager
async def nginx(text: str, ports: dict[int, int]) -> AsyncIterator[ServerProcess]:
    """nginx with this file in its `conf.d`.

    Args:
        ports: For each port of the text's upstream, the one that takes its place.
    """
    command = program("nginx")
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="homing-nginx-")))
        port = stack.enter_context(free_port())
        # The port is held for this test, which takes SO_REUSEPORT to share.
        site = with_ports(text, "listen 80;", f"listen 127.0.0.1:{port} reuseport;", ports)
        (directory / "site.conf").write_text(site)
        user = "user root;" if os.geteuid() == 0 else ""
        (directory / "nginx.conf").write_text(_NGINX.format(user=user, directory=directory))
        argv = [command, "-c", f"{directory}/nginx.conf", "-e", "stderr", "-g", "daemon off;"]
        async with run_process(argv) as process:
            await process.log.until("start worker process ")
            process.address = ("127.0.0.1", port)
            yield process


@asynccontextmanager
async def haproxy(text: str, ports: dict[int, int]) -> AsyncIterator[ServerProcess]:
    """HAProxy with this configuration; as for `nginx`."""
    command = program("haproxy")
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="homing-haproxy-"))
        port = stack.enter_context(free_port())
        path = Path(directory, "haproxy.cfg")
        path.write_text(with_ports(text, "bind :80", f"bind 127.0.0.1:{port}", ports))
        async with run_process([command, "-W", "-db", "-f", str(path)]) as process:
            await process.log.until("Loading success")
            process.address = ("127.0.0.1", port)
            yield process
