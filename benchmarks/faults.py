"""
Kills training at random moments (SIGKILL), starts it again each time, and compares how it ends with a run that nothing
interrupted.

Runs alternate between vLLM's engine and transformers' generation; each is killed five times and then left alone. Two
more lose their server (`qarl-trl serve`) once, and go on with a new one; two are killed while they write the frozen
base of their adapter, and two while they push to a Hub of this process. The engine and its learner are in `--scheme`;
all other runs are in W4A16, for which vLLM has no kernel on a CPU without AVX-512. Master weights, optimizer state,
low-bit tensors and the saved model must be equal bit for bit, and after each kill every checkpoint in its place must
be whole.
The result file is written after every run, and a second call goes on from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import common


sys.path.insert(0, str(common.ROOT / "tests"))
import yaml
from hub_server import running_hub
from slow.kills import PHASES, PHASES_OF_SHARING, Kill, random_kill, run
from slow.test_server import KEY, free_port, start, wait_for
from slow.toys import random_adapter, save_model, settings

from qarl_trl.checkpoints.folder import damage


KILLS_PER_RUN = 5
# Kills in all of each of these kinds.
SERVERS = 2
SHARED = 2
# Runs of each kind in which such a kill is tried: on a slow machine it may come too late each time.
TRIES = 8
# Settings of the runs that are killed in `base/`.
FROZEN = {"lora_base": "frozen", "optim_muon": False, "quant_group_size": 64}


def after(ended: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a kill met, with the damage it did."""
    met = {key: ended[key] for key in ("phase", "step", "resumed", "code")}
    damaged = [path.name for path in folder.glob("checkpoint-*") if damage(path)]
    return met | {"damaged": damaged}


# Kinds of runs -------------------------------------------------------------------------------------------------------


def engine_settings(kind: str, scheme: str) -> dict[str, Any]:
    """Settings of a run with vLLM's engine; a run that transformers samples for keeps the toy's."""
    return {"quant_scheme": scheme} if kind == "engine" else {}


def interrupted_run(
    model: str, folder: Path, kind: str, index: int, expected: dict[str, str], scheme: str
) -> dict[str, Any]:
    """One run with its kills; `equal` says whether it ended as `expected`."""
    engine = kind == "engine"
    changes = engine_settings(kind, scheme)
    rng = random.Random(index)

    kills: list[dict[str, Any]] = []
    while len(kills) < KILLS_PER_RUN:
        ended = run(model, folder, engine, random_kill(rng, engine), **changes)
        if not ended["killed"]:
            break
        kills.append(after(ended, folder))

    last = run(model, folder, engine, **changes)
    return {"run": index, "kind": kind, "equal": last["digests"] == expected, "kills": kills}


def shared_run(model: str, folder: Path, kind: str, kill: Kill | None = None) -> dict[str, Any]:
    """A run with a frozen base, or one that pushes; its `digests` also hold what is in `base/` or on the Hub."""
    if kind == "base":
        ended = run(model, folder, False, kill, peft_config=random_adapter(), **FROZEN)
        files = {f"base/{path.name}": path.read_bytes() for path in (folder / "base").glob("*.safetensors")}
    else:
        ended = run(model, folder, False, kill, hub=HUB.url)
        files = pushed_files()

    if ended["digests"] is not None:
        for name, content in files.items():
            ended["digests"][name] = hashlib.sha256(content).hexdigest()
    return ended


def pushed_files() -> dict[str, bytes]:
    """The weights on the Hub. Each commit must have the whole model, and none another one."""
    commits = HUB.branches["me/toy"]["main"][1:]  # without the repository's first
    weights = [commit.files["model.safetensors"] for commit in commits]
    assert all(content == weights[0] for content in weights)
    return {"on the Hub": weights[-1]} if weights else {}


def run_killed_while_it_shares(
    model: str, folder: Path, kind: str, index: int, expected: dict[str, str]
) -> dict[str, Any]:
    """One run with one kill while it writes its base or pushes."""
    rng = random.Random(index)
    kill = (kind, 1, rng.uniform(0, PHASES_OF_SHARING[kind]))

    kills = []
    ended = shared_run(model, folder, kind, kill)
    if ended["killed"]:
        kills.append(after(ended, folder))
        ended = shared_run(model, folder, kind)
    return {"run": index, "kind": kind, "equal": ended["digests"] == expected, "kills": kills}


