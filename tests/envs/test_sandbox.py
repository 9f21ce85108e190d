"""The sandbox: runs are fresh, limits hold, and no attack on the machine around it succeeds."""

import base64
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from envs import sandbox
from envs.sandbox import Limits, NoSandbox, Sandbox, SandboxError

SHORT = Limits(wall_s=3.0, cpu_s=3)
PROGRAM = "def echo(arguments, send):\n    send(repr(arguments).encode())\n\n\ndef die(arguments, send):\n    1 / 0\n"
reason = sandbox.why_not()
isolated = pytest.mark.skipif(reason is not None, reason=f"no namespaces here: {reason}")
try:
    PYTHON = sandbox.interpreter()[0]
except NoSandbox as err:
    pytest.skip(str(err), allow_module_level=True)


WALLS = [pytest.param(None, marks=isolated, id="isolated"), pytest.param(False, id="limits")]


@pytest.fixture(scope="module", params=WALLS)
def box(request):
    made = Sandbox(program=PROGRAM, accept_rlimits=request.param is False, isolate=request.param)
    made.load("tree", {"a.txt": "hello\n", "d/b.txt": "there\n"})
    yield made
    made.close()


def python(box, code, limits=SHORT, **more):
    return box.run([PYTHON, "-I", "-S", "-c", code], tree="tree", limits=limits, **more)


def test_a_run_sees_a_fresh_tree(box):
    command = "cat a.txt; echo x > a.txt; rm d/b.txt; echo n > new; ln -s /etc/passwd l"
    ran = box.run(["sh", "-c", command], tree="tree", keep=True)
    assert ran.rc == 0 and ran.output == "hello\n"
    changed = json.loads(ran.report)
    assert changed == {"files": {"a.txt": "x\n", "d/b.txt": None, "new": "n\n"}, "refused": ["l"], "gone": []}
    again = box.run(["sh", "-c", "cat a.txt d/b.txt; ls"], tree="tree", files={"a.txt": "mine\n", "d/b.txt": None})
    assert again.output.startswith("mine\n") and "new" not in again.output


def test_calls_and_their_faults(box):
    assert box.run(call="echo", arguments=[1, "a"]).report == b"[1, 'a']"
    died = box.run(call="die")
    assert died.rc == 97 and "ZeroDivisionError" in died.output and died.report == b""


def test_files_that_cannot_be_written_are_no_fault(box):
    for path in ("x" * 300, "\ud800"):
        ran = box.run(["true"], tree="tree", files={path: "x"})
        assert ran.rc == 98 and "cannot be written" in ran.output
    ran = box.run(["cat", "a.txt/x", "d"], tree="tree", files={"a.txt/x": "1\n", "d": "2\n"})
    assert ran.rc == 0 and ran.output == "1\n2\n"  # what is in the way goes


def test_what_was_compiled_of_another_text_is_gone(box):
    compiled = "d/__pycache__/m.cpython-311.pyc"
    box.load("compiled", {"d/m.py": "x = 1\n", compiled: b"1", "d/__pycache__/n.cpython-311.pyc": b"1"})
    ran = box.run(["ls", "d/__pycache__"], tree="compiled", files={"d/m.py": "x = 2\n"})
    assert ran.output == "n.cpython-311.pyc\n"


def test_a_change_in_the_same_tick_is_seen_and_what_was_given_is_none(box):
    for _ in range(10):
        ran = box.run(["sh", "-c", "echo x > a.txt"], tree="tree", keep=True, files={"d/b.txt": "mine\n"})
        assert json.loads(ran.report)["files"]["a.txt"] == "x\n"
    if not box.isolated:
        assert set(json.loads(ran.report)["files"]) == {"a.txt"}


def test_file_names_that_are_no_text_are_refused(box):
    code = "import os\nopen(b'\\xff', 'w').close()\nopen('ok', 'w').close()"
    changed = json.loads(python(box, code, keep=True).report)
    assert changed["files"] == {"ok": ""} and changed["refused"] == ["\\udcff"]


