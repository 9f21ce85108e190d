"""Untrusted code, run behind walls: an unprivileged user of its own, then bubblewrap, then limits.

A `Sandbox` holds trees of files and a warm Python (sandbox_server.py, inside). Each `run` sees a fresh private copy of
a tree (an overlay, whatever the size), no network, no other process, a private /tmp, and ends with all its processes at
the wall deadline. Nothing is shared with the host but /usr and the interpreter, read-only: the tree goes in by a
socket. Where user namespaces or bubblewrap are missing, `Sandbox` says so and refuses, unless `accept_rlimits`: then
limits, a copy and a process group are all there is, and code that means harm can read and write what its user can.

Does not cover: side channels, the kernel's own faults, GPU devices; two sandboxes of different programs may have one
user, and then share its count of processes. Without namespaces untrusted code has the server's user: it can open the
server, its pipes and the other trees, make a run a fault, and leave files in /tmp that nobody removes. Linux only.
"""

import base64
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from envs.base import EnvLost

FIRST_UID = 61_000  # each sandbox of a process has a user of its own from here on, where this process is root
_MOST_UIDS = 500
_START_S = 30.0
_SLACK_S = 5.0  # after the wall deadline, for the sandbox to kill and answer
_ENV: Mapping[str, str] = {
    "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "TZ": "UTC", "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}  # fmt: skip
_uids = itertools.count()


class SandboxError(EnvLost):
    """The sandbox failed, not the code in it: never scored."""


class NoSandbox(ValueError):
    """This machine cannot isolate; the message says why, and what would accept less."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Of one run. `memory_bytes` binds each process (address space) and all together (resident)."""

    wall_s: float = 20.0
    cpu_s: int = 20
    memory_bytes: int = 1 << 30
    processes: int = 48
    file_bytes: int = 16 << 20
    disk_bytes: int = 64 << 20
    output_bytes: int = 256 << 10
    report_bytes: int = 8 << 20


@dataclasses.dataclass(frozen=True)
class Ran:
    """What came of a run: `rc` is negative for a signal; `stopped` says why the sandbox ended it ("time", "memory")."""

    rc: int
    stopped: str | None
    output: str
    report: bytes
    truncated: bool  # more output than output_bytes: the rest was refused
    seconds: float


