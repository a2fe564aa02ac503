"""The codec against its definition in loops, and what streams rely on: no memory across groups, a stable identity."""

import hashlib

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from worlds import tensors

from rtcwm.data.codec import SHIPPED, TEXT_DIM, TEXT_ROWS, embed_text, load_codec, patches, unpatches
from rtcwm.data.codec_fit import principal
from rtcwm.data.world import Film
from rtcwm.errors import UserError

CODEC = load_codec()


def noise(frames: int, height: int = 32, width: int = 48) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (frames, height, width, 3)).astype(np.uint8)


def psnr(one: np.ndarray, two: np.ndarray) -> float:
    return float(-10 * np.log10(((one.astype(float) - two) ** 2).mean() / 255**2))


def test_fresh_scenes_come_back_with_25_decibels_and_more():
    for episode in range(3):
        frames, proxy = Film(4242, episode, 0).chunk(2)
        assert psnr(CODEC.decode(CODEC.encode(frames.rgb)), frames.rgb) > 25
        assert psnr(CODEC.decode(CODEC.encode(proxy)), proxy) > 15  # a proxy's latent covers 64 x 64 picture pixels


def test_a_latent_is_the_projection_of_its_patch():
    frames = noise(34)
    latents = CODEC.encode(frames)
    assert latents.shape == (24, 10, 2, 3)
    weights = {name: tensor.double().numpy() for name, tensor in tensors(SHIPPED).items()}
    for latent, first, group in ((0, 0, 1), (1, 1, 4), (4, 13, 4), (5, 17, 1), (7, 22, 4)):
        patch = frames[first : first + group, 16:32, 32:48].astype(float) / 255 - 0.5  # row 1, column 2
        values = (patch.reshape(-1) - weights[f"centre_{group}"]) @ weights[f"basis_{group}"]
        expected = (values - weights[f"mean_{group}"]) / weights[f"std_{group}"]
        np.testing.assert_allclose(latents[:, latent, 1, 2].numpy(), expected, atol=2e-3)


def test_patches_and_their_inverse():
    frames = torch.from_numpy(noise(8))
    for group in (1, 4):
        back = unpatches(patches(frames, group), group)
        assert torch.equal((back * 255).round().to(torch.uint8), frames)


def test_decoding_is_the_inverse_on_what_the_basis_spans():
    latents = torch.randn(24, 10, 2, 3, generator=torch.Generator().manual_seed(0)) * 0.2
    pixels = CODEC.pixels(latents)
    assert pixels.min() > 0 and pixels.max() < 1  # nothing was clipped, so only uint8 rounding is lost
    back = CODEC.encode(torch.from_numpy(CODEC.decode(latents)))
    assert (back - latents).abs().mean() < 0.01


def test_groups_are_coded_alone():
    frames = noise(51)
    latents = CODEC.encode(frames)
    chunks = [CODEC.encode_clip(frames[first : first + 17]) for first in (0, 17, 34)]
    torch.testing.assert_close(latents, torch.cat(chunks, 1))
    torch.testing.assert_close(CODEC.encode_picture(frames[17]), latents[:, 5:6])
    decoded = CODEC.decode(latents)
    for count, seen in ((1, 1), (5, 17), (7, 22), (12, 39)):
        assert (CODEC.decode(latents[:, :count]) == decoded[:seen]).all()


def test_arrays_and_tensors_give_the_same():
    frames = noise(17)
    assert torch.equal(CODEC.encode(frames), CODEC.encode(torch.from_numpy(frames)))
    latents = CODEC.encode(frames)
    assert (CODEC.decode(latents) == CODEC.decode(latents.numpy())).all()


def test_video_latents_are_of_unit_order():
    latents = torch.stack([CODEC.encode(Film(77, episode, 0).chunk(0)[0].rgb) for episode in range(4)])
    assert 0.3 < latents.std() < 1.1 and latents.abs().max() < 30


