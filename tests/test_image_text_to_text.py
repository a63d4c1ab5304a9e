"""Vision-language models: one verdict on tower and decoder, and chats about images over OpenAI's routes."""

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
import transformers
from browsers import open_browser
from image_chat_models import CONTEXT, QUESTIONS, draw, make_processor, save_image_model, write_chats
from PIL import Image
from playwright.sync_api import Browser, expect
from served import Running, running

from export.formats.write import write_format
from export.pipeline import Result, export
from laconic.artifacts.artifact import Artifact
from laconic.cache import Cache
from laconic.errors import FormatRefused, InputError, RecipeError, SourceError
from laconic.models.task_inference import infer_task
from laconic.models.vision_language_model import VisionLanguageModel
from laconic.recipes.recipe import Recipe
from laconic.runtimes.generator import EncoderInputs, GenerationRequest, Sampling
from laconic.runtimes.openvino_generator import OpenVinoGenerator
from laconic.tasks.decoder_tensors import PIXELS
from train.objectives.choice import make_objective

TOWER = ["*vision_tower*", "*projector*"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_model(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def original(source: Path) -> transformers.LlavaForConditionalGeneration:
    return transformers.LlavaForConditionalGeneration.from_pretrained(source).eval()


@pytest.fixture(scope="module")
def make_artifact(source: Path, cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("artifacts")
    chats = write_chats(folder)

    def make(name: str, *stages: Any) -> Result:
        recipe = {"source": str(source), "data": {"calibrate": str(chats)}, "stages": list(stages)}
        return export(Recipe.parse(recipe | {"engine_only": "openvino"}), folder / name, cache=cache)

    return make


@pytest.fixture(scope="module")
def artifact(make_artifact: Any) -> Artifact:
    made: Artifact = make_artifact("squares.laconic").artifact
    return made


@pytest.fixture(scope="module")
def server(artifact: Artifact) -> Iterator[Running]:
    with running(artifact.path, threads=1, kv_cache=1 << 20) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(question: str, *files: bytes, kind: str = "image/png") -> list[Any]:
    """A chat with a question about images."""
    urls = [f"data:{kind};base64,{base64.b64encode(file).decode()}" for file in files]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def answer(original: Any, question: str, *files: bytes) -> tuple[list[int], str]:
    """The tokens of a prompt, and what transformers writes behind it, greedily."""
    processor = make_processor()
    content = [{"type": "image"}] * len(files) + [{"type": "text", "text": question}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    images = [Image.open(io.BytesIO(file)) for file in files] or None
    inputs = processor(text=text, images=images, return_tensors="pt")
    ids = inputs["input_ids"]
    written = original.generate(**inputs, do_sample=False, max_new_tokens=16)[0, ids.shape[1] :]
    return ids[0].tolist(), processor.tokenizer.decode(written, skip_special_tokens=True)


def test_weights_in_four_bits_beside_a_tower_in_eight_pass_one_verdict(make_artifact: Any) -> None:
    stage = {"quantize.weights": {"bits": 4, "group_size": 32, "keep_int8": TOWER}}
    made: Artifact = make_artifact("int4.laconic", stage).artifact
    verdict = made.manifest.placements[0].verdict
    assert verdict.passed, verdict.describe()
    figures = {name: value for each in verdict.information for name, value in each.figures.items()}
    assert 0.9 < figures["image_features_cosine"] <= 1
    assert figures["skill"] > 0.8
    # With another image the first letter of an answer is wrong, and the later ones follow from those before.
    assert 0.7 < figures["fidelity_of_null"] < 0.95
    precision = made.manifest.placements[0].precision
    bits = {name: kind for name, kind in precision.items() if "MatMul" in name}
    is_tower = {name: "vision_tower" in name or "projector" in name for name in bits}
    assert {kind for name, kind in bits.items() if is_tower[name]} == {"int8-weight"}
    assert "int4-weight" in {kind for name, kind in bits.items() if not is_tower[name]}
    with pytest.raises(FormatRefused, match="language models"):
        write_format(made.path, "gguf", made.path.with_name("file.gguf"))


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_chat_about_an_image_is_answered_as_by_transformers(
    client: openai.OpenAI, original: Any, question: str
) -> None:
    rng = np.random.default_rng(7)
    answers = set()
    for _ in range(3):
        file, _ = draw(rng)
        ids, text = answer(original, question, file)
        whole = client.chat.completions.create(model="squares", temperature=0, messages=ask(question, file))
        assert whole.choices[0].message.content == text
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == len(ids)
        stream = client.chat.completions.create(
            model="squares", temperature=0, messages=ask(question, file), stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
        answers.add(text)
    assert len(answers) > 1


def test_a_chat_goes_on_with_another_image(client: openai.OpenAI, original: Any) -> None:
    rng = np.random.default_rng(9)
    files = [draw(rng)[0], draw(rng)[0]]
    messages = [*ask("colour", files[0]), {"role": "assistant", "content": "red"}, *ask("corner", files[1])]
    text = "USER: <image>colour ASSISTANT: red</s>USER: <image>corner ASSISTANT: "
    images = [Image.open(io.BytesIO(file)) for file in files]
    inputs = make_processor()(text=text, images=images, return_tensors="pt")
    written = original.generate(**inputs, do_sample=False, max_new_tokens=16)[0, inputs["input_ids"].shape[1] :]
    whole = client.chat.completions.create(model="squares", temperature=0, messages=messages)
    assert whole.choices[0].message.content == make_processor().tokenizer.decode(written, skip_special_tokens=True)


def test_a_chat_without_an_image_and_a_text_are_answered_too(client: openai.OpenAI, original: Any) -> None:
    _, text = answer(original, "colour")
    messages: Any = [{"role": "user", "content": "colour"}]
    whole = client.chat.completions.create(model="squares", temperature=0, messages=messages)
    assert whole.choices[0].message.content == text
    plain = client.completions.create(model="squares", temperature=0, prompt="USER: colour ASSISTANT: ")
    assert plain.choices[0].text == text


def test_chats_about_numbers_of_images_are_written_together(artifact: Artifact, original: Any) -> None:
    rng = np.random.default_rng(8)
    task, model = artifact.task(), artifact.path / artifact.manifest.placements[0].model
    chats = [[draw(rng)[0] for _ in range(count)] for count in (1, 0, 3, 2)]
    sampling = Sampling(max_new_tokens=16, stop_token_ids=(1,))
    written: dict[int, list[int]] = {index: [] for index in range(len(chats))}
    with OpenVinoGenerator(model, context=CONTEXT, cache_bytes=1 << 20) as generator:
        for index, files in enumerate(chats):
            encoded = task.encode_prompt("USER: " + "<image>" * len(files) + "colour ASSISTANT: ", files)
            images = EncoderInputs({PIXELS: encoded[PIXELS]}, 0)
            prompt = tuple(encoded["input_ids"][0].tolist())
            generator.add(GenerationRequest(index, prompt, sampling, images if files else None))
        with pytest.raises(InputError, match="the tokens run from -9 "):
            generator.add(GenerationRequest(9, (-9,), sampling, images))
        with pytest.raises(InputError, match="expected"):
            generator.add(GenerationRequest(9, (-1,), sampling, EncoderInputs({PIXELS: encoded[PIXELS][0]}, 0)))
        with pytest.raises(InputError, match="the tokens run from -1 "):
            generator.add(GenerationRequest(9, (-1,), sampling))
        while not generator.is_idle:
            for event in generator.step():
                written[event.request_id] += event.token_ids
    for index, files in enumerate(chats):
        assert task.write(written[index]) == answer(original, "colour", *files)[1]


FILE = draw(np.random.default_rng(0))[0]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (ask("a", *[FILE] * 24), f"context is {CONTEXT} tokens"),
        (ask("a", *[FILE] * 25), "25 images have at least 4 each"),
        (ask("a", b"no image"), "not an image that can be read: it begins as none of PNG, JPEG"),
        (ask("a", FILE[:60]), "not an image that can be read"),
        (ask("a", FILE, kind="text/html"), "images are not fetched from elsewhere"),
        (ask("<image>", FILE), "Leave that token out"),
        (ask("<image>"), "Leave that token out"),
        (ask("a" * CONTEXT, FILE), f"context is {CONTEXT} tokens"),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_sentence(server: Running, messages: Any, said: str) -> None:
    refuse(server, messages, said)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1/a.png", "images are not fetched from elsewhere"),
        ("file:///etc/passwd", "images are not fetched from elsewhere"),
        ("data:image/png;base64,%%%", "is not valid base64"),
    ],
)
def test_an_image_from_elsewhere_is_refused(server: Running, url: str, said: str) -> None:
    refuse(server, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}], said)


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(server: Running) -> None:
    file = io.BytesIO()
    Image.new("1", (7000, 7000)).save(file, "PNG")
    refuse(server, ask("a", file.getvalue()), "more than 36,000,000")


def refuse(server: Running, messages: Any, said: str) -> None:
    with server.client() as http:
        refused = http.post("/v1/chat/completions", json={"model": "squares", "messages": messages})
    assert refused.status_code == 400
    assert said in refused.json()["error"]["message"]


def test_a_chat_about_an_image_goes_on_in_the_browser(browser: Browser, server: Running, original: Any) -> None:
    file, _ = draw(np.random.default_rng(4))
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(server.url)
        turns = page.get_by_label("Chat").locator("li")
        page.get_by_label("Image", exact=True).set_input_files(
            {"name": "a.png", "mimeType": "image/png", "buffer": file}
        )
        page.get_by_label("Message").fill("corner")
        page.get_by_role("button", name="Send").click()
        expect(turns.first.locator("img")).to_have_attribute("src", re.compile("^data:image/png;base64,"))
        expect(turns.last).to_have_text(answer(original, "corner", file)[1].strip())
        page.get_by_label("Message").fill("colour")
        page.get_by_role("button", name="Send").click()
        expect(turns).to_have_count(4)
        expect(page.locator(".chat .time")).to_contain_text("tokens")
        page.get_by_role("button", name="New chat").click()
        expect(page.get_by_label("Image", exact=True)).to_be_visible()
        page.get_by_role("button", name="Try").click()
        expect(page.locator(".answer")).not_to_be_empty()
        expect(page.locator(".answer .error")).to_have_count(0)


def test_a_sample_is_answered_by_the_endpoint_of_its_task(server: Running, original: Any) -> None:
    file, _ = draw(np.random.default_rng(3))
    chat = {"messages": [{"role": "user", "content": "corner"}], "image": base64.b64encode(file).decode()}
    with server.client() as http:
        answered = http.post("/v1/models/squares/predict", json={"chat": chat})
    assert answered.status_code == 200, answered.text
    assert json.dumps(answer(original, "corner", file)[1].strip()) in answered.text


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [{"role": "user", "content": "a"}], "image": "none.png"}, "no image 'none.png'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "show 1 images, and 0 came"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "must be a text, or a list"),
        ({"messages": []}, "no messages"),
        ({"messages": [], "image": "none.png", "images": []}, "both 'image' and 'images'"),
        ({"messages": [], "images": "none.png"}, "'images' must be a list"),
        ({"messages": [], "images": [1]}, "an image must be the content of a file, not int"),
        ({"image": "none.png"}, "no image"),
    ],
)
def test_rows_that_are_no_chats_are_refused(artifact: Artifact, tmp_path: Path, row: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        artifact.task().read_row(row, tmp_path)


def test_a_model_of_another_kind_is_refused() -> None:
    config = SimpleNamespace(model_type="llava_next")
    with pytest.raises(SourceError, match="'llava_next' is not supported; expected one of llava"):
        VisionLanguageModel(SimpleNamespace(config=config))
    described = {"architectures": ["LlavaNextForConditionalGeneration"], "text_config": {}, "vision_config": {}}
    with pytest.raises(SourceError, match="LlavaNextForConditionalGeneration, which is not supported"):
        infer_task(Path("llava-next"), described)


def test_models_that_read_images_are_not_trained(artifact: Artifact) -> None:
    with pytest.raises(RecipeError, match="are quantized, and not trained"):
        make_objective(artifact.task())
