"""CachedEncoder alone: replaces an encoder, and encodes no item twice."""

from __future__ import annotations

import copy
import functools
import pickle
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from castore import Store
from castore.adapters.embeddings import CacheConfig, CachedEncoder, CacheType, Keys, cache_embeddings
from castore.errors import CacheWarning, InvalidValueError, UnhashableError
from tests.adapters.embeddings.models import Encoder, Model, data, features, loader


def test_only_items_that_nobody_encoded_are_encoded(store: Store) -> None:
    raw = Encoder()
    encode = CachedEncoder(raw, store=store)
    assert torch.equal(encode(features(10)), Encoder()(features(10)))
    assert raw.encoded == 10
    assert torch.equal(encode(features(12)[2:]), Encoder()(features(12)[2:]))
    assert raw.encoded == 12
    again = Encoder()
    assert torch.equal(CachedEncoder(again, store=store)(features(12)), Encoder()(features(12)))
    assert again.encoded == 0


class Doubling(Encoder):
    """Reads its own train mode, as code does that castore does not know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if self.training else 1)


def test_a_module_that_reads_train_mode_has_a_key_for_each_mode(store: Store) -> None:
    inputs = features(6)
    for mode in (True, False, True):
        raw = Doubling().train(mode)
        assert torch.equal(CachedEncoder(raw, store=store)(inputs), Doubling().train(mode)(inputs))
    assert raw.encoded == 0
    encode = CachedEncoder(Doubling().eval(), store=store)
    encode(inputs)
    encode.encoder.train()
    later = features(9)[6:]
    assert torch.equal(encode(later), Doubling()(later))
    assert torch.equal(CachedEncoder(Doubling().eval(), store=store)(later), Doubling().eval()(later))


def test_batch_norm_that_is_put_into_train_mode_later_is_an_error(store: Store) -> None:
    norm = nn.BatchNorm1d(4).requires_grad_(False).eval()
    encode = CachedEncoder(nn.Sequential(nn.Linear(8, 4).requires_grad_(False), norm), store=store)
    encode(features(4))
    norm.train()
    for inputs in (features(6)[4:], features(4)):
        with pytest.raises(InvalidValueError, match=r"module '1' \(BatchNorm1d\) is in train mode"):
            encode(inputs)


@pytest.mark.parametrize("way", ["hook", "pre-hook", "forward"])
def test_what_changes_a_modules_output_after_wrapping_is_noticed_before_it_encodes(
    store: Store, way: str
) -> None:
    raw, inputs = Encoder(), features(6)
    encode = CachedEncoder(raw, store=store)
    encode(inputs[:3])
    if way == "hook":
        raw.register_forward_hook(lambda module, args, output: output + 1)
    elif way == "pre-hook":
        raw.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    else:
        raw.forward = lambda x: Encoder.forward(raw, x) + 1  # type: ignore[method-assign]
    changed = raw(inputs[3:])
    assert torch.equal(encode(inputs[3:]), changed)
    assert torch.equal(CachedEncoder(Encoder(), store=store)(inputs), Encoder()(inputs))


def test_duplicates_are_encoded_once(store: Store) -> None:
    raw = Encoder()
    out = CachedEncoder(raw, store=store)(features(4)[[0, 1, 0, 0, 2]])
    assert raw.encoded == 3
    assert torch.equal(out, Encoder()(features(4))[[0, 1, 0, 0, 2]])


def test_texts_and_functions_are_welcome(store: Store) -> None:
    calls: list[str] = []

    def encode(texts: list[str]) -> torch.Tensor:
        note(texts)
        return torch.tensor([[len(text), text.count("a")] for text in texts])

    cached = CachedEncoder(encode, CacheConfig(fingerprints={"encoder": "lengths"}), store=store)
    note = calls.extend
    assert cached(["banana", "apple"]).tolist() == [[6, 3], [5, 1]]
    assert cached(["apple", "pear"]).tolist() == [[5, 1], [4, 1]]
    assert calls == ["banana", "apple", "pear"]


def lengths_of(texts: Any) -> torch.Tensor:
    return torch.tensor([[len(text)] for text in texts])


def sums_of(rows: Any) -> torch.Tensor:
    return torch.as_tensor(rows).sum(1, keepdim=True)


_FORMS: dict[str, tuple[Any, Any, Any]] = {
    "a tuple of texts": (lengths_of, ("banana", "apple", "banana"), ("apple", "pear", "apple")),
    "what the default collate makes of texts": (
        lambda batch: lengths_of(batch["text"]),
        {"text": default_collate([("a", "banana"), ("b", "apple"), ("a", "banana")])[1]},
        {"text": default_collate([("a", "apple"), ("b", "pear"), ("b", "apple")])[1]},
    ),
    "texts beside a tensor": (
        lambda batch: lengths_of(batch[1]) + batch[0],
        (torch.ones(3, 1), ("banana", "apple", "banana")),
        (torch.ones(3, 1), ("apple", "pear", "apple")),
    ),
    "an array": (
        sums_of,
        np.array([[1.0, 2], [3, 4], [1, 2]]),
        np.array([[3.0, 4], [5, 6], [3, 4]]),
    ),
    "an array of texts": (
        lengths_of,
        np.array(["banana", "apple", "banana"]),
        np.array(["apple", "pear", "apple"]),
    ),
    "an array of objects": (
        lengths_of,
        np.array(["banana", "apple", "banana"], object),
        np.array(["apple", "pear", "apple"], object),
    ),
}


@pytest.mark.parametrize("extracted", [False, True])
@pytest.mark.parametrize("form", _FORMS)
def test_each_form_of_a_batch_is_cached_item_by_item(form: str, extracted: bool, store: Store) -> None:
    encode, first, second = _FORMS[form]
    config = CacheConfig(key_extractors=repr) if extracted else CacheConfig()
    cached = CachedEncoder(encode, config, store=store)
    for batch, known in ((first, 2), (second, 3), (first, 3), (second, 3)):
        assert torch.equal(cached(batch), encode(batch))
        assert len(cached.memo) == known


def test_a_tuple_of_texts_that_is_no_batch_is_a_constant(store: Store) -> None:
    def encode(x: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
        return x * len(names)

    cached = CachedEncoder(encode, store=store)
    for _ in range(2):
        assert torch.equal(cached(torch.ones(3, 2), ("a", "b")), torch.full((3, 2), 2.0))
    assert len(cached.memo) == 1


def test_a_batch_that_is_not_cached_is_told_of_once(store: Store) -> None:
    def encode(x: Any) -> torch.Tensor:
        return torch.zeros(1)

    cached = CachedEncoder(encode, store=store, name="texts")
    with pytest.warns(CacheWarning, match=r"'texts' got a str, which is encoded each time.*CacheType\.NONE"):
        cached("banana")
    cached("banana")
    uneven = CachedEncoder(lambda x, y: torch.zeros(1), store=store)
    with pytest.warns(CacheWarning, match=r"a Tensor of shape \(2, 3\), a list of 3"):
        uneven(torch.ones(2, 3), ["a", "b", "c"])
    assert list(store.entries()) == []
    assert CachedEncoder(Encoder(), store=store)(features(3)[:0]).shape == (0, 4)  # without a warning


def test_a_key_extractor_says_which_items_are_the_same(store: Store) -> None:
    raw = Encoder()
    cached = CachedEncoder(raw, CacheConfig(key_extractors=lambda x: float(x[0])), store=store)
    x = features(4)
    cached(x)
    x[:, 1:] = 0
    assert torch.equal(cached(x), Encoder()(features(4)))
    assert raw.encoded == 4


def test_dicts_and_several_arguments_are_items_too(store: Store) -> None:
    def encode(x: dict[str, torch.Tensor], scale: torch.Tensor, *, shift: float) -> dict[str, torch.Tensor]:
        return {"sum": x["a"] * scale + shift, "ids": x["b"]}

    cached = CachedEncoder(encode, store=store)
    args = {"a": torch.arange(3.0), "b": torch.arange(3)}, torch.ones(3) * 2
    for _ in range(2):
        out = cached(*args, shift=0.5)
        assert out["sum"].tolist() == [0.5, 2.5, 4.5]
        assert out["ids"].tolist() == [0, 1, 2]
    assert cached(*args, shift=1.5)["sum"].tolist() == [1.5, 3.5, 5.5]


def test_inputs_without_items_go_through_the_encoder(store: Store) -> None:
    def encode(x: Any) -> Any:
        return x

    cached = CachedEncoder(encode, store=store)
    assert cached(torch.zeros(0, 8)).shape == (0, 8)
    with pytest.warns(CacheWarning, match="got a str"):
        assert cached("a text alone") == "a text alone"
    assert list(cached({"a": torch.zeros(2), "b": torch.zeros(3)})) == ["a", "b"]
    assert list(store.entries()) == []


def test_gradients_pass_through_an_input_that_requires_them(store: Store) -> None:
    raw = Encoder()
    x = features(3).requires_grad_()
    CachedEncoder(raw, store=store)(x).sum().backward()
    assert x.grad is not None
    assert raw.encoded == 3


def test_a_trainable_encoder_is_refused(store: Store) -> None:
    layer = nn.Linear(2, 2)
    layer.weight.requires_grad_(False)
    with pytest.raises(InvalidValueError, match="cannot be cached: its parameter 'bias' requires grad"):
        CachedEncoder(layer, store=store)


def test_a_function_that_uses_a_trainable_module_is_refused(store: Store) -> None:
    net = nn.Linear(2, 2)
    for name, function in {
        "net.weight": lambda x: 2 * net(x),
        "self.weight": net.forward,
        "module.weight": functools.partial(call, module=net),
        "partial.1.weight": functools.partial(call_first, net),
        "TRAINED.weight": lambda x: 2 * TRAINED(x),
    }.items():
        with pytest.raises(
            InvalidValueError, match=f"cannot be cached: its parameter '{name}' requires grad"
        ):
            CachedEncoder(function, store=store)
    net.requires_grad_(False)
    assert torch.equal(CachedEncoder(net.forward, store=store)(torch.ones(3, 2)), net(torch.ones(3, 2)))


SCALE = 1


def test_a_global_of_a_comprehension_or_inner_function_is_seen_to_change(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: those of the function itself were looked at alone, and kept embeddings were old ones."""

    def inner(texts: list[str]) -> torch.Tensor:
        def one(text: str) -> list[int]:
            return [len(text) * SCALE]

        return torch.tensor([one(text) for text in texts])

    for function in (lambda texts: torch.tensor([[len(text) * SCALE] for text in texts]), inner):
        monkeypatch.setitem(globals(), "SCALE", 5)
        cached = CachedEncoder(function, store=store)
        assert cached(["a"]).item() == 5
        monkeypatch.setitem(globals(), "SCALE", 7)
        assert (cached(["a"]).item(), cached(["b"]).item()) == (7, 7)


