"""Turns, edits and patch similarity of the code world: what is read, what is refused, and why."""

import difflib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from envs.code import episode, operators, scripted, similarity, tools

TEXT = "one\ntwo\nthree\nfour\nfive\nsix\n"


@pytest.mark.parametrize(
    ("text", "kind", "arguments"),
    [
        ("<list> </list>", "list", {}),
        ("<list> src </list>", "list", {"path": "src"}),
        ("<think> a <submit> b </think><read> a.py 3-9 </read>", "read", {"path": "a.py", "start": 3, "end": 9}),
        ("<search> def f(x): </search> more", "search", {"text": "def f(x):"}),
        ("<run> ls && cat <x </run>", "run", {"command": "ls && cat <x"}),
        ("<test> </test>", "test", {}),
        ("<submit> </submit>", "submit", {}),
        ("<give_up> no way </give_up>", "give_up", {"reason": "no way"}),
    ],
)
def test_turns_in_tags(text, kind, arguments):
    assert tools.parse_tags(text) == tools.Action(kind, arguments)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hello", "no action"),
        ("<think> <submit> </submit> </think>", "no action"),
        ("<run> ls", "<run> is not closed"),
        ("</run>", "</run> without <run>"),
        ("<run> </run>", "<run> is empty"),
        ("<read> a b c </read>", "read wants a path"),
        ("<edit> a.py\nx\n</edit>", "edit wants a path"),
    ],
)
def test_malformed_turns_say_why(text, reason):
    with pytest.raises(tools.Malformed, match=reason.replace("(", r"\(")):
        tools.parse_tags(text)


@pytest.mark.parametrize("protocol", tools.PROTOCOLS)
def test_what_is_written_is_read(protocol):
    form = tools.PROTOCOLS[protocol]
    for kind, arguments in (
        ("list", {"path": "a"}),
        ("read", {"path": "a", "start": 1, "end": 2}),
        ("search", {"text": "x = 1"}),
        ("test", {"path": "t.py"}),
        ("run", {"command": "ls -l"}),
        ("edit", {"path": "a.py", "search": "  x\n\ty\n", "replace": "  z\n"}),
        ("edit", {"path": "a.py", "search": "x\n", "replace": ""}),
        ("patch", {"diff": "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"}),
        ("submit", {}),
        ("give_up", {"reason": "why"}),
    ):
        assert form.parse(form.write(kind, **arguments)) == tools.Action(kind, arguments)


def test_an_edit_wants_its_text_once():
    assert tools.replace_once(TEXT, "a", "two\n", "2\n") == TEXT.replace("two", "2")
    for text, search, replace, reason in (
        (None, "x", "y", "there is no file"),
        (TEXT, "x", "x", "the same"),
        (TEXT, "", "x", "is empty"),
        (TEXT, "seven", "7", "occurs 0 times"),
        (TEXT, "e", "E", "occurs 4 times"),
    ):
        with pytest.raises(tools.Malformed, match=reason):
            tools.replace_once(text, "a", search, replace)


@pytest.mark.parametrize(
    ("text", "search", "replace", "wanted"),
    [
        ("x = 1\nz = 3", "z = 3\n", "z = 4\n", "x = 1\nz = 4"),
        ("x = 1\nz = 3", "z = 3\n", "", "x = 1"),
        ("x = 1\r\nz = 3\r\n", "z = 3\n", "z = 4\ny\n", "x = 1\r\nz = 4\r\ny\r\n"),
        ("a\r\nx = 1\nz = 3\r\nb\n", "x = 1\nz = 3\n", "x = 2\n", "a\r\nx = 2\nb\n"),
        ("x = 1\r\nz = 3", "x = 1\nz = 3\n", "y\nw\n", "y\r\nw"),
    ],
)
def test_lines_are_found_whatever_ends_them(text, search, replace, wanted):
    assert tools.replace_once(text, "a", search, replace) == wanted
    assert similarity.read_answer(answer(("a", search, replace)), {"a": text}) == {"a": wanted}


