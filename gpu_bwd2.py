"""Compares variants of the Hopper backward pass: `python3 gpu_bwd2.py [--seconds 185] [--ncu]`, on one or two GPUs.

Temporary. Each variant is a process that compiles, compares itself with float64 and with FlashAttention-2 (torch's),
checks dK and dV bitwise over repeats, and then is timed in turns with all others. A process that hangs is killed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time

BEGAN = time.monotonic()
HERE = os.path.dirname(os.path.abspath(__file__))


def gpus():
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        return visible.split(",")
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    return [str(i) for i in range(max(1, listed.count("UUID: GPU")))]


CARDS = gpus() if len(sys.argv) < 2 or not {"--serve", "--once"} & set(sys.argv) else ["0"]
GPUS = len(CARDS)


def environment(card):
    return {**os.environ, "PYTHONPATH": HERE, "CUDA_VISIBLE_DEVICES": CARDS[card]}


# name: (head dim, queries, way, longest first); way: 1 dQ's sum by threads, 2 numbers by the copy engine, 4 named barriers,
# 8 one loop with a branch for the mask, which keeps the exponentials before the wait for dP (only where not halves)
VARIANTS = {
    "64 present": (64, 128, 0, True),
    "64 linear": (64, 128, 1, True),
    "64 fetched": (64, 128, 2, True),
    "64 named": (64, 128, 4, True),
    "64 linear named": (64, 128, 5, True),
    "64 all": (64, 128, 7, True),
    "64 all, head by head": (64, 128, 7, False),
    "80 present": (80, 64, 0, False),
    "80 linear": (80, 64, 1, False),
    "80 fetched": (80, 64, 2, False),
    "80 named": (80, 64, 4, False),
    "80 all": (80, 64, 7, False),
    "128 present": (128, 64, 0, False),
    "128 linear": (128, 64, 1, False),
    "128 fetched": (128, 64, 2, False),
    "128 named": (128, 64, 4, False),
    "128 linear named": (128, 64, 5, False),
    "128 all": (128, 64, 7, False),
    "128 one loop": (128, 64, 8, False),
    "128 all, one loop": (128, 64, 15, False),
}
SHAPES = {
    64: [(1, 16, 16384, True), (4, 16, 4096, True), (1, 16, 16384, False)],
    128: [(1, 16, 16384, True), (4, 16, 4096, True), (4, 16, 4096, False), (1, 16, 16384, False)],
    80: [(4, 32, 2048, True)],
}
# issue 28's table, ms: ours forward, ours both, FA4 both
ISSUE = {
    (64, 1, 16, 16384, True): (1.236, 4.444, 3.880), (128, 1, 16, 16384, True): (1.831, 6.944, 6.546),
    (64, 4, 16, 4096, True): (0.356, 1.324, 1.134), (64, 1, 16, 16384, False): (2.343, 8.750, 7.492),
    (128, 4, 16, 4096, False): (0.947, 3.608, 3.334), (80, 4, 32, 2048, True): (0.253, 0.980, 0.827),
}  # fmt: skip
ODD = [(2, 4, 2, 515, 515), (1, 3, 3, 300, 1111), (2, 4, 1, 1111, 300), (1, 2, 2, 64, 2000), (1, 2, 2, 129, 1),
       (1, 2, 2, 1, 1), (3, 2, 2, 1200, 1200)]  # fmt: skip


def oracle(torch, q, k, v, g, causal):
    group = q.shape[1] // k.shape[1]
    q, k, v, g = (x.double() for x in (q, k, v, g))
    kk, vv = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ kk.mT / q.shape[-1] ** 0.5
    if causal:
        rows = torch.arange(s.shape[-2], device="cuda")[:, None]
        s = s.masked_fill(rows < torch.arange(s.shape[-1], device="cuda"), -float("inf"))
    lse = s.logsumexp(-1)
    p = (s - lse[..., None]).exp()
    out = p @ vv
    ds = p * (g @ vv.mT - (g * out).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
    back = lambda x: x.unflatten(1, (k.shape[1], group)).sum(2)
    return out, lse, ds @ kk, back(ds.mT @ q), back(p.mT @ g)


def serve(name, once_only):
    import torch
    from dataclasses import replace

    from kernels.attention.hopper import launch

    dim, queries, way, longest = VARIANTS[name]
    width = 64 if dim == 64 else 128
    how = launch.Backward(queries, 128, longest_first=longest, halves=dim == 64, way=way)
    launch.CHOICES[width] = replace(launch.CHOICES[width], backward=how, backward_short=how)
    generator = torch.Generator("cuda").manual_seed(0)
    draw = lambda *size: torch.randn(*size, device="cuda", generator=generator).bfloat16()

    def backward(g, q, k, v, out, lse, causal):
        results = [torch.full_like(x, float("nan")) for x in (q, k, v)]
        assert launch.backward(g, q, k, v, out, *results, lse, None, causal)
        return results

    def problem(batch, heads, length, causal):
        q, k, v, g = (draw(batch, heads, length, dim) for _ in range(4))
        with torch.no_grad():
            padded = [torch.nn.functional.pad(x, (0, width - dim)) for x in (q, k, v)]
            out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
                *padded, 0.0, causal, scale=dim**-0.5
            )
        return g, q, k, v, out[..., :dim].contiguous(), lse.contiguous(), causal

    if once_only:  # for ncu: one backward pass
        backward(*problem(*SHAPES[dim][0]))
        torch.cuda.synchronize()
        return
    worst = 0.0
    signal.alarm(80)
    for causal in (True, False):
        for batch, heads, key_heads, m, n in ODD:
            q, g = draw(batch, heads, m, dim), draw(batch, heads, m, dim)
            k, v = draw(batch, key_heads, n, dim), draw(batch, key_heads, n, dim)
            out, lse, *right = oracle(torch, q, k, v, g, causal)
            results = backward(g, q, k, v, out.bfloat16(), lse.float(), causal)
            for mine, true in zip(results, right, strict=True):
                scale = max(true.norm().item(), 1e-2 * right[2].norm().item())
                off = ((mine.double() - true).norm() / scale).item()
                worst = max(worst, off) if off == off else float("nan")
                if worst != worst or worst > 0.05:
                    print(f"{name}: WRONG {off:.2g} at {(batch, heads, key_heads, m, n, causal)}", flush=True)
                    os._exit(1)
    signal.alarm(25)
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    problems, notes = [], []
    for shape in SHAPES[dim]:
        args = problem(*shape)
        g, q, k, v = args[:4]
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            o = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=shape[3])
            theirs = torch.autograd.grad(o, leaves, g)
        first = backward(*args)
        errors = [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(first, theirs)]
        same = all(
            torch.equal(a, b) for _ in range(12) for a, b in zip(backward(*args)[1:], first[1:])
        )
        notes.append(f"{max(errors):.1e}{'' if same else ' RACE'}")
        room = [torch.empty_like(x) for x in (q, k, v)]
        problems.append((shape, args, room))
        del leaves, o, theirs, first
    torch.cuda.empty_cache()
    signal.alarm(0)
    print(f"{name}: float64 {worst:.1e}, FA2 {' '.join(notes)}", flush=True)
    print("ready", flush=True)
    for _turn in sys.stdin:
        signal.alarm(20)
        for shape, (g, q, k, v, out, lse, causal), room in problems:
            laps = 7 if shape[2] > 8192 else 15
            pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(laps + 2)]
            for begin, end in pairs:
                flush.zero_()
                torch.cuda._sleep(1_000_000)
                begin.record()
                launch.backward(g, q, k, v, out, *room, lse, None, causal)
                end.record()
            torch.cuda.synchronize()
            times = [a.elapsed_time(b) for a, b in pairs[2:]]
            print(f"T {shape} {statistics.median(times):.5f}", flush=True)
        signal.alarm(0)
        print("done", flush=True)


class Process:
    def __init__(self, name):
        self.name, self.lines = name, []
        self.card = int(GPUS > 1 and name.startswith("128"))
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--serve", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, env=environment(self.card),
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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=185)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--ncu", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--serve")
    parser.add_argument("--once")
    options = parser.parse_args()
    if options.serve or options.once:
        serve(options.serve or options.once, bool(options.once))
        return
    processes = [Process(name) for name in VARIANTS if re.search(options.only, name)]
    ready = []
    for process in processes:
        lines = process.wait("ready", left(0.6 * options.seconds))
        if lines is not None:
            print("\n".join(lines[-2:]), flush=True)
            ready.append(process)
    print(f"ready after {time.monotonic() - BEGAN:.0f} s", flush=True)
    times = {}
    spare = 36 if options.ncu else 4
    turns = [0, 0]

    def time_card(card):
        mine = [process for process in ready if process.card == card]
        for turn in range(options.turns):
            for process in list(mine if turn % 2 == 0 else reversed(mine)):
                if left(options.seconds) < spare:
                    return
                process.process.stdin.write("turn\n")
                process.process.stdin.flush()
                lines = process.wait("done", min(20, left(options.seconds)))
                if lines is None:
                    mine.remove(process)
                    continue
                for line in lines:
                    found = re.match(r"T (\(.*\)) ([0-9.]+)", line)
                    if found:
                        times.setdefault((process.name, eval(found[1])), []).append(float(found[2]))
            turns[card] += 1

    workers = [threading.Thread(target=time_card, args=(card,)) for card in range(min(2, GPUS))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for process in processes:
        process.process.kill()
    if options.ncu and shutil.which("ncu"):
        def profile_all(card):
            for name in [("64 present", "64 all"), ("128 present", "128 all, one loop")][card]:
                if left(options.seconds) > 10:
                    profile(name, min(22, left(options.seconds) - 2), card)

        workers = [threading.Thread(target=profile_all, args=(card,)) for card in range(min(2, GPUS))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    print(f"\n{turns} turns, {time.monotonic() - BEGAN:.0f} s; backward alone, ms by events, cold L2: median of turns "
          "(least, most) and ratio to present (least, most of turns); goal of the ratio by the issue's table")
    for (name, shape), mine in sorted(times.items(), key=lambda each: (list(VARIANTS).index(each[0][0]), str(each[0][1]))):
        dim = VARIANTS[name][0]
        base = times.get((f"{dim} present", shape), [])
        ratios = sorted(a / b for a, b in zip(mine, base))
        text = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} {ratios[-1]:.3f})" if ratios else "-"
        goal = ""
        if (dim, *shape) in ISSUE:
            forward, both, theirs = ISSUE[dim, *shape]
            goal = f"goal {(0.98 * theirs - forward) / (both - forward):.3f}"
        print(f"{name:28} {'x'.join(map(str, shape[:3])):>11} {'causal' if shape[3] else 'full':6} "
              f"{statistics.median(mine):8.4f} ({min(mine):.4f} {max(mine):.4f})  {text}  {goal}")


def profile(name, seconds, card):
    command = [
        "ncu", "--clock-control", "none", "-k", "regex:backward_kernel", "-c", "1", "--print-details", "all",
        "--section", "SpeedOfLight", "--section", "WarpStateStats", "--section", "ComputeWorkloadAnalysis",
        "--section", "MemoryWorkloadAnalysis", "--section", "SchedulerStats",
        "--metrics", "l1tex__data_bank_conflicts_pipe_lsu.sum,l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
        sys.executable, os.path.abspath(__file__), "--once", name,
    ]  # fmt: skip
    try:
        text = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=environment(card)
        ).stdout
    except subprocess.TimeoutExpired:
        print(f"ncu of {name}: more than {seconds:.0f} s")
        return
    if os.environ.get("OUT"):
        with open(os.path.join(os.environ["OUT"], f"ncu_{name.replace(' ', '_').replace(',', '')}.txt"), "w") as file:
            file.write(text)
    wanted = re.compile(r"tensor|stall|Duration|Throughput|SM Frequency|Issued|Eligible|conflict|wavefront", re.I)
    said = [f"ncu, {name}:"]
    for line in text.splitlines():
        if wanted.search(line) and not re.search(r"\s0(\.0+)?$", line) and "INF" not in line and "OPT" not in line:
            said.append("  " + re.sub(r"\s{2,}", "  ", line.strip())[:150])
    print("\n".join(said), flush=True)


if __name__ == "__main__":
    main()
