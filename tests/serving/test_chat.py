"""``/v1/chat/completions``: templates, streams, sessions, reasoning and errors, against transformers' own code."""

import itertools
import json
import random

import openai
import pytest
import torch

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

import servers

import hybrids
from longspan._utils import optional_deps
from longspan.cli import main
from longspan.cli.serve import loaded
from longspan.data import documents, tokenization
from longspan.models.sampling import Sampling
from longspan.serving import Pool
from longspan.serving.chat_reply import Thoughts
from longspan.serving.conversation import Conversation

pytestmark = [pytest.mark.usefixtures("restored"), pytest.mark.filterwarnings("ignore")]

WORDS = "The old man looked at the river for a long while and then he went home to his quiet house by the sea".split()
END = "<|im_end|>"
SPECIAL = ("<|im_start|>", END, "<|start_header_id|>", "<|end_header_id|>", "<|start_of_role|>", "<|end_of_role|>")
# Written for these tests, each in the manner of one family.
TEMPLATES = {
    "chatml": """{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "headers": """{%- for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|im_end|>{% endfor %}{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}""",
    "roles": """{%- if messages[0].role != 'system' %}<|start_of_role|>system<|end_of_role|>Be brief.<|im_end|>
{% endif %}{%- for m in messages %}{%- if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif -%}
<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}""",
}
THINKING = TEMPLATES["chatml"].replace(
    "<|im_start|>assistant\n",
    "<|im_start|>assistant\n{% if enable_thinking is not false %}<think>\n{% else %}</think>{% endif %}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A hybrid model in float64 with a tokenizer; templates are written to it."""
    from transformers import PreTrainedTokenizerFast

    where = tmp_path_factory.mktemp("chat")
    (where / "text.txt").write_text(" ".join(WORDS * 3) + " <think> </think>", encoding="utf-8")
    content = tokenization.train_bpe(documents.sources([str(where / "text.txt")]), 290)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenization.parsed(content), eos_token=END)
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL]})
    model = hybrids.model("qwen3_5", vocab_size=len(tokenizer))
    # Several ends, so that some answers end.
    model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids(END), *range(100, 120)]
    model.save_pretrained(where)
    tokenizer.save_pretrained(where)
    return where


class Running(servers.Running):
    """A server of the folder with a template."""

    def __init__(self, folder, template):
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        if template:
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        model, codec, *_ = loaded(str(folder), "")
        model.double()
        super().__init__(model, codec=codec, pool={"slots": 4, "capacity": 512})
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def ask(self, messages, **options):
        return self.openai.chat.completions.create(
            model="tiny", messages=messages, **({"temperature": 0, "max_tokens": 8} | options)
        )

    def __exit__(self, *error):
        self.openai.close()
        super().__exit__(*error)


def said(rng):
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 7)))


def reference(running, messages, n=8, **options):
    """The text of transformers' template and generate."""
    tokenizer, model = running.codec.template.tokenizer, running.model
    given = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)
    whole = model.generate(torch.tensor([given]), max_new_tokens=n, do_sample=False, pad_token_id=0)
    drawn = [t for t in whole[0, len(given) :].tolist() if t not in model.generation_config.eos_token_id]
    return tokenizer.decode(drawn, skip_special_tokens=True)