def test_a_block_with_two_separators_is_refused():
    block = "<<<<<<< SEARCH\nA\n=======\nb\n=======\nA\n=======\nc\n>>>>>>> REPLACE"
    with pytest.raises(tools.Malformed, match="more than one line ======="):
        tools.parse_tags(f"<edit> a.rst\n{block}\n</edit>")
    text = f"<think> so </think>\n<solution>\n### a.rst\n{block}\n</solution>"
    with pytest.raises(similarity.Malformed, match="more than one line ======="):
        similarity.read_answer(text, {"a.rst": "A\n=======\nb\n"})


def test_a_file_has_one_name_in_a_diff():
    after = TEXT.replace("one", "1")
    diff = diff_of(TEXT, after) + diff_of(after, after.replace("six", "6"), "./a.py")
    assert tools.apply_diff(diff, {"a.py": TEXT}.get) == {"a.py": after.replace("six", "6")}


PROBING = [
    "git log --all", "cd x; git show HEAD", "pip install x", "python3 -m pip download x", "ls; curl http://x",
    "cat /proc/1/environ", "cat '/etc/passwd'", "python3 -c \"open('/base/x')\"", "ln -sf a b", "true; kill -9 1",
    "cat ../../x", "ls /usr/lib/site-packages/x", "python3 -c 'import urllib.request as u'", ":(){ :|:& };:", "nohup x",
]  # fmt: skip
HONEST = [
    "cat toolz/sandbox/core.py", "python -m pytest toolz/sandbox", "grep -rn 'urllib' .", "sed -n 1,20p src/base.py",
    "python -c 'print(sorted([1], key=lambda:()))'", "grep -n kill x.py", "git diff; git show-ref", "ls a/proc b/etc/x",
    "sed -n '/base/p' x", "grep -rn 'pip install' README", "cd src/calc && cat ../../x", "grep 'ln ' x", "echo show",
    "cd src/calc\ncat ../../x",
]  # fmt: skip


@pytest.mark.parametrize(("commands", "wanted"), [(PROBING, True), (HONEST, False)])
def test_commands_that_only_work_on_the_repository_are_told_from_others(commands, wanted):
    for command in commands:
        assert bool(episode._PROBING.search(command)) == wanted, command


def test_commands_that_run_tests_are_told_from_others():
    for command in ("python3 x.py", "cd a && PYTHONPATH=. python -m pytest", "pytest -q", "timeout 9 py.test x"):
        assert episode._RUNS_TESTS.search(command), command
    for command in ("false", "cat python.py", "grep pytest x", "ls pytest", "echo python"):
        assert not episode._RUNS_TESTS.search(command), command


LINES = st.lists(st.sampled_from(["a", "b", "c", "d e", "", "  f"]), max_size=12)


def diff_of(before, after, path="a.py"):
    names = ("/dev/null" if before is None else f"a/{path}", "/dev/null" if after is None else f"b/{path}")
    old, new = ((text or "").splitlines(keepends=True) for text in (before, after))
    lines = difflib.unified_diff(old, new, *names)
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


@settings(max_examples=150, deadline=None)
@given(LINES, LINES, st.booleans(), st.booleans())
def test_a_diff_does_what_difflib_says(before, after, ends, ended):
    old, new = ("".join(f"{line}\n" for line in lines) for lines in (before, after))
    old, new = (text if keep or not text.strip() else text.rstrip("\n") for text, keep in ((old, ends), (new, ended)))
    if old != new and old and new:
        assert tools.apply_diff(diff_of(old, new), {"a.py": old}.get) == {"a.py": new}


@settings(max_examples=150, deadline=None)
@given(LINES, LINES)
@example(list("202222"), list("0102323"))  # lines that are alike
def test_edits_lead_from_one_text_to_the_other(before, after):
    old, new = ("".join(f"{line}\n" for line in lines) for lines in (before, after))
    if not old or old == new:
        return
    now = old
    for search, replace in scripted.edits(old, new):
        now = tools.replace_once(now, "a", search, replace)
    assert now == new


