"""What the code world runs in its sandbox: a suite, with a report that is hard to forge; calls; a trace of calls.

The text of this file is the `program` of a Sandbox (envs/sandbox.py); nothing imports it. `warm` runs once, trusted,
and each of the others in a process of its own, over code that may be hostile. Nothing that runs in one process can be
wholly safe from it. So what a report says is believed only with the run's nonce, with every canary as it must be (the
grader adds tests that have to fail), with nothing of pytest, unittest or builtins replaced, with no plugin that came
while tests ran, and where the task has hidden calls, after `calls`, in another process, gave the right values, which
the grader compares outside.
"""

import ast
import importlib
import itertools
import json
import math
import os
import signal
import sys

_SEALED = ("pytest", "_pytest", "pluggy", "unittest", "builtins", "json", "operator")
_WATCHED = frozenset(
    {
        "gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys._current_frames", "sys.setprofile",
        "sys.settrace", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system", "os.kill", "os.killpg",
        "os.symlink", "os.link", "os.chmod", "os.rename", "os.remove", "subprocess.Popen", "socket.connect",
        "socket.bind", "socket.getaddrinfo", "ctypes.dlopen", "ctypes.dlsym", "code.__new__", "sys.addaudithook",
    }
)  # fmt: skip
_MOST_TEXT = 600  # characters of a value, a call or a message
_CALL_CPU_S, _CALL_WALL_S = 0.5, 5.0  # of one call: the machine may be busy with others, or the call may sleep
_PLAIN = (int, float, str, bytes, bool, type(None))


def warm():
    """Import what a suite needs."""
    import contextlib
    import datetime  # noqa: F401
    import decimal  # noqa: F401
    import fractions  # noqa: F401
    import io
    import subprocess  # noqa: F401
    import tempfile
    import unittest.mock  # noqa: F401

    import pytest

    with tempfile.TemporaryDirectory() as empty, contextlib.redirect_stdout(io.StringIO()):
        pytest.main(["-q", "-c", "/dev/null", "--rootdir", empty, "-p", "no:cacheprovider", empty])
    os.chdir("/")


def prepare(folder):
    """Compile a tree. Its files keep an old time, so that one which is changed is compiled anew."""
    import compileall
    import warnings

    with warnings.catch_warnings():  # of old syntax: nobody would read them
        warnings.simplefilter("ignore")
        compileall.compile_dir(folder, quiet=2)


def tests(arguments, send):
    """Run the suite. Sends lines: {"nonce", "n": from 0, "id", "when", "outcome": passed, failed, error, skipped,
    "message"} of each outcome at once, so that nothing here holds what was said; {"nonce", "n", "broken", "events"} at
    the end.

    arguments: nonce; paths of tests; python_path; show (print as pytest does); messages (of what failed).
    """
    import pytest

    dumps, exit_, nonce, printed = json.dumps, os._exit, arguments.pop("nonce"), (sys.stdout, sys.stderr)
    events, lines = set(), itertools.count()

    def say(**more):
        send(dumps({"nonce": nonce, "n": next(lines), **more}).encode() + b"\n")

    plugins, foreign = set(), ["no end of the session"]

    class Recorder:
        def pytest_collection(self, session):
            plugins.update(session.config.pluginmanager.get_plugins())

        def pytest_sessionfinish(self, session):
            new = session.config.pluginmanager.get_plugins() - plugins
            foreign[:] = [repr(one) for one in new if not getattr(one, "__file__", "").endswith("/conftest.py")]

        def pytest_runtest_logreport(self, report):
            outcome = report.outcome
            if outcome == "failed" and report.when != "call":
                outcome = "error"
            if outcome == "passed" and (report.when != "call" or hasattr(report, "wasxfail")):
                return
            asked = outcome in ("failed", "error") and arguments["messages"]
            message = _crash(report) if asked else None
            when = report.when if type(report).__name__ == "TestReport" else "part"  # of a test: there may be many
            say(id=report.nodeid, when=when, outcome=outcome, message=message)

        def pytest_collectreport(self, report):
            if report.failed:
                message = _crash(report) if arguments["messages"] else None
                say(id=report.nodeid, when="collect", outcome="error", message=message)

    sys.path[:0] = [os.path.abspath(path) for path in arguments["python_path"]]
    options = ["-c", "/dev/null", "--rootdir", os.getcwd(), "-p", "no:cacheprovider"]
    options += ["-q", "--tb=short"] if arguments["show"] else ["-qq", "--tb=no", "--assert=plain"]
    options += ["--continue-on-collection-errors", "--color=no", *arguments["options"], *arguments["paths"]]
    seal = _seal()
    watched = _WATCHED

    def watch(event, _):
        if event in watched:
            events.add(event)

    sys.addaudithook(watch)
    pytest.main(options, plugins=[Recorder()])
    broken = seal() + foreign
    say(broken=broken, events=sorted(events))
    for stream in printed:  # the exit would drop what they still hold: most of what pytest says of a failure
        stream.flush()
    exit_(0)


def _crash(report):
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else str(report.longrepr))[:_MOST_TEXT]


