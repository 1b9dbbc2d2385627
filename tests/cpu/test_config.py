"""The config tree: overrides, kinds, files, and errors that say what to type instead."""

import dataclasses
import json
import re
from typing import Literal, get_args, get_type_hints

import pytest
from quickstarts import quickstart_with

from lockstep import config as C
from lockstep.agent.judge import JudgeScorer
from lockstep.cli import COMMANDS, main
from lockstep.config import choices, flatten, to_dict
from lockstep.correction.config import Correction
from lockstep.engines.config import EmbeddedConfig as EmbeddedEngine
from lockstep.engines.config import VllmConfig
from lockstep.errors import ConfigError
from lockstep.habits import SETTINGS, VERBS, WHOLE
from lockstep.recipes import find_recipe
from lockstep.run_config import CONFLICTS, Config, EvaluationConfig, ServeConfig, SupervisedConfig
from lockstep.training.config import TrainerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddedConfig:
    pages: int = 8
    """Pages
    of memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteConfig:
    url: str = "http://localhost"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    size: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class EasyTask(Task):
    hint: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HardTask(Task):
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    steps: int = 10
    """How many steps."""
    rate: float = 0.1
    dry: bool = False
    bounds: tuple[float, float] = (0.2, 0.3)
    names: tuple[str, ...] = ()
    weights: dict[str, float] = dataclasses.field(default_factory=dict)
    dtype: Literal["float32", "bfloat16"] = "float32"
    bits: Literal[32, 8] = 32
    limit: float | None = None
    engine: EmbeddedConfig | RemoteConfig = EmbeddedConfig()
    task: Task = EasyTask()
    spare: Task | None = None

    def __post_init__(self):
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps} must be at least 1.")


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("steps=30", "steps", 30),
        ("rate=1e-3", "rate", 1e-3),
        ("rate=2", "rate", 2.0),
        ("dry=true", "dry", True),
        ("bounds=0.1,0.4", "bounds", (0.1, 0.4)),
        ("names=a,b,c", "names", ("a", "b", "c")),
        ('weights={"a": 2}', "weights", {"a": 2.0}),
        ("dtype=bfloat16", "dtype", "bfloat16"),
        ("bits=8", "bits", 8),
        ("limit=0.5", "limit", 0.5),
        ("limit=none", "limit", None),
    ],
)
def test_an_override_is_read_by_the_fields_type(override, path, value):
    assert getattr(C.resolve(Run(), [override]), path) == value


def test_a_kind_is_chosen_by_its_tag_and_its_settings_follow():
    run = C.resolve(
        Run(), ["engine=remote", "engine.url=http://x", "task=hard_task", "task.size=3"]
    )
    assert run.engine == RemoteConfig(url="http://x")
    assert run.task == HardTask(size=3)


def test_choosing_the_kind_that_stands_keeps_its_settings():
    run = C.resolve(Run(), ["engine.pages=3", "engine=embedded"])
    assert run.engine == EmbeddedConfig(pages=3)


def test_a_setting_that_a_later_kind_would_drop_is_refused():
    with pytest.raises(ConfigError, match=r"engine\.pages is given before engine=remote"):
        C.resolve(Run(), ["engine.pages=3", "engine=remote"])


def test_a_mapping_on_the_command_line_takes_settings_below_it():
    run = C.resolve(Run(), ['weights={"a": 2}', "weights.b=3", "weights.a=none"])
    assert run.weights == {"b": 3.0}


def test_the_file_form_reads_back_equal():
    run = C.resolve(Run(), ["engine=remote", "names=a", "task.hint=look", "bounds=0,1"])
    assert C.from_dict(Run, C.to_dict(run)) == run
    assert C.to_dict(run)["engine"] == {"type": "remote", "url": "http://localhost"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("spare.size=3", r"spare.size.*spare=easy_task \| spare=hard_task"),
        ("stepz=3", "'stepz'.*'steps=3'"),
        ("engine.pagse=3", "'engine.pagse'.*'engine.pages=3'"),
        ("steps=ten", "'ten'"),
        ("steps=1.5", "'1.5'"),
        ("steps=0", r"steps=0.*\b1\b"),
        ("dry=maybe", r"dry: expected bool"),
        ("bounds=1", r"bounds: expected 2 values"),
        ("dtype=float31", "dtype=float31.*'float32'"),
        ("engine=vlm", "engine=vlm"),
        ("rate.x=1", "rate is a float"),
        ("task.hnt=1", "'task.hint=1'"),
        ("steps", "'steps'.*key=value"),
        ("weights={", r"expected a JSON object"),
    ],
)
def test_a_bad_override_is_an_answer(override, message):
    with pytest.raises(ConfigError, match=message):
        C.resolve(Run(), [override])


def test_a_bad_file_names_the_path():
    tree = C.to_dict(Run())
    tree["engine"]["pages"] = "many"
    with pytest.raises(ConfigError, match=r"engine\.pages.*'many'"):
        C.from_dict(Run, tree)
    with pytest.raises(ConfigError, match=r"engine\.pages: .*engine=embedded"):
        C.from_dict(Run, {"engine": {"pages": 3}})


@dataclasses.dataclass(frozen=True, kw_only=True)
class KindsElsewhere:
    """A choice whose kinds stand in a module that nobody imported."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holder:
    task: KindsElsewhere