def test_an_encoder_that_is_to_be_trained_again_is_an_error(store: Store) -> None:
    raw = Encoder()
    cached = CachedEncoder(raw, store=store)
    cached(features(3))
    raw.requires_grad_(True)
    with pytest.raises(InvalidValueError, match=r"parameter 'layer\.weight' requires grad"):
        cached(features(3))
    raw.requires_grad_(False)
    assert torch.equal(cached(features(3)), raw(features(3)))


def test_a_key_extractor_that_returns_none_is_an_error(store: Store) -> None:
    cached = CachedEncoder(Encoder(), CacheConfig(key_extractors=lambda x: None), store=store)
    with pytest.raises(InvalidValueError, match="a key extractor has returned None"):
        cached(features(3))


TRAINED = nn.Linear(2, 2)


def call(x: torch.Tensor, module: nn.Module) -> Any:
    return module(x)


def call_first(module: nn.Module, x: torch.Tensor) -> Any:
    return module(x)


def test_what_is_kept_does_not_depend_on_autocast(store: Store) -> None:
    x = features(3)
    with torch.autocast("cpu", torch.bfloat16):
        first = CachedEncoder(Encoder(), store=store)(x)
    assert torch.equal(first, Encoder()(x))


def test_an_output_with_names_keeps_them(store: Store) -> None:
    encode = CachedEncoder(sums, store=store)
    for _ in range(2):
        out = encode(features(3))
        assert torch.equal(out.total, features(3).sum(1))
        assert torch.equal(out[1], out.mean)
        again = pickle.loads(pickle.dumps(copy.deepcopy(encode)))
        assert torch.equal(again(features(3)).mean, out.mean)


