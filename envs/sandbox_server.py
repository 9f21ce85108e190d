"""What runs inside a sandbox (envs/sandbox.py starts it): a warm Python that forks for each run. Standard library
alone.

It is trusted and holds, in a user namespace of its own, the few capabilities that mounting an overlay takes. For each
run it forks an *init* in new pid, mount and ipc namespaces: a private overlay over the tree, private /tmp and /proc,
limits, no capability, a system-call filter. The init forks the untrusted process, waits, and reads the changed files
back. When the init dies, by itself or at the deadline, the kernel kills all that ever came of it.

Without namespaces (`isolated` false) a run has a copy of the tree, a session of its own and the limits, nothing more:
untrusted code is the server's own user and can open it.

Messages are 8 bytes of length, then JSON. A tree's carries a file with its content, and a run's the write ends of its
two pipes, output and report, and a file with all else of the run: a forked process reads them, for what this one had
read, the untrusted ones, whose memory is a copy of its own, could read, too.
"""

import array
import base64
import ctypes
import errno
import json
import os
import platform
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import sys
import tempfile
import time
import types

_CLONE_NEWNS, _CLONE_NEWPID, _CLONE_NEWIPC = 0x20000, 0x20000000, 0x08000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 32, 4096
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_SECUREBITS = 1, 4, 24, 28
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_CAP_AMBIENT = 38, 22, 36, 47
_MOST_FILES, _MOST_FILE_BYTES = 200, 256 * 1024  # of what is read back of one run
_SIGNALS = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
_TICK_S = 0.02  # between two looks at the memory of a run
_libc = ctypes.CDLL(None, use_errno=True)


def main(settings):
    """Serve until the socket closes."""
    link = socket.socket(fileno=settings["socket"])
    if not settings["isolated"]:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        settings |= {"base": settings["root"] + "/base", "site": settings["root"] + "/site"}
    sys.dont_write_bytecode = True
    state = {"program": None, "pid_namespace": None, "settings": settings}
    if settings["isolated"]:
        state["pid_namespace"] = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    state["link"] = link
    try:
        while True:
            message, fds = _receive(link)
            if message is None:
                return
            _send(link, _answer(message, fds, state))
    finally:
        if not settings["isolated"]:  # whoever started it, and would do it otherwise, may be gone
            shutil.rmtree(settings["root"], ignore_errors=True)


def _answer(message, fds, state):
    settings = state["settings"]
    if message["do"] == "tree":
        (body,) = fds
        pid = os.fork()
        if pid == 0:
            _add_tree(body, os.path.join(settings["base"], message["name"]), state["program"])  # never returns
        os.close(body)
        _, status = os.waitpid(pid, 0)
        if status:
            raise RuntimeError(f"tree {message['name']}: got status {os.waitstatus_to_exitcode(status)}, want 0")
        return {"ok": True}
    if message["do"] == "start":
        write_files(settings["site"], message["site"])
        sys.path[:] = [settings["site"], *(p for p in sys.path if p)]
        if message["program"]:
            program = types.ModuleType("sandbox_program")
            exec(compile(message["program"], "sandbox_program", "exec"), program.__dict__)
            if hasattr(program, "warm"):
                program.warm()
            state["program"] = program
        return {"ok": True}
    return _run(message, fds, state)


def _add_tree(body, folder, program):
    """In a process of its own: write a tree and compile it."""
    try:
        write_files(folder, _read_body(body))
        if hasattr(program, "prepare"):
            program.prepare(folder)
    except BaseException as err:
        os.write(2, f"{type(err).__name__}: {err}\n".encode())
        os._exit(1)
    os._exit(0)


def _read_body(fd):
    with open(fd, "rb") as file:
        return json.loads(file.read())


# --- one run --------------------------------------------------------------------------------------------------------


