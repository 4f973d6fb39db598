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

import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import common


sys.path.insert(0, str(common.ROOT / "tests"))
import yaml
from hub_server import running_hub
from slow.kills import PHASES, PHASES_OF_SHARING, random_kill, run
from slow.test_server import KEY, free_port, start, wait_for
from slow.toys import random_adapter, save_model, settings

from qarl_trl.checkpoints.folder import damage


KILLS_PER_RUN, SERVERS, SHARED = 5, 2, 2
# Of the runs that are killed in `base/`.
FROZEN = {"lora_base": "frozen", "optim_muon": False, "quant_group_size": 64}


def after(found: dict, folder: Path) -> dict:
    """What a kill met, with the damage it did."""
    damaged = [path.name for path in folder.glob("checkpoint-*") if damage(path)]
    return {key: found[key] for key in ("phase", "step", "resumed", "code")} | {"damaged": damaged}


def interrupted_run(model: str, folder: Path, kind: str, index: int, expected: dict[str, str], scheme: str) -> dict:
    """One run with its kills; `equal` says whether it ended as `expected`."""
    kills, rng, engine = [], random.Random(index), kind == "engine"
    changes = {"quant_scheme": scheme} if engine else {}
    while len(kills) < KILLS_PER_RUN:
        found = run(model, folder, engine, random_kill(rng, engine), **changes)
        if not found["killed"]:
            break
        kills.append(after(found, folder))
    ended = run(model, folder, engine, **changes)
    return {"run": index, "kind": kind, "equal": ended["digests"] == expected, "kills": kills}


def shared_run(model: str, folder: Path, kind: str, kill: tuple[str, int, float] | None = None) -> dict:
    """A run with a frozen base, or one that pushes; its `digests` also hold what is in `base/` or on the Hub."""
    if kind == "base":
        found = run(model, folder, False, kill, peft_config=random_adapter(), **FROZEN)
        files = {f"base/{path.name}": path.read_bytes() for path in (folder / "base").glob("*.safetensors")}
    else:
        found = run(model, folder, False, kill, hub=HUB.url)
        commits = HUB.branches["me/toy"]["main"][1:]  # without the repository's first
        weights = [commit.files["model.safetensors"] for commit in commits]
        files = {"on the Hub": weights[-1]} if weights else {}
        # A commit has the whole model, or there is none.
        assert all(content == weights[0] for content in weights)

    if found["digests"] is not None:
        found["digests"] |= {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return found


def run_killed_while_it_shares(model: str, folder: Path, kind: str, index: int, expected: dict[str, str]) -> dict:
    """One run with one kill while it writes its base or pushes."""
    rng = random.Random(index)
    kills = []
    found = shared_run(model, folder, kind, (kind, 1, rng.uniform(0, PHASES_OF_SHARING[kind])))
    if found["killed"]:
        kills.append(after(found, folder))
        found = shared_run(model, folder, kind)
    return {"run": index, "kind": kind, "equal": found["digests"] == expected, "kills": kills}


def run_that_loses_its_server(model: str, scratch: Path, index: int, expected: dict[str, str], scheme: str) -> dict:
    """Its server is killed in a sync or while it samples; a new one and a resume end the run."""
    rng, kills = random.Random(index), []
    found = served_run(model, scratch, scheme, (rng.choice(["sync", "sample"]), 2, rng.uniform(0, 0.1)))
    if found["killed"]:
        kills.append(after(found, scratch / "run"))
        found = served_run(model, scratch, scheme)
    return {"run": index, "kind": "server", "equal": found["digests"] == expected, "kills": kills}


def served_run(model: str, scratch: Path, scheme: str, kill: tuple[str, int, float] | None = None) -> dict:
    """
    A run beside a server that starts for it. Samples are seeded: the random numbers of a server are in no checkpoint.
    """
    place = {"folder": str(scratch), "model": model, "port": free_port()}
    changes = {
        "vllm_mode": "server",
        "vllm_server_base_url": f"http://127.0.0.1:{place['port']}",
        "vllm_server_timeout": 5.0,
        "quant_scheme": scheme,
    }
    changes |= {"sync_folder": str(scratch / "syncs"), "generation_kwargs": {"seed": 0}}
    recipe = settings(scratch / "served", model_name_or_path=model, report_to="none", **changes)
    (scratch / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    os.environ["VLLM_API_KEY"] = KEY
    with start(place) as server:
        wait_for(server, place)
        return run(model, scratch / "run", True, kill, server=server.pid if kill else None, **changes)


def main() -> None:
    args = common.arguments(
        __doc__,
        kills=(30, 2, "kills in all, those of servers apart"),
        seed=(0, 0, "of the moments"),
        scheme=("W4A16", "W4A16", "of the engine and its learner"),
    )
    file = common.result_file("faults", args.quick)
    runs = json.loads(file.read_text())["runs"] if file.exists() else []
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        model, folder = save_model(scratch / "model", layers=1), scratch / "run"
        expected: dict[str, dict] = {}

        def next_run(kind: str) -> dict:
            index = args.seed + len(runs)
            if kind not in expected:
                if kind == "server":
                    straight = served_run(model, scratch, args.scheme)
                elif kind in PHASES_OF_SHARING:
                    straight = shared_run(model, folder, kind)
                elif kind == "engine":
                    straight = run(model, folder, True, quant_scheme=args.scheme)
                else:
                    straight = run(model, folder, False)
                expected[kind] = straight["digests"]
                shutil.rmtree(folder)
                HUB.branches.clear()
            if kind == "server":
                return run_that_loses_its_server(model, scratch, index, expected[kind], args.scheme)
            if kind in PHASES_OF_SHARING:
                return run_killed_while_it_shares(model, folder, kind, index, expected[kind])
            return interrupted_run(model, folder, kind, index, expected[kind], args.scheme)

        def number(*kinds: str) -> int:
            return sum(len(found["kills"]) for found in runs if found["kind"] in kinds)

        def wanted() -> str | None:
            """The kind of the next run; `None` if there were enough kills of all kinds."""
            for kind in PHASES_OF_SHARING:
                if number(kind) < SHARED:
                    return kind
            if number("engine", "transformers") < args.kills:
                return "engine" if len(runs) % 2 else "transformers"
            return "server" if number("server") < SERVERS else None

        while kind := wanted():
            # Runs of an earlier call may be of an earlier commit.
            runs.append(next_run(kind) | {"commit": common._commit()})
            shutil.rmtree(folder)
            HUB.branches.clear()
            write(args, runs)


def write(args, runs: list[dict]) -> None:
    kills = [(found["kind"], kill) for found in runs for kill in found["kills"]]
    by_phase = Counter((kind, kill["phase"]) for kind, kill in kills)
    kinds = ("engine", "transformers", "server", *PHASES_OF_SHARING)
    rows = [
        {"killed in": phase} | {kind: by_phase[kind, phase] for kind in kinds}
        for phase in (*PHASES, *PHASES_OF_SHARING)
    ]
    damaged = sum(bool(kill["damaged"]) for _, kill in kills)
    killed = [found for found in runs if found["kills"]]
    headlines = [
        f"{sum(found['equal'] for found in killed)} of {len(killed)} runs with kills ended as the uninterrupted one, "
        f"after {len(kills)} kills",
        f"{damaged} kills left a damaged checkpoint in its place",
    ]
    common.report("faults", args, headlines, rows, start_load=0.0, runs=runs)


if __name__ == "__main__":
    with running_hub() as HUB:
        main()
