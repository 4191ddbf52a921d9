"""Encoders that change after they were wrapped, by the ways of other people's tools: known items and new ones
come from the encoder as it is, and nothing is kept under the key of the encoder as it was.
"""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from castore import Store
from castore.adapters.embeddings import CachedEncoder, cache_embeddings
from castore.errors import CacheWarning, InvalidValueError
from tests.adapters.embeddings.models import Encoder, Model, features, in_batches, loader
from tests.mount.conftest import until


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 4).requires_grad_(False)


class Experts(nn.Module):
    """Holds modules and a tensor where torch does not see them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.shift = [linear(), linear()], torch.zeros(4)
        self.scale, self.act = 1.0, nn.ReLU()

    def forward(self, x: torch.Tensor) -> Any:
        return self.act(sum(expert(x) for expert in self.experts) + self.shift) * self.scale


@contextmanager
def trained(encoder: nn.Module) -> Iterator[None]:
    encoder.requires_grad_(True)
    encoder(features(3)).sum().backward()
    yield
    encoder.requires_grad_(False)


def step(make: Callable[..., torch.optim.Optimizer], encoder: nn.Module) -> None:
    with trained(encoder):
        make(encoder.parameters(), lr=1.0, fused=True).step()


def write_through_data(encoder: Any) -> None:
    encoder.weight.data += 1


def set_on_class(encoder: Any) -> None:
    Gain.factor = 3.0


class Gain(nn.Module):
    factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :4] * self.factor


class Compiled(nn.Module):
    """For `torch.jit.script`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.table = linear(), 2.0, {"a": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mul(self.layer(x), self.scale * self.table["a"])


def compiled() -> Any:
    return torch.jit.script(Compiled().eval())


class Holder(nn.Module):
    def __init__(self, get: Any) -> None:
        super().__init__()
        self.get = get

    def forward(self, x: torch.Tensor) -> Any:
        return x * self.get()


FACTOR: list[float] = []


def hooked() -> nn.Module:
    FACTOR[:] = [2.0]
    encoder, factor = linear(), FACTOR
    encoder.register_forward_hook(lambda _, given, output: output * factor[-1])
    return encoder


_CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "a fused step of SGD": (linear, lambda encoder: step(torch.optim.SGD, encoder)),
    "a fused step of AdamW": (linear, lambda encoder: step(torch.optim.AdamW, encoder)),
    "a write through .data": (linear, write_through_data),
    "a write to a module in a list": (Experts, lambda encoder: encoder.experts[0].weight.mul_(2)),
    "other weights for a module in a list": (
        Experts,
        lambda encoder: encoder.experts[1].load_state_dict(nn.Linear(8, 4).state_dict()),
    ),
    "a write to a tensor that is no buffer": (Experts, lambda encoder: encoder.shift.add_(1)),
    "a setting": (Experts, lambda encoder: setattr(encoder, "scale", 2.0)),
    "another activation": (Experts, lambda encoder: setattr(encoder, "act", nn.Sigmoid())),
    "a setting of a layer": (
        lambda: nn.Sequential(linear(), nn.LeakyReLU(0.1)),
        lambda encoder: setattr(encoder[1], "negative_slope", 0.9),
    ),
    "a hook": (Experts, lambda encoder: encoder.act.register_forward_hook(lambda _, given, out: out + 1)),
    "an attribute of its class": (Gain, set_on_class),
    "the code of a function that it holds": (
        lambda: Holder(lambda: 1.0),
        lambda encoder: setattr(encoder.get, "__code__", (lambda: 9.0).__code__),
    ),
    "a setting of a compiled module": (compiled, lambda encoder: setattr(encoder, "scale", 9.0)),
    "a dict of a compiled module": (compiled, lambda encoder: setattr(encoder, "table", {"a": 9.0})),
    "a setting of a compiled module inside": (
        lambda: nn.Sequential(compiled()).eval(),
        lambda encoder: setattr(encoder[0], "scale", 9.0),
    ),
    "the closure of a hook": (hooked, lambda encoder: FACTOR.append(9.0)),
}