def _run(message, fds, state):
    begun = time.monotonic()
    isolated = state["settings"]["isolated"]
    if isolated:
        _check(_libc.unshare(_CLONE_NEWPID), "unshare pid")
    fault, fault_end = os.pipe()
    own = None if isolated else tempfile.mkdtemp(prefix="run-", dir=state["settings"]["root"])
    state["own"] = own
    pid = os.fork()
    if pid == 0:
        _init(message["limits"], fds, state, fault_end)  # never returns
    os.close(fault_end)
    if isolated:
        _check(_libc.setns(state["pid_namespace"], _CLONE_NEWPID), "setns")
    for fd in fds:
        os.close(fd)
    limits = message["limits"]
    why = _watch(pid, begun + limits["wall_s"], limits["memory_bytes"])
    if why:
        os.kill(pid, signal.SIGKILL)
    if not isolated:
        _kill_the_rest(pid)
    _, status = os.waitpid(pid, 0)
    said = os.read(fault, 4096).decode(errors="replace")  # the init's; with namespaces nobody else can open it
    os.close(fault)
    if own:
        shutil.rmtree(own, ignore_errors=True)
    seconds = time.monotonic() - begun
    return {"rc": os.waitstatus_to_exitcode(status), "stopped": why, "fault": said, "seconds": seconds}


def _watch(pid, deadline, memory_bytes):
    """Wait for the end of `pid`. Why it must be stopped ("time", "memory"), or None."""
    ended = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return "time"
            if poll.poll(1000 * min(_TICK_S, left)):
                return None
            if _resident_bytes(pid) > memory_bytes:
                return "memory"
    finally:
        os.close(ended)


def _resident_bytes(init):
    """Of all processes that this server can see, but itself and what started it."""
    own, total = {1, os.getpid(), os.getppid()}, 0
    for pid in _descendants(init) | {init}:
        if pid in own:
            continue
        try:
            with open(f"/proc/{pid}/statm") as file:
                fields = file.read().split()
            total += (int(fields[1]) - int(fields[2])) * resource.getpagesize()
        except (OSError, IndexError):  # it has just ended
            continue
    return total


def _descendants(root):
    """Pids below `root`, and whatever was handed to this server because its parent ended."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
    found, me = set(), os.getpid()
    grown = True
    while grown:
        grown = {pid for pid, parent in parents.items() if parent in (root, me) or parent in found} - found - {root}
        found |= grown
    return found - {me}


def _kill_the_rest(init):
    """Without a pid namespace: kill what `init` left, until a look finds nothing. It may be forking."""
    for _ in range(200):
        left = _descendants(init)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # it has just ended
                continue
        try:
            while any(os.waitpid(pid, os.WNOHANG)[0] for pid in left if _is_child(pid)):
                pass
        except ChildProcessError:  # no child is left to wait for
            pass
        if not left:
            return
        time.sleep(0.005)


def _is_child(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1]) == os.getpid()
    except (OSError, IndexError):
        return False


def _init(limits, fds, state, fault):
    """The first process of a run: prepares, forks the untrusted one, waits, reads back what changed."""
    try:
        for number in _SIGNALS:  # Python's own handler of SIGINT would let untrusted code end this process
            signal.signal(number, signal.SIG_IGN)
        out, report, body = fds
        message = _read_body(body) | {"limits": limits}
        isolated, upper = state["settings"]["isolated"], None
        state["link"].close()
        if isolated:
            os.close(state["pid_namespace"])
        else:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        base = os.path.join(state["settings"]["base"], message["tree"])
        if isolated:
            folder, upper = _isolate(state["settings"], base, message["limits"])
        else:
            folder = _copy(state["own"], base)
            message["env"] |= {"HOME": state["own"] + "/tmp", "TMPDIR": state["own"] + "/tmp"}
        try:
            write_files(folder, message["files"])
            _forget_compiled(folder, message["files"])
        except (OSError, UnicodeError) as err:  # names and sizes are whoever's that wrote the files: no fault of ours
            if not isolated and getattr(err, "errno", 0) == errno.ENOSPC:
                raise
            os.write(out, f"the files cannot be written: {err!a}\n".encode())
            os._exit(98)
        os.chdir(folder)
        os.setsid()
        _limit(message["limits"], isolated)
        if isolated:
            _drop()
            # Untrusted code has this user, too: nothing of this process may be opened through /proc.
            _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")
        child = os.fork()
        if child == 0:
            _untrusted(message, out, report, state["program"])
        os.close(out)
        status = _reap(child)
        if message.get("keep"):
            if isolated:  # what still runs would change the files while they are read
                _kill_all()
            _keep(report, upper, folder, message, base)
        os._exit(min(status, 255) if status >= 0 else 128 - status)
    except BaseException as err:
        os.write(fault, f"{type(err).__name__}: {err}".encode())
        os._exit(99)


def _keep(report, upper, folder, message, base):
    """Send what a run changed. How deep folders are and who reads no more is the run's or the host's: no fault here."""
    try:
        changed = _changed(upper, folder, message["files"], base, message["limits"]["report_bytes"])
    except (OSError, RecursionError) as err:
        changed = {"files": {}, "refused": [f"all: {err}"], "gone": []}
    try:
        with os.fdopen(report, "wb") as file:
            file.write(json.dumps(changed).encode())
    except BrokenPipeError:  # it was more than who reads takes
        return


def _kill_all():
    """As the init of a namespace: end every other process in it."""
    try:
        os.kill(-1, signal.SIGKILL)
        while True:
            os.wait()
    except (ProcessLookupError, ChildProcessError):  # nobody is left
        return


def _untrusted(message, out, report, program):
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    call = message.get("call")
    kept = report if call and not message.get("keep") else 2
    os.closerange(3, max(kept, 3))
    os.closerange(kept + 1, 1 << 20)
    for number in _SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(message["env"])
    try:
        if not call:
            os.execvpe(message["argv"][0], message["argv"], message["env"])
        getattr(program, call)(message["arguments"], _writer(report))
        os._exit(0)
    except BaseException as err:
        os.write(2, f"{type(err).__name__}: {err}\n".encode())
        os._exit(97)


def _writer(report):
    write = os.write

    def send(data):
        data = memoryview(data)
        while data:
            data = data[write(report, data) :]

    return send


def _reap(child):
    """Exit status of `child`; as the init of a namespace it inherits orphans and buries them, too."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


