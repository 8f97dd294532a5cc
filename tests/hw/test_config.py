"""A Config accepts legal values, and names illegal ones in its errors."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from celosia.bitstreams.synthesis import multipliers
from celosia.hw.spec.config import PRESETS, Config, ConfigError, describe_limits, field_specs
from celosia.hw.spec.config_doc import config_markdown
from celosia.hw.spec.scratchpads import scratchpads


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"block_in": 12}, "block_in must be a power of two, not 12"),
        ({"block_in": 0}, "block_in must be a power of two, not 0"),
        ({"batch": 32}, "batch must be between 1 and 16, not 32"),
        ({"bus_bytes": 2}, "bus_bytes must be between 4 and 128, not 2"),
        ({"inp_depth": 8}, "inp_depth must be between 16 and 1048576, not 8"),
        ({"block_out": "16"}, "block_out must be a whole number, not '16'"),
        ({"lut_count": True}, "lut_count must be a whole number, not True"),
        ({"packed": 1}, "packed must be true or false, not 1"),
        ({"token_bits": 1}, "token_bits must be between 2 and 16, not 1"),
        (
            {"block_in": 64, "block_out": 4},
            "block_in and block_out may differ at most by a factor of 8, not 64 and 4",
        ),
        ({"taps": 17}, "taps must be between 0 and 16, not 17"),
        ({"tap_depth": 3}, "tap_depth must be a power of two, not 3"),
        ({"forward": 1}, "forward must be true or false, not 1"),
        ({"alu": 0}, "alu must be true or false, not 0"),
        (
            {"forward": True, "block_in": 4, "block_out": 8},
            "forward needs entries of inp no smaller than those of out: block_in 4 is less than block_out 8",
        ),
        (
            {"softmax": 2, "block_out": 4},
            "softmax needs batch = 1, not 1, and 0 or a power of two up to block_out / 4, with taps = 2 and "
            "more block_out / 2, 1, not 2",
        ),
        (
            {"softmax": 3, "taps": 2},
            "softmax needs batch = 1, not 1, and 0 or a power of two up to block_out / 4, with taps = 2 and "
            "more block_out / 2, 8, not 3",
        ),
        (
            {"norm": 2, "batch": 2},
            "norm needs batch = 1, not 2, and 0 or a power of two up to block_out, 16, not 2",
        ),
        ({"norm": 32}, "norm needs batch = 1, not 1, and 0 or a power of two up to block_out, 16, not 32"),
        ({"residual_cycles": 3}, "residual_cycles must be a power of two, not 3"),
        (
            {"residual_cycles": 4, "block_in": 2, "block_out": 2},
            "residual_cycles must be at most the 2 lanes, not 4",
        ),
    ],
)
def test_impossible_values_are_named(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**fields)
    assert str(caught.value) == message


def test_presets_are_what_their_names_say() -> None:
    assert set(PRESETS) == {"tiny", "pynq", "wide", "ultra96", "zcu104", "huge"}
    for name, cfg in PRESETS.items():
        assert cfg.name == name and Config.load(name) is cfg
    assert PRESETS["pynq"].macs_per_cycle == 256 and PRESETS["pynq"].bus_bytes == 8
    assert PRESETS["wide"].macs_per_cycle == 512 and multipliers(PRESETS["wide"]) == multipliers(PRESETS["pynq"])


@pytest.mark.parametrize("cfg", PRESETS.values(), ids=PRESETS)
def test_round_trip_through_dict_and_files(cfg: Config, tmp_path: Path) -> None:
    assert Config.from_dict(cfg.to_dict()) == cfg
    fields = cfg.to_dict()
    (tmp_path / "a.json").write_text(json.dumps(fields))
    (tmp_path / "b.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in fields.items()))
    for file in ("a.json", "b.toml"):
        loaded = Config.load(tmp_path / file)
        assert loaded == cfg and loaded.digest == cfg.digest and loaded.name == cfg.name


def test_a_file_without_a_name_gives_its_own(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text("block_in = 8\n")
    cfg = Config.load(tmp_path / "small.toml")
    assert (cfg.name, cfg.block_in, cfg.block_out) == ("small", 8, 16)


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("a.toml", "block_in = \n", "a.toml is not valid TOML"),
        ("a.json", "{", "a.json is not valid JSON"),
        ("a.json", "[1]", "must hold a table of fields, not list"),
        ("a.toml", "blockin = 16\n", r"unknown Config field 'blockin' \(did you mean 'block_in'\?\); known"),
        ("a.toml", "block_in = 17\n", "block_in must be a power of two, not 17"),
        ("a.toml", None, "cannot read Config file"),
        ("a.ini", "", "no preset is called"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, file: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(ConfigError, match=message):
        Config.load(tmp_path / file)


def test_unknown_preset_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'pink'.*tiny, pynq"):
        Config.load("pink")


def test_digest_differs_with_each_parameter_and_not_with_the_name() -> None:
    base = Config(block_in=8, block_out=8)
    digests = {base.digest}
    for name, spec in field_specs().items():
        value = getattr(base, name)
        other = not value if spec.limits is None else 2 * value if spec.limits.is_power_of_two else value + 1
        other = value // 2 if name == "weight_bits" else other  # the default is the maximum
        digests.add(dataclasses.replace(base, **{name: other}).digest)
    assert len(digests) == len(dataclasses.fields(Config))
    assert dataclasses.replace(base, name="other").digest == base.digest
    assert base.identity == int(base.digest[:8], 16) < 1 << 32


def test_a_config_of_before_a_field_came_is_what_it_was() -> None:
    """A Config that was saved without the later fields keeps its digest and all of its hardware."""
    saved = {"block_in": 8, "block_out": 8, "taps": 3}
    cfg = Config.from_dict(saved)
    assert cfg.digest == "4b47f48425c87c090519d03b8cee4eb4"
    assert cfg.alu and cfg.int32 and not cfg.trace_depth
    for name, value in (("alu", False), ("int32", False), ("trace_depth", 4)):
        assert Config.from_dict(saved | {name: value}).digest != cfg.digest


@pytest.mark.parametrize("cfg", PRESETS.values(), ids=PRESETS)
def test_presets_have_what_compiled_programs_need(cfg: Config) -> None:
    assert not cfg.alu and not cfg.int32


@pytest.mark.parametrize("cfg", PRESETS.values(), ids=PRESETS)
def test_sizes_agree(cfg: Config) -> None:
    assert cfg.piece_bytes * cfg.inp_pieces == scratchpads(cfg)["inp"].entry_bytes
    assert cfg.piece_bytes * cfg.out_pieces == cfg.lanes
    assert cfg.macs_per_cycle == cfg.batch * scratchpads(cfg)["wgt"].entry_bytes


def test_the_page_of_configs_is_what_the_declarations_print() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configs.md").read_text(encoding="utf-8")
    assert text == config_markdown(), "print it again: python -m celosia.hw.spec.config_doc > docs/configs.md"
    names = {field.name for field in dataclasses.fields(Config)} - {"name"}
    assert set(field_specs()) == names
    for name in names:
        assert f"| `{name}` |" in text


@pytest.mark.parametrize("cfg", PRESETS.values(), ids=PRESETS)
def test_a_config_is_written_as_toml(cfg: Config, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(cfg.to_toml(), encoding="utf-8")
    assert Config.load(tmp_path / "mine.toml") == cfg


def test_limits_in_words_are_those_that_are_held() -> None:
    for field in dataclasses.fields(Config):
        if field.name == "name" or isinstance(field.default, bool):
            continue
        low, high = (int(text.replace(",", "")) for text in re.findall(r"[\d,]*\d", describe_limits(field.name))[:2])
        for value in (low - 1, high + 1, 2 * high):
            with pytest.raises(ConfigError, match=field.name):
                Config(**{field.name: value})
