"""A PostgreSQL server for tests: its own data, port and, where tests run as root, user."""

from __future__ import annotations

import glob
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

USER = "postgres"  # made by Debian's package; the server refuses to run as root


def folder_of_tools() -> Path | None:
    """Find initdb and pg_ctl, which Debian does not put on the PATH."""
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent
    folders = sorted(glob.glob("/usr/lib/postgresql/*/bin"), key=lambda path: float(path.split("/")[4]))
    return Path(folders[-1]) if folders else None


def install() -> str:
    """Install Debian's package where that is possible; say why it is not."""
    if folder_of_tools() is not None:
        return ""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return "PostgreSQL is not installed (Debian: apt-get install postgresql)"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    words = ["install", "-y", "--no-install-recommends", "postgresql"]
    for command in (["apt-get", "update"], ["apt-get", *words]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode or folder_of_tools() is None:
        return f"PostgreSQL could not be installed: {(done.stderr or done.stdout).strip()[-300:]}"
    return ""


class Server:
    """A server that can be stopped and started again."""

    def __init__(self) -> None:
        self._tools = folder_of_tools()
        self._folder = Path(tempfile.mkdtemp(prefix="autotune-postgres-", dir="/tmp"))
        self._as = {}
        if os.geteuid() == 0:
            shutil.chown(self._folder, USER, USER)
            self._as = {"user": USER, "group": USER, "extra_groups": []}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._run("initdb", "-A", "trust", "-U", USER, "-E", "UTF8", "--locale=C", "--no-sync")

    def start(self) -> None:
        settings = "-c listen_addresses=127.0.0.1 -c fsync=off -c max_connections=200"
        options = f"-p {self._port} -k {self._folder} {settings}"
        log = str(self._folder / "log")
        self._run("pg_ctl", "start", "-w", "-l", log, "-o", options)

    def stop(self) -> None:
        self._run("pg_ctl", "stop", "-m", "immediate")

    def emptied(self, fresh: bool) -> str:
        """Drop the studies of the database, or with ``fresh`` all there is: its URL."""
        import psycopg

        url = f"postgresql://{USER}@127.0.0.1:{self._port}/postgres"
        with psycopg.connect(url) as connection:
            if fresh:
                connection.execute("DROP SCHEMA public CASCADE")
                connection.execute("CREATE SCHEMA public")
            elif connection.execute("SELECT to_regclass('studies')").fetchone()[0]:
                connection.execute("TRUNCATE studies CASCADE")
        return url

    def remove(self) -> None:
        shutil.rmtree(self._folder)

    def _run(self, tool: str, *words: str) -> None:
        command = [str(self._tools / tool), "-D", str(self._folder / "data"), *words]
        # not a pipe: the server would inherit it, and reading it would never end
        with tempfile.TemporaryFile() as told:
            done = subprocess.run(
                command, cwd="/", stdin=subprocess.DEVNULL, stdout=told, stderr=told, **self._as
            )
            told.seek(0)
            assert done.returncode == 0, f"{tool}: {told.read().decode()}"
