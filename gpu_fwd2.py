"""Compares variants of the Hopper forward kernel: `python3 gpu_fwd2.py [--seconds 145]`.

Temporary. Each variant is a process that compiles, compares itself with float64 in odd problems and with torch's
FlashAttention-2 in the timed ones, checks that repeats are equal bit by bit, and is then timed in turns with the others
of its GPU. A process that hangs is killed. Head dimension 64 runs on the first GPU, the others on the second.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time

BEGAN = time.monotonic()
LONG, SHORT = {"registers": 160}, {"query_stages": 2, "halves": True}
LONG_SHAPES = [(1, 16, 16384, False), (1, 16, 16384, True), (4, 16, 4096, False)]
SHORT_SHAPES = [(4, 16, 4096, True), (8, 16, 1024, True), (4, 25, 512, True)]
SHAPES = {
    "64L": [*LONG_SHAPES, *SHORT_SHAPES], "64S": SHORT_SHAPES,
    "128": [(4, 16, 4096, False), (1, 16, 16384, True)],
    "80": [(4, 32, 2048, True), (4, 16, 4096, False)], "256": [(2, 32, 8192, True)],
}  # fmt: skip
# name: (consumers, queries, keys, parameters); the family is the name's first word, and its first variant the present.
# Bits of `order`: 2 softmax before the wait for PV; 4 weights packed by one instruction; 8 sums per thread;
# 32 keys with the values before them; 64 one comparison for the mask; 128 narrow PV; 256 shrink behind the scores;
# 512 no turns.
VARIANTS = {
    "64L present": (3, 64, 128, {**LONG}),
    "64L packed, own sums": (3, 64, 128, {**LONG, "order": 12}),
    "64L held": (3, 64, 128, {**LONG, "order": 14}),
    "64L held, pairs": (3, 64, 128, {**LONG, "order": 110}),
    "64L held, pairs, 3 stages": (3, 64, 128, {**LONG, "order": 110, "stages": 3}),
    "64L held, pairs, 3 st, late shrink": (3, 64, 128, {**LONG, "order": 366, "stages": 3}),
    "64L held, pairs, 3 st, no turns": (3, 64, 128, {**LONG, "order": 622, "stages": 3}),
    "64L packed, pairs, 3 st": (3, 64, 128, {**LONG, "order": 108, "stages": 3}),
    "64S present": (2, 64, 128, {**SHORT}),
    "64S packed, own sums": (2, 64, 128, {**SHORT, "order": 12}),
    "64S held": (2, 64, 128, {**SHORT, "order": 14}),
    "64S held, pairs": (2, 64, 128, {**SHORT, "order": 110}),
    "64S held, pairs, 3 stages": (2, 64, 128, {**SHORT, "order": 110, "stages": 3}),
    "64S held, pairs, 3 st, late shrink": (2, 64, 128, {**SHORT, "order": 366, "stages": 3}),
    "64S held, pairs, 3 st, no turns": (2, 64, 128, {**SHORT, "order": 622, "stages": 3}),
    "128 present": (2, 64, 128, {}),
    "128 packed, own sums": (2, 64, 128, {"order": 12}),
    "128 held": (2, 64, 128, {"order": 14}),
    "128 held, pairs": (2, 64, 128, {"order": 110}),
    "128 held, pairs, late shrink": (2, 64, 128, {"order": 366}),
    "128 held, late shrink": (2, 64, 128, {"order": 334}),
    "128 held, pairs, no turns": (2, 64, 128, {"order": 622}),
    "80 present": (2, 64, 128, {}),
    "80 held": (2, 64, 128, {"order": 78}),
    "80 held, pairs": (2, 64, 128, {"order": 110}),
    "80 held, narrow": (2, 64, 128, {"order": 206}),
    "80 held, pairs, narrow": (2, 64, 128, {"order": 238}),
    "256 present": (2, 64, 64, {"own_room": False}),
    "256 held": (2, 64, 64, {"own_room": False, "order": 78}),
    "256 held, pairs": (2, 64, 64, {"own_room": False, "order": 110}),
    "256 held, pairs, late shrink": (2, 64, 64, {"own_room": False, "order": 366}),
    "256 held, late shrink": (2, 64, 64, {"own_room": False, "order": 334}),
    "64L cuDNN": None, "64S cuDNN": None, "128 cuDNN": None, "80 cuDNN": None, "256 cuDNN": None,
}  # fmt: skip
GPU_OF = {"64L": 0, "64S": 0, "128": 1, "80": 1, "256": 1}
# issue 28, ms: (ours, the best other one and its name)
ISSUE = {
    (64, 1, 16, 16384, False): (2.343, 2.136, "FA4"), (128, 4, 16, 4096, False): (0.947, 0.873, "FA4"),
    (64, 4, 16, 4096, True): (0.356, 0.341, "cuDNN"), (64, 8, 16, 1024, True): (0.065, 0.061, "cuDNN"),
    (64, 4, 25, 512, True): (0.025, 0.023, "cuDNN"), (80, 4, 32, 2048, True): (0.253, 0.243, "cuDNN"),
    (256, 2, 32, 8192, True): (3.54, 3.41, "cuDNN"),
}  # fmt: skip
ODD = [(2, 4, 2, 515, 515), (1, 3, 3, 300, 1111), (2, 4, 1, 1111, 300), (1, 2, 2, 64, 2000), (1, 2, 2, 129, 1),
       (1, 2, 2, 1, 1), (1, 2, 2, 193, 257), (3, 2, 2, 1200, 1200), (2, 16, 16, 1027, 1027)]  # fmt: skip


def dimension(family):
    return int(re.match(r"\d+", family)[0])


def oracle(q, k, v, causal):
    import torch

    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double() for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        rows = torch.arange(s.shape[-2], device="cuda")[:, None]
        s = s.masked_fill(rows < torch.arange(s.shape[-1], device="cuda"), -float("inf"))
    lse = s.logsumexp(-1)
    return (s - lse[..., None]).exp() @ v, lse


def fail(text):
    print(text, flush=True)
    os._exit(1)


def compare(name, dim, call, draw):
    """The largest error of the output against float64, in odd problems; ends the process if one is wrong."""
    import torch

    worst = 0.0
    dims = {64: (64, 40, 56), 128: (128, 104), 80: (80, 72, 96), 256: (256, 192)}[dim]
    for head_dim in dims:
        for causal in (True, False):
            if head_dim != dim and ("present" in name or causal):  # each kernel takes seconds to compile
                continue
            for number, (batch, heads, key_heads, m, n) in enumerate(ODD):
                # Steep scores and growing keys move the maximum often; fp16 at times.
                q, k = draw(batch, heads, m, head_dim) * (1 + number % 3), draw(batch, key_heads, n, head_dim)
                k = k * torch.linspace(0.2, 2, n, device="cuda")[:, None].to(k.dtype)
                v = draw(batch, key_heads, n, head_dim)
                if number in (0, 7) and not causal and head_dim == dim:
                    q, k, v = (x.half() for x in (q, k, v))
                right, right_lse = oracle(q, k, v, causal)
                out, lse = call(q, k, v, causal)
                off = ((out.double() - right).norm() / right.norm()).item()
                row_off = (out.double() - right).abs().max().item()
                lse_off = (lse.double() - right_lse).abs().max().item()
                worst = max(worst, off)
                if not (off < 6e-3 and lse_off < 2e-3 and row_off < 0.06):
                    problem = (head_dim, batch, heads, key_heads, m, n, causal)
                    fail(f"{name}: WRONG out {off:.2g} (most {row_off:.2g}), lse {lse_off:.2g} at {problem}")
    return worst


def serve(name):
    import torch

    family = name.split()[0]
    dim = dimension(family)
    generator = torch.Generator("cuda").manual_seed(0)
    draw = lambda *size: torch.randn(*size, device="cuda", generator=generator).bfloat16()
    worst = float("nan")
    if VARIANTS[name] is None:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def run(q, k, v, out, lse, causal):
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    else:
        from dataclasses import replace

        from kernels.attention.hopper import launch

        consumers, queries, keys, parameters = VARIANTS[name]
        how = launch.Forward(consumers, queries, keys, **parameters)
        width = launch.padded_width(dim)
        launch.CHOICES[width] = replace(launch.CHOICES[width], forward=how, forward_long=how)

        def run(q, k, v, out, lse, causal):
            assert launch.forward(q, k, v, out, lse, causal)

        def call(q, k, v, causal):
            out = torch.full_like(q, float("nan"))
            lse = torch.full(q.shape[:-1], float("nan"), device="cuda")
            run(q, k, v, out, lse, causal)
            torch.cuda.synchronize()
            return out, lse

        signal.alarm(85)
        worst = compare(name, dim, call, draw)
    signal.alarm(25)
    problems, notes = [], []
    for shape in SHAPES[family]:
        batch, heads, length, causal = shape
        q, k, v = (draw(batch, heads, length, dim) for _ in range(3))
        room = torch.empty_like(q), torch.empty(q.shape[:-1], device="cuda")
        problems.append((shape, (q, k, v, *room, causal)))
        if VARIANTS[name] is None:
            run(*problems[-1][1])
            continue
        first, lse = call(q, k, v, causal)
        with torch.no_grad():
            padded = [torch.nn.functional.pad(x, (0, width - dim)) for x in (q, k, v)]
            theirs, their_lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
                *padded, 0.0, causal, scale=dim**-0.5
            )
        off = ((first.float() - theirs[..., :dim].float()).norm() / theirs.float().norm()).item()
        same = True
        for _ in range(8):
            again, again_lse = call(q, k, v, causal)
            same = same and torch.equal(again, first) and torch.equal(again_lse, lse)
        notes.append(f"{off:.1e}{'' if same else ' RACE'}")
        if not off < 6e-3 or not (lse - their_lse).abs().max().item() < 2e-3:
            fail(f"{name}: WRONG {off:.2g} against FlashAttention-2 at {shape}")
    torch.cuda.empty_cache()
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    torch.cuda.synchronize()
    signal.alarm(0)
    print(f"{name}: float64 {worst:.1e}, FA2 {' '.join(notes)}", flush=True)
    print("ready", flush=True)
    for _turn in sys.stdin:
        signal.alarm(20)
        for shape, arguments in problems:
            laps = 7 if shape[2] >= 8192 else 15
            pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(laps + 2)]
            for begin, end in pairs:
                flush.zero_()
                torch.cuda._sleep(400_000)
                begin.record()
                run(*arguments)
                end.record()
            torch.cuda.synchronize()
            # 2.2 µs lie between two events beside the kernel.
            print(f"T {shape} {statistics.median(a.elapsed_time(b) for a, b in pairs[2:]) - 0.0022:.5f}", flush=True)
        signal.alarm(0)
        print("done", flush=True)


class Process:
    def __init__(self, name, gpus):
        self.name, self.gpu = name, gpus[GPU_OF[name.split()[0]] % len(gpus)]
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
            env={
                **os.environ, "PYTHONPATH": os.path.dirname(os.path.abspath(__file__)),
                "CUDA_VISIBLE_DEVICES": self.gpu, "OMP_NUM_THREADS": "1",
            },
        )  # fmt: skip

    def wait(self, word, seconds):
        timer = threading.Timer(max(1, seconds), self.process.kill)
        timer.start()
        lines = []
        try:
            for line in self.process.stdout:
                if line.strip() == word:
                    return lines
                lines.append(line.rstrip())
        finally:
            timer.cancel()
        print(f"{self.name}: ended with {self.process.wait()}: " + " | ".join(lines[-4:])[-700:], flush=True)
        return None


def left(limit):
    return limit - (time.monotonic() - BEGAN)


def measure(ready, options, times, turns, gpu):
    """Let the processes of one GPU take turns; an unfinished turn does not count."""
    for turn in range(options.turns):
        began = time.monotonic()
        if turn > 0 and left(options.seconds) < 1.2 * longest + 3:
            break
        found = []
        for process in list(ready if turn % 2 == 0 else reversed(ready)):
            process.process.stdin.write("turn\n")
            process.process.stdin.flush()
            lines = process.wait("done", min(20, left(options.seconds)))
            if lines is None:
                ready.remove(process)
                continue
            for line in lines:
                match = re.match(r"T (\(.*\)) (-?[0-9.]+)", line)
                if match:
                    found.append(((process.name, eval(match[1])), float(match[2])))
        for key, value in found:
            times.setdefault(key, []).append(value)
        longest = time.monotonic() - began
        turns[gpu] = turn + 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=140)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--only", default="")
    parser.add_argument("--serve")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    shown = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(i) for i in range(max(1, shown.count("GPU ")))]
    print(shown.strip(), flush=True)
    processes = [Process(name, gpus) for name in VARIANTS if re.search(options.only, name)]
    ready = []
    for process in processes:
        lines = process.wait("ready", left(0.6 * options.seconds))
        if lines is not None:
            print("\n".join(lines[-1:]), flush=True)
            ready.append(process)
    print(f"ready after {time.monotonic() - BEGAN:.0f} s", flush=True)
    times, turns, threads = {}, {}, []
    for gpu in gpus:
        mine = [process for process in ready if process.gpu == gpu]
        threads.append(threading.Thread(target=measure, args=(mine, options, times, turns, gpu)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    for process in processes:
        process.process.kill()
    report(times, turns)


def report(times, turns):
    print(f"\nturns {turns}, {time.monotonic() - BEGAN:.0f} s; forward, ms by events less 2.2 µs, cold L2: median of turns"
          " (least, most); ratio to present: median (least, most of turns); [goal]: the issue's best other / ours")
    families = list(dict.fromkeys(name.split()[0] for name in VARIANTS))
    for shape, family in [(shape, family) for family in families for shape in SHAPES[family]]:
        goal = ISSUE.get((dimension(family), *shape))
        aim = f"  [goal {goal[1] / goal[0]:.3f}, {goal[2]} {goal[1]}]" if goal else ""
        print(f"{dimension(family)}: {'x'.join(map(str, shape[:3]))} {'causal' if shape[3] else 'full'}{aim}")
        base = times.get((f"{family} present", shape), [])
        for name in VARIANTS:
            mine = times.get((name, shape))
            if name.split()[0] != family or not mine:
                continue
            ratios = sorted(a / b for a, b in zip(mine, base))
            text = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} {ratios[-1]:.3f})" if ratios else "-"
            print(f"  {name:36} {statistics.median(mine):8.4f} ({min(mine):.4f} {max(mine):.4f})  {text}")


if __name__ == "__main__":
    main()
