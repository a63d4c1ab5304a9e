"""The page at `/`: what it asks the server for, and how it looks and works in a browser."""

import io
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from artifacts import PASSED, write_artifact
from browsers import open_browser
from chat_models import open_chat_model
from PIL import Image
from playwright.sync_api import Browser, Page, expect
from scripted_worker import scripted
from served import (
    Running,
    eventually,
    running,
    write_image_model,
    write_segmentation_model,
    write_sequences,
    write_sound_model,
    write_text_model,
)

from laconic.artifacts.manifest import MEASURED, REPORT
from laconic.hashing import seal, unseal
from serve.http.model_card import describe_verdict

pytestmark = pytest.mark.usefixtures("own_tasks")

HOSTILE = "<b onclick=x>&'\""
WIDTHS = (320, 1280)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("artifacts")
    paths = [
        write_artifact(folder / "twice.laconic"),
        write_sequences(folder / "sequences.laconic"),
        write_text_model(folder / "text.laconic"),
        write_artifact(folder / f"{HOSTILE}.laconic"),
    ]
    with running(*paths) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def faults(browser: Browser) -> list[str]:
    """What went wrong in the page: errors, refused resources, and requests to other hosts."""
    return []


@pytest.fixture
def page(browser: Browser, server: Running, faults: list[str]) -> Iterator[Page]:
    with browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.on("request", lambda each: faults.append(each.url) if not is_own(each.url, server) else None)
        page.goto(server.url)
        yield page
    assert faults == []


def is_own(url: str, server: Running) -> bool:
    return url.startswith((f"{server.url}/", "data:", "blob:"))


def test_every_file_of_the_page_comes_with_a_policy_that_allows_this_server_alone(http: httpx.Client) -> None:
    scripts = (("/page/page.js", "javascript"), ("/page/chat.js", "javascript"))
    for path, kind in (("/", "html"), ("/page/page.css", "css"), *scripts):
        answer = http.get(path)
        assert kind in answer.headers["content-type"]
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert "http://" not in answer.text
        assert "https://" not in answer.text


def test_a_model_is_described_with_its_verdict_and_an_example(http: httpx.Client) -> None:
    (card,) = [each for each in http.get("/page/models").json()["models"] if each["name"] == "text"]
    assert card["form"] == {"field": "text", "accept": None, "example": "Hello there."}
    assert card["verdict"]["state"] == "passed"
    assert card["verdict"]["figures"] == [{"value": "1.0000", "label": "mean"}]
    assert card["verdict"]["basis"] == "artifact against original, 4 samples"


def test_activity_counts_what_was_answered(http: httpx.Client) -> None:
    before = http.get("/page/activity").json()["twice"]
    assert http.post("/v1/models/twice/predict", json={"inputs": [{"x": [1, 2, 3]}] * 2}).status_code == 200
    after = http.get("/page/activity").json()["twice"]
    assert after["succeeded"] == before["succeeded"] + 1
    assert after["rows"] == before["rows"] + 2


def test_the_figures_are_the_mean_fidelity_and_the_metric_or_else_the_worst_sample_with_notes() -> None:
    found = {"fidelity": 0.998, "fidelity_worst": 0.9, "metric_original": 0.91, "metric": 0.905}
    labelled = PASSED.drift[0].model_copy(update={"figures": found, "required": {}})
    plain = labelled.model_copy(update={"figures": {"fidelity": 0.998, "fidelity_worst": 0.9}})
    for drift, second in ((labelled, "0.9100 → 0.9050"), (plain, "0.90000")):
        figures = describe_verdict(PASSED.model_copy(update={"drift": (drift,)}), "accuracy")["figures"]
        assert [each["value"] for each in figures] == ["0.99800", second]
    whole = PASSED.drift[0].model_copy(update={"figures": {"fidelity": 0.99}, "required": {"fidelity": 0.95}})
    kind = whole.model_copy(update={"subject": "artifact on 'code'", "figures": {"fidelity": 0.5}, "required": {}})
    notes = describe_verdict(PASSED.model_copy(update={"drift": (whole, kind)}), "accuracy")["notes"]
    assert notes == ["out-of-domain: artifact on 'code': fidelity is 0.5, required on all is 0.95"]
    assert describe_verdict(None, "accuracy")["state"] == "none"