def test_a_kind_whose_module_was_not_imported_says_so():
    with pytest.raises(ConfigError, match=r"task\.type=mine.*KindsElsewhere"):
        C.from_dict(Holder, {"task": {"type": "mine", "docs": "x"}})


@pytest.mark.parametrize(
    ("name", "expected"),
    [("EmbeddedConfig", "embedded"), ("PPOClip", "ppo_clip"), ("GRPO", "grpo"),
     ("DocSearchConfig", "doc_search"), ("ChatMLConfig", "chat_ml")],
)  # fmt: skip
def test_a_tag_is_the_class_name_in_words(name, expected):
    assert C.tag(type(name, (), {})) == expected


def test_a_class_can_name_its_own_tag():
    assert C.tag(type("ChatMLConfig", (), {"TAG": "chatml"})) == "chatml"


def test_help_gives_path_type_value_and_docstring():
    rows = {row[0]: row[1:] for row in C.describe(Run())}
    assert rows["steps"] == ("int", "10", "How many steps.")
    assert rows["engine.pages"] == ("int", "8", "Pages of memory.")
    assert rows["engine"][:2] == ("embedded | remote", "embedded")
    assert rows["bounds"][1] == "0.2,0.3"
    assert rows["spare"][:2] == ("easy_task | hard_task | none", "none")


def test_differences_name_what_changed():
    before, after = C.to_dict(Run()), C.to_dict(C.resolve(Run(), ["steps=3", "engine.pages=9"]))
    assert C.differences(before, after) == {"steps": (10, 3), "engine.pages": (8, 9)}


def test_a_config_may_be_right_with_the_settings_of_a_command_line_alone(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(to_dict(find_recipe("quickstart")) | {"steps": 0}))
    words = ["train", str(file), "--dry-run"]
    assert main(words) == 2
    assert "steps=0" in capsys.readouterr().err
    assert main([*words, "steps=3"]) == 0
    assert "steps: 3" in capsys.readouterr().out
    assert main([*words, "seed=3"]) == 2  # every check is made again


def test_a_setting_below_a_kind_or_preset_that_a_file_names_keeps_the_rest_of_it():
    task = to_dict(find_recipe("quickstart"))["task"]
    tree = {"correction": "mis", "engine": "vllm", "task": task}
    changes = ["correction.kl_penalty_coef=0.1", "engine.urls=http://a:1", "checkpoint.every=3"]
    found = C.from_settings(Config, tree, changes)
    assert found == C.resolve(C.from_dict(Config, tree), changes)
    assert found.correction == dataclasses.replace(Correction.mis(), kl_penalty_coef=0.1)


