"""How 0001.tar.xz was made: a database of revision 0001 with its artifacts, and what its API answered.

Run in a checkout of commit 2e495f2, whose code wrote it: `python make_0001.py FOLDER`. It holds finished jobs of all
four kinds: replicates, compiled, failed, cancelled amid its work, labelled, and those of a sweep. The names of the host
it ran on are replaced, and of long series of samples the first are kept.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

KEPT_SAMPLES = 16
TINY = {"d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
TWICE = {"warmup_steps": 1, "measure_steps": 3, "device": "cpu"}
ALONE = {"dtypes": ["fp32"], "batch_size": 1, "device": "cpu"}


def benchmark(**fields: Any) -> dict[str, Any]:
    return {"kind": "benchmark", "model": TINY, "batch_size": 1, "context_length": 16, **TWICE, **fields}


TRAINING = {"gradient_clip_norm": 1.0, "optimizer": "torch_adamw", "activation_checkpointing": True}
FOUR = {"implementations": ["eager", "cpu_flash", "cpu_blocked", "cpu_naive"], "br": [16, 32], "bc": [16]}
SIZES = {"num_heads": 2, "head_dims": [8, 16], "sequence_lengths": [16, 32], "causal": [False]}
SHORT = {"implementations": ["eager"], "head_dims": [16], "sequence_lengths": [32], "mode": "forward"}
LONG = {"implementations": ["eager", "cpu_naive"], "head_dims": [16], "sequence_lengths": [16, 2048]}
JOBS: list[dict[str, Any]] = [
    {
        "spec": benchmark(mode="train_step", replicates=2),
        "name": "replicated",
        "labels": {"team": "a", "run": "1"},
        "priority": 2,
        "timeout_s": 600.0,
    },
    {"spec": benchmark(mode="forward", compile=True), "labels": {"team": "a"}},
    {"spec": benchmark(mode="forward_backward", model={"size": "tiny"}, precision="bf16", context_length=32)},
    {"spec": benchmark(mode="generate", new_tokens=4)},
    {"spec": benchmark(mode="train_step", model={**TINY, "rope_theta": 500.0}, **TRAINING)},
    {"spec": {"kind": "attention", **ALONE, **FOUR, **SIZES, **TWICE}, "name": "grid", "labels": {"team": "b"}},
    {"spec": {"kind": "attention", **ALONE, **SHORT, "warmup_steps": 0, "measure_steps": 1}},
    {"spec": {"kind": "kernel", "rows": [64], "columns": [32], **TWICE}},
    {"spec": {"kind": "ceiling", "dtypes": ["fp32", "tf32"], "matrix_size": 64, "copy_mib": 1, **TWICE}},
    {"spec": {"kind": "ceiling", "dtypes": ["fp32"], "copy_mib": 1, **TWICE}},
    # Fails: accepted for a worker that might have had a GPU.
    {"spec": benchmark(mode="forward", precision="tf32", device="auto"), "labels": {"team": "b"}},
]
SWEEP = {
    "base": benchmark(mode="forward"),
    "grid": {"context_length": [8, 16], "batch_size": [1, 2]},
    "exclude": [{"context_length": 8, "batch_size": 2}],
    "name": "grid",
    "labels": {"team": "c"},
}
TO_CANCEL = {"spec": {"kind": "attention", **ALONE, **LONG, "warmup_steps": 0, "measure_steps": 2000}}


def run(folder: Path) -> None:
    """Run the jobs, and keep what the API says of them in expected.json."""
    from benchmarks.service import Service, submit, wait_for_job  # of that commit

    with Service(folder / "service") as service:
        client = service.start_server()
        service.start_worker()
        ids = [submit(client, job) for job in JOBS]
        sweep = client.post("/sweeps", json=SWEEP).raise_for_status().json()
        ids += [job["id"] for job in client.get("/jobs", params={"sweep": sweep["id"]}).json()["data"]]
        last = submit(client, TO_CANCEL)
        for job_id in ids:
            wait_for_job(client, job_id, timeout_s=400)
        while client.get(f"/jobs/{last}").json()["progress"]["done"] < 2:
            time.sleep(0.05)
        client.post(f"/jobs/{last}/cancel")
        wait_for_job(client, last)
        expected = {"jobs": {job_id: _answers(client, job_id) for job_id in sorted([*ids, last])}}
        expected["sweep"] = client.get(f"/sweeps/{sweep['id']}").json()
        expected["sweep_table"] = client.get("/tables", params={"sweep": sweep["id"], "format": "json"}).json()
    (folder / "expected.json").write_text(json.dumps(expected))
    database = sqlite3.connect(folder / "service/data/flopwatch.sqlite3")
    database.execute("VACUUM INTO ?", [str(folder / "flopwatch.sqlite3")])


def _answers(client: Any, job_id: int) -> dict[str, Any]:
    path = f"/jobs/{job_id}"
    return {
        "job": client.get(path).json(),
        "measurements": client.get(f"{path}/measurements", params={"samples": True}).json(),
        "artifacts": client.get(f"{path}/artifacts").json()["data"],
        "attempts": client.get(f"{path}/attempts").json()["data"],
        "log": client.get(f"{path}/logs").text,
        "table": client.get("/tables", params={"job": job_id, "format": "json"}).json(),
        "markdown": client.get("/tables", params={"job": job_id, "format": "markdown"}).text,
    }


def scrub(folder: Path) -> None:
    """Replace the host's names, and shorten long series of samples, in the database and in what was answered alike."""
    from workers.measure.measurement import pack, unpack
    from workers.measure.statistics import summarize

    database = sqlite3.connect(folder / "flopwatch.sqlite3")
    (worker,) = database.execute("SELECT hostname, id FROM worker").fetchall()
    (text,) = database.execute("SELECT environment FROM job WHERE environment IS NOT NULL LIMIT 1").fetchone()
    (caches,) = database.execute("SELECT environment FROM job WHERE environment LIKE '%INDUCTOR%' LIMIT 1").fetchone()
    kernel, cache = json.loads(text)["host"]["kernel"], json.loads(caches)["variables"]["TORCHINDUCTOR_CACHE_DIR"]
    names = [
        (worker[1], worker[1].replace(worker[0], "example", 1)),
        (f'"{worker[0]}"', '"example"'),
        (kernel, "6.8.0"),
        (cache, "/tmp/torchinductor"),
    ]
    for table, columns in {
        "job": ("worker_id", "environment"),
        "attempt": ("worker_id",),
        "event": ("data",),
        "worker": ("id",),
    }.items():
        for column in columns:
            for old, new in names:
                database.execute(f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (old, new))
    database.execute("UPDATE worker SET hostname = 'example'")
    answered = (folder / "expected.json").read_text()
    for old, new in names:
        answered = answered.replace(old, new)
    expected = json.loads(answered)
    long = database.execute("SELECT id, job_id, samples FROM measurement WHERE n > ?", [KEPT_SAMPLES]).fetchall()
    first = {job_id: min(row for row, job, _ in _ids(database) if job == job_id) for _, job_id, _ in long}
    for row_id, job_id, packed in long:
        samples = unpack(packed)[:KEPT_SAMPLES]
        summary = vars(summarize(samples))
        changes = ", ".join(f"{name} = :{name}" for name in summary)
        database.execute(
            f"UPDATE measurement SET {changes}, samples = :samples WHERE id = :id",
            {**summary, "samples": pack(samples), "id": row_id},
        )
        position = row_id - first[job_id]  # rows are answered in the order of their ids, which no other job interrupts
        expected["jobs"][str(job_id)]["measurements"]["rows"][position].update(summary, samples=list(samples))
    database.commit()
    database.execute("VACUUM")
    database.close()
    (folder / "expected.json").write_text(json.dumps(expected))


def _ids(database: sqlite3.Connection) -> list[Any]:
    return database.execute("SELECT id, job_id, metric FROM measurement").fetchall()


def pack_up(folder: Path, target: Path) -> None:
    """The database, the artifacts and the answers as one archive."""
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for name in ("flopwatch.sqlite3", "expected.json"):
            archive.add(folder / name, arcname=name, filter=_anonymous)
        for path in sorted((folder / "service/data/artifacts").glob("[0-9a-f][0-9a-f]/*")):
            archive.add(path, arcname=f"artifacts/{path.parent.name}/{path.name}", filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    run(folder)
    scrub(folder)
    pack_up(folder, Path(__file__).with_name("0001.tar.xz"))
