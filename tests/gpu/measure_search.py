"""Measures the search on a real GPU: python tests/gpu/measure_search.py speed|torture|flat|kill|shared.

speed    4096 cubed cold, then 4096 x 4096 x 2048 with the trials of the first kept; where the seconds went
torture  200 candidates of which one in four is broken in every way: every outcome named, memory flat
flat     2,000 candidates in one run: memory of this process and of the GPU
kill     SIGKILL at ten random moments, resumed each time
shared   finals while another process uses the GPU: noisy, and re-timed
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
OUT = Path(os.environ.get("OUT") or tempfile.mkdtemp())
TORTURE = ROOT / "tests" / "data" / "torture"


def read(root):
    from autotune.records.trials import read_log

    lines = []
    for path in sorted(root.glob("*/*.trials.jsonl")):
        if ".old" not in path.name:
            lines += read_log(path)[1]
    return sorted(lines, key=lambda line: line.get("s", 0))


def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024


def gpu_used():
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    return (
        pynvml.nvmlDeviceGetMemoryInfo(
            pynvml.nvmlDeviceGetHandleByIndex(int(os.environ.get("NVML_INDEX", "0")))
        ).used
        >> 20
    )


def shown(title, record, root, known=None):
    run = max((line for line in read(root) if line.get("event") == "begin"), key=lambda line: line["at"])[
        "run"
    ]
    ours = [line for line in read(root) if line.get("run") == run]
    done = [line for line in ours if line.get("outcome") == "measured" and "event" not in line]
    stages = record["search"]["stages_s"]
    best = known or min(line["median_ms"] for line in done)
    print(
        f"== {title}: {record['family']} {record['timing']['median_ms']:.5g} ms, "
        f"vs_cublas {record['vs_cublas']}, "
        f"{record['search']['outcomes']}, resumed {record['search']['resumed']}, "
        f"legal {record['search']['legal']}"
    )
    print("   stages", stages)
    for percent in (10, 5, 2, 1):
        reached = [line["s"] for line in done if line["median_ms"] <= best * (1 + percent / 100)]
        print(
            f"   within {percent} % of {best:.5g} ms after {min(reached) if reached else float('nan'):.2f} s"
        )
    first, last = done[0]["s"], done[-1]["s"]
    middle = [line for line in done if first + 1 <= line["s"]]
    print(
        f"   measured: first after {first:.2f} s, "
        f"{len(done) / stages['search']:.1f} per second of the search, "
        f"{len(middle) / max(last - first - 1, 1e-9):.1f} per second after the first second"
    )
    count = max(1, len(done))
    print(
        f"   per candidate: compile {stages['compile'] / count:.3f} s, "
        f"gpu {stages['gpu'] / count * 1e3:.1f} ms, "
        f"propose {stages['propose'] / count * 1e3:.1f} ms, render {stages['render'] / count * 1e3:.1f} ms"
    )
    print("   worker:", [line["start_s"] for line in ours if line.get("event") == "gpu"][:1])
    return best


def tuned(root, m, n, k, *words):
    start = time.time()
    module = os.environ.get("AUTOTUNE_MODULE", "autotune")
    command = [sys.executable, "-m", module, "tune", "--m", m, "--n", n, "--k", k, "--cache", root, "--json"]
    done = subprocess.run([*map(str, command), *words], capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        print("FAILED", done.returncode, done.stderr[-2000:])
        sys.exit(1)
    print(f"   ({time.time() - start:.1f} s)")
    return json.loads(done.stdout)


def speed(budget="20s", seed="0", *words):
    root = OUT / f"speed{seed}{'-'.join(words)}"
    record = tuned(root, 4096, 4096, 4096, "--budget", budget, "--seed", seed, *words)
    shown("cold 4096 cubed", record, root)
    other = tuned(root, 4096, 4096, 2048, "--budget", "12s", "--seed", seed, *words)
    shown("4096 x 4096 x 2048, 4096 cubed kept", other, root)


def torture(count="25"):
    from functools import partial

    from autotune.measure.worker import GpuWorker
    from autotune.space.space import Space
    from autotune.tuning import tuner
    from autotune.values.problem import Problem

    folder = Path(tempfile.mkdtemp())
    tuner.GpuWorker = partial(GpuWorker, service="torture_service:serve")
    for file in TORTURE.iterdir():
        (folder / file.name).write_text(file.read_text())
    (folder / "some.toml").write_text(
        f'extends = "torture.toml"\n[parameters]\nvariant = {list(range(int(count)))}\n'
    )
    root = OUT / "torture"
    before, start, seen = (rss(), gpu_used()), time.time(), []

    def watch(progress):
        if progress.seen and progress.seen % 50 == 0:
            seen.append((progress.seen, rss(), gpu_used()))

    record = tuner.tune(
        Problem(64, 64, 64),
        space=Space.load(folder / "some.toml"),
        budget="1000",
        root=root,
        strategy="exhaustive",
        watch=watch,
    )
    print(
        f"== torture: {dict(record.search.outcomes)} of {record.search.legal}, "
        f"complete {record.search.complete}, "
        f"{time.time() - start:.0f} s; host and GPU MiB {before} -> {(rss(), gpu_used())}; "
        f"on the way {seen[::8]}"
    )
    wrong = []
    for line in read(root):
        if "event" in line:
            continue
        number = line["config"]["variant"] * 8 + line["config"]["num_threads"] // 32 - 1
        if (line["outcome"] != "measured") != (number % 4 == 3):
            wrong.append((number, line["outcome"], line.get("why")))
    print("   good ones lost or bad ones passed:", wrong)
    print(
        "   why:",
        *{(line["outcome"], line["why"][:90]) for line in read(root) if "why" in line and "id" in line},
        sep="\n      ",
    )


def flat(count="2000"):
    from autotune.space.space import Space
    from autotune.tuning.tuner import tune
    from autotune.values.problem import Problem

    folder = Path(tempfile.mkdtemp())
    for file in TORTURE.iterdir():
        (folder / file.name).write_text(file.read_text())
    (folder / "some.toml").write_text(
        f'extends = "torture.toml"\n[parameters]\nvariant = {list(range(int(count) // 6))}\n'
        '[constraints]\ngood = { expr = "number % 4 != 3", reason = "no broken ones" }\n'
    )
    seen, root, start = [], OUT / "flat", time.time()

    def watch(progress):
        if progress.seen and progress.seen % 250 == 0 and (not seen or seen[-1][0] != progress.seen):
            seen.append((progress.seen, rss(), gpu_used()))

    record = tune(
        Problem(64, 64, 64),
        space=Space.load(folder / "some.toml"),
        budget="100000",
        root=root,
        strategy="random",
        watch=watch,
    )
    size = sum(path.stat().st_size for path in root.glob("*/*"))
    print(
        f"== flat: {dict(record.search.outcomes)}, {time.time() - start:.0f} s, "
        f"stages {dict(record.search.stages_s)}; "
        f"files {size >> 20} MiB"
    )
    print("   (seen, host MiB, GPU MiB):", seen)


def kill(times="10"):
    root, chance = OUT / "kill", random.Random(3)
    command = [
        sys.executable,
        "-m",
        "autotune",
        "tune",
        "--m",
        "512",
        "--n",
        "512",
        "--k",
        "512",
        "--cache",
        root,
        "--budget",
        "60",
    ]
    for _ in range(int(times)):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(chance.uniform(1, 5))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        process.wait()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = read(root)
    outcomes = Counter(line["id"] for line in lines if "outcome" in line and "event" not in line)
    started = Counter(line["id"] for line in lines if line.get("event") == "started")
    print(
        f"== kill: exit {done.returncode}, {len(outcomes)} candidates, twice an outcome: "
        f"{sum(n > 1 for n in outcomes.values())}, started twice: {sum(n > 1 for n in started.values())}, "
        f"runs {len({line['run'] for line in lines})}"
    )
    print(done.stdout[-600:])


def shared():
    other = subprocess.Popen(
        [
            sys.executable,
            "-c",
            """
import cupy as cp, time
a = cp.ones((4096, 4096), cp.float32)
b = cp.ones((4096, 4096), cp.float32)
end = time.time() + 40
while time.time() < end:
    for _ in range(20): a = a * 1.0001 + b
    cp.cuda.runtime.deviceSynchronize()
""",
        ]
    )
    time.sleep(3)
    record = tuned(OUT / "shared", 1024, 1024, 1024, "--budget", "30")
    other.kill()
    print(
        "== shared: noisy",
        record["timing"]["noisy"],
        record["timing"]["clocks"],
        record["timing"]["quantiles_ms"],
    )
    record = tuned(OUT / "shared", 1024, 1024, 1024, "--budget", "30")
    print(
        "== alone: noisy",
        record["timing"]["noisy"],
        record["timing"]["clocks"],
        record["timing"]["quantiles_ms"],
    )


if __name__ == "__main__":
    {"speed": speed, "torture": torture, "flat": flat, "kill": kill, "shared": shared}[sys.argv[1]](
        *sys.argv[2:]
    )