def test_help_shows_one_section_and_asks_for_another(capsys):
    assert main(["train", "quickstart", "--help", "trainer"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("trainer: Optimizer, schedule")
    assert "trainer.lr=0.001  (float)" in shown and "group_size" not in shown
    assert main(["train", "quickstart", "--help", "trainr"]) == 2
    assert "Did you mean 'trainer'?" in capsys.readouterr().err
    assert main(["train", "--help", "trainer"]) == 2
    assert "lockstep train RECIPE --help trainer" in capsys.readouterr().err


def test_every_hint_leads_to_a_setting():
    """A name in the table of other libraries' words that Lockstep has lost would mislead."""
    config = quickstart_with("lora.rank=4", "engine=vllm")
    known = [*to_dict(config), *flatten(to_dict(config)), "out", "resume"]
    meant = [*SETTINGS.values(), *WHOLE.values()]
    paths = {re.split(r"[:=]", text)[0] for text in meant}
    assert paths <= set(known), paths - set(known)
    assert {verb for verb in VERBS.values() if verb[0] != "-"} <= set(COMMANDS)


def _tower(levels: int, entry: str, *, first: str) -> str:
    """Aliases that stand for 10 ** levels values."""
    made = [f"a0: &a0 {first}"]
    made += [f"a{i}: &a{i} {entry % ','.join([f'*a{i - 1}'] * 10)}" for i in range(1, levels)]
    return "\n".join(made)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "trainer: {lr: 1}\nsteps: 3\ntrainer: {b: 2}", r"line 3\b"),
        ("a.yaml", "trainer:\n  lr: 1\n  lr: 2", r"line 3: trainer.lr.*line 2\b"),
        ("a.yml", "trainer.lr: 1\ntrainer: {lr: 2}", "line 2: trainer.lr"),
        ("a.yaml", "trainer: {lr: 2}\ntrainer.lr: 1", "line 2: trainer.lr"),
        ("a.yaml", "parts: [{x: 1}, {x: 1, x: 2}]", "line 1: parts.1.x"),
        ("a.yaml", '"lr": 1\nlr: 2', r"line 2\b"),
        ("a.yaml", "engine: vllm\nengine.x: 2", "engine is given twice.*type: KIND"),
        ("a.yaml", "engine.x: 2\nengine: vllm", "engine.*twice"),
        ("a.json", '{\t"a": 1,\n"b": {"c": [{"d": 1}, {"d": 2}]},\n"b": 3}', r"line 3\b"),
        ("a.json", '{"a": 1, "\\u0061": "}{"}', r"line 1\b"),
        ("a.json", '{"t.lr": 1,\n"t": {"lr": 2}}', r"line 2: t.lr.*line 1\b"),
        ("a.toml", "[t]\nlr=1\n[t]\nb=2", r".at line 3\b"),
        ("a.toml", '"t.lr"=1\n[t]\nlr=2', "t.lr"),
        ("a.yaml", _tower(9, "[%s]", first="[x]"), "aliases written"),
        ("a.yaml", _tower(9, "{<<: [%s]}", first="{x: 1}"), "aliases written"),
        ("a.yaml", "a: &a [*a]", "aliases written"),
        ("a.yaml", "a: &a {<<: *a}", "aliases written"),
        ("a.yaml", "a: " + "[" * 2000 + "]" * 2000, "64"),
        ("a.json", '{"a": ' + "[" * 10**5 + "]" * 10**5 + "}", "64"),
        ("a.json", '{"a": ' + "[" * 100 + "]" * 100 + "}", "64"),
        ("a.json", f'{{"{"a." * 400}": 1}}', "64"),
        ("a.toml", "a = " + "[" * 10**5 + "]" * 10**5, "64"),
        ("a.toml", "a." * 10**5 + "a = 1", "64"),
        ("a.toml", "x = {" + '"a" . ' * 10**4 + "a = 1}", "64"),
        ("a.yaml", "x: y\n" * 10**5, "at most"),
        ("a.yaml", "a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
    ],
)
def test_a_file_that_says_a_thing_twice_or_expands_is_one_line(tmp_path, name, text, message):
    (tmp_path / name).write_text(text[: 2 << 18])
    with pytest.raises(ConfigError, match=message) as caught:
        C.read_tree(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)