@pytest.mark.parametrize("name", _CHANGES)
def test_a_changed_encoder_gives_its_own_embeddings_and_keeps_none_under_the_old_key(
    store: Store, name: str
) -> None:
    make, change = _CHANGES[name]
    encoder, known, new = make(), features(4), features(8)[4:]
    try:
        cached = CachedEncoder(encoder, store=store)
        cached(known)
        change(encoder)
        for inputs in (known, new):
            assert torch.allclose(cached(inputs), encoder(inputs), atol=1e-5)
    finally:
        Gain.factor = 2.0
    fresh = make()
    assert torch.allclose(CachedEncoder(fresh, store=store)(new), fresh(new), atol=1e-5)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda cached: pickle.loads(pickle.dumps(cached))])
@pytest.mark.parametrize("is_used", [False, True])
def test_a_copy_of_a_changed_encoder_is_of_the_changed_one(store: Store, how: Any, is_used: bool) -> None:
    for change in (
        lambda encoder: setattr(encoder, "scale", 3.0),
        lambda encoder: encoder.experts[0].weight.data.add_(1),
        lambda encoder: encoder.load_state_dict(encoder.state_dict()),
    ):
        cached = CachedEncoder(Experts(), store=store)
        if is_used:
            cached(features(3))
        change(cached.encoder)
        again = how(cached)
        assert torch.allclose(again(features(6)), again.encoder(features(6)), atol=1e-5)
        again.encoder.scale = 5.0
        assert torch.allclose(again(features(9)), again.encoder(features(9)), atol=1e-5)
        fresh = Experts()
        assert torch.allclose(CachedEncoder(fresh, store=store)(features(9)), fresh(features(9)), atol=1e-5)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize(
    "write",
    [
        lambda encoder: encoder.load_state_dict(encoder.state_dict()),
        lambda encoder: encoder.double().float(),
        lambda encoder: encoder.share_memory(),
    ],
    ids=["load_state_dict", "double and float", "share_memory"],
)
def test_a_copy_of_a_model_whose_weights_were_written_goes_on(store: Store, how: Any, write: Any) -> None:
    """Processes that are spawned get such a copy: torch moves weights to shared memory for them."""
    model = Model()
    kept, _ = cache_embeddings(model, loader(shuffle=False), store=store)
    keys, _ = next(iter(kept))
    by_keys, new = model(keys), features(3, seed=9)
    write(model.encoder.encoder)
    again = how(model)
    assert torch.equal(again(keys), by_keys)
    assert torch.allclose(again(new), model(new), atol=1e-5)


def test_weights_that_come_back_bring_their_embeddings_back(store: Store) -> None:
    """As after an average of weights was tried."""
    model = Model()
    kept, _ = cache_embeddings(model, loader(shuffle=False), store=store)
    keys, _ = next(iter(kept))
    before = model(keys)
    saved = {name: weight.clone() for name, weight in model.encoder.encoder.named_parameters()}
    for factor in (2, 3):
        with torch.no_grad():
            for weight in model.encoder.encoder.parameters():
                weight.mul_(factor).add_(1)
        with pytest.raises(InvalidValueError, match="call cache_embeddings again"):
            model(keys)
    with torch.no_grad():
        for name, weight in model.encoder.encoder.named_parameters():
            weight.copy_(saved[name])
    assert torch.equal(model(keys), before)


def helped(encoder: Any) -> float:
    return float(encoder.scale)