SCAN = """
def prepare(folder):
    with open(folder + "/a.txt") as file:
        file.read()


def scan(arguments, send):
    found = []
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in list(maps):
            low, high = (int(x, 16) for x in line.split()[0].split("-"))
            if "[v" in line or " r" not in line:
                continue
            memory.seek(low)
            try:
                data = memory.read(high - low)
            except OSError:
                continue
            for n, (first, second) in enumerate(arguments):  # in halves: this must not find itself
                first, at = first.encode(), -1
                while (at := data.find(first, at + 1)) >= 0:
                    if data[at + len(first) : at + 2 * len(first)] == second.encode():
                        found.append(n)
    send(repr(sorted(set(found))).encode())
"""


@pytest.mark.parametrize("isolate", WALLS)
def test_no_run_has_a_tree_or_another_run_in_its_memory(isolate):
    plain, coded, other, own = (os.urandom(48).hex() for _ in range(4))
    in_base64 = base64.b64encode(coded.encode()).decode()
    halves = [(x[: len(x) // 2], x[len(x) // 2 :]) for x in (plain, coded, in_base64, other, own)]
    made = Sandbox(program=SCAN, accept_rlimits=isolate is False, isolate=isolate)
    made.load("answer", {"a.txt": plain, "b.txt": coded.encode()})
    made.run(["true"], tree="answer", files={"a.txt": other})
    ran = made.run(call="scan", arguments=halves, tree="answer", files={"a.txt": own})
    made.close()
    assert ran.report == b"[4]", ran  # the fifth shows that the scan finds what there is


def test_no_signal_ends_what_prepares_a_run(box):
    code = "import os, signal, time\nfor number in signal.valid_signals():\n    if number not in (9, 17, 19):\n"
    code += "        try:\n            os.kill(os.getppid(), number)\n        except OSError:\n            pass\n"
    code += "time.sleep(0.3)\nopen('n', 'w').close()\nprint('alive', flush=True)\nos.kill(os.getpid(), 15)\n"
    ran = python(box, code, Limits(), keep=True)
    assert ran.output == "alive\n" and ran.rc == 143 and json.loads(ran.report)["files"] == {"n": ""}


def test_what_is_kept_is_bounded_and_the_rest_is_named(box):
    fill = "import os\nfor n in range(45):\n    open(f'f{n}', 'w').write('\\a' * 250_000)\nopen('small', 'w').close()\n"
    ran = python(box, fill, Limits(), keep=True)
    changed = json.loads(ran.report)
    assert ran.rc == 0 and changed["files"].pop("small") == ""
    assert len(changed["files"]) == 2 and len(changed["refused"]) == 43  # each takes six bytes a character
    names = "for n in range(2000):\n    open('\\a' * 200 + str(n), 'w').close()\n"
    ran = python(box, names, keep=True, limits=Limits(report_bytes=200_000))
    assert 0 < len(json.loads(ran.report)["files"]) <= 200 and len(ran.report) <= 200_000


def test_files_that_come_and_go_while_they_are_read_are_no_fault(box):
    code = "i=0; while :; do for f in 1 2 3 4 5 6 7 8; do : > z$f; done; rm -f z1 z2 z3 z4 z5 z6 z7 z8; done"
    for _ in range(3):
        ran = box.run(["sh", "-c", f"({code}) >/dev/null 2>&1 & sleep 0.1; echo done"], tree="tree", keep=True)
        assert ran.output == "done\n" and set(json.loads(ran.report)["files"]) <= {f"z{n}" for n in range(1, 9)}


def test_no_descriptor_is_closed_twice(box, monkeypatch):
    """Another thread's file may have the number by then."""
    failed, close = [], os.close

    def watched(fd):
        try:
            close(fd)
        except OSError:
            failed.append(fd)

    monkeypatch.setattr(os, "close", watched)
    ran = python(box, "while True: print('x' * 1000)", Limits(wall_s=2, output_bytes=10_000))
    assert ran.truncated and not failed


@pytest.mark.parametrize("isolate", WALLS)
def test_a_server_that_says_much_or_hangs(isolate, monkeypatch):
    monkeypatch.setattr(sandbox, "_START_S", 3.0)
    program = "import sys, time\ndef prepare(folder):\n    sys.stderr.write('x' * (1 << 20))\n"
    program += "    if folder.endswith('hangs'): time.sleep(60)\n"
    made = Sandbox(program=program, accept_rlimits=isolate is False, isolate=isolate)
    made.load("says", {"a": "x"})
    made.load("hangs", {"a": "x"})
    assert made.run(["true"], tree="says").rc == 0
    begun = time.monotonic()
    with pytest.raises(SandboxError, match="timed out"):
        made.run(["true"], tree="hangs")
    assert time.monotonic() - begun < 6
    made.close()


def test_without_namespaces_no_file_is_left(tmp_path):
    bare = Sandbox(accept_rlimits=True, isolate=False)
    root = bare._root
    bare.run(["sh", "-c", "head -c 1000 /dev/zero > big; echo x > $TMPDIR/x; sleep 9"], limits=Limits(wall_s=0.5))
    assert os.path.isdir(root) and not [name for name in os.listdir(root) if name.startswith("run-")]
    bare.close()
    assert not os.path.exists(root)


def test_a_slow_try_is_made_again(monkeypatch):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: name)
    sandbox._why_not.cache_clear()
    causes = [TimeoutError("timed out"), EOFError("closed"), EOFError("again")]

    def fail(**kwargs):
        raise SandboxError(str(causes[0])) from causes.pop(0)

    monkeypatch.setattr(sandbox, "Sandbox", fail)
    said = [sandbox.why_not() for _ in range(3)]
    sandbox._why_not.cache_clear()
    assert said == ["timed out", "closed", "closed"]


def test_what_is_missing_or_unreadable_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox, "_bubblewrap", lambda prefix: ["/no/such/bwrap"])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoSandbox, match="/no/such/bwrap; install it"):
        Sandbox(_checked=True)

    def refuse(path):
        raise PermissionError(13, "no")

    monkeypatch.setattr(sandbox.pathlib.Path, "is_file", refuse)
    with pytest.raises(NoSandbox, match="no Python"):
        sandbox.interpreter.__wrapped__()


