"""Law: an answer is compared as what it means; world text cannot become a tag. (CASES H9, H10)"""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from envs.answers import contains, escape_tags, exact_match, f1, last_answer, normalize


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("A", ["A", "a", " A. "], ["B", "", "the"]),  # SQuAD's normaliser leaves "" of it, and "" is in every string
        ("The", ["the", "The"], ["a", "an", "x", ""]),
        ("Vitamin A", ["vitamin a"], ["Vitamin", "Vitamin B"]),
        ("The Hague", ["the hague", "Hague"], ["The"]),
        ("0", ["0"], ["", "O", "00"]),
        ("1.5", ["1.5", "1.5."], ["15", "1,5", "1 5", "5"]),
        (".5", [".5", "0.5"], ["5"]),
        ("15", ["15"], ["1.5", "-15"]),
        ("-5", ["-5", "\u22125", "-$5"], ["5", "+5"]),
        ("5", ["5", "$5", "+5"], ["-5"]),
        ("12,500", ["12500", "12,500"], ["12.500", "12 500", "125"]),
        ("1,234,567", ["1234567"], ["1,234"]),
        ("5-10", ["5-10", "5\u201310"], ["510"]),
        ("1e-5", ["1e-5"], ["1e5"]),
        ("10\u00b2", ["10\u00b2", "10^2"], ["102"]),
        ("1\u00bd", ["1\u00bd"], ["112", "11/2"]),
        ("caf\u00e9", ["cafe\u0301", "CAF\u00c9"], ["cafe"]),
        ("12", ["\uff11\uff12"], ["1 2"]),
        ("d'Ivoire", ["d\u2019Ivoire", "d\u2018ivoire"], ["Ivoire"]),
        ("Paris", ["\u201cParis\u201d", "paris!", "Pa\u200bris"], ["Par is"]),
        ("U.K.", ["UK", "u.k", "U.K."], ["U K"]),
        ("C++", ["c++"], ["C", "C#"]),
        ("C\u266f", ["c#", "C\u266f"], ["C"]),
        ("x+1", ["x + 1", "X+1"], ["x-1", "x1", "x 1"]),
        ("2x+3", ["2x + 3"], ["2x-3"]),
        ("x=5", ["x = 5"], ["x\u22605", "x5"]),
        ("<5", ["< 5"], [">5", "5", "\u22645"]),
        ("\u221a2", ["\u221a 2"], ["2"]),
        ("\u00b15", ["\u00b1 5"], ["5", "-5"]),
        ("A\u222aB", ["a \u222a b"], ["A\u2229B", "AB"]),
        ("A-", ["a-", "A\u2212"], ["A", "A+"]),
        ("5", ["+5", "+ 5", "= 5", "=5", "-> 5", "=> 5", "5!", "\u2192 5", "~5", "5 ="], ["-5"]),
        (".5", ["+.5", "0.5"], ["5"]),
        ("$5", ["+$5"], ["-$5"]),
        ("Paris", ["> Paris", ">Paris"], ["Lima"]),
        ("1920x1080", ["1920x1080"], ["19201080"]),
        ("1920\u00d71080", ["1920*1080"], ["19201080"]),
        ("C#m", ["c#m", "C\u266fm"], ["Cm"]),
        ("A+B", ["a + b"], ["+B", "B"]),
        ("pre- and post", ["pre and post"], ["post"]),
        ("O'Brien", ["O\u00b4Brien", "O\u02bcBrien", "O\u2019Brien", "obrien"], ["O Brien"]),
        (".es", ["es", ".es"], ["e s"]),
        ("?", ["?"], ["!", ""]),
        ("twenty-five", ["twenty-five", "twentyfive"], ["25"]),
    ],
)
def test_normaliser_keeps_the_answer(gold, right, wrong):
    for prediction in right:
        assert exact_match(prediction, [gold]) and f1(prediction, [gold]) == 1, prediction
    for prediction in wrong:
        assert not exact_match(prediction, [gold]), prediction


def test_f1_worked_number():
    # {new, york, city} against {york, city, hall}: 2 common; P = R = 2/3 -> F1 = 2/3
    assert f1("New York City", ["York City Hall"]) == pytest.approx(2 / 3)
    # the best gold counts; a word counts as often as it occurs: {x, x} and {x}: P = 1/2, R = 1
    assert f1("x x", ["y", "x"]) == pytest.approx(2 / 3)
    assert f1("", ["x"]) == f1(None, ["x"]) == 0


