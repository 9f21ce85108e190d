"""Law: worlds in many threads read sources at once, whatever else switches between them."""

import ast
import gc
import pathlib
import threading
import time

import envs.code
from envs.code import syntax


def test_threads_may_parse_at_once():
    """A collection of garbage amid a tree runs its callbacks, jax's for one, and another thread comes in."""
    source, failed = pathlib.Path(ast.__file__).read_text(), []

    def switch(phase, info):
        time.sleep(0.0001)

    def read():
        for _ in range(8):
            try:
                assert syntax.parse(source).body and syntax.literal("[1, 'a']") == [1, "a"]
            except SystemError as error:
                failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(8)]
    gc.callbacks.append(switch)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.callbacks.remove(switch)
    assert not failed


def test_no_world_parses_otherwise():
    folder = pathlib.Path(envs.code.__path__[0])
    alone = {"syntax.py", "inside.py", "cheats.py"}  # the last two: in a sandbox, where there is one thread
    others = [path for path in folder.glob("*.py") if path.name not in alone]
    assert len(others) > 10
    assert not [path.name for path in others if "ast.parse(" in path.read_text() or "literal_eval(" in path.read_text()]
