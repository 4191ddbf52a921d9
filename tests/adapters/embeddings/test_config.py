"""CacheConfig takes the options of Quaterion, and refuses invalid values with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from castore.adapters.embeddings import CacheConfig, CacheType
from castore.errors import InvalidValueError


def test_the_options_of_the_page_are_there() -> None:
    def first_symbols(feature: str) -> str:
        return feature[:10]

    config = CacheConfig(
        mapping={"content_encoder": CacheType.GPU, "attitude_encoder": CacheType.CPU},
        batch_size=16,
        save_dir="cache_dir",
        num_workers=2,
        key_extractors=first_symbols,
    )
    assert config.type_of("content_encoder") is CacheType.GPU
    assert config.type_of("another") is CacheType.AUTO
    assert config.extractor_of("content_encoder") is config.extractor_of("attitude_encoder") is first_symbols
    one = CacheConfig(key_extractors={"content_encoder": first_symbols}, num_workers=None)
    assert one.extractor_of("attitude_encoder") is None
    assert one.num_workers == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_type": "tape"}, "cache_type is 'tape'; give a CacheType: NONE, AUTO, CPU, GPU, DISK"),
        ({"mapping": {"a": 3}}, r"mapping\['a'\] is 3"),
        ({"mapping": CacheType.CPU}, "mapping is a CacheType; give a dict"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": True}, "batch_size is True"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"key_extractors": "filename"}, "key_extractors is a str; give a function"),
        ({"key_extractors": {"a": "filename"}}, r"key_extractors\['a'\] is a str"),
        ({"dtype": torch.int8}, "dtype is torch.int8"),
        ({"save_dir": 3}, "save_dir is a int"),
        ({"masks": "attention_mask"}, "masks is a str; give a dict"),
        ({"masks": {"a": 1}}, r"masks\['a'\] is 1"),
        ({"fingerprints": "x"}, "fingerprints is a str"),
    ],
)
def test_slips_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        CacheConfig(**options)


@pytest.mark.parametrize("option", ["mapping", "key_extractors", "fingerprints", "masks"])
def test_unknown_encoders_are_answered_with_the_nearest_name(option: str) -> None:
    options: dict[str, Any] = {
        option: {
            "text_encodr": {"mapping": "cpu", "key_extractors": len, "fingerprints": 1, "masks": "m"}[option]
        }
    }
    with pytest.raises(InvalidValueError, match=f"{option} names 'text_encodr'.*did you mean 'text_encoder'"):
        CacheConfig(**options).check_names(["text_encoder", "image_encoder"])