@functools.cache
def interpreter() -> tuple[str, str]:
    """(executable, prefix) of a Python that another user may run: this one, else the system's. Raises NoSandbox."""
    for candidate in (os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"):
        path = pathlib.Path(os.path.realpath(candidate))
        try:
            if path.is_file() and all(parent.stat().st_mode & 0o005 == 0o005 for parent in path.parents):
                ask = "import sys; print(sys.version_info >= (3, 10) and sys.base_prefix or '')"
                prefix = subprocess.run([path, "-I", "-c", ask], capture_output=True, text=True).stdout.strip()
                if prefix:
                    return str(path), prefix
        except OSError:  # this user may not look at it, let alone another
            continue
    raise NoSandbox("got no Python >= 3.10 that another user may run; install one under /usr (apt-get install python3)")


def why_not() -> str | None:
    """Why this machine cannot isolate, or None if it can; tried once, by doing it. A try that took too long is made
    again when it is asked for again."""
    try:
        return _why_not()
    except TimeoutError as err:
        return str(err)


@functools.cache
def _why_not() -> str | None:
    if not sys.platform.startswith("linux"):
        return f"namespaces are Linux's, this is {sys.platform}"
    if not shutil.which("bwrap"):
        return "bwrap is not installed (apt-get install bubblewrap)"
    try:
        with contextlib.closing(Sandbox(_checked=True)) as sandbox:
            ran = sandbox.run(["true"])
            return None if ran.rc == 0 else f"a trial run ended with {ran.rc}: {ran.output[-300:]}"
    except (NoSandbox, SandboxError) as err:
        if isinstance(err.__cause__, TimeoutError):
            raise TimeoutError(str(err)) from err
        return str(err)


class Sandbox:
    """Trees and a warm Python that forks for each run. One run at a time; threads wait for one another.

    Args:
        site: {path: content} that `program` and Python can import; content may be (bytes, mtime).
        program: source of a module. Its `warm()` is called once and `prepare(folder)` for each tree, trusted;
            `run(call=NAME)` calls NAME(arguments, send) in the forked process, and what it sends is its `report`.
        accept_rlimits: run without namespaces where there are none.
        isolate: None: where possible; False never, which needs accept_rlimits.
    """

    def __init__(
        self,
        *,
        site: Mapping[str, Any] | None = None,
        program: str = "",
        accept_rlimits: bool = False,
        isolate: bool | None = None,
        _checked: bool = False,
    ) -> None:
        reason = None if _checked or isolate is False else why_not()
        if (reason or isolate is False) and not accept_rlimits:
            raise NoSandbox(
                f"untrusted code is refused: {reason or 'isolate=False'}; accept_rlimits=True accepts limits alone, "
                "for code that you trust"
            )
        self.isolated = reason is None and isolate is not False
        self._begin = {"do": "start", "site": _packed(site or {}), "program": program}
        self._trees: dict[str, Any] = {"empty": {}}
        self._loaded: set[str] = set()
        self._lock = threading.Lock()
        self._link: socket.socket | None = None
        self._process: subprocess.Popen | None = None
        self._said: Any = None  # what the server writes to its standard error
        self._root: str | None = None  # without namespaces: where it keeps its trees
        self._uid = FIRST_UID + (os.getpid() * 7 + next(_uids)) % _MOST_UIDS
        self._start()

    def load(self, name: str, tree: Mapping[str, Any]) -> None:
        """Add a tree, {path: content}, under a name (letters, digits, - . _); one that is there already stays."""
        if name not in self._trees:
            if not re.fullmatch(r"[\w.-]*\w", name):
                raise ValueError(f"sandbox: got the name {name!r} of a tree, want letters, digits, - . _")
            self._trees[name] = _packed(tree)

    def run(
        self,
        argv: Sequence[str] = (),
        *,
        tree: str = "empty",
        call: str = "",
        arguments: Any = None,
        files: Mapping[str, Any] | None = None,
        keep: bool = False,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        env: Mapping[str, str] | None = None,
    ) -> Ran:
        """Run `argv`, or `call` of the program with `arguments`, over a tree with `files` written ({path: None}
        deletes). With `keep` the report is what changed: {"files": {path: text or None}, "refused":
        [path], "gone": [folder that was replaced]}; of a folder that was removed, the folder alone is None.

        Raises SandboxError where the sandbox itself failed; it is started anew then.
        """
        asked = {
            "tree": tree, "argv": list(argv), "call": call, "arguments": arguments,
            "files": _packed(files or {}), "keep": keep, "limits": dataclasses.asdict(limits),
            "env": {**_ENV, **(env or {})},
        }  # fmt: skip
        with self._lock:
            if self._link is None:
                self._start()
            try:
                if tree not in self._loaded:
                    with _file_of(self._trees[tree]) as body:
                        self._ask({"do": "tree", "name": tree}, body.fileno())
                    self._loaded.add(tree)
                with _file_of(asked) as body:
                    reply, output, report, truncated = self._exchange(body.fileno(), limits)
            except (OSError, EOFError, ValueError) as err:
                why = self._stop()
                raise SandboxError(f"the sandbox failed: {type(err).__name__}: {err}; {why}") from err
        if reply["fault"]:
            raise SandboxError(f"the sandbox could not do a run: {reply['fault'][:500]}")
        text = output.decode(errors="replace")
        return Ran(reply["rc"], reply["stopped"], text, report, truncated, reply["seconds"])

    def close(self) -> None:
        """End the warm Python and all that it runs."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        executable, prefix = interpreter()
        here, there = socket.socketpair()
        settings = {"socket": there.fileno(), "isolated": self.isolated, "base": "/base", "site": "/site"}
        if not self.isolated:
            settings["root"] = self._root = tempfile.mkdtemp(prefix="sandbox-", dir="/tmp")
            if os.geteuid() == 0:
                os.chown(self._root, self._uid, self._uid)
        source = pathlib.Path(__file__).with_name("sandbox_server.py").read_text()
        command = [executable, "-s", "-S", "-B", "-c", source, json.dumps(settings)]
        if self.isolated:
            command = [*_bubblewrap(prefix), *command]
        if os.geteuid() == 0:
            as_user = f"--reuid={self._uid}", f"--regid={self._uid}"
            command = ["setpriv", *as_user, "--clear-groups", "--inh-caps=-all", *command]
        self._said = tempfile.TemporaryFile()  # a pipe that nobody reads would block the server
        self._link = here
        try:
            self._process = subprocess.Popen(
                command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=self._said, env=dict(_ENV), cwd="/", start_new_session=True,
            )  # fmt: skip
        except OSError as err:
            self._stop()
            raise NoSandbox(f"got {err} from {command[0]}; install it (apt-get install util-linux bubblewrap)") from err
        finally:
            there.close()
        try:
            self._ask(self._begin)
        except (OSError, EOFError, ValueError) as err:
            raise SandboxError(f"no sandbox came up: {type(err).__name__}: {err}; {self._stop()}") from err

    def _ask(self, message: Mapping[str, Any], *fds: int) -> None:
        self._link.settimeout(_START_S)
        _send(self._link, message, fds)
        _receive(self._link)

    def _stop(self) -> str:
        """Close and kill; what the server had to say."""
        if self._link is not None:
            self._link.close()
        process, self._link, self._process = self._process, None, None
        self._loaded = set()
        said, self._said = self._said, None
        if process is not None:
            _end(process)
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = None
        if said is None:
            return ""
        with said:
            said.seek(max(0, said.seek(0, os.SEEK_END) - 500))
            return said.read().decode(errors="replace")

    def _exchange(self, body: int, limits: Limits) -> tuple[dict, bytes, bytes, bool]:
        """Send a run, which is in a file, and read its two pipes to their ends, each up to its limit, and the reply."""
        link = self._link
        with contextlib.ExitStack() as open_files:  # a file is closed once, whoever closes it: numbers are used anew
            files = [
                (open_files.enter_context(os.fdopen(reader, "rb", 0)), open_files.enter_context(os.fdopen(to, "wb", 0)))
                for reader, to in (os.pipe(), os.pipe())
            ]
            (output, to_output), (report, to_report) = files
            link.settimeout(_START_S)
            message = {"do": "run", "limits": dataclasses.asdict(limits)}
            _send(link, message, (to_output.fileno(), to_report.fileno(), body))
            to_output.close()
            to_report.close()
            deadline = time.monotonic() + limits.wall_s + _SLACK_S
            most = {output: limits.output_bytes, report: limits.report_bytes}
            (said, reported), over = _read_pipes(link, most, deadline)
            link.settimeout(max(0.1, deadline - time.monotonic()))
            reply = _receive(link)
        return reply, said, b"" if report in over else reported, output in over


def _end(process: subprocess.Popen) -> None:
    """Wait a little for the end of a sandbox, then kill its group: bubblewrap's death alone would not be its own."""
    try:
        process.wait(timeout=1.0)
        return
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel, out of reach: it is left behind
        process.wait(timeout=_SLACK_S)


def _read_pipes(link: socket.socket, limits: Mapping[Any, int], deadline: float) -> tuple[list[bytes], set]:
    """What comes out of each pipe until the sandbox answers. A pipe over its limit is closed: its writer gets EPIPE."""
    files = {file.fileno(): file for file in limits}
    most = {fd: limits[file] for fd, file in files.items()}
    parts: dict[int, list[bytes]] = {fd: [] for fd in most}
    left, over = dict(most), set()
    poll = select.poll()
    for fd in (*most, link.fileno()):
        poll.register(fd, select.POLLIN | select.POLLHUP)
    live, answered = set(most), False
    while live and not answered:
        ready = poll.poll(max(0, 1000 * (deadline - time.monotonic())))
        if not ready or time.monotonic() > deadline:
            raise TimeoutError("no answer by the deadline")
        answered = any(fd == link.fileno() for fd, _ in ready)
        for fd in [fd for fd, _ in ready if fd in live] if not answered else sorted(live):
            while True:
                if answered and not select.select([fd], [], [], 0)[0]:
                    break
                data = os.read(fd, 1 << 16)
                left[fd] -= len(data)
                parts[fd].append(data)
                if not data or left[fd] < 0:
                    live.discard(fd)
                    poll.unregister(fd)
                    if data:
                        over.add(files[fd])
                        files[fd].close()
                    break
                if not answered:
                    break
    return [b"".join(data)[: most[fd]] for fd, data in parts.items()], over


def _bubblewrap(prefix: str) -> list[str]:
    command = ["bwrap", "--unshare-all", "--uid", "0", "--gid", "0", "--cap-add", "CAP_SYS_ADMIN"]
    command += ["--cap-add", "CAP_DAC_OVERRIDE", "--cap-add", "CAP_SETPCAP"]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("lib", "lib64", "bin", "sbin"):
        if os.path.islink(f"/{name}"):
            command += ["--symlink", f"usr/{name}", f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            command += ["--ro-bind", f"/{name}", f"/{name}"]
    if not prefix.startswith("/usr"):
        command += ["--ro-bind", prefix, prefix]
    command += ["--proc", "/proc", "--dev", "/dev", "--dir", "/w", "--dir", "/scratch", "--tmpfs", "/tmp"]
    command += ["--tmpfs", "/base", "--tmpfs", "/site", "--remount-ro", "/", "--clearenv"]
    for name, value in _ENV.items():
        command += ["--setenv", name, value]
    return command


def _packed(files: Mapping[str, Any]) -> dict[str, Any]:
    """{path: None, text, bytes or (bytes, mtime)} as JSON. Raises ValueError for a path that leaves its folder."""
    packed = {}
    for path, content in files.items():
        parts = pathlib.PurePosixPath(path).parts
        if not parts or parts[0] == "/" or ".." in parts or "\0" in path:
            raise ValueError(f"sandbox: got the path {path!r}, want one below its folder")
        data, mtime = content if isinstance(content, tuple) else (content, None)
        if data is None:
            packed[path] = None
        elif isinstance(data, str):
            packed[path] = [data, "utf-8", mtime]
        else:
            packed[path] = [base64.b64encode(data).decode(), "base64", mtime]
    return packed


def _file_of(value: Any) -> BinaryIO:
    """A file without a name of a value as JSON. What is in it, the server hands on unread: what it had read, every run
    that it forks could find in its own memory."""
    file = os.fdopen(os.memfd_create("message"), "w+b")
    file.write(json.dumps(value).encode())
    file.seek(0)
    return file


def _send(link: socket.socket, message: Mapping[str, Any], fds: Sequence[int]) -> None:
    data = json.dumps(message).encode()
    head = struct.pack("!Q", len(data))
    if fds:
        socket.send_fds(link, [head], list(fds))
    else:
        link.sendall(head)
    link.sendall(data)


def _receive(link: socket.socket) -> dict[str, Any]:
    (length,) = struct.unpack("!Q", _exactly(link, 8))
    return json.loads(_exactly(link, length))


def _exactly(link: socket.socket, n: int) -> bytes:
    parts = []
    while n:
        part = link.recv(min(n, 1 << 20))
        if not part:
            raise EOFError("it closed the link")
        parts.append(part)
        n -= len(part)
    return b"".join(parts)