def test_a_diff_makes_moves_deletes_and_shifts():
    files = {"a.py": TEXT, "b.py": TEXT}
    assert tools.apply_diff(diff_of(None, "x\n", "new.py"), files.get) == {"new.py": "x\n"}
    assert tools.apply_diff(diff_of(TEXT, None), files.get) == {"a.py": None}
    moved = "--- a/a.py\n+++ b/c.py\n@@ -1,2 +1,2 @@\n-one\n+1\n two\n"
    assert tools.apply_diff(moved, files.get) == {"a.py": None, "c.py": TEXT.replace("one", "1")}
    elsewhere = "--- a/a.py\n+++ b/a.py\n@@ -1,2 +1,2 @@\n four\n-five\n+5\n"
    assert tools.apply_diff(elsewhere, files.get) == {"a.py": TEXT.replace("five", "5")}
    two = diff_of(TEXT, TEXT.replace("one", "1")) + diff_of(TEXT, TEXT.replace("six", "6"), "b.py")
    assert set(tools.apply_diff(two, files.get)) == {"a.py", "b.py"}


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("a/new.py b/new.py\nnew file mode 100644\nindex 0000000..e69de29\n", {"new.py": ""}),
        ("a/e.py b/e.py\ndeleted file mode 100644\nindex e69de29..0000000\n", {"e.py": None}),
        ("a/a.py b/c.py\nsimilarity index 100%\nrename from a.py\nrename to c.py\n", {"a.py": None, "c.py": TEXT}),
        ("a/a.py b/c.py\nsimilarity index 100%\ncopy from a.py\ncopy to c.py\n", {"c.py": TEXT}),
        ("a/a.py b/a.py\nold mode 100644\nnew mode 100755\n", {}),
        ("a/a.py b/c.py\nold mode 100644\nnew mode 100755\ncopy from a.py\ncopy to c.py\n", {"c.py": TEXT}),
    ],
)
def test_what_git_says_without_hunks_is_done(said, wanted):
    files, more = {"a.py": TEXT, "b.py": TEXT, "e.py": ""}, diff_of(TEXT, TEXT.replace("six", "6"), "b.py")
    after = {"b.py": TEXT.replace("six", "6")}
    assert tools.apply_diff(f"diff --git {said}diff --git a/b.py b/b.py\n{more}", files.get) == wanted | after
    assert tools.apply_diff(f"diff --git a/b.py b/b.py\n{more}diff --git {said}", files.get) == wanted | after


@pytest.mark.parametrize(
    ("diff", "reason"),
    [
        ("diff --git a/a.py b/a.py\nindex 1..2\n", "'diff --git a/a.py b/a.py': no --- a/path"),
        ("diff --git a/i.png b/i.png\nBinary files a/i.png and b/i.png differ\n", "'Binary files a/i.png and"),
        ("nothing", "no file header"),
        ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n", "there is no file x"),
        ("--- a/a.py\n+++ b/a.py\n", "no hunk"),
        ("--- a/a.py\n+++ b/a.py\n@@ -1,2 +1,2 @@\n-one\n+1\n", "not as many lines"),
        ("--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-seven\n+7\n", "stand 0 times"),
        ("--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n*one\n+7\n", "a line of a hunk begins with"),
        ("--- /dev/null\n+++ b/a.py\n@@ -0,0 +1 @@\n+x\n", "is there already"),
        ("new file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+/etc\n", "links are refused"),
    ],
)
def test_malformed_diffs_say_why(diff, reason):
    with pytest.raises(tools.Malformed, match=reason):
        tools.apply_diff(diff, {"a.py": TEXT}.get)


# --- similarity: the eight cases of facebookresearch/swe-rl tests/test_reward.py, and its form ---------------------

OLD = {"a.py": "x = 1\ny = 2\n", "b.py": "z = 3\n", "c.py": "w = 4\n"}
NEW_A, NEW_B = "x = 10\ny = 2\n", "z = 30\n"


