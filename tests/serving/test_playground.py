"""The playground in a browser: text that streams, stops and branches, digits that are completed, errors in words."""

import asyncio
import base64
import contextlib
import hashlib
import json
import re

import httpx
import openai
import pytest
from pools import decoder
from servers import Gate, Running, gated, until

from browser import Browser, chromium
from longspan.cli import main
from longspan.models.sampling import OPTIONS
from longspan.serving.chat import Template
from longspan.serving.guard import Access
from longspan.serving.text import Bytes

GRID = {"codec": False, "grid": (8, 8)}
HOSTILE = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"


@pytest.fixture(scope="module")
def browser():
    if chromium() is None:
        pytest.skip("needs Chromium")
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def running():
    """A server of a model of ASCII text."""
    with Running(decoder(vocab=128)) as found:
        yield found


@contextlib.contextmanager
def opened(browser, running, *, errors=(), **options):
    """A page that is ready; it asks this server only, and logs no error but those that are named."""
    with browser.page(running.url, **options) as page:
        page.until("model !== null || !keyform.hidden")
        yield page
        found, addresses = page.logged()
        assert not [one for one in found if not any(error in one for error in errors)]
        assert all(address.startswith((running.url, "data:,")) for address in addresses)


def run(page, prompt, *, seed=3, tokens=20, temperature=1):
    page.write("#prompt", prompt)
    for field, value in (("seed", seed), ("max_tokens", tokens), ("temperature", temperature)):
        page.write(f"#{field}", str(value))
    page.click("#run")


def drawn(running, prompt, **body):
    return running.post(prompt=prompt, **body).json()["choices"][0]["text"]


def shown(page, index=0):
    """The text in a column, as it is on the screen once the page is painted."""
    page.until("!planned")
    return page.js(f"document.querySelectorAll('.text')[{index}].textContent")


def marked(page, index, name):
    return page.js(
        f"[...document.querySelectorAll('.text')[{index}].querySelectorAll('.{name}')].map(e => e.textContent).join('')"
    )


def place(page, index, at):
    """The point on the screen before a character."""
    return page.js(
        f"(() => {{ const body = document.querySelectorAll('.text')[{index}]; let rest = {at};"
        "body.scrollIntoView({block: 'center'});"
        "for (const span of body.children) { if (rest < span.textContent.length) { const range = new Range();"
        "range.setStart(span.firstChild, rest); range.setEnd(span.firstChild, rest + 1);"
        "const box = range.getBoundingClientRect(); return [box.left + 1, box.top + box.height / 2]; }"
        "rest -= span.textContent.length; } })()"
    )