def _seal():
    """Remember what pytest, unittest and builtins are made of. The function it gives names what is no longer that."""

    def parts():
        for name, module in list(sys.modules.items()):
            if module is not None and name.partition(".")[0] in _SEALED:
                yield name, vars(module)
                for key, value in list(vars(module).items()):
                    if isinstance(value, type) and getattr(value, "__module__", None) == name:
                        yield f"{name}.{key}", vars(value)

    before = {name: (holder, dict(holder)) for name, holder in parts()}
    sealed = {id(fn): (fn, _inner(fn)) for _, held in before.values() for fn in held.values() if _is_function(fn)}

    def broken():
        found = []
        for name, (holder, was) in before.items():
            found += [f"{name}.{key}" for key, value in was.items() if holder.get(key, broken) is not value]
        for name, (holder, was) in before.items():
            found += [f"{name}.{key}" for key, value in list(holder.items()) if key not in was and _is_function(value)]
        for fn, inner in sealed.values():
            if any(now is not then for now, then in zip(_inner(fn), inner)):  # noqa: B905 (always three)
                found.append(f"{fn.__module__}.{fn.__qualname__}()")
        return sorted(found)[:50]

    return broken


def _inner(function):
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _is_function(value):
    return type(value) is type(_is_function)


# --- calls ----------------------------------------------------------------------------------------------------------


def calls(arguments, send):
    """Make each call of arguments["calls"], [module, function, arguments as text], and send what came of it, as text.

    "= value", "! exception", "? type" of a value that has no text.
    """
    sys.path[:0] = [os.path.abspath(path) for path in arguments["python_path"]]
    dumps, exit_ = json.dumps, os._exit
    results = [_outcome(*call) for call in arguments["calls"]]
    send(dumps({"nonce": arguments["nonce"], "results": results}).encode())
    exit_(0)


class _TooLong(BaseException):
    pass


def _outcome(module, name, text):
    def stop(number, frame):
        raise _TooLong

    signal.signal(signal.SIGALRM, stop)
    signal.signal(signal.SIGPROF, stop)
    try:
        function = importlib.import_module(module)  # the first one takes its time: the run's limits are for it
        signal.setitimer(signal.ITIMER_REAL, _CALL_WALL_S)
        signal.setitimer(signal.ITIMER_PROF, _CALL_CPU_S)
        for part in name.split("."):
            function = getattr(function, part)
        value = function(*ast.literal_eval(text))
        if hasattr(value, "__next__"):
            value = list(itertools.islice(value, 50))
        said = _text(value, objects=True)
        return f"? {type(value).__name__}" if said is None else f"= {said}"
    except _TooLong:
        return "! time"
    except BaseException as err:
        return f"! {type(err).__name__}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _text(value, depth=4, *, objects=False):
    """`repr` of a value made of plain types alone; None for any other. `objects`: of others what they say, too."""
    kind = type(value)
    if kind in _PLAIN:
        if kind is float and not math.isfinite(value) and not objects:
            return None
        said = repr(value)
    elif depth and kind in (list, tuple, set, dict):
        parts = list(value.items()) if kind is dict else sorted(value, key=repr) if kind is set else list(value)
        inner = [_text(part, depth - 1, objects=objects) for part in parts]
        if None in inner or (kind is set and not inner and not objects):
            return None
        if kind is dict:
            keys = [(_text(k, depth - 1, objects=objects), _text(v, depth - 1, objects=objects)) for k, v in parts]
            said = "{" + ", ".join(f"{k}: {v}" for k, v in keys) + "}"
        else:
            left, right = {list: "[]", tuple: "()", set: "{}"}[kind]
            said = left + ", ".join(inner) + ("," if kind is tuple and len(inner) == 1 else "") + right
    elif objects:
        said = f"<{kind.__module__}.{kind.__qualname__}> {value!r}"
        if " at 0x" in said:
            return None
    else:
        return None
    return said if len(said) <= _MOST_TEXT else None


def trace(arguments, send):
    """Run the suite and send which calls of top-level functions of arguments["sources"] it made, with their arguments.

    {"calls": [[module, function, arguments as text]]}, each once, at most arguments["most"] of one function.
    """
    import pytest

    sources = {os.path.abspath(path) for path in arguments["sources"]}
    seen, most = {}, arguments["most"]

    def watch(frame, event, _):
        code = frame.f_code
        if event != "call" or code.co_filename not in sources or code.co_flags & 0x0C or code.co_kwonlyargcount:
            return
        function = frame.f_globals.get(code.co_name)
        function = getattr(function, "__wrapped__", function)
        if getattr(function, "__code__", None) is not code:
            return
        found = seen.setdefault((frame.f_globals["__name__"], code.co_name), {})
        if len(found) < most:
            values = tuple(frame.f_locals[name] for name in code.co_varnames[: code.co_argcount])
            text = _text(values)
            if text is not None:
                found[text] = None

    sys.path[:0] = [os.path.abspath(path) for path in arguments["python_path"]]
    options = ["-c", "/dev/null", "--rootdir", os.getcwd(), "-p", "no:cacheprovider", "-qq"]
    sys.setprofile(watch)
    try:
        pytest.main([*options, "--tb=no", "--assert=plain", *arguments["options"], *arguments["paths"]])
    finally:
        sys.setprofile(None)
    made = [[module, name, text] for (module, name), found in seen.items() for text in found]
    send(json.dumps({"nonce": arguments["nonce"], "calls": made}).encode())
    os._exit(0)