class Helped(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = helped(self)
        return x * helped(self)


def test_a_setting_that_a_helper_reads_counts(store: Store) -> None:
    for scale in (1.0, 4.0):
        encoder = Helped(scale)
        assert torch.equal(CachedEncoder(encoder, store=store)(features(3)), features(3) * scale)


def test_weights_of_inference_mode_are_compared_too(store: Store) -> None:
    with torch.inference_mode():
        encoder, other = linear(), nn.Linear(8, 4)
        cached = CachedEncoder(encoder, store=store)
        cached(features(4))
        encoder.load_state_dict(other.state_dict())
        assert torch.allclose(cached(features(8)), encoder(features(8)), atol=1e-5)
        fresh = linear()
        assert torch.allclose(CachedEncoder(fresh, store=store)(features(8)), fresh(features(8)), atol=1e-5)


def test_a_vectorizer_that_is_fitted_anew_beside_a_frozen_head_is_noticed(store: Store) -> None:
    vectorizer = TfidfVectorizer(token_pattern=r"\w+", max_features=4).fit(["a b c", "b c d", "cat dog"])
    head = nn.Linear(4, 2).requires_grad_(False)

    def encode(texts: list[str]) -> torch.Tensor:
        given: torch.Tensor = head(torch.tensor(vectorizer.transform(texts).toarray(), dtype=torch.float32))
        return given

    cached = CachedEncoder(encode, store=store)
    before = cached(["a cat", "b dog b"])
    vectorizer.fit(["b cat d", "c d dog", "a a b dog dog"])
    for texts in (["a cat", "b dog b"], ["dog", "a b c"]):
        assert torch.allclose(cached(texts), encode(texts), atol=1e-6)
    vectorizer.fit(["a b c", "b c d", "cat dog"])
    assert torch.equal(CachedEncoder(encode, store=store)(["a cat", "b dog b"]), before)


FACTORS = [2.0]


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * FACTORS[0]


def through_a_helper(x: torch.Tensor) -> torch.Tensor:
    return scaled(x) + 1


@pytest.mark.parametrize("encode", [scaled, through_a_helper])
def test_an_element_of_a_global_list_is_noticed(store: Store, encode: Any) -> None:
    cached, inputs = CachedEncoder(encode, store=store), features(3)
    cached(inputs)
    try:
        FACTORS[0] = 5.0
        assert torch.equal(cached(inputs), encode(inputs))
    finally:
        FACTORS[0] = 2.0


class Settings:
    """Beside a model of many values, which are looked at now and then only."""

    def __init__(self) -> None:
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(60)])
        self.layers.eval().requires_grad_(False)
        self.factor = 2.0

    def __call__(self, x: torch.Tensor) -> Any:
        return self.layers(x) * self.factor


def test_a_setting_of_a_large_encoder_is_noticed_by_the_next_look_up(store: Store) -> None:
    encoder = Settings()
    cached = CachedEncoder(encoder, store=store)
    for factor in (2.0, 3.0, 5.0):
        encoder.factor = factor
        assert torch.allclose(cached(features(4)), encoder(features(4)), atol=1e-6)


def test_the_rules_of_a_tokenizer_are_compared(store: Store) -> None:
    words = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "A": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()

    def encode(texts: list[str]) -> torch.Tensor:
        return torch.tensor([words.encode(text).ids for text in texts])

    cached = CachedEncoder(encode, store=store)
    assert cached(["a A"]).tolist() == [[1, 2]]
    words.normalizer = Lowercase()
    assert cached(["a A"]).tolist() == [[1, 1]]


def test_a_change_for_a_while_is_over_when_it_is_over(store: Store) -> None:
    encoder = Experts()
    cached = CachedEncoder(encoder, store=store)
    for scale in (1.0, 3.0, 1.0):
        encoder.scale = scale
        assert torch.allclose(cached(features(4)), encoder(features(4)), atol=1e-6)


def test_keys_of_an_encoder_that_got_a_fused_step_are_an_error(store: Store) -> None:
    model = Model()
    kept, _ = cache_embeddings(model, loader(shuffle=False), store=store)
    batch, _ = next(iter(kept))
    step(torch.optim.SGD, model.encoder.encoder)
    with pytest.raises(InvalidValueError, match="call cache_embeddings again"):
        model(batch)


# --- what the key holds