@pytest.mark.parametrize(
    ("predicted", "gold", "wanted"),
    [
        ({"a.py": NEW_A, "b.py": NEW_B}, {"a.py": NEW_A, "b.py": NEW_B}, 1.0),
        ({"new.py": "q = 1\n"}, {"a.py": NEW_A, "b.py": NEW_B}, 0.0),
        ({"a.py": NEW_A, "new.py": "q = 1\n"}, {"a.py": NEW_A, "b.py": NEW_B}, 1 / 3),
        ({"a.py": NEW_A}, {"a.py": NEW_A}, 1.0),
        ({"a.py": NEW_A, "b.py": NEW_B}, {"a.py": NEW_A}, 0.5),
        ({"b.py": NEW_B}, {"a.py": NEW_A}, 0.0),
        ({}, {}, 1.0),
        ({"a.py": OLD["a.py"]}, {"a.py": NEW_A}, 0.0),  # a change that is none is no file changed
    ],
)
def test_similarity(predicted, gold, wanted):
    assert similarity.similarity(OLD, predicted, gold) == pytest.approx(wanted)


def test_similarity_of_diffs_is_difflibs():
    left, right = similarity.unified(OLD["a.py"], NEW_A), similarity.unified(OLD["a.py"], "x = 11\ny = 2\n")
    assert left == "@@ -1,2 +1,2 @@\n-x = 1\n+x = 10\n y = 2\n"
    wanted = difflib.SequenceMatcher(None, left, right, autojunk=False).ratio()
    assert similarity.similarity(OLD, {"a.py": NEW_A}, {"a.py": "x = 11\ny = 2\n"}) == wanted < 1


def answer(*edits, thought="so"):
    body = "\n".join(f"### {p}\n<<<<<<< SEARCH\n{s}=======\n{r}>>>>>>> REPLACE" for p, s, r in edits)
    return f"<think> {thought} </think>\n<solution>\n{body}\n</solution>"


def test_answers_are_read_and_refused():
    good = answer(("a.py", "x = 1\n", "x = 10\n"), ("b.py", "z = 3\n", "z = 30\n"))
    assert similarity.read_answer(good, OLD) == {"a.py": NEW_A, "b.py": NEW_B}
    for text, reason in (
        (good.replace("</think>", ""), "once and in this order"),
        (good + good, "once and in this order"),
        (answer(("a.py", "x = 1\n", "x = 2\n"), thought=""), "thought is empty"),
        (answer(), "no SEARCH/REPLACE"),
        (answer(("q.py", "x = 1\n", "x = 2\n")), "no file q.py"),
        (answer(("a.py", "x = 1\n", "x = 1\n")), "changes nothing"),
        (answer(("a.py", "x = 7\n", "x = 1\n")), "does not occur"),
    ):
        with pytest.raises(similarity.Malformed, match=reason):
            similarity.read_answer(text, OLD)


# --- operators -------------------------------------------------------------------------------------------------------

SOURCE = b'''\
"""Doc 1."""


def f(a, b=1, *rest, key=None):
    """Doc 2."""
    if a < b and not key:  # why
        a += g(a, b, key=True)
    for x in rest:
        if x in (1, 2):
            continue
        a = a - x if a else max(x, 0)
    self.a = "text".lower()
    if a is None:
        raise ValueError("no")
    return a[-1] + a[1:2]
'''


def test_operators_make_small_valid_bugs():
    sites = operators.sites(SOURCE)
    assert sites == operators.sites(SOURCE) and len(operators.OPERATORS) >= 12
    good = [site for site in sites if operators.valid(SOURCE, site)]
    assert set(operators.OPERATORS) - {site.operator for site in good} <= {"index"}
    for site in good:
        changed = operators.apply(SOURCE, [(site.start, site.end, site.text)])
        assert changed != SOURCE and site.function == "f"
        back = (site.start, site.start + len(site.text.encode()), SOURCE[site.start : site.end].decode())
        assert operators.apply(changed, [back]) == SOURCE
        assert b"Doc 1" in changed and b"Doc 2" in changed and b"b=1, *rest" in changed