def sums(x: torch.Tensor) -> Any:
    return Sums(x.sum(1), x.mean(1))


class Sums(NamedTuple):
    """A named tuple."""

    total: torch.Tensor
    mean: torch.Tensor


def test_an_encoder_without_a_fingerprint_can_be_named(store: Store) -> None:
    encoder = Encoder()
    encoder.generator = torch.Generator()  # type: ignore[assignment]
    with pytest.raises(
        UnhashableError, match=r"encoder 'encoder'.*is a random generator.*fingerprints={'encoder'"
    ):
        CachedEncoder(encoder, store=store)
    named = CachedEncoder(encoder, CacheConfig(fingerprints={"encoder": "v1"}), store=store)
    assert named(features(2)).shape == (2, 4)


def test_type_none_leaves_the_encoder_alone(store: Store) -> None:
    raw = Encoder()
    cached = CachedEncoder(raw, CacheConfig(cache_type=CacheType.NONE), store=store)
    cached(features(3))
    cached(features(3))
    assert raw.encoded == 6
    assert list(store.entries()) == []


def test_attributes_of_the_encoder_are_its_own(store: Store) -> None:
    raw: Any = Encoder()
    raw.config = {"hidden_size": 4}  # as models of transformers have one
    cached: Any = CachedEncoder(raw, store=store)
    assert cached.layer.out_features == 4
    assert cached.config == {"hidden_size": 4}
    with pytest.raises(AttributeError, match="'Encoder' object has no attribute 'layers'"):
        cached.layers  # noqa: B018