def test_no_script_of_a_report_runs_and_a_missing_one_is_named(tmp_path: Path) -> None:
    paths = [write_artifact(tmp_path / "with.laconic"), write_artifact(tmp_path / "without.laconic")]
    (paths[1] / REPORT).unlink()
    (paths[1] / MEASURED).write_bytes(seal(unseal(paths[1] / MEASURED) | {"report": None}))
    with running(*paths) as server, server.client() as http:
        report = http.get("/page/reports/with")
        assert report.text.startswith("<!doctype html>")
        assert report.headers["content-security-policy"].startswith("sandbox; default-src 'none'")
        missing = http.get("/page/reports/without")
        assert missing.status_code == 404
        assert "has no report" in missing.json()["error"]
        assert http.get("/page/reports/other").status_code == 404


def test_each_example_is_answered_in_the_browser(page: Page) -> None:
    cards = page.locator("section")
    expect(cards).to_have_count(4)
    for card in cards.all():
        card.get_by_role("button", name="Try").click()
        expect(card.locator(".answer")).to_be_visible()
        expect(card.locator(".answer .error")).to_have_count(0)
    expect(page.locator("section h2").nth(3)).to_have_text(HOSTILE)


def test_activity_moves_in_the_browser(page: Page, server: Running) -> None:
    card = page.locator("section").first
    expect(card.locator(".live dd").first).to_have_text("0.0")
    with server.client() as http:
        for _ in range(5):
            http.post("/v1/models/twice/predict", json={"inputs": {"x": [1, 2, 3]}})
    expect(card.locator("polyline")).to_have_attribute("points", re.compile(r",1( |$)"), timeout=20_000)


def test_a_wrong_sample_is_explained_in_the_browser_and_the_keyboard_is_enough(page: Page) -> None:
    card = page.locator("section").first
    area = card.get_by_label("Sample, in JSON")
    area.fill("{")
    card.get_by_role("button", name="Try").click()
    expect(card.locator(".error")).to_contain_text("This is no JSON")
    card = page.locator("section").nth(2)
    card.get_by_label("Text").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(card.locator(".answer")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_its_window_in_both_schemes(page: Page, width: int, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    page.set_viewport_size({"width": width, "height": 800})
    expect(page.locator("section")).to_have_count(4)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 20, 19)"
    assert dark == (scheme == "dark")


def test_an_image_is_chosen_or_drawn_and_answered(browser: Browser, tmp_path: Path) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (8, 8), (255, 255, 255)).save(picture, "PNG")
    with running(write_image_model(tmp_path / "image.laconic")) as server, browser.new_context() as context:
        page = context.new_page()
        page.goto(server.url)
        card = page.locator("section")
        card.get_by_role("button", name="Try").click()
        expect(card.locator(".error")).to_have_text("Choose a file first.")
        card.locator("form.try input[type=file]").set_input_files(
            {"name": "white.png", "mimeType": "image/png", "buffer": picture.getvalue()}
        )
        card.get_by_role("button", name="Try").click()
        expect(card.locator("pre")).to_have_text("1")
        card.get_by_role("button", name="Use a test picture").click()
        card.get_by_role("button", name="Try").click()
        expect(card.locator("img")).to_be_visible()
        expect(card.locator(".error")).to_have_count(0)


def test_the_class_of_each_pixel_is_drawn_with_the_share_of_each_class(browser: Browser, tmp_path: Path) -> None:
    image, picture = Image.new("RGB", (40, 20), (255, 0, 0)), io.BytesIO()
    image.paste((0, 0, 255), (30, 0, 40, 20))
    image.save(picture, "PNG")
    with running(write_segmentation_model(tmp_path / "image.laconic")) as server, browser.new_context() as context:
        page = context.new_page()
        page.goto(server.url)
        page.locator("form.try input[type=file]").set_input_files(
            {"name": "colours.png", "mimeType": "image/png", "buffer": picture.getvalue()}
        )
        page.get_by_role("button", name="Try").click()
        mask = page.get_by_role("img", name="The class of each pixel: red, blue")
        expect(mask).to_be_visible()
        expect(page.locator(".bar output")).to_have_text(["0.750", "0.250"])
        pixel = """(canvas, x) => Array.from(canvas.getContext("2d").getImageData(x, 10, 1, 1).data.slice(0, 3))"""
        red, blue = mask.evaluate(pixel, 5), mask.evaluate(pixel, 35)
        assert red != blue
        assert mask.evaluate("canvas => [canvas.width, canvas.height]") == [40, 20]


