"""Text rows of a start frame: Qwen3-VL read at one hidden layer, as diffusers' H3 blocks read it.

The presentation is `<Picture 1>: `, a vision block of Picture 1, and the caption verbatim, without a chat template or
special tokens. With a system prompt (the released adapter was trained with one) it becomes the user's turn of the
tokenizer's chat template, the system prompt before it. Rows of the vision block carry the tag of video, all others that
of text.

The proxy is not shown to the text encoder: a stream's text rows are computed once and must not know the proxy's future.

Only the layers up to the one that is read, and one more, are loaded: 51 of 64, a fifth less memory. The one more keeps
the read state from being the stack's last, which transformers returns normalised.
"""

from pathlib import Path

import torch
from torch import Tensor

from rtcwm.errors import UserError
from rtcwm.model.layout import TEXT_TAG, VIDEO_TAG
from rtcwm.prepare.extra import missing
from rtcwm.prepare.weights import weight_files

try:
    from diffusers.modular_pipelines.minimax_h3.encoders import get_qwen3vl_prompt_embeds
    from PIL import Image
    from transformers import (
        AutoConfig,
        PretrainedConfig,
        Qwen2TokenizerFast,
        Qwen2VLImageProcessorPil,
        Qwen3VLForConditionalGeneration,
    )
    from transformers.processing_utils import ProcessorMixin
    from transformers.utils import logging
except ImportError as error:
    raise missing("transformers 5.24 or newer and pillow", error) from error

BODY = "\ue000"  # stands for the user's turn in the chat template; a private character that no prompt holds


class PictureProcessor(ProcessorMixin):
    """The picture half of `Qwen3VLProcessor`: its video half needs torchvision and is never used here."""

    def __init__(self, image_processor=None, tokenizer=None, **kwargs):
        self.image_token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self.video_token_id = tokenizer.convert_tokens_to_ids("<|video_pad|>")
        super().__init__(image_processor, tokenizer)


class TextEncoder:
    """A loaded Qwen3-VL conditioner."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Path,
        processor: Path,
        layer: int,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        system_prompt: str = "",
    ):
        """Load it.

        Args:
            folder: `text_encoder/`; tokenizer: `tokenizer/`; processor: `processor/`.
            layer: hidden state to read, 50 for the release.
            device: where to run.
            dtype: of the weights, and of the rows.
            system_prompt: text of the chat template's system turn; without one there is no template.

        Raises:
            UserError: pickles, too few layers, a tokenizer without the vision tokens or without a chat template.
        """
        weight_files(folder)
        logging.set_verbosity_error()  # says of every unread layer that it was not loaded
        logging.disable_progress_bar()  # of a few seconds, once a process
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        layers = getattr(config, "text_config", config).num_hidden_layers
        if config.model_type != "qwen3_vl" or layers <= layer:
            raise UserError(
                f"{folder} is a {config.model_type} of {layers} layers; expected a qwen3_vl with more than {layer}, "
                f"whose hidden state {layer} is read (--text-layer)"
            )
        config.text_config.num_hidden_layers = layer + 1
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(
            folder, config=config, dtype=dtype, device_map={"": device}, use_safetensors=True, local_files_only=True
        )  # tensor by tensor onto the device: eight workers must not hold eight copies in host memory
        self.model.eval().requires_grad_(False)
        self.tokenizer = Qwen2TokenizerFast.from_pretrained(tokenizer, local_files_only=True)
        pictures = Qwen2VLImageProcessorPil.from_pretrained(processor, local_files_only=True)
        self.processor = PictureProcessor(pictures, self.tokenizer)
        self.layer, self.device = layer, device
        self.marks = {name: self._token(f"<|{name}|>") for name in ("vision_start", "image_pad", "vision_end")}
        self._check_parts(config, tokenizer, processor)
        self.before, self.after = self._turns(system_prompt)

    @torch.inference_mode()
    def encode(self, caption: str, picture: "Image.Image") -> tuple[Tensor, Tensor]:
        """Rows `[n, width]` (5120 for the release) and tags `[n]` of a caption and Picture 1, on the CPU."""
        vision = self.processor.image_processor(images=[picture], return_tensors="pt")
        pads = int(vision["image_grid_thw"][0].prod()) // self.processor.image_processor.merge_size**2
        label = self._tokens("<Picture 1>: ")
        block = [self.marks["vision_start"], *[self.marks["image_pad"]] * pads, self.marks["vision_end"]]
        words = [*self._tokens(caption), *self.after]
        tokens = [*self.before, *label, *block, *words]
        tags = [TEXT_TAG] * (len(self.before) + len(label)) + [VIDEO_TAG] * len(block) + [TEXT_TAG] * len(words)
        rows = get_qwen3vl_prompt_embeds(
            self.model,
            self.processor,
            tokens,
            {name: vision[name] for name in ("pixel_values", "image_grid_thw")},
            text_encoder_layer=self.layer,
            device=self.device,
            dtype=self.model.dtype,
        )[0].cpu()
        if not torch.isfinite(rows).all():
            raise UserError("the text encoder gave rows that are not finite: its weights are damaged")
        return rows, torch.tensor(tags)

    def _check_parts(self, config: PretrainedConfig, tokenizer: Path, processor: Path) -> None:
        """UserError where tokenizer or picture processor are those of another model."""
        sees, cuts = config.vision_config, self.processor.image_processor
        given = {"image_pad token": self.marks["image_pad"], "patch_size": cuts.patch_size,
                 "merge_size": cuts.merge_size, "temporal_patch_size": cuts.temporal_patch_size}  # fmt: skip
        read = {"image_pad token": config.image_token_id, "patch_size": sees.patch_size,
                "merge_size": sees.spatial_merge_size, "temporal_patch_size": sees.temporal_patch_size}  # fmt: skip
        for name, value in given.items():
            if value != read[name]:
                folder = tokenizer if name.endswith("token") else processor
                raise UserError(
                    f"{folder} has {name} {value}, the text encoder reads {read[name]}: it is another model's or "
                    "damaged, copy it again"
                )

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _token(self, mark: str) -> int:
        token = self.tokenizer.convert_tokens_to_ids(mark)
        if token is None or token == self.tokenizer.unk_token_id:
            raise UserError(f"the tokenizer has no token {mark}: it is not Qwen3-VL's")
        return token

    def _turns(self, system_prompt: str) -> tuple[list[int], list[int]]:
        """Tokens before and after the presentation."""
        if not system_prompt:
            return [], []
        if not self.tokenizer.chat_template:
            raise UserError(
                "--system-prompt needs the tokenizer's chat template (chat_template.jinja), which is missing"
            )
        turns = [{"role": "system", "content": system_prompt}, {"role": "user", "content": BODY}]
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=False)
        if text.count(BODY) != 1:
            raise UserError("the tokenizer's chat template does not hold the user's text exactly once")
        before, after = text.split(BODY)
        return self._tokens(before), self._tokens(after)