def hashes(page, tag):
    parts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return [f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" for part in parts]


def test_the_page_admits_its_own_script_and_style_only(running):
    answer = httpx.get(running.url)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    policy = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        assert policy[f"{tag}-src"].split() == hashes(answer.text, tag)
    assert "://" not in answer.text


def test_the_page_needs_no_key_and_can_be_left_out():
    with Running(access=Access(api_key="secret")) as running:
        assert httpx.get(running.url).status_code == 200
        assert httpx.get(f"{running.url}/metrics").status_code == 401
        assert httpx.get(f"{running.url}/healthz").status_code == 200
    with Running(playground=False) as running:
        assert httpx.get(running.url).status_code == 404


@pytest.mark.parametrize(
    ("codec", "grid", "kind"),
    [(True, (), {"kind": "text"}), (False, (8, 8), {"kind": "image", "width": 8, "height": 8, "channels": 1})],
)
def test_models_are_described(codec, grid, kind):
    with Running(decoder(vocab=17), codec=codec, grid=grid) as running:
        found = httpx.get(f"{running.url}/v1/models").json()["data"][0]["longspan"]
        sizes = {"slots": 8, "state_bytes_per_stream": running.metric("longspan_state_bytes") / 8}
        assert found == {"vocab": 17, "max_tokens": 4096, "forms": [], **sizes, **kind}
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none")
        assert client.models.list().data[0].longspan == found


@pytest.mark.full
@pytest.mark.parametrize(("options", "status"), [([], 200), (["--no-playground"], 404)])
def test_the_command_knows_the_images_of_a_model(monkeypatch, options, status):
    uvicorn = pytest.importorskip("uvicorn")
    seen = []

    def serve(http, sockets):
        with_app = httpx.ASGITransport(http.config.app)

        async def ask():
            async with httpx.AsyncClient(transport=with_app, base_url="http://localhost") as client:
                return await client.get("/"), await client.get("/v1/models")

        seen.extend(asyncio.run(ask()))

    monkeypatch.setattr(uvicorn.Server, "run", serve)
    main(["serve", "mnist", "--port", "0", "--slots", "2", *options])
    page, models = seen
    assert page.status_code == status
    about = models.json()["data"][0]["longspan"]
    assert (about["kind"], about["width"], about["height"], about["vocab"]) == ("image", 28, 28, 256)


def test_every_option_of_sampling_is_offered(browser, running):
    with opened(browser, running) as page:
        page.until("!$('form').hidden")
        for one in OPTIONS:
            assert page.js(f"[$('{one.name}').value, $('{one.name}').min, $('{one.name}').max].map(Number)") == [
                one.default,
                one.low,
                one.high,
            ]
        assert page.js("sampling()") == {one.name: one.default for one in OPTIONS}


def test_text_appears_as_it_is_drawn_and_stops(browser):
    with gated(decoder(vocab=128)) as (running, gate), opened(browser, running) as page:
        run(page, "hello", tokens=4000)
        gate.step(4)
        page.until("items[0]?.text.length === 10")
        page.until("document.querySelector('.text').textContent.length === 10")
        assert page.js("items[0].control !== null && running.size === 1")
        gate.step(3)
        page.until("document.querySelector('.text').textContent.length === 13")
        page.click("#stop")
        page.until("items[0].state === 'stopped'")
        until(lambda: running.server.worker.cancelled)
        gate.release()
        until(lambda: running.pool.idle)
        assert running.metric("longspan_streams_cancelled") == 1
        assert "stopped" in page.js("items[0].note.textContent")
        assert shown(page) == "hello" + drawn(running, "hello", max_tokens=8, seed=3)


@pytest.mark.full
def test_a_text_is_branched_where_it_is_clicked(browser, running):
    with opened(browser, running) as page:
        run(page, HOSTILE, tokens=30)
        page.until("items[0] && !items[0].control")
        root = shown(page)
        assert root == HOSTILE + drawn(running, HOSTILE, max_tokens=30, seed=3)
        page.click_at(*place(page, 0, 9))
        page.until("!items[0].panel.hidden && items[0].place === 9")
        page.write(".panel input", "word")
        page.write(".panel input[type=number]", "8")
        page.click(".panel button")
        page.until("items.length === 2 && !items[1].control")
        begin = root[:9] + "word"
        branch = shown(page, 1)
        assert branch == begin + drawn(running, begin, max_tokens=30, seed=8)
        assert [marked(page, i, "shared") for i in (0, 1)] == [root[:9]] * 2
        assert marked(page, 1, "typed") == begin
        # Without a word, the model draws another continuation with the next seed.
        page.click_at(*place(page, 1, 30))
        page.click("article:nth-of-type(2) .panel button")
        page.until("items.length === 3 && !items[2].control")
        assert shown(page, 2) == branch[:30] + drawn(running, branch[:30], max_tokens=30, seed=9)
        assert page.js("document.title") == "tiny · longspan playground"
        boxes = page.js("[...document.querySelectorAll('article')].map(e => e.getBoundingClientRect().left)")
        assert boxes == sorted(set(boxes))
        page.click("[aria-label='Delete text 2']")
        assert page.js("items.map(item => item.id)") == [1, 3]
        assert page.js("document.querySelectorAll('article').length") == 2
        run(page, "other", tokens=5)
        page.until("items.length === 3 && !items[2].control")
        assert marked(page, 2, "shared") == ""
        # An edit replaces one word and keeps the rest.
        page.click_at(*place(page, 0, 9))
        page.write(".panel input", "word")
        page.write(".panel input[type=number]", "4")
        page.click(".panel button:nth-of-type(2)")
        page.until("items.length === 4 && !items[3].control")
        edited = root[:9] + "word" + root[10:]
        assert shown(page, 3) == edited + drawn(running, edited, max_tokens=5, seed=4)
        assert marked(page, 3, "typed") == edited[: len(HOSTILE) + 3]


@pytest.mark.full
def test_the_keyboard_is_enough(browser):
    with Running() as running, opened(browser, running) as page:
        page.until("!$('form').hidden")
        page.js("$('prompt').value = ''; $('prompt').focus()")
        page.send("Input.insertText", text="keys 😀 here")
        page.press("Enter", 2, "\r")
        page.until("items[0] && !items[0].control")
        page.js("items[0].body.focus()")
        page.press("Home")
        for _ in range(6):
            page.press("ArrowRight")
        # The character of two UTF-16 units is one step.
        assert page.js("items[0].place") == 7
        page.press("ArrowLeft", 2)
        assert page.js("items[0].place") == 5
        page.press("Enter", 0, "\r")
        page.send("Input.insertText", text="new")
        page.press("Enter", 0, "\r")
        page.until("items.length === 2 && !items[1].control")
        assert shown(page, 1).startswith("keys new")
        assert page.js("document.activeElement === items[1].body")


@pytest.mark.full
def test_a_reload_keeps_the_texts_and_frees_the_slot(browser):
    with gated(decoder(vocab=128)) as (running, gate), opened(browser, running) as page:
        run(page, "kept", tokens=4000, temperature=0.5)
        gate.step(5)
        page.until("items[0]?.text.length === 10")
        text = shown(page)
        assert len(text) == 10
        page.reload()
        until(lambda: running.server.worker.cancelled)
        gate.release()
        until(lambda: running.pool.idle)
        assert running.metric("longspan_streams_cancelled") == 1
        page.until("items.length === 1")
        assert shown(page) == text
        assert "cut by a reload" in page.js("items[0].note.textContent")
        assert page.js("[$('prompt').value, $('temperature').value]") == ["kept", "0.5"]
        page.write("#max_tokens", "5")
        page.click("[aria-label='Continue text 1']")
        page.until(f"items[0].text.length === {len(text) + 5}")
        run(page, "next", tokens=1)
        page.until("items.length === 2 && items[1].id === 2")


@pytest.mark.full
def test_a_key_is_asked_for(browser):
    with Running(decoder(vocab=128), access=Access(api_key="secret")) as running:
        with opened(browser, running, errors=["status of 401"]) as page:
            page.until("!keyform.hidden && wrong.textContent.includes('requires an API key')")
            page.write("#key", "other")
            page.click("#keyform button")
            page.until("wrong.textContent.includes('does not accept this API key')")
            page.write("#key", "secret")
            page.click("#keyform button")
            page.until("keyform.hidden && wrong.hidden")
            run(page, "with a key", tokens=5)
            page.until("items[0] && !items[0].control")
            assert page.js("items[0].error.hidden && items[0].text.length === 15")
            page.until("$('live').textContent === '0 of 8'")
            assert "secret" not in page.js("JSON.stringify(sessionStorage)")


@pytest.mark.full
def test_errors_are_shown_in_words(browser):
    with gated(decoder(vocab=128), pool={"slots": 1, "queue": 0}) as (running, gate):
        with opened(browser, running, errors=["status of 429", "ERR_CONNECTION_REFUSED"]) as page:
            run(page, "first", tokens=9)
            gate.step(1)
            page.until("items[0]?.text.length === 7")
            run(page, "second", tokens=9)
            page.until("items[1]?.state === 'failed'")
            assert "try again later" in page.js("items[1].error.textContent")
            assert not page.js("items[1].error.hidden")
            gate.release()
            page.until("!items[0].control")
            running.http.should_exit = True
            running.thread.join(10)
            run(page, "third", tokens=9)
            page.until("items[2]?.state === 'failed'")
            assert "does not answer" in page.js("items[2].error.textContent")


@pytest.mark.full
def test_streams_beyond_four_wait_and_can_be_stopped(browser):
    with gated(decoder(vocab=128)) as (running, gate), opened(browser, running) as page:
        for i in range(6):
            run(page, f"{i}", tokens=5)
        page.until("items.length === 6")
        assert page.js("items.map(item => item.note.textContent.includes('waits'))") == [False] * 4 + [True] * 2
        page.click("[aria-label='Stop text 5']")
        page.until("items[4].state === 'stopped'")
        gate.release()
        page.until("!running.size")
        assert page.js("items.map(item => item.text.length)") == [6, 6, 6, 6, 1, 6]
        run(page, "again", tokens=5)
        page.until("items[6]?.text.length === 10")


@pytest.mark.full
def test_metrics_are_read_while_the_page_is_visible(browser, running):
    with opened(browser, running) as page:
        page.until("$('live').textContent === '0 of 8'")
        assert page.js("$('bytes').textContent").endswith("kB")
        page.js("Object.defineProperty(document, 'visibilityState', {value: 'hidden', configurable: true})")
        page.js("document.dispatchEvent(new Event('visibilitychange'))")
        page.js("poll()")
        before = page.logged()[1]
        page.js("(async () => { for (let i = 0; i < 3; i++) await poll(); })()")
        page.js("new Promise(resolve => setTimeout(resolve, 1100))")
        assert page.logged()[1] == before
        page.js("delete document.visibilityState")
        page.js("document.dispatchEvent(new Event('visibilitychange'))")
        until(lambda: len(page.logged()[1]) > len(before))


def complete(running, prompt, **body):
    choices = running.post(prompt=prompt, **body).json()["choices"]
    return [choice["tokens"] for choice in choices]


def gray(page, index):
    """The levels of a completion, read from its canvas."""
    return page.js(
        f"(() => {{ const canvas = document.querySelectorAll('figure canvas')[{index}];"
        "const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
        "return [...data].filter((_, i) => i % 4 === 0); })()"
    )


@pytest.mark.full
def test_a_form_is_chosen_and_begins_the_prompt(browser):
    codec = Bytes()
    codec.forms = ("ode", "elegy")
    with Running(decoder(vocab=128), codec=codec) as running, opened(browser, running) as page:
        page.until("!$('formwordpart').hidden")
        choose = "$('formword').value = 'elegy'; $('formword').dispatchEvent(new Event('change')); $('prompt').value"
        page.write("#prompt", "ode to joy")
        assert page.js("$('formword').value") == "ode"
        assert page.js(choose) == "elegy to joy"
        page.write("#prompt", "a song")
        assert page.js("$('formword').value") == ""
        assert page.js(choose) == "elegya song"


@pytest.mark.parametrize("touch", [False, True])
@pytest.mark.full
def test_a_digit_is_drawn_and_completed(browser, touch):
    with gated(decoder(vocab=17), **GRID) as (running, gate):
        width = 390 if touch else 1280
        with opened(browser, running, width=width, touch=touch) as page:
            x, y, side, _ = page.box("#pad")
            points = [(x + side * (0.2 + 0.1 * i), y + side * (0.1 + 0.1 * i)) for i in range(7)]
            (page.swipe if touch else page.drag)(points)
            cells = page.js("pad.cells")
            assert max(cells) == 16
            # The lower half belongs to the model.
            assert cells[32:] == [0] * 32
            page.write("#seed", "5")
            page.write("#count", "3")
            page.click("#run")
            gate.step(7)
            page.until("items.length === 3 && items.every(item => item.tokens.length === 40 && item.painted === 40)")
            levels = gray(page, 1)
            hidden = 0x3A
            assert levels[40:] == [hidden] * 24
            gate.release()
            page.until("!running.size && items.every(item => item.painted === 64)")
            found = complete(running, cells[:32], max_tokens=32, n=3, seed=5)
            for i in range(3):
                assert gray(page, i) == [round(255 * level / 16) for level in cells[:32] + found[i]]
            assert page.js("items.map(item => item.note.textContent)") == ["seed 5", "seed 6", "seed 7"]
            page.reload()
            page.until("model !== null")
            assert page.js("pad.cells") == cells


@pytest.mark.full
def test_a_digit_is_drawn_with_keys_and_erased(browser):
    with Running(decoder(vocab=17), **GRID) as running, opened(browser, running) as page:
        page.until("!imagesection.hidden")
        page.js("$('pad').focus()")
        page.press("ArrowLeft")
        page.press(" ", 0, " ")
        cells = page.js("pad.cells")
        assert cells[2 * 8 + 3] == 16
        page.click("#erase")
        page.js("$('pad').focus()")
        page.press(" ", 0, " ")
        assert page.js("pad.cells")[2 * 8 + 3] == 0
        page.click("#example")
        assert page.js("Math.max(...pad.cells)") == 16
        page.click("#blank")
        assert page.js("Math.max(...pad.cells)") == 0


@pytest.mark.full
def test_colors_are_three_tokens_of_a_pixel(browser):
    with Running(decoder(vocab=256), codec=False, grid=(4, 4, 3)) as running, opened(browser, running) as page:
        page.until("!imagesection.hidden")
        page.js("$('color').value = '#ff8000'; $('pad').focus(); stroke(0.5, 0.5, 0.5, 0.5)")
        assert page.js("pad.cells.slice(0, 3)") == [255, 128, 0]
        page.write("#count", "1")
        page.click("#run")
        page.until("items[0] && !running.size")
        tokens = page.js("items[0].tokens")
        assert len(tokens) == 48
        data = page.js("[...document.querySelector('figure canvas').getContext('2d').getImageData(0, 0, 4, 4).data]")
        assert [value for i, value in enumerate(data) if i % 4 != 3] == tokens


@pytest.mark.full
def test_a_model_of_tokens_takes_numbers(browser):
    with Running(decoder(vocab=17), codec=False) as running, opened(browser, running) as page:
        run(page, "3, 5 16", tokens=4)
        page.until("items[0] && !items[0].control")
        (tokens,) = complete(running, [3, 5, 16], max_tokens=4, seed=3)
        assert shown(page) == "3, 5 16 " + " ".join(map(str, tokens))
        page.js("items[0].put(6)")
        assert page.js("items[0].place") == 5
        run(page, "3 x", tokens=4)
        page.until("items[1]?.state === 'failed'")
        assert "x is none" in page.js("items[1].error.textContent")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["text", "image", "chat"])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_overflows_and_everything_has_a_name(browser, request, kind, width):
    with contextlib.ExitStack() as stack:
        if kind == "image":
            server = stack.enter_context(Running(decoder(vocab=17), **GRID))
        else:
            server = request.getfixturevalue("talking" if kind == "chat" else "running")
        page = stack.enter_context(opened(browser, server, width=width, touch=width < 700))
        if kind == "chat":
            prepare(page)
            say(page, "w" * 300)
            page.js("tip().content = '# w\\n```\\n' + 'w'.repeat(300); paint()")
            page.click("[aria-label='Regenerate message 2']")
            page.until("!running.size")
            page.click("[aria-label='Edit message 1']")
        elif kind == "image":
            page.click("#example")
            page.click("#run")
            page.until("items.length === 4 && !running.size")
        else:
            run(page, "w" * 300)
            page.until("items.length === 1 && !running.size")
            page.click("[aria-label='Branch text 1']")
        assert page.js("document.documentElement.scrollWidth <= innerWidth")
        visible = "[...document.querySelectorAll('button, input, textarea, [tabindex]')].filter(e => e.offsetParent)"
        assert page.js(f"{visible}.filter(e => e.getBoundingClientRect().height < 40).map(e => e.outerHTML)") == []
        nodes = page.send("Accessibility.getFullAXTree")["nodes"]
        roles = ("button", "textbox", "spinbutton", "slider", "img", "image")
        named = [
            node
            for node in nodes
            if not node["ignored"] and node["role"]["value"] in roles and node.get("name", {}).get("value")
        ]
        assert len(named) > 8
        assert not [
            node
            for node in nodes
            if not node["ignored"] and node["role"]["value"] in roles and not node.get("name", {}).get("value")
        ]