@pytest.mark.parametrize("golds", [[""], ["x", " "], [], "x"])
def test_invalid_golds_are_refused(golds):
    for compare in (exact_match, f1):
        with pytest.raises(ValueError, match="golds: got"):
            compare("x", golds)


@given(st.text(max_size=12), st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=3))
@example("a", ["The"])
@example("-", ["\u2212"])
def test_em_is_at_most_f1(prediction, golds):
    golds = [gold for gold in golds if normalize(gold)] or ["x"]
    assert exact_match(prediction, golds) <= f1(prediction, golds) <= 1
    assert exact_match(golds[0], golds)


def test_contains_whole_words():
    assert contains("capital: Lima; currency: PEN", ["PEN"])
    assert not contains("Lima is old", ["A"]) and not contains("population: 1500", ["15"])
    assert contains("the Hague", ["The Hague"]) and contains("Vitamin A is", ["Vitamin A"])


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Paris", None),
        ("<answer>Paris</answer>", "Paris"),
        ("<think> x </think><answer> Paris </answer>", "Paris"),
        ("<answer>x</answer> then <answer>Paris</answer>", "Paris"),
        ("<answer>x", None),
        ("x</answer>", None),
        ("<answer>x</answer><answer>y", "x"),  # an unclosed tag is no pair
        ("<answer></answer>", None),
        ("<answer>x</answer><answer> </answer>", None),  # the last pair counts, and it is empty
        ("<answer>a<answer>b</answer></answer>", None),
        ("<answer>a<answer>b</answer>", None),
        ("<ANSWER>x</ANSWER>", None),
        ("<answer >x</answer >", None),
        ("<answer>\\boxed{7}</answer>", "\\boxed{7}"),
        ("<answer>x</answer><search>y</search>", "x"),
    ],
)
def test_last_answer(text, answer):
    assert last_answer(text) == answer


TAGS = ("think", "search", "information", "answer", "open")
FORMS = (
    "<{}>",
    "</{}>",
    "< {} >",
    "< / {}>",
    "<{} x='1'>",
    "<{}/>",
    "\uff1c{}\uff1e",
    "\uff1c/{}\uff1e",
    "<\n{}\n>",
    "\ufe64{}\ufe65",
    "<\u200b{}>",
    "<{}\u00ad>",
)
SPECIAL = (
    *(
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|python_tag|>",
    ),
    *(
        "<s>",
        "</s>",
        "<unk>",
        "[INST]",
        "[/INST]",
        "<<SYS>>",
        "<</SYS>>",
        "<|finetune_right_pad_id|>",
        "<|reserved_special_token_0|>",
    ),
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|vision_start|>",
        "<|image_pad|>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
    ),
    *(
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<\uff5cUser\uff5c>",
        "<\uff5cAssistant\uff5c>",
    ),
    *(
        "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        "<\uff5ctool\u2581sep\uff5c>",
        "<|pad|>",
        "<|user|>",
        "<|tool|>",
        "<|end|>",
        "<|assistant|>",
    ),
)
ATTACKS = [form.format(spell(tag)) for form in FORMS for tag in TAGS for spell in (str, str.upper, str.title)] + list(
    SPECIAL
)


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_tag_survives(attack):
    for text in (attack, f"a {attack} b", f"<{attack}", f"{attack}{attack}", f"<ans{attack}wer>"):
        safe = escape_tags(text)
        assert attack not in safe
        assert not re.search(r"[<\uff1c\ufe64][\s\u200b]*[/\uff0f]?[\s\u200b]*[\w|\uff5c]", safe), safe
        assert escape_tags(safe) == safe
        # only brackets change: it can still be read
        assert re.sub(r"[^\w]", "", safe) == re.sub(r"[^\w]", "", text)


@given(
    st.lists(st.sampled_from([*ATTACKS, "<", "</", "|", ">", " ", "answer", "\uff1c", "\u200b", "x"]), max_size=8).map(
        "".join
    )
)
def test_no_tag_comes_out_of_any_mixture(text):
    safe = escape_tags(text)
    assert escape_tags(safe) == safe
    for tag in TAGS:
        assert f"<{tag}>" not in safe and f"</{tag}>" not in safe
    assert not any(token in safe for token in SPECIAL)


@pytest.mark.parametrize(
    "text", ["3 < 4", "a < b and c > d", "x <= y", "1<2", "<3", "-> <-", "[1] [note]", "Lima; PEN"]
)
def test_prose_is_left_alone(text):
    assert escape_tags(text) == text