# --- walls ----------------------------------------------------------------------------------------------------------


def _isolate(settings, base, limits):
    """Private mounts. (the folder of the run, a descriptor of where its changes go)."""
    _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWIPC), "unshare mounts")
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    size = f"size={limits['disk_bytes']},nr_inodes=20000"
    quiet = _MS_NOSUID | _MS_NODEV
    _mount("tmpfs", "/scratch", "tmpfs", quiet, f"{size},mode=755")
    os.mkdir("/scratch/upper")
    os.mkdir("/scratch/work")
    options = f"lowerdir={base},upperdir=/scratch/upper,workdir=/scratch/work,userxattr"
    _mount("overlay", "/w", "overlay", quiet, options)
    upper = os.open("/scratch/upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for hidden in ("/scratch", settings["base"]):
        _mount("tmpfs", hidden, "tmpfs", quiet | _MS_RDONLY, "size=4k")
    _mount("tmpfs", "/tmp", "tmpfs", quiet, f"{size},mode=1777")
    for shared in ("/dev", settings["site"]):
        _mount(None, shared, None, quiet * (shared != "/dev") | _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID)
    _mount("tmpfs", "/dev/shm", "tmpfs", quiet, "size=1m,mode=1777")
    try:
        _mount("proc", "/proc", "proc", quiet)
    except OSError:  # some kernels let no proc be mounted here: then there is none
        _mount("tmpfs", "/proc", "tmpfs", quiet | _MS_RDONLY, "size=4k")
    return "/w", upper


def _copy(own, base):
    """A copy of the tree in the folder of the run, beside an empty one for what is temporary."""
    shutil.copytree(base, own + "/w", symlinks=True)
    os.mkdir(own + "/tmp")
    return own + "/w"


def _limit(limits, isolated):
    cpu = max(1, int(limits["cpu_s"]))
    others = 0 if isolated else _tasks_of(os.getuid())  # the kernel counts them, too
    for what, value in (
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NPROC, limits["processes"] + others),
        (resource.RLIMIT_NOFILE, 256),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (value, value))


def _tasks_of(uid):
    """How many tasks (threads of processes) a user has."""
    found = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                found += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it has just ended
            continue
    return found


def _drop():
    """No capability, now or after an exec, and no system call that could win one back."""
    _libc.prctl(_PR_CAP_AMBIENT, 4, 0, 0, 0)  # clear all
    _check(_libc.prctl(_PR_SET_SECUREBITS, 0x2F, 0, 0, 0), "securebits")  # no root, no fixup, locked
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    for capability in range(last + 1):
        _check(_libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0), f"bounding capability {capability}")
    header = struct.pack("Ii", 0x20080522, 0)
    _check(_libc.syscall(_number("capset"), header, bytes(24)), "capset")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    _filter()