def test_limits(box):
    begun = time.monotonic()
    ran = python(box, "import time; time.sleep(60)", Limits(wall_s=0.5))
    assert ran.stopped == "time" and time.monotonic() - begun < 3
    spun = python(box, "while True: pass", Limits(wall_s=60, cpu_s=1))
    assert spun.rc == 137 and spun.stopped is None
    flood = python(box, "while True: print('x' * 1000)", Limits(wall_s=2, output_bytes=10_000))
    assert flood.truncated and len(flood.output) == 10_000
    memory = Limits(wall_s=5, memory_bytes=200 << 20)
    assert "MemoryError" in python(box, "x = bytearray(1 << 30)", memory).output
    big = python(box, "open('big', 'wb').write(bytes(9 << 20))", Limits(wall_s=3, file_bytes=1 << 20))
    assert big.rc != 0
    forks = "import os\nn = 0\ntry:\n    for n in range(500):\n        if os.fork() == 0: import time; time.sleep(9)\n"
    ran = python(box, forks + "except OSError: print('refused at', n)", Limits(wall_s=2, processes=30))
    assert "refused at" in ran.output
    assert box.run(["true"]).rc == 0


def test_nothing_outlives_a_run(box, tmp_path):
    mark = f"outlive-{os.getpid()}-{box.isolated}"
    code = (
        "import os, sys, time\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0:\n"
        f"            os.execv({PYTHON!r}, [{PYTHON!r}, '-c', 'import time; time.sleep(60)', {mark!r}])\n"
        "        os._exit(0)\n"
        "time.sleep(TIME)\n"
    )
    for sleep in ("0.3", "60"):
        python(box, code.replace("TIME", sleep), Limits(wall_s=1.0))
        assert mark not in _command_lines()


def _command_lines():
    lines = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/cmdline") as file:
                    lines.append(file.read().replace("\0", " "))
            except OSError:
                continue
    return "\n".join(line for line in lines if "range(3)" not in line)


def test_a_dead_server_is_a_fault_and_comes_back(box):
    box._link.shutdown(socket.SHUT_RDWR)
    with pytest.raises(SandboxError, match="the sandbox failed"):
        box.run(["true"])
    assert box.run(["cat", "a.txt"], tree="tree").output == "hello\n"