def test_wrong_frames_are_refused():
    with pytest.raises(UserError, match="found 18 frames.*cut the video to 17"):
        CODEC.encode(noise(18))
    with pytest.raises(UserError, match="clip has 17 frames, found 34"):
        CODEC.encode_clip(noise(34))
    with pytest.raises(UserError, match="50x32 pixels.*multiples of 16"):
        CODEC.encode(noise(17, 32, 50))
    with pytest.raises(UserError, match="expected uint8"):
        CODEC.encode(noise(17).astype(np.float32))
    with pytest.raises(UserError, match=r"expected \[24, L, h, w\]"):
        CODEC.decode(torch.zeros(16, 5, 2, 2))


def test_the_identity_is_a_hash_of_the_weights(tmp_path):
    found = tensors(SHIPPED)
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(f"{name} {found[name].dtype} {tuple(found[name].shape)}".encode() + found[name].numpy().tobytes())
    assert CODEC.identity == {"name": "rtcwm-pca", "hash": digest.hexdigest()[:16]}
    found["std_1"][3] *= 1.5
    save_file(found, tmp_path / "other.safetensors")
    assert load_codec(tmp_path / "other.safetensors").identity["hash"] != CODEC.identity["hash"]


def test_broken_codec_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read as a codec"):
        load_codec(tmp_path / "none.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(SHIPPED.read_bytes()[:5000])
    with pytest.raises(UserError, match="cannot be read as a codec"):
        load_codec(tmp_path / "cut.safetensors")
    save_file({"weight": torch.zeros(2)}, tmp_path / "else.safetensors")
    with pytest.raises(UserError, match="expected a codec"):
        load_codec(tmp_path / "else.safetensors")


def test_shipped_bases_are_orthonormal():
    for basis in CODEC.basis.values():
        torch.testing.assert_close(basis.T @ basis, torch.eye(24), atol=2e-3, rtol=0)


def test_principal_components_of_a_mixture():
    """Against the singular values of the stacked data, each row weighted by its kind's share over its count."""
    random = np.random.default_rng(0)
    kinds = [random.normal(size=(count, 32)) * np.linspace(1, 5, 32) + 3 for count in (500, 90)]
    share = np.array([0.9, 0.1])
    scatter = np.stack([rows.T @ rows for rows in kinds])
    total = np.stack([rows.sum(0) for rows in kinds])
    basis, centre, std = principal(scatter, total, np.array([500.0, 90.0]), share, 4)
    weights = np.concatenate([np.full(len(rows), part / len(rows)) for rows, part in zip(kinds, share, strict=True)])
    rows = np.concatenate(kinds)
    np.testing.assert_allclose(centre, weights @ rows)
    _, singular, right = np.linalg.svd((rows - centre) * np.sqrt(weights)[:, None], full_matrices=False)
    np.testing.assert_allclose(std, singular[:24], rtol=1e-6)
    np.testing.assert_allclose(np.abs((right[:24] * basis.T).sum(1)), 1, rtol=1e-6)
    still = basis.reshape(4, 8, 24).sum(0)
    assert (still[np.abs(still).argmax(0), np.arange(24)] > 0).all()


def test_a_caption_becomes_rows_with_the_picture_before_the_words():
    picture = torch.randn(24, 1, 4, 6, generator=torch.Generator().manual_seed(1))
    text, tags = embed_text("[0.00s] a red ball\r\n[0.71s] a ball", picture)
    assert text.shape == (TEXT_ROWS, TEXT_DIM) and text.dtype == torch.float32
    assert tags.tolist() == [1, 0, 0, 0, 0] + [1] * 35
    quarter = picture[:, 0, :2, 3:].mean((1, 2))  # top right
    torch.testing.assert_close(text[2, :24], quarter)
    assert (text[1:5, 24:] == 0).all()
    # rows 5..: [0.00s] a red ball [0.71s] a ball, then padding
    assert torch.equal(text[6], text[10]) and torch.equal(text[8], text[11])
    assert not torch.equal(text[5], text[9])
    assert torch.equal(text[12], text[-1])
    assert 0.6 < text[5].std() < 1.5
    long, _ = embed_text("word " * 100, picture)
    assert long.shape == text.shape