# System calls that untrusted code has no use for: (x86_64, aarch64).
_REFUSED = {
    "ptrace": (101, 117), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "kexec_load": (246, 104), "init_module": (175, 105), "finit_module": (313, 273),
    "open_by_handle_at": (304, 265), "io_uring_setup": (425, 425), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsmount": (432, 432), "mount_setattr": (442, 442), "pidfd_getfd": (438, 438),
}  # fmt: skip
_OTHER = {"clone": (56, 220), "clone3": (435, 435), "capset": (126, 91)}
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def _number(name):
    return (_REFUSED | _OTHER)[name][_ARCHITECTURES[platform.machine()][0]]


def _filter():
    """Install a seccomp filter that refuses `_REFUSED`, and clone with a new user namespace."""
    column, architecture = _ARCHITECTURES[platform.machine()]
    eperm, enosys, allow = 0x00050001, 0x00050026, 0x7FFF0000
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, eperm), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, 0x40000000), (give, 0, 0, eperm)]  # the x32 names of the same calls
    for numbers in _REFUSED.values():
        code += [(equal, 0, 1, numbers[column]), (give, 0, 0, eperm)]
    code += [(equal, 0, 1, _OTHER["clone3"][column]), (give, 0, 0, enosys)]  # its flags cannot be read: use clone
    code += [(equal, 0, 3, _OTHER["clone"][column]), (load, 0, 0, 16), (any_bit, 0, 1, 0x10000000)]
    code += [(give, 0, 0, eperm), (give, 0, 0, allow)]
    blob = b"".join(struct.pack("HBBI", *line) for line in code)
    buffer = ctypes.create_string_buffer(blob)
    program = struct.pack("HP", len(code), ctypes.addressof(buffer))
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(program), 0, 0), "seccomp")


def _mount(source, target, kind, flags, options=None):
    args = [None if text is None else text.encode() for text in (source, target, kind)]
    _check(_libc.mount(*args, ctypes.c_ulong(flags), options.encode() if options else None), f"mount {target}")


def _check(result, what):
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


# --- files ----------------------------------------------------------------------------------------------------------


def write_files(folder, files):
    """{path: None (delete), [text, "utf-8" or "base64", mtime]} under `folder`, which is made. What is in the way of
    a file, or of a folder for it, goes."""
    os.makedirs(folder, exist_ok=True)
    made = set()
    for path in (path for path, content in files.items() if content is None):
        _remove(os.path.join(folder, path))
    for path, content in files.items():
        if content is None:
            continue
        full = os.path.join(folder, path)
        parent = os.path.dirname(full)
        if parent not in made:
            _make_folder(folder, parent)
            made.add(parent)
        text, encoding, mtime = content
        data = base64.b64decode(text) if encoding == "base64" else text.encode()
        if os.path.isdir(full) or os.path.islink(full):
            _remove(full)
            made = {folder}
        with open(full, "wb") as file:
            file.write(data)
        if mtime is not None:
            os.utime(full, (mtime, mtime))


def _remove(full):
    if os.path.isdir(full) and not os.path.islink(full):
        shutil.rmtree(full)
    elif os.path.lexists(full):
        os.unlink(full)


def _make_folder(top, folder):
    """Make a folder below `top`, in place of files and links on the way."""
    place = top
    for name in os.path.relpath(folder, top).split("/"):
        place = os.path.join(place, name)
        if os.path.islink(place) or not os.path.isdir(place):
            _remove(place)
            os.mkdir(place)


def _forget_compiled(folder, files):
    """Remove what was compiled of files that are others now: it is the code of the tree, which may be the answer."""
    for path in files:
        top, name = os.path.split(os.path.join(folder, path))
        cache = os.path.join(top, "__pycache__")
        if name.endswith(".py") and os.path.isdir(cache):
            for other in os.listdir(cache):
                if other.startswith(name[:-2]):
                    os.unlink(os.path.join(cache, other))