def served_run(model: str, scratch: Path, scheme: str, kill: Kill | None = None) -> dict[str, Any]:
    """
    A run beside a server that starts for it. Samples are seeded: the random numbers of a server are in no checkpoint.
    """
    place = {"folder": str(scratch), "model": model, "port": free_port()}
    changes = {
        "vllm_mode": "server",
        "vllm_server_base_url": f"http://127.0.0.1:{place['port']}",
        "vllm_server_timeout": 5.0,
        "quant_scheme": scheme,
        "sync_folder": str(scratch / "syncs"),
        "generation_kwargs": {"seed": 0},
    }
    recipe = settings(scratch / "served", model_name_or_path=model, report_to="none", **changes)
    (scratch / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    os.environ["VLLM_API_KEY"] = KEY
    with start(place) as server:
        wait_for(server, place)
        killed_process = server.pid if kill else None
        return run(model, scratch / "run", True, kill, server=killed_process, **changes)


def run_that_loses_its_server(
    model: str, scratch: Path, index: int, expected: dict[str, str], scheme: str
) -> dict[str, Any]:
    """Its server is killed in a sync or while it samples; a new one and a resume end the run."""
    rng = random.Random(index)
    kill = (rng.choice(["sync", "sample"]), 2, rng.uniform(0, 0.1))

    kills = []
    ended = served_run(model, scratch, scheme, kill)
    if ended["killed"]:
        kills.append(after(ended, scratch / "run"))
        ended = served_run(model, scratch, scheme)
    return {"run": index, "kind": "server", "equal": ended["digests"] == expected, "kills": kills}


# All runs ------------------------------------------------------------------------------------------------------------


class Runs:
    """
    Makes runs of every kind in one scratch folder.

    Args:
        scratch: An empty folder.
        scheme: Scheme of the engine and its learner.
    """

    def __init__(self, scratch: Path, scheme: str) -> None:
        self.model = save_model(scratch / "model", layers=1)
        self._scratch = scratch
        self._folder = scratch / "run"
        self._scheme = scheme
        # Digests of what a run of a kind ends with that nothing interrupts.
        self._expected: dict[str, dict[str, str]] = {}

    def make(self, kind: str, index: int) -> dict[str, Any]:
        """One run with its kills: an entry of the result file."""
        if kind not in self._expected:
            self._expected[kind] = self._straight(kind)["digests"]
            self._clean()
        expected = self._expected[kind]

        if kind == "server":
            ended = run_that_loses_its_server(self.model, self._scratch, index, expected, self._scheme)
        elif kind in PHASES_OF_SHARING:
            ended = run_killed_while_it_shares(self.model, self._folder, kind, index, expected)
        else:
            ended = interrupted_run(self.model, self._folder, kind, index, expected, self._scheme)
        self._clean()
        return ended

    def _straight(self, kind: str) -> dict[str, Any]:
        """A run that nothing interrupts."""
        if kind == "server":
            return served_run(self.model, self._scratch, self._scheme)
        if kind in PHASES_OF_SHARING:
            return shared_run(self.model, self._folder, kind)
        return run(self.model, self._folder, kind == "engine", **engine_settings(kind, self._scheme))

    def _clean(self) -> None:
        shutil.rmtree(self._folder)
        HUB.branches.clear()


def number_of_kills(runs: list[dict[str, Any]], *kinds: str) -> int:
    """Kills in runs of these kinds."""
    return sum(len(entry["kills"]) for entry in runs if entry["kind"] in kinds)


def number_of_kills_within(runs: list[dict[str, Any]], kind: str) -> int:
    """Kills that met what their kind is about: a slow machine may have come later."""
    kills = [kill for entry in runs if entry["kind"] == kind for kill in entry["kills"]]
    return sum(kill["phase"] == kind for kill in kills)


def next_kind(runs: list[dict[str, Any]], kills: int) -> str | None:
    """
    The kind of the next run; `None` if there were enough kills of all kinds.

    Args:
        runs: The runs so far.
        kills: How many kills are wanted in runs by the engine and by transformers together.
    """
    for kind in PHASES_OF_SHARING:
        tried = sum(entry["kind"] == kind for entry in runs)
        if number_of_kills_within(runs, kind) < SHARED and tried < TRIES:
            return kind
    if number_of_kills(runs, "engine", "transformers") < kills:
        return "engine" if len(runs) % 2 else "transformers"
    if number_of_kills(runs, "server") < SERVERS:
        return "server"
    return None


def write(args: Any, runs: list[dict[str, Any]]) -> None:
    """Write the result file, and print its table."""
    kills = [(entry["kind"], kill) for entry in runs for kill in entry["kills"]]
    by_phase = Counter((kind, kill["phase"]) for kind, kill in kills)
    kinds = ("engine", "transformers", "server", *PHASES_OF_SHARING)
    rows = []
    for phase in (*PHASES, *PHASES_OF_SHARING):
        rows.append({"killed in": phase} | {kind: by_phase[kind, phase] for kind in kinds})

    killed = [entry for entry in runs if entry["kills"]]
    equal = sum(entry["equal"] for entry in killed)
    damaged = sum(bool(kill["damaged"]) for _, kill in kills)
    headlines = [
        f"{equal} of {len(killed)} runs with kills ended as the uninterrupted one, after {len(kills)} kills",
        f"{damaged} kills left a damaged checkpoint in its place",
    ]
    common.report("faults", args, headlines, rows, start_load=0.0, runs=runs)


def main() -> None:
    args = common.arguments(
        __doc__,
        kills=(30, 2, "kills in all, those of servers apart"),
        seed=(0, 0, "of the moments"),
        scheme=("W4A16", "W4A16", "of the engine and its learner"),
    )
    file = common.result_file("faults", args.quick)
    runs = json.loads(file.read_text())["runs"] if file.exists() else []

    with tempfile.TemporaryDirectory() as scratch:
        maker = Runs(Path(scratch), args.scheme)
        kind = next_kind(runs, args.kills)
        while kind is not None:
            # Runs of an earlier call may be of an earlier commit.
            runs.append(maker.make(kind, args.seed + len(runs)) | {"commit": common._commit()})
            write(args, runs)
            kind = next_kind(runs, args.kills)


if __name__ == "__main__":
    with running_hub() as HUB:
        main()