def test_one_key_in_several_places_is_read_and_a_date_stays_text(tmp_path):
    (tmp_path / "a.json").write_text('{"b": {"c": [{"d": 1}, {"d": "x\\"{"}]}, "d": {"d": 1}}')
    (tmp_path / "a.yaml").write_text("a: &a {x: 2025-01-01}\nb: {<<: *a, y.z: 1}\nb.y.w: 1e-4")
    assert C.read_tree(tmp_path / "a.json")["b"]["c"][1]["d"] == 'x"{'
    b = {"x": "2025-01-01", "y": {"z": 1, "w": 1e-4}}
    assert C.read_tree(tmp_path / "a.yaml") == {"a": {"x": "2025-01-01"}, "b": b}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "out: runs/x", "'out'"),
        ("a.json", '{"output_dir": "x"}', "out is given beside the settings"),
        ("a.yaml", "trainer: {type: fast}", "'trainer.type'"),
        ("a.toml", "name = 2025-01-01", "found .* Write it in quotes"),
        ("a.yaml", "name: !!binary aGk=", "b'hi'"),
    ],
)
def test_a_file_with_what_is_no_setting_says_where_it_belongs(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        C.overlaid(find_recipe("quickstart"), C.read_tree(tmp_path / name))


OF_TABLE = {"held_out": EvaluationConfig, **dict.fromkeys(("supervised", "sft"), SupervisedConfig)}
OF_TABLE |= dict.fromkeys(("tinker", "both_apis"), ServeConfig)
RULES = [
    (OF_TABLE.get(table, Config), rule) for table, rules in CONFLICTS.items() for rule in rules
]
for kind in (EmbeddedEngine, VllmConfig, TrainerConfig, JudgeScorer):
    RULES += [(kind, rule) for rule in kind.CONFLICTS]


@pytest.mark.parametrize(("base", "rule"), RULES)
def test_every_condition_of_a_conflict_is_an_attribute_of_some_kind_of_config(base, rule):
    words = rule.translate(str.maketrans("[]", "  ")).split()
    for condition in {*words, *re.findall(r">=?([a-z_.]+)", rule)} - {"with"}:
        kinds = [base]
        for part in re.split(r"!?[=>]|\.\*", condition)[0].split("."):
            found = [kind for kind in kinds if hasattr(kind, part) or part in get_type_hints(kind)]
            assert found, f"{rule}: nothing here has {part!r}"
            hints = [get_type_hints(kind).get(part) for kind in found]
            members = [m for hint in hints for m in (get_args(hint) or (hint,))]
            if part == "chosen_correction":
                members = [Correction]
            kinds = [
                k for m in members if dataclasses.is_dataclass(m) for k in (m, *choices(m).values())
            ]


def test_a_setting_of_several_values_takes_neither_one_nor_others():
    assert Correction(anchor="recomputed", level="token", limits=[0, 2]).limits == [0, 2]
    for kind, given, expected in (
        (Correction, {"limits": 2.0}, r"limits=2.0 must be a tuple\[float, float\]"),
        (Correction, {"reject": ("veto_ratio",)}, r"must be a tuple\[Rule\]"),
        (TrainerConfig, {"freeze": "*.attention.*"}, r"must be a tuple\[str\]"),
    ):
        with pytest.raises(ConfigError, match=expected):
            kind(**given)