def test_a_copy_and_a_pickle_look_up_the_same(store: Store) -> None:
    cached = CachedEncoder(Encoder(), store=store)
    expected = cached(features(3))
    others: list[Any] = [copy.deepcopy(cached), pickle.loads(pickle.dumps(cached))]
    for other in others:
        other.encoder.encoded = 0
        assert torch.equal(other(features(3)), expected)
        assert other.encoder.encoded == 0


def test_keys_of_another_model_are_refused(store: Store) -> None:
    with pytest.raises(InvalidValueError, match="keys of several tables, or of another model"):
        CachedEncoder(Encoder(), store=store)(Keys.of(torch.zeros(2, 1, dtype=torch.int64)))
    one, other, encoder = Model(), Model(), Encoder()
    kept, _ = cache_embeddings(one, loader(), store=store)
    cache_embeddings(other, loader(data(seed=3)), store=store)
    keys, _ = next(iter(kept))
    with pytest.raises(InvalidValueError, match="which cache_embeddings has made for this model"):
        other(keys)
    assert torch.equal(copy.deepcopy(one)(keys), one(keys))
    first, second = Model(encoder), Model(encoder)
    cache_embeddings(first, loader(), store=store)
    kept, _ = cache_embeddings(second, loader(data(seed=3)), store=store)
    with pytest.raises(InvalidValueError, match="which cache_embeddings has made for this model"):
        first(next(iter(kept))[0])