def test_a_sound_is_played_and_its_classes_are_shown(browser: Browser, tmp_path: Path) -> None:
    with running(write_sound_model(tmp_path / "sound.laconic")) as server, browser.new_context() as context:
        page = context.new_page()
        page.goto(server.url)
        page.get_by_role("button", name="Use a test sound").click()
        sound = page.locator("audio")
        expect(sound).to_have_js_property("readyState", 4)  # all of it is there
        assert sound.evaluate("element => element.duration") > 0.99
        page.get_by_role("button", name="Try").click()
        expect(page.locator(".bar output")).to_have_count(5)
        page.locator("form.try input[type=file]").set_input_files(
            {"name": "a.wav", "mimeType": "audio/wav", "buffer": b"none"}
        )
        page.get_by_role("button", name="Try").click()
        expect(page.locator("section .error")).to_contain_text("is not an audio file that can be read")


def test_the_boxes_of_what_was_found_are_drawn_over_the_picture(browser: Browser, tmp_path: Path) -> None:
    files = []
    for name, value in (("found.png", 255), ("empty.png", 0)):
        picture = io.BytesIO()
        Image.new("RGB", (40, 20), (value, value, value)).save(picture, "PNG")
        files.append({"name": name, "mimeType": "image/png", "buffer": picture.getvalue()})
    with running(write_image_model(tmp_path / "image.laconic", "framed")) as server, browser.new_context() as context:
        page = context.new_page()
        page.goto(server.url)
        page.locator("form.try input[type=file]").set_input_files(files[0])
        page.get_by_role("button", name="Try").click()
        canvas = page.get_by_role("img", name="What was found: left, corner")
        expect(canvas).to_be_visible()
        expect(page.locator(".bar output")).to_have_text(["0.875", "0.625"])
        pixel = """(canvas, [x, y]) => Array.from(canvas.getContext("2d").getImageData(x, y, 1, 1).data.slice(0, 3))"""
        inside, left, corner = (canvas.evaluate(pixel, place) for place in ([30, 15], [10, 19], [30, 19]))
        assert inside == [255, 255, 255]
        assert len({tuple(inside), tuple(left), tuple(corner)}) == 3
        assert canvas.evaluate("canvas => [canvas.width, canvas.height]") == [40, 20]
        page.locator("form.try input[type=file]").set_input_files(files[1])
        page.get_by_role("button", name="Try").click()
        expect(page.get_by_text("Nothing was found.")).to_be_visible()


def test_the_page_says_when_the_server_is_gone(browser: Browser, tmp_path: Path) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        with running(write_artifact(tmp_path / "m.laconic")) as server:
            page.goto(server.url)
            expect(page.locator("section")).to_have_count(1)
        expect(page.get_by_role("alert")).to_have_text("The server does not answer.", timeout=20_000)


def test_a_chat_is_streamed_goes_on_and_is_stopped_in_the_browser(browser: Browser, shared: Path) -> None:
    pytest.importorskip("openvino_genai")
    faults: list[str] = []
    with running(open_chat_model(shared)[1], threads=1) as server, browser.new_context() as context:
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(server.url)
        area, turns = page.get_by_label("Message"), page.get_by_label("Chat").locator("li")
        with scripted(server, lambda prompt, _: f"I read {prompt.count('user')} <b>messages</b> 😀") as worker:
            for number in (1, 2):
                area.fill("Hello 漢字")
                area.press("Enter")
                expect(turns).to_have_count(2 * number)
                expect(turns.last).to_have_text(f"I read {number} <b>messages</b> 😀")
                expect(page.locator(".chat .time")).to_contain_text("tokens, the first after")
            prompt = worker.tokenizer.decode(list(worker.requests[1].prompt), skip_special_tokens=False)
            assert prompt.count("<|user|>Hello 漢字") == 2
            assert "<|assistant|>I read 1 <b>messages</b> 😀" in prompt
            page.get_by_role("button", name="New chat").click()
            expect(turns).to_have_count(0)
        with scripted(server, "...") as worker:
            worker.is_silent = True
            area.fill("Wait")
            page.get_by_role("button", name="Send").click()
            assert eventually(lambda: bool(worker.requests))
            page.get_by_role("button", name="Stop").click()
            expect(page.locator(".chat .time")).to_have_text("Stopped.")
            assert eventually(lambda: worker.cancelled == [(0, None)])
        area.fill("x" * 300)
        page.get_by_role("button", name="Send").click()
        expect(turns.last.locator(".error")).to_contain_text("context is 256 tokens")
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert faults == []
