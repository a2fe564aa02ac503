"""Text rows and tags of preparation against diffusers' own encoder blocks, and captions of start frames."""

import json

import pytest
import torch
from diffusers.modular_pipelines.minimax_h3.before_encoder import MiniMaxH3Ref2VASetupStep
from diffusers.modular_pipelines.minimax_h3.encoders import (
    MiniMaxH3FL2VATextEncoderStep,
    MiniMaxH3Ref2VATextEncoderStep,
    get_qwen3vl_prompt_embeds,
)
from diffusers.modular_pipelines.minimax_h3.references import MiniMaxH3ImageReference
from diffusers.modular_pipelines.modular_pipeline import PipelineState
from media import CHAT, scene, small_h3
from PIL import Image
from transformers import Qwen2TokenizerFast, Qwen3VLForConditionalGeneration

from rtcwm.errors import UserError
from rtcwm.prepare.captions import canonical, from_start, read_caption
from rtcwm.prepare.sources import Source
from rtcwm.prepare.text import TextEncoder
from rtcwm.prepare.weights import text_identity
from rtcwm.prepare.work import short_edge_size

CAPTION = "[0.00s] A square.\r\n[1.42s] Sky \u2013 and <Picture 1>: a road."


def encoder(**changed) -> TextEncoder:
    h3 = small_h3()
    given = dict(layer=50, device=torch.device("cpu"))
    return TextEncoder(h3 / "text_encoder", h3 / "tokenizer", h3 / "processor", **given | changed)


@pytest.fixture(scope="module")
def plain() -> TextEncoder:
    return encoder()


@pytest.fixture(scope="module")
def whole() -> Qwen3VLForConditionalGeneration:
    """All 52 layers, as diffusers loads them."""
    return Qwen3VLForConditionalGeneration.from_pretrained(small_h3() / "text_encoder", dtype=torch.bfloat16).eval()


def picture(height=64, width=128) -> Image.Image:
    return Image.fromarray(scene(1, height, width)[0])


def by_block(block, model, plain, **inputs):
    """Rows and tags that a block of diffusers puts into its state, on its own pipeline."""
    pipeline = block.init_pipeline()
    pipeline.update_components(text_encoder=model, tokenizer=plain.tokenizer, processor=plain.processor)
    state = PipelineState()
    for name, value in inputs.items():
        state.set(name, value)
    _, state = block(pipeline, state)
    return state.get("prompt_embeds")[0], state.get("text_token_tags")


@pytest.mark.parametrize("caption", [CAPTION, "", "no stamps at all"])
def test_rows_and_tags_are_those_of_the_ref2va_block(plain, whole, caption):
    references = [MiniMaxH3ImageReference(image=picture())]
    expected, tags = by_block(
        MiniMaxH3Ref2VATextEncoderStep(), whole, plain, prompt=caption, normalized_references=references
    )
    rows, found = plain.encode(caption, picture())
    assert rows.dtype == torch.bfloat16 and torch.equal(rows, expected) and torch.equal(found, tags)
    assert rows.shape == (len("<Picture 1>: ") + 2 + 2 * 4 + len(caption.encode()), 32)  # a byte a token, 2 x 4 pads
    assert found.tolist().count(0) == 2 + 2 * 4 and rows.float().std() > 0.1


def test_rows_are_those_of_the_keyframe_block_too(plain, whole):
    expected, tags = by_block(
        MiniMaxH3FL2VATextEncoderStep(), whole, plain, prompt=CAPTION, keyframes=[picture(32, 96)]
    )
    rows, found = plain.encode(CAPTION, picture(32, 96))
    assert torch.equal(rows, expected) and torch.equal(found, tags)


def test_the_layer_read_is_the_one_asked_for(plain, whole):
    rows, _ = plain.encode(CAPTION, picture())
    other, _ = encoder(layer=3).encode(CAPTION, picture())
    assert plain.model.config.text_config.num_hidden_layers == 51  # the rest is not loaded
    assert not torch.equal(rows, other)
    with pytest.raises(UserError, match="52 layers; expected .* more than 52"):
        encoder(layer=52)


def test_a_system_prompt_makes_it_a_chat(plain, whole):
    made = encoder(system_prompt="Follow the proxy.")
    rows, tags = made.encode(CAPTION, picture())
    tokenizer = Qwen2TokenizerFast.from_pretrained(small_h3() / "tokenizer")
    assert tokenizer.chat_template == CHAT

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    head = ids("<|im_start|>system\nFollow the proxy.<|im_end|>\n<|im_start|>user\n<Picture 1>: ")
    block, tail = ids("<|vision_start|>" + "<|image_pad|>" * 8 + "<|vision_end|>"), ids(CAPTION + "<|im_end|>\n")
    assert tags.tolist() == [1] * len(head) + [0] * len(block) + [1] * len(tail)
    vision = plain.processor.image_processor(images=[picture()], return_tensors="pt")
    with torch.no_grad():
        expected = get_qwen3vl_prompt_embeds(
            whole, plain.processor, head + block + tail, dict(vision), 50, torch.device("cpu"), whole.dtype
        )
    assert torch.equal(rows, expected[0])


