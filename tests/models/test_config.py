"""Law: a shape that cannot be computed is refused with got, wanted and the remedy; nothing is ignored."""

import pytest

from models.config import FULL, LayerSpec, ModelConfig, RopeScaling

SHAPE = dict(vocab_size=8, d_model=8, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=4, d_ff=8)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(kind="dynamic", factor=2.0), "rope_scaling.kind: got 'dynamic', want one of .'linear', 'llama3', 'yarn'"),
        (dict(kind="linear", factor=0.0), "rope_scaling.factor: got 0.0, want a finite number above 0"),
        (dict(kind="linear", factor=float("inf")), "rope_scaling.factor: got inf"),
        (dict(kind="linear", factor=2.0, original_length=64), "original_length: got 64, which kind='linear' does not"),
        (dict(kind="llama3", factor=2.0, original_length=64, truncate=False), "truncate: got False, .*kind='llama3'"),
        (dict(kind="yarn", factor=2.0, original_length=64, low_freq_factor=2.0), "low_freq_factor: got 2.0, which"),
        (dict(kind="yarn", factor=2.0), "original_length: got None, want the tokens of pretraining's context"),
        (dict(kind="llama3", factor=8.0, original_length=0), "original_length: got 0, want"),
        (dict(kind="llama3", factor=8.0, original_length=64, high_freq_factor=1.0), "want low below high"),
        (dict(kind="yarn", factor=2.0, original_length=64, beta_fast=0.5), "want fast at least slow"),
        (dict(kind="yarn", factor=2.0, original_length=64, attention_factor=-1.0), "attention_factor: got -1.0"),
    ],
)
def test_rope_scaling_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**fields)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(layers=(LayerSpec(),)), "layers: got 1 entries with n_layers=2; want one a layer, or none"),
        (dict(layers=(4, 4)), r"layers: got \(4, 4\), want a tuple of LayerSpec"),
        (dict(rope_scaling={"kind": "linear"}), "rope_scaling: got .*, want a RopeScaling or None"),
        (dict(n_ids=9), "n_ids: got 9, want 1 to vocab_size=8, or None for all"),
        (dict(attention="flash"), "attention: got 'flash', want one of .'auto', 'xla', 'cudnn', 'splash'"),
    ],
)
def test_a_config_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**SHAPE, **fields)


def test_a_window_of_no_token_is_refused():
    with pytest.raises(ValueError, match="window: got 0, want 1 token to .*, or None for full attention"):
        LayerSpec(window=0)


def test_a_config_is_hashable_and_knows_its_windows():
    full = ModelConfig(**SHAPE)
    mixed = ModelConfig(**SHAPE, rope_scaling=RopeScaling("linear", 2.0), layers=(LayerSpec(4), LayerSpec()))
    assert full.windows == () and mixed.windows == (4, FULL) and hash(mixed) != hash(full)
    assert ModelConfig(**SHAPE, layers=(LayerSpec(), LayerSpec())).windows == ()