class Scaled(Encoder):
    """Writes to an attribute that another object has, too."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = SimpleNamespace()
        out.scale = 1.0
        out.scale += 1.0
        return super().forward(x) * self.scale


def test_an_attribute_counts_though_forward_sets_it_of_another_object(store: Store) -> None:
    """Regression: two encoders of other scales shared their embeddings."""
    for scale in (1.0, 2.0):
        assert torch.equal(CachedEncoder(Scaled(scale), store=store)(features(3)), Scaled(scale)(features(3)))


class Counting(Encoder):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.encoded += len(x)
        return torch.tanh(self.layer(x))


def test_a_counter_of_a_decorated_forward_does_not_count(store: Store) -> None:
    raw = Counting()
    for _ in range(2):
        CachedEncoder(raw, store=store)(features(5))
    assert raw.encoded == 5


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_cached(store: Store, kind: Any) -> None:
    """Regression: their weak references to their own weights had no stable hash."""

    class States(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.layer = kind(4, 3, batch_first=True)
            self.requires_grad_(False).eval()

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x)[0]

    x = torch.arange(40.0).reshape(2, 5, 4) / 40
    for seed in (0, 0, 1):
        assert torch.allclose(CachedEncoder(States(seed), store=store)(x), States(seed)(x), atol=1e-6)
    assert CachedEncoder(States(0), store=store).digest == CachedEncoder(States(0), store=store).digest


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_notices_that_its_weights_change(store: Store, copied: Any) -> None:
    """Regression: a copy gave the embeddings of the weights that it had before."""
    encode = CachedEncoder(Encoder(), store=store)
    encode(features(4))
    copy_of = copied(encode)
    assert torch.equal(copy_of(features(4)), Encoder()(features(4)))
    assert copy_of.encoder.encoded == 4, "the copy of the encoder has encoded nothing"
    changed = copied(encode)
    with torch.no_grad():
        changed.encoder.layer.weight.mul_(2)
    assert torch.equal(changed(features(4)), changed.encoder(features(4)))
    trained = copied(encode)
    trained.encoder.requires_grad_(True)
    with pytest.raises(InvalidValueError, match="requires grad"):
        trained(features(4))


class Attributes(dict[str, Any]):
    """A dict whose missing attributes are missing keys."""

    __getattr__ = dict.__getitem__


class Named(Encoder):
    def forward(self, x: torch.Tensor) -> Any:
        return Attributes(feat=super().forward(x))


def test_a_dict_that_gives_its_keys_as_attributes_is_a_dict(store: Store) -> None:
    """Regression: the question for fields of a named tuple was a KeyError."""
    assert torch.equal(CachedEncoder(Named(), store=store)(features(3))["feat"], Encoder()(features(3)))


class Pooled(Encoder):
    """Has settings beside its input."""

    def forward(self, x: Any, pool: str = "mean", scale: float = 1.0) -> Any:
        return super().forward(x) * scale + (pool == "max")


class WithSettings(nn.Module):
    """Passes settings on to its encoder."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__()
        self.encoder: Any = Pooled()
        self.given, self.settings = given, settings

    def forward(self, x: Any) -> Any:
        return self.encoder(x, *self.given, **self.settings)


@pytest.mark.parametrize(
    ("given", "settings", "words"),
    [
        ((), {"pool": "max"}, "pool='max' beside keys"),
        (("max", 2.0), {}, "pool='max', scale=2.0 beside keys"),
        ((), {"pool": "mean", "scale": 2.0}, "got scale=2.0 beside keys"),
        ((), {"scale": 1}, "scale=1 beside keys"),
    ],
)
def test_a_setting_beside_keys_is_told_of_once(
    store: Store, given: tuple[Any, ...], settings: dict[str, Any], words: str
) -> None:
    model = WithSettings(*given, **settings)
    kept, _ = cache_embeddings(model, loader(), encoders=["encoder"], store=store)
    batches = [keys for keys, _ in kept]
    with pytest.warns(CacheWarning, match=words) as told:
        assert len(list(map(model, batches))) > 1
    assert len(told) == 1


@pytest.mark.parametrize(
    ("given", "settings"), [((), {}), (("mean",), {}), ((), {"pool": "mean", "scale": 1.0})]
)
@pytest.mark.filterwarnings("error::castore.errors.CacheWarning")
def test_the_encoders_own_defaults_beside_keys_are_no_news(
    store: Store, given: tuple[Any, ...], settings: dict[str, Any]
) -> None:
    model = WithSettings(*given, **settings)
    kept, _ = cache_embeddings(model, loader(), encoders=["encoder"], store=store)
    assert all(len(model(keys)) == len(keys) for keys, _ in kept)
