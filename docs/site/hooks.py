"""What the site has besides docs/*.md: API pages from docstrings, the changelog, linked files.

mkdocs.yml names this file as its hook. It needs neither torch nor the package's dependencies:
docstrings are read from the sources. It is a griffe extension as well: see `Docstrings`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import lockstep  # noqa: E402  it loads nothing else

API: dict[str, tuple[str, str, list[str]]] = {
    "run": (
        "Train, evaluate, diagnose, load",
        "The functions that `import lockstep` offers, and what they return.",
        [
            *(
                f"{module}.{name}\n    options: {{heading: lockstep.{public}, toc_label: {public}}}"
                for public, (module, name) in lockstep._PUBLIC.items()
            ),
            "lockstep.store.run.Outcome",
            "lockstep.store.run.Run",
            "lockstep.doctor.diagnosis.Diagnosis",
        ],
    ),
    "settings": (
        "Settings",
        "Every setting of a run, with its type, its default and its meaning. A path on the command "
        "line, such as `trainer.lr=1e-5`, names a field of these classes.",
        [
            "lockstep.run_config",
            "lockstep.training.config",
            "lockstep.agent.config",
            "lockstep.engines.config",
            "lockstep.objectives.config",
            "lockstep.models.lora_config",
            "lockstep.sync.config",
            "lockstep.store.config",
            "lockstep.launch.config",
        ],
    ),
    "agent": (
        "Environments, tools, tasks",
        "The classes and functions that a task of your own is written with.",
        [
            "lockstep.agent.environment",
            "lockstep.agent.tools",
            "lockstep.agent.task_config",
            "lockstep.agent.tasks",
            "lockstep.agent.scoring",
        ],
    ),
    "types": (
        "Messages, trajectories, samples",
        "The containers that pass between environment, engine and trainer, with the shape and "
        "dtype of every column.",
        ["lockstep.types"],
    ),
    "correction": (
        "Correction",
        "Weights and rejections for the gap between sampler and trainer, for any trainer.",
        [
            "lockstep.correction.weighing",
            "lockstep.correction.config",
            "lockstep.correction.layout",
            "lockstep.correction.metrics",
        ],
    ),
    "objectives": (
        "Losses and advantages",
        "Losses, aggregations and advantages as pure functions, for any trainer.",
        [
            "lockstep.objectives.losses",
            "lockstep.objectives.aggregation",
            "lockstep.objectives.advantages",
        ],
    ),
    "renderers": (
        "Renderers and engines",
        "The two protocols between text and ids, and between ids and log-probs.",
        ["lockstep.renderers.base", "lockstep.renderers.config", "lockstep.engines.base"],
    ),
    "testing": (
        "Assertions and fakes",
        "Fakes, assertions and faults for the tests of your own trainer or environment.",
        ["lockstep.testing.assertions", "lockstep.testing.engines"],
    ),
    "errors": (
        "Errors",
        "Every error that Lockstep raises on purpose. All of them derive from `LockstepError`.",
        ["lockstep.errors"],
    ),
}
"""Page -> title, first paragraph, and the modules or names that it documents."""

OUTSIDE = re.compile(r"\]\((?:\.\./)+((?:examples|src)/[^)#]+)\)")
"""A link from a page of docs/ to a source file beside docs/."""


DOCTEST = re.compile(r"^( *)>>> .*\n?(?:(?! *$).*\n?)*", re.M)

LEGEND = re.compile(r"(?:^( *)# .*\n?)+", re.M)


class Docstrings(griffe.Extension):
    """Writes docstrings as Markdown. Examples and legends of shapes are fenced, which it would read
    as quotations (`>>>`) and headings (`# T packed tokens`); parameters become a list."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = DOCTEST.sub(self.fenced, obj.docstring.value)
            names = {parameter.name for parameter in getattr(obj, "parameters", ())}
            obj.docstring.value = self.listed(LEGEND.sub(self.fenced, text), names)

    def listed(self, text: str, parameters: set[str]) -> str:
        """A list of what is said of parameters, and paragraphs of what is returned and raised."""

        def begun(found: re.Match[str]) -> str:
            is_list = set(found[2].split(", ")) <= parameters
            return f"{found[1].rstrip()}\n\n- `{found[2]}`: " if is_list else found[0]

        text = re.sub(r"(^|\.\s|\n)([a-z_]\w*(?:, [a-z_]\w*)*): ", begun, text)
        return re.sub(r"(\.\s)((?:Returns|Raises) )", r"\1\n\n\2", text)

    def fenced(self, found: re.Match[str]) -> str:
        return f"\n{found[1]}```pycon\n{found[0].rstrip()}\n{found[1]}```\n"


def on_config(config: Any) -> Any:
    reference = config.nav[-1]["Reference"]
    reference.append(
        {"Python API": [{title: f"api/{page}.md"} for page, (title, *_) in API.items()]}
    )
    config.watch += [str(ROOT / "src"), str(ROOT / "CHANGELOG.md")]
    return config


def on_files(files: Any, config: Any) -> Any:
    def add(path: str, text: str) -> None:
        files.append(File.generated(config, path, content=text))

    for page, (title, about, names) in API.items():
        add(
            f"api/{page}.md",
            "\n\n".join([f"# {title}", about, *(f"::: {n}" for n in names)]) + "\n",
        )
    add("changelog.md", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    pages = [file.content_string for file in files if file.is_documentation_page()]
    for path in sorted({link for text in pages for link in OUTSIDE.findall(text)}):
        add(f"source/{path}.txt", (ROOT / path).read_text(encoding="utf-8"))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Points links at where the site has their files, names pages in links without `.md`, folds
    what is folded, and shows `a\\|b` in tables as `a|b`."""
    up = "../" * page.file.src_uri.count("/")
    markdown = OUTSIDE.sub(rf"]({up}source/\1.txt)", markdown)
    markdown = markdown.replace("<details>", "<details markdown>")
    markdown = re.sub(r"\]\((?:\.\./)+CHANGELOG\.md\)", f"]({up}changelog.md)", markdown)
    markdown = re.sub(
        r"\[(?:\w+/)?([\w-]+)\.md\]\(", lambda link: f"[{link[1].replace('-', ' ')}](", markdown
    )
    return re.sub(
        r"^\|.*\|$",
        lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), row[0]),
        markdown,
        flags=re.M,
    )