def test_what_names_a_text_encoder(tmp_path):
    h3 = small_h3()
    folders = h3 / "text_encoder", h3 / "tokenizer", h3 / "processor"
    one = text_identity(*folders, 50)
    assert one == text_identity(*folders, 50) and one["name"] == "qwen3-vl[50]"
    (tmp_path / "processor").mkdir()
    settings = json.loads((h3 / "processor" / "preprocessor_config.json").read_text())
    settings["image_mean"] = [0.1, 0.2, 0.3]
    (tmp_path / "processor" / "preprocessor_config.json").write_text(json.dumps(settings))
    assert text_identity(*folders[:2], tmp_path / "processor", 50)["hash"] != one["hash"]


def source(tmp_path, prompt=None, **files) -> Source:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    captions = tuple(tmp_path / name for name in ("prompt.txt", "prompt.json", "caption.json") if name in files)
    return Source("a", "a", "here", tmp_path, tmp_path, prompt=prompt, captions=captions)


def test_where_a_caption_comes_from_and_what_is_said(tmp_path):
    files = {
        "prompt.txt": "\ufeff[0.00s] One.\n[1.00s] Two.\n".encode(),
        "prompt.json": {"compiled": {"cwm": {"user": "[0.00s-5.17s] Compiled."}}},
        "caption.json": {"caption": "A whole episode."},
    }
    assert read_caption(source(tmp_path, "[0.00s] Given.", **files), True) == ("[0.00s] Given.", ())
    assert read_caption(source(tmp_path, **files), True) == ("[0.00s] One.\r\n[1.00s] Two.", ())
    files["prompt.txt"] = b" \n"
    passed = "prompt.txt is empty: passed over"
    assert read_caption(source(tmp_path, **files), True) == ("[0.00s-5.17s] Compiled.", (passed,))
    del files["prompt.json"]
    text, notes = read_caption(source(tmp_path, **files), True)
    assert text == "A whole episode." and notes[0] == passed
    assert "whole episode and not this clip" in notes[1] and "no time stamps" in notes[2]
    assert read_caption(source(tmp_path, **files), False) == ("", (passed, "no caption: the text is empty"))
    assert read_caption(source(tmp_path, ""), True)[0] == ""


@pytest.mark.parametrize(
    "content", [b"", b" \n", b"null", b"\xef\xbb\xbfnull\n", {}, {"caption": None}, {"text": ""}, b'""']
)
def test_an_annotation_that_says_nothing_is_as_one_that_is_not_there(tmp_path, content):
    files = {"prompt.json": content, "caption.json": {"caption": "[0.00s] Seen."}}
    passed = "prompt.json is empty: passed over"
    text, notes = read_caption(source(tmp_path, **files), True)
    assert text == "[0.00s] Seen." and notes[0] == passed and "whole episode" in notes[1] and len(notes) == 2
    assert read_caption(source(tmp_path, **files), False) == ("", (passed, "no caption: the text is empty"))


@pytest.mark.parametrize(
    "content", [b"{", b"\xff\xfe\x00", {"a": 1}, ["x"], {"caption": 7}, b"0", [], b"false", b"[" * 10**5]
)
def test_a_caption_file_that_cannot_be_read_is_refused(tmp_path, content):
    with pytest.raises(UserError, match="caption.json"):
        read_caption(source(tmp_path, **{"caption.json": content}), True)


def test_a_text_without_end_is_no_caption(tmp_path):
    assert len(read_caption(source(tmp_path, "x" * 20_000), True)[0]) == 20_000
    with pytest.raises(UserError, match="the caption has 20001 characters, expected at most 20000"):
        read_caption(source(tmp_path, "x" * 20_001), True)


def test_a_start_frame_counts_its_seconds_from_its_picture():
    caption = canonical("[0.00s-1.00s] Gone.\nwith it\n[1.00s-5.17s] Here.\n[0.50s] Begun.\n[3.00s] Later.\nstays")
    moved = from_start(caption, 2 * 17 / 24)
    assert moved.split("\r\n") == ["[0.00s-3.75s] Here.", "[0.00s] Begun.", "[1.58s] Later.", "stays"]
    assert from_start(caption, 0.0) == caption and from_start("no stamps", 2.0) == "no stamps"


def test_setup_of_diffusers_scales_a_reference_as_the_2048_picture_is(plain):
    block = MiniMaxH3Ref2VASetupStep()
    for height, width in ((768, 1344), (704, 1280), (64, 96), (300, 200)):
        pipeline, state = block.init_pipeline(), PipelineState()
        pipeline.load_components()
        image = Image.new("RGB", (width, height))
        for name, value in dict(references=[MiniMaxH3ImageReference(image)], num_frames=124).items():
            state.set(name, value)
        _, state = block(pipeline, state)
        assert state.get("normalized_references")[0].image.size == short_edge_size(height, width, 2048)[::-1]