@pytest.mark.parametrize("count", [2, pytest.param(14, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_those_of_transformers(folder, name, count):
    rng, finished = random.Random(1), set()
    with Running(folder, TEMPLATES[name]) as running:
        for _ in range(count):
            messages = [{"role": "system", "content": said(rng)}] if rng.random() < 0.5 else []
            for _ in range(3):
                messages.append({"role": "user", "content": said(rng)})
                expected = reference(running, messages)
                whole = running.ask(messages).choices[0]
                finished.add(whole.finish_reason)
                assert whole.message.content == expected
                stream = running.ask(messages, stream=True, stream_options={"include_usage": True})
                chunks = [chunk for chunk in stream]
                assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
                assert chunks[0].choices[0].delta.role == "assistant"
                assert chunks[-1].usage.completion_tokens <= 8
                messages.append({"role": "assistant", "content": expected})
    assert finished <= {"stop", "length"}


def squeezed(text):
    return "".join(text.replace("\ufffd", "").split())


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_session_reads_what_the_whole_chat_has(folder, name):
    rng, messages = random.Random(2), [{"role": "system", "content": "Be kind."}]
    with Running(folder, TEMPLATES[name]) as running:
        session = running.client.post("/sessions", json={}).json()["id"]
        tokenizer = running.codec.template.tokenizer
        for turn in range(3):
            new = [*(messages if not turn else []), {"role": "user", "content": said(rng)}]
            messages = new if not turn else messages + new
            answer = running.ask(new, extra_body={"session": session}, max_tokens=3).choices[0].message.content
            tokens = running.client.get(f"/sessions/{session}").json()["tokens"]
            # As text, since other tokens may have the text of those that were drawn. Templates trim answers, and the
            # other ends of this model are bytes, which answers do not have.
            text = tokenizer.decode(tokens, skip_special_tokens=False)
            whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            assert squeezed(text).startswith(squeezed(whole + answer))
            messages.append({"role": "assistant", "content": answer})


def test_the_command_answers_as_the_server_does(folder):
    rng, messages = random.Random(4), [{"role": "system", "content": "Be kind."}]
    with Running(folder, TEMPLATES["chatml"]) as running:
        pool = Pool(running.model, slots=1, capacity=512)
        options = {"system": "Be kind.", "max_tokens": 3, "sampling": Sampling(temperature=0.0)}
        talk, session = Conversation(pool, running.codec, **options), running.client.post("/sessions", json={}).json()
        for turn in range(3):
            messages = [*(messages if not turn else []), {"role": "user", "content": said(rng)}]
            extra = {"session": session["id"]}
            expected = running.ask(messages, extra_body=extra, max_tokens=3).choices[0].message.content
            assert "".join(talk.ask(messages[-1]["content"])) == expected
        assert list(talk.session.tokens) == running.client.get(f"/sessions/{session['id']}").json()["tokens"]


def test_generate_continues_a_text(folder, capsys):
    """``longspan generate`` with the folder of a model of transformers: greedy tokens are those of ``generate``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    given = tokenizer("The old man", return_tensors="pt")
    found = model.generate(**given, max_new_tokens=12, do_sample=False)[0]
    ends = set(model.generation_config.eos_token_id)
    kept = itertools.takewhile(lambda token: token not in ends, found[given.input_ids.shape[1] :].tolist())
    options = ["--prompt", "The old man", "--tokens", "12", "--temperature", "0"]
    assert main(["generate", str(folder), *options]) == 0
    assert capsys.readouterr().out == "The old man" + tokenizer.decode(list(kept)) + "\n"
    assert main(["generate", str(folder), *options, "--weights", "int8"]) == 0
    assert capsys.readouterr().out.startswith("The old man")
    for words, message in (
        (["--beams", "2"], "--beams is for models of longspan"),
        (["--draft", "text"], "--draft='text' must be prompt-lookup"),
        (["--prompt", ""], "a prompt needs at least one token"),
    ):
        assert main(["generate", str(folder), *options, *words]) == 2
        assert message in capsys.readouterr().err


def test_the_reasoning_is_apart_from_the_answer(folder):
    messages = [{"role": "user", "content": "The old man"}]
    with Running(folder, THINKING) as running:
        thinking = running.ask(messages).choices[0].message
        assert thinking.content == ""
        assert thinking.reasoning_content.strip() == reference(running, messages).strip()
        quiet = {"chat_template_kwargs": {"enable_thinking": False}}
        answer = running.ask(messages, extra_body=quiet).choices[0].message
        assert answer.content.strip() == reference(running, messages, enable_thinking=False).strip()
        assert answer.reasoning_content == ""


def test_options_of_a_chat(folder):
    messages = [{"role": "user", "content": [{"type": "text", "text": "The "}, {"type": "text", "text": "old"}]}]
    plain = [{"role": "user", "content": "The old"}]
    with Running(folder, TEMPLATES["chatml"]) as running:
        expected = reference(running, plain)
        found = running.ask(messages, n=2, logprobs=True, top_logprobs=2)
        assert [choice.message.content for choice in found.choices] == [expected] * 2
        content = found.choices[0].logprobs.content
        assert all(one.logprob <= 0 and len(one.top_logprobs) == 2 for one in content)
        drawn = bytes(b for one in content for b in one.bytes).decode("utf-8", "replace")
        assert drawn.startswith(expected)
        tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
        assert running.ask(plain, tools=tools).usage.prompt_tokens > found.usage.prompt_tokens
        more = [*plain, {"role": "assistant", "content": "man"}]
        extra = {"continue_final_message": True, "add_generation_prompt": False}
        given = running.codec.template.tokenizer.apply_chat_template(
            more, continue_final_message=True, return_dict=False
        )
        assert running.ask(more, extra_body=extra).usage.prompt_tokens == len(given)
        drawn = [running.ask(plain, temperature=1, seed=7).choices[0].message.content for _ in range(2)]
        assert drawn[0] == drawn[1]
        # Without max_tokens all that fits into the state is drawn.
        assert running.ask(plain, max_tokens=None, stop=["e"]).choices[0].finish_reason in ("stop", "length")
        assert "/v1/chat/completions" in json.dumps(running.client.get("/../openapi.json").json())


def test_answers_in_json(folder):
    pytest.importorskip("llguidance")
    messages = [{"role": "user", "content": "The old man"}]
    schema = {
        "type": "object",
        "properties": {"river": {"enum": ["long", "quiet"]}, "boats": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["river", "boats"],
        "additionalProperties": False,
    }
    given = {"type": "json_schema", "json_schema": {"name": "river", "schema": schema}}
    with Running(folder, THINKING) as running:
        # The other ends of this model are bytes, which JSON has.
        running.codec.ends = running.codec.ends[:1]
        quiet = {"chat_template_kwargs": {"enable_thinking": False}}
        options = {"response_format": given, "max_tokens": 60, "temperature": 1, "seed": 3, "n": 3, "extra_body": quiet}
        for choice in running.ask(messages, **options).choices:
            assert choice.finish_reason == "stop"
            found = json.loads(choice.message.content)
            assert sorted(found) == ["boats", "river"]
            assert found["river"] in ("long", "quiet")
            assert 0 <= found["boats"] <= 99
        stream = running.ask(messages, **options | {"n": 1, "stream": True})
        json.loads("".join(chunk.choices[0].delta.content or "" for chunk in stream))
        anything = options | {"response_format": {"type": "json_object"}, "n": 1, "max_tokens": 5}
        assert running.ask(messages, **anything).choices[0].message.content.startswith("{")
        # A prompt that opens the reasoning: it stays free.
        thinking = running.ask(messages, response_format=given, max_tokens=8).choices[0].message
        assert thinking.reasoning_content.strip() == reference(running, messages).strip()
        wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}
        with pytest.raises(openai.BadRequestError, match="response_format is refused: Invalid type: objekt"):
            running.ask(messages, response_format=wrong)


def test_answers_in_json_need_a_library(folder, monkeypatch):
    found = optional_deps.find_spec
    monkeypatch.setattr(optional_deps, "find_spec", lambda name: None if name == "llguidance" else found(name))
    with Running(folder, TEMPLATES["chatml"]) as running:
        with pytest.raises(openai.BadRequestError, match="missing for response_format: llguidance; pip install"):
            running.ask([{"role": "user", "content": "hi"}], response_format={"type": "json_object"})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "messages must be a list of 1 to 4096 messages"),
        ({"messages": [{"role": "friend", "content": "x"}]}, "message 0 must be an object with a role, one of system"),
        ({"messages": [{"role": "user"}]}, "message 0 must have a content, a text or a list of texts"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "message 0 has parts that are not text, which this model does not read",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "the chat template refuses these messages: no tools here"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "the messages cannot be encoded"),
        ({"response_format": {"type": "grammar"}}, "response_format={'type': 'grammar'} must have the type text, json"),
        ({"response_format": {"type": "json_schema"}}, "or json_schema with json_schema.schema, an object"),
        ({"response_format": "json"}, "response_format='json' must have the type"),
        ({"tool_choice": "required"}, "tool_choice='required' is not supported"),
        ({"tools": {}}, "tools={} must be a list"),
        ({"top_logprobs": 2}, "top_logprobs requires logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs=21 must be an integer from 0 to 20"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "pass either max_tokens or max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"continue_final_message": True}, "continue_final_message takes a last message of the assistant"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs has 'tokenize'"),
        ({"prompt": "x"}, "unknown field 'prompt'"),
    ],
)
def test_what_does_not_fit_is_refused(refusing, body, message):
    given = {"messages": [{"role": "user", "content": "hi"}]} | body
    answer = refusing.client.post(
        "/chat/completions", content=json.dumps(given), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def refusing(folder):
    with Running(folder, TEMPLATES["roles"]) as running:
        yield running


def test_a_model_without_a_template_says_so(folder):
    with Running(folder, "") as running:
        with pytest.raises(openai.BadRequestError, match="this model has no chat template; use /v1/completions"):
            running.ask([{"role": "user", "content": "hi"}])
        assert "/v1/chat/completions" not in running.client.get("/../openapi.json").json()["paths"]


@pytest.mark.parametrize(
    ("text", "opened", "parts"),
    [
        ("plain", False, ("", "plain")),
        ("<think>\nwhy </think>\n\nso", False, ("why", "so")),
        ("\n<think>why", False, ("why", "")),
        ("because </thin king", True, ("because </thin king", "")),
        ("why\n</think>\n\n so </think>", True, ("why", "so </think>")),
        ("<thin", False, ("", "<thin")),
        ("", False, ("", "")),
    ],
)
def test_marks_split_a_text_however_it_comes(text, opened, parts):
    for size in (1, 2, 3, 5, 100):
        thoughts, found = Thoughts(("<think>", "</think>"), opened), ["", ""]
        pieces = [text[i : i + size] for i in range(0, len(text), size)] or [""]
        for index, piece in enumerate(pieces):
            for which, new in enumerate(thoughts.add(piece, index == len(pieces) - 1)):
                found[which] += new
        assert tuple(found) == parts, size