@pytest.mark.full
@pytest.mark.parametrize("dark", [False, True])
def test_words_stand_out_from_what_is_behind_them(browser, running, dark):
    """Contrast of at least 4.5 (WCAG 2.2, 1.4.3) for each pair of colors in use."""
    with opened(browser, running, dark=dark) as page:
        names = page.js(
            "Object.fromEntries('page card ink faint accent on-accent shared wrong wrong-card'.split(' ')"
            ".map(name => [name, getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim()]))"
        )
        pairs = [("ink", "page"), ("ink", "card"), ("ink", "shared"), ("faint", "page"), ("faint", "card")]
        pairs += [
            ("faint", "shared"),
            ("accent", "card"),
            ("on-accent", "accent"),
            ("wrong", "wrong-card"),
            ("wrong", "card"),
        ]
        assert page.js("getComputedStyle(document.body).backgroundColor") == "rgb({}, {}, {})".format(
            *(int(names["page"][i : i + 2], 16) for i in (1, 3, 5))
        )
        assert not [pair for pair in pairs if contrast(*(names[name] for name in pair)) < 4.5]


def contrast(a, b):
    def luminance(color):
        linear = []
        for i in (1, 3, 5):
            value = int(color[i : i + 2], 16) / 255
            linear.append(value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4)
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