def test_refuses_without_walls_and_bad_paths(monkeypatch):
    with pytest.raises(NoSandbox, match="accept_rlimits=True"):
        Sandbox(isolate=False)
    monkeypatch.setattr(sandbox, "why_not", lambda: "no bwrap")
    with pytest.raises(NoSandbox, match="untrusted code is refused: no bwrap"):
        Sandbox()
    for path in ("../x", "/etc/x", "a/../../x", ""):
        with pytest.raises(ValueError, match="below its folder"):
            sandbox._packed({path: "x"})


# --- attacks: each prints ESCAPED if it works -----------------------------------------------------------------------

TRY = "\ntry:\n    {}\n    print('ESCAPED')\nexcept OSError as err:\n    print('no', err)\n"
FILL = "try:\n    for n in range({}):\n        {}\n    print('ESCAPED')\nexcept OSError:\n    pass\n"
SYSCALL = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
SYSCALL += "def call(*a):\n    if libc.syscall(*a) < 0: raise OSError(ctypes.get_errno(), 'refused')\n"
CAPS = "caps = [l for l in open('/proc/self/status') if l.startswith(('CapEff', 'CapPrm', 'CapBnd'))]\n"

ATTACKS = {
    "read shadow": TRY.format("open('/etc/shadow').read()"),
    "read passwd": TRY.format("open('/etc/passwd').read()"),
    "read host file": TRY.format("open(HOST + '/secret').read()"),
    "list root": "import os" + TRY.format("os.listdir('/root')"),
    "list home": "import os" + TRY.format("os.listdir('/home')"),
    "list sys": "import os" + TRY.format("os.listdir('/sys')"),
    "other trees": "import os\nif os.listdir('/base') or os.listdir('/scratch'): print('ESCAPED')",
    "server memory": TRY.format(
        "at = int(open('/proc/1/maps').readline().partition('-')[0], 16)\n    m = open('/proc/1/mem', 'rb', 0)\n"
        "    m.seek(at); m.read(8)"
    ),
    "server descriptors": "import os\nfor fd in os.listdir('/proc/1/fd'):" + TRY.format(
        "os.open(f'/proc/1/fd/{fd}', os.O_RDONLY | os.O_NONBLOCK)"
    ).replace("\n", "\n  "),
    "disk device": TRY.format("open('/dev/vda', 'rb').read(1)"),
    "kernel memory": TRY.format("open('/dev/mem', 'rb').read(1)"),
    "write usr": TRY.format("open('/usr/x', 'w')"),
    "write etc": "import os" + TRY.format("os.makedirs('/etc/x')"),
    "write site": TRY.format("open('/site/pytest.py', 'w')"),
    "write root": TRY.format("open('/x', 'w')"),
    "write dev": TRY.format("open('/dev/x', 'w')"),
    "write host file": TRY.format("open(HOST + '/secret', 'w')"),
    "write sysctl": TRY.format("open('/proc/sys/kernel/core_pattern', 'w').write('|/bin/sh')"),
    "persist in tmp": "import os\nif os.path.exists('/tmp/p'): print('ESCAPED')\nopen('/tmp/p', 'w')",
    "persist in shm": "import os\nif os.path.exists('/dev/shm/p'): print('ESCAPED')\nopen('/dev/shm/p', 'w')",
    "persist in tree": "import os\nif os.path.exists('p'): print('ESCAPED')\nopen('p', 'w')",
    "connect to host": "import socket" + TRY.format("socket.create_connection(('127.0.0.1', PORT), 1)"),
    "connect out": "import socket" + TRY.format("socket.create_connection(('1.1.1.1', 53), 1)"),
    "abstract socket": "import socket" + TRY.format("socket.socket(socket.AF_UNIX).connect('\\0' + ABSTRACT)"),
    "raw socket": "import socket" + TRY.format("socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"),
    "kill host": "import os" + TRY.format("os.kill(VICTIM, 9)"),
    "kill all": "import os, signal\nsignal.signal(15, signal.SIG_IGN)\nos.kill(-1, 15)",
    "mount": SYSCALL + TRY.format("call(165, b'tmpfs', b'/w', b'tmpfs', 0, None)"),
    "unshare": SYSCALL + TRY.format("call(272, 0x10000000)"),
    "clone user": SYSCALL + TRY.format("call(56, 0x10000000 | 17, 0, 0, 0, 0)"),
    "ptrace": SYSCALL + TRY.format("call(101, 16, 1, 0, 0)"),
    "file handles": SYSCALL + TRY.format("call(304, -100, bytes(64), 0)"),
    "keys": SYSCALL + TRY.format("call(250, 0, 0, 0, 0, 0)"),
    "chroot": "import os" + TRY.format("os.chroot('/tmp')"),
    "mknod": "import os, stat" + TRY.format("os.mknod('/tmp/d', 0o600 | stat.S_IFBLK, os.makedev(254, 0))"),
    "capabilities": CAPS + "if any(int(l.split()[1], 16) for l in caps): print('ESCAPED', caps)",
    "descriptors": "import os\nn = len(os.listdir('/proc/self/fd'))\nif n > 4: print('ESCAPED', n)",
    "environment": "import os\nif 'HOST_SECRET' in os.environ: print('ESCAPED')",
    "hostname": "import socket" + TRY.format("socket.sethostname('x')"),
    "fill tmp": "f = open('/tmp/f', 'ab')\n" + FILL.format(400, "f.write(bytes(1 << 20)); f.flush()"),
    "fill tree": FILL.format(400, "open(f'f{n}', 'wb').write(bytes(1 << 20))"),
    "fill shm": FILL.format(99, "open(f'/dev/shm/f{n}', 'wb').write(bytes(1 << 20))"),
    "many files": FILL.format(50_000, "open(f'/tmp/{n}', 'w').close()"),
}  # fmt: skip


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory):
    """A secret file, a listener, a process, all of the host's, open to anybody."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "secret").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        name = f"wayfinder-{os.getpid()}"
        abstract.bind(f"\0{name}")
        abstract.listen()
        victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        yield {"HOST": str(folder), "PORT": server.getsockname()[1], "ABSTRACT": name, "VICTIM": victim.pid}, victim
        victim.kill()
        victim.wait()


@pytest.fixture(scope="module")
def walls():
    os.environ["HOST_SECRET"] = "1"
    made = Sandbox()
    made.load("tree", {"a.txt": "hello\n"})
    yield made
    made.close()
    del os.environ["HOST_SECRET"]


@isolated
@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_succeeds(name, walls, surroundings):
    places, victim = surroundings
    if "call(" in ATTACKS[name] and os.uname().machine != "x86_64":
        pytest.skip("the numbers are those of x86_64")
    code = "".join(f"{key} = {value!r}\n" for key, value in places.items()) + ATTACKS[name]
    for _ in range(2 if name.startswith("persist") else 1):
        ran = walls.run([PYTHON, "-I", "-S", "-c", code], tree="tree", limits=Limits(wall_s=8.0))
        assert "ESCAPED" not in ran.output and "SyntaxError" not in ran.output and "NameError" not in ran.output, ran
        assert ran.stopped is None and ran.rc in (0, -25, 153, 1), ran
    assert victim.poll() is None and open(f"{places['HOST']}/secret").read() == "secret"


def test_without_walls_some_of_them_do(surroundings):
    """The attacks are real: limits alone stop none of these."""
    places, _ = surroundings
    code = "".join(f"{key} = {value!r}\n" for key, value in places.items())
    bare = Sandbox(accept_rlimits=True, isolate=False)
    for name in ("read passwd", "connect to host", "abstract socket", "list home"):
        assert "ESCAPED" in bare.run([PYTHON, "-I", "-S", "-c", code + ATTACKS[name]]).output, name
    bare.close()


@isolated
def test_memory_of_many_processes_is_bounded(walls):
    code = "import os, time\nfor _ in range(4): os.fork()\nx = bytearray(b'1') * (60 << 20)\ntime.sleep(8)\n"
    ran = walls.run([PYTHON, "-I", "-S", "-c", code], limits=Limits(wall_s=8.0, memory_bytes=300 << 20))
    assert ran.stopped == "memory" and ran.seconds < 5
    assert walls.run(["true"]).rc == 0


@isolated
def test_folders_too_deep_to_be_read_are_no_fault(walls):
    code = "import os\nfor _ in range(1200):\n    os.mkdir('e')\n    os.chdir('e')\n"
    ran = python(walls, code, Limits(), keep=True)
    assert ran.rc == 0 and json.loads(ran.report)["files"] == {}
