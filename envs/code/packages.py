"""The repositories: source distributions of small pure-Python packages with their own tests, pinned by their hashes.

pip fetches them into `data_dir`/sdists on first use; they are read as archives and never installed. `before` is an
earlier release, whose differences are real fixes (tasks.py).
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import io
import pathlib
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence

TREE_TIME = 1_000_000_000  # of every file of a tree: any change is later
_MOST_FILE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Package:
    """Where its sources and tests are, as paths in its repository; a folder ends in /."""

    name: str
    version: str
    sha256: str
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    python_path: tuple[str, ...] = (".",)
    before: tuple[str, str] | None = None  # (version, sha256)
    split: str = "train"  # of its tasks; functions of a training package may be held out, too
    options: tuple[str, ...] = ()  # of pytest: tests that need what is not here
    helpers: tuple[str, ...] = ()  # what else is the tests', and is not run by itself


PACKAGES: Mapping[str, Package] = {
    p.name: p
    for p in (
        Package("cachetools", "8.0.2", "30ac523adfc118b51d2b2e7bad8a0ddb31370dfe2700c7f10ca224f36ccf81e0",
                ("src/cachetools/",), ("tests/",), ("src", "."),
                options=("--ignore=tests/test_threading.py",)),  # it waits
        Package("inflection", "0.5.1", "1a29730d366e996aaacffb2f1f1cb9593dc38e2ddd30c91250c6dde09ea9b417",
                ("inflection/",), ("test_inflection.py",), split="validation"),
        Package("isodate", "0.7.2", "4cd1aa0f43ca76f4a6c6c0292a85f40b35ec2e43e315b59f06e6d32171a953e6",
                ("src/isodate/",), ("tests/",), ("src",)),
        Package("jsonpointer", "3.12", "7a3dcc11b64053eaa9c549e85e413f8d40a075215f793a331bed9182a14251ae",
                ("jsonpointer.py",), ("tests.py",), split="test",
                options=("-k", "not CommandLineTests and not DocExampleTests"),
                before=("3.0.0", "2b2d729f2091522d61c3b31f82e11870f60b68f43fbc705cb76bf4b832af59ef")),
        Package("parse", "1.22.4", "706d458feed5a81b02768d3156e8070baf6cee7d150a3a3c0cd43101a875c3b5",
                ("parse/",), ("tests/",),
                before=("1.20.2", "b41d604d16503c79d81af5165155c0b20f6c8d6c559efa66b4b695c3e5a0a0ce")),
        Package("schema", "0.7.8", "e86cc08edd6fe6e2522648f4e47e3a31920a76e82cce8937535422e310862ab5",
                ("schema/",), ("test_schema.py",),
                before=("0.7.7", "7da553abd2958a19dc2547c388cde53398b39196175a9be59ea1caf5ab0a1807")),
        Package("semver", "3.1.2", "bea193552413194252d33ff26ce0962b76669bd1c6fb17e8e203ac37f072feaf",
                ("src/semver/",), ("tests/",), ("src", "tests"),
                before=("3.0.4", "afc7d8c584a5ed0a11033af086e8af226a9c0b206f313e0301f8dd7b6b589602")),
        Package("simpleeval", "1.0.8", "b417f869c11f2de034eb919820a825f35d12ce99f63a43971947ce73679eb9ba",
                ("simpleeval.py",), ("tests/",),
                before=("1.0.3", "67bbf246040ac3b57c29cf048657b9cf31d4e7b9d6659684daa08ca8f1e45829")),
        Package("tabulate", "0.10.0", "e2cfde8f79420f6deeffdeda9aaec3b6bc5abce947655d17ac662b126e48a60d",
                ("tabulate/",), ("test/",), (".", "test"),
                options=("--ignore=test/test_cli.py",),  # it starts processes
                before=("0.9.0", "0095b12bf5966de529c0feb1fa08671671b3368eec77d7ef7ab114be2c068b3c")),
        Package("toolz", "1.2.0", "9667a038e9d6ecba37995e26cb2f59ec6420b6ad8dd9677de59db9b956b08490",
                ("toolz/",), ("toolz/tests/",), helpers=("toolz/utils.py",),
                before=("1.0.0", "2c86e3d9a04798ac556793bced838816296a2f085017664e4995cb40a1047a02")),
        Package("unidiff", "1.0.1", "d9425bc516390c54743a1045b2c1c97f02d245a913a241dd499f958adb2df998",
                ("unidiff/",), ("tests/",), split="test",
                before=("0.7.5", "2e5f0162052248946b9f0970a40e9e124236bf86c82b70821143a6fc1dea2574")),
        Package("voluptuous", "0.16.0", "006535e22fed944aec17bef6e8725472476194743c87bd233e912eb463f8ff05",
                ("voluptuous/",), ("voluptuous/tests/tests.py",),
                before=("0.15.2", "6ffcab32c4d3230b4d2af3a577c87e1908a714a11f6f95570456b1849b0279aa")),
        Package("webcolors", "25.10.0", "62abae86504f66d0f6364c2a8520de4a0c47b80c03fc3a5f1815fedbef7c19bf",
                ("src/webcolors/",), ("tests/",), ("src", "."), split="test"),
        Package("xmltodict", "1.0.4", "6d94c9f834dd9e44514162799d344d815a3a4faec913717a9ecbfa5be1bb8e61",
                ("xmltodict.py",), ("tests/",),
                before=("0.14.2", "201e7c28bb210e374999d1dde6382923ab0ed1a8a5faeece48ab525b7810a553")),
    )
}  # fmt: skip


class NoPackage(ValueError):
    """A source distribution that cannot be had, or is not the one that was pinned."""


def fetch(names: Sequence[str], data_dir: pathlib.Path) -> None:
    """Have the source distributions of `names`, and of the releases before, in `data_dir`/sdists. Raises NoPackage."""
    wanted = []
    for name in names:
        package = PACKAGES[name]
        wanted += [(name, *release) for release in ((package.version, package.sha256), package.before) if release]
    missing = [release for release in wanted if _archive(data_dir, *release[:2]) is None]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda release: _download(data_dir, *release), missing))


@functools.lru_cache(maxsize=64)
def tree(data_dir: pathlib.Path, name: str, version: str, sha256: str) -> Mapping[str, bytes]:
    """{path: content} of a source distribution: what is text or small, and no metadata. Raises NoPackage."""
    archive = _archive(data_dir, name, version)
    if archive is None:
        raise NoPackage(f"{name} {version} is not in {data_dir / 'sdists'}; fetch it first")
    data = archive.read_bytes()
    got = hashlib.sha256(data).hexdigest()
    if got != sha256:
        raise NoPackage(f"{archive}: got sha256 {got}, want {sha256}; delete it, and it is fetched again")
    files = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar.getmembers():
            path = member.name.partition("/")[2]
            if not member.isfile() or member.size > _MOST_FILE_BYTES or ".." in path or not path:
                continue
            if ".egg-info/" in path or path == "PKG-INFO" or path.startswith((".git", "doc")):
                continue
            files[path] = tar.extractfile(member).read()
    return files


def package_tree(data_dir: pathlib.Path, package: Package) -> Mapping[str, bytes]:
    """The repository of a package as it was released."""
    return tree(data_dir, package.name, package.version, package.sha256)


def is_source(package: Package, path: str) -> bool:
    """Whether a path is one of the package's own modules, or would be a new one; or a source of any kind by name."""
    inside = path.endswith(".py") and any(path.startswith(folder) for folder in package.sources if folder[-1:] == "/")
    return (inside or path in package.sources) and not is_test(package, path)


def is_test(package: Package, path: str) -> bool:
    """Whether a path belongs to the tests."""
    theirs = (*package.tests, *package.helpers)
    return any(path == test or (test.endswith("/") and path.startswith(test)) for test in theirs)


def _archive(data_dir: pathlib.Path, name: str, version: str) -> pathlib.Path | None:
    path = data_dir / "sdists" / f"{name}-{version}.tar.gz"
    return path if path.is_file() else None


def _download(data_dir: pathlib.Path, name: str, version: str, sha256: str) -> None:
    folder = data_dir / "sdists"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        pins = pathlib.Path(temporary) / "pins.txt"
        pins.write_text(f"{name}=={version} --hash=sha256:{sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", ":all:", "--require-hashes", "--dest", temporary, "-r", str(pins)]
        done = subprocess.run(command, capture_output=True, text=True)
        found = list(pathlib.Path(temporary).glob("*.tar.gz"))
        if done.returncode or len(found) != 1:
            raise NoPackage(
                f"{name} {version} cannot be had (pip ended with {done.returncode}): {done.stderr.strip()[-400:]}; "
                f"put its source distribution into {folder}, or give a network"
            )
        found[0].replace(folder / f"{name}-{version}.tar.gz")
