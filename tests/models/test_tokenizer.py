"""A name has the same ids wherever it stands, and the saved folder is one that transformers reads back to equal ids."""

import json
import shutil

import pytest

from models.codec import Codec
from models.tokenizer import CHAT_TEMPLATE, end_ids, load_tokenizer, train_tokenizer

NAMES = ["Peru", "United States", "Cote d'Ivoire", "Guinea-Bissau", "St. John's", "Washington, D.C.", "São Tomé"]
NAMES += ["+51", "1898", "PEN"]
CORPUS = [f"What is the capital of {n} ? Doc 1(Title: {n}) capital: {n}; currency: {n}" for n in NAMES] * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(CORPUS, 420, path)
    return path


@pytest.fixture(scope="module")
def codec(folder):
    return Codec(load_tokenizer(folder))


def _contains(ids, part):
    return any(ids[i : i + len(part)] == part for i in range(len(ids) - len(part) + 1))


class _Message:
    def __init__(self, role, content):
        self.role, self.content = role, content


@pytest.mark.parametrize("name", NAMES)
def test_name_has_the_same_ids_everywhere(codec, name):
    ids = codec._plain.encode(f" {name}", add_special_tokens=False).ids
    sampled = codec.encode_action("<search> x </search>")
    places = {
        "question": codec.start([_Message("user", f"What is the capital of {name} ?")]),
        "first word": codec.start([_Message("user", name)]),
        "title": codec.extend(sampled, f"<information>\nDoc 1(Title: {name}) about: {name}; more\n</information>"),
        "value at the end": codec.extend(sampled, f"Doc 1(Title: x) capital: {name}"),
        "search": codec.encode_action(f"<think> I look for {name} . </think><search> {name} </search>"),
        "answer": codec.encode_action(f"<answer> {name} </answer>"),
        "no space before the closing tag": codec.encode_action(f"<answer> {name}</answer>"),
    }
    assert [place for place, got in places.items() if not _contains(got, ids)] == []


def test_closing_tag_takes_its_space(codec):
    # <search>, " Peru", </search>: a policy need not spend a token on the space
    ids = codec.encode_action("<search> Peru </search>")
    name = codec._plain.encode(" Peru", add_special_tokens=False).ids
    assert ids == [*codec.encode_action("<search>"), *name, *codec.encode_action("</search>")]


def test_transformers_reads_the_folder_to_equal_ids(folder, codec):
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tagged = ["<think> a </think><search> Peru </search>", "<|user|> a\n\n b<|end|>", "naïve 漢字 \t x"]
    for text in [*NAMES, *CORPUS[:2], *tagged]:
        assert other.encode(text, add_special_tokens=False) == codec._full.encode(text, add_special_tokens=False).ids
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Peru ?"}]
    rendered = other.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert rendered == codec.start([_Message(**m) for m in messages])
    assert len(other) == codec.vocab_size
    assert (other.eos_token, other.pad_token) == ("<|end|>", "<|pad|>")


def test_transformers_reads_the_folder_beside_a_model_config(folder, tmp_path):
    # a model's config.json in the folder must not make AutoTokenizer pick another class with other ids
    from transformers import AutoTokenizer

    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    text = "<think> Peru </think> 1898 <|end|>"
    want = AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False)
    for kind in ("llama", "qwen3"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        assert AutoTokenizer.from_pretrained(tmp_path).encode(text, add_special_tokens=False) == want


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("named", ["GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizerFast", "TokenizersBackend"])
def test_ids_are_those_of_tokenizer_json_whatever_class_is_named(folder, tmp_path, kind, named):
    from tokenizers import Tokenizer

    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"tokenizer_class": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    read, file = load_tokenizer(tmp_path), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ["in 1898", "it's 1898", "São Tomé, a\n\n  b\t<|end|>", *NAMES]:
        want = file.encode(text, add_special_tokens=False).ids
        assert read.encode(text, add_special_tokens=False) == want
        assert Codec(read)._full.encode(text, add_special_tokens=False).ids == want
    assert (read.eos_token, read.chat_template) == ("<|end|>", CHAT_TEMPLATE)


def test_every_byte_round_trips(codec):
    text = "naïve 漢字 🙂 \t\n  two  spaces"
    assert codec.view(codec._plain.encode(text, add_special_tokens=False).ids) == text


def test_vocab_size_counts_everything(folder, tmp_path):
    assert len(train_tokenizer(CORPUS, 300, tmp_path)) == 300
    assert len(load_tokenizer(folder)) < 420  # this corpus has no more merges to give


def test_too_small_a_vocabulary_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"vocab_size: got 100, want at least 272"):
        train_tokenizer(CORPUS, 100, tmp_path)


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"want a folder with tokenizer.json"):
        load_tokenizer(tmp_path / "none")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", ['{"model"', "[]"])
def test_a_file_that_is_cut_or_foreign_is_named(folder, tmp_path, name, content):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"/{name}: unreadable .*download it again"):
        load_tokenizer(tmp_path)


def test_unknown_role_is_refused(codec):
    with pytest.raises(ValueError, match=r"refuses roles \['critic'\]"):
        codec.start([_Message("critic", "x")])


def test_end_ids_of_a_folder(tmp_path):
    assert end_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert end_ids(tmp_path) == (2,)
    (tmp_path / "generation_config.json").write_text('{"do_sample": true}')  # says nothing of ends
    assert end_ids(tmp_path) == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [128001, 128009]}')
    assert end_ids(tmp_path) == (128001, 128009)
    for text, message in (("{", "unreadable"), ("[]", "unreadable"), ('{"eos_token_id": "</s>"}', "want one id")):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(ValueError, match=f"generation_config.json: .*{message}"):
            end_ids(tmp_path)
