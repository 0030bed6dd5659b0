"""What libraries would do in place of parts written by hand: start-up, speed, and the same cases put to both.

    pip install --target LIBS msgspec ruamel.yaml ijson pyahocorasick jsonschema bashlex kubernetes-validate
    python benchmarks/libraries.py --libraries LIBS [imports yaml json matcher settings manifests shell screen]

`imports`: CPU time of `python -c "import NAME"` beyond an empty program, median of 10 in turns. `yaml`: the recipes,
and values of YAML 1.2. `json`: damaged arrays, and a large one. `matcher`: logs of `explain.py`. `settings`: wrong
values in a recipe. `manifests`: pods that Kubernetes refuses. `shell`: scripts that the converter reads. `screen`: one
frame with 16 devices. All times are CPU time.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = {
    "yaml_reader (ours)": "import anabatic.config.loading.yaml_reader",
    "ruamel.yaml": "import ruamel.yaml",
    "validation, settings (ours)": "import anabatic.config.loading.settings",
    "msgspec": "import msgspec",
    "json_and_csv (ours)": "import anabatic.data.readers.file_formats",
    "ijson": "import ijson",
    "explain.matcher (ours)": "import anabatic.doctor.explain.matcher",
    "ahocorasick": "import ahocorasick",
    "k8s.name_rules (ours)": "import anabatic.launch.k8s.manifests",
    "jsonschema": "import jsonschema",
    "shell_parser (ours)": "import anabatic.convert.shell_parser",
    "bashlex": "import bashlex",
    "core.svg_plot (ours)": "import anabatic.core.svg_plot",
    "matplotlib.pyplot": "import matplotlib.pyplot",
    "monitor.screen (ours)": "import anabatic.monitor.screen",
    "rich.live, rich.table": "import rich.live, rich.table",
    "rich.progress": "import rich.progress",
    "maps.html_page (ours)": "import anabatic_vessels.maps.html_page",
    "folium": "import folium",
    "vessels.model.forest (ours)": "import anabatic_vessels.model.forest",
    "sklearn.ensemble": "import sklearn.ensemble",
    "torch, transformers": "import torch, transformers.modeling_utils",
    "torch, transformers, peft": "import torch, transformers.modeling_utils, peft",
}


def least(work: Callable[[], object], times: int = 5) -> float:
    """Return the least CPU seconds of several calls."""
    found = float("inf")
    for _ in range(times):
        start = time.process_time()
        work()
        found = min(found, time.process_time() - start)
    return found


def outcome(work: Callable[[], object]) -> str:
    """Return what a call returns, or the first line of its error."""
    try:
        return repr(work())
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def imports(libraries: str) -> None:
    environment = {**os.environ, "MPLCONFIGDIR": tempfile.gettempdir()}
    head = f"import sys; sys.path.append({libraries!r}); "
    spent: dict[str, list[float]] = {"nothing": [], **{name: [] for name in PROGRAMS}}
    for turn in range(11):
        for name in list(spent):
            before = os.times()
            command = [sys.executable, "-c", head + PROGRAMS.get(name, "pass")]
            run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            after = os.times()
            if run.returncode:
                print(f"{name:30} {run.stderr.splitlines()[-1]}")
                del spent[name]
                continue
            used = after.children_user + after.children_system - before.children_user - before.children_system
            if turn:  # the first fills the page cache
                spent[name].append(used)
    empty = statistics.median(spent.pop("nothing"))
    print(f"an empty program: {1e3 * empty:.0f} ms")
    for name, seconds in spent.items():
        print(f"{name:30} {1e3 * (statistics.median(seconds) - empty):6.0f} ms")


YAML_VALUES = (
    "on",
    "1e-5",
    "1e3",
    ".5",
    "200_000",
    "0x10",
    "0o17",
    "010",
    "1:30",
    "2001-01-01",
    "~",
    "12e03",
    "!!x:y z",
)


def yaml(libraries: str) -> None:
    from ruamel.yaml import YAML

    from anabatic.config.loading import shipped_recipes, yaml_reader

    texts = [path.read_text(encoding="utf-8") for path in sorted(shipped_recipes.FOLDER.rglob("*.yaml"))]

    def theirs(text: str) -> Any:
        return YAML(typ="rt").load(io.StringIO(text))

    ours = least(lambda: [yaml_reader.parse_yaml(text, "r") for text in texts])
    round_trip = least(lambda: [theirs(text) for text in texts])
    print(f"{len(texts)} recipes, values and lines: ours {1e3 * ours:.1f} ms, ruamel.yaml {1e3 * round_trip:.1f} ms")
    cases = [f"key: {value}" for value in YAML_VALUES]
    cases += ["a: 1\na: 2", "a: [1", "a:\n\tb: 1", "a: {b: 1}\n---\nb: 2", "[1]", "a: &x [*x]", "? [1]\n: 2"]
    for text in cases:
        mine = outcome(lambda text=text: yaml_reader.parse_yaml(text, "r").tree)
        other = outcome(lambda text=text: theirs(text))
        print(f"{text!r:40} ours {mine[:90]} | ruamel.yaml {other[:90]}")


DAMAGED = {
    "whole": b'[{"a": 1}, {"a": 2}]',
    "one object a line": b'{"a": 1}\n{"a": 2}\n',
    "one object": b'{"a": 1}',
    "byte order mark": b'\xef\xbb\xbf[{"a": 1}]',
    "torn in a row": b'[{"a": 1}, {"a": 2}, {"a',
    "no closing bracket": b'[{"a": 1}, {"a": 2}',
    "comma missing": b'[{"a": 1} {"a": 2}]',
    "comma too many": b'[{"a": 1},]',
    "more behind": b'[{"a": 1}] x',
    "key twice": b'[{"a": 1, "a": 2}, {"a": 3}]',
    "NUL": b'[{"a": "\0"}]',
    "no UTF-8": b'[{"a": 1}, {"a": "\xff"}]',
    "lone surrogate": b'[{"a": "\\ud800"}]',
    "NaN": b'[{"a": NaN}]',
    "5,000 digits": b'[{"a": ' + b"9" * 5000 + b"}]",
    "10,000 brackets": b"[" * 10_000,
}


def json(libraries: str) -> None:
    import ijson

    from anabatic.data.readers.document import RowIssue
    from anabatic.data.readers.file_formats import iter_json_rows

    def ours(path: Path) -> str:
        rows = list(iter_json_rows(path, "r", lambda row, name, place: row))
        issues = [str(row) for row in rows if isinstance(row, RowIssue)]
        return f"{len(rows) - len(issues)} rows; {issues}".replace(str(path), "FILE")

    def theirs(path: Path) -> str:
        number = 0
        try:
            with open(path, "rb") as file:
                for _ in ijson.items(file, "item", use_float=True):
                    number += 1
        except Exception as error:
            return f"{number} rows; {type(error).__name__}: {' '.join(str(error).split())[:60]}"
        return f"{number} rows"

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        path.write_bytes(b"[" * 20_000)
        for who, read in (("ours", ours), ("ijson", theirs)):  # ijson first would hide ours: a peak does not fall
            read(path)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            print(f"20,000 open brackets: peak of the process after {who} {peak} MiB")
        for name, data in DAMAGED.items():
            path.write_bytes(data)
            print(f"{name:20} ours {outcome(lambda: ours(path))[:150]} | ijson {outcome(lambda: theirs(path))}")
        row = b'{"instruction": "' + b"Say it. " * 20 + b'", "input": "", "output": "' + b"words " * 60 + b'"}'
        path.write_bytes(b"[" + b",\n".join([row] * 40_000) + b"]")
        size = path.stat().st_size / 1e6
        print(f"{size:.0f} MB, 40,000 rows: ours {least(lambda: ours(path), 3):.2f} s, ijson {ijson.backend}", end=" ")
        print(f"{least(lambda: theirs(path), 3):.2f} s")


def matcher(libraries: str) -> None:
    import ahocorasick

    import explain
    from anabatic.doctor.explain.matcher import LogMatcher
    from anabatic.doctor.knowledge_base import load_knowledge

    knowledge = load_knowledge()
    automaton = ahocorasick.Automaton()
    texts = [text.lower().split("*") for entry in knowledge.entries for text in entry.texts]
    for pieces in texts:
        longest = max(pieces, key=len)
        automaton.add_word(longest, longest)
    automaton.make_automaton()
    print(f"{len(texts)} texts of {len(knowledge.entries)} entries; the automaton looks for each text's longest piece")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank-0.log"
        for kind in explain._KINDS:
            explain.write(path, kind, 50_000_000)
            data = path.read_bytes()
            blocks = [data[at : at + 2**20] for at in range(0, len(data), 2**20)]
            fresh = LogMatcher(knowledge)
            ours = least(lambda blocks=blocks, fresh=fresh: [fresh.find_matches(block) for block in blocks], 1)
            theirs = least(
                lambda blocks=blocks: [
                    sum(1 for _ in automaton.iter(block.decode("latin-1").lower())) for block in blocks
                ],
                1,
            )
            print(f"{kind:10} 50 MB: all of ours {ours:.2f} s, the automaton's search alone {theirs:.2f} s")


SETTINGS_CASES: tuple[str, ...] = (
    "schedule: {max_steps: 10}",
    "schedule: {max_stesp: 10}",
    "schedule: {max_steps: 10.0}",
    "schedule: {max_steps: '10'}",
    "schedule: {max_steps: true}",
    "schedule: 3",
    "tuner: lorra",
    "optim: {lr: .nan}",
    "optim: {lr: 1}",
    "optim: {lr: '1e-5'}",
    "model: 12",
    "data: {train: chats.jsonl}",
    "save: {resume: yes}",
)


def settings(libraries: str) -> None:
    import dataclasses

    import msgspec

    from anabatic.config.loading import yaml_reader
    from anabatic.config.loading.settings import make_settings
    from anabatic.config.loading.validation import SettingNamer, check_section
    from anabatic.config.sft import SftJob

    head = {"model": "m", "data": {"train": ["a.jsonl"]}}

    def ours(tree: dict[str, Any], origin: SettingNamer) -> Any:
        return make_settings(SftJob, check_section(tree, SftJob, origin))

    def theirs(tree: dict[str, Any]) -> Any:
        return msgspec.convert(tree, SftJob, strict=True)

    def shown(job: Any, source: yaml_reader.YamlSource) -> str:
        ((key, given),) = source.tree.items()
        value = getattr(job, key)
        if not dataclasses.is_dataclass(value):
            return repr(value)
        return str({name: getattr(value, name) for name in given if hasattr(value, name)})

    for case in SETTINGS_CASES:
        source = yaml_reader.parse_yaml(case, "r.yaml")
        tree = {**head, **source.tree}
        mine = outcome(lambda tree=tree, source=source: shown(ours(tree, SettingNamer(source.format_location)), source))
        other = outcome(lambda tree=tree, source=source: shown(theirs(tree), source))
        print(f"{case:30} ours {mine[:120]} | msgspec {other[:120]}")
    tree = {**head, "optim": {"lr": 1e-4}, "schedule": {"max_steps": 5}, "lora": {"r": 8}}
    namer = SettingNamer("r.yaml: ")
    print(f"one recipe: ours {1e3 * least(lambda: [ours(tree, namer) for _ in range(100)]) / 100:.3f} ms,", end=" ")
    print(f"msgspec {1e3 * least(lambda: [theirs(tree) for _ in range(100)]) / 100:.3f} ms")
    same = ours(tree, namer) == theirs(tree)
    print(f"equal settings: {same}")
    if not same:
        mine_tree, their_tree = dataclasses.asdict(ours(tree, namer)), dataclasses.asdict(theirs(tree))
        print(
            "differ:",
            {key: (mine_tree[key], their_tree[key]) for key in mine_tree if mine_tree[key] != their_tree[key]},
        )


PODS: tuple[dict[str, Any], ...] = (
    {},
    {"image": "reg/a b"},
    {"cpu": "many"},
    {"memory": "-1Gi"},
    {"shm": "64 GB"},
    {"resource": "huawei.com/"},
    {"env": ["A B=x"]},
    {"env": ["A=1", "A=2"]},
    {"secret_env": ["A=Not_A_Secret/k"]},
    {"node_selector": ["key=has blanks"]},
    {"volume": ["pvc:A:/d"]},
    {"volume": ["pvc:a:/dev/shm"]},
    {"workdir": "relative"},
    {"pull_policy": "Sometimes"},
    {"master_port": 70000},
)


def manifests(libraries: str) -> None:
    import kubernetes_validate

    from anabatic.config.sections.kubernetes import Kubernetes
    from anabatic.launch.k8s.name_rules import check_names
    from anabatic.launch.k8s.pod_template import PodNames, build_pod_template

    names = PodNames("main", "master", "job-name", volcano=True)

    def order(changed: dict[str, Any]) -> Kubernetes:
        return Kubernetes(**{"name": "a", "image": "i", "nproc": 8, **changed})

    def make(changed: dict[str, Any]) -> dict[str, Any]:
        return build_pod_template(order(changed), ["x"], names)

    def theirs(template: dict[str, Any]) -> None:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)

    for changed in PODS:
        ours = outcome(lambda changed=changed: check_names(order(changed)))
        other = outcome(lambda changed=changed: theirs(make(changed)))
        print(f"{str(changed):45} ours {ours[:70]} | JSON schema {other[:70]}")
    template = make({})
    template["spec"]["containers"][0] |= {"imagee": "i", "stdin": 3}
    print(f"an unknown field, a wrong type: {outcome(lambda: theirs(template))[:90]}")
    template = make({})
    seconds = least(lambda: check_names(order({})))
    print(f"one pod: ours {1e3 * seconds:.2f} ms, JSON schema {1e3 * least(lambda: theirs(template)):.0f} ms")


SCRIPTS = {
    "continued lines": "swift sft \\\n  --model a \\\n  --lr 1e-4",
    "variables": "A=1\nexport B=$A\nrun --x ${B:-2}",
    "array": "ARGS=(--a 1 --b 2)\nrun ${ARGS[@]}",
    "array, added to": "ARGS=(--a 1)\nARGS+=(--b 2)\nrun ${ARGS[@]}",
    "arithmetic": "N=$((8 * 2))\nrun --n $N",
    "if": 'if [ -n "$X" ]; then run a; else run b; fi',
    "case": "case $1 in a) run a;; *) run b;; esac",
    "for": "for i in 1 2; do run $i; done",
    "[[ ]]": "if [[ $A == b* ]]; then run a; fi",
    "(( ))": "if (( N > 1 )); then run a; fi",
    "here-document": "cat <<'END' > f\nx 'torn\nEND\nrun a",
    "open quote": "run 'a",
}


def shell(libraries: str) -> None:
    import bashlex

    from anabatic.convert.shell_parser import parse_script

    scripts = dict(SCRIPTS)
    for page in sorted((ROOT / "docs" / "en" / "guides").glob("*.md")):
        for number, block in enumerate(re.findall(r"^```bash\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)):
            scripts[f"{page.name} {number}"] = block
    refused: dict[str, list[str]] = {"ours": [], "bashlex": []}
    for name, text in scripts.items():
        for who, parse in (("ours", parse_script), ("bashlex", bashlex.parse)):
            result = outcome(lambda text=text, parse=parse: len(parse(text)))
            if not result.isdigit():
                refused[who].append(f"{name}: {result[:80]}")
    for who, names in refused.items():
        print(f"{who}: {len(scripts) - len(names)} of {len(scripts)} scripts read", *names, sep="\n  ")
    for who, parse in (("ours", parse_script), ("bashlex", bashlex.parse)):
        print(f"{who}: {1e3 * least(lambda parse=parse: parse(SCRIPTS['continued lines'])):.2f} ms for a short script")


def screen(libraries: str) -> None:
    from rich.console import Console
    from rich.table import Table

    import monitor
    from anabatic.monitor.sampler import Frame
    from anabatic.monitor.screen import UtilizationHistory, colorize_line, render_screen
    from anabatic.monitor.sources.npu_smi_command import parse_snapshot

    snapshot = parse_snapshot(monitor.table())
    frame, history = Frame(1, snapshot, "", ""), UtilizationHistory()
    history.add_frame(frame)

    def ours() -> str:
        return "\n".join(colorize_line(line, True) for line in render_screen(frame, snapshot, history, 120, 40))

    def theirs() -> str:
        table = Table(*(f"column {number}" for number in range(9)))
        for device in snapshot.devices:
            table.add_row(*([str(device.npu_id), str(device.name), str(device.util_pct)] * 3))
        console = Console(file=io.StringIO(), width=120, force_terminal=True)
        console.print(table)
        return console.file.getvalue()  # type: ignore[attr-defined]

    print(f"one frame, {len(snapshot.devices)} devices: ours, whole screen {1e3 * least(ours, 50):.2f} ms,", end=" ")
    print(f"rich.table alone {1e3 * least(theirs, 50):.2f} ms")


PARTS: dict[str, Callable[[str], None]] = {
    part.__name__: part for part in (imports, yaml, json, matcher, settings, manifests, shell, screen)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--libraries", required=True, help="a folder of `pip install --target`")
    options = parser.parse_args()
    libraries = str(Path(options.libraries).resolve())
    sys.path.append(libraries)
    for name in options.parts or PARTS:
        print(f"## {name}")
        PARTS[name](libraries)


if __name__ == "__main__":
    main()