def _changed(upper, folder, given, base, most_bytes):
    """{"files": {path: text or None}, "refused": [path], "gone": [folder]} that a run changed.

    As JSON it has at most `most_bytes`: texts take half of them, and what no longer fits is refused, then left out.
    Without an overlay (`upper` None), what is not as it was `given`, or in `base`: times are too coarse to tell.
    """
    files, refused, gone = {}, [], []
    room = {"texts": most_bytes // 2, "names": most_bytes // 2 - 100}  # of 100: what is around them

    def fits(what, *parts):
        left = room[what] - sum(len(json.dumps(part)) + 2 for part in parts)
        room[what] = left if left >= 0 else room[what]
        return left >= 0

    walk = os.fwalk(".", dir_fd=upper, follow_symlinks=False) if upper is not None else os.fwalk(folder)
    seen = set()
    for top, folders, names, fd in walk:
        place = os.path.relpath(top, "." if upper is not None else folder)
        if upper is not None and _is_opaque(fd) and _plain(place) == place and fits("names", place):
            gone.append(place)
        folders[:] = [name for name in folders if name not in ("__pycache__", ".pytest_cache")]
        for name in [*names, *(n for n in folders if _is_link(n, fd))]:
            path = os.path.normpath(os.path.join(place, name))
            seen.add(path)
            info = _status(name, fd)
            if info is None:
                continue
            if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:  # an overlay's mark of what was deleted
                if fits("names", path, None):
                    files[path] = None
                continue
            if upper is None and _unchanged(name, fd, info, given.get(path), os.path.join(base, path)):
                continue
            text = _read(name, fd, info) if len(files) < _MOST_FILES and _plain(path) == path else None
            if text is not None and fits("texts", path, text):
                files[path] = text
            elif len(refused) < _MOST_FILES and fits("names", _plain(path)):
                refused.append(_plain(path))
    if upper is None:
        for top, _, names in os.walk(base):
            paths = (os.path.normpath(os.path.join(os.path.relpath(top, base), name)) for name in names)
            missing = [path for path in paths if path not in seen and "__pycache__" not in path]
            files.update({path: None for path in missing if fits("names", path, None)})
        missing = [path for path, was in given.items() if was is not None and path not in seen]
        files.update({path: None for path in missing if fits("names", path, None)})
    return {"files": files, "refused": refused, "gone": gone}


def _status(name, folder):
    """What a name in a folder is, or None where somebody has just removed it."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _is_link(name, folder):
    info = _status(name, folder)
    return info is not None and stat.S_ISLNK(info.st_mode)


def _unchanged(name, folder, info, given, base):
    """Whether a file has what it was `given`, else what `base` has."""
    if stat.S_ISLNK(info.st_mode):
        try:
            return given is None and os.path.islink(base) and os.readlink(base) == os.readlink(name, dir_fd=folder)
        except OSError:  # it is none any more
            return False
    if not stat.S_ISREG(info.st_mode) or (given is None and not os.path.isfile(base)):
        return False
    if given is not None:
        text, encoding, _ = given
        was = base64.b64decode(text) if encoding == "base64" else text.encode()
    elif os.path.getsize(base) != info.st_size:
        return False
    else:
        with open(base, "rb") as file:
            was = file.read()
    try:
        with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder), "rb") as file:
            return file.read() == was
    except OSError:  # it may not be read any more
        return False


def _plain(path):
    """A path as text that can be sent: file names need not be text."""
    return path.encode(errors="backslashreplace").decode()


def _is_opaque(folder):
    """Whether a folder of an overlay stands in place of the one below, of which nothing shows."""
    try:
        return os.getxattr(folder, "user.overlay.opaque") == b"y"
    except OSError:
        return False


def _read(name, folder, info):
    if not stat.S_ISREG(info.st_mode) or info.st_size > _MOST_FILE_BYTES:
        return None
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        with os.fdopen(fd, "rb") as file:
            return file.read(_MOST_FILE_BYTES).decode()
    except (OSError, UnicodeDecodeError):
        return None


# --- messages -------------------------------------------------------------------------------------------------------


def _receive(link):
    fds = array.array("i")
    head, ancillary, _, _ = link.recvmsg(8, socket.CMSG_SPACE(3 * fds.itemsize))
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    head += _exactly(link, 8 - len(head)) if head else b""
    if len(head) < 8:
        return None, ()
    return json.loads(_exactly(link, struct.unpack("!Q", head)[0])), list(fds)


def _exactly(link, n):
    parts = []
    while n:
        part = link.recv(min(n, 1 << 20))
        if not part:
            raise EOFError("the link closed in a message")
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def _send(link, message):
    data = json.dumps(message).encode()
    link.sendall(struct.pack("!Q", len(data)) + data)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