class Tokenizer:
    """What a chat template needs of a tokenizer; the words ``refuse`` and ``think`` have their effect."""

    chat_template, eos_token_id = "<think></think>", None
    asked = ()  # the roles and contents of the last chat

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt, continue_final_message):
        self.asked = [(one["role"], one["content"]) for one in messages]
        if any(one["content"] == "refuse" for one in messages):
            raise ValueError("no such words")
        return "".join(f"{one['role'][0]}:{one['content']}\n" for one in messages) + (
            "<think>" if messages[-1]["content"] == "think" else "a:"
        )


class Chats(Bytes):
    """A codec with a chat template."""

    template = Template(Tokenizer())


@pytest.fixture(scope="module")
def talking():
    """A server of a model with a chat template."""
    with Running(decoder(vocab=128), codec=Chats()) as found:
        yield found


def say(page, text):
    page.click("#prompt")
    page.send("Input.insertText", text=text)
    page.press("Enter", 0, "\r")
    page.until("!tip().control && tip().role === 'assistant'")


def answered(running, *contents, seed=3, system=None):
    """The answer to messages of user and assistant in turns, which the server was asked for before."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    assert running.codec.template.tokenizer.asked == [tuple(one.values()) for one in messages]
    body = {"messages": messages, "max_tokens": 8, "seed": seed}
    return running.client.post("/chat/completions", json=body).json()["choices"][0]["message"]["content"]


def said(page):
    """The messages that are shown."""
    page.until("!planned")
    return page.js("tip().path.map(one => one.content)")


def prepare(page):
    page.until("!$('chatsection').hidden")
    page.write("#seed", "3")
    page.write("#max_tokens", "8")


def test_a_chat_streams_stops_and_branches(browser, talking):
    with opened(browser, talking, errors=["status of 400"]) as page:
        prepare(page)
        with Gate(talking) as gate:
            page.click("#prompt")
            page.send("Input.insertText", text="hello")
            page.press("Enter", 8, "\r")
            page.send("Input.insertText", text="you")
            page.press("Enter", 0, "\r")
            until(lambda: talking.pool.waiting or talking.pool.rows)
            gate.step(4)
            page.until("tip().content.length > 1")
            assert page.js("$('run').disabled && tip().control !== null")
            page.click("#stop")
            page.until("tip().state === 'stopped'")
            begun = page.js("tip().content")
        until(lambda: talking.pool.idle)
        assert answered(talking, "hello\nyou").startswith(begun)
        assert said(page) == ["hello\nyou", begun]
        # Another answer with the next seed is a version.
        page.click("[aria-label='Regenerate message 2']")
        page.until("!tip().control")
        again = answered(talking, "hello\nyou", seed=4)
        assert said(page) == ["hello\nyou", again]
        say(page, "and")
        end = answered(talking, "hello\nyou", again, "and")
        assert said(page) == ["hello\nyou", again, "and", end]
        page.click("[aria-label='Previous version of message 2']")
        assert said(page) == ["hello\nyou", begun]
        # The focus stays, on the same button of the other version.
        page.press("Enter", 0, "\r")
        assert said(page) == ["hello\nyou", again, "and", end]
        # An edit begins a branch in place of what followed.
        page.click("[aria-label='Edit message 1']")
        page.write(".message textarea", "bye")
        page.press("Enter", 0, "\r")
        page.until("tip().state !== 'running' && tip().path.length === 2 && tip().path[0].content === 'bye'")
        assert said(page) == ["bye", answered(talking, "bye")]
        page.reload()
        page.until("model !== null && chat.replies.length === 2")
        assert said(page)[0] == "bye"
        page.click("[aria-label='Previous version of message 1']")
        assert said(page)[0] == "hello\nyou"
        # An answer can be edited, too.
        page.click("[aria-label='Edit message 2']")
        page.write(".message.assistant textarea", "mine")
        page.press("Enter", 0, "\r")
        say(page, "so")
        assert said(page) == ["hello\nyou", "mine", "so", answered(talking, "hello\nyou", "mine", "so")]
        say(page, "think")
        assert page.js(
            "tip().content === '' && tip().thought.textContent === tip().reasoning && tip().reasoning !== ''"
        )
        assert page.js("!tip().thoughts.hidden && !tip().thoughts.open")
        say(page, "refuse")
        assert "no such words" in page.js("tip().error.textContent")
        page.js(
            "Object.defineProperty(navigator, 'clipboard', {value: {writeText: text => { window.copied = text; }}})"
        )
        page.click("[aria-label='Copy message 2']")
        assert page.until("window.copied") == "mine"
        page.click("#clear")
        assert said(page) == []
        page.click("#chatsection summary")
        page.write("#system", "be kind")
        say(page, "hi")
        assert said(page) == ["hi", answered(talking, "hi", system="be kind")]
        page.click("#totexts")
        run(page, "a text", tokens=5)
        page.until("items[0]?.state === 'full length'")


MARKDOWN = {
    "a **bold** and *slanted* `code <b>` snake_case_name 2 * 3 * 4": (
        "<p>a <strong>bold</strong> and <em>slanted</em> <code>code &lt;b&gt;</code> snake_case_name 2 * 3 * 4</p>"
    ),
    "# One\ntext\nmore\n\n---\n### Two": "<h3>One</h3><p>text\nmore</p><hr><h5>Two</h5>",
    "so:\n- a\n  1. b\n  2. c\n- d\n\n7) e": (
        '<p>so:</p><ul><li><p>a</p><ol start="1"><li><p>b</p></li><li><p>c</p></li></ol></li><li><p>d</p></li></ul>'
        '<ol start="7"><li><p>e</p></li></ol>'
    ),
    "```py\n<i>\n\n# x\n```\nafter": "<pre><code>&lt;i&gt;\n\n# x</code></pre><p>after</p>",
    "~~~\nopen **": "<pre><code>open **</code></pre>",
    "[a](https://x.y/z_(1)) [b](javascript:alert(1)) [c](//d) \\*e\\*": (
        '<p><a href="https://x.y/z_(1)" target="_blank" rel="noopener noreferrer">a</a> '
        "[b](javascript:alert(1)) [c](//d) *e*</p>"
    ),
}


def test_markdown_is_shown_and_never_read_as_html(browser, talking):
    with opened(browser, talking) as page:
        page.until("!$('chatsection').hidden")
        page.js("globalThis.shown = chat.reply({role: 'user', content: 'x'}).reply({role: 'assistant'}); 0")
        for text, html in MARKDOWN.items():
            # It comes in pieces, as a stream does.
            page.js(
                f"for (const size of [3, 9, 1e6]) {{ shown.content = {json.dumps(text)}.slice(0, size); paint(); }}"
            )
            assert page.js("shown.body.innerHTML") == html
        page.js(f"shown.content = {json.dumps(HOSTILE)}; paint()")
        assert page.js("[shown.body.textContent, shown.body.querySelectorAll('*').length]") == [HOSTILE, 1]
        deep = "- " * 3000 + "*_" * 3000 + "`" * 3000 + "[" * 3000
        page.js(f"shown.content = shown.reasoning = {json.dumps(deep)}; paint()")
        assert page.js("shown.thought.textContent") == deep
        assert page.js("document.title") == "tiny · longspan playground"