class Moved(nn.Module):
    """Moves a setting that is no buffer, as user code does."""

    def __init__(self, mean: float) -> None:
        super().__init__()
        self.mean, self.calls = torch.tensor([mean] * 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean.to(x.device)
        self.calls += 1
        return x - self.mean


def test_a_setting_that_forward_assigns_counts_as_it_was_at_first(store: Store) -> None:
    inputs = features(4)
    for mean in (0.0, 1.0, 0.0):
        encoder = Moved(mean)
        assert torch.equal(CachedEncoder(encoder, store=store)(inputs), inputs - mean)
    assert encoder.calls == 0
    encoder.mean = torch.ones(8)
    assert torch.equal(CachedEncoder(encoder, store=store)(inputs), inputs - 1)


class LazilyMade(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Any:
        if self.table is None:
            self.table = torch.arange(4.0)
        return self.layer(x) + self.table


def test_what_an_encoder_makes_when_it_first_runs_changes_no_key(store: Store) -> None:
    cached = CachedEncoder(LazilyMade(), store=store)
    digest = cached.digest
    cached(features(4))
    cached._refresh_digest()
    assert cached.digest == digest
    again = pickle.loads(pickle.dumps(cached))
    assert torch.equal(again(features(4)), cached(features(4)))
    assert again.digest == digest


class Chain(nn.Module):
    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            torch.manual_seed(ord(name))
            self.add_module(name, nn.Linear(8, 8))
            self.register_buffer(f"shift_{name}", torch.tensor(float(ord(name))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = torch.tanh(layer(x))
        return x


class Shifts(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for shift in self.buffers():
            x = torch.tanh(x * shift - 1)
        return x


@pytest.mark.parametrize("kind", [Chain, Shifts])
def test_the_order_of_parts_counts_where_an_encoder_runs_through_them(store: Store, kind: Any) -> None:
    for names in ("ab", "ba"):
        encoder = kind(names).requires_grad_(False)
        assert torch.allclose(
            CachedEncoder(encoder, store=store)(features(4)), encoder(features(4)), atol=1e-6
        )


class Service:
    """Leaves its model out of its pickle, as for workers."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(8, 2).requires_grad_(False)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)  # type: ignore[no-any-return]


def test_a_model_that_an_encoder_leaves_out_of_its_pickle_counts(store: Store) -> None:
    for seed in (1, 2):
        encoder = Service(seed)
        assert torch.allclose(CachedEncoder(encoder, store=store)(features(4)), encoder(features(4)))


def test_hooks_for_all_modules_and_methods_in_the_place_of_torchs_count(store: Store) -> None:
    inputs, encoder = features(4), linear()
    cached = CachedEncoder(encoder, store=store)
    plain, forward = cached(inputs), nn.Linear.forward
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, given, output: output * 2 if isinstance(module, nn.Linear) else None
    )
    try:
        for each in (cached, CachedEncoder(linear(), store=store)):
            assert torch.equal(each(inputs), plain * 2)
    finally:
        hook.remove()
    assert torch.equal(cached(inputs), plain)
    nn.Linear.forward = lambda self, x: forward(self, x) * 3  # type: ignore[method-assign,assignment]
    try:
        assert torch.equal(CachedEncoder(linear(), store=store)(inputs), plain * 3)
    finally:
        nn.Linear.forward = forward  # type: ignore[method-assign]
    assert torch.equal(CachedEncoder(linear(), store=store)(inputs), plain)


def test_hidden_states_that_somebody_asked_a_transformer_for_change_no_key(store: Store) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes)).eval()
    cached = CachedEncoder(bert.requires_grad_(False), store=store)
    ids = torch.arange(6).reshape(2, 3)
    cached(ids)
    digest = cached.digest
    bert(ids, output_hidden_states=True)
    cached(ids)
    assert (cached.digest, len(cached.memo)) == (digest, 2)


def _traced() -> Any:
    return torch.jit.trace(linear(), features(2))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("make", [_traced, compiled, lambda: torch.jit.freeze(compiled())])
def test_a_module_that_torch_has_compiled_is_an_encoder(store: Store, make: Any, is_inside: bool) -> None:
    encoder: Any = make()
    if is_inside:
        encoder = nn.Sequential(encoder).eval()
    for _ in range(2):
        assert torch.allclose(
            CachedEncoder(encoder, store=store)(features(4)), encoder(features(4)), atol=1e-6
        )


@pytest.mark.parametrize("is_fed", [False, True])
@pytest.mark.parametrize("how", ["load_state_dict", "an attribute"])
def test_other_weights_in_the_place_of_the_first_ones_end_look_ups_by_keys(
    store: Store, how: str, is_fed: bool
) -> None:
    model = Model()
    kept, _ = cache_embeddings(model, loader(shuffle=False), store=store)
    batch, _ = next(iter(kept))
    inner = model.encoder.encoder
    if how == "load_state_dict":
        inner.load_state_dict({name: item + 1 for name, item in inner.state_dict().items()}, assign=True)
    else:
        layer = next(module for module in inner.modules() if isinstance(module, nn.Linear))
        layer.weight = nn.Parameter(layer.weight + 1, requires_grad=False)

    def is_error() -> bool:
        try:
            model(batch)
        except InvalidValueError as error:
            return "call cache_embeddings again" in str(error)
        return False

    if is_fed:
        model.encoder(features(3))  # items by content: all is compared
        assert is_error()
    until(is_error)  # the encoder's modules are walked now and then


def test_torchs_own_counters_are_no_change(store: Store) -> None:
    model = Model()
    kept, _ = cache_embeddings(model, loader(shuffle=False), store=store)
    batch, _ = next(iter(kept))
    plain = model(batch)
    with FlopCounterMode(display=False):
        assert torch.equal(model(batch), plain)


class Positions(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :2] + torch.tensor([[0.1, 0.2]])


def test_the_default_dtype_counts(store: Store) -> None:
    encoder, inputs = Positions(), features(4).double()
    cached = CachedEncoder(encoder, store=store)
    assert torch.equal(cached(inputs), encoder(inputs))
    torch.set_default_dtype(torch.float64)
    try:
        for each in (cached, CachedEncoder(encoder, store=store)):
            assert torch.equal(each(inputs), encoder(inputs))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(cached(inputs), encoder(inputs))


# --- what the encoder is given


class Tagged(torch.Tensor):
    pass


def tagged(scale: float) -> torch.Tensor:
    tensor = torch.ones(2, 3).as_subclass(Tagged)
    tensor.scale = scale  # type: ignore[attr-defined]
    return tensor


def by_scale(x: Any) -> Any:
    return torch.ones(2, 3) * x.scale


def test_attributes_of_a_tensor_reach_the_encoder(store: Store) -> None:
    cached = CachedEncoder(by_scale, store=store)
    with pytest.warns(CacheWarning, match="sparse or nested, or has attributes"):
        assert torch.equal(cached(tagged(3.0)), by_scale(tagged(3.0)))
    assert torch.equal(cached(tagged(5.0)), by_scale(tagged(5.0)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", ["sparse", "CSR", "nested", "jagged"])
def test_tensors_without_items_go_through_the_encoder(store: Store, layout: str) -> None:
    parts = [torch.ones(2), torch.ones(3)]
    inputs = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "CSR": lambda: torch.eye(3).to_sparse_csr(),
        "nested": lambda: torch.nested.nested_tensor(parts),
        "jagged": lambda: torch.nested.nested_tensor(parts, layout=torch.jagged),
    }[layout]()

    def encode(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.sum()[None] for part in x.unbind()]) if x.is_nested else x.to_dense() * 2

    cached = CachedEncoder(encode, store=store)
    with pytest.warns(CacheWarning, match="sparse or nested"):
        assert torch.equal(cached(inputs), encode(inputs))


def test_a_tokenizers_result_stays_one_and_is_cached_item_by_item(store: Store) -> None:
    transformers = pytest.importorskip("transformers")

    def encode(batch: Any) -> Any:
        return batch.input_ids.to(torch.float32) * (3 if "Batch" in type(batch).__name__ else 1)

    cached = CachedEncoder(encode, store=store)
    batch = transformers.BatchEncoding({"input_ids": torch.arange(6).reshape(2, 3)})
    for _ in range(2):
        assert torch.equal(cached(batch), encode(batch))
    assert len(cached.memo) == 2


def test_mappings_keep_their_class(store: Store) -> None:
    def encode(batch: Any) -> Any:
        return batch["x"] * len(type(batch).__name__)

    for kind in (dict, OrderedDict):
        batch = kind(x=torch.ones(2, 3))
        assert torch.equal(CachedEncoder(encode, store=store)(batch), encode(batch))


def test_a_mapping_that_answers_for_names_it_lacks_goes_through_the_encoder(store: Store) -> None:
    batch = defaultdict(lambda: torch.full((2, 3), 7.0), a=torch.ones(2, 3))

    def encode(given: Any) -> Any:
        return given["a"] + given.get("bias", given.default_factory())

    cached = CachedEncoder(encode, store=store)
    with pytest.warns(CacheWarning, match="encoded each time"):
        assert torch.equal(cached(batch), torch.full((2, 3), 8.0))


# --- training on embeddings


def test_an_encoder_that_runs_by_itself_between_look_ups_is_no_change(store: Store) -> None:
    model, raw = Model(), loader(shuffle=False)
    kept, _ = cache_embeddings(model, raw, store=store)
    for _ in range(3):
        for batch, _ in kept:
            model.encoder.encoder(features(2))
            model(batch)
    assert torch.equal(torch.cat([model(x) for x, _ in kept]), in_batches(Model(), features()))


class Rope:
    """Remembers a table for each length, and its calls."""

    calls = 0

    def __init__(self) -> None:
        self.tables: dict[int, torch.Tensor] = {}

    def __call__(self, length: int) -> torch.Tensor:
        Rope.calls += 1
        if length not in self.tables:
            self.tables[length] = torch.ones(length, 1)
        return self.tables[length]


class WithHelper(Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.rope = Rope()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.rope(len(x))


@pytest.mark.parametrize("way", ["as it is", "deepcopy", "pickle"])
def test_what_helpers_remember_ends_no_training_and_copies_go_on(store: Store, way: str) -> None:
    for _ in range(2):
        model = Model(WithHelper())
        kept, _ = cache_embeddings(model, loader(shuffle=False), store=store)
        if way != "as it is":
            model = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
        for size in (2, 3):
            for batch, _ in kept:
                model(batch)
                model.encoder.encoder(features(size))  # somebody looks past the cache
        expected = in_batches(Model(WithHelper()), features())
        assert torch.equal(torch.cat([model(batch) for batch, _ in kept]), expected)


def test_a_counter_of_a_base_class_is_no_change(store: Store) -> None:
    encoder = Base()
    cached = CachedEncoder(encoder, store=store)
    digest = cached.digest
    cached(features(4))
    encoder(features(4))
    cached(features(8))
    assert cached.digest == digest
    assert encoder.encoded == 12


class Base(Encoder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class Pooled(nn.Module):
    """Pools by a setting; `encode` and `name` are names that encoders have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.pool, self.name = nn.Linear(8, 3).requires_grad_(False), "mean", "pooled"

    def forward(self, x: torch.Tensor) -> Any:
        return self.fc(x) if self.pool == "mean" else -self.fc(x)

    def encode(self, x: torch.Tensor, scale: int = 1) -> Any:
        return scale * self(x)


def _turn(encoder: Any) -> None:
    encoder.pool = "cls"


def _replace_layer(encoder: Any) -> None:
    encoder.fc = nn.Linear(8, 3).requires_grad_(False)


def _set_submodule(encoder: Any) -> None:
    encoder.set_submodule("fc", nn.Identity())


@pytest.mark.parametrize("change", [_turn, _replace_layer, _set_submodule])
def test_what_is_set_through_the_wrapper_is_set_on_the_encoder(store: Store, change: Any) -> None:
    plain = Pooled()
    torch.manual_seed(1)
    cached = CachedEncoder(Pooled(), store=store)
    items = torch.randn(4, 8)
    assert torch.allclose(cached(items), plain(items))
    torch.manual_seed(2)
    change(cached)
    torch.manual_seed(2)
    change(plain)
    assert torch.allclose(cached(items), plain(items))
    assert cached.state_dict().keys() == plain.state_dict().keys()
    assert vars(cached.encoder)["pool"] == plain.pool


def test_an_encoders_own_names_are_found_through_the_wrapper(store: Store) -> None:
    plain = Pooled()
    cached = CachedEncoder(Pooled(), store=store)
    items = torch.randn(4, 8)
    assert torch.allclose(cached.encode(items, 2), plain.encode(items, 2))
    assert cached.name == "pooled"
    del cached.pool
    assert not hasattr(cached.encoder, "pool")
    cached.noted = 1  # what neither has is the wrapper's
    assert not hasattr(cached.encoder, "noted")
    copied = copy.deepcopy(cached)
    copied.name = "another"
    assert (copied.encoder.name, cached.name) == ("another", "pooled")


def test_another_encoder_is_wrapped_anew(store: Store) -> None:
    cached = CachedEncoder(Pooled(), store=store)
    with pytest.raises(InvalidValueError, match="keeps the encoder that it was made with; wrap the other"):
        cached.encoder = Pooled()
    cached.encoder = cached.encoder
